"""What all benchmarks share: turns, medians, ratios, tables, and what was measured on.

Absolute times of a shared machine do not hold; ratios within one run do. So the ways that are compared take turns, and
the order of turns changes from round to round. Each figure is a median over rounds and stands beside the quartiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

LIBRARIES = (
    "jax", "numpy", "grain", "array-record", "datasets", "tensorflow-cpu", "tensorflow-datasets", "torch",
    "mosaicml-streaming", "orbax-checkpoint",
)  # fmt: skip


@dataclasses.dataclass
class Way:
    """One way to do the work.

    Attributes:
      run: does a piece of work and returns the number of units done.
      drain: units that read-ahead may have ready when its turn comes; done before the clock starts.
      close: called at the end.
    """

    run: Callable[[], int]
    drain: int = 1
    close: Callable[[], object] = lambda: None


@dataclasses.dataclass
class Table:
    """Figures of one piece of work.

    Attributes:
      title: what was done, and in which unit the figures are.
      rows: one dict a way, all with the same keys; the first key names the way.
      note: what a reader must know beside it.
      bars: key of the rows that the picture shows, or None for no picture.
      ours: begins the names of our own ways, for the picture.
    """

    title: str
    rows: list[dict[str, Any]]
    note: str = ""
    bars: str | None = None
    ours: str = "meshfeed"

    def markdown(self) -> str:
        """A Markdown table under a heading."""
        keys = list(dict.fromkeys(key for row in self.rows for key in row))
        lines = [f"### {self.title}", "", f"| {' | '.join(keys)} |"]
        lines.append("|---" + "|---:" * (len(keys) - 1) + "|")
        lines += [f"| {' | '.join(_format(row.get(key)) for key in keys)} |" for row in self.rows]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])


def _format(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return re.sub(r"__\w+__", r"`\g<0>`", str(value))  # which Markdown would show in bold
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def take_turns(ways: Mapping[str, Way], *, rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Units a second by wall clock and a second of CPU time (:func:`cpu_seconds`), for each way one figure a round."""
    names = list(ways)
    found = {name: {"wall": [], "cpu": []} for name in names}
    for name in names:
        ways[name].run()  # opens files, starts threads, compiles
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            way, drained = ways[name], 0
            _rest()
            while drained < way.drain:
                drained += way.run()
            done, cpu, wall = 0, cpu_seconds(), time.perf_counter()
            while time.perf_counter() - wall < seconds or not done:
                done += way.run()
            found[name]["wall"].append(done / (time.perf_counter() - wall))
            found[name]["cpu"].append(done / max(cpu_seconds() - cpu, 1e-9))
    for way in ways.values():
        way.close()
    return found


def _rest(seconds: float = 15.0) -> None:
    """Waits until the threads of other ways have filled their read-ahead, which would take the cores in this one's turn."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        before = cpu_seconds()
        time.sleep(0.05)
        if cpu_seconds() - before < 0.01:
            return


def cpu_seconds() -> float:
    """CPU time of all threads of this process and of its worker processes, as far as psutil is there to tell."""
    total = time.process_time()
    try:
        import psutil
    except ImportError:
        return total
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        total += times.user + times.system
    return total


def spread(values: Sequence[float]) -> str:
    """Lower and upper quartile."""
    if len(values) < 2:
        return ""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{_format(float(low))} – {_format(float(high))}"


def rates(
    title: str,
    unit: str,
    found: Mapping[str, Mapping[str, list[float]]],
    *,
    ours: str,
    floor: str | None = None,
    note: str = "",
    scale: float = 1.0,
) -> Table:
    """A table of rates: medians, quartiles, share of the floor, and how many times as fast ``ours`` is."""
    medians = {name: statistics.median(figures["wall"]) for name, figures in found.items()}
    rows = []
    for name, figures in found.items():
        row: dict[str, Any] = {
            "way": name,
            f"{unit}/s": medians[name] / scale,
            "quartiles": spread([figure / scale for figure in figures["wall"]]),
            f"{unit}/CPU s": statistics.median(figures["cpu"]) / scale,
        }
        if floor is not None:
            row["share of the floor"] = medians[name] / medians[floor]
        row["ours is × as fast"] = medians[ours] / medians[name]
        rows.append(row)
    return Table(title, rows, note, bars=f"{unit}/CPU s")  # which a busy neighbour changes less


def machine() -> dict[str, Any]:
    """What was measured on, and with which versions."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    model = ""
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        model = next(
            (line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line), ""
        )
    return {
        "cores": os.cpu_count(),
        "processor": model or platform.processor(),
        "accelerator": _accelerator(),
        "system": platform.platform(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": versions,
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _accelerator() -> str:
    """Name and number of NVIDIA's devices; a TPU names itself in the titles of tables."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{len(names)} × {names[0]}" if names else ""


def name_of_machine(found: Mapping[str, Any]) -> str:
    """What tells machines apart: cores, processor and accelerator."""
    accelerator = found.get("accelerator")
    return f"{found['cores']} cores ({found['processor']})" + (f", {accelerator}" if accelerator else "")


def describe_machine(found: Mapping[str, Any]) -> str:
    """One paragraph."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{found['time']}; {name_of_machine(found)}, load {found['load'][0]} at the start; "
        f"{found['system']}; Python {found['python']}; {versions}"
    )


def main(
    doc: str | None,
    measure: Callable[[argparse.Namespace], Iterable[Table]],
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    child: Callable[[argparse.Namespace], object] | None = None,
) -> None:
    """The command line of one benchmark: prints Markdown, and writes JSON where asked.

    With ``--child``, an argument that such a benchmark adds, it only calls ``child``: it has started itself so, for a process
    of its own.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    arguments = parser.parse_args()
    if child is not None and "--child" in sys.argv:
        child(arguments)
        return
    found = machine()
    print(describe_machine(found), "\n", flush=True)
    tables = []
    for table in measure(arguments):
        print(table.markdown(), flush=True)
        tables.append(table)
        if arguments.json:  # what is there is kept if a later one fails
            write_json(arguments.json, found, {pathlib.Path(sys.argv[0]).stem: tables})


def write_json(path: str, found: Mapping[str, Any], tables: Mapping[str, Sequence[Table]]) -> None:
    """Machine and tables; :func:`read_tables` reads them again."""
    figures = {name: [dataclasses.asdict(table) for table in group] for name, group in tables.items()}
    pathlib.Path(path).write_text(json.dumps({"machine": found, "benchmarks": figures}, indent=1, ensure_ascii=False))


def read_tables(path: str) -> dict[str, list[Table]]:
    """The tables that :func:`write_json` wrote."""
    figures = json.loads(pathlib.Path(path).read_text())["benchmarks"]
    return {name: [Table(**table) for table in group] for name, group in figures.items()}


def with_cpu_devices(number: int) -> None:
    """Before JAX is imported: as many CPU devices, for machines that have no others."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={number}"


def make_mesh() -> Any:
    """All devices that there are, on one axis."""
    import jax
    from jax.sharding import AxisType

    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
