"""Random access: the same batches on any hosts and after any resume, damaged records, interrupts, identities."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from stream_parts import Fetches, rows_of_host, run, settings_of

import meshfeed
from meshfeed._src.base.settings import BatchSchedule
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.state.state import parse_state
from meshfeed._src.streams import random_access_reader
from meshfeed._src.streams.balance import RowBalance
from meshfeed._src.streams.protocol import HostBatch
from meshfeed._src.streams.random_access import RandomAccessStream


class Records:
    """Records made by a function, without a fingerprint of their own, that can be closed."""

    def __init__(self, record: Callable[[int], Any], count: int = 64) -> None:
        self._record, self._count, self.closed = record, count, False

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, record_id: int) -> Any:
        if self.closed:
            raise RuntimeError("read after close")
        return self._record(record_id)

    def close(self) -> None:
        self.closed = True


def make_feed(source: Any, **options: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    options = {"global_batch_size": 8, "retry": meshfeed.Retry(initial_seconds=0), **options}
    return meshfeed.MultiHostDataLoadIterator(source, mesh, **options)


LONGER = (
    "Pass the saved value, or start a new stream without the state. To be able to train longer than planned, start the "
    "stream with num_epochs=None and end the loop after a number of steps."
)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_threads": 2}])
def test_batches_of_several_readers_must_be_alike_too(options: dict[str, Any]) -> None:
    source = Records(lambda i: {"x": np.float32(i) if i < 8 or i == 63 else np.int32(i)})
    with (
        make_feed(source, **options) as feed,
        pytest.raises(meshfeed.SourceError, match=r"int32.*float32|float32.*int32"),
    ):
        list(feed)


def test_get_state_works_after_close_although_the_source_is_closed() -> None:
    for steps in (0, 2):
        source = Records(lambda i: {"x": np.float32(i)})
        feed = make_feed(source)
        for _ in range(steps):
            next(feed)
        feed.close()
        assert source.closed
        assert feed.get_state()["position"] == 8 * steps


def test_a_damaged_record_that_is_probed_is_no_reason_to_have_no_state() -> None:
    def record(damaged: tuple[int, ...]) -> Callable[[int], Any]:
        def read(i: int) -> Any:
            if i in damaged:
                raise ValueError("damaged")
            return {"x": np.float32(i)}

        return read

    identities = []
    for damaged in [(), (0,), (63,), (0, 63)]:
        with make_feed(Records(record(damaged)), bad_records=meshfeed.SkipBad(0.9)) as feed:
            next(feed)
            identities.append(feed.get_state()["fingerprint"]["source"]["content"])
    assert len(set(identities)) == 4


class Counting(Records):
    """Counts the calls that read."""

    reads = 0

    def __getitem__(self, record_id: int) -> Any:
        self.reads += 1
        return super().__getitem__(record_id)


class WithFingerprint(Counting):
    """Reads for a fingerprint of its own."""

    def fingerprint(self) -> str:
        return str(self[0])


@pytest.mark.parametrize("kind", [Counting, WithFingerprint])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_state_is_taken_without_a_read_at_any_moment(kind: type[Counting], mixed: bool) -> None:
    parts = [kind(lambda i: {"x": np.float32(i)}, 640) for _ in range(12 if mixed else 1)]
    names = [f"part {number}" for number in range(len(parts))]
    source: Any = parts[0]
    if mixed:
        source = meshfeed.sources.Mixture(dict(zip(names, parts, strict=True)), dict.fromkeys(names, 1.0))
    feed = make_feed(source, prefetch=0)
    made = [part.reads for part in parts]
    assert all(made)
    states = [feed.get_state()]
    feed.reset()
    states.append(feed.get_state())
    assert states[0] == states[1]
    assert [part.reads for part in parts] == made
    next(feed)
    before = [part.reads for part in parts]
    feed.set_state(feed.get_state())
    feed.config()
    feed.close()
    feed.get_state()
    assert [part.reads for part in parts] == before


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError(0), "records"),
        (OSError("storage is gone"), "records"),
        (RuntimeError("no"), "records"),
        (IndexError(), "records"),
        (KeyError(0), "mixture"),
    ],
)
def test_an_unreadable_record_is_part_of_the_identity_whatever_its_exception(
    error: Exception, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make(damaged: tuple[int, ...]) -> meshfeed.MultiHostDataLoadIterator:
        def record(i: int) -> Any:
            if i in damaged:
                raise error
            return {"x": np.float32(i)}

        source: Any = Records(record)
        if kind == "mixture":
            source = meshfeed.sources.Mixture(
                {"a": source, "b": Records(lambda i: {"x": np.float32(i)})}, {"a": 1, "b": 1}
            )
        return make_feed(source, retry=meshfeed.Retry(attempts=1))

    feeds = [make(damaged) for damaged in ((), (63,), (21, 63))]
    texts = [json.dumps(feed.get_state()["fingerprint"], sort_keys=True) for feed in feeds]
    assert len(set(texts)) == 3
    with make((63,)) as again:
        assert json.dumps(again.get_state()["fingerprint"], sort_keys=True) == texts[1]
    assert "record 63 cannot be read" in caplog.text
    for feed in feeds:
        feed.close()


def test_looking_at_the_source_is_tried_again() -> None:
    failures = [OSError("a blip"), OSError("another")]
    lock = threading.Lock()

    def record(i: int) -> Any:
        with lock:
            if i == 63 and failures:
                raise failures.pop()
        return {"x": np.float32(i)}

    with make_feed(Records(record)) as feed:
        assert feed.get_state()["position"] == 0


def test_replacing_bad_records_never_promotes_the_others() -> None:
    def record(i: int) -> Any:
        if i == 1:
            raise ValueError("damaged")
        return {"x": np.float32(i) if i < 4 else np.float64(i)}

    with (
        make_feed(Records(record), bad_records=meshfeed.SkipBad(0.9)) as feed,
        pytest.raises(meshfeed.SourceError, match=r"float64.*float32"),
    ):
        next(feed)


@pytest.mark.parametrize("position", [2**62, 2**63 + 8, 2**70])
def test_a_position_beyond_every_stream_is_refused_before_anything_is_read(position: int) -> None:
    with make_feed({"x": np.zeros(64)}, num_epochs=None) as feed:
        next(feed)
        state = feed.get_state()
        with pytest.raises(meshfeed.StateMismatchError) as info:
            feed.set_state({**state, "position": position})
        assert info.value.field == "position"
        assert feed.get_state() == state
        feed.set_state({**state, "position": 2**61})
        next(feed)


# --- a stream by itself ---------------------------------------------------------------------------------------------


class Numbers:
    """Record i is i + 1, in files of 10 records."""

    def __init__(self, count: int) -> None:
        self.count, self.closed = count, False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, record_id: int) -> Any:
        return {"x": np.int64(record_id + 1)}

    def file_of(self, record_id: int) -> str:
        return f"part-{record_id // 10}"

    def fingerprint(self) -> str:
        return f"numbers {self.count}"

    def close(self) -> None:
        self.closed = True


def stream_of(count: int = 20, **changes: Any) -> RandomAccessStream:
    return RandomAccessStream(Numbers(count), settings_of(**changes))


def expected(count: int, num_epochs: int, shuffle: Any, sizes: list[int], end: str) -> list[list[int]]:
    """Rows of all batches, cut from the list of all records in order; 0 is padding."""
    order = EpochOrder(count, shuffle=shuffle, seed=7, num_epochs=num_epochs)
    rows = [record_id + 1 for record_id in order.ids_at(np.arange(count * num_epochs))[0].tolist()]
    batches = []
    for size in sizes:
        batch, rows = rows[:size], rows[size:]
        if not batch or (len(batch) < size and end == "drop"):
            break
        batches.append(batch + [0] * (size - len(batch)))
    return batches


@settings(max_examples=80)
@given(data=st.data())
def test_batches_are_the_same_on_any_hosts_and_after_any_resume(data: st.DataObject) -> None:
    count, num_epochs = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    shuffle = data.draw(st.sampled_from([False, True, 4]))
    end = data.draw(st.sampled_from(["drop", "pad"]))
    schedule = BatchSchedule([(0, 8), *((step, 4) for step in data.draw(st.sets(st.integers(1, 5), max_size=1)))])
    wanted = expected(count, num_epochs, shuffle, [schedule.size_at(step) for step in range(80)], end)

    def make_stream() -> RandomAccessStream:
        return stream_of(
            count, global_batch_size=schedule, num_epochs=num_epochs, shuffle=shuffle, end=end, seed=7,
            num_threads=data.draw(st.sampled_from([None, 2])),
        )  # fmt: skip

    assert make_stream().num_steps(make_stream().start()) == len(wanted)
    state, found = None, []
    for _ in range(data.draw(st.integers(1, 3))):
        owners = data.draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
        result = run(make_stream(), owners, steps=data.draw(st.integers(0, 5)), state=state)
        found += [batch["x"].tolist() for batch in result.batches]
        state = result.state
        assert state.position == sum(value != 0 for batch in found for value in batch)
        assert {cursor.step for cursor in result.cursors} == {len(found)}
        assert found == wanted[: len(found)]
    stream = make_stream()
    rest = run(stream, [0], state=state)
    assert found + [batch["x"].tolist() for batch in rest.batches] == wanted
    for step, batch in enumerate(wanted):
        ids = stream.record_ids(rest.cursors[0], step)
        assert (ids.dtype, (ids + 1).tolist()) == (np.int64, [value for value in batch if value])
    for step in (-1, len(wanted)):
        with pytest.raises(IndexError) as caught:
            stream.record_ids(rest.cursors[0], step)
        assert str(caught.value) == (
            f"step {step} is not in this stream, which has {len(wanted)} steps (0 to {max(len(wanted) - 1, -1)})."
        )


def test_a_step_before_the_first_of_an_endless_stream() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    feed = meshfeed.Feed({"x": np.arange(8)}, mesh, global_batch_size=4, num_epochs=None)
    with feed, pytest.raises(IndexError, match=r"step -1 is not in this stream, which begins at step 0\."):
        feed.record_ids(-1)


@pytest.mark.parametrize(
    ("changes", "setting", "message"),
    [
        (
            {"global_batch_size": None},
            "global_batch_size",
            "global_batch_size is missing; a random-access source needs it (an int or a meshfeed.BatchSchedule).",
        ),
        (
            {"num_lanes": 4},
            "num_lanes",
            "num_lanes=4, but a random-access source has lanes only with shuffle='shards'. Omit it.",
        ),
    ],
)
def test_settings_that_random_access_cannot_have(changes: dict[str, Any], setting: str, message: str) -> None:
    with pytest.raises(meshfeed.SettingsError) as caught:
        stream_of(**changes)
    assert (str(caught.value), caught.value.setting) == (message, setting)


def test_an_empty_source_is_an_error_and_one_record_is_not() -> None:
    with pytest.raises(meshfeed.SourceError) as caught:
        stream_of(0)
    assert str(caught.value) == "the source Numbers is empty: it has 0 records."
    assert stream_of(1, end="pad").num_steps(stream_of(1, end="pad").start()) == 1


def test_a_source_smaller_than_a_batch_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    stream_of(8)
    stream_of(7, end="pad")
    stream_of(7, num_epochs=None)
    assert caplog.records == []
    stream_of(3, num_epochs=2)
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        (
            "meshfeed.feed",
            "WARNING",
            "the source has 6 records in all epochs, fewer than one batch of 8: with end='drop' there is no batch. Use "
            "end='pad', more epochs or a smaller batch.",
        )
    ]


def test_the_state_is_this() -> None:
    state = run(stream_of(num_epochs=2, shuffle=True, seed=5), [0], steps=2).state.to_json()
    assert state == {
        "meshfeed": 1,
        "kind": "random_access",
        "position": 16,
        "segments": [[0, 0, 8]],
        "fingerprint": {
            "source": {"kind": "Numbers", "records": 20, "fingerprint": "numbers 20"},
            "order": {"algorithm": "feistel-square", "version": 2},
            "shuffle": True, "seed": 5, "num_epochs": 2, "end": "drop",
        },
    }  # fmt: skip


STATE = {
    "meshfeed": 1, "kind": "random_access", "position": 16, "segments": [[0, 0, 8]],
    "fingerprint": {
        "source": {"kind": "Numbers", "records": 20, "fingerprint": "numbers 20"},
        "order": {"algorithm": "feistel-square", "version": 2},
        "shuffle": False, "seed": 0, "num_epochs": 2, "end": "pad",
    },
}  # fmt: skip
CHANGED = "The state was changed or damaged; use an earlier checkpoint."


@pytest.mark.parametrize(
    ("changes", "settings_changes", "expected"),
    [
        ({"position": 15}, {}, ("position", 15, "a multiple of 8 rows after 0", CHANGED)),
        ({"position": 48}, {}, ("position", 48, "at most 40", CHANGED)),
        ({"segments": [3]}, {}, ("segments", 3, "a list of [first_step, first_position, global_batch_size]", CHANGED)),
        ({}, {"seed": 1}, ("seed", 0, 1, "Pass the saved value, or start a new stream without the state.")),
        ({}, {"end": "drop"}, ("end", "pad", "drop", "Pass the saved value, or start a new stream without the state.")),
        ({}, {"num_epochs": 3}, ("num_epochs", 2, 3, LONGER)),
    ],
)
def test_a_state_of_something_else_is_refused(
    changes: dict[str, Any], settings_changes: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    stream = stream_of(**{"num_epochs": 2, "end": "pad", **settings_changes})
    with pytest.raises(meshfeed.StateMismatchError) as caught:
        stream.restore(parse_state({**STATE, **changes}))
    error = caught.value
    assert (error.field, error.saved, error.current, error.remedy) == expected


def test_an_endless_stream_may_be_given_an_end_that_is_past() -> None:
    state = {**STATE, "position": 80, "fingerprint": {**STATE["fingerprint"], "num_epochs": None}}
    stream = stream_of(num_epochs=2, end="pad")
    cursor = stream.restore(parse_state(state))
    assert (cursor.step, cursor.position, stream.num_steps(cursor)) == (10, 80, 5)
    reader = stream.open_reader(cursor, rows_of_host([0], 0), hosts_agree=False)
    with pytest.raises(StopIteration):
        reader.next()
    assert stream_of(num_epochs=None, end="pad").restore(parse_state(state)).position == 80


def test_a_restored_cursor_has_what_was_saved() -> None:
    extra = {"skipped": {"0": [[7, 0, "bad", 1]]}, "num_skipped": 3}
    stream = stream_of(num_epochs=2, end="pad", global_batch_size=4)
    cursor = stream.restore(parse_state({**STATE, **extra}))
    assert (cursor.step, cursor.position, cursor.num_skipped) == (2, 16, 3)
    assert cursor.skipped.listed == extra["skipped"]
    assert stream.state(cursor).to_json() == {**STATE, **extra}
    assert [cursor.step_schedule.at(step) for step in (1, 2, 3)] == [(8, 8), (16, 4), (20, 4)]
    assert stream.batch_size_at(cursor) == 4
    assert [stream.records_after(cursor, step, {}) for step in (0, 2, 7, 8)] == [8, 20, 40, 40]
    assert stream_of(num_epochs=None).records_after(stream_of(num_epochs=None).start(), 99, {}) == 800
    batch = HostBatch(2, 4, None, 0, bad=[(3, 1, "worse")])
    reader = stream.open_reader(cursor, rows_of_host([0], 0), hosts_agree=False)
    after = reader.advance(cursor, batch, {}, 4)
    assert (after.step, after.position, after.num_skipped) == (3, 20, 4)
    assert after.skipped.listed == {"0": [[7, 0, "bad", 1], [3, 1, "worse", 2]]}
    assert reader.advance(cursor, HostBatch(2, 4, None, 0), {}, 0).skipped == cursor.skipped


def test_a_step_is_read_again_from_its_number() -> None:
    stream = stream_of(num_epochs=2)
    later = stream.restore(parse_state({**STATE, "fingerprint": {**STATE["fingerprint"], "end": "drop"}}))
    cursor = stream.replay_from(later, 1, None)
    assert (cursor.step, cursor.position, stream.batch_size_at(cursor)) == (1, 8, 8)
    with pytest.raises(IndexError, match=r"^step 5 is not in this stream"):
        stream.replay_from(later, 5, None)


def test_records_are_read_by_id() -> None:
    stream = stream_of()
    for ids in ([3, 19, 0, 3], np.array([3, 19, 0, 3], np.uint8), range(3, 4)):
        assert stream.read(ids)["x"].tolist() == [record_id + 1 for record_id in ids]
    assert stream.read(4)["x"].tolist() == [5]
    empty = stream.read([])["x"]
    assert (empty.shape, empty.dtype) == ((0,), np.int64)
    for wrong in ([1.5], [[1, 2]], ["a"], [True]):
        with pytest.raises(meshfeed.SettingsError) as settings_error:
            stream.read(wrong)
        assert settings_error.value.setting == "record_ids"
        assert str(settings_error.value) == (
            f"read({wrong!r}); it takes record ids, a sequence of ints or an int array [n]."
        )
    for ids, bad in (([0, 20, 21], 20), ([19, -1], -1)):
        with pytest.raises(meshfeed.SourceError) as source_error:
            stream.read(ids)
        assert source_error.value.record_id == bad
        assert str(source_error.value) == f"record id {bad} is not in the source, which has the ids 0 to 19."


def open_reader(stream: RandomAccessStream, owners: tuple[int, ...] = (0,), host: int = 0) -> Any:
    return stream.open_reader(stream.start(), rows_of_host(owners, host), hosts_agree=True)


def test_padding_has_the_columns_that_this_host_reads() -> None:
    source = meshfeed.sources.Memory({"x": np.ones((3, 8)), "id": np.arange(3)})
    stream = RandomAccessStream(source, settings_of(end="pad"))
    rows = rows_of_host((0, 1), 1)
    columns = HostRows(rows.rows, lambda size: {"['x']": (slice(2, 5),)})
    batch = stream.open_reader(stream.start(), columns, hosts_agree=True).next()
    assert {name: leaf.shape for name, leaf in batch.tree.items()} == {"x": (4, 3), "id": (4,)}
    assert not batch.tree["x"].any()
    assert batch.num_bytes == 4 * (3 * 8 + 8)


@pytest.mark.parametrize("num_threads", [None, 3])
def test_a_batch_has_the_rows_of_its_host_and_their_ids(num_threads: int | None) -> None:
    stream = stream_of(12, end="pad", mask_key="real", num_threads=num_threads)
    reader = open_reader(stream, (0, 1, 0, 1), 1)
    first, last = reader.next(), reader.next()
    assert (first.step, first.global_batch_size, first.num_bytes) == (0, 8, 4 * 9)
    assert {key: value.tolist() for key, value in first.tree.items()} == {"x": [3, 4, 7, 8], "real": [True] * 4}
    assert (first.record_ids.tolist(), first.bad, first.retries) == ([2, 3, 6, 7], (), 0)
    assert list(first.times) == ["read_seconds"]
    assert last.tree["x"].tolist() == [11, 12, 0, 0]
    assert last.tree["real"].tolist() == [True, True, False, False]
    assert stream.describe_batch(last) == {"record_ids": [10, 11], "files": ["part-1"]}
    assert stream.describe_batch(first) == {"record_ids": [2, 3, 6, 7], "files": ["part-0"]}
    for _ in range(2):
        with pytest.raises(StopIteration):
            reader.next()
    reader.rewind(1)
    assert reader.next().tree["x"].tolist() == [11, 12, 0, 0]
    assert (reader.final(), reader.sequential) == (None, False)
    reader.close()


def test_a_host_with_padding_only_gets_zeros() -> None:
    reader = open_reader(stream_of(3, end="pad", mask_key="real"), (0, 1), 1)
    batch = reader.next()
    assert {key: value.tolist() for key, value in batch.tree.items()} == {"x": [0] * 4, "real": [False] * 4}
    assert (batch.record_ids.tolist(), batch.bad, dict(batch.times)) == ([], (), {})


def test_what_a_reader_does_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(random_access_reader.time, "monotonic", lambda: now[0])
    seen = []

    class Watched(Numbers):
        def __getitem__(self, record_id: int) -> Any:
            now[0] += 0.25
            seen.append(readers[0].describe() if readers else "")
            return super().__getitem__(record_id)

    readers: list[Any] = []
    stream = RandomAccessStream(Watched(20), settings_of(end="pad"))
    stream.record_spec()
    readers.append(open_reader(stream))
    now[0] += 3
    assert readers[0].describe() == "idle for 3.0 s"
    seen.clear()
    readers[0].next()
    readers[0].next()
    assert seen[:2] == [
        f"reading step 0 (records 0, 1, 2, 3, 4, 5, 6, 7; part-0) for {seconds} s" for seconds in ("0.2", "0.5")
    ]
    assert seen[8] == "reading step 1 (records 8, 9, 10, 11, 12, 13, 14, 15; part-0, part-1) for 0.2 s"
    now[0] += 1.5
    assert readers[0].describe() == "waiting for room for 1.5 s"
    readers[0]._doing = ((2, [np.empty(0, np.int64)]), now[0])
    assert readers[0].describe() == "padding step 2 for 0.0 s"


def test_steps_that_are_read_together_are_described_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_access_reader, "_JOINT_SECONDS", 60.0)  # no read is too slow to be joined
    seen = []

    class Watched(meshfeed.sources.Memory):
        fresh_arrays = True

        def read_batch(self, record_ids: Any) -> Any:
            seen.append(reader.describe().partition(" for")[0] if reader is not None else "")
            return super().read_batch(record_ids)

    reader = None
    stream = RandomAccessStream(Watched({"x": np.arange(80)}), settings_of(prefetch=2))
    stream.record_spec()
    reader = open_reader(stream)
    seen.clear()
    for _ in range(3):
        reader.next()
    assert seen == [
        "reading step 0 (records 0, 1, 2, 3, 4, 5, 6, 7)",
        "reading steps 1 to 2 (records 8, 9, 10, 11, 12, 13, 14, 15, … (16 in all))",
    ]


def test_a_reader_of_a_source_without_files_names_none() -> None:
    reader = open_reader(RandomAccessStream(Records(lambda i: {"x": np.int64(i)}), settings_of()))
    reader._doing = ((3, [np.arange(24, 32)]), random_access_reader.time.monotonic())
    assert reader.describe() == "reading step 3 (records 24, 25, 26, 27, 28, 29, 30, 31) for 0.0 s"


class Lengths(Numbers):
    """Record i has the length i + 1."""

    def lengths(self) -> np.ndarray:
        return np.arange(self.count) + 1


@pytest.mark.parametrize("owners", [(0,), (0, 1), (1, 0, 1, 0)])
def test_balanced_batches_are_the_same_on_any_hosts(owners: tuple[int, ...]) -> None:
    made = settings_of(balance="tokens", end="pad", shuffle=True)
    stream, plain = RandomAccessStream(Lengths(20), made), stream_of(end="pad", shuffle=True)
    result = run(stream, owners)
    batches = [batch["x"].tolist() for batch in result.batches]
    cursor = stream.start()
    assert batches[2][4:] == [0] * 4
    for step, batch in enumerate(batches):
        rows = [value for value in batch if value]
        ids, unbalanced = stream.record_ids(cursor, step), plain.record_ids(plain.start(), step)
        assert (
            rows == (ids + 1).tolist() == (unbalanced[RowBalance(Lengths(20), "tokens").rows(unbalanced)] + 1).tolist()
        )
    assert [value for batch in batches for value in batch] != [
        value for batch in run(plain, owners).batches for value in batch["x"].tolist()
    ]


class Cached(Lengths):
    """Files of 10 records, which are read through a cache; the file is its own description."""

    def cached_files(self, record_ids: np.ndarray) -> Any:
        return list(dict.fromkeys(map(self.file_of, record_ids.tolist())))


def test_the_files_of_coming_steps_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Fetches] = []
    monkeypatch.setattr(random_access_reader, "FetchAhead", functools.partial(Fetches, made))

    def open_at(step: int, owners: tuple[int, ...] = (0, 1), **changes: Any) -> Any:
        stream = RandomAccessStream(Cached(36), settings_of(**changes))
        cursor = stream.start() if not step else run(stream, [0], steps=step).cursors[0]
        made.clear()
        return stream.open_reader(cursor, rows_of_host(owners, 1), hosts_agree=False)

    reader = open_at(1, global_batch_size=BatchSchedule([(0, 8), (2, 4), (5, 16)]), end="pad")
    fetches = made[0]
    assert list(fetches.plan) == [["part-1"], ["part-1"], ["part-2"], ["part-2"], ()]  # rows 12-15, 18-19, 22-23, 26-27
    for _ in range(3):
        reader.next()
    assert fetches.reached_batches == [1, 2]  # not for the first batch, since a replay reads only one
    reader.close()
    assert fetches.closed == 1
    open_at(0, num_epochs=None)
    assert list(itertools.islice(made[0].plan, 3, 6)) == [["part-2", "part-3"], ["part-0"], ["part-0", "part-1"]]
    balanced = open_at(0, balance="tokens")
    planned = list(made[0].plan)
    ids = [balanced.next().record_ids.tolist() for _ in range(4)]
    assert ids != [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23], [28, 29, 30, 31]]
    assert planned == [list(dict.fromkeys(f"part-{one // 10}" for one in step)) for step in ids]


class OnDisk(Numbers):
    """Notes what a disk is asked for, and what is read."""

    def __init__(self, count: int, *, missing: bool) -> None:
        super().__init__(count)
        self.missing = missing
        self.events: list[tuple[str, int]] = []

    def ask_disk(self, record_ids: np.ndarray) -> bool:
        self.events += [("ask", record_id) for record_id in record_ids.tolist()]
        return self.missing

    def read_batch(self, record_ids: np.ndarray) -> Any:
        self.events += [("read", record_id) for record_id in record_ids.tolist()]
        return {"x": record_ids + 1}


@pytest.mark.parametrize("options", [{}, {"prefetch": 2}, {"num_threads": 2}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("fresh", [False, True], ids=["a step in a read", "several steps in a read"])
def test_a_disk_is_asked_for_the_next_read_before_a_step_is_read(options: dict[str, Any], fresh: bool) -> None:
    source = OnDisk(76, missing=True)
    source.fresh_arrays = fresh  # type: ignore[attr-defined]  # then small steps are read together
    made = settings_of(end="pad", shuffle=True, **options)
    stream = RandomAccessStream(source, made)
    source.events.clear()
    batches = [batch["x"].tolist() for batch in run(stream, [0]).batches]
    asked = [record_id for event, record_id in source.events if event == "ask"]
    if "num_workers" in options:  # each worker is a read ahead of the others
        assert asked == []
        return
    at = {event: index for index, event in enumerate(source.events)}
    assert len(asked) == len(set(asked)), "the disk is asked for a record once"
    assert all(at["ask", record_id] < at["read", record_id] for record_id in asked)
    assert len(batches) == 10
    for step, following in itertools.pairwise([stream.record_ids(stream.start(), step) for step in range(10)][-6:]):
        first_read = min(at["read", record_id] for record_id in step.tolist())
        joint = any(at["read", record_id] < first_read for record_id in following.tolist())
        # Of several threads, one may begin to read a step before the disk is asked for the next.
        latest = len(at) if "num_threads" in options else first_read
        assert joint or all(at.get(("ask", record_id), latest) < latest for record_id in following.tolist()), step
    plain = run(RandomAccessStream(Numbers(76), settings_of(end="pad", shuffle=True)), [0])
    assert batches == [batch["x"].tolist() for batch in plain.batches]


def test_a_disk_is_asked_rarely_while_the_page_cache_has_the_records() -> None:
    source = OnDisk(8 * 200, missing=False)
    reader = open_reader(RandomAccessStream(source, settings_of(num_epochs=None)))
    steps_asked = []
    for step in range(300):
        source.missing = step >= 200
        source.events.clear()
        reader.next()
        steps_asked += [step] * any(event == "ask" for event, _ in source.events)
    assert sum(step < 100 for step in steps_asked) < 22
    assert sum(100 <= step < 200 for step in steps_asked) <= 13
    assert sum(step >= 208 for step in steps_asked) == 92


def test_a_single_step_asks_for_nothing() -> None:
    source = OnDisk(40, missing=True)
    open_reader(RandomAccessStream(source, settings_of())).next()
    assert "ask" not in {event for event, _ in source.events}, "as a replay reads one step"


def test_a_source_that_waits_for_a_store_is_read_by_several_threads() -> None:
    class Waits(Numbers):
        read_threads = 3

    for num_threads, found in ((None, 3), (2, 2)):
        reader = open_reader(RandomAccessStream(Waits(80), settings_of(num_threads=num_threads)))
        reader.next()
        assert (reader._reads.numbers, reader._reads.ahead) == ((0, found), 2 * found)
        reader.close()
    assert open_reader(stream_of())._reads.numbers == (0, 1)


def test_the_source_orders_the_parts_of_its_records() -> None:
    class Orders(Numbers):
        def with_order(self, **settings: Any) -> Numbers:
            return Numbers(10 if settings == {"shuffle": 4, "seed": 3} else 0)

    assert len(RandomAccessStream(Orders(20), settings_of(shuffle=4, seed=3)).source) == 10


def test_the_structure_is_that_of_the_next_step_if_records_differ_in_shape() -> None:
    class Shapes(Numbers):
        def __getitem__(self, record_id: int) -> Any:
            return {"x": np.zeros(record_id // 8 + 1)}

        def shape_index(self, record_ids: np.ndarray) -> int:
            return int(record_ids[0]) // 8

    stream = RandomAccessStream(Shapes(24), settings_of())
    cursors = [stream.start(), *(run(stream, [0], steps=steps).cursors[0] for steps in (1, 2, 3))]
    shapes = [stream.record_spec(cursor).leaves[0].shape for cursor in cursors]
    assert shapes == [(1,), (2,), (3,), (1,)], "after the last step, that of the first record"


def test_shuffled_shards_need_shards() -> None:
    with pytest.raises(meshfeed.SettingsError, match="shuffle='shards' needs a source whose files") as caught:
        stream_of(shuffle="shards")
    assert caught.value.setting == "shuffle"


def test_reads_that_an_interrupt_left_are_collected_and_not_repeated() -> None:
    reads: list[int] = []

    class Counted(Numbers):
        def __getitem__(self, record_id: int) -> Any:
            reads.append(record_id)
            return super().__getitem__(record_id)

    reader = open_reader(RandomAccessStream(Counted(64), settings_of(num_threads=2)))
    reads.clear()
    finish = reader._finish

    def interrupted(*arguments: Any) -> Any:
        reader._finish = finish
        raise KeyboardInterrupt

    reader._finish = interrupted
    with pytest.raises(KeyboardInterrupt):
        reader.next()
    assert [reader.next().tree["x"].tolist()[0] for _ in range(8)] == list(range(1, 64, 8))
    reader.close()
    assert sorted(reads) == list(range(64))


def test_a_stream_closes_its_source() -> None:
    stream = stream_of()
    assert [(leaf.path, leaf.shape, leaf.dtype) for leaf in stream.record_spec().leaves] == [("['x']", (), np.int64)]
    stream.close()
    assert stream.source.closed
    RandomAccessStream([np.int64(1)], settings_of(end="pad")).close()


# --- mixtures, whose stages begin at steps --------------------------------------------------------------------------


def mixed(weights: Any) -> RandomAccessStream:
    parts = {"a": Numbers(30), "b": Numbers(50)}
    return RandomAccessStream(meshfeed.sources.Mixture(parts, weights, block=8), settings_of(num_epochs=None, seed=3))


STAGES = [(0, {"a": 1, "b": 1}), (4, {"b": 1})]


def test_a_mixture_goes_on_in_the_stage_of_the_step() -> None:
    stream = mixed(STAGES)
    ids = [stream.record_ids(stream.start(), step) for step in range(7)]
    assert {value >> 48 for batch in ids[:4] for value in batch.tolist()} == {0, 1}
    assert {value >> 48 for batch in ids[4:] for value in batch.tolist()} == {1}
    whole = [((batch & (1 << 48) - 1) + 1).tolist() for batch in ids]
    for steps in (3, 5):
        first = run(mixed(STAGES), [0, 1], steps=steps)
        assert first.state.fingerprint["mixture"]["stages"] == [[0, 0, {"a": 1, "b": 1}], [4, 32, {"b": 1}]]
        rest = run(mixed(STAGES), [1, 0, 0, 0], steps=7 - steps, state=first.state)
        assert [batch["x"].tolist() for batch in (*first.batches, *rest.batches)] == whole
    assert stream.num_steps(stream.start()) is None
    assert stream.read(ids[0])["x"].tolist() == whole[0]
    with pytest.raises(meshfeed.SourceError, match="2"):
        stream.read([2 << 48])


def test_a_stage_of_a_mixture_that_has_begun_cannot_change_and_a_later_one_can() -> None:
    state = run(mixed(STAGES), [0], steps=3).state
    assert mixed([STAGES[0], (3, {"a": 1})]).restore(state).step == 3
    with pytest.raises(meshfeed.StateMismatchError) as caught:
        mixed([(0, {"a": 3, "b": 1})]).restore(state)
    assert caught.value.field == "mixture.stages[0]"
    assert "weights=[(0, {'a': 1, 'b': 1}), (3, {'a': 3, 'b': 1})]" in caught.value.remedy
