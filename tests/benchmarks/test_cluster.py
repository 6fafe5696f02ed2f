"""The benchmark of large clusters: its two hosts find what all others appear to have written."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_two_hosts_play_a_cluster_that_mixes_components() -> None:
    command = [sys.executable, "-m", "benchmarks.cluster", "--of", "64", "--latency", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("| 64 | 1,000 | 8 |") == 2, done.stdout
