"""A damaged or missing file of a step is refused by its name, or makes no difference; never an error about something else."""

from __future__ import annotations

import json
import pathlib
import random
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_trees import assert_same, make_mesh, mixed_tree
from jax.sharding import Mesh

import meshfeed
from meshfeed import CheckpointError, CorruptDataError, StateMismatchError
from meshfeed._src.checkpoint import step as checkpoint_step
from meshfeed._src.checkpoint.step import diff
from meshfeed.checkpoint import Checkpointer, verify

REFUSALS = (CheckpointError, CorruptDataError, StateMismatchError)
STEP = 1
CHANGES = 30  # of one part of a JSON file; all of them, some 5,000, take a minute
WRONG_JSON: list[Any] = [None, [], {}, 5, "text", True, [[1]], {"": 1}]


def feed_of() -> meshfeed.Feed:
    source = meshfeed.sources.Memory({"x": np.arange(40, dtype=np.int32)})
    return meshfeed.Feed(source, Mesh(np.array(jax.devices()[:4]), ("data",)), global_batch_size=4, prefetch=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Any]:
    directory = tmp_path_factory.mktemp("damaged") / "c"
    tree = mixed_tree(make_mesh(4, 2), rows=64)
    with feed_of() as feed, Checkpointer(directory, save_interval_steps=1) as ckpt:
        next(feed)
        ckpt.save(STEP, tree, feed)
    return directory, tree


def files_of(directory: pathlib.Path) -> list[str]:
    step = directory / str(STEP)
    return sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file())


def damages(content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """What a file may become; None if it is gone."""
    yield "absent", None
    yield "empty", b""
    yield "cut in half", content[: len(content) // 2]
    yield "a byte short", content[:-1]
    yield "not text", bytes(range(128, 256))
    yield "other text", b"no JSON {"
    try:
        value = json.loads(content)
    except ValueError:
        return
    for other in WRONG_JSON:
        yield f"the JSON {other!r}", json.dumps(other).encode()
    every = list(changes(value))
    for where, changed in random.Random(0).sample(every, min(len(every), CHANGES)):
        yield where, json.dumps(changed).encode()


def changes(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The value with one part missing, or of another type."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(items)[:12]:
        here = f"{where}[{key!r}]"
        if isinstance(value, dict):
            yield f"without {here}", {name: other for name, other in value.items() if name != key}
        for other in (None, "text", [], {}, -1, 1.5, 1 << 70):
            if type(other) is not type(part) or other != part:
                yield f"{here} = {other!r}", _with(value, key, other)
        for deeper, changed in changes(part, here):
            yield deeper, _with(value, key, changed)


def _with(value: Any, key: Any, part: Any) -> Any:
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = part
    return copy


def check(directory: pathlib.Path, tree: Any, name: str, what: str) -> bool:
    """Restores a step of which one file is damaged; whether it was refused."""
    with feed_of() as feed:
        before = feed.get_state()
        try:
            with Checkpointer(directory) as ckpt:
                step, restored = ckpt.restore(tree, feed, step=STEP)
        except REFUSALS as error:
            refusal = str(error)
        else:
            refusal = None
        if refusal is not None:
            assert pathlib.Path(name).name in refusal, f"{what}: the error does not name the file: {refusal}"
            assert feed.get_state() == before, what
            return True
        assert (step, feed.position) == (STEP, 4), what
        assert_same(tree, restored)
        return False


@pytest.mark.slow
def test_each_file_of_a_step(saved: tuple[pathlib.Path, Any], tmp_path: pathlib.Path) -> None:
    directory, tree = saved
    wrong: list[str] = []
    refused = 0
    for name in files_of(directory):
        copy = tmp_path / "c"
        shutil.copytree(directory, copy)
        path = copy / str(STEP) / name
        content = path.read_bytes()
        for what, damaged in damages(content):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            try:
                refused += check(copy, tree, name, what)
            except Exception as error:
                wrong.append(f"{name}: {what}: {type(error).__name__}: {str(error)[:300]}")
            path.write_bytes(content)
        shutil.rmtree(copy)
    assert not wrong, f"{len(wrong)} of {refused}:\n" + "\n".join(wrong)
    assert refused > 100


@pytest.mark.parametrize(
    "name", ["arrays/_METADATA", "arrays/meshfeed/manifest.json", "iterator/metadata", "iterator/state.json"]
)
def test_a_file_that_cannot_be_read_is_a_finding(
    saved: tuple[pathlib.Path, Any], tmp_path: pathlib.Path, name: str
) -> None:
    """Such as on a disk with errors; here a folder is in its place."""
    shutil.copytree(saved[0], tmp_path / "c")
    path = tmp_path / "c" / str(STEP) / name
    path.unlink()
    path.mkdir()
    (finding,) = verify(tmp_path / "c")
    assert any(str(path) in problem for problem in finding.problems), finding.problems
    if path.suffix == ".json":
        with pytest.raises(CheckpointError, match="cannot be read"):
            diff(tmp_path / "c" / str(STEP), saved[0] / str(STEP))


@pytest.mark.parametrize(
    "error",
    [
        OSError(24, "Too many open files"),
        TimeoutError("no answer"),
        RuntimeError("can't start new thread"),
        MemoryError(),
    ],
    ids=repr,
)
def test_an_error_that_says_nothing_about_the_step_is_no_damage(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It would be passed over: training would go back, and the next save would rename an intact step."""
    directory, tree = tmp_path / "c", {"w": np.arange(4)}
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        for step in (1, 2):
            ckpt.save(step, tree, None)
        real = checkpoint_step.read_manifest

        def read(arrays: Any) -> Any:
            if arrays.parent.name == "2":
                raise error
            return real(arrays)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_step, "read_manifest", read)
            with pytest.raises(CheckpointError, match="step 2") as raised:
                ckpt.restore(tree)
        assert raised.value.step == 2
        step, restored = ckpt.restore(tree)
        assert step == 2
        assert_same(tree, restored)
        ckpt.save(3, tree, None)
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["1", "2", "3"]
