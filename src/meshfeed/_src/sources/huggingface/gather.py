"""Gathers rows of many chunks of a column: those of one mapped file lie in one region of memory, so one call takes all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meshfeed._src.base.groups import group_by

_UNKNOWN, _CHECKED = -1, -2  # in place of a width
_MOST_PER_CALL = 16  # rows that cost as much one by one as a call of numpy
_MAX_REGIONS = 8192  # bounds the memory of columns with very many chunks that are not of one file


class ChunkGather:
    """Where the rows of each chunk of a column lie in memory.

    Datasets have chunks of 1,000 rows, so a shuffled batch takes a row or two of each: a call for each chunk, or for each
    row, takes several times as long as one for each file. Chunks must have one dtype.
    """

    def __init__(self, num_chunks: int) -> None:
        self._width = np.full(num_chunks, _UNKNOWN, np.int64)  # values of a row
        self._region = np.zeros(num_chunks, np.int64)  # id of the region that the chunk is in
        self._first = np.zeros(num_chunks, np.int64)  # where the chunk begins there
        self._step = np.ones(num_chunks, np.int64)  # from one of its rows to the next
        self._regions: dict[int, NDArray[np.generic]] = {}  # by id: [n] or [n, width]
        # Those of several chunks, by address and width.
        self._shared: dict[tuple[int, int], NDArray[np.generic]] = {}

    @property
    def is_full(self) -> bool:
        """Whether so many chunks are described that the caller should begin anew, with another object."""
        return len(self._regions) >= _MAX_REGIONS

    def unknown(self, chunks: NDArray[np.int64]) -> list[int]:
        """Returns those of ``chunks`` that :meth:`add` has not described."""
        missing = chunks[self._width[chunks] == _UNKNOWN]
        return np.unique(missing).tolist() if missing.size else []

    def add(self, chunk: int, rows: NDArray[np.generic] | None, buffer: pa.Buffer | None) -> None:
        """Describes a chunk.

        Args:
          chunk: its number.
          rows: all of its rows, ``[rows]`` or ``[rows, width]``, in order in memory; None if each must be checked.
          buffer: Arrow's buffer that they are a view of, if they are one.
        """
        if rows is None:
            self._width[chunk] = _CHECKED
            return
        width = 1 if rows.ndim == 1 else rows.shape[1]
        region, first, step = rows, 0, 1
        if (found := _region_of(rows, buffer)) is not None:
            values, first = found
            runs = values if rows.ndim == 1 else _runs(values, width)
            region, step = self._shared.setdefault((values.ctypes.data, width), runs), width
        self._regions[id(region)] = region
        self._first[chunk], self._step[chunk], self._region[chunk] = first, step, id(region)
        self._width[chunk] = width  # last, for other threads

    def take(self, chunks: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.generic] | None:
        """Copies the rows ``rows[i]`` of ``chunks[i]``, which are described; None if some must be checked or widths vary."""
        widths = self._width[chunks]
        if widths[0] < 0 or not (widths == widths[0]).all():
            return None
        at, keys = self._first[chunks] + rows * self._step[chunks], self._region[chunks]
        if (keys == keys[0]).all():
            return self._regions[int(keys[0])][at]
        of_row = keys.tolist()
        regions = {key: self._regions[key] for key in set(of_row)}
        one = regions[of_row[0]]
        result = np.empty((len(at), *one.shape[1:]), one.dtype)
        if len(of_row) > _MOST_PER_CALL * len(regions):
            for key, found in group_by(keys):
                result[found] = regions[key][at[found]]
        else:
            for i, (key, row) in enumerate(zip(of_row, at.tolist(), strict=True)):
                result[i] = regions[key][row]
        return result


def _region_of(rows: NDArray[np.generic], buffer: pa.Buffer | None) -> tuple[NDArray[np.generic], int] | None:
    """Returns all values of the memory that Arrow's buffer is a part of, and the index of the first of ``rows``.

    None if the buffer is not a part of another, as in memory, or the rows are not in it: booleans are copies.
    """
    whole: Any = None if buffer is None else buffer.parent
    if whole is None:
        return None
    while whole.parent is not None:
        whole = whole.parent
    begin = rows.ctypes.data - whole.address
    if not 0 <= begin <= whole.size - rows.nbytes:
        return None
    first, offset = divmod(begin, rows.itemsize)
    return np.frombuffer(whole, rows.dtype, (whole.size - offset) // rows.itemsize, offset), first


def _runs(values: NDArray[np.generic], width: int) -> NDArray[np.generic]:
    """Returns every run of ``width`` values as a row of a view, in which rows overlap."""
    step = values.itemsize
    return np.ndarray((len(values) - width + 1, width), values.dtype, values, strides=(step, step))
