"""How arrays are cut: boxes and grids of them, into chunks when saved, and into what each device reads when restored.

**Saving.** Replicas share the work: an array held by several devices is cut among them along a dimension that they divide.
Each device writes its slice as one stored chunk, or as several if it is larger than 16 MiB: a later job with more hosts
can then share the reads.

**Restoring.** A leaf that several devices need, whole or in part, is cut among them along one ``dimension``: over the mesh
axes along which it is replicated (``gather``) and, if stored chunks span several requested shards, over axes that shard
other dimensions (``moved``): each chunk is then needed by one device only. After reading, an all-to-all restores the
``moved`` axes and an all-gather the ``gather`` axes. Pieces are padded to equal size, so any length can be cut.

Everything here is a pure function of shapes, shardings and stored chunks, so every process computes the same.
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
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

S = TypeVar("S")

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


def take_rows(box: Box, dimension: int, first: int, count: int) -> Box:
    """Returns ``count`` rows of a box, starting at its row ``first``; fewer if the box ends sooner."""
    start, stop = box[dimension]
    begin = min(stop, start + first)
    return (*box[:dimension], (begin, min(stop, begin + count)), *box[dimension + 1 :])


def with_rows(shape: Sequence[int], dimension: int, rows: int) -> Shape:
    """Returns ``shape`` with ``rows`` as the size of ``dimension``, if it has that dimension."""
    return tuple(rows if d == dimension else size for d, size in enumerate(shape))


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Returns slices that select ``box`` in an array whose first value is at the start of ``origin``."""
    starts = [0] * len(box) if origin is None else [start for start, _ in origin]
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(box, starts, strict=True))


@dataclasses.dataclass(frozen=True)
class Grid:
    """A regular grid over an array, starting at the origin; the last cell of each dimension may be truncated.

    A scalar has one cell, number 0, whose box is ``()``.
    """

    shape: Shape  # of the array
    cell: Shape  # of a whole cell; every entry is at least 1

    @functools.cached_property
    def counts(self) -> Shape:
        """Number of cells along each dimension."""
        return tuple(-(-size // cell) for size, cell in zip(self.shape, self.cell, strict=True))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def box(self, number: int) -> Box:
        """Returns the box of cell ``number`` in row-major order."""
        box: list[tuple[int, int]] = []
        for count, cell, size in zip(reversed(self.counts), reversed(self.cell), reversed(self.shape), strict=True):
            number, index = divmod(number, count)
            box.append((index * cell, min(size, (index + 1) * cell)))
        return tuple(reversed(box))

    def touching(self, box: Box) -> list[int]:
        """Returns the numbers of the cells that overlap ``box``, ascending. It may reach beyond the array."""
        numbers = [0]
        for (start, stop), size, cell, count in zip(box, self.shape, self.cell, self.counts, strict=True):
            stop = min(stop, size)
            cells = range(start // cell, -(-stop // cell)) if start < stop else ()
            numbers = [number * count + index for number in numbers for index in cells]
        return numbers


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


def free_axes(sharding: Sharding | None) -> Axes:
    """Returns the mesh axes with more than one device along which the array is replicated, in mesh order."""
    if not isinstance(sharding, NamedSharding):
        return ()
    used = set(itertools.chain.from_iterable(spec_axes(sharding, 0)))
    return tuple(axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in used)


def ways(mesh: AnyMesh, axes: Iterable[str]) -> int:
    """Returns the number of parts into which mesh axes cut a dimension."""
    return math.prod(mesh.shape[axis] for axis in axes)


TARGET_CHUNK_BYTES = 16 << 20  # a chunk is read whole by one host, so a job with more hosts can share smaller ones
_LEAST_CHUNK_BYTES = 1 << 20  # a dimension without good divisors would give tiny chunks: keep the slice whole
MIN_SLICE_BYTES = 64 << 10  # below this, a slice costs more in requests than it gains by spreading bytes
_LEAST_SLICE_BYTES = 4 << 10  # even if each host has only one slice
_CHUNK_WORTH_BYTES = 256 << 10  # writing a chunk takes about 0.3 ms in addition to its bytes


@dataclasses.dataclass(frozen=True)
class ReplicaCut:
    """The dimension and mesh axes along which replicas share an array."""

    dimension: int
    axes: Axes


@functools.lru_cache(maxsize=256)
def _hosts_along(mesh: Mesh, axes: Axes) -> int:
    """Returns the number of processes that own the devices along ``axes``."""
    index = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    return len({device.process_index for device in np.ravel(mesh.devices[index])})


def _is_worth(shard_bytes: int, replicas: int, hosts: int, min_slice_bytes: int | None) -> bool:
    slice_bytes = shard_bytes // replicas
    if min_slice_bytes is not None:
        return slice_bytes >= min_slice_bytes
    # Share smaller leaves between hosts, so one host does not write alone a leaf of a few MiB that a thousand hosts hold.
    # More slices within a host only add cost.
    each = -(-replicas // hosts)
    between = hosts > 1 and slice_bytes >= _LEAST_SLICE_BYTES and shard_bytes >= each * _CHUNK_WORTH_BYTES
    return between or slice_bytes >= MIN_SLICE_BYTES


@functools.lru_cache(maxsize=1024)
def choose_cut(shape: Shape, itemsize: int, sharding: Sharding, min_slice_bytes: int | None) -> ReplicaCut | None:
    """Returns the finest cut of an array among its replicas, along the first dimension that they divide.

    Only NamedShardings are cut. ``min_slice_bytes=None`` means 64 KiB, or less if that shares the work between hosts.
    """
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh) or math.prod(shape) == 0:
        return None
    mesh, free, shard = sharding.mesh, free_axes(sharding), sharding.shard_shape(shape)
    for subset in sorted(filter(None, _subsets(free)), key=lambda subset: (-ways(mesh, subset), -len(subset))):
        replicas = ways(mesh, subset)
        if _is_worth(math.prod(shard) * itemsize, replicas, _hosts_along(mesh, subset), min_slice_bytes):
            dimension = next((d for d, size in enumerate(shard) if size % replicas == 0), None)
            if dimension is not None:
                return ReplicaCut(dimension, subset)
    return None


def cut_sharding(sharding: NamedSharding, rank: int, cut: ReplicaCut) -> NamedSharding:
    """Returns the sharding after the cut."""
    axes = spec_axes(sharding, rank)
    axes[cut.dimension] = (*axes[cut.dimension], *cut.axes)
    return NamedSharding(sharding.mesh, spec_of(axes))


def chunk_shape(shape: Shape, piece: Shape, itemsize: int) -> tuple[Shape, int | None]:
    """Returns the chunk shape in which a device's slice is stored, and the size to request from Orbax to get it.

    Orbax halves (or thirds, …) the longest dimension that is already cut until the chunk is small enough, then the
    others. That works well if the dimensions have small divisors; otherwise the slice is kept whole.
    """
    whole = tuple(max(1, size) for size in piece)
    chunk = list(whole)
    cut = [d for d, size in enumerate(shape) if size != whole[d]]
    while math.prod(chunk) * itemsize > TARGET_CHUNK_BYTES:
        longest = max(cut, key=lambda d: chunk[d], default=None)
        if longest is None or chunk[longest] == 1:
            cut = list(range(len(chunk)))
            continue
        chunk[longest] = next(n for n in range(chunk[longest] - 1, 0, -1) if whole[longest] % n == 0)
    if tuple(chunk) == whole or math.prod(chunk) * itemsize < _LEAST_CHUNK_BYTES:
        return whole, None
    return tuple(chunk), TARGET_CHUNK_BYTES


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
    """How one leaf is read."""

    sharding: Sharding | None  # requested; None for a numpy array on every process
    shape: Shape  # requested global shape (of the key data for PRNG keys)
    dimension: int = 0  # along which pieces are cut; unused without ``gather`` and ``moved``
    gather: Axes = ()  # mesh axes to gather over
    moved: tuple[tuple[str, int], ...] = ()  # (mesh axis, dimension that it shards), in the order of the all-to-alls
    broadcast: tuple[str, int] | None = None  # mesh axis and the index on it from which whole pieces are sent
    piece: int = 0  # rows of ``dimension`` in each piece; the last pieces are padded

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

    @functools.cached_property
    def kept_axes(self) -> list[Axes]:
        """Mesh axes of each dimension that are not moved."""
        moved = {axis for axis, _ in self.moved}
        return [tuple(axis for axis in names if axis not in moved) for names in self.axes]

    @property
    def cut_axes(self) -> Axes:
        """Mesh axes that cut ``dimension`` further; the one gathered last comes first."""
        return (*self.gather, *(axis for axis, _ in reversed(self.moved)))

    @functools.cached_property
    def piece_axes(self) -> list[Axes]:
        """Mesh axes of each dimension of the array of all pieces."""
        return [(*names, *self.cut_axes) if d == self.dimension else names for d, names in enumerate(self.kept_axes)]

    @functools.cached_property
    def piece_sharding(self) -> NamedSharding:
        """Sharding of the array of all pieces."""
        return NamedSharding(self.mesh, spec_of(self.piece_axes))

    @functools.cached_property
    def num_pieces(self) -> int:
        """Number of pieces into which a device's part of ``dimension`` is cut."""
        return ways(self.mesh, self.cut_axes)

    @functools.cached_property
    def whole_shape(self) -> Shape:
        """Shape of what is cut into pieces: a device's part before axes are moved."""
        return tuple(size // ways(self.mesh, names) for size, names in zip(self.shape, self.kept_axes, strict=True))

    @property
    def piece_shape(self) -> Shape:
        """Shape of one device's piece, including padding."""
        return with_rows(self.whole_shape, self.dimension, self.piece)

    @property
    def padded_shape(self) -> Shape:
        """Shape of one device's shard of the result, before the padding of the last pieces is dropped."""
        return with_rows(self.shard_shape, self.dimension, self.num_pieces * self.piece)

    def boxes(self, process: int | None = None) -> dict[Device, Box | None]:
        """Returns device, of one process or of all → the box to read for it; None for devices that only receive."""
        if self.sharding is None:
            return {HOST: tuple((0, size) for size in self.shape)}
        sharding, shape, readers = self.sharding, self.shape, self.sharding.device_set
        if not self.direct:
            sharding = self.piece_sharding
            shape = tuple(
                n * ways(self.mesh, names) for n, names in zip(self.piece_shape, self.piece_axes, strict=True)
            )
        if self.broadcast is not None:
            axis, index = self.broadcast
            readers = set(np.ravel(self.mesh.devices.take(index, axis=self.mesh.axis_names.index(axis))))
        return {
            device: self._stored_box(box_of_index(slices or (), shape)) if device in readers else None
            for device, slices in sharding.devices_indices_map(shape).items()
            if process is None or device.process_index == process
        }

    def _stored_box(self, box: Box) -> Box:
        """Returns the box in the leaf, without padding, of a box in the array of all pieces."""
        if self.direct or not box:
            return box
        extent, first = self.whole_shape[self.dimension], box[self.dimension][0]
        part, number = divmod(first // max(1, self.piece), self.num_pieces)
        start, stop = (part * extent + min(extent, n * self.piece) for n in (number, number + 1))
        return (*box[: self.dimension], (start, stop), *box[self.dimension + 1 :])


@functools.lru_cache(maxsize=256)
def devices_of_a_process(sharding: Sharding | None) -> int:
    """Returns the largest number of devices that any process has in a sharding; 1 for None."""
    devices = [HOST] if sharding is None else sharding.device_set
    return max(collections.Counter(device.process_index for device in devices).values())


@dataclasses.dataclass(frozen=True)
class ReadCost:
    """Bytes that each process reads for a leaf under a plan, counting whole units, and bytes stored."""

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
    """Returns the cost of reading whole units under ``plan``; a process reads a unit once for all its devices.

    Counting stops above ``give_up``, the ratio of units read to units stored: with thousands of hosts, counting a bad
    plan in full takes long.
    """
    most, count = give_up * len(units), 0
    numbers: dict[int, set[int]] = collections.defaultdict(set)
    wanted = dict.fromkeys((device.process_index, box) for device, box in plan.boxes().items() if box is not None)
    for process, box in wanted:
        own = numbers[process]
        before = len(own)
        own.update(units.touching(box))
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


def _subsets(items: Sequence[S]) -> Iterator[tuple[S, ...]]:
    """Yields the subsets of ``items``, smallest first."""
    return itertools.chain.from_iterable(itertools.combinations(items, count) for count in range(len(items) + 1))


def candidates(sharding: Sharding, shape: Shape) -> list[LoadPlan]:
    """Returns the plans among which :func:`best_plan` chooses, the direct one first."""
    plans = [LoadPlan(sharding, shape)]
    if not isinstance(sharding, NamedSharding):
        return plans
    free, axes = free_axes(sharding), spec_axes(sharding, len(shape))
    for dimension, extent in enumerate(sharding.shard_shape(shape)):
        # All axes of some of the other dimensions may be moved to this one; fewest first.
        sharded = [
            [(axis, other) for axis in names if sharding.mesh.shape[axis] > 1] for other, names in enumerate(axes)
        ]
        others = [group for other, group in enumerate(sharded) if group and other != dimension]
        for chosen in _subsets(others):
            moved = tuple(itertools.chain.from_iterable(chosen))
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
def replica_plan(sharding: Sharding | None, shape: Shape, axis: str | None, index: int) -> LoadPlan:
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

    A unit is always read whole and only once: if a piece begins inside a unit, which another piece then shares, or if
    the requested shape differs from the stored one, pieces are read whole, whatever the limit. The last rows of a piece
    may be fewer than are read at once, but not fewer than are sent.

    ``plan`` must not be direct; ``itemsize`` is in bytes per value of the requested dtype. Half of the limit, in bytes per
    process, bounds the rows read, beside the chunks in flight from storage. All of it bounds the copies of a block in
    transit, when no chunk is in flight.
    """
    devices = devices_of_a_process(plan.sharding)
    row = max(1, math.prod(plan.piece_shape) // max(1, plan.piece) * itemsize * devices)
    unit, read, last = units.cell[plan.dimension], plan.piece, plan.piece
    starts = {box[plan.dimension][0] for box in plan.boxes().values() if box is not None and box_size(box)}
    if plan.shape == units.shape and all(start % unit == 0 for start in starts):
        count = -(-plan.piece // unit)
        rounds = -(-count // max(1, limit // 2 // (unit * row)))
        if rounds > 1:
            read = -(-count // rounds) * unit  # as even as units allow: the last rows bound what is sent at once
            last = plan.piece - (rounds - 1) * read
    return read, min(last, max(1, limit // (row * (1 + 2 * plan.num_pieces))))


def assign_units(
    grids: Sequence[tuple[Grid, int]], hosts: Iterable[int], loads: Mapping[int, int]
) -> dict[int, list[tuple[int, int]]]:
    """Assigns each unit, largest first, to the host with the fewest bytes to read so far.

    ``grids`` has each leaf's units and bytes per value; ``loads`` the bytes that each host reads anyway. Returns host → its
    (leaf index, unit number) in the order of reading.
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
    """Yields (item, first byte in it, byte after the last one in it) of consecutive items in a window of bytes.

    ``ends`` has, for each item, the byte after its last one; no item is empty. The window is ``[start, stop)``, clipped to
    the end of the items.
    """
    stop = min(stop, ends[-1] if ends else 0)
    item = bisect.bisect_right(ends, start)
    while start < stop:
        begin, until = ends[item - 1] if item else 0, min(stop, ends[item])
        yield item, start - begin, until - begin
        start, item = until, item + 1
