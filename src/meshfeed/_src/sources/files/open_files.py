"""Bounds the number of open files: drops the least recently used first, and never closes one that is in use."""

from __future__ import annotations

import collections
import errno
import os
import resource
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

_MAX_OPEN_FILES = 1024
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Descriptor:
    """A file open for reading; closed when the last reference is dropped.

    Attributes:
      number: the file descriptor.
      status: the ``fstat`` result.
    """

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number).atexit = False  # a thread may still be reading at exit
        self.status = os.fstat(self.number)

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes, when it was opened."""
        return self.status.st_size

    def read(self, start: int, stop: int) -> bytes:
        """Reads bytes ``[start, stop)``; fewer if the file ends before."""
        return os.pread(self.number, stop - start, start)


class Lru(Generic[K, V]):
    """A least-recently-used cache. Thread-safe.

    Values are dropped, never closed: a value's resources are released when the last reference is dropped.

    Args:
      max_number: returns the maximum number of values.
      max_weight: maximum sum of the weights; the newest value is kept regardless of its weight.
    """

    def __init__(self, max_number: Callable[[], int], max_weight: int) -> None:
        self._max_number = max_number
        self._max_weight = max_weight
        self._values: collections.OrderedDict[K, tuple[V, int]] = collections.OrderedDict()
        self.weight = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def oldest_first(self) -> list[tuple[K, V]]:
        """Returns keys and values, the least recently used first."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._values.items()]

    def find(self, key: K) -> V | None:
        """Returns the value of ``key`` and marks it as used; None if there is none."""
        found = self.find_all([key])
        return None if found is None else found[0]

    def find_all(self, keys: Sequence[K]) -> list[V] | None:
        """Returns the value of each key and marks them as used; None if one has none."""
        found: list[V] = []
        with self._lock:
            for key in keys:
                value = self._values.get(key)
                if value is None:
                    return None
                self._values.move_to_end(key)
                found.append(value[0])
        return found

    def get(self, key: K, make: Callable[[], tuple[V, int]]) -> V:
        """Returns the value of ``key``; calls ``make`` for the value and its weight if there is none."""
        found = self.find(key)
        if found is not None:
            return found
        made = make()  # outside the lock: does not block other threads
        with self._lock:
            if key in self._values:  # another thread was faster
                return self._values[key][0]
            self._values[key] = made
            self.weight += made[1]
            limit = self._max_number()
            while len(self._values) > 1 and (len(self._values) > limit or self.weight > self._max_weight):
                self.weight -= self._values.popitem(last=False)[1][1]
        return made[0]

    def drop(self, keys: Iterable[K]) -> None:
        """Drops the values of ``keys``."""
        with self._lock:
            for key in keys:
                self.weight -= self._values.pop(key, (None, 0))[1]


def max_open_files() -> int:
    """Returns a quarter of the process limit, at most 1024: the rest is for the program and for fetches."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN_FILES, soft // 4))


def is_out_of_files(error: OSError) -> bool:
    """Whether the process or the system has too many open files."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
