"""Tools for tests of feeds: the conformance check, real multi-host jobs on one machine, and fake topologies.

``check_resumable`` saves and restores a feed everywhere and compares. ``run_hosts`` runs a function on fresh
``jax.distributed`` processes, ``HostPool`` many functions on the same ones, ``start_hosts`` gives a handle with which
single hosts can be killed. ``fake_devices`` and ``fake_mesh`` make plans for thousands of hosts on a laptop.
"""

from __future__ import annotations

from meshfeed._src.plan.topology import fake_devices, fake_mesh
from meshfeed._src.testing.resumable import check_resumable
from meshfeed._src.testing.spawn import HostPool, run_hosts, start_hosts
from meshfeed._src.testing.spawn_host import HostResult, HostRunError

__all__ = [
    "HostPool",
    "HostResult",
    "HostRunError",
    "check_resumable",
    "fake_devices",
    "fake_mesh",
    "run_hosts",
    "start_hosts",
]
