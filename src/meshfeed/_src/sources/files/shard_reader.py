"""Sources over files: what they share, and reads by id, one file after the other or byte ranges of many files at once."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar

import numpy as np

from meshfeed._src.base.errors import CorruptDataError
from meshfeed._src.base.types import JsonValue, RecordIds
from meshfeed._src.reading.identity import probe_digest
from meshfeed._src.reading.shared_probes import probe_once
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import READ_THREADS, ByteRange, RemoteBytes, read_ranges
from meshfeed._src.sources.files.manifest import lengths_by_file
from meshfeed._src.sources.files.open_files import (
    Descriptor,
    FileRanges,
    fetch_ahead,
    fetch_missing,
    shared_pool,
)
from meshfeed._src.sources.files.paths import is_url
from meshfeed._src.sources.files.shard import Shard
from meshfeed._src.sources.files.shards import S, Shards
from meshfeed._src.sources.files.spans import read_spans
from meshfeed._src.state.state import digest_of

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import RemoteFile, ShardCache

T = TypeVar("T")
R = TypeVar("R")

OpenFile = Callable[[], "Descriptor | RemoteBytes"]
"""Returns the open file, and opens it again if it has been closed; a remote file that is read without a cache as it is."""


@dataclasses.dataclass(frozen=True)
class Checked(Generic[S, T]):
    """A file that has been checked, what the source keeps of it, such as its index, and a function that opens it."""

    shard: S
    index: T
    open: OpenFile


ReadRows = Callable[[Checked[S, T], np.ndarray, int], Sequence[R]]
"""Reads rows, int64[n], of a file; gets the record id of its row 0 too, for errors."""
SpansOf = Callable[[T, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Returns the first byte of each row, int64[n], of a file, and the byte after its last one, given the file's index."""
Build = Callable[[Checked[S, T], np.ndarray, int, list[bytes]], Sequence[R]]
"""Makes records of rows, int64[n], of a file; gets the record id of its row 0, and the bytes of each row, fewer than
requested if the file ends before."""


class ShardSource(Generic[S]):
    """What all sources over files share.

    Args:
      shards: the files, in the order of their record ids.
      cache: cache on a local disk; None to read remote files as byte ranges.
    """

    _pool = shared_pool  # of the class: open files and locks belong to the process, and are not pickled

    def __init__(self, shards: Shards[S], cache: ShardCache | None) -> None:
        self._shards = shards
        self._cache = cache
        if cache is not None:
            for shard in shards.files:
                shard.belongs_to(str(cache.directory))
                self._pool.damaged.discard(shard.key)  # it may have been mended in the store since
        self._has_copies = cache is not None and any(shard.is_cached for shard in shards.files)
        self._is_direct = any(shard.is_direct(cache) for shard in shards.files)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shards.describe()})"

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def read_threads(self) -> int | None:
        """Threads that read by default, if remote files are read without a cache."""
        return READ_THREADS if self._is_direct else None

    @property
    def _is_local(self) -> bool:
        """Whether all files are on this machine, and not in a cache that may evict them."""
        return self._cache is None and not self._is_direct

    def shard_lengths(self) -> RecordIds:
        """Returns the number of records of each file, int64[files]."""
        return self._shards.lengths

    def stored_lengths(self, key: str) -> np.ndarray | None:
        """Returns the length of the leaf ``key`` of each record, if manifests list them; see ``StoredLengths``."""
        found = lengths_by_file(self._shards.manifests, key)
        parts = [found.get(name) for name in self.file_names()]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]

    def file_of(self, record_id: int) -> str:
        """Returns the path or URL of the file that contains a record."""
        return self._shards.files[int(np.searchsorted(self._shards.ends, record_id, side="right"))].path

    def file_names(self) -> list[str]:
        """Returns the paths and URLs of the files, in record id order."""
        return [file.path for file in self._shards.files]

    def cached_files(self, record_ids: np.ndarray) -> list[RemoteFile] | None:
        """Returns the files of these records, int64[n], that a cache fetches ahead; None if no file is read through one."""
        if self._cache is None or not self._cache.ahead_bytes or not self._has_copies:
            return None
        # Here, since it takes 10 ms, which a start without a cache does not pay.
        from meshfeed._src.sources.files.shard_cache import RemoteFile

        numbers = np.unique(np.searchsorted(self._shards.ends, record_ids, side="right"))
        files = [self._shards.files[number] for number in numbers]
        return [
            RemoteFile(self._cache, file.path, file.compression, _copy_bytes(file, self._cache), file.num_bytes)
            for file in files
            if file.is_cached
        ]

    def _identity_of_files(self) -> JsonValue:
        """Returns the identity of the files: count, total bytes, digest of base names and sizes in order."""
        return file_paths.identify_files(self.file_names(), [file.num_bytes for file in self._shards.files])

    def _with_content(
        self,
        identity: dict[str, JsonValue],
        digest: Callable[[np.ndarray], str],
        settings: JsonValue = None,
        field: str = "content",
    ) -> dict[str, JsonValue]:
        """Returns ``identity`` with the digest of four records spread over the source.

        Args:
          identity: what identifies the source without reading.
          digest: maps ids, int64[n], to the digest of these records.
          settings: what else the digest depends on.
          field: the field of the digest.
        """

        def probe() -> str:
            return probe_digest(len(self), digest)

        files = self._shards.files
        if not all(is_url(file.path) for file in files):  # each host may have its own disk
            return {**identity, field: probe()}
        listing = [[file.path, file.num_bytes, file.version, file.digest] for file in files]
        key = digest_of([identity, settings, listing, self._shards.lengths.tolist()])
        return {**identity, field: probe_once(key, probe)}

    def _by_range(self, record_ids: np.ndarray) -> Self:
        """Returns a source that reads these records by range instead of through the cache; this one if it does not pay.

        For a few records that identify the source: their files would be fetched whole, and be evicted before they are
        used. The source that is returned reads no other records.
        """
        numbers = np.unique(np.searchsorted(self._shards.ends, record_ids, side="right")).tolist()
        files, cache = [self._shards.files[number] for number in numbers], self._cache
        if cache is None or not all(is_url(file.path) and self._has_ranges(file) for file in files):
            return self
        if all(cache.is_cached(file.path) for file in files):
            return self
        chosen = dict(zip(numbers, files, strict=True))
        found = copy.copy(self)
        # With the version of the store in place of the cache's key, with which answers are compared.
        shards = [
            dataclasses.replace(file, version=cache.version_of(file.path)) if number in chosen else file
            for number, file in enumerate(self._shards.files)
        ]
        found._shards = Shards(shards, "", self._shards.manifests, self._shards.lengths)
        found._cache, found._is_direct = None, True
        return found

    def _has_ranges(self, file: S) -> bool:
        """Whether records of a remote file can be read by range."""
        return file.compression is None

    def _fetch_together(self, files: Sequence[S], open_file: Callable[[S], object]) -> None:
        """Opens the files of a batch that are not open yet, in parallel if a cache has to fetch them."""

        # Otherwise each file would wait for the download of the one before.
        def fetch(file: S) -> None:
            with contextlib.suppress(CorruptDataError):  # perhaps only of the copy, which the read fetches again
                open_file(file)

        if self._cache is not None and len(files) > 1:
            file_paths.in_threads(fetch, [file for file in files if not self._pool.is_open(file)])

    def _read_again_if_damaged(self, read: Callable[[], T], file: S) -> T:
        """Returns ``read()``; if a cached copy is damaged, fetches the file again and retries, once per process."""
        try:
            return read()
        except CorruptDataError:
            if self._cache is None or not file.is_cached or file.key in self._pool.damaged:
                raise
        self._pool.drop([file])
        self._cache.discard(file.path, compression=file.compression)
        try:
            return read()
        except CorruptDataError:  # so in the store: with SkipBad, each read of the record would fetch the file
            self._pool.damaged.add(file.key)
            raise

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        self._pool.drop(self._shards.files)


def _copy_bytes(file: Shard, cache: ShardCache) -> int:
    """Returns the size of a copy in bytes; of an unknown one, that of the stored file if the cache has looked it up, or 0."""
    stored = None if file.num_bytes else cache.looked_up(file.path)
    return file.num_bytes if stored is None else stored.num_bytes


class ShardReader(ShardSource[S], Generic[S, T]):
    """A source that reads one file after the other, or byte ranges of many files at once.

    Args:
      shards: see :class:`ShardSource`.
      cache: see :class:`ShardSource`.
      check: checks a file once, when it is first read, through the cache if it is not None. Returns what the source keeps of
        it, and the number of 8-byte entries that this holds in memory.
    """

    def __init__(
        self,
        shards: Shards[S],
        cache: ShardCache | None,
        check: Callable[[S, OpenFile, ShardCache | None], tuple[T, int]],
    ) -> None:
        super().__init__(shards, cache)
        self._check = check

    def _read(self, record_ids: np.ndarray | Sequence[int], read_rows: ReadRows[S, T, R]) -> list[R]:
        """Reads records, int64[n], in any order, with repeats allowed; ``read_rows`` reads those of one file.

        Raises:
          IndexError: if an id is not in [0, len).
          CorruptDataError: if a file is damaged, also after it was fetched again.
          SourceError: if a file has been removed or changed since the source was created.
        """
        parts = self._parts(record_ids)
        return _in_order(parts, self._read_parts(parts, read_rows))

    def _parts(self, record_ids: np.ndarray | Sequence[int]) -> list[FilePart]:
        """Returns the parts of a batch, one per file."""
        shards, ids = self._shards, self._shards.checked(record_ids)
        if len(shards.files) == 1:
            return [FilePart(0, ids, np.arange(len(ids)))] if ids.size else []
        which = np.searchsorted(shards.ends, ids, side="right")
        order = np.argsort(which, kind="stable")
        sorted_files, rows = which[order], (ids - shards.starts[which])[order]
        edges = np.flatnonzero(sorted_files[1:] != sorted_files[:-1]) + 1
        # Not group_by, with which rows would be taken file by file: a third slower, with many files.
        return [
            FilePart(int(sorted_files[low]), rows[low:high], order[low:high])
            for low, high in itertools.pairwise([0, *edges.tolist(), len(ids)])
            if low < high
        ]

    def _read_parts(self, parts: Sequence[FilePart], read_rows: ReadRows[S, T, R]) -> Iterable[Sequence[R]]:
        """Returns what ``read_rows`` returns for each part; for arguments and errors, see :meth:`_read`."""
        self._fetch_together([self._shards.files[part.number] for part in parts], self._checked)
        read_all = file_paths.in_threads if self._is_direct else map
        return read_all(lambda part: self._read_file(part.number, part.rows, read_rows), parts)

    def _read_by_spans(
        self, record_ids: np.ndarray | Sequence[int], spans_of: SpansOf[T], build: Build[S, T, R]
    ) -> list[R]:
        """As :meth:`_read`, for records that are byte ranges of their files; of remote files without a cache, all at once."""
        parts = self._parts(record_ids)
        may_wait = len(record_ids) > 1 and not self._is_direct

        def read_rows(file: Checked[S, T], rows: np.ndarray, first: int) -> Sequence[R]:
            nonlocal may_wait
            opened, (starts, stops) = file.open(), spans_of(file.index, rows)
            if may_wait and isinstance(opened, Descriptor) and not opened.is_cached(int(starts[0])):
                fetch_ahead(self._ranges(parts, spans_of))
            may_wait = False  # the first range tells
            return build(file, rows, first, read_spans(opened, starts, stops))

        if not self._is_direct:
            return _in_order(parts, self._read_parts(parts, read_rows))
        # One request for each file in turn would cost a round trip per file.
        remote = [part for part in parts if is_url(self._shards.files[part.number].path)]
        local = [part for part in parts if not is_url(self._shards.files[part.number].path)]
        checked = file_paths.in_threads(lambda part: self._checked(self._shards.files[part.number]), remote)
        ranges = [
            ByteRange(self._shards.files[number].remote, start, stop)
            for file, (number, rows, _) in zip(checked, remote, strict=True)
            for start, stop in np.transpose(spans_of(file.index, rows)).tolist()
        ]
        contents = iter(read_ranges(ranges))
        built = [
            build(file, rows, int(self._shards.starts[number]), list(itertools.islice(contents, len(rows))))
            for file, (number, rows, _) in zip(checked, remote, strict=True)
        ]
        return _in_order(
            remote + local, [*built, *(self._read_file(part.number, part.rows, read_rows) for part in local)]
        )

    def _ask_disk(self, record_ids: np.ndarray, spans_of: SpansOf[T]) -> bool | None:
        """See :class:`meshfeed._src.base.hooks.ReadsDisk`; asks for records of files that have been read before."""
        if not self._is_local:
            return None
        parts = [part for part in self._parts(record_ids) if self._pool.all_checked([self._shards.files[part.number]])]
        return fetch_missing(self._ranges(parts, spans_of))

    def _ranges(self, parts: Sequence[FilePart], spans_of: SpansOf[T]) -> list[FileRanges]:
        def of_part(part: FilePart) -> tuple[Descriptor | RemoteBytes, np.ndarray, np.ndarray]:
            file = self._checked(self._shards.files[part.number])
            return (file.open(), *spans_of(file.index, part.rows))

        return [functools.partial(of_part, part) for part in parts]

    def _read_file(self, number: int, rows: np.ndarray, read_rows: ReadRows[S, T, R]) -> Sequence[R]:
        shard, first = self._shards.files[number], int(self._shards.starts[number])
        return self._read_again_if_damaged(lambda: read_rows(self._checked(shard), rows, first), shard)

    def _checked(self, shard: S) -> Checked[S, T]:
        open_file = (
            (lambda: shard.remote) if shard.is_direct(self._cache) else self._pool.descriptor(shard, self._cache)
        )

        def check() -> tuple[Checked[S, T], int]:
            index, num_entries = self._check(shard, open_file, self._cache)
            return Checked(shard, index, open_file), num_entries

        return self._pool.checked(shard, check)


class FilePart(NamedTuple):
    """The records of a batch that are in one file: its number, the rows to read, and their indices in the batch."""

    number: int
    rows: np.ndarray
    slots: np.ndarray


def _in_order(parts: Sequence[FilePart], found: Iterable[Sequence[R]]) -> list[R]:
    """Returns the records of all parts, in the order of the batch."""
    records: list[R | None] = [None] * sum(len(part.slots) for part in parts)
    for part, of_part in zip(parts, found, strict=True):
        for slot, record in zip(part.slots.tolist(), of_part, strict=True):
            records[slot] = record
    return records  # type: ignore[return-value]
