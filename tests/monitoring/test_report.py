"""The report: its figures, its page, and the command, from logs of several hosts and runs."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import pathlib
import re

import jax
import numpy as np
import pytest
from click.testing import CliRunner

import meshfeed
from meshfeed._src.base.stats import FeedStats, Sample
from meshfeed._src.cli import main
from meshfeed._src.pictures.drawing import Bar, bar_chart, line_chart, nice_ticks
from meshfeed._src.pictures.report import HostLog, duration_text, report_figures, report_page


def host_log(host: int, *, late: bool = False, batches: int = 10, cache: bool = False, feed: str = "train") -> HostLog:
    """Ten samples, a second apart; each interval has ``batches`` batches, and the loop waits for a quarter of it."""
    samples = []
    for number in range(11):
        n = number * batches
        stats = FeedStats(
            batches=n,
            records=8 * n,
            bytes=100 * n,
            wait_seconds=1.0 + 0.25 * number,
            read_seconds=(0.9 if late else 0.1) * number,
            startup_seconds=1.0,
            elapsed_seconds=float(number),
            peer_wait_seconds=0.0 if late else 0.8 * number,
            skipped_records=number if late else 0,
            feed_id=f"run{host}{feed}",
        )
        totals = {"hits": 3 * number, "misses": number} if cache else {}
        samples.append(Sample(1_700_000_000.0 + number, n, 8 * n, stats, totals))
    return HostLog(feed, host, samples)


class Page(html.parser.HTMLParser):
    """Checks that tags match, and collects text, classes and whatever a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (-1.0, "0 s"),
        (5e-6, "5 µs"),
        (0.0025, "2.5 ms"),
        (1.0, "1 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (5400.0, "90 min"),
        (7200.0, "2 h"),
        (90_000.0, "25 h"),
    ],
)
def test_durations_are_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_figures_of_several_hosts() -> None:
    (feed,) = report_figures([host_log(0), host_log(1), host_log(2, late=True)])["feeds"]
    assert [host["host"] for host in feed["hosts"]] == [0, 1, 2]
    assert [host["lag_seconds"] for host in feed["hosts"]] == [0, 0, 8]
    assert [host["stall_fraction"] for host in feed["hosts"]] == [0.25] * 3
    assert feed["seconds"] == 10
    course = feed["over_time"]
    assert len(course["seconds"]) == len(course["stall_fraction"]["2"])
    assert set(course["stall_fraction"]["2"]) == {0.25}
    assert set(course["batches_per_second"]["0"]) == {10.0}
    json.dumps(feed)


def test_a_clock_that_is_set_back_in_a_run_leaves_its_other_figures() -> None:
    log = host_log(0)
    samples = [dataclasses.replace(s, time=s.time - (30 if n > 5 else 0)) for n, s in enumerate(log.samples)]
    (feed,) = report_figures([HostLog("train", 0, samples)])["feeds"]
    assert (feed["start"], feed["seconds"]) == (1_699_999_976.0, 29)
    assert {0.25} < set(feed["over_time"]["stall_fraction"]["0"])
    assert Page(report_page({"feeds": [feed]})).loaded == []


def test_runs_of_one_host_are_added_up() -> None:
    first, second = host_log(0), host_log(0)
    later = [Sample(s.time + 100, s.step + 100, s.position, s.stats, s.cache) for s in second.samples]
    (feed,) = report_figures([first, HostLog("train", 0, later)])["feeds"]
    (host,) = feed["hosts"]
    assert (host["runs"], host["batches"], host["step"]) == (2, 200, 200)
    assert host["stall_fraction"] == 0.25
    assert None in feed["over_time"]["stall_fraction"]["0"]  # between the runs nothing is known


def test_a_later_run_of_a_process_adds_the_use_of_caches_after_its_start() -> None:
    def run(first: int, last: int) -> HostLog:
        samples = [Sample(float(hits), hits, hits, FeedStats(feed_id="r"), {"hits": hits}) for hits in (first, last)]
        return HostLog("train", 0, samples)

    (feed,) = report_figures([run(2, 10), run(10, 25)])["feeds"]
    assert feed["hosts"][0]["cache"] == {"hits": 25}


def test_a_stall_belongs_to_the_batch_that_ended_it() -> None:
    def sample(seconds: float, batches: int, wait: float, elapsed: float) -> Sample:
        stats = FeedStats(batches=batches, wait_seconds=wait, elapsed_seconds=elapsed, feed_id="r")
        return Sample(seconds, batches, batches, stats, {})

    samples = [sample(0, 1, 0, 0), sample(10, 11, 0, 10), sample(20, 11, 0, 10), sample(30, 12, 19, 30)]
    (feed,) = report_figures([HostLog("train", 0, samples)])["feeds"]
    stalls = feed["over_time"]["stall_fraction"]["0"]
    assert set(stalls[: len(stalls) // 3 - 1]) == {0.0}
    assert set(stalls[len(stalls) // 3 + 1 :]) == {0.95}


def test_the_page_loads_nothing_and_names_the_slow_host() -> None:
    text = report_page(report_figures([host_log(0, cache=True), host_log(1), host_log(2, late=True)]))
    page = Page(text)
    assert page.loaded == []
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text
    words = " ".join(page.words)
    assert "The others wait for host 2, which read its part 8 s later" in words
    assert page.tags.count("svg") == 5
    assert {"75.0%", "Shard cache hits", "bad records replaced"} <= set(page.words)
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wait_seconds": 0.1}, "waited for data 1.0% of the time. The feed keeps up with the step."),
        (
            {"wait_seconds": 3.0, "decode_seconds": 4.0},
            "The longest stage is decode: 200 ms per batch, summed over threads",
        ),
        ({"wait_seconds": 3.0, "read_seconds": 5.0}, "The longest stage is read: 250 ms per batch"),
    ],
)
def test_the_page_concludes_what_the_figures_show(changes: dict[str, float], words: str) -> None:
    stats = FeedStats(batches=20, elapsed_seconds=10.0, stall_fraction=0.0, feed_id="r", **changes)  # pyright: ignore[reportArgumentType]
    samples = [Sample(0.0, 0, 0, FeedStats(feed_id="r"), {}), Sample(10.0, 20, 20, stats, {})]
    assert words in report_page(report_figures([HostLog("train", 0, samples)]))


def test_many_hosts_are_three_lines_and_a_folded_table() -> None:
    text = report_page(report_figures([host_log(host) for host in range(40)]))
    page = Page(text)
    assert {"median of hosts", "highest", "lowest"} <= set(page.words)
    assert page.tags.count("tr") == 33
    assert "8 more hosts" in " ".join(page.words)


def test_names_are_escaped() -> None:
    text = report_page(report_figures([host_log(0, feed="<script>alert(1)</script>")]))
    assert "<script" not in text
    Page(text)
    figures = report_figures([host_log(0), host_log(1)])
    for host in figures["feeds"][0]["hosts"]:
        host["host"] = "<script>alert(1)</script>"
    assert "<script" not in report_page(figures)


def test_a_feed_writes_its_own_report(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with meshfeed.Feed({"x": np.arange(640)}, mesh, global_batch_size=8, name="mine") as feed:
        feed.report(tmp_path / "before.html")  # without a batch
        assert len(list(feed)) == 80
        feed.report(tmp_path / "after.html")
    Page((tmp_path / "before.html").read_text())
    words = Page((tmp_path / "after.html").read_text()).words
    assert {"mine", "80", "640"} <= set(words)


def test_the_command_writes_a_page_or_json(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for name in ("train", "eval"):
        with meshfeed.Feed({"x": np.arange(64)}, mesh, global_batch_size=8, name=name) as feed:
            with meshfeed.monitoring.log(feed, tmp_path / "logs", seconds=1000):
                list(feed)
    output = tmp_path / "page.html"
    result = CliRunner().invoke(main.main, ["report", str(tmp_path / "logs"), "--output", str(output)])
    assert (result.exit_code, result.output) == (0, f"wrote {output}: 2 feeds, 2 hosts\n")
    assert {"train", "eval"} <= set(Page(output.read_text()).words)
    (one,) = (tmp_path / "logs").glob("train*")
    result = CliRunner().invoke(main.main, ["report", str(one), "--output", str(output)])
    assert result.output.endswith("1 feed, 1 host\n")
    figures = json.loads(CliRunner().invoke(main.main, ["report", str(tmp_path / "logs"), "--json"]).output)
    assert [(feed["feed"], feed["hosts"][0]["batches"]) for feed in figures["feeds"]] == [("eval", 8), ("train", 8)]
    refused = CliRunner().invoke(main.main, ["report", str(tmp_path / "nowhere")])
    assert (refused.exit_code, "does not exist" in refused.output) == (1, True)


@pytest.mark.parametrize("largest", [1e-6, 0.03, 0.7, 1.0, 9.99, 10.0, 123.0, 4.2e9])
def test_ticks_are_round_and_reach_the_largest(largest: float) -> None:
    ticks = nice_ticks(largest)
    assert ticks[0] == 0
    assert ticks[-1] == pytest.approx(max(ticks[-1], largest))
    assert len(ticks) <= 7
    assert ticks[-2] < largest * (1 + 1e-9)


def test_charts_stay_inside_their_frame() -> None:
    for chart in (
        line_chart("x", {"a": [0.0, 5.0, float("nan"), 3.0]}, 7200.0, str),
        bar_chart("y", [Bar("a long name", 3.0, "0 to 9"), Bar("b", 0.0)], str),
    ):
        svg = chart.to_svg()
        width = float(re.findall(r'viewBox="\S+ \S+ (\S+)', svg)[0])
        xs = [float(x) for x in re.findall(r"[ML]([\d.-]+) ", svg)]
        assert min(xs) >= 0
        assert max(xs) <= width - 32
        assert "nan" not in svg
