"""Orders packed sequences: which documents form a block, and in which order blocks and documents come.

Documents are packed in blocks of consecutive documents. The number of sequences of a block depends only on its
documents' lengths (``packing.py``), so one search in a table of 8 bytes per block finds the block of a sequence. The
sequence's documents follow from that block alone: shuffling permutes the blocks, and the documents within each.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from meshfeed._src.base.types import JsonValue, RecordIds
from meshfeed._src.order.caching import cached
from meshfeed._src.order.epochs import checked_positions
from meshfeed._src.order.packing import PackedBlock, PackingMethod, Pieces, join_pieces
from meshfeed._src.order.permutation import derive_key, sorted_permutation

PACKING_VERSION = 1
_BLOCKS, _DOCUMENTS, _SEQUENCES = 111, 112, 113  # purpose of a derived key
_CACHED_BLOCKS = 8  # threads read batches of neighboring blocks at the same time; 3 MiB per block of 65,536 documents
_CACHED_EPOCHS = 2  # a batch may touch two epochs


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
      method: how the documents of a block become sequences.
      block: documents per block.
      shuffle: whether documents and blocks are permuted, differently in each epoch.
      seed: 0 to 2**64 - 1.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        method: PackingMethod,
        *,
        block: int,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        self.lengths, self.method, self._block = lengths, method, block
        self._shuffle, self._seed = shuffle, seed
        self._counts = np.array(
            [method.count(self._lengths_of(number)) for number in range(-(-len(lengths) // block))], np.int64
        )
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
        return found[0][1] if len(found) == 1 else join_pieces(found, len(positions))

    def stats(self, epoch: int = 0) -> PackingStats:
        """Returns the statistics of one epoch; reads all lengths."""
        tokens = cut = total = 0
        for block in range(len(self._counts)):
            plan = self._plan(epoch, block)
            tokens, cut = tokens + plan.num_tokens, cut + plan.num_cut()
            total += int(self._lengths_of(block).sum())
        padding = 1 - tokens / (self.num_sequences * self.method.sequence_length)
        return PackingStats(self.num_sequences, len(self.lengths), tokens, padding, cut, total - tokens)

    def _lengths_of(self, block: int) -> np.ndarray:
        return self.lengths[block * self._block : (block + 1) * self._block]

    def _compute_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of an epoch in order, and the cumulative number of their sequences; int64[blocks] each."""
        blocks = np.arange(len(self._counts))
        if self._shuffle:
            blocks = sorted_permutation(derive_key(self._seed, _BLOCKS, len(self.lengths), epoch), len(blocks))
        return blocks, np.cumsum(self._counts[blocks])

    def _compute_plan(self, epoch: int, block: int) -> PackedBlock:
        lengths, first, key = self._lengths_of(block), block * self._block, None
        if not self._shuffle:
            return self.method.pack(first + np.arange(len(lengths)), lengths, None)
        order = sorted_permutation(derive_key(self._seed, _DOCUMENTS, epoch, block), len(lengths))
        key = derive_key(self._seed, _SEQUENCES, epoch, block)
        return self.method.pack(first + order, lengths[order], key)


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
