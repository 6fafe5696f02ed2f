"""A manifest: one small file that lists the files of a data set, so that opening the data set reads no other file.

``manifest.json`` lies in the folder of the data. It has one row per file: name, size in bytes, number of records, digest,
and what the format needs to open the file without reading it::

    {"format": "meshfeed manifest", "version": 1, "source": "ArrayRecord",
     "columns": ["name", "bytes", "records", "digest", "details"],
     "files": [
      ["train-00000.array_record", 1048576, 512, "xxh3_64:0011223344556677", 0],
      …],
     "details": [{"group_size": 1}],
     "lengths": {"tokens": {"file": "manifest.tokens.lengths", "digest": "xxh3_64:8899aabbccddeeff"}}}

The last column refers to ``details``, because most files share theirs. ``lengths`` refers to one file per leaf, in numpy's
format, which holds the length of every record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import posixpath
import secrets
import urllib.parse
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.sources.files import paths as file_paths

NAME = "manifest.json"
"""Name of a manifest beside the data."""

_LENGTHS_SUFFIX = ".lengths"
_FORMAT, _VERSION = "meshfeed manifest", 1
_COLUMNS = ["name", "bytes", "records", "digest", "details"]
_HASH_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """One file of a data set.

    Attributes:
      path: absolute local path, or URL.
      num_bytes: size in bytes, as stored.
      num_records: number of records; of a file of tokens, the number of tokens.
      digest: ``"<algorithm>:<hex digest>"`` with an algorithm of hashlib or ``xxh3_64``; None if not known.
      details: what else the source needs to open the file without reading it, such as ``{"group_size": 1}`` for
        ArrayRecord, the records per chunk.
    """

    path: str
    num_bytes: int
    num_records: int
    digest: str | None = None
    details: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict[str, JsonValue])


@dataclasses.dataclass(frozen=True)
class DataManifest:
    """What a manifest lists.

    Attributes:
      path: path or URL of the manifest.
      source: name of the source that reads the files, such as "ArrayRecord".
      files: the files, in the order of their records.
      stored_lengths: leaf → path or URL of the file with the length of each record, and its digest.
    """

    path: str
    source: str
    files: Sequence[FileEntry]
    stored_lengths: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict[str, "tuple[str, str]"])

    def lengths(self, key: str) -> np.ndarray | None:
        """Returns the length of each record's leaf ``key``, uint32 or int64 ``[records]``; None if they are not listed.

        Raises:
          SourceError: if the file with the lengths does not exist.
          CorruptDataError: if it is not the one that was written with the manifest.
          OSError: if it cannot be read.
        """
        if key not in self.stored_lengths:
            return None
        path, digest = self.stored_lengths[key]
        content = _read(path)
        if digest_of(content) != digest:
            raise _damaged(path, f"{self.path} lists it with {digest}, and it has {digest_of(content)}")
        return np.load(io.BytesIO(content), allow_pickle=False)


def digest_of(content: bytes) -> str:
    """Returns the digest of bytes as a manifest lists it."""
    return f"xxh3_64:{xxhash.xxh3_64_hexdigest(content)}"


def digest_file(path: str) -> str:
    """Returns the digest of a local file as a manifest lists it."""
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while content := file.read(_HASH_BYTES):
            digest.update(content)
    return f"xxh3_64:{digest.hexdigest()}"


def describe_file(path: str, num_records: int, details: Mapping[str, JsonValue] | None = None) -> FileEntry:
    """Returns the entry of a local file; reads all of it for the digest.

    Args:
      path: absolute path.
      num_records: see :class:`FileEntry`.
      details: see :class:`FileEntry`.
    """
    return FileEntry(path, os.path.getsize(path), num_records, digest_file(path), details or {})


def is_manifest(name: str) -> bool:
    """Whether a file is named like a manifest or the lengths that belong to one, and thus holds no records."""
    base = posixpath.basename(name)
    return base == NAME or base.endswith(_LENGTHS_SUFFIX)


def write_manifest(
    path: str, source: str, files: Sequence[FileEntry], *, lengths: Mapping[str, np.ndarray] | None = None
) -> None:
    """Writes a manifest, in place of an earlier one. Local files are renamed into place when they are complete.

    Args:
      path: path or URL of the manifest. Sources find it by themselves if it is ``NAME`` in the folder of the files.
      source: name of the source that reads the files, such as "ArrayRecord".
      files: the files, in the order of their records.
      lengths: leaf → length of each record, integers ``[records]``, for :class:`meshfeed.sources.Packed`.

    Raises:
      OSError: if a file cannot be written.
    """
    folder, base = posixpath.split(path)
    stored: dict[str, dict[str, str]] = {}
    for key, values in (lengths or {}).items():
        name = f"{base.removesuffix('.json')}.{urllib.parse.quote(key, safe='')}{_LENGTHS_SUFFIX}"
        content = _npy(values)
        _write(posixpath.join(folder, name), content)
        stored[key] = {"file": name, "digest": digest_of(content)}
    details: dict[str, int] = {}  # as JSON → its number
    numbers = [details.setdefault(json.dumps(dict(file.details)), len(details)) for file in files]
    rows = [
        json.dumps([_relative(file.path, folder), file.num_bytes, file.num_records, file.digest, number])
        for file, number in zip(files, numbers, strict=True)
    ]
    head = {"format": _FORMAT, "version": _VERSION, "source": source, "columns": _COLUMNS}
    listed = ",\n  ".join(rows)  # one line per file, so that two manifests can be compared
    parts = [json.dumps(head)[:-1], f' "files": [\n  {listed}]', f' "details": [{", ".join(details)}]']
    _write(path, (",\n".join(parts) + f',\n "lengths": {json.dumps(stored)}}}\n').encode())


def read_manifest(path: str) -> DataManifest:
    """Reads a manifest.

    Args:
      path: local path or URL.

    Raises:
      SourceError: if it does not exist, or was written by a newer version.
      CorruptDataError: if the file is not a manifest.
      OSError: if it cannot be read.
    """
    return parse_manifest(_read(path), path)


def parse_manifest(content: bytes, path: str) -> DataManifest:
    """Parses the content of a manifest; ``path`` is where it is from. Raises as :func:`read_manifest`."""
    folder = posixpath.dirname(path)
    try:
        found = json.loads(content)
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        if found["version"] > _VERSION:
            raise SourceError(
                f"the manifest {path} has version {found['version']}; this version of meshfeed reads up to {_VERSION}. "
                "Upgrade meshfeed, or write the manifest again with `meshfeed manifest`."
            )
        details = found["details"]
        files = [
            FileEntry(_joined(name, folder), int(num_bytes), int(num_records), digest, details[number])
            for name, num_bytes, num_records, digest, number in found["files"]
        ]
        stored = {key: (_joined(item["file"], folder), item["digest"]) for key, item in found["lengths"].items()}
        return DataManifest(path, found["source"], files, stored)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, SourceError):
            raise
        raise _damaged(path, f"it is no manifest of meshfeed ({type(error).__name__}: {error})") from error


def _damaged(path: str, reason: str) -> CorruptDataError:
    return CorruptDataError(f"{path}: {reason}. Write the manifest again with `meshfeed manifest`.", path=path)


def _npy(lengths: np.ndarray) -> bytes:
    values = np.asarray(lengths)
    small = not values.size or int(values.max()) < 1 << 32
    out = io.BytesIO()
    np.save(out, values.astype("<u4" if small else "<i8"), allow_pickle=False)
    return out.getvalue()


def _relative(path: str, folder: str) -> str:
    return path.removeprefix(f"{folder}/")


def _joined(name: str, folder: str) -> str:
    return name if file_paths.is_url(name) else posixpath.join(folder, name)


def _read(path: str) -> bytes:
    try:
        return file_paths.read_file(path, source="the manifest")
    except FileNotFoundError as error:
        raise SourceError(
            f"there is no manifest {path}. Check the path, or write it with `meshfeed manifest`."
        ) from error


def _write(path: str, content: bytes) -> None:
    if file_paths.is_url(path):
        file_system, inner = file_paths.open_file_system(path, "the manifest")
        with file_paths.remote_errors(path, "the manifest"):
            file_system.pipe_file(inner, content)
        return
    part = f"{path}.{secrets.token_hex(8)}.part"
    try:
        with open(part, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
