"""Counters and timings of a feed on this host, and of shard caches; ``feed/recorder.py`` counts those of a feed."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.types import public

_log = logging.getLogger("meshfeed.monitoring")


@public("meshfeed")
@dataclasses.dataclass(frozen=True)
class FeedStats:
    """Statistics of this host since the feed was created, or since an earlier call of ``feed.stats()``.

    Attributes:
      batches: global batches delivered.
      records: records delivered on all hosts, without padding.
      bytes: bytes of host batches that this host read and delivered.
      wait_seconds: time the caller waited in ``next``.
      stall_fraction: ``(wait_seconds - startup_seconds) / elapsed_seconds``, from 0 to 1: the fraction of the run that
        the caller waited for data, excluding startup.
      read_seconds: time spent reading the records of delivered batches, summed over all threads and workers.
      decode_seconds: time spent decoding and stacking them, summed likewise.
      transfer_seconds: time spent passing host batches to JAX.
      retries: number of retried reads of delivered batches.
      skipped_records: bad records replaced in delivered batches of this host.
      startup_seconds: the part of ``wait_seconds`` spent waiting for the first batch, including the first batch after
        each ``reset`` and ``set_state``.
      peer_wait_seconds: time that the read-ahead waited for other hosts after this host had read its part. The host that
        all others wait for has the least.
      elapsed_seconds: time from the first batch to the last, excluding the time from the last batch before a ``reset``
        or ``set_state`` to the first batch after it.
      tuned: what the feed chose for the keywords that are ``"auto"``, as JSON; None if there is none, and in sums over runs.
        It has the chosen number by keyword; ``"state"``: ``"measuring"`` or ``"settled"``; ``"reason"``, in words; and
        ``"tried"``, the latest measurements.
      feed_id: identifies the feed; empty in the statistics of an interval, which cannot start another interval.
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
    peer_wait_seconds: float = 0.0
    tuned: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    feed_id: str = dataclasses.field(default="", repr=False)


SUMS = tuple(
    field.name for field in dataclasses.fields(FeedStats) if field.name not in ("stall_fraction", "tuned", "feed_id")
)


def make_stats(sums: Mapping[str, Any], feed_id: str, tuned: Mapping[str, Any] | None = None) -> FeedStats:
    """Returns the statistics with some sums, by field."""
    elapsed = sums["elapsed_seconds"]
    waited = sums["wait_seconds"] - sums["startup_seconds"]
    fraction = min(1.0, max(0.0, waited / elapsed)) if elapsed > 0 else 0.0
    return FeedStats(stall_fraction=fraction, tuned=tuned, feed_id=feed_id, **sums)


def total_stats(parts: Iterable[FeedStats]) -> FeedStats:
    """Returns the sum of statistics, such as those of a feed's successive runs."""
    parts = list(parts)
    return make_stats({name: sum(getattr(part, name) for part in parts) for name in SUMS}, "")


def stats_since(stats: FeedStats, earlier: FeedStats | None) -> FeedStats:
    """Returns the statistics of the interval from ``earlier`` to ``stats``; ``stats`` itself if ``earlier`` is None.

    Raises:
      SettingsError: ``earlier`` belongs to a different feed, or is later than ``stats``.
    """
    if earlier is None:
        return stats
    if not isinstance(earlier, FeedStats) or earlier.feed_id != stats.feed_id:
        what = "a FeedStats of a different feed or of an interval" if isinstance(earlier, FeedStats) else repr(earlier)
        raise SettingsError(
            f"since={what}; it takes the result of an earlier call of stats() of this feed.", setting="since"
        )
    sums = {name: getattr(stats, name) - getattr(earlier, name) for name in SUMS}
    if min(sums.values()) < 0:  # counters never decrease, so ``earlier`` is the later of the two
        raise SettingsError(
            f"since= was taken after {earlier.batches} batches, later than the statistics it is subtracted from (after "
            f"{stats.batches}). Pass the result of an earlier call of stats().",
            setting="since",
        )
    return make_stats(sums, "", stats.tuned)


@dataclasses.dataclass(frozen=True)
class Stall:
    """A long wait for data, as this host saw it.

    Attributes:
      time: when it was noticed, in seconds since 1970.
      step: the step that was waited for.
      waited_seconds: how long so far.
      what: which host is late, and what it is reading.
      stacks: the stacks of what reads on that host, and on this one.
    """

    time: float
    step: int
    waited_seconds: float
    what: str
    stacks: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """The figures of a feed at one moment.

    Attributes:
      time: seconds since 1970.
      step: batches delivered since the start of the stream.
      position: records delivered since the start of the stream, over all hosts.
      stats: the feed's statistics.
      cache: figure → total of all shard caches of this process and its workers, by field of ``CacheStats``.
      stalls: the latest long waits, oldest first.
    """

    time: float
    step: int
    position: int
    stats: FeedStats
    cache: Mapping[str, float]
    stalls: Sequence[Stall] = ()


_CUMULATIVE = ("wait_seconds", "read_seconds", "decode_seconds", "transfer_seconds", "peer_wait_seconds")


def rates(before: Sample, after: Sample) -> dict[str, float]:
    """Returns rates and averages over the interval between two samples of one feed.

    Returns:
      ``stall_fraction``; ``batches``, ``records`` and ``bytes`` ``_per_second``; the seconds of each stage
      ``_per_batch``; ``retries`` and ``skipped_records``; and, if a shard cache was used, ``cache_hit_fraction``.
    """
    stats = stats_since(after.stats, before.stats)
    seconds, batches = max(stats.elapsed_seconds + stats.startup_seconds, 1e-9), max(stats.batches, 1)
    found: dict[str, float] = {"stall_fraction": stats.stall_fraction}
    found |= {f"{name}_per_second": getattr(stats, name) / seconds for name in ("batches", "records", "bytes")}
    found |= {f"{name}_per_batch": getattr(stats, name) / batches for name in _CUMULATIVE}
    found |= {"retries": stats.retries, "skipped_records": stats.skipped_records}
    hits, misses = (after.cache.get(name, 0) - before.cache.get(name, 0) for name in ("hits", "misses"))
    return found | ({"cache_hit_fraction": hits / (hits + misses)} if hits + misses else {})


class Totals:
    """Counters of this process by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}

    def add(self, more: Mapping[str, float]) -> None:
        """Adds to counters."""
        with self._lock:
            for name, value in more.items():
                self._totals[name] = self._totals.get(name, 0) + value

    def totals(self) -> dict[str, float]:
        """Returns the counters that are not 0."""
        with self._lock:
            totals = dict(self._totals)
        return {name: value for name, value in totals.items() if value}

    def take(self) -> dict[str, float]:
        """Returns the counters that are not 0, and resets them; a worker sends the result to its parent."""
        with self._lock:
            taken, self._totals = self._totals, {}
        return taken


CACHES = Totals()
"""Totals of the shard caches of this process and its workers, by field of ``CacheStats``. They are per process because a
cache may serve several feeds, and each worker has its own copy."""
