from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshfeed._src.arrays.device_put import DevicePut
from meshfeed._src.arrays.dtypes import batch_spec, narrow
from meshfeed._src.arrays.placer import ShardedPlacer, columns_of
from meshfeed._src.base import memory
from meshfeed._src.base.errors import PlanError, SourceError
from meshfeed._src.base.jax_internals import probe_fast_call
from meshfeed._src.plan.plan import plan_host
from meshfeed._src.plan.topology import fake_mesh
from meshfeed._src.reading.host_batch import spec_of_batch

BOTH_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
BOTH_WAYS = pytest.mark.parametrize("fast", [True, False], ids=["fast", "public"])
SPECS = [P(), P("data"), P(("data", "model")), P(("model", "data")), P("model"), P("data", "model"), P(None, "data")]


def make_mesh(axis_type: AxisType = AxisType.Auto, permuted: bool = False) -> Mesh:
    order = [5, 2, 7, 0, 1, 4, 6, 3] if permuted else range(8)
    devices = np.array([jax.devices()[i] for i in order]).reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2)


def assembler(prefix: Any, fast: bool, x64: bool = False) -> Callable[[Any, int], Any]:
    """Puts host batches of a given global batch size on the devices."""
    call = probe_fast_call()
    assert call is not None, "the private call is gone or changed: the fall-back is in use, look at jax_internals.py"
    return ShardedPlacer(prefix, 0, device_put=DevicePut(call if fast else None, x64)).put


def assert_same(ours: jax.Array, expected: jax.Array) -> None:
    """Equal in values, type, and what sits on which device."""
    assert jax.typeof(ours) == jax.typeof(expected)
    assert ours.sharding == expected.sharding
    assert ours.committed
    for mine, other in zip(ours.addressable_shards, expected.addressable_shards, strict=True):
        assert (mine.device, mine.index) == (other.device, other.index)
        np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(other.data))


@BOTH_TYPES
@BOTH_WAYS
@pytest.mark.parametrize("permuted", [False, True])
def test_global_arrays_are_those_of_device_put(axis_type: AxisType, fast: bool, permuted: bool) -> None:
    mesh = make_mesh(axis_type, permuted)
    host = np.arange(16 * 8, dtype=np.int32).reshape(16, 8)
    for spec in SPECS:
        sharding = NamedSharding(mesh, spec)
        assemble = assembler(sharding, fast)
        size = 16
        batch = {"tokens": host, "weights": host[:, 0].astype(np.float32)}
        for _ in range(3):  # the first goes the public way, the others the fast way
            ours = assemble(batch, size)
            assert_same(ours["tokens"], jax.device_put(host, sharding))
            rank_1 = NamedSharding(mesh, P(*tuple(spec)[:1]))
            assert_same(ours["weights"], jax.device_put(batch["weights"], rank_1))


@BOTH_TYPES
def test_a_step_is_compiled_once_for_both_ways(axis_type: AxisType) -> None:
    sharding = NamedSharding(make_mesh(axis_type), P("data"))
    assemble = assembler(sharding, fast=True)
    size = 8
    step = jax.jit(lambda x: x * 2)
    for k in range(4):
        np.testing.assert_array_equal(step(assemble(np.full((8, 3), k, np.int32), size)), np.full((8, 3), 2 * k))
    assert step._cache_size() == 1


@BOTH_WAYS
@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint16", "int32", "float16", "float32", "complex64", "bfloat16", "float8_e4m3fn", "int4", ">i4"],
)
def test_every_dtype_arrives_bit_for_bit(fast: bool, dtype: str) -> None:
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)
    host = rng.integers(-8, 8, (8, 16)).astype(wanted) if dtype == "int4" else None
    if host is None:
        raw = rng.integers(0, 2 if dtype == "bool" else 256, (8, 16 * wanted.itemsize), np.uint8)
        host = raw.view(wanted)  # NaNs with payloads included
    sharding = NamedSharding(make_mesh(), P(("data", "model")))
    assemble = assembler(sharding, fast)
    size = 8
    for _ in range(2):
        array = assemble(host, size)
        assert array.dtype == wanted.newbyteorder("=")
        assert np.asarray(array).tobytes() == host.astype(array.dtype).tobytes()


def test_columns_say_what_a_source_need_read() -> None:
    prefix = NamedSharding(fake_mesh({"data": 1, "seq": 4}, 2, 2), P("data", "seq"))
    record = {"tokens": jax.ShapeDtypeStruct((16,), np.int32), "length": jax.ShapeDtypeStruct((), np.int32)}
    found = columns_of(prefix, record, plan_host(prefix, 4, 1))
    assert found == {"['length']": (), "['tokens']": (slice(8, 16),)}


@BOTH_WAYS
def test_one_sharding_for_each_leaf_of_a_prefix(fast: bool) -> None:
    mesh = make_mesh()
    prefix = {"x": NamedSharding(mesh, P("data")), "y": NamedSharding(mesh, P("model", "data"))}
    batch = {
        "x": {"a": np.ones((8, 2), np.int32), "b": np.ones(8, bool)},
        "y": np.arange(64, dtype=np.int8).reshape(8, 8),
    }
    assemble = assembler(prefix, fast)
    size = 8
    for _ in range(2):
        out = assemble(batch, size)
        assert out["x"]["b"].sharding.spec == P("data")
        assert_same(out["y"], jax.device_put(batch["y"], prefix["y"]))


def test_the_private_call_is_given_up_for_good_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def changed(*arguments: Any, **keywords: Any) -> jax.Array:
        calls.append(1)
        raise TypeError("takes 2 positional arguments")

    sharding = NamedSharding(make_mesh(), P("data"))
    assemble = ShardedPlacer(sharding, 0, device_put=DevicePut(changed, False)).put
    size = 8
    with caplog.at_level(logging.WARNING, "meshfeed"):
        for k in range(4):
            batch = [np.full((8, 3), k, np.int32), np.full(8, k, np.int32)]
            assert_same(assemble(batch, size)[0], jax.device_put(batch[0], sharding))
    assert len(calls) == 1
    assert len(caplog.records) == 1
    assert "takes 2 positional arguments" in caplog.text


def test_a_changed_signature_is_found_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.lib import xla_client

    def changed(*arguments: Any) -> None:
        """batched_device_put(aval: object, xs: collections.abc.Sequence[object], enable_x64: bool | None) -> object"""

    for other in (changed, lambda aval, sharding, xs: None):
        monkeypatch.setattr(xla_client, "batched_device_put", other)
        assert probe_fast_call() is None
    monkeypatch.delattr(xla_client, "batched_device_put")
    assert probe_fast_call() is None


@BOTH_WAYS
def test_aligned_buffers_are_used_as_they_are(fast: bool) -> None:
    sharding = NamedSharding(make_mesh(), P(("data", "model")))
    assemble = assembler(sharding, fast)
    size = 16
    for _ in range(2):
        host = memory.empty((16, 32), np.int32)
        host[:] = 7
        array = assemble(host, size)
        pointers = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        assert pointers == [host[2 * d :].ctypes.data for d in range(8)]


@BOTH_WAYS
def test_an_unaligned_buffer_is_copied_once_and_whole(fast: bool) -> None:
    sharding = NamedSharding(make_mesh(), P(("data", "model")))
    assemble = assembler(sharding, fast)
    size = 16
    for _ in range(2):
        host = memory.empty((17 * 32,), np.int32)[1 : 1 + 16 * 32].reshape(16, 32)  # as b"".join may give it
        host[:] = np.arange(16)[:, None]
        array = assemble(host, size)
        pointers = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        assert pointers == [pointers[0] + 2 * 32 * 4 * d for d in range(8)]
        host[:] = -1
        np.testing.assert_array_equal(array, np.broadcast_to(np.arange(16)[:, None], (16, 32)))


def test_sharded_columns_are_copied_to_aligned_buffers_and_shared_by_replicas() -> None:
    sharding = NamedSharding(make_mesh(), P(None, "model"))
    assemble = assembler(sharding, fast=True)
    size = 16
    host = np.arange(16 * 64, dtype=np.int32).reshape(16, 64)
    for _ in range(2):
        array = assemble(host, size)
        pointers = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
        assert len(pointers) == 2
        assert all(pointer % 64 == 0 for pointer in pointers)
        np.testing.assert_array_equal(array, host)


def test_donating_a_batch_does_not_write_to_the_host_buffer() -> None:
    """Replicas on one host share memory: a step that donates its batch must not write through one into the others."""
    sharding = NamedSharding(make_mesh(), P())
    assemble = assembler(sharding, fast=True)
    size = 16
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(3):
        host = memory.empty((16, 32), np.float32)
        host[:] = 7
        out = jax.block_until_ready(step(assemble(host, size)))
        assert all((np.asarray(shard.data) == 8).all() for shard in out.addressable_shards)
        assert (host == 7).all()


@BOTH_WAYS
def test_a_guard_against_implicit_transfers_lets_a_feed_through(fast: bool) -> None:
    sharding = NamedSharding(make_mesh(), P("data"))
    host = np.arange(16, dtype=np.float32).reshape(8, 2)
    assemble, size = assembler(sharding, fast), 8
    with jax.transfer_guard("disallow"):
        arrays = [assemble(host, size) for _ in range(2)]
    for array in arrays:
        np.testing.assert_array_equal(array, host)
    with jax.transfer_guard("disallow_explicit"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
            assemble(host, size)


def test_arrays_may_be_put_on_another_thread() -> None:
    sharding = NamedSharding(make_mesh(), P("data"))
    assemble = assembler(sharding, fast=True)
    size = 8
    out: list[jax.Array] = []
    thread = threading.Thread(target=lambda: out.extend(assemble(np.full((8, 2), k, np.int32), size) for k in range(3)))
    thread.start()
    thread.join()
    assert [int(jnp.sum(array)) for array in out] == [0, 16, 32]


@BOTH_WAYS
def test_64_bits_where_the_feed_was_made_with_them(fast: bool) -> None:
    sharding = NamedSharding(make_mesh(), P("data"))
    with jax.enable_x64(True):
        placer = ShardedPlacer(sharding, 0)
    assemble = placer.put
    assert placer.element_spec(spec_of_batch({"x": np.zeros((1, 2), np.int64)}, 1, what="it"), 8)["x"].dtype == np.int64
    size = 8
    host = np.full((8, 2), 2**40, np.int64)
    for _ in range(2):  # here x64 is off, as it is on another thread
        array = assemble({"x": host}, size)["x"]
        assert array.dtype == np.int64
        assert (np.asarray(array.addressable_shards[0].data) == 2**40).all()
    spec = batch_spec(sharding, jax.ShapeDtypeStruct((2,), np.int32), 8, True)
    assert spec.dtype == np.int32


@pytest.mark.parametrize(
    ("wide", "small"), [("int64", "int32"), ("uint64", "uint32"), ("float64", "float32"), ("complex128", "complex64")]
)
def test_64_bits_are_narrowed_where_every_value_fits(wide: str, small: str) -> None:
    out = narrow(np.array([[0, 1], [2, 3]], wide), "['x']", x64=False)
    assert out.dtype == np.dtype(small)
    assert out.tolist() == [[0, 1], [2, 3]]
    assert out.ctypes.data % 64 == 0
    same = np.array([1], wide)
    assert narrow(same, "['x']", x64=True) is same
    assert narrow(np.empty((0, 3), wide), "", x64=False).shape == (0, 3)


@pytest.mark.parametrize(
    ("values", "dtype", "shown"),
    [
        ([1, 2**31], "int64", r"2147483648 at \(1,\)"),
        ([-(2**31) - 1], "int64", "-2147483649"),
        ([2**32], "uint64", "4294967296"),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_and_never_wraps(values: list[int], dtype: str, shown: str) -> None:
    with pytest.raises(SourceError, match=rf"leaf \['x'\] of dtype {dtype} holds {shown}.*jax_enable_x64"):
        narrow(np.array(values, dtype), "['x']", x64=False)
    edge = np.array([np.iinfo(dtype[:-2] + "32").min, np.iinfo(dtype[:-2] + "32").max], dtype)
    assert narrow(edge, "", x64=False).tolist() == edge.tolist()


@pytest.mark.parametrize("values", [["a", "b"], [b"a"], [None, 3], [np.datetime64(1, "s")], [np.longdouble(1)]])
def test_what_is_not_a_number_is_refused_by_path_and_dtype(values: list[Any]) -> None:
    array = np.array(values)
    sharding = NamedSharding(make_mesh(), P())
    with pytest.raises(SourceError, match=r"leaf \['t'\] has dtype .* and shape \(\d,\), but a jax.Array holds"):
        assembler(sharding, True)({"t": array}, len(values))


def test_leaves_that_do_not_fit_the_plan_are_refused() -> None:
    sharding = NamedSharding(make_mesh(), P("data", "model"))
    placer = ShardedPlacer(sharding, 0)
    assemble, size = placer.put, 8
    with pytest.raises(SourceError, match=r"leaf \['x'\] has shape \(\) and dtype int32; expected 8 rows"):
        assemble({"x": np.int32(3)}, size)
    with pytest.raises(SourceError, match=r"leaf \['x'\] has shape \(7, 2\).*expected 8 rows.* global batch of 8"):
        assemble({"x": np.zeros((7, 2), np.int32)}, size)
    with pytest.raises(PlanError, match=r"dimension 1 of leaf \['x'\] of size 3 .*'model' of size 2"):
        assemble({"x": np.zeros((8, 3), np.int32)}, size)
    placer.put.record_shapes = {"['x']": (4,)}
    with pytest.raises(SourceError, match=r"expected rows of shape \(4,\)"):
        assemble({"x": np.zeros((8, 3), np.int32)}, size)
    with pytest.raises(
        SourceError, match=r"the batch has the leaves \[\"\['y'\]\"\], but a record has \[\"\['x'\]\"\] too"
    ):
        assemble({"y": np.zeros((8, 3), np.int32)}, size)
    with pytest.raises(PlanError, match=r"dimension 1 of leaf \['x'\] of size 3"):
        batch_spec(sharding, {"x": jax.ShapeDtypeStruct((3,), np.int32)}, 8, False)


def test_element_spec_is_what_a_batch_is() -> None:
    mesh = make_mesh()
    sharding = NamedSharding(mesh, P("data", "model"))
    record = {"tokens": jax.ShapeDtypeStruct((4,), np.int64), "length": jax.ShapeDtypeStruct((), np.float64)}
    assemble = assembler(sharding, True)
    spec = batch_spec(sharding, record, 8, False)
    batch = assemble({"tokens": np.zeros((8, 4), np.int64), "length": np.zeros(8)}, 8)
    found = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), batch)
    assert found == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), spec)


def test_aligned_arrays() -> None:
    for shape, dtype in (((3, 5), np.int32), ((), np.float64), ((0, 4), np.int8), ((7,), ml_dtypes.bfloat16)):
        array = memory.empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.size == 0 or array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
        assert array.flags.writeable
    turned = np.arange(6).reshape(2, 3).T
    np.testing.assert_array_equal(memory.copy(turned, np.int8), turned)
