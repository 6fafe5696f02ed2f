"""Daemon threads for prefetching in a Grain iterator that the user created.

``to_iter_dataset`` reads in a ``ThreadPoolExecutor``, whose threads Python joins at exit: if a read hangs, the process
never ends. The number of threads and the order of elements do not change.

One pool of reader threads for all Grain lanes of a process.

Grain starts 16 threads per ``to_iter_dataset``, one per file of an interleave and a few more: a thousand or more with
64 lanes. Here all lanes share one pool, which exists as long as any lane is open.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable
from typing import Any

from meshfeed._src.base.threads import Call, Threads

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

    def submit(self, function: Callable[..., Any], *args: Any) -> Call[Any]:
        """Calls ``function(*args)`` on a thread of the pool."""
        with self._lock:
            if self._executor is None or self._process != os.getpid():  # threads do not survive a fork
                self._process = os.getpid()
                self._executor = Threads(self._max_threads, "meshfeed-grain")
            return self._executor.submit(function, *args)


POOL = GrainReaderPool(MAX_THREADS)


def use_daemon_threads(iterator: Any) -> None:
    """Replaces the executors of a Grain iterator and of the iterators below it.

    Uses attributes that are private to Grain. If a version of Grain renames them, the iterator is left unchanged.
    """
    waiting, seen = [iterator], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        executor = getattr(node, "_executor", None)
        if isinstance(executor, concurrent.futures.ThreadPoolExecutor):
            node._executor = Threads(getattr(node, "_target_num_threads", MAX_THREADS), "meshfeed-grain-prefetch")
            executor.shutdown(wait=False)  # still completes reads that a running iterator has submitted
        waiting += [*getattr(node, "_parents", ()), *filter(None, [getattr(node, "_iterator", None)])]
