"""How much memory this host has for its processes."""

from __future__ import annotations

import contextlib
import os
import pathlib

_LIMITS = (  # of a container: control groups of version 2, and of version 1
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def host_memory_bytes() -> int:
    """Returns the memory of this host in bytes, or the limit of its container if that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or it contains "max"
            sizes.append(int(pathlib.Path(path).read_text()))
    return min(sizes)
