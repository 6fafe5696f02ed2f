"""Boxes of an array, and regular grids of them: stored chunks, digest cells, and the units that hosts read."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) for each dimension."""


def whole_box(shape: Sequence[int]) -> Box:
    """Returns the box that covers a whole array."""
    return tuple((0, size) for size in shape)


def box_of_index(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box of a device's entry in ``Sharding.devices_indices_map``."""
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True)
    )


def box_shape(box: Box) -> tuple[int, ...]:
    """Returns a box's extent in each dimension; never negative."""
    return tuple(max(0, stop - start) for start, stop in box)


def intersect(first: Box, second: Box) -> Box:
    """Returns the intersection of two boxes; it is empty if its ``box_size`` is 0."""
    return tuple((max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(first, second, strict=True))


def box_size(box: Box) -> int:
    """Returns the number of values in a box."""
    return math.prod(box_shape(box))


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Returns slices that select ``box`` in an array whose first value is at the start of ``origin``."""
    starts = [0] * len(box) if origin is None else [start for start, _ in origin]
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(box, starts, strict=True))


def take_rows(box: Box, dimension: int, first: int, count: int) -> Box:
    """Returns ``count`` rows of a box, starting at its row ``first``; fewer if the box ends sooner."""
    start, stop = box[dimension]
    begin = min(stop, start + first)
    return (*box[:dimension], (begin, min(stop, begin + count)), *box[dimension + 1 :])


@dataclasses.dataclass(frozen=True)
class Grid:
    """A regular grid over an array, starting at the origin; the last cell of each dimension may be truncated.

    Attributes:
      shape: shape of the array.
      cell: shape of a whole cell; every entry is at least 1.
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of cells along each dimension."""
        return tuple(-(-size // cell) for size, cell in zip(self.shape, self.cell, strict=True))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def box(self, number: int) -> Box:
        """Returns the box of cell ``number`` in row-major order."""
        starts = []
        for count, cell, size in zip(reversed(self.counts), reversed(self.cell), reversed(self.shape), strict=True):
            number, index = divmod(number, count)
            starts.append((index * cell, min(size, (index + 1) * cell)))
        return tuple(reversed(starts))

    def only(self, box: Box) -> int | None:
        """Returns the number of the cell equal to ``box``, or None if ``box`` is not exactly one whole cell."""
        number = 0
        for (start, stop), size, cell in zip(box, self.shape, self.cell, strict=True):
            index, inside = divmod(start, cell)
            if inside or stop != min(size, start + cell):
                return None
            number = number * -(-size // cell) + index
        return number

    def touching(self, box: Box) -> Iterator[int]:
        """Yields the numbers of the cells that overlap ``box``, ascending."""
        if box_size(box) == 0:
            return
        ranges = [range(start // cell, -(-stop // cell)) for (start, stop), cell in zip(box, self.cell, strict=True)]
        counts = self.counts
        for indices in itertools.product(*ranges):
            number = 0
            for index, count in zip(indices, counts, strict=True):
                number = number * count + index
            yield number


def joint_cell(shape: Sequence[int], *cells: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the smallest cell that is a multiple of each of ``cells`` in every dimension, clipped to the array."""
    joint = []
    for dimension, size in enumerate(shape):
        multiple = math.lcm(*(max(1, cell[dimension]) for cell in cells if cell is not None))
        joint.append(max(1, min(size, multiple)))
    return tuple(joint)
