"""Reports and announcements as JSON, and the error that other hosts raise at a stop."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import hypothesis.strategies as st

from meshfeed import PeerError, SourceError
from meshfeed._src.agreement.messages import Announcement, Stop, WindowReport
from meshfeed._src.base.errors import Failure

counts = st.integers(0, 1 << 62)
failures = st.builds(Failure, st.text(), st.text(), st.none() | st.integers(0, 9), st.none() | counts)
contents: Any = st.fixed_dictionaries({}, optional={"bytes": counts, "ended": st.dictionaries(st.text(), counts)})


@hypothesis.given(
    st.builds(WindowReport, counts, st.none() | counts, st.none() | failures, st.booleans(), counts, contents)
)
def test_a_report_survives_json(report: WindowReport) -> None:
    assert WindowReport.from_json(json.loads(json.dumps(report.to_json()))) == report


@hypothesis.given(counts, counts, st.none() | st.lists(failures), contents)
def test_an_announcement_survives_json(upto: int, window: int, found: Any, contents: Any) -> None:
    announcement = Announcement(upto, window, None if found is None else Stop(upto, tuple(found)), contents)
    assert Announcement.from_json(json.loads(json.dumps(announcement.to_json()))) == announcement


def test_what_is_left_out_is_nothing_special() -> None:
    assert WindowReport(3).to_json() == [3, None, None, False, 0, {}]
    assert Announcement(3, 8).to_json() == [3, 8, None, {}]


def test_a_failure_of_all_hosts_is_raised_as_it_is() -> None:
    error = Stop(5, [Failure("OSError", "no disk", 0), Failure("SourceError", "too many bad records")]).exception()
    assert type(error) is SourceError
    assert str(error) == "too many bad records"


def test_hosts_that_failed_are_named_rather_than_hosts_that_left() -> None:
    left, one, other = Failure.left("closed its feed", 0), Failure("OSError", "no disk", 1), Failure("E", "x", 2)
    error = Stop(5, [left, one, other]).exception()
    assert isinstance(error, PeerError)
    assert (error.host, error.peer_message) == (1, "OSError: no disk")
    assert str(error) == (
        "hosts 1, 2 failed in the read of step 5: OSError: no disk. All hosts delivered the steps before 5; see the log of "
        "host 1."
    )
    full = Stop(5, [Failure("OSError", "No disk.", 1)]).exception()
    assert "host 1 failed in the read of step 5: OSError: No disk. All" in str(full)


def test_a_host_that_left_is_named() -> None:
    error = Stop(5, [Failure.left("closed its feed at step 4", 3), Failure.left("dropped its feed", 4)]).exception()
    assert isinstance(error, PeerError)
    assert (error.host, error.peer_message) == (3, "closed its feed at step 4")
    assert str(error) == (
        "hosts 3, 4 closed its feed at step 4. This host requests step 5, which needs all hosts: take the same number of "
        "steps on all of them, or see the log of host 3."
    )
