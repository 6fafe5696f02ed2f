"""Plans which device reads which box of a stored leaf, and how the boxes reach the requested sharding.

A leaf that several devices need, whole or in part, is cut among them along one ``dimension``: over the mesh axes along
which it is replicated (``gather``) and, if stored chunks span several requested shards, over axes that shard other
dimensions (``moved``): each chunk is then needed by one device only. After reading, an all-to-all restores the
``moved`` axes and an all-gather the ``gather`` axes. Pieces are padded to equal size, so any length can be cut.

Everything here is a pure function of leaves, shardings and stored chunks, so every process computes the same plans.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from meshfeed._src.checkpoint.boxes import (
    AnyMesh,
    Axes,
    Box,
    Grid,
    Shape,
    box_of_index,
    box_size,
    clip,
    free_axes,
    spec_axes,
    spec_of,
    ways,
)

GOOD_READS = 1.1
"""Bytes read over bytes stored; up to this ratio a leaf is read by the devices that need it."""

_NEARLY_ONCE = 1.05  # ratios and balances this close to the optimum count as equal, so the fewest collectives win
_NEARLY_EVEN = 1.2
_HOPELESS_READS = 2.0  # stop adding up the cost of a plan that reads twice the stored bytes


class Device(Protocol):
    """A JAX device, or :data:`HOST`."""

    platform: str
    process_index: int


@dataclasses.dataclass(eq=False)
class _Host:
    platform: str = "host"
    process_index: int = -1


HOST: Device = _Host()
"""The memory of each process, which holds leaves restored as numpy arrays."""


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """How one leaf is read.

    Attributes:
      sharding: the requested sharding; None for a numpy array on every process.
      shape: the requested global shape (of the key data for PRNG keys).
      dimension: the dimension along which pieces are cut; unused without ``gather`` and ``moved``.
      gather: mesh axes to gather over.
      moved: (mesh axis, dimension that it shards), in the order of the all-to-alls.
      broadcast: mesh axis and the index on it from which whole pieces are sent, or None.
      piece: rows of ``dimension`` in each piece; the last pieces are padded.
    """

    sharding: Sharding | None
    shape: Shape
    dimension: int = 0
    gather: Axes = ()
    moved: tuple[tuple[str, int], ...] = ()
    broadcast: tuple[str, int] | None = None
    piece: int = 0

    @property
    def direct(self) -> bool:
        """Whether every device reads exactly what it needs, without collectives."""
        return not (self.gather or self.moved or self.broadcast)

    @property
    def mesh(self) -> Mesh:
        """The mesh of a plan that is not direct."""
        mesh = self.sharding.mesh if isinstance(self.sharding, NamedSharding) else None
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def axes(self) -> list[Axes]:
        """Mesh axes of each dimension of the result, in a plan that is not direct."""
        assert isinstance(self.sharding, NamedSharding)
        return spec_axes(self.sharding, len(self.shape))

    @property
    def shard_shape(self) -> Shape:
        """Shape of one device's part of the result."""
        return self.shape if self.sharding is None else self.sharding.shard_shape(self.shape)

    @property
    def kept_axes(self) -> list[Axes]:
        """Mesh axes of each dimension that are not moved."""
        moved = {axis for axis, _ in self.moved}
        return [tuple(axis for axis in names if axis not in moved) for names in self.axes]

    @property
    def cut_axes(self) -> Axes:
        """Mesh axes that cut ``dimension`` further; the one gathered last comes first."""
        return (*self.gather, *(axis for axis, _ in reversed(self.moved)))

    @property
    def piece_axes(self) -> list[Axes]:
        """Mesh axes of each dimension of the array of all pieces."""
        return [(*names, *self.cut_axes) if d == self.dimension else names for d, names in enumerate(self.kept_axes)]

    @property
    def piece_sharding(self) -> NamedSharding:
        """Sharding of the array of all pieces."""
        return NamedSharding(self.mesh, spec_of(self.piece_axes))

    @property
    def num_pieces(self) -> int:
        """Number of pieces into which a device's part of ``dimension`` is cut."""
        return ways(self.mesh, self.cut_axes)

    @property
    def piece_shape(self) -> Shape:
        """Shape of one device's piece, including padding."""
        parts = [size // ways(self.mesh, names) for size, names in zip(self.shape, self.kept_axes, strict=True)]
        return tuple(self.piece if d == self.dimension else part for d, part in enumerate(parts))

    @property
    def padded_shape(self) -> Shape:
        """Shape of one device's shard of the result, before the padding of the last pieces is dropped."""
        rows = self.num_pieces * self.piece
        return tuple(rows if d == self.dimension else size for d, size in enumerate(self.shard_shape))

    def boxes(self, process: int | None = None) -> dict[Device, Box | None]:
        """Returns device, of one process or of all → the box to read for it; None for devices that only receive."""
        if self.sharding is None:
            return {HOST: tuple((0, size) for size in self.shape)}
        if self.direct:
            return {
                device: box_of_index(index or (), self.shape)
                for device, index in self.sharding.devices_indices_map(self.shape).items()
                if process is None or device.process_index == process
            }
        kept, cut, sizes = self.kept_axes, self.cut_axes, self.mesh.shape
        extents = [size // ways(self.mesh, names) for size, names in zip(self.shape, kept, strict=True)]
        boxes: dict[Device, Box | None] = {}
        for device, at in _devices(self.mesh, process):
            if self.broadcast is not None and at[self.broadcast[0]] != self.broadcast[1]:
                boxes[device] = None
                continue
            box: list[tuple[int, int]] = []
            for dimension, (extent, names) in enumerate(zip(extents, kept, strict=True)):
                start = _number(names, at, sizes) * extent
                stop = start + extent
                if dimension == self.dimension:  # pieces past the end are empty
                    start = min(stop, start + _number(cut, at, sizes) * self.piece)
                    stop = min(stop, start + self.piece)
                box.append((start, stop))
            boxes[device] = tuple(box)
        return boxes


def _number(axes: Axes, at: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    number = 0
    for axis in axes:
        number = number * sizes[axis] + at[axis]
    return number


@functools.lru_cache(maxsize=64)
def _devices_by_process(mesh: Mesh) -> dict[int, list[tuple[Device, dict[str, int]]]]:
    """Returns process → its devices, each with its coordinate on every mesh axis."""
    by_process: dict[int, list[tuple[Device, dict[str, int]]]] = collections.defaultdict(list)
    for coordinates, device in np.ndenumerate(mesh.devices):
        by_process[device.process_index].append((device, dict(zip(mesh.axis_names, coordinates, strict=True))))
    return dict(by_process)


def _devices(mesh: Mesh, process: int | None) -> Iterable[tuple[Device, dict[str, int]]]:
    by_process = _devices_by_process(mesh)
    return itertools.chain(*by_process.values()) if process is None else by_process.get(process, ())


@functools.lru_cache(maxsize=256)
def devices_of_a_process(sharding: Sharding | None) -> int:
    """Returns the largest number of devices that any process has in a sharding; 1 for None."""
    devices = [HOST] if sharding is None else sharding.device_set
    return max(collections.Counter(device.process_index for device in devices).values())


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


@functools.lru_cache(maxsize=4096)
def read_cost(plan: LoadPlan, units: Grid, itemsize: int, give_up: float = math.inf) -> ReadCost:
    """Returns the cost of reading under ``plan``; a process reads a unit once for all its devices.

    Args:
      plan: the plan.
      units: grid of the units that are read whole.
      itemsize: bytes per stored value.
      give_up: stop counting above this ratio of units read to units stored; with thousands of hosts, counting a bad
        plan in full takes long.
    """
    most, count = give_up * len(units), 0
    numbers: dict[int, set[int]] = collections.defaultdict(set)
    seen: set[tuple[int, Box]] = set()
    for device, box in plan.boxes().items():
        if box is None or (device.process_index, box) in seen:
            continue
        seen.add((device.process_index, box))
        own = numbers[device.process_index]
        before = len(own)
        own.update(units.touching(clip(box, units.shape)))
        count += len(own) - before
        if count > most:
            break
    # If no cell is cut short, all units have the same size and need not be visited.
    whole = math.prod(units.cell)
    even = all(size % cell == 0 for size, cell in zip(units.shape, units.cell, strict=True))
    costs = {
        process: (len(own) * whole if even else sum(box_size(units.box(n)) for n in own)) * itemsize
        for process, own in numbers.items()
    }
    return ReadCost(tuple(sorted(costs.items())), math.prod(units.shape) * itemsize)


def _moves(axes: Sequence[Axes], mesh: AnyMesh, dimension: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yields the sets of axes that may be moved to ``dimension``: all axes of some of the others, fewest first."""
    others: dict[int, list[tuple[str, int]]] = collections.defaultdict(list)
    for other, names in enumerate(axes):
        for axis in names:
            if other != dimension and mesh.shape[axis] > 1:
                others[other].append((axis, other))
    for count in range(len(others) + 1):
        for chosen in itertools.combinations(others.values(), count):
            yield tuple(itertools.chain.from_iterable(chosen))


def candidates(sharding: Sharding, shape: Shape) -> list[LoadPlan]:
    """Returns the plans among which :func:`best_plan` chooses, the direct one first."""
    plans = [LoadPlan(sharding, shape)]
    if not isinstance(sharding, NamedSharding):
        return plans
    free, axes = free_axes(sharding), spec_axes(sharding, len(shape))
    for dimension, extent in enumerate(sharding.shard_shape(shape)):
        for moved in _moves(axes, sharding.mesh, dimension):
            if free or moved:
                pieces = ways(sharding.mesh, (*free, *(axis for axis, _ in moved)))
                plans.append(LoadPlan(sharding, shape, dimension, free, moved, None, -(-extent // pieces)))
    return plans


@functools.lru_cache(maxsize=1024)
def best_plan(sharding: Sharding, shape: Shape, units: Grid, itemsize: int) -> tuple[LoadPlan, ReadCost]:
    """Returns the plan of mode ``once``, and its cost: fewest bytes read, then most even, then fewest collectives."""
    best: list[tuple[tuple[float, ...], LoadPlan, ReadCost]] = []
    hosts = len({device.process_index for device in sharding.device_set})
    for plan in candidates(sharding, shape):
        cost = read_cost(plan, units, itemsize, _HOPELESS_READS)
        uneven = max((count for _, count in cost.by_process), default=0) * hosts / max(1, cost.total)
        padded = 0.0 if plan.direct else plan.piece * len(sharding.device_set) / max(1, shape[plan.dimension])
        good = max(cost.ratio, _NEARLY_ONCE), max(uneven, _NEARLY_EVEN)
        score = (*good, len(plan.moved), len(plan.gather), padded)
        best.append((score, plan, cost))
        if not plan.moved and good == (_NEARLY_ONCE, _NEARLY_EVEN):
            break  # good enough, and with thousands of hosts each further candidate takes a second
    _, plan, cost = min(best, key=lambda entry: entry[0])
    return plan, cost


@functools.lru_cache(maxsize=1024)
def replica_plan(sharding: Sharding, shape: Shape, axis: str | None, index: int) -> LoadPlan:
    """Returns the plan of mode ``single_replica``: devices at ``index`` of ``axis`` read, the others receive."""
    free = free_axes(sharding)
    if axis is None or axis not in free:
        return LoadPlan(sharding, shape)
    assert isinstance(sharding, NamedSharding)
    shard = sharding.shard_shape(shape)
    if not shape:
        return LoadPlan(sharding, shape, broadcast=(axis, index))
    rest = tuple(other for other in free if other != axis)
    longest = max(range(len(shape)), key=lambda dimension: shard[dimension])
    pieces = math.prod(sharding.mesh.shape[other] for other in rest)
    if rest and shard[longest] >= pieces:
        return LoadPlan(sharding, shape, longest, rest, (), (axis, index), -(-shard[longest] // pieces))
    return LoadPlan(sharding, shape, 0, (), (), (axis, index), shard[0])


def rows_in_flight(plan: LoadPlan, units: Grid, itemsize: int, limit: int) -> tuple[int, int]:
    """Returns how many rows of each piece to read at once under a limit, and how many of them to send at once.

    A unit is always read whole and only once: if a piece is not a whole number of units, the whole piece is read.

    Args:
      plan: must not be direct.
      units: units of the stored leaf.
      itemsize: bytes per value of the requested dtype.
      limit: bytes in flight per process: the blocks read and their copies in transit.
    """
    devices = devices_of_a_process(plan.sharding)
    row = max(1, math.prod(plan.piece_shape) // max(1, plan.piece) * itemsize * devices)
    unit, read = units.cell[plan.dimension], plan.piece
    if plan.shape == units.shape and plan.piece % unit == 0 and plan.shape[plan.dimension] % plan.piece == 0:
        count = plan.piece // unit
        fitting = [n for n in range(1, count + 1) if count % n == 0 and n * unit * row <= limit // 2]
        read = max(fitting, default=1) * unit
    return read, min(read, max(1, limit // 2 // (row * (1 + 2 * plan.num_pieces))))


def assign_units(
    grids: Sequence[tuple[Grid, int]], hosts: Iterable[int], loads: Mapping[int, int]
) -> dict[int, list[tuple[int, int]]]:
    """Assigns each unit, largest first, to the host with the fewest bytes to read so far.

    Args:
      grids: for each leaf, its units and bytes per value.
      hosts: hosts that may read.
      loads: bytes that each host reads anyway.

    Returns:
      host → its (leaf index, unit number) in the order of reading.
    """
    heap = [(loads.get(host, 0), host) for host in hosts]
    owned: dict[int, list[tuple[int, int]]] = {host: [] for _, host in heap}
    heapq.heapify(heap)
    sizes = [
        (-box_size(units.box(number)) * itemsize, index, number)
        for index, (units, itemsize) in enumerate(grids)
        for number in range(len(units))
    ]
    for size, index, number in sorted(sizes):
        load, host = heap[0]
        owned[host].append((index, number))
        heapq.heapreplace(heap, (load - size, host))
    return owned


def parts_in_window(ends: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yields the parts of consecutive items inside a window of bytes.

    Args:
      ends: for each item, the byte after its last one; none is empty.
      start: first byte of the window.
      stop: byte after the last one of the window; clipped to the end of the items.

    Yields:
      (item, first byte within the item, byte after the last one within the item).
    """
    stop = min(stop, ends[-1] if ends else 0)
    item = bisect.bisect_right(ends, start)
    while start < stop:
        begin, until = ends[item - 1] if item else 0, min(stop, ends[item])
        yield item, start - begin, until - begin
        start, item = until, item + 1
