"""Gathers one large leaf a few rows of each piece at a time, so that little is in flight beside the result."""

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
    """How many rows of each piece to read at once under a limit, and how many of those to send at once.

    A unit is always read whole, and never twice: where pieces are no whole number of units, all of a piece is read.

    Args:
      plan: not direct.
      units: of the stored leaf.
      itemsize: bytes of a wanted value.
      local_devices: of a process, at most.
      limit: bytes in flight in a process: the blocks read, and what becomes of them on their way.
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
        # By reshapes, which cost nothing, so that the donated result is written in place. It stays in the travelling
        # dtype to the end: with bitcasts around the update, XLA copies the result for each block.
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
    """Programs that make the empty result, in the travelling dtype and padded, and that finish a shard; None: it is."""
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
    """One leaf on its way, a block after the other; every process with a device in its mesh makes one.

    Args:
      plan: of the leaf, not direct.
      dtype: its final dtype.
      rows: of each piece in a block.
    """

    def __init__(self, plan: LoadPlan, dtype: Any, rows: int) -> None:
        start, self._end = _block_frame(plan, np.dtype(dtype))
        self._plan, self._dtype = plan, dtype
        self._update = _block_updater(plan)
        shape = tuple(rows if d == plan.dimension else size for d, size in enumerate(piece_shape(plan)))
        nothing = memory.zeros(shape, bits_dtype(dtype))  # one for all: it is neither written nor donated
        idle = [device for device, box in plan.boxes(process_index()).items() if box is None]
        self._idle = jax.device_put([nothing] * len(idle), idle) if idle else []
        self._out = start()

    def add(self, first: int, blocks: Mapping[Any, np.ndarray[Any, Any]]) -> None:
        """Sends rows ``first`` and following of every piece.

        Args:
          first: row.
          blocks: in the travelling dtype, by device that has read; free to be written over afterwards.
        """
        block = pieces_array(self._plan, blocks, self._dtype, self._idle)
        self._out = self._update(self._out, block, np.int32(first))
        self._out.block_until_ready()  # or the blocks of all rounds would be in flight at once

    def finish(self) -> jax.Array:
        """The leaf; call it once."""
        if self._end is None:
            return self._out
        shards = [shard.data for shard in self._out.addressable_shards]
        del self._out
        for index in range(len(shards)):  # one by one, so that not more than one of them is there twice
            shards[index] = self._end(shards[index]).block_until_ready()
        return jax.make_array_from_single_device_arrays(self._plan.shape, self._plan.sharding, shards)


def cut_block(
    buffers: Mapping[Any, np.ndarray[Any, Any]], dimension: int, first: int, rows: int
) -> dict[Any, np.ndarray[Any, Any]]:
    """Rows of each piece; copied only where they are not contiguous."""
    cut = {}
    for device, buffer in buffers.items():
        window = tuple(slice(first, first + rows) if d == dimension else slice(None) for d in range(buffer.ndim))
        part = buffer[window]
        cut[device] = part if part.flags.c_contiguous else memory.copy(part)
    return cut
