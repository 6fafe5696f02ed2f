"""One file of a source as it was when the source was created, and its local copy, which must still be that file."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import RemoteBytes
from meshfeed._src.sources.files.formats import compression_of, reader_hint
from meshfeed._src.sources.files.manifest import FileEntry, damaged
from meshfeed._src.sources.files.paths import is_url

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

S = TypeVar("S", bound="Shard")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file as it was when the source was created.

    Attributes:
      path: local path, or the URL of a file that is read through a cache.
      num_bytes: file size in bytes, decompressed; 0 if not known.
      version: modification time in nanoseconds; for a file of a cache, its version key; for other remote files, what the
        store reports. Empty if not known.
      num_records: number of records.
      compression: how the stored file is compressed; None if it is not.
      digest: digest of the stored file as a manifest lists it; None if not known.
      manifest: path of the manifest that lists the file; empty if there is none.
      key: identifies this file and version, and the cache of its copy; a string, because strings cache their hash.
    """

    source: ClassVar[str] = "source"
    path: str
    num_bytes: int
    version: str
    num_records: int
    compression: str | None = dataclasses.field(default=None, kw_only=True)
    digest: str | None = dataclasses.field(default=None, kw_only=True, compare=False, repr=False)
    manifest: str = dataclasses.field(default="", kw_only=True, compare=False, repr=False)
    key: str = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # What nothing identifies may be another file in a later source.
        version = self.version or self.digest or secrets.token_hex(8)
        key = f"{self.source}\n{self.path}\n{version}\n{self.num_bytes}\n{self.num_records}"
        object.__setattr__(self, "key", key)

    def belongs_to(self, directory: str) -> None:
        """Adds the folder of a cache to the key of a file that is read from a copy.

        What a process keeps of a file opens it through the cache of the source that read it first.
        """
        if self.is_cached and not self.key.endswith(f"\n{directory}"):
            object.__setattr__(self, "key", f"{self.key}\n{directory}")

    @functools.cached_property
    def remote(self) -> RemoteBytes:
        """The file, if it is read without a copy."""
        return RemoteBytes(self.path, self.num_bytes, self.version, self.source, self.manifest)

    @property
    def is_cached(self) -> bool:
        """Whether the file is read from a copy if there is a cache."""
        return self.compression is not None or is_url(self.path)

    def is_direct(self, cache: ShardCache | None) -> bool:
        """Whether the file is remote and read without a copy."""
        return cache is None and is_url(self.path)

    def details(self) -> dict[str, JsonValue]:
        """Returns the fields that a subclass adds, as JSON."""
        return {}

    @classmethod
    def from_details(cls, entry: FileEntry, manifest: str) -> dict[str, Any]:
        """Returns the fields that a subclass adds, given what a manifest lists, and the path of the manifest."""
        return dict(entry.details)

    @classmethod
    def from_entry(cls, entry: FileEntry, version: str, manifest: str) -> Self:
        """Returns a file as the manifest at the path ``manifest`` lists it."""
        compression = compression_of(entry.path)
        num_bytes = 0 if compression else entry.num_bytes  # the size of the copy is known once it is there
        known = {"compression": compression, "digest": entry.digest, "manifest": manifest}
        try:
            more = cls.from_details(entry, manifest)
            return cls(entry.path, num_bytes, version, entry.num_records, **known, **more)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(manifest, f"it lists {entry.path} with the details {dict(entry.details)}") from error

    def entry(self) -> FileEntry:
        """Returns what a manifest lists of the file."""
        return FileEntry(self.path, self.num_bytes, self.num_records, self.digest, self.details())

    def describe_change(self, path: str) -> str:
        """Returns what the file was and what it is now, for an error."""
        return f"{self.num_records:,} records in {self.num_bytes:,} bytes then, {os.path.getsize(path):,} now"


@contextlib.contextmanager
def local_copy(shard: Shard, cache: ShardCache | None) -> Iterator[tuple[str, os.stat_result]]:
    """Yields the local path and status of a file, and keeps a cached copy from eviction within the ``with`` block.

    Raises:
      SourceError: if the file has been removed or changed since the source was created.
      OSError: if its copy cannot be fetched, or has been removed meanwhile.
    """
    try:
        if cache is None or not shard.is_cached:
            status = os.stat(shard.path)
            _check_unchanged(shard, shard.path, status, str(status.st_mtime_ns))
            yield shard.path, status
            return
        with cache.open(shard.path, compression=shard.compression, num_bytes=shard.num_bytes) as copy:
            status = os.stat(copy)
            # The manifest of a newer source says nothing of a file that was looked up without one, if its version does.
            has_version = shard.digest is None and shard.version and cache.version_of(shard.path)
            if cache.listed.get(shard.path, shard.digest) != shard.digest and not has_version:
                raise changed(shard, str(copy))
            _check_unchanged(shard, str(copy), status, cache.identify(shard.path)[1])
            yield str(copy), status
    except FileNotFoundError as error:
        if cache is not None and shard.is_cached:
            raise cache.emptied(shard.path) from error
        raise SourceError(
            f"the {shard.source} file {shard.path} is gone; it was there when the source was made. Put it back, or "
            "build the source again."
        ) from error


def read_copy(name: str, compression: str | None, cache: ShardCache, read: Callable[[str], T]) -> T:
    """Returns ``read(path)`` of the copy of a file; if the copy is damaged, fetches the file again and retries once."""

    def attempt() -> T:
        with cache.open(name, compression=compression) as copy:
            try:
                return read(str(copy))
            except CorruptDataError as error:
                raise CorruptDataError(str(error).replace(str(copy), name), path=name) from error

    try:
        return attempt()
    except CorruptDataError as error:
        if not isinstance(error.__cause__, CorruptDataError):  # the cache has fetched it twice
            raise
    cache.discard(name, compression=compression)
    return attempt()


def inspect_copy(name: str, cache: ShardCache, inspect: Callable[[str], S]) -> S:
    """Describes a compressed file, given its path or URL, by what ``inspect`` returns of its decompressed copy."""
    compression = compression_of(name)
    found = read_copy(name, compression, cache, inspect)
    # 0 bytes, because neither a manifest nor a host that did not look at the file has the size of the copy.
    return dataclasses.replace(found, path=name, num_bytes=0, version=cache.identify(name)[1], compression=compression)


def _check_unchanged(shard: Shard, path: str, status: os.stat_result, version: str) -> None:
    # As of bytes that are read without a copy, the first version counts if none was looked up.
    known = shard.version or vars(shard).setdefault("first_version", version)
    if (shard.num_bytes and status.st_size != shard.num_bytes) or version != known:
        raise changed(shard, path)


def changed(shard: Shard, path: str) -> SourceError:
    """Returns the error for a file that is no longer the one that the source was created with."""
    what = f"the {shard.source} file {shard.path}"
    return file_paths.changed(what, shard.describe_change(path), shard.manifest)


def check_cache(cache: object, *, source: str) -> None:
    """Raises SettingsError if ``cache`` is neither a ShardCache nor None."""
    if cache is not None and not callable(getattr(cache, "identify", None)):
        raise SettingsError(
            f"{source} got cache={cache!r}. Expected a meshfeed.ShardCache(directory, max_bytes=…).", setting="cache"
        )


def need_cache(names: Sequence[str], cache: ShardCache | None, *, source: str) -> None:
    """Raises SettingsError for compressed files without a cache, or SourceError if the name suggests another source."""
    packed = [name for name in names if compression_of(name)]
    if packed and cache is None:
        hint = reader_hint(packed[0], unless=source)
        if hint:
            raise SourceError(f"{source} got the compressed file {packed[0]!r}.{hint}")
        raise SettingsError(
            f"{source} got the compressed file {packed[0]!r} and no cache. Compressed files cannot be "
            "read at random: pass "
            "cache=meshfeed.ShardCache(directory, max_bytes=…), which keeps decompressed copies, or decompress the files.",
            setting="cache",
        )
