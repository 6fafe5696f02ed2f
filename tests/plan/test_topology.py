"""Fake devices and meshes: ids with gaps, hosts in order, and refusals word for word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.plan.topology import fake_devices, fake_mesh


def test_devices_are_numbered_host_by_host_with_gaps_like_real_ones() -> None:
    devices = fake_devices(3, 2)
    assert [(device.id, device.process_index, device.local_hardware_id) for device in devices] == [
        (0, 0, 0), (1, 0, 1), (2048, 1, 0), (2049, 1, 1), (4096, 2, 0), (4097, 2, 1),
    ]  # fmt: skip
    assert repr(devices[3]) == "FakeDevice(id=2049, process_index=1)"
    assert {(device.platform, device.device_kind) for device in devices} == {("cpu", "fake")}
    assert [device.id for device in fake_devices(2, 3000)[2998:3002]] == [2998, 2999, 3000, 3001], "ids stay distinct"
    assert len(fake_devices(1, 1)) == 1


@pytest.mark.parametrize("this_process", [0, 2])
def test_devices_of_this_process_are_the_addressable_ones(this_process: int) -> None:
    assert {device.client.process_index() for device in fake_devices(3, 2, this_process=this_process)} == {this_process}
    mesh = fake_mesh({"data": 6}, 3, 2, this_process=this_process)
    addressable = NamedSharding(mesh, P("data")).addressable_devices
    assert {device.process_index for device in addressable} == {this_process}


def test_by_default_process_0_is_this_one() -> None:
    assert fake_devices(2, 1)[1].client.process_index() == 0
    assert fake_mesh({"data": 2}, 2, 1).devices[1].client.process_index() == 0


def test_a_mesh_holds_the_devices_in_row_major_order() -> None:
    mesh = fake_mesh({"data": 2, "model": 3}, 4, 2)
    assert (mesh.axis_names, mesh.devices.shape) == (("data", "model"), (2, 3))
    assert [[device.id for device in row] for row in mesh.devices] == [[0, 1, 2048], [2049, 4096, 4097]]
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    types = (AxisType.Explicit, AxisType.Auto)
    assert fake_mesh({"data": 2, "model": 3}, 3, 2, axis_types=types).axis_types == types
    permuted = fake_mesh({"data": 3}, 2, 2, permutation=[3, 0, 2])
    assert [device.id for device in np.asarray(permuted.devices)] == [2049, 0, 2048]


@pytest.mark.parametrize(
    ("make", "setting", "message"),
    [
        (lambda: fake_devices(0, 2), "num_hosts", "num_hosts is 0; it must be at least 1"),
        (lambda: fake_devices(2, -1), "devices_per_host", "devices_per_host is -1; it must be at least 1"),
        (
            lambda: fake_mesh({"data": 2, "model": 0}, 2, 2),
            "axes",
            "mesh axis 'model' has size 0; it must be at least 1",
        ),
        (
            lambda: fake_mesh({"data": 3, "model": 3}, 4, 2),
            "axes",
            "the mesh {'data': 3, 'model': 3} has 9 positions, but there are 8 devices (4 hosts x 2) and a permutation of "
            "9. Each position needs one device and one entry of the permutation",
        ),
        (
            lambda: fake_mesh({"data": 4}, 4, 2, permutation=[0, 1, 2]),
            "axes",
            "the mesh {'data': 4} has 4 positions, but there are 8 devices (4 hosts x 2) and a permutation of 3. "
            "Each position needs one device and one entry of the permutation",
        ),
    ],
)
def test_topologies_that_cannot_be_are_refused(make: Any, setting: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert (str(caught.value), caught.value.setting) == (message, setting)
