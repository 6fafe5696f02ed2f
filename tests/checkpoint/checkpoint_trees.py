"""Trees with every kind of leaf, and comparison to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def make_mesh(*shape: int) -> Mesh:
    axes = ("data", "model", "expert")[: len(shape)]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def place(values: np.ndarray, mesh: Mesh, *spec: Any) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def special_floats(dtype: Any, count: int) -> np.ndarray:
    """Every bit pattern of narrow types; of wide ones random bits with −0, subnormals, infinities and NaN payloads."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize <= 2:
        patterns = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
        return np.resize(patterns, count)
    rng = np.random.default_rng(dtype.itemsize)
    values = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    marked = np.array([0x80000000, 1, 0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000], np.uint32).view(np.uint8)
    values[: marked.size] = marked[: values.size]
    return values.view(dtype)


def mixed_tree(mesh: Mesh, rows: int = 512) -> dict[str, Any]:
    """Replicated, sharded and replica-sharded leaves of every dtype; one leaf has about half the bytes."""
    rng = np.random.default_rng(7)
    big = special_floats(np.float32, rows * 1024).reshape(rows, 1024)
    tree: dict[str, Any] = {
        "big": place(big, mesh, None, "model"),
        "params": {
            "bf16": place(special_floats(jnp.bfloat16, rows * 256).reshape(rows, 256), mesh, "model"),
            "f16": place(special_floats(np.float16, rows * 128).reshape(rows, 128), mesh),
            "replica_sharded": place(big[:, :256].copy(), mesh, "data", "model"),
            "odd": place(big.reshape(-1)[: rows * 100 + 1].copy(), mesh),
            "columns": place(big[:, :64].copy(), mesh, None, ("data", "model")),
        },
        "ints": {
            name: place(rng.integers(0, 100, 4096).astype(name), mesh, "data")
            for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32")
        },
        "int4": place((np.arange(4096) % 16 - 8).astype(jnp.int4), mesh),
        "uint4": place((np.arange(4096) % 16).astype(jnp.uint4), mesh, "data"),
        "bool": place(rng.integers(0, 2, 4096).astype(bool), mesh, "model"),
        "complex": place(special_floats(np.complex64, 1024), mesh),
        "scalar": place(np.array(-0.0, np.float32), mesh),
        "empty_array": place(np.zeros((0, 3), np.float32), mesh),
        "none": None,
        "empty": {},
        "nested": [(), {"x": (place(np.arange(8, dtype=np.int32), mesh),)}],
        "key": jax.jit(lambda: jax.random.key(3), out_shardings=NamedSharding(mesh, PartitionSpec()))(),
        "keys": jax.jit(
            lambda: jax.random.split(jax.random.key(1, impl="rbg"), 8),
            out_shardings=NamedSharding(mesh, PartitionSpec("data")),
        )(),
        "legacy_key": place(np.array([1, 2], np.uint32), mesh),
        "numpy": {
            "i64": np.arange(5),
            "f64": np.array([np.nan, -0.0]),
            "scalar": np.float16(1.5),
            "zero": np.zeros(0),
            "big_endian": np.arange(5, dtype=">f4"),
        },
        "python": [3, 2.5, True, "text", 1 << 70, float("inf"), 1j],
    }
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e3m4", "float8_e4m3b11fnuz"):
        tree[name] = place(special_floats(name, 4096).reshape(64, 64), mesh, None, "model")
    return tree


def abstract(tree: Any) -> Any:
    """The same with ``jax.ShapeDtypeStruct`` for arrays."""
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        tree,
    )


def assert_same(first: Any, second: Any, *, shardings: bool = True) -> None:
    """Raw bytes, dtypes, types and shardings are equal."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(first), jax.tree_util.tree_leaves_with_path(second), strict=True)
    for (path, a), (other_path, b) in pairs:
        assert path == other_path
        where = jax.tree_util.keystr(path)
        if not isinstance(a, jax.Array):
            assert type(a) is type(b), where
            if isinstance(a, int | str):
                assert a == b, where
                continue
            assert np.asarray(a).dtype == np.asarray(b).dtype, where
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), where
            continue
        assert isinstance(b, jax.Array), where
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        if shardings:
            assert a.sharding == b.sharding, where
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if not shardings:
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), where
            continue
        theirs = {shard.device: shard for shard in b.addressable_shards}
        for shard in a.addressable_shards:
            assert shard.index == theirs[shard.device].index, where
            assert np.asarray(shard.data).tobytes() == np.asarray(theirs[shard.device].data).tobytes(), where


@contextlib.contextmanager
def registered(**settings: Any) -> Iterator[None]:
    """Our handler in Orbax's global registry, as people do with SingleReplicaArrayHandler."""
    import orbax.checkpoint as ocp

    from meshfeed.checkpoint import ArrayHandler

    before = ocp.type_handlers.get_type_handler(jax.Array)
    ocp.type_handlers.register_type_handler(jax.Array, ArrayHandler(**settings), override=True)
    try:
        yield
    finally:
        ocp.type_handlers.register_type_handler(jax.Array, before, override=True)


def orbax_args(tree: Any, **extra: Any) -> Any:
    """What plain Orbax needs to restore a tree of abstract arrays."""
    import orbax.checkpoint as ocp

    return ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree, **extra))
