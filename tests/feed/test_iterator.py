"""The feed in one process: its stream, its state, and its rules for the caller."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
import tracemalloc
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed
from meshfeed.testing import check_resumable

AUTO = (AxisType.Auto, AxisType.Auto)


def make_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=AUTO)


def rows_sharding() -> NamedSharding:
    return NamedSharding(make_mesh(), P("data"))


def records(count: int = 100) -> dict[str, np.ndarray]:
    ids = np.arange(count)
    return {"id": ids, "x": (ids[:, None] * 10 + np.arange(3)).astype(np.float32)}


def make_feed(source: Any = None, **options: Any) -> meshfeed.MultiHostDataLoadIterator:
    options.setdefault("global_batch_size", 16)
    return meshfeed.MultiHostDataLoadIterator(records() if source is None else source, rows_sharding(), **options)


def ids_of(feed: Any) -> list[list[int]]:
    return [np.asarray(batch["id"]).tolist() for batch in feed]


# ---------------------------------------------------------------- the stream


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"prefetch": 8}, {"num_threads": 3}, {"num_workers": 2}])
@pytest.mark.parametrize("load", ["sharded", "once", [0]])
def test_read_ahead_threads_workers_and_load_never_change_the_stream(options: dict[str, Any], load: Any) -> None:
    if options.get("num_workers") and load != "sharded":
        pytest.skip("processes start slowly; one load mode shows it")
    with make_feed(shuffle=True, seed=3) as plain:
        expected = ids_of(plain)
    with make_feed(shuffle=True, seed=3, load=load, **options) as feed:
        assert ids_of(feed) == expected
        assert feed.step == 6
        assert feed.position == 96


def test_epochs_follow_without_a_gap_and_each_has_its_own_order() -> None:
    with make_feed(shuffle=True, num_epochs=3, end="pad") as feed:
        batches = ids_of(feed)
        ids = [i for k in range(len(feed)) for i in feed.record_ids(k).tolist()]
    assert len(batches) == 19  # 300 records, 16 a batch
    epochs = [ids[:100], ids[100:200], ids[200:]]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert batches[6][:4] == ids[96:100]
    assert batches[6][4:] == ids[100:112]


def test_pad_gives_every_record_once_with_a_mask_laid_out_like_the_rows() -> None:
    with make_feed(end="pad", mask_key="real") as feed:
        assert feed.element_spec["real"] == jax.ShapeDtypeStruct((16,), bool, sharding=feed.element_spec["id"].sharding)
        batches = list(feed)
    last = batches[-1]
    assert last["real"].dtype == bool
    assert last["real"].sharding.is_equivalent_to(last["id"].sharding, 1)
    assert np.asarray(last["real"]).tolist() == [True] * 4 + [False] * 12
    assert not np.asarray(last["x"])[4:].any()
    kept = [np.asarray(b["id"])[np.asarray(b["real"])] for b in batches]
    assert np.concatenate(kept).tolist() == list(range(100))


def test_batch_schedule_ramps_up_and_record_ids_stay_right_after_another_schedule() -> None:
    ramp = meshfeed.BatchSchedule([(0, 8), (2, 16), (4, 24)])
    with make_feed(global_batch_size=ramp) as feed:
        first = [next(feed) for _ in range(3)]
        assert [b["id"].shape[0] for b in first] == [8, 8, 16]
        assert feed.position == 32
        state = feed.get_state()
        assert len(feed) == 6  # 8 + 8 + 16 + 16 + 24 + 24 = 96 of 100
    with make_feed(global_batch_size=32) as other:
        other.set_state(state)
        assert (other.step, other.position) == (3, 32)
        assert next(other)["id"].shape == (32,)
        assert other.record_ids(1).tolist() == list(range(8, 16))
        assert other.record_ids(3).tolist() == list(range(32, 64))
        assert len(other) == 5


def test_element_spec_is_enough_to_compile_the_step_before_any_data() -> None:
    with make_feed() as feed:
        compiled = jax.jit(lambda batch: batch["x"].sum() + batch["id"].sum()).lower(feed.element_spec).compile()
        batch = next(feed)
        assert float(compiled(batch)) == float(np.asarray(batch["x"]).sum() + np.asarray(batch["id"]).sum())
        for spec, leaf in zip(jax.tree.leaves(feed.element_spec), jax.tree.leaves(batch), strict=True):
            assert (spec.shape, spec.dtype, spec.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)


def test_read_and_record_ids_replay_any_batch() -> None:
    with make_feed(shuffle=True, num_epochs=None) as feed:
        batches = [next(feed) for _ in range(9)]
        for step in (0, 8, 6):
            again = feed.read(feed.record_ids(step))
            assert again["x"].tobytes() == np.asarray(batches[step]["x"]).tobytes()
        assert feed.record_ids(10**9).shape == (16,)
        with pytest.raises(meshfeed.SourceError, match="record id 100 is not in the source"):
            feed.read([3, 100])
    with make_feed() as finite, pytest.raises(IndexError, match="6 steps"):
        finite.record_ids(6)


@pytest.mark.slow
def test_rng_makes_augmentation_part_of_the_stream() -> None:
    class Raw:
        decode_batch = None

        def __len__(self) -> int:
            return 100

        def __getitem__(self, record_id: int) -> Any:
            raise AssertionError("read_raw is the way")

        def read_raw(self, record_ids: np.ndarray) -> list[bytes]:
            return [int(i).to_bytes(4, "little") for i in record_ids]

        def fingerprint(self) -> str:
            return "raw"

        @staticmethod
        def decode(record: bytes, *, rng: np.random.Generator) -> dict[str, Any]:
            return {"id": np.int32(int.from_bytes(record, "little")), "noise": np.float32(rng.random())}

    with make_feed(Raw(), shuffle=True, num_epochs=2) as feed:
        noise = [np.asarray(b["noise"]) for b in feed]
        ids = np.concatenate([feed.record_ids(k) for k in range(len(feed))])
    with make_feed(Raw(), shuffle=True, num_epochs=2, num_workers=2, prefetch=0) as again:
        for left, right in zip(noise, again, strict=True):
            assert left.tobytes() == np.asarray(right["noise"]).tobytes()
    flat = np.concatenate(noise)
    first, second = (flat[np.flatnonzero(ids == 7)[i]] for i in (0, 1))
    assert first != second, "another epoch draws other numbers"
    assert len(set(flat.tolist())) == len(flat)


# ---------------------------------------------------------------- the state


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True, "num_epochs": 2, "end": "pad", "mask_key": "m"},
        {"shuffle": 8, "prefetch": 0},
        {"load": "once", "global_batch_size": meshfeed.BatchSchedule([(0, 8), (3, 16)])},
    ],
)
def test_check_resumable(options: dict[str, Any]) -> None:
    check_resumable(lambda: make_feed(records(70), **options))


def test_state_is_small_for_any_length_and_resumes_at_once_far_out() -> None:
    class Long:
        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, record_id: int) -> dict[str, Any]:
            return {"id": np.float64(record_id)}

    with make_feed(Long(), shuffle=True, global_batch_size=32) as feed:
        state = feed.get_state()
        state["position"], state["segments"] = 9 * 10**11, [[0, 0, 32]]
        feed.set_state(json.loads(json.dumps(state)))
        next(feed)
        assert feed.step == 9 * 10**11 // 32 + 1
        assert len(json.dumps(feed.get_state())) <= 2048


def test_state_is_that_of_the_last_delivered_batch_and_legal_at_any_moment() -> None:
    with make_feed(prefetch=4) as feed:
        before = feed.get_state()
        assert before["position"] == 0
        next(feed)
        next(feed)
        assert feed.get_state()["position"] == 32
        rest = ids_of(feed)
        assert len(rest) == 4
        after = feed.get_state()
        with pytest.raises(StopIteration):
            next(feed)
        feed.set_state(after)
        with pytest.raises(StopIteration):
            next(feed)
        feed.set_state(before)
        assert len(ids_of(feed)) == 6
        feed.reset()
        assert (feed.step, len(ids_of(feed))) == (0, 6)


def damage(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(state)), **changes}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"position": 33}, "position"),
        ({"position": 1600}, "position"),
        ({"position": -16}, "position"),
        ({"position": True}, "position"),
        ({"position": 32.0}, "position"),
        ({"segments": [[0, 0, 5]]}, "position"),
        ({"segments": []}, "position"),
        ({"segments": [[1, 0, 16]]}, "segments"),
        ({"segments": [[0, 0, 16], [1, 32, 16]]}, "segments"),
        ({"meshfeed": 2}, "meshfeed"),
        ({"meshfeed": None}, "meshfeed"),
        ({"kind": "lanes"}, "kind"),
        ({"kind": "nonsense"}, "kind"),
        ({"surprise": 1}, "surprise"),
        ({"fingerprint": {}}, "source"),
    ],
)
def test_a_state_changed_by_hand_is_refused_and_changes_nothing(change: dict[str, Any], field: str) -> None:
    with make_feed(shuffle=True) as feed:
        next(feed)
        next(feed)
        state = feed.get_state()
        expected = feed.record_ids(2).tolist()
        with pytest.raises(meshfeed.StateMismatchError) as info:
            feed.set_state(damage(state, **change))
        assert info.value.field.startswith(field)
        assert info.value.remedy
        assert feed.get_state() == state
        assert np.asarray(next(feed)["id"]).tolist() == expected


@pytest.mark.parametrize("text", ["", '{"meshfeed": 1, "kind": "ran', "[1, 2]", "null"])
def test_a_state_cut_short_says_so(text: str) -> None:
    with make_feed() as feed, pytest.raises(meshfeed.StateMismatchError) as info:
        feed.set_state(text)  # type: ignore[arg-type]
    assert info.value.field in ("state",)


def test_a_state_without_a_field_says_which() -> None:
    with make_feed() as feed:
        state = feed.get_state()
        del state["position"]
        with pytest.raises(meshfeed.StateMismatchError, match=r"'position'.*truncated"):
            feed.set_state(state)


@pytest.mark.parametrize(
    ("source", "options", "field"),
    [
        (records(101), {}, "source.records"),
        ({**records(), "x": records()["x"] + 1}, {}, "source"),
        (None, {"seed": 1}, "seed"),
        (None, {"shuffle": True}, "shuffle"),
        (None, {"shuffle": 1}, "shuffle"),
        (None, {"num_epochs": 2}, "num_epochs"),
        (None, {"num_epochs": None}, "num_epochs"),
        (None, {"end": "pad"}, "end"),
    ],
)
def test_a_state_of_another_stream_names_the_field(source: Any, options: dict[str, Any], field: str) -> None:
    with make_feed() as feed:
        next(feed)
        state = feed.get_state()
    with make_feed(source, **options) as other:
        with pytest.raises(meshfeed.StateMismatchError) as info:
            other.set_state(state)
        assert info.value.field.startswith(field)
        assert info.value.saved != info.value.current or field == "shuffle"
        assert other.position == 0


def test_shuffle_true_and_a_block_of_one_are_not_the_same_although_python_says_so() -> None:
    with make_feed(shuffle=True) as feed:
        state = feed.get_state()
    with make_feed(shuffle=1) as other, pytest.raises(meshfeed.StateMismatchError, match="shuffle"):
        other.set_state(state)


def test_what_may_change_on_resume() -> None:
    with make_feed(shuffle=True, num_epochs=None) as feed:
        for _ in range(3):
            next(feed)
        state = feed.get_state()
        expected = feed.record_ids(3).tolist()[:8]
    changed = {"global_batch_size": 8, "prefetch": 0, "num_threads": 2, "load": "once", "num_epochs": 4}
    with make_feed(shuffle=True, **changed) as other:
        other.set_state(state)
        assert other.step == 3
        assert np.asarray(next(other)["id"]).tolist() == expected


@given(st.integers(1, 60), st.integers(1, 3), st.sampled_from(["drop", "pad"]), st.data())
@settings(max_examples=25)
def test_any_length_batch_and_epochs_continue_exactly(count: int, epochs: int, end: str, data: Any) -> None:
    size = 4 * data.draw(st.integers(1, 5))
    options: dict[str, Any] = {
        "global_batch_size": size,
        "num_epochs": epochs,
        "end": end,
        "shuffle": True,
        "prefetch": 0,
    }
    with make_feed(records(count), **options) as feed:
        batches = ids_of(feed)
        total = count * epochs
        assert len(batches) == len(feed) == (total // size if end == "drop" else -(-total // size))
        assert feed.position == (len(batches) * size if end == "drop" else total)
        at = data.draw(st.integers(0, len(batches)))
        feed.reset()
        for _ in range(at):
            next(feed)
        state = feed.get_state()
    with make_feed(records(count), **options) as other:
        other.set_state(state)
        assert ids_of(other) == batches[at:]


def test_merge_states_of_random_access_is_the_state() -> None:
    with make_feed() as feed:
        next(feed)
        state = feed.get_state()
        assert meshfeed.merge_states([state, state]) == state
        next(feed)
        with pytest.raises(meshfeed.StateMismatchError, match="position"):
            meshfeed.merge_states([state, feed.get_state()])
    with pytest.raises(meshfeed.StateMismatchError):
        meshfeed.merge_states([])


# ---------------------------------------------------------------- the caller's rules


def test_after_close_next_raises_state_works_and_nothing_is_left() -> None:
    before = set(threading.enumerate())
    feed = make_feed(num_threads=3)
    next(feed)
    feed.close()
    feed.close()
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile
    assert feed.get_state()["position"] == 16
    with pytest.raises(meshfeed.MeshfeedError, match="closed"):
        next(feed)


class Lanes:
    """A stream that counts its open iterators; ``open`` waits for the event."""

    def __init__(self) -> None:
        self.opening, self.may_open = threading.Event(), threading.Event()
        self.open_now = 0

    def open(self, lane_index: int, num_lanes: int) -> Any:
        self.opening.set()
        self.may_open.wait()
        self.open_now += 1
        return LaneOfNumbers(self)


class LaneOfNumbers:
    def __init__(self, source: Lanes) -> None:
        self.source, self.at = source, 0

    def __next__(self) -> dict[str, Any]:
        self.at += 1
        return {"id": np.int32(self.at)}

    def close(self) -> None:
        self.source.open_now -= 1


def test_a_replay_of_a_stream_has_the_batch_sizes_that_were_delivered() -> None:
    stream = meshfeed.sources.Stream(lambda lane_index, num_lanes: ({"id": np.int32(i)} for i in range(64)))
    with make_feed(stream, num_lanes=1) as feed:
        first = ids_of([next(feed)])[0]
        state = feed.get_state()
    with make_feed(stream, num_lanes=1, global_batch_size=32) as feed:
        feed.set_state(state)
        assert feed.replay(0)["id"].tolist() == first
        assert feed.replay(1)["id"].tolist() == ids_of([next(feed)])[0]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_close_in_another_thread_ends_a_next_that_opens_the_data(prefetch: int) -> None:
    before = set(threading.enumerate())
    source = Lanes()
    feed = make_feed(source, num_lanes=1, prefetch=prefetch)
    got: list[object] = []

    def take() -> None:
        try:
            got.append(next(feed))
        except meshfeed.MeshfeedError as error:
            got.append(str(error).partition(".")[0])

    thread = threading.Thread(target=take)
    thread.start()
    source.opening.wait()
    closing = threading.Thread(target=feed.close)  # waits for the source
    closing.start()
    thread.join()  # does not
    source.may_open.set()
    closing.join()
    assert got == [f"{feed.name} is closed"]
    assert (feed.step, source.open_now) == (0, 0)
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile


def test_a_closed_feed_takes_a_state_and_keeps_nothing_open() -> None:
    source = Lanes()
    source.may_open.set()
    feed = make_feed(source, num_lanes=1)
    next(feed)
    state = feed.get_state()
    next(feed)
    feed.close()
    assert source.open_now == 0
    feed.set_state(state)
    assert (feed.step, source.open_now) == (1, 0)
    feed.close()


def test_a_feed_that_is_dropped_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    feed = make_feed()
    next(feed)
    del feed
    gc.collect()
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile


def broken_lane(lane_index: int, num_lanes: int) -> Any:
    yield {"x": np.zeros(2)}
    raise ValueError("the disk is on fire")


def unopened_lane(lane_index: int, num_lanes: int) -> Any:
    raise ValueError("the disk is on fire")


class BrokenTable:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> Any:
        if record_id >= 16:
            raise ValueError("the disk is on fire")
        return {"x": np.zeros(2)}

    def fingerprint(self) -> str:
        return "broken"


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 2}, {"num_threads": 2}])
@pytest.mark.parametrize(
    "source",
    [
        None,
        BrokenTable(),
        meshfeed.sources.Stream(broken_lane, fingerprint="lanes"),
        meshfeed.sources.Stream(unopened_lane, fingerprint="lanes"),
    ],
    ids=["end", "records", "stream", "unopened"],
)
def test_a_feed_that_is_dropped_after_the_end_or_an_error_is_freed(source: Any, options: dict[str, Any]) -> None:
    def exhaust(feed: meshfeed.Feed) -> None:
        while True:
            next(feed)

    def fail() -> weakref.ref[meshfeed.Feed]:
        feed = make_feed(source, **options)
        with pytest.raises((StopIteration, ValueError)):
            exhaust(feed)
        return weakref.ref(feed)

    dropped = fail()
    gc.collect()
    assert dropped() is None


def test_iter_is_the_feed_and_does_not_reset() -> None:
    with make_feed() as feed:
        next(feed)
        assert iter(feed) is feed
        assert len(ids_of(feed)) == 5


def test_len_of_an_endless_feed_is_a_type_error() -> None:
    with make_feed(num_epochs=None) as feed, pytest.raises(TypeError, match="repeats forever") as caught:
        len(feed)
    assert str(caught.value).endswith("has no length. Count steps in the loop, or pass num_epochs.")


def test_good_batches_before_an_error_are_delivered_and_the_error_repeats() -> None:
    class Breaks:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, record_id: int) -> dict[str, Any]:
            if record_id == 40:
                raise KeyError("lost")
            return {"id": np.int32(record_id)}

        def fingerprint(self) -> str:
            return "breaks"

    for prefetch in (0, 3):
        with make_feed(Breaks(), prefetch=prefetch) as feed:
            assert np.asarray(next(feed)["id"]).tolist() == list(range(16))
            assert np.asarray(next(feed)["id"]).tolist() == list(range(16, 32))
            for _ in range(2):
                with pytest.raises(KeyError, match="lost") as info:
                    next(feed)
                assert "record 40" in "".join(info.value.__notes__)
            assert feed.position == 32


@pytest.mark.parametrize("prefetch", [0, 2])
def test_keyboard_interrupt_in_next_loses_no_batch(prefetch: int) -> None:
    class Interrupts:
        armed = True

        def __len__(self) -> int:
            return 64

        def __getitem__(self, record_id: int) -> dict[str, Any]:
            if record_id == 20 and self.armed and prefetch == 0:
                Interrupts.armed = False
                raise KeyboardInterrupt
            return {"id": np.int32(record_id)}

        def fingerprint(self) -> str:
            return "interrupts"

    with make_feed(Interrupts(), prefetch=prefetch, load="once" if prefetch else "sharded") as feed:
        seen = [np.asarray(next(feed)["id"]).tolist()]
        if prefetch == 0:
            with pytest.raises(KeyboardInterrupt):
                next(feed)
        else:
            original = feed._place.placer.finish
            feed._place.placer.finish = lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                next(feed)
            feed._place.placer.finish = original  # type: ignore[method-assign]
        seen += ids_of(feed)
    assert [i for batch in seen for i in batch] == list(range(64))


def test_stats_and_config() -> None:
    with make_feed() as feed:
        list(feed)
        stats = feed.stats()
        assert (stats.batches, stats.records) == (6, 96)
        assert stats.bytes == 96 * (8 + 12)
        assert 0 <= stats.stall_fraction <= 1
        config = feed.config()
        assert json.loads(json.dumps(config)) == config
        assert config["fingerprint"]["source"]["records"] == 100
        assert config["global_batch_size"] == 16
        assert (config["name"], config["kind"], config["num_lanes"]) == (feed.name, "random_access", None)
        assert config["participants"] == [0]
        sample = feed._sample()
        assert (sample.step, sample.position, sample.stats.batches) == (6, 96, 6)


def test_stall_fraction_leaves_out_start_up_also_after_reset_and_set_state(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    with make_feed(clock.slow_source(), prefetch=0, num_epochs=None) as feed:
        assert feed.stats().stall_fraction == 0
        first = feed.stats()
        for restart in (lambda: None, feed.reset, lambda: feed.set_state(feed.get_state())):
            restart()
            clock.cost = 100  # of a read
            next(feed)
            clock.cost = 1
            for _ in range(4):
                clock.now += 3  # the step
                next(feed)
            stats = feed.stats(since=first)
            assert (stats.batches, stats.startup_seconds, stats.elapsed_seconds) == (5, 100, 16)
            assert stats.wait_seconds == 104
            assert stats.stall_fraction == 4 / 16
            first = feed.stats()
        assert (first.startup_seconds, first.elapsed_seconds, first.stall_fraction) == (300, 48, 12 / 48)


class Clock:
    """A time that stands still but for reads, which take ``cost`` seconds per batch, and what a test adds."""

    def __init__(self) -> None:
        self.now, self.cost = 1000.0, 0.0

    def __call__(self) -> float:
        return self.now

    def slow_source(self) -> Any:
        """64 records."""
        clock = self

        class Slow(meshfeed.sources.Memory):
            def read_batch(self, *args: Any, **more: Any) -> Any:
                clock.now += clock.cost
                return super().read_batch(*args, **more)

        return Slow({"id": np.arange(64, dtype=np.int32)})


def test_stats_since_an_earlier_call() -> None:
    with make_feed() as feed, make_feed() as other:
        list(zip(range(2), feed, strict=False))
        early = feed.stats()
        assert feed.stats(since=early).batches == 0
        assert feed.stats(since=early).stall_fraction == 0
        next(feed)
        later, between = feed.stats(), feed.stats(since=early)
        assert (between.batches, between.records, between.startup_seconds) == (1, 16, 0)
        assert between.bytes == later.bytes - early.bytes
        assert between.wait_seconds == pytest.approx(later.wait_seconds - early.wait_seconds)
        assert feed.stats(since=pickle.loads(pickle.dumps(early))).batches == 1
        for wrong in (other.stats(), between, meshfeed.FeedStats(), 3, dataclasses.replace(later, batches=9)):
            with pytest.raises(meshfeed.SettingsError, match=r"since=.*earlier") as info:
                feed.stats(since=wrong)  # type: ignore[arg-type]
            assert info.value.setting == "since"


def test_step_log_is_one_json_line_a_step_and_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    with make_feed() as feed:
        next(feed)
    assert not [r for r in caplog.records if r.name == "meshfeed.steps"]
    with caplog.at_level(logging.DEBUG, logger="meshfeed.steps"), make_feed() as feed:
        next(feed)
        next(feed)
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "meshfeed.steps"]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[1]["record_ids"] == list(range(16, 32))
    for line in lines:
        seconds = [value for name, value in line.items() if name.endswith("_seconds")]
        assert len(seconds) >= 3
        assert all(isinstance(value, float) and 0 <= value == round(value, 6) for value in seconds)
        assert (line["feed"], line["host"], line["global_batch_size"]) == (feed.name, 0, 16)
        assert abs(line["time"] - time.time()) < 600


def test_the_step_log_of_a_stream_gives_the_records_of_each_lane(caplog: pytest.LogCaptureFixture) -> None:
    source = meshfeed.sources.Stream(lambda lane_index, num_lanes: iter(range(lane_index, 64, num_lanes)))
    with (
        caplog.at_level(logging.DEBUG, logger="meshfeed.steps"),
        meshfeed.MultiHostDataLoadIterator(source, make_mesh(), global_batch_size=16, num_lanes=4) as feed,
    ):
        next(feed)
        next(feed)
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "meshfeed.steps"]
    assert [line["lanes"] for line in lines] == [dict.fromkeys("0123", 4), dict.fromkeys("0123", 8)]


def test_local_iterator_has_the_state_of_the_last_delivered_batch() -> None:
    with make_feed() as feed:
        local = feed.local_iterator
        next(feed)
        state = local.get_state()
        assert state == feed.get_state()
        next(local)
        assert feed.step == 2
        local.set_state(state)
        assert feed.step == 1


def test_buffers_given_to_jax_are_never_written_again() -> None:
    with make_feed(records(4000), num_epochs=None, global_batch_size=256, prefetch=4) as feed:
        held = [next(feed) for _ in range(30)]
        for step, batch in enumerate(held):
            assert np.array_equal(np.asarray(batch["id"]), feed.record_ids(step))


def test_a_source_smaller_than_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    with make_feed(records(5)) as feed:
        assert ids_of(feed) == []
    assert len([r for r in caplog.records if "fewer than one batch" in r.getMessage()]) == 1
    with make_feed(records(5), end="pad") as feed:
        assert len(ids_of(feed)) == 1
    with make_feed(records(5), num_epochs=None) as feed:
        assert np.asarray(next(feed)["id"]).tolist() == [0, 1, 2, 3, 4] * 3 + [0]
    with make_feed(records(1), num_epochs=None, shuffle=True) as feed:
        assert np.asarray(next(feed)["id"]).tolist() == [0] * 16


def test_replay_reads_any_step_again_without_moving_the_feed() -> None:
    with make_feed(shuffle=True, end="pad", mask_key="real") as feed:
        batches = list(feed)
        for step in (0, 3, 6):
            again = feed.replay(step)
            assert again["x"].tobytes() == np.asarray(batches[step]["x"]).tobytes()
            assert again["real"].tolist() == np.asarray(batches[step]["real"]).tolist()
        assert feed.step == 7
        with pytest.raises(IndexError):
            feed.replay(7)


def test_reset_keeps_the_number_of_lanes_that_came_from_a_state() -> None:
    def open_lane(lane_index: int, num_lanes: int) -> Any:
        return ({"id": np.int32(i)} for i in range(lane_index, 160, num_lanes))

    with make_feed(meshfeed.sources.Stream(open_lane), num_lanes=4) as feed:
        batches, states = [], []
        for batch in feed:
            batches.append(np.asarray(batch["id"]).tolist())
            states.append(feed.get_state())
    with make_feed(meshfeed.sources.Stream(open_lane)) as feed:
        assert feed.config()["num_lanes"] == 16
        feed.set_state(states[2])
        assert np.asarray(next(feed)["id"]).tolist() == batches[3]
        feed.reset()
        assert feed.config()["num_lanes"] == 4
        assert [np.asarray(batch["id"]).tolist() for batch in feed] == batches, "the same stream from its first batch"
        assert feed.replay(1)["id"].tolist() == batches[1]


@pytest.mark.parametrize("resumed", [0, 3, 5])
def test_the_share_of_bad_records_goes_on_from_a_state(resumed: int) -> None:
    bad = {3, 40, 64, 70, 76, 80, 81}  # 5 of 80 up to step 4, 7 of 96 up to step 5

    def decode(record: Any) -> Any:
        if int(record["id"]) in bad:
            raise ValueError(f"record {int(record['id'])} is cut short")
        return record

    class Records(meshfeed.sources.Memory):
        def __getitem__(self, record_id: int) -> Any:
            return decode(super().__getitem__(record_id))

        def read_batch(self, record_ids: Any, columns: Any = None) -> Any:
            rows = super().read_batch(record_ids, columns=columns)
            for row in rows["id"]:
                decode({"id": row})
            return rows

    def feed_of(**options: Any) -> Any:
        rows = {"id": np.arange(200, dtype=np.int32)}
        return make_feed(Records(rows), shuffle=False, bad_records=meshfeed.SkipBad(0.065), **options)

    state = None
    if resumed:
        with feed_of() as feed:
            for _ in range(resumed):
                next(feed)
            state = json.loads(json.dumps(feed.get_state()))
        assert state["num_skipped"] == sum(record < resumed * 16 for record in bad)
        assert meshfeed.merge_states([state, state]) == state
    with feed_of() as feed:
        if state is not None:
            feed.set_state(state)
        with pytest.raises(meshfeed.SourceError, match="7 of the 96 records up to step 5 are bad"):
            for _ in feed:
                pass
        assert feed.step == 5
        if state is None:
            assert feed.get_state()["num_skipped"] == 5


def test_replay_of_a_stream_goes_on_from_the_state_that_is_given() -> None:
    opened = []

    def open_lane(lane_index: int, num_lanes: int) -> Any:
        opened.append(lane_index)
        return ({"id": np.int32(i)} for i in range(lane_index, 160, num_lanes))

    with make_feed(meshfeed.sources.Stream(open_lane), num_lanes=4) as feed:
        batches, states = [], []
        for batch in feed:
            batches.append(np.asarray(batch["id"]).tolist())
            states.append(feed.get_state())
        assert len(batches) == 10
        assert feed.replay(6, state=states[4])["id"].tolist() == batches[6]
        assert feed.replay(2)["id"].tolist() == batches[2]
        with pytest.raises(meshfeed.SettingsError, match="at or before"):
            feed.replay(2, state=states[4])
        with pytest.raises(IndexError):
            feed.replay(10, state=states[9])
        assert feed.step == 10
    with make_feed(meshfeed.sources.Stream(open_lane), num_lanes=4, global_batch_size=32) as feed:
        feed.set_state(states[4])
        again = [*batches[:5], next(feed)["id"].tolist()]
        assert len(again[-1]) == 32
        assert [feed.replay(step)["id"].tolist() for step in range(6)] == again  # of the sizes that they had
        assert feed.replay(3, state=states[1])["id"].tolist() == batches[3]
        assert feed.replay(5, state=states[1])["id"].tolist() == again[5]
    with (
        make_feed(iter([{"x": np.zeros((16, 1))}])) as feed,
        pytest.raises(meshfeed.SourceError, match="cannot be read"),
    ):
        feed.replay(0)


@pytest.mark.slow
def test_workers_say_how_they_collect_garbage() -> None:
    class Collects:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, record_id: int) -> Any:
            return {"id": np.int32(record_id), "collecting": np.int32(gc.isenabled())}

        def fingerprint(self) -> str:
            return "collects"

    for gc_every, enabled in ((0, 1), (3, 0)):
        with make_feed(Collects(), num_workers=meshfeed.Workers(1, gc_every=gc_every)) as feed:
            assert {int(value) for batch in feed for value in batch["collecting"]} == {enabled}
            assert feed.config()["num_workers"] == 1
    with pytest.raises(meshfeed.SettingsError, match="gc_every"):
        meshfeed.Workers(2, gc_every=-1)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_end_says_how_to_go_on(prefetch: int) -> None:
    with make_feed(prefetch=prefetch, name="train") as feed:
        for _ in range(6):
            next(feed)
        for _ in range(2):
            with pytest.raises(StopIteration) as end:
                next(feed)
            assert end.value.value is None
            (note,) = end.value.__notes__
            assert note.startswith("train ended at step 6 with num_epochs=1; num_epochs=None repeats the data")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_iterating_again_after_the_end_warns_once(prefetch: int, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if "iterating again" in record.getMessage()]

    with make_feed(prefetch=prefetch, name="train") as feed:
        counts = [sum(1 for _ in feed)]
        assert not warnings()
        with pytest.raises(StopIteration):
            next(feed)  # asking once more is no habit
        assert not warnings()
        counts += [sum(1 for _ in feed) for _ in range(2)]
        assert counts == [6, 0, 0]
        (warning,) = warnings()
        assert warning.startswith("train: ")
        assert "num_epochs=" in warning
        assert "reset()" in warning
        (record,) = [record for record in caplog.records if "iterating again" in record.getMessage()]
        assert (record.name, record.levelno) == ("meshfeed.feed", logging.WARNING)
        feed.reset()
        assert sum(1 for _ in feed) == 6
        assert len(warnings()) == 1


@pytest.mark.slow
def test_the_warning_is_seen_where_nobody_has_set_up_logging() -> None:
    program = """
import jax, numpy as np, meshfeed
from jax.sharding import AxisType
mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
feed = meshfeed.MultiHostDataLoadIterator({"x": np.zeros(8)}, mesh, global_batch_size=8)
for epoch in range(3):
    for batch in feed:
        print("batch")
"""
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "batch\n"
    assert done.stderr.count("each in its own order, or call reset() to repeat the same batches.") == 1


def depth(error: BaseException) -> int:
    return sum(1 for _ in traceback.walk_tb(error.__traceback__))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["end", "failure", "stream", "threads"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_asking_again_after_the_end_or_a_failure_takes_no_memory(kind: str, prefetch: int) -> None:
    class Broken:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, record_id: int) -> Any:
            raise RuntimeError("the disk is on fire")

        def fingerprint(self) -> str:
            return "broken"

    def lane(lane_index: int, num_lanes: int) -> Any:
        raise RuntimeError("the disk is on fire")
        yield

    source = {"end": None, "failure": Broken(), "threads": Broken(), "stream": meshfeed.sources.Stream(lane)}[kind]
    options = {"num_threads": 2} if kind == "threads" else {}
    with make_feed(source, prefetch=prefetch, **options) as feed:

        def ask() -> BaseException:
            with pytest.raises((StopIteration, RuntimeError)) as caught:
                next(feed)
            return caught.value

        with contextlib.suppress(RuntimeError):
            list(feed)
        first = ask()
        first_depth = depth(first)
        tracemalloc.start()
        try:
            for _ in range(200):
                ask()
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(5000):
                again = ask()
                assert (type(again), depth(again)) == (type(first), first_depth)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < 50_000
        if kind != "end":
            assert "on fire" in str(first)
            names = {frame.f_code.co_name for frame, _ in traceback.walk_tb(first.__traceback__)}
            assert {"__getitem__", "lane"} & names, "the source's own frames are still shown"


def test_a_move_between_hosts_that_was_interrupted_is_not_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only here can it be seen: of several hosts the others would wait in the next collective, or take its rows."""
    moves: list[int] = []
    with make_feed(load="once") as feed:
        next(feed)
        real = feed._place.placer.finish

        def interrupted_once(arrays: Any, size: int) -> Any:
            moves.append(feed.step)
            moved = real(arrays, size)
            if len(moves) == 1:
                raise KeyboardInterrupt  # after the computation was enqueued
            return moved

        monkeypatch.setattr(feed._place.placer, "finish", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            next(feed)
        assert np.asarray(next(feed)["id"]).tolist() == list(range(16, 32))  # one host: nobody else takes part
        assert moves == [1, 1]
        moves.clear()
        with monkeypatch.context() as patched:
            patched.setattr(type(feed._handshake), "needed", True)
            with pytest.raises(KeyboardInterrupt):
                next(feed)
            for _ in range(2):
                with pytest.raises(meshfeed.MeshfeedError, match=r"step 2 was interrupted.*set_state\(get_state\(\)\)"):
                    next(feed)
            assert moves == [2]
            assert feed.step == 2
        feed.set_state(feed.get_state())
        assert np.asarray(next(feed)["id"]).tolist() == list(range(32, 48))


# ---------------------------------------------------------------------------------------------------- steps


class Failing:
    """64 records, of which number 40 cannot be read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> dict[str, Any]:
        if record_id == 40:
            raise RuntimeError("the disk is on fire")
        return {"id": np.int32(record_id)}

    def fingerprint(self) -> str:
        return "failing"


def test_one_number_names_a_batch_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "meshfeed.steps"), make_feed(Failing(), end="pad", name="a") as feed:
        for step in range(2):
            assert feed.step == step
            assert np.asarray(next(feed)["id"]).tolist() == feed.record_ids(step).tolist()
            assert feed.replay(step)["id"].tolist() == feed.record_ids(step).tolist()
        with pytest.raises(RuntimeError):
            next(feed)
        assert feed.step == 2
        assert 40 in feed.record_ids(feed.step)
        assert "step=2, position=32, failed" in repr(feed)
        lines = [json.loads(record.message) for record in caplog.records if record.name == "meshfeed.steps"]
        assert [(line["step"], line["position"]) for line in lines] == [(0, 0), (1, 16)]
        assert [line["record_ids"] for line in lines] == [feed.record_ids(step).tolist() for step in range(2)]
        with pytest.raises(IndexError, match=r"step 4 is not in this stream, which has 4 steps \(0 to 3\)"):
            feed.record_ids(4)


# ---------------------------------------------------------------------------------------------------- repr


class Loud(list):
    """A sequence whose repr must not be called, as it would hold all of the data."""

    def __repr__(self) -> str:
        raise AssertionError("the repr of a source that is not meshfeed's was called")


def test_the_repr_says_name_source_batch_and_position() -> None:
    arrays = {"x": np.arange(1000)}
    feed = meshfeed.Feed(arrays, rows_sharding(), global_batch_size=64, name="train")
    assert repr(feed) == "<meshfeed.Feed 'train': Memory(1,000 records), global_batch_size=64, step=0, position=0>"
    next(feed)
    next(feed)
    assert repr(feed).endswith(", global_batch_size=64, step=2, position=128>")
    for _ in feed:
        pass
    assert repr(feed).endswith("step=15, position=960, ended>")
    feed.close()
    assert repr(feed).endswith("step=15, position=960, closed>")


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        (lambda: Loud([np.int32(i) for i in range(64)]), {}, "Loud(64 records), global_batch_size=16, step"),
        (lambda: meshfeed.sources.Stream(open_lane), {}, "Stream(open_lane), global_batch_size=16, step"),
        (lambda: ({"x": np.zeros(16)} for _ in range(2)), {"global_batch_size": None}, "HostBatches(generator), step"),
        (
            lambda: {"x": np.zeros(64)},
            {"global_batch_size": meshfeed.BatchSchedule([(0, 8), (2, 16)])},
            "Memory(64 records), global_batch_size=BatchSchedule([(0, 8), (2, 16)]), step",
        ),
    ],
)
def test_the_repr_of_other_sources_reads_nothing(source: Any, options: dict[str, Any], expected: str) -> None:
    with meshfeed.Feed(source(), rows_sharding(), **{"global_batch_size": 16, "name": "a", **options}) as feed:
        assert repr(feed).startswith(f"<meshfeed.Feed 'a': {expected}")


def open_lane(lane_index: int, num_lanes: int) -> Any:
    """A stream that fails at its first record."""
    raise OSError("no such disk")
    yield


def test_the_repr_of_a_feed_that_failed_or_was_never_made() -> None:
    stream = meshfeed.sources.Stream(open_lane)
    feed = meshfeed.Feed(stream, rows_sharding(), global_batch_size=16, name="a", retry=meshfeed.Retry(attempts=1))
    with pytest.raises(OSError, match="no such disk"):
        next(feed)
    assert repr(feed).endswith("step=0, position=0, failed: OSError>")
    feed.close()
    half = object.__new__(meshfeed.Feed)
    assert repr(half) == "<meshfeed.Feed None: not made>"
    with pytest.raises(meshfeed.SettingsError):
        half.__init__({"x": np.zeros(64)}, rows_sharding(), global_batch_size=16, end="keep", name="a")  # type: ignore[misc]
    assert repr(half) == "<meshfeed.Feed 'a': not made>"


# ---------------------------------------------------------------- truth


@pytest.mark.parametrize("options", [{}, {"num_epochs": None}, {"global_batch_size": 200}])
@pytest.mark.parametrize("kind", ["random access", "stream", "host batches"])
def test_a_feed_is_true_whatever_its_length(kind: str, options: dict[str, Any]) -> None:
    batches = [{"id": np.arange(16)}]
    sources = {
        "random access": records(),
        "stream": meshfeed.sources.Stream(lambda lane_index, num_lanes: iter([{"id": np.int32(1)}] * 40)),
        "host batches": meshfeed.sources.HostBatches(batches),
    }
    if kind == "host batches":
        options = {**options, "global_batch_size": None}
    if kind != "random access" and "num_epochs" in options:
        options = {key: value for key, value in options.items() if key != "num_epochs"}
    with make_feed(sources[kind], **options) as feed:
        assert feed
        assert feed.local_iterator
        if options.get("num_epochs", 1):
            list(feed)  # list() asks for the length first
    assert feed
