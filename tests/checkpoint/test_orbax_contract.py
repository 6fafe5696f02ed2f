"""What programs written for Orbax's own array handler rely on: metadata, callbacks, limits and errors."""

from __future__ import annotations

import json
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_trees import abstract, assert_same, make_mesh, orbax_args, place, registered
from orbax.checkpoint._src.serialization import types as ocp_types

import meshfeed
from meshfeed._src.checkpoint import array_handler, exchange, restore
from meshfeed._src.checkpoint.plan import LeafRead
from meshfeed.checkpoint import ArrayHandler, ArraysHandler, ArraysSave, Checkpointer


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(4, 2)


@pytest.fixture(scope="module")
def tree(mesh):
    """Leaves that replicas share when they are saved, and others."""
    values = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    return {
        "replicated": place(values, mesh),
        "half": place(values, mesh, "data"),
        "whole": place(values, mesh, "data", "model"),
        "small": place(np.arange(8), mesh),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), place(np.arange(8), mesh, "data").sharding),
        "empty": place(np.zeros((0, 3), np.float32), mesh),
    }


def assert_shardings(tree, restored):
    for name in tree.keys() - {"empty", "keys"}:
        assert restored[name].sharding.is_equivalent_to(tree[name].sharding, tree[name].ndim), name
    assert_same(*({name: one[name] for name in tree if name not in ("empty", "keys")} for one in (tree, restored)))


def test_orbax_restores_the_shardings_that_were_saved(tmp_path, tree):
    with Checkpointer(tmp_path / "ours") as checkpointer:
        checkpointer.save(1, tree)
    with registered():
        ocp.PyTreeCheckpointer().save(tmp_path / "registered", args=ocp.args.PyTreeSave(tree))
        assert_shardings(tree, ocp.PyTreeCheckpointer().restore(tmp_path / "registered"))
        assert_shardings(tree, ocp.PyTreeCheckpointer().restore(tmp_path / "ours/1/arrays"))
    for path in ("ours/1/arrays", "registered"):
        assert_shardings(tree, ocp.PyTreeCheckpointer().restore(tmp_path / path))


def test_no_sharding_file_if_none_is_wanted(tmp_path, tree):
    with registered(enable_write_sharding_file=False):
        ocp.PyTreeCheckpointer().save(tmp_path / "a", args=ocp.args.PyTreeSave(tree))
    assert not (tmp_path / "a/_sharding").exists()


def test_shardings_of_checkpoints_whose_file_has_those_of_the_slices(tmp_path, tree):
    with registered():
        ocp.PyTreeCheckpointer().save(tmp_path / "a", args=ocp.args.PyTreeSave(tree))
        path = tmp_path / "a/_sharding"
        stored = json.loads(path.read_text())
        whole = stored[next(name for name in stored if _decoded(name) == "whole")]
        for name in stored:
            if _decoded(name) in ("replicated", "half"):
                stored[name] = whole
        path.write_text(json.dumps(stored))
        assert_shardings(tree, ocp.PyTreeCheckpointer().restore(tmp_path / "a"))


def _decoded(name):
    import base64

    return base64.b64decode(name).decode()


# ---------------------------------------------------------------------- callbacks


class Callback:
    """Counts how often it is asked for each parameter, and answers differently each time."""

    def __init__(self):
        self.asked: list[str] = []
        self.written: list[str] = []

    def key_priority(self, keypath):
        self.asked.append(jax.tree_util.keystr(keypath))
        late = self.asked.count(self.asked[-1]) % 2
        priorities = ocp_types.TransferPriority
        return priorities.ASYNCHRONOUS_DEPRIORITIZED if late else priorities.SYNCHRONOUS

    def on_transfer_start(self, keypath): ...
    def on_transfer_end(self, keypath): ...
    def on_write_start(self, keypath): ...
    def on_write_end(self, keypath):
        self.written.append(jax.tree_util.keystr(keypath))


def test_the_callback_is_asked_once_for_each_parameter_and_save(tmp_path, mesh):
    callback = Callback()
    state = {name: place(np.arange(4096, dtype=np.float32), mesh) for name in "abc"}
    names = ["['a']", "['b']", "['c']"]
    handler = ArraysHandler(array_handler={"callback": callback}, save_device_host_concurrent_gb=1)
    for number in (1, 2):
        handler.save(tmp_path / str(number), ArraysSave(state))
        assert sorted(callback.asked) == sorted(names * number)
        assert sorted(callback.written) == sorted(names * number)


# ---------------------------------------------------------------------- limits and errors


def test_restore_concurrent_gb_limits_the_memory_of_a_restore(tmp_path, tree, monkeypatch):
    seen = []
    restored = array_handler.restore

    def note(plan, options, *others):
        seen.append(options.memory_limit_bytes)
        return restored(plan, options, *others)

    monkeypatch.setattr(array_handler, "restore", note)
    state = {"w": tree["half"]}
    for given, limit, expected in ((None, None, 96 * 10**9), (None, 2, 2 * 10**9), (5000, 2, 5000)):
        with registered(memory_limit_bytes=given):
            handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)
            if not (tmp_path / "a").exists():
                ocp.Checkpointer(handler).save(tmp_path / "a", args=ocp.args.PyTreeSave(state))
            assert_same(state, ocp.Checkpointer(handler).restore(tmp_path / "a", args=orbax_args(abstract(state))))
        assert seen.pop() == expected


def test_a_large_limit_takes_no_more_memory_than_none():
    large = 96 * 10**9  # Orbax's default

    class Leaf:
        load = types.SimpleNamespace(broadcast=True, direct=False, shape=(8,))

        def extra_bytes(self):
            return 1 << 31

        block_bytes = LeafRead.block_bytes

    leaves = [Leaf() for _ in range(5)]
    assert [leaf.block_bytes(large) for leaf in leaves] == [leaf.block_bytes(None) for leaf in leaves] != [None] * 5
    Leaf.load.broadcast = False
    sizes = [[len(group) for group in restore._groups(leaves, limit)] for limit in (large, None)]
    assert sizes == [[2, 2, 1]] * 2
    assert exchange._row_bytes(1 << 40, 1, large) == exchange._row_bytes(1 << 40, 1, None)


def test_local_storage_of_each_host_is_read_by_that_host():
    assert ArrayHandler(primary_host=None).restore_options.restore == "every_host"
    assert ArrayHandler().restore_options.restore == "once"


def test_errors_are_also_those_that_orbax_raises(tmp_path, mesh):
    state = {"w": place(np.arange(16), mesh, "data")}
    with registered():
        checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
        checkpointer.save(tmp_path / "a", args=ocp.args.PyTreeSave(state))
        other = {"w": jax.ShapeDtypeStruct((8,), np.int32, sharding=state["w"].sharding)}
        with pytest.raises(ValueError, match="not compatible with") as caught:
            checkpointer.restore(tmp_path / "a", args=orbax_args(other))
        assert isinstance(caught.value, meshfeed.CheckpointError)
        (tmp_path / "a/w/.zarray").unlink()
        with pytest.raises(FileNotFoundError, match="'w'") as missing:
            checkpointer.restore(tmp_path / "a", args=orbax_args(state))
        assert isinstance(missing.value, meshfeed.CorruptDataError)
        assert isinstance(missing.value, meshfeed.checkpoint.DamagedCheckpointError)
