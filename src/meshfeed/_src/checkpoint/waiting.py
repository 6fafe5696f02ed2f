"""Waits for Orbax's save in the background, though Ctrl-C may arrive."""

from __future__ import annotations

import contextlib

import orbax.checkpoint as ocp

from meshfeed._src.base.threads import SingleCall


def wait_until_finished(manager: ocp.CheckpointManager) -> None:
    """Waits until the manager has committed what it saves, and raises the error of the save.

    Orbax joins its thread. If Ctrl-C arrives there, CPython before 3.13 takes that thread for ended, so later waits return at
    once, also the one at exit, and the save is lost; and Orbax forgets the step. So another thread waits first.

    Raises:
      Exception: the save failed.
    """
    with contextlib.suppress(Exception):  # raised below; or the interpreter ends, and no thread can be started any more
        SingleCall(manager.wait_until_finished, "meshfeed-wait-for-save").result()
    manager.wait_until_finished()
