"""The order of length buckets, against definitions by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshfeed._src.base.settings import ShardShuffle
from meshfeed._src.order.buckets import BucketOrder

RNG = np.random.default_rng(0)


def order_of(bucket_of: np.ndarray, size: int, **settings: Any) -> BucketOrder:
    buckets = [np.flatnonzero(bucket_of == bucket).astype(np.uint32) for bucket in range(4)]
    settings = {"shuffle": True, "seed": 5, "num_epochs": 3, **settings}
    return BucketOrder(buckets, num_records=len(bucket_of), global_batch_size=size, **settings)


KINDS = {
    "four buckets": RNG.integers(0, 4, 203),
    "one bucket": np.full(50, 2),
    "one record": np.array([3]),
    "rare and common": np.where(RNG.random(300) < 0.02, 3, 1),
    "smaller than a batch": np.array([0, 1, 1, 3]),
}


@pytest.mark.parametrize("shuffle", [False, True, 16])
@pytest.mark.parametrize("name", KINDS)
def test_batches_have_one_bucket_and_epochs_have_every_record(name: str, shuffle: Any) -> None:
    bucket_of, size = KINDS[name], 8
    order, count = order_of(bucket_of, size, shuffle=shuffle), len(bucket_of)
    assert order.total == 3 * count
    ids, epochs = order.ids_between(0, 3 * count)
    np.testing.assert_array_equal(np.sort(ids % count), np.repeat(np.arange(count), 3))
    for epoch in range(3):
        np.testing.assert_array_equal(np.sort(ids[epochs == epoch] % count), np.arange(count))
    full = sum(3 * int((bucket_of == bucket).sum()) // size for bucket in range(4))
    for step in range(full):
        assert len(set(bucket_of[ids[step * size : (step + 1) * size]].tolist())) == 1  # and no id beyond the source
    for start in range(full * size, 3 * count, size):  # the rest, from the longest to the shortest
        buckets = bucket_of[ids[start : start + size] % count]
        assert (np.diff(buckets) <= 0).all()
        raised = ids[start : start + size] // count
        np.testing.assert_array_equal(raised, np.where(buckets == buckets[0], 0, 1 + buckets[0]))


def by_hand(bucket_of: np.ndarray, size: int, num_epochs: int) -> list[list[int]]:
    """Reads the records in order, epoch after epoch, and gives a batch whenever a bucket has enough."""
    waiting: dict[int, list[int]] = {}
    batches = []
    for _ in range(num_epochs):
        for record, bucket in enumerate(bucket_of.tolist()):
            waiting.setdefault(bucket, []).append(record)
            if len(waiting[bucket]) == size:
                batches.append(waiting.pop(bucket))
    return batches


def test_in_order_batches_come_as_reading_completes_them() -> None:
    bucket_of = KINDS["four buckets"]
    wanted = by_hand(bucket_of, 8, 3)
    found = order_of(bucket_of, 8, shuffle=False).ids_between(0, 8 * len(wanted))[0]
    np.testing.assert_array_equal(found.reshape(-1, 8), wanted)


def test_the_number_of_epochs_changes_only_the_end() -> None:
    endless, three = (order_of(KINDS["four buckets"], 8, num_epochs=epochs) for epochs in (None, 3))
    assert endless.total is None
    stop = 8 * sum(3 * int((KINDS["four buckets"] == bucket).sum()) // 8 for bucket in range(4))
    np.testing.assert_array_equal(endless.ids_between(0, stop)[0], three.ids_between(0, stop)[0])


def test_any_positions_in_any_order() -> None:
    order = order_of(KINDS["four buckets"], 8)
    whole = order.ids_between(0, 609)
    positions = RNG.permutation(609)
    for found, wanted in zip(order.ids_at(positions), whole, strict=True):
        np.testing.assert_array_equal(found, wanted[positions])
    with pytest.raises(IndexError, match="609"):
        order.ids_at(np.array([609]))


def test_epochs_seeds_and_buckets_differ() -> None:
    bucket_of = np.repeat([0, 1], 64)
    ids = [order_of(bucket_of, 8, seed=seed).ids_between(0, 384)[0].reshape(3, 128) for seed in (1, 2)]
    orders = {part.tobytes() for found in ids for part in found}
    assert len(orders) == 6
    within = [found[0][found[0] // 64 == bucket] % 64 for found in ids for bucket in (0, 1)]
    assert len({part.tobytes() for part in within}) == 4
    buckets = ids[0][0].reshape(16, 8)[:, 0] // 64
    assert 0 < np.flatnonzero(buckets == 0)[-1] > np.flatnonzero(buckets == 1)[0]  # mixed, not one after the other


def test_far_positions_take_no_longer() -> None:
    order = order_of(KINDS["four buckets"], 8, num_epochs=None)
    start = 10**15 // 8 * 8
    ids, epochs = order.ids_between(start, start + 8)
    assert len(set(KINDS["four buckets"][ids].tolist())) == 1
    assert abs(int(epochs[0]) - start // 203) <= 2


def test_golden_values() -> None:
    """Pins the order and its form in states: a changed output requires a new version."""
    assert order_of(np.arange(30) % 4, 4).config() == {
        "algorithm": "length-buckets", "version": 1, "shuffle": True, "seed": 5,
        "buckets": {"global_batch_size": 4, "num_epochs": 3},
    }  # fmt: skip
    ids, _ = order_of(np.arange(30) % 4, 4).ids_between(0, 24)
    golden = [25, 29, 13, 21, 1, 5, 9, 17, 19, 11, 7, 27, 4, 28, 8, 12, 26, 2, 6, 10, 24, 16, 20, 0]
    assert ids.tolist() == golden


def test_golden_values_by_shards() -> None:
    """Pins the order by shards and its form in states."""
    ids = np.arange(60)
    buckets = [ids[ids % 3 > 0], ids[ids % 3 == 0]]
    ends = np.array([20, 20, 30, 45, 60])
    order = BucketOrder(
        buckets, num_records=60, global_batch_size=4, shuffle=ShardShuffle(), seed=5, num_epochs=2, num_lanes=2,
        shard_lengths=[np.diff(np.searchsorted(bucket, ends), prepend=0) for bucket in buckets],
    )  # fmt: skip
    config = order.config()
    assert config.pop("shards")
    assert config == {
        "algorithm": "length-buckets", "version": 1, "shuffle": "shards", "seed": 5, "num_lanes": 2,
        "places": "shard-windows", "buckets": {"global_batch_size": 4, "num_epochs": 2},
    }  # fmt: skip
    found, _ = order.ids_between(0, 120)
    assert sorted(found % 60) == sorted([*range(60)] * 2)
    for lane in (0, 1):  # a lane moves along the shards with all buckets at once
        shards = np.searchsorted(ends, (found % 60).reshape(-1, 2, 2)[:12, lane].ravel(), side="right")
        assert len(set(shards[:12].tolist())) <= 3
    golden = [19, 53, 41, 56, 51, 9, 30, 42, 17, 10, 37, 35, 14, 1, 40, 44, 18, 15, 57, 39, 2, 16, 43, 31]
    assert found[:24].tolist() == golden
