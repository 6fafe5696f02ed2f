"""How many CPUs and how much memory this machine, or the container on it, gives its processes."""

from __future__ import annotations

import contextlib
import os
import pathlib

# Of a container: control groups of version 2, and of version 1.
_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_cpus() -> int:
    """Returns the CPUs that this process may use, or the limit of its container, rounded up, if that is lower."""
    known = hasattr(os, "sched_getaffinity")
    counts = [len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1]
    for paths in _QUOTAS:
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or it contains "max"
            quota, period = " ".join(pathlib.Path(path).read_text() for path in paths).split()
            if int(quota) > 0:
                counts.append(-(-int(quota) // int(period)))
    return max(1, min(counts))


def xla_threads() -> int:
    """Returns the least number of threads in the pool of XLA's CPU devices: ``NPROC``, or the CPUs if that is not set.

    The pool has at least one thread per device. With fewer than two, a program that never waits for a result aborts:
    launches of later computations block the threads that the collective of the running one needs.
    """
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdigit() else available_cpus()


def host_memory_bytes() -> int:
    """Returns the memory of this host in bytes, or the limit of its container if that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or it contains "max"
            sizes.append(int(pathlib.Path(path).read_text()))
    return min(sizes)
