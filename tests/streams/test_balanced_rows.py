"""Rows of equal cost per shard: permutations, spread, and costs by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfeed._src.order.blocks import Packing
from meshfeed._src.order.packing import PackingMethod
from meshfeed._src.streams.balance import balanced_rows


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=300))
def test_the_rows_are_a_permutation(costs: list[float]) -> None:
    rows = balanced_rows(np.array(costs))
    np.testing.assert_array_equal(np.sort(rows), np.arange(len(costs)))


def spread(costs: np.ndarray, shards: int) -> float:
    sums = costs.reshape(shards, -1).sum(axis=1)
    return float(sums.max() / sums.mean())


@pytest.mark.parametrize("method", ["split", "fit"])
@pytest.mark.parametrize(("mean", "sigma"), [(6, 1.2), (7, 1.5), (5, 2)])
def test_64_shards_of_8_rows_cost_the_same(method: str, mean: float, sigma: float) -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(mean, sigma, 50_000), 100_000).astype(np.uint32) + 1
    packing = Packing(lengths, PackingMethod(4096, method, "split"), block=4096).shuffled(1)
    for step in range(4):
        pieces = packing.pieces_at(step * 512 + np.arange(512))
        costs = np.array(
            [float((part.astype(float) ** 2).sum()) for part in np.split(pieces.lengths, pieces.splits[1:-1])]
        )
        assert spread(costs, 64) > 1.15
        found = costs[balanced_rows(costs)]
        assert max(spread(found, shards) for shards in (2, 8, 32, 64)) <= 1.03


def test_rows_that_cannot_be_even_are_as_even_as_they_can_be() -> None:
    costs = np.array([100.0, 1, 1, 1, 1, 1, 1, 1])
    assert sorted(costs[balanced_rows(costs)].reshape(2, 4).sum(axis=1)) == [4, 103]
    costs = np.array([8.0, 7, 6, 5, 4, 3, 2, 1])
    assert spread(costs[balanced_rows(costs)], 4) == 1
    np.testing.assert_array_equal(balanced_rows(np.ones(1)), [0])
    assert spread(np.repeat([5.0, 1.0], 12)[balanced_rows(np.repeat([5.0, 1.0], 12))], 2) == 1
