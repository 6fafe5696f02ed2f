"""Open files: a bounded number stays open, and the least recently used are dropped first, unless in use.

A shard is checked once, when it is first opened: its local copy must be the file that the source was created with.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import resource
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from meshfeed._src.base.errors import MeshfeedError
from meshfeed._src.reading.fetch_policy import open_bytes
from meshfeed._src.sources.files.shard import Shard, changed, local_copy

if TYPE_CHECKING:
    from meshfeed._src.sources.files.direct import RemoteBytes
    from meshfeed._src.sources.files.shard_cache import ShardCache

_MAX_OPEN_FILES = 1024
_MAX_FILES_PER_CALL = 64  # a mixture of 35 files in one call, also if two steps are read together
_CALLS_AT_ONCE = 16  # threads whose calls may hold files open, beside those that the pool keeps
_MAX_ENTRIES = 1 << 25  # of 8 bytes: the indexes of checked files in memory
_LEAST_ENTRIES = 256  # charged per checked file, which bounds their number too
_PROBED_FILES, _PROBED_RANGES = 4, 4  # at most, of a batch and of each of these files
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def max_open_files() -> int:
    """Returns a quarter of the process limit, at most 1024: the rest is for the program and for fetches."""
    # The limit is not raised here: it is that of the whole process, and select() fails above 1,024.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN_FILES, soft // 4))


def files_per_call() -> int:
    """Returns the maximum number of files that one call may hold open."""
    return max(1, min(_MAX_FILES_PER_CALL, max_open_files() // _CALLS_AT_ONCE))


def out_of_descriptors(error: OSError) -> bool:
    """Whether too many files are open in this process or on this machine."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


FileRanges = Callable[[], "tuple[Descriptor | RemoteBytes, np.ndarray, np.ndarray]"]
"""Opens a file, and returns it with starts and stops of byte ranges in it, int64[n] each."""


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
        parts = []
        stop = min(stop, self.num_bytes)  # or a damaged length allocates memory that the bytes do not fill
        while start < stop and (part := os.pread(self.number, stop - start, start)):  # at most 2 GiB, or until a signal
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def is_cached(self, offset: int, *, unknown: bool = True) -> bool:
        """Whether a byte is in the page cache; ``unknown`` if the system cannot tell."""
        if not hasattr(os, "RWF_NOWAIT"):
            return unknown
        try:
            os.preadv(self.number, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:  # the read would wait for the disk
            return False
        except OSError:  # the file system does not support the flag
            return unknown
        return True

    def fetch_ahead(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Has the disk fetch byte ranges, int64[n], into the page cache, and does not wait for it."""
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            os.posix_fadvise(self.number, start, stop - start, os.POSIX_FADV_WILLNEED)


def fetch_missing(files: Sequence[FileRanges]) -> bool:
    """Calls :func:`fetch_ahead` unless the page cache has the ranges, as far as a few of a few files show.

    Returns:
      Whether something was missing.
    """
    missing = not all(map(_are_cached, files[:: len(files) // _PROBED_FILES + 1]))
    if missing:
        fetch_ahead(files)
    return missing


def fetch_ahead(files: Sequence[FileRanges]) -> None:
    """Has the disk fetch ranges of several files at once, so that their reads together wait for one access, not for each."""
    for ranges in files[: files_per_call()]:
        with contextlib.suppress(MeshfeedError, OSError):  # the read itself raises it
            opened, starts, stops = ranges()
            if isinstance(opened, Descriptor):
                opened.fetch_ahead(starts, stops)


def _are_cached(ranges: FileRanges) -> bool:
    with contextlib.suppress(MeshfeedError, OSError):  # the read itself raises it
        opened, starts, stops = ranges()
        if isinstance(opened, Descriptor):
            # In the middle: the first page may also have the end of a range that was read.
            middles = (starts + stops)[:: len(starts) // _PROBED_RANGES + 1] // 2
            return all(map(opened.is_cached, middles.tolist()))
    return True


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
        _LRUS.add(self)

    def renew_lock(self) -> None:
        """Makes the lock anew in a forked child, which has no thread that could release it."""
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
        get, use = self._values.get, self._values.move_to_end  # looked up once: a batch may have many files
        with self._lock:
            for key in keys:
                value = get(key)
                if value is None:
                    return None
                use(key)
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


_LRUS: weakref.WeakSet[Lru] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [lru.renew_lock() for lru in list(_LRUS)])

OpenCopy = Callable[[Shard, str, os.stat_result], tuple[T, int]]
"""Opens a local copy; returns what was opened and the number of 8-byte entries that it holds in memory."""


class ShardPool:
    """LRU caches of checked files and of open files. Thread-safe.

    A checked file occupies memory, and an open file a descriptor. The two are bounded separately, because checking a file
    takes a hundred times as long as opening it: with more shards than a process may open, a batch in random order reopens
    most of its files.

    Args:
      max_files: maximum number of open files; by default, a share of the process limit.
      max_entries: maximum number of 8-byte entries in memory, for checked files and separately for open ones.

    Attributes:
      damaged: keys of files that are damaged in the store.
    """

    def __init__(self, max_files: int | None = None, max_entries: int = _MAX_ENTRIES) -> None:
        self._known: Lru[str, object] = Lru(lambda: max_entries, max_entries)
        self.damaged: set[str] = set()
        # Each file with its size: of a compressed one, only that of the copy is known.
        self._open: Lru[tuple[str, str], tuple[Shard, object, int]] = Lru(
            lambda: max_files or max_open_files(), max_entries
        )

    def __len__(self) -> int:
        return len(self._open)

    def is_open(self, shard: Shard) -> bool:
        """Whether ``shard`` is open, in any way."""
        return (shard.key, "direct") in self._open or (shard.key, "library") in self._open

    def checked(self, shard: Shard, check: Callable[[], tuple[T, int]], kind: str = "") -> T:
        """Returns what ``check`` made of a file; calls it if the file is not in memory.

        It returns what is kept and the number of 8-byte entries that it holds. ``kind`` distinguishes values of one file.
        """

        def make() -> tuple[object, int]:
            found, num_entries = check()
            return found, max(num_entries, _LEAST_ENTRIES)

        key = kind + shard.key
        return self._known.find(key) or self._known.get(key, make)  # type: ignore[return-value]

    def all_checked(self, shards: Sequence[Shard]) -> list[Any] | None:
        """Returns what :meth:`checked` keeps of each file; None if one of them is not in memory."""
        return self._known.find_all([shard.key for shard in shards])

    def opened(
        self,
        shard: Shard,
        kind: str,
        cache: ShardCache | None,
        open_copy: OpenCopy[T],
    ) -> T:
        """Returns an open file, through ``cache`` if its path is a URL; ``kind`` is "direct" or "library".

        Raises:
          SourceError: if the file has been removed or changed since the source was created.
        """
        found = self._open.find((shard.key, kind))
        if found is not None:
            return found[1]  # type: ignore[return-value]

        def open_once() -> tuple[tuple[Shard, object, int], int]:
            with local_copy(shard, cache) as (path, status):
                made, num_entries = open_copy(shard, path, status)
                return (shard, made, status.st_size), num_entries

        def make() -> tuple[tuple[Shard, object, int], int]:
            try:
                return open_once()
            except OSError as error:
                if not out_of_descriptors(error) or not len(self._open):
                    raise
                # The rest of the program uses too many descriptors: close all files of the pool and retry.
                self._open.drop([key for key, _ in self._open.oldest_first()])
                return open_once()

        made = self._open.get((shard.key, kind), make)[1]
        if cache is not None and cache.max_bytes is not None:
            self._drop_copies(shard, open_bytes(cache.max_bytes))
        return made  # type: ignore[return-value]

    def descriptor(self, shard: Shard, cache: ShardCache | None) -> Callable[[], Descriptor]:
        """Returns a function that opens a file, or returns it if it is still open."""
        last: weakref.ref[Descriptor] | None = None

        def open_file() -> Descriptor:
            nonlocal last
            # Bypass the pool while the file is open: looking up every file of a batch takes 10 % of the batch.
            found = None if last is None else last()
            if found is None:
                found = self.opened(shard, "direct", cache, open_descriptor)
                last = weakref.ref(found)
            return found

        return open_file

    def drop(self, shards: Sequence[Shard]) -> None:
        """Removes ``shards`` from both caches."""
        self._known.drop([shard.key for shard in shards])
        self._open.drop([(shard.key, kind) for shard in shards for kind in ("direct", "library")])

    def _drop_copies(self, newest: Shard, max_bytes: int) -> None:
        """Closes the oldest cached copies beyond ``max_bytes``: an evicted copy keeps its disk space while open."""
        copies = [(key, size) for key, (shard, _, size) in self._open.oldest_first() if shard.is_cached]
        excess = sum(size for _, size in copies) - max_bytes
        for key, size in copies:
            if excess <= 0:
                break
            if key[0] != newest.key:
                self._open.drop([key])
                excess -= size


# One pool per process, because open files and memory are limited per process: a mixture of 35 sources with one pool
# each would exhaust both.
shared_pool = ShardPool()


def open_descriptor(shard: Shard, path: str, status: os.stat_result) -> tuple[Descriptor, int]:
    """Opens a checked copy, which must be the file of ``status``; returns the descriptor and its weight in a pool."""
    opened = Descriptor(path)
    if not os.path.samestat(opened.status, status) or opened.status.st_size != status.st_size:
        raise changed(shard, path)
    return opened, 0
