"""Arrays in files that are mapped into memory, which other processes of this machine map too, in place of a copy."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from meshfeed._src.base.errors import SourceError

_stays_here: contextvars.ContextVar[bool] = contextvars.ContextVar("stays_here", default=False)


@contextlib.contextmanager
def on_this_machine() -> Iterator[None]:
    """What is pickled in this block is for another process of this machine."""
    token = _stays_here.set(True)
    try:
        yield
    finally:
        _stays_here.reset(token)


class MappedArray(NamedTuple):
    """Where an array is in a file: ``num_bytes`` from ``offset`` on, and in these its first element at ``start``."""

    path: str
    inode: int
    offset: int
    num_bytes: int
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]

    def open(self) -> np.ndarray[Any, Any]:
        """Returns the array, read-only.

        Raises:
          SourceError: another file has that name now.
        """
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.inode or status.st_size < self.offset + self.num_bytes:
                raise SourceError(
                    f"{self.path}, which is mapped into memory, was replaced or cut short while a process was started that "
                    "reads it too. Create the source again."
                )
            content = np.memmap(file, np.uint8, "r", self.offset, (self.num_bytes,))
        return np.ndarray(self.shape, self.dtype, content, self.start, self.strides)


def mapped(array: np.ndarray[Any, Any]) -> MappedArray | None:
    """Returns where an array is in a file, if what is pickled now stays on this machine; otherwise None.

    None as well if its memory is not that of the file that has this name now, or the system does not say.
    """
    if not _stays_here.get() or not array.size or array.dtype.hasobject:
        return None
    first = array.__array_interface__["data"][0]
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    low = first + sum(min(step, 0) for step in reach)
    high = first + sum(max(step, 0) for step in reach) + array.itemsize
    with contextlib.suppress(OSError, ValueError), open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            bounds, access, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
            begin, end = (int(bound, 16) for bound in bounds.split("-"))
            if not begin <= low < end:
                continue
            # Private memory may differ from the file, and a file that was replaced is another one.
            if high > end or not access.endswith("s") or not path or os.stat(path[0]).st_ino != int(inode):
                return None
            at = int(offset, 16) + low - begin
            return MappedArray(
                path[0], int(inode), at, high - low, first - low, array.shape, array.dtype, array.strides
            )
    return None
