"""Checks sources on several numbers of real hosts: the same batches on each, and resume from each on each."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import source_jobs

from meshfeed.testing import HostPool


def play(
    processes: Mapping[int, Sequence[int]], pipelines: str, folder: str, job: str, *arguments: Any
) -> dict[int, Any]:
    """Runs on each process: a job of ``source_jobs`` on every number of hosts that the process plays."""
    import jax

    make_feed = importlib.import_module(pipelines).make_feed
    found = {}
    for hosts, indices in processes.items():
        if jax.process_index() in indices:
            devices = [device for device in jax.devices() if device.process_index in indices]

            # Feeds of one name on other devices would take each other's messages.
            def make(name: str, devices: Any = devices, **options: Any) -> Any:
                return make_feed(name, folder, devices, name=f"{name} on {len(devices)} devices", **options)

            found[hosts] = getattr(source_jobs, job)(make, *arguments)
    return found


class RealTopologies:
    """The sources ``names`` on each number of hosts, which processes of one job play.

    Attributes:
      steps: source → rows of every step, the same on any number of hosts.
    """

    def __init__(
        self,
        pool: HostPool,
        processes: Mapping[int, Sequence[int]],
        pipelines: str,
        folder: str,
        names: Sequence[str],
        save_at: int,
    ) -> None:
        self._run = functools.partial(pool.run, play, processes, pipelines, folder)
        self._processes, self._names, self._save_at = processes, names, save_at
        self._runs = self._by_hosts("run", names, save_at)
        self.steps = {name: self._steps(name, min(processes)) for name in names}

    def _by_hosts(self, job: str, *arguments: Any) -> dict[int, list[Any]]:
        values = [result.value for result in self._run(job, *arguments)]
        return {hosts: [values[index][hosts] for index in indices] for hosts, indices in self._processes.items()}

    def _steps(self, name: str, hosts: int) -> list[dict[int, str]]:
        return source_jobs.join([part[name]["steps"] for part in self._runs[hosts]])

    def check_batches(self) -> None:
        """The batches are the same on any number of hosts."""
        for name in self._names:
            assert len(self.steps[name]) > self._save_at
            assert {part[name]["position"] for parts in self._runs.values() for part in parts} == {
                self._runs[min(self._processes)][0][name]["position"]
            }
            for hosts in self._processes:
                assert self._steps(name, hosts) == self.steps[name], f"{name} on {hosts} hosts"

    def _states(self, origin: int) -> dict[str, str]:
        return {name: source_jobs.merged([part[name]["state"] for part in self._runs[origin]]) for name in self._names}

    def check_resume(self) -> None:
        """Each number of hosts continues from the state of each."""
        origins = {origin: self._states(origin) for origin in self._processes}
        states = {name: [origins[origin][name] for origin in origins] for name in self._names}
        found = self._by_hosts("go_on", states)
        for name in self._names:
            for target in self._processes:
                for number, origin in enumerate(origins):
                    steps = source_jobs.join([part[name][number] for part in found[target]])
                    assert steps == self.steps[name][self._save_at :], f"{name}: {origin} → {target} hosts"

    def check_resume_with_workers(
        self, names: Sequence[str], num_workers: Sequence[int], steps: Sequence[int | None]
    ) -> None:
        """Each number of hosts continues from the state of the largest, with one number of workers after the other."""
        states = self._states(max(self._processes))
        found = self._by_hosts("go_on_with_workers", {name: states[name] for name in names}, num_workers, steps)
        for name in names:
            for hosts in self._processes:
                joined = source_jobs.join([part[name] for part in found[hosts]])
                assert joined == self.steps[name][self._save_at :], f"{name} on {hosts} hosts"
