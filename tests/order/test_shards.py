"""The order along shards: a permutation per epoch, the same lanes with any batch size, few shards at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfeed._src.base.settings import BatchSchedule, ShardShuffle
from meshfeed._src.order.shards import ShardOrder, shards_config, with_usual
from meshfeed._src.order.steps import StepSchedule

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any)


def order_of(lengths, num_lanes, *stages, seed=0, num_epochs=2):
    schedule = StepSchedule(BatchSchedule([(step, size * num_lanes) for step, size in stages]))
    order = ShardOrder(
        np.array(lengths), num_lanes=num_lanes, seed=seed, num_epochs=num_epochs, segments=schedule.runs()
    )
    return order, schedule


def lanes_of(order, schedule):
    """The records of each lane, from all full batches."""
    lanes = [[] for _ in range(order.num_lanes)]
    for step in range(schedule.num_steps(order.total, pad=False)):
        position, size = schedule.at(step)
        for lane, ids in zip(
            lanes, order.ids_between(position, position + size)[0].reshape(len(lanes), -1), strict=True
        ):
            lane += ids.tolist()
    return lanes


@given(LENGTHS, st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**64 - 1))
def test_every_record_once_per_epoch(lengths, num_lanes, size, later_size, num_epochs, seed):
    order, _ = order_of(lengths, num_lanes, (0, size), (3, later_size), seed=seed, num_epochs=num_epochs)
    record_ids, epochs = order.ids_between(0, order.total)
    assert order.total == num_epochs * sum(lengths) == record_ids.size
    for epoch in range(num_epochs):
        assert sorted(record_ids[epochs == epoch]) == list(range(sum(lengths)))


@given(LENGTHS, st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 9))
def test_a_lane_delivers_the_same_records_with_any_batch_size(lengths, num_lanes, size, later_size, change):
    changing = order_of(lengths, num_lanes, (0, size), (change + 1, later_size))
    smallest = order_of(lengths, num_lanes, (0, 1))
    for lane, expected in zip(lanes_of(*changing), lanes_of(*smallest), strict=True):
        assert lane == expected[: len(lane)]
        assert len(expected) - len(lane) < max(size, later_size)


@given(LENGTHS, st.integers(1, 6), st.integers(1, 5), st.data())
def test_positions_may_be_in_any_order(lengths, num_lanes, size, data):
    order, _ = order_of(lengths, num_lanes, (0, size))
    all_ids, all_epochs = order.ids_between(0, order.total)
    positions = np.array(data.draw(st.lists(st.integers(0, order.total - 1), min_size=1, max_size=40)))
    record_ids, epochs = order.ids_at(positions)
    assert record_ids.tolist() == all_ids[positions].tolist()
    assert epochs.tolist() == all_epochs[positions].tolist()


@pytest.mark.parametrize("num_shards", [64, 61])
def test_a_lane_has_two_shards_open_and_a_shard_belongs_to_few_lanes(num_shards):
    records, num_lanes = 500, 8
    order, schedule = order_of([records] * num_shards, num_lanes, (0, 4), num_epochs=1)
    lanes = [np.array(lane) // records for lane in lanes_of(order, schedule)]
    for lane in lanes:
        for start in range(0, lane.size - records, 97):
            assert len(set(lane[start : start + records].tolist())) <= 4, "two windows of two shards"
    owners = [sum(shard in lane for lane in lanes) for shard in range(num_shards)]
    assert sum(owners) <= num_shards + num_lanes
    assert len(set(lanes[0][:records].tolist())) == 2


def test_epochs_and_seeds_differ():
    order, _ = order_of([40] * 16, 2, (0, 4), num_epochs=2)
    other, _ = order_of([40] * 16, 2, (0, 4), num_epochs=2, seed=1)
    first, second = order.ids_between(0, order.total)[0].reshape(2, -1)
    assert (first != second).mean() > 0.9
    assert (first != other.ids_between(0, 640)[0]).mean() > 0.9


def test_the_order_never_changes():
    order, _ = order_of([3, 0, 5, 4], 2, (0, 3), num_epochs=2, seed=7)
    assert order.ids_between(0, 24)[0].tolist() == [
        11,
        0,
        1,
        6,
        3,
        7,
        9,
        10,
        8,
        2,
        4,
        5,
        11,
        1,
        8,
        3,
        6,
        4,
        9,
        10,
        0,
        5,
        2,
        7,
    ]
    assert order.config() == {
        "algorithm": "shard-windows",
        "version": 1,
        "shuffle": "shards",
        "seed": 7,
        "num_lanes": 2,
        "shards": "72e1483067ba79b3",
    }


def test_a_long_epoch_costs_no_more_than_a_batch():
    order, _ = order_of([1 << 40] * 1000, 8, (0, 16), num_epochs=None)
    record_ids, epochs = order.ids_between((3000 << 40) + (1 << 20), (3000 << 40) + (1 << 20) + 128)
    assert len(set(record_ids.tolist())) == 128
    assert set(epochs.tolist()) == {3}


@pytest.mark.parametrize("wrong", [[-1], [48], [0, 48]])
def test_positions_outside_the_stream_are_refused(wrong):
    order, _ = order_of([24], 2, (0, 1), num_epochs=2)
    with pytest.raises(IndexError, match=r"not all within the stream's \[0, 48\)"):
        order.ids_at(np.array(wrong))


@pytest.mark.parametrize("shuffle", [ShardShuffle(), ShardShuffle(window_shards=3), ShardShuffle(affinity=True)])
def test_a_fingerprint_gets_the_settings_that_it_leaves_out(shuffle: ShardShuffle) -> None:
    config = shards_config(shuffle, 7, 4)
    assert with_usual(config) == config | dataclasses.asdict(shuffle)
    assert with_usual({"shuffle": True, "seed": 7}) == {"shuffle": True, "seed": 7}
