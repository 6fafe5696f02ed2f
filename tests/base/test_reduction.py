"""Reductions: few requests, deadlines, stragglers by name, and no key that stays."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "agreement"))

from hosts import CountingStore, Job

from meshfeed import MeshfeedError, StalledError
from meshfeed._src.base import coordination, reduction
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.reduction import Patience, ProgressReport, Reduction, Rounds, Stragglers, leave


def total(values: dict[int, Any]) -> Any:
    return sum(values.values())


def rounds_of(hosts: range, seconds: float = 30) -> Rounds:
    return Rounds("test", hosts, timeout_seconds=seconds, doing="choosing a step")


def reduce(value: Any, hosts: range = range(3), seconds: float = 30, by: Any = total) -> Any:
    with rounds_of(hosts, seconds) as rounds:
        return rounds.reduce(value, by)


def reduction_of(store: Any, host: int, hosts: int = 4) -> Reduction:
    return Reduction(store, "run/3", range(hosts), host)


# ---------------------------------------------------------------------- values and results


@pytest.mark.parametrize(
    ("initialized", "message"),
    [
        (
            False,
            r"JAX reports 4 processes, but jax\.distributed is not initialized.*Call jax\.distributed\.initialize\(\)",
        ),
        (True, r"cannot find the key-value store of JAX \d+\.\d+\.\d.*install an older version of JAX"),
    ],
)
def test_several_processes_without_a_store_are_refused(
    initialized: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "is_distributed", lambda: initialized)
    monkeypatch.setattr(coordination, "process_count", lambda: 4)
    with pytest.raises(MeshfeedError, match=message):
        reduce(None, range(4))


def test_one_process_needs_no_store_and_gets_json() -> None:
    assert reduce((1, 2), range(1), by=lambda values: {"all": values[0], 3: 4}) == {"all": [1, 2], "3": 4}


def test_all_receive_the_same_json_and_leave_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(CountingStore(), monkeypatch)

    def run(host: int) -> list[Any]:
        results = []
        with rounds_of(range(3)) as rounds:
            for number in range(20):
                time.sleep(0.002 * ((host + number) % 3))
                results.append(rounds.reduce([host, number], lambda values: list(values.items())))
                if host == 0:  # which deletes the keys of the last round after the others have the result of this one
                    numbers = {key.split("/")[2] for key in job.store.keys}
                    assert numbers <= {str(number), str(number + 1), "left"}, "keys of earlier rounds stay"
        return results

    expected = [[[host, [host, number]] for host in range(3)] for number in range(20)]
    assert job.run(range(3), run) == [expected] * 3
    assert job.store.keys == []


def test_a_null_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(CountingStore(), monkeypatch)
    assert job.run(range(2), lambda host: reduce(None, range(2), by=lambda values: None)) == [None, None]


def test_hosts_make_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(CountingStore(), monkeypatch)
    for host in (1, 2):
        job.store.set(f"meshfeed/test/0/in/{host}", str(host))
    job.store.calls.clear()
    assert job.on(0, reduce, 0) == 3
    assert job.store.calls == {"set": 2, "directory": 1, "increment": 1}
    job.store.calls.clear()
    assert job.on(1, reduce, 1) == 3
    assert job.store.calls == {"set": 1, "get": 1, "increment": 1}


def test_the_reducer_blocks_on_a_missing_value_and_lists_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(reduction.time, "sleep", slept.append)

    class Arriving(CountingStore):
        def get(self, key: str, seconds: float) -> str | None:
            self.set(key, '"late"')
            return super().get(key, seconds)

    store = Arriving()
    store.set("run/3/in/0", '"early"')
    store.set("run/3/in/9", '"no participant"')
    found = reduction_of(store, 0, 3).collect(time.monotonic() + 60)
    assert found == {0: "early", 1: "late", 2: "late"}
    assert list(found) == [0, 1, 2]
    assert (store.calls["get"], store.calls["directory"]) == (2, 3)
    assert store.seconds == pytest.approx([0.05, 0.05], abs=0.02), (
        "short at first, for close() waits for a request's end"
    )
    assert slept == [pytest.approx(3 * 2.5e-5)] * 2


def test_with_thousands_of_hosts_the_reducer_pauses_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(reduction.time, "sleep", slept.append)
    store = CountingStore()
    hosts = [Reduction(store, "run/3", range(16_384), host) for host in (0, 16_383)]
    hosts[0].publish(0)
    hosts[1].publish(0)

    def done(values: Any) -> bool:
        hosts[1].retract() if store.calls["directory"] == 1 else hosts[1].publish(1)
        return store.calls["directory"] == 3

    hosts[0].collect(time.monotonic() + 60, done)
    assert slept == [0.1]


def test_a_reducer_that_is_not_done_though_all_arrived_looks_again_and_reads_what_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(reduction.time, "sleep", slept.append)
    store, seen = CountingStore(), []
    one, other = reduction_of(store, 0, 2), reduction_of(store, 1, 2)
    one.publish("a")
    other.publish("b")

    def done(values: Any) -> bool:
        seen.append(dict(values))
        other.publish("c")
        return len(seen) == 3

    assert one.collect(time.monotonic() + 60, done) == {0: "a", 1: "c"}
    assert seen == [{0: "a", 1: "b"}, {0: "a", 1: "c"}, {0: "a", 1: "c"}]
    assert slept == pytest.approx([0.0125, 0.0125], abs=0.005)
    assert store.calls["get"] == 0


def test_values_are_retracted_and_discarded() -> None:
    store = CountingStore()
    hosts = [reduction_of(store, host) for host in range(4)]
    for one in hosts:
        one.publish({"host": 1})
    assert hosts[3].value_of_reducer() == {"host": 1}
    hosts[0].retract()
    assert hosts[3].value_of_reducer() is None
    assert store.keys == ["run/3/in/1", "run/3/in/2", "run/3/in/3"]
    assert hosts[1].announced() is None
    assert hosts[0].announce((1, 2)) == {"result": [1, 2]}
    assert hosts[1].announced() == {"result": [1, 2]}
    hosts[0].discard_values()
    assert store.keys == ["run/3/out"]
    assert [one.is_reducer for one in hosts] == [True, False, False, False]


# ---------------------------------------------------------------------- waiting


@pytest.mark.parametrize(("hosts", "seconds"), [(2, 0.05), (1024, 0.512), (4096, 2.0), (16384, 2.0)])
def test_thousands_of_hosts_ask_again_less_often(hosts: int, seconds: float) -> None:
    store = CountingStore()
    store.set("run/3/out", '{"result": 1}')
    assert reduction_of(store, 1, hosts).wait(time.monotonic() + 60) == {"result": 1}
    assert store.seconds == [pytest.approx(seconds, abs=0.01)]


def test_waits_grow_to_two_seconds_and_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ticks = [100.0], []

    class Clocked(CountingStore):
        def get(self, key: str, seconds: float) -> str | None:
            now[0] += seconds
            self.seconds.append(seconds)
            return None

    monkeypatch.setattr(reduction.time, "monotonic", lambda: now[0])
    store = Clocked()
    assert reduction_of(store, 1).wait(110.0, ticks.append) is None
    assert store.seconds == pytest.approx([0.05 * 1.5**i for i in range(10)] + [2, 2, 0.3335], abs=1e-3)
    assert ticks == pytest.approx([sum(store.seconds[: i + 1]) for i in range(12)])
    assert reduction_of(store, 1).wait(50.0) is None
    assert store.seconds[-1] == 0.001, "one request even after the deadline"


def test_a_tick_may_raise() -> None:
    def tick(waited: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reduction_of(CountingStore(), 1).wait(time.monotonic() + 60, tick)


# ---------------------------------------------------------------------- stragglers


def test_stragglers_are_named_in_short() -> None:
    assert str(Stragglers.of([5])) == "host 5"
    assert str(Stragglers.of({3, 1})) == "hosts 1, 3"
    assert Stragglers.of(range(8)) == (tuple(range(8)), 8)
    assert str(Stragglers.of(range(8))) == "hosts 0, 1, 2, 3, 4, 5, 6, 7"
    assert str(Stragglers.of(range(1, 5000, 2))) == "hosts 1, 3, 5, 7, 9, 11, 13, 15 and 2,492 more"


def test_who_is_late_costs_each_host_a_few_requests_however_many_hosts_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reduction, "_FIRST_NOTE_SECONDS", 0.0)
    store = CountingStore()
    store._values.update({f"run/3/in/{host}": "{}" for host in range(4096) if host not in (7, 9)})
    reducer = reduction_of(store, 0, 4096)
    assert len(reducer.collect(time.monotonic() + 0.01)) == 4094
    store.calls.clear()
    assert reducer.stragglers() == ((7, 9), 2)
    assert not store.calls, "the reducer has just looked"
    store.set("run/3/in/9", "{}")  # has come since
    assert reduction_of(store, 5, 4096).stragglers() == ((7,), 1)
    assert store.calls == {"set": 1, "try_get": 3}


def test_many_stragglers_are_counted_and_some_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_FIRST_NOTE_SECONDS", 0.0)
    store = CountingStore()
    store._values.update({f"run/3/in/{host}": "{}" for host in range(0, 100, 2)})
    reduction_of(store, 0, 100).collect(time.monotonic() + 0.01)
    store.set("run/3/in/3", "{}")
    assert reduction_of(store, 2, 100).stragglers() == ((1, 5, 7, 9, 11, 13, 15), 49)


def test_a_reducer_that_has_not_come_is_the_straggler() -> None:
    store = CountingStore()
    view = Reduction(store, "run/3", (2, 3, 5), 3)
    assert view.stragglers() == ((2,), 1)
    store.set("run/3/in/2", "{}")
    assert view.stragglers() == ((), 0)


def test_the_note_for_the_others_is_rare_and_goes_once_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    class Clocked(CountingStore):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[Any] = []

        def get(self, key: str, seconds: float) -> str | None:
            self.log.append((round(now[0] - 100, 3), json.loads(self._values.get("run/3/late", "null"))))
            now[0] += 0.15
            host = 20 - len(self.log) // 2
            if len(self.log) % 2 == 0:
                self._values[f"run/3/in/{host}"] = "0"
            return None

    monkeypatch.setattr(reduction.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(reduction.time, "sleep", lambda seconds: None)
    store = Clocked()
    store._values["run/3/in/0"] = "0"
    assert len(reduction_of(store, 0, 20).collect(1e9)) == 20
    assert store.log[0] == (0.0, None)
    assert store.log[1] == (0.15, None)
    assert store.log[2] == (0.3, [[1, 2, 3, 4, 5, 6, 7, 8], 18])
    assert store.log[8] == (1.2, [[1, 2, 3, 4, 5, 6, 7, 8], 18])
    assert store.log[9] == (1.35, [[1, 2, 3, 4, 5, 6, 7, 8], 15])
    assert "run/3/late" not in store._values
    assert store.calls["delete"] == 1


def test_the_note_is_there_at_the_deadline() -> None:
    store = CountingStore()
    reduction_of(store, 0, 3).collect(time.monotonic() - 1)
    assert json.loads(store._values["run/3/late"]) == [[0, 1, 2], 3]
    assert store.calls["get"] == 0


@pytest.mark.parametrize("here", [0, 1])
def test_hosts_that_do_not_come_are_named(here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_FIRST_NOTE_SECONDS", 0.0)
    job = Job(CountingStore(), monkeypatch)
    prefix = "meshfeed/test/0"
    job.store.set(f"{prefix}/in/{1 - here}", "{}")
    if here == 1:
        job.store.set(f"{prefix}/late", "[[2, 3], 2]")
    job.store.calls.clear()
    with pytest.raises(StalledError) as caught:
        job.on(here, reduce, 0, range(4), 0.05)
    assert caught.value.hosts == (2, 3)
    assert caught.value.waited_seconds >= 0.05
    assert str(caught.value) == (
        f"choosing a step: hosts 2, 3 did not arrive within {caught.value.waited_seconds:.0f} s (this is host {here} of 4). "
        "Check the log of that host: it has stopped, is still starting, or runs different code."
    )
    assert here == 0 or job.store.calls["directory"] == 0


def test_all_that_wait_give_up_with_the_reducer_and_a_straggler_learns_why_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(CountingStore(), monkeypatch)

    def run(host: int) -> Any:
        if host == 0:  # its time starts when the others wait, however late their threads start
            for other in (1, 3):
                assert job.store.get(f"meshfeed/test/0/in/{other}", 60) is not None
            return reduce(host, range(4), seconds=0.3)
        return reduce(host, range(4), seconds=60)

    errors = job.run((0, 1, 3), run)
    for error in errors:
        assert isinstance(error, StalledError)
        assert error.hosts == (2,)
        assert f"host 2 did not arrive within {error.waited_seconds:.0f} s" in str(error)
    kept = ["meshfeed/test/0/out", "meshfeed/test/left"]
    assert job.store.keys == kept, "few keys, however many hosts, if the host was killed"
    text = (
        rf"host 2 did not arrive within {errors[0].waited_seconds:.0f} s \(this is host 2 of 4\)\. "
        r"This host came too late\. Start all hosts together"
    )
    with pytest.raises(StalledError, match=text):
        job.on(2, reduce, 2, range(4), 60)
    assert job.store.keys == []


def test_a_host_that_is_late_is_in_the_log_long_before_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reduction, "_LATE_SECONDS", 0.5)
    job = Job(CountingStore(), monkeypatch)
    with caplog.at_level("WARNING", "meshfeed"):
        job.run((0, 1), lambda host: reduce(host, range(4), seconds=60 if host else 2.5))
    entry = re.compile(r"choosing a step: waited \d+ s for hosts 2, 3 \(this is host [01] of 4\)")
    late = [message for message in caplog.messages if entry.fullmatch(message)]
    assert late == caplog.messages
    assert 2 <= len(late) <= 8  # after 0.5 s, 1 s, 2 s on each host
    assert {message[-12:] for message in late} == {"host 0 of 4)", "host 1 of 4)"}


def test_an_announcement_after_the_deadline_is_still_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_ANNOUNCING_SECONDS", 30.0)
    job = Job(CountingStore(), monkeypatch)
    job.store.set("meshfeed/test/0/in/0", "0")
    job.store.set("meshfeed/test/0/in/1", "0")
    job.store.set("meshfeed/test/0/in/2", "0")
    real = job.store.try_get

    def try_get(key: str) -> str | None:  # asked for only once the time is over
        job.store.set("meshfeed/test/0/out", '{"result": 5}', overwrite=True)
        return real(key)

    monkeypatch.setattr(job.store, "try_get", try_get)
    assert job.on(1, reduce, 0, range(3), 0.05) == 5


@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_whose_program_has_ended_is_not_waited_for(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_FIRST_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(reduction, "_ANNOUNCING_SECONDS", 0.05)
    job = Job(CountingStore(), monkeypatch)
    job.store.set(f"meshfeed/ended/{gone}", "gone: its program has ended by OSError: no disk")
    first, last = sorted({0, 1, 2} - {gone})

    def run(host: int) -> Any:
        if host == first:  # it looks at once for hosts that have ended
            assert job.store.get(f"meshfeed/test/0/in/{last}", 60) is not None
        return reduce(host, range(3), seconds=60)

    start = time.monotonic()
    for error in job.run((first, last), run):
        assert isinstance(error, StalledError)
        assert error.hosts == (gone,)
        assert f"host {gone} is gone: its program has ended by OSError: no disk" in str(error)
    assert time.monotonic() - start < 30


def test_a_host_that_has_published_before_its_program_ended_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_FIRST_LOOK_SECONDS", 0.0)
    job = Job(CountingStore(), monkeypatch)
    job.store.set("meshfeed/test/0/in/1", "1")
    job.store.set("meshfeed/ended/1", "gone: its program has ended")

    def run(host: int) -> Any:
        if host == 2:
            time.sleep(0.3)
        return reduce(host, range(3), seconds=60)

    assert job.run((0, 2), run) == [3, 3]


def test_a_reducer_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_ANNOUNCING_SECONDS", 0.05)
    job = Job(CountingStore(), monkeypatch)
    job.store.set("meshfeed/test/0/in/0", "0")
    with pytest.raises(StalledError) as caught:
        job.on(1, reduce, 0, range(3), 0.05)
    assert f"host 0 did not announce the result within {caught.value.waited_seconds:.0f} s" in str(caught.value)
    assert caught.value.hosts == (0,)


def test_an_interrupted_host_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(CountingStore(), monkeypatch)

    def interrupted(host: int) -> Any:
        if host == 1:
            monkeypatch.setattr(reduction, "Patience", None)
        return reduce(host, range(2), seconds=0.2)

    with pytest.raises(TypeError):
        job.on(1, interrupted, 1)
    assert "meshfeed/test/left" in job.store.keys


# ---------------------------------------------------------------------- leaving


def test_the_last_host_to_leave_deletes_the_keys() -> None:
    store = CountingStore()
    store.set("run/3/in/0", "")
    store.set("run/30", "")
    for _ in range(2):
        leave(store, "run/3", 3)
        assert "run/3/in/0" in store.keys
    leave(store, "run/3", 3)
    assert store.keys == ["run/30"]


def test_an_error_while_leaving_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(CountingStore):
        def increment(self, key: str) -> int:
            raise RuntimeError("UNAVAILABLE")

    with caplog.at_level(logging.DEBUG, "meshfeed.process"):
        leave(Gone(), "test", 2)
    assert [record.getMessage() for record in caplog.records] == ["meshfeed-leave: UNAVAILABLE"]


# ---------------------------------------------------------------------- hosts that drop records


class Resuming(CountingStore):
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


@pytest.mark.parametrize("here", [0, 1])
def test_a_host_that_drops_records_for_longer_than_the_time_out_is_waited_for(
    here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Resuming(1 - here, looks=5)
    key, value = ("in/1", "1") if here == 0 else ("out", '{"result": 1}')
    store.arrive = lambda: store.set(f"meshfeed/test/0/{key}", value)
    assert Job(store, monkeypatch).on(here, reduce, 0, range(2), 0.05) == 1
    assert store.seen == 5


@pytest.mark.parametrize("here", [0, 1])
def test_a_host_that_no_longer_drops_records_is_a_stall(here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Resuming(1 - here, looks=3)
    with pytest.raises(
        StalledError,
        match=rf"host {1 - here} did not .*\(host {1 - here} is resuming lane 3: dropped 3 of 400,000 records\)\. Check",
    ) as caught:
        Job(store, monkeypatch).on(here, reduce, 0, range(2), 0.05)
    assert caught.value.hosts == (1 - here,)
    assert store.seen == 4


@pytest.mark.parametrize("here", [0, 1])
def test_nobody_looks_for_hosts_that_drop_records_before_the_time_out(
    here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Resuming(1 - here, looks=5)
    store.set("meshfeed/test/0/in/1", "1")
    store.set("meshfeed/test/0/out", '{"result": 1}')
    Job(store, monkeypatch).on(here, reduce, 0, range(2), 30)
    assert store.seen == 0


def test_what_a_host_does_that_opens_its_data_is_in_the_error_and_then_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    monkeypatch.setattr(coordination, "process_index", lambda: 1)
    report = ProgressReport(store, 100)
    report.tell("opening the data for 30 s\nthread meshfeed-open:\n  in connect")
    patience = Patience(store, 1000.0)
    assert not patience.renew([1, 2])
    assert patience.notes() == (
        " (host 1 is opening the data for 30 s)",
        "host 1:\nthread meshfeed-open:\n  in connect",
    )
    announcement = {"stalled": [[[1, 2], 2], 3.0, *patience.notes()]}
    with pytest.raises(
        StalledError, match=r"hosts 1, 2 did not arrive .* \(host 1 is opening the data for 30 s\)"
    ) as caught:
        Reduction(store, "meshfeed/feed", [0, 1, 2], 0).unpack(announcement, "starting")
    assert caught.value.__notes__ == ["host 1:\nthread meshfeed-open:\n  in connect"]
    report.end()
    assert not store.keys


def test_patience_ends_without_progress() -> None:
    store = CountingStore()
    patience = Patience(store, 1000.0)
    first = patience.deadline
    assert first == pytest.approx(time.monotonic() + 1000, abs=60)
    assert not patience.renew([1])
    assert patience.deadline == first
    assert patience.notes() == ("", "")
    store.set("meshfeed/resuming/1", "resuming lane 3: dropped 5 of 10 records")
    assert patience.renew([1])
    assert patience.deadline > first
    assert patience.notes() == (" (host 1 is resuming lane 3: dropped 5 of 10 records)", "")
    assert not patience.renew([1])
    store.set("meshfeed/resuming/2", "resuming", overwrite=True)
    assert patience.renew([1, 2]), "one host's progress is enough"
    assert patience.notes()[0].endswith("; host 2 is resuming)")
    store.delete("meshfeed/resuming/1")  # it has come to its end, and the host is not here yet
    assert patience.renew([1, 2])
    assert not patience.renew([1, 2])


def test_patience_looks_at_eight_hosts() -> None:
    store = CountingStore()
    store.set("meshfeed/resuming/9", "resuming")
    assert not Patience(store, 1.0).renew(range(100))
    assert store.calls["try_get"] == 16  # whether it has ended, and its progress


def test_progress_is_published_where_there_is_some_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    monkeypatch.setattr(coordination, "process_index", lambda: 1)
    report = ProgressReport(store, timeout_seconds=1e-9)
    report.update()
    report.end()
    assert not store.calls
    with Dropping("lane 3", 400_000) as dropping:
        for count in (0, 120_000, 0):
            dropping.add(count)
            report.update()
        assert store.directory("meshfeed/resuming") == {"1": "resuming lane 3: dropped 120,000 of 400,000 records"}
        assert store.calls["set"] == 2
        seldom = ProgressReport(store, timeout_seconds=300)
        for _ in range(10):
            dropping.add()
            seldom.update()
        assert store.calls["set"] == 3
        assert store.calls["delete"] == 0
        ProgressReport(None, timeout_seconds=300).update()
    report.update()
    report.end()
    assert not store.directory("meshfeed/resuming")
    deleted = store.calls["delete"]
    report.end()
    assert store.calls["delete"] == deleted


@pytest.mark.parametrize(("timeout", "pause"), [(300, 5.0), (4, 1.0)])
def test_progress_is_published_every_few_seconds(timeout: float, pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, store = [100.0], CountingStore()
    monkeypatch.setattr(coordination, "process_index", lambda: 1)
    monkeypatch.setattr(reduction.time, "monotonic", lambda: now[0])
    report = ProgressReport(store, timeout)
    with Dropping("lane 3", 100) as dropping:
        for later, sets in ((0.0, 1), (pause - 0.01, 1), (pause, 2)):
            now[0] = 100.0 + later
            dropping.add()
            report.update()
            assert store.calls["set"] == sets


def test_progress_to_a_coordinator_that_is_gone_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(CountingStore):
        def delete(self, key: str) -> None:
            raise RuntimeError("UNAVAILABLE")

    monkeypatch.setattr(coordination, "process_index", lambda: 1)
    report = ProgressReport(Gone(), 300)
    with Dropping("lane 3", 100) as dropping:
        dropping.add()
        report.update()
        report.end()
