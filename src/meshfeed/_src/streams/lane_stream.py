"""The stream of a sequential source, read as lanes: each lane fills a fixed slice of the rows of every batch.

The state has one entry per lane, so lanes can move between hosts. ``lane_reader.py`` reads the lanes whose rows a host
holds.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import cast

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import DAMAGED_STATE, SettingsError, SourceError, StateMismatchError
from meshfeed._src.base.hooks import find
from meshfeed._src.base.settings import BatchSchedule, FeedSettings, default_num_lanes
from meshfeed._src.base.types import JsonValue, PyTree, RecordIds, StreamSource
from meshfeed._src.order.added_stages import add_stage, check_added, not_a_mixture, parse_added
from meshfeed._src.order.steps import Segment, StepSchedule, parse_segments, position_at
from meshfeed._src.order.weights import StagedWeights
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.host_batch import spec_of_batch
from meshfeed._src.reading.identity import identify_within, kind_of
from meshfeed._src.reading.stacking import RecordSpec
from meshfeed._src.state.state import FeedState, Ledgers, count_skipped
from meshfeed._src.streams.lane import Lane, LaneEntry, LaneSettings
from meshfeed._src.streams.lane_moves import read_forward
from meshfeed._src.streams.lane_reader import Delivered, LaneCursor, LaneReader, needed_lanes
from meshfeed._src.streams.protocol import FeedStream, HostBatch, check_fingerprint, required_schedule

_log = logging.getLogger("meshfeed.lanes")
_CUTS = (1, 2)  # versions of the rule by which sources of files divide them into lanes
_WORTH_A_WARNING = 0.01  # share of the records; lanes always differ by a few


class LaneStream(FeedStream[LaneCursor]):
    """See :class:`meshfeed._src.streams.protocol.FeedStream`.

    Args:
      source: a stream source.
      settings: the feed's settings.
    """

    kind = "lanes"

    def __init__(self, source: StreamSource, settings: FeedSettings) -> None:
        self.schedule: BatchSchedule = required_schedule(settings, "a stream")  # pyright: ignore[reportIncompatibleVariableOverride]
        if settings.shuffle is not False:
            raise SettingsError(
                f"shuffle={settings.shuffle!r}, but a stream cannot be shuffled as a whole: its records are read in order. "
                "Shuffle in the source (meshfeed.sources.ShuffleBuffer, Grain's WindowShuffle, "
                "HuggingFace(shuffle_buffer=…), Mixture(shuffle=True)), or pass a random-access source.",
                setting="shuffle",
            )
        if settings.bad_records is not None and find(source, hooks.Decodes) is None:
            raise SettingsError(
                "bad_records=SkipBad(…) on a stream covers only its decode, but this source has none. Omit it, and handle "
                "bad records in the code that makes the stream.",
                setting="bad_records",
            )
        self.source = source
        self._staged = find(source, hooks.StagedStream)  # a mixture's stages begin at steps
        self._cuts = find(source, hooks.CutsLanes)
        self._settings = settings
        self.num_lanes = settings.num_lanes or default_num_lanes(self.schedule.sizes)
        self._check_lanes(self.num_lanes)
        self._cut = 1 if self._cuts is None else self._cuts.cut_version(self.num_lanes)
        # Computed here because it may read records, which taking a state must not.
        self._identity = identify_within(source, settings.retry, settings.timeout_seconds)
        if self._staged is not None:
            self._staged.mixture_config()  # may read too
        self._specs: dict[str, RecordSpec] = {}  # weights of a mixture → the structure of its records
        if settings.end == "drop" and settings.num_epochs is not None:
            self._warn_of_lost_records()

    def _warn_of_lost_records(self) -> None:
        counted = find(self.source, hooks.CountsLanes)
        lengths = None if counted is None else counted.lane_lengths(self.num_lanes)
        if not lengths or not sum(lengths):
            return
        shortest = min(lengths)
        lost = 1 - shortest * self.num_lanes / sum(lengths)
        if lost > _WORTH_A_WARNING and max(lengths) > shortest + 1:  # equal lanes cannot deliver the remainder either
            _log.warning(
                "%.0f %% of the records will not be delivered: with end='drop' a stream ends with its shortest lane, and "
                "lane %d of %d has %d records an epoch where the longest has %d. Use end='pad' with mask_key=, another "
                "num_lanes, or files of equal length.",
                *(100 * lost, lengths.index(shortest), self.num_lanes, shortest, max(lengths)),
            )

    def _check_lanes(self, num_lanes: int) -> None:
        for size in self.schedule.sizes:
            if size % num_lanes:
                best = default_num_lanes(self.schedule.sizes)
                raise SettingsError(
                    f"num_lanes={num_lanes} does not divide global_batch_size={size}; it takes a divisor of every batch "
                    f"size, such as {best}.",
                    setting="num_lanes",
                )
        limited = find(self.source, hooks.LimitsLanes)
        if limited is not None:
            limited.check_lanes(num_lanes)

    # ------------------------------------------------------------------ state

    def fingerprint(self, cursor: LaneCursor) -> dict[str, JsonValue]:
        """Source, seed, epochs, end, number of lanes, and how they are cut unless by the first rule."""
        staged = find(cursor.source, hooks.StagedStream)
        return {
            "source": self._identity,
            "seed": self._settings.seed,
            "num_epochs": self._settings.num_epochs,
            "end": self._settings.end,
            "num_lanes": cursor.num_lanes,
            **({} if cursor.cut == 1 else {"cut": cursor.cut}),
            **({} if staged is None else {"mixture": staged.mixture_config()}),
        }

    def _source_under(
        self,
        step_schedule: StepSchedule,
        cut: int,
        step: int,
        added: StagedWeights = (),
        ended: Mapping[int, int] | None = None,
        before_reset: Delivered | None = None,
    ) -> StreamSource:
        """The source of lanes that have delivered the steps before ``step``, or have ended: lane → length."""
        source = self.source if self._cuts is None else self._cuts.with_cut(cut)
        staged = find(source, hooks.StagedStream)
        if staged is None:
            return source
        if before_reset is not None:
            step, ended = max(step, before_reset.step), {**before_reset.ended, **(ended or {})}
        staged = cast("hooks.StagedStream", cast("hooks.TakesWeights", staged).with_added(added))
        settings = self._settings
        return staged.bind(
            seed=settings.seed,
            num_epochs=settings.num_epochs,
            position_of_step=step_schedule.position_of_step,
            delivered=step_schedule.position_of_step(step),
            ended=ended,
        )

    def start(self, like: LaneCursor | None = None) -> LaneCursor:
        """Returns the cursor at step 0, every lane at its beginning; keeps the lanes and the added stages of ``like``."""
        return self._start_under(StepSchedule(self.schedule), like)

    def _start_under(self, step_schedule: StepSchedule, like: LaneCursor | None) -> LaneCursor:
        num_lanes, cut = (self.num_lanes, self._cut) if like is None else (like.num_lanes, like.cut)
        entries = {str(lane): LaneEntry() for lane in range(num_lanes)}
        added = () if like is None else _added_to(like)
        before_reset = None if like is None or not added else _under(step_schedule, self._delivered_by(like))
        source = self._source_under(step_schedule, cut, 0, added, before_reset=before_reset)
        return LaneCursor(step_schedule, 0, 0, source, entries, {}, cut, before_reset, num_lanes=num_lanes)

    def _delivered_by(self, cursor: LaneCursor) -> Delivered | None:
        """What a feed at a cursor has delivered, also before a reset; None if its lanes do not end."""
        if self._settings.num_epochs is None or cursor.before_reset is not None or not cursor.step:
            return cursor.before_reset
        return Delivered(cursor.step, cursor.step_schedule.delivered_json(cursor.step), cursor.ended)

    def with_stage(self, cursor: LaneCursor, from_step: object, weights: object) -> LaneCursor:
        """See :class:`meshfeed._src.streams.protocol.FeedStream`."""
        mixture = find(cursor.source, hooks.TakesWeights)
        if mixture is None:
            raise not_a_mixture(kind_of(self.source))
        added = add_stage(_added_to(cursor), cursor.step, from_step, mixture.check_weights(weights))
        source = self._source_under(cursor.step_schedule, cursor.cut, cursor.step, added)
        return dataclasses.replace(cursor, source=source, before_reset=None)

    def restore(self, state: FeedState) -> LaneCursor:
        """Returns the state's cursor, with the lanes that the state contains."""
        num_lanes = self._settings.num_lanes or state.num_lanes
        if state.num_lanes is None or state.step is None or state.lanes is None or not num_lanes:
            raise StateMismatchError("lanes", None, "num_lanes, step and lanes of a stream", DAMAGED_STATE)
        # Without num_lanes=, the number in the state is the one to compare fingerprints with.
        # A state from before cuts had versions names none.
        cut = state.fingerprint.get("cut", 1)
        cut = cut if self._cuts is not None and type(cut) is int and cut in _CUTS else self._cut
        here = dataclasses.replace(self.start(), num_lanes=num_lanes, cut=cut)
        mixture = check_fingerprint(state, self.fingerprint(here), self.source)
        self._check_num_lanes(num_lanes, state.num_lanes)
        segments = parse_segments(state.segments)
        nominal = self._nominal_position(segments, state.step, state.position)
        entries = _parse_entries(state.lanes, num_lanes, nominal // num_lanes, state.position)
        step_schedule = StepSchedule(self.schedule, past=segments, step=state.step, position=nominal)
        added, mixed = parse_added(mixture), find(self.source, hooks.TakesWeights)
        if mixed is not None:
            check_added(added, mixed.check_weights)
        source, before_reset = self._source_under(step_schedule, cut, state.step, added), None
        if self._staged is not None:
            staged = cast("hooks.StagedStream", source)
            staged.check_saved(mixture, nominal, state.step)
            if state.before_reset is not None and staged.mixture_config()["stages"] == mixture["stages"]:
                before_reset = _under(step_schedule, Delivered.from_json(state.before_reset))
                source = self._source_under(step_schedule, cut, state.step, added, before_reset=before_reset)
        return LaneCursor(
            step_schedule,
            state.step,
            state.position,
            source,
            entries,
            {int(key): entry.records for key, entry in entries.items() if entry.ended},
            cut,
            before_reset,
            num_lanes=num_lanes,
            skipped=Ledgers.of_state(state),
            num_skipped=count_skipped(state),
        )

    def _nominal_position(self, segments: tuple[Segment, ...], step: int, position: int) -> int:
        """Returns the position at which ``step`` begins if no lane has ended."""
        nominal = position_at(segments, step)
        consistent = step > segments[-1].first_step if segments else step == 0
        if not consistent or position > nominal or (not self._pad and position != nominal):
            raise StateMismatchError("position", position, f"{nominal} at step {step}", DAMAGED_STATE)
        return nominal

    def _check_num_lanes(self, num_lanes: int, saved: int) -> None:
        if num_lanes != saved:
            raise StateMismatchError("num_lanes", saved, num_lanes, DAMAGED_STATE)
        if any(size % num_lanes for size in self.schedule.sizes):
            raise StateMismatchError(
                "num_lanes",
                num_lanes,
                f"a divisor of the batch sizes {list(self.schedule.sizes)}",
                "Choose global_batch_size as a multiple of the saved number of lanes.",
            )

    def replay_from(self, current: LaneCursor, step: int, state: FeedState | None) -> LaneCursor:
        """Returns the cursor of ``state``, which must contain all lanes, or of the beginning."""
        delivered = current.step_schedule  # past steps have the batch sizes and weights of their delivery
        cursor = self._start_under(delivered, current) if state is None else self.restore(state)
        known = current.step if current.before_reset is None else current.before_reset.step
        if cursor.step <= known and delivered.at(cursor.step)[0] == cursor.step_schedule.at(cursor.step)[0]:
            self._check_ends_known(current)
            past = current.step, _added_to(current), current.ended, current.before_reset
            source = self._source_under(delivered, cursor.cut, *past)
            if state is not None and self._staged is not None:  # whose stages by set_weights may be others
                _check_same_past(cast("hooks.StagedStream", source), state, delivered.position_of_step(cursor.step))
            cursor = dataclasses.replace(cursor, step_schedule=delivered, source=source)
        if cursor.step > step:
            raise SettingsError(
                f"replay of step {step} from a state taken at step {cursor.step}; it takes a state taken at or before "
                "the step.",
                setting="state",
            )
        return cursor

    def _check_ends_known(self, cursor: LaneCursor) -> None:
        """Raises StateMismatchError if lanes of a mixture have ended and the state of the cursor does not list them."""
        if self._staged is None or not cursor.step:
            return
        if cursor.records_after(cursor.step - 1, {}) != cursor.position:
            raise StateMismatchError(
                "lanes",
                f"lanes {sorted(int(lane) for lane in cursor.entries)} of {cursor.num_lanes}",
                "all lanes, some of which have ended",
                "Set the feed to the merged states of all hosts (meshfeed.merge_states), or take a batch first.",
            )

    def state(self, cursor: LaneCursor) -> FeedState:
        """Returns the state; it contains only this host's lanes."""
        lanes = {lane: entry.to_json() for lane, entry in sorted(cursor.entries.items(), key=lambda item: int(item[0]))}
        before_reset = None if cursor.before_reset is None else cursor.before_reset.to_json()
        fields = {"step": cursor.step, "num_lanes": cursor.num_lanes, "lanes": lanes, "before_reset": before_reset}
        return cursor.to_state(self.kind, self.fingerprint(cursor), **fields)

    def records_after(self, cursor: LaneCursor, step: int, ended: Mapping[int, int]) -> int:
        """See :meth:`LaneCursor.records_after`."""
        return cursor.records_after(step, ended)

    # ------------------------------------------------------------------ moves between hosts

    def handover(self, entries: Mapping[str, LaneEntry]) -> dict[str, JsonValue]:
        """Returns the lanes of a batch as a state has them."""
        return {lane: entry.to_json() for lane, entry in entries.items()}

    def take_over(self, current: LaneCursor, state: FeedState, host_rows: HostRows) -> LaneCursor:
        """Reads the lanes that this host needs forward to the state's step; a lane without an entry from its start."""
        lanes = state.lanes or {}
        cursor = self.restore(dataclasses.replace(state, lanes={}))
        records = cursor.step_schedule.at(cursor.step)[0] // cursor.num_lanes
        entries: dict[int, LaneEntry] = {}
        for lane in self._lanes_of(cursor, host_rows):
            known = lanes.get(str(lane))
            entries[lane] = LaneEntry() if known is None else LaneEntry.from_json(known, lane)
        unknown = [lane for lane in entries if str(lane) not in lanes]
        if unknown and records:
            _log.warning(
                "the state of lanes %s was known only to a host that is gone: reading them again from the start of the "
                "stream, %d records each",
                unknown,
                records,
            )
        # Other hosts know of lanes here that have ended, although the last known states are from before.
        ended = {lane: length for lane, length in current.ended.items() if length < records}
        past = cursor.step, _added_to(cursor), ended, cursor.before_reset
        source = self._source_under(cursor.step_schedule, cursor.cut, *past)
        settings, num_threads = self.lane_settings(cursor.num_lanes), self._settings.threads or 1
        after = read_forward(source, settings, entries, records, num_threads)
        ended |= {lane: entry.records for lane, entry in after.items() if entry.ended}
        return dataclasses.replace(cursor, entries={str(lane): after[lane] for lane in entries}, ended=ended)

    def _lanes_of(self, cursor: LaneCursor, host_rows: HostRows) -> list[int]:
        """The lanes that this host needs from a cursor on."""
        # Lanes cannot be opened later: at the step where the size changes, only the host that read a lane so far has its
        # state. With load="once" a host's share of the rows, and so its lanes, may depend on the size.
        sizes = cursor.step_schedule.sizes_from(cursor.step)
        return sorted({lane for size in sizes for lane in needed_lanes(host_rows.rows(size), size // cursor.num_lanes)})

    # ------------------------------------------------------------------ reading

    def open_reader(self, cursor: LaneCursor, host_rows: HostRows, *, hosts_agree: bool) -> LaneReader:
        """Opens this host's lanes at a cursor.

        Raises:
          StateMismatchError: the state lacks lanes that this host needs.
        """
        needed = self._lanes_of(cursor, host_rows)
        missing = [lane for lane in needed if str(lane) not in cursor.entries]
        if missing:
            raise StateMismatchError(
                "lanes",
                f"lanes {sorted(int(lane) for lane in cursor.entries)} of {cursor.num_lanes}",
                f"this host reads the lanes {needed}",
                f"The state lacks the lanes {missing}: merge the states of all hosts with meshfeed.merge_states.",
            )
        entries = {lane: cursor.entries[str(lane)] for lane in needed}
        shared = self.lane_settings(cursor.num_lanes)
        return LaneReader(cursor, host_rows, self._settings, shared, entries, hosts_agree=hosts_agree)

    def lane_settings(self, num_lanes: int) -> LaneSettings:
        """Returns the settings that all lanes share."""
        settings = self._settings
        num_epochs = settings.num_epochs if self._staged is None else 1  # a mixture's lanes cover all epochs
        moves = "num_workers" in settings.auto
        return LaneSettings(num_lanes, num_epochs, settings.seed, settings.retry, settings.bad_records, moves)

    def record_spec(self, cursor: LaneCursor | None = None) -> RecordSpec:
        """Returns the structure of the first record of a lane that has one; of a mixture, with the next step's weights."""
        cursor = self.start() if cursor is None else cursor
        weights = json.dumps(_weights_of(cursor))
        if weights not in self._specs:
            self._specs[weights] = self._read_spec(cursor)
        return self._specs[weights]

    def _read_spec(self, cursor: LaneCursor) -> RecordSpec:
        settings = dataclasses.replace(self.lane_settings(cursor.num_lanes), num_epochs=1)
        source, staged = cursor.source, find(cursor.source, hooks.StagedStream)
        if staged is not None:  # as if the next step were the first: components without weight may have no records
            at, position = cursor.step_schedule.position_of_step, cursor.step_schedule.position_of_step(cursor.step)
            source = staged.bind(
                seed=settings.seed,
                num_epochs=self._settings.num_epochs,
                position_of_step=lambda step: max(0, at(step) - position),
            )
        for lane_index in range(cursor.num_lanes):
            lane = Lane(source, lane_index, settings, LaneEntry())
            taken = lane.take(1)
            lane.close()
            if taken.tree is not None:
                return spec_of_batch(taken.tree, 1, what=f"lane {lane_index}")
        raise SourceError(f"the stream is empty: none of its {cursor.num_lanes} lanes has a record.")

    def num_steps(self, cursor: LaneCursor) -> int | None:
        """Always raises: the number of steps is unknown until the stream ends."""
        raise TypeError("the length of a stream is unknown until it ends. Count steps in the loop.")

    def record_ids(self, cursor: LaneCursor, step: int) -> RecordIds:
        """Always raises: streams have no record ids."""
        raise SourceError(
            f"record_ids({step}): a stream has no record ids; read the step again from a state taken before it."
        )

    def read(self, record_ids: object) -> PyTree:
        """Always raises: streams cannot be read by record id."""
        raise SourceError("read(record_ids): a stream has no record ids; pass a random-access source.")

    def describe_batch(self, batch: HostBatch) -> dict[str, JsonValue]:
        """Records delivered so far of each lane of this host."""
        entries: Mapping[str, LaneEntry] = batch.entries
        return {"lanes": {lane: entry.records for lane, entry in entries.items()}}


def _under(step_schedule: StepSchedule, delivered: Delivered | None) -> Delivered | None:
    """What was delivered, unless the steps have other batch sizes now, so that stages begin at other records."""
    same = delivered is not None and delivered.segments == step_schedule.delivered_json(delivered.step)
    return delivered if same else None


def _weights_of(cursor: LaneCursor) -> JsonValue:
    """The weights of a mixture at the next step; None if the source is no mixture."""
    staged = find(cursor.source, hooks.StagedStream)
    if staged is None:
        return None
    position = cursor.step_schedule.position_of_step(cursor.step)
    return next(weights for _, first, weights in reversed(staged.mixture_config()["stages"]) if first <= position)


def _check_same_past(source: hooks.StagedStream, state: FeedState, position: int) -> None:
    """Raises StateMismatchError if the records before a state were drawn with other weights than those of ``source``."""
    try:
        source.check_saved(state.fingerprint["mixture"], position, state.step)
    except StateMismatchError as error:
        raise StateMismatchError(error.field, error.saved, error.current, "Pass a state of this feed.") from None


def _added_to(cursor: LaneCursor) -> StagedWeights:
    """The stages that the feed has added to a mixture."""
    staged = find(cursor.source, hooks.StagedStream)
    return () if staged is None else parse_added(staged.mixture_config())


def _parse_entries(
    lanes: Mapping[str, JsonValue], num_lanes: int, expected: int, position: int
) -> dict[str, LaneEntry]:
    """Parses the lanes of a state at ``position``; each has delivered ``expected`` records, unless it has ended."""
    entries: dict[str, LaneEntry] = {}
    for key, value in lanes.items():
        if not key.isdecimal() or int(key) >= num_lanes:
            raise StateMismatchError(f"lanes.{key}", key, f"a lane below {num_lanes}", DAMAGED_STATE)
        entry = entries[key] = LaneEntry.from_json(value, int(key))
        if entry.records > expected or (entry.records < expected and not entry.ended):
            raise StateMismatchError(f"lanes.{key}.records", entry.records, expected, DAMAGED_STATE)
    delivered = sum(entry.records for entry in entries.values())
    if len(entries) == num_lanes and delivered != position:
        raise StateMismatchError("position", position, f"{delivered} records in all lanes", DAMAGED_STATE)
    return entries
