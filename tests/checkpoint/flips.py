"""One flipped bit in a file of a step: what a restore and ``verify`` make of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from checkpoint_feeds import CountingFeed
from checkpoint_trees import assert_same

from meshfeed._src.base.errors import CheckpointError
from meshfeed.checkpoint import Checkpointer, verify


@contextlib.contextmanager
def flipped(path: Any, rng: np.random.Generator) -> Iterator[None]:
    """Flips a bit of a file, and puts the file back."""
    whole = path.read_bytes()
    damaged, bit = bytearray(whole), int(rng.integers(len(whole) * 8))
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(damaged))
    yield
    path.write_bytes(whole)


def is_refused(ckpt: Checkpointer, tree: Any) -> bool:
    """Whether step 1 is refused; otherwise it is ``tree`` and a feed after its first batch, of 4 records."""
    feed = CountingFeed()
    try:
        _, restored = ckpt.restore(tree, feed, step=1)
    except CheckpointError:
        assert feed.position == 0
        return True
    assert_same(tree, restored)
    assert feed.position == 4
    return False


def is_noticed(directory: Any) -> bool:
    """Whether ``verify`` objects to step 1."""
    return not verify(directory, 1)[0].intact
