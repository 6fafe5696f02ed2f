"""What happens when a version of Orbax has renamed what is private."""

from __future__ import annotations

import importlib
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_trees import make_mesh, place, registered
from orbax.checkpoint._src.futures import signaling_client, synchronization

from meshfeed._src.checkpoint import orbax_internals
from meshfeed.checkpoint import ArrayHandler, Checkpointer

MODULE = "orbax.checkpoint._src.metadata.array_metadata_store"


def test_the_names_are_there(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        assert callable(manager._checkpointer.wait_until_finished)
    assert type(orbax_internals.metadata_store()).__name__ == "Store"
    assert orbax_internals.sharding_writer() is not None
    module, _, name = orbax_internals.JSON_HANDLER.rpartition(".")
    assert getattr(importlib.import_module(module), name).__name__ == "JsonHandler"
    assert callable(signaling_client.get_signaling_client.cache_clear)
    number = orbax_internals.operation_number()
    orbax_internals.count_operations(number + 2)
    orbax_internals.count_operations(number + 1)
    assert orbax_internals.operation_number() == number + 2
    assert caplog.records == []


def test_without_the_names_of_its_signals_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(synchronization, "OperationIdGenerator")
        assert orbax_internals.operation_number() == 0
        orbax_internals.count_operations(3)
    with monkeypatch.context() as patch:
        patch.delattr(signaling_client, "get_signaling_client")
        orbax_internals.follow_job()


def test_without_the_writer_of_shardings_orbax_writes_those_of_the_slices(
    tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from orbax.checkpoint._src.serialization import jax_array_handlers

    mesh = make_mesh(8)
    tree = {"w": place(np.zeros((512, 512), np.float32), mesh)}
    with monkeypatch.context() as patch:
        patch.delattr(jax_array_handlers, "_async_serialize_shardings")
        assert orbax_internals.sharding_writer() is None
    assert "writes shardings elsewhere" in caplog.text
    monkeypatch.setattr("meshfeed._src.checkpoint.array_handler.sharding_writer", lambda: None)
    with registered():
        ocp.PyTreeCheckpointer().save(tmp_path / "a", args=ocp.args.PyTreeSave(tree))
        assert ocp.PyTreeCheckpointer().restore(tmp_path / "a")["w"].sharding.is_fully_replicated
    assert not ocp.PyTreeCheckpointer().restore(tmp_path / "a")["w"].sharding.is_fully_replicated


def test_without_the_metadata_store_keys_are_saved_with_a_warning(
    tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    key = jax.random.key(3)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"key": key})
    assert "stores the metadata of arrays elsewhere" in caplog.text
    with Checkpointer(tmp_path) as checkpointer:
        _, restored = checkpointer.restore({"key": key})
    assert restored["key"].dtype == key.dtype
    np.testing.assert_array_equal(jax.random.key_data(restored["key"]), jax.random.key_data(key))


def test_no_attribute_of_orbaxs_handler_is_overwritten() -> None:
    theirs, ours = vars(ocp.type_handlers.ArrayHandler()), vars(ArrayHandler())
    assert not {name for name in ours.keys() - theirs.keys() if hasattr(ocp.type_handlers.ArrayHandler, name)}
    changed = {name for name in theirs if type(ours[name]) is not type(theirs[name])}
    assert changed <= {"_array_metadata_store", "_min_slice_bytes_for_replica_parallel"}
