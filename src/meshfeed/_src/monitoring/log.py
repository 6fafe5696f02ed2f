"""A log of figures: one JSON line per sample, one file per feed and host; and how the report reads it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import re
from collections.abc import Sequence

from meshfeed._src.base import coordination
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.stats import FeedStats, Sample
from meshfeed._src.base.types import JsonValue, public
from meshfeed._src.monitoring.sampling import Exporter, Sampler, check_feed, check_seconds
from meshfeed._src.pictures.report import HostLog

_RUN = re.compile(r'"run": "(\w*)"')
_GIVE = "Give the files or the folder that"
_STATS = tuple(field.name for field in dataclasses.fields(FeedStats) if field.name != "feed_id")


@public("meshfeed.monitoring")
def log(feed: object, directory: str | os.PathLike[str], *, seconds: float = 10.0) -> Exporter:
    """Writes the figures of a feed to ``directory`` as JSON lines, for ``meshfeed report``.

    Call it on every host. Each feed and host writes to a file of its own, ``<feed>-host-<number>.jsonl``, and appends to it
    after a restart. A line holds the totals of ``feed.stats()`` so far, the step, the position, and the totals of the
    shard caches.

    Args:
      feed: a :class:`meshfeed.Feed`.
      directory: a folder on a local or shared disk; created if needed.
      seconds: time between two lines.

    Returns:
      The running exporter. The last line is written when it is closed, or when the process exits.

    Raises:
      SettingsError: the folder cannot be written, or an argument is invalid.
    """
    feed, host = check_feed(feed), coordination.process_index()
    folder, feed_name = pathlib.Path(directory), feed.name
    path = folder / f"{feed_name}-host-{host:05d}.jsonl"

    def write(sample: Sample) -> None:
        line = json.dumps(_to_json(sample, feed_name, host))
        with open(path, "a", encoding="utf-8") as file:  # opened for each line, so the file may be rotated
            file.write(line + "\n")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Exporter(Sampler(feed, check_seconds(seconds), write).close)
    except OSError as error:
        raise SettingsError(
            f"directory={str(directory)!r} cannot be written: {error}. Give a folder on a disk that this host can write.",
            setting="directory",
        ) from error


def _to_json(sample: Sample, feed: str, host: int) -> dict[str, JsonValue]:
    line: dict[str, JsonValue] = {
        "time": round(sample.time, 3),
        "feed": feed,
        "host": host,
        "run": sample.stats.feed_id,
    }
    line |= {"step": sample.step, "position": sample.position}
    for name in _STATS:
        value = getattr(sample.stats, name)
        line[name] = round(value, 6) if isinstance(value, float) else value
    return {**line, "cache": dict(sample.cache)}


def read_logs(paths: Sequence[str | os.PathLike[str]]) -> list[HostLog]:
    """Reads logs of one or several hosts.

    Args:
      paths: files, or folders with ``*.jsonl`` files.

    Returns:
      One log per feed, host and run, by feed, host and time. A run ends when its process ends.

    Raises:
      SourceError: a path does not exist, a line is not one of :func:`log` (except an incomplete last line), or there are
        no figures at all.
    """
    logs = [log for path in _files(paths) for log in _logs_of(path)]
    if not logs:
        what = f"no figures in {', '.join(map(str, paths))}"
        raise SourceError(f"{what}. Give the folder that meshfeed.monitoring.log wrote.")
    return sorted(logs, key=lambda log: (log.feed, log.host, log.samples[0].time))


def _logs_of(path: pathlib.Path) -> list[HostLog]:
    lines = list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
    if lines and not lines[-1][1].endswith("}"):
        lines.pop()  # a killed process may leave half a line
    logs: list[HostLog] = []
    for _, group in itertools.groupby(lines, key=lambda line: _RUN.findall(line[1])):
        run = list(group)
        # About 1,000 of them, with the first and the last: totals stay exact, and a day's log is read in a moment.
        chosen = run[: -1 : -(-len(run) // 1000)] + run[-1:]
        parsed = [_parsed(path, number, text) for number, text in chosen]
        logs.append(HostLog(parsed[0][0], parsed[0][1], [sample for _, _, sample in parsed]))
    return logs


def _parsed(path: pathlib.Path, number: int, text: str) -> tuple[str, int, Sample]:
    try:
        line = json.loads(text)
        stats = FeedStats(feed_id=line["run"], **{name: line[name] for name in _STATS if name in line})
        return line["feed"], line["host"], Sample(line["time"], line["step"], line["position"], stats, line["cache"])
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"line {number} of {path} is not a line of meshfeed.monitoring.log ({type(error).__name__}: {error}). "
            f"{_GIVE} it wrote."
        ) from error


def _files(paths: Sequence[str | os.PathLike[str]]) -> list[pathlib.Path]:
    files: list[pathlib.Path] = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise SourceError(f"{path} does not exist. {_GIVE} meshfeed.monitoring.log wrote.")
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return files
