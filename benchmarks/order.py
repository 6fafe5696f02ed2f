"""Nanoseconds an id of the record order, one thread, by batch size and length of the source.

Run: ``python benchmarks/order.py [--json]``. Each figure is the best of five runs over neighbouring batches, as a feed
asks for them; "cold" is a batch far from all earlier ones, which is what the first batch after a resume costs.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from meshfeed._order import EpochOrder, permute

BATCHES = (256, 1024, 4096, 16384, 65536)
LENGTHS = (10**6, 2**20 + 1, 10**9, 10**12, 2**40 + 1)


def nanoseconds(order: EpochOrder, batch: int) -> float:
    """Best nanoseconds an id over runs of neighbouring batches that no earlier run has asked for."""
    batches = max(20, 300_000 // batch)
    best = float("inf")
    for repeat in range(5):
        first = order.num_records * (3 + repeat) + order.num_records // 3
        asked = [np.arange(first + i * batch, first + (i + 1) * batch) for i in range(batches)]
        start = time.perf_counter()
        for positions in asked:
            order.ids_at(positions)
        best = min(best, (time.perf_counter() - start) / (batches * batch) * 1e9)
    return best


def cold_microseconds(order: EpochOrder, batch: int) -> float:
    """Median microseconds of one batch at a place where nothing is cached."""
    rng = np.random.default_rng(0)
    times = []
    for _ in range(200):
        first = int(rng.integers(0, 10 * order.num_records))
        positions = np.arange(first, first + batch)
        start = time.perf_counter()
        order.ids_at(positions)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def main() -> None:
    """Prints one line a length and shuffle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args()
    rows = []
    for num_records in LENGTHS:
        for shuffle in (True, 1024, False):
            order = EpochOrder(num_records, shuffle=shuffle, seed=1, num_epochs=None)
            rows.append(
                {
                    "num_records": num_records,
                    "shuffle": shuffle,
                    "ns_per_id": {batch: round(nanoseconds(order, batch), 1) for batch in BATCHES},
                    "cold_batch_of_256_us": round(cold_microseconds(order, 256), 1),
                }
            )
    x = np.arange(65536) + 10**11
    start = time.perf_counter()
    for key in range(20):
        permute(x, 10**12, key)
    bare = (time.perf_counter() - start) / 20 / x.size * 1e9
    if arguments.json:
        print(json.dumps({"rows": rows, "bare_permute_1e12_ns": round(bare, 1)}))
        return
    print(
        f"{'records':>16} {'shuffle':>8} " + " ".join(f"{batch:>7}" for batch in BATCHES) + "  ns an id | cold 256, µs"
    )
    for row in rows:
        figures = " ".join(f"{row['ns_per_id'][batch]:7.1f}" for batch in BATCHES)
        print(
            f"{row['num_records']:>16,} {row['shuffle']!s:>8} {figures}           | {row['cold_batch_of_256_us']:.1f}"
        )
    print(f"bare permute at 1e12, batches of 65,536 with a new key each: {bare:.1f} ns an id")


if __name__ == "__main__":
    main()
