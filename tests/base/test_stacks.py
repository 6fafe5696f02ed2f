"""Stacks of what reads: the threads of feeds, the caller in ``next``, and workers, and no others."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.base import stacks
from meshfeed._src.base.child import ChildProcess
from meshfeed._src.base.read_ahead import ReadAhead
from meshfeed._src.base.stacks import feed_stacks
from meshfeed._src.base.threads import Background, Threads
from meshfeed._src.reading.workers import WorkerPool, pickle_task


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.fixture
def open_gate() -> Iterator[Callable[[], object]]:
    """What hangs until the end of the test."""
    gate = threading.Event()
    yield gate.wait
    gate.set()


def test_a_thread_of_a_feed_is_shown_where_it_hangs(open_gate: Callable[[], object]) -> None:
    def read_from_the_dead_disk() -> None:
        open_gate()

    thread = Background(read_from_the_dead_disk, "meshfeed-reader-train")
    thread.start()
    text = until(lambda: "in read_from_the_dead_disk" in (text := feed_stacks()) and text)
    assert "thread meshfeed-reader-train:\n" in text
    assert "open_gate()" in text, "the source line"


def test_threads_that_wait_for_work_or_are_none_of_ours_are_left_out(open_gate: Callable[[], object]) -> None:
    threading.Thread(target=open_gate, name="somebody-else", daemon=True).start()
    pool = Threads(1, "meshfeed-idle")
    pool.submit(int).result()
    full = ReadAhead(int, depth=lambda: 1, name="meshfeed-full")
    full.start()
    until(lambda: full.ready)
    try:
        until(lambda: not feed_stacks())
    finally:
        pool.close()
        full.stop()
        full.join()


def test_the_text_has_a_limit(open_gate: Callable[[], object]) -> None:
    def deep(n: int) -> None:
        deep(n - 1) if n else open_gate()

    for number in range(40):
        Background(lambda: deep(60), f"meshfeed-read-{number}").start()
    text = until(lambda: len(text := feed_stacks()) > 5_000 and text)
    assert len(text) <= stacks._MAX_CHARACTERS + 2
    assert text.split("thread ")[1].count("in deep") < 20, "the innermost calls of each"


@pytest.mark.slow
def test_a_worker_is_shown_with_its_request_also_while_it_holds_the_lock_of_python() -> None:
    def make_task() -> Callable[[Any], Any]:
        import re
        import time

        def decode_for_ever(request: str) -> None:
            if request == "sleep":
                time.sleep(1e6)
            re.match(r"(x+x+)+y", "x" * 40)  # in C, without a check for signals of Python

        return decode_for_ever

    for request in ("sleep", "compute"):
        pool: WorkerPool[str, None] = WorkerPool(1, pickle_task(make_task), name="train")
        try:
            until(pool.is_ready)
            assert pool.stacks() == [], "it is idle"
            pool.submit(0, request)
            text = until(lambda pool=pool: "in decode_for_ever" in (text := feed_stacks()) and text)
            assert f"worker 0 of 1 of train (process {pool.pids[0]}), working on '{request}':\n" in text
            assert "in watch" not in text
            with pytest.raises(meshfeed.StalledError) as caught:
                pool.result(0, 0.1)
            assert "in decode_for_ever" in caught.value.__notes__[0]
        finally:
            pool.close()
        assert pool.stacks() == [] or "in decode_for_ever" not in "".join(pool.stacks())


def test_looking_at_a_child_that_has_just_been_started_does_not_end_it() -> None:
    child = ChildProcess("meshfeed._src.base.child:serve")
    try:
        until(child.stacks)
        assert child.returncode is None
    finally:
        child.close()
    assert child.stacks() == ""


def test_the_caller_is_shown_while_it_reads_in_next(open_gate: Callable[[], object]) -> None:
    class Hangs:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, record_id: int) -> Any:
            if hanging:
                open_gate()
            return {"x": np.float32(record_id)}

    hanging = False
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    feed = meshfeed.Feed(Hangs(), mesh, global_batch_size=8, prefetch=0)
    hanging = True
    caller = threading.Thread(target=lambda: next(feed), name="training", daemon=True)
    caller.start()
    text = until(lambda: "in __getitem__" in (text := feed_stacks()) and text)
    assert "thread training:\n" in text
    assert "in __next__" in text


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_threads_are_looked_at(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    look, seen = sys._current_frames, list[bool]()

    def frames() -> Any:
        seen.append(gc.isenabled())
        return look()

    def fails() -> Any:
        raise MemoryError

    was_enabled = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        monkeypatch.setattr(sys, "_current_frames", frames)
        feed_stacks()
        assert (seen, gc.isenabled()) == ([False], collects)
        monkeypatch.setattr(sys, "_current_frames", fails)
        with pytest.raises(MemoryError):
            feed_stacks()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was_enabled else gc.disable)()


@pytest.mark.slow
def test_looking_at_threads_that_run_does_not_end_a_worker() -> None:
    def make_task() -> Callable[[Any], Any]:
        import threading
        import time

        def run() -> None:
            while True:
                list(nested(90))

        def nested(depth: int) -> Iterator[bytes]:  # frames whose memory is used for bytes at once
            if depth:
                yield from nested(depth - 1)
            yield bytes(range(depth, 255))

        def decode(request: str) -> None:
            for _ in range(3):
                threading.Thread(target=run, daemon=True).start()
            time.sleep(1e6)

        return decode

    pool: WorkerPool[str, None] = WorkerPool(1, pickle_task(make_task), name="train")
    try:
        until(pool.is_ready)
        pool.submit(0, "run")
        until(lambda: "in run" in feed_stacks())
        for _ in range(60):
            feed_stacks()  # incomplete if the machine is so busy that the worker does not answer in time
        until(lambda: "in decode" in feed_stacks())
        with pytest.raises(meshfeed.StalledError):
            pool.result(0, 0.1)
    finally:
        pool.close()
