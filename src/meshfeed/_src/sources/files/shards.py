"""Files of a source as one sequence of records: record id → file and row.

A source over files keeps :class:`Shards`, which describe the files as they were when the source was created, and reads
them through a pool (``open_files.py``), which all sources of the process share.
"""

from __future__ import annotations

import functools
import resource
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.manifest import lengths_by_file
from meshfeed._src.sources.files.shard import Shard
from meshfeed._src.sources.files.shard_cache import RemoteFile, ShardCache

S = TypeVar("S", bound=Shard)
_MAX_OPEN_FILES = 1024
_MAX_FILES_PER_CALL = 32
_CALLS_AT_ONCE = 16  # threads whose calls may hold files open, beside those that the pool keeps
Part = tuple[list[int], "np.ndarray | None", np.ndarray, "np.ndarray | None"]


class Shards(Generic[S]):
    """The files of a source, in the order of their record ids.

    Args:
      shards: the files.
      what: the files in an error, such as "ArrayRecord".
      manifests: paths of the manifests that list some of them.
      lengths: int64[files], the number of records of each file, if it is not what the file itself says.

    Attributes:
      files: the files.
      what: see above.
      starts: int64[files], the record id of each file's first record.
      ends: int64[files], the record id after each file's last record.
      lengths: int64[files], the number of records of each file.

    Raises:
      SourceError: if the files have no record.
    """

    def __init__(
        self, shards: Sequence[S], what: str, manifests: Sequence[str] = (), lengths: np.ndarray | None = None
    ) -> None:
        self.files = list(shards)
        self.what = what
        self.manifests = tuple(manifests)
        self.lengths = np.array([file.num_records for file in self.files], np.int64) if lengths is None else lengths
        self.ends = np.cumsum(self.lengths)
        self.starts = self.ends - self.lengths
        if not len(self):
            first = f", the first {self.files[0].path}" if self.files else ""
            raise SourceError(
                f"{what} got {len(self.files):,} file(s) with 0 records in all{first}. Expected at least one record. "
                "Check what wrote them."
            )

    def __repr__(self) -> str:
        return f"{len(self.files):,} file{'s' * (len(self.files) != 1)}, {len(self):,} records"

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def checked(self, record_ids: np.ndarray | Sequence[int]) -> np.ndarray:
        """Returns the ids as int64[n].

        Raises:
          IndexError: if an id is not in [0, len).
        """
        ids = np.asarray(record_ids, np.int64)
        if ids.size:
            # reduce() avoids the call overhead of min() and max().
            low, high = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
            if low < 0 or high >= self.ends[-1]:
                raise IndexError(
                    f"record id {low if low < 0 else high} is out of range: the source has {len(self):,} records"
                )
        return ids

    def parts(self, ids: np.ndarray) -> Iterator[Part]:
        """Splits a batch into parts that each read a bounded number of files.

        Yields:
          The files of the part and, for each of its records: the index of its file among them (None for one file), its
          row in that file, and its index in ``ids`` (None if the part is the whole batch).
        """
        if not ids.size:
            return
        if len(self.files) == 1:
            yield [0], None, ids, None
            return
        which = np.searchsorted(self.ends, ids, side="right")
        rows = ids - self.starts[which]
        if bool((which == which[0]).all()):
            yield [int(which[0])], None, rows, None
            return
        touched, index = np.unique(which, return_inverse=True)
        limit = files_per_call()
        if len(touched) <= limit:
            yield touched.tolist(), index, rows, None
            return
        for first in range(0, len(touched), limit):
            slots = np.flatnonzero((index >= first) & (index < first + limit))
            yield touched[first : first + limit].tolist(), index[slots] - first, rows[slots], slots

    def file_of(self, record_id: int) -> str:
        """Returns the path or URL of the file that contains a record."""
        return self.files[int(np.searchsorted(self.ends, record_id, side="right"))].path

    def cached_files(self, record_ids: np.ndarray, cache: ShardCache | None) -> list[RemoteFile] | None:
        """Returns the files of records that are read through a cache that fetches ahead; None if no file is."""
        if cache is None or not cache.ahead_bytes or not self._any_cached:
            return None
        files = [self.files[number] for number in np.unique(np.searchsorted(self.ends, record_ids, side="right"))]
        return [RemoteFile(cache, file.path, file.compression, file.num_bytes) for file in files if file.is_cached]

    @functools.cached_property
    def _any_cached(self) -> bool:
        return any(file.is_cached for file in self.files)

    def names(self) -> list[str]:
        """Returns the paths and URLs of the files, in record id order."""
        return [file.path for file in self.files]

    def stored_lengths(self, key: str) -> np.ndarray | None:
        """Returns the length of the leaf ``key`` of each record, if manifests list them; see ``StoredLengths``."""
        found = lengths_by_file(self.manifests, key)
        parts = [found.get(name) for name in self.names()]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]

    def identity(self) -> JsonValue:
        """Returns the identity of the files: count, total bytes, digest of base names and sizes in order."""
        return file_paths.identify_files(self.names(), [file.num_bytes for file in self.files])


def max_open_files() -> int:
    """Returns a quarter of the process limit, at most 1024: the rest is for the program and for fetches."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN_FILES, soft // 4))


def files_per_call() -> int:
    """Returns the maximum number of files that one call may hold open."""
    return max(1, min(_MAX_FILES_PER_CALL, max_open_files() // _CALLS_AT_ONCE))
