"""Remote files without a cache: records are read as byte ranges."""

from __future__ import annotations

import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import array_record_files
import fsspec
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_files import FOLDER
from http_store import Store
from test_webdataset import write_tar
from token_files import write_llm_c, write_megatron

import meshfeed
from meshfeed import CorruptDataError, SettingsError, SourceError
from meshfeed._src.base.settings import Retry
from meshfeed._src.reading.identity import digest_tree, source_identity
from meshfeed._src.sources.files import direct, tar
from meshfeed._src.sources.files.paths import stored_file
from meshfeed._src.sources.manifest import make_manifest
from meshfeed.sources import MDS, ArrayRecord, DecodeRaw, Parquet, Tokens, WebDataset

pytest.importorskip("aiohttp")


@pytest.fixture
def store() -> Store:
    return Store()


def upload(store: Store, folder: pathlib.Path, pattern: str) -> list[str]:
    return [store.put(path.name, path.read_bytes()) for path in sorted(folder.glob(pattern))]


def same(local: Any, remote: Any) -> None:
    """The same records one by one, in batches and in a copy, and states carry over."""
    assert source_identity(remote) == source_identity(local)
    assert digest_tree(list(remote)) == digest_tree(list(local))
    ids = np.random.default_rng(0).integers(0, len(local), 40).tolist()
    copy = pickle.loads(pickle.dumps(remote))
    assert digest_tree(copy.__getitems__(ids)) == digest_tree(local.__getitems__(ids))


def write_records(folder: pathlib.Path, options: str = "group_size:1") -> None:
    rng = np.random.default_rng(1)
    for part in range(3):
        records = [rng.integers(0, 255, 3000, np.uint8).tobytes() for _ in range(200 + part)]
        array_record_files.write(folder / f"{part}.array_record", records, options)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["group_size:1", "group_size:1,uncompressed"])
def test_array_record(store: Store, tmp_path: pathlib.Path, options: str) -> None:
    write_records(tmp_path, options)
    urls, local = upload(store, tmp_path, "*.array_record"), ArrayRecord(f"{tmp_path}/*.array_record")
    same(local, ArrayRecord(urls))
    rows = ArrayRecord(urls, decode_batch=DecodeRaw(np.uint8, 3000)).read_rows([0, 500, 7, 7])
    assert rows is not None
    assert [row.tobytes() for row in rows] == local.read_raw([0, 500, 7, 7])
    make_manifest(f"{tmp_path}/*.array_record")
    store.put("manifest.json", (tmp_path / "manifest.json").read_bytes())
    same(local, ArrayRecord(store.url("manifest.json")))

    damaged = bytearray(store.files["1.array_record"])
    damaged[100_000] ^= 1
    store.put("1.array_record", bytes(damaged))
    with pytest.raises(CorruptDataError, match=r"1.array_record: record 2\d\d is damaged"):
        list(ArrayRecord(urls))


def test_array_record_that_needs_a_cache(store: Store, tmp_path: pathlib.Path) -> None:
    write_records(tmp_path, "group_size:4")
    urls = upload(store, tmp_path, "*.array_record")
    with pytest.raises(SettingsError, match=r"0.array_record' and no cache, and the file has 4 records per chunk"):
        ArrayRecord(urls)
    make_manifest(urls, f"{tmp_path}/manifest.json")
    with pytest.raises(SettingsError, match="has 4 records per chunk"):
        ArrayRecord(f"{tmp_path}/manifest.json")
    write_records(tmp_path)
    with pytest.raises(SettingsError, match="local files and URLs, and no cache"):
        ArrayRecord([f"{tmp_path}/0.array_record", *upload(store, tmp_path, "1.*")])


def test_mds(store: Store) -> None:
    upload(store, FOLDER / "mds", "*")
    local, remote = MDS(FOLDER / "mds"), MDS(store.url("index.json"))
    assert source_identity(remote) == source_identity(local)
    assert repr(list(remote)) == repr(list(local))


@pytest.mark.parametrize("with_index", [True, False])
def test_webdataset(store: Store, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, with_index: bool) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    folder = pathlib.Path(shutil.copytree(FOLDER / "tar", tmp_path / "tar"))
    local = WebDataset(f"{folder}/shard-*.tar")
    urls = upload(store, folder, "shard-*.tar")
    if with_index:
        upload(store, folder, "*.meshfeed-index")
    scanned: list[str] = []
    scan = tar.scan
    monkeypatch.setattr(tar, "scan", lambda archive, path: (scanned.append(path), scan(archive, path))[1])
    remote = WebDataset(urls)
    assert sorted(scanned) == ([] if with_index else urls)
    same(local, remote)
    (private,) = (tmp_path / "temporary").iterdir()
    assert (private.stat().st_mode & 0o777, len(list(private.iterdir()))) == (0o700, 2)
    assert len(WebDataset(urls)) == len(local)  # from the saved indexes
    assert len(scanned) == 0 if with_index else 2


def test_an_index_that_is_not_the_archives_is_not_used(
    store: Store, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    names = {"old": ["a.x", "b.x", "c.x", "d.x"], "new": ["a.x", "bb.x", "c.y", "d.x"], "end": ["p.x", "q.x", "r.x"]}
    sizes = {"old": (9, 9, 9, 9), "new": (9, 600, 9, 9), "end": (9, 9, 9)}
    for name in names:
        files = {file: file.encode() * size for file, size in zip(names[name], sizes[name], strict=True)}
        write_tar(tmp_path / f"{name}.tar", files)
    assert len({(tmp_path / f"{name}.tar").stat().st_size for name in names}) == 1  # padded to 10,240 bytes
    WebDataset(tmp_path / "old.tar")
    store.put("x.tar.meshfeed-index", (tmp_path / "old.tar.meshfeed-index").read_bytes())
    # The end of the archive differs: the headers are read. They are the same at both ends: the record says so.
    for name in ("end", "new"):
        url = store.put("x.tar", (tmp_path / f"{name}.tar").read_bytes())
        source = WebDataset(url)
        assert source.read_raw(range(len(source))) == WebDataset(tmp_path / f"{name}.tar").read_raw(range(len(source)))
    # The folder of another user, or one that others can write, is not trusted.
    (private,) = (tmp_path / "temporary").iterdir()
    private.chmod(0o777)
    count = len(list(private.iterdir()))
    store.put("x.tar", (tmp_path / "old.tar").read_bytes())
    assert WebDataset(store.url("x.tar"))[3] == {"__key__": "d", "x": b"d.x" * 9}
    assert len(list(private.iterdir())) == count
    private.chmod(0o700)
    shutil.rmtree(private)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    private.symlink_to(tmp_path / "elsewhere")
    assert WebDataset(store.url("x.tar"))[3]["__key__"] == "d"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_tokens(store: Store, tmp_path: pathlib.Path) -> None:
    write_llm_c(tmp_path / "0.bin", np.arange(5000, dtype=np.uint16))
    write_megatron(tmp_path / "1", [[np.arange(100 + i, dtype=np.uint16)] for i in range(20)])
    np.save(tmp_path / "2.npy", np.arange(3000, dtype=np.int64))
    upload(store, tmp_path, "*")
    names = ["0.bin", "1.bin", "2.npy"]
    local, remote = (Tokens([where(name) for name in names], 64) for where in (lambda n: tmp_path / n, store.url))
    same(local, remote)
    mixed = Tokens([tmp_path / "0.bin", store.url("1.bin"), store.url("2.npy")], 64)
    same(local, mixed)
    documents = [Tokens.documents(where, eod=7) for where in (tmp_path / "1.bin", store.url("1.bin"))]
    assert digest_tree(list(documents[0])) == digest_tree(list(documents[1]))


def test_parquet(store: Store, tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    for part, compression in enumerate(["snappy", "zstd", "none"]):
        rows = 500 + part
        table = pa.table({
            "x": rng.integers(0, 1000, rows), "xx.y": rng.random(rows), "text": [f"row {i % 7}" for i in range(rows)],
            "list": rng.random((rows, 4)).tolist(), "struct": [{"a": i, "b": [i]} for i in range(rows)],
        })  # fmt: skip
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=100, compression=compression)
    urls = upload(store, tmp_path, "*.parquet")
    for columns in (None, ["struct", "xx.y"]):
        same(*(Parquet(where, columns) for where in (f"{tmp_path}/*.parquet", urls)))
    local, remote = Parquet(f"{tmp_path}/*.parquet", ["list", "x"]), Parquet(urls, ["list", "x"])
    store.requests.clear()
    assert digest_tree(remote.read_batch([0, 1300, 7, 501, 130])) == digest_tree(
        local.read_batch([0, 1300, 7, 501, 130])
    )
    ranges = [request for request in store.requests if request[1] + request[2] < len(store.files[request[0]])]
    assert len(ranges) == 4  # row groups; of each, the columns are joined
    make_manifest(f"{tmp_path}/*.parquet")
    store.put("manifest.json", (tmp_path / "manifest.json").read_bytes())
    same(local, Parquet(store.url("manifest.json"), ["list", "x"]))

    store.files["2.parquet"] = store.files["2.parquet"].replace(b"row 3", b"row 9")
    with pytest.raises(SourceError, match=r"/2.parquet has changed since the source was made"):
        remote[1100]
    damaged = bytearray(store.files["0.parquet"])
    damaged[4:300] = bytes(296)
    del store.files["manifest.json"]
    store.put("0.parquet", bytes(damaged))
    with pytest.raises(CorruptDataError, match=r"record 0: http.*/0.parquet is no intact Parquet file"):
        Parquet(urls)[0]


def test_requests_are_joined_bounded_and_retried_one_by_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.random.default_rng(0).integers(0, 255, 10 << 20, np.uint8).tobytes()
    url = store.put("a", content)
    monkeypatch.setattr(direct, "_RETRY", Retry(attempts=4, initial_seconds=0.001, max_seconds=0.001))

    def read(starts: list[int], size: int) -> int:
        """Reads, and returns the number of requests."""
        store.requests.clear()
        file = direct.RemoteBytes(url, len(content), "", "test")
        ranges = [direct.ByteRange(file, start, start + size) for start in starts]
        assert direct.read_ranges(ranges) == [content[start : start + size] for start in starts]
        return len(store.requests)

    assert read([3 << 20, 0, 100, 50, 40_000], 60) == 2
    assert read([0, 0], 0) == 0
    assert read(list(range(0, 10 << 20, 1 << 20)), 1 << 20) == 2  # joined up to 8 MB
    fsspec.filesystem("memory").pipe_file("/other", content[:100])
    files = [direct.RemoteBytes("memory://other", 100, "", "test"), direct.RemoteBytes(url, len(content), "", "test")]
    with monkeypatch.context() as patch:
        patch.setattr(direct, "_RETRY", Retry(attempts=1))
        assert direct.read_ranges([direct.ByteRange(file, 5, 9) for file in files]) == [content[5:9]] * 2
    monkeypatch.setattr(direct, "_IN_FLIGHT_BYTES", 100)
    assert read([0, 1 << 20, 2 << 20], 60) == 3
    monkeypatch.undo()
    monkeypatch.setattr(direct, "_RETRY", Retry(attempts=4, initial_seconds=0.001, max_seconds=0.001))
    store.broken = {("a", 1 << 20): "cut", ("a", 3 << 20): "cut"}
    assert read([part << 20 for part in range(5)], 200) == 7  # only what failed is requested again
    store.ranges = False  # a server that sends the whole file
    assert read([1 << 20], 10) == 1
    with pytest.raises(SourceError, match=r"there is no file .*gone"):
        direct.RemoteBytes(store.url("gone"), 10, "", "test").read(0, 5)


class Dead(dict[Any, str]):
    """Every request is answered with 503, and counted."""

    requests = 0

    def pop(self, *args: object) -> str:
        self.requests += 1
        return "busy"


@pytest.mark.parametrize(("attempts", "requests"), [(1, 4), (4, 4), (5, 8)])
def test_a_dead_store_is_tried_as_often_as_the_feed_sets(
    store: Store, monkeypatch: pytest.MonkeyPatch, attempts: int, requests: int
) -> None:
    monkeypatch.setattr(direct, "_RETRY", Retry(4, 0, 0))
    store.put("0.bin", np.arange(5000, dtype=np.uint16).tobytes())
    source = Tokens(store.url("0.bin"), 64, dtype=np.uint16)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    settings: dict[str, Any] = {"num_threads": 1, "prefetch": 0, "retry": Retry(attempts, 0, 0)}
    with meshfeed.Feed(source, mesh, global_batch_size=8, **settings) as feed:
        next(feed)
        store.broken = dead = Dead()
        with pytest.raises(OSError, match=r"0\.bin"):
            next(feed)
    assert dead.requests == requests


def changed(store: Store, name: str) -> None:
    """Replaces a file by one of the same size, which can be read too."""
    at = len(store.files[name].rstrip(b"\0")) - 1 if name.endswith(".tar") else -1
    content = bytearray(store.files[name])
    content[at] ^= 1
    store.put(name, bytes(content))


def test_a_file_that_changes_under_the_run_is_an_error(store: Store, tmp_path: pathlib.Path) -> None:
    write_records(tmp_path)
    make_manifest(f"{tmp_path}/*.array_record")
    write_llm_c(tmp_path / "0.bin", np.arange(5000, dtype=np.uint16))
    upload(store, tmp_path, "*.*")
    upload(store, FOLDER / "mds", "*")
    upload(store, FOLDER / "tar", "shard-*")
    tar = next(name for name in store.files if name.endswith(".tar"))
    shard = next(name for name in store.files if name.endswith(".mds"))
    sources = {
        "0.array_record": lambda: ArrayRecord(store.url("0.array_record")),
        "1.array_record": lambda: ArrayRecord(store.url("manifest.json")),
        "0.bin": lambda: Tokens(store.url("0.bin"), 64),
        shard: lambda: MDS(store.url("index.json")),
        tar: lambda: WebDataset(store.url(tar)),
    }
    for name, make in sources.items():
        source, first = make(), 200 * name.startswith("1")
        len(source), source[first]
        changed(store, name)
        for _ in range(2):
            with pytest.raises(SourceError, match=rf"/{name} has changed since .*: .*ETag.* then, .* now"):
                source[first + 1]
        len(make()), make()[first]

    source = ArrayRecord(store.url("manifest.json"))
    store.files["2.array_record"] += b"1"
    with pytest.raises(
        SourceError, match=r"2.array_record has changed since the manifest .* was written: .* now. Write"
    ):
        source[500]


def test_an_answer_for_another_range_is_not_taken_for_this_one(
    store: Store, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    content = np.random.default_rng(0).bytes(3 << 20)
    url = store.put("x", content)
    file, _ = direct.identify(url, None, source="test")
    store.shifted = 2  # retried
    assert file.read(5, 90) == content[5:90]
    assert store.shifted == 0
    store.shifted = 1 << 30
    retry = Retry(attempts=2, initial_seconds=0.01)
    monkeypatch.setattr(direct, "_RETRY", retry)
    with pytest.raises(OSError, match=r"/x: bytes 6 to 91 came for the range \[5, 90\)"):
        file.read(5, 90)
    cache = meshfeed.ShardCache(tmp_path, retry=retry)
    cache._downloads._block_bytes = 1 << 20
    with pytest.raises(OSError, match=r"bytes 1 to 1,048,577 came for the range \[0, 1,048,576\)"), cache.open(url):
        pass
    store.shifted = 1
    with cache.open(url) as copy:
        assert copy.read_bytes() == content


def test_a_manifest_with_wrong_numbers(store: Store, tmp_path: pathlib.Path) -> None:
    write_records(tmp_path)
    pq.write_table(pa.table({"x": np.arange(100)}), tmp_path / "0.parquet")
    upload(store, tmp_path, "*.*")
    for name, make in {"0.array_record": ArrayRecord, "0.parquet": Parquet}.items():
        manifest = make_manifest(f"{tmp_path}/{name}")
        content = pathlib.Path(manifest.path).read_text()
        store.put("manifest.json", content.replace(f", {manifest.files[0].num_records}, ", ", 99, ").encode())
        with pytest.raises(SourceError, match=rf"file .*/{name} has changed since the manifest .*: 99 r.* now. Write"):
            make(store.url("manifest.json"))[0]


def test_stores_whose_answers_carry_no_version_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_LOOKUP_SECONDS", 0.0)
    files = fsspec.filesystem("memory")
    files.pipe_file("/changing", bytes(100))
    file, version = direct.identify("memory://changing", None, source="test")
    assert file.read(3, 5) == bytes(2)
    assert version.startswith("created=")
    files.pipe_file("/changing", bytes(100))
    with pytest.raises(SourceError, match=r"test: memory://changing has changed since .* then, 100 bytes .* now"):
        file.read(3, 5)


def test_a_look_up_that_reports_no_size_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers report the size with a range of bytes only."""
    monkeypatch.setattr(direct.file_paths, "file_info", lambda *_, **__: {"size": None, "type": "file", "ETag": '"a"'})
    direct.RemoteBytes("https://test/x", 100, 'ETag="a"', "test").look_up()


def test_what_a_server_may_do(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_RETRY", Retry(attempts=3, initial_seconds=0.001, max_seconds=0.001))
    monkeypatch.setattr(direct, "_SILENT_SECONDS", 0.2)
    direct._session_options.cache_clear()
    fsspec.filesystem("http").clear_instance_cache()
    try:
        content = bytes(range(256)) * 10
        file = direct.RemoteBytes(store.put("a", content), len(content), "", "test")
        store.hold.clear()
        store.broken = {("a", 100): "stall"}  # after the header and half of the body
        assert file.read(100, 200) == content[100:200]
        assert not store.broken

        pauses: list[float] = []
        monkeypatch.setattr(direct, "_RETRY", Retry(attempts=3, initial_seconds=0.001, max_seconds=30))
        monkeypatch.setattr("meshfeed._src.base.retry.time.sleep", pauses.append)
        store.broken = {("a", 100): "busy"}
        assert file.read(100, 200) == content[100:200]
        assert pauses == [7.0]
        store.files["a"] = content[:150]
        with pytest.raises(
            SourceError, match=r"/a has changed since .* 2,560 bytes \(ETag.* then, 150 bytes \(ETag.* now"
        ):
            file.read(200, 210)
    finally:
        direct._session_options.cache_clear()
        fsspec.filesystem("http").clear_instance_cache()
        store.hold.set()


@pytest.mark.slow
def test_s3(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    s3 = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    s3.start()
    try:
        host, port = s3.get_host_and_port()
        for name, value in {"key": "a", "secret": "b", "endpoint_url": f"http://{host}:{port}"}.items():
            monkeypatch.setitem(fsspec.config.conf.setdefault("s3", {}), name, value)
        files = fsspec.filesystem("s3")
        files.mkdir("direct")
        write_records(tmp_path)
        for path in tmp_path.iterdir():
            files.put_file(str(path), f"direct/{path.name}")
        with_part = direct._look_up_with("s3://direct/1.array_record", "test", slice(-100, None))
        assert with_part is not None
        assert with_part.file == stored_file(files.info("direct/1.array_record"))
        assert with_part.content[-100:] == (tmp_path / "1.array_record").read_bytes()[-100:]
        source = ArrayRecord("s3://direct/*.array_record")
        same(ArrayRecord(f"{tmp_path}/*.array_record"), source)
        other = fsspec.filesystem(
            "s3", skip_instance_cache=True
        )  # another process, which the listing here does not see
        other.pipe_file("direct/1.array_record", (tmp_path / "0.array_record").read_bytes())
        with pytest.raises(SourceError, match=r"s3://direct/1.array_record has changed since the source was made"):
            source[205]
        assert ArrayRecord("s3://direct/*.array_record")[205] == source[5]
    finally:
        s3.stop()
        fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.slow
def test_google_cloud_storage() -> None:
    for library in ("gcp_storage_emulator", "gcsfs"):
        pytest.importorskip(library)
    environment = {**os.environ, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}
    child = subprocess.run(
        [sys.executable, str(pathlib.Path(__file__).parent / "gs_child.py")],
        env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "test: gs://bucket/x has changed since the source was made: 100 bytes (generation=" in child.stdout
