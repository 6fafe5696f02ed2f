"""What to fetch and what to evict, against plain definitions."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from meshfeed._src.reading.fetch_policy import (
    FULL_SECONDS,
    NUM_FETCHES,
    FetchPlan,
    default_ahead_bytes,
    eviction_order,
    open_bytes,
    plan_bytes,
)


@dataclasses.dataclass(frozen=True)
class File:
    number: int
    num_bytes: int = 1
    ahead_bytes: int = 3
    plan_bytes: int = 100


def batches_of(numbers: list[list[int]]) -> list[list[File]]:
    return [[File(number) for number in sorted(set(batch))] for batch in numbers]


@given(
    st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=20),
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
)
def test_next_uses_and_the_nearest_files_are_those_of_the_batches(numbers: list[list[int]], moves: list[int]) -> None:
    batches = batches_of(numbers)
    plan = FetchPlan(iter(batches))
    for move in moves:
        plan.reached = min(plan.reached + move, len(batches))
        assert len(set(plan.scan(100))) <= 7
        coming = batches[plan.reached :]
        uses = {
            file: next((at for at, batch in enumerate(coming) if file in batch), math.inf)
            for file in map(File, range(7))
        }
        assert {file: plan.next_use(file) for file in uses} == uses  # also before passed uses are forgotten
        fetched = list(plan.to_fetch(lambda file: False, 0.0))
        for file in fetched:
            plan.failed(file)  # so that it is not yielded again until files are looked for anew
        assert {file: plan.next_use(file) for file in uses} == uses
        assert all(uses[file] < math.inf for file in fetched)
        nearest = sorted(use for use in uses.values() if use < math.inf)[:3]
        assert all(uses[file] <= nearest[-1] for file in fetched)
    assert plan.is_far_enough()


def test_files_up_to_ahead_bytes_are_fetched_and_those_in_use_do_not_count() -> None:
    batches = batches_of([[0, 1], [0, 1], [2], [3], [4], [5], [0]])
    here: set[File] = set()
    plan = FetchPlan(iter(batches))

    def fetch() -> list[int]:
        found = list(plan.to_fetch(here.__contains__, 0.0))
        for file in found:
            here.add(file)
            plan.fetched(file)
        return [file.number for file in found]

    list(plan.scan(100))
    assert fetch() == [0, 1, 2]
    assert fetch() == []
    plan.reached = 1  # files 0 and 1 are in use
    assert fetch() == [3, 4]
    plan.reached = 2  # file 1 is done, and the room of both is free
    assert fetch() == []
    plan.reached = 3
    assert fetch() == [5]


def test_a_full_cache_is_tried_again_after_the_next_batch_and_a_pause() -> None:
    batches = batches_of([[number] for number in range(20)])
    plan = FetchPlan(iter(batches))
    list(plan.scan(100))
    first = next(plan.to_fetch(lambda file: False, 0.0))
    plan.no_room(first, 0, 0.0)
    assert list(plan.to_fetch(lambda file: False, 1.0)) == []
    plan.reached = 1
    assert list(plan.to_fetch(lambda file: False, FULL_SECONDS / 2)) == []
    assert [file.number for file in plan.to_fetch(lambda file: False, FULL_SECONDS)] == [1, 2, 3]


def test_a_file_is_due_for_the_use_that_it_was_planned_for() -> None:
    batches = batches_of([[0], [1], [1], [0]])
    plan = FetchPlan(iter(batches))
    list(plan.scan(100))
    zero, one = plan.to_fetch(lambda file: False, 0.0)
    assert (plan.due(zero), plan.due(one)) == (0, 1)
    plan.reached = 2  # file 0 has been passed, though a later batch needs it
    assert (plan.due(zero), plan.due(one)) == (-2, -1)
    assert plan.next_use(zero) == 1


def test_no_more_files_at_a_time_than_connections_and_no_longer_plan_than_needed() -> None:
    batches = [[File(number, ahead_bytes=50, plan_bytes=60) for number in range(100)], [File(200)]]
    plan = FetchPlan(iter(batches))
    list(plan.scan(100))
    assert plan.is_far_enough()
    assert plan.next_use(File(200)) == math.inf
    found = list(plan.to_fetch(lambda file: False, 0.0))
    assert [file.number for file in found] == list(range(NUM_FETCHES))
    plan.fetched(found[0])
    assert [file.number for file in plan.to_fetch(lambda file: file is found[0], 0.0)] == [NUM_FETCHES]


def test_evicted_are_those_needed_last_and_never_one_that_is_needed_soon() -> None:
    copies = [
        (5.0, 1.0, 10, "a"),
        (math.inf, 3.0, 20, "b"),
        (math.inf, 2.0, 30, "c"),
        (4.0, 0.0, 40, "d"),
        (0.0, 9.0, 1, "e"),
    ]
    assert list(eviction_order(copies, None)) == [(30, "c"), (20, "b"), (10, "a"), (40, "d"), (1, "e")]
    assert [copy for _, copy in eviction_order(copies, 2.0)] == ["c", "b", "a"]  # needed more than twice as late
    assert [copy for _, copy in eviction_order(copies, 3.0)] == ["c", "b"]
    assert list(eviction_order(copies, math.inf)) == []


def test_sizes() -> None:
    assert (default_ahead_bytes(None), default_ahead_bytes(10)) == (4 << 30, 5)
    assert (plan_bytes(5, 10), plan_bytes(5, None)) == (45, 5)
    assert open_bytes(10) == 2
