"""A program that ends without ``close``: its saves are finished, or an ERROR says which was not."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from meshfeed._src.checkpoint.step import find_steps, verify
from meshfeed._src.testing.hosts import free_port

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
    return child.returncode, output, [line for line in output.splitlines() if line.startswith("ERROR meshfeed")]


@pytest.mark.slow
def test_saves_are_finished_at_exit_or_an_error_says_that_they_were_not(tmp_path):
    expected = {
        # how the program ends → exit status, folder → its steps, parts of the ERROR
        "end": (0, {"": [1, 2]}, ()),
        "closed": (0, {"": [1, 2]}, ()),
        "exit": (3, {"": [1, 2]}, ()),
        "raise": (1, {"": [1, 2]}, ()),
        "fork": (0, {"": [1, 2]}, ()),
        "two": (0, {"a": [1, 2], "b": [1, 2, 3]}, ()),
        "skipped": (0, {"": [1]}, ("step 2, which the interval skipped, is not saved", "close()")),
        "full": (1, {"": []}, ()),
    }
    children = {how: start(str(tmp_path / how), how) for how in expected}
    for how, (status, folders, parts) in expected.items():
        found, output, errors = end(children[how])
        assert found == status, output
        for folder, steps in folders.items():
            assert find_steps(tmp_path / how / folder) == steps, output
            assert all(finding.intact for finding in verify(tmp_path / how / folder)) if steps else True
        assert len(errors) == (1 if parts else 0), output
        for part in parts:
            assert part in errors[0]
