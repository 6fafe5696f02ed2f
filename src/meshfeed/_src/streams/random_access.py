"""The stream of a random-access source: each batch is a function of (source, settings, step)."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from meshfeed._src.base.errors import SettingsError, SourceError, StateMismatchError
from meshfeed._src.base.settings import BatchSchedule, FeedSettings
from meshfeed._src.base.threads import Threads
from meshfeed._src.base.types import ColumnSlices, PyTree, RecordIds
from meshfeed._src.order import epochs as epoch_order
from meshfeed._src.order import steps as step_schedules
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.host_batch import RecordSpec, add_mask, check_spec, num_bytes, pad_rows, spec_of_batch
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.records import ReadRows, RecordReader, file_of
from meshfeed._src.reading.workers import WorkerReader
from meshfeed._src.state import state as feed_state
from meshfeed._src.state.state import Ledgers, count_skipped
from meshfeed._src.streams.protocol import Cursor, HostBatch, LocalIterator

_log = logging.getLogger("meshfeed.feed")


class RandomAccessStream:
    """See :class:`meshfeed._src.streams.protocol.FeedStream`.

    Args:
      source: a random-access source.
      settings: the feed's settings.
    """

    kind = "random_access"
    opens_at_restore = False

    def __init__(self, source: Any, settings: FeedSettings) -> None:
        if settings.schedule is None:
            raise SettingsError(
                "global_batch_size is missing; a random-access source needs it (an int or a meshfeed.BatchSchedule).",
                setting="global_batch_size",
            )
        if settings.num_lanes is not None:
            raise SettingsError(
                f"num_lanes={settings.num_lanes}, but this source is read at random and has no lanes; leave it out.",
                setting="num_lanes",
            )
        if len(source) < 1:
            raise SourceError(f"the source {type(source).__name__} is empty: it has 0 records.")
        self.source = source
        self._settings = settings
        self._schedule: BatchSchedule = settings.schedule
        self._make_order: Any = getattr(source, "make_order", None)  # a mixture defines its own order
        self._order = self._order_of(step_schedules.StepSchedule(self._schedule))
        self.records = RecordReader(source, seed=settings.seed, retry=settings.retry, bad_records=settings.bad_records)
        self._identity = source_identity(source, settings.retry)  # may read, which taking a state must not
        if self.num_steps(self.start()) == 0:
            _log.warning(
                "the source has %d records in all epochs, which is smaller than a batch of %d: with end='drop' there is no "
                "batch at all. Use end='pad', more epochs or a smaller batch.",
                self._order.total,
                self._schedule.sizes[0],
            )

    @property
    def _pad(self) -> bool:
        return self._settings.end == "pad"

    def _order_of(self, step_schedule: step_schedules.StepSchedule) -> Any:
        settings = self._settings
        kwargs: dict[str, Any] = {"shuffle": settings.shuffle, "seed": settings.seed, "num_epochs": settings.num_epochs}
        if self._make_order is not None:
            return self._make_order(**kwargs, position_of_step=step_schedule.position_of_step)
        return epoch_order.EpochOrder(len(self.source), **kwargs)

    def fingerprint(self, cursor: Cursor) -> dict[str, Any]:
        """Source, order, epochs and end; for a mixture also its stages, which begin at steps of the step schedule."""
        config = dict(cursor.order.config())
        return {
            "source": self._identity,
            "order": {"algorithm": config.pop("algorithm"), "version": config.pop("version")},
            **config,
            "num_epochs": self._settings.num_epochs,
            "end": self._settings.end,
        }

    def start(self, like: Cursor | None = None) -> Cursor:
        """Returns the cursor at step 0, position 0."""
        del like
        return Cursor(step_schedules.StepSchedule(self._schedule), 0, 0, order=self._order)

    def restore(self, state: feed_state.FeedState) -> Cursor:
        """Returns the cursor at the state's position, in O(1)."""
        saved, current = dict(state.fingerprint), self.fingerprint(self.start())
        # check_saved compares a mixture stage by stage: stages that have not begun may differ.
        mixture = saved.pop("mixture", None) if current.pop("mixture", None) else None
        feed_state.compare_fingerprints(saved, current, getattr(self.source, "file_names", None))
        segments = step_schedules.parse_segments(state.segments)
        order = self._order
        if self._make_order is not None:
            step = step_schedules.derive_step(segments, state.position, state.position, pad=self._pad)
            order = self._order_of(
                step_schedules.StepSchedule(self._schedule, past=segments, step=step, position=state.position)
            )
            order.check_saved(mixture, state.position, step)
        # With fewer epochs than at the save, a position past the end is valid: the stream has ended.
        beyond = order.total is not None and state.position > order.total
        if beyond and self._settings.num_epochs == state.fingerprint.get("num_epochs"):
            raise StateMismatchError(
                "position",
                state.position,
                f"at most {order.total}",
                "The state was changed or damaged; use an earlier checkpoint.",
            )
        step = step_schedules.derive_step(segments, state.position, order.total, pad=self._pad)
        step_schedule = step_schedules.StepSchedule(self._schedule, past=segments, step=step, position=state.position)
        return Cursor(
            step_schedule,
            step,
            state.position,
            skipped=Ledgers.of_state(state),
            num_skipped=count_skipped(state),
            order=order,
        )

    def state(self, cursor: Cursor) -> feed_state.FeedState:
        """Returns the state, which is the same on every host."""
        return feed_state.FeedState(
            kind=self.kind,
            position=cursor.position,
            segments=cursor.step_schedule.delivered_json(cursor.step),
            fingerprint=self.fingerprint(cursor),
            **cursor.skipped.state_fields(),
            num_skipped=cursor.num_skipped or None,
        )

    def advance(self, cursor: Cursor, batch: HostBatch, ended: Mapping[int, int], num_skipped: int = 0) -> Cursor:
        """Returns the cursor after a delivered batch."""
        position = self.records_after(cursor, batch.step, ended)
        return Cursor(
            cursor.step_schedule,
            batch.step + 1,
            position,
            skipped=cursor.skipped.after(batch.bad, batch.step),
            num_skipped=num_skipped,
            order=cursor.order,
            source=cursor.source,
        )

    def records_after(self, cursor: Cursor, step: int, ended: Mapping[int, int]) -> int:
        """Returns the records of the stream up to and including ``step``."""
        del ended
        position, size = cursor.step_schedule.at(step)
        return position + size if cursor.order.total is None else min(position + size, cursor.order.total)

    def num_steps(self, cursor: Cursor) -> int | None:
        """Computed from the source's length: the same on all hosts, with no cross-host communication."""
        total = cursor.order.total
        return None if total is None else cursor.step_schedule.num_steps(total, pad=self._pad)

    def record_ids(self, cursor: Cursor, step: int) -> RecordIds:
        """Returns the record ids of ``step`` in row order, int64 ``[rows]``, without padding."""
        last = self.num_steps(cursor)
        if step < 0 or (last is not None and step >= last):
            raise IndexError(f"step {step} is not in this stream, which has {last} steps (0 to {(last or 0) - 1}).")
        position, size = cursor.step_schedule.at(step)
        total = cursor.order.total
        stop = position + size if total is None else min(position + size, total)
        return cursor.order.ids_at(np.arange(position, stop, dtype=np.int64))[0]

    def read(self, record_ids: Any) -> PyTree:
        """Returns records as host-local numpy arrays ``[len(record_ids), ...]``, decoded as in epoch 0."""
        ids = np.asarray(record_ids)
        if not ids.size:
            return self.record_spec().zeros(0)
        if ids.ndim > 1 or ids.dtype.kind not in "iu":
            raise SettingsError(
                f"read({record_ids!r}); it takes record ids, a sequence of ints or an int array [n].",
                setting="record_ids",
            )
        ids = ids.astype(np.int64).reshape(-1)
        valid = getattr(self.source, "check_record_ids", None)
        if valid is not None:
            valid(ids)
        elif ids.min() < 0 or ids.max() >= len(self.source):
            bad = int(ids[(ids < 0) | (ids >= len(self.source))][0])
            raise SourceError(
                f"record id {bad} is not in the source, which has the ids 0 to {len(self.source) - 1}.", record_id=bad
            )
        return self.records.read(ids, np.zeros(ids.size, np.int64)).tree

    def batch_size_at(self, cursor: Cursor) -> int:
        """Returns the global batch size of the next step."""
        return cursor.step_schedule.at(cursor.step)[1]

    def local_iterator(self, feed: Any) -> LocalIterator:
        """Returns the feed as a local iterator."""
        return LocalIterator(feed)

    def record_spec(self) -> RecordSpec:
        """Returns the structure of record 0."""
        return self.records.spec()

    def open_reader(self, cursor: Cursor, host_rows: HostRows, *, hosts_agree: bool) -> RandomAccessReader:
        """Opens the data at a cursor."""
        del hosts_agree
        return RandomAccessReader(self, cursor, host_rows, self._settings)

    def close(self) -> None:
        """Closes the source if it has a ``close`` method."""
        close = getattr(self.source, "close", None)
        if callable(close):
            close()


class _Part:
    """This host's part of batches of one size.

    Attributes:
      size: global batch size.
      rows: this host's rows, ascending.
      num_rows: number of rows.
      first: the first row if the rows are contiguous, otherwise None.
      columns: see :attr:`HostRows.columns`.
    """

    __slots__ = ("columns", "first", "num_rows", "rows", "size")

    def __init__(self, size: int, rows: RecordIds, columns: ColumnSlices | None) -> None:
        self.size, self.rows, self.columns = size, rows, columns
        self.num_rows = len(rows)
        neighbours = self.num_rows and int(rows[-1]) - int(rows[0]) == self.num_rows - 1
        self.first = int(rows[0]) if neighbours else None


class RandomAccessReader:
    """Reads steps of a random-access source: in the calling thread, in a thread pool, or in worker processes.

    Args:
      stream: the stream.
      cursor: where to start.
      host_rows: this host's rows and columns.
      settings: the feed's settings.
    """

    def __init__(self, stream: RandomAccessStream, cursor: Cursor, host_rows: HostRows, settings: FeedSettings) -> None:
        self._stream = stream
        self._step_schedule = cursor.step_schedule
        self._order = cursor.order
        self._host_rows = host_rows
        self._settings = settings
        self._last = stream.num_steps(cursor)
        self._next_step = cursor.step
        self._pending: dict[int, tuple[RecordIds, Any]] = {}  # keyed by step, so that an interrupt loses no read
        self._threads: Threads | None = None
        self._workers: WorkerReader | None = None
        self._ahead = 1
        self._spec: RecordSpec | None = None
        self._part: _Part | None = None
        # (step, record ids) while reading. Formatted lazily: formatting costs more than computing the order.
        self._doing: tuple[str | tuple[int, RecordIds], float] = ("idle", time.monotonic())
        self.sequential = settings.num_workers > 0  # workers answer in the order of the requests
        if settings.num_workers:
            self._workers = WorkerReader(stream.records, settings.num_workers, timeout_seconds=settings.timeout_seconds)
            self._ahead = 2 * settings.num_workers  # two requests per worker, so that none waits for the next one
        elif (settings.num_threads or 1) > 1:
            self._threads = Threads(settings.num_threads or 1, "meshfeed-read")
            self._ahead = 2 * (settings.num_threads or 1)

    def _part_of(self, size: int) -> _Part:
        part = self._part
        if part is None or part.size != size:  # most batches have the size of the last one
            part = self._part = _Part(size, self._host_rows.rows(size), self._host_rows.columns(size))
        return part

    def _ids_of(self, position: int, part: _Part) -> tuple[RecordIds, RecordIds]:
        total = self._order.total
        if total is not None and position + part.size > total:
            positions = position + part.rows
            return self._order.ids_at(positions[positions < total])
        if part.first is None:
            return self._order.ids_at(position + part.rows)
        start = position + part.first
        return self._order.ids_between(start, start + part.num_rows)

    def _submit(self, step: int) -> tuple[RecordIds, Callable[[], ReadRows] | None]:
        position, size = self._step_schedule.at(step)
        part = self._part_of(size)
        record_ids, epochs = self._ids_of(position, part)
        if not record_ids.size:
            return record_ids, None
        if self._workers is not None:
            return record_ids, self._workers.submit(step, record_ids, epochs, part.columns)
        if self._threads is not None:
            return record_ids, self._threads.submit(self._stream.records.read, record_ids, epochs, part.columns).result
        return record_ids, functools.partial(self._stream.records.read, record_ids, epochs, part.columns)

    def next(self) -> HostBatch:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        step = self._next_step
        if self._last is not None and step >= self._last:
            raise StopIteration
        if self._ahead == 1:
            record_ids, result = self._submit(step)
        else:
            for asked in range(step, step + self._ahead):
                if asked not in self._pending and (self._last is None or asked < self._last):
                    self._pending[asked] = self._submit(asked)
            record_ids, result = self._pending[step]
        self._doing = ((step, record_ids), time.monotonic())
        batch = self._finish(step, record_ids, None if result is None else result())
        self._pending.pop(step, None)  # only now: an interrupt before this line leaves the read to be collected again
        self._next_step = step + 1
        self._doing = ("waiting for room", time.monotonic())
        return batch

    def rewind(self, step: int) -> None:
        """Makes ``step`` the next batch. Not supported with workers."""
        self._next_step = step

    def _describe_read(self, step: int, record_ids: RecordIds) -> str:
        if not record_ids.size:
            return f"padding step {step}"
        path = file_of(self._stream.source, int(record_ids[0]))
        how = "waiting for workers to read" if self._workers is not None else "reading"
        return f"{how} step {step} (record {record_ids[0]} and {record_ids.size - 1} more{f', {path}' if path else ''})"

    def _finish(self, step: int, record_ids: RecordIds, rows: ReadRows | None) -> HostBatch:
        part = self._part_of(self._step_schedule.at(step)[1])
        num_rows = part.num_rows
        if rows is None:
            tree = self._stream.record_spec().zeros(num_rows)
        else:
            tree = rows.tree if len(record_ids) == num_rows else pad_rows(rows.tree, num_rows)
        if self._ahead > 1 and part.columns is None:
            self._check(tree, num_rows, step)
        if self._settings.mask_key is not None:
            tree = add_mask(tree, self._settings.mask_key, np.arange(num_rows) < len(record_ids))
        batch = HostBatch(step, part.size, tree, num_bytes(tree), record_ids=record_ids)
        if rows is not None:
            batch.bad, batch.times, batch.retries = rows.bad, rows.times, rows.retries
        return batch

    def _check(self, tree: PyTree, num_rows: int, step: int) -> None:
        """Compares records across reads; each worker or thread checks only the records of its own read."""
        found = spec_of_batch(tree, num_rows, what="the source")
        self._spec = self._spec or found
        check_spec(self._spec, found, what=f"step {step}")

    def final(self) -> int | None:
        """Returns None: every host computes the end by itself."""
        return None

    def describe(self) -> str:
        """Returns what the reader is doing, and for how long."""
        doing, since = self._doing
        what = doing if isinstance(doing, str) else self._describe_read(*doing)
        return f"{what} for {time.monotonic() - since:.1f} s"

    def close(self) -> None:
        """Stops threads and worker processes."""
        self._pending.clear()
        if self._threads is not None:
            self._threads.close()
        if self._workers is not None:
            self._workers.close()
