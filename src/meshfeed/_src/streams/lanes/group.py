"""Groups of lanes read together: in the calling thread, in a thread pool, or in worker processes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshfeed._src.base.settings import Workers
from meshfeed._src.base.threads import Threads
from meshfeed._src.reading.workers.pool import WorkerPool, pickle_task
from meshfeed._src.streams.lanes.lane import Lane, LaneEntry, LaneSettings, Taken


@dataclasses.dataclass(frozen=True)
class LaneRows:
    """One read of one lane.

    Attributes:
      taken: the rows read.
      entry: the lane's state after them.
    """

    taken: Taken
    entry: LaneEntry


@dataclasses.dataclass(frozen=True)
class GroupRows:
    """One read of several lanes: lane → rows, and its duration in seconds."""

    lanes: Mapping[int, LaneRows]
    seconds: float


class LaneGroup:
    """Reads the same number of records of each of its lanes.

    Args:
      source: a stream source.
      settings: shared settings.
      entries: lane → where to start.
      num_threads: threads that read lanes in parallel; one pool for all lanes.
    """

    def __init__(
        self, source: Any, settings: LaneSettings, entries: Mapping[int, LaneEntry], num_threads: int = 1
    ) -> None:
        self._threads = None
        if num_threads > 1 and len(entries) > 1:
            self._threads = Threads(min(num_threads, len(entries)), "meshfeed-lanes")
        self._lanes: list[Lane] = []
        try:
            for lane_index, entry in sorted(entries.items()):
                self._lanes.append(Lane(source, lane_index, settings, entry))
        except BaseException:
            self.close()
            raise
        self._reading: Lane | None = self._lanes[0] if self._lanes else None

    def read(self, num_records: int) -> GroupRows:
        """Reads up to ``num_records`` records of each lane; fewer only if a lane ends."""
        start = time.perf_counter()

        def take(lane: Lane) -> LaneRows:
            taken = lane.take(num_records)
            return LaneRows(taken, lane.entry())

        if self._threads is None:
            rows = []
            for lane in self._lanes:
                self._reading = lane
                rows.append(take(lane))
        else:
            rows = self._threads.map(take, self._lanes)
        lanes = {lane.lane_index: row for lane, row in zip(self._lanes, rows, strict=True)}
        return GroupRows(lanes, time.perf_counter() - start)

    def describe(self) -> str:
        """For logs."""
        return self._reading.describe() if self._reading is not None else "idle"

    def close(self) -> None:
        """Closes the lanes."""
        if self._threads is not None:
            self._threads.close()
        for lane in self._lanes:
            lane.close()

    # a worker calls the group as its task
    __call__ = read


class WorkerLanes:
    """Lanes distributed over worker processes, with reads queued ahead.

    Args:
      source: sent to each worker.
      settings: shared settings.
      entries: lane → where to start.
      num_workers: number of processes; capped at one per lane.
      timeout_seconds: longest wait for one answer.
    """

    def __init__(
        self,
        source: Any,
        settings: LaneSettings,
        entries: Mapping[int, LaneEntry],
        num_workers: Workers,
        timeout_seconds: float,
    ) -> None:
        lanes = sorted(entries)
        self._num_workers = max(1, min(num_workers, len(lanes)))
        self._timeout_seconds = timeout_seconds

        def make_task() -> Callable[[Any], Any]:
            groups: list[LaneGroup] = []

            def task(request: Any) -> Any:
                kind, value = request
                if kind == "open":
                    groups.append(LaneGroup(source, settings, value))
                    return None
                return groups[0].read(value)

            return task

        self._pool = WorkerPool(
            self._num_workers,
            pickle_task(make_task),
            name="the feed",
            gc_every=num_workers.gc_every,
            describe=lambda request: f"{request[0]} lanes",
        )
        try:
            for worker in range(self._num_workers):
                mine = {lane: entries[lane] for lane in lanes[worker :: self._num_workers]}
                self._pool.submit(worker, ("open", mine))
            for worker in range(self._num_workers):
                self._pool.result(worker, timeout_seconds)
        except BaseException:
            self._pool.close()
            raise

    def submit(self, num_records: int) -> None:
        """Queues a read of ``num_records`` records of each lane."""
        for worker in range(self._num_workers):
            self._pool.submit(worker, ("read", num_records))

    def result(self) -> GroupRows:
        """Waits for the oldest queued read and returns its rows."""
        parts: list[GroupRows] = [
            self._pool.result(worker, self._timeout_seconds) for worker in range(self._num_workers)
        ]
        lanes = {lane: rows for part in parts for lane, rows in part.lanes.items()}
        return GroupRows(lanes, sum(part.seconds for part in parts))

    def describe(self) -> str:
        """For logs."""
        return f"waiting for {self._num_workers} workers to read lanes"

    def close(self) -> None:
        """Stops the worker processes."""
        self._pool.close()
