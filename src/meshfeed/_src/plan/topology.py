"""Topologies of any size without hardware: fake devices and meshes, and the plan of all hosts as numpy tables.

``NamedSharding.devices_indices_map`` uses only the identity of a device, so plans for thousands of hosts can be
computed, tested and inspected on a laptop. Arrays cannot be placed on fake devices.

:func:`plan_table` needs no devices at all. It gives the same result as :mod:`meshfeed._src.plan.plan` host by host (a
test compares the two), but takes milliseconds for thousands of hosts. The command line uses it to show what each host
reads on, say, 4,096 hosts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.types import public
from meshfeed._src.plan.plan import axes_of, check_divisible

_ID_STRIDE = 2048  # real CPU device ids of process p start at 2048 * p; ids with gaps reveal more bugs
_Ints = np.ndarray[Any, np.dtype[np.int64]]


class FakeClient:
    """The part of ``device.client`` that JAX needs: the index of this process."""

    def __init__(self, this_process: int) -> None:
        self._this_process = this_process

    def process_index(self) -> int:
        """Index of the current process, whose devices are addressable."""
        return self._this_process


class FakeDevice:
    """Stands in for a ``jax.Device`` in a mesh that holds no data."""

    platform = "cpu"
    device_kind = "fake"

    def __init__(self, device_id: int, process_index: int, local_index: int, client: FakeClient) -> None:
        self.id = device_id
        self.process_index = process_index
        self.local_hardware_id = local_index
        self.client = client

    def __repr__(self) -> str:
        return f"FakeDevice(id={self.id}, process_index={self.process_index})"


@public("meshfeed.testing")
def fake_devices(num_hosts: int, devices_per_host: int, *, this_process: int = 0) -> list[Any]:
    """Returns ``num_hosts * devices_per_host`` fake devices, host by host.

    Args:
      num_hosts: number of processes, at least 1.
      devices_per_host: number of devices per process, at least 1.
      this_process: index of the process whose devices are addressable.

    Raises:
      SettingsError: a number is below 1.
    """
    for setting, value in (("num_hosts", num_hosts), ("devices_per_host", devices_per_host)):
        if value < 1:
            raise SettingsError(f"{setting} is {value}; it must be at least 1", setting=setting)
    client = FakeClient(this_process)
    stride = max(_ID_STRIDE, devices_per_host)
    return [
        FakeDevice(host * stride + k, host, k, client) for host in range(num_hosts) for k in range(devices_per_host)
    ]


@public("meshfeed.testing")
def fake_mesh(
    axes: Mapping[str, int],
    num_hosts: int,
    devices_per_host: int,
    *,
    permutation: Sequence[int] | None = None,
    axis_types: Sequence[AxisType] | None = None,
    this_process: int = 0,
) -> Mesh:
    """Returns a mesh of fake devices.

    Args:
      axes: axis name → size, slowest axis first. A mesh with fewer positions than devices uses the first devices.
      num_hosts: number of processes.
      devices_per_host: number of devices per process.
      permutation: mesh position (row-major) → index into ``fake_devices``; default: in order.
      axis_types: one per axis; default: Auto.
      this_process: index of the process whose devices are addressable.

    Raises:
      SettingsError: the mesh has more positions than devices, an axis or a number is below 1, or ``permutation`` has
        the wrong length.
    """
    devices = fake_devices(num_hosts, devices_per_host, this_process=this_process)
    for axis, length in axes.items():
        if length < 1:
            raise SettingsError(f"mesh axis {axis!r} has size {length}; it must be at least 1", setting="axes")
    size = math.prod(axes.values())
    order = range(size) if permutation is None else permutation
    if size > len(devices) or len(order) != size:
        raise SettingsError(
            f"the mesh {dict(axes)} has {size} positions, but there are {len(devices)} devices ({num_hosts} hosts x "
            f"{devices_per_host}) and a permutation of {len(order)}. Each position needs one device and one entry of "
            f"the permutation",
            setting="axes",
        )
    grid = np.empty(size, object)
    grid[:] = [devices[i] for i in order]
    types = tuple(axis_types) if axis_types is not None else (AxisType.Auto,) * len(axes)
    return Mesh(grid.reshape(tuple(axes.values())), tuple(axes), axis_types=types)


@dataclass(frozen=True)
class PlanTable:
    """The rows and columns that each host holds.

    Attributes:
      num_hosts: number of hosts, including those without a device in the mesh.
      range_host: host of each row range, ascending, int64[ranges].
      ranges: first row and one past the last row, int64[ranges, 2]; ascending per host and separated by gaps.
      columns: start and stop of the host's part of each dimension after the first, int64[hosts, dimensions, 2]; zeros
        for a host that holds nothing.
      process: host of each mesh position, int64[positions], in row-major order.
      blocks: number of the block that each position holds in each dimension, int64[positions, 1 + dimensions].
      block_shape: sizes of a block.
    """

    num_hosts: int
    range_host: _Ints
    ranges: _Ints
    columns: _Ints
    process: _Ints
    blocks: _Ints
    block_shape: tuple[int, ...]

    def row_ranges(self) -> list[tuple[tuple[int, int], ...]]:
        """The row ranges of each host, as in ``HostPlan.row_ranges``."""
        ends = np.searchsorted(self.range_host, np.arange(self.num_hosts + 1)).tolist()
        pairs: list[tuple[int, int]] = [(first, last) for first, last in self.ranges.tolist()]
        return [tuple(pairs[first:last]) for first, last in itertools.pairwise(ends)]

    def num_rows(self) -> _Ints:
        """Number of rows of each host, int64[hosts]."""
        sizes = np.diff(self.ranges, axis=1)[:, 0]
        # Weighted counts are float64, which is exact up to 2**53 rows.
        return np.bincount(self.range_host, weights=sizes, minlength=self.num_hosts).astype(np.int64)


def plan_table(
    mesh_axes: Mapping[str, int],
    spec: Sequence[Any],
    process_of: np.ndarray[Any, Any] | None,
    hosts: int,
    devices_per_host: int,
    global_shape: Sequence[int],
) -> PlanTable:
    """Plans the part of an array of ``global_shape`` that each host holds.

    Args:
      mesh_axes: axis → size, slowest first.
      spec: a PartitionSpec, or a sequence of None, axis names and tuples of them; truncated to the rank.
      process_of: host of each mesh position, in the mesh's shape or flat. None fills the mesh host by host, with
        ``devices_per_host`` positions per host.
      hosts: number of hosts.
      devices_per_host: number of devices per host; used if ``process_of`` is None.
      global_shape: ``(global_batch_size, ...)``.

    Raises:
      PlanError: a dimension is not divisible by its mesh axes.
      SettingsError: the spec names an unknown axis, or an axis twice; the mesh has more positions than there are
        devices; a number of hosts or devices is below 1; or ``process_of`` does not match the mesh and hosts.
    """
    sizes = tuple(mesh_axes.values())
    positions = math.prod(sizes)
    process = _process_table(mesh_axes, process_of, hosts, devices_per_host)
    entries = [axes_of(entry) for entry in tuple(spec)]
    _check_axes(mesh_axes, entries)
    entries = (entries + [()] * len(global_shape))[: len(global_shape)]
    coordinates = dict(zip(mesh_axes, np.unravel_index(np.arange(positions), sizes), strict=True))

    blocks = np.zeros((positions, len(global_shape)), np.int64)
    for dimension, axes in enumerate(entries):
        what = "the global batch" if dimension == 0 else f"dimension {dimension}"
        check_divisible(what, global_shape[dimension], axes, mesh_axes)
        for axis in axes:
            blocks[:, dimension] = blocks[:, dimension] * mesh_axes[axis] + coordinates[axis]
    num_blocks = [math.prod(mesh_axes[axis] for axis in axes) for axes in entries]
    block_shape = tuple(size // number for size, number in zip(global_shape, num_blocks, strict=True))
    # Columns are the bounding slice of a host's blocks, but rows are exact ranges: every row costs a read.
    range_host, ranges = _join_blocks(process, blocks[:, 0], num_blocks[0], block_shape[0])
    columns = _bounds(process, blocks[:, 1:], hosts) * np.array(block_shape[1:], np.int64)[:, None]
    return PlanTable(hosts, range_host, ranges, columns, process, blocks, block_shape)


def _bounds(process: _Ints, blocks: _Ints, hosts: int) -> _Ints:
    """First block, and one past the last block, of each host in each dimension: int64[hosts, dimensions, 2]."""
    bounds = np.zeros((hosts, blocks.shape[1], 2), np.int64)
    bounds[process, :, 0] = blocks.max(initial=0)
    # ufunc.at reduces all positions of a host; plain indexing would keep only one of them.
    np.minimum.at(bounds[..., 0], process, blocks)
    np.maximum.at(bounds[..., 1], process, blocks + 1)
    return bounds


def _join_blocks(process: _Ints, row_block: _Ints, num_blocks: int, block_rows: int) -> tuple[_Ints, _Ints]:
    """Row ranges of each host, with adjacent blocks joined."""
    # A spare block number per host keeps its last block from being adjacent to the first block of the next host.
    keys = np.unique(process * (num_blocks + 1) + row_block)
    starts_range = np.diff(keys, prepend=-2) != 1  # keys are at least 0, so the first always starts a range
    ends_range = np.append(starts_range[1:], True)
    host, first = np.divmod(keys[starts_range], num_blocks + 1)
    last = keys[ends_range] % (num_blocks + 1)
    return host, np.stack([first * block_rows, (last + 1) * block_rows], axis=1)


def _process_table(
    mesh_axes: Mapping[str, int], process_of: np.ndarray[Any, Any] | None, hosts: int, devices_per_host: int
) -> _Ints:
    positions = math.prod(mesh_axes.values())
    for setting, value in (("hosts", hosts), ("devices_per_host", devices_per_host)):
        if value < 1:
            raise SettingsError(f"{setting} is {value}; it must be at least 1", setting=setting)
    if process_of is None:
        if positions > hosts * devices_per_host:
            raise SettingsError(
                f"the mesh {dict(mesh_axes)} has {positions:,} positions, but {hosts:,} hosts x {devices_per_host} "
                f"devices are {hosts * devices_per_host:,}. Use a smaller mesh, or more hosts or devices.",
                setting="mesh",
            )
        return np.arange(positions, dtype=np.int64) // devices_per_host
    process = np.asarray(process_of, np.int64).reshape(-1)
    if process.size != positions or (process.size and not 0 <= process.min() <= process.max() < hosts):
        raise SettingsError(
            f"process_of has {process.size:,} entries from {process.min(initial=0)} to {process.max(initial=0)}; "
            f"expected {positions:,} entries, one for each position of the mesh {dict(mesh_axes)}, each in "
            f"0..{hosts - 1}",
            setting="process_of",
        )
    return process


def _check_axes(mesh_axes: Mapping[str, int], entries: Sequence[tuple[str, ...]]) -> None:
    used: list[str] = []
    for axis in (axis for axes in entries for axis in axes):
        if axis not in mesh_axes:
            raise SettingsError(
                f"the spec names the axis {axis!r}, which the mesh does not have. Use one of {list(mesh_axes)}.",
                setting="spec",
            )
        if axis in used:
            raise SettingsError(
                f"the spec names the axis {axis!r} twice. An axis can divide only one dimension.", setting="spec"
            )
        used.append(axis)
