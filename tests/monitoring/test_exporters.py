"""Exporters: the log, Prometheus over HTTP, TensorBoard's event files."""

from __future__ import annotations

import gc
import json
import math
import os
import pathlib
import signal
import threading
import urllib.request
import weakref
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import meshfeed
from meshfeed._src.base.stats import Sample, Stall
from meshfeed._src.monitoring import exporters
from meshfeed._src.monitoring.exporters import _to_json, read_logs


def make_feed(name: str) -> meshfeed.Feed:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return meshfeed.Feed({"x": np.arange(640)}, mesh, global_batch_size=8, name=name)


@pytest.fixture
def feed() -> Iterator[meshfeed.Feed]:
    with make_feed("train") as feed:
        yield feed


def take(feed: meshfeed.Feed, number: int) -> None:
    for _ in range(number):
        next(feed)


# ---------------------------------------------------------------------- the log


def test_the_log_has_the_first_and_the_last_figures(feed: meshfeed.Feed, tmp_path: pathlib.Path) -> None:
    with meshfeed.monitoring.log(feed, tmp_path / "logs", seconds=1000):
        take(feed, 5)
    (path,) = (tmp_path / "logs").iterdir()
    assert path.name == "train-host-00000.jsonl"
    first, last = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["batches"], last["batches"], last["step"], last["position"]) == (0, 5, 5, 40)
    assert (last["feed"], last["host"], last["run"]) == ("train", 0, first["run"])
    assert last["wait_seconds"] == pytest.approx(feed.stats().wait_seconds, abs=1e-6)
    (log,) = read_logs([tmp_path / "logs"])
    assert (log.feed, log.host) == ("train", 0)
    assert log.samples[-1].stats.batches == 5


def test_each_stall_is_written_once(feed: meshfeed.Feed) -> None:
    one, two = (Stall(time=step, step=step, waited_seconds=9.0, what="host 1 is late", stacks="") for step in (3, 4))
    first = Sample(1.0, 3, 24, feed.stats(), {}, (one,))
    later = Sample(2.0, 4, 32, feed.stats(), {}, (one, two))
    assert [stall["step"] for stall in _to_json(None, first, "train", 0)["stalls"]] == [3]  # type: ignore[union-attr,index]
    assert [stall["step"] for stall in _to_json(first, later, "train", 0)["stalls"]] == [4]  # type: ignore[union-attr,index]
    assert "stalls" not in _to_json(later, later, "train", 0)


def test_a_second_run_appends_and_stays_apart(tmp_path: pathlib.Path) -> None:
    for _ in range(2):
        with make_feed("train") as feed, meshfeed.monitoring.log(feed, tmp_path, seconds=1000):
            take(feed, 3)
    assert [log.samples[-1].stats.batches for log in read_logs([tmp_path])] == [3, 3]


def test_feeds_of_one_name_at_the_same_time_are_two_runs(tmp_path: pathlib.Path) -> None:
    log = meshfeed.monitoring.log
    with make_feed("train") as one, make_feed("train") as two:
        for number in range(1, 4):
            with log(one, tmp_path, seconds=1000), log(two, tmp_path, seconds=1000):
                take(one, 1)
                take(two, number)
    assert [log.samples[-1].stats.batches for log in read_logs([tmp_path])] == [3, 6]


def test_lines_that_two_exporters_wrote_in_another_order_are_put_in_order(tmp_path: pathlib.Path) -> None:
    with make_feed("train") as feed:
        for _ in range(2):
            with meshfeed.monitoring.log(feed, tmp_path, seconds=1000):
                take(feed, 6)
    (path,) = tmp_path.iterdir()
    path.write_text("\n".join(reversed(path.read_text().splitlines())) + "\n")
    (log,) = read_logs([path])
    assert [sample.stats.batches for sample in log.samples] == [0, 6, 6, 12]


def test_half_a_line_of_a_killed_process_is_left_out_and_other_damage_is_named(tmp_path: pathlib.Path) -> None:
    with make_feed("train") as feed, meshfeed.monitoring.log(feed, tmp_path, seconds=1000):
        take(feed, 3)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    last = whole.splitlines()[-1]
    stall = json.dumps({**json.loads(last), "stalls": [vars(Stall(1.0, 3, 9.0, "host 1 is late", "{x}"))]})
    for half in (last[:40], last[:-1], stall[:-2]):
        path.write_text(whole + half)
        assert [log.samples[-1].stats.batches for log in read_logs([path])] == [3]
    with make_feed("train") as feed, meshfeed.monitoring.log(feed, tmp_path, seconds=1000):  # after a restart
        take(feed, 2)
    assert [log.samples[-1].stats.batches for log in read_logs([path])] == [3, 2]
    assert read_logs([f"file://{tmp_path}"]) == read_logs([path])  # as log() takes it
    assert read_logs([tmp_path, tmp_path / "." / ".." / tmp_path.name, path]) == read_logs([path])
    path.write_text(whole + '{"loss": 3}\n' + whole)
    with pytest.raises(meshfeed.SourceError, match=r"line 3 of .*train-host-00000.jsonl is not a line of"):
        read_logs([path])
    for name, value in (("host", "<b>"), ("step", None), ("records", "7"), ("cache", [1])):
        path.write_text(json.dumps({**json.loads(whole.splitlines()[0]), name: value}) + "\n")
        with pytest.raises(meshfeed.SourceError, match=r"line 1 of .* is not a line of a log"):
            read_logs([path])
    path.write_bytes(b"\x1f\x8b\xff")
    with pytest.raises(meshfeed.SourceError, match=r"is not text in UTF-8\. Pass the files or the folder that"):
        read_logs([path])
    with pytest.raises(meshfeed.SourceError, match="nowhere does not exist"):
        read_logs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(meshfeed.SourceError, match="no figures in"):
        read_logs([tmp_path / "empty"])


def test_a_long_log_is_thinned_and_its_totals_stay(tmp_path: pathlib.Path) -> None:
    with make_feed("train") as feed, meshfeed.monitoring.log(feed, tmp_path, seconds=1000):
        take(feed, 3)
    (path,) = tmp_path.iterdir()
    first, last = path.read_text().splitlines()
    path.write_text("\n".join([first] * 5000 + [last]) + "\n")
    (log,) = read_logs([path])
    assert len(log.samples) <= 1001
    assert log.samples[-1].stats.batches == 3


def test_exporters_refuse_what_they_cannot_export(feed: meshfeed.Feed, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(meshfeed.SettingsError, match="cannot be written"):
        meshfeed.monitoring.log(feed, tmp_path / "file")
    for seconds in (0, -1.5, True, "1"):
        with pytest.raises(meshfeed.SettingsError, match="Expected a positive number of seconds") as error:
            meshfeed.monitoring.log(feed, tmp_path, seconds=seconds)  # type: ignore[arg-type]
        assert error.value.setting == "seconds"
    with pytest.raises(meshfeed.SettingsError, match=r"is not a meshfeed\.Feed\. For a RemoteFeed, call its stats"):
        meshfeed.monitoring.log([1, 2], tmp_path)
    pytest.importorskip("tensorboardX")
    with pytest.raises(meshfeed.SettingsError, match=r"directory=.*file' cannot be written"):
        meshfeed.monitoring.tensorboard(feed, tmp_path / "file")
    with pytest.raises(meshfeed.SettingsError, match="directory='s3://bucket/logs' is a URL"):
        meshfeed.monitoring.tensorboard(feed, "s3://bucket/logs")


def test_a_forked_child_closes_no_exporter(feed: meshfeed.Feed, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("prometheus_client")
    with (
        meshfeed.monitoring.log(feed, tmp_path, seconds=1000) as log,
        meshfeed.monitoring.prometheus(feed, port=0) as served,
    ):
        take(feed, 1)
        child = os.fork()
        if not child:
            signal.alarm(10)  # the thread of the endpoint, for which its shutdown waits, is not here
            log.close()
            served.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        take(feed, 1)
        assert scrape(served.port)["meshfeed_batches_total['0', 'train']"] == 2
    (found,) = read_logs([tmp_path])
    assert [sample.stats.batches for sample in found.samples] == [0, 2]


def test_seconds_may_be_longer_than_any_run(feed: meshfeed.Feed, tmp_path: pathlib.Path) -> None:
    with meshfeed.monitoring.log(feed, tmp_path, seconds=math.inf):
        take(feed, 1)
    assert [sample.stats.batches for sample in read_logs([tmp_path])[0].samples] == [0, 1]


def test_an_exporter_does_not_keep_its_feed_alive(tmp_path: pathlib.Path) -> None:
    feed = make_feed("train")
    take(feed, 1)
    log = meshfeed.monitoring.log(feed, tmp_path, seconds=1000)
    alive = weakref.ref(feed)
    feed.close()
    del feed
    gc.collect()
    assert alive() is None
    log.close()


def test_an_exporter_whose_disk_hangs_does_not_keep_the_program(
    feed: meshfeed.Feed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporters, "_CLOSE_SECONDS", 0.3)
    begun, answers = threading.Event(), threading.Event()

    def write(before: Sample | None, sample: Sample) -> None:
        if before is not None:
            begun.set()
            assert answers.wait(60)

    log = exporters.Sampler(feed, 0.01, write)
    take(feed, 1)
    assert begun.wait(60)
    closing = threading.Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert "train: the last figures are not written after 0 s: the disk or the store" in caplog.text
    answers.set()
    log.close()


# ---------------------------------------------------------------------- Prometheus


def scrape(port: int | None) -> dict[str, float]:
    """Metric with its labels → value, as Prometheus's own parser reads what HTTP returns."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{sample.name}{sorted(sample.labels.values())}": sample.value for sample in samples}


def test_prometheus_scrapes_the_figures_of_several_feeds(feed: meshfeed.Feed) -> None:
    pytest.importorskip("prometheus_client")
    with make_feed("b") as other, meshfeed.monitoring.prometheus(feed, other, port=0) as exporter:
        listening = [line.split()[1] for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert next(place for place in listening if place.endswith(f":{exporter.port:04X}")).startswith("0100007F")
        take(feed, 3)
        found = scrape(exporter.port)
        assert found["meshfeed_batches_total['0', 'train']"] == 3
        assert found["meshfeed_records_total['0', 'train']"] == 24
        assert found["meshfeed_batches_total['0', 'b']"] == 0
        assert found["meshfeed_step['0', 'train']"] == 3
        assert "meshfeed_cache_hits_total['0']" in found
        stats = feed.stats()
        assert found["meshfeed_wait_seconds_total['0', 'train']"] == stats.wait_seconds
        assert {f"meshfeed_{name}_total['0', 'b']" for name in vars(stats)} - found.keys() == {
            f"meshfeed_{name}_total['0', 'b']" for name in ("stall_fraction", "elapsed_seconds", "tuned", "feed_id")
        }
        take(feed, 2)
        assert scrape(exporter.port)["meshfeed_batches_total['0', 'train']"] == 5
        with pytest.raises(meshfeed.SettingsError, match="several processes on one machine need one each"):
            meshfeed.monitoring.prometheus(other, port=exporter.port, address="127.0.0.1")
        with pytest.raises(meshfeed.SettingsError, match="port=70000"):
            meshfeed.monitoring.prometheus(other, port=70000)
    with pytest.raises(OSError, match="refused"):
        scrape(exporter.port)
    exporter.close()


def test_prometheus_refuses_two_feeds_of_one_name(feed: meshfeed.Feed) -> None:
    pytest.importorskip("prometheus_client")
    with make_feed("train") as other, pytest.raises(meshfeed.SettingsError, match="Two feeds are called 'train'"):
        meshfeed.monitoring.prometheus(feed, other, port=0)
    with meshfeed.monitoring.prometheus(feed, feed, port=0):
        pass


def test_prometheus_in_a_registry_that_the_program_serves(feed: meshfeed.Feed) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    exporter = meshfeed.monitoring.prometheus(feed, port=None, registry=registry)
    take(feed, 1)
    assert registry.get_sample_value("meshfeed_batches_total", {"feed": "train", "host": "0"}) == 1
    exporter.close()
    assert registry.get_sample_value("meshfeed_batches_total", {"feed": "train", "host": "0"}) is None
    with pytest.raises(meshfeed.SettingsError, match="at least one feed, and a port or a registry"):
        meshfeed.monitoring.prometheus(feed, port=None)


def test_prometheus_closes_its_port_if_the_registry_refuses(feed: meshfeed.Feed) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry(auto_describe=True)  # as prometheus_client.REGISTRY
    with meshfeed.monitoring.prometheus(feed, port=0, registry=registry) as exporter:
        port = exporter.port
    with meshfeed.monitoring.prometheus(feed, port=None, registry=registry):
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            meshfeed.monitoring.prometheus(feed, port=port, registry=registry)
    meshfeed.monitoring.prometheus(feed, port=port, registry=registry).close()


# ---------------------------------------------------------------------- TensorBoard


def test_tensorboard_gets_the_figures_of_each_interval(feed: meshfeed.Feed, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401  # the format of the file read below

    with meshfeed.monitoring.tensorboard(feed, tmp_path, seconds=1000):
        take(feed, 4)
    (path,) = (tmp_path / "host-00000").iterdir()
    data, events = path.read_bytes(), []
    while data:  # length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    scalars = {value.tag: (event.step, value.simple_value) for event in events for value in event.summary.value}
    assert scalars.keys() >= {"train/stall_fraction", "train/records_per_second", "train/read_seconds_per_batch"}
    assert {step for step, _ in scalars.values()} == {4}
    assert scalars["train/records_per_second"][1] == pytest.approx(8 * scalars["train/batches_per_second"][1], rel=1e-5)
