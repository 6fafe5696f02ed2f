"""Splits the tree of a streaming Hugging Face dataset into lanes, below ``map``.

Every lane gets a copy of the tree in which the leaves are pieces of files (``files/stream.py``). ``skip`` and ``take``
become ranges of rows if the rows below them can be counted. For any other node that depends on the position of a row in
the whole stream (such as ``with_indices``), the lane runs everything below the node and keeps every L-th row, which is
logged as read amplification.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from datasets import Features

from meshfeed._src.base.errors import SourceError
from meshfeed._src.sources.files.stream import Piece, cut_files, keep_rows
from meshfeed._src.sources.huggingface import internals
from meshfeed._src.sources.huggingface.files import Counts, Files, open_files
from meshfeed._src.sources.huggingface.internals import Node, children_of, every_nth, kind_of, with_children
from meshfeed._src.sources.huggingface.nodes import ExamplePieces, Interleave, TablePieces
from meshfeed._src.sources.window_shuffle import permutation

# Row ranges start and end inside a row group, which two lanes then decode. Do not warn about that much.
_COSTLY = 1.5


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

    def counts_of(self, leaf: Node) -> Counts:
        """The row counts of a leaf's files."""
        return self.counts.setdefault(id(leaf), Counts())

    def next_ordinal(self) -> int:
        """A number for each node that draws random numbers, the same in every lane."""
        self._ordinal += 1
        return self._ordinal


def cut_tree(node: Node, cut: LaneCut) -> Node:
    """The part of the tree that one lane reads; it shares no iteration state with ``node``."""
    return _cut(node, cut, cut.columns)


def find_leaves(node: Node) -> list[Node]:
    """The leaves of a tree, in order."""
    return [found for found in walk(node) if not children_of(found)]


def walk(node: Node) -> list[Node]:
    """All nodes of a tree, parents first."""
    return [node, *(found for child in children_of(node) for found in walk(child))]


def check_tree(node: Node) -> None:
    """Checks that a tree can be split and can resume exactly.

    Raises:
      SourceError: the tree has a node that this version of meshfeed does not support, or a shuffle buffer, whose state
        is not exact.
    """
    found: Any
    for found in walk(node):
        internals.check_known(found)
        if kind_of(found) == internals.SHUFFLED:
            size = found.buffer_size
            raise SourceError(
                f"the dataset has a shuffle(buffer_size={size}), whose state does not hold the buffer: a resume would "
                "lose and repeat records. Take the shuffle() out and give the buffer to the source: "
                f"meshfeed.sources.HuggingFace(dataset, shuffle_buffer={size}), which continues exactly."
            )


def _cut(node: Any, cut: LaneCut, columns: Sequence[str] | None) -> Node:
    kind = kind_of(node)
    if kind in internals.LEAVES:
        return _cut_files(node, cut, columns)
    if kind in (internals.SKIPPED, internals.TAKEN):
        return _cut_range(node, cut, columns) or _take_turns(node, cut)
    if kind in (internals.MAPPED, internals.FILTERED):
        if node.with_indices:
            return _take_turns(node, cut)
        columns = None  # the function may read any column
        typed = _cut_typed(node, cut)
        if typed is not None:
            return typed
    elif kind == internals.SELECTED:
        columns = [name for name in node.column_names if columns is None or name in columns]
    elif kind == internals.FORMATTED and node.features is not None:
        columns = None  # the node would fill missing columns with nulls
    elif kind not in (*internals.ROW_BY_ROW, *internals.BY_PART):
        return _take_turns(node, cut)
    mine = _without_threads(with_children(node, lambda child: _cut(child, cut, columns)), cut)
    if kind == internals.SELECTED:
        mine.column_names = columns
    return mine


def _cut_files(
    leaf: Node,
    cut: LaneCut,
    columns: Sequence[str] | None,
    features: Features | None = None,
) -> Node:
    files, counts = open_files(leaf, columns), cut.counts_of(leaf)
    parts = [Piece(index) for index in counts.filled(files)]
    return _cut_leaf(files, counts, parts, cut, features, columns if features else None)


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
    counts: Counts,
    parts: Sequence[Piece],
    cut: LaneCut,
    features: Features | None = None,
    columns: Sequence[str] | None = None,
) -> Node:
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
    first, stop = 0, None
    for kind, n in reversed(ranges):
        if kind == internals.SKIPPED:
            first += n
        else:
            stop = first + n if stop is None else min(stop, first + n)
    if any(kind_of(found) not in (internals.SELECTED, internals.REBATCHED) for found in chain):
        columns = None
    files, counts = open_files(inner, columns), cut.counts_of(inner)
    parts = keep_rows(files.count, first, stop, lambda index: counts.group_rows(files, index))
    if parts is None:
        return None
    built = _cut_leaf(files, counts, parts, cut)
    for found in reversed(chain):
        built = with_children(found, lambda _, below=built: below)
    return built


def _take_turns(node: Node, cut: LaneCut) -> Node:
    """Every L-th row of the whole output of ``node``, for nodes that depend on positions in the whole stream."""
    if cut.num_lanes == 1:
        return _without_threads(with_children(node, lambda child: _cut(child, cut, None)), cut)
    whole = LaneCut(0, 1, cut.seed, cut.epoch, cut.shuffle_files, counts=cut.counts)
    inner = _cut(node, whole, None)
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
    if kind == internals.IN_TURN:
        return Interleave(node.ex_iterables, node.stopping_strategy, None, None)
    if kind == internals.AT_RANDOM:
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
