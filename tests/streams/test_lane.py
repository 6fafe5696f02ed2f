"""One lane: failures and retries, bad records, epochs, snapshots of its state, and records that differ."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.base.errors import SourceError, StateMismatchError
from meshfeed._src.base.exact_json import ALLOWED
from meshfeed._src.base.rng import philox
from meshfeed._src.state import state as feed_state
from meshfeed._src.streams import lane as lane_module
from meshfeed._src.streams.lane import Lane, LaneEntry, LaneSettings


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
        pytest.raises(meshfeed.SourceError, match="1000 consecutive records of lane 0"),
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


# --- a lane by itself -----------------------------------------------------------------------------------------------


class Scripted:
    """A source whose iterator does what ``step(number)`` says for the number of the record."""

    def __init__(self, step: Callable[[int], Any], length: int = 20, **attributes: Any) -> None:
        self.step, self.length = step, length
        self.requested: list[int] = []
        self.opened = self.closed = 0
        for name, value in attributes.items():
            setattr(self, name, value)

    def open(self, lane_index: int, num_lanes: int) -> Any:
        self.opened += 1
        return ScriptedIterator(self)


class ScriptedIterator:
    def __init__(self, source: Scripted) -> None:
        self.source, self.at = source, 0

    def __next__(self) -> Any:
        if self.at >= self.source.length:
            raise StopIteration
        record = self.source.step(self.at)
        self.at += 1
        return record

    def close(self) -> None:
        self.source.closed += 1


class Batched(Scripted):
    """The same, a batch at a time; a failing record fails its batch."""

    def open(self, lane_index: int, num_lanes: int) -> Any:
        self.opened += 1
        return BatchedIterator(self)


class BatchedIterator(ScriptedIterator):
    def next_batch(self, num_records: int) -> Any:
        self.source.requested.append(num_records)
        stop = min(self.at + num_records, self.source.length)
        if stop == self.at:
            raise StopIteration
        records = [self.source.step(number) for number in range(self.at, stop)]
        self.at = stop
        return np.array(records)


def open_lane(source: Any, entry: LaneEntry | None = None, **changes: Any) -> Lane:
    settings = {
        "num_lanes": 8, "num_epochs": 1, "seed": 5, "retry": meshfeed.Retry(initial_seconds=0), "bad_records": None,
    }  # fmt: skip
    return Lane(source, 3, LaneSettings(**{**settings, **changes}), entry or LaneEntry())


def failing(numbers: dict[int, int], error: Exception) -> Callable[[int], Any]:
    """Raises ``error`` at some numbers, that many times; otherwise gives the number."""

    def step(number: int) -> Any:
        if numbers.get(number, 0):
            numbers[number] -= 1
            raise error
        return np.int64(number)

    return step


def test_a_failed_iterator_is_closed_and_its_lane_opened_again_where_it_was() -> None:
    source = Scripted(failing({3: 2, 11: 4}, OSError("a blip")))
    lane = open_lane(source)
    assert lane.describe() == "reading lane 3 (epoch 0, after record 0)"
    taken = lane.take(8)
    assert (taken.tree.tolist(), taken.count, taken.retries) == (list(range(8)), 8, 2)
    assert (source.opened, source.closed) == (3, 2)
    taken = lane.take(30)
    assert (taken.tree.tolist(), taken.count, taken.retries) == (list(range(8, 20)), 12, 4)
    assert (source.opened, source.closed) == (7, 7)
    assert (lane.length, lane.take(5).count, lane.take(5).tree) == (20, 0, None)
    assert lane.entry() == LaneEntry(records=20, taken=20, skip=20, ended=True)


def test_a_record_that_fails_for_good_is_an_error_that_says_where() -> None:
    source = Scripted(failing({3: 99}, OSError("gone")))
    lane = open_lane(source, retry=meshfeed.Retry(attempts=3, initial_seconds=0))
    with pytest.raises(OSError, match="gone") as caught:
        lane.take(8)
    assert caught.value.__notes__ == ["while reading lane 3, after record 3"]
    assert (source.opened, source.closed) == (3, 3)


def test_batches_shrink_to_one_record_after_a_failure_and_grow_again() -> None:
    source = Batched(failing({5: 1}, OSError("a blip")), 40)
    lane = open_lane(source)
    assert lane.take(4).tree.tolist() == [0, 1, 2, 3]
    taken = lane.take(20)
    assert (taken.tree.tolist(), taken.retries) == (list(range(4, 24)), 1)
    # All 20; then the 4 before are dropped again, and 1, 2, 4, 8 and the last 5 are read
    assert source.requested == [4, 20, 4, 1, 2, 4, 8, 5]
    assert lane.take(16).tree.tolist() == list(range(24, 40))
    assert source.requested[8:] == [16]


def test_an_entry_of_a_state_is_read_back_or_its_field_is_named() -> None:
    entry = LaneEntry(records=30, epoch=1, taken=25, skip=25, ended=True)
    saved = dataclasses.asdict(entry)
    assert LaneEntry.from_json(feed_state.seal(saved), 3) == entry
    for changes, field, current in (
        ({"ended": 1}, "lanes.3.ended", "true or false"),
        ({"skip": -1}, "lanes.3.skip", None),
        ({"more": 0}, "lanes.3", sorted(saved)),
    ):
        with pytest.raises(meshfeed.StateMismatchError) as caught:
            LaneEntry.from_json(feed_state.seal({**saved, **changes}), 3)
        assert caught.value.field == field
        assert current in (None, caught.value.current)


def test_lanes_whose_records_end_early_are_no_shorter_lanes() -> None:
    entry = LaneEntry(records=30, epoch=1, taken=25, skip=25)
    for source in (Scripted(np.int64), Batched(np.int64)):
        with pytest.raises(SourceError) as caught:
            open_lane(source, entry, num_epochs=2)
        assert caught.value.lane_index == 3
        assert str(caught.value) == (
            "lane 3 ended 5 records before the record to resume at (epoch 1, record 25); the data has become shorter. Pass "
            "the data that the state was saved with."
        )
    assert open_lane(Scripted(np.int64, 25), entry, num_epochs=2).take(1).count == 0


def test_a_resume_that_reads_all_over_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "meshfeed.lanes")
    open_lane(Scripted(np.int64), LaneEntry(records=7, taken=7, skip=7))
    assert caplog.messages == ["lane 3 has no get_state: it is resumed by reading and dropping 7 records"]
    caplog.clear()
    open_lane(Scripted(np.int64))
    open_lane(WithState(0), LaneEntry(records=7, taken=7, skip=7))
    assert caplog.messages == []


def test_what_is_being_dropped_is_described() -> None:
    seen = []

    def step(number: int) -> Any:
        seen.append(lanes[0].describe() if lanes else "")
        return np.int64(number)

    lanes: list[Lane] = []
    lane = open_lane(Scripted(step))
    lane.take(3)
    lane._close_iterator()
    lanes.append(lane)
    lane.take(1)
    dropping = [f"resuming lane 3: dropped {count} of 3 records" for count in (0, 1, 2)]
    assert seen[3:] == [*dropping, "reading lane 3 (epoch 0, after record 3)"]


def test_a_state_for_a_source_that_takes_none_is_refused() -> None:
    with pytest.raises(StateMismatchError) as caught:
        open_lane(Scripted(np.int64), LaneEntry(records=2, taken=2, state={"at": 2}))
    error = caught.value
    assert (error.field, error.saved, error.current, error.remedy) == (
        "lanes.3.state",
        "a state of the source",
        "ScriptedIterator has no set_state",
        "Pass the source that the state was saved with.",
    )


def test_an_iterator_that_cannot_resume_is_closed() -> None:
    def refuse(iterator: Any, state: Any) -> None:
        raise OSError("no such file")

    source = Scripted(np.int64)
    iterator = type("Resumable", (ScriptedIterator,), {"get_state": lambda self: self.at, "set_state": refuse})
    source.open = lambda lane_index, num_lanes: iterator(source)
    with pytest.raises(OSError, match="no such file"):
        open_lane(source, LaneEntry(records=2, taken=2, state={"at": 2}))
    assert source.closed == 5  # one of each attempt

    short = Scripted(np.int64, length=1)
    with pytest.raises(SourceError, match="ended 1 records before"):
        open_lane(short, LaneEntry(records=2, taken=2, skip=2))
    assert (short.opened, short.closed) == (1, 1)


def test_records_that_are_decoded_are_taken_one_by_one() -> None:
    source = Batched(np.int64, decode=lambda record: record * 10)
    assert open_lane(source).take(3).tree.tolist() == [0, 10, 20]
    assert source.requested == []


def test_stop_iteration_where_no_data_ends_is_an_error() -> None:
    class Source:
        def open(self, lane_index: int, num_lanes: int) -> Any:
            raise StopIteration

    with pytest.raises(SourceError) as opening:
        open_lane(Source())
    assert str(opening.value).startswith("opening lane 3 raised StopIteration, which does not end the data. Return an")
    assert opening.value.lane_index == 3

    def decode(record: Any) -> Any:
        return next(iter(())) if record == 4 else record

    with pytest.raises(SourceError) as decoding:
        open_lane(Scripted(np.int64, decode=decode)).take(8)
    assert decoding.value.lane_index == 3
    assert str(decoding.value) == (
        "decode raised StopIteration at record 4 of lane 3, which does not end the data. Raise ValueError for a bad record."
    )


def bad_at(*numbers: int) -> Callable[[Any], Any]:
    def decode(record: Any) -> Any:
        if int(record) in numbers:
            raise ValueError("x" * 300)
        return record

    return decode


def test_bad_records_are_passed_over_and_listed() -> None:
    source = Scripted(lambda number: np.int64(number), 10, decode=bad_at(0, 3, 4, 9))
    lane = open_lane(source, num_epochs=2, bad_records=meshfeed.SkipBad(0.9))
    first, second = lane.take(4), lane.take(20)
    assert first.tree.tolist() == [1, 2, 5, 6]
    assert second.tree.tolist() == [7, 8, 1, 2, 5, 6, 7, 8]
    reason = "ValueError: " + "x" * 188
    assert first.bad == [(3 << 48 | number, 0, reason) for number in (0, 3, 4)]
    assert second.bad == [(3 << 48 | 9, 0, reason), *((3 << 48 | number, 1, reason) for number in (0, 3, 4, 9))]
    assert lane.length == 12


def test_without_skip_bad_a_bad_record_is_an_error_that_says_which() -> None:
    with pytest.raises(ValueError, match=r"^xxx") as caught:
        open_lane(Scripted(np.int64, decode=bad_at(6))).take(8)
    assert caught.value.__notes__ == ["while decoding record 6 of lane 3"]


def test_1000_bad_records_in_a_row_are_an_error_and_999_are_not() -> None:
    options: dict[str, Any] = {"bad_records": meshfeed.SkipBad(0.9)}
    twice = Scripted(np.int64, 2000, decode=bad_at(*range(999), *range(1000, 1999)))
    assert open_lane(twice, **options).take(2).tree.tolist() == [999, 1999]
    with pytest.raises(SourceError) as caught:
        open_lane(Scripted(np.int64, 2000, decode=bad_at(*range(7, 1007))), **options).take(8)
    assert caught.value.lane_index == 3
    assert str(caught.value) == (
        "1000 consecutive records of lane 3 are bad, up to record 1006 of epoch 0. Check the data as a whole, and decode."
    )


def test_a_decoders_random_numbers_depend_on_the_seed_the_epoch_and_the_record() -> None:
    def decode(record: Any, rng: np.random.Generator) -> Any:
        return rng.integers(2**62)

    taken = open_lane(Scripted(np.int64, 3, decode=decode), num_epochs=2).take(6)
    assert taken.tree.tolist() == [philox(5, e, 3 << 48 | n).integers(2**62) for e in (0, 1) for n in (0, 1, 2)]


def test_an_endless_lane_without_a_record_is_an_error() -> None:
    for num_epochs in (None, 2):
        with pytest.raises(SourceError) as caught:
            open_lane(Scripted(np.int64, 0), num_epochs=num_epochs).take(1)
        assert caught.value.lane_index == 3
        assert str(caught.value) == (
            "lane 3 of 8 has no record in epoch 0, so repeating its epochs would never end. Use fewer lanes (num_lanes=), "
            "or give each lane data."
        )
    lane = open_lane(Scripted(np.int64, 0))
    assert (lane.take(1).count, lane.length) == (0, 0)


def test_epochs_follow_one_another_without_a_gap() -> None:
    for source in (Scripted(np.int64, 3), Batched(np.int64, 3)):
        lane = open_lane(source, num_epochs=3)
        assert lane.take(5).tree.tolist() == [0, 1, 2, 0, 1]
        assert lane.entry() == LaneEntry(records=5, epoch=1, taken=2, skip=2)
        assert lane.length is None
        again = open_lane(source, lane.entry(), num_epochs=3)
        assert again.take(9).tree.tolist() == [2, 0, 1, 2]
        assert again.entry() == LaneEntry(records=9, epoch=2, taken=3, skip=3, ended=True)
    opened = source.opened
    assert open_lane(source, LaneEntry(records=9, epoch=2, taken=3, ended=True)).take(4).count == 0
    assert source.opened == opened, "a lane that has ended is not opened"


def test_a_lane_moves_forward_without_opening_it_again() -> None:
    for source in (Scripted(np.int64), Batched(np.int64)):
        lane, other = open_lane(source, num_epochs=2), open_lane(source, num_epochs=2)
        for num_records in (3, 1, 9):
            expected = lane.take(num_records)
            other.go_to(lane.entry())
            assert other.entry() == lane.entry()
        other.go_to(lane.entry())  # it is there
        assert source.opened == 2
        assert (expected.tree[-1], other.take(2).tree.tolist(), lane.take(2).tree.tolist()) == (12, [13, 14], [13, 14])


def test_a_lane_moves_to_the_next_epoch_and_back_and_to_its_end() -> None:
    source = Scripted(np.int64, 5)
    lane, other = open_lane(source, num_epochs=2), open_lane(source, num_epochs=2)
    lane.take(2)
    early = lane.entry()
    lane.take(5)
    other.go_to(lane.entry())
    assert (other.entry(), source.opened, source.closed) == (LaneEntry(7, 1, 2, skip=2), 4, 2)
    assert other.take(1).tree.tolist() == [2]
    other.go_to(early)
    assert other.take(2).tree.tolist() == [2, 3]
    lane.take(9)
    other.go_to(lane.entry())
    assert (other.take(1).count, other.length, other.entry()) == (0, 10, lane.entry())
    assert source.opened == source.closed


def test_a_move_that_fails_in_passing_opens_the_lane_again() -> None:
    source = Scripted(failing({3: 1}, OSError("a blip")))
    lane = open_lane(source)
    lane.go_to(LaneEntry(records=6, taken=6, skip=6))
    assert (lane.take(2).tree.tolist(), source.opened, source.closed) == ([6, 7], 2, 1)
    assert "reading lane 3" in lane.describe()
    with pytest.raises(SourceError, match="ended 10 records before"):
        lane.go_to(LaneEntry(records=30, taken=30, skip=30))


def test_a_lane_without_a_state_reads_again() -> None:
    assert open_lane(Scripted(np.int64)).reads_again
    assert not open_lane(WithState(0)).reads_again
    wrapped = WithState(0)
    wrapped.reads_again = True  # type: ignore[attr-defined]
    source = type("Source", (), {"open": lambda self, lane_index, num_lanes: wrapped})()
    assert open_lane(source).reads_again


class Clock:
    """Time that passes only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(lane_module.time, "monotonic", lambda: self.now)


def slow_lane(clock: Clock, read_seconds: float, state_seconds: float) -> Lane:
    class Slow:
        def __init__(self) -> None:
            self.at = 0

        def open(self, lane_index: int, num_lanes: int) -> Any:
            return self

        def __next__(self) -> Any:
            clock.now += read_seconds
            self.at += 1
            return np.int64(self.at)

        def get_state(self) -> Any:
            clock.now += state_seconds
            return self.at

        def set_state(self, state: Any) -> None:
            self.at = state

    return open_lane(Slow())


def skips(lane: Lane, count: int) -> list[int]:
    found = []
    for _ in range(count):
        lane.take(1)
        found.append(lane.entry().skip)
    return found


def test_a_cheap_state_is_taken_after_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert skips(slow_lane(Clock(monkeypatch), 1e-6, 1e-5), 4) == [0, 0, 0, 0]
    assert skips(slow_lane(Clock(monkeypatch), 2.0, 0.0078125), 4) == [0, 0, 0, 0]  # below 1 % of the read time


def test_an_expensive_state_is_taken_for_1_percent_of_the_time_or_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "meshfeed.lanes")
    lane = slow_lane(Clock(monkeypatch), 1.0, 0.03125)
    assert skips(lane, 9) == [0, 1, 2, 3, 0, 1, 2, 3, 0]  # 4 s of reading for 0.03 s
    assert lane.entry().state == 9
    assert caplog.messages == ["a snapshot of lane 3 takes 31.2 ms, so it is taken only occasionally"]
    lane = slow_lane(Clock(monkeypatch), 20.0, 4.0)
    assert skips(lane, 9) == [0, 1, 2, 3, 0, 1, 2, 3, 0]  # more than 60 s of reading


def test_a_state_that_has_no_exact_form_is_an_error() -> None:
    lane = open_lane(WithState({1}))
    lane.take(1)
    with pytest.raises(SourceError) as caught:
        lane.entry()
    assert caught.value.lane_index == 3
    assert str(caught.value) == (
        f"the state of lane 3 cannot be saved exactly: a set has no exact JSON form: {{1}}. {ALLOWED}"
    )


def test_a_lane_that_cannot_be_closed_is_closed_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "meshfeed.lanes")
    lane = open_lane(Scripted(np.int64))

    def fail() -> None:
        raise RuntimeError("busy")

    lane._iterator.close = fail
    lane.close()
    assert caplog.messages == ["closing the iterator of lane 3 failed: busy"]
    assert lane._iterator is None
