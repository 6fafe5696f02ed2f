"""What a feed refuses and how it says so: wrong settings for each kind of source, and sources that break the rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed import sources
from meshfeed._src.streams import lane

Record = dict[str, np.ndarray]


def mesh() -> Any:
    return jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))


def feed_of(source: Any, **settings: Any) -> meshfeed.Feed:
    retry = meshfeed.Retry(attempts=3, initial_seconds=0.0002, max_seconds=0.001)
    return meshfeed.Feed(source, mesh(), **{"global_batch_size": 8, "retry": retry, **settings})


def take(feed: meshfeed.Feed, count: int) -> None:
    for _ in range(count):
        next(feed)


def record(number: int) -> Record:
    return {"id": np.int32(number)}


class Table:
    """Random access, in files or not."""

    def __init__(self, count: int = 40, files: bool = False, lengths: Any = None) -> None:
        self.count = count
        if files:
            self.shard_lengths = lambda: np.array([count // 2, count - count // 2])
        if lengths is not None:
            self.lengths = lambda: lengths

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Record:
        return record(number)

    def fingerprint(self) -> int:
        return self.count


class Lanes:
    """A stream, of which every part can be replaced."""

    def __init__(self, records: Callable[[int, int], Any] | None = None, **changes: Any) -> None:
        self.records = records or (lambda lane_index, num_lanes: map(record, range(lane_index, 40, num_lanes)))
        for name, change in changes.items():
            setattr(self, name, change)

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0) -> Iterator[Record]:
        return self.records(lane_index, num_lanes)

    def fingerprint(self) -> str:
        return "lanes"


def batches(*rows: int) -> Any:
    return sources.HostBatches([{"x": np.full((count, 2), number)} for number, count in enumerate(rows)])


SKIP = meshfeed.SkipBad(max_fraction=0.5)
SETTINGS: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], str | None, list[str]]] = [
    (Lanes, {"shuffle": True}, meshfeed.SettingsError, "shuffle", ["shuffle=True, but a stream"]),
    (Lanes, {"shuffle": 4}, meshfeed.SettingsError, "shuffle", ["shuffle=4, but a stream"]),
    (Lanes, {"bad_records": SKIP}, meshfeed.SettingsError, "bad_records", ["bad_records=SkipBad(…) on a stream"]),
    (Lanes, {"num_lanes": 3}, meshfeed.SettingsError, "num_lanes", ["num_lanes=3", "global_batch_size=8", "such as 8"]),
    (Lanes, {"balance": "tokens"}, meshfeed.SettingsError, "balance", ["balance='tokens' needs a random-access"]),
    (Lanes, {"global_batch_size": None}, meshfeed.SettingsError, "global_batch_size", ["missing; a stream needs it"]),
    (Lanes, {"global_batch_size": 6}, meshfeed.PlanError, None, ["6", "data", "4"]),
    (Table, {"num_lanes": 2}, meshfeed.SettingsError, "num_lanes", ["num_lanes=2, but a random-access source"]),
    (Table, {"shuffle": "shards"}, meshfeed.SettingsError, "shuffle", ["shuffle='shards' needs", "of kind 'Table'"]),
    (
        lambda: Table(files=True),
        {"shuffle": "shards", "num_lanes": 3},
        meshfeed.SettingsError,
        "num_lanes",
        ["num_lanes=3; it must divide every global batch size, here 8"],
    ),
    (
        lambda: Table(files=True),
        {"shuffle": "shards", "num_lanes": 8, "global_batch_size": meshfeed.BatchSchedule([(0, 8), (2, 12)])},
        meshfeed.SettingsError,
        "num_lanes",
        ["num_lanes=8; it must divide every global batch size, here 8, 12"],
    ),
    (lambda: Table(0), {}, meshfeed.SourceError, None, ["the source Table is empty: it has 0 records"]),
    (
        Table,
        {"balance": "tokens"},
        meshfeed.SettingsError,
        "balance",
        ["balance='tokens' needs the lengths", "'Table'"],
    ),
    (
        Table,
        {"global_batch_size": None},
        meshfeed.SettingsError,
        "global_batch_size",
        ["a random-access source needs it"],
    ),
    (lambda: batches(8), {"shuffle": True}, meshfeed.SettingsError, "shuffle", ["shuffle=True has no effect"]),
    (lambda: batches(8), {"shuffle": 1}, meshfeed.SettingsError, "shuffle", ["shuffle=1 has no effect"]),
    (
        lambda: batches(8),
        {"num_workers": 2},
        meshfeed.SettingsError,
        "num_workers",
        ["num_workers=", "has no effect on an iterable"],
    ),
    (lambda: batches(8), {"num_lanes": 2}, meshfeed.SettingsError, "num_lanes", ["num_lanes=2 has no effect"]),
    (lambda: batches(8), {"bad_records": SKIP}, meshfeed.SettingsError, "bad_records", ["has no effect", "handle bad"]),
    (lambda: batches(8), {"load": "once"}, meshfeed.SettingsError, "load", ["load='once' needs a source of records"]),
    (lambda: batches(8), {"balance": "tokens"}, meshfeed.SettingsError, "balance", ["needs a random-access source"]),
    (
        lambda: batches(8),
        {"global_batch_size": meshfeed.BatchSchedule([(0, 8), (2, 16)])},
        meshfeed.SettingsError,
        "global_batch_size",
        ["a BatchSchedule needs a source of records"],
    ),
    (Table, {"load": [1]}, meshfeed.SettingsError, "load", ["no device of host 1 is in"]),
]


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: f"{case[1]}")
def test_settings(case: Any) -> None:
    make, settings, kind, setting, words = case
    with pytest.raises(kind) as caught:
        feed_of(make(), **settings)
    assert getattr(caught.value, "setting", None) == setting
    assert all(word in str(caught.value) for word in words), caught.value


def raising(error: BaseException, at: int = 5) -> Callable[[int, int], Iterator[Record]]:
    def records(lane_index: int, num_lanes: int) -> Iterator[Record]:
        class Iterating:
            number = -1

            def __iter__(self) -> Any:
                return self

            def __next__(self) -> Record:
                self.number += 1
                if self.number == at:
                    raise error
                return record(self.number)

        return Iterating()

    return records


def stop(*_: Any, **__: Any) -> Any:
    raise StopIteration


class WithState:
    """A lane with a state, of which the methods can be replaced."""

    def __init__(self, **changes: Any) -> None:
        self.at = 0
        for name, change in changes.items():
            setattr(self, name, change)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Record:
        self.at += 1
        return record(self.at)

    def get_state(self) -> Any:
        return self.at

    def set_state(self, state: Any) -> None:
        self.at = state


def several(lane_index: int, num_lanes: int) -> Iterator[Record]:
    """Records of which those of the second lane, and the third of the first one, are different."""
    return iter(
        [record(1), record(2), {"id": np.int64(3)}, record(4)] if not lane_index else [{"id": np.float32(1)}] * 4
    )


SOURCES: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], list[str], int | None]] = [
    (lambda: Lanes(stop), {}, meshfeed.SourceError, ["opening lane 0 raised StopIteration"], 0),
    (
        lambda: Lanes(raising(KeyError("gone"))),
        {"num_lanes": 1},
        KeyError,
        ["while reading lane 0, after record 5"],
        None,
    ),
    (
        lambda: Lanes(decode=stop),
        {"num_lanes": 1},
        meshfeed.SourceError,
        ["decode raised StopIteration at record 0 of lane 0"],
        0,
    ),
    (
        lambda: Lanes(lambda lane_index, n: WithState(get_state=stop)),
        {"num_lanes": 1},
        meshfeed.SourceError,
        ["lane 0 raised StopIteration outside of next(), in get_state or close"],
        0,
    ),
    (
        lambda: Lanes(lambda lane_index, n: WithState(get_state=lambda: object())),
        {"num_lanes": 1},
        meshfeed.SourceError,
        ["the state of lane 0 cannot be saved exactly"],
        0,
    ),
    (lambda: Lanes(lambda *_: iter(())), {}, meshfeed.SourceError, ["the stream is empty: none of its lanes"], None),
    (
        lambda: Lanes(lambda lane_index, n: iter([record(1)] if lane_index != 1 else [])),
        {"num_lanes": 2, "num_epochs": 2},
        meshfeed.SourceError,
        ["lane 1 of 2 has no record in epoch 0", "num_lanes="],
        1,
    ),
    (lambda: Lanes(several), {"num_lanes": 2, "global_batch_size": 4}, meshfeed.SourceError, ["lane 1", "float32"], 1),
    (lambda: Lanes(several), {"num_lanes": 1}, meshfeed.SourceError, ["lane 0", "int64"], 0),
    (lambda: batches(), {}, meshfeed.SourceError, ["the host batches are empty"], None),
    (
        lambda: batches(8, 4, 8),
        {},
        meshfeed.SourceError,
        ["host batch 1 has 4 rows and is not the last; expected 8"],
        None,
    ),
    (
        lambda: batches(16),
        {},
        meshfeed.SourceError,
        ["host batch 0: leaf ['x'] has 16 rows, but this host holds 8 rows", "global batch of 8"],
        None,
    ),
    (
        lambda: batches(6),
        {"global_batch_size": None},
        meshfeed.PlanError,
        ["6 rows cannot be split", "4 of the 4"],
        None,
    ),
    (
        lambda: sources.HostBatches([{"x": np.zeros((8, 2))}, {"x": np.zeros((8, 3))}]),
        {},
        meshfeed.SourceError,
        ["host batch 1", "float64[3]", "float64[2]"],
        None,
    ),
    (lambda: sources.HostBatches([None, None]), {}, meshfeed.SourceError, ["gave None; a host batch must be"], None),
    (lambda: sources.HostBatches([{}]), {}, meshfeed.SourceError, ["a host batch has no leaves: {}"], None),
    (
        lambda: sources.HostBatches([{"a": np.int32(3)}]),
        {},
        meshfeed.SourceError,
        ["leaf ['a'] of a host batch is", "dtype int32", "of shape ()", "sources.Stream"],
        None,
    ),
    (
        lambda: Table(lengths=np.arange(40)),
        {"balance": lambda lengths: -1},
        meshfeed.SettingsError,
        ["returned -1 for the segment lengths [0]", "one finite number of at least 0"],
        None,
    ),
    (
        lambda: Table(lengths=np.arange(40)),
        {"balance": lambda lengths: "much"},
        meshfeed.SettingsError,
        ["returned 'much' for the segment lengths [0]"],
        None,
    ),
    (
        lambda: Table(lengths=np.arange(40)),
        {"balance": lambda lengths: np.inf},
        meshfeed.SettingsError,
        ["returned inf for the segment lengths [0]"],
        None,
    ),
    (
        lambda: Table(lengths=np.arange(3)),
        {"balance": "tokens"},
        meshfeed.SourceError,
        ["the lengths of Table are int64 of shape (3,). Expected one integer of at least 0 per record, [40]"],
        None,
    ),
    (lambda: Table(lengths=np.ones((40, 2))), {"balance": "tokens"}, meshfeed.SourceError, ["shape (40, 2)"], None),
    (lambda: Table(lengths=np.full(40, np.nan)), {"balance": "tokens"}, meshfeed.SourceError, ["are float64"], None),
    (lambda: Table(lengths=-np.arange(40)), {"balance": "attention"}, meshfeed.SourceError, ["-39 at least"], None),
    (lambda: Table(lengths=np.arange(40)), {"balance": stop}, meshfeed.SourceError, ["costs of records raised"], None),
]


@pytest.mark.parametrize("case", SOURCES, ids=lambda case: case[3][0][:40])
def test_sources_that_break_the_rules(case: Any) -> None:
    make, settings, kind, words, lane_index = case
    with feed_of(make(), **settings) as feed:
        for _ in range(2):
            with pytest.raises(kind) as caught:
                take(feed, 9)
            text = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
            assert all(word in text for word in words), caught.value
            assert getattr(caught.value, "lane_index", None) == lane_index
            assert getattr(caught.value, "setting", "balance") == "balance"


def test_a_lane_of_bad_records_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(one: Record) -> Record:
        if int(one["id"]) >= 9:
            raise ValueError("not readable")
        return one

    monkeypatch.setattr(lane, "_MAX_BAD_IN_A_ROW", 7)
    for allowed, words in (
        (None, ["not readable", "while decoding record 9 of lane 0"]),
        (meshfeed.SkipBad(max_fraction=1.0), ["7 consecutive records of lane 0 are bad, up to record 15 of epoch 0"]),
    ):
        with feed_of(Lanes(decode=decode), num_lanes=1, bad_records=allowed, end="pad") as feed:
            next(feed)
            with pytest.raises((ValueError, meshfeed.SourceError)) as caught:
                next(feed)
            text = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
            assert all(word in text for word in words), text


def saved(source: Any, steps: int = 2, **settings: Any) -> Any:
    with feed_of(source, num_lanes=2, **settings) as feed:
        for _ in range(steps):
            next(feed)
        return feed.get_state()


@pytest.mark.parametrize(
    ("before", "after", "kind", "words"),
    [
        (None, lambda *_: iter([]), meshfeed.SourceError, ["lane 0 ended 8 records before", "epoch 0, record 8"]),
        (None, lambda i, n: map(record, range(5)), meshfeed.SourceError, ["lane 0 ended 3 records before"]),
        (lambda *_: WithState(), None, meshfeed.StateMismatchError, ["lanes.0.state", "has no set_state"]),
        (
            lambda *_: WithState(),
            lambda *_: WithState(set_state=stop),
            meshfeed.SourceError,
            ["restoring lane 0 raised"],
        ),
    ],
)
def test_states_that_a_source_cannot_take(before: Any, after: Any, kind: type[Exception], words: Sequence[str]) -> None:
    state = saved(Lanes(before))
    with feed_of(Lanes(after), num_lanes=2) as feed:
        with pytest.raises(kind) as caught:
            feed.set_state(state)
        assert all(word in str(caught.value) for word in words), caught.value
        assert getattr(caught.value, "lane_index", 0) == 0
        assert feed.step == feed.position == 0
        assert feed.get_state()["lanes"]["0"]["records"] == 0


def test_lanes_are_resumed_with_any_number_of_records_that_fits() -> None:
    state = saved(Lanes())
    for size in (5, 7):
        with pytest.raises((meshfeed.SettingsError, meshfeed.PlanError)):
            feed_of(Lanes(), global_batch_size=size, num_lanes=2)
    with feed_of(Lanes(), global_batch_size=4) as feed:
        feed.set_state(state)  # the lanes of the state
        assert [next(feed)["id"].tolist() for _ in range(2)] == [[16, 18, 17, 19], [20, 22, 21, 23]]
    wide = saved(Lanes(), steps=1)
    with feed_of(Lanes(), num_lanes=4) as feed:
        with pytest.raises(meshfeed.StateMismatchError) as caught:
            feed.set_state(wide)
        assert (caught.value.field, caught.value.saved, caught.value.current) == ("num_lanes", 2, 4)
    six = meshfeed.Feed(
        Lanes(),
        jax.make_mesh((3,), ("data",), devices=jax.devices()[:3], axis_types=(AxisType.Auto,)),
        global_batch_size=9,
    )
    with six as feed:
        with pytest.raises(meshfeed.StateMismatchError) as caught:
            feed.set_state(wide)
        assert caught.value.field == "num_lanes"
        assert "a divisor of the batch sizes [9]" in str(caught.value)


def test_replay_before_a_state_and_after_the_end() -> None:
    with feed_of(Lanes(), num_lanes=2) as feed:
        states = [feed.get_state()]
        for _ in itertools.islice(feed, 3):
            states.append(feed.get_state())
        with pytest.raises(meshfeed.SettingsError, match="replay of step 1 from a state taken at step 2") as caught:
            feed.replay(1, state=states[2])
        assert caught.value.setting == "state"
        with pytest.raises(IndexError, match="step 9"):
            feed.replay(9)
        assert feed.replay(2, state=states[2])["id"].tolist() == [16, 18, 20, 22, 17, 19, 21, 23]
    with feed_of(Table()) as feed:
        for step, words in ((-1, "step -1 is not"), (5, r"has 5 steps \(0 to 4\)")):
            for call in (feed.record_ids, feed.replay):
                with pytest.raises(IndexError, match=words):
                    call(step)
    with feed_of(Table(), num_epochs=None) as feed, pytest.raises(IndexError, match="begins at step 0"):
        feed.record_ids(-1)


def test_a_leaf_that_does_not_fit_the_mesh() -> None:
    devices = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("rows", "columns"))
    columns = {"fits": np.zeros((40, 4), np.int32), "does not": np.zeros((40, 3), np.float32)}
    with meshfeed.Feed(columns, sharding, global_batch_size=8) as feed, pytest.raises(meshfeed.PlanError) as caught:
        next(feed)
    assert "leaf ['does not'] of size 3" in str(caught.value)


class Parsed(Lanes):
    """A stream that the feed decodes, with a record that cannot be."""

    def decode(self, found: Record) -> Record:
        if found["id"] == 17:
            raise ValueError("record 17 is cut short")
        return found


@pytest.mark.parametrize("num_workers", [0, "auto"])
def test_a_stream_stops_at_a_record_that_cannot_be_decoded_unless_it_may_be_replaced(num_workers: Any) -> None:
    with feed_of(Parsed(), num_lanes=2, num_workers=num_workers) as feed:
        take(feed, 2)
        with pytest.raises(ValueError, match="record 17 is cut short"):
            next(feed)
    with feed_of(
        Parsed(), num_lanes=2, num_workers=num_workers, bad_records=meshfeed.SkipBad(max_fraction=1.0)
    ) as feed:
        take(feed, 4)
        assert feed.stats().skipped_records == 1
