"""What it costs that hosts agree: waiting a step on a healthy run, and the load on one coordination service.

The first table trains (sleeps) 20 ms a step on real processes, with agreement and, in the same run, with a feed of each
host for itself. The second drives the real protocol of thousands of hosts, a thread each in four processes, against the
real coordination service of a JAX job.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
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


def simulate(num_hosts: int, windows: int) -> dict[str, Any]:
    """This process's share of ``num_hosts`` simulated hosts, each on the real protocol."""
    import jax

    from meshfeed import _agree, _process

    real = _process.key_value_store()
    assert real is not None
    count = [0]
    lock = threading.Lock()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            call = getattr(real, name)

            def counted(*args: Any, **kwargs: Any) -> Any:
                with lock:
                    count[0] += 1
                return call(*args, **kwargs)

            return counted

    here, processes = jax.process_index(), jax.process_count()
    waits: list[float] = []
    size = _agree.full_window(num_hosts, 1, 1 << 30)
    started: list[float] = []
    ready = threading.Barrier(len(range(here, num_hosts, processes)) + 1)

    def host(index: int) -> None:
        agreement = _agree.WindowAgreement(
            Counting(),  # type: ignore[arg-type]
            scope=f"simulated/{num_hosts}",
            participants=range(num_hosts),
            host=index,
            first_step=0,
            pad=False,
            byte_limit=1 << 40,
            timeout_seconds=300,
            describe=lambda: "simulated",
        )
        agreement.publish(_agree.Part(1, info={"bytes": 1}))
        agreement.wait_for(0)
        while agreement.window_end < 4 * size:  # past the short first windows
            agreement.publish(_agree.Part(agreement.window_end))
        step = 1
        ready.wait()
        begun = time.monotonic()
        for number in range(windows):
            end = agreement.window_end
            agreement.publish(_agree.Part(end))  # read ahead
            start = time.monotonic()
            agreement.wait_for(step)
            waits.append(time.monotonic() - start)
            step += size
            time.sleep(max(0.0, begun + (number + 1) * size * STEP_SECONDS - time.monotonic()))
        agreement.close()

    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=host, args=(i,), daemon=True) for i in range(here, num_hosts, processes)]
    for thread in threads:
        thread.start()
    ready.wait()
    with lock:
        count[0] = 0
    started.append(time.monotonic())
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started[0]
    waits.sort()
    return {
        "requests": count[0],
        "seconds": seconds,
        "window": size,
        "median_wait": statistics.median(waits),
        "p99_wait": waits[int(len(waits) * 0.99)],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4], help="real processes")
    parser.add_argument("--simulated", type=int, nargs="*", default=[256, 1024, 4096], help="simulated hosts")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=6)


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
        with HostPool(4, 1, timeout_seconds=900) as pool:
            for hosts in options.simulated:
                values = [result.value for result in pool.run(simulate, hosts, options.windows)]
                rate = sum(value["requests"] for value in values) / max(value["seconds"] for value in values)
                median, p99 = (statistics.mean(v[key] for v in values) * 1e3 for key in ("median_wait", "p99_wait"))
                loads.append(
                    {
                        "hosts": hosts,
                        "window, steps": values[0]["window"],
                        "requests/s": rate,
                        "median wait, ms": median,
                        "p99 wait, ms": p99,
                    }
                )
    tables = []
    if waits:
        tables.append(Table("waiting a step on a healthy run, 20 ms a step", waits))
    if loads:
        note = (
            "All hosts are threads of four processes here, so waits are those of these processes rather than of hosts."
        )
        tables.append(Table("one coordination service, 20 ms a step", loads, note))
    return tables


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
