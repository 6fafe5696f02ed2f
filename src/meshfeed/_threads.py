"""A few threads for reads that nobody can interrupt.

``concurrent.futures.ThreadPoolExecutor`` waits for its threads at close and again at the interpreter's exit. A read that
hangs (a dead network disk) would so turn a time-out that was reported into a process that never ends. These threads are
daemons, and closing waits for them only so long.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_log = logging.getLogger("meshfeed.threads")
_CLOSE_SECONDS = 5.0
T = TypeVar("T")
R = TypeVar("R")
_Task = tuple[concurrent.futures.Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    """Calls functions side by side.

    Args:
      num_threads: at least 1.
      name: of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., R], *args: Any) -> concurrent.futures.Future[R]:
        """``function(*args)``, on one of the threads."""
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        self._tasks.put((future, function, args))
        return future

    def map(self, function: Callable[[T], R], values: Iterable[T]) -> list[R]:
        """``function`` of each value, in their order.

        Raises:
          What the first of them raised, once all have ended.
        """
        futures = [self.submit(function, value) for value in values]
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Drops what has not begun, and ends the threads; one that hangs in a call ends with it."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task is not None:
                task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        if hung:
            _log.warning("%s still in a read of the source after close; it ends with that read", ", ".join(hung))


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, function, args = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        del task, future, function, args  # a waiting thread must not keep the last batch
