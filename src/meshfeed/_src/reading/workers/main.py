"""The main loop of a worker process: a new Python process that handles requests one at a time.

Started with ``python -c``, which runs :func:`main` without importing the user's script again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from meshfeed._src.base.stats import PROGRESS
from meshfeed._src.reading.workers.wire import Inbox, send_value

READY, RESULT, ERROR, PROGRESS_TEXT = 1, 2, 3, 6
SETUP, REQUEST = 4, 5

_EXIT_GRACE_SECONDS = 0.5
_PARENT_CHECK_MILLISECONDS = 1000


def main() -> None:
    """Runs the worker. ``sys.argv`` holds the socket's file descriptor and the parent's process id."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent stops its workers
    faulthandler.enable()
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_exit_with_parent, args=(descriptor, parent), name="meshfeed-parent", daemon=True).start()
    PROGRESS.tell = functools.partial(_tell, connection)
    code = 0
    try:
        _serve(connection)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent has exited
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # skips teardown, which could hang on threads of the user's libraries


def _exit_with_parent(descriptor: int, parent: int) -> None:
    """Exits soon after the parent has closed the socket or died, even during a long task."""
    poller = select.poll()
    poller.register(descriptor, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    # A process forked by the parent may keep the parent's end of the socket open, so check the parent's id too.
    while not poller.poll(_PARENT_CHECK_MILLISECONDS) and os.getppid() == parent:
        pass
    time.sleep(_EXIT_GRACE_SECONDS)  # an idle main thread uses this time to close the task
    os._exit(0)


def _tell(connection: socket.socket, text: str) -> None:
    """Sends progress to the parent, unless it has not read for so long that the socket is full: that would block."""
    if select.select([], [connection], [], 0)[1]:
        send_value(connection, PROGRESS_TEXT, text)


def _serve(connection: socket.socket) -> None:
    inbox = Inbox(connection)
    task: Any = None
    num_done, gc_every = 0, 0
    try:
        while True:
            frame = inbox.take()
            if frame is None:
                if not inbox.receive():
                    return
                continue
            try:
                if frame.kind == SETUP:
                    make_task, gc_every = frame.value
                    task = pickle.loads(make_task)()
                    send_value(connection, READY, None)
                    _freeze(gc_every)
                else:
                    _answer(connection, task(frame.value))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except BaseException as error:
                send_value(connection, ERROR, _describe(error))
                if frame.kind == SETUP:
                    return
            num_done += 1
            del frame  # frees its arrays before waiting for the next frame
            if gc_every and num_done % gc_every == 0:
                gc.collect()
    finally:
        close = getattr(task, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                close()


def _answer(connection: socket.socket, value: Any) -> None:
    """Sends a result; a separate function because its argument is then freed as soon as it is sent."""
    send_value(connection, RESULT, value)


def _freeze(gc_every: int) -> None:
    """Excludes existing objects from garbage collection, and disables the collector during requests."""
    if gc_every:
        gc.collect()
        gc.freeze()
        gc.disable()


def _describe(error: BaseException) -> dict[str, Any]:
    """Describes ``error`` for the parent to raise again; includes its pickle only if it can be loaded."""
    text = "".join(traceback.format_exception(error))
    pickled = None
    # StopIteration would end a loop or generator of the parent instead of reporting the error.
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        try:
            import cloudpickle  # pickles classes of the user's script by value

            pickled = cloudpickle.dumps(error.with_traceback(None))
            copy = pickle.loads(pickled)
            if type(copy) is not type(error) and type(copy).__qualname__ != type(error).__qualname__:
                pickled = None
        except Exception:
            pickled = None
    return {"type": type(error).__name__, "message": str(error), "traceback": text, "pickled": pickled}
