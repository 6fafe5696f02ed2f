"""Scenarios in which hosts are killed and the others continue in the same processes, with ``feed.reshard``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import real
from audit import Seen, audit
from scenario import Incarnation, Scenario, draw

import meshfeed
from meshfeed.testing import start_hosts

HEARTBEAT_SECONDS = 10
RUN_SECONDS = 180


@dataclasses.dataclass(frozen=True)
class Loss:
    """A host that is killed.

    Attributes:
      step: after which it kills itself.
      host: which.
      noticed: the others go on until a step or the feed fails, and then find out who is left; else they reshard at once.
        Over Gloo, a step fails only on hosts that wait for the lost one itself; those that wait for another host hang.
      ahead: batches that each host takes before it reshards at once.
    """

    step: int
    host: int
    noticed: bool
    ahead: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A scenario of one job: its stream, its hosts, and which of them are lost."""

    stream: Scenario
    hosts: int
    losses: tuple[Loss, ...]


def draw_plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"reshard {seed}")
    hosts = rng.randint(2, 4)
    left, step, losses = list(range(hosts)), 0, []
    for _ in range(rng.randint(1, hosts - 1)):
        step += rng.randint(1, 9)
        victim = rng.choice([host for host in left if host])  # process 0 has the coordination service
        all_wait_for_it = len(left) == 2 or left[1:-1] == [victim]
        noticed = all_wait_for_it and rng.random() < 0.7
        left.remove(victim)
        ahead = [rng.choice((0, 1, 3)) for _ in range(hosts)]
        ahead[rng.choice(left)] = 0
        losses.append(Loss(step, victim, noticed, tuple(ahead)))
    whole = Incarnation(hosts, None, False, 0, None)  # no failures but these
    stream = dataclasses.replace(draw(seed), num_records=rng.choice((397, 600, 900)), incarnations=(whole,))
    return Plan(stream, hosts, tuple(losses))


class Host:
    """One host: takes a collective step with each batch, and logs the batch; its process is never restarted."""

    def __init__(self, plan: Plan, folder: str) -> None:
        import jax

        stream = plan.stream
        self.host, self.folder = jax.process_index(), pathlib.Path(folder)
        self.losses, self.lost = list(plan.losses), set[int]()
        self.seconds: list[tuple[bool, float]] = []  # noticed, seconds from the kill to the next batch
        self.killed: tuple[bool, float] | None = None  # noticed, time
        self.total = jax.jit(lambda x: x.sum())
        self.log = open(f"{folder}/log-{self.host}.jsonl", "a")  # noqa: SIM115  until the end or SIGKILL
        self.feed = stream.feed(0, self.host, mesh_of(jax.devices()), timeout_seconds=30)
        self.state = self.feed.get_state()

    def train(self) -> list[tuple[bool, float]]:
        """Runs to the end of the stream."""
        more = True
        while more:
            due = self.losses[0] if self.losses and self.feed.step >= self.losses[0].step else None
            if due is not None and due.host == self.host:
                self.marker(due.host).write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            if due is not None and not due.noticed:
                with contextlib.suppress(meshfeed.PeerError):  # another host has called reshard
                    for _ in range(due.ahead[self.host]):
                        next(self.feed, None)
                self.go_on_without(due)
                continue
            try:
                more = self.step()
            except Exception:
                if due is None:
                    raise
                self.feed.set_state(self.state)  # after the last step that ended here
                self.go_on_without(due)
        self.feed.close()
        return self.seconds

    def step(self) -> bool:
        """Takes a step; returns whether there was a batch."""
        import numpy as np

        batch = next(self.feed, None)
        if batch is None:
            return False
        if self.killed is not None:
            self.seconds.append((self.killed[0], time.time() - self.killed[1]))
            self.killed = None
        float(self.total(batch["id"]))
        rows = {}
        for shard, mask in zip(batch["id"].addressable_shards, batch["mask"].addressable_shards, strict=True):
            first = shard.index[0].start or 0
            for i, (value, is_real) in enumerate(zip(np.asarray(shard.data), np.asarray(mask.data), strict=True)):
                if is_real:
                    rows[str(first + i)] = int(value)
        self.log.write(json.dumps({"step": self.feed.step - 1, "rows": rows}) + "\n")
        self.log.flush()
        self.state = self.feed.get_state()
        return True

    def go_on_without(self, loss: Loss) -> None:
        """Continues on the hosts that are left."""
        import jax

        self.losses.remove(loss)
        self.lost.add(loss.host)
        while not self.marker(loss.host).exists() or not self.marker(loss.host).read_text():
            time.sleep(0.01)  # the victim has not come to its death yet
        self.killed = loss.noticed, float(self.marker(loss.host).read_text())
        devices = self.devices_left() if loss.noticed else jax.devices()
        self.feed.reshard(mesh_of([device for device in devices if device.process_index not in self.lost]))

    def devices_left(self) -> list[Any]:
        """Waits until JAX has noticed the loss."""
        import jax
        from jax.experimental import multihost_utils

        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(Exception),
                multihost_utils.live_devices(jax.devices()) as live,
            ):  # a process failed
                if not self.lost & {device.process_index for device in live}:
                    return list(live)
                time.sleep(0.1)
        raise TimeoutError(f"JAX has not noticed the loss of {self.lost}")

    def marker(self, host: int) -> pathlib.Path:
        """The file in which a host writes when it kills itself."""
        return self.folder / f"killed-{host}"


def mesh_of(devices: Sequence[Any]) -> Any:
    """A mesh over the devices, in the order of their hosts."""
    import numpy as np
    from jax.sharding import AxisType, Mesh

    devices = sorted(devices, key=lambda device: device.process_index)
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def train(plan: Plan, folder: str) -> list[tuple[bool, float]]:
    """What each host runs; returns its :attr:`Host.seconds`."""
    return Host(plan, folder).train()


@dataclasses.dataclass
class Outcome:
    """Figures of a plan that was played, and the seconds from each kill to the next batch: planned, noticed."""

    figures: dict[str, int]
    kills: int
    planned: list[float]
    noticed: list[float]


def play(plan: Plan) -> Outcome:
    """Plays a plan on real processes and audits it.

    Raises:
      AssertionError: a record lost or repeated, a host that did not finish, or a hang.
    """
    with tempfile.TemporaryDirectory(prefix="meshfeed-reshard-") as folder:
        with start_hosts(
            train,
            plan,
            folder,
            num_hosts=plan.hosts,
            devices_per_host=1,
            recoverability=True,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            start_timeout_seconds=real.STARTUP_SECONDS,
        ) as pool:
            deadline = time.monotonic() + RUN_SECONDS
            while any(result is None for result in pool.poll()):
                assert time.monotonic() < deadline, f"{plan}: hangs"
                time.sleep(0.02)
            results = pool.poll()
        killed = {path.name.partition("-")[2] for path in pathlib.Path(folder).glob("killed-*")}
        left = [result for result in results if result is not None and str(result.host) not in killed]
        assert all(result.error is None for result in left), (plan, results)
        seen = []
        for path in pathlib.Path(folder).glob("log-*.jsonl"):
            for line in path.read_text().splitlines():
                if line.endswith("}}"):  # the last line of a killed process may be cut
                    entry = json.loads(line)
                    seen.append(Seen(0, entry["step"], {int(row): record for row, record in entry["rows"].items()}))
        figures = audit(seen, plan.stream.expected())
    times = [pair for result in left for pair in result.value]
    return Outcome(figures, len(killed), [s for n, s in times if not n], [s for n, s in times if n])
