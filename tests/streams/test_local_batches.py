"""Host batches in the feed: one iterator that several readers must not share."""

from __future__ import annotations

import threading
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


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"step": 6, "position": 48}, "step"),
        ({"position": 32}, "position"),
        ({"skipped": {"0": 5}}, "skipped.0"),
        ({"skipped": {"0": [[1]]}}, "skipped.0"),
        ({"skipped": {"a": []}}, "skipped.a"),
        ({"hosts": {"first": {}}}, "hosts.first"),
    ],
)
def test_a_state_changed_by_hand_is_refused(change: dict[str, Any], field: str) -> None:
    with make_feed(Resumable()) as feed:
        take(feed, 5)
        state = feed.get_state()
        with pytest.raises(meshfeed.StateMismatchError) as info:
            feed.set_state({**state, **change})
        assert info.value.field == field
        assert feed.get_state() == state
        assert take(feed, 1) == [5]


def test_the_position_of_padded_lanes_is_the_sum_of_their_records() -> None:
    source = meshfeed.sources.Stream(lambda lane, lanes: ({"x": np.full(2, n, np.float32)} for n in range(3 + lane)))
    with make_feed(source, global_batch_size=8, num_lanes=8, end="pad") as feed:
        take(feed, 5)
        state = feed.get_state()
        assert state["position"] == 3 + 4 + 5 * 6
        with pytest.raises(meshfeed.StateMismatchError, match="37 records in all lanes"):
            feed.set_state({**state, "position": 30})


def batches_of(*rows: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((count, 2), number, np.float32)} for number, count in enumerate(rows)]


def test_a_short_batch_ends_an_epoch_and_is_an_error_before_its_end() -> None:
    again = meshfeed.sources.HostBatches(batches_of(8, 8, 4))
    with make_feed(again) as feed:
        assert take(feed, 2) == [0, 1]
        with pytest.raises(StopIteration):
            next(feed)
    with make_feed(again, num_epochs=2) as feed:
        assert take(feed, 3) == [0, 1, 0]
        state = feed.get_state()
    with make_feed(again, num_epochs=2) as feed:
        feed.set_state(state)
        assert take(feed, 1) == [1]
        with pytest.raises(StopIteration):
            next(feed)
        assert feed.position == 32
    for wrong in (make_feed(iter(batches_of(8, 4, 8))), make_feed(iter(batches_of(8, 8, 8)), global_batch_size=16)):
        with wrong, pytest.raises(meshfeed.SourceError, match="and others follow"):
            list(wrong)


def test_a_reader_at_the_end_of_an_epoch_takes_nothing_from_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_end, may_go_on = threading.Event(), threading.Event()

    class Restored(Resumable):
        def set_state(self, state: dict[str, int]) -> None:
            super().set_state(state)
            may_go_on.set()  # the reader goes on once the restore has let go of this iterator

    def close_late(iterator: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            at_the_end.set()
            assert may_go_on.wait(30)

    monkeypatch.setattr(type(meshfeed.sources.HostBatches([]).iterator()), "close", close_late)
    with make_feed(Restored(4), num_epochs=2) as feed:
        assert take(feed, 1) == [0]
        state = feed.get_state()
        assert take(feed, 1) == [1]
        assert not at_the_end.is_set()
        assert take(feed, 1) == [2]
        assert at_the_end.wait(30)
        feed.set_state(state)
        assert take(feed, 7) == [1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("end", ["drop", "pad"])
@pytest.mark.parametrize("size", [None, 8])
def test_no_batch_at_all_is_an_error(end: str, size: int | None) -> None:
    with make_feed(iter([]), end=end, global_batch_size=size) as feed:
        for _ in range(2):
            with pytest.raises(meshfeed.SourceError, match="empty"):
                next(feed)


def test_what_is_no_batch_is_an_error_with_the_leafs_path() -> None:
    wrong: list[tuple[Any, str]] = [
        (None, "None"),
        ({}, "no leaves"),
        ({"x": np.float32(1)}, r"\['x'\].*float32.*shape \(\)"),
        ({"x": np.zeros(8), "y": np.float32(1)}, r"\['y'\].*float32.*shape \(\)"),
    ]
    for batch, message in wrong:
        with make_feed(iter([batch])) as feed, pytest.raises(meshfeed.SourceError, match=message):
            next(feed)


@pytest.mark.parametrize("kind", ["batches", "stream"])
def test_data_smaller_than_a_batch_gives_none_and_one_warning(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    lane = meshfeed.sources.Stream(lambda lane, lanes: iter(batches_of(4)))
    source, options = {"batches": (iter(batches_of(4)), {}), "stream": (lane, {"num_lanes": 1})}[kind]
    with make_feed(source, global_batch_size=8, **options) as feed:
        assert list(feed) == list(feed) == []
    assert [record.levelname for record in caplog.records if "so there is no batch" in record.message] == ["WARNING"]
