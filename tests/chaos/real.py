"""Scenarios over real processes: SIGKILL, real collectives, checkpoints on disk, restarts on another number of hosts."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import tempfile
import time
from typing import Any

from audit import Seen, audit
from scenario import Scenario

from meshfeed.testing import start_hosts

STARTUP_SECONDS = 120
RUN_SECONDS = 120


def train(scenario: Scenario, number: int, folder: str) -> dict[str, Any]:
    """What each host runs: restore, read, a collective a step, a log line a step, a checkpoint now and then."""
    import os

    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    import meshfeed

    host = jax.process_index()
    plan = scenario.incarnations[number]
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    total = jax.jit(lambda x: x.sum())
    log = open(f"{folder}/log-{number}-{host}.jsonl", "a")  # noqa: SIM115  until the end or SIGKILL
    feed = scenario.feed(number, host, mesh, timeout_seconds=40)
    steps = 0
    checkpointer = meshfeed.checkpoint.Checkpointer(f"{folder}/checkpoints", save_interval_steps=scenario.save_every)
    try:
        with checkpointer, feed:
            weights = {"w": np.zeros(3, np.float32)}
            checkpointer.restore(weights, feed)
            for batch in feed:
                float(total(batch["id"]))
                rows = {}
                for shard, mask in zip(batch["id"].addressable_shards, batch["mask"].addressable_shards, strict=True):
                    first = shard.index[0].start or 0
                    for i, (value, real) in enumerate(zip(np.asarray(shard.data), np.asarray(mask.data), strict=True)):
                        if real:
                            rows[str(first + i)] = int(value)
                log.write(json.dumps({"step": feed.step - 1, "rows": rows}) + "\n")
                log.flush()
                steps += 1
                checkpointer.save(feed.step, weights, feed)
                if plan.kill_at_step is not None and steps >= plan.kill_at_step:
                    pathlib.Path(f"{folder}/kill-{number}").touch()
                    if plan.kill_all or plan.victim == host:
                        time.sleep(0.003 * (scenario.seed % 7))
                        os.kill(os.getpid(), signal.SIGKILL)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "steps": steps}
    return {"error": None, "text": "", "steps": steps}


@dataclasses.dataclass
class Outcome:
    """Figures of a scenario that was played."""

    figures: dict[str, int]
    kills: int
    restarts: int
    seconds: float


def play(scenario: Scenario, devices_per_host: int = 1) -> Outcome:
    """Runs a scenario on real processes and audits it.

    Raises:
      AssertionError: a record lost or repeated, or a hang.
    """
    start = time.monotonic()
    kills = number = 0
    with tempfile.TemporaryDirectory(prefix="meshfeed-chaos-") as folder:
        for number, plan in enumerate(scenario.incarnations):
            finished = False
            with start_hosts(
                train,
                scenario,
                number,
                folder,
                num_hosts=plan.hosts,
                devices_per_host=devices_per_host,
                start_timeout_seconds=STARTUP_SECONDS,
            ) as pool:
                deadline = time.monotonic() + RUN_SECONDS
                while any(result is None for result in pool.poll()):
                    assert time.monotonic() < deadline, f"{scenario}: hangs in incarnation {number}"
                    if pathlib.Path(f"{folder}/kill-{number}").exists():
                        time.sleep(0.5)  # what a scheduler does: one host is gone, so the job is ended
                        kills += plan.hosts if plan.kill_all else 1
                        break
                    time.sleep(0.02)
                else:
                    results = [result.value for result in pool.poll() if result is not None]
                    finished = all(value is not None and value["error"] is None for value in results)
                    check_failures(scenario, number, results)
            if finished:
                break
        seen = []
        for path in pathlib.Path(folder).glob("log-*.jsonl"):
            _, incarnation, _ = path.stem.split("-")
            for line in path.read_text().splitlines():
                if line.endswith("}}"):  # the last line of a killed process may be cut
                    entry = json.loads(line)
                    rows = {int(row): record for row, record in entry["rows"].items()}
                    seen.append(Seen(int(incarnation), entry["step"], rows))
        figures = audit(seen, scenario.expected())
    return Outcome(figures, kills, number, time.monotonic() - start)


def check_failures(scenario: Scenario, number: int, results: list[Any]) -> None:
    """A failing disk stops all hosts at one step and is named on the others."""
    plan = scenario.incarnations[number]
    if plan.fails_at_step is None or all(value["error"] is None for value in results):
        return
    assert len({value["steps"] for value in results}) == 1, results
    for host, value in enumerate(results):
        if host == plan.victim:
            assert value["error"] == "DiskGone", results
        else:
            assert value["error"] == "PeerError", results
            assert f"host {plan.victim}" in value["text"], results
