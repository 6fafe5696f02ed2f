"""Mixtures of 1, 8 and 35 components, and streams from Parquet: batches/s, ours and Grain's and Hugging Face's.

Components are ArrayRecord files of 2,048 int32 per record, read at random and shuffled. Each mixture has the same number of
records in all, since more bytes than a processor's cache holds take longer to copy, whatever they are mixed from. Streams
are Parquet files of the same records, read in order. A unit is a batch that has become a global array.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import _data, _peers
from benchmarks._measure import Table, Way, main, make_mesh, rates, take_turns, with_cpu_devices
from benchmarks.feed import our_ways

with_cpu_devices(8)


def mixture(options: argparse.Namespace, folder: str, sharding: Any, components: int) -> dict[str, Way]:
    """One mixture, ours and Grain's."""
    import grain
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    import meshfeed

    paths = [
        _data.write_array_record(
            os.path.join(folder, f"{components}-{i}"), _data.tokens(options.records // components, _data.TOKENS)
        )
        for i in range(components)
    ]
    weights = {f"c{i}": 1.0 + i % 3 for i in range(components)}

    def ours(decoders: list[Any]) -> Way:
        sources = {
            name: meshfeed.sources.ArrayRecord(path, decode_batch=decode)
            for name, path, decode in zip(weights, paths, decoders, strict=True)
        }
        mixed = meshfeed.sources.Mixture(sources, weights=weights)
        return our_ways(mixed, sharding, options.batch, (2,), shuffle=True)["meshfeed"]

    ways = {f"meshfeed, {components}": ours([_data.join_tokens] * components)}
    if components > 1:
        own = [lambda records: _data.join_tokens(records) for _ in paths]  # another function for each
        ways[f"meshfeed, {components}, a decoder of each component"] = ours(own)
    theirs = [
        grain.MapDataset.source(ArrayRecordDataSource(path)).shuffle(seed=0).map(_data.decode_tokens).repeat()
        for path in paths
    ]
    blended = grain.MapDataset.mix(theirs, weights=list(weights.values())).batch(options.batch)
    no_threads = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    put = _peers.putter(sharding)
    ways[f"Grain mix (no threads), {components}"] = _peers.taking(
        lambda: iter(blended.to_iter_dataset(no_threads)), put
    )
    return ways


def streams(options: argparse.Namespace, folder: str, sharding: Any) -> dict[str, Way]:
    """Parquet, in order."""
    import datasets
    import grain
    import pyarrow.parquet as pq

    import meshfeed

    def records() -> Iterator[np.ndarray]:
        return _data.tokens(20_000, _data.TOKENS)

    files, put = _peers.parquet(folder, records, rows_a_file=2_500), _peers.putter(sharding)
    datasets.disable_progress_bars()

    def open_stream() -> Any:
        return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)

    ours = meshfeed.sources.HuggingFace(open_stream())
    by_row, by_batch = open_stream().with_format("numpy"), open_stream().with_format("numpy")

    def rows() -> Iterator[np.ndarray]:
        held = []
        for row in by_row:
            held.append(row["tokens"])
            if len(held) == options.batch:
                yield np.stack(held)
                held = []

    def batches() -> Iterator[np.ndarray]:
        for found in by_batch.iter(options.batch, drop_last_batch=True):
            yield np.stack(list(found["tokens"]))

    def arrays() -> Iterator[np.ndarray]:
        for path in files:
            with pq.ParquetFile(path) as file:
                for found in file.iter_batches(options.batch, use_threads=False):
                    if len(found) < options.batch:
                        break
                    yield found.column(0).flatten().to_numpy().reshape(-1, _data.TOKENS)

    parquet = grain.experimental.ParquetIterDataset(files[0]).map(lambda row: np.asarray(row["tokens"], np.int32))
    return {
        "meshfeed": our_ways(ours, sharding, options.batch, (2,), num_lanes=8)["meshfeed"],
        "meshfeed, prefetch=0": our_ways(ours, sharding, options.batch, (0,), num_lanes=8)["meshfeed, prefetch=0"],
        **{
            f"meshfeed, num_threads={number}": our_ways(
                ours, sharding, options.batch, (2,), num_lanes=8, num_threads=number
            )["meshfeed"]
            for number in (2, 4)
        },
        "pyarrow alone: read": _peers.taking(arrays, lambda batch: batch),
        "pyarrow alone, and JAX's public call": _peers.taking(arrays, put),
        "Hugging Face streaming, row by row": _peers.taking(rows, put),
        "Hugging Face streaming, iter(batch)": _peers.taking(batches, put),
        "Grain ParquetIterDataset": _peers.taking(lambda: iter(parquet.batch(options.batch, drop_remainder=True)), put),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--components", type=int, nargs="*", default=[1, 8, 35])
    parser.add_argument("--records", type=int, default=105_000, help="of all components together")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each way in each round")


def measure(options: argparse.Namespace) -> list[Table]:
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    turns = {"rounds": options.rounds, "seconds": options.seconds}
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Way] = {}
        for number in options.components:
            ways |= mixture(options, folder, sharding, number)
        if ways:
            title = f"mixtures of {options.records:,} records, {options.batch} per batch"
            first = f"meshfeed, {options.components[0]}"
            tables.append(rates(title, "batches", take_turns(ways, **turns), ours=first))
        found = take_turns(streams(options, folder, sharding), **turns)
        title, floor = f"stream from Parquet, {options.batch} per batch", "pyarrow alone: read"
        tables.append(rates(title, "batches", found, ours="meshfeed", floor=floor))
    return tables


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
