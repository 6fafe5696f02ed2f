"""Resharding keeps every bit of every dtype."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshfeed
from meshfeed._src.arrays.reshard import bits_dtype, from_bits, reshard, to_bits

NARROW_FLOATS = [
    name
    for name in [
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3b11fnuz",
        "float8_e5m2fnuz",
        "float8_e4m3fnuz",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e8m0fnu",
        "float4_e2m1fn",
    ]
    if hasattr(jnp, name)
]
OTHERS = ["float32", "complex64", "int4", "uint4", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bool"]


def every_bit_pattern(name: str) -> np.ndarray:
    """Values of the dtype that include all bit patterns (all of 16 bits and less, random above)."""
    dtype = jnp.dtype(name)
    rng = np.random.default_rng(0)
    if name == "bool":
        return rng.integers(0, 2, 4096).astype(bool)
    if name in ("int4", "uint4"):
        return (np.arange(256) % 16 - (8 if name == "int4" else 0)).astype(dtype)
    if name == "float4_e2m1fn":
        return (np.arange(256) % 16).astype(np.uint8).view(dtype)
    if dtype.itemsize == 1:
        return np.arange(256, dtype=np.uint8).view(dtype)
    if dtype.itemsize == 2:
        return np.arange(65536, dtype=np.uint16).view(dtype)
    raw = rng.integers(0, 256, 4096 * dtype.itemsize, dtype=np.uint8)
    special = np.array([0x80000000, 1, 0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x807FFFFF, 0], np.uint32)
    raw[: special.nbytes] = special.view(np.uint8)
    return raw.view(dtype)


def host_bits(array: np.ndarray) -> np.ndarray:
    """The bytes of each value; comparing values would take two NaNs of different bits for unequal or equal."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("name", NARROW_FLOATS + OTHERS)
def test_every_bit_pattern_survives_a_gather_and_a_scatter(name):
    values = every_bit_pattern(name).reshape(8, -1)
    spread = NamedSharding(mesh(), PartitionSpec(("data", "model")))
    whole = NamedSharding(mesh(), PartitionSpec())
    columns = NamedSharding(mesh(), PartitionSpec(None, "model"))
    placed = jax.make_array_from_callback(values.shape, spread, lambda index: values[index])
    (gathered,) = reshard([placed], [whole])
    (back,) = reshard([gathered], [columns])
    for moved, sharding in ((gathered, whole), (back, columns)):
        assert moved.dtype == values.dtype
        assert moved.sharding.is_equivalent_to(sharding, moved.ndim)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(host_bits(np.asarray(shard.data)), host_bits(values[shard.index]))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_prng_keys_travel_as_their_key_data(impl):
    keys = jax.random.split(jax.random.key(7, impl=impl), 8)
    spread = NamedSharding(mesh(), PartitionSpec(("data", "model")))
    (placed,) = reshard([jax.device_put(keys, NamedSharding(mesh(), PartitionSpec()))], [spread])
    (gathered,) = reshard([placed], [NamedSharding(mesh(), PartitionSpec())])
    assert gathered.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(gathered), jax.random.key_data(keys))


def test_narrow_floats_are_carried_unsigned_and_wide_types_as_they_are():
    assert bits_dtype(jnp.bfloat16) == np.uint16
    assert bits_dtype(jnp.float8_e5m2) == np.uint8
    assert bits_dtype(jnp.int4) == np.uint8
    for name in ("float32", "int64", "bool", "complex64"):
        assert bits_dtype(name) == np.dtype(name)


def test_to_bits_and_from_bits_are_inverse_under_jit():
    values = every_bit_pattern("bfloat16")
    bits = jax.jit(to_bits)(jnp.asarray(values))
    np.testing.assert_array_equal(np.asarray(bits), values.view(np.uint16))
    back = jax.jit(lambda b: from_bits(b, jnp.bfloat16))(bits)
    np.testing.assert_array_equal(np.asarray(back).view(np.uint16), values.view(np.uint16))


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_explicit_axes_and_a_mesh_that_the_caller_has_set(axis_type: jax.sharding.AxisType) -> None:
    devices = np.array(jax.devices()[:8])
    mesh = jax.sharding.Mesh(devices.reshape(4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    flat = jax.sharding.Mesh(devices, ("flat",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    source = jax.sharding.NamedSharding(flat, spec("flat"))
    target = jax.sharding.NamedSharding(mesh, spec(None, "model"))
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    with jax.set_mesh(mesh):
        (moved,) = reshard([jax.device_put(values, source)], [target])
        assert moved.sharding == target
        np.testing.assert_array_equal(np.asarray(moved), values)
        (back,) = reshard([moved], [source])
        np.testing.assert_array_equal(np.asarray(back), values)


SETTINGS: dict[str, Any] = {
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_transfer_guard": "disallow",
    "jax_default_device": 3,
    "jax_check_tracer_leaks": True,
    "jax_explain_cache_misses": True,
    "jax_debug_key_reuse": True,
}


@contextlib.contextmanager
def setting(name: str) -> Iterator[None]:
    """The program of the caller sets a global setting of JAX, or a mesh."""
    if name == "mesh":
        with jax.set_mesh(jax.make_mesh((8,), ("other",), axis_types=(jax.sharding.AxisType.Explicit,))):
            yield
        return
    old, value = getattr(jax.config, name), SETTINGS[name]
    jax.config.update(name, jax.devices()[value] if name == "jax_default_device" else value)
    try:
        yield
    finally:
        jax.config.update(name, old)


def check(batch: Any, spec: Any, values: dict[str, np.ndarray]) -> None:
    for name, leaf in batch.items():
        assert leaf.dtype == values[name].dtype, name
        assert leaf.sharding.is_equivalent_to(spec[name].sharding, leaf.ndim), (name, leaf.sharding)
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(values[name][shard.index]).tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETTINGS, "mesh"])
def test_settings_of_the_caller_change_neither_batches_nor_restored_arrays(name: str, tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    floats = np.arange(64, dtype=np.float32).reshape(16, 4)
    floats[::3], floats[1::3] = np.nan, np.inf
    floats.view(np.uint32)[0, 0] = 0x7F800001  # a signaling NaN
    with np.errstate(invalid="ignore"):  # the signaling NaN
        half = floats.astype(jnp.bfloat16)
    data = {
        "float": floats,
        "half": half,
        "complex": floats.astype(np.complex64),
        "flag": np.arange(16) % 2 == 0,
        "small": np.arange(16, dtype=np.int8),
    }
    with setting(name):
        for load in ("sharded", "once"):
            with meshfeed.Feed(data, sharding, global_batch_size=8, load=load) as feed:
                spec = feed.element_spec
                for step, batch in enumerate(feed):
                    check(batch, spec, {key: leaf[8 * step : 8 * step + 8] for key, leaf in data.items()})
    rows, copies = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    wholes = {"float": jax.device_put(floats, copies), "half": jax.device_put(data["half"], rows)}
    swapped = {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows if leaf.sharding is copies else copies)
        for key, leaf in wholes.items()
    }
    with setting(name):
        check(dict(zip(wholes, reshard(list(wholes.values()), [leaf.sharding for leaf in swapped.values()]), strict=True)),
              swapped, data)  # fmt: skip
        with meshfeed.checkpoint.Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(1, wholes)
        restored = meshfeed.checkpoint.restore_once(tmp_path / "run" / "1", swapped)
        check(restored[0] if isinstance(restored, tuple) else restored, swapped, data)
