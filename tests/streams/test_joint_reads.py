"""Small steps are read with one call of the source, and come as if each were read alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.base.errors import CorruptDataError
from meshfeed._src.streams import random_access_reader
from meshfeed.sources import Memory

DATA = {"x": np.arange(100 * 3, dtype=np.int32).reshape(100, 3)}
Reads = list[list[int]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """The record ids of each call of ``Memory.read_batch``, by all feeds of a test; no read is too slow to be joined."""
    calls: Reads = []
    inner = Memory.read_batch

    def read_batch(self: Memory, record_ids: np.ndarray, columns: Any = None) -> Any:
        calls.append(np.asarray(record_ids).tolist())
        return inner(self, record_ids, columns)

    monkeypatch.setattr(Memory, "read_batch", read_batch)
    monkeypatch.setattr(random_access_reader, "_JOINT_SECONDS", 60.0)
    return calls


def failing(monkeypatch: pytest.MonkeyPatch, error: Callable[[list[int]], Exception | None]) -> None:
    """Makes reads of ``Memory`` raise what ``error`` returns for their record ids."""
    inner = Memory.read_batch

    def read_batch(self: Memory, record_ids: np.ndarray, columns: Any = None) -> Any:
        raised = error(np.asarray(record_ids).tolist())
        if raised is not None:
            raise raised
        return inner(self, record_ids, columns)

    monkeypatch.setattr(Memory, "read_batch", read_batch)


def make_feed(source: Any, **options: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    options = {"global_batch_size": 8, "shuffle": True, "retry": meshfeed.Retry(initial_seconds=0), **options}
    return meshfeed.MultiHostDataLoadIterator(source, mesh, **options)


def batches(**options: Any) -> list[dict[str, list[Any]]]:
    with make_feed(Memory(DATA), **options) as feed:
        return [{name: np.asarray(leaf).tolist() for name, leaf in batch.items()} for batch in feed]


@pytest.mark.parametrize(
    "options",
    [
        {"num_epochs": 2},
        {"num_epochs": 1, "end": "pad", "mask_key": "mask"},
        {"num_epochs": 2, "global_batch_size": meshfeed.BatchSchedule([(0, 8), (3, 16), (5, 8)])},
        {"num_epochs": 1, "balance": None},
    ],
)
def test_the_batches_are_those_of_single_reads(reads: Reads, options: dict[str, Any]) -> None:
    alone = batches(prefetch=0, **options)
    assert max(map(len, reads)) <= 16
    single = len(reads)
    assert batches(prefetch=4, **options) == alone
    assert len(reads) - single < single


def test_as_many_steps_as_are_kept_ready_are_read_together(reads: Reads) -> None:
    batches(prefetch=3, num_epochs=1)
    assert [len(ids) for ids in reads if len(ids) >= 8] == [8, 24, 24, 24, 16]


def test_without_retries_each_step_is_read_alone(reads: Reads) -> None:
    batches(prefetch=4, num_epochs=1, retry=meshfeed.Retry(attempts=1))
    assert max(map(len, reads)) == 8


@pytest.mark.parametrize(("limit", "value"), [("_JOINT_BYTES", 8 * 12 + 1), ("_JOINT_SECONDS", 1e-9)])
def test_large_and_slow_steps_are_read_alone(
    reads: Reads, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    monkeypatch.setattr(random_access_reader, limit, value)
    batches(prefetch=4, num_epochs=1)
    assert max(map(len, reads)) == 8


def test_a_read_method_of_the_user_gets_the_records_of_one_step(reads: Reads) -> None:
    class Own(Memory):
        def read_batch(self, record_ids: Any, columns: Any = None) -> Any:
            return super().read_batch(record_ids, columns)

    with make_feed(Own(DATA), num_epochs=1, prefetch=4) as feed:
        assert len(list(feed)) == 12
    assert max(map(len, reads)) == 8


def delivered(feed: meshfeed.MultiHostDataLoadIterator) -> Iterator[list[int]]:
    for batch in feed:
        yield (np.asarray(batch["x"])[:, 0] // 3).tolist()


def test_an_error_comes_at_its_step(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = batches(prefetch=0, num_epochs=1)[6]["x"][5][0] // 3

    def error(ids: list[int]) -> Exception | None:
        return OSError("no longer there") if bad in ids else None

    failing(monkeypatch, error)
    found = []
    for prefetch in (0, 4):
        with make_feed(Memory(DATA), num_epochs=1, prefetch=prefetch) as feed:
            rows = []
            with pytest.raises(OSError, match="no longer there"):
                rows.extend(delivered(feed))
            found.append((rows, feed.get_state()))
    assert found[0] == found[1]
    assert max(map(len, reads)) > 8


def test_a_bad_record_is_replaced_in_its_step(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = batches(prefetch=0, num_epochs=1)[6]["x"][5][0] // 3

    def error(ids: list[int]) -> Exception | None:
        return CorruptDataError("damaged") if bad in ids else None

    failing(monkeypatch, error)
    found = []
    for prefetch in (0, 4):
        with make_feed(Memory(DATA), num_epochs=1, prefetch=prefetch, bad_records=meshfeed.SkipBad(0.1)) as feed:
            found.append((list(delivered(feed)), feed.get_state(), feed.stats().skipped_records))
    assert found[0] == found[1]
    assert found[0][2] == 1
    assert max(map(len, reads)) > 8


def test_a_read_that_fails_once_counts_as_retried(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[int] = []

    def error(ids: list[int]) -> Exception | None:
        if len(ids) > 8 and not failed:
            failed.extend(ids)
            return OSError("busy")
        return None

    failing(monkeypatch, error)
    with make_feed(Memory(DATA), num_epochs=1, prefetch=4) as feed:
        assert len(list(feed)) == 12
        assert feed.stats().retries == 1
    assert failed
