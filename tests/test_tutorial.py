"""The tutorial, as a reader would follow it: files are written, commands are run, and what is shown must come out."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from meshfeed._src.testing.hosts import free_port

pytestmark = pytest.mark.multihost

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tutorial.md"


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(script: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs commands in one shell, as typed; the variables that the page sets are set."""
    tools = folder / ".tools"  # the page's `python` and `meshfeed` are those that run this test
    tools.mkdir(exist_ok=True)
    for name, command in (("python", ""), ("meshfeed", " -m meshfeed._src.cli.main")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{command} "$@"\n')
        (tools / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env["PATH"] = f"{tools}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), env.get("PYTHONPATH")]))
    return subprocess.run(
        ["bash", "-e", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )


@pytest.mark.timeout(900)
def test_every_block_does_what_the_page_says(tmp_path: pathlib.Path) -> None:
    exports, pending, shown = "", "", 0
    for language, content in blocks(PAGE.read_text()):
        if language == "python":
            name = re.match(r"# (\S+\.py)\n", content)
            assert name, f"a Python block begins with its file's name:\n{content}"
            (tmp_path / name[1]).write_text(content.replace("127.0.0.1:8476", f"127.0.0.1:{free_port()}"))
        elif language == "sh" and content.startswith("export "):
            exports += content
        elif language == "sh":
            ended = run(exports + content, tmp_path)
            assert ended.returncode == 0, f"{content}\n{ended.stdout}\n{ended.stderr}"
            pending = ended.stdout
        else:
            assert language == "text", language
            assert pending == content
            shown += 1
    assert shown >= 6


def test_the_block_reader_finds_them() -> None:
    assert blocks("a\n```sh\nx\n```\n\n```text\n```\n") == [("sh", "x\n"), ("text", "")]
