"""Reads rows of open ArrayRecord files the fastest way; maps exceptions of the library to those of meshfeed."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.sources.array_record import readers
from meshfeed._src.sources.array_record.readers import DirectFile, OpenFile, ShardFile
from meshfeed._src.sources.decode_raw import packer

_FEW = 1 << 14  # rows; results for batches of up to this many are cached
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
    if len(files) < len(opened):
        return None
    width, count = common_width(files), len(rows)
    bounds = steps(count + 1, width) if width else _bounds(files, file_index, rows)
    out = np.empty(int(bounds[-1]), np.uint8)
    if not readers.read(files, file_index, rows, bounds[:-1], out):
        return None
    content = out.data
    if width and count <= _FEW:  # one call creates all bytes objects
        return list(packer(width, count).unpack_from(content))
    return [bytes(content[first:end]) for first, end in itertools.pairwise(bounds.tolist())]


def common_width(files: Sequence[DirectFile]) -> int:
    """Returns the size in bytes of every record of all files; 0 if the sizes differ."""
    return files[0].width if all(file.width == files[0].width for file in files) else 0


def _bounds(files: Sequence[DirectFile], file_index: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    """Returns the offsets of the concatenated records and the end of the last one: int64[n + 1]."""
    if file_index is None:
        sizes = files[0].sizes(rows)
    else:
        sizes = np.empty(len(rows), np.int64)
        for number, file in enumerate(files):
            mine = np.flatnonzero(file_index == number)
            sizes[mine] = file.sizes(rows[mine])
    return np.concatenate([[0], np.cumsum(sizes)])


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


def steps(count: int, width: int) -> np.ndarray:
    """Returns ``0, width, 2 * width, …`` as int64[count]; the array may be shared: do not modify it."""
    return _steps(count, width) if count <= _FEW + 1 else np.arange(count) * width


@functools.lru_cache(maxsize=16)
def _steps(count: int, width: int) -> np.ndarray:
    offsets = np.arange(count) * width
    offsets.flags.writeable = False  # cached
    return offsets


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
