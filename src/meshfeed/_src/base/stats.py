"""What a feed has done so far on this host: counters and times."""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.names import public


@public("meshfeed")
@dataclasses.dataclass(frozen=True)
class FeedStats:
    """Figures of this host since the feed was made, or since an earlier call of ``feed.stats()``.

    Attributes:
      batches: global batches delivered.
      records: real records delivered, over all hosts.
      bytes: bytes of host batches that this host read and delivered.
      wait_seconds: time the caller waited in ``next``.
      stall_fraction: ``(wait_seconds - startup_seconds) / elapsed_seconds``, from 0 to 1: the share of the run that the
        caller waited for data, start-up left out.
      read_seconds: time spent reading records, over all threads and workers.
      decode_seconds: time spent decoding and stacking them.
      transfer_seconds: time spent handing host batches to JAX.
      retries: reads that were tried again.
      skipped_records: bad records replaced in delivered batches of this host.
      startup_seconds: the part of ``wait_seconds`` that was spent waiting for the first batch, also for the first after
        each ``reset`` and ``set_state``.
      elapsed_seconds: time from the first batch to the last, without the waits in ``startup_seconds`` and the time
        between the last batch before a ``reset`` or ``set_state`` and the first one after it.
      feed_id: identifies the feed; empty in the figures of an interval, which cannot be the start of another.
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
    startup_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    feed_id: str = dataclasses.field(default="", repr=False)


_SUMS = tuple(field.name for field in dataclasses.fields(FeedStats) if field.name not in ("stall_fraction", "feed_id"))


def _make_stats(sums: Mapping[str, Any], feed_id: str) -> FeedStats:
    elapsed = sums["elapsed_seconds"]
    waited = sums["wait_seconds"] - sums["startup_seconds"]
    fraction = min(1.0, max(0.0, waited / elapsed)) if elapsed > 0 else 0.0
    return FeedStats(stall_fraction=fraction, feed_id=feed_id, **sums)


def stats_since(stats: FeedStats, earlier: FeedStats | None) -> FeedStats:
    """The figures of the time between two calls of ``feed.stats()``; ``stats`` itself if ``earlier`` is None.

    Raises:
      SettingsError: ``earlier`` belongs to a different feed, or is later than ``stats``.
    """
    if earlier is None:
        return stats
    if not isinstance(earlier, FeedStats) or earlier.feed_id != stats.feed_id:
        what = "a FeedStats of a different feed or of an interval" if isinstance(earlier, FeedStats) else repr(earlier)
        raise SettingsError(
            f"since={what}; it takes what an earlier call of stats() of this feed returned.", setting="since"
        )
    sums = {name: getattr(stats, name) - getattr(earlier, name) for name in _SUMS}
    if min(sums.values()) < 0:
        raise SettingsError(
            f"since= was taken after {earlier.batches} batches, later than the figures to compare it with, which were taken "
            f"after {stats.batches}. Pass what an earlier call of stats() returned.",
            setting="since",
        )
    return _make_stats(sums, "")


class StatsRecorder:
    """Adds figures up, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._feed_id = uuid.uuid4().hex[:16]
        defaults = FeedStats()
        self._sums: dict[str, Any] = {name: getattr(defaults, name) for name in _SUMS}  # ints and floats, as the fields
        self._last_delivery: float | None = None

    def read(self, times: Mapping[str, float], retries: int) -> None:
        """A host batch was read: seconds by figure, and reads that were tried again."""
        sums = self._sums
        with self._lock:
            for name, seconds in times.items():
                sums[name] += seconds
            sums["retries"] += retries

    def restart(self) -> None:
        """The next batch is the first one again: the wait for it is start-up."""
        self._last_delivery = None

    def delivered(self, start: float, records: int, num_bytes: int, transfer_seconds: float, skipped: int) -> None:
        """A batch asked for at ``start`` (``time.perf_counter()``) goes to the caller now."""
        now = time.perf_counter()
        last, self._last_delivery = self._last_delivery, now
        sums = self._sums
        with self._lock:
            sums["batches"] += 1
            sums["records"] += records
            sums["bytes"] += num_bytes
            sums["wait_seconds"] += now - start
            if last is None:
                sums["startup_seconds"] += now - start
            else:
                sums["elapsed_seconds"] += now - last
            sums["transfer_seconds"] += transfer_seconds
            sums["skipped_records"] += skipped

    def snapshot(self) -> FeedStats:
        """The figures now."""
        with self._lock:
            return _make_stats(self._sums, self._feed_id)
