"""Cutting a list of files into lanes: by files, then row groups, then row ranges.

Lane i of L reads files i, i + L, i + 2L, … as long as whole rounds of L files are left. The files that remain, fewer
than L, are cut further, so that lanes stay even:

* where rows can be counted without reading them (Parquet, Arrow, TFRecord shards of TFDS), by row groups of the full
  size, i, i + L, …, and the row groups that remain by row ranges, the same number of rows for each lane;
* where they cannot (CSV, JSON, text), by taking turns: the rows of each remaining file are dealt out in rounds of L,
  and a lane keeps some places of each round. A lane reads at most two such files, and each is read by L / r lanes or
  one more (r files remain).

The cut is arithmetic on the order of the files: the same on every host, and known before anything is read.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of one file that one lane reads, in order.

    Attributes:
      file_index: which file.
      start: first row.
      stop: row after the last one; None for the end of the file.
      round_size: rows are dealt out in rounds of so many, 1 where they are not dealt out.
      first_place: first place of each round that is kept.
      stop_place: place after the last one that is kept.
    """

    file_index: int
    start: int = 0
    stop: int | None = None
    round_size: int = 1
    first_place: int = 0
    stop_place: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether every row of the file is read."""
        return self.start == 0 and self.stop is None and self.round_size == 1

    def file_row(self, piece_row: int) -> int:
        """Row of the file that is row ``piece_row`` of this piece."""
        if self.round_size == 1:
            return self.start + piece_row
        rounds, place = divmod(piece_row, self.stop_place - self.first_place)
        return self.start + rounds * self.round_size + self.first_place + place


@dataclasses.dataclass(frozen=True)
class FileCut:
    """What one lane reads.

    Attributes:
      pieces: in the order of reading.
      unit: the finest unit that files were cut by for any lane: ``files``, ``row_groups``, ``rows`` or ``turns``.
      left: indices of the files that were cut further, because they were fewer than lanes.
      times_read: how often these are read, over all lanes: 1.0 where no file (or row group) is read by two lanes.
    """

    pieces: tuple[Piece, ...]
    unit: str
    left: tuple[int, ...] = ()
    times_read: float = 1.0


def cut_files(
    files: Sequence[Piece],
    lane_index: int,
    num_lanes: int,
    group_rows: Callable[[int], Sequence[int] | None],
) -> FileCut:
    """What lane ``lane_index`` of ``num_lanes`` reads of ``files``.

    Args:
      files: the files, or ranges of them, in an order that is the same on every host. Ranges only of files whose rows
        can be counted.
      lane_index: 0 … num_lanes - 1.
      num_lanes: number of lanes.
      group_rows: file index → rows of each of its row groups, or None where they cannot be counted. Asked only for the
        files that are left after whole rounds, fewer than ``num_lanes``.

    Returns:
      The lane's pieces. Over all lanes they cover each row of each file once.
    """
    whole = len(files) // num_lanes * num_lanes
    pieces = list(files[lane_index:whole:num_lanes])
    left = files[whole:]
    if not left:
        return FileCut(tuple(pieces), "files")
    counts = [group_rows(file.file_index) for file in left]
    if any(rows is None for rows in counts):
        indices = tuple(file.file_index for file in left)
        turns, times_read = _deal(indices, lane_index, num_lanes)
        return FileCut((*pieces, *turns), "turns", indices, times_read)
    groups = [group for file, rows in zip(left, counts, strict=True) for group in _groups(file, rows or ())]
    # Files end in a short group: only groups of the full size are dealt out whole, or lanes would be uneven.
    largest = max(map(_size, groups), default=0)
    full = [group for group in groups if _size(group) == largest]
    dealt = full[: len(full) // num_lanes * num_lanes]
    taken = set(dealt)
    rest = [group for group in groups if group not in taken]
    ranges, rows_read = _ranges(rest, lane_index, num_lanes)
    ranges = sorted([*dealt[lane_index::num_lanes], *ranges], key=lambda piece: (piece.file_index, piece.start))
    rows = sum(_size(group) for group in groups)
    times_read = (rows - sum(_size(group) for group in rest) + rows_read) / max(rows, 1)
    indices = tuple(file.file_index for file in left)
    return FileCut(tuple(_join([*pieces, *ranges])), "rows" if rest else "row_groups", indices, times_read)


def keep_rows(
    num_files: int, first_row: int, stop_row: int | None, group_rows: Callable[[int], Sequence[int] | None]
) -> list[Piece] | None:
    """The files, and ranges of files, that hold rows ``[first_row, stop_row)`` of all files in order.

    Args:
      num_files: how many files there are.
      first_row: first row, counted through all files.
      stop_row: row after the last one, or None for the end.
      group_rows: as in :func:`cut_files`; asked as far as the rows have to be counted.

    Returns:
      None where the rows of a file cannot be counted.
    """
    kept: list[Piece] = []
    offset = 0
    for index in range(num_files):
        if stop_row is None and offset >= first_row:
            kept.append(Piece(index))
            continue
        if stop_row is not None and offset >= stop_row:
            break
        rows = group_rows(index)
        if rows is None:
            return None
        size = sum(rows)
        low = max(first_row - offset, 0)
        high = size if stop_row is None else min(stop_row - offset, size)
        if low < high:
            kept.append(Piece(index, low, high) if (low, high) != (0, size) else Piece(index))
        offset += size
    return kept


def _groups(file: Piece, rows: Sequence[int]) -> list[Piece]:
    """The row groups of a file, as far as they lie in its range."""
    groups, offset = [], 0
    for count in rows:
        low = max(offset, file.start)
        high = offset + count if file.stop is None else min(offset + count, file.stop)
        if low < high:
            groups.append(Piece(file.file_index, low, high))
        offset += count
    return groups


def _ranges(groups: Sequence[Piece], lane_index: int, num_lanes: int) -> tuple[list[Piece], int]:
    """The lane's equal share of the rows of ``groups``, and the rows that all lanes read, whole groups each."""
    total = sum(_size(group) for group in groups)
    bounds = [total * lane // num_lanes for lane in range(num_lanes + 1)]
    mine, rows_read, offset = [], 0, 0
    for group in groups:
        size = _size(group)
        first = bisect.bisect_right(bounds, offset) - 1
        last = bisect.bisect_left(bounds, offset + size) - 1
        rows_read += size * sum(bounds[lane] < bounds[lane + 1] for lane in range(first, last + 1))
        low = max(bounds[lane_index], offset) - offset
        high = min(bounds[lane_index + 1], offset + size) - offset
        if low < high:
            mine.append(Piece(group.file_index, group.start + low, group.start + high))
        offset += size
    return mine, rows_read


def _deal(files: Sequence[int], lane_index: int, num_lanes: int) -> tuple[list[Piece], float]:
    """The lane's places where each of ``files`` is dealt out in rounds of ``num_lanes`` rows.

    All files together have ``len(files) * num_lanes`` places, of which each lane takes ``len(files)`` in a row: so
    every lane gets the same share and reads two files at most.
    """
    mine: list[Piece] = []
    reads = 0
    for lane in range(num_lanes):
        first, stop = lane * len(files), (lane + 1) * len(files)
        for number in range(first // num_lanes, -(-stop // num_lanes)):
            reads += 1
            if lane == lane_index:
                low = max(first - number * num_lanes, 0)
                high = min(stop - number * num_lanes, num_lanes)
                mine.append(Piece(files[number], 0, None, num_lanes, low, high))
    return mine, reads / len(files)


def _size(piece: Piece) -> int:
    assert piece.stop is not None
    return piece.stop - piece.start


def _join(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbouring ranges of one file become one piece, which is read in one go."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].file_index == piece.file_index and joined[-1].stop == piece.start and piece.start:
            joined[-1] = dataclasses.replace(joined[-1], stop=piece.stop)
        else:
            joined.append(piece)
    return joined
