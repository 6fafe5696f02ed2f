"""Computes which parts of which documents make up each sequence, from the documents' lengths.

Documents are packed in blocks of consecutive documents. The number of sequences of a block depends only on its
documents' lengths, so one search in a table of 8 bytes per block finds the block of a sequence. The sequence's documents
follow from that block alone: shuffling permutes the blocks, and the documents within each.

``method="split"`` puts the documents of a block end to end and cuts at multiples of the sequence length. ``"fit"`` takes
pieces from the longest to the shortest and puts each into the fullest sequence that has room for it (best-fit
decreasing, as in Ding et al., "Fewer truncations improve language modeling", 2024). Pieces of equal length are
interchangeable, so the number of sequences does not depend on the order of the documents.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from typing import Any

import numpy as np

from meshfeed._src.base.types import JsonValue, RecordIds
from meshfeed._src.order.caching import cached
from meshfeed._src.order.epochs import checked_positions
from meshfeed._src.order.permutation import derive_key, permute, sorted_permutation

try:
    from meshfeed._src.order import _best_fit as extension  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType] # built from C
except ImportError as error:  # installed without a C compiler, or built for another system
    logging.getLogger("meshfeed").debug("documents are packed by Python code, which is slower: %s", error)
    extension: Any = None

PACKING_VERSION = 1
_BLOCKS, _DOCUMENTS, _SEQUENCES = 111, 112, 113  # purpose of a derived key
_CACHED_BLOCKS = 8  # threads read batches of neighboring blocks at the same time; 3 MiB per block of 65,536 documents
_CACHED_EPOCHS = 2  # a batch may touch two epochs


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
class PackingStats:
    """Statistics of packing the documents of one epoch.

    Attributes:
      sequences: number of sequences.
      documents: number of documents, including empty and dropped ones.
      tokens: tokens in the sequences.
      padding_fraction: fraction of the sequences' tokens that is padding, from 0 to 1.
      cut_documents: number of documents that are in more than one sequence.
      lost_tokens: tokens lost because documents were truncated or dropped.
    """

    sequences: int
    documents: int
    tokens: int
    padding_fraction: float
    cut_documents: int
    lost_tokens: int


class Packing:
    """The sequences of all epochs.

    Args:
      lengths: unsigned or signed integers [documents], the tokens of each; may be memory-mapped, and is not copied.
      sequence_length: tokens per sequence.
      method: "split" or "fit".
      block: documents per block.
      long: what to do with a document longer than a sequence: "split", "truncate" or "drop".
      shuffle: whether documents and blocks are permuted, differently in each epoch.
      seed: 0 to 2**64 - 1.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        sequence_length: int,
        *,
        method: str,
        block: int,
        long: str,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        self.lengths, self.sequence_length = lengths, sequence_length
        self._fits, self._block, self._long = method == "fit", block, long
        self._shuffle, self._seed = shuffle, seed
        self._counts = np.array([self._count(number) for number in range(-(-len(lengths) // block))], np.int64)
        self.num_sequences = int(self._counts.sum())
        self._forget()

    def _forget(self) -> None:
        self._plan = cached(self._compute_plan, _CACHED_BLOCKS)
        self._order_of = cached(self._compute_order, _CACHED_EPOCHS)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_plan", "_order_of")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def copy(self) -> Packing:
        """Returns the same packing with a separate cache of blocks."""
        return self._with()

    def shuffled(self, seed: int) -> Packing:
        """Returns the same packing with documents and blocks permuted; reuses the sequence counts."""
        return self._with(_shuffle=True, _seed=seed)

    def _with(self, **changes: object) -> Packing:
        other = object.__new__(Packing)
        other.__setstate__({**self.__getstate__(), **changes})
        return other

    def pieces_at(self, positions: RecordIds) -> Pieces:
        """Returns the pieces of the sequences at ``positions``, in that order.

        Args:
          positions: int64[n], ``epoch * num_sequences + place``, in any order, repeats allowed.
        """
        epochs, places = np.divmod(positions, self.num_sequences)
        found: list[tuple[np.ndarray, Pieces]] = []
        for epoch in np.unique(epochs).tolist():
            # Without shuffle all epochs are equal and share the cached blocks.
            blocks, ends = self._order_of(epoch if self._shuffle else 0)
            in_epoch = np.flatnonzero(epochs == epoch)
            slots = np.searchsorted(ends, places[in_epoch], side="right")
            for slot in np.unique(slots).tolist():
                rows, block = in_epoch[slots == slot], int(blocks[slot])
                numbers = places[rows] - (ends[slot] - self._counts[block])
                found.append((rows, self._plan(epoch if self._shuffle else 0, block).pieces(numbers)))
        return found[0][1] if len(found) == 1 else _join(found, len(positions))

    def stats(self, epoch: int = 0) -> PackingStats:
        """Returns the statistics of one epoch; reads all lengths."""
        tokens = cut = total = 0
        for block in range(len(self._counts)):
            plan = self._plan(epoch, block)
            tokens, cut = tokens + plan.num_tokens, cut + plan.num_cut()
            total += int(self._lengths_of(block).sum())
        padding = 1 - tokens / (self.num_sequences * self.sequence_length)
        return PackingStats(self.num_sequences, len(self.lengths), tokens, padding, cut, total - tokens)

    def _lengths_of(self, block: int) -> np.ndarray:
        return self.lengths[block * self._block : (block + 1) * self._block].astype(np.int64)

    def _used_lengths(self, block: int) -> np.ndarray:
        """Number of tokens of each document of a block that sequences contain, int64[documents of the block]."""
        lengths = self._lengths_of(block)
        if self._long == "truncate":
            return np.minimum(lengths, self.sequence_length)
        return np.where(lengths > self.sequence_length, 0, lengths) if self._long == "drop" else lengths

    def _count(self, block: int) -> int:
        lengths = self._used_lengths(block)
        if not self._fits:
            return -(-int(lengths.sum()) // self.sequence_length)
        whole, rest = np.divmod(lengths, self.sequence_length)
        return int(whole.sum()) + best_fit(_descending(rest), self.sequence_length)[1]

    def _compute_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of an epoch in order, and the cumulative number of their sequences; int64[blocks] each."""
        blocks = np.arange(len(self._counts))
        if self._shuffle:
            blocks = sorted_permutation(derive_key(self._seed, _BLOCKS, len(self.lengths), epoch), len(blocks))
        return blocks, np.cumsum(self._counts[blocks])

    def _compute_plan(self, epoch: int, block: int) -> _SplitBlock | _FitBlock:
        used, first = self._used_lengths(block), block * self._block
        order, key = np.arange(len(used)), None
        if self._shuffle:
            order = sorted_permutation(derive_key(self._seed, _DOCUMENTS, epoch, block), len(used))
            key = derive_key(self._seed, _SEQUENCES, epoch, block)
        if self._fits:
            return _FitBlock(first + order, used[order], self.sequence_length, key)
        return _SplitBlock(first + order, used[order], self.sequence_length)


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
        splits, sequence, within = _expand(counts)
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
        splits, sequence, within = _expand(counts)
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


def _expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, for groups of the given sizes, their first members, and each member's group and index within it."""
    splits = np.concatenate([[0], np.cumsum(counts)])
    group = np.repeat(np.arange(len(counts)), counts)
    return splits, group, np.arange(int(splits[-1]), dtype=np.int64) - splits[group]


def _join(parts: list[tuple[np.ndarray, Pieces]], num_sequences: int) -> Pieces:
    """Merges the pieces of several blocks; each part consists of row numbers and the pieces of those rows."""
    counts = np.zeros(num_sequences, np.int64)
    for rows, pieces in parts:
        counts[rows] = np.diff(pieces.splits)
    splits = np.concatenate([[0], np.cumsum(counts)])
    fields = [np.empty(int(splits[-1]), np.int64) for _ in range(3)]
    for rows, pieces in parts:
        _, group, within = _expand(np.diff(pieces.splits))
        at = splits[rows][group] + within
        for field, values in zip(fields, (pieces.documents, pieces.starts, pieces.lengths), strict=True):
            field[at] = values
    return Pieces(splits, *fields)


@dataclasses.dataclass(frozen=True)
class PlaceOrder:
    """The order of sequences whose record ids are their positions in the stream, ``epoch * num_records + place``.

    Attributes:
      num_records: sequences per epoch.
      seed: seed of the packing, for the fingerprint.
      num_epochs: number of epochs, or None for an endless stream.
    """

    num_records: int
    seed: int
    num_epochs: int | None

    @property
    def total(self) -> int | None:
        """Number of sequences in the whole stream; None if it never ends."""
        return None if self.num_epochs is None else self.num_records * self.num_epochs

    def config(self) -> dict[str, JsonValue]:
        """The part of the fingerprint that describes the order."""
        return {"algorithm": "packing", "version": PACKING_VERSION, "shuffle": True, "seed": self.seed}

    def ids_at(self, positions: RecordIds) -> tuple[RecordIds, RecordIds]:
        """Returns the positions themselves, and their epochs; int64[n] each.

        Raises:
          IndexError: a position is outside the stream.
        """
        positions = checked_positions(positions, self.total)
        return positions, positions // self.num_records

    def ids_between(self, start: int, stop: int) -> tuple[RecordIds, RecordIds]:
        """Returns :meth:`ids_at` for positions ``[start, stop)``."""
        return self.ids_at(np.arange(start, stop, dtype=np.int64))
