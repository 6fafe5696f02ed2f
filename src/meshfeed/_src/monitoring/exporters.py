"""Exporters of a feed's figures: a log of JSON lines, a Prometheus endpoint, TensorBoard.

All are built on samples: ``feed.stats()`` with the step, the position and the totals of the shard caches. Taking one
costs the training loop nothing: exporters take samples on threads of their own, or when Prometheus scrapes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import operator
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from meshfeed._src.base import coordination
from meshfeed._src.base.errors import SettingsError, SourceError, missing_package
from meshfeed._src.base.fork import NotCopied, Owner, finalize
from meshfeed._src.base.settings import local_path
from meshfeed._src.base.stats import CACHES, FeedStats, Sample, Stall, rates
from meshfeed._src.base.stores import is_url
from meshfeed._src.base.threads import Background
from meshfeed._src.base.types import JsonValue, public
from meshfeed._src.feed.iterator import Feed
from meshfeed._src.monitoring.stored_log import StoredLog, joined, read_folder
from meshfeed._src.pictures.report import HostLog

_log = logging.getLogger("meshfeed.monitoring")
_CLOSE_SECONDS = 10.0
_RUN = re.compile(r'"run": "(\w*)"')  # groups lines by run without parsing them: most are not chosen
_BATCHES = re.compile(r'"batches": (\d+)')
_STATS = tuple(field.name for field in dataclasses.fields(FeedStats) if field.name not in ("tuned", "feed_id"))
_STALLS = '"stalls": ['
# Of each feed, whose logs at URLs must not write one another's objects.
_numbers: weakref.WeakKeyDictionary[Feed, Iterator[int]] = weakref.WeakKeyDictionary()
_CUT = re.compile(r'"cache": \{[^{}]*\}$')  # the last value of a line, without the brace that closes the line
_COUNTERS = {
    "batches": "Global batches delivered.",
    "records": "Records delivered on all hosts, without padding.",
    "bytes": "Bytes of host batches that this host read and delivered.",
    "wait_seconds": "Time the training loop waited in next(feed), with startup.",
    "startup_seconds": "Time the training loop waited for first batches.",
    "read_seconds": "Time spent reading records, summed over threads and workers.",
    "decode_seconds": "Time spent decoding records, summed over threads and workers.",
    "transfer_seconds": "Time spent passing host batches to JAX.",
    "peer_wait_seconds": "Time the read-ahead waited for other hosts.",
    "retries": "Retried reads.",
    "skipped_records": "Bad records replaced in delivered batches.",
}
_GAUGES = {"step": "Batches delivered since the start of the stream.", "position": "Records, likewise."}
_CACHE_COUNTERS = {
    "hits": "Opens of a file that was in a shard cache.",
    "misses": "Opens that had to wait for a file.",
    "wait_seconds": "Time that opens waited for files.",
    "fetched": "Files fetched.",
    "fetched_ahead": "Files fetched before a read needed them.",
    "fetched_bytes": "Bytes fetched.",
    "evicted": "Files removed from a shard cache.",
}


def take_sample(feed: Feed) -> Sample:
    """Returns the figures of a feed now. May be called from any thread."""
    return feed._sample()


def check_feed(feed: object) -> Feed:
    """Returns ``feed``.

    Raises:
      SettingsError: it is not a Feed. A RemoteFeed asks its hosts for figures with a computation on their devices, which
        must not run on an exporter's thread.
    """
    if not isinstance(feed, Feed):
        raise SettingsError(
            f"feed={feed!r:.80} is not a meshfeed.Feed. For a RemoteFeed, call its stats() in your training loop and write "
            "the figures yourself.",
            setting="feed",
        )
    return feed


def check_seconds(seconds: float) -> float:
    """Returns ``seconds``; raises SettingsError unless it is a positive number."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise SettingsError(f"seconds={seconds!r}. Expected a positive number of seconds.", setting="seconds")
    return float(seconds)


@public("meshfeed.monitoring")
class Exporter(NotCopied):
    """A running exporter. It ends with its feed or with the process; :meth:`close` ends it earlier.

    Attributes:
      port: the port of a Prometheus endpoint; None for other exporters.
    """

    def __init__(self, close: Callable[[], object], port: int | None = None) -> None:
        self._close = close
        self._owner = Owner()
        self.port = port

    def close(self) -> None:
        """Writes the last figures and ends the exporter. Safe to call again; no-op in a forked child."""
        self._owner.call(self._close)

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Sampler:
    """Writes a sample of a feed every ``seconds`` seconds, and a last one at the end; does not keep the feed alive.

    ``write`` is called with the sample before, if any, and the sample. An OSError is logged, and the next sample is
    written again.
    """

    def __init__(
        self,
        feed: Feed,
        seconds: float,
        write: Callable[[Sample | None, Sample], None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        # Weak, here and in the collector: an exporter that nobody closes must not keep a dropped feed and its threads.
        self._feed, self._seconds = weakref.ref(feed), min(seconds, threading.TIMEOUT_MAX)
        self._write, self._end = write, end
        self._name = feed.name
        self._last: Sample | None = None
        self._stopping = threading.Event()
        self._tick()  # fails here rather than on the thread if the folder cannot be written
        finalize(feed, self.close)
        self._thread = Background(self._run, f"meshfeed-monitoring-{feed.name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._seconds):
                self._try_tick()
            self._try_tick()
        finally:
            self._end()

    def _tick(self) -> None:
        feed = self._feed()
        if feed is None:
            return
        sample = take_sample(feed)
        if self._last is None or (sample.stats, sample.stalls) != (self._last.stats, self._last.stalls):
            self._write(self._last, sample)
            self._last = sample

    def _try_tick(self) -> None:
        try:
            self._tick()
        except OSError as error:
            _log.warning("%s: the figures cannot be written: %s", self._name, error)

    def close(self) -> None:
        """Has the thread write the last sample, if the feed is still there, and end; does not wait for long."""
        self._stopping.set()
        if not self._thread.join(_CLOSE_SECONDS):
            what = "the disk or the store that they are written to does not answer"
            _log.warning("%s: the last figures are not written after %.0f s: %s", self._name, _CLOSE_SECONDS, what)


@public("meshfeed.monitoring")
def log(feed: object, directory: str | os.PathLike[str], *, seconds: float = 10.0) -> Exporter:
    """Writes the figures of a feed to ``directory`` as JSON lines, for ``meshfeed report``.

    Call it on every host. Each feed and host writes to a file of its own, ``<feed>-host-<number>.jsonl``, and appends to it
    after a restart; at a URL, each run writes objects of its own, ``<feed>-host-<number>-<run>-<number>.jsonl``, and uploads
    once a minute, and at once what a stalled host reports. A line holds the totals of ``feed.stats()`` so far, the step, the
    position, and the totals of the shard caches.

    Args:
      feed: a :class:`meshfeed.Feed`.
      directory: a folder on a local or shared disk, created if needed, or a URL such as ``s3://bucket/logs``.
      seconds: time between two lines.

    Returns:
      The running exporter. The last line is written when it is closed, or when the process exits. Close it if the folder
      is a URL: at the exit of a process, clients may refuse to open a connection.

    Raises:
      SettingsError: the folder cannot be written, or an argument is invalid.
    """
    feed, host = check_feed(feed), coordination.process_index()
    if is_url(os.fspath(directory)):
        return _log_to_store(feed, host, os.fspath(directory), check_seconds(seconds))
    folder, name = local_path("directory", directory), feed.name
    path = folder / f"{name}-host-{host:05d}.jsonl"

    def write(before: Sample | None, sample: Sample) -> None:
        line = json.dumps(_to_json(before, sample, name, host))
        with open(path, "ab+") as file:  # opened for each line, so the file may be rotated
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read() == b"\n" else f"\n{line}"  # a full disk or a kill may leave half a line
            file.write(f"{line}\n".encode())

    with _writable(directory):
        folder.mkdir(parents=True, exist_ok=True)
        return Exporter(Sampler(feed, check_seconds(seconds), write).close)


@contextlib.contextmanager
def _writable(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Raises a SettingsError for an OSError of the block, which writes to a folder."""
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"directory={str(directory)!r} cannot be written: {error}. Give a folder on a disk that this host can write.",
            setting="directory",
        ) from error


def _log_to_store(feed: Feed, host: int, url: str, seconds: float) -> Exporter:
    name = feed.name
    numbers = _numbers.setdefault(feed, itertools.count())
    stored = StoredLog(url, f"{name}-host-{host:05d}-{take_sample(feed).stats.feed_id}", numbers)

    def write(before: Sample | None, sample: Sample) -> None:
        line = _to_json(before, sample, name, host)
        stored.add(json.dumps(line), now="stalls" in line)

    try:
        return Exporter(Sampler(feed, seconds, write, stored.end).close)
    except OSError as error:
        raise SettingsError(f"directory={url!r} cannot be written: {error}", setting="directory") from error


def _to_json(before: Sample | None, sample: Sample, feed: str, host: int) -> dict[str, JsonValue]:
    stats = dataclasses.asdict(sample.stats)
    del stats["tuned"]
    line = {"time": round(sample.time, 3), "feed": feed, "host": host, "run": stats.pop("feed_id")}
    line |= {"step": sample.step, "position": sample.position, **stats}
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in line.items()}
    known = () if before is None else before.stalls
    new = [dataclasses.asdict(stall) for stall in sample.stalls if stall not in known]
    return {**rounded, "cache": dict(sample.cache), **({"stalls": new} if new else {})}


def read_logs(paths: Sequence[str | os.PathLike[str]]) -> list[HostLog]:
    """Reads logs of one or several hosts.

    Args:
      paths: files, or folders with ``*.jsonl`` files, or their URLs.

    Returns:
      One log per feed, host and run, by feed, host and time. A run ends when its process ends.

    Raises:
      SourceError: a path does not exist, a line is not one of :func:`log` (except an incomplete one), there are no figures
        at all, or the store of a URL does not answer.
    """
    logs = [log for name, content in joined(_files(paths)) for log in _logs_of(name, content)]
    if not logs:
        raise _not_a_log(f"no figures in {', '.join(map(str, paths))}")
    return sorted(logs, key=lambda log: (log.feed, log.host, log.samples[0].time))


def _logs_of(path: str, content: bytes) -> list[HostLog]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise _not_a_log(f"{path} is not text in UTF-8") from error
    # By run, not by neighboring lines: feeds of one name that run at the same time write in turns.
    runs: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if _is_whole(line):
            runs.setdefault(tuple(_RUN.findall(line)), []).append((number, line))
    logs: list[HostLog] = []
    for run in runs.values():
        # Two exporters of one feed may write in another order than that of their samples.
        run.sort(key=lambda line: [*map(int, _BATCHES.findall(line[1]))])
        # About 1,000 of them, with the first and the last: totals stay exact, and a day's log is read in a moment.
        every = -(-len(run) // 1000)
        chosen = [line for at, line in enumerate(run[:-1]) if at % every == 0 or _STALLS in line[1]] + run[-1:]
        parsed = [_parsed(path, number, text) for number, text in chosen]
        logs.append(HostLog(parsed[0][0], parsed[0][1], [sample for _, _, sample in parsed]))
    return logs


def _is_whole(line: str) -> bool:
    """Whether a line is not the first part of one, as a full disk or a kill leaves it; the part may end with a value."""
    if not line.startswith("{"):
        return True
    return line.endswith("]}") if _STALLS in line else line.endswith("}") and not _CUT.search(line)


def _parsed(path: str, number: int, text: str) -> tuple[str, int, Sample]:
    try:
        line = json.loads(text)
        figures = {name: line[name] for name in ("time", "step", "position", *_STATS) if name in line}
        texts, numbers = (
            (line["feed"], line["run"]),
            (operator.index(line["host"]), *figures.values(), *line["cache"].values()),
        )
        if not all(isinstance(text, str) for text in texts) or not all(map(_is_number, numbers)):
            raise TypeError("a figure that is not a number, or a name that is not text")
        stats = FeedStats(feed_id=line["run"], **{name: figures[name] for name in _STATS if name in figures})
        stalls = tuple(Stall(**stall) for stall in line.get("stalls", ()))
        sample = Sample(line["time"], line["step"], line["position"], stats, line["cache"], stalls)
        return line["feed"], line["host"], sample
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"line {number} of {path} is not a line of a log ({type(error).__name__}: {error})"
        raise _not_a_log(what) from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _not_a_log(problem: str) -> SourceError:
    return SourceError(f"{problem}. Pass the files or the folder that meshfeed.monitoring.log wrote.")


def _files(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[str, bytes]]:
    """Returns name and content of each file, once if it is given twice."""
    files: list[tuple[str, bytes]] = []
    for given in paths:
        name = os.fspath(given)
        if is_url(name):
            files += read_folder(name)
            continue
        path = local_path("logs", name)
        if not path.exists():
            raise _not_a_log(f"{path} does not exist")
        files += [(str(one), one.read_bytes()) for one in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    return list({name if is_url(name) else os.path.realpath(name): (name, content) for name, content in files}.values())


if TYPE_CHECKING:
    from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily


@public("meshfeed.monitoring")
def prometheus(
    *feeds: object, port: int | None = 9400, address: str = "127.0.0.1", registry: CollectorRegistry | None = None
) -> Exporter:
    """Serves the figures of feeds to Prometheus, at ``http://<address>:<port>/metrics``.

    Metrics are called ``meshfeed_<figure>_total``, with the labels ``feed`` and ``host``; those of shard caches, which
    belong to the process, only ``host``. They are read when they are scraped and cost the training loop nothing.

    Args:
      *feeds: one or more :class:`meshfeed.Feed`.
      port: port of the endpoint; 0 for any free port; None to serve nothing, for a ``registry`` that you serve. Several
        processes on one machine need a port each: ``port=9400 + jax.process_index()``.
      address: address to listen on. By default, only programs on this machine can read the figures; a Prometheus server
        on another one needs the address of this host in its network, or ``"0.0.0.0"`` for all of its networks. The
        endpoint has no password.
      registry: ``prometheus_client`` registry to use; default: a new one that holds only these feeds.

    Returns:
      The running exporter, with its ``port``.

    Raises:
      SettingsError: the port is in use, an argument is invalid, two feeds have the same name, or ``prometheus_client`` is
        not installed.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise missing_package("prometheus", error, "prometheus", setting="feeds") from None
    if not feeds or (registry is None and port is None):
        raise SettingsError("prometheus takes at least one feed, and a port or a registry.", setting="feeds")
    served = prometheus_client.CollectorRegistry() if registry is None else registry
    known: dict[str, Feed] = {}
    for feed in map(check_feed, feeds):
        if known.setdefault(feed.name, feed) is not feed:
            raise SettingsError(
                f"Two feeds are called {feed.name!r}, which would be the same label. Give each feed a name= of its own.",
                setting="feeds",
            )
    collector = _Collector(list(known.values()))
    with contextlib.ExitStack() as closing:  # closes the port again if the registry refuses the collector
        if port is not None:
            try:
                server, thread = prometheus_client.start_http_server(port, address, served)
            except (OSError, OverflowError) as error:  # the latter for a port above 65535
                raise SettingsError(
                    f"port={port!r} on {address!r} cannot be opened: {error}. Use another port; several processes on one "
                    "machine need one each, such as port=9400 + jax.process_index().",
                    setting="port",
                ) from error
            port = server.server_port
            for end in (thread.join, server.server_close, server.shutdown):  # called in reverse order
                closing.callback(end)
        served.register(collector)  # only now: a port in use must leave nothing in the user's registry
        closing.callback(served.unregister, collector)
        return Exporter(closing.pop_all().close, port)  # a second close finds it empty


class _Collector:
    """Takes samples of feeds when Prometheus scrapes them; a ``prometheus_client.registry.Collector``."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = [weakref.ref(feed) for feed in feeds]
        self._host = str(coordination.process_index())

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yields every metric of every feed that is alive."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        feeds = [feed for reference in self._feeds if (feed := reference()) is not None]
        samples: dict[str, Sample] = {feed.name: take_sample(feed) for feed in feeds}
        for name, text in (_COUNTERS | _GAUGES).items():
            family = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
            metric = family(f"meshfeed_{name}", text, labels=("feed", "host"))
            for feed, sample in samples.items():
                metric.add_metric((feed, self._host), getattr(sample if name in _GAUGES else sample.stats, name))
            yield metric
        totals = CACHES.totals()
        for name, text in _CACHE_COUNTERS.items():
            metric = CounterMetricFamily(f"meshfeed_cache_{name}", text, labels=("host",))
            metric.add_metric((self._host,), totals.get(name, 0))
            yield metric


@public("meshfeed.monitoring")
def tensorboard(feed: object, directory: str | os.PathLike[str], *, seconds: float = 10.0) -> Exporter:
    """Writes the figures of a feed for TensorBoard, as scalars ``<feed>/<figure>`` by ``feed.step``.

    The figures are those of the interval since the last point: the stall fraction, batches, records and bytes per second,
    seconds of each stage per batch, retries, skipped records, and the hit fraction of shard caches. Each host is a run of its
    own, ``<directory>/host-<number>``.

    Args:
      feed: a :class:`meshfeed.Feed`.
      directory: the log directory of TensorBoard.
      seconds: time between two points.

    Returns:
      The running exporter. The last point is written when it is closed, or when the process exits.

    Raises:
      SettingsError: the folder is a URL or cannot be written, an argument is invalid, or tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise missing_package("tensorboard", error, "tensorboard", setting="feed") from None
    feed, seconds, folder = check_feed(feed), check_seconds(seconds), local_path("directory", directory)
    name = feed.name
    with _writable(directory):
        writer = SummaryWriter(str(folder / f"host-{coordination.process_index():05d}"))

    def write(before: Sample | None, sample: Sample) -> None:
        if before is not None and sample.stats.batches > before.stats.batches:
            for figure, value in rates(before, sample).items():
                writer.add_scalar(f"{name}/{figure}", value, sample.step, walltime=sample.time)
            writer.flush()  # or the points of a killed process would be lost: tensorboardX keeps them for two minutes

    return Exporter(Sampler(feed, seconds, write, writer.close).close)
