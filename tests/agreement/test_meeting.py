"""Meetings leave no keys but the results that hosts may still need, however they end."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hosts import CountingStore, Job

import meshfeed
from meshfeed import PeerError, StalledError
from meshfeed._src.agreement.meeting import Meetings, Outcome
from meshfeed._src.base import coordination

HOSTS = (0, 1, 2)


class Hosts:
    """The meetings of three hosts of a job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = CountingStore()
        self.job = Job(self.store, monkeypatch)
        monkeypatch.setattr(coordination, "process_count", lambda: len(HOSTS))
        self.meetings = [Meetings("feed/x") for _ in HOSTS]

    def meet(self, participants: Any = HOSTS, hosts: Any = None, seconds: float = 20.0) -> list[Any]:
        """What hosts get, by default all participants."""

        def on_host(host: int) -> Outcome:
            return self.meetings[host].meet(
                participants, host, lambda offers: sum(offers.values()), timeout_seconds=seconds
            )

        return self.job.run(participants if hosts is None else hosts, on_host)

    def fail(self, host: int, participants: Any = HOSTS) -> None:
        self.job.on(host, self.meetings[host].fail, participants, meshfeed.PlanError("5 rows on 3 hosts"))

    def keys(self, part: str = "") -> list[str]:
        return [key for key in self.store.keys if part in key]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch)


@pytest.mark.parametrize("failing", HOSTS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_leaves_no_offer_whoever_fails_and_whenever(hosts: Hosts, failing: int, when: str) -> None:
    others = [host for host in HOSTS if host != failing]
    if when == "before":
        hosts.fail(failing)
        found = hosts.meet(hosts=others)
    else:
        waiting = threading.Thread(target=lambda: found.extend(hosts.meet(hosts=others)))
        found = list[Any]()
        waiting.start()
        while len(hosts.keys("/in/")) < len(others):
            time.sleep(0.01)
        hosts.fail(failing)
        waiting.join()
    assert [(type(error), error.host) for error in found] == [(PeerError, failing)] * 2
    assert hosts.keys("/in/") == []
    assert len(hosts.keys()) == 1, "hosts that come later must see that the meeting has failed"
    assert [outcome.result for outcome in hosts.meet()] == [3, 3, 3]
    assert hosts.keys() == ["meshfeed/follow/feed/x-on-all-1/meet/out"]


def test_a_host_that_comes_after_a_failure_leaves_no_offer(hosts: Hosts) -> None:
    hosts.fail(1)
    for host in (0, 2):
        (error,) = hosts.meet(hosts=[host])
        assert (type(error), error.host) == (PeerError, 1)
        assert hosts.keys("/in/") == []
    hosts.fail(0)
    hosts.fail(1)  # the others have learned of that of host 0
    assert hosts.keys("/in/") == []


def test_hosts_that_were_not_joined_leave_nothing_after_the_next_meeting(hosts: Hosts) -> None:
    for _ in range(3):
        assert {type(error) for error in hosts.meet(hosts=[0, 1], seconds=0.3)} == {StalledError}
    assert hosts.keys("/in/") == []
    assert [outcome.result for outcome in hosts.meet()] == [3, 3, 3]
    assert hosts.keys() == ["meshfeed/follow/feed/x-on-all-3/meet/out"]


def test_without_a_reducer_a_host_leaves_one_note_until_it_comes_to_another_meeting(hosts: Hosts) -> None:
    for _ in range(3):
        (error,) = hosts.meet(hosts=[1], seconds=0.3)
        assert (type(error), error.hosts) == (StalledError, (0,))
    hosts.fail(2)
    assert [key.rpartition("/")[2] for key in hosts.keys("/in/")] == ["1", "2"]
    assert [outcome.result for outcome in hosts.meet([1, 2])] == [3, 3]
    assert hosts.keys() == ["meshfeed/follow/feed/x-on-hosts-1-2-0/meet/out"]


def test_a_failure_of_an_earlier_meeting_is_told_to_the_host_that_comes_late(hosts: Hosts) -> None:
    hosts.fail(2)
    assert len(hosts.keys("/in/")) == 1
    (error,) = hosts.meet(hosts=[0])
    assert isinstance(error, PeerError)
    assert "host 2 cannot continue on this sharding: PlanError: 5 rows on 3 hosts" in str(error)
