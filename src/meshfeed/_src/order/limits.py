"""Packs pieces of documents into sequences that have several limits: tokens, segments, entries of other leaves.

Best fit from the longest to the shortest leaves short pieces for last, which then fill sequences by their number instead of
their tokens. So each limit is a dimension of what is packed, and of several packings the one with the fewest sequences is
used:

* First fit from the largest to the smallest, which pads least if only the tokens limit.
* First fit in an order that does not depend on sizes, which mixes short and long pieces in every sequence.
* If pieces may be cut: fill each sequence with a share of the pieces that have the fewest tokens for the rest of what they
  take, and then with those that have the most, the last of which is cut.

All of them take the pieces in an order of their sizes alone, so the number of sequences does not depend on the order of the
documents, and documents of equal size are interchangeable.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import numpy as np

from meshfeed._src.order.permutation import derive_key, sorted_permutation

try:
    from meshfeed._src.order import _limits as extension  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType] # built from C
except ImportError as error:  # installed without a C compiler, or built for another system
    logging.getLogger("meshfeed").debug("documents are packed within limits by Python code, which is slower: %s", error)
    extension: Any = None

VERSION = 1
_MIXED = derive_key(0, 114)
_MAX_VISITS = 1024  # nodes looked at per item, about 20 as a rule; keeps unusual sizes from taking quadratic time
_CLOSE = 256  # a packing is not compared with others if it has at most 1/256 more sequences than are needed


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one sequence.

    Attributes:
      length: tokens, a multiple of ``align``.
      align: each piece begins at a multiple of this.
      before: tokens before each piece.
      slots: most pieces.
      most: most entries of each other leaf.
    """

    length: int
    align: int
    before: int
    slots: int
    most: tuple[int, ...]

    def units(self, lengths: np.ndarray) -> np.ndarray:
        """Returns what pieces of these lengths take, in multiples of ``align``."""
        return -(-(lengths + self.before) // self.align)


class InBins(NamedTuple):
    """Pieces of items in sequences, in the order of the items: int64[pieces] each, and the number of sequences."""

    items: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    bins: np.ndarray
    number: int


def pack(lengths: np.ndarray, sizes: np.ndarray, limits: Limits, *, cuts: bool) -> InBins:
    """Packs items within limits.

    Args:
      lengths: int64[n], the tokens of each item, from 1 to ``limits.length - limits.before``.
      sizes: int64[n, len(limits.most)], its entries of each other leaf, each within its limit.
      limits: of a sequence.
      cuts: whether an item may be cut in two; its entries stay with the first part.
    """
    units = limits.units(lengths)
    vectors = np.column_stack([units, np.ones_like(units), sizes])
    capacity = np.array([limits.length // limits.align, limits.slots, *limits.most], np.int64)
    needed = int((-(-vectors.sum(0) // capacity)).max())
    close = needed + needed // _CLOSE
    found = _filled(lengths, sizes, limits) if cuts else None
    if found is not None and found.number <= close:
        return found
    share = (vectors / capacity).max(1)
    order = np.lexsort((*-vectors.T[::-1], -share))  # equal vectors stay in order
    for mixed in (False, True):
        if found is not None and found.number <= close:
            break
        if mixed:
            order = order[sorted_permutation(_MIXED, len(order))]
        bins, number = first_fit(vectors[order], capacity)
        if found is None or number < found.number:
            of_items, items = np.empty_like(bins), np.arange(len(order))
            of_items[order] = bins
            found = InBins(items, np.zeros_like(items), lengths, of_items, number)
    assert found is not None
    return found


def _filled(lengths: np.ndarray, sizes: np.ndarray, limits: Limits) -> InBins:
    most = np.array(limits.most, np.float64)
    taken = np.maximum((sizes / most).max(1, initial=0), 1 / limits.slots)
    order = np.lexsort((*sizes.T, lengths, lengths / taken))
    items, starts, ends, bins = fill(lengths[order], sizes[order], limits)
    items = order[items]
    by_item = np.lexsort((starts, items))
    items, starts, ends, bins = (values[by_item] for values in (items, starts, ends, bins))
    return InBins(items, starts, ends - starts, bins, int(bins.max()) + 1)


def first_fit(sizes: np.ndarray, capacity: np.ndarray) -> tuple[np.ndarray, int]:
    """Puts each item into the first bin that has room for it in every dimension.

    An item for which a search would take too long goes to a new bin.

    Args:
      sizes: integers [n, d] from 0 to ``capacity``, in this order.
      capacity: integers [d], of every bin.

    Returns:
      The bin of each item, int64[n], and the number of bins.
    """
    if extension is None:
        return _first_fit_in_python(sizes.tolist(), capacity.tolist())
    bins = np.empty(len(sizes), np.int32)
    number = extension.first_fit(np.ascontiguousarray(sizes, np.int32), capacity.astype(np.int32), bins)
    return bins.astype(np.int64), number


def _first_fit_in_python(sizes: list[list[int]], capacity: list[int]) -> tuple[np.ndarray, int]:
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    # A complete binary tree over the bins: a node has, for each dimension, the most room of the bins below it.
    tree = [list(capacity) for _ in range(2 * leaves)]
    least = [min(column) for column in zip(*sizes, strict=True)]
    bins, number = np.empty(len(sizes), np.int64), 0
    for i, size in enumerate(sizes):
        node, visits = 1, 1
        while node < leaves or not _fits(tree[node], size):
            if _fits(tree[node], size):
                node *= 2
            else:
                while node & 1:
                    node >>= 1
                node += 1
            visits += 1
            if visits > _MAX_VISITS:
                node = leaves + number
                break
        bins[i] = node - leaves
        number = max(number, node - leaves + 1)
        room = [left - taken for left, taken in zip(tree[node], size, strict=True)]
        tree[node] = room if _fits(room, least) else [-1] * len(room)  # no item fits
        while node := node >> 1:
            most = list(map(max, tree[2 * node], tree[2 * node + 1]))
            if most == tree[node]:
                break
            tree[node] = most
    return bins, number


def _fits(room: list[int], size: list[int]) -> bool:
    return all(left >= taken for left, taken in zip(room, size, strict=True))


def fill(
    lengths: np.ndarray, sizes: np.ndarray, limits: Limits
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Fills one sequence after the other from both ends of a list of items; cuts what does not fit at its end.

    A sequence gets the end of the item that was cut, its share of the items at the low end, and then items from the high
    end. Entries of an item belong to its first piece.

    Args:
      lengths: integers [n], from the fewest tokens for what else the item takes to the most.
      sizes: integers [n, k].
      limits: of a sequence.

    Returns:
      Item, first token, end and sequence of each piece, int64[pieces] each, in the order of the sequences.
    """
    if extension is None:
        return _fill_in_python(lengths.tolist(), sizes.tolist(), limits)
    pieces = np.empty((4, 2 * len(lengths)), np.int32)
    number = extension.fill(
        np.ascontiguousarray(lengths, np.int32),
        np.ascontiguousarray(sizes, np.int32),
        np.array(limits.most, np.int32),
        *(limits.length, limits.align, limits.before, limits.slots, pieces),
    )
    items, starts, ends, bins = pieces[:, :number].astype(np.int64)
    return items, starts, ends, bins


def _fill_in_python(
    lengths: list[int], sizes: list[list[int]], limits: Limits
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    def taken(length: int) -> int:
        return -(-(length + limits.before) // limits.align) * limits.align

    def fits(room: list[int], item: int, other: int | None = None) -> bool:
        more = [0] * len(room) if other is None else sizes[other]
        return all(left >= a + b for left, a, b in zip(room, sizes[item], more, strict=True))

    tokens = sum(map(taken, lengths))
    rest: list[int] = [sum(column) for column in zip(*sizes, strict=True)]
    low, high, cut, bin_ = 0, len(lengths) - 1, None, 0
    pieces: list[tuple[int, int, int, int]] = []
    while low <= high or cut:
        left, slots, room = limits.length, limits.slots, list(limits.most)
        items = high - low + 1 + (cut is not None)
        ways: list[tuple[int, int]] = [(tokens, limits.length), (items, slots), *zip(rest, room, strict=True)]
        lows: int = -(-items // max(-(-number // most) for number, most in ways)) - 1
        while True:
            start = 0
            if cut:
                (item, start), cut = cut, None
            elif slots == 0 or left <= limits.before or low > high:
                break
            elif lows > 0 and slots > 1 and low < high and fits(room, low, high) and taken(lengths[low]) <= left:
                item, low, lows = low, low + 1, lows - 1
            elif fits(room, high):
                item, high = high, high - 1
            elif low < high and fits(room, low):
                item, low = low, low + 1
            else:
                break
            placed = min(lengths[item] - start, left - limits.before)
            pieces.append((item, start, start + placed, bin_))
            slots, left, tokens = slots - 1, left - taken(placed), tokens - taken(placed)
            if start == 0:
                room = [number - size for number, size in zip(room, sizes[item], strict=True)]
                rest = [number - size for number, size in zip(rest, sizes[item], strict=True)]
            if start + placed < lengths[item]:
                cut = item, start + placed
                break
        tokens, bin_ = max(tokens, 1), bin_ + 1  # a cut may add tokens before a piece, and a gap
    items, starts, ends, bins = np.array(pieces, np.int64).reshape(-1, 4).T
    return items, starts, ends, bins
