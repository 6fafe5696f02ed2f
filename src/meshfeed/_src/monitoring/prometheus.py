"""A Prometheus endpoint: the figures are read when they are scraped."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshfeed._src.base import coordination
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.stats import CACHES, Sample
from meshfeed._src.base.types import public
from meshfeed._src.feed.iterator import Feed
from meshfeed._src.monitoring.sampling import Exporter, check_feed, take_sample

if TYPE_CHECKING:
    from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily

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


@public("meshfeed.monitoring")
def prometheus(
    *feeds: object, port: int | None = 9400, address: str = "0.0.0.0", registry: CollectorRegistry | None = None
) -> Exporter:
    """Serves the figures of feeds to Prometheus, at ``http://<host>:<port>/metrics``.

    Metrics are called ``meshfeed_<figure>_total``, with the labels ``feed`` and ``host``; those of shard caches, which
    belong to the process, only ``host``. They are read when they are scraped and cost the training loop nothing.

    Args:
      *feeds: one or more :class:`meshfeed.Feed`.
      port: port of the endpoint; 0 for any free port; None to serve nothing, for a ``registry`` that you serve. Several
        processes on one machine need a port each: ``port=9400 + jax.process_index()``.
      address: address to listen on.
      registry: ``prometheus_client`` registry to use; default: a new one that holds only these feeds.

    Returns:
      The running exporter, with its ``port``.

    Raises:
      SettingsError: the port is in use, an argument is invalid, or ``prometheus_client`` is not installed.
    """
    try:
        import prometheus_client
    except ImportError:
        text = "prometheus needs prometheus_client: run pip install '.[prometheus]' in a checkout."
        raise SettingsError(text, setting="feeds") from None
    if not feeds or (registry is None and port is None):
        raise SettingsError("prometheus takes at least one feed, and a port or a registry.", setting="feeds")
    served = prometheus_client.CollectorRegistry() if registry is None else registry
    collector = _Collector([check_feed(feed) for feed in feeds])
    if port is None:
        served.register(collector)
        return Exporter(lambda: _unregister(served, collector))
    try:
        server, thread = prometheus_client.start_http_server(port, address, served)
    except OSError as error:
        raise SettingsError(
            f"port={port!r} on {address!r} cannot be listened on: {error}. Use another port; several processes on one "
            "machine need one each, such as port=9400 + jax.process_index().",
            setting="port",
        ) from error
    served.register(collector)

    def close() -> None:
        if _unregister(served, collector):
            server.shutdown()
            server.server_close()
            thread.join()

    return Exporter(close, server.server_port)


def _unregister(registry: CollectorRegistry, collector: _Collector) -> bool:
    """Returns whether it was still registered."""
    try:
        registry.unregister(collector)
    except KeyError:
        return False
    return True


class _Collector:
    """Reads the figures of feeds when Prometheus asks; a ``prometheus_client.registry.Collector``."""

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
