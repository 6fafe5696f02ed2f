"""Boxes of an array and the regular grids that cut it: stored chunks, digest cells, and the units that hosts read."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) for each dimension."""


def whole_box(shape: Sequence[int]) -> Box:
    """The box of all of an array."""
    return tuple((0, size) for size in shape)


def box_of_index(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of what ``Sharding.devices_indices_map`` gives for a device."""
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True)
    )


def box_shape(box: Box) -> tuple[int, ...]:
    """Its extent in each dimension; never negative."""
    return tuple(max(0, stop - start) for start, stop in box)


def intersect(first: Box, second: Box) -> Box:
    """The common part; empty where ``box_size`` of it is 0."""
    return tuple((max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(first, second, strict=True))


def box_size(box: Box) -> int:
    """Number of values in it."""
    return math.prod(box_shape(box))


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Slices that select ``box`` in an array whose first value is at the start of ``origin``."""
    starts = [0] * len(box) if origin is None else [start for start, _ in origin]
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(box, starts, strict=True))


def take_rows(box: Box, dimension: int, first: int, count: int) -> Box:
    """``count`` rows of a box from its row ``first`` on; fewer where it ends."""
    start, stop = box[dimension]
    begin = min(stop, start + first)
    return (*box[:dimension], (begin, min(stop, begin + count)), *box[dimension + 1 :])


@dataclasses.dataclass(frozen=True)
class Grid:
    """A regular grid from the origin over an array; the last cells may be cut short.

    Attributes:
      shape: of the array.
      cell: of a whole cell; every entry is at least 1.
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Cells along each dimension."""
        return tuple(-(-size // cell) for size, cell in zip(self.shape, self.cell, strict=True))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def box(self, number: int) -> Box:
        """The box of cell ``number`` in row-major order."""
        starts = []
        for count, cell, size in zip(reversed(self.counts), reversed(self.cell), reversed(self.shape), strict=True):
            number, index = divmod(number, count)
            starts.append((index * cell, min(size, (index + 1) * cell)))
        return tuple(reversed(starts))

    def only(self, box: Box) -> int | None:
        """Number of the cell that ``box`` is, where it is a single whole one."""
        number = 0
        for (start, stop), size, cell in zip(box, self.shape, self.cell, strict=True):
            index, inside = divmod(start, cell)
            if inside or stop != min(size, start + cell):
                return None
            number = number * -(-size // cell) + index
        return number

    def touching(self, box: Box) -> Iterator[int]:
        """Numbers of the cells that share a value with ``box``, ascending."""
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
    """The smallest cell that is a whole number of each of ``cells``, cut to the array."""
    joint = []
    for dimension, size in enumerate(shape):
        multiple = math.lcm(*(max(1, cell[dimension]) for cell in cells if cell is not None))
        joint.append(max(1, min(size, multiple)))
    return tuple(joint)
