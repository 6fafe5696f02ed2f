"""Simulated hosts that are lost, left out or taken in while a feed runs, and what the others deliver afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

import simulated_hosts
from jax.sharding import AxisType, Mesh

import meshfeed
from meshfeed._src.plan.topology import fake_devices

Rows = dict[int, int]
"""Row of the global batch → record."""


class Killed(Exception):
    """Raised in a process that is dead, which no test sees."""


class Store:
    """The job's key-value store, which killed hosts no longer reach."""

    def __init__(self, store: Any, here: Any) -> None:
        self._store, self._here = store, here
        self.dead: set[int] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._here.host in self.dead:
                raise Killed(name)
            return method(*args, **kwargs)

        return call


class Job:
    """A job of simulated hosts; make it within :func:`simulated_hosts.simulation`."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.job = simulated_hosts.Job(processes)
        self.job.store = self.store = Store(self.job.store, simulated_hosts._current[-1])
        self.killed: list[int] = []
        self.remains: list[Any] = []  # a killed process closes nothing

    @property
    def here(self) -> int:
        """The host that this thread is."""
        return simulated_hosts._current[-1].host

    def run(self, function: Callable[[int], Any], seconds: float = 60.0) -> list[Any]:
        """Calls ``function(host)`` as each host; see :func:`simulated_hosts.run`."""
        return simulated_hosts.run(self.processes, function, seconds, job=self.job)

    def kill(self, host: int, feed: meshfeed.Feed) -> None:
        self.store.dead.add(host)
        self.killed.append(host)
        self.remains.append(feed)

    def clean_up(self) -> None:
        """Ends the threads of killed processes, which had no time to."""
        for feed in self.remains:
            for finalizer in vars(feed)["meshfeed_finalizers"]._due:
                finalizer.detach()
        here = simulated_hosts._current[-1]
        for host, feed in zip(self.killed, self.remains, strict=True):
            here.job, here.host = self.job, host
            if feed._pipeline is not None:
                feed._pipeline.close()
            if feed._membership._heartbeat is not None:
                feed._membership._heartbeat.leave()
        here.job, here.host = None, 0
        self.remains.clear()

    def devices(self, host: int, hosts: Sequence[int], per_host: int = 1) -> list[Any]:
        found = fake_devices(self.processes, per_host, this_process=host)
        return [device for device in found if device.process_index in hosts]

    def mesh(self, host: int, hosts: Sequence[int], per_host: int = 1) -> Mesh:
        return Mesh(np.array(self.devices(host, hosts, per_host)), ("data",), axis_types=(AxisType.Auto,))


@contextlib.contextmanager
def job_of(processes: int) -> Iterator[Job]:
    with simulated_hosts.simulation(quiet=False):
        job = Job(processes)
        yield job
        job.clean_up()


def rows_of(batch: Any) -> Rows:
    """This host's real rows of a batch, also of one whose rows still lie where they were read (load="once")."""
    ids = batch["id"]
    if isinstance(ids, tuple):
        loaded, spec = ids
        return {row: value for row, value in _rows_of(loaded) if row < spec.shape[0]}
    masks = {} if "mask" not in batch else dict(_rows_of(batch["mask"]))
    return {row: value for row, value in _rows_of(ids) if masks.get(row, True)}


def _rows_of(array: Any) -> Iterator[tuple[int, int]]:
    for shard in array.addressable_shards:
        first = shard.index[0].start or 0
        for number, value in enumerate(np.asarray(shard.data)):
            yield first + number, int(value)


def join(parts: Sequence[Sequence[Rows]]) -> list[Rows]:
    """Joins what hosts delivered of the same steps; replicas must agree."""
    assert len({len(part) for part in parts}) == 1, [len(part) for part in parts]
    steps: list[Rows] = []
    for batches in zip(*parts, strict=True):
        whole: Rows = {}
        for rows in batches:
            for row, value in rows.items():
                assert whole.setdefault(row, value) == value
        steps.append(whole)
    return steps


@dataclasses.dataclass
class Numbers:
    """A stream of lanes whose state is its position; lane i has ``lengths[i]`` records. Counts what it gives."""

    lengths: Sequence[int]
    resumable: bool = True

    def __post_init__(self) -> None:
        self.given = [0] * len(self.lengths)  # by lane

    def open(self, lane_index: int, num_lanes: int) -> Iterator[dict[str, np.ndarray]]:
        lane = _Lane(self, lane_index)
        return lane if self.resumable else (record for record in lane)

    def fingerprint(self) -> str:
        return "numbers"


class _Lane:
    def __init__(self, numbers: Numbers, lane: int) -> None:
        self._numbers, self._lane, self._position = numbers, lane, 0

    def __iter__(self) -> _Lane:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._position >= self._numbers.lengths[self._lane]:
            raise StopIteration
        self._position += 1
        self._numbers.given[self._lane] += 1
        return {"id": np.int32(self._lane << 16 | self._position - 1)}

    def get_state(self) -> int:
        return self._position

    def set_state(self, state: int) -> None:
        self._position = state


def reference(make_source: Callable[[], Any], **settings: Any) -> list[Rows]:
    """The whole stream, read by one host."""
    with job_of(1) as job:

        def read(host: int) -> list[Rows]:
            with meshfeed.Feed(make_source(), job.mesh(0, [0]), **settings) as feed:
                return [rows_of(batch) for batch in feed]

        return job.run(read)[0]
