"""Daemon threads that Ctrl-C in the calling thread can neither leak, leave half-started, nor run twice.

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
import contextlib
import functools
import logging
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from meshfeed._src.base.errors import MeshfeedError, text_of
from meshfeed._src.base.wake_up import TICK_SECONDS, Signal

_log = logging.getLogger("meshfeed.threads")
_CLOSE_SECONDS = 5.0
T = TypeVar("T")
R = TypeVar("R")
_AFFINITY = re.compile(
    r"\b(same|another|different|other|wrong|main|owning|original|in a|in|of the) thread\b|\bthread[- ](id|local|affinity)\b",
    re.I,
)


def note_thread(error: Exception) -> None:
    """Adds a note to an error of the user's code that complains about the thread on which meshfeed called it.

    SQLite connections, event loops and many GUI and database clients may be used only on the thread that created them.
    Their messages do not say that meshfeed reads on threads of its own.
    """
    thread = threading.current_thread()
    if thread is threading.main_thread() or not _AFFINITY.search(text_of(error)):
        return
    notes: list[str] = getattr(error, "__notes__", [])
    if any(_READS_ON in note for note in notes):
        return
    error.add_note(
        f"{_READS_ON} ({thread.name!r} here), and not on the thread that constructed the source. Create what belongs to one "
        "thread in the method that reads, once per thread: keep it in a threading.local() that __init__ makes, and leave "
        "it out of __getstate__."
    )


_READS_ON = "meshfeed reads on threads of its own"


def _claim(unclaimed: list[None]) -> bool:
    """Returns True to the first caller only. ``list.pop`` is atomic and takes no lock that an interrupt could leave held."""
    try:
        unclaimed.pop()
    except IndexError:
        return False
    return True


class Background:
    """A daemon thread that runs a function once."""

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._function, self._name = function, name
        self._unclaimed = [None]  # popped by the one thread that runs the function
        self._threads: list[threading.Thread] = []  # more than one only if start() was interrupted
        self._requested = self._started = self._ended = False
        self._end = Signal()

    @property
    def unused(self) -> bool:
        """Whether :meth:`start` has never been called."""
        return not self._requested

    @property
    def ended(self) -> bool:
        """Whether the function has returned."""
        return self._ended

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
        if _claim(self._unclaimed):
            function, self._function = self._function, lambda: None  # the thread must not keep its owner alive
            try:
                function()
            finally:
                self._ended = True
                self._end.set()

    def join(self, seconds: float) -> bool:
        """Waits for the function to return, unless called from its own thread. An unstarted thread can no longer start.

        Returns:
          True if the function has returned, will never run, or called this itself.
        """
        if threading.current_thread() in self._threads or (not self._started and _claim(self._unclaimed)):
            return True
        deadline = time.monotonic() + seconds
        while not self._ended and self._requested and time.monotonic() < deadline:
            self._end.wait(min(TICK_SECONDS, deadline - time.monotonic()))  # others may wait, too
        for thread in self._threads if self._ended else ():
            with contextlib.suppress(RuntimeError):  # a duplicate after an interrupt, not started yet; it has no work
                thread.join(max(0.0, deadline - time.monotonic()))
        return self._ended or not self._requested


class Call(Generic[R]):
    """A function call that one thread runs and another waits for."""

    def __init__(self, function: Callable[[], R]) -> None:
        self._function: Callable[[], R] | None = function
        self._unclaimed = [None]  # popped by the thread that runs or cancels the call
        self._value: Any = None
        self._error: BaseException | None = None
        self._traceback: Any = None
        self._done = False
        self._arrived = Signal()

    @property
    def succeeded(self) -> bool:
        """Whether the call has returned a value."""
        return self._done and self._error is None

    def run(self) -> None:
        """Runs the call; :meth:`result` raises its exception."""
        function = self._function
        if not _claim(self._unclaimed) or function is None:
            return
        try:
            self._value = function()
        except BaseException as error:  # even SystemExit: the waiting thread must not hang
            self._error, self._traceback = error, error.__traceback__
        self._finish()

    def cancel(self) -> None:
        """Cancels a call that has not started; its :meth:`result` then raises MeshfeedError."""
        if _claim(self._unclaimed):
            self._error = MeshfeedError("the feed was closed")
            self._finish()

    def forget_error(self) -> None:
        """Lets go of an exception that the caller of :meth:`result` keeps; its traceback has the frames of all callers."""
        if self._error is not None:
            self._error, self._traceback = MeshfeedError("this call has failed"), None

    def done(self) -> bool:
        """Whether :meth:`result` returns without waiting."""
        return self._done

    def wake(self) -> None:
        """Makes the waiting thread call its tick function now."""
        self._arrived.set()

    def _finish(self) -> None:
        self._function = None
        self._done = True
        self._arrived.set()

    def wait(self, tick: Callable[[float], None] | None = None) -> None:
        """Waits for the call to end, without raising its exception; see :meth:`result`."""
        start = time.monotonic()
        while not self._done:
            self._arrived.wait()
            if tick is not None and not self._done:
                tick(time.monotonic() - start)
        self._arrived.set()  # for other threads that wait

    def result(self, tick: Callable[[float], None] | None = None) -> R:
        """Waits for the call and returns its value. Safe to call again after an interrupt.

        Args:
          tick: called about twice per second with the seconds waited so far; may raise.
        """
        self.wait(tick)
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        return self._value


class SingleCall(Generic[R]):
    """A function call on its own thread, run once even if waits for it are interrupted and repeated."""

    def __init__(self, function: Callable[[], R], name: str) -> None:
        self._call: Call[R] = Call(function)
        self._dispose: Callable[[R], object] | None = None
        self._thread = Background(self._run, name)

    def _run(self) -> None:
        self._call.run()
        if self._dispose is not None:
            self.discard(self._dispose)

    @property
    def succeeded(self) -> bool:
        """Whether the call has returned a value."""
        return self._call.succeeded

    def start(self) -> None:
        """Starts the call, once. Safe to call again after an interrupt."""
        self._thread.start()

    def result(self, tick: Callable[[float], None] | None = None) -> R:
        """Starts the call if it has not started, and waits for it; see :meth:`Call.result`."""
        self._thread.start()
        return self._call.result(tick)

    def forget_error(self) -> None:
        """See :meth:`Call.forget_error`."""
        self._call.forget_error()

    def wake(self) -> None:
        """Makes the thread that waits in :meth:`result` call its tick function now."""
        self._call.wake()

    def join(self, seconds: float) -> bool:
        """Waits for the thread to end; see :meth:`Background.join`. A call that has not started can no longer start."""
        return self._thread.join(seconds)

    def wait(self) -> None:
        """Waits for the call if it was ever requested."""
        if not self._thread.unused:
            self._thread.start()  # an interrupt may have arrived before the thread started
            self._call.wait()

    def discard(self, dispose: Callable[[R], object]) -> None:
        """Passes the result to ``dispose``, now or when the call returns; possibly more than once if threads race."""
        self._dispose = dispose
        if self._call.succeeded:
            dispose(self._call.result())


class Threads:
    """A thread pool whose threads start as work arrives and end when the pool is garbage-collected.

    ``submit`` and ``shutdown`` can replace those of ``concurrent.futures.Executor``.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        work = functools.partial(_work, self._tasks)
        self._threads = [Background(work, f"{name}-{number}") for number in range(num_threads)]
        self._unstarted = list(reversed(self._threads))
        self._name = name
        self._closed = False
        # The threads hold the queue but not the pool, so they do not keep it alive. Daemon threads need no end at exit.
        weakref.finalize(self, _end, self._tasks, num_threads).atexit = False

    @property
    def ended(self) -> bool:
        """Whether no thread is running, because none was started or the pool was shut down."""
        return all(thread.unused or thread.ended for thread in self._threads)

    def submit(self, function: Callable[..., R], /, *args: object, **kwargs: object) -> Call[R]:
        """Calls ``function(*args, **kwargs)`` on one of the threads; RuntimeError once the pool is closed."""
        if self._closed:
            raise RuntimeError(f"the thread pool {self._name!r} is closed and accepts no new work")
        for thread in self._unstarted[-1:]:
            thread.start()
            with contextlib.suppress(ValueError):  # a concurrent caller has started it too
                self._unstarted.remove(thread)
        call = Call(functools.partial(function, *args, **kwargs))
        self._tasks.put(call)
        if self._closed:  # by another thread; the pool's threads may have ended without taking the call
            call.cancel()
        return call

    def map(self, function: Callable[[T], R], values: Iterable[T]) -> list[R]:
        """Returns ``function`` of each value, in order; the first exception is raised once all calls have ended."""
        calls = [self.submit(function, value) for value in values]
        for call in calls:
            call.wait()
        return [call.result() for call in calls]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads once submitted work is done.

        Args:
          wait: whether to wait for the threads, at most 5 s; a thread that hangs in a call ends when the call returns.
          cancel_futures: whether to cancel work that has not started.
        """
        deadline = time.monotonic() + _CLOSE_SECONDS  # one deadline for all threads
        self._closed = True
        if cancel_futures:
            with contextlib.suppress(queue.Empty):
                while (call := self._tasks.get_nowait()) is not None:
                    call.cancel()
        _end(self._tasks, len(self._threads))
        if not wait:
            return
        hung = [thread for thread in self._threads if not thread.join(max(0.0, deadline - time.monotonic()))]
        if hung:
            text = "%d %s threads are still reading the source after close; they end when that read returns"
            _log.warning(text, len(hung), self._name)

    def close(self) -> None:
        """Cancels work that has not started and ends the threads; a hanging thread ends when its call returns."""
        self.shutdown(cancel_futures=True)


def close_within(thing: object) -> None:
    """Calls ``thing.close()``, if defined, and waits at most 5 s for it.

    Iterators of other libraries join their threads in ``close``, and those may hang in a read.
    """
    close = getattr(thing, "close", None)
    if not callable(close):
        return
    call = Call(close)
    thread = Background(call.run, "meshfeed-close")
    thread.start()
    if not thread.join(_CLOSE_SECONDS):
        text = "close() of a %s has not returned after %.0f s; not waiting for it"
        _log.warning(text, type(thing).__name__, _CLOSE_SECONDS)
        return
    call.result()


def _end(tasks: _Tasks, num_threads: int) -> None:
    for _ in range(num_threads):
        tasks.put(None)


def _work(tasks: _Tasks) -> None:
    while (call := tasks.get()) is not None:
        call.run()
        del call  # an idle thread must not keep the last batch alive


_Tasks = queue.SimpleQueue[Call[Any] | None]


_MAX_THREADS = 32  # latency-bound requests, not computation


def in_threads(function: Callable[[T], R], items: Sequence[T], max_threads: int = _MAX_THREADS) -> list[R]:
    """Returns ``[function(item) for item in items]``, computed in threads; raises the first error, drops the rest.

    No thread outlives a call that returns. After an error, a call that has started may hang, so nothing waits for it.
    """
    if len(items) <= 1:
        return [function(item) for item in items]
    threads = Threads(min(max_threads, len(items)), "meshfeed-requests")
    finished = False
    try:
        results = [future.result() for future in [threads.submit(function, item) for item in items]]
        finished = True
    finally:
        threads.shutdown(wait=finished, cancel_futures=True)
    return results
