"""One lane of a mixture: which component each record comes from, and where the lane ends.

Its state is its position and, for each component, the epoch and the cursor within it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.groups import group_by
from meshfeed._src.base.types import JsonValue, PyTree, Record, RecordIds
from meshfeed._src.order.mixture import StagedBlocks
from meshfeed._src.sources.joined import Joiner, Part
from meshfeed._src.sources.mixture.component_lane import ComingFiles, ComponentLane


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
