"""Feeds of real processes that continue on other hosts: rows that move over devices, and reads in workers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reshard_jobs

from meshfeed.testing import run_hosts


def test_hosts_leave_and_come_back() -> None:
    found = run_hosts(reshard_jobs.run, num_hosts=3, devices_per_host=2, timeout_seconds=180)
    for case in reshard_jobs.CASES:
        for step in range(reshard_jobs.STEPS):
            whole: dict[int, int] = {}
            for host in found:
                whole.update(host.value[case][step])
            first = step * reshard_jobs.BATCH
            assert whole == {row: first + row for row in range(reshard_jobs.BATCH)}, (case, step)
