"""``meshfeed doctor``: what in this environment would slow down or stop a job, and what to do about it."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import click

from meshfeed import __version__
from meshfeed._src.base.machine import available_cpus, xla_threads
from meshfeed._src.cli.text import counted, example, json_option, show, size_text
from meshfeed._src.sources.files.open_files import Descriptor

_NEEDED = ("jax", "jaxlib", "numpy", "grain", "array-record", "orbax-checkpoint", "tensorstore")
_OPTIONAL = ("datasets", "pyarrow", "tensorflow", "tensorflow-datasets", "tokenizers", "pillow", "rich", "fsspec")
_EXTENSIONS = {
    "sources.array_record._riegeli": "ArrayRecord files are read at half the speed",
    "sources.tokens._reads": "token files are read more slowly",
    "order._best_fit": "packing with method='fit' is slower",
    "order._limits": "packing with max_segments= or side= is slower",
}
_VARIABLES = re.compile(
    r"(SLURM_(JOB_ID|STEP_NUM_TASKS|NTASKS|PROCID|LOCALID|STEP_NODELIST|JOB_NODELIST)|OMPI_COMM_WORLD_(SIZE|RANK)|PMI_(SIZE|RANK)"
    r"|MV2_COMM_WORLD_(SIZE|RANK)|TPU_\w+|MEGASCALE_\w+|JOB_COMPLETION_INDEX|JOBSET_NAME|KUBERNETES_SERVICE_HOST"
    r"|JAX_\w+|NPROC|XLA_FLAGS|LIBTPU_INIT_ARGS|CUDA_VISIBLE_DEVICES|MESHFEED_\w+)"
)
_RANKS = (
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMI_RANK",
    "JOB_COMPLETION_INDEX",
    "TPU_WORKER_ID",
)
_DEVICES = (
    "import jax, json; d = jax.devices(); "
    "print(json.dumps([d[0].platform, d[0].device_kind, len(d), jax.local_device_count(), jax.process_count()]))"
)
_DEVICE_SECONDS = 60
_ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*")
_OPEN_FILES = 4096
_SAMPLES = 64  # places of a file to look for in the page cache
_WIDTH = 80
_INDENT = 9

Status = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """One line of the report.

    Attributes:
      name: what was checked.
      status: "ok", "warning" for what costs speed or may be a mistake, "error" for what stops a job.
      text: what was found.
      fix: what to do; empty if nothing.
    """

    name: str
    status: Status
    text: str
    fix: str = ""


@click.command(
    short_help="Check this machine and environment for problems.",
    epilog=example("doctor", "doctor 'data/*.array_record'"),
)
@click.argument("paths", nargs=-1)
@json_option()
def doctor(paths: tuple[str, ...], as_json: bool) -> None:
    """Check versions, devices, limits and the environment of a job, and suggest a fix for each problem.

    PATHS are data files or globs: shows how much of them is in the page cache. Reads no data and changes nothing.

    The exit status is 1 if a job could not run here.
    """
    devices, kind = _query_devices()
    findings = [_versions(), devices, _variables(os.environ), describe_job(os.environ, kind)]
    findings += [*_limits(), *_extensions(), *_page_cache(paths)]
    failed = any(finding.status == "error" for finding in findings)
    found = {"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]}
    show(found, (line for finding in findings for line in _lines(finding)), as_json=as_json)
    if failed:
        raise SystemExit(1)


def _lines(finding: Diagnosis) -> list[str]:
    wrapper = textwrap.TextWrapper(_WIDTH, subsequent_indent=" " * _INDENT, break_long_words=False)
    wrapper.initial_indent = f"{finding.status:<{_INDENT}}"
    lines = wrapper.wrap(f"{finding.name}: {finding.text}")
    wrapper.initial_indent = wrapper.subsequent_indent
    return lines + (wrapper.wrap(f"→ {finding.fix}") if finding.fix else [])


def _versions() -> Diagnosis:
    found: dict[str, str] = {}
    for package in (*_NEEDED, *_OPTIONAL):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    missing = [package for package in _NEEDED if package not in found]
    shown = ", ".join(f"{package} {version}" for package, version in found.items())
    text = f"Python {platform.python_version()}, meshfeed {__version__}, {shown}"
    if not missing:
        return Diagnosis("versions", "ok", text)
    return Diagnosis("versions", "error", f"{text}; without {', '.join(missing)}", f"pip install {' '.join(missing)}")


def _query_devices() -> tuple[Diagnosis, str]:
    """Queries a child process: opening the devices may wait for other hosts, or for a process that holds them."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _DEVICES], capture_output=True, text=True, timeout=_DEVICE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        text = f"JAX has not listed its devices within {_DEVICE_SECONDS} s"
        fix = "Run this on all hosts of the slice at the same time, and end other processes that hold the devices."
        return Diagnosis("devices", "error", text, fix), "unknown"
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:] or ["no message"]
        fix = "Check the driver and the installed jax plugin, or set JAX_PLATFORMS=cpu to run without accelerators."
        return Diagnosis("devices", "error", f"JAX cannot use its devices: {last[0]}", fix), "unknown"
    kind, model, count, local, processes = json.loads(ended.stdout.strip().splitlines()[-1])
    where = "" if processes == 1 else f", {local} of them on this host, {processes} processes"
    text = f"{count} {kind} ({model}){where}"
    present = [path for pattern in _ACCELERATORS for path in glob.glob(pattern)]
    if kind == "cpu" and present and os.environ.get("JAX_PLATFORMS") != "cpu":
        text += f"; this machine has {present[0]}, which JAX does not use"
        fix = "Install JAX for it: pip install 'jax[cuda13]' or 'jax[tpu]'."
        return Diagnosis("devices", "warning", text, fix), kind
    threads = max(xla_threads(), local)
    if kind == "cpu" and local > 1 and threads < 2 * local:
        text += f"; with {threads} threads of XLA, a loop that never waits for a result may abort"
        return Diagnosis("devices", "warning", text, f"Set NPROC={2 * local} in the environment."), kind
    return Diagnosis("devices", "ok", text), kind


def _variables(variables: Mapping[str, str]) -> Diagnosis:
    found = [f"{name}={value}" for name, value in sorted(variables.items()) if _VARIABLES.fullmatch(name)]
    return Diagnosis("environment", "ok", ", ".join(found) or "no variables of Slurm, MPI, Kubernetes, TPU pods or JAX")


def describe_job(variables: Mapping[str, str], devices: str) -> Diagnosis:
    """Describes the job that ``jax.distributed.initialize()`` would join here."""
    from meshfeed._src.base.coordination import INDEPENDENT, other_processes

    count = other_processes(variables, on_tpu=devices == "tpu")
    coordinator = variables.get("JAX_COORDINATOR_ADDRESS") or _slurm_coordinator(variables)
    at = f", coordinator {coordinator}" if coordinator else ""
    if count is None:
        if variables.get(INDEPENDENT, "0") not in ("", "0"):
            return Diagnosis("job", "ok", f"one process; others are independent ({INDEPENDENT})")
        if "JOB_COMPLETION_INDEX" in variables and not variables.get("JAX_COORDINATOR_ADDRESS"):
            text = "a pod of an indexed Job; the number of pods is unknown"
            fix = (
                "Pass num_processes= and coordinator_address= to jax.distributed.initialize(), or set completions to 1."
            )
            return Diagnosis("job", "warning", text, fix)
        return Diagnosis("job", "ok", f"one process{at}")
    rank = next((variables[name] for name in _RANKS if name in variables), None)
    text = f"several processes ({count}), this is process {rank or 'unknown'}{at}"
    if "SLURM_STEP_NUM_TASKS" in variables or devices == "tpu" or "OMPI_COMM_WORLD_SIZE" in variables:
        fix = "Call jax.distributed.initialize() before anything else; it finds the other processes here."
        return Diagnosis("job", "ok", text, fix)
    fix = (
        "Call jax.distributed.initialize(coordinator_address=, num_processes=, process_id=) before anything else. For "
        f"independent jobs set {INDEPENDENT}=1."
    )
    return Diagnosis("job", "warning", text, fix)


def _slurm_coordinator(variables: Mapping[str, str]) -> str | None:
    """Returns the first node of the step, on which JAX starts the coordinator: ``gpu[003-007],x`` → ``gpu003``."""
    nodes = variables.get("SLURM_STEP_NODELIST")
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes) if nodes else None
    return None if found is None else f"{found[1]}{found[2] or ''}, on a port that JAX chooses"


def _limits() -> Iterator[Diagnosis]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
        fix = f"Run `ulimit -n {min(hard, 65536) if hard > 0 else 65536}` before the job (at most {most} here)."
        yield Diagnosis(
            "open files", "warning", f"at most {soft:,}; files beyond that are closed and opened again", fix
        )
    else:
        yield Diagnosis("open files", "ok", f"at most {soft:,}")
    cores, allowed = os.cpu_count() or 1, available_cpus()
    fix = "Give the task more cores, such as srun --cpus-per-task, if reading is slow." if allowed < cores else ""
    yield Diagnosis("cores", "warning" if fix else "ok", f"{allowed} of {cores} CPU cores", fix)


def _extensions() -> Iterator[Diagnosis]:
    missing = [name for name in _EXTENSIONS if importlib.util.find_spec(f"meshfeed._src.{name}") is None]
    if not missing:
        yield Diagnosis("C extensions", "ok", "all built")
    for name in missing:
        fix = "Install a C compiler and Python's headers, and then meshfeed again."
        yield Diagnosis("C extensions", "warning", f"{name} is not built: {_EXTENSIONS[name]}", fix)


# ------------------------------------------------------------------------ page cache


def _page_cache(patterns: Sequence[str]) -> Iterator[Diagnosis]:
    memory = _memory()
    if memory:
        total, free, cached = (f"{memory[name] / 1e9:.1f} GB" for name in ("MemTotal", "MemAvailable", "Cached"))
        yield Diagnosis("memory", "ok", f"{total}, {free} available, {cached} of it in use as page cache")
    for pattern in (pattern.removeprefix("file://") for pattern in patterns):
        files = [path for path in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(path)]
        if not files:
            if os.path.isdir(pattern):
                yield Diagnosis(pattern, "error", "is a folder", "Name the files in it, as FOLDER/*.arrayrecord does.")
            else:
                yield Diagnosis(pattern, "error", "no such file", "Check the path or pattern.")
            continue
        sizes = [os.path.getsize(path) for path in files]
        num_bytes = sum(sizes)
        share = sum(_cached_share(path) * size for path, size in zip(files, sizes, strict=True)) / max(num_bytes, 1)
        text = f"{counted(len(files), 'file')}, {size_text(num_bytes)}, {share:.0%} in the page cache"
        if not memory or num_bytes <= memory["MemAvailable"]:
            yield Diagnosis(pattern, "ok", text)
            continue
        fix = "Each epoch reads the disk. Measure it with meshfeed bench; compress the records if the disk is slow."
        yield Diagnosis(pattern, "warning", f"{text}; more than the memory can hold", fix)


def _memory() -> dict[str, int]:
    """Returns the figures of /proc/meminfo in bytes; empty if the system has none."""
    try:
        with open("/proc/meminfo") as file:
            return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.split()[-1] == "kB"}
    except OSError:
        return {}


def _cached_share(path: str) -> float:
    """Returns the share of sampled places of a file that can be read without waiting for the disk."""
    file = Descriptor(path)
    places = [file.num_bytes * sample // _SAMPLES for sample in range(_SAMPLES)] if file.num_bytes else []
    return sum(file.is_cached(place, unknown=False) for place in places) / max(len(places), 1)
