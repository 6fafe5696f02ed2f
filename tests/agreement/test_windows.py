"""The agreement between hosts: its rules, its requests, and what is said of hosts that are late or leave."""

from __future__ import annotations

import collections
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "chaos"))

from memory_store import MemoryStore
from small_pipeline import new_window_reports, numbers_pipeline

from meshfeed import PeerError, SkipBad, SourceError, StalledError
from meshfeed._src.agreement.handshake import Handshake
from meshfeed._src.agreement.window_report import (
    BadRecords,
    Part,
    Stop,
    Verdict,
    WindowReports,
    closed_error,
    closed_message,
    decide,
    full_window,
    overrule,
    window_ends,
)
from meshfeed._src.agreement.windows import Lateness, WindowAgreement
from meshfeed._src.base import coordination
from meshfeed._src.base.stats import Dropping
from meshfeed._src.feed.pipeline import Pipeline
from meshfeed._src.streams.protocol import HostBatch

STEP_SECONDS = 0.02


class CountingStore(MemoryStore):
    """Counts requests by kind, and remembers how long gets were to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()
        self.seconds: list[float] = []

    def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
        self.calls["set"] += 1
        super().set(key, value, overwrite=overwrite)

    def get(self, key: str, seconds: float) -> str | None:
        self.calls["get"] += 1
        self.seconds.append(seconds)
        return super().get(key, seconds)

    def try_get(self, key: str) -> str | None:
        self.calls["try_get"] += 1
        return super().try_get(key)

    def directory(self, prefix: str) -> dict[str, str]:
        self.calls["directory"] += 1
        return super().directory(prefix)


def agreement(store: Any, host: int, hosts: int, **options: Any) -> WindowAgreement:
    settings: dict[str, Any] = {"first_step": 0, "pad": False, "byte_limit": 1 << 30, "timeout_seconds": 30}
    return WindowAgreement(
        store, scope="test", participants=range(hosts), host=host, describe=lambda: "reading", **{**settings, **options}
    )


# ---------------------------------------------------------------------- requests


@pytest.mark.parametrize("hosts", [2, 8, 256, 319, 320, 1000, 1024, 4096, 16384])
def test_two_requests_a_host_and_window_leave_room_below_5000_a_second(hosts: int) -> None:
    assert 2 * hosts / (full_window(hosts, 1, 1 << 30) * STEP_SECONDS) <= 4100


def test_windows_leave_room_in_memory_for_two_of_them() -> None:
    assert full_window(4096, 1 << 23, 1 << 30) == 64
    assert full_window(4, 1 << 30, 1 << 30) == 1


def test_the_first_windows_are_short() -> None:
    ends = window_ends(10, lambda: 103)
    assert [next(ends) for _ in range(6)] == [11, 36, 86, 186, 289, 392]
    ends = window_ends(0, lambda: 8)
    assert [next(ends) for _ in range(5)] == [1, 3, 7, 15, 23]


def test_a_healthy_host_makes_two_requests_a_window() -> None:
    reducer_store, store = CountingStore(), CountingStore()
    store._values, store._changed = reducer_store._values, reducer_store._changed
    hosts = [agreement(reducer_store, 0, 3), agreement(store, 1, 3), agreement(store, 2, 3)]
    step = 0
    for window in range(12):
        (end,) = {host.window_end for host in hosts}
        for host in hosts:
            host.publish(Part(end, info={"bytes": 1}))
        while MemoryStore.try_get(reducer_store, f"meshfeed/test/a/{window}") is None:
            time.sleep(0.001)
        for host in hosts:
            assert host.wait_for(step) is None
        step = end
    for host in hosts:
        host.close()
    assert {name: count for name, count in store.calls.items() if count} == {"set": 2 * 12, "get": 2 * 12}


class Raced(WindowAgreement):
    """The host's other thread sees each announcement just before the one that has begun to wait for it."""

    def _wait_for_announcement(self, *args: Any) -> None:
        super()._wait_for_announcement(*args)
        super()._wait_for_announcement(*args)


@pytest.mark.parametrize("reader", [True, False])
def test_an_announcement_that_the_other_thread_has_just_seen_is_not_waited_for(reader: bool) -> None:
    store, first = MemoryStore(), 3
    settings: dict[str, Any] = {"scope": "test", "participants": range(2), "first_step": first, "pad": False}
    settings |= {"byte_limit": 1 << 30, "timeout_seconds": 1, "describe": lambda: "reading"}
    hosts = [WindowAgreement(store, host=0, **settings), Raced(store, host=1, **settings)]
    try:
        for host in hosts:
            assert host.window_end == first + 1
            host.publish(Part(first + 1))
        if reader:
            assert hosts[1].window_end > first + 1
        else:
            assert hosts[1].wait_for(first) is None
    finally:
        for host in hosts:
            host.close()


@pytest.mark.parametrize(("hosts", "seconds"), [(2, 0.5), (1024, 0.512), (4096, 2.0), (16384, 2.0)])
def test_thousands_of_hosts_ask_again_less_often(hosts: int, seconds: float) -> None:
    store = CountingStore()
    store.set("key", "value")
    assert coordination.wait_for_key(store, "key", time.monotonic() + 60, num_waiting=hosts) == "value"  # type: ignore[arg-type]
    assert store.seconds == [pytest.approx(seconds, abs=0.01)]


# ---------------------------------------------------------------------- who is late


def wait_a_little(store: MemoryStore, prefix: str, hosts: range, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_FIRST_NOTE_SECONDS", 0.0)
    coordination.wait_for_hosts(store, prefix, hosts, time.monotonic() + 0.01, note=note)  # type: ignore[arg-type]


def test_who_is_late_costs_each_host_a_few_requests_however_many_hosts_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = CountingStore()
    hosts = range(4096)
    store._values.update({f"run/w/3/{host}": "{}" for host in hosts if host not in (7, 9)})
    wait_a_little(store, "run/w/3", hosts, "run/late/3", monkeypatch)
    store.set("run/w/3/9", "{}")  # has come since
    slow = Lateness(store, "run", hosts, 7, lambda: "reading slow.parquet")  # type: ignore[arg-type]
    slow.say()
    store.calls.clear()
    late, text = Lateness(store, "run", hosts, 5, lambda: "").who(3)  # type: ignore[arg-type]
    assert late == (7,)
    assert text == "host 7 has not read it yet (host 7 is reading slow.parquet)"
    assert store.calls.total() <= 5
    assert store.calls["directory"] == 0
    assert slow.who(3)[1] == text


def test_many_late_hosts_are_counted_and_some_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store._values.update({f"run/w/0/{host}": "{}" for host in range(0, 100, 2)})
    wait_a_little(store, "run/w/0", range(100), "run/late/0", monkeypatch)
    late, text = Lateness(store, "run", range(100), 2, lambda: "").who(0)  # type: ignore[arg-type]
    assert late == (1, 3, 5, 7, 9, 11, 13, 15)
    assert text == "hosts 1, 3, 5, 7, 9, 11, 13, 15 and 42 more have not read it yet"


def test_a_note_is_taken_away_once_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setattr(coordination, "_FIRST_NOTE_SECONDS", 0.0)

    def come(values: Any) -> bool:
        store._values.setdefault("run/in/1", "{}")
        return False

    store.set("run/in/0", "{}")
    coordination.wait_for_hosts(store, "run/in", range(2), time.monotonic() + 60, come, note="run/late")  # type: ignore[arg-type]
    assert sorted(store._values) == ["run/in/0", "run/in/1"]


def test_a_reducer_that_says_nothing_is_named_itself() -> None:
    store = MemoryStore()
    view = Lateness(store, "run", (2, 3, 5), 3, lambda: "")  # type: ignore[arg-type]
    assert view.who(0) == ((2,), "host 2 has not read it yet")
    store.set("run/w/0/2", "{}")
    assert view.who(0) == ((), "host 2, which announces, is silent")


@pytest.mark.parametrize("here", [0, 1])
@pytest.mark.parametrize("rounds", [True, False])
def test_hosts_that_do_not_come_to_an_exchange_are_named(
    here: int, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CountingStore()
    monkeypatch.setattr(coordination, "_FIRST_NOTE_SECONDS", 0.0)
    monkeypatch.setattr(coordination, "key_value_store", lambda: store)
    monkeypatch.setattr(coordination, "process_index", lambda: here)
    prefix = "meshfeed/feed/train/settings/0" if rounds else "meshfeed/restore/0"
    store.set(f"{prefix}/in/{1 - here}", "{}")
    if here == 1:
        wait_a_little(store, f"{prefix}/in", range(4), f"{prefix}/late", monkeypatch)
    store.calls.clear()

    def exchange() -> None:
        if rounds:
            Handshake("feed/train", range(4)).agree({"seed": 0}, 0.05)
        else:
            options: dict[str, Any] = {"timeout_seconds": 0.05, "doing": "choosing a step"}
            coordination.reduce_json("restore", 0, {}, lambda values: None, participants=range(4), **options)

    with pytest.raises(
        StalledError, match=r"hosts 2, 3 did not arrive within 0 s \(host . of 4 is waiting\)"
    ) as caught:
        exchange()
    assert caught.value.hosts == (2, 3)
    assert ("choosing a step" if not rounds else "agreeing on the settings of train") in str(caught.value)
    assert "Look at that host's log: it has stopped, is still starting, or runs other code than the rest" in str(
        caught.value
    )
    assert here == 0 or store.calls["directory"] == 0


# ---------------------------------------------------------------------- leaving


def pipeline(
    store: Any, host: int, hosts: int, prefetch: int = 2, window_reports: WindowReports | None = None
) -> Pipeline:
    window_reports = window_reports or new_window_reports()
    held_back = agreement(store, host, hosts, judge=window_reports.judge)
    return numbers_pipeline(held_back, window_reports, host=host, prefetch=prefetch)


def take(one: Pipeline, steps: int) -> None:
    for _ in range(steps):
        one.pop(one.peek())


def test_a_report_that_cannot_be_made_is_told_to_the_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(window: Any) -> Any:
        raise MemoryError("for the digests")

    store = MemoryStore()
    pipelines = []
    for host in range(3):
        reports = new_window_reports()
        if host == 1:
            monkeypatch.setattr(reports, "part_info", no_memory)
        pipelines.append(pipeline(store, host, 3, 2, reports))
    try:
        for one in pipelines:
            with pytest.raises(
                SourceError, match=r"host 1 failed while it prepared its batches: MemoryError: for the digests"
            ):
                take(one, 100)
    finally:
        for one in pipelines:
            one.close()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_host_that_closes_early_is_named_on_those_that_go_on(
    leaver: int, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "meshfeed._src.agreement.windows._ERROR_GRACE_SECONDS", 0.5
    )  # here hosts wait for one another in one thread
    store = MemoryStore()
    pipelines = [pipeline(store, host, 3, prefetch) for host in range(3)]
    for step in range(5):
        for one in pipelines:
            ready = one.peek()
            assert ready.batch.step == step
            one.pop(ready)
    pipelines[leaver].close("closed its feed", ValueError("the loss is nan"))
    steps = set()
    for host, one in enumerate(pipelines):
        if host != leaver:
            with pytest.raises(PeerError) as caught:
                take(one, 100)
            steps.add(one._delivered)
            assert caught.value.host == leaver
            assert caught.value.peer_message == "closed its feed at step 5 after ValueError: the loss is nan"
            assert str(caught.value) == (
                f"host {leaver} closed its feed at step 5 after ValueError: the loss is nan. This host asks for step "
                f"{one._delivered}, which needs all hosts: let all of them take the same number of steps, or see the log of "
                f"host {leaver}."
            )
            with pytest.raises(PeerError):
                one.peek()
    assert len(steps) == 1
    for one in pipelines:
        one.close()


def test_hosts_that_close_at_the_same_step_hear_nothing_of_it() -> None:
    store = MemoryStore()
    pipelines = [pipeline(store, host, 3) for host in range(3)]
    for host, one in enumerate(pipelines):  # one after the other, so that those before have left already
        for step in range(5):
            ready = one.peek()
            assert ready.batch.step == step
            one.pop(ready)
            if host == 0 and step == 0:  # announcements need all hosts' parts
                [other.peek() for other in pipelines]
        one.close("closed its feed")


def test_a_host_that_leaves_after_the_end_says_nothing() -> None:
    store = MemoryStore()
    hosts = [agreement(store, host, 2) for host in range(2)]
    for host in hosts:
        host.publish(Part(0, final=0))
    assert hosts[0].wait_for(0) == Stop(0, {})
    for host in hosts:
        host.close("closed its feed at step 0")
    assert hosts[1].wait_for(0) == Stop(0, {})
    assert sorted(store._values) == ["meshfeed/test/a/0", "meshfeed/test/w/0/0", "meshfeed/test/w/0/1"]


def test_a_read_that_failed_is_named_rather_than_a_host_that_closed() -> None:
    parts = {0: Part(8), 1: Part(5, 5, "OSError: no disk"), 2: Part(4, 4, closed_error("closed its feed at step 2"))}
    upto, stop = decide({0: parts[0], 1: parts[1]}, (0, 1), 4, 8)
    assert (upto, stop) == (5, Stop(5, {1: "OSError: no disk"}))
    upto, stop = decide(parts, (0, 1, 2), 4, 8)
    assert stop is not None
    assert closed_message(stop.errors[2]) == "closed its feed at step 2"


# ---------------------------------------------------------------------- verdicts and bad records


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({0: (5, True), 1: (7, True)}, 7),  # each host pads until the last one has ended
        ({0: (5, True), 1: (None, True)}, None),
        ({0: (5, True), 1: (None, False)}, None),  # a host that does not pad still has data
        ({0: (5, True), 1: (6, False)}, 6),
        ({0: (7, True), 1: (6, False)}, 6),
        ({0: (5, False), 1: (7, False)}, 5),
    ],
)
def test_the_end_is_where_the_first_host_cannot_go_on_or_the_last_one_has_ended(
    ends: Any, expected: int | None
) -> None:
    parts = {host: Part(8, final, pads=pads) for host, (final, pads) in ends.items()}
    upto, stop = decide(parts, (0, 1), 4, 8)
    assert (upto, stop) == ((8, None) if expected is None else (expected, Stop(expected, {})))


def test_a_verdict_stops_before_the_end_of_the_data_or_not_at_all() -> None:
    assert overrule(16, None, None, 8) == (16, None)
    assert overrule(16, None, Verdict("v", 10), 8) == (10, Stop(10, {-1: "v"}))
    assert overrule(12, Stop(12, {}), Verdict("v", 12), 8) == (12, Stop(12, {}))
    assert overrule(12, Stop(12, {1: "e"}), Verdict("v", 11), 8) == (11, Stop(11, {-1: "v"}))
    assert overrule(8, Stop(8, {}), Verdict("v"), 8) == (8, Stop(8, {-1: "v"}))
    assert overrule(9, Stop(9, {1: "e"}), Verdict("v"), 8) == (9, Stop(9, {1: "e"}))


def batches_of(bad_rows: dict[int, set[int]], rows: set[int], steps: range, batch: int) -> list[HostBatch]:
    return [
        HostBatch(step, batch, None, 0, bad=[(step * batch + row, 0, "bad") for row in sorted(bad_rows[step] & rows)])
        for step in steps
    ]


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
    verdicts = [
        alone.judge_alone(one, {}) for one in batches_of(bad_rows, set(range(batch)), range(resumed, steps), batch)
    ]
    assert next((resumed + i for i, verdict in enumerate(verdicts) if verdict), None) == expected

    # several hosts, which may hold the same rows, in windows of any length
    count = data.draw(st.integers(1, 4))
    held = [set(range(batch))] + [set(np.flatnonzero(rng.random(batch) < 0.6).tolist()) for _ in range(count - 1)]
    sides = [BadRecords(SkipBad(limit), before, after) for _ in range(count)]
    first, found, counted = resumed, None, {}
    while first < steps and found is None:
        end = min(steps, first + data.draw(st.integers(1, 9)))
        parts = {
            host: Part(
                end, info=json.loads(json.dumps(side.part(batches_of(bad_rows, rows, range(first, end), batch), {})))
            )
            for host, (side, rows) in enumerate(zip(sides, held, strict=True))
        }
        info, verdict = sides[0].judge(parts, first, end, {})
        for side in sides:
            side.learn(json.loads(json.dumps(info)))
        for step in range(first, end if verdict is None or verdict.step is None else verdict.step):
            counted[step] = {side.up_to(step) for side in sides}
        found = None if verdict is None else verdict.step
        first = end
    assert found == expected
    for step, counts in counted.items():
        assert counts == {sum(len(bad_rows[s]) for s in range(step + 1))}


def test_the_error_for_too_many_bad_records_says_which_step_and_what_to_do() -> None:
    side = BadRecords(SkipBad(0.25), 0, lambda step, ended: (step + 1) * 4)
    batches = [HostBatch(0, 4, None, 0, bad=[(3, 0, "CorruptDataError: cut short"), (9, 0, "ValueError: no JPEG")])]
    verdict = side.judge({1: Part(1, info=side.part(batches, {}))}, 0, 1, {})[1]
    assert verdict is not None
    assert str(WindowReports.verdict_error(verdict.message)) == (
        "2 of the 4 records up to step 0 are bad, 0.5 of them, and bad_records=SkipBad(max_fraction=0.25) allows 0.25 "
        "(last: host 1, record 9: ValueError: no JPEG). Look at the data; raise max_fraction only if so many bad records "
        "are expected."
    )


def test_a_window_in_which_everything_is_bad_is_published_in_short() -> None:
    side = BadRecords(SkipBad(0.01), 0, lambda step, ended: (step + 1) * 1000)
    batches = [HostBatch(step, 1000, None, 0, bad=[(i, 0, "bad") for i in range(1000)]) for step in range(50)]
    assert list(side.part(batches, {})["bad"]) == ["0"]


# ---------------------------------------------------------------------- padding of host batches


def test_the_ledger_of_padded_rows_does_not_grow() -> None:
    window_reports = new_window_reports(compare_sizes=True)
    for first in range(0, 1000, 10):
        parts = {
            host: Part(
                first + 10, info={"ended": {str((step + 1) << 32 | row): 2 for step in range(first, first + 10)}}
            )
            for host, row in ((0, 0), (1, 0), (2, 6))  # hosts 0 and 1 hold the same rows
        }
        info, verdict = window_reports.judge(parts, first, first + 10)
        assert verdict is None
        window_reports.learn(info)
        for step in range(first, first + 10):
            ended, _ = window_reports.known_at(step)
            assert sum(missing for key, missing in ended.items() if key >> 32 == step + 1) == 4
            assert len(ended) <= 10


def test_what_the_last_host_said_at_the_very_end_of_the_wait_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    agreement = WindowAgreement(  # of a host that is not the reducer
        store,  # type: ignore[arg-type]
        scope="run",
        participants=(0, 1),
        host=1,
        first_step=0,
        pad=False,
        byte_limit=1 << 30,
        timeout_seconds=0.05,
        describe=lambda: "",
    )
    key = "meshfeed/run"
    store.set(f"{key}/w/0/0", "{}")
    announcement = {"upto": 0, "stop": {"0": "it left"}, "window": 1, "info": {}}
    real = coordination.wait_for_key

    def times_out(*args: Any, **kwargs: Any) -> None:
        assert real(*args, **kwargs) is None
        store.set(f"{key}/a/0", json.dumps(announcement))

    monkeypatch.setattr(coordination, "wait_for_key", times_out)
    stop = agreement.wait_for(0)
    assert stop is not None
    assert stop.errors == {0: "it left"}


# ---------------------------------------------------------------------- hosts that drop records


class Resuming(MemoryStore):
    """One host is late, and each look at it finds more records dropped, ``looks`` times; then ``arrive`` is called."""

    def __init__(self, host: int, looks: int) -> None:
        super().__init__()
        self.key, self.looks, self.seen = f"meshfeed/resuming/{host}", looks, 0
        self.arrive: Callable[[], None] | None = None

    def try_get(self, key: str) -> str | None:
        if key != self.key:
            return super().try_get(key)
        self.seen += 1
        if self.seen == self.looks and self.arrive is not None:
            self.arrive()
        return f"resuming lane 3: dropped {min(self.seen, self.looks)} of 400,000 records"


def wait_for_late_host(store: Any, waiting: str, here: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """What host ``here`` of 2 waits for with a time-out of 0.05 s; ``store.arrive`` makes the other one come."""
    monkeypatch.setattr(coordination, "key_value_store", lambda: store)
    monkeypatch.setattr(coordination, "process_index", lambda: here)
    window = {"upto": 1, "stop": None, "window": 1, "info": {}}
    prefix, part, result = {
        "settings": ("feed/train/settings/0", {"settings": {"seed": 0}, "refused": False}, {"differences": []}),
        "exchange": ("restore/0", {}, None),
        "window": ("test", {}, window),
    }[waiting]
    part_key, result_key = (f"w/0/{1 - here}", "a/0") if waiting == "window" else (f"in/{1 - here}", "out")

    def arrive() -> None:
        if here == 0 and waiting != "window":
            store.set(f"meshfeed/{prefix}/{part_key}", json.dumps(part))
        else:
            store.set(f"meshfeed/{prefix}/{result_key}", json.dumps(result))

    store.arrive = arrive
    if waiting == "settings":
        return lambda: Handshake("feed/train", range(2)).agree({"seed": 0}, 0.05)
    if waiting == "window":
        return lambda: agreement(store, here, 2, timeout_seconds=0.05).wait_for(0)
    options: dict[str, Any] = {"participants": range(2), "timeout_seconds": 0.05, "doing": "restoring"}
    return lambda: coordination.reduce_json("restore", 0, {}, lambda values: None, **options)


WAITS = [("settings", 0), ("settings", 1), ("exchange", 0), ("exchange", 1), ("window", 1)]


@pytest.mark.parametrize(("waiting", "here"), WAITS)
def test_a_host_that_drops_records_for_longer_than_the_time_out_is_waited_for(
    waiting: str, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Resuming(1 - here, looks=5)
    wait_for_late_host(store, waiting, here, monkeypatch)()
    assert store.seen == 5


@pytest.mark.parametrize(("waiting", "here"), WAITS)
def test_a_host_that_no_longer_drops_records_is_a_stall(
    waiting: str, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Resuming(1 - here, looks=3)
    wait = wait_for_late_host(store, waiting, here, monkeypatch)
    store.arrive = None
    if waiting == "window":  # this is what a host publishes of any work in a window
        store.set(f"meshfeed/test/doing/{1 - here}", "step 0: resuming lane 3: dropped 3 of 400,000 records")
    with pytest.raises(
        StalledError, match=rf"host {1 - here} .*resuming lane 3: dropped 3 of 400,000 records"
    ) as caught:
        wait()
    assert caught.value.hosts == (1 - here,)
    assert store.seen == 4


@pytest.mark.parametrize(("waiting", "here"), [("settings", 0), ("settings", 1), ("exchange", 0), ("exchange", 1)])
def test_nobody_looks_for_hosts_that_drop_records_before_the_time_out(
    waiting: str, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Resuming(1 - here, looks=5)
    wait = wait_for_late_host(store, waiting, here, monkeypatch)
    assert store.arrive is not None
    store.arrive()
    wait()
    assert store.seen == 0


def test_progress_is_published_where_there_is_some_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    monkeypatch.setattr(coordination, "process_index", lambda: 1)
    report = coordination.ProgressReport(store, timeout_seconds=1e-9)  # type: ignore[arg-type]
    report.update()
    report.end()
    assert not store.calls
    with Dropping("lane 3", 400_000) as dropping:
        for count in (0, 120_000, 0):
            dropping.add(count)
            report.update()
        assert store.directory("meshfeed/resuming") == {"1": "resuming lane 3: dropped 120,000 of 400,000 records"}
        assert store.calls["set"] == 2
        seldom = coordination.ProgressReport(store, timeout_seconds=300)  # type: ignore[arg-type]
        for _ in range(10):
            dropping.add()
            seldom.update()
        assert store.calls["set"] == 3
    report.update()
    report.end()
    assert not store.directory("meshfeed/resuming")
