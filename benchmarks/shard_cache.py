"""Waiting for shards of a throttled store: fetched ahead or on demand, in uniform order and along shards.

A store of our own, in its own process, sends 1.3 times the bytes that the loop consumes. The loop sleeps a fixed time per
step. The share of the run spent waiting leaves out the first batch. The second table counts downloads with a cache of 30 %:
the file whose next use is farthest makes room, or the one opened longest ago; real, and simulated as by ``meshfeed plan
--cache``. The third table counts downloads of two processes that share a folder. ``--mosaic PYTHON`` adds two epochs of
Mosaic Streaming on the same store and files, run by that interpreter.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks import _data
from benchmarks._measure import Table, main, with_cpu_devices
from benchmarks._store import bytes_sent, serve

with_cpu_devices(1)

VALUES = 1024  # int32 per record
_SHARED_STEPS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=160)
    parser.add_argument("--records", type=int, default=64, help="per shard, of 4 KiB")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--ratio", type=float, default=1.3, help="bandwidth over consumption")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds per request")
    parser.add_argument("--lanes", type=int, default=4, help="of the order along shards")
    parser.add_argument("--only", default="stalls,evictions,sharing,mosaic")
    parser.add_argument("--mosaic-cache", type=float, nargs="+", default=[1.05], help="shares of the set")
    parser.add_argument("--mosaic", metavar="PYTHON", help="an interpreter that has mosaicml-streaming")


def write_shards(folder: str, options: argparse.Namespace, values: int = VALUES) -> int:
    """Writes the shards as MDS, which both libraries read; returns the bytes of all shards."""
    return _data.write_mds(folder, [options.records] * options.shards, values)


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


def evictions(folder: str, total: int, options: argparse.Namespace) -> Table:
    """Half of an epoch with a cache of 30 %, in batches that need few shards, after as many steps that fill it."""
    import meshfeed
    from meshfeed._src.simulation.hosts import Cache, SimulatedFile, Store, run_hosts_together

    batch, room = 8, int(0.3 * total)
    steps = min(400, options.shards * options.records // batch)
    rows = []
    with serve(folder, bandwidth=1e9) as url:
        for name, shuffle in (("uniform", True), ("blocks of 1,024 records", 1024)):
            for policy, ahead in (
                ("farthest next use", room // 2),
                ("farthest next use, ahead_bytes of 3 %", int(0.03 * total)),
                ("opened longest ago", 0),
            ):
                with tempfile.TemporaryDirectory() as copies:
                    cache = meshfeed.ShardCache(copies, max_bytes=room, ahead_bytes=ahead)
                    with make_feed(url, cache, options, shuffle=shuffle, global_batch_size=batch, prefetch=0) as feed:
                        ids = [feed.record_ids(step) for step in range(steps)]
                        train(feed, 0.02, steps // 2)
                        before = cache.stats()
                        train(feed, 0.02, steps // 2)
                sizes = Cache(room, ahead)
                files = [SimulatedFile(number, total // options.shards, sizes) for number in range(options.shards)]
                uses = [[files[number] for number in np.unique(each // options.records).tolist()] for each in ids]
                run = run_hosts_together([uses], sizes, Store(1e9), seconds=[0.02] * steps, prefetch=0)
                downloads = int(run.hosts[0].downloads_of_batch[steps // 2 :].sum())
                num_uses = sum(map(len, uses[steps // 2 :]))
                fetched = cache.stats().fetched - before.fetched
                rows.append(
                    {
                        "order and policy": f"{name}, {policy}",
                        "downloads": fetched,
                        "simulated": downloads,
                        "reads that waited": cache.stats().misses - before.misses,
                        "hit rate": 1 - fetched / num_uses,
                        "simulated rate": 1 - downloads / num_uses,
                    }
                )
    return Table(
        "Downloads with a cache of 30 %", rows, f"{steps // 2} steps of {batch} records after as many to fill it."
    )


_MOSAIC = """
import sys, time, torch
from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory
clean_stale_shared_memory()
remote, local, batch, step, limit, algorithm = sys.argv[1:7]
began = time.perf_counter()
dataset = StreamingDataset(remote=remote, local=local, shuffle=True, shuffle_algo=algorithm, batch_size=int(batch),
                           cache_limit=int(limit) or None, predownload=8 * int(batch), shuffle_block_size=8192)
loader = torch.utils.data.DataLoader(dataset, batch_size=int(batch), num_workers=0, drop_last=True)
first = waited = 0.0
steps, asked, ends = 0, time.perf_counter(), [began]
for _ in range(2):
    for _ in loader:
        now = time.perf_counter()
        if not steps:
            first = now - began
        else:
            waited += now - asked
        steps += 1
        time.sleep(float(step))
        asked = time.perf_counter()
    ends.append(time.perf_counter())
print("RESULT", steps, first, ends[1] - ends[0], ends[2] - ends[1], waited)
"""


def mosaic(url: str, total: int, options: argparse.Namespace) -> Table:
    """Two epochs of either library from an empty cache: the same store, files, steps and size of the cache."""
    import meshfeed

    rows = []
    for share in options.mosaic_cache:
        room = int(share * total)
        with tempfile.TemporaryDirectory() as folder:
            bytes_sent(url)
            began = time.perf_counter()
            cache = meshfeed.ShardCache(folder, max_bytes=room)
            with make_feed(url, cache, options, shuffle="shards", num_lanes=options.lanes, num_epochs=2) as feed:
                steps = len(feed) // 2
                train(feed, options.step_seconds, 1)
                first = time.perf_counter() - began - options.step_seconds
                train(feed, options.step_seconds, steps - 1)
                cold = time.perf_counter() - began
                train(feed, options.step_seconds)
                rows.append(
                    {
                        "library": f"meshfeed along shards, cache of {share:.0%}",
                        "first epoch s": cold,
                        "second epoch s": time.perf_counter() - began - cold,
                        "first batch s": first,
                        "waiting": feed.stats().stall_fraction,
                        "sent / set": bytes_sent(url) / total,
                    }
                )
        with tempfile.TemporaryDirectory() as folder:
            local = os.path.join(folder, "copy")
            settings = ("s3://data", local, options.batch, options.step_seconds, room if share < 1 else 0, "py1e")
            environment = {
                **os.environ,
                "S3_ENDPOINT_URL": url.removesuffix("/data"),
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            environment |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
            command = [options.mosaic, "-c", _MOSAIC, *map(str, settings)]
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            steps, first, cold, warm, waited = map(float, found.stdout.split("RESULT")[1].split())
            rows.append(
                {
                    "library": f"Mosaic Streaming py1e, cache of {share:.0%}",
                    "first epoch s": cold,
                    "second epoch s": warm,
                    "first batch s": first,
                    "waiting": waited / (waited + steps * options.step_seconds),
                    "sent / set": bytes_sent(url) / total,
                }
            )
    return Table("Two epochs", rows, "Both start with an empty cache; imports are left out.", bars="first epoch s")


def sharing(url: str, total: int, options: argparse.Namespace) -> Table:
    """Downloads of one process, and of two that share a folder or have one of half the size each."""
    cases = [
        ("one process", 0.3, [(0, 0)]),
        ("two, the same order, one folder", 0.3, [(0, 0), (0, 0)]),
        ("two, different orders, one folder", 0.3, [(0, 0), (1, 0)]),
        ("two, different orders, half a folder each", 0.15, [(0, 0), (1, 1)]),
    ]
    rows = []
    for name, share, readers in cases:
        bytes_sent(url)
        with tempfile.TemporaryDirectory() as root:
            processes = [
                multiprocessing.get_context("spawn").Process(
                    target=_consume, args=(url, f"{root}/{folder}", int(share * total), seed, options)
                )
                for seed, folder in readers
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        rows.append({"processes": name, "sent / set": bytes_sent(url) / total})
    return Table(
        "Downloads of processes that share a folder, in uniform order",
        rows,
        f"{_SHARED_STEPS} steps of 8 records per process, {options.shards} shards, a cache of 30 % of the set in all.",
        bars="sent / set",
        ours="one folder",
    )


def _consume(url: str, folder: str, max_bytes: int, seed: int, options: argparse.Namespace) -> None:
    import meshfeed

    cache = meshfeed.ShardCache(folder, max_bytes=max_bytes)
    with make_feed(url, cache, options, shuffle=True, seed=seed, global_batch_size=8) as feed:
        train(feed, 0.05, _SHARED_STEPS)


def measure(options: argparse.Namespace) -> Any:
    with tempfile.TemporaryDirectory() as root:
        folder = os.path.join(root, "data")
        os.mkdir(folder)
        total = write_shards(folder, options)
        consumption = total / (options.shards * options.records / options.batch * options.step_seconds)
        with serve(root, bandwidth=options.ratio * consumption, latency=options.latency) as server:
            url = f"{server}/data"
            if "stalls" in options.only:
                yield stalls(url, total, options)
            if "mosaic" in options.only and options.mosaic:
                yield mosaic(url, total, options)
        if "sharing" in options.only:
            with serve(root, bandwidth=200e6, latency=options.latency) as server:
                yield sharing(f"{server}/data", total, options)
        if "evictions" in options.only:
            yield evictions(folder, total, options)


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
