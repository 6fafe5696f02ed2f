"""The index of a tar archive of WebDataset: made from its headers, saved as a file, and used to take samples apart.

Without JAX, which workers of ``meshfeed convert`` need not import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import pathlib
import secrets
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from meshfeed._src.base.errors import CorruptDataError, MeshfeedError, SourceError, without_signatures
from meshfeed._src.sources.files.direct import RemoteBytes
from meshfeed._src.sources.files.formats import compression_in, reader_hint
from meshfeed._src.sources.files.open_files import Descriptor

SUFFIX = ".meshfeed-index"
"""Added to the name of an archive for the name of its index."""

_log = logging.getLogger("meshfeed.sources.webdataset")
BLOCK_BYTES = 512
"""Size of a header; contents are padded to a multiple of it."""

_BUFFER_BYTES = 1 << 16
_MAX_PADDING = 1 << 20  # that is looked at behind the end of an archive; tar pads to 10 KiB
_REMOTE_BYTES = 8 << 20  # of a remote archive, all of it is read for its headers
_VERSION = 2


@dataclasses.dataclass(frozen=True)
class TarIndex:
    """Where the samples of an archive are.

    Attributes:
      keys: uint8, the concatenated keys of the samples, in UTF-8.
      key_ends: int64[samples], the end of each key.
      first_files: int64[samples + 1], the index of each sample's first file, and the number of files.
      starts: int64[files], the offset of each file's content in the archive.
      sizes: int64[files], its size in bytes.
      headers: uint64[files], the digest of its header, the 512 bytes before its content.
      extensions: int32[files], the index of its extension.
      extension_names: all extensions, separated by line breaks, as uint8.
    """

    keys: np.ndarray
    key_ends: np.ndarray
    first_files: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    headers: np.ndarray
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

    def bounds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first byte of the first header of each sample, and the byte after its last file, int64[n]."""
        last = self.first_files[rows + 1] - 1
        return self.starts[self.first_files[rows]] - BLOCK_BYTES, self.starts[last] + self.sizes[last]

    def records(
        self,
        rows: np.ndarray,
        samples: Sequence[bytes],
        path: str,
        first_record_id: int = 0,
        saved: pathlib.Path | None = None,
    ) -> list[dict[str, Any]]:
        """Returns samples, int64[n], as dicts of key and bytes, given the bytes at their :meth:`bounds`.

        ``path``, ``first_record_id`` and ``saved``, the path of the index, are for errors.

        Raises:
          CorruptDataError: if the archive is cut short, or not the one of this index; names the file and the record.
        """
        # Values of `data`, a memoryview, are Python ints. A batch has few rows of each archive, for which this takes half
        # as long as computing with arrays.
        keys, key_ends, first_files = self.keys.data, self.key_ends.data, self.first_files.data
        starts, sizes = self.starts.data, self.sizes.data
        headers, extensions, names = self.headers.data, self.extensions.data, self.names()
        found = []
        for row, sample in zip(rows.tolist(), samples, strict=True):
            first, last = first_files[row], first_files[row + 1] - 1
            begin = starts[first] - BLOCK_BYTES
            if len(sample) < starts[last] + sizes[last] - begin:
                record_id = first_record_id + row
                message = f"{path}: record {record_id} is not there in full. The archive was cut short: copy it again."
                raise CorruptDataError(message, path=path, record_id=record_id)
            key = keys[key_ends[row - 1] if row else 0 : key_ends[row]]
            record: dict[str, Any] = {"__key__": str(key, "utf-8", "surrogateescape")}
            for file in range(first, last + 1):
                low = starts[file] - begin
                if digest_header(sample[low - BLOCK_BYTES : low]) != headers[file]:
                    raise _not_indexed(path, first_record_id + row, saved)
                record[names[extensions[file]]] = sample[low : low + sizes[file]]
            found.append(record)
        return found

    def is_sound(self) -> bool:
        """Whether the columns fit together and name bytes that an archive can have."""
        columns = [self.key_ends, self.first_files, self.starts, self.sizes, self.headers, self.extensions]
        kinds = [(column.ndim, column.dtype) for column in (self.keys, *columns, self.extension_names)]
        if kinds != [(1, np.dtype(name)) for name in _DTYPES]:
            return False
        num_files = len(self.starts)
        fits = (
            len(self.first_files) == self.num_samples + 1
            and [len(column) for column in columns[2:]] == [num_files] * 4
            and (int(self.first_files[0]), int(self.first_files[-1])) == (0, num_files)
            and (int(self.key_ends[-1]) if self.num_samples else 0) == len(self.keys)
        )
        if not fits:
            return False
        spaces = np.diff(self.starts) - BLOCK_BYTES
        return bool(
            (np.diff(self.first_files) > 0).all()
            and (np.diff(self.key_ends, prepend=0) >= 0).all()
            and (self.starts >= BLOCK_BYTES).all()
            and ((self.sizes >= 0) & (self.sizes < _MAX_BYTES)).all()
            and (spaces >= self.sizes[:-1]).all()
            and ((self.extensions >= 0) & (self.extensions < len(self.names()))).all()
        )


_DTYPES = ("u1", "i8", "i8", "i8", "i8", "u8", "i4", "u1")  # of the columns, in order
_MAX_BYTES = 1 << 62


def digest_header(header: bytes) -> int:
    """Returns the digest of a header that an index keeps."""
    return xxhash.xxh3_64_intdigest(header)


def _not_indexed(path: str, record_id: int, saved: pathlib.Path | None) -> CorruptDataError:
    remedy = "" if saved is None else f", or delete its index {saved}, which is then made again"
    return CorruptDataError(
        f"{path}: record {record_id} has a header other than the one that was indexed. The archive was replaced or damaged: "
        f"copy it again{remedy}.",
        path=path,
        record_id=record_id,
    )


def split_name(name: str) -> tuple[str, str] | None:
    """Returns the key and the extension (in lower case) of a file in an archive; None if it belongs to no sample."""
    top = name.partition("/")[0]
    if len(top) >= 4 and top.startswith("__") and top.endswith("__"):  # metadata of WebDataset
        return None
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    # For WebDataset's expression, a base name that begins with a dot is an extension of its folder, if that has no dot.
    if not dot or (not stem and (not slash or "." in folder.rpartition("/")[2])):
        return None
    return f"{folder}{slash}{stem}", extension.lower()


def scan(archive: Descriptor | RemoteBytes, path: str) -> TarIndex:
    """Reads the headers of an archive; ``path`` is its name in errors.

    Raises:
      CorruptDataError: if the archive is damaged, cut short, or holds a file of one sample twice.
      SourceError: if it holds a sparse file.
      OSError: if it cannot be read.
    """
    keys: list[bytes] = []
    first_files: list[int] = []
    files: list[tuple[int, int, int]] = []
    headers: list[int] = []
    extensions: dict[str, int] = {}
    current, seen = None, set[str]()
    for name, start, size, header in _files(archive, path):
        parts = split_name(name)
        if parts is None:
            continue
        key, extension = parts
        if key != current:
            current, seen = key, set()
            keys.append(key.encode("utf-8", "surrogateescape"))
            first_files.append(len(files))
        if "\n" in extension or extension == "__key__":
            raise SourceError(
                f"{path} has a file {name!r}, whose extension {extension!r} cannot be the name of a leaf. Rename the file, "
                "and write the archive again."
            )
        if extension in seen:
            raise _damaged(path, f"sample {key!r} has two files with the extension {extension!r}")
        seen.add(extension)
        files.append((start, size, extensions.setdefault(extension, len(extensions))))
        headers.append(header)
    columns = np.array(files, np.int64).reshape(-1, 3)
    return TarIndex(
        np.frombuffer(b"".join(keys), np.uint8),
        np.cumsum([len(key) for key in keys], dtype=np.int64),
        np.array([*first_files, len(files)], np.int64),
        np.ascontiguousarray(columns[:, 0]),
        np.ascontiguousarray(columns[:, 1]),
        np.array(headers, np.uint64),
        columns[:, 2].astype(np.int32),
        np.frombuffer("\n".join(extensions).encode("utf-8", "surrogateescape"), np.uint8),
    )


def _files(archive: Descriptor | RemoteBytes, path: str) -> Iterator[tuple[str, int, int, int]]:
    """Yields name, offset, size and digest of the header of the regular files of an archive."""
    end = 0
    buffer_bytes = _BUFFER_BYTES if isinstance(archive, Descriptor) else _REMOTE_BYTES
    reader = io.BufferedReader(_At(archive), buffer_bytes)
    links: list[str] = []
    try:
        with tarfile.open(fileobj=reader, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # or it keeps all of them
                content = member.size if member.isreg() else 0
                end = member.offset_data + -(-content // BLOCK_BYTES) * BLOCK_BYTES
                _check_member(member, path, archive.num_bytes)
                if member.islnk() or member.issym():
                    links.append(f"{member.name} to {member.linkname}")
                if member.isreg():
                    reader.seek(member.offset_data - BLOCK_BYTES)  # which tarfile has just read: it is in the buffer
                    header = digest_header(reader.read(BLOCK_BYTES))
                    yield member.name, member.offset_data, member.size, header
    except (MeshfeedError, OSError):
        raise
    except Exception as error:  # tarfile raises its own errors, and others for some damaged headers
        compression = compression_in(archive.read(0, 6))
        if compression:
            what = f"it is compressed with {compression}, which its name does not say. Rename it, or decompress it"
            raise _damaged(path, what) from error
        raise _damaged(path, str(error)) from error
    if links:  # as in the webdataset library; tar stores the second name of a file as one
        _log.warning(
            "%s: %d links are left out, the first from %r: a sample may lack a part, or be missing. Write the archive again "
            "with tar's --dereference --hard-dereference to store them in full.",
            *(without_signatures(path), len(links), links[0]),
        )
    # tarfile takes a damaged header, and the end of the file, for the end of the archive.
    rest = archive.read(end, min(end + _MAX_PADDING, archive.num_bytes))
    if rest[:BLOCK_BYTES] != bytes(BLOCK_BYTES):
        raise _damaged(path, f"the block of zeros that ends an archive is not at byte {end:,}")
    if rest.strip(b"\0"):
        at = end + len(rest) - len(rest.lstrip(b"\0"))
        what = f"the archive ends at byte {end:,}, and there is more at byte {at:,}"
        raise _damaged(path, f"{what}. If archives were joined with cat, pass them one by one")


def _check_member(member: tarfile.TarInfo, path: str, num_bytes: int) -> None:
    if member.issparse():
        raise SourceError(
            f"WebDataset: {path} stores {member.name!r} as a sparse file, without its zeros. Expected files that are stored "
            "in full. Write the archive again without tar's --sparse."
        )
    # tarfile would go back, without an end, or accept a file that the archive cannot hold.
    if member.size < 0 or (member.isreg() and member.offset_data + member.size > num_bytes):
        raise _damaged(path, f"the header of {member.name!r} lists {member.size:,} bytes")


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
    """Saves an index; returns False if the folder cannot be written. :func:`load` requires ``stamp``, of the archive."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    arrays = {field.name: getattr(index, field.name) for field in dataclasses.fields(index)}
    try:
        with part.open("wb") as file:
            np.savez(file, stamp=np.array(f"{_VERSION}\n{stamp}"), **arrays)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):  # a name that is too long cannot be removed either
            part.unlink(missing_ok=True)
        return False
    return True


def load(content: bytes | pathlib.Path, stamp: str, *, exact: bool = True) -> TarIndex | None:
    """Returns a saved index; None if it is missing, damaged, or that of a different archive.

    With ``exact=False``, ``stamp`` is the beginning of that of :func:`save`.
    """
    try:
        # Opened here: NumPy leaves a file that it has opened itself open if it is damaged.
        with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file, np.load(file) as saved:
            found, wanted = str(saved["stamp"]), f"{_VERSION}\n{stamp}"
            if found != wanted if exact else not found.startswith(wanted):
                return None
            index = TarIndex(**{field.name: saved[field.name] for field in dataclasses.fields(TarIndex)})
    except Exception:  # whatever zipfile, zlib and NumPy raise for bytes that they do not accept
        return None
    return index if index.is_sound() else None
