"""Windows end to end on simulated hosts: requests, announcements, late hosts, hosts that leave, and keys that stay."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hosts import CountingStore, Job, make_agreement, reduce_nothing
from small_pipeline import new_window_reports, numbers_pipeline

from meshfeed import PeerError, SourceError, StalledError
from meshfeed._src.agreement import windows
from meshfeed._src.agreement.messages import Announcement, Stop, WindowReport, aside_key
from meshfeed._src.agreement.window_report import WindowReports
from meshfeed._src.agreement.windows import WindowAgreement
from meshfeed._src.base import coordination, reduction
from meshfeed._src.base.errors import Failure
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.reduction import Reduction
from meshfeed._src.feed.pipeline import Pipeline

RUN = "meshfeed/test"


def announce(store: Any, window: int, announcement: Announcement) -> None:
    """What host 0 announces, written by hand."""
    Reduction(store, f"{RUN}/{window}", [0], 0).announce(announcement.to_json())


def report_by_hand(store: Any, window: int, host: int, report: WindowReport) -> None:
    Reduction(store, f"{RUN}/{window}", [host], host).publish(report.to_json())


def announcement_of(store: Any, window: int, seconds: float = 20) -> Announcement:
    found = Reduction(store, f"{RUN}/{window}", [0, 1], 1).wait(time.monotonic() + seconds)
    assert found is not None
    return Announcement.from_json(found["result"])


# ---------------------------------------------------------------------- healthy hosts


def test_a_healthy_host_makes_two_requests_a_window() -> None:
    reducer_store = CountingStore()
    store = CountingStore(reducer_store)
    hosts = [make_agreement(reducer_store, 0, 3), make_agreement(store, 1, 3), make_agreement(store, 2, 3)]
    step = 0
    for window in range(12):
        (end,) = {host.window_end for host in hosts}
        for host in hosts:
            host.publish(WindowReport(end, contents={"bytes": 1}))
        announcement_of(CountingStore(reducer_store), window)
        for host in hosts:
            assert host.wait_for(step) is None
        step = end
    for host in hosts:
        host.close()
    assert {name: count for name, count in store.calls.items() if count} == {"set": 2 * 12, "get": 2 * 12}
    assert reducer_store.calls["delete"] <= 12
    assert not [key for key in reducer_store.keys if int(key.split("/")[2]) < 10], "windows that all have seen are gone"


def test_only_the_wait_for_other_hosts_counts_as_peer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(CountingStore):
        def get(self, key: str, seconds: float) -> str | None:
            waiting.set()
            return super().get(key, seconds)

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock, waiting, shared = Clock(), threading.Event(), CountingStore()
    monkeypatch.setattr(windows, "time", clock)
    late, early = make_agreement(shared, 0, 2), make_agreement(Store(shared), 1, 2)
    early.publish(WindowReport(early.window_end, contents={"bytes": 1}))
    thread = threading.Thread(target=early.wait_for, args=(0,))
    thread.start()
    assert waiting.wait(20)
    clock.now = 100.0
    late.publish(WindowReport(late.window_end, contents={"bytes": 1}))
    assert late.wait_for(0) is None
    thread.join(20)
    assert (early.peer_wait_seconds, late.peer_wait_seconds) == (100.0, 0.0)
    for host in (early, late):
        host.close()


def test_windows_grow_from_one_step_to_what_the_largest_batch_allows() -> None:
    store = CountingStore()
    hosts = [make_agreement(store, host, 2, first_step=5, byte_limit=2 * 4 * 100) for host in range(2)]
    assert [host.read_ahead for host in hosts] == [3, 3]
    ends = []
    step = 5
    for _ in range(4):
        ends.append(hosts[1].window_end)
        assert hosts[1].window_end == ends[-1], "unchanged until the report is published"
        for host, one in enumerate(hosts):
            one.publish(WindowReport(one.window_end, contents={"bytes": 100 if host else 1}))
        for one in hosts:
            assert one.wait_for(step) is None
        step = ends[-1]
    assert ends == [6, 7, 9, 13]
    assert [host.read_ahead for host in hosts] == [9, 9]
    for host in hosts:
        host.close()


def test_reports_carry_what_the_reducer_needs_to_know_of_the_host() -> None:
    store = CountingStore()
    one = make_agreement(store, 1, 2, pad=True)
    announce(store, 0, Announcement(1, 8))
    one.publish(WindowReport(1, contents={"bytes": 3}))
    assert one.wait_for(0) is None
    one.publish(WindowReport(3, 2))
    found = [Reduction(store, f"{RUN}/{window}", [1], 1).value_of_reducer() for window in range(2)]
    assert list(map(WindowReport.from_json, found)) == [
        WindowReport(1, None, None, True, 0, {"bytes": 3}),
        WindowReport(3, 2, None, True, 1, {}),
    ]


@pytest.mark.parametrize(
    ("report", "pad", "last"),
    [
        (WindowReport(1), False, False),
        (WindowReport(1, 1), False, True),
        (WindowReport(1, 1), True, False),
        (WindowReport(1, 1, Failure("E", "x", 1)), True, True),
    ],
)
def test_after_its_last_report_a_host_leaves_without_a_notice(report: WindowReport, pad: bool, last: bool) -> None:
    store = CountingStore()
    one = make_agreement(store, 1, 2, pad=pad)
    assert one.window_end == 1
    one.publish(report)
    one.close("closed its feed")
    assert store.keys == [f"{RUN}/0/in/1"] + ([] if last else [f"{RUN}/1/in/1"])


def test_contents_of_announcements_are_kept_until_they_are_taken() -> None:
    store = CountingStore()
    one = make_agreement(store, 1, 2)
    for window, contents in enumerate([{"bad": {"0": 1}}, {"bad": {"1": 2}}]):
        announce(store, window, Announcement(window + 1, 1, None, contents))  # type: ignore[arg-type]
        assert one.wait_for(window) is None
    assert one.contents() == [{"bad": {"0": 1}}, {"bad": {"1": 2}}]
    one.forget_contents(1)
    assert one.contents() == [{"bad": {"1": 2}}]


def test_a_stop_holds_from_its_step_on() -> None:
    store = CountingStore()
    one = make_agreement(store, 1, 2)
    announce(store, 0, Announcement(3, 8, Stop(3)))
    assert [one.wait_for(step) for step in range(5)] == [None, None, None, Stop(3), Stop(3)]


class Raced(WindowAgreement):
    """The host's other thread sees each announcement just before the one that has begun to wait for it."""

    def _wait_for_announcement(self, *args: Any) -> None:
        super()._wait_for_announcement(*args)
        super()._wait_for_announcement(*args)


@pytest.mark.parametrize("reader", [True, False])
def test_an_announcement_that_the_other_thread_has_just_seen_is_not_waited_for(reader: bool) -> None:
    store, first = CountingStore(), 3
    settings: dict[str, Any] = {"scope": "test", "participants": range(2), "first_step": first, "pad": False}
    settings |= {"byte_limit": 1 << 30, "timeout_seconds": 1, "describe": lambda: "reading", "reduce": reduce_nothing}
    hosts = [WindowAgreement(store, host=0, **settings), Raced(store, host=1, **settings)]
    try:
        for host in hosts:
            assert host.window_end == first + 1
            host.publish(WindowReport(first + 1))
        if reader:
            assert hosts[1].window_end > first + 1
        else:
            assert hosts[1].wait_for(first) is None
    finally:
        for host in hosts:
            host.close()


# ---------------------------------------------------------------------- the reducer


def test_the_reducer_announces_what_all_can_deliver_and_hands_on_contents() -> None:
    store, seen = CountingStore(), []

    def reduce(reports: Any, first: int, end: int) -> Any:
        seen.append((sorted(reports), first, end))
        return {"bad": {str(first): 1}}, None if first < 3 else Failure("SourceError", "too many", step=4)

    reducer = make_agreement(store, 0, 2, first_step=2, reduce=reduce, byte_limit=2 * 4 * 9)
    for window, end in enumerate([3, 4, 6]):
        report_by_hand(store, window, 1, WindowReport(end, contents={"bytes": 9}))
        reducer.publish(WindowReport(end))
    assert announcement_of(store, 0) == Announcement(3, 4, None, {"bad": {"2": 1}})
    assert announcement_of(store, 1) == Announcement(4, 4, None, {"bad": {"3": 1}})
    assert announcement_of(store, 2) == Announcement(
        4, 4, Stop(4, (Failure("SourceError", "too many", step=4),)), {"bad": {"4": 1}}
    )
    assert seen == [([0, 1], 2, 3), ([0, 1], 3, 4), ([0, 1], 4, 6)]
    reducer.close()


def test_a_failed_host_is_waited_for_with_the_others_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_ERROR_GRACE_SECONDS", 0.4)
    store = CountingStore()
    reducer = make_agreement(store, 0, 3)
    failure = Failure("OSError", "no disk", 1)
    reducer.publish(WindowReport(1))
    report_by_hand(store, 0, 1, WindowReport(0, 0, failure))
    start = time.monotonic()
    assert announcement_of(store, 0) == Announcement(0, 8, Stop(0, (failure,)))
    assert 0.3 < time.monotonic() - start < 10
    reducer.close()
    assert [key for key in store.keys if "/in/" in key] == [], "of the reports nothing stays: host 2 may be dead"


def test_announcements_that_a_late_host_has_not_seen_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_ERROR_GRACE_SECONDS", 0.1)
    store = CountingStore()
    reducer = make_agreement(store, 0, 3)
    for host in (1, 2):
        report_by_hand(store, 0, host, WindowReport(1))
    reducer.publish(WindowReport(1))
    assert reducer.wait_for(0) is None
    report_by_hand(store, 1, 1, WindowReport(1, 1, Failure("OSError", "no disk", 1), seen=1))
    reducer.publish(WindowReport(3))
    assert announcement_of(store, 1).stop is not None
    reducer.close()
    assert f"{RUN}/0/out" in store.keys, "host 2 needs it"


def test_a_window_is_deleted_once_every_host_has_seen_it() -> None:
    store = CountingStore()
    reducer = make_agreement(store, 0, 2)
    end, step = 0, 0
    for window, seen in enumerate([0, 1, 1, 3]):
        step, end = end, reducer.window_end
        report_by_hand(store, window, 1, WindowReport(end, seen=seen))
        reducer.publish(WindowReport(end))
        assert reducer.wait_for(step) is None
    reducer.publish(WindowReport(end, end))
    report_by_hand(store, 4, 1, WindowReport(end, end, seen=3))
    assert reducer.wait_for(end) == Stop(end)
    reducer.close()
    left = {int(key.split("/")[2]) for key in store.keys}
    assert left == {3, 4}


def test_a_reducer_that_breaks_says_so_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    store = CountingStore()

    def reduce(*args: Any) -> Any:
        raise ZeroDivisionError

    reducer = make_agreement(store, 0, 2, reduce=reduce)
    report_by_hand(store, 0, 1, WindowReport(1))
    reducer.publish(WindowReport(1))
    reducer._reducer._thread.join(20)  # type: ignore[union-attr]
    assert "the agreement between hosts failed at window 0" in caplog.text
    caplog.clear()
    closed = make_agreement(store, 0, 2, reduce=reduce)
    store.directory = None  # type: ignore[method-assign]
    closed.close("closed its feed")
    assert not caplog.text


# ---------------------------------------------------------------------- who is late


def late(store: Any, host: int, hosts: int = 4, **options: Any) -> StalledError:
    with pytest.raises(StalledError) as caught:
        make_agreement(store, host, hosts, timeout_seconds=0.05, **options).wait_for(0)
    return caught.value


def test_late_hosts_are_named_with_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    store.set(f"{RUN}/0/late", "[[1, 2], 2]")
    store.set(f"{RUN}/doing/2", "reading slow.parquet")
    error = late(store, 1, describe=lambda: "reading fast.parquet")
    assert str(error).startswith(
        "step 0: hosts 1, 2 have not read it yet (host 1 is reading fast.parquet; host 2 is reading slow.parquet) (waited 0 "
        "s, timeout_seconds=0.05). Check the log of that host; raise timeout_seconds if its reads may take longer."
    )
    assert error.hosts == (1, 2)
    assert error.waited_seconds >= 0.05
    store.set(f"{RUN}/0/late", "[[1, 2, 3, 4, 5, 6, 7, 8], 40]", overwrite=True)
    store.set(f"{RUN}/0/in/1", "[]")
    store.calls.clear()
    assert "step 0: hosts 2, 3, 4, 5, 6, 7, 8 and 32 more have not read it yet (host 2" in str(late(store, 1, 50))
    assert store.calls["directory"] == 0


def test_a_single_late_host_has_not_read_it_yet() -> None:
    store = CountingStore()
    assert str(late(store, 1)).startswith("step 0: host 0 has not read it yet (waited")
    store.set(f"{RUN}/0/late", "[[2], 1]")
    error = late(store, 1)
    assert str(error).startswith("step 0: host 2 has not read it yet (waited")
    assert error.hosts == (2,)


def test_a_reducer_that_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_ANNOUNCING_SECONDS", 0.05)
    store = CountingStore()
    store.set(f"{RUN}/0/in/0", "[]")
    error = late(store, 1)
    assert str(error).startswith("step 0: host 0, which announces, has not responded (waited")
    assert error.hosts == (0,)


def test_what_the_last_host_published_at_the_very_end_of_the_wait_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    store.set(f"{RUN}/0/in/0", "[]")
    stop = Stop(0, (Failure.left("left", 0),))
    real = store.try_get

    def try_get(key: str) -> str | None:  # asked for only once the time is over
        announce(store, 0, Announcement(0, 1, stop))
        return real(key)

    monkeypatch.setattr(store, "try_get", try_get)
    assert make_agreement(store, 1, 2, timeout_seconds=0.05).wait_for(0) == stop


class Clock:
    """Time that passes only while a host waits for a key."""

    def __init__(self, store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._store = store
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(store, "get", self.get)

    def get(self, key: str, seconds: float) -> str | None:
        self.now += seconds
        return self._store._values.get(key)


@pytest.mark.parametrize(("timeout", "waits"), [(400, [30, 60, 120, 240]), (80, [20, 40])])
def test_late_hosts_are_logged_ever_more_seldom(
    timeout: int, waits: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CountingStore()
    Clock(store, monkeypatch)
    store.set(f"{RUN}/0/late", "[[1, 2], 2]")
    one = make_agreement(store, 1, 4, timeout_seconds=timeout, describe=lambda: "reading slow.parquet")
    with pytest.raises(StalledError), caplog.at_level(logging.WARNING, "meshfeed.agree"):
        one.wait_for(0)
    lines = [record.getMessage() for record in caplog.records]
    assert [int(line.split()[1]) for line in lines] == pytest.approx(waits, abs=2)
    assert all(int(line.split()[1]) >= wait for line, wait in zip(lines, waits, strict=True))
    assert "for step 0: hosts 1, 2 have not read it yet (host 1 is reading slow.parquet)" in lines[0]
    assert store._values[f"{RUN}/doing/1"] == "reading slow.parquet", "for the others, since this host is late itself"


@pytest.mark.parametrize("itself", [True, False])
def test_a_host_that_is_late_itself_publishes_what_it_does_and_the_records_that_it_drops(
    itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CountingStore()
    Clock(store, monkeypatch)
    monkeypatch.setattr(coordination, "process_index", lambda: 1)
    one = make_agreement(store, 1, 4, timeout_seconds=40)
    if not itself:
        one.publish(WindowReport(1))
    with Dropping("lane 3", 10) as dropping:
        dropping.add()
        with pytest.raises(StalledError):
            one.wait_for(0)
    assert store.calls["delete"] == itself, "the progress, once the wait is over"
    assert store.keys == ([f"{RUN}/doing/1"] if itself else [f"{RUN}/0/in/1"])


def test_the_stacks_of_late_hosts_and_of_this_one_are_in_log_and_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CountingStore()
    Clock(store, monkeypatch)
    store.set(f"{RUN}/0/late", "[[1, 2, 3], 3]")
    store.set(f"{RUN}/doing/2", "reading slow.parquet\nthread meshfeed-reader:\n  in read_row_group")
    store.set(f"{RUN}/doing/3", "reading odd.parquet")
    stalls: list[Any] = []
    one = make_agreement(
        store,
        1,
        4,
        timeout_seconds=40,
        describe=lambda: "reading fast.parquet",
        stacks=lambda: "thread meshfeed-lanes:\n  in next",
        on_stall=lambda *stall: stalls.append(stall),
    )
    with pytest.raises(StalledError) as caught, caplog.at_level(logging.WARNING, "meshfeed.agree"):
        one.wait_for(0)
    stacks = "host 2:\nthread meshfeed-reader:\n  in read_row_group\nhost 1:\nthread meshfeed-lanes:\n  in next"
    what = (
        "hosts 1, 2, 3 have not read it yet (host 1 is reading fast.parquet; host 2 is reading slow.parquet; host 3 is "
        "reading odd.parquet)"
    )
    assert caplog.messages[0].endswith(f"for step 0: {what}\n{stacks}")
    assert caught.value.__notes__ == [stacks]
    assert "read_row_group" not in str(caught.value)
    assert {(step, text, shown) for step, _, text, shown in stalls} == {(0, what, stacks)}
    assert store._values[f"{RUN}/doing/1"] == "reading fast.parquet\nthread meshfeed-lanes:\n  in next"


# ---------------------------------------------------------------------- hosts that drop records


class Resuming(CountingStore):
    """Host 0 is late, and each look at it finds more records dropped, ``looks`` times; then ``arrive`` is called."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks, self.seen = looks, 0
        self.arrive: Callable[[], None] = lambda: None

    def try_get(self, key: str) -> str | None:
        if key != "meshfeed/resuming/0":
            return super().try_get(key)
        self.seen += 1
        if self.seen == self.looks:
            self.arrive()
        return f"resuming lane 3: dropped {min(self.seen, self.looks)} of 400,000 records"


def test_a_host_that_drops_records_for_longer_than_the_time_out_is_waited_for() -> None:
    store = Resuming(looks=5)
    store.arrive = lambda: announce(store, 0, Announcement(1, 1))
    one = make_agreement(store, 1, 2, timeout_seconds=0.05)
    assert one.patient_until == 0
    before = time.monotonic()
    assert one.wait_for(0) is None
    assert store.seen == 5
    assert before < one.patient_until <= time.monotonic() + 0.05


def test_a_host_that_no_longer_drops_records_is_a_stall() -> None:
    store = Resuming(looks=3)
    store.set(f"{RUN}/doing/0", "step 0: resuming lane 3")
    error = late(store, 1, 2)
    assert "host 0 has not read it yet (host 0 is step 0: resuming lane 3)" in str(error)
    assert error.hosts == (0,)
    assert store.seen == 4


# ---------------------------------------------------------------------- leaving


def pipeline(
    store: Any, host: int, hosts: int, prefetch: int = 2, window_reports: WindowReports | None = None, **options: Any
) -> Pipeline:
    window_reports = window_reports or new_window_reports()
    held_back = make_agreement(store, host, hosts, reduce=window_reports.reduce, **options)
    return numbers_pipeline(held_back, window_reports, host=host, prefetch=prefetch)


def take(one: Pipeline, steps: int) -> None:
    for _ in range(steps):
        one.pop(one.peek())


@pytest.mark.parametrize("slow", [0, 1])
def test_a_window_of_slow_reads_may_last_longer_than_the_timeout_of_one(
    slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "process_index", lambda: slow)  # which alone publishes something as its own
    store = CountingStore()
    pipelines = [pipeline(store, host, 2, timeout_seconds=1) for host in range(2)]
    read = pipelines[slow]._reader.next

    def wait_and_read() -> Any:
        time.sleep(0.2)
        return read()

    monkeypatch.setattr(pipelines[slow]._reader, "next", wait_and_read)
    try:
        for _ in range(24):  # two windows of 8 steps, each of which takes 1.6 s
            for one in pipelines:
                take(one, 1)
    finally:
        for one in pipelines:
            one.close()
    assert not [key for key in store.keys if "resuming" in key]


def test_what_is_read_ahead_may_wait_for_hosts_that_have_less_of_it() -> None:
    """Longer than the timeout, such as while all evaluate; a host that is asked for a batch waits that long and no longer."""
    store = CountingStore()
    short, long = (pipeline(store, host, 2, prefetch, timeout_seconds=0.5) for host, prefetch in enumerate((2, 30)))
    try:
        for steps in (3, 40):
            for _ in range(steps):
                take(short, 1)
                take(long, 1)
            time.sleep(1.5)
        before = time.monotonic()
        with pytest.raises(StalledError, match="host 0 has not read it yet"):
            take(long, 40)
        assert time.monotonic() - before > 0.5
    finally:
        for one in (short, long):
            one.close()


def test_a_report_that_cannot_be_made_is_told_to_the_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(window: Any) -> Any:
        raise MemoryError("for the digests")

    store = CountingStore()
    pipelines = []
    for host in range(3):
        reports = new_window_reports()
        if host == 1:
            monkeypatch.setattr(reports, "contents", no_memory)
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
    store = CountingStore()
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
                f"host {leaver} closed its feed at step 5 after ValueError: the loss is nan. This host requests step "
                f"{one._delivered}, which needs all hosts: take the same number of steps on all of them, or see the log of "
                f"host {leaver}."
            )
            with pytest.raises(PeerError):
                one.peek()
    assert len(steps) == 1
    for one in pipelines:
        one.close()


def test_hosts_that_close_at_the_same_step_hear_nothing_of_it() -> None:
    store = CountingStore()
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
    store = CountingStore()
    hosts = [make_agreement(store, host, 2) for host in range(2)]
    for host in hosts:
        host.publish(WindowReport(0, final=0))
    assert hosts[0].wait_for(0) == Stop(0)
    for host in hosts:
        host.close("closed its feed at step 0")
    assert hosts[1].wait_for(0) == Stop(0)
    assert store.keys == [f"{RUN}/0/in/0", f"{RUN}/0/in/1", f"{RUN}/0/out"]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_host_that_leaves_silently_publishes_nothing(leaver: int) -> None:
    store = CountingStore()
    one = make_agreement(store, leaver, 2)
    one.publish(WindowReport(1))
    one.close()
    assert store.keys == [f"{RUN}/0/in/{leaver}"]
    one.publish(WindowReport(3))
    assert store.keys == [f"{RUN}/0/in/{leaver}"], "reads that finish after close are discarded"


def test_a_reducer_that_never_read_announces_its_leave_notice() -> None:
    store = CountingStore()
    reducer = make_agreement(store, 0, 2, first_step=3)
    report_by_hand(store, 0, 1, WindowReport(4))
    store.set(f"{RUN}/doing/1", "reading")
    reducer.close("closed its feed at step 3")
    notice = Failure.left("closed its feed at step 3", 0)
    assert announcement_of(store, 0) == Announcement(3, 1, Stop(3, (notice,)))
    assert store.keys == [f"{RUN}/0/out"]


def test_a_reducer_that_leaves_with_all_reports_there_announces_them() -> None:
    store = CountingStore()
    reducer = make_agreement(store, 0, 2, first_step=3)
    for host in range(2):
        report_by_hand(store, 0, host, WindowReport(4))
    reducer.close("closed its feed at step 3")
    assert announcement_of(store, 0) == Announcement(4, 8)
    assert announcement_of(store, 1).upto == 4
    assert announcement_of(store, 1).stop == Stop(4, (Failure.left("closed its feed at step 3", 0),))


def test_a_leave_notice_stands_in_place_of_the_next_report() -> None:
    store = CountingStore()
    one = make_agreement(store, 1, 2)
    one.publish(WindowReport(1))
    one.close("closed its feed at step 0")
    found = WindowReport.from_json(Reduction(store, f"{RUN}/1", [1], 1).value_of_reducer())
    assert found == WindowReport(1, 1, Failure.left("closed its feed at step 0", 1))


def test_a_host_that_waits_while_its_feed_is_closed_stops_waiting() -> None:
    store = CountingStore()
    one = make_agreement(store, 1, 2)
    closer = threading.Timer(0.2, one.close)
    closer.start()
    with pytest.raises(StalledError, match="the feed was closed while it waited for other hosts"):
        one.wait_for(0)
    closer.join()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [3, 12])
def test_of_a_feed_with_a_killed_host_a_few_keys_stay_however_many_hosts(
    hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshfeed._src.agreement.handshake import Handshake

    monkeypatch.setattr(reduction, "_FIRST_NOTE_SECONDS", 0.0)
    job = Job(CountingStore(), monkeypatch)
    killed = hosts - 1

    def run(host: int) -> None:
        handshake = Handshake("feed/train", range(hosts))
        handshake.agree({"seed": 0}, 30)
        one = make_agreement(job.store, host, hosts, scope="feed/train/1", timeout_seconds=30 if host else 0.5)
        step, end = 0, one.window_end
        for _ in range(5):
            one.publish(WindowReport(end))
            one.wait_for(step)
            step, end = end, one.window_end
        if host == killed:
            return
        one.publish(WindowReport(end))
        try:
            one.wait_for(step)
        finally:
            one.close("closed its feed")
            handshake.leave()

    errors = job.run(range(hosts), run)
    assert isinstance(errors[0], StalledError)
    assert errors[0].hosts == (killed,)
    assert errors[1:] == [None] * (hosts - 1), "the reducer's leave notice stops them"
    kept = [key.removeprefix("meshfeed/feed/train/") for key in job.store.keys]
    assert set(kept) >= {"left", "settings/0/out"}
    assert len(kept) <= 8, kept
    assert not [key for key in kept if "/in/" in key]


@pytest.mark.parametrize("stop", [None, Stop(1, (Failure.left("left", 0),))])
def test_a_host_that_leaves_after_the_reducer_publishes_no_notice(stop: Stop | None) -> None:
    store = CountingStore()
    announce(store, 0, Announcement(1, 1, stop))
    one = make_agreement(store, 1, 2)
    one.publish(WindowReport(1))
    one.close("closed its feed")
    assert (f"{RUN}/1/in/1" in store.keys) == (stop is None)


def test_a_host_that_has_left_for_another_sharding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "ASIDE_SECONDS", 0.1)
    store = CountingStore()
    agreement = make_agreement(store, 1, 3)
    notice = Failure.left("called reshard after step 2", 2)
    store.set(aside_key(RUN), json.dumps(notice.to_json()))
    agreement.publish(WindowReport(1))
    with pytest.raises(PeerError, match=r"host 2.*called reshard after step 2"):
        agreement.wait_for(0)
    agreement.close()
