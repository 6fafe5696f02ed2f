"""The plan of a restore as a value: the way of each leaf, and the conversions that make it a leaf."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from checkpoint_trees import make_mesh, place, special_floats

from meshfeed._src.checkpoint import plan as checkpoint_plan
from meshfeed._src.checkpoint.match import match_tree
from meshfeed._src.checkpoint.options import RestoreOptions
from meshfeed._src.checkpoint.plan import PlannedLeaf
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed.checkpoint import ArraysHandler, ArraysSave


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(4, 2)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, mesh):
    directory = tmp_path_factory.mktemp("plan") / "a"
    values = special_floats(np.float32, 1 << 18).reshape(512, 512)
    tree = {
        "columns": place(values, mesh, None, ("data", "model")),
        "keys": jax.random.split(jax.random.key(0), 4),
        "large": place(values, mesh, None, "model"),
        "n": np.arange(3),
        "number": 7,
        "small": place(values[0].copy(), mesh),
        "text": "text",
    }
    ArraysHandler().save(directory, ArraysSave(tree))
    return StoredArrays(directory)


def ways(stored, options=None, *, remote=False):
    matched = match_tree(stored, None, partial=False, strict=True)
    planned = matched.with_ways(options or RestoreOptions(), remote=remote)
    assert [one.leaf for one in planned.reads] == [one.leaf for one in matched.reads]
    assert all(one.way == "pieces" and one.load.direct for one in matched.reads)  # the plan before is as it was
    return {one.leaf.name: one.way for one in planned.reads}


def test_the_way_of_each_leaf(stored, monkeypatch):
    names = ["columns", "keys", "large", "n", "small"]  # numbers and text are in the manifest
    assert ways(stored) == dict.fromkeys(names, "pieces")
    monkeypatch.setattr(checkpoint_plan, "process_count", lambda: 2)
    several = dict.fromkeys(names, "packed") | {"columns": "pieces", "large": "pieces"}
    assert ways(stored) == several
    assert ways(stored, RestoreOptions("every_host")) == dict.fromkeys(names, "pieces")
    assert ways(stored, remote=True) == several | dict.fromkeys(["columns", "large", "small"], "remote")


def test_a_replica_reads_pieces_and_sends_them(stored):
    plan = match_tree(stored, None, partial=False, strict=True).with_ways(RestoreOptions("single_replica", "data", 3))
    loads = {read.leaf.name: read.load for read in plan.reads}
    assert loads["large"].broadcast == loads["small"].broadcast == ("data", 3)
    assert loads["columns"].direct  # it has no replicas
    assert loads["n"].sharding is None


def test_conversions_are_applied_in_order(stored):
    leaf = PlannedLeaf(value=2).followed_by(lambda value: value + 1, lambda value: value * 10)
    assert leaf.followed_by(str).leaf({}) == "30"
    assert leaf.leaf({}) == 30  # it is a value: what follows it is another plan
    plan = match_tree(stored, None, partial=False, strict=True)
    values = dict(zip(sorted(stored.kinds), plan.leaves, strict=True))
    assert values["number"].leaf({}) == 7
    assert values["text"] == PlannedLeaf(value="text", conversions=values["text"].conversions)
    numpy = values["n"]
    assert numpy.read is not None
    assert numpy.leaf({numpy.read: np.arange(3)}).tolist() == [0, 1, 2]
    with pytest.raises(dataclasses.FrozenInstanceError):
        numpy.read.way = "packed"  # pyright: ignore[reportAttributeAccessIssue]
