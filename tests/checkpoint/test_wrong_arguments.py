"""What callers get wrong: each is an error that names the argument or leaf and says what to do."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_feeds import CountingFeed
from checkpoint_trees import abstract, assert_same, make_mesh, place
from jax.sharding import NamedSharding, PartitionSpec

from meshfeed._src.base.errors import CheckpointError, SettingsError
from meshfeed._src.checkpoint import step as checkpoint_step
from meshfeed._src.checkpoint.match import match_array
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed.checkpoint import Checkpointer, IteratorHandler, IteratorRestore, IteratorSave, restore_once


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(4, 2)


@pytest.fixture(scope="module")
def state(mesh):
    return {
        "w": place(np.linspace(-3, 3, 512, dtype=np.float32).reshape(64, 8), mesh, "data"),
        "small": place(np.arange(8, dtype=np.int32), mesh),
        "large": place(np.array([1, -(1 << 20)] * 4, np.int32), mesh),
        "z": place(np.ones(3, np.complex64), mesh),
        "n": np.arange(4.0),
        "i64": np.array([3, 1 << 40]),
        "zero": np.zeros((0, 2), np.float32),
        "key": jax.random.key(1),
        "scalar": np.float32(1.5),
        "count": 3,
        "rate": 2.5,
        "text": "text",
        "huge": 1 << 40,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory, state):
    directory = tmp_path_factory.mktemp("saved") / "c"
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        assert ckpt.save(1, state, CountingFeed())
    return directory


def like(shape, dtype, mesh):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        (
            "w",
            ((64, 8), np.int32),
            r"leaf 'w' is stored as float32, but int32 was requested.*Request float32, and convert",
        ),
        ("w", ((64, 8), np.bool_), "floating point values are not cast to bool"),
        (
            "w",
            ((64, 9), np.float32),
            r"'w' has the stored shape \(64, 8\), but \(64, 9\) was requested. Request the stored",
        ),
        ("w", 1.0, r"'w' is stored as an array of shape \(64, 8\), but float was requested. Pass an array"),
        ("w", "text", r"'w' is stored as an array of shape \(64, 8\), but str was requested"),
        ("w", np.float32, "'w': a type does not describe a leaf. Pass an array"),
        ("w", print, "'w': a builtin_function_or_method does not describe a leaf"),
        ("small", ((8,), np.bool_), "integer values are not cast to bool"),
        (
            "large",
            ((8,), np.int16),
            "'large' holds -1048576, stored as int32, but int16 holds only -32768 to 32767. Request",
        ),
        ("large", ((8,), np.uint32), "'large' holds -1048576"),
        ("z", ((3,), np.float32), "complex values are not cast to floating point"),
        ("n", np.zeros(4, np.int64), "'n' is stored as float64, but int64 was requested"),
        ("n", np.zeros(5), r"\(4,\), but \(5,\) was requested"),
        ("i64", ((2,), np.int32), "'i64' holds 1099511627776"),
        ("zero", np.zeros((0, 2), np.int8), "'zero' is stored as float32, but int8 was requested"),
        ("zero", np.zeros((0, 3), np.float32), r"\(0, 2\), but \(0, 3\) was requested"),
        ("key", ((), np.float32), "'key' is stored as PRNG keys threefry2x32, but float32 was requested. Request keys"),
        ("key", "rbg", "'key' is stored as threefry2x32, but PRNG keys rbg were requested. Request keys of"),
        ("small", "threefry2x32", "'small' is stored as int32, but PRNG keys"),
        ("scalar", 1, "'scalar' is stored as float, but int was requested"),
        ("count", True, "'count' is stored as int, but bool was requested"),
        ("count", "3", "'count' is stored as int, but str was requested"),
        ("count", ((3,), np.float32), r"'count' has the stored shape \(\), but \(3,\) was requested"),
        ("rate", 2, "'rate' is stored as float, but int was requested. Request float"),
        ("rate", ((), np.int32), "'rate' is stored as float64, but int32 was requested"),
        ("text", 3, "'text' is stored as str, but int was requested"),
        ("text", b"", "'text' is stored as str, but bytes was requested"),
        ("text", ((), np.float32), "'text' is stored as str, but ShapeDtypeStruct was requested"),
        ("huge", ((), np.int32), "'huge' holds 1099511627776"),
    ],
)
@pytest.mark.parametrize("limit", [None, 64])
def test_leaves_that_are_not_what_is_stored(saved, state, mesh, name, wanted, message, limit):
    if isinstance(wanted, tuple):
        wanted = like(wanted[0], wanted[1], mesh)
    elif isinstance(wanted, str) and wanted in ("rbg", "threefry2x32"):
        wanted = abstract(jax.random.key(0, impl=wanted))
    feed = CountingFeed()
    with Checkpointer(saved, memory_limit_bytes=limit) as ckpt, pytest.raises(CheckpointError, match=message):
        ckpt.restore({**abstract(state), name: wanted}, feed)
    assert feed.position == 0


def test_text_that_a_handler_of_orbax_requests_as_an_array(saved):
    with pytest.raises(CheckpointError, match=r"'text' is stored as str, but an array was requested\. Request text"):
        match_array(StoredArrays(saved / "1/arrays"), "text", (), np.float32, None)


def test_casts_that_lose_at_most_precision(saved, state, mesh):
    wanted = {
        "w": place(np.asarray(state["w"]).astype(jnp.bfloat16), mesh, "model"),
        "small": place(np.arange(8, dtype=np.int8), mesh),
        "large": place(np.asarray(state["large"]).astype(np.float32), mesh),
        "z": state["z"],
        "n": place(np.arange(4, dtype=np.float16), mesh),
        "i64": np.array([3, 1 << 40], np.uint64),
        "zero": np.zeros((0, 2), np.float16),
        "key": place(np.asarray(jax.random.key_data(state["key"])), mesh),
        "scalar": 1.5,
        "count": 3.0,
        "rate": place(np.array(2.5, np.float32), mesh),
        "text": "text",
        "huge": np.float64(1 << 40),
    }
    with Checkpointer(saved) as ckpt:
        assert_same(wanted, ckpt.restore(abstract(wanted))[1])


def test_shardings_that_do_not_divide_and_wide_types_without_x64(tmp_path, mesh):
    state = {"w": place(np.zeros((7, 10), np.float32), mesh), "i": np.arange(3)}
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        uneven = jax.ShapeDtypeStruct((7, 10), np.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
        with pytest.raises(CheckpointError, match=r"leaf 'w' of shape \(7, 10\) cannot have the requested sharding"):
            ckpt.restore({**state, "w": uneven})
    with jax.enable_x64(True), Checkpointer(tmp_path / "x", save_interval_steps=1) as ckpt:
        wide = {"i": place(np.array([1, -(1 << 40)]), mesh), "c": place(np.ones(2, np.complex128), mesh)}
        ckpt.save(1, wide)
        ckpt.wait()
        assert_same(wide, ckpt.restore(abstract(wide))[1])
    with Checkpointer(tmp_path / "x") as ckpt, pytest.raises(CheckpointError, match=r"only with jax_enable_x64"):
        ckpt.restore(None)


def test_no_keys_at_all(tmp_path):
    state = {impl: jax.random.split(jax.random.key(0, impl=impl), 0) for impl in ("threefry2x32", "rbg")}
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        assert_same(state, ckpt.restore(state)[1])
        assert_same(state, ckpt.restore(None)[1], shardings=False)


def test_trees_that_differ(saved, state):
    with Checkpointer(saved) as ckpt:
        with pytest.raises(CheckpointError, match=r"lacks leaf 'more'\. Remove leaves that are not stored"):
            ckpt.restore({**state, "more": 1})
        with pytest.raises(CheckpointError, match=r"has an extra leaf 'w'\. Put \.\.\. in the tree"):
            ckpt.restore({**state, "w": None})
        with pytest.raises(CheckpointError, match=r"lacks leaves 'params\.count', .* has extra leaves 'count'"):
            ckpt.restore({"params": state})


@pytest.mark.parametrize("step", [1.0, "5", -1, True, np.array([1, 2]), 1.5, np.int64(-3)])
def test_numbers_of_steps(saved, state, step):
    with Checkpointer(saved, save_interval_steps=1) as ckpt:
        for call in (
            lambda: ckpt.save(step, state),
            lambda: ckpt.restore(abstract(state), step=step),
            lambda: ckpt.metadata(step),
        ):
            with pytest.raises(SettingsError, match=r"step=.*; it takes an int of at least 0.*[^.]\.$") as caught:
                call()
            assert caught.value.setting == "step"


def test_numbers_of_steps_of_other_libraries(tmp_path):
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        steps: list[Any] = [np.int64(1), np.array(2), jnp.int32(3)]
        for step in steps:
            assert ckpt.save(step, {"n": 1})
            ckpt.wait()
            restored = ckpt.restore({"n": 0}, step=step)[0]
            assert type(restored) is int
            assert restored == int(step)
        assert ckpt.steps() == [1, 2, 3]


def test_arguments_in_another_order(saved, state):
    feed = CountingFeed()
    with Checkpointer(saved, save_interval_steps=1) as ckpt:
        for call, setting in (
            (lambda: ckpt.save(state, 9, feed), "step"),
            (lambda: ckpt.save(9, feed, state), "train_state"),
            (lambda: ckpt.save(9, feed), "train_state"),
            (lambda: ckpt.save(9, state, True), "feed"),
            (lambda: ckpt.restore(feed, state), "feed"),
            (lambda: ckpt.restore(feed), "train_state"),
            (lambda: ckpt.restore(1, state), "feed"),
        ):
            after = "; it takes an int" if setting == "step" else ":"
            with pytest.raises(
                SettingsError, match=rf"^{setting}=[^ ]{{1,60}}{after} .*The order is (save|restore)\("
            ) as caught:
                call()
            assert caught.value.setting == setting
        assert ckpt.steps() == [1]


def test_feeds_without_a_state(tmp_path, state):
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        for feed in (object(), [1], iter([1])):
            with pytest.raises(SettingsError, match=r"has no get_state\(\), expected a meshfeed.Feed"):
                ckpt.save(1, state, feed)
            with pytest.raises(SettingsError, match=r"has no get_state\(\)"):
                ckpt.restore(state, feed)
        assert ckpt.save(1, state, CountingFeed())
    with pytest.raises(SettingsError, match=r"has no set_state\(\)"):
        IteratorHandler().restore(tmp_path / "c/1/iterator", IteratorRestore(object()))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"f": print}}, r"\['a'\]\['f'\]: a builtins.builtin_function_or_method cannot be saved"),
        ({"a": [{1, 2}]}, r"\['a'\]\[0\]: a builtins.set cannot be saved"),
        ({"a": np.array([None])}, r"\['a'\]: an array of Python objects"),
        ({"a": np.ma.masked_equal(np.arange(2), 1)}, r"\['a'\]: a masked array cannot be saved"),
        ({"a": jax.ShapeDtypeStruct((2,), np.float32)}, "a jax.ShapeDtypeStruct cannot be saved"),
        (object(), r"leaf \(the whole tree\): a builtins.object"),
        ({"a": {"b": 1}, "a.b": 2}, r"\['a'\]\['b'\] and \['a.b'\] have the same name in storage, 'a.b'"),
    ],
)
def test_leaves_that_cannot_be_saved(tmp_path, tree, message):
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        with pytest.raises(CheckpointError, match=message):
            ckpt.save(1, tree, CountingFeed())
        assert ckpt.save(1, {"a": 1}, CountingFeed())


def test_arrays_that_are_gone_or_not_yet_there(tmp_path):
    array = jnp.arange(8.0) + 1
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        with pytest.raises(CheckpointError, match=r"leaf \['a'\]: the array was deleted or donated. Save before"):
            ckpt.save(1, {"a": array})
        with pytest.raises(CheckpointError, match=r"leaf \['a'\]: a traced value cannot be saved"):
            jax.jit(lambda x: ckpt.save(1, {"a": x}))(jnp.arange(3))
        assert ckpt.steps() == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"directory": None}, "directory=None: is not a path"),
        ({"directory": ""}, "directory='': is not a path"),
        ({"directory": 3}, "directory=3: is not a path"),
        ({"directory": "file"}, "file is a file. Pass the path of a folder"),
        ({"directory": "file/deep/down"}, "file is a file"),
        ({"directory": os.fsdecode(b"/tmp/run-\xe9")}, r"run-\\udce9' has no form in UTF-8, which TensorStore needs"),
        ({"directory": pathlib.Path("gs://bucket/run")}, "'gs:/bucket/run': is a URL that has lost a slash"),
        ({"directory": pathlib.Path("s3://bucket/run")}, "'s3:/bucket/run': is a URL that has lost a slash"),
        (
            {"directory": "memory://bucket/run", "orbax_options": {"best_fn": len}},
            "'best_fn': …}: does not apply to a checkpoint in a store, which takes max_to_keep, keep_period",
        ),
        ({"timeout_seconds": "soon"}, "timeout_seconds='soon'; it takes a positive number of seconds.$"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        (
            {"max_to_keep": {"w": "1" * 999}},
            r"^max_to_keep=\{'w': .{,200}1\.\.\. \(dict\); it takes a positive int or None.$",
        ),
        ({"replica_axis": 1.5}, r"replica_axis=1.5 \(float\); it takes the name or number"),
        ({"array_options": {"colour": 1}}, "array_options: .*'colour'"),
        ({"orbax_options": {"colour": 1}}, "orbax_options: .*'colour'"),
        ({"orbax_options": [1]}, r"orbax_options=\[1\] \(list\); it takes a dict"),
        (
            {"orbax_options": {"step_prefix": "run"}},
            "orbax_options={'step_prefix': 'run'}: the folder of a step is its",
        ),
        (
            {"orbax_options": {"step_format_fixed_length": 8}},
            "{'step_format_fixed_length': 8}: .* not find it again. Omit",
        ),
        (
            {"orbax_options": {"step_name_format": ocp.path.step.standard_name_format(step_prefix="run")}},
            "{'step_name_format': <.*>}: the folder of a step is its number",
        ),
    ],
)
def test_settings(tmp_path, settings, message):
    (tmp_path / "file").write_text("")
    settings = {"directory": str(tmp_path / "c"), **settings}
    if str(settings["directory"]).startswith("file"):
        settings["directory"] = tmp_path / settings["directory"]
    with pytest.raises(SettingsError, match=message) as caught:
        Checkpointer(**settings)
    assert caught.value.setting is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_names_of_steps_that_are_their_numbers_are_accepted(tmp_path):
    options = {"step_prefix": None, "step_name_format": ocp.path.step.standard_name_format()}
    with Checkpointer(tmp_path / "c", orbax_options=options) as ckpt:
        assert ckpt.save(1, {"a": 1})
        ckpt.wait()
        assert ckpt.steps() == [1]


def test_a_step_in_place_of_its_folder_is_refused(tmp_path):
    """Otherwise restore would find no steps in it, and training would start afresh."""
    with Checkpointer(tmp_path / "c") as ckpt:
        ckpt.save(12, {"a": 1}, CountingFeed())
    before = sorted((tmp_path / "c" / "12").rglob("*"))
    with pytest.raises(
        SettingsError, match=rf"c/12': is a step of the checkpoint in {tmp_path}/c. Pass that folder; .* step=12\)"
    ):
        Checkpointer(tmp_path / "c" / "12")
    assert sorted((tmp_path / "c" / "12").rglob("*")) == before
    with Checkpointer(tmp_path / "12") as ckpt:  # a run may have a number as its name
        assert ckpt.save(1, {"a": 1})


def test_a_folder_that_cannot_be_made_is_named():
    with pytest.raises(CheckpointError, match=r"/proc/none/c: cannot be opened: .*Check that this host may create"):
        Checkpointer("/proc/none/c")


def test_a_url_from_which_nothing_is_read_is_named(state):
    for call in (
        restore_once,
        lambda url, _: checkpoint_step.verify_as_json(url),
        lambda url, _: checkpoint_step.inspect(url),
        checkpoint_step.diff,
    ):
        with pytest.raises(CheckpointError, match=r"^nothing://run/1: Protocol not known: nothing. Install fsspec"):
            call("nothing://run/1", state)


def test_closed(saved, state):
    ckpt = Checkpointer(saved, save_interval_steps=1)
    ckpt.close()
    ckpt.close()
    for call in (lambda: ckpt.save(9, state), lambda: ckpt.restore(state)):
        with pytest.raises(CheckpointError, match=r"this Checkpointer is closed\. Create a new one"):
            call()


@pytest.mark.parametrize("axis", [2, -3])
def test_a_replica_axis_that_no_mesh_has_is_refused_on_both_sides(saved, state, mesh, axis: int) -> None:
    with Checkpointer(saved, restore="single_replica", replica_axis=axis) as ckpt:
        with pytest.raises((SettingsError, CheckpointError), match=rf"replica_axis={axis}: the meshes have the axes"):
            ckpt.restore(state, step=1)


def test_a_feed_without_a_state_is_refused_by_the_synchronous_save_too(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SettingsError, match="IteratorSave"):
        IteratorHandler().save(tmp_path, IteratorSave(object()))


def test_dtypes_without_a_cast_between_them(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"q": np.zeros(4, jnp.int4)})
        ckpt.wait()
        with pytest.raises(
            CheckpointError, match="leaf 'q' is stored as int4, but uint4 was requested: numpy has no cast"
        ):
            ckpt.restore({"q": np.zeros(4, jnp.uint4)})
        assert ckpt.restore({"q": np.zeros(4, np.int32)})[0] == 1
