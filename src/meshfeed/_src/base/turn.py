"""One caller at a time: a second ``next`` on another thread, or in a signal handler, raises instead of sharing a batch.

A lock would not do. An interrupt between ``acquire`` and the statement after it would leave the lock taken for ever, and
``release`` is a call, at which an interrupt could lose the batch that is about to be returned. A turn is therefore an
entry of a dict: ``setdefault`` takes it, and a caller recognizes its own by identity::

    mine = object()
    held = {TURN: mine}
    try:
        if turn.setdefault(TURN, mine) is not mine:
            raise in_use(name)
        ...
    finally:  # no call: an interrupt cannot split it
        if turn == held:
            del turn[TURN]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from meshfeed._src.base.errors import MeshfeedError, hides_own_frames

TURN = "turn"
P = ParamSpec("P")


class TakesTurns(Protocol):
    """What :func:`in_turn` needs of an iterator."""

    name: str
    _turn: dict[str, object]


S = TypeVar("S", bound=TakesTurns)


def in_use(name: str) -> MeshfeedError:
    """Returns the error for a call during another one; ``name`` is that of the feed."""
    return MeshfeedError(
        f"{name}: next, or what moves or starts the feed, was called while another such call was running, on another thread "
        "or below a signal handler. One caller at a time may use a feed: call it from one thread, or hold a lock around "
        "each call."
    )


def in_turn(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Makes a method without a result raise :func:`in_use` during another call, and hide own frames from its errors.

    Not for ``next``: an interrupt in the frame of the decorator would lose the batch.
    """
    method = hides_own_frames(method)  # names an argument that the method does not take

    @hides_own_frames
    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> None:
        turn, mine = self._turn, object()
        held = {TURN: mine}
        try:
            if turn.setdefault(TURN, mine) is not mine:
                raise in_use(self.name)
            method(self, *args, **kwargs)
        finally:
            if turn == held:
                del turn[TURN]

    return call
