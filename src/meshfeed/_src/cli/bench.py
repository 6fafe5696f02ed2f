"""``meshfeed bench``: measures how fast this machine feeds its devices, and which stage is the bottleneck."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshfeed._src.feed.iterator import Feed

_ROUNDS = 3
_WARM_UP_STEPS = 3  # not measured: these open files and start threads


@dataclasses.dataclass(frozen=True)
class FixedBytes:
    """Truncates or zero-pads records to rows of ``width`` bytes, uint8; a class, because workers need to pickle it."""

    width: int

    def __call__(self, records: Sequence[bytes]) -> dict[str, np.ndarray]:
        rows = b"".join(record[: self.width].ljust(self.width, b"\0") for record in records)
        return {"bytes": np.frombuffer(rows, np.uint8).reshape(len(records), self.width)}


@contextlib.contextmanager
def example_files(num_records: int, record_bytes: int) -> Iterator[list[str]]:
    """Writes two temporary ArrayRecord files of random bytes, for a machine without data."""
    from array_record.python.array_record_module import ArrayRecordWriter

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="meshfeed-bench-") as folder:
        paths = [str(pathlib.Path(folder) / f"{i}.array_record") for i in range(2)]
        for i, path in enumerate(paths):
            writer = ArrayRecordWriter(path, "group_size:1,uncompressed")
            for _ in range(i, num_records, 2):
                writer.write(rng.bytes(record_bytes))
            writer.close()
        yield paths


def bench(
    paths: Sequence[str], *, steps: int, step_seconds: float, record_bytes: int | None, **settings: Any
) -> dict[str, Any]:
    """Alternates between feeding this machine's devices and reading the same records in a bare loop.

    Args:
      paths: ArrayRecord files.
      steps: batches per round.
      step_seconds: simulated step time; the feed's threads keep working meanwhile.
      record_bytes: bytes per row; None for the size of the first record.
      **settings: keywords of the feed.

    Returns:
      Medians over the rounds: ``records_per_second`` and ``bytes_per_second`` of the feed, ``bare_records_per_second``
      of the loop, and ``share_of_bare``, their ratio; for the last round, ``stall_fraction`` and the seconds per batch of
      each stage. With a simulated step time, ``step_seconds`` is that time, ``paced_records_per_second`` is the rate to
      which it limits the feed, and ``share_of_bare`` is None; otherwise, the first two are None.
    """
    import jax

    from meshfeed.sources import ArrayRecord

    probe = ArrayRecord(list(paths))
    width = record_bytes or len(probe.read_raw([0])[0])
    decode = FixedBytes(width)
    source = ArrayRecord(list(paths), decode_batch=decode)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    size = settings["global_batch_size"]
    rates, bare_rates, stats = [], [], None
    with Feed(source, mesh, num_epochs=None, **settings) as feed:
        for _ in range(_WARM_UP_STEPS):
            jax.block_until_ready(next(feed))
        for _ in range(_ROUNDS):
            before, first = feed.stats(), feed.step
            rates.append(steps * size / _seconds_fed(feed, steps, step_seconds))
            stats = feed.stats(since=before)
            record_ids = [feed.record_ids(step) for step in range(first, first + steps)]
            start = time.perf_counter()
            for ids in record_ids:
                decode(probe.read_raw(ids))
            bare_rates.append(steps * size / (time.perf_counter() - start))
    assert stats is not None
    rate, bare_rate = statistics.median(rates), statistics.median(bare_rates)
    return {
        "devices": jax.device_count(),
        "platform": jax.devices()[0].platform,
        "records": len(source),
        "record_bytes": width,
        "global_batch_size": size,
        "records_per_second": rate,
        "bytes_per_second": rate * width,
        "bare_records_per_second": bare_rate,
        "share_of_bare": None if step_seconds else rate / bare_rate,
        "step_seconds": step_seconds or None,
        "paced_records_per_second": size / step_seconds if step_seconds else None,
        "stall_fraction": stats.stall_fraction,
        "seconds_per_batch": {
            stage: getattr(stats, f"{stage}_seconds") / steps for stage in ("read", "decode", "transfer", "wait")
        },
    }


def _seconds_fed(feed: Feed, steps: int, step_seconds: float) -> float:
    import jax

    start = time.perf_counter()
    batch = None
    for _ in range(steps):
        batch = next(feed)
        if step_seconds:
            time.sleep(step_seconds)
    jax.block_until_ready(batch)
    return time.perf_counter() - start


def report(result: dict[str, Any]) -> Iterator[str]:
    """Yields the result as lines of text."""
    stages = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in result["seconds_per_batch"].items())
    sizes = f"{result['records']:,} records of {result['record_bytes']:,} bytes"
    yield f"{sizes}, batches of {result['global_batch_size']:,} to {result['devices']} {result['platform']} devices"
    if paced := result["paced_records_per_second"]:
        steps = f"simulated steps of {result['step_seconds'] * 1e3:g} ms, which limits it to {paced:,.0f} records/s"
        yield f"the feed is paced by {steps}; without --step-ms it runs at full speed"
    speed, marks = result["bytes_per_second"] / 1e6, ("  (paced)", ", not paced") if paced else ("", "")
    yield f"feed       {result['records_per_second']:>14,.0f} records/s  {speed:>10,.1f} MB/s{marks[0]}"
    yield f"bare loop  {result['bare_records_per_second']:>14,.0f} records/s  (reading and decoding alone{marks[1]})"
    yield f"per batch: {stages}"
    if paced:
        yield f"the loop waits for data {result['stall_fraction']:.1%} of the time"
