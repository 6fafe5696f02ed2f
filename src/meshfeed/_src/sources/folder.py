"""The files of a folder as records."""

from __future__ import annotations

import functools
import glob
import operator
import os
from collections.abc import Sequence
from typing import Any, SupportsIndex

import xxhash

from meshfeed._src.base.errors import SourceError, hides_own_frames
from meshfeed._src.base.types import JsonValue, public
from meshfeed._src.reading.identity import digest_raw, probe_digest
from meshfeed._src.sources.checks import check_ids
from meshfeed._src.sources.files import paths as file_paths

_PATH, _BYTES = "path", "bytes"


@public("meshfeed.sources")
class Folder:
    """Random-access source over the files of a local folder, in the order of their paths.

    A record is ``{"path": str, "bytes": bytes}``: the path within the folder, with slashes, and the content. A feed needs
    :class:`Map` to turn it into arrays. Files must not change while a feed reads them.

    Opening many small files is slow: for millions of them, or for an object store, use tar archives and
    :class:`WebDataset`.

    Args:
      folder: path of a local folder.
      pattern: glob of the files within it; ``**`` stands for the folder and all folders below. Hidden files and folders
        match only a pattern that begins with a dot.

    Raises:
      SourceError: it is no folder, or no file matches; names it.
    """

    kind = "folder"

    @hides_own_frames
    def __init__(self, folder: str | os.PathLike[str], pattern: str = "**") -> None:
        given = os.fspath(folder)
        if file_paths.is_url(given):
            raise SourceError(
                f"Folder got {given}. It reads local folders. Put the files into tar archives, which WebDataset reads from "
                "stores, or list them in records and read them in Map."
            )
        self._folder = file_paths.absolute(given)
        if not os.path.isdir(self._folder):
            file_paths.check_permission(self._folder, given, "Folder")
            raise SourceError(f"Folder: there is no folder {self._folder!r}. Check the path.")
        found = file_paths.expand_paths(os.path.join(glob.escape(self._folder), pattern), source="Folder")
        self._names = sorted(os.path.relpath(path, self._folder).replace(os.sep, "/") for path in found)

    def __repr__(self) -> str:
        return f"Folder({self._folder!r}, {len(self):,} files)"

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, record_id: SupportsIndex) -> dict[str, Any]:
        """Record ``record_id``: path and content."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Several records, in the order of ``record_ids``.

        Raises:
          IndexError: an id is not in [0, len).
          SourceError: a file has been removed since the source was created; names it.
          OSError: a file cannot be read.
        """
        check_ids(record_ids, len(self))
        return [{_PATH: self._names[record_id], _BYTES: self._read(record_id)} for record_id in record_ids]

    def _read(self, record_id: int) -> bytes:
        path = self.file_of(record_id)
        try:
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError as error:
            raise SourceError(
                f"record {record_id}: {path} has been removed since the source was created. Put it back, or create the "
                "source again.",
                record_id=record_id,
            ) from error

    def stored_keys(self, key: str) -> list[str] | None:
        """The paths of all records; see :class:`meshfeed._src.base.hooks.StoredKeys`."""
        return self._names if key == _PATH else None

    def file_of(self, record_id: int) -> str:
        """The path of the file of a record."""
        return os.path.join(self._folder, self._names[record_id])

    def file_names(self) -> list[str]:
        """The paths of all files."""
        return [self.file_of(record_id) for record_id in range(len(self))]

    def fingerprint(self) -> JsonValue:
        """Identity: number of files, a digest of paths in the folder and sizes, and one of 4 files' content."""
        return self._identity

    @functools.cached_property
    def _identity(self) -> JsonValue:
        digest = xxhash.xxh3_64()
        for name, size in zip(self._names, file_paths.file_sizes(self.file_names(), source="Folder"), strict=True):
            digest.update(f"{len(name)}:{name}:{size};".encode("utf-8", "surrogateescape"))
        content = probe_digest(len(self), lambda ids: digest_raw(map(self._read, ids.tolist())))
        return {"records": len(self), "files": digest.hexdigest(), "content": content}
