"""Rows of one open ArrayRecord file, the fastest way, and what the library raises as our own exceptions."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from meshfeed._errors import CorruptDataError
from meshfeed.sources._array_record_readers import ShardFile

# Powers of the last measurement, and of what is left of a way's slowdown when the other one is taken. Powers, so that one
# batch during which the process did not run, of 50 times the usual length, does not turn the choice over.
_NEW_WEIGHT = 0.2
_KEPT = 0.99


class RowReader:
    """Reads rows of files, and learns which way to scattered rows is the faster one here.

    One ``read`` of a list costs a walk through all chunks of the file and the waking of the library's threads, which then
    read side by side; many reads of one row cost neither, but wait for storage one after the other, and take the
    interpreter's lock anew each time. So a batch of 64 rows is five times as fast by single reads from the page cache
    of an idle machine, and many times as fast by a list from a network disk or beside a busy Python thread. Both ways
    are foretold by a formula, and by how much slower than the formula they were of late. Thread-safe: at worst a
    measurement is lost.
    """

    def __init__(self) -> None:
        self._slowdown = [1.0, 1.0]  # of single reads, of lists

    def read(self, reader: Any, file: ShardFile, rows: np.ndarray, first_record_id: int) -> list[bytes]:
        """Records ``rows`` of one file, in the order asked for.

        Args:
          reader: of ``file``.
          file: for the choice of the way to read, and for messages.
          rows: int64[n], row numbers within the file.
          first_record_id: record id of the file's row 0, for messages.

        Raises:
          CorruptDataError: a stored byte is damaged; names file and record.
          OSError: the file cannot be read.
        """
        read = reader.read
        try:
            if len(rows) == 1:
                row = int(rows[0])
                return read(row, row + 1)
            first, last = int(rows[0]), int(rows[-1])
            apart = rows[1:] - rows[:-1] != 1
            if last - first == len(rows) - 1 and not apart.any():
                return read(first, last + 1)
            ends = np.flatnonzero(apart) + 1  # of runs of neighbours, but for the last one
            if 2 * len(ends) < len(rows):
                records: list[bytes] = []
                for run in np.split(rows, ends):
                    records += read(int(run[0]), int(run[-1]) + 1)
                return records
            return self._read_scattered(read, file, rows)
        except (RuntimeError, IndexError) as error:
            raise _explain(reader, file, rows.tolist(), first_record_id, error) from error

    def _read_scattered(self, read: Any, file: ShardFile, rows: np.ndarray) -> list[bytes]:
        costs = expected_microseconds(file, rows)
        way = int(costs[1] * self._slowdown[1] < costs[0] * self._slowdown[0])
        listed = rows.tolist()
        start = time.perf_counter()
        records = read(listed) if way else [read(row, row + 1)[0] for row in listed]
        found = max(time.perf_counter() - start, 1e-7) * 1e6 / costs[way]
        self._slowdown[way] *= (found / self._slowdown[way]) ** _NEW_WEIGHT
        self._slowdown[1 - way] **= _KEPT  # towards 1, so that it is tried again some day
        return records


def expected_microseconds(file: ShardFile, rows: np.ndarray) -> tuple[float, float]:
    """What scattered rows cost by single reads and by one list, from the page cache of an idle machine.

    Measured on records of 200 to 8,192 bytes: one row costs 3.3 and the decoding of its chunk each time; a list costs
    0.002 for every chunk of the file, some 200 to wake the library's threads, 2.7 a row, and the decoding of each chunk
    once. A chunk decodes at about 5 bytes a nanosecond.
    """
    num_chunks = max(file.num_chunks, 1)
    num_touched = len(rows) if file.group_size == 1 else len(np.unique(rows // file.group_size))
    decoding = 0.0002 * file.num_bytes / num_chunks
    waking = 200.0 if num_touched > 1 else 0.0  # one chunk is read on the calling thread
    singles = len(rows) * (3.3 + decoding)
    return singles, 0.002 * num_chunks + waking + num_touched * (2.7 + decoding) + 0.5 * (len(rows) - num_touched)


def _explain(reader: Any, file: ShardFile, rows: list[int], first_record_id: int, error: Exception) -> Exception:
    """The exception to raise for ``error``: reads the rows one by one to find the one at fault."""
    row, message = None, str(error)
    for candidate in rows:
        try:
            reader.read(candidate, candidate + 1)
        except (RuntimeError, IndexError) as single:
            row, message = candidate, str(single)
            break
    if "read()" in message and "failed" in message:  # pread() failed: the disk or the network, not the bytes
        return OSError(f"{file.path}: {message}")
    record_id = None if row is None else first_record_id + row
    which = "a record" if row is None else f"record {record_id} (row {row} of the file)"
    return CorruptDataError(
        f"{file.path}: {which} is damaged: {message}. Its bytes are not those that were written. Copy the file "
        "again from where it came, or let the feed replace such records: "
        "bad_records=meshfeed.SkipBad(max_fraction=1e-4).",
        path=file.path,
        record_id=record_id,
    )
