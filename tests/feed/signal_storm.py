"""Real signals during ``next``, in a process of their own: each trial sets a timer, and its signal raises KeyboardInterrupt.

Run as a program with the number of signals; prints a JSON object of figures.

``for`` binds a batch before Python looks for signals, so whatever the feed counted has reached the caller. ``batch =
next(feed)`` looks for signals once more between the return of the feed's method and the assignment: a signal of those
50 nanoseconds drops the value, as it does with ``queue.get()``, and no iterator can prevent that.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
from forced_numbers import ForcedNumbers, PlacesHere
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.feed.sizing import Numbers

KINDS = [
    "random, prefetch 0",
    "random, prefetch 0, threads",
    "random, auto threads, prefetch 0",
    "random, prefetch 2",
    "random, auto numbers, prefetch 2",
    "stream, prefetch 0",
    "stream, prefetch 2, threads",
    "stream, auto places, prefetch 2",
    "restartable batches, prefetch 0",
    "restartable batches, prefetch 2",
    "resumable one-shot batches, prefetch 0",
    "resumable one-shot batches, prefetch 2",
    "one-shot batches, prefetch 0",
    "one-shot batches, prefetch 2",
]


class Resumable:
    """One iterator over batches that can be brought back to a state."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches, self._taken = batches, 0

    def __iter__(self) -> Resumable:
        return self

    def __next__(self) -> Any:
        if self._taken == len(self._batches):
            raise StopIteration
        self._taken += 1
        return self._batches[self._taken - 1]

    def get_state(self) -> int:
        return self._taken

    def set_state(self, state: int) -> None:
        self._taken = state


def make_feed(kind: str, num_batches: int) -> meshfeed.MultiHostDataLoadIterator:
    """Batch k holds the ids 8k to 8k + 7."""
    rows = {"id": np.arange(8 * num_batches, dtype=np.int32)}
    options: dict[str, Any] = {"prefetch": int(kind.split("prefetch ")[1][0])}
    if "threads" in kind:
        options["num_threads"] = "auto" if "auto" in kind else 2
    if "numbers" in kind:
        options |= {"num_threads": "auto", "prefetch": "auto"}
    source: Any = meshfeed.sources.Memory(rows)
    if kind.startswith("stream"):
        options["num_lanes"] = 8
        source = meshfeed.sources.Stream(
            lambda lane_index, num_lanes: ({"id": np.int32(8 * n + lane_index)} for n in range(num_batches))
        )
        if "places" in kind:
            options |= {"num_workers": "auto", "num_threads": "auto"}
            lanes = [[{"id": np.int32(8 * n + lane)} for n in range(num_batches)] for lane in range(8)]
            source = meshfeed.sources.Stream(lambda lane_index, num_lanes: Resumable(lanes[lane_index]))
    if "batches" in kind:
        batches: Any = [{"id": rows["id"][8 * n : 8 * n + 8]} for n in range(num_batches)]
        if "one-shot" in kind:
            batches = Resumable(batches) if "resumable" in kind else iter(batches)
        source = meshfeed.sources.HostBatches(batches)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    feed = meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=8, **options)
    if "auto" in kind:
        if "places" in kind:
            PlacesHere(feed, [Numbers(2, 1, 2), Numbers(0, 2, 2)], patient=True)
        else:
            ForcedNumbers(feed, [Numbers(0, 2, 3), Numbers(0, 1, 2), Numbers(0, 4, 1)])
    return feed


class Storm:
    """A timer whose signal raises KeyboardInterrupt while a trial is under way.

    Attributes:
      inside: signals that found the feed's code under way, or what it calls.
      in_caller: whether the last signal found the trial's own code under way.
    """

    def __init__(self) -> None:
        self.armed = self.in_caller = False
        self.inside = 0
        signal.signal(signal.SIGALRM, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.armed:
            self.armed = False
            self.in_caller = frame.f_code in (take_in_loop.__code__, take_by_next.__code__)
            self.inside += not self.in_caller
            raise KeyboardInterrupt


def take_in_loop(feed: Any, storm: Storm, seconds: float) -> Any:
    """One batch by a ``for`` loop; None if interrupted before."""
    batch = None
    storm.armed = True
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for batch in feed:  # noqa: B007
            break
        storm.armed = False
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    return batch


def take_by_next(feed: Any, storm: Storm, seconds: float) -> Any:
    """One batch by ``next``; None if interrupted before."""
    batch = None
    storm.armed = True
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        batch = next(feed)
        storm.armed = False
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    return batch


def ids(batch: Any) -> list[int]:
    """What a batch holds."""
    return np.asarray(batch["id"]).tolist()


class Tally:
    """Compares what a caller got with what there is."""

    def __init__(self, feed: Any) -> None:
        self.feed, self.wrong = feed, 0

    def check(self, batch: Any, step: int) -> None:
        """After a call of ``next`` at ``step`` that gave ``batch``, or None."""
        expected = list(range(8 * step, 8 * step + 8))
        self.wrong += self.feed.step != step + (batch is not None) or (batch is not None and ids(batch) != expected)

    def go_on(self, num_batches: int) -> None:
        """Takes batches without interrupts."""
        for _ in range(num_batches):
            step = self.feed.step
            self.check(next(self.feed), step)


MOMENTS: dict[str, tuple[int, int]] = {"first": (0, 3), "middle": (2, 5), "last": (2, 3)}
"""Batches before the one that is interrupted, and how many there are."""


def trial(kind: str, moment: str, take: Any, storm: Storm, seconds: float) -> tuple[int, int, float]:
    """Batches that were wrong, batches that ``next`` gave and the caller's frame dropped, seconds of the call."""
    before, num_batches = MOMENTS[moment]
    dropped = 0
    with make_feed(kind, num_batches) as feed:
        tally = Tally(feed)
        tally.go_on(before)
        storm.in_caller = False
        begin = time.perf_counter()
        batch = take(feed, storm, seconds)
        took = time.perf_counter() - begin
        if batch is None and storm.in_caller and take is take_by_next and feed.step == before + 1:
            dropped = 1
        else:
            tally.check(batch, before)
        tally.go_on(num_batches - feed.step)
        tally.wrong += next(feed, None) is not None
        return tally.wrong, dropped, took


def run(num_signals: int) -> dict[str, Any]:
    """Trials of every kind at every moment until each has had its share of ``num_signals`` inside the feed."""
    storm = Storm()
    draw = random.Random(0)
    figures: dict[str, int] = {}
    wrong = dropped = trials = 0
    share = -(-num_signals // (len(KINDS) * len(MOMENTS)))
    for kind in KINDS:
        for moment in MOMENTS:
            _, _, usual = [trial(kind, moment, take_in_loop, storm, 3600.0) for _ in range(2)][-1]
            begun = storm.inside
            while storm.inside < begun + share:
                take = (take_in_loop, take_by_next)[trials % 2]
                found, lost, _ = trial(kind, moment, take, storm, draw.uniform(0.0, 1.2) * usual + 1e-6)
                wrong, dropped, trials = wrong + found, dropped + lost, trials + 1
            figures[f"{kind}, {moment}"] = storm.inside - begun
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("meshfeed")]
    return {
        "signals": storm.inside,
        "trials": trials,
        "wrong": wrong,
        "dropped_by_caller": dropped,
        "threads_left": left,
        "by_kind": figures,
    }


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
