"""A manifest: one small file that lists the files of a data set; opening the data set reads no other file.

``manifest.json`` is in the folder of the data. It has one row per file: name, size in bytes, number of records, digest,
and what the format needs to open the file without reading it::

    {"format": "meshfeed manifest", "version": 1, "source": "ArrayRecord",
     "columns": ["name", "bytes", "records", "digest", "details"],
     "files": [
      ["train-00000.array_record", 1048576, 512, "xxh3_64:0011223344556677", 0],
      …],
     "details": [{"group_size": 1}],
     "lengths": {"tokens": {"file": "manifest.tokens.lengths", "digest": "xxh3_64:8899aabbccddeeff"}},
     "made": null}

The last column refers to ``details``, because most files share theirs. ``lengths`` refers to one file per leaf, in numpy's
format, which holds the length of every record. ``made`` is what the program that wrote the files keeps there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import secrets
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.base.stores import write_output
from meshfeed._src.base.types import JsonValue
from meshfeed._src.sources.files import paths as file_paths

NAME = "manifest.json"
"""Name of a manifest beside the data."""

_LENGTHS_SUFFIX = ".lengths"
_FORMAT, _VERSION = "meshfeed manifest", 1
_COLUMNS = ["name", "bytes", "records", "digest", "details"]


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
class LengthsFile:
    """The file with the length of each record's leaf.

    Attributes:
      path: path or URL.
      digest: its digest.
      counts: lengths per file of the data set; None if there is one per record.
      eod: the token that ends a document, for documents of files of tokens.
    """

    path: str
    digest: str
    counts: Sequence[int] | None = None
    eod: int | None = None


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The lengths to write, integers ``[records]``; for the rest, see :class:`LengthsFile`."""

    values: np.ndarray
    counts: Sequence[int] | None = None
    eod: int | None = None


@dataclasses.dataclass(frozen=True)
class DataManifest:
    """What a manifest lists.

    Attributes:
      path: path or URL of the manifest.
      source: name of the source that reads the files, such as "ArrayRecord".
      files: the files, in the order of their records.
      lengths_files: leaf → the file with the length of each record.
      made: what ``meshfeed convert`` keeps about the input and the features; None for other files.
    """

    path: str
    source: str
    files: Sequence[FileEntry]
    lengths_files: Mapping[str, LengthsFile] = dataclasses.field(default_factory=dict[str, LengthsFile])
    made: JsonValue = None

    def lengths(self, key: str, eod: int | None = None) -> dict[str, np.ndarray] | None:
        """Returns the lengths of the leaf ``key`` of each file's records; None if they are not listed.

        Args:
          key: the leaf.
          eod: the token that ends a document, for documents of files of tokens.

        Returns:
          Path or URL of a file → uint32 or int64 ``[records]``.

        Raises:
          SourceError: if the file with the lengths does not exist.
          CorruptDataError: if it is not the one that was written with the manifest.
          OSError: if it cannot be read.
        """
        listed = self.lengths_files.get(key)
        if listed is None or listed.eod != eod:
            return None
        content = _read(listed.path)
        if digest_of(content) != listed.digest:
            raise damaged(listed.path, f"{self.path} lists it with {listed.digest}, and it has {digest_of(content)}")
        try:
            values = np.load(io.BytesIO(content), allow_pickle=False)
            if values.ndim != 1 or values.dtype.kind not in "iu" or (values.size and int(values.min()) < 0):
                raise ValueError(f"an array of {values.dtype} of shape {values.shape}")
        except Exception as error:  # whatever NumPy raises for bytes that it does not accept
            raise damaged(listed.path, f"it holds no lengths ({type(error).__name__}: {error})") from error
        ends = np.cumsum([entry.num_records for entry in self.files] if listed.counts is None else listed.counts)
        if len(ends) != len(self.files) or not len(ends) or ends[-1] != len(values):
            raise damaged(self.path, f"it lists {len(values):,} lengths of {key!r} for other numbers of records")
        parts = np.split(values, ends[:-1])
        return {entry.path: part for entry, part in zip(self.files, parts, strict=True)}


def digest_of(content: bytes) -> str:
    """Returns the digest of bytes as a manifest lists it."""
    return f"xxh3_64:{xxhash.xxh3_64_hexdigest(content)}"


def digest_file(path: str) -> str:
    """Returns the digest of a local file as a manifest lists it."""
    with open(path, "rb") as file:
        return f"xxh3_64:{hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()}"


def describe_file(path: str, num_records: int) -> FileEntry:
    """Returns the entry of a local file, an absolute path; reads all of it for the digest."""
    return FileEntry(path, os.path.getsize(path), num_records, digest_file(path))


def is_manifest(name: str) -> bool:
    """Whether a file is named like a manifest or the lengths that belong to one, and thus holds no records."""
    base = file_paths.without_part(file_paths.split(name)[1])
    return base == NAME or base.endswith(_LENGTHS_SUFFIX)


def write_manifest(
    path: str,
    source: str,
    files: Sequence[FileEntry],
    *,
    lengths: Mapping[str, Lengths] | None = None,
    made: JsonValue = None,
) -> None:
    """Writes a manifest, in place of an earlier one. Local files are renamed into place when they are complete.

    Args:
      path: path or URL of the manifest. Sources find it by themselves if it is ``NAME`` in the folder of the files.
      source: name of the source that reads the files, such as "ArrayRecord".
      files: the files, in the order of their records.
      lengths: leaf → length of each record, for :class:`meshfeed.sources.Packed`.
      made: see :class:`DataManifest`.

    Raises:
      OSError: if a file cannot be written.
    """
    path = file_paths.absolute(path)
    folder, base = file_paths.split(path)
    stored: dict[str, dict[str, JsonValue]] = {}
    for key, leaf in (lengths or {}).items():
        # In numpy's format: 10**9 lengths are read as 4 bytes each, without parsing.
        name = f"{base.removesuffix('.json')}.{urllib.parse.quote(key, safe='')}{_LENGTHS_SUFFIX}"
        content = _npy(leaf.values)
        _write(folder + name, content)
        more = {"counts": None if leaf.counts is None else list(leaf.counts), "eod": leaf.eod}
        stored[key] = {"file": name, "digest": digest_of(content)}
        stored[key] |= {field: value for field, value in more.items() if value is not None}
    details: dict[str, int] = {}  # as JSON → its number
    numbers = [details.setdefault(json.dumps(dict(file.details)), len(details)) for file in files]
    rows = [
        # Relative to the manifest, so the folder can be moved or uploaded.
        json.dumps([file.path.removeprefix(folder), file.num_bytes, file.num_records, file.digest, number])
        for file, number in zip(files, numbers, strict=True)
    ]
    head = {"format": _FORMAT, "version": _VERSION, "source": source, "columns": _COLUMNS}
    listed = ",\n  ".join(rows)  # one line per file, so that two manifests can be compared
    parts = [json.dumps(head)[:-1], f' "files": [\n  {listed}]', f' "details": [{", ".join(details)}]']
    parts += [f' "lengths": {json.dumps(stored)}', f' "made": {json.dumps(made)}}}\n']
    _write(path, ",\n".join(parts).encode())


def read_manifest(path: str) -> DataManifest:
    """Reads a manifest, given its path or URL.

    Raises:
      SourceError: if it does not exist, or was written by a newer version.
      CorruptDataError: if the file is not a manifest.
      OSError: if it cannot be read.
    """
    path = file_paths.absolute(path)
    return parse_manifest(_read(path), path)


def parse_manifest(content: bytes, path: str) -> DataManifest:
    """Parses the content of a manifest; ``path`` is where it is from. Raises as :func:`read_manifest`."""
    folder, _ = file_paths.split(path)
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
            FileEntry(
                _joined(name, folder),
                _count(num_bytes),
                _count(num_records),
                _text(digest, True),
                dict(details[number]),
            )
            for name, num_bytes, num_records, digest, number in found["files"]
        ]
        stored = {
            key: LengthsFile(_joined(item["file"], folder), _text(item["digest"]), item.get("counts"), item.get("eod"))
            for key, item in found["lengths"].items()
        }
        for item in stored.values():
            _ = [_count(count) for count in item.counts or ()]
        return DataManifest(path, _text(found["source"]), files, stored, found.get("made"))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged(path, f"it is no manifest of meshfeed ({type(error).__name__}: {error})") from error


def damaged(path: str, reason: str) -> CorruptDataError:
    """Returns the error for a manifest, or a file that belongs to one, with wrong content."""
    return CorruptDataError(f"{path}: {reason}. Write the manifest again with `meshfeed manifest`.", path=path)


def lengths_by_file(paths: Sequence[str], key: str, eod: int | None = None) -> dict[str, np.ndarray]:
    """Returns the lengths of the leaf ``key`` of records, from manifests; see :meth:`DataManifest.lengths`."""
    found: dict[str, np.ndarray] = {}
    for path in paths:
        found |= read_manifest(path).lengths(key, eod) or {}
    return found


def is_meshfeeds(content: bytes) -> bool:
    """Whether a file named ``manifest.json`` was written by meshfeed: other tools use that name too."""
    return _FORMAT.encode() in content[:256]


def _npy(lengths: np.ndarray) -> bytes:
    values = np.asarray(lengths)
    small = not values.size or int(values.max()) < 1 << 32
    out = io.BytesIO()
    np.save(out, values.astype("<u4" if small else "<i8"), allow_pickle=False)
    return out.getvalue()


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} in place of a count")
    return value


def _text(value: Any, or_none: bool = False) -> Any:
    if not isinstance(value, str) and not (or_none and value is None):
        raise TypeError(f"{value!r} in place of text")
    return value


def _joined(name: str, folder: str) -> str:
    """Returns the path or URL of a file that a manifest in ``folder`` lists.

    Names are relative, or paths and URLs of other folders. A remote manifest lists no local file: who wrote it is not who
    owns this disk.
    """
    if file_paths.is_inside(name):
        return folder + (urllib.parse.quote(name) if file_paths.is_http(folder) else name)
    # "::" chains file systems: "simplecache://::file:///x" is a local file.
    is_local = not file_paths.is_url(name) or name.startswith("local:") or ("::" in name and file_paths.is_url(folder))
    if is_local and (file_paths.is_url(folder) or not os.path.isabs(name)):
        raise ValueError(f"it lists {name!r}, which is not in its folder")
    return name


def _read(path: str) -> bytes:
    try:
        return file_paths.read_file(path, source="the manifest")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise SourceError(
            f"there is no manifest {path}. Check the path, or write it with `meshfeed manifest`."
        ) from error


def _write(path: str, content: bytes) -> None:
    if file_paths.is_url(path):
        write_output("output", path, content)
        file_system, inner = file_paths.open_file_system(path, "the manifest")
        file_system.invalidate_cache(inner)  # of the client that reads
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
