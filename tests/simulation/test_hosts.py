"""What simulated hosts download and wait for, against plain policies and a real cache."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import meshfeed
from meshfeed import ShardShuffle
from meshfeed._src.simulation.hosts import Cache, Run, SimulatedFile, SimulatedHost, Store, run_hosts_together
from meshfeed.testing import simulate

fsspec = pytest.importorskip("fsspec")


def play(
    batches: Sequence[Sequence[int]],
    cache: Cache,
    store: Store,
    sizes: Sequence[int],
    step_seconds: float = 1.0,
    **more: Any,
) -> Run:
    files = [SimulatedFile(number, size, cache) for number, size in enumerate(sizes)]
    uses = [[files[number] for number in batch] for batch in batches]
    return run_hosts_together([uses], cache, store, seconds=[step_seconds] * len(batches), **more)


def lru(uses: list[int], size: int) -> int:
    held: list[int] = []
    missed = 0
    for file in uses:
        missed += file not in held
        held = [*(other for other in held if other != file), file][-size:]
    return missed


def fewest(uses: tuple[int, ...], size: int) -> int:
    """The fewest downloads of any policy, by trying all."""

    @functools.cache
    def after(at: int, held: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        file = uses[at]
        if file in held:
            return after(at + 1, held)
        options = [held] if len(held) < size else [held - {other} for other in held]
        return 1 + min(after(at + 1, kept | {file}) for kept in options)

    return after(0, frozenset())


def test_months_of_steps_end() -> None:
    """A time shorter than the resolution of "now" would never pass."""
    sizes = [10**6 + 1237 * number for number in range(200)]
    run = play(
        [[number] for number in range(200)], Cache(10**7, 0), Store(3.1e9), sizes, step_seconds=1.1e6, prefetch=0
    )
    assert run.hosts[0].downloads_of_batch.sum() == 200


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24), st.integers(2, 3))
def test_on_demand_the_least_recently_opened_makes_room(uses: list[int], size: int) -> None:
    run = play([[file] for file in uses], Cache(size, 0), Store(1e9), [1] * 6, prefetch=0)
    assert run.hosts[0].downloads_of_batch.sum() == lru(uses, size)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(2, 4))
@example([0, 2, 3, 1, 0, 2, 3, 0, 1], 2)  # a copy that only the batch before needed was kept, and 1 fetched twice
def test_ahead_no_fewer_than_possible_and_no_waits_for_what_is_fetched_ahead(uses: list[int], size: int) -> None:
    run = play([[file] for file in uses], Cache(size, 1), Store(1e9), [1] * 6)
    assert fewest(tuple(uses), size) <= run.hosts[0].downloads_of_batch.sum() <= len(uses)
    assert run.hosts[0].disk_bytes <= size + size // 4 + 1
    assert all(host.num_read == len(uses) for host in run.hosts)


def test_a_batch_of_more_files_than_the_cache_holds_takes_few_looks_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    reserve = SimulatedHost._reserve

    def counted(host: SimulatedHost, file: SimulatedFile, next_use: float | None) -> bool:
        looks.append(file)
        return reserve(host, file, next_use)

    monkeypatch.setattr(SimulatedHost, "_reserve", counted)
    run = play([range(300)] * 2, Cache(1000, 0), Store(1e6), [1000] * 300)
    assert run.hosts[0].downloads_of_batch.sum() >= 599
    assert len(looks) < 5 * 600


def test_seconds_follow_from_bandwidth_latency_and_the_step() -> None:
    # Four files of 1 s each, of which the cache holds all: the loop waits for the first, and for the rest of each later one.
    store = Store(bandwidth=100.0, latency_seconds=0.25)
    run = play([[0], [1], [2], [3]], Cache(1000, 0), store, [100] * 4, step_seconds=1.0, prefetch=0)
    each = 0.25 + 1.0 + 0.25  # the answer, the bytes, and the comparison of the version
    np.testing.assert_allclose(run.waits, [each] * 4)
    ahead = play([[0], [1], [2], [3]], Cache(1000, 500), store, [100] * 4, step_seconds=10.0)
    np.testing.assert_allclose(ahead.waits, [each, 0, 0, 0])
    assert ahead.hosts[0].requests_of_batch.tolist() == [2, 2, 2, 2]
    limited = play(
        [[0], [1]], Cache(1000, 0), Store(100.0, requests_per_second=0.5), [100] * 2, step_seconds=0.5, prefetch=0
    )
    np.testing.assert_allclose(limited.waits, [2.0, 3.5])  # one request every 2 s: at 0, 2, 4 and 6


@pytest.mark.parametrize("ahead", [0, 500])
def test_files_that_come_at_the_same_time_share_the_bandwidth(ahead: int) -> None:
    files, sizes, cache = range(6), [50, 300, 20, 100, 30, 100], Cache(2000, ahead)
    for batches in ([files], [[0, 1, 2], [3, 4, 5]]):
        run = play(batches, cache, Store(100.0), sizes, step_seconds=0.0)
        assert run.waits.sum() == pytest.approx(6.0)  # as long as all of their bytes
        several = run_hosts_together(
            [[[SimulatedFile(number, sizes[number], cache) for number in batch] for batch in batches]] * 2,
            cache, Store(100.0, shared_bandwidth=100.0), seconds=[0.0] * len(batches),
        )  # fmt: skip
        assert several.waits.sum() == pytest.approx(12.0)


def test_hosts_share_a_link_and_wait_for_the_slowest() -> None:
    cache = Cache(1000, 0)
    files = [SimulatedFile(number, 100, cache) for number in range(2)]
    uses = [[[files[0]]], [[files[1]]]]
    alone = run_hosts_together(uses, cache, Store(100.0), seconds=[1.0])
    shared = run_hosts_together(uses, cache, Store(100.0, shared_bandwidth=100.0), seconds=[1.0])
    half = run_hosts_together([uses[0], [[]]], cache, Store(100.0, shared_bandwidth=100.0), seconds=[1.0])
    assert [float(run.waits[0]) for run in (alone, shared, half)] == pytest.approx([1.0, 2.0, 1.0])
    many = run_hosts_together(uses, cache, Store(100.0, shared_bandwidth=100.0), seconds=[1.0], num_hosts=8)
    assert many.waits[0] == pytest.approx(8.0)  # the two stand for eight


def test_the_nearest_file_gets_the_bandwidth() -> None:
    sizes = [32 << 20] * 3
    store = Store(bandwidth=8 << 20)
    run = play([[0], [1], [2]], Cache(1 << 30, 1 << 29), store, sizes, step_seconds=4.0)
    np.testing.assert_allclose(run.waits, [4.0, 0.0, 0.0], atol=0.2)  # sharing equally, file 1 would take twice as long


FILES, RECORDS = 8, 4


def write_array_records(folder: pathlib.Path, name: str) -> int:
    """Writes files of equal size to memory://<name>; returns the bytes of each."""
    writers = pytest.importorskip("array_record.python.array_record_module")
    for number in range(FILES):
        writer = writers.ArrayRecordWriter(f"{folder}/file", "group_size:1,uncompressed")
        for record in range(RECORDS):
            writer.write(np.full(16, number * RECORDS + record, np.int32).tobytes())
        writer.close()
        content = (folder / "file").read_bytes()
        fsspec.filesystem("memory").pipe(f"/{name}/{number}.array_record", content)
    return len(content)


@pytest.fixture
def num_bytes(tmp_path: pathlib.Path) -> Any:
    yield write_array_records(tmp_path, "simulated")
    fsspec.filesystem("memory").rm("/simulated", recursive=True)


def array_record(cache: meshfeed.ShardCache) -> Any:
    urls = [f"memory://simulated/{number}.array_record" for number in range(FILES)]
    return meshfeed.sources.ArrayRecord(urls, decode_batch=meshfeed.sources.DecodeRaw(np.int32, 16), cache=cache)


@pytest.mark.parametrize("held", [2, 3, 6])
@pytest.mark.parametrize("shuffle", [True, "shards", ShardShuffle(affinity=True)], ids=repr)
def test_downloads_are_those_of_a_real_cache(num_bytes: int, tmp_path: pathlib.Path, shuffle: Any, held: int) -> None:
    settings = {"shuffle": shuffle, "global_batch_size": 1, "num_epochs": 2, "prefetch": 0}
    cache = meshfeed.ShardCache(tmp_path / "real", max_bytes=held * num_bytes, ahead_bytes=0)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    counts = []
    with meshfeed.Feed(array_record(cache), mesh, **settings) as feed:
        for _ in feed:
            counts.append(cache.stats().fetched)
            time.sleep(0.01)  # file systems keep the time of the last use in steps of some milliseconds
    found = simulate(
        array_record(meshfeed.ShardCache(tmp_path / "simulated", max_bytes=held * num_bytes)),
        hosts=1, bandwidth=1e9, step_seconds=1, cache=held * num_bytes, ahead_bytes=0, latency_seconds=0, **settings,
    ).orders[0]  # fmt: skip
    per_epoch = len(counts) // 2
    assert found.hosts[0].downloads == [counts[per_epoch - 1], counts[-1] - counts[per_epoch - 1]]
    assert sum(found.bytes_per_epoch) == counts[-1] * num_bytes


@pytest.mark.parametrize("shuffle", [True, "shards"])
def test_ahead_a_cache_of_all_files_downloads_each_once(num_bytes: int, tmp_path: pathlib.Path, shuffle: Any) -> None:
    settings = {"shuffle": shuffle, "global_batch_size": 2, "num_epochs": 2}
    cache = meshfeed.ShardCache(tmp_path / "real", max_bytes=9 * num_bytes)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    with meshfeed.Feed(array_record(cache), mesh, **settings) as feed:
        for _ in feed:
            pass
    source = array_record(meshfeed.ShardCache(tmp_path / "simulated", max_bytes=9 * num_bytes))
    found = simulate(source, hosts=1, bandwidth="1GB/s", step_seconds=1, cache=9 * num_bytes, **settings).orders[0]
    assert cache.stats().fetched == sum(found.hosts[0].downloads) == FILES
