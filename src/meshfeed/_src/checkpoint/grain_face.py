"""Adapts a feed to Grain's iterator interface, for checkpoint managers that accept only Grain iterators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from meshfeed._src.base.names import public


class GrainIteratorFace:
    """The interface that Orbax's peer-to-peer manager and Grain's own handlers expect: a state as bytes."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._feed)

    def get_state(self) -> bytes:
        """Returns the feed's state as JSON bytes."""
        return json.dumps(self._feed.get_state()).encode()

    def set_state(self, state: bytes) -> None:
        """Sets the feed's state in place, from JSON bytes."""
        self._feed.set_state(json.loads(state))


@public("meshfeed.checkpoint")
def as_grain_iterator(feed: Any) -> GrainIteratorFace:
    """Wraps ``feed`` as an iterator with Grain's interface, including its state.

    ::

        manager.save(step, args=p2p.args.Composite(
            state=…, data_iter=grain.checkpoint.CheckpointSave(as_grain_iterator(feed))))

    Such managers keep one state per process, so a stream can resume only on as many hosts as it was saved on. If a
    manager accepts any Orbax handler, use :class:`IteratorHandler`.
    """
    return GrainIteratorFace(feed)
