"""Saves one step after another until it is killed; says which are committed. Run by test_kill.py."""

from __future__ import annotations

import sys

import numpy as np
from checkpoint_feeds import CountingFeed
from checkpoint_trees import make_mesh, place

from meshfeed.checkpoint import Checkpointer


def state_of(step: int, mesh):
    """What the state is at a step."""
    values = np.random.default_rng(step).integers(0, 1 << 30, (256, 512)).astype(np.int32)
    return {"w": place(values, mesh, None, "model"), "host": np.full(100, step), "step": step}


def main(directory: str) -> None:
    mesh, feed = make_mesh(4, 2), CountingFeed(records=10**9)
    with Checkpointer(directory, save_interval_steps=1, max_to_keep=3) as ckpt:
        step, _ = ckpt.restore(state_of(0, mesh), feed)
        while True:
            step += 1
            next(feed)
            ckpt.save(step, state_of(step, mesh), feed)
            if step % 2:  # the others overlap with the next save
                ckpt.wait()
                print(step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
