"""Reads records of ArrayRecord files by id: a batch with one call of the extension, or with the array_record library."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import CorruptDataError, MeshfeedError, SourceError
from meshfeed._src.base.types import RecordIds
from meshfeed._src.sources.array_record import readers
from meshfeed._src.sources.array_record.readers import (
    DirectFile,
    OpenFile,
    ShardFile,
    check_readable,
    open_remote,
    read_by_library,
)
from meshfeed._src.sources.files.open_files import out_of_descriptors
from meshfeed._src.sources.files.shard_reader import ShardSource
from meshfeed._src.sources.files.shards import Shards

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

_ROWS_PER_CALL = 1024


class RecordFiles(ShardSource[ShardFile]):
    """ArrayRecord files whose records are read by id, in batches. Safe to read from several threads.

    Args:
      shards: the files.
      cache: keeps copies of remote files.

    Raises:
      SettingsError: remote files need a cache and there is none.
    """

    fresh_arrays = True

    def __init__(self, shards: Shards[ShardFile], cache: ShardCache | None) -> None:
        super().__init__(shards, cache)
        self._one_record_a_chunk = all(file.group_size == 1 for file in shards.files)
        if self._is_direct:
            check_readable(shards.files)
        self._rows_differ = False  # known once read_rows finds records of different sizes

    def _has_ranges(self, file: ShardFile) -> bool:
        return super()._has_ranges(file) and file.is_simple and readers.riegeli is not None

    def read_raw(self, record_ids: np.ndarray | Sequence[int]) -> list[bytes]:
        """Reads records without decoding them.

        Args:
          record_ids: int64[n], in any order, with repeats allowed.

        Returns:
          The bytes of n records, in the order of ``record_ids``.

        Raises:
          IndexError: if an id is not in [0, len).
          CorruptDataError: if stored bytes are damaged; names the file and the record.
          SourceError: if a file has been removed or changed since the source was created.
          OSError: if a file cannot be read.
        """
        ids = self._shards.checked(record_ids)
        records = [b""] * len(ids)
        for files, file_index, rows, slots in self._shards.parts(ids):
            found = self._read_part(files, file_index, rows)
            if slots is None:
                return found
            for slot, record in zip(slots.tolist(), found, strict=True):
                records[slot] = record
        return records

    def read_rows(self, record_ids: np.ndarray | Sequence[int]) -> np.ndarray | None:
        """Reads records of one size into one array without holding the GIL.

        Supports local files with one record per chunk, uncompressed or zstd, if the C extension is installed.

        Args:
          record_ids: int64[n], in any order, with repeats allowed.

        Returns:
          A new uint8 array ``[n, bytes per record]``, aligned to 64 bytes; or None if a file has several records per
          chunk, or the records differ in size, cannot be read this way, or are damaged. :meth:`read_raw` then reads the
          records or reports the error.

        Raises:
          IndexError, SourceError, OSError: as for :meth:`read_raw`.
        """
        if self._rows_differ or not self._one_record_a_chunk or readers.riegeli is None:  # avoid a futile attempt
            return None
        ids = self._shards.checked(record_ids)
        out: np.ndarray | None = None
        for numbers, file_index, rows, slots in self._shards.parts(ids):
            files = self._open_direct(numbers, file_index, rows)
            if files is None:
                return None
            widths = {file.index.width for file in files}  # 0 if the records of a file differ in size
            if out is None:
                out = memory.empty((len(ids), max(widths)), np.uint8)
            width = out.shape[1]
            if widths != {width} or not width:
                self._rows_differ = True
                return None
            places = (np.arange(len(ids)) if slots is None else slots) * width
            if not read_into(files, file_index, rows, places, out.reshape(-1), width=width):
                return None
        return out

    def ask_disk(self, record_ids: RecordIds) -> bool | None:
        """See :class:`meshfeed._src.base.hooks.ReadsDisk`; asks for records of files that have been read before."""
        if not self._is_local or not self._one_record_a_chunk or readers.riegeli is None:
            return None
        missing = False
        for numbers, file_index, rows, _ in self._shards.parts(record_ids):
            files = _direct(self._pool.all_checked([self._shards.files[number] for number in numbers]) or ())
            if files:
                with contextlib.suppress(MeshfeedError, OSError):  # the read raises it
                    missing |= any(_calls(files, file_index, rows, ask=True))
        return missing

    def _open_direct(
        self, numbers: list[int], file_index: np.ndarray | None, rows: np.ndarray
    ) -> list[DirectFile] | None:
        """Returns files for the extension; None if one needs the library."""
        try:
            opened = self._open(numbers, file_index, rows)
        except CorruptDataError:  # perhaps only the cached copy: read_raw fetches it again
            return None
        return _direct(opened)

    def _open(self, numbers: list[int], file_index: np.ndarray | None, rows: np.ndarray) -> list[OpenFile]:
        files = [self._shards.files[number] for number in numbers]
        if self._is_direct:
            return open_remote(files, file_index, rows, self._pool)
        self._fetch_together(files, self._open_ahead)
        return self._pool.all_checked(files) or list(map(self._readers_of, files))

    def _readers_of(self, file: ShardFile) -> OpenFile:
        return self._pool.checked(file, lambda: readers.check(file, self._cache, self._pool))

    def _open_ahead(self, file: ShardFile) -> None:
        """Fetches and opens a file ahead of reads."""
        found = self._readers_of(file)
        try:
            _ = found.library() if found.direct is None else found.direct.open()
        except OSError as error:
            if not out_of_descriptors(error):  # a fetch that failed has made all its attempts
                raise

    def _read_part(self, files: list[int], file_index: np.ndarray | None, rows: np.ndarray) -> list[bytes]:
        try:
            found = read_direct(self._open(files, file_index, rows), file_index, rows)
        except CorruptDataError:  # perhaps only the cached copy, which _read_file fetches again
            found = None
        if found is not None:
            return found
        # Some record is damaged, or in a file for the library, which decides what counts as damaged and reports it.
        records = [b""] * len(rows)
        for number, file in enumerate(files):
            mine = np.arange(len(rows)) if file_index is None else np.flatnonzero(file_index == number)
            for slot, record in zip(mine.tolist(), self._read_file(file, rows[mine]), strict=True):
                records[slot] = record
        return records

    def _read_file(self, number: int, rows: np.ndarray) -> list[bytes]:
        file, first_record_id = self._shards.files[number], int(self._shards.starts[number])

        if self._is_direct:
            return [self._read_remote(file, row, first_record_id) for row in rows.tolist()]

        def read() -> list[bytes]:
            opened = self._readers_of(file)
            return read_direct([opened], None, rows) or read_by_library(opened, file, rows, first_record_id)

        return self._read_again_if_damaged(read, file)

    def _read_remote(self, file: ShardFile, row: int, first_record_id: int) -> bytes:
        """Reads one record, to find the damaged one of several."""
        rows = np.array([row])
        found = read_direct(open_remote([file], None, rows, self._pool), None, rows)
        if found is None:
            record_id = first_record_id + row
            raise CorruptDataError(
                f"{file.path}: record {record_id} is damaged: its bytes do not have the hash that was stored with them. "
                "Write or copy the file again.",
                path=file.path,
                record_id=record_id,
            )
        return found[0]


def read_direct(opened: Sequence[OpenFile], file_index: np.ndarray | None, rows: np.ndarray) -> list[bytes] | None:
    """Reads rows, int64[n], of the files ``file_index``, int64[n], with the extension module; that is None for one file.

    Returns None if a file needs the library, or a record cannot be read or is damaged.
    """
    files = _direct(opened)
    records: list[bytes] = []
    for found in [None] if files is None else _calls(files, file_index, rows):
        if found is None:
            return None
        records += found
    return records


def _direct(opened: Sequence[OpenFile]) -> list[DirectFile] | None:
    files = [file.direct for file in opened if file.direct is not None]
    return files if len(files) == len(opened) else None


def read_into(
    files: Sequence[DirectFile],
    file_index: np.ndarray | None,
    rows: np.ndarray,
    places: np.ndarray,
    out: np.ndarray,
    *,
    width: int,
) -> bool:
    """As :func:`read_direct`, for records of ``width`` bytes, into ``out``, uint8, at the byte offsets ``places``, int64[n].

    Returns whether all records have that size, were read and are intact; otherwise the content of ``out`` is undefined.
    """
    calls = _calls(files, file_index, rows, np.ascontiguousarray(places, np.int64), out, width)
    return all(found is not None for found in calls)


def _calls(
    files: Sequence[DirectFile],
    file_index: np.ndarray | None,
    rows: np.ndarray,
    places: np.ndarray | None = None,
    out: np.ndarray | None = None,
    width: int = 0,
    *,
    ask: bool = False,
) -> Iterator[Any]:
    """Yields the result of each call of the extension; None if it fails.

    That is the records, or their number if they go to ``places``. With ``ask``, it is whether the disk has to fetch some.
    """
    try:
        opened = [file.open() for file in files]  # kept until the end: the number of a closed file may be reused
    except SourceError:  # removed or changed: the library reports which
        yield None
        return
    except OSError as error:
        if not out_of_descriptors(error):  # a failed fetch has made all its attempts, and the library would fetch again
            raise
        yield None  # the library opens one file at a time
        return
    indexes, fds = [file.index for file in files], np.array([file.number for file in opened], np.int64)
    rows = np.ascontiguousarray(rows, np.int64)
    for first in range(0, len(rows), _ROWS_PER_CALL):  # Ctrl-C takes effect only between calls
        part = slice(first, first + _ROWS_PER_CALL)
        index, to = (None if values is None else values[part] for values in (file_index, places))
        if ask:
            yield readers.riegeli.ask_disk(indexes, fds, index, rows[part])
            continue
        found = readers.riegeli.read(indexes, fds, index, rows[part], to, out, width)
        yield found if to is None or found == len(to) else None
