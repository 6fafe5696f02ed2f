"""TensorBoard: the figures of each interval as scalars, by tensorboardX, which needs no TensorFlow."""

from __future__ import annotations

import os
import pathlib

from meshfeed._src.base import coordination
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.stats import Sample, rates
from meshfeed._src.base.types import public
from meshfeed._src.monitoring.sampling import Exporter, Sampler, check_feed, check_seconds


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
      SettingsError: an argument is invalid, or tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        text = "tensorboard needs tensorboardX: run pip install '.[tensorboard]' in a checkout."
        raise SettingsError(text, setting="feed") from None
    feed, seconds = check_feed(feed), check_seconds(seconds)
    name = feed.name
    writer = SummaryWriter(str(pathlib.Path(directory) / f"host-{coordination.process_index():05d}"))
    last: list[Sample] = []

    def write(sample: Sample) -> None:
        if last and sample.stats.batches > last[0].stats.batches:
            for figure, value in rates(last[0], sample).items():
                writer.add_scalar(f"{name}/{figure}", value, sample.step, walltime=sample.time)
            writer.flush()
        last[:] = [sample]

    return Exporter(Sampler(feed, seconds, write, writer.close).close)
