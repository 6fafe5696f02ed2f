"""CPUs of this process and threads of XLA's pool."""

from __future__ import annotations

import os

import pytest

from meshfeed._src.base import machine


def test_the_affinity_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "group_limits", lambda *_: [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)), raising=False)
    assert machine.available_cpus() == 5


def test_xla_has_as_many_threads_as_nproc_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_cpus", lambda: 3)
    for given, found in (("24", 24), ("", 3), ("many", 3)):
        monkeypatch.setenv("NPROC", given)
        assert machine.xla_threads() == found
    monkeypatch.delenv("NPROC")
    assert machine.xla_threads() == 3
