"""Shuffled batches from a file that is not in the page cache, beside the disk's rate of parallel reads.

The work is batches of 64 records of 8 KB. After every 200 batches, each way drops the file from the page cache, so that
nearly every record comes from the disk. "threads" reads the bytes of as many random records, with nothing else to do: N
threads with one ``pread`` each at a time, so N reads are with the disk at any moment. The best of them is the limit. Records
do not begin at pages, so the disk reads 12 KB for each of 8 KB. Linux only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import _data, _peers
from benchmarks._measure import Table, Way, main, make_mesh, rates, take_turns, with_cpu_devices

BATCH = 64
BATCHES_BETWEEN_DROPS = 200


def dropping(path: str, way: Way) -> Way:
    """The way, which drops the file from the page cache now and then."""
    taken = [BATCHES_BETWEEN_DROPS]

    def run() -> int:
        if taken[0] >= BATCHES_BETWEEN_DROPS:
            drop(path)
            taken[0] = 0
        done = way.run()
        taken[0] += done
        return done

    return Way(run, way.drain, way.close)


def drop(path: str) -> None:
    """Removes the file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)  # what is not on the disk yet cannot be dropped
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def parallel(path: str, records: int, number: int) -> Way:
    """Reads of random records by threads that do nothing else; each takes the reads of one batch."""
    size, pitch = 4 * _data.TOKENS, os.stat(path).st_size // records
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no more than is asked for
    rng = np.random.default_rng(0)
    pool = concurrent.futures.ThreadPoolExecutor(number)

    def read(offsets: list[int]) -> None:
        for offset in offsets:
            os.pread(descriptor, size, offset)

    def run() -> int:
        places = rng.integers(0, records, (number, BATCH)) * pitch
        list(pool.map(read, places.tolist()))
        return number

    def close() -> None:
        pool.shutdown()
        os.close(descriptor)

    return Way(run, 1, close)


def ours(path: str, sharding: Any, **settings: Any) -> Way:
    """Batches of a feed."""
    import meshfeed

    source = meshfeed.sources.ArrayRecord(path, decode_batch=meshfeed.sources.DecodeRaw(np.int32, _data.TOKENS))
    feed = meshfeed.Feed(source, sharding, global_batch_size=BATCH, shuffle=True, num_epochs=None, **settings)
    return _peers.taking(lambda: iter(feed), lambda batch: batch, 3, feed.close)


def grain(path: str, sharding: Any) -> Way:
    """Batches of Grain, which reads ahead with 16 threads, and up to 16 batches."""
    import grain
    from array_record.python import array_record_data_source

    def make() -> Iterator[Any]:
        source: Any = array_record_data_source.ArrayRecordDataSource(path)
        records = grain.MapDataset.source(source).seed(0).shuffle().repeat()
        decoded = records.map(lambda record: np.frombuffer(record, np.int32))
        return iter(decoded.batch(BATCH).to_iter_dataset(grain.ReadOptions(num_threads=16, prefetch_buffer_size=16)))

    return _peers.taking(make, _peers.putter(sharding), 17)


def measure(options: argparse.Namespace) -> Iterator[Table]:
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = _data.write_array_record(os.path.join(folder, "cold"), _data.tokens(options.records, _data.TOKENS))
        ways: dict[str, Way] = {
            "meshfeed": ours(path, sharding),
            "meshfeed, 2 threads": ours(path, sharding, num_threads=2),
            "meshfeed, 4 threads": ours(path, sharding, num_threads=4, prefetch=4),
            "meshfeed, no read-ahead": ours(path, sharding, prefetch=0),
        }
        ways |= {f"{number} threads": parallel(path, options.records, number) for number in options.threads}
        if _peers.has("grain"):
            ways["Grain"] = grain(path, sharding)
        dropped = {name: dropping(path, way) for name, way in ways.items()}
        found = take_turns(dropped, rounds=options.rounds, seconds=options.seconds)
    limit = max((name for name in found if name.endswith("threads") and name[0].isdigit()), key=_median(found))
    yield rates("cold file, batches of 64 × 8 KB", "batches", found, ours="meshfeed", floor=limit)


def _median(found: dict[str, dict[str, list[float]]]) -> Callable[[str], float]:
    return lambda name: float(np.median(found[name]["wall"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help="on the disk to measure; otherwise that of temporary files")
    parser.add_argument("--records", type=int, default=65_536)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")


if __name__ == "__main__":
    with_cpu_devices(8)
    main(__doc__, measure, add_arguments)
