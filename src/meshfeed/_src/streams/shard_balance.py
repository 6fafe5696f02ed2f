"""Orders the rows of a global batch if several shards divide each row, with unequal work for each.

As in ``balance.py``, the rows are split into halves, the halves again, and so on. A row costs one number per shard of the
sequence axis, and the halves should be equal in all of them: a device has some rows and one shard of each.

Every host computes the order, so it must not depend on the processor: sums are of integers, which are exact, and
floating-point numbers are only added one by one.
"""

from __future__ import annotations

import numpy as np

from meshfeed._src.base.types import RecordIds

_SWAPS = 8  # at the end of a split; each brings the halves closer, in fewer groups each time
_MAX_SWAPPED = 32  # the largest half that is swapped, since every pair is tried


def balanced_rows_of_shards(costs: np.ndarray) -> RecordIds:
    """Returns, for each row of the balanced batch, its row in the given batch; int64[rows].

    Args:
      costs: int64[rows, shards], at least 0.
    """
    groups = np.arange(len(costs))[None, :]
    while groups.shape[1] > 1 and groups.shape[1] % 2 == 0:
        groups = _halve(groups, costs)
    return groups.reshape(-1)


def _halve(groups: RecordIds, of_row: np.ndarray) -> RecordIds:
    """Splits each group of rows, int64[groups, rows], into two of half the size, next to each other."""
    order = np.argsort(-of_row.sum(1)[groups], axis=1, kind="stable")
    pairs = np.take_along_axis(groups, order, 1).reshape(len(groups), -1, 2)
    differences = of_row[pairs[:, :, 0]] - of_row[pairs[:, :, 1]]
    by_size = np.argsort(-_product(differences, differences), axis=1, kind="stable")
    pairs = np.take_along_axis(pairs, by_size[:, :, None], 1)
    differences = np.take_along_axis(differences, by_size[:, :, None], 1)
    gap = np.zeros_like(differences[:, 0])
    for i in range(differences.shape[1]):  # the largest first, so the smaller ones can make up for it
        swapped = _product(gap, differences[:, i]) > 0
        gap += np.where(swapped[:, None], -differences[:, i], differences[:, i])
        pairs[swapped, i] = pairs[swapped, i, ::-1]
    halves = pairs.transpose(0, 2, 1).copy()
    for _ in range(_SWAPS if halves.shape[2] <= _MAX_SWAPPED else 0):
        if not _swap(halves, of_row):
            break
    return halves.reshape(2 * len(groups), -1)


def _swap(halves: RecordIds, of_row: np.ndarray) -> bool:
    """Swaps the two rows of each group that bring its halves closest, int64[groups, 2, rows]; whether any did."""
    costs = of_row[halves]
    gap = costs[:, 0].sum(1) - costs[:, 1].sum(1)
    after = gap[:, None, None] - 2 * (costs[:, 0, :, None] - costs[:, 1, None, :])
    sizes = _product(after, after).reshape(len(halves), -1)
    best = sizes.argmin(axis=1)
    groups = np.flatnonzero(sizes[np.arange(len(halves)), best] < _product(gap, gap))
    left, right = np.divmod(best[groups], halves.shape[2])
    halves[groups, 0, left], halves[groups, 1, right] = halves[groups, 1, right], halves[groups, 0, left]
    return len(groups) > 0


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of products over the last dimension, added in order."""
    found = a[..., 0].astype(np.float64) * b[..., 0]
    for shard in range(1, a.shape[-1]):
        found = found + a[..., shard].astype(np.float64) * b[..., shard]
    return found
