"""How far this process has come with a resume that reads and drops records, which may take long and is not a stall.

There is one :data:`PROGRESS` for the process. Records are dropped deep inside sources, in ``set_state`` methods that take
nothing but a state, and the threads that wait for them, in this process and on other hosts, wait for all of it alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_TELL_SECONDS = 1.0


class Progress:
    """The latest sign of life of whatever reads and drops; written and read by any thread."""

    def __init__(self) -> None:
        self._latest: object = None
        self._moved_at = self._told_at = float("-inf")
        self.tell: Callable[[str], object] | None = None
        """In a worker process: passes the text on to the parent, at most once a second."""

    def moved(self, what: object) -> None:
        """``what``, whose text says how far it has come, has come further."""
        self._latest, self._moved_at = what, time.monotonic()
        if self.tell is not None and self._moved_at - self._told_at >= _TELL_SECONDS:
            self._told_at = self._moved_at
            self.tell(str(what))

    def ended(self, what: object) -> None:
        """``what`` has come to its end, or failed."""
        if self._latest is what:
            self._latest = None

    def idle_seconds(self) -> float:
        """Since anything moved."""
        return time.monotonic() - self._moved_at

    def __str__(self) -> str:
        """What moved last and has not ended; empty if nothing is dropped."""
        latest = self._latest
        return "" if latest is None else str(latest)


PROGRESS = Progress()


class Dropping:
    """A ``with`` block in which ``total`` records of ``what`` are read and dropped.

    Args:
      what: is resumed, such as ``lane 3``.
      total: of records, or of what ``unit`` says.
      unit: in the plural.
    """

    def __init__(self, what: str, total: int, unit: str = "records") -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = 0

    def add(self, count: int = 1) -> None:
        """So many more were dropped."""
        self._done += count
        PROGRESS.moved(self)

    def __str__(self) -> str:
        return f"resuming {self._what}: dropped {self._done:,} of {self._total:,} {self._unit}"

    def __enter__(self) -> Dropping:
        self.add(0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        PROGRESS.ended(self)
