"""A feed in the form that checkpoint code of other libraries takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from meshfeed._src.base.fork import NotCopied
from meshfeed._src.base.hooks import Resumable
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.state.files import Checkpointable


class ResumableIterator(Resumable, Protocol):
    """The methods of a feed that :class:`LocalIterator` needs."""

    def __iter__(self) -> Iterator[PyTree]: ...

    def __next__(self) -> PyTree: ...


class LocalIterator(Checkpointable, NotCopied):
    """A feed as the local iterator that checkpoint code written for Grain, MaxText or Orbax v1 expects."""

    def __init__(self, feed: ResumableIterator) -> None:
        self._feed = feed

    def __iter__(self) -> LocalIterator:
        iter(self._feed)
        return self

    def __next__(self) -> PyTree:
        return next(self._feed)

    def get_state(self) -> JsonValue:
        """Returns the feed's state after the last delivered batch."""
        return self._feed.get_state()

    def set_state(self, state: JsonValue) -> None:
        """Sets the feed's state; discards its read-ahead."""
        self._feed.set_state(state)
