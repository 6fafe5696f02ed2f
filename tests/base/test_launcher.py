"""Jobs of several processes in which jax.distributed.initialize() was forgotten."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed import CheckpointError
from meshfeed._src.base import coordination
from meshfeed._src.base.coordination import other_processes

SLURM_TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
POD = {"TPU_WORKER_HOSTNAMES": "t1k-0.svc,t1k-1.svc", "TPU_WORKER_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "on_tpu", "expected"),
    [
        ({}, False, None),
        ({**SLURM_TASK, "SLURM_STEP_NUM_TASKS": "4"}, False, "SLURM_STEP_NUM_TASKS=4"),
        ({**SLURM_TASK, "SLURM_STEP_NUM_TASKS": "1"}, False, None),  # srun -n 1, and salloc's interactive step
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NPROCS": "4"}, False, None),  # sbatch
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, False, "OMPI_COMM_WORLD_SIZE=2"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False, None),
        ({"PMI_SIZE": "8", "PMI_RANK": "3"}, False, "PMI_SIZE=8"),
        ({"MV2_COMM_WORLD_SIZE": "8"}, False, "MV2_COMM_WORLD_SIZE=8"),
        ({"PMI_SIZE": "many"}, False, None),
        ({"JOB_COMPLETION_INDEX": "3"}, False, "JOB_COMPLETION_INDEX=3"),
        ({"JOB_COMPLETION_INDEX": "0"}, False, None),
        (POD, True, "TPU_WORKER_HOSTNAMES=t1k-0.svc,t1k-1.svc"),
        (POD, False, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, True, None),
        ({"TPU_WORKER_HOSTNAMES": "t1k-0.svc", "MEGASCALE_NUM_SLICES": "2"}, True, "MEGASCALE_NUM_SLICES=2"),
        ({"PMI_SIZE": "8", "MESHFEED_INDEPENDENT_PROCESSES": "1"}, False, None),
        ({"PMI_SIZE": "8", "MESHFEED_INDEPENDENT_PROCESSES": "0"}, False, "PMI_SIZE=8"),
    ],
)
def test_variables_that_a_launcher_sets_for_each_task(
    environment: dict[str, str], on_tpu: bool, expected: str | None
) -> None:
    assert other_processes(environment, on_tpu=on_tpu) == expected


@pytest.fixture
def one_of_four(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    coordination.warn_if_forgotten.cache_clear()
    yield
    coordination.warn_if_forgotten.cache_clear()


def make_feed() -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.MultiHostDataLoadIterator(meshfeed.sources.Memory({"x": np.arange(64)}), mesh, global_batch_size=8)


@pytest.mark.usefixtures("one_of_four")
def test_a_feed_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "meshfeed"):
        for _ in range(2):
            with make_feed() as feed:
                next(feed)
    assert [record.getMessage() for record in caplog.records] == [
        "each process reads all of the data: OMPI_COMM_WORLD_SIZE=4 shows that this job has several processes, but JAX sees "
        "only this one. Call jax.distributed.initialize() before anything else. If the processes are meant to be "
        "independent jobs, set the environment variable MESHFEED_INDEPENDENT_PROCESSES=1."
    ]


@pytest.mark.usefixtures("one_of_four")
def test_a_checkpointer_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(
        CheckpointError, match=r"every process would save into the same folder\. OMPI_COMM_WORLD_SIZE=4"
    ):
        meshfeed.checkpoint.Checkpointer(folder)
    assert not folder.exists()


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("how", ["independent", "initialized"])
def test_independent_jobs_and_jobs_of_one_process_are_left_alone(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "independent":
        monkeypatch.setenv("MESHFEED_INDEPENDENT_PROCESSES", "1")
    else:
        monkeypatch.setattr(coordination, "is_distributed", lambda: True)
    with caplog.at_level(logging.WARNING, "meshfeed"), make_feed(), meshfeed.checkpoint.Checkpointer(tmp_path):
        pass
    assert not caplog.records
