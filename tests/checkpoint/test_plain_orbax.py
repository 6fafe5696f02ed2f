"""Between meshfeed and plain Orbax: its trees come back as it gives them, and it loads our steps without arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_feeds import CountingFeed
from checkpoint_trees import assert_same, make_mesh, orbax_args, place, registered
from orbax.checkpoint import v1

from meshfeed.checkpoint import (
    ArraysHandler,
    ArraysRestore,
    Checkpointer,
    IteratorRestore,
    IteratorSave,
    restore_once,
    verify,
)


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


@pytest.mark.slow
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
        files = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
        files.save(tmp_path / f"files-{number}", args=ocp.args.PyTreeSave(root))
        assert_as_orbax_gives(expected, restore_once(tmp_path / f"files-{number}", None))
    with registered():
        ocp.PyTreeCheckpointer().save(tmp_path / "ours", args=ocp.args.PyTreeSave(tree))
        expected = ocp.PyTreeCheckpointer().restore(tmp_path / "ours")
    assert_as_orbax_gives(expected, restore_once(tmp_path / "ours", None))


@pytest.mark.parametrize(("saved", "stored"), [("float8_e4m3", "float16"), ("uint4", "uint8"), ("uint2", "uint8")])
def test_dtypes_that_tensorstore_lacks(tmp_path, saved, stored):
    """As docs/how-to/checkpoints.md says."""
    values = place(np.arange(4).astype(saved), make_mesh(1))
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": values})
    path = tmp_path / "1/arrays"

    def restore_as(dtype):
        leaf = jax.ShapeDtypeStruct(values.shape, dtype, sharding=values.sharding)
        return ocp.PyTreeCheckpointer().restore(path, args=orbax_args({"w": leaf}))["w"]

    for found in (ocp.PyTreeCheckpointer().restore(path)["w"], restore_as(stored)):
        assert found.dtype == stored
        np.testing.assert_array_equal(np.asarray(found), np.arange(4))
    with pytest.raises(ValueError, match=f'Unsupported data type: "{saved}"'):
        restore_as(saved)
    assert_same({"w": values}, restore_once(path, {"w": jax.ShapeDtypeStruct((4,), saved, sharding=values.sharding)}))


def test_shardings_that_do_not_fit_these_devices(tmp_path, tree):
    state = {"layers": tree["layers"]}
    ocp.PyTreeCheckpointer().save(tmp_path / "a", args=ocp.args.PyTreeSave(state))
    (tmp_path / "a/_sharding").unlink()
    assert_same(state, restore_once(tmp_path / "a", None), shardings=False)


WITHOUT_MESHFEED = """
import json, sys
import jax, numpy as np
from orbax.checkpoint import v1
import orbax.checkpoint as v0
loaded = v1.load_checkpointables(sys.argv[1])
with v1.training.Checkpointer(sys.argv[1].rpartition("/")[0]) as checkpointer:
    again = checkpointer.load_checkpointables(1)
assert "meshfeed" not in sys.modules
assert loaded["iterator"] == again["iterator"]
assert str(loaded["arrays"]["f8"].dtype) == "float8_e4m3fn"
print(json.dumps([loaded["iterator"], np.asarray(loaded["arrays"]["f8"]).view(np.uint8).tolist(), sorted(loaded)]))
"""


@pytest.mark.slow
def test_orbax_v1_loads_our_steps_without_arguments(tmp_path, tree):
    feed, f8 = CountingFeed(), np.arange(256, dtype=np.uint8)
    next(feed)
    state = {**tree, "f8": place(f8.view("float8_e4m3fn"), make_mesh(1))}
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, state, feed)
        ckpt.save(2, {"w": np.arange(3)})
    loaded = v1.load_checkpointables(tmp_path / "c/1")
    assert_same(v1.load(tmp_path / "c/1"), loaded["arrays"])
    assert_same({"w": np.arange(3)}, v1.load_checkpointables(tmp_path / "c/2")["arrays"])
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "-c", WITHOUT_MESHFEED, str(tmp_path / "c/1")]
    elsewhere = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert elsewhere.returncode == 0, elsewhere.stderr
    position, values, names = json.loads(elsewhere.stdout)
    assert (values, names) == (f8.tolist(), ["arrays", "iterator"])
    for state in (loaded["iterator"], position):
        other = CountingFeed()
        other.set_state(state)
        assert other.position == 4


def test_orbax_v0_restores_a_position_without_arguments(tmp_path):
    feed = CountingFeed()
    next(feed)
    with ocp.CheckpointManager(tmp_path / "m") as manager:
        manager.save(1, args=ocp.args.Composite(data=IteratorSave(feed)))
    with ocp.CheckpointManager(tmp_path / "m") as manager:
        assert manager.restore(1).data == feed.get_state()
        other = CountingFeed()
        manager.restore(1, args=ocp.args.Composite(data=IteratorRestore(other)))
        assert other.position == 4
        assert manager.save(2, args=ocp.args.Composite(data=IteratorSave(other)))


def test_the_state_that_plain_orbax_reads_is_verified(tmp_path):
    feed = CountingFeed()
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, {"w": np.arange(3)}, feed)
    assert verify(tmp_path / "c")[0].intact
    copy = tmp_path / "c/1/iterator/metadata"
    copy.write_text(copy.read_text().replace('"position":0', '"position":8'))
    (found,) = verify(tmp_path / "c")
    assert [problem for problem in found.problems if str(copy) in problem]
