"""`meshfeed doctor`: its findings, for this machine and for made-up environments."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import subprocess
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from meshfeed._src.cli import doctor, main
from meshfeed._src.sources.files.open_files import Descriptor


@pytest.mark.slow
def test_this_machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    result = CliRunner().invoke(main.main, ["doctor", str(tmp_path / "*"), "--json"])
    found = json.loads(result.output)
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert (result.exit_code, found["ok"]) == (0, True)
    assert by_name["devices"]["text"] == "3 cpu (cpu)"
    assert "XLA_FLAGS=" in by_name["environment"]["text"]
    assert "jax " in by_name["versions"]["text"]
    assert by_name[str(tmp_path / "*")]["text"].startswith("1 file, 1.049 MB")

    monkeypatch.setenv("NPROC", "5")
    lines = CliRunner().invoke(main.main, ["doctor"]).output.splitlines()
    (line,) = (
        number for number, text in enumerate(lines) if text.startswith("warning  devices: 3 cpu (cpu); with 5 threads")
    )
    assert "→ Set NPROC=6 in the environment." in " ".join(lines[line : line + 4])

    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    result = CliRunner().invoke(main.main, ["doctor", str(tmp_path / "missing")])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("error    devices: JAX cannot use its devices") for line in lines)
    assert lines[-1] == "         → Check the path or pattern."


@pytest.mark.parametrize(
    ("variables", "devices", "status", "text"),
    [
        ({}, "cpu", "ok", "one process"),
        (
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "gpu[003-007],x"},
            "gpu",
            "ok",
            "this is process 2, coordinator gpu003, on a port that JAX chooses",
        ),
        ({"SLURM_STEP_NUM_TASKS": "4", "MESHFEED_INDEPENDENT_PROCESSES": "1"}, "gpu", "ok", "others are independent"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, "tpu", "ok", "this is process 1"),
        ({"JOB_COMPLETION_INDEX": "0"}, "gpu", "warning", "the number of pods is unknown"),
        (
            {"JOB_COMPLETION_INDEX": "3", "JAX_COORDINATOR_ADDRESS": "a:1"},
            "gpu",
            "warning",
            "process 3, coordinator a:1",
        ),
    ],
)
def test_what_a_job_would_be(variables: dict[str, str], devices: str, status: str, text: str) -> None:
    found = doctor.describe_job(variables, devices)
    assert found.status == status
    assert text in found.text
    assert bool(found.fix) == ("process " in found.text or status == "warning")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._versions().status == "ok"
    monkeypatch.setattr(doctor, "_NEEDED", (*doctor._NEEDED, "no-such-package", "nor-this"))
    found = doctor._versions()
    assert (found.name, found.status, found.fix) == ("versions", "error", "pip install no-such-package nor-this")
    assert found.text.startswith("Python ")
    assert found.text.endswith("; without no-such-package, nor-this")


def test_files_are_weighed_by_their_size(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(3000))
    (tmp_path / "b").write_bytes(bytes(1000))
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(doctor, "_cached_share", lambda path: float(path.endswith("a")))
    monkeypatch.setattr(doctor, "_memory", lambda: {"MemTotal": 9_000_000_000, "MemAvailable": 3999, "Cached": 2e9})
    memory, files, none, folder = doctor._page_cache([str(tmp_path / name) for name in ("*", "c", "folder")])
    assert (memory.name, memory.text) == ("memory", "9.0 GB, 0.0 GB available, 2.0 GB of it in use as page cache")
    assert (files.name, files.status) == (str(tmp_path / "*"), "warning")
    assert files.text == "2 files, 4 KB, 75% in the page cache; more than the memory can hold"
    assert (none.status, none.text) == ("error", "no such file")
    assert (folder.status, folder.text) == ("error", "is a folder")
    assert list(doctor._page_cache([f"file://{tmp_path}/*"])) == [memory, files]
    monkeypatch.setattr(doctor, "_memory", dict)
    (tmp_path / "empty").touch()
    assert [
        (one.status, one.text) for one in doctor._page_cache([str(tmp_path / "[ab]"), str(tmp_path / "empty")])
    ] == [
        ("ok", "2 files, 4 KB, 75% in the page cache"),
        ("ok", "1 file, 0 B, 0% in the page cache"),
    ]


def test_a_file_that_was_just_written_is_in_the_page_cache(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100_000))
    (tmp_path / "b").touch()
    assert doctor._cached_share(str(tmp_path / "b")) == 0.0
    if Descriptor(str(tmp_path / "a")).is_cached(0, unknown=False):  # the file system can tell
        assert doctor._cached_share(str(tmp_path / "a")) == 1.0


def answering(answer: object) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Stands for ``subprocess.run``: JAX lists these devices, or fails with this text."""

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert options["timeout"] == 60
        if answer is None:
            raise subprocess.TimeoutExpired(command, 60)
        if isinstance(answer, str):
            return subprocess.CompletedProcess(command, 1, "", answer)
        return subprocess.CompletedProcess(command, 0, f"a warning of a plugin\n{json.dumps(answer)}\n", "")

    return run


@pytest.mark.parametrize(
    ("answer", "nproc", "present", "status", "text", "fix"),
    [
        (["cpu", "cpu", 1, 1, 1], "1", False, "ok", "1 cpu (cpu)", ""),
        (["cpu", "cpu", 8, 8, 1], "16", False, "ok", "8 cpu (cpu)", ""),
        (
            ["cpu", "cpu", 8, 8, 1], "15", False, "warning",
            "8 cpu (cpu); with 15 threads of XLA, a loop that never waits for a result may abort",
            "Set NPROC=16 in the environment.",
        ),
        (["cpu", "cpu", 8, 8, 1], "2", False, "warning", "8 cpu (cpu); with 8 threads of XLA", "Set NPROC=16 in"),
        (["tpu", "TPU v5", 8, 4, 2], "1", True, "ok", "8 tpu (TPU v5), 4 of them on this host, 2 processes", ""),
        (["cpu", "cpu", 1, 1, 1], "1", True, "warning", "1 cpu (cpu); this machine has /", "pip install 'jax[cuda13]'"),
        ("x\nno driver\n", "1", False, "error", "JAX cannot use its devices: no driver", "set JAX_PLATFORMS=cpu"),
        ("", "1", False, "error", "JAX cannot use its devices: no message", "Check the driver"),
        (None, "1", False, "error", "JAX has not listed its devices within 60 s", "Run this on all hosts"),
    ],
)  # fmt: skip
def test_devices(
    answer: object,
    nproc: str,
    present: bool,
    status: str,
    text: str,
    fix: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "run", answering(answer))
    monkeypatch.setenv("NPROC", nproc)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (tmp_path / "nvidia0").write_bytes(b"")
    monkeypatch.setattr(doctor, "_ACCELERATORS", (str(tmp_path / ("nvidia*" if present else "accel*")),))
    found, kind = doctor._query_devices()
    assert found.status == status
    assert found.text.startswith(text)
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)
    assert kind == (answer[0] if isinstance(answer, list) else "unknown")
    if present and kind == "cpu":
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        assert doctor._query_devices()[0].status == "ok"


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for allowed, status in ((8, "ok"), (3, "warning")):
        monkeypatch.setattr(doctor, "available_cpus", lambda allowed=allowed: allowed)
        cores = list(doctor._limits())[1]
        assert (cores.name, cores.status, cores.text) == ("cores", status, f"{allowed} of 8 CPU cores")
        assert ("--cpus-per-task" in cores.fix) == (status == "warning")
    unlimited = resource.RLIM_INFINITY
    for soft, hard, fix in (
        (4096, 4096, ""),
        (4095, 10_000, "Run `ulimit -n 10000` before the job (at most 10,000 here)."),
        (1024, 1_000_000, "Run `ulimit -n 65536` before the job (at most 1,000,000 here)."),
        (1024, unlimited, "Run `ulimit -n 65536` before the job (at most unlimited here)."),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limits=(soft, hard): limits)
        files = next(doctor._limits())
        assert (files.name, files.status, files.fix) == ("open files", "warning" if fix else "ok", fix)
        assert files.text.startswith(f"at most {soft:,}")


def test_extensions_that_were_not_built_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_EXTENSIONS", {"cli.doctor": "never", "order._no_such": "packing is slower"})
    (found,) = doctor._extensions()
    assert (found.status, found.text) == ("warning", "order._no_such is not built: packing is slower")
    assert "C compiler" in found.fix
