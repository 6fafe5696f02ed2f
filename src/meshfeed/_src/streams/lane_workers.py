"""Lanes that are open in worker processes, or in the workers of another engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import cast

from meshfeed._src.base.settings import Workers, at_most
from meshfeed._src.base.types import StreamSource
from meshfeed._src.reading.workers import Pool, open_pool, pickle_task
from meshfeed._src.streams.lane import LaneEntry, LaneSettings
from meshfeed._src.streams.lane_group import GroupRows, LaneGroup

_Request = int | dict[int, LaneEntry]
"""To a worker: the records to read of each of its lanes, or where its lanes are to go; at first it opens them there."""


def _open_after(request: _Request, answer: GroupRows | None) -> _Request:
    """Returns the request that opens the lanes of a worker where ``answer`` left them."""
    return request if answer is None else {lane: rows.entry for lane, rows in answer.lanes.items()}


class WorkerLanes:
    """Lanes distributed over workers, with reads queued ahead.

    Args:
      source: sent to each worker.
      settings: shared settings.
      lanes: the lanes.
      num_workers: number of workers, capped at one per lane, and their engine.
      timeout_seconds: longest wait for one answer.
      max_bytes: see :func:`meshfeed._src.reading.workers.pickle_task`.
    """

    def __init__(
        self,
        source: StreamSource,
        settings: LaneSettings,
        lanes: Iterable[int],
        num_workers: Workers,
        timeout_seconds: float,
        max_bytes: int | None = None,
    ) -> None:
        self._lanes = sorted(lanes)
        workers = at_most(num_workers, max(1, len(self._lanes)))
        self._num_workers = int(workers)
        self._timeout_seconds = timeout_seconds

        def make_task() -> Callable[[_Request], GroupRows | None]:
            group = LaneGroup(source, settings)

            def task(request: _Request) -> GroupRows | None:
                # Each worker has its own lanes, but all get the same pickled task.
                return group.read(request) if isinstance(request, int) else group.go_to(request)

            return task

        self._pool: Pool = open_pool(
            workers,
            pickle_task(make_task, max_bytes),
            name="the feed",
            describe=lambda request: "reading lanes" if isinstance(request, int) else "opening lanes",
            resume=_open_after,
        )

    @property
    def killed(self) -> bool:
        """See :attr:`meshfeed._src.reading.workers.WorkerPool.killed`."""
        return self._pool.killed

    def is_ready(self) -> bool:
        """See :meth:`meshfeed._src.reading.workers.WorkerPool.is_ready`."""
        return self._pool.is_ready()

    def go_to(self, entries: Mapping[int, LaneEntry]) -> None:
        """See :meth:`LaneGroup.go_to`; before the first read, and again after an error only with a new object."""
        for worker in range(self._num_workers):
            self._pool.submit(worker, {lane: entries[lane] for lane in self._lanes[worker :: self._num_workers]})
        for worker in range(self._num_workers):
            self._pool.result(worker, self._timeout_seconds)

    def submit(self, num_records: int) -> None:
        """Queues a read of ``num_records`` records of each lane."""
        for worker in range(self._num_workers):
            self._pool.submit(worker, num_records)

    def result(self) -> GroupRows:
        """Waits for the oldest queued read and returns its rows."""
        answers = [self._pool.result(worker, self._timeout_seconds) for worker in range(self._num_workers)]
        parts = cast("list[GroupRows]", answers)
        lanes = {lane: rows for part in parts for lane, rows in part.lanes.items()}
        # In the order of a read in this process: states list bad records in this order.
        return GroupRows(dict(sorted(lanes.items())), sum(part.seconds for part in parts))

    def describe(self) -> str:
        """Returns what the workers are doing, for logs."""
        return f"waiting for {self._num_workers} workers to read lanes"

    def stop(self) -> None:
        """See :meth:`meshfeed._src.reading.workers.WorkerPool.stop`."""
        self._pool.stop()

    def close(self) -> None:
        """Stops the workers."""
        self._pool.close()
