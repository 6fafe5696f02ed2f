"""The heartbeat of hosts by a clock of the test, against what each host could have seen."""

from __future__ import annotations

import logging
import random
import threading
import time

import pytest
import simulated_hosts
from memory_store import MemoryStore

from meshfeed._src.agreement import heartbeat
from meshfeed._src.base import coordination

INTERVAL, LIMIT = 2.0, 5.0


def test_the_interval_grows_with_the_hosts() -> None:
    assert heartbeat.interval_seconds(2) == heartbeat.interval_seconds(2500) == INTERVAL
    assert heartbeat.interval_seconds(25_000) == 20.0


class Hosts:
    """Hosts that beat every interval, each at its own phase. The lowest that has begun and is not gone watches."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.store, self.now = rng, MemoryStore(), 0.0
        self.numbers = sorted(rng.sample(range(9), rng.randint(2, 5)))
        self.pulses = {host: heartbeat.Pulse(self.store, host, INTERVAL) for host in self.numbers}
        self.due = {host: rng.random() * INTERVAL for host in self.numbers}
        self.last = dict(self.due)
        self.counted = dict.fromkeys(self.numbers, 0)
        self.stopped: set[int] = set()  # suspended
        self.seen: dict[int, tuple[int, float]] = {}  # by the watcher: host → its count, and seconds without a change
        self.published: dict[int, float] = {}
        self.found: dict[int, dict[int, float]] = {}  # host → what its last beat returned

    def step(self) -> int:
        """Lets the host that is due beat; returns it."""
        host = min((host for host in self.due if host not in self.stopped), key=self.due.__getitem__)
        self.now = max(self.now, self.due[host])
        elapsed, self.last[host], self.due[host] = self.now - self.last[host], self.now, self.now + INTERVAL
        self.counted[host] += 1
        self.found[host] = self.pulses[host].beat(elapsed, self.numbers)
        if host == self.numbers[0]:
            self._watch(min(elapsed, 2 * INTERVAL))
        return host

    def _watch(self, elapsed: float) -> None:
        for host in self.numbers:
            count, silence = self.seen.get(host, (self.counted[host], 0.0))
            known = host in self.seen
            if self.counted[host] and host in self.due:
                since = silence + elapsed if known and count == self.counted[host] else 0.0
                self.seen[host] = self.counted[host], since
            else:
                self.seen.pop(host, None)
        self.published = {host: since for host, (_, since) in self.seen.items() if since >= LIMIT}


@pytest.mark.parametrize("seed", range(12))
def test_hosts_name_those_that_the_watcher_has_not_seen_for_some_time(seed: int) -> None:
    rng = random.Random(seed)
    hosts = Hosts(rng)
    watcher, others = hosts.numbers[0], hosts.numbers[1:]
    told = 0
    for number in range(150):
        if number % 15 == 14:
            host = rng.choice(others)
            if host in hosts.stopped:
                hosts.stopped.discard(host)
            elif rng.random() < 0.15 and host in hosts.due and len(hosts.due) > 2:
                hosts.pulses[host].leave()
                del hosts.due[host]
            else:
                hosts.stopped.add(host)
        before = dict(hosts.published)
        host = hosts.step()
        wanted = hosts.published if host == watcher else before
        found = {one: round(seconds, 6) for one, seconds in hosts.found[host].items()}
        assert found == {one: round(seconds, 6) for one, seconds in wanted.items() if one != host}, (number, host)
        told += bool(found)
    assert told


@pytest.mark.parametrize("seed", range(12))
def test_another_host_watches_if_the_watcher_stops_or_leaves(seed: int) -> None:
    rng = random.Random(seed)
    hosts = Hosts(rng)
    while len(hosts.numbers) < 3:
        hosts = Hosts(rng)
    for _ in range(20):
        hosts.step()
    first, second = hosts.numbers[:2]
    leaves = seed % 2 == 0
    at = hosts.now
    if leaves:
        hosts.pulses[first].leave()
        del hosts.due[first]
    else:
        hosts.stopped.add(first)
    while hosts.now < at + 12:
        hosts.step()
        assert all(set(found) <= {first} for found in hosts.found.values())
    rest = [host for host in hosts.due if host != first]
    assert all(set(hosts.found[host]) == (set() if leaves else {first}) for host in rest)
    third, at = hosts.numbers[-1], hosts.now
    hosts.stopped.add(third)
    while hosts.now < at + 9:
        host = hosts.step()
        if hosts.now < at + LIMIT - INTERVAL:
            assert third not in hosts.found[host]
    for host in rest:
        assert host == third or third in hosts.found[host]
        assert host == third or LIMIT <= hosts.found[host][third] <= 9 + 2 * INTERVAL
    hosts.stopped.discard(first)  # which was only suspended
    hosts.stopped.discard(third)
    at = hosts.now
    while hosts.now < at + 8:
        hosts.step()
    assert all(not hosts.found[host] for host in hosts.due)
    for host in hosts.due:
        hosts.pulses[host].leave()
    assert hosts.store.keys() == []
    assert second in rest


@pytest.mark.parametrize("seed", range(8))
def test_entries_of_the_log(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng, log = random.Random(seed), heartbeat.SilenceLog()
    before: dict[int, float] = {}
    for _ in range(60):
        now = {host: seconds + rng.choice([0.0, 2.0, 7.0]) for host, seconds in before.items() if rng.random() < 0.9}
        now |= {host: 5.0 + rng.random() for host in range(3) if host not in before and rng.random() < 0.2}
        caplog.clear()
        with caplog.at_level(logging.INFO, "meshfeed.agree"):
            log.update(now)
        new = [host for host in now if host not in before]
        due = [h for h in now if h in before and any(before[h] < limit <= now[h] for limit in (20.0, 40.0, 80.0))]
        back = [host for host in before if host not in now]
        wanted = [
            *([(logging.WARNING, new, f"{max(now[h] for h in new):.0f} s")] if new else []),
            *([(logging.ERROR, due, f"{max(now[h] for h in due):.0f} s")] if due else []),
            *([(logging.WARNING, back, "alive again")] if back else []),
        ]
        assert len(caplog.records) == len(wanted)
        for record, (level, hosts, words) in zip(caplog.records, wanted, strict=True):
            text = record.getMessage()
            assert record.levelno == level
            assert text.startswith(f"{coordination.format_hosts(hosts)}: ")
            assert words in text
            assert words == "alive again" or "JAX will abort" in text
        before = now


def test_hosts_log_who_was_killed_and_leave_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "interval_seconds", lambda num_hosts: 0.02 * num_hosts)
    monkeypatch.setattr(heartbeat, "_SILENT_SECONDS", 0.6)
    together, told, job = threading.Barrier(3), threading.Event(), simulated_hosts.Job(4)

    def run(host: int) -> None:
        if host == 3:
            assert heartbeat.Member([3])._heart is None  # alone
            return
        members = [heartbeat.Member(range(3)) for _ in range(2)]  # of two feeds, which share a thread
        hearts = {member._heart for member in members}
        assert len(hearts) == 1
        heart = hearts.pop()
        assert heart is not None
        together.wait(20)
        members[0].leave()
        members[0].leave()
        assert heart.members == members[1:]
        time.sleep(0.2)
        assert str(host) in job.store.directory("meshfeed/alive")
        together.wait(20)
        if host == 2:  # as if it were killed
            heart._pulse.beat = lambda elapsed, participants: {}  # type: ignore[method-assign]
            assert told.wait(20)
        end = time.monotonic() + 20
        while host != 2 and not any("host 2: no sign" in record.getMessage() for record in list(caplog.records)):
            assert time.monotonic() < end
            time.sleep(0.01)
        if host == 1:
            told.set()
        together.wait(20)
        start = time.monotonic()
        members[1].leave()
        assert time.monotonic() - start < 1.5  # it is woken
        assert host not in heartbeat._hearts

    with caplog.at_level(logging.INFO, "meshfeed.agree"), simulated_hosts.simulation(quiet=False):
        simulated_hosts.run(4, run, job=job)
    assert job.store.keys() == []
    texts = [record.getMessage() for record in caplog.records]
    assert all("host 2: " in text for text in texts), texts
