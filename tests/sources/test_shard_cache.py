from __future__ import annotations

import errno
import fcntl
import gc
import gzip
import hashlib
import itertools
import math
import os
import pathlib
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest
import xxhash
from http_store import BLOCK, Store
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError, StalledError
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry
from meshfeed._src.sources.files import download, locks, shard_cache
from meshfeed._src.sources.files.download import Download
from meshfeed._src.sources.files.paths import StoredFile
from meshfeed._src.sources.files.shard_cache import RemoteFile, ShardCache
from meshfeed._src.sources.manifest import make_manifest

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

QUICK = Retry(attempts=3, initial_seconds=0.01, max_seconds=0.02)


@pytest.fixture
def store():
    with Store() as server:
        yield server
        server.hold.set()
        server.shutdown()


def read(cache: ShardCache, url: str) -> bytes:
    with cache.open(url) as path:
        return path.read_bytes()


def size_or_zero(path: pathlib.Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def files_in(cache: ShardCache) -> list[str]:
    return sorted(
        path.name.partition("-")[2] for path in cache.directory.iterdir() if path.suffix not in (".lock", ".plan")
    )


class NamedCache(ShardCache):
    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__(directory)
        self.name = "of a user"


def test_a_file_is_fetched_once_for_all_who_share_the_folder(store: Store, tmp_path) -> None:
    content = os.urandom(100_000)
    url = store.put("a/shard-0", content)
    first, second = ShardCache(tmp_path / "cache"), ShardCache(str(tmp_path / "cache"))
    third = pickle.loads(pickle.dumps(NamedCache(tmp_path / "cache")))
    assert third.name == "of a user"
    for cache in (first, second, third, first):
        assert read(cache, url) == content
    assert store.fetches == ["a/shard-0"]
    assert files_in(first) == ["shard-0"]
    assert first.num_bytes() == 100_000


def test_another_version_under_the_same_name_is_another_file(store: Store, tmp_path) -> None:
    url = store.put("x", b"one")
    assert read(ShardCache(tmp_path), url) == b"one"
    store.put("x", b"two")
    assert read(ShardCache(tmp_path), url) == b"two"
    assert read(ShardCache(tmp_path), store.put("other/x", b"two")) == b"two"
    assert store.fetches == ["x", "x", "other/x"]


def test_a_source_that_is_created_again_has_the_files_as_they_are_then(store: Store, tmp_path) -> None:
    """The cache has looked them up before, and has the checksums of an earlier manifest."""

    def put(first: int) -> str:
        np.save(tmp_path / "tokens.npy", np.arange(first, first + 64, dtype=np.int32))
        return store.put("tokens.npy", (tmp_path / "tokens.npy").read_bytes())

    def manifest(first: int) -> str:
        make_manifest([put(first)], str(tmp_path / "listed.json"))
        return str(tmp_path / "listed.json")

    for name, make in (("files", put), ("manifest", manifest)):
        cache = ShardCache(tmp_path / name, retry=QUICK)
        sources = []
        for first in (0, 1000, 2000):
            sources.append(meshfeed.sources.Tokens(make(first), 8, next_token=False, cache=cache))
            if first:  # the first is not read yet
                assert sources[-1][0]["tokens"][0] == first
        sources[1].close()
        for source in sources[:2]:
            with pytest.raises(SourceError, match=r"tokens\.npy has changed since"):
                source[0]


@pytest.mark.parametrize("cached", [True, False])
def test_files_that_nothing_identifies_are_not_those_of_an_earlier_source(store: Store, tmp_path, cached: bool) -> None:
    """A manifest without digests lists them; the earlier source still has them open."""
    cache = ShardCache(tmp_path / "cache", retry=QUICK) if cached else None
    sources = []
    for first in (0, 1000, 2000):
        np.save(tmp_path / "tokens.npy", np.arange(first, first + 64, dtype=np.int32))
        url = store.put("tokens.npy", (tmp_path / "tokens.npy").read_bytes())
        make_manifest([url], str(tmp_path / "listed.json"), digests=False)
        sources.append(meshfeed.sources.Tokens(tmp_path / "listed.json", 8, next_token=False, cache=cache))
        assert sources[-1][0]["tokens"][0] == first


def test_fetches_are_tried_again(store: Store, tmp_path) -> None:
    cache = ShardCache(tmp_path, retry=QUICK)
    store.fail, store.cut = 1, 1
    assert read(cache, store.put("x", b"0123456789")) == b"0123456789"
    assert len(store.fetches) == 3
    store.fail = 3
    with pytest.raises(OSError, match="503"):
        read(cache, store.put("y", b"0123456789"))
    assert files_in(cache) == ["x"]  # nothing half-done stays


def test_files_that_are_not_there_are_named_at_once(store: Store, tmp_path) -> None:
    cache = ShardCache(tmp_path)
    with pytest.raises(SourceError, match=r"there is no file 'http://.*/gone'"), cache.open(store.url("gone")):
        pass
    url = store.put("x", b"12345")
    cache._entry(url)
    del store.files["x"]
    with pytest.raises(SourceError, match=r"there is no file 'http://.*/x'"), cache.open(url):
        pass


def test_an_unreachable_server_is_an_os_error(tmp_path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/x"
        with pytest.raises(OSError, match=r"127\.0\.0\.1"), ShardCache(tmp_path, retry=QUICK).open(url):
            pass


def test_checksums(store: Store, tmp_path) -> None:
    content = b"0123456789"
    url = store.put("x", content)
    good = {"x": "sha256:" + hashlib.sha256(content).hexdigest()}
    assert read(ShardCache(tmp_path / "1", checksums=good), url) == content
    assert (
        read(ShardCache(tmp_path / "2", checksums={url: "xxh3_64:" + xxhash.xxh3_64(content).hexdigest()}), url)
        == content
    )
    with pytest.raises(CorruptDataError, match=r"/x: fetched 10 bytes with md5 781e.*, expected 00") as caught:
        read(ShardCache(tmp_path / "3", checksums={"x": "md5:00"}), url)
    assert caught.value.path == url
    assert store.fetches == ["x", "x", "x", "x"]  # damaged on the way would look the same: so twice
    assert files_in(ShardCache(tmp_path / "3")) == []


def test_the_longest_unopened_go_first(store: Store, tmp_path) -> None:
    cache = ShardCache(tmp_path, max_bytes=250)
    urls = [store.put(f"f{i}", bytes([i]) * 100) for i in range(4)]
    for at, url in enumerate(urls[:2]):
        read(cache, url)
        copy = cache._entry(url).path
        os.utime(copy, (at, at))
    read(cache, urls[0])  # opened last
    with cache.open(urls[2]) as path:
        assert files_in(cache) == ["f0", "f2"]
        opened = path.open("rb")
    read(cache, urls[3])
    assert cache.num_bytes() <= 250
    read(cache, urls[1])
    read(cache, urls[0])
    with opened:  # evicted long ago
        assert opened.read() == bytes([2]) * 100
    for at, name in enumerate(store.fetches):
        assert name == ["f0", "f1", "f2", "f3", "f1", "f0"][at]


def test_what_is_being_opened_is_not_evicted(store: Store, tmp_path) -> None:
    cache = ShardCache(tmp_path, max_bytes=250, stall_seconds=0.2, retry=QUICK)
    a, b, c = (store.put(name, bytes(100)) for name in "abc")
    with cache.open(a) as first, cache.open(b) as second:
        with pytest.raises(SourceError, match=r"no room for .*/c \(100 bytes\).* 50 bytes too few of max_bytes=250"):
            read(cache, c)
        assert first.exists()
        assert second.exists()
    assert read(cache, c) == bytes(100)


def test_a_manifest_says_nothing_of_a_source_that_was_made_without_it(store: Store, tmp_path) -> None:
    """Its file is still the one that was looked up, which the version says, if the store reports any."""
    tokens = tmp_path / "tokens.npy"

    def put(first: int) -> str:
        np.save(tokens, np.arange(first, first + 64, dtype=np.int32))
        return store.put("tokens.npy", tokens.read_bytes())

    cache, listed = ShardCache(tmp_path / "cache", retry=QUICK), str(tmp_path / "listed.json")
    before = meshfeed.sources.Tokens(put(0), 8, next_token=False, cache=cache)
    make_manifest([store.url("tokens.npy")], listed)
    assert meshfeed.sources.Tokens(listed, 8, next_token=False, cache=cache)[0]["tokens"][0] == 0
    assert before[0]["tokens"][0] == 0
    make_manifest([put(1000)], listed)
    before.close()
    assert meshfeed.sources.Tokens(listed, 8, next_token=False, cache=cache)[0]["tokens"][0] == 1000
    with pytest.raises(SourceError, match=r"tokens\.npy has changed since"):
        before[0]


def test_room_is_waited_for_as_long_as_other_fetches_receive_bytes(store: Store, tmp_path) -> None:
    cache = ShardCache(tmp_path, max_bytes=150, stall_seconds=0.5, retry=QUICK)
    part, handle = cache._new_part(cache._entry(store.put("a", bytes(100))), 100)

    def receive() -> None:
        for _ in range(12):
            time.sleep(0.1)
            os.write(handle, bytes(4096))
        part.unlink()
        locks.unlock(None, handle)

    thread = threading.Thread(target=receive)
    thread.start()
    assert read(cache, store.put("b", bytes(100))) == bytes(100)
    thread.join()


def test_a_file_larger_than_the_cache_and_other_wrong_settings(store: Store, tmp_path) -> None:
    with pytest.raises(SourceError, match=r"has 300 bytes and max_bytes=250 holds no file of that size"):
        read(ShardCache(tmp_path, max_bytes=250), store.put("big", bytes(300)))
    for wrong in (0, -1, 1.5, True, "1GB"):
        with pytest.raises(SettingsError, match=f"max_bytes={wrong!r}"):
            ShardCache(tmp_path, max_bytes=wrong)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot be used as a cache"):
        ShardCache(tmp_path / "file")


def test_threads_fetch_a_file_once_and_keep_within_the_limit(store: Store, tmp_path) -> None:
    urls = [store.put(f"f{i}", os.urandom(1000)) for i in range(8)]
    cache, most, wrong = ShardCache(tmp_path, max_bytes=4500), [0], []

    def work(seed: int) -> None:
        for i in np.random.default_rng(seed).integers(0, 8, 15).tolist():
            try:
                if read(cache, urls[i]) != store.files[f"f{i}"]:
                    wrong.append(i)
            except Exception as error:
                wrong.append(error)
            most[0] = max(most[0], sum(map(size_or_zero, tmp_path.glob("meshfeed_*-f*"))))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert most[0] <= 4500
    other = ShardCache(tmp_path / "other")
    same = [threading.Thread(target=read, args=(other, store.put("one", bytes(10**6)))) for _ in range(4)]
    for thread in same:
        thread.start()
    for thread in same:
        thread.join(60)
    assert store.fetches.count("one") == 1


FETCHER = """
    import sys
    from meshfeed._src.sources.files.shard_cache import RemoteFile, ShardCache
    with ShardCache({directory!r}, max_bytes=6_000_000).open({url!r}) as path:
        print(path.stat().st_size, flush=True)
"""


def start_fetcher(tmp_path: pathlib.Path, url: str) -> subprocess.Popen:
    code = textwrap.dedent(FETCHER.format(directory=str(tmp_path), url=url))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def wait_for_part(tmp_path: pathlib.Path) -> pathlib.Path:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for part in tmp_path.glob("*.part"):
            if part.stat().st_size:
                return part
        time.sleep(0.02)
    raise AssertionError("no fetch began")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_owner_of_a_fetch_dies_or_hangs(store: Store, tmp_path, how: str) -> None:
    url = store.put("slow", os.urandom(BLOCK + 1000))
    store.hold.clear()
    owner = start_fetcher(tmp_path, url)
    try:
        part = wait_for_part(tmp_path)
        found: list[bytes] = []
        cache = ShardCache(tmp_path, max_bytes=9_000_000, stall_seconds=0.5)
        waiter = threading.Thread(target=lambda: found.append(read(cache, url)), daemon=True)
        waiter.start()
        waiter.join(0.2)
        assert store.fetches == ["slow"]  # it waits for the owner
        os.kill(owner.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        store.hold.set()
        waiter.join(60)
        assert found == [store.files["slow"]]
        assert store.fetches == ["slow", "slow"]
        assert part.exists() == (how == "stopped")
        if how == "stopped":
            os.kill(owner.pid, signal.SIGCONT)
            assert owner.wait(60) == 0
        assert files_in(cache) == ["slow"]
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()


def test_the_files_of_a_batch_are_fetched_side_by_side(store: Store, tmp_path) -> None:
    pytest.importorskip("array_record")
    from array_record_files import some_records, write

    from meshfeed._src.sources.array_record.source import ArrayRecord

    urls = []
    for i in range(3):
        path = write(tmp_path / f"slow{i}", some_records(10, 10 * i))
        urls.append(store.put(f"slow{i}", pathlib.Path(path).read_bytes()))
    source = ArrayRecord(urls, cache=ShardCache(tmp_path / "cache"))
    store.hold.clear()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.extend(source.read_raw([25, 5, 15])), daemon=True)
    reader.start()
    deadline = time.monotonic() + 60
    while len(store.fetches) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(store.fetches) == ["slow0", "slow1", "slow2"]  # while none of them has ended
    store.hold.set()
    reader.join(60)
    assert found == [some_records(30)[i] for i in (25, 5, 15)]


@pytest.mark.slow
def test_a_long_footer_takes_two_requests(store: Store, tmp_path) -> None:
    pytest.importorskip("array_record")
    from array_record_files import write

    from meshfeed._src.sources.array_record.source import ArrayRecord

    path = write(tmp_path / "many", [b"%d" % i for i in range(40_000)])
    assert len(ArrayRecord(store.put("many", pathlib.Path(path).read_bytes()), cache=ShardCache(tmp_path))) == 40_000
    assert store.range_requests == 2
    assert store.fetches == []


@pytest.mark.parametrize("ranges", [True, False])
def test_array_record_over_the_cache(store: Store, tmp_path, ranges: bool) -> None:
    pytest.importorskip("array_record")
    from array_record_files import some_records, write

    from meshfeed._src.sources.array_record.source import ArrayRecord

    store.ranges = ranges
    contents = [some_records(5000), some_records(700, 5000)]
    urls = []
    for i, records in enumerate(contents):
        path = write(
            tmp_path / f"{i}.array_record", records, "group_size:1,uncompressed" if i else "group_size:16,zstd"
        )
        urls.append(store.put(f"d/{i}.array_record", pathlib.Path(path).read_bytes()))
    cache = ShardCache(tmp_path / "cache", retry=QUICK)
    source = ArrayRecord(urls, cache=cache)
    assert len(source) == 5700
    if ranges:
        assert store.fetches == []  # counted by their footers alone
    assert source.read_raw([5699, 0, 5000]) == [contents[1][699], contents[0][0], contents[1][0]]
    assert source.file_of(5699) == urls[1]
    local = ArrayRecord([tmp_path / "0.array_record", tmp_path / "1.array_record"])
    assert source.fingerprint() == local.fingerprint()
    copy = pickle.loads(pickle.dumps(source))
    assert copy[1] == contents[0][1]

    # A copy that the disk damages is fetched anew; what is damaged in the store is an error.
    damaged = cache._entry(urls[1]).path
    content = bytearray(damaged.read_bytes())
    content[content.index(contents[1][5])] ^= 1
    damaged.write_bytes(content)
    source.close()
    before = len(store.fetches)
    assert source[5005] == contents[1][5]
    assert store.fetches[before:] == ["d/1.array_record"]
    store.put("d/1.array_record", bytes(content))
    again = ArrayRecord(urls, cache=ShardCache(tmp_path / "cache2", retry=QUICK))
    with pytest.raises(CorruptDataError, match=r"http://.*1\.array_record: record 5005") as caught:
        again[5005]
    assert (caught.value.path, caught.value.record_id) == (urls[1], 5005)
    store.put("d/1.array_record", bytes(content[:-1]))
    with pytest.raises(CorruptDataError, match=r"http://.*1\.array_record"):
        ArrayRecord(urls, cache=ShardCache(tmp_path / "cache3", retry=QUICK))


def test_a_file_without_its_checksum_is_fetched_no_more_than_twice(store: Store, tmp_path) -> None:
    url = store.put("x", bytes(1000))
    cache = ShardCache(tmp_path, checksums={"x": "md5:00"}, retry=QUICK)
    for _ in range(3):  # as SkipBad reads one record of it after the other
        with pytest.raises(CorruptDataError, match=r"/x: fetched 1,000 bytes with md5 .*, expected 00"):
            read(cache, url)
    assert store.fetches == ["x", "x"]
    cache.renew([url], {})  # a new source tries again
    with pytest.raises(CorruptDataError, match="expected 00"):
        read(cache, url)
    assert store.fetches == ["x"] * 4


@pytest.mark.parametrize("options", ["group_size:1,uncompressed", "group_size:16,zstd"])
def test_what_is_damaged_in_the_store_is_fetched_again_once(store: Store, tmp_path, options: str) -> None:
    """And not at each read of the record, if the feed skips it."""
    pytest.importorskip("array_record")
    from array_record_files import write

    content = bytearray(
        pathlib.Path(write(tmp_path / "x", [os.urandom(1000) for _ in range(64)], options)).read_bytes()
    )
    content[20_000] ^= 1
    store.versions = False
    cache, url = ShardCache(tmp_path / "cache", retry=QUICK), store.put("x", bytes(content))
    source = meshfeed.sources.ArrayRecord(url, decode_batch=meshfeed.sources.DecodeRaw(np.uint8, 1000), cache=cache)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    settings = {"global_batch_size": 8, "num_epochs": 3, "bad_records": meshfeed.SkipBad(0.5)}
    with meshfeed.Feed(source, mesh, **settings) as feed:
        assert len(list(feed)) == 24
        assert feed.stats().skipped_records >= 3
    assert store.fetches.count("x") == 2
    content[20_000] ^= 1
    store.put("x", bytes(content))
    mended = meshfeed.sources.ArrayRecord(url, cache=cache)
    assert len(mended.read_raw(np.arange(64))) == 64


@pytest.mark.parametrize("options", ["group_size:1,uncompressed", "group_size:16,zstd"])
@pytest.mark.parametrize("record_ids", [[0, 1], [0, 100]])
def test_attempts_to_fetch_an_evicted_array_record_are_not_multiplied(
    store: Store, tmp_path, options: str, record_ids: list[int]
) -> None:
    pytest.importorskip("array_record")
    from array_record_files import write

    from meshfeed._src.sources.array_record.source import ArrayRecord

    urls = []
    for name in "abcd":
        path = write(tmp_path / name, [np.random.default_rng(i).bytes(1000) for i in range(100)], options)
        urls.append(store.put(name, pathlib.Path(path).read_bytes()))
    num_bytes = len(store.files["a"])
    source = ArrayRecord(urls, cache=ShardCache(tmp_path / "cache", max_bytes=5 * num_bytes // 2, retry=QUICK))
    for first in range(0, 400, 100):  # the first two are evicted
        source.read_raw([first])
    store.fail, before = 1 << 30, len(store.fetches)
    for read_records in (source.read_rows, source.read_raw):
        try:
            found = read_records(record_ids)
        except OSError:
            break
        assert found is None
    fetches = store.fetches[before:]
    assert fetches
    assert max(fetches.count(name) for name in "ab") <= QUICK.attempts


def test_a_file_that_arrives_while_the_room_is_counted_is_counted(store: Store, tmp_path, monkeypatch) -> None:
    """Its part had gone when it was looked at, and its own name was not yet there when the folder was listed."""
    cache = ShardCache(tmp_path / "cache", max_bytes=150_000, retry=QUICK)
    first, second = store.put("first", os.urandom(100_000)), store.put("second", os.urandom(100_000))
    checked, listed = threading.Event(), threading.Event()
    check, iterdir = shard_cache._check, pathlib.Path.iterdir

    def check_and_wait(entry, part) -> None:
        check(entry, part)
        if entry.url == first:
            checked.set()
            listed.wait(20)

    def list_and_wait(folder):
        found = list(iterdir(folder))
        if folder == cache.directory and checked.is_set() and not listed.is_set():
            listed.set()
            time.sleep(0.3)  # the first file gets its name now, if nothing hinders it
        return iter(found)

    monkeypatch.setattr(shard_cache, "_check", check_and_wait)
    monkeypatch.setattr(pathlib.Path, "iterdir", list_and_wait)
    thread = threading.Thread(target=read, args=(cache, first))
    thread.start()
    assert checked.wait(20)
    assert read(cache, second) == store.files["second"]
    thread.join(20)
    assert listed.is_set()
    assert cache.num_bytes() <= 150_000


@pytest.mark.slow
def test_a_real_s3_server(tmp_path, monkeypatch) -> None:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    pytest.importorskip("array_record")
    from array_record_files import some_records, write

    from meshfeed._src.sources.array_record.source import ArrayRecord

    s3 = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    s3.start()
    try:
        host, port = s3.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        for name, value in {"KEY": "a", "SECRET": "b", "ENDPOINT_URL": endpoint}.items():
            monkeypatch.setitem(fsspec.config.conf.setdefault("s3", {}), name.lower(), value)
        files = fsspec.filesystem("s3")
        files.mkdir("cached")
        records = some_records(900)
        for i in range(3):
            path = write(tmp_path / f"part-{i}", records[300 * i : 300 * i + 300])
            files.put_file(path, f"cached/train/part-{i}")
        cache = ShardCache(tmp_path / "cache", max_bytes=300_000, retry=QUICK)  # one file of three
        source = ArrayRecord("s3://cached/train/part-*", cache=cache)
        assert len(source) == 900
        ids = np.random.default_rng(0).permutation(900)[:50]
        assert source.read_raw(ids) == [records[i] for i in ids]
        assert cache.num_bytes() <= 300_000
        with pytest.raises(SourceError, match=r"no file matches 's3://cached/other/\*'"):
            ArrayRecord("s3://cached/other/*", cache=cache)
        with pytest.raises(SourceError, match="there is no file 's3://cached/train/none'"):
            ArrayRecord("s3://cached/train/none", cache=cache)
    finally:
        s3.stop()
        fsspec.filesystem("s3").clear_instance_cache()


def contents_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_other_files_of_the_folder_are_left_alone(store: Store, tmp_path) -> None:
    mine = {
        "results.csv": b"1" * 500,
        "video.part": b"2" * 500,
        "0123456789abcdef0123456789abcdef-report.csv": b"3" * 500,
        "0123456789abcdef0123456789abcdef.100.0123456789abcdef.part": b"4" * 500,
        "0123456789abcdef0123456789abcdef.lock": b"",
        "meshfeed_notes.txt": b"5" * 500,
        "meshfeed_0123456789abcdef0123456789abcdef-folder/inner": b"6" * 500,
        "folder/inner": b"7" * 500,
        "room.lock": b"8",
    }
    for name, content in mine.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    cache = ShardCache(tmp_path, max_bytes=250)
    for name in "abcd":
        assert read(cache, store.put(name, name.encode() * 100)) == name.encode() * 100
    assert cache.num_bytes() == 200
    cache.discard(store.url("d"))
    assert cache.num_bytes() == 100
    found = contents_of(tmp_path)
    assert {name: found.pop(name) for name in mine} == mine
    assert list(found.values()) == [b"c" * 100]
    assert not list(tmp_path.glob("meshfeed_*.lock"))  # locks go with the work that they protect


HOLDER = """
    import sys, time, pathlib
    from meshfeed._src.sources.files.locks import locked
    with locked(pathlib.Path(sys.argv[1]), 10):
        print("held", flush=True)
        time.sleep(1000)
"""


def start_holder(path: pathlib.Path) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_lock_that_is_never_given_back(store: Store, tmp_path) -> None:
    url = store.put("x", b"0123456789")
    cache = ShardCache(tmp_path, stall_seconds=0.3, retry=QUICK)
    holder = start_holder(tmp_path / "meshfeed_room.lock")
    try:
        os.kill(holder.pid, signal.SIGSTOP)
        expected = rf"process {holder.pid} on {socket.gethostname()} has held the lock of .*room\.lock for more than"
        with pytest.raises(StalledError, match=expected):
            read(cache, url)
        with pytest.raises(StalledError, match=expected):
            ShardCache(tmp_path, stall_seconds=0.3)
        holder.kill()  # the kernel gives its lock back
        holder.wait()
        assert read(cache, url) == b"0123456789"
        assert not list(tmp_path.glob("*.lock"))
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_copy_that_somebody_opens_and_never_leaves(store: Store, tmp_path) -> None:
    url = store.put("x", b"0123456789")
    cache = ShardCache(tmp_path, stall_seconds=0.3)
    with cache.open(url) as path:
        with pytest.raises(StalledError, match="cannot be removed because another process has been opening it"):
            cache.discard(url)
        assert path.read_bytes() == b"0123456789"
    cache.discard(url)
    assert not path.exists()
    assert read(cache, url) == b"0123456789"
    with path.open("rb") as hung:
        shard_cache.fcntl.flock(hung, shard_cache.fcntl.LOCK_EX)
        with pytest.raises(StalledError, match="another process has held the lock of"), cache.open(url):
            pass


def test_a_lock_file_that_its_holder_removes_has_one_holder(tmp_path) -> None:
    """Who opened the file before its holder removed it must not take the lock of a file without a name for the lock."""
    path, inside, most, wrong = tmp_path / "lock", [0], [0], []
    guard = threading.Lock()

    def work() -> None:
        try:
            for _ in range(200):
                with locks.locked(path, 60):
                    with guard:
                        inside[0] += 1
                        most[0] = max(most[0], inside[0])
                    with guard:
                        inside[0] -= 1
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert (most[0], wrong, path.exists()) == (1, [], False)


def test_a_stale_descriptor_of_a_lock_file_is_no_lock(tmp_path, monkeypatch) -> None:
    path, opened = tmp_path / "lock", os.open
    first = locks.try_lock(path)
    assert first is not None

    def open_and_lose(*args):
        handle = opened(*args)
        monkeypatch.setattr(os, "open", opened)
        locks.unlock(path, first)  # between the second one's open and its flock
        return handle

    monkeypatch.setattr(os, "open", open_and_lose)
    second = locks.try_lock(path)
    assert second is not None
    assert os.path.samestat(os.fstat(second), path.stat())
    assert locks.try_lock(path) is None
    locks.unlock(path, second)


def patch_write(monkeypatch: pytest.MonkeyPatch, write: Callable[[Download, bytes, int], None]) -> None:
    """What writes a block to the disk becomes ``write(download, content, first byte)``."""
    monkeypatch.setattr(Download, "write", write)


def test_a_child_forked_while_a_file_is_fetched_keeps_no_lock(store: Store, tmp_path) -> None:
    cache = ShardCache(tmp_path, max_bytes=150, stall_seconds=5, retry=QUICK)
    children, write = [], Download.write

    def write_and_fork(download: Download, content: bytes, start: int) -> None:
        write(download, content, start)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        children.append(child)

    with pytest.MonkeyPatch.context() as patch:
        patch_write(patch, write_and_fork)
        assert read(cache, store.put("a", bytes(100))) == bytes(100)
    try:
        assert children
        assert read(cache, store.put("b", bytes(100))) == bytes(100)  # a can be evicted
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_what_a_killed_process_left_goes(store: Store, tmp_path) -> None:
    url = store.put("slow", os.urandom(BLOCK + 1000))
    store.hold.clear()
    owner = start_fetcher(tmp_path, url)
    try:
        wait_for_part(tmp_path)
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
        store.hold.set()
    assert list(tmp_path.glob("*.part"))
    assert list(tmp_path.glob("*.lock"))
    assert read(ShardCache(tmp_path, max_bytes=6_000_000), store.put("other", b"1")) == b"1"
    assert files_in(ShardCache(tmp_path)) == ["other"]
    assert not list(tmp_path.glob("*.lock"))


def test_a_full_disk_and_a_read_only_folder(store: Store, tmp_path, monkeypatch) -> None:
    cache = ShardCache(tmp_path, retry=QUICK)
    url = store.put("x", bytes(1000))

    def fill(download: Download, content: bytes, start: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch_write(patch, fill)
        with pytest.raises(OSError, match=r"disk of .* was full before .*/x \(1,000 bytes\).*max_bytes=") as caught:
            read(cache, url)
    assert caught.value.errno == errno.ENOSPC
    assert contents_of(tmp_path) == {}
    assert read(cache, url) == bytes(1000)
    with pytest.raises(SettingsError, match="cannot be used as a cache"):
        ShardCache("/proc")
    shutil.rmtree(tmp_path)
    assert read(cache, url) == bytes(1000)  # the folder is made again
    cache.discard(url)
    cache.directory = pathlib.Path("/sys")  # as a disk that was remounted read-only
    cache.identify(url)
    with pytest.raises(OSError, match=r"the folder /sys cannot be written any more .*another directory=$"):
        read(cache, url)


def test_a_folder_that_is_emptied_while_a_file_is_fetched(store: Store, tmp_path) -> None:
    """As programs do that clean up temporary folders. A feed reads on, and no file of the store is called missing."""
    urls = []
    for number in range(3):
        np.save(tmp_path / "tokens.npy", np.arange(number * 64, number * 64 + 64, dtype=np.int32))
        urls.append(store.put(f"{number}.npy", (tmp_path / "tokens.npy").read_bytes()))
    folder, emptied = tmp_path / "cache", []

    def empty(name: str, first: int) -> None:
        if folder.exists() and len(emptied) < 2 and any(folder.glob("*.part")):
            emptied.append(name)
            for path in folder.iterdir():
                path.unlink(missing_ok=True)

    store.answered = empty  # type: ignore[method-assign]
    cache = ShardCache(folder, retry=QUICK, ahead_bytes=0)
    with pytest.raises(OSError, match=rf"the copy of {urls[0]} was removed from {folder} by something else") as caught:
        read(cache, urls[0])
    assert not isinstance(caught.value, FileNotFoundError)
    source = meshfeed.sources.Tokens(urls, 8, next_token=False, cache=cache)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    with meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=8, retry=QUICK) as feed:
        tokens = np.concatenate([np.asarray(batch["tokens"]) for batch in feed])
    assert tokens.ravel().tolist() == [*range(192)]
    assert len(emptied) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_attempts_to_write_are_not_multiplied(store: Store, tmp_path, monkeypatch, number) -> None:
    written = []

    def fail(download: Download, content: bytes, start: int) -> None:
        written.append(start)
        raise OSError(number, os.strerror(number))

    cache, url = ShardCache(tmp_path, retry=QUICK), store.put("x", bytes(1000))
    patch_write(monkeypatch, fail)
    with pytest.raises(OSError, match=r"disk of|cannot be written"):
        call_with_retry(lambda: read(cache, url), QUICK, doing="reading")
    assert len(written) == QUICK.attempts


class _Plan:
    """Needs one file after so many batches."""

    def __init__(self, url: str, batches: float) -> None:
        self.url, self.batches = url, batches

    def next_use(self, file: RemoteFile) -> float:
        return self.batches if file.url == self.url else math.inf


def test_what_another_process_needs_is_evicted_last(store: Store, tmp_path) -> None:
    urls = [store.put(f"f{i}", os.urandom(1000)) for i in range(5)]
    ours, theirs = (ShardCache(tmp_path, max_bytes=2500, retry=QUICK) for _ in range(2))
    plan = _Plan(urls[0], 3)
    file = RemoteFile(ours, urls[0], None, 1000)
    file.follow(plan.next_use)
    assert file.fetch(3)
    for i in (1, 2):
        read(theirs, urls[i])
        assert files_in(theirs) == ["f0", f"f{i}"]  # f0 was opened before the other, and has to stay
    far = _Plan(urls[3], 2)
    ahead = RemoteFile(theirs, urls[3], None, 1000)
    ahead.follow(far.next_use)
    read(theirs, urls[3])
    assert not RemoteFile(theirs, urls[4], None, 1000).fetch(2)  # both copies are needed within 2 × 2 batches
    assert files_in(theirs) == ["f0", "f3"]

    [old] = [path for path in tmp_path.glob("*.plan") if b"-f0" in path.read_bytes()]
    os.utime(old, (1, 1))  # of a loop that has stopped
    theirs._shared_plans._others.clear()
    read(theirs, urls[4])
    assert files_in(theirs) == ["f3", "f4"]
    theirs._publish_plan()
    plan.batches = 1
    ours._publish_plan()
    assert len(list(tmp_path.glob("*.plan"))) == 2
    (tmp_path / f"meshfeed_{'0' * 32}.plan").write_text('{"f4": 0}')  # of a process that was killed
    del ours, file
    gc.collect()
    read(theirs, urls[0])
    assert files_in(theirs) == ["f0", "f3"]
    assert len(list(tmp_path.glob("*.plan"))) == 1


def test_no_plan_remains_of_a_feed_that_is_closed_while_a_fetch_publishes_it(store: Store, tmp_path) -> None:
    cache = ShardCache(tmp_path, retry=QUICK)
    file = RemoteFile(cache, store.put("f0", bytes(1000)), None, 1000)
    publish = cache._shared_plans.publish

    class Closing(_Plan):
        def next_use(self, file: RemoteFile) -> float:
            return self.batches

    plan = Closing(file.url, 3)

    def publish_late(uses: dict[str, float]) -> None:
        cache._unfollow(plan.next_use)  # after the uses were looked up
        publish(uses)

    file.follow(plan.next_use)
    assert file.fetch(3)
    assert list(tmp_path.glob("*.plan"))
    cache._shared_plans.publish = publish_late  # type: ignore[method-assign]
    cache._publish_plan()
    assert not list(tmp_path.glob("*.plan"))


def test_plans_that_do_not_fit_on_the_disk_leave_no_files_and_no_descriptors(
    store: Store, tmp_path, monkeypatch
) -> None:
    cache = ShardCache(tmp_path, retry=QUICK)
    file, plan = RemoteFile(cache, store.put("f0", bytes(1000)), None, 1000), _Plan(store.url("f0"), 3)
    file.follow(plan.next_use)
    assert file.fetch(3)
    descriptors = len(os.listdir("/proc/self/fd"))

    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(3):
            cache._publish_plan()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert len(list(tmp_path.glob("*.plan"))) == 1
    cache._unfollow(plan.next_use)
    assert not list(tmp_path.glob("*.plan"))


def test_discard_while_others_evict_and_open(store: Store, tmp_path) -> None:
    urls = [store.put(f"f{i}", os.urandom(1000)) for i in range(4)]
    cache, wrong = ShardCache(tmp_path, max_bytes=2500, retry=QUICK), []

    def work(seed: int) -> None:
        for i in np.random.default_rng(seed).integers(0, 4, 30).tolist():
            try:
                if seed == 0:
                    cache.discard(urls[i])
                elif read(cache, urls[i]) != store.files[f"f{i}"]:
                    wrong.append(i)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert cache.num_bytes() <= 2500


@pytest.mark.parametrize("attributes", [True, False])
def test_a_copy_that_the_disk_damaged_is_fetched_again(store: Store, tmp_path, monkeypatch, attributes: bool) -> None:
    content = os.urandom(1000)
    url = store.put("x", content)
    if not attributes:
        monkeypatch.setattr(os, "setxattr", lambda *_: os.stat("/none"))  # as file systems without attributes do
    sums = None if attributes else {"x": "md5:" + hashlib.md5(content).hexdigest()}
    with ShardCache(tmp_path).open(url) as path:
        copy = path
    assert read(ShardCache(tmp_path, checksums=sums), url) == content
    assert store.fetches == ["x"]
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert read(ShardCache(tmp_path, checksums=sums, verify=False), url) != content
    assert read(ShardCache(tmp_path, checksums=sums), url) == content
    assert store.fetches == ["x", "x"]
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ahead = ShardCache(tmp_path, checksums=sums)
    assert shard_cache.RemoteFile(ahead, url, None, 1000).fetch(1.0)
    assert read(ahead, url) == content
    assert ahead.stats().fetched_ahead == 1


def test_the_first_fill_shows_a_bar_on_a_terminal_only(store: Store, tmp_path, monkeypatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(download, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    cache = ShardCache(tmp_path / "a")
    assert read(cache, store.put("x", bytes(1000))) == bytes(1000)
    bar = cache._downloads._bar._progress
    assert bar is None or (bar.tasks[0].completed, bar.tasks[0].total) == (1000, 1000)
    deadline = time.monotonic() + 60
    while cache._downloads._bar._progress is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    read(cache, store.put("y", bytes(1000)))
    assert cache._downloads._bar._progress is None  # the first fill has ended
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    other = ShardCache(tmp_path / "b")
    other._downloads._bar.begin(10)
    assert other._downloads._bar._progress is None


def test_an_unpacked_part_is_not_taken_for_that_of_a_dead_process(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread scans the folder between the creation of the part and its lock."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/unpacked/a.txt.gz", gzip.compress(b"hello"))
    cache, flock, scans = ShardCache(tmp_path / "cache"), fcntl.flock, []

    def scan() -> None:
        with cache._room():
            cache._held()

    def slow(handle: int, operation: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if ".0." in path and path.endswith(".part") and not scans:
            scans.append(threading.Thread(target=scan))
            scans[0].start()
            scans[0].join(0.3)
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    with cache.open("memory://unpacked/a.txt.gz", compression="gz") as copy:
        assert copy.read_bytes() == b"hello"
    scans[0].join()
    memory.rm("/unpacked", recursive=True)


def test_a_cache_is_renewed_and_pickled_while_another_feed_looks_up_files(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a source for evaluation is made, or a feed with workers, while a feed trains over the same cache."""
    cache, ended = ShardCache(tmp_path), threading.Event()
    monkeypatch.setattr(shard_cache, "look_up", lambda url, *_: StoredFile(1, url))

    def look_up_files() -> None:
        for number in itertools.count():
            if ended.wait(1e-4):
                return
            cache.identify(f"memory://data/{number}")

    thread = threading.Thread(target=look_up_files)
    thread.start()
    try:
        for _ in range(20):
            time.sleep(0.05)
            cache.renew(["memory://data/0"], {})
            assert pickle.loads(pickle.dumps(cache)).directory == tmp_path
    finally:
        ended.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:os.fork", "ignore:This process .* is multi-threaded")
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(store: Store, tmp_path) -> None:
    cache = ShardCache(tmp_path, retry=QUICK)
    url = store.put("a", bytes(100))
    read(cache, url)
    with cache._room_lock, cache._stats_lock:
        child = os.fork()
        if not child:
            signal.alarm(5)
            os._exit(read(cache, url) != bytes(100) or cache.num_bytes() != 100)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.stats().hits == 0
