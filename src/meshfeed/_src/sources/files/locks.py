"""Locks of files by ``flock``, which the kernel releases when a process dies, and waits for them.

The holder of a lock removes the lock file. A process that opened the file before its removal and locks it afterwards has
locked an unlinked file, while a third process may create and lock a new one. A lock is therefore valid only if the path
still refers to the locked file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from meshfeed._src.base.errors import StalledError

_T = TypeVar("_T")
_LOCK_POLL_SECONDS = 0.001  # polls, because flock has no timeout
POLL_SECONDS = 0.02
"""Shortest pause before a thread looks again for a file that another one fetches, or for room."""
MAX_POLL_SECONDS = 0.05
"""Longest of these pauses."""


def poll_pauses() -> Iterator[float]:
    """Yields the pauses, in seconds, in which a thread waits for a file that another one fetches."""
    pause = POLL_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, MAX_POLL_SECONDS)


def try_lock(path: pathlib.Path) -> int | None:
    """Tries to lock a lock file exclusively, creating it if needed; returns a handle for :func:`unlock`, or None."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            is_locked = flock(handle, fcntl.LOCK_EX)
            if is_locked and still_there(handle, path):
                with contextlib.suppress(OSError):  # on a full disk, only the name of the holder is lost
                    os.truncate(handle, 0)
                    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if not is_locked:
            return None


def unlock(path: pathlib.Path | None, handle: int) -> None:
    """Removes the lock file ``path``, if given, and releases the lock."""
    try:
        if path is not None:
            with contextlib.suppress(OSError):  # a leftover lock file is harmless
                path.unlink(missing_ok=True)
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone keeps the lock if a forked child inherited the handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: pathlib.Path, seconds: float) -> Iterator[None]:
    """Holds the lock of a lock file within the ``with`` block.

    Raises:
      StalledError: if the lock is not free within ``seconds``; names the holder.
    """
    handle = poll(lambda: try_lock(path), seconds, lambda: lock_stalled(path, holder_of(path), seconds))
    try:
        yield
    finally:
        unlock(path, handle)


def poll(attempt: Callable[[], _T | None], seconds: float, stalled: Callable[[], StalledError]) -> _T:
    """Returns the first result of ``attempt`` that is not None; raises ``stalled()`` if there is none within ``seconds``."""
    deadline, pause = time.monotonic() + seconds, _LOCK_POLL_SECONDS
    while (found := attempt()) is None:
        if time.monotonic() > deadline:
            raise stalled()
        time.sleep(pause)
        pause = min(2 * pause, MAX_POLL_SECONDS)
    return found


def holder_of(path: pathlib.Path) -> str:
    """Returns a description of the process that holds the lock of a lock file."""
    try:
        return path.read_text(errors="replace")[:300] or "another process"
    except OSError:
        return "another process"


def remove_unlocked(path: pathlib.Path) -> bool:
    """Removes a file unless it is locked; returns whether the lock was free.

    Raises:
      FileNotFoundError: if the file does not exist.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # those of other users are readable
    try:
        if not flock(handle, fcntl.LOCK_EX):
            return False
        if still_there(handle, path):
            path.unlink(missing_ok=True)
        return True
    finally:
        unlock(None, handle)


def still_there(handle: int, path: pathlib.Path) -> bool:
    """Whether ``path`` still refers to the open file."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def flock(handle: int, mode: int) -> bool:
    """Tries to lock an open file, ``fcntl.LOCK_SH`` or ``LOCK_EX``; returns whether it did."""
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_stalled(path: pathlib.Path, holder: str, seconds: float) -> StalledError:
    """Returns the error for a lock that was not free within ``seconds``."""
    return StalledError(
        f"ShardCache: {holder} has held the lock of {path} for more than {seconds:.0f} s. It is stopped, or hangs in that "
        "folder's disk. Continue or end that process, which releases the lock; or use another directory=.",
        waited_seconds=seconds,
    )
