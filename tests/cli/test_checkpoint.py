"""meshfeed inspect, verify and diff over checkpoints that a Checkpointer really wrote, and import-position."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.cli import main
from meshfeed.checkpoint import IteratorHandler, IteratorRestore

ocp = pytest.importorskip("orbax.checkpoint")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main.main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Steps 1 and 2 of a small training with a feed."""
    folder = tmp_path_factory.mktemp("checkpoints")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    data = {"x": np.arange(40, dtype=np.int32)}
    with (
        meshfeed.MultiHostDataLoadIterator(data, mesh, global_batch_size=4, shuffle=True, prefetch=0) as feed,
        meshfeed.checkpoint.Checkpointer(folder, save_interval_steps=1) as checkpoints,
    ):
        state = {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "fixed": jnp.ones(4, jnp.int8), "lr": 0.5}
        for step in (1, 2):
            next(feed)
            state = {**state, "w": state["w"] + 1}
            checkpoints.save(step, state, feed, force=True)
        checkpoints.wait()
    return folder


@pytest.fixture
def damaged(folder: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy with a flipped bit in every data file of step 2; some hold older copies that nobody reads."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for path in (copy / "2" / "arrays").rglob("d/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    return copy


def test_inspect_lists_the_steps(folder: pathlib.Path) -> None:
    steps = json.loads(run("inspect", folder, "--json").output)["steps"]
    assert [(step["step"], step["position"], step["intact"]) for step in steps] == [(1, 4, True), (2, 8, True)]
    lines = run("inspect", folder).output.splitlines()
    assert lines[0].split() == ["step", "position", "feed", "step", "bytes", "leaves"]
    assert [line.split()[:3] for line in lines[1:]] == [["1", "4", "1"], ["2", "8", "2"]]


def test_inspect_of_one_step_lists_its_leaves(folder: pathlib.Path) -> None:
    for arguments in (("inspect", folder, "--step", 2), ("inspect", folder / "2")):
        output = run(*arguments).output
        assert "float32[2, 3], 24 B" in output
        assert "int8[4], 4 B" in output
        assert "0.5" in output
        assert '"position": 8' in output


def test_inspect_of_what_is_not_there(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert run("inspect", tmp_path).exit_code == 1
    assert run("inspect", tmp_path / "gone").output.endswith("gone: no such folder. Pass a Checkpointer's folder.\n")
    result = run("inspect", folder, "--step", 7)
    assert result.exit_code == 1
    assert "7" in result.output
    assert "Traceback" not in result.output


def test_verify_passes_what_is_whole_and_finds_a_flipped_bit(folder: pathlib.Path, damaged: pathlib.Path) -> None:
    whole = run("verify", folder)
    assert whole.exit_code == 0
    assert whole.output.count("intact") == 2
    broken = run("verify", damaged)
    assert broken.exit_code == 1
    assert "DAMAGED" in broken.output
    found = json.loads(run("verify", damaged, "--json").output)
    assert [row["intact"] for row in found["steps"]] == [True, False]
    assert run("verify", damaged, "--step", 1).exit_code == 0


def test_a_step_that_is_absent_is_not_called_damaged(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    assert "contains no steps" in (text := " ".join(run("verify", empty).output.split()))
    assert text.endswith("Pass a Checkpointer's folder.")
    result = run("verify", folder, "--step", 7)
    assert result.exit_code == 1
    assert "DAMAGED" not in result.output
    assert result.output.startswith(f"Error: step 7 is not in {folder}; its steps are: ")


def test_diff_of_whole_folders_says_what_to_give(folder: pathlib.Path) -> None:
    result = run("diff", folder, folder)
    assert result.exit_code == 1
    assert f"Pass one of its steps, such as {folder}/" in result.output


def test_diff_names_what_differs(folder: pathlib.Path) -> None:
    same = run("diff", folder / "1", folder / "1")
    assert (same.exit_code, same.output) == (0, "the same\n")
    different = run("diff", folder / "1", folder / "2")
    assert different.exit_code == 1
    lines = different.output.splitlines()
    assert "state position: 4 | 8" in lines
    assert [line for line in lines if line.startswith("leaf")] == [
        line for line in lines if "'w'" in line or " w:" in line
    ]
    assert "chunks differ" in different.output
    assert json.loads(run("diff", folder / "1", folder / "2", "--json").output)["same"] is False


def test_diff_of_two_states(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for name, position in (("a", 4), ("b", 8)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"meshfeed": 1, "position": position}))
    assert run("diff", tmp_path / "a.json", tmp_path / "b.json").output == "state position: 4 | 8\n"
    assert run("diff", tmp_path / "a.json", tmp_path / "none").exit_code == 1
    for content in ("", "[1]"):
        (tmp_path / "b.json").write_text(content)
        refused = run("diff", tmp_path / "a.json", tmp_path / "b.json")
        assert refused.output.startswith(f"Error: {tmp_path}/b.json holds no JSON object")


def make_feed(**settings: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    source = {"x": np.arange(40, dtype=np.int32)}
    return meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=4, prefetch=0, **settings)


@pytest.fixture
def position(tmp_path: pathlib.Path) -> list[Any]:
    """The arguments for what two hosts wrote after 3 batches."""
    (tmp_path / "iter").mkdir()
    for host in range(2):
        (tmp_path / "iter" / f"process_{host}-of-2.json").write_text(json.dumps({"next_index": 6}))
    with make_feed() as feed:
        (tmp_path / "template.json").write_text(json.dumps(feed.get_state()))
    return [tmp_path / "iter", tmp_path / "template.json", tmp_path / "out", "--global-batch-size", 4]


def test_import_position_prints_what_reads_its_output(position: list[Any], tmp_path: pathlib.Path) -> None:
    result = run("import-position", *position, "--step", 3)
    assert result.exit_code == 0, result.output
    first, _, line = result.output.splitlines()
    assert first == f"{tmp_path / 'out'}: after step 3, position 12 (random_access)"
    with make_feed() as feed:
        exec(line.strip(), {"feed": feed, "json": json})
        assert (feed.step, feed.position) == (3, 12)
        assert np.asarray(next(feed)["x"]).tolist() == [12, 13, 14, 15]
    with make_feed() as feed:
        ocp.Checkpointer(IteratorHandler()).restore(tmp_path / "out", args=IteratorRestore(feed))
        assert np.asarray(next(feed)["x"]).tolist() == [12, 13, 14, 15]
    written = " ".join(run("import-position", "--help").output.split())
    assert 'feed.set_state(json.load(open("OUTPUT/state.json"))["state"])' in written
    assert "IteratorRestore(feed)" in written


@pytest.mark.parametrize("scheme", ["file://", "memory://"])
def test_import_position_takes_urls(position: list[Any], tmp_path: pathlib.Path, scheme: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    source, template, output, *settings = position
    result = run("import-position", f"file://{source}", template, f"{scheme}{output}", *settings, "--step", 3)
    assert result.exit_code == 0, result.output
    with make_feed() as feed:
        exec(result.output.splitlines()[-1].strip(), {"feed": feed, "json": json, "fsspec": fsspec})
        assert feed.step == 3
    assert {path.name for path in tmp_path.iterdir()} <= {"iter", "template.json", "out"}


def test_import_position_asks_for_what_the_files_do_not_say(position: list[Any], tmp_path: pathlib.Path) -> None:
    result = run("import-position", *position)
    assert result.exit_code == 1
    assert "whether it counts records or batches" in result.output
    assert "--step" in result.output
    with make_feed(num_epochs=2) as feed:
        (tmp_path / "template.json").write_text(json.dumps(feed.get_state()))
    result = run("import-position", *position, "--step", 3)
    assert result.exit_code == 1
    assert "--unshuffled" in result.output
    assert not (tmp_path / "out").exists()
    assert run("import-position", *position, "--step", 3, "--unshuffled").exit_code == 0
    (tmp_path / "iter" / "process_1-of-2.json").unlink()
    result = run("import-position", *position, "--step", 3)
    assert result.exit_code == 1
    assert "hosts [1] of 2 are missing" in result.output


@pytest.mark.parametrize("text", ["{}", "", "[1, 2]", '{"next_index": 6}', '{"meshfeed": 1, "position": 4}', "\udcff"])
def test_a_template_that_is_none_is_refused_with_what_one_is(position: list[Any], text: str) -> None:
    position[1].write_bytes(text.encode(errors="surrogateescape"))
    result = run("import-position", *position, "--step", 3)
    assert result.exit_code == 1
    assert "template.json is not a template: " in result.output
    assert "json.dump(feed.get_state(), file)" in result.output


def test_a_template_after_its_first_batch_is_refused(position: list[Any]) -> None:
    with make_feed() as feed:
        next(feed)
        position[1].write_text(json.dumps(feed.get_state()))
    result = run("import-position", *position, "--step", 3)
    assert result.exit_code == 1
    assert "the feed has delivered batches" in result.output
