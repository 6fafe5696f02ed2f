"""Reads the rows of several small steps with one call of the source.

Most of the time of a small read does not depend on the number of its records: it goes to the files and row groups that it
touches, and to calls of Python and numpy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from meshfeed._src.base import trees
from meshfeed._src.base.types import ColumnSlices, RecordIds
from meshfeed._src.reading.records import ReadRows, RecordReader


class JointRead:
    """The reads of several steps. The first step that is collected reads all of them; if that fails, each is read alone.

    Args:
      records: reads records of the source.
      steps: record ids and epochs of each step, int64 ``[n]`` each, n at least 1.
      columns: the part of each leaf to read, for sources that read columns.
    """

    def __init__(
        self, records: RecordReader, steps: Sequence[tuple[RecordIds, RecordIds]], columns: ColumnSlices | None
    ) -> None:
        self._records, self._steps, self._columns = records, steps, columns
        self._rows: list[ReadRows] | None = None
        self._failed = False

    def rows_of(self, number: int) -> Callable[[], ReadRows]:
        """Returns a function that returns the rows of a step, and may be called again after an interrupt."""
        return functools.partial(self._collect, number)

    def _collect(self, number: int) -> ReadRows:
        failed_now = self._rows is None and not self._failed and not self._read()
        if self._rows is not None:
            return self._rows[number]
        # Only a read of its own finds which step has a bad record, and retries and reports it.
        rows = self._records.read(*self._steps[number], self._columns)
        rows.retries += failed_now
        return rows

    def _read(self) -> bool:
        record_ids, epochs = (np.concatenate(parts) for parts in zip(*self._steps, strict=True))
        try:
            rows = self._records.read_once(record_ids, epochs, self._columns)
        except Exception:
            self._failed = True
            return False
        times = {name: seconds / len(self._steps) for name, seconds in rows.times.items()}
        leaves, treedef = trees.flatten(rows.tree)
        found: list[ReadRows] = []
        start = 0
        for ids, _ in self._steps:
            stop = start + len(ids)
            found.append(ReadRows(treedef.unflatten([leaf[start:stop] for leaf in leaves]), times))
            start = stop
        self._rows = found
        return True
