"""Reads that hang must not keep a feed, or the process, from ending."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.base import read_ahead
from meshfeed._src.base import threads as base_threads


def test_map_keeps_the_order_and_raises_what_was_raised() -> None:
    threads = base_threads.Threads(3, "test")
    assert threads.map(lambda value: value * 2, range(20)) == [2 * value for value in range(20)]
    with pytest.raises(ZeroDivisionError):
        threads.map(lambda value: 1 // value, [1, 0, 2])
    threads.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-")]


def test_threads_start_as_work_arrives_and_end_with_their_owner() -> None:
    def running() -> int:
        return sum(thread.name.startswith("owned-") for thread in threading.enumerate())

    def until(wanted: int) -> int:
        deadline = time.monotonic() + 30
        while running() != wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        return running()

    threads = base_threads.Threads(3, "owned")
    assert running() == 0
    assert threads.submit(pow, 2, 3).result() == 8
    assert running() == 1
    threads.map(str, range(10))
    assert until(3) == 3
    del threads
    assert until(0) == 0


def test_shutdown_finishes_what_was_submitted_and_close_does_not() -> None:
    for how in ("shutdown", "close"):
        go_on, begun, done = threading.Event(), threading.Event(), []

        def wait(go_on: threading.Event = go_on, begun: threading.Event = begun) -> None:
            begun.set()
            go_on.wait(30)

        threads = base_threads.Threads(1, "ends")
        first = threads.submit(wait)
        second = threads.submit(done.append, 1)
        assert begun.wait(30)
        threads.shutdown(wait=False, cancel_futures=how == "close")
        with pytest.raises(RuntimeError, match="the thread pool 'ends' is closed"):
            threads.submit(print)
        go_on.set()
        first.result()
        threads.close()
        assert (second.done(), second.succeeded, done) == (
            (True, True, [1]) if how == "shutdown" else (True, False, [])
        )


def test_work_submitted_while_another_thread_closes_the_pool_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = base_threads.Threads(1, "ends")
    threads.submit(str).result()
    partial = functools.partial

    def closed_meanwhile(*args: Any) -> Any:
        monkeypatch.undo()
        threads.close()
        return partial(*args)

    monkeypatch.setattr("functools.partial", closed_meanwhile)
    call = threads.submit(str)
    assert call.done()
    with pytest.raises(meshfeed.MeshfeedError, match="closed"):
        call.result()


def test_a_close_that_hangs_is_not_waited_for(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_threads, "_CLOSE_SECONDS", 0.1)
    go_on = threading.Event()

    class Reader:
        def close(self) -> None:
            go_on.wait(30)

    class Failing:
        def close(self) -> None:
            raise ValueError("generator already executing")

    base_threads.close_within(object())  # nothing to close
    base_threads.close_within(Reader())
    assert "close() of a Reader has not returned" in caplog.text
    with pytest.raises(ValueError, match="already executing"):
        base_threads.close_within(Failing())
    go_on.set()


@pytest.mark.parametrize("kind", ["threads", "lane", "lanes", "batches"])
def test_a_feed_whose_read_hangs_can_be_closed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_JOIN_SECONDS", 0.2)
    monkeypatch.setattr(base_threads, "_CLOSE_SECONDS", 0.2)
    go_on = threading.Event()

    class Records:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, record_id: int) -> Any:
            if record_id == 8:
                go_on.wait(60)
            return {"x": np.float32(record_id)}

        def fingerprint(self) -> str:
            return "records"

    def open_lane(lane_index: int, num_lanes: int) -> Iterator[Any]:
        for number in range(9):
            if number == 1:
                go_on.wait(60)
            yield {"x": np.float32(number)}

    def batches() -> Iterator[Any]:
        for number in range(9):
            if number == 1:
                go_on.wait(60)
            yield {"x": np.full(8, number, np.float32)}

    source, options = {
        "threads": (Records(), {"num_threads": 2}),
        "lane": (meshfeed.sources.Stream(open_lane), {"num_lanes": 8}),
        "lanes": (meshfeed.sources.Stream(open_lane), {"num_lanes": 8, "num_threads": 2}),
        "batches": (batches(), {}),
    }[kind]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    others = set(threading.enumerate())
    feed = meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=8, timeout_seconds=0.5, **options)
    try:
        next(feed)
        with pytest.raises(meshfeed.StalledError, match="itself is late"):
            next(feed)
        start = time.monotonic()
        feed.close()
        assert time.monotonic() - start < 30, "the read hangs for a minute"
        ours = [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("meshfeed")]
        assert ours
        assert all(thread.daemon for thread in ours), "the interpreter would wait for them at its exit"
    finally:
        go_on.set()


@pytest.mark.slow
def test_dropping_records_may_take_longer_than_the_time_out_and_hanging_there_may_not() -> None:
    go_on = threading.Event()
    delay, hangs_at, failed = 0.0, -1, False

    def open_lane(lane_index: int, num_lanes: int) -> Iterator[Any]:
        nonlocal failed, delay
        for number in range(240):
            if number == hangs_at:
                go_on.wait(20)
            if number == 200 and not failed:
                failed, delay = True, 0.02  # the lane is opened again, and 200 records are dropped in 4 seconds
                raise OSError("a blip")
            if number < 200:
                time.sleep(delay)
            yield {"x": np.float32(number)}

    def make_feed() -> meshfeed.MultiHostDataLoadIterator:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        options: dict[str, Any] = {"global_batch_size": 8, "num_lanes": 1, "timeout_seconds": 1.5}
        retry = meshfeed.Retry(initial_seconds=0)
        return meshfeed.MultiHostDataLoadIterator(meshfeed.sources.Stream(open_lane), mesh, retry=retry, **options)

    with make_feed() as feed:
        rows = [np.asarray(next(feed)["x"]) for _ in range(25)]
        state = feed.get_state()
        rows += [np.asarray(batch["x"]) for batch in feed]
        assert np.concatenate(rows).tolist() == list(range(240))
    with make_feed() as feed:
        feed.set_state(state)
        assert np.asarray(next(feed)["x"]).tolist() == list(range(200, 208))
    delay, hangs_at = 0.0, 100
    with make_feed() as feed:
        try:
            with pytest.raises(
                meshfeed.StalledError, match="it is resuming lane 0: dropped 100 of 200 records"
            ) as caught:
                feed.set_state(state)
        finally:
            go_on.set()
        assert caught.value.hosts == (0,)
        assert feed.step == 0
        assert np.asarray(next(feed)["x"]).tolist() == list(range(8))


def test_a_function_runs_although_no_further_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done = threading.Event()
    thread = base_threads.Background(done.set, "last")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", cannot_start)
        thread.start()
        assert done.wait(30)
    assert thread.join(30)
