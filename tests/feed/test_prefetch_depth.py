"""How many batches are kept ready, and that they do not take the host's memory."""

from __future__ import annotations

import logging
import time
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.feed import pipeline
from meshfeed._src.feed.pipeline import PrefetchDepth

BATCH_BYTES = 16 * 8 * 4


class Counted:
    """Records of 8 int32, and how many were read."""

    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return 16 * 200

    def __getitem__(self, record_id: int) -> dict[str, Any]:
        self.num_read += 1
        return {"x": np.full(8, record_id, np.int32)}


def still_after(source: Counted, seconds: float = 0.3) -> int:
    """The number of records read once that no longer changes."""
    found = -1
    while found != source.num_read:
        found = source.num_read
        time.sleep(seconds)
    return found


def test_a_huge_prefetch_is_bounded_by_bytes_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline, "host_memory_bytes", lambda: 4 * 10 * BATCH_BYTES)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    source = Counted()
    with meshfeed.Feed(source, mesh, global_batch_size=16, prefetch=10**9, name="huge") as feed:
        batches = [np.asarray(next(feed)["x"])[:, 0]]
        assert still_after(source) <= (1 + 10) * 16 + 4  # one delivered, 10 ready, and 4 records to identify the source
        feed.reset()
        batches = [np.asarray(batch["x"])[:, 0] for batch in feed]
    np.testing.assert_array_equal(np.concatenate(batches), np.arange(16 * 200))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        f"huge: prefetch=1000000000 batches of {BATCH_BYTES} bytes on this host would take more than a quarter of its memory "
        f"of {40 * BATCH_BYTES:,} bytes, so at most 10 are kept ready. Pass a smaller prefetch."
    ]
    assert feed.config()["prefetch"] == 10**9


@pytest.mark.parametrize(
    ("prefetch", "memory", "sizes", "depths"),
    [
        (5, 4000, [100, 100], [5, 5]),
        (5, 4000, [300], [3]),
        (5, 4000, [200, 300, 100], [5, 3, 3]),  # of the largest batch
        (5, 400, [100], [2]),  # two overlap the step
        (1, 4, [100], [1]),
        (2, 4, [100], [2]),
        (3, 4000, [0, 0], [3, 3]),  # a host without rows
    ],
)
def test_the_depth_follows_the_largest_batch(
    monkeypatch: pytest.MonkeyPatch, prefetch: int, memory: int, sizes: list[int], depths: list[int]
) -> None:
    monkeypatch.setattr(pipeline, "host_memory_bytes", lambda: memory)
    depth = PrefetchDepth(prefetch, "feed")
    assert depth() == prefetch
    found = []
    for size in sizes:
        depth.measure(size)
        found.append(depth())
    assert found == depths
