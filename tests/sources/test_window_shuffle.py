from __future__ import annotations

import jax
import numpy as np
import pytest
from lane_checks import check_lanes, read_batches, read_ids

from meshfeed._src.base.errors import SourceError, StateMismatchError
from meshfeed._src.sources.window_shuffle import permutation, shuffle_windows


class Plain:
    """Records 0 … n - 1 one by one."""

    def __init__(self, n: int) -> None:
        self.n, self.at, self.fails_at = n, 0, None

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.fails_at:
            raise OSError("the disk is gone")
        if self.at >= self.n:
            raise StopIteration
        self.at += 1
        return {"id": np.int64(self.at - 1)}


class Stateful(Plain):
    def get_state(self):
        return {"at": (self.at,)}

    def set_state(self, state):
        (self.at,) = state["at"]


class Live(Stateful):
    """Its state is an object that it goes on to change."""

    def __init__(self, n):
        super().__init__(n)
        self.state = {"at": 0}

    def __next__(self):
        self.at = self.state["at"]
        record = super().__next__()
        self.state["at"] = self.at
        return record

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


class Stacked(Stateful):
    """The same, up to 5 at a time."""

    def next_batch(self, num_records):
        if self.at >= self.n:
            raise StopIteration
        start, self.at = self.at, min(self.at + min(num_records, 5), self.n)
        return {"id": np.arange(start, self.at)}


class Source:
    def __init__(self, kind, n, window):
        self.kind, self.n, self.window = kind, n, window

    def open(self, lane_index, num_lanes):
        return shuffle_windows(self.kind(self.n), self.window, (3, 0, lane_index))


@pytest.mark.parametrize("kind", [Plain, Stateful, Live, Stacked])
@pytest.mark.parametrize(("n", "window"), [(0, 4), (1, 4), (23, 8), (24, 8), (10, 100), (7, 1)])
def test_each_record_once_and_resume_at_every_point(kind, n, window):
    (ids,) = check_lanes(Source(kind, n, window), 1, range(n))
    for start in range(0, n, window):  # no record leaves its window
        assert set(ids[start : start + window]) == set(range(start, min(start + window, n)))


def test_the_three_kinds_give_one_order():
    assert len({tuple(read_ids(Source(kind, 50, 16).open(0, 1))) for kind in (Plain, Stateful, Stacked)}) == 1


@pytest.mark.parametrize("sizes", [[1], [3], [8, 1], [100]])
def test_batches_are_the_records(sizes):
    source = Source(Stacked, 50, 16)
    batches = read_batches(source.open(0, 1), sizes)
    assert np.concatenate([batch["id"] for batch in batches]).tolist() == read_ids(source.open(0, 1))
    assert not hasattr(Source(Stateful, 50, 16).open(0, 1), "next_batch")


def test_batches_that_differ_are_refused_in_a_window_too():
    class Widening(Stacked):
        def next_batch(self, num_records):
            batch = super().next_batch(num_records)
            return batch if self.at <= 5 else {"id": batch["id"].astype(np.float64)}

    with pytest.raises(
        SourceError, match=r"a shuffled lane: records have the leaves \['id'\] float64\[\], but the first"
    ):
        next(Source(Widening, 16, 16).open(0, 1))


def test_the_order_depends_on_the_key_and_on_the_window():
    def order(*key):
        return read_ids(shuffle_windows(Stateful(64), 32, key))

    first = order(0, 0, 0)
    assert order(0, 0, 0) == first
    assert all(order(*key) != first for key in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0)])
    assert [i - 32 for i in first[32:]] != first[:32]


def test_another_window_is_refused_by_name():
    state = Source(Stateful, 50, 16).open(0, 1).get_state()
    with pytest.raises(StateMismatchError, match=r"shuffle_buffer.*16 records per lane.*8 records per lane"):
        Source(Stateful, 50, 8).open(0, 1).set_state(state)


def test_the_lane_is_not_read_again_after_an_error():
    lane = Stateful(50)
    lane.fails_at = 20
    shuffled = shuffle_windows(lane, 16, (0,))
    given = [next(shuffled) for _ in range(16)]
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is gone"):
            next(shuffled)
    assert lane.at == 20
    assert len(given) == 16
    other = shuffle_windows(Stateful(50), 16, (0,))
    other.set_state(shuffled.get_state())
    assert sorted(read_ids(other)) == list(range(16, 50))


@pytest.mark.parametrize("at", [0, 8])
def test_stop_iteration_of_get_state_does_not_end_the_lane(at):
    class Broken(Stateful):
        def get_state(self):
            if self.at == at:
                raise StopIteration
            return super().get_state()

    with pytest.raises(SourceError, match="get_state of a Broken, which is shuffled, raised StopIteration"):
        list(shuffle_windows(Broken(24), 8, (0,)))


def test_a_restore_forgets_the_error():
    lane = Stateful(50)
    shuffled = shuffle_windows(lane, 16, (0,))
    expected = [record["id"] for record in shuffle_windows(Stateful(50), 16, (0,))]
    start = shuffled.get_state()
    lane.fails_at = 20
    with pytest.raises(OSError, match="the disk is gone"):
        list(shuffled)
    lane.fails_at = None
    shuffled.set_state(start)
    assert [record["id"] for record in shuffled] == expected


def test_a_lane_without_a_state_is_restored_only_before_its_first_record():
    shuffled = shuffle_windows(Plain(50), 16, (0,))
    state = shuffled.get_state()
    next(shuffled)
    with pytest.raises(SourceError, match="shuffled Plain has no state"):
        shuffled.set_state(state)


def test_permutation_is_one_and_stays_the_same():
    assert sorted(permutation(1000, (1, 2)).tolist()) == list(range(1000))
    # Written down, so that a change of the algorithm, which would break every saved state, is seen.
    assert permutation(8, (1, 2, 3)).tolist() == [1, 2, 4, 6, 5, 0, 7, 3]


def test_leaves_of_all_ranks_are_shuffled_alike():
    class Tree(Stacked):
        def next_batch(self, num_records):
            ids = super().next_batch(num_records)["id"]
            return {"id": ids, "x": {"y": np.stack([ids, ids], 1)}}

    for record in shuffle_windows(Tree(20), 7, (0,)):
        assert jax.tree.map(np.shape, record) == {"id": (), "x": {"y": (2,)}}
        assert record["x"]["y"].tolist() == [record["id"], record["id"]]
