"""Reads the lanes whose rows a host holds, step by step: rows of lanes → host batch."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import DAMAGED_STATE, SourceError, StateMismatchError
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.types import JsonValue, PyTree, StreamSource
from meshfeed._src.order.steps import parse_segments
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.host_batch import add_mask, spec_of_batch
from meshfeed._src.reading.reads import AutoReads
from meshfeed._src.reading.stacking import RecordSpec
from meshfeed._src.reading.structure import check_spec
from meshfeed._src.state.state import check_counts, seal, unseal
from meshfeed._src.streams.lane import LaneEntry, LaneSettings, Taken
from meshfeed._src.streams.lane_group import LaneRows
from meshfeed._src.streams.lane_places import LanePlaces
from meshfeed._src.streams.protocol import EMPTY_STREAM, Cursor, HostBatch, HostReader

_log = logging.getLogger("meshfeed.lanes")


@dataclasses.dataclass(frozen=True)
class Delivered:
    """What a feed had delivered when it was reset; stages of a mixture that it had added must not change that.

    Attributes:
      step: the next step at that time.
      segments: batch sizes of the steps before it, as a state has them.
      ended: lane → length in records, for the lanes that had ended.
    """

    step: int
    segments: JsonValue
    ended: Mapping[int, int]

    def to_json(self) -> dict[str, JsonValue]:
        """Returns the sealed JSON that a state contains."""
        ended = {str(lane): length for lane, length in sorted(self.ended.items())}
        return seal({"step": self.step, "segments": self.segments, "ended": ended})

    @staticmethod
    def from_json(value: JsonValue) -> Delivered:
        """Parses what a state contains.

        Raises:
          StateMismatchError: it was changed or damaged after it was saved.
        """
        bare = unseal(value, "before_reset")
        check_counts(bare, ("step",), "before_reset")
        parse_segments(bare.get("segments"))
        given = bare.get("ended")
        ended = cast("dict[str, int]", given) if isinstance(given, dict) else {"": 0}
        if not all(lane.isdecimal() for lane in ended):
            raise StateMismatchError("before_reset.ended", given, "lengths of lanes", DAMAGED_STATE)
        check_counts(ended, ended, "before_reset.ended")
        return Delivered(bare["step"], bare["segments"], {int(lane): length for lane, length in ended.items()})


@dataclasses.dataclass(frozen=True)
class LaneCursor(Cursor):
    """The cursor of a stream read as lanes.

    Attributes:
      source: the source from which lanes are opened. For a mixture it depends on the step schedule, because stages begin
        at steps.
      entries: lane → its state.
      ended: lane → length in records, for the lanes of all hosts known to have ended before ``step``.
      cut: the version of the rule that divides the records into lanes; see :class:`meshfeed._src.base.hooks.CutsLanes`.
      before_reset: what was delivered before a reset, until that step has been reached again; only with added stages.
    """

    source: StreamSource
    entries: Mapping[str, LaneEntry]
    ended: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])
    cut: int = 1
    before_reset: Delivered | None = None

    def records_after(self, step: int, ended: Mapping[int, int]) -> int:
        """Returns the records up to and including ``step``, from the lengths of the ended lanes."""
        position, size = self.step_schedule.at(step)
        each = (position + size) // self.num_lanes
        ended = {**self.ended, **ended} if self.ended else ended
        return position + size - sum(max(0, each - length) for length in ended.values())


def _warn_of_longer_lanes(lanes: Mapping[int, LaneRows], first: int, num_lanes: int, position: int) -> None:
    """Warns that a stream ends with its shortest lane, if other lanes of this host still have records."""
    longer = {lane: rows for lane, rows in lanes.items() if not rows.entry.ended}
    if not longer:  # equally long lanes, up to a part of a batch
        return
    read = sum(rows.entry.records for rows in lanes.values())
    delivered = position * len(lanes) // num_lanes
    _log.warning(
        "the stream ends with lane %d of %d, which has %s records, while lanes %s still had data: at least %s records are "
        "not delivered. With end='drop' a stream ends with its shortest lane; use end='pad' with mask_key=, fewer lanes "
        "(num_lanes=), or divide the records so that all lanes get as many.",
        first,
        num_lanes,
        f"{lanes[first].entry.records:,}",
        ", ".join(map(str, sorted(longer)[:8])) + (", …" if len(longer) > 8 else ""),
        f"{read - delivered:,}",
    )


class LaneReader(HostReader[LaneCursor]):
    """Reads this host's lanes, step by step.

    Args:
      cursor: where to start.
      host_rows: this host's rows.
      settings: the feed's settings.
      shared: settings of each lane.
      entries: lane → where to start; must contain all lanes that this host needs.
      hosts_agree: whether other hosts take part and may still have data when this one has none.
    """

    def __init__(
        self,
        cursor: LaneCursor,
        host_rows: HostRows,
        settings: FeedSettings,
        shared: LaneSettings,
        entries: Mapping[int, LaneEntry],
        *,
        hosts_agree: bool,
    ) -> None:
        self._step_schedule = cursor.step_schedule
        self._host_rows = host_rows
        self._settings = settings
        self._num_lanes = cursor.num_lanes
        self._step = cursor.step
        self._since = time.monotonic()
        self._go_on = hosts_agree and settings.end == "pad"
        self._hosts_agree = hosts_agree
        self._counts_lanes = hooks.find(cursor.source, hooks.CountsLanes)
        self.empty = True  # no lane of this host has produced a record so far
        self._spec: RecordSpec | None = None
        self._runs: dict[int, tuple[int, tuple[LaneRun, ...]]] = {}  # batch size → (host rows, their runs)
        self._final: int | None = None
        self._beginnings: list[set[bytes]] = []  # of the first steps: the first record of each lane
        self._places = LanePlaces(cursor.source, settings, shared, entries, cursor.step, self._rows_per_lane)

    def adapt(self, auto: AutoReads) -> None:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        self._places.adapt(auto)

    def _rows_per_lane(self, step: int) -> int:
        return self._step_schedule.at(step)[1] // self._num_lanes

    def next(self) -> HostBatch:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        step, self._since = self._step, time.monotonic()
        size = self._step_schedule.at(step)[1]
        num_rows, runs = self._lane_runs(size)
        group = self._places.read(step)
        self._check_end(group.lanes, step)
        if step < 2:
            self._note_beginnings(group.lanes)
        self._step = step + 1
        tree, real, self._spec = place_rows(
            {lane: row.taken for lane, row in group.lanes.items()}, runs, num_rows, self._spec
        )
        if tree is not None and self._settings.mask_key is not None:
            tree = add_mask(tree, self._settings.mask_key, real)
        return HostBatch(
            step=step,
            global_batch_size=size,
            tree=tree,
            num_bytes=0 if tree is None else trees.num_bytes(tree),
            entries={str(lane): row.entry for lane, row in group.lanes.items()},
            ended={lane: row.entry.records for lane, row in group.lanes.items() if row.entry.ended},
            bad=[entry for row in group.lanes.values() for entry in row.taken.bad],
            times={"read_seconds": group.seconds},
            retries=sum(row.taken.retries for row in group.lanes.values()),
        )

    def _lane_runs(self, size: int) -> tuple[int, tuple[LaneRun, ...]]:
        if size not in self._runs:
            rows = self._host_rows.rows(size)
            self._runs[size] = len(rows), lane_runs(rows, size // self._num_lanes)
        return self._runs[size]

    def _note_beginnings(self, lanes: Mapping[int, LaneRows]) -> None:
        """Warns if all lanes of this host begin with the same two records, which differ from each other."""
        if len(lanes) < 2 or not all(rows.taken.count for rows in lanes.values()):
            return
        self._beginnings.append(
            {
                b"".join(np.asarray(leaf[0]).tobytes() for leaf in trees.leaves(rows.taken.tree))
                for rows in lanes.values()
            }
        )
        if [len(records) for records in self._beginnings] == [1, 1] and self._beginnings[0] != self._beginnings[1]:
            _log.warning(
                "all %d lanes of this host begin with the same records, so each record comes as often as there are lanes. "
                "open(lane_index, num_lanes) must return a part of the data for each lane: records lane_index, lane_index + "
                "num_lanes, …, or files.",
                len(lanes),
            )

    def _check_end(self, lanes: Mapping[int, LaneRows], step: int) -> None:
        """Raises StopIteration if this host's lanes cannot fill ``step``; records the first step that is all padding."""
        rows = lanes.values()
        if not rows and self._hosts_agree and self._settings.end == "drop":
            return  # only the hosts with lanes know the end, and announce it
        self.empty = self.empty and not any(row.entry.records for row in rows)
        if self.empty and rows and not self._hosts_agree:
            raise SourceError(EMPTY_STREAM)
        counts = [row.taken.count for row in rows]
        if self._settings.end == "drop" and min(counts, default=0) < self._rows_per_lane(step):
            first = min(lanes, key=lambda lane: lanes[lane].entry.records)
            if not self._was_expected(first, lanes[first]):
                _warn_of_longer_lanes(lanes, first, self._num_lanes, self._step_schedule.at(step)[0])
            raise StopIteration
        if not any(counts):
            if not self._go_on:
                raise StopIteration
            self._final = step if self._final is None else self._final

    def _was_expected(self, lane_index: int, rows: LaneRows) -> bool:
        """Whether a lane had as many records as its source counted: a feed that loses many by that warns when it is made."""
        lengths = None if self._counts_lanes is None else self._counts_lanes.lane_lengths(self._num_lanes)
        epochs = self._settings.num_epochs
        if not lengths or epochs is None:
            return False
        return rows.entry.records >= epochs * lengths[lane_index]

    def advance(self, cursor: LaneCursor, batch: HostBatch, ended: Mapping[int, int], num_skipped: int) -> LaneCursor:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        position, size = cursor.step_schedule.at(batch.step)
        each = (position + size) // cursor.num_lanes
        # Of lanes read ahead, others end later; with weights that are set before that, they may go on.
        before = {lane: length for lane, length in ended.items() if length < each}
        before_reset = cursor.before_reset
        return LaneCursor(
            cursor.step_schedule,
            batch.step + 1,
            cursor.records_after(batch.step, ended),
            cursor.source,
            batch.entries,
            {**cursor.ended, **before} if before else cursor.ended,
            cursor.cut,
            before_reset if before_reset is not None and before_reset.step > batch.step + 1 else None,
            num_lanes=cursor.num_lanes,
            skipped=cursor.skipped.after(batch.bad, batch.step) if batch.bad else cursor.skipped,
            num_skipped=num_skipped,
        )

    def final(self) -> int | None:
        """Returns the first step without a real row of this host, if reached."""
        return self._final

    def describe(self) -> str:
        """Returns what the reader is doing."""
        return f"step {self._step}: {self._places.describe()} for {time.monotonic() - self._since:.1f} s"

    def stop(self) -> None:
        """See :meth:`meshfeed._src.streams.protocol.HostReader.stop`."""
        self._places.stop()

    def close(self) -> None:
        """Closes lanes, threads and processes."""
        self._places.close()


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
