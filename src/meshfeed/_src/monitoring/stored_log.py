"""The log of a feed at a URL: a run writes objects of its own, since objects cannot be appended to.

An object holds the lines since the one before it and is written again once a minute, until it has 64 KB: a day of lines is
about 64 objects and 1,440 requests, and what is written again is less than 0.2 GB.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Iterator, Sequence

from meshfeed._src.base.errors import MeshfeedError, SourceError
from meshfeed._src.base.stores import ask, find_objects

_log = logging.getLogger("meshfeed.monitoring")
_UPLOAD_SECONDS = 60.0
_OBJECT_BYTES = 64 << 10
_PART = re.compile(r"(?P<run>.*-host-\d{5,}-\w+)-\d{5,}\.jsonl")


class StoredLog:
    """Writes the lines of one run of a feed.

    Args:
      url: the folder.
      name: first part of the objects' names, different for each feed, host and run.
      numbers: numbers of the objects, which all logs of a feed share; by default from 0.
    """

    def __init__(self, url: str, name: str, numbers: Iterator[int] | None = None) -> None:
        self._prefix = f"{url.rstrip('/')}/{name}"
        self._lines: list[str] = []
        self._numbers = itertools.count() if numbers is None else numbers
        self._number, self._written = next(self._numbers), 0
        self._last = -_UPLOAD_SECONDS

    def add(self, line: str, *, now: bool) -> None:
        """Adds a line, and uploads it if ``now`` or a minute after the upload before.

        Raises:
          OSError: the upload failed; the line is not added.
        """
        self._lines.append(line)
        if not now and time.monotonic() < self._last + _UPLOAD_SECONDS:
            return
        try:
            self.upload()
        except OSError:
            self._lines.pop()
            raise

    def upload(self) -> None:
        """Uploads the lines that are not stored yet.

        Raises:
          OSError: it failed.
        """
        if self._written == len(self._lines):
            return
        content = "".join(f"{line}\n" for line in self._lines).encode()
        try:
            ask(f"{self._prefix}-{self._number:05d}.jsonl", "pipe_file", content, error=MeshfeedError)
        except (MeshfeedError, FileNotFoundError) as error:
            raise OSError(str(error)) from error
        self._last, self._written = time.monotonic(), len(self._lines)
        if len(content) >= _OBJECT_BYTES:
            self._lines, self._written = [], 0
            self._number = next(self._numbers)

    def end(self) -> None:
        """Uploads the last lines; logs an error."""
        try:
            self.upload()
        except OSError as error:
            _log.warning("%s: the last figures cannot be written: %s", self._prefix, error)


def read_folder(url: str) -> list[tuple[str, bytes]]:
    """Returns the URLs and contents of the logs at a URL: of a file, or of all in a folder; by URL.

    Raises:
      SourceError: there are none, or the store does not answer or refuses the credentials.
    """
    urls = [url]
    try:
        if not url.endswith(".jsonl"):
            names = find_objects(url, SourceError)
            urls = [f"{url.rstrip('/')}/{name}" for name in sorted(names) if name.endswith(".jsonl")]
        return [(one, ask(one, "cat_file", error=SourceError)) for one in urls]
    except FileNotFoundError:
        return []


def joined(files: Sequence[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of logs; the objects of one run, which are in order, as one."""

    def run(file: tuple[str, bytes]) -> str:
        found = _PART.fullmatch(file[0])
        return file[0] if found is None else found["run"]

    for _, group in itertools.groupby(files, run):
        parts = list(group)
        yield parts[0][0], b"".join(content for _, content in parts)
