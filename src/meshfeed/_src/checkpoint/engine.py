"""Restores a list of stored leaves to their shardings in four stages: plan, read, agree, gather."""

from __future__ import annotations

import collections
import dataclasses
import gc
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshfeed._src.base.coordination import process_count
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.checkpoint import packed as checkpoint_packed
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.block_restore import restore_in_blocks
from meshfeed._src.checkpoint.gather import gather_group, host_bits_of, place
from meshfeed._src.checkpoint.grid import Box
from meshfeed._src.checkpoint.load_plan import GOOD_READS, LoadPlan, best_plan, read_cost, replica_plan
from meshfeed._src.checkpoint.options import RestoreOptions
from meshfeed._src.checkpoint.progress import RestoreProgress
from meshfeed._src.checkpoint.read import Target, UnitReader
from meshfeed._src.checkpoint.save_layout import free_axes
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed._src.checkpoint.work import HERE, LeafRequest, Work, read_group

SMALL_BYTES = 256 << 10
"""Bytes; a leaf up to this size is read by one host and sent packed: its own collective costs more than it saves."""

_DEFAULT_GROUP_BYTES = 4 << 30


def choose_replica_axis(requests: Sequence[LeafRequest], options: RestoreOptions) -> str | None:
    """Returns the mesh axis of replicas: the one named, or the one that requires the fewest bytes to be read.

    Raises:
      SettingsError: ``replica_axis`` does not name an axis, or ``primary_replica`` is out of range for it.
    """
    meshes = {r.sharding.mesh for r in requests if isinstance(r.sharding, NamedSharding)}
    if isinstance(options.replica_axis, int):
        number = options.replica_axis
        names = {m.axis_names[number] for m in meshes if -len(m.axis_names) <= number < len(m.axis_names)}
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


def _plan_all(requests: Sequence[LeafRequest], options: RestoreOptions) -> tuple[list[Work], list[int], dict[int, int]]:
    """Returns plans for leaves that their devices read, indices of leaves to send packed, and bytes read per host."""
    works: list[Work] = []
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
            works.append(Work(index, request, LoadPlan(HERE, request.shape)))
            continue
        units = request.leaf.units
        plan = LoadPlan(request.sharding, request.shape)
        if spread and options.restore == "once":
            plan, cost = best_plan(request.sharding, request.shape, units, request.leaf.itemsize)
            if cost.ratio > GOOD_READS:
                # The chunks fit no cut of this sharding: read each one once and send it to every host.
                packed.append(index)
                continue
            loads.update(dict(cost.by_process))
        elif options.restore == "single_replica":
            plan = replica_plan(request.sharding, request.shape, axis, options.primary_replica)
            if spread:
                loads.update(dict(read_cost(plan, units, request.leaf.itemsize).by_process))
        works.append(Work(index, request, plan))
    return works, packed, dict(loads)


def restore_leaves(
    stored: StoredArrays, requests: Sequence[LeafRequest], options: RestoreOptions, agreement: Agreement
) -> list[Any]:
    """Restores all leaves. Every process of the job must call it with the same requests.

    Args:
      stored: the stored item.
      requests: the leaves to restore.
      options: how to restore them.
      agreement: used before each collective.

    Returns:
      a ``jax.Array`` for each request with a sharding, otherwise a numpy array, in the order of ``requests``.

    Raises:
      CheckpointError: on all hosts, if any host could not read.
      DamagedCheckpointError: on all hosts, if any host read bytes that differ from those written.
    """
    if options.dispatch is not None:
        return _restore_dispatched(stored, requests, options, agreement)
    results: list[Any] = [None] * len(requests)
    works, packed, loads = agreement.attempt(lambda: _plan_all(requests, options))
    limit = _limit_bytes(requests, options, agreement)
    with RestoreProgress(stored.directory, sum(request.nbytes for request in requests)) as progress:
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
                results[large.index] = restore_in_blocks(large, reader, agreement, large.block_bytes(limit))
            else:
                agreement.attempt(lambda group=group: read_group(group, reader))
                _finish_group(group, results)
            gc.collect(0)  # JAX frees host memory that it used without a copy only at a collection
        if packed:
            _exchange_packed(requests, packed, loads, results, reader, agreement, limit)
        progress.finish(reader.bytes_read, sum(_result_bytes(result) for result in results))
    return results


def _restore_dispatched(
    stored: StoredArrays, requests: Sequence[LeafRequest], options: RestoreOptions, agreement: Agreement
) -> list[Any]:
    """Restores on the workers what Orbax stores and casts as we do; the rest, mostly small leaves, is restored here."""
    assert options.dispatch is not None
    remote = [
        index
        for index, request in enumerate(requests)
        if request.sharding is not None and request.leaf.impl is None and not (request.leaf.carried or request.must_fit)
    ]
    here = sorted(set(range(len(requests))) - set(remote))
    results: list[Any] = [None] * len(requests)
    if remote:
        dispatch, wanted = options.dispatch, [requests[index] for index in remote]
        for index, array in zip(remote, agreement.attempt(lambda: dispatch(stored, wanted)), strict=True):
            results[index] = array
    rest = dataclasses.replace(options, dispatch=None)
    for index, result in zip(
        here, restore_leaves(stored, [requests[index] for index in here], rest, agreement), strict=True
    ):
        results[index] = result
    return results


def _limit_bytes(requests: Sequence[LeafRequest], options: RestoreOptions, agreement: Agreement) -> int | None:
    """Returns the memory limit in bytes. It must be the same on every host because plans depend on it."""
    if options.memory_limit_bytes is not None or options.memory_fraction is None:
        return options.memory_limit_bytes
    shards = [(r.sharding.shard_shape(r.shape), r.dtype.itemsize) for r in requests if r.sharding is not None]
    free = _device_bytes() - sum(math.prod(shape) * itemsize for shape, itemsize in shards)
    return min(agreement.collect(max(1, int(free * options.memory_fraction))).values())


def _device_bytes() -> int:
    # CPU devices report no statistics; the limit is then the host's memory.
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _result_bytes(result: Any) -> int:
    if isinstance(result, np.ndarray):
        return result.nbytes
    return sum(shard.data.nbytes for shard in result.addressable_shards)


def _groups(works: Sequence[Work], limit: int | None) -> list[list[Work]]:
    """Splits leaves into groups that are read and gathered together; a large leaf is its own group."""
    groups: list[list[Work]] = []
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


def _finish_group(group: Sequence[Work], results: list[Any]) -> None:
    together: dict[Any, list[Work]] = collections.defaultdict(list)
    for work in group:
        if work.plan.sharding is HERE:
            (results[work.index],) = work.buffers.values()
        elif work.plan.direct or not work.buffers:
            results[work.index] = place(work.own_buffers(), work.plan.shape, work.plan.sharding, work.request.dtype)
        else:
            together[work.plan.sharding.mesh].append(work)
            continue
        work.buffers = {}
    # A compiled call can gather only leaves over the same mesh.
    for works in together.values():
        buffers = [{device: host_bits_of(buffer) for device, buffer in work.own_buffers().items()} for work in works]
        dtypes = [work.request.dtype for work in works]
        for work, array in zip(works, gather_group([w.plan for w in works], dtypes, buffers), strict=True):
            # Wait, so the buffers of this group are free before the next group is read.
            array.block_until_ready()
            results[work.index] = array
            work.buffers = {}


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
    works: list[Work] = []
    for index in packed:
        request = requests[index]
        work = Work(index, request, LoadPlan(HERE if request.sharding is None else request.sharding, request.shape))
        targets.append(work.targets())
        works.append(work)

    def deliver(number: int, box: Box, values: np.ndarray[Any, Any]) -> None:
        for target in targets[number]:
            target.fill(box, values)

    owned = checkpoint_packed.assign_units(leaves, range(process_count()), loads)
    checkpoint_packed.exchange(leaves, owned, reader, deliver, agreement, limit)
    _finish_group(works, results)
