"""MaxText's loader on real processes: hosts end together, whatever each of them has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import maxtext_jobs
from maxtext_jobs import HOST_ROWS

from meshfeed.testing import HostPool

HOSTS = 2


@pytest.fixture(scope="module")
def pool() -> Any:
    with HostPool(HOSTS, 4, timeout_seconds=180) as made:
        yield made


def values(results: Any) -> list[Any]:
    return [result.value for result in results]


def rows_of(host: int, number: int) -> list[int]:
    return [10_000 * (host + 1) + 100 * number + row for row in range(HOST_ROWS)]


@pytest.mark.parametrize("counts", [[5, 9], [9, 0], [3, 3]])
def test_without_padding_all_hosts_stop_at_the_same_step(pool: Any, counts: list[int]) -> None:
    for host, value in enumerate(values(pool.run(maxtext_jobs.uneven, counts, False, 12))):
        assert value["error"] == "StopIteration"
        assert value["seen"] == [rows_of(host, number) for number in range(min(counts))]


@pytest.mark.parametrize("counts", [[5, 9], [9, 0]])
def test_with_padding_zero_batches_come_for_ever_from_the_same_step(pool: Any, counts: list[int]) -> None:
    for host, value in enumerate(values(pool.run(maxtext_jobs.uneven, counts, True, 12))):
        assert value["error"] is None
        real = min(counts)
        assert value["seen"][:real] == [rows_of(host, number) for number in range(real)]
        assert value["seen"][real:] == [[0] * HOST_ROWS] * (12 - real)
        assert value["sums"][real:] == [0] * (12 - real)


def test_no_data_on_any_host_is_a_value_error_on_all(pool: Any) -> None:
    for value in values(pool.run(maxtext_jobs.uneven, [0, 0], True, 3)):
        assert value["error"].startswith("ValueError: no host has a single batch")


def test_reset_where_one_host_has_a_placeholder_that_is_read_once(pool: Any) -> None:
    first, second = values(pool.run(maxtext_jobs.reset_on_all))
    assert first == [rows_of(0, number) for number in (0, 1, 0, 1)]
    assert second == [rows_of(1, number) for number in (0, 1, 2, 3)]


def test_the_factor_may_differ_between_hosts(pool: Any) -> None:
    first, second = values(pool.run(maxtext_jobs.factors, 2.0, -1))
    assert len(first) == len(second) == 3  # six batches of half the rows make three
    half = HOST_ROWS // 2
    assert first[1] == [10_000 + 100 * number + row for number in (2, 3) for row in range(half)]
    assert second[1] == rows_of(1, 1)


def test_placeholder_rows_stand_where_the_host_that_gives_them_has_its_rows(pool: Any) -> None:
    half = HOST_ROWS // 2
    real = [10_000 + 100 * number + row for number in (0, 1) for row in range(half)]
    for value in values(pool.run(maxtext_jobs.placeholders)):
        assert value["kept"] == real
        assert value["whole"] == real + [-1] * HOST_ROWS


@pytest.mark.parametrize("kind", ["raises", "indivisible", "fewer rows"])
def test_a_loader_that_fails_on_one_host_stops_all(pool: Any, kind: str) -> None:
    first, second = values(pool.run(maxtext_jobs.failing, kind))
    assert first["steps"] <= 3
    assert second["steps"] == first["steps"]
    assert max(first["waited"], second["waited"]) < 30
    if kind == "fewer rows":  # good for that host alone, but no global batch
        assert first["type"] == second["type"] == "AgreementError"
        assert "do not make one global batch" in first["text"]
    else:
        assert first["type"] == "PeerError"
        assert "host 1" in first["text"]
        assert ("bucket is gone" if kind == "raises" else "['x']") in first["text"]
        assert second["type"] == ("RuntimeError" if kind == "raises" else "PlanError")


def test_remote_iterator_on_every_host(pool: Any, tmp_path: Path) -> None:
    for host, value in enumerate(values(pool.run(maxtext_jobs.remote_iterator, str(tmp_path)))):
        assert value["before"] == [rows_of(host, 0), rows_of(host, 1)]
        assert value["rest"] == value["again"] == [rows_of(host, number) for number in range(2, 6)]
        assert value["first"] == rows_of(host, 0)
    assert sorted(path.name for path in (tmp_path / "2" / "iter").iterdir()) == [
        "process_0-of-2.json",
        "process_1-of-2.json",
    ]


def test_poisoned_placeholders_never_reach_the_step(pool: Any) -> None:
    for value in values(pool.run(maxtext_jobs.poisoned_placeholders)):
        assert value == [[1, 40], [2, 80]]
