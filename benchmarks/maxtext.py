"""meshfeed.maxtext against the way MaxText makes its global arrays, and RemoteFeed against the local feed, on CPU devices.

Both loaders get the same host batches, which lie ready in memory, so that only the way to global arrays is timed.
MaxText's way: split each leaf for the local devices, put the parts, make one array of them, without read-ahead. The
batches are read-only and aligned, writable as ``np.stack`` makes them (both ways then copy), or writable and aligned,
which meshfeed copies and MaxText does not: on CPU its arrays then share memory with what the loader may refill. What a
copy costs by itself stands beside those two: no way that makes one can be faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks._measure import Table, Way, main, rates, take_turns

LEAVES, COLUMNS = 4, 2048
OURS, THEIRS, COPY = "meshfeed.maxtext", "MaxText's way", "one copy of the host batch, and nothing else"
READ_ONLY, STACKED, ALIGNED = "read-only", "writable, from np.stack", "writable, aligned"


def host_batches(rows: int, kind: str) -> list[dict[str, Any]]:
    """Four batches of int32 leaves ``[rows, COLUMNS]``."""
    import numpy as np

    from meshfeed._src.base import memory, ownership

    made = []
    for number in range(4):
        batch = {}
        for leaf in range(LEAVES):
            row = np.full(COLUMNS, number + leaf, np.int32)
            array = np.stack([row] * rows) if kind == STACKED else memory.copy(np.broadcast_to(row, (rows, COLUMNS)))
            batch[f"leaf{leaf}"] = ownership.seal(array) if kind == READ_ONLY else array
        made.append(batch)
    return made


def maxtext_way(batch: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """One batch: each leaf split, put and joined, with what MaxText works out for each leaf again."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    def assemble(leaf: Any) -> Any:
        devices = mesh.local_devices
        parts = jax.device_put(np.split(leaf, len(devices), axis=0), devices)
        shape = (jax.process_count() * leaf.shape[0], *leaf.shape[1:])
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    return jax.tree.map(assemble, batch)


class Repeating:
    """The same few batches for ever."""

    def __init__(self, made: list[dict[str, Any]]) -> None:
        self._made = made

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self._made


def loaders(rows: int, kind: str, rounds: int) -> dict[str, Any]:
    """Batches a second of both ways, in turns."""
    import jax
    import numpy as np

    from meshfeed import maxtext
    from meshfeed._src.base import memory

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    made = host_batches(rows, kind)
    loader = iter(maxtext.MultiHostDataLoadIterator(Repeating(made), mesh))
    turn = iter(Repeating(made))

    def ours() -> int:
        jax.block_until_ready(next(loader))
        return 1

    def theirs() -> int:
        jax.block_until_ready(maxtext_way(next(turn), mesh))
        return 1

    ready = iter(Repeating([{path: memory.copy(leaf) for path, leaf in batch.items()} for batch in made]))

    def copy_alone() -> int:
        target = next(ready)  # memory that is there already: fresh pages cost as much again
        for path, leaf in next(turn).items():
            np.copyto(target[path], leaf)
        return 1

    ways = {OURS: Way(ours, drain=8, close=loader.close), THEIRS: Way(theirs)}
    if kind != READ_ONLY:
        ways[COPY] = Way(copy_alone)
    return take_turns(ways, rounds=rounds, seconds=0.4)


def remote(rows: int, rounds: int) -> dict[str, Any]:
    """Batches a second of RemoteFeed and of the feed, over the same arrays in memory."""
    import jax
    import numpy as np

    import meshfeed

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens = np.arange(16 * rows * COLUMNS, dtype=np.int32).reshape(-1, COLUMNS)

    def make() -> Any:
        return meshfeed.sources.Memory({"tokens": tokens})

    settings: dict[str, Any] = {"global_batch_size": rows, "shuffle": True, "num_epochs": None}
    feeds: dict[str, Any] = {
        "meshfeed.remote.RemoteFeed": meshfeed.remote.RemoteFeed(make, mesh, **settings),
        "the local feed": meshfeed.MultiHostDataLoadIterator(make(), mesh, **settings),
    }

    def way(feed: Any) -> Way:
        def run() -> int:
            jax.block_until_ready(next(feed))
            return 1

        return Way(run, drain=8, close=feed.close)

    return take_turns({name: way(feed) for name, feed in feeds.items()}, rounds=rounds, seconds=0.4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512], help="of a host batch of 4 leaves")
    parser.add_argument("--rounds", type=int, default=9)


def _in_new_process(devices: int, *case: Any) -> dict[str, Any]:
    """CPU devices are made at the start of a process."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.maxtext", "--case", json.dumps(case)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> Iterator[Table]:
    for devices in options.devices:
        for rows in options.rows:
            for kind in (READ_ONLY, STACKED, ALIGNED):
                found = _in_new_process(devices, "loaders", rows, kind, options.rounds)
                size = LEAVES * rows * COLUMNS * 4 / 2**20
                yield rates(
                    f"maxtext, {devices} devices, {LEAVES} leaves, {size:.0f} MiB, {kind}", "batches", found, ours=OURS
                )
    found = _in_new_process(options.devices[0], "remote", options.rows[0], options.rounds)
    yield rates(
        f"remote, {options.devices[0]} devices, int32[{options.rows[0]}, {COLUMNS}]",
        "batches",
        found,
        ours="meshfeed.remote.RemoteFeed",
        note="On CPU the remote feed runs in the same process; its price is that of the calls.",
    )


if __name__ == "__main__":
    if "--case" in sys.argv:
        name, *arguments = json.loads(sys.argv[-1])
        print(json.dumps({"loaders": loaders, "remote": remote}[name](*arguments)))
    else:
        main(__doc__, measure, add_arguments)
