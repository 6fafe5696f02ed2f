"""The stream of host-local batches: each host makes its own rows, so a state is tied to the number of hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from meshfeed._src.base import coordination, hooks, trees
from meshfeed._src.base.errors import (
    SettingsError,
    SourceError,
    StalledError,
    StateMismatchError,
    refuse_stop_iteration,
)
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import BatchSchedule, FeedSettings
from meshfeed._src.base.threads import SingleCall
from meshfeed._src.base.trees import flatten, flatten_with_paths
from meshfeed._src.base.types import HostBatchPass, HostBatchSource, JsonValue, PyTree, RecordIds
from meshfeed._src.order.added_stages import not_a_mixture
from meshfeed._src.order.steps import Segment, StepSchedule, parse_segments, position_at
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.host_batch import add_mask, pad_rows, spec_of_batch
from meshfeed._src.reading.reads import AutoReads, ReadNumbers
from meshfeed._src.reading.stacking import RecordSpec
from meshfeed._src.reading.structure import check_spec
from meshfeed._src.state.state import FeedState, check_counts, seal, unseal
from meshfeed._src.streams.protocol import EMPTY_BATCHES, Cursor, FeedStream, HostBatch, HostReader, check_fingerprint

_log = logging.getLogger("meshfeed.host_batches")
_NOT_ELASTIC = "Host batches are not elastic: continue on the same number of hosts, or pass a source of records."
_EARLIER = "Use an earlier checkpoint."
_RESUMABLE = "Pass an iterable that starts again at each iter(), or one with get_state and set_state."

SINGLE_RECORDS = (
    "If these are single records, pass the dataset that they come from, not its iterator or loader (of tf.data: "
    "sources.TFData); if a function generates them, wrap it in sources.Stream: "
    "meshfeed.sources.Stream(lambda lane_index, num_lanes: itertools.islice(make_records(), lane_index, None, num_lanes))."
)


def rows_of(batch: PyTree) -> int:
    """Returns the number of rows of a host batch.

    Raises:
      SourceError: the batch is not a pytree of arrays with rows as the first dimension.
    """
    leaves = trees.leaves(batch)
    if leaves and getattr(leaves[0], "ndim", 0):
        return int(leaves[0].shape[0])
    expected = f"a host batch is a pytree of arrays with rows first. {SINGLE_RECORDS}"
    if not leaves:
        raise SourceError(f"a host batch has no leaves: {batch!r}; {expected}")
    path = flatten_with_paths(batch)[0][0][0]
    raise SourceError(
        f"leaf {path or '(the batch itself)'} of a host batch is {type(leaves[0]).__name__} (dtype "
        f"{np.asarray(leaves[0]).dtype}) of shape (); {expected}"
    )


def _outside_of_next() -> contextlib.AbstractContextManager[None]:
    """For calls of the user's code outside of ``__next__``."""
    return refuse_stop_iteration(
        "the iterable of host batches", "outside of __next__, in __iter__, get_state, set_state or close"
    )


_EMPTY, _NOT_TAKEN = object(), object()  # in place of a first batch that an iterator has not, or not yet


class LocalBatchReader(HostReader["LocalBatchCursor"]):
    """Reads this host's batches from its iterator.

    Args:
      stream: the stream.
      cursor: where to start.
      host_rows: this host's rows.
      settings: the feed's settings.
      iterator: opened at the cursor.
      ready: the iterator's first batch, if already taken.
      epoch: index of the current pass through the iterable.
      hosts_agree: whether other hosts take part and may still have data when this one has none.
    """

    def __init__(
        self,
        stream: LocalBatchStream,
        cursor: LocalBatchCursor,
        host_rows: HostRows,
        settings: FeedSettings,
        iterator: HostBatchPass,
        ready: PyTree | None,
        epoch: int,
        *,
        hosts_agree: bool,
    ) -> None:
        self._stream = stream
        self._host_rows = host_rows
        self._settings = settings
        self._iterator = iterator
        self._ready = ready
        self._epoch = epoch
        self._step = cursor.step
        self._host = coordination.process_index()
        self.empty = cursor.step == 0
        self._hosts_agree = hosts_agree
        self._go_on = hosts_agree and settings.end == "pad"
        self._final: int | None = None
        self._entry: Mapping[str, JsonValue] = cursor.entries.get(str(self._host), {})  # after this host's last batch
        self._spec: RecordSpec | None = None
        self._checked: object = None  # structure, shapes and dtypes of the last valid batch
        self._since = time.monotonic()
        self._taking = threading.Lock()  # peek may run on the caller's thread during next

    def adapt(self, auto: AutoReads) -> None:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        auto.begin(ReadNumbers(0, 1))
        for keyword in ReadNumbers._fields:
            auto.keep(keyword, "the iterable makes the host batches, in one thread")

    def peek(self) -> PyTree:
        """The next batch, left for :meth:`next`."""
        if not self._taking.acquire(timeout=self._settings.timeout_seconds):
            raise StalledError(
                f"host {self._host} itself is late: it is {self.describe()} "
                f"(timeout_seconds={self._settings.timeout_seconds:g}).",
                hosts=(self._host,),
                waited_seconds=self._settings.timeout_seconds,
            )
        try:
            self._ready = call_with_retry(self._take, self._settings.retry, doing=f"taking batch {self._step}")
            if self._ready is None:
                raise SourceError(
                    "the iterable of host batches has no further batch on this host. A host that only pads learns the "
                    "structure of the batches from the other hosts, with the first next(feed)."
                )
            return self._ready
        finally:
            self._taking.release()

    def _take(self) -> PyTree | None:
        """The next batch, or None at the end."""
        if self._ready is not None:
            batch, self._ready = self._ready, None
            return batch
        while True:
            try:
                batch = next(self._iterator)
                if batch is None:
                    raise SourceError(
                        "the iterable of host batches gave None; a host batch must be a pytree of arrays."
                    )
                return batch
            except StopIteration:
                epoch, epochs = self._epoch + 1, self._settings.num_epochs
                if epochs is not None and epoch >= epochs:
                    return None
                self._iterator.close()
                self._iterator, self._epoch = self._iterator.next_pass(), epoch  # counted only once it has begun
                first = next(self._iterator, None)
                if first is None:
                    raise SourceError(
                        f"the iterable of host batches gave no batch in epoch {self._epoch}. With num_epochs, each iter() "
                        "must start it again."
                    ) from None
                return first

    def _take_to_deliver(self) -> PyTree | None:
        """The next batch, or None at the end. ``end="drop"`` drops the short batch at the end of each epoch."""
        dropped = False
        while True:
            batch = call_with_retry(self._take, self._settings.retry, doing=f"taking batch {self._step}")
            if batch is None:
                return None
            self.empty = False
            self._stream.learn(batch)
            num_rows = rows_of(batch)
            wanted = len(self._host_rows.rows(self._stream.size_for(num_rows)))
            if num_rows >= wanted or self._settings.end == "pad":
                return batch
            if dropped and self._settings.num_epochs is None:
                raise SourceError(
                    f"the iterable of host batches gave only {num_rows} rows in epoch {self._epoch}; expected {wanted} rows, "
                    "this host's part of a global batch. With end='drop' such an epoch has no batch, so repeating it would "
                    "never end. Use end='pad', or give this host more rows."
                )
            dropped = True
            epoch, step = self._epoch, self._step
            self._ready = call_with_retry(self._take, self._settings.retry, doing=f"taking batch {self._step}")
            if self._ready is None:
                return None
            if self._epoch == epoch:
                raise SourceError(
                    f"host batch {self._step} has {num_rows} rows and is not the last; expected {wanted} rows, this host's "
                    f"part of a global batch of {self._stream.read_schedule().sizes[0]}. Make batches of that many rows, or "
                    "omit global_batch_size to take it from the first batch. "
                    f"{SINGLE_RECORDS if not step else ''}".rstrip()
                )

    def next(self) -> HostBatch:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        self._since = time.monotonic()
        start = time.perf_counter()
        batch = None
        if self._final is None:
            with self._taking:
                with _outside_of_next():
                    batch = self._take_to_deliver()
                if batch is not None:  # before another thread looks at the next batch, which moves the iterator
                    self._entry = {"epoch": self._epoch, "step": self._step + 1, "iterator": self._iterator_state()}
        seconds = time.perf_counter() - start
        made = self._padding() if batch is None else self._filled(batch)
        made.times = {"read_seconds": seconds}
        self._step += 1
        return made

    def _filled(self, batch: PyTree) -> HostBatch:
        """Makes a HostBatch of ``batch``, padded to this host's rows."""
        step = self._step
        real = rows_of(batch)
        size = self._stream.size_for(real)
        rows = self._host_rows.rows(size)
        tree = self._check(batch, real, len(rows), step)
        return self._made(size, self._with_mask(tree, len(rows), real), rows[real:])

    def _padding(self) -> HostBatch:
        """Makes a HostBatch of padding only, while other hosts still have data."""
        if self.empty and not self._hosts_agree:
            raise SourceError(EMPTY_BATCHES)
        if not self._go_on:
            raise StopIteration
        if self._final is None:
            self._final = self._step
        if not self._entry:  # a state needs an entry even for a host that never has a batch
            self._entry = {"epoch": 0, "step": self._step, "iterator": self._iterator_state()}
        size, size_known = self._stream.size_of_padding()
        rows = self._host_rows.rows(size)
        tree = None
        if size_known and self._spec is not None:
            tree = self._with_mask(self._spec.zeros(len(rows)), len(rows), 0)
        return self._made(size, tree, rows, size_from_others=not size_known)

    def _iterator_state(self) -> JsonValue:
        with _outside_of_next():
            return self._iterator.get_state()

    def _with_mask(self, tree: PyTree, num_rows: int, real: int) -> PyTree:
        if self._settings.mask_key is None:
            return tree
        return add_mask(tree, self._settings.mask_key, np.arange(num_rows) < real)

    def _made(self, size: int, tree: PyTree, padded: RecordIds, *, size_from_others: bool = False) -> HostBatch:
        runs = np.split(padded, np.flatnonzero(np.diff(padded) != 1) + 1) if padded.size else []
        return HostBatch(
            step=self._step,
            global_batch_size=size,
            tree=tree,
            num_bytes=0 if tree is None else trees.num_bytes(tree),
            entries={str(self._host): self._entry},
            # run lengths keyed by (step + 1, first row): merging the hosts' maps counts replicated padding only once
            ended={(self._step + 1) << 32 | int(run[0]): run.size for run in runs},
            size_from_others=size_from_others,
        )

    def _check(self, batch: PyTree, real: int, num_rows: int, step: int) -> PyTree:
        leaves, treedef = flatten(batch)
        kind = treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]
        if kind != self._checked:  # most batches match the last one
            found = spec_of_batch(batch, real, what=f"host batch {step}")
            if self._spec is None:
                self._spec = found
            check_spec(self._spec, found, what=f"host batch {step}")
            self._checked = kind
        if real == num_rows:
            return batch
        if real > num_rows:
            assert self._spec is not None
            leaf = self._spec.leaves[0]
            raise SourceError(
                f"host batch {step}: leaf {leaf.path or '(the batch)'} has {real} rows, but this host holds {num_rows} "
                f"rows of a global batch of {self._stream.read_schedule().sizes[0]}; make batches of {num_rows} rows."
                f"{'' if step else ' ' + SINGLE_RECORDS}"
            )
        return pad_rows(batch, num_rows)

    def advance(
        self, cursor: LocalBatchCursor, batch: HostBatch, ended: Mapping[int, int], num_skipped: int
    ) -> LocalBatchCursor:
        """See :class:`meshfeed._src.streams.protocol.HostReader`; ``ended`` holds the padding that hosts announced."""
        del num_skipped
        step_schedule = cursor.step_schedule
        if cursor.step == 0 and not cursor.entries:
            # The size is known now. Not that of the first batch that this host has read: it may be one of a later step.
            step_schedule = StepSchedule(self._settings.schedule or BatchSchedule([(0, batch.global_batch_size)]))
        size = batch.global_batch_size
        padding = sum(missing for key, missing in ended.items() if key >> 32 == batch.step + 1)
        return LocalBatchCursor(step_schedule, batch.step + 1, cursor.position + size - padding, batch.entries)

    def final(self) -> int | None:
        """Returns the first step without a batch of this host, if reached."""
        return self._final

    def describe(self) -> str:
        """Returns what the reader is doing."""
        return f"waiting for host batch {self._step} for {time.monotonic() - self._since:.1f} s"

    def close(self) -> None:
        """Closes the iterator."""
        self._stream.forget(self)
        _close(self._iterator)


def _close(opened: HostBatchPass | HostBatchSource, what: str = "iterator") -> None:
    try:
        opened.close()
    except Exception as error:  # a generator in which a read hangs cannot be closed
        _log.debug("closing the %s of host batches failed: %s", what, error)


_UNSUPPORTED = {
    "shuffle": (False, "shuffle in the code that makes the batches"),
    "num_workers": (0, "use workers in the code that makes the batches"),
    "num_lanes": (None, "host batches have no lanes"),
    "bad_records": (None, "handle bad records in the code that makes the batches"),
}


class RowShards(Protocol):
    """How a global batch is divided over hosts."""

    def global_batch_size_of(self, host_rows: int) -> int:
        """Returns the global batch size for which this host holds ``host_rows`` rows."""
        ...

    def smallest_batch_size(self) -> int:
        """Returns the smallest global batch size; all others are multiples of it."""
        ...


@dataclasses.dataclass(frozen=True)
class LocalBatchCursor(Cursor):
    """The cursor of host batches.

    Attributes:
      entries: host → the state of its iterator.
    """

    entries: Mapping[str, Mapping[str, JsonValue]] = dataclasses.field(
        default_factory=dict[str, Mapping[str, JsonValue]]
    )


class LocalBatchStream(FeedStream[LocalBatchCursor]):
    """See :class:`meshfeed._src.streams.protocol.FeedStream`.

    Args:
      source: the host's batches (``meshfeed.sources.HostBatches``).
      settings: the feed's settings.
      shards: derives the global batch size from a host's rows if ``global_batch_size`` is not set.
    """

    kind = "host_batches"
    hosts_make_batches = True

    def __init__(self, source: HostBatchSource, settings: FeedSettings, shards: RowShards) -> None:
        for setting, (only, remedy) in _UNSUPPORTED.items():
            value = getattr(settings, setting)
            if setting in settings.auto:
                continue
            if value != only or isinstance(value, bool) != isinstance(only, bool):  # False == 0
                raise SettingsError(
                    f"{setting}={value!r} has no effect on an iterable of host batches. Omit it; {remedy}.",
                    setting=setting,
                )
        if settings.schedule is not None and len(settings.schedule.sizes) > 1:
            raise SettingsError(
                "a BatchSchedule needs a source of records; an iterable of host batches has batches of one size.",
                setting="global_batch_size",
            )
        if (settings.num_epochs or 1) > 1 and not source.resumable:
            raise SettingsError(
                f"num_epochs={settings.num_epochs}, but {source!r} can be read only once. Pass an object whose __iter__ "
                "makes a new iterator, or omit num_epochs.",
                setting="num_epochs",
            )
        if settings.load != "sharded":
            raise SettingsError(
                f"load={settings.load!r} needs a source of records; each host makes its own rows of host batches.",
                setting="load",
            )
        self.source = source
        self.moved_by_opening = source.resumable and not source.restartable
        if not source.resumable:
            kind = type(source.iterable).__name__
            self.cannot_resume = f"the batches come from a {kind}, which can be read only once. {_RESUMABLE}"
        self._settings = settings
        uneven = hooks.find(source.iterable, hooks.UnevenHosts)
        self._rows_may_vary = uneven is not None and uneven.rows_may_vary
        self._ends_may_differ = uneven is not None and uneven.ends_may_differ
        self._shards = shards
        self.schedule = settings.schedule
        self._first: tuple[HostBatchPass, PyTree] | None = None  # an open iterator and its first batch
        self._looking: SingleCall[PyTree] | None = None  # reads ``_first``, or peeks at the reader's next batch
        self._opening = threading.Lock()  # a look at the first batch may run while the feed opens its reader
        self._reading: LocalBatchReader | None = None  # owns the iterator, which must not be opened a second time
        self._spec: RecordSpec | None = None

    # ------------------------------------------------------------------ sizes

    def read_schedule(self) -> BatchSchedule:
        """Returns the batch size; reads the first batch if ``global_batch_size`` is not set.

        Raises:
          SourceError: there is no first batch.
        """
        if self.schedule is None:
            if self._reading is not None:
                raise SourceError(
                    "the iterable of host batches gave no batch on this host, which therefore cannot derive the global "
                    "batch size. Pass global_batch_size if a host may have no batch."
                )
            self.size_for(rows_of(self._peek()))
        assert self.schedule is not None
        return self.schedule

    def size_for(self, host_rows: int) -> int:
        """Returns the size of the global batch in which this host has ``host_rows`` rows."""
        if self.schedule is not None and not self._rows_may_vary:
            return self.schedule.sizes[0]
        if not host_rows:
            raise SourceError("the first host batch has no rows. Expected as many as this host has in every batch.")
        size = self._shards.global_batch_size_of(host_rows)
        self.schedule = self.schedule or BatchSchedule([(0, size)])
        return size

    def size_of_padding(self) -> tuple[int, bool]:
        """Returns the size of a global batch that this host only pads, and whether that size is final.

        If the other hosts' batches determine the size, it is not final, and the smallest possible size is returned.
        """
        if self.schedule is None or self._rows_may_vary:
            return self._shards.smallest_batch_size(), False
        return self.schedule.sizes[0], True

    def _peek(self) -> PyTree:
        """The next batch, left for the reader. Not on the caller's thread: an interrupt would end a generator."""
        if self._looking is None:
            self._looking = SingleCall(self._look, "meshfeed-look")
        try:
            batch = self._looking.result()
        except Exception:
            self._looking = None
            raise
        self._looking = None
        return batch

    def _look(self) -> PyTree:
        with self._opening:
            reading = self._reading
            first = self._take_first() if reading is None else None
        if reading is not None:
            return reading.peek()
        if first is _EMPTY:
            raise SourceError(
                "the iterable of host batches is empty: it gave no batch on this host. A host that only pads learns "
                "the structure of the batches from the other hosts, with the first next(feed)."
            )
        return first

    def _take_first(self) -> PyTree:
        """The first batch, left for the reader, or ``_EMPTY``."""
        if self._first is None:
            with _outside_of_next():
                self._first = (self.source.iterator(), _NOT_TAKEN)  # kept after an error: next raises it too
        iterator, first = self._first
        if first is _NOT_TAKEN:
            first = call_with_retry(lambda: next(iterator, _EMPTY), self._settings.retry, doing="taking batch 0")
            self._first = (iterator, first)
        return first

    def record_spec(self, cursor: Cursor | None = None) -> RecordSpec:
        """Returns the structure of the first batch; reads it if necessary."""
        del cursor
        if self._spec is None:
            try:
                self.learn(self._peek())
            except SourceError:
                if self._spec is None:  # else the reader has taken the only batch meanwhile, and learned from it
                    raise
        assert self._spec is not None
        return self._spec

    def learn(self, batch: PyTree) -> None:
        """Records the structure and size of the first batch."""
        if self._spec is None:
            rows = rows_of(batch)
            self._spec = spec_of_batch(batch, rows, what="the iterable of host batches")
            self.size_for(rows)

    def batch_size_at(self, cursor: LocalBatchCursor) -> int:
        """Returns the global batch size."""
        del cursor
        return self.read_schedule().sizes[0]

    # ------------------------------------------------------------------ state

    def fingerprint(self, cursor: LocalBatchCursor) -> dict[str, JsonValue]:
        """Does not cover the content of the batches, which only the user's code determines."""
        del cursor
        return {
            "source": self.source.fingerprint(),
            "elastic": False,
            "processes": coordination.process_count(),
            "num_epochs": self._settings.num_epochs,
            "end": "drop" if self._ends_may_differ else self._settings.end,
        }

    def start(self, like: LocalBatchCursor | None = None) -> LocalBatchCursor:
        """Returns the cursor before the first batch; its batch size is a placeholder of 1 until known."""
        del like
        return LocalBatchCursor(StepSchedule(self.schedule or BatchSchedule([(0, 1)])), 0, 0)

    def restore(self, state: FeedState) -> LocalBatchCursor:
        """Returns the cursor of this host's batches."""
        if state.hosts is None or state.step is None:
            raise StateMismatchError("hosts", None, "step and hosts of an iterable of host batches", _NOT_ELASTIC)
        check_fingerprint(state, self.fingerprint(self.start()), self.source)
        entries = self._entries(state.hosts, state.step)
        segments = parse_segments(state.segments)
        schedule = self.schedule or BatchSchedule([(0, segments[0].size if segments else 1)])
        nominal = self._nominal_position(segments, state.step, state.position)
        step_schedule = StepSchedule(schedule, past=segments, step=state.step, position=nominal)
        return LocalBatchCursor(step_schedule, state.step, state.position, entries)

    def _nominal_position(self, segments: tuple[Segment, ...], step: int, position: int) -> int:
        """Returns the position at which ``step`` begins if every batch is as large as the first."""
        nominal = position_at(segments, step)
        wrong = position > nominal or (position < nominal and self._settings.end == "drop")
        if (wrong and not self._rows_may_vary) or bool(segments) != bool(step):
            raise StateMismatchError("position", position, nominal, _EARLIER)
        return nominal

    def _entries(self, hosts: Mapping[str, JsonValue], step: int) -> dict[str, dict[str, JsonValue]]:
        """Returns this host's entry of a state taken at ``step``, checked and without its digest, by host."""
        host = str(coordination.process_index())
        if host not in hosts:
            if not step:
                return {}
            raise StateMismatchError(
                "hosts", sorted(hosts), f"host {host}", "Merge the states of all hosts with meshfeed.merge_states."
            )
        entry = unseal(hosts[host], f"hosts.{host}")
        check_counts({"step": step, **entry}, ("epoch", "step"), f"hosts.{host}")
        if "iterator" not in entry:
            raise StateMismatchError(f"hosts.{host}.iterator", "missing", "its state", "Use an earlier checkpoint.")
        at = entry.get("step", step)  # this host's last batch; with end="pad" others may be ahead
        if at > step or (at < step and self._settings.end == "drop"):
            raise StateMismatchError("step", step, f"{at} in hosts.{host}", _EARLIER)
        if not self.source.resumable:
            raise StateMismatchError(
                f"hosts.{host}",
                f"{step} batches",
                "an iterator that can be read once",
                _RESUMABLE,
            )
        return {host: entry}

    def with_stage(self, cursor: LocalBatchCursor, from_step: object, weights: object) -> LocalBatchCursor:
        """Always raises: the user's code makes the batches."""
        raise not_a_mixture(self.kind)

    def replay_from(self, current: LocalBatchCursor, step: int, state: FeedState | None) -> LocalBatchCursor:
        """Always raises: host batches cannot be read again."""
        raise SourceError("host batches cannot be read again by the feed; pass a source of records.")

    def state(self, cursor: LocalBatchCursor) -> FeedState:
        """Returns the state; it contains only this host's entry."""
        hosts = {host: seal(dict(entry)) for host, entry in cursor.entries.items()}
        return cursor.to_state(self.kind, self.fingerprint(cursor), step=cursor.step, hosts=hosts)

    def take_over(self, current: LocalBatchCursor, state: FeedState, host_rows: HostRows) -> LocalBatchCursor:
        """Returns the current cursor: hosts keep their rows."""
        del state, host_rows
        return current

    def records_after(self, cursor: LocalBatchCursor, step: int, ended: Mapping[int, int]) -> int:
        """Returns 0: only the count of bad records needs it, and the code that makes the batches handles those."""
        del cursor, step, ended
        return 0

    # ------------------------------------------------------------------ reading

    def open_reader(self, cursor: LocalBatchCursor, host_rows: HostRows, *, hosts_agree: bool) -> LocalBatchReader:
        """Opens this host's iterator at a cursor."""
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.wait()
        with self._opening:
            return self._open_reader(cursor, host_rows, hosts_agree=hosts_agree)

    def _open_reader(self, cursor: LocalBatchCursor, host_rows: HostRows, *, hosts_agree: bool) -> LocalBatchReader:
        host = str(coordination.process_index())
        entry = cursor.entries.get(host)
        ready: PyTree | None = None
        if entry is None and self._first is not None:
            iterator, ready = self._first
            ready = None if ready is _EMPTY or ready is _NOT_TAKEN else ready  # the iterator ends again
            self._first = None
        else:
            with _outside_of_next():
                iterator = self.source.iterator(None if entry is None else entry["iterator"])
            self._close_first()
        if cursor.step and self.schedule is None and not self._rows_may_vary:
            # The next batch may be the short one at the end of an epoch, which must not set the size.
            self.schedule = BatchSchedule([(0, cursor.step_schedule.at(cursor.step - 1)[1])])
        epoch = 0 if entry is None else int(entry["epoch"])
        self._reading = LocalBatchReader(
            self, cursor, host_rows, self._settings, iterator, ready, epoch, hosts_agree=hosts_agree
        )
        return self._reading

    def forget(self, reader: LocalBatchReader) -> None:
        """Drops the reference to ``reader``, which is closed."""
        if self._reading is reader:
            self._reading = None

    def num_steps(self, cursor: LocalBatchCursor) -> int | None:
        """Always raises: the number of steps is unknown until the batches end."""
        raise TypeError("an iterable of host batches has no length.")

    def record_ids(self, cursor: LocalBatchCursor, step: int) -> RecordIds:
        """Always raises: host batches have no record ids."""
        raise SourceError(f"record_ids({step}): host batches have no record ids.")

    def read(self, record_ids: object) -> PyTree:
        """Always raises: host batches cannot be read by record id."""
        raise SourceError("read(record_ids): host batches have no record ids; pass a random-access source.")

    def close(self) -> None:
        """Closes the source and any iterator that was opened only to read its first batch."""
        self._close_first()
        _close(self.source, "iterable")

    def _close_first(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            _close(first[0])
