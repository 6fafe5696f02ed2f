"""Paths, globs and URLs of a source's files, their sizes and their combined identity.

URLs are read with fsspec: ``s3://…``, ``gs://…``, ``https://…``, ``memory://…``. fsspec is imported only if there are
any. Functions that ask a store raise SourceError if the file does not exist, is not readable, or a package is missing, and
OSError if the store does not answer; see :func:`remote_errors`. Their ``source`` is the name of the source, for errors.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import errno
import glob
import io
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import xxhash

from meshfeed._src.base.errors import MeshfeedError, SourceError, without_signatures
from meshfeed._src.base.retry import call_with_retry, count_attempts
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.stores import (
    MESSAGE_CHARACTERS,
    call_while_alive,
    credentials_looked_at,
    has_scheme,
    how_to_install,
    is_refused,
    is_unreachable,
    is_url,
)
from meshfeed._src.base.threads import in_threads
from meshfeed._src.base.types import JsonValue

Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

_log = logging.getLogger("meshfeed.sources")
_BRACES = re.compile(r"\{([^{}]*)\}")
_MAGIC = re.compile(r"[*?\[]")
_ESCAPED = re.compile(r"\[([*?[])\]")  # by glob.escape
_MERGED_SLASHES = re.compile(r"^([a-z][a-z0-9+.-]+):/(?!/)")
_HTTP_QUERY = re.compile(r"\?[^?]*=.*", re.DOTALL)  # and not the ? of a pattern such as part-?.bin
_PART = re.compile(r"\.[0-9a-f]{16}\.part\Z")  # of indexes and manifests
_SIGNED = re.compile(r"^https?://.*[?&](X-Amz-Signature|X-Goog-Signature|Signature|sig)=", re.IGNORECASE)
_SIGNING = re.compile(  # parameters of S3, Google, CloudFront and Azure
    "(X-Amz-.*|X-Goog-.*|Signature|Expires|Policy|Key-Pair-Id|AWSAccessKeyId|GoogleAccessId|"
    "sig|s[eiprstv]|srt|spr|sip|sdd|ses|scid|sk[estv]|(sko|skt|sao|suo)id)=",
    re.IGNORECASE,
)
_RETRY = Retry()
ONCE = Retry(attempts=1)
# With the 10 s in which a store may answer another request, and the import of its client, less than a minute.
_ANSWER_SECONDS = 35.0

# Fields of fsspec's info() that identify the version of an object; their names differ between file systems.
_VERSION_FIELDS = (
    "generation",  # before the ETag of Google, which changes with the metadata too
    "ETag",
    "etag",
    "md5Hash",
    "crc32c",
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "created",
    "blob_id",  # of Hugging Face
    "modify",  # of FTP
    "modificationTime",  # of WebHDFS
)


def is_inside(name: object) -> bool:
    """Whether a name from a file or a server is that of a file in a folder, or in a folder of it: not ``../x``, ``/x``."""
    return (
        isinstance(name, str)
        and bool(name)
        and "\0" not in name
        and not has_scheme(name)
        and not os.path.isabs(name)
        and ".." not in name.split("/")
    )


def absolute(path: str) -> str:
    """Returns the absolute form of a local path; a URL as it is."""
    return path if is_url(path) else os.path.abspath(os.path.expanduser(path.removeprefix("file://")))


def split(path: str) -> tuple[str, str]:
    """Returns the folder of a path or URL, with its last slash, and the base name, without the query of a URL of HTTP."""
    folder, slash, base = without_query(path).rpartition("/")
    return folder + slash, base


def is_http(path: str) -> bool:
    """Whether a path is a URL of an HTTP server."""
    return path.startswith(("http://", "https://"))


def without_query(path: str) -> str:
    """Returns a URL of HTTP without its query, such as a signature; any other path or URL as it is."""
    return path.partition("?")[0] if is_http(path) else path


def without_signature(path: str) -> str:
    """Returns a signed URL without its query; any other path or URL as it is."""
    return without_query(path) if _SIGNED.search(path) else path


def without_signing(path: str) -> str:
    """Returns a signed URL without the parameters that sign it; others may be what distinguishes two files."""
    if not _SIGNED.search(path):
        return path
    bare, _, query = path.partition("?")
    kept = "&".join(part for part in query.split("&") if not _SIGNING.match(part))
    return f"{bare}?{kept}" if kept else bare


def without_part(path: str) -> str:
    """Returns the name under which a file that is being written, or that a killed process left, would be complete."""
    return _PART.sub("", path)


def format_name(path: str) -> str:
    """Returns the part of a path or URL whose end says which format the file has: of HTTP, that before the query.

    A URL such as ``https://host/get?name=a.csv`` has it in the query.
    """
    bare = without_query(path)
    return bare if "." in bare.rpartition("/")[2] else path


def as_list(paths: Paths) -> list[str | os.PathLike[str]]:
    """Returns what a user passed for the files as a list, whose items are not checked."""
    if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable):
        return [paths]
    return [cast("str", paths)] if isinstance(paths, io.IOBase) else list(paths)  # an open file iterates over its lines


def expand_paths(paths: Paths, *, source: str) -> list[str]:
    """Expands a path, a glob, a URL, or a list of them to files.

    The files of a glob are sorted by name; a list keeps its order.

    Returns:
      Absolute local paths and URLs.

    Raises:
      SourceError: if nothing is given, a glob matches no file, a file is missing, or a path is a folder; names it.
    """
    given = as_list(paths)
    if not given:
        raise SourceError(f"{source} got an empty list of files. Expected at least one path, glob or URL.")
    for path in given:
        if not isinstance(path, str | os.PathLike):
            opened = " Pass the name of the file, not the open file." if isinstance(path, io.IOBase) else ""
            raise SourceError(
                f"{source} got {path!r} for its files. Expected a path, a glob, a URL, or a list of them.{opened}"
            )
    _forget_listings({os.fspath(path) for path in given}, source)
    names = [name for path in given for name in _expand_braces(os.fspath(path), source)]
    found = in_threads(lambda name: _expand_url(name, source) if is_url(name) else _expand_local(name, source), names)
    files = [path for group in found for path in group]
    if any(_MAGIC.search(name) for name in names):  # a name that is listed twice as it stands is meant to be read twice
        again = next((path for path, count in collections.Counter(files).items() if count > 1), None)
        if again is not None:
            _log.warning(
                "%s: %s matches several of the paths, so its records come several times in an epoch. Name each file once.",
                source,
                without_signatures(again),
            )
    return files


def _forget_listings(names: Iterable[str], source: str) -> None:
    """Drops what clients know of folders: files may have come or gone since another source of this process listed them."""
    stores = {tuple(name.split("/", 3)[:3]): name for name in names if is_url(name)}
    for name in stores.values():
        open_file_system(name, source)[0].invalidate_cache()


def _expand_braces(name: str, source: str, start: int = 0) -> list[str]:
    """Expands ``{000..127}`` and ``{a,b}`` from ``start`` on as a shell does, except in a file or folder that exists."""
    first = next((braces for braces in _BRACES.finditer(name, start) if _alternatives(braces[1])), None)
    if first is None:
        return [name]
    literal = name[: first.end()] + name[first.end() :].partition("/")[0]  # up to the file or folder with the braces
    if exists(literal, source=source) if is_url(name) else os.path.lexists(_ESCAPED.sub(r"\1", literal)):
        return _expand_braces(name, source, len(literal))
    texts = [name[:start]]
    for number, part in enumerate(_BRACES.split(name[start:])):  # text, content of braces, text, …
        parts = (_alternatives(part) or [f"{{{part}}}"]) if number % 2 else [part]
        texts = [text + part for text in texts for part in parts]
    return texts


def _alternatives(content: str) -> list[str]:
    """Returns what braces with ``content`` stand for; nothing if they stand for themselves."""
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", content)
    if ends is None:
        return content.split(",") if "," in content else []
    padded = any(end[0] == "0" and len(end) > 1 for end in ends.groups())
    width = max(map(len, ends.groups())) if padded else 0
    return [f"{number:0{width}}" for number in range(int(ends[1]), int(ends[2]) + 1)]


def _expand_local(name: str, source: str) -> list[str]:
    path = absolute(name)
    if os.path.isfile(path):  # before globbing: a file name may contain brackets
        return [path]
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            ends = collections.Counter(os.path.splitext(entry.name)[1] for entry in entries if entry.is_file())
        own = f".{source.lower()}"  # of Parquet and ArrayRecord
        usual = max(ends, key=lambda end: (end.replace("_", "") == own, ends[end]), default=None)
        example = os.path.join(name, "**/*" if usual is None else f"*{usual}")
        raise SourceError(
            f"{source} got the folder {name!r}. Expected files. Name them with a glob such as {example!r}."
        )
    if not _MAGIC.search(path):
        check_permission(path, name, source)
        what = f"{_sought(name, path)} is a link that leads to no file" if os.path.islink(path) else None
        raise SourceError(f"{source}: {what or f'there is no file {_sought(name, path)}'}. {_advice(name, 'path')}")
    found = sorted(set(_glob(_with_literal_brackets(path))))
    files = [match for match in found if os.path.isfile(match)]
    dangling = next((match for match in found if os.path.islink(match) and not os.path.exists(match)), None)
    if dangling is not None:  # or its records would be missing without a word
        raise SourceError(
            f"{source}: {dangling!r}, which matches {name!r}, is a link that leads to no file. Mend or remove the link."
        )
    if not files:
        check_permission(path, name, source)
        raise SourceError(f"{source}: no file matches {_sought(name, path)}. {_advice(name, 'pattern and the folder')}")
    return files


def check_permission(path: str, name: str, source: str) -> None:
    """Raises SourceError if the folder in which a path or pattern would be cannot be looked into: its files look absent."""
    folder = os.path.dirname(path)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.access(folder, os.X_OK | (os.R_OK if _MAGIC.search(path) else 0), effective_ids=True):
        raise SourceError(
            f"{source}: no permission to look into the folder {folder} for {name!r}. Check the user of this process and the "
            "permissions of the folder."
        )


def _with_literal_brackets(pattern: str) -> str:
    """Returns a pattern in which the brackets of folders that exist under that name stand for themselves."""
    parts = pattern.split(os.sep)
    escaped = list(parts)
    for number, part in enumerate(parts[:-1]):
        if "[" in part and os.path.isdir(os.sep.join(parts[: number + 1])):
            escaped[number] = glob.escape(part)
        elif _MAGIC.search(part):
            break
    return os.sep.join(escaped)


def _glob(pattern: str) -> Iterator[str]:
    """Yields what matches a pattern; ``**`` follows links to folders, except to one that contains the link."""
    if pattern.endswith(f"{os.sep}**"):
        pattern = os.path.join(pattern, "*")
    head, recursive, tail = pattern.partition(f"{os.sep}**{os.sep}")
    if not recursive:
        yield from glob.iglob(pattern, recursive=True)
        return
    for folder in glob.iglob(head or os.sep):
        for below in _folders(folder, frozenset()):
            yield from _glob(os.path.join(glob.escape(below), tail))


def _folders(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yields a folder and those below it that are not hidden; ``above`` identifies the folders that contain it."""
    try:
        status = os.stat(folder)
        here = (status.st_dev, status.st_ino)
        if here in above:
            return
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name[0] != "." and is_folder(entry))
    except OSError:  # no folder, or not readable: as in glob, it matches nothing
        return
    yield folder
    for name in names:
        yield from _folders(os.path.join(folder, name), above | {here})


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one; ``is_dir()`` raises for a link to itself."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _sought(name: str, path: str) -> str:
    return repr(name) if name == path else f"{name!r} (looked for {path})"


def _advice(name: str, to_check: str) -> str:
    url = _MERGED_SLASHES.sub(r"\1://", name)
    if url == name:
        return f"Check the {to_check}."
    return f"Pass the URL as text, {url!r}: pathlib merges slashes."


def _expand_url(name: str, source: str) -> list[str]:
    file_system, path = open_file_system(name, source)
    if not _MAGIC.search(_HTTP_QUERY.sub("", path) if is_http(name) else path):
        return [name]  # without a request: a missing file is found when it is looked at
    if "*" not in path and exists(name, source=source):
        return [name]  # an object whose name has such characters

    def matching(pattern: str) -> list[str]:
        if is_http(name):
            return sorted(_matching_http(pattern, name, source))
        found = _ask(name, source, "glob", path=pattern, doing="listing", detail=True)
        return sorted(str(file) for file, info in found.items() if info.get("type") != "directory")

    # As in local paths: the brackets of a folder may stand for themselves.
    files = matching(path) or ("[" in path and matching(path.replace("[", "[[]"))) or []
    root = len(_MAGIC.split(path)[0].rpartition("/")[0])
    if "/." not in path[root:]:  # as on a disk, where it also matches nothing in hidden folders
        files = [file for file in files if "/." not in file[root:]]
    if not files:
        raise SourceError(f"{source}: no file matches {name!r}. Check the pattern and the bucket.")
    return [url_of(match, file_system, name, path) for match in files]


def url_of(found: str, file_system: Any, url: str, path: str) -> str:
    """Returns the URL of the path ``found`` in the file system of ``url``, whose path there is ``path``."""
    named = file_system.unstrip_protocol(found)
    if file_system._get_kwargs_from_urls(named) == file_system._get_kwargs_from_urls(url):
        return named
    # The URL names an account or a host before its path, as in abfs://container@account/…, which clients leave out.
    url, path = url.rstrip("/"), path.rstrip("/")
    same = len(os.path.commonprefix([url[::-1], path[::-1]]))  # noqa: RUF071 (of characters)
    return url[: len(url) - same] + found[len(path) - same :]


def _matching_http(pattern: str, name: str, source: str) -> Iterator[str]:
    """Yields what matches a pattern on an HTTP server; the client's own glob leaves out folders that it cannot list."""
    from fsspec.utils import glob_translate

    parts = pattern.split("/")
    first = next(number for number, part in enumerate(parts) if _MAGIC.search(part))
    root = "/".join(parts[:first])
    is_match, folders, level = re.compile(glob_translate(pattern)).match, [root], first
    while folders:
        level += 1
        below: list[str] = []
        may_contain = re.compile(glob_translate("/".join(parts[:level]))).match
        for listed in in_threads(lambda folder: _list_http(folder, root, name, source), folders):
            for found, is_directory in listed:
                if is_match(found) and not is_directory:
                    yield found
                if is_directory and ("**" in pattern or (level < len(parts) and may_contain(found))):
                    below.append(found)
        folders = below


def _list_http(folder: str, root: str, name: str, source: str) -> list[tuple[str, bool]]:
    """Returns what is in a folder of an HTTP server, and which of it are folders; nothing if there is no ``root``."""
    try:
        listed = _ask(name, source, "ls", path=folder, doing="listing")
    except SourceError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        if folder == root:
            return []
        raise SourceError(
            f"{source}: {name!r} cannot be expanded: the server lists the folder {folder}, but has no such folder."
        ) from error
    found = [(str(item["name"]).rstrip("/"), item["type"] == "directory") for item in listed]
    # Some pages list themselves, in other orders: "?C=M;O=D".
    return [one for one in found if one[0].startswith(f"{folder}/") and not one[0].startswith(f"{folder}/?")]


def exists(url: str, *, source: str) -> bool:
    """Whether there is an object or a folder at a URL."""
    if not is_http(url) and open_file_system(url, source)[0].async_impl:
        return _ask(url, source, "exists", doing="looking up")
    try:  # "exists" of the clients of HTTP, Hugging Face, FTP and SFTP takes any error for a missing file
        _ask(url, source, "info", doing="looking up")
    except SourceError as error:
        if isinstance(error.__cause__, FileNotFoundError):  # or refused, as some stores answer for a missing object
            return False
        raise
    return True


def _ask(
    url: str,
    source: str,
    method: str,
    *,
    doing: str,
    path: str | None = None,
    retry: Retry | None = None,
    fresh: bool = False,
    **options: object,
) -> Any:
    """Calls a method of the file system of a URL that is safe to repeat, with retries.

    A store that does not answer is given 35 s in all: clients repeat each request themselves for about as long,
    and retries would multiply that. If ``retry`` is not the default, it decides instead, and each attempt has that time.

    ``path`` is the argument, if it is not the path of the URL; ``fresh`` ignores cached listings. The error of a store that
    is out of reach names how long it was tried.
    """
    file_system, inner = open_file_system(url, source)
    begun, retry = time.monotonic(), _RETRY if retry is None else retry
    until = begun + _ANSWER_SECONDS if retry == Retry() else None
    problems: list[OSError] = []

    def attempt() -> Any:
        try:
            with remote_errors(url, source):
                if fresh:
                    forget(file_system, inner)
                deadline = time.monotonic() + _ANSWER_SECONDS if until is None else until
                return call_while_alive(file_system, method, inner if path is None else path, deadline, **options)
        except OSError as problem:
            problems.append(problem)
            raise

    try:
        return call_with_retry(attempt, retry, doing=f"{doing} {url}", until=until)
    except OSError as problem:
        if not is_unreachable(problem):
            raise
        raise _out_of_reach(problems, time.monotonic() - begun) from problem


def forget(file_system: Any, path: str) -> None:
    """Has a client forget what it has listed of a file, also in the listing of its folder, which that of Azure would keep."""
    file_system.invalidate_cache(path)
    file_system.invalidate_cache(path.rstrip("/").rpartition("/")[0])


def _out_of_reach(problems: Sequence[OSError], seconds: float) -> OSError:
    """Returns the error for a store that did not answer any of several attempts."""
    # The last attempt may have been cut short, so the first error states the cause better.
    tried = f"{len(problems)} attempt{'s' * (len(problems) > 1)} in {seconds:.0f} s"
    error = (TimeoutError if isinstance(problems[0], TimeoutError) else OSError)(
        f"{str(problems[0]).rstrip('.')} ({tried}). Check the URL, the network, the endpoint and that the store is up."
    )
    count_attempts(error, problems[-1])
    return error


def check_url(url: str, *, source: str) -> None:
    """Raises SourceError if a URL is a folder, or there is no file."""
    if file_info(url, source).get("type") == "directory":
        raise SourceError(
            f"{source} got the folder {url!r}. Expected files. Name them with a glob such as {url.rstrip('/')}/*."
        )


def open_file_system(url: str, source: str, **options: object) -> tuple[Any, str]:
    """Returns the fsspec file system of ``url`` and the path within it; ``options`` are those of its class."""
    try:
        import fsspec.core
    except ImportError as error:
        raise SourceError(f"{source} got the URL {url!r}, which needs fsspec. {how_to_install(url)}.") from error
    try:
        return fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise SourceError(
            f"{source} got the URL {url!r}, which fsspec cannot open: {error}. {how_to_install(url)}, or copy the files "
            "to a local disk."
        ) from error


def file_info(url: str, source: str, retry: Retry | None = ONCE, *, fresh: bool = False) -> dict[str, Any]:
    """Returns what the store of a URL reports about the file: fsspec's ``info()``; with ``fresh``, not from a cached listing.

    ``retry`` is None for the usual attempts.
    """
    return _ask(url, source, "info", doing="looking up", retry=retry, fresh=fresh)


def look_up(url: str, source: str, retry: Retry | None = None) -> StoredFile:
    """Returns the size, version and checksum of a remote file; raises SourceError if the server does not report its size."""
    info = file_info(url, source, retry)
    if info.get("size") is None:
        raise SourceError(
            f"{source}: the server of {url!r} does not report the file's size, so no read can be checked. Copy the file to a "
            "local disk."
        )
    return stored_file(info)


class StoredFile(NamedTuple):
    """What a store reports of a file: its size, its version (see :func:`version_of`), and its checksum if it has one.

    The checksum is an MD5. ETags of S3 are not, for encrypted or multipart objects.
    """

    num_bytes: int
    version: str
    checksum: str | None = None


def stored_file(info: Mapping[str, Any]) -> StoredFile:
    """Returns what a :func:`file_info` with a size reports."""
    digest = info.get("md5Hash") or (info.get("content_settings") or {}).get("content_md5")
    decoded = base64.b64decode(digest) if isinstance(digest, str) else bytes(digest or b"")
    return StoredFile(int(info["size"]), version_of(info), f"md5:{decoded.hex()}" if digest else None)


def version_of(info: Mapping[str, object]) -> str:
    """Returns the version of an object from its :func:`file_info`; an empty string if the store reports none."""
    # Servers that may compress answers mark the same ETag as weak.
    return next((f"{field}={str(info[field]).removeprefix('W/')}" for field in _VERSION_FIELDS if info.get(field)), "")


@contextlib.contextmanager
def remote_errors(url: str, source: str) -> Iterator[None]:
    """Maps exceptions of fsspec and its clients to those of meshfeed.

    Raises:
      SourceError: if the file does not exist or is not readable; a retry does not help.
      OSError: for any other error; a retry may help.
    """
    shown = without_signatures(url)
    try:
        yield
    except MeshfeedError:
        raise
    except FileNotFoundError as error:
        cause = error.__cause__  # fsspec's HTTP client reports an unreachable server as a missing file
        if cause is not None and is_refused(cause):
            raise SourceError(
                f"{source}: no permission to read {shown!r}: {_said(cause)}. {credentials_looked_at(url)}"
            ) from error
        if type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", None) not in (404, 410):
            what = without_signatures(f"{url}: {type(cause).__name__}: {cause}")
            raise _with_details(OSError(f"{source}: {what}"), cause) from error
        raise SourceError(f"{source}: there is no file {shown!r}. Check the URL and the credentials.") from error
    except Exception as error:  # for example, botocore's connection errors are not OSError
        text = without_signatures(str(error)[:MESSAGE_CHARACTERS])
        if is_refused(error):
            raise SourceError(
                f"{source}: no permission to read {shown!r}: {_said(error)}. {credentials_looked_at(url)}"
            ) from error
        if isinstance(error, OSError) and (url in text or error.errno in (errno.ENOSPC, errno.EDQUOT)):
            raise
        kind = TimeoutError if isinstance(error, TimeoutError) else OSError
        what = f"{type(error).__name__}: {text or 'no answer in time'}"
        raise _with_details(kind(f"{source}: {shown}: {what}"), error) from error


def _said(error: BaseException) -> str:
    return without_signatures(str(error)[:MESSAGE_CHARACTERS]).rstrip(".")


def _with_details(mapped: OSError, error: BaseException | None) -> OSError:
    """Adds the error number, and the pause that a server requested (``Retry-After``), in seconds, for the next attempt."""
    mapped.errno = error.errno if isinstance(error, OSError) else None
    headers: object = getattr(error, "headers", None)
    pause = headers.get("Retry-After", "") if isinstance(headers, Mapping) else ""
    if pause.isdecimal():  # a date is left to the backoff
        mapped.retry_after_seconds = int(pause)  # type: ignore[attr-defined]
    return mapped


def changed(what: str, change: str, manifest: str = "") -> SourceError:
    """Returns the error for a file that is no longer the one that the source, or a ``manifest`` (its path), was made with."""
    since, remedy = "the source was made", "Build the source again"
    if manifest:
        since, remedy = f"the manifest {manifest} was written", "Write the manifest again with `meshfeed manifest`"
    return SourceError(f"{what} has changed since {since}: {change}. {remedy}.")


def describe_change(then: tuple[int | None, str], now: tuple[int | None, str]) -> str:
    """Returns what a remote file was and what it is now: size in bytes and version (see :func:`version_of`) of each."""
    was, found = (
        " ".join([*([] if size is None else [f"{size:,} bytes"]), f"({version or 'no version'})"])
        for size, version in (then, now)
    )
    return f"{was} then, {found} now"


def read_file(path: str, *, source: str) -> bytes:
    """Reads a small local or remote file."""
    if not is_url(path):
        with open(path, "rb") as file:
            return file.read()
    return _ask(path, source, "cat_file", doing="reading")


def file_sizes(paths: Sequence[str], *, source: str) -> list[int]:
    """Returns the size of each local or remote file in bytes."""
    return in_threads(lambda path: look_up(path, source).num_bytes if is_url(path) else os.stat(path).st_size, paths)


def name_bytes(text: str) -> bytes:
    """Returns the UTF-8 of text that has names of files in it; those that are not UTF-8 are the bytes that they are."""
    return text.encode("utf-8", "surrogateescape")


def check_name(path: str, library: str) -> None:
    """Raises SourceError if a library that takes names as UTF-8 cannot open a file."""
    if not path.isascii() and name_bytes(path).decode("utf-8", "replace") != path:
        raise SourceError(
            f"{path!r}: {library} opens no file whose name is not UTF-8. Rename it, or read it through a link with another "
            "name."
        )


def identify_files(paths: Sequence[str], sizes: Sequence[int]) -> JsonValue:
    """Returns the identity of a list of files: count, bytes, and a digest of base names and sizes in order.

    Folder names are not included: moving the folder does not change the identity. Nor is the signature of a URL.
    """
    digest = xxhash.xxh3_64()
    for path, size in zip(paths, sizes, strict=True):
        name = without_signature(path).rstrip("/").replace(os.sep, "/").rsplit("/", 1)[-1]
        digest.update(name_bytes(f"{len(name)}:{name}:{size};"))
    return {"count": len(paths), "bytes": int(sum(sizes)), "digest": digest.hexdigest()}
