"""Steps and positions: the same as counting batch by batch, whatever the sizes, and after any number of resumes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfeed._src.base.errors import StateMismatchError
from meshfeed._src.base.settings import BatchSchedule
from meshfeed._src.order.steps import Segment, StepSchedule, derive_step, parse_segments, position_at

REMEDY = "The state was changed or damaged; use an earlier checkpoint."
FORM = "a list of [first_step, first_position, global_batch_size]"


@st.composite
def batch_schedules(draw: st.DrawFn) -> BatchSchedule:
    later = draw(st.sets(st.integers(1, 12), max_size=3))
    return BatchSchedule([(first, draw(st.integers(1, 5))) for first in (0, *sorted(later))])


@st.composite
def resumed(draw: st.DrawFn) -> tuple[StepSchedule, list[int]]:
    """A stream that was resumed some times, each time with a new schedule, and the sizes of its first 40 batches."""
    batches = draw(batch_schedules())
    schedule, sizes = StepSchedule(batches), [batches.size_at(step) for step in range(40)]
    step = 0
    for _ in range(draw(st.integers(0, 3))):
        step += draw(st.integers(0, 8))
        batches = draw(batch_schedules())
        past = parse_segments(schedule.delivered_json(step))
        schedule = StepSchedule(batches, past=past, step=step, position=sum(sizes[:step]))
        sizes[step:] = [batches.size_at(later) for later in range(step, 40)]
    return schedule, sizes


@given(resumed())
def test_every_step_is_where_counting_puts_it(stream: tuple[StepSchedule, list[int]]) -> None:
    schedule, sizes = stream
    positions = list(itertools.accumulate(sizes, initial=0))
    assert [schedule.at(step) for step in range(40)] == list(zip(positions, sizes, strict=False))
    assert [schedule.position_of_step(step) for step in range(40)] == positions[:40]


@given(resumed())
def test_a_segment_is_written_only_where_the_size_changes(stream: tuple[StepSchedule, list[int]]) -> None:
    schedule, sizes = stream
    positions = list(itertools.accumulate(sizes, initial=0))
    changes = [step for step in range(40) if step == 0 or sizes[step] != sizes[step - 1]]
    expected = [[step, positions[step], sizes[step]] for step in changes]
    assert schedule.delivered_json(40) == expected
    for step in range(12):
        assert schedule.delivered_json(step) == [segment for segment in expected if segment[0] < step]


@given(resumed(), st.integers(0, 100))
def test_the_number_of_steps_is_what_counting_gives(stream: tuple[StepSchedule, list[int]], total: int) -> None:
    schedule, sizes = stream
    sizes += [sizes[-1]] * 100
    ends = list(itertools.accumulate(sizes))
    assert schedule.num_steps(total, pad=False) == sum(end <= total for end in ends)
    assert schedule.num_steps(total, pad=True) == sum(end - size < total for end, size in zip(ends, sizes, strict=True))


@given(resumed(), st.integers(0, 30))
def test_the_step_follows_from_the_segments_and_the_position(stream: tuple[StepSchedule, list[int]], step: int) -> None:
    schedule, sizes = stream
    segments = parse_segments(schedule.delivered_json(step))
    position = sum(sizes[:step])
    for total in (None, position, position + 3):
        for pad in (False, True):
            assert derive_step(segments, position, total, pad=pad) == step
    if step and sizes[step - 1] > 1:  # a last batch that is not full
        assert derive_step(segments, position - 1, position - 1, pad=True) == step


@given(resumed(), st.integers(1, 30), st.integers(0, 9))
def test_delivered_segments_go_on_at_their_last_size(
    stream: tuple[StepSchedule, list[int]], step: int, more: int
) -> None:
    schedule, sizes = stream
    segments = parse_segments(schedule.delivered_json(step))
    assert position_at(segments, step + more) == sum(sizes[:step]) + more * sizes[step - 1]
    assert position_at((), more) == 0


def test_far_steps_cost_no_walk() -> None:
    schedule = StepSchedule(BatchSchedule([(0, 8), (10**12, 3)]))
    assert schedule.at(10**15) == (8 * 10**12 + 3 * (10**15 - 10**12), 3)
    assert schedule.num_steps(8 * 10**12 + 7, pad=False) == 10**12 + 2
    assert schedule.num_steps(8 * 10**12 + 7, pad=True) == 10**12 + 3


def refusal(call: Any, *arguments: Any, **options: Any) -> tuple[str, Any, Any, str]:
    with pytest.raises(StateMismatchError) as caught:
        call(*arguments, **options)
    return caught.value.field, caught.value.saved, caught.value.current, caught.value.remedy


@pytest.mark.parametrize("raw", [None, {}, "[]", ((0, 0, 4),)])
def test_segments_are_a_list(raw: object) -> None:
    assert refusal(parse_segments, raw) == ("segments", raw, FORM, REMEDY)


@pytest.mark.parametrize(
    "entry",
    [
        (2, 8, 4), 7, [2, 8], [2, 8, 4, 0], [2, 8, 0], [2, 8, -4], [-2, 8, 4], [2, -8, 4], [2, 8, 4.0], [2, "8", 4],
        [True, 8, 4], [2, 8, True], [2, None, 4],
    ],
)  # fmt: skip
def test_a_segment_is_three_numbers(entry: object) -> None:
    assert refusal(parse_segments, [[0, 0, 4], entry]) == ("segments", entry, FORM, REMEDY)


@pytest.mark.parametrize(
    "raw",
    [
        [[1, 0, 4]],
        [[0, 4, 4]],
        [[0, 0, 4], [2, 9, 3]],
        [[0, 0, 4], [2, 7, 3]],
        [[0, 0, 4], [0, 0, 3]],
        [[0, 0, 4], [2, 8, 3], [1, 5, 4]],
        [[0, 0, 4], [2, 8, 3], [3, 12, 4]],  # 4 from each step of the first segment on, but the second has 3
    ],
)
def test_segments_join_without_a_gap(raw: list[Any]) -> None:
    expected = ("segments", raw, "segments that begin at 0 and join without a gap", REMEDY)
    assert refusal(parse_segments, raw) == expected


def test_segments_are_read() -> None:
    assert parse_segments([]) == ()
    assert parse_segments([[0, 0, 1]]) == (Segment(0, 0, 1),)
    assert parse_segments([[0, 0, 4], [2, 8, 3], [3, 11, 9]]) == (Segment(0, 0, 4), Segment(2, 8, 3), Segment(3, 11, 9))


@pytest.mark.parametrize(
    ("segments", "position", "total", "pad", "expected"),
    [
        ([], 5, None, False, 0),
        ([], 5, 5, True, 0),
        ([[0, 0, 4]], 0, None, False, "a multiple of 4 rows after 0"),  # a segment has at least one step
        ([[0, 0, 4]], 6, None, True, "a multiple of 4 rows after 0"),
        ([[0, 0, 4]], 6, 6, False, "a multiple of 4 rows after 0"),
        ([[0, 0, 4]], 6, 7, True, "a multiple of 4 rows after 0"),
        ([[0, 0, 4], [2, 8, 3]], 8, None, False, "a multiple of 3 rows after 8"),
        ([[0, 0, 4], [2, 8, 3]], 12, None, False, "a multiple of 3 rows after 8"),
        ([[0, 0, 4], [2, 8, 3]], 5, None, False, "a multiple of 3 rows after 8"),
    ],
)
def test_a_position_inside_a_batch_is_refused(
    segments: Any, position: int, total: int | None, pad: bool, expected: object
) -> None:
    found = refusal(derive_step, parse_segments(segments), position, total, pad=pad)
    remedy = REMEDY if segments else f"No batch was delivered. {REMEDY}"
    assert found == ("position", position, expected, remedy)
