"""The stream of a random-access source: each batch depends only on source, settings and step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError, StateMismatchError
from meshfeed._src.base.hooks import find
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.threads import Threads
from meshfeed._src.base.types import ColumnSlices, JsonValue, PyTree, RandomAccessSource, RecordIds, RecordOrder
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.shards import ShardOrder, default_num_lanes
from meshfeed._src.order.steps import StepSchedule, derive_step, parse_segments
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.ahead import FetchAhead
from meshfeed._src.reading.host_batch import (
    RecordSpec,
    add_mask,
    check_spec,
    num_bytes,
    num_rows,
    pad_rows,
    spec_of_batch,
)
from meshfeed._src.reading.identity import identify_within, kind_of
from meshfeed._src.reading.records import ReadRows, RecordReader, file_of, reads_columns
from meshfeed._src.reading.workers import WorkerReader
from meshfeed._src.state.state import FeedState, Ledgers, count_skipped
from meshfeed._src.streams.balance import RowBalance
from meshfeed._src.streams.protocol import Cursor, HostBatch, check_fingerprint, required_schedule

_log = logging.getLogger("meshfeed.feed")


@dataclasses.dataclass(frozen=True)
class RandomAccessCursor(Cursor):
    """The cursor of a random-access stream.

    Attributes:
      order: order of the records. For a mixture it depends on the step schedule, because stages begin at steps.
    """

    order: RecordOrder


class RandomAccessStream:
    """See :class:`meshfeed._src.streams.protocol.FeedStream`.

    Args:
      source: a random-access source.
      settings: the feed's settings.
    """

    kind = "random_access"
    opens_at_restore = moved_by_opening = False
    length_is_known = True
    hosts_make_batches = False

    def __init__(self, source: RandomAccessSource, settings: FeedSettings) -> None:
        self.schedule = required_schedule(settings, "a random-access source")
        if settings.num_lanes is not None and settings.shuffle != "shards":
            raise SettingsError(
                f"num_lanes={settings.num_lanes}, but a random-access source has lanes only with shuffle='shards'. Omit "
                "it.",
                setting="num_lanes",
            )
        if len(source) < 1:
            raise SourceError(f"the source {type(source).__name__} is empty: it has 0 records.")
        checks = find(source, hooks.ChecksRecords)
        if checks is not None:
            checks.check_records()
        within = find(source, hooks.OrdersWithin)
        if within is not None:
            source = within.with_order(shuffle=settings.shuffle, seed=settings.seed)
        self.source = source
        self._settings = settings
        self.in_columns = reads_columns(source)
        self.balance = None if settings.balance is None else RowBalance(source, settings.balance)
        self._numbering = find(source, hooks.NumbersRecords)  # a mixture defines its own order
        self._shard_lengths = self._get_shard_lengths() if settings.shuffle == "shards" else None
        self._order = self._order_of(StepSchedule(self.schedule))
        self.records = RecordReader(source, seed=settings.seed, retry=settings.retry, bad_records=settings.bad_records)
        # Computed here because it may read records, which taking a state must not.
        self._identity = identify_within(source, settings.retry, settings.timeout_seconds)
        if self.num_steps(self.start()) == 0:
            _log.warning(
                "the source has %d records in all epochs, fewer than one batch of %d: with end='drop' there is no batch. "
                "Use end='pad', more epochs or a smaller batch.",
                self._order.total,
                self.schedule.sizes[0],
            )

    @property
    def _pad(self) -> bool:
        return self._settings.end == "pad"

    def _get_shard_lengths(self) -> RecordIds:
        sharded = find(self.source, hooks.Sharded)
        if sharded is None or self._numbering is not None:
            raise SettingsError(
                "shuffle='shards' needs a source whose files are downloaded whole (ArrayRecord, MDS, Parquet, Tokens, "
                f"WebDataset, or Map over one of them); this one is of kind {kind_of(self.source)!r}. Pass shuffle=True, or "
                "a number of records per block.",
                setting="shuffle",
            )
        return sharded.shard_lengths()

    def _num_lanes(self, num_shards: int, saved: JsonValue) -> int:
        """The number of lanes for ``shuffle="shards"``: from the settings, else from the state, else the default."""
        divisor = math.gcd(*self.schedule.sizes)
        chosen = self._settings.num_lanes
        num_lanes = chosen or (default_num_lanes(divisor, num_shards) if saved is None else saved)
        if isinstance(num_lanes, int) and num_lanes >= 1 and divisor % num_lanes == 0:
            return num_lanes
        sizes = f"every global batch size, here {', '.join(map(str, sorted(set(self.schedule.sizes))))}"
        if chosen is None:
            remedy = "Choose batch sizes that the saved number of lanes divides."
            raise StateMismatchError("num_lanes", saved, f"a divisor of {sizes}", remedy)
        raise SettingsError(f"num_lanes={chosen}; it must divide {sizes}.", setting="num_lanes")

    def _order_of(self, step_schedule: StepSchedule, saved_num_lanes: JsonValue = None) -> RecordOrder:
        settings = self._settings
        if self._shard_lengths is not None:
            return ShardOrder(
                self._shard_lengths,
                num_lanes=self._num_lanes(int(np.count_nonzero(self._shard_lengths)), saved_num_lanes),
                seed=settings.seed,
                num_epochs=settings.num_epochs,
                step_schedule=step_schedule,
            )
        shuffle = cast("bool | int", settings.shuffle)
        if self._numbering is not None:
            return self._numbering.make_order(
                shuffle=shuffle,
                seed=settings.seed,
                num_epochs=settings.num_epochs,
                batch_sizes=self.schedule.sizes,
                position_of_step=step_schedule.position_of_step,
            )
        return EpochOrder(len(self.source), shuffle=shuffle, seed=settings.seed, num_epochs=settings.num_epochs)

    def fingerprint(self, cursor: RandomAccessCursor) -> dict[str, JsonValue]:
        """Source, order, epochs and end; for a mixture also its stages, which begin at steps of the step schedule."""
        config = dict(cursor.order.config())
        return {
            "source": self._identity,
            "order": {"algorithm": config.pop("algorithm"), "version": config.pop("version")},
            **config,
            "num_epochs": self._settings.num_epochs,
            "end": self._settings.end,
        }

    def start(self, like: RandomAccessCursor | None = None) -> RandomAccessCursor:
        """Returns the cursor at step 0, position 0; keeps the number of lanes of ``like``."""
        num_lanes = None if like is None else like.order.config().get("num_lanes")
        return self._start_with(num_lanes)

    def _start_with(self, num_lanes: JsonValue) -> RandomAccessCursor:
        step_schedule = StepSchedule(self.schedule)
        order = self._order if num_lanes is None else self._order_of(step_schedule, num_lanes)
        return RandomAccessCursor(step_schedule, 0, 0, order)

    def restore(self, state: FeedState) -> RandomAccessCursor:
        """Returns the cursor at the state's position, in O(1)."""
        num_lanes = state.fingerprint.get("num_lanes") if self._shard_lengths is not None else None
        mixture = check_fingerprint(state, self.fingerprint(self._start_with(num_lanes)), self.source)
        segments, position = parse_segments(state.segments), state.position
        order = self._order
        if self._numbering is not None or self._shard_lengths is not None:  # the order depends on the steps
            step = derive_step(segments, position, position, pad=self._pad)
            order = self._order_of(StepSchedule(self.schedule, past=segments, step=step, position=position), num_lanes)
            if self._numbering is not None:
                cast("hooks.StagedOrder", order).check_saved(mixture, position, step)
        # With fewer epochs than at the save, a position past the end is valid: the stream has ended.
        beyond = order.total is not None and position > order.total
        if beyond and self._settings.num_epochs == state.fingerprint.get("num_epochs"):
            raise StateMismatchError(
                "position",
                position,
                f"at most {order.total}",
                "The state was changed or damaged; use an earlier checkpoint.",
            )
        step = derive_step(segments, position, order.total, pad=self._pad)
        return RandomAccessCursor(
            StepSchedule(self.schedule, past=segments, step=step, position=position),
            step,
            position,
            order,
            skipped=Ledgers.of_state(state),
            num_skipped=count_skipped(state),
        )

    def replay_from(self, current: RandomAccessCursor, step: int, state: FeedState | None) -> RandomAccessCursor:
        """Returns the cursor at ``step``; needs no state."""
        del state
        self._check_step(current, step)
        return dataclasses.replace(current, step=step, position=current.step_schedule.at(step)[0])

    def state(self, cursor: RandomAccessCursor) -> FeedState:
        """Returns the state, which is the same on every host."""
        return cursor.to_state(self.kind, self.fingerprint(cursor))

    def advance(
        self, cursor: RandomAccessCursor, batch: HostBatch, ended: Mapping[int, int], num_skipped: int = 0
    ) -> RandomAccessCursor:
        """Returns the cursor after a delivered batch."""
        del ended
        position, total = cursor.position + batch.global_batch_size, cursor.order.total
        return RandomAccessCursor(
            cursor.step_schedule,
            batch.step + 1,
            position if total is None else min(position, total),
            cursor.order,
            skipped=cursor.skipped.after(batch.bad, batch.step) if batch.bad else cursor.skipped,
            num_skipped=num_skipped,
        )

    def records_after(self, cursor: RandomAccessCursor, step: int, ended: Mapping[int, int]) -> int:
        """Returns the records of the stream up to and including ``step``."""
        del ended
        position, size = cursor.step_schedule.at(step)
        total = cursor.order.total
        return position + size if total is None else min(position + size, total)

    def num_steps(self, cursor: RandomAccessCursor) -> int | None:
        """Computed from the source's length: the same on all hosts, with no cross-host communication."""
        total = cursor.order.total
        return None if total is None else cursor.step_schedule.num_steps(total, pad=self._pad)

    def _check_step(self, cursor: RandomAccessCursor, step: int) -> None:
        last = self.num_steps(cursor)
        if step < 0 or (last is not None and step >= last):
            raise IndexError(f"step {step} is not in this stream, which has {last} steps (0 to {(last or 0) - 1}).")

    def record_ids(self, cursor: RandomAccessCursor, step: int) -> RecordIds:
        """See :class:`meshfeed._src.streams.protocol.FeedStream`."""
        self._check_step(cursor, step)
        return self.batch_ids(cursor.order, cursor.step_schedule.at(step)[0], self.records_after(cursor, step, {}))[0]

    def batch_ids(self, order: RecordOrder, start: int, stop: int) -> tuple[RecordIds, RecordIds]:
        """Returns ids and epochs of the batch at positions ``[start, stop)``, int64 ``[rows]`` each, in row order."""
        record_ids, epochs = order.ids_between(start, stop)
        if self.balance is None:
            return record_ids, epochs
        rows = self.balance.rows(record_ids)
        return record_ids[rows], epochs[rows]

    def read(self, record_ids: object) -> PyTree:
        """See :class:`meshfeed._src.streams.protocol.FeedStream`."""
        ids = np.asarray(record_ids)
        if not ids.size:
            return self.record_spec().zeros(0)
        if ids.ndim > 1 or ids.dtype.kind not in "iu":
            raise SettingsError(
                f"read({record_ids!r}); it takes record ids, a sequence of ints or an int array [n].",
                setting="record_ids",
            )
        ids = ids.astype(np.int64).reshape(-1)
        if self._numbering is not None:
            self._numbering.check_record_ids(ids)
        elif ids.min() < 0 or ids.max() >= len(self.source):
            bad = int(ids[(ids < 0) | (ids >= len(self.source))][0])
            raise SourceError(
                f"record id {bad} is not in the source, which has the ids 0 to {len(self.source) - 1}.", record_id=bad
            )
        return self.records.read(ids, np.zeros(ids.size, np.int64)).tree

    def describe_batch(self, batch: HostBatch) -> dict[str, JsonValue]:
        """Record ids of this host's rows, and the files that contain them."""
        ids: list[int] = [] if batch.record_ids is None else batch.record_ids.tolist()
        paths = dict.fromkeys(file_of(self.source, record_id) for record_id in ids)
        return {"record_ids": ids, "files": [path for path in paths if path]}

    def batch_size_at(self, cursor: RandomAccessCursor) -> int:
        """Returns the global batch size of the next step."""
        return cursor.step_schedule.at(cursor.step)[1]

    def record_spec(self, cursor: RandomAccessCursor | None = None) -> RecordSpec:
        """Returns the structure of the first record, or of the next step if the source has records of several shapes."""
        last = None if cursor is None else self.num_steps(cursor)
        if cursor is None or not self.records.several_shapes or (last is not None and cursor.step >= last):
            return self.records.spec()
        return self.spec_at(cursor.order, cursor.step_schedule.at(cursor.step)[0])

    def spec_at(self, order: RecordOrder, position: int) -> RecordSpec:
        """Returns the structure of the records of the batch at ``position``."""
        return self.records.spec_of(int(order.ids_at(np.array([position], np.int64))[0][0]))

    def open_reader(self, cursor: RandomAccessCursor, host_rows: HostRows, *, hosts_agree: bool) -> RandomAccessReader:
        """Opens the data at a cursor."""
        del hosts_agree
        return RandomAccessReader(self, cursor, host_rows, self._settings)

    def close(self) -> None:
        """Closes the source if it has a ``close`` method."""
        hooks.close(self.source)


class _Part:
    """This host's part of batches of one size.

    Attributes:
      size: global batch size.
      rows: this host's rows, ascending.
      num_rows: number of rows.
      first: the first row if the rows are contiguous, else None.
      columns: see :attr:`HostRows.columns`.
    """

    __slots__ = ("columns", "first", "num_rows", "rows", "size")

    def __init__(self, size: int, rows: RecordIds, columns: ColumnSlices | None) -> None:
        self.size, self.rows, self.columns = size, rows, columns
        self.num_rows = len(rows)
        neighbours = self.num_rows and int(rows[-1]) - int(rows[0]) == self.num_rows - 1
        self.first = int(rows[0]) if neighbours else None


class _Read(NamedTuple):
    """This host's part of one step: the ids of its records, without padding, and what waits for them, if any."""

    part: _Part
    record_ids: RecordIds
    result: Callable[[], ReadRows] | None


def _ids_of(stream: RandomAccessStream, order: RecordOrder, position: int, part: _Part) -> tuple[RecordIds, RecordIds]:
    """Returns record ids and epochs of this host's rows of the batch at ``position``, without padding."""
    total = order.total
    if stream.balance is not None:  # every host orders the rows of the whole batch
        stop = position + part.size if total is None else min(position + part.size, total)
        record_ids, epochs = stream.batch_ids(order, position, stop)
        rows = part.rows[part.rows < stop - position]
        return record_ids[rows], epochs[rows]
    if total is not None and position + part.size > total:
        positions = position + part.rows
        return order.ids_at(positions[positions < total])
    if part.first is None:
        return order.ids_at(position + part.rows)
    start = position + part.first
    return order.ids_between(start, start + part.num_rows)


def _files_of_steps(
    source: hooks.CachesFiles, stream: RandomAccessStream, cursor: RandomAccessCursor, host_rows: HostRows
) -> Iterator[Sequence[hooks.CachedFile]]:
    """Yields the files that each step from the cursor on needs on this host."""
    last = stream.num_steps(cursor)
    part: _Part | None = None
    for step in itertools.count(cursor.step) if last is None else range(cursor.step, last):
        position, size = cursor.step_schedule.at(step)
        if part is None or part.size != size:
            part = _Part(size, host_rows.rows(size), None)
        yield source.cached_files(_ids_of(stream, cursor.order, position, part)[0]) or ()


class RandomAccessReader:
    """Reads steps of a random-access source: in the calling thread, in a thread pool, or in worker processes.

    Args:
      stream: the stream.
      cursor: where to start.
      host_rows: this host's rows and columns.
      settings: the feed's settings.
    """

    empty = False

    def __init__(
        self, stream: RandomAccessStream, cursor: RandomAccessCursor, host_rows: HostRows, settings: FeedSettings
    ) -> None:
        self._stream = stream
        self._step_schedule = cursor.step_schedule
        self._order = cursor.order
        self._host_rows = host_rows
        self._settings = settings
        self._last = stream.num_steps(cursor)
        self._next_step = cursor.step
        # Keyed by step, so that an interrupt loses no read.
        self._pending: dict[int, _Read] = {}
        self._threads: Threads | None = None
        self._workers: WorkerReader | None = None
        self._ahead = 1
        self._first_step = cursor.step
        self._fetches: FetchAhead | None = None
        files = find(stream.source, hooks.CachesFiles)
        if files is not None and files.cached_files(np.empty(0, np.int64)) is not None:
            self._fetches = FetchAhead(_files_of_steps(files, stream, cursor, host_rows))
            weakref.finalize(self, self._fetches.close).atexit = False  # for a reader dropped without close
        self._specs: dict[int, RecordSpec] = {}
        self._part: _Part | None = None
        # (step, record ids) while reading. Formatted lazily: formatting costs more than computing the order.
        self._doing: tuple[str | tuple[int, RecordIds], float] = ("idle", time.monotonic())
        self.sequential = settings.num_workers > 0  # workers answer in the order of the requests
        if settings.num_workers:
            self._workers = WorkerReader(stream.records, settings.num_workers, timeout_seconds=settings.timeout_seconds)
            self._ahead = 2 * settings.num_workers  # two requests per worker, so that none waits for the next one
        elif (num_threads := settings.num_threads or _read_threads(stream.source)) > 1:
            self._threads = Threads(num_threads, "meshfeed-read")
            self._ahead = 2 * num_threads

    def _part_of(self, size: int) -> _Part:
        part = self._part
        if part is None or part.size != size:  # most batches have the size of the last one
            part = self._part = _Part(size, self._host_rows.rows(size), self._host_rows.columns(size))
        return part

    def _submit(self, step: int) -> _Read:
        position, size = self._step_schedule.at(step)
        part = self._part_of(size)
        record_ids, epochs = _ids_of(self._stream, self._order, position, part)
        if not record_ids.size:
            result = None
        elif self._workers is not None:
            result = self._workers.submit(step, record_ids, epochs, part.columns)
        elif self._threads is not None:
            result = self._threads.submit(self._stream.records.read, record_ids, epochs, part.columns).result
        else:
            result = functools.partial(self._stream.records.read, record_ids, epochs, part.columns)
        return _Read(part, record_ids, result)

    def next(self) -> HostBatch:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        step = self._next_step
        if self._last is not None and step >= self._last:
            raise StopIteration
        if self._fetches is not None and step > self._first_step:  # a replay reads one step, and needs nothing ahead
            self._fetches.reached(step - self._first_step)
        if self._ahead == 1:
            read = self._submit(step)
        else:
            for asked in range(step, step + self._ahead):
                if asked not in self._pending and (self._last is None or asked < self._last):
                    self._pending[asked] = self._submit(asked)
            read = self._pending[step]
        self._doing = ((step, read.record_ids), time.monotonic())
        batch = self._finish(step, read)
        self._pending.pop(step, None)  # only now: an interrupt before this line leaves the read to be collected again
        self._next_step = step + 1
        self._doing = ("waiting for room", time.monotonic())
        return batch

    def rewind(self, step: int) -> None:
        """Makes ``step`` the next batch."""
        self._next_step = step

    def _describe_read(self, step: int, record_ids: RecordIds) -> str:
        if not record_ids.size:
            return f"padding step {step}"
        path = file_of(self._stream.source, int(record_ids[0]))
        how = "waiting for workers to read" if self._workers is not None else "reading"
        return f"{how} step {step} (record {record_ids[0]} and {record_ids.size - 1} more{f', {path}' if path else ''})"

    def _finish(self, step: int, read: _Read) -> HostBatch:
        part, record_ids = read.part, read.record_ids
        rows = None if read.result is None else read.result()
        if rows is None:
            tree = self._stream.spec_at(self._order, self._step_schedule.at(step)[0]).zeros(part.num_rows)
        else:
            tree = rows.tree if len(record_ids) == part.num_rows else pad_rows(rows.tree, part.num_rows)
        if self._ahead > 1 and part.columns is None and len(record_ids):
            self._check(tree, record_ids, step)
        if self._settings.mask_key is not None:
            tree = add_mask(tree, self._settings.mask_key, np.arange(part.num_rows) < len(record_ids))
        batch = HostBatch(step, part.size, tree, num_bytes(tree), record_ids=record_ids)
        if rows is not None:
            batch.bad, batch.times, batch.retries = rows.bad, rows.times, rows.retries
        return batch

    def _check(self, tree: PyTree, record_ids: RecordIds, step: int) -> None:
        """Compares records across reads; each worker or thread checks only the records of its own read."""
        found = spec_of_batch(tree, num_rows(tree), what="the source")
        known = self._specs.setdefault(self._stream.records.shape_index(record_ids), found)
        check_spec(known, found, what=f"step {step}")

    def final(self) -> int | None:
        """Returns None: every host computes the end on its own."""
        return None

    def describe(self) -> str:
        """Returns what the reader is doing, and for how long."""
        doing, since = self._doing
        what = doing if isinstance(doing, str) else self._describe_read(*doing)
        return f"{what} for {time.monotonic() - since:.1f} s"

    def close(self) -> None:
        """Stops threads and worker processes."""
        self._pending.clear()
        if self._fetches is not None:
            self._fetches.close()
        if self._threads is not None:
            self._threads.close()
        if self._workers is not None:
            self._workers.close()


def _read_threads(source: object) -> int:
    waits = find(source, hooks.WaitsForReads)
    return 1 if waits is None else waits.read_threads
