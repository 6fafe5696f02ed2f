"""The rows of the page of measurements: what is run for each, which goal it has, and the file that keeps their figures.

A row is one benchmark with fixed arguments. :func:`run_rows` runs them one after another, each in a process of its own, and
writes the file after each, so an interrupted run continues. The file has the rows of several machines, by their names.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._measure import machine, name_of_machine, read_tables

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
      name: what people call it.
      benchmark: module of this package.
      arguments: of its command line.
      minutes: about how long it takes on two cores.
      goal: what the figures should reach, and what limits them; empty for a row that only informs.
    """

    name: str
    benchmark: str
    arguments: str = ""
    minutes: float = 1.0
    goal: str = ""


ROWS = (
    Row("lm", "feed", "--cases lm --rounds 5", 2.0, "0.9 of the bare loop with JAX's call, and 40 × Grain at its best"),
    Row("million", "feed", "--cases million --rounds 3 --skip Grain", 1.5, "0.9 of the bare loop with JAX's call"),
    Row("lm256", "feed", "--cases lm256 --rounds 3 --skip Grain", 1.0, "0.9 of the bare loop with JAX's call"),
    Row("compressed", "feed", "--cases compressed --rounds 3", 1.5, "0.9 of libzstd on one core"),
    Row("in-order", "feed", "--cases in-order --rounds 5", 1.5, "2 × tf.data, and read-ahead never slower than none"),
    Row("thousand", "feed", "--cases thousand --rounds 3", 1.5),
    Row("cold", "cold", "--rounds 5", 1.5, "0.9 of the disk's rate of parallel reads"),
    Row("mixtures", "mixtures", "--rounds 3", 2.0, "10 × Grain's mix; 5 × with decoders of their own; 35 at 0.95 of 1"),
    Row("formats", "formats", "--rounds 3", 2.0, "0.85 of the source read alone"),
    Row("huggingface", "huggingface", "--rounds 3", 2.0, "1.3 × Hugging Face's iter(batch) and Grain; 0.9 of pyarrow"),
    Row("images", "images", "--rounds 3 --seconds 1", 2.0, "3 × Grain on a core; the decoder limits both"),
    Row("assembly", "assembly", "--devices 8 64 --rounds 7", 1.0, "JAX's call alone"),
    Row("maxtext", "maxtext", "--rounds 5", 1.5, "0.95 of one copy and JAX's call"),
    Row("order", "order", "", 0.5, "20 ns per id"),
    Row("tokens", "tokens", "--rounds 5", 1.0),
    Row("start", "start", "--rounds 7", 1.0, "150 ms to the first batch beyond JAX's own start; 0.6 s for --help"),
    Row("overlap", "overlap", "--rounds 3", 2.0, "2 % of the time at a load of 0.9"),
    Row(
        "on_device", "on_device", "--mebibytes 16 64 --rounds 3", 2.0, "2 % stall at a load of 0.9; a copy to the host"
    ),
    Row("restore", "restore", "--rounds 2", 1.5, "Orbax's seconds, and each byte read once"),
    Row("leaves", "restore", "--leaves 1000 --mib 100 --rounds 2", 2.5, "Orbax's seconds, and each byte read once"),
    Row(
        "checkpoint_store",
        "checkpoint_store",
        "--rounds 2 --mib 768 --bandwidths-mb 0 100",
        3.0,
        "0.8 of s3fs with as many requests",
    ),
    Row("cluster", "cluster", "", 2.0, "requests per host that do not grow with the hosts"),
    Row("agreement", "agreement", "--hosts 2 4 --simulated 256 1024 --rounds 3 --windows 4", 2.0, "1 % of a step"),
    Row("auto", "auto", "--rounds 3 --threads 2 4 16 --settle 20", 7.0, "0.9 of the best fixed numbers"),
)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the machines of a file of figures: name → ``{row: figures}``; empty for a new file."""
    file = pathlib.Path(path)
    return json.loads(file.read_text())["machines"] if file.exists() else {}


def _write_file(path: str | os.PathLike[str], machines: Mapping[str, Any]) -> None:
    file = pathlib.Path(path)
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(json.dumps({"machines": machines}, indent=1, ensure_ascii=False) + "\n")
    fresh.replace(file)


def revision() -> str:
    """The commit of this checkout, with a plus if files differ from it; empty without git."""
    try:
        found = [
            subprocess.run(["git", *command.split()], cwd=FOLDER, capture_output=True, text=True, check=True).stdout
            for command in ("rev-parse --short=8 HEAD", "status --porcelain --untracked-files=no -- ../src .")
        ]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found[0].strip() + "+" * bool(found[1].strip())


def run_rows(
    path: str | os.PathLike[str],
    *,
    rows: Sequence[Row] = ROWS,
    again: Sequence[str] = (),
    minutes: float | None = None,
) -> list[str]:
    """Runs the rows that the file does not have yet for this machine, and returns the names of those that failed.

    Args:
      path: the file of figures.
      rows: what to run.
      again: names of rows to run although the file has them.
      minutes: a row that would probably end later than this is left for the next run.
    """
    start, failed = time.monotonic(), []
    here = name_of_machine(machine())
    for row in rows:
        machines = read_file(path)
        known = machines.setdefault(here, {}).get(row.name)
        if known and not known["error"] and row.name not in again:
            print(f"{row.name}: measured {known['machine']['time']}; --again {row.name} repeats it")
            continue
        if minutes is not None and (time.monotonic() - start) / 60 + row.minutes > minutes:
            print(f"{row.name}: left for the next run, since it takes about {row.minutes:g} minutes")
            continue
        print(f"\n## {row.name}: benchmarks.{row.benchmark} {row.arguments}\n", flush=True)
        machines[here][row.name] = figures = _run(row)
        _write_file(path, machines)
        if figures["error"]:
            failed.append(row.name)
    return failed


def _run(row: Row) -> dict[str, Any]:
    found, begun = machine(), time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", f"benchmarks.{row.benchmark}", *row.arguments.split(), "--json", file.name]
        limit = 60 * (3 * row.minutes + 2)  # a machine that others use
        try:
            ended = subprocess.run(command, cwd=FOLDER.parent, stderr=subprocess.PIPE, text=True, timeout=limit)
            error = f"exit status {ended.returncode}: {ended.stderr[-500:]}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            error = f"not ended after {limit:.0f} s"
        has_some = pathlib.Path(file.name).stat().st_size
        tables = read_tables(file.name) if has_some else {}
    if error:
        print(f"{row.name} failed: {error}", flush=True)
    return {
        "command": f"scripts/bench {row.benchmark} {row.arguments}".strip(),
        "goal": row.goal,
        "machine": found,
        "load after": round(os.getloadavg()[0], 1),
        "seconds": round(time.monotonic() - begun),
        "revision": revision(),
        "error": error,
        "tables": [dataclasses.asdict(table) for group in tables.values() for table in group],
    }
