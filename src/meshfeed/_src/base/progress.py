"""The progress of resumes that drop records.

A resume that reads and drops records may take minutes without being a stall. Records are dropped deep inside sources, in
``set_state`` methods whose only argument is the state. Threads of this process and other hosts wait for all of them alike,
so there is one :data:`PROGRESS` per process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_TELL_SECONDS = 1.0


class Progress:
    """The latest progress of reading and dropping in this process; written and read by any thread."""

    def __init__(self) -> None:
        self._latest: object = None
        self._moved_at = self._told_at = float("-inf")
        self.tell: Callable[[str], object] | None = None
        """In a child process: sends the text to the parent; called at most once per second."""

    def moved(self, what: object) -> None:
        """Records progress of ``what``, which ``str(what)`` describes."""
        self._latest, self._moved_at = what, time.monotonic()
        if self.tell is not None and self._moved_at - self._told_at >= _TELL_SECONDS:
            self._told_at = self._moved_at
            self.tell(str(what))

    def ended(self, what: object) -> None:
        """Records that ``what`` has ended or failed."""
        if self._latest is what:
            self._latest = None

    def idle_seconds(self) -> float:
        """Returns the seconds since the last progress."""
        return time.monotonic() - self._moved_at

    def __str__(self) -> str:
        """Describes the latest progress; empty if nothing is being dropped."""
        return "" if (latest := self._latest) is None else str(latest)


PROGRESS = Progress()


class Dropping:
    """Reports the progress of a ``with`` block that resumes ``what``, such as ``lane 3``, by dropping records."""

    def __init__(self, what: str, total: int, unit: str = "records") -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = 0

    def add(self, count: int = 1) -> None:
        """Counts dropped records."""
        self._done += count
        PROGRESS.moved(self)

    def __str__(self) -> str:
        return f"resuming {self._what}: dropped {self._done:,} of {self._total:,} {self._unit}"

    def __enter__(self) -> Dropping:
        self.add(0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        PROGRESS.ended(self)
