"""HostReader, agreement and caller put together, with announcements written by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small_pipeline import new_window_reports, numbers_pipeline

from meshfeed._src.agreement.messages import Announcement, Stop
from meshfeed._src.agreement.windows import WindowAgreement
from meshfeed._src.base.errors import Failure
from meshfeed._src.streams.protocol import HostBatch


class Store:
    """A key-value store in which the announcements of host 0 are there already."""

    def __init__(self, announcements: list[Announcement]) -> None:
        self.values = {
            f"meshfeed/test/{number}/out": json.dumps({"result": announcement.to_json()})
            for number, announcement in enumerate(announcements)
        }

    def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
        self.values[key] = value

    def get(self, key: str, seconds: float) -> str | None:
        return self.values.get(key)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_failing_host_raises_its_own_error_where_all_stopped_before_it(prefetch: int) -> None:
    # host 0 was too late to wait for
    stop = Stop(2, [Failure("RuntimeError", "the disk is on fire", 1)])
    agreement = WindowAgreement(
        Store([Announcement(1, 8), Announcement(2, 8), Announcement(2, 8, stop)]),  # type: ignore[arg-type]
        scope="test",
        participants=(0, 1),
        host=1,
        first_step=0,
        pad=False,
        byte_limit=1 << 30,
        timeout_seconds=30,
        describe=lambda: "reading",
        reduce=lambda reports, first, end: ({}, None),
    )
    pipeline = numbers_pipeline(agreement, new_window_reports(), host=1, prefetch=prefetch, bad_step=3)
    for step in range(2):
        ready = pipeline.peek()
        assert ready.batch.step == step
        pipeline.pop(ready)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the disk is on fire"):
            pipeline.peek()
    pipeline.close()


def test_windows_leave_room_for_the_largest_batch_of_a_schedule() -> None:
    window_reports = new_window_reports(largest_batch=1024)
    contents = window_reports.contents([HostBatch(0, 4, {"x": np.zeros(4)}, 32)])
    assert contents["bytes"] == 1024 * 8
