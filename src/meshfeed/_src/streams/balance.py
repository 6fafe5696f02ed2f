"""Orders the rows of a global batch so that the parts of the mesh get about equal work.

The rows are split into halves of equal size and nearly equal cost, the halves again, and so on. The batch is therefore
balanced when cut into any power of two of equal parts, on any number of devices. The order depends on the costs alone,
so a batch has the same rows in the same order on any mesh.

Each split pairs rows of similar cost and puts one row of each pair in each half, choosing which so that the differences
of the pairs cancel, largest first (balanced number partitioning; Coffman, Frederickson and Lueker, 1984).

If shards of the sequence axis divide each row, with unequal work for each, a row costs one number per shard, and the halves
should be equal in all of them: a device has some rows and one shard of each.

Every host computes the order, so it must not depend on the processor: sums of costs per shard are of integers, which are
exact, and floating-point numbers are only added one by one.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.settings import Balance
from meshfeed._src.base.types import RandomAccessSource, RecordIds
from meshfeed._src.reading.identity import kind_of
from meshfeed._src.reading.records import checked_lengths

_POWERS = {"attention": 2, "tokens": 1}
_SWAPS = 3  # swaps at the end of a split; each usually halves the remaining difference of a small group, or better
_SHARD_SWAPS = 8  # those if shards divide the rows; each brings the halves closer, in fewer groups each time
_MAX_SWAPPED = 32  # the largest half that is swapped, since every pair is tried; larger halves balance without swaps
_CHOSEN = 32  # how many of the largest and of the smallest differences of a split are placed one by one


class RowBalance:
    """Orders the rows of a batch by the lengths of their segments, without reading records.

    Args:
      source: a source with ``row_lengths`` or ``lengths`` (:mod:`meshfeed._src.base.hooks`).
      balance: "attention", "tokens", or a function of the segment lengths of one row, int64[segments].

    Raises:
      SettingsError: the source has neither method.
    """

    def __init__(self, source: RandomAccessSource, balance: Balance) -> None:
        self._of_rows = hooks.find(source, hooks.RowLengths)
        self._of_records = hooks.find(source, hooks.KnowsLengths)
        self._of_shards = hooks.find(source, hooks.SequenceShards) if balance == "attention" else None
        self._balance = balance
        self._source = source
        if self._of_rows is None and self._of_records is None:
            raise SettingsError(
                f"balance={balance!r} needs the lengths of the records, which a source of kind {kind_of(source)!r} does not "
                "provide. Use Packed, or define lengths() -> int[records] on the source.",
                setting="balance",
            )

    def rows(self, record_ids: RecordIds) -> RecordIds:
        """Returns the index into ``record_ids`` of each row's record, int64[n]."""
        if self._of_shards is not None:
            return balanced_rows(self._of_shards.shard_costs(record_ids))
        try:
            costs = self._costs(record_ids)
        except StopIteration as error:  # which would end the feed
            raise SourceError(
                f"balance={self._balance!r}: computing the costs of records raised StopIteration, which does not end the "
                "data. Raise a different exception in the function, or in the source's lengths()."
            ) from error
        return balanced_rows(costs)

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        assert self._of_records is not None
        # Once: a view makes them from those of its source.
        return checked_lengths(self._source, self._of_records.lengths())

    def _costs(self, record_ids: RecordIds) -> np.ndarray:
        if self._of_rows is not None:
            lengths, splits = self._of_rows.row_lengths(record_ids)
        else:
            assert self._of_records is not None
            lengths, splits = self._lengths[record_ids], np.arange(len(record_ids) + 1)
        if isinstance(self._balance, str):
            before = np.concatenate([[0.0], np.cumsum(lengths.astype(np.float64) ** _POWERS[self._balance])])
            return np.diff(before[splits])
        # In narrower integers, as sources store them, the function could overflow.
        return np.array([self._cost(part) for part in np.split(lengths.astype(np.int64), splits[1:-1])])

    def _cost(self, lengths: np.ndarray) -> float:
        assert not isinstance(self._balance, str)
        returned = self._balance(lengths)
        try:
            cost = float(returned)
        except (TypeError, ValueError):
            cost = math.nan
        if not 0 <= cost < math.inf:
            raise SettingsError(
                f"balance={self._balance!r} returned {returned!r} for the segment lengths {lengths.tolist()}; it takes a "
                "function that returns one finite number of at least 0.",
                setting="balance",
            )
        return cost


def balanced_rows(costs: np.ndarray) -> RecordIds:
    """Returns, for each row of the balanced batch, its row in the given batch; int64[rows].

    Args:
      costs: numbers [rows], at least 0; or int64[rows, shards].
    """
    halve = _halve if costs.ndim == 1 else _halve_in_shards
    groups = np.arange(len(costs))[None, :]
    while groups.shape[1] > 1 and groups.shape[1] % 2 == 0:
        groups = halve(groups, costs)
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


# ---------------------------------------------------------------------- several shards divide each row


def _halve_in_shards(groups: RecordIds, of_row: np.ndarray) -> RecordIds:
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
    for _ in range(_SHARD_SWAPS if halves.shape[2] <= _MAX_SWAPPED else 0):
        if not _swap_in_shards(halves, of_row):
            break
    return halves.reshape(2 * len(groups), -1)


def _swap_in_shards(halves: RecordIds, of_row: np.ndarray) -> bool:
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
