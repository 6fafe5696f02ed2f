"""Reads the batches of a random-access source: step → record ids of this host's rows → host batch."""

from __future__ import annotations

import dataclasses
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import without_signatures
from meshfeed._src.base.hooks import find
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.types import ColumnSlices, PyTree, RecordIds, RecordOrder
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.ahead import FetchAhead
from meshfeed._src.reading.host_batch import add_mask, check_alike, num_rows, pad_rows
from meshfeed._src.reading.reads import AutoReads, Reads
from meshfeed._src.reading.records import JointRead, ReadRows, RecordReader, file_of
from meshfeed._src.reading.stacking import RecordSpec
from meshfeed._src.streams.balance import RowBalance
from meshfeed._src.streams.protocol import Cursor, HostBatch, HostReader

_NAMED = 8  # records of a read, in messages
# What steps that are read together may take: with more bytes, a single call saves little; with more time, steps wait.
_JOINT_BYTES, _JOINT_SECONDS = 1 << 20, 0.01
# At most so many reads pass between two questions whether the page cache has the records, while it does.
_READS_BETWEEN = 8


@dataclasses.dataclass(frozen=True)
class RandomAccessCursor(Cursor):
    """The cursor of a random-access stream.

    Attributes:
      order: order of the records. For a mixture it depends on the step schedule, because stages begin at steps.
    """

    order: RecordOrder


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
    joint_ids: Sequence[RecordIds] = ()  # of the steps that are read together when this one is collected, if several


def batch_ids(order: RecordOrder, start: int, stop: int, balance: RowBalance | None) -> tuple[RecordIds, RecordIds]:
    """Returns ids and epochs of the batch at positions ``[start, stop)``, int64 ``[rows]`` each, in row order."""
    record_ids, epochs = order.ids_between(start, stop)
    if balance is None:
        return record_ids, epochs
    rows = balance.rows(record_ids)
    return record_ids[rows], epochs[rows]


def spec_at(records: RecordReader, order: RecordOrder, position: int) -> RecordSpec:
    """Returns the structure of the records of the batch at ``position``."""
    return records.spec_of(int(order.ids_at(np.array([position], np.int64))[0][0]))


def _in_columns(tree: PyTree, columns: ColumnSlices | None) -> PyTree:
    """The columns of whole rows that are read of real ones."""
    if not columns:
        return tree
    leaves, treedef = trees.flatten_with_paths(tree)
    return treedef.unflatten([leaf[(slice(None), *columns.get(path, ()))] for path, leaf in leaves])


def _ids_of(order: RecordOrder, position: int, part: _Part, balance: RowBalance | None) -> tuple[RecordIds, RecordIds]:
    """Returns record ids and epochs of this host's rows of the batch at ``position``, without padding."""
    total = order.total
    if balance is not None:  # every host orders the rows of the whole batch
        stop = position + part.size if total is None else min(position + part.size, total)
        record_ids, epochs = batch_ids(order, position, stop, balance)
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
    source: hooks.CachesFiles,
    cursor: RandomAccessCursor,
    num_steps: int | None,
    host_rows: HostRows,
    balance: RowBalance | None,
) -> Iterator[Sequence[hooks.CachedFile]]:
    """Yields the files that each step from the cursor on needs on this host."""
    part: _Part | None = None
    for step in itertools.count(cursor.step) if num_steps is None else range(cursor.step, num_steps):
        position, size = cursor.step_schedule.at(step)
        if part is None or part.size != size:
            part = _Part(size, host_rows.rows(size), None)
        yield source.cached_files(_ids_of(cursor.order, position, part, balance)[0]) or ()


class RandomAccessReader(HostReader[RandomAccessCursor]):
    """Reads steps of a random-access source.

    Args:
      records: reads records of the source.
      cursor: where to start.
      host_rows: this host's rows and columns.
      settings: the feed's settings.
      balance: orders the rows of each batch, if set.
      num_steps: number of steps of the stream; None if it never ends.
    """

    def __init__(
        self,
        records: RecordReader,
        cursor: RandomAccessCursor,
        host_rows: HostRows,
        settings: FeedSettings,
        *,
        balance: RowBalance | None,
        num_steps: int | None,
    ) -> None:
        self._records = records
        self._balance = balance
        self._step_schedule = cursor.step_schedule
        self._order = cursor.order
        self._host_rows = host_rows
        self._settings = settings
        self._last = num_steps
        self._next_step = cursor.step
        # Keyed by step, so that an interrupt loses no read.
        self._pending: dict[int, _Read] = {}
        self._auto: AutoReads | None = None
        self._first_step = cursor.step
        self._fetches: FetchAhead | None = None
        files = find(records.source, hooks.CachesFiles)
        elsewhere = settings.num_workers and settings.workers.engine == "ray"  # with caches of their own
        if files is not None and not elsewhere and files.cached_files(np.empty(0, np.int64)) is not None:
            self._fetches = FetchAhead(_files_of_steps(files, cursor, num_steps, host_rows, balance))
            weakref.finalize(self, self._fetches.close).atexit = False  # for a reader dropped without close
        self._disk = None if self._fetches is not None else hooks.on_disk(records.source)
        self._ids_ahead: dict[int, tuple[_Part, RecordIds, RecordIds]] = {}
        self._asked_to = cursor.step  # the first step whose records no disk has been asked for
        self._cached_answers, self._reads_until_asked = 0, 0
        self._specs: dict[int, RecordSpec] = {}
        self._compares = False  # whether workers have read, each of which compares its own records only
        self._part: _Part | None = None
        # No more steps than the feed keeps ready, so it does not run out of batches while they are read.
        depth = 2 if settings.prefetch == "auto" else settings.prefetch
        self._max_joint = depth if records.joins and self._fetches is None else 1
        self._joint_share = 1.0  # of these limits that the last step took
        # (step, record ids of it and of those read with it) while reading. Formatted lazily: formatting costs more than
        # computing the order.
        self._doing: tuple[str | tuple[int, Sequence[RecordIds]], float] = ("idle", time.monotonic())
        # Workers answer in the order of the requests.
        self.sequential = settings.workers > 0 or "num_workers" in settings.auto
        num_threads = settings.threads or hooks.read_threads(records.source)
        self._reads = Reads(records, settings.workers, num_threads, timeout_seconds=settings.timeout_seconds)

    def adapt(self, auto: AutoReads) -> None:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        self._auto = auto
        auto.begin(self._reads.numbers)
        if self._settings.workers:
            auto.keep("num_threads", "worker processes read, each in one thread")

    def _part_of(self, size: int) -> _Part:
        part = self._part
        if part is None or part.size != size:  # most batches have the size of the last one
            part = self._part = _Part(size, self._host_rows.rows(size), self._host_rows.columns(size))
        return part

    def _ids(self, step: int) -> tuple[_Part, RecordIds, RecordIds]:
        if self._ids_ahead and (known := self._ids_ahead.pop(step, None)) is not None:
            return known
        position, size = self._step_schedule.at(step)
        part = self._part_of(size)
        record_ids, epochs = _ids_of(self._order, position, part, self._balance)
        return part, record_ids, epochs

    def _submit(self, step: int) -> _Read:
        part, record_ids, epochs = self._ids(step)
        result = self._reads.submit(step, record_ids, epochs, part.columns) if record_ids.size else None
        return _Read(part, record_ids, result)

    def _submit_joint(self, step: int) -> None:
        """Adds a read of several small steps to the pending ones."""
        count = min(self._max_joint, int(1 / max(self._joint_share, 1e-6)))
        if count < 2:
            return
        stop = step + count if self._last is None else min(step + count, self._last)
        found = [self._ids(asked) for asked in range(step, stop)]
        alike = list(itertools.takewhile(lambda ids: ids[0] is found[0][0] and ids[1].size, found))
        joint = JointRead(self._records, [ids[1:] for ids in alike], found[0][0].columns)
        for number, (part, record_ids, _) in enumerate(alike):
            joint_ids = () if number else [ids[1] for ids in alike]
            self._pending[step + number] = _Read(part, record_ids, joint.rows_of(number), joint_ids)

    def _ask_disk(self, disk: hooks.ReadsDisk, stop: int, num_steps: int) -> None:
        """Has ``disk`` fetch ``num_steps`` steps from ``stop`` on, the first that no read has been submitted for.

        Otherwise it would have nothing to do while the records that it has fetched are checked, decoded and transferred.
        The longer the page cache had everything, the more reads pass until the next question, up to a limit.
        """
        self._reads_until_asked -= 1
        if self._reads_until_asked > 0 or self._reads.num_workers:  # workers are ahead already
            return
        end = stop + num_steps if self._last is None else min(stop + num_steps, self._last)
        steps = range(max(stop, self._asked_to), end)
        missing = False
        for step in steps:
            known = self._ids_ahead[step] = self._ids(step)
            missing |= bool(disk.ask_disk(known[1]))
        if steps:
            self._asked_to = end
            self._cached_answers = 0 if missing else min(self._cached_answers + 1, _READS_BETWEEN)
            self._reads_until_asked = self._cached_answers

    def next(self) -> HostBatch:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        step = self._next_step
        if self._last is not None and step >= self._last:
            raise StopIteration
        if self._fetches is not None and step > self._first_step:  # a replay reads one step, and needs nothing ahead
            self._fetches.reached(step - self._first_step)
        if self._auto is not None:
            self._reads.follow(self._auto)
        ahead = self._reads.ahead
        self._compares = self._compares or self._reads.num_workers > 0
        num_pending = len(self._pending)
        if ahead == 1 and self._max_joint > 1 and step not in self._pending:
            self._submit_joint(step)
        for asked in range(step, step + ahead):
            if asked not in self._pending and (self._last is None or asked < self._last):
                self._pending[asked] = self._submit(asked)
        if self._disk is not None and len(self._pending) > num_pending and step > self._first_step:
            self._ask_disk(self._disk, max(self._pending) + 1, len(self._pending) - num_pending)
        read = self._pending[step]
        self._doing = ((step, read.joint_ids or [read.record_ids]), time.monotonic())
        try:
            batch = self._finish(step, read)
        except Exception:  # which is final, and must not be kept: its traceback will refer to the feed
            self._pending.pop(step, None)
            raise
        self._pending.pop(step, None)  # only now: an interrupt before this line leaves the read to be collected again
        self._next_step = step + 1
        if self._max_joint > 1:
            self._joint_share = max(batch.num_bytes / _JOINT_BYTES, sum(batch.times.values()) / _JOINT_SECONDS)
        self._doing = ("waiting for room", time.monotonic())
        return batch

    def advance(
        self, cursor: RandomAccessCursor, batch: HostBatch, ended: Mapping[int, int], num_skipped: int
    ) -> RandomAccessCursor:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
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

    def rewind(self, step: int) -> None:
        """Makes ``step`` the next batch."""
        self._next_step = step

    def _describe_read(self, step: int, ids_of_steps: Sequence[RecordIds]) -> str:
        record_ids, last = np.concatenate(ids_of_steps), step + len(ids_of_steps) - 1
        if not record_ids.size:
            return f"padding step {step}"
        paths = [file_of(self._records.source, int(record_id)) for record_id in record_ids[:_NAMED]]
        known = list(dict.fromkeys(without_signatures(path) for path in paths if path))
        how = "waiting for workers to read" if self._reads.num_workers else "reading"
        ids = ", ".join(map(str, record_ids[:_NAMED]))
        more = f", … ({record_ids.size} in all)" if record_ids.size > _NAMED else ""
        files = f"; {', '.join(known)}" if known else ""
        steps = f"step {step}" if last == step else f"steps {step} to {last}"
        return f"{how} {steps} (record{'s' if record_ids.size > 1 else ''} {ids}{more}{files})"

    def _finish(self, step: int, read: _Read) -> HostBatch:
        part, record_ids = read.part, read.record_ids
        rows = None if read.result is None else read.result()
        if rows is None:
            spec = spec_at(self._records, self._order, self._step_schedule.at(step)[0])
            tree = _in_columns(spec.zeros(part.num_rows), part.columns)
        else:
            tree = rows.tree if len(record_ids) == part.num_rows else pad_rows(rows.tree, part.num_rows)
        if self._compares and part.columns is None and len(record_ids):
            self._check(tree, record_ids, step)
        if self._settings.mask_key is not None:
            tree = add_mask(tree, self._settings.mask_key, np.arange(part.num_rows) < len(record_ids))
        batch = HostBatch(step, part.size, tree, trees.num_bytes(tree), record_ids=record_ids)
        if rows is not None:
            batch.bad, batch.times, batch.retries = rows.bad, rows.times, rows.retries
        return batch

    def _check(self, tree: PyTree, record_ids: RecordIds, step: int) -> None:
        """Compares records across workers."""
        shape = self._records.shape_index(record_ids)
        check_alike(self._specs, shape, tree, num_rows(tree), where=lambda: f"step {step}")

    def describe(self) -> str:
        """Returns what the reader is doing, and for how long."""
        doing, since = self._doing
        what = doing if isinstance(doing, str) else self._describe_read(*doing)
        return f"{what} for {time.monotonic() - since:.1f} s"

    def stop(self) -> None:
        """See :meth:`meshfeed._src.streams.protocol.HostReader.stop`."""
        self._reads.stop()

    def close(self) -> None:
        """Stops threads and worker processes."""
        self._pending.clear()
        if self._fetches is not None:
            self._fetches.close()
        self._reads.close()
