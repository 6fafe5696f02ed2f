"""What it costs that hosts agree: waiting per step on a healthy run, and the load on one coordination service.

The first table trains (sleeps) 20 ms per step on real processes, with agreement and, in the same run, with a feed of each
host for itself. The second drives the real protocol of thousands of hosts against the real coordination service of a JAX
job; few threads play all of them, in real time.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks._measure import Table, main

STEP_SECONDS = 0.02


def healthy(steps: int, rounds: int) -> dict[str, float]:
    """Median seconds waited a step with and without other hosts, rounds interleaved."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    import meshfeed

    rows = {"x": np.zeros((64 * 1024, 512), np.float32)}
    everyone = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    alone = Mesh(np.array(jax.local_devices()), ("data",), axis_types=(AxisType.Auto,))
    feeds = {
        "agreed": meshfeed.MultiHostDataLoadIterator(
            rows, everyone, global_batch_size=32 * jax.process_count(), shuffle=True, num_epochs=None, name="agreed"
        ),
        "alone": meshfeed.MultiHostDataLoadIterator(
            rows, alone, global_batch_size=32, shuffle=True, num_epochs=None, name=f"alone-{jax.process_index()}"
        ),
    }
    waits: dict[str, list[float]] = {name: [] for name in feeds}
    for feed in feeds.values():
        for _ in range(20):
            next(feed)
    for _ in range(rounds):
        for name, feed in feeds.items():
            waited = 0.0
            for _ in range(steps):
                start = time.perf_counter()
                next(feed)
                waited += time.perf_counter() - start
                time.sleep(STEP_SECONDS)
            waits[name].append(waited / steps)
    for feed in feeds.values():
        feed.close()
    return {name: statistics.median(values) for name, values in waits.items()}


class Counted:
    """The key-value store of the job, with its calls counted: each is one request to the coordination service."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.calls: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls[name] += 1
            return call(*args, **kwargs)

        return counted


def simulate(num_hosts: int, windows: int, threads: int) -> dict[str, Any]:
    """This process's share of ``num_hosts`` simulated hosts, each on the real protocol over the real service.

    A thread plays many hosts, one after the other: at the end of a window each publishes the one that it has read
    meanwhile and takes the announcement of the next, as a feed on a healthy run does. Windows come in real time, at 20 ms
    a step, and the count begins when they have their full length.
    """
    import jax
    from jax.experimental import multihost_utils

    from meshfeed._src.agreement.messages import WindowReport
    from meshfeed._src.agreement.windows import WindowAgreement, full_window
    from meshfeed._src.base import coordination

    real = coordination.key_value_store()
    assert real is not None
    store = Counted(real)
    here, processes = jax.process_index(), jax.process_count()
    size = full_window(num_hosts, 1, 1 << 30)
    period = size * STEP_SECONDS
    waits: list[float] = []
    busy: list[float] = []
    spans: list[tuple[float, float]] = []
    counts: list[collections.Counter[str]] = []

    def begin_together() -> None:
        multihost_utils.sync_global_devices(f"simulated {num_hosts}")
        store.calls.clear()

    everybody = range(num_hosts)
    shares = [everybody[here::processes][thread::threads] for thread in range(threads)]
    begin = threading.Barrier(threads, begin_together)
    end = threading.Barrier(threads, lambda: counts.append(collections.Counter(store.calls)))

    def play(hosts: Sequence[int]) -> None:
        agreements = [
            WindowAgreement(
                store,  # type: ignore[arg-type]
                scope=f"simulated/{num_hosts}",
                participants=everybody,
                host=index,
                first_step=0,
                pad=False,
                byte_limit=1 << 40,
                timeout_seconds=300,
                describe=lambda: "simulated",
                reduce=lambda reports, first, end: ({}, None),
            )
            for index in hosts
        ]
        for agreement in agreements:
            agreement.publish(WindowReport(1, contents={"bytes": 1}))
        step = 0
        for agreement in agreements:
            agreement.wait_for(0)
        while True:  # the short first windows
            ends = {agreement.window_end for agreement in agreements}
            assert len(ends) == 1
            following = ends.pop()
            for agreement in agreements:
                agreement.publish(WindowReport(following))
            for agreement in agreements:
                agreement.wait_for(following - 1)
            if following - step == size:
                break
            step = following
        for agreement in agreements:
            agreement.publish(WindowReport(agreement.window_end))  # read ahead
        step = following
        begin.wait()
        begun = time.monotonic()
        for number in range(windows):
            start = time.monotonic()
            for agreement in agreements:
                agreement.publish(WindowReport(agreement.window_end))
            for agreement in agreements:
                asked = time.monotonic()
                agreement.wait_for(step)
                waits.append(time.monotonic() - asked)
            busy.append(time.monotonic() - start)
            step += size
            time.sleep(max(0.0, begun + (number + 1) * period - time.monotonic()))
        spans.append((begun, time.monotonic()))
        end.wait()
        for agreement in agreements:
            agreement.close()

    threading.stack_size(512 * 1024)
    players = [threading.Thread(target=play, args=(share,), daemon=True) for share in shares]
    for player in players:
        player.start()
    for player in players:
        player.join()
    waits.sort()
    return {
        "calls": dict(counts[0]),
        "seconds": max(stop for _, stop in spans) - min(start for start, _ in spans),
        "window": size,
        "busy": max(busy),
        "median_wait": statistics.median(waits),
        "p99_wait": waits[int(len(waits) * 0.99)],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4], help="real processes")
    parser.add_argument("--simulated", type=int, nargs="*", default=[256, 1024, 4096], help="simulated hosts")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--processes", type=int, default=2, help="that play the simulated hosts")
    parser.add_argument("--threads", type=int, default=8, help="in each of them")


def measure(options: argparse.Namespace) -> list[Table]:
    from meshfeed.testing import HostPool

    waits, loads = [], []
    for hosts in options.hosts:
        with HostPool(hosts, 2, timeout_seconds=600) as pool:
            values = [result.value for result in pool.run(healthy, options.steps, options.rounds)]
        alone, agreed = (statistics.mean(value[name] for value in values) for name in ("alone", "agreed"))
        share = f"{(agreed - alone) / STEP_SECONDS:.2%}"
        waits.append({"hosts": hosts, "alone, µs": alone * 1e6, "agreed, µs": agreed * 1e6, "added, of a step": share})
    if options.simulated:
        with HostPool(options.processes, 1, timeout_seconds=900) as pool:
            for hosts in options.simulated:
                values = [result.value for result in pool.run(simulate, hosts, options.windows, options.threads)]
                calls = sum((collections.Counter(value["calls"]) for value in values), collections.Counter())
                window = values[0]["window"]
                due = options.windows * window * STEP_SECONDS
                median, p99 = (statistics.mean(v[key] for v in values) * 1e3 for key in ("median_wait", "p99_wait"))
                loads.append(
                    {
                        "hosts": hosts,
                        "steps per window": window,
                        "requests per host and window": calls.total() / hosts / options.windows,
                        "requests/s at 20 ms per step": calls.total() / due,
                        "measured over, s": max(value["seconds"] for value in values),
                        "of which due, s": due,
                        "requests of a window took, s": max(value["busy"] for value in values),
                        "median wait, ms": median,
                        "p99 wait, ms": p99,
                        "by kind": ", ".join(f"{name} {count:,}" for name, count in sorted(calls.items())),
                    }
                )
    tables = []
    if waits:
        tables.append(Table("waiting per step on a healthy run, 20 ms per step", waits))
    if loads:
        note = (
            "Requests were counted over the time given and divided by the time that steps of 20 ms take; where both "
            "are the same, the run kept up. Waits are those of the few threads that play the hosts."
        )
        tables.append(Table("one coordination service, 20 ms per step", loads, note))
    return tables


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
