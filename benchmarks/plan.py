"""Milliseconds to plan what every host reads: 4,096 hosts of 4 devices, several meshes and specs.

Each figure is the median of 20 plans, the rows as Python tuples included.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from benchmarks._measure import Table, main
from meshfeed._src.plan.topology import plan_table

HOSTS, DEVICES_PER_HOST = 4096, 4
CASES = {
    "rows over data, model within a host": ({"data": 4096, "model": 4}, ["data"], False),
    "rows over both axes": ({"data": 4096, "model": 4}, [("data", "model")], False),
    "rows over data, columns over a model axis across hosts": ({"data": 1024, "model": 16}, ["data", "model"], False),
    "the same, devices in random order": ({"data": 1024, "model": 16}, ["data", "model"], True),
}


def measure(options: argparse.Namespace) -> list[Table]:
    del options
    shuffled = np.random.default_rng(0).permutation(HOSTS * DEVICES_PER_HOST) // DEVICES_PER_HOST
    rows = []
    for name, (axes, spec, permuted) in CASES.items():
        times = []
        for _ in range(20):
            start = time.perf_counter()
            plan_table(axes, spec, shuffled if permuted else None, HOSTS, DEVICES_PER_HOST, (16384, 64)).row_ranges()
            times.append((time.perf_counter() - start) * 1e3)
        rows.append({"layout": name, "ms": statistics.median(times), "best ms": min(times)})
    return [Table(f"plan of {HOSTS:,} hosts × {DEVICES_PER_HOST} devices", rows)]


if __name__ == "__main__":
    main(__doc__, measure)
