"""Plans which device reads which box of a stored leaf, and how the boxes reach the requested sharding.

A leaf that several devices need, whole or in part, is cut among them along one ``dimension``: over the mesh axes along
which it is replicated (``gather``) and, if stored chunks span several requested shards, over axes that shard other
dimensions (``moved``), so that each chunk is needed by one device only. After reading, an all-to-all restores the
``moved`` axes and an all-gather the ``gather`` axes. Pieces are padded to equal size, so any length can be cut. The
plan is a pure function of the leaf, its sharding and the stored chunks, so every process computes the same one.

Boxes of an array, and regular grids of them: stored chunks, digest cells, and the units that hosts read.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.sharding import NamedSharding

from meshfeed._src.checkpoint.save_layout import free_axes, spec_axes

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


GOOD_READS = 1.1
"""Bytes read over bytes stored; up to this ratio a leaf is read by the devices that need it."""


# Stop adding up the cost of a plan that reads twice the stored bytes.
_HOPELESS_READS = 2.0


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """How one leaf is read.

    Attributes:
      sharding: the requested sharding.
      shape: the requested global shape (of the key data for PRNG keys).
      dimension: the dimension along which pieces are cut; unused without ``gather`` and ``moved``.
      gather: mesh axes to gather over, major first.
      moved: (mesh axis, dimension that it shards), in the order of the all-to-alls.
      broadcast: mesh axis and the index on it from which whole pieces are sent, or None.
      piece: rows of ``dimension`` in each piece; the last pieces are padded.
    """

    sharding: Any
    shape: tuple[int, ...]
    dimension: int = 0
    gather: tuple[str, ...] = ()
    moved: tuple[tuple[str, int], ...] = ()
    broadcast: tuple[str, int] | None = None
    piece: int = 0

    @property
    def direct(self) -> bool:
        """Whether every device reads exactly what it needs, without collectives."""
        return not (self.gather or self.moved or self.broadcast)

    def boxes(self, process: int | None = None) -> dict[Any, Box | None]:
        """Returns device → the box that its process reads for it, or None for devices that only receive.

        Args:
          process: only this process's devices; None means all devices.
        """
        if self.direct:
            indices = self.sharding.devices_indices_map(self.shape)
            return {
                device: box_of_index(index, self.shape)
                for device, index in indices.items()
                if process is None or device.process_index == process
            }
        mesh = self.sharding.mesh
        axes = spec_axes(self.sharding, len(self.shape))
        moved = {axis for axis, _ in self.moved}
        kept = [[axis for axis in names if axis not in moved] for names in axes]
        cut = self.piece_axes()
        boxes: dict[Any, Box | None] = {}
        by_process = _devices_by_process(mesh)
        for device, at in itertools.chain(*by_process.values()) if process is None else by_process.get(process, ()):
            if self.broadcast and at[self.broadcast[0]] != self.broadcast[1]:
                boxes[device] = None
                continue
            box = []
            for dimension, size in enumerate(self.shape):
                start, extent = _share(size, kept[dimension], at, mesh.shape)
                if dimension == self.dimension:
                    number = 0
                    for axis in cut:
                        number = number * mesh.shape[axis] + at[axis]
                    # Pieces past the end are empty.
                    first = start + min(extent, number * self.piece)
                    box.append((first, min(start + extent, first + self.piece)))
                else:
                    box.append((start, start + extent))
            boxes[device] = tuple(box)
        return boxes

    def piece_axes(self) -> tuple[str, ...]:
        """Mesh axes that cut ``dimension`` further, major first, so the one gathered last comes first."""
        return (*self.gather, *(axis for axis, _ in reversed(self.moved)))


@functools.lru_cache(maxsize=64)
def _devices_by_process(mesh: Any) -> dict[int, list[tuple[Any, dict[str, int]]]]:
    """Returns process → its devices, each with its coordinate on every mesh axis."""
    names = tuple(mesh.axis_names)
    by_process: dict[int, list[tuple[Any, dict[str, int]]]] = collections.defaultdict(list)
    for coordinates in np.ndindex(*mesh.devices.shape):
        device = mesh.devices[coordinates]
        by_process[device.process_index].append((device, dict(zip(names, coordinates, strict=True))))
    return dict(by_process)


@functools.lru_cache(maxsize=256)
def devices_of_a_process(sharding: Any) -> int:
    """Returns the largest number of devices that any process has in a sharding."""
    return max(collections.Counter(device.process_index for device in sharding.device_set).values())


def _share(size: int, axes: list[str], at: dict[str, int], sizes: Any) -> tuple[int, int]:
    number, count = 0, 1
    for axis in axes:
        number, count = number * sizes[axis] + at[axis], count * sizes[axis]
    return number * (size // count), size // count


@dataclasses.dataclass(frozen=True)
class ReadCost:
    """Bytes that each process reads for a leaf under a plan, counting whole units."""

    by_process: tuple[tuple[int, int], ...]
    stored: int

    @property
    def total(self) -> int:
        """Bytes read over all processes."""
        return sum(count for _, count in self.by_process)

    @property
    def ratio(self) -> float:
        """Bytes read over bytes stored."""
        return self.total / self.stored if self.stored else 1.0


def clip(box: Box, shape: tuple[int, ...]) -> Box:
    """Returns the part of a requested box that is stored, in case the requested shape is larger than the stored one."""
    return tuple((min(start, size), min(stop, size)) for (start, stop), size in zip(box, shape, strict=True))


@functools.lru_cache(maxsize=4096)
def read_cost(plan: LoadPlan, units: Grid, itemsize: int, give_up: float = math.inf) -> ReadCost:
    """Returns the cost of reading under ``plan``; a process reads a unit once for all its devices.

    Args:
      plan: the plan.
      units: grid of the units that are read whole.
      itemsize: bytes per stored value.
      give_up: stop counting at this ratio of bytes read to bytes stored; with thousands of hosts, counting a bad plan
        in full takes long.
    """
    most, count = give_up * len(units), 0
    wanted: dict[int, set[int]] = collections.defaultdict(set)
    seen: set[tuple[int, Box]] = set()
    for device, box in plan.boxes().items():
        if box is None or (device.process_index, box) in seen:
            continue
        seen.add((device.process_index, box))
        own = wanted[device.process_index]
        before = len(own)
        own.update(units.touching(clip(box, units.shape)) if units.shape else (0,))
        count += len(own) - before
        if count > most:
            break
    # If no cell is cut short, all units have the same size and need not be visited.
    whole = math.prod(units.cell) * itemsize
    even = all(size % cell == 0 for size, cell in zip(units.shape, units.cell, strict=True))
    costs = {
        process: len(numbers) * whole if even else sum(box_size(units.box(n)) for n in numbers) * itemsize
        for process, numbers in wanted.items()
    }
    return ReadCost(tuple(sorted(costs.items())), math.prod(units.shape) * itemsize)


def _candidates(sharding: Any, shape: tuple[int, ...]) -> list[LoadPlan]:
    plans = [LoadPlan(sharding, shape)]
    if not isinstance(sharding, NamedSharding) or not shape:
        return plans
    free = free_axes(sharding)
    sizes = sharding.mesh.shape
    axes = spec_axes(sharding, len(shape))
    for dimension in range(len(shape)):
        others = [
            tuple((axis, other) for axis in axes[other] if sizes[axis] > 1)
            for other in range(len(shape))
            if other != dimension and any(sizes[axis] > 1 for axis in axes[other])
        ]
        moves = [
            tuple(itertools.chain.from_iterable(chosen))
            for count in range(len(others) + 1)
            for chosen in itertools.combinations(others, count)
        ]
        for moved in moves:
            if not free and not moved:
                continue
            ways = math.prod(sizes[axis] for axis in (*free, *(axis for axis, _ in moved)))
            extent = shape[dimension] // math.prod(sizes[axis] for axis in axes[dimension])
            plans.append(LoadPlan(sharding, shape, dimension, free, moved, None, -(-extent // ways)))
    return plans


@functools.lru_cache(maxsize=1024)
def best_plan(sharding: Any, shape: tuple[int, ...], units: Grid, itemsize: int) -> tuple[LoadPlan, ReadCost]:
    """Returns the plan of mode ``once`` that reads least, then most evenly, then moves least, and its cost.

    Args:
      sharding: the requested sharding.
      shape: the requested shape.
      units: grid of the units that can be read on their own.
      itemsize: bytes per stored value.
    """
    best: tuple[LoadPlan, ReadCost] | None = None
    best_score: tuple[float, ...] = ()
    hosts = len({device.process_index for device in sharding.device_set})
    for plan in _candidates(sharding, shape):
        cost = read_cost(plan, units, itemsize, _HOPELESS_READS)
        busiest = max((count for _, count in cost.by_process), default=0)
        uneven = busiest * hosts / max(1, cost.total)
        padded = 0.0 if plan.direct else plan.piece * len(sharding.device_set) / max(1, shape[plan.dimension])
        # Values this close to the optimum count as equal, so the number of collectives decides.
        score = (max(cost.ratio, 1.05), max(uneven, 1.2), len(plan.moved), len(plan.gather), padded)
        if best is None or score < best_score:
            best, best_score = (plan, cost), score
        if not plan.moved and cost.ratio <= 1.05 and uneven <= 1.2:
            break  # good enough, and with thousands of hosts each further candidate takes a second
    assert best is not None
    return best


@functools.lru_cache(maxsize=1024)
def replica_plan(sharding: Any, shape: tuple[int, ...], axis: str | None, index: int) -> LoadPlan:
    """Returns the plan of mode ``single_replica``: devices at ``index`` of ``axis`` read, the others receive."""
    if axis is None or not isinstance(sharding, NamedSharding) or axis not in free_axes(sharding):
        return LoadPlan(sharding, shape)
    rest = tuple(other for other in free_axes(sharding) if other != axis)
    dimension, piece, gather = 0, 0, ()
    if rest and shape:
        extents = [
            size // math.prod(sharding.mesh.shape[axis] for axis in axes)
            for size, axes in zip(shape, spec_axes(sharding, len(shape)), strict=True)
        ]
        dimension = max(range(len(shape)), key=lambda d: extents[d])
        ways = math.prod(sharding.mesh.shape[axis] for axis in rest)
        if extents[dimension] >= ways:
            gather, piece = rest, -(-extents[dimension] // ways)
    if shape and not gather:
        axes = spec_axes(sharding, len(shape))[dimension]
        piece = shape[dimension] // math.prod(sharding.mesh.shape[axis] for axis in axes)
    return LoadPlan(sharding, shape, dimension, gather, (), (axis, index), piece)
