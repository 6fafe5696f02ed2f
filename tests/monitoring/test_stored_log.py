"""Logs and pages at URLs: the same figures as on a disk, in objects that are written again until they are full."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import click.testing
import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.base.errors import MeshfeedError
from meshfeed._src.base.stores import write_output
from meshfeed._src.cli.main import main
from meshfeed._src.monitoring import stored_log
from meshfeed._src.monitoring.exporters import read_logs
from meshfeed._src.monitoring.stored_log import StoredLog

URL = "memory://bucket/logs"


def make_feed(name: str) -> meshfeed.Feed:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.Feed({"x": np.arange(640)}, mesh, global_batch_size=16, num_epochs=None, name=name)


def run(*arguments: str) -> str:
    ended = click.testing.CliRunner().invoke(main, arguments)
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_a_run_and_the_one_after_a_restart(memory: Any, tmp_path: pathlib.Path) -> None:
    for count in (3, 2):
        with make_feed("train") as feed, meshfeed.monitoring.log(feed, URL, seconds=1000):
            for _ in range(count):
                next(feed)
            feed.report("memory://bucket/this-host.html")
    names = sorted(memory.find("/bucket/logs"))
    assert len(names) == 2
    assert all(name.startswith("/bucket/logs/train-host-00000-") and name.endswith("-00000.jsonl") for name in names)
    assert sorted(log.samples[-1].stats.batches for log in read_logs([URL])) == [2, 3]
    assert [len(read_logs([f"memory:/{name}"])) for name in names] == [1, 1]
    assert b"<html" in memory.cat_file("/bucket/this-host.html")

    memory.get("/bucket/logs", str(tmp_path / "logs"), recursive=True)
    assert json.loads(run("report", URL, "--json")) == json.loads(run("report", str(tmp_path / "logs"), "--json"))
    assert "wrote memory://bucket/report.html: 1 feed" in run("report", URL, "--output", "memory://bucket/report.html")
    assert b"<html" in memory.cat_file("/bucket/report.html")
    plan = ["plan", "--hosts", "2", "--devices-per-host", "1", "--mesh", "data=2", "--spec", "data"]
    pictures = [f"memory://bucket/plan.{suffix}" for suffix in ("svg", "html", "png")]
    options = [item for url in pictures for item in (f"--{url[-4:].strip('.')}", url)]
    run(*plan, "--global-batch-size", "4", *options)
    starts = [memory.cat_file(url.removeprefix("memory:/"))[:5] for url in pictures]
    assert starts == [b"<svg ", b"<!DOC", b"\x89PNG\r"]
    assert list(tmp_path.iterdir()) == [tmp_path / "logs"]


def test_objects_are_written_again_once_a_minute_until_they_are_full(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(stored_log.time, "monotonic", lambda: now)
    monkeypatch.setattr(stored_log, "_OBJECT_BYTES", 100)
    log = StoredLog(URL, "train-host-00000-r")

    def stored() -> dict[str, bytes]:
        return {path[-11:-6]: memory.cat_file(path) for path in memory.find("/bucket/logs")}

    log.add("1" * 40, now=False)  # the first at once: it shows whether the folder can be written
    assert stored() == {"00000": b"1" * 40 + b"\n"}
    now = 59.0
    log.add("2" * 40, now=False)
    assert len(stored()["00000"]) == 41
    log.add("3" * 40, now=True)  # it holds a stall
    assert len(stored()["00000"]) == 123
    log.add("4", now=False)
    assert list(stored()) == ["00000"]
    log.end()
    log.end()
    assert stored() == {"00000": b"%s\n%s\n%s\n" % (b"1" * 40, b"2" * 40, b"3" * 40), "00001": b"4\n"}
    files = stored_log.read_folder(URL)
    assert [content for _, content in stored_log.joined(files)] == [b"".join(stored().values())]


def test_a_store_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, memory: Any) -> None:
    def failing(url: str, *_: object, **__: object) -> None:
        raise MeshfeedError(f"{url}: busy")

    log = StoredLog(URL, "train-host-00000-r")
    log.add("1", now=True)
    with monkeypatch.context() as patch:
        patch.setattr(stored_log, "ask", failing)
        with pytest.raises(OSError, match=r"memory://bucket/logs/train-host-00000-r-00000.jsonl: busy"):
            log.add("2", now=True)
        with make_feed("train") as feed, pytest.raises(meshfeed.SettingsError, match=r"directory='memory://.*busy"):
            meshfeed.monitoring.log(feed, URL)
        log.add("2", now=False)  # the caller repeats what was not added
        log.end()
        assert "the last figures cannot be written" in caplog.text
    log.end()
    assert memory.cat_file("/bucket/logs/train-host-00000-r-00000.jsonl") == b"1\n2\n"
    with pytest.raises(meshfeed.SourceError, match="no figures in memory://bucket/none"):
        read_logs(["memory://bucket/none"])
    with pytest.raises(meshfeed.SettingsError, match="nothing://x/y: Protocol not known: nothing"):
        write_output("output", "nothing://x/y", "text")


def test_a_second_log_of_a_feed_keeps_the_objects_of_the_first(memory: Any) -> None:
    """As when a notebook's cell is run again."""
    with make_feed("train") as feed:
        for count in (5, 3):
            with meshfeed.monitoring.log(feed, URL, seconds=1000):
                for _ in range(count):
                    next(feed)
    (found,) = read_logs([URL])
    assert [sample.stats.batches for sample in found.samples] == [0, 5, 5, 8]
