"""How many files stay open: what is least recently used is dropped first, and never under a reader."""

from __future__ import annotations

import collections
import errno
import os
import resource
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

_MAX_OPEN_FILES = 1024
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Descriptor:
    """A file open for reading. It closes when the last thread that uses it is done.

    Attributes:
      number: the file descriptor.
      status: what ``fstat`` says of it.
    """

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number).atexit = False  # a thread may still read then
        self.status = os.fstat(self.number)


class Lru(Generic[K, V]):
    """Values by key, the least recently used dropped first. Thread-safe.

    A value is dropped, never closed: what it holds is released when the last thread that uses it is done.

    Args:
      max_number: how many values are kept at most.
      max_weight: the sum of their weights, at most. The newest value is kept whatever its weight.
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
        """Keys and values, the least recently used first."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._values.items()]

    def find(self, key: K) -> V | None:
        """The value of ``key``, which is used now; None if there is none."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def get(self, key: K, make: Callable[[], tuple[V, int]]) -> V:
        """The value of ``key``, or what ``make`` returns for it: the value and its weight."""
        found = self.find(key)
        if found is not None:
            return found
        made = make()  # outside the lock: other threads go on reading
        with self._lock:
            if key in self._values:
                return self._values[key][0]
            self._values[key] = made
            self.weight += made[1]
            limit = self._max_number()
            while len(self._values) > 1 and (len(self._values) > limit or self.weight > self._max_weight):
                self.weight -= self._values.popitem(last=False)[1][1]
        return made[0]

    def drop(self, keys: Iterable[K]) -> None:
        """Forgets the values of ``keys``."""
        with self._lock:
            for key in keys:
                self.weight -= self._values.pop(key, (None, 0))[1]


def max_open_files() -> int:
    """At most a quarter of the files that the process may open: the rest is for the program and for what is fetched."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN_FILES, soft // 4))


def is_out_of_files(error: OSError) -> bool:
    """Whether the process, or the system, has too many files open."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
