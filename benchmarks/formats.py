"""MDS, WebDataset and Parquet beside their own libraries: thousand records/s, shuffled, on one core, from the page cache.

``pip install mosaicml-streaming webdataset`` first; what is not installed is left out. Every record is compared
before the clock starts. Mosaic Streaming is measured by ``dataset[i]`` over a permutation, which is what its iterator
does for a sample, and by the iterator itself. WebDataset reads archives from front to back and shuffles in a buffer
of 1,000. pyarrow takes the same rows of decoded row groups, as meshfeed keeps them; of the table as ``read_table``
returns it; and of one chunk that holds all rows, which copies the table once more and is only possible if it fits in
memory: the limit. ``Dataset.take`` decodes at each call.

The last tables show what a feed adds to reading: the share of the source alone, and a bare loop that hands the same
batches to JAX.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import _data, _peers
from benchmarks._measure import Table, Way, main, make_mesh, rates, take_turns, with_cpu_devices
from benchmarks.feed import our_ways
from meshfeed.sources import MDS, Parquet, WebDataset

with_cpu_devices(8)

BATCH, _FEED_BATCH = 256, 64
_GROUP_ROWS = 1000  # of Parquet


def repeat(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        yield from make()


def taking(records: Iterator[Any]) -> Callable[[], int]:
    return lambda: sum(1 for _ in itertools.islice(records, BATCH))


def shuffled(source: Any, read: Callable[[np.ndarray], object]) -> Callable[[], int]:
    rng = np.random.default_rng(1)

    def run() -> int:
        read(rng.integers(0, len(source), BATCH))
        return BATCH

    return run


def mds_ways(folder: str, num_records: int, num_bytes: int) -> dict[str, Way]:
    if importlib.util.find_spec("streaming") is None:
        return {}
    from streaming import MDSWriter, StreamingDataset

    rng = np.random.default_rng(0)
    columns = {"tokens": "ndarray:int32", "id": "int"}
    with MDSWriter(out=folder, columns=columns, size_limit=1 << 23) as writer:
        for i in range(num_records):
            writer.write({"tokens": rng.integers(0, 50_000, num_bytes // 4, np.int32), "id": i})
    ours, theirs = MDS(folder), StreamingDataset(local=folder, shuffle=True, batch_size=1)
    for i, record in enumerate(ours.__getitems__(range(num_records))):
        other = theirs[i]
        assert record["id"] == other["id"]
        np.testing.assert_array_equal(record["tokens"], other["tokens"])

    def one_by_one(ids: np.ndarray) -> None:
        for i in ids.tolist():
            theirs[i]

    return {
        "meshfeed MDS, batches": Way(shuffled(ours, ours.read_batch)),
        "meshfeed MDS, records": Way(shuffled(ours, ours.__getitems__)),
        "Mosaic Streaming, dataset[i]": Way(shuffled(ours, one_by_one)),
        "Mosaic Streaming, iterator": Way(taking(repeat(lambda: iter(theirs)))),
    }


def webdataset_ways(folder: str, num_records: int, num_bytes: int) -> dict[str, Way]:
    if importlib.util.find_spec("webdataset") is None:
        return {}
    import webdataset as wds

    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(0)
    with wds.ShardWriter(f"{folder}/%04d.tar", maxsize=1 << 23, verbose=0) as writer:
        for i in range(num_records):
            writer.write({"__key__": f"{i:09d}", "bin": rng.bytes(num_bytes), "cls": i % 1000})
    ours = WebDataset(f"{folder}/*.tar")
    files = sorted(f"{folder}/{name}" for name in os.listdir(folder) if name.endswith(".tar"))

    def library() -> Iterator[Any]:
        return iter(wds.WebDataset(files, shardshuffle=len(files), seed=0).shuffle(1000))

    plain = wds.WebDataset(files, shardshuffle=False)
    for record, other in zip(ours.__getitems__(range(num_records)), plain, strict=True):
        assert record.items() <= other.items()
    return {
        "meshfeed WebDataset, records": Way(shuffled(ours, ours.read_raw)),
        "webdataset, shuffle(1000)": Way(taking(repeat(library))),
    }


def parquet_ways(folder: str, num_records: int, num_bytes: int) -> dict[str, Way]:
    import pyarrow as pa
    import pyarrow.dataset
    import pyarrow.parquet as pq

    os.makedirs(folder, exist_ok=True)
    rng, width = np.random.default_rng(0), num_bytes // 4
    rows, paths, groups = num_records // 4, [f"{folder}/{number}.parquet" for number in range(4)], []
    for number, path in enumerate(paths):
        tokens = pa.array(rng.integers(0, 50_000, rows * width).astype(np.int32))
        lists = pa.FixedSizeListArray.from_arrays(tokens, width)
        pq.write_table(
            pa.table({"id": np.arange(rows) + number * rows, "tokens": lists}), path, row_group_size=_GROUP_ROWS
        )
        file = pq.ParquetFile(path)
        groups += [file.read_row_group(group).combine_chunks() for group in range(file.num_row_groups)]
    ours, table, files = Parquet(paths), pq.read_table(paths), pyarrow.dataset.dataset(paths)
    one_chunk = table.combine_chunks()
    starts = np.cumsum([0, *map(len, groups)])[:-1]

    def arrays(taken: Any) -> dict[str, np.ndarray]:
        taken = taken.combine_chunks()
        found = taken.column("tokens").chunk(0).flatten().to_numpy()
        return {"id": taken.column("id").to_numpy(), "tokens": found.reshape(len(taken), -1)}

    def by_group(ids: np.ndarray) -> dict[str, np.ndarray]:
        which = np.searchsorted(starts, ids, side="right") - 1
        order = np.argsort(which, kind="stable")
        touched, first = np.unique(which[order], return_index=True)
        parts = [
            groups[group].take(pa.array(ids[slots] - starts[group]))
            for group, slots in zip(touched, np.split(order, first[1:]), strict=True)
        ]
        return arrays(pa.concat_tables(parts).take(pa.array(np.argsort(order))))

    ways = {
        "meshfeed Parquet, batches": ours.read_batch,
        "pyarrow, take by row group": by_group,
        "pyarrow, take of the table": lambda ids: arrays(table.take(pa.array(ids))),
        "pyarrow, take of one chunk": lambda ids: arrays(one_chunk.take(pa.array(ids))),
        "pyarrow, Dataset.take": lambda ids: arrays(files.take(pa.array(ids))),
    }
    ids = rng.permutation(len(ours))[:1000]
    for read in ways.values():
        for name, column in ours.read_batch(ids).items():
            np.testing.assert_array_equal(column, read(ids)[name])
    return {name: Way(shuffled(ours, read)) for name, read in ways.items()}


def feed_tables(folder: str, options: argparse.Namespace) -> Iterator[Table]:
    """Batches of 64 records of 1 KB that have become global arrays, beside the source alone."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    put = _peers.putter(sharding)

    def loop(source: Any, then: Callable[[Any], Any]) -> Way:
        rng, last = np.random.default_rng(1), [None]

        def run() -> int:
            ids = rng.integers(0, len(source), _FEED_BATCH)
            if isinstance(source, WebDataset):
                last[0] = then({"x": np.stack([_decode(record)["x"] for record in source.read_raw(ids)])})
            else:
                last[0] = then(source.read_batch(ids))
            return 1

        return Way(run)

    for name, source in _sources_of_1_kb(folder, options.records).items():
        alone = f"{name} alone: read, decode, stack"
        ways = {
            alone: loop(source, lambda batch: batch),
            f"{name} alone, and JAX's public call": loop(source, lambda batch: jax.tree.map(put, batch)),
            **our_ways(source, sharding, _FEED_BATCH, shuffle=True),
        }
        found = take_turns(ways, rounds=options.rounds, seconds=options.seconds)
        title = f"{name}: {_FEED_BATCH} records of 1 KB per batch, shuffled, 8 devices"
        yield rates(title, "batches", found, ours="meshfeed", floor=alone)


def _decode(record: dict[str, Any]) -> dict[str, np.ndarray]:
    return {"x": np.frombuffer(record["bin"], np.int32)}


def _sources_of_1_kb(folder: str, num_records: int) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    per_file, width = num_records // 10, 256
    os.makedirs(f"{folder}/mds")
    _data.write_mds(f"{folder}/mds", [per_file] * 10, width)
    rng = np.random.default_rng(0)
    for number in range(10):
        rows = rng.integers(0, 50_000, (per_file, width)).astype(np.int32)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), width)
        pq.write_table(pa.table({"x": lists}), f"{folder}/{number}.parquet", row_group_size=_GROUP_ROWS)
        with tarfile.open(f"{folder}/{number}.tar", "w") as archive:
            for row, values in enumerate(rows):
                member = tarfile.TarInfo(f"{number * per_file + row:09}.bin")
                member.size = values.nbytes
                archive.addfile(member, io.BytesIO(values.tobytes()))

    return {
        "MDS": MDS(f"{folder}/mds"),
        "WebDataset": WebDataset(f"{folder}/*.tar", decode=_decode),
        "Parquet": Parquet(f"{folder}/*.parquet"),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=int, default=20_000, help="in each data set")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each way in each round")


def measure(options: argparse.Namespace) -> Iterator[Table]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:  # to the end: threads of Mosaic Streaming go on reading
        for make, num_bytes in itertools.product((mds_ways, webdataset_ways, parquet_ways), (400, 8192)):
            ways = make(f"{folder}/{make.__name__}-{num_bytes}", options.records, num_bytes)
            if ways:
                found = take_turns(ways, rounds=options.rounds, seconds=options.seconds)
                title = f"{make.__name__.removesuffix('_ways')}: {num_bytes:,} bytes per record, shuffled, one core"
                yield rates(title, "thousand records", found, ours=next(iter(ways)), scale=1000)
        yield from feed_tables(f"{folder}/feed", options)


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
