"""One lane: decoders that fail, and records that differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed


class Decoded:
    """A stream of numbers and its decoder."""

    def __init__(self, decode: Callable[..., Any], count: int = 40) -> None:
        self.decode, self._count = decode, count

    def open(self, lane_index: int, num_lanes: int) -> Iterator[int]:
        return iter(range(lane_index, self._count, num_lanes))


def make_feed(source: Any, **options: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    options = {"global_batch_size": 8, "num_lanes": 1, "retry": meshfeed.Retry(initial_seconds=0), **options}
    return meshfeed.MultiHostDataLoadIterator(source, mesh, **options)


def test_a_decoder_that_fails_in_passing_is_given_the_same_record_again() -> None:
    failures = {5: 1, 17: 2}

    def decode(record: int) -> dict[str, Any]:
        if failures.get(record, 0):
            failures[record] -= 1
            raise OSError("a blip")
        return {"x": np.int32(record)}

    with make_feed(Decoded(decode)) as feed:
        rows = [np.asarray(batch["x"]).tolist() for batch in feed]
        assert np.concatenate(rows).tolist() == list(range(40))
        assert feed.stats().retries == 3


def test_a_lane_of_bad_records_only_is_an_error_and_no_endless_loop() -> None:
    def decode(record: int) -> Any:
        raise ValueError("not a record")

    options: dict[str, Any] = {"num_epochs": None, "bad_records": meshfeed.SkipBad(0.5), "timeout_seconds": 30}
    with (
        make_feed(Decoded(decode), **options) as feed,
        pytest.raises(meshfeed.SourceError, match="1000 records of lane 0"),
    ):
        next(feed)


@pytest.mark.parametrize(
    "second", [np.zeros((4, 3), np.float64), np.zeros((4, 2), np.float32), {"y": np.zeros((4, 3), np.float32)}]
)
def test_stacked_parts_of_one_batch_that_differ_are_never_promoted(second: Any) -> None:
    class Lane:
        def __init__(self) -> None:
            self._parts = [np.zeros((4, 3), np.float32), second]

        def __iter__(self) -> Lane:
            return self

        def __next__(self) -> Any:
            raise AssertionError("next_batch is the way")

        def next_batch(self, num_records: int) -> Any:
            if not self._parts:
                raise StopIteration
            return self._parts.pop(0)

    class Source:
        def open(self, lane_index: int, num_lanes: int) -> Lane:
            return Lane()

    with make_feed(Source()) as feed, pytest.raises(meshfeed.SourceError, match=r"float32\[3\]"):
        next(feed)


def test_what_a_lane_raises_says_which_lane_and_where() -> None:
    def lane(lane_index: int, num_lanes: int) -> Iterator[dict[str, Any]]:
        for number in range(40):
            if (lane_index, number) == (3, 5):
                raise KeyError("no such thing")
            yield {"x": np.int32(number)}

    with make_feed(meshfeed.sources.Stream(lane), num_lanes=4) as feed:
        next(feed)
        next(feed)
        with pytest.raises(KeyError) as info:
            next(feed)
    assert info.value.__notes__ == ["while reading lane 3, after record 5"]


class WithState:
    """Counts, and has whatever state it is given besides."""

    def __init__(self, extra: Any) -> None:
        self.number, self.extra = 0, extra
        self.restored: list[Any] = []

    def open(self, lane_index: int, num_lanes: int) -> WithState:
        opened = WithState(self.extra)
        opened.restored = self.restored
        return opened

    def __iter__(self) -> WithState:
        return self

    def __next__(self) -> dict[str, Any]:
        self.number += 1
        return {"x": np.int32(self.number)}

    def get_state(self) -> Any:
        return {"number": self.number, "extra": self.extra}

    def set_state(self, state: Any) -> None:
        self.number = state["number"]
        self.restored.append(state["extra"])


@pytest.mark.parametrize(
    "extra",
    [
        {"__array__": "a key of the source's own"},
        {"__array__": ["<i4", [1], "01000000"]},
        np.int32(3),
        np.bool_(True),
        np.float64(0.5),
        (np.float16(1), [b"\0", {3: float("inf")}]),
    ],
)
def test_a_lane_gets_its_state_back_exactly(extra: Any) -> None:
    with make_feed(WithState(extra)) as feed:
        next(feed)
        state = json.loads(json.dumps(feed.get_state(), allow_nan=False))
    kept_by_version_1 = isinstance(extra, dict)
    assert state["meshfeed"] == (1 if kept_by_version_1 else 2), "the lowest that reads it"
    source = WithState(None)
    with make_feed(source) as feed:
        feed.set_state(state)
        next(feed)
    assert [(type(found), repr(found)) for found in source.restored] == [(type(extra), repr(extra))]


def test_a_state_of_a_lane_without_an_exact_form_is_refused_by_its_type() -> None:
    with make_feed(WithState({1, 2})) as feed:
        with pytest.raises(meshfeed.SourceError, match=r"lane 0 cannot be saved exactly: a set has no exact JSON form"):
            next(feed)
