"""Host batches in the feed: one iterator that several readers must not share."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed


class Resumable:
    """A one-shot iterator with a state, as Grain's are."""

    def __init__(self, count: int = 40, seconds: float = 0.0) -> None:
        self.count, self.seconds, self.at = count, seconds, 0

    def __iter__(self) -> Resumable:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.at >= self.count:
            raise StopIteration
        time.sleep(self.seconds)
        self.at += 1
        return {"x": np.full((8, 2), self.at - 1, np.float32)}

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        if state["at"] > self.count:
            raise ValueError("beyond the end")
        self.at = state["at"]


def make_feed(batches: Any, **options: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.MultiHostDataLoadIterator(batches, mesh, **options)


def take(feed: Any, count: int) -> list[int]:
    return [int(np.asarray(next(feed)["x"])[0, 0]) for _ in range(count)]


@pytest.mark.parametrize("kind", ["resumable", "generator", "list"])
def test_element_spec_never_moves_a_feed_that_is_under_way(kind: str) -> None:
    made: dict[str, Any] = {
        "resumable": Resumable(),
        "generator": ({"x": np.full((8, 2), i, np.float32)} for i in range(40)),
        "list": [{"x": np.full((8, 2), i, np.float32)} for i in range(40)],
    }
    batches = made[kind] if kind != "list" else meshfeed.sources.HostBatches(made[kind])
    with make_feed(batches) as feed:
        assert take(feed, 2) == [0, 1]
        assert feed.element_spec["x"].shape == (8, 2)
        assert take(feed, 6) == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("started", [False, True])
def test_element_spec_after_set_state_leaves_the_batch_for_next(started: bool) -> None:
    with make_feed(Resumable()) as feed:
        take(feed, 3)
        state = feed.get_state()
    with make_feed(Resumable()) as other:
        if started:
            take(other, 1)
        other.set_state(state)
        assert other.element_spec["x"].shape == (8, 2)
        assert other.step == 3
        assert take(other, 3) == [3, 4, 5]


def test_set_state_while_the_read_ahead_is_in_the_same_iterator_loses_nothing() -> None:
    with make_feed(Resumable(seconds=0.05)) as feed:
        take(feed, 1)
        state = feed.get_state()
        for _ in range(3):
            take(feed, 2)
            feed.set_state(state)
            assert take(feed, 3) == [1, 2, 3]


def test_a_state_that_the_iterator_refuses_leaves_the_read_ahead_as_it_was() -> None:
    with make_feed(Resumable(count=90)) as feed:
        take(feed, 60)
        state = feed.get_state()
    with make_feed(Resumable(seconds=0.01)) as other:
        take(other, 2)
        with pytest.raises(meshfeed.StateMismatchError, match="beyond the end"):
            other.set_state(state)
        assert take(other, 6) == [2, 3, 4, 5, 6, 7]
