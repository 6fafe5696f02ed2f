"""Rows of open ArrayRecord files, the fastest way, and the library's exceptions as our own."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.sources.array_record import direct
from meshfeed._src.sources.array_record.direct import DirectFile
from meshfeed._src.sources.array_record.readers import OpenFile, ShardFile
from meshfeed._src.sources.decode_raw import packer

_FEW = 1 << 14  # rows; what is computed for a batch of at most this many is kept
_PROBES = 4


def read_direct(opened: Sequence[OpenFile], file_index: np.ndarray | None, rows: np.ndarray) -> list[bytes] | None:
    """Records of several files by one call of the extension module.

    Args:
      opened: the files.
      file_index: int64[n], the file of each record; None if there is only one.
      rows: int64[n], rows of their files.

    Returns:
      None if a file has to be read by the library, or a record cannot be read or is damaged.
    """
    files = [file.direct for file in opened if file.direct is not None]
    if len(files) < len(opened):
        return None
    width, count = common_width(files), len(rows)
    bounds = steps(count + 1, width) if width else _bounds(files, file_index, rows)
    out = np.empty(int(bounds[-1]), np.uint8)
    if not direct.read(files, file_index, rows, bounds[:-1], out):
        return None
    content = out.data
    if width and count <= _FEW:
        return list(packer(width, count).unpack_from(content))
    return [bytes(content[first:end]) for first, end in itertools.pairwise(bounds.tolist())]


def common_width(files: Sequence[DirectFile]) -> int:
    """Bytes of every record of all files; 0 if they differ."""
    return files[0].width if all(file.width == files[0].width for file in files) else 0


def _bounds(files: Sequence[DirectFile], file_index: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    """Where records of these sizes begin if they follow one another, and where the last one ends: int64[n + 1]."""
    if file_index is None:
        sizes = files[0].sizes(rows)
    else:
        sizes = np.empty(len(rows), np.int64)
        for number, file in enumerate(files):
            mine = np.flatnonzero(file_index == number)
            sizes[mine] = file.sizes(rows[mine])
    return np.concatenate([[0], np.cumsum(sizes)])


def read_by_library(opened: OpenFile, file: ShardFile, rows: np.ndarray, first_record_id: int) -> list[bytes]:
    """Records ``rows`` of one file, in the order asked for, by the array_record library.

    Args:
      opened: ``file``, open.
      file: for the choice of the call, and for messages.
      rows: int64[n], row numbers within the file.
      first_record_id: record id of the file's row 0, for messages.

    Raises:
      CorruptDataError: a stored byte is damaged; names file and record.
      SourceError: the file has been cut short since it was opened.
      OSError: the file cannot be read.
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
    """One read of a list walks all chunks of the file and wakes the library's threads, which then read side by side.

    Reads of single rows do neither, but wait for storage one after the other: they are faster only for few rows of a
    large file that lie in the page cache.
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
    """Whether the page cache has what lies about where some of the rows are; False where the system does not tell."""
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
    except OSError:  # BlockingIOError: it would have to wait for storage
        return False
    return True


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
    """What scattered rows cost by single reads and by one list if they lie in the page cache.

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
