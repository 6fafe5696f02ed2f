"""Costs of rows from the lengths of their segments, and the errors of sources and functions that give none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshfeed import SettingsError, SourceError
from meshfeed._src.streams import balance as streams_balance
from meshfeed._src.streams.balance import RowBalance
from meshfeed.sources import Concat, Mixture, Subset

LENGTHS = np.array([1, 8, 2, 7, 3, 6, 4, 5])


class Records:
    """Records of known lengths."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, record_id: int) -> Any:
        raise AssertionError("balance reads no record")

    def lengths(self) -> np.ndarray:
        return LENGTHS


class Rows(Records):
    """Rows of several segments: record i has i % 3 + 1 segments of its length."""

    def row_lengths(self, record_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = record_ids % 3 + 1
        return np.repeat(LENGTHS[record_ids], counts), np.concatenate([[0], np.cumsum(counts)])


def costs_of(source: Any, balance: Any, record_ids: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seen: list[np.ndarray] = []
    monkeypatch.setattr(streams_balance, "balanced_rows", lambda costs: seen.append(costs) or np.arange(len(costs)))
    np.testing.assert_array_equal(RowBalance(source, balance).rows(record_ids), np.arange(len(record_ids)))
    return seen[0].tolist()


def test_the_cost_of_a_record_comes_from_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.array([7, 6, 5, 1])
    assert costs_of(Records(), "tokens", ids, monkeypatch) == [5, 4, 6, 8]
    assert costs_of(Records(), "attention", ids, monkeypatch) == [25, 16, 36, 64]
    assert costs_of(Records(), lambda lengths: lengths.sum() ** 3, ids, monkeypatch) == [125, 64, 216, 512]


def test_a_function_gets_int64_whatever_the_source_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = Records()
    source.lengths = lambda: (20 * LENGTHS).astype(np.uint8)
    assert costs_of(source, lambda lengths: (lengths**2).sum(), np.array([0, 1]), monkeypatch) == [400, 25_600]


def test_the_cost_of_a_row_is_that_of_all_its_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.array([0, 1, 2, 5])  # 1, 2, 3 and 3 segments of 1, 8, 2 and 6
    assert costs_of(Rows(), "tokens", ids, monkeypatch) == [1, 16, 6, 18]
    assert costs_of(Rows(), "attention", ids, monkeypatch) == [1, 128, 12, 108]
    assert costs_of(Rows(), lambda lengths: len(lengths) + lengths[0], ids, monkeypatch) == [2, 10, 5, 9]


def test_rows_of_equal_cost_are_spread_over_the_batch() -> None:
    rows = RowBalance(Records(), "tokens").rows(np.arange(8))
    assert LENGTHS[rows].reshape(2, -1).sum(axis=1).tolist() == [18, 18]


def test_costs_beyond_int64_do_not_wrap() -> None:
    class Long(Records):
        def __len__(self) -> int:
            return 4

        def lengths(self) -> np.ndarray:
            return np.array([1 << 62, 1, 1 << 62, 1])

    rows = RowBalance(Long(), "attention").rows(np.arange(4))
    assert sorted(rows[:2] % 2) == sorted(rows[2:] % 2) == [0, 1]


def test_a_source_without_lengths_is_refused() -> None:
    with pytest.raises(SettingsError) as refused:
        RowBalance([1, 2], "tokens")
    assert str(refused.value) == (
        "balance='tokens' needs the lengths of the records, which a source of kind 'list' does not provide. Use Packed, or "
        "define lengths() -> int[records] on the source."
    )
    assert refused.value.setting == "balance"


@pytest.mark.parametrize("returned", [None, "much", -1.0, float("inf"), float("nan"), np.ones(2)])
def test_a_function_must_return_a_cost(returned: Any) -> None:
    def cost(lengths: np.ndarray) -> Any:
        return returned

    with pytest.raises(SettingsError) as refused:
        RowBalance(Records(), cost).rows(np.array([1]))
    assert str(refused.value) == (
        f"balance={cost!r} returned {returned!r} for the segment lengths [8]; it takes a function that returns one finite "
        "number of at least 0."
    )
    assert refused.value.setting == "balance"


def test_stop_iteration_is_not_the_end_of_the_data() -> None:
    def cost(lengths: np.ndarray) -> float:
        raise StopIteration

    with pytest.raises(SourceError, match="raised StopIteration, which does not end the data"):
        RowBalance(Records(), cost).rows(np.array([1]))


def test_a_cost_of_zero_is_a_cost() -> None:
    np.testing.assert_array_equal(np.sort(RowBalance(Records(), lambda lengths: 0).rows(np.arange(4))), np.arange(4))


@pytest.mark.parametrize(
    ("make", "ids"),
    [
        (lambda view, records: Mixture({"a": view, "b": records}, {"a": 1, "b": 1}), [0, 2, 1 << 48, 1 << 48 | 3]),
        (lambda view, records: Concat([view, Rows(), records]), [0, 2, 8, 19]),
    ],
)
def test_lengths_of_parts_are_taken_once_and_not_for_each_batch(make: Any, ids: list[int]) -> None:
    """A view makes them from those of all records of its source."""
    taken: list[int] = []

    class Counted(Records):
        def lengths(self) -> np.ndarray:
            taken.append(len(self))
            return LENGTHS

    source = make(Subset(Counted(), slice(None, None, -1)), Counted())
    for _ in range(3):
        lengths, splits = source.row_lengths(np.array(ids))
        assert (lengths.tolist(), splits.tolist()) == ([5, 6, 1, 7], [0, 1, 2, 3, 4])
    assert len(taken) == 2
