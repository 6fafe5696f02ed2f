"""Packing with a limit on segments, beside Grain's: padding and rows/s on 6 distributions; and attention per device.

Documents are int32 arrays in memory. The limit is ``--slots`` times the documents that fill a sequence on average, so
short documents could fill sequences by their number. "Needed" is the padding that no packing without cuts can be below:
tokens and segments divided by what a sequence holds. First fit takes the documents in order, with as many open sequences as
it wants; Grain keeps 64 open. No packing may exceed the limit, which is checked.

The second table is the attention work of the devices of a mesh, whose rows and sequence axis are divided: the most of a
device over the mean, per step of log-normal documents. Nothing is sent to a device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks._measure import Table, Way, main, take_turns
from benchmarks.packing import Documents, endless

BINS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=int, default=65_536)
    parser.add_argument("--length", type=int, default=2_048)
    parser.add_argument("--slots", type=float, default=1.5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each way in each round")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mesh", type=int, nargs=2, default=(8, 4), metavar=("ROWS", "SEQUENCE"))
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch per part of the rows")


def distributions(length: int, number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    some = rng.random(number)
    found = {
        "uniform": rng.integers(1, length + 1, number),
        "log-normal": rng.lognormal(np.log(length / 5), 1.2, number),
        "exponential": rng.exponential(length / 5, number),
        "two sizes": np.where(some < 0.7, rng.integers(20, 80, number), rng.uniform(0.3, 0.5, number) * length),
        "many tiny": np.where(some < 0.95, rng.integers(1, 20, number), rng.integers(length // 10, length + 1, number)),
        "near the length": np.where(
            some < 0.6, rng.integers(int(0.85 * length), length + 1, number), rng.integers(1, 200, number)
        ),
    }
    return {name: np.clip(lengths, 1, length).astype(np.uint32) for name, lengths in found.items()}


def ours(documents: Documents, options: argparse.Namespace, method: str, slots: int) -> tuple[Way, float]:
    import meshfeed

    packed = meshfeed.sources.Packed(documents, options.length, method=method, max_segments=slots)
    source, place = packed.with_order(shuffle=True, seed=0), [0]
    every = source.row_lengths(np.arange(len(packed)))[1]
    assert int(np.diff(every).max()) <= slots

    def run() -> int:
        source.read_batch(np.arange(place[0], place[0] + options.batch))
        place[0] += options.batch
        return options.batch

    return Way(run), packed.stats().padding_fraction


def grains(documents: Documents, options: argparse.Namespace, name: str, slots: int) -> tuple[Way, float]:
    import grain

    def open_stream() -> Iterator[dict[str, Any]]:
        stream = grain.MapDataset.source(documents).to_iter_dataset()  # type: ignore[arg-type]
        packer = getattr(grain.experimental, name)
        sizes = {"length_struct": {"tokens": options.length}, "num_packing_bins": BINS}
        return iter(packer(stream, **sizes, max_sequences_per_bin=slots).batch(options.batch))

    real = total = most = 0
    for _, batch in zip(range(max(2, 4 * BINS // options.batch) + 8), open_stream(), strict=False):
        segments = batch["tokens_segment_ids"]
        real, total, most = real + int((segments > 0).sum()), total + segments.size, max(most, int(segments.max()))
    assert most <= slots
    return endless(open_stream, options.batch), 1 - real / total


def within_limits(options: argparse.Namespace) -> Table:
    from meshfeed._src.order.limits import first_fit

    rows = []
    for name, lengths in distributions(options.length, options.documents).items():
        slots = max(2, round(options.slots * options.length / lengths.mean()))
        documents, total = Documents(lengths), int(lengths.sum())
        vectors = np.column_stack([lengths.astype(np.int64), np.ones(len(lengths), np.int64)])
        number = first_fit(vectors, np.array([options.length, slots]))[1]
        needed = max(-(-total // options.length), -(-len(lengths) // slots))
        made = {
            "fit": ours(documents, options, "fit", slots),
            "split": ours(documents, options, "split", slots),
            "Grain FirstFit": grains(documents, options, "FirstFitPackIterDataset", slots),
            "Grain BestFit": grains(documents, options, "BestFitPackIterDataset", slots),
        }
        rates = take_turns({way: made[way][0] for way in made}, rounds=options.rounds, seconds=options.seconds)
        row: dict[str, Any] = {
            "lengths": name,
            "segments": slots,
            "needed %": 100 * (1 - total / options.length / needed),
        }
        row["first fit %"] = 100 * (1 - total / options.length / number)
        row |= {f"{way} %": 100 * padding for way, (_, padding) in made.items()}
        row |= {f"{way} rows/CPU s": float(np.median(rates[way]["cpu"])) for way in made}
        rows.append(row)
    note = f"Sequences of {options.length:,} tokens, {options.documents:,} documents; padding of the sequences in per cent."
    return Table(f"at most {options.slots:g} times the mean number of segments", rows, note)


def work(lengths: np.ndarray, splits: np.ndarray, order: np.ndarray, shards: int, causal: bool) -> np.ndarray:
    """Pairs of tokens that attend to each other in each shard of rows without gaps, [rows, shards]."""
    size = len(order)
    begins = np.cumsum(lengths) - lengths
    pairs = np.zeros((len(splits) - 1, size))
    position = np.arange(int(lengths.sum())) - np.repeat(begins, lengths) + 1
    values = position if causal else np.repeat(lengths, lengths)
    row = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
    at = np.repeat(row * size + begins - begins[splits[:-1]][row], lengths) + position - 1
    pairs.reshape(-1)[at] = values
    return pairs[:, order].reshape(len(pairs), shards, -1).sum(2)


def attention(options: argparse.Namespace) -> Table:
    import meshfeed
    from meshfeed._src.streams.balance import RowBalance

    parts, shards = options.mesh
    batch, length = parts * options.rows, 8192
    rng = np.random.default_rng(0)
    documents = Documents(np.minimum(rng.lognormal(6.5, 1.2, 120_000), 50_000).astype(np.uint32) + 1)
    rows = []
    for method in ("fit", "split"):
        for kind, balance in ((None, None), (None, "attention"), ("zigzag", "attention"), ("striped", "attention")):
            source = meshfeed.sources.Packed(
                documents, length, method=method, sequence_order=kind and (kind, shards)
            ).with_order(shuffle=True, seed=1)
            order = np.arange(length) if kind is None else meshfeed.sources.sequence_order(kind, length, shards)
            found: dict[str, list[float]] = {"causal": [], "bidirectional": []}
            for step in range(options.steps):
                ids = (step * batch + np.arange(batch)).astype(np.int64)
                if balance is not None:
                    ids = ids[RowBalance(source, balance).rows(ids)]
                lengths, splits = source.row_lengths(ids)
                for name in found:
                    of_devices = work(lengths, splits, order, shards, name == "causal")
                    of_devices = of_devices.reshape(parts, -1, shards).sum(1)
                    found[name].append(float(of_devices.max() / of_devices.mean()))
            row: dict[str, Any] = {
                "packing": method,
                "sequence_order": kind or "as it is",
                "balance": balance or "none",
            }
            for name, values in found.items():
                row |= {f"{name}, mean": f"{np.mean(values):.4f}", f"{name}, worst step": f"{max(values):.4f}"}
            rows.append(row)
    title = f"attention of a device over the mean, {parts} × {shards} devices, {options.rows} rows for each part"
    return Table(title, rows, f"Log-normal documents in sequences of {length:,} tokens, {options.steps} steps.")


def measure(options: argparse.Namespace) -> list[Table]:
    return [within_limits(options), *([attention(options)] if options.steps else [])]


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
