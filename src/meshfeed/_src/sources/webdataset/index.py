"""Finds the samples of a tar archive, and saves where they are.

WebDataset groups consecutive files of an archive whose names are equal up to the first dot of the base name.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import secrets
import tarfile
import zipfile
from collections.abc import Iterator

import numpy as np

from meshfeed._src.base.errors import CorruptDataError
from meshfeed._src.sources.files.direct import RemoteBytes
from meshfeed._src.sources.files.formats import reader_hint
from meshfeed._src.sources.files.open_files import Descriptor

SUFFIX = ".meshfeed-index"
"""Added to the name of an archive for the name of its index."""

_BLOCK_BYTES = 512
_BUFFER_BYTES = 1 << 16
_REMOTE_BYTES = 8 << 20  # of a remote archive, all of it is read for its headers
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class TarIndex:
    """Where the samples of an archive are.

    Attributes:
      keys: uint8, the concatenated keys of the samples, in UTF-8.
      key_ends: int64[samples], the end of each key.
      first_files: int64[samples + 1], the index of each sample's first file, and the number of files.
      starts: int64[files], the offset of each file's content in the archive.
      sizes: int64[files], its size in bytes.
      extensions: int32[files], the index of its extension.
      extension_names: all extensions, separated by line breaks, as uint8.
    """

    keys: np.ndarray
    key_ends: np.ndarray
    first_files: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    extensions: np.ndarray
    extension_names: np.ndarray

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.key_ends)

    @property
    def num_entries(self) -> int:
        """Size in memory, in units of 8 bytes."""
        return sum(getattr(self, field.name).nbytes for field in dataclasses.fields(self)) // 8

    def key(self, row: int) -> str:
        """Returns the key of a sample."""
        start = int(self.key_ends[row - 1]) if row else 0
        return self.keys[start : int(self.key_ends[row])].tobytes().decode("utf-8", "surrogateescape")

    def names(self) -> list[str]:
        """Returns the extensions."""
        return self.extension_names.tobytes().decode("utf-8", "surrogateescape").split("\n")


def split_name(name: str) -> tuple[str, str] | None:
    """Returns the key and the extension (in lower case) of a file in an archive; None if it belongs to no sample."""
    top = name.partition("/")[0]
    if len(top) >= 4 and top.startswith("__") and top.endswith("__"):  # metadata of WebDataset
        return None
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not dot or (not stem and (not slash or "." in folder.rpartition("/")[2])):
        return None
    return f"{folder}{slash}{stem}", extension.lower()


def scan(archive: Descriptor | RemoteBytes, path: str) -> TarIndex:
    """Reads the headers of an archive.

    Args:
      archive: the open archive.
      path: its name in errors.

    Raises:
      CorruptDataError: if the archive is damaged, cut short, or holds a file of one sample twice.
      OSError: if it cannot be read.
    """
    keys: list[bytes] = []
    first_files: list[int] = []
    files: list[tuple[int, int, int]] = []
    extensions: dict[str, int] = {}
    current, seen = None, set[str]()
    for name, start, size in _files(archive, path):
        parts = split_name(name)
        if parts is None:
            continue
        key, extension = parts
        if key != current:
            current, seen = key, set()
            keys.append(key.encode("utf-8", "surrogateescape"))
            first_files.append(len(files))
        if extension in seen:
            raise _damaged(path, f"sample {key!r} has two files with the extension {extension!r}")
        seen.add(extension)
        files.append((start, size, extensions.setdefault(extension, len(extensions))))
    columns = np.array(files, np.int64).reshape(-1, 3)
    return TarIndex(
        np.frombuffer(b"".join(keys), np.uint8),
        np.cumsum([len(key) for key in keys], dtype=np.int64),
        np.array([*first_files, len(files)], np.int64),
        np.ascontiguousarray(columns[:, 0]),
        np.ascontiguousarray(columns[:, 1]),
        columns[:, 2].astype(np.int32),
        np.frombuffer("\n".join(extensions).encode("utf-8", "surrogateescape"), np.uint8),
    )


def _files(archive: Descriptor | RemoteBytes, path: str) -> Iterator[tuple[str, int, int]]:
    """Yields name, offset and size of the regular files of an archive."""
    end = 0
    buffer_bytes = _BUFFER_BYTES if isinstance(archive, Descriptor) else _REMOTE_BYTES
    try:
        with tarfile.open(fileobj=io.BufferedReader(_At(archive), buffer_bytes), mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # or it keeps all of them
                content = member.size if member.isreg() else 0
                end = member.offset_data + -(-content // _BLOCK_BYTES) * _BLOCK_BYTES
                if member.isreg():
                    yield member.name, member.offset_data, member.size
    except tarfile.TarError as error:
        raise _damaged(path, str(error)) from error
    # tarfile takes a damaged header, and the end of the file, for the end of the archive.
    if archive.read(end, end + _BLOCK_BYTES) != bytes(_BLOCK_BYTES):
        raise _damaged(path, f"the block of zeros that ends an archive is not at byte {end:,}")


class _At(io.RawIOBase):
    """A file object over a file that others read at the same time."""

    def __init__(self, file: Descriptor | RemoteBytes) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        content = self._file.read(self._position, self._position + len(buffer))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.num_bytes}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position


def _damaged(path: str, reason: str) -> CorruptDataError:
    return CorruptDataError(
        f"{path} is no intact tar archive: {reason}. Expected what WebDataset's writers or tar write."
        f"{reader_hint(path, unless='WebDataset') or ' Write or copy it again.'}",
        path=path,
    )


def save(index: TarIndex, path: pathlib.Path, stamp: str) -> bool:
    """Saves an index; returns False if the folder cannot be written.

    Args:
      index: the index.
      path: the file to write.
      stamp: identifies the archive; :func:`load` requires it.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    arrays = {field.name: getattr(index, field.name) for field in dataclasses.fields(index)}
    try:
        with part.open("wb") as file:
            np.savez(file, stamp=np.array(f"{_VERSION}\n{stamp}"), **arrays)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        return False
    return True


def load(content: bytes | pathlib.Path, stamp: str, *, exact: bool = True) -> TarIndex | None:
    """Returns a saved index; None if it is missing, damaged, or that of a different archive.

    Args:
      content: the file, or its content.
      stamp: see :func:`save`.
      exact: False if ``stamp`` is the beginning of the stamp.
    """
    try:
        with np.load(io.BytesIO(content) if isinstance(content, bytes) else content) as saved:
            found, wanted = str(saved["stamp"]), f"{_VERSION}\n{stamp}"
            if found != wanted if exact else not found.startswith(wanted):
                return None
            return TarIndex(**{field.name: saved[field.name] for field in dataclasses.fields(TarIndex)})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
