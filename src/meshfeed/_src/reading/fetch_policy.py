"""What a cache fetches next and what it evicts, given the files that upcoming batches need. Does no I/O.

:class:`FetchPlan` keeps the nearest files on disk, in the order in which batches need them. :func:`eviction_order` removes
the file whose next use is farthest (Belady, 1966), and never one that is needed sooner than the file that takes its place.
``ahead.py`` and ``ShardCache`` apply both to files, and ``meshfeed plan --simulate`` to numbers.
"""

from __future__ import annotations

import bisect
import collections
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

NUM_FETCHES = 8
"""Files fetched ahead at the same time; each has a connection, and connections serve the nearest file first."""
FULL_SECONDS = 0.02
"""Shortest pause before a full cache is tried again, after the next batch."""
_MAX_USES = 1 << 16  # upcoming uses kept in memory
_RECHECK_SECONDS = 5.0  # how often to look for files that other processes have evicted
_AHEAD_BYTES = 4 << 30  # without max_bytes
# What makes room for a file must be needed that much later: it may be needed sooner than what comes next.
_LATER_TIMES = 2
_PLANNED_TIMES = 4  # caches of files whose next uses are known: with fewer, the farthest of them is a guess
_OPEN_SHARE = 4


class PlannedFile(Hashable, Protocol):
    """What the policy needs of a file; see ``CachedFile``."""

    num_bytes: int

    @property
    def ahead_bytes(self) -> int: ...

    @property
    def plan_bytes(self) -> int: ...


F = TypeVar("F", bound=PlannedFile)
C = TypeVar("C")


def default_ahead_bytes(max_bytes: int | None) -> int:
    """Returns how many bytes to fetch ahead of the reads by default."""
    return max_bytes // 2 if max_bytes else _AHEAD_BYTES


def plan_bytes(ahead_bytes: int, max_bytes: int | None) -> int:
    """Returns how many bytes of upcoming files to plan for."""
    return ahead_bytes + _PLANNED_TIMES * (max_bytes or 0)


def open_bytes(max_bytes: int) -> int:
    """Returns how many bytes of cached files stay open: an evicted file keeps its disk space while it is open."""
    return max_bytes // _OPEN_SHARE


def eviction_order(copies: Iterable[tuple[float, float, int, C]], next_use: float | None) -> Iterator[tuple[int, C]]:
    """Yields the copies that may make room for a file, in the order in which to remove them.

    Args:
      copies: next use in batches, time of the last open, size in bytes, and the copy.
      next_use: when the file that is fetched ahead is needed; None for a file that a read waits for.

    Yields:
      Size and copy; those needed last come first, and of those that no batch needs, the least recently opened.
    """
    latest = -1.0 if next_use is None else _LATER_TIMES * next_use
    ordered = sorted((-use, opened, size, number, copy) for number, (use, opened, size, copy) in enumerate(copies))
    for later, _, size, _, copy in ordered:
        if -later <= latest:
            return
        yield size, copy


class FetchPlan(Generic[F]):
    """The files that upcoming batches need, and which of them to fetch now.

    One thread scans and takes what to fetch; the other methods may be called by any thread at any time.

    Args:
      plan: yields the files that each batch needs, from the first on; consumed lazily.

    Attributes:
      reached: the batch that is read next; files that only earlier batches need are forgotten.
    """

    def __init__(self, plan: Iterator[Iterable[F]]) -> None:
        self.reached = 0
        self._plan = plan
        self._uses: dict[F, collections.deque[int]] = {}  # the batches that need a file, ascending
        # The first of them, when the file was found, and the file; ascending.
        self._order: list[tuple[int, int, F]] = []
        self._found = self._num_uses = self._bytes = 0
        self._scanned = 0
        self._here: set[F] = set()
        self._under_way: dict[F, int] = {}  # and the batch that needs it next
        self._failed: set[F] = set()
        self._begun: set[F] = set()  # files that a batch has used and others will
        self._full: tuple[int, float] | None = None  # when the cache had no room: the batch and the time
        self._checked_at = -math.inf
        self._ended = False

    def next_use(self, file: F) -> float:
        """Returns when a file is needed next, in batches from now; infinity if unknown."""
        uses, reached = self._uses.get(file), self.reached
        while uses is not None:
            try:
                return next((use - reached for use in uses if use >= reached), math.inf)
            except RuntimeError:  # another thread has just dropped one, or found another
                pass
        return math.inf

    def is_far_enough(self) -> bool:
        """Whether the known uses fill the cache and the bytes to fetch ahead, or the plan has ended."""
        if self._ended or self._num_uses >= _MAX_USES:
            return True
        return bool(self._order) and self._bytes > self._order[0][2].plan_bytes

    def scan(self, num_batches: int) -> Iterator[F]:
        """Reads the plan of up to that many batches, until it is far enough; yields files that were not in it."""
        for _ in range(num_batches):
            if self.is_far_enough():
                return
            files = next(self._plan, None)
            if files is None:
                self._ended = True
                return
            batch, self._scanned = self._scanned, self._scanned + 1
            for file in files:
                uses = self._uses.get(file)
                if uses is None:
                    self._uses[file] = collections.deque((batch,))
                    bisect.insort(self._order, (batch, self._found, file))
                    self._found += 1
                    self._bytes += file.num_bytes
                    yield file
                else:
                    uses.append(batch)
                self._num_uses += 1

    def _forget(self) -> None:
        """Drops the uses that have passed."""
        passed = bisect.bisect_left(self._order, (self.reached,))
        files, self._order[:passed] = self._order[:passed], []
        for _, number, file in files:
            uses = self._uses[file]
            while uses and uses[0] < self.reached:
                uses.popleft()
                self._num_uses -= 1
            if uses:
                self._begun.add(file)
                bisect.insort(self._order, (uses[0], number, file))
            else:
                del self._uses[file]
                self._begun.discard(file)
                self._bytes -= file.num_bytes

    def _near(self) -> list[tuple[int, F]]:
        """Returns the files that are needed next, and when, up to the bytes to keep ahead; files in use do not count."""
        near: list[tuple[int, F]] = []
        num_bytes = 0
        for batch, _, file in self._order:
            if file not in self._begun or file not in self._here:
                num_bytes += file.num_bytes
                if near and num_bytes > file.ahead_bytes:
                    break
            near.append((batch, file))
        return near

    def to_fetch(self, is_here: Callable[[F], bool], now: float) -> Iterator[F]:
        """Yields the files to fetch now, until :meth:`fetched`, :meth:`no_room` or :meth:`failed` ends each.

        Args:
          is_here: whether a file is cached.
          now: seconds of any clock, the same for all calls.
        """
        self._forget()
        if now - self._checked_at > _RECHECK_SECONDS:
            self._here, self._failed, self._checked_at = set(), set(), now
        near = self._near()
        self._here &= {file for _, file in near}  # files that are not needed soon may be evicted
        for batch, file in near:
            if file in self._here or file in self._failed or file in self._under_way:
                continue
            if is_here(file):
                self._here.add(file)
            elif len(self._under_way) >= NUM_FETCHES or self._is_full(now):
                return  # files needed later must not take the room
            else:
                self._under_way[file] = batch
                yield file

    def due(self, file: F) -> int:
        """Returns when a file that is to be fetched now is needed, in batches from now; negative if reads have passed it."""
        return self._under_way[file] - self.reached

    def _is_full(self, now: float) -> bool:
        if self._full is None:
            return False
        batch, since = self._full
        return batch == self.reached or now - since < FULL_SECONDS

    def fetched(self, file: F) -> None:
        """Records that a file is cached now."""
        self._here.add(file)
        self._full = None
        del self._under_way[file]

    def no_room(self, file: F, batch: int, now: float) -> None:
        """Records that there is no room for a file, which was to be fetched when ``batch`` was reached."""
        self._full = batch, now
        del self._under_way[file]

    def failed(self, file: F) -> None:
        """Records that a file could not be fetched; the read that needs it fetches it again."""
        self._failed.add(file)
        del self._under_way[file]
