"""Files of a source as one sequence of records: record id → file and row, checked local copies, open files.

A source over files keeps :class:`Shards`, which describe the files as they were when the source was created, and reads
them through :class:`ShardPool`, which all sources of the process share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError
from meshfeed._src.base.types import JsonValue, RecordIds
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import READ_THREADS, ByteRange, RemoteBytes, read_ranges
from meshfeed._src.sources.files.formats import compression_of, reader_hint
from meshfeed._src.sources.files.manifest import FileEntry, damaged, lengths_by_file
from meshfeed._src.sources.files.open_files import Descriptor, Lru, is_out_of_files, max_open_files
from meshfeed._src.sources.files.paths import is_url
from meshfeed._src.sources.files.shard_cache import RemoteFile, ShardCache

_MAX_ENTRIES = 1 << 25  # of 8 bytes: the indexes of checked files in memory
_LEAST_ENTRIES = 256  # charged per checked file, which bounds their number too
_MAX_FILES_PER_CALL = 32
_CALLS_AT_ONCE = 16  # threads whose calls may hold files open, beside those that the pool keeps
_GAP_BYTES = 4096  # bytes between two records that cost less to read than a second call
_SPAN_BYTES = 8 << 20

T = TypeVar("T")
Opened = TypeVar("Opened", covariant=True)


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file as it was when the source was created.

    Attributes:
      path: local path, or the URL of a file that is read through a cache.
      num_bytes: file size in bytes, decompressed; 0 if not known.
      version: modification time in nanoseconds; for a file of a cache, its version key; for other remote files, what the
        store reports. Empty if not known.
      num_records: number of records.
      compression: how the stored file is compressed; None if it is not.
      digest: digest of the stored file as a manifest lists it; None if not known.
      manifest: path of the manifest that lists the file; empty if there is none.
      key: identifies this file and version; a string, because strings cache their hash.
    """

    source: ClassVar[str] = "source"
    path: str
    num_bytes: int
    version: str
    num_records: int
    compression: str | None = dataclasses.field(default=None, kw_only=True)
    digest: str | None = dataclasses.field(default=None, kw_only=True, compare=False, repr=False)
    manifest: str = dataclasses.field(default="", kw_only=True, compare=False, repr=False)
    key: str = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        key = f"{self.source}\n{self.path}\n{self.version or self.digest}\n{self.num_bytes}\n{self.num_records}"
        object.__setattr__(self, "key", key)

    @functools.cached_property
    def remote(self) -> RemoteBytes:
        """The file, if it is read without a copy."""
        return RemoteBytes(self.path, self.num_bytes, self.version, self.source, self.manifest)

    @property
    def is_cached(self) -> bool:
        """Whether the file is read from a copy in the cache."""
        return self.compression is not None or is_url(self.path)

    def details(self) -> dict[str, JsonValue]:
        """Returns the fields that a subclass adds, as JSON."""
        return {}

    @classmethod
    def from_details(cls, details: Mapping[str, JsonValue]) -> dict[str, Any]:
        """Returns the fields that a subclass adds, from what :meth:`details` returned."""
        return dict(details)

    @classmethod
    def from_entry(cls, entry: FileEntry, version: str, manifest: str) -> Self:
        """Returns a file as the manifest at the path ``manifest`` lists it."""
        compression = compression_of(entry.path)
        num_bytes = 0 if compression else entry.num_bytes  # the size of the copy is known once it is there
        known = {"compression": compression, "digest": entry.digest, "manifest": manifest}
        try:
            more = cls.from_details(entry.details)
            return cls(entry.path, num_bytes, version, entry.num_records, **known, **more)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(manifest, f"it lists {entry.path} with the details {dict(entry.details)}") from error

    def entry(self) -> FileEntry:
        """Returns what a manifest lists of the file."""
        return FileEntry(self.path, self.num_bytes, self.num_records, self.digest, self.details())

    def describe(self) -> tuple[FileEntry, str]:
        """Returns what a manifest lists of the file, and its version."""
        return self.entry(), self.version

    def describe_change(self, path: str) -> str:
        """Returns what the file was and what it is now, for an error."""
        return f"{self.num_records:,} records in {self.num_bytes:,} bytes then, {os.path.getsize(path):,} now"


S = TypeVar("S", bound=Shard)
R = TypeVar("R")
Part = tuple[list[int], "np.ndarray | None", np.ndarray, "np.ndarray | None"]


def files_per_call() -> int:
    """Returns the maximum number of files that one call may hold open."""
    return max(1, min(_MAX_FILES_PER_CALL, max_open_files() // _CALLS_AT_ONCE))


def check_cache(cache: object, *, source: str) -> None:
    """Raises SettingsError if ``cache`` is neither a ShardCache nor None."""
    if cache is not None and not callable(getattr(cache, "identify", None)):
        raise SettingsError(
            f"{source} got cache={cache!r}. Expected a meshfeed.ShardCache(directory, max_bytes=…).", setting="cache"
        )


def need_cache(names: Sequence[str], cache: ShardCache | None, *, source: str) -> None:
    """Checks that compressed files come with a cache.

    Raises:
      SettingsError: if they do not.
      SourceError: if the name of a compressed file is that of another source's format.
    """
    packed = [name for name in names if compression_of(name)]
    if packed and cache is None:
        hint = reader_hint(packed[0], unless=source)
        if hint:
            raise SourceError(f"{source} got the compressed file {packed[0]!r}.{hint}")
        raise SettingsError(
            f"{source} got the compressed file {packed[0]!r} and no cache. Compressed files cannot be read at random: pass "
            "cache=meshfeed.ShardCache(directory, max_bytes=…), which keeps decompressed copies, or decompress the files.",
            setting="cache",
        )


class Shards(Generic[S]):
    """The files of a source, in the order of their record ids.

    Args:
      shards: the files.
      what: the files in an error, such as "ArrayRecord".
      manifests: paths of the manifests that list some of them.

    Attributes:
      files: the files.
      what: see above.
      starts: int64[files], the record id of each file's first record.
      ends: int64[files], the record id after each file's last record.
      lengths: int64[files], the number of records of each file.

    Raises:
      SourceError: if the files have no record.
    """

    def __init__(self, shards: Sequence[S], what: str, manifests: Sequence[str] = ()) -> None:
        self.files = list(shards)
        self.what = what
        self.manifests = tuple(manifests)
        self.lengths = np.array([file.num_records for file in self.files], np.int64)
        self.ends = np.cumsum(self.lengths)
        self.starts = self.ends - self.lengths
        if not len(self):
            first = f", the first {self.files[0].path}" if self.files else ""
            raise SourceError(
                f"{what} got {len(self.files):,} file(s) with 0 records in all{first}. Expected at least one record. "
                "Check what wrote them."
            )

    def __repr__(self) -> str:
        return f"{len(self.files):,} file{'s' * (len(self.files) != 1)}, {len(self):,} records"

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def checked(self, record_ids: np.ndarray | Sequence[int]) -> np.ndarray:
        """Returns the ids as int64[n].

        Raises:
          IndexError: if an id is not in [0, len).
        """
        ids = np.asarray(record_ids, np.int64)
        if ids.size:
            # reduce() avoids the call overhead of min() and max().
            low, high = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
            if low < 0 or high >= self.ends[-1]:
                raise IndexError(
                    f"record id {low if low < 0 else high} is out of range: the source has {len(self):,} records"
                )
        return ids

    def parts(self, ids: np.ndarray) -> Iterator[Part]:
        """Splits a batch into parts that each read a bounded number of files.

        Yields:
          The files of the part and, for each of its records: the index of its file among them (None for one file), its
          row in that file, and its index in ``ids`` (None if the part is the whole batch).
        """
        if not ids.size:
            return
        if len(self.files) == 1:
            yield [0], None, ids, None
            return
        which = np.searchsorted(self.ends, ids, side="right")
        rows = ids - self.starts[which]
        if bool((which == which[0]).all()):
            yield [int(which[0])], None, rows, None
            return
        touched, index = np.unique(which, return_inverse=True)
        limit = files_per_call()
        if len(touched) <= limit:
            yield touched.tolist(), index, rows, None
            return
        for first in range(0, len(touched), limit):
            slots = np.flatnonzero((index >= first) & (index < first + limit))
            yield touched[first : first + limit].tolist(), index[slots] - first, rows[slots], slots

    def by_file(self, ids: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Returns, for each file of a batch: its number, the rows to read, and their indices in ``ids``."""
        if len(self.files) == 1:
            return [(0, ids, np.arange(len(ids)))] if ids.size else []
        which = np.searchsorted(self.ends, ids, side="right")
        order = np.argsort(which, kind="stable")
        sorted_files = which[order]
        edges = np.flatnonzero(sorted_files[1:] != sorted_files[:-1]) + 1
        rows = (ids - self.starts[which])[order]
        bounds = [0, *edges.tolist(), len(ids)]
        return [
            (int(sorted_files[low]), rows[low:high], order[low:high])
            for low, high in itertools.pairwise(bounds)
            if low < high
        ]

    def file_of(self, record_id: int) -> str:
        """Returns the path or URL of the file that contains a record."""
        return self.files[int(np.searchsorted(self.ends, record_id, side="right"))].path

    def cached_files(self, record_ids: np.ndarray, cache: ShardCache | None) -> list[RemoteFile] | None:
        """Returns the files of records that are read through a cache that fetches ahead; None if no file is."""
        if cache is None or not cache.ahead_bytes or not self._any_cached:
            return None
        files = [self.files[number] for number in np.unique(np.searchsorted(self.ends, record_ids, side="right"))]
        return [RemoteFile(cache, file.path, file.compression, file.num_bytes) for file in files if file.is_cached]

    @functools.cached_property
    def _any_cached(self) -> bool:
        return any(file.is_cached for file in self.files)

    def names(self) -> list[str]:
        """Returns the paths and URLs of the files, in record id order."""
        return [file.path for file in self.files]

    def stored_lengths(self, key: str) -> np.ndarray | None:
        """Returns the length of the leaf ``key`` of each record, if manifests list them; see ``StoredLengths``."""
        found = lengths_by_file(self.manifests, key)
        parts = [found.get(name) for name in self.names()]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]

    def identity(self) -> JsonValue:
        """Returns the identity of the files: count, total bytes, digest of base names and sizes in order."""
        return file_paths.identify_files(self.names(), [file.num_bytes for file in self.files])


@contextlib.contextmanager
def local_copy(shard: Shard, cache: ShardCache | None) -> Iterator[tuple[str, os.stat_result]]:
    """Yields the local path and status of a file, and keeps a cached copy from eviction within the ``with`` block.

    Raises:
      SourceError: if the file has been removed or changed since the source was created.
    """
    try:
        if cache is None or not shard.is_cached:
            status = os.stat(shard.path)
            _check_unchanged(shard, shard.path, status, str(status.st_mtime_ns))
            yield shard.path, status
            return
        with cache.open(shard.path, compression=shard.compression, num_bytes=shard.num_bytes) as copy:
            status = os.stat(copy)
            _check_unchanged(shard, str(copy), status, cache.identify(shard.path)[1])
            yield str(copy), status
    except FileNotFoundError as error:
        raise SourceError(
            f"the {shard.source} file {shard.path} is gone; it was there when the source was made. Put it back, or "
            "build the source again."
        ) from error


def _check_unchanged(shard: Shard, path: str, status: os.stat_result, version: str) -> None:
    if (shard.num_bytes and status.st_size != shard.num_bytes) or shard.version not in ("", version):
        raise changed(shard, path)


def changed(shard: Shard, path: str) -> SourceError:
    """Returns the error for a file that is no longer the one that the source was created with."""
    return file_paths.changed(f"the {shard.source} file {shard.path}", shard.describe_change(path), shard.manifest)


def open_descriptor(shard: Shard, path: str, status: os.stat_result) -> tuple[Descriptor, int]:
    """Opens a checked copy; returns the descriptor and its weight in a pool.

    Raises:
      SourceError: if ``path`` has been replaced since ``status`` was read.
    """
    opened = Descriptor(path)
    if not os.path.samestat(opened.status, status) or opened.status.st_size != status.st_size:
        raise changed(shard, path)
    return opened, 0


class OpenCopy(Protocol[Opened]):
    """Opens a local copy; returns what was opened and the number of 8-byte entries that it holds in memory."""

    def __call__(self, shard: Shard, path: str, status: os.stat_result, /) -> tuple[Opened, int]: ...


class ShardPool:
    """LRU caches of checked files and of open files. Thread-safe.

    A checked file occupies memory, and an open file a descriptor. The two are bounded separately, because checking a file
    takes a hundred times as long as opening it: with more shards than a process may open, a batch in random order reopens
    most of its files.

    Args:
      max_files: maximum number of open files; by default, a share of the process limit.
      max_entries: maximum number of 8-byte entries in memory, for checked files and separately for open ones.
    """

    def __init__(self, max_files: int | None = None, max_entries: int = _MAX_ENTRIES) -> None:
        self._known: Lru[str, object] = Lru(lambda: max_entries, max_entries)
        self._open: Lru[tuple[str, str], tuple[Shard, object]] = Lru(lambda: max_files or max_open_files(), max_entries)

    def __len__(self) -> int:
        return len(self._open)

    def is_open(self, shard: Shard) -> bool:
        """Whether ``shard`` is open, in any way."""
        return (shard.key, "direct") in self._open or (shard.key, "library") in self._open

    def checked(self, shard: Shard, check: Callable[[], tuple[T, int]], kind: str = "") -> T:
        """Returns what ``check`` made of a file; calls it if the file is not in memory.

        Args:
          shard: the file.
          check: returns what is kept, and the number of 8-byte entries that it holds.
          kind: tells different things that are kept of one file apart.
        """

        def make() -> tuple[object, int]:
            found, num_entries = check()
            return found, max(num_entries, _LEAST_ENTRIES)

        key = kind + shard.key
        return self._known.find(key) or self._known.get(key, make)  # type: ignore[return-value]

    def all_checked(self, shards: Sequence[Shard]) -> list[Any] | None:
        """Returns what :meth:`checked` keeps of each file; None if one of them is not in memory."""
        return self._known.find_all([shard.key for shard in shards])

    def opened(self, shard: Shard, kind: str, cache: ShardCache | None, open_copy: OpenCopy[T]) -> T:
        """Returns an open file, through ``cache`` if its path is a URL.

        Args:
          shard: the file.
          kind: what ``open_copy`` opens: "direct" or "library".
          cache: the cache of the source.
          open_copy: opens the local copy.

        Raises:
          SourceError: if the file has been removed or changed since the source was created.
        """
        found = self._open.find((shard.key, kind))
        if found is not None:
            return found[1]  # type: ignore[return-value]

        def open_once() -> tuple[tuple[Shard, object], int]:
            with local_copy(shard, cache) as (path, status):
                made, num_entries = open_copy(shard, path, status)
                return (shard, made), num_entries

        def make() -> tuple[tuple[Shard, object], int]:
            try:
                return open_once()
            except OSError as error:
                if not is_out_of_files(error) or not len(self._open):
                    raise
                # The rest of the program uses too many descriptors: close all files of the pool and retry.
                self._open.drop([key for key, _ in self._open.oldest_first()])
                return open_once()

        made = self._open.get((shard.key, kind), make)[1]
        if cache is not None and cache.max_bytes is not None:
            self._drop_copies(shard, cache.max_bytes // 4)
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
        copies = [(key, shard) for key, (shard, _) in self._open.oldest_first() if shard.is_cached]
        excess = sum(shard.num_bytes for _, shard in copies) - max_bytes
        for key, shard in copies:
            if excess <= 0:
                break
            if shard.key != newest.key:
                self._open.drop([key])
                excess -= shard.num_bytes


# One pool per process, because open files and memory are limited per process: a mixture of 35 sources with one pool
# each would exhaust both.
shared_pool = ShardPool()


def read_again_if_damaged(read: Callable[[], T], shard: Shard, cache: ShardCache | None, pool: ShardPool) -> T:
    """Returns ``read()``; if a cached copy is damaged, fetches the file again and retries once."""
    try:
        return read()
    except CorruptDataError:
        if cache is None or not shard.is_cached:
            raise
    pool.drop([shard])
    cache.discard(shard.path, compression=shard.compression)
    return read()


def fetch_together(
    shards: Sequence[S], cache: ShardCache | None, pool: ShardPool, open_shard: Callable[[S], object]
) -> None:
    """Opens the files of a batch that are not open yet, in parallel if a cache has to fetch them."""
    if cache is not None and len(shards) > 1:
        file_paths.in_threads(open_shard, [shard for shard in shards if not pool.is_open(shard)])


OpenFile = Callable[[], "Descriptor | RemoteBytes"]
"""Returns the open file, and opens it again if it has been closed; a remote file that is read without a cache as it is."""


class Spans(NamedTuple):
    """Byte ranges of one file.

    Attributes:
      open: returns the open file.
      starts: int64[n], the first byte of each range.
      stops: int64[n], the byte after its last one.
    """

    open: OpenFile
    starts: np.ndarray
    stops: np.ndarray


ReadRows = Callable[[T, np.ndarray, int], Sequence[R]]
"""Reads rows, int64[n], of a checked file; gets the record id of its row 0 too, for errors."""


class ShardReader(Generic[S, T]):
    """Reads records of shards by id, one file after the other.

    Args:
      shards: the files.
      cache: the cache of the source.
      check: checks a file once, when it is first read. Returns what the source keeps of it, and the number of 8-byte
        entries that this holds in memory.

    Attributes:
      shards: the files.
      is_direct: whether remote files are read without a cache.
    """

    def __init__(
        self, shards: Shards[S], cache: ShardCache | None, check: Callable[[S, OpenFile], tuple[T, int]]
    ) -> None:
        self.shards = shards
        self._cache = cache
        self._check = check
        self.is_direct = cache is None and any(is_url(shard.path) for shard in shards.files)
        self._pool = shared_pool

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        del state["_pool"]  # open files and locks belong to the process
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._pool = shared_pool

    def read(self, record_ids: np.ndarray | Sequence[int], read_rows: ReadRows[T, R]) -> list[R]:
        """Reads records, in the order of ``record_ids``.

        Args:
          record_ids: int64[n], in any order, with repeats allowed.
          read_rows: reads rows, int64[n], of one checked file; also gets the record id of its row 0.

        Raises:
          IndexError: if an id is not in [0, len).
          CorruptDataError: if a file is damaged, also after it was fetched again.
          SourceError: if a file has been removed or changed since the source was created.
        """
        parts = self.shards.by_file(self.shards.checked(record_ids))
        fetch_together([self.shards.files[part[0]] for part in parts], self._cache, self._pool, self._checked)
        records: list[R | None] = [None] * sum(len(rows) for _, rows, _ in parts)
        read_all = file_paths.in_threads if self.is_direct else map
        found = read_all(lambda part: self._read_file(part[0], part[1], read_rows), parts)
        for (_, _, slots), part in zip(parts, found, strict=True):
            for slot, record in zip(slots.tolist(), part, strict=True):
                records[slot] = record
        return records  # type: ignore[return-value]

    def read_by_spans(
        self,
        record_ids: np.ndarray | Sequence[int],
        spans_of: Callable[[T, np.ndarray], Spans],
        build: Callable[[T, np.ndarray, int, list[bytes]], Sequence[R]],
    ) -> list[R]:
        """Reads records that are byte ranges of their files; of remote files without a cache, all at the same time.

        Args:
          record_ids: int64[n], in any order, with repeats allowed.
          spans_of: returns the ranges of rows, int64[n], of one checked file.
          build: makes records of rows, int64[n], of one checked file; gets the record id of its row 0, and the bytes of
            each range, fewer than requested if the file ends before.

        Raises:
          IndexError, CorruptDataError, SourceError: as for :meth:`read`.
        """

        def read_rows(checked: T, rows: np.ndarray, first: int) -> Sequence[R]:
            spans = spans_of(checked, rows)
            return build(checked, rows, first, read_spans(spans.open(), spans.starts, spans.stops))

        ids = self.shards.checked(record_ids)
        parts = self.shards.by_file(ids)
        if not self.is_direct:
            return self.read(ids, read_rows)
        remote = [part for part in parts if is_url(self.shards.files[part[0]].path)]
        checked = file_paths.in_threads(lambda part: self._checked(self.shards.files[part[0]]), remote)
        ranges = [
            ByteRange(self.shards.files[number].remote, start, stop)
            for file, (number, rows, _) in zip(checked, remote, strict=True)
            for spans in [spans_of(file, rows)]
            for start, stop in zip(spans.starts.tolist(), spans.stops.tolist(), strict=True)
        ]
        contents = iter(read_ranges(ranges))
        records: list[R | None] = [None] * len(ids)
        for file, (number, rows, slots) in zip(checked, remote, strict=True):
            built = build(file, rows, int(self.shards.starts[number]), list(itertools.islice(contents, len(rows))))
            for slot, record in zip(slots.tolist(), built, strict=True):
                records[slot] = record
        for number, rows, slots in parts:
            if not is_url(self.shards.files[number].path):
                for slot, record in zip(slots.tolist(), self._read_file(number, rows, read_rows), strict=True):
                    records[slot] = record
        return records  # type: ignore[return-value]

    def _read_file(self, number: int, rows: np.ndarray, read_rows: ReadRows[T, R]) -> Sequence[R]:
        shard, first = self.shards.files[number], int(self.shards.starts[number])
        return read_again_if_damaged(
            lambda: read_rows(self._checked(shard), rows, first), shard, self._cache, self._pool
        )

    def _checked(self, shard: S) -> T:
        direct = self._cache is None and is_url(shard.path)
        open_file = (lambda: shard.remote) if direct else self._pool.descriptor(shard, self._cache)
        return self._pool.checked(shard, lambda: self._check(shard, open_file))

    def cached_files(self, record_ids: np.ndarray) -> list[RemoteFile] | None:
        """See :class:`meshfeed._src.base.hooks.CachesFiles`."""
        return self.shards.cached_files(record_ids, self._cache)

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        self._pool.drop(self.shards.files)


class ShardSource(Generic[S, T]):
    """What sources that read through a :class:`ShardReader` share.

    Args:
      reader: reads the files.
    """

    def __init__(self, reader: ShardReader[S, T]) -> None:
        self._shard_reader = reader

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shard_reader.shards!r})"

    def __len__(self) -> int:
        return len(self._shard_reader.shards)

    @property
    def read_threads(self) -> int | None:
        """Threads that read by default, if remote files are read without a cache."""
        return READ_THREADS if self._shard_reader.is_direct else None

    def shard_lengths(self) -> RecordIds:
        """Returns the number of records of each file, int64[files]."""
        return self._shard_reader.shards.lengths

    def stored_lengths(self, key: str) -> np.ndarray | None:
        """Returns the length of the leaf ``key`` of each record, if a manifest lists them."""
        return self._shard_reader.shards.stored_lengths(key)

    def file_of(self, record_id: int) -> str:
        """Returns the path or URL of the file that contains a record."""
        return self._shard_reader.shards.file_of(record_id)

    def cached_files(self, record_ids: np.ndarray) -> list[RemoteFile] | None:
        """Returns the files that hold these records, int64[n], and are read through the cache; None without one."""
        return self._shard_reader.cached_files(record_ids)

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        self._shard_reader.close()


def read_spans(file: Descriptor | RemoteBytes, starts: np.ndarray, stops: np.ndarray) -> list[bytes]:
    """Reads byte ranges of a file; neighbors are read with one call.

    Args:
      file: the open file.
      starts: int64[n], first byte of each range, in any order.
      stops: int64[n], byte after the last one.

    Returns:
      The bytes of each range; fewer than requested if the file ends before.
    """
    if isinstance(file, RemoteBytes):
        pairs = zip(starts.tolist(), stops.tolist(), strict=True)
        return read_ranges([ByteRange(file, *pair) for pair in pairs])
    if len(starts) == 1:
        low = int(starts[0])
        return [os.pread(file.number, int(stops[0]) - low, low)]
    order = np.argsort(starts, kind="stable")
    lows, highs = starts[order], stops[order]
    apart = (lows[1:] > highs[:-1] + _GAP_BYTES) | (lows[1:] < highs[:-1])
    found = [b""] * len(starts)
    low_list, high_list, order_list = lows.tolist(), highs.tolist(), order.tolist()
    first = 0
    for last in [*np.flatnonzero(apart).tolist(), len(starts) - 1]:
        while first <= last:
            first = _read_run(file, low_list, high_list, order_list, first, last, found)
    return found


def _read_run(
    file: Descriptor, lows: list[int], highs: list[int], order: list[int], first: int, last: int, found: list[bytes]
) -> int:
    """Reads ranges ``first`` to ``last``, or as many as one call should; returns the index after the last one read."""
    start, stop = lows[first], first
    while stop < last and highs[stop + 1] - start <= _SPAN_BYTES:
        stop += 1
    content = os.pread(file.number, highs[stop] - start, start)
    if stop == first:
        found[order[first]] = content
        return first + 1
    for number in range(first, stop + 1):
        found[order[number]] = content[lows[number] - start : highs[number] - start]
    return stop + 1
