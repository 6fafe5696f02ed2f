"""`meshfeed doctor`: its findings, for this machine and for made-up environments."""

from __future__ import annotations

import json
import pathlib

import pytest
from click.testing import CliRunner

from meshfeed._src.cli import doctor, main


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
