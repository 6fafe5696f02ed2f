"""Between meshfeed and plain Orbax: its trees come back as it gives them, and it loads our steps without arguments."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_trees import assert_same, make_mesh, place, registered
from orbax.checkpoint import v1

from meshfeed.checkpoint import ArraysHandler, ArraysRestore, restore_once


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(4, 2)


@pytest.fixture(scope="module")
def tree(mesh):
    return {
        "layers": [{"w": place(np.arange(64, dtype=np.float32), mesh, "data")}, {"w": place(np.ones(8), mesh)}],
        "pair": (np.arange(3), 2.5, (True, 7)),
        "empty": {"dict": {}, "list": [], "tuple": (), "none": None},
        "key": jax.random.key(3, impl="rbg"),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(0), 8), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        ),
        "legacy key": jax.random.PRNGKey(0),
        "0": place(np.arange(8, dtype=np.int32), mesh, None),
    }


def assert_as_orbax_gives(expected, found):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_same(expected, found, shardings=False)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert not isinstance(ours, jax.Array) or ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)


@pytest.mark.parametrize("settings", [{}, {"use_ocdbt": False}, {"use_zarr3": True}])
def test_a_tree_of_plain_orbax_without_an_abstract_one(tmp_path, tree, settings):
    tree = {**tree, "text": "hello"}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**settings)).save(tmp_path / "a", args=ocp.args.PyTreeSave(tree))
    expected = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**settings)).restore(tmp_path / "a")
    assert_as_orbax_gives(expected, restore_once(tmp_path / "a", None))
    assert_as_orbax_gives(expected, ArraysHandler().restore(tmp_path / "a", ArraysRestore()))


def test_trees_of_other_savers_and_other_roots(tmp_path, tree):
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(4, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        assert_as_orbax_gives(manager.restore(4), restore_once(tmp_path / "manager/4", None))
    v1.save(tmp_path / "v1", tree)
    assert_as_orbax_gives(v1.load(tmp_path / "v1"), restore_once(tmp_path / "v1", None))
    for number, root in enumerate(([tree["0"], {"n": 1}], tree["0"], 5, {"a": {}})):
        ocp.PyTreeCheckpointer().save(tmp_path / str(number), args=ocp.args.PyTreeSave(root))
        expected = ocp.PyTreeCheckpointer().restore(tmp_path / str(number))
        assert_as_orbax_gives(expected, restore_once(tmp_path / str(number), None))
    with registered():
        ocp.PyTreeCheckpointer().save(tmp_path / "ours", args=ocp.args.PyTreeSave(tree))
        expected = ocp.PyTreeCheckpointer().restore(tmp_path / "ours")
    assert_as_orbax_gives(expected, restore_once(tmp_path / "ours", None))


def test_shardings_that_do_not_fit_these_devices(tmp_path, tree):
    state = {"layers": tree["layers"]}
    ocp.PyTreeCheckpointer().save(tmp_path / "a", args=ocp.args.PyTreeSave(state))
    (tmp_path / "a/_sharding").unlink()
    assert_same(state, restore_once(tmp_path / "a", None), shardings=False)
