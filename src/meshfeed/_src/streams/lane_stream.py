"""The stream of a sequential source, read as lanes: each lane fills a fixed slice of the rows of every batch.

A host opens the lanes whose rows it holds, and reads them in the calling thread, in a thread pool, or in worker
processes. The state has one entry per lane, so lanes can move between hosts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import cast

import jax
import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import DAMAGED_STATE, SettingsError, SourceError, StateMismatchError
from meshfeed._src.base.hooks import find
from meshfeed._src.base.settings import FeedSettings, Workers, default_num_lanes
from meshfeed._src.base.threads import Threads
from meshfeed._src.base.types import JsonValue, PyTree, RecordIds, StreamSource
from meshfeed._src.order.steps import Segment, StepSchedule, parse_segments, position_at
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.ahead import FetchAhead
from meshfeed._src.reading.host_batch import add_mask, spec_of_batch
from meshfeed._src.reading.identity import identify_within
from meshfeed._src.reading.stacking import RecordSpec, num_bytes
from meshfeed._src.reading.structure import check_spec
from meshfeed._src.reading.workers import WorkerPool, pickle_task
from meshfeed._src.state.state import FeedState, Ledgers, count_skipped
from meshfeed._src.streams.lane import Lane, LaneEntry, LaneSettings, Taken
from meshfeed._src.streams.protocol import (
    EMPTY_STREAM,
    Cursor,
    HostBatch,
    check_fingerprint,
    required_schedule,
)


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
        self._threads = None
        self._fetches: FetchAhead | None = None
        self._reads = 0
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
            taken = lane.take(num_records)
            return LaneRows(taken, lane.entry())

        if self._threads is None:
            rows: list[LaneRows] = []
            for lane in self._lanes:
                self._reading = lane
                rows.append(take(lane))
        else:
            rows = self._threads.map(take, self._lanes)
        lanes = {lane.lane_index: row for lane, row in zip(self._lanes, rows, strict=True)}
        return GroupRows(lanes, time.perf_counter() - start)

    def describe(self) -> str:
        """Returns what the group is reading, for logs."""
        return self._reading.describe() if self._reading is not None else "idle"

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
        source: StreamSource,
        settings: LaneSettings,
        entries: Mapping[int, LaneEntry],
        num_workers: Workers,
        timeout_seconds: float,
    ) -> None:
        lanes = sorted(entries)
        self._num_workers = max(1, min(int(num_workers), len(lanes)))
        self._timeout_seconds = timeout_seconds

        def make_task() -> Callable[[_Request], GroupRows | None]:
            groups: list[LaneGroup] = []

            def task(request: _Request) -> GroupRows | None:
                if isinstance(request, int):
                    return groups[0].read(request)
                groups.append(LaneGroup(source, settings, request))
                return None

            return task

        self._pool: WorkerPool[_Request, GroupRows | None] = WorkerPool(
            self._num_workers,
            pickle_task(make_task),
            name="the feed",
            gc_every=num_workers.gc_every,
            describe=lambda request: "reading lanes" if isinstance(request, int) else "opening lanes",
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

    def close(self) -> None:
        """Stops the worker processes."""
        self._pool.close()


@dataclasses.dataclass(frozen=True)
class LaneCursor(Cursor):
    """The cursor of a stream read as lanes.

    Attributes:
      source: the source from which lanes are opened. For a mixture it depends on the step schedule, because stages begin
        at steps.
      entries: lane → its state.
      ended: lane → length in records, for the lanes of all hosts known to have ended.
    """

    source: StreamSource
    entries: Mapping[str, LaneEntry]
    ended: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])


class LaneStream:
    """See :class:`meshfeed._src.streams.protocol.FeedStream`.

    Args:
      source: a stream source.
      settings: the feed's settings.
    """

    kind = "lanes"
    opens_at_restore = True
    moved_by_opening = length_is_known = hosts_make_batches = in_columns = False

    def __init__(self, source: StreamSource, settings: FeedSettings) -> None:
        self.schedule = required_schedule(settings, "a stream")
        if settings.shuffle is not False:
            raise SettingsError(
                f"shuffle={settings.shuffle!r}, but a stream cannot be shuffled as a whole: its records are read in order. "
                "Shuffle in the source (Grain's WindowShuffle, HuggingFace(shuffle_buffer=…)), or pass a random-access "
                "source.",
                setting="shuffle",
            )
        if settings.bad_records is not None and find(source, hooks.Decodes) is None:
            raise SettingsError(
                "bad_records=SkipBad(…) on a stream covers only its decode, but this source has none. Omit it, and handle "
                "bad records in the code that makes the stream.",
                setting="bad_records",
            )
        self.source = source
        self._staged = find(source, hooks.StagedStream)  # a mixture's stages begin at steps
        self._settings = settings
        self.num_lanes = settings.num_lanes or default_num_lanes(self.schedule.sizes)
        self._check_lanes(self.num_lanes)
        # Computed here because it may read records, which taking a state must not.
        self._identity = identify_within(source, settings.retry, settings.timeout_seconds)
        if self._staged is not None:
            self._staged.mixture_config()  # may read too
        self._spec: RecordSpec | None = None

    def _check_lanes(self, num_lanes: int) -> None:
        for size in self.schedule.sizes:
            if size % num_lanes:
                best = default_num_lanes(self.schedule.sizes)
                raise SettingsError(
                    f"num_lanes={num_lanes} does not divide global_batch_size={size}; it takes a divisor of every batch "
                    f"size, such as {best}.",
                    setting="num_lanes",
                )
        limited = find(self.source, hooks.LimitsLanes)
        if limited is not None:
            limited.check_lanes(num_lanes)

    @property
    def _pad(self) -> bool:
        return self._settings.end == "pad"

    # ------------------------------------------------------------------ state

    def fingerprint(self, cursor: LaneCursor) -> dict[str, JsonValue]:
        """Source, seed, epochs, end and number of lanes."""
        staged = find(cursor.source, hooks.StagedStream)
        return {
            "source": self._identity,
            "seed": self._settings.seed,
            "num_epochs": self._settings.num_epochs,
            "end": self._settings.end,
            "num_lanes": cursor.num_lanes,
            **({} if staged is None else {"mixture": staged.mixture_config()}),
        }

    def _source_under(self, step_schedule: StepSchedule) -> StreamSource:
        if self._staged is None:
            return self.source
        settings = self._settings
        return self._staged.bind(
            seed=settings.seed, num_epochs=settings.num_epochs, position_of_step=step_schedule.position_of_step
        )

    def start(self, like: LaneCursor | None = None) -> LaneCursor:
        """Returns the cursor at step 0, every lane at its beginning; keeps ``num_lanes`` of ``like``."""
        num_lanes = self.num_lanes if like is None else like.num_lanes
        entries = {str(lane): LaneEntry() for lane in range(num_lanes)}
        step_schedule = StepSchedule(self.schedule)
        return LaneCursor(step_schedule, 0, 0, self._source_under(step_schedule), entries, num_lanes=num_lanes)

    def restore(self, state: FeedState) -> LaneCursor:
        """Returns the state's cursor, with the lanes that the state contains."""
        num_lanes = self._settings.num_lanes or state.num_lanes
        if state.num_lanes is None or state.step is None or state.lanes is None or not num_lanes:
            raise StateMismatchError("lanes", None, "num_lanes, step and lanes of a stream", DAMAGED_STATE)
        here = dataclasses.replace(self.start(), num_lanes=num_lanes)
        mixture = check_fingerprint(state, self.fingerprint(here), self.source)
        self._check_num_lanes(num_lanes, state.num_lanes)
        segments = parse_segments(state.segments)
        nominal = self._nominal_position(segments, state.step, state.position)
        entries = _parse_entries(state.lanes, num_lanes, nominal // num_lanes, state.position)
        step_schedule = StepSchedule(self.schedule, past=segments, step=state.step, position=nominal)
        source = self._source_under(step_schedule)
        if self._staged is not None:
            cast("hooks.StagedStream", source).check_saved(mixture, nominal, state.step)
        return LaneCursor(
            step_schedule,
            state.step,
            state.position,
            source,
            entries,
            {int(key): entry.records for key, entry in entries.items() if entry.ended},
            num_lanes=num_lanes,
            skipped=Ledgers.of_state(state),
            num_skipped=count_skipped(state),
        )

    def _nominal_position(self, segments: tuple[Segment, ...], step: int, position: int) -> int:
        """Returns the position at which ``step`` begins if no lane has ended."""
        nominal = position_at(segments, step)
        consistent = step > segments[-1].first_step if segments else step == 0
        if not consistent or position > nominal or (not self._pad and position != nominal):
            raise StateMismatchError("position", position, f"{nominal} at step {step}", DAMAGED_STATE)
        return nominal

    def _check_num_lanes(self, num_lanes: int, saved: int) -> None:
        if num_lanes != saved:
            raise StateMismatchError("num_lanes", saved, num_lanes, DAMAGED_STATE)
        if any(size % num_lanes for size in self.schedule.sizes):
            raise StateMismatchError(
                "num_lanes",
                num_lanes,
                f"a divisor of the batch sizes {list(self.schedule.sizes)}",
                "Choose global_batch_size as a multiple of the saved number of lanes.",
            )

    def replay_from(self, current: LaneCursor, step: int, state: FeedState | None) -> LaneCursor:
        """Returns the cursor of ``state``, which must contain all lanes, or of the beginning."""
        cursor = self.start(current) if state is None else self.restore(state)
        if cursor.step > step:
            raise SettingsError(
                f"replay of step {step} from a state taken at step {cursor.step}; it takes a state taken at or before "
                "the step.",
                setting="state",
            )
        return cursor

    def state(self, cursor: LaneCursor) -> FeedState:
        """Returns the state; it contains only this host's lanes."""
        lanes = {lane: entry.to_json() for lane, entry in sorted(cursor.entries.items(), key=lambda item: int(item[0]))}
        return cursor.to_state(
            self.kind, self.fingerprint(cursor), step=cursor.step, num_lanes=cursor.num_lanes, lanes=lanes
        )

    def records_after(self, cursor: LaneCursor, step: int, ended: Mapping[int, int]) -> int:
        """Returns the records up to and including ``step``, from the lengths of the ended lanes."""
        position, size = cursor.step_schedule.at(step)
        each = (position + size) // cursor.num_lanes
        ended = {**cursor.ended, **ended} if cursor.ended else ended
        return position + size - sum(max(0, each - length) for length in ended.values())

    # ------------------------------------------------------------------ reading

    def open_reader(self, cursor: LaneCursor, host_rows: HostRows, *, hosts_agree: bool) -> LaneReader:
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
                f"The state lacks the lanes {missing}: merge the states of all hosts with meshfeed.merge_states.",
            )
        entries = {lane: cursor.entries[str(lane)] for lane in needed}
        return LaneReader(self, cursor, host_rows, self._settings, entries, hosts_agree=hosts_agree)

    def lane_settings(self, num_lanes: int) -> LaneSettings:
        """Returns the settings that all lanes share."""
        settings = self._settings
        num_epochs = settings.num_epochs if self._staged is None else 1  # a mixture's lanes cover all epochs
        return LaneSettings(num_lanes, num_epochs, settings.seed, settings.retry, settings.bad_records)

    def record_spec(self, cursor: Cursor | None = None) -> RecordSpec:
        """Returns the structure of the first record of the first nonempty lane."""
        del cursor
        if self._spec is None:
            settings = dataclasses.replace(self.lane_settings(self.num_lanes), num_epochs=1)
            source = self._source_under(StepSchedule(self.schedule))
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

    def batch_size_at(self, cursor: LaneCursor) -> int:
        """Returns the global batch size of the next step."""
        return cursor.step_schedule.at(cursor.step)[1]

    def num_steps(self, cursor: LaneCursor) -> int | None:
        """Always raises: the number of steps is unknown until the stream ends."""
        raise TypeError("the length of a stream is unknown until it ends.")

    def record_ids(self, cursor: LaneCursor, step: int) -> RecordIds:
        """Always raises: streams have no record ids."""
        raise SourceError(
            f"record_ids({step}): a stream has no record ids; read the step again from a state taken before it."
        )

    def read(self, record_ids: object) -> PyTree:
        """Always raises: streams cannot be read by record id."""
        raise SourceError("read(record_ids): a stream has no record ids; pass a random-access source.")

    def describe_batch(self, batch: HostBatch) -> dict[str, JsonValue]:
        """Records delivered so far of each lane of this host."""
        entries: Mapping[str, LaneEntry] = batch.entries
        return {"lanes": {lane: entry.records for lane, entry in entries.items()}}

    def close(self) -> None:
        """Closes the source if it has a ``close`` method."""
        hooks.close(self.source)


def _parse_entries(
    lanes: Mapping[str, JsonValue], num_lanes: int, expected: int, position: int
) -> dict[str, LaneEntry]:
    """Parses the lanes of a state at ``position``; each has delivered ``expected`` records, unless it has ended."""
    entries: dict[str, LaneEntry] = {}
    for key, value in lanes.items():
        if not key.isdecimal() or int(key) >= num_lanes:
            raise StateMismatchError(f"lanes.{key}", key, f"a lane below {num_lanes}", DAMAGED_STATE)
        entry = entries[key] = LaneEntry.from_json(value, int(key))
        if entry.records > expected or (entry.records < expected and not entry.ended):
            raise StateMismatchError(f"lanes.{key}.records", entry.records, expected, DAMAGED_STATE)
    delivered = sum(entry.records for entry in entries.values())
    if len(entries) == num_lanes and delivered != position:
        raise StateMismatchError("position", position, f"{delivered} records in all lanes", DAMAGED_STATE)
    return entries


@dataclasses.dataclass(frozen=True)
class LaneRun:
    """A run of rows that are consecutive both in one lane and in the host's batch.

    Attributes:
      lane_index: index of the lane.
      target: first row in the host's batch.
      offset: first row in the lane's rows for this batch.
      count: number of rows, at least 1.
    """

    lane_index: int
    target: int
    offset: int
    count: int


_RowPiece = tuple[int, int, int, list[np.ndarray]]
"""First row of the output, first row and number of rows of the leaves, and the leaves."""


def lane_runs(rows: np.ndarray, rows_per_lane: int) -> tuple[LaneRun, ...]:
    """Splits a host's rows into runs. The result depends only on the batch size and can be cached.

    Args:
      rows: this host's rows of the global batch, int64, ascending.
      rows_per_lane: rows of the global batch per lane.
    """
    if not len(rows):
        return ()
    new_run = (np.diff(rows) != 1) | (rows[1:] // rows_per_lane != rows[:-1] // rows_per_lane)
    starts = np.concatenate(([0], np.flatnonzero(new_run) + 1))
    counts = np.diff(np.append(starts, len(rows)))
    lanes, offsets = np.divmod(rows[starts], rows_per_lane)
    columns = (lanes, starts, offsets, counts)
    return tuple(LaneRun(*values) for values in zip(*(column.tolist() for column in columns), strict=True))


def place_rows(
    lanes: Mapping[int, Taken], runs: Sequence[LaneRun], num_rows: int, spec: RecordSpec | None
) -> tuple[PyTree | None, np.ndarray, RecordSpec | None]:
    """Arranges rows of lanes as this host's part of a batch.

    Args:
      lanes: lane → rows taken; must include the lanes of ``runs``.
      runs: see :func:`lane_runs`.
      num_rows: rows of this host.
      spec: required structure of the records, if known.

    Returns:
      A tuple of the tree ``[num_rows, ...]``, with zeros in rows that no lane filled (None if none did and ``spec`` is
      None); a bool array ``[num_rows]``, True for real rows; and the structure of the records.

    Raises:
      SourceError: records of different lanes differ in structure.
    """
    pieces: list[_RowPiece] = []
    real = np.zeros(num_rows, bool)
    checked: dict[int, list[np.ndarray]] = {}
    for run in runs:
        taken = lanes[run.lane_index]
        if taken.tree is None:
            continue
        leaves = checked.get(run.lane_index)
        if leaves is None:
            if spec is None or not spec.fits(taken.tree, taken.count):
                found = spec_of_batch(taken.tree, taken.count, what=f"lane {run.lane_index}")
                spec = spec or found
                check_spec(spec, found, what=f"lane {run.lane_index}", lane_index=run.lane_index)
            leaves = checked[run.lane_index] = [np.asarray(leaf) for leaf in jax.tree.leaves(taken.tree)]
        count = min(run.count, taken.count - run.offset)
        if count <= 0:
            continue
        real[run.target : run.target + count] = True
        pieces.append((run.target, run.offset, count, leaves))
    if spec is None:
        return None, real, None
    return _join_pieces(pieces, num_rows, spec), real, spec


def _join_pieces(pieces: Sequence[_RowPiece], num_rows: int, spec: RecordSpec) -> PyTree:
    if len(pieces) == 1 and pieces[0][2] == num_rows:
        _, offset, count, leaves = pieces[0]
        return spec.treedef.unflatten([leaf[offset : offset + count] for leaf in leaves])
    filled = sum(count for _, _, count, _ in pieces) == num_rows
    output = spec.empty(num_rows) if filled else spec.zeros(num_rows)
    outputs = jax.tree.leaves(output)
    for target, offset, count, leaves in pieces:
        for leaf, source_leaf in zip(outputs, leaves, strict=True):
            leaf[target : target + count] = source_leaf[offset : offset + count]
    return output


def needed_lanes(rows: Sequence[int] | np.ndarray, rows_per_lane: int) -> list[int]:
    """Returns the lanes that feed ``rows``, ascending."""
    return np.unique(np.asarray(rows, np.int64) // rows_per_lane).tolist()


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
        cursor: LaneCursor,
        host_rows: HostRows,
        settings: FeedSettings,
        entries: Mapping[int, LaneEntry],
        *,
        hosts_agree: bool,
    ) -> None:
        self._stream = stream
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
        shared = stream.lane_settings(cursor.num_lanes)
        self._lanes = (
            WorkerLanes(cursor.source, shared, entries, settings.num_workers, settings.timeout_seconds)
            if settings.num_workers and entries
            else LaneGroup(cursor.source, shared, entries, settings.num_threads or 1)
        )

    def _rows_per_lane(self, step: int) -> int:
        return self._step_schedule.at(step)[1] // self._num_lanes

    def _read(self, step: int) -> GroupRows:
        if isinstance(self._lanes, LaneGroup):
            return self._lanes.read(self._rows_per_lane(step))
        while self._asked <= step + 1:  # queue the next step too, so that workers read while this one is delivered
            self._lanes.submit(self._rows_per_lane(self._asked))
            self._asked += 1
        return self._lanes.result()

    def next(self) -> HostBatch:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        step = self._step
        size = self._step_schedule.at(step)[1]
        num_rows, runs = self._lane_runs(size)
        group = self._read(step)
        self._check_end(group.lanes.values(), step)
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

    def _check_end(self, rows: Collection[LaneRows], step: int) -> None:
        """Raises StopIteration if this host's lanes cannot fill ``step``; records the first step that is all padding."""
        self.empty = self.empty and not any(row.entry.records for row in rows)
        if self.empty and rows and not self._hosts_agree:
            raise SourceError(EMPTY_STREAM)
        counts = [row.taken.count for row in rows]
        if self._settings.end == "drop" and min(counts, default=math.inf) < self._rows_per_lane(step):
            raise StopIteration
        if not any(counts):
            if not self._go_on:
                raise StopIteration
            self._final = step if self._final is None else self._final

    def advance(self, cursor: LaneCursor, batch: HostBatch, ended: Mapping[int, int], num_skipped: int) -> LaneCursor:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        return LaneCursor(
            cursor.step_schedule,
            batch.step + 1,
            self._stream.records_after(cursor, batch.step, ended),
            cursor.source,
            batch.entries,
            {**cursor.ended, **ended} if ended else cursor.ended,
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
        return f"step {self._step}: {self._lanes.describe()}"

    def close(self) -> None:
        """Closes lanes, threads and processes."""
        self._lanes.close()
