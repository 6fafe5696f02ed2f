"""The step that ends a run is saved when the checkpointer is closed, or a warning says why it cannot be."""

from __future__ import annotations

import logging
import threading

import jax
import numpy as np
import pytest
from checkpoint_feeds import CountingFeed, OtherIterator
from checkpoint_trees import assert_same, make_mesh, place

from meshfeed._src.base.errors import CheckpointError, SettingsError
from meshfeed._src.base.store_path import make_path
from meshfeed._src.checkpoint import checkpointer, handlers
from meshfeed._src.checkpoint.store_steps import begin_step
from meshfeed.checkpoint import Checkpointer


def state_at(step: int):
    return {
        "w": place(np.full((64, 8), step, np.float32), make_mesh(4, 2), "data"),
        "step": step,
        "n": np.full(3, step),
    }


class Feed(CountingFeed):
    states = 0

    def get_state(self):
        self.states += 1
        return super().get_state()


def train(ckpt: Checkpointer, feed: CountingFeed, steps: int):
    for step in range(1, steps + 1):
        next(feed)
        state = state_at(step)
        ckpt.save(step, state, feed)
    return state


def newest(directory):
    feed = CountingFeed()
    with Checkpointer(directory) as ckpt:
        step, state = ckpt.restore(state_at(0), feed)
    assert_same(state_at(step), state)
    assert feed.position == 4 * step
    return step


def test_an_earlier_save_that_failed_does_not_keep_it_from_being_saved(tmp_path, monkeypatch):
    finalize = handlers.ArraysHandler.finalize

    def once(self, directory):
        monkeypatch.setattr(handlers.ArraysHandler, "finalize", finalize)
        raise OSError(5, "transient I/O error")

    ckpt, feed = Checkpointer(tmp_path, save_interval_steps=5), CountingFeed()
    for step in range(1, 9):
        next(feed)
        if step == 5:
            ckpt.wait()
            monkeypatch.setattr(handlers.ArraysHandler, "finalize", once)
        ckpt.save(step, state_at(step), feed)
    with pytest.raises(CheckpointError, match=r"saving step 5 failed: .*transient"):
        ckpt.close()
    assert newest(tmp_path) == 8


@pytest.mark.parametrize("directory", ["{}", "memory://last{}"])
def test_it_clears_what_a_killed_job_has_left(tmp_path, directory):
    url = directory.format(tmp_path)
    with Checkpointer(url, save_interval_steps=100) as ckpt:
        assert ckpt.save(0, state_at(0), CountingFeed())
    left = make_path(url) / ("7.orbax-checkpoint-tmp" if "://" not in url else "7/arrays")
    left.mkdir(parents=True)
    if "://" in url:
        begin_step(left.parent)
    (left / "arrays-1.json").write_text("{}")
    with Checkpointer(url, save_interval_steps=100) as ckpt:
        feed = CountingFeed()
        ckpt.restore(state_at(0), feed)
        next(feed)
        assert not ckpt.save(1, state_at(1), feed)
    assert not (left / "arrays-1.json").exists()
    assert newest(url) == 1


def test_leaving_and_closing_save_it(tmp_path):
    with Checkpointer(tmp_path / "with", save_interval_steps=10) as ckpt:
        train(ckpt, CountingFeed(), 17)
    assert ckpt.steps() == [1, 10, 17]
    assert newest(tmp_path / "with") == 17
    ckpt = Checkpointer(tmp_path / "close", save_interval_steps=100)
    train(ckpt, CountingFeed(), 3)
    ckpt.close()
    ckpt.close()
    assert ckpt.steps() == [1, 3]
    with pytest.raises(CheckpointError, match="closed"):
        ckpt.save(4, state_at(4))


def test_nothing_more_is_saved_where_nothing_was_skipped_or_that_is_told(tmp_path):
    with Checkpointer(tmp_path / "told", save_interval_steps=10, save_last=False) as ckpt:
        train(ckpt, CountingFeed(), 12)
    assert ckpt.steps() == [1, 10]
    with Checkpointer(tmp_path / "forced", save_interval_steps=10) as ckpt:
        feed = CountingFeed()
        state = train(ckpt, feed, 12)
        assert ckpt.save(12, state, feed, force=True)
        assert not ckpt.save(12, state, feed)
        assert not ckpt.save(11, state, feed)  # steps rise only
    assert ckpt.steps() == [1, 10, 12]
    with pytest.raises(SettingsError, match="save_last"):
        Checkpointer(tmp_path / "c", save_last="yes")  # pyright: ignore[reportArgumentType]


def test_an_exception_saves_nothing(tmp_path):
    def fail():
        with Checkpointer(tmp_path / "c", save_interval_steps=10) as ckpt:
            train(ckpt, CountingFeed(), 12)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with Checkpointer(tmp_path / "c") as ckpt:
        assert ckpt.steps() == [1, 10]


def test_a_skipped_step_costs_neither_a_state_nor_a_copy(tmp_path, monkeypatch):
    captured = []
    encode = checkpointer.encode_tree
    monkeypatch.setattr(
        checkpointer, "encode_tree", lambda tree, **how: captured.append(tree["step"]) or encode(tree, **how)
    )
    feed = Feed()
    with Checkpointer(tmp_path / "c", save_interval_steps=100) as ckpt:
        train(ckpt, feed, 1)
        ckpt.wait()
        seen = feed.states
        train(ckpt, feed, 20)
        assert feed.states == seen
        assert captured == [1]
    assert captured == [1, 20]


@pytest.mark.parametrize("change", ["donate", "refill", "move on"])
def test_what_changed_since_is_a_warning_and_never_saved(tmp_path, caplog, change):
    feed = CountingFeed()
    with caplog.at_level(logging.WARNING, "meshfeed"), Checkpointer(tmp_path / "c", save_interval_steps=10) as ckpt:
        state = train(ckpt, feed, 12)
        if change == "donate":
            jax.block_until_ready(jax.jit(lambda w: w + 1, donate_argnums=0)(state["w"]))
        elif change == "refill":
            state["n"][:] = -1
        else:
            next(feed)
    assert ckpt.steps() == [1, 10]
    (record,) = [record for record in caplog.records if "step 12" in record.message]
    reason = {"donate": "['w'] was donated", "refill": "numpy leaf was changed", "move on": "the feed has moved on"}
    assert reason[change] in record.message
    assert "force=True" in record.message


def test_containers_may_be_refilled(tmp_path):
    feed, state = CountingFeed(), {}
    with Checkpointer(tmp_path / "c", save_interval_steps=10) as ckpt:
        for step in range(1, 13):
            next(feed)
            state |= state_at(step)
            ckpt.save(step, state, feed)
        state |= state_at(99)
    assert newest(tmp_path / "c") == 12


def test_feeds_that_count_nothing(tmp_path):
    class Bare:
        place = 0

        def get_state(self):
            return {"meshfeed": 1, "kind": "random_access", "position": self.place, "segments": [], "fingerprint": {}}

    for moved, steps in ((False, [1, 2]), (True, [1])):
        feed = Bare()
        with Checkpointer(tmp_path / str(moved), save_interval_steps=10) as ckpt:
            ckpt.save(1, state_at(1), feed)
            ckpt.save(2, state_at(2), feed)
            feed.place += moved
        assert ckpt.steps() == steps


def test_a_save_that_fails_at_the_end_is_raised(tmp_path):
    ckpt = Checkpointer(tmp_path / "c", save_interval_steps=10)
    ckpt.save(1, state_at(1))
    ckpt.save(2, {**state_at(2), "fn": print})
    with pytest.raises(CheckpointError, match="'fn'"):
        ckpt.close()
    assert ckpt.steps() == [1]
    ckpt.close()


def test_a_restore_forgets_the_step_that_was_skipped_before_it(tmp_path):
    """Otherwise the state from before the restore would be saved as the newest step."""
    with Checkpointer(tmp_path, save_interval_steps=10) as ckpt:
        ckpt.save(1, state_at(1))
        assert not ckpt.save(5, state_at(5))
        ckpt.restore(state_at(0), step=1)
    assert ckpt.steps() == [1]


def test_an_iterator_that_changes_its_own_state(tmp_path, caplog):
    """And whose ``step`` is a method: what is no number is no count."""

    class Iterator(OtherIterator):
        def step(self):
            self.state["next"] += 1

    iterator = Iterator({"next": 0})
    with caplog.at_level(logging.WARNING, "meshfeed"), Checkpointer(tmp_path, save_interval_steps=10) as ckpt:
        for step in (1, 2):
            iterator.step()
            ckpt.save(step, state_at(step), iterator)
        iterator.step()
    assert "the feed has moved on" in caplog.text
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(state_at(0), iterator)[0] == 1
    assert iterator.state == {"next": 1}


def test_a_failed_restore_sets_back_an_iterator_that_changes_its_own_state(tmp_path):
    class Iterator(OtherIterator):
        def set_state(self, state):
            self.state.update(state)

    iterator = Iterator({"next": 1})
    with Checkpointer(tmp_path, save_interval_steps=10) as ckpt:
        ckpt.save(1, {"w": np.zeros(3)}, iterator)
        iterator.set_state({"next": 2})
        with pytest.raises(CheckpointError, match="stored shape"):
            ckpt.restore({"w": np.zeros(4)}, iterator)
    assert iterator.state == {"next": 2}


@pytest.mark.parametrize("url", [None, "memory://bucket/beside"])
def test_it_waits_for_the_save_of_another_checkpointer(tmp_path, monkeypatch, memory, url):
    """Whose unfinished step it would remove, if it had not saved yet."""
    finalize, may_end = handlers.ArraysHandler.finalize, threading.Event()

    def finalize_later(handler, directory):
        assert may_end.wait(60)
        finalize(handler, directory)

    first, last = (Checkpointer(url or tmp_path / "c", save_interval_steps=steps) for steps in (5, 50))
    first.save(1, state_at(1))
    first.wait()
    assert not last.save(3, state_at(3))
    monkeypatch.setattr(handlers.ArraysHandler, "finalize", finalize_later)
    first.save(5, state_at(5))
    threading.Timer(0.3, may_end.set).start()
    last.close()
    first.close()
    assert first.steps() == [1, 5]


def test_a_restore_waits_for_the_save_of_another_checkpointer(tmp_path, monkeypatch):
    """As when a notebook's cell is run again: training would start at the step before, or at 0."""
    finalize, may_end = handlers.ArraysHandler.finalize, threading.Event()

    def finalize_later(handler, directory):
        assert may_end.wait(60)
        finalize(handler, directory)

    monkeypatch.setattr(handlers.ArraysHandler, "finalize", finalize_later)
    first, second = (Checkpointer(tmp_path / "c", save_interval_steps=1) for _ in range(2))
    first.save(1, state_at(1))
    threading.Timer(0.3, may_end.set).start()
    assert second.restore(state_at(0))[0] == 1
    second.close()
    first.close()


def test_checkpointers_that_have_different_names_of_a_folder(tmp_path, monkeypatch):
    """Such as a link to the newest run: the second removed what the first was saving, and then took it for another job."""
    finalize, may_end = handlers.ArraysHandler.finalize, threading.Event()

    def finalize_later(handler, directory):
        assert may_end.wait(60)
        finalize(handler, directory)

    (tmp_path / "c").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "c")
    monkeypatch.setattr(handlers.ArraysHandler, "finalize", finalize_later)
    first, last = (Checkpointer(tmp_path / name, save_interval_steps=1) for name in ("c", "latest"))
    first.save(1, state_at(1))
    threading.Timer(0.3, may_end.set).start()
    last.save(2, state_at(2))
    last.close()
    assert first.save(3, state_at(3))
    first.close()
    assert first.steps() == [1, 2, 3]
