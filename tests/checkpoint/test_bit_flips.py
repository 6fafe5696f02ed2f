"""One flipped bit anywhere in a step's files: refused or passed over, or the values are right all the same."""

from __future__ import annotations

import os
import pathlib
import shutil

import numpy as np
import pytest
from checkpoint_feeds import CountingFeed
from checkpoint_trees import assert_same, make_mesh, mixed_tree
from flips import flipped, is_noticed, is_refused

from meshfeed.checkpoint import Checkpointer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("flips")
    mesh, feed = make_mesh(4, 2), CountingFeed()
    tree = mixed_tree(mesh, rows=64)
    next(feed)
    with Checkpointer(directory / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, tree, feed)
    return directory / "c", tree


def flip(directory: pathlib.Path, tree, count: int, only_values: bool) -> tuple[int, int]:
    """Flips one bit at a time, drawn over all bytes; gives how often the restore was refused, and verify objected."""
    files = [path for path in (directory / "1").rglob("*") if path.is_file() and path.stat().st_size]
    if only_values:  # the largest files hold nothing but values
        files = sorted(files, key=lambda path: path.stat().st_size)[-1:]
    sizes = np.array([path.stat().st_size for path in files])
    rng = np.random.default_rng(11)
    refused = objected = 0
    with Checkpointer(directory) as ckpt:
        for _ in range(count):
            path = files[int(rng.choice(len(files), p=sizes / sizes.sum()))]
            with flipped(path, rng):
                is_bad = is_refused(ckpt, tree)
                refused += is_bad
                objected += is_bad or is_noticed(directory)
        assert_same(tree, ckpt.restore(tree, step=1)[1])
    return refused, objected


def test_some_flips(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "c")
    refused, _ = flip(tmp_path / "c", saved[1], 12, only_values=True)
    assert refused >= 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_flips(saved, tmp_path):
    if not os.environ.get("MESHFEED_SOAK"):
        pytest.skip("set MESHFEED_SOAK=1 to flip 200 bits, which takes minutes")
    shutil.copytree(saved[0], tmp_path / "c")
    refused, objected = flip(tmp_path / "c", saved[1], 200, only_values=False)
    print(f"200 flips: {refused} refused, {objected} noticed by verify, none silent")
    assert refused > 100
