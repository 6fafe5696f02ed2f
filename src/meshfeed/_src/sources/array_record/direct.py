"""Opens local ArrayRecord files with one record per chunk for the extension module, which reads whole batches.

The array_record library checks one record's hash, copies its bytes into a Python object and takes the interpreter's
lock, for each record. The extension (``_riegeli.c``) reads, checks and places a batch in one call without that lock.
It only returns records whose hashes match; everything else is left to the library, which also reports damage.
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

_MAGIC = 0x71930E704FDAE05E  # ArrayRecord's, in the postscript
_BLOCK_BYTES = 1 << 16
_BLOCK_HEADER_BYTES = 24
_CHUNK_HEADER_BYTES = 40
_MAX_RECORD_BYTES = 1 << 23  # each reading thread keeps a buffer for the longest
_PARSED_AT_ONCE = 1 << 17  # entries of a footer
_ROWS_PER_CALL = 1024  # Ctrl-C waits for the end of a call


@dataclasses.dataclass(frozen=True)
class DirectFile:
    """A file that the extension can read.

    Attributes:
      index: a ``_riegeli.Index``: where its records are.
      open: returns the open file.
    """

    index: Any
    open: Callable[[], Descriptor]

    @property
    def width(self) -> int:
        """Bytes of every record; 0 if they differ."""
        return self.index.width

    @property
    def num_entries(self) -> int:
        """Numbers of 8 bytes that it holds in memory."""
        return self.index.nbytes // 8

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of records ``rows``, int64[n]."""
        sizes = np.empty(len(rows), np.int64)
        self.index.sizes(np.ascontiguousarray(rows, np.int64), sizes)
        return sizes


def open_direct(open_file: Callable[[], Descriptor], num_records: int) -> DirectFile | None:
    """What :func:`read` takes, or None if the file has to be read by the library.

    Args:
      open_file: opens the file, or returns it if it is still open.
      num_records: records in it.
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
      file_index: int64[n], the file of each record; None if there is only one.
      rows: int64[n], rows of their files.
      places: int64[n], the byte of ``out`` at which each record begins.
      out: uint8, with room for each record at its place.
      width: bytes that each record must have; 0 for any.

    Returns:
      Whether all records were read and are intact; otherwise the content of ``out`` is undefined.
    """
    try:
        opened = [file.open() for file in files]  # held by this frame: a closed descriptor's number may be reused
    except (OSError, SourceError):  # gone or changed: the library finds out which
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
    """Offsets int64[n + 1] (the last one is the footer's), sizes int64[n], and whether records are compressed.

    None for a file that is not to be read directly.
    """
    postscript = _read_records(fd, num_bytes - _BLOCK_BYTES, num_bytes, 3)
    found = None if postscript is None else _columns(postscript[1], 0, 3, (8, 16))
    if found is None or (found[1] != _MAGIC).any():
        return None
    place = int(found[0][0])
    footer = _read_records(fd, place, num_bytes, num_records + 1)
    if footer is None:
        return None
    compressed, values, metadata_size = footer
    columns = _columns(values, metadata_size, num_records, (8, 16, 24))
    if columns is None or (columns[2] != 1).any():
        return None
    offsets, sizes = np.append(columns[0], place), columns[1]
    spans = np.diff(offsets)
    if (spans <= 0).any() or (spans > _MAX_RECORD_BYTES).any() or (sizes > _MAX_RECORD_BYTES).any():
        return None
    return offsets, np.ascontiguousarray(sizes), compressed


def _read_records(fd: int, offset: int, num_bytes: int, num_records: int) -> tuple[bool, bytes, int] | None:
    """Whether a chunk is compressed, its records one after the other, and the size of the first one."""
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
    """Bytes of data according to the header of a chunk of ``num_records`` records; 0 if it is another chunk."""
    content = os.pread(fd, _CHUNK_HEADER_BYTES + 2 * _BLOCK_HEADER_BYTES, offset)
    border = -offset % _BLOCK_BYTES  # a block header stands there, in the middle of the chunk's or before it
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
    """The number at ``start``, and where it ends."""
    number = np.empty(1, np.int64)
    end = riegeli.read_varints(content, start, number)
    return None if end < 0 else (int(number[0]), end)


def _columns(content: bytes, start: int, count: int, tags: tuple[int, ...]) -> np.ndarray | None:
    """The fields of the ``count`` protocol buffers that follow one another from ``start`` to the end of ``content``.

    Args:
      content: messages of numbers.
      start: where the first one begins.
      count: of messages.
      tags: the tag of each field, the same in all messages.

    Returns:
      int64[fields, count]; None if ``content`` is anything else.
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
