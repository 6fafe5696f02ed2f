"""Computes record ids and epochs from positions in the stream.

The order of an epoch is a keyed permutation (``permutation.py``), which is computed, not stored. Any batch of
positions takes O(batch) time and memory at any stream length, so resuming at position 9e11 is as fast as starting.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.types import MAX_POSITION, JsonValue, RecordIds
from meshfeed._src.order.permutation import (
    ALGORITHM,
    EPOCH,
    TABLE_RECORDS,
    VERSION,
    derive_key,
    permute,
    permute_blocks,
    permute_each,
)


def check_positions(positions: RecordIds, total: int | None) -> tuple[int, int]:
    """Checks positions of a stream of ``total`` records, or of 2**62 if it never ends.

    Args:
      positions: int64[n], n at least 1.
      total: number of records of the stream, or None.

    Returns:
      The smallest and the largest position.

    Raises:
      IndexError: a position is outside the stream.
    """
    low, high = int(positions.min()), int(positions.max())
    end = MAX_POSITION if total is None else total
    if low < 0 or high >= end:
        raise IndexError(f"positions {low}..{high} are not all within the stream's [0, {end})")
    return low, high


def checked_positions(positions: RecordIds, total: int | None) -> RecordIds:
    """Returns positions as int64[n], n at least 0; see :func:`check_positions`."""
    positions = np.asarray(positions, np.int64)
    if positions.size:
        check_positions(positions, total)
    return positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The order of a random-access source over all its epochs.

    ``shuffle=False``: 0, 1, 2, … in every epoch. ``shuffle=True``: each epoch is a different, uniform permutation of
    all records. ``shuffle=<block>``: permutes blocks of that many consecutive records, and the records within each
    block; a block can then be read from one contiguous range on disk. If one block holds all records, it equals
    ``shuffle=True``.

    Args:
      num_records: records per epoch, 1 to 2**62.
      shuffle: False, True, or records per block. ``1`` is a block of one record, not True.
      seed: 0 to 2**64 - 1.
      num_epochs: number of epochs, at least 1, or None to repeat forever.

    Raises:
      SettingsError: a setting is out of range.
      SourceError: there are no records.
    """

    num_records: int
    shuffle: bool | int = dataclasses.field(compare=False)
    seed: int
    num_epochs: int | None
    # 0: sequential; None: uniform; otherwise records per block. Compared instead of ``shuffle``, because True == 1.
    _block_records: int | None = dataclasses.field(init=False, repr=False)

    def __init__(self, num_records: int, *, shuffle: bool | int, seed: int, num_epochs: int | None) -> None:
        _check_order(num_records, shuffle, seed, num_epochs)
        uniform = isinstance(shuffle, (bool, np.bool_)) and bool(shuffle)
        block = None if uniform or (shuffle and num_records <= shuffle) else int(shuffle)
        vars(self).update(  # the dataclass is frozen
            num_records=int(num_records),
            shuffle=bool(shuffle) if isinstance(shuffle, (bool, np.bool_)) else int(shuffle),
            seed=int(seed),
            num_epochs=None if num_epochs is None else int(num_epochs),
            _block_records=block,
        )

    @property
    def total(self) -> int | None:
        """Number of records in the whole stream; None if it never ends."""
        return None if self.num_epochs is None else self.num_records * self.num_epochs

    def config(self) -> dict[str, JsonValue]:
        """The part of the fingerprint that describes the order, as JSON."""
        return {"algorithm": ALGORITHM, "version": VERSION, "shuffle": self.shuffle, "seed": self.seed}

    def ids_at(self, positions: RecordIds) -> tuple[RecordIds, RecordIds]:
        """Returns record ids and epochs at the given positions, in the same order.

        Args:
          positions: int64[n] below ``total`` and 2**62, in any order; consecutive positions are cheapest.

        Returns:
          ``record_ids`` int64[n] and ``epochs`` int64[n].

        Raises:
          IndexError: a position is outside the stream.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size == 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        low, high = check_positions(positions, self.total)
        # The common case, a batch within one epoch, needs no division per position.
        epoch = low // self.num_records
        if high // self.num_records == epoch:
            offsets = positions - epoch * self.num_records
            return self._epoch_ids(epoch, offsets, low - epoch * self.num_records, high - epoch * self.num_records), (
                _repeated(epoch, positions.size)
            )
        epochs = positions // self.num_records
        offsets = positions - epochs * self.num_records
        if self._block_records == 0:
            return offsets, epochs
        if self._block_records is None and self.num_records <= TABLE_RECORDS:
            return self._tiny_ids(offsets, epochs), epochs
        record_ids = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            record_ids[here] = self.ids_in_epoch(epoch, offsets[here])
        return record_ids, epochs

    def ids_between(self, start: int, stop: int) -> tuple[RecordIds, RecordIds]:
        """Returns :meth:`ids_at` for positions ``[start, stop)``, faster.

        Raises:
          IndexError: a position is outside the stream.
        """
        epoch, offset = divmod(start, self.num_records)
        count = stop - start
        chunk_index, first = divmod(offset, TABLE_RECORDS)
        in_one_epoch = (
            start >= 0 < count <= self.num_records - offset
            and (self.total is None or stop <= self.total)
            and stop <= MAX_POSITION
        )
        if in_one_epoch and self._block_records == 0:
            return np.arange(offset, offset + count, dtype=np.int64), _repeated(epoch, count)
        if in_one_epoch and self._block_records is None and count <= TABLE_RECORDS - first:
            ids = _chunk(self, epoch, chunk_index)[first : first + count]
            return ids.copy(), _repeated(epoch, count)  # the caller may write to ids; the chunk is cached
        return self.ids_at(np.arange(start, stop, dtype=np.int64))

    def _epoch_ids(self, epoch: int, offsets: RecordIds, low: int, high: int) -> RecordIds:
        """Ids at offsets within one epoch; consecutive small batches share one cached chunk."""
        if self._block_records == 0:
            return offsets
        first, last = low // TABLE_RECORDS, high // TABLE_RECORDS
        if last - first > 1 or high - low >= TABLE_RECORDS:
            return self.ids_in_epoch(epoch, offsets)
        chunk = _chunk(self, epoch, first)
        if last > first:
            chunk = np.concatenate([chunk, _chunk(self, epoch, last)])
        return chunk[offsets - first * TABLE_RECORDS]

    def ids_in_epoch(self, epoch: int, offsets: RecordIds) -> RecordIds:
        """Returns the record ids at offsets within one epoch, int64 ``[n]``, without using the cache."""
        if self._block_records is None:
            return permute(offsets, self.num_records, self._epoch_key(epoch))
        return permute_blocks(offsets, self.num_records, self._block_records, self.seed, epoch)

    def _epoch_key(self, epoch: int) -> int:
        return derive_key(self.seed, EPOCH, self.num_records, epoch)

    def _tiny_ids(self, offsets: RecordIds, epochs: RecordIds) -> RecordIds:
        """Ids over many epochs of a table-sized source; sorts the tables of a group of epochs together."""
        unique, which = np.unique(epochs, return_inverse=True)
        keys = np.array([self._epoch_key(epoch) for epoch in unique.tolist()], np.uint64)
        return permute_each(offsets, which, self.num_records, keys)


def _repeated(epoch: int, count: int) -> RecordIds:
    epochs = np.empty(count, np.int64)  # np.full takes four times as long for a small batch
    epochs.fill(epoch)
    return epochs


@functools.lru_cache(maxsize=256)  # at most 8 MiB; each component of a mixture needs one or two
def _chunk(order: EpochOrder, epoch: int, chunk_index: int) -> RecordIds:
    """Ids of one aligned chunk of an epoch; cached because a small batch takes as long as a whole chunk."""
    start = chunk_index * TABLE_RECORDS
    offsets = np.arange(start, min(start + TABLE_RECORDS, order.num_records), dtype=np.int64)
    record_ids = order.ids_in_epoch(epoch, offsets)
    record_ids.flags.writeable = False  # shared by all callers through the cache
    return record_ids


def _check_order(num_records: int, shuffle: bool | int, seed: int, num_epochs: int | None) -> None:
    if not _is_int(num_records) or num_records > MAX_POSITION:
        raise SettingsError(f"num_records must be an int from 1 to 2**62, not {num_records!r}.", setting="num_records")
    if num_records < 1:
        raise SourceError(f"the source has {num_records} records; an order needs at least one.")
    if not isinstance(shuffle, (bool, np.bool_)) and not (_is_int(shuffle) and shuffle >= 0):
        raise SettingsError(
            f"shuffle={shuffle!r}: pass False, True, or the number of records per block (an int >= 1).",
            setting="shuffle",
        )
    if not _is_int(seed) or not 0 <= seed < 1 << 64:
        raise SettingsError(f"seed={seed!r}: pass an int from 0 to 2**64 - 1.", setting="seed")
    if num_epochs is not None and not (_is_int(num_epochs) and num_epochs >= 1):
        raise SettingsError(
            f"num_epochs={num_epochs!r}: pass an int >= 1, or None to repeat forever.", setting="num_epochs"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
