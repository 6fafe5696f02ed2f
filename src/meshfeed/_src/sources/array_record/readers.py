"""Opens, counts and checks ArrayRecord files for their two readers, the extension and the array_record library.

The extension (``_riegeli.c``) reads a batch of files with one record per chunk in one call without the GIL; the library
acquires the GIL for each record. The extension returns only records whose hashes match. Everything else is left to the
library, which also reports damage; :func:`read_by_library` maps its exceptions to those of meshfeed.

The library opens a truncated, invalid or missing file without an error, as a file of 0 records. ``ok()`` then returns
False, and the first read raises the reason.

The records of a remote file are counted from its footer, without fetching them.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError, without_signatures
from meshfeed._src.base.types import JsonValue
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import RemoteBytes, SparseFile, identify, sparse_files
from meshfeed._src.sources.files.formats import compression_of, reader_hint
from meshfeed._src.sources.files.open_files import Descriptor, ShardPool
from meshfeed._src.sources.files.shard import Shard, changed, inspect_copy, local_copy

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache


_logger = logging.getLogger("meshfeed")

try:
    from meshfeed._src.sources.array_record import _riegeli as riegeli  # pyright: ignore[reportAttributeAccessIssue] # built from C
except ImportError as error:  # installed without a C compiler, or built for another system
    _logger.debug("ArrayRecord files are read by the array_record library, which is slower: %s", error)
    riegeli: Any = None

# The protocol buffer {1: footer offset, 2: magic number}, which is never compressed.
_POSTSCRIPT = re.compile(rb"\x08([\x80-\xff]{0,9}[\x00-\x7f])\x10\xde\xc0\xeb\xfe\x84\xce\xc3\xc9\x71", re.DOTALL)
# The first record of the footer: {1: {1: version, 2: chunks, 3: records, 4: the writer's options}}.
_VARINT = rb"([\x80-\xff]{0,9}[\x00-\x7f])"
_METADATA = re.compile(rb'\n%b\x08\x01\x10%b\x18%b"%b(.*)' % (4 * (_VARINT,)), re.DOTALL)
_BLOCK_BYTES = 1 << 16  # a Riegeli block; the last one of a file holds its postscript
_TAIL_BYTES = 4 * _BLOCK_BYTES  # the footer of about 20,000 chunks: one request is enough for most files
_BLOCK_HEADER_BYTES = 24
_CHUNK_HEADER_BYTES = 40
_MAX_RECORD_BYTES = 1 << 23  # each reading thread keeps a buffer of the longest record
_PARSED_AT_ONCE = 1 << 17  # footer entries; bounds the memory of the parsed fields


@dataclasses.dataclass(frozen=True)
class DirectFile:
    """A file readable by the extension.

    Attributes:
      index: a ``_riegeli.Index`` with the offsets and sizes of the records.
      open: returns the open file.
    """

    index: Any
    open: Callable[[], Descriptor | SparseFile]


def open_direct(open_file: Callable[[], Descriptor], num_records: int) -> DirectFile | None:
    """Returns a file for the extension, or None if the file needs the library. ``open_file`` returns it if it is open."""
    if riegeli is None:
        return None
    try:
        file = open_file()
        # A footer with sound hashes can still be hostile: sizes that do not fit are refused here and by the Index.
        footer = _read_footer(file.number, file.status.st_size, num_records)
        return None if footer is None else DirectFile(riegeli.Index(*footer), open_file)
    except (OSError, ValueError):
        return None


def _read_footer(fd: int, num_bytes: int, num_records: int) -> tuple[np.ndarray, np.ndarray, bool] | None:
    """Reads the record index of a file.

    Returns:
      Offsets int64[n + 1] (the last one is that of the footer), sizes int64[n], and whether records are compressed; None
      if the file needs the library.
    """
    found = _read_last_chunk(fd, num_bytes)
    if found is None or found[1].num_records != num_records + 1:
        return None
    footer_offset, (_, compressed, values, metadata_size) = found
    columns = _columns(values, metadata_size, num_records, (8, 16, 24))  # chunk offset, data size, number of records
    if columns is None or (columns[2] != 1).any():
        return None
    offsets, sizes = np.append(columns[0], footer_offset), columns[1]
    spans = np.diff(offsets)
    if (spans <= 0).any() or (spans > _MAX_RECORD_BYTES).any() or (sizes > _MAX_RECORD_BYTES).any():
        return None
    return offsets, np.ascontiguousarray(sizes), compressed


def _footer_offset(last_block: bytes) -> int | None:
    """Returns the offset in the postscript; None if there is none. Only the hash of the footer shows that it is right."""
    found = _POSTSCRIPT.search(last_block)
    return None if found is None else _number(found[1])


def _number(varint: bytes) -> int:
    return sum((byte & 0x7F) << (7 * digit) for digit, byte in enumerate(varint))


class _Chunk(NamedTuple):
    """The number of records in a chunk, whether it is compressed, its concatenated records, and the size of the first."""

    num_records: int
    compressed: bool
    values: bytes
    first_size: int


def _read_last_chunk(fd: int, num_bytes: int) -> tuple[int, _Chunk] | None:
    """Returns the offset and the content of the footer; None if the file needs the library."""
    last = num_bytes - _BLOCK_BYTES
    postscript = None if last < 0 or last % _BLOCK_BYTES else _read_chunk(fd, last, num_bytes)
    offset = None if postscript is None else _footer_offset(postscript[1])
    footer = None if offset is None or not 0 <= offset < last else _read_chunk(fd, offset, num_bytes)
    parsed = None if footer is None else _parse_records(footer[1], footer[0])
    return None if parsed is None or offset is None else (offset, parsed)


def _read_chunk(fd: int, offset: int, num_bytes: int) -> tuple[int, bytes] | None:
    """Returns the number of records and the bytes of a chunk of a file; None unless they match their hashes."""
    num_records, data_size = _counts(fd, offset)
    # No more records than chunks fit in the file, each of which is described by a record of the footer.
    if not 0 < num_records <= num_bytes // _CHUNK_HEADER_BYTES + 1 or not 0 < data_size <= num_bytes:
        return None
    chunk = riegeli.read_chunk(fd, offset, data_size)
    return None if chunk is None else (num_records, chunk)


def _parse_records(chunk: bytes, num_records: int) -> _Chunk | None:
    """Returns the content of a chunk, or None if it has any other form."""
    data = memoryview(chunk)[_CHUNK_HEADER_BYTES:]
    compressed = data[0] == ord("z")
    found = _varint(data, 1)
    if (data[0] and not (compressed and riegeli.HAS_ZSTD)) or found is None or found[0] > len(data) - found[1]:
        return None
    end = found[1] + found[0]
    sizes, values = (
        _inflated(compressed, part, 64 * num_records + 4096) for part in (data[found[1] : end], data[end:])
    )
    if sizes is None or values is None or len(values) != int.from_bytes(chunk[32:40], "little"):
        return None
    first = _varint(sizes, 0)
    return None if first is None or first[0] > len(values) else _Chunk(num_records, compressed, values, first[0])


def _counts(fd: int, offset: int) -> tuple[int, int]:
    """Returns the numbers of records and of bytes of data in the header of a chunk; zeros if it is not one of records."""
    content = os.pread(fd, _CHUNK_HEADER_BYTES + 2 * _BLOCK_HEADER_BYTES, offset)
    border = -offset % _BLOCK_BYTES  # a block header may interrupt or precede the chunk header
    header = (content[:border] + content[border + _BLOCK_HEADER_BYTES :])[:_CHUNK_HEADER_BYTES]
    if len(header) < _CHUNK_HEADER_BYTES or header[24] != ord("r"):
        return 0, 0
    return int.from_bytes(header[25:32], "little"), int.from_bytes(header[8:16], "little")


def _inflated(compressed: bool, content: memoryview, limit: int) -> bytes | None:
    if not compressed:
        return bytes(content)
    found = _varint(content, 0)
    return None if found is None or found[0] > limit else riegeli.inflate(content[found[1] :], found[0])


def _varint(content: bytes | memoryview, start: int) -> tuple[int, int] | None:
    """Returns the varint at ``start`` and the offset after it, or None if it is invalid."""
    number = np.empty(1, np.int64)
    end = riegeli.read_varints(content, start, number)
    return None if end < 0 else (int(number[0]), end)


def _columns(content: bytes, start: int, count: int, tags: tuple[int, ...]) -> np.ndarray | None:
    """Parses ``count`` concatenated protocol buffers of varints, from ``start`` to the end of ``content``.

    Returns int64[fields, count]; None if it has any other form, such as other ``tags`` of the fields.
    """
    columns = np.empty((len(tags), count), np.int64)
    part = np.empty((min(count, _PARSED_AT_ONCE), 2 * len(tags)), np.int64)
    at = start
    for first in range(0, count, _PARSED_AT_ONCE):
        part = part[: count - first]
        at = riegeli.read_varints(content, at, part)
        if at < 0 or (part[:, ::2] != tags).any():
            return None
        columns[:, first : first + len(part)] = part[:, 1::2].T
    return columns if at == len(content) else None


# With a read-ahead of 0, reading a run of records iterates over all chunks and switches threads: 17 instead of 0.8 µs
# per record of 1 KB in runs of 64. Single records and lists cost the same either way.
_READING = "readahead_buffer_size:1M,max_parallelism:0"
# Counting does not need the chunk index in memory: 2.1 instead of 3.8 ms for 100,000 chunks.
_COUNTING = _READING + ",footer_prefetch_bytes:0,index_storage_option:offloaded"
# The library refills its buffer, 1 MiB by default, after every seek: 30 instead of 7 µs per record of 8 KB.
_BUFFER_BYTES = 8192
# Over all sources: several that are built at once would open more files than the process may have.
_inspecting = threading.Semaphore(16)


@dataclasses.dataclass(frozen=True)
class ShardFile(Shard):
    """One ArrayRecord file as it was when the source was created.

    Attributes:
      group_size: records per chunk.
      transposed: whether chunks store records column by column.
    """

    source: ClassVar[str] = "ArrayRecord"
    group_size: int
    transposed: bool = False

    def details(self) -> dict[str, JsonValue]:
        return {"group_size": self.group_size, **({"transposed": True} if self.transposed else {})}

    @property
    def is_simple(self) -> bool:
        """Whether every chunk is one record, as the extension needs it."""
        return self.group_size == 1 and not self.transposed

    @property
    def num_chunks(self) -> int:
        """Number of chunks; a chunk is the unit that the library reads, checks and decompresses."""
        return -(-self.num_records // self.group_size)

    def describe_change(self, path: str) -> str:
        try:
            now = f"{_open(path, _COUNTING).num_records():,} in {os.path.getsize(path):,} now"
        except CorruptDataError:
            now = f"{os.path.getsize(path):,} now"
        return f"{self.num_records:,} records in {self.num_bytes:,} bytes then, {now}"


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


def inspect(name: str, cache: ShardCache | None) -> ShardFile:
    """Counts the records of a file, given its path or URL; raises as :func:`inspect_file`."""
    if cache is not None and compression_of(name):
        return inspect_copy(name, cache, inspect_file)
    return _inspect_url(name, cache) if file_paths.is_url(name) else inspect_file(name)


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
        num_records, options = _read_metadata(path) or _read_metadata_by_library(path)
    group_size = re.search(r"group_size:(\d+)", options)
    return ShardFile(
        path,
        status.st_size,
        str(status.st_mtime_ns),
        num_records,
        int(group_size[1]) if group_size else 1,
        transposed="transpose:true" in options,
    )


def _read_metadata(path: str) -> tuple[int, str] | None:
    """Returns the number of records and the writer's options; None if the library has to read or refuse the file.

    The library's first file in a process takes 25 ms of CPU time, and each further one of 20,000 chunks 9 ms; this, 1 ms.
    """
    if riegeli is None:
        return None
    with open(path, "rb", buffering=0) as file:
        found = _read_last_chunk(file.fileno(), os.fstat(file.fileno()).st_size)
    metadata = None if found is None else _METADATA.fullmatch(found[1].values[: found[1].first_size])
    if found is None or metadata is None:
        return None
    size, num_chunks, num_records, options_size = map(_number, metadata.groups()[:4])
    options = metadata[5]
    if (
        size != len(metadata[0]) - metadata.end(1)
        or options_size != len(options)
        or num_chunks != found[1].num_records - 1
    ):
        return None
    return num_records, options.decode("ascii", "replace")


def _read_metadata_by_library(path: str) -> tuple[int, str]:
    """Does the same for any file."""
    reader = _open(path, _COUNTING)
    try:
        return reader.num_records(), reader.writer_options_string() or ""
    finally:
        reader.close()


def _open(path: str, options: str) -> Any:
    from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  # a C module

    file_paths.check_name(path, "the ArrayRecord library")
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


def check(file: ShardFile, cache: ShardCache | None, pool: ShardPool) -> tuple[OpenFile, int]:
    """Returns the readers of a file, through ``cache`` if its path is a URL, and their number of 8-byte entries in memory."""

    def library() -> Any:
        return pool.opened(file, "library", cache, _open_library)

    with local_copy(file, cache) as (path, status):
        direct = None
        if file.is_simple:
            direct = open_direct(pool.descriptor(file, cache), file.num_records)
    if direct is None:
        library()  # raises if the file is damaged
    _logger.debug(
        "%s is read %s", without_signatures(file.path), "directly" if direct else "by the array_record library"
    )
    return OpenFile(path, status, library, direct), 0 if direct is None else direct.index.nbytes // 8


def _open_library(file: Shard, path: str, _status: os.stat_result) -> tuple[Any, int]:
    assert isinstance(file, ShardFile)
    reader = _open(path, _READING)
    if reader.num_records() != file.num_records:
        raise changed(file, path)
    return reader, file.num_chunks


def _inspect_url(url: str, cache: ShardCache | None) -> ShardFile:
    """Counts and checks like :func:`inspect_file`, without fetching the records.

    Opens a sparse file that has only the footer and the postscript with the array_record library, which checks their
    hashes as usual.
    """
    remote, version = identify(url, cache, source="ArrayRecord", part=slice(-_TAIL_BYTES - _BLOCK_BYTES, None))
    sparse = _copy_footer(remote)
    path = f"/proc/self/fd/{sparse.number}"
    try:
        found = inspect_file(path)
    except CorruptDataError as error:
        raise CorruptDataError(str(error).replace(path, url), path=url) from None
    except SourceError as error:
        raise SourceError(str(error).replace(path, url)) from None
    return dataclasses.replace(found, path=url, version=version)


def check_readable(files: Sequence[ShardFile]) -> None:
    """Raises SettingsError if files, some of them remote, cannot be read without a cache."""
    if not all(file_paths.is_url(file.path) for file in files):
        raise SettingsError(
            "ArrayRecord got local files and URLs, and no cache. Pass cache=meshfeed.ShardCache(directory, max_bytes=…), "
            "or join two sources with meshfeed.sources.Mixture.",
            setting="cache",
        )
    for file in files:
        if not file.is_simple or riegeli is None:
            has_chunks = f"has {file.group_size} records per chunk"
            reason = "needs the missing C extension" if file.is_simple else has_chunks
            raise SettingsError(
                f"ArrayRecord got the URL {file.path!r} and no cache, and the file {reason}. Pass "
                "cache=meshfeed.ShardCache(directory, max_bytes=…), which copies whole files, or write files of one record "
                "per chunk (group_size:1).",
                setting="cache",
            )


def _copy_footer(file: RemoteBytes) -> SparseFile:
    """Returns a file with the footer and the postscript of a remote one at their offsets."""
    url, num_bytes = file.url, file.num_bytes
    # Start at a block boundary: the reader needs the header of the block in which a chunk begins.
    tail_start = max(0, num_bytes - _TAIL_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
    tail = file.read(tail_start, num_bytes)
    footer_offset = _footer_offset(tail[-_BLOCK_BYTES:])
    if footer_offset is None or num_bytes < _BLOCK_BYTES:
        raise CorruptDataError(
            f"{url}: {num_bytes:,} bytes without the postscript of an ArrayRecord file. Expected a file closed by "
            f"ArrayRecordWriter.{remedy_for(url)}",
            path=url,
        )
    footer_start = min(footer_offset, tail_start) // _BLOCK_BYTES * _BLOCK_BYTES
    footer = file.read(footer_start, tail_start)
    sparse = SparseFile(num_bytes)
    sparse.write(footer_start, footer)
    sparse.write(tail_start, tail)
    return sparse


def _index_remote(file: ShardFile) -> tuple[tuple[np.ndarray, Any], int]:
    """Returns the offsets of :func:`_read_footer` with the extension's index, and their number of 8-byte entries."""
    footer = _copy_footer(file.remote)
    found = _read_footer(footer.number, file.num_bytes, file.num_records)
    if found is None and file.manifest:
        change = f"{file.num_records:,} records then, another number now"
        raise file_paths.changed(f"the ArrayRecord file {file.path}", change, file.manifest)
    if found is None:
        raise CorruptDataError(
            f"{file.path}: the footer does not list its {file.num_records:,} records.{remedy_for(file.path)}",
            path=file.path,
        )
    return (found[0], riegeli.Index(*found)), 2 * len(found[0])


def open_remote(
    files: Sequence[ShardFile], file_index: np.ndarray | None, rows: np.ndarray, pool: ShardPool
) -> list[OpenFile]:
    """Returns remote files, of one record per chunk, from which ``rows`` can be read, and no other records.

    Args:
      files: the files.
      file_index: int64[n], the file of each record; None if there is only one file.
      rows: int64[n], row numbers within the files.
      pool: keeps the indexes.
    """
    which = np.zeros(len(rows), np.int64) if file_index is None else file_index
    indexes = file_paths.in_threads(lambda file: pool.checked(file, lambda: _index_remote(file), "direct\n"), files)
    starts, stops = np.empty((2, len(rows)), np.int64)
    for number, (offsets, _) in enumerate(indexes):
        mine = np.flatnonzero(which == number)
        starts[mine], stops[mine] = offsets[rows[mine]], offsets[rows[mine] + 1]
    copies = sparse_files([file.remote for file in files], which, starts, stops)
    return [
        # Without the library, which reads whole files only.
        OpenFile(file.path, copy.status, lambda: None, DirectFile(index, lambda copy=copy: copy))
        for file, (_, index), copy in zip(files, indexes, copies, strict=True)
    ]


_PROBES = 4


def read_by_library(opened: OpenFile, file: ShardFile, rows: np.ndarray, first_record_id: int) -> list[bytes]:
    """Reads records ``rows``, int64[n], of one file, in that order, with the array_record library.

    ``first_record_id``, that of row 0 of the file, is for messages.

    Raises:
      CorruptDataError: if a stored byte is damaged; names the file and the record.
      SourceError: if the file has been truncated since it was opened.
      OSError: if the file cannot be read.
    """
    library = opened.library()
    try:
        records = _call_library(library.read, opened.path, file, rows)
    except (RuntimeError, IndexError) as error:
        raise _explain(library, file, rows.tolist(), first_record_id, error) from error
    if not all(records):
        _check_length(opened, file)
    return records


def _call_library(read: Any, path: str, file: ShardFile, rows: np.ndarray) -> list[bytes]:
    """Reads rows with the fastest calls of the library.

    Reading a list of rows iterates over all chunks of the file and wakes the library's threads, which read in parallel.
    Reading single rows does neither, but waits for storage sequentially: it is faster only for a few rows of a large
    file, if they are in the page cache.
    """
    ends = np.flatnonzero(rows[1:] - rows[:-1] != 1) + 1  # of all runs of consecutive rows except the last
    if 2 * len(ends) < len(rows) or len(rows) == 1:
        runs = [rows] if not len(ends) else np.split(rows, ends)
        return list(itertools.chain.from_iterable(read(int(run[0]), int(run[-1]) + 1) for run in runs))
    singles, together = expected_microseconds(file, rows)
    if singles < together and _are_cached(path, file, rows):
        return [read(row, row + 1)[0] for row in rows.tolist()]
    return read(rows.tolist())


def _are_cached(path: str, file: ShardFile, rows: np.ndarray) -> bool:
    """Whether bytes near a sample of the rows are in the page cache; False if the system cannot report it."""
    offsets = (rows[:: -(-len(rows) // _PROBES)] * (file.num_bytes / file.num_records)).astype(np.int64).tolist()
    try:
        opened = Descriptor(path)
    except OSError:  # the read reports it
        return False
    return all(opened.is_cached(offset, unknown=False) for offset in offsets)


def _check_length(opened: OpenFile, file: ShardFile) -> None:
    """Raises SourceError if the file was truncated while open: the library then returns empty records without an error."""
    try:
        found = os.stat(opened.path)
    except FileNotFoundError:  # a deleted file stays readable while open
        return
    then, now = opened.status.st_size, found.st_size
    if now != then and os.path.samestat(found, opened.status):
        raise SourceError(
            f"the ArrayRecord file {file.path} has changed since the source was made: {then:,} bytes then, {now:,} now. Put "
            "it back as it was, or build the source again."
        )


def expected_microseconds(file: ShardFile, rows: np.ndarray) -> tuple[float, float]:
    """Estimates the cost in µs of reading scattered rows from the page cache, with single reads and with one list.

    Measured with records of 200 to 8,192 bytes. A single read costs 3.3 µs plus the decoding of its chunk. A list costs
    0.002 µs per chunk of the file, about 200 µs to wake the library's threads, 2.7 µs per row, and the decoding of each
    chunk once. Chunks decode at about 5 bytes per nanosecond.
    """
    num_chunks = max(file.num_chunks, 1)
    num_touched = len(rows) if file.group_size == 1 else len(np.unique(rows // file.group_size))
    decoding = 0.0002 * file.num_bytes / num_chunks
    waking = 200.0 if num_touched > 1 else 0.0  # one chunk is read on the calling thread
    singles = len(rows) * (3.3 + decoding)
    return singles, 0.002 * num_chunks + waking + num_touched * (2.7 + decoding) + 0.5 * (len(rows) - num_touched)


def _explain(reader: Any, file: ShardFile, rows: list[int], first_record_id: int, error: Exception) -> Exception:
    """Returns the exception to raise for ``error``; reads the rows one by one to find the damaged one."""
    row, message = None, str(error)
    for candidate in rows:
        try:
            reader.read(candidate, candidate + 1)
        except (RuntimeError, IndexError) as single:
            row, message = candidate, str(single)
            break
    if "read()" in message and "failed" in message:  # a failed pread() is an I/O error, not corruption
        return OSError(f"{without_signatures(file.path)}: {message}")
    record_id = None if row is None else first_record_id + row
    which = "a record" if row is None else f"record {record_id} (row {row} of the file)"
    return CorruptDataError(
        f"{file.path}: {which} is damaged: {message}. Its bytes are not those that were written. Copy the file "
        "again from where it came, or let the feed replace such records: "
        "bad_records=meshfeed.SkipBad(max_fraction=1e-4).",
        path=file.path,
        record_id=record_id,
    )
