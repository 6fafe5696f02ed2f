"""Reads byte ranges of remote files without copying whole files: for hosts without a disk.

The ranges of a batch are requested at the same time. Neighbors are joined, the bytes under way are bounded, and each request
is retried on its own.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry
from meshfeed._src.sources.files import paths as file_paths

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

_GAP_BYTES = 64 << 10  # transferred in less time than a request takes to be answered
_JOINED_BYTES = 8 << 20
_IN_FLIGHT_BYTES = 64 << 20
_MAX_CONNECTIONS = 256
_RETRY = Retry()
READ_THREADS = 4
"""Batches that are read at the same time."""


class ByteRange(NamedTuple):
    """Bytes ``[start, stop)`` of a remote file of ``num_bytes``."""

    url: str
    num_bytes: int
    start: int
    stop: int


def identify(url: str, cache: ShardCache | None, *, source: str) -> tuple[int, str]:
    """Returns the size in bytes and a version, which changes if the content at the URL changes; with retries.

    Raises:
      SourceError: if the file does not exist, or the server does not report its size.
      OSError: if the store does not answer.
    """
    if cache is not None:
        return cache.identify(url)
    info = call_with_retry(lambda: file_paths.file_info(url, source), _RETRY, doing=f"looking up {url}")
    if info.get("size") is None:
        raise SourceError(
            f"{source}: the server of {url!r} does not tell the file's size. Copy the file to a local disk."
        )
    return int(info["size"]), file_paths.version_of(info)


class RemoteBytes(NamedTuple):
    """A remote file that is read without a copy."""

    url: str
    num_bytes: int
    source: str

    def read(self, start: int, stop: int) -> bytes:
        """Reads bytes ``[start, stop)``; fewer if the file ends before."""
        stop = min(stop, self.num_bytes)
        return read_ranges([ByteRange(self.url, self.num_bytes, start, stop)], source=self.source)[0]


def read_ranges(ranges: Sequence[ByteRange], *, source: str) -> list[bytes]:
    """Reads ranges of any files, in any order, with repeats and overlaps allowed.

    Raises:
      SourceError: if a file does not exist.
      OSError: if a range could not be read after all retries.
    """
    order = sorted(range(len(ranges)), key=lambda number: ranges[number])
    joined, slots = _join([ranges[number] for number in order])
    contents = _read_joined(joined, source)
    found = [b""] * len(ranges)
    for number, slot in zip(order, slots, strict=True):
        wanted, whole = ranges[number], joined[slot]
        found[number] = contents[slot][wanted.start - whole.start : wanted.stop - whole.start]
    return found


def _join(ranges: Sequence[ByteRange]) -> tuple[list[ByteRange], list[int]]:
    """Joins sorted ranges that are close to each other; returns them, and which of them holds each range."""
    joined: list[ByteRange] = []
    slots = []
    for one in ranges:
        last = joined[-1] if joined else None
        near = last is not None and last.url == one.url and one.start <= last.stop + _GAP_BYTES
        if (
            last is not None
            and near
            and max(one.stop, last.stop) - last.start <= max(_JOINED_BYTES, last.stop - last.start)
        ):
            joined[-1] = last._replace(stop=max(one.stop, last.stop))
        else:
            joined.append(one)
        slots.append(len(joined) - 1)
    return joined, slots


def _read_joined(ranges: Sequence[ByteRange], source: str) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < len(ranges):
        wave, num_bytes = [], 0
        for one in ranges[len(found) :]:
            num_bytes += one.stop - one.start
            if wave and num_bytes > _IN_FLIGHT_BYTES:
                break
            wave.append(one)
        found += _read_wave(wave, source)
    return found


def _read_wave(ranges: Sequence[ByteRange], source: str) -> list[bytes]:
    """Reads ranges at the same time; reads those that fail again."""
    found: dict[int, bytes] = {number: b"" for number, one in enumerate(ranges) if one.start >= one.stop}

    def attempt() -> None:
        todo = [number for number in range(len(ranges)) if number not in found]
        answers = _request([ranges[number] for number in todo], source)
        for number, answer in zip(todo, answers, strict=True):
            if isinstance(answer, bytes):
                found[number] = answer
        failed = [answer for answer in answers if not isinstance(answer, bytes)]
        if failed:
            raise failed[0]

    call_with_retry(
        attempt, _RETRY, doing=f"reading {len(ranges)} ranges of {ranges[0].url}", progress=lambda: len(found)
    )
    return [found[number] for number in range(len(ranges))]


def _request(ranges: Sequence[ByteRange], source: str) -> list[bytes | Exception]:
    """Requests ranges at the same time; returns the bytes of each, or the error."""
    if not ranges:
        return []
    file_system, _ = _file_system(ranges[0].url, source)
    paths = [_file_system(one.url, source)[1] for one in ranges]
    with file_paths.remote_errors(ranges[0].url, source):
        answers = file_system.cat_ranges(
            paths, [one.start for one in ranges], [one.stop for one in ranges],
            on_error="return", **({"batch_size": _MAX_CONNECTIONS} if file_system.async_impl else {}),
        )  # fmt: skip
    return [_checked(one, answer, source) for one, answer in zip(ranges, answers, strict=True)]


def _checked(one: ByteRange, answer: bytes | Exception, source: str) -> bytes | Exception:
    try:
        with file_paths.remote_errors(one.url, source):
            if isinstance(answer, Exception):
                raise answer
    except Exception as error:
        return error
    if len(answer) == one.num_bytes != one.stop - one.start:  # a server without range requests
        answer = answer[one.start : one.stop]
    if len(answer) != one.stop - one.start:
        return OSError(f"{source}: {one.url}: {len(answer):,} bytes came for the range [{one.start:,}, {one.stop:,})")
    return answer


def _file_system(url: str, source: str) -> tuple[Any, str]:
    """Returns a file system that opens enough connections for the ranges of a batch."""
    protocol = url.partition("://")[0]
    if protocol in ("http", "https"):
        return file_paths.open_file_system(url, source, get_client=_http_client)
    if protocol in ("s3", "s3a"):
        import fsspec.config

        configured = fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
        options = {"max_pool_connections": _MAX_CONNECTIONS, **configured}
        return file_paths.open_file_system(url, source, config_kwargs=options)
    return file_paths.open_file_system(url, source)


async def _http_client(**kwargs: Any) -> Any:
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS), **kwargs)


class SparseFile:
    """A file in memory that has some ranges of a remote one at their offsets, and zeros elsewhere.

    Attributes:
      number: the file descriptor; closed when the last reference is dropped.
    """

    def __init__(self, num_bytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self.number = os.memfd_create("meshfeed")
        else:
            with tempfile.TemporaryFile() as file:
                self.number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.number).atexit = False
        os.ftruncate(self.number, num_bytes)
        self.status = os.fstat(self.number)

    def write(self, start: int, content: bytes) -> None:
        """Puts bytes at an offset."""
        os.pwrite(self.number, content, start)


def sparse_files(
    files: Sequence[tuple[str, int]], file_index: np.ndarray, starts: np.ndarray, stops: np.ndarray, *, source: str
) -> list[SparseFile]:
    """Returns files that have the given ranges.

    Args:
      files: URL and size in bytes of each.
      file_index: int64[n], the file of each range.
      starts: int64[n], the first byte of each range.
      stops: int64[n], the byte after its last one.
      source: name of the source, for messages.

    Raises:
      SourceError, OSError: as for :func:`read_ranges`.
    """
    numbers, lows = file_index.tolist(), starts.tolist()
    ranges = [
        ByteRange(files[number][0], files[number][1], low, high)
        for number, low, high in zip(numbers, lows, stops.tolist(), strict=True)
    ]
    copies = [SparseFile(num_bytes) for _, num_bytes in files]
    for number, low, content in zip(numbers, lows, read_ranges(ranges, source=source), strict=True):
        copies[number].write(low, content)
    return copies
