"""Child processes: their import path, messages and logs, and that nothing of them outlives their parent."""

from __future__ import annotations

import fcntl
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time

import cloudpickle
import psutil
import pytest

from meshfeed._src.base import child as child_process
from meshfeed._src.base.child import ChildProcess
from meshfeed._src.base.frames import Inbox

SECONDS = 60.0
SERVE = "meshfeed._src.base.child:serve"

PARENT = """
import os, pickle, signal, subprocess, sys, time
import cloudpickle
from meshfeed._src.base.child import REQUEST, SETUP, ChildProcess

def make_task():
    def task(request):
        import subprocess, sys
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
    return task

child = ChildProcess("meshfeed._src.base.child:serve", own_group=True)
child.send(SETUP, (cloudpickle.dumps(make_task), 0))
child.send(REQUEST, None)
answers = []
while len(answers) < 2:
    if (frame := child.take()) is None:
        child.exchange(60)
    else:
        answers.append(frame.value)
print(child.pid, answers[1], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def answer(child: ChildProcess, kind: int, value: object) -> object:
    child.send(kind, value)
    while (frame := child.take()) is None:
        assert child.exchange(SECONDS)
        assert not child.hung_up
    return frame.value


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_idle_child_and_its_own_children_end_with_a_killed_parent() -> None:
    ended = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    child, grandchild = (int(pid) for pid in ended.stdout.split())
    wait_until(lambda: gone(child), "the child outlives its parent")
    wait_until(lambda: gone(grandchild), "the child of the child outlives its group")


def test_a_child_imports_from_the_paths_of_its_parent(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a:b"  # PYTHONPATH cannot hold it
    folder.mkdir()
    (folder / "made_for_a_child.py").write_text("import sys\ndef show(parent):\n    print(sys.argv[1:], sys.path[0])\n")
    monkeypatch.syspath_prepend(str(folder))
    child = ChildProcess("made_for_a_child:show", "one", "two words", log_path=tmp_path / "log")
    assert child.wait(SECONDS)
    assert child.log().splitlines()[-1] == f"['one', 'two words'] {folder}"
    assert child.how_it_ended() == "exited with code 0"
    assert child.close()


def test_a_child_that_stops_in_order_runs_its_exit_functions(tmp_path: pathlib.Path) -> None:
    def make_task():
        import atexit

        atexit.register(print, "exit functions run")
        return lambda request: request * 2

    child = ChildProcess(SERVE, log_path=tmp_path / "log", own_group=True)
    assert answer(child, child_process.SETUP, (cloudpickle.dumps(make_task), 0)) is None
    assert answer(child, child_process.REQUEST, 21) == 42
    child.send(child_process.STOP)
    assert child.wait(SECONDS)
    assert child.returncode == 0
    assert child.log() == "exit functions run\n"
    assert child.close()


def test_more_than_a_socket_holds_is_sent_while_the_child_is_busy(tmp_path: pathlib.Path) -> None:
    child = ChildProcess(SERVE, log_path=tmp_path / "log")
    child.send(child_process.SETUP, (cloudpickle.dumps(lambda: len), 0))
    for _ in range(4):
        child.send(child_process.REQUEST, bytes(10_000_000))
    child.drain()
    values = []
    while len(values) < 5:  # all may have arrived while the last request was sent
        if (frame := child.take()) is None:
            assert child.exchange(SECONDS)
        else:
            values.append(frame.value)
    assert values == [None, *[10_000_000] * 4]
    assert child.close()


def test_progress_is_told_through_a_high_descriptor() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    try:
        mine, other = socket.socketpair()
        high = fcntl.fcntl(other.fileno(), fcntl.F_DUPFD, 1500)
        with open(os.devnull, "w") as stacks:
            parent = child_process.Parent(high, os.dup(other.fileno()), stacks.fileno(), os.getppid())
        parent.tell("halfway")
        other.close()
        inbox = Inbox(mine)
        assert inbox.receive()
        frame = inbox.take()
        assert frame is not None
        assert (frame.kind, frame.value) == (child_process.PROGRESS_TEXT, "halfway")
        mine.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
