"""Reads the lanes whose rows a host holds: in the calling thread, in a thread pool, or in worker processes."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import jax
import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.settings import FeedSettings, Workers, at_most
from meshfeed._src.base.threads import Threads
from meshfeed._src.base.types import StreamSource
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.ahead import FetchAhead
from meshfeed._src.reading.host_batch import add_mask
from meshfeed._src.reading.reads import AutoReads, ReadNumbers
from meshfeed._src.reading.stacking import RecordSpec, num_bytes
from meshfeed._src.reading.workers import Pool, open_pool, pickle_task
from meshfeed._src.streams.lane import Lane, LaneEntry, LaneSettings, Taken
from meshfeed._src.streams.lane_rows import LaneRun, lane_runs, place_rows
from meshfeed._src.streams.protocol import (
    EMPTY_STREAM,
    Cursor,
    HostBatch,
)

_log = logging.getLogger("meshfeed.lanes")


@dataclasses.dataclass(frozen=True)
class LaneCursor(Cursor):
    """The cursor of a stream read as lanes.

    Attributes:
      source: the source from which lanes are opened. For a mixture it depends on the step schedule, because stages begin
        at steps.
      entries: lane → its state.
      ended: lane → length in records, for the lanes of all hosts known to have ended before ``step``.
      cut: the version of the rule that divides the records into lanes; see :class:`meshfeed._src.base.hooks.CutsLanes`.
    """

    source: StreamSource
    entries: Mapping[str, LaneEntry]
    ended: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])
    cut: int = 1

    def records_after(self, step: int, ended: Mapping[int, int]) -> int:
        """Returns the records up to and including ``step``, from the lengths of the ended lanes."""
        position, size = self.step_schedule.at(step)
        each = (position + size) // self.num_lanes
        ended = {**self.ended, **ended} if self.ended else ended
        return position + size - sum(max(0, each - length) for length in ended.values())


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
        self, source: StreamSource, settings: LaneSettings, entries: Mapping[int, LaneEntry], num_threads: int = 1
    ) -> None:
        self._num_threads = 1
        self._threads: Threads | None = None
        self._fetches: FetchAhead | None = None
        self._reads = 0
        self.set_threads(min(num_threads, len(entries)))
        self._lanes: list[Lane] = []
        try:
            for lane_index, entry in sorted(entries.items()):
                self._lanes.append(Lane(source, lane_index, settings, entry))
        except BaseException:
            self.close()
            raise
        self._reading: Lane | None = self._lanes[0] if self._lanes else None

    def set_threads(self, num_threads: int) -> None:
        """Reads with this number of threads from the next read on."""
        if num_threads != self._num_threads:
            if self._threads is not None:
                self._threads.shutdown(wait=False)  # idle between two reads
            self._threads = Threads(num_threads, "meshfeed-lanes") if num_threads > 1 else None
            self._num_threads = num_threads

    def _fetch_ahead(self, num_records: int) -> None:
        """Fetches the files of upcoming reads, from the second read on, because a replay may read only once."""
        if self._reads == 1:
            plans = [plan for lane in self._lanes if (plan := lane.coming_files(num_records)) is not None]
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
                return LaneRows(taken, lane.entry())
            except StopIteration as error:  # which would end the feed
                raise SourceError(
                    f"lane {lane.lane_index} raised StopIteration outside of next(), in get_state or close, which does not "
                    "end the data. Raise a different exception there.",
                    lane_index=lane.lane_index,
                ) from error

        rows = [take(lane) for lane in self._lanes] if self._threads is None else self._threads.map(take, self._lanes)
        lanes = {lane.lane_index: row for lane, row in zip(self._lanes, rows, strict=True)}
        return GroupRows(lanes, time.perf_counter() - start)

    def describe(self) -> str:
        """Returns what the group is reading, for logs."""
        return self._reading.describe() if self._reading is not None else "idle"

    def stop(self) -> None:
        """Does nothing: a read in this process cannot be ended."""

    def close(self) -> None:
        """Closes the lanes."""
        if self._fetches is not None:
            self._fetches.close()
        if self._threads is not None:
            self._threads.close()
        for lane in self._lanes:
            lane.close()

    # a worker calls the group as its task
    __call__ = read


def _join_plans(plans: Sequence[Iterator[Sequence[hooks.CachedFile]]]) -> Iterator[list[hooks.CachedFile]]:
    """Yields the files that each upcoming read of several lanes needs, until no lane needs any."""
    for parts in itertools.zip_longest(*plans, fillvalue=()):
        yield [file for files in parts for file in files]


_Request = int | dict[int, LaneEntry]
"""To a worker: the records to read of each of its lanes, or at first the lanes to open."""


def _open_after(request: _Request, answer: GroupRows | None) -> _Request:
    """Returns the request that opens the lanes of a worker where ``answer`` left them."""
    return request if answer is None else {lane: rows.entry for lane, rows in answer.lanes.items()}


class WorkerLanes:
    """Lanes distributed over workers, with reads queued ahead.

    Args:
      source: sent to each worker.
      settings: shared settings.
      entries: lane → where to start.
      num_workers: number of workers, capped at one per lane, and their engine.
      timeout_seconds: longest wait for one answer.
    """

    def __init__(
        self,
        source: StreamSource,
        settings: LaneSettings,
        entries: Mapping[int, LaneEntry],
        num_workers: Workers,
        timeout_seconds: float,
    ) -> None:
        lanes = sorted(entries)
        workers = at_most(num_workers, max(1, len(lanes)))
        self._num_workers = int(workers)
        self._timeout_seconds = timeout_seconds

        def make_task() -> Callable[[_Request], GroupRows | None]:
            groups: list[LaneGroup] = []

            # The first request opens the lanes: each worker has its own, but all get the same pickled task.
            def task(request: _Request) -> GroupRows | None:
                if isinstance(request, int):
                    return groups[0].read(request)
                groups.append(LaneGroup(source, settings, request))
                return None

            return task

        self._pool: Pool = open_pool(
            workers,
            pickle_task(make_task),
            name="the feed",
            describe=lambda request: "reading lanes" if isinstance(request, int) else "opening lanes",
            resume=_open_after,
        )
        try:
            for worker in range(self._num_workers):
                mine = {lane: entries[lane] for lane in lanes[worker :: self._num_workers]}
                self._pool.submit(worker, mine)
            for worker in range(self._num_workers):
                self._pool.result(worker, timeout_seconds)
        except BaseException:
            self._pool.close()
            raise

    def submit(self, num_records: int) -> None:
        """Queues a read of ``num_records`` records of each lane."""
        for worker in range(self._num_workers):
            self._pool.submit(worker, num_records)

    def result(self) -> GroupRows:
        """Waits for the oldest queued read and returns its rows."""
        answers = [self._pool.result(worker, self._timeout_seconds) for worker in range(self._num_workers)]
        parts = cast("list[GroupRows]", answers)
        lanes = {lane: rows for part in parts for lane, rows in part.lanes.items()}
        return GroupRows(lanes, sum(part.seconds for part in parts))

    def describe(self) -> str:
        """Returns what the workers are doing, for logs."""
        return f"waiting for {self._num_workers} workers to read lanes"

    def stop(self) -> None:
        """See :meth:`meshfeed._src.reading.workers.WorkerPool.stop`."""
        self._pool.stop()

    def close(self) -> None:
        """Stops the workers."""
        self._pool.close()


def _warn_of_longer_lanes(lanes: Mapping[int, LaneRows], first: int, num_lanes: int, position: int) -> None:
    """Warns that a stream ends with its shortest lane, if other lanes of this host still have records."""
    longer = {lane: rows for lane, rows in lanes.items() if not rows.entry.ended}
    if not longer:  # equally long lanes, up to a part of a batch
        return
    read = sum(rows.entry.records for rows in lanes.values())
    delivered = position * len(lanes) // num_lanes
    _log.warning(
        "the stream ends with lane %d of %d, which has %s records, while lanes %s still had data: at least %s records are "
        "not delivered. With end='drop' a stream ends with its shortest lane; use end='pad' with mask_key=, fewer lanes "
        "(num_lanes=), or divide the records so that all lanes get as many.",
        first,
        num_lanes,
        f"{lanes[first].entry.records:,}",
        ", ".join(map(str, sorted(longer)[:8])) + (", …" if len(longer) > 8 else ""),
        f"{read - delivered:,}",
    )


class LaneReader:
    """Reads this host's lanes, step by step.

    Args:
      cursor: where to start.
      host_rows: this host's rows.
      settings: the feed's settings.
      shared: settings of each lane.
      entries: lane → where to start; must contain all lanes that this host needs.
      hosts_agree: whether other hosts take part and may still have data when this one has none.
    """

    sequential = True

    def __init__(
        self,
        cursor: LaneCursor,
        host_rows: HostRows,
        settings: FeedSettings,
        shared: LaneSettings,
        entries: Mapping[int, LaneEntry],
        *,
        hosts_agree: bool,
    ) -> None:
        self._step_schedule = cursor.step_schedule
        self._host_rows = host_rows
        self._settings = settings
        self._num_lanes = cursor.num_lanes
        self._step = cursor.step
        self._since = time.monotonic()
        self._asked = cursor.step
        self._go_on = hosts_agree and settings.end == "pad"
        self._hosts_agree = hosts_agree
        self._counts_lanes = hooks.find(cursor.source, hooks.CountsLanes)
        self.empty = True  # no lane of this host has produced a record so far
        self._spec: RecordSpec | None = None
        self._runs: dict[int, tuple[int, tuple[LaneRun, ...]]] = {}  # batch size → (host rows, their runs)
        self._final: int | None = None
        self._beginnings: list[set[bytes]] = []  # of the first steps: the first record of each lane
        self._max_threads = max(1, len(entries))  # a thread reads a whole lane
        self._num_threads = min(settings.threads or hooks.read_threads(cursor.source), self._max_threads)
        self._lanes = (
            WorkerLanes(cursor.source, shared, entries, settings.workers, settings.timeout_seconds)
            if settings.workers and entries
            else LaneGroup(cursor.source, shared, entries, self._num_threads)
        )
        self._auto: AutoReads | None = None

    def adapt(self, auto: AutoReads) -> None:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        self._auto = auto
        auto.begin(ReadNumbers(int(self._settings.workers), self._num_threads))
        auto.keep("num_workers", "the lanes of a stream are open in this process, and moving one would open it again")
        if not isinstance(self._lanes, LaneGroup):
            auto.keep("num_threads", "worker processes read the lanes, each in one thread")
        elif self._max_threads < 2:
            auto.keep("num_threads", "a thread reads a whole lane, and this host has only one")

    def _rows_per_lane(self, step: int) -> int:
        return self._step_schedule.at(step)[1] // self._num_lanes

    def _read(self, step: int) -> GroupRows:
        if isinstance(self._lanes, LaneGroup):
            if self._auto is not None and self._auto.wanted != self._auto.in_use:
                self._lanes.set_threads(min(self._auto.wanted.num_threads, self._max_threads))
                self._auto.in_use = self._auto.wanted
            return self._lanes.read(self._rows_per_lane(step))
        while self._asked <= step + 1:  # queue the next step too, so that workers read while this one is delivered
            self._lanes.submit(self._rows_per_lane(self._asked))
            self._asked += 1
        return self._lanes.result()

    def next(self) -> HostBatch:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        step, self._since = self._step, time.monotonic()
        size = self._step_schedule.at(step)[1]
        num_rows, runs = self._lane_runs(size)
        group = self._read(step)
        self._check_end(group.lanes, step)
        if step < 2:
            self._note_beginnings(group.lanes)
        self._step = step + 1
        tree, real, self._spec = place_rows(
            {lane: row.taken for lane, row in group.lanes.items()}, runs, num_rows, self._spec
        )
        if tree is not None and self._settings.mask_key is not None:
            tree = add_mask(tree, self._settings.mask_key, real)
        return HostBatch(
            step=step,
            global_batch_size=size,
            tree=tree,
            num_bytes=0 if tree is None else num_bytes(tree),
            entries={str(lane): row.entry for lane, row in group.lanes.items()},
            ended={lane: row.entry.records for lane, row in group.lanes.items() if row.entry.ended},
            bad=[entry for row in group.lanes.values() for entry in row.taken.bad],
            times={"read_seconds": group.seconds},
            retries=sum(row.taken.retries for row in group.lanes.values()),
        )

    def _lane_runs(self, size: int) -> tuple[int, tuple[LaneRun, ...]]:
        if size not in self._runs:
            rows = self._host_rows.rows(size)
            self._runs[size] = len(rows), lane_runs(rows, size // self._num_lanes)
        return self._runs[size]

    def _note_beginnings(self, lanes: Mapping[int, LaneRows]) -> None:
        """Warns if all lanes of this host begin with the same two records, which differ from each other."""
        if len(lanes) < 2 or not all(rows.taken.count for rows in lanes.values()):
            return
        trees = (rows.taken.tree for rows in lanes.values())
        self._beginnings.append(
            {b"".join(np.asarray(leaf[0]).tobytes() for leaf in jax.tree.leaves(tree)) for tree in trees}
        )
        if [len(records) for records in self._beginnings] == [1, 1] and self._beginnings[0] != self._beginnings[1]:
            _log.warning(
                "all %d lanes of this host begin with the same records, so each record comes as often as there are lanes. "
                "open(lane_index, num_lanes) must return a part of the data for each lane: records lane_index, lane_index + "
                "num_lanes, …, or files.",
                len(lanes),
            )

    def _check_end(self, lanes: Mapping[int, LaneRows], step: int) -> None:
        """Raises StopIteration if this host's lanes cannot fill ``step``; records the first step that is all padding."""
        rows = lanes.values()
        if not rows and self._hosts_agree and self._settings.end == "drop":
            return  # only the hosts with lanes know the end, and announce it
        self.empty = self.empty and not any(row.entry.records for row in rows)
        if self.empty and rows and not self._hosts_agree:
            raise SourceError(EMPTY_STREAM)
        counts = [row.taken.count for row in rows]
        if self._settings.end == "drop" and min(counts, default=0) < self._rows_per_lane(step):
            first = min(lanes, key=lambda lane: lanes[lane].entry.records)
            if not self._was_expected(first, lanes[first]):
                _warn_of_longer_lanes(lanes, first, self._num_lanes, self._step_schedule.at(step)[0])
            raise StopIteration
        if not any(counts):
            if not self._go_on:
                raise StopIteration
            self._final = step if self._final is None else self._final

    def _was_expected(self, lane_index: int, rows: LaneRows) -> bool:
        """Whether a lane had as many records as its source counted: a feed that loses many by that warns when it is made."""
        lengths = None if self._counts_lanes is None else self._counts_lanes.lane_lengths(self._num_lanes)
        epochs = self._settings.num_epochs
        if not lengths or epochs is None:
            return False
        return rows.entry.records >= epochs * lengths[lane_index]

    def advance(self, cursor: LaneCursor, batch: HostBatch, ended: Mapping[int, int], num_skipped: int) -> LaneCursor:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        position, size = cursor.step_schedule.at(batch.step)
        each = (position + size) // cursor.num_lanes
        # Of lanes read ahead, others end later; with weights that are set before that, they may go on.
        before = {lane: length for lane, length in ended.items() if length < each}
        return LaneCursor(
            cursor.step_schedule,
            batch.step + 1,
            cursor.records_after(batch.step, ended),
            cursor.source,
            batch.entries,
            {**cursor.ended, **before} if before else cursor.ended,
            cursor.cut,
            num_lanes=cursor.num_lanes,
            skipped=cursor.skipped.after(batch.bad, batch.step) if batch.bad else cursor.skipped,
            num_skipped=num_skipped,
        )

    def rewind(self, step: int) -> None:
        """Does nothing: reads are not interrupted."""

    def final(self) -> int | None:
        """Returns the first step without a real row of this host, if reached."""
        return self._final

    def describe(self) -> str:
        """Returns what the reader is doing."""
        return f"step {self._step}: {self._lanes.describe()} for {time.monotonic() - self._since:.1f} s"

    def stop(self) -> None:
        """See :meth:`meshfeed._src.streams.protocol.HostReader.stop`."""
        self._lanes.stop()

    def close(self) -> None:
        """Closes lanes, threads and processes."""
        self._lanes.close()
