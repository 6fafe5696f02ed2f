"""How well an order shuffles: how far it takes records of a file apart, and from how many files it fills a batch."""

from __future__ import annotations

import dataclasses

import numpy as np

from meshfeed._src.base.types import RecordOrder, public
from meshfeed._src.simulation.dataset import SimulatedData

_SAMPLE = 200_000  # positions; if there are more, spread evenly with a random offset each
_BATCHES = 8


@public("meshfeed.testing")
@dataclasses.dataclass(frozen=True)
class ShuffleQuality:
    """How well the records of an epoch are shuffled.

    Attributes:
      mean_distance: mean distance in the epoch of records that are neighbors in their files, over that of a uniform
        shuffle: 1 if they are as far apart, about 0 if they stay together.
      median_distance: the same for the median.
      shards_per_batch: mean number of files from which a global batch has records.
    """

    mean_distance: float
    median_distance: float
    shards_per_batch: float


def shuffle_quality(dataset: SimulatedData, order: RecordOrder, num_positions: int, batch_size: int) -> ShuffleQuality:
    """Measures the first ``num_positions`` positions of an order; of many, a sample."""
    stride = max(1, num_positions // _SAMPLE)
    positions = np.arange(0, num_positions - stride + 1, stride, dtype=np.int64)
    if stride > 1:
        positions += np.random.default_rng(0).integers(0, stride, positions.size)
    record_ids = order.ids_at(positions)[0]
    by_id = positions[np.argsort(record_ids, kind="stable")]  # neighbors in the sample are close in their files
    apart = np.abs(np.diff(by_id)) if by_id.size > 1 else np.zeros(1)
    # Two uniform positions of n are n / 3 apart on average, and (1 - 1 / sqrt(2)) * n in the median.
    mean, median = num_positions / 3, num_positions * (1 - 0.5**0.5)
    starts = np.linspace(0, max(0, num_positions - batch_size), _BATCHES).astype(np.int64)
    rows = starts[None, :] + np.arange(min(batch_size, num_positions), dtype=np.int64)[:, None]
    files = dataset.numbers(order.ids_at(rows.ravel())[0].reshape(rows.shape))
    return ShuffleQuality(
        float(np.mean(apart)) / mean, float(np.median(apart)) / median, float(np.mean([one.size for one in files]))
    )
