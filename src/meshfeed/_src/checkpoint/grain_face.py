"""A feed in the shape of a Grain iterator, for checkpoint managers that take nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from meshfeed._src.base.names import public


class GrainIteratorFace:
    """What Orbax's peer-to-peer manager and Grain's own handlers save and restore: a state as bytes."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._feed)

    def get_state(self) -> bytes:
        """The feed's state as JSON text."""
        return json.dumps(self._feed.get_state()).encode()

    def set_state(self, state: bytes) -> None:
        """Sets it in place."""
        self._feed.set_state(json.loads(state))


@public("meshfeed.checkpoint")
def as_grain_iterator(feed: Any) -> GrainIteratorFace:
    """``feed`` as an iterator with Grain's interface, state and all.

    ::

        manager.save(step, args=p2p.args.Composite(
            state=…, data_iter=grain.checkpoint.CheckpointSave(as_grain_iterator(feed))))

    Such managers keep one state a process, so a stream is continued on as many hosts as it was saved on; where a
    manager takes any Orbax handler, use :class:`IteratorHandler`.
    """
    return GrainIteratorFace(feed)
