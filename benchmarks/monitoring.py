"""What figures, events and exporters cost a batch: CPU time of ``next`` with them, over the time without events.

One feed without read-ahead, from memory, so that ``next`` does everything and little else. The ways take turns in one
process: without events (``StatsRecorder.due`` is never true), with events and no listener, with two listeners, with a
log on disk ten times per second, and with a Prometheus endpoint that is scraped ten times per second.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from benchmarks._measure import Table, main, make_mesh, with_cpu_devices

with_cpu_devices(8)

BATCHES = 2000


@contextlib.contextmanager
def listeners() -> Iterator[None]:
    from jax import monitoring

    def listen(event: str, value: float, **labels: object) -> None:
        pass

    monitoring.register_scalar_listener(listen)
    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        monitoring.unregister_scalar_listener(listen)
        monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def log(feed: Any) -> Iterator[None]:
    import meshfeed

    with tempfile.TemporaryDirectory() as folder, meshfeed.monitoring.log(feed, folder, seconds=0.1):
        yield


@contextlib.contextmanager
def scraped(feed: Any) -> Iterator[None]:
    import meshfeed

    with meshfeed.monitoring.prometheus(feed, port=0, address="127.0.0.1") as exporter:
        stop = threading.Event()

        def scrape() -> None:
            while not stop.wait(0.1):
                urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics").read()

        thread = threading.Thread(target=scrape)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def costs(options: argparse.Namespace) -> Table:
    """Microseconds per batch of the thread that calls ``next``, and the ratio to the way without events."""
    import meshfeed
    from meshfeed._src.feed.recorder import StatsRecorder

    data = {"x": np.zeros((100_000, 128), np.int32)}
    rows: list[dict[str, Any]] = []
    with meshfeed.Feed(data, make_mesh(), global_batch_size=64, shuffle=True, num_epochs=None, prefetch=0) as feed:
        ways: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
            "no events": lambda: mock.patch.object(StatsRecorder, "due", False),
            "events, no listener": contextlib.nullcontext,
            "two listeners": listeners,
            "log, 10 lines/s": lambda: log(feed),
            "Prometheus, 10 scrapes/s": lambda: scraped(feed),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for turn in range(options.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                with ways[name]():
                    for _ in range(50):
                        next(feed)
                    start = time.thread_time()
                    for _ in range(BATCHES):
                        next(feed)
                    found[name].append((time.thread_time() - start) / BATCHES * 1e6)
    base = statistics.median(found["no events"])
    for name, each in found.items():
        quarter = statistics.quantiles(each, n=4)
        rows.append(
            {
                "way": name,
                "µs per batch": statistics.median(each),
                "quartiles": f"{quarter[0]:.1f} to {quarter[2]:.1f}",
                "ratio": statistics.median(each) / base,
            }
        )
    return Table("next(feed) from memory, 64 rows of 512 bytes, prefetch=0", rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=21)


def measure(options: argparse.Namespace) -> Iterator[Table]:
    yield costs(options)


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
