"""The start-up files of examples/clusters: that of Slurm starts a job of two processes; the others are parsed."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from meshfeed._src.demo.demo import build_corpus
from meshfeed._src.testing.hosts import cpu_environment

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLUSTERS = ROOT / "examples" / "clusters"
YAML = sorted(CLUSTERS.glob("*.yaml"))
# Runs the command as two tasks of a Slurm step; JAX finds the coordinator and the number of processes by these variables.
SRUN = """#!/usr/bin/env bash
shift
export SLURM_STEP_NODELIST=127.0.0.1 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && wait $!
"""


@pytest.mark.multihost
def test_slurm_starts_and_resumes_a_job(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("optax")
    build_corpus(tmp_path / "data", num_records=101, record_bytes=17)
    for name, script in (("srun", SRUN), ("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    env = dict(os.environ) | cpu_environment(2)
    env |= {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
        "SLURM_JOB_ID": str(os.getpid()),  # JAX computes the port from it
        "DATA": str(tmp_path / "data"),
        "RUN": str(tmp_path / "run"),
        "BATCH": "8",
    }
    for steps in ("2", "4"):
        ended = subprocess.run(
            ["bash", CLUSTERS / "slurm.sbatch"],
            cwd=ROOT,
            env=env | {"STEPS": steps},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr
        assert f'{{"restored": {int(steps) - 2},' in ended.stdout


def test_slurm_options_are_those_of_a_batch_script() -> None:
    options = re.findall(r"^#SBATCH --([\w-]+)", (CLUSTERS / "slurm.sbatch").read_text(), re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "requeue"} <= set(options)


@pytest.mark.slow
@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_each_container_runs_a_program_that_exists(path: pathlib.Path) -> None:
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all(path.read_text()))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= {*document, "spec"} for document in documents)
    job = documents[-1]
    assert job["kind"] in ("JobSet", "PathwaysJob")
    if job["kind"] == "JobSet":
        (replicated,) = job["spec"]["replicatedJobs"]
        spec = replicated["template"]["spec"]
        assert spec["parallelism"] == spec["completions"]
        (container,) = spec["template"]["spec"]["containers"]
        assert container["command"] == ["python", "examples/train_lm.py", "--coordinator", "auto"]
        help_text = subprocess.run(
            [sys.executable, ROOT / container["command"][1], "--help"], capture_output=True, text=True
        )
        assert all(word in help_text.stdout for word in container["args"] if word.startswith("--"))
    else:
        (container,) = job["spec"]["controller"]["template"]["spec"]["containers"]
        target = {entry["name"]: entry["value"] for entry in container["env"]}["JAX_BACKEND_TARGET"]
        assert target.startswith(f"grpc://{job['metadata']['name']}-pathways-head-0-0.{job['metadata']['name']}:")


@pytest.mark.parametrize("path", [*CLUSTERS.glob("*.sh"), *CLUSTERS.glob("*.sbatch")], ids=lambda path: path.name)
def test_scripts_are_valid(path: pathlib.Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)


def test_the_page_lists_every_file() -> None:
    page = (ROOT / "docs" / "how-to" / "clusters.md").read_text()
    assert {path.name for path in CLUSTERS.iterdir()} <= set(re.findall(r"examples/clusters/([\w.-]+)", page))
