"""Checks sources on several numbers of simulated hosts: the same batches on each, and resume on each from another.

The configurations of tests/model resume from each number on each, with one source of each kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import simulated_hosts
import source_jobs

from meshfeed.testing import fake_devices

TOPOLOGIES = {1: 4, 2: 2, 3: 2, 4: 1}
"""Number of hosts → devices of each."""
Steps = list[dict[int, str]]
_SECONDS = 550.0  # less than pytest's limit, to say which host hangs


class SourceTopologies:
    """The sources ``names`` on each number of hosts.

    Attributes:
      steps: source → rows of every step, the same on any number of hosts.
      positions: source → position at the end.
      states: source → number of hosts → the merged state after ``save_at`` steps.
    """

    def __init__(self, make_feed: Callable[..., Any], names: Sequence[str], save_at: int) -> None:
        self._make_feed, self._save_at = make_feed, save_at
        self.steps: dict[str, Steps] = {}
        self.positions: dict[str, int] = {}
        self.states: dict[str, dict[int, str]] = {name: {} for name in names}
        for hosts in TOPOLOGIES:
            found = self._on(hosts, source_jobs.run, names, save_at)
            for name in names:
                parts = [part[name] for part in found]
                steps = source_jobs.join([part["steps"] for part in parts])
                assert steps == self.steps.setdefault(name, steps), f"{name} on {hosts} hosts"
                assert len(steps) > save_at, name
                (position,) = {part["position"] for part in parts}
                assert position == self.positions.setdefault(name, position), f"{name} on {hosts} hosts"
                self.states[name][hosts] = source_jobs.merged([part["state"] for part in parts])

    def _on(self, hosts: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        def on_host(host: int) -> Any:
            devices = fake_devices(hosts, TOPOLOGIES[hosts], this_process=host)
            return function(functools.partial(self._make_feed, devices=devices), *arguments)

        with simulated_hosts.simulation():
            return simulated_hosts.run(hosts, on_host, _SECONDS)

    def resume(self) -> None:
        """Resumes on each number of hosts, from one state after the other."""
        states = {name: sorted(set(by_hosts.values())) for name, by_hosts in self.states.items()}
        for turn, hosts in enumerate(TOPOLOGIES):
            chosen = {name: [s[turn % len(s)]] for name, s in states.items()}
            found = self._on(hosts, source_jobs.go_on, chosen)
            for name in chosen:
                steps = source_jobs.join([part[name][0] for part in found])
                assert steps == self.steps[name][self._save_at :], f"{name}: state {turn} on {hosts} hosts"

    def resume_with_workers(self, names: Sequence[str] | None = None) -> None:
        """Resumes the states of 3 hosts in this process, with two workers for a step and then with one.

        ``names`` are the sources, None for all.
        """
        make_feed = functools.partial(self._make_feed, devices=jax.devices()[: TOPOLOGIES[1]])
        states = {name: self.states[name][3] for name in names or self.states}
        found = source_jobs.go_on_with_workers(make_feed, states, [2, 1], [1, None])
        for name in states:
            assert found[name] == self.steps[name][self._save_at :], name
