"""Builds the pipeline of one generation of a feed, with the agreement that gates its batches."""

from __future__ import annotations

from typing import Any

from meshfeed._src.agreement.window_report import WindowReports
from meshfeed._src.agreement.windows import WindowAgreement
from meshfeed._src.arrays.replicas import blocks_of
from meshfeed._src.base import coordination
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.stats import StatsRecorder
from meshfeed._src.feed.pipeline import HOST_READ_AHEAD_BYTES, Pipeline
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.records import reads_columns
from meshfeed._src.streams.protocol import Cursor, HostReader


def make_pipeline(
    reader: HostReader,
    *,
    stream: Any,
    placer: Any,
    cursor: Cursor,
    host_rows: HostRows,
    settings: FeedSettings,
    stats: StatsRecorder,
    name: str,
    scope: str | None,
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
      stats: records read times and retries.
      name: name of the feed.
      scope: key prefix, unique to this generation; None if there are no other hosts.
    """
    in_columns = reads_columns(getattr(stream, "source", None))
    window_reports = WindowReports(
        first_step=cursor.step,
        bad_records=settings.bad_records,
        blocks_of=blocks_of(placer) if settings.check_replicas else None,
        num_rows=lambda size: len(host_rows.rows(size)),
        num_skipped=cursor.num_skipped,
        records_after=lambda step, ended: stream.records_after(cursor, step, ended),
        compare_records=not in_columns,
        compare_sizes=stream.kind == "host_batches",
        largest_batch=0 if settings.schedule is None else max(settings.schedule.sizes),
    )
    agreement = None
    if scope is not None:
        agreement = WindowAgreement(
            coordination.require_store(),
            scope=scope,
            participants=placer.participants,
            host=coordination.process_index(),
            first_step=cursor.step,
            pad=settings.end == "pad" and stream.kind != "random_access",
            byte_limit=HOST_READ_AHEAD_BYTES,
            timeout_seconds=settings.timeout_seconds,
            describe=reader.describe,
            judge=window_reports.judge,
        )
    return Pipeline(
        reader,
        placer.put,
        prefetch=settings.prefetch,
        agreement=agreement,
        window_reports=window_reports,
        cursor=cursor,
        advance=stream.advance,
        timeout_seconds=settings.timeout_seconds,
        stats=stats,
        name=name,
        host=coordination.process_index(),
    )
