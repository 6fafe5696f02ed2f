"""A feed's membership in the hosts over one sharding: their handshakes, and the heartbeat of this host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from meshfeed._src.agreement import heartbeat
from meshfeed._src.agreement.handshake import Handshake
from meshfeed._src.base.coordination import call_briefly
from meshfeed._src.base.fork import finalize


class Membership:
    """Membership of this host, which may also be none: with a single host, and on a host outside the sharding.

    ``scope`` is the key prefix of the feed over these hosts.
    """

    def __init__(self, scope: str, participants: Sequence[int]) -> None:
        self.scope = scope
        self.handshake = Handshake(scope, participants)
        self._heartbeat: heartbeat.Member | None = None

    @property
    def participants(self) -> Sequence[int]:
        """Process indices of the hosts, ascending."""
        return self.handshake.participants

    def join(self, feed: object) -> None:
        """Begins the heartbeat; the membership ends with ``feed``, if it is dropped without close."""
        if not self.handshake.needed:
            return
        # Runs after the pipeline's finalizer, which is registered later.
        finalize(feed, self.handshake.leave, "dropped its feed")
        self._heartbeat = heartbeat.Member(self.participants)
        # On a thread of its own: a feed may be collected while this one adds or removes another, and holds the lock for that.
        leave = functools.partial(call_briefly, self._heartbeat.leave, name="meshfeed-leave-heartbeat", at_exit=True)
        finalize(feed, leave)

    def on_beat(self, call: Callable[[], object]) -> None:
        """Sets what is called with each heartbeat; must not refer to the feed."""
        if self._heartbeat is not None:
            self._heartbeat.on_beat = call

    def tell(self, text: str) -> None:
        """Has the other hosts log a line, though they may wait in a collective."""
        if self._heartbeat is not None:
            heartbeat.tell(text)

    def leave(self, notice: str, *, awaited: bool = False) -> None:
        """Ends the membership; see :meth:`Handshake.leave`. Idempotent."""
        self.handshake.leave(notice, awaited=awaited)
        if self._heartbeat is not None:
            self._heartbeat.leave()
