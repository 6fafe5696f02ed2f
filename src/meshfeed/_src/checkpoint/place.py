"""Brings the values that hosts have read to the devices that need them, bit for bit, and makes them the leaves requested.

Pieces of large leaves reach the requested sharding by ``shard_map`` and explicit collectives, so the compiler chooses
neither the collective nor the dtype: unsigned bits. Data is only moved, never added. Several leaves are gathered in one
compiled call; a leaf too large for that is gathered a few rows of each piece at a time, to keep little in flight beyond
the result.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshfeed._src.arrays.reshard import bits_dtype, from_bits
from meshfeed._src.base import memory
from meshfeed._src.base.coordination import process_index
from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.types import PyTree
from meshfeed._src.checkpoint.casts import check_fits, may_overflow
from meshfeed._src.checkpoint.layout import Device, LoadPlan, spec_of, ways, with_rows
from meshfeed._src.checkpoint.leaves import SavedLeaf, is_key, key_dtype, keys_of
from meshfeed._src.checkpoint.plan import Restored
from meshfeed._src.checkpoint.read import HostPieces

Buffers: TypeAlias = Mapping[Device, NDArray[np.generic]]
"""Host buffers by the device that reads them."""


def host_bits_of(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Returns a view of host values in the transfer dtype."""
    return values.view(bits_dtype(values.dtype))


def _receive(block: jax.Array, plan: LoadPlan) -> jax.Array:
    """Runs all collectives of a plan on one device's block; returns rows of ``dimension`` in order, with padding."""
    if plan.broadcast is not None:
        axis, first = plan.broadcast
        count = plan.mesh.shape[axis]
        distance = (lax.axis_index(axis) - first) % count
        reach = 1
        # Not a sum with zeros, which loses -0.0, subnormals and NaN payloads.
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


def _trim(block: jax.Array, plan: LoadPlan) -> jax.Array:
    """Drops the padding rows of a gathered block."""
    return lax.slice(block, [0] * block.ndim, plan.shard_shape)


@functools.lru_cache(maxsize=256)
def _gatherer(
    plans: tuple[LoadPlan, ...], dtypes: tuple[np.dtype[np.generic], ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    def gather(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        received = (_trim(_receive(block, plan), plan) for block, plan in zip(blocks, plans, strict=True))
        return tuple(from_bits(block, dtype) for block, dtype in zip(received, dtypes, strict=True))

    # Not jit with output shardings: the compiler would choose the collective, and on CPU gather bfloat16 through float32.
    mapped = jax.shard_map(
        gather,
        mesh=plans[0].mesh,
        in_specs=tuple(plan.piece_sharding.spec for plan in plans),
        out_specs=tuple(spec_of(plan.axes) for plan in plans),
        check_vma=False,
    )
    return jax.jit(mapped)


def place(
    buffers: Buffers, shape: Sequence[int], sharding: Sharding, dtype: DTypeLike, placed: Sequence[jax.Array] = ()
) -> jax.Array:
    """Builds a global array from this process's buffers and from shards already on their devices."""
    # Each device needs its own buffer: if two aliased one, donating one shard would overwrite the other.
    shards = [*placed, *(jax.device_put(list(buffers.values()), list(buffers)) if buffers else ())]
    return assembled(shape, sharding, shards, dtype)


def assembled(shape: Sequence[int], sharding: Sharding, shards: Sequence[jax.Array], dtype: DTypeLike) -> jax.Array:
    """Builds a global array from shards on their devices."""
    # Without a local shard, JAX cannot infer the dtype.
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards, dtype=None if shards else dtype)


def _pieces_array(plan: LoadPlan, buffers: Buffers, dtype: DTypeLike, placed: Sequence[jax.Array] = ()) -> jax.Array:
    """Builds the global array of pieces; ``buffers`` and the shards ``placed`` are in the transfer dtype."""
    local = next(iter(buffers.values())).shape if buffers else placed[0].shape
    shape = [size * ways(plan.mesh, names) for size, names in zip(local, plan.piece_axes, strict=True)]
    return place(buffers, shape, plan.piece_sharding, bits_dtype(dtype), placed)


def gather_group(plans: Sequence[LoadPlan], dtypes: Sequence[DTypeLike], buffers: Sequence[Buffers]) -> list[jax.Array]:
    """Gathers several leaves over one mesh in one compiled call."""
    arrays = [_pieces_array(plan, own, dtype) for plan, own, dtype in zip(plans, buffers, dtypes, strict=True)]
    return list(_gatherer(tuple(plans), tuple(np.dtype(dtype) for dtype in dtypes))(*arrays))


def gather(group: Sequence[HostPieces]) -> list[Restored]:
    """Returns the leaves whose pieces this process and the others have read, and frees the buffers."""
    results: dict[HostPieces, Restored] = {}
    together: dict[Mesh, list[HostPieces]] = collections.defaultdict(list)
    for pieces in group:
        load, dtype = pieces.read.load, pieces.read.dtype
        if load.sharding is None:
            (results[pieces],) = pieces.take().values()
        elif load.direct or not pieces.buffers:
            results[pieces] = place(pieces.take(), load.shape, load.sharding, dtype)
        else:
            together[load.mesh].append(pieces)
    # A compiled call can gather only leaves over the same mesh.
    for over_mesh in together.values():
        buffers = [{d: host_bits_of(buffer) for d, buffer in pieces.take().items()} for pieces in over_mesh]
        reads = [pieces.read for pieces in over_mesh]
        arrays = gather_group([read.load for read in reads], [read.dtype for read in reads], buffers)
        for pieces, array in zip(over_mesh, arrays, strict=True):
            # Wait, so the buffers of this group are free before the next group is read.
            results[pieces] = array.block_until_ready()
    return [results[pieces] for pieces in group]


@functools.lru_cache(maxsize=256)
def _block_updater(plan: LoadPlan) -> jax.stages.Wrapped:
    dimension, pieces, wanted = plan.dimension, plan.num_pieces, spec_of(plan.axes)

    def split(array: jax.Array) -> jax.Array:
        rows = array.shape[dimension] // pieces
        return array.reshape(*array.shape[:dimension], pieces, rows, *array.shape[dimension + 1 :])

    def update(out: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
        # Reshapes are free, so the donated result is updated in place. It keeps the transfer dtype until the end: with
        # bitcasts around the update, XLA copies the whole result for each block.
        received = split(_receive(block, plan))
        return lax.dynamic_update_slice_in_dim(split(out), received, start, dimension + 1).reshape(out.shape)

    mapped = jax.shard_map(
        update,
        mesh=plan.mesh,
        in_specs=(wanted, plan.piece_sharding.spec, PartitionSpec()),
        out_specs=wanted,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


@functools.lru_cache(maxsize=256)
def _block_frame(
    plan: LoadPlan, dtype: np.dtype[np.generic]
) -> tuple[Callable[[], jax.Array], Callable[[jax.Array], jax.Array] | None]:
    """Programs that create the empty result (transfer dtype, padded) and that finish one shard (None if not needed)."""
    carrier, local = bits_dtype(dtype), plan.padded_shape
    start = jax.shard_map(
        lambda: jnp.zeros(local, carrier), mesh=plan.mesh, in_specs=(), out_specs=spec_of(plan.axes), check_vma=False
    )
    if local == plan.shard_shape and carrier == dtype:
        return jax.jit(start), None
    return jax.jit(start), jax.jit(lambda shard: from_bits(_trim(shard, plan), dtype))


class BlockGather:
    """Gathers one leaf, whose plan is not direct, in blocks of ``rows`` rows of each piece.

    Every process with a device in the leaf's mesh must create one.
    """

    def __init__(self, plan: LoadPlan, dtype: DTypeLike, rows: int) -> None:
        start, self._end = _block_frame(plan, np.dtype(dtype))
        self._plan, self._dtype = plan, dtype
        self._update = _block_updater(plan)
        nothing = memory.zeros(
            with_rows(plan.piece_shape, plan.dimension, rows), bits_dtype(dtype)
        )  # shared: neither written nor donated
        idle = [device for device, box in plan.boxes(process_index()).items() if box is None]
        self._idle = jax.device_put([nothing] * len(idle), idle) if idle else []
        self._out = start()

    def add(self, first: int, blocks: Buffers) -> None:
        """Sends the rows of every piece starting at row ``first``."""
        block = _pieces_array(self._plan, blocks, self._dtype, self._idle)
        self._out = self._update(self._out, block, np.int32(first))
        self._out.block_until_ready()  # without it, the blocks of all rounds would be in flight at once

    def finish(self) -> jax.Array:
        """Returns the leaf. Call it only once."""
        if self._end is None:
            return self._out
        shards, sharding = [shard.data for shard in self._out.addressable_shards], self._plan.sharding
        assert sharding is not None
        del self._out
        for index in range(len(shards)):  # one by one, so at most one shard exists twice
            shards[index] = self._end(shards[index]).block_until_ready()
        return jax.make_array_from_single_device_arrays(self._plan.shape, sharding, shards)


def cut_block(buffers: Buffers, dimension: int, first: int, rows: int) -> dict[Device, NDArray[np.generic]]:
    """Cuts rows out of each piece; copies only if they are not contiguous."""
    window = (*[slice(None)] * dimension, slice(first, first + rows))
    parts = {device: buffer[window] for device, buffer in buffers.items()}
    return {device: part if part.flags.c_contiguous else memory.copy(part) for device, part in parts.items()}


Placement: TypeAlias = "Sharding | Format"
"""The requested placement of an array: a sharding of any memory kind, or a Format, which also has a layout."""


def from_bytes(data: NDArray[np.generic], saved: SavedLeaf, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Returns the array that is stored as flat bytes, uint8[bytes]."""
    values = data.view(saved.dtype).reshape(saved.shape)
    if may_overflow(saved.dtype, dtype):
        check_fits(f"leaf {saved.name!r}", values, dtype)
    return values.astype(dtype, copy=False)


def from_host(values: NDArray[np.generic], sharding: Sharding) -> jax.Array:
    """Returns a ``jax.Array`` of values that this process holds."""
    # A copy for each device: if two aliased one buffer, donating one shard would overwrite the other.
    # The dtype is for hosts without a device in the sharding.
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: np.array(values[index]), dtype=values.dtype
    )


@functools.lru_cache(maxsize=64)
def _key_wrapper(impl: str, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(functools.partial(jax.random.wrap_key_data, impl=impl), out_shardings=sharding)


def wrap_keys(data: jax.Array, impl: str, sharding: Sharding) -> jax.Array:
    """Returns the PRNG keys of an implementation from their data."""
    if data.addressable_shards:
        return _key_wrapper(impl, sharding)(data)
    # A process without a device of this sharding cannot run the compiled call.
    shape = keys_of(data.shape, impl)
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=key_dtype(impl))


def sharding_of(placement: Placement | None) -> Sharding | None:
    """Returns the sharding of a placement."""
    return placement if isinstance(placement, Sharding) else getattr(placement, "sharding", None)


def with_devices(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns a tree whose shardings over an abstract mesh, as of ``jax.eval_shape``, are over the mesh that is set.

    Raises:
      CheckpointError: another mesh is set, or none; names the leaf.
    """

    def with_mesh(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
            return leaf
        if mesh.empty or mesh.abstract_mesh != sharding.mesh:
            raise CheckpointError(
                f"leaf {jax.tree_util.keystr(path)}: the requested sharding is over {sharding.mesh}, which has no devices. "
                "Call restore within jax.set_mesh of that mesh, or pass a sharding over a Mesh."
            )
        on_devices = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_devices)

    return jax.tree_util.tree_map_with_path(with_mesh, tree)


def in_default_memory(sharding: Sharding) -> Sharding:
    """Returns the same sharding in the devices' default memory, where collectives can run."""
    default = next(iter(sharding.device_set)).default_memory().kind
    return sharding if sharding.memory_kind in (None, default) else sharding.with_memory_kind(default)


def with_placement(array: jax.Array, placement: Placement) -> jax.Array:
    """Returns ``array`` with exactly the requested sharding, memory kind and layout."""
    sharding = sharding_of(placement)
    assert sharding is not None
    if sharding is not placement or in_default_memory(sharding) is not sharding:
        return jax.device_put(array, placement)
    if array.sharding == sharding or is_key(array):
        return array
    # The compiler returns PartitionSpec('a') for a requested ('a', None): the same layout, but they compare unequal.
    return assembled(array.shape, sharding, [shard.data for shard in array.addressable_shards], array.dtype)


def uncommitted(array: jax.Array) -> jax.Array:
    """Returns an equal array that is not bound to its device: computations with arrays on other devices may move it.

    JAX returns such arrays for values of the host only, and rejects a computation over arrays that are bound to different
    devices: a step that takes a counter from ``optimizer.init`` must take the restored one too.
    """
    if is_key(array):
        return jax.random.wrap_key_data(uncommitted(jax.random.key_data(array)), impl=jax.random.key_impl(array))
    (device,) = array.sharding.device_set
    with jax.default_device(device):
        return jax.device_put(jax.device_get(array))
