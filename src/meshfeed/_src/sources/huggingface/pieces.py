"""Leaves of a lane's dataset: pieces of files, below the ``map`` and ``filter`` nodes of datasets.

They implement datasets' protocol of examples iterables, whose state points to the next row. Resuming inside a file
skips row groups without decoding them, whereas datasets' own leaves read the file again from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features
from datasets.formatting import PythonFormatter
from datasets.iterable_dataset import _BaseExamplesIterable
from datasets.table import cast_table_to_features

from meshfeed._src.sources.files.stream import Piece
from meshfeed._src.sources.huggingface.files import Files

_ROWS_AS_PYTHON = 128


class _Pieces(_BaseExamplesIterable):
    """Rows of pieces of files; the state is the index of the piece and the number of its rows already read."""

    _sleep_on_threads_shutdown = False
    _state_dict: Any  # None, or the dict below

    def __init__(self, files: Files, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.files = files
        self.pieces = pieces

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict = {"piece": 0, "row": 0, "type": type(self).__name__}
        return self._state_dict

    @property
    def num_shards(self) -> int:
        return 1

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> _Pieces:
        return type(self)(self.files, self.pieces if index == 0 else ())

    def shuffle_data_sources(self, generator: np.random.Generator) -> _Pieces:
        return self

    def reshard_data_sources(self) -> _Pieces:
        return self

    def _each_piece(self) -> Iterator[tuple[Piece, int]]:
        """The remaining pieces, each with the number of its rows already read."""
        first = self._state_dict["piece"] if self._state_dict else 0
        for piece in self.pieces[first:]:
            yield piece, self._state_dict["row"] if self._state_dict else 0
            if self._state_dict:
                self._state_dict["piece"] += 1
                self._state_dict["row"] = 0

    def _count(self, rows: int) -> None:
        if self._state_dict:
            self._state_dict["row"] += rows


class TablePieces(_Pieces):
    """Pieces of files that are read as Arrow tables.

    Args:
      files: the files.
      pieces: the rows of the files to read.
      features: types to which tables are cast before their rows become examples for ``map`` and ``filter``; None to
        keep the stored types.
      columns: columns of the tables to keep, with ``features``; None for all.
    """

    def __init__(
        self,
        files: Files,
        pieces: Sequence[Piece],
        features: Features | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(files, pieces)
        self._features = features
        self._columns = None if columns is None else list(columns)

    @property
    def is_typed(self) -> bool:
        return self._features is not None

    @property
    def features(self) -> Features | None:
        return self._features

    @property
    def iter_arrow(self) -> Any:
        return self._iter_arrow if self._features is None else None

    def _iter_arrow(self) -> Iterator[tuple[str, pa.Table]]:
        for piece, done in self._each_piece():
            for table in self._tables(piece, done):
                self._count(len(table))
                yield "", table

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        # Cast whole tables: casting row by row, as datasets does, takes 5 times as long per row.
        formatter = PythonFormatter(features=self._features)
        for piece, done in self._each_piece():
            for stored in self._tables(piece, done):
                table = self._cast(stored)
                for batch in table.to_reader(max_chunksize=_ROWS_AS_PYTHON):
                    columns = formatter.format_batch(pa.Table.from_batches([batch]))
                    for row in range(len(batch)):
                        self._count(1)
                        yield "", {name: values[row] for name, values in columns.items()}

    def _cast(self, table: pa.Table) -> pa.Table:
        if self._features is None:
            return table
        if self._columns is not None:
            table = table.select(self._columns)
        for name in self._features:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(len(table)))
        return table if table.schema == self._features.arrow_schema else cast_table_to_features(table, self._features)

    def _tables(self, piece: Piece, done: int) -> Iterator[pa.Table]:
        position = piece.file_row(done)
        if piece.stop is not None and position >= piece.stop:
            return
        for table in self.files.read(piece.file_index, position):
            start, position = position, position + len(table)
            if piece.stop is not None and position > piece.stop:
                table = table.slice(0, piece.stop - start)
            elif piece.round_size > 1:
                places = np.arange(start, position) % piece.round_size
                kept = np.flatnonzero((places >= piece.first_place) & (places < piece.stop_place))
                table = table.take(pa.array(kept))
            if len(table):
                yield table
            if piece.stop is not None and position >= piece.stop:
                return


class ExamplePieces(_Pieces):
    """Pieces of the output of a generator of examples."""

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for piece, done in self._each_piece():
            position = piece.file_row(done)
            for example in self.files.read(piece.file_index, position):
                place = position % piece.round_size
                position += 1
                if piece.first_place <= place < piece.stop_place:
                    self._count(1)
                    yield "", example
