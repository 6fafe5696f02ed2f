"""The pages, as a reader would follow them: each block is run as it stands, and what is shown as output must come out.

Blocks of a page run in order, in an empty folder and on eight CPU devices:

- ``python`` runs in this process, with the names of the page's earlier blocks. A block that begins with ``# name.py`` is
  written to that file instead.
- ``bash`` runs in a shell; variables that a block exports stay set.
- ``text`` is the output of the block before it; before any other block it is a drawing.
- ``sh`` holds commands that cannot run here (an installation, a cluster's): their files must exist.
- ``py`` is Python that cannot run here (it needs an account): it must compile.
- Blocks without a language are excerpts of logs and folders, or drawings.

No line of a block is longer than what the site shows without scrolling on a screen of 1280 pixels.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import pytest

from meshfeed._src.testing.hosts import cpu_environment, free_port

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {"docs/how-to/tfds-and-tf-data.md": "tensorflow"}  # extras that not every environment of the tests has
DATA = {  # what only a library outside the test environment can write: page → name in its folder → folder to copy
    "docs/how-to/migrate-from-mosaic-streaming.md": {"train": "tests/data/formats/mds_zstd"},
}
PORT = "127.0.0.1:8476"
LONGEST = 119  # of the columns that docs/assets/site.css makes room for
COMMANDS = ("git", "cd", "kubectl", "meshfeed", "pip", "python", "ray", "sbatch")


class Block(NamedTuple):
    language: str
    content: str
    line: int  # of its first line, counted from 1


def blocks(text: str) -> list[Block]:
    """Each fenced block, in order."""
    found = re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match[1], match[2], text.count("\n", 0, match.start()) + 2) for match in found]


def name(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


class Page:
    """Runs one page in the current folder."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.port = f"127.0.0.1:{free_port()}"
        self.names: dict[str, object] = {"__name__": "__main__"}
        self.exports = ""
        self.output: str | None = None  # of the last block that ran
        self.num_shown = 0
        tools = pathlib.Path(".tools")  # the page's `python` and `meshfeed` are those that run this test
        tools.mkdir()
        for tool, command in (("python", ""), ("meshfeed", " -m meshfeed")):
            (tools / tool).write_text(f'#!/bin/sh\nexec "{sys.executable}"{command} "$@"\n')
            (tools / tool).chmod(0o755)

    def run(self) -> None:
        for block in blocks(self.path.read_text()):
            block = block._replace(content=block.content.replace(PORT, self.port))
            if block.language == "python":
                self.output = self.run_python(block)
            elif block.language == "bash":
                self.output = self.run_bash(block)
            elif block.language == "text" and self.output is not None:
                assert self.output == block.content, f"{name(self.path)}:{block.line}"
                self.num_shown += 1

    def run_python(self, block: Block) -> str:
        if file := re.match(r"# ([\w./-]+\.py)\n", block.content):
            pathlib.Path(file[1]).write_text(block.content)
            return ""
        code = compile("\n" * (block.line - 1) + block.content, str(self.path), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            try:
                exec(code, self.names)
            except BaseException:
                pytest.fail(f"{name(self.path)}:\n{traceback.format_exc()}", pytrace=False)
        return output.getvalue()

    def run_bash(self, block: Block) -> str:
        if all(line.startswith("export ") for line in block.content.splitlines()):
            self.exports += block.content
            return ""
        env = dict(os.environ) | cpu_environment(8)
        env["PATH"] = f"{pathlib.Path('.tools').resolve()}{os.pathsep}{env['PATH']}"
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), env.get("PYTHONPATH")]))
        ended = subprocess.run(
            ["bash", "-e", "-c", self.exports + block.content], env=env, capture_output=True, text=True, timeout=600
        )
        place = f"{name(self.path)}:{block.line}"
        assert ended.returncode == 0, f"{place}\n{block.content}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout


def runnable() -> list[object]:
    found: list[object] = []
    for page in PAGES:
        languages = {block.language for block in blocks(page.read_text())}
        if languages & {"python", "bash"}:
            marks = [pytest.mark.multihost] if "bash" in languages else []
            found.append(pytest.param(page, id=name(page), marks=marks))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.parametrize("path", runnable())
def test_every_block_does_what_the_page_says(
    path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library := NEEDS.get(name(path)):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    for file, source in DATA.get(name(path), {}).items():
        shutil.copytree(ROOT / source, tmp_path / file)
    page = Page(path)
    try:
        page.run()
    finally:
        page.names.clear()
        gc.collect()
        if orbax := sys.modules.get("orbax.checkpoint"):  # a page registers ours
            orbax.type_handlers.register_type_handler(jax.Array, orbax.type_handlers.ArrayHandler(), override=True)
    assert page.num_shown >= (6 if path.stem == "tutorial" else 0)


@pytest.fixture
def _nothing_left() -> Iterator[None]:
    """Takes back what a page registers: listeners of jax.monitoring, and files in fsspec's memory."""
    taken: list[Callable[[], None]] = []

    def noted(register: Callable[..., None], unregister: Callable[..., None]) -> Callable[..., None]:
        def call(listener: Callable[..., None]) -> None:
            register(listener)
            taken.append(lambda: unregister(listener))

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind, undo in (("scalar", "scalar"), ("event_duration_secs", "event_duration")):
            register, unregister = (
                getattr(jax.monitoring, f"{verb}_listener") for verb in (f"register_{kind}", f"unregister_{undo}")
            )
            patch.setattr(jax.monitoring, f"register_{kind}_listener", noted(register, unregister))
        yield
    for undo_it in taken:
        undo_it()
    if memory := sys.modules.get("fsspec.implementations.memory"):
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]


def test_no_block_is_of_a_kind_that_is_not_run() -> None:
    for page, block in [(path, block) for path in PAGES for block in blocks(path.read_text())]:
        assert block.language in ("python", "bash", "text", "sh", "py", "yaml", "diff", ""), (
            f"{name(page)}:{block.line}"
        )
        if block.language == "py":
            compile(block.content, f"{name(page)}:{block.line}", "exec")
        if block.language == "":
            first = block.content.split(maxsplit=1)[0]
            assert first not in (*COMMANDS, "import", "from"), f"{name(page)}:{block.line} is code; name its language"
        if block.language == "sh":
            for line in block.content.replace("\\\n", " ").splitlines():
                command = shlex.split(line, comments=True)
                assert command[0] in COMMANDS or (ROOT / command[0]).is_file(), f"{name(page)}:{block.line}: {line}"
                files = [word for word in command if word.startswith("examples/")]
                assert all((ROOT / word).is_file() for word in files), f"{name(page)}:{block.line}: {line}"


def test_no_line_of_code_is_cut_on_the_site() -> None:
    long = [
        f"{name(page)}:{block.line + number}: {len(line)} columns"
        for page in PAGES
        for block in blocks(page.read_text())
        if block.language in ("python", "py", "bash", "sh", "")
        for number, line in enumerate(block.content.splitlines())
        if len(line) > LONGEST
    ]
    assert not long


def test_libraries_of_pages_are_optional_ones() -> None:
    assert {*NEEDS, *DATA} <= {name(page) for page in PAGES}


def test_the_block_reader_finds_them() -> None:
    assert blocks("a\n```sh\nx\n```\n\n```text\n```\n") == [Block("sh", "x\n", 3), Block("text", "", 7)]
