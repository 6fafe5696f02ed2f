"""Moves pieces from the devices that read them to the requested sharding, bit for bit.

It uses ``shard_map`` and explicit collectives, so the compiler chooses neither the collective nor the dtype: unsigned
bits. Data is only moved, never added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshfeed._src.arrays.reshard import bit_width, bits_dtype, from_bits
from meshfeed._src.checkpoint.load_plan import LoadPlan
from meshfeed._src.checkpoint.save_layout import spec_axes


def host_bits_of(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Converts host values to the transfer dtype; returns a view if possible."""
    carrier = bits_dtype(values.dtype)
    if carrier == values.dtype:
        return values
    if bit_width(values.dtype) < 8 and jnp.issubdtype(values.dtype, jnp.integer):
        # numpy holds int4 and the like as one byte per value; keep only their own bits.
        return values.astype(np.int8).view(np.uint8) & np.uint8((1 << bit_width(values.dtype)) - 1)
    return values.view(carrier)


def piece_sharding(plan: LoadPlan) -> NamedSharding:
    """Returns the sharding of the array of pieces, for a plan that is not direct."""
    axes = spec_axes(plan.sharding, len(plan.shape))
    moved = {axis for axis, _ in plan.moved}
    parts = []
    for dimension, names in enumerate(axes):
        kept = tuple(axis for axis in names if axis not in moved)
        parts.append((*kept, *plan.piece_axes()) if dimension == plan.dimension else kept)
    return NamedSharding(plan.sharding.mesh, PartitionSpec(*(part or None for part in parts)))


def piece_shape(plan: LoadPlan) -> tuple[int, ...]:
    """Returns the shape of one device's piece, including padding."""
    moved = {axis for axis, _ in plan.moved}
    sizes = plan.sharding.mesh.shape
    shape = []
    for dimension, names in enumerate(spec_axes(plan.sharding, len(plan.shape))):
        ways = math.prod(sizes[axis] for axis in names if axis not in moved)
        shape.append(plan.piece if dimension == plan.dimension else plan.shape[dimension] // ways)
    return tuple(shape)


def wanted_spec(plan: LoadPlan) -> PartitionSpec:
    """Returns the requested PartitionSpec with one entry per dimension of the leaf."""
    return PartitionSpec(*(part or None for part in spec_axes(plan.sharding, len(plan.shape))))


def receive(block: jax.Array, plan: LoadPlan) -> jax.Array:
    """Runs all collectives of a plan on one device's block; returns rows of ``dimension`` in order, with padding."""
    sizes = plan.sharding.mesh.shape
    if plan.broadcast is not None:
        axis, first = plan.broadcast
        count = sizes[axis]
        distance = (lax.axis_index(axis) - first) % count
        reach = 1
        while reach < count:  # devices that have the block forward it, so their number doubles each round
            pairs = [((first + i) % count, (first + i + reach) % count) for i in range(reach) if i + reach < count]
            received = lax.ppermute(block, axis, pairs)
            block = jnp.where((distance >= reach) & (distance < 2 * reach), received, block)
            reach *= 2
    for axis, dimension in plan.moved:
        block = lax.all_to_all(block, axis, split_axis=dimension, concat_axis=plan.dimension, tiled=True)
    if plan.gather:
        block = lax.all_gather(block, plan.gather, axis=plan.dimension, tiled=True)
    return block


def trim(block: jax.Array, plan: LoadPlan) -> jax.Array:
    """Drops the padding rows of a gathered block."""
    if not plan.shape:
        return block
    ways = math.prod(
        plan.sharding.mesh.shape[axis] for axis in spec_axes(plan.sharding, len(plan.shape))[plan.dimension]
    )
    return lax.slice_in_dim(block, 0, plan.shape[plan.dimension] // ways, axis=plan.dimension)


@functools.lru_cache(maxsize=256)
def _gatherer(plans: tuple[LoadPlan, ...], dtypes: tuple[Any, ...]) -> Any:
    def gather(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            from_bits(trim(receive(block, plan), plan), dtype)
            for block, plan, dtype in zip(blocks, plans, dtypes, strict=True)
        )

    mapped = jax.shard_map(
        gather,
        mesh=plans[0].sharding.mesh,
        in_specs=tuple(piece_sharding(plan).spec for plan in plans),
        out_specs=tuple(wanted_spec(plan) for plan in plans),
        check_vma=False,
    )
    return jax.jit(mapped)


def place(
    buffers: Mapping[Any, np.ndarray[Any, Any]],
    shape: Sequence[int],
    sharding: Any,
    dtype: Any,
    placed: Sequence[jax.Array] = (),
) -> jax.Array:
    """Builds a global array from this process's buffers, keyed by device, and from shards already on their devices."""
    # Each device needs its own buffer: if two aliased one, donating one shard would overwrite the other.
    shards = [*placed, *(jax.device_put(list(buffers.values()), list(buffers)) if buffers else ())]
    if shards:
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)
    # Without a local shard, JAX cannot infer the dtype.
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def pieces_array(
    plan: LoadPlan, buffers: Mapping[Any, np.ndarray[Any, Any]], dtype: Any, placed: Sequence[jax.Array] = ()
) -> jax.Array:
    """Builds the global array of pieces; ``buffers`` and the shards ``placed`` are in the transfer dtype."""
    sharding = piece_sharding(plan)
    local = next(iter(buffers.values())).shape if buffers else placed[0].shape
    whole = []
    for size, part in zip(local, spec_axes(sharding, len(local)), strict=True):
        whole.append(size * math.prod(sharding.mesh.shape[axis] for axis in part))
    return place(buffers, whole, sharding, bits_dtype(dtype), placed)


def gather_group(
    plans: Sequence[LoadPlan], dtypes: Sequence[Any], buffers: Sequence[Mapping[Any, np.ndarray[Any, Any]]]
) -> list[jax.Array]:
    """Gathers several leaves over one mesh in one compiled call.

    Args:
      plans: plans of leaves over the same mesh, none of them direct.
      dtypes: the leaves' final dtypes.
      buffers: for each leaf, device → piece in the transfer dtype, for this process's devices.
    """
    arrays = [pieces_array(plan, own, dtype) for plan, own, dtype in zip(plans, buffers, dtypes, strict=True)]
    gathered = _gatherer(tuple(plans), tuple(np.dtype(dtype) for dtype in dtypes))(*arrays)
    return list(gathered)
