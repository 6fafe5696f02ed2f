"""Rows of Parquet files as elements of a lane, without keeping a whole row group in memory."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

import grain
import numpy as np

from meshfeed._src.base.errors import CorruptDataError

_Block: TypeAlias = "tuple[int, int, dict[str, Any]]"
"""First row in the file, row after the last, columns."""


class ParquetLane(grain.IterDataset):
    """Rows ``[start, stop)`` of one Parquet file, each as a dict of column values.

    Args:
      path: path of the file.
      start: first row.
      stop: row after the last one; None for the end of the file.
      block_rows: rows decoded at a time.
      options: keyword arguments of ``pyarrow.parquet.ParquetFile``.
    """

    def __init__(self, path: str, start: int, stop: int | None, block_rows: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._path = path
        self._start = start
        self._stop = stop
        self._block_rows = block_rows
        self._options = options

    def __iter__(self) -> ParquetLaneIterator:
        return ParquetLaneIterator(self._path, self._start, self._stop, self._block_rows, self._options)

    def __str__(self) -> str:
        return f"ParquetLane({os.path.basename(self._path)}, rows {self._start} to {self._stop})"


class ParquetLaneIterator(grain.DatasetIterator):
    """Iterator of :class:`ParquetLane`; its state is the next row of the file."""

    def __init__(self, path: str, start: int, stop: int | None, block_rows: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._path = path
        self._stop = stop
        self._block_rows = block_rows
        self._options = options
        self._row = start
        self._columns: dict[str, Any] = {}
        self._block_start = self._block_stop = start
        self._blocks: Generator[_Block, None, None] | None = None

    def __next__(self) -> dict[str, Any]:
        while not self._block_start <= self._row < self._block_stop:
            self._load()
        offset = self._row - self._block_start
        self._row += 1
        return {name: column[offset] for name, column in self._columns.items()}

    def _load(self) -> None:
        if self._blocks is None:
            self._blocks = self._read_from(self._row)
        try:
            self._block_start, self._block_stop, self._columns = next(self._blocks)
        except StopIteration:
            raise
        except Exception:
            self._drop_block()  # a generator that has raised would end silently on the next call
            raise

    def _read_from(self, row: int) -> Generator[_Block, None, None]:
        """Blocks of rows, starting at ``row``."""
        with open_parquet(self._path, self._options) as file:
            first = 0
            for group, count in enumerate(group_rows(file)):
                stop = first + count if self._stop is None else min(first + count, self._stop)
                if max(row, first) < stop:
                    yield from self._read_group(file, group, first, max(row, first), stop)
                first += count

    def _read_group(self, file: Any, group: int, first: int, row: int, stop: int) -> Generator[_Block, None, None]:
        if _may_hold_nulls(file, group):
            # Arrow converts integers with nulls to floats per block, so a row's dtype would depend on the block
            # boundaries: decode the whole row group instead.
            columns = _to_numpy(file.read_row_group(group))
            yield row, stop, {name: column[row - first : stop - first] for name, column in columns.items()}
            return
        for batch in file.iter_batches(batch_size=self._block_rows, row_groups=[group]):
            low, high = max(row - first, 0), min(batch.num_rows, stop - first)
            if low < high:
                yield first + low, first + high, _to_numpy(batch.slice(low, high - low))
            first += batch.num_rows
            if first >= stop:
                return

    def get_state(self) -> dict[str, Any]:
        return {"row": self._row}

    def set_state(self, state: dict[str, Any]) -> None:
        self._row = state["row"]
        if not self._block_start <= self._row < self._block_stop:
            self._drop_block()

    def close(self) -> None:
        super().close()
        self._drop_block()

    def _drop_block(self) -> None:
        blocks = getattr(self, "_blocks", None)  # __del__ also closes partly constructed iterators
        if blocks is not None:
            blocks.close()  # which closes the file
        self._blocks, self._columns, self._block_start, self._block_stop = None, {}, 0, 0

    def __str__(self) -> str:
        return f"ParquetLaneIterator({os.path.basename(self._path)})"


def open_parquet(path: str, options: Mapping[str, Any]) -> Any:
    """Opens a ``pyarrow.parquet.ParquetFile``.

    Raises:
      CorruptDataError: the file is not a Parquet file, or is truncated.
      OSError: the file cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, **options)
    except pyarrow.ArrowInvalid as error:
        raise CorruptDataError(
            f"{path} is no Parquet file: {error}. Expected a whole one; copy it again.", path=str(path)
        ) from error


class _Lists:
    """Rows of a list column as views of its values; Arrow would make one Python object per row, which takes 1 ms."""

    def __init__(self, values: np.ndarray, bounds: np.ndarray) -> None:
        self._values = values
        self._bounds = bounds

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return _Lists(self._values, self._bounds[row.start : row.stop + 1])
        return self._values[self._bounds[row] : self._bounds[row + 1]]


def _to_numpy(rows: Any) -> dict[str, Any]:
    columns = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        array = column.combine_chunks() if hasattr(column, "chunks") else column
        columns[name] = _lists(array) or array.to_numpy(zero_copy_only=False)
    return columns


def _lists(column: Any) -> _Lists | None:
    """A list column of numbers without nulls; None for other columns."""
    from pyarrow import types

    kind = column.type
    if not hasattr(column, "flatten") or not getattr(kind, "num_fields", 0) or column.null_count:
        return None
    if types.is_fixed_size_list(kind):
        bounds = np.arange(len(column) + 1) * kind.list_size
    elif types.is_list(kind) or types.is_large_list(kind):
        bounds = column.offsets.to_numpy()
        bounds = bounds - bounds[0]
    else:
        return None
    values = column.flatten()
    if values.null_count or not (types.is_integer(values.type) or types.is_floating(values.type)):
        return None
    return _Lists(values.to_numpy(), bounds)


def group_rows(file: Any) -> list[int]:
    """Rows of each row group of an open file."""
    metadata = file.metadata
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _may_hold_nulls(file: Any, group: int) -> bool:
    columns = file.metadata.row_group(group)
    for index in range(columns.num_columns):
        if file.schema.column(index).max_definition_level == 0:  # a required column cannot hold nulls
            continue
        # Without statistics, assume that there are nulls.
        statistics = columns.column(index).statistics
        if statistics is None or not statistics.has_null_count or statistics.null_count:
            return True
    return False
