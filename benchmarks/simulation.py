"""What ``meshfeed.testing.simulate`` predicts, beside real runs: bytes downloaded and the share of the time spent waiting.

A store in its own process sends a multiple of the bytes that the loop consumes, over one link that all hosts share. Hosts are
processes of one job with a cache each. The loop sleeps a fixed time per step, for two epochs; the first batch is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from typing import Any

from benchmarks import shard_cache
from benchmarks._measure import Table, main, with_cpu_devices
from benchmarks._store import serve

with_cpu_devices(1)

_VALUES = 4096  # int32 per record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step-seconds", type=float, default=0.06)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds per request")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the runs")


@dataclasses.dataclass(frozen=True)
class _Case:
    """One run: cache over what a host reads along shards (over the set for other orders), bandwidth over consumption."""

    shuffle: Any
    share: float
    ratio: float
    hosts: int = 1
    lanes: int | None = None
    weights: tuple[float, ...] | None = None
    shards: int = 48
    batch: int = 8


def _cases() -> list[_Case]:
    from meshfeed import ShardShuffle

    affinity = ShardShuffle(affinity=True)
    return [
        _Case(True, 1.1, 2.0),
        _Case(True, 0.5, 2.0, shards=24, batch=4),
        _Case("shards", 0.1, 1.3, lanes=2),
        _Case("shards", 0.5, 0.7, hosts=2, lanes=4),
        _Case(affinity, 1.1, 1.3, hosts=2, lanes=4),
        _Case("shards", 0.5, 1.0, lanes=2, weights=(0.7, 0.3)),
        _Case(affinity, 1.1, 1.0, hosts=2, lanes=4, weights=(0.7, 0.3)),
        _Case(128, 0.25, 1.0),
    ]


def _source(url: str, parts: int, weights: Any, cache: Any) -> Any:
    import meshfeed

    sources = [meshfeed.sources.MDS(f"{url}/{number}", cache=cache) for number in range(parts)]
    if weights is None:
        return sources[0]
    named = {f"part {number}": source for number, source in enumerate(sources)}
    return meshfeed.sources.Mixture(named, dict(zip(named, weights, strict=True)), block=32)


def train(
    url: str, folder: str, max_bytes: int, settings: dict[str, Any], weights: Any, step_seconds: float
) -> tuple[int, float, float, float]:
    """Trains for two epochs on this host; returns bytes, share of waiting, seconds to the first batch and per step."""
    import jax

    import meshfeed

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cache = meshfeed.ShardCache(f"{folder}/{jax.process_index()}", max_bytes=max_bytes)
    source = _source(url, 1 if weights is None else len(weights), weights, cache)
    together = jax.jit(lambda batch: batch.sum())
    with meshfeed.Feed(source, mesh, num_epochs=2, **settings) as feed:
        for batch in feed:
            together(batch["x"]).block_until_ready()
            time.sleep(step_seconds)
        stats = feed.stats()
    worked = (1 - stats.stall_fraction) * stats.elapsed_seconds / (stats.batches - 1)
    return cache.stats().fetched_bytes, stats.stall_fraction, stats.startup_seconds, worked


def _measure(case: _Case, options: argparse.Namespace) -> dict[str, Any]:
    from meshfeed.testing import run_hosts, simulate

    with tempfile.TemporaryDirectory() as root:
        parts = 1 if case.weights is None else len(case.weights)
        total = 0
        for number in range(parts):
            os.mkdir(f"{root}/{number}")
            shards = argparse.Namespace(shards=case.shards // parts, records=32)
            total += shard_cache.write_shards(f"{root}/{number}", shards, _VALUES)
        consumption = case.batch * 4 * _VALUES / options.step_seconds
        max_bytes = int(case.share * total / (case.hosts if case.lanes else 1))
        settings = {"global_batch_size": case.batch, "shuffle": case.shuffle, "num_lanes": case.lanes}
        with serve(root, bandwidth=case.ratio * consumption, latency=options.latency) as url:
            arguments = (url, f"{root}/copies", max_bytes, settings, case.weights, options.step_seconds)
            if case.hosts == 1:
                real = [train(*arguments)]
            else:
                real = [
                    result.value
                    for result in run_hosts(
                        train, *arguments, num_hosts=case.hosts, devices_per_host=1, timeout_seconds=600
                    )
                ]
            step_seconds = sum(one[3] for one in real) / len(real)
            with tempfile.TemporaryDirectory() as copies:
                import meshfeed

                source = _source(url, parts, case.weights, meshfeed.ShardCache(copies, max_bytes=max_bytes))
                found = simulate(
                    source,
                    hosts=case.hosts,
                    bandwidth=case.ratio * consumption,
                    shared_bandwidth=case.ratio * consumption,
                    step_seconds=step_seconds,
                    cache=max_bytes,
                    latency_seconds=options.latency,
                    **settings,
                ).orders[0]
    fetched, waiting = sum(one[0] for one in real), sum(one[1] for one in real) / len(real)
    predicted = sum(found.bytes_per_epoch)
    return {
        "order": f"{found.name}, {case.hosts} host{'s' * (case.hosts > 1)}" + (", mixture" if case.weights else ""),
        "cache": case.share,
        "bandwidth": case.ratio,
        "sets": fetched / total,
        "simulated sets": predicted / total,
        "bytes off": predicted / fetched - 1,
        "waiting": waiting,
        "simulated waiting": found.total_stall_fraction,
        "points off": 100 * (found.total_stall_fraction - waiting),
        "step s": step_seconds,
        "first batch s": real[0][2],
        "simulated s": found.first_batch_seconds,
    }


def measure(options: argparse.Namespace) -> Any:
    cases = _cases()
    rows = []
    for number in options.only or range(len(cases)):
        rows.append(_measure(cases[number], options))
        print(rows[-1], flush=True)
    yield Table(
        "Simulated and real: bytes over those of the set, and the share of the time spent waiting",
        rows,
        f"Steps of {options.step_seconds:g} s and what a busy machine adds, which the simulation is told; "
        f"{options.latency * 1e3:g} ms per request. The cache is a share of what a host reads, the bandwidth a multiple of "
        "what the loop consumes without delay.",
    )


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
