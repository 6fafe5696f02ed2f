"""The four records that identify a remote source are read by range: their shards are not fetched for that."""

from __future__ import annotations

import json
import pathlib
import tarfile
from collections.abc import Callable
from io import BytesIO
from typing import Any

import array_record_files
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_store import Store
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.reading.identity import source_identity
from meshfeed.sources import MDS, ArrayRecord, Parquet, Tokens, WebDataset

pytest.importorskip("aiohttp")
SHARDS, ROWS, WIDTH = 6, 64, 16384


@pytest.fixture
def store() -> Store:
    return Store()


def _rows(part: int) -> list[bytes]:
    rng = np.random.default_rng(part)
    return [rng.integers(0, 255, WIDTH, np.uint8).tobytes() for _ in range(ROWS)]


def write_array_record(folder: pathlib.Path, part: int) -> str:
    array_record_files.write(folder / f"{part}.array_record", _rows(part), "group_size:1,uncompressed")
    return f"{part}.array_record"


def write_parquet(folder: pathlib.Path, part: int) -> str:
    values = np.frombuffer(b"".join(_rows(part)), np.uint8).reshape(ROWS, WIDTH)
    pq.write_table(pa.table({"x": list(values)}), folder / f"{part}.parquet", row_group_size=8, use_dictionary=False)
    return f"{part}.parquet"


def write_mds(folder: pathlib.Path, part: int) -> str:
    samples = _rows(part)
    head = 4 * (ROWS + 2)
    offsets = head + WIDTH * np.arange(ROWS + 1)
    name = f"shard.{part:05}.mds"
    content = np.array([ROWS, *offsets], "<u4").tobytes() + b"".join(samples)
    (folder / name).write_bytes(content)
    index = folder / "index.json"
    shards = json.loads(index.read_text())["shards"] if index.exists() else []
    columns = {"column_names": ["x"], "column_encodings": ["bytes"], "column_sizes": [WIDTH]}
    raw = {"basename": name, "bytes": len(content), "hashes": {}}
    shards.append({"version": 2, "format": "mds", "samples": ROWS, "raw_data": raw, "zip_data": None, "compression": None,
                   "hashes": [], "size_limit": None, **columns})  # fmt: skip
    index.write_text(json.dumps({"version": 2, "shards": shards}))
    return name


def write_tar(folder: pathlib.Path, part: int) -> str:
    with tarfile.open(folder / f"{part}.tar", "w") as tar:
        for number, row in enumerate(_rows(part)):
            member = tarfile.TarInfo(f"{number:05}.bin")
            member.size = len(row)
            tar.addfile(member, BytesIO(row))
    return f"{part}.tar"


def write_tokens(folder: pathlib.Path, part: int) -> str:
    np.random.default_rng(part).integers(0, 60_000, ROWS * WIDTH // 2).astype(np.uint16).tofile(folder / f"{part}.bin")
    return f"{part}.bin"


FORMATS: dict[str, tuple[Callable[[pathlib.Path, int], str], Callable[..., Any]]] = {
    "array_record": (write_array_record, ArrayRecord),
    "parquet": (write_parquet, Parquet),
    "mds": (write_mds, MDS),
    "webdataset": (write_tar, WebDataset),
    "tokens": (write_tokens, lambda paths, **more: Tokens(paths, sequence_length=128, dtype=np.uint16, **more)),
}


@pytest.mark.parametrize("form", FORMATS)
def test_the_probe_fetches_no_shard(form: str, store: Store, tmp_path: pathlib.Path) -> None:
    write, source_of = FORMATS[form]
    folder = tmp_path / "data"
    folder.mkdir()
    names = [write(folder, part) for part in range(SHARDS)]
    urls = [store.put(f"data/{name}", (folder / name).read_bytes()) for name in names]
    if form == "mds":
        store.put("data/index.json", (folder / "index.json").read_bytes())
    whole = len(store.files[f"data/{names[0]}"])
    paths = store.url("data/") if form == "mds" else urls
    local = source_of(str(folder) if form == "mds" else [str(folder / name) for name in names])
    cache = meshfeed.ShardCache(tmp_path / "cache", max_bytes=2 * whole)
    if form == "webdataset":  # without an index, each tar is fetched once for its headers
        source_of(paths, cache=cache)
    source = source_of(paths, cache=cache)
    store.requests.clear()
    assert source_identity(source) == source_identity(local)
    assert not [name for name, _, sent in store.requests if sent >= whole], store.requests
    assert sum(sent for _, _, sent in store.requests) < 4 * whole * 0.6
    assert form == "webdataset" or cache.num_bytes() == 0
    source[0]
    source[SHARDS * 20]
    store.requests.clear()
    assert source_identity(source) == source_identity(local), "also while some of the shards are cached"


def test_a_shard_that_changed_since_the_source_was_made_is_noticed(
    store: Store, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.joinpath("data").mkdir()
    names = [write_array_record(tmp_path / "data", part) for part in range(2)]
    urls = [store.put(name, (tmp_path / "data" / name).read_bytes()) for name in names]
    source = ArrayRecord(urls, cache=meshfeed.ShardCache(tmp_path / "cache"))
    store.files[names[0]] = store.files[names[1]]  # as large, and whole
    source_identity(source)
    assert "has changed since the source was made" in caplog.text


def test_a_feed_fetches_each_shard_once(store: Store, tmp_path: pathlib.Path) -> None:
    tmp_path.joinpath("data").mkdir()
    names = [write_tokens(tmp_path / "data", part) for part in range(SHARDS)]
    urls = [store.put(name, (tmp_path / "data" / name).read_bytes()) for name in names]
    whole = len(store.files[names[0]])
    cache = meshfeed.ShardCache(tmp_path / "cache", max_bytes=2 * whole)
    source = Tokens(urls, 128, dtype=np.uint16, cache=cache)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with meshfeed.Feed(source, mesh, global_batch_size=8, shuffle=False, prefetch=1) as feed:
        for _ in feed:
            pass
    assert cache.stats().fetched == SHARDS
    # Not the number of whole requests: after one that took more than half a second, blocks are smaller than a shard.
    assert sum(sent for _, _, sent in store.requests) < (SHARDS + 0.5) * whole
