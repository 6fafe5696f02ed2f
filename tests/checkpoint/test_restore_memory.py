"""What a restore within a memory limit holds, counted in bytes of buffers and arrays: no clock, no resident memory."""

from __future__ import annotations

import gc
import threading
import time
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_trees import abstract, assert_same, make_mesh, place, special_floats
from jax.sharding import NamedSharding, PartitionSpec

from meshfeed._src.arrays.reshard import bits_dtype
from meshfeed._src.base import control_groups
from meshfeed._src.base import memory as base_memory
from meshfeed._src.checkpoint import restore as checkpoint_restore
from meshfeed._src.checkpoint.layout import LoadPlan, replica_plan
from meshfeed._src.checkpoint.options import RestoreOptions
from meshfeed._src.checkpoint.place import BlockGather, _block_updater
from meshfeed._src.checkpoint.plan import LeafRead
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed.checkpoint import ArraysHandler, ArraysSave, restore_once

LIMIT = 4 << 20
SHAPE = (2048, 1024)


class Buffers:
    """Bytes of the buffers that ``_aligned`` has made and that are still there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        self._lock = threading.RLock()  # a collection within it may run a finalizer on the same thread
        for name in ("empty", "zeros", "copy"):
            monkeypatch.setattr(base_memory, name, self._counted(getattr(base_memory, name)))

    def _counted(self, make: Any) -> Any:
        def counted(*args: Any) -> np.ndarray:
            array = owner = make(*args)
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            self._add(array.nbytes)
            weakref.finalize(owner, self._add, -array.nbytes)
            return array

        return counted

    def _add(self, count: int) -> None:
        with self._lock:
            self.now += count
            self.most = max(self.most, self.now)

    def settled(self) -> int:
        """Bytes that are still there when XLA's threads have let go: they may hold an input after its result is ready."""
        deadline = time.monotonic() + 20
        while gc.collect() >= 0 and self.now and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.now


def live_bytes(others: list[jax.Array]) -> int:
    """Bytes of the shards in memory, without those of ``others``: the arrays that were there before the test, held by it."""
    gc.collect()
    known = {id(array) for array in others}
    shards = [shard.data for array in jax.live_arrays() if id(array) not in known for shard in array.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


@pytest.fixture
def saved(tmp_path):
    """A leaf over (4, 2): eight chunks of 1 MiB, and 512 KiB in bfloat16."""
    mesh, count = make_mesh(4, 2), SHAPE[0] * SHAPE[1]
    state = {
        "f32": place(special_floats(np.float32, count).reshape(SHAPE), mesh, None, "model"),
        "bf16": place(special_floats(jnp.bfloat16, count).reshape(SHAPE), mesh, None, "model"),
    }
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "a", args=ArraysSave(state))
    assert StoredArrays(tmp_path / "a").chunk_of("f32") == [512, 512]
    return tmp_path / "a", state


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "readers"), [((4, 2), 2), ((2, 2, 2), 4)])
def test_a_limited_restore_holds_a_chunk_for_each_device_that_reads(saved, monkeypatch, mesh, readers):
    directory, state = saved
    mesh = make_mesh(*mesh)
    state = {name: place(np.asarray(leaf), mesh, None, "model") for name, leaf in state.items()}
    own, in_place = Buffers(monkeypatch), []
    start = StoredArrays.start_read

    def note(self: Any, leaf: Any, box: Any, room: Any) -> Any:
        wait = start(self, leaf, box, room)

        def noted() -> Any:
            values = wait()
            in_place.append((leaf.name, values is room))  # else there is a second copy of the chunk
            return values

        return noted

    monkeypatch.setattr(StoredArrays, "start_read", note)
    restored = restore_once(directory, abstract(state), memory_limit_bytes=LIMIT, restore="single_replica")
    assert_same(state, restored)
    assert sorted(in_place) == [(name, True) for name in ("bf16", "f32") for _ in range(8)]  # each chunk, once
    assert own.most <= readers * (1 << 20) + LIMIT // 8  # devices that receive have a few rows of zeros
    assert own.settled() == 0


@pytest.mark.parametrize("rows", [7 * 64, 7 * 64 - 7])
def test_the_last_rows_read_at_once_may_be_fewer(tmp_path, rows):
    values = special_floats(np.float32, rows * 1024).reshape(rows, 1024)
    ocp.Checkpointer(ArraysHandler()).save(
        tmp_path / "a", args=ArraysSave({"w": place(values, make_mesh(7, 1), "data")})
    )
    state = {"w": place(values, make_mesh(4, 2), None, "model")}  # three chunks at once, so three, three and one
    assert_same(
        state, restore_once(tmp_path / "a", abstract(state), memory_limit_bytes=12 << 20, restore="single_replica")
    )


@pytest.mark.slow
def test_buffers_of_one_group_are_gone_before_those_of_the_next(tmp_path, monkeypatch):
    mesh = make_mesh(4, 2)
    values = special_floats(np.float32, 1 << 18).reshape(256, 1024)
    state = {f"w{number}": place(np.roll(values, number), mesh, None, "model") for number in range(12)}
    ocp.Checkpointer(ArraysHandler()).save(tmp_path / "a", args=ArraysSave(state))
    own = Buffers(monkeypatch)
    # Where the engine lets go of a group's buffers, XLA's threads are given the time to do so, too.
    monkeypatch.setattr(checkpoint_restore, "gc", types.SimpleNamespace(collect=lambda _: own.settled()))
    restored = restore_once(tmp_path / "a", abstract(state), memory_limit_bytes=32 << 20, restore="single_replica")
    assert_same(state, restored)
    assert own.most == 16 << 20  # four leaves: 1 MiB on each of four replicas, and as much for the result
    assert own.settled() == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("broadcast", [False, True])
def test_blocks_are_written_into_the_result_in_place(dtype, broadcast):
    sharding = NamedSharding(make_mesh(4, 2), PartitionSpec(None, "model"))
    plan, ways = LoadPlan(sharding, SHAPE, 0, ("data",), (), None, SHAPE[0] // 4), 4
    if broadcast:
        plan, ways = replica_plan(sharding, SHAPE, "data", 1), 1
    dtype, rows = jnp.dtype(dtype), 16
    out = jax.ShapeDtypeStruct(SHAPE, bits_dtype(dtype), sharding=sharding)
    block = jax.ShapeDtypeStruct((ways * rows, SHAPE[1]), bits_dtype(dtype), sharding=plan.piece_sharding)
    compiled = _block_updater(plan).lower(out, block, np.int32(0)).compile()
    memory = compiled.memory_analysis()
    shard = SHAPE[0] * SHAPE[1] // 2 * dtype.itemsize
    assert memory.alias_size_in_bytes == shard
    assert memory.temp_size_in_bytes <= 4 * ways * rows * SHAPE[1] // 2 * dtype.itemsize


@pytest.mark.slow
def test_a_padded_leaf_is_cut_one_shard_at_a_time():
    mesh, shape = make_mesh(4, 2), (1001, 64)
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    plan = LoadPlan(sharding, shape, 0, ("data",), (), None, 251)
    values = special_floats(jnp.bfloat16, shape[0] * shape[1]).reshape(shape)
    others = jax.live_arrays()
    gather = BlockGather(plan, values.dtype, 251)
    bits = values.view(np.uint16)
    blocks = {}
    for device, box in plan.boxes().items():
        assert box is not None
        blocks[device] = np.zeros((251, 32), np.uint16)
        blocks[device][: box[0][1] - box[0][0]] = bits[tuple(slice(*side) for side in box)]
    gather.add(0, blocks)
    padded, cut, most = 4 * 251 * 32 * 2, gather._end, 0
    assert live_bytes(others) == 8 * padded
    assert cut is not None

    def watch(shard: jax.Array) -> jax.Array:
        nonlocal most
        result = cut(shard)
        most = max(most, live_bytes(others))
        return result

    gather._end = watch
    restored = gather.finish()
    assert most <= 9 * padded
    assert_same({"w": place(values, mesh, None, "model")}, {"w": restored})


def test_few_threads_read_within_a_small_limit(saved):
    directory, _ = saved
    for limit, threads in ((None, [64, 8]), (LIMIT, [1, 1]), (256 << 20, [4, 4]), (1 << 40, [64, 8])):
        context = StoredArrays(directory, limit)._context
        names = ("file_io_concurrency", "data_copy_concurrency")
        assert [context[name].to_json()["limit"] for name in names] == threads


def test_the_memory_of_devices_without_their_own_is_that_of_the_container(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    monkeypatch.setattr(control_groups, "_OF_PROCESS", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "_MOUNTED", tmp_path)
    assert checkpoint_restore._device_bytes() == 4096


def test_a_fraction_of_the_free_memory_is_the_least_of_all_hosts(monkeypatch):
    monkeypatch.setattr(checkpoint_restore, "_device_bytes", lambda: 10_000)
    sharding = NamedSharding(make_mesh(2, 1), PartitionSpec("data"))
    leaf = types.SimpleNamespace(stored_dtype=np.dtype(np.int16))
    reads: Any = [
        LeafRead(leaf, np.dtype(np.float32), LoadPlan(placement, (40, 5)))  # pyright: ignore[reportArgumentType]
        for placement in (sharding, None)  # 20 × 5 floats on each device; numpy arrays are not in device memory
    ]
    for other, limit in ((9_000, 2_400), (7, 7)):
        options = RestoreOptions(memory_fraction=0.25)
        hosts: Any = types.SimpleNamespace(collect=lambda own, other=other: {0: own, 1: other})
        assert checkpoint_restore._limit_bytes(reads, options, hosts) == limit
