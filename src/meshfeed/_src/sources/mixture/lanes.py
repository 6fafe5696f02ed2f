"""A mixture with at least one stream component: each lane mixes the components' lanes independently.

Lane i draws from lane i of each component, in blocks laid out as in a random-access mixture but with its own key. Its
state is its position and, for each component, the epoch and the cursor within it.

One component of one mixture lane: its records over its own epochs, stacked and resumable.

One lane of a mixture: draws from the components in the order of the blocks, each from its own cursor.
"""

from __future__ import annotations

import copy
import dataclasses
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
from meshfeed._src.order import epochs as epoch_order
from meshfeed._src.order.epochs import EpochOrder, derive_key
from meshfeed._src.order.mixture import MIXTURE_VERSION, Stage, StagedBlocks, StagedWeights, check_stages, group_by
from meshfeed._src.reading.host_batch import RecordSpec, RecordStack, num_rows
from meshfeed._src.reading.records import SourceReader, wants_rng
from meshfeed._src.sources.mixture.parts import Joiner, Part, Parts, compact_identity

_COMPONENT_SEED = 104  # purpose of a derived key; differs from those in order/mixture.py


class RecordsLane:
    """Every ``num_lanes``-th record of a random-access source, in the order of one epoch, as a lane.

    Args:
      source: a random-access source.
      lane_index: 0 … num_lanes - 1.
      num_lanes: number of lanes.
      length: number of records that are used, from the first.
      epoch: the component's epoch.
      shuffle: see :class:`meshfeed._src.order.epochs.EpochOrder`.
      seed: seed of the order.
      rng_seed: seed of the decoders' random numbers.
    """

    fresh_arrays = True

    def __init__(
        self,
        source: Any,
        lane_index: int,
        num_lanes: int,
        *,
        length: int,
        epoch: int,
        shuffle: bool | int,
        seed: int,
        rng_seed: int,
    ) -> None:
        self._reader, self._lane_index, self._num_lanes = SourceReader(source), lane_index, num_lanes
        self._order = epoch_order.EpochOrder(length, shuffle=shuffle, seed=seed, num_epochs=None)
        self._epoch, self._rng_seed = epoch, rng_seed
        self._wants_rng = wants_rng(source)
        self._taken = 0

    def record_ids(self, first: int, stop: int) -> RecordIds:
        """The ids of records ``[first, stop)`` of the lane in its epoch, or fewer at the end."""
        size = self._order.num_records
        offsets = self._lane_index + self._num_lanes * np.arange(first, stop)
        return self._order.ids_at(self._epoch * size + offsets[offsets < size])[0]

    def next_batch(self, num_records: int) -> PyTree:
        """Up to ``num_records`` records, stacked.

        Raises:
          StopIteration: the epoch has ended.
        """
        record_ids = self.record_ids(self._taken, self._taken + num_records)
        if not record_ids.size:
            raise StopIteration
        rngs = None
        if self._wants_rng:
            rngs = [philox(self._rng_seed, self._epoch, record_id) for record_id in record_ids.tolist()]
        batch = self._reader.read(record_ids, rngs)
        self._taken += record_ids.size
        return batch

    def get_state(self) -> int:
        """Number of records read."""
        return self._taken

    def set_state(self, state: int) -> None:
        """Resumes after ``state`` records."""
        self._taken = state


class ComponentLane:
    """Reads one component for one mixture lane. Opens the source on the first read.

    Args:
      name: the component's name.
      number: the component's index in the mixture.
      source: a stream source or a random-access source.
      lane_index: 0 … num_lanes - 1.
      num_lanes: number of lanes.
      seed: the feed's seed.
      shuffle: order of a random-access source; see :class:`meshfeed._src.order.epochs.EpochOrder`.
      parts: which part of each component is used, and how often.
    """

    def __init__(
        self,
        name: str,
        number: int,
        source: Any,
        lane_index: int,
        num_lanes: int,
        seed: int,
        shuffle: bool | int,
        parts: Parts,
    ) -> None:
        self.name = name
        self.epoch = 0
        self._number, self._source = number, source
        self._lane_index, self._num_lanes = lane_index, num_lanes
        self._seed, self._shuffle = seed, shuffle
        self._is_stream = hooks.is_stream(source)
        self.repeat, self._parts = parts.repeat.get(name, 1), parts
        self._limit = parts.of_lane(name, lane_index, num_lanes) if self._is_stream else None
        decodes = hooks.find(source, hooks.Decodes) if self._is_stream else None
        self._decode = None if decodes is None else decodes.decode
        self._decode_rng = hooks.accepts_keyword(self._decode, "rng")
        self._taken = 0
        self._state: Any = None
        self._skip = 0
        self._iterator: Any = None
        self._spec: RecordSpec | None = None

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
                if count:
                    batches.append((batch, count))
                    self._taken += count
                    missing -= count
                if batch is None or not count:
                    break
            return batches
        except StopIteration as error:
            raise SourceError(
                f"component {self.name!r} raised StopIteration outside of its records, in lane {self._lane_index}.",
                lane_index=self._lane_index,
            ) from error
        except Exception as error:
            error.add_note(f"in component {self.name!r} of the mixture, lane {self._lane_index}, epoch {self.epoch}")
            raise

    def coming(self, num_epochs: int | None) -> ComingFiles | None:
        """The files to come, or None if the component reads none through a cache."""
        files = None if self._is_stream else hooks.find(self._source, hooks.CachesFiles)
        if files is None or files.cached_files(np.empty(0, np.int64)) is None:
            return None
        last = None if num_epochs is None else num_epochs * self.repeat
        return ComingFiles(files, self._open_epoch, self.epoch, self._taken, last)

    def next_epoch(self) -> None:
        """Starts the component's next epoch.

        Raises:
          SourceError: the current epoch had no records, so repeating it would loop forever.
        """
        if not self._taken:
            if self._limit == 0:
                raise SettingsError(
                    f"take[{self.name!r}]={self._parts.take[self.name]} leaves no record for lane {self._lane_index} of "
                    f"{self._num_lanes}, among which the records of a stream are divided. Take at least {self._num_lanes} "
                    "records, or use fewer lanes (num_lanes=).",
                    setting="take",
                )
            raise SourceError(
                f"component {self.name!r} of the mixture has no record in lane {self._lane_index} of {self._num_lanes} "
                f"(epoch {self.epoch}), so that it cannot be repeated. Use fewer lanes (num_lanes=), or give each lane "
                "data.",
                lane_index=self._lane_index,
            )
        self.close()
        self.epoch += 1
        self._taken, self._state, self._skip = 0, None, 0

    def get_state(self) -> JsonValue:
        """``[epoch, records taken, [the source's state] or None, records to skip from it]``."""
        iterator = self._iterator
        if iterator is None:  # not opened since set_state: return the restored state
            return [self.epoch, self._taken, self._state, self._skip]
        resumable = hooks.find(iterator, hooks.Resumable)
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

    def _open_epoch(self, epoch: int) -> RecordsLane:
        return RecordsLane(
            self._source,
            self._lane_index,
            self._num_lanes,
            length=self._parts.length(self.name, self._source),
            epoch=epoch,
            shuffle=self._shuffle,
            seed=epoch_order.derive_key(self._seed, _COMPONENT_SEED, self._number),
            rng_seed=self._seed,
        )

    def _open(self) -> Any:
        if not self._is_stream:
            return self._open_epoch(self.epoch)
        return hooks.open_lane(self._source, self._lane_index, self._num_lanes, epoch=self.epoch, seed=self._seed)

    def _reopen(self) -> None:
        iterator = self._open()
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
                batch, count = self._next(left, decode=False)
                if batch is None:
                    raise SourceError(
                        f"component {self.name!r} ended {left} records before the place where lane {self._lane_index} is "
                        "to be continued; the data has become shorter.",
                        lane_index=self._lane_index,
                    )
                left -= count
                dropping.add(count)

    def _next(self, num_records: int, *, decode: bool = True) -> tuple[PyTree, int]:
        """A batch of up to ``num_records`` records and its size; None and 0 at the end of the epoch."""
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
        if not count:
            return None, 0
        if not decode:  # skipped to resume: only their number counts
            return (), count
        batch, self._spec = stack.take()
        return batch, count

    def _decoded(self, record: object, ahead: int) -> Any:
        if self._decode is None:
            return record
        if not self._decode_rng:
            return self._decode(record)
        # Unique across components, like the record ids of a random-access mixture.
        record_id = (self._number << 48) | (self._taken + ahead)
        return self._decode(
            record, rng=philox(epoch_order.derive_key(self._seed, self._lane_index), self.epoch, record_id)
        )


class ComingFiles:
    """The files that a component of a mixture lane will read through a cache.

    Args:
      files: the component.
      open_epoch: opens an epoch of its lane.
      epoch: the current epoch.
      taken: records taken from it.
      num_epochs: the component's epochs, or None if it is repeated without end.
    """

    def __init__(
        self,
        files: hooks.CachesFiles,
        open_epoch: Callable[[int], RecordsLane],
        epoch: int,
        taken: int,
        num_epochs: int | None,
    ) -> None:
        self._files, self._open_epoch, self._num_epochs = files, open_epoch, num_epochs
        self._epoch, self._taken, self._lane = epoch, taken, open_epoch(epoch)

    @property
    def ended(self) -> bool:
        """Whether the component has been read in all its epochs; a mixture may read it again."""
        return self._num_epochs is not None and self._epoch >= self._num_epochs

    def take(self, num_records: int) -> list[hooks.CachedFile]:
        """Returns the files of the next records."""
        found: list[hooks.CachedFile] = []
        while num_records and not self.ended:
            record_ids = self._lane.record_ids(self._taken, self._taken + num_records)
            found += self._files.cached_files(record_ids) or ()
            self._taken += record_ids.size
            num_records -= record_ids.size
            if num_records:
                if not self._taken:  # the lane has no record of this component: the read raises
                    break
                self._epoch, self._taken = self._epoch + 1, 0
                self._lane = self._open_epoch(self._epoch)
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
      on_end: "repeat" or "stop".
    """

    fresh_arrays = True  # components read into their own memory

    def __init__(
        self,
        components: Sequence[ComponentLane],
        blocks: StagedBlocks,
        *,
        last_stage: frozenset[str],
        num_epochs: int | None,
        on_end: str,
    ) -> None:
        self._components = components
        self._blocks = blocks
        self._deciding = [component for component in components if component.name in last_stage]
        self._num_epochs, self._stops = num_epochs, on_end == "stop"
        self._position = 0
        self._ended = False
        self._joiner = Joiner()

    def __iter__(self) -> MixtureLane:
        return self

    def __next__(self) -> Record:
        """The next record."""
        batch = self.next_batch(1)
        return jax.tree.map(lambda leaf: leaf[0], batch)

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


_LANE_LAYOUT = 103  # purpose of a derived key; differs from those in order/mixture.py


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
        bound: _Bound | None = None,
        *,
        parts: Parts,
    ) -> None:
        self.components = dict(components)
        self.stages, self.block, self.on_end, self.shuffle, self.parts = stages, block, on_end, shuffle, parts
        for source in components.values():
            if not hooks.is_stream(source):
                EpochOrder(max(1, len(source)), shuffle=shuffle, seed=0, num_epochs=1)  # validates shuffle
        self._bound = bound
        self._identities: dict[str, JsonValue] = {}

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self.components)}, read as lanes)"

    def bind(self, *, seed: int, num_epochs: int | None, position_of_step: Callable[[int], int]) -> StreamMixture:
        """A copy of this mixture with a feed's settings.

        Raises:
          SettingsError: ``on_end="stop"`` without ``num_epochs``.
        """
        if self.on_end == "stop" and num_epochs is None:
            raise SettingsError(
                "on_end='stop' with num_epochs=None: a component without an end never stops the mixture. "
                "Pass a number of epochs, or on_end='repeat'.",
                setting="on_end",
            )
        bound = _Bound(tuple(position_of_step(step) for step, _ in self.stages), seed, num_epochs)
        clone = StreamMixture(
            self.components, self.stages, self.block, self.on_end, self.shuffle, bound, parts=self.parts
        )
        clone._identities = self._identities  # shared, since computing an identity may read records
        return clone

    def open(self, lane_index: int, num_lanes: int) -> MixtureLane:
        """Lane ``lane_index`` of ``num_lanes``, mixed from that lane of every component.

        Raises:
          SettingsError: the mixture has stages but is not bound to a feed, which maps their steps to positions.
        """
        bound = self._bound
        if bound is None:
            if len(self.stages) > 1:
                raise SettingsError(
                    "a mixture with stages begins them at steps, so it can only be opened by a feed.", setting="weights"
                )
            bound = _Bound((0,))
        # Stages start at positions of the global stream; each lane has 1 / num_lanes of these positions.
        stages = [
            Stage(first // num_lanes, weights, step)
            for first, (step, weights) in zip(bound.first_positions, self.stages, strict=True)
        ]
        key = derive_key(bound.seed, _LANE_LAYOUT, lane_index)
        return MixtureLane(
            [
                ComponentLane(name, number, source, lane_index, num_lanes, bound.seed, self.shuffle, self.parts)
                for number, (name, source) in enumerate(self.components.items())
            ],
            StagedBlocks(list(self.components), stages, self.block, key),
            last_stage=frozenset(stages[-1].weights),
            num_epochs=bound.num_epochs,
            on_end=self.on_end,
        )

    def fingerprint(self) -> JsonValue:
        """Identity without the components, since a later stage may add some; ``check_saved`` compares them."""
        return {"kind": "mixture"}

    def mixture_config(self) -> JsonValue:
        """Stages and components, for ``check_saved``."""
        for name, source in self.components.items():
            if name not in self._identities:
                self._identities[name] = {**compact_identity(source), **self.parts.identity(name)}
        firsts = (0,) * len(self.stages) if self._bound is None else self._bound.first_positions
        stages = [
            Stage(first, weights, step).to_json() for first, (step, weights) in zip(firsts, self.stages, strict=True)
        ]
        return {
            "version": MIXTURE_VERSION,
            "block": self.block,
            "on_end": self.on_end,
            "shuffle": self.shuffle,
            "components": [[name, identity] for name, identity in self._identities.items()],
            "stages": stages,
        }

    def check_saved(self, saved_mixture: JsonValue, position: int, step: int | None = None) -> None:
        """See :func:`meshfeed._src.order.mixture.check_stages`."""
        check_stages(saved_mixture, self.mixture_config(), position, step=step)

    def close(self) -> None:
        """Closes the components that have a ``close``."""
        for source in self.components.values():
            hooks.close(source)
