"""Keeps the last step that the interval skipped, by reference, to save it at the end if it is still unchanged."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshfeed._src.checkpoint.digests import digest


def number_of(feed: Any, name: str) -> int | None:
    """Returns an attribute of a feed as an int, or None if the feed is None or has no such number."""
    value = getattr(feed, name, None)
    return None if value is None else int(value)


def _feed_marker(feed: Any) -> Any:
    """Returns a value that changes when a feed delivers a batch: its counters, which are cheap, otherwise its state."""
    if feed is None:
        return None
    numbers = (number_of(feed, "step"), number_of(feed, "position"))
    return feed.get_state() if numbers == (None, None) else numbers


class SkippedStep:
    """A training state and a feed at one step. Nothing is copied, so :meth:`problem` checks for later changes.

    Args:
      step: the caller's step number.
      train_state: pytree; its leaves are kept by reference, its containers may change.
      feed: the feed, or None.
    """

    def __init__(self, step: int, train_state: Any, feed: Any) -> None:
        self.step = step
        self.feed = feed
        self._leaves, self._structure = jax.tree_util.tree_flatten(train_state)
        self._host_digests = self._digests()
        self._feed_marker = _feed_marker(feed)

    @property
    def train_state(self) -> Any:
        """The tree as it was given."""
        return jax.tree_util.tree_unflatten(self._structure, self._leaves)

    def _digests(self) -> list[str]:
        # numpy arrays are often written in place; a digest costs less than a copy
        arrays = [leaf for leaf in self._leaves if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject]
        return [digest(array) for array in arrays]

    def problem(self) -> str | None:
        """Returns why the step can no longer be saved, or None if it can."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.train_state):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                return f"leaf {jax.tree_util.keystr(path)} was donated or deleted since"
        if self._digests() != self._host_digests:
            return "a numpy leaf was changed since"
        if _feed_marker(self.feed) != self._feed_marker:
            return "the feed has moved on since"
        return None
