"""When a wait is long enough to do something about it: to log who is late, and to give up on a host that has failed."""

from __future__ import annotations

import time


def late_seconds(timeout_seconds: float) -> float:
    """Returns the seconds of a wait after which the log names who is late."""
    return min(30.0, timeout_seconds / 4)


class Reminder:
    """Is due after some seconds of a wait, then after twice as many, and so on."""

    def __init__(self, seconds: float) -> None:
        self._next = seconds

    def due(self, waited: float) -> bool:
        """Whether ``waited`` seconds have brought up the next entry."""
        if waited < self._next:
            return False
        self._next *= 2
        return True


class Grace:
    """How long something may last that may still pass, such as the failure of a host that recovers."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def is_over(self, lasts: bool) -> bool:
        """Whether it has lasted for too long; call it again and again. It begins anew if it no longer ``lasts``."""
        now = time.monotonic()
        self._since = (now if self._since is None else self._since) if lasts else None
        return self._since is not None and now - self._since > self._seconds
