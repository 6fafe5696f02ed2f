"""Orders the rows of a global batch so that equal parts of it cost about the same.

The rows are split into halves of equal size and nearly equal cost, the halves again, and so on. The batch is therefore
balanced when cut into any power of two of equal parts, on any number of devices. The order depends on the costs alone,
so a batch has the same rows in the same order on any mesh.

Each split pairs rows of similar cost and puts one row of each pair in each half, choosing which so that the differences
of the pairs cancel, largest first (balanced number partitioning; Coffman, Frederickson and Lueker, 1984).
"""

from __future__ import annotations

import numpy as np

from meshfeed._src.base.types import RecordIds

_SWAPS = 3  # swaps at the end of a split; each usually halves the remaining difference of a small group, or better
_MAX_SWAPPED = 32  # the largest half that is swapped, since every pair is tried; larger halves balance without swaps
_CHOSEN = 32  # how many of the largest and of the smallest differences of a split are placed one by one


def balanced_rows(costs: np.ndarray) -> RecordIds:
    """Returns, for each row of the balanced batch, its row in the given batch; int64[rows].

    Args:
      costs: numbers [rows], at least 0.
    """
    groups = np.arange(len(costs))[None, :]
    while groups.shape[1] > 1 and groups.shape[1] % 2 == 0:
        groups = _halve(groups, costs)
    return groups.reshape(-1)


def _halve(groups: RecordIds, of_row: np.ndarray) -> RecordIds:
    """Splits each group of rows, int64[groups, rows], into two of half the size, next to each other."""
    costs = of_row[groups]
    order = np.argsort(-costs, axis=1, kind="stable")
    groups = np.take_along_axis(groups, order, 1).reshape(len(groups), -1, 2)
    pairs = np.take_along_axis(costs, order, 1).reshape(groups.shape)
    differences = pairs[:, :, 0] - pairs[:, :, 1]
    by_size = np.argsort(-differences, axis=1, kind="stable")
    swapped = _signs(np.take_along_axis(differences, by_size, 1)) < 0
    groups = np.take_along_axis(groups, by_size[:, :, None], 1)
    groups = np.where(swapped[:, :, None], groups[:, :, ::-1], groups)
    groups = groups.transpose(0, 2, 1)
    for _ in range(_SWAPS if groups.shape[2] <= _MAX_SWAPPED else 0):
        groups = _swap(groups, of_row[groups])
    return groups.reshape(2 * len(groups), -1)


def _signs(differences: np.ndarray) -> np.ndarray:
    """Returns 1 or -1 for each difference, chosen to make the signed sum of each group small.

    Args:
      differences: [groups, n], descending, at least 0.
    """
    number = differences.shape[1]
    signs = np.ones_like(differences)
    signs[:, 1::2] = -1
    middle = slice(_CHOSEN, max(_CHOSEN, number - _CHOSEN))
    totals = (signs[:, middle] * differences[:, middle]).sum(axis=1)
    chosen = [i for i in range(number) if not middle.start <= i < middle.stop]
    for i in chosen:
        signs[:, i] = np.where(totals > 0, -1.0, 1.0)
        totals += signs[:, i] * differences[:, i]
    return signs


def _swap(groups: RecordIds, costs: np.ndarray) -> RecordIds:
    """Swaps the pair of rows between the halves of each group that balances them best, if any does.

    Args:
      groups: int64[groups, 2, rows].
      costs: costs of these rows, same shape.
    """
    more = costs.sum(axis=2)
    gap = (more[:, 0] - more[:, 1])[:, None, None]
    after = np.abs(gap - 2 * (costs[:, 0, :, None] - costs[:, 1, None, :])).reshape(len(groups), -1)
    best = after.argmin(axis=1)
    rows = np.flatnonzero(after[np.arange(len(groups)), best] < np.abs(gap[:, 0, 0]))
    left, right = np.divmod(best[rows], groups.shape[2])
    groups = groups.copy()
    groups[rows, 0, left], groups[rows, 1, right] = groups[rows, 1, right], groups[rows, 0, left]
    return groups
