"""The compiled half of ``load="once"``: moves rows from the load sharding to the target shardings, bit for bit.

Values travel in carriers: integers that hold their bits. The host views its buffer as the carrier dtype, which is free;
the device converts back after the last collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshfeed._src.arrays.reshard import bit_width, constraint_sharding, from_bits


@dataclasses.dataclass(frozen=True)
class Carrier:
    """How values of a dtype travel.

    Attributes:
      dtype: dtype of the integers.
      extra_shape: additional trailing dimensions: ``(2,)`` for the two parts of a complex number.
    """

    dtype: np.dtype[Any]
    extra_shape: tuple[int, ...] = ()


def carrier_of(dtype: Any) -> Carrier:
    """Returns the carrier for ``dtype``: integers unchanged, all others as unsigned integers of the same size."""
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        return Carrier(np.dtype(f"uint{dtype.itemsize * 4}"), (2,))
    if dtype.kind in "iu":
        return Carrier(dtype)
    return Carrier(np.dtype(f"uint{dtype.itemsize * 8}"))  # numpy stores sub-byte types in one byte per value


def to_carrier(array: np.ndarray[Any, Any], carrier: Carrier) -> np.ndarray[Any, Any]:
    """Views a C-contiguous host array as its carrier."""
    if array.dtype == carrier.dtype:
        return array
    if carrier.extra_shape:
        return array.reshape(*array.shape, 1).view(carrier.dtype)
    return array.view(carrier.dtype)


def _from_carrier(bits: jax.Array, dtype: Any) -> jax.Array:
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return bits != 0
    if dtype.kind == "c":
        part = np.dtype(f"float{dtype.itemsize * 4}")
        return lax.complex(from_bits(bits[..., 0], part), from_bits(bits[..., 1], part))
    if (width := bit_width(dtype)) < 8:
        bits = bits & ((1 << width) - 1)  # numpy sign-extends into the rest of the byte
    return from_bits(bits, dtype)


def make_mover(
    load_sharding: NamedSharding, ranks: Sequence[int], chunk_rows: int, specs: Sequence[jax.ShapeDtypeStruct]
) -> Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]:
    """Returns a compiled move from the load sharding to the target shardings, for all leaves at once.

    Args:
      load_sharding: rows over a flat mesh, one chunk per device.
      ranks: for each device, its rank among the devices of reading hosts, or -1.
      chunk_rows: rows per device.
      specs: shape, dtype and sharding of each leaf, over the same devices in the same order.

    Returns:
      A jitted function of the tuple of carriers ``[devices * chunk_rows, ...]``, one per leaf.
    """

    def move(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(_move(bits, spec) for bits, spec in zip(arrays, specs, strict=True))

    def _move(bits: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array:
        if min(ranks) < 0:
            bits = _spread(bits, load_sharding, ranks, chunk_rows)
        bits = lax.with_sharding_constraint(bits, load_sharding)
        rows = lax.with_sharding_constraint(bits[: spec.shape[0]], constraint_sharding(spec.sharding))
        return _from_carrier(lax.optimization_barrier(rows), spec.dtype)

    return jax.jit(move, out_shardings=tuple(spec.sharding for spec in specs))


def _spread(bits: jax.Array, load_sharding: NamedSharding, ranks: Sequence[int], chunk_rows: int) -> jax.Array:
    """Spreads the chunks of some devices evenly over all devices, in order, padded with rows of zeros.

    A reduce-scatter of integers in which at most one addend is nonzero. Indexing rows of a sharded dimension would
    make XLA gather the placeholders of all devices too.
    """
    axis = load_sharding.mesh.axis_names[0]
    size = -(-chunk_rows * (max(ranks) + 1) // len(ranks)) * len(ranks)
    wide = bits.dtype if bits.dtype.itemsize >= 4 else jnp.dtype(jnp.uint32)  # some backends cannot sum narrow integers

    def spread(chunk: jax.Array) -> jax.Array:
        rank = jnp.asarray(ranks, jnp.int32)[lax.axis_index(axis)]
        chunk = jnp.where(rank >= 0, chunk.astype(wide), jnp.zeros((), wide))
        whole = jnp.zeros((size, *chunk.shape[1:]), wide)
        starts = (jnp.maximum(rank, 0) * chunk_rows, *(jnp.int32(0),) * (chunk.ndim - 1))
        whole = lax.dynamic_update_slice(whole, chunk, starts)
        return lax.psum_scatter(whole, axis, tiled=True).astype(bits.dtype)

    specs = PartitionSpec(axis)
    return jax.shard_map(spread, mesh=load_sharding.mesh, in_specs=specs, out_specs=specs)(bits)
