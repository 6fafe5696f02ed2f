"""The other end of a worker pool: a fresh Python process that answers requests one after the other.

Started as ``python -c`` with this module's :func:`main`, so that the user's script is not imported again.
"""

from __future__ import annotations

import contextlib
import faulthandler
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

from meshfeed._src.reading.workers.wire import Inbox, send_value

READY, RESULT, ERROR = 1, 2, 3
SETUP, REQUEST = 4, 5

_EXIT_GRACE_SECONDS = 0.5
_PARENT_CHECK_MILLISECONDS = 1000


def main() -> None:
    """Entry point. The arguments are the socket's descriptor and the parent's process id."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends us in order
    faulthandler.enable()
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_exit_with_parent, args=(descriptor, parent), name="meshfeed-parent", daemon=True).start()
    code = 0
    try:
        _serve(connection)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent has gone
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # no teardown of whatever threads the user's libraries started


def _exit_with_parent(descriptor: int, parent: int) -> None:
    """Ends this process soon after its parent has closed the socket or died, also in the middle of a long task."""
    poller = select.poll()
    poller.register(descriptor, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    # The parent's end of the socket may live on in a process that the parent forked: so its id is looked at too.
    while not poller.poll(_PARENT_CHECK_MILLISECONDS) and os.getppid() == parent:
        pass
    time.sleep(_EXIT_GRACE_SECONDS)  # the main thread closes the task if it is idle
    os._exit(0)


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
            del frame  # its arrays, before the wait for the next
            if gc_every and num_done % gc_every == 0:
                gc.collect()
    finally:
        close = getattr(task, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                close()


def _answer(connection: socket.socket, value: Any) -> None:
    """A function of its own, so that the value dies as soon as it is sent."""
    send_value(connection, RESULT, value)


def _freeze(gc_every: int) -> None:
    """Takes everything imported so far out of the collector's sight, and runs it between tasks only."""
    if gc_every:
        gc.collect()
        gc.freeze()
        gc.disable()


def _describe(error: BaseException) -> dict[str, Any]:
    """What the parent needs to raise ``error`` again; its pickle only if that can be read back."""
    text = "".join(traceback.format_exception(error))
    pickled = None
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        try:
            import cloudpickle  # classes defined in the user's script travel by value

            pickled = cloudpickle.dumps(error.with_traceback(None))
            copy = pickle.loads(pickled)
            if type(copy) is not type(error) and type(copy).__qualname__ != type(error).__qualname__:
                pickled = None
        except Exception:
            pickled = None
    return {"type": type(error).__name__, "message": str(error), "traceback": text, "pickled": pickled}
