"""Speed of this checkout's ``next(feed)`` and restores beside those of another checkout: processes that take turns.

``scripts/bench against --other ../older/src`` compares with a folder that contains the package ``meshfeed``; further
folders for its ``PYTHONPATH`` follow after colons. ``--revision main`` takes the package of a commit instead. Any version
with ``MultiHostDataLoadIterator`` will do. Use it to check that a change costs nothing. On a machine that others use too,
CPU time and the fastest rounds vary the least. A process keeps the memory layout that it has found, which alone makes it
up to 10 % faster or slower than another of the same code; so both checkouts are started several times.

``--at-least 0.95`` ends with status 1 if a case is slower than that share of the other by every measure: medians, fastest
rounds and CPU time. Of two checkouts of the same code, at least one measure was 0.99 or more in each of seven cases.

Cases: ``assembly`` (arrays in memory), ``lm`` (20,000 records of 2,048 int32, shuffled), ``cold`` (the same,
dropped from the page cache before each round), ``in-order`` (not shuffled), ``compressed`` (zstd), ``million`` (1,000,000
records of 200 bytes, 512 a batch), ``mosaic`` (4 KB records, decoded one by one), ``mix`` (35 components) and ``overlap``
(a step after each batch). A ``0`` after the name: without read-ahead.
``restore`` and the names that begin with it restore the arrays of ``benchmarks restore`` on 4 hosts, each checkout what
it has saved itself; ``ms`` is then one restore on the slowest host.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import _data, cold, restore
from benchmarks._measure import Table, main, make_mesh, spread, with_cpu_devices

ROOT = pathlib.Path(__file__).parent.parent
COMPONENTS = 35


def join_bytes(records: list[bytes]) -> dict[str, np.ndarray]:
    return {"x": np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)}


def join_tokens(records: list[bytes]) -> dict[str, np.ndarray]:
    return {"tokens": _data.join_tokens(records)}


def decode_one(record: bytes) -> dict[str, np.ndarray]:
    return {"x": np.frombuffer(record, np.uint8)}


def _written(folder: str, name: str, records: int, num_tokens: int = _data.TOKENS, layout: str = "uncompressed") -> str:
    path = os.path.join(folder, f"{name}.array_record")
    return _data.write_array_record(path, _data.tokens(records, num_tokens), f"group_size:1,{layout}")


def memory(folder: str) -> Any:
    from meshfeed.sources import Memory

    return Memory({"x": np.zeros((4096, 16), np.float32), "y": np.zeros((4096,), np.int32)})


def lm(folder: str, layout: str = "uncompressed") -> Any:
    from meshfeed.sources import ArrayRecord

    return ArrayRecord(_lm_file(folder, layout), decode_batch=join_tokens)


def _lm_file(folder: str, layout: str = "uncompressed") -> str:
    return _written(folder, f"lm-{layout}", 20_000, layout=layout)


def million(folder: str) -> Any:
    from meshfeed.sources import ArrayRecord

    return ArrayRecord(_written(folder, "million", 1_000_000, 50), decode_batch=join_bytes)


def mosaic(folder: str) -> Any:
    from meshfeed.sources import ArrayRecord

    return ArrayRecord(_written(folder, "mosaic", 20_000, 1024), decode=decode_one)


def mix(folder: str) -> Any:
    from meshfeed.sources import ArrayRecord, Mixture

    paths = {f"part{i}": _written(folder, f"part{i}", 300) for i in range(COMPONENTS)}
    parts = {name: ArrayRecord(path, decode_batch=join_tokens) for name, path in paths.items()}
    return Mixture(parts, weights=dict.fromkeys(parts, 1))


# case → source, batch size, whether to shuffle, batches per round
CASES: dict[str, tuple[Callable[[str], Any], int, bool, int]] = {
    "assembly": (memory, 64, False, 200),
    "lm": (lm, 64, True, 40),
    "cold": (lm, 64, True, 40),
    "in-order": (lm, 64, False, 40),
    "compressed": (lambda folder: lm(folder, "zstd"), 64, True, 40),
    "million": (million, 512, True, 40),
    "mosaic": (mosaic, 64, True, 40),
    "mix": (mix, 64, True, 40),
    "overlap": (lm, 64, True, 20),
}

# case → its name in benchmarks/restore.py
LIMIT_MIB = 16
RESTORES = {
    "restore": "meshfeed once",
    "restore-unverified": "meshfeed once, no verify",
    "restore-limit": f"meshfeed once, limit {LIMIT_MIB} MiB",
    "restore-single": "meshfeed single_replica",
    "restore-single-limit": f"meshfeed single_replica, limit {LIMIT_MIB} MiB",
    "restore-every-host": "meshfeed every_host",
    "restore-orbax": "meshfeed once, of Orbax's files",
}


def restore_rounds(case: str, folder: str) -> Callable[[], tuple[float, float]]:
    from meshfeed.testing import HostPool

    pool = HostPool(4, 2, timeout_seconds=900)
    directory = tempfile.mkdtemp(dir=folder)

    def round_of() -> tuple[float, float]:
        hosts = [r.value for r in pool.run(restore.restore_again, directory, RESTORES[case], LIMIT_MIB << 20)]
        return max(wall for wall, _ in hosts), sum(cpu for _, cpu in hosts)

    return round_of


def feed_rounds(case: str, folder: str) -> Callable[[], tuple[float, float]]:
    with_cpu_devices(8)
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import meshfeed

    make, batch, shuffle, batches = CASES[case.removesuffix("0")]
    feed = meshfeed.MultiHostDataLoadIterator(
        make(folder),
        NamedSharding(make_mesh(), PartitionSpec("data")),
        global_batch_size=batch,
        shuffle=shuffle,
        num_epochs=None,
        prefetch=0 if case.endswith("0") else 2,
    )
    weights = np.ones((_data.TOKENS, 256), np.float32)
    dropped = _lm_file(folder) if case.startswith("cold") else None
    step = jax.jit(lambda batch: (batch["tokens"].astype(np.float32) @ weights).sum())

    def round_of() -> tuple[float, float]:
        if dropped:
            cold.drop(dropped)
        wall, cpu = time.perf_counter(), time.process_time()
        found = None
        for _ in range(batches):
            found = next(feed)
            if case.startswith("overlap"):
                step(found).block_until_ready()
        jax.block_until_ready(found)
        return time.perf_counter() - wall, time.process_time() - cpu

    return round_of


def serve(case: str, folder: str) -> None:
    """Does one round for each line on standard input, and prints its seconds by wall clock and of CPU time."""
    round_of = (restore_rounds if case in RESTORES else feed_rounds)(case, folder)
    for _ in range(3):
        round_of()
    import meshfeed  # after feed_rounds has set the number of devices

    print(meshfeed.__file__, flush=True)
    for _ in sys.stdin:
        print(*round_of(), flush=True)
    os._exit(0)  # without waiting for the read-ahead


class Checkout:
    """A process that runs one case with the package of one checkout.

    Args:
      path: the ``PYTHONPATH``; its first folder contains the package.
      case: a name of ``CASES``.
      folder: where the files are.
    """

    def __init__(self, path: str, case: str, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.against", "--serve", case, folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        found = self._line()
        if not pathlib.Path(found).is_relative_to(pathlib.Path(path.partition(os.pathsep)[0]).resolve()):
            raise SystemExit(f"{path} does not contain the package meshfeed: {found} was imported.")

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit("a process ended early; its error is above.")
        return line

    def seconds(self) -> tuple[float, float]:
        """Runs a round; returns its seconds by wall clock and of CPU time."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        wall, cpu = map(float, self._line().split())
        return wall, cpu

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(case: str, folder: str, paths: list[str], rounds: int, starts: int) -> dict[str, Any]:
    """One row: how many times as fast the first of ``paths`` is as the second."""
    found: list[list[tuple[float, float]]] = [[], []]
    for start in range(starts):
        # Whichever starts first keeps an advantage or a handicap of several percent, so they take turns in that too.
        first, second = (0, 1) if start % 2 else (1, 0)
        started = {number: Checkout(paths[number], case, folder) for number in (first, second)}
        both = [started[0], started[1]]
        for turn in range(start, start + math.ceil(rounds / starts)):
            for number in (0, 1) if turn % 2 else (1, 0):
                found[number].append(both[number].seconds())
        for checkout in both:
            checkout.close()
    (wall, cpu), (other_wall, other_cpu) = (list(zip(*each, strict=True)) for each in found)
    pairs = [there / here for here, there in zip(wall, other_wall, strict=True)]
    per_round = 1 if case in RESTORES else CASES[case.removesuffix("0")][3]
    return {
        "case": case,
        "ms": statistics.median(wall) / per_round * 1e3,
        "of the other": statistics.median(other_wall) / per_round * 1e3,
        "× as fast": statistics.median(other_wall) / statistics.median(wall),
        "fastest rounds": min(other_wall) / min(wall),
        "median of pairs": statistics.median(pairs),
        "quartiles of pairs": spread(pairs),
        "CPU time": statistics.median(other_cpu) / statistics.median(cpu),
        "least CPU time": min(other_cpu) / min(cpu),
    }


MEASURES = ("× as fast", "fastest rounds", "median of pairs", "CPU time", "least CPU time")


def slower(row: dict[str, Any], bound: float) -> bool:
    """Whether this checkout is slower than ``bound`` times the other by every measure."""
    return max(row[name] for name in MEASURES) < bound


@contextlib.contextmanager
def revision_built(revision: str, folder: str) -> Iterator[str]:
    """The ``src`` of a commit, with its extension modules, in a worktree that is removed afterwards."""
    path = os.path.join(folder, "revision")
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", path, revision], check=True)
    try:
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=path, check=True)
        yield os.path.join(path, "src")
    finally:
        subprocess.run([*git, "remove", "--force", path], check=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [*CASES, *(f"{name}0" for name in CASES), *RESTORES]
    parser.add_argument("--other", metavar="PATH", help="folder that contains the other package meshfeed")
    parser.add_argument("--revision", metavar="COMMIT", help="compare with the package of this commit")
    parser.add_argument(
        "--at-least", type=float, metavar="RATIO", help="end with status 1 if a case is slower than this"
    )
    parser.add_argument("--cases", nargs="+", choices=names, default=[*CASES, "assembly0", "lm0", "million0"])
    parser.add_argument("--rounds", type=int, default=42)
    parser.add_argument(
        "--starts", type=int, default=3, help="how often the processes are started, to share the rounds"
    )
    parser.add_argument("--data", metavar="FOLDER", help="keep the files here, for another run")


def measure(options: argparse.Namespace) -> Iterator[Table]:
    if not (options.other or options.revision):
        print("(left out: --other PATH names the folder of the package to compare with, --revision COMMIT its commit)")
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if options.revision:
            other = stack.enter_context(revision_built(options.revision, folder))
        else:
            other = os.pathsep.join(str(pathlib.Path(path).resolve()) for path in options.other.split(os.pathsep))
        data = options.data or os.path.join(folder, "data")
        os.makedirs(data, exist_ok=True)
        rows = []
        for case in options.cases:
            rows.append(compare(case, data, [str(ROOT / "src"), other], options.rounds, options.starts))
            print(rows[-1], flush=True)
    named = options.revision or options.other
    yield Table(
        f"this checkout, {ROOT / 'src'} beside {named}, {options.rounds} rounds in {options.starts} starts", rows
    )
    if options.at_least and (slow := [row["case"] for row in rows if slower(row, options.at_least)]):
        raise SystemExit(f"slower than {options.at_least} of {named} by every measure: {', '.join(slow)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main(__doc__, measure, add_arguments)
