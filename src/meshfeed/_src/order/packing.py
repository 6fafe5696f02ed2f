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
import logging
from typing import Any, Protocol

import numpy as np

from meshfeed._src.base.types import RecordIds
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
class PackingMethod:
    """How the documents of a block become sequences.

    Attributes:
      sequence_length: tokens per sequence.
      method: "split" or "fit".
      long: what to do with a document longer than a sequence: "split", "truncate" or "drop".
    """

    sequence_length: int
    method: str
    long: str

    def used_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of each document that sequences contain, int64[documents]."""
        lengths = lengths.astype(np.int64)
        if self.long == "truncate":
            return np.minimum(lengths, self.sequence_length)
        return np.where(lengths > self.sequence_length, 0, lengths) if self.long == "drop" else lengths

    def count(self, first: int, lengths: np.ndarray) -> int:
        """Returns the number of sequences of a block, in any order of its documents.

        Args:
          first: the first document of the block.
          lengths: integers [n], the tokens of the documents from there on.
        """
        del first  # limits on other leaves of the documents would need it
        lengths = self.used_lengths(lengths)
        if self.method == "split":
            return -(-int(lengths.sum()) // self.sequence_length)
        whole, rest = np.divmod(lengths, self.sequence_length)
        return int(whole.sum()) + best_fit(_descending(rest), self.sequence_length)[1]

    def pack(self, first: int, lengths: np.ndarray, order: RecordIds, key: int | None) -> PackedBlock:
        """Packs a block.

        Args:
          first: the first document of the block.
          lengths: integers [n], the tokens of the documents from there on.
          order: int64[n], the order in which to pack them.
          key: key by which sequences are permuted that the method leaves sorted; None not to permute them.
        """
        documents, lengths = first + order, self.used_lengths(lengths)[order]
        if self.method == "split":
            return _SplitBlock(documents, lengths, self.sequence_length)
        return _FitBlock(documents, lengths, self.sequence_length, key)


class PackedBlock(Protocol):
    """The sequences of one block of documents."""

    num_tokens: int

    def pieces(self, numbers: np.ndarray) -> Pieces:
        """Returns the pieces of the sequences ``numbers`` of the block, int64[n]."""
        ...

    def num_cut(self) -> int:
        """Returns the number of documents in more than one sequence."""
        ...


class _SplitBlock:
    """A block of documents, end to end.

    Args:
      documents: int64[n], the documents in order.
      lengths: int64[n], their tokens.
      sequence_length: tokens per sequence.
    """

    def __init__(self, documents: RecordIds, lengths: np.ndarray, sequence_length: int) -> None:
        used = np.flatnonzero(lengths)  # an empty document has no piece
        self._documents, self._lengths, self._size = documents[used], lengths[used], sequence_length
        self._ends = np.cumsum(self._lengths)
        self.num_tokens = int(self._ends[-1]) if len(used) else 0

    def pieces(self, numbers: np.ndarray) -> Pieces:
        """Returns the pieces of the sequences ``numbers`` of the block, int64[n]."""
        starts = numbers * self._size
        stops = np.minimum(starts + self._size, self.num_tokens)
        first = np.searchsorted(self._ends, starts, side="right")
        counts = np.searchsorted(self._ends, stops, side="left") + 1 - first
        splits, sequence, within = expand(counts)
        at = first[sequence] + within
        begins = np.maximum(starts[sequence], self._ends[at] - self._lengths[at])
        lengths = np.minimum(stops[sequence], self._ends[at]) - begins
        return Pieces(splits, self._documents[at], begins - (self._ends[at] - self._lengths[at]), lengths)

    def num_cut(self) -> int:
        """Number of documents in more than one sequence."""
        return int(np.count_nonzero((self._ends - self._lengths) // self._size != (self._ends - 1) // self._size))


class _FitBlock:
    """A block of documents in which only documents longer than a sequence are cut.

    Sequences filled by a single document are computed, not stored: a document of 10**7 tokens fills thousands.

    Args:
      documents: int64[n], the documents in order.
      lengths: int64[n], their tokens.
      sequence_length: tokens per sequence.
      key: key of the permutation of sequences; None to order them by their first documents, full ones first.
    """

    def __init__(self, documents: RecordIds, lengths: np.ndarray, sequence_length: int, key: int | None) -> None:
        self._size, self._key = sequence_length, key
        self.num_tokens = int(lengths.sum())
        self._all, (whole, rest) = documents, np.divmod(lengths, sequence_length)
        self._whole_ends = np.cumsum(whole)
        self._num_whole = int(whole.sum())
        self._cut = int(np.count_nonzero(lengths > sequence_length))
        used = np.flatnonzero(rest)
        descending = used[np.argsort(-rest[used], kind="stable")]
        bins = np.empty(len(lengths), np.int64)
        bins[descending], number = best_fit(rest[descending], sequence_length)
        by_bin = used[np.argsort(bins[used], kind="stable")]  # stable: documents of a sequence stay in order
        self._documents, self._starts, self._rest = documents[by_bin], whole[by_bin] * sequence_length, rest[by_bin]
        self._splits = np.concatenate([[0], np.cumsum(np.bincount(bins[used], minlength=number))])
        self._by_first = np.argsort(by_bin[self._splits[:-1]]) if key is None else None
        self._num_sequences = self._num_whole + number

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

    def num_cut(self) -> int:
        """Number of documents in more than one sequence: those longer than a sequence."""
        return self._cut


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
