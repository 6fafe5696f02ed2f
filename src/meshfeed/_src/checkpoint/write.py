"""How arrays are written: each device's slice, cut on the device, with the digests of what is stored.

Replicas share the writing of an array: each device cuts out its slice on the device and on unsigned bits (slicing a float8
quiets its NaNs on JAX 0.12).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from meshfeed._src.arrays.reshard import from_bits, to_bits
from meshfeed._src.base.coordination import process_count
from meshfeed._src.checkpoint.layout import (
    Box,
    Grid,
    ReplicaCut,
    Shape,
    box_of_index,
    choose_cut,
    chunk_shape,
    cut_sharding,
    spec_axes,
    spec_of,
)
from meshfeed._src.checkpoint.leaves import Entry, carrier_of, check_hosts, describe_array, half_bits, is_key, stored_as
from meshfeed._src.checkpoint.stored import digests_of


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """What an Orbax handler's settings say about the writing of arrays."""

    share: bool  # replicas share the writing of an array
    min_slice_bytes: int | None  # the least bytes of a shared slice; None chooses, see choose_cut
    replica_id: int | None  # the replica that this process writes; None means the one it holds
    metadata_key: str | None  # name of TensorStore's metadata files
    has_dispatcher: bool  # Orbax's workers write; there are then no digests


class ArrayWrite(NamedTuple):
    """How one parameter is written."""

    array: jax.Array  # what Orbax writes
    args: ocp.type_handlers.SaveArgs
    sharding: Sharding  # with which Orbax restores the parameter
    entry: Entry | None = None  # in the manifest; None if Orbax will reject the array
    digests: ShardDigests | None = None  # of what this process writes


def plan_write(
    name: str, value: jax.Array, args: ocp.type_handlers.SaveArgs, options: WriteOptions, *, early: bool, pinned: bool
) -> ArrayWrite:
    """Cuts the array of a parameter for saving. All processes of its sharding must call it in the same order.

    With ``early``, it is copied to the host now, so that the caller may donate it; else while it is written. With ``pinned``,
    it is copied to page-locked memory of the host, if the devices have it.
    """
    if process_count() > 1 and value.is_fully_addressable:
        return ArrayWrite(value, args, value.sharding)  # Orbax rejects it with a clear message
    check_hosts(f"parameter {name!r}", value)
    entry = describe_array(value)
    if options.metadata_key is not None:
        entry["metadata_key"] = options.metadata_key
    if value.size == 0:
        nothing = _placeholder(value)
        return ArrayWrite(nothing, args, nothing.sharding, entry)
    if is_key(value):
        data = jax.random.key_data(value)
        cell = data.sharding.shard_shape(data.shape)
        entry |= {"cell": list(cell), "chunk": list(cell)}
        return ArrayWrite(value, args, data.sharding, entry, ShardDigests(data, cell, options.replica_id, early))
    dtype = np.dtype(args.dtype or value.dtype)
    array = value
    if dtype != value.dtype:
        array = jax.jit(lambda x: x.astype(dtype), out_shardings=value.sharding)(value)
    cut = None
    if options.share and early:
        cut = choose_cut(array.shape, dtype.itemsize, array.sharding, options.min_slice_bytes)
    if cut is not None:
        assert isinstance(array.sharding, NamedSharding)
        array = _cutter(array.sharding, array.shape, dtype, cut)(array)
    elif carrier_of(dtype) != dtype:
        array = _carrier(array.sharding, array.ndim)(array)
    piece = array.sharding.shard_shape(array.shape)
    cell, chunk_byte_size = chunk_shape(array.shape, piece, array.dtype.itemsize)
    # Narrow dtypes keep their own name: Orbax silently casts if the stored dtype differs from the requested one, so a
    # float8 stored as the uint8 of its bits would become 56 instead of 1.
    entry.pop("stored", None)
    entry |= {"dtype": dtype.name, **stored_as(dtype), "cell": list(cell)}
    asked = args.chunk_byte_size or chunk_byte_size
    args = dataclasses.replace(args, dtype=None, chunk_byte_size=asked)
    if options.has_dispatcher:
        return ArrayWrite(array, args, value.sharding, entry)
    if asked is None:  # a slice is a chunk (or a few, if Orbax slices too): known without opening it
        entry["chunk"] = entry["cell"]
    if early and pinned and (copied := _in_pinned_memory(array, options.replica_id)) is not None:
        digests = ShardDigests(copied, cell, options.replica_id, early=False, is_copy=True)
        return ArrayWrite(copied, args, value.sharding, entry, digests)
    return ArrayWrite(array, args, value.sharding, entry, ShardDigests(array, cell, options.replica_id, early))


_PINNED = "pinned_host"


def _in_pinned_memory(array: jax.Array, replica_id: int | None) -> jax.Array | None:
    """Returns a copy in page-locked host memory, which the device fills by itself; None without such memory.

    On a GPU this is ten times as fast as a copy into memory that the system may move, and nobody waits for it: the copy is an
    array of its own, so the caller may donate the original at once. None also if other replicas would be copied in vain.
    """
    held = array.addressable_shards
    if {shard.replica_id for shard in held} != {held[0].replica_id if held and replica_id is None else replica_id}:
        return None
    for device in array.sharding.addressable_devices:
        kinds = {memory.kind for memory in device.addressable_memories()}
        if _PINNED not in kinds or array.sharding.memory_kind != device.default_memory().kind:
            return None
    return jax.device_put(array, array.sharding.with_memory_kind(_PINNED))


def _placeholder(value: jax.Array) -> jax.Array:
    # Orbax cannot store an array of size 0, so a single uint8 takes its place; restore ignores it.
    shape = (1,) * value.ndim
    sharding = value.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.make_array_from_callback(shape, sharding, lambda _: np.zeros(shape, np.uint8))


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
def _carrier(sharding: Sharding, rank: int) -> Callable[[jax.Array], jax.Array]:
    def carry(array: jax.Array) -> jax.Array:
        return _carry(to_bits(array), array.dtype)

    # On a mesh of Explicit axes, a lookup in a table has no sharding of its own.
    if isinstance(sharding, NamedSharding):
        spec = spec_of(spec_axes(sharding, rank))
        carry = jax.shard_map(carry, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(carry, out_shardings=sharding)


class ShardDigests:
    """Host copies of the slices of one array that this process writes, and their digests.

    Orbax's own transfer fills the same per-shard cache, so each slice is copied from the device once, and on CPU not at
    all. A digest is of a box of the shape ``cell``. Without ``early``, slices are copied only when :meth:`compute` runs. An
    array that ``is_copy`` is a copy that only the save has.
    """

    def __init__(
        self, array: jax.Array, cell: Shape, replica_id: int | None, early: bool, is_copy: bool = False
    ) -> None:
        self._grid, self._early, self._is_own = Grid(array.shape, cell), early, early or is_copy
        held = array.addressable_shards
        if replica_id is None and held:
            replica_id = held[0].replica_id
        written = [shard for shard in held if shard.replica_id == replica_id]
        self._shards: list[tuple[Box, jax.Array | NDArray[np.generic]]] = [
            (box_of_index(shard.index, array.shape), shard.data) for shard in written
        ]
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
            # An explicit transfer, which jax_transfer_guard permits.
            values = jax.device_get(data if self._is_own else data.copy())  # copied: jax.Array caches its host value
            digests |= digests_of(values, box, self._grid)
        return digests
