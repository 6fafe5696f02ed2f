"""Changes the numbers of workers, threads and prefetched batches of a feed at given batches, in place of measurements."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import meshfeed
from meshfeed._src.feed.sizing import Numbers
from meshfeed._src.reading.reads import AutoReads, ReadNumbers
from meshfeed._src.streams.lane_group import LaneGroup
from meshfeed._src.streams.lane_places import LanePlaces


class ForcedNumbers:
    """Stands in for the Sizer of a feed.

    Args:
      feed: made with ``"auto"``; no batch has been taken.
      numbers: what to use, one after the other.
      times: how often; None for over and over.
      patient: whether to wait until the reader uses them before the next change; False changes them at every batch, also
        while workers are starting.

    Attributes:
      used: what the reader has used.
    """

    def __init__(
        self, feed: meshfeed.Feed, numbers: Iterable[Numbers], *, times: int | None = None, patient: bool = True
    ) -> None:
        self._prefetch = feed._prefetch if "prefetch" in feed._settings.auto else None
        self._numbers = itertools.cycle(numbers) if times is None else iter(times * [*numbers])
        self._patient = patient
        self.reads = AutoReads()
        self.look_at = 0.0
        self.used: set[ReadNumbers] = set()
        feed._sizer = self  # type: ignore[assignment]

    def begin(self, reader: Any, *, alone: bool) -> None:
        reader.adapt(self.reads)

    def delivered(self, stats: Any, pipeline: Any) -> None:
        self.used.add(self.reads.in_use)
        if self._patient and self.reads.in_use != self.reads.wanted:
            return
        wanted = next(self._numbers, None)
        if wanted is None:
            return
        for keyword in self.reads.unchangeable:
            wanted = wanted._replace(**{keyword: getattr(self.reads.in_use, keyword)})
        if self._prefetch is not None:
            self._prefetch.want(wanted.prefetch)
        self.reads.wanted = ReadNumbers(wanted.num_workers, wanted.num_threads)

    def tuned(self) -> dict[str, Any]:
        return {}


class PlacesHere(ForcedNumbers):
    """Opens the lanes of a stream in this process in place of workers, which would start too late for a short run."""

    def begin(self, reader: Any, *, alone: bool) -> None:
        super().begin(reader, alone=alone)
        places: LanePlaces = reader._places
        places._make = lambda num_workers: LaneGroup(places._source, places._shared)  # type: ignore[method-assign]
