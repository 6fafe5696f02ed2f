"""Batches on whatever devices there are: an accelerator by ``scripts/test-accelerator``, else the CPU devices of all tests.

Transfers to an accelerator end after the call that started them, computations overlap with them, and device memory is
neither shared with the host nor unlimited. So these tests compare what is on the devices with ``replay``, which reads the
same rows again and puts nothing on devices.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent.parent / "multihost"))

from source_pipelines import NAMES, make_feed, write_files

import meshfeed

BATCH = 64
DTYPES = [
    np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.float16, np.float32, np.complex64,
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4, ml_dtypes.uint4,
]  # fmt: skip


ROWS = P("data")


def sharding(spec: P = ROWS, memory_kind: str | None = None) -> NamedSharding:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def assert_same_bits(batch: Any, expected: Any) -> None:
    assert jax.tree.structure(batch) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True):
        assert got.shape == wanted.shape
        assert got.devices() == set(jax.devices())
        assert bits(got) == bits(np.asarray(wanted).astype(got.dtype))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("datasets")
    path = tmp_path_factory.mktemp("files")
    write_files(str(path))
    return str(path)


# On CPU devices, test_check_resumable.py has them all. A window of "grain window shuffle" takes a second.
SOURCES = [name for name in NAMES if name != "grain window shuffle"]
SOURCES = SOURCES if jax.default_backend() != "cpu" else ["memory", "packed", "grain filter", "mixture of streams"]


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_arrives_bit_for_bit(name: str, folder: str) -> None:
    with make_feed(name, folder) as feed:
        batches = [next(feed) for _ in range(3)]  # in flight at once
        for step, batch in enumerate(batches):
            assert_same_bits(batch, feed.replay(step))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("load", ["sharded", "once"])
def test_every_dtype_arrives_bit_for_bit(dtype: Any, load: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (256, 24 * 8), np.uint8)
    values = raw.astype(dtype) if np.dtype(dtype).itemsize == 1 and dtype is not np.bool_ else raw % 2 == 0
    if dtype is not np.bool_:
        small = dtype in (ml_dtypes.int4, ml_dtypes.uint4)
        values = (raw % 8).astype(dtype) if small else raw.view(np.uint8).reshape(256, -1).view(dtype)
    with meshfeed.Feed({"x": values}, sharding(), global_batch_size=BATCH, shuffle=True, load=load) as feed:
        for step in range(3):
            batch = next(feed)
            assert batch["x"].dtype == dtype
            assert bits(batch["x"]) == bits(values[feed.record_ids(step)])


class Refilled:
    """Every batch in the same writable memory, of which the last rows are written after the batch has been returned."""

    def __init__(self, row: int) -> None:
        self.buffer = np.empty((BATCH, row), np.int32)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, record_id: int) -> np.ndarray:
        return np.full(self.buffer.shape[1], record_id, np.int32)

    def read_batch(self, record_ids: Any) -> np.ndarray:
        self.buffer[:] = -1
        self.buffer[: len(record_ids)] = np.asarray(record_ids, np.int32)[:, None]
        return self.buffer[: len(record_ids)]

    def fingerprint(self) -> Any:
        return {"kind": "refilled"}


@pytest.mark.parametrize("row", [16, 4096, 1 << 18])  # 4 KiB, 1 MiB and 64 MiB a batch
def test_a_source_may_refill_its_memory_during_a_transfer(row: int) -> None:
    with meshfeed.Feed(Refilled(row), sharding(), global_batch_size=BATCH, shuffle=True, prefetch=2) as feed:
        sums = jax.jit(lambda x: (x[:, 0], (x == x[:, :1]).all()))
        for step in range(12):
            first, whole = sums(next(feed))
            np.testing.assert_array_equal(first, feed.record_ids(step))
            assert whole


def test_host_batches_that_a_loop_refills() -> None:
    def loop() -> Any:
        buffer = np.empty((BATCH, 1 << 16), np.float32)
        for number in range(8):
            buffer[:] = number
            yield {"x": buffer}
            buffer[:] = np.nan

    with meshfeed.Feed(meshfeed.sources.HostBatches(loop()), sharding()) as feed:
        assert [float(batch["x"].mean()) for batch in feed] == list(range(8))


def test_batches_may_be_donated() -> None:
    values = np.arange(512 * 128, dtype=np.float32).reshape(512, 128)
    step = jax.jit(lambda state, batch: (state + batch["x"].sum(), batch["x"] * 0 - 1), donate_argnums=1)
    with meshfeed.Feed({"x": values}, sharding(), global_batch_size=BATCH, num_epochs=2, shuffle=True) as feed:
        state = jnp.zeros(())
        for batch in feed:
            state, _ = step(state, batch)
        assert feed.step == 16
    with meshfeed.Feed({"x": values}, sharding(), global_batch_size=BATCH) as feed:  # the source's memory is as it was
        np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in feed]), values)


def test_transfers_are_allowed_under_a_guard() -> None:
    with jax.transfer_guard("disallow"), meshfeed.Feed({"x": np.arange(256)}, sharding(), global_batch_size=64) as feed:
        batches = [next(feed) for _ in range(4)]
    np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches]), np.arange(256))


def memory_kinds() -> list[str]:
    return [memory.kind for memory in jax.devices()[0].addressable_memories()]


def test_every_memory_kind() -> None:
    values = np.random.default_rng(0).normal(size=(256, 33)).astype(np.float32)
    for kind in memory_kinds():
        with meshfeed.Feed(values, sharding(memory_kind=kind), global_batch_size=64, shuffle=True) as feed:
            for step in range(4):
                batch = next(feed)
                assert batch.sharding.memory_kind == kind
                assert bits(batch) == bits(values[feed.record_ids(step)])


def peak_bytes() -> int | None:
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats["bytes_in_use"]


def test_device_memory_is_bounded_by_prefetch() -> None:
    if peak_bytes() is None:
        pytest.skip(f"{jax.devices()[0].platform} devices do not say how much memory is in use")
    row = 1 << 18
    one = BATCH * row * 4 // jax.device_count()
    start = peak_bytes()
    with meshfeed.Feed(Refilled(row), sharding(), global_batch_size=BATCH, shuffle=True, prefetch=2) as feed:
        most = 0
        for _ in range(30):
            batch = next(feed)
            batch.block_until_ready()
            most = max(most, peak_bytes() - start)
            del batch
    assert most <= 5 * one, (
        f"{most / one:.1f} batches"
    )  # the one taken, two ahead, one in transfer, and one that is read


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"num_threads": 2}, {"num_workers": 2}], ids=str)
def test_readers_leave_the_devices_alone(settings: dict[str, Any]) -> None:
    with meshfeed.Feed(Platform(), sharding(), global_batch_size=64, shuffle=True, **settings) as feed:
        batch = next(feed)
        np.testing.assert_array_equal(batch["id"], feed.record_ids(0))
        platforms = set(np.asarray(batch["platform"]).tolist())
    if "num_workers" in settings:
        assert platforms == {1}  # worker processes have CPU devices only, or they would take the accelerator's memory


class Platform:
    """Records that say whether JAX runs on the CPU where they are read."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, record_id: int) -> Any:
        return {"id": np.int32(record_id), "platform": np.int32(jax.default_backend() == "cpu")}

    def fingerprint(self) -> Any:
        return {"kind": "platform"}


def test_resumable() -> None:
    values = {"x": np.random.default_rng(0).normal(size=(300, 5)).astype(np.float32)}

    def make() -> Any:
        return meshfeed.Feed(
            values, sharding(), global_batch_size=64, shuffle=True, num_epochs=2, end="pad", mask_key="mask"
        )

    assert meshfeed.testing.check_resumable(make, max_steps=10) > 0


def test_reshard_to_one_device_and_back() -> None:
    values = np.arange(1024, dtype=np.int32)
    one = NamedSharding(
        jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]), P("data")
    )
    with meshfeed.Feed(values, sharding(), global_batch_size=64, shuffle=True) as feed:
        taken = [np.asarray(next(feed)) for _ in range(3)]
        feed.reshard(one)
        taken += [np.asarray(next(feed)) for _ in range(3)]
        feed.reshard(sharding())
        taken += [np.asarray(batch) for batch in feed]
        assert [rows.tolist() for rows in taken] == [feed.record_ids(step).tolist() for step in range(16)]


def test_from_cpu_devices_to_the_accelerator_and_back() -> None:
    """A state that a feed on CPU devices saved continues on the accelerator."""
    with contextlib.suppress(RuntimeError):
        cpus = jax.devices("cpu")
        values = np.arange(1024, dtype=np.int32)
        host = NamedSharding(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=cpus[:1]), P("data"))
        there = [host, sharding(), host]
        state, taken, ids = None, [], []
        for where in there:
            with meshfeed.Feed(values, where, global_batch_size=64, shuffle=True) as feed:
                if state is not None:
                    feed.set_state(state)
                taken += [np.asarray(next(feed)).tolist() for _ in range(4)]
                state = feed.get_state()
                ids = [feed.record_ids(step).tolist() for step in range(12)]
        assert taken == ids


def test_remote_feed() -> None:
    def make_source() -> Any:
        return {"x": np.arange(640, dtype=np.int32)}

    where = sharding()
    with (
        meshfeed.remote.RemoteFeed(make_source, where, global_batch_size=64, shuffle=True) as remote,
        meshfeed.Feed(make_source(), where, global_batch_size=64, shuffle=True) as local,
    ):
        for here, there in zip(local, remote, strict=True):
            assert there["x"].sharding == here["x"].sharding
            np.testing.assert_array_equal(there["x"], here["x"])


def test_a_step_that_runs_meanwhile_sees_its_own_batch() -> None:
    """Computations and transfers overlap, with more batches in flight than the feed reads ahead."""
    size, repeats = (4096, 50) if jax.default_backend() != "cpu" else (64, 2)  # 70 ms of an H100
    values = np.random.default_rng(0).integers(0, 1000, (512, size), np.int32)

    @jax.jit
    def slow(batch: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        noise = jax.lax.fori_loop(0, repeats, lambda _, x: jnp.tanh(x @ x), noise)
        return batch.sum(1), noise  # the sum may be computed last

    noise = jnp.ones((size, size), jnp.float32) / size
    with meshfeed.Feed(values, sharding(), global_batch_size=BATCH, shuffle=True, num_epochs=8, prefetch=4) as feed:
        sums = []
        for batch in feed:
            total, noise = slow(batch, noise)
            sums.append(total)
            if len(sums) % 20 == 0:  # XLA's CPU client deadlocks with more than 32 computations in flight
                jax.block_until_ready(noise)
        for step, total in enumerate(sums):
            np.testing.assert_array_equal(total, values[feed.record_ids(step)].sum(1))


def test_two_feeds_in_two_threads() -> None:
    values = np.arange(4096, dtype=np.int32)
    feeds = [meshfeed.Feed(values, sharding(), global_batch_size=64, shuffle=True, seed=seed) for seed in (1, 2)]
    found: list[list[Any]] = [[], []]

    def take(number: int) -> None:
        with feeds[number] as feed:
            found[number] = [np.asarray(batch) for batch in feed]

    threads = [threading.Thread(target=take, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for feed, rows in zip(feeds, found, strict=True):
        assert len(rows) == 64
        for step, row in enumerate(rows):
            np.testing.assert_array_equal(row, feed.record_ids(step))


def test_which_devices_were_used(record_property: Callable[[str, object], None]) -> None:
    device = jax.devices()[0]
    record_property("device", device.device_kind)
    wanted = os.environ.get("MESHFEED_EXPECTED_PLATFORM")
    assert wanted is None or device.platform == wanted
