"""Ctrl-C anywhere in ``next``, ``start``, ``reset`` and ``set_state``: no batch lost or repeated, no thread left."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted
from signal_storm import KINDS, make_feed

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
SOAK = bool(os.environ.get("MESHFEED_SOAK"))
RESTARTABLE = [kind for kind in KINDS if not kind.startswith("one-shot")]
STRIDE = 1 if SOAK else 13  # every bytecode takes minutes


# ---------------------------------------------------------------------- interrupts at chosen bytecodes


def points(seed: str) -> Iterator[int]:
    """0, 1, 2, … or, in the short form, about one in 13 of them."""
    draw = random.Random(seed)
    point = draw.randrange(STRIDE)
    while True:
        yield point
        point += 1 if SOAK else draw.randrange(1, 2 * STRIDE)


def ids(batch: Any) -> list[int]:
    return np.asarray(batch["id"]).tolist()


def batch_ids(step: int) -> list[int]:
    return list(range(8 * step, 8 * step + 8))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_in_the_first_next_loses_nothing(kind: str) -> None:
    swept = 0
    for point in points(f"first {kind}"):
        with make_feed(kind, num_batches=4) as feed:
            again = interrupted(lambda feed=feed: next(feed), point)
            assert feed.step == (0 if again else 1), point
            for step in range(feed.step, 4):
                assert ids(next(feed)) == batch_ids(step), point
                assert feed.step == step + 1
            with pytest.raises(StopIteration):
                next(feed)
        swept += again
        if not again:
            break
    assert swept > 150 // STRIDE


@pytest.mark.parametrize("then", ["next", "start", "close"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_in_start_loses_nothing_and_leaves_no_thread(kind: str, then: str) -> None:
    point = 0
    for point in points(f"start {kind} {then}"):
        with make_feed(kind, num_batches=3) as feed:
            again = interrupted(feed.start, point)
            assert feed.step == 0
            if then == "start":
                feed.start()
            for step in range(3 if then != "close" else 0):
                assert ids(next(feed)) == batch_ids(step), point
            feed.close()
            left = [thread.name for thread in threading.enumerate() if feed.name in thread.name and thread.is_alive()]
            assert not left, point
        if not again:
            break
    assert point > 15


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_in_the_first_next_after_start_loses_nothing(kind: str) -> None:
    point = 0
    for point in points(f"started {kind}"):
        with make_feed(kind, num_batches=3) as feed:
            feed.start()
            again = interrupted(lambda feed=feed: next(feed), point)
            assert feed.step == (0 if again else 1), point
            for step in range(feed.step, 3):
                assert ids(next(feed)) == batch_ids(step), point
            with pytest.raises(StopIteration):
                next(feed)
        if not again:
            break
    assert point > 15


@pytest.mark.parametrize("moment", ["reset", "set_state"])
@pytest.mark.parametrize("kind", RESTARTABLE)
def test_an_interrupt_in_the_first_next_after_a_new_place_loses_nothing(kind: str, moment: str) -> None:
    with make_feed(kind, num_batches=6) as feed:
        next(feed)
        state = feed.get_state()
        point = 0
        for point in points(f"{moment} {kind}"):
            next(feed)
            feed.reset() if moment == "reset" else feed.set_state(state)
            first = feed.step
            assert first == (0 if moment == "reset" else 1)
            again = interrupted(lambda: next(feed), point)
            for step in range(first + (not again), first + 3):
                assert feed.step == step
                assert ids(next(feed)) == batch_ids(step), point
            if not again:
                break
        assert point > 100


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_in_a_middle_next_loses_nothing(kind: str) -> None:
    with make_feed(kind, num_batches=4096) as feed:
        next(feed)
        point = 0
        for point in points(f"middle {kind}"):
            step = feed.step
            again = interrupted(lambda: next(feed), point)
            assert feed.step == step + (not again), point
            for later in range(feed.step, feed.step + 2):
                assert ids(next(feed)) == batch_ids(later), point
            if not again:
                break
        assert point > 30


def test_an_interrupt_in_next_counts_each_batch_once() -> None:
    with make_feed("random, prefetch 2", num_batches=4096) as feed:
        next(feed)
        for point in itertools.count():  # every one: few are where figures are added
            again = interrupted(lambda: next(feed), point)
            next(feed)
            stats = feed.stats()
            assert (stats.batches, stats.records, stats.bytes) == (feed.step, feed.position, 4 * feed.position), point
            if not again:
                break
        assert point > 30


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_in_the_last_next_and_behind_it_loses_nothing(kind: str) -> None:
    for before in (1, 2):  # the last batch, and the end
        point = 0
        for point in points(f"last {kind}"):
            with make_feed(kind, num_batches=2) as feed:
                for step in range(before):
                    assert ids(next(feed)) == batch_ids(step)
                again = interrupted(lambda feed=feed: next(feed), point)
                if again:
                    assert feed.step == before, point
                for step in range(feed.step, 2):
                    assert ids(next(feed)) == batch_ids(step), point
                with pytest.raises(StopIteration):
                    next(feed)
                assert feed.step == 2
            if not again:
                break
        assert point > 15


@pytest.mark.slow
@pytest.mark.parametrize("kind", RESTARTABLE)
@pytest.mark.parametrize("moment", ["reset", "set_state"])
def test_an_interrupt_in_reset_or_set_state_leaves_the_old_place_or_the_new(kind: str, moment: str) -> None:
    with make_feed(kind, num_batches=8) as feed:
        for _ in range(2):
            next(feed)
        state = feed.get_state()
        point = 0
        for point in points(f"{moment} itself {kind}"):
            feed.set_state(state)
            assert ids(next(feed)) == batch_ids(2)
            new = 0 if moment == "reset" else 2
            again = interrupted(feed.reset if moment == "reset" else lambda: feed.set_state(state), point)
            assert feed.step in ((new, 3) if again else (new,)), point
            for step in range(feed.step, feed.step + 3):
                assert ids(next(feed)) == batch_ids(step), point
            if not again:
                break
        assert point > 30


# ---------------------------------------------------------------------- real signals


@pytest.mark.slow
def test_real_signals_lose_nothing() -> None:
    """In a process of its own, where the timer is free and a stray signal hits no other test."""
    number = 2500 if SOAK else 132
    program = pathlib.Path(__file__).with_name("signal_storm.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program), str(number)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["signals"] >= number
    assert set(found["by_kind"].values()) == {-(-number // (3 * len(KINDS)))}
    assert found["wrong"] == 0, found
    assert not found["threads_left"]
