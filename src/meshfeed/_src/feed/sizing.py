"""Chooses the numbers of workers, threads and prefetched batches of a feed that has ``"auto"``, while it runs.

The numbers start at the defaults. While the training step does not wait for data, nothing changes. When it waits,
:func:`climb` tries other numbers, one change at a time, and keeps a change only if it is clearly faster. With other hosts,
which may be the ones that it waits for, it compares this host's own reading (:attr:`Window.capacity`). The numbers belong to
this host and process; they are in no state and no fingerprint, and hosts do not exchange them.

:func:`control` and :func:`climb` are the decisions, from measured windows only; :class:`Sizer` measures.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from meshfeed._src.base.machine import available_cpus, host_memory_bytes
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.feed.pipeline import Pipeline, PrefetchDepth
from meshfeed._src.feed.recorder import StatsRecorder
from meshfeed._src.reading.reads import AutoReads, ReadNumbers
from meshfeed._src.streams.protocol import AnyReader

_STALLED = 0.05  # fraction of the time that the step waits, from which other numbers are tried
_GAIN, _WORKER_GAIN = 0.05, 0.1  # threads and processes are kept if the capacity grows by this, or by half of the stall
_NOT_WORSE = 0.95  # and this ratio of delivered batches
_CLEAR = 1.5  # a gain by threads from this ratio on is not checked
_FACTORS = 4, 2  # the numbers of readers to try, as multiples of the current one: the first that is possible, or both
_LESS_STALLED = 0.8  # more prefetched batches are kept from this ratio of stalls on
_CHANGED, _CHANGED_WINDOWS = 0.5, 10  # the pause ends early if the capacity is below this ratio in as many windows
_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 600.0, 7200.0  # between two searches while the step waits; doubles
_MAX_THREADS, _MAX_PREFETCH = 16, 32
_WORKER_MILLISECONDS = 1.0  # reading and decoding per batch from which a process, which must send it, may be faster
# A step longer than the usual by that, as for a checkpoint, is in no window.
_INTERRUPTED, _INTERRUPTED_SECONDS = 5.0, 0.5
_READ_AHEAD_SHARE = 0.25  # of the host's memory
_WORKER_BYTES = 400 << 20  # of a worker process, besides its batches
_WINDOW_SECONDS, _WINDOW_BATCHES = 0.3, 8
_SHORT_SECONDS, _SHORT_SAMPLES = 0.08, 4  # after which a window of a search ends if it is precise or clear
_PRECISE = 0.015  # relative error of the capacity
_CLEAR_ERRORS = 3.0  # standard errors between the capacity and the one to compare with
_ERROR_GROUPS = 8  # batches are compared in so many groups: those next to each other are alike
_LOOK_SECONDS = 0.005
_LONG_WINDOW_SECONDS = 20.0  # ends a window of few, slow batches
_START_SECONDS = 60.0  # for workers to start, and for lanes to move
_TRIED = 16


class Numbers(NamedTuple):
    """What is chosen; a field whose keyword is not ``"auto"`` stays as it is."""

    num_workers: int
    num_threads: int
    prefetch: int

    @property
    def readers(self) -> int:
        """Reads at the same time."""
        return self.num_workers or self.num_threads

    @property
    def batches_ahead(self) -> int:
        """Host batches in memory: two per reader, and the prefetched ones."""
        return (2 * self.readers if self.readers > 1 else 1) + self.prefetch


class Window(NamedTuple):
    """What was measured with the same numbers over some batches.

    Attributes:
      end: when it ended, in seconds.
      rate: batches delivered per second.
      capacity: batches per second: delivered, or with other hosts, read by this one while there was room for them.
      stalled: fraction of the time that the caller waited in ``next``.
      uneven: fraction of the time that the reader waited for room.
      peers: fraction of the time that this host waited for others.
      cores: CPU seconds of this process per second.
      work: seconds of reading and decoding per batch, summed over threads.
      error: relative standard error of the capacity.
    """

    end: float
    rate: float
    capacity: float
    stalled: float
    uneven: float
    peers: float
    cores: float
    work: float
    error: float = 0.0


Search = Generator[tuple[Numbers, "Window | None"], "Window | None", Numbers]
"""Yields numbers to measure and a window; the measurement ends once its capacity clearly differs from that of the window, or
without one, once it is precise. Receives what was measured, or None if the numbers could not be used; returns the best."""


def _bar(found: Window, gain: float) -> float:
    """The ratio of capacities that is worth a change; a step that waits for 6 % of the time cannot become 10 % faster."""
    return 1 + min(gain, found.stalled / 2)


def _is_better(tried: Window, found: Window, gain: float) -> bool:
    return tried.capacity >= _bar(found, gain) * found.capacity and tried.rate >= _NOT_WORSE * found.rate


def _times(ratio: float, window: Window) -> Window:
    return window._replace(capacity=ratio * window.capacity)


def _compared(
    now: Numbers, found: Window, other: Numbers
) -> Generator[tuple[Numbers, Window | None], Window | None, Window | None]:
    """Tries numbers beside the current ones; returns what was measured with them if they are clearly faster, else None."""
    with_workers = now.num_workers or other.num_workers
    gain = _WORKER_GAIN if with_workers else _GAIN
    tried = yield other, _times(_bar(found, gain), found)
    if tried is None or not _is_better(tried, found, gain):
        return None
    if not with_workers and tried.capacity < _CLEAR * found.capacity:
        again = yield now, _times(1 / _bar(found, gain), tried)  # the machine may have become faster meanwhile
        if again is None or not _is_better(tried, again, gain):
            return None
    return tried


def climb(now: Numbers, found: Window, can: Callable[[Numbers], bool], max_workers: int) -> Search:
    """Tries other numbers than ``now``, one change at a time, and returns the best.

    ``found`` was measured with the current ones, while the step waited. ``can`` returns whether numbers are possible.
    """
    start = now
    if found.uneven >= found.stalled - found.peers:  # reads are fast enough on average, but not evenly
        while can(more := now._replace(prefetch=2 * now.prefetch)):
            tried = yield more, None
            if tried is None or tried.stalled > _LESS_STALLED * found.stalled:
                break
            now, found = more, tried
        if now != start:
            return now

    changes: list[Callable[[Numbers], list[Numbers]]] = [
        lambda n: [n._replace(num_threads=factor * n.num_threads) for factor in _FACTORS if not n.num_workers],
        lambda n: [n._replace(num_workers=min(factor * n.readers, max_workers)) for factor in _FACTORS],
        lambda n: [] if n.num_workers else [n._replace(num_threads=max(1, n.num_threads // 2))],
        lambda n: [n._replace(num_workers=n.num_workers // 2)],
    ]
    for fewer, change in enumerate(changes):
        # Reads that wait for storage gain nothing from processes that threads do not give, and neither do short ones, nor any
        # from as many processes as there are threads.
        waits = found.cores < 0.5 and now.num_threads > start.num_threads
        short = found.work * 1e3 < _WORKER_MILLISECONDS and not now.num_workers
        no_more = not now.num_workers and 1 < max_workers <= now.num_threads
        if (fewer >= 2 and now != start) or (fewer == 1 and (waits or short or no_more)):
            continue
        while found.stalled >= _STALLED:
            others = [other for other in change(now) if other != now and can(other)]
            # Where reads are short, no processes are tried, and a trial is over soon.
            for other in others if short and now == start else others[:1]:
                tried = yield from _compared(now, found, other)
                if tried is not None:
                    now, found = other, tried
                    break
            else:
                break
    return now


def control(
    now: Numbers, can: Callable[[Numbers], bool], max_workers: int, conclude: Callable[[str, bool], object]
) -> Generator[tuple[Numbers, Window | None], Window | None, None]:
    """Yields the numbers to use, for ever; receives what was measured with them. See :data:`Search`.

    ``conclude`` is called with a reason, and whether numbers are being tried.
    """
    pause, pause_ends, settled, slow = _PAUSE_SECONDS, 0.0, 0.0, 0
    while True:
        found = yield now, None
        if found is None:
            continue
        settled = settled or found.capacity
        slow = slow + 1 if found.capacity < _CHANGED * settled else 0
        waits = f"the step waits for data {found.stalled:.0%} of the time"
        if found.stalled < _STALLED:
            conclude(f"{waits}, which is less than {_STALLED:.0%}, so there is nothing to gain", False)
            continue
        if found.peers > found.stalled / 2:
            conclude(f"{waits}, but mostly for other hosts: see feed.stats() there", False)
            continue
        if found.end < pause_ends and slow < _CHANGED_WINDOWS:
            continue
        conclude(f"{waits}; trying other numbers", True)
        best = yield from climb(now, found, can, max_workers)
        what = "no other numbers are clearly faster" if best == now else f"faster than {_text(now)}"
        conclude(f"the step waited for data {found.stalled:.0%} of the time; {what}", False)
        now, settled, slow = best, 0.0, 0
        pause_ends, pause = found.end + pause, min(2 * pause, _MAX_PAUSE_SECONDS)


def _text(numbers: Numbers) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(Numbers._fields, numbers, strict=True))


class _Totals(NamedTuple):
    seconds: float
    cpu_seconds: float
    batches: int
    wait_seconds: float
    peer_wait_seconds: float
    work_seconds: float
    produced: int
    idle_seconds: float


class Sizer:
    """Measures a feed and changes its numbers. Called on the thread that takes batches.

    Attributes:
      look_at: time from which :meth:`delivered` is to be called again, so that it costs nothing with short batches.
    """

    def __init__(
        self,
        settings: FeedSettings,
        prefetch: PrefetchDepth,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._auto = settings.auto
        self._prefetch, self._alone = prefetch, True
        self._clock, self._cpu_clock = clock, cpu_clock
        self._cpus = available_cpus()
        self._reads = AutoReads()
        self._reason, self._measuring = "no batch has been measured yet", True
        self._tried: collections.deque[dict[str, Any]] = collections.deque(maxlen=_TRIED)
        self._control: Generator[tuple[Numbers, Window | None], Window | None, None] | None = None
        self._wanted = self._before = Numbers(0, 1, prefetch.depth)
        self._compared: Window | None = None
        self._applied = False
        self._measure_at = 0
        self._apply_until = 0.0
        self.look_at = 0.0
        self._outside = clock()
        self._usual_step = 0.0
        self._samples: list[_Totals] = []  # of this window

    def begin(self, reader: AnyReader, *, alone: bool) -> None:
        """Makes the reader of a new generation use the numbers chosen so far, and measures again from its first batch."""
        reader.adapt(self._reads)
        self._alone = alone
        self._applied, self._samples = False, []
        self._apply_until = self._clock() + _START_SECONDS

    # ------------------------------------------------------------------ measuring

    def delivered(self, stats: StatsRecorder, pipeline: Pipeline) -> None:
        """Counts a delivered batch; changes the numbers when a window is complete."""
        self.look_at = self._clock() + _LOOK_SECONDS
        sums = stats.counts.sums
        batches: int = sums["batches"]
        if self._control is None:
            self._wanted = self._before = self._now()
            begun = control(self._wanted, self._can, self._max_workers(), self._conclude)
            next(begun)
            self._control = begun
        if not self._applied and not self._apply(batches):
            return
        now, waited = self._clock(), sums["wait_seconds"]
        if self._is_interrupted(now - waited):
            self._measure_at, self._samples = batches + self._wanted.batches_ahead, []
        if batches < self._measure_at:
            return
        production = pipeline.production
        if production is None:  # the reads are part of the wait in next()
            production = batches, now - waited
        work = sums["read_seconds"] + sums["decode_seconds"]
        totals = _Totals(now, self._cpu_clock(), batches, waited, stats.peer_wait_seconds, work, *production)
        self._samples.append(totals)
        if (window := self._window()) is not None:
            self._samples = []
            self._send(window)

    def _is_interrupted(self, outside: float) -> bool:
        """Whether the last step took far longer than usual; ``outside`` are the seconds outside of ``next`` so far."""
        seconds, self._outside = outside - self._outside, outside
        interrupted = seconds > _INTERRUPTED * self._usual_step + _INTERRUPTED_SECONDS
        self._usual_step += (seconds - self._usual_step) / 16
        return interrupted

    def _apply(self, batches: int) -> bool:
        """Whether the reader uses the wanted numbers."""
        reads = self._reads
        if reads.in_use != reads.wanted:
            if self._clock() > self._apply_until:
                number = self._wanted.num_workers
                opening = f"starting {number} worker processes and opening the source in them"
                what = opening if number else "moving the reads back to this process"
                reads.keep("num_workers", f"{what} took more than {_START_SECONDS:.0f} s")
            return False
        if self._now() != self._wanted:  # the reader cannot
            self._send(None)
            return False
        # Reads under way belong to the numbers before, and the first read of each reader may be slow.
        self._measure_at = batches + self._before.batches_ahead + self._wanted.readers
        self._applied = True
        return True

    def _now(self) -> Numbers:
        return Numbers(*self._reads.wanted, self._prefetch.depth)

    def _window(self) -> Window | None:
        """What was measured, or None if the window is not complete."""
        begin, end = self._samples[0], self._samples[-1]
        seconds, batches = end.seconds - begin.seconds, end.batches - begin.batches
        if seconds <= 0 or batches < 1:
            return None
        busy, read = self._reading(begin, end)
        window = Window(
            end=end.seconds,
            rate=batches / seconds,
            capacity=read / busy,
            stalled=(end.wait_seconds - begin.wait_seconds) / seconds,
            uneven=(end.idle_seconds - begin.idle_seconds) / seconds,
            peers=(end.peer_wait_seconds - begin.peer_wait_seconds) / seconds,
            cores=(end.cpu_seconds - begin.cpu_seconds) / seconds,
            work=(end.work_seconds - begin.work_seconds) / batches,
            error=self._error(busy, read),
        )
        enough = batches >= max(_WINDOW_BATCHES, 2 * self._wanted.readers) and seconds >= _WINDOW_SECONDS
        is_long = seconds >= _LONG_WINDOW_SECONDS and batches >= _WINDOW_BATCHES // 2
        # Readers that began together end together: less than one read of each says nothing about the rate.
        few = batches < self._wanted.readers or len(self._samples) <= _SHORT_SAMPLES or seconds < _SHORT_SECONDS
        return window if enough or is_long or (not few and self._is_clear(window)) else None

    def _reading(self, begin: _Totals, end: _Totals) -> tuple[float, int]:
        """The time in which this host read, in seconds, and the batches."""
        seconds = end.seconds - begin.seconds
        if self._alone:
            return seconds, end.batches - begin.batches
        return max(seconds - (end.idle_seconds - begin.idle_seconds), 1e-3 * seconds), end.produced - begin.produced

    def _error(self, seconds: float, batches: int) -> float:
        """The relative standard error of the capacity, from how much groups of the samples differ."""
        ends = self._samples[:: -max(1, len(self._samples) // _ERROR_GROUPS)]
        groups = [self._reading(begin, end) for end, begin in itertools.pairwise(ends)]
        squares = sum((taken - seconds / max(1, batches) * read) ** 2 for taken, read in groups)
        return math.sqrt(squares * len(groups) / max(1, len(groups) - 1)) / seconds

    def _is_clear(self, window: Window) -> bool:
        """Whether a window of a search may end early."""
        # What takes seconds to start is worth a whole window, and so is prefetch, which is compared by the stall.
        if not self._measuring or self._wanted._replace(num_threads=0) != self._before._replace(num_threads=0):
            return False
        if window.error <= _PRECISE or self._compared is None:
            return window.error <= _PRECISE
        error = math.hypot(window.error * window.capacity, self._compared.error * self._compared.capacity)
        return abs(window.capacity - self._compared.capacity) > _CLEAR_ERRORS * error

    def _send(self, window: Window | None) -> None:
        assert self._control is not None
        if window is not None:
            found = {"batches_per_second": round(window.capacity, 3), "stall_fraction": round(window.stalled, 3)}
            numbers = {name: getattr(self._wanted, name) for name in self._shown()}
            if self._tried and numbers.items() <= self._tried[-1].items():
                self._tried.pop()  # the same numbers again
            self._tried.append({**numbers, **found})
        try:
            wanted, self._compared = self._control.send(window)
        except StopIteration:  # Ctrl-C has ended it: begin again with the numbers as they are
            self._control = None
            return
        if wanted == self._wanted == self._now():
            return
        self._before, self._wanted = self._now(), wanted
        if wanted.prefetch != self._prefetch.depth:
            self._prefetch.want(wanted.prefetch)
        self._reads.wanted = ReadNumbers(wanted.num_workers, wanted.num_threads)
        self._applied, self._samples = False, []
        self._apply_until = self._clock() + _START_SECONDS

    # ------------------------------------------------------------------ limits and result

    def _max_workers(self) -> int:
        by_memory = int(host_memory_bytes() * _READ_AHEAD_SHARE) // _WORKER_BYTES
        return min(self._cpus, by_memory) if self._cpus > 1 else 0

    def _can(self, wanted: Numbers) -> bool:
        now = self._now()
        changed = [name for name in Numbers._fields if getattr(now, name) != getattr(wanted, name)]
        if any(name not in self._auto or name in self._reads.unchangeable for name in changed):
            return False
        if wanted.num_threads > _MAX_THREADS or wanted.prefetch > _MAX_PREFETCH:
            return False
        ahead = wanted.batches_ahead * self._prefetch.batch_bytes
        return wanted.batches_ahead <= now.batches_ahead or ahead <= host_memory_bytes() * _READ_AHEAD_SHARE

    def _conclude(self, reason: str, measuring: bool) -> None:
        self._reason, self._measuring = reason, measuring

    def _shown(self) -> list[str]:
        return [name for name in Numbers._fields if name in self._auto]

    def tuned(self) -> dict[str, Any]:
        """Returns ``feed.stats().tuned``."""
        now = Numbers(*self._reads.in_use, self._prefetch.depth)
        stays = [
            f"{name} stays at {getattr(now, name)}: {why}"
            for name, why in self._reads.unchangeable.items()
            if name in self._auto
        ]
        return {
            **{name: getattr(now, name) for name in self._shown()},
            "state": "measuring" if self._measuring else "settled",
            "reason": ". ".join([self._reason, *stays]),
            "tried": list(self._tried),
        }
