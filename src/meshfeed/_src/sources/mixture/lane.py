"""One lane of a mixture: draws from the components in the order of the blocks, each from its own cursor."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from meshfeed._src.base.types import JsonValue, PyTree, Record, RecordIds
from meshfeed._src.order.mixture import StagedBlocks, group_by
from meshfeed._src.sources.mixture.component import ComponentLane
from meshfeed._src.sources.mixture.parts import Joiner, Part


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

    @property
    def state_cost(self) -> str:
        """``"expensive"`` if any component's state is, otherwise ``"cheap"``."""
        return "expensive" if any(c.state_cost == "expensive" for c in self._components) else "cheap"

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
            if self._num_epochs is not None and component.epoch + 1 == self._num_epochs:
                end = int(rows[done])
                if self._stops:
                    return end
            component.next_epoch()

    def _all_read(self) -> bool:
        return all(component.epoch >= (self._num_epochs or 0) for component in self._deciding)

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
