"""Wake-ups between threads that an interrupt cannot leave locked, and whose waits end in time."""

from __future__ import annotations

import _thread
from collections.abc import Callable

TICK_SECONDS = 0.5
"""Waits wake up this often, to call tick functions and to look again."""


class Signal:
    """Wakes one of the threads that wait for it, which may pass it on; the others look again when their time is up.

    A bare lock, held until :meth:`set`. ``threading.Event`` contains a ``Condition``, which an interrupt can leave locked.
    ``queue.SimpleQueue.get(timeout=…)`` may never return if several threads wait (CPython 3.11 to 3.13): one that finds
    the item taken computes how long it may still wait, and after its deadline the negative result means no limit.
    """

    def __init__(self) -> None:
        self._unset = _thread.allocate_lock()
        self._unset.acquire()

    def set(self) -> None:
        """Lets one :meth:`wait` return at once: the present one, or the next."""
        try:
            self._unset.release()
        except RuntimeError:  # set already
            pass

    def wait(self, seconds: float = TICK_SECONDS) -> None:
        """Waits for :meth:`set`. May return early; check the condition again."""
        self._unset.acquire(timeout=max(0.0, seconds))


class WakeUp:
    """A wake-up event for a single waiting thread.

    Replaces ``threading.Condition``, whose notify takes a lock and walks a list of waiters in Python. Two threads that
    pass a batch every 0.5 ms, and share the GIL with the reads, lose a tenth of their time to that. Usually no thread
    is waiting, and :meth:`ring` only checks a flag.
    """

    def __init__(self) -> None:
        self._signal = Signal()
        self._waiting = False

    def ring(self) -> None:
        """Wakes the waiting thread, if any. Call it after changing the condition that the thread waits for."""
        if self._waiting:
            self._waiting = False
            self._signal.set()

    def wait(self, until: Callable[[], object], seconds: float = 60.0) -> None:
        """Waits for :meth:`ring`, unless ``until()`` is true already. May return early; check the condition again."""
        self._waiting = True
        if not until():  # checked after setting the flag: a thread that changes the condition from now on rings
            self._signal.wait(min(TICK_SECONDS, seconds))
        self._waiting = False
