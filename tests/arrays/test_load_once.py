from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshfeed._src.arrays import load_once
from meshfeed._src.arrays.load_once import (
    LoadOncePlacer,
    MeshAssignment,
    RowAssignment,
    carrier_of,
    load_participants,
    make_mover,
    to_carrier,
)
from meshfeed._src.arrays.reshard import without_callers_settings
from meshfeed._src.base.errors import PlanError, SettingsError, SourceError
from meshfeed._src.plan.topology import fake_devices, fake_mesh

DTYPES = [
    *("bool", "int8", "uint16", "int32", "float16", "float32", "complex64"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e3m4", "int4", "uint4", "float4_e2m1fn", "int2"),
]
SPECS = [P(), P("data"), P(("model", "data")), P("data", "model"), P(None, "model"), P(None, ("data", "model"))]


def random_bits(shape: tuple[int, ...], name: str) -> np.ndarray:
    """Values of every bit pattern: NaNs with payloads, -0.0 and subnormals included."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    rng = np.random.default_rng(0)
    if name in ("int4", "uint4", "int2", "float4_e2m1fn", "bool"):
        patterns = np.array(
            {"int4": range(-8, 8), "uint4": range(16), "int2": range(-2, 2), "bool": range(2)}.get(name, [0.5, 1, -6])
        )
        return rng.choice(patterns, shape).astype(dtype)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return raw.view(dtype)


def same_bits(array: jax.Array, host: np.ndarray) -> None:
    assert array.dtype == host.dtype
    assert array.shape == host.shape
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(host[shard.index]).tobytes()


def mesh_of(axis_type: AxisType = AxisType.Auto, permuted: bool = False) -> Mesh:
    order = [5, 2, 7, 0, 1, 4, 6, 3] if permuted else range(8)
    grid = np.array([jax.devices()[i] for i in order]).reshape(4, 2)
    return Mesh(grid, ("data", "model"), axis_types=(axis_type,) * 2)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placeholders that would be seen."""

    def poison(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xAB, np.uint8).view(dtype).reshape(shape)

    monkeypatch.setattr(load_once.memory, "zeros", poison)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("permuted", [False, True])
def test_rows_read_once_arrive_in_the_wanted_sharding(axis_type: AxisType, permuted: bool) -> None:
    mesh = mesh_of(axis_type, permuted)
    host = {"tokens": np.arange(8 * 16, dtype=np.int32).reshape(8, 16), "length": np.arange(8, dtype=np.int32)}
    for spec in SPECS:
        sharding = NamedSharding(mesh, spec)
        plan = RowAssignment(sharding, "once", 8, 0)
        assert plan.host_rows.tolist() == list(range(8))
        for _ in range(2):
            out = plan.reshard(plan.put(host))
            expected = jax.device_put(host["tokens"], sharding)
            assert jax.typeof(out["tokens"]) == jax.typeof(expected)
            assert out["tokens"].sharding == sharding
            same_bits(out["tokens"], host["tokens"])
            same_bits(out["length"], host["length"])


@pytest.mark.usefixtures("poisoned")
def test_every_dtype_keeps_its_bits_through_gather_and_slice() -> None:
    host = {name: random_bits((8, 16), name) for name in DTYPES}
    for spec in (P(), P("data", "model")):
        plan = RowAssignment(NamedSharding(mesh_of(), spec), "once", 8, 0)
        out = plan.reshard(plan.put(host))
        for name in DTYPES:
            same_bits(out[name], host[name])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("num_rows", [1, 3, 4, 9, 12, 17])
def test_a_batch_need_not_be_a_multiple_of_the_devices(num_rows: int) -> None:
    plan = RowAssignment(NamedSharding(mesh_of(), P(None, "model")), "once", num_rows, 0)
    host = random_bits((num_rows, 4), "bfloat16")
    same_bits(plan.reshard(plan.put(host)), host)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_a_gather_as_a_sum_keeps_negative_zeros(dtype: type, num_rows: int) -> None:
    """XLA adds zeros to the rows if it gathers some of them from a sharded dimension."""
    host = -np.zeros((num_rows, 8), dtype)
    for spec in (P(), P(None, "model")):
        plan = RowAssignment(NamedSharding(mesh_of(), spec), "once", num_rows, 0)
        same_bits(plan.reshard(plan.put(host)), host)


def test_64_bits_travel_where_they_are_on() -> None:
    with jax.enable_x64(True):
        loader = LoadOncePlacer(NamedSharding(mesh_of(), P("data")), "once", 0)
        host = {name: random_bits((8, 4), name) for name in ("int64", "float64", "complex128", "uint64")}
        out = loader.plan(8).reshard(loader.plan(8).put(host))
        for name, array in host.items():
            same_bits(out[name], array)


def test_64_bits_are_narrowed_where_they_are_off() -> None:
    plan = RowAssignment(NamedSharding(mesh_of(), P("data")), "once", 8, 0)
    out = plan.reshard(plan.put({"x": np.arange(8), "y": np.arange(8.0)}))
    assert (out["x"].dtype, out["y"].dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(out["x"], np.arange(8))
    with pytest.raises(SourceError, match=r"leaf \['x'\] .*2147483648"):
        plan.put({"x": np.arange(8) + 2**31 - 7, "y": np.arange(8.0)})


@pytest.mark.parametrize(
    ("ranks", "num_rows"),
    [
        ([-1, 2, -1, 1, 0, -1, -1, -1], 5),
        *(
            pytest.param(ranks, num_rows, marks=pytest.mark.slow)
            for ranks in ([0, 1, -1, -1, -1, -1, -1, -1], [-1, 2, -1, 1, 0, -1, -1, -1], [-1] * 7 + [0])
            for num_rows in (4, 5, 8)
            if num_rows != 5 or ranks[1] != 2
        ),
    ],
)
def test_devices_that_do_not_read_give_nothing(ranks: list[int], num_rows: int) -> None:
    mesh = mesh_of()
    flat = NamedSharding(Mesh(mesh.devices.reshape(-1), ("load",), axis_types=(AxisType.Auto,)), P("load"))
    chunk = -(-num_rows // (max(ranks) + 1))
    spec = P("data", "model") if num_rows % 4 == 0 else P(None, "model")
    hosts = [random_bits((num_rows, 6), name) for name in DTYPES]
    poisoned_arrays, specs = [], []
    for host in hosts:
        bits = to_carrier(host, carrier_of(host.dtype))
        laid = np.full((8 * chunk, *bits.shape[1:]), 0x5B, bits.dtype)
        for place, rank in enumerate(ranks):
            rows = bits[rank * chunk : (rank + 1) * chunk] if rank >= 0 else bits[:0]
            laid[place * chunk : place * chunk + len(rows)] = rows
        poisoned_arrays.append(jax.device_put(laid, flat))
        specs.append(jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=NamedSharding(mesh, spec)))
    with jax.set_mesh(mesh), without_callers_settings():  # shard_map over another mesh than the caller's is an error
        out = make_mover(flat, ranks, chunk, specs)(tuple(poisoned_arrays))
    for array, host, wanted in zip(out, hosts, specs, strict=True):
        assert array.sharding == wanted.sharding
        same_bits(array, host)


@pytest.fixture
def movers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The compiled moves that a test makes."""
    made: list[Any] = []

    def make(*args: Any) -> Any:
        made.append(make_mover(*args))
        return made[-1]

    monkeypatch.setattr(load_once, "make_mover", make)
    return made


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_that_the_caller_has_set_does_not_matter(axis_type: AxisType, movers: list[Any]) -> None:
    mesh = mesh_of(axis_type)
    host = random_bits((8, 4), "bfloat16")
    plan = RowAssignment(NamedSharding(mesh, P("data", "model")), "once", 8, 0)
    with jax.set_mesh(mesh):
        same_bits(plan.reshard(plan.put(host)), host)
    with jax.set_mesh(mesh_of(permuted=True)):
        same_bits(plan.reshard(plan.put(host)), host)
    same_bits(plan.reshard(plan.put(host)), host)
    [mover] = movers
    assert mover._cache_size() == 1


def test_a_guard_against_implicit_transfers_lets_a_loaded_batch_through() -> None:
    host = random_bits((8, 4), "float32")
    plan = RowAssignment(NamedSharding(mesh_of(), P("data")), "once", 8, 0)
    with jax.transfer_guard("disallow"):
        out = plan.reshard(plan.put(host))
    same_bits(out, host)


def test_a_move_is_compiled_once_and_a_second_batch_is_another_array(movers: list[Any]) -> None:
    plan = RowAssignment(NamedSharding(mesh_of(), P("data")), "once", 8, 0)
    for k in range(3):
        np.testing.assert_array_equal(plan.reshard(plan.put(np.full((8, 2), k, np.int32))), np.full((8, 2), k))
    [mover] = movers
    assert mover._cache_size() == 1


def test_leaves_on_several_meshes_are_dealt_each_over_its_own() -> None:
    prefix = {
        "all": NamedSharding(mesh_of(), P("data")),
        "turned": NamedSharding(mesh_of(permuted=True), P("model")),
        "half": NamedSharding(Mesh(np.array(jax.devices()[4:]), ("x",), axis_types=(AxisType.Auto,)), P()),
    }
    plan = RowAssignment(prefix, "once", 8, 0)
    host = {"all": {"a": random_bits((8, 3), "bfloat16"), "b": np.arange(8, dtype=np.int8)}}
    host |= {"turned": random_bits((8, 2), "float32"), "half": random_bits((8, 2), "float16")}
    out = plan.reshard(plan.put(host))
    jax.tree.map(same_bits, out, host)
    assert out["half"].sharding == prefix["half"]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.data())
def test_each_row_is_read_by_exactly_one_host(
    num_rows: int, num_hosts: int, per_host: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(num_hosts * per_host)))
    readers = data.draw(st.lists(st.integers(0, num_hosts - 1), min_size=1, unique=True))
    mesh = fake_mesh({"d": num_hosts * per_host}, num_hosts, per_host, permutation=order)
    plans = [RowAssignment(NamedSharding(mesh, P()), readers, num_rows, host) for host in range(num_hosts)]
    assert sorted(row for plan in plans for row in plan.host_rows.tolist()) == list(range(num_rows))
    for host, plan in enumerate(plans):
        assert host in readers or not plan.host_rows.size
    assignment = MeshAssignment.over(tuple(mesh.devices.flat), tuple(readers), num_rows)
    sizes = [stop - start for start, stop in map(assignment.rows_of, assignment.ranks)]
    assert max(sizes) <= -(-num_rows // (len(readers) * per_host))


def test_readers_must_have_a_device_in_the_sharding() -> None:
    devices = fake_devices(4, 2)
    mesh = Mesh(np.array(devices[:4], object), ("d",), axis_types=(AxisType.Auto,))
    other = Mesh(np.array(devices[4:6], object), ("d",), axis_types=(AxisType.Auto,))
    one, both = NamedSharding(mesh, P("d")), [NamedSharding(mesh, P("d")), NamedSharding(other, P("d"))]
    assert load_participants(one, "once") == (0, 1)
    assert load_participants(both, [0, 2]) == (0, 1, 2)
    with pytest.raises(
        SettingsError, match=r"load=\[1, 3\]: no device of host 3 is in the sharding.*\[0, 1\]"
    ) as caught:
        load_participants(one, [1, 3])
    assert caught.value.setting == "load"
    with pytest.raises(SettingsError, match=r"one of the meshes in sharding is only on the hosts \[2\]"):
        load_participants(both, [0])


def test_leaves_that_do_not_fit_are_refused() -> None:
    plan = RowAssignment(NamedSharding(mesh_of(), P("data", "model")), "once", 8, 0)
    with pytest.raises(SourceError, match=r"leaf \['x'\] has shape \(7, 2\) .* expected 8 rows first"):
        plan.put({"x": np.zeros((7, 2), np.int32)})
    with pytest.raises(SourceError, match=r"leaf \['x'\] has dtype <U1"):
        plan.put({"x": np.array(["a"] * 8)})
    with pytest.raises(PlanError, match=r"dimension 1 of leaf \['x'\] of size 3"):
        plan.put({"x": np.zeros((8, 3), np.int32)})
