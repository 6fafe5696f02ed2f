"""What hosts leave behind in the coordination service, and what a forked child does to its parent's job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import leaving_jobs

from meshfeed._src.testing.hosts import free_port
from meshfeed.testing import HostPool, run_hosts


@pytest.fixture(scope="module")
def pool() -> Any:
    with HostPool(2, 4, timeout_seconds=240) as made:
        yield made


def test_no_key_stays_once_all_hosts_have_left(pool: Any, tmp_path: Path) -> None:
    for result in pool.run(leaving_jobs.keys_after, str(tmp_path)):
        assert {way: keys for way, keys in result.value.items() if keys} == {}


def test_several_processes_without_a_key_value_store_are_refused(pool: Any, tmp_path: Path) -> None:
    for result in pool.run(leaving_jobs.without_a_store, str(tmp_path)):
        for said in result.value:
            assert said.startswith("meshfeed cannot find the key-value store of JAX "), result.value
            assert "Upgrade meshfeed, or install an older version of JAX" in said


@pytest.mark.parametrize(("how", "host"), [("close", 1), ("exit", 1), ("exit", 0)])
def test_a_forked_child_neither_speaks_for_its_parent_nor_hangs(pool: Any, how: str, host: int) -> None:
    results = [result.value for result in pool.run(leaving_jobs.forks, how, host)]
    assert results[host] == {"child": "ended", "step": 101}
    assert results[1 - host] == {"child": None, "step": 101}


def test_a_feed_of_the_job_before_does_not_disturb_the_next_one() -> None:
    results = run_hosts(leaving_jobs.resized, free_port(), num_hosts=2, devices_per_host=2)
    for host, result in enumerate(results):
        assert result.value == [[*range(first, first + 4)] for first in range(4 * host, 24, 8)]
