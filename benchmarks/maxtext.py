"""Throughput of meshfeed.maxtext against the way MaxText makes its global arrays, at 8 and 64 CPU devices.

    python benchmarks/maxtext.py [--json]

Both get the same host batches, which lie ready in memory, so that only the way to global arrays is timed. MaxText's way:
split each leaf for the local devices, put the parts, make one array of them; without read-ahead. The batches are what
nobody writes to again (read-only, as decoders and Arrow give them), or writable, which meshfeed copies first and MaxText
does not: on CPU its arrays then share memory with what the loader may refill.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

LEAVES = 4
ROUNDS = 7


def batches(rows: int, columns: int, count: int, *, writable: bool) -> list[dict[str, Any]]:
    """Host batches of int32 leaves ``[rows, columns]``."""
    import numpy as np

    from meshfeed import _aligned

    made = []
    for number in range(count):
        batch = {}
        for leaf in range(LEAVES):
            array = _aligned.empty((rows, columns), np.int32)
            array[...] = number + leaf
            base: Any = array
            while isinstance(base, np.ndarray) and not writable:
                base.flags.writeable = False
                base = base.base
            batch[f"leaf{leaf}"] = array
        made.append(batch)
    return made


def maxtext_way(batch: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """One batch split, put and joined; what MaxText does for each leaf, in other words."""
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

    def __iter__(self) -> Any:
        while True:
            yield from self._made


def measure(devices: int, rows: int, columns: int, *, writable: bool) -> dict[str, Any]:
    """Batches a second of both, in turns, in this process."""
    import jax

    from meshfeed import maxtext

    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    made = batches(rows, columns, 4, writable=writable)
    loader = iter(maxtext.MultiHostDataLoadIterator(Repeating(made), mesh))
    ways = {"maxtext": lambda n: maxtext_way(made[n % len(made)], mesh), "meshfeed": lambda n: next(loader)}
    for way in ways.values():
        for number in range(20):
            jax.block_until_ready(way(number))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            count, start = 0, time.perf_counter()
            while time.perf_counter() - start < 0.4:
                jax.block_until_ready(way(count))
                count += 1
            seconds[name].append((time.perf_counter() - start) / count)
    loader.close()
    rates = {name: 1 / statistics.median(values) for name, values in seconds.items()}
    return {
        "devices": devices,
        "batch": f"{LEAVES} x int32[{rows}, {columns}]",
        "bytes": LEAVES * rows * columns * 4,
        "host_arrays": "writable" if writable else "read-only",
        "maxtext_batches_per_second": round(rates["maxtext"], 1),
        "meshfeed_batches_per_second": round(rates["meshfeed"], 1),
        "ratio": round(rates["meshfeed"] / rates["maxtext"], 2),
    }


def main() -> None:
    """Runs each case in a process of its own, since the number of CPU devices is fixed at start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        devices, rows, columns, writable = json.loads(arguments.case)
        print(json.dumps(measure(devices, rows, columns, writable=writable)))
        return
    cases = [(d, r, c, w) for d in (8, 64) for r, c in ((64, 2048), (512, 2048)) for w in (False, True)]
    results = []
    for case in cases:
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={case[0]}",
        }
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        if not arguments.json:
            one = results[-1]
            print(
                f"{one['devices']:3} devices, {one['batch']:22} {one['host_arrays']:10} MaxText's way "
                f"{one['maxtext_batches_per_second']:8.1f} batches/s, meshfeed {one['meshfeed_batches_per_second']:8.1f}, "
                f"{one['ratio']:.2f} x"
            )
    if arguments.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
