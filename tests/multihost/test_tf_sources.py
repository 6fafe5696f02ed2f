"""TFDS and tf.data on 1, 2, 3 and 4 real hosts with 12 lanes: the same batches, and resume from each to each."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow")
pytest.importorskip("tensorflow_datasets")
sys.path.insert(0, str(Path(__file__).parent))

import tf_jobs
from tf_jobs import NAMES, PROCESSES

from meshfeed.testing import HostPool

SAVE_AT = 2


@pytest.fixture(scope="module")
def pool() -> Any:
    with HostPool(len(PROCESSES[4]), 2, timeout_seconds=500) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("files")
    tf_jobs.write_files(str(path))
    return str(path)


def join(parts: list[list[dict[int, str]]]) -> list[dict[int, str]]:
    """Steps of all hosts as steps of the global batch."""
    assert len({len(part) for part in parts}) == 1, "all hosts end at the same step"
    return [{row: text for part in step for row, text in part.items()} for step in zip(*parts, strict=True)]


@pytest.fixture(scope="module")
def runs(pool: Any, folder: str) -> dict[str, Any]:
    values = [result.value for result in pool.run(tf_jobs.run, list(NAMES), folder, SAVE_AT)]
    found = {}
    for name in NAMES:
        for hosts, processes in PROCESSES.items():
            parts = [values[process][f"{name} on {hosts}"] for process in processes]
            found[f"{name} on {hosts}"] = {
                "steps": join([part["steps"] for part in parts]),
                "states": [part["state"] for part in parts],
                "positions": {part["position"] for part in parts},
            }
    return found


@pytest.mark.parametrize("name", NAMES)
def test_global_batches_are_the_same_on_any_number_of_hosts(runs: dict[str, Any], name: str) -> None:
    reference = runs[f"{name} on 1"]
    assert len(reference["steps"]) > SAVE_AT
    for hosts in PROCESSES:
        assert runs[f"{name} on {hosts}"]["steps"] == reference["steps"]
        assert runs[f"{name} on {hosts}"]["positions"] == {len(tf_jobs.EXPECTED[name])}
    rows = [text for step in reference["steps"] for text in step.values() if "mask=True" in text]
    assert sorted(int(re.search(r"id=(\d+);", text)[1]) for text in rows) == sorted(tf_jobs.EXPECTED[name])  # type: ignore[index]


def test_resume_from_any_number_of_hosts_on_any_other(pool: Any, runs: dict[str, Any], folder: str) -> None:
    states = {key: run["states"] for key, run in runs.items()}
    values = [result.value for result in pool.run(tf_jobs.go_on, list(NAMES), folder, states)]
    for name in NAMES:
        for target, processes in PROCESSES.items():
            for origin in PROCESSES.keys() - {target}:
                found = join([values[process][f"{name} from {origin} on {target}"] for process in processes])
                assert found == runs[f"{name} on 1"]["steps"][SAVE_AT:], f"{name}: {origin} → {target} hosts"


def test_workers_may_change_on_resume(pool: Any, runs: dict[str, Any], folder: str) -> None:
    """3 hosts without workers, then 1 host with two and with one."""
    states = {name: runs[f"{name} on 3"]["states"] for name in NAMES}
    found = pool.run(tf_jobs.go_on_with_workers, list(NAMES), folder, states)[PROCESSES[1][0]].value
    for name in NAMES:
        assert found[name] == runs[f"{name} on 1"]["steps"][SAVE_AT:], name
