"""A forked child that runs its parent's exit functions leaves the parent's feed alone."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

import meshfeed
from meshfeed._src.base.fork import Owner, finalize

SCRIPT = """
import json, os, signal, sys, time
import jax, numpy as np, meshfeed
from meshfeed.checkpoint import Checkpointer
from meshfeed.testing import HostPool

class Rows(meshfeed.sources.Memory):  # read in a worker process
    def read_batch(self, record_ids, columns=None):
        return {**super().read_batch(record_ids), "pid": np.full(len(record_ids), os.getpid(), np.int32)}

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rows = Rows({"x": np.arange(8000)})
feed = meshfeed.MultiHostDataLoadIterator(rows, mesh, global_batch_size=8, num_workers=1, timeout_seconds=60)
ckpt, pool = Checkpointer(sys.argv[1]), HostPool(1, 1)
workers = {int(pid) for pid in np.asarray(next(feed)["pid"])}
pool.run(os.getpid)
read, write = os.pipe()
child = os.fork()
if child == 0:
    try:
        next(feed)
    except meshfeed.MeshfeedError as error:
        os.write(write, str(error).encode())
    if sys.argv[2] == "close":
        for thing in (feed, ckpt, pool):
            thing.close()
    os.write(write, b" | closed")
    sys.exit()
os.close(write)
deadline = time.monotonic() + 60
while not os.waitpid(child, os.WNOHANG)[0]:
    if time.monotonic() > deadline:
        os.kill(child, signal.SIGKILL)
        sys.exit("the child hangs")
    time.sleep(0.05)
said = os.read(read, 10_000).decode()
after = {int(pid) for pid in np.asarray(next(feed)["pid"])}
ckpt.save(1, {"x": np.ones(3)}, feed, force=True)
ckpt.wait()
hosts = [result.value for result in pool.run(os.getpid)]
pids = pool.pids
pool.close(); ckpt.close(); feed.close()
print(json.dumps([os.getpid(), child, said, workers == after, len(workers), hosts == pids, ckpt.steps()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "exit"])
def test_a_forked_child_leaves_its_parents_feed_alone(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "checkpoints"), how],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parent, child, said, same_worker, num_workers, same_hosts, steps = json.loads(done.stdout.splitlines()[-1])
    assert said == (
        f"this feed belongs to process {parent} and cannot be used in its forked child {child}, which has none of its "
        'threads and connections. Create a new one in the child, or start the child with multiprocessing\'s "spawn" method. '
        "| closed"
    )
    assert (same_worker, num_workers) == (True, 1)
    assert same_hosts
    assert steps == [1]


def test_a_finalizer_runs_in_the_process_that_made_it_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        pass

    called: list[str] = []
    finalizers = [finalize(Thing(), called.append, "here")]
    thing = Thing()
    finalizers.append(finalize(thing, called.append, "child"))
    owner = Owner()
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)
    del thing
    assert not any(finalizer.alive for finalizer in finalizers)
    assert called == ["here"]
    with pytest.raises(meshfeed.MeshfeedError, match=f"a thing belongs to process {real} and cannot be used"):
        owner.check("a thing")


class Thing:
    pass


def test_finalizers_do_not_keep_their_target_alive(capsys: pytest.CaptureFixture[str]) -> None:
    thing, called = Thing(), []
    finalize(thing, called.append, ("first", [thing]))
    finalize(thing, int, "no number")
    finalize(thing, called.append, "detached").detach()
    once = finalize(thing, called.append, "last")
    once()
    once()
    assert called == ["last"]
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert called[0] == "last"
    assert called.pop()[0] == "first"
    assert "invalid literal for int()" in capsys.readouterr().err
    gc.collect()
    assert gone() is None


def test_finalizers_run_at_exit_the_last_one_first() -> None:
    code = (
        "from meshfeed._src.base.fork import finalize\n"
        "class Thing: pass\n"
        "thing = Thing()\n"
        "for number in range(3): finalize(thing, print, number)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "1", "0"]
