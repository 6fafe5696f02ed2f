"""Lengths of windows, and the stop that follows from the reports: the same for any order, hosts and windows."""

from __future__ import annotations

import itertools
import random
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from hosts import reduce_nothing

from meshfeed._src.agreement.messages import Stop, WindowReport
from meshfeed._src.agreement.windows import conclude, full_window, window_ends
from meshfeed._src.base.errors import Failure

STEP_SECONDS = 0.02


@pytest.mark.parametrize("hosts", [2, 8, 256, 319, 320, 1000, 1024, 4096, 16384])
def test_two_requests_a_host_and_window_leave_room_below_5000_a_second(hosts: int) -> None:
    assert 2 * hosts / (full_window(hosts, 1, 1 << 30) * STEP_SECONDS) <= 4100


@pytest.mark.parametrize(
    ("hosts", "batch_bytes", "steps"),
    [
        (1, 1, 8),
        (320, 1, 8),
        (321, 1, 9),
        (4096, 1, 103),
        (4096, 1 << 23, 64),  # memory for two windows
        (4096, (1 << 23) + 1, 63),
        (4, 1 << 29, 1),
        (4, 1 << 30, 1),
        (4, 0, 8),
    ],
)
def test_a_window_is_long_enough_for_the_coordinator_and_fits_in_memory_twice(
    hosts: int, batch_bytes: int, steps: int
) -> None:
    assert full_window(hosts, batch_bytes, 1 << 30) == steps


def test_a_batch_of_unknown_size_counts_as_one_byte() -> None:
    assert full_window(1000, 0, 20) == 10


def test_the_first_windows_are_short() -> None:
    ends = window_ends(10, lambda: 103)
    assert [next(ends) for _ in range(6)] == [11, 36, 86, 186, 289, 392]
    ends = window_ends(0, lambda: 8)
    assert [next(ends) for _ in range(5)] == [1, 3, 7, 15, 23]
    ends = window_ends(0, lambda: 4)
    assert [next(ends) for _ in range(5)] == [1, 2, 4, 8, 12]
    ends = window_ends(0, lambda: 1)
    assert [next(ends) for _ in range(4)] == [1, 2, 3, 4]


def test_the_first_window_needs_no_size() -> None:
    assert next(window_ends(5, lambda: 1 // 0)) == 6


# ---------------------------------------------------------------------- the stop


def report(final: int | None, *, failed_on: int | None = None, pads: bool = False, count: int = 8) -> WindowReport:
    failure = None if failed_on is None else Failure("OSError", f"no disk {failed_on}", failed_on)
    return WindowReport(count if final is None else final, final, failure, pads)


def stop_of(
    reports: dict[int, WindowReport], first: int, end: int, hosts: int | None = None
) -> tuple[int, Stop | None]:
    upto, stop, contents = conclude(
        reports, range(len(reports) if hosts is None else hosts), first, end, reduce_nothing
    )
    assert contents == {}
    return upto, stop


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({0: (5, True), 1: (7, True)}, 7),  # each host pads until the last one has ended
        ({0: (5, True), 1: (None, True)}, None),
        ({0: (5, True), 1: (None, False)}, None),  # a host that does not pad still has data
        ({0: (5, True), 1: (6, False)}, 6),
        ({0: (7, True), 1: (6, False)}, 6),
        ({0: (5, False), 1: (7, False)}, 5),
        ({0: (8, False), 1: (None, False)}, 8),
        ({0: (9, False), 1: (9, False)}, None),
        ({0: (3, False), 1: (None, False)}, 4),  # never before what may have been delivered
    ],
)
def test_the_end_is_where_the_first_host_cannot_go_on_or_the_last_one_has_ended(
    ends: Any, expected: int | None
) -> None:
    reports = {host: report(final, pads=pads) for host, (final, pads) in ends.items()}
    assert stop_of(reports, 4, 8) == ((8, None) if expected is None else (expected, Stop(expected)))


@pytest.mark.parametrize(
    ("reports", "upto", "failed"),
    [
        ({0: report(None), 1: report(5, failed_on=1)}, 5, [1]),
        ({0: report(5, failed_on=0), 1: report(5, failed_on=1)}, 5, [0, 1]),
        ({0: report(6, failed_on=0), 1: report(5, failed_on=1)}, 5, [1]),
        ({0: report(5), 1: report(5, failed_on=1)}, 5, [1]),  # rather than the end of the data
        ({0: report(4), 1: report(5, failed_on=1)}, 4, []),
        ({0: report(8, failed_on=0), 1: report(None)}, 8, [0]),
        ({0: report(9, failed_on=0), 1: report(None)}, 8, None),
        ({0: report(2, failed_on=0), 1: report(None)}, 4, [0]),
        ({0: report(5, pads=True), 1: report(6, failed_on=1)}, 6, [1]),
    ],
)
def test_the_first_failure_stops_all_hosts(reports: Any, upto: int, failed: list[int] | None) -> None:
    reached, stop = stop_of(reports, 4, 8)
    assert reached == upto
    assert (None if stop is None else [failure.host for failure in stop.failures]) == failed
    assert stop is None or stop.step == upto


def test_a_host_that_is_too_late_for_a_failure_is_not_waited_for() -> None:
    def reduce(*args: Any) -> Any:
        raise AssertionError("compared without all reports")

    reports = {2: report(7, failed_on=2), 0: report(None), 1: report(6, failed_on=1)}
    upto, stop, contents = conclude(reports, range(4), 4, 8, reduce)
    assert (upto, contents) == (4, {})
    assert stop is not None
    assert (stop.step, [failure.host for failure in stop.failures]) == (4, [1, 2])


@st.composite
def windows(draw: st.DrawFn) -> tuple[dict[int, WindowReport], int, int]:
    """Reports of all hosts on a window, as hosts make them: a host that fails or ends does so at or after ``first``."""
    first = draw(st.integers(0, 5))
    end = first + draw(st.integers(1, 6))
    pads = draw(st.booleans())
    reports = {}
    for host in range(draw(st.integers(1, 5))):
        final = draw(st.none() | st.integers(first, end + 1))
        failed_on = host if final is not None and draw(st.booleans()) else None
        reports[host] = report(final, failed_on=failed_on, pads=pads, count=end)
    return reports, first, end


def deliverable(reports: dict[int, WindowReport], step: int) -> bool:
    """Whether all hosts can make a step, from the words of the rule."""
    has_data = [one.final is None or step < one.final for one in reports.values()]
    failed = any(one.failure is not None and not has for one, has in zip(reports.values(), has_data, strict=True))
    stuck = any(not one.pads and not has for one, has in zip(reports.values(), has_data, strict=True))
    return not failed and not stuck and any(has_data)


@hypothesis.settings(max_examples=300)
@hypothesis.given(windows(), st.randoms())
def test_all_hosts_conclude_the_same_stop_from_reports_in_any_order_and_deliver_nothing_beyond_it(
    window: Any, rng: random.Random
) -> None:
    reports, first, end = window
    order = list(reports)
    rng.shuffle(order)
    upto, stop = stop_of(reports, first, end)
    assert (upto, stop) == stop_of({host: reports[host] for host in order}, first, end)
    assert all(deliverable(reports, step) for step in range(first, upto))
    expected = next((step for step in range(first, end + 1) if not deliverable(reports, step)), None)
    assert (None if stop is None else stop.step) == expected
    if stop is not None:
        assert upto == stop.step
        here = [h for h, one in reports.items() if one.failure is not None and one.final == stop.step]
        assert [failure.host for failure in stop.failures] == here
    else:
        assert upto == end


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=5),
    st.booleans(),
    st.integers(1, 20),
)
def test_hosts_stop_at_the_same_step_whatever_the_length_of_windows(
    hosts: list[tuple[int, bool]], pads: bool, size: int
) -> None:
    """Hosts read up to a step at which each ends or fails; windows of any length give one stop."""
    failures = [step for step, fails in hosts if fails]
    ends = [step for step, fails in hosts if not fails]
    end = (max if pads and not failures else min)(ends, default=None) if not pads or not failures else None
    candidates = failures + ([] if end is None else [end])
    expected = min(candidates)
    first, window_end = 0, window_ends(0, lambda: size)
    for _ in itertools.count():
        bound = next(window_end)
        reports = {}
        for host, (last, fails) in enumerate(hosts):
            if fails or not pads:
                final = last if last < bound else None
            else:
                final = last if last <= bound else None  # known once the host pads
            reports[host] = report(final, failed_on=host if fails and final is not None else None, pads=pads)
        upto, stop = stop_of(reports, first, bound)
        if stop is not None:
            break
        assert upto == bound
        first = bound
    assert upto == stop.step == expected
    assert bool(stop.failures) == (expected in failures)


# ---------------------------------------------------------------------- failures of all hosts


@pytest.mark.parametrize(
    ("reports", "step", "upto", "replaces"),
    [
        ({0: report(None)}, None, 4, True),
        ({0: report(None)}, 6, 6, True),
        ({0: report(None)}, 3, 4, True),
        ({0: report(None)}, 8, 8, False),
        ({0: report(6)}, 6, 6, False),
        ({0: report(6)}, 5, 5, True),
        ({0: report(6)}, None, 4, True),  # rather than the end of the data
        ({0: report(6, failed_on=0)}, 5, 5, True),
        ({0: report(6, failed_on=0)}, None, 6, False),
        ({0: report(4)}, None, 4, True),
    ],
)
def test_a_failure_of_all_hosts_stops_before_the_others_or_not_at_all(
    reports: Any, step: int | None, upto: int, replaces: bool
) -> None:
    failure = Failure("AgreementError", "differ", step=step)
    seen = []

    def reduce(*args: Any) -> Any:
        seen.append(args)
        return {"bad": {"1": 2}}, failure

    reached, stop, contents = conclude(reports, [0], 4, 8, reduce)
    assert reached == upto
    assert contents == {"bad": {"1": 2}}
    assert seen == [(reports, 4, 8)]
    assert (stop == Stop(upto, (failure,))) == replaces
    assert stop is None or stop.step == upto
