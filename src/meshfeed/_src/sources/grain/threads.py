"""The reader threads of Grain: one pool for all lanes of a process, and daemons in a user's own iterator.

Grain starts 16 threads per ``to_iter_dataset``, one per file of an interleave and a few more: a thousand or more with
64 lanes. Here all lanes share one pool, which exists as long as any lane is open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from meshfeed._src.base.threads import Call, Threads
from meshfeed._src.sources.grain import internals

MAX_THREADS = 16
"""The number of threads that one Grain iterator uses by default."""


class GrainReaderPool:
    """A reference-counted thread pool."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._lock = threading.RLock()  # reentrant: a lane garbage-collected during a call also calls release()
        self._users = 0
        self._process = os.getpid()
        self._executor: Threads | None = None

    def acquire(self) -> None:
        """Adds a user of the pool."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Removes a user of the pool; the threads end when the last user is removed."""
        with self._lock:
            self._users -= 1
            if self._users > 0 or self._executor is None:
                return
            executor, self._executor = self._executor, None
        executor.shutdown(wait=False, cancel_futures=True)

    def submit(self, function: Callable[..., Any], *args: object) -> Call[Any]:
        """Calls ``function(*args)`` on a thread of the pool."""
        with self._lock:
            if self._executor is None or self._process != os.getpid():  # threads do not survive a fork
                self._process = os.getpid()
                self._executor = Threads(self._max_threads, "meshfeed-grain")
            return self._executor.submit(function, *args)


POOL = GrainReaderPool(MAX_THREADS)


def use_daemon_threads(iterator: object) -> None:
    """Makes the reader threads of a Grain iterator, and of the iterators below it, daemons.

    ``to_iter_dataset`` reads in a ``ThreadPoolExecutor``, whose threads Python joins at exit: if a read hangs, the
    process never ends. The number of threads and the order of elements do not change.
    """
    internals.replace_executors(iterator, lambda num_threads: Threads(num_threads, "meshfeed-grain-prefetch"))
