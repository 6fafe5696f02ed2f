"""The reference model's permutations are those of the library, where the configurations' sources are too small to tell."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from meshfeed._src.order import permutation
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.streams import balance, shard_balance


@pytest.mark.parametrize("count", [1, 2, 60, 4096, 4097, 70_001, 2**24 + 1, 10**12])
def test_permutations_of_many_records(count):
    key = reference.key_of(7, 1, count)
    assert key == permutation.derive_key(7, 1, count)
    offsets = np.unique(np.linspace(0, count - 1, 50).astype(np.int64))
    if count <= 4096:
        table = reference.table(count, key)
        assert permutation.permute(offsets, count, key).tolist() == [table[offset] for offset in offsets]
    else:
        wanted = [reference.permuted(offset, count, key) for offset in offsets.tolist()]
        assert permutation.permute(offsets, count, key).tolist() == wanted


@pytest.mark.parametrize("shuffle", [False, True, 1, 4, 16])
@pytest.mark.parametrize("count", [1, 3, 11, 60])
def test_orders_of_epochs(count, shuffle):
    ids, epochs = EpochOrder(count, shuffle=shuffle, seed=3, num_epochs=None).ids_at(np.arange(3 * count))
    plain = reference.Plain(count, shuffle, 3, None)
    steps = reference.Steps((), ((0, 4),))
    assert list(zip(ids.tolist(), epochs.tolist(), strict=True)) == [plain.at(i, steps) for i in range(3 * count)]


@pytest.mark.parametrize("seed", range(30))
def test_orders_of_rows_of_equal_work(seed):
    rng = np.random.default_rng(seed)
    rows = [1, 2, 3, 7, 8, 12, 64, 96, 130, 160, 256][seed % 11]
    costs = rng.integers(0, [3, 100, 10_000][seed % 3], (rows, 1 + seed % 4))
    assert balance.balanced_rows(costs[:, 0].astype(float)).tolist() == reference.balanced(costs[:, 0].tolist())
    found = shard_balance.balanced_rows_of_shards(costs)
    assert found.tolist() == reference.balanced_of_shards(costs.tolist())
