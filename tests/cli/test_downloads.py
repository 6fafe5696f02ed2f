from __future__ import annotations

import functools

import numpy as np
import pytest

from meshfeed._src.base.settings import BatchSchedule
from meshfeed._src.cli.downloads import Evict, shards_of_steps, simulate_cache
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.shards import ShardOrder
from meshfeed._src.order.steps import StepSchedule


def lru(uses: list[int], size: int) -> int:
    held: list[int] = []
    missed = 0
    for shard in uses:
        missed += shard not in held
        held = [*(other for other in held if other != shard), shard][-size:]
    return missed


def fewest(uses: tuple[int, ...], size: int) -> int:
    """The fewest downloads of any policy, by trying all."""

    @functools.cache
    def after(at: int, held: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        shard = uses[at]
        if shard in held:
            return after(at + 1, held)
        options = [held] if len(held) < size else [held - {other} for other in held]
        return 1 + min(after(at + 1, kept | {shard}) for kept in options)

    return after(0, frozenset())


@pytest.mark.parametrize("seed", range(5))
def test_downloads_are_those_of_the_policies(seed: int) -> None:
    uses = np.random.default_rng(seed).integers(0, 6, 24).tolist()
    steps = [[shard] for shard in uses]
    for size in (2, 3, 4):
        found = {evict: simulate_cache(steps, [1] * 6, size, evict=evict) for evict in ("farthest", "oldest")}
        assert found["oldest"].num_downloads == lru(uses, size)
        assert found["farthest"].num_downloads == fewest(tuple(uses), size)
        assert found["farthest"].num_uses == 24


@pytest.mark.parametrize("evict", ["farthest", "oldest"])
def test_bytes_the_fill_and_a_step_larger_than_the_cache(evict: Evict) -> None:
    steps = [[0, 1, 2], [0, 1, 2], [3], [3]]
    assert simulate_cache(steps, [10, 20, 30, 40], 100, evict=evict) == (8, 4, 100)
    assert simulate_cache(steps, [10, 20, 30, 40], 100, evict=evict, skip=1) == (5, 1, 40)
    assert simulate_cache(steps, [10, 20, 30, 40], 5, evict=evict).num_downloads == 4
    assert simulate_cache([], [], 5, evict=evict).hit_rate == 1


def test_along_shards_each_host_downloads_its_share_once() -> None:
    lengths = np.full(80, 32)
    schedule = StepSchedule(BatchSchedule([(0, 32)]))
    order = ShardOrder(lengths, num_lanes=8, seed=1, num_epochs=1, segments=schedule.runs())
    total = 0
    for host in range(4):
        uses = shards_of_steps(order, lengths, batch_size=32, rows=[(8 * host, 8 * host + 8)], steps=range(80))
        total += simulate_cache(uses, np.ones(80, int), 6).num_downloads
    assert total == 80
    uniform = EpochOrder(80 * 32, shuffle=True, seed=1, num_epochs=1)
    uses = list(shards_of_steps(uniform, lengths, batch_size=32, rows=[(0, 8)], steps=range(80)))
    rates = [simulate_cache(uses, np.ones(80, int), 24, evict=evict).hit_rate for evict in ("farthest", "oldest")]
    assert rates[0] > rates[1] > 0.1
