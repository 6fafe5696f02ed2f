"""Checkpoints in object stores: gs:// through Orbax, s3:// and others through meshfeed; what fails, and what is left."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_feeds import CountingFeed
from checkpoint_trees import abstract, assert_same, make_mesh, place, special_floats
from flips import flipped, is_noticed, is_refused
from orbax.checkpoint._src.serialization import tensorstore_utils
from store_servers import S3, running

from meshfeed._src.base import store_path, stores
from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.store_path import StorePath, make_path
from meshfeed._src.checkpoint import step as checkpoint_step
from meshfeed._src.checkpoint import store_manager
from meshfeed.checkpoint import Checkpointer, IteratorHandler, restore_once, verify

BUCKET = "s3://bucket"
# No search for credentials, which takes seconds each time; etils through gcsfs, as TensorFlow knows no emulator.
WITHOUT_CREDENTIALS = {
    "EPATH_USE_TF": "false",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    "GOOGLE_CLOUD_PROJECT": "test",
    "NO_GCE_CHECK": "true",
}


@pytest.mark.slow
def test_google_cloud_storage():
    for library in ("gcp_storage_emulator", "gcsfs"):
        pytest.importorskip(library)
    here = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, str(here / "gs_child.py")],
        env={**os.environ, **WITHOUT_CREDENTIALS, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    assert json.loads(child.stdout.splitlines()[-1]) == [True, True]


def test_orbax_itself_writes_to_no_other_store():
    """Once this fails, Orbax's manager may be able to save to S3."""
    with pytest.raises(ValueError, match="should be absolute"):
        tensorstore_utils.build_kvstore_tspec("s3://bucket/run", use_ocdbt=True)


@pytest.fixture(scope="module")
def s3():
    with running(lambda: S3("bucket")) as server:
        yield server


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(4, 2)


def state_at(step: int, mesh) -> dict[str, object]:
    values = np.arange(64 * 256, dtype=np.float32).reshape(64, 256) + step
    return {
        "w": place(values, mesh, "data"),
        "layers": [{"w": place(values[:8], mesh, None, "model")}, {"w [0]*": place(values[0], mesh)}],
        "f8": place(special_floats("float8_e5m2", 256), mesh),
        "empty": jax.numpy.zeros((0, 3)),
        "key": jax.random.key(3),
        "n": np.arange(3),
        "step": step,
        "text": "a",
    }


def names(directory: str) -> list[str]:
    """What is in a checkpoint folder, but for the note of a job that saves there."""
    return sorted(path.name for path in make_path(directory).iterdir() if path.name != ".writer.json")


@pytest.mark.slow
@pytest.mark.parametrize("directory", [f"{BUCKET}/run", "memory://bucket/run"])
def test_a_run(s3, mesh, directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    feed, wanted = CountingFeed(), abstract(state_at(0, mesh))
    options = {"keep_period": 4}
    with Checkpointer(directory, save_interval_steps=2, max_to_keep=2, orbax_options=options) as ckpt:
        assert ckpt.restore(state_at(0, mesh), feed)[0] == 0
        for step in (4, 6, 8, 10, 11):  # the last by leaving
            next(feed)
            state = state_at(step, mesh)
            assert ckpt.save(step, state, feed) == (step % 2 == 0)
            if step % 2 == 0:
                state["n"][:] = 0  # captured before
        assert not ckpt.save(3, state, feed)
    assert checkpoint_step.find_steps(directory) == [4, 8, 10, 11]
    state_file = StorePath(directory) / "11/iterator/state.json"
    state_file.write_text("{}")
    other = CountingFeed()
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        step, restored = ckpt.restore(wanted, other)
        assert (step, other.position) == (10, 16)
        assert_same(state_at(10, mesh), restored)
        assert ckpt.metadata(8).position == 12
        at_10 = ckpt.metadata(10).iterator_state
        next(other)
        assert ckpt.save(11, state_at(11, mesh), other)  # in place of the damaged one, which is set aside
        ckpt.wait()
        assert ckpt.restore(wanted, CountingFeed())[0] == 11
        with pytest.raises(CheckpointError, match="step 11 already exists in"):
            ckpt.save(11, state_at(11, mesh), other, force=True)
    assert [name.partition("-")[0] for name in names(directory) if "." in name] == ["11.damaged"]
    assert [finding.problems for finding in verify(directory)] == [(), (), ()]
    found = checkpoint_step.inspect(directory, 10)
    assert len(found["steps"][0]["leaves"]) == 9
    assert found["steps"][0]["position"] == 16
    differences = checkpoint_step.diff(f"{directory}/10", f"{directory}/11")
    assert sorted(differences["leaves"]) == ["layers.0.w", "layers.1.w [0]*", "step", "w"]
    assert_same(state_at(10, mesh), restore_once(f"{directory}/10/arrays", wanted, memory_limit_bytes=1 << 20))
    assert_same(state_at(10, mesh), restore_once(f"{directory}/10", None))
    assert IteratorHandler().restore(f"{directory}/10/iterator") == at_10
    with pytest.raises(CheckpointError, match=r"step 7 is not in .*; its steps are: 8, 10, 11"):
        checkpoint_step.read_step(directory, 7)
    with pytest.raises(CheckpointError, match=r"/none: contains no steps|/none: no such folder"):
        verify(f"{directory}/none")
    assert not list(tmp_path.iterdir()), "a folder was made in place of a URL"


@pytest.mark.slow
def test_plain_orbax_reads_a_downloaded_step(s3, mesh, tmp_path):
    directory, feed = f"{BUCKET}/plain", CountingFeed()
    next(feed)
    with Checkpointer(directory) as ckpt:
        ckpt.save(3, state_at(3, mesh), feed)
    store, path = stores.open_store(directory)
    store.get(path, str(tmp_path / "c"), recursive=True)
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        assert manager.all_steps() == [3]
        restored = manager.restore(3, args=ocp.args.Composite(arrays=ocp.args.PyTreeRestore()))["arrays"]
        assert manager.item_metadata(3)["arrays"] is not None
    for name in ("w", "n", "f8"):
        found, value = np.asarray(restored[name]), np.asarray(state_at(3, mesh)[name])
        np.testing.assert_array_equal(found.view(np.uint8), value.view(np.uint8))
    assert (restored["step"], restored["text"]) == (3, "a")
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        assert_same(state_at(3, mesh), ckpt.restore(abstract(state_at(0, mesh)), CountingFeed())[1])
        assert ckpt.save(4, state_at(4, mesh))
    # And back: a folder that Orbax wrote, step 4, which is in OCDBT.
    store.put(str(tmp_path / "c/4"), f"{path}/4", recursive=True)
    with Checkpointer(directory) as ckpt:
        assert ckpt.steps() == [3, 4]
        assert_same(state_at(4, mesh), ckpt.restore(abstract(state_at(0, mesh)))[1])


@pytest.mark.parametrize(
    ("root", "settings"),
    [
        ("memory://bucket", {"use_ocdbt": False}),
        ("memory://bucket", {"use_ocdbt": False, "use_zarr3": True}),
        pytest.param(BUCKET, {"use_ocdbt": False, "use_zarr3": True}, marks=pytest.mark.slow),
        pytest.param(BUCKET, {}, marks=pytest.mark.slow),
        pytest.param(BUCKET, {"use_zarr3": True}, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_plain_orbax_that_was_uploaded(memory, mesh, tmp_path, request, root, settings):
    """With and without an abstract tree; in zarr's version 3, the files have other names."""
    if root == BUCKET:
        request.getfixturevalue("s3")
    whole = state_at(5, mesh)
    tree = {name: whole[name] for name in ("w", "layers", "key", "n", "step", "text")} | {"list": [(), None, {}]}
    tree["nothing"] = place(np.zeros((8, 8), np.float32), mesh, "data")  # a chunk of zeros is not stored
    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**settings))
    saver.save(tmp_path / "a", args=ocp.args.PyTreeSave(tree))
    url = f"{root}/plain-{'-'.join(sorted(settings))}"
    store, path = stores.open_store(url)
    store.put(str(tmp_path / "a"), path, recursive=True)
    wanted = restore_once(tmp_path / "a", None)
    found = restore_once(url, None)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert_same(wanted, found)
    assert_same(tree, restore_once(url, abstract(tree)))


@pytest.mark.slow
def test_a_store_that_refuses_a_fifth_of_all_requests(s3: S3, mesh):
    directory, wanted = f"{BUCKET}/overloaded", abstract(state_at(0, mesh))
    s3.failing, before = 0.2, len(s3.requests)
    try:
        with Checkpointer(directory, save_interval_steps=1, max_to_keep=1) as ckpt:
            for step in (1, 2):
                assert ckpt.save(step, state_at(step, mesh))
            ckpt.wait()
            step, restored = ckpt.restore(wanted)
        assert [finding.intact for finding in verify(directory)] == [True]
    finally:
        s3.failing = 0.0
    assert step == 2
    assert_same(state_at(2, mesh), restored)
    assert len(s3.requests) - before > 100
    assert names(directory) == ["2"]


@pytest.mark.slow
def test_what_killed_processes_leave_is_removed(s3, mesh):
    directory = f"{BUCKET}/left"
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        ckpt.save(1, state_at(1, mesh))
        ckpt.save(2, state_at(2, mesh))
    root = StorePath(directory)
    (root / "3.unfinished").write_text("")
    (root / "3/arrays/w/0.0").write_text("x")
    (root / "2.unfinished").write_text("")  # killed between its commit and the removal of the note
    (root / "7/arrays/w/0.0").write_text("not of a Checkpointer")
    store, _ = stores.open_store(directory)
    for key in ("left/3/arrays/big", "leftover/3/arrays/big"):
        store.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        assert ckpt.steps() == [1, 2]
        assert names(directory) == ["1", "2", "2.unfinished", "3", "3.unfinished", "7"], (
            "who only reads removes nothing"
        )
        assert ckpt.save(5, state_at(5, mesh))
        ckpt.wait()
        assert names(directory) == ["1", "2", "5", "7"]
        assert [upload["Key"] for upload in store.list_multipart_uploads("bucket")] == ["leftover/3/arrays/big"]
        ckpt.save(7, state_at(7, mesh))
        with pytest.raises(CheckpointError, match=r"left/7: has objects but no commit_success.txt.*Remove the folder"):
            ckpt.wait()
        assert ckpt.save(8, state_at(8, mesh))  # the folder that was in the way is as it was
    assert (root / "7/arrays/w/0.0").read_text() == "not of a Checkpointer"
    assert verify(directory, 8)[0].intact


@pytest.mark.slow
def test_a_store_that_is_down(mesh, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running(lambda: S3("bucket")) as server:
        ckpt = Checkpointer(f"{BUCKET}/down", save_interval_steps=1)
        assert ckpt.save(1, state_at(1, mesh))
        ckpt.wait()
        monkeypatch.setattr(stores, "ANSWER_SECONDS", 1.0)
        server.stop()
        ckpt.save(2, state_at(2, mesh))
        with pytest.raises(CheckpointError, match=r"^s3://bucket/down: saving step 2 failed: .*/down/2.*store is up"):
            ckpt.wait()
        with pytest.raises(CheckpointError, match=r"s3://bucket/down/1.*Check the network and that the store is up"):
            ckpt.restore(state_at(0, mesh), step=1)
        with pytest.raises(CheckpointError, match=r"s3://bucket/down.*Check the network and that the store is up"):
            Checkpointer(f"{BUCKET}/down")
        with pytest.raises(CheckpointError, match=r"s3://bucket/down.*Check the network and that the store is up"):
            verify(f"{BUCKET}/down")


@pytest.mark.parametrize("refused", ["meshfeed/manifest.json", "/w/.zarray", "/w/0"])
def test_a_store_that_refuses_an_object_says_nothing_of_the_step(memory, mesh, monkeypatch, refused):
    """Such as expired credentials, or a key that may not be used: no step is passed over, or set aside by the next save."""
    directory, state = f"memory://bucket/refused{refused.replace('/', '-')}", state_at(1, mesh)
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state)
    ask = store_path.ask

    def refuse(url, *arguments, **keywords):
        if refused in url:
            with stores.store_errors(url):
                raise PermissionError("AccessDenied")
        return ask(url, *arguments, **keywords)

    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(store_path, "ask", refuse)
            with pytest.raises(CheckpointError, match="AccessDenied") as raised:
                ckpt.restore(state)
            assert "none of its steps" not in str(raised.value)
        assert ckpt.restore(state)[0] == 2
        ckpt.save(3, state)
        ckpt.wait()
        assert names(directory) == ["1", "2", "3"]


def test_an_object_that_is_removed_meanwhile_is_missing(memory, mesh, monkeypatch):
    """The job that saves may remove a step while another one restores it."""
    directory, state = "memory://bucket/meanwhile", state_at(1, mesh)
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state)
    ask = store_path.ask

    def without(url, *arguments, **keywords):
        if "meanwhile/2/arrays/w" in url:
            raise FileNotFoundError(url)
        return ask(url, *arguments, **keywords)

    monkeypatch.setattr(store_path, "ask", without)
    with Checkpointer(directory) as ckpt:
        assert ckpt.restore(state)[0] == 1


def test_only_the_first_step_of_an_empty_folder_is_off_the_interval(memory, monkeypatch):
    """Also while that one is uploaded, which ends at another step on each host: they would wait for each other."""
    ask, may_commit = store_path.ask, threading.Event()

    def slow(url, method, *arguments, **keywords):
        if method == "pipe_file" and url.endswith("1/commit_success.txt"):
            assert may_commit.wait(60)
        return ask(url, method, *arguments, **keywords)

    monkeypatch.setattr(store_path, "ask", slow)
    state = {"a": np.arange(3)}
    with Checkpointer("memory://bucket/first", save_last=False) as ckpt:
        assert ckpt.save(1, state)
        threading.Timer(0.2, may_commit.set).start()  # a save would wait for the one before
        assert not ckpt.save(2, state)
        ckpt.wait()
        assert not ckpt.save(3, state)
        assert ckpt.steps() == [1]


def test_a_step_that_is_uploaded_is_not_due_again(memory, monkeypatch):
    """Or a host that already knows that it is committed would leave the others waiting in a save."""
    ask, may_commit = store_path.ask, threading.Event()

    def slow(url, method, *arguments, **keywords):
        if method == "pipe_file" and url.endswith("2/commit_success.txt"):
            assert may_commit.wait(60)
        return ask(url, method, *arguments, **keywords)

    monkeypatch.setattr(store_path, "ask", slow)
    state = {"a": np.arange(3)}
    with Checkpointer("memory://bucket/again", save_interval_steps=1) as ckpt:
        for step in (1, 2):
            assert ckpt.save(step, state)
        for step in (1, 2):
            assert not ckpt.save(step, state)
        may_commit.set()
        ckpt.wait()
        assert not ckpt.save(2, state)
        assert ckpt.steps() == [1, 2]


def test_jax_learns_of_every_step_to_choose_one_before_a_preemption(memory, monkeypatch):
    """Also of those on the interval: a step that has passed already would be chosen, and nothing saved there."""
    asked = []
    with Checkpointer("memory://bucket/preempted", save_interval_steps=2) as ckpt:
        ckpt.save(1, {"a": np.arange(3)})
        ckpt.wait()
        monkeypatch.setattr(store_manager, "process_count", lambda: 2)
        monkeypatch.setattr(store_manager, "_preempted", lambda step: asked.append(step) or step == 5)
        assert [step for step in range(2, 8) if ckpt._manager.should_save(step)] == [2, 4, 5, 6]
    assert asked == [*range(2, 8)]


def test_a_bucket_that_does_not_exist(s3, mesh):
    with Checkpointer("s3://nowhere/run") as ckpt:
        ckpt.save(0, {"a": np.arange(3)})
        with pytest.raises(
            CheckpointError, match=r"s3://nowhere/run/0.unfinished: .*does not exist. Create the bucket"
        ):
            ckpt.wait()


NO_DATA = ("commit_success.txt", "_CHECKPOINT_METADATA")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bit_flips(s3, memory, mesh):
    """On a store in memory in CI, on an emulated S3 with ``MESHFEED_SOAK=1``: every flip is noticed.

    Except in the times of Orbax's ``_CHECKPOINT_METADATA``, and in bits of zstd that decode to the same values.
    """
    soak = bool(os.environ.get("MESHFEED_SOAK"))
    directory, count = (f"{BUCKET}/flips", 200) if soak else ("memory://bucket/flips", 50)
    state, feed = state_at(1, mesh), CountingFeed()
    next(feed)
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, state, feed)
    root = StorePath(directory) / "1"
    sizes = {name: size for name, size in root.sizes().items() if size and name not in NO_DATA}
    rng, objected, started = np.random.default_rng(5), 0, time.monotonic()
    odds = np.array(list(sizes.values())) ** 0.5  # not the largest object each time
    with Checkpointer(directory) as ckpt:
        for _ in range(count):
            path = root / str(rng.choice(list(sizes), p=odds / odds.sum()))
            with flipped(path, rng):
                objected += is_refused(ckpt, state) or is_noticed(directory)
    assert objected >= 0.99 * count, f"{objected} of {count} after {time.monotonic() - started:.0f} s"
