"""`meshfeed doctor`: its findings, for this machine and for made-up environments."""

from __future__ import annotations

import json
import pathlib

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
    memory, files, none = doctor._page_cache([str(tmp_path / "*"), str(tmp_path / "c")])
    assert (memory.name, memory.text) == ("memory", "9.0 GB, 0.0 GB available, 2.0 GB of it in use as page cache")
    assert (files.name, files.status) == (str(tmp_path / "*"), "warning")
    assert files.text == "2 files, 4 KB, 75% in the page cache; more than the memory can hold"
    assert (none.status, none.text) == ("error", "no such file")
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
