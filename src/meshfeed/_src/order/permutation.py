"""Keyed permutations of ``[0, num_records)`` that are computed, not stored: O(n) time and memory for n ids of any domain.

A permutation is a Feistel network over a rectangle of ``m`` rows and ``2**k`` columns with ``n <= m * 2**k < n +
2**k`` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Because the rectangle exceeds n by less
than one row, cycle walking affects about one id in ``sqrt(n)``, even just above a power of two. The round function is
the upper half of ``(a * x + b)**2 mod 2**64``. Without the square (multiply-add-shift), even six rounds fail tests for
correlations between neighbors; with it, five rounds pass and six are used. Up to 4,096 records, the permutation is
instead the argsort of keyed 64-bit hashes: every permutation of a tiny epoch is reachable and equally likely.

Nothing here uses ``np.random``; results are therefore equal in all numpy versions. :data:`VERSION` is part of each saved
state and is incremented whenever any output changes.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import numpy as np

from meshfeed._src.base.types import RecordIds

try:
    from meshfeed._src.order import _permutation as extension  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType] # built from C
except ImportError as error:  # installed without a C compiler, or built for another system
    logging.getLogger("meshfeed").debug("record ids are permuted by numpy, which is slower: %s", error)
    extension: Any = None

ALGORITHM = "feistel-square"
VERSION = 2

_Uint64Array = np.ndarray[Any, np.dtype[np.uint64]]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # the increment of splitmix64, 2**64 divided by the golden ratio
_ODD = 0xD1342543DE82EF95  # a good 64-bit multiplier (Steele and Vigna, 2021); must be odd, to lose no bit
_ROUND_PAIRS = 3
TABLE_RECORDS = 4096  # the largest domain that is argsorted, which at this size takes as long as the network
_SLICE = 16384  # ids per pass; keeps the four work arrays in the L2 cache

# Purpose of a derived key; makes the keys of one (seed, epoch) unrelated.
EPOCH, _BLOCKS, _WITHIN, _SHORT_BLOCK, _REPLACEMENT = 1, 2, 3, 4, 5


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


def sorted_permutation(key: int, count: int) -> RecordIds:
    """Returns a keyed permutation of [0, count) as a table, int64[count]: exactly uniform, O(count).

    It is the argsort of keyed 64-bit hashes, which are distinct, so there are no ties.
    """
    return np.argsort(mix64_array(mix64_array(np.arange(count, dtype=np.uint64)) ^ _u64(key)))


class _Network(NamedTuple):
    """The rectangle, and uint64 ``[4 * _ROUND_PAIRS]``: multiplier and offset of each round."""

    column_bits: int
    rows: int
    constants: _Uint64Array


@functools.lru_cache(maxsize=128)  # each component of a mixture has its own key
def _network(num_records: int, key: int) -> _Network:
    bits = (num_records - 1).bit_length()
    column_bits = max(bits // 2, bits - 24)  # at most 2**24 rows, which 32 hash bits select with negligible bias
    rows = (num_records + (1 << column_bits) - 1) >> column_bits
    constants = np.array([mix64(key ^ mix64(index)) for index in range(4 * _ROUND_PAIRS)], np.uint64)
    constants[::2] |= np.uint64(1)  # an odd multiplier is a bijection mod 2**64
    return _Network(column_bits, rows, constants)


def _permute_slice(x: _Uint64Array, num_records: int, network: _Network) -> _Uint64Array:
    column_bits, rows = network.column_bits, network.rows
    constants = [network.constants[index, ...] for index in range(4 * _ROUND_PAIRS)]  # 0-d arrays; see _u64
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
        np.multiply(work, modulus, work)  # cannot overflow: below 2**32 times at most 2**24
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
    if num_records <= TABLE_RECORDS:
        return sorted_permutation(key, num_records)[offsets.astype(np.int64, copy=False)]
    network = _network(num_records, key)
    if extension is not None:
        ids = offsets.astype(np.int64)
        extension.permute(ids, num_records, *network)
        return ids
    x = offsets.view(np.uint64) if offsets.dtype == np.int64 else offsets.astype(np.uint64)
    if x.size <= _SLICE:
        return _permute_slice(x, num_records, network).view(np.int64) if x.size else np.empty(0, np.int64)
    out = np.empty(x.shape, np.uint64)
    for start in range(0, x.size, _SLICE):
        out[start : start + _SLICE] = _permute_slice(x[start : start + _SLICE], num_records, network)
    return out.view(np.int64)


def permute_blocks(offsets: RecordIds, num_records: int, block_records: int, seed: int, epoch: int) -> RecordIds:
    """Permutes the blocks of ``block_records`` ids over the slots of the epoch, and the ids within each block.

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
        # The minimum keeps the short slot within the domain if it is the last; its block is set below.
        blocks = permute(np.minimum(touched - (touched > short_slot), num_blocks - 2), num_blocks - 1, key)
        blocks = np.where(touched == short_slot, num_blocks - 1, blocks)
    else:
        blocks = permute(touched, num_blocks, key)

    base = derive_key(seed, _WITHIN, num_records, epoch)
    keys = mix64_array(_u64(base * _ODD & _MASK) ^ mix64_array(touched.astype(np.uint64)))
    moved = permute_each(within, which, block_records, keys)
    if missing and (here := np.flatnonzero(slots == short_slot)).size:
        moved[here] = permute(within[here], block_records - missing, int(keys[which[here[0]]]))
    return blocks[which] * block_records + moved


def permute_each(x: RecordIds, which: RecordIds, count: int, keys: _Uint64Array) -> RecordIds:
    """Returns ``permute(x[i], count, keys[which[i]])`` for each i; sorts many small tables together."""
    if count == 1:
        return np.zeros_like(x)
    out = np.empty_like(x)
    # Groups bound the work arrays to about 64 Ki elements.
    group = max(1, 65536 // count) if count <= TABLE_RECORDS else 1
    hashes = mix64_array(np.arange(count, dtype=np.uint64)) if count <= TABLE_RECORDS else None
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
