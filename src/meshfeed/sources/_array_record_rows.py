"""Rows of one open ArrayRecord file, the fastest way, and what the library raises as our own exceptions."""

from __future__ import annotations

import functools
import itertools
import os
import time
from typing import Any

import numpy as np

from meshfeed._errors import CorruptDataError, SourceError
from meshfeed.sources._array_record_direct import DirectFile
from meshfeed.sources._array_record_readers import OpenFile, ShardFile
from meshfeed.sources._decode_raw import packer

# Powers of the last measurement, and of what is left of a way's slowdown when the other one is taken. Powers, so that one
# batch during which the process did not run, of 50 times the usual length, does not turn the choice over.
_NEW_WEIGHT = 0.2
_KEPT = 0.99
_SERIAL, _LIST = range(2)  # ways to scattered rows
_FEW = 1 << 14  # rows, for which what is made once is kept
_SLOW = 3.0  # times as slow as foretold: then the other way is looked at


class RowReader:
    """Reads rows of files, and learns which way to scattered rows is the faster one here.

    One ``read`` of a list costs a walk through all chunks of the file and the waking of the library's threads, which then
    read side by side; many reads of one row cost neither, but wait for storage one after the other, and take the
    interpreter's lock anew each time. So a batch of 64 rows is five times as fast by single reads from the page cache
    of an idle machine, and many times as fast by a list from a network disk or beside a busy Python thread. Where a file
    can be read directly, that takes the place of single reads: it waits for storage as they do, and is faster. Both ways
    are foretold by a formula, and by how much slower than the formula they were of late. Thread-safe: at worst a
    measurement is lost.
    """

    def __init__(self) -> None:
        self._slowdown = [1.0, 1.0]  # of one row after the other, of lists

    def read(self, opened: OpenFile, file: ShardFile, rows: np.ndarray, first_record_id: int) -> list[bytes]:
        """Records ``rows`` of one file, in the order asked for.

        Args:
          opened: ``file``, open.
          file: for the choice of the way to read, and for messages.
          rows: int64[n], row numbers within the file.
          first_record_id: record id of the file's row 0, for messages.

        Raises:
          CorruptDataError: a stored byte is damaged; names file and record.
          SourceError: the file has been cut short since it was opened.
          OSError: the file cannot be read.
        """
        direct = self._direct(opened, file, rows)
        records = None if direct is None else self._read_directly(direct, file, rows)
        if records is None:
            library = opened.library()
            try:
                records = self._read_by_library(library.read, file, rows)
            except (RuntimeError, IndexError) as error:
                raise _explain(library, file, rows.tolist(), first_record_id, error) from error
            if not all(records):
                _check_length(opened, file)
            if direct is not None:  # for the library has found nothing wrong
                direct.was_mistaken(file.path)
        return records

    def read_into(
        self, opened: OpenFile, file: ShardFile, rows: np.ndarray, places: np.ndarray, out: np.ndarray, width: int
    ) -> bool:
        """Reads records of ``width`` bytes directly into ``out``, where that is possible and the faster way.

        Args:
          opened: ``file``, open.
          file: for the choice.
          rows: int64[n], C-contiguous.
          places: int64[n], C-contiguous, byte of ``out`` at which each record begins.
          out: C-contiguous.
          width: bytes of a record.

        Returns:
          Whether it was done; if not, ``out`` holds nothing of use and :meth:`read` finds out why.
        """
        direct = self._direct(opened, file, rows)
        return direct is not None and self._read_timed(direct, rows, places, out, width)

    def _read_timed(
        self, direct: DirectFile, rows: np.ndarray, places: np.ndarray, out: np.ndarray, width: int
    ) -> bool:
        try:
            held = direct.open()  # before the clock starts: another way would have to open the file too
        except (OSError, SourceError):  # gone or changed: the library finds out which
            return False
        start = time.perf_counter()
        if not direct.read(held, rows, places, out, width=width):
            return False
        self._learn(_SERIAL, start, direct.expected_microseconds(len(rows)))
        return True

    def _direct(self, opened: OpenFile, file: ShardFile, rows: np.ndarray) -> DirectFile | None:
        """The way past the library, where there is one and a list is not faster."""
        direct = opened.direct
        if direct is None or not direct.worth_trying():
            return None
        if self._slowdown[_SERIAL] < _SLOW or len(rows) == 1 or 2 * len(_ends_of_runs(rows)) < len(rows):
            return direct  # what comes in order, the system reads ahead by itself
        expected = direct.expected_microseconds(len(rows)), expected_microseconds(file, rows)[_LIST]
        return direct if self._choose(expected) == _SERIAL else None

    def _read_directly(self, direct: DirectFile, file: ShardFile, rows: np.ndarray) -> list[bytes] | None:
        rows = np.ascontiguousarray(rows)
        width, count = direct.width, len(rows)
        bounds = steps(count + 1, width) if width else np.concatenate([[0], np.cumsum(direct.sizes(rows))])
        out = np.empty(int(bounds[-1]), np.uint8)
        if not self._read_timed(direct, rows, bounds[:-1], out, 0):
            return None
        content = out.data
        if width and count <= _FEW:
            return list(packer(width, count).unpack_from(content))
        return [bytes(content[first:end]) for first, end in itertools.pairwise(bounds.tolist())]

    def _read_by_library(self, read: Any, file: ShardFile, rows: np.ndarray) -> list[bytes]:
        if len(rows) == 1:
            row = int(rows[0])
            return read(row, row + 1)
        ends = _ends_of_runs(rows)
        if not len(ends):
            return read(int(rows[0]), int(rows[-1]) + 1)
        if 2 * len(ends) < len(rows):
            records = []
            for run in np.split(rows, ends):
                records += read(int(run[0]), int(run[-1]) + 1)
            return records
        expected = expected_microseconds(file, rows)
        way = self._choose(expected)
        listed = rows.tolist()
        start = time.perf_counter()
        records = read(listed) if way == _LIST else [read(row, row + 1)[0] for row in listed]
        self._learn(way, start, expected[way])
        return records

    def _choose(self, expected: tuple[float, float]) -> int:
        return int(expected[_LIST] * self._slowdown[_LIST] < expected[_SERIAL] * self._slowdown[_SERIAL])

    def _learn(self, way: int, start: float, expected: float) -> None:
        found = max(time.perf_counter() - start, 1e-7) * 1e6 / expected
        self._slowdown[way] *= (found / self._slowdown[way]) ** _NEW_WEIGHT
        self._slowdown[1 - way] **= _KEPT  # towards 1, so that it is tried again some day


def _check_length(opened: OpenFile, file: ShardFile) -> None:
    """Of a file that has been cut short while it is open, the library gives empty records and says nothing."""
    try:
        found = os.stat(opened.path)
    except FileNotFoundError:  # it goes on while it is open
        return
    num_bytes = found.st_size
    if num_bytes != file.num_bytes and os.path.samestat(found, opened.status):
        raise SourceError(
            f"the ArrayRecord file {file.path} has changed since the source was made: {file.num_bytes:,} bytes then, "
            f"{num_bytes:,} now. Put it back as it was, or build the source again."
        )


def _ends_of_runs(rows: np.ndarray) -> np.ndarray:
    """Where runs of neighbours end, but for the last one."""
    return np.flatnonzero(rows[1:] - rows[:-1] != 1) + 1


def steps(count: int, width: int) -> np.ndarray:
    """``0, width, 2 * width, …``: int64[count], read-only."""
    return _steps(count, width) if count <= _FEW + 1 else np.arange(count) * width


@functools.lru_cache(maxsize=16)
def _steps(count: int, width: int) -> np.ndarray:
    places = np.arange(count) * width
    places.flags.writeable = False
    return places


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
