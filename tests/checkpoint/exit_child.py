"""Saves a step and ends without ``close``: ``exit_child.py DIRECTORY HOW [HOST PORT]``."""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp

from meshfeed._src.checkpoint import array_handler, handlers
from meshfeed.checkpoint import Checkpointer

_written = handlers.write_part


def slow(*args: object, **content: object) -> None:
    """Still writes when the main thread ends."""
    time.sleep(1.0)
    _written(*args, **content)


def full(*args: object, **content: object) -> None:
    """The disk is full."""
    time.sleep(0.5)
    raise OSError(28, "No space left on device")


def save(directory: str, *steps: int, interval: int = 1) -> Checkpointer:
    """Saves steps, as far as the interval permits."""
    ckpt = Checkpointer(directory, save_interval_steps=interval)
    for step in steps:
        ckpt.save(step, {"w": jnp.ones(8)})
    return ckpt


def main(directory: str, how: str, host: str = "", port: str = "") -> None:
    """Ends as ``how`` says."""
    if host:
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(host))
    for module in (array_handler, handlers):
        module.write_part = full if how == "full" else slow
    if how in ("skipped", "full"):
        kept = save(directory, *((1, 2) if how == "skipped" else (1,)), interval=10)
    else:
        save(directory + "/a", 1)  # collected before the end
        kept = save(directory + "/b", 1, 2)  # noqa: F841 # alive at the end
    if how == "exit":
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
