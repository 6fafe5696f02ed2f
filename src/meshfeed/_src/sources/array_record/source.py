"""ArrayRecord files as one random-access source, read in batches."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import CorruptDataError, SettingsError, hides_own_frames
from meshfeed._src.base.types import Decode, DecodeBatch, JsonValue, Record, RecordIds, public
from meshfeed._src.reading.identity import digest_raw, probe_digest
from meshfeed._src.sources.array_record import readers
from meshfeed._src.sources.array_record.readers import (
    OpenFile,
    ShardFile,
    inspect,
    need_single_records,
    open_ahead,
    open_remote,
    readers_of,
)
from meshfeed._src.sources.array_record.rows import common_width, read_by_library, read_direct, read_into
from meshfeed._src.sources.decode import refuse_as_decode
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import READ_THREADS
from meshfeed._src.sources.files.lookup import FileFormat, find_shards
from meshfeed._src.sources.files.shards import (
    Shards,
    fetch_together,
    read_again_if_damaged,
    shared_pool,
)

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import RemoteFile, ShardCache


@public("meshfeed.sources")
class ArrayRecord:
    """Random-access source over the records of ArrayRecord files, concatenated in file order.

    Files are opened on first use, and a bounded number stays open. A source can be pickled, without its open files. Safe
    to read from several threads.

    Args:
      paths: a path, a glob (expanded in order of name), a URL supported by fsspec, or a list of these. The order of the
        files determines the record ids.
      decode: converts the bytes of one record to a pytree of arrays. May take ``rng=``.
      decode_batch: converts a list of n records (bytes) to a pytree of arrays ``[n, ...]``. May take ``rng=``. For
        records of one size, ``numpy.frombuffer(b"".join(records), dtype).reshape(len(records), -1)`` is far faster
        than decoding one by one. Arrays returned by either function are copied before its next call, so it may reuse
        them; views of ``bytes``, as in this example, are not copied.
      cache: cache on a local disk. Without it, remote records are read as byte ranges, from files of one record per
        chunk.

    Raises:
      SettingsError: if both decoders are given, or without a cache a URL of a file of several records per chunk.
      SourceError: if there are no files, a file is missing, or all files are empty; names the path or pattern.
      CorruptDataError: if a file is empty, truncated or in a different format; names the file.
    """

    fresh_arrays = True

    @hides_own_frames
    def __init__(
        self,
        paths: file_paths.Paths,
        decode: Decode | None = None,
        decode_batch: DecodeBatch | None = None,
        *,
        cache: ShardCache | None = None,
    ) -> None:
        if decode is not None and decode_batch is not None:
            raise SettingsError(
                "ArrayRecord got both decode and decode_batch. Expected one of them: decode for one record's bytes, "
                "decode_batch for a list of them.",
                setting="decode_batch",
            )
        refuse_as_decode(decode, "ArrayRecord")
        for name, function in (("decode", decode), ("decode_batch", decode_batch)):
            if function is not None and not callable(function):
                raise SettingsError(
                    f"ArrayRecord got {name}={function!r}. Expected a function of "
                    f"{'one record (bytes)' if name == 'decode' else 'a list of records (bytes)'} that gives arrays.",
                    setting=name,
                )
        self.decode = decode
        self.decode_batch = decode_batch
        self._cache = cache
        form = FileFormat("ArrayRecord", lambda name: inspect(name, cache), ShardFile.describe, ShardFile.from_entry)
        self._set_shards(find_shards(paths, cache, form))

    def _set_shards(self, shards: Shards[ShardFile]) -> None:
        self._shards = shards
        self._one_record_a_chunk = all(file.group_size == 1 for file in shards.files)
        remote = [file_paths.is_url(file.path) for file in shards.files]
        self._is_direct = self._cache is None and any(remote)
        if self._is_direct and not all(remote):
            raise SettingsError(
                "ArrayRecord got local files and URLs, and no cache. Pass cache=meshfeed.ShardCache(directory, max_bytes=…), "
                "or join two sources with meshfeed.sources.Mixture.",
                setting="cache",
            )
        if self._is_direct:
            need_single_records(shards.files)
        self._rows_differ = False  # known once read_rows finds records of different sizes
        self._pool = shared_pool

    def concatenate(self, others: Sequence[object]) -> ArrayRecord | None:
        """Returns one source over the records of this source followed by those of ``others``.

        A read of the result costs one call for all of them. None if they do not read and decode alike.
        """
        sources = [self]
        for other in others:
            if type(other) is not type(self) or other.__dict__.keys() != self.__dict__.keys():
                return None  # a subclass, or a method replaced on the instance, may read differently
            alike = (self.decode, self.decode_batch, self._cache, self._is_direct)
            if (other.decode, other.decode_batch, other._cache, other._is_direct) != alike:
                return None
            sources.append(other)
        joined = copy.copy(self)
        files = [file for source in sources for file in source._shards.files]
        manifests = dict.fromkeys(path for source in sources for path in source._shards.manifests)
        joined._set_shards(Shards(files, "ArrayRecord", tuple(manifests)))
        return joined

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_pool"]  # open files and locks belong to the process
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pool = shared_pool

    def __repr__(self) -> str:
        return f"ArrayRecord({self._shards!r})"

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, record_id: Any) -> Record:
        """Returns record ``record_id``, decoded; its bytes if the source has no decoder."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[Record]:
        """Returns several decoded records, in the order of ``record_ids``."""
        raw = self.read_raw(np.asarray(record_ids, np.int64))
        if self.decode is not None:
            return [self.decode(record) for record in raw]
        if self.decode_batch is not None and raw:
            batch = self.decode_batch(raw)
            return [jax.tree.map(lambda leaf, row=row: leaf[row], batch) for row in range(len(raw))]
        return list(raw)

    def read_raw(self, record_ids: np.ndarray | Sequence[int]) -> list[bytes]:
        """Reads records without decoding them.

        Args:
          record_ids: int64[n], in any order, with repeats allowed.

        Returns:
          The bytes of n records, in the order of ``record_ids``.

        Raises:
          IndexError: if an id is not in [0, len).
          CorruptDataError: if stored bytes are damaged; names the file and the record.
          SourceError: if a file has been removed or changed since the source was created.
          OSError: if a file cannot be read.
        """
        ids = self._shards.checked(record_ids)
        records = [b""] * len(ids)
        for files, file_index, rows, slots in self._shards.parts(ids):
            found = self._read_part(files, file_index, rows)
            if slots is None:
                return found
            for slot, record in zip(slots.tolist(), found, strict=True):
                records[slot] = record
        return records

    def read_rows(self, record_ids: np.ndarray | Sequence[int]) -> np.ndarray | None:
        """Reads records of one size into one array without holding the GIL.

        Supports local files with one record per chunk, uncompressed or zstd, if the C extension is installed.

        Args:
          record_ids: int64[n], in any order, with repeats allowed.

        Returns:
          A new uint8 array ``[n, bytes per record]``, aligned to 64 bytes; or None if a file has several records per
          chunk, or the records differ in size, cannot be read this way, or are damaged. :meth:`read_raw` then reads the
          records or reports the error.

        Raises:
          IndexError, SourceError: as for :meth:`read_raw`.
        """
        if self._rows_differ or not self._one_record_a_chunk or readers.riegeli is None:  # avoid a futile attempt
            return None
        ids = self._shards.checked(record_ids)
        out: np.ndarray | None = None
        for numbers, file_index, rows, slots in self._shards.parts(ids):
            try:
                opened = self._open(numbers, file_index, rows)
            except CorruptDataError:  # perhaps only the cached copy: read_raw fetches it again
                return None
            files = [file.direct for file in opened if file.direct is not None]
            if len(files) < len(opened):
                return None
            width = common_width(files)
            if not width or (out is not None and out.shape[1] != width):
                self._rows_differ = True
                return None
            if out is None:
                out = memory.empty((len(ids), width), np.uint8)
            places = (np.arange(len(ids)) if slots is None else slots) * width
            if not read_into(files, file_index, rows, places, out.reshape(-1), width=width):
                return None
        return out

    def _open(self, numbers: list[int], file_index: np.ndarray | None, rows: np.ndarray) -> list[OpenFile]:
        files = [self._shards.files[number] for number in numbers]
        if self._is_direct:
            return open_remote(files, file_index, rows, self._pool)
        if self._cache is not None:
            fetch_together(files, self._cache, self._pool, lambda file: open_ahead(file, self._cache, self._pool))
        return self._pool.all_checked(files) or [readers_of(file, self._cache, self._pool) for file in files]

    def _read_part(self, files: list[int], file_index: np.ndarray | None, rows: np.ndarray) -> list[bytes]:
        try:
            found = read_direct(self._open(files, file_index, rows), file_index, rows)
        except CorruptDataError:  # perhaps only the cached copy, which _read_file fetches again
            found = None
        if found is not None:
            return found
        if file_index is None:
            return self._read_file(files[0], rows)
        records = [b""] * len(rows)
        for number, file in enumerate(files):
            mine = np.flatnonzero(file_index == number)
            for slot, record in zip(mine.tolist(), self._read_file(file, rows[mine]), strict=True):
                records[slot] = record
        return records

    def _read_file(self, number: int, rows: np.ndarray) -> list[bytes]:
        file, first_record_id = self._shards.files[number], int(self._shards.starts[number])

        if self._is_direct:
            return [self._read_remote(file, row, first_record_id) for row in rows.tolist()]

        def read() -> list[bytes]:
            opened = readers_of(file, self._cache, self._pool)
            return read_direct([opened], None, rows) or read_by_library(opened, file, rows, first_record_id)

        return read_again_if_damaged(read, file, self._cache, self._pool)

    def _read_remote(self, file: ShardFile, row: int, first_record_id: int) -> bytes:
        """Reads one record, to find the damaged one of several."""
        rows = np.array([row])
        found = read_direct(open_remote([file], None, rows, self._pool), None, rows)
        if found is None:
            record_id = first_record_id + row
            raise CorruptDataError(
                f"{file.path}: record {record_id} is damaged: its bytes do not have the hash that was stored with them. "
                "Write or copy the file again.",
                path=file.path,
                record_id=record_id,
            )
        return found[0]

    @property
    def read_threads(self) -> int | None:
        """Threads that read by default, if remote files are read without a cache."""
        return READ_THREADS if self._is_direct else None

    def shard_lengths(self) -> RecordIds:
        """Returns the number of records of each file, int64[files]."""
        return self._shards.lengths

    def stored_lengths(self, key: str) -> np.ndarray | None:
        """Returns the length of the leaf ``key`` of each record, if a manifest lists them."""
        return self._shards.stored_lengths(key)

    def file_of(self, record_id: int) -> str:
        """Returns the path or URL of the file that contains a record."""
        return self._shards.file_of(record_id)

    def file_names(self) -> list[str]:
        """Returns the paths and URLs of the files, in record id order."""
        return self._shards.names()

    def fingerprint_files(self) -> JsonValue:
        """Returns the identity of the files: count, total bytes, digest of base names and sizes in order."""
        return self._shards.identity()

    def cached_files(self, record_ids: np.ndarray) -> list[RemoteFile] | None:
        """Returns the files that hold these records, int64[n], and are read through the cache; reads nothing."""
        return self._shards.cached_files(record_ids, self._cache)

    def fingerprint(self) -> JsonValue:
        """Returns the identity: files, number of records, and a digest of 4 records spread over the source."""
        return {
            "kind": "array_record",
            "files": self.fingerprint_files(),
            "records": len(self),
            "content": probe_digest(len(self), lambda ids: digest_raw(self.read_raw(ids))),
        }

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        self._pool.drop(self._shards.files)
