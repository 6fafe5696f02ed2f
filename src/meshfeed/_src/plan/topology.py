"""Fake devices and meshes: topologies of any size without hardware.

``NamedSharding.devices_indices_map`` asks a device for nothing but its identity, so plans can be made, tested and
looked at for thousands of hosts on a laptop. No array can be put on a fake device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.names import public

_ID_STRIDE = 2048  # real CPU devices of process p start at 2048 * p: ids that are not dense find more faults


class FakeClient:
    """What ``device.client`` must answer: the index of this process."""

    def __init__(self, this_process: int) -> None:
        self._this_process = this_process

    def process_index(self) -> int:
        """Index of the process that asks; its devices are the addressable ones."""
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
    """``num_hosts * devices_per_host`` fake devices, host by host.

    Args:
      num_hosts: processes, at least 1.
      devices_per_host: devices of each process, at least 1.
      this_process: the process whose devices count as addressable.

    Raises:
      SettingsError: a number below 1.
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
    """A mesh of fake devices.

    Args:
      axes: axis name → size, slowest axis first. Fewer positions than devices make a sub-mesh of the first devices.
      num_hosts: processes.
      devices_per_host: devices of each process.
      permutation: position in the mesh (row-major) → number of the device, as ``fake_devices`` orders them.
      axis_types: one for each axis; Auto by default.
      this_process: the process whose devices count as addressable.

    Raises:
      SettingsError: the mesh has more positions than there are devices, or an axis of size 0.
    """
    devices = fake_devices(num_hosts, devices_per_host, this_process=this_process)
    for axis, length in axes.items():
        if length < 1:
            raise SettingsError(f"mesh axis {axis!r} has size {length}; it must be at least 1", setting="axes")
    size = math.prod(axes.values())
    order = range(size) if permutation is None else permutation
    if size > len(devices) or len(order) != size:
        raise SettingsError(
            f"a mesh {dict(axes)} of {size} positions, {len(devices)} devices ({num_hosts} hosts x "
            f"{devices_per_host}) and {len(order)} places in the order do not fit. Give at least one device and "
            f"exactly one place for each position",
            setting="axes",
        )
    grid = np.empty(size, object)
    grid[:] = [devices[i] for i in order]
    types = tuple(axis_types) if axis_types is not None else (AxisType.Auto,) * len(axes)
    return Mesh(grid.reshape(tuple(axes.values())), tuple(axes), axis_types=types)
