"""Nothing that another host wrote is unpickled, except the functions that a controller sends to its hosts."""

from __future__ import annotations

import ast
import base64
import json
import os
import pathlib
import pickle
from typing import Any

import cloudpickle
import jax
import numpy as np
import pytest
from small_pipeline import new_window_reports

from meshfeed import SourceError
from meshfeed._src.agreement.messages import WindowReport
from meshfeed._src.remote import client
from meshfeed._src.streams.protocol import HostBatch

ROOT = pathlib.Path(__file__).resolve().parent.parent / "src" / "meshfeed" / "_src"
UNSAFE = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}
ALLOWED = {
    "base.frames": "between a process and its own workers: children, over a socket pair, or Ray actors",
    "base.serving": "between a process and its own workers: children, over a socket pair, or Ray actors",
    "convert.run": "to this process's own children, over a socket pair",
    "reading.workers": "to this process's own workers",
    "testing.hosts": "to and from this process's own children, and in them its parent, over socket pairs",
}
FACTORIES = {("remote.client", "make_payload"), ("remote.client", "make_target")}
"""The user's functions, from the controller to its hosts. Documented there."""


def _uses(path: pathlib.Path) -> set[str]:
    """Functions that use a module that can run code while it reads, and "" for the module's own level."""
    tree = ast.parse(path.read_text())
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.partition(".")[0] in UNSAFE
    }
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNSAFE), path
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert ast.unparse(node.value) == "False", path
    found: set[str] = set()

    def visit(node: ast.AST, function: str) -> None:
        function = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Name) and node.id in names:
            found.add(function)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return found


@pytest.mark.slow
def test_only_these_modules_unpickle() -> None:
    found = {
        (".".join(path.relative_to(ROOT).with_suffix("").parts), function)
        for path in ROOT.rglob("*.py")
        for function in _uses(path)
    }
    assert {use for use in found if use[0] not in ALLOWED} == FACTORIES
    assert {module for module, _ in found} >= ALLOWED.keys(), "take modules that no longer pickle off the list"


class Trap:
    """Makes a folder in whoever unpickles it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def published(tree: Any) -> dict[int, WindowReport]:
    """What a host with a record and a host without one publish of their first window."""
    batches = [HostBatch(0, 4, tree, 8), HostBatch(0, 4, None, 0)]
    infos = [json.loads(json.dumps(new_window_reports().contents([batch]))) for batch in batches]
    return {host: WindowReport(1, contents=info) for host, info in enumerate(infos)}


@pytest.fixture
def no_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("unpickled")

    for module in (pickle, cloudpickle):
        monkeypatch.setattr(module, "loads", refuse)
        monkeypatch.setattr(module, "load", refuse)


@pytest.mark.usefixtures("no_unpickling")
def test_a_host_without_records_pads_with_what_the_others_announced() -> None:
    tree = {"x": np.ones((4, 3), np.float32), "y": (np.ones(4, np.int8), [np.ones((4, 0), bool)])}
    info, failure = new_window_reports().reduce(published(tree), 0, 1)
    assert failure is None
    other = new_window_reports()
    other.learn(json.loads(json.dumps(info)))
    zeros = other.materialize(HostBatch(0, 4, None, 0))
    assert jax.tree.structure(zeros) == jax.tree.structure(tree)
    for made, leaf in zip(jax.tree.leaves(zeros), jax.tree.leaves(tree), strict=True):
        assert (made.shape, made.dtype) == (leaf.shape, leaf.dtype)
        assert not made.any()


def test_records_that_cannot_be_described_stop_all_hosts_if_one_needs_them() -> None:
    jax.tree_util.register_pytree_node(Node, lambda node: ((node.x,), None), lambda _, children: Node(*children))
    parts = published(Node(np.ones(4)))
    _, failure = new_window_reports().reduce(parts, 0, 1)
    assert failure is not None
    error = failure.exception()
    assert isinstance(error, SourceError)
    assert str(error).startswith(
        "a host has no record of its own, and records of the structure PyTreeDef(CustomNode(Node"
    )
    assert "Convert them to dicts" in str(error)
    _, failure = new_window_reports().reduce({0: parts[0]}, 0, 1)
    assert failure is None, "no host needs the description"


class Node:
    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.usefixtures("no_unpickling")
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        [1, 2.5, "x"],
        {"a": (1, [2])},
        np.arange(6).reshape(2, 3),
        {"x": np.ones((2, 0), np.float32), "y": [np.array(3, np.int8)], "z": np.arange(3, dtype=">i4")},
    ],
)
def test_answers_of_remote_hosts_need_no_pickle(value: Any) -> None:
    back = client.decode_answer(client.encode_answer(value))
    assert jax.tree.structure(back) == jax.tree.structure(value)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(value), strict=True):
        assert type(one) is type(other)
        assert np.array_equal(one, other)


def test_a_pickle_from_another_host_is_not_read(tmp_path: pathlib.Path) -> None:
    payload = cloudpickle.dumps(Trap(str(tmp_path / "trapped")))
    window_reports = new_window_reports()
    window_reports.learn({"element": base64.b64encode(payload).decode()})
    with pytest.raises((TypeError, ValueError, KeyError)):
        window_reports.materialize(HostBatch(0, 4, None, 0))
    with pytest.raises(ValueError):
        client.decode_answer(b"P" + payload)
    assert not list(tmp_path.iterdir())
