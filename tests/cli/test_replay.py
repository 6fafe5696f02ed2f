"""meshfeed replay: the records of a step from a saved state alone, as the feed itself says them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner, Result
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.cli import main
from meshfeed._src.state import files as state_files


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main.main, ["replay", *map(str, arguments)])


def make_feed(source: Any, **settings: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    settings = {"global_batch_size": 4, "shuffle": True, "seed": 5, "num_epochs": 3, "prefetch": 0} | settings
    return meshfeed.MultiHostDataLoadIterator(source, mesh, **settings)


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> tuple[pathlib.Path, list[list[int]]]:
    """A state after step 6 of 8, across an epoch's edge, and the ids of all steps."""
    with make_feed({"x": np.arange(11)}) as feed:
        for _ in range(6):
            next(feed)
        path = tmp_path / "state.json"
        path.write_text(json.dumps(feed.get_state()))
        return path, [feed.record_ids(step).tolist() for step in range(len(feed))]


def test_it_says_what_the_feed_says(saved: tuple[pathlib.Path, list[list[int]]]) -> None:
    path, ids = saved
    assert len(ids) == 8
    for step, expected in enumerate(ids):
        found = json.loads(run(path, "--batch-index", step, "--json").output)
        assert found["record_ids"] == expected
        assert (found["batch_index"], found["first_position"]) == (step, step * 4)
        assert found["delivered"] == (step < 6)
        assert (found["feed_step"], found["position"]) == (6, 24)
    last = json.loads(run(path, "--json").output)
    assert (last["batch_index"], last["epochs"]) == (5, [1, 2])


def test_the_text_names_rows_epochs_and_ids(saved: tuple[pathlib.Path, list[list[int]]]) -> None:
    path, ids = saved
    assert run(path, "--batch-index", 2).output.splitlines() == [
        "state: feed step 6, position 24",
        "batch index 2, delivered: positions 8..11",
        "4 records of epoch 0 to 1",
        " ".join(map(str, ids[2])),
    ]
    assert run(path, "--batch-index", 1).output.splitlines()[2] == "4 records of epoch 0"
    assert run(path, "--step", 2).output == run(path, "--batch-index", 2).output


def test_another_batch_size_holds_from_the_state_on(saved: tuple[pathlib.Path, list[list[int]]]) -> None:
    path, ids = saved
    flat = [record_id for batch in ids for record_id in batch]
    assert json.loads(run(path, "--step", 2, "--global-batch-size", 2, "--json").output)["record_ids"] == ids[2]
    assert json.loads(run(path, "--step", 7, "--global-batch-size", 2, "--json").output)["record_ids"] == flat[26:28]


def test_it_finds_the_newest_step_of_a_checkpoint(tmp_path: pathlib.Path) -> None:
    with make_feed({"x": np.arange(11)}) as feed:
        for step in (9, 10):
            next(feed)
            folder = tmp_path / str(step) / "iterator"
            folder.mkdir(parents=True)
            state_files.write_state(folder, feed.get_state())
    assert json.loads(run(tmp_path, "--json").output)["batch_index"] == 1
    assert json.loads(run(tmp_path / "9", "--json").output)["batch_index"] == 0


def test_inspect_and_replay_have_the_same_numbers_for_a_state(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    with make_feed({"x": np.arange(11)}) as feed, meshfeed.checkpoint.Checkpointer(tmp_path / "run") as checkpoints:
        for _ in range(3):
            next(feed)
        checkpoints.save(70, {"w": np.zeros(2)}, feed, force=True)  # the caller counts otherwise
    inspected = CliRunner().invoke(main.main, ["inspect", str(tmp_path / "run"), "--json"])
    (step,) = json.loads(inspected.output)["steps"]
    replayed = json.loads(run(tmp_path / "run", "--json").output)
    assert (step["step"], step["feed_step"], step["position"]) == (70, 3, 12)
    assert {name: replayed[name] for name in ("feed_step", "position")} == {"feed_step": 3, "position": 12}
    assert replayed["batch_index"] == 2, "the last one delivered"
    assert "step" not in replayed, "what inspect calls a step is the number given to save"


def test_it_shows_the_records_of_the_same_files_only(tmp_path: pathlib.Path) -> None:
    array_record = pytest.importorskip("array_record.python.array_record_module")
    for name in ("a", "b"):
        writer = array_record.ArrayRecordWriter(str(tmp_path / f"{name}.array_record"), "group_size:1")
        for i in range(11):
            writer.write(f"{name} record {i}".encode())
        writer.close()
    paths = str(tmp_path / "a.array_record")
    source = meshfeed.sources.ArrayRecord(paths, decode=lambda raw: {"n": np.int32(int(raw.split()[-1]))})
    with make_feed(source) as feed:
        rows = np.asarray(next(feed)["n"]).tolist()
        (tmp_path / "state.json").write_text(json.dumps(feed.get_state()))
    result = run(tmp_path / "state.json", "--array-record", paths, "--json")
    assert [record["begins"] for record in json.loads(result.output)["records"]] == [f"a record {row}" for row in rows]
    lines = run(tmp_path / "state.json", "--array-record", paths).output.splitlines()
    assert f"from {tmp_path}" in lines
    assert all("  a.array_record  a record " in line and len(line) <= 100 for line in lines[4:])
    other = run(tmp_path / "state.json", "--array-record", tmp_path / "b.array_record")
    assert other.exit_code == 1
    assert "state mismatch in 'source" in other.output


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, ["--step", 8], "batch index 8 is beyond this stream, which has 8 batches"),
        ({"segments": [], "position": 0}, [], "Give --global-batch-size"),
        ({"kind": "lanes", "step": 6, "num_lanes": 2, "lanes": {}}, [], "call feed.record_ids(step)"),
        ({"meshfeed": 99}, [], "A newer version of meshfeed wrote this state"),
        ({"position": 7}, [], "state mismatch in 'position'"),
    ],
)
def test_what_it_cannot_say(
    saved: tuple[pathlib.Path, list[list[int]]], change: dict[str, Any], arguments: list[Any], message: str
) -> None:
    path, _ = saved
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    result = run(path, *arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert "Traceback" not in result.output


class Sharded:
    def __len__(self) -> int:
        return 11

    def __getitem__(self, record_id: int) -> dict[str, np.ndarray]:
        return {"x": np.array(record_id)}

    def shard_lengths(self) -> np.ndarray:
        return np.array([5, 6])


@pytest.mark.parametrize(
    ("source", "shuffle", "named"),
    [
        (Sharded(), "shards", "the order 'shard-windows'"),
        (meshfeed.sources.Packed([{"tokens": np.arange(3)}] * 40, 8), True, "the order 'packing'"),
        (meshfeed.sources.Mixture({"a": [1] * 9, "b": [2] * 9}, weights={"a": 1, "b": 1}), True, "a mixture"),
    ],
    ids=["shards", "packed", "mixture"],
)
def test_an_order_that_it_cannot_compute(tmp_path: pathlib.Path, source: Any, shuffle: Any, named: str) -> None:
    with make_feed(source, shuffle=shuffle) as feed:
        next(feed)
        (tmp_path / "state.json").write_text(json.dumps(feed.get_state()))
    result = run(tmp_path / "state.json")
    assert result.exit_code == 1
    assert named in result.output
    assert "call feed.record_ids(step)" in result.output


def test_a_folder_without_a_state(tmp_path: pathlib.Path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "no feed state found" in result.output
    (tmp_path / "x.json").write_text('{"meshfeed": 1, ')
    damaged = run(tmp_path / "x.json").output
    assert damaged.startswith(f"Error: {tmp_path}/x.json holds no JSON object: Expecting property name")
    assert damaged.endswith("Pass a file with json.dumps(feed.get_state()), or a checkpoint folder.\n")
    (tmp_path / "y.json").write_text("[1, 2]")
    assert f"Error: {tmp_path}/y.json holds no JSON object. Pass a file" in run(tmp_path / "y.json").output
    assert "no feed state found. Pass" in run(tmp_path / "none").output
    assert "memory://run: no feed state found. Pass" in run("memory://run").output
