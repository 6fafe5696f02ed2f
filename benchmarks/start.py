"""Seconds to start, in processes of their own: to the first batch of a file beyond JAX's own start, and to ``--help``.

JAX's own start is its import and one transfer to the same devices; what a feed adds is counted from there to its first
batch of 64 records of 2,048 int32 from an ArrayRecord file. Python's bytecode is on disk, as after any earlier run: an
environment that forbids it (``PYTHONDONTWRITEBYTECODE``) compiles every module at each start, which takes three times as
long. Wall-clock time counts other programs on the machine; CPU time does not. ``--other`` adds another checkout's ``src``.
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
from typing import Any

from benchmarks import _data
from benchmarks._measure import Table, main, spread

ROOT = pathlib.Path(__file__).parent.parent

FIRST_BATCH = """
import json, sys, time
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("data"))
jax.block_until_ready(jax.device_put(np.zeros((64, 2048), np.int32), sharding))
wall, cpu = time.perf_counter(), time.process_time()
import meshfeed
source = meshfeed.sources.ArrayRecord(sys.argv[1], decode_batch=meshfeed.sources.DecodeRaw(np.int32, 2048))
feed = meshfeed.MultiHostDataLoadIterator(source, sharding, global_batch_size=64, shuffle=True)
jax.block_until_ready(next(feed))
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
feed.close()
"""

HELP = """
import json, sys, time
wall, cpu = time.perf_counter(), time.process_time()
from meshfeed._src.cli.main import main
main(["plan", "--help"], standalone_mode=False)
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""

WORK = {"first batch, beyond JAX": FIRST_BATCH, "meshfeed plan --help": HELP}


def seconds(script: str, path: str, package: str, bytecode: str) -> tuple[float, float]:
    """Runs ``script`` with the package of one checkout; returns its seconds by wall clock and of CPU time."""
    env = {**os.environ, "PYTHONPATH": package, "PYTHONPYCACHEPREFIX": bytecode}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", script, path]
    ended = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    wall, cpu = json.loads(ended.stdout.splitlines()[-1])
    return wall, cpu


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--other", metavar="PATH", help="folder that contains the package meshfeed of another checkout")
    parser.add_argument("--rounds", type=int, default=15)


def measure(options: argparse.Namespace) -> list[Table]:
    packages = {"this checkout": str(ROOT / "src")}
    if options.other:
        packages["the other"] = str(pathlib.Path(options.other).resolve())
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = _data.write_array_record(os.path.join(folder, "records"), _data.tokens(20_000, _data.TOKENS))
        for turn in range(options.rounds + 1):
            for work, script in WORK.items():
                for name in list(packages)[:: 1 if turn % 2 else -1]:
                    took = seconds(script, path, packages[name], os.path.join(folder, "bytecode"))
                    if turn:  # the first writes the bytecode
                        found.setdefault((work, name), []).append(took)
    rows: list[dict[str, Any]] = []
    for (work, name), took in found.items():
        wall, cpu = ([1e3 * each for each in column] for column in zip(*took, strict=True))
        rows.append(
            {
                "start": work,
                "package": name,
                "ms": statistics.median(wall),
                "quartiles": spread(wall),
                "least ms": min(wall),
                "CPU ms": statistics.median(cpu),
                "least CPU ms": min(cpu),
            }
        )
    return [Table(f"milliseconds to start, {options.rounds} rounds of processes in turns", rows)]


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
