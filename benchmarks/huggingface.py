"""Hugging Face datasets to global arrays: map-style against rows in NumPy format, streaming Parquet against pyarrow.

Records are tokens, int32[512], and an id. Everything ends in arrays on all devices, except where a way is named "read".
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import meshfeed
from benchmarks._measure import Table, Way, main, rates, take_turns
from meshfeed.sources import HuggingFace

LENGTH = 512


def write(folder: pathlib.Path, num_files: int, rows: int) -> list[str]:
    """Parquet files of tokens, with row groups of 2,000 rows."""
    rng, paths = np.random.default_rng(0), []
    for number in range(num_files):
        values = pa.array(rng.integers(0, 50_000, rows * LENGTH, np.int32))
        offsets = pa.array(np.arange(0, (rows + 1) * LENGTH, LENGTH, dtype=np.int32))
        table = pa.table(
            {"id": np.arange(number * rows, (number + 1) * rows), "tokens": pa.ListArray.from_arrays(offsets, values)}
        )
        paths.append(str(folder / f"{number:02d}.parquet"))
        pq.write_table(table, paths[-1], row_group_size=2000)
    return paths


def forever(make: Callable[[], Iterator[Any]]) -> Callable[[], int]:
    """A way that takes one batch at a call and begins again at the end."""
    iterator = make()

    def run() -> int:
        nonlocal iterator
        batch = next(iterator, None)
        if batch is None:
            iterator = make()
            batch = next(iterator)
        jax.block_until_ready(batch)
        return len(batch["id"])

    return run


def feed_of(source: Any, mesh: Any, batch: int, **how: Any) -> Callable[[], Iterator[Any]]:
    return lambda: meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=batch, num_epochs=None, **how)


def rows_of(dataset: Any, order: np.ndarray, batch: int, put: Callable[[Any], Any]) -> Callable[[], Iterator[Any]]:
    """Row by row and stacked, as loaders on top of datasets do."""

    def make() -> Iterator[Any]:
        for start in range(0, len(order) - batch + 1, batch):
            rows = [dataset[int(i)] for i in order[start : start + batch]]
            yield put({name: np.stack([row[name] for row in rows]) for name in rows[0]})

    return make


def several_of(dataset: Any, order: np.ndarray, batch: int, put: Callable[[Any], Any]) -> Callable[[], Iterator[Any]]:
    def make() -> Iterator[Any]:
        for start in range(0, len(order) - batch + 1, batch):
            rows = dataset.__getitems__(order[start : start + batch].tolist())
            yield put({name: np.stack([row[name] for row in rows]) for name in rows[0]})

    return make


def taken_of(table: pa.Table, order: np.ndarray, batch: int, put: Callable[[Any], Any]) -> Callable[[], Iterator[Any]]:
    """Rows that Arrow gathers, as views in numpy; of a table in memory with one chunk, since take joins chunks first."""
    table = table.combine_chunks()

    def make() -> Iterator[Any]:
        for start in range(0, len(order) - batch + 1, batch):
            rows = table.take(order[start : start + batch])
            tokens = rows.column("tokens").chunks[0]
            yield put({"id": rows.column("id").to_numpy(), "tokens": tokens.flatten().to_numpy().reshape(batch, -1)})

    return make


def pyarrow_batches(paths: list[str], batch: int) -> Iterator[Any]:
    for path in paths:
        for part in pq.ParquetFile(path).iter_batches(batch, columns=["id", "tokens"], use_threads=False):
            tokens = part.column("tokens")
            yield {"id": part.column("id").to_numpy(), "tokens": tokens.flatten().to_numpy().reshape(len(part), -1)}


def lane_batches(source: Any, num_lanes: int, batch: int) -> Iterator[Any]:
    """All lanes in turns, as the feed reads them, without the feed."""
    lanes = [source.open(lane, num_lanes) for lane in range(num_lanes)]
    while lanes:
        for lane in list(lanes):
            try:
                yield lane.next_batch(batch)
            except StopIteration:
                lanes.remove(lane)


def example_batches(dataset: Any, batch: int) -> Iterator[Any]:
    rows = []
    for row in dataset:
        rows.append(row)
        if len(rows) == batch:
            yield {name: np.asarray([one[name] for one in rows]) for name in rows[0]}
            rows = []


def measure(arguments: argparse.Namespace) -> list[Table]:
    import datasets

    datasets.disable_progress_bars()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def put(batch: Any) -> Any:
        return jax.device_put(batch, sharding)

    turns: dict[str, Any] = {"rounds": arguments.rounds, "seconds": arguments.seconds}
    batch = arguments.batch
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        paths = write(folder, 16, arguments.rows // 16)
        table = datasets.Dataset.from_parquet(paths, cache_dir=str(folder / "cache"))
        order = np.random.default_rng(0).permutation(len(table))
        formatted = table.with_format("numpy")
        found = take_turns(
            {
                "meshfeed, shuffled": Way(forever(feed_of(table, mesh, batch, shuffle=True)), drain=batch * 4),
                "pyarrow, take, shuffled": Way(forever(taken_of(table.data.table, order, batch, put))),
                "meshfeed, in order": Way(forever(feed_of(table, mesh, batch)), drain=batch * 4),
                'with_format("numpy")[i], stacked': Way(forever(rows_of(formatted, order, batch, put))),
                'with_format("numpy").__getitems__': Way(forever(several_of(formatted, order, batch, put))),
            },
            **turns,
        )
        tables = [
            rates(
                f"Map-style, batch {batch}",
                "records",
                found,
                ours="meshfeed, shuffled",
                floor="pyarrow, take, shuffled",
            )
        ]
        stream = datasets.load_dataset(
            "parquet", data_files=paths, split="train", streaming=True, cache_dir=str(folder / "cache")
        )
        source = HuggingFace(stream)
        ways = {
            "pyarrow, read": Way(forever(lambda: pyarrow_batches(paths, 1024))),
            "meshfeed, 16 lanes, read": Way(forever(lambda: lane_batches(source, 16, 64))),
            "meshfeed, 12 lanes, read": Way(forever(lambda: lane_batches(source, 12, 64))),
            "meshfeed, 16 lanes": Way(forever(feed_of(stream, mesh, 1024, num_lanes=16)), drain=4096),
            "datasets, row by row, read": Way(forever(lambda: example_batches(stream, 64))),
        }
        found = take_turns(ways, **turns)
        note = "pyarrow reads the same columns of the same files in batches of 1,024, one thread."
        tables.append(
            rates(
                "Streaming Parquet", "records", found, ours="meshfeed, 16 lanes, read", floor="pyarrow, read", note=note
            )
        )
    return tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=96_000, help="records in all files")
    parser.add_argument("--batch", type=int, default=256, help="global batch size, map-style")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
