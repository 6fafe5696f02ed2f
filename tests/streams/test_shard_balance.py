"""Rows of equal attention for every device of a mesh whose sequence axis is divided: costs by hand, and spread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfeed._src.streams.balance import RowBalance, balanced_rows
from meshfeed.sources import Concat, Map, Mixture, Packed, Subset


class Documents:
    """Documents of known lengths."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, record_id: int) -> np.ndarray:
        return np.arange(self._lengths[record_id])

    def lengths(self) -> np.ndarray:
        return self._lengths


LOGNORMAL = np.minimum(np.random.default_rng(0).lognormal(5, 1.2, 20_000), 5000).astype(np.int64) + 1


def work(rows: dict[str, np.ndarray], kind: str, shards: int) -> np.ndarray:
    """Pairs of tokens that attend to each other in each shard, [rows, shards], by segment ids and positions alone."""
    of_rows = []
    for segments, positions in zip(rows["segment_ids"], rows["positions"], strict=True):
        sizes = np.bincount(segments)
        pairs = np.where(segments > 0, positions + 1 if kind == "causal" else sizes[segments], 0)
        of_rows.append(pairs.reshape(shards, -1).sum(1))
    return np.array(of_rows)


def spread(costs: np.ndarray, parts: int) -> float:
    """The most work of a device over the mean, of costs [rows, shards] and a number of parts of the rows."""
    of_devices = costs.reshape(parts, -1, costs.shape[1]).sum(1)
    return float(of_devices.max() / of_devices.mean())


@pytest.mark.parametrize("settings", [{}, {"align": 8, "bos_id": 3}, {"method": "fit", "max_segments": 6}])
def test_the_work_of_shards_is_that_of_the_rows(settings: dict[str, Any]) -> None:
    source = Packed(Documents(LOGNORMAL[:500]), 512, sequence_order=("zigzag", 4), **settings)
    shuffled = source.with_order(shuffle=True, seed=3)
    for packed, ids in ((source, np.arange(40)), (shuffled, len(source) + np.arange(40)[::-1])):
        assert packed.num_sequence_shards == 4
        np.testing.assert_array_equal(packed.shard_costs(ids), work(packed.read_batch(ids), "causal", 4))


def test_views_maps_and_mixtures_know_the_work_too() -> None:
    def packed(n: int) -> Packed:
        return Packed(Documents(LOGNORMAL[:n]), 512, sequence_order=("zigzag", 4))

    a, b = packed(300), packed(200)
    ids = np.array([3, 0, 7])
    for source, of_source in ((Subset(a, slice(5, None)), ids + 5), (Map(a, lambda record: record), ids)):
        np.testing.assert_array_equal(source.shard_costs(ids), a.shard_costs(of_source))  # type: ignore[union-attr]
    both = Concat([a, b])
    assert both.num_sequence_shards == 4
    np.testing.assert_array_equal(both.shard_costs(len(a) + ids), b.shard_costs(ids))
    mixture = Mixture({"a": a, "b": b}, {"a": 1, "b": 1})
    order = mixture.make_order(
        shuffle=False,
        seed=0,
        num_epochs=1,
        batch_sizes=[8],
        position_of_step=lambda step: 8 * step,
        segments=(),
        num_lanes=None,
    )
    record_ids = order.ids_between(0, 8)[0]
    np.testing.assert_array_equal(mixture.shard_costs(record_ids), work(mixture.read_batch(record_ids), "causal", 4))
    other = Packed(Documents(LOGNORMAL[:200]), 512, sequence_order=("zigzag", 2))
    striped = Packed(Documents(LOGNORMAL[:200]), 512, sequence_order=("striped", 4))
    assert Concat([a, other]).num_sequence_shards is Concat([a, striped]).num_sequence_shards is None
    assert striped.num_sequence_shards is None  # all its shards have equal work


@pytest.mark.parametrize("method", ["split", "fit"])
def test_striped_and_balanced_devices_have_equal_work(method: str) -> None:
    """Of 8 parts of the rows and 4 of the sequence; causal and bidirectional."""
    source = Packed(Documents(LOGNORMAL), 2048, method=method, sequence_order=("striped", 4))
    source = source.with_order(shuffle=True, seed=1)
    balance = RowBalance(source, "attention")
    for step in range(3):
        ids = step * 128 + np.arange(128)
        ordered = source.read_batch(ids[balance.rows(ids)])
        for kind in ("causal", "bidirectional"):
            assert spread(work(ordered, kind, 4), 8) <= 1.03
            assert spread(work(source.read_batch(ids), kind, 4), 8) > 1.1


@pytest.mark.parametrize("method", ["split", "fit"])
def test_zigzag_devices_come_close_to_what_the_columns_allow(method: str) -> None:
    source = Packed(Documents(LOGNORMAL), 2048, method=method, sequence_order=("zigzag", 4))
    source = source.with_order(shuffle=True, seed=1)
    balance = RowBalance(source, "attention")
    for step in range(3):
        ids = step * 128 + np.arange(128)
        costs = source.shard_costs(ids)
        found = spread(costs[balance.rows(ids)], 8)
        least = spread(costs, 1)  # no order of the rows changes the work of a shard of all rows
        assert least <= found <= least + 0.05
        assert found < spread(costs, 8) - 0.1


@given(st.data(), st.integers(1, 40), st.integers(1, 4))
def test_the_rows_are_a_permutation(data: st.DataObject, rows: int, shards: int) -> None:
    cost = st.lists(st.integers(0, 1 << 40), min_size=shards, max_size=shards)
    costs = np.array(data.draw(st.lists(cost, min_size=rows, max_size=rows)))
    np.testing.assert_array_equal(np.sort(balanced_rows(costs)), np.arange(rows))


def test_halves_are_equal_in_every_shard() -> None:
    costs = np.array([[9, 1], [1, 9], [9, 1], [1, 9]])
    found = costs[balanced_rows(costs)].reshape(2, 2, 2).sum(1)
    np.testing.assert_array_equal(found, [[10, 10], [10, 10]])


def test_fixed_values() -> None:
    """The order of rows is the same on every host and in every version."""
    costs = np.arange(48).reshape(16, 3) ** 3 % 101
    assert balanced_rows(costs).tolist() == [15, 8, 12, 0, 9, 4, 5, 3, 6, 2, 11, 13, 10, 14, 7, 1]


def test_other_balances_use_lengths() -> None:
    source = Packed(Documents(LOGNORMAL[:500]), 512, sequence_order=("zigzag", 4))
    plain = Packed(Documents(LOGNORMAL[:500]), 512)
    ids = np.arange(32)
    for balance in ("tokens", lambda lengths: float(len(lengths))):
        np.testing.assert_array_equal(RowBalance(source, balance).rows(ids), RowBalance(plain, balance).rows(ids))
    striped = Packed(Documents(LOGNORMAL[:500]), 512, sequence_order=("striped", 4))
    np.testing.assert_array_equal(RowBalance(striped, "attention").rows(ids), RowBalance(plain, "attention").rows(ids))
