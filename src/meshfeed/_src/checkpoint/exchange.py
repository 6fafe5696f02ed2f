"""Exchanges the units of leaves that do not come in pieces: one host reads each, and sends it to all hosts.

So come small leaves, host values, and leaves whose stored chunks fit no cut of their sharding. Bytes are balanced over
hosts and packed into a few byte buffers. This costs a collective in each of a few rounds instead of one storage request
per host and leaf.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from meshfeed._src.arrays.reshard import reshard
from meshfeed._src.base import memory
from meshfeed._src.base.coordination import process_count, process_index
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.layout import Box, Device, assign_units, box_shape, box_size, parts_in_window
from meshfeed._src.checkpoint.leaves import SavedLeaf
from meshfeed._src.checkpoint.read import Target, UnitReader

_ROUND_BYTES = 256 << 20
_LEAST_ROUND_BYTES = 1 << 16


def send_rows(row: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Sends this process's row, uint8[length], and returns uint8[processes, length]; rows must have equal length."""
    # One device per process is enough: rows go to hosts, not to devices.
    first: dict[int, Device] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        first.setdefault(device.process_index, device)
    devices = np.array([device for _, device in sorted(first.items())])
    mesh = Mesh(devices, ("host",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("host"))
    own = jax.device_put(row[None], first[process_index()])
    array = jax.make_array_from_single_device_arrays((len(first), row.size), spread, [own])
    (whole,) = reshard([array], [NamedSharding(mesh, PartitionSpec())])
    return np.asarray(whole.addressable_shards[0].data)


class _HostStream:
    """The units that one host reads, one after the other as bytes."""

    def __init__(self, leaves: Sequence[SavedLeaf], units: Sequence[tuple[int, int]]) -> None:
        self._units = [(index, leaves[index], leaves[index].units.box(number)) for index, number in units]
        sizes = (box_size(box) * leaf.stored_dtype.itemsize for _, leaf, box in self._units)
        self._ends = list(itertools.accumulate(sizes))
        self._values: NDArray[np.generic] = np.empty(0)  # of the unit that a window cuts

    @property
    def size(self) -> int:
        """Bytes of all units."""
        return self._ends[-1] if self._ends else 0

    def fill(self, window: NDArray[np.uint8], start: int, reader: UnitReader) -> None:
        """Reads units into ``window``, whose first byte is byte ``start`` of the stream. Windows follow one another."""
        for item, first, stop in parts_in_window(self._ends, start, start + len(window)):
            if first == 0:
                _, leaf, box = self._units[item]
                self._values = np.empty(box_shape(box), leaf.stored_dtype)
                reader.read([(leaf, [Target(box, self._values)])])
            window[: stop - first], window = self._bytes[first:stop], window[stop - first :]

    def parse(self, window: NDArray[np.uint8], start: int) -> Iterator[tuple[int, Box, NDArray[np.generic]]]:
        """Yields (leaf index, box, values) of each unit that ends in a received window. Windows follow one another."""
        for item, first, stop in parts_in_window(self._ends, start, start + len(window)):
            index, leaf, box = self._units[item]
            if first == 0:
                self._values = np.empty(box_shape(box), leaf.stored_dtype)
            self._bytes[first:stop], window = window[: stop - first], window[stop - first :]
            if stop == self._values.nbytes:
                yield index, box, self._values

    @property
    def _bytes(self) -> NDArray[np.uint8]:
        return self._values.reshape(-1).view(np.uint8)


def exchange(
    wanted: Sequence[tuple[SavedLeaf, Sequence[Target]]],
    loads: Mapping[int, int],
    reader: UnitReader,
    agreement: Agreement,
    limit_bytes: int | None,
) -> None:
    """Reads this host's share of the units, sends them, and fills the targets from all hosts' units.

    ``wanted`` has the leaves to send, the same on every host, and for each this host's buffers. ``loads`` is host → bytes
    that it reads anyway. The limit holds for all rows of a round together; each round is agreed on before its collective.
    """
    leaves = [leaf for leaf, _ in wanted]
    owned = assign_units([(leaf.units, leaf.stored_dtype.itemsize) for leaf in leaves], range(process_count()), loads)
    streams = [_HostStream(leaves, units) for _, units in sorted(owned.items())]
    own = _HostStream(leaves, owned[process_index()])
    longest = max(stream.size for stream in streams)
    width = _row_bytes(longest, len(streams), limit_bytes)
    for start in range(0, longest, width):
        row = memory.zeros((width,), np.uint8)
        agreement.attempt(lambda row=row, start=start: own.fill(row, start, reader))
        for stream, received in zip(streams, send_rows(row), strict=True):
            for index, box, values in stream.parse(received, start):
                for target in wanted[index][1]:
                    target.fill(box, values)


def _row_bytes(longest: int, hosts: int, limit_bytes: int | None) -> int:
    """Returns the bytes that each host sends per round: few distinct numbers, so few compiled programs."""
    budget = _ROUND_BYTES if limit_bytes is None else max(1, min(_ROUND_BYTES, limit_bytes // 2))
    width = min(longest, max(_LEAST_ROUND_BYTES, budget // (hosts + 1)))
    return max(1, min(1 << (width - 1).bit_length(), longest))
