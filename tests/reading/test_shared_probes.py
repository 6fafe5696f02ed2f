"""The hosts of a feed divide what identifies remote components of a mixture, and still notice that one sees other data."""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))

import simulated_hosts
from memory_store import MemoryStore

from meshfeed._src.base import coordination
from meshfeed._src.reading import shared_probes
from meshfeed._src.reading.shared_probes import divided, identify_each, probe_once

Read = Callable[[int, str], str]
"""Host and component → the digest of its records."""


@pytest.fixture(autouse=True)
def simulation() -> Iterator[None]:
    with simulated_hosts.simulation():
        yield


class Remote:
    """A component whose records are in a store, or on the disk of each host."""

    def __init__(self, name: str, read: Callable[[str], str], *, listing: str = "", local: bool = False) -> None:
        self.name, self.read, self.listing, self.local = name, read, listing, local

    def file_names(self) -> list[str]:
        return [f"/data/{self.name}" if self.local else f"s3://bucket/{self.name}"]

    def identify(self) -> list[str]:
        if self.local:
            return [self.listing, self.read(self.name)]
        return [self.listing, probe_once(f"{self.name} {self.listing}", lambda: self.read(self.name))]


class Job:
    """Runs hosts that identify the same components, and counts who reads which."""

    def __init__(self, num_hosts: int, names: str, read: Read = lambda host, name: f"digest of {name}") -> None:
        self.job, self.names = simulated_hosts.Job(num_hosts), names
        self.readers: dict[str, set[int]] = collections.defaultdict(set)
        self._read, self._lock = read, threading.Lock()

    def source(self, host: int, name: str) -> Any:
        return Remote(name, lambda name: self.read(host, name))

    def read(self, host: int, name: str) -> str:
        with self._lock:
            self.readers[name].add(host)
        return self._read(host, name)

    def run(self, source: Callable[[int, str], Any] | None = None) -> list[Any]:
        def play(host: int) -> Any:
            sources = {name: (source or self.source)(host, name) for name in self.names}
            with divided("meshfeed/feed/0/probes", range(self.job.processes)):
                try:
                    return identify_each(sources, lambda one: one.identify())
                except OSError as error:
                    return str(error)

        return simulated_hosts.run(self.job.processes, play, job=self.job)


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 5, 7, 16])
@pytest.mark.parametrize("names", ["a", "ab", "abcdefg"])
def test_each_component_is_read_by_two_hosts_and_each_host_reads_one(num_hosts: int, names: str) -> None:
    job = Job(num_hosts, names)
    assert job.run() == [{name: ["", f"digest of {name}"] for name in names}] * num_hosts
    assert all(len(hosts) >= 2 for hosts in job.readers.values())
    assert set().union(*job.readers.values()) == set(range(num_hosts))
    reads = collections.Counter(host for hosts in job.readers.values() for host in hosts)
    assert max(reads.values()) <= -(-2 * len(names) // num_hosts) + 1
    assert sum(reads.values()) <= max(2 * len(names) + num_hosts, 2)


def test_a_host_that_reads_something_else_is_the_only_one_that_differs() -> None:
    for other in range(9):
        found = Job(9, "abcdef", lambda host, name, other=other: f"{name}{'!' * (host == other)}").run()
        assert [host for host in range(9) if found[host] != found[(other + 1) % 9]] == [other]


def test_a_host_with_another_listing_reads_itself() -> None:
    job = Job(4, "abcd")

    def source(host: int, name: str) -> Any:
        return Remote(name, lambda name: job.read(host, name), listing="other" if (host, name) == (0, "c") else "")

    found = job.run(source)
    assert found[0]["c"] == ["other", "digest of c"]
    assert [one["c"] for one in found[1:]] == [["", "digest of c"]] * 3
    assert 0 in job.readers["c"]


def test_local_components_are_read_by_every_host() -> None:
    job = Job(5, "abcd")
    job.run(lambda host, name: Remote(name, lambda name: job.read(host, name), local=name in "ab"))
    assert job.readers["a"] == job.readers["b"] == set(range(5))
    assert len(job.readers["c"]) < 5
    job = Job(5, "ab")
    job.run(lambda host, name: Remote(name, lambda name: job.read(host, name), local=True))
    assert not job.job.store.keys(), "nothing to exchange"


@pytest.mark.parametrize("failing", [0, 1, 4])
def test_nobody_waits_for_a_host_that_cannot_read(failing: int) -> None:
    def read(host: int, name: str) -> str:
        if host == failing:
            raise OSError("a broken disk")
        return name

    start = time.monotonic()
    found = Job(5, "abc", read).run()
    assert time.monotonic() - start < 10
    assert found[failing] == "a broken disk"
    assert [one for one in found if one != "a broken disk"] == [{name: ["", name] for name in "abc"}] * 4


@pytest.mark.parametrize("failing", [0, 1, 4])
def test_nobody_waits_for_a_host_that_fails_before(failing: int) -> None:
    job = Job(5, "abc")

    def play(host: int) -> Any:
        sources = {name: job.source(host, name) for name in job.names}
        with contextlib.suppress(OSError), divided("meshfeed/feed/0/probes", range(5)):
            if host == failing:
                raise OSError("no such file")
            return identify_each(sources, lambda one: one.identify())

    start = time.monotonic()
    found = simulated_hosts.run(5, play, job=job.job)
    assert time.monotonic() - start < shared_probes._WAIT_SECONDS / 2
    assert [one for one in found if one is not None] == [{name: ["", f"digest of {name}"] for name in "abc"}] * 4


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_hosts_read_what_a_late_one_should_have(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_probes, "_WAIT_SECONDS", 0.3)

    def read(host: int, name: str) -> str:
        if host == late:
            time.sleep(1.5)
        return name

    assert Job(4, "abcd", read).run() == [{name: ["", name] for name in "abcd"}] * 4


def test_hosts_read_everything_without_a_store_or_if_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(3, "ab")
    monkeypatch.setattr(job.job.store, "get", lambda *_: 1 / 0)
    job.run()
    assert job.readers["a"] == job.readers["b"] == {0, 1, 2}
    monkeypatch.setenv(coordination.SHARED_LOOKUP, "0")
    job = Job(3, "ab")
    job.run()
    assert job.readers["a"] == job.readers["b"] == {0, 1, 2}
    assert not job.job.store.keys()


def test_few_requests_to_the_coordinator() -> None:
    job = Job(12, "abcd")
    calls: collections.Counter[str] = collections.Counter()

    class Counting(MemoryStore):
        def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
            calls["set"] += 1
            super().set(key, value, overwrite=overwrite)

        def get(self, key: str, seconds: float) -> str | None:
            calls["get"] += 1
            return super().get(key, seconds)

    job.job.connections = [Counting()] * 12  # type: ignore[list-item]
    job.run()
    assert calls["set"] <= 5 + 1 + 2  # values, the result, and notes of late hosts
    assert 11 <= calls["get"] <= 11 + 10
