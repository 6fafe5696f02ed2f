"""Events of jax.monitoring: their sums are the figures of feed.stats(), and a bad listener does no harm."""

from __future__ import annotations

import collections
import functools
import http.server
import logging
import pathlib
import threading
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax import monitoring

import meshfeed
from meshfeed._src.base.stats import CACHES, FeedStats, Sample, Totals, rates, total_stats
from meshfeed._src.feed import recorder as recorder_of_feeds
from meshfeed._src.feed.recorder import StatsRecorder

Heard = dict[str, float]


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Figure → sum of what both kinds of listener received for the feed "heard"."""
    found: Heard = collections.defaultdict(float)

    def listen(event: str, value: float, **labels: object) -> None:
        if event.startswith("/meshfeed/") and labels == {"feed": "heard"}:
            found[event.removeprefix("/meshfeed/")] += value

    monitoring.register_scalar_listener(listen)
    monitoring.register_event_duration_secs_listener(listen)
    yield found
    monitoring.unregister_scalar_listener(listen)
    monitoring.unregister_event_duration_listener(listen)


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


class Records:
    """Every tenth record is bad."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, record_id: int) -> dict[str, np.ndarray]:
        if record_id % 10 == 3:
            raise ValueError("bad")
        return {"x": np.full(4, record_id, np.int32)}


def test_the_events_of_a_run_add_up_to_its_stats(heard: Heard) -> None:
    bad = meshfeed.SkipBad(max_fraction=0.5)
    with meshfeed.Feed(Records(), mesh(), global_batch_size=16, bad_records=bad, name="heard") as feed:
        for _ in feed:
            pass
        stats = feed.stats()
    assert (stats.batches, stats.records, stats.skipped_records) == (25, 400, 40)
    fields = {name: value for name, value in vars(stats).items() if name not in ("stall_fraction", "feed_id") and value}
    assert heard == pytest.approx(fields)
    assert {"wait_seconds", "read_seconds", "transfer_seconds"} <= heard.keys()


def test_a_feed_that_is_closed_early_has_sent_everything_too(heard: Heard) -> None:
    with meshfeed.Feed({"x": np.arange(64)}, mesh(), global_batch_size=8, name="heard") as feed:
        next(feed)
        next(feed)
    assert heard["batches"] == 2
    assert heard["records"] == 16


def test_a_listener_that_raises_is_logged_and_no_batch_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: str, value: float, **labels: object) -> None:
        if event == "/meshfeed/batches":
            raise RuntimeError("the listener is broken")

    monitoring.register_scalar_listener(broken)
    try:
        with caplog.at_level(logging.ERROR), meshfeed.Feed({"x": np.arange(64)}, mesh(), global_batch_size=8) as feed:
            assert len(list(feed)) == 8
    finally:
        monitoring.unregister_scalar_listener(broken)
    assert "a listener of jax.monitoring failed" in caplog.text


def test_history_covers_the_whole_run_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(recorder_of_feeds.time, "perf_counter", lambda: clock[0])
    recorder = StatsRecorder("x")
    published = 0
    for step in range(20_000):
        clock[0] += 1 / 32
        recorder.counts = recorder.delivered(clock[0], records=1, bytes=1)
        if recorder.due:
            recorder.publish(step + 1, step + 1)
            published += 1
    steps = [sample.step for sample in recorder.history()]
    assert published == 5000  # every 0.1 s, so every fourth batch
    assert 256 <= len(steps) <= 512
    assert steps[0] == 1
    gaps = np.diff(steps)
    assert gaps.max() <= 2 * gaps.min()
    assert steps[-1] + gaps.max() >= 20_000


def test_rates_are_those_of_the_interval() -> None:
    before = Sample(
        100.0, 10, 80, FeedStats(batches=10, records=80, elapsed_seconds=1.0, read_seconds=3.0), {"hits": 1}
    )
    stats = FeedStats(batches=30, records=240, elapsed_seconds=5.0, wait_seconds=1.0, read_seconds=4.0, retries=2)
    after = Sample(110.0, 30, 240, stats, {"hits": 4, "misses": 1})
    found = rates(before, after)
    assert found["batches_per_second"] == 5.0
    assert found["records_per_second"] == 40.0
    assert found["read_seconds_per_batch"] == 0.05
    assert found["stall_fraction"] == 0.25
    assert found["retries"] == 2
    assert found["cache_hit_fraction"] == 0.75
    assert "cache_hit_fraction" not in rates(before, Sample(110.0, 30, 240, stats, {"hits": 1}))
    assert total_stats([before.stats, stats]).batches == 40


@pytest.mark.slow
def test_caches_of_the_process_and_of_its_workers_are_counted(tmp_path: pathlib.Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    for number in range(4):
        writer = ArrayRecordWriter(str(tmp_path / f"{number}.array_record"), "group_size:1")
        for record in range(8):
            writer.write(np.int32([number, record]).tobytes())
        writer.close()
    before = collections.Counter(CACHES.totals())
    cache = meshfeed.ShardCache(tmp_path / "cache", ahead_bytes=0)
    decode = meshfeed.sources.DecodeRaw(np.int32, (2,))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urls = [f"http://127.0.0.1:{server.server_port}/{number}.array_record" for number in range(4)]
    source = meshfeed.sources.ArrayRecord(urls, decode_batch=decode, cache=cache)
    with meshfeed.Feed(source, mesh(), global_batch_size=8, num_workers=1) as feed:
        assert len(list(feed)) == 4
    server.shutdown()
    server.server_close()
    here = cache.stats()
    more = collections.Counter(CACHES.totals()) - before
    assert more["hits"] + more["misses"] > here.hits + here.misses  # the worker opened the files again
    assert (here.fetched, more["fetched"]) == (0, 4)  # all by the worker: the fingerprint reads ranges


def test_totals_are_taken_once() -> None:
    totals = Totals()
    totals.add({"hits": 2, "misses": 0})
    totals.add({"hits": 1})
    assert totals.totals() == {"hits": 3}
    assert totals.take()["hits"] == 3
    assert totals.take() == {}
