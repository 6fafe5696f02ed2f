"""Arrays of every dtype: what reaches the devices, and what moves between shardings, against the same bytes on the host."""

from __future__ import annotations

import itertools
import random
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshfeed import PlanError, SettingsError, SourceError
from meshfeed._src.arrays import dtypes, load_once, reshard
from meshfeed._src.arrays.device_put import Assembler, DevicePut
from meshfeed._src.arrays.placer import LoadOncePlacer, ShardedPlacer, make_placer
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.plan.plan import plan_host
from meshfeed._src.plan.topology import fake_devices

WIDE = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
NUMPY = ["bool", *(f"{kind}{width}" for kind in ("int", "uint") for width in (8, 16, 32, 64)), "float16", "float32"]
NUMPY += ["float64", "complex64", "complex128"]
NARROW = ["bfloat16", "int4", "uint4", "int2", "uint2", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"]
WIDTHS = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name in NARROW else name)


def some(rng: random.Random, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Any bits that a value of the dtype may have."""
    dtype = dtype_of(name)
    bits = np.frombuffer(rng.randbytes(int(np.prod(shape)) * dtype.itemsize), np.uint8)
    if dtype.kind == "b":
        return (bits % 2 == 1).reshape(shape)
    if name in WIDTHS:
        values = bits.astype(np.int32) % 2 ** WIDTHS[name]
        return (values - (2 ** (WIDTHS[name] - 1) if name.startswith("int") else 0)).reshape(shape).astype(dtype)
    return bits.view(dtype).reshape(shape)


def mesh_of(shape: tuple[int, ...], axis_type: Any = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("a", "b", "c")[: len(shape)], axis_types=(axis_type,) * len(shape))


def some_spec(rng: random.Random, mesh: Mesh, rank: int) -> PartitionSpec:
    entries: list[Any] = [None] * rank
    for axis in mesh.axis_names:
        at = rng.randrange(rank + 1)
        if at < rank:
            entries[at] = axis if entries[at] is None else (*np.atleast_1d(entries[at]).tolist(), axis)
    return PartitionSpec(*entries)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_moves_between_shardings_keep_every_bit(axis_type: Any) -> None:
    rng = random.Random(3)
    mesh = mesh_of((2, 4), axis_type)
    names = [*(set(NUMPY) - set(WIDE)), *(set(NARROW) - {"int2", "uint2"})]
    hosts = [some(rng, (8, 16), name) for name in sorted(names)]
    shardings = [[NamedSharding(mesh, some_spec(rng, mesh, 2)) for _ in hosts] for _ in range(2)]
    before = [jax.device_put(host, sharding) for host, sharding in zip(hosts, shardings[0], strict=True)]
    to_devices = NamedSharding(mesh, PartitionSpec("a"))
    kinds = ("threefry2x32", "rbg", "unsafe_rbg")
    keys = [jax.device_put(jax.random.split(jax.random.key(5, impl=kind), 8), to_devices) for kind in kinds]
    to = [*shardings[1], *[NamedSharding(mesh, PartitionSpec("b"))] * len(keys)]
    with jax.set_mesh(mesh_of((8,))), jax.debug_nans(True), jax.debug_infs(True), jax.disable_jit(True):
        after = reshard.reshard([*before, *keys], to)
    for host, array, sharding in zip(hosts, after, shardings[1], strict=False):
        assert array.dtype == host.dtype
        assert array.sharding.is_equivalent_to(sharding, 2)
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == host[shard.index].tobytes(), host.dtype
    for key, moved in zip(keys, after[len(hosts) :], strict=True):
        assert jax.random.key_data(moved).tolist() == jax.random.key_data(key).tolist()
        assert moved.dtype == key.dtype
        assert moved.sharding.spec == PartitionSpec("b")


@pytest.mark.parametrize("name", [*NUMPY, *NARROW])
def test_the_form_in_which_values_travel(name: str) -> None:
    dtype = dtype_of(name)
    width = WIDTHS.get(name, 8 * dtype.itemsize)
    assert reshard.bit_width(dtype) == width
    is_float = dtype.kind == "f" or (name in NARROW and name not in WIDTHS)
    bits = {4: "uint8", 2: "uint8", 8: "uint8", 16: "uint16"} if is_float or width < 8 else {}
    assert reshard.bits_dtype(dtype) == np.dtype(bits.get(width, dtype))
    carrier = load_once.carrier_of(dtype)
    if dtype.kind == "c":
        assert (carrier.dtype, carrier.extra_shape) == (np.dtype(f"uint{4 * dtype.itemsize}"), (2,))
    else:
        integers = dtype if dtype.kind in "iu" else np.dtype(f"uint{8 * dtype.itemsize}")
        assert (carrier.dtype, carrier.extra_shape) == (integers, ())
    host = some(random.Random(0), (3, 4), name)
    carried = load_once.to_carrier(host, carrier)
    assert carried.dtype == carrier.dtype
    assert carried.shape == (3, 4, *carrier.extra_shape)
    assert carried.tobytes() == host.tobytes()


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", [*NUMPY, *NARROW, ">i4", ">f8", ">i8"])
def test_what_a_leaf_becomes_on_the_host(name: str, x64: bool) -> None:
    rng = random.Random(1)
    dtype = np.dtype(name) if name[0] == ">" else dtype_of(name)
    host = np.arange(12).reshape(3, 4).astype(dtype) if dtype.kind in "iu" else some(rng, (3, 4), dtype.name)
    host = host.astype(dtype)
    native = dtype.newbyteorder("=")
    wanted = native if x64 else np.dtype(WIDE.get(native.name, native))
    found = dtypes.narrow(host, "x", x64)
    assert found.dtype == dtypes.narrowed_dtype(dtype, x64) == wanted
    with np.errstate(over="ignore"):
        assert found.tobytes() == host.astype(wanted).tobytes()
    assert (found is host) == (wanted == dtype)
    assert dtypes.narrow(host[:0], "x", x64).shape == (0, 4)


@pytest.mark.parametrize(("dtype", "limits"), [("int64", (-(2**31), 2**31 - 1)), ("uint64", (0, 2**32 - 1))])
def test_integers_that_do_not_fit_are_named(dtype: str, limits: tuple[int, int]) -> None:
    fits = np.array([[limits[0], 1], [2, limits[1]]], dtype)
    assert dtypes.narrow(fits, "x", False).tolist() == fits.tolist()
    for place, value in itertools.product([(0, 1), (1, 0)], {limits[1] + 1, *([limits[0] - 1] if limits[0] else [])}):
        wide = fits.copy()
        wide[place] = value
        with pytest.raises(SourceError) as caught:
            dtypes.narrow(wide, "a/b", False)
        words = (f"leaf a/b of dtype {dtype} holds {value} at {place}", f"{limits[0]}..{limits[1]}")
        assert all(word in str(caught.value) for word in words), caught.value
        assert dtypes.narrow(wide, "a/b", True) is wide
    with pytest.raises(SourceError, match=r"leaf \(the only one\) of dtype"):
        dtypes.narrow(np.array([limits[1] + 1], dtype), "", False)


@pytest.mark.parametrize(
    "wrong", [["a"], [b"a"], [None], np.zeros(1, "M8[s]"), np.zeros(1, "m8[s]"), np.zeros(1, "V3")]
)
def test_what_is_no_number_is_named(wrong: Any) -> None:
    for array in (np.array(wrong), np.array(wrong)[:0]):
        with pytest.raises(SourceError) as caught:
            dtypes.narrow(array, "x", False)
        assert f"leaf x has dtype {array.dtype} and shape {array.shape}" in str(caught.value)
    with pytest.raises(SourceError, match="dtype"):
        dtypes.narrow(np.zeros(1, np.longdouble), "", True)
    with pytest.raises(SourceError, match="dtype"):
        dtypes.narrow(np.zeros(1, np.clongdouble), "", True)
    with pytest.raises(SourceError, match="dtype"):
        dtypes.narrow(np.zeros(1, [("a", "i4")]), "", True)


@pytest.mark.parametrize("seed", range(3))
def test_batches_of_several_kinds_on_devices(seed: int) -> None:
    """Through the assembler, by JAX's private call and without it, in turn; also from memory that is not aligned."""
    rng = random.Random(seed)
    mesh = mesh_of([(8,), (2, 4), (2, 2, 2)][seed % 3])
    prefix = {"x": NamedSharding(mesh, some_spec(rng, mesh, 2)), "y": NamedSharding(mesh, some_spec(rng, mesh, 1))}
    calls = [DevicePut.default(), DevicePut(None, False), DevicePut(_changed, False)]
    puts = [Assembler(prefix, lambda size: plan_host(prefix, size, 0), device_put=call) for call in calls]
    size, names = 8, list[str]()
    for number in range(8):
        if number % 4 == 0:
            size = rng.choice([8, 16])
        if number % 2 == 0:
            names = [rng.choice([*NUMPY, *NARROW]) for _ in range(2)]
        host = {"x": _some_small(rng, (size, 8), names[0]), "y": _some_small(rng, (size,), names[1])}
        if number % 3 == 0:
            host = {name: _unaligned(leaf) for name, leaf in host.items()}
        for put in puts:
            found = put(host, size)
            for name, leaf in host.items():
                wanted = dtypes.narrow(leaf, name, False)
                array = found[name]
                assert array.sharding.is_equivalent_to(prefix[name], leaf.ndim)
                assert (array.shape, array.dtype) == (leaf.shape, wanted.dtype)
                for shard in array.addressable_shards:
                    assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes(), (name, names)
    assert calls[2].fast_call is None  # given up at the second batch of some kind
    for leaf in (np.zeros((4, 8)), np.float32(1)):
        with pytest.raises((SourceError, PlanError), match="'x'"):
            puts[0]({"x": leaf, "y": np.zeros(16, np.float32)}, 16)


def _changed(*arguments: Any, **keywords: Any) -> Any:
    raise TypeError("JAX has changed it")


def _some_small(rng: random.Random, shape: tuple[int, ...], name: str) -> np.ndarray:
    array = some(rng, shape, name)
    return array % 1000 if name in ("int64", "uint64") else array


def _unaligned(leaf: np.ndarray) -> np.ndarray:
    memory = np.zeros(leaf.nbytes + 64, np.uint8)
    start = next(at for at in range(1, 64) if (memory.ctypes.data + at) % 64 == max(1, leaf.itemsize % 64))
    view = memory[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    view[...] = leaf
    return view


def test_hosts_that_read_for_all() -> None:
    devices = fake_devices(4, 2)
    whole = Mesh(np.array(devices).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    part = Mesh(np.array(devices[:4]), ("a",), axis_types=(AxisType.Auto,))
    on_whole, on_part = (NamedSharding(mesh, PartitionSpec("a")) for mesh in (whole, part))
    assert load_once.load_participants({"x": on_whole}, "once") == (0, 1, 2, 3)
    assert load_once.load_participants({"x": on_part}, [1]) == (0, 1)
    for load, words in (([1, 2], "no device of host 2 is in"), ([3, 2], "no device of host 2, 3 is in")):
        with pytest.raises(SettingsError, match=words) as caught:
            load_once.load_participants({"x": on_part}, load)
        assert caught.value.setting == "load"
        assert "[0, 1]" in str(caught.value)
    with pytest.raises(SettingsError, match=r"only on the hosts \[0, 1\], none of which reads") as caught:
        load_once.load_participants({"x": on_whole, "y": on_part}, [2, 3])
    assert caught.value.setting == "load"
    assert load_once.load_participants({"x": on_whole, "y": on_part}, [1, 3]) == (0, 1, 2, 3)
    for size, load, host in itertools.product((1, 7, 8, 24), ("once", [1, 3], [2]), range(4)):
        assignment = load_once.RowAssignment({"x": on_whole}, load, size, host)
        readers = [0, 1, 2, 3] if load == "once" else load
        each = -(-size // (2 * len(readers)))
        first = 2 * readers.index(host) * each if host in readers else size
        rows = range(min(size, first), min(size, first + 2 * each)) if host in readers else range(0)
        assert assignment.host_rows.tolist() == list(rows), (size, load, host)
        assert assignment.row_ranges == (((rows.start, rows.stop),) if rows else ())


def test_two_meshes_in_one_batch() -> None:
    """Rows that go to devices in two orders, of which each host reads what either needs."""
    devices = jax.devices()
    meshes = [Mesh(np.array(order), ("a",), axis_types=(AxisType.Auto,)) for order in (devices, devices[::-1])]
    prefix = {name: NamedSharding(mesh, PartitionSpec("a")) for name, mesh in zip("xy", meshes, strict=True)}
    placer = LoadOncePlacer(prefix, "once", 0)
    rows = placer.host_rows(None).rows(16)
    host = {"x": rows.astype(np.float32), "y": -rows.astype(np.float32)}
    for _ in range(2):
        found = placer.finish(placer.put(host, 16), 16)
        assert found["x"].tolist() == list(range(16))
        assert found["y"].tolist() == [-row for row in range(16)]
        assert [found[name].sharding for name in "xy"] == list(prefix.values())


def test_placers_say_how_large_a_batch_is() -> None:
    mesh = Mesh(np.array(fake_devices(4, 2)).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("a", "b"))
    for spec, shards, mine in ((("a",), 4, 1), ((("b", "a"),), 8, 2), (("b",), 2, 2), ((), 1, 1)):
        placer = ShardedPlacer({"x": NamedSharding(mesh, PartitionSpec(*spec))}, 1)
        assert placer.smallest_batch_size() == shards
        assert placer.global_batch_size_of(3 * mine) == 3 * shards
        if mine > 1:
            with pytest.raises(PlanError, match=f"{3 * mine + 1} rows cannot .* {mine} of the {shards} row shards"):
                placer.global_batch_size_of(3 * mine + 1)
    both = ShardedPlacer({"x": rows, "y": NamedSharding(mesh, PartitionSpec(("a", "b")))}, 0)
    assert both.smallest_batch_size() == 8
    assert both.participants == (0, 1, 2, 3)
    outside = Mesh(np.array(fake_devices(4, 2))[:4], ("a",), axis_types=(AxisType.Auto,))
    with pytest.raises(PlanError, match="0 of the 4 row shards"):
        ShardedPlacer({"x": NamedSharding(outside, PartitionSpec("a"))}, 3).global_batch_size_of(2)
    once = LoadOncePlacer({"x": rows}, "once", 0)
    for call in (once.smallest_batch_size, lambda: once.global_batch_size_of(4)):
        with pytest.raises(PlanError, match="load='sharded'"):
            call()


def test_a_mask_lies_as_the_rows_do() -> None:
    mesh = mesh_of((4, 2))
    sharding = {"x": NamedSharding(mesh, PartitionSpec("a", "b")), "y": NamedSharding(mesh, PartitionSpec("b"))}
    arguments: dict[str, Any] = {"global_batch_size": 8, "end": "pad", "mask_key": "m"}
    settings = FeedSettings.of({**{f.name: f.default for f in FeedSettings.__dataclass_fields__.values()}, **arguments})  # type: ignore[attr-defined]
    placer = make_placer(sharding, settings)
    host = {"x": np.ones((8, 4), np.float32), "y": np.ones(8, np.float32), "m": np.arange(8) < 5}
    found = placer.finish(placer.put(host, 8), 8)
    assert found["m"].sharding.spec == PartitionSpec("a")
    assert found["m"].tolist() == host["m"].tolist()
    for size in (6, 10):
        wrong = FeedSettings.of(
            {**{f: getattr(settings, f) for f in settings.__dataclass_fields__}, "global_batch_size": size}
        )
        for load in ("sharded", "once"):
            with pytest.raises(PlanError):
                make_placer(
                    sharding,
                    FeedSettings.of({**{f: getattr(wrong, f) for f in wrong.__dataclass_fields__}, "load": load}),
                )


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_some_devices_reach_all(seed: int) -> None:
    """Devices of hosts that do not read hold anything."""
    rng = random.Random(seed)
    mesh = mesh_of((2, 4))
    flat = Mesh(mesh.devices.reshape(-1), ("load",), axis_types=(AxisType.Auto,))
    load_sharding = NamedSharding(flat, PartitionSpec("load"))
    reading = sorted(rng.sample(range(8), rng.choice([1, 2, 5, 8])))
    ranks = [reading.index(number) if number in reading else -1 for number in range(8)]
    size = rng.choice([8, 16])
    chunk = -(-size // len(reading))
    names = ["float32", "bfloat16", "bool", "int4", "uint8", "int16", "complex64", "uint32"]
    hosts = [some(rng, (size, 8), name) for name in names]
    shardings = [NamedSharding(mesh, some_spec(rng, mesh, 2)) for _ in names]
    specs = [jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=s) for host, s in zip(hosts, shardings, strict=True)]
    carried = []
    for host in hosts:
        rows = load_once.to_carrier(host, load_once.carrier_of(host.dtype))
        whole = np.frombuffer(rng.randbytes(8 * chunk * rows[0].nbytes), rows.dtype).reshape(8 * chunk, *rows.shape[1:])
        whole = whole.copy()
        for device, rank in enumerate(ranks):
            mine = rows[rank * chunk : (rank + 1) * chunk] if rank >= 0 else rows[:0]
            whole[device * chunk : device * chunk + len(mine)] = mine
        carried.append(jax.device_put(whole, load_sharding))
    moved = load_once.make_mover(load_sharding, ranks, chunk, specs)(tuple(carried))
    for name, host, array, sharding in zip(names, hosts, moved, shardings, strict=True):
        assert array.sharding.is_equivalent_to(sharding, 2)
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == host[shard.index].tobytes(), (name, ranks)
