"""When a wait is long enough for the log, and a failure for giving up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from meshfeed._src.base import waits
from meshfeed._src.base.waits import Grace, Reminder, late_seconds


@pytest.mark.parametrize(("timeout", "expected"), [(8, 2.0), (120, 30.0), (300, 30.0)])
def test_a_host_is_late_after_a_quarter_of_the_timeout_and_half_a_minute_at_most(
    timeout: float, expected: float
) -> None:
    assert late_seconds(timeout) == expected


def test_a_reminder_is_due_after_twice_the_time_each_time() -> None:
    reminder = Reminder(10.0)
    assert [waited for waited in range(85) if reminder.due(waited)] == [10, 20, 40, 80]


def test_a_grace_period_begins_anew_if_what_lasts_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    grace = Grace(3.0)

    def is_over(now: float, lasts: bool) -> bool:
        monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now))
        return grace.is_over(lasts)

    times = [(0.0, False), (5.0, True), (8.0, True), (8.1, True), (9.0, False), (9.5, True), (12.0, True), (12.6, True)]
    assert [now for now, lasts in times if is_over(now, lasts)] == [8.1, 12.6]
