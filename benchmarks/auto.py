"""``"auto"`` for workers, threads and prefetch, beside fixed numbers, over seven kinds of data.

A figure is the median over rounds of batches per second without a training step: the loop waits all of the time, so
``"auto"`` has most to try. "of the best" is the ratio to the best fixed numbers, "of the default" that to no workers and one
thread.

Afterwards, several feeds with ``"auto"`` and with the best fixed numbers are opened in turn, and each with ``"auto"`` gives
batches until it has settled. Of these, the medians: "batches 2-201" and "202-401" are the rates of ``"auto"`` against those
of the best fixed numbers over the same batches of a new feed, and "in use from" is the batch from which the numbers stay the
same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks import _data
from benchmarks._measure import Table, Way, main, make_mesh, take_turns, with_cpu_devices
from benchmarks.images import SIZES, photographs

AUTO: dict[str, Any] = {"num_workers": "auto", "num_threads": "auto", "prefetch": "auto"}
DEFAULT = "default"
FIRST = 201, 401
SHARES = "batches 2-201", "202-401"


class SlowDisk:
    """Records of which each read of a batch waits, as for a disk or a network."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, record_id: int) -> Any:
        return self.__getitems__([record_id])[0]

    def __getitems__(self, record_ids: Any) -> Any:
        time.sleep(self._seconds)
        return [np.full(256, record_id, np.int32) for record_id in record_ids]

    def fingerprint(self) -> Any:
        """Nothing to compare."""
        return {"kind": "slow disk"}


def parse(record: bytes) -> np.ndarray:
    """Decodes in Python, under its lock: numbers as text."""
    return np.array([int(number) for number in record.split()], np.int32)


TEXT = b" ".join(b"%d" % number for number in range(256))


def open_lane(lane_index: int, num_lanes: int) -> Iterator[np.ndarray]:
    """A lane that parses text for ever, without a state."""
    while True:
        yield parse(TEXT)


class Lane:
    """The same lane with a state."""

    def __init__(self, lane_index: int, num_lanes: int) -> None:
        self._records = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        self._records += 1
        return parse(TEXT)

    def get_state(self) -> int:
        """Records read."""
        return self._records

    def set_state(self, state: int) -> None:
        """Continues after so many records."""
        self._records = state


def workloads(folder: str) -> dict[str, Callable[[], Any]]:
    """Source by name."""
    import meshfeed

    tokens = os.path.join(folder, "tokens")
    _data.write_array_record(tokens, _data.tokens(20_000, _data.TOKENS))
    encoded = photographs(64, *SIZES[0])
    images = _data.write_array_record(os.path.join(folder, "images"), (encoded[i % 64] for i in range(4096)))
    parts = {
        f"c{i}": _data.write_array_record(os.path.join(folder, f"c{i}"), _data.tokens(2_000, _data.TOKENS))
        for i in range(35)
    }
    raw = meshfeed.sources.DecodeRaw(np.int32, _data.TOKENS)
    return {
        "cheap decoding": lambda: meshfeed.sources.ArrayRecord(tokens, decode_batch=raw),
        "JPEG": lambda: meshfeed.sources.ArrayRecord(images, decode=meshfeed.sources.DecodeImage(224)),
        "slow disk, 10 ms per batch": lambda: SlowDisk(0.01),
        "35 components": lambda: meshfeed.sources.Mixture(
            {name: meshfeed.sources.ArrayRecord(path, decode_batch=raw) for name, path in parts.items()},
            weights={name: 1.0 + i % 3 for i, name in enumerate(parts)},
        ),
        "stream, decoded in Python": lambda: meshfeed.sources.Stream(Lane),
        "stream without a state": lambda: meshfeed.sources.Stream(open_lane),
        "tiny records": lambda: {"x": np.arange(1_000_000, dtype=np.int32)},
    }


def one(name: str, make_source: Callable[[], Any], options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Returns the row of one kind of data, and what was chosen."""
    from jax.sharding import NamedSharding, PartitionSpec

    import meshfeed

    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    fixed: dict[str, dict[str, Any]] = {DEFAULT: {}}
    fixed |= {f"{number} threads": {"num_threads": number} for number in options.threads}
    fixed |= {f"{number} workers": {"num_workers": number} for number in options.workers}
    is_stream = name.startswith("stream")
    feeds: dict[str, Any] = {}

    def opened(label: str, numbers: dict[str, Any]) -> Any:
        order: dict[str, Any] = {"num_lanes": 8} if is_stream else {"shuffle": True}
        feeds[label] = meshfeed.Feed(
            make_source(), sharding, global_batch_size=options.batch, num_epochs=None, **order, **numbers
        )
        return feeds[label]

    def way(label: str, numbers: dict[str, Any]) -> Way:
        feed = opened(label, numbers)
        if label == "auto":
            begin(feed, options.settle)
        last: list[Any] = [None]

        def run() -> int:
            last[0] = next(feed)
            return 1

        return Way(run, 3 + 2 * numbers.get("num_threads", 1) if label != "auto" else 35, lambda: None)

    ways = {label: way(label, numbers) for label, numbers in {**fixed, "auto": AUTO}.items()}
    found = take_turns(ways, rounds=options.rounds, seconds=options.seconds)
    rate = {label: statistics.median(figures["wall"]) for label, figures in found.items()}
    tuned = feeds["auto"].stats().tuned
    for feed in feeds.values():
        feed.close()
    best = max(fixed, key=lambda label: rate[label])
    begun, fresh = [], []
    for _ in range(options.starts):
        for numbers, starts in ((AUTO, begun), (fixed[best], fresh)):
            feed = opened("new", numbers)
            starts.append(begin(feed, options.settle))
            feed.close()
    row = {
        "data": name,
        "default": rate[DEFAULT],
        "best fixed": f"{best}: {rate[best]:.0f}",
        "auto": rate["auto"],
        "chosen": f"{tuned['num_workers']} workers, {tuned['num_threads']} threads, prefetch {tuned['prefetch']}",
        **{
            name: median_of(begun, lambda one, i=i: one.rates[i]) / median_of(fresh, lambda one, i=i: one.rates[i])
            for i, name in enumerate(SHARES)
        },
        "in use from": median_of(begun, lambda one: one.in_use),
        "settled after": f"{median_of(begun, lambda one: one.settled):,.0f} batches, "
        f"{median_of(begun, lambda one: one.seconds):.1f} s",
        "of the best": rate["auto"] / rate[best],
        "of the default": rate["auto"] / rate[DEFAULT],
    }
    grid = ", ".join(f"{label} {value:.0f}" for label, value in rate.items())
    return row, f"{name}: {grid}. {tuned['reason']}."


class Begun(NamedTuple):
    """The first batches of a new feed.

    Attributes:
      rates: batches per second between the batches of :data:`FIRST`.
      in_use: the batch from which the numbers stay the same.
      settled: the batch at which it had settled.
      seconds: the time until then.
    """

    rates: list[float]
    in_use: int
    settled: int
    seconds: float


def begin(feed: Any, settle: float) -> Begun:
    """Takes batches until a feed with ``"auto"`` has settled, or for ``settle`` seconds, and at least the first ones."""
    last = next(feed)
    start = time.perf_counter()
    times, numbers, in_use, settled, seconds = [start], (), 1, 0, settle
    while feed.step < max(FIRST[-1], settled + 20) or (not settled and time.perf_counter() - start < settle):
        last = next(feed)
        if feed.step in FIRST:
            times.append(time.perf_counter())
        if feed.step % 10 == 0:  # not always: it takes as long as a tenth of a tiny batch
            tuned = feed.stats().tuned  # None with fixed numbers
            before, numbers = numbers, tuple((tuned or {}).get(name) for name in AUTO)
            in_use = in_use if numbers == before else feed.step
            if not settled and (tuned is None or tuned["state"] == "settled"):
                settled, seconds = feed.step, time.perf_counter() - start
    del last
    ends = (1, *FIRST)
    rates = [(ends[i + 1] - ends[i]) / (times[i + 1] - times[i]) for i in range(len(FIRST))]
    return Begun(rates, in_use, settled or feed.step, seconds)


def median_of(begun: list[Begun], figure: Callable[[Begun], float]) -> float:
    """The median over feeds."""
    return statistics.median(figure(one) for one in begun)


def measure(options: argparse.Namespace) -> Iterator[Table]:
    with tempfile.TemporaryDirectory() as folder:
        for name, make_source in workloads(folder).items():
            if not options.only or any(part in name for part in options.only):
                row, note = one(name, make_source, options)
                yield Table(f"auto, {name}, batches/s of {options.batch}", [row], note)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--starts", type=int, default=3, help="feeds with auto, one after the other")
    parser.add_argument("--settle", type=float, default=60.0, help="longest time to settle")
    parser.add_argument("--threads", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of the data")


if __name__ == "__main__":
    with_cpu_devices(8)
    main(__doc__, measure, add_options)
