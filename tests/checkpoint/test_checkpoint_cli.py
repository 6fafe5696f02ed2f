"""inspect, verify, diff and convert say what is there."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from checkpoint_feeds import CountingFeed
from checkpoint_trees import make_mesh, place

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.checkpoint import foreign
from meshfeed._src.checkpoint import step as checkpoint_step
from meshfeed.checkpoint import Checkpointer, IteratorHandler, IteratorRestore


@pytest.fixture
def folder(tmp_path):
    mesh, feed = make_mesh(4, 2), CountingFeed()
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        for step in (1, 2):
            next(feed)
            values = np.random.default_rng(step).normal(size=(256, 128)).astype(np.float32)
            ckpt.save(step, {"w": place(values, mesh, None, "model"), "same": np.arange(9), "lr": 0.1 * step}, feed)
    return tmp_path / "c"


def test_inspect(folder):
    found = checkpoint_step.inspect(folder)
    assert [(row["step"], row["position"], row["intact"]) for row in found["steps"]] == [(1, 4, True), (2, 8, True)]
    (row,) = checkpoint_step.inspect(folder / "2")["steps"]
    leaves = {leaf["name"]: leaf for leaf in row["leaves"]}
    assert leaves["w"]["shape"] == [256, 128]
    assert leaves["w"]["bytes"] == 256 * 128 * 4
    assert leaves["lr"]["value"] == "0.2"
    assert row["iterator"]["position"] == 8
    json.dumps(found)
    with pytest.raises(CheckpointError, match="its steps are: 1, 2"):
        checkpoint_step.inspect(folder, 5)


def test_verify_reads_every_byte(folder):
    found = checkpoint_step.verify_as_json(folder)
    assert found["intact"]
    assert found["steps"][0]["bytes_read"] == 256 * 128 * 4 + 9 * 8
    data = max((folder / "2/arrays").rglob("d/*"), key=lambda path: path.stat().st_size)
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(bytes(damaged))
    found = checkpoint_step.verify_as_json(folder)
    assert [row["intact"] for row in found["steps"]] == [True, False]
    assert "'w'" in found["steps"][1]["problems"][0]
    sharding = folder / "1/arrays/_sharding"
    sharding.write_text(sharding.read_text().replace("data", "dota", 1))
    assert "_sharding" in checkpoint_step.verify_as_json(folder, 1)["steps"][0]["problems"][0]


def test_a_step_that_the_running_job_removes_meanwhile_is_not_damaged(folder, monkeypatch):
    read_step = checkpoint_step.read_step

    def remove_before(directory, step):
        if step == 1:
            shutil.rmtree(folder / "1", ignore_errors=True)
        return read_step(directory, step)

    monkeypatch.setattr(checkpoint_step, "read_step", remove_before)
    found = checkpoint_step.verify_as_json(folder)
    assert [(row["step"], row["intact"]) for row in found["steps"]] == [(2, True)]
    shutil.copytree(folder / "2", folder / "1")
    assert [row["step"] for row in checkpoint_step.inspect(folder)["steps"]] == [2]
    shutil.copytree(folder / "2", folder / "1")
    (row,) = checkpoint_step.verify_as_json(folder, 1)["steps"]
    assert "step 1 is not in" in row["problems"][0]


def test_diff(folder):
    found = checkpoint_step.diff(folder / "1", folder / "2")
    assert found["state"] == {"position": [4, 8]}
    assert sorted(found["leaves"]) == ["lr", "w"]
    assert checkpoint_step.diff(folder / "1", folder / "1")["same"]
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint_step.diff(folder / "1", folder / "7")


def test_import_position(tmp_path):
    feed = CountingFeed()
    (tmp_path / "template.json").write_text(json.dumps(feed.get_state()))
    (tmp_path / "iter").mkdir()
    for host in range(2):
        (tmp_path / f"iter/process_{host}-of-2.json").write_text('{"next_index": 6}')
    foreign.import_position(
        tmp_path / "iter", tmp_path / "template.json", tmp_path / "out", global_batch_size=4, step=3
    )
    IteratorHandler().restore(tmp_path / "out", IteratorRestore(feed))
    assert (feed.step, next(feed)) == (3, [12, 13, 14, 15])
