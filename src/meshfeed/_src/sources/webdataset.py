"""Tar archives of WebDataset as one random-access source.

WebDataset groups consecutive files of an archive whose names are equal up to the first dot of the base name. The headers of
an archive are read once; the offsets of its samples are saved as an index.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import operator
import os
import pathlib
import secrets
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

import numpy as np
import xxhash

from meshfeed._src.base.errors import CorruptDataError, MeshfeedError, SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.types import Decode, JsonValue, Record, public
from meshfeed._src.reading.identity import digest_raw, probe_digest
from meshfeed._src.sources.decode import refuse_as_decode
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import ByteRange, RemoteBytes, read_ranges
from meshfeed._src.sources.files.formats import compression_of, reader_hint
from meshfeed._src.sources.files.lookup import FileFormat, find_shards, look_at
from meshfeed._src.sources.files.manifest import FileEntry
from meshfeed._src.sources.files.open_files import Descriptor
from meshfeed._src.sources.files.shard import Shard, changed
from meshfeed._src.sources.files.shard_reader import Checked, OpenFile, ShardReader

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache


@dataclasses.dataclass(frozen=True)
class TarShard(Shard):
    """One archive as it was when the source was created.

    Attributes:
      index: path of the saved index; None if no folder could be written.
      stamp: identifies the archive in it.
    """

    source: ClassVar[str] = "WebDataset"
    index: pathlib.Path | None = None
    stamp: str = ""


@public("meshfeed.sources")
class WebDataset(ShardReader[TarShard, "TarIndex"]):
    """Random-access source over the samples of tar archives, concatenated in file order.

    A record is a dict ``{"__key__": str, extension: bytes, …}`` with the files of one sample, grouped as WebDataset groups
    them: consecutive files whose names are equal up to the first dot of the base name. Extensions are in lower case. A
    feed needs ``decode=``, or :class:`meshfeed.sources.Map`, to turn it into arrays.

    The headers of an archive are read once. The index is saved beside the archive, under its name and
    ``.meshfeed-index``; if that folder cannot be written, or the archive is remote, in the folder of ``cache``. That of a
    remote archive without a cache is saved in a folder of the temporary folder that only this user can access. Each file
    that is read is compared with the header that was indexed.

    Safe to read from several threads. A source can be pickled, without its open files.

    Args:
      paths: a path, a glob (expanded in order of name), a URL supported by fsspec, or a list of these. The order of the
        files determines the record ids.
      decode: converts a record to a pytree of arrays. May take ``rng=``.
      cache: cache on a local disk; required for compressed archives (``.tar.gz``). Without it, remote samples are read as
        byte ranges; the index is read from the file beside the archive, or made by reading the archive once.

    Raises:
      SettingsError: if ``decode`` is not a function, or there is a compressed archive and no cache.
      SourceError: if there are no files, a file is missing, an archive has a sparse file, or all archives are empty; names
        the path or pattern.
      CorruptDataError: if an archive is damaged or cut short; names the file.
    """

    decode_batch = None

    @hides_own_frames
    def __init__(
        self,
        paths: file_paths.Paths,
        decode: Decode | None = None,
        *,
        cache: ShardCache | None = None,
    ) -> None:
        refuse_as_decode(decode, "WebDataset")
        if decode is not None and not callable(decode):
            raise SettingsError(
                f"WebDataset got decode={decode!r}. Expected a function of one record (a dict of bytes) that gives arrays.",
                setting="decode",
            )
        self.decode = decode
        form = FileFormat(
            "WebDataset",
            lambda name: inspect(name, cache),
            lambda entry, version, manifest: _listed(entry, version, manifest, cache),
            archives,
        )
        super().__init__(find_shards(paths, cache, form), cache, _check)

    def __getitem__(self, record_id: SupportsIndex) -> Record:
        """Returns record ``record_id``, decoded; a dict of bytes if the source has no decoder."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[Record]:
        """Returns several decoded records, in the order of ``record_ids``."""
        records = self.read_raw(np.asarray(record_ids, np.int64))
        return list(records) if self.decode is None else [self.decode(record) for record in records]

    def read_raw(self, record_ids: np.ndarray | Sequence[int]) -> list[dict[str, Any]]:
        """Reads records without decoding them.

        Args:
          record_ids: int64[n], in any order, with repeats allowed.

        Returns:
          n dicts of key and bytes, in the order of ``record_ids``.

        Raises:
          IndexError: if an id is not in [0, len).
          CorruptDataError: if an archive is cut short, or is not the one that was indexed; names the file and the record.
          SourceError: if a file has been removed or changed since the source was created.
          OSError: if a file cannot be read.
        """
        return self._read_by_spans(record_ids, TarIndex.bounds, _build)

    def fingerprint(self) -> JsonValue:
        """Returns the identity: files, number of records, and a digest of 4 records spread over the source."""
        return {
            "kind": "webdataset",
            "files": self._identity_of_files(),
            "records": len(self),
            "content": probe_digest(len(self), self._digest),
        }

    def _digest(self, record_ids: np.ndarray) -> str:
        parts = [
            part
            for record in self._by_range(record_ids).read_raw(record_ids)
            for pair in record.items()
            for part in pair
        ]
        return digest_raw(part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part for part in parts)


def archives(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.endswith(SUFFIX)]


def inspect(name: str, cache: ShardCache | None) -> TarShard:
    """Counts the samples of an archive from its index, which is made if there is none."""
    compression = compression_of(name)
    if cache is not None and (compression is not None or file_paths.is_url(name)):
        num_bytes, version = cache.identify(name)
        stamp, places = f"version {version}", [cache.directory / f"{version}{SUFFIX}"]
        index, place = _find_or_make(places, stamp, lambda: _scan_copy(name, compression, cache))
        num_bytes = 0 if compression is not None else num_bytes  # the size of the copy is known once it is there
    else:
        opened, version = look_at(name, None, source="WebDataset")
        num_bytes = opened.num_bytes
        if isinstance(opened, Descriptor):
            stamp, places = _local_places(name, num_bytes, version, cache)
        else:
            stamp = f"{name}, {num_bytes} bytes, {version}"
            # Without a version, the stamp does not distinguish an archive that was uploaded again.
            places = _temporary(stamp)
            for place in places:
                if not version and not _describes(load(place, stamp), opened):
                    place.unlink(missing_ok=True)
        index, place = _find_or_make(places, stamp, lambda: _make(opened, name))
    return TarShard(name, num_bytes, version, index.num_samples, place, stamp, compression=compression)


def _scan_copy(name: str, compression: str | None, cache: ShardCache) -> TarIndex:
    with cache.open(name, compression=compression) as copy:
        return scan(Descriptor(str(copy)), name)


def _make(archive: Descriptor | RemoteBytes, path: str) -> TarIndex:
    """Returns the index beside a remote archive; if there is none, or the archive is local, reads the headers."""
    found = None if isinstance(archive, Descriptor) else _beside(archive, path)
    return scan(archive, path) if found is None else found


def _beside(archive: RemoteBytes, url: str) -> TarIndex | None:
    """Returns the index beside a remote archive; None if there is none of this archive."""
    try:
        content = file_paths.read_file(f"{url}{SUFFIX}", source="WebDataset")
    except (MeshfeedError, OSError):
        return None
    # Only the beginning of its stamp is known: the modification time is that of the disk where the index was made.
    found = load(content, f"{archive.num_bytes} bytes, ", exact=False)
    return found if _describes(found, archive) else None


def _describes(index: TarIndex | None, archive: RemoteBytes) -> bool:
    """Whether the first and the last header of an index are those of a remote archive; the others are checked when read."""
    if index is None:
        return False
    numbers = [0, len(index.starts) - 1] if len(index.starts) else []
    starts = [int(index.starts[number]) for number in numbers]
    if any(start > archive.num_bytes for start in starts):
        return False
    found = read_ranges([ByteRange(archive, start - _BLOCK_BYTES, start) for start in starts])
    return [_digest_header(header) for header in found] == [int(index.headers[number]) for number in numbers]


def _local_places(name: str, num_bytes: int, version: str, cache: ShardCache | None) -> tuple[str, list[pathlib.Path]]:
    """Returns the stamp of a local archive, and the paths at which its index may be saved."""
    places = [pathlib.Path(f"{name}{SUFFIX}")]
    if cache is not None:
        places.append(cache.directory / f"{os.path.basename(name)}-{num_bytes}-{version}{SUFFIX}")
    return f"{num_bytes} bytes, modified {version}", places


def _listed(entry: FileEntry, version: str, manifest: str, cache: ShardCache | None) -> TarShard:
    """Returns an archive that a manifest lists; its index is loaded or made when it is first read."""
    shard = TarShard.from_entry(entry, version, manifest)
    if not shard.is_cached:
        stamp, places = _local_places(entry.path, entry.num_bytes, version, cache)
        return dataclasses.replace(shard, index=next(filter(os.path.exists, places), places[-1]), stamp=stamp)
    stamp = f"{entry.path}, {entry.num_bytes} bytes, {entry.digest}"
    if cache is None:
        return dataclasses.replace(shard, index=next(iter(_temporary(stamp)), None), stamp=stamp)
    place = cache.directory / f"{xxhash.xxh3_128_hexdigest(stamp.encode())}{SUFFIX}"
    return dataclasses.replace(shard, index=place, stamp=stamp)


# Kept beyond the process: without it, each source over a remote archive without an index would read all of the archive.
def _temporary(stamp: str) -> list[pathlib.Path]:
    """Returns the path at which the index may be saved; none if there is no folder that only this user can write."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"meshfeed-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError:
        return []
    # Anyone can create this folder first, and put an index there that lets records begin elsewhere in the archive.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        return []
    return [folder / f"{xxhash.xxh3_128_hexdigest(stamp.encode())}{SUFFIX}"]


def _find_or_make(
    places: Sequence[pathlib.Path], stamp: str, make: Callable[[], TarIndex]
) -> tuple[TarIndex, pathlib.Path | None]:
    """Returns a saved index, or makes and saves one, and its path; None if it could not be saved."""
    for place in places:
        found = load(place, stamp)
        if found is not None:
            return found, place
    made = make()
    return made, next((place for place in places if save(made, place, stamp)), None)


def _check(shard: TarShard, open_file: OpenFile) -> tuple[TarIndex, int]:
    """Loads the index of an archive, or makes it if it is gone."""
    places = [] if shard.index is None else [shard.index]
    index, _ = _find_or_make(places, shard.stamp, lambda: _make(open_file(), shard.path))
    if index.num_samples != shard.num_records:
        raise changed(shard, shard.path)
    return index, index.num_entries


def _build(
    file: Checked[TarShard, TarIndex], rows: np.ndarray, first_record_id: int, samples: list[bytes]
) -> list[dict[str, Any]]:
    return file.index.records(rows, samples, file.shard.path, first_record_id, file.shard.index)


SUFFIX = ".meshfeed-index"
"""Added to the name of an archive for the name of its index."""

_BLOCK_BYTES = 512
_BUFFER_BYTES = 1 << 16
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
        return self.starts[self.first_files[rows]] - _BLOCK_BYTES, self.starts[last] + self.sizes[last]

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
        starts, stops = self.bounds(rows)
        for row, sample, size in zip(rows.tolist(), samples, (stops - starts).tolist(), strict=True):
            if len(sample) < size:
                record_id = first_record_id + row
                message = f"{path}: record {record_id} is not there in full. The archive was cut short: copy it again."
                raise CorruptDataError(message, path=path, record_id=record_id)
        names, first = self.names(), self.first_files[rows]
        counts = self.first_files[rows + 1] - first
        files = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        begins = self.starts[files] - np.repeat(starts, counts)
        ends = (begins + self.sizes[files]).tolist()
        places = zip(self.extensions[files].tolist(), begins.tolist(), ends, self.headers[files].tolist(), strict=True)
        found = []
        for row, sample, count in zip(rows.tolist(), samples, counts.tolist(), strict=True):
            record: dict[str, Any] = {"__key__": self.key(row)}
            for name, low, high, header in itertools.islice(places, count):
                if _digest_header(sample[low - _BLOCK_BYTES : low]) != header:
                    raise _not_indexed(path, first_record_id + row, saved)
                record[names[name]] = sample[low:high]
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
        spaces = np.diff(self.starts) - _BLOCK_BYTES
        return bool(
            (np.diff(self.first_files) > 0).all()
            and (np.diff(self.key_ends, prepend=0) >= 0).all()
            and (self.starts >= _BLOCK_BYTES).all()
            and ((self.sizes >= 0) & (self.sizes < _MAX_BYTES)).all()
            and (spaces >= self.sizes[:-1]).all()
            and ((self.extensions >= 0) & (self.extensions < len(self.names()))).all()
        )


_DTYPES = ("u1", "i8", "i8", "i8", "i8", "u8", "i4", "u1")  # of the columns, in order
_MAX_BYTES = 1 << 62


def _digest_header(header: bytes) -> int:
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
    """Reads the headers of an archive.

    Args:
      archive: the open archive.
      path: its name in errors.

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
    try:
        with tarfile.open(fileobj=reader, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # or it keeps all of them
                content = member.size if member.isreg() else 0
                end = member.offset_data + -(-content // _BLOCK_BYTES) * _BLOCK_BYTES
                _check_member(member, path, archive.num_bytes)
                if member.isreg():
                    reader.seek(member.offset_data - _BLOCK_BYTES)  # which tarfile has just read: it is in the buffer
                    header = _digest_header(reader.read(_BLOCK_BYTES))
                    yield member.name, member.offset_data, member.size, header
    except (MeshfeedError, OSError):
        raise
    except Exception as error:  # tarfile raises its own errors, and others for some damaged headers
        compression = _compression(archive.read(0, 6))
        if compression:
            what = f"it is compressed with {compression}, which its name does not say. Rename it, or decompress it"
            raise _damaged(path, what) from error
        raise _damaged(path, str(error)) from error
    # tarfile takes a damaged header, and the end of the file, for the end of the archive.
    if archive.read(end, end + _BLOCK_BYTES) != bytes(_BLOCK_BYTES):
        raise _damaged(path, f"the block of zeros that ends an archive is not at byte {end:,}")


def _check_member(member: tarfile.TarInfo, path: str, num_bytes: int) -> None:
    if member.issparse():
        raise SourceError(
            f"WebDataset: {path} stores {member.name!r} as a sparse file, without its zeros. Expected files that are stored "
            "in full. Write the archive again without tar's --sparse."
        )
    # tarfile would go back, without an end, or accept a file that the archive cannot hold.
    if member.size < 0 or (member.isreg() and member.offset_data + member.size > num_bytes):
        raise _damaged(path, f"the header of {member.name!r} lists {member.size:,} bytes")


_MAGIC_BYTES = {
    b"\x1f\x8b": "gzip (.gz)",
    b"BZh": "bzip2 (.bz2)",
    b"\xfd7zXZ\0": "xz (.xz)",
    b"\x28\xb5\x2f\xfd": "zstd (.zst)",
    b"\x04\x22\x4d\x18": "lz4",
}


def _compression(head: bytes) -> str | None:
    return next((name for magic, name in _MAGIC_BYTES.items() if head.startswith(magic)), None)


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
        with contextlib.suppress(OSError):  # a name that is too long cannot be removed either
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
            index = TarIndex(**{field.name: saved[field.name] for field in dataclasses.fields(TarIndex)})
    except Exception:  # whatever zipfile, zlib and NumPy raise for bytes that they do not accept
        return None
    return index if index.is_sound() else None
