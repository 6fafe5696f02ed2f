"""Divides a list of files into lanes: by files, then by row groups, then by row ranges.

Lane i of L reads files i, i + L, i + 2L, … of all complete rounds of L files. The remaining files, fewer than L, are
divided further to keep lanes even:

* if rows can be counted without reading them (Parquet, Arrow, TFRecord shards of TFDS), by full-size row groups i, i + L,
  …, and the remaining row groups by row ranges, with the same number of rows per lane;
* otherwise (CSV, JSON, text), round-robin by row: the rows of each remaining file form rounds of L rows, and a lane keeps
  some slots of each round. A lane reads at most two such files, and if r files remain, each is read by L / r lanes or one
  more.

If that leaves the lanes unequal, because whole files differ in length, and all rows can be counted, cut version 2 divides
the rows of all files, end to end, into equal ranges: lanes differ by one row, and each begins inside at most one row group.
Version 1 leaves the lanes unequal. States name the version, so that one saved under version 1 continues with its lanes.

The division depends only on the order of the files and their row counts: it is the same on every host, and known before
any row is read.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Sequence

CUT_BY_FILES, CUT_EVENLY = 1, 2  # versions
MAX_COUNTED = 4096  # files; with more, every lane has several, and opening each to count its rows would take too long
# Lanes of whole files stay if equal lanes would deliver less than this share of the records more: to move a few rows, a
# lane would decode a row group of another file, or read past a whole TFRecord file.
_TOLERATED_LOSS = 0.01


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of one file that a lane reads, in order.

    Attributes:
      file_index: index of the file.
      start: first row.
      stop: row after the last one; None for the end of the file.
      round_size: rows per round if the file is divided round-robin; otherwise 1.
      first_place: first slot of each round that this lane keeps.
      stop_place: slot after the last one that it keeps.
    """

    file_index: int
    start: int = 0
    stop: int | None = None
    round_size: int = 1
    first_place: int = 0
    stop_place: int = 1

    def file_row(self, piece_row: int) -> int:
        """Converts a row of this piece to a row of the file."""
        if self.round_size == 1:
            return self.start + piece_row
        rounds, slot = divmod(piece_row, self.stop_place - self.first_place)
        return self.start + rounds * self.round_size + self.first_place + slot


@dataclasses.dataclass(frozen=True)
class FileCut:
    """The pieces that one lane reads.

    Attributes:
      pieces: pieces in reading order.
      unit: the finest unit of division over all lanes: ``files``, ``row_groups``, ``rows``, ``turns`` (round-robin), or
        ``even`` if whole files were divided further, which only version 2 does.
      left: indices of the files that were divided further, because fewer files than lanes remained.
      times_read: average number of lanes that read each part of these files; 1.0 if no file or row group is read twice.
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
    version: int = CUT_BY_FILES,
) -> FileCut:
    """Returns the pieces of ``files`` that lane ``lane_index`` of ``num_lanes`` reads.

    Args:
      files: whole files or ranges of files, in the same order on every host. Ranges are allowed only for files whose rows
        can be counted.
      lane_index: 0 … num_lanes - 1.
      num_lanes: number of lanes.
      group_rows: maps a file index to the number of rows of each row group, or None if they cannot be counted. Called
        only for files after the last complete round, fewer than ``num_lanes``; by version 2 for up to ``MAX_COUNTED`` files.
      version: see the module's description.

    Returns:
      The pieces of the lane. The pieces of all lanes cover every row of every file exactly once.
    """
    even = _cut_evenly(files, lane_index, num_lanes, group_rows) if version >= CUT_EVENLY else None
    if even is not None:
        return even
    whole = len(files) // num_lanes * num_lanes
    # Whole files first: a file that is divided may be opened, and its row groups read, by several lanes.
    pieces = list(files[lane_index:whole:num_lanes])
    left = files[whole:]
    if not left:
        return FileCut(tuple(pieces), "files")
    counts = [group_rows(file.file_index) for file in left]
    if any(rows is None for rows in counts):
        indices = tuple(file.file_index for file in left)
        turns, times_read = _round_robin(indices, lane_index, num_lanes)
        return FileCut((*pieces, *turns), "turns", indices, times_read)
    groups = [group for file, rows in zip(left, counts, strict=True) for group in _groups(file, rows or ())]
    ranges, unit, times_read = _by_groups(groups, lane_index, num_lanes)
    indices = tuple(file.file_index for file in left)
    return FileCut(tuple(_join([*pieces, *ranges])), unit, indices, times_read)


def _cut_evenly(
    files: Sequence[Piece], lane_index: int, num_lanes: int, group_rows: Callable[[int], Sequence[int] | None]
) -> FileCut | None:
    """Returns the lane's equal share of all rows; None if rows cannot be counted, or lanes of whole files will do."""
    if num_lanes == 1 or len(files) > MAX_COUNTED:
        return None
    counts = [group_rows(file.file_index) for file in files]
    counted = [rows for rows in counts if rows is not None]
    if len(counted) < len(files):
        return None
    stops = [sum(rows) if file.stop is None else file.stop for file, rows in zip(files, counted, strict=True)]
    parts = [dataclasses.replace(file, stop=stop) for file, stop in zip(files, stops, strict=True)]
    total, whole = sum(map(_size, parts)), len(parts) // num_lanes * num_lanes
    left = [group for file, rows in zip(parts[whole:], counted[whole:], strict=True) for group in _groups(file, rows)]
    shortest = min(
        sum(map(_size, parts[lane:whole:num_lanes])) + rows for lane, rows in enumerate(_shares(left, num_lanes))
    )
    if (total // num_lanes - shortest) * num_lanes <= _TOLERATED_LOSS * total:
        return None
    mine, _ = _ranges(parts, lane_index, num_lanes)
    given = dict(zip(parts, files, strict=True))  # a whole file stays as it was given: its stop may be None
    pieces = tuple(given.get(piece, piece) for piece in mine)
    indices = tuple(file.file_index for file in files)
    return FileCut(pieces, "even", indices, 1 + _rows_shared(parts, counted, num_lanes) / total)


def _rows_shared(parts: Sequence[Piece], counts: Sequence[Sequence[int]], num_lanes: int) -> int:
    """Returns the rows that are read again because a lane begins inside a row group."""
    first_rows = [0, *itertools.accumulate(map(_size, parts))]
    shared = 0
    for first_row in {first_rows[-1] * lane // num_lanes for lane in range(num_lanes)}:
        number = bisect.bisect_right(first_rows, first_row) - 1
        groups = [0, *itertools.accumulate(counts[number])]
        row = parts[number].start + first_row - first_rows[number]
        group = bisect.bisect_right(groups, row) - 1
        shared += (groups[group + 1] - groups[group]) * (row not in (groups[group], parts[number].start))
    return shared


def _by_groups(groups: Sequence[Piece], lane_index: int, num_lanes: int) -> tuple[list[Piece], str, float]:
    """Returns the lane's pieces of row groups, the unit of division, and how often rows are read on average."""
    assigned, rest = _full_rounds(groups, num_lanes)
    ranges, rows_read = _ranges(rest, lane_index, num_lanes)
    mine = sorted([*assigned[lane_index::num_lanes], *ranges], key=lambda piece: (piece.file_index, piece.start))
    rows = sum(map(_size, groups))
    times_read = (rows - sum(map(_size, rest)) + rows_read) / max(rows, 1)
    return mine, "rows" if rest else "row_groups", times_read


def _full_rounds(groups: Sequence[Piece], num_lanes: int) -> tuple[list[Piece], list[Piece]]:
    """Returns the full-size groups of whole rounds over the lanes, and all other groups."""
    # The last group of a file is usually shorter: only full-size groups are assigned whole, to keep lanes even.
    largest = max(map(_size, groups), default=0)
    full = [group for group in groups if _size(group) == largest]
    assigned = full[: len(full) // num_lanes * num_lanes]
    taken = set(assigned)
    return assigned, [group for group in groups if group not in taken]


def _shares(groups: Sequence[Piece], num_lanes: int) -> list[int]:
    """Returns the rows of each lane by :func:`_by_groups`."""
    assigned, rest = _full_rounds(groups, num_lanes)
    each, total = sum(map(_size, assigned)) // num_lanes, sum(map(_size, rest))
    return [each + total * (lane + 1) // num_lanes - total * lane // num_lanes for lane in range(num_lanes)]


def keep_rows(
    num_files: int, first_row: int, stop_row: int | None, group_rows: Callable[[int], Sequence[int] | None]
) -> list[Piece] | None:
    """Returns the files and ranges of files that contain rows ``[first_row, stop_row)`` of the concatenated files.

    ``stop_row`` is None for the end. ``group_rows`` is that of :func:`cut_files`, called only for files whose rows must be
    counted. Returns None if those of a file cannot be.
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
    """Returns the row groups of a file, clipped to its range."""
    groups, offset = [], 0
    for count in rows:
        low = max(offset, file.start)
        high = offset + count if file.stop is None else min(offset + count, file.stop)
        if low < high:
            groups.append(Piece(file.file_index, low, high))
        offset += count
    return groups


def _ranges(groups: Sequence[Piece], lane_index: int, num_lanes: int) -> tuple[list[Piece], int]:
    """Returns the lane's equal share of rows, and the rows read over all lanes, because a lane reads whole groups."""
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


def _round_robin(files: Sequence[int], lane_index: int, num_lanes: int) -> tuple[list[Piece], float]:
    """Returns the lane's pieces of files divided round-robin, and how often each file is read on average.

    With rounds of ``num_lanes`` rows, the files together have ``len(files) * num_lanes`` slots. Each lane takes
    ``len(files)`` consecutive slots: all lanes get the same share, and each reads at most two files.
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
    """Merges adjacent ranges of a file into one piece, which is read sequentially."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].file_index == piece.file_index and joined[-1].stop == piece.start and piece.start:
            joined[-1] = dataclasses.replace(joined[-1], stop=piece.stop)
        else:
            joined.append(piece)
    return joined
