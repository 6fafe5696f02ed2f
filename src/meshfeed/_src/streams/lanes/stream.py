"""The stream of a sequential source: a fixed slice of every batch's rows per lane, each lane read sequentially.

Groups of lanes read together: in the calling thread, in a thread pool, or in worker processes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshfeed._src.base.errors import SettingsError, SourceError, StateMismatchError
from meshfeed._src.base.settings import BatchSchedule, FeedSettings, Workers
from meshfeed._src.base.threads import Threads
from meshfeed._src.base.types import PyTree, RecordIds
from meshfeed._src.order import steps as step_schedules
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.host_batch import RecordSpec, add_mask, num_bytes, spec_of_batch
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.workers import WorkerPool, pickle_task
from meshfeed._src.state import state as feed_state
from meshfeed._src.state.state import Ledgers, count_skipped
from meshfeed._src.streams.lanes.lane import (
    Lane,
    LaneEntry,
    LaneRun,
    LaneSettings,
    Taken,
    lane_runs,
    needed_lanes,
    place_rows,
)
from meshfeed._src.streams.protocol import EMPTY_STREAM, Cursor, HostBatch, LocalIterator


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


_MAX_LANES = 64


def default_num_lanes(sizes: tuple[int, ...]) -> int:
    """Returns the largest common divisor of the batch sizes that is at most 64."""
    common = math.gcd(*sizes)
    return next(lanes for lanes in range(min(_MAX_LANES, common), 0, -1) if common % lanes == 0)


class LaneStream:
    """See :class:`meshfeed._src.streams.protocol.FeedStream`.

    Args:
      source: a stream source.
      settings: the feed's settings.
    """

    kind = "lanes"
    opens_at_restore = True

    def __init__(self, source: Any, settings: FeedSettings) -> None:
        if settings.schedule is None:
            raise SettingsError(
                "global_batch_size is missing; a stream needs it (an int or a meshfeed.BatchSchedule).",
                setting="global_batch_size",
            )
        if settings.shuffle is not False:
            raise SettingsError(
                f"shuffle={settings.shuffle!r}, but a stream cannot be shuffled as a whole: it is read one record after "
                "the other. Shuffle in the source (Grain's WindowShuffle, HuggingFace(shuffle_buffer=…)), or pass a "
                "random-access source.",
                setting="shuffle",
            )
        if settings.bad_records is not None and getattr(source, "decode", None) is None:
            raise SettingsError(
                "bad_records=SkipBad(…) on a stream covers its decode, and this one has none; leave it out, and handle "
                "bad records where the stream is made.",
                setting="bad_records",
            )
        self.source = source
        self._bind: Any = getattr(source, "bind", None)  # a mixture's stages begin at steps
        self._settings = settings
        self._schedule: BatchSchedule = settings.schedule
        self.num_lanes = settings.num_lanes or default_num_lanes(self._schedule.sizes)
        self._check_lanes(self.num_lanes)
        check_source = getattr(source, "check_lanes", None)  # rejects a num_lanes that the source cannot serve
        if callable(check_source):
            check_source(self.num_lanes)
        self._identity = source_identity(source, settings.retry)  # may read, which taking a state must not
        if self._bind is not None:
            self.start().source.mixture_config()  # same for the components of a mixture
        self._spec: RecordSpec | None = None

    def _check_lanes(self, num_lanes: int) -> None:
        for size in self._schedule.sizes:
            if size % num_lanes:
                best = default_num_lanes(self._schedule.sizes)
                raise SettingsError(
                    f"num_lanes={num_lanes} does not divide global_batch_size={size}; it takes a divisor of every batch "
                    f"size, such as {best}.",
                    setting="num_lanes",
                )

    @property
    def _pad(self) -> bool:
        return self._settings.end == "pad"

    # ------------------------------------------------------------------ state

    def fingerprint(self, cursor: Cursor) -> dict[str, Any]:
        """Source, seed, epochs, end and number of lanes."""
        return {
            "source": self._identity,
            "seed": self._settings.seed,
            "num_epochs": self._settings.num_epochs,
            "end": self._settings.end,
            "num_lanes": cursor.num_lanes,
            **({} if self._bind is None else {"mixture": cursor.source.mixture_config()}),
        }

    def _source_under(self, step_schedule: step_schedules.StepSchedule) -> Any:
        if self._bind is None:
            return self.source
        settings = self._settings
        return self._bind(
            seed=settings.seed, num_epochs=settings.num_epochs, position_of_step=step_schedule.position_of_step
        )

    def start(self, like: Cursor | None = None) -> Cursor:
        """Returns the cursor at step 0, every lane at its beginning; keeps ``num_lanes`` of ``like``."""
        num_lanes = self.num_lanes if like is None else like.num_lanes
        entries = {str(lane): LaneEntry() for lane in range(num_lanes)}
        step_schedule = step_schedules.StepSchedule(self._schedule)
        return Cursor(
            step_schedule, 0, 0, entries=entries, num_lanes=num_lanes, source=self._source_under(step_schedule)
        )

    def restore(self, state: feed_state.FeedState) -> Cursor:
        """Returns the state's cursor, with the lanes that the state contains."""
        remedy = "The state was changed or damaged; use an earlier checkpoint."
        num_lanes = self._settings.num_lanes or state.num_lanes
        if state.num_lanes is None or state.step is None or state.lanes is None or not num_lanes:
            raise StateMismatchError("lanes", None, "num_lanes, step and lanes of a stream", remedy)
        here = dataclasses.replace(self.start(), num_lanes=num_lanes)
        saved, current = dict(state.fingerprint), self.fingerprint(here)
        # check_saved compares a mixture stage by stage: stages that have not begun may differ.
        mixture = saved.pop("mixture", None) if current.pop("mixture", None) else None
        feed_state.compare_fingerprints(saved, current, getattr(self.source, "file_names", None))
        if num_lanes != state.num_lanes:
            raise StateMismatchError("num_lanes", state.num_lanes, num_lanes, remedy)
        if any(size % num_lanes for size in self._schedule.sizes):
            raise StateMismatchError(
                "num_lanes",
                num_lanes,
                f"a divisor of the batch sizes {list(self._schedule.sizes)}",
                "Choose global_batch_size as a multiple of the saved number of lanes.",
            )
        segments = step_schedules.parse_segments(state.segments)
        nominal = 0
        if segments:
            last = segments[-1]
            nominal = last.first_position + (state.step - last.first_step) * last.size
        consistent = state.step > segments[-1].first_step if segments else state.step == 0
        if not consistent or state.position > nominal or (not self._pad and state.position != nominal):
            raise StateMismatchError("position", state.position, f"{nominal} at step {state.step}", remedy)
        entries: dict[str, LaneEntry] = {}
        for key, value in state.lanes.items():
            if not key.isdecimal() or int(key) >= num_lanes:
                raise StateMismatchError(f"lanes.{key}", key, f"a lane below {num_lanes}", remedy)
            entries[key] = LaneEntry.from_json(value, int(key))
            expected = nominal // num_lanes
            entry = entries[key]
            if entry.records > expected or (entry.records < expected and not entry.ended):
                raise StateMismatchError(f"lanes.{key}.records", entry.records, expected, remedy)
        delivered = sum(entry.records for entry in entries.values())
        if len(entries) == num_lanes and delivered != state.position:
            raise StateMismatchError("position", state.position, f"{delivered} records in all lanes", remedy)
        ended = {int(key): entry.records for key, entry in entries.items() if entry.ended}
        step_schedule = step_schedules.StepSchedule(self._schedule, past=segments, step=state.step, position=nominal)
        source = self._source_under(step_schedule)
        if self._bind is not None:
            source.check_saved(mixture, nominal, state.step)
        return Cursor(
            step_schedule,
            state.step,
            state.position,
            entries=entries,
            ended=ended,
            skipped=Ledgers.of_state(state),
            num_skipped=count_skipped(state),
            num_lanes=num_lanes,
            source=source,
        )

    def state(self, cursor: Cursor) -> feed_state.FeedState:
        """Returns the state; it contains only this host's lanes."""
        return feed_state.FeedState(
            kind=self.kind,
            position=cursor.position,
            step=cursor.step,
            segments=cursor.step_schedule.delivered_json(cursor.step),
            fingerprint=self.fingerprint(cursor),
            num_lanes=cursor.num_lanes,
            lanes={lane: entry.to_json() for lane, entry in sorted(cursor.entries.items(), key=lambda i: int(i[0]))},
            **cursor.skipped.state_fields(),
            num_skipped=cursor.num_skipped or None,
        )

    def records_after(self, cursor: Cursor, step: int, ended: Mapping[int, int]) -> int:
        """Returns the records up to and including ``step``, from the lengths of the ended lanes."""
        position, size = cursor.step_schedule.at(step)
        each = (position + size) // cursor.num_lanes
        ended = {**cursor.ended, **ended} if cursor.ended else ended
        return position + size - sum(max(0, each - length) for length in ended.values())

    def advance(self, cursor: Cursor, batch: HostBatch, ended: Mapping[int, int], num_skipped: int = 0) -> Cursor:
        """Returns the cursor after a delivered batch."""
        return dataclasses.replace(
            cursor,
            step=batch.step + 1,
            position=self.records_after(cursor, batch.step, ended),
            entries=batch.entries,
            ended={**cursor.ended, **ended} if ended else cursor.ended,
            skipped=cursor.skipped.after(batch.bad, batch.step),
            num_skipped=num_skipped,
        )

    # ------------------------------------------------------------------ reading

    def open_reader(self, cursor: Cursor, host_rows: HostRows, *, hosts_agree: bool) -> LaneReader:
        """Opens this host's lanes at a cursor.

        Raises:
          StateMismatchError: the state lacks lanes that this host needs.
        """
        size = cursor.step_schedule.at(cursor.step)[1]
        needed = needed_lanes(host_rows.rows(size), size // cursor.num_lanes)
        missing = [lane for lane in needed if str(lane) not in cursor.entries]
        if missing:
            raise StateMismatchError(
                "lanes",
                f"lanes {sorted(int(lane) for lane in cursor.entries)} of {cursor.num_lanes}",
                f"this host reads the lanes {needed}",
                f"The state lacks the lanes {missing}: join the states of all hosts with meshfeed.merge_states.",
            )
        entries = {lane: cursor.entries[str(lane)] for lane in needed}
        return LaneReader(self, cursor, host_rows, self._settings, entries, hosts_agree=hosts_agree)

    def lane_settings(self, num_lanes: int) -> LaneSettings:
        """Returns the settings that all lanes share."""
        settings = self._settings
        num_epochs = 1 if getattr(self.source, "owns_epochs", False) else settings.num_epochs
        return LaneSettings(num_lanes, num_epochs, settings.seed, settings.retry, settings.bad_records)

    def record_spec(self) -> RecordSpec:
        """Returns the structure of the first record of the first nonempty lane."""
        if self._spec is None:
            settings = dataclasses.replace(self.lane_settings(self.num_lanes), num_epochs=1)
            source = self._source_under(step_schedules.StepSchedule(self._schedule))
            for lane_index in range(self.num_lanes):
                lane = Lane(source, lane_index, settings, LaneEntry())
                taken = lane.take(1)
                lane.close()
                if taken.tree is not None:
                    self._spec = spec_of_batch(taken.tree, 1, what=f"lane {lane_index}")
                    break
            else:
                raise SourceError(f"the stream is empty: none of its {self.num_lanes} lanes has a record.")
        return self._spec

    def batch_size_at(self, cursor: Cursor) -> int:
        """Returns the global batch size of the next step."""
        return cursor.step_schedule.at(cursor.step)[1]

    def num_steps(self, cursor: Cursor) -> int | None:
        """Always raises: the number of steps is unknown until the stream ends."""
        raise TypeError("a stream has no length before it has ended.")

    def record_ids(self, cursor: Cursor, step: int) -> RecordIds:
        """Always raises: streams have no record ids."""
        raise SourceError(
            f"record_ids({step}): a stream has no record ids; read the step again from a state taken before it."
        )

    def read(self, record_ids: Any) -> PyTree:
        """Always raises: streams cannot be read by record id."""
        raise SourceError("read(record_ids): a stream has no record ids; pass a random-access source.")

    def local_iterator(self, feed: Any) -> LocalIterator:
        """Returns the feed as a local iterator."""
        return LocalIterator(feed)

    def close(self) -> None:
        """Closes the source if it has a ``close`` method."""
        close = getattr(self.source, "close", None)
        if callable(close):
            close()


class LaneReader:
    """Reads this host's lanes, step by step.

    Args:
      stream: the stream.
      cursor: where to start.
      host_rows: this host's rows.
      settings: the feed's settings.
      entries: lane → where to start; must contain all lanes that this host needs.
      hosts_agree: whether other hosts take part and may still have data when this one has none.
    """

    sequential = True

    def __init__(
        self,
        stream: LaneStream,
        cursor: Cursor,
        host_rows: HostRows,
        settings: FeedSettings,
        entries: Mapping[int, LaneEntry],
        *,
        hosts_agree: bool,
    ) -> None:
        self._step_schedule = cursor.step_schedule
        self._host_rows = host_rows
        self._settings = settings
        self._num_lanes = cursor.num_lanes
        self._step = cursor.step
        self._asked = cursor.step
        self._go_on = hosts_agree and settings.end == "pad"
        self._hosts_agree = hosts_agree
        self.empty = True  # no lane of this host has produced a record so far
        self._spec: RecordSpec | None = None
        self._runs: dict[int, tuple[int, tuple[LaneRun, ...]]] = {}  # batch size → (host rows, their runs)
        self._final: int | None = None
        self._group: LaneGroup | None = None
        self._workers: WorkerLanes | None = None
        shared = stream.lane_settings(cursor.num_lanes)
        if settings.num_workers and entries:
            self._workers = WorkerLanes(cursor.source, shared, entries, settings.num_workers, settings.timeout_seconds)
        else:
            self._group = LaneGroup(cursor.source, shared, entries, settings.num_threads or 1)

    def _rows_per_lane(self, step: int) -> int:
        return self._step_schedule.at(step)[1] // self._num_lanes

    def _read(self, step: int) -> GroupRows:
        if self._group is not None:
            return self._group.read(self._rows_per_lane(step))
        assert self._workers is not None
        while self._asked <= step + 1:  # queue the next step too, so that workers read while this one is delivered
            self._workers.submit(self._rows_per_lane(self._asked))
            self._asked += 1
        return self._workers.result()

    def next(self) -> HostBatch:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        step = self._step
        size = self._step_schedule.at(step)[1]
        per_lane = self._rows_per_lane(step)
        if size not in self._runs:
            rows = self._host_rows.rows(size)
            self._runs[size] = len(rows), lane_runs(rows, per_lane)
        num_rows, runs = self._runs[size]
        group = self._read(step)
        self.empty = self.empty and not any(row.entry.records for row in group.lanes.values())
        if self.empty and group.lanes and not self._hosts_agree:
            raise SourceError(EMPTY_STREAM)
        short = [lane for lane, row in group.lanes.items() if row.taken.count < per_lane]
        if short and self._settings.end == "drop":
            raise StopIteration
        if not any(row.taken.count for row in group.lanes.values()):
            if not self._go_on:
                raise StopIteration
            self._final = step if self._final is None else self._final
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

    def final(self) -> int | None:
        """Returns the first step without a real row of this host, if reached."""
        return self._final

    def describe(self) -> str:
        """Returns what the reader is doing."""
        reader = self._group if self._group is not None else self._workers
        return f"step {self._step}: {reader.describe()}" if reader is not None else "idle"

    def close(self) -> None:
        """Closes lanes, threads and processes."""
        for reader in (self._group, self._workers):
            if reader is not None:
                reader.close()
