"""One lane of a stream: reads its records in order over all epochs, resumes exactly, and fills its rows of a batch."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from typing import cast

from meshfeed._src.base import exact_json, hooks
from meshfeed._src.base.errors import SourceError, StateMismatchError, reason_of
from meshfeed._src.base.hooks import accepts_keyword, find
from meshfeed._src.base.ownership import own_batch
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.rng import philox
from meshfeed._src.base.settings import Retry, SkipBad
from meshfeed._src.base.threads import note_thread
from meshfeed._src.base.types import JsonValue, LaneIterator, PyTree, Record, StreamSource
from meshfeed._src.reading.host_batch import join_batches, num_rows
from meshfeed._src.reading.stacking import RecordSpec, RecordStack
from meshfeed._src.state import state as feed_state

_log = logging.getLogger("meshfeed.lanes")
_SNAPSHOT_SHARE = 0.01  # share of the lane's read time that snapshots of its state may cost
_MAX_SNAPSHOT_SECONDS = 60.0  # read time that a resume may have to repeat
_CHEAP_SECONDS = 2e-5  # a faster snapshot is taken after every batch, whatever its share
_EXPENSIVE_SECONDS = 2e-3  # a slower snapshot is logged
_MAX_BAD_IN_A_ROW = 1000  # more than that means that the data or the decoder is broken as a whole
_ALL = 1 << 62  # no limit: more records than any request


@dataclasses.dataclass(frozen=True)
class LaneEntry:
    """The state of a lane after a delivered batch.

    Attributes:
      records: records delivered, over all epochs.
      epoch: the current epoch.
      taken: records taken from the source in this epoch, including bad ones.
      state: the last snapshot of the source's own state, encoded; None for the beginning of the epoch.
      skip: records to read and drop after restoring ``state``.
      ended: whether the lane has no more records.
    """

    records: int = 0
    epoch: int = 0
    taken: int = 0
    state: JsonValue = None
    skip: int = 0
    ended: bool = False

    def to_json(self) -> dict[str, JsonValue]:
        """Returns the sealed JSON that a state contains."""
        return feed_state.seal(dataclasses.asdict(self))

    @staticmethod
    def from_json(value: JsonValue, lane_index: int) -> LaneEntry:
        """Parses an entry of a state.

        Raises:
          StateMismatchError: the entry was changed or damaged after it was saved.
        """
        field = f"lanes.{lane_index}"
        bare = feed_state.unseal(value, field)
        names = sorted(f.name for f in dataclasses.fields(LaneEntry))
        if sorted(bare) != names:
            raise StateMismatchError(field, sorted(bare), names, "Use an earlier checkpoint.")
        entry = LaneEntry(**bare)
        feed_state.check_counts(vars(entry), ("records", "epoch", "taken", "skip"), field)
        if type(entry.ended) is not bool:
            raise StateMismatchError(f"{field}.ended", entry.ended, "true or false", "Use an earlier checkpoint.")
        return entry


@dataclasses.dataclass(frozen=True)
class LaneSettings:
    """Settings shared by all lanes of a feed; pickled for worker processes."""

    num_lanes: int
    num_epochs: int | None
    seed: int
    retry: Retry
    bad_records: SkipBad | None
    moves: bool = False  # lanes may move between this process and workers: num_workers="auto"


@dataclasses.dataclass
class Taken:
    """Records of one lane for one batch.

    Attributes:
      tree: pytree of arrays ``[count, ...]``; None if count is 0.
      count: rows, at most the number requested.
      bad: ``[record id, epoch, reason]`` of each skipped record.
      retries: number of retried reads.
    """

    tree: PyTree | None
    count: int
    bad: list[tuple[int, int, str]] = dataclasses.field(default_factory=list[tuple[int, int, str]])
    retries: int = 0


class Lane:
    """Reads one lane. Not thread-safe.

    An iterator that raised is never called again, because most iterators then skip records or end silently. Instead, the
    lane is reopened at its last snapshot and moved forward.

    Args:
      source: a stream source.
      lane_index: index of the lane.
      settings: shared settings.
      entry: where to start.
    """

    def __init__(self, source: StreamSource, lane_index: int, settings: LaneSettings, entry: LaneEntry) -> None:
        self._source = source
        self.lane_index = lane_index
        self._settings = settings
        decodes = find(source, hooks.Decodes)
        self._decode = None if decodes is None else decodes.decode
        self._decode_rng = accepts_keyword(self._decode, "rng")
        self._set_entry(entry)
        self._busy_since_snapshot = 0.0
        self._snapshot_cost = 0.0
        self._bad_in_a_row = 0
        self._most = _ALL  # most records to request per next_batch call
        self._iterator: LaneIterator | None = None
        # The iterator again, if it has the hook; stacked records are used only without decode.
        self._stacked: hooks.StackedLane | None = None
        self._resumable: hooks.Resumable | None = None
        self._dropping: Dropping | None = None
        self.spec: RecordSpec | None = None
        if not self._ended:
            call_with_retry(self._reopen, settings.retry, doing=f"opening lane {lane_index}")

    def _set_entry(self, entry: LaneEntry) -> None:
        self._epoch = entry.epoch
        self._taken = entry.taken
        self._records = entry.records
        last = self._settings.num_epochs  # may be less than when the state was saved
        self._ended = entry.ended or (last is not None and entry.epoch >= last)
        self._snapshot: JsonValue = entry.state
        self._since = entry.skip

    # ------------------------------------------------------------------ opening

    def _open(self, epoch: int) -> LaneIterator:
        settings = self._settings
        try:
            return hooks.open_lane(self._source, self.lane_index, settings.num_lanes, epoch=epoch, seed=settings.seed)
        except StopIteration as error:
            raise SourceError(
                f"opening lane {self.lane_index} raised StopIteration, which does not end the data. Return an iterator; it "
                "may be empty.",
                lane_index=self.lane_index,
            ) from error

    def _reopen(self) -> None:
        """Opens the lane at its snapshot and moves it forward by the records since."""
        self._close_iterator()
        self._iterator = iterator = self._open(self._epoch)
        self._resumable = find(iterator, hooks.Resumable)
        self._stacked = find(iterator, hooks.StackedLane) if self._decode is None else None
        try:
            self._restore(iterator)
            self._drop(iterator, self._since)
        except BaseException as error:
            self._close_broken()
            if isinstance(error, StopIteration):  # which would end the feed
                raise SourceError(
                    f"restoring lane {self.lane_index} raised StopIteration. Raise a different exception in set_state.",
                    lane_index=self.lane_index,
                ) from error
            raise
        finally:
            self._dropping = None

    def go_to(self, entry: LaneEntry) -> None:
        """Moves to another state of the lane: forward by dropping records, otherwise by opening it again.

        Raises:
          SourceError: the data has become shorter.
          Exception: any error of the source that remains after the retries.
        """
        ahead = entry.taken - self._taken
        near = entry.epoch == self._epoch and ahead >= 0 and self._iterator is not None and not entry.ended
        self._set_entry(entry)
        if near:
            try:
                self._drop(cast("LaneIterator", self._iterator), ahead)
                return
            except Exception as error:  # the iterator is not called again
                _log.debug("lane %d is opened again, since moving it forward failed: %s", self.lane_index, error)
            finally:
                self._dropping = None
        self._close_broken()
        if not self._ended:
            call_with_retry(self._reopen, self._settings.retry, doing=f"opening lane {self.lane_index}")

    def _restore(self, iterator: LaneIterator) -> None:
        if self._snapshot is not None:
            if self._resumable is None:
                raise StateMismatchError(
                    f"lanes.{self.lane_index}.state",
                    "a state of the source",
                    f"{type(iterator).__name__} has no set_state",
                    "Pass the source that the state was saved with.",
                )
            self._resumable.set_state(exact_json.decode_value(self._snapshot))
        elif self._resumable is None and self._taken and self._since == self._taken:
            _log.info(
                "lane %d has no get_state: it is resumed by reading and dropping %d records",
                self.lane_index,
                self._since,
            )

    def _drop(self, iterator: LaneIterator, count: int) -> None:
        left = count
        stacked = find(iterator, hooks.StackedLane)
        with Dropping(f"lane {self.lane_index}", count) as dropping:
            self._dropping = dropping
            while left:
                try:
                    if stacked is None:
                        next(iterator)
                        dropped = 1
                    else:
                        dropped = num_rows(stacked.next_batch(left))
                except StopIteration:
                    raise SourceError(
                        f"lane {self.lane_index} ended {left} records before the record to resume at (epoch "
                        f"{self._epoch}, record {self._taken}); the data has become shorter. Pass the data that the "
                        "state was saved with.",
                        lane_index=self.lane_index,
                    ) from None
                left -= dropped
                dropping.add(dropped)

    def _close_iterator(self) -> None:
        iterator, self._iterator = self._iterator, None
        self._stacked = self._resumable = None
        hooks.close(iterator)

    # ------------------------------------------------------------------ reading

    def take(self, num_records: int) -> Taken:
        """Takes up to ``num_records`` records; fewer only if the lane ends.

        Raises:
          SourceError: records differ in structure from the first, or an epoch has no records.
          Exception: any error of the source or its decoder that remains after the retries.
        """
        start = time.monotonic()
        chunks: list[PyTree] = []
        result = Taken(None, 0)
        stack = RecordStack(num_records, self.spec, lane_index=self.lane_index)

        def count_retry() -> None:
            result.retries += 1

        def read() -> bool:
            return self._read_some(num_records, stack, chunks, result)

        while result.count < num_records and not self._ended:
            more = call_with_retry(
                read,
                self._settings.retry,
                doing=self.describe,
                on_retry=count_retry,
                progress=lambda: self._taken,
            )
            if not more:
                self._next_epoch()
        self._take_stacked(stack, chunks)
        if chunks:
            result.tree = join_batches(chunks, what=lambda _: f"lane {self.lane_index}", lane_index=self.lane_index)
        self._records += result.count
        self._busy_since_snapshot += time.monotonic() - start
        return result

    def _read_some(self, num_records: int, stack: RecordStack, chunks: list[PyTree], result: Taken) -> bool:
        """Fills ``result`` up to ``num_records``, or adds one batch of ``next_batch``; False at the end of the epoch."""
        if self._iterator is None:
            self._reopen()
        iterator = cast("LaneIterator", self._iterator)
        try:
            if self._stacked is not None:
                self._take_stacked(stack, chunks)  # left from an epoch whose iterator gave single records
                self._add_batch(self._stacked, num_records - result.count, chunks, result)
                return True
            while result.count < num_records:
                self._add(next(iterator), stack, result)
                self._taken += 1  # only after _add, so that a retry decodes the same record
                self._since += 1
            return True
        except StopIteration:
            self._most = _ALL
            return False
        except BaseException as error:
            named = any(f"lane {self.lane_index}" in note for note in getattr(error, "__notes__", ()))
            if not named and not isinstance(error, SourceError):
                error.add_note(f"while reading lane {self.lane_index}, after record {self._taken}")
            if isinstance(error, Exception):
                note_thread(error)
            self._close_broken()
            raise

    def _add_batch(self, iterator: hooks.StackedLane, missing: int, chunks: list[PyTree], result: Taken) -> None:
        # After a failure request 1 record, then 2, 4, …: records already read are kept, and each record gets its own
        # retries. The limit is 1 during the call, so it stays 1 if the call raises.
        most, self._most = self._most, 1
        batch = own_batch(iterator.next_batch(min(most, missing)), iterator, "next_batch")
        self._most = min(2 * most, _ALL)
        count = num_rows(batch)
        chunks.append(batch)
        self._taken += count
        self._since += count
        result.count += count

    def _take_stacked(self, stack: RecordStack, chunks: list[PyTree]) -> None:
        if stack.count:
            tree, self.spec = stack.take()
            chunks.append(tree)

    def _close_broken(self) -> None:
        try:
            self._close_iterator()
        except Exception as error:  # must not mask the error that broke the iterator
            _log.debug("closing the iterator of lane %d failed: %s", self.lane_index, error)

    def _add(self, record: Record, stack: RecordStack, result: Taken) -> None:
        if self._decode is not None:
            # Unique over all lanes, for rng= and the ledger. States list these ids, so the shift cannot change.
            record_id = (self.lane_index << 48) | self._taken
            extra = {"rng": philox(self._settings.seed, self._epoch, record_id)} if self._decode_rng else {}
            try:
                record = self._decode(record, **extra)
            except StopIteration as error:
                raise SourceError(
                    f"decode raised StopIteration at record {self._taken} of lane {self.lane_index}, which does not end "
                    "the data. Raise ValueError for a bad record.",
                    lane_index=self.lane_index,
                ) from error
            except ValueError as error:
                if self._settings.bad_records is None:
                    error.add_note(f"while decoding record {self._taken} of lane {self.lane_index}")
                    raise
                result.bad.append((record_id, self._epoch, reason_of(error)))
                self._bad_in_a_row += 1
                if self._bad_in_a_row >= _MAX_BAD_IN_A_ROW:
                    raise SourceError(
                        f"{_MAX_BAD_IN_A_ROW} consecutive records of lane {self.lane_index} are bad, up to record "
                        f"{self._taken} of epoch {self._epoch}. Check the data as a whole, and decode.",
                        lane_index=self.lane_index,
                    ) from error
                return  # the lane's next record fills this row
        self._bad_in_a_row = 0
        stack.add(record)
        result.count += 1

    def _next_epoch(self) -> None:
        if self._taken == 0 and (self._settings.num_epochs is None or self._settings.num_epochs > 1):
            raise SourceError(
                f"lane {self.lane_index} of {self._settings.num_lanes} has no record in epoch {self._epoch}, so repeating "
                "its epochs would never end. Use fewer lanes (num_lanes=), or give each lane data.",
                lane_index=self.lane_index,
            )
        if self._settings.num_epochs is not None and self._epoch + 1 >= self._settings.num_epochs:
            self._ended = True
            self._close_iterator()
            return
        self._close_iterator()
        self._epoch += 1
        self._taken, self._since, self._snapshot = 0, 0, None

    def coming_files(self, num_records: int) -> Iterator[Sequence[hooks.CachedFile]] | None:
        """See :class:`meshfeed._src.base.hooks.PlansFiles`."""
        plans = find(self._iterator, hooks.PlansFiles)
        return None if plans is None else plans.coming_files(num_records)

    # ------------------------------------------------------------------ state

    @property
    def length(self) -> int | None:
        """Records of the lane over all epochs if it has ended, else None."""
        return self._records if self._ended else None

    @property
    def reads_again(self) -> bool:
        """Whether the lane, opened at its state, would read its records again from the beginning of its epoch."""
        return self._iterator is not None and hooks.reads_again(self._iterator)

    def entry(self) -> LaneEntry:
        """Returns the lane's current state; takes a new snapshot of the source unless that is currently too expensive."""
        if self._since and self._iterator is not None and self._resumable is not None:
            cheap = self._snapshot_cost <= _SNAPSHOT_SHARE * self._busy_since_snapshot
            overdue = self._busy_since_snapshot > _MAX_SNAPSHOT_SECONDS
            if cheap or overdue or self._snapshot_cost < _CHEAP_SECONDS:
                self._take_snapshot(self._resumable)
        return LaneEntry(
            records=self._records,
            epoch=self._epoch,
            taken=self._taken,
            state=self._snapshot,
            skip=self._since,
            ended=self._ended,
        )

    def _take_snapshot(self, iterator: hooks.Resumable) -> None:
        start = time.monotonic()
        state = iterator.get_state()
        try:
            # encoding copies the state, which the iterator may mutate later
            self._snapshot = exact_json.encode_value(state)
        except TypeError as error:
            raise SourceError(
                f"the state of lane {self.lane_index} cannot be saved exactly: {error}. {exact_json.ALLOWED}",
                lane_index=self.lane_index,
            ) from error
        self._since = 0
        cost = time.monotonic() - start
        if self._snapshot_cost < _EXPENSIVE_SECONDS <= cost:
            _log.info(
                "a snapshot of lane %d takes %.1f ms, so it is taken only occasionally", self.lane_index, cost * 1e3
            )
        self._snapshot_cost = cost
        self._busy_since_snapshot = 0.0

    def describe(self) -> str:
        """Returns what the lane is doing, for logs."""
        reading = f"reading lane {self.lane_index} (epoch {self._epoch}, after record {self._taken})"
        return str(self._dropping or reading)

    def close(self) -> None:
        """Closes the iterator; errors, such as from a generator in which a read hangs, are only logged."""
        self._close_broken()
