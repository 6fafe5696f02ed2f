"""Rows of a local ArrayRecord file of one record a chunk, uncompressed or by zstd, without the array_record library.

The library checks a record's hash, gives the bytes to Python and takes the interpreter's lock, each record anew. Here a
whole batch is read, checked and put in its place by one call that needs no lock. Only what has the right hashes is ever
given out; for everything else there is the library, which also says what is wrong with a record.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import numpy as np

from meshfeed._aligned import address
from meshfeed.sources import _riegeli, _zstd
from meshfeed.sources._open_files import Descriptor
from meshfeed.sources._riegeli import BLOCK_BYTES, CHUNK_HEADER_BYTES, Riegeli
from meshfeed.sources._zstd import Zstd

_MAGIC = 0x71930E704FDAE05E  # ArrayRecord's, in the postscript
_MAX_RECORD_BYTES = 1 << 23  # each thread that reads keeps a buffer of the longest
_MAX_MISTAKES = 4
_LEFT_ALONE = 256  # reads
_TOGETHER_BYTES = 1 << 18  # half of the second cache of most processors
_ROWS_A_CALL = 256  # Ctrl-C waits for the end of a call
_CALL_MICROSECONDS = 5.0
_PARSED_AT_ONCE = 1 << 17  # entries of a footer
_scratch = threading.local()
_logger = logging.getLogger("meshfeed")


class DirectFile:
    """What is known of a file, and reads it. Thread-safe.

    Attributes:
      open: gives the open file.
      width: bytes of every record; 0 where records differ.
      num_entries: numbers of 8 bytes that it holds in memory.
    """

    def __init__(
        self,
        machine: Riegeli,
        zstd: Zstd | None,
        open_file: Callable[[], Descriptor],
        offsets: np.ndarray,
        sizes: np.ndarray,
    ) -> None:
        """See :func:`open_direct`."""
        self._machine = machine
        self._zstd = zstd
        self.open = open_file
        low, high = (int(sizes.min()), int(sizes.max())) if len(sizes) else (0, 0)
        self.width = low if low == high else 0
        self._offsets = offsets
        self._sizes = None if self.width else sizes
        self._addresses = offsets.ctypes.data, None if self._sizes is None else self._sizes.ctypes.data
        longest = _longest_chunk(offsets, high, compressed=zstd is not None)
        self._scratch_bytes = max(_TOGETHER_BYTES, longest)
        # Measured on records of 200 to 8,192 bytes.
        self._microseconds = 1.2 + (0.0003 if zstd is None else 0.0013) * (float(sizes.mean()) if len(sizes) else 0)
        self._mistakes = 0  # in a row
        self._left_alone = 0

    @property
    def num_entries(self) -> int:
        return len(self._offsets) + (0 if self._sizes is None else len(self._sizes))

    def worth_trying(self) -> bool:
        """False for some time after several reads one after the other that only the library could make."""
        if self._mistakes < _MAX_MISTAKES:
            return True
        self._left_alone += 1
        return self._left_alone % _LEFT_ALONE == 0

    def was_mistaken(self, path: str) -> None:
        """To be called when the library has read rows of the file ``path`` that :meth:`read` could not."""
        self._mistakes += 1
        if self._mistakes == _MAX_MISTAKES:
            _logger.info(
                "%s: the array_record library read what meshfeed could not, %d times in a row; it reads the file from now "
                "on, and one read in %d is tried without it",
                path, _MAX_MISTAKES, _LEFT_ALONE,
            )  # fmt: skip

    def expected_microseconds(self, num_rows: int) -> float:
        """What scattered rows cost, from the page cache of an idle machine."""
        return _CALL_MICROSECONDS + self._microseconds * num_rows

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of records ``rows``, int64[n]."""
        return np.full(len(rows), self.width) if self._sizes is None else self._sizes[rows]

    def read(self, file: Descriptor, rows: np.ndarray, places: np.ndarray, out: np.ndarray, *, width: int = 0) -> bool:
        """Reads records into ``out``.

        Args:
          file: from :attr:`open`. The caller's frame holds it: if it were closed, its number could become another's.
          rows: int64[n], C-contiguous, each of them a row of the file.
          places: int64[n], C-contiguous, byte of ``out`` at which each record begins.
          out: C-contiguous, with room for each record at its place.
          width: bytes that each record must have; 0 for any.

        Returns:
          Whether all records were read and are sound; else ``out`` holds nothing of use.
        """
        offsets, sizes = self._addresses
        if sizes is None and width not in (0, self.width):
            return False
        # Held by this frame while the code runs: at the interpreter's exit what a thread has of its own goes first.
        scratch = _scratch_of(self._scratch_bytes)
        context = None if self._zstd is None else self._zstd.context()
        first_row, first_place, target, memory = address(rows), address(places), address(out), address(scratch)
        first, failed = 0, -1
        while first < len(rows):
            count = min(_ROWS_A_CALL, len(rows) - first)
            done = self._machine.read_records(
                file.number,
                count,
                first_row + 8 * first,
                len(self._offsets) - 1,
                offsets,
                sizes,
                width or self.width,
                first_place + 8 * first,
                target,
                memory,
                _TOGETHER_BYTES,
                None if self._zstd is None else self._zstd.decompress,
                None if context is None else context.address,
                self._machine.key,
            )
            first += done
            if done != count:
                if first == failed:
                    return False
                failed = first  # the system may give fewer bytes than asked for: once more from there
        self._mistakes = 0
        return True


def open_direct(open_file: Callable[[], Descriptor], num_records: int) -> DirectFile | None:
    """What reads a file in this way, or None if it cannot be read so.

    Args:
      open_file: gives the open file, now and at each read.
      num_records: records that it has.

    Raises:
      OSError: it cannot be read at all. That may pass, unlike a None.
    """
    machine = _riegeli.load()
    if machine is None:
        return None
    file = open_file()
    footer = _read_footer(machine, file.number, file.status.st_size, num_records)
    return None if footer is None else DirectFile(machine, footer[0], open_file, *footer[1:])


def _longest_chunk(offsets: np.ndarray, largest: int, *, compressed: bool) -> int:
    """Bytes in the file, at most: of compressed chunks by where the next one begins, else by the largest record."""
    if compressed:
        return int(np.diff(offsets).max(initial=0))
    return _riegeli.span_of(0, CHUNK_HEADER_BYTES + largest + 12) + 2 * BLOCK_BYTES


def _read_footer(
    machine: Riegeli, file: int, num_bytes: int, num_records: int
) -> tuple[Zstd | None, np.ndarray, np.ndarray] | None:
    """How records are compressed, their offsets, int64[n + 1], the last one the footer's, and sizes, int64[n].

    None for a file that is not to be read directly.
    """
    postscript = _read_records(machine, file, num_bytes - BLOCK_BYTES, num_bytes, 3)
    if postscript is None:
        return None
    found = _columns(machine, postscript[1], 3, (8, 16))
    if found is None or (found[1] != _MAGIC).any():
        return None
    place = int(found[0][0])
    footer = _read_records(machine, file, place, num_bytes, num_records + 1)
    if footer is None:
        return None
    zstd, values, metadata_size = footer
    columns = _columns(machine, values[metadata_size:], num_records, (8, 16, 24))
    if columns is None or (columns[2] != 1).any():
        return None
    offsets, sizes = np.append(columns[0], place), columns[1].copy()
    spans = np.diff(offsets)
    if offsets[0] < 0 or (spans <= 0).any() or (spans > _MAX_RECORD_BYTES).any() or (sizes > _MAX_RECORD_BYTES).any():
        return None
    return zstd, offsets, sizes


def _read_records(
    machine: Riegeli, file: int, offset: int, num_bytes: int, num_records: int
) -> tuple[Zstd | None, np.ndarray, int] | None:
    """What a chunk holds: how it is compressed, its records one after the other, and the size of the first one."""
    if not 0 <= offset < num_bytes:
        return None
    begin = os.pread(file, _riegeli.span_of(offset, CHUNK_HEADER_BYTES), offset)
    begin = _riegeli.without_block_headers(begin, offset)[:CHUNK_HEADER_BYTES]
    header = np.frombuffer(begin, "<u8") if len(begin) == CHUNK_HEADER_BYTES else None
    if header is None or int(header[3]) != ord("r") | num_records << 8:
        return None
    data_size = int(header[1])
    if not 0 < data_size <= num_bytes:
        return None
    chunk = np.empty(_riegeli.span_of(offset, CHUNK_HEADER_BYTES + data_size), np.uint8)
    if not machine.read_chunk(file, offset, data_size, address(chunk), machine.key):
        return None
    data = chunk[CHUNK_HEADER_BYTES : CHUNK_HEADER_BYTES + data_size]
    zstd = _zstd.load() if data[0] == ord("z") else None
    if data[0] and zstd is None:
        return None
    found = _varint(machine, data[1:])
    if found is None or found[0] > len(found[1]):
        return None
    parts = found[1][: found[0]], found[1][found[0] :]
    sizes, values = (_inflated(machine, zstd, part, 64 * num_records + 4096) for part in parts)
    if sizes is None or values is None or len(values) != int(header[4]):
        return None
    first = _varint(machine, sizes)
    return None if first is None or first[0] > len(values) else (zstd, values, first[0])


def _inflated(machine: Riegeli, zstd: Zstd | None, content: np.ndarray, limit: int) -> np.ndarray | None:
    if zstd is None:
        return content
    found = _varint(machine, content)
    if found is None or found[0] > limit:
        return None
    made = zstd.inflate(found[1].tobytes(), found[0])
    return None if made is None else np.frombuffer(made, np.uint8)


def _varint(machine: Riegeli, content: np.ndarray) -> tuple[int, np.ndarray] | None:
    """The number that ``content`` begins with, and what follows it."""
    number = np.empty(1, np.int64)
    end = machine.read_varints(address(content), len(content), 1, address(number))
    return None if end > len(content) or number[0] < 0 else (int(number[0]), content[end:])


def _columns(machine: Riegeli, content: np.ndarray, count: int, tags: tuple[int, ...]) -> np.ndarray | None:
    """The fields of ``count`` protocol buffers that ``content`` consists of, int64[fields, count].

    Args:
      machine: the compiled functions.
      content: uint8[n], messages of numbers one after the other.
      count: of messages.
      tags: what stands before each field, the same in all messages.

    Returns:
      None where ``content`` is anything else.
    """
    columns = np.empty((len(tags), count), np.int64)
    part = np.empty((min(count, _PARSED_AT_ONCE), 2 * len(tags)), np.int64)
    at = 0
    for first in range(0, count, _PARSED_AT_ONCE):
        part = part[: count - first]
        left = len(content) - at
        end = machine.read_varints(address(content) + at, left, part.size, address(part))
        if end > left or (part[:, ::2] != tags).any():
            return None
        columns[:, first : first + len(part)] = part[:, 1::2].T
        at += end
    return columns if at == len(content) else None


def _scratch_of(num_bytes: int) -> np.ndarray:
    """Memory of this thread's own, used again by its next read."""
    found = getattr(_scratch, "found", None)
    if found is None or len(found) < num_bytes:
        found = _scratch.found = np.empty(num_bytes, np.uint8)
    return found
