"""Two jobs do not mix their steps in one folder: the one that began to save last goes on, and the other stops."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

from meshfeed import CheckpointError
from meshfeed._src.base.store_path import make_path
from meshfeed._src.base.writer import new_note, who
from meshfeed._src.checkpoint import array_handler, handlers, store_manager, stored, writer
from meshfeed.checkpoint import Checkpointer, verify

STATE = {"x": np.arange(3)}
CHILD = """
import sys, numpy as np
from meshfeed.checkpoint import Checkpointer
ckpt = Checkpointer(sys.argv[1], save_interval_steps=1)
saved = ckpt.save(int(sys.argv[2]), {"x": np.arange(3)})
ckpt.wait()
print(saved, flush=True)
sys.stdin.read()  # until the parent ends it, without close
"""


def save(ckpt, step):
    ckpt.save(step, STATE)
    ckpt.wait()  # in a store, what is wrong is found in the background


def raises(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture
def jobs(monkeypatch):
    """Each Checkpointer is taken for one of a job of its own."""
    monkeypatch.setattr(writer, "_note_of", lambda pid: new_note())
    monkeypatch.setattr(writer.FolderWriter, "_known_steps", lambda self: vars(self).setdefault("known", set()))


@pytest.fixture(params=["folder", "store"])
def directory(request, tmp_path):
    return str(tmp_path / "c") if request.param == "folder" else f"memory://{tmp_path.name}/c"


def test_a_job_stops_saving_once_another_has_begun(jobs, directory):
    first, second = (Checkpointer(directory, save_interval_steps=1) for _ in range(2))
    first.save(1, STATE)
    first.wait()
    second.restore(STATE)
    first.save(2, STATE)  # one that only reads replaces nobody
    first.wait()
    second.save(3, STATE)
    second.wait()
    named = f"process {os.getpid()} on {socket.gethostname()} has begun to save here since"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=named):
            save(first, 4)
    second.close()
    with pytest.raises(CheckpointError, match="another job has saved here, and ended, since this job began to"):
        save(first, 4)
    first.close()
    assert first.steps() == [1, 2, 3]
    with Checkpointer(directory, save_interval_steps=1) as third:
        assert third.save(4, STATE)


def test_a_save_that_another_job_disturbs_names_it(jobs, tmp_path, monkeypatch):
    first, second = (Checkpointer(tmp_path / "c", save_interval_steps=1) for _ in range(2))

    def fail(item, name, digests, **content):
        second._prepare_to_write(1)  # as another process would, which waits for no save of this one
        raise FileNotFoundError(2, "No such file or directory")

    with monkeypatch.context() as patch:
        for module in (array_handler, handlers, stored):
            patch.setattr(module, "write_part", fail)
        first.save(1, STATE)
        with pytest.raises(CheckpointError, match="has begun to save here since this job began to"):
            first.wait()
    with pytest.raises(CheckpointError, match="has begun to save here since this job began to"):
        first.save(1, STATE)
    second.close()
    first.close()


def test_checkpointers_of_one_process_do_not_replace_each_other(directory):
    first, second = (Checkpointer(directory, save_interval_steps=1) for _ in range(2))
    first.save(1, STATE)
    second.save(2, STATE)
    second.close()
    assert first.steps() == [1, 2]
    assert not first.save(2, STATE)
    with pytest.raises(CheckpointError, match="step 2 already exists"):
        first.save(2, STATE, force=True)
    first.save(3, STATE)
    first.close()
    assert first.steps() == [1, 2, 3]


def test_a_save_that_failed_is_told_by_its_own_checkpointer(directory, monkeypatch):
    """Though another one of this process has waited for it."""
    first, second = (Checkpointer(directory, save_interval_steps=1) for _ in range(2))
    join = handlers.join_parts

    def fail_once(*_):
        monkeypatch.setattr(handlers, "join_parts", join)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(handlers, "join_parts", fail_once)
    first.save(1, STATE)
    assert second.save(2, STATE)
    second.close()
    with pytest.raises(CheckpointError, match=r"saving step 1 failed.*No space left"):
        first.wait()
    first.close()


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", None])  # "": as if it were gone; \xff: it cannot be read
def test_a_note_that_is_damaged_or_removed(directory, content):
    note = make_path(directory) / ".writer.json"
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        ckpt.save(1, STATE)
        ckpt.wait()
        assert who(note.read_text()) == f"process {os.getpid()} on {socket.gethostname()}"
        note.unlink() if content is None else note.write_bytes(content.encode("latin-1"))
        if content in ("", "\xff", None):
            ckpt.save(2, STATE)
        else:
            with pytest.raises(CheckpointError, match="another process has begun to save here"):
                save(ckpt, 2)
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        assert ckpt.save(3, STATE)
    assert not note.exists()


def test_a_job_that_was_not_closed_is_in_the_log_of_the_next(jobs, tmp_path, caplog):
    def messages():
        caplog.clear()
        with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
            ckpt.save(max(ckpt.steps(), default=0) + 1, STATE)
            ckpt.wait()
            return [message for message in caplog.messages if "has not closed its Checkpointer" in message]

    with caplog.at_level(logging.INFO, "meshfeed.checkpoint"):
        assert messages() == []
        assert messages() == []  # the first has closed it
        killed = Checkpointer(tmp_path / "c", save_interval_steps=1)
        killed.save(7, STATE)
        killed.wait()
        assert len(messages()) == 1
        killed.close()
        assert messages() == [], "a job that ends after it was replaced must not write over the note"


def test_a_note_that_could_not_be_written_is_written_later(jobs, directory, monkeypatch):
    killed = Checkpointer(directory, save_interval_steps=1)
    save(killed, 1)
    note = make_path(directory) / ".writer.json"
    before = note.read_text()
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(type(note), "write_text", raises(PermissionError(13, "Permission denied")))
            ckpt._writer.begin()
        assert note.read_text() == before
        ckpt._writes = True
        save(ckpt, 2)
        assert note.read_text() != before
        with pytest.raises(CheckpointError, match="has begun to save here since"):
            save(killed, 3)
    killed.close()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("503 of some library")])
def test_a_note_that_cannot_be_read_is_not_overwritten(jobs, directory, monkeypatch, error):
    first, second = (Checkpointer(directory, save_interval_steps=1) for _ in range(2))
    save(first, 1)
    save(second, 2)
    note = make_path(directory) / ".writer.json"
    with monkeypatch.context() as patch:
        patch.setattr(type(note), "read_text", raises(error))
        assert first._writer.replaced() is None
    save(second, 3)  # it still is its folder
    with pytest.raises(CheckpointError, match="has begun to save here since"):
        save(first, 4)
    second.close()
    first.close()


def test_a_save_that_is_not_due_replaces_nobody(jobs, directory):
    first = Checkpointer(directory, save_interval_steps=1)
    save(first, 1)
    with Checkpointer(directory, save_interval_steps=1000, save_last=False) as second:
        assert not second.save(7, STATE)
        save(first, 2)
    save(first, 3)
    first.close()


def test_a_job_that_was_replaced_leaves_unfinished_steps_of_its_successor(jobs, directory):
    first, second = (Checkpointer(directory, save_interval_steps=1) for _ in range(2))
    save(first, 1)
    save(second, 2)
    is_store = "://" in directory
    unfinished = make_path(directory) / ("9/arrays/x" if is_store else "9.orbax-checkpoint-tmp/x")
    if is_store:
        (make_path(directory) / "9.unfinished").write_text("")
    else:
        unfinished.parent.mkdir(parents=True)
    unfinished.write_text("")
    for _ in range(2):  # the second one after a failure
        with pytest.raises(CheckpointError, match="has begun to save here since"):
            save(first, 3)
        assert unfinished.exists()
    second.close()
    first.close()


def test_a_job_that_is_replaced_while_it_uploads_commits_nothing(jobs, tmp_path, monkeypatch):
    directory = f"memory://{tmp_path.name}/c"
    first, second = (Checkpointer(directory, save_interval_steps=1) for _ in range(2))
    run = store_manager._Uploads.run

    def run_and_be_replaced(uploads, written):
        run(uploads, written)
        monkeypatch.setattr(store_manager._Uploads, "run", run)
        second._prepare_to_write(10)  # as another process would, which waits for no save of this one

    monkeypatch.setattr(store_manager._Uploads, "run", run_and_be_replaced)
    first.save(10, STATE)
    with pytest.raises(CheckpointError, match="has begun to save here since"):
        first.wait()
    assert second.steps() == []
    make_path(directory).joinpath("10").rmtree()  # what it has merged
    save(second, 10)
    second.close()
    first.close()
    assert verify(directory, 10)[0].intact


def test_a_step_that_another_job_saved_in_place_of_a_damaged_one_stays(jobs, tmp_path):
    directory = tmp_path / "c"
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        save(ckpt, 10)
        save(ckpt, 20)
    (directory / "20/arrays/meshfeed/manifest.json").unlink()
    first, second = (Checkpointer(directory, save_interval_steps=1) for _ in range(2))
    assert [ckpt.restore(STATE)[0] for ckpt in (first, second)] == [10, 10]
    save(second, 20)
    second.close()
    assert not first.save(11, STATE)
    first.close()
    assert len(list(directory.glob("20.damaged-*"))) == 1
    assert verify(directory, 20)[0].intact


def test_an_unfinished_save_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    busy = tmp_path / "c/2.orbax-checkpoint-tmp"
    (busy / "arrays").mkdir(parents=True)
    tries = []

    def rmtree(path, *_, **__):
        if path.name == busy.name and len(tries) < left:
            tries.append(path)
            raise OSError(39, "Directory not empty", "arrays")
        shutil.rmtree(path)

    monkeypatch.setattr(type(make_path(busy)), "rmtree", rmtree)
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        left = 99
        with pytest.raises(
            CheckpointError, match=r"2\.orbax-checkpoint-tmp: is left of an unfinished save, and cannot be"
        ):
            ckpt.save(2, STATE)
        left = len(tries) + 2  # the other job ends
        save(ckpt, 2)


@pytest.mark.slow
def test_two_processes(tmp_path):
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, STATE)
        ckpt.wait()
        command = [sys.executable, "-c", CHILD, str(tmp_path / "c"), "2"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "True\n"
            with pytest.raises(CheckpointError, match=f"process {child.pid} on {socket.gethostname()} has begun"):
                ckpt.save(3, STATE)
            child.kill()
        with pytest.raises(CheckpointError, match=f"process {child.pid} on"):
            ckpt.save(3, STATE)
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        assert ckpt.save(3, STATE)
    exits = CHILD.replace("sys.stdin.read()", "")
    subprocess.run([sys.executable, "-c", exits, str(tmp_path / "c"), "4"], check=True, stdout=subprocess.DEVNULL)
    assert sorted(os.listdir(tmp_path / "c")) == ["2", "3", "4"], "the note is removed without close() too"
