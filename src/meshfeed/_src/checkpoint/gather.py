"""Moves pieces from the devices that read them to the requested sharding, bit for bit.

It uses ``shard_map`` and explicit collectives, so the compiler chooses neither the collective nor the dtype: unsigned
bits. Data is only moved, never added.

Gathers one large leaf a few rows of each piece at a time, to keep little in flight beyond the result.
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
from meshfeed._src.base import memory
from meshfeed._src.base.coordination import process_index
from meshfeed._src.checkpoint.load_plan import Grid, LoadPlan
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


def rows_in_flight(plan: LoadPlan, units: Grid, itemsize: int, local_devices: int, limit: int) -> tuple[int, int]:
    """Returns how many rows of each piece to read at once under a limit, and how many of those to send at once.

    A unit is always read whole and only once: if a piece is not a whole number of units, the whole piece is read.

    Args:
      plan: must not be direct.
      units: units of the stored leaf.
      itemsize: bytes per value of the requested dtype.
      local_devices: the largest number of devices per process.
      limit: bytes in flight per process: the blocks read and their copies in transit.
    """
    ways = math.prod(plan.sharding.mesh.shape[axis] for axis in plan.piece_axes())
    row = max(1, math.prod(piece_shape(plan)) // max(1, plan.piece) * itemsize * local_devices)
    unit = units.cell[plan.dimension]
    if plan.shape == units.shape and plan.piece % unit == 0 and plan.shape[plan.dimension] % plan.piece == 0:
        count, most = plan.piece // unit, max(1, limit // 2 // row)
        read = max((n for n in range(1, count + 1) if count % n == 0 and n * unit <= most), default=1) * unit
    else:
        read = plan.piece
    return read, min(read, max(1, limit // 2 // (row * (1 + 2 * ways))))


@functools.lru_cache(maxsize=256)
def _block_updater(plan: LoadPlan) -> Any:
    wanted, dimension = wanted_spec(plan), plan.dimension
    ways = math.prod(plan.sharding.mesh.shape[axis] for axis in plan.piece_axes())

    def update(out: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
        received = receive(block, plan)
        # Reshapes are free, so the donated result is updated in place. It keeps the transfer dtype until the end: with
        # bitcasts around the update, XLA copies the whole result for each block.
        rows = received.shape[dimension] // ways
        received = received.reshape(*received.shape[:dimension], ways, rows, *received.shape[dimension + 1 :])
        pieces = out.reshape(*out.shape[:dimension], ways, plan.piece, *out.shape[dimension + 1 :])
        return lax.dynamic_update_slice_in_dim(pieces, received, start, dimension + 1).reshape(out.shape)

    mapped = jax.shard_map(
        update,
        mesh=plan.sharding.mesh,
        in_specs=(wanted, piece_sharding(plan).spec, PartitionSpec()),
        out_specs=wanted,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


@functools.lru_cache(maxsize=256)
def _block_frame(plan: LoadPlan, dtype: Any) -> tuple[Any, Any]:
    """Programs that create the empty result (transfer dtype, padded) and that finish one shard (None if not needed)."""
    sizes, mesh, wanted = plan.sharding.mesh.shape, plan.sharding.mesh, wanted_spec(plan)
    carrier = bits_dtype(dtype)
    ways = math.prod(sizes[axis] for axis in plan.piece_axes())
    local = [
        size // math.prod(sizes[axis] for axis in names)
        for size, names in zip(plan.shape, spec_axes(plan.sharding, len(plan.shape)), strict=True)
    ]
    padded = local[plan.dimension] != ways * plan.piece
    local[plan.dimension] = ways * plan.piece
    start = jax.shard_map(lambda: jnp.zeros(local, carrier), mesh=mesh, in_specs=(), out_specs=wanted, check_vma=False)
    if not padded and carrier == dtype:
        return jax.jit(start), None
    return jax.jit(start), jax.jit(lambda shard: from_bits(trim(shard, plan), dtype))


class BlockGather:
    """Gathers one leaf block by block. Every process with a device in the leaf's mesh must create one.

    Args:
      plan: the leaf's plan; must not be direct.
      dtype: the leaf's final dtype.
      rows: rows of each piece per block.
    """

    def __init__(self, plan: LoadPlan, dtype: Any, rows: int) -> None:
        start, self._end = _block_frame(plan, np.dtype(dtype))
        self._plan, self._dtype = plan, dtype
        self._update = _block_updater(plan)
        shape = tuple(rows if d == plan.dimension else size for d, size in enumerate(piece_shape(plan)))
        nothing = memory.zeros(shape, bits_dtype(dtype))  # shared: neither written nor donated
        idle = [device for device, box in plan.boxes(process_index()).items() if box is None]
        self._idle = jax.device_put([nothing] * len(idle), idle) if idle else []
        self._out = start()

    def add(self, first: int, blocks: Mapping[Any, np.ndarray[Any, Any]]) -> None:
        """Sends the rows of every piece starting at row ``first``.

        Args:
          first: row within each piece.
          blocks: blocks in the transfer dtype, by the device that reads them. They may be overwritten afterwards.
        """
        block = pieces_array(self._plan, blocks, self._dtype, self._idle)
        self._out = self._update(self._out, block, np.int32(first))
        self._out.block_until_ready()  # otherwise the blocks of all rounds would be in flight at once

    def finish(self) -> jax.Array:
        """Returns the leaf. Call it only once."""
        if self._end is None:
            return self._out
        shards = [shard.data for shard in self._out.addressable_shards]
        del self._out
        for index in range(len(shards)):  # one by one, so at most one shard exists twice
            shards[index] = self._end(shards[index]).block_until_ready()
        return jax.make_array_from_single_device_arrays(self._plan.shape, self._plan.sharding, shards)


def cut_block(
    buffers: Mapping[Any, np.ndarray[Any, Any]], dimension: int, first: int, rows: int
) -> dict[Any, np.ndarray[Any, Any]]:
    """Cuts rows out of each piece; copies only if they are not contiguous."""
    cut = {}
    for device, buffer in buffers.items():
        window = tuple(slice(first, first + rows) if d == dimension else slice(None) for d in range(buffer.ndim))
        part = buffer[window]
        cut[device] = part if part.flags.c_contiguous else memory.copy(part)
    return cut
