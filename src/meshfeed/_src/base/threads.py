"""Daemon threads that an interrupt of the caller cannot leak, stop half-way or run twice.

``concurrent.futures.ThreadPoolExecutor`` waits for its threads at close and again at the interpreter's exit. A read that
hangs (a dead network disk) would so turn a time-out that was reported into a process that never ends. These threads are
daemons, and closing waits for them only so long.

Ctrl-C can arrive in the middle of ``Thread.start()``, and between it and the assignment of what it belongs to. So
nothing here starts in its constructor: an owner holds the object first, then calls what starts it, and may call that
again after an interrupt. Nor does the calling thread use a ``threading.Condition`` (nor Event, nor Future, which are
made of one): an interrupt inside its ``__enter__`` leaves the lock taken for ever.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from meshfeed._src.base.errors import MeshfeedError

_log = logging.getLogger("meshfeed.threads")
_CLOSE_SECONDS = 5.0
_TICK_SECONDS = 0.5
T = TypeVar("T")
R = TypeVar("R")


class WakeUp:
    """Wakes the one thread that waits for it.

    Replaces ``threading.Condition``, which takes a lock and walks its list of waiters at each notify, in Python: two
    threads that hand over a batch every half millisecond, and share the interpreter's lock with the reads, lose a tenth
    of their time to that. Most of the time no thread waits, and then ringing only checks a flag.
    """

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting = False

    def ring(self) -> None:
        """Wakes the waiting thread, if any. Call it after changing what the thread waits for."""
        if self._waiting:
            self._waiting = False
            self._rings.put(None)

    def wait(self, until: Callable[[], object], seconds: float = 60.0) -> None:
        """Waits for a ring; not at all if ``until()`` holds. May return early: check again.

        Args:
          until: what is waited for.
          seconds: longest wait, never more than half a second.
        """
        self._waiting = True
        if not until():  # evaluated after the flag is set: whoever changes the answer from now on rings
            try:
                self._rings.get(timeout=max(0.0, min(_TICK_SECONDS, seconds)))
            except queue.Empty:
                pass
        self._waiting = False


def _nothing() -> None:
    pass


class Background:
    """A daemon thread that runs a function once.

    Args:
      function: what it runs.
      name: of the thread.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._function, self._name = function, name
        self._unclaimed = [None]  # popped by the one thread that runs the function
        self._threads: list[threading.Thread] = []  # more than one only if start() was interrupted
        self._asked = self._started = self._ended = False
        self._end = WakeUp()

    @property
    def unused(self) -> bool:
        """Whether :meth:`start` was never called."""
        return not self._asked

    def start(self) -> None:
        """Starts the thread unless it runs already. An interrupted call can be made again."""
        if self._started:
            return
        self._asked = True
        # Thread.start() waits for an Event, so it runs on a thread that no interrupt reaches.
        _thread.start_new_thread(self._start_thread, ())
        self._started = True

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _claim(self) -> bool:
        try:
            self._unclaimed.pop()
        except IndexError:
            return False
        return True

    def _run(self) -> None:
        if self._claim():
            function, self._function = self._function, _nothing  # or an owner would be kept alive by its thread
            try:
                function()
            finally:
                self._ended = True
                self._end.ring()

    def join(self, seconds: float) -> bool:
        """Waits for the function to return, unless called from it. A thread that was never started never will be.

        Args:
          seconds: longest wait.

        Returns:
          Whether it has returned.
        """
        if threading.current_thread() in self._threads or (not self._started and self._claim()):
            return True
        deadline = time.monotonic() + seconds
        while not self._ended and self._asked and time.monotonic() < deadline:
            self._end.wait(lambda: self._ended, deadline - time.monotonic())
        for thread in self._threads if self._ended else ():
            with contextlib.suppress(RuntimeError):  # one of several, which is yet to start and to find nothing to do
                thread.join(max(0.0, deadline - time.monotonic()))
        return self._ended or not self._asked


class Call(Generic[R]):
    """A function call that one thread makes and another waits for.

    Args:
      function: what is called.
    """

    def __init__(self, function: Callable[[], R]) -> None:
        self._function: Callable[[], R] | None = function
        self._unclaimed = [None]  # popped by whoever makes the call, or cancels it
        self._cancelled = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._traceback: Any = None
        self._done = False
        self._arrived = WakeUp()

    @property
    def succeeded(self) -> bool:
        """Whether the call has returned a value."""
        return self._done and self._error is None

    def run(self) -> None:
        """Makes the call; what it raises goes to :meth:`result`."""
        function = self._function
        if not self._claim() or function is None:
            return
        try:
            self._value = function()
        except BaseException as error:
            self._error, self._traceback = error, error.__traceback__
        self._finish()

    def cancel(self) -> None:
        """Ends the wait for a call that has not begun."""
        if self._claim():
            self._cancelled = True
            self._error = MeshfeedError("the feed was closed")
            self._finish()

    def done(self) -> bool:
        """Whether :meth:`result` need not wait."""
        return self._done

    def cancelled(self) -> bool:
        """Whether :meth:`cancel` came before the call."""
        return self._cancelled

    def _claim(self) -> bool:
        try:
            self._unclaimed.pop()
        except IndexError:
            return False
        return True

    def _finish(self) -> None:
        self._function = None
        self._done = True
        self._arrived.ring()

    def wait(self, tick: Callable[[float], None] | None = None) -> None:
        """Waits for the call, whatever becomes of it; see :meth:`result`."""
        start = time.monotonic()
        while not self._done:
            self._arrived.wait(lambda: self._done)
            if tick is not None and not self._done:
                tick(time.monotonic() - start)

    def result(self, tick: Callable[[float], None] | None = None) -> R:
        """Waits for the call. After an interrupt it can be asked for again.

        Args:
          tick: called about twice a second with the seconds waited so far; may raise.

        Raises:
          What the call raised.
        """
        self.wait(tick)
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        return self._value


class SingleCall(Generic[R]):
    """A function call on a thread of its own, made once however often the wait for it is interrupted.

    Args:
      function: what is called.
      name: of the thread.
    """

    def __init__(self, function: Callable[[], R], name: str) -> None:
        self._call: Call[R] = Call(function)
        self._dispose: Callable[[R], object] | None = None
        self._thread = Background(self._run, name)

    def _run(self) -> None:
        self._call.run()
        if self._dispose is not None:
            self.discard(self._dispose)

    def result(self, tick: Callable[[float], None] | None = None) -> R:
        """Starts the call if need be and waits for it; see :meth:`Call.result`."""
        self._thread.start()
        return self._call.result(tick)

    def wait(self) -> None:
        """Waits for the call if it was ever asked for."""
        if not self._thread.unused:
            self._thread.start()  # an interrupt may have come before it was
            self._call.wait()

    def discard(self, dispose: Callable[[R], object]) -> None:
        """Passes the result to ``dispose``, now or when the call returns; more than once if threads meet here."""
        self._dispose = dispose
        if self._call.succeeded:
            dispose(self._call.result())


class Threads:
    """Calls functions side by side, on threads that start as work arrives and end when this object is dropped.

    ``submit`` and ``shutdown`` can take the place of those of ``concurrent.futures.Executor``.

    Args:
      num_threads: at most this many, at least 1.
      name: of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        work = functools.partial(_work, self._tasks)
        self._threads = [Background(work, f"{name}-{number}") for number in range(num_threads)]
        self._unstarted = list(reversed(self._threads))
        self._name = name
        self._closed = False
        weakref.finalize(self, _end, self._tasks, num_threads).atexit = False

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> Call[R]:
        """``function(*args, **kwargs)``, on one of the threads.

        Raises:
          RuntimeError: after :meth:`shutdown` or :meth:`close`.
        """
        if self._closed:
            raise RuntimeError(f"the threads {self._name} are closed and take no new work")
        for thread in self._unstarted[-1:]:
            thread.start()
            with contextlib.suppress(ValueError):  # another caller has started it too
                self._unstarted.remove(thread)
        call = Call(functools.partial(function, *args, **kwargs))
        self._tasks.put(call)
        return call

    def map(self, function: Callable[[T], R], values: Iterable[T]) -> list[R]:
        """``function`` of each value, in their order.

        Raises:
          What the first of them raised, once all have ended.
        """
        calls = [self.submit(function, value) for value in values]
        for call in calls:
            call.wait()
        return [call.result() for call in calls]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads, after the work that was submitted or, with ``cancel_futures``, only what has begun of it.

        ``wait`` waits for a limited time: a thread that hangs in a call ends with that call.
        """
        deadline = time.monotonic() + _CLOSE_SECONDS
        self._closed = True
        if cancel_futures:
            _cancel(self._tasks)
        _end(self._tasks, len(self._threads))
        if not wait:
            return
        hung = [thread for thread in self._threads if not thread.join(max(0.0, deadline - time.monotonic()))]
        if hung:
            _log.warning(
                "%d threads %s are still in a read of the source after close; they end with that read",
                len(hung),
                self._name,
            )

    def close(self) -> None:
        """Cancels what has not begun and ends the threads; a thread that hangs in a call ends with that call."""
        self.shutdown(cancel_futures=True)


def close_within(thing: Any, seconds: float | None = None) -> None:
    """Calls ``thing.close()``, if there is one, but waits for it only so long (default: as long as for threads).

    Iterators of other libraries join their own threads there, which may hang in a read.

    Raises:
      What ``close`` raised.
    """
    close = getattr(thing, "close", None)
    if not callable(close):
        return
    call = Call(close)
    thread = Background(call.run, "meshfeed-close")
    thread.start()
    seconds = _CLOSE_SECONDS if seconds is None else seconds
    if not thread.join(seconds):
        _log.warning("close() of a %s has not returned after %.0f s; not waiting for it", type(thing).__name__, seconds)
        return
    call.result()


def _cancel(tasks: _Tasks) -> None:
    while True:
        try:
            call = tasks.get_nowait()
        except queue.Empty:
            return
        if call is not None:
            call.cancel()


def _end(tasks: _Tasks, num_threads: int) -> None:
    for _ in range(num_threads):
        tasks.put(None)


def _work(tasks: _Tasks) -> None:
    while (call := tasks.get()) is not None:
        call.run()
        del call  # a waiting thread must not keep the last batch


_Tasks = queue.SimpleQueue[Call[Any] | None]
