"""Floats and integers of a byte or less: right in plain Orbax, exact to the bit here, readable from older versions."""

from __future__ import annotations

import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_feeds import CountingFeed
from checkpoint_trees import abstract, assert_same, make_mesh, orbax_args, place, registered, special_floats

from meshfeed.checkpoint import ArraysHandler, ArraysRestore, ArraysSave, Checkpointer, restore_once, verify

# TensorStore has types for these, so plain Orbax stores and reads them as they are.
NAMED = (
    *("float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn", "int4", "int2"),
)
CARRIED = {"float8_e4m3": np.float16, "uint4": np.uint8, "uint2": np.uint8}
ON_HOSTS_ONLY = {"float6_e2m3fn": np.float16, "int1": np.int8, "uint1": np.uint8}
DATA = pathlib.Path(__file__).parent / "data" / "narrow_as_bits"


def every_value(name: str, count: int = 256) -> np.ndarray:
    dtype = np.dtype(getattr(ml_dtypes, name))
    if name.startswith("float8"):
        return special_floats(dtype, count)
    if name.startswith("float"):
        return (np.arange(count) % (1 << int(jnp.finfo(dtype).bits))).astype(np.uint8).view(dtype)
    limits = jnp.iinfo(dtype)
    values = np.arange(count) % (int(limits.max) - int(limits.min) + 1) + int(limits.min)
    return values.astype(np.int8).astype(dtype)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(4, 2)


@pytest.fixture(scope="module")
def tree(mesh):
    """By name of the dtype: a leaf that replicas share, one that is sharded both ways, and a numpy leaf."""
    leaves: dict = {}
    for name in (*NAMED, *CARRIED):
        values = every_value(name, 1 << 19).reshape(512, 1024)
        leaves[name] = [place(values, mesh), place(values, mesh, "data", "model"), every_value(name)]
    return {**leaves, **{name: [every_value(name)] for name in ON_HOSTS_ONLY}}


def saved_by(how: str, directory: pathlib.Path, tree) -> pathlib.Path:
    if how == "Checkpointer":
        with Checkpointer(directory, save_interval_steps=1) as ckpt:
            ckpt.save(1, tree)
        return directory / "1/arrays"
    if how == "ArraysSave":
        ocp.Checkpointer(ArraysHandler()).save(directory, args=ArraysSave(tree))
        return directory
    with registered():
        ocp.PyTreeCheckpointer().save(directory, args=ocp.args.PyTreeSave(tree))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Checkpointer", "ArraysSave", "ArrayHandler"])
def test_plain_orbax_reads_the_right_values(tmp_path, tree, how):
    if how == "ArrayHandler":  # Orbax's own handler stores numpy leaves there
        tree = {name: [leaf for leaf in tree[name] if isinstance(leaf, jax.Array)] for name in (*NAMED, *CARRIED)}
    path = saved_by(how, tmp_path / "c", tree)
    plain = ocp.PyTreeCheckpointer().restore(path)
    named = {name: tree[name] for name in NAMED}
    wanted = abstract(named)
    args = ocp.args.PyTreeRestore(
        wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    assert_same(named, {name: plain[name] for name in NAMED}, shardings=False)
    assert_same(named, ocp.PyTreeCheckpointer().restore(path, args=args))
    for name, carrier in {**CARRIED, **(ON_HOSTS_ONLY if how != "ArrayHandler" else {})}.items():
        for leaf, found in zip(tree[name], plain[name], strict=True):
            assert found.dtype == carrier
            np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(leaf).astype(np.float32), name)


def test_exact_to_the_bit_with_digests(tmp_path, tree):
    path = saved_by("Checkpointer", tmp_path / "c", tree)
    assert_same(tree, restore_once(path, abstract(tree)))
    assert_same(tree, restore_once(path, None))
    (found,) = verify(tmp_path / "c")
    assert found.intact
    assert found.without_digest == 0


def test_casts_to_other_dtypes(tmp_path, mesh):
    state = {name: place(every_value(name), mesh) for name in ("float8_e5m2", "float8_e4m3", "uint4")}
    path = saved_by("ArraysSave", tmp_path / "c", state)
    wanted = {name: place(np.asarray(leaf).astype(np.float32), mesh) for name, leaf in state.items()}
    restored = restore_once(path, abstract(wanted))
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(np.asarray(restored[name]), np.asarray(leaf))


class TestOlderVersions:
    """They stored narrow values as the uint8 of their bits; ``data/narrow_as_bits`` was written by one."""

    @pytest.fixture
    def older(self, mesh):
        names = (
            *sorted(name for name in (*NAMED, *CARRIED) if name.startswith("float8")),
            "uint4",
            "float4_e2m1fn",
            "int2",
        )
        on_devices = {}
        for number, name in enumerate(names):
            spec = ("data",) if number % 2 and name.startswith("float8") else ()
            on_devices[name] = place(every_value(name).reshape(16, 16), mesh, *spec)
        return on_devices

    @pytest.fixture
    def data(self, tmp_path):
        return pathlib.Path(shutil.copytree(DATA, tmp_path / "data"))

    def test_array_handler_and_restore_once(self, data, older):
        path = data / "array_handler"
        assert_same(older, restore_once(path, abstract(older)))
        with registered():
            assert_same(older, ocp.PyTreeCheckpointer().restore(path, args=orbax_args(abstract(older))))

    def test_checkpointer_and_arrays_restore(self, data, older):
        state = {
            **older,
            "numpy": {name: every_value(name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3")},
        }
        feed = CountingFeed()
        with Checkpointer(data / "checkpointer") as ckpt:
            step, restored = ckpt.restore(abstract(state), feed)
            assert (step, feed.position) == (1, 4)
            assert_same(state, restored)
            assert_same(state, ckpt.restore(None)[1])
        arrays = data / "checkpointer/1/arrays"
        restored = ocp.Checkpointer(ArraysHandler()).restore(arrays, args=ArraysRestore(abstract(state)))
        assert_same(state, restored)
        assert all(finding.intact for finding in verify(data / "checkpointer"))


@pytest.mark.parametrize("name", ["float8_e4m3", "float6_e2m3fn", "float8_e5m2", "uint4", "int4"])
def test_scalars_are_saved_too(tmp_path: pathlib.Path, name: str) -> None:
    value = every_value(name)[5]
    tree = {"scalar": value, "array": np.array(value)}
    with Checkpointer(tmp_path, save_interval_steps=1) as ckpt:
        ckpt.save(1, tree)
        _, back = ckpt.restore(tree)
    assert_same(tree, back)


@pytest.mark.parametrize(
    ("name", "stored"), [("uint4", np.int32), ("float8_e4m3", np.float16), ("float8_e4m3", np.float32)]
)
def test_a_cast_of_the_caller_decides_how_values_are_stored(tmp_path, mesh, name: str, stored) -> None:
    values = every_value(name, 64).reshape(8, 8)
    if name.startswith("float"):
        values = np.where(np.isfinite(values.astype(np.float32)), values, values.dtype.type(1)).astype(values.dtype)
    tree = {"w": place(values, mesh, "data")}
    args = {"w": ocp.SaveArgs(dtype=np.dtype(stored))}
    with registered():
        ocp.PyTreeCheckpointer().save(tmp_path / "c", args=ocp.args.PyTreeSave(tree, save_args=args))
    back = restore_once(tmp_path / "c", {"w": jax.ShapeDtypeStruct((8, 8), stored, sharding=tree["w"].sharding)})
    assert np.asarray(back["w"]).tolist() == values.astype(stored).tolist()
