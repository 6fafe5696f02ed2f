"""Tar archives of WebDataset as one random-access source.

WebDataset groups consecutive files of an archive whose names are equal up to the first dot of the base name. The headers of
an archive are read once; the offsets of its samples are saved as an index.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import pathlib
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

import numpy as np
import xxhash

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import MeshfeedError, hides_own_frames
from meshfeed._src.base.ownership import own_record
from meshfeed._src.base.types import Decode, JsonValue, Record, RecordIds, public
from meshfeed._src.reading.identity import digest_raw
from meshfeed._src.sources.decode import refuse_as_decode
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files import tar
from meshfeed._src.sources.files.direct import ByteRange, RemoteBytes, read_ranges
from meshfeed._src.sources.files.formats import compression_of
from meshfeed._src.sources.files.lookup import FileFormat, find_shards, look_at
from meshfeed._src.sources.files.manifest import FileEntry
from meshfeed._src.sources.files.open_files import Descriptor
from meshfeed._src.sources.files.shard import Shard, read_copy
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
class WebDataset(ShardReader[TarShard, tar.TarIndex]):
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
    fresh_arrays = True

    @hides_own_frames
    def __init__(
        self,
        paths: file_paths.Paths,
        decode: Decode | None = None,
        *,
        cache: ShardCache | None = None,
    ) -> None:
        refuse_as_decode(decode, "WebDataset")
        if decode is not None:
            hooks.check_function(decode, "record", "one record (a dict of bytes)", "WebDataset", "decode")
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
        return list(records) if self.decode is None else [own_record(self.decode(record)) for record in records]

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
        return self._read_by_spans(record_ids, tar.TarIndex.bounds, _build)

    def ask_disk(self, record_ids: RecordIds) -> bool | None:
        """See :class:`meshfeed._src.base.hooks.ReadsDisk`."""
        return self._ask_disk(record_ids, tar.TarIndex.bounds)

    def stored_keys(self, key: str) -> Iterator[str] | None:
        """Returns the keys of all samples, from the indexes; see ``hooks.StoredKeys``."""
        if key != "__key__":
            return None
        indexes = (self._checked(shard).index for shard in self._shards.files)
        return (index.key(row) for index in indexes for row in range(index.num_samples))

    def fingerprint(self) -> JsonValue:
        """Returns the identity: files, number of records, and a digest of 4 records spread over the source."""
        identity = {"kind": "webdataset", "files": self._identity_of_files(), "records": len(self)}
        return self._with_content(identity, self._digest)

    def _digest(self, record_ids: np.ndarray) -> str:
        parts = [
            part
            for record in self._by_range(record_ids).read_raw(record_ids)
            for pair in record.items()
            for part in pair
        ]
        return digest_raw(part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part for part in parts)


def archives(names: Sequence[str]) -> list[str]:
    return [name for name in names if not file_paths.without_part(name).endswith(tar.SUFFIX)]


def inspect(name: str, cache: ShardCache | None) -> TarShard:
    """Counts the samples of an archive from its index, which is made if there is none."""
    compression = compression_of(name)

    def scan(copy: str) -> tar.TarIndex:
        return tar.scan(Descriptor(copy), name)

    if cache is not None and (compression is not None or file_paths.is_url(name)):
        num_bytes, version = cache.identify(name)
        stamp, places = f"version {version}", [cache.directory / f"{version}{tar.SUFFIX}"]
        index, place = _find_or_make(places, stamp, lambda: read_copy(name, compression, cache, scan))
        num_bytes = 0 if compression is not None else num_bytes  # the size of the copy is known once it is there
    else:
        opened, version = look_at(name, None, source="WebDataset")
        num_bytes = opened.num_bytes
        if isinstance(opened, Descriptor):
            stamp, places = _local_places(name, num_bytes, version, cache)
        else:
            # Another signature is the same archive. Without a version, the query may be what distinguishes two.
            stamp = f"{file_paths.without_signing(name) if version else name}, {num_bytes} bytes, {version}"
            # Without a version, the stamp does not distinguish an archive that was uploaded again.
            places = _temporary(stamp)
            for place in places:
                if not version and not _describes(tar.load(place, stamp), opened):
                    place.unlink(missing_ok=True)
        index, place = _find_or_make(places, stamp, lambda: _make(opened, name))
    return TarShard(name, num_bytes, version, index.num_samples, place, stamp, compression=compression)


def _make(archive: Descriptor | RemoteBytes, path: str) -> tar.TarIndex:
    """Returns the index beside a remote archive; if there is none, or the archive is local, reads the headers."""
    found = None if isinstance(archive, Descriptor) else _beside(archive, path)
    return tar.scan(archive, path) if found is None else found


def _beside(archive: RemoteBytes, url: str) -> tar.TarIndex | None:
    """Returns the index beside a remote archive; None if there is none of this archive."""
    try:
        content = file_paths.read_file(f"{url}{tar.SUFFIX}", source="WebDataset")
    except (MeshfeedError, OSError):
        return None
    # Only the beginning of its stamp is known: the modification time is that of the disk where the index was made.
    found = tar.load(content, f"{archive.num_bytes} bytes, ", exact=False)
    return found if _describes(found, archive) else None


def _describes(index: tar.TarIndex | None, archive: RemoteBytes) -> bool:
    """Whether the first and the last header of an index are those of a remote archive; the others are checked when read."""
    if index is None:
        return False
    numbers = [0, len(index.starts) - 1] if len(index.starts) else []
    starts = [int(index.starts[number]) for number in numbers]
    if any(start > archive.num_bytes for start in starts):
        return False
    found = read_ranges([ByteRange(archive, start - tar.BLOCK_BYTES, start) for start in starts])
    return [tar.digest_header(header) for header in found] == [int(index.headers[number]) for number in numbers]


def _local_places(name: str, num_bytes: int, version: str, cache: ShardCache | None) -> tuple[str, list[pathlib.Path]]:
    """Returns the stamp of a local archive, and the paths at which its index may be saved."""
    stamp, places = f"{num_bytes} bytes, modified {version}", [pathlib.Path(f"{name}{tar.SUFFIX}")]
    if cache is not None:  # by the path: archives of several folders may have the same base name, size and time
        places.append(_in_cache(cache, f"{name}, {stamp}"))
    return stamp, places


def _in_cache(cache: ShardCache, stamp: str) -> pathlib.Path:
    return cache.directory / f"{xxhash.xxh3_128_hexdigest(file_paths.name_bytes(stamp))}{tar.SUFFIX}"


def _listed(entry: FileEntry, version: str, manifest: str, cache: ShardCache | None) -> TarShard:
    """Returns an archive that a manifest lists; its index is loaded or made when it is first read."""
    shard = TarShard.from_entry(entry, version, manifest)
    if not shard.is_cached:
        stamp, places = _local_places(entry.path, entry.num_bytes, version, cache)
        return dataclasses.replace(shard, index=next(filter(os.path.exists, places), places[-1]), stamp=stamp)
    # Without a manifest, another host has looked at the archive, and its version is known in place of a digest.
    content = entry.digest or version
    name = file_paths.without_signing(entry.path) if content else entry.path
    stamp = f"{name}, {entry.num_bytes} bytes, {content}"
    if cache is None:
        return dataclasses.replace(shard, index=next(iter(_temporary(stamp)), None), stamp=stamp)
    return dataclasses.replace(shard, index=_in_cache(cache, stamp), stamp=stamp)


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
    return [folder / f"{xxhash.xxh3_128_hexdigest(file_paths.name_bytes(stamp))}{tar.SUFFIX}"]


def _find_or_make(
    places: Sequence[pathlib.Path], stamp: str, make: Callable[[], tar.TarIndex]
) -> tuple[tar.TarIndex, pathlib.Path | None]:
    """Returns a saved index, or makes and saves one, and its path; None if it could not be saved."""
    for place in places:
        found = tar.load(place, stamp)
        if found is not None:
            return found, place
    made = make()
    return made, next((place for place in places if tar.save(made, place, stamp)), None)


def _check(shard: TarShard, open_file: OpenFile, _cache: object) -> tuple[tar.TarIndex, int]:
    """Loads the index of an archive, or makes it if it is gone."""
    places = [] if shard.index is None else [shard.index]
    index, _ = _find_or_make(places, shard.stamp, lambda: _make(open_file(), shard.path))
    if index.num_samples != shard.num_records:
        change = f"{shard.num_records:,} samples then, {index.num_samples:,} now"
        raise file_paths.changed(f"the WebDataset archive {shard.path}", change, shard.manifest)
    return index, index.num_entries


def _build(
    file: Checked[TarShard, tar.TarIndex], rows: np.ndarray, first_record_id: int, samples: list[bytes]
) -> list[dict[str, Any]]:
    return file.index.records(rows, samples, file.shard.path, first_record_id, file.shard.index)
