"""The stream of a random-access source: each batch depends only on source, settings and step.

``random_access_reader.py`` reads the batches.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import cast

import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import DAMAGED_STATE, SettingsError, SourceError, StateMismatchError, without_signatures
from meshfeed._src.base.hooks import find
from meshfeed._src.base.settings import BatchSchedule, FeedSettings, ShardShuffle, default_num_lanes, shard_shuffle
from meshfeed._src.base.types import JsonValue, PyTree, RandomAccessSource, RecordIds, RecordOrder
from meshfeed._src.order.added_stages import add_stage, check_added, not_a_mixture, parse_added
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.shards import ShardOrder, with_usual
from meshfeed._src.order.steps import Segment, StepSchedule, derive_step, parse_segments, position_at
from meshfeed._src.order.weights import StagedWeights
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.identity import identify_within, kind_of
from meshfeed._src.reading.records import RecordReader, file_of, reads_columns
from meshfeed._src.reading.stacking import RecordSpec
from meshfeed._src.state.state import FeedState, Ledgers, count_skipped
from meshfeed._src.streams.balance import RowBalance
from meshfeed._src.streams.protocol import FeedStream, HostBatch, check_fingerprint, required_schedule
from meshfeed._src.streams.random_access_reader import RandomAccessCursor, RandomAccessReader, batch_ids, spec_at

_log = logging.getLogger("meshfeed.feed")


class RandomAccessStream(FeedStream[RandomAccessCursor]):
    """See :class:`meshfeed._src.streams.protocol.FeedStream`.

    Args:
      source: a random-access source.
      settings: the feed's settings.
    """

    kind = "random_access"
    opens_at_restore = False
    length_is_known = True

    def __init__(self, source: RandomAccessSource, settings: FeedSettings) -> None:
        self.schedule: BatchSchedule = required_schedule(settings, "a random-access source")  # pyright: ignore[reportIncompatibleVariableOverride]
        self._shards = shard_shuffle(settings.shuffle)
        if settings.num_lanes is not None and self._shards is None:
            raise SettingsError(
                f"num_lanes={settings.num_lanes}, but a random-access source has lanes only with shuffle='shards'. Omit "
                "it.",
                setting="num_lanes",
            )
        if len(source) < 1:
            raise SourceError(f"the source {type(source).__name__} is empty: it has 0 records.")
        checks = find(source, hooks.ChecksRecords)
        if checks is not None:
            checks.check_records()
        within = find(source, hooks.OrdersParts)
        if within is not None:
            source = within.with_order(shuffle=settings.shuffle, seed=settings.seed)
        self.source = source
        self._settings = settings
        self.in_columns = reads_columns(source)
        self.balance = None if settings.balance is None else RowBalance(source, settings.balance)
        self._numbering = find(source, hooks.NumbersRecords)  # a mixture defines its own order
        self._shard_lengths = self._get_shard_lengths() if self._shards is not None else None
        self._order = self._order_of(StepSchedule(self.schedule))
        self.records = RecordReader(source, seed=settings.seed, retry=settings.retry, bad_records=settings.bad_records)
        # Computed here because it may read records, which taking a state must not.
        self._identity = identify_within(source, settings.retry, settings.timeout_seconds)
        if self.num_steps(self.start()) == 0:
            _log.warning(
                "the source has %d records in all epochs, fewer than one batch of %d: with end='drop' there is no batch. "
                "Use end='pad', more epochs or a smaller batch.",
                self._order.total,
                self.schedule.sizes[0],
            )

    def _get_shard_lengths(self) -> RecordIds:
        sharded = find(self.source, hooks.Sharded)
        if sharded is None:
            raise SettingsError(
                "shuffle='shards' needs a source whose files are downloaded whole (ArrayRecord, MDS, Parquet, TFDS, "
                "Tokens, WebDataset, and Map, Padded, Packed, Buckets, Mixture and views over them, in the order of the "
                f"files); this one is of kind {kind_of(self.source)!r}. Pass shuffle=True, or a number of records per block.",
                setting="shuffle",
            )
        return sharded.shard_lengths()

    def _num_lanes(self, num_shards: int, saved: JsonValue) -> int:
        """The number of lanes for ``shuffle="shards"``: from the settings, else from the state, else the default."""
        sizes = self.schedule.sizes
        chosen = self._settings.num_lanes
        num_lanes = chosen or (default_num_lanes(sizes, num_shards) if saved is None else saved)
        if isinstance(num_lanes, int) and num_lanes >= 1 and math.gcd(*sizes) % num_lanes == 0:
            return num_lanes
        expected = f"every global batch size, here {', '.join(map(str, sorted(sizes)))}"
        if chosen is None:
            remedy = "Choose batch sizes that the saved number of lanes divides."
            raise StateMismatchError("num_lanes", saved, f"a divisor of {expected}", remedy)
        raise SettingsError(f"num_lanes={chosen}; it must divide {expected}.", setting="num_lanes")

    def _order_of(
        self, step_schedule: StepSchedule, saved_num_lanes: JsonValue = None, added: StagedWeights = ()
    ) -> RecordOrder:
        settings, shards = self._settings, self._shards
        num_lanes = None
        if self._shard_lengths is not None:
            num_lanes = self._num_lanes(int(np.count_nonzero(self._shard_lengths)), saved_num_lanes)
        shuffle = shards or cast("bool | int", settings.shuffle)
        if self._numbering is not None:
            mixture = find(self._numbering, hooks.TakesWeights) if added else None
            numbering = self._numbering if mixture is None else cast("hooks.NumbersRecords", mixture.with_added(added))
            return numbering.make_order(
                shuffle=shuffle,
                seed=settings.seed,
                num_epochs=settings.num_epochs,
                batch_sizes=self.schedule.sizes,
                position_of_step=step_schedule.position_of_step,
                segments=step_schedule.runs(),
                num_lanes=num_lanes,
            )
        if self._shard_lengths is not None:
            assert shards is not None
            assert num_lanes is not None
            return ShardOrder(
                self._shard_lengths,
                shuffle=shards,
                num_lanes=num_lanes,
                seed=settings.seed,
                num_epochs=settings.num_epochs,
                segments=step_schedule.runs(),
            )
        assert not isinstance(shuffle, ShardShuffle)
        return EpochOrder(len(self.source), shuffle=shuffle, seed=settings.seed, num_epochs=settings.num_epochs)

    def fingerprint(self, cursor: RandomAccessCursor) -> dict[str, JsonValue]:
        """Source, order, epochs and end; for a mixture also its stages, which begin at steps of the step schedule."""
        config = dict(cursor.order.config())
        return {
            "source": self._identity,
            "order": {"algorithm": config.pop("algorithm"), "version": config.pop("version")},
            **config,
            "num_epochs": self._settings.num_epochs,
            "end": self._settings.end,
        }

    def start(self, like: RandomAccessCursor | None = None) -> RandomAccessCursor:
        """Returns the cursor at step 0, position 0; keeps the number of lanes and the added stages of ``like``."""
        config = {} if like is None else like.order.config()
        return self._start_with(config.get("num_lanes"), parse_added(config.get("mixture")))

    def _start_with(self, num_lanes: JsonValue, added: StagedWeights = ()) -> RandomAccessCursor:
        step_schedule = StepSchedule(self.schedule)
        unchanged = num_lanes is None and not added
        order = self._order if unchanged else self._order_of(step_schedule, num_lanes, added)
        return RandomAccessCursor(step_schedule, 0, 0, order)

    def with_stage(self, cursor: RandomAccessCursor, from_step: object, weights: object) -> RandomAccessCursor:
        """See :class:`meshfeed._src.streams.protocol.FeedStream`."""
        mixture = find(self.source, hooks.TakesWeights)
        if mixture is None:
            raise not_a_mixture(kind_of(self.source))
        config = cursor.order.config()
        added = add_stage(parse_added(config.get("mixture")), cursor.step, from_step, mixture.check_weights(weights))
        order = self._order_of(cursor.step_schedule, config.get("num_lanes"), added)
        if order.total is not None and order.total < cursor.position:
            raise SettingsError(
                f"weights={weights!r} from step {added[-1][0]}: every component of the last stage has been read num_epochs="
                f"{self._settings.num_epochs} times already, so the mixture would have ended before this step. Name a "
                "component that has not, or make the feed with more epochs.",
                setting="weights",
            )
        # A padded batch was the last one: it cannot have had more records in hindsight.
        if cursor.step_schedule.position_of_step(cursor.step) > cursor.position != order.total:
            raise SettingsError(
                f"weights={weights!r} from step {added[-1][0]}: the mixture has ended with a padded batch, after "
                f"{cursor.position:,} records, and with these weights it would have "
                f"{'no end' if order.total is None else f'{order.total:,} records'}. Call set_weights before its last "
                "batch, or reset() first.",
                setting="weights",
            )
        return dataclasses.replace(cursor, order=order)

    def _schedule_after(self, past: tuple[Segment, ...], step: int) -> StepSchedule:
        # After a padded batch, which is the last one, this is beyond the end, as in a feed that has not been restored.
        return StepSchedule(self.schedule, past=past, step=step, position=position_at(past, step))

    def restore(self, state: FeedState) -> RandomAccessCursor:
        """Returns the cursor at the state's position, in O(1)."""
        num_lanes = state.fingerprint.get("num_lanes") if self._shard_lengths is not None else None
        saved = dataclasses.replace(state, fingerprint=with_usual(state.fingerprint))
        mixture = check_fingerprint(saved, with_usual(self.fingerprint(self._start_with(num_lanes))), self.source)
        segments, position = parse_segments(state.segments), state.position
        order = self._order
        if self._numbering is not None or self._shard_lengths is not None:  # the order depends on the steps
            # The end of the stream follows from the order, which follows from the step: any position may be the end.
            step = derive_step(segments, position, position, pad=self._pad)
            step_schedule = self._schedule_after(segments, step)
            order = self._order_of(step_schedule, num_lanes, self._added_in(mixture))
            staged = find(order, hooks.ChecksSaved)
            if staged is not None:
                staged.check_saved(mixture, position, step)
        # With fewer epochs than at the save, a position past the end is valid: the stream has ended.
        beyond = order.total is not None and position > order.total
        if beyond and self._settings.num_epochs == state.fingerprint.get("num_epochs"):
            raise StateMismatchError("position", position, f"at most {order.total}", DAMAGED_STATE)
        step = derive_step(segments, position, order.total, pad=self._pad)
        return RandomAccessCursor(
            self._schedule_after(segments, step),
            step,
            position,
            order,
            skipped=Ledgers.of_state(state),
            num_skipped=count_skipped(state),
        )

    def _added_in(self, mixture: JsonValue) -> StagedWeights:
        """The stages that a feed had added to the mixture of a state."""
        added, here = parse_added(mixture), find(self.source, hooks.TakesWeights)
        if here is not None:
            check_added(added, here.check_weights)
        return added

    def replay_from(self, current: RandomAccessCursor, step: int, state: FeedState | None) -> RandomAccessCursor:
        """Returns the cursor at ``step``; needs no state."""
        del state
        self._check_step(current, step)
        return dataclasses.replace(current, step=step, position=current.step_schedule.at(step)[0])

    def state(self, cursor: RandomAccessCursor) -> FeedState:
        """Returns the state, which is the same on every host."""
        return cursor.to_state(self.kind, self.fingerprint(cursor))

    def take_over(self, current: RandomAccessCursor, state: FeedState, host_rows: HostRows) -> RandomAccessCursor:
        """Returns the cursor at the state's position, in O(1)."""
        del current, host_rows
        return self.restore(state)

    def records_after(self, cursor: RandomAccessCursor, step: int, ended: Mapping[int, int]) -> int:
        """Returns the records of the stream up to and including ``step``."""
        del ended
        position, size = cursor.step_schedule.at(step)
        total = cursor.order.total
        return position + size if total is None else min(position + size, total)

    def num_steps(self, cursor: RandomAccessCursor) -> int | None:
        """Computed from the source's length: the same on all hosts, with no cross-host communication."""
        total = cursor.order.total
        return None if total is None else cursor.step_schedule.num_steps(total, pad=self._pad)

    def _check_step(self, cursor: RandomAccessCursor, step: int) -> None:
        last = self.num_steps(cursor)
        if step < 0 or (last is not None and step >= last):
            steps = "begins at step 0" if last is None else f"has {last} steps (0 to {last - 1})"
            raise IndexError(f"step {step} is not in this stream, which {steps}.")

    def record_ids(self, cursor: RandomAccessCursor, step: int) -> RecordIds:
        """See :class:`meshfeed._src.streams.protocol.FeedStream`."""
        self._check_step(cursor, step)
        start, stop = cursor.step_schedule.at(step)[0], self.records_after(cursor, step, {})
        return batch_ids(cursor.order, start, stop, self.balance)[0]

    def read(self, record_ids: object) -> PyTree:
        """See :class:`meshfeed._src.streams.protocol.FeedStream`."""
        ids = np.asarray(record_ids)
        if not ids.size:
            return self.record_spec().zeros(0)
        if ids.ndim > 1 or ids.dtype.kind not in "iu":
            raise SettingsError(
                f"read({record_ids!r}); it takes record ids, a sequence of ints or an int array [n].",
                setting="record_ids",
            )
        ids = ids.astype(np.int64).reshape(-1)
        if self._numbering is not None:
            self._numbering.check_record_ids(ids)
        elif ids.min() < 0 or ids.max() >= len(self.source):
            bad = int(ids[(ids < 0) | (ids >= len(self.source))][0])
            raise SourceError(
                f"record id {bad} is not in the source, which has the ids 0 to {len(self.source) - 1}.", record_id=bad
            )
        return self.records.read(ids, np.zeros(ids.size, np.int64)).tree

    def describe_batch(self, batch: HostBatch) -> dict[str, JsonValue]:
        """Record ids of this host's rows, and the files that contain them."""
        ids: list[int] = [] if batch.record_ids is None else batch.record_ids.tolist()
        paths = dict.fromkeys(file_of(self.source, record_id) for record_id in ids)
        return {"record_ids": ids, "files": [without_signatures(path) for path in paths if path]}

    def record_spec(self, cursor: RandomAccessCursor | None = None) -> RecordSpec:
        """Returns the structure of the first record, or of the next step if the source has records of several shapes."""
        last = None if cursor is None else self.num_steps(cursor)
        if cursor is None or not self.records.several_shapes or (last is not None and cursor.step >= last):
            return self.records.spec()
        return spec_at(self.records, cursor.order, cursor.step_schedule.at(cursor.step)[0])

    def open_reader(self, cursor: RandomAccessCursor, host_rows: HostRows, *, hosts_agree: bool) -> RandomAccessReader:
        """Opens the data at a cursor."""
        del hosts_agree
        return RandomAccessReader(
            self.records, cursor, host_rows, self._settings, balance=self.balance, num_steps=self.num_steps(cursor)
        )
