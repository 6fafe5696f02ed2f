"""Orders the rows of a global batch so that the parts of the mesh get about equal work."""

from __future__ import annotations

import math

import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.settings import Balance
from meshfeed._src.base.types import RandomAccessSource, RecordIds
from meshfeed._src.order.balance import balanced_rows
from meshfeed._src.reading.identity import kind_of

_POWERS = {"attention": 2, "tokens": 1}


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
        self._balance = balance
        if self._of_rows is None and self._of_records is None:
            raise SettingsError(
                f"balance={balance!r} needs the lengths of the records, which a source of kind {kind_of(source)!r} does not "
                "provide. Use Packed, or define lengths() -> int[records] on the source.",
                setting="balance",
            )

    def rows(self, record_ids: RecordIds) -> RecordIds:
        """Returns the index into ``record_ids`` of each row's record, int64[n]."""
        return balanced_rows(self._costs(record_ids))

    def _costs(self, record_ids: RecordIds) -> np.ndarray:
        if self._of_rows is not None:
            lengths, splits = self._of_rows.row_lengths(record_ids)
        else:
            assert self._of_records is not None
            lengths, splits = self._of_records.lengths()[record_ids], np.arange(len(record_ids) + 1)
        if isinstance(self._balance, str):
            before = np.concatenate([[0.0], np.cumsum(lengths.astype(np.float64) ** _POWERS[self._balance])])
            return np.diff(before[splits])
        return np.array([self._cost(part) for part in np.split(lengths, splits[1:-1])])

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
