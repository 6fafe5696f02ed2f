"""Computes components, record ids and epochs from positions in a mixture.

The stream is divided into blocks. Every block of a stage holds the same number of records of each component, in an
order given by a keyed permutation per block. The n-th record of a component then follows from the block number and the
block's layout, without a scan from the start. The end of a stage may truncate a block; each component's offset at the
start of each stage is computed once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.types import JsonValue, RecordIds
from meshfeed._src.order.epochs import ALGORITHM, EpochOrder, derive_key, sorted_permutation
from meshfeed._src.order.stages import Stage, Weights, block_counts, check_stages

MIXTURE_VERSION = 1
COMPONENT_SHIFT = 48
"""A record id of a mixture is ``component << 48 | id``."""

_LAYOUT, _COMPONENT_SEED = 101, 102  # purpose of a derived key; disjoint from those of epochs.py


def join_ids(component: Any, record_ids: Any) -> Any:
    """Combines component numbers and record ids within the components into mixture ids."""
    return (component << COMPONENT_SHIFT) | record_ids


def split_ids(mixture_ids: RecordIds) -> tuple[RecordIds, RecordIds]:
    """Splits mixture ids into component numbers and record ids within the components."""
    return mixture_ids >> COMPONENT_SHIFT, mixture_ids & ((1 << COMPONENT_SHIFT) - 1)


def group_by(values: RecordIds) -> list[tuple[int, RecordIds]]:
    """Returns each distinct value, ascending, with the ascending indices at which it occurs."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    cuts = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), values.size]
    return [(int(ordered[a]), order[a:b]) for a, b in itertools.pairwise(cuts) if a < b]


@functools.lru_cache(maxsize=256)
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
        self._first = np.array([stage.first_position for stage in stages], np.int64)
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

    def drawn_before(self, position: int) -> RecordIds:
        """Number of records of each component before ``position``, int64[components]."""
        stage = int(np.searchsorted(self._first, position, side="right")) - 1
        return self._offsets[stage] + self._drawn(stage, position - int(self._first[stage]))

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

    def total(self, num_records: Sequence[int], num_epochs: int, on_end: str) -> int:
        """Number of records until the mixture ends; see :class:`MixtureOrder`."""
        in_use = range(len(num_records))
        if on_end == "stop":
            ends = [self.position_of(c, num_records[c] * num_epochs) for c in in_use]
            return min(end for end in ends if end is not None)
        # Only the last stage is endless; a component outside it may never finish.
        lasts = [self.position_of(c, num_records[c] * num_epochs - 1) for c in in_use if self._counts[-1][c]]
        return max(last for last in lasts if last is not None) + 1


class MixtureOrder:
    """The order of a mixture of random-access components, with the interface of ``EpochOrder``.

    Each component has its own order (its seed derives from the mixture's seed and the component's number) and its own
    epochs: of two components of equal length, one drawn twice as fast starts its second epoch halfway through the
    other's first.

    With ``num_epochs=None`` the stream never ends. Otherwise ``on_end="repeat"`` ends it once every component of the
    last stage has been read ``num_epochs`` times in full; components that finish earlier repeat. ``on_end="stop"`` ends
    it before the first record that would exceed ``num_epochs`` epochs of a component.

    Args:
      num_records: component → number of records, in the order of the components' numbers.
      stages: (first position, weights) pairs or :class:`Stage`.
      block: number of records in which the weights hold exactly.
      shuffle: order of each component; see ``EpochOrder``.
      seed: 0 to 2**64 - 1.
      num_epochs: number of epochs, or None for an endless stream.
      on_end: "repeat" or "stop".
      identities: component → JSON value that must be equal for a state to be usable; default: the number of records.

    Raises:
      SettingsError: a setting is out of range.
      SourceError: a component has no records.
    """

    def __init__(
        self,
        num_records: Mapping[str, int],
        *,
        stages: Sequence[Stage | tuple[int, Weights]],
        block: int = 2048,
        shuffle: bool | int = False,
        seed: int = 0,
        num_epochs: int | None = None,
        on_end: str = "repeat",
        identities: Mapping[str, JsonValue] | None = None,
    ) -> None:
        self._names = tuple(num_records)
        self._stages = tuple(stage if isinstance(stage, Stage) else Stage(*stage) for stage in stages)
        # Component orders are endless; ``total`` ends the mixture.
        self._orders = [
            EpochOrder(count, shuffle=shuffle, seed=derive_key(seed, _COMPONENT_SEED, number), num_epochs=None)
            for number, count in enumerate(num_records.values())
        ]
        for name, order in zip(self._names, self._orders, strict=True):
            if order.num_records > 1 << COMPONENT_SHIFT:
                raise SettingsError(
                    f"component {name!r} has {order.num_records} records; a mixture can tell at most 2**48 apart.",
                    setting="components",
                )
        if on_end == "stop" and num_epochs is None:
            raise SettingsError(
                "on_end='stop' with num_epochs=None: a component without an end never stops the mixture. "
                "Pass a number of epochs, or on_end='repeat'.",
                setting="on_end",
            )
        self._blocks = StagedBlocks(self._names, self._stages, block, derive_key(seed, _LAYOUT))
        self._on_end, self._seed = on_end, seed
        self._shuffle = shuffle
        self._identities = identities
        self.num_records = sum(num_records.values())
        self.total: int | None = None
        if num_epochs is not None:
            self.total = self._blocks.total(list(num_records.values()), num_epochs, on_end)

    def config(self) -> JsonValue:
        """The part of the fingerprint that describes the order, as JSON; :func:`check_stages` checks ``mixture``."""
        shuffle = self._orders[0].shuffle
        return {
            "algorithm": ALGORITHM,
            "version": self._orders[0].config()["version"],
            "shuffle": shuffle,
            "seed": self._seed,
            "mixture": {
                "version": MIXTURE_VERSION,
                "block": self._blocks.block,
                "on_end": self._on_end,
                "components": [
                    [name, order.num_records if self._identities is None else self._identities[name]]
                    for name, order in zip(self._names, self._orders, strict=True)
                ],
                "stages": [stage.to_json() for stage in self._stages],
            },
        }

    def check_saved(self, saved_mixture: JsonValue, position: int, step: int | None = None) -> None:
        """Checks a saved mixture against this one; see :func:`check_stages`."""
        check_stages(saved_mixture, self.config()["mixture"], position, step=step)

    def ids_between(self, start: int, stop: int) -> tuple[RecordIds, RecordIds]:
        """Returns :meth:`ids_at` for positions ``[start, stop)``."""
        return self.ids_at(np.arange(start, stop, dtype=np.int64))

    def ids_at(self, positions: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[RecordIds, RecordIds]:
        """Returns mixture ids and the components' epochs at the given positions, int64[n] each.

        Raises:
          IndexError: a position is outside the stream.
        """
        positions = np.asarray(positions, np.int64)
        if positions.size:
            low, high = int(positions.min()), int(positions.max())
            end = (1 << 62) if self.total is None else self.total
            if low < 0 or high >= end:
                raise IndexError(f"positions {low}..{high} are not all within the stream's [0, {end})")
        component, offsets = self._blocks.locate(positions)
        record_ids, epochs = np.empty_like(positions), np.empty_like(positions)
        for number, here in group_by(component):
            ids, epochs[here] = self._orders[number].ids_at(offsets[here])
            record_ids[here] = join_ids(number, ids)
        return record_ids, epochs
