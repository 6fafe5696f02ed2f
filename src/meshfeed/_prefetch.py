"""Bounded read-ahead in one thread, in order, with the producer's exception as the last item."""

from __future__ import annotations

import collections
import logging
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
        self._bytes = 0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _has_room(self) -> bool:
        if len(self._items) >= self._depth():
            return False
        return not self._items or self._max_bytes is None or self._bytes < self._max_bytes

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_room())
                if self._closed:
                    return
            try:
                item = self._produce()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._items.append(item)
                self._bytes += self._size_of(item) if self._size_of else 0
                self._changed.notify_all()

    def peek(self, tick: Callable[[float], None] | None = None) -> T:
        """Waits for the next item and leaves it where it is.

        Args:
          tick: called about twice a second with the seconds waited so far; may raise.

        Raises:
          What ``produce`` raised, once the items before it are taken; Closed after :meth:`close`.
        """
        if self._items and not self._closed:  # the usual case needs no lock: only the caller takes items off
            return self._items[0]
        start = time.monotonic()
        while True:
            with self._changed:
                self._changed.notify_all()  # should an interrupt have come between taking an item off and saying so
                self._changed.wait_for(lambda: self._items or self._error or self._closed, timeout=_TICK_SECONDS)
                if self._closed:
                    raise Closed("the feed was closed")
                if self._items:
                    return self._items[0]
                if self._error is not None:
                    raise self._error
            if tick is not None:
                tick(time.monotonic() - start)

    def pop(self) -> None:
        """Takes off the item that :meth:`peek` gave."""
        with self._changed:
            item = self._items.popleft()
            self._bytes -= self._size_of(item) if self._size_of else 0
            self._changed.notify_all()

    def stop(self) -> None:
        """Tells the thread to end, without waiting for it."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

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
