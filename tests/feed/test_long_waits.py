"""A wait for data that is too long: the log, the report and the error show what hangs, and where."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.agreement.windows import WindowAgreement
from meshfeed._src.feed import pipeline
from meshfeed._src.feed.pipeline import Pipeline
from meshfeed._src.monitoring.exporters import read_logs
from meshfeed._src.pictures.report import report_figures, report_page


class DeadDisk:
    """Reads of a record that hang, in a file that is known."""

    def __init__(self, gate: threading.Event | None, at: int = 24) -> None:
        self._gate, self._at = gate, at

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> Any:
        if record_id == self._at:
            self._hang_in_the_dead_disk()
        return {"x": np.float32(record_id)}

    def _hang_in_the_dead_disk(self) -> None:
        if self._gate is not None:
            self._gate.wait()
        else:  # in a worker, which is ended by its parent
            threading.Event().wait()

    def file_of(self, record_id: int) -> str:
        return f"/data/part-{record_id // 32}"

    def fingerprint(self) -> str:
        return "dead disk"


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def feed_of(source: Any, **options: Any) -> meshfeed.Feed:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.Feed(source, mesh, global_batch_size=8, name="train", **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"num_threads": 2}, {"num_workers": 1}, {"num_workers": "auto", "num_threads": "auto"}]
)
def test_the_log_names_records_file_and_stack_and_so_does_the_report(
    options: dict[str, Any],
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.setattr(pipeline, "late_seconds", lambda timeout: 0.5)
    feed = feed_of(DeadDisk(None if options.get("num_workers") == 1 else gate), **options)
    exporter = meshfeed.monitoring.log(feed, tmp_path)
    for _ in range(3):
        next(feed)

    def take() -> None:
        with contextlib.suppress(meshfeed.MeshfeedError):  # closed meanwhile
            next(feed)

    taking = threading.Thread(target=take)
    taking.start()
    deadline = time.monotonic() + 60
    while not (found := [text for text in caplog.messages if "for step 3: " in text and "_hang_in" in text]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert re.match(r"waited \d+ s for step 3: this host is ", found[0])
    assert "step 3 (records 24, 25, 26, 27, 28, 29, 30, 31; /data/part-0) for " in found[0]
    assert "in _hang_in_the_dead_disk" in found[0]
    exporter.close()
    gate.set()
    feed.close()
    taking.join()

    figures = report_figures(read_logs([tmp_path]))
    json.dumps(figures)
    stalls = figures["feeds"][0]["hosts"][0]["stalls"]
    assert stalls[-1]["step"] == 3
    assert "/data/part-0" in stalls[-1]["what"]
    page = report_page(figures)
    assert "Long waits" in page
    assert "in _hang_in_the_dead_disk" in page
    feed.report(tmp_path / "own.html")
    assert "in _hang_in_the_dead_disk" in (tmp_path / "own.html").read_text()


def test_a_run_without_long_waits_has_no_such_section(tmp_path: pathlib.Path) -> None:
    with feed_of(DeadDisk(None, at=-1)) as feed:
        list(feed)
        feed.report(tmp_path / "report.html")
        assert feed.stats().batches == 8
    assert "Long waits" not in (tmp_path / "report.html").read_text()


def test_the_error_has_the_stacks_too(gate: threading.Event) -> None:
    feed = feed_of(DeadDisk(gate, at=0), timeout_seconds=1)
    with pytest.raises(meshfeed.StalledError) as caught:
        next(feed)
    assert any("in _hang_in_the_dead_disk" in note for note in caught.value.__notes__)
    gate.set()
    feed.close()


def test_a_source_that_hangs_while_it_is_opened_is_shown_too(gate: threading.Event) -> None:
    def open_lane(lane_index: int, num_lanes: int) -> Any:
        gate.wait()
        return iter([])

    feed = feed_of(meshfeed.sources.Stream(open_lane), num_lanes=1, timeout_seconds=1)
    with pytest.raises(meshfeed.StalledError) as caught:
        next(feed)
    assert any("in open_lane" in note for note in caught.value.__notes__)
    gate.set()
    feed.close()


def test_a_read_is_published_once_it_has_lasted_half_as_long_as_other_hosts_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: list[float] = []

    class Agreement(WindowAgreement):
        def __init__(self) -> None: ...

        def publish_doing(self) -> None:
            published.append(now[0])

    now = [1000.0]
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pipeline, "late_seconds", lambda timeout: 60.0)
    feed = SimpleNamespace(
        _reading_since=1000.0, _closed=False, _agreement=Agreement(), _to_tell=None, _timeout_seconds=240
    )
    for second in range(1000, 1101):
        now[0] = float(second)
        Pipeline.tell_if_late(feed)  # type: ignore[arg-type]
    assert published == [1030.0, 1060.0]  # and then after 120 s
    feed._reading_since = None
    Pipeline.tell_if_late(feed)  # type: ignore[arg-type]
    published.clear()
    feed._reading_since = now[0]
    for second in range(1101, 1133):
        now[0] = float(second)
        Pipeline.tell_if_late(feed)  # type: ignore[arg-type]
    assert published == [1130.0]
