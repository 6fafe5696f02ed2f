"""ArrayRecord files: opening, counting and checking them, and how many stay open.

The library opens a truncated, garbage or missing file as one of 0 records and says nothing; ``ok()`` tells, and the
reason comes out of the first read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
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
# With a read-ahead of 0, a run of records costs a walk through all chunks and a hand-over to other threads: 17 instead
# of 0.8 µs a record of 1 KB in runs of 64. Single records and lists cost the same either way.
_READING = "readahead_buffer_size:1M,max_parallelism:0"
# Counting needs neither the index of chunks nor its memory: 2.1 instead of 3.8 ms at 100,000 chunks.
_COUNTING = _READING + ",footer_prefetch_bytes:0,index_storage_option:offloaded"
# The library's 1 MiB buffer is filled anew at every jump: 30 instead of 7 µs for a record of 8 KB.
_BUFFER_BYTES = 8192
_MAX_ENTRIES = 1 << 25  # of 8 bytes: the library's one a chunk; and as many again for reading directly, one or two
_LEAST_ENTRIES = 256  # of a known file, so that their number is bounded too


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """One ArrayRecord file as it was when the source was made.

    Attributes:
      path: local path, or the URL of a file that is read through a cache.
      num_bytes: its size.
      version: time of its last change in nanoseconds; of a remote file the name of its version.
      num_records: records in it.
      group_size: records a chunk.
      transposed: whether chunks hold records column by column.
      key: tells this file and version from all others; a string because its hash is computed once.
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
        """Chunks in the file, the unit that the library reads, checks and decompresses."""
        return -(-self.num_records // self.group_size)


@dataclasses.dataclass(frozen=True)
class OpenFile:
    """An ArrayRecord file that was checked, and what reads it. The files below are opened when needed.

    Attributes:
      path: local path: of a file behind a URL, that of its copy.
      status: of the file when it was checked.
      library: gives the array_record library's reader.
      direct: the way past the library, for files that have it.
    """

    path: str
    status: os.stat_result
    library: Callable[[], Any]
    direct: DirectFile | None


def inspect_file(path: str) -> ShardFile:
    """Opens ``path`` to count its records, and checks that it is a whole ArrayRecord file.

    Raises:
      SourceError: there is no such file.
      CorruptDataError: the file is empty, cut short, or not an ArrayRecord file.
      OSError: it cannot be read.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise SourceError(f"there is no ArrayRecord file {path}. Check the path.") from error
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

    with open(path, "rb"):  # the library reports neither a missing file nor a forbidden one: let the system do it
        pass
    reader = array_record_module.ArrayRecordReader(path, options, file_reader_buffer_size=_BUFFER_BYTES)
    if not reader.ok():
        raise CorruptDataError(_describe_unreadable(path, reader), path=path)
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
    """What to do about a file that is not a whole ArrayRecord file, as a sentence with a space before it."""
    return reader_hint(path, unless="ArrayRecord") or (
        " It was cut short, is still being written, or has a different format: write or copy it again."
    )


class ReaderPool:
    """What is known of files, the least recently used dropped first, and those that are open, the oldest. Thread-safe.

    What is known of a file takes memory, and an open one a descriptor. They are bounded apart, because finding out is a
    hundred times as much work as opening: with more shards than a process may open, a batch in random order opens most
    of its files anew.

    Args:
      max_files: open at most; by default a share of what the process may open.
      max_entries: numbers of 8 bytes in memory, at most, for what is known and again for the library's open readers.
    """

    def __init__(self, max_files: int | None = None, max_entries: int = _MAX_ENTRIES) -> None:
        self._known: Lru[str, OpenFile] = Lru(lambda: max_entries, max_entries)
        self._open: Lru[tuple[str, str], tuple[ShardFile, Any]] = Lru(
            lambda: max_files or max_open_files(), max_entries
        )

    def __len__(self) -> int:
        return len(self._open)

    def has(self, file: ShardFile) -> bool:
        """Whether ``file`` is open now."""
        return (file.key, "direct") in self._open or (file.key, "library") in self._open

    def get(self, file: ShardFile, cache: ShardCache | None = None) -> OpenFile:
        """What reads ``file``, whose copy ``cache`` holds if its path is a URL.

        Raises:
          SourceError: the file is gone or has changed since the source was made.
          CorruptDataError: it is damaged.
        """
        return self._known.find(file.key) or self._known.get(file.key, lambda: self._check(file, cache))

    def open(self, file: ShardFile, cache: ShardCache | None) -> None:
        """Fetches and opens ``file``, for reads to come.

        Raises:
          As :meth:`get`.
        """
        found = self.get(file, cache)
        with contextlib.suppress(OSError):  # whoever reads it finds out why
            _ = found.library() if found.direct is None else found.direct.open()

    def drop(self, files: Sequence[ShardFile]) -> None:
        """Forgets ``files``."""
        self._known.drop([file.key for file in files])
        self._open.drop([(file.key, kind) for file in files for kind in ("direct", "library")])

    def _check(self, file: ShardFile, cache: ShardCache | None) -> tuple[OpenFile, int]:
        def library() -> Any:
            return self._opened(file, "library", cache, _open_library)

        last: weakref.ref[Descriptor] | None = None

        def descriptor() -> Descriptor:
            nonlocal last
            # While it is open, not through the pool: looking up each file of a batch there takes a tenth of the batch.
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
            library()  # which is the judge of what is damaged
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
                # The program has opened more than its share: make do with less.
                self._open.drop([key for key, _ in self._open.oldest_first()])
                return open_once()

        made = self._open.get((file.key, kind), make)[1]
        if cache is not None and cache.max_bytes is not None:
            self._drop_copies(file, cache.max_bytes // 4)
        return made

    def _drop_copies(self, newest: ShardFile, max_bytes: int) -> None:
        """Closes copies of remote files beyond ``max_bytes``: one that is evicted while open keeps its disk space."""
        copies = [(key, file) for key, (file, _) in self._open.oldest_first() if is_url(file.path)]
        excess = sum(file.num_bytes for _, file in copies) - max_bytes
        for key, file in copies:
            if excess <= 0:
                break
            if file.key != newest.key:
                self._open.drop([key])
                excess -= file.num_bytes


# One for the process, because what it bounds, open files and memory, is the process's: a mixture of 35 sources with a
# pool each would run out of both.
shared_readers = ReaderPool()


@contextlib.contextmanager
def _local_copy(file: ShardFile, cache: ShardCache | None) -> Iterator[tuple[str, os.stat_result]]:
    """Path and status of the file on a local disk, where it stays within the ``with`` block.

    Raises:
      SourceError: the file is gone or has changed since the source was made.
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
    opened = Descriptor(path)
    if not os.path.samestat(opened.status, status) or opened.status.st_size != status.st_size:
        raise _changed(file, path)
    return opened, 0
