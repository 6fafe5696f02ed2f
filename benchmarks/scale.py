"""What a feed costs in time and memory as data and hosts grow: start, resume, size of the state, plan, peak memory.

The source is simulated: it says how long it is and gives zeros, so that only the feed's own cost shows. Peak memory is
measured in a process for each way, beside that of the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import _data
from benchmarks._measure import Table, main, make_mesh, with_cpu_devices

with_cpu_devices(8)


class Zeros:
    """A source of any length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, record_id: int) -> Any:
        return np.zeros(16, np.int32)

    def read_batch(self, record_ids: Any) -> Any:
        """Zeros."""
        return np.zeros((len(record_ids), 16), np.int32)

    def fingerprint(self) -> Any:
        """Nothing to compare."""
        return {"kind": "zeros"}


def lengths() -> Table:
    """Start, resume and state against the length of the source."""
    from jax.sharding import NamedSharding, PartitionSpec

    import meshfeed

    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    rows = []
    for length in (10**6, 10**9, 10**12):
        starts, resumes, size = [], [], 0
        for _ in range(7):
            begun = time.perf_counter()
            feed = meshfeed.MultiHostDataLoadIterator(
                Zeros(length), sharding, global_batch_size=256, shuffle=True, prefetch=0
            )
            next(feed)
            starts.append(time.perf_counter() - begun)
            state = feed.get_state()
            state["position"] = length // 10 * 9 // 256 * 256
            feed.close()
            begun = time.perf_counter()
            feed = meshfeed.MultiHostDataLoadIterator(
                Zeros(length), sharding, global_batch_size=256, shuffle=True, prefetch=0
            )
            feed.set_state(state)
            next(feed)
            resumes.append(time.perf_counter() - begun)
            size = len(json.dumps(feed.get_state()))
            feed.close()
        rows.append(
            {
                "records": f"{length:,}",
                "first batch, ms": statistics.median(starts) * 1e3,
                "first batch at 90 %, ms": statistics.median(resumes) * 1e3,
                "state, bytes": size,
            }
        )
    return Table("start and resume against the length of the source", rows)


def hosts() -> Table:
    """Plan and state against the number of hosts; what the coordination service bears is in the benchmark agreement."""
    from meshfeed._src.agreement.windows import full_window
    from meshfeed._src.plan.topology import plan_table

    rows = []
    for number in (1, 4, 16, 64, 256, 1024, 4096):
        axes = {"data": number * 2, "model": 2}
        times = []
        for _ in range(20):
            begun = time.perf_counter()
            plan_table(axes, ["data"], None, number, 4, (number * 8, 2048)).row_ranges()
            times.append(time.perf_counter() - begun)
        window = full_window(number, 1, 1 << 30)
        rows.append(
            {
                "hosts": number,
                "plan of all of them, ms": statistics.median(times) * 1e3,
                "steps per window": window,
                "requests/s to the coordinator at 20 ms per step": 2 * number / (window * 0.02) if number > 1 else 0,
            }
        )
    note = "The state of random access is the same file for any number of hosts: its size is in the table above."
    return Table("cost against hosts of 4 devices", rows, note)


def memory(options: argparse.Namespace) -> Table:
    """Peak resident memory over a run."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = _data.write_array_record(os.path.join(folder, "records"), _data.tokens(100_000, 512))
        for way in (
            "meshfeed",
            "meshfeed, prefetch=0",
            "Grain, as documented",
            "Grain, its best (no threads)",
            "Grain DataLoader",
            "torch DataLoader, __getitems__",
        ):
            command = [
                sys.executable,
                "-m",
                "benchmarks.scale",
                "--child",
                way,
                "--path",
                path,
                "--batches",
                str(options.batches),
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
            if done.returncode == 0 and done.stdout.strip():
                rows.append({"way": way, **json.loads(done.stdout.splitlines()[-1])})
    note = "Records of 2 KB, 100,000 in one file, batches of 64; the index of the open file is within these figures."
    return Table(f"peak memory over {options.batches} batches, MiB above the imports", rows, note)


def child(options: argparse.Namespace) -> None:
    """Runs one way in this process and prints its memory."""
    import psutil
    from jax.sharding import NamedSharding, PartitionSpec

    import meshfeed
    from benchmarks import _peers
    from benchmarks.feed import our_ways

    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    put = _peers.putter(sharding)
    put(np.zeros((64, 512), np.int32))
    if "torch" in options.child:
        if not _peers.has("torch"):
            return
        import torch.utils.data  # noqa: F401
    import grain  # noqa: F401

    before = psutil.Process().memory_info().rss
    if options.child.startswith("meshfeed"):
        source = meshfeed.sources.ArrayRecord(options.path, decode_batch=_data.join_tokens)
        way = our_ways(source, sharding, 64, shuffle=True)[options.child]
    else:
        ways = _peers.grain_ways(options.path, 64, _data.decode_tokens, put)
        way = (ways | _peers.torch_ways(options.path, 64, _data.join_tokens, put))[options.child]
    done, early = 0, 0
    while done < options.batches:
        done += way.run()
        if done == options.batches // 4:
            early = psutil.Process().memory_info().rss
    after = psutil.Process().memory_info()
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
    way.close()
    print(
        json.dumps(
            {
                "after a quarter": (early - before) / 2**20,
                "at the end": (after.rss - before) / 2**20,
                "peak": (peak - before) / 2**20,
            }
        ),
        flush=True,
    )
    os._exit(0)  # threads of some peers do not end by themselves


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)


def measure(options: argparse.Namespace) -> Iterator[Table]:
    yield lengths()
    yield hosts()
    yield memory(options)


if __name__ == "__main__":
    main(__doc__, measure, add_arguments, child)
