"""Host batch to global arrays: ours against JAX's private call by itself, MaxText's way, and the public ways.

Each number of devices runs in a process of its own, because CPU devices are made at its start. Rounds are interleaved
(every way once, in random order) and the figures are medians, with ratios of medians: absolute times of a shared
machine do not hold, ratios within one run do. A figure is the time of the call; waiting for the arrays and dropping
them is outside. All ways get the same 64-byte-aligned int32 arrays, which nobody writes to afterwards.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks._measure import Table, main, spread

COLUMNS = 2048
MEBIBYTES = {8: 16, 64: 16, 512: 128}


def maxtext_way(batch: dict[str, Any], sharding: Any, devices: list[Any]) -> dict[str, Any]:
    """What MaxText does: split each leaf over the devices, put the parts, and join the arrays."""
    import jax
    import numpy as np

    out = {}
    for key, leaf in batch.items():
        parts = np.split(leaf, len(devices), axis=0)
        arrays = jax.device_put(parts, devices)
        out[key] = jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)
    return out


def milliseconds(num_devices: int, num_leaves: int, rounds: int, num_bytes: int) -> dict[str, list[float]]:
    """Milliseconds of each way, one figure a round."""
    import jax
    import numpy as np
    from jax._src.lib import xla_client
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from meshfeed._src.arrays.device_put import DevicePut
    from meshfeed._src.arrays.placer import ShardedPlacer
    from meshfeed._src.base import memory

    mesh = jax.make_mesh((num_devices,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    devices = list(mesh.devices.flat)
    num_rows = max(num_devices, num_bytes // (COLUMNS * 4 * num_leaves) // num_devices * num_devices)
    batch = {f"leaf_{i}": memory.empty((num_rows, COLUMNS), np.int32) for i in range(num_leaves)}
    for i, leaf in enumerate(batch.values()):
        leaf[:] = i
    ours, public = ShardedPlacer(sharding, 0), ShardedPlacer(sharding, 0, device_put=DevicePut(None, False))
    aval = jax.device_put(batch["leaf_0"], sharding).aval
    size = num_rows // num_devices
    slices = [slice(i * size, (i + 1) * size) for i in range(num_devices)]

    def raw() -> dict[str, Any]:
        return {
            key: xla_client.batched_device_put(aval, sharding, [leaf[part] for part in slices], devices)
            for key, leaf in batch.items()
        }

    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours.put(batch, num_rows),
        "raw_fast_call": raw,
        "ours_public_fall_back": lambda: public.put(batch, num_rows),
        "maxtext": lambda: maxtext_way(batch, sharding, devices),
        "levanter": lambda: {
            key: jax.make_array_from_callback(leaf.shape, sharding, lambda index, leaf=leaf: leaf[index])
            for key, leaf in batch.items()
        },
        "process_local_data": lambda: {
            key: jax.make_array_from_process_local_data(sharding, leaf, leaf.shape) for key, leaf in batch.items()
        },
        "device_put": lambda: jax.device_put(batch, sharding),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    rng = random.Random(0)
    gc.disable()
    for number in range(rounds + 2):
        rng.shuffle(names)  # no way always runs in the wake of the same other
        for name in names:
            start = time.perf_counter()
            out = ways[name]()
            elapsed = time.perf_counter() - start
            jax.block_until_ready(out)
            del out
            if number >= 2:
                times[name].append(elapsed * 1e3)
    gc.enable()
    return times


def _in_new_process(num_devices: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    command = [
        sys.executable,
        "-m",
        "benchmarks.assembly",
        "--child",
        str(num_devices),
        "--rounds",
        str(arguments.rounds),
    ]
    command += ["--leaves", *map(str, arguments.leaves)]
    done = subprocess.run(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        check=True,
        timeout=1200,
    )
    return json.loads(done.stdout.splitlines()[-1])


NAMES = {
    "ours": "meshfeed",
    "raw_fast_call": "batched_device_put by itself (floor)",
    "ours_public_fall_back": "meshfeed, public fall-back",
    "maxtext": "MaxText's way: split, put, join",
    "levanter": "Levanter's way: make_array_from_callback",
    "process_local_data": "make_array_from_process_local_data",
    "device_put": "device_put",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)


def measure(options: argparse.Namespace) -> list[Table]:
    tables = []
    for num_devices in options.devices:
        for found in _in_new_process(num_devices, options):
            leaves, times = found["leaves"], found["times"]
            medians = {name: statistics.median(values) for name, values in times.items()}
            rows = [
                {
                    "way": NAMES[name],
                    "ms": median,
                    "quartiles": spread(times[name]),
                    "× the floor": median / medians["raw_fast_call"],
                    "ours is × as fast": median / medians["ours"],
                }
                for name, median in medians.items()
            ]
            mebibytes = MEBIBYTES.get(num_devices, 16)
            title = f"assembly, {num_devices} devices, {leaves} leaves, {mebibytes} MiB"
            tables.append(Table(title, rows, bars="ms" if leaves == 4 else None))
    return tables


def child(options: argparse.Namespace) -> None:
    """Measures in this process, which has the devices, and prints JSON."""
    num_bytes = MEBIBYTES.get(options.child, 16) * 2**20
    rows = [
        {"leaves": leaves, "times": milliseconds(options.child, leaves, options.rounds, num_bytes)}
        for leaves in options.leaves
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main(__doc__, measure, add_arguments, child)
