"""Every mode on every topology, and every topology's checkpoint on every other: raw bytes, dtypes, shardings."""

from __future__ import annotations

import os

import pytest
from checkpoint_jobs import restore_elsewhere, save_and_restore, stored_bytes

from meshfeed.testing import HostPool

pytestmark = pytest.mark.multihost

MODES = [("once", None), ("once", 1 << 20), ("single_replica", None), ("single_replica", 1 << 20), ("every_host", None)]
TOPOLOGIES = [(4, 2), (2, 2), (1, 8), (8, 1)]  # hosts, devices of each


def meshes_of(hosts, devices):
    count = hosts * devices
    return [(rows, count // rows) for rows in (1, 2, 4, 8) if rows <= count]


def check_reads(results, mode, stored, hosts):
    read = [result.value[mode] for result in results]
    assert sum(read) <= 1.1 * stored, (mode, read, stored)
    assert max(read) * hosts <= 1.5 * sum(read), (mode, read)


@pytest.mark.parametrize(("hosts", "devices", "shape"), [(2, 2, (2, 2)), (8, 1, (8, 1))])
def test_every_mode(tmp_path, hosts, devices, shape):
    """The topologies that no other test has; 4 × 2 and 1 × 8 are in test_checkpoint.py here and in tests/checkpoint."""
    with HostPool(hosts, devices, timeout_seconds=240) as pool:
        results = pool.run(save_and_restore, str(tmp_path), shape, MODES, "c")
    for limit in (None, 1 << 20):
        check_reads(results, f"once {limit}", stored_bytes(tmp_path / "c/3/arrays"), hosts)


@pytest.mark.skipif(not os.environ.get("MESHFEED_SOAK"), reason="set MESHFEED_SOAK=1: takes minutes, on 8 processes")
def test_every_topology_and_every_other(tmp_path):
    saved = []
    for hosts, devices in TOPOLOGIES:
        for shape in meshes_of(hosts, devices):
            saved.append((hosts, devices, shape, f"{hosts}x{devices}-{shape[0]}x{shape[1]}"))
    for restoring in (False, True):
        for hosts, devices in TOPOLOGIES:
            with HostPool(hosts, devices, timeout_seconds=600) as pool:
                if not restoring:
                    for shape, name in [(shape, name) for *at, shape, name in saved if at == [hosts, devices]]:
                        results = pool.run(save_and_restore, str(tmp_path), shape, MODES, name)
                        stored = stored_bytes(tmp_path / name / "3/arrays")
                        for limit in (None, 1 << 20):
                            check_reads(results, f"once {limit}", stored, hosts)
                    continue
                for number, (*at, _, name) in enumerate(saved):
                    if at == [hosts, devices]:
                        continue
                    shapes = meshes_of(hosts, devices)
                    shape = shapes[number % len(shapes)]
                    for mode, limit in MODES:
                        results = pool.run(restore_elsewhere, str(tmp_path), name, shape, mode, limit)
                        if mode == "once":
                            read = sum(result.value for result in results)
                            assert read <= 1.1 * stored_bytes(tmp_path / name / "3/arrays"), (name, hosts, shape)
