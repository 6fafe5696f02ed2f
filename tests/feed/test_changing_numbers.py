"""A feed with ``"auto"`` gives the same batches and states while its workers, threads and prefetched batches change."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from forced_numbers import ForcedNumbers
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.feed.sizing import Numbers
from meshfeed._src.reading import reads

AUTO: dict[str, Any] = {"num_workers": "auto", "num_threads": "auto", "prefetch": "auto"}
CHANGES = [Numbers(0, 1, 2), Numbers(0, 3, 5), Numbers(0, 2, 1), Numbers(0, 7, 3)]
WORKERS = [Numbers(1, 1, 2), Numbers(2, 1, 4), Numbers(0, 4, 2)]


class Records:
    """Records of their own number, in which the number of a record that was read twice at the same time would show."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, record_id: int) -> Any:
        return {"id": np.int64(record_id), "x": np.full(3, record_id % 7, np.float32)}

    def fingerprint(self) -> str:
        return f"{self._count} records"


def mixture() -> Any:
    parts = {"a": Records(300), "b": Records(77)}
    return meshfeed.sources.Mixture(parts, weights={"a": 0.7, "b": 0.3})


def lanes() -> Any:
    def open_lane(lane_index: int, num_lanes: int) -> Iterator[Any]:
        return ({"id": np.int64(n)} for n in range(lane_index, 403, num_lanes))

    return meshfeed.sources.Stream(open_lane)


def batches() -> Any:
    return meshfeed.sources.HostBatches([{"id": np.arange(8 * n, 8 * n + 8)} for n in range(50)])


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "random access": (lambda: Records(400), {"shuffle": True, "num_epochs": 2}),
    "random access, padded": (lambda: Records(397), {"shuffle": 32, "end": "pad", "mask_key": "mask"}),
    "mixture": (mixture, {"shuffle": True, "num_epochs": 1}),
    "ramp-up": (lambda: Records(400), {"global_batch_size": meshfeed.BatchSchedule([(0, 8), (5, 16), (9, 24)])}),
    "stream": (lanes, {"num_lanes": 4, "end": "pad", "mask_key": "mask"}),
    "host batches": (batches, {}),
}


def make_feed(kind: str, **options: Any) -> meshfeed.Feed:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    make_source, settings_of_kind = KINDS[kind]
    return meshfeed.Feed(make_source(), mesh, **{"global_batch_size": 8, **settings_of_kind, **options})


def value(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), batch)


def everything(feed: meshfeed.Feed) -> list[tuple[Any, str]]:
    return [(value(batch), json.dumps(feed.get_state())) for batch in feed]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    def ours() -> set[Any]:
        threads = {thread for thread in threading.enumerate() if thread.name.startswith("meshfeed")}
        return threads | {child.pid for child in psutil.Process().children(recursive=True)}

    others = ours()
    yield
    deadline = time.monotonic() + 20  # threads of a pool that was replaced end on their own
    while (left := ours() - others) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_prefetch_may_change_at_every_batch(kind: str) -> None:
    with make_feed(kind) as feed:
        expected = everything(feed)
    with make_feed(kind, **AUTO) as feed:
        forced = ForcedNumbers(feed, CHANGES)
        assert everything(feed) == expected
        assert "tuned" not in json.dumps(feed.config()["fingerprint"])
    assert len(forced.used) == (1 if kind == "host batches" else len(CHANGES))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "patient"), [("random access", True), ("ramp-up", True), ("mixture", False)])
def test_workers_may_come_and_go(kind: str, patient: bool) -> None:
    with make_feed(kind) as feed:
        expected = everything(feed)
    with make_feed(kind, **AUTO) as feed:
        forced = ForcedNumbers(feed, WORKERS, times=2 if patient else None, patient=patient)
        found: list[Any] = []
        for batch in feed:
            found.append((value(batch), json.dumps(feed.get_state())))
            deadline = time.monotonic() + 60
            # follow() runs once a step: give workers the time to start before the steps run out
            while patient and forced.reads.wanted.num_workers > forced.reads.in_use.num_workers:
                pending = feed._pipeline._reader._reads._coming
                if pending is None or pending.workers.is_ready() or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        assert found == expected
    assert not patient or {numbers.num_workers for numbers in forced.used} == {0, 1, 2}


@pytest.mark.slow
@settings(max_examples=20)
@given(data=st.data())
def test_any_change_at_any_batch_and_any_resume(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(KINDS)))
    one = st.builds(Numbers, st.just(0), st.integers(1, 9), st.integers(1, 6))
    numbers = data.draw(st.lists(one, min_size=1, max_size=6))
    with make_feed(kind) as feed:
        expected = everything(feed)
    with make_feed(kind, **AUTO) as feed:
        ForcedNumbers(feed, numbers, patient=data.draw(st.booleans()))
        states = [(0, feed.get_state())]
        for _ in range(data.draw(st.integers(1, 3))):
            for batch in itertools.islice(feed, data.draw(st.integers(0, 20))):
                assert (value(batch), json.dumps(feed.get_state())) == expected[feed.step - 1]
                states.append((feed.step, feed.get_state()))
            step, state = data.draw(st.sampled_from(states))
            feed.set_state(state)
            assert feed.step == step
        if data.draw(st.booleans()):
            feed.reset()
        step = feed.step
        assert [value(batch) for batch in feed] == [batch for batch, _ in expected[step:]]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["set_state", "reset", "close"])
def test_the_feed_moves_while_workers_start_and_while_they_leave(change: str) -> None:
    with make_feed("random access") as feed:
        expected = everything(feed)
    with make_feed("random access", **AUTO) as feed:
        forced = ForcedNumbers(feed, WORKERS, patient=False)
        for _ in range(2):
            state = feed.get_state()
            for batch, _ in zip(feed, range(5), strict=False):
                assert value(batch) == expected[feed.step - 1][0]
            if change == "close":
                break
            feed.set_state(state) if change == "set_state" else feed.reset()
        if change != "close":
            step = feed.step
            assert everything(feed) == expected[step:]
        assert forced.used


def test_numbers_survive_a_reset() -> None:
    with make_feed("random access", **AUTO) as feed:
        forced = ForcedNumbers(feed, [Numbers(0, 3, 4)])
        for _ in range(4):
            next(feed)
        forced._numbers = itertools.repeat(Numbers(0, 3, 4))
        feed.reset()
        next(feed)
        next(feed)
        assert forced.reads.in_use == (0, 3)
        assert feed._prefetch.depth == 4


def wait_for_workers(feed: meshfeed.Feed, forced: ForcedNumbers, number: int) -> list[int]:
    """Takes batches until so many workers read; returns their process ids."""
    deadline = time.monotonic() + 60
    while forced.reads.in_use.num_workers != number:
        next(feed)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [pid for group in feed._pipeline._reader._reads._groups for pid in group.workers._pool.pids]


@pytest.mark.slow
def test_a_killed_worker_costs_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    with make_feed("random access", **AUTO, num_epochs=None) as feed:
        forced = ForcedNumbers(feed, [Numbers(2, 1, 2)])
        pids = wait_for_workers(feed, forced, 2)
        os.kill(pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        left = 20
        while left:
            ids = feed.record_ids(feed.step).tolist()
            assert value(next(feed))["id"] == ids
            assert time.monotonic() < deadline
            left -= not forced.reads.in_use.num_workers
        assert "SIGKILL" in forced.reads.unchangeable["num_workers"]
    assert "reading without worker processes from now on" in caplog.text


@pytest.mark.slow
def test_a_worker_that_crashes_is_an_error_as_with_a_fixed_number() -> None:
    with make_feed("random access", **AUTO, num_epochs=None) as feed:
        forced = ForcedNumbers(feed, [Numbers(1, 1, 2)])
        os.kill(wait_for_workers(feed, forced, 1)[0], signal.SIGSEGV)
        with pytest.raises(meshfeed.SourceError, match="SIGSEGV"):
            list(feed)


class Unpicklable(Records):
    def __init__(self) -> None:
        super().__init__(80)
        self.lock = threading.Lock()


class Heavy(Records):
    """Picklable, and too large to be in every worker."""

    def __init__(self) -> None:
        super().__init__(80)

    def __reduce__(self) -> Any:
        return Heavy, (), {"ballast": b"x" * 4096}

    def __setstate__(self, state: Any) -> None:
        pass


class Elsewhere(Records):
    """Can be pickled, and not be unpickled."""

    def __init__(self) -> None:
        super().__init__(80)

    def __reduce__(self) -> Any:
        return int, ("there is no such license",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "why"),
    [(Unpicklable, "cannot be pickled"), (Heavy, r"takes [\d,]+ bytes in each worker"), (Elsewhere, "no such license")],
)
def test_a_source_that_workers_cannot_have_is_read_in_this_process(
    source: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if source is Heavy:
        monkeypatch.setattr(reads, "host_memory_bytes", lambda: 64 * 4096)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with meshfeed.Feed(source(), mesh, global_batch_size=8, num_epochs=None, num_workers="auto") as feed:
        forced = ForcedNumbers(feed, [Numbers(2, 1, 2)])
        deadline = time.monotonic() + 60
        while not forced.reads.unchangeable:
            step = feed.step
            assert np.asarray(next(feed)["id"]).tolist() == [n % 80 for n in range(8 * step, 8 * step + 8)]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert re.search(why, forced.reads.unchangeable["num_workers"])
    assert not caplog.records
