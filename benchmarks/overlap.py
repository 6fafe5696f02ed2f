"""How much of loading is hidden behind the step, and what the feed itself costs a batch.

The first table trains (sleeps) a fixed time a step while a batch takes 0.2 to 1.2 of that to load (a source that sleeps),
without read-ahead and with it. The second takes the read away (a source that gives the same array each time), so that
what is left is the feed's own work: order, checks, state, statistics, queue. The last one's limit is JAX's call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks._measure import Table, main, make_mesh, spread, with_cpu_devices

with_cpu_devices(8)

ROWS, TOKENS = 64, 2048


class Slow:
    """A batch takes a fixed time to read, during which the processor is free, as it is while a disk is read."""

    def __init__(self, seconds: float) -> None:
        from meshfeed._src.base import memory, ownership

        self._batch = memory.empty((ROWS, TOKENS), np.int32)
        self._batch[:] = 0
        ownership.seal(self._batch)  # an array that a source may write to again is copied, which is part of reading
        self._seconds = seconds

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, record_id: int) -> Any:
        return self._batch[0]

    def read_batch(self, record_ids: Any) -> Any:
        """The same rows each time."""
        if self._seconds:
            time.sleep(self._seconds)
        return self._batch[: len(record_ids)]

    def fingerprint(self) -> Any:
        """Nothing to compare."""
        return {"kind": "slow"}


def make_feed(source: Any, prefetch: int) -> Any:
    from jax.sharding import NamedSharding, PartitionSpec

    import meshfeed

    return meshfeed.MultiHostDataLoadIterator(
        source,
        NamedSharding(make_mesh(), PartitionSpec("data")),
        global_batch_size=ROWS,
        shuffle=True,
        num_epochs=None,
        prefetch=prefetch,
    )


def stalls(options: argparse.Namespace) -> Table:
    """Share of the run that the loop waits in ``next``."""
    depths = (0, 2, 8)
    rows = []
    for ratio in options.ratios:
        feeds = {depth: make_feed(Slow(ratio * options.step_seconds), depth) for depth in depths}
        found: dict[int, list[float]] = {depth: [] for depth in depths}
        for _ in range(options.rounds):
            for depth, feed in feeds.items():
                for _ in range(depth + 2):
                    next(feed)
                    time.sleep(options.step_seconds)
                waited, begun = 0.0, time.perf_counter()
                for _ in range(options.steps):
                    start = time.perf_counter()
                    next(feed)
                    waited += time.perf_counter() - start
                    time.sleep(options.step_seconds)
                found[depth].append(waited / (time.perf_counter() - begun))
        for feed in feeds.values():
            feed.close()
        least = max(0.0, 1 - 1 / ratio) if ratio else 0.0
        row: dict[str, Any] = {"load / step": ratio, "least possible": f"{least:.1%}"}
        for depth in depths:
            row[f"prefetch={depth}"] = f"{statistics.median(found[depth]):.1%}"
        rows.append(row)
    note = (
        "Without read-ahead the share is load / (load + step). With it nothing is left below a ratio of 1; above it the "
        "loop waits for the data, whatever the depth. On a busy machine the loop also waits for its turn on a core."
    )
    return Table(f"stall fraction, {options.step_seconds * 1e3:.0f} ms per step", rows, note)


def bookkeeping(options: argparse.Namespace) -> Table:
    """Microseconds of ``next`` where reading costs nothing, and what of them is JAX's own."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from meshfeed._src.arrays.placer import ShardedPlacer

    source = Slow(0.0)
    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    placer = ShardedPlacer(sharding, 0)
    batch = source.read_batch(range(ROWS))
    feed = make_feed(source, 0)
    ways = {
        "next(feed), reading costs nothing": lambda: next(feed),
        "of which assembly, that is JAX's call": lambda: placer.put(batch, ROWS),
        "get_state()": feed.get_state,
        "stats()": feed.stats,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(50):
            way()
    for _ in range(options.rounds * 4):
        for name, way in ways.items():
            out, start, busy = None, time.perf_counter(), time.process_time()
            for _ in range(200):
                out = way()
            times[name].append((time.perf_counter() - start) / 200 * 1e6)
            cpu[name].append((time.process_time() - busy) / 200 * 1e6)
            jax.block_until_ready(out)
    feed.close()
    own = [a - b for a, b in zip(*list(times.values())[:2], strict=True)]
    own_cpu = [a - b for a, b in zip(*list(cpu.values())[:2], strict=True)]
    rows = [
        {
            "what": name,
            "µs": statistics.median(times[name]),
            "quartiles": spread(times[name]),
            "CPU µs": statistics.median(cpu[name]),
        }
        for name in ways
    ]
    rows.insert(
        2,
        {
            "what": "bookkeeping: the difference",
            "µs": statistics.median(own),
            "quartiles": spread(own),
            "CPU µs": statistics.median(own_cpu),
        },
    )
    return Table(f"bookkeeping per batch, {ROWS} rows of {TOKENS:,} int32, {len(jax.devices())} devices", rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.5, 0.7, 0.9, 1.0, 1.2])
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Iterator[Table]:
    yield bookkeeping(options)
    yield stalls(options)


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
