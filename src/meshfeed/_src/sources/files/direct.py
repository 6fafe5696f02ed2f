"""Reads byte ranges of remote files without copying whole files: for hosts without a disk.

The ranges of a batch are requested at the same time. Neighbors are joined, the bytes under way are bounded, and each request
is retried on its own. Every answer is compared with the version of the file that was opened, so bytes of two versions never
mix.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import xxhash

from meshfeed._src.base.errors import MeshfeedError, without_signatures
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry
from meshfeed._src.sources.files import paths as file_paths

_log = logging.getLogger("meshfeed.sources.direct")
_GAP_BYTES = 64 << 10  # transferred in less time than a request takes to be answered
_JOINED_BYTES = 8 << 20
_IN_FLIGHT_BYTES = 64 << 20  # per read; bounds its memory
_DIGEST_BYTES = 16 << 20
# The clients open fewer, aiohttp 100 and botocore 10: with 20 ms per answer, 10 connections serve 500 requests per second.
_MAX_CONNECTIONS = 256
# Of one connection. A fixed time per request is too short for a slow link with many bytes in flight, or long for a dead one.
_SILENT_SECONDS = 30.0  # without a byte
_FIRST_ANSWER_SECONDS = 10.0  # of a look-up by range, after which a file is looked up as any other
_LEAST_BYTES_PER_SECOND = 100_000  # of all requests under way, for stores whose clients have no timeout of their own
_LOOKUP_SECONDS = 60.0  # between lookups of a file whose answers do not carry its version
_RETRY = Retry()
READ_THREADS = 4
"""Batches that are read at the same time. A batch takes a round trip; more threads compete with the client's event loop."""

_pin_lock = threading.Lock()


class RemoteBytes:
    """A remote file that is read without a copy. Thread-safe.

    An empty ``version`` becomes that of the first answer. ``source``, which reads the file, and ``manifest``, the path of the
    manifest that lists its size, if any, are for errors. ``known`` is the offset of bytes that need no request, and
    these bytes.
    """

    def __init__(
        self,
        url: str,
        num_bytes: int,
        version: str,
        source: str,
        manifest: str = "",
        known: tuple[int, bytes] = (0, b""),
    ) -> None:
        self.url, self.num_bytes, self.version, self.source = url, num_bytes, version, source
        self._known_start, self._known = known
        self._manifest = manifest
        self._looked_up = time.monotonic()

    def read(self, start: int, stop: int) -> bytes:
        """Reads bytes ``[start, stop)``; fewer if the file ends before."""
        stop = min(stop, self.num_bytes)
        low, high = start - self._known_start, stop - self._known_start
        if low >= 0 and high <= len(self._known):
            return self._known[low:high]
        return read_ranges([ByteRange(self, start, stop)])[0]

    def check_answer(self, headers: Mapping[str, str]) -> None:
        """Raises SourceError if the headers of an answer, found in lower case, are those of another version."""
        total = headers.get("content-range", "").rpartition("/")[2]
        num_bytes = int(total) if total.isdecimal() else self.num_bytes
        if not self.version:
            with _pin_lock:  # or two threads could take different versions for the first
                found = {field: headers[name] for field, name in _VERSION_HEADERS.items() if name in headers}
                self.version = self.version or file_paths.version_of(found)
        field, _, _ = self.version.partition("=")
        found = headers.get(_VERSION_HEADERS.get(field, ""))
        # Compared here, because fsspec does not pass If-Match to S3, and plain file servers ignore it.
        self._compare(num_bytes, file_paths.version_of({field: found}) if found else self.version)
        if self.version and not found and time.monotonic() > self._looked_up + _LOOKUP_SECONDS:
            self.look_up()

    def look_up(self, retry: Retry = file_paths.ONCE) -> None:
        """Raises SourceError if the store reports another size or version; a version of another kind is not compared."""
        self._looked_up = time.monotonic()
        info = file_paths.file_info(self.url, self.source, retry, fresh=True)
        num_bytes, version = info.get("size"), file_paths.version_of(info)
        is_comparable = version.partition("=")[0] == self.version.partition("=")[0]
        self._compare(
            self.num_bytes if num_bytes is None else int(num_bytes), version if is_comparable else self.version
        )

    def _compare(self, num_bytes: int, version: str) -> None:
        if (num_bytes, version) != (self.num_bytes, self.version):
            change = file_paths.describe_change((self.num_bytes, self.version), (num_bytes, version))
            files, inner = file_paths.open_file_system(self.url, self.source)
            file_paths.forget(files, inner)  # or a new source would take the listing from before the change
            raise file_paths.changed(f"{self.source}: {self.url}", change, self._manifest)


# Field of a version → header of an answer.
_VERSION_HEADERS = {"ETag": "etag", "generation": "x-goog-generation", "Last-Modified": "last-modified"}
# Protocol → the fields that fsspec's info() has of those, so that a look-up by range finds the same version.
_LOOK_UP_FIELDS = {
    **dict.fromkeys(("http", "https"), ("ETag", "Last-Modified")),
    **dict.fromkeys(("s3", "s3a"), ("ETag",)),
    **dict.fromkeys(("gs", "gcs"), ("generation",)),
}


class ByteRange(NamedTuple):
    """Bytes ``[start, stop)`` of a remote file."""

    file: RemoteBytes
    start: int
    stop: int


class IdentifiesFiles(Protocol):
    """The cache, which imports this module: it looks files up itself and remembers what it has found."""

    def identify(self, url: str) -> tuple[int, str]:
        """Returns the size of a remote file in bytes, and the key of its content."""
        ...

    def looked_up(self, url: str) -> file_paths.StoredFile | None:
        """Returns what it has found about a file; None if nothing yet."""
        ...

    def remember(self, url: str, found: file_paths.StoredFile) -> None:
        """Takes what was found about a file elsewhere, in place of a look-up."""
        ...


def identify(
    url: str, cache: IdentifiesFiles | None, *, source: str, part: slice | None = None
) -> tuple[RemoteBytes, str]:
    """Looks up a remote file, with retries; returns it, and a version, which changes if the content at the URL changes.

    ``part`` is the bytes that are read next: the first, ``slice(0, n)``, or the last, ``slice(-n, None)``. They come with the
    look-up, in one request, where the store's answers can be seen and it serves such ranges.

    Raises:
      SourceError, OSError: as for :func:`meshfeed._src.sources.files.paths.look_up`.
    """
    is_known = cache is not None and cache.looked_up(url) is not None
    first = None if part is None or is_known else _look_up_with(url, source, part)
    known = (0, b"") if first is None else (first.start, first.content)
    if cache is not None:
        if first is not None:
            cache.remember(url, first.file)
        num_bytes, key = cache.identify(url)
        return RemoteBytes(url, num_bytes, "" if first is None else first.file.version, source, known=known), key
    found = file_paths.look_up(url, source) if first is None else first.file
    return RemoteBytes(url, found.num_bytes, found.version, source, known=known), found.version


class _FirstAnswer(NamedTuple):
    """What a store reports of a file, and some of its bytes with their offset."""

    file: file_paths.StoredFile
    start: int
    content: bytes


def _look_up_with(url: str, source: str, part: slice) -> _FirstAnswer | None:
    """Requests the first or the last bytes of a file that has not been looked up.

    Returns None if that does not answer the question, for whatever reason: the file is then looked up as any other, which
    raises what there is to raise.
    """
    protocol = url.partition("://")[0]
    if protocol not in _LOOK_UP_FIELDS:  # the headers of answers, and so the size, are not visible
        return None
    files, path = _file_system(url, source)
    from fsspec.asyn import sync

    try:
        answer: Any = sync(files.loop, _get_part, files, path, protocol, part, timeout=_FIRST_ANSWER_SECONDS)
        headers, content = answer
        return _parse_first(headers, content, _LOOK_UP_FIELDS[protocol], part)
    except Exception as error:
        what = without_signatures(f"{url} does not answer a look-up by range: {type(error).__name__}: {error}")
        _log.debug("%s", what)
        return None


def _parse_first(
    headers: Mapping[str, str], content: bytes | None, fields: Sequence[str], part: slice
) -> _FirstAnswer | None:
    """Returns what an answer says about its file; ``content`` is None if it is the whole file and was not read."""
    found = _CONTENT_RANGE.match(headers.get("content-range", ""))
    if found is not None:
        start, stop, total = int(found[1]), int(found[2]) + 1, found[3]
    else:  # a server without ranges
        start, total = 0, headers.get("content-length", "")
        stop = int(total) if total.isdecimal() else -1
    if not total.isdecimal() or (content is not None and len(content) != stop - start):
        return None
    if start if part.start == 0 else stop != int(total):  # a server that takes the last bytes for the first
        return None
    info: dict[str, Any] = {field: headers[name] for field in fields if (name := _VERSION_HEADERS[field]) in headers}
    for digest in headers.get("x-goog-hash", "").split(","):
        name, _, value = digest.strip().partition("=")
        info |= {"md5Hash": value} if name == "md5" else {}
    return _FirstAnswer(file_paths.stored_file({"size": total, **info}), start, content or b"")


async def _get_part(files: Any, path: str, protocol: str, part: slice) -> tuple[Mapping[str, str], bytes | None]:
    """Requests ``part``; returns the headers and the bytes, or None for those of a whole file that is larger."""
    if not protocol.startswith("http"):
        if protocol.startswith("s3"):
            await _prepare_s3(files, [path])
        noted: list[Mapping[str, str]] = []
        _headers.set(noted)
        # One more: some versions of fsspec leave a byte out.
        content = await files._cat_file(path, start=part.start and part.start - 1, end=part.stop)
        headers = noted[-1]
        digests = headers.getall("x-goog-hash", []) if hasattr(headers, "getall") else []  # type: ignore[attr-defined]
        return {**{name.lower(): value for name, value in headers.items()}, "x-goog-hash": ",".join(digests)}, content
    # Not _cat_file, which reads the answer of a server that ignores ranges to its end.
    settings, session = dict(files.kwargs), await files.set_session()
    wanted = f"bytes={part.start or 0}-{part.stop - 1}" if part.stop else f"bytes={part.start}"
    headers = {**settings.pop("headers", {}), "Range": wanted, "Accept-Encoding": "identity"}
    async with session.get(files.encode_url(path), headers=headers, **settings) as answer:
        answer.raise_for_status()
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise ValueError(f"the answer is compressed: {answer.headers['Content-Encoding']}")
        found = {name.lower(): value for name, value in answer.headers.items()}
        if answer.status == 206 and not _CONTENT_RANGE.match(found.get("content-range", "")):
            raise ValueError(f"the answer has part of the file, and does not say which: {found.get('content-range')}")
        length = int(found.get("content-length", _JOINED_BYTES))
        is_small = length <= (part.stop or -part.start)
        return found, await answer.read() if answer.status == 206 or is_small else None


def read_ranges(ranges: Sequence[ByteRange]) -> list[bytes]:
    """Reads ranges of any files, in any order, with repeats and overlaps allowed.

    Raises:
      SourceError: if a file does not exist, or has changed; names it.
      OSError: if a range could not be read after all retries.
    """
    order = sorted(range(len(ranges)), key=lambda number: (ranges[number].file.url, *ranges[number][1:]))
    joined, slots = _join([ranges[number] for number in order])
    contents = _read_joined(joined)
    found = [b""] * len(ranges)
    for number, slot in zip(order, slots, strict=True):
        wanted, whole = ranges[number], joined[slot]
        found[number] = contents[slot][wanted.start - whole.start : wanted.stop - whole.start]
    return found


def digest_remote(file: RemoteBytes) -> str:
    """Returns the digest of a remote file as a manifest lists it: the store's MD5 if it has one; else reads the file."""
    known = file_paths.look_up(file.url, file.source).checksum
    if known is not None:
        return known
    digest = xxhash.xxh3_64()
    for start in range(0, file.num_bytes, _DIGEST_BYTES):
        digest.update(file.read(start, start + _DIGEST_BYTES))
    return f"xxh3_64:{digest.hexdigest()}"


def _join(ranges: Sequence[ByteRange]) -> tuple[list[ByteRange], list[int]]:
    """Joins sorted ranges that are close to each other; returns them, and which of them holds each range."""
    joined: list[ByteRange] = []
    slots = []
    for one in ranges:
        last = joined[-1] if joined else one
        stop = max(one.stop, last.stop)
        near = last.file.url == one.file.url and one.start <= last.stop + _GAP_BYTES
        if joined and near and stop - last.start <= max(_JOINED_BYTES, last.stop - last.start):
            joined[-1] = last._replace(stop=stop)
        else:
            joined.append(one)
        slots.append(len(joined) - 1)
    return joined, slots


def _read_joined(ranges: Sequence[ByteRange]) -> list[bytes]:
    found: list[bytes] = []
    stores: dict[str, Any] = {}

    def store_of(one: ByteRange) -> Any:
        # Not by protocol: abfs://container@account/… and ftp://host/… name what only a file system of its own reads.
        place = "/".join(one.file.url.split("/", 3)[:3])
        if place not in stores:
            stores[place] = _file_system(one.file.url, one.file.source)[0]
        return stores[place]

    while len(found) < len(ranges):
        wave, num_bytes = [], 0
        for one in ranges[len(found) :]:
            num_bytes += one.stop - one.start
            if wave and (num_bytes > _IN_FLIGHT_BYTES or store_of(one) is not store_of(wave[0])):
                break
            wave.append(one)
        found += _read_wave(wave)
    return found


def _read_wave(ranges: Sequence[ByteRange]) -> list[bytes]:
    """Reads ranges at the same time; reads those that fail again."""
    found: dict[int, bytes] = {number: b"" for number, one in enumerate(ranges) if one.start >= one.stop}
    failed: dict[int, Exception] = {}

    def attempt() -> None:
        todo = [number for number in range(len(ranges)) if number not in found]
        failed.clear()
        for number, answer in zip(todo, _request([ranges[number] for number in todo]), strict=True):
            if isinstance(answer, bytes):
                found[number] = answer
            else:
                failed[number] = answer
        for error in sorted(failed.values(), key=lambda error: not isinstance(error, MeshfeedError)):
            raise error

    doing = f"reading {len(ranges)} range{'s' * (len(ranges) != 1)} of {ranges[0].file.url}"
    try:
        call_with_retry(attempt, _RETRY, doing=doing, progress=lambda: len(found))
    except OSError:
        for number in failed:
            with contextlib.suppress(OSError):  # a file that changed may be why
                ranges[number].file.look_up()
        raise
    return [found[number] for number in range(len(ranges))]


def _request(ranges: Sequence[ByteRange]) -> list[bytes | Exception]:
    """Requests ranges at the same time; returns the bytes of each, or the error."""
    if not ranges:
        return []
    first = ranges[0].file
    files, _ = _file_system(first.url, first.source)
    paths = [_file_system(one.file.url, one.file.source)[1] for one in ranges]
    with file_paths.remote_errors(first.url, first.source):
        if files.async_impl:
            from fsspec.asyn import sync

            answers = cast("list[_Answer]", sync(files.loop, _gather, files, paths, ranges))
        else:
            starts, stops = [one.start for one in ranges], [one.stop for one in ranges]
            answers = [(found, {}) for found in files.cat_ranges(paths, starts, stops, on_error="return")]
    return [_checked(one, *answer) for one, answer in zip(ranges, answers, strict=True)]


def _checked(one: ByteRange, answer: bytes | Exception, headers: Mapping[str, str]) -> bytes | Exception:
    try:
        with file_paths.remote_errors(one.file.url, one.file.source):
            if isinstance(answer, Exception):
                raise answer
            one.file.check_answer(headers)
            check_range(headers, one.start, one.stop, one.file.url)
    except Exception as error:
        return error
    if len(answer) == one.file.num_bytes != one.stop - one.start:  # a server without range requests
        _warn_of_whole_files(one.file.url.partition("://")[2].partition("/")[0])
        answer = answer[one.start : one.stop]
    if len(answer) != one.stop - one.start:
        what = f"{len(answer):,} bytes came for the range [{one.start:,}, {one.stop:,})"
        return OSError(f"{one.file.source}: {without_signatures(one.file.url)}: {what}")
    return answer


@functools.cache
def _warn_of_whole_files(server: str) -> None:
    _log.warning(
        "%s answers requests for a range of bytes with the whole file, so that reading a footer or a few records transfers "
        "all of it. Serve the files with range requests, or copy them to a local disk",
        server,
    )


def check_range(headers: Mapping[str, str], start: int, stop: int, url: str) -> None:
    """Raises OSError if a proxy or a server answered with another range than ``[start, stop)``; a retry may help."""
    found = _CONTENT_RANGE.match(headers.get("content-range", ""))
    if found is not None and (int(found[1]), int(found[2]) + 1) != (start, stop):
        raise OSError(
            f"{without_signatures(url)}: bytes {int(found[1]):,} to {int(found[2]) + 1:,} came for the range "
            f"[{start:,}, {stop:,})"
        )


_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d{1,18})-(\d{1,18})/(\d{0,18})", re.IGNORECASE)
_Answer: TypeAlias = "tuple[bytes | Exception, Mapping[str, str]]"
"""The bytes of a range or the error, and the headers of the answer."""

_headers: contextvars.ContextVar[list[Mapping[str, str]]] = contextvars.ContextVar("headers")
"""Headers of the answers to the request of the current task; one answer, unless the client retries."""


def _note_headers(headers: Mapping[str, str]) -> None:
    noted = _headers.get(None)
    if noted is not None:
        noted.append(headers)


async def _gather(files: Any, paths: Sequence[str], ranges: Sequence[ByteRange]) -> list[_Answer]:
    """Requests ranges at the same time."""
    room = asyncio.Semaphore(_MAX_CONNECTIONS)
    seconds = _SILENT_SECONDS + sum(one.stop - one.start for one in ranges) / _LEAST_BYTES_PER_SECOND

    async def get(path: str, one: ByteRange) -> _Answer:
        noted: list[Mapping[str, str]] = [{}]
        _headers.set(noted)
        try:
            async with room:
                return await files._cat_file(path, start=one.start, end=one.stop), noted[-1]
        except TimeoutError as error:
            return _late(one, str(error) or "no answer in time"), noted[-1]
        except Exception as error:
            return error, noted[-1]

    if ranges[0].file.url.startswith(("s3://", "s3a://")):
        await _prepare_s3(files, paths)
    tasks = [asyncio.create_task(get(path, one)) for path, one in zip(paths, ranges, strict=True)]
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds)
    finally:
        for task in tasks:
            task.cancel()
    return [
        task.result() if task in done else (_late(one, f"no end after {seconds:.0f} s"), {})
        for task, one in zip(tasks, ranges, strict=True)
    ]


def _late(one: ByteRange, why: str) -> TimeoutError:
    what = f"bytes {one.start:,} to {one.stop:,} did not arrive: {why}"
    return TimeoutError(f"{one.file.source}: {without_signatures(one.file.url)}: {what}")


async def _prepare_s3(files: Any, paths: Sequence[str]) -> None:
    """Notes the headers of answers, and leaves retries to :func:`_read_wave`: a dead store would be tried 25 times."""
    files.retries = 1
    await files.set_session()
    for bucket in {path.partition("/")[0] for path in paths}:
        client = await files.get_s3(bucket)
        client.meta.events.register("after-call.s3.GetObject", _note_answer_of_s3, unique_id="meshfeed")


def _note_answer_of_s3(parsed: Mapping[str, Any], **_unused: object) -> None:
    _note_headers(parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {}))


@contextlib.contextmanager
def noted_headers() -> Iterator[list[Mapping[str, str]]]:
    """Yields a list to which the headers of answers of :func:`noting_file_system` are added."""
    noted: list[Mapping[str, str]] = []
    token = _headers.set(noted)
    try:
        yield noted
    finally:
        _headers.reset(token)


def noting_file_system(url: str, source: str) -> tuple[Any, str]:
    """Returns the default file system of a URL, which for HTTP notes the headers of answers; see :func:`noted_headers`."""
    if file_paths.is_http(url):
        return file_paths.open_file_system(url, source, get_client=_noting_client)
    return file_paths.open_file_system(url, source)


def _file_system(url: str, source: str) -> tuple[Any, str]:
    """Returns a file system that opens enough connections for the ranges of a batch, and notes the headers of answers."""
    protocol = url.partition("://")[0]
    # A file system of its own: other users of fsspec's keep their number of connections and their retries.
    if protocol in ("http", "https"):
        return file_paths.open_file_system(url, source, get_client=_http_client)
    if protocol in ("s3", "s3a"):
        options = {"max_pool_connections": _MAX_CONNECTIONS, **_configured(protocol, "config_kwargs")}
        return file_paths.open_file_system(url, source, config_kwargs=options)
    if protocol in ("gs", "gcs"):
        options = {**_session_options(), **_configured(protocol, "session_kwargs")}
        return file_paths.open_file_system(url, source, session_kwargs=options)
    return file_paths.open_file_system(url, source)


def _configured(protocol: str, setting: str) -> Mapping[str, Any]:
    import fsspec.config

    return fsspec.config.conf.get(protocol, {}).get(setting, {})


_IDENTITY = {"headers": {"Accept-Encoding": "identity"}}  # or the ETag may differ


async def _noting_client(**kwargs: Any) -> Any:
    import aiohttp

    # aiohttp's limit of five minutes for silence, not for a whole answer. Callers wait less for the next bytes.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=300)
    return aiohttp.ClientSession(**{**_IDENTITY, **_session_options(), "timeout": timeout, **kwargs})


async def _http_client(**kwargs: Any) -> Any:
    import aiohttp

    options = {**_IDENTITY, **_session_options(), **kwargs}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS), **options)


@functools.cache
def _session_options() -> dict[str, Any]:
    """Returns options of a session of aiohttp: notes the headers of answers, and gives up a silent connection."""
    import aiohttp

    async def note(_session: object, _context: object, params: Any) -> None:
        _note_headers(params.response.headers)

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(note)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
    return {"trace_configs": [trace], "timeout": timeout}


class SparseFile:
    """A file in memory, open as ``number``, that has some ranges of a remote one at their offsets, and zeros elsewhere."""

    def __init__(self, num_bytes: int) -> None:
        self.number = os.memfd_create("meshfeed")
        weakref.finalize(self, os.close, self.number).atexit = False
        os.ftruncate(self.number, num_bytes)
        self.status = os.fstat(self.number)

    def write(self, start: int, content: bytes) -> None:
        """Puts bytes at an offset."""
        write_at(self.number, start, content)


def write_at(handle: int, start: int, content: bytes) -> None:
    """Writes bytes at an offset of an open file."""
    view = memoryview(content)
    while len(view):  # a call writes 2 GiB at most
        written = os.pwrite(handle, view, start)
        view, start = view[written:], start + written


def sparse_files(
    files: Sequence[RemoteBytes], file_index: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> list[SparseFile]:
    """Returns files with the bytes ``[starts, stops)``, int64[n], of the files that ``file_index``, int64[n], refers to."""
    places = list(zip(file_index.tolist(), starts.tolist(), stops.tolist(), strict=True))
    contents = read_ranges([ByteRange(files[number], low, high) for number, low, high in places])
    copies = [SparseFile(file.num_bytes) for file in files]
    for (number, low, _), content in zip(places, contents, strict=True):
        copies[number].write(low, content)
    return copies
