"""A daemon thread that Ctrl-C in the calling thread can neither leak, leave half-started, nor run twice.

:class:`Background` runs a function once, and :class:`ReadAhead` runs it again and again, ahead of its caller.

``concurrent.futures.ThreadPoolExecutor`` joins its threads at close and again at interpreter exit. A hanging read (a
dead network disk) would then turn a reported timeout into a process that never exits. The threads here are daemons, and
close waits for them for a limited time.

Ctrl-C can arrive inside ``Thread.start()``, or between the start and the assignment of the object that owns the thread.
Constructors therefore start nothing: the owner stores the object first, then calls ``start``, and may call it again
after an interrupt. The calling thread also uses no ``threading.Condition`` (nor Event or Future, which contain one): an
interrupt inside its ``__enter__`` leaves the lock held forever.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from meshfeed._src.base.errors import MeshfeedError

_prefetch_log = logging.getLogger("meshfeed.prefetch")
_JOIN_SECONDS = 10.0
_TICK_SECONDS = 0.5  # waits wake up this often, to call tick functions
T = TypeVar("T")


class WakeUp:
    """A wake-up event for a single waiting thread.

    Replaces ``threading.Condition``, whose notify takes a lock and walks a list of waiters in Python. Two threads that
    pass a batch every 0.5 ms, and share the GIL with the reads, lose a tenth of their time to that. Usually no thread
    is waiting, and :meth:`ring` only checks a flag.
    """

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting = False

    def ring(self) -> None:
        """Wakes the waiting thread, if any. Call it after changing the condition that the thread waits for."""
        if self._waiting:
            self._waiting = False
            self._rings.put(None)

    def wait(self, until: Callable[[], object], seconds: float = 60.0) -> None:
        """Waits for :meth:`ring`, unless ``until()`` is true already. May return early; check the condition again."""
        self._waiting = True
        if not until():  # checked after setting the flag: a thread that changes the condition from now on rings
            try:
                self._rings.get(timeout=max(0.0, min(_TICK_SECONDS, seconds)))
            except queue.Empty:
                pass
        self._waiting = False


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
        """Starts the thread. An interrupted call can be repeated."""
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
            del item  # this frame must not keep a batch alive after it is taken off
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
                raise error.with_traceback(self._traceback)  # without it, the traceback would grow with each call
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

    def stop(self) -> None:
        """Signals the thread to end, without waiting for it."""
        self._closed = True
        self._items.clear()
        self._arrived.ring()
        self._room.ring()

    def join(self) -> None:
        """Waits for the thread after :meth:`stop`."""
        if not self._thread.join(_JOIN_SECONDS):
            _prefetch_log.warning(
                "thread %s is still reading the source %.0f s after close; it ends when that read returns",
                self._name,
                _JOIN_SECONDS,
            )


class Background:
    """A daemon thread that runs a function once."""

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._function, self._name = function, name
        self._unclaimed = [None]  # popped by the one thread that runs the function
        self._threads: list[threading.Thread] = []  # more than one only if start() was interrupted
        self._requested = self._started = self._ended = False
        self._end = WakeUp()

    @property
    def unused(self) -> bool:
        """Whether :meth:`start` has never been called."""
        return not self._requested

    def start(self) -> None:
        """Starts the thread, once. Safe to call again after an interrupt."""
        if self._started:
            return
        self._requested = True
        # Thread.start() waits for an Event, so it runs on a thread that no interrupt reaches.
        _thread.start_new_thread(self._start_thread, ())
        self._started = True

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # the process cannot start another thread; use this one, which is never joined
            self._threads.remove(thread)
            self._run()

    def _run(self) -> None:
        if claim(self._unclaimed):
            function, self._function = self._function, lambda: None  # the thread must not keep its owner alive
            try:
                function()
            finally:
                self._ended = True
                self._end.ring()

    def join(self, seconds: float) -> bool:
        """Waits for the function to return, unless called from its own thread. An unstarted thread can no longer start.

        Returns:
          True if the function has returned, will never run, or called this itself.
        """
        if threading.current_thread() in self._threads or (not self._started and claim(self._unclaimed)):
            return True
        deadline = time.monotonic() + seconds
        while not self._ended and self._requested and time.monotonic() < deadline:
            self._end.wait(lambda: self._ended, deadline - time.monotonic())
        for thread in self._threads if self._ended else ():
            with contextlib.suppress(RuntimeError):  # a duplicate after an interrupt, not started yet; it has no work
                thread.join(max(0.0, deadline - time.monotonic()))
        return self._ended or not self._requested


def claim(unclaimed: list[None]) -> bool:
    """Returns True to the first caller only. ``list.pop`` is atomic and takes no lock that an interrupt could leave held."""
    try:
        unclaimed.pop()
    except IndexError:
        return False
    return True
