"""Boxes of an array, regular grids of them, and the mesh axes that cut an array into shards.

Stored chunks, digest cells and the units that hosts read are grids.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

Shape: TypeAlias = tuple[int, ...]
"""Size of each dimension."""

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) for each dimension."""


def box_of_index(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box of a device's entry in ``Sharding.devices_indices_map``."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def box_shape(box: Box) -> Shape:
    """Returns a box's extent in each dimension."""
    return tuple(stop - start for start, stop in box)


def box_size(box: Box) -> int:
    """Returns the number of values in a box."""
    return math.prod(box_shape(box))


def intersect(first: Box, second: Box) -> Box:
    """Returns the intersection of two boxes; it is empty if its ``box_size`` is 0."""
    return tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in zip(first, second, strict=True))


def clip(box: Box, shape: Shape) -> Box:
    """Returns the part of a box inside an array of ``shape``, which may be smaller than the box expects."""
    return tuple((min(start, size), min(stop, size)) for (start, stop), size in zip(box, shape, strict=True))


def take_rows(box: Box, dimension: int, first: int, count: int) -> Box:
    """Returns ``count`` rows of a box, starting at its row ``first``; fewer if the box ends sooner."""
    start, stop = box[dimension]
    begin = min(stop, start + first)
    return (*box[:dimension], (begin, min(stop, begin + count)), *box[dimension + 1 :])


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Returns slices that select ``box`` in an array whose first value is at the start of ``origin``."""
    starts = [0] * len(box) if origin is None else [start for start, _ in origin]
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(box, starts, strict=True))


@dataclasses.dataclass(frozen=True)
class Grid:
    """A regular grid over an array, starting at the origin; the last cell of each dimension may be truncated.

    A scalar has one cell, number 0, whose box is ``()``.

    Attributes:
      shape: shape of the array.
      cell: shape of a whole cell; every entry is at least 1.
    """

    shape: Shape
    cell: Shape

    @functools.cached_property
    def counts(self) -> Shape:
        """Number of cells along each dimension."""
        return tuple(-(-size // cell) for size, cell in zip(self.shape, self.cell, strict=True))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def _number(self, place: Sequence[int]) -> int:
        number = 0
        for index, count in zip(place, self.counts, strict=True):
            number = number * count + index
        return number

    def box(self, number: int) -> Box:
        """Returns the box of cell ``number`` in row-major order."""
        box: list[tuple[int, int]] = []
        for count, cell, size in zip(reversed(self.counts), reversed(self.cell), reversed(self.shape), strict=True):
            number, index = divmod(number, count)
            box.append((index * cell, min(size, (index + 1) * cell)))
        return tuple(reversed(box))

    def only(self, box: Box) -> int | None:
        """Returns the number of the cell equal to ``box``, or None if ``box`` is not exactly one whole cell."""
        number = self._number([start // cell for (start, _), cell in zip(box, self.cell, strict=True)])
        return number if box_size(box) and self.box(number) == box else None

    def touching(self, box: Box) -> Iterator[int]:
        """Yields the numbers of the cells that overlap ``box``, ascending."""
        if box_size(box):
            ranges = [
                range(start // cell, -(-stop // cell)) for (start, stop), cell in zip(box, self.cell, strict=True)
            ]
            yield from map(self._number, itertools.product(*ranges))


def joint_cell(shape: Sequence[int], *cells: Sequence[int] | None) -> Shape:
    """Returns the smallest cell that is a multiple of each of ``cells`` in every dimension, clipped to the array."""
    known = [cell for cell in cells if cell is not None]
    multiples = [math.lcm(*(max(1, cell[dimension]) for cell in known)) for dimension in range(len(shape))]
    return tuple(max(1, min(size, multiple)) for size, multiple in zip(shape, multiples, strict=True))


AnyMesh: TypeAlias = Mesh | AbstractMesh

Axes: TypeAlias = tuple[str, ...]
"""Mesh axes, major first."""


def spec_axes(sharding: NamedSharding, rank: int) -> list[Axes]:
    """Returns the mesh axes of each dimension."""
    parts = [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in sharding.spec]
    return parts + [()] * (rank - len(parts))


def spec_of(axes: Iterable[Axes]) -> PartitionSpec:
    """Returns the PartitionSpec with the given mesh axes in each dimension; inverts :func:`spec_axes`."""
    return PartitionSpec(*(names or None for names in axes))


def free_axes(sharding: Sharding) -> Axes:
    """Returns the mesh axes with more than one device along which the array is replicated, in mesh order."""
    if not isinstance(sharding, NamedSharding):
        return ()
    used = set(itertools.chain.from_iterable(spec_axes(sharding, 0)))
    return tuple(axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in used)


def ways(mesh: AnyMesh, axes: Iterable[str]) -> int:
    """Returns the number of parts into which mesh axes cut a dimension."""
    return math.prod(mesh.shape[axis] for axis in axes)
