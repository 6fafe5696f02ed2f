"""What grants access to a store, a signature or a password in a URL, is in no message, log, note or report."""

from __future__ import annotations

import copy
import gzip
import json
import logging
import pathlib
import pickle
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import array_record_files
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_store import Store
from test_webdataset import write_tar
from token_files import write_llm_c

import meshfeed
from meshfeed._src.base.errors import Failure, reason_of, without_signatures
from meshfeed._src.base.settings import Retry
from meshfeed._src.convert.run import convert, run_here
from meshfeed._src.convert.writers import Settings
from meshfeed._src.reading.records import SourceReader
from meshfeed._src.sources.manifest import make_manifest
from meshfeed.sources import ArrayRecord, Parquet, TensorStore, Tokens, WebDataset

pytest.importorskip("aiohttp")
SIGNED = "X-Amz-Expires=60&X-Amz-Signature=SECRET"


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as server:
        yield server
        server.shutdown()


def array_record(path: pathlib.Path) -> None:
    array_record_files.write(path, [bytes([number]) * 3000 for number in range(40)], "group_size:1")


def parquet(path: pathlib.Path) -> None:
    rows = np.random.default_rng(0).integers(0, 1 << 60, 4000)
    pq.write_table(pa.table({"n": rows}), path, write_page_checksum=True)


def tar(path: pathlib.Path) -> None:
    write_tar(path, {f"{number}.txt": bytes(3000) for number in range(20)})


def tokens(path: pathlib.Path) -> None:
    write_llm_c(path, np.arange(4000, dtype=np.uint16))


Open = Callable[..., Any]
FORMATS: dict[str, tuple[Callable[[pathlib.Path], None], Open]] = {
    "array_record": (array_record, ArrayRecord),
    "parquet": (parquet, Parquet),
    "tar": (tar, WebDataset),
    "bin": (tokens, lambda url, cache=None: Tokens(url, 9, cache=cache)),
}


def damaged(content: bytes) -> dict[str, bytes]:
    half = len(content) // 2
    flipped = bytearray(content)
    flipped[half : half + 600] = bytes(byte ^ 255 for byte in flipped[half : half + 600])
    return {"cut": content[:half], "flipped": bytes(flipped), "other": b"x" * len(content), "empty": b""}


def texts(error: Exception) -> str:
    """All that is printed, stored or sent of an error."""
    exact, notes = Failure.exact(error), getattr(error, "__notes__", ())
    found = [error, repr(error), pickle.loads(pickle.dumps(error)), Failure.of(error), exact, exact.exception(), *notes]
    return "\n".join(map(str, [*found, reason_of(error)]))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_no_format_shows_a_signature(
    store: Store, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, name: str, cached: bool
) -> None:
    caplog.set_level(logging.DEBUG, "meshfeed")
    write, opens = FORMATS[name]
    write(tmp_path / f"a.{name}")
    whole = (tmp_path / f"a.{name}").read_bytes()
    found = []

    def error_of(url: str, cache: meshfeed.ShardCache | None) -> Exception | None:
        try:
            source = opens(url, cache=cache)
            SourceReader(source).read(np.arange(len(source)))
        except Exception as error:
            return error
        return None

    for kind, content in [*damaged(whole).items(), ("absent", None)]:
        url = store.url(f"{kind}.{name}?{SIGNED}")
        if content is not None:
            store.put(f"{kind}.{name}?{SIGNED}", content)
        error = error_of(url, meshfeed.ShardCache(tmp_path / kind, retry=Retry(attempts=1)) if cached else None)
        if error is not None:
            assert "SECRET" not in texts(error), kind
            found.append(kind)
    assert {"cut", "other", "empty", "absent"} <= set(found)
    if cached:
        packed = store.put(f"packed.{name}.gz?{SIGNED}", gzip.compress(whole)[:-20])
        with pytest.raises(meshfeed.CorruptDataError) as caught:
            opens(packed, cache=meshfeed.ShardCache(tmp_path / "p"))
    else:
        changed = f"changed.{name}?{SIGNED}"
        source = opens(store.put(changed, whole))
        store.put(changed, whole + whole[:1])
        with pytest.raises(meshfeed.SourceError, match="has changed since the source was made") as caught:
            SourceReader(source).read(np.arange(len(source)))
    assert "SECRET" not in texts(caught.value) + caplog.text


def test_a_decoder_that_fails_does_not_show_a_signature(store: Store, tmp_path: pathlib.Path) -> None:
    def fail(record: bytes) -> None:
        raise RuntimeError("no")

    array_record(tmp_path / "a.array_record")
    url = store.put(f"a.array_record?{SIGNED}", (tmp_path / "a.array_record").read_bytes())
    source = ArrayRecord(url, decode=fail)
    with pytest.raises(RuntimeError) as error:
        SourceReader(source).read(np.arange(2))
    assert "a.array_record?…" in texts(error.value)
    assert "SECRET" not in texts(error.value)


def test_conversions_and_manifests_do_not_show_a_signature(
    store: Store, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "meshfeed")
    for name in ("jsonl", "csv", "parquet", "tfrecord", "tar", "jsonl.gz", "odd"):
        url = store.put(f"a.{name}?{SIGNED}", b'{"a": 1},"\n{"a": "x", }\xff\n')
        with pytest.raises(meshfeed.MeshfeedError) as error:
            convert([url], str(tmp_path / "out"), Settings(), run_here)
        assert "SECRET" not in texts(error.value), name
    with pytest.raises(meshfeed.MeshfeedError) as error:
        make_manifest([store.url(f"a.tar?{SIGNED}"), store.url(f"a.parquet?{SIGNED}")])
    assert "SECRET" not in texts(error.value) + caplog.text


def test_an_array_under_another_signature_is_the_same(store: Store, tmp_path: pathlib.Path) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/a.zarr/", "metadata": {"shape": [4, 2], "dtype": "<i4"}}
    tensorstore.open(spec, create=True).result()[...] = np.arange(1, 9, dtype=np.int32).reshape(4, 2)
    found = []
    for signature in ("SECRET", "OTHER"):
        for path in (tmp_path / "a.zarr").iterdir():
            store.put(f"a.zarr/{path.name}?sv=1&sig={signature}", path.read_bytes())
        for slash in ("", "/"):
            source = TensorStore(store.url(f"a.zarr{slash}?sv=1&sig={signature}"))
            assert source[3].tolist() == [7, 8]
            found.append((source.fingerprint(), source.file_of(0)))
    assert found == [found[0]] * 4
    assert "SECRET" not in str(found)


def test_the_index_of_an_archive_is_found_under_another_signature(
    store: Store, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tar(tmp_path / "a.tar")
    sources = [
        WebDataset(store.put(f"a.tar?X-Amz-Signature={text}", (tmp_path / "a.tar").read_bytes()))
        for text in ("SECRET", "OTHER")
    ]
    assert sources[0][3] == sources[1][3]
    (index,) = tmp_path.glob("meshfeed-*/*")
    assert "SECRET" not in str(np.load(index.open("rb"))["stamp"])


def test_what_grants_access_is_left_out_of_text() -> None:
    assert without_signatures("ftp://me:pass@host/a, x://a@b/c") == "ftp://…@host/a, x://a@b/c"
    text = "https://me:pass@h/a.tar?sig=abc/d%3D: record 3; see (http://h/x?a=b) or http://h/?, and what?"
    assert without_signatures(text) == "https://…@h/a.tar?…: record 3; see (http://h/x?…) or http://h/?, and what?"
    assert without_signatures(without_signatures(text)) == without_signatures(text)
    error = meshfeed.StateMismatchError("f", "http://h/a?b=SECRET", 2, "Use it.")
    assert "SECRET" not in texts(error)
    assert copy.copy(error).saved == "http://h/a?b=SECRET"
    assert json.loads(json.dumps(Failure.exact(error).to_json()))
