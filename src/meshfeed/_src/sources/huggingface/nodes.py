"""Nodes of a lane's tree that replace those of datasets: pieces of files, and ``interleave_datasets`` without threads.

The leaves of datasets read a file again from the start to resume inside it; these skip row groups without decoding
them. Its interleaving nodes prefetch with one thread per source (hundreds of threads with 64 lanes) and sleep 5 s at the
end of every pass over Parquet files; this one follows the same rules, without threads and with an exact state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features

from meshfeed._src.sources.files.stream import Piece
from meshfeed._src.sources.huggingface import internals
from meshfeed._src.sources.huggingface.files import Files
from meshfeed._src.sources.huggingface.internals import Example, ExamplesNode, Node, State

_DRAWS = 1000  # random choices per block
_NOT_READ, _END = object(), object()


class Interleave(ExamplesNode):
    """Interleaves the examples of several sources.

    The state holds the number of turns taken, the state of each source before its next example, and which sources have
    ended.

    Args:
      ex_iterables: the sources.
      stopping_strategy: as for ``interleave_datasets``.
      draws: key of the random choices; None for round-robin.
      probabilities: probability of each source, with ``draws``; None for uniform.
    """

    def __init__(
        self,
        ex_iterables: Sequence[Node],
        stopping_strategy: str,
        draws: Sequence[int] | None,
        probabilities: Sequence[float] | None,
    ) -> None:
        super().__init__()
        self.ex_iterables = list(ex_iterables)
        self.stopping_strategy = stopping_strategy
        self.draws = None if draws is None else tuple(draws)
        self.probabilities = None if probabilities is None else tuple(probabilities)

    @property
    def is_typed(self) -> bool:
        return self.features is not None

    @property
    def features(self) -> Features | None:
        return self.ex_iterables[0].features

    def first_state(self) -> State:
        for child in self.ex_iterables:
            internals.start(child)
        count = len(self.ex_iterables)
        return {"turn": 0, "before": [None] * count, "ended": [False] * count}

    def __iter__(self) -> Iterator[tuple[Any, Example]]:
        if not self.ex_iterables:
            return
        if self.state is None:
            internals.start(self)
        state: Any = self.state
        children, before, ended = self.ex_iterables, state["before"], state["ended"]
        iterators = self._resume_children(before)
        again = self.stopping_strategy != "all_exhausted_without_replacement"
        stop = any if self.stopping_strategy == "first_exhausted" else all
        # Read one example ahead of each source, to detect that the example before it was the last.
        ahead: list[Any] = [_NOT_READ] * len(children)

        def fetch(number: int) -> None:
            before[number] = children[number].state_dict()
            ahead[number] = next(iterators[number], _END)

        while not stop(ended):
            number = self._choose(state["turn"])
            state["turn"] += 1
            if ended[number] and not again:
                continue
            if ahead[number] is _NOT_READ:
                fetch(number)
            example = ahead[number]
            if example is not _END:
                fetch(number)
            if ahead[number] is _END:
                ended[number] = True
                if again:
                    internals.start(children[number])
                    iterators[number] = iter(children[number])
                    before[number], ahead[number] = None, _NOT_READ
            if example is not _END:
                yield example

    def _resume_children(self, states: Sequence[State | None]) -> list[Iterator[tuple[Any, Example]]]:
        for child, state in zip(self.ex_iterables, states, strict=True):
            internals.start(child)
            if state is not None:
                child.load_state_dict(state)
        return [iter(child) for child in self.ex_iterables]

    def _choose(self, turn: int) -> int:
        if self.draws is None:
            return turn % len(self.ex_iterables)
        # Each block has its own key, so the number of turns alone determines the next choice.
        block, offset = divmod(turn, _DRAWS)
        return _choices(self.draws, self.probabilities, len(self.ex_iterables), block)[offset]


@functools.lru_cache(maxsize=256)
def _choices(draws: tuple[int, ...], probabilities: tuple[float, ...] | None, count: int, block: int) -> list[int]:
    raw = np.random.Philox(np.random.SeedSequence([*draws, block])).random_raw(_DRAWS)
    # The high 53 bits as a float64 in [0, 1). Raw Philox numbers are stable across NumPy versions.
    uniform = (raw >> np.uint64(11)) * 2.0**-53
    weights = np.ones(count) if probabilities is None else np.asarray(probabilities, np.float64)
    edges = np.cumsum(weights) / weights.sum()
    # Rounding may leave the last edge below 1.
    return np.minimum(np.searchsorted(edges, uniform, side="right"), count - 1).tolist()


_ROWS_AS_PYTHON = 128


class _Pieces(ExamplesNode):
    """Rows of pieces of files; the state is the index of the piece and the number of its rows already read."""

    def __init__(self, files: Files, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.files = files
        self.pieces = pieces

    def first_state(self) -> State:
        return {"piece": 0, "row": 0}

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> _Pieces:
        return type(self)(self.files, self.pieces if index == 0 else ())

    def _each_piece(self) -> Iterator[tuple[Piece, int]]:
        """The remaining pieces, each with the number of its rows already read."""
        state = self.state or self.first_state()
        for piece in self.pieces[state["piece"] :]:
            yield piece, state["row"]
            state["piece"] += 1
            state["row"] = 0

    def _count(self, rows: int) -> None:
        if self.state is not None:
            self.state["row"] += rows


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
    def iter_arrow(self) -> Callable[[], Iterator[tuple[str, pa.Table]]] | None:
        return self._iter_arrow if self._features is None else None

    def _iter_arrow(self) -> Iterator[tuple[str, pa.Table]]:
        for piece, done in self._each_piece():
            for table in self._tables(piece, done):
                self._count(len(table))
                yield "", table

    def __iter__(self) -> Iterator[tuple[str, Example]]:
        # Cast whole tables: casting row by row, as datasets does, takes 5 times as long per row.
        formatter = internals.PythonFormatter(features=self._features)
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
        return (
            table
            if table.schema == self._features.arrow_schema
            else internals.cast_table_to_features(table, self._features)
        )

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

    def __iter__(self) -> Iterator[tuple[str, Example]]:
        for piece, done in self._each_piece():
            position = piece.file_row(done)
            for example in self.files.read(piece.file_index, position):
                place = position % piece.round_size
                position += 1
                if piece.first_place <= place < piece.stop_place:
                    self._count(1)
                    yield "", example
