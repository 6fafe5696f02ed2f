"""Computes record ids and epochs from positions in the stream.

The order of an epoch is a keyed permutation of ``[0, num_records)`` that is computed, not stored. Any batch of
positions takes O(batch) time and memory at any stream length, so resuming at position 9e11 is as fast as starting.

The permutation is a Feistel network over a rectangle of ``m`` rows and ``2**k`` columns with ``n <= m * 2**k < n +
2**k`` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Because the rectangle exceeds n by less
than one row, cycle walking affects about one id in ``sqrt(n)``, even just above a power of two. The round function is
the upper half of ``(a * x + b)**2 mod 2**64``. Without the square (multiply-add-shift), even six rounds fail tests for
correlations between neighbors; with it, five rounds pass and six are used. Up to 4,096 records, the permutation is
instead the argsort of keyed 64-bit hashes: every permutation of a tiny epoch is reachable and equally likely.

The order does not use ``np.random`` and is therefore equal in all numpy versions. :data:`VERSION` is part of each saved
state and is incremented whenever any output changes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.types import JsonValue, RecordIds

ALGORITHM = "feistel-square"
VERSION = 2

_Uint64Array = np.ndarray[Any, np.dtype[np.uint64]]
_Network = tuple[int, int, tuple[_Uint64Array, ...]]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ODD = 0xD1342543DE82EF95
_ROUND_PAIRS = 3
_TABLE_RECORDS = 4096  # the largest epoch that is argsorted; also the size of a cached chunk
_SLICE = 16384  # ids per pass; keeps the four work arrays in the L2 cache
MAX_POSITION = 1 << 62

# Purpose of a derived key; makes the keys of one (seed, epoch) unrelated.
_EPOCH, _BLOCKS, _WITHIN, _SHORT_BLOCK, _REPLACEMENT = 1, 2, 3, 4, 5


def mix64(value: int) -> int:
    """A bijection of 64-bit integers in which every input bit affects every output bit.

    One step of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_key(seed: int, *parts: int) -> int:
    """Derives a 64-bit key from ``seed`` and ``parts``; keys that differ only in the last part are distinct."""
    key = mix64(seed)
    for part in parts:
        key = mix64((key * _ODD & _MASK) ^ mix64(part & _MASK))  # the product makes the order of the parts matter
    return key


def _u64(value: int) -> _Uint64Array:
    # As an operand, a 0-d array takes half the ufunc overhead of a numpy scalar or a 1-element array.
    return np.array(value, dtype=np.uint64)


_S32, _S27, _S30, _S31 = _u64(32), _u64(27), _u64(30), _u64(31)
_C0, _C1, _C2 = _u64(_GOLDEN), _u64(0xBF58476D1CE4E5B9), _u64(0x94D049BB133111EB)


def mix64_array(values: _Uint64Array) -> _Uint64Array:
    """Applies :func:`mix64` to each element of uint64[...]."""
    x = values + _C0
    x ^= x >> _S30
    x *= _C1
    x ^= x >> _S27
    x *= _C2
    x ^= x >> _S31
    return x


def hash_table(key: int, count: int) -> _Uint64Array:
    """Returns ``count`` keyed 64-bit hashes, uint64[count]. They are distinct, so sorting them has no ties."""
    return mix64_array(mix64_array(np.arange(count, dtype=np.uint64)) ^ _u64(key))


def sorted_permutation(key: int, count: int) -> RecordIds:
    """Returns a keyed permutation of [0, count) as a table, int64[count]: exactly uniform, O(count)."""
    return np.argsort(hash_table(key, count))


@functools.lru_cache(maxsize=128)
def _network(num_records: int, key: int) -> _Network:
    """Returns log2 of the columns, the rows, and the round constants (multiplier, offset, multiplier, …)."""
    bits = (num_records - 1).bit_length()
    column_bits = max(bits // 2, bits - 24)  # at most 2**24 rows, which 32 hash bits select with negligible bias
    rows = (num_records + (1 << column_bits) - 1) >> column_bits
    constants: list[_Uint64Array] = []
    for index in range(4 * _ROUND_PAIRS):
        constant = mix64(key ^ mix64(index))
        constants.append(_u64(constant if index % 2 else constant | 1))  # an odd multiplier is a bijection mod 2**64
    return column_bits, rows, tuple(constants)


def _permute_slice(x: _Uint64Array, num_records: int, network: _Network) -> _Uint64Array:
    column_bits, rows, constants = network
    shift, modulus, hash_shift = _u64(column_bits), _u64(rows), _u64(64 - column_bits)
    row = np.right_shift(x, shift)
    column = np.bitwise_and(x, _u64((1 << column_bits) - 1))
    work = np.empty_like(row)
    for index in range(0, len(constants), 4):
        # row += F(column) mod rows. A sum below the modulus wraps in the unsigned subtraction; the minimum undoes that.
        np.multiply(column, constants[index], work)
        np.add(work, constants[index + 1], work)
        np.multiply(work, work, work)
        np.right_shift(work, _S32, work)
        np.multiply(work, modulus, work)
        np.right_shift(work, _S32, work)
        np.add(row, work, row)
        np.subtract(row, modulus, work)
        np.minimum(row, work, out=row)
        # column ^= F(row)
        np.multiply(row, constants[index + 2], work)
        np.add(work, constants[index + 3], work)
        np.multiply(work, work, work)
        np.right_shift(work, hash_shift, work)
        np.bitwise_xor(column, work, column)
    np.left_shift(row, shift, row)
    np.bitwise_or(row, column, row)
    if int(row.max()) >= num_records:  # cycle walking: permute ids outside the domain again
        outside = np.flatnonzero(row >= _u64(num_records))
        row[outside] = _permute_slice(row[outside], num_records, network)
    return row


def permute(offsets: np.ndarray[Any, Any], num_records: int, key: int) -> RecordIds:
    """Applies the keyed permutation of ``[0, num_records)`` to ``offsets``.

    Args:
      offsets: integers [n], each in ``[0, num_records)``.
      num_records: size of the domain, from 1 to 2**62.
      key: 64-bit key; unrelated keys give unrelated permutations.

    Returns:
      int64[n].
    """
    offsets = np.ascontiguousarray(offsets)
    if num_records <= _TABLE_RECORDS:
        return sorted_permutation(key, num_records)[offsets.astype(np.int64, copy=False)]
    x = offsets.view(np.uint64) if offsets.dtype == np.int64 else offsets.astype(np.uint64)
    network = _network(num_records, key)
    if x.size <= _SLICE:
        return _permute_slice(x, num_records, network).view(np.int64) if x.size else np.empty(0, np.int64)
    out = np.empty(x.shape, np.uint64)
    for start in range(0, x.size, _SLICE):
        out[start : start + _SLICE] = _permute_slice(x[start : start + _SLICE], num_records, network)
    return out.view(np.int64)


def check_positions(positions: np.ndarray[Any, Any], total: int | None) -> tuple[int, int]:
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
    shuffle: bool | int = dataclasses.field(default=False, compare=False)
    seed: int = 0
    num_epochs: int | None = 1
    # 0: sequential; None: uniform; otherwise records per block. Compared instead of ``shuffle``, because True == 1.
    _block_records: int | None = dataclasses.field(init=False, repr=False)

    def __init__(self, num_records: int, *, shuffle: bool | int = False, seed: int = 0, num_epochs: int | None = 1):
        _check_order(num_records, shuffle, seed, num_epochs)
        uniform = isinstance(shuffle, (bool, np.bool_)) and bool(shuffle)
        block = None if uniform or (shuffle and num_records <= shuffle) else int(shuffle)
        for name, value in (
            ("num_records", int(num_records)),
            ("shuffle", bool(shuffle) if isinstance(shuffle, (bool, np.bool_)) else int(shuffle)),
            ("seed", int(seed)),
            ("num_epochs", None if num_epochs is None else int(num_epochs)),
            ("_block_records", block),
        ):
            object.__setattr__(self, name, value)

    @property
    def total(self) -> int | None:
        """Number of records in the whole stream; None if it never ends."""
        return None if self.num_epochs is None else self.num_records * self.num_epochs

    def config(self) -> dict[str, JsonValue]:
        """The part of the fingerprint that describes the order, as JSON."""
        return {"algorithm": ALGORITHM, "version": VERSION, "shuffle": self.shuffle, "seed": self.seed}

    def ids_at(self, positions: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[RecordIds, RecordIds]:
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
        if self._block_records is None and self.num_records <= _TABLE_RECORDS:
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
        chunk_index, first = divmod(offset, _TABLE_RECORDS)
        in_one_epoch = (
            start >= 0 < count <= self.num_records - offset
            and (self.total is None or stop <= self.total)
            and stop <= MAX_POSITION
        )
        if in_one_epoch and self._block_records == 0:
            return np.arange(offset, offset + count, dtype=np.int64), _repeated(epoch, count)
        if in_one_epoch and self._block_records is None and count <= _TABLE_RECORDS - first:
            ids = _chunk(self, epoch, chunk_index)[first : first + count]
            return ids.copy(), _repeated(epoch, count)  # the caller may write to ids; the chunk is cached
        return self.ids_at(np.arange(start, stop, dtype=np.int64))

    def _epoch_ids(self, epoch: int, offsets: RecordIds, low: int, high: int) -> RecordIds:
        """Ids at offsets within one epoch; consecutive small batches share one cached chunk."""
        if self._block_records == 0:
            return offsets
        first, last = low // _TABLE_RECORDS, high // _TABLE_RECORDS
        if last - first > 1 or high - low >= _TABLE_RECORDS:
            return self.ids_in_epoch(epoch, offsets)
        chunk = _chunk(self, epoch, first)
        if last > first:
            chunk = np.concatenate([chunk, _chunk(self, epoch, last)])
        return chunk[offsets - first * _TABLE_RECORDS]

    def ids_in_epoch(self, epoch: int, offsets: RecordIds) -> RecordIds:
        """Returns the record ids at offsets within one epoch, int64 ``[n]``, without using the cache."""
        if self._block_records is None:
            return permute(offsets, self.num_records, self._epoch_key(epoch))
        return _blocked_ids(offsets, self.num_records, self._block_records, self.seed, epoch)

    def _epoch_key(self, epoch: int) -> int:
        return derive_key(self.seed, _EPOCH, self.num_records, epoch)

    def _tiny_ids(self, offsets: RecordIds, epochs: RecordIds) -> RecordIds:
        """Ids over many epochs of a table-sized source; sorts the tables of a group of epochs together."""
        unique, which = np.unique(epochs, return_inverse=True)
        keys = np.array([self._epoch_key(epoch) for epoch in unique.tolist()], np.uint64)
        return _permute_each(offsets, which, self.num_records, keys)


def _repeated(epoch: int, count: int) -> RecordIds:
    epochs = np.empty(count, np.int64)  # np.full takes four times as long for a small batch
    epochs.fill(epoch)
    return epochs


@functools.lru_cache(maxsize=256)  # at most 8 MiB; enough for the components of a mixture
def _chunk(order: EpochOrder, epoch: int, chunk_index: int) -> RecordIds:
    """Ids of one aligned chunk of an epoch; cached because a small batch takes as long as a whole chunk."""
    start = chunk_index * _TABLE_RECORDS
    offsets = np.arange(start, min(start + _TABLE_RECORDS, order.num_records), dtype=np.int64)
    record_ids = order.ids_in_epoch(epoch, offsets)
    record_ids.flags.writeable = False  # shared by all callers through the cache
    return record_ids


def _blocked_ids(offsets: RecordIds, num_records: int, block_records: int, seed: int, epoch: int) -> RecordIds:
    """Blocked shuffle: permutes the blocks over the slots of the epoch, and the records within each block.

    The last block may lack ``missing`` records. A separate key chooses its slot; every slot then begins at
    ``slot * block_records``, less ``missing`` for slots after the short one. Offsets therefore map to slots by
    arithmetic.
    """
    num_blocks = -(-num_records // block_records)
    missing = num_blocks * block_records - num_records
    short_slot = derive_key(seed, _SHORT_BLOCK, num_records, epoch) % num_blocks if missing else num_blocks
    short_end = (short_slot + 1) * block_records - missing
    slots, within = np.divmod(offsets + (offsets >= short_end) * missing, block_records)
    touched, which = np.unique(slots, return_inverse=True)

    key = derive_key(seed, _BLOCKS, num_records, epoch)
    if missing:
        blocks = permute(np.minimum(touched - (touched > short_slot), num_blocks - 2), num_blocks - 1, key)
        blocks = np.where(touched == short_slot, num_blocks - 1, blocks)
    else:
        blocks = permute(touched, num_blocks, key)

    base = derive_key(seed, _WITHIN, num_records, epoch)
    keys = mix64_array(_u64(base * _ODD & _MASK) ^ mix64_array(touched.astype(np.uint64)))
    moved = _permute_each(within, which, block_records, keys)
    if missing and (here := np.flatnonzero(slots == short_slot)).size:
        moved[here] = permute(within[here], block_records - missing, int(keys[which[here[0]]]))
    return blocks[which] * block_records + moved


def _permute_each(x: RecordIds, which: RecordIds, count: int, keys: _Uint64Array) -> RecordIds:
    """Returns ``permute(x[i], count, keys[which[i]])`` for each i; sorts many small tables together."""
    if count == 1:
        return np.zeros_like(x)
    out = np.empty_like(x)
    # Groups bound the work arrays to about 64 Ki elements.
    group = max(1, 65536 // count) if count <= _TABLE_RECORDS else 1
    hashes = mix64_array(np.arange(count, dtype=np.uint64)) if count <= _TABLE_RECORDS else None
    for start in range(0, keys.size, group):
        here = slice(None) if keys.size <= group else np.flatnonzero((which >= start) & (which < start + group))
        if hashes is None:
            out[here] = permute(x[here], count, int(keys[start]))
        else:
            tables = np.argsort(mix64_array(hashes[None, :] ^ keys[start : start + group, None]), axis=1)
            out[here] = tables[which[here] - start, x[here]]
    return out


def replacement_id(seed: int, epoch: int, record_id: int, attempt: int, num_records: int) -> int:
    """Returns the replacement of a bad record, from a keyed walk over all other records.

    Attempts 1, 2, …, ``num_records - 1`` return every other record once, in an order keyed by (seed, epoch, record id);
    the walk then repeats. It therefore finds a readable record if there is one. Never returns ``record_id`` itself
    unless it is the only record.

    Args:
      seed: the feed's seed.
      epoch: epoch of the bad record.
      record_id: the bad record.
      attempt: 1 for the first replacement.
      num_records: records of the source.
    """
    if num_records <= 1:
        return record_id
    step = permute(
        np.array([(attempt - 1) % (num_records - 1)], np.int64),
        num_records - 1,
        derive_key(seed, _REPLACEMENT, epoch, record_id),
    )
    return (record_id + 1 + int(step[0])) % num_records


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
    if not _is_int(seed) or not 0 <= seed <= _MASK:
        raise SettingsError(f"seed={seed!r}: pass an int from 0 to 2**64 - 1.", setting="seed")
    if num_epochs is not None and not (_is_int(num_epochs) and num_epochs >= 1):
        raise SettingsError(
            f"num_epochs={num_epochs!r}: pass an int >= 1, or None to repeat forever.", setting="num_epochs"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
