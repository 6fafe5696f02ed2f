"""Bounded read-ahead in one thread, in order, with the producer's exception as the last item."""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from meshfeed._errors import MeshfeedError

_log = logging.getLogger("meshfeed.prefetch")
_TICK_SECONDS = 0.5
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
      max_bytes: together with ``size_of``: no further item is produced while the ready ones have this many bytes.
      size_of: bytes of an item.
    """

    def __init__(
        self,
        produce: Callable[[], T],
        *,
        depth: Callable[[], int],
        name: str,
        max_bytes: int | None = None,
        size_of: Callable[[T], int] | None = None,
    ) -> None:
        self._produce = produce
        self._depth = depth
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._items: collections.deque[T] = collections.deque()
        self._bytes_made = 0  # two sums, each written by one thread only
        self._bytes_taken = 0
        self._error: BaseException | None = None
        self._closed = False
        self._arrived, self._room = _Bell(), _Bell()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _has_room(self) -> bool:
        if len(self._items) >= self._depth():
            return False
        return self._max_bytes is None or not self._items or self._bytes_made - self._bytes_taken < self._max_bytes

    def _run(self) -> None:
        while True:
            while not self._closed and not self._has_room():
                self._room.wait(lambda: self._closed or self._has_room())
            if self._closed:
                return
            try:
                item = self._produce()
            except BaseException as error:
                self._error = error
                self._arrived.ring()
                return
            if self._size_of is not None:
                self._bytes_made += self._size_of(item)
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
          What ``produce`` raised, once the items before it are taken; Closed after :meth:`close`.
        """
        start = 0.0
        while True:
            if self._closed:
                raise Closed("the feed was closed")
            error = self._error  # looked at before the items, of which it is the last
            if self._items:
                try:
                    return self._items[0]
                except IndexError:  # closed by another thread, a moment ago
                    continue
            if error is not None:
                raise error
            self._room.ring()  # should an interrupt have come between taking an item off and saying so
            if not start:
                start = time.monotonic()
            elif tick is not None:
                tick(time.monotonic() - start)
            self._arrived.wait(lambda: self._items or self._error or self._closed)

    def pop(self) -> None:
        """Takes off the item that :meth:`peek` gave."""
        try:
            item = self._items.popleft()
        except IndexError:  # closed by another thread since
            return
        if self._size_of is not None:
            self._bytes_taken += self._size_of(item)
        self._room.ring()

    def stop(self) -> None:
        """Tells the thread to end, without waiting for it."""
        self._closed = True
        self._items.clear()
        self._arrived.ring()
        self._room.ring()

    def join(self) -> None:
        """Waits for the thread after :meth:`stop`."""
        if self._thread is threading.current_thread():
            return
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            _log.warning(
                "thread %s is still in a read of the source %.0f s after close; it ends with that read",
                self._thread.name,
                _JOIN_SECONDS,
            )


class _Bell:
    """Wakes the one thread that waits for it.

    In the place of a ``threading.Condition``, which takes a lock and walks its list of waiters at each word, in Python:
    two threads that pass a batch on every half millisecond, and share one interpreter's lock with what reads it, lose
    a tenth of their time to that. Nobody waits most of the time, and then ringing is a look at a flag.
    """

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting = False

    def ring(self) -> None:
        """Wakes the thread that waits, if one does. Say so after having done what it waits for."""
        if self._waiting:
            self._waiting = False
            self._rings.put(None)

    def wait(self, until: Callable[[], object]) -> None:
        """Until somebody rings, at most half a second; at once where ``until()`` holds. May return early: look again."""
        self._waiting = True
        if not until():  # asked after the flag was set: whoever changes the answer from now on rings
            try:
                self._rings.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                pass
        self._waiting = False
