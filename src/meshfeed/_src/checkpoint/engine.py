"""Restores a list of stored leaves to their shardings in four stages: plan, read, agree, gather.

One leaf between storage and its sharding: what is requested, how it is read, and the buffers it is read into.

Restores one large leaf in blocks: reads some rows of each piece, then sends them a few at a time.

Reports a restore in the log, in ``jax.monitoring`` under the names that Orbax users graph, and as a progress bar.

Sends stored units from the host that read them to all hosts, packed into a few byte buffers.

It is used for small leaves, host values, and leaves whose stored chunks fit no cut of their sharding. Each unit is read
by one host, with bytes balanced over hosts, and every host receives it over the accelerator network. This costs a
collective in each of a few rounds instead of one storage request per host and leaf.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import heapq
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshfeed._src.arrays.reshard import reshard
from meshfeed._src.base import memory
from meshfeed._src.base.coordination import process_count, process_index
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.arguments import RestoreOptions
from meshfeed._src.checkpoint.gather import (
    BlockGather,
    cut_block,
    gather_group,
    host_bits_of,
    piece_shape,
    place,
    rows_in_flight,
)
from meshfeed._src.checkpoint.load_plan import (
    GOOD_READS,
    Box,
    LoadPlan,
    best_plan,
    box_shape,
    box_size,
    devices_of_a_process,
    read_cost,
    replica_plan,
    take_rows,
)
from meshfeed._src.checkpoint.read import Target, UnitReader, Wanted, may_overflow, unit_box, units_for, wanted_unit
from meshfeed._src.checkpoint.save_layout import free_axes
from meshfeed._src.checkpoint.stored import StoredArrays, StoredLeaf

_BROADCAST_BYTES = 64 << 20  # broadcasting in blocks is faster than whole shards, for which every device needs zeros


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
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any
    wrap: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the stored leaf in bytes."""
        return math.prod(self.leaf.shape) * self.leaf.itemsize

    @property
    def must_fit(self) -> bool:
        """Whether the values must be checked before they are cast."""
        return not self.wrap and may_overflow(self.leaf.dtype, self.dtype)


class _HostDevice:
    """Represents the memory of this process, for leaves restored as numpy arrays."""

    platform = "host"

    @property
    def process_index(self) -> int:
        return process_index()


class _HostSharding:
    """The sharding of such a leaf: whole, on a single ``_HostDevice``."""

    device_set = frozenset((_HostDevice(),))

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, Any]:
        return {device: tuple(slice(0, size) for size in shape) for device in self.device_set}

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape


HERE = _HostSharding()


@dataclasses.dataclass(eq=False)
class Work:
    """One leaf being restored: its request, its plan and this process's buffers.

    Attributes:
      index: position of the request in the caller's list.
      request: the leaf to restore.
      plan: how it is read.
      rows: the rows of each piece that are read; None means all.
      buffers: device → the host buffer that it reads into.
    """

    index: int
    request: LeafRequest
    plan: LoadPlan
    rows: tuple[int, int] | None = None  # first row and number of rows, if only part of each piece is read
    buffers: dict[Any, np.ndarray[Any, Any]] = dataclasses.field(default_factory=dict)

    def targets(self) -> list[Target]:
        """Returns this process's buffers, one per distinct box; devices share them until they are placed.

        A later call for other rows returns the same buffers, because fresh pages cost more than overwriting old ones.
        This is safe: arrays that aliased the buffers no longer exist, and every value is overwritten, because pieces
        are read in parts only if the leaf has the stored shape and the parts are whole units (``rows_in_flight``).
        """
        here = process_index()
        shared: dict[Box, np.ndarray[Any, Any]] = {}
        targets = []
        shape = piece_shape(self.plan) if not self.plan.direct else ()
        for device, box in self.plan.boxes(here).items():
            if self.plan.direct:
                shape = box_shape(box or ())
            if self.rows is not None:
                if box is None:
                    continue  # it only receives: BlockGather supplies its block
                shape = tuple(self.rows[1] if d == self.plan.dimension else size for d, size in enumerate(shape))
                box = take_rows(box, self.plan.dimension, *self.rows)
            elif box is None:
                self.buffers[device] = memory.zeros(shape, self.request.dtype)
                continue
            if box not in shared:
                known = self.buffers.get(device)
                shared[box] = memory.zeros(shape, self.request.dtype) if known is None else known
                targets.append(Target(box, shared[box]))
            self.buffers[device] = shared[box]
        return targets

    def own_buffers(self) -> dict[Any, np.ndarray[Any, Any]]:
        """Returns buffers by device, with a separate copy for each CPU device, which would alias a shared buffer."""
        seen: set[int] = set()
        own = {}
        for device, buffer in self.buffers.items():
            if id(buffer) in seen and device.platform == "cpu":
                copy = memory.zeros(buffer.shape, buffer.dtype)
                copy[...] = buffer
                buffer = copy
            seen.add(id(buffer))
            own[device] = buffer
        return own

    def large(self, limit: int | None) -> bool:
        """Returns whether to gather in blocks: because of the limit, or because a whole broadcast thrashes memory."""
        if self.plan.direct or not self.plan.shape:
            return False
        return self.extra_bytes() > self.block_bytes(limit)

    def block_bytes(self, limit: int | None) -> int:
        """Returns the bytes in flight while it is gathered in blocks."""
        if limit is None:
            return _BROADCAST_BYTES if self.plan.broadcast else sys.maxsize
        return limit // 2

    def extra_bytes(self) -> int:
        """Returns this process's memory beyond the result while it is gathered; the same bound on every process."""
        local = devices_of_a_process(self.plan.sharding)
        itemsize = self.request.dtype.itemsize
        if self.plan.direct:
            return self.request.nbytes * local // max(1, len(self.plan.sharding.device_set))
        shard = math.prod(self.plan.sharding.shard_shape(self.plan.shape)) * itemsize
        return local * (math.prod(piece_shape(self.plan)) * itemsize + shard)


def read_group(group: Sequence[Work], reader: UnitReader) -> None:
    """Reads what this process's devices need of several leaves into their buffers."""
    wanted = []
    for work in group:
        leaf = work.request.leaf
        for number, targets in units_for(leaf, work.targets()).items():
            wanted.append(wanted_unit(leaf, number, targets))
    reader.read(wanted)


def restore_in_blocks(work: Work, reader: UnitReader, agreement: Agreement, limit: int) -> Any:
    """Reads and gathers one large leaf with at most ``limit`` bytes in flight, or one unit per device if that is more.

    Args:
      work: the leaf; its plan must not be direct.
      reader: reads and checks units.
      agreement: confirms each read before its collectives.
      limit: in bytes.
    """
    plan, request, here = work.plan, work.request, process_index()
    local = devices_of_a_process(plan.sharding)
    read_rows, sent_rows = rows_in_flight(plan, request.leaf.units, request.dtype.itemsize, local, limit)
    takes_part = any(device.process_index == here for device in plan.sharding.device_set)
    gather = BlockGather(plan, request.dtype, sent_rows) if takes_part else None
    for first in range(0, plan.piece, read_rows):
        work.rows = (first, read_rows)
        agreement.attempt(lambda: read_group([work], reader))
        for at in range(0, read_rows, sent_rows):
            at = min(at, read_rows - sent_rows)  # the last block may overlap, so one program serves all
            if gather is not None:
                blocks = cut_block(work.buffers, plan.dimension, at, sent_rows)
                gather.add(first + at, {device: host_bits_of(block) for device, block in blocks.items()})
    work.buffers = {}
    if gather is None:
        return place({}, plan.shape, plan.sharding, request.dtype)
    return gather.finish()


_log = logging.getLogger("meshfeed.checkpoint")
_BAR_AFTER_SECONDS = 3.0
_BAR_WIDTH = 32
_GIB = 1 << 30


def storage_type(directory: Any) -> str:
    """Returns ``gcs``, ``s3`` or ``local``, as a label for monitoring events."""
    text = str(directory)
    return {"gs": "gcs", "s3": "s3"}.get(text.split("://", 1)[0], "local") if "://" in text else "local"


class RestoreProgress:
    """Counts the bytes of one restore on this host.

    Args:
      directory: the item being restored.
      total_bytes: stored bytes of everything restored, over all hosts.
    """

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
        rate = self._bytes / _GIB / seconds
        sys.stderr.write(f"\rrestoring {bar:<{_BAR_WIDTH}} {share:4.0%} {self._bytes / _GIB:.2f} GiB {rate:.2f} GiB/s")
        sys.stderr.flush()

    def finish(self, read_bytes: int, held_bytes: int) -> None:
        """Logs and records the totals.

        Args:
          read_bytes: bytes that this host read from storage, decoded.
          held_bytes: bytes that this host now holds.
        """
        seconds = time.perf_counter() - self._started
        rate = read_bytes / seconds if seconds else 0.0
        storage = storage_type(self._directory)
        _log.info(
            "restored %s: host %d read %.3f of %.3f GiB in %.2f s (%.3f GiB/s), holds %.3f GiB",
            self._directory,
            process_index(),
            read_bytes / _GIB,
            self._total_bytes / _GIB,
            seconds,
            rate / _GIB,
            held_bytes / _GIB,
        )
        labels = {"storage_type": storage, "custom_prefix": ""}
        jax.monitoring.record_event_duration_secs("/jax/orbax/read/worker/total_duration_secs", seconds, **labels)
        jax.monitoring.record_scalar("/jax/orbax/read/worker/io/requested/gbytes", read_bytes / _GIB, **labels)
        jax.monitoring.record_scalar(
            "/jax/orbax/read/worker/io/requested/throughput/gbytes_per_sec", rate / _GIB, **labels
        )
        jax.monitoring.record_event_duration_secs("/jax/checkpoint/read/durations_sec", seconds)
        if process_index() == 0:
            jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes", held_bytes / _GIB)
            jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes_per_sec", held_bytes / _GIB / max(seconds, 1e-9))


DEFAULT_ROUND_BYTES = 256 << 20
_LEAST_ROUND_BYTES = 1 << 16


def assign_units(
    leaves: Sequence[StoredLeaf], hosts: Sequence[int], loads: Mapping[int, int]
) -> dict[int, list[tuple[int, int]]]:
    """Assigns each (leaf, unit), largest first, to the host with the fewest bytes to read so far.

    Args:
      leaves: leaves to send.
      hosts: hosts that may read.
      loads: bytes that each host reads anyway.
    """
    heap = [(loads.get(host, 0), host) for host in hosts]
    heapq.heapify(heap)
    owned: dict[int, list[tuple[int, int]]] = {host: [] for host in hosts}
    sizes = [
        (unit_bytes(leaf, number), index, number) for index, leaf in enumerate(leaves) for number in range(_count(leaf))
    ]
    for size, index, number in sorted(sizes, key=lambda item: (-item[0], item[1], item[2])):  # large ones first
        load, host = heapq.heappop(heap)
        owned[host].append((index, number))
        heapq.heappush(heap, (load + size, host))
    return owned


def _count(leaf: StoredLeaf) -> int:
    return len(leaf.units) if leaf.shape else 1


def unit_bytes(leaf: StoredLeaf, number: int) -> int:
    """Returns the size of a unit on the host in bytes."""
    return box_size(unit_box(leaf, number)) * leaf.itemsize


@functools.lru_cache(maxsize=1)
def _host_mesh(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.array(devices), ("host",), axis_types=(jax.sharding.AxisType.Auto,))


def send_rows(row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sends this process's row of bytes and returns all rows, in process order. Rows must have equal length.

    Args:
      row: uint8[length], the same length on every process.

    Returns:
      uint8[processes, length].
    """
    # One device per process is enough: rows go to hosts, not to devices.
    first: dict[int, Any] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        first.setdefault(device.process_index, device)
    mesh = _host_mesh(tuple(device for _, device in sorted(first.items())))
    spread = NamedSharding(mesh, PartitionSpec("host"))
    own = jax.device_put(row[None], first[process_index()])
    array = jax.make_array_from_single_device_arrays((len(first), row.size), spread, [own])
    (whole,) = reshard([array], [NamedSharding(mesh, PartitionSpec())])
    return np.asarray(whole.addressable_shards[0].data)


def exchange(
    leaves: Sequence[StoredLeaf],
    owned: Mapping[int, Sequence[tuple[int, int]]],
    reader: UnitReader,
    deliver: Callable[[int, Box, np.ndarray[Any, Any]], None],
    agreement: Agreement,
    limit_bytes: int | None,
) -> None:
    """Reads this host's units, sends them, and delivers all hosts' units.

    Args:
      leaves: leaves to send.
      owned: host → its units in order, see :func:`assign_units`; the same on every host.
      reader: reads and checks units.
      deliver: called with (leaf index, box, values) for every unit of every host.
      agreement: confirms each round before its collective.
      limit_bytes: limit on memory in flight, for all rows of a round together.
    """
    hosts = sorted(owned)
    lengths = {host: sum(unit_bytes(leaves[i], n) for i, n in owned[host]) for host in hosts}
    longest = max(lengths.values(), default=0)
    if not longest:
        return
    budget = DEFAULT_ROUND_BYTES if limit_bytes is None else max(1, limit_bytes // 2)
    width = min(longest, max(_LEAST_ROUND_BYTES, budget // (len(hosts) + 1)))
    width = min(1 << (width - 1).bit_length(), max(longest, 1))  # few distinct widths, so few compiled programs
    here = process_index()
    source = _stream(leaves, owned.get(here, ()), reader)
    sinks = {host: _parse(leaves, owned[host], deliver) for host in hosts}
    for sink in sinks.values():
        next(sink, None)
    rest = b""
    for start in range(0, longest, width):
        row = memory.zeros((width,), np.uint8)

        def fill(row: np.ndarray[Any, Any] = row, start: int = start) -> None:
            nonlocal rest
            want, at = min(width, max(0, lengths.get(here, 0) - start)), 0
            while at < want:
                data = rest or next(source)
                taken = min(want - at, len(data))
                row[at : at + taken] = np.frombuffer(data, np.uint8, taken)
                rest, at = data[taken:], at + taken

        agreement.attempt(fill)
        rows = send_rows(row)
        for index, host in enumerate(hosts):
            count = min(width, max(0, lengths[host] - start))
            if count:
                try:
                    sinks[host].send(rows[index, :count])
                except StopIteration:
                    pass  # its last unit is complete


def _stream(leaves: Sequence[StoredLeaf], units: Sequence[tuple[int, int]], reader: UnitReader) -> Iterator[memoryview]:
    for index, number in units:
        taken: list[memoryview] = []

        def take(_: Box, values: np.ndarray[Any, Any], taken: list[memoryview] = taken) -> None:
            taken.append(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

        reader.read([Wanted(leaves[index], number, take)])
        yield taken[0]


def _parse(
    leaves: Sequence[StoredLeaf],
    units: Sequence[tuple[int, int]],
    deliver: Callable[[int, Box, np.ndarray[Any, Any]], None],
) -> Any:
    data = yield
    for index, number in units:
        leaf, box = leaves[index], unit_box(leaves[index], number)
        whole = np.empty(unit_bytes(leaf, number), np.uint8)
        filled = 0
        while filled < whole.size:
            while not len(data):
                data = yield
            count = min(len(data), whole.size - filled)
            whole[filled : filled + count] = data[:count]
            data, filled = data[count:], filled + count
        deliver(index, box, whole.view(leaf.dtype).reshape(box_shape(box)))


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

    owned = assign_units(leaves, range(process_count()), loads)
    exchange(leaves, owned, reader, deliver, agreement, limit)
    _finish_group(works, results)
