"""Stores and names that mislead: listings with holes, answers of two versions, ranges without a name, queries, signatures."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_store import Store
from test_webdataset import write_tar
from token_files import write_megatron

import meshfeed
from meshfeed import ShardCache
from meshfeed._src.base.settings import Retry
from meshfeed._src.sources import parquet
from meshfeed._src.sources.files import paths
from meshfeed._src.sources.files.direct import RemoteBytes
from meshfeed._src.sources.manifest import make_manifest
from meshfeed.sources import Parquet, Tokens, WebDataset

fsspec = pytest.importorskip("fsspec")
aiohttp = pytest.importorskip("aiohttp")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

SIGNED = "X-Amz-Expires=60&X-Amz-Signature=SECRET"
FIRST, SECOND = (np.arange(low, low + 1000, dtype=np.uint16).tobytes() for low in (0, 1000))


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as server:
        yield server
        server.shutdown()


def listing(*names: str) -> bytes:
    return "".join(f'<a href="{name}">{name}</a>' for name in names).encode()


def tokens(files: Any, **settings: Any) -> Tokens:
    return Tokens(files, sequence_length=9, dtype=np.uint16, **settings)


def first_tokens(source: Tokens) -> list[int]:
    return source[0]["tokens"][:3].tolist()


def test_a_folder_of_an_http_server_that_cannot_be_listed_is_an_error(store: Store) -> None:
    store.put("d", listing("/d/a/", "/d/b/", "/d/c.bin"))
    for name in ("a", "b"):
        store.put(f"d/{name}", listing(f"/d/{name}/p.bin", f"/d/{name}/deep/"))
        store.put(f"d/{name}/deep", listing(f"/d/{name}/deep/q.bin"))
    for pattern, wanted in (
        ("d/*/*.bin", ["a/p", "b/p"]),
        ("d/*.bin", ["c"]),
        ("d/a/*/*.bin", ["a/deep/q"]),
        ("d/**/*.bin", ["a/deep/q", "a/p", "b/deep/q", "b/p", "c"]),
    ):
        found = paths.expand_paths(store.url(pattern), source="Tokens")
        assert sorted(found) == sorted(store.url(f"d/{name}.bin") for name in wanted), pattern
    with pytest.raises(meshfeed.SourceError, match="no file matches"):
        paths.expand_paths(store.url("nowhere/*/*.bin"), source="Tokens")
    del store.files["d/b"]
    with pytest.raises(
        meshfeed.SourceError, match=r"the server lists the folder http://.*/d/b, but has no such folder\."
    ):
        paths.expand_paths(store.url("d/*/*.bin"), source="Tokens")


def test_a_page_that_lists_itself_in_other_orders_is_no_file(store: Store) -> None:
    store.put("d", listing("?C=N;O=D", "/d/?C=M&O=A", "/d/a.bin", "b.bin?sig=1"))
    for pattern in ("d/*", "d/**"):
        found = paths.expand_paths(store.url(pattern), source="Tokens")
        assert found == [store.url("d/a.bin"), store.url("d/b.bin?sig=1")]


class Listed(MemoryFileSystem):
    """Reports what FTP or WebHDFS do of a file, and keeps listings as the client of Azure does."""

    protocol = "listed"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    field = "modify"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("listed://"))

    def ls(self, path: str, detail: bool = True, **settings: Any) -> Any:
        found = self.dircache.get(self._strip_protocol(path)) or [
            {"name": one["name"], "size": one["size"], "type": one["type"], self.field: str(one.get("created"))}
            for one in super().ls(path, **settings)
        ]
        self.dircache[self._strip_protocol(path)] = found
        return found if detail else [one["name"] for one in found]

    def info(self, path: str, **_unused: Any) -> Any:
        path = self._strip_protocol(path)
        if found := [one for one in self.ls(self._parent(path)) if one["name"] == path]:
            return found[0]
        raise FileNotFoundError(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear() if path is None else self.dircache.pop(path, None)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Listed, "store", {})
    Listed.clear_instance_cache()
    fsspec.register_implementation("listed", Listed, clobber=True)
    return fsspec.filesystem("listed")


@pytest.mark.parametrize("field", ["modify", "modificationTime"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_file_that_was_uploaded_again_is_another_by_its_time(
    listed: Any, field: str, cached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(Listed, "field", field)
    sources = []
    for first in (0, 1000):
        listed.pipe("/d/a.bin", np.arange(first, first + 64, dtype=np.uint16).tobytes())
        cache = meshfeed.ShardCache(tmp_path) if cached else None
        sources.append(tokens("listed://d/a.bin", cache=cache))
        assert first_tokens(sources[-1]) == [first, first + 1, first + 2]


def test_a_look_whether_a_file_has_changed_is_not_answered_from_a_listing(listed: Any) -> None:
    listed.pipe("/d/a.bin", bytes(64))
    file = paths.look_up("listed://d/a.bin", "Tokens")
    remote = RemoteBytes("listed://d/a.bin", file.num_bytes, file.version, "Tokens")
    listed.pipe("/d/a.bin", bytes([1]) * 64)
    with pytest.raises(meshfeed.SourceError, match="has changed since the source was made"):
        remote.look_up()


def test_hidden_files_match_only_a_pattern_with_a_dot(store: Store, tmp_path: pathlib.Path) -> None:
    store.put("d", listing("/d/._a.bin", "/d/a.bin", "/d/.b.bin"))
    for pattern, wanted in (("d/*.bin", ["d/a.bin"]), ("d/.*.bin", ["d/._a.bin", "d/.b.bin"])):
        assert paths.expand_paths(store.url(pattern), source="Tokens") == [store.url(name) for name in wanted]
    memory, names = fsspec.filesystem("memory"), ("a.bin", ".b/c.bin", "d/e.bin", "d/.f/g.bin", "d/.h.bin")
    for name in names:
        memory.pipe(f"/hidden/{name}", b"1")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for pattern in ("**/*.bin", "*/*.bin", ".b/*.bin", "d/.*/*.bin", "d/**/*.bin"):
        on_disk = paths.expand_paths(str(tmp_path / pattern), source="Tokens")
        found = paths.expand_paths(f"memory://hidden/{pattern}", source="Tokens")
        assert found == [name.replace(str(tmp_path), "memory:///hidden") for name in on_disk], pattern
    memory.rm("/hidden", recursive=True)


def test_a_pattern_matches_files_and_no_folders(store: Store, tmp_path: pathlib.Path) -> None:
    store.put("d", listing("/d/a.bin", "/d/deep/"))
    store.put("d/deep", listing("/d/deep/b.bin"))
    memory = fsspec.filesystem("memory")
    for name in ("a.bin", "deep/b.bin"):
        memory.pipe(f"/folders/{name}", b"1")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for root in (str(tmp_path), "memory:///folders", store.url("d")):
        for pattern, wanted in (("*", ["a.bin"]), ("**", ["a.bin", "deep/b.bin"]), ("**/*", ["a.bin", "deep/b.bin"])):
            found = paths.expand_paths(f"{root}/{pattern}", source="Tokens")
            assert found == [f"{root}/{name}" for name in wanted], pattern
    memory.rm("/folders", recursive=True)


def test_an_index_that_cannot_be_looked_up_is_not_missing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, times = fsspec.filesystem("memory"), iter(range(10))
    write_megatron(tmp_path / "m", [[np.arange(1, 30, dtype=np.uint16)]])
    for end in ("bin", "idx"):
        memory.pipe(f"/looked/m.{end}", (tmp_path / f"m.{end}").read_bytes())
    plain = type(memory).info

    def info(self: Any, path: str, **settings: Any) -> Any:
        if path.endswith(".idx") and next(times) < 2:
            raise OSError("429 Too Many Requests")
        return plain(self, path, **settings)

    monkeypatch.setattr(type(memory), "info", info)
    assert first_tokens(Tokens("memory://looked/m.bin", 9)) == [1, 2, 3]
    memory.rm("/looked", recursive=True)


def test_a_copy_that_was_fetched_without_a_checksum_is_compared_with_it(store: Store, tmp_path: pathlib.Path) -> None:
    url = store.put("d/part-0.bin", FIRST)
    make_manifest([url], str(tmp_path / "m.json"), dtype=np.uint16)
    manifest = store.put("d/manifest.json", (tmp_path / "m.json").read_bytes())
    store.put("d/part-0.bin", SECOND)  # of the same size
    folder = tmp_path / "c"

    def opened(cache: ShardCache, source: str = "") -> bytes:
        if source:
            tokens(source, cache=cache)  # which takes the digests of the manifest
        with cache.open(url) as path:
            return path.read_bytes()

    assert opened(ShardCache(folder)) == SECOND
    right, wrong = (f"sha256:{hashlib.sha256(content).hexdigest()}" for content in (SECOND, FIRST))
    for _ in range(2):
        assert opened(ShardCache(folder, checksums={"part-0.bin": right})) == SECOND
    assert store.fetches.count("d/part-0.bin") == 1
    for cache, source in ((ShardCache(folder), manifest), (ShardCache(folder, checksums={"part-0.bin": wrong}), "")):
        with pytest.raises(meshfeed.CorruptDataError, match="expected"):
            opened(cache, source)
    cache = ShardCache(folder)
    assert opened(cache) == SECOND
    with pytest.raises(meshfeed.CorruptDataError, match="expected"):  # it has looked the file up already
        opened(cache, manifest)


def test_a_compressed_copy_that_was_fetched_without_a_checksum_is_fetched_again(
    store: Store, tmp_path: pathlib.Path
) -> None:
    packed = gzip.compress(FIRST)
    url = store.put("d/part-0.bin.gz", packed)
    first_tokens(tokens(url, cache=ShardCache(tmp_path)))
    for fetches in (2, 2):  # the second time it is known
        known = ShardCache(tmp_path, checksums={"part-0.bin.gz": f"sha256:{hashlib.sha256(packed).hexdigest()}"})
        assert first_tokens(tokens(url, cache=known)) == [0, 1, 2]
        assert store.fetches.count("d/part-0.bin.gz") == fetches


def test_a_copy_is_not_made_of_two_versions(tmp_path: pathlib.Path) -> None:
    versions = [bytes([number]) * (9 << 20) for number in (1, 2)]

    class Replaced(Store):
        def answered(self, name: str, first: int) -> None:
            self.files[name] = versions[first == 0]  # another one from the second block on, and the first again later

    with Replaced() as store:
        url = store.put("a.bin", versions[0])
        with (
            pytest.raises(meshfeed.SourceError, match=r"has changed since the source was made: .*ETag"),
            ShardCache(tmp_path).open(url),
        ):
            pass
        store.shutdown()


@pytest.mark.parametrize("cached", [False, True])
def test_part_of_a_file_without_a_range_is_not_the_whole(store: Store, tmp_path: pathlib.Path, cached: bool) -> None:
    store.names_ranges = False
    content = np.arange(100_000).astype(np.uint16)
    source = tokens(store.put("a.bin", content.tobytes()), cache=ShardCache(tmp_path) if cached else None)
    assert len(source) == 99_999 // 9
    assert source[11_000]["tokens"].tolist() == content[99_000:99_010].tolist()


def test_an_index_on_a_busy_server_is_not_taken_for_missing(store: Store, tmp_path: pathlib.Path) -> None:
    write_megatron(tmp_path / "a", [[np.arange(100, dtype=np.int32)]])
    for extension in ("bin", "idx"):
        store.put(f"a.{extension}", (tmp_path / f"a.{extension}").read_bytes())
    store.broken["a.idx", 0] = "busy"
    with pytest.raises(meshfeed.SourceError, match="holds int32, not uint16"):
        tokens(store.url("a.bin"))


def test_the_query_of_a_url_is_not_part_of_its_name(store: Store, tmp_path: pathlib.Path) -> None:
    url = store.put(f"x.bin.gz?{SIGNED}", gzip.compress(FIRST))
    cache = ShardCache(tmp_path)
    assert first_tokens(tokens(url, cache=cache)) == [0, 1, 2]
    assert not [name for name in os.listdir(tmp_path) if "SECRET" in name]
    with pytest.raises(meshfeed.SettingsError, match=r"compressed file 'http://.*x\.bin\.gz\?…' and no cache"):
        tokens(url)
    plain = store.put("get?name=a.bin", FIRST)
    assert first_tokens(tokens(plain)) == [0, 1, 2]
    assert [paths.format_name(url) for url in ("http://h/get?name=a.gz", "http://h/a.bin?b=c.gz", "a?b=c.gz")] == [
        "http://h/get?name=a.gz",
        "http://h/a.bin",
        "a?b=c.gz",
    ]
    assert paths.split("https://h/d/a.bin?sig=x/y") == ("https://h/d/", "a.bin")


def test_another_signature_is_the_same_file(store: Store) -> None:
    signed = [f"https://h/d/a.bin?X-Amz-Signature={text}" for text in ("abc", "def")]
    assert paths.identify_files(signed[:1], [5]) == paths.identify_files(signed[1:], [5])
    assert paths.identify_files(signed[:1], [5]) == paths.identify_files(["/local/a.bin"], [5])
    other = [f"https://h/get?id={number}" for number in (1, 2)]
    assert paths.identify_files(other[:1], [5]) != paths.identify_files(other[1:], [5])


def test_a_copy_is_found_again_under_another_signature(store: Store, tmp_path: pathlib.Path) -> None:
    one, other = (store.put(f"d/a.bin?X-Amz-Signature={text}", FIRST) for text in ("abc", "def"))
    changed = store.put("d/a.bin?X-Amz-Signature=ghi", SECOND)
    for url, first, fetches in ((one, 0, 1), (other, 0, 1), (changed, 1000, 2), (one, 0, 2)):
        assert first_tokens(tokens(url, cache=ShardCache(tmp_path))) == [first, first + 1, first + 2]
        assert sum("a.bin" in name for name in store.fetches) == fetches
    signed = [store.put(f"d/get?id={number}&Signature=x", FIRST) for number in (1, 2)]
    store.versions = False
    with ShardCache(tmp_path).open(signed[0]) as path, ShardCache(tmp_path).open(signed[1]) as other_path:
        assert path != other_path, "the query may be what distinguishes files of equal size"


def test_files_that_only_a_query_distinguishes_have_copies_of_their_own(
    store: Store, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler: Any = store.RequestHandlerClass
    head = handler.head

    def dated(self: Any, status: int, length: int, **headers: str) -> None:
        if headers.pop("ETag", None):  # a version that is the same for all files of an upload
            headers["Last_Modified"] = "Mon, 30 Nov 2026 12:00:00 GMT"
        head(self, status, length, **headers)

    monkeypatch.setattr(handler, "head", dated)
    for signature in ("abc", "def"):
        signed = [f"get?id={number}&Expires=60&Signature={signature}" for number in (1, 2)]
        urls = [store.put(name, content) for name, content in zip(signed, (FIRST, SECOND), strict=True)]
        source = tokens(urls, cache=ShardCache(tmp_path))
        assert source.read_batch([0, len(source) // 2])["tokens"][:, 0].tolist() == [0, 1000]
    assert len(list(tmp_path.glob("meshfeed_*"))) == 2
    for query in ("X-Amz-Date=1&X-Amz-Signature=s", "Policy=p&Signature=s&Key-Pair-Id=k", "sv=1&sr=b&se=2&sp=r&sig=s"):
        assert paths.without_signing(f"https://h/a?{query}") == "https://h/a"
        assert paths.without_signing(f"https://h/a?id=1&{query}&b=c") == "https://h/a?id=1&b=c"
    assert paths.without_signing("https://h/a?id=1&se=2") == "https://h/a?id=1&se=2"


def test_names_of_a_manifest_are_quoted_on_an_http_server(store: Store, tmp_path: pathlib.Path) -> None:
    names = ["p1.bin", "p%31.bin", "x#1.bin", "q?1.bin", "e%20f.bin", "ä b.bin"]
    for number, name in enumerate(names):
        (np.arange(10) + 100 * number).astype(np.uint16).tofile(tmp_path / name)
    make_manifest([str(tmp_path / name) for name in names], str(tmp_path / "manifest.json"), dtype=np.uint16)
    for quoted, name in zip(
        ["p1.bin", "p%2531.bin", "x%231.bin", "q%3F1.bin", "e%2520f.bin", "%C3%A4%20b.bin"], names, strict=True
    ):
        store.put(f"d/{quoted}", (tmp_path / name).read_bytes())
    source = tokens(store.put("d/manifest.json", (tmp_path / "manifest.json").read_bytes()))
    assert [source[number]["tokens"][0] for number in range(len(names))] == [100 * n for n in range(len(names))]
    with pytest.raises(meshfeed.SettingsError, match="an HTTP server only serves files") as error:
        make_manifest([str(tmp_path / "p1.bin")], "http://127.0.0.1:9/m.json", dtype=np.uint16)
    assert error.value.setting == "output"


def test_the_size_that_counts_is_that_of_the_copy(store: Store, tmp_path: pathlib.Path) -> None:
    large = store.put("zeros.bin.gz", gzip.compress(bytes(1_000_000)))
    with pytest.raises(meshfeed.SourceError, match="has 1,000,000 bytes unpacked and max_bytes=100,000 holds no file"):
        tokens(large, cache=ShardCache(tmp_path / "a", max_bytes=100_000))
    noise = gzip.compress(np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8).tobytes())
    cache = ShardCache(tmp_path / "b", max_bytes=10_000)  # less than the estimate
    assert len(tokens(store.put("noise.bin.gz", noise), cache=cache)) == 1999 // 9
    zeros = [store.put(f"z{number}.bin.gz", gzip.compress(bytes(60_000))) for number in range(3)]
    cache = ShardCache(tmp_path / "c", max_bytes=100_000)
    for url in zeros:  # each takes more than was reserved, and makes room
        tokens(url, cache=cache)
        assert cache.num_bytes() <= 100_000


def test_a_copy_whose_time_cannot_be_set_is_read(
    store: Store, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.put("a.bin", FIRST)

    def refused(*arguments: Any, **settings: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with ShardCache(tmp_path).open(url):
        pass
    monkeypatch.setattr(os, "utime", refused)
    assert first_tokens(tokens(url, cache=ShardCache(tmp_path))) == [0, 1, 2]


def test_an_expired_url_says_so_without_its_signature(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    handler: Any = store.RequestHandlerClass
    monkeypatch.setattr(handler, "_answer", lambda self, *, body: self.head(403, 0))
    with pytest.raises(meshfeed.SourceError, match=r"no permission to read .*a signed URL may have expired") as error:
        tokens(store.url(f"a.bin?{SIGNED}"))
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize("looking_up", [True, False])
def test_the_pause_that_a_busy_server_requests_is_kept(looking_up: bool) -> None:
    request: Any = SimpleNamespace(real_url="http://store/x")
    error: Exception = aiohttp.ClientResponseError(request, (), status=429, headers={"Retry-After": "7"})  # type: ignore[arg-type]
    if looking_up:  # what the client makes of any error
        error, error.__cause__ = FileNotFoundError("http://store/x"), error
    with pytest.raises(OSError, match="429") as caught, paths.remote_errors("http://store/x", "Tokens"):
        raise error
    assert caught.value.retry_after_seconds == 7  # type: ignore[attr-defined]


def test_errors_of_a_cache_leave_signatures_out(store: Store, tmp_path: pathlib.Path) -> None:
    cache = ShardCache(tmp_path, checksums={"a.bin": "md5:00"}, retry=Retry(attempts=1))
    with pytest.raises(meshfeed.CorruptDataError, match=r"a\.bin\?…: fetched 2,000 bytes with md5"):
        first_tokens(tokens(store.put(f"a.bin?{SIGNED}", FIRST), cache=cache))
    source = tokens(store.put(f"b.bin?{SIGNED}", FIRST), cache=cache)
    store.put(f"b.bin?{SIGNED}", SECOND)
    cache.renew([store.url(f"b.bin?{SIGNED}")], {})
    with pytest.raises(meshfeed.SourceError, match=r"b\.bin\?… has changed since the source was made"):
        first_tokens(source)


def test_the_index_of_a_new_source_is_that_of_its_tokens(store: Store, tmp_path: pathlib.Path) -> None:
    cache = ShardCache(tmp_path / "cache")
    for lengths in ([10, 30], [20, 20]):  # of the same sizes
        documents = [np.arange(length, dtype=np.uint16) for length in lengths]
        write_megatron(tmp_path / "a", [[document] for document in documents])
        for extension in ("bin", "idx"):
            store.put(f"a.{extension}", (tmp_path / f"a.{extension}").read_bytes())
        source = Tokens.documents(store.url("a.bin"), cache=cache)
        assert source.lengths().tolist() == lengths
        assert [record["tokens"].tolist() for record in source] == [document.tolist() for document in documents]


@pytest.mark.parametrize("name", ["a.parquet", "a.parquet.gz", "a.tar", "a.tar.gz"])
def test_copies_that_an_earlier_process_left_damaged_are_fetched_again(
    store: Store, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On a file system without attributes, and so without digests, only the format shows the damage."""

    def refused(*arguments: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refused)
    monkeypatch.setattr(os, "getxattr", refused)
    table = pa.table({"n": [1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet")
    write_tar(tmp_path / "a.tar", {"1.txt": b"one", "2.txt": b"two", "3.txt": b"three"})
    content = (tmp_path / name.removesuffix(".gz")).read_bytes()
    content = gzip.compress(content) if name.endswith(".gz") else content
    urls = [store.put(f"{number}-{name}", content) for number in range(2)]
    cache = tmp_path / "cache"

    def read() -> str:
        monkeypatch.setattr(parquet, "_decoded", parquet._DecodedGroups(1 << 20))  # as in another process
        opened = (Parquet if "parquet" in name else WebDataset)(urls, cache=ShardCache(cache))
        with contextlib.closing(opened) as source:
            return str(source.__getitems__(range(6)))

    wanted = read()
    for copy in cache.iterdir():
        if copy.name.endswith(".meshfeed-index"):
            copy.unlink()
        else:
            damaged = bytearray(copy.read_bytes())
            damaged[-40:] = bytes(byte ^ 255 for byte in damaged[-40:])
            copy.write_bytes(damaged)
    assert read() == wanted
