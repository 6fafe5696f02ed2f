"""Restores a list of stored leaves to their shardings: plan, read, agree, gather."""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from meshfeed._errors import SettingsError
from meshfeed._process import process_count, process_index
from meshfeed.checkpoint import _packed
from meshfeed.checkpoint._agreement import Agreement
from meshfeed.checkpoint._blocks import BlockGather, cut_block, rows_in_flight
from meshfeed.checkpoint._casts import may_overflow
from meshfeed.checkpoint._gather import (
    aligned_zeros,
    gather_group,
    host_bits_of,
    piece_shape,
    place,
)
from meshfeed.checkpoint._grid import Box, box_shape, take_rows
from meshfeed.checkpoint._load_plan import (
    GOOD_READS,
    LoadPlan,
    best_plan,
    devices_of_a_process,
    read_cost,
    replica_plan,
)
from meshfeed.checkpoint._options import RestoreOptions
from meshfeed.checkpoint._progress import Progress
from meshfeed.checkpoint._read import Target, UnitReader, units_for
from meshfeed.checkpoint._save_layout import free_axes
from meshfeed.checkpoint._stored import StoredArrays, StoredLeaf

SMALL_BYTES = 256 << 10
"""Leaves up to this size are read by one host and sent packed: a collective of their own costs more than it saves."""

_DEFAULT_GROUP_BYTES = 4 << 30
_BROADCAST_BYTES = 64 << 20  # a broadcast in blocks is faster than of whole shards, for which every device has zeros


@dataclasses.dataclass(eq=False)
class LeafRequest:
    """A leaf to restore.

    Attributes:
      leaf: as stored.
      shape: wanted, in stored form (key data for keys); may differ from the stored one, then cut or filled with zeros.
      dtype: wanted.
      sharding: wanted; None for a numpy array on every process.
      wrap: let integers that do not fit in ``dtype`` wrap around, instead of an error.
    """

    leaf: StoredLeaf
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any
    wrap: bool = False

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return math.prod(self.leaf.shape) * self.leaf.itemsize

    @property
    def must_fit(self) -> bool:
        """Whether the values have to be looked at before they are cast."""
        return not self.wrap and may_overflow(self.leaf.dtype, self.dtype)


@dataclasses.dataclass(eq=False)
class _Work:
    index: int
    request: LeafRequest
    plan: LoadPlan
    rows: tuple[int, int] | None = None  # only these rows of each piece: first, count
    buffers: dict[Any, np.ndarray[Any, Any]] = dataclasses.field(default_factory=dict)

    def targets(self) -> list[Target]:
        """Allocates this process's buffers, one for each different box; shared by devices until they are placed."""
        here = process_index()
        shared: dict[Box, np.ndarray[Any, Any]] = {}
        targets = []
        for device, box in self.plan.boxes(here).items():
            shape = piece_shape(self.plan) if not self.plan.direct else box_shape(box or ())
            if self.rows is not None:
                shape = tuple(self.rows[1] if d == self.plan.dimension else size for d, size in enumerate(shape))
            if box is None:
                self.buffers[device] = aligned_zeros(shape, self.request.dtype)
                continue
            if self.rows is not None:
                box = take_rows(box, self.plan.dimension, *self.rows)
            if box not in shared:
                shared[box] = aligned_zeros(shape, self.request.dtype)
                targets.append(Target(box, shared[box]))
            self.buffers[device] = shared[box]
        return targets

    def own_buffers(self) -> dict[Any, np.ndarray[Any, Any]]:
        """Buffers by device, a copy of its own for each CPU device, which would alias a shared one."""
        seen: set[int] = set()
        own = {}
        for device, buffer in self.buffers.items():
            if id(buffer) in seen and device.platform == "cpu":
                copy = aligned_zeros(buffer.shape, buffer.dtype)
                copy[...] = buffer
                buffer = copy
            seen.add(id(buffer))
            own[device] = buffer
        return own

    def large(self, limit: int | None) -> bool:
        """Whether it is gathered in blocks: because of the limit, or because whole broadcasts thrash memory."""
        if self.plan.direct or not self.plan.shape:
            return False
        return self.extra_bytes() > self.block_bytes(limit)

    def block_bytes(self, limit: int | None) -> int:
        """Bytes in flight while it is gathered in blocks."""
        if limit is None:
            return _BROADCAST_BYTES if self.plan.broadcast else sys.maxsize
        return limit // 2

    def extra_bytes(self) -> int:
        """Memory of this process beside the result while it is gathered; the same bound on every process."""
        local = devices_of_a_process(self.plan.sharding)
        itemsize = self.request.dtype.itemsize
        if self.plan.direct:
            return self.request.nbytes * local // max(1, len(self.plan.sharding.device_set))
        shard = math.prod(self.plan.sharding.shard_shape(self.plan.shape)) * itemsize
        return local * (math.prod(piece_shape(self.plan)) * itemsize + shard)


def choose_replica_axis(requests: Sequence[LeafRequest], options: RestoreOptions) -> str | None:
    """The mesh axis of replicas: the one named, or that which leaves least to read.

    Raises:
      SettingsError: ``replica_axis`` names no axis, or ``primary_replica`` lies outside it.
    """
    meshes = {r.sharding.mesh for r in requests if isinstance(r.sharding, NamedSharding)}
    if isinstance(options.replica_axis, int):
        names = {
            mesh.axis_names[options.replica_axis] for mesh in meshes if options.replica_axis < len(mesh.axis_names)
        }
        axis = next(iter(sorted(names)), None)
    elif options.replica_axis is not None:
        axis = options.replica_axis
    else:
        axis = _cheapest_axis(requests, options.primary_replica)
    sizes = [mesh.shape[axis] for mesh in meshes if axis in mesh.shape]
    if options.replica_axis is not None and meshes and not sizes:
        raise SettingsError(
            f"replica_axis={options.replica_axis!r}: the meshes have the axes "
            f"{sorted({name for mesh in meshes for name in mesh.axis_names})}. Name one of them.",
            setting="replica_axis",
        )
    if sizes and options.primary_replica >= min(sizes):
        raise SettingsError(
            f"primary_replica={options.primary_replica}: mesh axis {axis!r} has size {min(sizes)}",
            setting="primary_replica",
        )
    return axis


def _cheapest_axis(requests: Sequence[LeafRequest], index: int) -> str | None:
    spread = [request for request in requests if isinstance(request.sharding, NamedSharding)]
    names = sorted({name for request in spread for name in free_axes(request.sharding)})
    costs = {}
    for name in names:
        if any(index >= request.sharding.mesh.shape.get(name, index + 1) for request in spread):
            continue
        plans = [replica_plan(request.sharding, request.shape, name, index) for request in spread]
        costs[name] = sum(
            read_cost(plan, request.leaf.units, request.leaf.itemsize).total
            for plan, request in zip(plans, spread, strict=True)
        )
    return min(names, key=lambda name: costs.get(name, math.inf), default=None)


def _plan_all(
    requests: Sequence[LeafRequest], options: RestoreOptions
) -> tuple[list[_Work], list[int], dict[int, int]]:
    """Plans of leaves that their devices read, indices of those that are sent packed, and bytes read by host."""
    works: list[_Work] = []
    packed: list[int] = []
    loads: collections.Counter[int] = collections.Counter()
    several = process_count() > 1
    axis = choose_replica_axis(requests, options) if options.restore == "single_replica" else None
    for index, request in enumerate(requests):
        spread = several and options.restore != "every_host"
        if spread and (request.sharding is None or request.nbytes <= SMALL_BYTES):
            packed.append(index)
            continue
        if request.sharding is None:
            works.append(_Work(index, request, LoadPlan(_HERE, request.shape)))
            continue
        units = request.leaf.units
        plan = LoadPlan(request.sharding, request.shape)
        if spread and options.restore == "once":
            plan, cost = best_plan(request.sharding, request.shape, units, request.leaf.itemsize)
            if cost.ratio > GOOD_READS:
                packed.append(index)
                continue
            loads.update(dict(cost.by_process))
        elif options.restore == "single_replica":
            plan = replica_plan(request.sharding, request.shape, axis, options.primary_replica)
            if spread:
                loads.update(dict(read_cost(plan, units, request.leaf.itemsize).by_process))
        works.append(_Work(index, request, plan))
    return works, packed, dict(loads)


class _HostDevice:
    """Stands for the memory of this process where a numpy array is wanted."""

    platform = "host"

    @property
    def process_index(self) -> int:
        return process_index()


class _HostSharding:
    """The sharding of such an array: whole, on one such device."""

    device_set = frozenset((_HostDevice(),))

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, Any]:
        return {device: tuple(slice(0, size) for size in shape) for device in self.device_set}

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape


_HERE = _HostSharding()


def restore_leaves(
    stored: StoredArrays, requests: Sequence[LeafRequest], options: RestoreOptions, agreement: Agreement
) -> list[Any]:
    """Restores all leaves; every process of the job calls it with the same requests.

    Args:
      stored: the item.
      requests: what is wanted.
      options: how.
      agreement: used before each collective.

    Returns:
      a ``jax.Array`` for each request with a sharding, else a numpy array.

    Raises:
      CheckpointError: on all hosts, when one could not read.
      DamagedCheckpointError: on all hosts, when one found bytes changed.
    """
    results: list[Any] = [None] * len(requests)
    works, packed, loads = agreement.attempt(lambda: _plan_all(requests, options))
    limit = options.memory_limit_bytes
    with Progress(stored.directory, sum(request.nbytes for request in requests)) as progress:
        in_flight = None if limit is None else limit // 2
        reader = UnitReader(
            stored,
            verify=options.verify,
            bytes_in_flight=in_flight,
            on_bytes=progress.add,
            must_fit={request.leaf.name: request.dtype for request in requests if request.must_fit},
        )
        for group in _groups(works, limit):
            if group[0].large(limit):
                large = group[0]
                results[large.index] = _restore_in_blocks(large, reader, agreement, large.block_bytes(limit))
                continue
            agreement.attempt(lambda group=group: _read_group(group, reader))
            _finish_group(group, results)
        if packed:
            _exchange_packed(requests, packed, loads, results, reader, agreement, limit)
        progress.finish(reader.bytes_read, sum(_result_bytes(result) for result in results))
    return results


def _result_bytes(result: Any) -> int:
    if isinstance(result, np.ndarray):
        return result.nbytes
    return sum(shard.data.nbytes for shard in result.addressable_shards)


def _groups(works: Sequence[_Work], limit: int | None) -> list[list[_Work]]:
    """Leaves that are read and gathered together; a large one by itself."""
    groups: list[list[_Work]] = []
    room = 0
    for work in works:
        extra = work.extra_bytes()
        if work.large(limit):
            groups.append([work])
            room = 0
            continue
        if not groups or extra > room:
            groups.append([])
            room = limit or _DEFAULT_GROUP_BYTES
        groups[-1].append(work)
        room -= extra
    return groups


def _read_group(group: Sequence[_Work], reader: UnitReader) -> None:
    wanted: list[tuple[StoredLeaf, int, Callable[[Box, np.ndarray[Any, Any]], None]]] = []
    for work in group:
        for number, targets in units_for(work.request.leaf, work.targets()).items():

            def take(box: Box, values: np.ndarray[Any, Any], targets: list[Target] = targets) -> None:
                for target in targets:
                    target.fill(box, values)

            wanted.append((work.request.leaf, number, take))
    reader.read(wanted)


def _finish_group(group: Sequence[_Work], results: list[Any]) -> None:
    together: dict[Any, list[_Work]] = collections.defaultdict(list)
    for work in group:
        if work.plan.sharding is _HERE:
            (results[work.index],) = work.buffers.values()
        elif work.plan.direct or not work.buffers:
            results[work.index] = place(work.own_buffers(), work.plan.shape, work.plan.sharding, work.request.dtype)
        else:
            together[work.plan.sharding.mesh].append(work)
            continue
        work.buffers = {}
    for works in together.values():
        buffers = [{device: host_bits_of(buffer) for device, buffer in work.own_buffers().items()} for work in works]
        dtypes = [work.request.dtype for work in works]
        for work, array in zip(works, gather_group([w.plan for w in works], dtypes, buffers), strict=True):
            array.block_until_ready()
            results[work.index] = array
            work.buffers = {}


def _restore_in_blocks(work: _Work, reader: UnitReader, agreement: Agreement, limit: int) -> Any:
    """Reads and gathers one large leaf within ``limit`` bytes in flight, or a unit a device where that is more."""
    plan, request, here = work.plan, work.request, process_index()
    local = devices_of_a_process(plan.sharding)
    read_rows, sent_rows = rows_in_flight(plan, request.leaf.units, request.dtype.itemsize, local, limit)
    takes_part = any(device.process_index == here for device in plan.sharding.device_set)
    gather = BlockGather(plan, request.dtype) if takes_part else None
    for first in range(0, plan.piece, read_rows):
        _read_and_send(_Work(work.index, request, plan, rows=(first, read_rows)), sent_rows, reader, agreement, gather)
    if gather is None:
        return place({}, plan.shape, plan.sharding, request.dtype)
    return gather.finish()


def _read_and_send(
    part: _Work, sent_rows: int, reader: UnitReader, agreement: Agreement, gather: BlockGather | None
) -> None:
    # A function of its own, so that the buffers of one block are gone before the next is read.
    agreement.attempt(lambda: _read_group([part], reader))
    assert part.rows is not None
    first, count = part.rows
    for at in range(0, count, sent_rows):
        at = min(at, count - sent_rows)  # the last block may overlap, so that one program serves all
        if gather is not None:
            blocks = cut_block(part.buffers, part.plan.dimension, at, sent_rows)
            gather.add(first + at, {device: host_bits_of(block) for device, block in blocks.items()})


def _exchange_packed(
    requests: Sequence[LeafRequest],
    packed: Sequence[int],
    loads: dict[int, int],
    results: list[Any],
    reader: UnitReader,
    agreement: Agreement,
    limit: int | None,
) -> None:
    leaves = [requests[index].leaf for index in packed]
    targets: list[list[Target]] = []
    works: list[_Work] = []
    for index in packed:
        request = requests[index]
        work = _Work(index, request, LoadPlan(_HERE if request.sharding is None else request.sharding, request.shape))
        targets.append(work.targets())
        works.append(work)

    def deliver(number: int, box: Box, values: np.ndarray[Any, Any]) -> None:
        for target in targets[number]:
            target.fill(box, values)

    owned = _packed.assign_units(leaves, range(process_count()), loads)
    _packed.exchange(leaves, owned, reader, deliver, agreement, limit)
    _finish_group(works, results)
