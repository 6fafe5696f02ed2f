"""``feed.start``: the data is opened and read ahead in the background; nothing is lost, and no thread is left."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.feed.startup import Startup
from meshfeed.sources import HostBatches, Memory, Mixture, Stream

BATCH, STEPS = 8, 6
KINDS = ["random", "mixture", "streams", "mixture of streams", "batches"]
pytestmark = pytest.mark.usefixtures("no_thread_is_left")
JOIN_SECONDS = 60.0


class Gate:
    """Keeps the data from being opened or read until it is released.

    Attributes:
      armed: whether the feed has been created, which reads some records.
      reached: set once something has been asked for.
    """

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.armed = False

    def __call__(self) -> None:
        if not self.armed:
            return
        self.reached.set()
        assert self.opened.wait(JOIN_SECONDS)


class GatedMemory(Memory):
    """Records behind a gate."""

    def __init__(self, tree: Any, gate: Gate) -> None:
        super().__init__(tree)
        self._gate = gate

    def read_batch(self, record_ids: Any, columns: Any = None) -> Any:
        self._gate()
        return super().read_batch(record_ids, columns=columns)


class Batches:
    """Host batches behind a gate, with a state."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._taken = gate, 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        self._gate()
        if self._taken == STEPS:
            raise StopIteration
        self._taken += 1
        return {"id": np.arange(BATCH * (self._taken - 1), BATCH * self._taken, dtype=np.int32)}

    def get_state(self) -> int:
        return self._taken

    def set_state(self, state: int) -> None:
        self._taken = state


def make_feed(kind: str, gate: Gate, **options: Any) -> meshfeed.Feed:
    """Step k holds the ids 8k to 8k + 7, in some order if it is a mixture."""
    feed = _make_feed(kind, gate, **options)
    gate.armed = True
    return feed


def _make_feed(kind: str, gate: Gate, **options: Any) -> meshfeed.Feed:
    ids = np.arange(BATCH * STEPS, dtype=np.int32)

    def open_lane(lane_index: int, num_lanes: int) -> Iterator[Any]:
        gate()
        return ({"id": ids[n]} for n in range(lane_index, len(ids), num_lanes))

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    options.setdefault("timeout_seconds", JOIN_SECONDS)
    if kind == "random":
        return meshfeed.Feed(GatedMemory({"id": ids}, gate), mesh, global_batch_size=BATCH, **options)
    if kind == "mixture":
        parts = {name: GatedMemory({"id": ids[first::2]}, gate) for first, name in enumerate(("even", "odd"))}
        return meshfeed.Feed(Mixture(parts, {"even": 1, "odd": 1}, block=2), mesh, global_batch_size=BATCH, **options)
    if kind == "streams":
        return meshfeed.Feed(Stream(open_lane), mesh, global_batch_size=BATCH, num_lanes=8, **options)
    if kind == "mixture of streams":
        source = Mixture({"all": Stream(open_lane)}, {"all": 1}, block=2)
        return meshfeed.Feed(source, mesh, global_batch_size=BATCH, num_lanes=8, **options)
    return meshfeed.Feed(HostBatches(Batches(gate)), mesh, global_batch_size=BATCH, **options)


def ids(batch: Any) -> list[int]:
    return sorted(np.asarray(batch["id"]).tolist())


def batch_ids(step: int) -> list[int]:
    return list(range(BATCH * step, BATCH * (step + 1)))


def the_rest(feed: meshfeed.Feed) -> list[list[int]]:
    return [ids(batch) for batch in feed]


def expected(first: int = 0) -> list[list[int]]:
    return [batch_ids(step) for step in range(first, STEPS)]


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.mark.parametrize("kind", KINDS)
def test_start_returns_while_the_data_is_opened_and_reads_ahead(kind: str, gate: Gate) -> None:
    with make_feed(kind, gate) as feed:
        state = feed.get_state()
        feed.start()
        feed.start()
        assert gate.reached.wait(JOIN_SECONDS), "nothing is read without next"
        assert feed.get_state() == state
        assert (feed.step, feed.position) == (0, 0)
        gate.opened.set()
        assert the_rest(feed) == expected()
        feed.start()  # after the end
        with pytest.raises(StopIteration):
            next(feed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_can_be_replaced_at_any_time(kind: str, gate: Gate) -> None:
    with make_feed(kind, gate) as feed:
        gate.opened.set()
        for _ in range(2):
            next(feed)
        state = feed.get_state()
        for _ in range(3):
            feed.set_state(state)
            feed.start()
        feed.set_state(state)
        feed.start()
        assert the_rest(feed) == expected(2)
        feed.set_state(state)
        if kind != "batches":  # read once: a reset would need the first batch again
            feed.start()
            feed.reset()
            feed.start()
            assert the_rest(feed) == expected()


@pytest.mark.parametrize("kind", ["random", "mixture", "streams", "mixture of streams"])
def test_a_state_is_set_while_the_old_data_is_still_opened(kind: str, gate: Gate) -> None:
    with make_feed(kind, gate) as feed:
        gate.opened.set()
        next(feed)
        state = feed.get_state()
        feed.reset()
        gate.opened.clear()
        gate.reached.clear()
        feed.start()
        assert gate.reached.wait(JOIN_SECONDS)
        opener = threading.Timer(0.2, gate.opened.set)  # for sources that a state opens
        opener.start()
        feed.set_state(state)
        assert feed.step == 1
        assert the_rest(feed) == expected(1)
        opener.join()


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_feed_shows_is_the_same_while_it_starts(kind: str, prefetch: int, gate: Gate) -> None:
    gate.opened.set()
    with make_feed(kind, gate) as feed:
        spec = feed.element_spec
    for _ in range(20):
        gate = Gate()
        gate.opened.set()
        with make_feed(kind, gate, prefetch=prefetch) as feed:
            feed.start()
            assert jax.tree.map(lambda leaf: leaf.shape, feed.element_spec) == jax.tree.map(
                lambda leaf: leaf.shape, spec
            )
            assert feed.config()["name"] == feed.name
            assert the_rest(feed) == expected()


@pytest.mark.parametrize("kind", ["streams", "mixture of streams"])
def test_errors_come_from_the_next_next(kind: str) -> None:
    def open_lane(lane_index: int, num_lanes: int) -> Any:
        raise PermissionError("no such bucket")

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    stream: Any = Stream(open_lane)
    source = stream if kind == "streams" else Mixture({"all": stream}, {"all": 1})
    feed = meshfeed.Feed(source, mesh, global_batch_size=8, retry=meshfeed.Retry(attempts=1))
    with feed:
        feed.start()
        feed.start()
        for _ in range(2):
            with pytest.raises(PermissionError, match="no such bucket"):
                next(feed)
        feed.start()  # changes nothing
        with pytest.raises(PermissionError, match="no such bucket"):
            next(feed)


def test_a_source_that_hangs_is_reported_by_next(gate: Gate) -> None:
    with make_feed("streams", gate, timeout_seconds=0.6) as feed:
        feed.start()
        with pytest.raises(meshfeed.StalledError, match=r"host 0 itself is late: it is (opening|reading)"):
            next(feed)
        gate.opened.set()


def test_after_close_start_raises_like_next(gate: Gate) -> None:
    feed = make_feed("random", gate)
    feed.close()
    for call in (feed.start, lambda: next(feed)):
        with pytest.raises(meshfeed.MeshfeedError, match="is closed"):
            call()


def test_start_during_next_raises(gate: Gate) -> None:
    with make_feed("random", gate) as feed:
        taken: list[Any] = []
        thread = threading.Thread(target=lambda: taken.append(next(feed)))
        thread.start()
        assert gate.reached.wait(JOIN_SECONDS)
        with pytest.raises(meshfeed.MeshfeedError, match="one thread"):
            feed.start()
        gate.opened.set()
        thread.join()
        assert ids(taken[0]) == batch_ids(0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_started_feed_that_is_dropped_leaves_no_thread(kind: str, gate: Gate) -> None:
    gate.opened.set()
    feed = make_feed(kind, gate)
    feed.start()
    name = feed.name
    del feed
    gc.collect()  # the finalizer does not wait for a source that is still being opened
    end = time.monotonic() + JOIN_SECONDS
    while any(name in thread.name for thread in threading.enumerate()):  # also those that are just being started
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_close_ends_all_threads_at_any_moment(kind: str) -> None:
    """Of the startup: before it, while the data is opened, while the pipeline starts, and after it."""
    draw = random.Random(kind)
    for number in range(60):
        gate = Gate()
        gate.opened.set()
        feed = make_feed(kind, gate, prefetch=number % 3)
        feed.start()
        until = time.perf_counter() + draw.choice((0.0, draw.uniform(0, 0.002), draw.uniform(0, 0.01)))
        while time.perf_counter() < until:
            pass
        feed.close()
        left = [thread.name for thread in threading.enumerate() if feed.name in thread.name and thread.is_alive()]
        assert not left


@pytest.mark.parametrize("kind", ["streams", "mixture of streams"])
def test_close_waits_for_a_source_that_is_being_opened(kind: str, gate: Gate) -> None:
    feed = make_feed(kind, gate)
    feed.start()
    assert gate.reached.wait(JOIN_SECONDS)
    opener = threading.Timer(0.3, gate.opened.set)
    opener.start()
    feed.close()
    assert gate.opened.is_set()
    opener.join()


def test_a_startup_refers_to_nothing_that_keeps_its_feed(gate: Gate) -> None:
    feed = make_feed("streams", gate)
    feed.start()
    assert gate.reached.wait(JOIN_SECONDS)
    startup = feed._startup
    assert startup is not None
    opener = threading.Timer(0.2, gate.opened.set)
    opener.start()
    del feed
    gc.collect()
    with pytest.raises(meshfeed.MeshfeedError, match="closed"):
        startup.pipeline()
    opener.join()
    assert startup._opening.join(JOIN_SECONDS)  # a dropped feed does not wait for it


def wrapped(kind: str, gate: Gate) -> tuple[Any, Callable[[], int]]:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    if kind == "maxtext":
        loader = meshfeed.maxtext.MultiHostDataLoadIterator(Batches(gate), mesh)
        return loader, lambda: loader.step
    values = np.arange(BATCH * STEPS, dtype=np.int32)
    feed = meshfeed.remote.RemoteFeed(lambda: {"id": values}, mesh, global_batch_size=BATCH)
    return feed, lambda: feed.step


@pytest.mark.parametrize("kind", ["maxtext", "remote"])
def test_feeds_around_a_feed_start_it(kind: str, gate: Gate) -> None:
    gate.opened.set()
    feed, step_of = wrapped(kind, gate)
    with feed:
        feed.start()
        feed.start()
        assert step_of() == 0
        assert [ids(next(feed)) for _ in range(STEPS)] == expected()
    with pytest.raises(meshfeed.MeshfeedError, match="closed"):
        feed.start()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_set_before_the_start_gets_to_its_data(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, gate = Startup._run, Gate()
    gate.opened.set()
    with make_feed(kind, gate) as feed:
        expected = [ids(batch) for batch in feed]
        feed.reset()
        next(feed)
        state = feed.get_state()

    def run_late(startup: Startup) -> Any:
        time.sleep(0.3)
        return run(startup)

    monkeypatch.setattr(Startup, "_run", run_late)
    with make_feed(kind, gate) as feed:
        feed.start()
        feed.set_state(state)
        assert [ids(batch) for batch in feed] == expected[1:]


@pytest.mark.parametrize("leaving", [None, "closed its feed"])
def test_a_feed_that_leaves_before_it_has_begun_tells_others_only_if_it_is_to(leaving: str | None) -> None:
    told: list[Any] = []
    call = SimpleNamespace(join=lambda seconds: True, discard=lambda function: None, succeeded=False)
    opening = SimpleNamespace(wake=lambda: None, discard=lambda function: None)
    startup = SimpleNamespace(
        _owner=SimpleNamespace(is_here=True), _opening=opening, _call=call, _reader=None,
        _generation=SimpleNamespace(name="mine", cursor=SimpleNamespace(step=3)),
        _handshake=SimpleNamespace(abandon=told.append),
    )  # fmt: skip
    Startup.close(startup, leaving)  # type: ignore[arg-type]
    assert len(told) == 1
    assert (told[0] is None) == (leaving is None)
    assert leaving is None or leaving in str(told[0])
