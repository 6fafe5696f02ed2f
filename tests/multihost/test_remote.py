"""RemoteFeed on 2 processes of 4 devices and on 1 of 8: the local feed's batches, states and checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import maxtext_jobs

from meshfeed.testing import HostPool

CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "random": (maxtext_jobs.make_memory, {"global_batch_size": 16, "shuffle": True, "seed": 5, "num_epochs": 2}, 12),
    "once": (maxtext_jobs.make_memory, {"global_batch_size": 16, "shuffle": True, "load": "once"}, 6),
    "stream": (maxtext_jobs.make_stream, {"global_batch_size": 16, "num_lanes": 8, "end": "pad"}, 7),
}


@pytest.fixture(scope="module")
def pool() -> Any:
    with HostPool(2, 4, timeout_seconds=180) as made:
        yield made


@pytest.mark.parametrize("case", CASES)
def test_remote_and_local_are_one_stream(pool: Any, case: str, tmp_path: Path) -> None:
    make, settings, count = CASES[case]
    for result in pool.run(maxtext_jobs.compare_remote, make, settings, str(tmp_path)):
        assert result.value["count"] == count
        assert result.value["ended"] == [True, True]
        assert json.loads(result.value["state"])["position"] == 48


def test_a_state_of_one_process_continues_on_two(pool: Any, tmp_path: Path) -> None:
    make, settings, _ = CASES["random"]
    two = {
        result.value["state"] for result in pool.run(maxtext_jobs.compare_remote, make, settings, str(tmp_path / "2"))
    }
    with HostPool(1, 8, timeout_seconds=180) as single:
        one = {r.value["state"] for r in single.run(maxtext_jobs.compare_remote, make, settings, str(tmp_path / "1"))}
    assert one == two
    assert len(one) == 1


def test_hosts_agree_through_a_store_that_one_of_them_serves(pool: Any, tmp_path: Path) -> None:
    cases = {name: case[:2] for name, case in CASES.items()}
    for result in pool.run(maxtext_jobs.compare_remote_over_a_served_store, cases, str(tmp_path)):
        assert {name: found["count"] for name, found in result.value["results"].items()} == {
            name: case[2] for name, case in CASES.items()
        }
        assert result.value["calls"] > 100
        ours, jaxs = result.value["answers"]
        assert ours == jaxs


def test_each_controller_moves_what_its_hosts_hold(pool: Any) -> None:
    for result in pool.run(maxtext_jobs.beside_other_devices):
        assert result.value == 6


def test_errors_name_the_host_and_what_it_said(pool: Any) -> None:
    first, second = (result.value for result in pool.run(maxtext_jobs.remote_failing))
    assert first["steps"] == second["steps"] == 3
    assert first["type"] == "PeerError"
    assert "host 1 failed" in first["text"]
    assert "disk on fire" in first["text"]
    assert "disk on fire" in second["text"]


def test_a_source_that_one_host_cannot_make_is_told_to_the_others(pool: Any) -> None:
    """It waited for the others' time-out, and later feeds had other names there, so that they waited as well."""
    (first, seconds, *after), (second, _, *after_second) = (
        result.value for result in pool.run(maxtext_jobs.remote_not_made)
    )
    assert first.startswith("PeerError: "), first
    assert "host 1" in first
    assert "no such disk" in first
    assert second.startswith("OSError: ")
    assert "no such disk" in second
    assert seconds < 30
    assert after[0] == after_second[0]
    assert sorted({*after[1], *after_second[1]}) == list(range(16))
