"""Restores an item of arrays: plans what is read of each leaf, reads it, places the values, and reports what was done.

A :class:`RestorePlan` goes in; the values of each of its reads come out, and their conversion to leaves. Before values go
over the network, all hosts agree that every one of them could read.
"""

from __future__ import annotations

import collections
import gc
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from etils import epath

from meshfeed._src.arrays.reshard import without_callers_settings
from meshfeed._src.base.coordination import format_differences, process_index
from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.machine import host_memory_bytes
from meshfeed._src.base.types import PyTree
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.exchange import exchange
from meshfeed._src.checkpoint.layout import rows_in_flight
from meshfeed._src.checkpoint.leaves import Leaf
from meshfeed._src.checkpoint.match import match_tree
from meshfeed._src.checkpoint.options import RestoreOptions
from meshfeed._src.checkpoint.place import BlockGather, cut_block, gather, host_bits_of, place, with_devices
from meshfeed._src.checkpoint.plan import LeafRead, Restored, RestorePlan
from meshfeed._src.checkpoint.read import BYTES_IN_FLIGHT, HostPieces, UnitReader
from meshfeed._src.checkpoint.report import RestoreProgress
from meshfeed._src.checkpoint.stored import StoredArrays, find_item
from meshfeed._src.state.state import digest_of

_GROUP_BYTES = 4 << 30  # memory of the leaves that are read and gathered together, without a limit

Dispatch: TypeAlias = Callable[[StoredArrays, Sequence[LeafRead]], Sequence[jax.Array]]
"""Restores arrays on remote workers instead of in this process."""


def open_item(directory: epath.PathLike, options: RestoreOptions) -> StoredArrays:
    """Opens an item for a restore; ``directory`` may also be a step's folder with only that item."""
    return StoredArrays(find_item(directory), options.memory_limit_bytes, options.metadata_key)


def restore_agreement(directory: epath.PathLike, options: RestoreOptions) -> Agreement:
    """Returns the agreement of a restore that is not part of a larger operation."""
    return Agreement(f"restoring {directory}", options.timeout_seconds, kind="restoring an item")


def restore_tree(
    item: epath.PathLike | StoredArrays,
    abstract_tree: PyTree,
    options: RestoreOptions,
    agreement: Agreement,
    dispatch: Dispatch | None = None,
    *,
    partial: bool = False,
    strict: bool = True,
) -> PyTree:
    """Restores ``abstract_tree`` from an item, which may be open. Every process of the job must call it with the same tree.

    Raises:
      CheckpointError: the trees differ (the message names the leaves), or a host could not read.
    """
    mesh = jax.sharding.get_mesh()

    def plan() -> RestorePlan:
        wanted = with_devices(abstract_tree, mesh)
        stored = item if isinstance(item, StoredArrays) else open_item(item, options)
        return match_tree(stored, wanted, partial=partial, strict=strict)

    return restore(plan, options, agreement, dispatch)


def restore(
    make_plan: Callable[[], RestorePlan],
    options: RestoreOptions,
    agreement: Agreement,
    dispatch: Dispatch | None = None,
) -> PyTree:
    """Restores what a plan describes, whose ways it chooses. Every process of the job must call it with the same plan.

    Raises:
      CheckpointError: on all hosts, if any host could not plan or read.
      DamagedCheckpointError: on all hosts, if any host read bytes that differ from those written.
    """
    with without_callers_settings():  # leaves may be on devices outside the caller's jax.set_mesh
        plan = agreement.attempt(lambda: make_plan().with_ways(options, remote=dispatch is not None))
        if len(agreement.participants) > 1:
            _check_same(agreement, plan)
        restored: dict[LeafRead, Restored] = {}
        remote = [read for read in plan.reads if read.way == "remote"]
        if dispatch is not None and remote:
            arrays = agreement.attempt(lambda: dispatch(plan.stored, remote))
            restored.update(zip(remote, arrays, strict=True))
        here = [read for read in plan.reads if read.way != "remote"]
        restored.update(_restore_here(plan.stored, here, options, agreement))
        leaves: list[Leaf] = [leaf.leaf(restored) for leaf in plan.leaves]
        return jax.tree_util.tree_unflatten(plan.structure, leaves)


def _check_same(agreement: Agreement, plan: RestorePlan) -> None:
    """Raises on every host if hosts restore different saves or trees: their values would be mixed, or they would hang."""
    identity = plan.stored.manifest.identity or {}
    save = f"{identity['id']} of step {identity.get('step')}" if "id" in identity else "without an identity"
    sent = [
        [read.leaf.name, read.way, read.dtype.name, list(read.load.shape)]
        for read in plan.reads
        if read.way == "packed" or not read.load.direct
    ]
    found = agreement.collect([save, digest_of(sent)])
    same_tree = "the same tree, with the same shardings, and the same settings of the restore"
    for number, (what, remedy) in enumerate(
        (("saves at the same time", "the same folder and step"), ("trees", same_tree))
    ):
        if (differing := format_differences({host: values[number] for host, values in found.items()})) is not None:
            raise CheckpointError(
                f"{plan.stored.directory}: hosts restore different {what} ({differing}). Pass {remedy} on every host."
            )


def _restore_here(
    stored: StoredArrays, reads: Sequence[LeafRead], options: RestoreOptions, agreement: Agreement
) -> dict[LeafRead, Restored]:
    in_pieces, packed = ([read for read in reads if read.way == way] for way in ("pieces", "packed"))
    limit = _limit_bytes(reads, options, agreement)
    restored: dict[LeafRead, Restored] = {}
    with RestoreProgress(stored.directory, sum(read.nbytes for read in reads)) as progress:
        must_fit = {read.leaf.name: read.dtype for read in reads if read.must_fit}
        in_flight = BYTES_IN_FLIGHT if limit is None else limit // 2
        reader = UnitReader(stored, options.verify, progress.add, bytes_in_flight=in_flight, must_fit=must_fit)
        stages = _Stages(reader, agreement, limit)
        for group in _groups(in_pieces, limit):
            if (block_bytes := group[0].block_bytes(limit)) is not None:
                restored[group[0]] = stages.in_blocks(group[0], block_bytes)
            else:
                restored.update(zip(group, stages.together(group), strict=True))
            gc.collect(0)  # JAX frees host memory that it used without a copy only at a collection
        if packed:
            restored.update(zip(packed, stages.packed(packed, in_pieces), strict=True))
        progress.finish(sum(map(_held_bytes, restored.values())))
    return restored


class _Stages(NamedTuple):
    """How values are read and placed: leaves together, one leaf in blocks, or packed. ``limit`` is in bytes, or None."""

    reader: UnitReader
    agreement: Agreement
    limit: int | None

    def together(self, group: Sequence[LeafRead]) -> list[Restored]:
        """Reads leaves together and gathers those over one mesh together."""
        pieces = [HostPieces(read) for read in group]
        self.agreement.attempt(lambda: self.reader.read([(one.read.leaf, one.targets()) for one in pieces]))
        return gather(pieces)

    def in_blocks(self, read: LeafRead, limit: int) -> Restored:
        """Reads and gathers one large leaf with at most ``limit`` bytes in flight, or one unit per device."""
        load, sharding, pieces = read.load, read.load.sharding, HostPieces(read)
        assert sharding is not None
        read_rows, sent_rows = rows_in_flight(load, read.leaf.units, read.dtype.itemsize, limit)
        takes_part = any(device.process_index == process_index() for device in sharding.device_set)
        blocks = BlockGather(load, read.dtype, sent_rows) if takes_part else None
        for first in range(0, load.piece, read_rows):
            rows = first, read_rows
            self.agreement.attempt(lambda rows=rows: self.reader.read([(read.leaf, pieces.targets(rows))]))
            count = min(read_rows, load.piece - first)
            for at in range(0, count, sent_rows):
                at = min(at, count - sent_rows)  # the last block may overlap, so one program serves all
                if blocks is not None:
                    block = cut_block(pieces.buffers, load.dimension, at, sent_rows)
                    blocks.add(first + at, {device: host_bits_of(part) for device, part in block.items()})
        pieces.buffers = {}
        return place({}, load.shape, sharding, read.dtype) if blocks is None else blocks.finish()

    def packed(self, group: Sequence[LeafRead], others: Sequence[LeafRead]) -> list[Restored]:
        """Reads each unit of leaves on one host, which has little to read of the others, and sends it to all hosts."""
        pieces = [HostPieces(read) for read in group]
        loads: collections.Counter[int] = collections.Counter()
        for other in others:
            loads.update(dict(other.cost(other.load).by_process))
        wanted = [(one.read.leaf, one.targets()) for one in pieces]
        exchange(wanted, loads, self.reader, self.agreement, self.limit)
        return gather(pieces)


def _limit_bytes(reads: Sequence[LeafRead], options: RestoreOptions, agreement: Agreement) -> int | None:
    """Returns the memory limit in bytes. It must be the same on every host because plans depend on it."""
    if options.memory_limit_bytes is not None or options.memory_fraction is None:
        return options.memory_limit_bytes
    shards = [(read.load.shard_shape, read.dtype.itemsize) for read in reads if read.load.sharding is not None]
    free = _device_bytes() - sum(math.prod(shape) * itemsize for shape, itemsize in shards)
    return min(agreement.collect(max(1, int(free * options.memory_fraction))).values())


def _device_bytes() -> int:
    # CPU devices report no statistics; the limit is then the host's memory.
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else host_memory_bytes()


def _held_bytes(values: Restored) -> int:
    if isinstance(values, np.ndarray):
        return values.nbytes
    return sum(shard.data.nbytes for shard in values.addressable_shards)


def _groups(reads: Sequence[LeafRead], limit: int | None) -> list[list[LeafRead]]:
    """Splits leaves into groups that are read and gathered together; a leaf gathered in blocks is its own group."""
    groups: list[list[LeafRead]] = []
    room = -1
    for read in reads:
        in_blocks, extra = read.block_bytes(limit) is not None, read.extra_bytes()
        if in_blocks or extra > room:
            groups.append([])
            room = _GROUP_BYTES if limit is None else min(limit, _GROUP_BYTES)
        groups[-1].append(read)
        room = -1 if in_blocks else room - extra
    return groups
