"""What a Checkpointer keeps of a feed and a training state: by value for a save, by reference for a step not saved yet."""

from __future__ import annotations

import jax
import numpy as np

from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.checkpoint.handlers import HasState
from meshfeed._src.checkpoint.stored import digest


def number_of(feed: HasState | None, name: str) -> int | None:
    """Returns an attribute of a feed as an int, or None if the feed is None or has no such number."""
    value = getattr(feed, name, None)
    return None if value is None else int(value)


def _feed_marker(feed: HasState | None) -> JsonValue:
    """Returns a value that changes when a feed delivers a batch: its counters, which are cheap, or else its state."""
    if feed is None:
        return None
    numbers = (number_of(feed, "step"), number_of(feed, "position"))
    return feed.get_state() if numbers == (None, None) else numbers


class SkippedStep:
    """A training state and a feed at one step.

    Nothing is copied, because a copy at every step would need memory for a second train state. So :meth:`problem` checks
    for later changes.
    """

    def __init__(self, step: int, train_state: PyTree, feed: HasState | None) -> None:
        self.step = step
        self.feed = feed
        self._leaves, self._structure = jax.tree_util.tree_flatten(train_state)
        self._host_digests = self._digests()
        self._feed_marker = _feed_marker(feed)

    @property
    def train_state(self) -> PyTree:
        """The tree as it was passed."""
        return jax.tree_util.tree_unflatten(self._structure, self._leaves)

    def _digests(self) -> list[str]:
        # Numpy arrays are often written in place; a digest costs less than a copy.
        return [digest(x) for x in self._leaves if isinstance(x, np.ndarray) and not x.dtype.hasobject]

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


class CapturedState:
    """The state of a feed at the time of a save.

    Args:
      state: the result of the feed's ``get_state``.
    """

    def __init__(self, state: dict[str, JsonValue]) -> None:
        self._state = state

    def get_state(self) -> dict[str, JsonValue]:
        """Returns the state."""
        return self._state
