"""What a worker does, wherever it runs: makes a task, answers requests with it, and describes its errors.

:class:`TaskServer` is the worker's side: it turns each call of the task into messages, which child processes
(``base/child.py``) and Ray actors (``reading/ray_workers.py``) send in their own ways. :func:`rebuild_error` is the
caller's side.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias, TypedDict

from meshfeed._src.base.errors import SourceError, hide_own_frames, text_of
from meshfeed._src.base.frames import Packed, pack
from meshfeed._src.base.stats import CACHES

READY, RESULT, ERROR, CACHE_USE = 4, 5, 6, 8

Message: TypeAlias = tuple[int, Packed]
"""Its kind, and its packed value."""


class ErrorDescription(TypedDict):
    """An exception in a worker: its type, its text, its traceback, and its pickle if that can be loaded."""

    type: str
    message: str
    traceback: str
    pickled: bytes | None


class TaskServer:
    """Makes a task, and answers one request at a time.

    The garbage collector is disabled between runs after every ``gc_every`` requests; 0 keeps Python's default.
    """

    def __init__(self, gc_every: int) -> None:
        self._gc_every = gc_every
        self._task: Callable[[Any], object] | None = None
        self._unmade: list[Message] = []  # why there is no task
        self._num_done = 1

    def set_up(self, make_task: bytes) -> list[Message]:
        """Makes the task with the pickled function; returns READY, or ERROR with an :class:`ErrorDescription`."""

        def make() -> None:
            self._task = pickle.loads(make_task)()

        messages = _messages(READY, make)
        if self._task is None:
            self._unmade = messages
        elif self._gc_every:  # excludes existing objects, and disables it during requests
            gc.collect()
            gc.freeze()
            gc.disable()
        return messages

    def answer(self, request: object) -> list[Message]:
        """Returns RESULT, preceded by CACHE_USE if the task used shard caches, or ERROR; if the set-up failed, its error."""
        return self._unmade if self._task is None else _messages(RESULT, self._task, request)

    def collect(self) -> None:
        """Runs the garbage collector if it is due; called once per request."""
        self._num_done += 1
        if self._gc_every and self._num_done % self._gc_every == 0:
            gc.collect()

    def close(self) -> None:
        """Calls ``task.close()``, if defined."""
        with contextlib.suppress(Exception):
            getattr(self._task, "close", lambda: None)()


def _messages(kind: int, function: Callable[..., object], *args: object) -> list[Message]:
    try:
        answer = pack(function(*args))
    except BaseException as error:
        return [(ERROR, pack(_describe(error)))]
    used = CACHES.take()
    return [(CACHE_USE, pack(used)), (kind, answer)] if used else [(kind, answer)]


def _describe(error: BaseException) -> ErrorDescription:
    hide_own_frames(error)
    text = "".join(traceback.format_exception(error))
    pickled = None
    # For example, an exception whose __init__ does not accept its args, or exits.
    with contextlib.suppress(BaseException):
        import cloudpickle  # pickles classes of the user's script by value

        data = cloudpickle.dumps(error.with_traceback(None))
        if type(pickle.loads(data)).__qualname__ == type(error).__qualname__:
            pickled = data
    return {"type": type(error).__name__, "message": text_of(error), "traceback": text, "pickled": pickled}


def rebuild_error(description: ErrorDescription, where: str) -> Exception:
    """Returns the worker's exception with a note of ``where`` and its traceback; a SourceError if it cannot be unpickled."""
    where = f"{where}:\n{description['traceback']}"
    if description["pickled"] is not None:
        try:
            error = pickle.loads(description["pickled"])
            # StopIteration would end a loop or generator of this process instead of reporting the error.
            if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
                error.add_note(where)
                return error
        except Exception:  # the worker can load this pickle but this process cannot, so fall back to text
            pass
    return SourceError(f"{description['type']}: {description['message']}, {where}")
