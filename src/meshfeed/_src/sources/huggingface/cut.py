"""Splits the tree of a streaming Hugging Face dataset into lanes, below ``map``.

Every lane gets a copy of the tree in which the leaves are pieces of files (``files/stream.py``). ``skip`` and ``take``
become ranges of rows if the rows below them can be counted. For any other node that depends on the position of a row in
the whole stream (such as ``with_indices``), the lane runs everything below the node and keeps every L-th row, which is
logged as read amplification.

``interleave_datasets`` within a lane, without threads.

The nodes of datasets prefetch with one thread per source (hundreds of threads with 64 lanes) and sleep 5 s at the end
of every pass over Parquet files. This node follows the same rules, without threads and with an exact state.

Leaves of a lane's dataset: pieces of files, below the ``map`` and ``filter`` nodes of datasets.

They implement datasets' protocol of examples iterables, whose state points to the next row. Resuming inside a file
skips row groups without decoding them, whereas datasets' own leaves read the file again from the start.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features
from datasets import iterable_dataset as nodes
from datasets.features.features import require_decoding
from datasets.formatting import PythonFormatter
from datasets.iterable_dataset import _BaseExamplesIterable
from datasets.table import cast_table_to_features

from meshfeed._src.base.errors import SourceError
from meshfeed._src.sources.files.stream import Piece, cut_files, keep_rows
from meshfeed._src.sources.huggingface.files import Counts, Files, open_files
from meshfeed._src.sources.window_shuffle import permutation

_DRAWS = 1000  # random choices per block
_NOT_READ, _END = object(), object()


class Interleave(_BaseExamplesIterable):
    """Interleaves the examples of several sources.

    The state holds the number of turns taken, the state of each source before its next example, and which sources have
    ended.

    Args:
      ex_iterables: the sources.
      stopping_strategy: as for ``interleave_datasets``.
      draws: key of the random choices; None for round-robin.
      probabilities: probability of each source, with ``draws``; None for uniform.
    """

    _sleep_on_threads_shutdown = False  # otherwise datasets sleeps after each pass, to let threads end

    def __init__(
        self,
        ex_iterables: Sequence[Any],
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
        return self.ex_iterables[0].is_typed

    @property
    def features(self) -> Any:
        return self.ex_iterables[0].features

    @property
    def num_shards(self) -> int:
        return 1

    def _init_state_dict(self) -> dict[str, Any]:
        for child in self.ex_iterables:
            child._init_state_dict()
        count = len(self.ex_iterables)
        self._state_dict = {"turn": 0, "before": [None] * count, "ended": [False] * count, "type": type(self).__name__}
        return self._state_dict

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        if not self.ex_iterables:
            return
        state: Any = self._state_dict or self._init_state_dict()
        children, before, ended = self.ex_iterables, state["before"], state["ended"]
        again = self.stopping_strategy != "all_exhausted_without_replacement"
        stop = any if self.stopping_strategy == "first_exhausted" else all
        for child, child_state in zip(children, before, strict=True):
            child._init_state_dict()
            if child_state is not None:
                child.load_state_dict(child_state)
        iterators = [iter(child) for child in children]
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
                    children[number]._init_state_dict()
                    iterators[number] = iter(children[number])
                    before[number], ahead[number] = None, _NOT_READ
            if example is not _END:
                yield example

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


_SHUFFLED = "BufferShuffledExamplesIterable"
_LEAVES = ("ExamplesIterable", "ArrowExamplesIterable")
_ROW_BY_ROW = ("SelectColumnsIterable", "RebatchedArrowExamplesIterable", "FormattedExamplesIterable")
_BY_PART = (
    "RepeatExamplesIterable",
    "CyclingMultiSourcesExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
)
# Row ranges start and end inside a row group, which two lanes then decode. Do not warn about that much.
_COSTLY = 1.5
_RANGES = ("SkipExamplesIterable", "TakeExamplesIterable")


@dataclasses.dataclass
class LaneCut:
    """The lane to build, and what was found while building it.

    Attributes:
      lane_index: 0 … num_lanes - 1.
      num_lanes: number of lanes.
      seed: the feed's seed.
      epoch: the feed's epoch.
      shuffle_files: whether the order of the pieces of each list of files depends on seed and epoch.
      columns: the columns of a record; None for all.
      units: how each list of files was split, in the order of the tree.
      costs: descriptions of what is read more than once.
      counts: id() of a leaf → row counts of its files; shared by all lanes of a source.
    """

    lane_index: int
    num_lanes: int
    seed: int = 0
    epoch: int = 0
    shuffle_files: bool = False
    columns: Sequence[str] | None = None
    units: list[str] = dataclasses.field(default_factory=list)
    costs: list[str] = dataclasses.field(default_factory=list)
    counts: dict[int, Counts] = dataclasses.field(default_factory=dict)
    _ordinal: int = 0

    def counts_of(self, leaf: Any) -> Counts:
        """The row counts of a leaf's files."""
        return self.counts.setdefault(id(leaf), Counts())

    def next_ordinal(self) -> int:
        """A number for each node that draws random numbers, the same in every lane."""
        self._ordinal += 1
        return self._ordinal


def cut_tree(node: Any, cut: LaneCut) -> Any:
    """The part of the tree that one lane reads; it shares no iteration state with ``node``."""
    return _cut(node, cut, cut.columns)


def find_leaves(node: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    children = _children(node)
    return [leaf for child in children for leaf in find_leaves(child)] if children else [node]


def walk(node: Any) -> list[Any]:
    """All nodes of a tree, parents first."""
    return [node, *(found for child in _children(node) for found in walk(child))]


def check_tree(node: Any) -> None:
    """Checks that a tree can resume exactly.

    Raises:
      SourceError: the tree has a shuffle buffer, whose state is not exact.
    """
    for found in walk(node):
        if type(found).__name__ == _SHUFFLED:
            raise SourceError(
                f"the dataset has a shuffle(buffer_size={found.buffer_size}), whose state does not hold the buffer: a "
                "resume would lose and repeat records. Take the shuffle() out and give the buffer to the source: "
                f"meshfeed.sources.HuggingFace(dataset, shuffle_buffer={found.buffer_size}), which continues exactly."
            )


def _cut(node: Any, cut: LaneCut, columns: Sequence[str] | None) -> Any:
    kind = type(node).__name__
    if kind in _LEAVES:
        files, counts = open_files(node, columns), cut.counts_of(node)
        return _cut_leaf(files, counts, [Piece(index) for index in counts.filled(files)], cut)
    if kind in _RANGES:
        counted = _cut_range(node, cut, columns)
        return _take_turns(node, cut) if counted is None else counted
    if kind in ("MappedExamplesIterable", "FilteredExamplesIterable"):
        if node.with_indices:
            return _take_turns(node, cut)
        columns = None  # the function may read any column
        typed = _cut_typed(node, cut)
        if typed is not None:
            return typed
    elif kind == "SelectColumnsIterable":
        columns = [name for name in node.column_names if columns is None or name in columns]
    elif kind == "FormattedExamplesIterable" and node.features is not None:
        columns = None  # the node would fill missing columns with nulls
    elif kind not in (*_ROW_BY_ROW, *_BY_PART):
        return _take_turns(node, cut)
    mine = _copy(node)
    if hasattr(node, "ex_iterable"):
        mine.ex_iterable = _cut(node.ex_iterable, cut, columns)
    else:
        mine.ex_iterables = [_cut(child, cut, columns) for child in node.ex_iterables]
        mine = _without_threads(mine, cut)
    if kind == "SelectColumnsIterable":
        mine.column_names = columns
    return mine


def _cut_typed(node: Any, cut: LaneCut) -> Any:
    """One lane of a ``map`` or ``filter`` directly over typed files, with tables cast at once; None for other nodes."""
    inner, columns = node.ex_iterable, None
    if type(inner).__name__ != "FormattedExamplesIterable" or inner.formatting is not None or not inner.features:
        return None
    features = inner.features
    if (node.formatting and node.formatting.is_table) or any(map(require_decoding, features.values())):
        return None
    inner = inner.ex_iterable
    if type(inner).__name__ == "RebatchedArrowExamplesIterable":
        inner = inner.ex_iterable
    while type(inner).__name__ == "SelectColumnsIterable":
        columns = inner.column_names if columns is None else columns
        inner = inner.ex_iterable
    if type(inner).__name__ != "ArrowExamplesIterable":
        return None
    files, counts = open_files(inner, columns), cut.counts_of(inner)
    parts = [Piece(index) for index in counts.filled(files)]
    mine = _copy(node)
    mine.ex_iterable = _cut_leaf(files, counts, parts, cut, features, columns)
    return mine


def _cut_leaf(
    files: Files,
    counts: Counts,
    parts: Sequence[Piece],
    cut: LaneCut,
    features: Features | None = None,
    columns: Sequence[str] | None = None,
) -> Any:
    found = cut_files(parts, cut.lane_index, cut.num_lanes, lambda index: counts.group_rows(files, index))
    pieces = list(found.pieces)
    if cut.shuffle_files:
        pieces = [
            pieces[i] for i in permutation(len(pieces), (cut.seed, cut.epoch, cut.lane_index, cut.next_ordinal()))
        ]
    cut.units.append(found.unit)
    if found.times_read >= _COSTLY:
        names = [files.paths[index].rsplit("/", 1)[-1] if files.paths else f"part {index}" for index in found.left]
        listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        how = (
            "each lane parses all of a file and keeps its turns"
            if found.unit == "turns"
            else "each lane decodes whole row groups"
        )
        cut.costs.append(
            f"{len(names)} of {files.count} files ({listed}) are cut among {cut.num_lanes} lanes by {found.unit}, so "
            f"they are read {found.times_read:.1f} times ({how})"
        )
    return TablePieces(files, pieces, features, columns) if files.is_table else ExamplePieces(files, pieces)


def _cut_range(node: Any, cut: LaneCut, columns: Sequence[str] | None) -> Any:
    """One lane of ``skip`` and ``take`` as row ranges of files; None if the rows cannot be counted."""
    chain, ranges, inner = [], [], node
    while type(inner).__name__ not in _LEAVES:
        kind = type(inner).__name__
        if kind in _RANGES:
            ranges.append((kind, inner.n))
        elif kind in _ROW_BY_ROW or (kind == "MappedExamplesIterable" and not (inner.batched or inner.with_indices)):
            chain.append(inner)
        else:
            return None
        inner = inner.ex_iterable
    first, stop = 0, None
    for kind, n in reversed(ranges):
        if kind == "SkipExamplesIterable":
            first += n
        else:
            stop = first + n if stop is None else min(stop, first + n)
    if any(type(found).__name__ not in ("SelectColumnsIterable", "RebatchedArrowExamplesIterable") for found in chain):
        columns = None
    files, counts = open_files(inner, columns), cut.counts_of(inner)
    parts = keep_rows(files.count, first, stop, lambda index: counts.group_rows(files, index))
    if parts is None:
        return None
    built = _cut_leaf(files, counts, parts, cut)
    for found in reversed(chain):
        mine = _copy(found)
        mine.ex_iterable = built
        built = mine
    return built


def _take_turns(node: Any, cut: LaneCut) -> Any:
    """Every L-th row of the whole output of ``node``, for nodes that depend on positions in the whole stream."""
    if cut.num_lanes == 1:
        return _copy_whole(node, cut)
    whole = LaneCut(0, 1, cut.seed, cut.epoch, cut.shuffle_files, counts=cut.counts)
    inner = _cut(node, whole, None)
    cut.units.append("turns")
    name = type(node).__name__.removesuffix("ExamplesIterable").removesuffix("Iterable")
    cut.costs.append(
        f"{name} depends on the position of a row in the whole stream, so {cut.num_lanes} lanes read and process every "
        f"row, and each keeps one of {cut.num_lanes}: {cut.num_lanes} × the work of every row"
    )
    return nodes.StepExamplesIterable(inner, step=cut.num_lanes, offset=cut.lane_index)


def _copy_whole(node: Any, whole: LaneCut) -> Any:
    """A copy of the node over all rows of the tree, for a single lane."""
    if not _children(node):
        return copy.deepcopy(node)
    mine = _copy(node)
    if hasattr(node, "ex_iterable"):
        mine.ex_iterable = _cut(node.ex_iterable, whole, None)
    else:
        mine.ex_iterables = [_cut(child, whole, None) for child in node.ex_iterables]
        mine = _without_threads(mine, whole)
    return mine


def _copy(node: Any) -> Any:
    mine = copy.copy(node)
    mine._state_dict = None
    if hasattr(mine, "_owned_loops_and_tasks"):
        mine._owned_loops_and_tasks = []
    return mine


def _children(node: Any) -> list[Any]:
    if hasattr(node, "ex_iterable"):
        return [node.ex_iterable]
    return list(getattr(node, "ex_iterables", ()))


def _without_threads(node: Any, cut: LaneCut) -> Any:
    """An :class:`Interleave` in place of a node that interleaves; other nodes unchanged."""
    kind = type(node).__name__
    if kind == "CyclingMultiSourcesExamplesIterable":
        return Interleave(node.ex_iterables, node.stopping_strategy, None, None)
    if kind == "RandomlyCyclingMultiSourcesExamplesIterable":
        return Interleave(node.ex_iterables, node.stopping_strategy, _draws_of(node, cut), node.probabilities)
    return node


def _draws_of(node: Any, cut: LaneCut) -> list[int]:
    """Seed of a node that chooses among sources at random.

    Each lane draws different numbers; otherwise all rows of a batch would come from the same source. A dataset created
    without a seed has random entropy, which differs per host: it is ignored, and only the feed's seed counts.
    """
    # NumPy draws 128 bits of entropy if no seed is given, so an entropy below 2**64 is the user's seed.
    entropy = getattr(node.generator.bit_generator.seed_seq, "entropy", 0)
    given = entropy if isinstance(entropy, int) and entropy < 2**64 else 0
    return [given, cut.seed & (2**64 - 1), cut.epoch, cut.lane_index, cut.next_ordinal()]
