"""A pipeline put together with the agreement that holds it back, for one generation of a feed."""

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
    """Puts together what reads from ``cursor`` on; nothing runs before its first ``peek``.

    Args:
      reader: opened at ``cursor``; the pipeline closes it.
      stream: of the feed. Like everything else that the pipeline gets it must not hold the feed, which ends the pipeline
        when it is dropped.
      placer: of the feed.
      cursor: the next step.
      host_rows: this host's rows.
      settings: of the feed.
      stats: figures are added here.
      name: of the feed.
      scope: prefix of keys, unique to this generation; None where there are no other hosts.
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
