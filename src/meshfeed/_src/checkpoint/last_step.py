"""The last step that the interval skipped, kept by reference until it is saved at the end, or proves to be gone."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshfeed._src.checkpoint.digests import digest


def number_of(feed: Any, name: str) -> int | None:
    """An attribute of a feed as an int; None if the feed is None or has no such number."""
    value = getattr(feed, name, None)
    return None if value is None else int(value)


def _place_of(feed: Any) -> Any:
    """What changes when a feed delivers a batch: its numbers, which cost nothing, or else its state."""
    if feed is None:
        return None
    numbers = (number_of(feed, "step"), number_of(feed, "position"))
    return feed.get_state() if numbers == (None, None) else numbers


class SkippedStep:
    """A training state and a feed as they were at one step. Nothing is copied, so :meth:`problem` compares.

    Args:
      step: the caller's number.
      train_state: its leaves are kept; its containers may change.
      feed: or None.
    """

    def __init__(self, step: int, train_state: Any, feed: Any) -> None:
        self.step = step
        self.feed = feed
        self._leaves, self._structure = jax.tree_util.tree_flatten(train_state)
        self._host_digests = self._digests()
        self._place = _place_of(feed)

    @property
    def train_state(self) -> Any:
        """The tree that was given."""
        return jax.tree_util.tree_unflatten(self._structure, self._leaves)

    def _digests(self) -> list[str]:
        # numpy arrays are often written in place; a digest of one costs less than a copy
        arrays = [leaf for leaf in self._leaves if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject]
        return [digest(array) for array in arrays]

    def problem(self) -> str | None:
        """Why the step cannot be saved any more; None if it can."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.train_state):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                return f"leaf {jax.tree_util.keystr(path)} was donated or deleted since"
        if self._digests() != self._host_digests:
            return "a numpy leaf was changed since"
        if _place_of(self.feed) != self._place:
            return "the feed has moved on since"
        return None
