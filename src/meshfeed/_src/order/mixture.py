"""Computes components, record ids and epochs from positions in a mixture, whose weights may change over time.

The stream is divided into blocks. Every block of a stage holds the same number of records of each component, in an
order given by a keyed permutation per block. The n-th record of a component then follows from the block number and the
block's layout, without a scan from the start. The end of a stage may truncate a block; each component's offset at the
start of each stage is computed once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.groups import group_by
from meshfeed._src.base.settings import ShardShuffle
from meshfeed._src.base.types import MAX_POSITION, JsonValue, RecordIds
from meshfeed._src.order.caching import Caching, cached
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.permutation import derive_key, sorted_permutation
from meshfeed._src.order.saved_mixture import check_stages
from meshfeed._src.order.shards import LaneCells, ShardOrder, num_in_lane, shards_config
from meshfeed._src.order.weights import Stage, StagedWeights, block_counts

Ids = TypeVar("Ids", int, RecordIds)
MIXTURE_VERSION = 1
COMPONENT_SHIFT = 48
"""A record id of a mixture is ``component << 48 | id``: 2**15 components of 2**48 records fit into an int64.

States list ids of bad records, so the shift cannot change.
"""

_LAYOUT, _COMPONENT_SEED, _LANE_LAYOUT = 101, 102, 105  # purpose of a derived key; disjoint from those of epochs.py


def join_ids(component: int, record_ids: Ids) -> Ids:
    """Combines a component's number and record ids within it into mixture ids."""
    return (component << COMPONENT_SHIFT) | record_ids


def split_ids(mixture_ids: Ids) -> tuple[Ids, Ids]:
    """Splits mixture ids into component numbers and record ids within the components."""
    return mixture_ids >> COMPONENT_SHIFT, mixture_ids & ((1 << COMPONENT_SHIFT) - 1)


@functools.lru_cache(maxsize=256)  # at most 8 MiB in blocks of 2,048; lanes are each in a block of their own
def _layout(key: int, counts: tuple[int, ...]) -> tuple[RecordIds, RecordIds]:
    """Component of each slot of a block, and its rank among the slots of that component; int64[block] each."""
    labels = np.repeat(np.arange(len(counts)), counts)
    component = labels[sorted_permutation(key, labels.size)]
    by_component = np.argsort(component, kind="stable")  # stable: ranks follow the order of the slots
    rank = np.empty_like(component)
    first = np.cumsum((0, *counts[:-1]))
    rank[by_component] = np.arange(labels.size) - np.repeat(first, counts)
    for array in (component, rank):
        array.flags.writeable = False  # shared through the cache
    return component, rank


class StagedBlocks:
    """Maps positions of a mixture to components and to positions in the components' own streams.

    Args:
      names: component names, in the order of their numbers.
      stages: stages with increasing first positions, starting at 0.
      block: records per block.
      key: unrelated keys give unrelated layouts.

    Raises:
      SettingsError: the block is too small for a weight.
    """

    def __init__(self, names: Sequence[str], stages: Sequence[Stage], block: int, key: int) -> None:
        self.block = block
        self._key = key
        self._last_layout: tuple[tuple[int, int], tuple[RecordIds, RecordIds]] | None = None
        # A stage at a step that no run reaches stands for "never".
        self._first = np.array([min(stage.first_position, MAX_POSITION) for stage in stages], np.int64)
        self._counts = [block_counts(stage.weights, names, block) for stage in stages]
        self._offsets = np.zeros((len(stages), len(names)), np.int64)
        for index in range(1, len(stages)):
            length = int(self._first[index] - self._first[index - 1])
            self._offsets[index] = self._offsets[index - 1] + self._drawn(index - 1, length)

    def _layout(self, stage: int, block_index: int) -> tuple[RecordIds, RecordIds]:
        last = self._last_layout
        if last is None or last[0] != (stage, block_index):  # a lane requests the same block many times in a row
            key = derive_key(self._key, _LAYOUT, stage, block_index)
            self._last_layout = last = ((stage, block_index), _layout(key, self._counts[stage]))
        return last[1]

    def _drawn(self, stage: int, length: int) -> RecordIds:
        """Number of records of each component in the first ``length`` positions of a stage, int64[components]."""
        blocks, rest = divmod(length, self.block)
        drawn = np.array(self._counts[stage], np.int64) * blocks
        if rest:
            drawn += np.bincount(self._layout(stage, blocks)[0][:rest], minlength=drawn.size)
        return drawn

    def locate(self, positions: RecordIds) -> tuple[RecordIds, RecordIds]:
        """Returns the component numbers and the positions in the components' own streams; int64[n] each."""
        stages = np.searchsorted(self._first, positions, side="right") - 1
        within = positions - self._first[stages]
        blocks, slots = np.divmod(within, self.block)
        component, rank = np.empty_like(positions), np.empty_like(positions)
        for stage in np.unique(stages).tolist():
            in_stage = stages == stage
            counts = np.array(self._counts[stage], np.int64)
            for block_index in np.unique(blocks[in_stage]).tolist():
                here = np.flatnonzero(in_stage & (blocks == block_index))
                layout_component, layout_rank = self._layout(stage, block_index)
                found = layout_component[slots[here]]
                component[here] = found
                offset = self._offsets[stage][found] + counts[found] * block_index
                rank[here] = offset + layout_rank[slots[here]]
        return component, rank

    def components_from(self, position: int, count: int) -> RecordIds:
        """Component numbers from ``position`` to the end of its block or stage, at most ``count``; int64."""
        stage = int(np.searchsorted(self._first, position, side="right")) - 1
        block_index, slot = divmod(position - int(self._first[stage]), self.block)
        if stage + 1 < len(self._counts):
            count = min(count, int(self._first[stage + 1]) - position)
        return self._layout(stage, block_index)[0][slot : slot + count]  # the slice ends with the block

    def position_of(self, component: int, component_position: int) -> int | None:
        """Position in the mixture of a component's record; None if no stage reaches it."""
        for stage in range(len(self._counts)):
            count = self._counts[stage][component]
            left = component_position - int(self._offsets[stage][component])
            last = stage + 1 == len(self._counts)
            if not count or not (last or component_position < int(self._offsets[stage + 1][component])):
                continue
            block_index, rank = divmod(left, count)
            layout_component, layout_rank = self._layout(stage, block_index)
            slot = int(np.flatnonzero((layout_component == component) & (layout_rank == rank))[0])
            return int(self._first[stage]) + block_index * self.block + slot
        return None

    def total(self, num_records: Sequence[int], on_end: str) -> int:
        """Number of records until each component has been read so often; see :class:`MixtureSettings`."""
        in_use = range(len(num_records))
        if on_end == "stop":
            return min(end for c in in_use if (end := self.position_of(c, num_records[c])) is not None)
        # Only the last stage is endless; a component outside it may never finish.
        lasts = [self.position_of(c, num_records[c] - 1) for c in in_use if self._counts[-1][c]]
        return max(last for last in lasts if last is not None) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureSettings:
    """What determines the order of a mixture, apart from its components and their order.

    With ``num_epochs=None`` the stream never ends. Otherwise ``on_end="repeat"`` ends it once every component of the last
    stage has been read ``num_epochs`` times in full; components that finish earlier repeat. ``on_end="stop"`` ends it before
    the first record that would exceed ``num_epochs`` epochs of a component.

    Attributes:
      stages: stages with increasing first positions, starting at 0.
      added: those among them that a feed has added, as users give them; see ``added_stages.py``.
      block: number of records in which the weights hold exactly.
      on_end: "repeat" or "stop".
      repeat: component → how many times it is read per epoch; 1 if not given.
      identities: component → JSON value that must be equal for a state to be usable, in the components' order.
      shards: by shards, component → digest of their lengths, which an identity need not imply: that of a Zip does not.
      seed: 0 to 2**64 - 1.
      num_epochs: number of epochs, or None for an endless stream.

    Raises:
      SettingsError: no component can reach the end that ``on_end="stop"`` waits for.
    """

    stages: Sequence[Stage]
    added: StagedWeights = ()
    block: int
    on_end: str
    repeat: Mapping[str, int]
    identities: Mapping[str, JsonValue]
    shards: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    seed: int
    num_epochs: int | None

    def __post_init__(self) -> None:
        if self.on_end == "stop" and self.num_epochs is None:
            raise SettingsError(
                "on_end='stop' with num_epochs=None: a component without an end never stops the mixture. "
                "Pass a number of epochs, or on_end='repeat'.",
                setting="on_end",
            )

    def stages_of_lane(self, num_lanes: int) -> list[Stage]:
        """Returns the stages at positions of a lane, which has 1 / num_lanes of those of the stream."""
        return [dataclasses.replace(s, first_position=s.first_position // num_lanes) for s in self.stages]

    def config(self) -> dict[str, JsonValue]:
        """Returns ``mixture`` of the fingerprint, which :func:`check_stages` checks.

        A component is ``[name, identity]``; by shards, also the digest of their lengths, which states of earlier versions
        lack.
        """
        return {
            "version": MIXTURE_VERSION,
            "block": self.block,
            "on_end": self.on_end,
            "components": [
                [name, identity, *([self.shards[name]] if name in self.shards else [])]
                for name, identity in self.identities.items()
            ],
            "stages": [stage.to_json() for stage in self.stages],
            **({"added": [[step, dict(weights)] for step, weights in self.added]} if self.added else {}),
        }


def _check_count(name: str, num_records: int, drawn: bool) -> None:
    if not num_records and drawn:
        raise SourceError(f"component {name!r} of the mixture has 0 records. Leave it out, or give it the weight 0.")
    if num_records > 1 << COMPONENT_SHIFT:
        raise SettingsError(
            f"component {name!r} has {num_records} records; a mixture takes at most 2**48 per component.",
            setting="components",
        )


# Records of a lane that are computed together. With 35 components a chunk costs little more for 8,192 records than for one
# batch; longer ones save little.
_CHUNK = 8192
# Fewer if a component is so small that they would span many epochs, since each epoch is laid out: with a component of 3
# records, 4,096 took 1.5 s.
_SHORTEST_CHUNK, _MOST_EPOCHS = 128, 512


class MixtureOrder(Caching):
    """The order of a mixture of random-access components.

    Each component has its own order (its seed derives from the mixture's seed and the component's number) and its own
    epochs: of two components of equal length, one drawn twice as fast starts its second epoch halfway through the
    other's first.

    By shards, each lane draws from its own part of every component, and shares are exact in every block of each lane. A
    component with fewer shards than lanes is cut into pieces of shards. All other orders have one lane.

    Args:
      components: component → number of records; by shards, component → records of each shard, int64[num_shards]. In the
        order of the components' numbers.
      settings: all that is not about the order of a component.
      shuffle: order of each component, see ``EpochOrder``; or the settings of an order by shards.
      num_lanes: by shards, number of lanes; divides the first position of every stage.
      segments: by shards, see :class:`LaneCells`.

    Raises:
      SettingsError: a setting is out of range.
      SourceError: a component has no records.
    """

    def __init__(
        self,
        components: Mapping[str, int] | Mapping[str, RecordIds],
        settings: MixtureSettings,
        shuffle: bool | int | ShardShuffle,
        num_lanes: int = 1,
        segments: Sequence[tuple[int, int]] = ((0, 1),),
    ) -> None:
        self._shuffle, self.num_lanes = shuffle, num_lanes
        names = list(components)
        counts = [int(np.sum(records)) for records in components.values()]
        self._ids_of: list[Callable[[RecordIds], tuple[RecordIds, RecordIds]]] = []  # cells of each component → ids
        shards: dict[str, str] = {}
        for number, (name, records) in enumerate(components.items()):
            seed = derive_key(settings.seed, _COMPONENT_SEED, number)
            endless: Any = {"shuffle": shuffle, "seed": seed, "num_epochs": None}  # ``total`` ends the mixture
            if isinstance(shuffle, ShardShuffle):
                _check_count(name, counts[number], any(name in stage.weights for stage in settings.stages))
                order = ShardOrder(np.asarray(records), num_lanes=num_lanes, segments=segments, **endless)
                self._ids_of.append(order.ids_of)
                shards[name] = order.shards
            else:
                self._ids_of.append(EpochOrder(counts[number], **endless).ids_at)
                _check_count(name, counts[number], True)
        self._settings = dataclasses.replace(settings, shards=shards)
        keys = [derive_key(settings.seed, _LAYOUT)]
        if isinstance(shuffle, ShardShuffle):
            keys = [derive_key(settings.seed, _LANE_LAYOUT, lane) for lane in range(num_lanes)]
        self._blocks = [StagedBlocks(names, settings.stages_of_lane(num_lanes), settings.block, key) for key in keys]
        self._chunk_records = _CHUNK
        drawn = [
            count for name, count in zip(names, counts, strict=True) if any(name in s.weights for s in settings.stages)
        ]
        while self._chunk_records > _SHORTEST_CHUNK and self._chunk_records * num_lanes > _MOST_EPOCHS * min(drawn):
            self._chunk_records //= 2
        self.total = self._compute_total(dict(zip(names, counts, strict=True)))
        self._end = MAX_POSITION if self.total is None else self.total
        self._cells = LaneCells(num_lanes, self.total, segments)
        self._make_caches()

    def _make_caches(self) -> None:
        # 128 KiB each; two of each lane for the reader, and that of the plan of files to fetch.
        self._chunk = cached(self._compute_chunk, 3 * self.num_lanes)

    def _compute_total(self, num_records: Mapping[str, int]) -> int | None:
        settings, num_lanes = self._settings, self.num_lanes
        if settings.num_epochs is None:
            return None
        whole = {
            name: count * settings.num_epochs * settings.repeat.get(name, 1) for name, count in num_records.items()
        }
        for name, records in whole.items():
            drawn = any(name in stage.weights for stage in settings.stages)
            if settings.on_end == "stop" and drawn and records < num_lanes:
                raise SettingsError(
                    f"num_lanes={num_lanes}, but component {name!r} has {records} records in all epochs, so some lanes "
                    f"have none of it and on_end='stop' would end them at once. Pass num_lanes={records} or fewer, or "
                    "on_end='repeat'.",
                    setting="num_lanes",
                )
        ends = [
            blocks.total([num_in_lane(records, lane, num_lanes) for records in whole.values()], settings.on_end)
            for lane, blocks in enumerate(self._blocks)
        ]
        # All lanes end together: with "repeat" when the last has read its parts, with "stop" when the first has.
        return num_lanes * (min(ends) if settings.on_end == "stop" else max(ends))

    def config(self) -> dict[str, JsonValue]:
        """The part of the fingerprint that describes the order, as JSON; :func:`check_stages` checks ``mixture``."""
        if isinstance(self._shuffle, ShardShuffle):
            config = shards_config(self._shuffle, self._settings.seed, self.num_lanes)
        else:
            order = EpochOrder(1, shuffle=self._shuffle, seed=self._settings.seed, num_epochs=None)
            config = order.config()
        return {**config, "mixture": self._settings.config()}

    def check_saved(self, saved_mixture: JsonValue, position: int, step: int | None = None) -> None:
        """Checks a saved mixture against this one; see :func:`check_stages`."""
        check_stages(saved_mixture, self._settings.config(), position, step=step)

    def ids_between(self, start: int, stop: int) -> tuple[RecordIds, RecordIds]:
        """Returns :meth:`ids_at` for positions ``[start, stop)``, faster with one lane.

        Raises:
          IndexError: a position is outside the stream.
        """
        chunk, first = divmod(start, self._chunk_records)
        last = first + stop - start
        if self.num_lanes > 1 or start < 0 or last > self._chunk_records or stop > self._end:
            return self.ids_at(np.arange(start, stop, dtype=np.int64))
        record_ids, epochs = self._chunk(0, chunk)
        return record_ids[first:last].copy(), epochs[first:last].copy()  # the chunk is cached

    def ids_at(self, positions: RecordIds) -> tuple[RecordIds, RecordIds]:
        """Returns mixture ids and the components' epochs at the given positions, int64[n] each.

        Raises:
          IndexError: a position is outside the stream.
        """
        cells = self._cells.at(positions)
        if self.num_lanes == 1:
            return self._ids_of_lane(0, cells)
        numbers, lanes = np.divmod(cells, self.num_lanes)
        record_ids, epochs = np.empty_like(cells), np.empty_like(cells)
        for lane, here in group_by(lanes):
            own = numbers[here]
            chunks = own // self._chunk_records
            if np.ptp(chunks) > 1:  # not a batch of a feed, whose records follow one another in each lane
                record_ids[here], epochs[here] = self._ids_of_lane(lane, own)
                continue
            for chunk, rows in group_by(chunks):
                ids, of_epochs = self._chunk(lane, chunk)
                within = own[rows] - chunk * self._chunk_records
                record_ids[here[rows]], epochs[here[rows]] = ids[within], of_epochs[within]
        return record_ids, epochs

    def _compute_chunk(self, lane: int, chunk: int) -> tuple[RecordIds, RecordIds]:
        stop = min((chunk + 1) * self._chunk_records, num_in_lane(self._end, lane, self.num_lanes))
        return self._ids_of_lane(lane, np.arange(chunk * self._chunk_records, stop, dtype=np.int64))

    def _ids_of_lane(self, lane: int, numbers: RecordIds) -> tuple[RecordIds, RecordIds]:
        """Mixture ids and epochs of records of a lane, int64[n] each."""
        component, cells = self._blocks[lane].locate(numbers)
        if self.num_lanes > 1:
            cells = cells * self.num_lanes + lane
        record_ids, epochs = np.empty_like(numbers), np.empty_like(numbers)
        for number, here in group_by(component):
            ids, epochs[here] = self._ids_of[number](cells[here])
            record_ids[here] = join_ids(number, ids)
        return record_ids, epochs
