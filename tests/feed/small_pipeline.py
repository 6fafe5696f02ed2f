"""A pipeline over numbered batches, without devices: for tests of what holds batches back and hands them on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from meshfeed._src.agreement.window_report import WindowReports
from meshfeed._src.agreement.windows import WindowAgreement
from meshfeed._src.feed.pipeline import Pipeline, PrefetchDepth
from meshfeed._src.feed.recorder import StatsRecorder
from meshfeed._src.streams.protocol import HostBatch


class Numbers:
    """Batches of 4 rows for ever, and an error where one is asked for."""

    sequential, empty = True, False

    def __init__(self, bad_step: int | None = None) -> None:
        self.step, self.bad_step = 0, bad_step

    def next(self) -> HostBatch:
        if self.step == self.bad_step:
            raise RuntimeError("the disk is on fire")
        self.step += 1
        return HostBatch(self.step - 1, 4, {"x": np.zeros(4)}, 32)

    def advance(self, cursor: Position, batch: HostBatch, ended: object, num_skipped: int) -> Position:
        return Position(batch.step + 1)

    def rewind(self, step: int) -> None:
        pass

    def final(self) -> int | None:
        return None

    def describe(self) -> str:
        return "reading"

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Position:
    """A cursor that knows its step only."""

    step: int
    num_skipped: int = 0


def new_window_reports(**settings: Any) -> WindowReports:
    """Of batches that are held whole, from step 0 on."""
    return WindowReports(first_step=0, bad_records=None, blocks_of=None, num_rows=lambda size: size, **settings)


def numbers_pipeline(
    agreement: WindowAgreement | None,
    window_reports: WindowReports,
    *,
    host: int = 0,
    prefetch: int = 2,
    bad_step: int | None = None,
) -> Pipeline:
    """From step 0, started; arrays are the host's own."""
    pipeline = Pipeline(
        Numbers(bad_step),
        lambda tree, size: tree,
        prefetch=PrefetchDepth(prefetch, "numbers"),
        agreement=agreement,
        window_reports=window_reports,
        cursor=Position(0),
        timeout_seconds=30,
        stats=StatsRecorder(),
        name=f"host-{host}",
        host=host,
    )
    pipeline.start()
    return pipeline
