"""Blocks of files over real servers that cut, stall and change files."""

from __future__ import annotations

import math
import os
import pathlib
import threading
import time
from typing import Any

import http_store
import pytest
from http_store import CuttingProxy, Store

import meshfeed
from meshfeed import SettingsError, ShardCache, SourceError
from meshfeed._src.base import stores
from meshfeed._src.base.settings import Retry
from meshfeed._src.sources.files import paths
from meshfeed._src.sources.files.direct import RemoteBytes, noting_file_system
from meshfeed._src.sources.files.download import Download, Downloads

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

PART = 1 << 18
QUICK = Retry(attempts=3, initial_seconds=0.01, max_seconds=0.02)


@pytest.fixture
def store():
    with Store() as server:
        yield server
        server.hold.set()
        server.shutdown()


def make_cache(folder: pathlib.Path, **settings: object) -> ShardCache:
    """A cache whose blocks have PART bytes."""
    cache = ShardCache(folder, retry=QUICK, **settings)  # type: ignore[arg-type]
    cache._downloads._block_bytes = PART
    cache._downloads._adapt = lambda *_: None
    return cache


def read(cache: ShardCache, url: str) -> bytes:
    with cache.open(url) as path:
        return path.read_bytes()


@pytest.mark.parametrize("how", ["cut", "stall"])
def test_a_broken_request_costs_its_block_alone(store: Store, tmp_path: pathlib.Path, how: str) -> None:
    content = os.urandom(6 * PART + 1000)
    url = store.put("x", content)
    store.hold.clear()
    store.broken = {("x", 0): how, ("x", 3 * PART): how} if how == "cut" else {("x", 3 * PART): how}
    cache = make_cache(tmp_path, read_timeout_seconds=0.4)
    assert read(cache, url) == content
    assert not store.broken
    sent = [first for _, first, _ in store.requests]
    assert set(sent) == {number * PART for number in range(7)}
    assert sum(size for _, _, size in store.requests) <= len(content) + 2 * PART
    assert sent.count(PART) == 1
    assert sent.count(2 * PART) == 1


def test_a_server_that_never_answers_is_an_error(store: Store, tmp_path: pathlib.Path) -> None:
    url = store.put("x", os.urandom(3 * PART))
    cache = make_cache(tmp_path, read_timeout_seconds=0.1)
    assert read(cache, store.put("y", os.urandom(3 * PART))) == store.files["y"]  # it serves ranges

    class Never(dict):
        def pop(self, key, default=None):
            return "stall" if key[0] == "x" else None

    store.broken = Never()
    store.hold.clear()
    with pytest.raises(OSError, match=r"/x: bytes 0 to .* did not arrive within 0.1 s"):
        read(cache, url)


def test_a_slow_link_gets_smaller_blocks(store: Store, tmp_path: pathlib.Path) -> None:
    """Attempts at a block that does not arrive within the time limit would all end alike."""
    cache = make_cache(tmp_path, read_timeout_seconds=0.5)
    assert read(cache, store.put("y", os.urandom(3 * PART))) == store.files["y"]  # it serves ranges
    cache._downloads._block_bytes = 4 * PART
    store.answered = lambda name, first: time.sleep(0.2 * store.requests[-1][2] / PART)
    content = os.urandom(7 * PART + 1000)
    assert read(cache, store.put("x", content)) == content


def test_a_server_that_falls_silent_before_its_first_range_is_an_error(
    store: Store, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the loss of a machine: connections are open, and no request is answered, of any method."""
    url = store.put("x", os.urandom(3 * PART))
    cache = make_cache(tmp_path, read_timeout_seconds=0.2)
    cache.identify(url)
    ended = threading.Event()
    monkeypatch.setattr(http_store._Handler, "_answer", lambda handler, *, body: ended.wait(20))
    monkeypatch.setattr(paths, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(stores, "_ALIVE_SECONDS", 0.2)
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match=r"/x: .* no answer in time"):
            read(cache, url)
        assert time.monotonic() - began < 15
    finally:
        ended.set()


def test_a_slow_server_without_ranges_is_streamed(store: Store, tmp_path: pathlib.Path) -> None:
    content = os.urandom(3 * PART)
    url = store.put("x", content)
    store.ranges = False
    store.hold.clear()
    store.broken = {("x", 0): "stall"}
    assert read(make_cache(tmp_path, read_timeout_seconds=0.4), url) == content
    assert len(store.requests) == 2


def test_a_whole_file_may_take_longer_than_the_five_minutes_of_aiohttp(store: Store) -> None:
    """Only the silence of a connection is bounded; each attempt to stream a slow server's file would end at the same byte."""
    from fsspec.asyn import sync

    files, _ = noting_file_system(store.url("x"), "Test")
    assert sync(files.loop, files.set_session).timeout.total is None


def test_a_file_without_ranges_is_fetched_once(store: Store, tmp_path: pathlib.Path) -> None:
    content = os.urandom(5 * PART)
    store.ranges = False
    assert read(make_cache(tmp_path), store.put("x", content)) == content
    assert len(store.requests) == 1


def test_two_versions_never_mix(store: Store, tmp_path: pathlib.Path) -> None:
    url = store.put("x", bytes(4 * PART))
    cache = make_cache(tmp_path)
    store.answered = lambda name, first: store.files.update(x=b"1" * (4 * PART)) if first else None
    with pytest.raises(SourceError, match=r"/x has changed since the source was made: 1,048,576 bytes \(ETag="):
        read(cache, url)
    assert not list(tmp_path.glob("*x"))
    store.answered = lambda name, first: None
    store.files["x"] = bytes(2 * PART)  # also if a block is not there any more
    with pytest.raises(SourceError, match=r"has changed .* then, 524,288 .* now"):
        read(cache, url)


def test_a_file_that_changed_before_its_first_byte_is_an_error(store: Store, tmp_path: pathlib.Path) -> None:
    url = store.put("x", b"1" * 100)
    cache = make_cache(tmp_path)
    cache.identify(url)
    store.put("x", b"2" * 100)
    with pytest.raises(SourceError, match="/x has changed since the source was made"):
        read(cache, url)


@pytest.mark.slow
def test_s3_goes_on_after_a_cut(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    s3 = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    s3.start()
    try:
        proxy = CuttingProxy(s3.get_host_and_port()[1], after=PART // 2, cuts=3)
        endpoint = f"http://127.0.0.1:{proxy.port}"
        for name, value in {"key": "a", "secret": "b", "endpoint_url": endpoint}.items():
            monkeypatch.setitem(fsspec.config.conf.setdefault("s3", {}), name, value)
        files = fsspec.filesystem("s3")
        files.mkdir("downloads")
        content = os.urandom(8 * PART)
        files.pipe_file("downloads/x", content)
        assert read(make_cache(tmp_path / "cache"), "s3://downloads/x") == content
        assert not proxy.cuts
        cache = make_cache(tmp_path / "other")
        cache.identify("s3://downloads/x")
        files.pipe_file("downloads/x", bytes(8 * PART))
        with pytest.raises(SourceError, match="s3://downloads/x has changed since the source was made"):
            read(cache, "s3://downloads/x")
        proxy.close()
    finally:
        s3.stop()
        fsspec.filesystem("s3").clear_instance_cache()


def test_all_connections_serve_the_file_that_is_needed_next(tmp_path: pathlib.Path) -> None:
    downloads = Downloads(QUICK, 1.0)
    uses = {"near": 1.0, "far": 7.0}
    with (tmp_path / "part").open("wb") as file:
        near, far = (
            Download(RemoteBytes(f"memory://{name}", 9 << 20, "", "Test"), file.fileno(), lambda name=name: uses[name])
            for name in uses
        )
        downloads._with_ranges.add("memory://near")
        downloads._active = [far, near]
        assert [downloads._take(far)[:2] for _ in range(3)] == [(near, 0), (near, 4 << 20), (near, 8 << 20)]
        assert downloads._take(near) is None  # a read that waits for it is not held up by others
        assert downloads._take(far)[:2] == (far, 0)
        uses["near"] = math.inf
        near.given_back.append((0, 4 << 20))
        assert downloads._take(near)[:2] == (near, 0)  # of unknown server: no second block before the first
        near.close()
        far.close()


def test_a_block_whose_reader_is_interrupted_is_fetched_by_another(
    tmp_path: pathlib.Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(3 * PART)
    memory.pipe_file("/x", content)
    downloads = Downloads(QUICK, 1.0)
    monkeypatch.setattr(downloads, "_block_bytes", PART)
    downloads._with_ranges.add("memory://x")

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with (tmp_path / "part").open("wb") as file:
        download = Download(RemoteBytes("memory://x", len(content), "", "Test"), file.fileno(), lambda: 1.0)
        downloads._active = [download]
        block = downloads._take(download)  # as the reader of a file that is needed later
        assert block is not None
        with monkeypatch.context() as patch:
            patch.setattr(downloads, "_copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                downloads._fetch(*block)
        downloads._active = []
        downloads.run(download)
    assert (tmp_path / "part").read_bytes() == content


def test_readers_of_many_files_share_the_blocks(store: Store, tmp_path: pathlib.Path) -> None:
    cache = make_cache(tmp_path)
    urls = [store.put(f"f{i}", os.urandom(9 * PART + i)) for i in range(4)]
    found: dict[str, bytes] = {}
    threads = [threading.Thread(target=lambda url=url: found.update({url: read(cache, url)})) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {url: store.files[f"f{i}"] for i, url in enumerate(urls)}
    assert sum(size for _, _, size in store.requests) == sum(map(len, store.files.values()))


def test_wrong_settings(tmp_path: pathlib.Path) -> None:
    for value in (0, -1.0, True, math.inf):
        with pytest.raises(SettingsError, match="read_timeout_seconds="):
            meshfeed.ShardCache(tmp_path, read_timeout_seconds=value)
