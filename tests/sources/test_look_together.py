"""What hosts exchange when they divide the look-up of files: as few values as there are hosts that look at one."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))

import simulated_hosts

from meshfeed import SourceError
from meshfeed._src.base import coordination
from meshfeed._src.sources.files import lookup


@pytest.fixture(autouse=True)
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with simulated_hosts.simulation():
        here = simulated_hosts._current[-1]
        monkeypatch.setattr(coordination, "place_in_job", lambda: (here.host, here.job.processes))
        yield


def published(job: simulated_hosts.Job) -> list[str]:
    """The hosts that have published a value."""
    hosts: list[str] = []
    publish = job.store.set

    def noting(key: str, value: str, *, overwrite: bool = False) -> None:
        before, _, last = key.rpartition("/")
        hosts.extend([last] if before.endswith("/in") else [])
        publish(key, value, overwrite=overwrite)

    job.store.set = noting  # type: ignore[method-assign]
    return hosts


@pytest.mark.parametrize(("num_hosts", "num_files", "block"), [(12, 3, 100), (3, 12, 100), (5, 13, 4), (12, 15, 13)])
def test_only_hosts_that_look_at_a_file_publish(
    num_hosts: int, num_files: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_BLOCK_FILES", block)
    looks: collections.Counter[int] = collections.Counter()
    job = simulated_hosts.Job(num_hosts)
    hosts = published(job)

    def play(host: int) -> Any:
        def look(numbers: Sequence[int]) -> list[Any]:
            looks.update(numbers)
            return [[number, {"group_size": 1}] for number in numbers]

        return lookup.look_together([f"s3://b/{number}" for number in range(num_files)], "Test", look)

    found = simulated_hosts.run(num_hosts, play, job=job)
    assert found == [[[number, {"group_size": 1}] for number in range(num_files)]] * num_hosts
    assert looks == collections.Counter(range(num_files)), "each file by one host"
    blocks = [range(first, min(first + block, num_files)) for first in range(0, num_files, block)]
    assert len(hosts) == sum(min(num_hosts, len(one)) for one in blocks)
    deadline = time.monotonic() + 5
    while job.store.keys() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not job.store.keys()


def test_a_file_that_one_host_cannot_read_is_an_error_of_all() -> None:
    def play(host: int) -> str:
        def look(numbers: Sequence[int]) -> list[Any]:
            if 2 in numbers:
                raise SourceError("file 2 is damaged")
            return [[number, {}] for number in numbers]

        with pytest.raises(SourceError) as raised:
            lookup.look_together([f"s3://b/{number}" for number in range(4)], "Test", look)
        return str(raised.value)

    assert simulated_hosts.run(9, play) == ["file 2 is damaged"] * 9
