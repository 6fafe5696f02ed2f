"""Inputs at URLs: the same bytes as from local files, from an HTTP server that cuts connections and from S3."""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Iterator

import formats
import pytest

import meshfeed
from meshfeed._src.convert.run import convert, run_here, run_in_workers
from meshfeed._src.convert.writers import Settings

sys.path.append(str(pathlib.Path(__file__).parents[1] / "sources"))
from http_store import Store

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as server:
        yield server
        server.shutdown()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    boto3 = pytest.importorskip("boto3")
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    for name, value in {"ENDPOINT_URL_S3": endpoint, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="corpus")
    yield "s3://corpus"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("compressed", ["b.jsonl.gz?signature=x/y", "get?name=b.jsonl.gz"])
def test_over_http(compressed: str, store: Store, tmp_path: pathlib.Path) -> None:
    local = formats.jsonl(tmp_path)
    convert(local, str(tmp_path / "whole"), Settings(shards=3), run_here)
    names = ["a.jsonl", compressed]
    urls = [store.put(name, pathlib.Path(path).read_bytes()) for name, path in zip(names, local, strict=True)]
    store.broken[("a.jsonl", 0)] = "cut"
    result = convert(urls, str(tmp_path / "out"), Settings(shards=3), functools.partial(run_in_workers, num_workers=2))
    assert not store.broken
    assert result.num_records == formats.COUNT
    assert formats.content_of(tmp_path / "out").keys() == formats.content_of(tmp_path / "whole").keys()
    for name, content in formats.content_of(tmp_path / "whole").items():
        assert content == formats.content_of(tmp_path / "out")[name] or name == "manifest.json"


def test_errors_name_the_url(store: Store, tmp_path: pathlib.Path) -> None:
    out = str(tmp_path / "out")
    url = store.put("a.jsonl", b'{"n": 1}\n{"n": }\n')
    with pytest.raises(meshfeed.CorruptDataError) as caught:
        convert([url], out, Settings(), run_here)
    assert str(caught.value).startswith(f"{url}:2: JSON parse error: Invalid value, in the line ")
    with pytest.raises(meshfeed.SourceError, match=r"there is no file 'http://.*/b.jsonl'. Check the URL"):
        convert([store.url("b.jsonl")], out, Settings(), run_here)
    with pytest.raises(meshfeed.SourceError, match=r"the format of http://.*/c.data is unknown"):
        convert([store.put("c.data", b"x")], out, Settings(), run_here)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_files_and_folders_in_s3(bucket: str, tmp_path: pathlib.Path) -> None:
    import fsspec

    (tmp_path / "tables").mkdir()
    formats.parquet(tmp_path / "tables")
    formats.images(tmp_path)
    formats.huggingface(tmp_path)
    mds = pathlib.Path(__file__).parents[1] / "data" / "formats" / "mds_zstd"
    files = fsspec.filesystem("s3")
    for name, given in (("tables", "tables/*.parquet"), ("images", "images"), ("hf", "hf/"), ("mds", "mds/index.json")):
        folder = mds if name == "mds" else tmp_path / name
        files.put(str(folder), f"corpus/{name}", recursive=True)
        convert([str(folder)], str(tmp_path / f"{name}-local"), Settings(shards=2), run_here)
        convert([f"{bucket}/{given}"], str(tmp_path / f"{name}-out"), Settings(shards=2), run_here)
        found, wanted = formats.content_of(tmp_path / f"{name}-out"), formats.content_of(tmp_path / f"{name}-local")
        assert len(wanted) == 3
        assert {**found, "manifest.json": b""} == {**wanted, "manifest.json": b""}
    again = convert([f"{bucket}/tables"], str(tmp_path / "tables-out"), Settings(shards=2), run_here)
    assert again.was_complete


def test_a_download_survives_an_interrupt(store: Store, tmp_path: pathlib.Path) -> None:
    local = formats.jsonl(tmp_path)
    urls = [store.put(pathlib.Path(path).name, pathlib.Path(path).read_bytes()) for path in local]
    out = str(tmp_path / "out")

    def interrupted(directory: str, phase: str, numbers: object) -> None:
        run_here(directory, "scan", [0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(urls, out, Settings(), interrupted)
    assert convert(urls, out, Settings(), run_here).num_records == formats.COUNT
    assert sorted(store.fetches) == ["a.jsonl", "b.jsonl.gz"]
    assert sorted(formats.content_of(tmp_path / "out")) == ["data-00000-of-00001.array_record", "manifest.json"]


def test_an_interrupt_while_decompressing_keeps_the_download(
    store: Store, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, local = formats.jsonl(tmp_path)
    url = store.put("b.jsonl.gz", pathlib.Path(local).read_bytes())

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("meshfeed._src.convert.job.decompress", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert([url], str(tmp_path / "out"), Settings(), run_here)
    assert convert([url], str(tmp_path / "out"), Settings(), run_here).num_records == formats.COUNT - 30
    assert store.fetches == ["b.jsonl.gz"]
