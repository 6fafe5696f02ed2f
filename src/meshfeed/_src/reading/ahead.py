"""Fetches files before a reader reads them, in the order in which its upcoming batches need them.

The record ids of a host's upcoming batches are computable, so the files that hold them are known in order. A
:class:`FetchAhead` keeps the nearest of them on disk and supplies their cache with the next use of each file. The cache
evicts the file whose next use is farthest (Belady, 1966), and never one that is needed sooner than the file it fetches.
"""

from __future__ import annotations

import collections
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator

from meshfeed._src.base.hooks import CachedFile
from meshfeed._src.base.read_ahead import WakeUp
from meshfeed._src.base.threads import Background, Threads

_log = logging.getLogger("meshfeed.ahead")
_NUM_THREADS = 8  # files and connections; connections serve the nearest file first
_MAX_USES = 1 << 16  # upcoming uses kept in memory
_SCANNED_AT_ONCE = 64  # batches; the reads get the interpreter in between
_RECHECK_SECONDS = 5.0  # how often to look for files that other processes have evicted
_FULL_SECONDS = 0.02  # shortest pause before a full cache is tried again, after the next batch


def _rest(work: Callable[[], object]) -> float:
    """Calls ``work`` and returns when to call it again, in seconds of ``time.monotonic``.

    It gets at most a tenth of the time, because the reads need the interpreter too.
    """
    started = time.thread_time()
    work()
    return time.monotonic() + min(1.0, 9 * (time.thread_time() - started))


class FetchAhead:
    """Keeps the files that upcoming batches need next on a local disk.

    Args:
      plan: yields the files that each batch of the reader needs, from its first batch on; consumed lazily, on a
        background thread.
    """

    def __init__(self, plan: Iterator[Iterable[CachedFile]]) -> None:
        self._plan = plan
        self._uses: dict[CachedFile, collections.deque[int]] = {}  # the batches that need a file, ascending
        self._num_uses = self._bytes = 0  # the sum of their lengths, and the size of the files
        self._scanned = self._reached = 0
        self._here: set[CachedFile] = set()
        self._under_way: set[CachedFile] = set()
        self._failed: set[CachedFile] = set()
        self._begun: set[CachedFile] = set()  # files that a batch has used and others will
        self._full: tuple[int, float] | None = None  # when the cache had no room: the batch and the time
        self._checked_at = time.monotonic()
        self._ended = self._closed = False
        self._events = 0
        self._wake = WakeUp()
        self._threads = Threads(_NUM_THREADS, "meshfeed-ahead")
        self._thread = Background(self._run, "meshfeed-ahead-plan")

    def reached(self, batch: int) -> None:
        """Records that the reader is about to read batch ``batch``, counted from its first; starts the threads."""
        self._reached = batch
        self._thread.start()
        self._notify()

    def next_use(self, file: CachedFile) -> float:
        """Returns when a file is needed next, in batches from now; infinity if unknown."""
        uses = self._uses.get(file)
        try:
            return max(0, uses[0] - self._reached) if uses else math.inf
        except IndexError:  # another thread has just dropped the last one
            return math.inf

    def close(self) -> None:
        """Ends the threads; fetches that have started continue to completion."""
        self._closed = True
        self._notify()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _notify(self) -> None:
        self._events += 1
        self._wake.ring()

    def _run(self) -> None:
        try:
            scan_at = 0.0
            while not self._closed:
                seen = self._events
                if time.monotonic() >= scan_at:
                    scan_at = _rest(self._scan)
                time.sleep(max(0.0, _rest(self._submit) - time.monotonic()))
                wait = 60.0 if self._is_far_enough() else scan_at - time.monotonic()
                self._wake.wait(lambda seen=seen: self._closed or self._events != seen, wait)
        except Exception as error:  # not fatal: reads fetch the files that they need
            if not self._closed:  # close() also closes the threads, to which this one may be passing work
                _log.warning("fetching ahead has stopped: %s: %s", type(error).__name__, error)

    def _is_far_enough(self) -> bool:
        """Whether the known uses fill the cache and the bytes to fetch ahead, or the plan has ended."""
        if self._ended or self._num_uses >= _MAX_USES:
            return True
        return bool(self._uses) and self._bytes > next(iter(self._uses)).plan_bytes

    def _scan(self) -> None:
        for _ in range(_SCANNED_AT_ONCE):
            if self._is_far_enough():
                return
            files = next(self._plan, None)
            if files is None:
                self._ended = True
                return
            for file in files:
                if file not in self._uses:
                    self._uses[file] = collections.deque()
                    self._bytes += file.num_bytes
                    file.follow(self.next_use)
                self._uses[file].append(self._scanned)
                self._num_uses += 1
            self._scanned += 1

    def _forget(self) -> None:
        """Drops the uses that have passed."""
        for file, uses in list(self._uses.items()):
            while uses and uses[0] < self._reached:
                uses.popleft()
                self._num_uses -= 1
                self._begun.add(file)
            if not uses:
                del self._uses[file]
                self._begun.discard(file)
                self._bytes -= file.num_bytes

    def _submit(self) -> None:
        """Starts fetching the files that are needed next and are missing."""
        self._forget()
        if time.monotonic() - self._checked_at > _RECHECK_SECONDS:
            self._here, self._failed, self._checked_at = set(), set(), time.monotonic()
        near = self._near()
        self._here &= set(near)  # files that are not needed soon may be evicted
        for file in near:
            if file in self._here or file in self._failed or file in self._under_way:
                continue
            if file.is_here():
                self._here.add(file)
            elif len(self._under_way) >= _NUM_THREADS or self._is_full():
                break  # files needed later must not take the room
            else:
                self._under_way.add(file)
                self._threads.submit(self._fetch, file)

    def _is_full(self) -> bool:
        if self._full is None:
            return False
        batch, since = self._full
        return batch == self._reached or time.monotonic() - since < _FULL_SECONDS

    def _near(self) -> list[CachedFile]:
        """Returns the files that are needed next, up to the bytes to keep ahead; files in use do not count."""
        near: list[CachedFile] = []
        num_bytes = 0
        for file in sorted(self._uses, key=self.next_use):
            if file not in self._begun or file not in self._here:
                num_bytes += file.num_bytes
                if near and num_bytes > file.ahead_bytes:
                    break
            near.append(file)
        return near

    def _fetch(self, file: CachedFile) -> None:
        reached = self._reached
        try:
            if not self._closed and file.fetch(self.next_use(file)):
                self._here.add(file)
                self._full = None
            else:
                self._full = reached, time.monotonic()
        except Exception as error:  # the read that needs the file raises it
            _log.debug("fetching ahead failed: %s: %s", type(error).__name__, error)
            self._failed.add(file)
        self._under_way.discard(file)
        self._notify()
