"""Restores a list of stored leaves to their shardings in four stages: plan, read, agree, gather."""

from __future__ import annotations

import collections
import dataclasses
import gc
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Self, TypeAlias

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, Sharding
from numpy.typing import NDArray

from meshfeed._src.base import memory
from meshfeed._src.base.coordination import process_count, process_index
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.arguments import RestoreOptions
from meshfeed._src.checkpoint.boxes import AnyMesh, Box, Shape, box_shape, free_axes, take_rows
from meshfeed._src.checkpoint.dtypes import may_overflow
from meshfeed._src.checkpoint.gather import BlockGather, cut_block, exchange, gather_group, host_bits_of, place
from meshfeed._src.checkpoint.load_plan import (
    GOOD_READS,
    Device,
    LoadPlan,
    best_plan,
    devices_of_a_process,
    read_cost,
    replica_plan,
    rows_in_flight,
)
from meshfeed._src.checkpoint.stored import StoredArrays, StoredLeaf, Target, UnitReader, wanted_units

_SMALL_BYTES = 256 << 10  # a leaf up to this size is sent packed: its own collective costs more than it saves

_GROUP_BYTES = 4 << 30
_BROADCAST_BYTES = 64 << 20  # broadcasting in blocks is faster than whole shards, for which every device needs zeros

Restored: TypeAlias = jax.Array | NDArray[np.generic]
"""A ``jax.Array`` for a request with a sharding, else a numpy array."""


@dataclasses.dataclass(eq=False)
class LeafRequest:
    """A leaf to restore.

    Attributes:
      leaf: the stored leaf.
      shape: requested shape in stored form (key data for PRNG keys). If it differs from the stored one, the array is
        truncated or padded with zeros.
      dtype: requested dtype.
      sharding: requested sharding; None for a numpy array on every process.
      wrap: let integers that do not fit in ``dtype`` wrap around instead of raising an error.
    """

    leaf: StoredLeaf
    shape: Shape
    dtype: np.dtype[np.generic]
    sharding: Sharding | None
    wrap: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the stored leaf in bytes."""
        return math.prod(self.leaf.shape) * self.leaf.itemsize

    @property
    def must_fit(self) -> bool:
        """Whether the values must be checked before they are cast."""
        return not self.wrap and may_overflow(self.leaf.dtype, self.dtype)

    def cost(self, plan: LoadPlan) -> dict[int, int]:
        """Returns process → bytes that it reads under a plan."""
        return dict(read_cost(plan, self.leaf.units, self.leaf.itemsize).by_process)


@dataclasses.dataclass(eq=False)
class Work:
    """One leaf being restored: its request, its plan and this process's buffers.

    Attributes:
      index: position of the request in the caller's list.
      request: the leaf to restore.
      plan: how it is read.
      rows: first row and number of rows of each piece that are read now; None means all.
      buffers: device → the host buffer that it reads into.
    """

    index: int
    request: LeafRequest
    plan: LoadPlan
    rows: tuple[int, int] | None = None
    buffers: dict[Device, NDArray[np.generic]] = dataclasses.field(default_factory=dict)

    def targets(self) -> list[Target]:
        """Returns this process's buffers, one per distinct box; devices share them until they are placed.

        A later call for other rows returns the same buffers, because fresh pages cost more than overwriting old ones.
        This is safe: arrays that aliased the buffers no longer exist, and every value is overwritten, because pieces
        are read in parts only if the leaf has the stored shape and the parts are whole units (``rows_in_flight``).
        """
        shared: dict[Box, NDArray[np.generic]] = {}
        for device, box in self.plan.boxes(process_index()).items():
            shape = box_shape(box or ()) if self.plan.direct else self.plan.piece_shape
            if self.rows is not None:
                if box is None:
                    continue  # it only receives: BlockGather supplies its block
                shape = tuple(self.rows[1] if d == self.plan.dimension else size for d, size in enumerate(shape))
                box = take_rows(box, self.plan.dimension, *self.rows)
            known = self.buffers.get(device) if box is None else shared.get(box, self.buffers.get(device))
            self.buffers[device] = memory.zeros(shape, self.request.dtype) if known is None else known
            if box is not None:
                shared[box] = self.buffers[device]
        return [Target(box, buffer) for box, buffer in shared.items()]

    def take_buffers(self) -> dict[Device, NDArray[np.generic]]:
        """Hands over the buffers, with a separate copy for each CPU device, which would alias a shared buffer."""
        seen: set[int] = set()
        own: dict[Device, NDArray[np.generic]] = {}
        for device, buffer in self.buffers.items():
            own[device] = buffer
            if id(buffer) in seen and device.platform == "cpu":
                own[device] = memory.zeros(buffer.shape, buffer.dtype)
                own[device][...] = buffer
            seen.add(id(buffer))
        self.buffers = {}
        return own

    def block_bytes(self, limit: int | None) -> int | None:
        """Returns the bytes in flight while it is gathered in blocks, or None if it is gathered whole.

        It is gathered in blocks because of the limit, or because broadcasting it whole thrashes memory.
        """
        most = limit // 2 if limit is not None else _BROADCAST_BYTES if self.plan.broadcast else sys.maxsize
        whole = self.plan.direct or not self.plan.shape or self.extra_bytes() <= most
        return None if whole else most

    def extra_bytes(self) -> int:
        """Returns this process's memory beyond the result while it is gathered; the same bound on every process."""
        sharding, itemsize = self.plan.sharding, self.request.dtype.itemsize
        local = devices_of_a_process(sharding)
        if sharding is None or self.plan.direct:
            return self.request.nbytes * local // (1 if sharding is None else len(sharding.device_set))
        return local * itemsize * (math.prod(self.plan.piece_shape) + math.prod(self.plan.shard_shape))


@dataclasses.dataclass
class Restore:
    """State shared by the stages of one restore.

    Attributes:
      reader: reads and checks units.
      agreement: confirms each read before its collectives.
      limit: the memory limit in bytes, or None.
    """

    reader: UnitReader
    agreement: Agreement
    limit: int | None

    def _read(self, group: Sequence[Work]) -> None:
        """Reads the parts of several leaves that this process's devices need into their buffers."""
        self.reader.read([unit for work in group for unit in wanted_units(work.request.leaf, work.targets())])

    def group(self, group: Sequence[Work]) -> dict[int, Restored]:
        """Reads leaves together and gathers those over one mesh together."""
        self.agreement.attempt(lambda: self._read(group))
        return _gather(group)

    def in_blocks(self, work: Work, limit: int) -> jax.Array:
        """Reads and gathers one large leaf with at most ``limit`` bytes in flight, or one unit per device."""
        plan, request = work.plan, work.request
        assert plan.sharding is not None
        read_rows, sent_rows = rows_in_flight(plan, request.leaf.units, request.dtype.itemsize, limit)
        takes_part = any(device.process_index == process_index() for device in plan.sharding.device_set)
        gather = BlockGather(plan, request.dtype, sent_rows) if takes_part else None
        for first in range(0, plan.piece, read_rows):
            work.rows = (first, read_rows)
            self.agreement.attempt(lambda: self._read([work]))
            for at in range(0, read_rows, sent_rows):
                at = min(at, read_rows - sent_rows)  # the last block may overlap, so one program serves all
                if gather is not None:
                    blocks = cut_block(work.buffers, plan.dimension, at, sent_rows)
                    gather.add(first + at, {device: host_bits_of(block) for device, block in blocks.items()})
        work.buffers = {}
        return place({}, plan.shape, plan.sharding, request.dtype) if gather is None else gather.finish()

    def packed(self, group: Sequence[Work], loads: dict[int, int]) -> dict[int, Restored]:
        """Reads each unit of leaves on one host and sends it to all hosts."""
        targets = [work.targets() for work in group]

        def deliver(number: int, box: Box, values: NDArray[np.generic]) -> None:
            for target in targets[number]:
                target.fill(box, values)

        leaves = [work.request.leaf for work in group]
        exchange(leaves, loads, self.reader, deliver, self.agreement, self.limit)
        return _gather(group)


def _gather(group: Sequence[Work]) -> dict[int, Restored]:
    """Returns the restored leaves by index, and frees the buffers of the group."""
    results: dict[int, Restored] = {}
    together: dict[Mesh, list[Work]] = collections.defaultdict(list)
    for work in group:
        plan = work.plan
        if plan.sharding is None:
            (results[work.index],) = work.take_buffers().values()
        elif plan.direct or not work.buffers:
            results[work.index] = place(work.take_buffers(), plan.shape, plan.sharding, work.request.dtype)
        else:
            together[plan.mesh].append(work)
    # A compiled call can gather only leaves over the same mesh.
    for works in together.values():
        buffers = [{d: host_bits_of(buffer) for d, buffer in work.take_buffers().items()} for work in works]
        arrays = gather_group([work.plan for work in works], [work.request.dtype for work in works], buffers)
        # Wait, so the buffers of this group are free before the next group is read.
        results |= {work.index: array.block_until_ready() for work, array in zip(works, arrays, strict=True)}
    return results


def choose_replica_axes(requests: Sequence[LeafRequest], options: RestoreOptions) -> dict[AnyMesh, str | None]:
    """Returns the axis of replicas of each mesh: the one named, or the one with the fewest bytes to read."""
    by_mesh: dict[AnyMesh, list[LeafRequest]] = collections.defaultdict(list)
    for request in requests:
        if isinstance(request.sharding, NamedSharding):
            by_mesh[request.sharding.mesh].append(request)
    axes = {mesh: _replica_axis(mesh, group, options) for mesh, group in by_mesh.items()}
    wanted, replica = options.replica_axis, options.primary_replica
    sizes = [(mesh.shape[axis], axis) for mesh, axis in axes.items() if axis is not None]
    if wanted is not None and axes and not sizes:
        names = sorted({name for mesh in axes for name in mesh.axis_names})
        raise SettingsError(
            f"replica_axis={wanted!r}: the meshes have the axes {names}. Pass one of them.", setting="replica_axis"
        )
    smallest, axis = min(sizes, default=(replica + 1, None))
    if replica >= smallest:
        text = f"primary_replica={replica}: mesh axis {axis!r} has size {smallest}"
        raise SettingsError(text, setting="primary_replica")
    return axes


def _replica_axis(mesh: AnyMesh, group: Sequence[LeafRequest], options: RestoreOptions) -> str | None:
    wanted, names = options.replica_axis, mesh.axis_names
    if wanted is None:
        return _cheapest_axis(mesh, group, options.primary_replica)
    if isinstance(wanted, int):
        return names[wanted] if -len(names) <= wanted < len(names) else None
    return wanted if wanted in names else None


def _cheapest_axis(mesh: AnyMesh, group: Sequence[LeafRequest], replica: int) -> str | None:
    shardings = [(request, request.sharding) for request in group if request.sharding is not None]
    names = sorted({name for _, sharding in shardings for name in free_axes(sharding)})

    def cost(name: str) -> float:
        if replica >= mesh.shape[name]:
            return math.inf
        return sum(
            sum(request.cost(replica_plan(sharding, request.shape, name, replica)).values())
            for request, sharding in shardings
        )

    return min(names, key=cost, default=None)


@dataclasses.dataclass
class Plans:
    """How the leaves of a restore are read.

    Attributes:
      works: leaves that their devices read.
      packed: leaves whose units are each read by one host and sent to all.
      loads: host → bytes that it reads for ``works``.
    """

    works: list[Work] = dataclasses.field(default_factory=list)
    packed: list[Work] = dataclasses.field(default_factory=list)
    loads: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)


def plan_all(requests: Sequence[LeafRequest], options: RestoreOptions) -> Plans:
    """Plans all leaves; the same on every process."""
    plans = Plans()
    several = process_count() > 1 and options.restore != "every_host"
    axes = choose_replica_axes(requests, options) if options.restore == "single_replica" else {}
    for index, request in enumerate(requests):
        sharding = request.sharding
        work = Work(index, request, LoadPlan(sharding, request.shape))
        if several and (sharding is None or request.nbytes <= _SMALL_BYTES):
            plans.packed.append(work)
            continue
        if sharding is not None and options.restore == "single_replica":
            axis = axes.get(sharding.mesh) if isinstance(sharding, NamedSharding) else None
            work.plan = replica_plan(sharding, request.shape, axis, options.primary_replica)
        elif sharding is not None and several:
            work.plan, cost = best_plan(sharding, request.shape, request.leaf.units, request.leaf.itemsize)
            if cost.ratio > GOOD_READS:
                # The chunks fit no cut of this sharding: read each one once and send it to every host.
                plans.packed.append(Work(index, request, LoadPlan(sharding, request.shape)))
                continue
        if several:
            plans.loads.update(request.cost(work.plan))
        plans.works.append(work)
    return plans


def restore_leaves(
    stored: StoredArrays, requests: Sequence[LeafRequest], options: RestoreOptions, agreement: Agreement
) -> list[Restored]:
    """Restores all leaves. Every process of the job must call it with the same requests.

    Raises:
      CheckpointError: on all hosts, if any host could not read.
      DamagedCheckpointError: on all hosts, if any host read bytes that differ from those written.
    """
    if options.dispatch is not None:
        return _restore_dispatched(stored, requests, options, agreement)
    results: dict[int, Restored] = {}
    plans = agreement.attempt(lambda: plan_all(requests, options))
    limit = _limit_bytes(requests, options, agreement)
    with RestoreProgress(stored.directory, sum(request.nbytes for request in requests)) as progress:
        reader = UnitReader(
            stored,
            verify=options.verify,
            bytes_in_flight=None if limit is None else limit // 2,
            on_bytes=progress.add,
            must_fit={request.leaf.name: request.dtype for request in requests if request.must_fit},
        )
        restore = Restore(reader, agreement, limit)
        for group in _groups(plans.works, limit):
            if (block_bytes := group[0].block_bytes(limit)) is not None:
                results[group[0].index] = restore.in_blocks(group[0], block_bytes)
            else:
                results |= restore.group(group)
            gc.collect(0)  # JAX frees host memory that it used without a copy only at a collection
        if plans.packed:
            results |= restore.packed(plans.packed, plans.loads)
        progress.finish(reader.bytes_read, sum(_held_bytes(result) for result in results.values()))
    return [results[index] for index in range(len(requests))]


def _restore_dispatched(
    stored: StoredArrays, requests: Sequence[LeafRequest], options: RestoreOptions, agreement: Agreement
) -> list[Restored]:
    """Restores on the workers the leaves that Orbax stores and casts as we do, and the others, mostly small, here."""
    assert options.dispatch is not None
    dispatch = options.dispatch
    remote, here = [], []
    for request in requests:
        ours = request.leaf.impl is not None or request.leaf.carried or request.must_fit
        (here if request.sharding is None or ours else remote).append(request)
    arrays = agreement.attempt(lambda: dispatch(stored, remote)) if remote else []
    rest = restore_leaves(stored, here, dataclasses.replace(options, dispatch=None), agreement)
    results = dict(zip([*remote, *here], [*arrays, *rest], strict=True))
    return [results[request] for request in requests]


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


def _held_bytes(result: Restored) -> int:
    if isinstance(result, np.ndarray):
        return result.nbytes
    return sum(shard.data.nbytes for shard in result.addressable_shards)


def _groups(works: Sequence[Work], limit: int | None) -> list[list[Work]]:
    """Splits leaves into groups that are read and gathered together; a leaf gathered in blocks is its own group."""
    groups: list[list[Work]] = []
    room = 0
    for work in works:
        extra = work.extra_bytes()
        if work.block_bytes(limit) is not None:
            groups.append([work])
            room = -1  # nothing joins it
            continue
        if not groups or extra > room:
            groups.append([])
            room = limit or _GROUP_BYTES
        groups[-1].append(work)
        room -= extra
    return groups


_log = logging.getLogger("meshfeed.checkpoint")
_BAR_AFTER_SECONDS = 3.0
_BAR_WIDTH = 32
_GIB = 1 << 30


class RestoreProgress:
    """Counts the bytes of one restore on this host."""

    def __init__(self, directory: epath.Path, total_bytes: int) -> None:
        self._directory = directory
        self._total_bytes = total_bytes
        self._bytes = 0
        self._started = time.perf_counter()
        self._drawn = 0.0
        self._lock = threading.Lock()
        self._bar = process_index() == 0 and sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            sys.stderr.write("\n")

    def add(self, count: int) -> None:
        """Counts bytes read from storage; safe to call from several threads."""
        with self._lock:
            self._bytes += count
            now = time.perf_counter()
            if self._bar and now - self._started > _BAR_AFTER_SECONDS and now - self._drawn > 0.2:
                self._drawn = now
                self._draw(now - self._started)

    def _draw(self, seconds: float) -> None:
        # Reads are spread evenly over the processes.
        share = min(1.0, self._bytes / max(1, self._total_bytes // process_count()))
        bar = "█" * int(share * _BAR_WIDTH)
        gib = self._bytes / _GIB
        sys.stderr.write(f"\rrestoring {bar:<{_BAR_WIDTH}} {share:4.0%} {gib:.2f} GiB {gib / seconds:.2f} GiB/s")
        sys.stderr.flush()

    def finish(self, read_bytes: int, held_bytes: int) -> None:
        """Logs and records the totals."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        read, held = read_bytes / _GIB, held_bytes / _GIB
        text = "restored %s: host %d read %.3f of %.3f GiB in %.2f s (%.3f GiB/s), holds %.3f GiB"
        total, speed = self._total_bytes / _GIB, read / seconds
        _log.info(text, self._directory, process_index(), read, total, seconds, speed, held)
        scheme, is_url, _ = os.fspath(self._directory).partition("://")
        storage = {"gs": "gcs", "s3": "s3"}.get(scheme, "local") if is_url else "local"
        labels = {"storage_type": storage, "custom_prefix": ""}
        worker = "/jax/orbax/read/worker"
        jax.monitoring.record_event_duration_secs(f"{worker}/total_duration_secs", seconds, **labels)
        jax.monitoring.record_scalar(f"{worker}/io/requested/gbytes", read, **labels)
        jax.monitoring.record_scalar(f"{worker}/io/requested/throughput/gbytes_per_sec", speed, **labels)
        jax.monitoring.record_event_duration_secs("/jax/checkpoint/read/durations_sec", seconds)
        if process_index() == 0:
            jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes", held)
            jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes_per_sec", held / seconds)
