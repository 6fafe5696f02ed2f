"""Documents packed into sequences: sequences/s, padding and cut documents, ours and Grain's; and the time to resume.

Documents are int32 arrays in memory with lengths of a lognormal distribution, as web pages have. A unit is a sequence of
tokens, segment ids and positions in a stacked batch; nothing is sent to a device. Grain packs them in order, ours
shuffles them. ``--resume N`` also packs lengths of N documents in a file and reads the batch at 90 % of the epoch.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks._measure import Table, Way, main, rates, take_turns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--length", type=int, default=2_048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each way in each round")
    parser.add_argument("--resume", type=float, default=1e8, help="documents; 0 for none")


def lengths_of(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.minimum(rng.lognormal(6, 1.2, count), 100_000).astype(np.uint32) + 1


class Documents:
    """Slices of one array."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._tokens = np.random.default_rng(1).integers(1, 50_000, int(self._ends[-1]), np.int32)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        end = int(self._ends[index])
        return {"tokens": self._tokens[end - int(self._lengths[index]) : end]}

    def lengths(self) -> np.ndarray:
        return self._lengths


def ours(documents: Documents, options: argparse.Namespace, method: str) -> tuple[Way, dict[str, Any]]:
    import meshfeed

    packed = meshfeed.sources.Packed(documents, options.length, method=method)
    source, stats = packed.with_order(shuffle=True, seed=0), packed.stats()
    place = [0]

    def run() -> int:
        source.read_batch(np.arange(place[0], place[0] + options.batch))
        place[0] += options.batch
        return options.batch

    return Way(run), {"padding": stats.padding_fraction, "documents cut that fit": 0 if method == "fit" else None}


def grains(documents: Documents, options: argparse.Namespace, name: str, **settings: Any) -> tuple[Way, dict[str, Any]]:
    """Grain drops what it cannot place, so documents are cut to pieces of the length before first fit."""
    import grain

    def pieces(document: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        tokens = document["tokens"]
        return [{"tokens": tokens[i : i + options.length]} for i in range(0, len(tokens), options.length)]

    class Split(grain.experimental.FlatMapTransform):
        max_fan_out = 100

        def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
            return pieces(element)

    def open_stream() -> Iterator[dict[str, Any]]:
        stream = grain.MapDataset.source(documents).to_iter_dataset()
        if name != "ConcatThenSplitIterDataset":
            stream = grain.experimental.FlatMapIterDataset(stream, Split())
        packer = getattr(grain.experimental, name)
        return iter(packer(stream, length_struct={"tokens": options.length}, **settings).batch(options.batch))

    real = total = 0
    for _, batch in zip(range(20), open_stream(), strict=False):
        segments = batch["tokens_segment_ids"]
        real, total = real + int((segments > 0).sum()), total + segments.size
    return endless(open_stream, options.batch), {"padding": 1 - real / total}


def endless(open_stream: Callable[[], Iterator[Any]], batch: int) -> Way:
    """Takes the batches of a stream, which is opened again at its end."""
    stream = [open_stream()]

    def run() -> int:
        if next(stream[0], None) is None:
            stream[0] = open_stream()
            next(stream[0])
        return batch

    return Way(run)


def resume(options: argparse.Namespace) -> Table:
    """From a file of lengths to the batch at 90 % of an epoch."""
    from meshfeed._src.order.blocks import Packing
    from meshfeed._src.order.packing import PackingMethod

    count, rows = int(options.resume), []
    with tempfile.TemporaryDirectory() as folder:
        path, rng = os.path.join(folder, "lengths"), np.random.default_rng(0)
        with open(path, "wb") as file:
            for first in range(0, count, 1 << 22):
                lengths_of(rng, min(1 << 22, count - first)).tofile(file)
        for method in ("split", "fit"):
            begin, cpu = time.perf_counter(), time.process_time()
            lengths = np.memmap(path, np.uint32, "r")
            packing = Packing(lengths, PackingMethod(options.length, method, "split"), block=65_536).shuffled(0)
            packing.pieces_at(int(0.9 * packing.num_sequences) + np.arange(options.batch))
            rows.append(
                {
                    "method": method,
                    "seconds": time.perf_counter() - begin,
                    "CPU s": time.process_time() - cpu,
                    "sequences": packing.num_sequences,
                    "peak memory of the process, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                }
            )
    return Table(f"resume at 90 % of an epoch of {count:,} documents", rows)


def measure(options: argparse.Namespace) -> list[Table]:
    tables = [resume(options)] if options.resume else []
    documents = Documents(lengths_of(np.random.default_rng(0), options.documents))
    made = {
        "meshfeed, fit": ours(documents, options, "fit"),
        "meshfeed, split": ours(documents, options, "split"),
        "Grain FirstFit": grains(documents, options, "FirstFitPackIterDataset", num_packing_bins=64),
        "Grain BestFit": grains(documents, options, "BestFitPackIterDataset", num_packing_bins=64),
        "Grain ConcatThenSplit": grains(documents, options, "ConcatThenSplitIterDataset"),
    }
    ways = {name: way for name, (way, _) in made.items()}
    found = take_turns(ways, rounds=options.rounds, seconds=options.seconds)
    title = f"{options.documents:,} documents packed into sequences of {options.length:,}"
    table = rates(title, "sequences", found, ours="meshfeed, fit")
    for row in table.rows:
        row |= made[row["way"]][1]
    return [*tables, table]


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
