"""The reference model's permutations are those of the library, where the configurations' sources are too small to tell."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import reference

from meshfeed._src.agreement import windows
from meshfeed._src.order import permutation
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.streams import balance


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
    found = balance.balanced_rows(costs)
    assert found.tolist() == reference.balanced_of_shards(costs.tolist())


@pytest.mark.parametrize("num_hosts", [1, 2, 320, 321, 1000])
@pytest.mark.parametrize("batch_bytes", [0, 1, 10, 63, 64, 65, 10_000])
def test_windows_of_steps(num_hosts, batch_bytes):
    full = windows.full_window(num_hosts, batch_bytes, 1000)
    most = max(8, math.ceil(num_hosts / 40))
    assert 1 <= full <= most
    assert full == most or 2 * (full + 1) * max(1, batch_bytes) > 1000  # as long as two of them fit
    assert full == 1 or 2 * full * batch_bytes <= 1000
    ends = list(itertools.islice(windows.window_ends(5, lambda: full), 12))
    lengths = [b - a for a, b in itertools.pairwise([5, *ends])]
    assert lengths == [1, *(min(full, max(1, full // 4) << i) for i in range(11))]
