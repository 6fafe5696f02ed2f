"""Gathers one large leaf a few rows of each piece at a time, to keep little in flight beyond the result."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshfeed._src.arrays.reshard import bits_dtype, from_bits
from meshfeed._src.base import memory
from meshfeed._src.base.coordination import process_index
from meshfeed._src.checkpoint.gather import piece_shape, piece_sharding, pieces_array, receive, trim, wanted_spec
from meshfeed._src.checkpoint.grid import Grid
from meshfeed._src.checkpoint.load_plan import LoadPlan
from meshfeed._src.checkpoint.save_layout import spec_axes


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
