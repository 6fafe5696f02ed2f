"""A cache of remote files in a local folder that all processes of a host share.

The folder contains complete files and partial downloads, protected by ``flock`` locks, which the kernel releases when a
process dies, and by atomic renames. It may contain other files: only the following names are counted or removed.

* ``meshfeed_<key>-<name>``: a complete file. Its modification time is the time of the last open, used for eviction. Locked
  shared while being opened, and exclusively while being removed.
* ``meshfeed_<key>.lock``: held by the process that fetches the file.
* ``meshfeed_<key>.<bytes>.<random>.part``: a download in progress, locked by its owner. The final size is part of the
  name: concurrent fetches by several processes then stay within the limit together.
* ``meshfeed_<random>.plan``: when a process needs which copies next, locked by it.
* ``meshfeed_room.lock``: held while the folder is scanned and files are renamed or removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError, StalledError, without_signatures
from meshfeed._src.base.fork import finalize
from meshfeed._src.base.settings import Retry, local_path
from meshfeed._src.base.stats import CACHES
from meshfeed._src.base.types import public
from meshfeed._src.reading.fetch_policy import default_ahead_bytes, eviction_order, plan_bytes
from meshfeed._src.sources.checks import is_count
from meshfeed._src.sources.files.direct import RemoteBytes
from meshfeed._src.sources.files.download import Download, Downloads
from meshfeed._src.sources.files.formats import decompress
from meshfeed._src.sources.files.locks import (
    POLL_SECONDS,
    flock,
    holder_of,
    lock_stalled,
    locked,
    poll,
    poll_pauses,
    remove_unlocked,
    still_there,
    try_lock,
    unlock,
)
from meshfeed._src.sources.files.paths import (
    StoredFile,
    look_up,
    without_query,
    without_signing,
)

_log = logging.getLogger("meshfeed.sources.shard_cache")

_INFLATION = 5  # decompressed size over compressed size, if not known; only to reserve space
_PREFIX = "meshfeed_"
_DIGEST_ATTRIBUTE = "user.meshfeed.xxh3_64"
_CHECKSUM_ATTRIBUTE = "user.meshfeed.checksum"  # which the fetched bytes had
_WHOLE = re.compile(_PREFIX + r"[0-9a-f]{32}-.*", re.DOTALL)
_PLAN = re.compile(_PREFIX + r"[0-9a-f]{32}\.plan")
_OWNED = re.compile(_PREFIX + r"[0-9a-f]{32}\.(lock|plan|(?P<part>\d+)\.[0-9a-f]{16}\.part)")
_PLAN_SECONDS, _OLD_PLAN_SECONDS = 0.2, 60.0  # between plans; a plan that is older is that of a stopped loop
_PLANNED_FILES = 4096


@dataclasses.dataclass(frozen=True)
class _Entry:
    url: str
    num_bytes: int
    path: pathlib.Path
    lock: pathlib.Path
    checksum: str | None
    key: str
    version: str
    compression: str | None = None
    copy_bytes: int | None = None  # size of the copy, if known: differs from num_bytes if it is decompressed

    @property
    def shown(self) -> str:
        """The URL in messages."""
        return without_signatures(self.url)

    @property
    def room_bytes(self) -> int:
        """Space that is reserved for a fetch; an estimate if the size of the copy is not known."""
        if self.compression is None:
            return self.num_bytes
        return self.num_bytes + (self.copy_bytes or _INFLATION * self.num_bytes)

    @property
    def known_bytes(self) -> int:
        """That of :attr:`room_bytes` which is not an estimate."""
        return self.num_bytes if self.compression is None else self.num_bytes + (self.copy_bytes or 0)


class _SharedPlans:
    """When the processes that share a folder need its copies; each writes its plan, and replaces it later. Thread-safe."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._own: list[tuple[pathlib.Path, int]] = []  # the file and its handle
        self._written = -math.inf
        # Name of a plan → when it was written, and the plan.
        self._others: dict[str, tuple[float, Mapping[str, float]]] = {}
        finalize(self, _unlock_all, self._own)

    def is_due(self) -> bool:
        """Whether the last plan was written a while ago."""
        return time.monotonic() > self._written + _PLAN_SECONDS

    def publish(self, uses: Mapping[str, float]) -> None:
        """Writes when this process needs copies, in batches from now."""
        path = self._directory / f"{_PREFIX}{secrets.token_hex(16)}.plan"
        nearest = dict(sorted(uses.items(), key=lambda item: item[1])[:_PLANNED_FILES])
        with self._lock, contextlib.suppress(OSError):  # on a full or removed disk, other processes do without the plan
            self._written = time.monotonic()
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            last, self._own[:] = list(self._own), [(path, handle)]
            try:
                flock(handle, fcntl.LOCK_EX)
                os.write(handle, json.dumps(nearest).encode())
            finally:
                _unlock_all(last)

    def withdraw(self) -> None:
        """Removes what was published."""
        with self._lock:
            _unlock_all(self._own)

    def read(self, paths: Sequence[pathlib.Path]) -> dict[str, float]:
        """Returns the next use of copies in other processes, given their plans. Needs the room lock."""
        own = [path for path, _ in self._own]
        plans = {path.name: self._others.get(path.name) or _read_plan(path) for path in paths if path not in own}
        self._others = {name: plan for name, plan in plans.items() if plan is not None}
        found: dict[str, float] = {}
        for written, uses in self._others.values():
            if time.time() < written + _OLD_PLAN_SECONDS:
                found |= {copy: min(use, found.get(copy, math.inf)) for copy, use in uses.items()}
        return found


def _read_plan(path: pathlib.Path) -> tuple[float, Mapping[str, float]] | None:
    try:
        return path.stat().st_mtime, json.loads(path.read_bytes())
    except (OSError, ValueError):  # replaced by a newer one, or half written beside the last one
        return None


def _unlock_all(locks: list[tuple[pathlib.Path, int]]) -> None:
    while locks:
        unlock(*locks.pop())


class _NoRoom(Exception):
    """There is no room without evicting a file that is needed sooner, or the file is no longer needed soon."""


@public("meshfeed")
@dataclasses.dataclass(frozen=True)
class CacheStats:
    """What a :class:`ShardCache` did in this process.

    Attributes:
      hits: opens of a file that was there.
      misses: opens that had to wait for a file.
      wait_seconds: the time that they waited, summed over threads.
      fetched: files fetched by this process.
      fetched_ahead: how many of them were fetched before a read needed them.
      fetched_bytes: their bytes, as stored remotely.
      evicted: files removed to make room.
    """

    hits: int = 0
    misses: int = 0
    wait_seconds: float = 0.0
    fetched: int = 0
    fetched_ahead: int = 0
    fetched_bytes: int = 0
    evicted: int = 0


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file that is read through a cache; see :class:`meshfeed._src.base.hooks.CachedFile` and :meth:`ShardCache.open`.

    ``num_bytes`` is the size of the copy if it is known (``copy_bytes``, or 0), or else that of the stored file, which is
    about as large or smaller, if that has been looked up.
    """

    cache: ShardCache
    url: str
    compression: str | None
    num_bytes: int = dataclasses.field(compare=False)
    copy_bytes: int = dataclasses.field(default=0, compare=False)

    @property
    def ahead_bytes(self) -> int:
        """See ``CachedFile``."""
        return self.cache.ahead_bytes

    @property
    def plan_bytes(self) -> int:
        """See ``CachedFile``."""
        return plan_bytes(self.cache.ahead_bytes, self.cache.max_bytes)

    def follow(self, next_use: Callable[[Any], float]) -> None:
        """See ``CachedFile``."""
        self.cache._follow(next_use)
        if self.url in self.cache._found:  # or the use of a copy that an earlier process left would be unknown
            self.cache._entry(self.url, self.compression, self.copy_bytes)

    def unfollow(self, next_use: Callable[[Any], float]) -> None:
        """See ``CachedFile``."""
        self.cache._unfollow(next_use)

    def is_here(self) -> bool:
        """See ``CachedFile``. Counts as a use, or other processes may evict the copy."""
        entry = self.cache._entries.get((self.url, self.compression))
        if entry is None or not _is_whole(entry) or not self.cache._known.get(entry.path.name):
            return False
        with contextlib.suppress(OSError):
            os.utime(entry.path)
        if self.cache._shared_plans.is_due():
            self.cache._publish_plan()
        return True

    def fetch(self, next_use: float) -> bool:
        """See ``CachedFile``."""
        entry = self.cache._entry(self.url, self.compression, self.copy_bytes)
        try:
            if not _is_whole(entry) or not self.cache._is_intact(entry):
                self.cache._drop_damaged(entry)
                self.cache._fetch_once(entry, next_use)
            self.is_here()
        except _NoRoom:
            return False
        return True


_ALIVE: weakref.WeakSet[ShardCache] = weakref.WeakSet()
# The child has no thread that would release a lock, or end a download.
os.register_at_fork(after_in_child=lambda: [cache._forget_process() for cache in list(_ALIVE)])


@public("meshfeed")
class ShardCache:
    """A folder on a local disk that caches remote files.

    Other files and folders in it are ignored, and do not count toward ``max_bytes``.

    The first process of the host that needs a file fetches it completely while the others wait; if that process dies,
    another one takes over. A file is renamed into place only when it is complete and its size and hash match. Safe for
    concurrent use by threads, processes, feeds and jobs. Can be pickled.

    Credentials and endpoints come from fsspec: environment variables, its configuration files, or
    ``fsspec.config.conf``.

    Args:
      directory: a folder on a local disk; created if needed.
      max_bytes: maximum total size of the copies in bytes, or None for no limit. The copies that the feeds of all processes
        need last are removed first; among those that none needs, the least recently opened. Open files keep their disk space
        until closed.
      ahead_bytes: a feed fetches the files that its next batches need before it reads them, up to this many bytes; 0 to
        fetch a file only when a batch needs it. Default: half of ``max_bytes``, or 4 GiB.
      retry: retry policy of each request. Files are fetched in blocks, so a retry does not begin again.
      checksums: ``{URL or base name: "<algorithm>:<hex digest>"}``, with an algorithm of hashlib or xxhash. Files
        without a checksum are checked by size, and by MD5 if the store provides one (Google, Azure).
      stall_seconds: if another process fetches a file and receives no byte for this long, this process fetches the file
        too. Also the timeout for locks.
      read_timeout_seconds: a request to the store that is not answered for this long is sent again.
      verify: a copy that another process fetched is compared with its digest when this process first opens it, which
        reads it once; a damaged copy is fetched again. The digest is an extended attribute of the copy; without
        one, its checksum is compared if it is known.

    Raises:
      SettingsError: if the folder is a URL, or cannot be created or written, or a setting is out of range.
      StalledError: if another process holds the folder's lock for longer than ``stall_seconds``; names it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int | None = None,
        *,
        ahead_bytes: int | None = None,
        retry: Retry = Retry(),  # frozen
        checksums: Mapping[str, str] | None = None,
        stall_seconds: float = 60.0,
        read_timeout_seconds: float = 30.0,
        verify: bool = True,
    ) -> None:
        if max_bytes is not None and not is_count(max_bytes):
            raise SettingsError(
                f"max_bytes={max_bytes!r}. Expected a positive int, the bytes that the cache may hold, or None.",
                setting="max_bytes",
            )
        if ahead_bytes is not None and not is_count(ahead_bytes, 0):
            raise SettingsError(
                f"ahead_bytes={ahead_bytes!r}. Expected an int >= 0, the bytes to fetch ahead of the reads, or None.",
                setting="ahead_bytes",
            )
        if isinstance(read_timeout_seconds, bool) or not 0 < read_timeout_seconds < math.inf:
            raise SettingsError(
                f"read_timeout_seconds={read_timeout_seconds!r}. Expected a positive number of seconds.",
                setting="read_timeout_seconds",
            )
        for name, checksum in (checksums or {}).items():
            if not is_checksum(checksum):
                raise SettingsError(
                    f"checksums={{{name!r}: {checksum!r}}}. Expected '<algorithm>:<hex digest>', with an algorithm of "
                    "hashlib or xxhash, such as sha256 or xxh3_64.",
                    setting="checksums",
                )
        self.ahead_bytes = default_ahead_bytes(max_bytes) if ahead_bytes is None else ahead_bytes
        self.directory = local_path("directory", directory).absolute()
        self.max_bytes = max_bytes
        self._retry = retry
        self._checksums = dict(checksums or {})
        self.listed: dict[str, str] = {}
        self._verify = verify
        self._stall_seconds, self._read_timeout_seconds = stall_seconds, read_timeout_seconds
        self._entries: dict[tuple[str, str | None], _Entry] = {}
        self._found: dict[str, StoredFile] = {}
        pickled = set(self.__dict__)
        self._forget_process()
        self._of_process = self.__dict__.keys() - pickled
        self._check_directory(directory)

    def _check_directory(self, given: object) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._room():
                pass
        except StalledError:
            raise
        except OSError as error:
            raise SettingsError(
                f"directory={str(given)!r} cannot be used as a cache: {error}. Expected a folder on a local disk "
                "that can be made and written.",
                setting="directory",
            ) from error

    def _forget_process(self) -> None:
        """Resets what belongs to this process."""
        _ALIVE.add(self)
        self._plans: list[weakref.WeakMethod[Callable[[Any], float]]] = []
        self._files = {  # by the name of the copy
            entry.path.name: RemoteFile(self, url, compression, 0)
            for (url, compression), entry in self._entries.items()
        }
        self._shared_plans = _SharedPlans(self.directory)
        self._known: dict[str, bool] = {}  # name of a copy → whether its bytes are those that were fetched
        self._refused: dict[str, str] = {}  # name of a copy → why what was fetched, twice, is not the file
        self._stats = CacheStats()
        self._stats_lock, self._room_lock = threading.Lock(), threading.Lock()
        self._downloads = Downloads(self._retry, self._read_timeout_seconds)

    def __getstate__(self) -> dict[str, Any]:
        # Copies: other feeds may look up files while this is pickled.
        kept = [(name, value) for name, value in self.__dict__.items() if name not in self._of_process]
        return {name: value.copy() if isinstance(value, dict) else value for name, value in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_process()

    def stats(self) -> CacheStats:
        """Returns what this cache did in this process since it was made or unpickled."""
        return self._stats

    def _count(self, **more: float) -> None:
        CACHES.add(more)
        with self._stats_lock:
            self._stats = dataclasses.replace(
                self._stats, **{name: getattr(self._stats, name) + value for name, value in more.items()}
            )

    def _follow(self, next_use: Callable[[Any], float]) -> None:
        self._plans = [plan for plan in self._plans if plan() is not None]
        if not any(plan() == next_use for plan in self._plans):
            self._plans.append(weakref.WeakMethod(next_use))  # type: ignore[arg-type]

    def _unfollow(self, next_use: Callable[[Any], float]) -> None:
        """Ends :meth:`_follow`, and withdraws the plan, or other processes would keep copies that nobody needs."""
        plans = [plan for plan in self._plans if plan() not in (None, next_use)]
        if len(plans) < len(self._plans):
            self._plans = plans
            if plans:
                self._publish_plan()
            else:
                self._shared_plans.withdraw()

    def _next_use(self, name: str) -> float:
        """Returns when a copy is needed next, in batches of the feed of this process that needs it first."""
        file, plans = self._files.get(name), [plan() for plan in self._plans]
        return min((plan(file) for plan in plans if plan is not None), default=math.inf) if file else math.inf

    def _publish_plan(self) -> None:
        uses = {name: self._next_use(name) for name in list(self._files)} if self._plans else {}
        if uses:
            self._shared_plans.publish({name: use for name, use in uses.items() if use < math.inf})
            if not self._plans:  # the last feed was closed meanwhile, and has withdrawn the plan before
                self._shared_plans.withdraw()

    @contextlib.contextmanager
    def open(self, url: str, *, compression: str | None = None, num_bytes: int | None = None) -> Iterator[pathlib.Path]:
        """Fetches a file if it is not cached, and keeps it from eviction within the ``with`` block.

        A file opened inside the block stays readable afterwards: the disk space of an evicted file is freed when the last
        reader closes it.

        Args:
          url: URL or path of the file.
          compression: the copy is decompressed: "gz", "bz2", "xz", "zstd", "br" or "snappy"; None to copy the file as it
            is.
          num_bytes: decompressed size in bytes, if known.

        Yields:
          Path of the local copy.

        Raises:
          SourceError: if the file is larger than the cache, or does not exist.
          CorruptDataError: if the checksum does not match, also after a second fetch.
          OSError: if the file could not be fetched after all retries.
          StalledError: (an OSError) if another process holds a lock for longer than ``stall_seconds``; names it.
        """
        entry = self._entry(url, compression, num_bytes)
        waited = None
        while True:
            with _kept(entry, self._stall_seconds) as is_here:
                if is_here and self._is_intact(entry):
                    self._count(hits=1) if waited is None else self._count(misses=1, wait_seconds=waited)
                    yield entry.path
                    return
            started = time.monotonic()
            self._drop_damaged(entry)
            self._fetch_once(entry)
            waited = (waited or 0.0) + time.monotonic() - started

    def renew(self, urls: Iterable[str], checksums: Mapping[str, str]) -> None:
        """Forgets what it has found about files: a source takes them as they are when it is created.

        ``checksums`` are those that manifests list, URL → checksum, kept as ``listed``. Those of the user come first.
        """
        listed = dict(checksums)
        for url in [url for url, checksum in checksums.items() if not is_checksum(checksum)]:
            _log.warning(
                "%s is not verified: its checksum is %r, whose algorithm is not known here",
                *(without_signatures(url), listed.pop(url)),
            )
        before, files = self.listed, set(urls)
        self.listed = {url: checksum for url, checksum in before.items() if url not in files} | listed
        self._found = {url: found for url, found in self._found.copy().items() if url not in files}
        for (url, compression), entry in self._entries.copy().items():
            if url in files:
                self._entries.pop((url, compression), None)
                self._files.pop(entry.path.name, None)
                self._refused.pop(entry.path.name, None)
                if before.get(url) != listed.get(url):
                    self._known.pop(entry.path.name, None)

    def identify(self, url: str) -> tuple[int, str]:
        """Returns the size in bytes and a version key, which changes if the content at the URL changes."""
        entry = self._entry(url)
        return entry.num_bytes, entry.key

    def looked_up(self, url: str) -> StoredFile | None:
        """Returns the size, version and checksum of a file that this cache has looked up, or None."""
        return self._found.get(url)

    def remember(self, url: str, found: StoredFile) -> None:
        """Takes the size, version and checksum of a file from a look-up elsewhere, unless they are known."""
        self._found.setdefault(url, found)

    def version_of(self, url: str) -> str:
        """Returns the version of a file as the store reports it; empty if it reports none."""
        return self._entry(url).version

    def is_cached(self, url: str) -> bool:
        """Whether there is a copy of a file; it may be evicted at any time."""
        return _is_whole(self._entry(url))

    def discard(self, url: str, *, compression: str | None = None) -> None:
        """Removes the copy of a file, if there is one; the next open fetches the file again.

        Waits while another thread or process is opening the copy.

        Raises:
          StalledError: if that takes longer than ``stall_seconds``.
        """
        path = self._entry(url, compression).path
        self._entries.pop((url, compression), None)
        self._found.pop(url, None)
        self._known.pop(path.name, None)
        self._refused.pop(path.name, None)
        self._remove(path)

    def _remove(self, path: pathlib.Path) -> None:
        def remove() -> bool | None:
            with self._room(), contextlib.suppress(FileNotFoundError):
                return remove_unlocked(path) or None
            return True

        def stalled() -> StalledError:
            return StalledError(
                f"ShardCache: {path} is damaged, and cannot be removed because another process has been opening it "
                f"for {self._stall_seconds:.0f} s. `fuser {path}` names it: continue or end it.",
                waited_seconds=self._stall_seconds,
            )

        poll(remove, self._stall_seconds, stalled)

    def _is_intact(self, entry: _Entry) -> bool:
        """Compares a copy that this process did not fetch with its digest, once."""
        name = entry.path.name
        is_intact = self._known.get(name)
        if is_intact is None:
            is_intact = self._known[name] = not self._verify or _matches_digest(entry)
        return is_intact

    def _drop_damaged(self, entry: _Entry) -> None:
        """Removes a copy that the disk has damaged."""
        if self._known.get(entry.path.name, True):
            return
        _log.warning(
            "the copy %s of %s is damaged, or not known to have the file's checksum; fetching it again",
            *(entry.path, entry.shown),
        )
        self._remove(entry.path)
        self._known.pop(entry.path.name, None)

    def num_bytes(self) -> int:
        """Returns the total size in bytes of complete files and of fetches in progress."""
        with self._room():
            return sum(size for _, size, _ in self._held())

    def _entry(self, url: str, compression: str | None = None, copy_bytes: int | None = None) -> _Entry:
        """Returns the path and checksum of a file's copy; looks up the size and version once, and keeps them."""
        entry = self._entries.get((url, compression))
        if entry is None:
            found = self._found.get(url)  # once: other threads may renew it
            if found is None:
                found = self._found[url] = look_up(url, "ShardCache", self._retry)
            size, version, stored_checksum = found
            name = without_query(url).rstrip("/").rsplit("/", 1)[-1]
            # Another signature is the same file. Without a version, the query may be what distinguishes two.
            unsigned = without_signing(url) if version else url
            key = xxhash.xxh3_128_hexdigest(f"{unsigned}\n{size}\n{version}{compression or ''}".encode())
            given = self._checksums.get(url) or self._checksums.get(name)
            checksum = given or self.listed.get(url) or stored_checksum
            path = self.directory / f"{_PREFIX}{key}-{_end_of_name(name)}"
            lock = self.directory / f"{_PREFIX}{key}.lock"
            copy_bytes = size if compression is None else copy_bytes or None
            entry = _Entry(url, size, path, lock, checksum, key, version, compression, copy_bytes)
            self._entries[url, compression] = entry
            self._files[path.name] = RemoteFile(self, url, compression, 0)
        return entry

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Locks the folder."""
        if not self._room_lock.acquire(timeout=self._stall_seconds):  # in turn, which polling for the file lock is not
            raise lock_stalled(self.directory, "another thread of this process", self._stall_seconds)
        try:
            with locked(self.directory / f"{_PREFIX}room.lock", self._stall_seconds):
                yield
        finally:
            self._room_lock.release()

    def _fetch_once(self, entry: _Entry, next_use: float | None = None) -> None:
        """Waits for another process that is fetching the file and makes progress; otherwise fetches it.

        ``next_use`` is when a file that is fetched ahead is needed. Only files that are needed later are evicted for it, and
        _NoRoom is raised if that is not enough.
        """
        if (why := self._refused.get(entry.path.name)) is not None:
            raise CorruptDataError(why, path=entry.url)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._explained(entry.url))
            waited_from, seen, pauses = time.monotonic(), (-1, 0), poll_pauses()
            while (handle := try_lock(entry.lock)) is None:
                arrived = self._arrived(entry.key)
                if arrived != seen:
                    waited_from, seen = time.monotonic(), arrived
                elif time.monotonic() - waited_from > self._stall_seconds:
                    _log.warning(
                        "%s has fetched %d bytes of %s and nothing for %.0f s; fetching it here as well",
                        holder_of(entry.lock), arrived[1], entry.shown, self._stall_seconds,
                    )  # fmt: skip
                    break
                time.sleep(next(pauses))
                if _is_whole(entry):
                    return
            if handle is not None:
                stack.callback(unlock, entry.lock, handle)
                if _is_whole(entry):
                    return
            try:
                self._fetch(entry, next_use)
            except CorruptDataError as error:  # perhaps damaged in transit: retry once
                _log.warning("%s; fetching it again", error)
                try:
                    self._fetch(entry, next_use)
                except CorruptDataError as again:  # with SkipBad, each read of its records would fetch it twice
                    self._refused[entry.path.name] = str(again)
                    raise
            self._count(fetched=1, fetched_ahead=int(next_use is not None), fetched_bytes=entry.num_bytes)

    @contextlib.contextmanager
    def _explained(self, url: str) -> Iterator[None]:
        """Recreates the folder if it has been removed, and names it in the error if it cannot be written."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            yield
        except FileNotFoundError as error:  # a file that the store does not have is a SourceError
            raise self.emptied(url) from error
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            why = "A disk with errors is often remounted read-only: look at the system's log, or use another directory="
            if error.errno != errno.EROFS:
                what = f"{error.filename!r}" if error.filename else "it"
                why = f"{what} may be another user's: give each user a folder of their own, or use another directory="
            raise _reworded(
                error,
                f"ShardCache: the folder {self.directory} cannot be written any more ({os.strerror(error.errno)}). {why}",
            ) from error

    def emptied(self, url: str) -> OSError:
        """Returns the error for a file of the folder that nobody of this cache has removed. It is worth another attempt."""
        return OSError(
            f"ShardCache: the copy of {without_signatures(url)} was removed from {self.directory} by something else than "
            "this cache, such as a program that empties temporary folders. Exclude the folder from it, or use "
            "another directory="
        )

    def _arrived(self, key: str) -> tuple[int, int]:
        """Returns the time of the last write to a download of a file (of any file, if ``key`` is "*"), and its bytes."""
        found = [(0, 0)]
        for part in self.directory.glob(f"{_PREFIX}{key}.*.part"):
            with contextlib.suppress(FileNotFoundError):
                status = part.stat()
                found.append((status.st_mtime_ns, status.st_blocks * 512))
        return max(found)

    def _download(self, entry: _Entry, handle: int, next_use: float | None) -> None:
        """Downloads a file, which must still have the version of ``entry``."""

        def priority() -> float:
            return -1.0 if next_use is None else self._next_use(entry.path.name)

        remote = RemoteBytes(entry.url, entry.num_bytes, entry.version, "ShardCache")
        try:
            self._downloads.run(Download(remote, handle, priority))
        except OSError:
            with contextlib.suppress(OSError):  # a file that changed may be why
                remote.look_up()
            raise
        # Not If-Range or If-Match, which would notice a change earlier: fsspec does not pass them to all stores.
        remote.look_up(self._retry)

    def _fetch(self, entry: _Entry, next_use: float | None) -> None:
        with contextlib.ExitStack() as stack:
            reserved = self._reserve(entry, next_use)
            part = stack.enter_context(_owned(reserved))
            try:
                self._download(entry, reserved[1], next_use)
                _check(entry, part)
                if entry.compression is not None:
                    with self._room():  # or a concurrent scan of the folder removes it before it is locked
                        unpacked = self._new_part(entry, 0)
                    stored, part = part, stack.enter_context(_owned(unpacked))
                    decompress(entry.compression, str(stored), str(part), entry.copy_bytes, what=entry.shown)
                    self._make_room_for_unpacked(entry, part, next_use)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise _reworded(error, self._describe_full(entry)) from error
            _write_digest(part, entry)
            with self._room():  # a concurrent scan of the folder could miss both names
                self._publish_plan()  # or another process takes the new copy for one that is not needed
                os.replace(part, entry.path)
            self._known[entry.path.name] = True

    def _describe_full(self, entry: _Entry) -> str:
        """Returns an error message that names what holds the space of the disk."""
        disk = shutil.disk_usage(self.directory)
        held = self.num_bytes()
        others = max(disk.used - held, 0)  # files under way count with their final size, also what is not written yet
        return (
            f"ShardCache: the disk of {self.directory} was full before {entry.shown} ({entry.num_bytes:,} bytes) was "
            f"fetched. It has {disk.total:,} bytes: {held:,} are this cache's, {others:,} belong to other files, and "
            f"{disk.free:,} are free. Free space there, or {'lower' if self.max_bytes else 'set'} max_bytes= so that the "
            "cache removes files itself"
        )

    def _reserve(self, entry: _Entry, next_use: float | None) -> tuple[pathlib.Path, int]:
        """Evicts files if needed, and reserves the space with an empty part that has the file size in its name."""
        if self.max_bytes is not None and entry.known_bytes > self.max_bytes:
            raise self._too_large(entry, entry.known_bytes)
        needed = entry.room_bytes if self.max_bytes is None else min(entry.room_bytes, self.max_bytes)
        waited_from, seen = time.monotonic(), (-1, 0)
        while True:
            with self._room():
                if next_use is not None and self._plans and self._next_use(entry.path.name) > next_use:
                    raise _NoRoom  # the reads have passed it while the fetch waited for its turn
                missing = self._make_room(needed, next_use)
                if missing <= 0:
                    return self._new_part(entry, needed)
            if next_use is not None:
                raise _NoRoom
            arrived = self._arrived("*")
            if arrived != seen:  # a slow fetch makes room when it ends
                waited_from, seen = time.monotonic(), arrived
            elif time.monotonic() - waited_from > self._stall_seconds:
                raise SourceError(
                    f"ShardCache: no room for {entry.shown} ({entry.num_bytes:,} bytes) within {self._stall_seconds:.0f} "
                    f"s: other fetches under way leave {missing:,} bytes too few of max_bytes={self.max_bytes:,}. "
                    "Raise max_bytes above the size of the files that all processes of this host fetch at once."
                )
            time.sleep(POLL_SECONDS)

    def _too_large(self, entry: _Entry, num_bytes: int) -> SourceError:
        what = f"has {num_bytes:,} bytes{' unpacked' if entry.compression else ''}"
        return SourceError(
            f"ShardCache: {entry.shown} {what} and max_bytes={self.max_bytes:,} holds no file of that "
            "size. Raise max_bytes."
        )

    def _make_room_for_unpacked(self, entry: _Entry, part: pathlib.Path, next_use: float | None) -> None:
        """Evicts files if a copy is larger than the estimate with which its space was reserved."""
        size = part.stat().st_size
        if self.max_bytes is None:
            return
        if size > self.max_bytes:
            raise self._too_large(entry, size)
        with self._room():
            self._make_room(max(0, size - min(entry.room_bytes, self.max_bytes)), next_use)

    def _new_part(self, entry: _Entry, num_bytes: int) -> tuple[pathlib.Path, int]:
        """Creates and locks a part. Needs the room lock."""
        part = self.directory / f"{_PREFIX}{entry.key}.{num_bytes}.{secrets.token_hex(8)}.part"
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        return part, handle

    def _make_room(self, num_bytes: int, next_use: float | None) -> int:
        """Evicts files until ``num_bytes`` more fit; returns the number of bytes still missing, if positive.

        Evicts in the order of :func:`eviction_order`, given the next uses in all processes.
        """
        held = self._held()
        excess = 0 if self.max_bytes is None else sum(size for _, size, _ in held) + num_bytes - self.max_bytes
        if excess <= 0:
            return excess
        others = self._shared_plans.read([path for _, _, path in held if _PLAN.fullmatch(path.name)])
        whole = [
            (min(self._next_use(path.name), others.get(path.name, math.inf)), opened, size, path)
            for opened, size, path in held
            if _WHOLE.fullmatch(path.name)
        ]
        for size, path in eviction_order(whole, next_use):
            if excess <= 0:
                break
            with contextlib.suppress(FileNotFoundError, PermissionError):  # of another user
                if remove_unlocked(path):
                    excess -= size
                    self._count(evicted=1)
        return excess

    def _held(self) -> list[tuple[float, int, pathlib.Path]]:
        """Lists (last opened, bytes, path) of files, parts and plans, and removes those of dead processes.

        Needs the room lock.
        """
        held = []
        for path in self.directory.iterdir():
            if not path.name.startswith(_PREFIX) or path.is_symlink() or not path.is_file():
                continue
            owned = _OWNED.fullmatch(path.name)
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile by another process
                if owned:
                    if not _removed(path) and not path.name.endswith(".lock"):
                        held.append((0.0, int(owned["part"] or 0), path))
                elif _WHOLE.fullmatch(path.name):
                    status = path.stat()
                    held.append((status.st_mtime, status.st_size, path))
        return held


def _removed(path: pathlib.Path) -> bool:
    try:
        return remove_unlocked(path)
    except PermissionError:  # of another user
        return False


def _end_of_name(name: str) -> str:
    """Returns the end of a name, short enough for a file name of 255 bytes."""
    return name[-100:].replace("\0", "").encode("utf-8", "replace")[-200:].decode("utf-8", "ignore")


@contextlib.contextmanager
def _owned(part: tuple[pathlib.Path, int]) -> Iterator[pathlib.Path]:
    """Yields the path of a locked part; removes the part, unless it has been renamed, and the lock."""
    path, handle = part
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        unlock(None, handle)


def _reworded(error: OSError, message: str) -> OSError:
    """Returns the error with a different message. Keeps its attributes: the caller's retry counts ``attempts_made``."""
    other = OSError(error.errno, message)
    vars(other).update(vars(error))
    return other


def _check(entry: _Entry, part: pathlib.Path) -> None:
    size = part.stat().st_size
    if size != entry.num_bytes:
        # Most often a truncated transfer, which is worth a retry: Retry handles OSError.
        raise OSError(f"fetched {size:,} bytes of {entry.shown}, which has {entry.num_bytes:,}")
    if entry.checksum is None:
        return
    algorithm, _, wanted = entry.checksum.partition(":")
    found = _digest(part, algorithm)
    if found != wanted.lower():
        raise CorruptDataError(
            f"{entry.shown}: fetched {size:,} bytes with {algorithm} {found}, expected {wanted}. The file is not the one "
            "whose checksum the manifest, the index, checksums= or the store lists: copy it again, or write the "
            "manifest again.",
            path=entry.url,
        )


def _digest(path: pathlib.Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, hash_of(algorithm)).hexdigest()


def is_algorithm(name: object) -> bool:
    """Whether :func:`hash_of` knows an algorithm."""
    if not isinstance(name, str):
        return False
    lower = name.lower()
    return lower in xxhash.algorithms_available or (
        lower in hashlib.algorithms_available and not lower.startswith("shake")
    )


def is_checksum(checksum: object) -> bool:
    """Whether ``checksum`` is ``"<algorithm>:<hex digest>"`` with a known algorithm."""
    return isinstance(checksum, str) and is_algorithm(checksum.partition(":")[0]) and ":" in checksum


def hash_of(algorithm: str) -> Callable[[], Any]:
    """Returns the class of an algorithm of hashlib or xxhash, such as ``sha1`` or ``xxh64``."""
    algorithm = algorithm.lower()
    if algorithm in xxhash.algorithms_available:
        return getattr(xxhash, algorithm)
    return functools.partial(hashlib.new, algorithm, usedforsecurity=False)


def _write_digest(part: pathlib.Path, entry: _Entry) -> None:
    # Our own digest of every copy: the ETag of S3 is an MD5 of some objects only.
    with contextlib.suppress(OSError):  # a file system without extended attributes
        os.setxattr(part, _DIGEST_ATTRIBUTE, _digest(part, "xxh3_64").encode())
        if entry.checksum is not None:
            os.setxattr(part, _CHECKSUM_ATTRIBUTE, entry.checksum.lower().encode())


def _matches_digest(entry: _Entry) -> bool:
    """Whether a copy has the digest that was written with it, and the checksum of the file; True if neither is known."""
    try:
        if os.getxattr(entry.path, _DIGEST_ATTRIBUTE).decode() != _digest(entry.path, "xxh3_64"):
            return False
        has_attributes = True
    except OSError:
        has_attributes = False
    if entry.checksum is None:
        return True
    with contextlib.suppress(OSError):  # it was fetched without a checksum
        if os.getxattr(entry.path, _CHECKSUM_ATTRIBUTE).decode() == entry.checksum.lower():
            return True
    if entry.compression is not None:  # the checksum is of the compressed bytes
        return not has_attributes
    algorithm, _, wanted = entry.checksum.partition(":")
    if _digest(entry.path, algorithm) != wanted.lower():
        return False
    with contextlib.suppress(OSError):  # also if the copy is another user's
        os.setxattr(entry.path, _CHECKSUM_ATTRIBUTE, entry.checksum.lower().encode())
    return True


def _is_whole(entry: _Entry) -> bool:
    try:
        size = entry.path.stat().st_size
    except FileNotFoundError:
        return False
    return entry.copy_bytes in (None, size)


@contextlib.contextmanager
def _kept(entry: _Entry, seconds: float) -> Iterator[bool]:
    """Yields whether the file is cached; if so, it is not evicted within the ``with`` block."""
    try:
        handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC) if _is_whole(entry) else None
    except FileNotFoundError:
        handle = None
    if handle is None:
        yield False
        return
    try:
        stalled = functools.partial(lock_stalled, entry.path, "another process", seconds)
        poll(lambda: flock(handle, fcntl.LOCK_SH) or None, seconds, stalled)
        is_here = still_there(handle, entry.path)  # it may have been removed before the lock was acquired
        if is_here:
            with contextlib.suppress(OSError):  # another user's copy, or a disk that is read-only now
                os.utime(handle)
        yield is_here
    finally:
        unlock(None, handle)
