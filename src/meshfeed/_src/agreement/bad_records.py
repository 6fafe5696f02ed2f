"""Counts the bad records of a stream, and finds the step at which they are too many.

The count is a property of the stream, not of the hosts: records that several hosts read count once, the count resumes
from a state, and the step at which it exceeds the limit depends only on the source and the settings.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping

from meshfeed._src.agreement.messages import AnnouncedContents, ReportContents
from meshfeed._src.base.errors import Failure, SourceError
from meshfeed._src.base.settings import SkipBad
from meshfeed._src.streams.protocol import HostBatch

RecordsAfter = Callable[[int, Mapping[int, int]], int]
"""(step, ended lanes) → records of the stream up to and including the step."""


class BadRecords:
    """This host's and the reducer's side of the bad-record count; ``num_skipped`` were in batches delivered so far."""

    def __init__(self, setting: SkipBad | None, num_skipped: int, records_after: RecordsAfter) -> None:
        self._limit = None if setting is None else setting.max_fraction
        self._records_after = records_after
        self._own = num_skipped  # from this host's reads alone: a lower bound of the stream's count
        self._total = num_skipped  # on the reducer, and in a single process
        self._counted_step = -1
        self._delivered = num_skipped
        self._later: collections.deque[tuple[int, int]] = collections.deque()  # (undelivered step, count up to it)

    # ------------------------------------------------------------------ every host

    def report(self, batches: Iterable[HostBatch], ended: Mapping[int, int]) -> ReportContents:
        """Returns the bad records in the batches of a window.

        Lists them instead of counting them, because other hosts may have read the same rows. The list ends at the step
        at which this host's bad records alone are too many, which bounds it to about ``max_fraction`` of the records.
        """
        bad: dict[str, list[tuple[int, int]]] = {}
        last = ""
        for batch in batches if self._limit is not None else ():
            if batch.bad:
                bad[str(batch.step)] = sorted(_distinct(batch))
                self._own += len(bad[str(batch.step)])
                last = _last_bad(batch)
            if self._too_many(self._own, self._records_after(batch.step, ended)):
                break
        return {"bad": bad, "last_bad": last} if bad else {}

    def _too_many(self, bad: int, records: int) -> bool:
        # Below 1 / limit records, a single bad record would exceed the limit.
        return self._limit is not None and records >= 1 / self._limit and bad > self._limit * records

    # ------------------------------------------------------------------ the reducer

    def reduce(
        self, contents: Mapping[int, ReportContents], first: int, end: int, ended: Mapping[int, int]
    ) -> tuple[AnnouncedContents, Failure | None]:
        """Returns the counts of a window, and a failure at the first step with too many bad records."""
        found: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
        last = ""
        for host, one in sorted(contents.items()):
            for step, entries in one.get("bad", {}).items():
                found[int(step)].update((record_id, epoch) for record_id, epoch in entries)
            last = f"host {host}, {one['last_bad']}" if "last_bad" in one else last
        counts: dict[str, int] = {}
        failure = None
        for step in range(first, end) if self._limit is not None else ():
            if step in found:
                self._total += len(found[step])
                counts[str(step)] = self._total
            failure = self._failure_at(step, ended, last)
            if failure is not None:
                break
        return {"bad": counts} if counts else {}, failure

    def _failure_at(self, step: int, ended: Mapping[int, int], last: str) -> Failure | None:
        records = 0 if self._limit is None else self._records_after(step, ended)
        if self._limit is None or not self._too_many(self._total, records):
            return None
        message = (
            f"{self._total:,} of the {records:,} records up to step {step} are bad, a fraction of "
            f"{self._total / records:.2g}; bad_records=SkipBad(max_fraction={self._limit:g}) allows {self._limit:g}"
            + (f" (last: {last})" if last else "")
            + ". Check the data; raise max_fraction only if so many bad records are expected."
        )
        return Failure(SourceError.__name__, message, step=step)

    # ------------------------------------------------------------------ a single process

    @property
    def none_so_far(self) -> bool:
        """Whether no record of this stream has been bad so far."""
        return not self._total

    def count_alone(self, batch: HostBatch, ended: Mapping[int, int]) -> Failure | None:
        """The reducer's rule in a single process. A step that is read twice because of an interrupt counts once."""
        if batch.bad and batch.step > self._counted_step:
            total = self._total + len(_distinct(batch))
            self._later.append((batch.step, total))
            self._total, self._counted_step = total, batch.step
        return self._failure_at(batch.step, ended, _last_bad(batch) if batch.bad else "")

    # ------------------------------------------------------------------ announcements

    def learn(self, contents: AnnouncedContents) -> None:
        """Adds the counts of an announcement."""
        self._later.extend((int(step), count) for step, count in contents.get("bad", {}).items())

    def up_to(self, step: int) -> int:
        """Returns the bad records up to and including ``step``. Call with ascending steps."""
        while self._later and self._later[0][0] <= step:
            self._delivered = self._later.popleft()[1]
        return self._delivered


def _distinct(batch: HostBatch) -> set[tuple[int, int]]:
    return {(record_id, epoch) for record_id, epoch, _ in batch.bad}


def _last_bad(batch: HostBatch) -> str:
    record_id, _, reason = batch.bad[-1]
    return f"record {record_id}: {reason}"
