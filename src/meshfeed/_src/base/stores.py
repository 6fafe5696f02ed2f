"""Stores behind URLs, through fsspec: opens one with the usual credentials, repeats requests, explains what fails.

Whatever takes a URL for something other than the files of a source begins here: :func:`open_store` returns the file system,
:func:`ask` makes one request within a bounded time, :func:`store_errors` maps the errors of calls that are made directly.
fsspec and its clients find credentials themselves, in the usual environment variables and files. meshfeed neither takes nor
logs any: an error names the places, and whether each is set, never a value.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from meshfeed._src.base.errors import CheckpointError, MeshfeedError, SettingsError
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry, local_path


class RefusedError(CheckpointError):
    """A store refuses to answer, or does not answer: a checkpoint in it may be intact."""


class StoreError(OSError):
    """A request to a store failed in a way for which a retry may help."""


MakeError: TypeAlias = Callable[[str], MeshfeedError]
"""Makes the error for a message: the class for what is being done, such as SourceError or CheckpointError."""

ANSWER_SECONDS = 45.0
"""How long a small request may take in all, with its retries."""

MESSAGE_CHARACTERS = 300
"""Length to which clients' errors are cut: they may quote the bytes that they received."""

_ALIVE_SECONDS = 10.0
_LEAST_BYTES_PER_SECOND = 1 << 20  # allowed in addition for what a request transfers
_RETRY = Retry(attempts=20, initial_seconds=0.2, max_seconds=5.0, on=(StoreError,))
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # at least two letters: "C:/" is a drive
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")
_SIGNED = re.compile(r"\?[^\s'\"<>]*")  # the query of a URL, in which signatures are
_PACKAGES = {  # protocol → packages that provide it, including fsspec
    "abfs": "adlfs",
    "az": "adlfs",
    "gcs": "gcsfs",
    "gs": "gcsfs",
    "hf": "huggingface_hub fsspec",
    "http": "aiohttp fsspec",
    "https": "aiohttp fsspec",
    "s3": "s3fs",
}
_FAMILY = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az"}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": {"max_pool_connections": 32}}}  # 10 by default
# Keywords of a method, by family: s3fs would ask for an object's size before it reads it, to read parts of it at once.
_KEYWORDS: dict[tuple[str, str], dict[str, Any]] = {("s3", "cat_file"): {"max_concurrency": 1}}
# Where clients look for credentials: environment variables, then files as (variable with the path, default path).
_VARIABLES = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
    ),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "az": (
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_CLIENT_ID",
    ),
    "hf": ("HF_TOKEN",),
}
_FILES = {
    "s3": (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config")),
    "gs": (("", "~/.config/gcloud/application_default_credentials.json"),),
    "hf": (("HF_TOKEN_PATH", "~/.cache/huggingface/token"),),
}
_ELSEWHERE = {
    "s3": ["the metadata service of the machine"],
    "gs": ["the metadata service of the machine"],
    "az": ["the identity of the machine"],
}
_REFUSED = (  # names of clients' exceptions for credentials that are missing, incomplete or expired
    "ClientAuthenticationError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "RefreshError",
    "SSOTokenLoadError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
)
_UNREACHABLE = (  # names of clients' exceptions for stores that refuse connections, or do not answer
    "ClientConnectionError",
    "ConnectionError",
    "HTTPClientError",
    "ServiceRequestError",
    "ServiceResponseError",
    "TimeoutError",
    "TransportError",
)
_PERMANENT = (FileExistsError, IsADirectoryError, NotADirectoryError, NotImplementedError, TypeError, ValueError)
_MISSING_CREDENTIALS = ("Must provide either a connection_string",)  # what adlfs raises as a ValueError


def has_scheme(path: str) -> bool:
    """Whether ``path`` begins as a URL does."""
    return _URL.match(path) is not None


def is_url(path: str) -> bool:
    """Whether ``path`` is a URL that needs fsspec; ``file://`` does not."""
    return has_scheme(path) and not path.startswith("file://")


def _family(url: str) -> str:
    """Returns the protocol of a URL, the same for all aliases."""
    scheme = url.partition("://")[0]
    return _FAMILY.get(scheme, scheme)


def how_to_install(url: str) -> str:
    """Returns the instruction to install the packages for a URL, without a full stop."""
    package = _PACKAGES.get(url.partition("://")[0])
    return f"Run: pip install {package}" if package else "Install fsspec and the package that brings this protocol"


def credentials_looked_at(url: str) -> str:
    """Returns the sentence with the places where the client of a URL looks for credentials, and whether each is set."""
    family = _family(url)
    places = [f"{name} ({'set' if os.environ.get(name) else 'not set'})" for name in _VARIABLES.get(family, ())]
    for variable, default in _FILES.get(family, ()):
        path = os.path.expanduser(os.environ.get(variable) or default)
        places.append(f"{path} ({'exists' if os.path.exists(path) else 'does not exist'})")
    if not places:
        signed = "; a signed URL may have expired" if family in ("http", "https") else ""
        return f"Check the credentials{signed}."
    *before, last = [*places, *_ELSEWHERE.get(family, ())]
    return f"Looked for credentials in {', '.join(before)} and {last}. Set or renew one of them."


def open_store(url: str, error: MakeError = RefusedError) -> tuple[Any, str]:
    """Returns the fsspec file system of ``url``, which caches no listings, and the path within it.

    Raises:
      MeshfeedError: fsspec, or the package that it needs for this protocol, is not installed; the URL holds a password; or
        there are no credentials. Of the class that ``error`` makes, as in all functions here.
    """
    if _PASSWORD.search(url):
        shown = _PASSWORD.sub("://…@", url)
        raise error(
            f"{shown}: the URL holds a password, which logs would show. Leave it out: clients find credentials."
        )
    try:
        from fsspec.core import strip_protocol

        with store_errors(url, error):
            file_system = _file_system("/".join(url.split("/", 3)[:3]), _family(url), os.getpid())
    except ImportError as problem:
        raise error(f"{url}: {problem}. {how_to_install(url)}.") from problem
    return file_system, strip_protocol(url)


@functools.lru_cache(maxsize=64)
def _file_system(place: str, family: str, process: int) -> Any:
    # By place: a URL may name an account or a host before its path. By process: the event loop of a client does not survive
    # a fork.
    import fsspec

    try:
        kind = fsspec.get_filesystem_class(place.partition("://")[0])
    except ValueError as problem:  # an unknown protocol
        raise ImportError(str(problem)) from problem
    return kind(use_listings_cache=False, **kind._get_kwargs_from_urls(place), **_OPTIONS.get(family, {}))


def ask(
    url: str, method: str, *arguments: Any, error: MakeError = RefusedError, num_bytes: int = 0, **keywords: Any
) -> Any:
    """Calls a method of the file system of ``url`` with the path and ``arguments``, and again if a retry may help.

    Args:
      url: the object or folder.
      method: name of a method of fsspec that is safe to repeat, such as ``cat_file`` or ``pipe_file``.
      *arguments: what follows the path; of ``put_file``, the local path first.
      error: see :data:`MakeError`.
      num_bytes: bytes that the request transfers, for which it is allowed more time.
      **keywords: keywords of the method.

    Raises:
      FileNotFoundError: there is no such object, folder or bucket.
      MeshfeedError: credentials are missing or refused, or the store does not answer.
    """
    file_system, path = open_store(url, error)
    keywords = {**_KEYWORDS.get((_family(url), method), {}), **keywords}
    deadline = time.monotonic() + ANSWER_SECONDS + num_bytes / _LEAST_BYTES_PER_SECOND
    problems: list[StoreError] = []

    def attempt() -> Any:
        try:
            with store_errors(url, error):
                return _call(file_system, method, (path, *arguments), keywords, deadline - time.monotonic())
        except StoreError as problem:
            problems.append(problem)
            if time.monotonic() + _RETRY.max_seconds < deadline:
                raise
            # The last attempt may have been cut short, so an earlier error states the cause better.
            raise error(f"{problems[0]}. Check the network and that the store is up, then try again.") from problem

    try:
        return call_with_retry(attempt, _RETRY, doing=f"{method} of {url}")
    except StoreError as problem:
        raise error(f"{problem}. Check the network and that the store is up, then try again.") from problem


def find_objects(url: str, error: MakeError = RefusedError) -> dict[str, dict[str, Any]]:
    """Returns the objects below a folder: path relative to it → what the store reports; an object itself has the path "".

    Objects that stand for folders, which some stores list, are left out.

    Raises:
      MeshfeedError: see :func:`ask`.
    """
    own = open_store(url, error)[1].rstrip("/")
    try:
        found = ask(url, "find", error=error, detail=True)
    except FileNotFoundError:
        return {}
    return {
        str(path)[len(own) + 1 :]: info
        for path, info in found.items()
        if f"{path}/".startswith(f"{own}/") and info["type"] == "file" and not str(path).endswith("/")
    }


def write_output(setting: str, path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a small file for a user, such as a page: to a disk, or to a URL in one request. Text is stored as UTF-8.

    Raises:
      SettingsError: the store of a URL refuses it; names ``setting``.
      OSError: a local file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    text = os.fspath(path)
    if not is_url(text):
        local_path(setting, text).write_bytes(data)
        return
    try:
        ask(text, "pipe_file", data, error=functools.partial(SettingsError, setting=setting), num_bytes=len(data))
    except (FileNotFoundError, NotImplementedError) as error:
        raise SettingsError(
            f"{setting}={text!r} cannot be written: {error}. Create the bucket, or name another URL or a local path.",
            setting=setting,
        ) from error


def abort_uploads(url: str, error: MakeError = RefusedError) -> int:
    """Aborts uploads in parts that killed processes have begun below a folder; returns their number.

    S3 keeps and bills their parts, and only lists them here. Other stores drop them by themselves.

    Raises:
      MeshfeedError, StoreError: they cannot be listed, which takes a right of its own.
      FileNotFoundError: there is no such bucket.
    """
    file_system, path = open_store(url, error)
    if not hasattr(file_system, "list_multipart_uploads"):
        return 0
    bucket, key, _ = file_system.split_path(path)
    asked: dict[str, str] = {"Bucket": bucket, "Prefix": f"{key.rstrip('/')}/"}
    aborted = 0
    with store_errors(url, error):
        while True:
            found = _call(file_system, "call_s3", ("list_multipart_uploads",), asked, ANSWER_SECONDS)
            for upload in found.get("Uploads", ()):
                ids = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                with contextlib.suppress(FileNotFoundError):  # it has been completed or aborted meanwhile
                    _call(file_system, "call_s3", ("abort_multipart_upload",), ids, ANSWER_SECONDS)
                aborted += 1
            if not found.get("IsTruncated"):
                return aborted
            asked |= {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}


def _call(file_system: Any, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any], seconds: float) -> Any:
    if method == "put_file":  # the only one whose first argument is the local path
        arguments = (*arguments[1:2], arguments[0], *arguments[2:])
    call = getattr(file_system, f"_{method}", None) if getattr(file_system, "async_impl", False) else None
    if call is None:
        return getattr(file_system, method)(*arguments, **keywords)
    from fsspec.asyn import sync

    return sync(file_system.loop, call, *arguments, timeout=max(1.0, seconds), **keywords)


def call_while_alive(file_system: Any, method: str, path: str, deadline: float, **options: object) -> Any:
    """Calls a method of a file system, from ``deadline`` on only for as long as the store answers other requests.

    A listing may take minutes, but clients repeat requests to a store that is down for minutes too. If the file system has no
    event loop, the call is not limited.

    Raises:
      TimeoutError: the store answers no request.
      Exception: that of the call.
    """
    if not (getattr(file_system, "async_impl", False) and hasattr(file_system, f"_{method}")):
        return getattr(file_system, method)(path, **options)
    call = asyncio.run_coroutine_threadsafe(getattr(file_system, f"_{method}")(path, **options), file_system.loop)
    try:
        while not concurrent.futures.wait([call], max(0.0, deadline - time.monotonic())).done:
            if not _is_alive(file_system, path):
                raise TimeoutError("no answer in time")
            deadline = time.monotonic() + ANSWER_SECONDS
        return call.result()
    finally:
        call.cancel()


def _is_alive(file_system: Any, path: str) -> bool:
    """Whether a store answers a small request, be it with an error."""
    folder = re.split(r"[*?\[]", path)[0].rpartition("/")[0] or path
    call = asyncio.run_coroutine_threadsafe(file_system._info(folder), file_system.loop)
    try:
        call.result(_ALIVE_SECONDS)
    except Exception as problem:
        return not is_unreachable(problem)
    finally:
        call.cancel()
    return True


@contextlib.contextmanager
def store_errors(url: str, error: MakeError = RefusedError) -> Iterator[None]:
    """Maps exceptions of fsspec and its clients; all messages name the URL.

    Raises:
      FileNotFoundError: as it is.
      MeshfeedError: credentials are missing or refused, and the message names the places that were looked at; or the store
        cannot do what is asked.
      StoreError: for any other error; a retry may help.
    """
    try:
        yield
    except (MeshfeedError, FileNotFoundError, ImportError):
        raise
    except Exception as problem:  # for example, botocore's connection errors are not OSError
        text = _SIGNED.sub("?…", str(problem))[:MESSAGE_CHARACTERS]
        text = text or ("no answer in time" if isinstance(problem, TimeoutError) else "no reason given")
        what = f"{url}: {type(problem).__name__}: {text}"
        if is_refused(problem):
            raise error(f"{what.rstrip('.')}. {credentials_looked_at(url)}") from problem
        if isinstance(problem, _PERMANENT):
            raise error(f"{what.rstrip('.')}.") from problem
        raise StoreError(what.rstrip(".")) from problem


def is_refused(problem: BaseException) -> bool:
    """Whether the exception of a client is about credentials: missing, incomplete, expired or without the right."""
    names = {kind.__name__ for kind in type(problem).__mro__}
    return (
        isinstance(problem, PermissionError)
        or _status_of(problem) in (401, 403)
        or not names.isdisjoint(_REFUSED)
        or str(problem).startswith(_MISSING_CREDENTIALS)
    )


def is_unreachable(problem: BaseException) -> bool:
    """Whether the exception of a client, or one that caused it, is that of a store that is down, busy or out of reach."""
    found: BaseException | None = problem
    while found is not None:
        status = _status_of(found) or _status_of(getattr(found, "response", None))  # that of Hugging Face's client
        if status is not None:
            return status >= 500 or status in (408, 429)
        if not {kind.__name__ for kind in type(found).__mro__}.isdisjoint(_UNREACHABLE):
            return True
        found = found.__cause__
    return False


def _status_of(problem: object) -> int | None:
    """Returns the HTTP status of the answer that an exception of a client describes."""
    response: object = getattr(problem, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, Mapping) else {}  # of botocore
    if status := metadata.get("HTTPStatusCode"):
        return status
    # One by one, since some are deprecated.
    found = (str(getattr(problem, name, "")) for name in ("status", "status_code", "code"))  # some are text
    return next((int(value) for value in found if value.isdecimal() and int(value)), None)
