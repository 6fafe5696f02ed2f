"""How many CPUs and how much memory this machine, or the container on it, gives its processes."""

from __future__ import annotations

import os

from meshfeed._src.base.control_groups import group_limits


def available_cpus() -> int:
    """Returns the CPUs that this process may use, or the limit of its container or job, rounded up, if that is lower."""
    known = hasattr(os, "sched_getaffinity")
    counts = [len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1]
    for quota, period in group_limits("cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        if quota > 0:
            counts.append(-(-quota // period))
    return max(1, min(counts))


def xla_threads() -> int:
    """Returns the least number of threads in the pool of XLA's CPU devices: ``NPROC``, or the CPUs if that is not set.

    The pool has at least one thread per device. With fewer than two, a program that never waits for a result aborts:
    launches of later computations block the threads that the collective of the running one needs.
    """
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdigit() else available_cpus()


def host_memory_bytes() -> int:
    """Returns the memory of this host in bytes, or the limit of its container or job if that is lower."""
    limits = group_limits("memory", "memory.max", "memory.limit_in_bytes")
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *(size for [size] in limits)])
