"""One thread that runs ahead of another."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from meshfeed._src.base.errors import MeshfeedError
from meshfeed._src.base.threads import Background
from meshfeed._src.base.wake_up import WakeUp

_log = logging.getLogger("meshfeed.prefetch")
_JOIN_SECONDS = 10.0
T = TypeVar("T")


class Closed(MeshfeedError):
    """The read-ahead was closed while a thread waited for an item."""


class ReadAhead(Generic[T]):
    """Runs ``produce`` ahead of the caller in one daemon thread.

    :meth:`peek` returns an item and :meth:`pop` takes it off, so an interrupt between the two loses nothing. If
    ``produce`` raises (StopIteration included), ``peek`` raises the exception after the items before it, and again on
    each further call.

    Args:
      produce: returns the next item; called only on the thread, and never again after it raised.
      depth: returns the number of items to keep ready, at least 1.
      name: name of the thread.

    Attributes:
      num_produced: items produced so far.
      idle_seconds: time that the thread has waited for room.
    """

    def __init__(self, produce: Callable[[], T], *, depth: Callable[[], int], name: str) -> None:
        self._produce = produce
        self._depth = depth
        self._name = name
        self._items: collections.deque[T] = collections.deque()
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._closed = False
        self.num_produced, self.idle_seconds = 0, 0.0
        self._arrived, self._room = WakeUp(), WakeUp()
        self._thread = Background(self._run, name)

    def start(self) -> None:
        """Starts the thread. An interrupted call can be repeated."""
        self._thread.start()

    def _has_room(self) -> bool:
        return len(self._items) < self._depth()

    def _run(self) -> None:
        while True:
            if not self._has_room():
                since = time.perf_counter()
                while not self._closed and not self._has_room():
                    self._room.wait(lambda: self._closed or self._has_room())
                self.idle_seconds += time.perf_counter() - since
            if self._closed:
                return
            try:
                item = self._produce()
            except BaseException as error:
                self._traceback = error.__traceback__
                self._error = error
                self._arrived.ring()
                return
            self.num_produced += 1
            self._items.append(item)
            del item  # this frame must not keep a batch alive after it is taken off
            if self._closed:
                self._items.clear()  # stop() may have cleared before the append; a batch would live on in our cycles
            self._arrived.ring()

    @property
    def ready(self) -> bool:
        """Whether :meth:`peek` returns an item without waiting."""
        return bool(self._items)

    def peek(self, tick: Callable[[float], None] | None = None) -> T:
        """Waits for the next item and returns it without taking it off.

        Args:
          tick: called about twice per second with the seconds waited so far; may raise.

        Raises:
          Closed: :meth:`stop` was called.
          BaseException: the exception of ``produce``, once the items before it are taken off.
        """
        start = 0.0
        while True:
            if self._closed:
                raise Closed("the feed was closed")
            error = self._error  # read before the items: once it is set, no further item is appended
            if self._items:
                try:
                    return self._items[0]
                except IndexError:  # another thread called stop since the check
                    continue
            if error is not None:
                try:
                    raise error.with_traceback(self._traceback)  # without it, the traceback would grow with each call
                finally:
                    del error  # this frame is in the traceback, which it must not keep alive
            self._room.ring()  # an interrupt may have come between popleft and ring in pop
            if not start:
                start = time.monotonic()
            elif tick is not None:
                tick(time.monotonic() - start)
            self._arrived.wait(lambda: self._items or self._error or self._closed)

    def pop(self, item: T) -> None:
        """Takes ``item`` off if it is still the next. An interrupted call can be repeated."""
        try:
            if self._items[0] is item:
                self._items.popleft()
        except IndexError:  # already taken off, or another thread called stop
            pass
        self._room.ring()

    def forget_error(self) -> None:
        """Lets go of an exception that the caller keeps; :meth:`peek` must not be called again.

        Its traceback gets the frames of all callers that it passes through, and with them whatever owns this read-ahead.
        """
        if self._error is not None:
            self._error, self._traceback = Closed("the feed has failed"), None

    def stop(self) -> None:
        """Signals the thread to end, without waiting for it."""
        self._closed = True
        self._items.clear()
        self._error = self._traceback = None  # its traceback holds the frames that it was raised in, and their batches
        self._arrived.ring()
        self._room.ring()

    def join(self) -> None:
        """Waits for the thread after :meth:`stop`."""
        if not self._thread.join(_JOIN_SECONDS):
            _log.warning(
                "thread %s is still reading the source %.0f s after close; it ends when that read returns",
                self._name,
                _JOIN_SECONDS,
            )
