"""Files are fetched before the batches that need them, and the copy that is needed last makes room."""

from __future__ import annotations

import gzip
import io
import math
import os
import pathlib
import pickle
import shutil
import tarfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from http_store import Store

import meshfeed
from meshfeed import SettingsError, ShardCache
from meshfeed._src.reading.ahead import FetchAhead
from meshfeed._src.sources.files.shard_cache import RemoteFile

fsspec = pytest.importorskip("fsspec")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

SHARDS, ROWS = 8, 32


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Any:
    """A store that records what is fetched, and from which thread."""
    memory = fsspec.filesystem("memory")
    for shard in range(SHARDS):
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table({"x": np.arange(shard * ROWS, (shard + 1) * ROWS)}), path)
        memory.pipe(f"/ahead/{shard}.parquet", path.read_bytes())
    yield memory
    memory.rm("/ahead", recursive=True)


@pytest.fixture
def fetched(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The shards in the order of their fetches, and whether each was fetched ahead."""
    found: list[tuple[int, bool]] = []
    cat_file = type(store).cat_file

    def cat(self: Any, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        if end is None:  # otherwise the footer
            found.append((int(path.rsplit("/", 1)[1][0]), "ahead" in threading.current_thread().name))
        return cat_file(self, path, start, end, **kwargs)

    monkeypatch.setattr(type(store), "cat_file", cat)
    return found


def urls() -> list[str]:
    return [f"memory://ahead/{shard}.parquet" for shard in range(SHARDS)]


def token_urls() -> list[str]:
    return [f"memory://tokens/{shard}.bin" for shard in range(SHARDS)]


def make_feed(cache: ShardCache, **settings: Any) -> Any:
    import jax

    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    source = meshfeed.sources.Parquet(urls(), cache=cache)
    return meshfeed.Feed(source, mesh, **{"global_batch_size": 8, "prefetch": 0, **settings})


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_coming_shards_are_fetched_in_order_and_once(fetched: list[tuple[int, bool]], tmp_path: pathlib.Path) -> None:
    cache = ShardCache(tmp_path / "cache")
    with make_feed(cache) as feed:
        for _ in range(2):
            next(feed)
        until(lambda: len(list(cache.directory.glob("*.parquet"))) == SHARDS)
        values = np.concatenate([np.asarray(batch["x"]) for batch in feed])
    assert values.tolist() == list(range(16, SHARDS * ROWS))
    assert len(set(fetched)) == len(fetched)
    assert fetched[0] == (0, False), "the fingerprint reads ranges, so the first read fetches the first shard"
    assert all(ahead for _, ahead in fetched[1:])
    stats = cache.stats()
    assert stats.fetched == SHARDS == len(fetched)
    assert stats.fetched_ahead == SHARDS - 1
    assert stats.hits > 0
    assert stats.fetched_bytes == sum(path.stat().st_size for path in cache.directory.glob("*.parquet"))


def test_files_that_are_not_cached_need_no_thread(store: Any, tmp_path: pathlib.Path) -> None:
    import jax

    path = tmp_path / "local.parquet"
    pq.write_table(pa.table({"x": np.arange(ROWS)}), path)
    cache = ShardCache(tmp_path / "cache")
    local = [meshfeed.sources.Parquet(path), meshfeed.sources.Parquet(path, cache=cache)]
    mixture = meshfeed.sources.Mixture({"a": local[0], "b": local[1]}, weights={"a": 1, "b": 1})
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    for source in (*local, meshfeed.sources.Parquet(urls(), cache=ShardCache(tmp_path, ahead_bytes=0)), mixture):
        threads = set(threading.enumerate())
        with meshfeed.Feed(source, mesh, global_batch_size=8, prefetch=0, num_epochs=None) as feed:
            for _ in range(3):
                next(feed)
            assert not [thread for thread in set(threading.enumerate()) - threads if "ahead" in thread.name]


def test_each_source_reads_through_its_own_cache(store: Any, tmp_path: pathlib.Path) -> None:
    for name in ("one", "two"):
        cache = ShardCache(tmp_path / name)
        meshfeed.sources.Parquet(urls(), cache=cache).read_batch(np.arange(SHARDS * ROWS))
        assert len(list(cache.directory.glob("*.parquet"))) == SHARDS
        shutil.rmtree(tmp_path / name)
    assert not (tmp_path / "one").exists()


def test_after_a_resume_only_what_is_still_needed_is_fetched(store: Any, tmp_path: pathlib.Path) -> None:
    with make_feed(ShardCache(tmp_path / "one", ahead_bytes=0)) as feed:
        for _ in range(5 * ROWS // 8):
            next(feed)
        state = feed.get_state()
    cache = ShardCache(tmp_path / "two")
    with make_feed(cache) as feed:
        first = {path.name[-9:] for path in cache.directory.glob("*.parquet")}  # the fingerprint's
        feed.set_state(state)
        values = np.concatenate([np.asarray(batch["x"]) for batch in feed])
    assert values.tolist() == list(range(5 * ROWS, SHARDS * ROWS))
    here = {path.name[-9:] for path in cache.directory.glob("*.parquet")}
    assert here - first <= {f"{shard}.parquet" for shard in range(5, SHARDS)}


@pytest.mark.slow
def test_shards_of_a_mixture_are_fetched_ahead_too(fetched: list[tuple[int, bool]], tmp_path: pathlib.Path) -> None:
    import jax

    cache = ShardCache(tmp_path / "cache")
    parts = {name: meshfeed.sources.Parquet(urls()[name == "b" :: 2], cache=cache) for name in "ab"}
    mixture = meshfeed.sources.Mixture(parts, weights={"a": 1, "b": 1})
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with meshfeed.Feed(mixture, mesh, global_batch_size=8, prefetch=0) as feed:
        del fetched[:]
        for _ in range(2):
            next(feed)
        until(lambda: cache.stats().fetched == SHARDS)
    # The fingerprint reads ranges, so the first batch fetches the first shard of each component.
    assert {shard for shard, ahead in fetched if not ahead} == {0, 1}


@pytest.mark.slow
def test_nothing_is_fetched_ahead_if_ahead_bytes_is_0(fetched: list[tuple[int, bool]], tmp_path: pathlib.Path) -> None:
    with make_feed(ShardCache(tmp_path / "cache", ahead_bytes=0)) as feed:
        assert len(list(feed)) == SHARDS * ROWS // 8
    assert not any(ahead for _, ahead in fetched)


class Needed:
    """When each shard is needed next."""

    def __init__(self, uses: dict[str, float]) -> None:
        self.uses = uses

    def next_use(self, file: Any) -> float:
        return self.uses.get(file.url, math.inf)


def test_the_copy_that_is_needed_last_makes_room(store: Any, tmp_path: pathlib.Path) -> None:
    size = store.size("/ahead/0.parquet")
    cache = ShardCache(tmp_path / "cache", max_bytes=3 * size + size // 2)
    needed = Needed(dict(zip(urls(), [2.0, 12.0, 1.0, 5.0, 3.0], strict=False)))
    files = [RemoteFile(cache, url, None, size) for url in urls()]
    files[0].follow(needed.next_use)
    for file in files[:3]:
        assert file.fetch(needed.uses[file.url])
    assert files[3].fetch(5.0)  # drops 1, which is needed at 12, although 0 was opened before
    assert [file.is_here() for file in files[:4]] == [True, False, True, True]
    assert not files[1].fetch(12.0)  # nothing here is needed that much later
    assert [file.is_here() for file in files[:4]] == [True, False, True, True]
    with cache.open(urls()[5]):  # a read may evict anything: 3, needed at 5
        assert [file.is_here() for file in files[:4]] == [True, False, True, False]
    assert not files[1].fetch(12.0) or not files[5].is_here()  # 5 is not in the plan, so it goes first
    assert cache.stats().evicted == 3
    del needed


@pytest.mark.parametrize("worker", [False, True])
def test_copies_of_an_earlier_process_make_room_by_their_next_use(
    store: Any, tmp_path: pathlib.Path, worker: bool
) -> None:
    size = store.size("/ahead/0.parquet")
    earlier = ShardCache(tmp_path / "cache", max_bytes=3 * size + size // 2)
    for url in urls()[:4]:
        earlier.identify(url)
    for url in urls()[:3]:
        with earlier.open(url):
            pass
    cache = ShardCache(tmp_path / "cache", max_bytes=3 * size + size // 2)
    if worker:  # which gets the cache of the process that started it
        cache = pickle.loads(pickle.dumps(earlier))
    needed = Needed(dict(zip(urls(), [1.0, 9.0, 5.0, 2.0], strict=False)))
    files = [RemoteFile(cache, url, None, size) for url in urls()[:4]]
    for file in files:
        found = earlier.looked_up(file.url)
        assert found is not None
        cache.remember(file.url, found)
        file.follow(needed.next_use)
    assert files[3].fetch(2.0)  # drops 1, although 0 was opened before
    assert [cache.is_cached(file.url) for file in files] == [True, False, True, True]
    del needed


@pytest.mark.slow
def test_an_epoch_through_a_small_cache_evicts_nothing_early(
    fetched: list[tuple[int, bool]], store: Any, tmp_path: pathlib.Path
) -> None:
    size = store.size("/ahead/0.parquet")
    with make_feed(ShardCache(tmp_path / "cache", max_bytes=4 * size), num_epochs=2) as feed:
        del fetched[:]
        values = np.concatenate([np.asarray(batch["x"]) for batch in feed])
    assert values.tolist() == [*range(SHARDS * ROWS)] * 2
    assert len(fetched) <= 2 * SHARDS


def test_a_file_that_the_reads_have_passed_is_not_fetched_for_them(
    fetched: list[tuple[int, bool]], store: Any, tmp_path: pathlib.Path
) -> None:
    needed = Needed(dict.fromkeys(urls(), 20.0))
    source = meshfeed.sources.Parquet(urls(), cache=ShardCache(tmp_path / "cache"))
    (file,) = source.cached_files(np.arange(1))
    del fetched[:]
    file.follow(needed.next_use)
    for due in (-1, 0, 19):  # the batch that it was to be fetched for; the next one that needs it is 20 batches away
        assert not file.fetch(due)
    assert not fetched
    assert not file.is_here()
    assert file.fetch(20)
    assert len(fetched) == 1
    assert file.is_here()


def test_a_fetch_that_fails_is_left_to_the_read(store: Any, tmp_path: pathlib.Path) -> None:
    with make_feed(ShardCache(tmp_path / "cache", retry=meshfeed.Retry(attempts=1))) as feed:
        next(feed)
        store.rm("/ahead/6.parquet")
        with pytest.raises(meshfeed.SourceError, match=r"6\.parquet"):
            for _ in feed:
                pass
        assert feed.step == 6 * ROWS // 8


def test_threads_end_with_the_reader(store: Any, tmp_path: pathlib.Path) -> None:
    others = set(threading.enumerate())

    def running() -> bool:
        return any("meshfeed-ahead" in thread.name for thread in set(threading.enumerate()) - others)

    feed = make_feed(ShardCache(tmp_path / "cache"))
    for _ in range(3):
        next(feed)
    until(running)
    until(lambda: list((tmp_path / "cache").glob("*.plan")))
    feed.close()
    until(lambda: not running())
    until(lambda: not list((tmp_path / "cache").glob("*.plan")))  # nobody needs the copies any more


def test_the_nearest_files_come_first_and_within_the_limit() -> None:
    class File:
        cache, ahead_bytes, plan_bytes, num_bytes = None, 25, 100, 10

        def __init__(self, name: int) -> None:
            self.name = name

        def follow(self, next_use: Any) -> None:
            pass

        def unfollow(self, next_use: Any) -> None:
            pass

        def is_here(self) -> bool:
            return False

        def fetch(self, next_use: float) -> bool:
            order.append((self.name, next_use))
            return True

    order: list[tuple[int, float]] = []
    files = [File(name) for name in range(9)]
    ahead = FetchAhead(iter([[file] for file in files]))
    ahead.reached(1)
    until(lambda: len(order) == 2)
    assert sorted(order) == [(1, 0), (2, 1)]
    ahead.reached(2)
    until(lambda: len(order) == 3)
    assert order[-1] == (3, 1)
    ahead.close()


def test_settings_and_pickle(tmp_path: pathlib.Path) -> None:
    for value in (-1, 1.5, True):
        with pytest.raises(SettingsError, match="ahead_bytes="):
            ShardCache(tmp_path, ahead_bytes=value)  # type: ignore[arg-type]
    assert ShardCache(tmp_path, max_bytes=10).ahead_bytes == 5
    again = pickle.loads(pickle.dumps(ShardCache(tmp_path, ahead_bytes=7)))
    assert (again.ahead_bytes, again.stats().hits) == (7, 0)


@pytest.fixture
def tokens() -> Any:
    """Eight files of 400 tokens, in documents that end with 0; the tokens."""
    memory = fsspec.filesystem("memory")
    values = np.random.default_rng(0).integers(0, 20, 8 * 400).astype(np.uint16)
    for shard in range(SHARDS):
        memory.pipe(f"/tokens/{shard}.bin", values[400 * shard : 400 * shard + 400].tobytes())
    yield values
    memory.rm("/tokens", recursive=True)


def feed_of(source: Any, **settings: Any) -> Any:
    import jax

    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    return meshfeed.Feed(source, mesh, **{"global_batch_size": 4, "prefetch": 0, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
def test_token_files_are_fetched_ahead(
    tokens: Any, fetched: list[tuple[int, bool]], tmp_path: pathlib.Path, mapped: bool
) -> None:
    cache = ShardCache(tmp_path / "cache")
    source = meshfeed.sources.Tokens(token_urls(), 20, next_token=False, dtype=np.uint16, cache=cache)
    with feed_of(meshfeed.sources.Map(source, dict) if mapped else source) as feed:
        del fetched[:]  # the fingerprint of Map reads four windows
        found = [next(feed)["tokens"] for _ in range(2)]
        until(lambda: len(list(cache.directory.glob("*.bin"))) == SHARDS)
        found += [batch["tokens"] for batch in feed]
    np.testing.assert_array_equal(np.concatenate(found).reshape(-1), tokens)
    assert fetched
    # The fingerprint of Tokens reads ranges, so the first batch fetches the first file.
    assert {shard for shard, ahead in fetched if not ahead} == (set() if mapped else {0})


def test_packed_documents_plan_the_files_that_they_read(
    tokens: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    cache = ShardCache(tmp_path / "cache")
    documents = meshfeed.sources.Tokens.documents(token_urls(), dtype=np.uint16, eod=0, cache=cache)
    read: set[str] = set()
    read_slices = documents.read_slices

    def read_and_note(record_ids: Any, *args: Any) -> Any:
        read.update(documents.file_of(record_id) for record_id in record_ids.tolist())
        return read_slices(record_ids, *args)

    monkeypatch.setattr(documents, "read_slices", read_and_note)
    for method in ("split", "fit"):
        packed = meshfeed.sources.Packed(documents, 20, block=40, method=method).with_order(shuffle=True, seed=3)
        assert packed.cached_files(np.empty(0, np.int64)) == []
        for step in range(12):
            read.clear()
            ids = np.arange(4 * step, 4 * step + 4)
            packed.read_batch(ids)
            files = packed.cached_files(ids)
            assert files is not None
            assert {file.url for file in files} == read  # type: ignore[attr-defined]
    local = [str(tmp_path / f"{shard}.bin") for shard in range(SHARDS)]
    for shard, path in enumerate(local):
        pathlib.Path(path).write_bytes(tokens[400 * shard : 400 * shard + 400].tobytes())
    bare = meshfeed.sources.Tokens.documents(local, dtype=np.uint16, eod=0, cache=cache)
    assert meshfeed.sources.Packed(bare, 20).cached_files(np.empty(0, np.int64)) is None


def mixed_with_a_stream(files: list[str], cache: ShardCache) -> Any:
    def count(lane_index: int, num_lanes: int) -> Any:
        return ({"x": np.int64(-1 - number)} for number in range(lane_index, 10_000, num_lanes))

    components = {"files": meshfeed.sources.Parquet(files, cache=cache), "stream": meshfeed.sources.Stream(count)}
    return meshfeed.sources.Mixture(components, weights={"files": 1, "stream": 1}, block=8, on_end="stop")


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_lanes_of_a_mixture_fetch_ahead_and_only_what_is_needed_after_a_resume(
    store: Any, tmp_path: pathlib.Path, num_workers: int
) -> None:
    settings: dict[str, Any] = {"global_batch_size": 8, "num_lanes": 2, "num_workers": num_workers}
    with Store() as server:  # which worker processes reach too
        files = [server.put(f"{shard}.parquet", store.cat(f"/ahead/{shard}.parquet")) for shard in range(SHARDS)]
        cache = ShardCache(tmp_path / "one")
        with feed_of(mixed_with_a_stream(files, cache), **settings) as feed:
            assert len(list(cache.directory.glob("*.parquet"))) < SHARDS  # those of the fingerprint
            found = [next(feed)["x"] for _ in range(2)]
            until(lambda: len(list(cache.directory.glob("*.parquet"))) == SHARDS)
            while feed.step < 40:
                found.append(next(feed)["x"])
            state = feed.get_state()
            found += [batch["x"] for batch in feed]
        rows = np.concatenate(found)
        assert sorted(rows[rows >= 0].tolist()) == list(range(SHARDS * ROWS))

        cache = ShardCache(tmp_path / "two")
        with feed_of(mixed_with_a_stream(files, cache), **settings) as feed:
            first = {path.name[-9:] for path in cache.directory.glob("*.parquet")}
            feed.set_state(state)
            tail = np.concatenate([batch["x"] for batch in feed])
        server.shutdown()
    np.testing.assert_array_equal(tail, rows[40 * 8 :])
    dropped = sum(lane["skip"] for lane in state["lanes"].values())  # read again, from the last snapshot on
    needed = {f"{row // ROWS}.parquet" for row in rows[max(0, 40 * 8 - 2 * dropped) :].tolist() if row >= 0}
    assert dropped > 8 or len(needed) < SHARDS - 3
    assert {path.name[-9:] for path in cache.directory.glob("*.parquet")} <= first | needed


def test_compressed_files_count_toward_the_bytes_to_fetch_ahead(tmp_path: pathlib.Path) -> None:
    import jax

    memory = fsspec.filesystem("memory")
    for shard in range(SHARDS):
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            for row in range(4):
                member = tarfile.TarInfo(f"{row}.bin")
                member.size = 20_000
                tar.addfile(member, io.BytesIO(os.urandom(20_000)))
        memory.pipe(f"/packed/{shard}.tar.gz", gzip.compress(content.getvalue()))
    packed = [f"memory://packed/{shard}.tar.gz" for shard in range(SHARDS)]
    earlier = ShardCache(tmp_path)
    meshfeed.sources.WebDataset(packed, cache=earlier)  # writes the indexes
    for url in packed:
        earlier.discard(url, compression="gz")
    cache = ShardCache(tmp_path, ahead_bytes=200_000)
    source = meshfeed.sources.WebDataset(packed, lambda record: np.frombuffer(record["bin"], np.uint8), cache=cache)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with meshfeed.Feed(source, mesh, global_batch_size=1, prefetch=0) as feed:
        for _ in range(2):
            next(feed)
        until(lambda: cache.stats().fetched_ahead)
        time.sleep(0.5)
        assert cache.stats().fetched_ahead == 1  # shard 1; the fingerprint has fetched 0, 2, 5 and 7
    memory.rm("/packed", recursive=True)
