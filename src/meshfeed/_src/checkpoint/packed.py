"""Sends stored units from the host that read them to all hosts, packed into a few byte buffers.

It is used for small leaves, host values, and leaves whose stored chunks fit no cut of their sharding. Each unit is read
by one host, with bytes balanced over hosts, and every host receives it over the accelerator network. This costs a
collective in each of a few rounds instead of one storage request per host and leaf.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshfeed._src.arrays.reshard import reshard
from meshfeed._src.base import memory
from meshfeed._src.base.coordination import process_index
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.grid import Box, box_shape, box_size
from meshfeed._src.checkpoint.read import UnitReader, Wanted, unit_box
from meshfeed._src.checkpoint.stored import StoredLeaf

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
