"""Waiting for shards of a throttled store: fetched ahead or on demand, in uniform order and along shards.

A store of our own, in its own process, sends 1.3 times the bytes that the loop consumes. The loop sleeps a fixed time per
step. The share of the run spent waiting leaves out the first batch. The second table counts downloads with a cache of 30 %:
the file whose next use is farthest makes room, or the one opened longest ago; real, and as ``meshfeed plan --cache``
computes them. ``--mosaic PYTHON`` adds an epoch of Mosaic Streaming on the same store and files, run by that interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks._measure import Table, main, with_cpu_devices
from benchmarks._store import bytes_sent, serve

with_cpu_devices(1)

VALUES = 1024  # int32 per record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=160)
    parser.add_argument("--records", type=int, default=64, help="per shard, of 4 KiB")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--ratio", type=float, default=1.3, help="bandwidth over consumption")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds per request")
    parser.add_argument("--lanes", type=int, default=4, help="of the order along shards")
    parser.add_argument("--only", default="stalls,evictions,mosaic")
    parser.add_argument("--mosaic", metavar="PYTHON", help="an interpreter that has mosaicml-streaming")


def write_shards(folder: str, options: argparse.Namespace) -> int:
    """Writes the shards as MDS, which both libraries read; returns the bytes of all shards."""
    rng = np.random.default_rng(0)
    shards = []
    for number in range(options.shards):
        name = f"shard.{number:05}.mds"
        rows = rng.integers(0, 1 << 31, (options.records, VALUES), np.int64).astype(np.int32)
        rows[:, 0] = np.arange(options.records) + number * options.records
        config = {
            "column_encodings": [f"ndarray:int32:{VALUES}"],
            "column_names": ["x"],
            "column_sizes": [4 * VALUES],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": None,
            "version": 2,
        }
        head = json.dumps(config, sort_keys=True).encode()
        start = 4 * (2 + options.records) + len(head)
        offsets = np.arange(start, start + rows.nbytes + 1, 4 * VALUES, dtype=np.uint32)
        content = b"".join((np.uint32(options.records).tobytes(), offsets.tobytes(), head, rows.tobytes()))
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
        raw = {"basename": name, "bytes": len(content), "hashes": {}}
        shards.append({**config, "raw_data": raw, "samples": options.records, "zip_data": None})
    with open(os.path.join(folder, "index.json"), "w") as file:
        json.dump({"version": 2, "shards": shards}, file)
    return sum(shard["raw_data"]["bytes"] for shard in shards)


def make_feed(url: str, cache: Any, options: argparse.Namespace, **settings: Any) -> Any:
    import jax

    import meshfeed

    mesh = jax.make_mesh((1,), ("data",))
    source = meshfeed.sources.MDS(url, cache=cache)
    return meshfeed.Feed(source, mesh, **{"global_batch_size": options.batch, **settings})


def train(feed: Any, seconds: float, steps: int | None = None) -> int:
    """Takes batches and sleeps; returns their number."""
    done = 0
    for _ in feed:
        time.sleep(seconds)
        done += 1
        if done == steps:
            break
    return done


def stalls(url: str, total: int, options: argparse.Namespace) -> Table:
    import meshfeed

    epoch = options.shards * options.records // options.batch
    shards = {"shuffle": "shards", "num_lanes": options.lanes}
    cases = [
        ("uniform, cache of the whole set, first epoch", {"shuffle": True}, 1.05, None, 0),
        ("uniform, cache of the whole set, from the second epoch on", {"shuffle": True, "num_epochs": 2}, 1.05, None, epoch),
        ("uniform, whole set, on demand, first epoch", {"shuffle": True}, 1.05, 0, 0),
        ("along shards, cache of 10 %", {**shards, "num_epochs": 2}, 0.1, None, 0),
        ("along shards, cache of 10 %, on demand", shards, 0.1, 0, 0),
    ]  # fmt: skip
    rows = []
    for name, settings, share, ahead, skipped in cases:
        with tempfile.TemporaryDirectory() as folder:
            cache = meshfeed.ShardCache(folder, max_bytes=int(share * total), ahead_bytes=ahead)
            with make_feed(url, cache, options, **settings) as feed:
                bytes_sent(url)
                if skipped:
                    train(feed, options.step_seconds, skipped)
                before = feed.stats()
                steps = train(feed, options.step_seconds)
                stats = feed.stats(since=before) if skipped else feed.stats()
            rows.append(
                {
                    "order and cache": name,
                    "steps": steps,
                    "waiting": stats.stall_fraction,
                    "first batch s": feed.stats().startup_seconds,
                    "sent / set": bytes_sent(url) / total,
                    "fetched ahead": cache.stats().fetched_ahead / max(1, cache.stats().fetched),
                }
            )
    return Table(
        f"Share of the run spent waiting, bandwidth {options.ratio:g} × consumption",
        rows,
        f"{options.shards} shards of {total // options.shards:,} bytes, batches of {options.batch}, "
        f"{options.step_seconds:g} s per step, {options.latency * 1e3:g} ms per request. The first batch is left out.",
        bars="waiting",
        ours="along",
    )


def measure(options: argparse.Namespace) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        total = write_shards(folder, options)
        consumption = total / (options.shards * options.records / options.batch * options.step_seconds)
        with serve(folder, bandwidth=options.ratio * consumption, latency=options.latency) as url:
            if "stalls" in options.only:
                yield stalls(url, total, options)


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
