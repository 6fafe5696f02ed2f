"""What a feed has done so far on this host: counters and times."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any

from meshfeed._names import public


@public("meshfeed")
@dataclasses.dataclass(frozen=True)
class FeedStats:
    """Figures of this host since the feed was made.

    Attributes:
      batches: global batches delivered.
      records: real records delivered, over all hosts.
      bytes: bytes of host batches that this host read and delivered.
      wait_seconds: time the caller waited in ``next``.
      stall_fraction: share of the time between the first ``next`` and the last delivery that the caller waited.
      read_seconds: time spent reading records, over all threads and workers.
      decode_seconds: time spent decoding and stacking them.
      transfer_seconds: time spent handing host batches to JAX.
      retries: reads that were tried again.
      skipped_records: bad records replaced in delivered batches of this host.
    """

    batches: int = 0
    records: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    stall_fraction: float = 0.0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    transfer_seconds: float = 0.0
    retries: int = 0
    skipped_records: int = 0


class StatsRecorder:
    """Adds figures up, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, Any] = {  # ints and floats, as their fields are
            field.name: field.default for field in dataclasses.fields(FeedStats) if field.name != "stall_fraction"
        }
        self._first_next: float | None = None
        self._last_delivery: float | None = None

    def read(self, times: Mapping[str, float], retries: int) -> None:
        """A host batch was read: seconds by figure, and reads that were tried again."""
        sums = self._sums
        with self._lock:
            for name, seconds in times.items():
                sums[name] += seconds
            sums["retries"] += retries

    def entered_next(self, now: float) -> None:
        """The caller asked for a batch at ``now`` (``time.perf_counter()``)."""
        if self._first_next is None:
            self._first_next = now

    def delivered(self, start: float, records: int, num_bytes: int, transfer_seconds: float, skipped: int) -> None:
        """A batch asked for at ``start`` goes to the caller now."""
        now = time.perf_counter()
        self._last_delivery = now
        sums = self._sums
        with self._lock:
            sums["batches"] += 1
            sums["records"] += records
            sums["bytes"] += num_bytes
            sums["wait_seconds"] += now - start
            sums["transfer_seconds"] += transfer_seconds
            sums["skipped_records"] += skipped

    def snapshot(self) -> FeedStats:
        """The figures now."""
        with self._lock:
            sums = dict(self._sums)
        elapsed = 0.0
        if self._first_next is not None and self._last_delivery is not None:
            elapsed = self._last_delivery - self._first_next
        fraction = min(1.0, sums["wait_seconds"] / elapsed) if elapsed > 0 else 0.0
        return FeedStats(stall_fraction=fraction, **sums)  # type: ignore[arg-type]
