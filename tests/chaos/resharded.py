"""Scenarios in which hosts are killed and the others continue in the same processes, with ``feed.reshard``."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import tempfile
import time
from typing import Any

import real
from audit import Seen, audit
from scenario import Incarnation, Scenario, draw

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
        Over Gloo, a step on more than three hosts does not fail: hosts without a connection to the lost one wait.
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
        noticed = len(left) <= 3 and rng.random() < 0.5
        left.remove(victim)
        ahead = [rng.choice((0, 1, 3)) for _ in range(hosts)]
        ahead[rng.choice(left)] = 0
        losses.append(Loss(step, victim, noticed, tuple(ahead)))
    whole = Incarnation(hosts, None, False, 0, None)  # no failures but these
    stream = dataclasses.replace(draw(seed), num_records=rng.choice((397, 600, 900)), incarnations=(whole,))
    return Plan(stream, hosts, tuple(losses))


def train(plan: Plan, folder: str) -> dict[str, Any]:
    """What each host runs: a collective a step and a log line a step; the process is never restarted."""
    import os
    import signal

    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, Mesh

    import meshfeed

    host, stream = jax.process_index(), plan.stream
    total = jax.jit(lambda x: x.sum())
    log = open(f"{folder}/log-{host}.jsonl", "a")  # noqa: SIM115  until the end or SIGKILL

    def mesh_of(devices: Any) -> Any:
        devices = sorted(devices, key=lambda device: device.process_index)
        return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))

    def devices_left(lost: set[int]) -> list[Any]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with multihost_utils.live_devices(jax.devices()) as live:
                    if not lost & {device.process_index for device in live}:
                        return list(live)
                    time.sleep(0.1)
            except Exception:  # a process failed in the block
                continue
        raise TimeoutError(f"JAX has not noticed the loss of {lost}")

    feed = meshfeed.Feed(
        stream.source(0, host),
        mesh_of(jax.devices()),
        global_batch_size=stream.batch,
        shuffle=stream.kind == "random",
        seed=stream.seed,
        end="pad",
        mask_key="mask",
        num_lanes=stream.num_lanes if stream.kind == "stream" else None,
        prefetch=stream.prefetch,
        retry=meshfeed.Retry(attempts=60, initial_seconds=0.001, max_seconds=0.01),
        timeout_seconds=30,
        name="train",
    )
    losses = list(plan.losses)
    state = feed.get_state()
    lost: set[int] = set()
    seconds: list[tuple[bool, float]] = []
    resumed: tuple[bool, float] | None = None

    def step(batch: Any) -> None:
        float(total(batch["id"]))
        rows = {}
        for shard, mask in zip(batch["id"].addressable_shards, batch["mask"].addressable_shards, strict=True):
            first = shard.index[0].start or 0
            for i, (value, real_row) in enumerate(zip(np.asarray(shard.data), np.asarray(mask.data), strict=True)):
                if real_row:
                    rows[str(first + i)] = int(value)
        log.write(json.dumps({"step": feed.step - 1, "rows": rows}) + "\n")
        log.flush()

    while True:
        due = losses[0] if losses and feed.step >= losses[0].step else None
        try:
            if due is not None and due.host == host:
                pathlib.Path(f"{folder}/killed-{host}").write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            if due is not None and not due.noticed:
                for _ in range(due.ahead[host]):
                    next(feed, None)
                raise RuntimeError("the plan says so")
            batch = next(feed, None)
            if batch is None:
                break
            if resumed is not None:
                seconds.append((resumed[0], time.time() - resumed[1]))
                resumed = None
            step(batch)
            state = feed.get_state()
        except Exception as error:
            if due is None:
                return {"error": f"{type(error).__name__}: {error}", "seconds": seconds}
            losses.pop(0)
            lost.add(due.host)
            while not (marker := pathlib.Path(f"{folder}/killed-{due.host}")).exists() or not marker.read_text():
                time.sleep(0.01)  # the victim has not come to its death yet
            if due.noticed:
                feed.set_state(state)  # the last step that all hosts have finished
                left = devices_left(lost)
            else:
                left = [device for device in jax.devices() if device.process_index not in lost]
            feed.reshard(mesh_of(left))
            resumed = due.noticed, float(marker.read_text())
    feed.close()
    return {"error": None, "seconds": seconds}


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
        values = [result.value for result in results if result is not None and str(result.host) not in killed]
        assert all(value is not None and value["error"] is None for value in values), (plan, results)
        seen = []
        for path in pathlib.Path(folder).glob("log-*.jsonl"):
            for line in path.read_text().splitlines():
                if line.endswith("}}"):  # the last line of a killed process may be cut
                    entry = json.loads(line)
                    seen.append(Seen(0, entry["step"], {int(row): record for row, record in entry["rows"].items()}))
        figures = audit(seen, plan.stream.expected())
    times = [pair for value in values for pair in value["seconds"]]
    return Outcome(figures, len(killed), [s for n, s in times if not n], [s for n, s in times if n])
