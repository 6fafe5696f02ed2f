"""One leaf between storage and its sharding: what is requested, how it is read, and the buffers it is read into."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.coordination import process_index
from meshfeed._src.checkpoint.casts import may_overflow
from meshfeed._src.checkpoint.gather import piece_shape
from meshfeed._src.checkpoint.grid import Box, box_shape, take_rows
from meshfeed._src.checkpoint.load_plan import LoadPlan, devices_of_a_process
from meshfeed._src.checkpoint.read import Target, UnitReader, units_for, wanted_unit
from meshfeed._src.checkpoint.stored import StoredLeaf

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
