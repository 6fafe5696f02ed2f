"""Worker processes that serve one feed after another, so that a test pays for their start and imports once."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from meshfeed._src.reading import workers as worker_pool

_SECONDS = 300.0  # an import of TensorFlow takes 10 s of a core that is free


def _make_task() -> Any:
    """In a worker: keeps the task of each feed, and answers the requests to it."""
    import pickle

    tasks: dict[int, Any] = {}

    def task(request: Any) -> Any:
        kind, feed, value = request
        if kind == "begin":
            tasks[feed] = pickle.loads(value)()
        elif kind == "end":
            close = getattr(tasks.pop(feed), "close", None)
            return close() if close is not None else None
        else:
            return tasks[feed](value)
        return os.getpid()

    return task


class SharedPool:
    """The interface of ``WorkerPool`` over processes that are there already."""

    workers: worker_pool.WorkerPool[Any, Any]
    numbers = itertools.count()
    pids: set[int]

    def __init__(self, num_workers: int, make_task: bytes, **_: Any) -> None:
        self._feed, self._num_workers = next(self.numbers), num_workers
        self._owed = collections.Counter[int]()
        for worker in range(num_workers):
            self.workers.submit(worker, ("begin", self._feed, make_task))
        for worker in range(num_workers):
            self.pids.add(self.workers.result(worker, _SECONDS))

    def submit(self, worker_index: int, request: Any) -> None:
        assert worker_index < self._num_workers
        self.workers.submit(worker_index, ("ask", self._feed, request))
        self._owed[worker_index] += 1

    def result(self, worker_index: int, timeout: float | None) -> Any:
        self._owed[worker_index] -= 1
        return self.workers.result(worker_index, timeout)

    def stop(self) -> None:
        """Does nothing: other feeds use the processes too."""

    def close(self) -> None:
        for worker in range(self._num_workers):
            while self._owed[worker]:  # what a feed had asked for ahead
                with contextlib.suppress(Exception):
                    self.result(worker, _SECONDS)
            self.workers.submit(worker, ("end", self._feed, None))
            self.workers.result(worker, _SECONDS)
        self._num_workers = 0


@contextlib.contextmanager
def shared_workers(num_workers: int) -> Iterator[set[int]]:
    """Feeds made within use these processes, at most ``num_workers`` each; gives the ids of those that were used."""
    make_task = worker_pool.pickle_task(_make_task)
    pool: worker_pool.WorkerPool[Any, Any] = worker_pool.WorkerPool(num_workers, make_task, name="shared workers")
    used: set[int] = set()
    kind = type("SharedPool", (SharedPool,), {"workers": pool, "pids": used})
    try:
        with mock.patch.object(worker_pool, "WorkerPool", kind):
            yield used
    finally:
        pool.close()
