"""A program that ends without ``close``: its saves are finished, or an ERROR says which was not."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from etils import epath

from meshfeed._src.checkpoint import at_exit
from meshfeed._src.checkpoint.step import find_steps, verify
from meshfeed._src.testing.hosts import free_port

needs_threads_at_exit = pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2),
    reason="Python 3.12.0 and 3.12.1 start no threads at exit (python/cpython#113964), so an ERROR names the step there",
)
CHILD = pathlib.Path(__file__).with_name("exit_child.py")


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(CHILD), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(child: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    try:
        output, _ = child.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        child.kill()
        pytest.fail(f"the program did not end: {child.communicate()[0]}")
    return child.returncode, output, [line for line in output.splitlines() if line.startswith("ERROR:meshfeed")]


def finished(directory: pathlib.Path) -> list[int]:
    assert all(finding.intact for finding in verify(directory))
    return find_steps(directory)


@needs_threads_at_exit
@pytest.mark.slow
def test_saves_are_finished_at_exit_or_an_error_says_that_they_were_not(tmp_path):
    expected = {
        # how the program ends → exit status, parts of the ERROR
        "exit": (3, ()),
        "skipped": (0, ("step 2, which the interval skipped, is not saved in", "close()")),
        "full": (0, ("step 1 is not saved in", "close()", "No space left on device")),
    }
    children = {how: start(str(tmp_path / how), how) for how in expected}
    for how, (status, parts) in expected.items():
        found, output, errors = end(children[how])
        assert found == status, output
        assert len(errors) == (1 if parts else 0), output
        for part in parts:
            assert part in errors[0]
    assert (finished(tmp_path / "exit/a"), finished(tmp_path / "exit/b")) == ([1], [1, 2])
    assert finished(tmp_path / "skipped") == [1]
    assert find_steps(tmp_path / "full") == []


@needs_threads_at_exit
@pytest.mark.multihost
def test_saves_of_two_hosts_are_finished_at_exit(tmp_path):
    port = str(free_port())
    children = [start(str(tmp_path), "exit", str(host), port) for host in range(2)]
    for child in children:
        status, output, errors = end(child)
        assert (status, errors) == (3, []), output
    assert (finished(tmp_path / "a"), finished(tmp_path / "b")) == ([1], [1, 2])


def test_the_saves_of_all_checkpointers_are_waited_for(monkeypatch):
    monkeypatch.setattr(at_exit, "_open", {})
    waited, left = [], []
    for name in "ab":
        saves = at_exit.OpenSaves(
            lambda name=name: waited.append(name), lambda name=name: left.append(name), epath.Path(name)
        )
        saves.register()
        saves.saving = 1
    at_exit.finish_open_saves()
    assert (waited, left) == (["a", "b"], ["a", "b"])


def test_a_save_waits_for_those_that_this_process_does_in_the_folder(monkeypatch):
    """A forked child has no threads of its parent's saves, and would wait for ever."""
    monkeypatch.setattr(at_exit, "_open", {})
    waited = []

    def saves_of(name, folder, saving, here=True):
        saves = at_exit.OpenSaves(lambda: waited.append(name), lambda: None, epath.Path(folder))
        saves.register()
        saves.saving = saving
        if not here:
            saves.owner.pid = -1
        return saves

    mine = saves_of("mine", "a", 1)
    saves_of("beside", "a", 1)
    saves_of("nothing to save", "a", None)
    saves_of("of the parent", "a", 1, here=False)
    saves_of("elsewhere", "b", 1)
    mine.wait_for_others()
    assert waited == ["beside"]
