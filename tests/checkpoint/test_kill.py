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


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}


def kill_once(directory: pathlib.Path, rng: random.Random, run: int) -> tuple[int, int]:
    """Starts a child, kills it while it saves; gives the last step it said was committed, and the restored one."""
    log = directory.parent / f"log-{run}"
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, str(HERE / "kill_child.py"), str(directory)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(),
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
def test_a_kill(tmp_path):
    check(tmp_path, 1)


@pytest.mark.slow
def test_a_kill_before_each_change_of_a_file(tmp_path):
    copies = tmp_path / "copies"
    copies.mkdir()
    command = [sys.executable, str(HERE / "snapshot_child.py"), str(tmp_path / "c"), str(copies)]
    subprocess.run(command, env=environment(), check=True)
    mesh, found = make_mesh(4, 2), []
    for number in range(len(list(copies.iterdir()))):
        feed = CountingFeed()
        with Checkpointer(copies / str(number), save_interval_steps=1, max_to_keep=1) as ckpt:
            step, restored = ckpt.restore(state_of(0, mesh), feed)
            assert_same(state_of(step, mesh), restored)
            assert feed.position == 4 * step
            found.append(step)
            if number % 8 == 0:
                assert ckpt.save(step + 1, state_of(step + 1, mesh), feed)
                ckpt.close()
                assert [path.name for path in (copies / str(number)).iterdir()] == [str(step + 1)]
    assert len(found) > 20
    assert found == sorted(found)
    assert set(found) == {1, 2}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills(tmp_path):
    if not os.environ.get("MESHFEED_SOAK"):
        pytest.skip("set MESHFEED_SOAK=1 to kill 50 times, which takes minutes")
    check(tmp_path, 50)
