"""The report of a run: figures of one or several hosts over time, as JSON and as one HTML page."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from meshfeed._src.base.stats import Sample, rates, total_stats
from meshfeed._src.base.types import JsonValue
from meshfeed._src.pictures.drawing import MAX_LINES, Bar, Drawing, bar_chart, escape, line_chart, page

_POINTS = 96
_SHOWN_HOSTS = 32
_SHOWN_STALLS = 32
_STAGES = {stage: stage for stage in ("read", "decode", "transfer")}
_STAGES |= {"peer_wait": "wait for hosts", "wait": "wait in next"}
_STALLED = 0.02


@dataclasses.dataclass(frozen=True)
class HostLog:
    """The samples of one run of a feed on one host, at least one, in the order in which they were taken."""

    feed: str
    host: int
    samples: Sequence[Sample]


def report_figures(logs: Sequence[HostLog]) -> dict[str, JsonValue]:
    """Returns the figures of the report as JSON: totals per feed and host, and rates over time.

    Returns:
      ``{"feeds": [{"feed", "start", "seconds", "hosts": […], "over_time": {"seconds": […], <figure>: {<host>: […]}}}]}``.
      ``stall_fraction`` and the like are those of :class:`meshfeed.FeedStats`; ``lag_seconds`` is how much
      less this host waited for other hosts than the one that waited longest; ``stalls`` are the long waits, each with the
      step, what the late host read, and stacks; ``over_time`` has None for unknown values.
    """
    feeds = sorted({log.feed for log in logs})
    return {"feeds": [_feed_figures(feed, [log for log in logs if log.feed == feed]) for feed in feeds]}


def _feed_figures(feed: str, logs: Sequence[HostLog]) -> dict[str, JsonValue]:
    times = [sample.time for log in logs for sample in log.samples]  # a clock may have been set back
    start, end = min(times), max(times)
    hosts = [_host_figures(host, list(group)) for host, group in itertools.groupby(logs, key=lambda log: log.host)]
    # The host that all others wait for waits least. Comparing times of day would need synchronized clocks.
    longest = max(host["peer_wait_seconds"] for host in hosts)
    for host in hosts:
        host["lag_seconds"] = longest - host["peer_wait_seconds"]
    over_time = _over_time(logs, start, end)
    return {"feed": feed, "start": start, "seconds": end - start, "hosts": hosts, "over_time": over_time}


def _host_figures(host: int, runs: Sequence[HostLog]) -> dict[str, JsonValue]:
    ends = [run.samples[-1] for run in runs]
    figures = dataclasses.asdict(total_stats(end.stats for end in ends))
    del figures["feed_id"], figures["tuned"]
    # Caches belong to the process, which may have had earlier runs: of later ones, only what came after their start.
    known = [{}, *(run.samples[0].cache for run in runs[1:])]
    cache = {
        name: sum(end.cache.get(name, 0) - start.get(name, 0) for start, end in zip(known, ends, strict=True))
        for name in dict.fromkeys(name for end in ends for name in end.cache)
    }
    last = {"step": ends[-1].step, "position": ends[-1].position}
    stalls = dict.fromkeys(stall for run in runs for sample in run.samples for stall in sample.stalls)
    waits = [dataclasses.asdict(stall) for stall in stalls]
    return {"host": host, "runs": len(runs), **last, **figures, "cache": cache, "stalls": waits}


def _over_time(logs: Sequence[HostLog], start: float, end: float) -> dict[str, JsonValue]:
    centers = start + (np.arange(_POINTS) + 0.5) / _POINTS * max(end - start, 1e-9)
    found: dict[str, dict[str, list[float | None]]] = {}
    for log in logs:
        for before, after in _intervals(log.samples):
            first, last = np.searchsorted(centers, (before.time, after.time), side="right").tolist()
            for name, value in rates(before, after).items():
                values = found.setdefault(name, {}).setdefault(str(log.host), [None] * _POINTS)
                values[first:last] = [value] * (last - first)
    return {"seconds": (centers - start).tolist(), **found}


def _intervals(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Pairs of samples between which batches were delivered: a stall belongs to the batch that ended it."""
    moved = [samples[0]]
    moved += [after for before, after in itertools.pairwise(samples) if after.stats.batches > before.stats.batches]
    if len(moved) > 2 and moved[-1].time - moved[-2].time < 0.5 * (moved[-2].time - moved[-3].time):
        del moved[-2]  # the last sample is taken at the end, perhaps just after the one before: too short for a rate
    return list(itertools.pairwise(moved))


def report_page(figures: dict[str, JsonValue]) -> str:
    """Returns an HTML page without external resources, from the result of :func:`report_figures`."""
    body = "\n".join(_feed_section(feed) for feed in figures["feeds"])
    return page("meshfeed report", body, REPORT_STYLE)


REPORT_STYLE = (
    ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin:16px 0}"
    ".tile{background:var(--panel);border-radius:10px;padding:10px 14px}.tile b{display:block;font-size:21px;"
    "font-weight:600;font-variant-numeric:tabular-nums}.tile span{color:var(--muted);font-size:13px}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:8px 20px;margin:16px 0}"
    ".charts svg{width:100%;height:auto}.verdict{font-size:16px;border-left:4px solid var(--accent);padding:2px 0 2px 12px}"
    "section+section{border-top:1px solid var(--rule);margin-top:40px;padding-top:24px}"
)


def _feed_section(feed: dict[str, JsonValue]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(feed["start"]))
    hosts = feed["hosts"]
    who = f"{len(hosts):,} host{'s' if len(hosts) > 1 else ''}"
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in _tiles(feed).items()
    )
    charts = "".join(f"<div>{chart.to_svg()}</div>" for chart in _charts(feed))
    return (
        f'<section><h1>{escape(feed["feed"])}</h1>\n<p class="muted">{who}, from {when}, {duration_text(feed["seconds"])}'
        f'</p>\n<p class="verdict">{escape(_verdict(feed))}</p>\n<div class="tiles">{tiles}</div>\n'
        f'<div class="charts">{charts}</div>\n<h2>Hosts</h2>\n{_host_table(feed)}{_stalls(hosts)}</section>'
    )


def _stalls(hosts: Sequence[dict[str, JsonValue]]) -> str:
    """The long waits of all hosts, the latest first."""
    waits = sorted(
        ((stall, host["host"]) for host in hosts for stall in host["stalls"]), key=lambda pair: -pair[0]["time"]
    )
    if not waits:
        return ""
    shown = "".join(
        f"<details><summary>{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(stall['time']))}, host {host}: waited "
        f"{duration_text(stall['waited_seconds'])} for step {stall['step']:,}: {escape(stall['what'])}</summary>"
        f'<pre class="wide">{escape(stall["stacks"])}</pre></details>'
        for stall, host in waits[:_SHOWN_STALLS]
    )
    return f"\n<h2>Long waits</h2>\n{shown}"


def _tiles(feed: dict[str, JsonValue]) -> dict[str, str]:
    hosts = feed["hosts"]
    most = max(hosts, key=lambda host: host["batches"])
    seconds = max(most["elapsed_seconds"] + most["startup_seconds"], 1e-9)
    tiles = {
        "stall, worst host": f"{max(host['stall_fraction'] for host in hosts):.1%}",
        "batches": _count(most["batches"]),
        "records": _count(most["records"]),
        "batches per second": _number(most["batches"] / seconds),
        "read per host": bytes_text(sum(host["bytes"] for host in hosts) / len(hosts)),
        "startup": duration_text(max(host["startup_seconds"] for host in hosts)),
    }
    if (hits := _hit_fraction(hosts)) is not None:
        tiles["shard cache hits"] = f"{hits:.1%}"
    for name, label in (("retries", "retried reads"), ("skipped_records", "bad records replaced")):
        if total := sum(host[name] for host in hosts):
            tiles[label] = f"{total:,}"
    return tiles


def _hit_fraction(hosts: Sequence[dict[str, JsonValue]]) -> float | None:
    hits, misses = (sum(host["cache"].get(name, 0) for host in hosts) for name in ("hits", "misses"))
    return hits / (hits + misses) if hits + misses else None


def _verdict(feed: dict[str, JsonValue]) -> str:
    """States whether the loop waited for data and, if so, which host or stage to improve."""
    hosts = feed["hosts"]
    worst = max(hosts, key=lambda host: host["stall_fraction"])
    waited = f"The training loop waited for data {worst['stall_fraction']:.1%} of the time"
    waited += f" on host {worst['host']}." if len(hosts) > 1 else "."
    if worst["stall_fraction"] < _STALLED:
        return f"{waited} The feed keeps up with the step."
    slowest = max(hosts, key=lambda host: host["lag_seconds"])
    if slowest["lag_seconds"] > 0.5 * (worst["wait_seconds"] - worst["startup_seconds"]):
        return (
            f"{waited} The others wait for host {slowest['host']}, which read its part "
            f"{duration_text(slowest['lag_seconds'])} later than the fastest host in total. Look at its disk, network and "
            "cores."
        )
    batches = max(worst["batches"], 1)
    stage = max(("read", "decode", "transfer"), key=lambda name: worst[f"{name}_seconds"])
    each, step = worst[f"{stage}_seconds"] / batches, worst["elapsed_seconds"] / batches
    return (
        f"{waited} The longest stage is {stage}: {duration_text(each)} per batch, summed over threads, and a step takes "
        f"{duration_text(step)}."
    )


def _charts(feed: dict[str, JsonValue]) -> list[Drawing]:
    hosts = feed["hosts"]
    stages = [_stage_bar(hosts, stage) for stage in _STAGES]
    charts = [
        _time_chart("Time that the loop waited for data", feed, "stall_fraction", "{:.0%}".format, 0.1),
        _time_chart("Batches per second", feed, "batches_per_second", _number),
        bar_chart("Time per batch by stage, mean of hosts", stages, text=duration_text),
    ]
    if len(hosts) > 1:
        late = sorted(hosts, key=lambda host: -host["lag_seconds"])[:6]
        bars = [Bar(f"host {host['host']}", host["lag_seconds"]) for host in late]
        charts.append(bar_chart("Lag behind the fastest host, in total", bars, text=duration_text))
    if "cache_hit_fraction" in feed["over_time"]:
        charts.append(_time_chart("Shard cache hits", feed, "cache_hit_fraction", "{:.0%}".format, 1.0))
    return charts


def _time_chart(
    title: str, feed: dict[str, JsonValue], figure: str, text: Callable[[float], str], least_top: float = 0.0
) -> Drawing:
    by_host = feed["over_time"].get(figure, {})
    values = {host: [math.nan if value is None else value for value in line] for host, line in by_host.items()}
    return line_chart(title, _few_lines(values), feed["seconds"], text, least_top)


def _few_lines(values: dict[str, list[float]]) -> dict[str, list[float]]:
    """One line per host, or with many hosts the highest, the median and the lowest at each time."""
    if len(values) <= MAX_LINES:
        return {f"host {host}": line for host, line in sorted(values.items(), key=lambda pair: int(pair[0]))}
    table = np.array(list(values.values()))
    known = ~np.isnan(table).all(axis=0)
    filled = np.where(known, table, 0.0)  # NumPy warns about columns of NaN only
    reducers = {"median of hosts": np.nanmedian, "highest": np.nanmax, "lowest": np.nanmin}
    return {name: np.where(known, reduce(filled, axis=0), np.nan).tolist() for name, reduce in reducers.items()}


def _per_batch(host: dict[str, JsonValue], stage: str) -> float:
    seconds = host[f"{stage}_seconds"] - (host["startup_seconds"] if stage == "wait" else 0.0)
    return seconds / max(host["batches"], 1)


def _stage_bar(hosts: Sequence[dict[str, JsonValue]], stage: str) -> Bar:
    each = [_per_batch(host, stage) for host in hosts]
    note = f"{duration_text(min(each))} to {duration_text(max(each))}" if len(hosts) > 1 else ""
    return Bar(_STAGES[stage], sum(each) / len(hosts), note)


def _host_table(feed: dict[str, JsonValue]) -> str:
    hosts = sorted(feed["hosts"], key=lambda host: (-host["lag_seconds"], host["host"]))
    shown = [_cells(host) for host in hosts[:_SHOWN_HOSTS]]
    rows = ["".join(f"<th>{escape(head)}</th>" for head in shown[0])]
    rows += ["".join(f"<td>{escape(cell)}</td>" for cell in cells.values()) for cells in shown]
    more = len(hosts) - _SHOWN_HOSTS
    note = f'<p class="muted">{more:,} more hosts, with less lag; --json has all of them.</p>' if more > 0 else ""
    how = (
        "Stages are per batch, summed over threads. Lag is how much less this host waited for other hosts than the one that "
        "waited longest; stall is the fraction of the run that the loop waited for data, without startup."
    )
    note += f'<p class="muted">{how}</p>'
    return f'<div class="wide"><table>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>{note}'


def _cells(host: dict[str, JsonValue]) -> dict[str, str]:
    hits = _hit_fraction([host])
    return {
        "host": str(host["host"]),
        "step": f"{host['step']:,}",
        "stall": f"{host['stall_fraction']:.1%}",
        **{name: duration_text(_per_batch(host, stage)) for stage, name in _STAGES.items()},
        "lag": duration_text(host["lag_seconds"]),
        "bytes": bytes_text(host["bytes"]),
        "retries": f"{host['retries']:,}",
        "bad": f"{host['skipped_records']:,}",
        "cache hits": "–" if hits is None else f"{hits:.1%}",
    }


def _count(value: int) -> str:
    return f"{value:,}" if value < 10_000_000 else f"{value / 1e6:,.1f} M" if value < 1e10 else f"{value / 1e9:,.1f} G"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def bytes_text(value: float) -> str:
    """Returns a number of bytes with three digits and a unit."""
    power = min(int(math.log10(max(value, 1)) / 3), 4)
    return f"{value / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def duration_text(seconds: float) -> str:
    """Returns a time with three digits and a unit."""
    if seconds <= 0:
        return "0 s"
    for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if seconds >= size * (2 if unit in ("h", "min") else 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
