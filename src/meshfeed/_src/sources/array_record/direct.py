"""Opens local ArrayRecord files with one record per chunk for the extension module, which reads whole batches.

For each record, the array_record library checks the hash, copies the bytes into a Python object and acquires the GIL.
The extension (``_riegeli.c``) reads, checks and copies a batch in one call without the GIL. It returns only records whose
hashes match; everything else is left to the library, which also reports damage.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.sources.files.open_files import Descriptor

_logger = logging.getLogger("meshfeed")

try:
    from meshfeed._src.sources.array_record import _riegeli as riegeli  # pyright: ignore[reportAttributeAccessIssue] # built from C
except ImportError as error:  # installed without a C compiler, or built for another system
    _logger.debug("ArrayRecord files are read by the array_record library, which is slower: %s", error)
    riegeli: Any = None

_MAGIC = 0x71930E704FDAE05E  # of ArrayRecord, in the postscript
_BLOCK_BYTES = 1 << 16
_BLOCK_HEADER_BYTES = 24
_CHUNK_HEADER_BYTES = 40
_MAX_RECORD_BYTES = 1 << 23  # each reading thread keeps a buffer of the longest record
_PARSED_AT_ONCE = 1 << 17  # footer entries; bounds the memory of the parsed fields
_ROWS_PER_CALL = 1024  # Ctrl-C takes effect only between calls


@dataclasses.dataclass(frozen=True)
class DirectFile:
    """A file readable by the extension.

    Attributes:
      index: a ``_riegeli.Index`` with the offsets and sizes of the records.
      open: returns the open file.
    """

    index: Any
    open: Callable[[], Descriptor]

    @property
    def width(self) -> int:
        """Size in bytes of every record; 0 if the sizes differ."""
        return self.index.width

    @property
    def num_entries(self) -> int:
        """Number of 8-byte entries of the index in memory."""
        return self.index.nbytes // 8

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Returns the sizes in bytes of records ``rows``, int64[n]."""
        sizes = np.empty(len(rows), np.int64)
        self.index.sizes(np.ascontiguousarray(rows, np.int64), sizes)
        return sizes


def open_direct(open_file: Callable[[], Descriptor], num_records: int) -> DirectFile | None:
    """Returns a file for :func:`read`, or None if the file needs the library.

    Args:
      open_file: opens the file, or returns it if it is still open.
      num_records: number of records in the file.
    """
    if riegeli is None:
        return None
    try:
        file = open_file()
        footer = _read_footer(file.number, file.status.st_size, num_records)
        return None if footer is None else DirectFile(riegeli.Index(*footer), open_file)
    except (OSError, ValueError):
        return None


def read(
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
      files: from :func:`open_direct`.
      file_index: int64[n], the file of each record; None if there is only one file.
      rows: int64[n], row numbers within the files.
      places: int64[n], the byte offset of each record in ``out``.
      out: uint8, large enough for all records at their offsets.
      width: size in bytes that each record must have; 0 for any size.

    Returns:
      Whether all records were read and are intact; otherwise the content of ``out`` is undefined.
    """
    try:
        opened = [file.open() for file in files]  # keep a reference: the number of a closed descriptor may be reused
    except (OSError, SourceError):  # removed or changed: the library reports which
        return False
    indexes, fds = [file.index for file in files], np.array([file.number for file in opened], np.int64)
    rows, places = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(places, np.int64)
    for first in range(0, len(rows), _ROWS_PER_CALL):
        part = slice(first, first + _ROWS_PER_CALL)
        index = None if file_index is None else file_index[part]
        if riegeli.read(indexes, fds, index, rows[part], places[part], out, width) != len(rows[part]):
            return False
    return True


def _read_footer(fd: int, num_bytes: int, num_records: int) -> tuple[np.ndarray, np.ndarray, bool] | None:
    """Reads the record index of a file.

    Returns:
      Offsets int64[n + 1] (the last one is that of the footer), sizes int64[n], and whether records are compressed; None
      if the file needs the library.
    """
    postscript = _read_records(fd, num_bytes - _BLOCK_BYTES, num_bytes, 3)
    found = None if postscript is None else _columns(postscript[1], 0, 3, (8, 16))
    if found is None or (found[1] != _MAGIC).any():
        return None
    footer_offset = int(found[0][0])
    footer = _read_records(fd, footer_offset, num_bytes, num_records + 1)
    if footer is None:
        return None
    compressed, values, metadata_size = footer
    columns = _columns(values, metadata_size, num_records, (8, 16, 24))  # chunk offset, data size, number of records
    if columns is None or (columns[2] != 1).any():
        return None
    offsets, sizes = np.append(columns[0], footer_offset), columns[1]
    spans = np.diff(offsets)
    if (spans <= 0).any() or (spans > _MAX_RECORD_BYTES).any() or (sizes > _MAX_RECORD_BYTES).any():
        return None
    return offsets, np.ascontiguousarray(sizes), compressed


def _read_records(fd: int, offset: int, num_bytes: int, num_records: int) -> tuple[bool, bytes, int] | None:
    """Returns whether a chunk is compressed, its concatenated records, and the size of the first one; None on failure."""
    if not 0 <= offset < num_bytes:
        return None
    data_size = _data_size(fd, offset, num_records)
    chunk = riegeli.read_chunk(fd, offset, data_size) if 0 < data_size <= num_bytes else None
    if chunk is None:
        return None
    data = memoryview(chunk)[_CHUNK_HEADER_BYTES:]
    compressed = data[0] == ord("z")
    found = _varint(data, 1)
    if (data[0] and not (compressed and riegeli.HAS_ZSTD)) or found is None or found[0] > len(data) - found[1]:
        return None
    end = found[1] + found[0]
    sizes, values = (
        _inflated(compressed, part, 64 * num_records + 4096) for part in (data[found[1] : end], data[end:])
    )
    if sizes is None or values is None or len(values) != int.from_bytes(chunk[32:40], "little"):
        return None
    first = _varint(sizes, 0)
    return None if first is None or first[0] > len(values) else (compressed, values, first[0])


def _data_size(fd: int, offset: int, num_records: int) -> int:
    """Returns the data size in the header of a chunk of ``num_records`` records; 0 if the header does not match."""
    content = os.pread(fd, _CHUNK_HEADER_BYTES + 2 * _BLOCK_HEADER_BYTES, offset)
    border = -offset % _BLOCK_BYTES  # a block header may interrupt or precede the chunk header
    header = (content[:border] + content[border + _BLOCK_HEADER_BYTES :])[:_CHUNK_HEADER_BYTES]
    if len(header) < _CHUNK_HEADER_BYTES or int.from_bytes(header[24:32], "little") != ord("r") | num_records << 8:
        return 0
    return int.from_bytes(header[8:16], "little")


def _inflated(compressed: bool, content: memoryview, limit: int) -> bytes | None:
    if not compressed:
        return bytes(content)
    found = _varint(content, 0)
    return None if found is None or found[0] > limit else riegeli.inflate(content[found[1] :], found[0])


def _varint(content: bytes | memoryview, start: int) -> tuple[int, int] | None:
    """Returns the varint at ``start`` and the offset after it, or None if it is invalid."""
    number = np.empty(1, np.int64)
    end = riegeli.read_varints(content, start, number)
    return None if end < 0 else (int(number[0]), end)


def _columns(content: bytes, start: int, count: int, tags: tuple[int, ...]) -> np.ndarray | None:
    """Parses ``count`` concatenated protocol buffers of varints, from ``start`` to the end of ``content``.

    Args:
      content: the encoded messages.
      start: offset of the first message.
      count: number of messages.
      tags: the tag of each field, the same in all messages.

    Returns:
      int64[fields, count]; None if ``content`` has any other form.
    """
    columns = np.empty((len(tags), count), np.int64)
    part = np.empty((min(count, _PARSED_AT_ONCE), 2 * len(tags)), np.int64)
    at = start
    for first in range(0, count, _PARSED_AT_ONCE):
        part = part[: count - first]
        at = riegeli.read_varints(content, at, part)
        if at < 0 or (part[:, ::2] != tags).any():
            return None
        columns[:, first : first + len(part)] = part[:, 1::2].T
    return columns if at == len(content) else None
