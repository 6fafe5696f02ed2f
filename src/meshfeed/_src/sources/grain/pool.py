"""One pool of reading threads for all Grain lanes of a process.

Grain starts 16 threads for every ``to_iter_dataset``, one for every file of an interleave and a few more: with 64 lanes
a thousand or more. Here lanes share one pool, which is there as long as a lane is open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from meshfeed._src.base.threads import Call, Threads

MAX_THREADS = 16
"""As many as one Grain iterator takes by default."""


class GrainReaderPool:
    """A thread pool that its users keep alive."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._lock = threading.RLock()  # a lane that is garbage-collected during a call releases the pool too
        self._users = 0
        self._process = os.getpid()
        self._executor: Threads | None = None

    def acquire(self) -> None:
        """Registers a user."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Takes a user back; the threads end with the last one."""
        with self._lock:
            self._users -= 1
            if self._users > 0 or self._executor is None:
                return
            executor, self._executor = self._executor, None
        executor.shutdown(wait=False, cancel_futures=True)

    def submit(self, function: Callable[..., Any], *args: Any) -> Call[Any]:
        """Calls ``function(*args)`` on a thread of the pool."""
        with self._lock:
            if self._executor is None or self._process != os.getpid():  # threads do not survive a fork
                self._process = os.getpid()
                self._executor = Threads(self._max_threads, "meshfeed-grain")
            return self._executor.submit(function, *args)


POOL = GrainReaderPool(MAX_THREADS)
