"""Nanoseconds per id of the record order, on one thread, by batch size and length of the source.

Each figure is CPU time of the thread, which other processes affect least: the best of five runs over consecutive
batches, as a feed requests them if a host's rows are neighbors. "cold" is a batch far from all earlier ones, as the first
batch after a resume is.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks._measure import Table, main
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.permutation import permute

BATCHES = (256, 1024, 4096, 16384, 65536)
LENGTHS = (10**6, 2**20 + 1, 10**9, 10**12, 2**40 + 1)


def nanoseconds(order: EpochOrder, batch: int) -> float:
    """Best nanoseconds per id over runs of consecutive batches that no earlier run has requested."""
    batches = max(20, 300_000 // batch)
    best = float("inf")
    for repeat in range(5):
        first = order.num_records * (3 + repeat + 5 * BATCHES.index(batch)) + order.num_records // 3
        start = time.thread_time()
        for i in range(batches):
            order.ids_between(first + i * batch, first + (i + 1) * batch)
        best = min(best, (time.thread_time() - start) / (batches * batch) * 1e9)
    return best


def cold_microseconds(order: EpochOrder, batch: int) -> float:
    """Median microseconds of one batch at a position where nothing is cached."""
    rng = np.random.default_rng(0)
    times = []
    for _ in range(200):
        first = int(rng.integers(0, 10 * order.num_records))
        start = time.thread_time()
        order.ids_between(first, first + batch)
        times.append(time.thread_time() - start)
    return float(np.median(times)) * 1e6


def grain_nanoseconds(num_records: int) -> float | None:
    """Grain's shuffle, called as its MapDataset calls it, once per id. It takes lengths below 2**32."""
    try:
        from grain._src.python.experimental.index_shuffle.python import index_shuffle_module
    except ImportError:
        return None
    if num_records >= 1 << 32:
        return None
    start = time.thread_time()
    for i in range(2000):
        index_shuffle_module.index_shuffle(i, max_index=num_records - 1, seed=1, rounds=4)
    return (time.thread_time() - start) / 2000 * 1e9


def measure(options: argparse.Namespace) -> list[Table]:
    del options
    rows = []
    for num_records in LENGTHS:
        for shuffle in (True, 1024, False):
            order = EpochOrder(num_records, shuffle=shuffle, seed=1, num_epochs=None)
            row = {"order": f"meshfeed, {num_records:,} records, shuffle={shuffle}"}
            row |= {f"ns per id, batches of {batch:,}": nanoseconds(order, batch) for batch in BATCHES}
            rows.append(row | {"cold batch of 256, µs": cold_microseconds(order, 256)})
    keys = list(rows[0])[1:-1]
    for num_records in LENGTHS:
        if (theirs := grain_nanoseconds(num_records)) is not None:
            rows.append({"order": f"Grain index_shuffle, {num_records:,} records", **dict.fromkeys(keys, theirs)})
    for num_records in (10**6, 10**7):  # what torch's and Mosaic's samplers do at the start and at each resume
        start = time.thread_time()
        np.random.default_rng(0).permutation(num_records)
        seconds = time.thread_time() - start
        row = {
            "order": f"numpy permutation of {num_records:,}, per id",
            **dict.fromkeys(keys, seconds / num_records * 1e9),
        }
        rows.append(row | {"cold batch of 256, µs": seconds * 1e6})
    positions = np.arange(65536) + 10**11
    start = time.thread_time()
    for key in range(20):
        permute(positions, 10**12, key)
    bare = (time.thread_time() - start) / 20 / positions.size * 1e9
    note = f"Bare permute at 1e12, batches of 65,536 with a new key each: {bare:.1f} ns per id."
    return [Table("order of records", rows, note, bars=f"ns per id, batches of {BATCHES[2]:,}")]


if __name__ == "__main__":
    main(__doc__, measure)
