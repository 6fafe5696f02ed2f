"""Hosts that wait for one whose program has ended learn of it within seconds, not at their timeout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshfeed._src.testing.hosts import free_port

CHILD = Path(__file__).with_name("ended_child.py")


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_do_not_wait_until_their_timeout(victim: int, tmp_path: Path) -> None:
    port = str(free_port())
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(host), port, str(victim), str(tmp_path / "ckpt")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(3)
    ]
    for host, child in enumerate(children):
        output, errors = child.communicate(timeout=180)
        if host == victim:
            assert "FileNotFoundError: no data on this host" in errors
            continue
        lines = output.splitlines()
        assert [line.split()[0] for line in lines] == ["feed", "checkpoint"], output + errors
        note = f"(host {victim} is gone: its program has ended by FileNotFoundError: no data on this host)"
        for line in lines:
            assert float(line.split()[1]) < 60, "long before the timeout of 120 s"
            assert note in line
