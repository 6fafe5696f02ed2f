"""Lays out arrays for saving so that any later restore can read each byte once.

Replicas share the work: an array held by several devices is cut among them along a dimension that they divide, on the
device and on unsigned bits (slicing a float8 quiets its NaNs on JAX 0.12). Each device then writes its own slice as one
stored chunk, or as several if it is larger than 16 MiB, so that a later job with more hosts can share the reads.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshfeed._src.arrays.reshard import from_bits, to_bits
from meshfeed._src.checkpoint.leaves import carrier_of, half_bits

TARGET_CHUNK_BYTES = 16 << 20
_LEAST_CHUNK_BYTES = 1 << 20  # a dimension without good divisors would give tiny chunks: keep the slice whole
MIN_SLICE_BYTES = 64 << 10  # below this, a slice costs more in requests than it gains by spreading bytes
_LEAST_SLICE_BYTES = 4 << 10  # even if each host has only one slice
_CHUNK_WORTH_BYTES = 256 << 10  # writing a chunk takes about 0.3 ms in addition to its bytes


def spec_axes(sharding: NamedSharding, rank: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension, major first."""
    parts = [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in sharding.spec]
    return parts + [()] * (rank - len(parts))


def free_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """Returns the mesh axes with more than one device along which the array is replicated, in mesh order."""
    used = {axis for part in sharding.spec if part is not None for axis in ((part,) if isinstance(part, str) else part)}
    return tuple(axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in used)


@dataclasses.dataclass(frozen=True)
class ReplicaCut:
    """The dimension and mesh axes along which replicas share an array."""

    dimension: int
    axes: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def _hosts_along(mesh: Any, axes: tuple[str, ...]) -> int:
    """Returns the number of processes that own the devices along ``axes``."""
    index = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    return len({device.process_index for device in np.ravel(mesh.devices[index])})


def _is_worth(shard_bytes: int, replicas: int, hosts: int, min_slice_bytes: int | None) -> bool:
    slice_bytes = shard_bytes // replicas
    if min_slice_bytes is not None or slice_bytes >= MIN_SLICE_BYTES:
        return slice_bytes >= (min_slice_bytes or 0)
    # Share smaller leaves only between hosts: otherwise one host would write alone a leaf of a few MiB that a thousand
    # hold. More slices within a host only add cost.
    each = -(-replicas // hosts)
    return hosts > 1 and slice_bytes >= _LEAST_SLICE_BYTES and shard_bytes >= each * _CHUNK_WORTH_BYTES


@functools.lru_cache(maxsize=1024)
def choose_cut(shape: tuple[int, ...], itemsize: int, sharding: Any, min_slice_bytes: int | None) -> ReplicaCut | None:
    """Returns the finest cut of an array among its replicas, along the first dimension that they divide.

    Args:
      shape: shape of the global array.
      itemsize: bytes per stored value.
      sharding: sharding of the array; only NamedShardings are cut.
      min_slice_bytes: smallest slice to make. None means 64 KiB, or less if that shares the work between hosts.
    """
    if not isinstance(sharding, NamedSharding) or math.prod(shape) == 0 or not shape:
        return None
    shard = sharding.shard_shape(tuple(shape))
    free = free_axes(sharding)
    sizes = sharding.mesh.shape
    subsets = [subset for count in range(len(free), 0, -1) for subset in itertools.combinations(free, count)]
    subsets.sort(key=lambda subset: -math.prod(sizes[axis] for axis in subset))
    for subset in subsets:
        replicas = math.prod(sizes[axis] for axis in subset)
        if not _is_worth(math.prod(shard) * itemsize, replicas, _hosts_along(sharding.mesh, subset), min_slice_bytes):
            continue
        for dimension, size in enumerate(shard):
            if size % replicas == 0:
                return ReplicaCut(dimension, subset)
    return None


def cut_sharding(sharding: NamedSharding, rank: int, cut: ReplicaCut) -> NamedSharding:
    """Returns the sharding after the cut."""
    axes = spec_axes(sharding, rank)
    axes[cut.dimension] = (*axes[cut.dimension], *cut.axes)
    return NamedSharding(sharding.mesh, PartitionSpec(*(part or None for part in axes)))


def _carry(bits: jax.Array, dtype: Any) -> jax.Array:
    """Converts the bits of values of ``dtype`` to their storage dtype; for use under ``jit``."""
    carrier = carrier_of(dtype)
    if carrier == dtype:
        return from_bits(bits, dtype)
    return bits if carrier == bits.dtype else from_bits(jnp.asarray(half_bits(dtype))[bits], carrier)


@functools.lru_cache(maxsize=1024)
def _cutter(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any, cut: ReplicaCut) -> Any:
    mesh, rank = sharding.mesh, len(shape)
    size = sharding.shard_shape(shape)[cut.dimension] // math.prod(mesh.shape[axis] for axis in cut.axes)
    spec = PartitionSpec(*(part or None for part in spec_axes(sharding, rank)))

    def take(block: jax.Array) -> jax.Array:
        carried = to_bits(block)
        number = lax.axis_index(cut.axes)
        taken = lax.dynamic_slice_in_dim(carried, number * size, size, cut.dimension)
        return _carry(taken, dtype)

    body = jax.shard_map(
        take, mesh=mesh, in_specs=spec, out_specs=cut_sharding(sharding, rank, cut).spec, check_vma=False
    )
    return jax.jit(body)


@functools.lru_cache(maxsize=256)
def _carrier(sharding: Any) -> Any:
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
    cell: tuple[int, ...]
    chunk_byte_size: int | None


def lay_out(array: jax.Array, *, dtype: Any = None, share: bool = True, min_slice_bytes: int | None = None) -> Laid:
    """Prepares one array for saving. All processes of its sharding must call it in the same order.

    Args:
      array: the global array; neither PRNG keys nor empty.
      dtype: dtype to cast to before saving; None keeps the array's.
      share: cut the array among its replicas.
      min_slice_bytes: see :func:`choose_cut`.
    """
    if dtype is not None and np.dtype(dtype) != array.dtype:
        array = jax.jit(lambda x: x.astype(dtype), out_shardings=array.sharding)(array)
    cut = choose_cut(array.shape, array.dtype.itemsize, array.sharding, min_slice_bytes) if share else None
    if cut is not None:
        assert isinstance(array.sharding, NamedSharding)
        array = _cutter(array.sharding, array.shape, array.dtype, cut)(array)
    elif carrier_of(array.dtype) != array.dtype:
        array = _carrier(array.sharding)(array)
    piece = array.sharding.shard_shape(array.shape)
    chunk, asked = chunk_shape(array.shape, piece, jnp.dtype(array.dtype).itemsize)
    return Laid(array, chunk, asked)


def chunk_shape(shape: Sequence[int], piece: Sequence[int], itemsize: int) -> tuple[tuple[int, ...], int | None]:
    """Returns the chunk shape in which a device's slice is stored, and the size to request from Orbax to get it.

    Orbax halves (or thirds, …) the longest dimension that is already cut until the chunk is small enough, then the
    others. That works well if the dimensions have small divisors; otherwise the slice is kept whole.
    """
    chunk = [max(1, size) for size in piece]
    if math.prod(chunk) * itemsize <= TARGET_CHUNK_BYTES:
        return tuple(chunk), None
    cut = [whole != part for whole, part in zip(shape, chunk, strict=True)]
    original = list(chunk)
    while math.prod(chunk) * itemsize > TARGET_CHUNK_BYTES:
        longest = max((d for d in range(len(chunk)) if cut[d]), key=lambda d: chunk[d], default=None)
        if longest is None or chunk[longest] == 1:
            cut = [True] * len(chunk)
            continue
        chunk[longest] = next(n for n in range(chunk[longest] - 1, 0, -1) if original[longest] % n == 0)
    if math.prod(chunk) * itemsize < _LEAST_CHUNK_BYTES:
        return tuple(original), None
    return tuple(chunk), TARGET_CHUNK_BYTES
