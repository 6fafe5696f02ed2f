"""Checkpoints in a bucket from processes that share no folder: saved by two hosts, killed at any moment, read by four."""

from __future__ import annotations

import os
import pathlib
import random
import signal

import checkpoint_feeds
import checkpoint_trees
import pytest
from checkpoint_jobs import NUM_LANES, lanes
from store_servers import S3, running

from meshfeed._src.base.store_path import StorePath
from meshfeed.testing import HostPool, HostRunError

BUCKET = "s3://bucket"
pytestmark = [pytest.mark.multihost, pytest.mark.slow]


def state_of(step: int, mesh, rows: int = 256):
    """What the state is at a step."""
    import numpy as np

    values = np.random.default_rng(step).integers(0, 1 << 30, (rows, 512)).astype(np.int32)
    return {
        "w": checkpoint_trees.place(values, mesh, "model"),
        "copies": checkpoint_trees.place(values[:, :32].copy(), mesh),
        "host": np.full(100, step),
        "step": step,
    }


def own_folder(directory: str) -> None:
    """Gives each host a folder for temporary files that no other host uses."""
    import tempfile

    import jax

    tempfile.tempdir = os.path.join(directory, f"host-{jax.process_index()}")
    os.makedirs(tempfile.tempdir, exist_ok=True)


def save_and_fail(url: str, directory: str):
    """Saves on two hosts; host 1 cannot upload one step: the same error on both, and the next save leaves nothing of it."""
    import tempfile

    import jax

    from meshfeed.checkpoint import Checkpointer

    own_folder(directory)
    mesh, feed, messages = checkpoint_trees.make_mesh(4, 2), checkpoint_feeds.LaneFeed(lanes(), NUM_LANES), []
    tree = checkpoint_trees.mixed_tree(mesh)
    whole = StorePath.upload

    def fail(self, file):
        if "/arrays/w/" in str(self):
            raise OSError(104, "Connection reset by peer")
        return whole(self, file)

    with Checkpointer(url, save_interval_steps=1, max_to_keep=3) as ckpt:
        assert ckpt.restore(state_of(0, mesh), feed)[0] == 0
        for step in (1, 2, 3):
            next(feed)
            if step == 2 and jax.process_index() == 1:
                StorePath.upload = fail
            try:
                ckpt.save(step, state_of(step, mesh), feed)
                ckpt.wait()
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
            finally:
                StorePath.upload = whole
        steps = ckpt.steps()
        ckpt.save(4, tree, feed)
        ckpt.wait()
        other = checkpoint_feeds.LaneFeed(lanes(), NUM_LANES)
        step, restored = ckpt.restore(checkpoint_trees.abstract(state_of(0, mesh)), other, step=3)
        checkpoint_trees.assert_same(state_of(3, mesh), restored)
        assert other.counters == feed.counters
    return messages, steps, os.listdir(tempfile.gettempdir())


def fail_before_anything_is_written(url: str, directory: str):
    """Host 1 cannot make its folder for temporary files at one step; the other learns of it at once."""
    import time

    import jax

    from meshfeed._src.checkpoint import store_manager
    from meshfeed.checkpoint import Checkpointer

    own_folder(directory)
    mesh, messages, make = checkpoint_trees.make_mesh(4, 2), [], store_manager.os.mkdir

    def fail(path, *mode):
        if "/meshfeed-" in str(path):
            raise OSError(28, "No space left on device")
        make(path, *mode)

    with Checkpointer(url, save_interval_steps=1) as ckpt:
        for step in (1, 2, 3):
            started = time.monotonic()
            if step == 2 and jax.process_index() == 1:
                store_manager.os.mkdir = fail
            try:
                ckpt.save(step, state_of(step, mesh))
                ckpt.wait()
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
            finally:
                store_manager.os.mkdir = make
            assert time.monotonic() - started < 20
    return messages, ckpt.steps()


def restore_on_four(url: str, rows: int, barrier: str):
    """Restores on four hosts; for the count of bytes, nothing but the restore happens after the barrier."""
    from jax.experimental import multihost_utils

    from meshfeed.checkpoint import restore_once

    mesh = checkpoint_trees.make_mesh(4, 2)
    state = state_of(9, mesh, rows)
    multihost_utils.sync_global_devices(barrier)
    restored = restore_once(url, checkpoint_trees.abstract(state), memory_limit_bytes=8 << 20)
    checkpoint_trees.assert_same(state, restored)


def save_large(url: str, rows: int):
    from meshfeed.checkpoint import Checkpointer

    mesh = checkpoint_trees.make_mesh(4, 2)
    with Checkpointer(url) as ckpt:
        ckpt.save(9, state_of(9, mesh, rows))


def test_two_hosts_save_and_four_read_each_byte_once(tmp_path):
    url, rows = f"{BUCKET}/hosts", 16 << 10
    with running(lambda: S3("bucket")) as server:
        with HostPool(2, 4, timeout_seconds=120) as pool:
            for result in pool.run(save_and_fail, url, str(tmp_path)):
                messages, steps, left = result.value
                assert len(messages) == 1
                assert (
                    "CheckpointError: s3://bucket/hosts: saving step 2 failed: host 1: ConnectionResetError: "
                    in messages[0]
                )
                assert "Connection reset by peer" in messages[0]
                assert (steps, left) == ([1, 3], [])
            assert sorted(path.name for path in StorePath(url).iterdir()) == ["1", "3", "4"]
            for result in pool.run(fail_before_anything_is_written, f"{BUCKET}/early", str(tmp_path)):
                (message,), steps = result.value
                assert "saving step 2 failed" in message
                assert "host 1" in message
                assert "No space left on device" in message
                assert steps == [1, 3]
            pool.run(save_large, f"{BUCKET}/large", rows)
        stored = sum(StorePath(f"{BUCKET}/large").sizes().values())
        with HostPool(4, 2, timeout_seconds=120) as pool:
            before = server.sent
            pool.run(restore_on_four, f"{BUCKET}/large/9/arrays", rows, "large")
            assert server.sent - before <= 1.05 * stored
            assert server.sent - before >= 0.9 * stored


def save_until_killed(url: str, directory: str, seconds: float, victim: int):
    """Resumes, compares with what must have been saved, then saves until this process is killed."""
    import threading

    import jax

    from meshfeed.checkpoint import Checkpointer

    own_folder(directory)
    mesh, feed = checkpoint_trees.make_mesh(2, 2), checkpoint_feeds.CountingFeed(records=10**9)
    log = pathlib.Path(directory, f"committed-{jax.process_index()}")
    with Checkpointer(url, save_interval_steps=1, max_to_keep=2, timeout_seconds=60) as ckpt:
        step, restored = ckpt.restore(state_of(0, mesh), feed)
        checkpoint_trees.assert_same(state_of(step, mesh) if step else restored, restored)
        assert feed.position == 4 * step
        committed = int(log.read_text()) if log.exists() else 0
        assert step >= committed, f"step {committed} was committed, and {step} restored"
        count = 0
        while True:
            step, count = step + 1, count + 1
            next(feed)
            ckpt.save(step, state_of(step, mesh), feed)
            if count == 1:
                ckpt.wait()
                log.write_text(str(step))
                if jax.process_index() == 0:
                    names = {path.name for path in StorePath(url).iterdir()}
                    assert names <= {".writer.json", *(str(number) for number in (step - 2, step - 1, step))}, names
                later = (
                    0.0 if victim in (2, jax.process_index()) else 0.5
                )  # as whoever runs the job ends the rest of it
                threading.Timer(seconds + later, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif step % 2:
                ckpt.wait()
                log.write_text(str(step))


def lost_coordinator(error: BaseException | None) -> bool:
    """Whether a host's error says that host 0 does not answer any more."""
    return type(error).__name__ == "JaxRuntimeError" and str(error).startswith("UNAVAILABLE")


def kill(tmp_path: pathlib.Path, kills: int) -> tuple[int, int]:
    """Kills host 0 first, host 1 first, or both at once, again and again.

    Returns:
      How often hosts were started until so many were killed, and the newest step at the end.
    """
    rng, rounds = random.Random(5), 0
    url = f"{BUCKET}/kills"
    with running(lambda: S3("bucket")):
        while kills > 0:
            rounds += 1
            with HostPool(2, 2, timeout_seconds=90, recoverability=False) as pool:
                with pytest.raises(HostRunError) as raised:
                    pool.run(save_until_killed, url, str(tmp_path), rng.uniform(0.0, 2.5), rng.randrange(3))
                text = str(raised.value)
                assert "AssertionError" not in text, text
                kills -= sum(result.returncode == -signal.SIGKILL for result in raised.value.results)
                codes = {result.returncode for result in raised.value.results if not lost_coordinator(result.error)}
                # JAX ends host 1 by SIGABRT once host 0, the coordinator, is gone; a request may fail just before that.
                assert -signal.SIGKILL in codes <= {-signal.SIGKILL, -signal.SIGABRT}, text
        root = StorePath(url)
        committed = max(int(path.read_text()) for path in tmp_path.glob("committed-*"))
        steps = [int(path.name) for path in root.iterdir() if (path / "commit_success.txt").exists()]
        assert max(steps) >= committed
        return rounds, max(steps)


@pytest.mark.timeout(3600)
def test_kills(tmp_path):
    """Three SIGKILLs in CI, 100 with ``MESHFEED_SOAK=1``."""
    rounds, newest = kill(tmp_path, 100 if os.environ.get("MESHFEED_SOAK") else 3)
    assert newest >= rounds
    print(f"{rounds} starts, {newest} steps")
