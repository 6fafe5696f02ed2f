"""Scenarios over simulated hosts: the real streams, agreement and pipelines, a thread a host, no devices.

A killed host stops where it stands and says nothing more; the others find out by their time-outs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from audit import Seen, audit
from memory_store import MemoryStore
from scenario import DiskGone, Scenario

import meshfeed
from meshfeed._src.agreement.window_report import WindowReports
from meshfeed._src.agreement.windows import WindowAgreement
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.feed.parts import make_stream
from meshfeed._src.feed.pipeline import Pipeline, PrefetchDepth
from meshfeed._src.feed.recorder import StatsRecorder
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.state.state import merge_states, parse_state

TIMEOUT_SECONDS = 6.0


class Killed(Exception):
    """Stands for SIGKILL in a simulated host."""


class Host:
    """One simulated host of one incarnation."""

    def __init__(self, scenario: Scenario, number: int, host: int, store: MemoryStore, state: Any) -> None:
        self.scenario, self.number, self.host, self.store = scenario, number, host, store
        self.plan = scenario.incarnations[number]
        self.state = state
        self.seen: list[Seen] = []
        self.states: dict[int, dict[str, Any]] = {}
        self.error: BaseException | None = None
        self.ended = False
        self.opened = False
        self.steps = 0

    def rows_of(self, size: int) -> np.ndarray:
        share = size // self.plan.hosts
        return np.arange(self.host * share, (self.host + 1) * share)

    def run(self) -> None:
        try:
            self._run()
            self.ended = True
        except BaseException as error:
            self.error = error

    def _run(self) -> None:
        scenario, plan = self.scenario, self.plan
        settings = FeedSettings(**scenario.settings(), timeout_seconds=TIMEOUT_SECONDS)
        stream: Any = make_stream(scenario.source(self.number, self.host), settings, None)  # type: ignore[arg-type]
        cursor = stream.start() if self.state is None else stream.restore(parse_state(self.state))
        agree = plan.hosts > 1
        reader = stream.open_reader(cursor, HostRows(self.rows_of, lambda size: None), hosts_agree=agree)
        self.opened = True
        window_reports = WindowReports(
            first_step=cursor.step, bad_records=None, blocks_of=None, num_rows=lambda size: len(self.rows_of(size))
        )
        agreement = None
        if agree:
            agreement = WindowAgreement(
                self.store,  # type: ignore[arg-type]
                scope=f"run/{self.number}",
                participants=range(plan.hosts),
                host=self.host,
                first_step=cursor.step,
                pad=scenario.kind != "random",
                byte_limit=1 << 30,
                timeout_seconds=TIMEOUT_SECONDS,
                describe=reader.describe,
                reduce=window_reports.reduce,
            )
        pipeline = Pipeline(
            reader,
            lambda tree, size: tree,
            prefetch=PrefetchDepth(scenario.prefetch, "simulated"),
            agreement=agreement,
            window_reports=window_reports,
            cursor=cursor,
            timeout_seconds=TIMEOUT_SECONDS,
            stats=StatsRecorder(),
            name=f"host-{self.host}",
            host=self.host,
        )
        victim = plan.kill_all or plan.victim == self.host
        leaving: str | None = "closed its feed"
        try:
            while True:
                # a collective of the step would hold the survivors; here they come back to next() after it
                if victim and plan.kill_at_step is not None and self.steps >= plan.kill_at_step:
                    leaving = None
                    raise Killed
                try:
                    ready = pipeline.peek()
                except StopIteration:
                    return
                cursor = ready.cursor
                pipeline.pop(ready)
                self.steps += 1
                rows = self.rows_of(scenario.batch)
                real = np.asarray(ready.arrays["mask"])
                ids = np.asarray(ready.arrays["id"])
                self.seen.append(
                    Seen(self.number, ready.batch.step, dict(zip(rows[real].tolist(), ids[real].tolist(), strict=True)))
                )
                if cursor.step % scenario.save_every == 0:
                    self.states[cursor.step] = stream.state(cursor).to_json()
        finally:
            pipeline.close(leaving)


def play(scenario: Scenario) -> dict[str, Any]:
    """Runs a scenario to its end and audits it.

    Raises:
      AssertionError: a record lost or repeated, a hang, or a host that ended otherwise than it should have.
    """
    seen: list[Seen] = []
    state: Mapping[str, Any] | None = None
    kills = failures = 0
    for number, plan in enumerate(scenario.incarnations):
        store = MemoryStore()
        hosts = [Host(scenario, number, host, store, state) for host in range(plan.hosts)]
        threads = [threading.Thread(target=host.run, daemon=True) for host in hosts]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), f"{scenario}: hangs in incarnation {number}"
        assert time.monotonic() - start < 100, f"{scenario}: slow in incarnation {number}"
        check_ends(scenario, hosts)
        for host in hosts:
            seen += host.seen
            kills += isinstance(host.error, Killed)
            failures += isinstance(host.error, DiskGone)
        common = set.intersection(*(set(host.states) for host in hosts)) if hosts else set()
        if common:  # a checkpoint is whole only where all hosts have written their part
            state = merge_states([host.states[max(common)] for host in hosts])
        if all(host.ended for host in hosts):
            break
    figures = audit(seen, scenario.expected())
    return {**figures, "kills": kills, "failures": failures, "incarnations": number + 1}


def check_ends(scenario: Scenario, hosts: list[Host]) -> None:
    """All hosts ended, or each stopped for the reason that it should have."""
    plan = hosts[0].plan
    if all(host.ended for host in hosts):
        assert len({host.steps for host in hosts}) == 1
        return
    for host in hosts:
        expected: tuple[type[BaseException], ...] = (Killed, meshfeed.PeerError, meshfeed.StalledError, DiskGone)
        assert host.ended or isinstance(host.error, expected), f"{scenario}: host {host.host}: {host.error!r}"
    # a feed tells the others of a failure while it opens its data; here nobody does, and they find out by time-outs
    gone = [host for host in hosts if isinstance(host.error, DiskGone)]
    if plan.fails_at_step is not None and gone and all(host.opened for host in gone):
        assert len({host.steps for host in hosts}) == 1, "all hosts deliver the same steps before a failure"
        for host in hosts:
            if host.host != plan.victim:
                assert isinstance(host.error, meshfeed.PeerError), repr(host.error)
                assert host.error.host == plan.victim
                assert "the disk is gone" in str(host.error)
    for host in hosts:
        if isinstance(host.error, meshfeed.StalledError):
            assert plan.victim in host.error.hosts or plan.kill_all, str(host.error)
