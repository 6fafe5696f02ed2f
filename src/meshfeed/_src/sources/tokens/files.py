"""Reads of many ranges of token files into one int32 array.

Files are read with ``pread`` instead of a memory map: touching a mapped page that the file no longer has ends the process
with SIGBUS, while a read returns fewer bytes, which becomes an error that names the file.

The C extension reads and converts a batch in one call without the GIL. Python code reads what it leaves: everything if
the extension is not installed, and otherwise ranges with an error, which it reports.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import SparseFile, sparse_files
from meshfeed._src.sources.files.manifest import lengths_by_file
from meshfeed._src.sources.files.open_files import Descriptor, fetch_missing, files_per_call, shared_pool
from meshfeed._src.sources.tokens.formats import TokenFile, cut_short, document_lengths, ends_with

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

try:
    from meshfeed._src.sources.tokens import _reads as extension  # pyright: ignore[reportAttributeAccessIssue] # built from C
except ImportError as error:  # installed without a C compiler, or built for another system
    logging.getLogger("meshfeed").debug("token files are read by Python code, which is slower: %s", error)
    extension: Any = None

LENGTHS_KEY = "tokens"
"""The leaf for which a manifest lists the lengths of documents; its name in a batch is a setting of the source."""
_FEW = 16  # so many files are all opened for a batch, since finding those that it needs takes longer
_RANGES_PER_CALL = 1024  # Ctrl-C takes effect only between calls
_NATIVE = ("=", "|", "<" if sys.byteorder == "little" else ">")
_INT32 = np.iinfo(np.int32)


class _Ranges(NamedTuple):
    """Ranges of tokens: file, first token in it, length, place in the result, and record id for errors, int64[n] each."""

    file_index: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    record_ids: np.ndarray


class TokenFiles:
    """The token files of a source, with what is needed to read them at hand; ``manifests`` are paths of manifests."""

    def __init__(self, files: Sequence[TokenFile], manifests: Sequence[str], cache: ShardCache | None) -> None:
        self.files, self._manifests, self._cache = files, manifests, cache
        self._headers = np.array([file.offset for file in files], np.int64)
        self._item_bytes = np.array([file.dtype.itemsize for file in files], np.int64)
        self._kinds = [(file.dtype.str, file.is_cached) for file in files]
        alike = len(set(self._kinds)) == 1 and not self._kinds[0][1]  # opening a remote or compressed file fetches it
        self._all = list(range(len(files))) if len(files) <= _FEW and alike else None

    def read(
        self, file_index: np.ndarray, starts: np.ndarray, lengths: np.ndarray, record_ids: np.ndarray
    ) -> np.ndarray:
        """Reads ranges of tokens, in any order, with repeats and overlaps allowed; for the arguments, see :class:`_Ranges`.

        Returns:
          The ranges one after the other, int32[sum of the lengths].

        Raises:
          CorruptDataError: if a file ends before the end of a range; names the file and the record.
          SourceError: if a token does not fit into int32, or a file has changed; names the file.
          OSError: if a file cannot be read.
        """
        out = memory.empty((int(lengths.sum()),), np.int32)
        ranges = _Ranges(file_index, starts, lengths, np.cumsum(lengths) - lengths, record_ids)
        groups = self._groups(file_index) if out.size else []
        for numbers in groups:
            rows = None if len(groups) == 1 else np.flatnonzero(np.isin(file_index, numbers))
            for first in range(0, len(starts) if rows is None else len(rows), _RANGES_PER_CALL):
                part = slice(first, first + _RANGES_PER_CALL)
                chosen = part if rows is None else rows[part]
                self._read_part(numbers, _Ranges._make([column[chosen] for column in ranges]), out)
        return out

    def ask_disk(self, file_index: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> bool | None:
        """Has the disk fetch ranges, as for :meth:`read`, of open files; see :class:`meshfeed._src.base.hooks.ReadsDisk`."""
        if any(is_cached for _, is_cached in self._kinds):
            return None
        sizes = self._item_bytes[file_index]
        begins = self._headers[file_index] + starts * sizes
        ends = begins + lengths * sizes

        def of_file(number: int) -> tuple[Descriptor, np.ndarray, np.ndarray]:
            rows = file_index == number
            return self.files[number].open(None), begins[rows], ends[rows]

        opened = [number for number in np.unique(file_index).tolist() if shared_pool.is_open(self.files[number])]
        return fetch_missing([functools.partial(of_file, number) for number in opened])

    def _groups(self, file_index: np.ndarray) -> list[list[int]]:
        """Returns the files of ranges, in groups of one dtype, local or remote, few enough to be open at once."""
        if self._all is not None:
            return [self._all]
        by_kind: dict[tuple[str, bool], list[int]] = {}
        for number in np.unique(file_index).tolist():
            by_kind.setdefault(self._kinds[number], []).append(number)
        limit = files_per_call()
        return [part[i : i + limit] for part in by_kind.values() for i in range(0, len(part), limit)]

    def _read_part(self, numbers: Sequence[int], ranges: _Ranges, out: np.ndarray) -> None:
        """Reads ranges of the files ``numbers``, which have one dtype."""
        dtype = self.files[numbers[0]].dtype
        of_file = ranges.file_index if numbers is self._all else np.searchsorted(numbers, ranges.file_index)
        offsets = self._headers[ranges.file_index] + ranges.starts * dtype.itemsize
        opened = self._open(numbers, of_file, offsets, offsets + ranges.lengths * dtype.itemsize)
        fds = np.array([descriptor.number for descriptor in opened], np.int64)[of_file]
        done = 0
        if extension is not None and dtype.byteorder in _NATIVE:
            done = extension.read(fds, offsets, ranges.lengths, ranges.places, out, dtype.kind, dtype.itemsize)
        for i in range(done, len(fds)):
            file, start = self.files[int(ranges.file_index[i])], int(ranges.places[i])
            tokens = out[start : start + int(ranges.lengths[i])]
            _read_range(file, int(ranges.record_ids[i]), int(fds[i]), int(offsets[i]), tokens)
        del opened  # not earlier: the number of a closed descriptor may be reused

    def _open(
        self, numbers: Sequence[int], of_file: np.ndarray, offsets: np.ndarray, stops: np.ndarray
    ) -> Sequence[Descriptor | SparseFile]:
        """Opens files; of remote ones without a cache, only the ranges are there."""
        files = [self.files[number] for number in numbers]
        if self._cache is None and self._kinds[numbers[0]][1]:
            return sparse_files([file.remote for file in files], of_file, offsets, stops)
        return [file.open(self._cache) for file in files]

    def document_lengths(self, eod: int | None) -> list[np.ndarray]:
        """Returns :func:`document_lengths` of each file, from manifests if they are listed; some file must have ``eod``."""
        listed = lengths_by_file(self._manifests, LENGTHS_KEY, eod)

        def find(file: TokenFile) -> np.ndarray:
            found = listed.get(file.path)
            if found is None or int(found.sum(dtype=np.int64)) != file.num_records:
                return document_lengths(file, eod, self._cache)
            return found.astype(np.int64)

        lengths = file_paths.in_threads(find, self.files)
        searched = [
            (file, len(found))
            for file, found in zip(self.files, lengths, strict=True)
            if file.index is None and file.path not in listed
        ]
        # A file of one document may or may not end with the token.
        if searched and not any(number > 1 or ends_with(file, eod, self._cache) for file, number in searched):
            others = f" or the {len(searched) - 1:,} other file(s)" if len(searched) > 1 else ""
            raise SettingsError(
                f"eod={eod} does not occur in {searched[0][0].path}{others}. Pass the token that ends a document.",
                setting="eod",
            )
        return lengths


def _read_range(file: TokenFile, record_id: int, fd: int, offset: int, out: np.ndarray) -> None:
    tokens = np.empty(len(out), file.dtype)
    view, done = memoryview(tokens.data).cast("B"), 0
    while done < len(view):
        number = os.preadv(fd, [view[done:]], offset + done)
        if not number:
            where = f"it ends at byte {offset + done:,} or before, within record {record_id}"
            raise cut_short(file.path, where, record_id)
        done += number
    # A token above int32 would wrap to a negative number, which an embedding lookup clamps without an error.
    wrong = np.flatnonzero((tokens > _INT32.max) | (tokens < _INT32.min))
    if wrong.size:
        raise SourceError(
            f"{file.path} holds the token {tokens[wrong[0]]} in record {record_id}. Expected tokens that fit into "
            f"int32. Check that the file holds {file.dtype}.",
            record_id=record_id,
        )
    out[:] = tokens
