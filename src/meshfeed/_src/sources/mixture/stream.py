"""A mixture with a stream among its components: all are read as lanes.

Lane i draws from lane i of each component, in blocks laid out as in a random-access mixture but with its own key.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.mixture import StagedBlocks
from meshfeed._src.order.permutation import derive_key
from meshfeed._src.order.saved_mixture import check_stages
from meshfeed._src.sources.mixture.components import Components, MixedSource
from meshfeed._src.sources.mixture.lane import ComponentLane, MixtureLane, StackedMixtureLane

_LANE_LAYOUT = 103  # purpose of a derived key; differs from those in order/mixture.py


class StreamMixture(MixedSource):
    """A :func:`meshfeed.sources.Mixture` with at least one stream component; made by that function."""

    def __init__(self, given: Components, block: int, on_end: str, shuffle: bool | int) -> None:
        super().__init__(given, block, on_end)
        components = self.components
        self.shuffle = shuffle
        for source in components.sources.values():
            if not hooks.is_stream(source):
                EpochOrder(max(1, len(source)), shuffle=shuffle, seed=0, num_epochs=1)  # validates shuffle
        for name, source in given.sources.items():
            inner = source.shuffle if isinstance(source, StreamMixture) else False
            if inner is not False and (inner != shuffle or (inner is True) != (shuffle is True)):  # True == 1
                raise SettingsError(
                    f"component {name!r} is a mixture with shuffle={inner!r}, but the order of its components is that of "
                    f"this mixture, shuffle={shuffle!r}. Pass shuffle= to this mixture, and not to the inner one.",
                    setting="shuffle",
                )
        self._is_bound, self._delivered = False, 0  # to a feed, which gives its settings
        self._stacks = True
        self._ended_lanes: Mapping[int, int] = {}  # lane → length
        self._bound = self._settings_at([0] * len(components.stages), {}, 0, 1)

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self.components.sources)}, read as lanes)"

    def unconverted(self) -> StreamMixture:
        """Returns the mixture with its components' records as they are stored, for functions that make arrays of them."""
        clone = copy.copy(self)
        sources = {name: hooks.unconverted(source) for name, source in self.components.sources.items()}
        clone.components, clone._stacks = dataclasses.replace(self.components, sources=sources), False
        return clone

    def bind(
        self,
        *,
        seed: int,
        num_epochs: int | None,
        position_of_step: Callable[[int], int],
        delivered: int = 0,
        ended: Mapping[int, int] | None = None,
    ) -> StreamMixture:
        """A copy of this mixture with a feed's settings; see :class:`meshfeed._src.base.hooks.StagedStream`.

        Raises:
          SettingsError: ``on_end="stop"`` without ``num_epochs``.
        """
        clone = copy.copy(self)  # the user may pass the same mixture to several feeds
        positions = [position_of_step(step) for step, _ in self.components.stages]
        clone._is_bound, clone._bound = True, self._settings_at(positions, {}, seed, num_epochs)
        # With "stop", later stages do not change where a lane ends. Without stages, functions above may drop records, and
        # the records delivered are not those of the lane, but no more. Lanes of a state, which is of no ended one, may have
        # gone beyond an end that an endless stream has been given since.
        if self._on_end == "repeat" and (self.has_stages or ended is None):
            clone._delivered, clone._ended_lanes = delivered, ended or {}
        return clone

    @property
    def has_stages(self) -> bool:
        """See :class:`meshfeed._src.base.hooks.StagedStream`."""
        return len(self.components.stages) > 1

    def check_lanes(self, num_lanes: int) -> None:
        """Raises SettingsError for a number of lanes that a component cannot serve."""
        for source in self.components.sources.values():
            limited = hooks.find(source, hooks.LimitsLanes)
            if limited is not None:
                limited.check_lanes(num_lanes)

    @property
    def num_drawing(self) -> int:
        """See :class:`meshfeed._src.base.hooks.DrawsNumbers`: the most of a component."""
        return max(map(hooks.num_drawing, self.components.sources.values()))

    def cut_version(self, num_lanes: int) -> int:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`: the latest of the components."""
        found = (hooks.find(source, hooks.CutsLanes) for source in self.components.sources.values())
        return max((cuts.cut_version(num_lanes) for cuts in found if cuts is not None), default=1)

    def with_cut(self, version: int) -> StreamMixture:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`."""
        sources = dict(self.components.sources)
        for name, source in sources.items():
            cuts = hooks.find(source, hooks.CutsLanes)
            if cuts is not None:
                sources[name] = cuts.with_cut(version)
        clone = copy.copy(self)  # keeps the identities
        clone.components = dataclasses.replace(self.components, sources=sources)
        return clone

    def lane_lengths(self, num_lanes: int) -> list[int] | None:
        """See :class:`meshfeed._src.base.hooks.CountsLanes`: about, since components are drawn in blocks.

        Of all epochs alike: a lane of a mixture ends once, after its components have been read ``num_epochs`` times.
        """
        if self.has_stages:
            return None
        weights = self.components.stages[0][1]
        total = sum(weights.values())
        ends: list[list[float]] = []  # component → records of each lane when it has been read once
        for name, weight in weights.items():
            lengths = self._component_lengths(name, num_lanes) if weight else None
            if lengths is None and weight:
                return None
            repeat = self.components.repeat.get(name, 1)
            ends += [] if lengths is None else [[length * repeat * total / weight for length in lengths]]
        decides = min if self._on_end == "stop" else max
        return [int(decides(lane)) for lane in zip(*ends, strict=True)]

    def _component_lengths(self, name: str, num_lanes: int) -> Sequence[int] | None:
        source, components = self.components.sources[name], self.components
        if not hooks.is_stream(source):
            length = components.length(name)
            return [(length + num_lanes - 1 - lane) // num_lanes for lane in range(num_lanes)]
        counted = hooks.find(source, hooks.CountsLanes)
        lengths = None if counted is None else counted.lane_lengths(num_lanes)
        if lengths is None or name not in components.take:
            return lengths
        return [min(length, components.of_lane(name, lane, num_lanes) or 0) for lane, length in enumerate(lengths)]

    def open(self, lane_index: int, num_lanes: int) -> MixtureLane | StackedMixtureLane:
        """Lane ``lane_index`` of ``num_lanes``, mixed from that lane of every component.

        Raises:
          SettingsError: the mixture has stages but is not bound to a feed, which maps their steps to positions.
        """
        bound = self._bound
        if not self._is_bound and self.has_stages:
            raise SettingsError(
                "a mixture with stages begins them at steps, so it can only be opened by a feed.", setting="weights"
            )
        names = list(self.components.sources)
        return (StackedMixtureLane if self._stacks else MixtureLane)(
            [
                ComponentLane(
                    *(self.components, number, lane_index, num_lanes, bound.seed),
                    shuffle=self.shuffle,
                    stacks=self._stacks,
                )
                for number in range(len(names))
            ],
            StagedBlocks(
                names, bound.stages_of_lane(num_lanes), self._block, derive_key(bound.seed, _LANE_LAYOUT, lane_index)
            ),
            bound.stages[-1].weights,
            bound.num_epochs,
            self._on_end == "stop",
            self._ended_lanes.get(lane_index, self._delivered // num_lanes),
            ended=lane_index in self._ended_lanes,
        )

    def fingerprint(self) -> JsonValue:
        """Identity without the components, since a later stage may add some; ``check_saved`` compares them."""
        return {"kind": "mixture"}

    def mixture_config(self) -> JsonValue:
        """Stages and components, for ``check_saved``."""
        return {"shuffle": self.shuffle, **dataclasses.replace(self._bound, identities=self._identities).config()}

    def check_saved(self, saved_mixture: JsonValue, position: int, step: int | None = None) -> None:
        """See :func:`meshfeed._src.order.saved_mixture.check_stages`."""
        check_stages(saved_mixture, self.mixture_config(), position, step=step)
