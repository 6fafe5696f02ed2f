"""Saves a step and ends without ``close``: ``exit_child.py DIRECTORY HOW [HOST PORT]``."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

import jax
import jax.numpy as jnp

from meshfeed._src.checkpoint import handlers
from meshfeed.checkpoint import Checkpointer

logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
_written = handlers.write_part


def slow(*args: object, **content: object) -> None:
    """Still writes when the main thread ends."""
    time.sleep(1.0)
    _written(*args, **content)


def full(*args: object, **content: object) -> None:
    """The disk is full."""
    time.sleep(0.5)
    raise OSError(28, "No space left on device")


def save(directory: str, interval: int = 1) -> Checkpointer:
    """Saves step 1, and then step 2 if the interval permits."""
    state = {"w": jnp.ones(8)}
    ckpt = Checkpointer(directory, save_interval_steps=interval)
    for step in (1, 2):
        ckpt.save(step, state)
    return ckpt


def main(directory: str, how: str, host: str = "", port: str = "") -> None:
    """Ends as ``how`` says."""
    if host:
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(host))
    handlers.write_part = full if how == "full" else slow
    if how == "two":
        save(directory + "/a")  # collected before the end
        kept = save(directory + "/b")
        kept.save(3, {"w": jnp.ones(8)})
    elif how == "thread":
        threading.Thread(target=lambda: (time.sleep(0.5), save(directory))).start()
    elif how == "closed":
        save(directory).close()
    else:
        kept = save(directory, 10 if how == "skipped" else 1)
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError("of the program")
    if how == "fork" and (child := os.fork()):
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
