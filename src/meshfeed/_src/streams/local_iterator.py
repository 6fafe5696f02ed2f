"""Adapts a feed to the local iterator that checkpoint code written for Grain or MaxText expects."""

from __future__ import annotations

from typing import Any


class LocalIterator:
    """``next``, ``get_state`` and ``set_state`` of a feed; the state is that of the last delivered batch.

    Args:
      feed: the feed.
    """

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def __iter__(self) -> LocalIterator:
        iter(self._feed)
        return self

    def __next__(self) -> Any:
        return next(self._feed)

    def get_state(self) -> dict[str, Any]:
        """Returns the feed's state."""
        return self._feed.get_state()

    def set_state(self, state: Any) -> None:
        """Sets the feed's state; discards its read-ahead."""
        self._feed.set_state(state)
