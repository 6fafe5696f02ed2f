"""Lanes of a mixture: which component each record comes from, where the lane ends, and how components are read.

The state of a lane is its position and, for each component, the epoch and the cursor within it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import SettingsError, SourceError, StateMismatchError, refuse_stop_iteration
from meshfeed._src.base.groups import group_by
from meshfeed._src.base.ownership import own_batch
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.rng import philox
from meshfeed._src.base.types import JsonValue, PyTree, Record, RecordIds
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.mixture import StagedBlocks, join_ids
from meshfeed._src.order.permutation import derive_key
from meshfeed._src.reading.host_batch import num_rows
from meshfeed._src.reading.records import SourceReader, wants_rng
from meshfeed._src.reading.stacking import RecordSpec, RecordStack
from meshfeed._src.sources.documents import read_items
from meshfeed._src.sources.joined import Joiner, Part, caching
from meshfeed._src.sources.mixture.components import Components


class MixtureLane:
    """Records of one lane; a :class:`meshfeed._src.base.types.LaneIterator`.

    With ``on_end="stop"``, the lane ends before the first record that a component would have to repeat after
    ``num_epochs``. With ``"repeat"``, it ends when every component of the last stage has completed ``num_epochs`` and
    the last of them is drawn again.

    ``blocks`` gives the component of each record. The first ``delivered`` records are read as they were delivered: the lane
    has not ended before, even if the components that decide now, since the last stage has changed, were complete there; and
    with ``ended`` it ends after them, even if these components are not complete.
    """

    def __init__(
        self,
        components: Sequence[ComponentLane],
        blocks: StagedBlocks,
        last_stage: Mapping[str, float],
        num_epochs: int | None,
        stops: bool,
        delivered: int,
        *,
        ended: bool,
    ) -> None:
        self._delivered, self._ends_there = delivered, ended
        self._components, self._blocks, self._num_epochs, self._stops = components, blocks, num_epochs, stops
        # With "repeat", components outside of the last stage do not decide: they are never drawn again.
        self._deciding = [component for component in components if stops or component.name in last_stage]
        self._position, self._ended = 0, False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        """The next record, as its component gives it."""
        ((_, _, record),), _ = self._read(1)
        return record

    def _read(self, num_records: int) -> tuple[list[Part], int]:
        """Up to ``num_records`` records, in parts of one component each, and their number.

        Raises:
          StopIteration: the lane has ended.
          SourceError: a component has no records.
        """
        delivered_again = self._position < self._delivered  # to resume or to replay
        if delivered_again:
            num_records = min(num_records, self._delivered - self._position)
        may_end = self._num_epochs is not None and not delivered_again
        if self._ended or (may_end and (self._ends_there or (not self._stops and self._all_read()))):
            raise StopIteration
        numbers = self._blocks.components_from(self._position, num_records)
        parts: list[Part] = []
        ends: list[int] = []  # rows at which deciding components have completed their epochs
        for number, rows in group_by(numbers):
            component = self._components[number]
            end = self._take(component, rows, parts)
            if end is not None and component in self._deciding:
                ends.append(end)
        count = len(numbers)
        if ends and not delivered_again and (self._stops or self._all_read()):
            # Records past the row that ends the lane have been read, and are dropped.
            self._ended = True
            count = min(ends) if self._stops else max(ends)
            if not count:
                raise StopIteration
            parts = [_cut(part, count) for part in parts if part[1][0] < count]
        self._position += count
        return parts, count

    def coming_files(self, num_records: int) -> Iterator[Sequence[hooks.CachedFile]] | None:
        """The files of the next reads; see :class:`meshfeed._src.base.hooks.PlansFiles`."""
        found = {number: component.coming(self._num_epochs) for number, component in enumerate(self._components)}
        coming = {number: files for number, files in found.items() if files is not None}
        return self._plan_files(num_records, self._position, coming) if coming else None

    def _plan_files(
        self, num_records: int, position: int, coming: Mapping[int, ComingFiles]
    ) -> Iterator[Sequence[hooks.CachedFile]]:
        blocks = copy.copy(self._blocks)  # it keeps its last layout
        while not all(files.ended for files in coming.values()):
            files: list[hooks.CachedFile] = []
            stop = position + num_records
            while position < stop:
                numbers = blocks.components_from(position, stop - position)
                position += len(numbers)
                for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
                    if number in coming:
                        files += coming[int(number)].take(int(count))
            yield list(dict.fromkeys(files))

    def _take(self, component: ComponentLane, rows: RecordIds, parts: list[Part]) -> int | None:
        """Appends records for ``rows`` to ``parts``; returns the row at which ``num_epochs`` were completed, if any."""
        end, done = None, 0
        while True:
            for batch, count in component.read(len(rows) - done):
                parts.append((component.name, rows[done : done + count], batch))
                done += count
            if done == len(rows):
                return end
            if self._num_epochs is not None and component.epoch + 1 == self._num_epochs * component.repeat:
                end = int(rows[done])
                if self._stops:
                    return end
            component.next_epoch()

    def _all_read(self) -> bool:
        return all(component.epoch >= (self._num_epochs or 0) * component.repeat for component in self._deciding)

    @property
    def reads_again(self) -> bool:
        """See :class:`meshfeed._src.base.hooks.ReadsAgain`: whether a component that has been read would."""
        return any(component.reads_again for component in self._components)

    def get_state(self) -> JsonValue:
        """Position in the lane, and the state of each component that has been read."""
        return {
            "position": self._position,
            "ended": self._ended,
            "components": {
                component.name: state
                for component in self._components
                if (state := component.get_state())[:2] != [0, 0]
            },
        }

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken; opens nothing yet."""
        for component in self._components:
            component.set_state(state["components"].get(component.name, [0, 0, None, 0]))
        self._position, self._ended = state["position"], state["ended"]

    def close(self) -> None:
        """Closes all components."""
        for component in self._components:
            component.close()


class StackedMixtureLane(MixtureLane):
    """A lane of a mixture whose records are arrays of one shape, which are read many at a time."""

    fresh_arrays = True  # components read into their own memory

    @functools.cached_property
    def _joiner(self) -> Joiner:
        return Joiner("component", "mixture")

    def __next__(self) -> Record:
        """The next record."""
        return trees.map_leaves(lambda leaf: leaf[0], self.next_batch(1))

    def next_batch(self, num_records: int) -> PyTree:
        """Up to ``num_records`` records, stacked.

        Raises:
          StopIteration: the lane has ended.
          SourceError: a component has no records, or the components' records differ in structure, shape or dtype.
        """
        return self._joiner.join(*self._read(num_records))


def _cut(part: Part, count: int) -> Part:
    name, rows, batch = part
    kept = int(np.searchsorted(rows, count))
    return name, rows[:kept], trees.map_leaves(lambda leaf: leaf[:kept], batch)


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
