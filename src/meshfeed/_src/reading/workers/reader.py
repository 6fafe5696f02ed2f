"""Reads rows in worker processes: worker ``step % num_workers`` reads step ``step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshfeed._src.base.settings import Workers
from meshfeed._src.base.types import ColumnSlices, RecordIds
from meshfeed._src.reading.records import ReadRows, RecordReader
from meshfeed._src.reading.workers.pool import WorkerPool, pickle_task


class WorkerReader:
    """Reads rows in worker processes.

    Args:
      reader: the reader to send to each worker.
      num_workers: number of processes.
      timeout_seconds: maximum wait for one result.
    """

    def __init__(self, reader: RecordReader, num_workers: Workers, *, timeout_seconds: float) -> None:
        def make_task() -> Callable[[Any], ReadRows]:
            return lambda request: reader.read(*request)

        self._pool = WorkerPool(
            num_workers,
            pickle_task(make_task),
            name="the feed",
            gc_every=num_workers.gc_every,
            describe=lambda request: f"reading {len(request[0])} records (first id {request[0][0]})",
        )
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds

    def submit(
        self, step: int, record_ids: RecordIds, epochs: RecordIds, columns: ColumnSlices | None
    ) -> Callable[[], ReadRows]:
        """Queues a read and returns a function that waits for its result; call both in the order of the steps."""
        worker = step % self._num_workers
        self._pool.submit(worker, (record_ids, epochs, columns))
        return lambda: self._pool.result(worker, self._timeout_seconds)

    def close(self) -> None:
        """Stops the processes."""
        self._pool.close()
