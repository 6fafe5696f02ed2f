"""Computes which parts of the documents of one block make up each sequence, from the documents' lengths.

The number of sequences of a block depends only on its documents' lengths, not on their order; ``blocks.py`` chooses the
documents of a block and orders them.

``method="split"`` puts the documents of a block end to end and cuts at multiples of the sequence length. ``"fit"`` takes
pieces from the longest to the shortest and puts each into the fullest sequence that has room for it (best-fit
decreasing, as in Ding et al., "Fewer truncations improve language modeling", 2024). Pieces of equal length are
interchangeable, so the number of sequences does not depend on the order of the documents.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from meshfeed._src.base.types import RecordIds
from meshfeed._src.order.limits import InBins, Limits, pack
from meshfeed._src.order.permutation import permute

try:
    from meshfeed._src.order import _best_fit as extension  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType] # built from C
except ImportError as error:  # installed without a C compiler, or built for another system
    logging.getLogger("meshfeed").debug("documents are packed by Python code, which is slower: %s", error)
    extension: Any = None


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Parts of documents that make up sequences, in the order of the sequences and of their tokens.

    Attributes:
      splits: int64[sequences + 1], the first piece of each sequence.
      documents: int64[pieces], the document of each piece.
      starts: int64[pieces], its first token in the document.
      lengths: int64[pieces], its number of tokens, at least 1.
    """

    splits: np.ndarray
    documents: RecordIds
    starts: np.ndarray
    lengths: np.ndarray


@dataclasses.dataclass(frozen=True)
class Budget:
    """A leaf of which a sequence holds a limited number of entries.

    Attributes:
      counts: integers [documents], the entries of each document; at most ``most``, unless ``long`` is "drop".
      most: most entries in a sequence.
    """

    counts: np.ndarray
    most: int


@dataclasses.dataclass(frozen=True, eq=False)
class PackingMethod:
    """How the documents of a block become sequences.

    Attributes:
      sequence_length: tokens per sequence.
      method: "split" or "fit".
      long: what to do with a document longer than a sequence: "split", "truncate" or "drop".
      max_segments: most pieces in a sequence; None for any number.
      align: each piece begins at a multiple of this, which divides the length.
      before: tokens before each piece, 0 or 1.
      budgets: of other leaves.
    """

    sequence_length: int
    method: str
    long: str
    max_segments: int | None = None
    align: int = 1
    before: int = 0
    budgets: Sequence[Budget] = ()

    @property
    def longest(self) -> int:
        """Most tokens of a piece."""
        return self.sequence_length - self.before

    @functools.cached_property
    def limits(self) -> Limits:
        """Limits of a sequence."""
        shortest = -(-(1 + self.before) // self.align) * self.align
        slots = min(self.max_segments or self.sequence_length, self.sequence_length // shortest)
        most = tuple(budget.most for budget in self.budgets)
        return Limits(self.sequence_length, self.align, self.before, slots, most)

    @functools.cached_property
    def is_limited(self) -> bool:
        """Whether other limits than the tokens of a sequence determine what it holds; see ``limits.py``."""
        shortest = -(-(1 + self.before) // self.align) * self.align
        reaches = self.max_segments is not None and self.max_segments < self.sequence_length // shortest
        # Then a cut may need one more multiple of align, so the number of sequences would depend on the order.
        uneven = self.method == "split" and self.align > 1 and self.before > 0
        return bool(self.budgets) or reaches or uneven

    def used_lengths(self, first: int, lengths: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of each document from ``first`` on that sequences contain, int64[documents]."""
        lengths = lengths.astype(np.int64)
        if self.long == "truncate":
            return np.minimum(lengths, self.longest)
        if self.long == "split":
            return lengths
        dropped = lengths > self.longest
        for budget in self.budgets:
            dropped |= budget.counts[first : first + len(lengths)] > budget.most
        return np.where(dropped, 0, lengths)

    def count(self, first: int, lengths: np.ndarray) -> int:
        """Returns the number of sequences of a block, in any order of its documents.

        Args:
          first: the first document of the block.
          lengths: integers [n], the tokens of the documents from there on.
        """
        lengths = self.used_lengths(first, lengths)
        if self.method == "split" and not self.is_limited:
            return _num_split(lengths, self)
        whole, rest = np.divmod(lengths, self.longest)
        if self.is_limited:
            used = np.flatnonzero(rest)
            return int(whole.sum()) + (
                self.pack_rests(first + used, whole[used], rest[used]).number if len(used) else 0
            )
        units = self.limits.units(rest[rest > 0])
        return int(whole.sum()) + best_fit(_descending(units), self.sequence_length // self.align)[1]

    def pack(self, first: int, lengths: np.ndarray, order: RecordIds, key: int | None) -> PackedBlock:
        """Packs a block.

        Args:
          first: the first document of the block.
          lengths: integers [n], the tokens of the documents from there on.
          order: int64[n], the order in which to pack them.
          key: key by which sequences are permuted that the method leaves sorted; None not to permute them.
        """
        documents, lengths = first + order, self.used_lengths(first, lengths)[order]
        if self.method == "split" and not self.is_limited:
            return _SplitBlock(documents, lengths, self)
        return _FitBlock(documents, lengths, self, key)

    def pack_rests(self, documents: RecordIds, whole: np.ndarray, rest: np.ndarray) -> InBins:
        """Packs what is left of documents after their whole sequences.

        Args:
          documents: int64[n], at least one.
          whole: int64[n], the sequences that each fills by itself.
          rest: int64[n], the tokens after these, at least 1.
        """
        if not self.is_limited:
            units = self.limits.units(rest)
            descending = np.argsort(-units, kind="stable")
            bins = np.empty(len(rest), np.int64)
            bins[descending], number = best_fit(units[descending], self.sequence_length // self.align)
            items = np.arange(len(rest))
            return InBins(items, np.zeros_like(items), rest, bins, number)
        # Entries belong to the first piece of a document, so the rest of a longer one has none.
        counts = [np.where(whole > 0, 0, budget.counts[documents].astype(np.int64)) for budget in self.budgets]
        sizes = np.column_stack(counts) if counts else np.zeros((len(rest), 0), np.int64)
        return pack(rest, sizes, self.limits, cuts=self.method == "split")


def _num_split(lengths: np.ndarray, method: PackingMethod) -> int:
    """Number of sequences of documents end to end."""
    used = lengths[lengths > 0]
    total = int(method.limits.units(used).sum()) * method.align  # align is 1 if there are tokens before pieces
    # The first document has its token before it at the beginning of the first sequence, as each piece there has.
    return -(-(total - method.before) // method.longest) if len(used) else 0


class _SplitBlock:
    """A block of documents, end to end.

    With a token before each piece, every sequence begins with one, so the documents lie end to end in what sequences
    hold besides. The token before a document then falls between two documents. If that is where a sequence ends or begins,
    it is left out, and the sequence has one token of padding: the number of sequences does not depend on the order.

    Args:
      documents: int64[n], the documents in order.
      lengths: int64[n], their tokens.
      method: how they are packed; not within limits.
    """

    def __init__(self, documents: RecordIds, lengths: np.ndarray, method: PackingMethod) -> None:
        used = np.flatnonzero(lengths)  # an empty document has no piece
        self._documents, lengths = documents[used], lengths[used]
        self._size, self._before, self._number = method.longest, method.before, _num_split(lengths, method)
        taken = method.limits.units(lengths) * method.align
        self._begins = np.cumsum(taken) - taken + method.before  # where the tokens of each document begin and end
        self._ends = self._begins + lengths
        self.num_tokens = int(lengths.sum())

    @property
    def num_pieces(self) -> int:
        """Number of pieces of all sequences."""
        return len(self.pieces(np.arange(self._number)).lengths)

    def pieces(self, numbers: np.ndarray) -> Pieces:
        """Returns the pieces of the sequences ``numbers`` of the block, int64[n]."""
        starts = numbers * self._size + self._before
        stops = starts + self._size
        first = np.searchsorted(self._ends, starts, side="right")
        counts = np.searchsorted(self._begins, stops, side="left") - first
        splits, sequence, within = expand(counts)
        at = first[sequence] + within
        begins = np.maximum(starts[sequence], self._begins[at])
        lengths = np.minimum(stops[sequence], self._ends[at]) - begins
        return Pieces(splits, self._documents[at], begins - self._begins[at], lengths)

    def num_cut(self) -> int:
        """Number of documents in more than one sequence."""
        first, last = ((at - self._before) // self._size for at in (self._begins, self._ends - 1))
        return int(np.count_nonzero(first != last))


class _FitBlock:
    """A block of documents in which only documents longer than a sequence are cut, or what limits require.

    Sequences filled by a single document are computed, not stored: a document of 10**7 tokens fills thousands.

    Args:
      documents: int64[n], the documents in order.
      lengths: int64[n], their tokens.
      method: how they are packed.
      key: key of the permutation of sequences; None to order them by their first documents, full ones first.
    """

    def __init__(self, documents: RecordIds, lengths: np.ndarray, method: PackingMethod, key: int | None) -> None:
        self._size, self._key = method.longest, key
        self.num_tokens = int(lengths.sum())
        self._all, (whole, rest) = documents, np.divmod(lengths, self._size)
        self._whole_ends = np.cumsum(whole)
        self._num_whole = int(whole.sum())
        used = np.flatnonzero(rest)
        if len(used):
            found = method.pack_rests(documents[used], whole[used], rest[used])
        else:
            found = InBins(*(np.zeros(0, np.int64) for _ in range(4)), number=0)
        by_bin = np.argsort(found.bins, kind="stable")  # stable: documents of a sequence stay in order
        items = used[found.items[by_bin]]
        self._documents, self._rest = documents[items], found.lengths[by_bin]
        self._starts = whole[items] * self._size + found.starts[by_bin]
        self._splits = np.concatenate([[0], np.cumsum(np.bincount(found.bins, minlength=found.number))])
        self._by_first = np.argsort(items[self._splits[:-1]], kind="stable") if key is None else None
        self._num_sequences = self._num_whole + found.number
        self._cut = int(np.count_nonzero(whole + np.bincount(items, minlength=len(lengths)) > 1))

    def pieces(self, numbers: np.ndarray) -> Pieces:
        """Returns the pieces of the sequences ``numbers`` of the block, int64[n]."""
        if self._key is not None:
            numbers = permute(numbers, self._num_sequences, self._key)
        is_whole = numbers < self._num_whole
        bins = np.where(is_whole, 0, numbers - self._num_whole)
        if self._by_first is not None and len(self._by_first):
            bins = self._by_first[bins]
        ends = np.append(self._splits, 1)  # if there are no bins, bin 0 is read below but not used
        counts = np.where(is_whole, 1, ends[bins + 1] - ends[bins])
        splits, sequence, within = expand(counts)
        documents, starts, lengths = (np.zeros(len(sequence), np.int64) for _ in range(3))
        part = is_whole[sequence]
        number = numbers[sequence[part]]
        at = np.searchsorted(self._whole_ends, number, side="right")
        before = np.concatenate([[0], self._whole_ends])[at]
        documents[part], starts[part], lengths[part] = self._all[at], (number - before) * self._size, self._size
        at = (self._splits[np.minimum(bins, len(self._splits) - 1)][sequence] + within)[~part]
        documents[~part], starts[~part], lengths[~part] = self._documents[at], self._starts[at], self._rest[at]
        return Pieces(splits, documents, starts, lengths)

    @property
    def num_pieces(self) -> int:
        """Number of pieces of all sequences."""
        return self._num_whole + len(self._documents)

    def num_cut(self) -> int:
        """Number of documents in more than one sequence."""
        return self._cut


PackedBlock: TypeAlias = _SplitBlock | _FitBlock


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Puts each piece into the fullest bin that has room for it, or into a new bin.

    Args:
      lengths: integers [n] from 1 to ``capacity``, taken in this order.
      capacity: capacity of each bin.

    Returns:
      The bin of each piece, int64[n], and the number of bins.
    """
    if extension is None:
        return _best_fit_in_python(lengths.tolist(), capacity)
    bins = np.empty(len(lengths), np.int32)
    number = extension.best_fit(np.ascontiguousarray(lengths, np.int32), capacity, bins)
    return bins.astype(np.int64), number


def _best_fit_in_python(lengths: list[int], capacity: int) -> tuple[np.ndarray, int]:
    rooms: list[int] = []  # the distinct amounts of room left in bins, ascending
    bins_with: dict[int, list[int]] = {}
    found = np.empty(len(lengths), np.int64)
    number = 0
    for i, length in enumerate(lengths):
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            chosen, room, number = number, capacity, number + 1
        else:
            room = rooms[at]
            chosen = bins_with[room].pop()
            if not bins_with[room]:
                del rooms[at]
        if room := room - length:
            waiting = bins_with.setdefault(room, [])
            if not waiting:
                bisect.insort(rooms, room)
            waiting.append(chosen)
        found[i] = chosen
    return found, number


def _descending(lengths: np.ndarray) -> np.ndarray:
    used = lengths[lengths > 0]
    if len(used) and int(used.max()) < 1 << 16:
        used = used.astype(np.uint16)  # numpy's stable sort of 16-bit integers is a radix sort
    return np.sort(used, kind="stable")[::-1]


def expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, for groups of the given sizes, their first members, and each member's group and index within it."""
    splits = np.concatenate([[0], np.cumsum(counts)])
    group = np.repeat(np.arange(len(counts)), counts)
    return splits, group, np.arange(int(splits[-1]), dtype=np.int64) - splits[group]


def join_pieces(parts: list[tuple[np.ndarray, Pieces]], num_sequences: int) -> Pieces:
    """Merges the pieces of several blocks; each part consists of row numbers and the pieces of those rows."""
    counts = np.zeros(num_sequences, np.int64)
    for rows, pieces in parts:
        counts[rows] = np.diff(pieces.splits)
    splits = np.concatenate([[0], np.cumsum(counts)])
    fields = [np.empty(int(splits[-1]), np.int64) for _ in range(3)]
    for rows, pieces in parts:
        _, group, within = expand(np.diff(pieces.splits))
        at = splits[rows][group] + within
        for field, values in zip(fields, (pieces.documents, pieces.starts, pieces.lengths), strict=True):
            field[at] = values
    return Pieces(splits, *fields)
