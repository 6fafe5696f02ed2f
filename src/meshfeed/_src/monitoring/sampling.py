"""Samples of a feed's figures: the one mechanism below every exporter.

A sample is ``feed.stats()`` with the step, the position and the totals of the shard caches. Taking one costs the training
loop nothing: exporters take samples on threads of their own, or when they are asked.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

from meshfeed._src.base.coordination import finalize
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.stats import CACHES, Sample
from meshfeed._src.base.threads import Background
from meshfeed._src.base.types import public
from meshfeed._src.feed.iterator import Feed

_log = logging.getLogger("meshfeed.monitoring")
_CLOSE_SECONDS = 10.0


def take_sample(feed: Feed) -> Sample:
    """Returns the figures of a feed now. May be called from any thread."""
    return Sample(time.time(), feed.step, feed.position, feed.stats(), CACHES.totals())


def check_feed(feed: object) -> Feed:
    """Returns ``feed``.

    Raises:
      SettingsError: it is not a Feed. A RemoteFeed asks its hosts for figures with a computation on their devices, which
        must not run on an exporter's thread.
    """
    if not isinstance(feed, Feed):
        raise SettingsError(
            f"feed={feed!r} is not a meshfeed.Feed. For a RemoteFeed, call its stats() in your training loop and write "
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
class Exporter:
    """A running exporter. It ends with its feed or with the process; :meth:`close` ends it earlier.

    Attributes:
      port: the port of a Prometheus endpoint; None for other exporters.
    """

    def __init__(self, close: Callable[[], object], port: int | None = None) -> None:
        self._close = close
        self.port = port

    def close(self) -> None:
        """Writes the last figures and ends the exporter. Safe to call again."""
        self._close()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Sampler:
    """Writes a sample of a feed every ``seconds`` seconds, and a last one at the end; does not keep the feed alive.

    An OSError of ``write`` is logged, and the next sample is written again.
    """

    def __init__(
        self, feed: Feed, seconds: float, write: Callable[[Sample], None], end: Callable[[], None] = lambda: None
    ) -> None:
        self._feed, self._seconds = weakref.ref(feed), seconds
        self._write, self._end = write, end
        self._name = feed.name
        self._last: Sample | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._ended = False
        self._tick()  # fails here rather than on the thread if the place cannot be written
        finalize(feed, self.close)
        self._thread = Background(self._run, f"meshfeed-monitoring-{feed.name}")
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            self._try_tick()

    def _tick(self) -> None:
        feed = self._feed()
        with self._lock:
            if feed is None or self._ended:
                return
            sample = take_sample(feed)
            if self._last is None or sample.stats != self._last.stats:
                self._write(sample)
                self._last = sample

    def _try_tick(self) -> None:
        try:
            self._tick()
        except OSError as error:
            _log.warning("%s: its figures could not be written: %s", self._name, error)

    def close(self) -> None:
        """Writes the last sample, if the feed is still there, and ends the thread."""
        self._stopping.set()
        self._try_tick()
        with self._lock:
            if not self._ended:
                self._ended = True
                self._end()
        self._thread.join(_CLOSE_SECONDS)
