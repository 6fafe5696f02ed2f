"""Orders packed sequences: which documents form a block, and in which order blocks and documents come.

Documents are packed in blocks of consecutive documents. The number of sequences of a block depends only on its
documents' lengths (``packing.py``), so one search in a table of 8 bytes per block finds the block of a sequence. The
sequence's documents follow from that block alone: shuffling permutes the blocks, and the documents within each. An order
by shards packs windows of shards instead, which lanes then read one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshfeed._src.base.settings import ShardShuffle
from meshfeed._src.base.types import JsonValue, RecordIds
from meshfeed._src.order.caching import Caching, cached
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.packing import PackedBlock, PackingMethod, Pieces, join_pieces
from meshfeed._src.order.permutation import derive_key, sorted_permutation
from meshfeed._src.order.shards import ShardOrder, shards_config

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
      tokens: tokens of documents in the sequences.
      padding_fraction: fraction of the sequences' tokens that is padding, from 0 to 1; ``bos_id`` is not padding.
      cut_documents: number of documents that are in more than one sequence.
      lost_tokens: tokens lost because documents were truncated or dropped.
    """

    sequences: int
    documents: int
    tokens: int
    padding_fraction: float
    cut_documents: int
    lost_tokens: int


class Packing(Caching):
    """The sequences of all epochs. An id is ``epoch * num_sequences + place``.

    Args:
      lengths: unsigned or signed integers [documents], the tokens of each; may be memory-mapped, and is not copied.
      method: how the documents of a block become sequences.
      block: documents per block.
    """

    def __init__(self, lengths: np.ndarray, method: PackingMethod, *, block: int) -> None:
        self.lengths, self.method = lengths, method
        self._seed: int | None = None  # to permute the documents of a block; None to leave them in order
        self._permutes_blocks = False
        self._num_cached = _CACHED_BLOCKS
        self._divide(np.append(np.arange(0, len(lengths), block), len(lengths)))
        self._make_caches()

    def _divide(self, bounds: RecordIds) -> None:
        self._bounds = bounds  # the first document of each block, and the number of documents
        counts = [self.method.count(int(bounds[block]), self._lengths_of(block)) for block in range(len(bounds) - 1)]
        self.counts = np.array(counts, np.int64)
        self.num_sequences = int(self.counts.sum())

    def _make_caches(self) -> None:
        self._plan = cached(self._compute_plan, self._num_cached)
        self._order_of = cached(self._compute_order, _CACHED_EPOCHS)

    def copy(self) -> Packing:
        """Returns the same packing with a separate cache of blocks."""
        return self._with()

    def shuffled(self, seed: int) -> Packing:
        """Returns the same packing with documents and blocks permuted; reuses the sequence counts."""
        return self._with(_seed=seed, _permutes_blocks=True)

    def by_windows(self, shard_lengths: RecordIds, window_shards: int, seed: int) -> Packing:
        """Returns the packing whose blocks are windows of shards; permutes the documents of a window, not the windows.

        Args:
          shard_lengths: int64[shards], the documents of each shard.
          window_shards: shards in a window.
          seed: 0 to 2**64 - 1.
        """
        ends = np.cumsum(shard_lengths[shard_lengths > 0])
        other = self._with(_seed=seed)
        other._divide(np.unique([0, *ends[window_shards - 1 :: window_shards], len(self.lengths)]))
        return other

    def in_shards(self, shard_lengths: RecordIds) -> RecordIds:
        """Returns the number of sequences whose block begins in each shard of the documents, int64[shards]."""
        shards = np.searchsorted(np.cumsum(shard_lengths), self._bounds[:-1], side="right")
        return np.bincount(shards, self.counts, len(shard_lengths)).astype(np.int64)

    def keeping(self, num_blocks: int) -> Packing:
        """Returns the same packing with a cache of at least ``num_blocks`` blocks."""
        return self._with(_num_cached=max(_CACHED_BLOCKS, num_blocks))

    def _with(self, **changes: object) -> Packing:
        other = object.__new__(Packing)
        other.__setstate__({**self.__getstate__(), **changes})
        return other

    def pieces_at(self, ids: RecordIds) -> Pieces:
        """Returns the pieces of sequences.

        Args:
          ids: int64[n], ``epoch * num_sequences + place``, in any order, repeats allowed.
        """
        epochs, places = np.divmod(ids, self.num_sequences)
        found: list[tuple[np.ndarray, Pieces]] = []
        for epoch in np.unique(epochs).tolist():
            epoch_key = 0 if self._seed is None else epoch  # without shuffle all epochs share the cached blocks
            blocks, ends = self._order_of(epoch_key)
            in_epoch = np.flatnonzero(epochs == epoch)
            slots = np.searchsorted(ends, places[in_epoch], side="right")
            for slot in np.unique(slots).tolist():
                rows, block = in_epoch[slots == slot], int(blocks[slot])
                numbers = places[rows] - (ends[slot] - self.counts[block])
                found.append((rows, self._plan(epoch_key, block).pieces(numbers)))
        return found[0][1] if len(found) == 1 else join_pieces(found, len(ids))

    def stats(self, epoch: int = 0) -> PackingStats:
        """Returns the statistics of one epoch; reads all lengths."""
        tokens = cut = total = before = 0
        for block in range(len(self.counts)):
            plan = self._plan(epoch, block)
            tokens, cut = tokens + plan.num_tokens, cut + plan.num_cut()
            total += int(self._lengths_of(block).sum())
            before += self.method.before and self.method.before * plan.num_pieces
        padding = 1 - (tokens + before) / (self.num_sequences * self.method.sequence_length)
        return PackingStats(self.num_sequences, len(self.lengths), tokens, padding, cut, total - tokens)

    def _lengths_of(self, block: int) -> np.ndarray:
        return self.lengths[self._bounds[block] : self._bounds[block + 1]]

    def _compute_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of an epoch in order, and the cumulative number of their sequences; int64[blocks] each."""
        blocks = np.arange(len(self.counts))
        if self._permutes_blocks:
            assert self._seed is not None
            blocks = sorted_permutation(derive_key(self._seed, _BLOCKS, len(self.lengths), epoch), len(blocks))
        return blocks, np.cumsum(self.counts[blocks])

    def _compute_plan(self, epoch: int, block: int) -> PackedBlock:
        lengths, first = self._lengths_of(block), int(self._bounds[block])
        if self._seed is None:
            return self.method.pack(first, lengths, np.arange(len(lengths)), None)
        order = sorted_permutation(derive_key(self._seed, _DOCUMENTS, epoch, block), len(lengths))
        return self.method.pack(first, lengths, order, derive_key(self._seed, _SEQUENCES, epoch, block))


class SequenceOrder:
    """The order of sequences of a :class:`Packing`, whose ids are ``epoch * num_sequences + place``.

    Args:
      counts: int64[blocks], the sequences of each block.
      seed: seed of the packing.
      num_epochs: number of epochs, or None for an endless stream.
      shuffle: settings of the order by shards, whose windows are the blocks; None to leave the places as they are.
      num_lanes, segments: by shards, see :class:`ShardOrder`.
    """

    def __init__(
        self,
        counts: RecordIds,
        seed: int,
        num_epochs: int | None,
        *,
        shuffle: ShardShuffle | None = None,
        num_lanes: int = 1,
        segments: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._num_sequences, self._seed, self._shuffle = int(counts.sum()), seed, shuffle
        if shuffle is None:
            self._places = EpochOrder(self._num_sequences, shuffle=False, seed=seed, num_epochs=num_epochs)
        else:
            self._places = ShardOrder(
                counts,
                shuffle=dataclasses.replace(shuffle, window_shards=1),
                num_lanes=num_lanes,
                seed=seed,
                num_epochs=num_epochs,
                segments=segments,
                shuffles_windows=False,  # packing has done that; neighbors share documents
            )
        self.total = self._places.total

    def config(self) -> dict[str, JsonValue]:
        """The part of the fingerprint that describes the order."""
        name = {"algorithm": "packing", "version": PACKING_VERSION}
        if self._shuffle is None or isinstance(self._places, EpochOrder):
            return {**name, "shuffle": True, "seed": self._seed}
        places = self._places.config()
        of_places = {"places": [places["algorithm"], places["version"]], "shards": places["shards"]}
        return {**shards_config(self._shuffle, self._seed, self._places.num_lanes), **of_places, **name}

    def ids_at(self, positions: RecordIds) -> tuple[RecordIds, RecordIds]:
        """Returns the ids of sequences, and their epochs; int64[n] each.

        Raises:
          IndexError: a position is outside the stream.
        """
        places, epochs = self._places.ids_at(positions)
        return epochs * self._num_sequences + places, epochs

    def ids_between(self, start: int, stop: int) -> tuple[RecordIds, RecordIds]:
        """Returns :meth:`ids_at` for positions ``[start, stop)``."""
        return self.ids_at(np.arange(start, stop, dtype=np.int64))
