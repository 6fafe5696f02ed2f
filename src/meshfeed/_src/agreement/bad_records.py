"""Bad records counted over all hosts, and the step at which there are too many.

The count is one of the stream, not of hosts: replicas that several hosts read count once, it goes on where a state left
it, and the step at which it is too large follows from source and settings alone.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshfeed._src.agreement.rules import Part, Verdict
from meshfeed._src.base.settings import SkipBad
from meshfeed._src.streams.protocol import HostBatch

RecordsAfter = Callable[[int, Mapping[int, int]], int]
"""Step and lanes that ended → records of the stream up to and including the step."""


class BadRecords:
    """This host's side of the count, and the reducer's.

    Args:
      setting: of the feed.
      num_skipped: bad records in the batches delivered so far.
      records_after: see :data:`RecordsAfter`.
    """

    def __init__(self, setting: SkipBad | None, num_skipped: int, records_after: RecordsAfter) -> None:
        self._limit = None if setting is None else setting.max_fraction
        self._records_after = records_after
        self._own = num_skipped  # what this host knows of itself: at most what there is
        self._judged = num_skipped
        self._judged_step = -1
        self._known = num_skipped
        self._later: collections.deque[tuple[int, int]] = collections.deque()  # step, count up to it; not yet delivered

    # ------------------------------------------------------------------ this host's part

    def part(self, batches: Iterable[HostBatch], ended: Mapping[int, int]) -> dict[str, Any]:
        """What this host publishes of a window, JSON.

        Which records, not how many, because other hosts may have read the same rows. Nothing is listed from the step on
        at which these alone are too many, so the list is never longer than ``max_fraction`` of the records.
        """
        if self._limit is None:
            return {}
        bad: dict[str, list[tuple[int, int]]] = {}
        last = ""
        for batch in batches:
            if batch.bad:
                bad[str(batch.step)] = sorted({(record_id, epoch) for record_id, epoch, _ in batch.bad})
                self._own += len(bad[str(batch.step)])
                last = f"record {batch.bad[-1][0]}: {batch.bad[-1][2]}"
            if self._too_many(self._own, self._records_after(batch.step, ended)):
                break
        return {"bad": bad, "last_bad": last} if bad else {}

    def _too_many(self, bad: int, records: int) -> bool:
        return self._limit is not None and records >= 1 / self._limit and bad > self._limit * records

    # ------------------------------------------------------------------ the rule

    def judge(
        self, parts: Mapping[int, Part], first: int, end: int, ended: Mapping[int, int]
    ) -> tuple[dict[str, Any], Verdict | None]:
        """The reducer's: counts up to the steps of a window, for the announcement, and the step with too many."""
        if self._limit is None:
            return {}, None
        found: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
        last = ""
        for host, part in sorted(parts.items()):
            for step, entries in part.info.get("bad", {}).items():
                found[int(step)].update((record_id, epoch) for record_id, epoch in entries)
            if part.info.get("last_bad"):
                last = f"host {host}, {part.info['last_bad']}"
        counts: dict[str, int] = {}
        for step in range(first, end):
            if step in found:
                self._judged += len(found[step])
                counts[str(step)] = self._judged
            records = self._records_after(step, ended)
            if self._too_many(self._judged, records):
                return {"bad": counts} if counts else {}, Verdict(self._message(step, records, last), step)
        return {"bad": counts} if counts else {}, None

    @property
    def none_so_far(self) -> bool:
        """Whether no record of this stream was bad yet, so that there is nothing to judge."""
        return not self._judged

    def judge_alone(self, batch: HostBatch, ended: Mapping[int, int]) -> str | None:
        """The rule for one process, which has no other to tell. A step that an interrupt brings twice counts once."""
        last = f"record {batch.bad[-1][0]}: {batch.bad[-1][2]}" if batch.bad else ""
        if batch.bad and batch.step > self._judged_step:
            judged = self._judged + len({(record_id, epoch) for record_id, epoch, _ in batch.bad})
            self._later.append((batch.step, judged))
            self._judged, self._judged_step = judged, batch.step
        records = self._records_after(batch.step, ended) if self._limit is not None else 0
        return self._message(batch.step, records, last) if self._too_many(self._judged, records) else None

    def _message(self, step: int, records: int, last: str) -> str:
        assert self._limit is not None
        return (
            f"source|{self._judged:,} of the {records:,} records up to step {step} are bad, {self._judged / records:.2g} of "
            f"them, and bad_records=SkipBad(max_fraction={self._limit:g}) allows {self._limit:g}"
            + (f" (last: {last})" if last else "")
            + ". Look at the data; raise max_fraction only if so many bad records are expected."
        )

    # ------------------------------------------------------------------ what was announced

    def learn(self, info: Mapping[str, Any]) -> None:
        """Takes in the JSON of an announcement."""
        self._later.extend((int(step), count) for step, count in info.get("bad", {}).items())

    def up_to(self, step: int) -> int:
        """Bad records up to and including ``step``; steps are asked for in order."""
        while self._later and self._later[0][0] <= step:
            self._known = self._later[0][1]
            self._later.popleft()
        return self._known
