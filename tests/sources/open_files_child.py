"""Reads many more shards than the process may have files open, in every way; prints the name of each that worked."""

from __future__ import annotations

import os
import pathlib
import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import meshfeed
from meshfeed._src.reading.records import RecordReader, SourceReader
from meshfeed.sources import ArrayRecord, DecodeRaw, Mixture

LIMIT, RECORDS = 192, 4


def decode(record: bytes) -> dict[str, Any]:
    return {"x": np.frombuffer(record, np.int64)}


def rows(paths: list[str]) -> None:
    source = ArrayRecord(paths, decode_batch=DecodeRaw(np.int64))
    for seed in range(3):
        ids = np.random.default_rng(seed).permutation(len(source))
        assert (SourceReader(source).read(ids) == ids).all()


def library(paths: list[str]) -> None:
    """One after the other, through the library: what cannot be read directly."""
    from meshfeed._src.sources.array_record import readers as direct

    riegeli, direct.riegeli = direct.riegeli, None
    try:
        source = ArrayRecord(paths)
        source._pool = type(source._pool)()
        assert source.read_raw(np.arange(len(source))) == [np.int64(i).tobytes() for i in range(len(source))]
        source.close()
    finally:
        direct.riegeli = riegeli


def threads(paths: list[str]) -> None:
    failed: list[BaseException] = []

    def read() -> None:
        try:
            rows(paths)
        except BaseException as error:
            failed.append(error)

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not failed, failed


def cache(paths: list[str]) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in paths:
        memory.pipe_file(f"/{os.path.basename(path)}", pathlib.Path(path).read_bytes())
    urls = [f"memory://{os.path.basename(path)}" for path in paths]
    source = ArrayRecord(urls, decode_batch=DecodeRaw(np.int64), cache=meshfeed.ShardCache(sys.argv[1] + "/cache"))
    ids = np.random.default_rng(0).permutation(len(source))
    assert (SourceReader(source).read(ids) == ids).all()


def mixture(paths: list[str]) -> None:
    components = {path: ArrayRecord(path, decode=decode) for path in paths}
    mixed = Mixture(components, weights=dict.fromkeys(components, 1.0))
    ids = np.arange(len(paths), dtype=np.int64) << 48
    reader = RecordReader(mixed, seed=0, retry=meshfeed.Retry(attempts=1), bad_records=None)
    found = reader.read(ids, np.zeros(len(ids), np.int64)).tree["x"]
    assert (found[:, 0] == RECORDS * np.arange(len(paths))).all()


def grain(paths: list[str]) -> None:
    import grain as library

    from meshfeed._src.sources.grain.datasets import GrainRecords

    dataset = library.MapDataset.source(library.sources.ArrayRecordDataSource(paths))
    records = GrainRecords(dataset)
    assert list(records.__getitems__(range(len(records)))) == [np.int64(i).tobytes() for i in range(len(records))]


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    paths = sorted(map(str, folder.glob("shard-*")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ways: dict[str, Callable[[list[str]], None]] = {
        function.__name__: function for function in (rows, library, threads, cache, mixture, grain)
    }
    for name in sys.argv[2:]:
        try:
            ways[name](paths)
        except Exception as error:
            print(name, "failed:", repr(error)[:300], flush=True)
        else:
            print(name, "worked", flush=True)
        assert len(os.listdir("/proc/self/fd")) < LIMIT / 2, "half of the files are for the rest of the program"


if __name__ == "__main__":
    main()
