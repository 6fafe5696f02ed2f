"""ArrayRecord: thousand records/s of every way to read, and batches/s of a tokenised LM.

Rounds are interleaved (every way once, in turning order) and the figures are medians: absolute times of a shared
machine do not hold, ratios within one run do. Beside the wall clock stands the CPU time of all threads, which a busy
neighbour changes less. The page cache holds the files. (Not named array_record.py: it would hide the package.)
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from array_record.python import array_record_data_source, array_record_module

from benchmarks._measure import Table, Way, main, rates, take_turns
from meshfeed._src.sources.array_record.source import ArrayRecord

LM_TOKENS = 2048
LM_BATCH = 64
READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


def write(path: str, num_records: int, num_bytes: int, options: str) -> str:
    """A file of half-compressible records."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 16, (512, num_bytes), np.uint8)
    writer = array_record_module.ArrayRecordWriter(path, options)
    for record in range(num_records):
        writer.write(noise[record % 512].tobytes())
    writer.close()
    return path


def open_reader(path: str) -> Any:
    return array_record_module.ArrayRecordReader(path, READER_OPTIONS, file_reader_buffer_size=8192)


def byte_ways(path: str, num_records: int, num_bytes: int) -> dict[str, Callable[[], int]]:
    """Ways to undecoded records; units are records."""
    rng = np.random.default_rng(1)
    reader, theirs, ours = open_reader(path), array_record_data_source.ArrayRecordDataSource(path), ArrayRecord(path)
    file = open(path, "rb")  # noqa: SIM115  lives as long as the ways
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    state = {"next": 0}

    def ids(number: int) -> np.ndarray:
        return rng.integers(0, num_records, number)

    def single() -> int:
        for row in ids(256).tolist():
            reader.read(row, row + 1)
        return 256

    def item() -> int:
        for row in ids(4).tolist():
            theirs[row]
        return 4

    def limit() -> int:
        for start in (ids(2048) * ((len(memory) - num_bytes) // num_records)).tolist():
            memory[start : start + num_bytes]
        return 2048

    def sequential(number: int) -> Callable[[], int]:
        def read() -> int:
            first = state["next"] = (state["next"] + number) % (num_records - number)
            return len(ours.read_raw(np.arange(first, first + number)))

        return read

    return {
        "ds[i]": item,
        "ds.__getitems__(2048)": lambda: len(theirs.__getitems__(ids(2048).tolist())),
        "reader.read(list of 2048)": lambda: len(reader.read(ids(2048).tolist())),
        "reader.read(i, i + 1)": single,
        "meshfeed, random, 64": lambda: len(ours.read_raw(ids(64))),
        "meshfeed, random, 2048": lambda: len(ours.read_raw(ids(2048))),
        "meshfeed, in order, 64": sequential(64),
        "meshfeed, in order, 2048": sequential(2048),
        "bytes of an mmap, unchecked": limit,
    }


def lm_ways(path: str, num_records: int) -> dict[str, Callable[[], int]]:
    """Ways to shuffled batches ``[64, 2048]`` of int32; units are batches."""
    import grain

    rng = np.random.default_rng(2)
    reader, theirs, ours = open_reader(path), array_record_data_source.ArrayRecordDataSource(path), ArrayRecord(path)

    def rows() -> list[int]:
        return rng.integers(0, num_records, LM_BATCH).tolist()

    def decode(record: bytes) -> np.ndarray:
        return np.frombuffer(record, np.int32)

    def join(records: list[bytes]) -> np.ndarray:
        return np.frombuffer(b"".join(records), np.int32).reshape(len(records), -1)

    class Decode(grain.transforms.Map):
        def map(self, element: bytes) -> np.ndarray:
            return decode(element)

    def take(iterator: Any) -> Callable[[], int]:
        def one() -> int:
            next(iterator)
            return 1

        return one

    def loop_items() -> int:
        np.stack([decode(theirs[row]) for row in rows()])
        return 1

    def loop_single() -> int:
        np.stack([decode(reader.read(row, row + 1)[0]) for row in rows()])
        return 1

    def loop_single_join() -> int:
        join([reader.read(row, row + 1)[0] for row in rows()])
        return 1

    def meshfeed() -> int:
        join(ours.read_raw(np.array(rows())))
        return 1

    sampler = grain.samplers.IndexSampler(num_records, shuffle=True, seed=0, shard_options=grain.sharding.NoSharding())
    loader = grain.DataLoader(
        data_source=theirs,
        sampler=sampler,
        operations=[Decode(), grain.transforms.Batch(LM_BATCH, drop_remainder=True)],
        worker_count=0,
    )
    dataset = grain.MapDataset.source(theirs).shuffle(seed=0).map(decode).batch(LM_BATCH).repeat()
    documented = grain.MapDataset.source(theirs).shuffle(seed=0).map(decode).repeat()
    return {
        "Grain DataLoader, 0 workers": take(iter(loader)),
        "Grain IterDataset, as documented": take(iter(documented.to_iter_dataset().batch(LM_BATCH))),
        "Grain IterDataset, no threads": take(
            iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
        ),
        "loop over ds[i]": loop_items,
        "loop over read(i, i + 1)": loop_single,
        "the same, one join and frombuffer": loop_single_join,
        "meshfeed read_raw, one join and frombuffer": meshfeed,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=int, default=100_000, help="in each file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each way in each round")
    parser.add_argument("--only", choices=["lm", "bytes"])


def measure(options: argparse.Namespace) -> list[Table]:
    tables = []

    def turns(ways: dict[str, Callable[[], int]]) -> dict[str, dict[str, list[float]]]:
        return take_turns(
            {name: Way(way) for name, way in ways.items()}, rounds=options.rounds, seconds=options.seconds
        )

    with tempfile.TemporaryDirectory() as folder:
        if options.only != "lm":
            for num_bytes in (200, 4096):
                for layout in ("group_size:1,uncompressed", "group_size:1,zstd", "group_size:16,zstd"):
                    path = write(os.path.join(folder, "x"), options.records, num_bytes, layout)
                    found = turns(byte_ways(path, options.records, num_bytes))
                    title = f"reading {num_bytes} bytes, {layout}, {options.records:,} records"
                    table = rates(title, "thousand records", found, ours="meshfeed, random, 64", scale=1000)
                    table.bars = None
                    tables.append(table)
                    os.unlink(path)
        if options.only != "bytes":
            path = write(os.path.join(folder, "lm"), options.records, 4 * LM_TOKENS, "group_size:1,uncompressed")
            found = turns(lm_ways(path, options.records))
            title = f"reading shuffled LM, {LM_TOKENS:,} int32 per record, {LM_BATCH} per batch, to host arrays"
            ours, floor = "meshfeed read_raw, one join and frombuffer", "the same, one join and frombuffer"
            tables.append(rates(title, "batches", found, ours=ours, floor=floor))
    return tables


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
