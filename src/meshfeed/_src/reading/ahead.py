"""Fetches files before a reader reads them, in the order in which its upcoming batches need them.

The record ids of a host's upcoming batches are computable, so the files that hold them are known in order. A
:class:`FetchAhead` fetches what ``fetch_policy.py`` chooses, and supplies the cache with the next use of each file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from meshfeed._src.base.hooks import CachedFile
from meshfeed._src.base.threads import Background, Threads
from meshfeed._src.base.wake_up import WakeUp
from meshfeed._src.reading.fetch_policy import NUM_FETCHES, FetchPlan

_log = logging.getLogger("meshfeed.ahead")
_SCANNED_AT_ONCE = 64  # batches; the reads get the interpreter in between


def _rest(work: Callable[[], object]) -> float:
    """Calls ``work`` and returns when to call it again, in seconds of ``time.monotonic``.

    It gets at most a tenth of the time, because the reads need the interpreter too.
    """
    started = time.thread_time()
    work()
    return time.monotonic() + min(1.0, 9 * (time.thread_time() - started))


class FetchAhead:
    """Keeps the files that upcoming batches need next on a local disk.

    The plan yields the files that each batch of the reader needs, from its first on; a background thread consumes it lazily.
    """

    def __init__(self, plan: Iterator[Iterable[CachedFile]]) -> None:
        self._plan = FetchPlan(plan)
        self._followed: dict[int, CachedFile] = {}  # one file of each cache
        self._closed = False
        self._events = 0
        self._wake = WakeUp()
        self._threads = Threads(NUM_FETCHES, "meshfeed-ahead")
        self._thread = Background(self._run, "meshfeed-ahead-plan")

    def reached(self, batch: int) -> None:
        """Records that the reader is about to read batch ``batch``, counted from its first; starts the threads."""
        self._plan.reached = batch
        self._thread.start()
        self._notify()

    def next_use(self, file: CachedFile) -> float:
        """Returns when a file is needed next, in batches from now; infinity if unknown."""
        return self._plan.next_use(file)

    def close(self) -> None:
        """Ends the threads; fetches that have started continue to completion."""
        self._closed = True
        self._notify()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._unfollow()

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
                wait = 60.0 if self._plan.is_far_enough() else scan_at - time.monotonic()
                self._wake.wait(lambda seen=seen: self._closed or self._events != seen, wait)
        except Exception as error:  # not fatal: reads fetch the files that they need
            if not self._closed:  # close() also closes the threads, to which this one may be passing work
                _log.warning("fetching ahead has stopped: %s: %s", type(error).__name__, error)

    def _scan(self) -> None:
        for file in self._plan.scan(_SCANNED_AT_ONCE):
            file.follow(self.next_use)
            self._followed[id(file.cache)] = file
        if self._closed:  # meanwhile
            self._unfollow()

    def _unfollow(self) -> None:
        for file in list(self._followed.values()):
            file.unfollow(self.next_use)

    def _submit(self) -> None:
        for file in self._plan.to_fetch(lambda file: file.is_here(), time.monotonic()):
            self._threads.submit(self._fetch, file)

    def _fetch(self, file: CachedFile) -> None:
        reached = self._plan.reached
        try:
            if not self._closed and file.fetch(self._plan.due(file)):
                self._plan.fetched(file)
            else:
                self._plan.no_room(file, reached, time.monotonic())
        except Exception as error:  # the read that needs the file raises it
            _log.debug("fetching ahead failed: %s: %s", type(error).__name__, error)
            self._plan.failed(file)
        self._notify()
