"""Tools for testing feeds: a conformance check, real multi-host jobs on one machine, and fake topologies.

``check_resumable`` saves and restores a feed at each save point and compares the rest. ``run_hosts`` runs a function on
new ``jax.distributed`` processes, ``HostPool`` runs many functions on the same processes, and ``start_hosts`` returns a
handle that can kill single hosts. ``fake_devices`` and ``fake_mesh`` allow plans for thousands of hosts on a laptop.
``simulate`` compares orders and cache sizes for remote data.
"""

from __future__ import annotations

from meshfeed._src.plan.topology import fake_devices, fake_mesh
from meshfeed._src.simulation.quality import ShuffleQuality
from meshfeed._src.simulation.simulate import SimulatedOrder, Simulation, simulate
from meshfeed._src.testing.hosts import HostPool, HostResult, HostRunError, run_hosts, start_hosts
from meshfeed._src.testing.resumable import check_resumable

__all__ = [
    "HostPool",
    "HostResult",
    "HostRunError",
    "ShuffleQuality",
    "SimulatedOrder",
    "Simulation",
    "check_resumable",
    "fake_devices",
    "fake_mesh",
    "run_hosts",
    "simulate",
    "start_hosts",
]
