"""Who learns when that a host is silent: hosts over a store in memory, by a clock of the test."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import pytest
from hosts import CountingStore
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed._src.agreement import heartbeat
from meshfeed._src.agreement.heartbeat import Member, Pulse, SilenceLog, interval_seconds
from meshfeed._src.base import coordination, jax_internals
from meshfeed._src.feed.membership import Membership


class Cluster:
    """Hosts that beat at their own phase of the interval, by a clock that the test moves."""

    def __init__(self, num_hosts: int, phases: Sequence[float] = (), participants: Sequence[int] = ()) -> None:
        self.store = CountingStore()
        self.participants = participants or range(num_hosts)
        self.interval = interval_seconds(num_hosts)
        self.now = 0.0
        self.pulses = {host: Pulse(self.store, host, self.interval) for host in self.participants}
        self.due = {host: phases[i] * self.interval if phases else 0.0 for i, host in enumerate(self.participants)}
        self.last = dict(self.due)
        self.known: dict[int, dict[int, float]] = {host: {} for host in self.participants}  # host → silent host → when

    def run(self, seconds: float, stopped: Sequence[int] = ()) -> None:
        end = self.now + seconds
        while True:
            host = min((host for host in self.due if host not in stopped), key=self.due.__getitem__)
            if self.due[host] > end:
                break
            self.now = self.due[host]
            silent = self.pulses[host].beat(self.now - self.last[host], self.participants)
            self.last[host], self.due[host] = self.now, self.now + self.interval
            self.known[host] = {one: self.known[host].get(one, self.now) for one in silent}
        self.now = end

    def leave(self, host: int) -> None:
        self.pulses.pop(host).leave()
        del self.due[host]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 6).flatmap(
        lambda n: st.tuples(st.permutations(range(n)), st.lists(st.floats(0, 1), min_size=n, max_size=n))
    )
)
def test_every_survivor_names_a_killed_host_within_ten_seconds(drawn: tuple[list[int], list[float]]) -> None:
    """Also the watcher, and the one that takes over from it."""
    order, phases = drawn
    cluster = Cluster(len(order), phases)
    cluster.run(11.0)
    assert all(known == {} for known in cluster.known.values())
    killed: list[int] = []
    for victim in order[:-1]:
        killed.append(victim)
        at = cluster.now
        cluster.run(10.0, killed)
        survivors = [host for host in cluster.known if host not in killed]
        assert all(set(cluster.known[host]) == set(killed) for host in survivors), (killed, cluster.known)
        assert all(at < cluster.known[host][victim] <= at + 10 for host in survivors)


def test_a_host_that_leaves_is_not_silent() -> None:
    cluster = Cluster(4)
    cluster.run(10)
    for host in (0, 2, 1):
        cluster.leave(host)
        cluster.run(30)
        assert all(known == {} for one, known in cluster.known.items() if one in cluster.due)
    cluster.leave(3)
    assert cluster.store.keys == []


def test_a_host_that_was_suspended_answers_again_and_blames_no_one() -> None:
    for host in (0, 1, 2):
        cluster = Cluster(3)
        cluster.run(10)
        cluster.run(60, [host])
        assert all(list(known) == [host] for one, known in cluster.known.items() if one != host)
        cluster.due[host] = cluster.now
        cluster.run(3)
        assert cluster.known[host] == {}
        cluster.run(20)
        assert all(known == {} for known in cluster.known.values())


def test_hosts_outside_of_the_feed_are_not_waited_for() -> None:
    cluster = Cluster(8, participants=[3, 5, 6])
    cluster.run(10)
    cluster.run(10, [3])
    assert [list(cluster.known[host]) for host in (5, 6)] == [[3], [3]]


@pytest.mark.parametrize("num_hosts", [2, 300, 1024])
def test_requests_per_second(num_hosts: int) -> None:
    """Two per host and interval; only one host reads what all have written."""
    cluster = Cluster(num_hosts)
    cluster.run(3 * cluster.interval)
    cluster.store.calls.clear()
    cluster.run(2 * cluster.interval)
    calls = cluster.store.calls
    assert calls["directory"] == 2
    assert calls.total() == 2 * (2 * num_hosts + 1)
    for hosts in (num_hosts, 4096, 100_000):
        assert 2 * hosts / interval_seconds(hosts) <= 2500 + 1e-6
    assert interval_seconds(4096) < 3.3  # a silent host is named after two intervals, and at most one more


def test_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = SilenceLog()
    for silent in ({}, {2: 6.0, 1: 5.0}, {2: 8.0, 1: 7.0}, {2: 21.0}, {2: 23.0}):
        log.update(silent)
    log.update({})
    texts = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in texts] == [logging.WARNING, logging.ERROR, logging.WARNING, logging.WARNING]
    assert texts[0][1].startswith(
        "hosts 1, 2: no sign of life for 6 s. The process was killed or suspended, or its machine"
    )
    assert "JAX will abort this process when its heartbeat times out (heartbeat_timeout_seconds of" in texts[0][1]
    assert texts[1][1].startswith("host 2: still no sign of life after 21 s. JAX will abort this process")
    assert texts[2][1] == "host 1: alive again, or has left"
    assert texts[3][1] == "host 2: alive again, or has left"
    caplog.clear()
    jax.config.update("jax_enable_recoverability", True)
    try:
        SilenceLog().update({0: 5.0})
    finally:
        jax.config.update("jax_enable_recoverability", False)
    assert "JAX does not abort this process" in caplog.text


def _stub(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    monkeypatch.setattr(heartbeat.coordination, "key_value_store", lambda: store)
    monkeypatch.setattr(heartbeat.coordination, "process_index", lambda: 0)
    monkeypatch.setattr(heartbeat.coordination, "process_count", lambda: 2)
    monkeypatch.setattr(heartbeat, "interval_seconds", lambda _: 0.01)


def _wait(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


def test_feeds_of_a_process_share_one_thread_that_ends_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    _stub(monkeypatch, store)
    members = [Member([0, 1]), Member([0, 1]), Member([0])]
    assert len(heartbeat._hearts) == 1
    _wait(lambda: store.calls["directory"] >= 3)
    for member in members[:2]:
        assert set(store.keys) == {"meshfeed/alive/0", "meshfeed/watch/0"}
        member.leave()
        member.leave()
    assert store.keys == []
    assert not heartbeat._hearts
    again = Member([0, 1])
    _wait(lambda: store.keys)
    again.leave()
    assert store.keys == []


def test_a_job_after_a_resize_has_a_heartbeat_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each feed asks for a store over JAX's client, which an in-process resize replaces."""
    stores = [CountingStore(), CountingStore()]
    clients = [object(), object()]
    monkeypatch.setattr(jax_internals, "_substitutes", current := clients[:1])
    _stub(monkeypatch, None)
    monkeypatch.setattr(coordination, "key_value_store", lambda: CountingStore(stores[clients.index(current[0])]))
    before = [Member([0, 1]) for _ in range(2)]
    assert heartbeat._hearts[0].members == before
    _wait(lambda: stores[0].keys)
    assert not stores[1].keys
    current[:] = clients[1:]
    after = Member([0, 1])
    assert heartbeat._hearts[0].members == [after]
    _wait(lambda: stores[1].keys)
    for member in (*before, after):
        member.leave()
    assert not heartbeat._hearts
    assert not stores[1].keys


def test_a_feed_that_is_collected_while_another_joins_hangs_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    _stub(monkeypatch, store)
    monkeypatch.setattr(coordination, "_BRIEFLY_SECONDS", 0.2)
    job = heartbeat._job

    class Feed:
        itself: Any  # only the garbage collector frees it

    def make_and_drop() -> None:
        feed = feed.itself = Feed()
        Membership("feed/dropped", [0, 1]).join(feed)

    def collect(store: Any) -> object:
        gc.collect()
        return job(store)

    gc.collect()
    make_and_drop()
    monkeypatch.setattr(heartbeat, "_job", collect)
    made: list[Member] = []
    joins = threading.Thread(target=lambda: made.append(Member([0, 1])), daemon=True)
    joins.start()
    joins.join(20)
    assert made
    _wait(lambda: heartbeat._hearts[0].members == made)
    made[0].leave()
    assert not [key for key in store.keys if "alive" in key or "watch" in key]


@pytest.mark.parametrize(
    ("substitutes", "said"),
    [
        ([], "process 0, which runs the coordination service of this job, does not answer ({}). JAX will abort"),
        ([object()], "a process, which serves the key-value store of this job, does not answer ({}). The feed raises"),
    ],
)
def test_a_coordinator_that_does_not_answer(
    substitutes: list[object], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error is logged once, unless the job was shut down."""
    monkeypatch.setattr(jax_internals, "_substitutes", substitutes)
    store = CountingStore()
    down = [True]

    def set_(key: str, value: str, *, overwrite: bool = False) -> None:
        if down[0]:
            raise RuntimeError("UNAVAILABLE: failed to connect")
        CountingStore.set(store, key, value, overwrite=overwrite)

    monkeypatch.setattr(store, "set", set_)
    _stub(monkeypatch, store)
    member = Member([0, 1])
    _wait(lambda: caplog.records)
    down[0] = False
    _wait(lambda: store.keys)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith(said.format("UNAVAILABLE: failed to connect"))
    caplog.clear()
    heart = heartbeat._hearts[0]
    heart.job = object()  # as after jax.distributed.shutdown()
    down[0] = True
    assert heart.thread.join(30)
    assert not caplog.records
    member.leave()


def test_hosts_that_no_feed_waits_for_any_more_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = SilenceLog()
    log.update({1: 6.0, 2: 6.0})
    log.forget_all_but([0, 2])  # a feed continues without host 1
    log.update({2: 8.0})
    log.update({})
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["hosts 1, 2", "host 2"]


@pytest.mark.parametrize("beats", [0, 1])
@pytest.mark.parametrize("host", [0, 2])
def test_what_a_host_tells_reaches_the_others_though_it_leaves_and_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, host: int, beats: int
) -> None:
    cluster = Cluster(4)
    cluster.run(10)
    monkeypatch.setattr(heartbeat.coordination, "key_value_store", lambda: cluster.store)
    monkeypatch.setattr(heartbeat.coordination, "process_index", lambda: host)
    heartbeat.tell("interrupted")
    for _ in range(beats):  # before any other host has one
        cluster.pulses[host].beat(1.0, range(4))
    cluster.leave(host)
    cluster.run(8)
    assert all(pulse.told == {host: "interrupted"} for pulse in cluster.pulses.values())
    assert not [key for key in cluster.store.keys if "told" in key]
    cluster.run(30)
    assert not any(pulse.told for pulse in cluster.pulses.values())


def test_a_watcher_that_has_left_before_a_host_came_is_passed_over() -> None:
    cluster = Cluster(3, participants=[1, 2])
    cluster.participants = range(3)  # host 0 has left, or comes much later
    cluster.run(20)
    cluster.run(12, stopped=[1])
    assert set(cluster.known[2]) == {1}


def test_a_host_whose_feeds_name_only_gone_hosts_watches_itself() -> None:
    store = CountingStore()
    pulse = Pulse(store, 1, interval_seconds(2))
    pulse.silent = {0: 100.0}
    assert pulse.beat(1.0, [0]) == {}
    assert pulse.beat(1.0, []) == {}
