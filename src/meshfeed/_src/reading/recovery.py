"""What follows a failed read: it is repeated in pieces, and bad records are replaced by others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SourceError, reason_of
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.types import PyTree, RecordIds
from meshfeed._src.reading.host_batch import join_batches

BAD_RECORD = (CorruptDataError, ValueError)
"""Exceptions that indicate a damaged record rather than a failed read."""
_NOT_REPLACED = (
    "bad_records= replaces only damaged records and those whose decoder raises ValueError; raise that for a bad record"
)
_MAX_REPLACEMENTS = 1000  # bounds the time spent on a source that is damaged as a whole

BadRecords = tuple[tuple[int, int, str], ...]
"""``(record id, epoch, reason)`` of each replaced record."""


class Recovery:
    """Reads records whose first read failed.

    Attributes:
      retries: number of retried reads.
    """

    def __init__(
        self,
        read: Callable[[RecordIds, RecordIds], PyTree],
        retry: Retry,
        *,
        since: float,  # ``time.monotonic()`` at the start of the first read
        # (record id, epoch, attempt from 1) → record id to read instead; None to raise errors of bad records
        replacement: Callable[[int, int, int], int] | None,
    ) -> None:
        self._read = read
        self._retry = retry
        self._since = since
        self._replacement = replacement
        self.retries = 0

    def _count(self) -> None:
        self.retries += 1

    def read(self, failed: list[BaseException], record_ids: RecordIds, epochs: RecordIds) -> tuple[PyTree, BadRecords]:
        """Returns rows and replaced records, after a read of all records that ended in ``failed[0]``.

        Removes ``failed[0]``, because it refers to frames.
        """
        try:
            try:
                return self._read_in_pieces(failed, record_ids, epochs), ()
            except BAD_RECORD:
                if self._replacement is None:
                    raise
                return self._read_one_by_one(self._replacement, record_ids, epochs)
        except Exception as error:
            if self._replacement is not None and not isinstance(error, OSError):
                error.add_note(_NOT_REPLACED)
            raise

    def _read_in_pieces(self, failed: list[BaseException], record_ids: RecordIds, epochs: RecordIds) -> PyTree:
        """Reads 1, 2, 4, … records at a time; keeps those already read, and counts the attempts of each separately."""
        parts: list[PyTree] = []
        done, size = 0, 1

        def read_rest() -> PyTree:
            nonlocal done, size
            if failed:  # counts as the first attempt
                raise failed.pop()
            while done < len(record_ids):
                piece, asked, size = slice(done, done + size), size, 1  # 1 again if the read raises
                parts.append(self._read(record_ids[piece], epochs[piece]))
                done, size = done + asked, 2 * asked
            return join_batches(parts, what=lambda _: "the source")

        def doing() -> str:
            first = f" from record {record_ids[done]} on" if done else ""
            return f"reading {len(record_ids) - done} records{first}"

        return call_with_retry(
            read_rest, self._retry, doing=doing, on_retry=self._count, progress=lambda: done, since=self._since
        )

    def _read_one_by_one(
        self, replacement: Callable[[int, int, int], int], record_ids: RecordIds, epochs: RecordIds
    ) -> tuple[PyTree, BadRecords]:
        rows, bad = [], []
        for record_id, epoch in zip(record_ids.tolist(), epochs.tolist(), strict=True):
            for attempt in range(_MAX_REPLACEMENTS):
                planned = replacement(record_id, epoch, attempt) if attempt else record_id
                ids, epoch_ids = np.array([planned], np.int64), np.array([epoch], np.int64)

                def read(ids: RecordIds = ids, epoch_ids: RecordIds = epoch_ids) -> PyTree:
                    return self._read(ids, epoch_ids)

                try:
                    rows.append(
                        call_with_retry(read, self._retry, doing=f"reading record {planned}", on_retry=self._count)
                    )
                    break
                except BAD_RECORD as error:
                    if attempt == 0:
                        bad.append((record_id, epoch, reason_of(error)))
            else:
                raise SourceError(
                    f"record {record_id} is bad, and so are {_MAX_REPLACEMENTS - 1} candidates to replace it. Check the "
                    "data, which seems to be damaged as a whole.",
                    record_id=record_id,
                )
        return join_batches(rows, what=lambda row: f"record {record_ids[row]} or its replacement"), tuple(bad)
