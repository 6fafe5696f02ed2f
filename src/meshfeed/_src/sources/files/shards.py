"""Files of a source as one sequence of records: record id → file and row.

A source over files keeps :class:`Shards`, which describe the files as they were when the source was created, and reads
them through a pool (``open_files.py``), which all sources of the process share. What happens at other times than in a step is
in ``shard.py`` and ``shard_reader.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.sources.checks import check_ids
from meshfeed._src.sources.files.open_files import files_per_call
from meshfeed._src.sources.files.shard import Shard

S = TypeVar("S", bound=Shard)
_FEW_FILES = 1024  # up to here, a flag for each file costs less than sorting
Part = tuple[list[int], "np.ndarray | None", np.ndarray, "np.ndarray | None"]


class Shards(Generic[S]):
    """The files of a source, in the order of their record ids.

    Attributes:
      files: the files.
      manifests: paths of the manifests that list some of them.
      starts: int64[files], the record id of each file's first record.
      ends: int64[files], the record id after each file's last record.
      lengths: int64[files], the number of records of each file; given if it is not that of the file itself.

    Raises:
      SourceError: if the files have no record.
    """

    def __init__(
        self, shards: Sequence[S], source: str, manifests: Sequence[str] = (), lengths: np.ndarray | None = None
    ) -> None:
        self.files = list(shards)
        self.manifests = tuple(manifests)
        self.lengths = np.array([file.num_records for file in self.files], np.int64) if lengths is None else lengths
        self.ends = np.cumsum(self.lengths)
        self.starts = self.ends - self.lengths
        if not len(self):
            first = f", the first {self.files[0].path}" if self.files else ""
            raise SourceError(
                f"{source} got {len(self.files):,} file(s) with 0 records in all{first}. Expected at least one record. "
                "Check what wrote them."
            )

    def describe(self, records: str = "records") -> str:
        """Returns the numbers of files and records, for ``repr``."""
        return f"{len(self.files):,} file{'s' * (len(self.files) != 1)}, {len(self):,} {records}"

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def checked(self, record_ids: np.ndarray | Sequence[int]) -> np.ndarray:
        """Returns the ids as int64[n].

        Raises:
          IndexError: if an id is not in [0, len).
        """
        ids = np.asarray(record_ids, np.int64)
        check_ids(ids, len(self))
        return ids

    def _distinct(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``np.unique(which, return_inverse=True)``, which for few files takes three times as long."""
        num_files = len(self.files)
        if num_files > _FEW_FILES:
            return np.unique(which, return_inverse=True)
        flags, index = np.zeros(num_files, bool), np.empty(num_files, np.int64)
        flags[which] = True
        touched = flags.nonzero()[0]
        index[touched] = np.arange(len(touched))
        return touched, index[which]

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
        which = self.ends.searchsorted(ids, "right")
        rows = ids - self.starts[which]
        touched, index = self._distinct(which)
        if len(touched) == 1:
            yield touched.tolist(), None, rows, None
            return
        limit = files_per_call()
        if len(touched) <= limit:
            yield touched.tolist(), index, rows, None
            return
        for first in range(0, len(touched), limit):
            slots = np.flatnonzero((index >= first) & (index < first + limit))
            yield touched[first : first + limit].tolist(), index[slots] - first, rows[slots], slots
