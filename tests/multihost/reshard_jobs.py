"""What the hosts of tests/multihost/test_reshard.py run: feeds that move between hosts, all of which stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import meshfeed

STEPS = 30
BATCH = 12
SHARDINGS = (([0, 1, 2], 6), ([0, 2], 5), ([0, 1, 2], 4), ([1, 2], 15))  # hosts, steps
WITH_WORKERS = (([0, 1], 15), ([1, 2], 15))  # which take seconds to start


def lane(lane_index: int, num_lanes: int) -> Iterator[dict[str, np.ndarray]]:
    rows = BATCH // num_lanes
    for step in range(STEPS):
        for row in range(lane_index * rows, (lane_index + 1) * rows):
            yield {"id": np.int32(step * BATCH + row)}


def records() -> dict[str, np.ndarray]:
    return {"id": np.arange(STEPS * BATCH, dtype=np.int32)}


CASES: dict[str, dict[str, Any]] = {
    "random access": {},
    "load once": {"load": "once"},
    "lanes": {"num_lanes": 6},
    "lanes in workers": {"num_lanes": 6, "num_workers": 1},
    "lanes, load once": {"num_lanes": 6, "load": "once"},
}


def run() -> dict[str, list[dict[int, int]]]:
    """Case → this host's rows of each step; record i is in row i % BATCH of step i // BATCH."""
    return {case: _play(settings) for case, settings in CASES.items()}


def _play(settings: dict[str, Any]) -> list[dict[int, int]]:
    source: Any = meshfeed.sources.Stream(lane, fingerprint="lanes") if "num_lanes" in settings else records()
    steps: list[dict[int, int]] = []
    feed: meshfeed.Feed | None = None
    for hosts, count in WITH_WORKERS if "num_workers" in settings else SHARDINGS:
        mesh = Mesh(
            np.array([d for d in jax.devices() if d.process_index in hosts]), ("data",), axis_types=(AxisType.Auto,)
        )
        if feed is None:
            feed = meshfeed.Feed(source, mesh, global_batch_size=BATCH, timeout_seconds=60, **settings)
        else:
            feed.reshard(mesh)
        for _ in range(count):
            shards = next(feed)["id"].addressable_shards
            firsts = [(shard.index[0].start or 0, np.asarray(shard.data)) for shard in shards]
            steps.append({first + i: int(value) for first, values in firsts for i, value in enumerate(values)})
    assert feed is not None
    assert next(feed, None) is None
    feed.close()
    return steps
