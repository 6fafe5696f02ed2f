"""A path in a store: what code for folders needs of a URL, over :mod:`stores`; requests are repeated and bounded there.

Code that lists, reads, writes and removes through ``epath.Path`` works on a bucket unchanged. ``epath`` itself knows a few
stores, does not repeat requests, and has its clients cache listings.
"""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Iterator
from typing import IO, Any

from etils import epath
from etils.epath.stat_utils import StatResult

from meshfeed._src.base.errors import CheckpointError, MeshfeedError
from meshfeed._src.base.stores import abort_uploads, ask, find_objects, is_url, open_store
from meshfeed._src.base.threads import in_threads

_log = logging.getLogger("meshfeed.checkpoint")


def is_in_store(path: str | os.PathLike[str]) -> bool:
    """Whether :func:`make_path` returns a :class:`StorePath`: for all URLs but ``gs://``, where Orbax itself writes."""
    text = os.fspath(path)
    return is_url(text) and not text.startswith("gs://")


def make_path(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the path of a folder or URL: a :class:`StorePath`, or etils' own path."""
    if isinstance(path, epath.Path) and (isinstance(path, StorePath) or not is_in_store(path)):
        return path
    text = os.fspath(path)
    return StorePath(text) if is_in_store(text) else epath.Path(text.removeprefix("file://"))


def absolute_path(path: epath.Path) -> epath.Path:
    """Returns a local path without ``~`` and ``..``, which TensorStore does not take; the path of a store as it is."""
    if isinstance(path, StorePath) or "://" in str(path):
        return path
    text = os.path.expanduser(path)
    return epath.Path(os.path.realpath(text) if ".." in text.split(os.sep) else os.path.abspath(text))


def children(folder: epath.Path) -> list[epath.Path]:
    """Returns what is directly in a folder, or nothing if there is no such folder; one request in a store."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


@epath.register_path_cls
class StorePath(epath.Path):
    """The URL of an object, or of a folder: the objects whose names begin with the path and a slash.

    Folders exist while they have objects. There is no atomic rename.

    Raises:
      FileNotFoundError: a method that reads, if there is no such object.
      CheckpointError: any method, if the store refuses or does not answer.
    """

    def __str__(self) -> str:
        # Pure paths join slashes; a path relative to another has no scheme.
        text = super().__str__()
        scheme, colon, rest = text.partition(":/")
        return f"{scheme}://{rest}" if colon and "/" not in scheme and not rest.startswith("/") else text

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def _info(self) -> dict[str, Any] | None:
        try:
            return ask(str(self), "info")
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        """Whether there is such an object or folder."""
        return self._info() is not None

    def is_dir(self) -> bool:
        """Whether there are objects below."""
        return (self._info() or {}).get("type") == "directory"

    def is_file(self) -> bool:
        """Whether there is such an object."""
        return (self._info() or {}).get("type") == "file"

    def iterdir(self) -> Iterator[StorePath]:
        """Yields the objects and folders directly below, in no particular order."""
        _, own = open_store(str(self))
        names = {str(path).rstrip("/") for path in ask(str(self), "ls", detail=False)}
        yield from (self / posixpath.basename(name) for name in sorted(names - {own.rstrip("/")}))

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """Yields the objects and folders that match a pattern of fsspec's, in no particular order."""
        _, own = open_store(str(self))
        for path in ask(str(self / pattern), "glob"):
            yield self / str(path).removeprefix(own).strip("/")

    def sizes(self) -> dict[str, int]:
        """Returns the relative path of each object below → its size in bytes."""
        return {name: int(info["size"] or 0) for name, info in find_objects(str(self)).items() if name}

    def stat(self) -> StatResult:
        """Returns the size of an object."""
        info = ask(str(self), "info")
        return StatResult(is_directory=info["type"] == "directory", length=int(info["size"] or 0), mtime=0)

    def open(self, mode: str = "r", **_: object) -> IO[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Opens an object for reading."""
        file_system, path = open_store(str(self))
        return file_system.open(path, mode)

    def read_bytes(self) -> bytes:
        """Returns an object's content."""
        return ask(str(self), "cat_file")

    def read_text(self, encoding: str | None = None) -> str:
        """Returns an object's content as text."""
        return self.read_bytes().decode(encoding or "utf-8")

    def write_bytes(self, data: bytes) -> int:
        """Writes an object, atomically: others see all of it or none."""
        self._write("pipe_file", data, num_bytes=len(data))
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, errors: str | None = None) -> int:
        """Writes text as an object."""
        return self.write_bytes(data.encode(encoding or "utf-8", errors or "strict"))

    def upload(self, file: str | os.PathLike[str]) -> int:
        """Writes a local file as an object, and returns its size in bytes; large files are sent in parts."""
        size = os.stat(file).st_size
        self._write("put_file", os.fspath(file), num_bytes=size)
        return size

    def _write(self, method: str, *arguments: object, num_bytes: int) -> None:
        try:
            ask(str(self), method, *arguments, num_bytes=num_bytes)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self}: {error}. Create the bucket, or correct its name.") from error

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: an object creates the folders of its name."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes an object; one that does not exist is fine, as a repeated request has removed it before."""
        try:
            ask(str(self), "rm_file")
        except FileNotFoundError:
            pass

    def copy(self, dst: os.PathLike[str], overwrite: bool = False) -> StorePath:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Copies an object within the store, without downloading it."""
        target = StorePath(dst)
        ask(str(self), "cp_file", open_store(str(target))[1])
        return target

    def abort_uploads(self) -> None:
        """Removes uploads in parts that were never completed, of objects below, if the store lists them: S3 keeps them."""
        try:
            abort_uploads(str(self))
        except (MeshfeedError, OSError) as error:  # listing them is a permission of its own, and nothing depends on it
            _log.warning("uploads that were never completed, if any, are left in the store: %s", error)

    def rmtree(self, missing_ok: bool = False) -> None:
        """Removes all objects below."""
        in_threads(lambda name: (self / name).unlink(), list(self.sizes()))
