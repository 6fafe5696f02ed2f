"""Position in a mixture → component, record id and epoch, by arithmetic alone.

The stream is cut into blocks. Every block of a stage holds the same number of records of each component, in an order
that is a keyed permutation of the block's own; so the n-th record of a component is found from the number of the block
and the block's layout, without walking from the start. Where a stage ends, a block may be cut; the offsets at which
the components enter each stage are computed once.
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

_LAYOUT, _COMPONENT_SEED = 101, 102  # what a derived key is for; apart from those of _order


def join_ids(component: Any, record_ids: Any) -> Any:
    """Ids of a component's records within the mixture."""
    return (component << COMPONENT_SHIFT) | record_ids


def split_ids(mixture_ids: RecordIds) -> tuple[RecordIds, RecordIds]:
    """Component numbers and the ids within them."""
    return mixture_ids >> COMPONENT_SHIFT, mixture_ids & ((1 << COMPONENT_SHIFT) - 1)


def group_by(values: RecordIds) -> list[tuple[int, RecordIds]]:
    """Each value and the rising indices where it stands."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    cuts = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), values.size]
    return [(int(ordered[a]), order[a:b]) for a, b in itertools.pairwise(cuts) if a < b]


@functools.lru_cache(maxsize=256)
def _layout(key: int, counts: tuple[int, ...]) -> tuple[RecordIds, RecordIds]:
    """Component of each slot of a block, and how many slots of the same component come before it; int64[block]."""
    labels = np.repeat(np.arange(len(counts)), counts)
    component = labels[sorted_permutation(key, labels.size)]
    by_component = np.argsort(component, kind="stable")
    rank = np.empty_like(component)
    first = np.cumsum((0, *counts[:-1]))
    rank[by_component] = np.arange(labels.size) - np.repeat(first, counts)
    for array in (component, rank):
        array.flags.writeable = False
    return component, rank


class StagedBlocks:
    """Which component each position is drawn from, and which of the component's records in its own order.

    Args:
      names: components, in the order of their numbers.
      stages: the first at position 0, rising.
      block: records of a block.
      key: unrelated keys give unrelated layouts.

    Raises:
      SettingsError: a block too small for a weight.
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
        if last is None or last[0] != (stage, block_index):  # a lane asks for the same one again and again
            key = derive_key(self._key, _LAYOUT, stage, block_index)
            self._last_layout = last = ((stage, block_index), _layout(key, self._counts[stage]))
        return last[1]

    def _drawn(self, stage: int, length: int) -> RecordIds:
        """Records of each component in the first ``length`` positions of a stage, int64[components]."""
        blocks, rest = divmod(length, self.block)
        drawn = np.array(self._counts[stage], np.int64) * blocks
        if rest:
            drawn += np.bincount(self._layout(stage, blocks)[0][:rest], minlength=drawn.size)
        return drawn

    def drawn_before(self, position: int) -> RecordIds:
        """Records of each component before ``position``, int64[components]."""
        stage = int(np.searchsorted(self._first, position, side="right")) - 1
        return self._offsets[stage] + self._drawn(stage, position - int(self._first[stage]))

    def locate(self, positions: RecordIds) -> tuple[RecordIds, RecordIds]:
        """Component numbers of positions, and positions in the components' own streams; int64[n] each."""
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
        """Component numbers of ``position`` and those after it within its block; int64, 1 to ``count`` of them."""
        stage = int(np.searchsorted(self._first, position, side="right")) - 1
        block_index, slot = divmod(position - int(self._first[stage]), self.block)
        if stage + 1 < len(self._counts):
            count = min(count, int(self._first[stage + 1]) - position)
        return self._layout(stage, block_index)[0][slot : slot + count]

    def position_of(self, component: int, component_position: int) -> int | None:
        """Where a component's record is drawn; None if no stage ever gets there."""
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
        """Records until the mixture ends; see :class:`MixtureOrder`."""
        in_use = range(len(num_records))
        if on_end == "stop":
            ends = [self.position_of(c, num_records[c] * num_epochs) for c in in_use]
            return min(end for end in ends if end is not None)
        lasts = [self.position_of(c, num_records[c] * num_epochs - 1) for c in in_use if self._counts[-1][c]]
        return max(last for last in lasts if last is not None) + 1


class MixtureOrder:
    """The order of a mixture of random-access components; the interface of :class:`meshfeed._src.order.epochs.EpochOrder`.

    Each component has an order of its own (its seed derives from the mixture's and the component's number) and epochs
    of its own: one that is drawn from twice as fast is in its second epoch when the other ends its first.

    With ``num_epochs=None`` the stream goes on for ever. Otherwise ``on_end="repeat"`` ends it once every component of
    the last stage has been read ``num_epochs`` times in full, and those that were through before repeat;
    ``on_end="stop"`` ends it before the first record that a component would have to repeat after ``num_epochs``.

    Args:
      num_records: component → its number of records, in the order of the components' numbers.
      stages: as (first position, weights) pairs or :class:`Stage`.
      block: records in which the weights hold exactly.
      shuffle: order of each component; see ``EpochOrder``.
      seed: 0 to 2**64 - 1.
      num_epochs: None for ever.
      on_end: "repeat" or "stop".
      identities: component → JSON value that must be equal for a state to be continued; default: number of records.

    Raises:
      SettingsError: a setting out of range, named.
      SourceError: a component without records.
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
        """What a saved state must agree with to be continued, as JSON; ``mixture`` as :func:`check_stages` reads it."""
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
        """See :func:`check_stages`."""
        check_stages(saved_mixture, self.config()["mixture"], position, step=step)

    def ids_between(self, start: int, stop: int) -> tuple[RecordIds, RecordIds]:
        """:meth:`ids_at` of the stream positions ``[start, stop)``."""
        return self.ids_at(np.arange(start, stop, dtype=np.int64))

    def ids_at(self, positions: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[RecordIds, RecordIds]:
        """Mixture ids and the components' epochs at stream positions, int64[n] each.

        Raises:
          IndexError: a position outside of the stream.
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
