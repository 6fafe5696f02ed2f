"""What a host publishes while it reads is what the others find if it is lost: of the right past, and not long before."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hosts import CountingStore, Job

from meshfeed._src.agreement import handover
from meshfeed._src.agreement.handover import HandedOver, Handover, Past
from meshfeed._src.base.settings import BatchSchedule
from meshfeed._src.order.steps import StepSchedule
from meshfeed._src.state.state import FeedState, Ledgers
from meshfeed._src.streams.protocol import Cursor, HostBatch

SCOPE = "feed/x"
NO_LEDGERS = Ledgers()
SIZES = BatchSchedule([[0, 8], [4, 16]])


def state_at(step: int, lanes: dict[str, Any] | None = None, **fields: Any) -> FeedState:
    segments = StepSchedule(SIZES).delivered_json(step)
    return FeedState("lanes", 8 * step, segments, fields.pop("fingerprint", {}), num_lanes=4, lanes=lanes, **fields)


def past_at(step: int, **fields: Any) -> Past:
    return Past.of(state_at(step, **fields), step)


class Host:
    """Host 3 of a job with five, and what it has published."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.now = CountingStore(), 100.0
        self.job = Job(self.store, monkeypatch)
        monkeypatch.setattr(handover.time, "monotonic", lambda: self.now)

    def start(
        self,
        lanes: dict[str, Any],
        step: int = 0,
        skipped: Ledgers = NO_LEDGERS,
        prefetch: int = 0,
        num_hosts: int = 5,
        origin: int = 0,
    ) -> Handover:
        cursor = Cursor(StepSchedule(SIZES), step, 8 * step, skipped=skipped, num_lanes=4)
        return Handover(
            self.store, scope=SCOPE, host=3, num_hosts=num_hosts, cursor=cursor, state=state_at(step, lanes),
            to_json=lambda entries: {lane: [entry, "json"] for lane, entry in entries.items()}, prefetch=prefetch,
            origin=origin,
        )  # fmt: skip

    def publish(self, one: Handover, *batches: HostBatch, later: float = 0.0) -> dict[str, Any]:
        """Publishes a window; returns what was written by it: slot → value."""
        self.now += later
        before = self.published
        self.job.on(3, one.publish, batches)
        return {slot: value for slot, value in self.published.items() if before.get(slot) != value}

    @property
    def published(self) -> dict[str, Any]:
        found = self.store.directory("meshfeed/feed/x/handover")
        return {key.removeprefix("3/"): json.loads(text) for key, text in found.items()}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def batch(step: int, bad: Any = (), **entries: int) -> HostBatch:
    return HostBatch(step, 8, None, 0, entries=entries, bad=bad)


def test_first_are_the_own_lanes_at_the_start_and_then_each_window_what_was_before_it(host: Host) -> None:
    one = host.start({"a": 0, "b": 0, "c": 0})
    assert host.publish(one, batch(0, a=1, b=1), batch(1, a=2, b=2)) == {
        "first": [[0, [], [4, 1], []], {"a": 0, "b": 0}]
    }
    assert host.publish(one, batch(2, a=3, b=3), later=0.49) == {}
    written = host.publish(one, batch(3, a=4, b=4), batch(4, a=6, b=6), later=0.01)
    assert written == {"0": [[3, [[0, 0, 8]], [4, 1], []], {"a": [3, "json"], "b": [3, "json"]}]}
    written = host.publish(one, batch(5, a=8, b=8), later=1.0)
    assert written == {"1": [[5, [[0, 0, 8], [4, 32, 16]], [4, 1], []], {"a": [6, "json"], "b": [6, "json"]}]}


@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_oldest_slot_is_overwritten(host: Host, prefetch: int) -> None:
    one = host.start({"a": 0}, prefetch=prefetch)
    for step in range(12 + prefetch):
        host.publish(one, batch(step, a=step + 1), later=1.0)
    steps = {slot: past[0] for slot, (past, _) in host.published.items()}
    assert sorted(steps) == sorted(["first", *map(str, range(6 + prefetch))])
    assert sorted(steps.values()) == [0, *range(6, 12 + prefetch)]


def test_a_stream_that_ends_at_once_publishes_the_lanes_of_its_start(host: Host) -> None:
    one = host.start({"a": 0, "b": 0})
    assert host.publish(one) == {"first": [[0, [], [4, 1], []], {"a": 0, "b": 0}]}
    assert host.publish(one, later=9.0) == {}


def test_random_access_has_no_lanes_to_publish(host: Host) -> None:
    one = host.start({})
    for step in range(3):
        assert host.publish(one, batch(step), later=1.0) == {}


def test_lanes_that_are_too_large_leave_the_start_to_do(host: Host) -> None:
    one = host.start({"a": "x" * (2 << 20)})
    assert set(host.publish(one, batch(0, a="y" * (1 << 20)))) == {"first"}
    assert host.publish(one, batch(1, a=1), later=100.0) == {}
    (written,) = host.publish(one, batch(2, a=2), later=100.0).values()
    assert written[1] == {"a": [1, "json"]}


@pytest.mark.parametrize(("num_hosts", "size", "pause"), [(5, 10, 0.5), (4000, 10, 4.0), (100, 10**6, 5.0)])
def test_many_hosts_and_large_lanes_are_published_less_often(
    host: Host, num_hosts: int, size: int, pause: float
) -> None:
    one = host.start({"a": "x" * size}, num_hosts=num_hosts)
    host.publish(one, batch(0, a=1))
    assert host.publish(one, batch(1, a=2), later=0.9 * pause) == {}
    assert set(host.publish(one, batch(2, a=3), later=0.2 * pause)) == {"0"}


def test_bad_records_are_published_at_once_with_those_before(host: Host) -> None:
    one = host.start({}, step=2, skipped=Ledgers({"3": [[7, 0, "cut", 1]], "0": [[8, 0, "", 1]]}, {"3": 2}))
    old = [[7, 0, "cut", 1]]
    assert host.publish(one, batch(2)) == {"bad": [[3, [[0, 0, 8]], [4, 1], []], [old, 2, 0]]}
    assert host.publish(one, batch(3)) == {}
    assert host.publish(one, batch(4, bad=[(9, 1, "empty")])) == {
        "bad": [[5, [[0, 0, 8], [4, 32, 16]], [4, 1], []], [[*old, [9, 1, "empty", 4]], 2, 0]]
    }
    assert host.publish(one, batch(5)) == {}


def test_without_bad_records_nothing_is_published_of_them(host: Host) -> None:
    one = host.start({}, skipped=Ledgers({"0": [[8, 0, "", 1]]}))
    assert host.publish(one, batch(0)) == {}


# ---------------------------------------------------------------------- what is found


def test_all_that_was_published_is_found_by_its_past(host: Host) -> None:
    one = host.start({"a": 0})
    host.publish(one, batch(0, a=1, bad=[(9, 0, "empty")]), batch(1, a=2))
    host.publish(one, batch(2, a=3), later=1.0)
    host.publish(one, batch(3, a=4), batch(4, a=5), later=1.0)
    found = HandedOver.read(host.store, {SCOPE: {0}})
    lanes = [{"a": 0}, {"a": [2, "json"]}, {"a": [3, "json"]}]
    for step, number in ((0, 1), (1, 1), (2, 2), (3, 3), (9, 3)):
        known = found.lanes_before(past_at(step))
        assert sorted(map(json.dumps, known)) == sorted(map(json.dumps, lanes[:number])), step
    assert found.ledgers_of(past_at(9)) == [Ledgers({"3": [[9, 0, "empty", 0]]})]
    assert HandedOver.read(host.store, {"feed/y": {0}}).ledgers_of(past_at(9)) == []
    assert len(HandedOver.read(host.store, {SCOPE: {0}, "feed/y": {0}}).lanes_before(past_at(9))) == 3


def test_unlisted_bad_records_are_found_too(host: Host) -> None:
    host.publish(host.start({}, skipped=Ledgers({"3": [[7, 0, "", 0]]}, {"3": 2})), batch(0))
    assert HandedOver.read(host.store, {SCOPE: {0}}).ledgers_of(past_at(1)) == [
        Ledgers({"3": [[7, 0, "", 0]]}, {"3": 2})
    ]


def test_states_are_found_beside_what_was_published() -> None:
    found = HandedOver()
    found.add(state_at(3, {"a": 3}, skipped={"1": [[5, 0, "", 2]]}), 3)
    assert found.lanes_before(past_at(3)) == [{"a": 3}]
    assert found.lanes_before(past_at(2)) == []
    assert found.ledgers_of(past_at(2)) == [Ledgers({"1": [[5, 0, "", 2]]})], "of later steps too"
    found.add(state_at(4), 4)
    assert found.lanes_before(past_at(4)) == [{"a": 3}, {}]


STAGED = {"mixture": {"stages": [[0, 0, {"web": 1}], [2, 16, {"web": 2}]]}}


@pytest.mark.parametrize(
    ("mine", "theirs", "agree"),
    [
        (past_at(6), past_at(6), True),
        (past_at(3), past_at(6), True),  # the batch size has changed after step 3
        (past_at(6), Past(6, [[0, 0, 8]], [4, 1], []), False),
        (past_at(6), Past(4, [[0, 0, 8]], [4, 1], []), True),
        (past_at(6), Past(5, [[0, 0, 8]], [4, 1], []), False),
        (past_at(3), Past(3, [[0, 0, 16]], [4, 1], []), False),
        (past_at(3), Past(3, [[0, 0, 8]], [5, 1], []), False),  # other lanes
        (past_at(3), past_at(3, fingerprint={"cut": 2}), False),
        (past_at(3), past_at(3, fingerprint={"cut": 1}), True),
        (past_at(3, fingerprint=STAGED), past_at(3), False),
        (past_at(2, fingerprint=STAGED), Past(3, [[0, 0, 8]], [4, 1], STAGED["mixture"]["stages"][:1]), True),
        (past_at(3, fingerprint=STAGED), Past(3, [[0, 0, 8]], [4, 1], STAGED["mixture"]["stages"][:1]), False),
    ],
)
def test_pasts_agree_up_to_the_earlier_step(mine: Past, theirs: Past, agree: bool) -> None:
    assert mine.agrees_with(theirs) is agree
    assert theirs.agrees_with(mine) is agree


def test_a_ledger_from_before_a_state_does_not_count(host: Host) -> None:
    host.publish(host.start({}), batch(0, bad=[(9, 0, "empty")]))
    state = Ledgers({"0": [[9, 0, "empty", 0]]})  # another job had this row on host 0
    later = host.start({}, step=1, skipped=state, origin=1)
    assert HandedOver.read(host.store, {SCOPE: {1}}).ledgers_of(past_at(1)) == []  # before its first window too
    host.publish(later, batch(1))
    assert HandedOver.read(host.store, {SCOPE: {1}}).ledgers_of(past_at(2)) == []
    host.publish(later, batch(2, bad=[(11, 0, "empty")]))
    found = HandedOver.read(host.store, {SCOPE: {1, 2}}).ledgers_of(past_at(3))
    assert found == [Ledgers({"3": [[11, 0, "empty", 2]]})]


def test_what_was_published_before_a_new_generation_is_deleted(host: Host) -> None:
    """Lanes that were read ahead may end elsewhere, or later, with weights that were set since."""
    one = host.start({"a": 0})
    for step in range(4):
        host.publish(one, batch(step, a=step + 1, bad=[(step, 0, "empty")]), later=1.0)
    host.publish(host.start({"a": 2}, step=2), batch(2, a=3))
    assert set(host.published) == {"first"}
