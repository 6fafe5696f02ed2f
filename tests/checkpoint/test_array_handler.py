"""Our TypeHandler inside plain Orbax, and what Orbax's own array handler can do."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_trees import abstract, assert_same, make_mesh, orbax_args, place, registered, special_floats
from jax.sharding import Mesh
from orbax.checkpoint._src.multihost import dispatchers

from meshfeed._src.base.errors import CheckpointError, CorruptDataError, SettingsError
from meshfeed._src.checkpoint import handlers, stored
from meshfeed._src.checkpoint import restore as checkpoint_restore
from meshfeed._src.checkpoint.layout import LoadPlan
from meshfeed._src.checkpoint.plan import LeafRead, choose_ways
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed.checkpoint import (
    ArrayHandler,
    ArraysHandler,
    ArraysRestore,
    ArraysSave,
    Checkpointer,
    RestoreOptions,
    restore_once,
    verify,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(4, 2)


@pytest.fixture(scope="module")
def tree(mesh):
    return {
        "bf16": place(special_floats(jnp.bfloat16, 1 << 16).reshape(256, 256), mesh),
        "f8": place(special_floats(jnp.float8_e5m2, 1 << 12).reshape(64, 64), mesh, "data"),
        "u4": place((np.arange(4096) % 16).astype(jnp.uint4), mesh, "model"),
        "f32": place(special_floats(np.float32, 1 << 14).reshape(128, 128), mesh, "data", "model"),
        "none": None,
        "n": np.arange(4),
        "key": jax.random.split(jax.random.key(0), 4),
    }


@pytest.mark.parametrize("restore", ["once", "single_replica", "every_host"])
def test_registered_for_jax_arrays(tmp_path, mesh, tree, restore):
    with registered(restore=restore):
        checkpointer = ocp.PyTreeCheckpointer()
        checkpointer.save(tmp_path / "a", args=ocp.args.PyTreeSave(tree))
        assert_same(tree, checkpointer.restore(tmp_path / "a", args=orbax_args(abstract(tree))))
        again = checkpointer.restore(tmp_path / "a")  # shardings from Orbax's sharding file
        assert_same(tree, again, shardings=False)
        assert again["f32"].sharding.is_equivalent_to(tree["f32"].sharding, 2)


def test_an_item_is_saved_where_an_event_loop_runs(tmp_path, tree):
    """As in a notebook, in which ``asyncio.run`` is an error."""

    handler = ArraysHandler()

    async def cell() -> None:
        handler.save(tmp_path / "a", ArraysSave(tree))

    asyncio.run(cell())
    handler.finalize(tmp_path / "a")
    assert_same(tree, handler.restore(tmp_path / "a", ArraysRestore(abstract(tree))))


def test_async_and_composite_with_a_manager(tmp_path, tree):
    with registered(), ocp.CheckpointManager(tmp_path / "m") as manager:
        manager.save(1, args=ocp.args.Composite(state=ArraysSave(tree), plain=ocp.args.PyTreeSave({"w": tree["f32"]})))
        manager.wait_until_finished()
        args = ocp.args.Composite(state=ArraysRestore(abstract(tree)), plain=orbax_args({"w": tree["f32"]}))
        restored = manager.restore(1, args=args)
    assert_same(tree, restored.state)
    assert_same({"w": tree["f32"]}, restored.plain)


def test_plain_orbax_checkpoints_are_read_once(tmp_path, mesh, tree):
    plain = {key: leaf for key, leaf in tree.items() if key not in ("f8", "u4")}
    plain |= {"nested": {"list": [place(np.arange(8), mesh), 3]}, "text": "hello"}
    for number, settings in enumerate(({}, {"use_ocdbt": False}, {"use_zarr3": True})):
        path = tmp_path / f"plain-{number}"
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**settings)).save(path, args=ocp.args.PyTreeSave(plain))
        assert_same(plain, restore_once(path, abstract(plain)))
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(4, args=ocp.args.StandardSave({**plain, "text": 1}))
        manager.wait_until_finished()
    assert_same({**plain, "text": 1}, restore_once(tmp_path / "manager/4", abstract({**plain, "text": 1})))
    flat = restore_once(tmp_path / "plain-0", None)
    np.testing.assert_array_equal(np.asarray(flat["f32"]).view(np.uint32), np.asarray(plain["f32"]).view(np.uint32))


def test_damage_under_plain_orbax(tmp_path, mesh):
    state = {"w": place(np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32), mesh, "data")}
    with registered():
        ocp.PyTreeCheckpointer().save(tmp_path / "a", args=ocp.args.PyTreeSave(state))
        file = max((tmp_path / "a").rglob("d/*"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 3] ^= 16
        file.write_bytes(bytes(data))
        with pytest.raises(CorruptDataError, match="'w'"):
            ocp.PyTreeCheckpointer().restore(tmp_path / "a", args=orbax_args(abstract(state)))


def test_casts_and_shapes_that_differ(tmp_path, mesh):
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    state = {"w": place(values, mesh, "data")}
    with registered():
        ocp.PyTreeCheckpointer().save(tmp_path / "a", args=ocp.args.PyTreeSave(state))

        def restore(shape, dtype, strict):
            arg = ocp.ArrayRestoreArgs(
                sharding=state["w"].sharding, global_shape=shape, shape=shape, dtype=dtype, strict=strict
            )
            args = ocp.args.PyTreeRestore(restore_args={"w": arg})
            return np.asarray(ocp.PyTreeCheckpointer().restore(tmp_path / "a", args=args)["w"])

        np.testing.assert_array_equal(restore((8, 8), jnp.bfloat16, True), values.astype(jnp.bfloat16))
        np.testing.assert_array_equal(restore((4, 6), None, False), values[:4, :6])
        padded = np.zeros((12, 9), np.int32)
        padded[:8, :8] = values
        np.testing.assert_array_equal(restore((12, 9), np.int32, False), padded)
        with pytest.raises(CheckpointError, match="strict=False"):
            restore((12, 9), None, True)


def test_casts_on_save(tmp_path, mesh):
    values = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    state = {"w": place(values, mesh, "data")}
    save_args = {"w": ocp.SaveArgs(dtype=jnp.bfloat16)}
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "a", args=ArraysSave(state, save_args))
    wanted = {"w": place(values.astype(jnp.bfloat16), mesh, "data")}
    assert_same(wanted, restore_once(tmp_path / "a", abstract(wanted)))
    assert StoredArrays(tmp_path / "a").open("w").dtype.name == "bfloat16"


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0)])
def test_empty_arrays(tmp_path, mesh, shape):
    state = {"z": place(np.zeros(shape, np.float16), mesh), "w": place(np.ones(4, np.float32), mesh)}
    with registered():
        ocp.PyTreeCheckpointer().save(tmp_path / "a", args=ocp.args.PyTreeSave(state))
        assert_same(state, ocp.PyTreeCheckpointer().restore(tmp_path / "a", args=orbax_args(abstract(state))))


def test_trees_of_nothing(tmp_path):
    for number, tree in enumerate(({}, None, {"a": None, "b": []}, {"z": np.zeros(0)})):
        ocp.Checkpointer(ArraysHandler()).save(tmp_path / str(number), args=ArraysSave(tree))
        restored = ocp.Checkpointer(ArraysHandler()).restore(tmp_path / str(number), args=ArraysRestore(tree))
        assert jax.tree.structure(restored) == jax.tree.structure(tree)


def test_host_memory_and_layouts(tmp_path, mesh):
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    values = np.arange(1024, dtype=np.float32).reshape(32, 32)
    state = {"w": place(values, mesh, "data")}
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "a", args=ArraysSave(state))
    assert "pinned_host" in kinds
    sharding = state["w"].sharding.with_memory_kind("pinned_host")
    wanted = {"w": jax.ShapeDtypeStruct((32, 32), np.float32, sharding=sharding)}
    restored = restore_once(tmp_path / "a", wanted)["w"]
    assert restored.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(restored), values)
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "b", args=ArraysSave({"w": restored}))
    assert_same(state, restore_once(tmp_path / "b", abstract(state)))
    layout = jax.experimental.layout.Layout((1, 0))
    form = jax.experimental.layout.Format(layout, state["w"].sharding)
    wanted = {"w": jax.ShapeDtypeStruct((32, 32), np.float32, sharding=form)}
    restored = restore_once(tmp_path / "a", wanted)["w"]
    assert restored.format.layout.major_to_minor == (1, 0)
    np.testing.assert_array_equal(np.asarray(restored), values)


def test_replicas_share_the_saving_down_to_a_least_slice(tmp_path, mesh):
    small = {"w": place(np.zeros((64, 64), np.float32), mesh), "v": place(np.zeros((1024, 64), np.float32), mesh)}
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "small", args=ArraysSave(small))
    stored = StoredArrays(tmp_path / "small")
    assert stored.chunk_of("w") == [64, 64]  # not eight of 2 KiB
    assert stored.chunk_of("v") == [256, 64]  # four of 64 KiB
    assert stored.manifest is not None
    assert [stored.manifest.leaves[name]["chunk"] for name in "wv"] == [[64, 64], [256, 64]]
    state = {"w": place(np.zeros((512, 256), np.float32), mesh)}  # 512 KiB on eight devices
    for least, rows in ((None, 64), (1 << 17, 128), (1 << 30, 512)):
        handler = ArraysHandler(array_handler={"min_slice_bytes_for_replica_parallel": least})
        ocp.Checkpointer(handler).save(tmp_path / f"a{rows}", args=ArraysSave(state))
        assert StoredArrays(tmp_path / f"a{rows}").chunk_of("w") == [rows, 256]
        assert_same(state, restore_once(tmp_path / f"a{rows}", abstract(state)))
    handler = ArraysHandler(array_handler={"use_replica_parallel": False})
    ocp.Checkpointer(handler).save(tmp_path / "whole", args=ArraysSave(state))
    assert StoredArrays(tmp_path / "whole").chunk_of("w") == [512, 256]


def test_large_slices_are_stored_in_chunks_that_more_hosts_can_share(tmp_path):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    values = np.random.default_rng(0).integers(0, 255, (48 << 20,), np.uint8).reshape(3072, -1)
    state = {"w": jax.device_put(values, device)}
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "a", args=ArraysSave(state))
    stored = StoredArrays(tmp_path / "a")
    assert np.prod(stored.chunk_of("w")) <= 16 << 20
    assert len(stored.saved("w").units) == len(stored.saved("w").digests) > 2
    assert_same(state, restore_once(tmp_path / "a", abstract(state)))


def test_memory_limited_and_prioritised_transfers(tmp_path, mesh):
    class Callback:
        def __init__(self):
            self.written = []

        def key_priority(self, keypath):
            late = "late" in str(keypath)
            priorities = ocp_types.TransferPriority
            return priorities.ASYNCHRONOUS_DEPRIORITIZED if late else priorities.SYNCHRONOUS

        def on_transfer_start(self, keypath): ...
        def on_transfer_end(self, keypath): ...
        def on_write_start(self, keypath): ...
        def on_write_end(self, keypath):
            self.written.append(str(keypath))

    from orbax.checkpoint._src.serialization import types as ocp_types

    callback = Callback()
    state = {f"late{i}": place(np.full((64, 64), i, np.float32), mesh, "data") for i in range(4)}
    state["early"] = place(np.ones((64, 64), np.float32), mesh)
    handler = ArraysHandler(array_handler={"callback": callback}, save_device_host_concurrent_gb=1)
    with ocp.AsyncCheckpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "a", args=ArraysSave(state))
        checkpointer.wait_until_finished()
    assert len(callback.written) == 5
    assert "early" in callback.written[0]
    assert_same(state, restore_once(tmp_path / "a", abstract(state)))


def test_local_storage_per_host(tmp_path, mesh):
    state = {"w": place(np.arange(64, dtype=np.float32), mesh, "data"), "n": np.arange(3)}
    handler = ArraysHandler(
        array_handler={"primary_host": None, "replica_id": None, "use_replica_parallel": False},
        multiprocessing_options=ocp.options.MultiprocessingOptions(primary_host=None),
    )
    options = ocp.options.MultiprocessingOptions(primary_host=None)
    ocp.Checkpointer(handler, multiprocessing_options=options).save(tmp_path / "a", args=ArraysSave(state))
    assert_same(state, restore_once(tmp_path / "a", abstract(state)))


def test_the_manifest_is_written_by_one_host_whatever_the_array_handler_is_given(tmp_path, monkeypatch):
    for options, host, written in [
        (None, 0, True),
        (None, 1, False),
        ({"use_replica_parallel": False}, 1, False),
        ({"primary_host": None, "replica_id": None, "use_replica_parallel": False}, 1, True),
    ]:
        monkeypatch.setattr(handlers, "process_index", lambda host=host: host)
        directory = tmp_path / f"{host} {options}"
        ArraysHandler(array_handler=options).save(directory, ArraysSave({"n": np.arange(3)}))
        assert (directory / stored.FOLDER / f"{stored.TREE_PART}.json").exists() == written, options


class LocalDispatcher(dispatchers.Dispatcher):
    """Runs on this host what a dispatcher of remote workers runs there."""

    def __init__(self):
        self.calls = 0

    def name(self):
        return "local"

    def device_to_host(self, arrays):
        return arrays

    def dispatch(self, func, *, input_arrays=None, result_specs=None, func_args=(), func_kwargs=None):
        self.calls += 1
        arrays = () if input_arrays is None else (input_arrays,)
        return func(*arrays, *func_args, **(func_kwargs or {}))


@pytest.mark.parametrize("how", ["ArraysHandler", "ArrayHandler"])
def test_dispatchers_save_and_restore(tmp_path, mesh, how):
    state = {
        "w": place(np.arange(64, dtype=np.float32), mesh, "data"),
        "f8": place(special_floats("float8_e5m2", 256), mesh),
        "carried": place(special_floats("float8_e4m3", 256), mesh),
        "empty": place(np.zeros((0, 3), np.float32), mesh),
        "keys": jax.random.split(jax.random.key(0), 4),
        "n": np.arange(3),
    }
    wanted = {**state, "w": place(np.arange(64, dtype=np.float32), mesh, None)}
    dispatcher = LocalDispatcher()
    if how == "ArrayHandler":
        with registered(dispatcher=dispatcher):
            ocp.PyTreeCheckpointer().save(tmp_path / "a", args=ocp.args.PyTreeSave(state))
            saved = dispatcher.calls
            restored = ocp.PyTreeCheckpointer().restore(tmp_path / "a", args=orbax_args(abstract(wanted)))
    else:
        handler = ArraysHandler(array_handler={"dispatcher": dispatcher})
        with ocp.AsyncCheckpointer(handler) as checkpointer:
            checkpointer.save(tmp_path / "a", args=ArraysSave(state))
            checkpointer.wait_until_finished()
            saved = dispatcher.calls
            restored = checkpointer.restore(tmp_path / "a", args=ArraysRestore(abstract(wanted)))
    assert dispatcher.calls == saved + 1 > 1
    assert_same(wanted, restored)
    assert_same(state, restore_once(tmp_path / "a", abstract(state)))


def test_a_metadata_key_is_kept(tmp_path, mesh, tree):
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler()),
        (jax.Array, ocp.type_handlers.ArrayHandler(metadata_key="custom")),
    )
    plain = {"w": tree["f32"], "n": tree["n"]}
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_ocdbt=False)
    ocp.Checkpointer(handler).save(tmp_path / "plain", args=ocp.args.PyTreeSave(plain))
    for wanted in (abstract(plain), None):
        assert_same(
            plain, restore_once(tmp_path / "plain", wanted, metadata_key="custom"), shardings=wanted is not None
        )
    ours = ArraysHandler(array_handler={"metadata_key": "custom"}, use_ocdbt=False)
    ocp.Checkpointer(ours).save(tmp_path / "ours", args=ArraysSave(tree))
    assert (tmp_path / "ours/f32/custom").exists()
    assert_same(tree, ocp.Checkpointer(ours).restore(tmp_path / "ours", args=ArraysRestore(abstract(tree))))
    assert_same(tree, restore_once(tmp_path / "ours", abstract(tree)))  # our manifest knows the key
    assert verify(tmp_path / "ours")[0].intact
    with registered(metadata_key="custom"):
        checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
        checkpointer.save(tmp_path / "handler", args=ocp.args.PyTreeSave(plain))
        for path in (tmp_path / "handler", tmp_path / "plain"):
            assert_same(plain, checkpointer.restore(path, args=orbax_args(abstract(plain))))
    assert_same(plain, restore_once(tmp_path / "handler", None), shardings=False)


def test_a_metadata_key_where_orbax_cannot_use_it(tmp_path, tree):
    with pytest.raises(SettingsError, match="use_ocdbt=False"):
        ArraysHandler(array_handler={"metadata_key": "custom"})
    with pytest.raises(SettingsError, match="use_ocdbt=False"):
        Checkpointer(tmp_path / "c", array_options={"metadata_key": "custom"})
    with registered(metadata_key="custom"), pytest.raises(SettingsError, match="use_ocdbt=False"):
        ocp.PyTreeCheckpointer().save(tmp_path / "a", args=ocp.args.PyTreeSave(tree))


def test_names_of_orbax_single_replica_handler(tmp_path, mesh, tree):
    theirs = {"replica_axis_index": 1, "primary_replica_id": 1, "broadcast_memory_limit_bytes": 1 << 20}
    ours = {"replica_axis": 1, "primary_replica": 1, "memory_limit_bytes": 1 << 20}
    for settings in (theirs, {**ours, **theirs}):
        assert ArrayHandler("single_replica", **settings).restore_options == RestoreOptions("single_replica", **ours)
    defaults = {"replica_axis_index": 0, "primary_replica_id": 0, "broadcast_memory_limit_bytes": None}
    assert ArrayHandler(**defaults).restore_options == RestoreOptions(replica_axis=0)
    for name, value in (("replica_axis", "data"), ("primary_replica", 2), ("memory_limit_bytes", 5)):
        with pytest.raises(SettingsError, match=f"two names of one setting|{name}"):
            ArrayHandler(**{name: value}, **theirs)
    with pytest.raises(SettingsError, match="broadcast_memory_scaling_factor"):
        ArrayHandler(broadcast_memory_scaling_factor=1.5)
    with registered(restore="single_replica", **theirs):
        ocp.PyTreeCheckpointer().save(tmp_path / "a", args=ocp.args.PyTreeSave(tree))
        assert_same(tree, ocp.PyTreeCheckpointer().restore(tmp_path / "a", args=orbax_args(abstract(tree))))
    with Checkpointer(tmp_path / "c", array_options={"primary_replica_id": 5}, restore="single_replica") as ckpt:
        ckpt.save(1, tree)
        ckpt.wait()
        with pytest.raises(SettingsError, match="primary_replica=5"):
            ckpt.restore(abstract(tree))


@pytest.mark.parametrize("handler", [ArrayHandler, ArraysHandler])
def test_the_options_are_one_value(handler):
    whole = RestoreOptions("single_replica", "data", 1, 1 << 20, verify=False, timeout_seconds=7, memory_fraction=0.5)
    assert handler(whole).restore_options == whole
    assert handler(**vars(whole)).restore_options == whole
    assert handler("single_replica", "data", 1, 1 << 20).restore_options == RestoreOptions(
        *list(vars(whole).values())[:4]
    )
    assert handler(whole, restore="once", primary_replica_id=None).restore_options.restore == "once"
    with pytest.raises(TypeError, match="RestoreOptions is the only positional argument"):
        handler(whole, "data")
    with pytest.raises(SettingsError, match="two names of one setting") as caught:
        handler(whole, primary_replica_id=2)
    assert caught.value.setting == "primary_replica_id"


@pytest.mark.parametrize(
    ("setting", "value", "takes"),
    [
        ("restore", "twice", "one of 'once', 'single_replica', 'every_host'"),
        ("replica_axis", 1.5, "the name or number of a mesh axis, or None"),
        ("replica_axis", True, "the name or number"),
        ("primary_replica", -1, "an index along replica_axis"),
        ("memory_limit_bytes", 0, r"a positive int \(bytes\) or None"),
        ("verify", 1, "True or False"),
        ("timeout_seconds", float("inf"), "a positive number of seconds"),
        ("timeout_seconds", 0, "a positive number of seconds"),
        ("memory_fraction", 0, "a number above 0 and up to 1"),
        ("memory_fraction", 1.1, "a number above 0 and up to 1"),
    ],
)
def test_options_are_checked_wherever_they_are_given(tmp_path, setting, value, takes):
    for make in (
        RestoreOptions,
        ArrayHandler,
        ArraysHandler,
        lambda **option: restore_once(tmp_path, None, **option),
        lambda **option: Checkpointer(tmp_path / "c", array_options=option),
    ):
        with pytest.raises(SettingsError, match=rf"{setting}={value!r}( \(\w+\))?; it takes {takes}") as caught:
            make(**{setting: value})
        assert caught.value.setting == setting


def test_a_checkpointer_has_the_defaults_of_the_options():
    defaults = {field.name: field.default for field in dataclasses.fields(RestoreOptions)}
    own = {name: one.default for name, one in inspect.signature(Checkpointer).parameters.items() if name in defaults}
    assert own == {name: defaults[name] for name in own}
    assert len(own) == 6


def test_a_checkpointer_passes_its_options_whole(tmp_path):
    settings = {"restore": "single_replica", "replica_axis": 0, "primary_replica": 1, "memory_limit_bytes": 5}
    with Checkpointer(
        tmp_path / "c", **settings, verify=False, timeout_seconds=9, array_options={"memory_fraction": 0.5}
    ) as ckpt:
        assert ckpt._arrays.restore_options == RestoreOptions(
            **settings, verify=False, timeout_seconds=9, memory_fraction=0.5
        )


def test_a_fraction_of_the_free_memory_is_a_limit(tmp_path, tree, monkeypatch):
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "a", args=ArraysSave(tree))
    limits = []
    exact = checkpoint_restore.UnitReader

    def reader(*args, **settings):
        limits.append(settings["bytes_in_flight"])
        return exact(*args, **settings)

    monkeypatch.setattr(checkpoint_restore, "UnitReader", reader)
    monkeypatch.setattr(checkpoint_restore, "_device_bytes", lambda: 1 << 30)
    handler = ArraysHandler(array_handler={"broadcast_memory_scaling_factor": 0.5})
    assert_same(tree, handler.restore(tmp_path / "a", ArraysRestore(abstract(tree))))
    handler = ArraysHandler(
        array_handler={"broadcast_memory_scaling_factor": 0.5, "broadcast_memory_limit_bytes": 1 << 20}
    )
    handler.restore(tmp_path / "a", ArraysRestore(abstract(tree)))
    assert 0.24 < limits[0] / (1 << 30) < 0.25
    assert limits[1] == 1 << 19


def test_placeholders_and_partial_trees(tmp_path, tree):
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "a", args=ArraysSave(tree))
    handler = ArraysHandler()
    some = handler.restore(tmp_path / "a", ArraysRestore({"f32": tree["f32"]}, partial_restore=True))
    assert_same({"f32": tree["f32"]}, some)
    rest = handler.restore(tmp_path / "a", ArraysRestore({**abstract(tree), "bf16": ...}))
    assert rest["bf16"] is ...
    assert_same(tree["f8"], rest["f8"])


def test_events_that_orbax_users_graph(tmp_path, mesh):
    seen = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, seconds, **labels: seen.append(name))
    jax.monitoring.register_scalar_listener(lambda name, value, **labels: seen.append(name))
    state = {"w": place(np.arange(64, dtype=np.float32), mesh)}
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "a", args=ArraysSave(state))
    restore_once(tmp_path / "a", abstract(state))
    for name in (
        "/jax/orbax/write/worker/io/requested/gbytes",
        "/jax/orbax/read/worker/io/requested/gbytes",
        "/jax/orbax/read/worker/io/requested/throughput/gbytes_per_sec",
        "/jax/orbax/read/worker/total_duration_secs",
        "/jax/checkpoint/read/gbytes_per_sec",
    ):
        assert name in seen


def test_a_numbered_replica_axis_is_counted_in_each_mesh(tmp_path, mesh):
    """Also if the meshes of one tree name their axes differently."""
    other = Mesh(mesh.devices, ("a", "b"), axis_types=mesh.axis_types)
    state = {"w": place(np.arange(8.0, dtype=np.float32), mesh), "v": place(np.arange(8.0, dtype=np.float32), other)}
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "a", args=ArraysSave(state))
    stored = StoredArrays(tmp_path / "a")
    reads = [
        LeafRead(stored.saved(name), np.dtype(np.float32), LoadPlan(leaf.sharding, (8,)))
        for name, leaf in state.items()
    ]
    for axis, expected in ((0, ["data", "a"]), (-1, ["model", "b"]), ("b", [None, "b"])):
        options = RestoreOptions("single_replica", axis, 1)
        loads = [read.load for read in choose_ways(reads, options)]
        assert [load.broadcast and load.broadcast[0] for load in loads] == expected
        restored = ArraysHandler("single_replica", axis, 1).restore(tmp_path / "a", ArraysRestore(abstract(state)))
        assert_same(state, restored)


def test_replica_axis_is_checked(tmp_path, mesh, tree):
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "a", args=ArraysSave(tree))
    with pytest.raises(SettingsError, match="replica_axis='pipeline'"):
        ArraysHandler("single_replica", "pipeline").restore(tmp_path / "a", ArraysRestore(abstract(tree)))
    with pytest.raises(SettingsError, match="primary_replica=4"):
        ArraysHandler("single_replica", "data", 4).restore(tmp_path / "a", ArraysRestore(abstract(tree)))
    restored = ArraysHandler("single_replica", "data", 3).restore(tmp_path / "a", ArraysRestore(abstract(tree)))
    assert_same(tree, restored)
