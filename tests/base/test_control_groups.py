"""Limits of the control groups of a process, on its memory and CPUs."""

from __future__ import annotations

import os
import pathlib

import pytest

from meshfeed._src.base import control_groups
from meshfeed._src.base.machine import available_cpus, host_memory_bytes

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
SLURM = "system.slice/slurmstepd.scope/job_7"
DOCKER = "docker/0f3a"
HYBRID = "4:memory:/docker/0f3a\n3:cpu,cpuacct:/docker/0f3a\n2:cpuset:/\n0::/\n"


@pytest.fixture(autouse=True)
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    monkeypatch.setattr(control_groups, "_OF_PROCESS", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "_MOUNTED", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


def write(system: pathlib.Path, groups: str, files: dict[str, str]) -> None:
    (system / "cgroup").write_text(groups)
    for name, content in files.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(f"{content}\n")


def test_without_groups_the_machine_is_the_limit() -> None:
    assert (host_memory_bytes(), available_cpus()) == (PHYSICAL, 8)


@pytest.mark.parametrize(
    ("groups", "files", "found"),
    [
        ("0::/\n", {"memory.max": "12345"}, 12345),  # of a container
        ("0::/\n", {"memory.max": "max"}, PHYSICAL),
        ("0::/\n", {}, PHYSICAL),
        (f"0::/{SLURM}/step_0/user/task_0\n", {f"{SLURM}/memory.max": "77", f"{SLURM}/step_0/memory.max": "max"}, 77),
        (f"0::/{SLURM}\n", {f"{SLURM}/memory.max": "77", "system.slice/memory.max": "66"}, 66),
        (f"0::/{SLURM}\n", {"system.slice/slurmstepd.scope/job_8/memory.max": "66"}, PHYSICAL),
        ("0::/../../a\n", {}, PHYSICAL),
        (HYBRID, {f"memory/{DOCKER}/memory.limit_in_bytes": "88"}, 88),
        (HYBRID, {"memory/memory.limit_in_bytes": "88"}, 88),  # the path is that outside of the container
        (HYBRID, {"memory/memory.limit_in_bytes": "9223372036854771712"}, PHYSICAL),
    ],
)
def test_the_lowest_limit_of_a_group_and_those_above_limits_the_memory(
    system: pathlib.Path, groups: str, files: dict[str, str], found: int
) -> None:
    write(system, groups, files)
    assert host_memory_bytes() == found


@pytest.mark.parametrize(
    ("groups", "files", "found"),
    [
        ("0::/\n", {"cpu.max": "200000 100000"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000"}, 2),  # rounded up
        ("0::/\n", {"cpu.max": "max 100000"}, 8),
        ("0::/\n", {"cpu.max": "900000 100000"}, 8),
        ("0::/\n", {"cpu.max": "0 100000"}, 8),
        ("0::/\n", {"cpu.max": "junk"}, 8),
        (f"0::/{SLURM}\n", {f"{SLURM}/cpu.max": "300000 100000", "cpu.max": "500000 100000"}, 3),
        (HYBRID, {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        (HYBRID, {f"cpu/{DOCKER}/cpu.cfs_quota_us": "-1", f"cpu/{DOCKER}/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_the_lowest_quota_of_a_group_and_those_above_limits_the_cpus(
    system: pathlib.Path, groups: str, files: dict[str, str], found: int
) -> None:
    write(system, groups, files)
    assert available_cpus() == found
