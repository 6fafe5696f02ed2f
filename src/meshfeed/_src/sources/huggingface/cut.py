"""Splits the tree of a streaming Hugging Face dataset into lanes, below ``map``.

Every lane gets a copy of the tree in which the leaves are pieces of files (``files/stream.py``). ``skip`` and ``take``
become ranges of rows if the rows below them can be counted. For any other node that depends on the position of a row in
the whole stream (such as ``with_indices``), the lane runs everything below the node and keeps every L-th row, which is
logged as read amplification.

Two kinds of node of datasets are replaced. Its leaves read a file again from the start to resume inside it; ours skip
row groups without decoding them. Its interleaving nodes prefetch with one thread per source (hundreds of threads with 64
lanes) and sleep 5 s at the end of every pass over Parquet files; ours follows the same rules, without threads and with an
exact state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, DownloadConfig, Features

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.parquet import ParquetFile
from meshfeed._src.sources.files.stream import CUT_BY_FILES, MAX_COUNTED, Piece, cut_files, keep_rows
from meshfeed._src.sources.huggingface import internals
from meshfeed._src.sources.huggingface.internals import (
    Example,
    ExamplesNode,
    Leaf,
    Node,
    State,
    children_of,
    every_nth,
    kind_of,
    table_cast,
    with_children,
    xgetsize,
    xopen,
)
from meshfeed._src.sources.window_shuffle import permutation

# Row ranges start and end inside a row group, which two lanes then decode. Do not warn about that much.
_COSTLY = 1.5
_ROWS_AS_PYTHON = 128
_DRAWS = 1000  # random choices per block
_NOT_READ, _END = object(), object()
# Before the units of a node whose rows depend on positions. States without it were saved with files in the seed's order.
_FIXED = "in order"


@dataclasses.dataclass
class LaneCut:
    """The lane to build, and what was found while building it."""

    lane_index: int
    num_lanes: int
    seed: int = 0
    epoch: int = 0
    shuffle_files: bool = False  # by seed and epoch
    version: int = CUT_BY_FILES  # of the rule; see files/stream.py
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])  # of the tree, for lanes' states
    units: list[str] = dataclasses.field(default_factory=list)  # how each list of files was split, in the tree's order
    costs: list[str] = dataclasses.field(default_factory=list)  # descriptions of what is read more than once
    counts: dict[int, Counts] = dataclasses.field(default_factory=dict)  # by id() of a leaf; shared by all lanes
    _ordinal: int = 0

    def open(self, leaf: Node, columns: Sequence[str] | None) -> Files:
        """See :func:`open_files`; with the counts of other lanes."""
        files = open_files(leaf, columns)
        files.counts = self.counts.setdefault(id(leaf), files.counts)
        return files

    def next_ordinal(self) -> int:
        """A number for each node that draws random numbers, the same in every lane."""
        self._ordinal += 1
        return self._ordinal


def find_leaves(node: Node) -> list[Node]:
    """The leaves of a tree, in order."""
    return [found for found in walk(node) if not children_of(found)]


def walk(node: Node) -> list[Node]:
    """All nodes of a tree, parents first."""
    return [node, *(found for child in children_of(node) for found in walk(child))]


def check_tree(node: Node) -> None:
    """Raises SourceError if a tree has a node that cannot be split, or a shuffle buffer, whose state is not exact."""
    found: Any
    for found in walk(node):
        internals.check_known(found)
        if kind_of(found) == internals.SHUFFLED:
            size = found.buffer_size
            raise SourceError(
                f"the dataset has a shuffle(buffer_size={size}), whose state does not hold the buffer: a resume would "
                "lose and repeat records. Remove the shuffle() and pass the buffer size to the source: "
                f"meshfeed.sources.HuggingFace(dataset, shuffle_buffer={size}), which resumes exactly."
            )


def check_repeats(node: Node, num_lanes: int) -> None:
    """Raises SettingsError if a node repeats its shorter parts until the longest has ended; each lane would by itself."""
    found: Any
    for found in walk(node):
        if kind_of(found) in (internals.IN_TURN, internals.AT_RANDOM) and found.stopping_strategy == "all_exhausted":
            names = [f"part{number}" for number in range(len(children_of(found)))]
            weights = getattr(found, "probabilities", None)
            shares = [1] * len(names) if weights is None else [float(weight) for weight in weights]
            sources = ", ".join(f'"{name}": {name}' for name in names)
            mixed = ", ".join(f'"{name}": {share:g}' for name, share in zip(names, shares, strict=True))
            raise SettingsError(
                f'num_lanes={num_lanes}, but interleave_datasets(stopping_strategy="all_exhausted") repeats its shorter '
                "datasets until the longest has ended, and each lane would do so by itself: records would be missing from "
                f"an epoch, and others repeated too often. Pass meshfeed.sources.Mixture({{{sources}}}, {{{mixed}}}) of the "
                'datasets, use stopping_strategy="all_exhausted_without_replacement", or num_lanes=1.',
                setting="num_lanes",
            )


def rows_of_lane(tree: Node) -> int | None:
    """Returns the rows of the files that a lane reads, from a tree of :func:`cut_tree` with one leaf; None if not counted.

    Counts only what is known already or can be read from a moderate number of footers.
    """
    leaf = find_leaves(tree)[0]
    if not isinstance(leaf, _Pieces) or leaf.files.count > MAX_COUNTED:
        return None
    total = 0
    for piece in leaf.pieces:
        groups = leaf.files.group_rows(piece.file_index)
        if groups is None or piece.round_size > 1:
            return None
        total += (sum(groups) if piece.stop is None else piece.stop) - piece.start
    return total


def cut_tree(node: Any, cut: LaneCut, columns: Sequence[str] | None) -> Node:
    """The part of the tree of ``node`` that one lane reads: a copy, whose records have at least ``columns``."""
    kind = kind_of(node)
    if kind in internals.LEAVES:
        return _cut_files(node, cut, columns)
    if kind in (internals.SKIPPED, internals.TAKEN):
        return _cut_range(node, cut, columns) or _take_turns(node, cut)
    if not _is_cut_below(node):
        return _take_turns(node, cut)
    typed = _cut_typed(node, cut) if kind in (internals.MAPPED, internals.FILTERED) else None
    if typed is not None:
        return typed
    below = _columns_below(node, columns)
    mine = _without_threads(with_children(node, lambda child: cut_tree(child, cut, below)), cut)
    if kind == internals.SELECTED:
        mine.column_names = below
    return mine


def _is_cut_below(node: Any) -> bool:
    """Whether a node gives the same rows if what is below it is cut: it does not depend on positions in the stream."""
    if kind_of(node) in (internals.MAPPED, internals.FILTERED):
        return not node.with_indices
    return kind_of(node) in (*internals.ROW_BY_ROW, *internals.BY_PART)


def _columns_below(node: Any, columns: Sequence[str] | None) -> Sequence[str] | None:
    """The columns that a node needs of those below it to give ``columns``."""
    kind = kind_of(node)
    if kind == internals.SELECTED:
        return [name for name in node.column_names if columns is None or name in columns]
    # A function may read any column, and a typed format would fill missing ones with nulls.
    reads_all = kind in (internals.MAPPED, internals.FILTERED) or (
        kind == internals.FORMATTED and node.features is not None
    )
    return None if reads_all else columns


def _cut_files(leaf: Node, cut: LaneCut, columns: Sequence[str] | None, features: Features | None = None) -> Node:
    files = cut.open(leaf, columns)
    return _cut_leaf(files, list(map(Piece, files.filled())), cut, features, columns if features else None)


def _cut_typed(node: Any, cut: LaneCut) -> Node | None:
    """One lane of a ``map`` or ``filter`` directly over typed files, with tables cast at once; None for other nodes."""
    inner, columns = node.ex_iterable, None
    if kind_of(inner) != internals.FORMATTED or inner.formatting is not None or not inner.features:
        return None
    features = inner.features
    if (node.formatting and node.formatting.is_table) or any(map(internals.require_decoding, features.values())):
        return None
    inner = inner.ex_iterable
    if kind_of(inner) == internals.REBATCHED:
        inner = inner.ex_iterable
    while kind_of(inner) == internals.SELECTED:
        columns = inner.column_names if columns is None else columns
        inner = inner.ex_iterable
    if kind_of(inner) != internals.ARROW_LEAF:
        return None
    return with_children(node, lambda _: _cut_files(inner, cut, columns, features))


def _cut_leaf(
    files: Files,
    parts: Sequence[Piece],
    cut: LaneCut,
    features: Features | None = None,
    columns: Sequence[str] | None = None,
) -> Node:
    found = cut_files(parts, cut.lane_index, cut.num_lanes, files.group_rows, cut.version)
    pieces = list(found.pieces)
    if cut.shuffle_files:
        key = (cut.seed, cut.epoch, cut.lane_index, cut.next_ordinal())
        pieces = [pieces[i] for i in permutation(len(pieces), key)]
    cut.units.append(found.unit)
    if found.times_read >= _COSTLY:
        names = [files.paths[index].rsplit("/", 1)[-1] if files.paths else f"part {index}" for index in found.left]
        listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        unit = "rows" if found.unit == "even" else found.unit
        does = "parses all of a file and keeps its turns" if found.unit == "turns" else "decodes whole row groups"
        cut.costs.append(
            f"{len(names)} of {files.count} files ({listed}) are cut among {cut.num_lanes} lanes by {unit}, so "
            f"they are read {found.times_read:.1f} times (each lane {does})"
        )
    return TablePieces(files, pieces, features, columns) if files.is_table else ExamplePieces(files, pieces)


def _cut_range(node: Any, cut: LaneCut, columns: Sequence[str] | None) -> Node | None:
    """One lane of ``skip`` and ``take`` as row ranges of files; None if the rows cannot be counted."""
    chain, ranges, inner = [], [], node
    while (kind := kind_of(inner)) not in internals.LEAVES:
        if kind in (internals.SKIPPED, internals.TAKEN):
            ranges.append((kind, inner.n))
        elif kind in internals.ROW_BY_ROW or (kind == internals.MAPPED and not (inner.batched or inner.with_indices)):
            chain.append(inner)
        else:
            return None
        inner = inner.ex_iterable
    narrowed = []
    for found in chain:
        columns = _columns_below(found, columns)
        narrowed.append(columns)
    files = cut.open(inner, columns)
    parts = keep_rows(files.count, *_row_range(ranges), files.group_rows)
    if parts is None:
        return None
    built = _cut_leaf(files, parts, cut)
    for found, below in zip(reversed(chain), reversed(narrowed), strict=True):
        built = with_children(found, lambda _, inner=built: inner)
        if kind_of(found) == internals.SELECTED:
            built.column_names = below
    return built


def _row_range(ranges: Sequence[tuple[str, int]]) -> tuple[int, int | None]:
    """The first row and the row after the last of nested ``skip`` and ``take``, given from the outermost."""
    first, stop = 0, None
    for kind, n in reversed(ranges):
        if kind == internals.SKIPPED:
            first += n
        else:
            stop = first + n if stop is None else min(stop, first + n)
    return first, stop


def _take_turns(node: Node, cut: LaneCut) -> Node:
    """Every L-th row of the whole output of ``node``, for nodes that depend on positions in the whole stream.

    What is below is read in the same order for every seed and epoch. Otherwise ``take`` and ``skip`` would divide the rows
    into others for each, and rows held out would be trained on.
    """
    below = LaneCut(0, 1, version=cut.version, counts=cut.counts)
    inner = _without_threads(with_children(node, lambda child: cut_tree(child, below, None)), below)
    if cut.shuffle_files or any(kind_of(found) == internals.AT_RANDOM for found in walk(node)):
        cut.units.append(_FIXED)
    if cut.num_lanes == 1:
        cut.units += below.units
        return inner
    cut.units.append("turns")
    name = internals.short_name(node)
    cut.costs.append(
        f"{name} depends on the position of a row in the whole stream, so {cut.num_lanes} lanes read and process every "
        f"row, and each keeps one of {cut.num_lanes}: {cut.num_lanes} × the work of every row"
    )
    return every_nth(inner, cut.num_lanes, cut.lane_index)


def _without_threads(node: Any, cut: LaneCut) -> Any:
    """An :class:`Interleave` in place of a node that interleaves; other nodes unchanged."""
    kind = kind_of(node)
    if kind in (internals.IN_TURN, internals.AT_RANDOM):
        return Interleave(node, None if kind == internals.IN_TURN else _draws_of(node, cut))
    return node


def _draws_of(node: Any, cut: LaneCut) -> tuple[int, ...]:
    """Seed of a node that chooses among sources at random.

    Each lane draws different numbers; otherwise all rows of a batch would come from the same source. A dataset created
    without a seed has random entropy, which differs per host: it is ignored, and only the feed's seed counts.
    """
    return given_seed(node), cut.seed & (2**64 - 1), cut.epoch, cut.lane_index, cut.next_ordinal()


def given_seed(node: Any) -> int:
    """The seed that the user gave to a node that chooses among sources at random; 0 if none."""
    # NumPy draws 128 bits of entropy if no seed is given, so an entropy below 2**64 is the user's seed.
    entropy = getattr(node.generator.bit_generator.seed_seq, "entropy", 0)
    return entropy if isinstance(entropy, int) and entropy < 2**64 else 0


class Interleave(ExamplesNode):
    """Interleaves the examples of several sources.

    The state holds the number of turns taken, the state of each source before its next example, and which sources have
    ended. Sources and rules are those of ``node``; ``draws`` is the key of random choices, or None for round-robin.
    """

    def __init__(self, node: Any, draws: tuple[int, ...] | None) -> None:
        super().__init__()
        self.ex_iterables: list[Node] = list(node.ex_iterables)
        self.stopping_strategy = node.stopping_strategy
        self.draws = draws
        probabilities = None if draws is None else node.probabilities
        self.probabilities = None if probabilities is None else tuple(probabilities)

    @property
    def features(self) -> Features | None:
        return self.ex_iterables[0].features

    def first_state(self) -> State:
        count = len(self.ex_iterables)
        return {"turn": 0, "before": [None] * count, "ended": [False] * count}

    def __iter__(self) -> Iterator[tuple[Any, Example]]:
        state = self.state
        children, before, ended = self.ex_iterables, state["before"], state["ended"]
        iterators = [_iterate(child, saved) for child, saved in zip(children, before, strict=True)]
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
                    iterators[number] = _iterate(children[number], None)
                    before[number], ahead[number] = None, _NOT_READ
            if example is not _END:
                yield example

    def _choose(self, turn: int) -> int:
        if self.draws is None:
            return turn % len(self.ex_iterables)
        # Each block has its own key, so the number of turns alone determines the next choice.
        block, offset = divmod(turn, _DRAWS)
        return _choices(self.draws, self.probabilities, len(self.ex_iterables), block)[offset]


def _iterate(node: Node, state: State | None) -> Iterator[tuple[Any, Example]]:
    """The examples of a node from a state, or from its beginning."""
    internals.start(node)
    if state is not None:
        node.load_state_dict(state)
    return iter(node)


@functools.lru_cache(maxsize=256)
def _choices(draws: tuple[int, ...], probabilities: tuple[float, ...] | None, count: int, block: int) -> list[int]:
    raw = np.random.Philox(np.random.SeedSequence([*draws, block])).random_raw(_DRAWS)
    # The high 53 bits as a float64 in [0, 1). Raw Philox numbers are stable across NumPy versions.
    uniform = (raw >> np.uint64(11)) * 2.0**-53
    weights = np.ones(count) if probabilities is None else np.asarray(probabilities, np.float64)
    edges = np.cumsum(weights) / weights.sum()
    # Rounding may leave the last edge below 1.
    return np.minimum(np.searchsorted(edges, uniform, side="right"), count - 1).tolist()


class _Pieces(ExamplesNode):
    """Rows of pieces of files; the state is the index of the piece and the number of its rows already read."""

    def __init__(self, files: Files, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.files, self.pieces = files, pieces

    def first_state(self) -> State:
        return {"piece": 0, "row": 0}

    def _each_piece(self) -> Iterator[tuple[Piece, int]]:
        """The remaining pieces, each with the number of its rows already read."""
        state = self.state
        for piece in self.pieces[state["piece"] :]:
            yield piece, state["row"]
            state["piece"] += 1
            state["row"] = 0


class TablePieces(_Pieces):
    """Pieces of files that are read as Arrow tables.

    With ``features``, the ``columns`` of tables are cast to these types before their rows become examples for ``map`` and
    ``filter``.
    """

    def __init__(
        self, files: Files, pieces: Sequence[Piece], features: Features | None, columns: Sequence[str] | None
    ) -> None:
        super().__init__(files, pieces)
        self._features, self._columns = features, columns

    @property
    def features(self) -> Features | None:
        return self._features

    @property
    def iter_arrow(self) -> Callable[[], Iterator[tuple[str, pa.Table]]] | None:
        return self._iter_arrow if self._features is None else None

    def _iter_arrow(self) -> Iterator[tuple[str, pa.Table]]:
        for piece, done in self._each_piece():
            for table in self._tables(piece, done):
                self.state["row"] += len(table)
                yield "", table

    def __iter__(self) -> Iterator[tuple[str, Example]]:
        # Cast whole tables: casting row by row, as datasets does, takes 5 times as long per row.
        formatter = internals.PythonFormatter(features=self._features)
        for piece, done in self._each_piece():
            for table in self._tables(piece, done):
                if self._columns is not None:
                    table = table.select(list(self._columns))
                if self._features is not None:  # missing columns become nulls
                    table = internals.table_cast(table, self._features.arrow_schema)
                for batch in table.to_reader(max_chunksize=_ROWS_AS_PYTHON):
                    columns = formatter.format_batch(pa.Table.from_batches([batch]))
                    for row in range(len(batch)):
                        self.state["row"] += 1
                        yield "", {name: values[row] for name, values in columns.items()}

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
                    self.state["row"] += 1
                    yield "", example


@dataclasses.dataclass
class Counts:
    """What is known of a leaf's files: rows of row groups by file, and files that have rows. Each count is a round trip."""

    group_rows: dict[int, Sequence[int] | None] = dataclasses.field(default_factory=dict)
    filled: list[int] | None = None


class Files:
    """The files (or other parts) that a dataset reads in sequence.

    Args:
      count: their number.
      paths: their paths or URLs; None if they are not files.
      is_table: whether they are read as Arrow tables.
    """

    def __init__(self, count: int, paths: list[str] | None, is_table: bool = True) -> None:
        self.count, self.paths, self.is_table = count, paths, is_table
        self.counts = Counts()

    def group_rows(self, file_index: int) -> Sequence[int] | None:
        """Rows of each row group of a file, or None if they cannot be counted without reading it."""
        known = self.counts.group_rows
        if file_index not in known:
            known[file_index] = self._count(file_index)
        return known[file_index]

    def filled(self) -> list[int]:
        """Indices of the files that are not known to be empty, ascending.

        A lane whose only file is empty would end the stream for all lanes.
        """
        if self.counts.filled is None:
            checked = range(self.count) if self.count <= MAX_COUNTED else ()
            empty = file_paths.in_threads(self._is_empty, checked)
            self.counts.filled = [index for index in range(self.count) if not (checked and empty[index])]
        return self.counts.filled

    def _is_empty(self, file_index: int) -> bool:
        rows = self.group_rows(file_index)
        return rows is not None and not any(rows)

    def _count(self, file_index: int) -> Sequence[int] | None:
        raise NotImplementedError

    def read(self, file_index: int, first_row: int) -> Iterator[Any]:
        """The tables (or examples) of a file from a row on. The boundaries of tables depend only on the file."""
        raise NotImplementedError


def open_files(node: Node, columns: Sequence[str] | None) -> Files:
    """The files of a leaf of a dataset's tree; ``columns`` are read alone if the format allows it."""
    leaf = Leaf(node)
    if leaf.shards is not None:
        return _DatasetShards(*leaf.shards, columns)
    if leaf.is_plain_parquet:
        return _ParquetFiles(leaf, columns)
    if leaf.arrow_files is not None and all(map(local_path, leaf.arrow_files[0])):
        return _ArrowFiles(*leaf.arrow_files)
    return _Generated(leaf)


class _ParquetFiles(Files):
    """Local or remote Parquet files, read one row group at a time."""

    def __init__(self, leaf: Leaf, columns: Sequence[str] | None) -> None:
        self._files = [str(path) for path in leaf.kwargs["files"]]
        super().__init__(len(self._files), self._files)
        self._row_groups = leaf.kwargs.get("row_groups_list") or [None] * self.count
        self._cast = FeatureCast(leaf.builder.info.features)
        wanted = leaf.builder.config.columns
        self._columns = wanted if columns is None else [c for c in columns if wanted is None or c in wanted]
        self._batch_rows = leaf.builder.config.batch_size
        self._download = _download_config(leaf)

    def _count(self, file_index: int) -> Sequence[int]:
        with self._open(file_index) as file:
            return file.group_rows

    def read(self, file_index: int, first_row: int) -> Iterator[pa.Table]:
        with self._open(file_index) as file:
            for _, batch in file.batches(first_row, columns=self._columns, batch_rows=self._batch_rows):
                yield self._cast(pa.Table.from_batches([batch]))

    def _open(self, file_index: int) -> ParquetFile:
        path, groups = self._files[file_index], self._row_groups[file_index]
        local = local_path(path)
        if local is not None and "::" not in path:
            return ParquetFile(local, row_groups=groups)
        return ParquetFile(path, stream=xopen(path, "rb", download_config=self._download), row_groups=groups)


class _ArrowFiles(Files):
    """Local Arrow IPC files, in the file or stream format."""

    def __init__(self, paths: list[str], cast: Callable[[pa.Table], pa.Table] | None) -> None:
        super().__init__(len(paths), paths)
        self._files = paths
        self._cast = cast

    def _count(self, file_index: int) -> Sequence[int]:
        return list(map(len, self._batches(file_index, pa.memory_map)))  # only the headers of batches are read

    def read(self, file_index: int, first_row: int) -> Iterator[pa.Table]:
        # Not mapped: the process would end with SIGBUS if the file were truncated meanwhile.
        for batch in _from_row(first_row, self._batches(file_index, pa.OSFile)):
            table = pa.Table.from_batches([batch])
            yield table if self._cast is None else self._cast(table)

    def _batches(self, file_index: int, open_file: Callable[[str], pa.NativeFile]) -> Iterator[pa.RecordBatch]:
        path = self._files[file_index]
        with open_file(str(local_path(path))) as source, _damage_named(path, "Arrow file"):
            try:
                yield from pa.ipc.open_stream(source)
            except pa.ArrowInvalid:  # not the stream format, or damaged
                source.seek(0)
                reader = pa.ipc.open_file(source)
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)


class _DatasetShards(Files):
    """Shards of a map-style dataset (``Dataset.to_iterable_dataset``)."""

    def __init__(self, shards: Sequence[Dataset], batch_rows: int, columns: Sequence[str] | None) -> None:
        super().__init__(len(shards), None)
        self.shards = shards
        chosen = None if columns is None else list(columns)
        self._formatted = [shard.with_format("arrow", columns=chosen) for shard in shards]
        self._batch_rows = batch_rows

    def _count(self, file_index: int) -> Sequence[int]:
        # Groups of the size in which tables are read, so splitting between groups decodes nothing twice.
        rows, size = len(self.shards[file_index]), self._batch_rows
        return [min(size, rows - start) for start in range(0, rows, size)]

    def read(self, file_index: int, first_row: int) -> Iterator[pa.Table]:
        shard, start = self._formatted[file_index], first_row
        while start < len(shard):
            stop = min(start - start % self._batch_rows + self._batch_rows, len(shard))
            yield shard[start:stop]
            start = stop


class _Generated(Files):
    """Anything that datasets generates from lists of files: CSV, JSON, text, image folders, generators."""

    def __init__(self, leaf: Leaf) -> None:
        self._generate = leaf.generate
        self._parts = leaf.parts()
        super().__init__(len(self._parts), _paths_in(leaf.kwargs, len(self._parts)), leaf.is_table)
        self._download = _download_config(leaf)
        self._format = leaf.packaged_format

    def _count(self, file_index: int) -> None:
        return None

    def _is_empty(self, file_index: int) -> bool:
        if self.paths is None:
            return False
        local = local_path(self.paths[file_index])
        if local is not None:
            return os.path.isfile(local) and os.path.getsize(local) == 0
        return xgetsize(self.paths[file_index], download_config=self._download) == 0

    def read(self, file_index: int, first_row: int) -> Iterator[Any]:
        path = None if self.paths is None else self.paths[file_index]
        if path is not None and local_path(path) and self._is_empty(file_index):
            return  # the CSV and JSON readers fail on empty files
        if path is None or self._format is None:  # the user's code, whose errors stay as they are
            yield from self._read(file_index, first_row)
            return
        with _damage_named(path, f"file for datasets' {self._format} reader"):
            yield from self._read(file_index, first_row)

    def _read(self, file_index: int, first_row: int) -> Iterator[Any]:
        items = (item for _, item in self._generate(**self._parts[file_index]))
        return _from_row(first_row, items) if self.is_table else itertools.islice(items, first_row, None)


def _from_row(first_row: int, tables: Iterable[Any]) -> Iterator[Any]:
    """Tables, or batches, from a row on."""
    for table in tables:
        if len(table) > first_row:
            yield table.slice(first_row)
        first_row = max(0, first_row - len(table))


@contextlib.contextmanager
def _damage_named(path: str, what: str) -> Iterator[None]:
    """Turns what the readers of datasets and pyarrow raise for a damaged file into an error that names the file."""
    try:
        yield
    except (MemoryError, NotImplementedError, ConnectionError, TimeoutError, pa.ArrowCancelled):
        raise  # says nothing about the file
    except (ValueError, EOFError, OSError, pa.ArrowException, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # that of damage has none
            raise
        raise CorruptDataError(
            f"{path} is no intact {what} ({type(error).__name__}: {error}). Expected what the writer wrote. Write it again.",
            path=path,
        ) from error


class FeatureCast:
    """Casts tables to the types of features; tables with other columns stay as they are.

    The schema is cached, since datasets derives it on every call, which costs as much as reading a small table.
    """

    def __init__(self, features: Features | None) -> None:
        self._features = features
        self._schema: pa.Schema | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        if self._features is None:
            return table
        if self._schema is None or self._schema.names != table.column_names:
            if not set(table.column_names) <= self._features.keys():
                return table
            self._schema = Features({name: self._features[name] for name in table.column_names}).arrow_schema
        return table if table.schema == self._schema else table_cast(table, self._schema)


def local_path(path: str) -> str | None:
    """The path on this machine, or None for a URL."""
    if path.startswith("file://"):
        return path[len("file://") :]
    return None if "://" in path else path


def file_sizes(node: Node, paths: Sequence[str]) -> list[int]:
    """Sizes in bytes of the local or remote files of a leaf of a dataset's tree."""
    leaf = Leaf(node)
    download = _download_config(leaf)

    def size_of(path: str) -> int:
        try:
            return xgetsize(local_path(path) or path, download_config=download)
        except FileNotFoundError:
            if leaf.is_of_user and local_path(path):
                return 0  # any name, whose meaning only the user's generator knows
            raise SourceError(
                f"the file {path} of the dataset is missing. Restore it, or create the dataset again from the "
                "existing files."
            ) from None

    return file_paths.in_threads(size_of, paths)  # each remote size is a round trip


def _download_config(leaf: Leaf) -> DownloadConfig:
    """The options with which datasets opens a leaf's files, such as the token of a private repository."""
    return DownloadConfig(
        storage_options=getattr(leaf.builder, "storage_options", None) or {}, token=getattr(leaf.builder, "token", None)
    )


def _paths_in(kwargs: Mapping[str, object], count: int) -> list[str] | None:
    """The list of ``count`` file names among a generator's arguments; None if there is none."""
    for name in ("base_files", "files", "original_files", *kwargs):
        value = kwargs.get(name)
        if isinstance(value, list) and len(value) == count and all(isinstance(i, str | os.PathLike) for i in value):
            return [str(item) for item in value]
    return None
