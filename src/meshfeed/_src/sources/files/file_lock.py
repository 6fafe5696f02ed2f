"""Locks between processes of one host with ``flock``; the kernel releases them when the holder dies.

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
from collections.abc import Iterator

from meshfeed._src.base.errors import StalledError

_POLL_SECONDS = 0.001  # polls, because flock has no timeout
_MAX_POLL_SECONDS = 0.05


def try_lock(path: pathlib.Path) -> int | None:
    """Tries to lock a lock file exclusively, creating it if needed; returns a handle for :func:`unlock`, or None."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _flock(handle, fcntl.LOCK_EX):
                os.close(handle)
                return None
            if still_there(handle, path):
                with contextlib.suppress(OSError):  # on a full disk, only the name of the holder is lost
                    os.truncate(handle, 0)
                    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


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
    deadline, pause = time.monotonic() + seconds, _POLL_SECONDS
    while (handle := try_lock(path)) is None:
        if time.monotonic() > deadline:
            raise _stalled(path, holder_of(path), seconds)
        time.sleep(pause)
        pause = min(2 * pause, _MAX_POLL_SECONDS)
    try:
        yield
    finally:
        unlock(path, handle)


def lock_within(handle: int, mode: int, path: pathlib.Path, seconds: float) -> None:
    """Locks an open file with ``mode``, ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.

    Raises:
      StalledError: if the lock is not free within ``seconds``.
    """
    deadline, pause = time.monotonic() + seconds, _POLL_SECONDS
    while not _flock(handle, mode):
        if time.monotonic() > deadline:
            raise _stalled(path, "another process", seconds)
        time.sleep(pause)
        pause = min(2 * pause, _MAX_POLL_SECONDS)


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
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not _flock(handle, fcntl.LOCK_EX):
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


def _flock(handle: int, mode: int) -> bool:
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stalled(path: pathlib.Path, holder: str, seconds: float) -> StalledError:
    return StalledError(
        f"ShardCache: {holder} has held the lock of {path} for more than {seconds:.0f} s. It is stopped, or hangs in that "
        "folder's disk. Continue or end that process, which releases the lock; or use another directory=.",
        waited_seconds=seconds,
    )
