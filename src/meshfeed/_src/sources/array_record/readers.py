"""Opens, counts and checks ArrayRecord files, and bounds the number of open files.

The library opens a truncated, invalid or missing file without an error, as a file of 0 records. ``ok()`` then returns
False, and the first read raises the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.sources.array_record.direct import DirectFile, open_direct
from meshfeed._src.sources.files.formats import reader_hint
from meshfeed._src.sources.files.open_files import Descriptor, Lru, is_out_of_files, max_open_files
from meshfeed._src.sources.files.paths import is_url

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

_logger = logging.getLogger("meshfeed")
# With a read-ahead of 0, reading a run of records iterates over all chunks and switches threads: 17 instead of 0.8 µs
# per record of 1 KB in runs of 64. Single records and lists cost the same either way.
_READING = "readahead_buffer_size:1M,max_parallelism:0"
# Counting does not need the chunk index in memory: 2.1 instead of 3.8 ms for 100,000 chunks.
_COUNTING = _READING + ",footer_prefetch_bytes:0,index_storage_option:offloaded"
# The library refills its buffer, 1 MiB by default, after every seek: 30 instead of 7 µs per record of 8 KB.
_BUFFER_BYTES = 8192
_MAX_ENTRIES = 1 << 25  # of 8 bytes: one per chunk in the library, and one or two per record for direct reads
_LEAST_ENTRIES = 256  # charged per known file, which bounds the number of files too
# Over all sources: several that are built at once would open more files than the process may have.
_inspecting = threading.Semaphore(16)


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """One ArrayRecord file as it was when the source was created.

    Attributes:
      path: local path, or the URL of a file that is read through a cache.
      num_bytes: file size in bytes.
      version: modification time in nanoseconds; for a remote file, its version key.
      num_records: number of records.
      group_size: records per chunk.
      transposed: whether chunks store records column by column.
      key: identifies this file and version; a string, because strings cache their hash.
    """

    path: str
    num_bytes: int
    version: str
    num_records: int
    group_size: int
    transposed: bool = False
    key: str = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.path}\n{self.version}\n{self.num_bytes}\n{self.num_records}")

    @property
    def num_chunks(self) -> int:
        """Number of chunks; a chunk is the unit that the library reads, checks and decompresses."""
        return -(-self.num_records // self.group_size)


@dataclasses.dataclass(frozen=True)
class OpenFile:
    """A checked ArrayRecord file with its readers, which open it on demand.

    Attributes:
      path: local path; for a URL, the path of the cached copy.
      status: ``os.stat`` result when the file was checked.
      library: returns the array_record library's reader.
      direct: the reader of the C extension, or None if the file needs the library.
    """

    path: str
    status: os.stat_result
    library: Callable[[], Any]
    direct: DirectFile | None


def inspect_file(path: str) -> ShardFile:
    """Counts the records of ``path`` and checks that it is a complete ArrayRecord file.

    Raises:
      SourceError: if the file does not exist.
      CorruptDataError: if the file is empty, truncated, or not an ArrayRecord file.
      OSError: if it cannot be read.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise SourceError(f"there is no ArrayRecord file {path}. Check the path.") from error
    with _inspecting:
        reader = _open(path, _COUNTING)
        try:
            num_records = reader.num_records()
            options = reader.writer_options_string() or ""
        finally:
            reader.close()
    group_size = re.search(r"group_size:(\d+)", options)
    return ShardFile(
        path,
        status.st_size,
        str(status.st_mtime_ns),
        num_records,
        int(group_size[1]) if group_size else 1,
        transposed="transpose:true" in options,
    )


def _open(path: str, options: str) -> Any:
    from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  # a C module

    with open(path, "rb"):  # raises for a missing or unreadable file, which the library does not report
        pass
    reader = array_record_module.ArrayRecordReader(path, options, file_reader_buffer_size=_BUFFER_BYTES)
    if not reader.ok():
        message = _describe_unreadable(path, reader)
        if os.strerror(errno.EMFILE) in message:  # the file may be whole: the pool makes room and retries
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        raise CorruptDataError(message, path=path)
    return reader


def _describe_unreadable(path: str, reader: Any) -> str:
    size = os.path.getsize(path)
    try:
        reader.read([0])
        reason = "no reason given"
    except Exception as error:
        reason = str(error)
    if not size:
        what = "the file is empty (0 bytes)"
    else:
        what = f"{size:,} bytes are not a whole ArrayRecord file ({reason})"
    return f"{path}: {what}. Expected a file closed by ArrayRecordWriter, which ends in a footer.{remedy_for(path)}"


def remedy_for(path: str) -> str:
    """Returns the fix for a file that is not a complete ArrayRecord file: a sentence with a leading space."""
    return reader_hint(path, unless="ArrayRecord") or (
        " It was cut short, is still being written, or has a different format: write or copy it again."
    )


class ReaderPool:
    """LRU caches of checked files and of open files. Thread-safe.

    A checked file occupies memory, and an open file a descriptor. The two are bounded separately, because checking a file
    takes a hundred times as long as opening it: with more shards than a process may open, a batch in random order reopens
    most of its files.

    Args:
      max_files: maximum number of open files; by default, a share of the process limit.
      max_entries: maximum number of 8-byte entries in memory, for checked files and separately for the library's open
        readers.
    """

    def __init__(self, max_files: int | None = None, max_entries: int = _MAX_ENTRIES) -> None:
        self._known: Lru[str, OpenFile] = Lru(lambda: max_entries, max_entries)
        self._open: Lru[tuple[str, str], tuple[ShardFile, Any]] = Lru(
            lambda: max_files or max_open_files(), max_entries
        )

    def __len__(self) -> int:
        return len(self._open)

    def has(self, file: ShardFile) -> bool:
        """Whether ``file`` is open."""
        return (file.key, "direct") in self._open or (file.key, "library") in self._open

    def get(self, file: ShardFile, cache: ShardCache | None = None) -> OpenFile:
        """Returns the readers of ``file``, through ``cache`` if its path is a URL.

        Raises:
          SourceError: if the file has been removed or changed since the source was created.
          CorruptDataError: if it is damaged.
        """
        return self._known.find(file.key) or self._known.get(file.key, lambda: self._check(file, cache))

    def open(self, file: ShardFile, cache: ShardCache | None) -> None:
        """Fetches and opens ``file`` ahead of reads.

        Raises:
          SourceError, CorruptDataError: as for :meth:`get`.
        """
        found = self.get(file, cache)
        with contextlib.suppress(OSError):  # a later read raises it
            _ = found.library() if found.direct is None else found.direct.open()

    def drop(self, files: Sequence[ShardFile]) -> None:
        """Removes ``files`` from both caches."""
        self._known.drop([file.key for file in files])
        self._open.drop([(file.key, kind) for file in files for kind in ("direct", "library")])

    def _check(self, file: ShardFile, cache: ShardCache | None) -> tuple[OpenFile, int]:
        def library() -> Any:
            return self._opened(file, "library", cache, _open_library)

        last: weakref.ref[Descriptor] | None = None

        def descriptor() -> Descriptor:
            nonlocal last
            # Bypass the pool while the file is open: looking up every file of a batch takes 10 % of the batch.
            opened = None if last is None else last()
            if opened is None:
                opened = self._opened(file, "direct", cache, _open_descriptor)
                last = weakref.ref(opened)
            return opened

        with _local_copy(file, cache) as (path, status):
            direct = None
            if file.group_size == 1 and not file.transposed:
                direct = open_direct(descriptor, file.num_records)
        if direct is None:
            library()  # raises if the file is damaged
        _logger.debug("%s is read %s", file.path, "directly" if direct else "by the array_record library")
        num_entries = 0 if direct is None else direct.num_entries
        return OpenFile(path, status, library, direct), max(num_entries, _LEAST_ENTRIES)

    def _opened(
        self,
        file: ShardFile,
        kind: str,
        cache: ShardCache | None,
        open_copy: Callable[[ShardFile, str, os.stat_result], tuple[Any, int]],
    ) -> Any:
        found = self._open.find((file.key, kind))
        if found is not None:
            return found[1]

        def open_once() -> tuple[tuple[ShardFile, Any], int]:
            with _local_copy(file, cache) as (path, status):
                made, num_entries = open_copy(file, path, status)
                return (file, made), num_entries

        def make() -> tuple[tuple[ShardFile, Any], int]:
            try:
                return open_once()
            except OSError as error:
                if not is_out_of_files(error) or not len(self._open):
                    raise
                # The rest of the program uses too many descriptors: close all files of the pool and retry.
                self._open.drop([key for key, _ in self._open.oldest_first()])
                return open_once()

        made = self._open.get((file.key, kind), make)[1]
        if cache is not None and cache.max_bytes is not None:
            self._drop_copies(file, cache.max_bytes // 4)
        return made

    def _drop_copies(self, newest: ShardFile, max_bytes: int) -> None:
        """Closes the oldest cached copies beyond ``max_bytes``: an evicted copy keeps its disk space while open."""
        copies = [(key, file) for key, (file, _) in self._open.oldest_first() if is_url(file.path)]
        excess = sum(file.num_bytes for _, file in copies) - max_bytes
        for key, file in copies:
            if excess <= 0:
                break
            if file.key != newest.key:
                self._open.drop([key])
                excess -= file.num_bytes


# One pool per process, because open files and memory are limited per process: a mixture of 35 sources with one pool
# each would exhaust both.
shared_readers = ReaderPool()


@contextlib.contextmanager
def _local_copy(file: ShardFile, cache: ShardCache | None) -> Iterator[tuple[str, os.stat_result]]:
    """Yields the local path and status of the file, and keeps a cached copy from eviction within the ``with`` block.

    Raises:
      SourceError: if the file has been removed or changed since the source was created.
    """
    try:
        if cache is None or not is_url(file.path):
            status = os.stat(file.path)
            _check_unchanged(file, file.path, status, str(status.st_mtime_ns))
            yield file.path, status
            return
        with cache.open(file.path) as copy:
            status = os.stat(copy)
            _check_unchanged(file, str(copy), status, cache.identify(file.path)[1])
            yield str(copy), status
    except FileNotFoundError as error:
        raise SourceError(
            f"the ArrayRecord file {file.path} is gone; it was there when the source was made. Put it back, or build "
            "the source again."
        ) from error


def _check_unchanged(file: ShardFile, path: str, status: os.stat_result, version: str) -> None:
    if status.st_size != file.num_bytes or file.version != version:
        raise _changed(file, path)


def _changed(file: ShardFile, path: str) -> SourceError:
    try:
        now = f"{_open(path, _COUNTING).num_records():,} in {os.path.getsize(path):,} now"
    except CorruptDataError:
        now = f"{os.path.getsize(path):,} now"
    return SourceError(
        f"the ArrayRecord file {file.path} has changed since the source was made: {file.num_records:,} records in "
        f"{file.num_bytes:,} bytes then, {now}. Build the source again."
    )


def _open_library(file: ShardFile, path: str, _status: os.stat_result) -> tuple[Any, int]:
    reader = _open(path, _READING)
    if reader.num_records() != file.num_records:
        raise _changed(file, path)
    return reader, file.num_chunks


def _open_descriptor(file: ShardFile, path: str, status: os.stat_result) -> tuple[Descriptor, int]:
    opened = Descriptor(path)  # the path may have been replaced since ``status`` was read
    if not os.path.samestat(opened.status, status) or opened.status.st_size != status.st_size:
        raise _changed(file, path)
    return opened, 0
