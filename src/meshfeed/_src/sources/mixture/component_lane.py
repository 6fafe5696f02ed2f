"""One component of a lane of a mixture, over its own epochs: a stream, or the records of a random-access source."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import SettingsError, SourceError, StateMismatchError, refuse_stop_iteration
from meshfeed._src.base.ownership import own_batch
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.rng import philox
from meshfeed._src.base.types import JsonValue, PyTree, Record, RecordIds
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.mixture import join_ids
from meshfeed._src.order.permutation import derive_key
from meshfeed._src.reading.host_batch import num_rows
from meshfeed._src.reading.records import SourceReader, wants_rng
from meshfeed._src.reading.stacking import RecordSpec, RecordStack
from meshfeed._src.sources.documents import read_items
from meshfeed._src.sources.joined import caching
from meshfeed._src.sources.mixture.components import Components

_COMPONENT_SEED = 104  # purpose of a derived key; differs from those in order/mixture.py


class ComponentLane:
    """Reads component ``number`` for one mixture lane, over its own epochs. Opens the source on the first read.

    ``shuffle`` is the order of a random-access component. Without ``stacks``, records are read one by one, as they are
    stored.
    """

    def __init__(
        self,
        components: Components,
        number: int,
        lane_index: int,
        num_lanes: int,
        seed: int,
        *,
        shuffle: bool | int,
        stacks: bool,
    ) -> None:
        self._components, self._shuffle, self._stacks = components, shuffle, stacks
        self.name, self._source = list(self._components.sources.items())[number]
        self._number, self._lane_index, self._num_lanes, self._seed = number, lane_index, num_lanes, seed
        self.repeat = self._components.repeat.get(self.name, 1)
        self._is_stream = hooks.is_stream(self._source)
        self._limit = self._components.of_lane(self.name, lane_index, num_lanes) if self._is_stream else None
        decodes = hooks.find(self._source, hooks.Decodes) if self._is_stream else None
        self._decode = None if decodes is None else decodes.decode
        self._decode_rng = hooks.accepts_keyword(self._decode, "rng")
        self.epoch = self._taken = self._skip = 0
        self._state: JsonValue = None
        self._iterator: Any = None
        self._spec: RecordSpec | None = None

    @functools.cached_property
    def _order(self) -> LaneOrder:
        # A seed of its own: components of equal length would otherwise have the same order.
        seed, length = derive_key(self._seed, _COMPONENT_SEED, self._number), self._components.length(self.name)
        order = EpochOrder(length, shuffle=self._shuffle, seed=seed, num_epochs=None)
        return LaneOrder(order, self._lane_index, self._num_lanes)

    def read(self, num_records: int) -> list[tuple[PyTree, int]]:
        """Reads ``num_records`` records, or fewer if the epoch ends first.

        Returns:
          ``[(batch, number of records in it), ...]``.

        Raises:
          SourceError: the component raised StopIteration while it was being opened or decoded.
          Any error that the component raises, with a note naming it. Do not use this object after an error.
        """
        try:
            if self._iterator is None:
                self._reopen()
            batches, missing = [], num_records
            if self._limit is not None:
                missing = min(missing, self._limit - self._taken)
            while missing:
                batch, count = self._next(missing)
                if not count:
                    break
                batches.append((batch, count))
                self._taken += count
                missing -= count
            return batches
        except StopIteration as error:
            raise self._error(f"raised StopIteration outside of its records, in lane {self._lane_index}.") from error
        except Exception as error:
            error.add_note(f"in component {self.name!r} of the mixture, lane {self._lane_index}, epoch {self.epoch}")
            raise

    def coming(self, num_epochs: int | None) -> ComingFiles | None:
        """The files to come, or None if the component reads none through a cache."""
        files = None if self._is_stream else caching(self._source)
        if files is None:
            return None
        last = None if num_epochs is None else num_epochs * self.repeat
        return ComingFiles(files, self._order, self.epoch, self._taken, last)

    def next_epoch(self) -> None:
        """Starts the component's next epoch.

        Raises:
          SourceError: the current epoch had no records, so repeating it would loop forever.
          SettingsError: ``take`` leaves no record for this lane.
        """
        if not self._taken and self._limit == 0:
            raise SettingsError(
                f"take[{self.name!r}]={self._components.take[self.name]} leaves no record for lane {self._lane_index} of "
                f"{self._num_lanes}, among which the records of a stream are divided. Take at least {self._num_lanes} "
                "records, or use fewer lanes (num_lanes=).",
                setting="take",
            )
        if not self._taken:
            raise self._error(
                f"of the mixture has no record in lane {self._lane_index} of {self._num_lanes} (epoch {self.epoch}), so "
                "repeating it would never end. Use fewer lanes (num_lanes=), or give each lane data."
            )
        self.set_state([self.epoch + 1, 0, None, 0])

    @property
    def reads_again(self) -> bool:
        """See :class:`meshfeed._src.base.hooks.ReadsAgain`; False if it is not open."""
        return self._iterator is not None and hooks.reads_again(self._iterator)

    def get_state(self) -> JsonValue:
        """``[epoch, records taken, [the source's state] or None, records to skip from it]``."""
        if self._iterator is None:  # not opened since set_state: return the restored state
            return [self.epoch, self._taken, self._state, self._skip]
        resumable = hooks.find(self._iterator, hooks.Resumable)
        if self._taken and resumable is not None:  # at 0, the epoch's beginning needs no state
            return [self.epoch, self._taken, [resumable.get_state()], 0]
        return [self.epoch, self._taken, None, self._taken]

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken; opens nothing yet."""
        self.close()
        self.epoch, self._taken, self._state, self._skip = state

    def close(self) -> None:
        """Closes the open iterator."""
        iterator, self._iterator = self._iterator, None
        lane = self._lane_index
        with refuse_stop_iteration(f"component {self.name!r}", f"in close, in lane {lane}", lane_index=lane):
            hooks.close(iterator)

    def _error(self, what: str) -> SourceError:
        return SourceError(f"component {self.name!r} {what}", lane_index=self._lane_index)

    def _reopen(self) -> None:
        first_id = join_ids(self._number, 0)
        if self._is_stream:
            iterator = hooks.open_lane(
                *(self._source, self._lane_index, self._num_lanes),
                epoch=self.epoch,
                seed=self._seed,
                first_id=first_id,
            )
        else:
            make = RecordsLane if self._stacks else StoredRecordsLane
            iterator = make(self._source, self._order, self.epoch, self._seed, first_id)
        if self._state is not None:
            resumable = hooks.find(iterator, hooks.Resumable)
            if resumable is None:
                raise StateMismatchError(
                    f"lanes.{self._lane_index}.mixture.{self.name}",
                    "a state of the component",
                    f"{type(iterator).__name__} has no set_state",
                    "Pass the component that the state was saved with.",
                )
            resumable.set_state(self._state[0])
        self._iterator = iterator
        left = self._skip
        with Dropping(f"component {self.name!r} of lane {self._lane_index}", left) as dropping:
            while left:
                _, count = self._next(left, decode=False)
                if not count:
                    raise self._error(
                        f"ended {left} records before the record at which lane {self._lane_index} resumes; the data "
                        "has become shorter. Pass the data that the state was saved with."
                    )
                left -= count
                dropping.add(count)

    def _next(self, num_records: int, *, decode: bool = True) -> tuple[PyTree, int]:
        """A batch of up to ``num_records`` records and its size, which is 0 at the end of the epoch.

        Of records that are not stacked, it is the next one.
        """
        iterator = self._iterator
        if not self._stacks:
            try:
                record = next(iterator)
            except StopIteration:
                return None, 0
            return self._decoded(record, 0) if decode else record, 1
        stacked = hooks.find(iterator, hooks.StackedLane) if self._decode is None else None
        if stacked is not None:
            try:
                batch = own_batch(stacked.next_batch(num_records), iterator, "next_batch")
            except StopIteration:
                return None, 0
            return batch, num_rows(batch)
        stack, count = RecordStack(num_records, self._spec, lane_index=self._lane_index), 0
        while count < num_records:
            try:
                record = next(iterator)
            except StopIteration:
                break
            if decode:
                stack.add(self._decoded(record, count))
            count += 1
        if not count or not decode:  # skipped to resume: only their number counts
            return None, count
        batch, self._spec = stack.take()
        return batch, count

    def _decoded(self, record: object, ahead: int) -> Any:
        if self._decode is None:
            return record
        if not self._decode_rng:
            return self._decode(record)
        # Unique across components, like the record ids of a random-access mixture.
        record_id = join_ids(self._number, self._taken + ahead)
        return self._decode(record, rng=philox(derive_key(self._seed, self._lane_index), self.epoch, record_id))


class RecordsLane:
    """One epoch of a lane of a random-access source; its state is the number of records read."""

    fresh_arrays = True

    def __init__(self, source: Any, order: LaneOrder, epoch: int, seed: int, first_id: int) -> None:
        self._source, self._reader = source, SourceReader(source)
        self._order, self._epoch, self._seed, self._first_id = order, epoch, seed, first_id
        self._wants_rng = wants_rng(source)
        self._taken = 0

    def next_batch(self, num_records: int) -> PyTree:
        """Up to ``num_records`` records, stacked.

        Raises:
          StopIteration: the epoch has ended.
        """
        ids = self._order.ids(self._epoch, self._taken, self._taken + num_records)
        if not ids.size:
            raise StopIteration
        drawn = (ids + self._first_id).tolist() if self._wants_rng else None
        rngs = None if drawn is None else [philox(self._seed, self._epoch, record_id) for record_id in drawn]
        batch = self._reader.read(ids, rngs)
        self._taken += ids.size
        return batch

    def get_state(self) -> int:
        """Number of records read."""
        return self._taken

    def set_state(self, state: int) -> None:
        """Resumes after ``state`` records."""
        self._taken = state


class StoredRecordsLane(RecordsLane):
    """One epoch of a lane of a random-access source, record by record as they are stored."""

    def __next__(self) -> Record:
        if self._wants_rng:  # a decoder makes arrays, from stacked records
            return trees.map_leaves(lambda leaf: leaf[0], self.next_batch(1))
        ids = self._order.ids(self._epoch, self._taken, self._taken + 1)
        if not ids.size:
            raise StopIteration
        (record,) = read_items(self._source, ids)
        self._taken += 1
        return record


@dataclasses.dataclass(frozen=True)
class LaneOrder:
    """The record ids of one lane of a random-access component: every ``num_lanes``-th of the order of an epoch."""

    order: EpochOrder
    lane_index: int
    num_lanes: int

    def ids(self, epoch: int, first: int, stop: int) -> RecordIds:
        """The ids of records ``[first, stop)`` of the lane in an epoch, or fewer at its end."""
        size = self.order.num_records
        offsets = self.lane_index + self.num_lanes * np.arange(first, stop)
        return self.order.ids_at(epoch * size + offsets[offsets < size])[0]


@dataclasses.dataclass
class ComingFiles:
    """The files that a component of a mixture lane will read through a cache."""

    files: hooks.CachesFiles
    order: LaneOrder
    epoch: int  # of the next record
    taken: int  # records before it in the epoch
    num_epochs: int | None  # None if the component is repeated without end

    @property
    def ended(self) -> bool:
        """Whether the component has been read in all its epochs; a mixture may read it again."""
        return self.num_epochs is not None and self.epoch >= self.num_epochs

    def take(self, num_records: int) -> list[hooks.CachedFile]:
        """Returns the files of the next records."""
        found: list[hooks.CachedFile] = []
        while num_records and not self.ended:
            ids = self.order.ids(self.epoch, self.taken, self.taken + num_records)
            found += self.files.cached_files(ids) or ()
            self.taken += ids.size
            num_records -= ids.size
            if num_records:
                if not self.taken:  # the lane has no record of this component: the read raises
                    break
                self.epoch, self.taken = self.epoch + 1, 0
        return found
