"""Arrays and position together: captured at once, committed together, intact or refused."""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import pathlib
import re
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_feeds import CountingFeed
from checkpoint_trees import abstract, assert_same, make_mesh, mixed_tree, place
from jax.sharding import NamedSharding, PartitionSpec

from meshfeed import Feed
from meshfeed._src.base.errors import CheckpointError, CorruptDataError, SettingsError, StateMismatchError
from meshfeed._src.checkpoint.handlers import ArraysHandler
from meshfeed._src.checkpoint.step import find_steps, verify
from meshfeed.checkpoint import Checkpointer
from meshfeed.sources import HostBatches


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(4, 2)


@pytest.fixture(scope="module")
def tree(mesh):
    return mixed_tree(mesh, rows=64)


def small_state(mesh, value: float):
    return {"w": place(np.full((64, 8), value, np.float32), mesh, "data"), "step": int(value), "n": np.full(3, value)}


def save_steps(directory, mesh, steps, **settings):
    feed = CountingFeed()
    with Checkpointer(directory, save_interval_steps=1, **settings) as ckpt:
        for step in range(1, steps + 1):
            next(feed)
            assert ckpt.save(step, small_state(mesh, step), feed)


@pytest.mark.parametrize("restore", ["once", "single_replica", "every_host"])
def test_every_leaf_comes_back_to_the_bit(tmp_path, mesh, tree, restore):
    feed = CountingFeed()
    next(feed)
    with Checkpointer(tmp_path / "c", save_interval_steps=1, restore=restore) as ckpt:
        assert ckpt.save(5, tree, feed)
        ckpt.wait()
        for wanted in (tree, abstract(tree)):
            other = CountingFeed()
            step, restored = ckpt.restore(wanted, other)
            assert (step, other.position) == (5, 4)
            assert_same(tree, restored)
    with Checkpointer(tmp_path / "c") as ckpt:
        assert_same(tree, ckpt.restore(None)[1])


class Name(str, enum.Enum):  # noqa: UP042  # a StrEnum's text is its value
    LEFT = "left"


class Number(int, enum.Enum):
    ONE = 1


def test_members_of_enums_as_keys(tmp_path):
    """They are named in storage by their text, ``Name.LEFT``, and come back as the plain keys that they equal."""
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, {Name.LEFT: {Number.ONE: np.arange(3), 2: 5}, "other": {True: 2.5}})
        ckpt.wait()
        restored = ckpt.restore(None)[1]
        assert_same({"left": {1: np.arange(3), 2: 5}, "other": {True: 2.5}}, restored)
        assert [type(key) for part in (restored, restored["left"], restored["other"]) for key in part] == [
            *(str, str),
            *(int, int),
            bool,
        ]
        assert_same(restored, ckpt.restore(ckpt.metadata().train_state)[1])
        again = ckpt.restore({Name.LEFT: {Number.ONE: np.zeros(3, int), 2: 0}, "other": {True: 0.0}})[1]
        np.testing.assert_array_equal(again[Name.LEFT][Number.ONE], np.arange(3))


def test_another_mesh_and_other_shardings(tmp_path, mesh):
    values = np.arange(64 * 96, dtype=np.float32).reshape(64, 96)
    state = {"a": place(values, mesh, "data"), "b": place(values, mesh, None, "model"), "c": place(values, mesh)}
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        for shape, specs in (((2, 4), ("model", "data")), ((8, 1), (None, "data")), ((2, 2, 2), ("expert", "data"))):
            other = make_mesh(*shape)
            wanted = {
                "a": place(values * 0, other, *specs),
                "b": place(values * 0, other, (*other.axis_names,)),
                "c": place(values * 0, other, None, specs[1]),
            }
            restored = ckpt.restore(abstract(wanted))[1]
            for name, leaf in restored.items():
                assert leaf.sharding == wanted[name].sharding
                np.testing.assert_array_equal(np.asarray(leaf), values)


def test_everything_is_captured_before_save_returns(tmp_path, mesh):
    update = jax.jit(lambda w: w * 0 - 1, donate_argnums=0)
    feed = CountingFeed()
    next(feed)
    state = {
        "sharded": place(np.full((512, 64), 3, np.float32), mesh, "data"),
        "replicated": place(np.full((512, 512), 4, np.float32), mesh),
        "host": np.full(1000, 5),
    }
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, state, feed)
        donated = [update(state["sharded"]), update(state["replicated"])]
        state["host"][:] = -1
        next(feed)
        jax.block_until_ready(donated)
        ckpt.wait()
        wanted = {
            "sharded": jax.ShapeDtypeStruct((512, 64), np.float32, sharding=donated[0].sharding),
            "replicated": jax.ShapeDtypeStruct((512, 512), np.float32, sharding=donated[1].sharding),
            "host": state["host"],
        }
        other = CountingFeed()
        _, restored = ckpt.restore(wanted, other)
    assert other.position == 4
    assert (np.asarray(restored["sharded"]) == 3).all()
    assert (np.asarray(restored["replicated"]) == 4).all()
    assert (restored["host"] == 5).all()


def test_restored_arrays_may_be_donated(tmp_path, mesh):
    save_steps(tmp_path / "c", mesh, 1)
    state = {"w": place(np.zeros((64, 8), np.float32), mesh), "step": 0, "n": np.zeros(3)}  # replicated this time
    with Checkpointer(tmp_path / "c") as ckpt:
        restored = ckpt.restore(state)[1]
    result = jax.jit(lambda w: w + jnp.arange(8), donate_argnums=0)(restored["w"])
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.tile(1 + np.arange(8, dtype=np.float32), (64, 1)))


def test_arrays_that_are_bound_to_no_device_come_back_so(tmp_path, mesh):
    tree = {
        "w": place(np.ones((8, 8), np.float32), mesh, "data"),
        "first": jax.device_put(jnp.ones(3), jax.devices()[0]),
    }
    tree |= {
        "count": jnp.zeros((), jnp.int32),
        "keys": jax.random.split(jax.random.key(0), 2),
        "int4": jnp.ones(3, jnp.int4),
    }
    with jax.default_device(jax.devices()[2]):
        tree["elsewhere"] = jnp.arange(3)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree)
        _, restored = ckpt.restore(tree)
    assert_same(tree, restored)
    assert {name: leaf.committed for name, leaf in restored.items()} == {name: name in ("w", "first") for name in tree}
    assert jax.jit(lambda w, count: w + count)(restored["w"], restored["count"]).sharding == tree["w"].sharding


def test_interval_force_and_steps(tmp_path, mesh):
    feed = CountingFeed()
    with Checkpointer(tmp_path / "c", save_interval_steps=10, max_to_keep=2) as ckpt:
        saved = [step for step in range(41) if ckpt.save(step, small_state(mesh, step), feed)]
        assert saved == [0, 10, 20, 30, 40]
        assert ckpt.save(43, small_state(mesh, 43), feed, force=True)
        ckpt.wait()
        assert ckpt.steps() == [40, 43]
        assert ckpt.restore(small_state(mesh, 0), feed, step=40)[1]["step"] == 40
        with pytest.raises(CheckpointError, match="already"):
            ckpt.save(43, small_state(mesh, 43), feed, force=True)


def test_an_empty_folder_gives_back_what_was_given(tmp_path, mesh):
    state, feed = small_state(mesh, 1), CountingFeed()
    with Checkpointer(tmp_path / "c") as ckpt:
        step, same = ckpt.restore(state, feed)
        assert step == 0
        assert same is state
        with pytest.raises(CheckpointError, match="step 7 is not in"):
            ckpt.restore(state, feed, step=7)


def test_the_feed_may_be_left_out(tmp_path, mesh):
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, small_state(mesh, 1))
        ckpt.wait()
        assert ckpt.restore(small_state(mesh, 0))[0] == 1
        feed = CountingFeed()
        with pytest.raises(CheckpointError, match="saved without a feed"):
            ckpt.restore(small_state(mesh, 0), feed)
        assert feed.position == 0
    save_steps(tmp_path / "d", mesh, 1)
    with Checkpointer(tmp_path / "d") as ckpt:
        assert ckpt.restore(small_state(mesh, 0))[0] == 1


def test_flipped_bits_are_never_silent(tmp_path, mesh, caplog):
    save_steps(tmp_path / "whole", mesh, 2)
    files = sorted(path for path in (tmp_path / "whole/2").rglob("*") if path.is_file() and path.stat().st_size)
    rng = np.random.default_rng(3)
    passed_over = 0
    with Checkpointer(tmp_path / "c") as ckpt:
        for number in range(40):
            shutil.rmtree(tmp_path / "c/1", ignore_errors=True)
            shutil.rmtree(tmp_path / "c/2", ignore_errors=True)
            shutil.copytree(tmp_path / "whole", tmp_path / "c", dirs_exist_ok=True)
            chosen = files[number % len(files)].relative_to(tmp_path / "whole")
            flip_bit(tmp_path / "c" / chosen, rng)
            caplog.clear()
            feed = CountingFeed()
            with caplog.at_level(logging.WARNING, "meshfeed"):
                step, restored = ckpt.restore(small_state(mesh, 0), feed)
            assert_same(small_state(mesh, step), restored)
            assert feed.position == 4 * step
            if step == 1:
                passed_over += 1
                assert "step 2" in caplog.text
                with pytest.raises(CheckpointError):
                    ckpt.restore(small_state(mesh, 0), feed, step=2)
    assert passed_over > 5  # many files are Orbax's own copies, which a restore does not read


def flip_bit(path: pathlib.Path, rng: np.random.Generator) -> None:
    data = bytearray(path.read_bytes())
    bit = int(rng.integers(len(data) * 8))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


def test_damage_is_a_checkpoint_error_and_corrupt_data(tmp_path, mesh):
    save_steps(tmp_path / "c", mesh, 1)
    data = max((tmp_path / "c/1/arrays").rglob("d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-20])
    feed = CountingFeed()
    next(feed)
    with Checkpointer(tmp_path / "c") as ckpt:
        with pytest.raises(CorruptDataError) as caught:
            ckpt.restore(small_state(mesh, 0), feed, step=1)
        assert isinstance(caught.value, CheckpointError)
        assert caught.value.step == 1
        with pytest.raises(CheckpointError, match=r"none of its steps is intact. Move the .* over\.\n  step 1: "):
            ckpt.restore(small_state(mesh, 0), feed)
    assert feed.position == 4


def test_a_restore_without_steps_is_logged(tmp_path, mesh, caplog):
    with Checkpointer(tmp_path / "c") as ckpt, caplog.at_level("INFO", "meshfeed.checkpoint"):
        assert ckpt.restore(small_state(mesh, 0))[0] == 0
    assert [record.getMessage() for record in caplog.records if record.name == "meshfeed.checkpoint"] == [
        f"no checkpoint in {tmp_path}/c: starting at step 0"
    ]


@pytest.mark.parametrize("name", ["run-2", "."])
def test_a_folder_without_steps_near_others_is_pointed_out(tmp_path, mesh, caplog, name):
    """Whether its name was mistyped, or it is the one above."""
    for other in ("run-1", "zebra"):
        save_steps(tmp_path / "runs" / other, mesh, 1)
    (tmp_path / "runs/empty").mkdir()
    (tmp_path / "runs/other/7").mkdir(parents=True)  # a number, but no step
    with Checkpointer(tmp_path / "runs" / name) as ckpt, caplog.at_level("WARNING", "meshfeed.checkpoint"):
        assert ckpt.restore(small_state(mesh, 0))[0] == 0
        (warning,) = [record.getMessage() for record in caplog.records if record.name == "meshfeed.checkpoint"]
    assert set(re.findall(r"runs/([\w-]+)", warning)) == {"run-1", "zebra"} | ({name} - {"."})
    assert warning.endswith("If this run is to continue one of them, stop it and pass that folder.")
    if name == "run-2":
        assert warning.index("run-1") < warning.index("zebra")


def test_a_feed_that_cannot_resume_warns_at_the_first_save(tmp_path, mesh, caplog):
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    batches = [np.full((8, 2), step, np.float32) for step in range(4)]

    def warnings():
        return [record.getMessage() for record in caplog.records if "no run can continue" in record.getMessage()]

    for source, kind in (
        (iter(batches), "list_iterator"),
        ((batch for batch in batches), "generator"),
        (batches, None),
    ):
        caplog.clear()
        with Feed(HostBatches(source), sharding) as feed, Checkpointer(tmp_path / str(kind)) as ckpt:
            for step in (1, 2, 3):
                next(feed)
                ckpt.save(step, {"n": step}, feed)  # the interval skips it
                assert len(warnings()) == (kind is not None)
            if kind is None:
                assert feed.cannot_resume is None
                continue
            assert warnings()[0].startswith("step 1: no run can continue from the position that is saved with it: ")
            assert f"the batches come from a {kind}, which can be read only once. Pass an iterable" in warnings()[0]
    with Checkpointer(tmp_path / "generator") as ckpt, Feed(HostBatches(iter(batches)), sharding) as feed:
        with pytest.raises(StateMismatchError, match="read once"):
            ckpt.restore({"n": 0}, feed)
        assert ckpt.restore({"n": 0})[0] == 3  # as the warning says


def test_parts_of_different_steps_are_never_restored_together(tmp_path, mesh):
    for part in ("arrays", "iterator"):
        directory = tmp_path / part
        save_steps(directory, mesh, 3)
        shutil.rmtree(directory / "3" / part)
        shutil.copytree(directory / "2" / part, directory / "3" / part)
        feed = CountingFeed()
        with Checkpointer(directory) as ckpt:
            with pytest.raises(CheckpointError, match="3"):
                ckpt.restore(small_state(mesh, 0), feed, step=3)
            step, restored = ckpt.restore(small_state(mesh, 0), feed)
        assert (step, restored["step"], feed.position) == (2, 2, 8)


def test_a_missing_part_or_a_renamed_step_is_refused(tmp_path, mesh):
    save_steps(tmp_path / "c", mesh, 2)
    shutil.rmtree(tmp_path / "c/2/iterator")
    shutil.copytree(tmp_path / "c/1", tmp_path / "c/9")
    feed = CountingFeed()
    with Checkpointer(tmp_path / "c") as ckpt:
        assert ckpt.restore(small_state(mesh, 0), feed)[0] == 1
        with pytest.raises(CheckpointError, match="saved as step 1"):
            ckpt.restore(small_state(mesh, 0), feed, step=9)


def test_saving_goes_on_after_a_damaged_step_was_passed_over(tmp_path, mesh):
    save_steps(tmp_path / "c", mesh, 3)
    (tmp_path / "c/3/iterator/state.json").write_text("{}")
    feed = CountingFeed()
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        step, state = ckpt.restore(small_state(mesh, 0), feed)
        assert step == 2
        next(feed)
        assert ckpt.save(3, {**state, "step": 33}, feed)
        ckpt.wait()
        other = CountingFeed()
        step, state = ckpt.restore(small_state(mesh, 0), other)
        assert (step, state["step"], other.position) == (3, 33, 12)


def test_a_feed_that_cannot_continue_is_as_it_was(tmp_path, mesh):
    save_steps(tmp_path / "c", mesh, 1)
    feed = CountingFeed(records=5)
    with Checkpointer(tmp_path / "c") as ckpt, pytest.raises(StateMismatchError) as error:
        ckpt.restore(small_state(mesh, 0), feed)
    assert feed.position == 0
    assert any(f"in restoring {tmp_path / 'c' / '1'}: a new run" in note for note in error.value.__notes__)


def test_metadata_restores_without_an_abstract_tree(tmp_path, mesh, tree):
    feed = CountingFeed()
    next(feed)
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(8, tree, feed)
        ckpt.wait()
        found = ckpt.metadata(8)
        assert (found.step, found.feed_step, found.position) == (8, 1, 4)
        assert found.train_state["big"].shape == tree["big"].shape
        assert found.train_state["key"].dtype == tree["key"].dtype
        assert found.train_state["big"].sharding.is_equivalent_to(tree["big"].sharding, 2)
        assert_same(tree, ckpt.restore(found.train_state, feed)[1], shardings=False)
        with pytest.raises(CheckpointError):
            ckpt.metadata(9)


def test_trees_that_differ_are_named(tmp_path, mesh):
    save_steps(tmp_path / "c", mesh, 1)
    state = small_state(mesh, 0)
    with Checkpointer(tmp_path / "c") as ckpt:
        with pytest.raises(CheckpointError, match="'extra'"):
            ckpt.restore({**state, "extra": state["w"]})
        with pytest.raises(CheckpointError, match="has an extra leaf 'w'"):
            ckpt.restore({"step": 0, "n": np.zeros(3)})
        with pytest.raises(CheckpointError, match=r"\(64, 8\).*\(64, 9\)"):
            ckpt.restore({**state, "w": jax.ShapeDtypeStruct((64, 9), np.float32, sharding=state["w"].sharding)})


def test_casts_on_restore(tmp_path, mesh):
    values = np.linspace(-3, 3, 512, dtype=np.float32).reshape(64, 8)
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, {"w": place(values, mesh, "data"), "n": np.arange(4), "number": 2})
        ckpt.wait()
        wanted = {"w": place(values.astype(jnp.bfloat16), mesh), "n": np.zeros(4, np.float32), "number": Number.ONE}
        with pytest.raises(CheckpointError, match=r"leaf 'number' is 2.* not a valid Number\. Request int") as refused:
            ckpt.restore(wanted)
        assert refused.value.step == 1
        restored = ckpt.restore({**abstract(wanted), "number": 0})[1]
    assert_same(wanted["w"], restored["w"])
    assert restored["n"].dtype == np.float32


def test_plain_orbax_reads_it(tmp_path, mesh):
    save_steps(tmp_path / "c", mesh, 1)
    wanted = abstract(small_state(mesh, 0))
    args = ocp.checkpoint_utils.construct_restore_args(wanted)
    restored = ocp.PyTreeCheckpointer().restore(
        tmp_path / "c/1/arrays", args=ocp.args.PyTreeRestore(wanted, restore_args=args)
    )
    assert_same(small_state(mesh, 1)["w"], restored["w"])
    assert restored["step"] == 1


def test_leaves_that_cannot_be_saved_are_named(tmp_path, mesh):
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        with pytest.raises(CheckpointError, match="'fn'"):
            ckpt.save(1, {"fn": print, "w": small_state(mesh, 1)["w"]})
        assert ckpt.save(1, small_state(mesh, 1))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("restore", "twice"), ("max_to_keep", 0), ("save_interval_steps", 1.5), ("memory_limit_bytes", -1), ("verify", 3)],
)
def test_wrong_settings_are_named(tmp_path, setting, value):
    with pytest.raises(SettingsError, match=setting):
        Checkpointer(tmp_path, **{setting: value})


def test_the_first_save_makes_a_folder_that_is_not_there(tmp_path, mesh):
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        assert ckpt.restore(small_state(mesh, 0))[0] == 0
        (tmp_path / "c").rmdir()  # as in an object store, which has no folder before its first file
        assert ckpt.save(1, small_state(mesh, 1))
        ckpt.wait()
        assert ckpt.steps() == [1]


def test_readers_leave_unfinished_steps_alone_and_writers_remove_them(tmp_path, mesh):
    save_steps(tmp_path / "c", mesh, 1)
    unfinished = tmp_path / "c/2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        assert ckpt.restore(small_state(mesh, 0))[0] == 1
        assert unfinished.exists()
        assert ckpt.save(2, small_state(mesh, 2))
        ckpt.wait()
        assert not unfinished.exists()
        assert ckpt.steps() == [1, 2]


class StartedFeed(CountingFeed):
    """A feed that can be started; records what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def set_state(self, state):
        super().set_state(state)
        self.calls.append(f"set_state to {self.position}")

    def start(self):
        self.calls.append("start")


@pytest.fixture
def restored_late(monkeypatch):
    """Calls that are made before arrays are restored."""
    found = []
    restore_with = ArraysHandler.restore_with

    def restore(self, *args, **kwargs):
        for call in found:
            call()
        return restore_with(self, *args, **kwargs)

    monkeypatch.setattr(ArraysHandler, "restore_with", restore)
    return found


def test_the_feed_reads_ahead_while_the_arrays_are_read(tmp_path, mesh, restored_late):
    import meshfeed

    read = threading.Event()

    class Source(meshfeed.sources.Memory):
        def read_batch(self, record_ids, columns=None):
            if feed.step == 3:
                read.set()
            return super().read_batch(record_ids, columns=columns)

    with meshfeed.Feed(Source({"x": np.arange(64)}), mesh, global_batch_size=8) as feed:
        feed.start()
        for _ in range(3):
            next(feed)
        with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
            ckpt.save(3, small_state(mesh, 3), feed)
    with (
        meshfeed.Feed(Source({"x": np.arange(64)}), mesh, global_batch_size=8) as feed,
        Checkpointer(tmp_path / "c") as ckpt,
    ):
        read.clear()
        restored_late.append(lambda: read.wait(60) or pytest.fail("the feed waits for the arrays"))
        assert ckpt.restore(small_state(mesh, 0), feed)[0] == 3
        feed.reset()  # a caller may still change its mind
        feed.start()
        assert np.asarray(next(feed)["x"]).tolist() == list(range(8))


def test_a_feed_is_set_and_started_before_the_arrays_and_set_back_if_they_fail(tmp_path, mesh, restored_late):
    save_steps(tmp_path / "c", mesh, 3)
    feed = StartedFeed()
    next(feed)
    with Checkpointer(tmp_path / "c") as ckpt:
        ckpt.restore(small_state(mesh, 0), feed)
        assert feed.calls == ["set_state to 12", "start"]
        feed = StartedFeed()
        next(feed)
        with pytest.raises(CheckpointError, match="'extra'"):
            ckpt.restore({**small_state(mesh, 0), "extra": small_state(mesh, 0)["w"]}, feed)
        assert feed.calls == ["set_state to 12", "start", "set_state to 4"]
        feed = StartedFeed()

        def interrupt():
            raise KeyboardInterrupt

        restored_late.append(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ckpt.restore(small_state(mesh, 0), feed)
        assert feed.calls[-1] == "set_state to 0"


def test_without_a_checkpoint_the_feed_is_started(tmp_path, mesh):
    feed = StartedFeed()
    with Checkpointer(tmp_path / "c") as ckpt:
        assert ckpt.restore(small_state(mesh, 0), feed)[0] == 0
    assert feed.calls == ["start"]


def test_a_second_checkpointer_of_a_folder_waits_for_the_save_of_the_first(tmp_path, mesh):
    """As when a cell of a notebook is run again: the second one took the unfinished step for rubbish, and removed it."""
    state = {
        "w": jax.device_put(np.random.default_rng(0).normal(size=(2000, 500)), NamedSharding(mesh, PartitionSpec()))
    }
    first = Checkpointer(tmp_path / "run", save_interval_steps=1)
    assert first.save(1, state)
    with Checkpointer(tmp_path / "run", save_interval_steps=1) as second:
        assert second.save(2, state)
        assert not second.save(1, state)
    assert find_steps(tmp_path / "run") == [1, 2]
    assert all(finding.intact for finding in verify(tmp_path / "run"))
    first.close()


def test_files_of_users_and_groups_without_a_name(tmp_path, monkeypatch):
    """As in a container that runs under a number, or on a file system of other machines."""

    def unknown(number):
        raise KeyError(f"uid or gid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("grp.getgrgid", unknown)
    state = {"x": np.arange(3)}
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        assert ckpt.restore(state)[0] == 1
    assert verify(tmp_path / "c", 1)[0].intact


@pytest.mark.parametrize("directory", ["folder", "memory://interrupted/c"])
def test_ctrl_c_while_arrays_are_captured_is_a_keyboard_interrupt(tmp_path, monkeypatch, directory):
    plain = ArraysHandler._async_save

    async def interrupted(self, *arguments):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(1)
        return await plain(self, *arguments)

    with Checkpointer(directory if "://" in directory else tmp_path / directory, save_interval_steps=1) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(ArraysHandler, "_async_save", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(1, {"x": np.arange(3)})
        assert ckpt.save(2, {"x": np.arange(3)})
        ckpt.wait()


def test_a_feed_that_was_left_out_of_a_restore_is_noticed_at_the_next_save(tmp_path, caplog):
    state = {"w": np.arange(4)}
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        feed = CountingFeed()
        for step in (1, 2, 3):
            next(feed)
            ckpt.save(step, state, feed)
    for with_feed, warns in ((True, False), (False, True)):
        with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
            feed = CountingFeed()
            step, _ = ckpt.restore(state, feed if with_feed else None)
            for _ in range(2):
                next(feed)
                step += 1
                ckpt.save(step, state, feed)
        said = [record.getMessage() for record in caplog.records if "restored without the feed" in record.getMessage()]
        assert len(said) == warns
    assert (
        "5 was restored without the feed, so the feed did not continue at its position, 20 records; it is at 4"
        in said[0]
    )
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:  # an evaluation saves no feed
        ckpt.restore(state)
    assert caplog.text.count("restored without the feed") == 1
