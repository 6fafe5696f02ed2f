"""Bounded read-ahead in one thread, in order, with the producer's exception as the last item."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from meshfeed._src.base.errors import MeshfeedError
from meshfeed._src.base.threads import Background, WakeUp

_log = logging.getLogger("meshfeed.prefetch")
_JOIN_SECONDS = 10.0
T = TypeVar("T")


class Closed(MeshfeedError):
    """The read-ahead was closed while somebody waited for it."""


class ReadAhead(Generic[T]):
    """Runs ``produce`` ahead of the caller in one daemon thread.

    An item is looked at with :meth:`peek` and taken off with :meth:`pop`, so that an interrupt in between loses
    nothing. The exception that ``produce`` ends with (StopIteration included) comes after the items before it, and
    again at each further ``peek``.

    Args:
      produce: gives the next item; called from the thread only, never again after it raised.
      depth: gives the number of items kept ready, at least 1.
      name: of the thread.
    """

    def __init__(self, produce: Callable[[], T], *, depth: Callable[[], int], name: str) -> None:
        self._produce = produce
        self._depth = depth
        self._name = name
        self._items: collections.deque[T] = collections.deque()
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._closed = False
        self._arrived, self._room = WakeUp(), WakeUp()
        self._thread = Background(self._run, name)

    def start(self) -> None:
        """Starts the thread. An interrupted call can be made again."""
        self._thread.start()

    def _has_room(self) -> bool:
        return len(self._items) < self._depth()

    def _run(self) -> None:
        while True:
            while not self._closed and not self._has_room():
                self._room.wait(lambda: self._closed or self._has_room())
            if self._closed:
                return
            try:
                item = self._produce()
            except BaseException as error:
                self._traceback = error.__traceback__
                self._error = error
                self._arrived.ring()
                return
            self._items.append(item)
            del item  # taken off, it must not live on here
            self._arrived.ring()

    @property
    def ready(self) -> bool:
        """Whether :meth:`peek` need not wait for an item."""
        return bool(self._items)

    def peek(self, tick: Callable[[float], None] | None = None) -> T:
        """Waits for the next item and leaves it where it is.

        Args:
          tick: called about twice a second with the seconds waited so far; may raise.

        Raises:
          What ``produce`` raised, once the items before it are taken; Closed after :meth:`stop`.
        """
        start = 0.0
        while True:
            if self._closed:
                raise Closed("the feed was closed")
            error = self._error  # read before the items: it comes after the last of them
            if self._items:
                try:
                    return self._items[0]
                except IndexError:  # closed by another thread, a moment ago
                    continue
            if error is not None:
                raise error.with_traceback(self._traceback)  # or each call would add to it
            self._room.ring()  # should an interrupt have come between taking an item off and saying so
            if not start:
                start = time.monotonic()
            elif tick is not None:
                tick(time.monotonic() - start)
            self._arrived.wait(lambda: self._items or self._error or self._closed)

    def pop(self, item: T) -> None:
        """Takes ``item`` off if it is still the next; an interrupted call can be made again."""
        try:
            if self._items[0] is item:
                self._items.popleft()
        except IndexError:  # taken off before, or closed by another thread since
            pass
        self._room.ring()

    def stop(self) -> None:
        """Tells the thread to end, without waiting for it."""
        self._closed = True
        self._items.clear()
        self._arrived.ring()
        self._room.ring()

    def join(self) -> None:
        """Waits for the thread after :meth:`stop`."""
        if not self._thread.join(_JOIN_SECONDS):
            _log.warning(
                "thread %s is still in a read of the source %.0f s after close; it ends with that read",
                self._name,
                _JOIN_SECONDS,
            )
