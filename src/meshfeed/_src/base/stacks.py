"""The Python stacks of what reads in this process and its workers, for the logs of hosts that wait.

A stack shows where a read hangs: in a file system, in a store's client, in a decoder. Only what belongs to feeds is shown:
their own threads, the caller's thread while it reads in ``next``, and workers with a request. Threads that wait for other
threads of the feed are left out.
"""

from __future__ import annotations

import gc
import os
import pathlib
import sys
import threading
import traceback
import weakref
from types import FrameType
from typing import Any

_HERE = pathlib.Path(__file__).resolve()
_LIBRARY = pathlib.Path(threading.__file__).parent
# Frames of a wait: what called them tells what is waited for.
_PASSIVE = frozenset(
    str(_LIBRARY.joinpath(*path))
    for path in (
        ("threading.py",),
        ("socket.py",),
        ("selectors.py",),
        ("socketserver.py",),
        ("http", "client.py"),
        ("http", "server.py"),
    )
)
_PACKAGE = str(_HERE.parents[2]) + os.sep
# The innermost other frame of a thread that waits for another thread or host is in these files.
_WAITING = frozenset(
    str(_HERE.parents[1].joinpath(*path))
    for path in (
        ("base", "threads.py"),
        ("base", "wake_up.py"),
        ("base", "reduction.py"),
        ("base", "jax_internals.py"),
        ("agreement", "heartbeat.py"),
        ("monitoring", "exporters.py"),
        ("remote", "served_store.py"),
    )
)
_SERVICES = ("meshfeed-parent",)  # of a child process; reads nothing
_MAX_FRAMES = 16
_MAX_CHARACTERS = 8_000  # of one host; the text travels through the key-value store


PROCESSES: weakref.WeakSet[Any] = weakref.WeakSet()
"""The pools of worker processes of this process, which add themselves. One per process, since the threads of all feeds are
shown together, too."""


def _stack(frame: FrameType) -> str:
    frames = [
        one for one in traceback.StackSummary.extract(traceback.walk_stack(frame)) if one.filename != threading.__file__
    ]
    return "".join(traceback.StackSummary.from_list(frames[_MAX_FRAMES - 1 :: -1]).format())


_looking = threading.Lock()


def _frames() -> list[tuple[int, FrameType]]:
    """Returns (identifier, innermost frame) of each thread.

    Meanwhile CPython before 3.12 holds a lock that every thread needs to begin and to end. A collection of garbage, which
    may let other threads run, would then stop the process for ever: https://github.com/python/cpython/issues/106883.
    """
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sorted(sys._current_frames().items())  # documented for exactly this
        finally:
            if collects:
                gc.enable()


def _thread_stacks() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: list[str] = []
    for ident, frame in _frames():
        name = names.get(ident, "unknown")
        if ident == threading.get_ident() or name in _SERVICES or _waits(frame):
            continue
        if name.startswith("meshfeed-") or _is_in_feed(frame):
            found.append(f"thread {name}:\n{_stack(frame)}")
    return found


def _waits(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename in _PASSIVE:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in _WAITING


def _is_in_feed(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return True
        frame = frame.f_back
    return False


def feed_stacks() -> str:
    """Returns the stacks of the threads and worker processes that read, at most 8,000 characters."""
    parts = _thread_stacks()
    for processes in list(PROCESSES):
        parts += processes.stacks()
    text = "\n".join(part.rstrip() for part in parts)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} …"


def note_stacks(error: BaseException) -> None:
    """Adds the stacks to an error about a read that takes too long."""
    if text := feed_stacks():
        error.add_note(text)
