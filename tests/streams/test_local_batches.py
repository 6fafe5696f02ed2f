"""Host batches: side by side in the global batch, one iterator that several readers must not share, refusals."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from stream_parts import rows_of_host, settings_of

import meshfeed
from meshfeed._src.state.state import parse_state, seal
from meshfeed._src.streams import local_batches
from meshfeed._src.streams.local_batches import LocalBatchStream, rows_of


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


def test_element_spec_is_known_if_the_read_ahead_takes_the_only_batch_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peek, learn, asked, learned = LocalBatchStream._peek, LocalBatchStream.learn, threading.Event(), threading.Event()

    def only_batch() -> Iterator[Any]:
        assert asked.wait(60)
        yield {"x": np.full((8, 2), 3, np.float32)}

    def peeks_late(stream: Any) -> Any:
        asked.set()
        assert learned.wait(60)
        return peek(stream)

    def learns(stream: Any, batch: Any) -> None:
        learn(stream, batch)
        learned.set()

    monkeypatch.setattr(LocalBatchStream, "_peek", peeks_late)
    monkeypatch.setattr(LocalBatchStream, "learn", learns)
    with make_feed(meshfeed.sources.HostBatches(only_batch()), global_batch_size=8) as feed:
        feed.start()
        assert feed.element_spec["x"].shape == (8, 2)
        assert take(feed, 1) == [3]


def test_set_state_while_the_read_ahead_is_in_the_same_iterator_loses_nothing() -> None:
    with make_feed(Resumable(seconds=0.05)) as feed:
        take(feed, 1)
        state = feed.get_state()
        for _ in range(3):
            take(feed, 2)
            feed.set_state(state)
            assert take(feed, 3) == [1, 2, 3]


def test_element_spec_during_the_first_batch_does_not_move_its_state() -> None:
    class Slow(Resumable):
        def __next__(self) -> dict[str, np.ndarray]:
            time.sleep(0.05 if self.at else 0.6)
            return super().__next__()

        def get_state(self) -> dict[str, int]:
            time.sleep(0.2 if self.at else 0.0)  # as one that asks its workers
            return super().get_state()

    class Loader:
        def __iter__(self) -> Slow:
            return Slow(6)

    with make_feed(Loader(), global_batch_size=8) as feed:
        feed.start()
        time.sleep(0.2)
        assert feed.element_spec["x"].shape == (8, 2)
        assert take(feed, 1) == [0]
        state = feed.get_state()
    with make_feed(Loader(), global_batch_size=8) as other:
        other.set_state(state)
        assert take(other, 5) == [1, 2, 3, 4, 5]


def test_element_spec_retries_as_next_does() -> None:
    class Unsteady(Resumable):
        failures = 2

        def __next__(self) -> dict[str, np.ndarray]:
            if self.failures:
                self.failures -= 1
                raise OSError("a passing fault")
            return super().__next__()

    with make_feed(Unsteady(4), global_batch_size=8) as feed:
        assert feed.element_spec["x"].shape == (8, 2)
        assert take(feed, 4) == [0, 1, 2, 3]


def test_the_error_of_a_generator_is_that_of_next_too() -> None:
    def broken() -> Iterator[dict[str, np.ndarray]]:
        raise ValueError("broken")
        yield {}

    with make_feed(broken(), global_batch_size=8) as feed:
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                _ = feed.element_spec
        with pytest.raises(ValueError, match="broken"):
            next(feed)


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
        with wrong, pytest.raises(meshfeed.SourceError, match="and is not the last"):
            list(wrong)


def test_epochs_of_short_batches_alone_are_an_error_instead_of_an_endless_search() -> None:
    with make_feed(meshfeed.sources.HostBatches(batches_of(6)), global_batch_size=8, num_epochs=None) as feed:
        with pytest.raises(meshfeed.SourceError, match=r"only 6 rows in epoch 1; expected 8 rows.*would never end"):
            next(feed)
    with make_feed(meshfeed.sources.HostBatches(batches_of(6)), global_batch_size=8, num_epochs=3) as feed:
        assert list(feed) == []


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


# --- a stream by itself ---------------------------------------------------------------------------------------------


class Shards:
    """Global batches of as many equal parts as there are hosts."""

    def __init__(self, num_hosts: int = 1) -> None:
        self.num_hosts = num_hosts

    def global_batch_size_of(self, host_rows: int) -> int:
        return host_rows * self.num_hosts

    def smallest_batch_size(self) -> int:
        return self.num_hosts


def numbers(*batches: list[int]) -> list[dict[str, np.ndarray]]:
    return [{"x": np.array(rows, np.int64)} for rows in batches]


def read_to(count: int, last: Any) -> dict[str, Any]:
    """Returns the state of an iterator that has delivered ``count`` batches, the last of which has the rows ``last``."""
    text = f"int64({len(last)},)".encode()
    ends = np.array([last[0], last[-1]], np.int64).tobytes()
    return {"batches": count, "last": xxhash.xxh3_64_hexdigest(text + ends)}


def stream_of(batches: Any, num_hosts: int = 1, **changes: Any) -> LocalBatchStream:
    settings = settings_of(**{"global_batch_size": None, **changes})
    return LocalBatchStream(meshfeed.sources.HostBatches(batches), settings, Shards(num_hosts))


def open_reader(stream: LocalBatchStream, owners: tuple[int, ...] = (0,), host: int = 0, **options: Any) -> Any:
    return stream.open_reader(stream.start(), rows_of_host(owners, host), **{"hosts_agree": False, **options})


@contextlib.contextmanager
def on_host(host: int, num_hosts: int) -> Iterator[None]:
    with (
        unittest.mock.patch.object(local_batches.coordination, "process_index", return_value=host),
        unittest.mock.patch.object(local_batches.coordination, "process_count", return_value=num_hosts),
    ):
        yield


def deliver(
    batches: list[list[dict[str, np.ndarray]]], state: Any = None, steps: int = 1000, **changes: Any
) -> tuple[list[list[int]], Any]:
    """Rows of the batches that hosts with these batches deliver, and the state after them."""
    num_hosts = len(batches)
    streams, cursors, readers = [], [], []
    for host, own in enumerate(batches):
        with on_host(host, num_hosts):
            stream = stream_of(own, num_hosts, **changes)
            cursors.append(stream.start() if state is None else stream.restore(parse_state(state)))
            rows = rows_of_host(range(num_hosts), host)
            readers.append(stream.open_reader(cursors[-1], rows, hosts_agree=num_hosts > 1))
            streams.append(stream)
    found: list[list[int]] = []
    while len(found) < steps:
        try:
            made = [reader.next() for reader in readers]
        except StopIteration:
            break
        if all(reader.final() is not None for reader in readers):
            break
        # A host that was restored after its last batch does not know the structure
        size = made[0].global_batch_size // num_hosts
        rows = [[0] * size if batch.tree is None else batch.tree["x"].tolist() for batch in made]
        found.append([row for own in rows for row in own])
        ended = {key: rows for batch in made for key, rows in batch.ended.items()}
        cursors = [r.advance(cursor, b, ended, 0) for r, cursor, b in zip(readers, cursors, made, strict=True)]
    states = []
    for host, (stream, cursor) in enumerate(zip(streams, cursors, strict=True)):
        with on_host(host, num_hosts):
            states.append(stream.state(cursor).to_json())
    return found, json.loads(json.dumps(meshfeed.merge_states(states)))


@settings(max_examples=80)
@given(data=st.data())
def test_the_batches_of_all_hosts_side_by_side_before_and_after_any_resume(data: st.DataObject) -> None:
    num_hosts, num_epochs = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    end = data.draw(st.sampled_from(["drop", "pad"]))
    batches, streams = [], []
    for host in range(num_hosts):
        full = [[1000 * host + 2 * i + 1, 1000 * host + 2 * i + 2] for i in range(data.draw(st.integers(1, 5)))]
        short = [[1000 * host + 999]] if data.draw(st.booleans()) else []
        batches.append(numbers(*full, *short))
        streams.append((full + ([[*short[0], 0]] if short and end == "pad" else [])) * num_epochs)
    lengths = [len(rows) for rows in streams]
    wanted = [
        [row for rows in streams for row in (rows[step] if step < len(rows) else [0, 0])]
        for step in range(min(lengths) if end == "drop" else max(lengths))
    ]
    options = {
        "num_epochs": num_epochs,
        "end": end,
        "global_batch_size": data.draw(st.sampled_from([None, 2 * num_hosts])),
    }
    state, found = None, []
    for _ in range(data.draw(st.integers(1, 3))):
        more, state = deliver(batches, state, data.draw(st.integers(1, 4)), **options)
        found += more
        assert found == wanted[: len(found)]
        assert (state["step"], state["position"]) == (len(found), sum(row != 0 for rows in found for row in rows))
    assert found + deliver(batches, state, **options)[0] == wanted


def test_a_short_batch_after_a_resume_is_still_the_short_one() -> None:
    batches = [numbers([1, 2], [3, 4], [5])]
    found, state = deliver(batches, steps=2)
    assert found == [[1, 2], [3, 4]]
    assert deliver(batches, state) == ([], state)
    _, padded = deliver(batches, steps=2, end="pad")
    assert deliver(batches, padded, end="pad")[0] == [[5, 0]]


def test_the_state_is_this() -> None:
    _, state = deliver([numbers([1, 2], [3, 4]), numbers([5, 6], [7])], end="pad", num_epochs=3)
    lasts = ["e454ec985b0d32d3", "e2d92feb1860d000"]  # of [3, 4] and [7]
    entries = [seal({"epoch": 2, "step": 6, "iterator": {"batches": 2, "last": last}}) for last in lasts]
    assert state == {
        "meshfeed": 1,
        "kind": "host_batches",
        "position": 21,
        "segments": [[0, 0, 4]],
        "fingerprint": {
            "source": {"kind": "host_batches"}, "elastic": False, "processes": 2, "num_epochs": 3, "end": "pad",
        },
        "step": 6,
        "hosts": dict(zip("01", entries, strict=True)),
    }  # fmt: skip


NO_EFFECT = "{} has no effect on an iterable of host batches. Omit it; {}."


@pytest.mark.parametrize(
    ("changes", "setting", "message"),
    [
        ({"shuffle": True}, "shuffle", NO_EFFECT.format("shuffle=True", "shuffle in the code that makes the batches")),
        ({"shuffle": 1}, "shuffle", NO_EFFECT.format("shuffle=1", "shuffle in the code that makes the batches")),
        (
            {"num_workers": 2},
            "num_workers",
            NO_EFFECT.format("num_workers=Workers(2, gc_every=100)", "use workers in the code that makes the batches"),
        ),
        ({"num_lanes": 2}, "num_lanes", NO_EFFECT.format("num_lanes=2", "host batches have no lanes")),
        (
            {"bad_records": meshfeed.SkipBad(0.5)},
            "bad_records",
            NO_EFFECT.format(
                "bad_records=SkipBad(max_fraction=0.5)", "handle bad records in the code that makes the batches"
            ),
        ),
        (
            {"global_batch_size": meshfeed.BatchSchedule([(0, 4), (2, 8)])},
            "global_batch_size",
            "a BatchSchedule needs a source of records; an iterable of host batches has batches of one size.",
        ),
        (
            {"load": "once"},
            "load",
            "load='once' needs a source of records; each host makes its own rows of host batches.",
        ),
    ],
)
def test_settings_that_host_batches_cannot_have(changes: dict[str, Any], setting: str, message: str) -> None:
    with pytest.raises(meshfeed.SettingsError) as caught:
        stream_of([], **changes)
    assert (str(caught.value), caught.value.setting) == (message, setting)


SINGLE = (
    "If these are single records, pass the dataset that they come from, not its iterator or loader (of tf.data: "
    "sources.TFData); if a function generates them, wrap it in sources.Stream: "
    "meshfeed.sources.Stream(lambda lane_index, num_lanes: itertools.islice(make_records(), lane_index, None, num_lanes))."
)
FORM = f"a host batch is a pytree of arrays with rows first. {SINGLE}"


def message(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(meshfeed.SourceError) as caught:
        call(*arguments)
    return str(caught.value)


def test_what_is_no_host_batch_is_refused_word_for_word() -> None:
    assert rows_of({"x": np.zeros((3, 2)), "y": np.zeros(9)}) == 3
    assert message(rows_of, {}) == f"a host batch has no leaves: {{}}; {FORM}"
    assert message(rows_of, {"x": np.float32(1)}) == (
        f"leaf ['x'] of a host batch is float32 (dtype float32) of shape (); {FORM}"
    )
    assert message(rows_of, 3) == f"leaf (the batch itself) of a host batch is int (dtype int64) of shape (); {FORM}"
    assert message(open_reader(stream_of([None])).next) == (
        "the iterable of host batches gave None; a host batch must be a pytree of arrays."
    )


def test_batches_of_other_sizes_are_refused_word_for_word() -> None:
    reader = open_reader(stream_of(numbers([1], [2, 3]), global_batch_size=2))
    others = "Make batches of that many rows, or omit global_batch_size to take it from the first batch."
    assert message(reader.next) == (
        "host batch 0 has 1 rows and is not the last; expected 2 rows, this host's part of a global batch of 2. "
        f"{others} {SINGLE}"
    )
    reader = open_reader(stream_of(numbers([1, 2], [3], [4, 5])))
    reader.next()
    assert message(reader.next) == (
        "host batch 1 has 1 rows and is not the last; expected 2 rows, this host's part of a global batch of 2. "
        + others
    )
    for end in ("drop", "pad"):
        reader = open_reader(stream_of(numbers([1, 2], [3, 4, 5]), end=end))
        reader.next()
        assert message(reader.next) == (
            "host batch 1: leaf ['x'] has 3 rows, but this host holds 2 rows of a global batch of 2; make batches of 2 rows."
        )
    reader = open_reader(stream_of([np.zeros(3)], global_batch_size=2))
    assert message(reader.next) == (
        "host batch 0: leaf (the batch) has 3 rows, but this host holds 2 rows of a global batch of 2; make batches of 2 "
        f"rows. {SINGLE}"
    )


def test_batches_that_differ_in_structure_are_refused() -> None:
    different = [*numbers([1, 2], [3, 4]), {"x": np.zeros(2, np.int32)}]
    reader = open_reader(stream_of(different))
    assert [reader.next().tree["x"].tolist() for _ in range(2)] == [[1, 2], [3, 4]]
    assert message(reader.next).startswith(
        "host batch 2: records have the leaves ['x'] int32[], but the first record had ['x'] int64[]"
    )
    ragged = [{"x": np.zeros(2), "y": np.zeros(3)}]
    assert "leaf ['y'] of the iterable of host batches is float64 of shape (3,)" in message(
        open_reader(stream_of(ragged)).next
    )


def test_an_iterable_that_does_not_start_again_has_one_epoch() -> None:
    class Once:
        def __init__(self) -> None:
            self.passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return iter(numbers([1, 2]) if self.passes == 1 else [])

    reader = open_reader(stream_of(Once(), num_epochs=2))
    reader.next()
    assert message(reader.next) == (
        "the iterable of host batches gave no batch in epoch 1. With num_epochs, each iter() must start it again."
    )


EMPTY = (
    "the host batches are empty: no host has a batch. Check the data, and the code that makes the batches; a generator can "
    "be read only once."
)


FROM_OTHERS = (
    "A host that only pads learns the structure of the batches from the other hosts, with the first next(feed)."
)


@pytest.mark.parametrize("end", ["drop", "pad"])
def test_a_host_without_a_batch(end: str) -> None:
    assert message(open_reader(stream_of([], end=end)).next) == EMPTY
    stream = stream_of([], num_hosts=2, end=end)
    reader = open_reader(stream, (0, 1), 1, hosts_agree=True)
    assert reader.empty
    if end == "drop":
        with pytest.raises(StopIteration):
            reader.next()
        return
    batch = reader.next()
    assert (batch.tree, batch.global_batch_size, batch.size_from_others, batch.num_bytes) == (None, 2, True, 0)
    assert batch.entries == {"0": {"epoch": 0, "step": 0, "iterator": {"batches": 0}}}
    assert batch.ended == {1 << 32 | 1: 1}
    assert (reader.final(), reader.empty) == (0, True)
    assert message(stream.read_schedule) == (
        "the iterable of host batches gave no batch on this host, which therefore cannot derive the global batch size. Pass "
        "global_batch_size if a host may have no batch."
    )
    empty = "the iterable of host batches is empty: it gave no batch on this host."
    assert message(stream_of([]).read_schedule) == f"{empty} {FROM_OTHERS}"


def test_padding_has_the_shape_and_size_of_the_batches_before_it() -> None:
    stream = stream_of(numbers([1, 2], [3]), num_hosts=4, end="pad", mask_key="real")
    reader = open_reader(stream, (1, 0, 1, 1), 0, hosts_agree=True)
    first, short, padding = reader.next(), reader.next(), reader.next()
    for batch, rows, real in (
        (first, [1, 2], [True] * 2),
        (short, [3, 0], [True, False]),
        (padding, [0, 0], [False] * 2),
    ):
        assert {key: value.tolist() for key, value in batch.tree.items()} == {"x": rows, "real": real}
        assert (batch.global_batch_size, batch.num_bytes, batch.size_from_others) == (8, 18, False)
        assert list(batch.times) == ["read_seconds"]
    assert (first.ended, short.ended, padding.ended) == ({}, {2 << 32 | 3: 1}, {3 << 32 | 2: 2})
    assert [batch.entries["0"] for batch in (first, short, padding)] == [
        {"epoch": 0, "step": 1, "iterator": read_to(1, [1, 2])},
        {"epoch": 0, "step": 2, "iterator": read_to(2, [3])},
        {"epoch": 0, "step": 2, "iterator": read_to(2, [3])},
    ]
    assert (first.step, short.step, padding.step, reader.final()) == (0, 1, 2, 2)
    assert (reader.next().step, reader.final()) == (3, 2)


def test_a_host_restored_at_its_end_keeps_its_entry_while_others_go_on() -> None:
    stream = stream_of(numbers([1, 2]), num_hosts=2, end="pad", num_epochs=2)
    reader = open_reader(stream, (0, 1), 0, hosts_agree=True)
    batches = [reader.next() for _ in range(3)]
    cursor = stream.start()
    for batch in batches:
        cursor = reader.advance(cursor, batch, {}, 0)
    again = stream_of(numbers([1, 2]), num_hosts=2, end="pad", num_epochs=2)
    restored = again.restore(parse_state(stream.state(cursor).to_json()))
    padding = again.open_reader(restored, rows_of_host((0, 1), 0), hosts_agree=True).next()
    assert padding.entries == batches[2].entries == {"0": {"epoch": 1, "step": 2, "iterator": read_to(1, [1, 2])}}


def test_padded_rows_are_announced_in_runs() -> None:
    reader = open_reader(stream_of(numbers([1, 2]), 2, end="pad", global_batch_size=8), (0, 1, 0, 1), hosts_agree=True)
    assert [reader.next().ended, reader.next().ended] == [{1 << 32 | 4: 2}, {2 << 32: 2, 2 << 32 | 4: 2}]


class Uneven:
    """Batches as MaxText makes them."""

    ends_may_differ = rows_may_vary = True

    def __init__(self, *batches: list[int]) -> None:
        self.batches = numbers(*batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_the_number_of_rows_may_vary_where_the_batches_allow_it() -> None:
    stream = stream_of(Uneven([1, 2], [3, 4, 5], [6]), num_hosts=2, end="pad")
    reader = open_reader(stream, (0, 1), hosts_agree=True)
    cursor, sizes = stream.start(), []
    for _ in range(3):
        batch = reader.next()
        sizes.append((batch.global_batch_size, batch.tree["x"].tolist(), batch.ended))
        cursor = reader.advance(cursor, batch, {}, 0)
    assert sizes == [(4, [1, 2], {}), (6, [3, 4, 5], {}), (2, [6], {})]
    assert (cursor.step, cursor.position) == (3, 12)
    padding = reader.next()
    assert (padding.global_batch_size, padding.size_from_others, padding.tree) == (2, True, None)
    assert stream.fingerprint(cursor)["end"] == "drop"
    state = stream.state(cursor)
    restored = stream.restore(state)
    assert (restored.step, restored.position) == (3, 12)


def test_batches_whose_rows_vary_have_the_size_of_the_first_in_a_state_also_after_a_later_one_was_read() -> None:
    states = []
    for first in (0, 1):  # a host that has been set to a later state has read a larger batch first
        stream = stream_of(Uneven([1, 2], [3, 4, 5]), num_hosts=2, end="pad")
        if first:
            stream.learn(numbers([3, 4, 5])[0])
        reader = open_reader(stream, (0, 1), hosts_agree=True)
        cursor = stream.start()
        for _ in range(2):
            cursor = reader.advance(cursor, reader.next(), {}, 0)
        states.append(stream.state(cursor).to_json())
    assert states[0]["segments"] == [[0, 0, 4]]
    assert states[1] == states[0]


def test_an_iterator_that_is_shared_is_moved_by_opening_it_again() -> None:
    assert not stream_of(numbers([1])).moved_by_opening
    assert stream_of(Resumable()).moved_by_opening
    assert not stream_of(iter(numbers([1]))).moved_by_opening, "a generator cannot be opened again at all"


# --- states ---------------------------------------------------------------------------------------------------------

BATCHES = numbers([1, 2], [3, 4], [5, 6], [7, 8])
NOT_ELASTIC = "Host batches are not elastic: continue on the same number of hosts, or pass a source of records."
EARLIER = "Use an earlier checkpoint."
CHANGED = "The state was changed or damaged; use an earlier checkpoint."
JOIN = "Merge the states of all hosts with meshfeed.merge_states."
GAPS = "segments that begin at 0 and join without a gap"
VALUE = "Pass the saved value, or start a new stream without the state."
LONGER = (
    f"{VALUE} To be able to train longer than planned, start the stream with num_epochs=None and end the loop after a number "
    "of steps."
)
AFTER_3 = deliver([BATCHES], steps=3)[1]


def entry_at(**changes: Any) -> dict[str, Any]:
    return {"hosts": {"0": seal({"epoch": 0, "step": 3, "iterator": {"batches": 3}, **changes})}}


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({"hosts": None}, {}, ("hosts", None, "step and hosts of an iterable of host batches", NOT_ELASTIC)),
        ({"step": None}, {}, ("hosts", None, "step and hosts of an iterable of host batches", NOT_ELASTIC)),
        ({"hosts": {"7": {}, "1": {}}}, {}, ("hosts", ["1", "7"], "host 0", JOIN)),
        ({"hosts": {"0": 5}}, {}, ("hosts.0", 5, "an object with a digest", CHANGED)),
        (entry_at(step=4), {}, ("step", 3, "4 in hosts.0", EARLIER)),
        (entry_at(step=4), {"end": "pad"}, ("step", 3, "4 in hosts.0", EARLIER)),
        (entry_at(step=2), {}, ("step", 3, "2 in hosts.0", EARLIER)),
        ({"position": 5}, {}, ("position", 5, 6, EARLIER)),
        ({"position": 7}, {}, ("position", 7, 6, EARLIER)),
        ({"position": 7}, {"end": "pad"}, ("position", 7, 6, EARLIER)),
        ({"segments": [], "position": 0}, {}, ("position", 0, 0, EARLIER)),
        ({"segments": [[1, 2, 2]]}, {}, ("segments", [[1, 2, 2]], GAPS, CHANGED)),
        ({}, {"num_epochs": 2}, ("num_epochs", 1, 2, LONGER)),
    ],
)  # fmt: skip
def test_a_state_of_something_else_is_refused(
    changes: dict[str, Any], options: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    state = {key: value for key, value in {**AFTER_3, **changes}.items() if value is not None}
    state["fingerprint"] = {**state["fingerprint"], "end": options.get("end", "drop")}
    with pytest.raises(meshfeed.StateMismatchError) as caught:
        stream_of(BATCHES, **options).restore(parse_state(state))
    error = caught.value
    assert (error.field, error.saved, error.current, error.remedy) == expected


def test_a_state_of_another_number_of_hosts_is_refused() -> None:
    with on_host(0, 2), pytest.raises(meshfeed.StateMismatchError) as caught:
        stream_of(BATCHES).restore(parse_state(AFTER_3))
    assert (caught.value.field, caught.value.saved, caught.value.current) == ("processes", 1, 2)


def test_a_generator_cannot_go_on_from_a_state() -> None:
    with pytest.raises(meshfeed.StateMismatchError) as caught:
        stream_of(iter(BATCHES)).restore(parse_state(AFTER_3))
    error = caught.value
    assert (error.field, error.saved, error.current, error.remedy) == (
        "hosts.0",
        "3 batches",
        "an iterator that can be read once",
        "Pass an iterable that starts again at each iter(), or one with get_state and set_state.",
    )


def test_a_restored_cursor_has_what_was_saved() -> None:
    cursor = stream_of(BATCHES).restore(parse_state(AFTER_3))
    assert (cursor.step, cursor.position, cursor.num_lanes) == (3, 6, 0)
    assert cursor.entries == {"0": {"epoch": 0, "step": 3, "iterator": read_to(3, BATCHES[2]["x"])}}
    assert [cursor.step_schedule.at(step) for step in (2, 3, 4)] == [(4, 2), (6, 2), (8, 2)]
    assert stream_of(BATCHES).state(cursor).to_json() == AFTER_3
    padded = {**AFTER_3, "position": 5, "fingerprint": {**AFTER_3["fingerprint"], "end": "pad"}, **entry_at(step=2)}
    assert stream_of(BATCHES, end="pad").restore(parse_state(padded)).position == 5
    before = stream_of(BATCHES).state(stream_of(BATCHES).start())
    assert stream_of(BATCHES).restore(before).entries == {}
    assert stream_of(BATCHES).records_after(cursor, 9, {}) == 0


# --- looking ahead, and closing -------------------------------------------------------------------------------------


def test_looking_at_the_first_batch_leaves_it_for_the_reader() -> None:
    stream = stream_of(iter(BATCHES))
    assert [(leaf.path, leaf.shape, leaf.dtype) for leaf in stream.record_spec().leaves] == [("['x']", (), np.int64)]
    assert stream.batch_size_at(stream.start()) == 2
    reader = open_reader(stream)
    assert reader.next().tree["x"].tolist() == [1, 2]
    assert reader.peek()["x"].tolist() == [3, 4]
    assert reader.peek()["x"].tolist() == [3, 4]
    assert [reader.next().tree["x"].tolist() for _ in range(3)] == [[3, 4], [5, 6], [7, 8]]
    assert message(reader.peek) == f"the iterable of host batches has no further batch on this host. {FROM_OTHERS}"


def test_a_look_at_a_batch_that_is_late_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_batches.time, "monotonic", lambda: 7.0)
    reader = open_reader(stream_of(BATCHES, timeout_seconds=0.01))
    with reader._taking, pytest.raises(meshfeed.StalledError) as caught:
        reader.peek()
    assert (caught.value.hosts, caught.value.waited_seconds) == ((0,), 0.01)
    assert str(caught.value) == (
        "host 0 itself is late: it is waiting for host batch 0 for 0.0 s (timeout_seconds=0.01)."
    )


def test_a_failed_look_is_tried_again() -> None:
    failures = [RuntimeError("not yet")]

    class Failing:
        def __iter__(self) -> Any:
            if failures:
                raise failures.pop()
            return iter(BATCHES)

    stream = stream_of(Failing())
    with pytest.raises(RuntimeError, match="not yet"):
        stream.record_spec()
    assert stream.read_schedule().sizes == (2,)


def test_a_batch_that_fails_in_passing_is_taken_again(caplog: pytest.LogCaptureFixture) -> None:
    failures = {1: 1, 2: 2}

    class Failing(Resumable):
        def __next__(self) -> dict[str, np.ndarray]:
            if failures.get(self.at, 0):
                failures[self.at] -= 1
                raise OSError("a blip")
            return super().__next__()

    reader = open_reader(stream_of(Failing(4)))
    assert [int(reader.next().tree["x"][0, 0]) for _ in range(4)] == [0, 1, 2, 3]
    assert [text.split(" failed")[0] for text in caplog.messages] == [
        "taking batch 1",
        "taking batch 2",
        "taking batch 2",
    ]


def test_what_a_reader_waits_for_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(local_batches.time, "monotonic", lambda: now[0])
    reader = open_reader(stream_of(BATCHES))
    now[0] += 2
    assert reader.describe() == "waiting for host batch 0 for 2.0 s"
    reader.next()
    now[0] += 0.5
    assert reader.describe() == "waiting for host batch 1 for 0.5 s"
    assert (reader.final(), reader.sequential) == (None, True)


def test_what_cannot_be_closed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "meshfeed.host_batches")

    def fail() -> None:
        raise RuntimeError("busy")

    stream = stream_of(BATCHES)
    reader = open_reader(stream)
    reader._iterator.close = fail
    reader.close()
    stream.source.close = fail  # type: ignore[method-assign]
    stream.close()
    assert caplog.messages == [
        "closing the iterator of host batches failed: busy",
        "closing the iterable of host batches failed: busy",
    ]


def test_closing_ends_the_iterator_that_was_only_looked_at() -> None:
    stream = stream_of(BATCHES)
    stream.record_spec()
    closed = []
    assert stream._first is not None
    stream._first[0].close = lambda: closed.append(True)  # type: ignore[method-assign]
    stream.close()
    stream.close()
    assert closed == [True]


def test_what_host_batches_have_not_is_an_error() -> None:
    stream = stream_of(BATCHES)
    with pytest.raises(TypeError) as no_length:
        stream.num_steps(stream.start())
    assert [
        str(no_length.value),
        message(stream.record_ids, stream.start(), 3),
        message(stream.read, [1]),
        message(stream.replay_from, stream.start(), 3, None),
    ] == [
        "an iterable of host batches has no length.",
        "record_ids(3): host batches have no record ids.",
        "read(record_ids): host batches have no record ids; pass a random-access source.",
        "host batches cannot be read again by the feed; pass a source of records.",
    ]
    assert stream.describe_batch(open_reader(stream).next()) == {}


class Passes:
    """An iterable that can be started again, whose passes count how often they are closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.closed = error, list[int]()

    def __iter__(self) -> Iterator[Any]:
        outer, number = self, len(self.closed)
        self.closed.append(0)

        class Pass(Resumable):
            def __iter__(self) -> Pass:
                return self

            def close(self) -> None:
                outer.closed[number] += 1
                if outer.error is not None:
                    raise outer.error

        return Pass(4)


def test_a_pass_opened_only_for_its_first_batch_is_closed_when_a_state_opens_another() -> None:
    batches = Passes()
    with make_feed(batches) as feed:
        assert take(feed, 2) == [0, 1]
        state = feed.get_state()
    batches = Passes()
    with make_feed(batches) as feed:
        assert feed.element_spec["x"].shape == (8, 2)
        assert batches.closed == [0]
        feed.set_state(state)
        assert batches.closed == [1, 0]
        assert take(feed, 2) == [2, 3]
    assert batches.closed == [1, 1]


def test_a_pass_opened_only_for_its_first_batch_may_fail_to_close() -> None:
    batches = Passes(OSError("the server has gone"))
    with make_feed(batches) as feed:
        assert feed.element_spec["x"].shape == (8, 2)
    assert batches.closed == [1]


@pytest.mark.parametrize("make", [list, iter])
def test_element_spec_of_no_batch_leaves_the_end_for_next(make: Callable[[list[Any]], Any]) -> None:
    with make_feed(meshfeed.sources.HostBatches(make([])), global_batch_size=8, end="pad") as feed:
        for _ in range(2):
            with pytest.raises(meshfeed.SourceError, match="is empty: it gave no batch on this host"):
                _ = feed.element_spec
        with pytest.raises(meshfeed.SourceError, match="the host batches are empty"):
            next(feed)
