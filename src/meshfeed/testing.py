"""Tools for tests of feeds: real multi-host jobs on one machine.

``run_hosts`` runs a function on fresh ``jax.distributed`` processes, ``HostPool`` many functions on the same ones,
``start_hosts`` gives a handle with which single hosts can be killed.
"""

from __future__ import annotations

from meshfeed._spawn import HostPool, run_hosts, start_hosts
from meshfeed._spawn_host import HostResult, HostRunError

__all__ = ["HostPool", "HostResult", "HostRunError", "run_hosts", "start_hosts"]
