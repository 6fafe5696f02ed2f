"""Reads ranges of tokens of many files into one int32 array.

With ``pread`` instead of a memory map: touching a mapped page that the file no longer has ends the process with SIGBUS,
while a read returns fewer bytes, which becomes an error that names the file.

The C extension reads and converts a batch in one call without the GIL. Python code reads what it leaves: everything if
the extension is not installed, and otherwise ranges with an error, which it reports.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.sources.files.direct import SparseFile, sparse_files
from meshfeed._src.sources.files.open_files import Descriptor
from meshfeed._src.sources.files.paths import is_url
from meshfeed._src.sources.files.shards import files_per_call
from meshfeed._src.sources.tokens.files import TokenFile, cut_short

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

try:
    from meshfeed._src.sources.tokens import _reads as extension  # pyright: ignore[reportAttributeAccessIssue] # built from C
except ImportError as error:  # installed without a C compiler, or built for another system
    logging.getLogger("meshfeed").debug("token files are read by Python code, which is slower: %s", error)
    extension: Any = None

_FEW = 16  # so many files are all opened for a batch, since finding those that it needs takes longer
_RANGES_PER_CALL = 1024  # Ctrl-C takes effect only between calls
_NATIVE = ("=", "|", "<" if sys.byteorder == "little" else ">")
_INT32 = np.iinfo(np.int32)


class FileSet:
    """The files of a source, with what is needed to read them at hand.

    Args:
      files: the files.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = files
        self._headers = np.array([file.offset for file in files], np.int64)
        self._kinds = [(file.dtype.str, is_url(file.stored.path)) for file in files]
        alike = len(set(self._kinds)) == 1 and not self._kinds[0][1]  # opening a remote file fetches it
        self._all = list(range(len(files))) if len(files) <= _FEW and alike else None

    def groups(self, file_index: np.ndarray) -> list[list[int]]:
        """Returns the files of ranges, int64[n], in groups of one dtype, local or remote, few enough to be open at once."""
        if self._all is not None:
            return [self._all]
        by_kind: dict[tuple[str, bool], list[int]] = {}
        for number in np.unique(file_index).tolist():
            by_kind.setdefault(self._kinds[number], []).append(number)
        limit = files_per_call()
        return [part[i : i + limit] for part in by_kind.values() for i in range(0, len(part), limit)]

    def places(
        self,
        numbers: Sequence[int],
        file_index: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        cache: ShardCache | None,
    ) -> tuple[Sequence[Descriptor | SparseFile], np.ndarray, np.ndarray]:
        """Opens the files ``numbers``; of remote ones without a cache, only the ranges are there.

        Returns:
          What must be held until everything is read, since the number of a closed descriptor may be reused; and for each
          range, int64[n], its descriptor and its first byte.
        """
        stored, itemsize = [self.files[number].stored for number in numbers], self.files[numbers[0]].dtype.itemsize
        of_file = file_index if numbers is self._all else np.searchsorted(numbers, file_index)
        offsets = self._headers[file_index] + starts * itemsize
        if cache is None and self._kinds[numbers[0]][1]:
            opened = sparse_files([file.remote for file in stored], of_file, offsets, offsets + lengths * itemsize)
        else:
            opened = [file.open(cache) for file in stored]
        fds = np.array([descriptor.number for descriptor in opened], np.int64)
        return opened, fds[of_file], offsets


class Ranges(NamedTuple):
    """Ranges of tokens, to be read one after the other into one array.

    Attributes:
      files: the files that ``file_index`` refers to.
      file_index: int64[n], the file of each range.
      starts: int64[n], the first token of each range in its file.
      lengths: int64[n], the number of tokens of each range.
      record_ids: int64[n], for errors.
    """

    files: FileSet
    file_index: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    record_ids: np.ndarray


def read_ranges(ranges: Ranges, out: np.ndarray, cache: ShardCache | None) -> None:
    """Reads ranges into ``out``.

    Args:
      ranges: of files of any dtypes, in any order, repeats and overlaps allowed.
      out: int32[sum of the lengths], C-contiguous.
      cache: for URLs.

    Raises:
      CorruptDataError: if a file ends before the end of a range; names the file and the record.
      SourceError: if a token does not fit into int32, or a file has changed; names the file.
      OSError: if a file cannot be read.
    """
    places = np.cumsum(ranges.lengths) - ranges.lengths
    groups = ranges.files.groups(ranges.file_index)
    for numbers in groups:
        rows = None if len(groups) == 1 else np.flatnonzero(np.isin(ranges.file_index, numbers))
        for first in range(0, len(places) if rows is None else len(rows), _RANGES_PER_CALL):
            part = slice(first, first + _RANGES_PER_CALL)
            _read_rows(ranges, numbers, part if rows is None else rows[part], places, out, cache)


def _read_rows(
    ranges: Ranges,
    numbers: Sequence[int],
    rows: slice | np.ndarray,
    places: np.ndarray,
    out: np.ndarray,
    cache: ShardCache | None,
) -> None:
    """Reads the ranges ``rows``, which are in the files ``numbers`` of one dtype."""
    file_index, record_ids = ranges.file_index[rows], ranges.record_ids[rows]
    lengths, places = ranges.lengths[rows], places[rows]
    opened, fds, offsets = ranges.files.places(numbers, file_index, ranges.starts[rows], lengths, cache)
    dtype = ranges.files.files[numbers[0]].dtype
    done = 0
    if extension is not None and dtype.byteorder in _NATIVE:
        done = extension.read(fds, offsets, lengths, places, out, dtype.kind, dtype.itemsize)
    for i in range(done, len(fds)):
        file, start = ranges.files.files[int(file_index[i])], int(places[i])
        _read_range(file, int(record_ids[i]), int(fds[i]), int(offsets[i]), out[start : start + int(lengths[i])])
    del opened


def _read_range(file: TokenFile, record_id: int, fd: int, offset: int, out: np.ndarray) -> None:
    tokens = np.empty(len(out), file.dtype)
    view, done = memoryview(tokens.data).cast("B"), 0
    while done < len(view):
        number = os.preadv(fd, [view[done:]], offset + done)
        if not number:
            where = f"it ends at byte {offset + done:,} or before, within record {record_id}"
            raise cut_short(file.stored.path, where, record_id)
        done += number
    wrong = np.flatnonzero((tokens > _INT32.max) | (tokens < _INT32.min))
    if wrong.size:
        raise SourceError(
            f"{file.stored.path} holds the token {tokens[wrong[0]]} in record {record_id}. Expected tokens that fit into "
            f"int32. Check that the file holds {file.dtype}.",
            record_id=record_id,
        )
    out[:] = tokens
