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


@pytest.fixture(scope="module")
def four() -> Any:
    with HostPool(4, 2, timeout_seconds=180) as made:
        yield made


UNLIKE = [5, 3, 0, 7]
ZEROS = [0] * HOST_ROWS


def given(host: int, step: int, counts: list[int] = UNLIKE) -> list[int]:
    """The rows of a host with padding."""
    return rows_of(host, step) if step < counts[host] else ZEROS


def test_with_padding_each_host_gives_all_its_batches_and_zeros_after_them(four: Any) -> None:
    results = values(four.run(maxtext_jobs.padded, UNLIKE, 9))
    for host, value in enumerate(results):
        assert [look["rows"] for look in value["seen"]] == [given(host, step) for step in range(9)]
        assert [look["out"] for look in value["seen"]] == [step >= UNLIKE[host] for step in range(9)]
        assert [look["last"] for look in value["seen"]] == [given(host, step) for step in range(9)]
        sums = [sum(sum(given(other, step)) for other in range(4)) for step in range(9)]
        assert [look["sum"] for look in value["seen"]] == sums
        assert {look["shapes"] for look in value["seen"]} == {((4 * HOST_ROWS,), (4 * HOST_ROWS, 3), "float32")}
        assert value["position"] == sum(UNLIKE) * HOST_ROWS
        assert value["fresh"] == (False, None)
        assert value["again"] == [given(host, step) for step in range(2)]


def test_a_shorter_last_batch_is_padded_by_hosts_whose_data_has_ended(four: Any) -> None:
    counts, short = [3, 1, 3, 0], HOST_ROWS // 2
    for host, value in enumerate(values(four.run(maxtext_jobs.padded, counts, 4, short))):
        rows = [given(host, step, counts)[: short if step >= 2 else None] for step in range(4)]
        assert [look["rows"] for look in value["seen"]] == [look["last"] for look in value["seen"]] == rows
        assert value["position"] == 5 * HOST_ROWS + 2 * short


@pytest.mark.parametrize("at", [2, 4, 8])
def test_states_in_the_middle_and_at_the_end_of_padding(four: Any, at: int) -> None:
    for host, value in enumerate(values(four.run(maxtext_jobs.padded_from_states, UNLIKE, at, 4))):
        rest = [given(host, step) for step in range(at, at + 4)]
        assert value["rest"] == value["same"] == value["local"] == value["own"] == rest
        assert value["position"] == sum(min(count, at + 4) for count in UNLIKE) * HOST_ROWS


def test_padding_where_two_hosts_load_and_the_others_give_placeholders(four: Any) -> None:
    results = values(four.run(maxtext_jobs.padded_factors))
    half = HOST_ROWS // 2
    joined = [[10_000 + 100 * n + row for n in (2 * step, 2 * step + 1) for row in range(half)] for step in range(3)]
    turns = [rows_of(1, number) for number in (0, 0, 1, 1)]
    placeholder = [-1] * HOST_ROWS
    for value, real in zip(results, [joined, turns, [placeholder] * 7, [placeholder] * 7], strict=True):
        assert [look["rows"] for look in value] == real + [ZEROS] * (7 - len(real))
        assert [look["out"] for look in value] == [step >= len(real) for step in range(7)]


def test_a_host_without_padding_that_ends_stops_the_others(pool: Any) -> None:
    first, second = values(pool.run(maxtext_jobs.padding_on_one_host, [1, 3]))
    assert first == [rows_of(0, 0)] + [ZEROS] * 6
    assert second == [rows_of(1, number) for number in range(3)]
    first, second = values(pool.run(maxtext_jobs.padding_on_one_host, [5, 3]))
    assert first == [rows_of(0, number) for number in range(3)] + [ZEROS] * 4
    assert second == [rows_of(1, number) for number in range(3)]


def test_without_padding_hosts_with_unlike_data_stop_at_the_same_step(four: Any) -> None:
    for counts in (UNLIKE, [5, 3, 2, 7], [0, 0, 0, 0]):
        for host, value in enumerate(values(four.run(maxtext_jobs.uneven, counts, False, 9))):
            assert value["error"] == "StopIteration"
            assert value["seen"] == [rows_of(host, number) for number in range(min(counts))]


def test_remote_iterators_with_unlike_data_stop_at_the_same_step(four: Any) -> None:
    for counts in (UNLIKE, [5, 3, 2, 7], [0, 0, 0, 0]):
        for host, value in enumerate(values(four.run(maxtext_jobs.remote_ends, counts))):
            assert value == [rows_of(host, number) for number in range(min(counts))] * 2


def test_with_padding_and_no_data_on_any_host_is_a_value_error_on_all(pool: Any) -> None:
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
        assert "do not form one global batch" in first["text"]
    else:
        assert first["type"] == "PeerError"
        assert "host 1" in first["text"]
        assert ("bucket is gone" if kind == "raises" else "['x']") in first["text"]
        assert second["type"] == ("RuntimeError" if kind == "raises" else "PlanError")


def test_a_loader_that_hangs_on_one_host_stalls_all_at_the_deadline(pool: Any) -> None:
    first, second = pool.run(maxtext_jobs.hanging)
    for value in (first.value, second.value):
        assert value["state"] == {"batches": value["steps"]}
        assert value["steps"] == 3  # the windows of steps that all hosts have read
        assert "host 1" in value["error"]
        assert value["seconds"] < 40  # the loader hangs for 60


def test_a_loader_that_drops_batches_for_its_state_is_no_stall(pool: Any) -> None:
    for host, value in enumerate(values(pool.run(maxtext_jobs.slow_restart))):
        assert value == [rows_of(host, number) for number in range(12, 15)]


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
