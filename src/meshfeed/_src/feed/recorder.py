"""The only place in which the figures of a feed are counted.

``feed.stats()``, the exporters of :mod:`meshfeed.monitoring` and the report read its totals; ``jax.monitoring`` receives its
increments.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax import monitoring

from meshfeed._src.base.stats import CACHES, SUMS, FeedStats, Sample, Stall, make_stats

_log = logging.getLogger("meshfeed.monitoring")
_PUBLISH_SECONDS = 0.1
_HISTORY = 512
_STALLS = 16


class Deliveries(NamedTuple):
    """What was delivered: sums by field of :class:`FeedStats`, and the time of the last batch since a restart, if any."""

    sums: Mapping[str, Any]  # int or float, like the fields
    last_delivery: float | None


class StatsRecorder:
    """Accumulates statistics. Any thread may read them; deliveries and restarts must not run concurrently.

    Attributes:
      counts: replaced as a whole, so that no interrupt and no other thread finds a batch that is counted in part.
      peer_wait_seconds: added to by the thread that waits for other hosts.
      stalls: the latest long waits, oldest first.
    """

    def __init__(self, name: str = "") -> None:
        self._feed_id = uuid.uuid4().hex[:16]
        self._name = name
        self.counts = Deliveries({name: getattr(FeedStats, name) for name in SUMS}, None)
        self.peer_wait_seconds = 0.0
        self.stalls: tuple[Stall, ...] = ()
        self._published = self.counts.sums
        self._publish_at = 0.0
        self._history: list[Sample] = []
        self._history_at, self._history_seconds = 0.0, _PUBLISH_SECONDS

    def restart(self) -> None:
        """Counts the wait for the next batch as startup."""
        self.counts = self.counts._replace(last_delivery=None)

    def delivered(self, start: float, **figures: float) -> Deliveries:
        """Returns ``counts`` after one more batch, which was requested at ``start`` (``time.perf_counter()``).

        Args:
          start: when the batch was requested.
          figures: what else to add, by field of :class:`FeedStats`.
        """
        now = time.perf_counter()
        old, last = self.counts
        sums = dict(old)
        sums["batches"] += 1
        sums["wait_seconds"] += now - start
        if last is None:
            sums["startup_seconds"] += now - start
        else:
            sums["elapsed_seconds"] += now - last
        for name, value in figures.items():
            sums[name] += value
        return Deliveries(sums, now)

    def stalled(self, step: int, waited_seconds: float, what: str, stacks: str) -> None:
        """Keeps a long wait for the report; the arguments are the attributes of :class:`Stall`."""
        stall = Stall(time.time(), step, waited_seconds, what, stacks)
        self.stalls = (*self.stalls, stall)[-_STALLS:]

    def _sums(self) -> dict[str, Any]:
        return {**self.counts.sums, "peer_wait_seconds": self.peer_wait_seconds}

    def snapshot(self, tuned: Mapping[str, Any] | None = None) -> FeedStats:
        """Returns the current statistics, with what was chosen for keywords that are ``"auto"``."""
        return make_stats(self._sums(), self._feed_id, tuned)

    # ------------------------------------------------------------------ increments and history

    @property
    def due(self) -> bool:
        """Whether to call :meth:`publish`: ten times per second while batches are delivered."""
        last = self.counts.last_delivery
        return last is not None and last >= self._publish_at

    def publish(self, step: int, position: int) -> None:
        """Keeps a sample for the report, and sends the increments since the last call to ``jax.monitoring``.

        An event is named ``/meshfeed/`` and the field. Fields in seconds are durations, the others scalars. Listeners
        receive the feed's name as the keyword ``feed``; their errors are logged, not raised.
        """
        now = time.perf_counter()
        self._publish_at = now + _PUBLISH_SECONDS
        sums = self._sums()
        before, self._published = self._published, sums
        if now >= self._history_at:
            stats = make_stats(sums, self._feed_id)
            self._history.append(Sample(time.time(), step, position, stats, CACHES.totals()))
            if len(self._history) >= _HISTORY:  # cover the whole run at half the resolution
                self._history = self._history[::2]
                self._history_seconds *= 2
            self._history_at = now + self._history_seconds
        try:
            for name in SUMS:
                if increment := sums[name] - before[name]:
                    is_time = name.endswith("_seconds")
                    send = monitoring.record_event_duration_secs if is_time else monitoring.record_scalar
                    send(f"/meshfeed/{name}", increment, feed=self._name)
        except Exception:
            what = "a listener of jax.monitoring failed; the remaining figures of this event are lost"
            _log.exception("%s: %s", self._name, what)

    def history(self) -> list[Sample]:
        """Returns up to 512 samples, spread evenly over the run so far."""
        return list(self._history)

    def to_json(self) -> dict[str, Any]:
        """Returns everything counted so far, for :meth:`continue_from`."""
        return {
            "feed_id": self._feed_id,
            "sums": self._sums(),
            "stalls": [dataclasses.asdict(stall) for stall in self.stalls],
            "history": [dataclasses.asdict(sample) for sample in self._history],
            "history_seconds": self._history_seconds,
        }

    def continue_from(self, earlier: Mapping[str, Any]) -> None:
        """Continues the figures of another recorder, before the first delivery; ``earlier`` is its :meth:`to_json`."""
        self._feed_id, self.peer_wait_seconds = earlier["feed_id"], earlier["sums"]["peer_wait_seconds"]
        self._published = dict(earlier["sums"])
        self.counts = Deliveries(dict(earlier["sums"]), None)
        self.stalls = tuple(Stall(**stall) for stall in earlier["stalls"])
        self._history = [_sample_of(sample) for sample in earlier["history"]]
        self._history_seconds = earlier["history_seconds"]


def _sample_of(fields: Mapping[str, Any]) -> Sample:
    stalls = tuple(Stall(**stall) for stall in fields["stalls"])
    values: dict[str, Any] = {**fields, "stats": FeedStats(**fields["stats"]), "stalls": stalls}
    return Sample(**values)
