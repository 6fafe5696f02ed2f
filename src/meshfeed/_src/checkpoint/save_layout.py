"""Lays out arrays for saving so that any later restore can read each byte once.

Replicas share the work: an array held by several devices is cut among them along a dimension that they divide, on the
device and on unsigned bits (slicing a float8 quiets its NaNs on JAX 0.12). Each device then writes its own slice as one
stored chunk, or as several if it is larger than 16 MiB: a later job with more hosts can then share the reads.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshfeed._src.arrays.reshard import from_bits, to_bits
from meshfeed._src.checkpoint.boxes import (
    Axes,
    Box,
    Grid,
    Shape,
    box_of_index,
    free_axes,
    slices,
    spec_axes,
    spec_of,
    ways,
)
from meshfeed._src.checkpoint.dtypes import carrier_of, half_bits
from meshfeed._src.checkpoint.manifest import digest

TARGET_CHUNK_BYTES = 16 << 20
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
    # Share smaller leaves between hosts, so that one host does not write alone a leaf of a few MiB that a thousand hold.
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
    subsets = [subset for count in range(len(free), 0, -1) for subset in itertools.combinations(free, count)]
    for subset in sorted(subsets, key=lambda subset: -ways(mesh, subset)):
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


def _carry(bits: jax.Array, dtype: np.dtype[np.generic]) -> jax.Array:
    """Converts the bits of values of ``dtype`` to their storage dtype; for use under ``jit``."""
    carrier = carrier_of(dtype)
    if carrier == dtype:
        return from_bits(bits, dtype)
    return bits if carrier == bits.dtype else from_bits(jnp.asarray(half_bits(dtype))[bits], carrier)


@functools.lru_cache(maxsize=1024)
def _cutter(
    sharding: NamedSharding, shape: Shape, dtype: np.dtype[np.generic], cut: ReplicaCut
) -> Callable[[jax.Array], jax.Array]:
    rank = len(shape)
    after = cut_sharding(sharding, rank, cut)
    size = after.shard_shape(shape)[cut.dimension]

    def take(block: jax.Array) -> jax.Array:
        start = lax.axis_index(cut.axes) * size
        return _carry(lax.dynamic_slice_in_dim(to_bits(block), start, size, cut.dimension), dtype)

    before = spec_of(spec_axes(sharding, rank))
    return jax.jit(jax.shard_map(take, mesh=sharding.mesh, in_specs=before, out_specs=after.spec, check_vma=False))


@functools.lru_cache(maxsize=256)
def _carrier(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: _carry(to_bits(array), array.dtype), out_shardings=sharding)


@dataclasses.dataclass
class Laid:
    """An array as it is passed to Orbax.

    Attributes:
      array: the array cut among replicas, in its storage dtype.
      cell: shape of the boxes that get a digest, which are the stored chunks.
      chunk_byte_size: size to request from Orbax to get these chunks; None means that a slice is one chunk.
    """

    array: jax.Array
    cell: Shape
    chunk_byte_size: int | None


def lay_out(
    array: jax.Array, *, dtype: DTypeLike | None = None, share: bool = True, min_slice_bytes: int | None = None
) -> Laid:
    """Prepares one array for saving. All processes of its sharding must call it in the same order."""
    sharding = array.sharding
    if dtype is not None and np.dtype(dtype) != array.dtype:
        array = jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)(array)
    cut = choose_cut(array.shape, array.dtype.itemsize, sharding, min_slice_bytes) if share else None
    if cut is not None:
        assert isinstance(sharding, NamedSharding)
        array = _cutter(sharding, array.shape, array.dtype, cut)(array)
    elif carrier_of(array.dtype) != array.dtype:
        array = _carrier(sharding)(array)
    piece = array.sharding.shard_shape(array.shape)
    chunk, asked = chunk_shape(array.shape, piece, array.dtype.itemsize)
    return Laid(array, chunk, asked)


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


def cell_digests(values: NDArray[np.generic], box: Box, grid: Grid) -> dict[int, str]:
    """Returns the digest of each cell of ``grid`` inside ``box``, which holds ``values``, keyed by cell number."""
    return {number: digest(values[slices(grid.box(number), box)]) for number in grid.touching(box)}


@functools.lru_cache(maxsize=1024)
def _device_boxes(sharding: Sharding, shape: Shape) -> dict[object, Box]:
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: box_of_index(index or (), shape) for device, index in indices.items()}


class ShardDigests:
    """Host copies of the slices of one array that this process writes, and their digests.

    Orbax's own transfer fills the same per-shard cache, so each slice is copied from the device once, and on CPU not at
    all.

    Args:
      array: the array to save.
      cell: shape of the boxes that get a digest.
      replica_id: the replica that this process writes; None means the one it holds.
      early: copy to the host now; otherwise only when :meth:`compute` runs.
    """

    def __init__(self, array: jax.Array, cell: Shape, *, replica_id: int | None = 0, early: bool = True) -> None:
        self._grid = Grid(array.shape, cell)
        held = array.addressable_shards
        if replica_id is None and held:
            replica_id = held[0].replica_id
        written = [shard for shard in held if shard.replica_id == replica_id]
        boxes = _device_boxes(array.sharding, array.shape)
        self._shards: list[tuple[Box, jax.Array | NDArray[np.generic]]] = [
            (boxes[shard.device], shard.data) for shard in written
        ]
        self._early = early
        for shard in written if early else ():
            shard.data.copy_to_host_async()

    def capture(self) -> None:
        """Waits for the host copies, so the caller may donate the array: Orbax copies only the slices it writes."""
        if self._early:
            self._shards = [(box, np.asarray(data)) for box, data in self._shards]

    def compute(self) -> dict[int, str]:
        """Returns the digests by cell number and frees the host copies."""
        digests: dict[int, str] = {}
        while self._shards:
            box, data = self._shards.pop()
            values = np.asarray(data if self._early else data.copy())  # copy first: jax.Array caches its host value
            digests.update(cell_digests(values, box, self._grid))
        return digests
