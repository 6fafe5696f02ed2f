"""Structured dtypes with padding, dtypes that no ``jax.Array`` has, and memory kinds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_trees import make_mesh
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshfeed._src.base.errors import CheckpointError
from meshfeed.checkpoint import Checkpointer

INNER = np.dtype([("x", "i1"), ("y", "i4", (2,))], align=True)
STRUCTURED = {
    "aligned": np.dtype([("a", "i1"), ("b", "f8"), ("c", INNER)], align=True),
    "padded_end": np.dtype({"names": ["a"], "formats": ["i2"], "offsets": [0], "itemsize": 12}),
    "nested": np.dtype([("a", [("b", "<u2"), ("c", "S3")]), ("d", ">f4", (2, 2))]),
    "narrow_field": np.dtype([("a", ml_dtypes.bfloat16), ("b", ml_dtypes.int4)]),
    "overlapping": np.dtype({"names": ["x", "y"], "formats": ["i4", "i2"], "offsets": [0, 2]}),
    "out_of_order": np.dtype({"names": ["x", "y"], "formats": ["i4", "i2"], "offsets": [4, 0]}),
    "titles": np.dtype([(("a title", "a"), "i4"), ("b", "M8[ns]")]),
    "no_fields": np.dtype([]),
}


def filled(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    values = np.zeros(shape, dtype)
    raw = values.reshape(-1).view(np.uint8) if dtype.itemsize else np.zeros(0, np.uint8)
    raw[:] = np.random.default_rng(1).integers(0, 256, raw.size)
    return values


def fields_of(values: np.ndarray) -> list[bytes]:
    """The bytes of each field: padding has no value."""
    if values.dtype.names is None:
        return [values.tobytes()]
    return [part for name in values.dtype.names for part in fields_of(values[name])]


def test_structured_dtypes_come_back_as_they_were(tmp_path):
    tree = {name: filled(dtype, (3, 2)) for name, dtype in STRUCTURED.items()}
    tree |= {f"{name}_empty": filled(dtype, (0, 2)) for name, dtype in STRUCTURED.items()}
    tree |= {f"{name}_scalar": filled(dtype, ())[()] for name, dtype in STRUCTURED.items()}
    with Checkpointer(tmp_path, save_interval_steps=1) as ckpt:
        ckpt.save(1, tree)
        ckpt.wait()
        for wanted in (None, tree):
            restored = ckpt.restore(wanted)[1]
            for name, leaf in tree.items():
                assert type(restored[name]) is type(leaf), name
                assert restored[name].dtype == leaf.dtype, name
                assert restored[name].shape == leaf.shape, name
                assert fields_of(np.asarray(restored[name])) == fields_of(np.asarray(leaf)), name


def test_padding_is_stored_as_zeros(tmp_path):
    """Otherwise memory of the process that nothing has written would be stored."""
    leaf = filled(STRUCTURED["aligned"], (64,))
    expected = np.zeros(leaf.shape, leaf.dtype)
    for name in ("a", "b"):
        expected[name] = leaf[name]
    for name in ("x", "y"):
        expected["c"][name] = leaf["c"][name]
    with Checkpointer(tmp_path, save_interval_steps=1) as ckpt:
        ckpt.save(1, {"x": leaf})
        ckpt.wait()
        assert ckpt.restore(None)[1]["x"].tobytes() == expected.tobytes()


def jax_holds(dtype):
    """Newer versions of JAX have arrays of float6."""
    try:
        jax.device_put(np.zeros((), dtype)).block_until_ready()
    except Exception:
        return False
    return True


def test_dtypes_that_no_jax_array_has(tmp_path):
    device = SingleDeviceSharding(jax.devices()[0])
    tree = {
        "float6": np.arange(64, dtype=np.uint8).view(ml_dtypes.float6_e2m3fn),
        "text": np.array(["a", "bc"]),
        "bytes": np.zeros(3, "S4"),
        "long": np.ones(3, np.longdouble),
    }
    with Checkpointer(tmp_path, save_interval_steps=1) as ckpt:
        ckpt.save(1, tree)
        ckpt.wait()
        restored = ckpt.restore(None)[1]
        for name, leaf in tree.items():
            assert restored[name].dtype == leaf.dtype
            assert restored[name].tobytes() == leaf.tobytes()
            wanted = {**tree, name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)}
            if name == "float6" and jax_holds(leaf.dtype):
                assert np.asarray(ckpt.restore(wanted)[1][name]).tobytes() == leaf.tobytes()
                continue
            with pytest.raises(CheckpointError, match=rf"leaf '{name}' was requested as a jax.Array of \w+, which"):
                ckpt.restore(wanted)
        wide = jax.ShapeDtypeStruct((64,), np.float32, sharding=device)
        values = np.asarray(ckpt.restore({**tree, "float6": wide})[1]["float6"])
        np.testing.assert_array_equal(values, tree["float6"].astype(np.float32))


def test_restore_of_everything_keeps_the_memory_kind(tmp_path):
    mesh = make_mesh(4, 2)
    host = NamedSharding(mesh, PartitionSpec("data"), memory_kind="pinned_host")
    one = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    values = np.arange(64, dtype=np.float32)
    tree = {
        "host": jax.device_put(values, host),
        "one": jax.device_put(values, one),
        "device": jax.device_put(values, NamedSharding(mesh, PartitionSpec("data"))),
        "empty": jax.device_put(values[:0], NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")),
        "eager": jnp.ones(3),
    }
    with Checkpointer(tmp_path, save_interval_steps=1) as ckpt:
        ckpt.save(1, tree)
        ckpt.wait()
        for restored in (ckpt.restore(None)[1], ckpt.restore(ckpt.metadata(1).train_state)[1]):
            for name, leaf in tree.items():
                assert restored[name].sharding.memory_kind == leaf.sharding.memory_kind, name
                np.testing.assert_array_equal(restored[name], leaf)
