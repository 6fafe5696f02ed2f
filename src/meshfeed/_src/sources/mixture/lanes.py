"""A mixture with at least one stream component: each lane mixes the components' lanes independently.

Lane i draws from lane i of each component, in blocks laid out as in a random-access mixture but with its own key. Its
state is its position and, for each component, the epoch and the cursor within it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.order.epochs import EpochOrder, derive_key
from meshfeed._src.order.mixture import MIXTURE_VERSION, StagedBlocks
from meshfeed._src.order.stages import Stage, StagedWeights, check_stages
from meshfeed._src.sources.mixture.component import ComponentLane
from meshfeed._src.sources.mixture.lane import MixtureLane
from meshfeed._src.sources.mixture.parts import compact_identity

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
    owns_epochs = True  # components have their own epochs, so the feed opens a lane once for all epochs

    def __init__(
        self,
        components: Mapping[str, Any],
        stages: StagedWeights,
        block: int,
        on_end: str,
        shuffle: bool | int,
        bound: _Bound | None = None,
    ) -> None:
        self.components = dict(components)
        self.stages, self.block, self.on_end, self.shuffle = stages, block, on_end, shuffle
        for source in components.values():
            if hasattr(source, "__getitem__"):
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
        clone = StreamMixture(self.components, self.stages, self.block, self.on_end, self.shuffle, bound)
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
                ComponentLane(name, number, source, lane_index, num_lanes, bound.seed, self.shuffle)
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
                self._identities[name] = compact_identity(source)
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
        """See :func:`meshfeed._src.order.stages.check_stages`."""
        check_stages(saved_mixture, self.mixture_config(), position, step=step)

    def close(self) -> None:
        """Closes the components that have a ``close``."""
        for source in self.components.values():
            close = getattr(source, "close", None)
            if callable(close):
                close()
