"""A remote file is looked up together with its footer or header, in one request, whatever the server makes of such ranges."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import array_record_files
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_store import Store

from meshfeed import ShardCache, SourceError
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.sources.files import direct
from meshfeed._src.sources.files.direct import identify
from meshfeed._src.sources.files.paths import StoredFile
from meshfeed.sources import ArrayRecord, Parquet, Tokens

pytest.importorskip("aiohttp")
ROWS, WIDTH = 64, 16384  # larger than the part that comes with the look-up


@pytest.fixture
def store() -> Store:
    return Store()


def write_array_record(path: pathlib.Path) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (ROWS, WIDTH), np.uint8)
    array_record_files.write(path, [row.tobytes() for row in rows], "group_size:1,uncompressed")


def write_parquet(path: pathlib.Path) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (ROWS, WIDTH), np.uint8)
    pq.write_table(pa.table({"x": list(rows)}), path, row_group_size=8, use_dictionary=False)


def write_tokens(path: pathlib.Path) -> None:
    np.save(path.with_suffix(".npy"), np.arange(ROWS * WIDTH // 2, dtype=np.uint16))
    path.with_suffix(".npy").rename(path)


def tokens(urls: list[str], **settings: Any) -> Tokens:
    return Tokens(urls, 1024, **settings)


KINDS = {"array_record": (write_array_record, ArrayRecord), "parquet": (write_parquet, Parquet),
         "npy": (write_tokens, tokens)}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)
cached = pytest.mark.parametrize("cached", [True, False])


def put(store: Store, kind: str, folder: pathlib.Path) -> str:
    path = folder / f"data.{kind}"
    KINDS[kind][0](path)
    return store.put(path.name, path.read_bytes())


def sources(url: str, kind: str, folder: pathlib.Path, cached: bool) -> tuple[Callable[[], Any], ShardCache | None]:
    cache = ShardCache(folder / "cache") if cached else None
    return lambda: KINDS[kind][1]([url], cache=cache), cache


@kinds
@cached
def test_one_request_looks_a_file_up(store: Store, tmp_path: pathlib.Path, kind: str, cached: bool) -> None:
    url = put(store, kind, tmp_path)
    make, _ = sources(url, kind, tmp_path, cached)
    source = make()
    assert [asked for asked in store.asked if asked[1] != "manifest.json"] == [("GET", f"data.{kind}")]
    assert store.requests[0][2] < len(store.files[f"data.{kind}"]) / 2
    assert len(source) == (ROWS if kind != "npy" else ROWS * WIDTH // 2 // 1024 - 1)


@kinds
@cached
@pytest.mark.parametrize("answer", [200, 206, 400, 416, 501])
def test_a_server_that_does_not_serve_the_last_bytes_is_asked_otherwise(
    store: Store, tmp_path: pathlib.Path, kind: str, cached: bool, answer: int
) -> None:
    url = put(store, kind, tmp_path)
    make, _ = sources(url, kind, tmp_path, cached)
    usual = source_identity(make())
    store.suffix, store.asked, store.requests = answer, [], []
    make, _ = sources(url, kind, tmp_path / "other", cached)
    source = make()
    assert source_identity(source) == usual
    # Only "all of it" has the size in its headers; the body is not taken.
    assert store.asked[:3].count(("HEAD", f"data.{kind}")) == (kind != "npy" and answer != 200)
    sent = [num_bytes for _, first, num_bytes in store.requests if first]
    assert sum(sent) < len(store.files[f"data.{kind}"]) / 2


@cached
def test_a_server_without_ranges_is_warned_of_once(
    store: Store, tmp_path: pathlib.Path, cached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    url = put(store, "parquet", tmp_path)
    make, _ = sources(url, "parquet", tmp_path, cached)
    usual = source_identity(make())
    store.ranges = False
    direct._warn_of_whole_files.cache_clear()
    make, _ = sources(url, "parquet", tmp_path / "other", cached)
    with caplog.at_level(logging.WARNING, "meshfeed.sources.direct"):
        assert source_identity(make()) == usual
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "meshfeed.sources.direct"]
    assert "answers requests for a range of bytes with the whole file" in warning
    assert "Serve the files with range requests" in warning


def test_a_small_file_is_whole_in_the_look_up(store: Store) -> None:
    url = store.put("small", b"abc")
    for part in (slice(-100, None), slice(0, 100)):
        for store.ranges in (True, False):
            store.asked = []
            file, version = identify(url, None, source="test", part=part)
            assert (file.num_bytes, file.read(0, 3), file.read(1, 99)) == (3, b"abc", b"bc")
            assert version.startswith("ETag=")
            assert store.asked == [("GET", "small")]


@pytest.mark.parametrize("part", [slice(-100, None), slice(0, 100)])
def test_the_version_is_that_of_a_look_up_by_head(store: Store, part: slice) -> None:
    url = store.put("file", bytes(range(256)) * 100)
    with_part, plain = identify(url, None, source="test", part=part), identify(url, None, source="test")
    assert (with_part[0].num_bytes, with_part[1]) == (plain[0].num_bytes, plain[1])
    store.put("file", b"x" * 25_600)
    with pytest.raises(SourceError, match="has changed since the source was made"):
        with_part[0].read(200, 300)


def test_an_empty_and_a_missing_file_are_what_they_were(store: Store) -> None:
    part = slice(-100, None)
    file, _ = identify(store.put("empty", b""), None, source="test", part=part)
    assert file.num_bytes == 0
    with pytest.raises(SourceError, match="there is no file"):
        identify(store.url("gone"), None, source="test", part=part)


def test_a_compressed_answer_is_not_taken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    handler: Any = store.RequestHandlerClass
    head = handler.head

    def encoded(self: Any, status: int, length: int, **headers: str) -> None:
        head(self, status, length, **headers, **({"Content_Encoding": "gzip"} if self.command == "GET" else {}))

    monkeypatch.setattr(handler, "head", encoded)
    file, _ = identify(store.put("file", b"x" * 1000), None, source="test", part=slice(-100, None))
    assert (file.num_bytes, file._known) == (1000, b"")


def test_headers_of_stores_become_what_their_info_reports() -> None:
    headers = {
        "content-range": "bytes 6-9/10", "etag": '"e"', "x-goog-generation": "17", "last-modified": "then",
        "x-goog-hash": "crc32c=AAAAAA==,md5=kAFQmDzST7DWlj99KOF/cg==",
    }  # fmt: skip
    md5 = "md5:900150983cd24fb0d6963f7d28e17f72"
    part = slice(-4, None)
    for protocol, version in (("gs", "generation=17"), ("s3", 'ETag="e"'), ("https", 'ETag="e"')):
        found = direct._parse_first(headers, b"abcd", direct._LOOK_UP_FIELDS[protocol], part)
        assert found is not None
        assert (found.file, found.start) == (StoredFile(10, version, md5), 6)
    for wrong in ("bytes 6-9/*", "bytes 5-8/10", "bytes 6-8/10", ""):
        fields = direct._LOOK_UP_FIELDS["https"]
        assert direct._parse_first({**headers, "content-range": wrong}, b"abcd", fields, part) is None


def test_a_cache_takes_a_look_up_from_elsewhere(store: Store, tmp_path: pathlib.Path) -> None:
    url = store.put("file", b"abc")
    first, other = ShardCache(tmp_path / "1"), ShardCache(tmp_path / "2")
    identity = first.identify(url)
    found = first.looked_up(url)
    assert found is not None
    store.asked = []
    other.remember(url, found)
    assert other.identify(url) == identity
    assert store.asked == []
    with other.open(url) as path:
        assert path.read_bytes() == b"abc"
    assert store.asked == [("GET", "file"), ("HEAD", "file")]  # the version is compared once more, after the fetch
    other.discard(url)
    store.put("file", b"abcd")
    assert other.identify(url)[0] == 4
