"""Threads for reads that cannot be interrupted: the only kind of thread that meshfeed starts pools of.

``concurrent.futures.ThreadPoolExecutor`` waits for its threads at close and again when the interpreter exits. A read
that hangs (a dead network disk) would turn a time-out that was already reported into a process that never ends. These
threads are daemons, and closing waits for them only for a limited time.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_log = logging.getLogger("meshfeed.threads")
_CLOSE_SECONDS = 5.0
T = TypeVar("T")
R = TypeVar("R")
_Task = tuple[concurrent.futures.Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_Tasks = queue.SimpleQueue[_Task | None]


class Threads:
    """Calls functions side by side. The threads start as work arrives, and end at the latest when this object does.

    ``submit`` and ``shutdown`` are those of ``concurrent.futures.Executor``.

    Args:
      num_threads: at most so many, at least 1.
      name: of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.RLock()  # a garbage collection in submit() may call shutdown() on the same thread
        self._closed = False
        weakref.finalize(self, _end, self._tasks, self._threads).atexit = False

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[R]:
        """``function(*args, **kwargs)``, on one of the threads.

        Raises:
          RuntimeError: after :meth:`shutdown` or :meth:`close`.
        """
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads {self._name} are closed and take no new work")
            self._tasks.put((future, function, args, kwargs))
            if len(self._threads) < self._num_threads:
                label = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=_work, args=(self._tasks,), name=label, daemon=True)
                thread.start()
                self._threads.append(thread)
        return future

    def map(self, function: Callable[[T], R], values: Iterable[T]) -> list[R]:
        """``function`` of each value, in their order.

        Raises:
          What the first of them raised, once all have ended.
        """
        futures = [self.submit(function, value) for value in values]
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads, after the work that was submitted or, with ``cancel_futures``, only what has begun of it.

        ``wait`` waits for a limited time: a thread that hangs in a call ends with that call.
        """
        deadline = time.monotonic() + _CLOSE_SECONDS
        with self._lock:
            self._closed = True
            if cancel_futures:
                _cancel(self._tasks)
            _end(self._tasks, self._threads)
        if not wait:
            return
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        if hung:
            _log.warning("%s still in a read of the source after close; it ends with that read", ", ".join(hung))

    def close(self) -> None:
        """Drops what has not begun, and ends the threads; one that hangs in a call ends with it."""
        self.shutdown(cancel_futures=True)


def close_within(thing: Any, seconds: float | None = None) -> None:
    """Calls ``thing.close()``, if there is one, but waits for it only so long (default: as long as for threads).

    Iterators of other libraries join their own threads there, which may hang in a read.

    Raises:
      What ``close`` raised.
    """
    close = getattr(thing, "close", None)
    if not callable(close):
        return
    threads = Threads(1, "meshfeed-close")
    seconds = _CLOSE_SECONDS if seconds is None else seconds
    done = threads.submit(close)
    threads.shutdown(wait=False)
    if not concurrent.futures.wait([done], seconds).done:
        _log.warning("close() of a %s has not returned after %.0f s; not waiting for it", type(thing).__name__, seconds)
        return
    done.result()


def _cancel(tasks: _Tasks) -> None:
    while True:
        try:
            task = tasks.get_nowait()
        except queue.Empty:
            return
        if task is not None:
            task[0].cancel()


def _end(tasks: _Tasks, threads: list[threading.Thread]) -> None:
    for _ in threads:
        tasks.put(None)


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        future, function, args, kwargs = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        del task, future, function, args, kwargs  # a waiting thread must not keep the last batch
