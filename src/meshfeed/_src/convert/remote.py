"""Inputs that are URLs: what is stored there, and copies of it for the time of the conversion.

Both passes read an input, the second one from places in its middle, and libraries of some formats read local files only.
Each input is therefore downloaded once, in blocks that are retried on their own, into the folder of the job.
"""

from __future__ import annotations

import os
import pathlib
import urllib.parse
from typing import NamedTuple

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.settings import Retry
from meshfeed._src.sources.files.download import Download, Downloads
from meshfeed._src.sources.files.paths import file_info, open_file_system, remote_errors, version_of

_TIMEOUT_SECONDS = 30.0


class RemoteInput(NamedTuple):
    """A file at a URL.

    Attributes:
      url: its URL.
      num_bytes: its size.
      version: see :func:`meshfeed._src.sources.files.paths.version_of`.
    """

    url: str
    num_bytes: int
    version: str


def path_of(name: str) -> str:
    """Returns the path of a URL, without a query such as a signature; a local path as it is."""
    return urllib.parse.urlsplit(name).path if name.startswith(("http://", "https://")) else name


def remote_files(url: str) -> dict[str, RemoteInput]:
    """Returns the files of a folder by their path in it, in order; a file is the only one, without a name.

    Raises:
      SourceError: there is no such file or folder, or the server does not report a size; names it.
      OSError: the store does not answer.
    """
    info = file_info(url, "convert", fresh=True)
    if info.get("type") != "directory":
        return {"": _remote_input(url, info)}
    file_system, folder = open_file_system(url, "convert")
    with remote_errors(url, "convert"):
        found = file_system.find(folder, detail=True)
    start = len(folder.rstrip("/")) + 1
    return {
        path[start:]: _remote_input(file_system.unstrip_protocol(path), found[path]) for path in sorted(map(str, found))
    }


def _remote_input(url: str, info: dict[str, object]) -> RemoteInput:
    size = info.get("size")
    if not isinstance(size, int):
        raise SourceError(f"convert: the server does not report the size of {url}. Copy the file to a local disk.")
    return RemoteInput(url, size, version_of(info))


def download(url: str, target: pathlib.Path) -> None:
    """Downloads a file, or a folder with all that is in it.

    Raises:
      SourceError: it does not exist, or changes meanwhile; names it.
      OSError: it cannot be read after several attempts, or the disk is full.
    """
    downloads = Downloads(Retry(), _TIMEOUT_SECONDS)
    before = remote_files(url)
    for name, file in before.items():
        path = target / name if name else target
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as out:
            if file.num_bytes:
                downloads.run(Download(file.url, file.num_bytes, out.fileno(), lambda: 0.0))
            os.fsync(out.fileno())
    if remote_files(url) != before:
        raise SourceError(f"{url} changed while it was downloaded. Start the conversion again once it is complete.")
