"""An order that follows the files: each host reads few shards at a time, and each shard is needed once per epoch.

A uniform order reads from every shard all the time. A window over the whole stream would not help: all rows of a batch
would come from the same few shards, and every host would need them all. Here the rows of each batch are divided into
lanes, and each lane reads its own shards:

* Cell ``c = t * num_lanes + lane`` of the stream is record number t of the lane. Epoch e consists of the cells
  ``[e * num_records, (e + 1) * num_records)``, so epochs follow one another without a gap even if ``num_lanes`` does not
  divide the number of records. A lane has as many records in an epoch as it has cells there.
* In each epoch the shards are permuted, laid end to end, and cut into one part per lane. A shard at a cut belongs to two
  lanes, or to more if it is longer than a part.
* A lane reads its part in windows of a few shards, or pieces of shards, and the records of a window in a keyed uniform
  permutation.
* With affinity, the line and its parts are the same in every epoch, and the pieces of each part are permuted instead.

The record of a cell depends on (shard lengths, ``num_lanes``, seed, cell) alone. The cell of a row also depends on the
batch size, but ``num_lanes`` divides every batch size, so every batch ends with all lanes at the same t. The order
therefore continues exactly with any batch size, and its state is one position. Memory is O(shards) per epoch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from meshfeed._src.base.settings import ShardShuffle
from meshfeed._src.base.types import JsonValue, RecordIds
from meshfeed._src.order.caching import Caching, cached
from meshfeed._src.order.epochs import checked_positions
from meshfeed._src.order.permutation import derive_key, permute, sorted_permutation

ALGORITHM = "shard-windows"
VERSION = 1

_SHARDS, _WINDOW, _PIECES = 6, 7, 8  # purpose of a derived key; disjoint from those of epochs.py
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


def shards_config(shuffle: ShardShuffle, seed: int, num_lanes: int) -> dict[str, JsonValue]:
    """Returns the part of the fingerprint that all orders by shards share."""
    settings = dataclasses.asdict(shuffle)
    usual = dataclasses.asdict(ShardShuffle())  # left out, as in states saved before there were other values
    return {
        "algorithm": ALGORITHM,
        "version": VERSION,
        "shuffle": "shards",
        **{name: value for name, value in settings.items() if value != usual[name]},
        "seed": seed,
        "num_lanes": num_lanes,
    }


def with_usual(fingerprint: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns a fingerprint with the settings that :func:`shards_config` leaves out, for messages that compare two."""
    usual = dataclasses.asdict(ShardShuffle()) if fingerprint.get("shuffle") == "shards" else {}
    return fingerprint | {name: value for name, value in usual.items() if name not in fingerprint}


class LaneCells:
    """Which cell each row of a stream holds: each lane feeds fixed rows of every batch.

    Args:
      num_lanes: number of lanes.
      total: number of records of the stream, or None if it never ends.
      segments: first position and batch size of each run of steps; ``num_lanes`` divides every size.
    """

    def __init__(self, num_lanes: int, total: int | None, segments: Sequence[tuple[int, int]]) -> None:
        self._num_lanes, self._total = num_lanes, total
        self._segment_starts, self._segment_sizes = np.array(segments, np.int64).T

    def at(self, positions: RecordIds) -> RecordIds:
        """Returns the cells at positions, int64[n].

        Raises:
          IndexError: a position is outside the stream.
        """
        positions = checked_positions(positions, self._total)
        if self._num_lanes == 1:
            return positions
        segment = np.searchsorted(self._segment_starts, positions, side="right") - 1
        sizes = self._segment_sizes[segment]
        rows = (positions - self._segment_starts[segment]) % sizes
        starts = positions - rows
        lanes, offsets = np.divmod(rows, sizes // self._num_lanes)
        cells = starts + offsets * self._num_lanes + lanes
        if self._total is not None:
            # A partial last batch cannot be divided into lanes; it takes the remaining cells in order.
            cells = np.where(starts + sizes > self._total, positions, cells)
        return cells


def num_in_lane(num_records: int, lane: int, num_lanes: int) -> int:
    """Returns how many of the first ``num_records`` cells a lane has."""
    return -((lane - num_records) // num_lanes)


class ShardOrder(Caching):
    """The order ``shuffle="shards"`` of a source over files.

    Args:
      lengths: records of each shard, int64[num_shards], in the order of their record ids. Their sum is at least 1.
      shuffle: shards in a window, and whether lanes keep their shards.
      num_lanes: number of lanes; divides every batch size.
      seed: 0 to 2**64 - 1.
      num_epochs: number of epochs, at least 1, or None to repeat forever.
      segments: first position and batch size of each run of steps.
      shuffles_windows: whether the records of a window are permuted.
      line: parts of the key of the permutation of shards, from the seed on, to share it between orders over the same
        shards; by default it follows from ``seed`` and the number of records.

    Attributes:
      shards: digest of ``lengths``, on which every record of the order depends.
    """

    def __init__(
        self,
        lengths: RecordIds,
        *,
        shuffle: ShardShuffle = ShardShuffle(),  # noqa: B008 (a frozen value)
        num_lanes: int,
        seed: int,
        num_epochs: int | None,
        segments: Sequence[tuple[int, int]],
        shuffles_windows: bool = True,
        line: tuple[int, ...] = (),
    ) -> None:
        self._lengths, self._shuffle, self._shuffles_windows = lengths, shuffle, shuffles_windows
        self._shard_ids = np.cumsum(self._lengths) - self._lengths
        self.num_records = int(self._lengths.sum())
        self.num_lanes, self._seed = num_lanes, seed
        self.total = None if num_epochs is None else self.num_records * num_epochs
        self._cells = LaneCells(num_lanes, self.total, segments)
        self._line = line or (seed, _SHARDS, self.num_records)
        self.shards = hashlib.sha256(self._lengths.astype("<i8").tobytes()).hexdigest()[:16]
        self._make_caches()

    def _make_caches(self) -> None:
        self._layout = cached(self._lay_out, 2)  # a batch may touch two epochs
        self._chunk = cached(self._compute_chunk, 512)  # at most 16 MiB; each lane reads in a chunk of its own

    def config(self) -> dict[str, JsonValue]:
        """The part of the fingerprint that describes the order, as JSON."""
        return shards_config(self._shuffle, self._seed, self.num_lanes) | {"shards": self.shards}

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
        return self.ids_of(self._cells.at(positions))

    def ids_of(self, cells: RecordIds) -> tuple[RecordIds, RecordIds]:
        """Returns record ids and epochs of cells, int64 ``[n]`` each, in any order."""
        epochs = cells // self.num_records
        if cells.size and bool((epochs == epochs[0]).all()):  # as in nearly every batch
            return self._epoch_ids(int(epochs[0]), cells), epochs
        record_ids = np.empty_like(cells)
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            record_ids[here] = self._epoch_ids(epoch, cells[here])
        return record_ids, epochs

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
        # With affinity, the line is that of every epoch; the cuts move by less than one record per lane between epochs.
        dealt = derive_key(*self._line, 0 if self._shuffle.affinity else epoch)
        shards = sorted_permutation(dealt, self._lengths.size)
        shard_starts = np.cumsum(self._lengths[shards]) - self._lengths[shards]
        piece_starts = np.unique(np.concatenate([shard_starts, lane_starts]))
        piece_starts = piece_starts[piece_starts < self.num_records]
        shard = (
            np.searchsorted(shard_starts, piece_starts, side="right") - 1
        )  # the last to start there; others are empty
        piece_ids = self._shard_ids[shards[shard]] + piece_starts - shard_starts[shard]
        lane = np.searchsorted(lane_starts, piece_starts, side="right") - 1
        if self._shuffle.affinity:
            lengths = np.diff(piece_starts, append=self.num_records)
            mixed = np.argsort(sorted_permutation(derive_key(self._seed, _PIECES, epoch), piece_starts.size))
            within = np.lexsort((mixed, lane))  # the pieces of each lane, in an order of this epoch
            piece_ids, lengths = piece_ids[within], lengths[within]
            piece_starts = np.cumsum(lengths) - lengths
        rank = np.arange(piece_starts.size) - np.searchsorted(lane, lane)
        window_starts = np.append(piece_starts[rank % self._shuffle.window_shards == 0], self.num_records)
        return _EpochLayout(first_cell, lane_starts, piece_starts, piece_ids, window_starts)

    def _compute_chunk(self, epoch: int, window: int, chunk: int) -> RecordIds:
        layout = self._layout(epoch)
        start, stop = int(layout.window_starts[window]), int(layout.window_starts[window + 1])
        offsets = np.arange(chunk << _CHUNK_BITS, min((chunk + 1) << _CHUNK_BITS, stop - start), dtype=np.int64)
        if self._shuffles_windows:
            offsets = permute(offsets, stop - start, derive_key(self._seed, _WINDOW, self.num_records, epoch, window))
        at = start + offsets
        piece = np.searchsorted(layout.piece_starts, at, side="right") - 1
        return layout.piece_ids[piece] + at - layout.piece_starts[piece]
