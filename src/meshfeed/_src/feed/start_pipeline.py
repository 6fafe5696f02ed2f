"""A pipeline put together with the agreement that holds it back, for one generation of a feed."""

from __future__ import annotations

from typing import Any

from meshfeed._src.agreement.window_report import Exchange
from meshfeed._src.agreement.windows import WindowAgreement
from meshfeed._src.arrays.replicas import blocks_of
from meshfeed._src.base import coordination
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.stats import StatsRecorder
from meshfeed._src.feed.pipeline import HOST_READ_AHEAD_BYTES, Pipeline
from meshfeed._src.reading.records import reads_columns
from meshfeed._src.streams.protocol import Feeder, HostRows, Place


def make_pipeline(
    feeder: Feeder,
    *,
    course: Any,
    layout: Any,
    place: Place,
    host_rows: HostRows,
    settings: FeedSettings,
    stats: StatsRecorder,
    name: str,
    scope: str | None,
) -> Pipeline:
    """Puts together what reads from ``place`` on; nothing runs before its first ``peek``.

    Args:
      feeder: opened at ``place``; the pipeline closes it.
      course: of the feed. Like everything else that the pipeline gets it must not hold the feed, which ends the pipeline
        when it is dropped.
      layout: of the feed.
      place: the next step.
      host_rows: this host's rows.
      settings: of the feed.
      stats: figures are added here.
      name: of the feed.
      scope: prefix of keys, unique to this generation; None where there are no other hosts.
    """
    in_columns = reads_columns(getattr(course, "source", None))
    exchange = Exchange(
        first_step=place.step,
        bad_records=settings.bad_records,
        blocks_of=blocks_of(layout) if settings.check_replicas else None,
        num_rows=lambda size: len(host_rows.rows(size)),
        num_skipped=place.num_skipped,
        records_after=lambda step, ended: course.records_after(place, step, ended),
        compare_records=not in_columns,
        compare_sizes=course.kind == "host_batches",
        largest_batch=0 if settings.schedule is None else max(settings.schedule.sizes),
    )
    agreement = None
    if scope is not None:
        agreement = WindowAgreement(
            coordination.require_store(),
            scope=scope,
            participants=layout.participants,
            host=coordination.process_index(),
            first_step=place.step,
            pad=settings.end == "pad" and course.kind != "random_access",
            byte_limit=HOST_READ_AHEAD_BYTES,
            timeout_seconds=settings.timeout_seconds,
            describe=feeder.describe,
            judge=exchange.judge,
        )
    return Pipeline(
        feeder,
        layout.put,
        prefetch=settings.prefetch,
        agreement=agreement,
        exchange=exchange,
        place=place,
        advance=course.advance,
        timeout_seconds=settings.timeout_seconds,
        stats=stats,
        name=name,
        host=coordination.process_index(),
    )
