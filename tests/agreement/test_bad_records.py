"""Bad records counted over all hosts: at which step there are too many, on any hosts, windows and resume."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from meshfeed import SkipBad
from meshfeed._src.agreement.bad_records import BadRecords
from meshfeed._src.streams.protocol import HostBatch


def batches_of(bad_rows: dict[int, set[int]], rows: set[int], steps: range, batch: int) -> list[HostBatch]:
    return [
        HostBatch(step, batch, None, 0, bad=[(step * batch + row, 0, "bad") for row in sorted(bad_rows[step] & rows)])
        for step in steps
    ]


def sent(value: Any) -> Any:
    return json.loads(json.dumps(value))


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.data())
def test_too_many_bad_records_are_found_at_the_same_step_on_any_hosts_windows_and_resume(data: Any) -> None:
    batch, steps, limit = 8, 24, data.draw(st.sampled_from([0.02, 0.1, 0.3]))
    share = data.draw(st.floats(0, 0.4))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    bad_rows = {step: set(np.flatnonzero(rng.random(batch) < share).tolist()) for step in range(steps)}
    expected, total = None, 0
    for step in range(steps):
        total += len(bad_rows[step])
        records = (step + 1) * batch
        if records >= 1 / limit and total > limit * records:
            expected = step
            break

    def after(step: int, ended: Any) -> int:
        return (step + 1) * batch

    # one process, restarted at a step of its own
    resumed = data.draw(st.integers(0, steps if expected is None else expected))
    before = sum(len(bad_rows[step]) for step in range(resumed))
    alone = BadRecords(SkipBad(limit), before, after)
    found_alone = [
        alone.count_alone(one, {}) for one in batches_of(bad_rows, set(range(batch)), range(resumed, steps), batch)
    ]
    assert next((failure.step for failure in found_alone if failure), None) == expected

    # several hosts, which may hold the same rows, in windows of any length
    count = data.draw(st.integers(1, 4))
    held = [set(range(batch))] + [set(np.flatnonzero(rng.random(batch) < 0.6).tolist()) for _ in range(count - 1)]
    sides = [BadRecords(SkipBad(limit), before, after) for _ in range(count)]
    first, found, counted = resumed, None, {}
    while first < steps and found is None:
        end = min(steps, first + data.draw(st.integers(1, 9)))
        reports = {
            host: sent(side.report(batches_of(bad_rows, rows, range(first, end), batch), {}))
            for host, (side, rows) in enumerate(zip(sides, held, strict=True))
        }
        contents, failure = sides[0].reduce(reports, first, end, {})
        for side in sides:
            side.learn(sent(contents))
        for step in range(first, end if failure is None or failure.step is None else failure.step):
            counted[step] = {side.up_to(step) for side in sides}
        found = None if failure is None else failure.step
        first = end
    assert found == expected
    for step, counts in counted.items():
        assert counts == {sum(len(bad_rows[s]) for s in range(step + 1))}


BATCH = HostBatch(0, 4, None, 0, bad=[(3, 0, "CorruptDataError: cut short"), (9, 0, "ValueError: no JPEG")])
MESSAGE = (
    "2 of the 4 records up to step 0 are bad, a fraction of 0.5; bad_records=SkipBad(max_fraction=0.25) allows 0.25{}. Check "
    "the data; raise max_fraction only if so many bad records are expected."
)


def side_of_four(limit: float | None = 0.25, num_skipped: int = 0) -> BadRecords:
    return BadRecords(None if limit is None else SkipBad(limit), num_skipped, lambda step, ended: (step + 1) * 4)


def test_the_error_for_too_many_bad_records_says_which_step_and_what_to_do() -> None:
    side = side_of_four()
    _, failure = side.reduce({2: {}, 1: side.report([BATCH], {}), 0: {}}, 0, 1, {})
    assert failure is not None
    assert (failure.kind, failure.step, failure.host) == ("SourceError", 0, None)
    assert failure.message == MESSAGE.format(" (last: host 1, record 9: ValueError: no JPEG)")
    alone = side_of_four().count_alone(BATCH, {})
    assert alone is not None
    assert alone.message == MESSAGE.format(" (last: record 9: ValueError: no JPEG)")


def test_the_last_bad_record_is_that_of_the_last_host_and_need_not_be_in_the_window() -> None:
    side = side_of_four()
    reports: Any = {host: {"bad": {"0": [[host, 0]]}, "last_bad": f"record {host}: x"} for host in (1, 0)}
    failure = side.reduce(reports, 0, 1, {})[1]
    assert failure is not None
    assert "(last: host 1, record 1: x)" in failure.message
    failure = side_of_four(num_skipped=2).reduce({0: {}}, 0, 1, {})[1]
    assert failure is not None
    assert failure.message == MESSAGE.format("")


def test_a_report_lists_each_bad_record_once() -> None:
    batch = HostBatch(3, 4, None, 0, bad=[(9, 1, "x"), (3, 0, "y"), (9, 1, "z")])
    assert side_of_four(1.0).report([HostBatch(2, 4, None, 0), batch], {}) == {
        "bad": {"3": [(3, 0), (9, 1)]},
        "last_bad": "record 9: z",
    }
    assert side_of_four(1.0).report([HostBatch(2, 4, None, 0)], {}) == {}


def test_without_a_limit_nothing_is_counted() -> None:
    side = side_of_four(None)
    assert side.report([BATCH], {}) == {}
    assert side.reduce({0: {"bad": {"0": [(1, 0), (2, 0)]}}}, 0, 1, {}) == ({}, None)
    assert side.count_alone(BATCH, {}) is None


def test_a_window_in_which_everything_is_bad_is_published_in_short() -> None:
    side = BadRecords(SkipBad(0.01), 0, lambda step, ended: (step + 1) * 1000)
    batches = [HostBatch(step, 1000, None, 0, bad=[(i, 0, "bad") for i in range(1000)]) for step in range(50)]
    assert list(side.report(batches, {})["bad"]) == ["0"]


@pytest.mark.parametrize(("records", "fails"), [(9, False), (10, True)])
def test_below_one_over_the_limit_records_none_is_too_many(records: int, fails: bool) -> None:
    side = BadRecords(SkipBad(0.1), 0, lambda step, ended: records)
    batch = HostBatch(0, 4, None, 0, bad=[(1, 0, ""), (2, 0, "")])
    assert (side.count_alone(batch, {}) is not None) == fails


@pytest.mark.parametrize(("bad", "fails"), [(1, False), (2, True)])
def test_exactly_the_limit_is_not_too_many(bad: int, fails: bool) -> None:
    side = side_of_four(0.25)
    batch = HostBatch(0, 4, None, 0, bad=[(i, 0, "") for i in range(bad)])
    assert (side.count_alone(batch, {}) is not None) == fails


def test_the_stream_is_as_long_as_the_lanes_that_ended_leave_it() -> None:
    seen = []

    def after(step: int, ended: Any) -> int:
        seen.append((step, dict(ended)))
        return 1000

    side = BadRecords(SkipBad(0.5), 0, after)
    side.report([HostBatch(4, 4, None, 0)], {3: 7})
    side.reduce({0: {}}, 5, 6, {3: 8})
    side.count_alone(HostBatch(6, 4, None, 0), {3: 9})
    assert seen == [(4, {3: 7}), (5, {3: 8}), (6, {3: 9})]


def test_a_step_that_is_read_twice_counts_once() -> None:
    side = side_of_four(1.0)
    assert side.none_so_far
    for _ in range(2):
        side.count_alone(HostBatch(0, 4, None, 0, bad=[(1, 0, "")]), {})
    assert not side.none_so_far
    side.count_alone(HostBatch(1, 4, None, 0, bad=[(1, 1, ""), (2, 0, "")]), {})
    assert [side.up_to(step) for step in (0, 1, 1, 5)] == [1, 3, 3, 3]


def test_the_count_up_to_a_step_resumes_and_is_delivered_step_by_step() -> None:
    side = side_of_four(1.0, num_skipped=5)
    assert not side.none_so_far
    assert side.up_to(0) == 5
    contents, failure = side.reduce(
        {0: {"bad": {"2": [(1, 0)], "4": [(2, 0), (3, 0)]}}, 1: {"bad": {"2": [(1, 0)]}}}, 1, 6, {}
    )
    assert failure is None
    assert contents == {"bad": {"2": 6, "4": 8}}
    side.learn(contents)
    side.learn({})
    assert [side.up_to(step) for step in (1, 2, 3, 4, 5)] == [5, 6, 6, 8, 8]
    assert side.reduce({0: {}}, 6, 8, {}) == ({}, None)


def test_a_record_is_bad_once_in_each_epoch() -> None:
    side = side_of_four(1.0)
    contents, _ = side.reduce({0: {"bad": {"0": [(1, 0), (1, 1)]}}}, 0, 1, {})
    assert contents == {"bad": {"0": 2}}
