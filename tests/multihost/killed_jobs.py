"""What the hosts of tests/multihost/test_killed_host.py run: one kills itself, the others wait for a log line."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import jax
from feed_jobs import data, mesh_of

import meshfeed

VICTIM = 1
_MOST_SECONDS = 60  # the machine may be loaded


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))


def run(where: str) -> dict[str, object]:
    """Takes steps, in one of which the victim kills itself: "between" steps, or "within" the collective of the others."""
    lines = _Lines()
    logging.getLogger("meshfeed").addHandler(lines)
    mesh = mesh_of("rows")
    total = jax.jit(lambda x: x.sum())
    error = ""
    feed = meshfeed.Feed(
        meshfeed.sources.Memory(data()),
        mesh,
        global_batch_size=2 * jax.device_count(),
        num_epochs=None,
        prefetch=2,
        timeout_seconds=_MOST_SECONDS,
    )
    for _ in range(3):
        jax.block_until_ready(total(jax.tree.leaves(next(feed))[0]))
    time.sleep(5)  # as in a long step: no thread but the heartbeat's has work
    early = [line for _, line in lines.lines if "no sign of life" in line]
    if jax.process_index() == VICTIM:
        if where == "within":
            time.sleep(1)  # the others are in the collective by now
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    if where == "within":
        try:
            jax.block_until_ready(total(jax.tree.leaves(next(feed))[0]))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    named = None
    while named is None and time.monotonic() - start < _MOST_SECONDS:
        time.sleep(0.1)
        named = next((line for line in lines.lines if "no sign of life" in line[1]), None)
    return {
        "early": early,
        "line": named and named[1],
        "seconds": named and named[0] - start,
        "error": error,
    }


def interrupted() -> dict[str, object]:
    """The victim is interrupted where rows move between hosts, and closes its feed; the others wait for it there."""
    from meshfeed._src.arrays import load_once

    lines = _Lines()
    logging.getLogger("meshfeed").addHandler(lines)
    move, armed, here = load_once.RowAssignment.reshard, [False], jax.process_index()

    def interrupt(self, loaded):
        if armed[0] and here == VICTIM:
            raise KeyboardInterrupt
        return move(self, loaded)

    load_once.RowAssignment.reshard = interrupt
    feed = meshfeed.Feed(
        meshfeed.sources.Memory(data()),
        mesh_of("rows"),
        global_batch_size=2 * jax.device_count(),
        num_epochs=None,
        load=[0, 2],
    )
    for _ in range(3):
        jax.block_until_ready(next(feed))
    armed[0], start = True, time.monotonic()
    errors: list[str] = []

    def take() -> None:
        try:
            jax.block_until_ready(next(feed))
        except BaseException as raised:
            errors.append(type(raised).__name__)

    if here == VICTIM:
        take()
        feed.close()
    else:  # the wait for the rows ends only when the victim's process does, or with Gloo's timeout, if it has one
        threading.Thread(target=take, daemon=True).start()
        while time.monotonic() < start + 60 and not any("was interrupted" in line for _, line in lines.lines):
            time.sleep(0.1)
    told = [(when - start, line) for when, line in lines.lines if "was interrupted" in line]
    return {"errors": errors, "told": told}
