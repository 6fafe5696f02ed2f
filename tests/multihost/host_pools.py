"""Pools of hosts that the tests of a module share, by name; each starts at its first run."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from meshfeed.testing import HostPool

Name = TypeVar("Name", bound=Hashable)


@contextlib.contextmanager
def host_pools(topologies: Mapping[Name, tuple[int, int]], timeout_seconds: float) -> Iterator[dict[Name, HostPool]]:
    """Pools of ``(hosts, devices per host)``, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(HostPool(*topology, timeout_seconds=timeout_seconds))
            for name, topology in topologies.items()
        }
