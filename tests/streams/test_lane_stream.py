"""The stream of lanes: the same batches on any hosts and after any resume, and what it refuses, word for word."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import threading
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_parts import Fetches, Numbers, Plain, WithState, rows_of_host, run, settings_of

import meshfeed
from meshfeed._src.base.errors import SettingsError, SourceError, StateMismatchError
from meshfeed._src.base.settings import BatchSchedule, SkipBad
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.state.state import parse_state, seal
from meshfeed._src.streams import lane_group
from meshfeed._src.streams.lane import LaneEntry
from meshfeed._src.streams.lane_group import LaneGroup
from meshfeed._src.streams.lane_stream import LaneStream

CHANGED = "The state was changed or damaged; use an earlier checkpoint."


def expected(lengths: list[int], num_epochs: int, sizes: list[int], end: str) -> list[list[int]]:
    """Rows of all batches, from lists of all records of each lane; 0 is padding."""
    lanes = [
        [1000 * lane + 100 * epoch + number + 1 for epoch in range(num_epochs) for number in range(length)]
        for lane, length in enumerate(lengths)
    ]
    batches = []
    for size in sizes:
        each = size // len(lanes)
        taken = [lane[:each] for lane in lanes]
        lanes = [lane[each:] for lane in lanes]
        short = any(len(rows) < each for rows in taken)
        if (short and end == "drop") or not any(taken):
            break
        batches.append([row for rows in taken for row in (*rows, *([0] * (each - len(rows))))])
    return batches


@settings(max_examples=80)
@given(data=st.data())
def test_batches_are_the_same_on_any_hosts_and_after_any_resume(data: st.DataObject) -> None:
    num_lanes = data.draw(st.sampled_from([1, 2, 4]))
    num_epochs = data.draw(st.integers(1, 2))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=num_lanes, max_size=num_lanes))
    end = data.draw(st.sampled_from(["drop", "pad"]))
    schedule = BatchSchedule([(0, 8), *((step, 4) for step in data.draw(st.sets(st.integers(1, 4), max_size=1)))])
    wanted = expected(lengths, num_epochs, [schedule.size_at(step) for step in range(40)], end)
    kind = data.draw(st.sampled_from(["plain", "state", "batches"]))

    def make_stream(num_lanes: int | None) -> LaneStream:
        source = Numbers(lengths, kind)
        return LaneStream(
            source, settings_of(global_batch_size=schedule, num_lanes=num_lanes, num_epochs=num_epochs, end=end)
        )

    state, found = None, []
    for _ in range(data.draw(st.integers(1, 3))):
        owners = data.draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
        result = run(make_stream(num_lanes), owners, steps=data.draw(st.integers(0, 5)), state=state)
        found += [batch["x"].tolist() for batch in result.batches]
        state = result.state
        delivered = sum(value != 0 for batch in found for value in batch)
        assert (state.step, state.position) == (len(found), delivered)
        assert found == wanted[: len(found)]
        assert list(state.lanes or {}) == [str(lane) for lane in range(num_lanes)]
    rest = run(make_stream(None), [0], state=state)  # the number of lanes is that of the state
    assert found + [batch["x"].tolist() for batch in rest.batches] == wanted


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "setting", "message"),
    [
        (
            {"global_batch_size": None},
            "global_batch_size",
            "global_batch_size is missing; a stream needs it (an int or a meshfeed.BatchSchedule).",
        ),
        (
            {"shuffle": True},
            "shuffle",
            "shuffle=True, but a stream cannot be shuffled as a whole: its records are read in order. Shuffle in the source "
            "(meshfeed.sources.ShuffleBuffer, Grain's WindowShuffle, HuggingFace(shuffle_buffer=…), Mixture(shuffle=True)), "
            "or pass a random-access source.",
        ),
        (
            {"bad_records": SkipBad(0.5)},
            "bad_records",
            "bad_records=SkipBad(…) on a stream covers only its decode, but this source has none. Omit it, and handle bad "
            "records in the code that makes the stream.",
        ),
        (
            {"num_lanes": 3},
            "num_lanes",
            "num_lanes=3 does not divide global_batch_size=8; it takes a divisor of every batch size, such as 8.",
        ),
        (
            {"num_lanes": 8, "global_batch_size": BatchSchedule([(0, 8), (3, 12)])},
            "num_lanes",
            "num_lanes=8 does not divide global_batch_size=12; it takes a divisor of every batch size, such as 4.",
        ),
    ],
)
def test_settings_that_a_stream_cannot_have(changes: dict[str, Any], setting: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        LaneStream(Numbers([1] * 8), settings_of(**changes))
    assert (str(caught.value), caught.value.setting) == (message, setting)


def test_a_source_can_refuse_a_number_of_lanes() -> None:
    class Picky(Numbers):
        def check_lanes(self, num_lanes: int) -> None:
            raise SettingsError(f"not {num_lanes} lanes")

    with pytest.raises(SettingsError, match=r"^not 2 lanes$"):
        LaneStream(Picky([1, 1]), settings_of(num_lanes=2))


# --- the state ------------------------------------------------------------------------------------------------------


def stream_of(lengths: list[int], **changes: Any) -> LaneStream:
    return LaneStream(Numbers(lengths), settings_of(num_lanes=len(lengths), **changes))


def saved_after(steps: int, **changes: Any) -> dict[str, Any]:
    """State of 4 lanes of 9, 9, 9 and 3 records, 2 rows each of a batch of 8."""
    return run(stream_of([9, 9, 9, 3], end="pad", **changes), [0], steps=steps).state.to_json()


def test_the_state_is_this() -> None:
    state = saved_after(2, seed=5)
    lanes = [seal({"records": 4, "epoch": 0, "taken": 4, "state": None, "skip": 4, "ended": False})] * 3
    lanes.append(seal({"records": 3, "epoch": 0, "taken": 3, "state": None, "skip": 3, "ended": True}))
    assert state == {
        "meshfeed": 1,
        "kind": "lanes",
        "position": 15,
        "segments": [[0, 0, 8]],
        "fingerprint": {
            "source": {"kind": "Numbers", "fingerprint": "numbers [9, 9, 9, 3]"},
            "seed": 5, "num_epochs": 1, "end": "pad", "num_lanes": 4,
        },
        "step": 2,
        "num_lanes": 4,
        "lanes": dict(zip("0123", lanes, strict=True)),
    }  # fmt: skip


def test_lanes_are_written_in_the_order_of_their_numbers() -> None:
    stream = stream_of([1] * 12, global_batch_size=12)
    cursor = stream.start()
    shuffled = dataclasses.replace(cursor, entries=dict(sorted(cursor.entries.items())))
    assert list(stream.state(shuffled).lanes or {}) == [str(lane) for lane in range(12)]


def with_lane(state: dict[str, Any], lane: str, **changes: Any) -> dict[str, Any]:
    entry = {key: value for key, value in state["lanes"][lane].items() if key != "digest"}
    return {**state, "lanes": {**state["lanes"], lane: seal({**entry, **changes})}}


def without(state: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in fields}


AFTER_2 = saved_after(2)
FORM = "num_lanes, step and lanes of a stream"
ENTRY_FIELDS = ["ended", "epoch", "records", "skip", "state", "taken"]


@pytest.mark.parametrize(
    ("state", "changes", "expected"),
    [
        (without(AFTER_2, "lanes"), {}, ("lanes", None, FORM, CHANGED)),
        (without(AFTER_2, "step"), {}, ("lanes", None, FORM, CHANGED)),
        (without(AFTER_2, "num_lanes"), {}, ("lanes", None, FORM, CHANGED)),
        ({**AFTER_2, "num_lanes": 0}, {"num_lanes": None}, ("lanes", None, FORM, CHANGED)),
        (
            AFTER_2,
            {"num_lanes": 2},
            ("num_lanes", 4, 2, "Pass the saved number, or num_lanes=None to take it from the state."),
        ),
        ({**AFTER_2, "num_lanes": 2}, {}, ("num_lanes", 2, 4, CHANGED)),
        (
            AFTER_2,
            {"num_lanes": None, "global_batch_size": BatchSchedule([(0, 8), (4, 6)])},
            (
                "num_lanes",
                4,
                "a divisor of the batch sizes [8, 6]",
                "Choose global_batch_size as a multiple of the saved number of lanes.",
            ),
        ),
        (AFTER_2, {"seed": 1}, ("seed", 0, 1, "Pass the saved value, or start a new stream without the state.")),
        (
            {**AFTER_2, "segments": [[0, 0, 0]]},
            {},
            ("segments", [0, 0, 0], "a list of [first_step, first_position, global_batch_size]", CHANGED),
        ),
        ({**AFTER_2, "position": 17}, {}, ("position", 17, "16 at step 2", CHANGED)),
        ({**AFTER_2, "step": 0}, {}, ("position", 15, "0 at step 0", CHANGED)),
        ({**AFTER_2, "step": 1}, {}, ("position", 15, "8 at step 1", CHANGED)),
        ({**AFTER_2, "segments": []}, {}, ("position", 15, "0 at step 2", CHANGED)),
        ({**AFTER_2, "position": 14}, {}, ("position", 14, "15 records in all lanes", CHANGED)),
        ({**AFTER_2, "lanes": {"4": {}}}, {}, ("lanes.4", "4", "a lane below 4", CHANGED)),
        ({**AFTER_2, "lanes": {"2": 7}}, {}, ("lanes.2", 7, "an object with a digest", CHANGED)),
        (
            {**AFTER_2, "lanes": {"2": seal({"records": 4})}},
            {},
            (
                "lanes.2",
                ["records"],
                ["ended", "epoch", "records", "skip", "state", "taken"],
                "Use an earlier checkpoint.",
            ),
        ),
        (
            {**AFTER_2, "lanes": {"2": seal({"record": 4, "at": 0})}},
            {},
            ("lanes.2", ["at", "record"], ENTRY_FIELDS, "Use an earlier checkpoint."),
        ),
        (with_lane(AFTER_2, "1", records=5), {}, ("lanes.1.records", 5, 4, CHANGED)),
        (with_lane(AFTER_2, "1", records=3), {}, ("lanes.1.records", 3, 4, CHANGED)),
        (with_lane(AFTER_2, "3", records=5), {}, ("lanes.3.records", 5, 4, CHANGED)),
        (with_lane(AFTER_2, "3", records=2), {}, ("position", 15, "14 records in all lanes", CHANGED)),
    ],
)
def test_a_state_of_something_else_is_refused(
    state: dict[str, Any], changes: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    stream = LaneStream(Numbers([9, 9, 9, 3]), settings_of(**{"num_lanes": 4, "end": "pad", **changes}))
    if not expected[3]:  # an entry may leave out fields at their defaults
        assert stream.restore(parse_state(state)).entries["2"] == LaneEntry(records=4)
        return
    with pytest.raises(StateMismatchError) as caught:
        stream.restore(parse_state(state))
    error = caught.value
    assert (error.field, error.saved, error.current, error.remedy) == expected


def test_with_drop_the_position_is_that_of_the_step() -> None:
    state = run(stream_of([9, 9, 9, 9]), [0], steps=2).state.to_json()
    with pytest.raises(StateMismatchError) as caught:
        stream_of([9, 9, 9, 9]).restore(parse_state({**state, "position": 15}))
    assert (caught.value.field, caught.value.saved, caught.value.current) == ("position", 15, "16 at step 2")


def test_a_restored_cursor_has_what_was_saved() -> None:
    extra = {"skipped": {"0": [[7, 0, "bad", 1]]}, "num_skipped": 3}
    stream = stream_of([9, 9, 9, 3], end="pad")
    cursor = stream.restore(parse_state({**AFTER_2, **extra}))
    assert (cursor.step, cursor.position, cursor.num_lanes, cursor.num_skipped) == (2, 15, 4, 3)
    assert cursor.skipped.listed == extra["skipped"]
    assert cursor.ended == {3: 3}
    assert cursor.source is stream.source
    assert stream.state(cursor).to_json() == {**AFTER_2, **extra}
    assert [cursor.step_schedule.at(step) for step in (1, 2, 3)] == [(8, 8), (16, 8), (24, 8)]


def test_a_new_batch_size_applies_from_the_step_of_the_state() -> None:
    stream = LaneStream(Numbers([9, 9, 9, 3]), settings_of(global_batch_size=4, end="pad"))
    cursor = stream.restore(parse_state(AFTER_2))
    assert [cursor.step_schedule.at(step) for step in (1, 2, 3)] == [(8, 8), (16, 4), (20, 4)]
    rest = run(stream, [0, 1], state=parse_state(AFTER_2))
    assert [batch["x"].tolist() for batch in rest.batches] == [
        [n, 1000 + n, 2000 + n, 0] for n in (5, 6, 7, 8, 9)
    ]  # fmt: skip
    assert stream.start(cursor).num_lanes == 4
    assert list(stream.start(cursor).entries) == ["0", "1", "2", "3"]
    assert stream.start().entries["0"] == LaneEntry()


def test_missing_lanes_are_named_when_the_host_reads_them() -> None:
    state = {**AFTER_2, "lanes": {key: AFTER_2["lanes"][key] for key in ("3", "1")}}
    stream = stream_of([9, 9, 9, 3], end="pad")
    cursor = stream.restore(parse_state(state))
    with pytest.raises(StateMismatchError) as caught:
        stream.open_reader(cursor, rows_of_host([0, 0, 0, 1], 0), hosts_agree=True)
    error = caught.value
    assert (error.field, error.saved, error.current, error.remedy) == (
        "lanes",
        "lanes [1, 3] of 4",
        "this host reads the lanes [0, 1, 2]",
        "The state lacks the lanes [0, 2]: merge the states of all hosts with meshfeed.merge_states.",
    )
    reader = stream.open_reader(cursor, rows_of_host([0, 0, 0, 1], 1), hosts_agree=True)
    assert reader.next().ended == {3: 3}
    reader.close()


# --- reading --------------------------------------------------------------------------------------------------------


def open_reader(stream: LaneStream, host: int = 0, owners: tuple[int, ...] = (0,), **options: Any) -> Any:
    return stream.open_reader(stream.start(), rows_of_host(owners, host), **{"hosts_agree": False, **options})


def test_lanes_are_opened_with_their_index_the_number_of_lanes_the_epoch_and_the_seed() -> None:
    stream = stream_of([2, 2, 2, 2], seed=9, num_epochs=2)
    open_reader(stream, host=1, owners=(0, 1)).close()
    assert stream.source.opened == [(2, 4, 0, 9), (3, 4, 0, 9)]
    stream.close()
    assert stream.source.closed
    LaneStream(type("Bare", (), {"open": Numbers([1]).open})(), settings_of(num_lanes=1)).close()


def without_seconds(reader: Any) -> str:
    """What a reader does; it also says for how long."""
    what, _, seconds = reader.describe().rpartition(" for ")
    assert re.fullmatch(r"\d+\.\d s", seconds)
    return what


def test_a_batch_has_the_rows_of_its_host_and_what_the_state_needs() -> None:
    reader = open_reader(stream_of([9, 1, 9, 3], end="pad", mask_key="real"), owners=(0, 1, 0, 1), host=1)
    assert without_seconds(reader) == "step 0: reading lane 1 (epoch 0, after record 0)"
    batch = reader.next()
    assert (batch.step, batch.global_batch_size, batch.num_bytes) == (0, 8, 4 * 9)
    assert {key: value.tolist() for key, value in batch.tree.items()} == {
        "x": [1001, 0, 3001, 3002], "real": [True, False, True, True],
    }  # fmt: skip
    assert batch.ended == {1: 1}
    assert batch.entries == {
        "1": LaneEntry(records=1, taken=1, skip=1, ended=True), "3": LaneEntry(records=2, taken=2, skip=2),
    }  # fmt: skip
    assert (batch.bad, batch.retries, list(batch.times)) == ([], 0, ["read_seconds"])
    assert batch.times["read_seconds"] > 0
    assert (reader.final(), reader.empty) == (None, False)
    assert reader.next().step == 1
    assert without_seconds(reader) == "step 2: reading lane 3 (epoch 0, after record 3)"
    reader.close()


def test_a_host_whose_lanes_have_ended_pads_for_the_others() -> None:
    reader = open_reader(stream_of([1, 9], end="pad", mask_key="real"), owners=(0, 1), hosts_agree=True)
    reader.next()
    for step in (1, 2):
        batch = reader.next()
        assert batch.step == step
        assert batch.tree["x"].tolist() == [0] * 4
        assert batch.tree["real"].tolist() == [False] * 4
        assert reader.final() == 1
    reader.close()
    alone = open_reader(stream_of([1, 1], end="pad"))
    alone.next()
    for _ in range(2):
        with pytest.raises(StopIteration):
            alone.next()
    assert alone.final() is None


def test_a_host_without_a_record_has_no_batch_to_show() -> None:
    reader = open_reader(stream_of([0, 9], end="pad", mask_key="real"), owners=(0, 1), hosts_agree=True)
    batch = reader.next()
    assert (batch.tree, batch.num_bytes, batch.ended, reader.final(), reader.empty) == (None, 0, {0: 0}, 0, True)


@pytest.mark.parametrize("end", ["drop", "pad"])
def test_an_empty_stream_is_an_error_unless_other_hosts_may_have_records(end: str) -> None:
    message = "the stream is empty: none of its lanes has a record. Check the files, and any filter before the feed."
    with pytest.raises(SourceError) as caught:
        open_reader(stream_of([0, 0], end=end)).next()
    assert str(caught.value) == message
    reader = open_reader(stream_of([0, 0], end="drop"), hosts_agree=True)
    with pytest.raises(StopIteration):
        reader.next()
    assert open_reader(stream_of([0, 1], end="pad")).next().ended == {0: 0, 1: 1}


def test_a_host_outside_the_mesh_reads_nothing() -> None:
    stream = stream_of([9, 9], end="pad")
    nothing = HostRows(lambda size: np.empty(0, np.int64), lambda size: None)
    reader = stream.open_reader(stream.start(), nothing, hosts_agree=True)
    assert (without_seconds(reader), reader.next().entries) == ("step 0: idle", {})
    assert stream.source.opened == []


def test_the_position_counts_the_records_of_all_hosts() -> None:
    stream = stream_of([9, 9, 9, 3], end="pad")
    cursor = stream.restore(parse_state(AFTER_2))
    assert [stream.records_after(cursor, step, {}) for step in (2, 3, 4)] == [21, 27, 33]
    assert stream.records_after(cursor, 4, {0: 9, 1: 20}) == 32
    assert stream.records_after(stream.start(), 1, {2: 1}) == 13
    assert stream.batch_size_at(cursor) == 8
    reader = stream.open_reader(cursor, rows_of_host([0], 0), hosts_agree=False)
    after = reader.advance(cursor, dataclasses.replace(reader.next(), bad=[(7, 0, "bad")]), {0: 5}, 4)
    reader.close()
    assert (after.step, after.position, after.ended, after.num_skipped) == (3, 20, {3: 3, 0: 5}, 4)
    assert after.skipped.listed == {"0": [[7, 0, "bad", 2]]}


def test_the_structure_is_that_of_the_first_record_of_any_lane() -> None:
    stream = stream_of([0, 0, 2, 1], num_epochs=None)
    spec = stream.record_spec()
    assert [(leaf.path, leaf.shape, leaf.dtype) for leaf in spec.leaves] == [("['x']", (), np.int64)]
    assert [entry[0] for entry in stream.source.opened] == [0, 1, 2]
    assert stream.record_spec() is spec
    with pytest.raises(SourceError) as caught:
        stream_of([0, 0]).record_spec()
    assert str(caught.value) == "the stream is empty: none of its 2 lanes has a record."


def test_lanes_share_the_settings_of_the_feed() -> None:
    settings = stream_of([1, 1], num_epochs=None, seed=4).lane_settings(7)
    assert (settings.num_lanes, settings.num_epochs, settings.seed, settings.bad_records) == (7, None, 4, None)


def test_a_step_is_read_again_from_a_state_at_or_before_it() -> None:
    stream = stream_of([9, 9, 9, 3], end="pad")
    current = stream.start()
    first = stream.replay_from(current, 5, None)
    assert (first.step, first.entries) == (0, current.entries)
    for step in (2, 3):
        assert stream.replay_from(current, step, parse_state(AFTER_2)).step == 2
    with pytest.raises(SettingsError) as caught:
        stream.replay_from(current, 1, parse_state(AFTER_2))
    assert caught.value.setting == "state"
    assert str(caught.value) == (
        "replay of step 1 from a state taken at step 2; it takes a state taken at or before the step."
    )


def test_what_a_stream_has_not_is_an_error() -> None:
    stream = stream_of([1, 1])
    with pytest.raises(TypeError) as no_length:
        stream.num_steps(stream.start())
    with pytest.raises(SourceError) as no_ids:
        stream.record_ids(stream.start(), 3)
    with pytest.raises(SourceError) as no_read:
        stream.read([1])
    assert [str(error.value) for error in (no_length, no_ids, no_read)] == [
        "the length of a stream is unknown until it ends. Count steps in the loop.",
        "record_ids(3): a stream has no record ids; read the step again from a state taken before it.",
        "read(record_ids): a stream has no record ids; pass a random-access source.",
    ]


@pytest.mark.parametrize("num_threads", [1, 2, 9])
def test_threads_change_nothing(num_threads: int) -> None:
    wanted = expected([9, 9, 9, 3], 1, [8] * 9, "pad")
    stream = LaneStream(Numbers([9, 9, 9, 3]), settings_of(num_lanes=4, end="pad", num_threads=num_threads))
    assert [batch["x"].tolist() for batch in run(stream, [0]).batches] == wanted
    reader = open_reader(stream)
    assert without_seconds(reader) == "step 0: reading lane 0 (epoch 0, after record 0)"
    threads = reader._places._lanes._threads
    assert (0 if threads is None else len(threads._threads)) == {1: 0, 2: 2, 9: 4}[num_threads]
    reader.close()


def test_a_stream_says_how_many_threads_read_its_lanes() -> None:
    source = Numbers([9, 9, 9, 3])
    source.read_threads = 3
    for num_threads, found in ((None, 3), (2, 2)):
        reader = open_reader(LaneStream(source, settings_of(num_lanes=4, num_threads=num_threads)))
        assert len(reader._places._lanes._threads._threads) == found
        reader.close()


@pytest.mark.slow
def test_workers_change_nothing() -> None:
    wanted = expected([9, 9, 9, 3], 1, [8, 8, 8, 4, 4], "pad")
    schedule = BatchSchedule([(0, 8), (3, 4)])
    settings = settings_of(num_lanes=4, end="pad", num_workers=2, global_batch_size=schedule)
    reader = open_reader(LaneStream(Numbers([9, 9, 9, 3], "state"), settings))
    try:
        assert without_seconds(reader) == "step 0: waiting for 2 workers to read lanes"
        batches = [reader.next() for _ in range(5)]
        assert [batch.tree["x"].tolist() for batch in batches] == wanted
        assert list(batches[-1].entries) == ["0", "1", "2", "3"]
        assert batches[0].times["read_seconds"] > 0
    finally:
        reader.close()


def test_each_of_two_threads_reads_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([5.0, 7.5])
    monkeypatch.setattr(lane_group.time, "perf_counter", lambda: next(now))
    names = set()
    both = threading.Barrier(2, timeout=60)

    class Watched(Plain):
        def __next__(self) -> dict[str, Any]:
            names.add(threading.current_thread().name)
            both.wait()
            return super().__next__()

    class Source:
        def open(self, lane_index: int, num_lanes: int) -> Any:
            return Watched(1000 * lane_index, 9)

    shared = stream_of([1, 1]).lane_settings(2)
    group = LaneGroup(Source(), shared, 2)
    group.go_to({0: LaneEntry(), 1: LaneEntry()})
    assert group.read(3).seconds == 2.5
    assert names == {"meshfeed-lanes-0", "meshfeed-lanes-1"}
    group.close()


def test_the_files_of_coming_reads_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planned(Plain):
        def coming_files(self, num_records: int) -> Any:
            names = [f"{self.base}-{at // 3}" for at in range(self.at, self.length, num_records)]
            return iter([[name] for name in names]) if self.base < 2000 else None

    class Source(Numbers):
        def open(self, lane_index: int, num_lanes: int, **_: Any) -> Any:
            return Planned(1000 * lane_index, self.lengths[lane_index])

    made: list[Fetches] = []
    monkeypatch.setattr(lane_group, "FetchAhead", functools.partial(Fetches, made))
    shared = stream_of([1]).lane_settings(3)
    group = LaneGroup(Source([9, 5, 9]), shared)
    group.go_to({lane: LaneEntry() for lane in range(3)})
    group.read(2)
    assert not made, "a replay may read only once"
    for _ in range(3):
        group.read(2)
    assert list(made[0].plan) == [["0-0", "1000-0"], ["0-1", "1000-1"], ["0-2"], ["0-2"]]
    assert made[0].reached_batches == [0, 1, 2]
    group.close()
    assert made[0].closed == 1
    dropped = LaneGroup(Source([9, 5, 9]), shared)
    dropped.go_to({0: LaneEntry()})
    for _ in range(2):
        dropped.read(2)
    del dropped
    gc.collect()
    assert made[1].closed == 1


def test_lanes_are_closed_when_one_cannot_be_opened() -> None:
    closed = []

    class Opening(Numbers):
        def open(self, lane_index: int, num_lanes: int, **_: Any) -> Any:
            if lane_index == 2:
                raise KeyError("lane 2")
            lane = Plain(0, 1)
            lane.close = lambda: closed.append(lane_index)  # type: ignore[attr-defined]
            return lane

    stream = LaneStream(Opening([1] * 4), settings_of(num_lanes=4))
    for num_threads in (1, 2):
        closed.clear()
        group = LaneGroup(stream.source, stream.lane_settings(4), num_threads)
        with pytest.raises(KeyError, match="lane 2"):
            group.go_to({3: LaneEntry(), **dict.fromkeys(range(3), LaneEntry())})
        assert closed == [0, 1]


# --- mixtures, whose stages begin at steps --------------------------------------------------------------------------


def mixed(weights: Any, num_epochs: int | None = None) -> LaneStream:
    def count_from(base: int) -> meshfeed.sources.Stream:
        return meshfeed.sources.Stream(
            lambda lane_index, num_lanes: ({"x": np.int64(base + 100 * lane_index + n)} for n in range(50))
        )

    parts = {"a": count_from(1), "b": count_from(1001)}
    return LaneStream(
        meshfeed.sources.Mixture(parts, weights, block=8), settings_of(num_lanes=4, num_epochs=num_epochs)
    )


STAGES = [(0, {"a": 1, "b": 1}), (4, {"b": 1})]


def test_a_mixture_of_streams_goes_on_in_the_stage_of_the_step() -> None:
    whole = [batch["x"].tolist() for batch in run(mixed(STAGES), [0], steps=7).batches]
    assert {row < 1000 for batch in whole[:4] for row in batch} == {True, False}
    assert {row < 1000 for batch in whole[4:] for row in batch} == {False}
    for steps in (3, 5):
        first = run(mixed(STAGES), [0, 1], steps=steps)
        assert first.state.fingerprint["mixture"]["stages"] == [[0, 0, {"a": 1, "b": 1}], [4, 32, {"b": 1}]]
        rest = run(mixed(STAGES), [1, 0, 0, 0], steps=7 - steps, state=first.state)
        assert [batch["x"].tolist() for batch in (*first.batches, *rest.batches)] == whole
        assert mixed(STAGES).lane_settings(4).num_epochs == 1, "the mixture counts the epochs of its parts"


def test_a_stage_of_a_mixture_that_has_begun_cannot_change_and_a_later_one_can() -> None:
    state = run(mixed(STAGES), [0], steps=3).state
    assert mixed([STAGES[0], (3, {"a": 1})]).restore(state).step == 3
    with pytest.raises(StateMismatchError) as caught:
        mixed([(0, {"a": 3, "b": 1})]).restore(state)
    assert caught.value.field == "mixture.stages[0]"
    assert "weights=[(0, {'a': 1, 'b': 1}), (3, {'a': 3, 'b': 1})]" in caught.value.remedy
    assert mixed(STAGES).record_spec().leaves[0].path == "['x']"


def test_a_mixture_that_is_given_fewer_epochs_than_it_has_delivered_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its lanes are read again to where they were, as far as the last snapshot is behind.
    monkeypatch.setattr("meshfeed._src.streams.lane._CHEAP_SECONDS", -1)
    monkeypatch.setattr("meshfeed._src.streams.lane._SNAPSHOT_SHARE", -1)
    weights = {"a": 1, "b": 1}
    whole = run(mixed(weights), [0], steps=110)
    for steps, more in ((40, 10), (52, 0), (110, 0)):  # an epoch is 50 records of each part, and so 50 steps
        state = run(mixed(weights), [0], steps=steps).state
        assert state.lanes is not None
        assert state.lanes["0"]["skip"] == 2 * steps
        rest = run(mixed(weights, 1), [0, 1], state=state)
        assert [batch["x"].tolist() for batch in rest.batches] == [
            batch["x"].tolist() for batch in whole.batches[steps : steps + more]
        ]


def test_lanes_that_move_end_where_they_have_ended_whatever_the_weights_are_now() -> None:
    """Of a lost host only the beginning is known; weights that were set since would end its lanes elsewhere."""

    def short(base: int, length: int) -> meshfeed.sources.Stream:
        return meshfeed.sources.Stream(
            lambda lane_index, num_lanes: (
                {"x": np.int64(base + 100 * lane_index + n)} for n in range(length - (lane_index == 1))
            )
        )

    parts = {"a": short(1, 6), "b": short(1001, 30)}
    source = meshfeed.sources.Mixture(parts, {"a": 1, "b": 0}, block=8)
    stream = LaneStream(source, settings_of(num_lanes=4, end="pad"))
    past = run(stream, [0], steps=3)
    assert past.cursors[0].ended == {1: 5}
    current = stream.with_stage(past.cursors[0], None, {"b": 1})
    state = stream.state(current)
    moved = stream.take_over(current, dataclasses.replace(state, lanes={}), rows_of_host([0], 0))
    assert {lane: (entry.records, entry.ended) for lane, entry in moved.entries.items()} == {
        **dict.fromkeys("023", (6, False)),
        "1": (5, True),
    }
    assert (moved.step, moved.position, moved.ended) == (3, 23, {1: 5})
    for cursor in (current, moved):
        reader = stream.open_reader(cursor, rows_of_host([0], 0), hosts_agree=False)
        assert reader.next().tree["x"].tolist() == [1001, 1002, 0, 0, 1201, 1202, 1301, 1302]
        reader.close()


def test_lanes_that_move_are_read_on_from_the_last_state_that_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Or records since the last snapshot are read too, however many.
    monkeypatch.setattr("meshfeed._src.streams.lane._CHEAP_SECONDS", 1e9)
    stream = LaneStream(Numbers([40] * 4, "state"), settings_of(num_lanes=4))
    earlier, now = (run(stream, [0], steps=steps) for steps in (3, 5))
    known = {lane: entry for lane, entry in (earlier.state.lanes or {}).items() if lane != "2"}
    state = dataclasses.replace(now.state, lanes=known)
    read: list[int] = []
    here = threading.get_ident()  # threads of feeds that other tests have dropped may still read such lanes

    def take(lane: Any) -> Any:
        if threading.get_ident() == here:
            read.append(lane.base)
        return Plain.__next__(lane)

    monkeypatch.setattr(WithState, "__next__", take)
    moved = stream.take_over(now.cursors[0], state, rows_of_host([0], 0))
    assert {lane: entry.records for lane, entry in moved.entries.items()} == dict.fromkeys("0123", 10)
    assert {base: read.count(base) for base in set(read)} == {0: 4, 1000: 4, 2000: 10, 3000: 4}
    assert "the state of lanes [2] was known only to a host that is gone" in caplog.text
    reader = stream.open_reader(moved, rows_of_host([0], 0), hosts_agree=False)
    assert reader.next().tree["x"].tolist() == [11, 12, 1011, 1012, 2011, 2012, 3011, 3012]
    reader.close()


def test_a_stream_that_is_given_fewer_epochs_than_it_has_delivered_has_ended() -> None:
    def lane(lane_index: int, num_lanes: int) -> Any:
        return ({"x": np.int32(number)} for number in range(lane_index, 8, num_lanes))

    def make(num_epochs: int | None) -> meshfeed.Feed:
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        return meshfeed.Feed(
            meshfeed.sources.Stream(lane), mesh, global_batch_size=2, num_epochs=num_epochs, num_lanes=2
        )

    with make(None) as endless:
        for _ in range(9):
            next(endless)
        state = endless.get_state()
    with make(2) as ended:
        ended.set_state(state)
        assert list(ended) == []
    with make(3) as longer:
        longer.set_state(state)
        assert len(list(longer)) == 3
