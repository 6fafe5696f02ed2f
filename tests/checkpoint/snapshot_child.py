"""Saves two steps, and copies the folder before each change that Python makes to it during the second: see test_kill.py."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sys
import threading
from typing import Any

from checkpoint_feeds import CountingFeed
from checkpoint_trees import make_mesh
from kill_child import state_of

from meshfeed.checkpoint import Checkpointer

CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def watch(folder: pathlib.Path, copies: pathlib.Path) -> None:
    """Copies ``folder`` to ``copies/0``, ``copies/1``, …: what a process that is killed at that moment leaves."""
    lock, copying = threading.Lock(), threading.local()

    def before(event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES or str(folder) not in str(args[0]) or getattr(copying, "here", False):
            return
        if event == "open" and not set(str(args[1])) & set("wax+"):
            return
        copying.here = True
        with lock, contextlib.suppress(FileNotFoundError, shutil.Error):  # another thread goes on
            shutil.copytree(folder, copies / str(len(list(copies.iterdir()))))
        copying.here = False

    sys.addaudithook(before)


def main(folder: str, copies: str) -> None:
    mesh, feed = make_mesh(4, 2), CountingFeed()
    with Checkpointer(folder, save_interval_steps=1, max_to_keep=1) as ckpt:
        for step in (1, 2):
            next(feed)
            ckpt.save(step, state_of(step, mesh), feed)
            ckpt.wait()
            if step == 1:
                watch(pathlib.Path(folder), pathlib.Path(copies))


if __name__ == "__main__":
    main(*sys.argv[1:])
