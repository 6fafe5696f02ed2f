"""SIGKILL at any moment of saving leaves the newest committed step restorable."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import time

import pytest
from checkpoint_feeds import CountingFeed
from checkpoint_trees import assert_same, make_mesh
from kill_child import state_of

from meshfeed.checkpoint import Checkpointer

HERE = pathlib.Path(__file__).parent


def kill_once(directory: pathlib.Path, rng: random.Random, run: int) -> tuple[int, int]:
    """Starts a child, kills it while it saves; gives the last step it said was committed, and the restored one."""
    path = os.pathsep.join([str(HERE), *sys.path])
    log = directory.parent / f"log-{run}"
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, str(HERE / "kill_child.py"), str(directory)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": path},
        )
    try:
        assert child.stdout is not None
        committed = []
        for _ in range(rng.randint(1, 3)):
            line = child.stdout.readline()
            assert line, log.read_text()[-3000:]
            committed.append(int(line))
        time.sleep(rng.uniform(0, 0.6))
    finally:
        child.kill()
        child.wait()
    committed += [int(line) for line in child.stdout.read().split()]
    child.stdout.close()
    mesh, feed = make_mesh(4, 2), CountingFeed(records=10**9)
    with Checkpointer(directory) as ckpt:
        step, restored = ckpt.restore(state_of(0, mesh), feed)
    assert_same(state_of(step, mesh), restored)
    assert feed.position == 4 * step
    return committed[-1], step


def check(tmp_path: pathlib.Path, kills: int) -> None:
    rng, last = random.Random(5), 0
    for run in range(kills):
        committed, step = kill_once(tmp_path / "c", rng, run)
        assert step >= committed > last, "a committed step was lost"
        last = step


@pytest.mark.slow
def test_a_few_kills(tmp_path):
    check(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills(tmp_path):
    if not os.environ.get("MESHFEED_SOAK"):
        pytest.skip("set MESHFEED_SOAK=1 to kill 50 times, which takes minutes")
    check(tmp_path, 50)
