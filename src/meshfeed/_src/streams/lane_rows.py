"""Which rows of lanes are a host's rows of a batch, and their arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from meshfeed._src.base import trees
from meshfeed._src.base.types import PyTree
from meshfeed._src.reading.host_batch import spec_of_batch
from meshfeed._src.reading.stacking import RecordSpec
from meshfeed._src.reading.structure import check_spec
from meshfeed._src.streams.lane import Taken


@dataclasses.dataclass(frozen=True)
class LaneRun:
    """A run of rows that are consecutive both in one lane and in the host's batch.

    Attributes:
      lane_index: index of the lane.
      target: first row in the host's batch.
      offset: first row in the lane's rows for this batch.
      count: number of rows, at least 1.
    """

    lane_index: int
    target: int
    offset: int
    count: int


_RowPiece = tuple[int, int, int, list[np.ndarray]]
"""First row of the output, first row and number of rows of the leaves, and the leaves."""


def lane_runs(rows: np.ndarray, rows_per_lane: int) -> tuple[LaneRun, ...]:
    """Splits a host's rows into runs. The result depends only on the batch size and can be cached.

    Args:
      rows: this host's rows of the global batch, int64, ascending.
      rows_per_lane: rows of the global batch per lane.
    """
    if not len(rows):
        return ()
    new_run = (np.diff(rows) != 1) | (rows[1:] // rows_per_lane != rows[:-1] // rows_per_lane)
    starts = np.concatenate(([0], np.flatnonzero(new_run) + 1))
    counts = np.diff(np.append(starts, len(rows)))
    lanes, offsets = np.divmod(rows[starts], rows_per_lane)
    columns = (lanes, starts, offsets, counts)
    return tuple(LaneRun(*values) for values in zip(*(column.tolist() for column in columns), strict=True))


def place_rows(
    lanes: Mapping[int, Taken], runs: Sequence[LaneRun], num_rows: int, spec: RecordSpec | None
) -> tuple[PyTree | None, np.ndarray, RecordSpec | None]:
    """Arranges rows of lanes as this host's part of a batch.

    Args:
      lanes: lane → rows taken; must include the lanes of ``runs``.
      runs: see :func:`lane_runs`.
      num_rows: rows of this host.
      spec: required structure of the records, if known.

    Returns:
      A tuple of the tree ``[num_rows, ...]``, with zeros in rows that no lane filled (None if none did and ``spec`` is
      None); a bool array ``[num_rows]``, True for real rows; and the structure of the records.

    Raises:
      SourceError: records of different lanes differ in structure.
    """
    pieces: list[_RowPiece] = []
    real = np.zeros(num_rows, bool)
    checked: dict[int, list[np.ndarray]] = {}
    for run in runs:
        taken = lanes[run.lane_index]
        if taken.tree is None:
            continue
        leaves = checked.get(run.lane_index)
        if leaves is None:
            if spec is None or not spec.fits(taken.tree, taken.count):
                found = spec_of_batch(taken.tree, taken.count, what=f"lane {run.lane_index}")
                spec = spec or found
                check_spec(spec, found, what=f"lane {run.lane_index}", lane_index=run.lane_index)
            leaves = checked[run.lane_index] = [np.asarray(leaf) for leaf in trees.leaves(taken.tree)]
        count = min(run.count, taken.count - run.offset)
        if count <= 0:
            continue
        real[run.target : run.target + count] = True
        pieces.append((run.target, run.offset, count, leaves))
    if spec is None:
        return None, real, None
    return _join_pieces(pieces, num_rows, spec), real, spec


def _join_pieces(pieces: Sequence[_RowPiece], num_rows: int, spec: RecordSpec) -> PyTree:
    if len(pieces) == 1 and pieces[0][2] == num_rows:
        _, offset, count, leaves = pieces[0]
        return spec.treedef.unflatten([leaf[offset : offset + count] for leaf in leaves])
    filled = sum(count for _, _, count, _ in pieces) == num_rows
    output = spec.empty(num_rows) if filled else spec.zeros(num_rows)
    outputs = trees.leaves(output)
    for target, offset, count, leaves in pieces:
        for leaf, source_leaf in zip(outputs, leaves, strict=True):
            leaf[target : target + count] = source_leaf[offset : offset + count]
    return output


def needed_lanes(rows: Sequence[int] | np.ndarray, rows_per_lane: int) -> list[int]:
    """Returns the lanes that feed ``rows``, ascending."""
    return np.unique(np.asarray(rows, np.int64) // rows_per_lane).tolist()
