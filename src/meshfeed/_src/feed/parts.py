"""The parts of a feed: the stream of its source, its place in a sharding, and the pipeline of each of its generations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from meshfeed._src.agreement.followers import Follower, Summary
from meshfeed._src.agreement.handover import Handover
from meshfeed._src.agreement.handshake import agreed_settings
from meshfeed._src.agreement.window_report import WindowReports
from meshfeed._src.agreement.windows import WindowAgreement
from meshfeed._src.arrays.placer import Placer
from meshfeed._src.base import coordination
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.hooks import is_stream
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.stacks import feed_stacks
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.feed.membership import Membership
from meshfeed._src.feed.pipeline import Pipeline, PrefetchDepth
from meshfeed._src.feed.recorder import StatsRecorder
from meshfeed._src.feed.sizing import Sizer
from meshfeed._src.plan.plan import HostRows, normalize_sharding, participants
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.recognize import as_source
from meshfeed._src.streams.lane_stream import LaneStream
from meshfeed._src.streams.local_batches import LocalBatchStream, RowShards
from meshfeed._src.streams.protocol import AnyReader, AnyStream, C, Cursor, FeedStream
from meshfeed._src.streams.random_access import RandomAccessStream

_HOST_READ_AHEAD_BYTES = 1 << 30  # host memory for the two windows that are read ahead


@dataclasses.dataclass(frozen=True)
class SourceFactory:
    """Passed as a source: the feed calls ``make``, so that the other hosts are told if it fails on one."""

    make: Callable[[], object]


def make_stream(source: object, settings: FeedSettings, shards: RowShards) -> AnyStream:
    """Recognizes the kind of ``source`` and returns its stream.

    Raises:
      SourceError: the source is of an unsupported type; the message lists the supported ones.
      SettingsError: a setting does not apply to this kind of source.
    """
    recognized = as_source(source.make() if isinstance(source, SourceFactory) else source)
    if settings.balance is not None and (isinstance(recognized, HostBatches) or is_stream(recognized)):
        raise SettingsError(
            f"balance={settings.balance!r} needs a random-access source, which has the lengths of records before they are "
            "read. Omit it, or pack random-access documents with Packed.",
            setting="balance",
        )
    if isinstance(recognized, HostBatches):
        return LocalBatchStream(recognized, settings, shards)
    if is_stream(recognized):
        return LaneStream(recognized, settings)
    return RandomAccessStream(recognized, settings)


def _learn(stream: AnyStream, mask_key: str | None, batch: PyTree) -> None:
    """Gives a stream of host batches the structure that the other hosts announced, without the mask."""
    if isinstance(stream, LocalBatchStream):
        stream.learn({key: leaf for key, leaf in batch.items() if key != mask_key} if mask_key is not None else batch)


def _check_can_follow(stream: AnyStream, participants: Sequence[int]) -> None:
    """Checks that a host without a device in the sharding can follow the hosts that read a stream.

    Raises:
      SettingsError: it cannot, because it would have batches of its own, or nobody announces how far the stream is.
    """
    here = f"sharding has no device of this host, {coordination.process_index()}"
    if stream.hosts_make_batches:
        raise SettingsError(
            f"{here}, so the host batches that it makes belong to no row. Build the feed only on "
            f"{coordination.format_hosts(participants)}, or pass a source of records.",
            setting="sharding",
        )
    if len(participants) == 1:
        raise SettingsError(
            f"{here}: the stream is read by {coordination.format_hosts(participants)} alone, which does not announce its "
            "end. Build the feed only there, or pass a random-access source, whose length every host knows.",
            setting="sharding",
        )
    coordination.require_store()


@dataclasses.dataclass(frozen=True)
class FeedPlace:
    """What a sharding determines for a feed on this host.

    Attributes:
      placer: places batches in the sharding.
      host_rows: what this host reads.
      follows: whether this host only follows the hosts that read the stream.
    """

    placer: Placer
    host_rows: HostRows
    follows: bool


def take_place(placer: Placer, stream: AnyStream) -> FeedPlace:
    """Returns the place of a feed over a stream.

    Raises:
      SettingsError: this host has no device in the sharding, and cannot follow the hosts that have.
    """
    follows = not stream.length_is_known and coordination.process_index() not in placer.participants
    if follows:
        _check_can_follow(stream, placer.participants)
    return FeedPlace(placer, placer.host_rows(stream.record_spec if stream.in_columns else None), follows)


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a generation of a feed is made of.

    Nothing here may refer to the feed: garbage collection of the feed closes the generation, whose threads refer to this.
    """

    name: str
    settings: FeedSettings
    stream: AnyStream
    place: FeedPlace
    membership: Membership
    prefetch: PrefetchDepth
    stats: StatsRecorder
    sizer: Sizer | None
    cursor: Cursor  # where it begins
    origin: int  # step of the state that the feed was last set to
    taken: int | None  # see Handshake.agree

    def agreed(self) -> dict[str, JsonValue]:
        """Returns what must be equal on all hosts before the first batch."""
        fingerprint = self.stream.fingerprint(self.cursor) if self.membership.handshake.needed else {}
        placer = self.place.placer
        agreed = agreed_settings(self.settings, fingerprint, self.cursor, placer.layout)
        return {**agreed, "jax_enable_x64": placer.x64}

    def make_pipeline(self, reader: AnyReader) -> Pipeline:
        """Returns the pipeline of a reader that was opened at the cursor, and closes it. It starts no thread yet."""
        hosts_agree = self.membership.handshake.needed
        if self.sizer is not None:
            self.sizer.begin(reader, alone=not hosts_agree)
        agreement: WindowAgreement | Follower | None = None
        handover: Handover | None = None
        reports = self._window_reports()
        if self.place.follows:
            agreement = self._follower()
        elif hosts_agree:
            agreement, handover = self._window_agreement(reader, reports), self._handover()
        pipeline = Pipeline(
            reader,
            self.place.placer.put,
            prefetch=self.prefetch,
            agreement=agreement,
            window_reports=reports,
            handover=handover,
            check=self.place.placer.check,
            cursor=self.cursor,
            timeout_seconds=self.settings.timeout_seconds,
            stats=self.stats,
            name=self.name,
            host=coordination.process_index(),
        )
        self.membership.on_beat(pipeline.tell_if_late)
        return pipeline

    def _window_reports(self) -> WindowReports:
        settings, stream, cursor, place = self.settings, self.stream, self.cursor, self.place
        return WindowReports(
            first_step=cursor.step,
            bad_records=settings.bad_records,
            blocks_of=place.placer.blocks if settings.check_replicas else None,
            num_rows=lambda size: len(place.host_rows.rows(size)),
            num_skipped=cursor.num_skipped,
            records_after=lambda step, ended: stream.records_after(cursor, step, ended),
            compare_records=not stream.in_columns,
            compare_sizes=stream.hosts_make_batches,
            largest_batch=0 if settings.schedule is None else max(settings.schedule.sizes),
            learn_batch=functools.partial(_learn, stream, settings.mask_key),
        )

    @property
    def _num_followers(self) -> int:
        return coordination.process_count() - len(self.place.placer.participants)

    def _follower(self) -> Follower:
        return Follower(
            coordination.require_store(),
            scope=self.membership.scope,
            generation=self.membership.handshake.round,
            participants=self.place.placer.participants,
            num_followers=self._num_followers,
            first_step=self.cursor.step,
            timeout_seconds=self.settings.timeout_seconds,
        )

    def _window_agreement(self, reader: AnyReader, reports: WindowReports) -> WindowAgreement:
        store, scope, number = coordination.require_store(), self.membership.scope, self.membership.handshake.round
        stream = self.stream
        can_follow = self._num_followers > 0 and not stream.length_is_known and not stream.hosts_make_batches
        return WindowAgreement(
            store,
            scope=f"{scope}/{number}",
            participants=self.place.placer.participants,
            host=coordination.process_index(),
            first_step=self.cursor.step,
            pad=self.settings.end == "pad" and not stream.length_is_known,
            byte_limit=_HOST_READ_AHEAD_BYTES,
            timeout_seconds=self.settings.timeout_seconds,
            describe=reader.describe,
            reduce=reports.reduce,
            stacks=feed_stacks,
            on_stall=self.stats.stalled,
            summary=Summary(store, scope, number) if can_follow else None,
        )

    def _handover(self) -> Handover:
        return Handover(
            coordination.require_store(),
            scope=self.membership.scope,
            host=coordination.process_index(),
            num_hosts=len(self.place.placer.participants),
            cursor=self.cursor,
            state=self.stream.state(self.cursor),
            to_json=self.stream.handover,
            prefetch=self.prefetch.depth,
            origin=self.origin,
        )


def participants_of(sharding: PyTree) -> Sequence[int]:
    """Hosts with a device in the sharding. All hosts if ``sharding`` is invalid: any may be waiting for this one."""
    try:
        return participants(normalize_sharding(sharding))
    except Exception:  # make_placer raises it again
        return range(coordination.process_count())


def replay_step(stream: FeedStream[C], cursor: C, step: int) -> PyTree:
    """Returns all rows of one global batch, read on this host alone, including padding and mask.

    The cursor, at or before the step, has all lanes; a stream is read from there to the step.

    Raises:
      IndexError: the data ends before the step.
      StateMismatchError: ``cursor`` lacks lanes.
    """
    every_row = HostRows(lambda size: np.arange(size, dtype=np.int64), lambda size: None)
    reader = stream.open_reader(cursor, every_row, hosts_agree=False)
    try:
        while (batch := reader.next()).step < step:
            pass
        return batch.tree
    except StopIteration:
        raise IndexError(f"step {step} is not in this stream, which ends before it.") from None
    finally:
        reader.close()
