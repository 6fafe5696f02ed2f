"""Which steps are kept, and saves that are interrupted, repeated, or of older steps."""

from __future__ import annotations

import datetime
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_feeds import CountingFeed

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.checkpoint import array_handler, checkpointer
from meshfeed.checkpoint import Checkpointer


def state_at(step: int):
    return {"w": jnp.full(8, step), "step": step}


def save(ckpt: Checkpointer, *steps: int, force: bool = False) -> list[int]:
    for step in steps:
        assert ckpt.save(step, state_at(step), force=force)
        ckpt.wait()
    return ckpt.steps()


@pytest.mark.parametrize(("keep", "kept", "later"), [(1, [15, 30], [31]), (2, [15, 20, 30], [30, 31])])
def test_a_forced_save_of_an_older_step_removes_no_newer_one(tmp_path, keep, kept, later):
    with Checkpointer(tmp_path, max_to_keep=keep, save_interval_steps=1) as ckpt:
        save(ckpt, 20, 30)
        assert save(ckpt, 15, force=True) == kept
        assert ckpt.restore(None)[0] == 30
        assert ckpt.restore(None, step=15)[1]["step"] == 15
        assert not ckpt.save(16, state_at(16))  # as before: a newer step exists
        assert save(ckpt, 31) == later


def test_older_steps_in_a_new_process_and_with_periods(tmp_path):
    with Checkpointer(tmp_path, max_to_keep=1, orbax_options={"keep_period": 10}) as ckpt:
        assert save(ckpt, 10, 14, force=True) == [10, 14]
    with Checkpointer(tmp_path, max_to_keep=1, orbax_options={"keep_period": 10}) as ckpt:
        assert save(ckpt, 7, force=True) == [7, 10, 14]
        assert save(ckpt, 16, force=True) == [10, 16]
    with Checkpointer(
        tmp_path / "time", max_to_keep=1, orbax_options={"keep_time_interval": datetime.timedelta(days=1)}
    ) as ckpt:
        assert save(ckpt, 1, 2, 3, force=True) == [1, 3]
    with Checkpointer(tmp_path / "all", max_to_keep=None) as ckpt:
        assert save(ckpt, 3, 1, 2, force=True) == [1, 2, 3]


@pytest.mark.parametrize("where", ["state", "arrays"])
def test_an_interrupted_save_leaves_the_step_before_and_the_next_save_works(tmp_path, monkeypatch, where):
    class Interrupted(CountingFeed):
        def get_state(self):
            raise KeyboardInterrupt

    def interrupt(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    with Checkpointer(tmp_path, save_interval_steps=1) as ckpt:
        save(ckpt, 1)
        with monkeypatch.context() as patch:
            if where == "arrays":
                patch.setattr(array_handler, "plan_write", interrupt)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(2, state_at(2), Interrupted() if where == "state" else CountingFeed())
        assert ckpt.steps() == [1]
        assert save(ckpt, 2) == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_save_that_fails_leaves_nothing_behind_in_one_process(tmp_path, monkeypatch):
    def fail(*args: object, **settings: object) -> None:
        raise ZeroDivisionError

    with Checkpointer(tmp_path, save_interval_steps=1) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(array_handler, "plan_write", fail)
            with pytest.raises(ZeroDivisionError):
                ckpt.save(1, state_at(1))
        assert save(ckpt, 1) == [1]
        with pytest.raises(CheckpointError, match="step 1 already exists"):
            ckpt.save(1, state_at(1), force=True)
        assert save(ckpt, 2) == [1, 2]
        ckpt.close()
        ckpt.close()


def test_a_save_with_what_is_donated_next(tmp_path):
    update = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state = {"w": jnp.arange(1 << 16, dtype=jnp.float32)}
    with Checkpointer(tmp_path, max_to_keep=None, save_interval_steps=1) as ckpt:
        for step in range(4):
            ckpt.save(step, state)
            state = update(state)
        ckpt.wait()
        for step in range(4):
            found = ckpt.restore(None, step=step)[1]["w"]
            np.testing.assert_array_equal(found, np.arange(1 << 16, dtype=np.float32) + step)


def test_a_save_inside_jit_is_refused(tmp_path):
    with Checkpointer(tmp_path, save_interval_steps=1) as ckpt:

        def step(w: jax.Array) -> jax.Array:
            ckpt.save(1, {"w": w})
            return w

        with pytest.raises(CheckpointError, match=r"outside jax\.jit"):
            jax.jit(step)(jnp.ones(3))
        assert save(ckpt, 1) == [1]


def test_a_step_that_was_removed_by_hand_may_be_saved_again(tmp_path):
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        save(ckpt, 1, 2)
        with pytest.raises(CheckpointError, match=r"step 2 already exists in .* or remove it first"):
            save(ckpt, 2, force=True)
        shutil.rmtree(tmp_path / "c/2")
        assert save(ckpt, 2, force=True) == [1, 2]


@pytest.mark.parametrize("gone", ["", "iterator", "arrays", "arrays/meshfeed"])
def test_a_step_that_another_job_removes_while_it_is_restored_is_passed_over(tmp_path, monkeypatch, gone):
    feed = CountingFeed()
    with Checkpointer(tmp_path, save_interval_steps=1) as ckpt:
        for step in (1, 2):
            next(feed)
            ckpt.save(step, state_at(step), feed)

    def look(*args):
        found = newest_readable(*args)
        shutil.rmtree(tmp_path / "2" / gone, ignore_errors=True)  # as its last look found it intact
        return found

    newest_readable = checkpointer.newest_readable
    monkeypatch.setattr(checkpointer, "newest_readable", look)
    with Checkpointer(tmp_path) as ckpt:
        step, restored = ckpt.restore(None, feed)
    assert (step, restored["step"], feed.position) == (1, 1, 4)


def test_a_step_asked_for_that_another_job_removes_meanwhile_is_not_said_to_lack_a_feed(tmp_path, monkeypatch):
    feed = CountingFeed()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state_at(1), feed)

    def read(*args):
        found = read_step(*args)
        shutil.rmtree(tmp_path / "1")
        return found

    read_step = checkpointer.read_step
    monkeypatch.setattr(checkpointer, "read_step", read)
    with (
        Checkpointer(tmp_path) as ckpt,
        pytest.raises(CheckpointError, match=r"step 1 is not in .*its steps are: none"),
    ):
        ckpt.restore(None, feed, step=1)
