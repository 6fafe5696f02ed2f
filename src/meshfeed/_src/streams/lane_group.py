"""Lanes that are open in this process, or in workers: reads the same number of records of each."""

from __future__ import annotations

import dataclasses
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import MeshfeedError, SourceError
from meshfeed._src.base.settings import Workers, at_most
from meshfeed._src.base.threads import Threads
from meshfeed._src.base.types import StreamSource
from meshfeed._src.reading.ahead import FetchAhead
from meshfeed._src.reading.workers import Pool, open_pool, pickle_task
from meshfeed._src.streams.lane import Lane, LaneEntry, LaneSettings, Taken

T = TypeVar("T")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class LaneRows:
    """One read of one lane.

    Attributes:
      taken: the rows read.
      entry: the lane's state after them.
      reads_again: see :attr:`Lane.reads_again`; False if lanes do not move, since a lane of many components takes long to
        answer.
    """

    taken: Taken
    entry: LaneEntry
    reads_again: bool = False


@dataclasses.dataclass(frozen=True)
class GroupRows:
    """One read of several lanes: lane → rows, in ascending order of the lanes, and its duration in seconds."""

    lanes: Mapping[int, LaneRows]
    seconds: float


class LaneGroup:
    """Reads the same number of records of each of its lanes.

    Args:
      source: a stream source.
      settings: shared settings.
      num_threads: threads that read lanes in parallel; one pool for all lanes.
    """

    def __init__(self, source: StreamSource, settings: LaneSettings, num_threads: int = 1) -> None:
        self._source, self._settings = source, settings
        self._num_threads = 1
        self._threads: Threads | None = None
        self._fetches: FetchAhead | None = None
        self._reads = 0
        self._lanes: dict[int, Lane] = {}
        self._reading: Lane | None = None
        self._stopped = False
        self.set_threads(num_threads)

    def is_ready(self) -> bool:
        """Whether lanes can be opened: at any time, in this process."""
        return True

    def go_to(self, entries: Mapping[int, LaneEntry]) -> None:
        """Opens the lanes, or moves the open ones forward, to where ``entries`` says. Between two reads.

        Raises:
          Exception: any error of the source. All lanes are then closed.
        """
        try:
            self._each(lambda lane: lane.go_to(entries[lane.lane_index]), list(self._lanes.values()))
            for lane_index in sorted(set(entries) - set(self._lanes)):
                self._lanes[lane_index] = Lane(self._source, lane_index, self._settings, entries[lane_index])
                if self._stopped:
                    raise MeshfeedError("the feed was closed while its lanes were being opened")
            self._reading = self._reading or next(iter(self._lanes.values()), None)
        except BaseException:
            self.close()
            raise

    def set_threads(self, num_threads: int) -> None:
        """Reads with this number of threads from the next read on."""
        if num_threads != self._num_threads:
            if self._threads is not None:
                self._threads.shutdown(wait=False)  # idle between two reads
            self._threads = Threads(num_threads, "meshfeed-lanes") if num_threads > 1 else None
            self._num_threads = num_threads

    def _each(self, function: Callable[[T], R], values: Iterable[T]) -> list[R]:
        return [function(value) for value in values] if self._threads is None else self._threads.map(function, values)

    def _fetch_ahead(self, num_records: int) -> None:
        """Fetches the files of upcoming reads, from the second read on, because a replay may read only once."""
        if self._reads == 1:
            plans = [plan for lane in self._lanes.values() if (plan := lane.coming_files(num_records)) is not None]
            if plans:
                self._fetches = FetchAhead(_join_plans(plans))
                weakref.finalize(self, self._fetches.close).atexit = False  # for a group dropped without close
        if self._fetches is not None:
            self._fetches.reached(self._reads - 1)
        self._reads += 1

    def read(self, num_records: int) -> GroupRows:
        """Reads up to ``num_records`` records of each lane; fewer only if a lane ends."""
        start = time.perf_counter()
        self._fetch_ahead(num_records)

        def take(lane: Lane) -> LaneRows:
            self._reading = lane
            try:
                taken = lane.take(num_records)
                return LaneRows(taken, lane.entry(), self._settings.moves and lane.reads_again)
            except StopIteration as error:  # which would end the feed
                raise SourceError(
                    f"lane {lane.lane_index} raised StopIteration outside of next(), in get_state or close, which does not "
                    "end the data. Raise a different exception there.",
                    lane_index=lane.lane_index,
                ) from error

        rows = self._each(take, self._lanes.values())
        return GroupRows(dict(zip(self._lanes, rows, strict=True)), time.perf_counter() - start)

    def describe(self) -> str:
        """Returns what the group is reading, for logs."""
        return self._reading.describe() if self._reading is not None else "idle"

    def stop(self) -> None:
        """Opens no further lane. A read in this process cannot be ended."""
        self._stopped = True

    def close(self) -> None:
        """Closes the lanes."""
        if self._fetches is not None:
            self._fetches.close()
        if self._threads is not None:
            self._threads.close()
        for lane in list(self._lanes.values()):
            lane.close()


def _join_plans(plans: Sequence[Iterator[Sequence[hooks.CachedFile]]]) -> Iterator[list[hooks.CachedFile]]:
    """Yields the files that each upcoming read of several lanes needs, until no lane needs any."""
    for parts in itertools.zip_longest(*plans, fillvalue=()):
        yield [file for files in parts for file in files]


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
            pickle_task(make_task, max_bytes, workers),
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
