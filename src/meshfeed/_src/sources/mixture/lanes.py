"""A mixture with at least one stream component: each lane mixes the components' lanes independently.

Lane i draws from lane i of each component, in blocks laid out as in a random-access mixture but with its own key. Its
state is its position and, for each component, the epoch and the cursor within it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError, StateMismatchError
from meshfeed._src.base.ownership import own_batch
from meshfeed._src.base.rng import philox
from meshfeed._src.base.stats import Dropping
from meshfeed._src.base.types import JsonValue, PyTree, Record, RecordIds
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.mixture import (
    MIXTURE_VERSION,
    Stage,
    StagedBlocks,
    StagedWeights,
    check_end,
    check_stages,
    group_by,
    join_ids,
)
from meshfeed._src.order.permutation import derive_key
from meshfeed._src.reading.host_batch import num_rows
from meshfeed._src.reading.records import SourceReader, wants_rng
from meshfeed._src.reading.stacking import RecordSpec, RecordStack
from meshfeed._src.sources.mixture.parts import Joiner, Part, Parts, caching

_LANE_LAYOUT, _COMPONENT_SEED = 103, 104  # purposes of derived keys; differ from those in order/mixture.py


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


class RecordsLane:
    """One epoch of a lane of a random-access source; its state is the number of records read.

    Args:
      source: a random-access source.
      order: the lane's records.
      epoch: the component's epoch.
      seed: seed of the decoders' random numbers.
    """

    fresh_arrays = True

    def __init__(self, source: Any, order: LaneOrder, epoch: int, seed: int) -> None:
        self._reader, self._order, self._epoch, self._seed = SourceReader(source), order, epoch, seed
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
        rngs = [philox(self._seed, self._epoch, record_id) for record_id in ids.tolist()] if self._wants_rng else None
        batch = self._reader.read(ids, rngs)
        self._taken += ids.size
        return batch

    def get_state(self) -> int:
        """Number of records read."""
        return self._taken

    def set_state(self, state: int) -> None:
        """Resumes after ``state`` records."""
        self._taken = state


class ComponentLane:
    """Reads one component for one mixture lane, over its own epochs. Opens the source on the first read.

    Args:
      mixture: the mixture.
      number: the component's index in it.
      lane_index, num_lanes, seed: as for ``open``.
    """

    def __init__(self, mixture: StreamMixture, number: int, lane_index: int, num_lanes: int, seed: int) -> None:
        self.name, self._source = list(mixture.components.items())[number]
        self._number, self._lane_index, self._num_lanes, self._seed = number, lane_index, num_lanes, seed
        self._shuffle, self._parts = mixture.shuffle, mixture.parts
        self.repeat = self._parts.repeat.get(self.name, 1)
        self._is_stream = hooks.is_stream(self._source)
        self._limit = self._parts.of_lane(self.name, lane_index, num_lanes) if self._is_stream else None
        decodes = hooks.find(self._source, hooks.Decodes) if self._is_stream else None
        self._decode = None if decodes is None else decodes.decode
        self._decode_rng = hooks.accepts_keyword(self._decode, "rng")
        self.epoch = self._taken = self._skip = 0
        self._state: JsonValue = None
        self._iterator: Any = None
        self._spec: RecordSpec | None = None

    @functools.cached_property
    def _order(self) -> LaneOrder:
        length = self._parts.length(self.name, self._source)
        seed = derive_key(self._seed, _COMPONENT_SEED, self._number)
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
                f"take[{self.name!r}]={self._parts.take[self.name]} leaves no record for lane {self._lane_index} of "
                f"{self._num_lanes}, among which the records of a stream are divided. Take at least {self._num_lanes} "
                "records, or use fewer lanes (num_lanes=).",
                setting="take",
            )
        if not self._taken:
            raise self._error(
                f"of the mixture has no record in lane {self._lane_index} of {self._num_lanes} (epoch {self.epoch}), so "
                "that it cannot be repeated. Use fewer lanes (num_lanes=), or give each lane data."
            )
        self.set_state([self.epoch + 1, 0, None, 0])

    def get_state(self) -> JsonValue:
        """``[epoch, records taken, [the source's state] or None, records to skip from it]``."""
        if self._iterator is None:  # not opened since set_state: return the restored state
            return [self.epoch, self._taken, self._state, self._skip]
        resumable = hooks.find(self._iterator, hooks.Resumable)
        if self._taken and resumable is not None:
            return [self.epoch, self._taken, [resumable.get_state()], 0]
        return [self.epoch, self._taken, None, self._taken]

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken; opens nothing yet."""
        self.close()
        self.epoch, self._taken, self._state, self._skip = state

    def close(self) -> None:
        """Closes the open iterator."""
        iterator, self._iterator = self._iterator, None
        hooks.close(iterator)

    def _error(self, what: str) -> SourceError:
        return SourceError(f"component {self.name!r} {what}", lane_index=self._lane_index)

    def _reopen(self) -> None:
        if self._is_stream:
            iterator = hooks.open_lane(
                self._source, self._lane_index, self._num_lanes, epoch=self.epoch, seed=self._seed
            )
        else:
            iterator = RecordsLane(self._source, self._order, self.epoch, self._seed)
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
                        f"ended {left} records before the place where lane {self._lane_index} is to be continued; the "
                        "data has become shorter."
                    )
                left -= count
                dropping.add(count)

    def _next(self, num_records: int, *, decode: bool = True) -> tuple[PyTree, int]:
        """A batch of up to ``num_records`` records and its size, which is 0 at the end of the epoch."""
        iterator = self._iterator
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


@dataclasses.dataclass
class ComingFiles:
    """The files that a component of a mixture lane will read through a cache.

    Attributes:
      files: the component.
      order: the lane's records.
      epoch: the epoch of the next record.
      taken: records before it in the epoch.
      num_epochs: the component's epochs, or None if it is repeated without end.
    """

    files: hooks.CachesFiles
    order: LaneOrder
    epoch: int
    taken: int
    num_epochs: int | None

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


class MixtureLane:
    """Records of one lane; a :class:`meshfeed._src.base.types.LaneIterator`.

    With ``on_end="stop"``, the lane ends before the first record that a component would have to repeat after
    ``num_epochs``. With ``"repeat"``, it ends when every component of the last stage has completed ``num_epochs`` and
    the last of them is drawn again.

    Args:
      components: the components, ordered by number.
      blocks: which component supplies which record.
      last_stage: names of the last stage's components.
      num_epochs: number of epochs of each component; None to repeat forever.
      stops: whether ``on_end`` is "stop".
    """

    fresh_arrays = True  # components read into their own memory

    def __init__(
        self,
        components: Sequence[ComponentLane],
        blocks: StagedBlocks,
        last_stage: Mapping[str, float],
        num_epochs: int | None,
        stops: bool,
    ) -> None:
        self._components, self._blocks, self._num_epochs, self._stops = components, blocks, num_epochs, stops
        self._deciding = [component for component in components if component.name in last_stage]
        self._position, self._ended = 0, False
        self._joiner = Joiner()

    def __iter__(self) -> MixtureLane:
        return self

    def __next__(self) -> Record:
        """The next record."""
        return jax.tree.map(lambda leaf: leaf[0], self.next_batch(1))

    def next_batch(self, num_records: int) -> PyTree:
        """Up to ``num_records`` records, stacked.

        Raises:
          StopIteration: the lane has ended.
          SourceError: a component has no records, or the components' records differ in structure, shape or dtype.
        """
        if self._ended:
            raise StopIteration
        numbers = self._blocks.components_from(self._position, num_records)
        parts: list[Part] = []
        ends: dict[str, int] = {}
        for number, rows in group_by(numbers):
            component = self._components[number]
            end = self._take(component, rows, parts)
            if end is not None and (self._stops or component in self._deciding):
                ends[component.name] = end
        count = len(numbers)
        if ends and (self._stops or self._all_read()):
            self._ended = True
            count = min(ends.values()) if self._stops else max(ends.values())
            if not count:
                raise StopIteration
            parts = [_cut(part, count) for part in parts if part[1][0] < count]
        batch = self._joiner.join(parts, count)
        self._position += count
        return batch

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
        """Reads records for ``rows`` and appends them to ``parts``.

        Returns:
          The row at which the component had completed ``num_epochs``, if that happened in this call, otherwise None.
        """
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


def _cut(part: Part, count: int) -> Part:
    name, rows, batch = part
    kept = int(np.searchsorted(rows, count))
    return name, rows[:kept], jax.tree.map(lambda leaf: leaf[:kept], batch)


@dataclasses.dataclass(frozen=True)
class _Bound:
    """The feed's settings for a mixture: first position of each stage, seed, number of epochs."""

    first_positions: tuple[int, ...]
    seed: int = 0
    num_epochs: int | None = 1


class StreamMixture:
    """A :func:`meshfeed.sources.Mixture` with at least one stream component; made by that function."""

    kind = "mixture"

    def __init__(
        self,
        components: Mapping[str, Any],
        stages: StagedWeights,
        block: int,
        on_end: str,
        shuffle: bool | int,
        parts: Parts,
    ) -> None:
        self.components = dict(components)
        self.stages, self.block, self.on_end, self.shuffle, self.parts = stages, block, on_end, shuffle, parts
        for source in components.values():
            if not hooks.is_stream(source):
                EpochOrder(max(1, len(source)), shuffle=shuffle, seed=0, num_epochs=1)  # validates shuffle
        self._bound: _Bound | None = None
        self._identities: list[tuple[str, JsonValue]] = []  # shared by all copies: computing them may read records

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self.components)}, read as lanes)"

    def bind(self, *, seed: int, num_epochs: int | None, position_of_step: Callable[[int], int]) -> StreamMixture:
        """A copy of this mixture with a feed's settings.

        Raises:
          SettingsError: ``on_end="stop"`` without ``num_epochs``.
        """
        check_end(self.on_end, num_epochs)
        clone = copy.copy(self)
        clone._bound = _Bound(tuple(position_of_step(step) for step, _ in self.stages), seed, num_epochs)
        return clone

    def open(self, lane_index: int, num_lanes: int) -> MixtureLane:
        """Lane ``lane_index`` of ``num_lanes``, mixed from that lane of every component.

        Raises:
          SettingsError: the mixture has stages but is not bound to a feed, which maps their steps to positions.
        """
        if self._bound is None and len(self.stages) > 1:
            raise SettingsError(
                "a mixture with stages begins them at steps, so it can only be opened by a feed.", setting="weights"
            )
        bound = self._bound or _Bound((0,))
        # Stages start at positions of the global stream; each lane has 1 / num_lanes of these positions.
        stages = self._stages_at([first // num_lanes for first in bound.first_positions])
        return MixtureLane(
            [ComponentLane(self, n, lane_index, num_lanes, bound.seed) for n in range(len(self.components))],
            StagedBlocks(list(self.components), stages, self.block, derive_key(bound.seed, _LANE_LAYOUT, lane_index)),
            stages[-1].weights,
            bound.num_epochs,
            self.on_end == "stop",
        )

    def _stages_at(self, positions: Sequence[int]) -> list[Stage]:
        return [Stage(first, weights, step) for first, (step, weights) in zip(positions, self.stages, strict=True)]

    def fingerprint(self) -> JsonValue:
        """Identity without the components, since a later stage may add some; ``check_saved`` compares them."""
        return {"kind": "mixture"}

    def mixture_config(self) -> JsonValue:
        """Stages and components, for ``check_saved``."""
        if not self._identities:
            self._identities += self.parts.identities(self.components).items()
        firsts = (0,) * len(self.stages) if self._bound is None else self._bound.first_positions
        return {
            "version": MIXTURE_VERSION,
            "block": self.block,
            "on_end": self.on_end,
            "shuffle": self.shuffle,
            "components": [list(identity) for identity in self._identities],
            "stages": [stage.to_json() for stage in self._stages_at(firsts)],
        }

    def check_saved(self, saved_mixture: JsonValue, position: int, step: int | None = None) -> None:
        """See :func:`meshfeed._src.order.mixture.check_stages`."""
        check_stages(saved_mixture, self.mixture_config(), position, step=step)

    def close(self) -> None:
        """Closes the components that have a ``close``."""
        for source in self.components.values():
            hooks.close(source)
