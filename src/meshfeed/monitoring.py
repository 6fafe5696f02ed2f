"""Exporters of a feed's figures: a log for ``meshfeed report``, a Prometheus endpoint, TensorBoard.

The figures are those of ``feed.stats()``, with the step, the position and the totals of shard caches. An exporter reads them
on its own thread, or when it is scraped, so it costs the training loop nothing. The same figures reach every listener
of ``jax.monitoring`` as events.
"""

from __future__ import annotations

from meshfeed._src.monitoring.exporters import Exporter, log, prometheus, tensorboard

__all__ = ["Exporter", "log", "prometheus", "tensorboard"]
