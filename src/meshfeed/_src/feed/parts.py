"""The parts of a feed: the stream of its source, and the pipeline of each of its generations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from meshfeed._src.agreement.followers import Follower, Summary
from meshfeed._src.agreement.handover import Handover
from meshfeed._src.agreement.window_report import WindowReports
from meshfeed._src.agreement.windows import WindowAgreement
from meshfeed._src.arrays.placer import Placer
from meshfeed._src.base import coordination
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.hooks import is_stream
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.stacks import feed_stacks
from meshfeed._src.base.stats import StatsRecorder
from meshfeed._src.base.types import PyTree
from meshfeed._src.feed.pipeline import Pipeline, PrefetchDepth
from meshfeed._src.plan.plan import HostRows
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


def check_can_follow(stream: AnyStream, participants: Sequence[int]) -> None:
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


def make_pipeline(
    reader: AnyReader,
    *,
    stream: AnyStream,
    placer: Placer,
    cursor: Cursor,
    host_rows: HostRows,
    settings: FeedSettings,
    prefetch: PrefetchDepth,
    stats: StatsRecorder,
    name: str,
    scope: str,
    round: int,
    origin: int,
    hosts_agree: bool,
    follows: bool,
) -> Pipeline:
    """Builds the pipeline that reads from ``cursor``. No thread starts before its first ``peek``.

    No argument may reference the feed: garbage collection of the feed closes the pipeline, and a reference from the
    pipeline would keep the feed alive.

    Args:
      reader: opened at ``cursor``; the pipeline closes it.
      stream: the feed's stream.
      placer: the feed's placer.
      cursor: where to start.
      host_rows: this host's rows.
      settings: the feed's settings.
      prefetch: the number of batches to keep ready.
      stats: records read times and retries.
      name: name of the feed.
      scope: key prefix, unique to the feed.
      round: number of this generation, counted alike by hosts that only follow.
      origin: step of the state that the feed was last set to.
      hosts_agree: whether there are other hosts to agree with.
      follows: whether this host follows the hosts that read.
    """
    window_reports = WindowReports(
        first_step=cursor.step,
        bad_records=settings.bad_records,
        blocks_of=placer.blocks if settings.check_replicas else None,
        num_rows=lambda size: len(host_rows.rows(size)),
        num_skipped=cursor.num_skipped,
        records_after=lambda step, ended: stream.records_after(cursor, step, ended),
        compare_records=not stream.in_columns,
        compare_sizes=stream.hosts_make_batches,
        largest_batch=0 if settings.schedule is None else max(settings.schedule.sizes),
        learn_batch=functools.partial(_learn, stream, settings.mask_key),
    )
    agreement: WindowAgreement | Follower | None = None
    handover: Handover | None = None
    num_followers = coordination.process_count() - len(placer.participants)
    if follows:
        agreement = Follower(
            coordination.require_store(),
            scope=scope,
            generation=round,
            participants=placer.participants,
            num_followers=num_followers,
            first_step=cursor.step,
            timeout_seconds=settings.timeout_seconds,
        )
    elif hosts_agree:
        store = coordination.require_store()
        can_follow = num_followers > 0 and not stream.length_is_known and not stream.hosts_make_batches
        agreement = WindowAgreement(
            store,
            scope=f"{scope}/{round}",
            participants=placer.participants,
            host=coordination.process_index(),
            first_step=cursor.step,
            pad=settings.end == "pad" and not stream.length_is_known,
            byte_limit=_HOST_READ_AHEAD_BYTES,
            timeout_seconds=settings.timeout_seconds,
            describe=reader.describe,
            reduce=window_reports.reduce,
            stacks=feed_stacks,
            on_stall=stats.stalled,
            summary=Summary(store, scope, round) if can_follow else None,
        )
        handover = Handover(
            store,
            scope=scope,
            host=coordination.process_index(),
            num_hosts=len(placer.participants),
            cursor=cursor,
            state=stream.state(cursor),
            to_json=stream.handover,
            prefetch=prefetch.depth,
            origin=origin,
        )
    return Pipeline(
        reader,
        placer.put,
        prefetch=prefetch,
        agreement=agreement,
        window_reports=window_reports,
        handover=handover,
        check=placer.check,
        cursor=cursor,
        timeout_seconds=settings.timeout_seconds,
        stats=stats,
        name=name,
        host=coordination.process_index(),
    )


def replay_step(stream: FeedStream[C], cursor: C, step: int) -> PyTree:
    """Reads all rows of one global batch, on this host alone.

    Args:
      stream: the feed's stream.
      cursor: a cursor at or before the step, with all lanes; a stream is read from there to the step.
      step: index of the batch.

    Returns:
      A pytree of host-local arrays ``[global_batch_size, ...]``, including padding and mask.

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
