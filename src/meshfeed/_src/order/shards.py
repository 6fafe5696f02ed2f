"""An order that follows the files: each host reads few shards at a time, and each shard is needed once per epoch.

A uniform order reads from every shard all the time. A window over the whole stream would not help: all rows of a batch
would come from the same few shards, and every host would need them all. Here the rows of each batch are divided into
lanes, and each lane reads its own shards:

* Cell ``c = t * num_lanes + lane`` of the stream is record number t of the lane. Epoch e consists of the cells
  ``[e * num_records, (e + 1) * num_records)``, so epochs follow one another without a gap even if ``num_lanes`` does not
  divide the number of records. A lane has as many records in an epoch as it has cells there.
* In each epoch the shards are permuted, laid end to end, and cut into one part per lane. A shard at a cut belongs to two
  lanes, or to more if it is longer than a part.
* A lane reads its part in windows of two shards, or pieces of shards, and the records of a window in a keyed uniform
  permutation.

The record of a cell depends on (shard lengths, ``num_lanes``, seed, cell) alone. The cell of a row also depends on the
batch size, but ``num_lanes`` divides every batch size, so every batch ends with all lanes at the same t. The order
therefore continues exactly with any batch size, and its state is one position. Memory is O(shards) per epoch.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from meshfeed._src.base.types import JsonValue, RecordIds
from meshfeed._src.order.caching import cached
from meshfeed._src.order.epochs import checked_positions
from meshfeed._src.order.permutation import derive_key, permute, sorted_permutation
from meshfeed._src.order.steps import StepSchedule

ALGORITHM = "shard-windows"
VERSION = 1

_SHARDS, _WINDOW = 6, 7  # purpose of a derived key; disjoint from those of epochs.py
_OPEN_SHARDS = 2  # per lane
_CHUNK_BITS = 12  # ids are computed in chunks of 4,096: a few ids take a third as long


@dataclasses.dataclass(frozen=True)
class _EpochLayout:
    """One epoch: the permuted shards end to end ("the line"), cut into lanes, pieces and windows. int64 arrays.

    Attributes:
      first_cell: [lanes], the number t of each lane's first record in the epoch.
      lane_starts: [lanes], the offset on the line of each lane's part.
      piece_starts: [pieces], the offset on the line of each piece.
      piece_ids: [pieces], the record id of each piece's first record.
      window_starts: [windows + 1], the offset on the line of each window, and the length of the line.
    """

    first_cell: RecordIds
    lane_starts: RecordIds
    piece_starts: RecordIds
    piece_ids: RecordIds
    window_starts: RecordIds


class ShardOrder:
    """The order ``shuffle="shards"`` of a source over files.

    Args:
      lengths: records of each shard, int64[num_shards], in the order of their record ids. Their sum is at least 1.
      num_lanes: number of lanes; divides every batch size of ``step_schedule``.
      seed: 0 to 2**64 - 1.
      num_epochs: number of epochs, at least 1, or None to repeat forever.
      step_schedule: position and size of each batch.
    """

    def __init__(
        self, lengths: RecordIds, *, num_lanes: int, seed: int, num_epochs: int | None, step_schedule: StepSchedule
    ) -> None:
        self._lengths = lengths
        self._shard_ids = np.cumsum(self._lengths) - self._lengths
        self.num_records = int(self._lengths.sum())
        self.total = None if num_epochs is None else self.num_records * num_epochs
        self.num_lanes, self._seed = num_lanes, seed
        self._shards = hashlib.sha256(self._lengths.astype("<i8").tobytes()).hexdigest()[:16]
        segments = [(s.first_position, s.size) for s in step_schedule.segments]
        self._segment_starts, self._segment_sizes = np.array(segments, np.int64).T
        self._layout = cached(self._lay_out, 2)  # a batch may touch two epochs
        self._chunk = cached(self._compute_chunk, 512)  # at most 16 MiB; each lane reads in a chunk of its own

    def config(self) -> JsonValue:
        """The part of the fingerprint that describes the order, as JSON."""
        return {
            "algorithm": ALGORITHM,
            "version": VERSION,
            "shuffle": "shards",
            "seed": self._seed,
            "num_lanes": self.num_lanes,
            "shards": self._shards,
        }

    def ids_between(self, start: int, stop: int) -> tuple[RecordIds, RecordIds]:
        """Returns :meth:`ids_at` for positions ``[start, stop)``."""
        return self.ids_at(np.arange(start, stop, dtype=np.int64))

    def ids_at(self, positions: RecordIds) -> tuple[RecordIds, RecordIds]:
        """Returns record ids and epochs at the given positions.

        Args:
          positions: int64[n] below ``total``, in any order.

        Returns:
          ``record_ids`` int64[n] and ``epochs`` int64[n].

        Raises:
          IndexError: a position is outside the stream.
        """
        positions = checked_positions(positions, self.total)
        cells = self._cells_at(positions)
        epochs = cells // self.num_records
        record_ids = np.empty_like(cells)
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            record_ids[here] = self._epoch_ids(epoch, cells[here])
        return record_ids, epochs

    def _cells_at(self, positions: RecordIds) -> RecordIds:
        segment = np.searchsorted(self._segment_starts, positions, side="right") - 1
        sizes = self._segment_sizes[segment]
        rows = (positions - self._segment_starts[segment]) % sizes
        starts = positions - rows
        lanes, offsets = np.divmod(rows, sizes // self.num_lanes)
        cells = starts + offsets * self.num_lanes + lanes
        if self.total is None:
            return cells
        # A partial last batch cannot be divided into lanes; it takes the remaining cells in order.
        return np.where(starts + sizes > self.total, positions, cells)

    def _epoch_ids(self, epoch: int, cells: RecordIds) -> RecordIds:
        layout = self._layout(epoch)
        numbers, lanes = np.divmod(cells, self.num_lanes)
        at = layout.lane_starts[lanes] + numbers - layout.first_cell[lanes]
        windows = np.searchsorted(layout.window_starts, at, side="right") - 1
        within = at - layout.window_starts[windows]
        chunks = within >> _CHUNK_BITS
        record_ids = np.empty_like(cells)
        ends = np.flatnonzero((np.diff(windows) != 0) | (np.diff(chunks) != 0)) + 1
        for first, stop in zip([0, *ends.tolist()], [*ends.tolist(), cells.size], strict=True):
            chunk = self._chunk(epoch, int(windows[first]), int(chunks[first]))
            record_ids[first:stop] = chunk[within[first:stop] & ((1 << _CHUNK_BITS) - 1)]
        return record_ids

    def _first_cells(self, epoch: int) -> RecordIds:
        """The number t of each lane's first record in an epoch."""
        return -((np.arange(self.num_lanes, dtype=np.int64) - epoch * self.num_records) // self.num_lanes)

    def _lay_out(self, epoch: int) -> _EpochLayout:
        first_cell = self._first_cells(epoch)
        lane_starts = np.cumsum(self._first_cells(epoch + 1) - first_cell)
        lane_starts = np.concatenate([[0], lane_starts[:-1]])
        shards = sorted_permutation(derive_key(self._seed, _SHARDS, self.num_records, epoch), self._lengths.size)
        shard_starts = np.cumsum(self._lengths[shards]) - self._lengths[shards]
        piece_starts = np.unique(np.concatenate([shard_starts, lane_starts]))
        piece_starts = piece_starts[piece_starts < self.num_records]
        shard = (
            np.searchsorted(shard_starts, piece_starts, side="right") - 1
        )  # the last to start there; others are empty
        piece_ids = self._shard_ids[shards[shard]] + piece_starts - shard_starts[shard]
        lane = np.searchsorted(lane_starts, piece_starts, side="right") - 1
        rank = np.arange(piece_starts.size) - np.searchsorted(lane, lane)
        window_starts = np.append(piece_starts[rank % _OPEN_SHARDS == 0], self.num_records)
        return _EpochLayout(first_cell, lane_starts, piece_starts, piece_ids, window_starts)

    def _compute_chunk(self, epoch: int, window: int, chunk: int) -> RecordIds:
        layout = self._layout(epoch)
        start, stop = int(layout.window_starts[window]), int(layout.window_starts[window + 1])
        offsets = np.arange(chunk << _CHUNK_BITS, min((chunk + 1) << _CHUNK_BITS, stop - start), dtype=np.int64)
        key = derive_key(self._seed, _WINDOW, self.num_records, epoch, window)
        at = start + permute(offsets, stop - start, key)
        piece = np.searchsorted(layout.piece_starts, at, side="right") - 1
        return layout.piece_ids[piece] + at - layout.piece_starts[piece]
