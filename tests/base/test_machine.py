"""CPUs of this process and threads of XLA's pool."""

from __future__ import annotations

import os
import pathlib

import pytest

from meshfeed._src.base import machine


def test_the_affinity_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_QUOTAS", ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)), raising=False)
    assert machine.available_cpus() == 5


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["200000 100000"], 2),
        (["150000 100000"], 2),
        (["max 100000"], 8),
        (["900000 100000"], 8),
        (["50000", "100000"], 1),
        (["-1", "100000"], 8),
        (["0 100000"], 8),
    ],
)
def test_the_quota_of_a_container_is_rounded_up(
    texts: list[str], found: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / str(number) for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(f"{text}\n")
    monkeypatch.setattr(machine, "_QUOTAS", (("/no/such/file",), tuple(map(str, paths))))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert machine.available_cpus() == found


def test_xla_has_as_many_threads_as_nproc_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_cpus", lambda: 3)
    for given, found in (("24", 24), ("", 3), ("many", 3)):
        monkeypatch.setenv("NPROC", given)
        assert machine.xla_threads() == found
    monkeypatch.delenv("NPROC")
    assert machine.xla_threads() == 3
