"""Mixtures ordered by shards: each lane draws from its own part of every component, and shares are exact in each lane."""

from __future__ import annotations

import collections
import functools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed._src.base.settings import BatchSchedule, ShardShuffle
from meshfeed._src.order import mixture
from meshfeed._src.order.mixture import MixtureOrder, MixtureSettings, split_ids
from meshfeed._src.order.shards import ShardOrder
from meshfeed._src.order.steps import StepSchedule
from meshfeed._src.order.weights import Stage, block_counts

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


def order_of(components, num_lanes, stages=None, *sizes, block=8, seed=0, num_epochs=1, on_end="repeat", **shuffle):
    names = [f"c{i}" for i in range(len(components))]
    schedule = StepSchedule(BatchSchedule([(step, size * num_lanes) for step, size in sizes or [(0, 1)]]))
    stages = stages or [(0, [1] * len(names))]
    mixture = MixtureSettings(
        stages=[
            Stage(schedule.position_of_step(step), {n: w for n, w in zip(names, weights, strict=True) if w}, step)
            for step, weights in stages
        ],
        block=block,
        seed=seed,
        num_epochs=num_epochs,
        on_end=on_end,
        repeat={},
        identities=dict.fromkeys(names),
    )
    lengths = {name: np.array(lengths) for name, lengths in zip(names, components, strict=True)}
    return MixtureOrder(lengths, mixture, ShardShuffle(**shuffle), num_lanes, schedule.runs()), schedule


def short_chunks(compute):
    """Calls ``compute`` with chunks of 64 records: those of 8,192 are hundreds of epochs of sources as small as these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "_CHUNK", 64)
        return compute()


def lanes_of(order, schedule, num_steps):
    """``(component, id, epoch)`` of each record of each lane."""
    lanes = [[] for _ in range(order.num_lanes)]
    for step in range(num_steps):
        position, size = schedule.at(step)
        ids, epochs = order.ids_between(position, position + size)
        rows = list(zip(*(part.tolist() for part in split_ids(ids)), epochs.tolist(), strict=True))
        each = size // order.num_lanes
        for lane, records in enumerate(lanes):
            records += rows[lane * each : (lane + 1) * each]
    return lanes


@given(
    components=st.lists(LENGTHS, min_size=1, max_size=3),
    num_lanes=st.integers(1, 4),
    num_epochs=st.integers(1, 2),
    seed=st.integers(0, 2**64 - 1),
    affinity=st.booleans(),
    window_shards=st.integers(1, 3),
)
@settings(deadline=None)
def test_every_record_of_every_component_once_per_epoch(
    components, num_lanes, num_epochs, seed, affinity, window_shards
):
    order, _ = order_of(
        components, num_lanes, seed=seed, num_epochs=num_epochs, affinity=affinity, window_shards=window_shards
    )
    assert order.total % num_lanes == 0
    ids, epochs = order.ids_between(0, order.total)
    numbers, own = split_ids(ids)
    for number, lengths in enumerate(components):
        seen = collections.Counter(
            zip(epochs[numbers == number].tolist(), own[numbers == number].tolist(), strict=True)
        )
        assert set(seen.values()) <= {1}
        # "repeat" ends when the last lane of the last component has read its parts; the others repeat until then.
        for epoch in range(num_epochs):
            assert {record for found, record in seen if found == epoch} == set(range(sum(lengths)))
    # One record fewer in every lane, and some component would not be complete.
    ids, epochs = order.ids_between(0, order.total - num_lanes)
    found = collections.Counter(split_ids(ids[epochs < num_epochs])[0].tolist())
    assert any(found[number] < num_epochs * sum(lengths) for number, lengths in enumerate(components))


@pytest.mark.slow
@given(
    components=st.lists(LENGTHS, min_size=2, max_size=3),
    num_lanes=st.integers(1, 4),
    weights=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    later=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    change=st.integers(1, 30),
    size=st.integers(1, 3),
)
@settings(deadline=None, max_examples=40)
def test_shares_are_exact_in_every_block_of_each_lane(components, num_lanes, weights, later, change, size):
    weights, later = weights[: len(components)], later[: len(components)]
    if not any(later):
        later[0] = 1
    names, block = list("abc"[: len(components)]), 12
    stages = [(0, weights), (change, later)]
    order, schedule = order_of(components, num_lanes, stages, (0, size), block=block, num_epochs=None)
    for lane in short_chunks(lambda: lanes_of(order, schedule, change + 30)):
        for first, weights_of_stage in ((0, weights), (change * size, later)):
            stop = change * size if not first else len(lane)
            counts = block_counts({n: w for n, w in zip(names, weights_of_stage, strict=True) if w}, names, block)
            for start in range(first, stop - block + 1, block):
                drawn = collections.Counter(number for number, _, _ in lane[start : start + block])
                assert tuple(drawn[number] for number in range(len(names))) == counts


@pytest.mark.slow
@given(
    components=st.lists(LENGTHS, min_size=1, max_size=3),
    num_lanes=st.integers(1, 4),
    size=st.integers(1, 4),
    later_size=st.integers(1, 4),
    change=st.integers(0, 9),
)
@settings(deadline=None, max_examples=40)
def test_a_lane_delivers_the_same_records_with_any_batch_size(components, num_lanes, size, later_size, change):
    changing = order_of(components, num_lanes, None, (0, size), (change + 1, later_size), num_epochs=None)
    smallest = order_of(components, num_lanes, num_epochs=None)
    found = short_chunks(lambda: zip(lanes_of(*changing, 20), lanes_of(*smallest, 80), strict=True))
    for lane, expected in found:
        assert lane == expected[: len(lane)]


def test_a_lane_keeps_its_part_of_a_component():
    order, schedule = order_of([[50] * 16, [30] * 32], 4, num_epochs=None, affinity=True)
    lanes = lanes_of(order, schedule, 8000)
    for number, length in ((0, 50), (1, 30)):
        by_lane = []
        for lane in lanes:
            epochs = [
                {own // length for found, own, epoch in lane if found == number and epoch == wanted}
                for wanted in (0, 1)
            ]
            assert epochs[0] == epochs[1]
            by_lane.append(epochs[0])
        assert sum(map(len, by_lane)) == len(set().union(*by_lane))  # the lanes' parts end where shards end here


def test_a_component_of_one_shard_is_cut_into_parts():
    order, schedule = order_of([[400], [100] * 8], 4, num_epochs=1)
    lanes = lanes_of(order, schedule, order.total // 4)
    parts = [sorted({own for number, own, epoch in lane if number == 0 and epoch == 0}) for lane in lanes]
    assert sorted(functools.reduce(operator.iadd, parts, [])) == list(range(400))
    assert all(len(part) == 100 and part[-1] - part[0] == 99 for part in parts)


def test_on_end_stop_ends_all_lanes_with_the_first():
    order, _ = order_of([[40], [400]], 4, num_epochs=1, on_end="stop", block=2)
    numbers, _ = split_ids(order.ids_between(0, order.total)[0])
    assert np.bincount(numbers).tolist()[0] <= 40
    assert 72 <= order.total <= 80


@pytest.mark.parametrize("num_lanes", [1, 4])
def test_affinity_of_a_single_source(num_lanes):
    lengths = np.array([30] * 24)
    segments = [(0, 4)]
    kept = ShardOrder(
        lengths, shuffle=ShardShuffle(affinity=True), num_lanes=num_lanes, seed=3, num_epochs=3, segments=segments
    )
    ids, epochs = kept.ids_between(0, kept.total)
    by_epoch = ids.reshape(3, -1)
    assert all(sorted(epoch) == list(range(720)) for epoch in by_epoch)
    lanes = (np.arange(kept.total) % 4) // (4 // num_lanes)
    for lane in range(num_lanes):
        shards = [set((ids[(lanes == lane) & (epochs == epoch)] // 30).tolist()) for epoch in range(3)]
        assert shards[0] == shards[1] == shards[2]
        assert len(shards[0]) == 24 // num_lanes
    assert (by_epoch[0] != by_epoch[1]).mean() > 0.9


def test_a_larger_window_has_more_shards_open():
    lengths = np.array([100] * 12)

    def open_shards(window_shards):
        order = ShardOrder(
            lengths,
            shuffle=ShardShuffle(window_shards=window_shards),
            num_lanes=1,
            seed=0,
            num_epochs=1,
            segments=[(0, 4)],
        )
        return len(set((order.ids_between(0, 100)[0] // 100).tolist()))

    assert [open_shards(window) for window in (1, 2, 3, 12)] == [1, 2, 3, 12]


def test_states_keep_the_form_of_the_default():
    order, _ = order_of([[4, 4]], 2)
    assert order.config() == {
        "algorithm": "shard-windows",
        "version": 1,
        "shuffle": "shards",
        "seed": 0,
        "num_lanes": 2,
        "mixture": order.config()["mixture"],
    }
    order, _ = order_of([[4, 4]], 2, affinity=True, window_shards=3)
    assert order.config()["affinity"] is True
    assert order.config()["window_shards"] == 3


def test_hosts_download_the_set_about_once_and_with_affinity_nothing_more():
    """8 components of 160 unequal shards on 8 hosts: what leaves no room for two copies, and no cache of a host's share."""
    hosts, num_lanes, shards = 8, 16, 160
    rng = np.random.default_rng(0)
    lengths = [rng.integers(30, 91, shards) for _ in range(8)]
    weights = [int(part.sum()) for part in lengths]
    options = {"block": 2048, "num_epochs": 2, "window_shards": 2, "affinity": True}
    order, schedule = order_of(lengths, num_lanes, [(0, weights)], (0, 4), **options)
    ends = [np.cumsum(part) for part in lengths]
    needed = [[set(), set()] for _ in range(hosts)]  # (component, shard) of each host in both epochs
    size = schedule.at(0)[1]
    ids, epochs = order.ids_between(0, order.total // size * size)  # a last partial batch is not divided into lanes
    components, records = split_ids(ids)
    host = np.arange(len(ids)) % size // (size // hosts)
    for component, end in enumerate(ends):
        here = components == component
        files = np.searchsorted(end, records[here], side="right")
        used = np.unique(np.stack([host[here], files, np.minimum(epochs[here], 1)]), axis=1)
        for of_host, file, epoch in used.T.tolist():
            needed[of_host][epoch].add((component, file))

    def num_records(files):
        return sum(int(lengths[component][file]) for component, file in files)

    total = sum(weights)
    assert sum(num_records(first) for first, _ in needed) <= 1.05 * total
    for first, second in needed:
        assert num_records(first | second) <= 1.1 * total / hosts
        assert num_records(second - first) <= 0.05 * total / hosts


def test_scattered_positions_have_what_a_batch_has() -> None:
    order, _ = short_chunks(lambda: order_of([[5, 9, 7], [4, 4]], 2, num_epochs=40, on_end="repeat"))
    assert order.total is not None
    all_ids, all_epochs = order.ids_between(0, order.total)
    for positions in (
        np.arange(order.total)[::-1],
        np.arange(order.total)[:: order.total // 5],
        np.array([order.total - 1, 0]),
    ):
        ids, epochs = order.ids_at(positions)
        np.testing.assert_array_equal(ids, all_ids[positions])
        np.testing.assert_array_equal(epochs, all_epochs[positions])
    batches = [order.ids_between(start, min(start + 16, order.total)) for start in range(0, order.total, 16)]
    np.testing.assert_array_equal(np.concatenate([ids for ids, _ in batches]), all_ids)
    np.testing.assert_array_equal(np.concatenate([epochs for _, epochs in batches]), all_epochs)
