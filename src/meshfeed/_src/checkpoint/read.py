"""Reads values from storage into this host's memory: whole units of leaves, each once, checked as they arrive."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshfeed._src.base import memory
from meshfeed._src.base.coordination import process_index
from meshfeed._src.base.threads import Threads
from meshfeed._src.checkpoint.casts import check_fits
from meshfeed._src.checkpoint.layout import Box, Device, box_shape, box_size, intersect, slices, take_rows, with_rows
from meshfeed._src.checkpoint.leaves import SavedLeaf
from meshfeed._src.checkpoint.plan import LeafRead
from meshfeed._src.checkpoint.stored import PendingRead, StoredArrays

BYTES_IN_FLIGHT = 512 << 20
_THREADS = 4  # that compute digests, which a single one does at 3 to 10 GB/s
_THREADED_BYTES = 1 << 20  # smaller units cost less than to hand them over


class Target(NamedTuple):
    """A box of a leaf, and the host array that takes its values; the array has the final dtype."""

    box: Box
    buffer: NDArray[np.generic]

    def fill(self, unit_box: Box, values: NDArray[np.generic]) -> None:
        """Copies the overlap of ``unit_box`` and the box, cast to the buffer's dtype."""
        common = intersect(self.box, unit_box)
        if box_size(common):
            self.buffer[slices(common, self.box)] = values[slices(common, unit_box)]


class HostPieces:
    """This process's buffers for the pieces of one leaf; devices with the same box share one until they are placed."""

    def __init__(self, read: LeafRead) -> None:
        self.read = read
        # Device → its piece, or the rows of it that were read last.
        self.buffers: dict[Device, NDArray[np.generic]] = {}

    def targets(self, rows: tuple[int, int] | None = None) -> list[Target]:
        """Returns the buffers to read into, one per distinct box.

        A later call for other rows returns the same buffers, because fresh pages cost more than overwriting old ones.
        This is safe: arrays that aliased the buffers no longer exist, and every value is overwritten, except in rows
        that are not sent or are padding, because pieces are read in parts only if the leaf has the stored shape
        (``rows_in_flight``). ``rows`` are the first row of each piece and the number of rows to read now.
        """
        load, shared = self.read.load, dict[Box, NDArray[np.generic]]()
        for device, box in load.boxes(process_index()).items():
            shape = box_shape(box or ()) if load.direct else load.piece_shape
            if rows is not None:
                if box is None:
                    continue  # it only receives: BlockGather supplies its block
                shape = with_rows(shape, load.dimension, rows[1])
                box = take_rows(box, load.dimension, *rows)
            known = self.buffers.get(device) if box is None else shared.get(box, self.buffers.get(device))
            self.buffers[device] = memory.zeros(shape, self.read.dtype) if known is None else known
            if box is not None:
                shared[box] = self.buffers[device]
        return [Target(box, buffer) for box, buffer in shared.items()]

    def take(self) -> dict[Device, NDArray[np.generic]]:
        """Hands over the buffers, with a separate copy for each CPU device, which would alias a shared buffer."""
        own, self.buffers = self.buffers, {}
        seen: set[int] = set()
        for device, buffer in own.items():
            if id(buffer) in seen and device.platform == "cpu":
                own[device] = memory.copy(buffer)
            seen.add(id(buffer))
        return own


class _Unit(NamedTuple):
    """A unit to read, and the targets that take parts of it; without any it is only checked."""

    leaf: SavedLeaf
    box: Box
    nbytes: int
    targets: Sequence[Target]


def _unit(leaf: SavedLeaf, number: int, targets: Sequence[Target] = ()) -> _Unit:
    box = leaf.units.box(number)
    return _Unit(leaf, box, box_size(box) * leaf.stored_dtype.itemsize, targets)


def _units(leaf: SavedLeaf, targets: Iterable[Target]) -> list[_Unit]:
    """Returns the units that ``targets`` need, ascending by number."""
    found: dict[int, list[Target]] = collections.defaultdict(list)
    for target in targets:
        for number in leaf.units.touching(target.box):
            found[number].append(target)
    return [_unit(leaf, number, found[number]) for number in sorted(found)]


@dataclasses.dataclass(frozen=True)
class UnitReader:
    """Reads units, and checks them."""

    stored: StoredArrays
    verify: bool
    on_bytes: Callable[[int], object]  # called with the number of bytes of each unit
    bytes_in_flight: int = BYTES_IN_FLIGHT  # at most so many, or one unit, are requested from storage at once
    # Parameter name → dtype in whose range its values must be.
    must_fit: Mapping[str, DTypeLike] = dataclasses.field(default_factory=dict)

    def read(self, leaves: Iterable[tuple[SavedLeaf, Sequence[Target]]]) -> None:
        """Reads the units of leaves that targets need, each once and in order, and fills the targets."""
        self._read([unit for leaf, targets in leaves for unit in _units(leaf, targets)])

    def check(self, leaf: SavedLeaf) -> None:
        """Reads all units of a leaf, and keeps none of the values."""
        self._read([_unit(leaf, number) for number in range(len(leaf.units))])

    def _read(self, units: Sequence[_Unit]) -> None:
        self.stored.open_soon(dict.fromkeys(unit.leaf.name for unit in units))
        pending: collections.deque[tuple[_Unit, PendingRead]] = collections.deque()
        in_flight = 0
        with contextlib.closing(Threads(_THREADS, "meshfeed-digests")) as threads:
            for unit in units:
                while pending and in_flight + unit.nbytes > self.bytes_in_flight:
                    in_flight -= self._finish(*pending.popleft())
                pending.append((unit, self._start(unit, threads)))
                in_flight += unit.nbytes
            while pending:
                self._finish(*pending.popleft())

    def _start(self, unit: _Unit, threads: Threads) -> PendingRead:
        leaf, box, room = unit.leaf, unit.box, None
        # Storage may write directly into a sole target that holds all of the unit without a cast.
        if len(unit.targets) == 1 and intersect(unit.targets[0].box, box) == box:
            room = unit.targets[0].buffer[(*slices(box, unit.targets[0].box), ...)]  # `...`: a 0-d array stays one
        values = self.stored.start_read(leaf, box, room)
        check = functools.partial(self.stored.finish_read, leaf, box, values, self.verify)
        return threads.submit(check).result if self.verify and unit.nbytes >= _THREADED_BYTES else check

    def _finish(self, unit: _Unit, checked: PendingRead) -> int:
        values = checked()
        if unit.leaf.name in self.must_fit:  # while hosts still agree on errors
            check_fits(f"leaf {unit.leaf.name!r}", values, self.must_fit[unit.leaf.name])
        self.on_bytes(unit.nbytes)
        for target in unit.targets:
            if not np.may_share_memory(values, target.buffer):  # else storage has written them there
                target.fill(unit.box, values)
        return unit.nbytes
