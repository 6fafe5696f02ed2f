"""Meetings leave no keys but the results that hosts may still need, however they end, and hosts find these."""

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
from meshfeed import AgreementError, PeerError, StalledError
from meshfeed._src.agreement import meeting
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

    def meet(
        self, participants: Any = HOSTS, hosts: Any = None, seconds: float = 20.0, conclude: Any = None
    ) -> list[Any]:
        """What hosts get, by default all participants."""

        def on_host(host: int) -> Outcome:
            return self.meetings[host].meet(
                participants, host, conclude or (lambda offers: sum(offers.values())), timeout_seconds=seconds
            )

        return self.job.run(participants if hosts is None else hosts, on_host)

    def fail(self, host: int, participants: Any = HOSTS) -> None:
        self.job.on(host, self.meetings[host].fail, participants, meshfeed.PlanError("5 rows on 3 hosts"))

    def fail_last(self, host: int) -> list[Any]:
        """What the others get if a host fails once they are there."""
        others = [other for other in HOSTS if other != host]
        found = list[Any]()
        waiting = threading.Thread(target=lambda: found.extend(self.meet(hosts=others)))
        waiting.start()
        while len(self.keys("/in/")) < len(others):
            time.sleep(0.01)
        self.fail(host)
        waiting.join()
        return found

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
        found = hosts.fail_last(failing)
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


def refuse(offers: Any) -> Any:
    raise AgreementError(f"hosts differ: {offers}")


@pytest.mark.parametrize("failing", [*HOSTS, None])
def test_repeated_failures_leave_the_key_of_the_last(hosts: Hosts, failing: int | None) -> None:
    for number in range(4):
        found = hosts.meet(conclude=refuse) if failing is None else hosts.fail_last(failing)
        assert {type(error) for error in found} == {AgreementError if failing is None else PeerError}
        assert hosts.keys() == [f"meshfeed/follow/feed/x-on-all-{number}/meet/out"]
    assert [outcome.result for outcome in hosts.meet()] == [3, 3, 3]
    assert hosts.keys() == ["meshfeed/follow/feed/x-on-all-4/meet/out"]


def test_hosts_that_leave_as_soon_as_a_failure_is_announced_have_come(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = hosts.store.set

    def put_slowly(key: str, value: str, *, overwrite: bool = False) -> None:
        put(key, value, overwrite=overwrite)
        while key.endswith("/out") and hosts.keys("/in/"):
            time.sleep(0.01)

    monkeypatch.setattr(hosts.store, "set", put_slowly)
    for number in range(3):
        hosts.fail_last(0)
        assert hosts.keys() == [f"meshfeed/follow/feed/x-on-all-{number}/meet/out"]


def test_a_failure_is_kept_until_all_participants_have_come_again(hosts: Hosts) -> None:
    hosts.fail(1)
    assert {type(error) for error in hosts.meet(hosts=[0])} == {PeerError}
    hosts.fail(1)
    assert {type(error) for error in hosts.meet(hosts=[0])} == {PeerError}
    assert len(hosts.keys()) == 2
    for _ in range(2):  # host 2 learns of both
        (error,) = hosts.meet(hosts=[2])
        assert (type(error), error.host) == (PeerError, 1)
    hosts.fail_last(1)
    assert hosts.keys() == ["meshfeed/follow/feed/x-on-all-2/meet/out"]


@pytest.mark.parametrize("failures", [1, 3])
def test_a_host_outside_that_comes_late_begins_at_what_is_kept(hosts: Hosts, failures: int) -> None:
    for _ in range(failures):
        hosts.meet([0, 1], conclude=refuse)
    if failures > 1:
        (error,) = hosts.meet([0, 1], hosts=[2], seconds=1.0)
        assert isinstance(error, AgreementError)
    joined = hosts.meet([0, 1])
    assert hosts.meet([0, 1], hosts=[2], seconds=1.0) == joined[:1]
    assert [outcome.result for outcome in hosts.meet()] == [3, 3, 3]


def test_a_host_outside_that_waits_misses_no_failure_that_is_deleted_at_once(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, first = hosts.store.get, "meshfeed/follow/feed/x-on-hosts-0-1-0/meet/out"
    waits = threading.Event()

    def miss(key: str, seconds: float) -> str | None:
        if key == first and hosts.job.host == 2:  # as between two requests
            waits.set()
            time.sleep(0.01)
            return None
        return get(key, seconds)

    monkeypatch.setattr(hosts.store, "get", miss)
    found = list[Any]()
    waiting = threading.Thread(target=lambda: found.extend(hosts.meet([0, 1], hosts=[2])))
    waiting.start()
    assert waits.wait(20.0)
    hosts.meet([0, 1], conclude=refuse)
    joined = hosts.meet([0, 1])
    waiting.join()
    assert found == joined[:1]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_hosts_that_all_failed_are_not_told_of_one_another_when_they_come_again(
    hosts: Hosts, order: tuple[int, ...]
) -> None:
    for host in order:
        hosts.fail(host)
    assert [outcome.result for outcome in hosts.meet(seconds=2.0)] == [3, 3, 3]
    assert hosts.keys() == ["meshfeed/follow/feed/x-on-all-1/meet/out"]


def test_a_host_alone_meets_nobody_and_each_set_of_hosts_has_a_name(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {outcome.scope for outcome in hosts.meet()} == {"feed/x-on-all-0"}
    (of_two,) = {outcome.scope for outcome in hosts.meet([0, 2])}
    (of_others,) = {outcome.scope for outcome in hosts.meet([0, 1])}
    assert of_two != of_others
    assert of_two.startswith("feed/x-on-hosts-")
    monkeypatch.setattr(coordination, "process_count", lambda: 1)
    alone = Meetings("feed/y").meet([0], {"a": (1,)}, lambda offers: offers, timeout_seconds=1.0)
    assert alone == Outcome("feed/y-on-all-0", {"0": {"a": [1]}})


def test_a_host_that_does_not_come_is_named_with_what_it_is_waited_for(hosts: Hosts) -> None:
    (error,) = hosts.meet([0, 1], hosts=[0], seconds=0.3)
    assert isinstance(error, StalledError)
    assert str(error).startswith("continuing x on hosts 0, 1: ")


def test_hosts_that_came_for_different_participants_are_told_after_a_while(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_GRACE_SECONDS", 0.3)
    found = list[Any]()
    other = threading.Thread(target=lambda: found.extend(hosts.meet(hosts=[1])))
    other.start()
    start = time.monotonic()
    (error,) = hosts.meet([0, 1], hosts=[0])
    assert 0.3 < time.monotonic() - start < 15.0
    other.join()
    for mistaken, mine, theirs in (
        (error, "host 0: hosts 0, 1", "host 1: hosts 0, 1, 2"),
        (found[0], "host 1: hosts 0, 1, 2", "host 0: hosts 0, 1"),
    ):
        assert isinstance(mistaken, AgreementError)
        assert str(mistaken).startswith(
            f"hosts called reshard with shardings over different hosts ({mine}; {theirs}). Find"
        )


def test_a_host_that_comes_again_for_the_right_participants_is_waited_for(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_GRACE_SECONDS", 3.0)
    found = list[Any]()
    waiting = threading.Thread(target=lambda: found.extend(hosts.meet([0, 1], hosts=[0])))
    waiting.start()
    (mistaken,) = hosts.meet([1, 2], hosts=[1], seconds=0.5)
    assert isinstance(mistaken, StalledError)
    (joined,) = hosts.meet([0, 1], hosts=[1])
    waiting.join()
    assert found == [joined]


def test_a_host_that_leaves_after_a_meeting_without_a_result_takes_back_that_it_came(hosts: Hosts) -> None:
    (error,) = hosts.meet(hosts=[0], seconds=0.2)
    assert isinstance(error, StalledError)
    assert hosts.keys("-calls/")
    hosts.job.on(0, hosts.meetings[0].leave)
    assert not hosts.keys("-calls/")
    hosts.job.on(1, hosts.meetings[1].leave)  # which has never come


def test_what_a_host_came_for_before_is_no_reason_not_to_wait_for_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the loss of one more host, the others take their time to find out which are left."""
    monkeypatch.setattr(meeting, "_GRACE_SECONDS", 0.3)
    assert [type(error) for error in hosts.meet(hosts=[0, 1], seconds=0.3)] == [StalledError] * 2
    found = list[Any]()
    waiting = threading.Thread(target=lambda: found.extend(hosts.meet([0, 1], hosts=[0])))
    waiting.start()
    time.sleep(1.5)
    (joined,) = hosts.meet([0, 1], hosts=[1])
    waiting.join()
    assert found == [joined]
    assert not hosts.keys("-calls/")
