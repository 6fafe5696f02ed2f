"""``meshfeed.testing.simulate``: figures, recommendations, mixtures, errors, and the page."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import time
from typing import Any

import numpy as np
import pytest

import meshfeed
from meshfeed import CorruptDataError, SettingsError, ShardShuffle, SourceError
from meshfeed._src.simulation.dataset import FileRecords, SimulatedData
from meshfeed._src.simulation.hosts import Cache, Store
from meshfeed._src.simulation.page import simulation_lines, simulation_page
from meshfeed._src.simulation.simulate import Setup, simulate_order
from meshfeed._src.sources.files.manifest import FileEntry, write_manifest
from meshfeed.testing import simulate

SETTINGS: dict[str, Any] = {"hosts": 4, "bandwidth": "1MB/s", "step_seconds": 0.1, "cache": "10MB"}


def manifest(
    path: pathlib.Path, files: int = 32, num_bytes: int = 1_000_000, records: int = 64, name: str = "f"
) -> str:
    path.mkdir(exist_ok=True)
    entries = [
        FileEntry(f"{path}/{name}{number}.array_record", num_bytes, records, None, {"group_size": 1})
        for number in range(files)
    ]
    write_manifest(f"{path}/manifest.json", "ArrayRecord", entries)
    return f"{path}/manifest.json"


def test_with_affinity_a_cache_of_a_share_downloads_nothing_again(tmp_path: pathlib.Path) -> None:
    found = simulate([manifest(tmp_path)], global_batch_size=16, num_lanes=4, **SETTINGS)
    uniform, blocks, shards, affinity = found.orders
    assert [order.name for order in found.orders] == [
        "shuffle=True", "shuffle=256", 'shuffle="shards"', "shuffle=ShardShuffle(affinity=True)",
    ]  # fmt: skip
    assert affinity.bytes_per_epoch == [32_000_000, 0]
    assert affinity.share_bytes == 8_000_000 == affinity.max_host_bytes[0]
    assert shards.bytes_per_epoch[0] == 32_000_000 > shards.bytes_per_epoch[1] > 0
    assert blocks.bytes_per_epoch[0] > 2 * 32_000_000
    assert uniform.bytes_per_epoch[0] > 3 * 32_000_000
    assert uniform.total_stall_fraction > affinity.total_stall_fraction
    assert uniform.quality.mean_distance == pytest.approx(1, abs=0.05)
    assert affinity.quality.mean_distance < 0.5
    assert 4 < affinity.quality.shards_per_batch <= 8
    assert found.recommended is affinity
    assert "shuffle=True shuffles better, but waits" in found.reason
    assert [order.num_lanes for order in found.orders] == [None, None, 4, 4]
    assert all(order.disk_bytes <= 12_500_000 for order in found.orders)
    json.dumps(found.to_json(), allow_nan=False)


def test_a_fast_link_and_a_cache_of_all_files_leave_uniform_order(tmp_path: pathlib.Path) -> None:
    settings = {**SETTINGS, "bandwidth": "10GB/s", "cache": "40MB", "latency_seconds": 0.001}
    found = simulate(manifest(tmp_path), global_batch_size=16, **settings)
    assert found.recommended.shuffle is True
    assert found.recommended.bytes_per_epoch == [4 * 32_000_000, 0]
    assert found.reason.endswith("and no order shuffles better.")


def test_requests_cost_and_bytes_follow_from_the_prices(tmp_path: pathlib.Path) -> None:
    order = simulate(
        manifest(tmp_path), shuffle="shards", price_per_1000_requests=2.0, price_per_gb=10.0, global_batch_size=16,
        num_lanes=4, **{**SETTINGS, "bandwidth": "1GB/s"},
    ).orders[0]  # fmt: skip
    assert order.requests[0] == 2 * 32  # one for the bytes, and one to compare the version
    assert order.cost[0] == pytest.approx(0.064 * 2 + 0.032 * 10)


def test_the_figures_are_those_of_the_same_source(tmp_path: pathlib.Path) -> None:
    """Manifests and a source with a cache describe the same data set."""
    fsspec = pytest.importorskip("fsspec")
    writers = pytest.importorskip("array_record.python.array_record_module")
    for number in range(16):
        writer = writers.ArrayRecordWriter(f"{tmp_path}/{number}.array_record", "group_size:1,uncompressed")
        for record in range(8):
            writer.write(np.full(16, record, np.int32).tobytes())
        writer.close()
        fsspec.filesystem("memory").put(f"{tmp_path}/{number}.array_record", f"/same/{number}.array_record")
    from meshfeed._src.sources.manifest import make_manifest

    listed = make_manifest([f"{tmp_path}/{number}.array_record" for number in range(16)])
    urls = [f"memory://same/{number}.array_record" for number in range(16)]
    cache = meshfeed.ShardCache(tmp_path / "cache")
    decode = meshfeed.sources.DecodeRaw(np.int32, 16)
    source = meshfeed.sources.ArrayRecord(urls, decode_batch=decode, cache=cache)
    size = listed.files[0].num_bytes
    settings = {**SETTINGS, "cache": 4 * size, "bandwidth": 10 * size, "hosts": 2, "global_batch_size": 8}
    pairs = zip(simulate(listed.path, **settings).orders, simulate(source, **settings).orders, strict=True)
    for one, other in pairs:
        assert dataclasses.replace(one, over_time={}) == dataclasses.replace(other, over_time={})
    half = meshfeed.sources.Subset(source, slice(64))
    assert sum(simulate(half, **settings, shuffle="shards", num_lanes=2).orders[0].bytes_per_epoch) <= 2 * 9 * size
    fsspec.filesystem("memory").rm("/same", recursive=True)


def test_mixtures_draw_by_weight(tmp_path: pathlib.Path) -> None:
    paths = [manifest(tmp_path / name, name=name) for name in ("a", "b")]
    settings = {**SETTINGS, "cache": "30MB", "num_epochs": 1, "global_batch_size": 16, "num_lanes": 4}
    together = simulate(paths, shuffle="shards", **settings).orders[0]
    assert together.bytes_per_epoch == [64_000_000]
    mixed = simulate(paths, weights=[3, 1], shuffle="shards", **settings)
    # An epoch ends when the second has been read once: the first is read three times, by a different host each time.
    assert mixed.orders[0].bytes_per_epoch[0] > 1.5 * 64_000_000
    assert mixed.settings["files"] == 64
    with pytest.raises(SettingsError, match=r"weights=\[1\] has 1 entries for 2 manifests") as raised:
        simulate(paths, weights=[1], **SETTINGS)
    assert raised.value.setting == "weights"


@pytest.mark.slow
def test_of_many_batches_a_part_is_extrapolated_and_of_similar_ones_groups_are_simulated() -> None:
    number, records = 400, 500
    files = FileRecords([f"{n}" for n in range(number)], np.full(number, 10**6), np.full(number, records))
    dataset = SimulatedData.of_files([files], None, "files")
    setup = Setup(
        rows=[[(8 * host, 8 * host + 8)] for host in range(4)],
        batch_size=32,
        cache=Cache(20 * 10**6, 10 * 10**6),
        store=Store(5e6, latency_seconds=0.02),
        step_seconds=0.1,
        num_lanes=4,
    )
    uniform = simulate_order(dataset, True, setup)
    assert uniform.extrapolated
    steps = number * records // 32
    assert 0.8 * 8 * steps < uniform.hosts[0].uses[1] < 8 * steps
    assert 0.7 < uniform.hosts[0].downloads[1] / uniform.hosts[0].uses[1] <= 1  # a cache of 5 %
    along = simulate_order(dataset, "shards", setup)
    assert not along.extrapolated
    assert number <= along.bytes_per_epoch[0] / 10**6 <= number + 4
    for order in (uniform, along):  # the chart of the page ends where the table says, also for the part of an order
        bytes_of_hosts = 4 * order.over_time["host_bytes"][-1]
        assert bytes_of_hosts == pytest.approx(sum(order.bytes_per_epoch), rel=0.01)
    assert along.hosts[0].uses[0] > steps
    assert along.total_stall_fraction < 0.01
    assert all(math.isfinite(value) for line in along.over_time.values() for value in line)


def test_rows_that_hosts_share_and_hosts_without_rows() -> None:
    files = FileRecords([f"{n}" for n in range(16)], np.full(16, 10), np.full(16, 16))
    setup = Setup(
        rows=[[(0, 4)], [(0, 4)], [(4, 6), (6, 8)], []],
        batch_size=8,
        cache=Cache(100, 50),
        store=Store(1e9),
        step_seconds=0.1,
        num_lanes=2,
    )
    found = simulate_order(SimulatedData.of_files([files], None, "files"), "shards", setup)
    assert list(found.hosts) == [0, 1, 2]
    assert found.hosts[0] == found.hosts[1]
    assert found.bytes_per_epoch[0] == 10 * (8 + 8 + 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bandwidth": 0}, r"^bandwidth=0\. Expected bytes per second above 0"),
        ({"bandwidth": "10Gb/s"}, "is in bits"),
        ({"cache": "1kB"}, r"^cache=1,000 bytes is smaller than a file, the largest of which has 1,000,000\. Pass"),
        ({"cache": None}, "^cache=None"),
        ({"step_seconds": 0}, r"^step_seconds=0\. Expected a number above 0"),
        ({"latency_seconds": -1}, r"^latency_seconds=-1\. Expected a number of at least 0"),
        ({"hosts": 0}, r"^hosts=0\. Expected an int of at least 1"),
        ({"hosts": 3, "global_batch_size": 16}, "not divisible by hosts=3"),
        ({"global_batch_size": 4096}, "an epoch of 2,048 records has no batch of 4096"),
        ({"shuffle": "files"}, "shuffle='files'"),
        ({"num_lanes": 5, "shuffle": "shards", "global_batch_size": 16}, "num_lanes=5"),
        ({"ahead_bytes": "half"}, "^ahead_bytes='half'"),
        ({"weights": [1, 2]}, "has 2 entries for 1 manifests"),
    ],
)
def test_settings_are_refused(tmp_path: pathlib.Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        simulate(manifest(tmp_path), **{**SETTINGS, **settings})


def test_manifests_that_cannot_be_read_and_sources_without_a_cache(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SourceError, match=r"there is no manifest .*nowhere\.json"):
        simulate(f"{tmp_path}/nowhere.json", **SETTINGS)
    with pytest.raises(SourceError, match=f"there is no manifest {tmp_path}. Check the path"):
        simulate(str(tmp_path), **SETTINGS)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CorruptDataError, match="it is no manifest of meshfeed"):
        simulate(f"{tmp_path}/manifest.json", **SETTINGS)
    with pytest.raises(SourceError, match="lists 2 files with 0 records"):
        simulate(manifest(tmp_path / "empty", files=2, records=0), **SETTINGS)
    with pytest.raises(SettingsError, match="Memory reads no file through a ShardCache"):
        simulate(meshfeed.sources.Memory(np.zeros((8, 2))), **SETTINGS)
    with pytest.raises(SettingsError, match="weights= is for several manifests"):
        simulate(meshfeed.sources.Memory(np.zeros((8, 2))), weights=[1], **SETTINGS)


def test_the_page_shows_all_orders_and_escapes_names(tmp_path: pathlib.Path) -> None:
    found = simulate(manifest(tmp_path / "<script>alert(1)"), global_batch_size=16, price_per_gb=1.0, **SETTINGS)
    text = simulation_page(found)
    assert text.count("<svg") == 2
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    for order in found.orders:
        assert order.name.replace('"', "&quot;") in text
    lines = list(simulation_lines(found))
    assert any(line.startswith("order") and line.endswith("files per batch") for line in lines)
    assert sum("(recommended)" in line for line in lines) == 1
    assert lines[-1] == f"Recommended: {found.reason}"
    alone = simulate(manifest(tmp_path / "b"), shuffle=ShardShuffle(3), global_batch_size=16, **SETTINGS)
    assert list(simulation_lines(alone))[-1].startswith("Result: shuffle=ShardShuffle(window_shards=3) waits")


def test_the_default_batch_leaves_batches_in_an_epoch(tmp_path: pathlib.Path) -> None:
    alike = [
        simulate(manifest(tmp_path), shuffle=True, prefetch=prefetch, **SETTINGS).orders for prefetch in (2, "auto")
    ]
    assert alike[0] == alike[1]
    never = [simulate(manifest(tmp_path), shuffle=True, ahead_bytes=ahead, **SETTINGS).orders for ahead in (0, "0")]
    assert never[0] == never[1]
    small = simulate(manifest(tmp_path, records=4), shuffle=True, **SETTINGS)
    large = simulate(manifest(tmp_path, records=1024), shuffle="shards", **SETTINGS)
    assert (small.settings["global_batch_size"], large.settings["global_batch_size"]) == (4, 256)


@dataclasses.dataclass(frozen=True)
class CachedFile:
    number: int
    num_bytes: int = 1000


class CachedRecords(FileRecords):
    def cached_files(self, record_ids: np.ndarray) -> list[CachedFile]:
        return [CachedFile(int(number)) for number in np.unique(np.searchsorted(self.ends, record_ids, side="right"))]


def test_the_data_set_of_a_source_has_the_files_that_only_hosts_read_which_are_not_simulated() -> None:
    source = CachedRecords([f"{n}" for n in range(1024)], np.full(1024, 1000), np.full(1024, 4))
    settings = {**SETTINGS, "hosts": 32, "global_batch_size": 32, "num_lanes": 32, "shuffle": "shards", "num_epochs": 1}
    for whole in (source, meshfeed.sources.Subset(source, slice(None))):
        found = simulate(whole, **settings)
        assert (found.settings["files"], found.total_bytes) == (1024, 1024 * 1000)
        assert found.orders[0].bytes_per_epoch == [pytest.approx(1024 * 1000, rel=0.2)]


def test_a_link_that_is_far_too_slow_takes_no_longer_to_simulate(tmp_path: pathlib.Path) -> None:
    """As if the unit was forgotten: --bandwidth 1."""
    began = time.monotonic()
    found = simulate(manifest(tmp_path), global_batch_size=16, shuffle="shards", **{**SETTINGS, "bandwidth": 1})
    assert found.orders[0].stall_seconds[0] > 1e6
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("shuffle", [False, "shards"])
def test_an_epoch_of_one_batch_more_than_the_first_is_simulated_whole(shuffle):
    bytes_of = {}
    for records in (10_000, 10_008):  # of 100 files: 15,625 batches in each epoch, and 15,637 or 15,638
        sizes = np.full(100, 10**8, np.int64)
        files = FileRecords([str(n) for n in range(100)], sizes, np.full(100, records, np.int64))
        setup = Setup(
            rows=[[(0, 64)]], batch_size=64, cache=Cache(2 * 10**9, 10**9), store=Store(1e9), step_seconds=0.1
        )
        bytes_of[records] = simulate_order(
            SimulatedData.of_files([files], None, "files"), shuffle, setup
        ).bytes_per_epoch
    assert bytes_of[10_008] == pytest.approx(bytes_of[10_000], rel=0.1)


@pytest.mark.parametrize("store", [Store(1e9, shared_bandwidth=1e9), Store(1e9, 1e12, 0.05, 20)])
def test_hosts_without_rows_take_no_share_of_the_link_nor_of_the_requests(store: Store) -> None:
    files = FileRecords([str(n) for n in range(64)], np.full(64, 10**8), np.full(64, 1000))
    rows = [[(host * 16, host * 16 + 16)] for host in range(4)]
    setup = Setup(rows=rows, batch_size=64, cache=Cache(3 * 10**9, 10**9), store=store, step_seconds=0.05)
    alone, beside = (
        simulate_order(SimulatedData.of_files([files], None, "files"), "shards", dataclasses.replace(setup, rows=each))
        for each in (rows, [*rows, *[[]] * 60])
    )
    assert alone == beside
