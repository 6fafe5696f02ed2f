"""ArrayRecord: thousand records/s of every way to read, and batches/s of a tokenised LM.

Run: ``python benchmarks/read_array_record.py [--records 100000] [--rounds 7] [--only lm|bytes] [--json FILE]``.

Rounds are interleaved (every way once, in turning order) and the figures are medians: absolute times of a shared
machine do not hold, ratios within one run do. Beside the wall clock stands the CPU time of all threads, which a busy
neighbour changes less. The page cache holds the files. (Not named array_record.py: it would hide the package.)
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from array_record.python import array_record_data_source, array_record_module

from meshfeed.sources._array_record import ArrayRecord

LM_TOKENS = 2048
LM_BATCH = 64
READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"

Way = Callable[[], int]  # does a piece of work, returns the number of units that it did


def write(path: str, num_records: int, num_bytes: int, options: str) -> str:
    """A file of half-compressible records."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 16, (512, num_bytes), np.uint8)
    writer = array_record_module.ArrayRecordWriter(path, options)
    for record in range(num_records):
        writer.write(noise[record % 512].tobytes())
    writer.close()
    return path


def measure(ways: dict[str, Way], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Units/s by wall clock and by CPU time, medians over interleaved rounds."""
    names, walls, cpus = list(ways), {name: [] for name in ways}, {name: [] for name in ways}
    for name in names:
        ways[name]()  # opens files, compiles, fills the page cache
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            done, wall, cpu = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - wall < seconds or not done:
                done += ways[name]()
            walls[name].append(done / (time.perf_counter() - wall))
            cpus[name].append(done / max(time.process_time() - cpu, 1e-9))
    return {
        name: {
            "per_second": statistics.median(walls[name]),
            "spread": (max(walls[name]) - min(walls[name])) / statistics.median(walls[name]),
            "per_cpu_second": statistics.median(cpus[name]),
        }
        for name in names
    }


def open_reader(path: str) -> Any:
    return array_record_module.ArrayRecordReader(path, READER_OPTIONS, file_reader_buffer_size=8192)


def byte_ways(path: str, num_records: int, num_bytes: int) -> dict[str, Way]:
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


def lm_ways(path: str, num_records: int) -> dict[str, Way]:
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

    def take(iterator: Any) -> Way:
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


def table(title: str, unit: str, results: dict[str, dict[str, float]], scale: float) -> str:
    """Markdown."""
    lines = [f"\n### {title}", f"| way | {unit}/s | spread | {unit}/CPU s |", "|---|---:|---:|---:|"]
    for name, found in results.items():
        figures = f"{found['per_second'] / scale:,.1f} | {found['spread']:.0%} | {found['per_cpu_second'] / scale:,.1f}"
        lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Prints Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000, help="in each file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each way in each round")
    parser.add_argument("--only", choices=["lm", "bytes"])
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    arguments = parser.parse_args()
    machine = f"{os.cpu_count()} cores, {platform.platform()}, Python {sys.version.split()[0]}"
    print(f"{machine}; {arguments.records:,} records a file")
    found: dict[str, Any] = {"machine": machine, "records": arguments.records}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only != "lm":
            for num_bytes in (200, 4096):
                for options in ("group_size:1,uncompressed", "group_size:1,zstd", "group_size:16,zstd"):
                    path = write(os.path.join(folder, "x"), arguments.records, num_bytes, options)
                    ways = byte_ways(path, arguments.records, num_bytes)
                    title = f"{num_bytes} bytes, {options}"
                    found[title] = measure(ways, arguments.rounds, arguments.seconds)
                    print(table(title, "thousand records", found[title], 1000), flush=True)
                    os.unlink(path)
        if arguments.only != "bytes":
            path = write(os.path.join(folder, "lm"), arguments.records, 4 * LM_TOKENS, "group_size:1,uncompressed")
            title = f"shuffled LM, {LM_TOKENS:,} int32 a record, batch {LM_BATCH}"
            found[title] = measure(lm_ways(path, arguments.records), arguments.rounds, arguments.seconds)
            print(table(title, "batches", found[title], 1), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
