"""Fake devices and meshes: topologies of any size without hardware.

``NamedSharding.devices_indices_map`` uses only the identity of a device, so plans for thousands of hosts can be
computed, tested and inspected on a laptop. Arrays cannot be placed on fake devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.types import public

_ID_STRIDE = 2048  # real CPU device ids of process p start at 2048 * p; ids with gaps reveal more bugs


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
