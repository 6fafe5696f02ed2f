"""Counts bad records over all hosts and finds the step at which there are too many.

The count is a property of the stream, not of the hosts: records that several hosts read count once, the count resumes
from a state, and the step at which it exceeds the limit depends only on the source and the settings.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshfeed._src.agreement.rules import Part, Verdict
from meshfeed._src.base.settings import SkipBad
from meshfeed._src.streams.protocol import HostBatch

RecordsAfter = Callable[[int, Mapping[int, int]], int]
"""(step, ended lanes) → records of the stream up to and including the step."""


class BadRecords:
    """This host's and the reducer's side of the bad-record count.

    Args:
      setting: the feed's ``bad_records``.
      num_skipped: bad records in the batches delivered so far.
      records_after: see :data:`RecordsAfter`.
    """

    def __init__(self, setting: SkipBad | None, num_skipped: int, records_after: RecordsAfter) -> None:
        self._limit = None if setting is None else setting.max_fraction
        self._records_after = records_after
        self._own = num_skipped  # from this host's reads alone: a lower bound of the stream's count
        self._judged = num_skipped
        self._judged_step = -1
        self._known = num_skipped
        self._later: collections.deque[tuple[int, int]] = collections.deque()  # (undelivered step, count up to it)

    # ------------------------------------------------------------------ every host

    def part(self, batches: Iterable[HostBatch], ended: Mapping[int, int]) -> dict[str, Any]:
        """Returns this host's share of a window report, as JSON.

        Lists the bad records instead of counting them, because other hosts may have read the same rows. The list ends
        at the step at which this host's bad records alone are too many, which bounds it to about ``max_fraction`` of
        the records.
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
        # Below 1 / limit records, a single bad record would exceed the limit.
        return self._limit is not None and records >= 1 / self._limit and bad > self._limit * records

    # ------------------------------------------------------------------ the reducer

    def judge(
        self, parts: Mapping[int, Part], first: int, end: int, ended: Mapping[int, int]
    ) -> tuple[dict[str, Any], Verdict | None]:
        """On the reducer: counts for the announcement of a window, and a failure at the first step over the limit."""
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
        """Whether no record of this stream has been bad so far."""
        return not self._judged

    def judge_alone(self, batch: HostBatch, ended: Mapping[int, int]) -> str | None:
        """The rule for a single process. A step read twice because of an interrupt counts once."""
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

    # ------------------------------------------------------------------ announcements

    def learn(self, info: Mapping[str, Any]) -> None:
        """Adds the counts of an announcement."""
        self._later.extend((int(step), count) for step, count in info.get("bad", {}).items())

    def up_to(self, step: int) -> int:
        """Returns the bad records up to and including ``step``. Call with ascending steps."""
        while self._later and self._later[0][0] <= step:
            self._known = self._later[0][1]
            self._later.popleft()
        return self._known
