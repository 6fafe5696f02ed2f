"""What goes wrong in the background of a save, meshes with explicit axes, and the progress bar."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import shutil
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_feeds import CountingFeed
from checkpoint_trees import abstract, assert_same, make_mesh, place
from etils import epath
from jax.sharding import AxisType, PartitionSpec

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.checkpoint import array_handler, at_exit, directory, handlers, report, stored
from meshfeed.checkpoint import Checkpointer, restore_once


@pytest.mark.parametrize("part", ["arrays-0", "tree", "manifest"])
def test_a_save_that_fails_leaves_the_step_before(tmp_path, monkeypatch, part):
    mesh, feed = make_mesh(4, 2), CountingFeed()
    state = {"w": place(np.ones((64, 8), np.float32), mesh, "data")}
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        next(feed)
        ckpt.save(1, state, feed)
        ckpt.wait()

        write = stored.write_part

        def fail(item, name, digests, **content):
            if name == part:
                raise OSError(28, "No space left on device")
            write(item, name, digests, **content)

        with monkeypatch.context() as patch:
            for module in (array_handler, handlers, stored):
                patch.setattr(module, "write_part", fail)
            for report in (ckpt.wait, lambda: ckpt.save(3, state, feed)):
                ckpt.save(2, state, feed)
                with pytest.raises(CheckpointError, match=r"saving step 2 failed: .*No space left") as failed:
                    report()
                assert failed.value.step == 2
        assert ckpt.steps() == [1]
        assert ckpt.restore(state, feed)[0] == 1
        assert ckpt.save(3, state, feed)
        ckpt.wait()
        # nothing of step 2 is left
        assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".writer.json", "1", "3"]


@pytest.mark.timeout(60)
def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path, monkeypatch):
    """It was made read-only, or a quota is used up: Orbax's parts wait minutes for the folder of the step."""
    state, path_type = {"w": np.ones(8), "x": jnp.ones(8)}, type(epath.Path(tmp_path))
    make = path_type.mkdir

    def fail(self, *args, **kwargs):
        if "orbax-checkpoint-tmp" in str(self):
            raise OSError(30, "Read-only file system", str(self))
        return make(self, *args, **kwargs)

    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        with monkeypatch.context() as patch:
            patch.setattr(path_type, "mkdir", fail)
            # Orbax's threads wait for the folder for 300 s, also when the interpreter exits.
            patch.setattr("orbax.checkpoint._src.multihost.multihost.coordination_timeout", lambda: 3)
            ckpt.save(2, state)
            with pytest.raises(CheckpointError, match=r"saving step 2 failed: .*Read-only file system"):
                ckpt.wait()
        ckpt.save(3, state)
        ckpt.wait()
        assert ckpt.steps() == [1, 3]


@pytest.mark.parametrize("method", ["mkdir", "write_bytes"])
def test_a_folder_in_which_nothing_can_be_created_is_an_error_of_the_save(tmp_path, monkeypatch, method):
    """Not of Orbax, which would let the other hosts wait for host 0. A full disk may have room for an empty file."""
    state, path_type = {"w": np.ones(8)}, type(epath.Path(tmp_path))

    def fail(self, *args, **kwargs):
        raise OSError(28, "No space left on device", str(self))

    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        with monkeypatch.context() as patch:
            patch.setattr(path_type, method, fail)
            with pytest.raises(CheckpointError, match=r"nothing can be created there: .*No space left"):
                ckpt.save(2, state)
        ckpt.save(3, state)
        ckpt.wait()
        assert ckpt.steps() == [1, 3]
        assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".writer.json", "1", "3"]


def test_a_step_that_is_saved_is_no_error_though_an_older_one_is_not_removed(tmp_path, monkeypatch, caplog):
    """Such as on NFS, where a file that somebody reads keeps its folder."""
    rmtree, state = shutil.rmtree, {"w": np.arange(8)}

    def fail(path, *args, **kwargs):
        if pathlib.Path(path) == tmp_path / "c/1":
            raise OSError(39, "Directory not empty", str(path))
        rmtree(path, *args, **kwargs)

    with Checkpointer(tmp_path / "c", save_interval_steps=1, max_to_keep=1) as ckpt:
        ckpt.save(1, state)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", fail)
            ckpt.save(2, state)
            ckpt.wait()
        assert "step 2 is saved in" in caplog.text
        assert "an older step is not removed: [Errno 39] Directory not empty" in caplog.text
        assert ckpt.steps() == [1, 2]
        assert ckpt.restore(state)[0] == 2
        assert ckpt.save(3, state)
        ckpt.wait()
        assert ckpt.steps() == [3]


@pytest.mark.parametrize("committed", [False, True])
def test_the_interval_goes_on_after_an_error_in_the_background(tmp_path, monkeypatch, committed):
    """Only one host may see it: it would take the folder for empty, and save a step that the others skip."""
    rmtree, state = shutil.rmtree, {"w": np.arange(8)}

    def fail(path, *args, **kwargs):
        if not committed or pathlib.Path(path) == tmp_path / "c/10":
            raise OSError(39, "Directory not empty", str(path))
        rmtree(path, *args, **kwargs)

    with Checkpointer(tmp_path / "c", save_interval_steps=10, max_to_keep=1) as ckpt:
        ckpt.save(10, state)
        ckpt.wait()
        with monkeypatch.context() as patch:
            patch.setattr(*((shutil, "rmtree") if committed else (handlers, "join_parts")), fail)
            ckpt.save(20, state)
            with contextlib.nullcontext() if committed else pytest.raises(CheckpointError, match="step 20 failed"):
                ckpt.wait()
        assert ckpt.steps() == ([10, 20] if committed else [10])
        assert not ckpt.save(21, state)
        assert ckpt.save(30, state)
        ckpt.wait()
        assert ckpt.steps() == [30]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("then", ["save", "restore"])
def test_a_save_that_an_interrupt_leaves_half_begun_ends_before_the_next(tmp_path, monkeypatch, then, late):
    """Such as SIGTERM, after which a program saves once more: the folder must not be removed while it is written."""
    state, start, interrupts = {"w": np.arange(8)}, threading.Thread.start, [KeyboardInterrupt()]
    write, path_type = stored.write_part, type(epath.Path(tmp_path))
    mkdir = path_type.mkdir

    def make_late(self, *args, **kwargs):
        if self.name.startswith("1.orbax-checkpoint-tmp"):
            time.sleep(1.0)
        mkdir(self, *args, **kwargs)

    if late:  # Orbax makes the folder in the background
        monkeypatch.setattr(path_type, "mkdir", make_late)

    def interrupted(self):
        if self.name == "save_finalize" and interrupts:
            raise interrupts.pop()
        start(self)

    def slow(item, name, digests, **content):
        time.sleep(0.3)
        write(item, name, digests, **content)

    for module in (array_handler, handlers, stored):
        monkeypatch.setattr(module, "write_part", slow)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, state)
        if then == "restore":
            assert ckpt.restore(state)[0] == 1  # it had all its parts
        ckpt.save(2, state)
        ckpt.wait()
        for step in ckpt.steps():
            assert_same(state, ckpt.restore(state, step=step)[1])
        assert ckpt.steps()[-1] == 2


def test_a_failed_save_is_reported_once(tmp_path, monkeypatch):
    """Orbax has an error of its metadata and one of the arrays if the disk is full, and raises the second one later."""
    state, path_type = {"w": np.ones(8)}, type(epath.Path(tmp_path))
    write_text = path_type.write_text

    def fail(self, *args, **kwargs):
        if self.name == "_CHECKPOINT_METADATA":
            raise OSError(28, "No space left on device")
        return write_text(self, *args, **kwargs)

    def fail_part(item, name, digests, **content):
        raise OSError(28, "No space left on device")

    for again in (True, False):
        with Checkpointer(tmp_path / str(again), save_interval_steps=1) as ckpt:
            ckpt.save(1, state)
            ckpt.wait()
            with monkeypatch.context() as patch:
                for module in (array_handler, handlers, stored):
                    patch.setattr(module, "write_part", fail_part)
                patch.setattr(path_type, "write_text", fail)
                ckpt.save(2, state)
                with pytest.raises(CheckpointError, match=r"saving step 2 failed: .*No space left"):
                    ckpt.wait()
            if again:
                ckpt.save(3, state)
                ckpt.wait()
                assert ckpt.steps() == [1, 3]


@pytest.mark.parametrize(
    "error",
    [
        FileExistsError(17, "File exists"),
        FileNotFoundError(2, "No such file or directory"),
        OSError(39, "Directory not empty"),
        ValueError('NOT_FOUND: Error writing "x/0" in OCDBT database'),  # of TensorStore
        OSError(28, "No space left on device"),
    ],
    ids=lambda error: str(error)[:12],
)
def test_a_second_process_in_the_folder_is_named(tmp_path, monkeypatch, error):
    """Each of two processes without jax.distributed.initialize() takes itself for the whole job, and removes leftovers."""

    def fail(item, name, digests, **content):
        raise error

    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        with monkeypatch.context() as patch:
            for module in (array_handler, handlers, stored):
                patch.setattr(module, "write_part", fail)
            ckpt.save(1, {"x": np.arange(3)})
            with pytest.raises(CheckpointError, match="saving step 1 failed: ") as failed:
                ckpt.wait()
        named = "another process that saves here" in str(failed.value) and "initialize()" in str(failed.value)
        assert named == (getattr(error, "errno", None) != 28)


@pytest.mark.slow
def test_meshes_with_explicit_axes(tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    values = np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)
    state = {
        "a": place(values, mesh),
        "b": place(values.astype(jnp.bfloat16), mesh, None, "model"),
        "f8": place(values.astype(jnp.float8_e5m2), mesh, "data"),
        "carried": place(values.astype(jnp.float8_e4m3), mesh, "data", "model"),
        "key": jax.random.key(0),
    }
    for restore in ("once", "single_replica", "every_host"):
        with Checkpointer(tmp_path / restore, save_interval_steps=1, restore=restore) as ckpt:
            ckpt.save(1, state)
            ckpt.wait()
            assert_same(state, ckpt.restore(abstract(state))[1])


def test_templates_and_restores_under_an_explicit_mesh(tmp_path):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))

    def init(key):
        return {"w": jax.random.normal(key, (16, 4), out_sharding=PartitionSpec("d"))}

    with jax.set_mesh(mesh), Checkpointer(tmp_path) as ckpt:
        state = jax.jit(init)(jax.random.key(0))
        assert ckpt.save(1, state)
        ckpt.wait()
        template = jax.eval_shape(init, jax.random.key(0))
        for found in (ckpt.restore(template)[1], ckpt.restore(None)[1]):
            assert found["w"].sharding.mesh.axis_types == (AxisType.Explicit,)
            np.testing.assert_array_equal(np.asarray(jnp.sin(found["w"])), np.asarray(jnp.sin(state["w"])))
    with (
        Checkpointer(tmp_path) as ckpt,
        pytest.raises(CheckpointError, match=r"leaf .*'w'.*: .* Call restore within jax\.set_mesh"),
    ):
        ckpt.restore(template)


def test_a_bar_on_terminals(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    state = {"w": place(np.ones((64, 8), np.float32), make_mesh(4, 2), "data")}
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, state)
    monkeypatch.setattr(report, "_BAR_AFTER_SECONDS", -1.0)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    restore_once(tmp_path / "c/1", abstract(state))
    assert "restoring" in terminal.getvalue()
    assert "GiB/s" in terminal.getvalue()


@pytest.mark.parametrize("then", ["wait", "close", "exit", "save"])
def test_a_wait_that_is_interrupted_leaves_a_save_that_is_waited_for(tmp_path, monkeypatch, then):
    """CPython before 3.13 takes a thread for ended whose join was interrupted."""
    join_parts, go_on = handlers.join_parts, threading.Event()

    def wait_and_join(*args):
        assert go_on.wait(60)
        join_parts(*args)

    ckpt = Checkpointer(tmp_path / "c", save_interval_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(handlers, "join_parts", wait_and_join)
        ckpt.save(1, {"w": np.ones(8)})
        interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            ckpt.wait()
        interrupt.join()
        later = threading.Timer(0.3, go_on.set)
        later.start()
        {
            "wait": ckpt.wait,
            "close": ckpt.close,
            "exit": at_exit.finish_open_saves,
            "save": lambda: ckpt.save(2, {"w": np.ones(8)}),
        }[then]()
        assert go_on.is_set(), "the save had not ended"
        assert ckpt.steps()[0] == 1
        later.join()
    ckpt.close()


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file or directory"), OSError(39, "Directory not empty")]
)
def test_what_is_left_of_a_save_and_stays_is_named(tmp_path, monkeypatch, error):
    monkeypatch.setattr(directory, "_PAUSE_SECONDS", 0.0)
    left = epath.Path(tmp_path / "2.orbax-checkpoint-tmp")
    left.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(type(left), "rmtree", lambda self: raise_(error))
        with pytest.raises(CheckpointError, match=r"left of an unfinished save.*If another job"):
            directory._remove(left)
    directory._remove(left)
    assert not left.exists()
    directory._remove(left)  # gone meanwhile


def raise_(error):
    raise error
