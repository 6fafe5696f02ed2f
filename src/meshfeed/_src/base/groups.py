"""The positions of equal values."""

from __future__ import annotations

import itertools

import numpy as np

from meshfeed._src.base.types import RecordIds


def group_by(values: RecordIds) -> list[tuple[int, RecordIds]]:
    """Returns each distinct value, ascending, with the ascending indices at which it occurs."""
    if values.size and bool((values == values[0]).all()):  # as often; sorting takes four times as long
        return [(int(values[0]), np.arange(values.size))]
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    cuts = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), values.size]
    return [(int(ordered[a]), order[a:b]) for a, b in itertools.pairwise(cuts) if a < b]
