"""Hosts that wait for one whose program has ended learn of it within seconds, not at their timeout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshfeed._src.testing.hosts import free_port

CHILD = Path(__file__).with_name("ended_child.py")


def start(victim: int, folder: str) -> list[subprocess.Popen[str]]:
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(host), port, str(victim), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(3)
    ]


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_do_not_wait_until_their_timeout(victim: int, tmp_path: Path) -> None:
    children = start(victim, str(tmp_path / "ckpt"))
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


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("victim", "way", "what"),
    [
        (0, "raises", "its program has ended by ValueError: the loss is nan"),
        (2, "raises", "its program has ended by ValueError: the loss is nan"),
        (1, "exits", "closed its feed at step 4 after SystemExit: 143"),
    ],
)
def test_the_others_log_it_while_they_wait_in_a_collective(victim: int, way: str, what: str) -> None:
    children = start(victim, way)
    try:
        line = f"host {victim}: {what}. Collectives with it cannot end.\n"
        for host, child in enumerate(children):
            assert child.stderr is not None
            if host != victim:
                assert line in child.stderr, "or it would hang without a word"
    finally:
        for child in children:
            child.kill()
            child.communicate()
