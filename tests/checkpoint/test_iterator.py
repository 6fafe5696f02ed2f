"""The state of a feed through Orbax v0 and v1, and as files."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_feeds import CountingFeed, LaneFeed, OtherIterator

from meshfeed._src.base.errors import CheckpointError, CorruptDataError, StateMismatchError
from meshfeed._src.checkpoint import saves
from meshfeed._src.checkpoint.saves import CapturedState
from meshfeed._src.state import files as state_files
from meshfeed.checkpoint import Checkpointer, IteratorHandler, IteratorRestore, IteratorSave, verify


def advanced(steps: int) -> CountingFeed:
    feed = CountingFeed()
    for _ in range(steps):
        next(feed)
    return feed


def test_composite_restores_in_place_and_saves_the_state_of_the_moment(tmp_path):
    feed = advanced(3)
    with ocp.CheckpointManager(tmp_path / "ckpt") as manager:
        manager.save(1, args=ocp.args.Composite(data=IteratorSave(feed), x=ocp.args.JsonSave({"a": 1})))
        next(feed)
        manager.wait_until_finished()
        other = CountingFeed()
        restored = manager.restore(1, args=ocp.args.Composite(data=IteratorRestore(other), x=ocp.args.JsonRestore()))
    assert restored["data"] is other
    assert next(other) == [12, 13, 14, 15]
    assert [path.name for path in (tmp_path / "ckpt/1/data").glob("*.json")] == ["state.json"]


def test_single_item_manager_and_synchronous_checkpointer(tmp_path):
    feed = advanced(2)
    with ocp.CheckpointManager(tmp_path / "one", item_handlers=IteratorHandler()) as manager:
        manager.save(5, args=IteratorSave(feed))
        manager.wait_until_finished()
        other = CountingFeed()
        manager.restore(5, args=IteratorRestore(other))
    assert other.position == 8
    ocp.Checkpointer(IteratorHandler()).save(tmp_path / "two", args=IteratorSave(feed))
    assert ocp.Checkpointer(IteratorHandler()).restore(tmp_path / "two", args=IteratorRestore(None)) == feed.get_state()


def test_orbax_v1_stateful_checkpointable(tmp_path):
    v1 = pytest.importorskip("orbax.checkpoint.experimental.v1")

    class Feed(CountingFeed, state_files.Checkpointable):
        pass

    feed = Feed()
    next(feed)
    response = v1.save_checkpointables_async(tmp_path / "v1", {"data": feed, "pytree": {"w": np.arange(3)}})
    next(feed)
    response.result()
    other = Feed()
    v1.load_checkpointables(tmp_path / "v1", {"data": other})
    assert other.position == 4


def test_parts_of_several_hosts_are_joined_and_restored_on_another_number(tmp_path):
    hosts = [LaneFeed([0, 1], 4), LaneFeed([2, 3], 4)]
    for process, feed in enumerate(hosts):
        next(feed)
        next(feed)
        state_files.write_state(tmp_path, feed.get_state(), process=process)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-0.json", "part-1.json"]
    for _ in range(2):  # before and after the parts are merged
        for lanes in ([0, 1, 2, 3], [3], [1, 2]):
            feed = LaneFeed(lanes, 4)
            feed.set_state(state_files.read_state(tmp_path))
            assert feed.counters == {lane: 2 * (1 + lane) for lane in lanes}
        state_files.merge_files(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_parts_of_different_steps_are_refused(tmp_path):
    first, second = LaneFeed([0], 2), LaneFeed([1], 2)
    next(second)
    state_files.write_state(tmp_path, first.get_state(), process=0)
    state_files.write_state(tmp_path, second.get_state(), process=1)
    with pytest.raises(CheckpointError, match="do not belong together"):
        state_files.read_state(tmp_path)


def test_only_one_host_writes_a_state_that_all_share(tmp_path):
    state = advanced(1).get_state()
    for process in range(5):
        state_files.write_state(tmp_path, state, process=process)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_ledgers_of_replaced_records_come_from_every_host(tmp_path):
    for process in range(3):
        state = {**advanced(1).get_state(), "skipped": {str(process): [[process, 0, "bad", 0]]}}
        state_files.write_state(tmp_path, state, process=process)
    assert sorted(state_files.read_state(tmp_path)["skipped"]) == ["0", "1", "2"]


def test_every_flipped_bit_is_found_or_harmless(tmp_path):
    feed = advanced(7)
    state_files.write_state(tmp_path, feed.get_state())
    path = tmp_path / "state.json"
    whole = path.read_bytes()
    for bit in range(0, len(whole) * 8, 5):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(damaged))
        try:
            state = state_files.read_state(tmp_path)
        except (CorruptDataError, CheckpointError):
            continue
        assert state == feed.get_state()


def test_an_empty_folder_and_a_cut_file_are_errors(tmp_path):
    with pytest.raises(CheckpointError, match="no iterator state"):
        state_files.read_state(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps(state_files.make_document(advanced(1).get_state(), None, 0))[:-9])
    with pytest.raises(CorruptDataError, match="not JSON"):
        state_files.read_state(tmp_path)


def test_a_state_that_does_not_fit_leaves_the_feed_as_it_was(tmp_path):
    state_files.write_state(tmp_path, advanced(2).get_state())
    other = CountingFeed(records=7)
    next(other)
    with pytest.raises(StateMismatchError):
        IteratorHandler().restore(tmp_path, IteratorRestore(other))
    assert other.position == 4


def test_a_save_waits_for_the_folder_that_another_host_makes(tmp_path):
    folder = tmp_path / "late"
    futures = asyncio.run(IteratorHandler().async_save(folder, IteratorSave(advanced(1))))
    making = threading.Timer(0.3, folder.mkdir)
    making.start()
    for future in futures:
        future.result(timeout=60)
    making.join()
    assert state_files.read_state(folder)["position"] == 4


@pytest.mark.parametrize(
    "state",
    [
        {"next": 3},
        {"slices": {"x": (2, 5)}},
        {1: "a"},
        b'{"next": 3}',
        [1, 2],
        {"__exact__": 1},
        {"__hosts__": {}},
        {"meshfeed": (1,)},
    ],
    ids=str,
)
def test_the_state_of_another_iterator_comes_back_exactly(tmp_path, state):
    """JSON has no tuples, bytes or other keys than text; Grain's iterators continue wrongly with lists for tuples."""
    saved, restored, alone = OtherIterator(state), OtherIterator(None), OtherIterator(None)
    with Checkpointer(tmp_path / "c") as ckpt:
        ckpt.save(1, {"w": 1}, saved)
        assert ckpt.restore({"w": 0}, restored) == (1, {"w": 1})
    IteratorHandler().restore(tmp_path / "c/1/iterator", IteratorRestore(alone))
    assert repr(restored.state) == repr(alone.state) == repr(state)
    assert verify(tmp_path / "c")[0].intact


def test_each_host_gets_back_its_own_state_of_another_iterator(tmp_path, monkeypatch):
    """Only the iterator knows what the states of several hosts mean, so they are kept apart, on as many hosts."""
    states = [{"next": 3}, {"slices": {"x": (2, 5)}}]
    for process, state in enumerate(states):
        state_files.write_state(tmp_path, CapturedState.of(OtherIterator(state)).state, process=process)

    def restore(process: int, hosts: int) -> object:
        monkeypatch.setattr(saves, "process_index", lambda: process)
        monkeypatch.setattr(saves, "process_count", lambda: hosts)
        return IteratorHandler().restore(tmp_path)

    for _ in range(2):
        assert [restore(process, 2) for process in range(2)] == states
        with pytest.raises(CheckpointError, match=r"2 host\(s\) saved this iterator.*there are 3 now.*start as many"):
            restore(0, 3)
        state_files.merge_files(tmp_path)
    state_files.write_state(
        tmp_path, CapturedState.of(OtherIterator(states[1])).state, process=1
    )  # as if killed in merging
    assert [restore(process, 2) for process in range(2)] == states
    (tmp_path / "part-1.json").unlink()
    (tmp_path / "state.json").unlink()
    state_files.write_state(tmp_path, states[0], process=0)
    assert restore(0, 1) == states[0]
    with pytest.raises(CheckpointError, match=r"1 host\(s\) saved this iterator"):
        restore(0, 2)


def test_the_state_of_another_iterator_is_captured(tmp_path):
    class Late(IteratorHandler):
        async def async_save(self, directory, args):
            futures = await super().async_save(directory, args)
            args.feed.state["next"] = 4
            return futures

    saved = OtherIterator({"next": 3})
    (tmp_path / "a").mkdir()
    Late().save(tmp_path / "a", IteratorSave(saved))
    assert IteratorHandler().restore(tmp_path / "a") == {"next": 3}


def test_a_state_without_an_exact_form_is_refused(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(
            CheckpointError, match=r"the state of <.*OtherIterator> cannot be saved: a object has no exact JSON"
        ):
            ckpt.save(1, {"w": 1}, OtherIterator({"next": object()}))
        assert ckpt.save(1, {"w": 1}, OtherIterator({"next": 1}))


def test_grain_continues_a_packing_iterator_where_it_was(tmp_path):
    grain = pytest.importorskip("grain")
    experimental = pytest.importorskip("grain.experimental")
    documents = [{"x": np.arange(size) + 100 * size} for size in (5, 3, 7, 2, 6, 4, 9)]

    def batches():
        records = grain.MapDataset.source(documents).to_iter_dataset()
        return iter(experimental.ConcatThenSplitIterDataset(records, length_struct={"x": 4}))

    def next_of(iterator):
        return next(iterator)["x"].tolist()

    saved, restored = batches(), batches()
    next_of(saved)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": 1}, saved)
        ckpt.restore({"w": 0}, restored)
    assert [next_of(restored) for _ in range(5)] == [next_of(saved) for _ in range(5)]
