"""Lanes that change places: when another place is near enough, and what becomes of one that is not wanted any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import meshfeed
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.threads import Threads
from meshfeed._src.reading.reads import AutoReads, ReadNumbers
from meshfeed._src.streams import lane_places
from meshfeed._src.streams.lane import LaneEntry, LaneSettings
from meshfeed._src.streams.lane_places import LanePlaces, _Coming

SHARED = LaneSettings(2, 1, 0, meshfeed.Retry(initial_seconds=0), None, moves=True)


class Elsewhere:
    """Lanes in another place; a call of ``go_to`` ends when :meth:`arrive` is called."""

    def __init__(self) -> None:
        self.ready = False
        self.went: list[int] = []
        self._asked, self._arrives = threading.Semaphore(0), threading.Semaphore(0)

    def is_ready(self) -> bool:
        return self.ready

    def go_to(self, entries: Mapping[int, LaneEntry]) -> None:
        self.went.append(entries[0].records)
        self._asked.release()
        assert self._arrives.acquire(timeout=60)

    def arrive(self, coming: _Coming) -> None:
        assert self._asked.acquire(timeout=60)
        assert coming._going is not None
        self._arrives.release()
        coming._going.wait()


def at(step: int) -> dict[int, LaneEntry]:
    return {0: LaneEntry(records=10 * step)}


def make_coming() -> tuple[_Coming, Elsewhere]:
    lanes = Elsewhere()
    return _Coming(lanes, 2), lanes  # type: ignore[arg-type]


def test_a_place_is_near_once_it_has_caught_up_in_the_background() -> None:
    coming, lanes = make_coming()
    assert not coming.is_near(1, at(1))
    assert lanes.went == [], "the workers are starting"
    lanes.ready = True
    assert not coming.is_near(2, at(2))
    assert not coming.is_near(3, at(3))
    lanes.arrive(coming)
    assert not coming.is_near(12, at(12)), "it has opened the lanes, and may have read nothing"
    assert not coming.is_near(13, at(13))
    lanes.arrive(coming)
    assert lanes.went == [20, 120]
    assert not coming.is_near(15, at(15)), "3 steps behind after 10: it catches up"
    lanes.arrive(coming)
    assert coming.is_near(16, at(16))
    assert lanes.went == [20, 120, 150]
    coming.thread.close()


def test_a_place_that_does_not_catch_up_is_waited_for() -> None:
    coming, lanes = make_coming()
    lanes.ready = True
    for step, near in ((1, False), (5, False), (12, True)):  # 4 and 7 steps behind
        assert coming.is_near(step, at(step)) == near, step
        if not near:
            lanes.arrive(coming)
    coming.thread.close()


class Lane:
    """Counts, with a state."""

    def __init__(self, first: int, num_lanes: int) -> None:
        self.at, self._num_lanes = first, num_lanes

    def __iter__(self) -> Lane:
        return self

    def __next__(self) -> Any:
        self.at += self._num_lanes
        return {"x": np.int64(self.at - self._num_lanes)}

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        self.at = state


class Source:
    """Lanes that count. From the second time on they are opened on another thread, and wait for ``gate`` there."""

    def __init__(self) -> None:
        self.gate, self.opening = threading.Event(), threading.Event()
        self.opened: list[int] = []
        self.closed: list[int] = []

    def open(self, lane_index: int, num_lanes: int) -> Any:
        self.opened.append(lane_index)
        if len(self.opened) > num_lanes:
            self.opening.set()
            assert self.gate.wait(60)
        lane = Lane(lane_index, num_lanes)
        lane.close = lambda: self.closed.append(lane_index)  # type: ignore[attr-defined]
        return lane


class InThreads(LanePlaces):
    """Places that are all in this process, as if workers were."""

    def _make(self, num_workers: int) -> Any:
        return lane_places.LaneGroup(self._source, self._shared)


def make_places(source: Any) -> tuple[LanePlaces, AutoReads]:
    entries = {0: LaneEntry(), 1: LaneEntry()}
    places = InThreads(source, FeedSettings(num_workers="auto"), SHARED, entries, 0, lambda step: 3)
    auto = AutoReads()
    places.adapt(auto)
    return places, auto


def rows(places: LanePlaces, step: int) -> list[int]:
    return [int(x) for row in places.read(step).lanes.values() for x in row.taken.tree["x"]]


def expected(step: int) -> list[int]:
    return [6 * step + 2 * row + lane for lane in (0, 1) for row in range(3)]


def test_lanes_are_read_where_they_are_until_another_place_is_near() -> None:
    source = Source()
    places, auto = make_places(source)
    auto.wanted = ReadNumbers(2, 1)
    step = 0
    while not source.opening.is_set() or step < 30:
        assert rows(places, step) == expected(step)
        assert auto.in_use.num_workers == 0
        step += 1
    source.gate.set()
    deadline = time.monotonic() + 60
    while auto.in_use.num_workers != 2:
        assert rows(places, step) == expected(step)
        step += 1
        assert time.monotonic() < deadline
    places.close()
    assert sorted(source.opened) == sorted(source.closed) == [0, 0, 1, 1]


def test_a_place_that_is_not_wanted_any_more_is_closed_while_it_opens_lanes() -> None:
    source = Source()
    places, auto = make_places(source)
    auto.wanted = ReadNumbers(2, 1)
    step = 0
    while not source.opening.is_set():
        assert rows(places, step) == expected(step)
        step += 1
    auto.wanted = ReadNumbers(0, 1)
    assert rows(places, step) == expected(step)
    assert places._coming is None
    source.gate.set()
    places.close()
    assert source.opened == [0, 1, 0], "no further lane is opened"
    assert sorted(source.closed) == [0, 0, 1]


def test_lanes_that_cannot_be_opened_elsewhere_stay_with_the_reason() -> None:
    class Once(Source):
        def open(self, lane_index: int, num_lanes: int) -> Any:
            if len(self.opened) >= num_lanes:
                raise ValueError("one connection per lane")
            return super().open(lane_index, num_lanes)

    source = Once()
    places, auto = make_places(source)
    auto.wanted = ReadNumbers(2, 1)
    step = 0
    deadline = time.monotonic() + 60
    while not auto.unchangeable:
        assert rows(places, step) == expected(step)
        step += 1
        assert time.monotonic() < deadline
    assert auto.unchangeable == {"num_workers": "one connection per lane"}
    assert (auto.wanted, auto.in_use) == (ReadNumbers(0, 1), ReadNumbers(0, 1))
    assert rows(places, step) == expected(step)
    places.close()
    assert source.opened == source.closed == [0, 1]


def test_no_place_is_begun_once_the_reader_was_stopped() -> None:
    source = Source()
    places, auto = make_places(source)
    assert rows(places, 0) == expected(0)
    places.stop()
    auto.wanted = ReadNumbers(2, 1)
    assert rows(places, 1) == expected(1)
    assert places._coming is None
    places.close()


def test_another_place_may_be_tried_again_if_the_reader_was_stopped_during_a_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source()
    places, auto = make_places(source)
    assert rows(places, 0) == expected(0)

    def stopped(*_: Any) -> bool:
        places.stop()
        raise meshfeed.SourceError("worker 0 of 1 exited with code 0")

    monkeypatch.setattr(_Coming, "is_near", stopped)
    auto.wanted = ReadNumbers(2, 1)
    with pytest.raises(meshfeed.SourceError):
        places.read(1)
    assert auto.unchangeable == {}
    source.gate.set()
    places.close()


def test_a_host_without_lanes_keeps_its_numbers_until_it_has_some() -> None:
    places = LanePlaces(Source(), FeedSettings(num_workers="auto"), SHARED, {}, 0, lambda step: 3)
    auto = AutoReads()
    places.adapt(auto)
    assert auto.unchangeable["num_workers"] == "this host reads no lane"
    assert auto.in_use == auto.wanted == ReadNumbers(0, 1)
    assert places.read(0).lanes == {}
    places.close()
    places, _ = make_places(Source())
    places.adapt(auto)
    assert auto.unchangeable == {}
    places.close()


@pytest.fixture(autouse=True)
def _threads_end(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Threads] = []

    class Watched(Threads):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(lane_places, "Threads", Watched)
    yield
    deadline = time.monotonic() + 20
    while not all(threads.ended for threads in made):
        assert time.monotonic() < deadline
        time.sleep(0.01)
