"""ArrayRecord files: opening, counting and checking them, and how many stay open.

The library opens a truncated, garbage or missing file as one of 0 records and says nothing; ``ok()`` tells, and the
reason comes out of the first read.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import re
import resource
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshfeed._errors import CorruptDataError, SourceError
from meshfeed.sources._array_record_direct import DirectFile, open_direct
from meshfeed.sources._files import is_url
from meshfeed.sources._formats import reader_hint

if TYPE_CHECKING:
    from meshfeed.sources._shard_cache import ShardCache

_logger = logging.getLogger("meshfeed")
# With a read-ahead of 0, a run of records costs a walk through all chunks and a hand-over to other threads: 17 instead
# of 0.8 µs a record of 1 KB in runs of 64. Single records and lists cost the same either way.
_READING = "readahead_buffer_size:1M,max_parallelism:0"
# Counting needs neither the index of chunks nor its memory: 2.1 instead of 3.8 ms at 100,000 chunks.
_COUNTING = _READING + ",footer_prefetch_bytes:0,index_storage_option:offloaded"
# The library's 1 MiB buffer is filled anew at every jump: 30 instead of 7 µs for a record of 8 KB.
_BUFFER_BYTES = 8192
_MAX_OPEN_READERS = 512
_MAX_OPEN_ENTRIES = 1 << 26  # of 8 bytes: the library's one a chunk, and one or two for reading directly


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """One ArrayRecord file as it was when the source was made.

    Attributes:
      path: local path, or the URL of a file that is read through a cache.
      num_bytes: its size.
      version: time of its last change in nanoseconds; of a remote file the name of its version.
      num_records: records in it.
      group_size: records a chunk.
      key: tells this file and version from all others; a string because its hash is computed once.
    """

    path: str
    num_bytes: int
    version: str
    num_records: int
    group_size: int
    key: str = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.path}\n{self.version}\n{self.num_bytes}\n{self.num_records}")

    @property
    def num_chunks(self) -> int:
        """Chunks in the file, the unit that the library reads, checks and decompresses."""
        return -(-self.num_records // self.group_size)


@dataclasses.dataclass(frozen=True)
class OpenFile:
    """An open ArrayRecord file.

    Attributes:
      path: local path: of a file behind a URL, that of its copy.
      status: of the file when it was opened.
      library: the array_record library's reader.
      direct: the way past the library, for files that have it.
      num_entries: numbers of 8 bytes that both hold in memory.
    """

    path: str
    status: os.stat_result
    library: Any
    direct: DirectFile | None
    num_entries: int


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
        group_size = re.search(r"group_size:(\d+)", reader.writer_options_string() or "")
    finally:
        reader.close()
    return ShardFile(
        path, status.st_size, str(status.st_mtime_ns), num_records, int(group_size[1]) if group_size else 1
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
    """Open local files, the least recently used dropped first. Thread-safe.

    A file is dropped, never closed: it closes when the last thread that reads from it is done.
    """

    def __init__(self, max_readers: int | None = None, max_entries: int = _MAX_OPEN_ENTRIES) -> None:
        self._max_readers = max_readers
        self._max_entries = max_entries
        self._readers: collections.OrderedDict[str, tuple[ShardFile, OpenFile]] = collections.OrderedDict()
        self._num_entries = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._readers)

    def has(self, file: ShardFile) -> bool:
        """Whether a reader of ``file`` is open now."""
        return file.key in self._readers

    def get(self, file: ShardFile, cache: ShardCache | None = None) -> OpenFile:
        """An open reader of ``file``, whose copy ``cache`` holds if its path is a URL.

        Raises:
          SourceError: the file is gone or has changed since the source was made.
          CorruptDataError: it is damaged.
        """
        with self._lock:
            found = self._readers.get(file.key)
            if found is not None:
                self._readers.move_to_end(file.key)
                return found[1]
        opened = _open_unchanged(file, cache)  # outside the lock: other threads go on reading
        with self._lock:
            if file.key in self._readers:
                return self._readers[file.key][1]
            self._readers[file.key] = file, opened
            self._num_entries += opened.num_entries
            limit = self._max_readers or _reader_limit()
            while len(self._readers) > 1 and (len(self._readers) > limit or self._num_entries > self._max_entries):
                self._num_entries -= self._readers.popitem(last=False)[1][1].num_entries
            if cache is not None and cache.max_bytes is not None:
                self._drop_copies(file, cache.max_bytes // 4)
        return opened

    def _drop_copies(self, newest: ShardFile, max_bytes: int) -> None:
        """Closes copies of remote files beyond ``max_bytes``: one that is evicted while open still takes its room."""
        copies = [file for file, _ in self._readers.values() if is_url(file.path)]
        excess = sum(file.num_bytes for file in copies) - max_bytes
        for file in copies:
            if excess <= 0 or file.key == newest.key:
                break
            self._num_entries -= self._readers.pop(file.key)[1].num_entries
            excess -= file.num_bytes

    def drop(self, files: Sequence[ShardFile]) -> None:
        """Forgets the readers of ``files``."""
        with self._lock:
            for file in files:
                dropped = self._readers.pop(file.key, None)
                if dropped is not None:
                    self._num_entries -= dropped[1].num_entries


# One for the process, because what it bounds, open files and memory, is the process's: a mixture of 35 sources with 512
# readers each would run out of both.
shared_readers = ReaderPool()


def _reader_limit() -> int:
    """At most a quarter of the files that the process may open; the library and a direct reader open one each."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN_READERS if soft == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN_READERS, soft // 8))


def _open_unchanged(file: ShardFile, cache: ShardCache | None) -> OpenFile:
    if cache is not None and is_url(file.path):
        with cache.open(file.path) as path:
            return _open_checked(file, str(path), cache.identify(file.path)[1])
    return _open_checked(file, file.path, None)


def _open_checked(file: ShardFile, path: str, version: str | None) -> OpenFile:
    try:
        status = os.stat(path)
        reader = _open(path, _READING)
    except FileNotFoundError as error:
        raise SourceError(
            f"the ArrayRecord file {file.path} is gone; it was there when the source was made. Put it back, or build "
            "the source again."
        ) from error
    touched = file.version != (version or str(status.st_mtime_ns))
    if status.st_size != file.num_bytes or reader.num_records() != file.num_records or touched:
        raise SourceError(
            f"the ArrayRecord file {file.path} has changed since the source was made: {file.num_records:,} records in "
            f"{file.num_bytes:,} bytes then, {reader.num_records():,} in {status.st_size:,} now. Build the source "
            "again."
        )
    plain = file.group_size == 1 and "transpose:true" not in (reader.writer_options_string() or "")
    direct = open_direct(path, status, file.num_records) if plain else None
    _logger.debug("%s is read %s", file.path, "directly" if direct else "by the array_record library")
    return OpenFile(path, status, reader, direct, file.num_chunks + (0 if direct is None else direct.num_entries))
