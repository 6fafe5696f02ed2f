"""A feed with ``"auto"`` gives the same batches and states while its workers, threads and prefetched batches change."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
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
from meshfeed._src.streams.lane_reader import LaneReader

pytestmark = pytest.mark.usefixtures("light_workers")

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


class Counted:
    """The numbers of one lane, with a state."""

    def __init__(self, lane_index: int, num_lanes: int, epoch: int, base: int) -> None:
        self._numbers = range(base + lane_index, base + 203, num_lanes)
        self._epoch, self._at = epoch, 0
        self._lock = threading.Lock()  # like an open file, it cannot be sent to a worker

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        if self._at == len(self._numbers):
            raise StopIteration
        self._at += 1
        return {"id": np.int64(self._numbers[self._at - 1]), "epoch": np.int64(self._epoch)}

    def get_state(self) -> Any:
        return {"at": self._at}

    def set_state(self, state: Any) -> None:
        self._at = state["at"]


def counted(base: int = 0) -> Any:
    return meshfeed.sources.Stream(
        lambda lane_index, num_lanes, epoch: Counted(lane_index, num_lanes, epoch, base), fingerprint=base
    )


class Parsed:
    """A stream that the feed decodes, with records that cannot be."""

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0) -> Any:
        return Counted(lane_index, num_lanes, epoch, 0)

    def decode(self, record: Any, rng: np.random.Generator) -> Any:
        if record["id"] % 11 == 3:
            raise ValueError(f"bad record {record['id']}")
        return {**record, "random": rng.integers(1 << 20)}

    def fingerprint(self) -> str:
        return "parsed"


def shuffled() -> Any:
    mapped = meshfeed.sources.Map(counted(), lambda record: {**record, "twice": 2 * record["id"]})
    return meshfeed.sources.ShuffleBuffer(mapped, 36)


def mixed_streams() -> Any:
    stages = [(0, {"a": 0.7, "b": 0.3}), (9, {"a": 0.2, "b": 0.4, "c": 0.4})]
    parts = {"a": counted(1000), "b": counted(2000), "c": {"id": np.arange(77), "epoch": np.zeros(77, np.int64)}}
    return meshfeed.sources.Mixture(parts, weights=stages)


def batches() -> Any:
    return meshfeed.sources.HostBatches([{"id": np.arange(8 * n, 8 * n + 8)} for n in range(50)])


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "random access": (lambda: Records(400), {"shuffle": True, "num_epochs": 2}),
    "random access, padded": (lambda: Records(397), {"shuffle": 32, "end": "pad", "mask_key": "mask"}),
    "mixture": (mixture, {"shuffle": True, "num_epochs": 1}),
    "ramp-up": (lambda: Records(400), {"global_batch_size": meshfeed.BatchSchedule([(0, 8), (5, 16), (9, 24)])}),
    "stream": (lanes, {"num_lanes": 4, "end": "pad", "mask_key": "mask"}),
    "stream with a state": (counted, {"num_lanes": 8, "end": "pad", "mask_key": "mask", "num_epochs": 4}),
    "decoded stream": (
        Parsed,
        {
            "num_lanes": 4,
            "num_epochs": 4,
            "bad_records": meshfeed.SkipBad(max_fraction=0.5),
            "global_batch_size": meshfeed.BatchSchedule([(0, 8), (5, 16), (9, 8)]),
        },
    ),
    "shuffled stream": (shuffled, {"num_lanes": 2, "num_epochs": 4}),
    "mixture of streams": (mixed_streams, {"num_lanes": 4, "end": "pad", "mask_key": "mask", "num_epochs": 2}),
    "host batches": (batches, {}),
}
STREAMS_WITH_STATE = ["stream with a state", "decoded stream", "shuffled stream", "mixture of streams"]


def make_feed(kind: str, **options: Any) -> meshfeed.Feed:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    make_source, settings_of_kind = KINDS[kind]
    return meshfeed.Feed(make_source(), mesh, **{"global_batch_size": 8, **settings_of_kind, **options})


def value(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), batch)


def state_of(feed: meshfeed.Feed) -> str:
    """The state without the snapshots of lanes: how often they are taken depends on what they cost."""
    state = feed.get_state()
    for lane in (state["lanes"] or {}).values() if "lanes" in state else ():
        for field in ("state", "skip", "digest"):
            del lane[field]
    return json.dumps(state)


def everything(feed: meshfeed.Feed) -> list[tuple[Any, str]]:
    return [(value(batch), state_of(feed)) for batch in feed]


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


def can_follow(feed: meshfeed.Feed) -> bool:
    """Whether the reader can come closer to the wanted numbers with the next step."""
    reader = feed._pipeline._reader
    if isinstance(reader, LaneReader):
        coming = reader._places._coming
        going = None if coming is None else coming._going
        return coming is None or (coming.lanes.is_ready() if going is None else going.done())
    pending = reader._reads._coming
    return pending is None or pending.pool.is_ready()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "patient"),
    [
        ("random access", True),
        ("ramp-up", True),
        ("mixture", False),
        *((kind, True) for kind in STREAMS_WITH_STATE),
        ("stream with a state", False),
    ],
)
def test_workers_may_come_and_go(kind: str, patient: bool) -> None:
    with make_feed(kind) as feed:
        expected = everything(feed)
    with make_feed(kind, **AUTO) as feed:
        forced = ForcedNumbers(feed, WORKERS, times=2 if patient else 6, patient=patient)
        found: list[Any] = []
        for batch in feed:
            found.append((value(batch), state_of(feed)))
            deadline = time.monotonic() + 60
            # follow() runs once a step: give workers the time to start before the steps run out
            while patient and forced.reads.wanted.num_workers != forced.reads.in_use.num_workers:
                if can_follow(feed) or time.monotonic() > deadline:
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
                assert (value(batch), state_of(feed)) == expected[feed.step - 1]
                states.append((feed.step, feed.get_state()))
            step, state = data.draw(st.sampled_from(states))
            feed.set_state(state)
            assert feed.step == step
        if data.draw(st.booleans()):
            feed.reset()
        step = feed.step
        assert [value(batch) for batch in feed] == [batch for batch, _ in expected[step:]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random access", "stream with a state"])
@pytest.mark.parametrize("change", ["set_state", "reset", "close"])
def test_the_feed_moves_while_workers_start_and_while_they_leave(change: str, kind: str) -> None:
    with make_feed(kind) as feed:
        expected = everything(feed)
    with make_feed(kind, **AUTO) as feed:
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
            found = [(value(batch), state_of(feed)) for batch in itertools.islice(feed, 20)]
            assert found == expected[step : step + 20]
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
        time.sleep(0.1)  # on a busy machine, workers may start slowly, and the feed may have an end
    reader = feed._pipeline._reader
    if isinstance(reader, LaneReader):
        return reader._places._lanes._pool.pids
    return [pid for group in reader._reads._groups for pid in group.pool.pids]


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


@pytest.mark.slow
def test_a_killed_worker_of_a_fixed_number_is_an_error_though_threads_are_auto() -> None:
    with make_feed("random access", num_workers=2, num_threads="auto", prefetch="auto", num_epochs=None) as feed:
        next(feed)
        (group,) = feed._pipeline._reader._reads._groups
        os.kill(group.pool.pids[0], signal.SIGKILL)
        with pytest.raises(meshfeed.SourceError, match="SIGKILL"):
            list(feed)


@pytest.mark.slow
def test_a_killed_worker_costs_no_batch_of_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    with make_feed("stream with a state", num_epochs=9) as feed:
        expected = everything(feed)
    with make_feed("stream with a state", **AUTO, num_epochs=9) as feed:
        forced = ForcedNumbers(feed, [Numbers(2, 1, 2)])
        pids = wait_for_workers(feed, forced, 2)
        os.kill(pids[1], signal.SIGKILL)
        step = feed.step
        assert everything(feed) == expected[step:]
        assert "SIGKILL" in forced.reads.unchangeable["num_workers"]
        assert forced.reads.in_use.num_workers == 0
    assert "reading without worker processes from now on" in caplog.text


@pytest.mark.slow
def test_a_killed_worker_of_a_fixed_number_is_an_error() -> None:
    with make_feed("stream with a state", num_workers=2, num_threads="auto", num_epochs=99) as feed:
        next(feed)
        os.kill(feed._pipeline._reader._places._lanes._pool.pids[1], signal.SIGKILL)
        with pytest.raises(meshfeed.SourceError, match="SIGKILL"):
            list(feed)


class Gated:
    """A stream whose lanes open in other processes only when a file exists."""

    def __init__(self, gate: str) -> None:
        self._gate, self._home = gate, os.getpid()

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0) -> Any:
        while os.getpid() != self._home and not os.path.exists(self._gate):
            time.sleep(0.01)
        return Counted(lane_index, num_lanes, epoch, 0)

    def fingerprint(self) -> str:
        return "gated"


@pytest.mark.slow
@pytest.mark.parametrize("then", ["opens", "close", "killed"])
def test_lanes_are_read_here_until_all_workers_have_opened_them(then: str, tmp_path: pathlib.Path) -> None:
    gate = tmp_path / "gate"
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    settings_of_feed: dict[str, Any] = {"global_batch_size": 8, "num_lanes": 4, "num_epochs": None}
    fixed = meshfeed.Feed(Gated(str(gate)), mesh, **settings_of_feed)
    with fixed, meshfeed.Feed(Gated(str(gate)), mesh, **settings_of_feed, num_workers="auto") as feed:
        forced = ForcedNumbers(feed, [Numbers(2, 1, 2)])
        while (coming := feed._pipeline._reader._places._coming if feed.step else None) is None or not coming._going:
            assert value(next(feed)) == value(next(fixed))
            time.sleep(0.01)
        for _ in range(30):  # the workers wait at the gate
            assert value(next(feed)) == value(next(fixed))
        assert forced.reads.in_use.num_workers == 0
        if then == "close":
            return
        if then == "killed":
            os.kill(coming.lanes._pool.pids[1], signal.SIGKILL)
        gate.touch()
        deadline = time.monotonic() + 60
        while forced.reads.in_use.num_workers != 2 and not forced.reads.unchangeable:
            assert value(next(feed)) == value(next(fixed))
            assert time.monotonic() < deadline
        assert (then == "killed") == ("num_workers" in forced.reads.unchangeable)
        for _ in range(30):
            assert value(next(feed)) == value(next(fixed))


def without_state(lane_index: int, num_lanes: int) -> Iterator[Any]:
    return ({"id": np.int64(n)} for n in range(lane_index, 403, num_lanes))


LANES_WITHOUT_STATE: dict[str, Callable[[], Any]] = {
    "stream": lambda: meshfeed.sources.Stream(without_state),
    "mapped": lambda: meshfeed.sources.Map(meshfeed.sources.Stream(without_state), dict),
    "shuffled": lambda: meshfeed.sources.ShuffleBuffer(meshfeed.sources.Stream(without_state), 16),
    "mixed": lambda: meshfeed.sources.Mixture(
        {"a": meshfeed.sources.Stream(without_state), "b": {"id": np.arange(99)}}, weights={"a": 1, "b": 1}
    ),
}


@pytest.mark.parametrize("kind", LANES_WITHOUT_STATE)
def test_lanes_without_a_state_stay_where_they_are(kind: str) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    source = LANES_WITHOUT_STATE[kind]()
    with meshfeed.Feed(source, mesh, global_batch_size=8, num_lanes=4, num_epochs=1, num_workers="auto") as feed:
        forced = ForcedNumbers(feed, [Numbers(2, 1, 2)])
        for _ in range(8):
            next(feed)
        assert "lane 0 has no state" in forced.reads.unchangeable["num_workers"]
        assert forced.reads.wanted.num_workers == 0
        assert feed._pipeline._reader._places._coming is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS_WITH_STATE)
def test_a_state_is_the_same_whoever_reads_the_lanes(kind: str) -> None:
    with make_feed(kind) as here, make_feed(kind, num_workers=3) as there:
        assert everything(here) == everything(there)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS_WITH_STATE)
def test_states_from_workers_and_from_after_them_continue(kind: str) -> None:
    with make_feed(kind) as feed:
        expected = everything(feed)
    states: dict[int, Any] = {}
    with make_feed(kind, **AUTO) as feed:
        forced = ForcedNumbers(feed, [Numbers(2, 1, 2), Numbers(0, 2, 2)])
        seen: set[tuple[int, bool]] = set()
        for _ in feed:
            deadline = time.monotonic() + 60
            while not can_follow(feed) and time.monotonic() < deadline:
                time.sleep(0.01)
            now = forced.reads.in_use.num_workers, bool(seen)
            if now not in seen and now != (0, False):
                seen.add(now)
                states[feed.step] = feed.get_state()
                if now == (0, True):  # further workers would take seconds to start
                    break
    assert seen == {(2, False), (2, True), (0, True)}
    with make_feed(kind) as feed:
        for step, state in states.items():
            feed.set_state(state)
            found = [(value(batch), state_of(feed)) for batch in itertools.islice(feed, 6)]
            assert found == expected[step : step + 6]


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
