"""Reads rows of open ArrayRecord files the fastest way; maps exceptions of the library to those of meshfeed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.sources.array_record import readers
from meshfeed._src.sources.array_record.readers import DirectFile, OpenFile, ShardFile
from meshfeed._src.sources.files.direct import SparseFile
from meshfeed._src.sources.files.open_files import Descriptor

_ROWS_PER_CALL = 1024
_PROBES = 4


def read_direct(opened: Sequence[OpenFile], file_index: np.ndarray | None, rows: np.ndarray) -> list[bytes] | None:
    """Reads records of several files with one call of the extension module.

    Args:
      opened: the files.
      file_index: int64[n], the file of each record; None if there is only one file.
      rows: int64[n], row numbers within the files.

    Returns:
      The n records; None if a file needs the library, or a record cannot be read or is damaged.
    """
    files = [file.direct for file in opened if file.direct is not None]
    handles = _handles(files) if len(files) == len(opened) else None
    if handles is None:
        return None
    records: list[bytes] = []
    for part in _parts(len(rows)):
        index = None if file_index is None else file_index[part]
        found = readers.riegeli.read(
            *handles.arguments, index, np.ascontiguousarray(rows[part], np.int64), None, None, 0
        )
        if found is None:
            return None
        records += found
    return records


def read_into(
    files: Sequence[DirectFile],
    file_index: np.ndarray | None,
    rows: np.ndarray,
    places: np.ndarray,
    out: np.ndarray,
    *,
    width: int = 0,
) -> bool:
    """Reads records of several files into one buffer.

    Args:
      files: the files.
      file_index: int64[n], the file of each record; None if there is only one file.
      rows: int64[n], row numbers within the files.
      places: int64[n], the byte offset of each record in ``out``.
      out: uint8, large enough for all records at their offsets.
      width: size in bytes that each record must have; 0 for any size.

    Returns:
      Whether all records were read and are intact; otherwise the content of ``out`` is undefined.
    """
    handles = _handles(files)
    if handles is None:
        return False
    rows, places = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(places, np.int64)
    for part in _parts(len(rows)):
        index = None if file_index is None else file_index[part]
        found = readers.riegeli.read(*handles.arguments, index, rows[part], places[part], out, width)
        if found != len(rows[part]):
            return False
    return True


class _Handles(NamedTuple):
    """Open files: the first arguments of a call of the extension module, and references that keep descriptors open."""

    arguments: tuple[list[Any], np.ndarray]
    opened: list[Descriptor | SparseFile]  # the number of a closed descriptor may be reused


def _handles(files: Sequence[DirectFile]) -> _Handles | None:
    try:
        opened = [file.open() for file in files]
    except (OSError, SourceError):  # removed or changed: the library reports which
        return None
    return _Handles(([file.index for file in files], np.array([file.number for file in opened], np.int64)), opened)


def _parts(count: int) -> list[slice]:
    """Returns the rows of each call, because Ctrl-C takes effect only between calls."""
    return [slice(first, first + _ROWS_PER_CALL) for first in range(0, count, _ROWS_PER_CALL)]


def common_width(files: Sequence[DirectFile]) -> int:
    """Returns the size in bytes of every record of all files; 0 if the sizes differ."""
    widths = {file.width for file in files}
    return widths.pop() if len(widths) == 1 else 0


def read_by_library(opened: OpenFile, file: ShardFile, rows: np.ndarray, first_record_id: int) -> list[bytes]:
    """Reads records ``rows`` of one file, in that order, with the array_record library.

    Args:
      opened: ``file``, opened.
      file: used to choose the library call, and in messages.
      rows: int64[n], row numbers within the file.
      first_record_id: record id of row 0 of the file, for messages.

    Raises:
      CorruptDataError: if a stored byte is damaged; names the file and the record.
      SourceError: if the file has been truncated since it was opened.
      OSError: if the file cannot be read.
    """
    library = opened.library()
    try:
        records = _call_library(library.read, opened.path, file, rows)
    except (RuntimeError, IndexError) as error:
        raise _explain(library, file, rows.tolist(), first_record_id, error) from error
    if not all(records):
        _check_length(opened, file)
    return records


def _call_library(read: Any, path: str, file: ShardFile, rows: np.ndarray) -> list[bytes]:
    """Reads rows with the fastest calls of the library.

    Reading a list of rows iterates over all chunks of the file and wakes the library's threads, which read in parallel.
    Reading single rows does neither, but waits for storage sequentially: it is faster only for a few rows of a large
    file, if they are in the page cache.
    """
    ends = _ends_of_runs(rows)
    if 2 * len(ends) < len(rows) or len(rows) == 1:
        runs = [rows] if not len(ends) else np.split(rows, ends)
        return list(itertools.chain.from_iterable(read(int(run[0]), int(run[-1]) + 1) for run in runs))
    singles, together = expected_microseconds(file, rows)
    if singles < together and _are_cached(path, file, rows):
        return [read(row, row + 1)[0] for row in rows.tolist()]
    return read(rows.tolist())


def _are_cached(path: str, file: ShardFile, rows: np.ndarray) -> bool:
    """Whether bytes near a sample of the rows are in the page cache; False if the system cannot report it."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    sample = rows[:: -(-len(rows) // _PROBES)]
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset in (sample * (file.num_bytes / file.num_records)).astype(np.int64).tolist():
                os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
        finally:
            os.close(fd)
    except OSError:  # BlockingIOError: the read would wait for storage
        return False
    return True


def _check_length(opened: OpenFile, file: ShardFile) -> None:
    """Raises SourceError if the file was truncated while open: the library then returns empty records without an error."""
    try:
        found = os.stat(opened.path)
    except FileNotFoundError:  # a deleted file stays readable while open
        return
    num_bytes = found.st_size
    if num_bytes != file.num_bytes and os.path.samestat(found, opened.status):
        raise SourceError(
            f"the ArrayRecord file {file.path} has changed since the source was made: {file.num_bytes:,} bytes then, "
            f"{num_bytes:,} now. Put it back as it was, or build the source again."
        )


def _ends_of_runs(rows: np.ndarray) -> np.ndarray:
    """Returns the ends of all runs of consecutive rows except the last."""
    return np.flatnonzero(rows[1:] - rows[:-1] != 1) + 1


def expected_microseconds(file: ShardFile, rows: np.ndarray) -> tuple[float, float]:
    """Estimates the cost in µs of reading scattered rows from the page cache, with single reads and with one list.

    Measured with records of 200 to 8,192 bytes. A single read costs 3.3 µs plus the decoding of its chunk. A list costs
    0.002 µs per chunk of the file, about 200 µs to wake the library's threads, 2.7 µs per row, and the decoding of each
    chunk once. Chunks decode at about 5 bytes per nanosecond.
    """
    num_chunks = max(file.num_chunks, 1)
    num_touched = len(rows) if file.group_size == 1 else len(np.unique(rows // file.group_size))
    decoding = 0.0002 * file.num_bytes / num_chunks
    waking = 200.0 if num_touched > 1 else 0.0  # one chunk is read on the calling thread
    singles = len(rows) * (3.3 + decoding)
    return singles, 0.002 * num_chunks + waking + num_touched * (2.7 + decoding) + 0.5 * (len(rows) - num_touched)


def _explain(reader: Any, file: ShardFile, rows: list[int], first_record_id: int, error: Exception) -> Exception:
    """Returns the exception to raise for ``error``; reads the rows one by one to find the damaged one."""
    row, message = None, str(error)
    for candidate in rows:
        try:
            reader.read(candidate, candidate + 1)
        except (RuntimeError, IndexError) as single:
            row, message = candidate, str(single)
            break
    if "read()" in message and "failed" in message:  # a failed pread() is an I/O error, not corruption
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
