"""Parquet files as one random-access source, read by row group."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import io
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, SupportsIndex

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import CorruptDataError, SourceError, hides_own_frames
from meshfeed._src.base.groups import group_by
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.reading.identity import digest_raw
from meshfeed._src.sources.checks import chosen_columns
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import RemoteBytes, sparse_files
from meshfeed._src.sources.files.formats import compression_of
from meshfeed._src.sources.files.lookup import FileFormat, find_shards, look_at
from meshfeed._src.sources.files.manifest import FileEntry
from meshfeed._src.sources.files.manifest import damaged as damaged_manifest
from meshfeed._src.sources.files.open_files import Lru
from meshfeed._src.sources.files.parquet import ParquetFile, damaged
from meshfeed._src.sources.files.shard import Shard, inspect_copy, local_copy
from meshfeed._src.sources.files.shard_reader import Checked, OpenFile, ShardReader

if TYPE_CHECKING:
    import pyarrow as pa

    from meshfeed._src.sources.files.shard_cache import ShardCache
    from meshfeed._src.sources.huggingface.arrow import ColumnRows, Where

_TAIL_BYTES = 1 << 18  # the footer of most files, in one request
_PADDING_BYTES = 100  # Arrow reads so far beyond a column chunk, whose size lacks a header in files of old writers
_MAX_GROUP_BYTES = 512 << 20
_MAX_GROUPS = 1 << 16
_MAGIC = b"PAR1"


@dataclasses.dataclass(frozen=True)
class ParquetShard(Shard):
    """One Parquet file as it was when the source was created, with the serialized Arrow schema of its columns."""

    source: ClassVar[str] = "Parquet"
    schema: bytes = dataclasses.field(repr=False, compare=False)

    def details(self) -> dict[str, JsonValue]:
        return {"schema": base64.b64encode(self.schema).decode()}

    @classmethod
    def from_details(cls, entry: FileEntry, manifest: str) -> dict[str, Any]:
        return {"schema": base64.b64decode(entry.details["schema"])}


@dataclasses.dataclass(frozen=True)
class _CheckedFile:
    """A file, its footer, and int64[row groups], the row after the last one of each group."""

    shard: ParquetShard
    metadata: Any
    group_ends: np.ndarray


class _Group:
    """A decoded row group, with readers of its columns that are made once. Thread-safe: two threads make equal readers.

    Args:
      table: its rows, in one chunk.
      first_row: number of its first row in the file.
    """

    def __init__(self, table: pa.Table, first_row: int) -> None:
        self.table = table
        self.first_row = first_row

    @functools.cached_property
    def columns(self) -> dict[str, ColumnRows]:
        """Name → reader.

        Raises:
          SourceError: a column has no array form.
        """
        from meshfeed._src.sources.huggingface.arrow import ColumnRows, usable_columns

        usable = usable_columns(self.table.schema)
        columns = zip(self.table.column_names, self.table.columns, strict=True)
        return {name: ColumnRows(name, column.chunks, column.type, usable) for name, column in columns}

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray | None]:
        """Name → all rows, or None for columns whose rows :attr:`columns` must check or convert."""
        return {name: column.whole() for name, column in self.columns.items()}


class _Piece(NamedTuple):
    """The records of a batch that are in one row group: the rows there, and their indices in the batch."""

    group: _Group
    rows: np.ndarray
    slots: np.ndarray


class _DecodedGroups:
    """Decoded row groups of all sources of the process, the least recently used dropped first. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._groups: Lru[tuple[str, int, tuple[str, ...]], _Group] = Lru(lambda: _MAX_GROUPS, max_bytes)
        self._renew_locks()
        os.register_at_fork(after_in_child=self._renew_locks)  # no thread there would release them

    def _renew_locks(self) -> None:
        # One lock would let threads decode different groups only one after the other.
        self._locks = [threading.Lock() for _ in range(64)]

    def get(self, file: _CheckedFile, group: int, columns: tuple[str, ...], cache: ShardCache | None) -> _Group:
        """Returns a row group, and decodes it if it is not in memory; threads that need the same group wait for it."""
        key = (file.shard.key, group, columns)
        with self._locks[hash(key) % len(self._locks)]:
            return self._groups.get(key, lambda: _decode_group(file, group, columns, cache))


_decoded = _DecodedGroups(_MAX_GROUP_BYTES)


@public("meshfeed.sources")
class Parquet(ShardReader[ParquetShard, _CheckedFile]):
    """Random-access source over the rows of Parquet files, concatenated in file order.

    A record is a dict of columns. A feed stacks numbers, booleans, lists of one length and structs of them; for text and
    ragged lists, use :class:`meshfeed.sources.Map` or leave the columns out.

    A row group is decoded as a whole when one of its rows is needed. Decoded groups are kept in memory, 512 MiB for all
    sources of the process. Rows of a shuffled batch come from many groups: pass ``shuffle=`` the number of rows of a few
    row groups, or write small groups.

    Safe to read from several threads. A source can be pickled, without its decoded groups.

    Args:
      paths: a path, a glob (expanded in order of name), a URL supported by fsspec, or a list of these. The order of the
        files determines the record ids.
      columns: names of the columns to read; None for all.
      cache: cache on a local disk; required for compressed files (``.parquet.gz``). Without it, the columns of remote row
        groups are read as byte ranges.

    Raises:
      SettingsError: if there is a compressed file and no cache.
      SourceError: if there are no files, a file is missing, files have different columns, there is no such column or no
        record, or pyarrow is not installed.
      CorruptDataError: if a file is empty, truncated or in a different format; names the file.

    Examples:
      >>> import pyarrow as pa, pyarrow.parquet as pq
      >>> from meshfeed.sources import Parquet
      >>> pq.write_table(pa.table({"id": [7, 8, 9], "text": ["a", "b", "c"]}), "a.parquet")
      >>> Parquet("a.parquet", columns=["id"]).read_batch([2, 0])["id"].tolist()
      [9, 7]
    """

    fresh_arrays = True

    @hides_own_frames
    def __init__(
        self,
        paths: file_paths.Paths,
        columns: Sequence[str] | None = None,
        *,
        cache: ShardCache | None = None,
    ) -> None:
        form = FileFormat("Parquet", lambda name: inspect(name, cache), ParquetShard.from_entry)
        shards = find_shards(paths, cache, form)
        self._types = _choose(shards.files, columns)
        self._columns = tuple(self._types)
        super().__init__(shards, cache, self._check_footer)

    def __getitem__(self, record_id: SupportsIndex) -> dict[str, Any]:
        """Returns record ``record_id``: column name → value."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Returns several records, in the order of ``record_ids``.

        Numbers are numpy scalars and lists of numbers are arrays; other values are Python objects.

        Raises:
          IndexError: if an id is not in [0, len).
          CorruptDataError: if a file is damaged; names it.
        """
        ids = np.asarray(record_ids, np.int64)
        found: list[dict[str, Any]] = [{}] * len(ids)
        for group, rows, slots in self._pieces(ids):
            columns = {name: group.table.column(name) for name in self._columns}
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
                found[slot] = {name: _plain(column[row]) for name, column in columns.items()}
        return found

    def read_batch(self, record_ids: np.ndarray | Sequence[int]) -> dict[str, PyTree]:
        """Reads records as stacked arrays.

        Args:
          record_ids: int64[n], n at least 1, in any order, with repeats allowed.

        Returns:
          Column name → new array ``[n, ...]``, or a dict of arrays for a struct.

        Raises:
          IndexError: if an id is not in [0, len).
          SourceError: if a column is text, or holds nulls or lists of different lengths; names it and the record.
          CorruptDataError: if a file is damaged; names it.
        """
        ids = np.asarray(record_ids, np.int64)
        pieces = self._pieces(ids)
        if len(pieces) == 1:  # perhaps without a copy
            group, rows, _ = pieces[0]
            return {name: column.read(rows, _named(ids)) for name, column in group.columns.items()}
        return {name: _gather(pieces, name, ids) for name in pieces[0].group.columns}

    def check_records(self) -> None:
        """Checks that all columns have an array form.

        Raises:
          SourceError: a column has none, such as text; names it.
        """
        from meshfeed._src.sources.huggingface.arrow import check_types

        check_types(self._types)

    def stored_keys(self, key: str) -> Iterator[object] | None:
        """Returns a column of text, bytes or ints; reads no other column. See ``hooks.StoredKeys``."""
        import pyarrow as pa

        kind = self._types.get(key)
        if kind is None or pa.types.is_nested(kind):
            return None
        return (value for column in self._column(key) for value in column.to_pylist())

    def stored_lengths(self, key: str) -> np.ndarray | None:
        """Returns the length of each list of a column, from a manifest or by reading the column; see ``StoredLengths``."""
        import pyarrow as pa
        import pyarrow.compute as pc

        listed, kind = super().stored_lengths(key), self._types.get(key)
        if listed is not None or kind is None or not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            return listed
        lengths = [pc.list_value_length(column) for column in self._column(key)]  # type: ignore[attr-defined]
        if any(part.null_count for part in lengths):
            return None  # reading names the record
        return np.concatenate([part.to_numpy() for part in lengths])

    def _column(self, name: str) -> Iterator[pa.ChunkedArray]:
        """Yields a column of all row groups in order."""
        for shard in self._shards.files:
            file = self._checked(shard).index
            for group in np.flatnonzero(np.diff(file.group_ends, prepend=0)).tolist():  # some writers leave empty ones
                yield _decode_group(file, group, (name,), self._cache)[0].table.column(name)

    @staticmethod
    def _check_footer(shard: ParquetShard, _open_file: OpenFile, cache: ShardCache | None) -> tuple[_CheckedFile, int]:
        direct = shard.is_direct(cache)
        with contextlib.ExitStack() as stack:
            path = "" if direct else stack.enter_context(local_copy(shard, cache))[0]
            file = stack.enter_context(_open_footer(shard.remote) if direct else ParquetFile(path))
            ends = np.cumsum(file.group_rows, dtype=np.int64)
            found = file.metadata.num_rows
            if len(ends) and ends[-1] != found:
                raise damaged(shard.path, f"its row groups have {ends[-1]:,} rows, and its footer {found:,}")
            if found != shard.num_records:
                change = f"{shard.num_records:,} rows then, {found:,} now"
                raise file_paths.changed(f"the Parquet file {shard.path}", change, shard.manifest)
            return _CheckedFile(shard, file.metadata, ends), file.metadata.serialized_size // 8

    def _pieces(self, record_ids: np.ndarray) -> list[_Piece]:
        """Returns the records of a batch, by row group."""
        parts = self._parts(record_ids)
        found = zip(parts, self._read_parts(parts, self._read_groups), strict=True)
        return [_Piece(group, rows, part.slots[slots]) for part, pieces in found for group, rows, slots in pieces]

    def _read_groups(
        self, checked: Checked[ParquetShard, _CheckedFile], rows: np.ndarray, first_record_id: int
    ) -> list[_Piece]:
        """Reads rows of one file, as pieces with indices in ``rows``."""
        file = checked.index

        def read(found: tuple[int, np.ndarray]) -> _Piece:
            number, slots = found
            try:
                group = _decoded.get(file, number, self._columns, self._cache)
            except CorruptDataError as error:
                record_id = first_record_id + int(rows[slots[0]])
                message = f"record {record_id}: {error}"
                raise CorruptDataError(message, path=file.shard.path, record_id=record_id) from error
            return _Piece(group, rows[slots] - group.first_row, slots)

        read_all = file_paths.in_threads if self._is_direct else map
        return list(read_all(read, group_by(np.searchsorted(file.group_ends, rows, side="right"))))

    def fingerprint(self) -> JsonValue:
        """Returns the identity: files, columns, number of records, and a digest of 4 records spread over the source."""
        identity = {
            "kind": "parquet",
            "files": self._identity_of_files(),
            "columns": list(self._columns),
            "records": len(self),
        }
        return self._with_content(identity, self._digest)

    def _digest(self, record_ids: np.ndarray) -> str:
        source = self._by_range(record_ids)
        found: list[bytes] = [b""] * len(record_ids)
        for group, rows, slots in source._pieces(record_ids):
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
                found[slot] = repr(group.table.slice(row, 1).to_pylist()).encode()
        return digest_raw(found)


def inspect(name: str, cache: ShardCache | None) -> ParquetShard:
    """Counts the rows of a file from its footer, without fetching the rest of a remote one."""
    if cache is not None and compression_of(name):
        return inspect_copy(name, cache, lambda copy: inspect(copy, None))
    opened, version = look_at(name, cache, source="Parquet", part=slice(-_TAIL_BYTES, None))
    with _open_footer(opened) if isinstance(opened, RemoteBytes) else ParquetFile(name) as file:
        schema = file.schema.remove_metadata().serialize().to_pybytes()
        return ParquetShard(name, opened.num_bytes, version, file.metadata.num_rows, schema)


def _open_footer(file: RemoteBytes) -> ParquetFile:
    """Opens a file that has the footer of a remote one and no rows."""
    url, num_bytes = file.url, file.num_bytes
    start = max(0, num_bytes - _TAIL_BYTES)
    tail = file.read(start, num_bytes)
    length = 8 + int.from_bytes(tail[-8:-4], "little")
    if tail[-4:] != _MAGIC or length > num_bytes:
        raise damaged(url, f"{num_bytes:,} bytes that do not end in a footer")
    if length > len(tail):
        tail = file.read(num_bytes - length, start) + tail
    return ParquetFile(url, stream=io.BytesIO(_MAGIC + tail[-length:]))


def _choose(shards: Sequence[ParquetShard], columns: Sequence[str] | None) -> dict[str, pa.DataType]:
    """Returns the columns to read and their types, and checks that all files have them."""
    filled = [shard for shard in shards if shard.num_records]  # writers guess the types of a file without rows
    schemas = {shard.schema: shard for shard in reversed(filled)}
    stored = {shard.path: _read_schema(shard) for shard in schemas.values()}
    first = stored[filled[0].path]
    chosen = chosen_columns(columns, first.names, "Parquet", filled[0].path)
    for path, schema in stored.items():
        twice = next((name for name in chosen if schema.names.count(name) > 1), None)
        if twice is not None:
            others = [name for name in first.names if schema.names.count(name) == 1]
            raise SourceError(
                f"Parquet: {path} has several columns named {twice!r}. Expected names that differ. Write the file again, or "
                f"leave these columns out: columns={others!r}."
            )
        for name in chosen:
            other = schema.field(name).type if name in schema.names else "no such column"
            if other != first.field(name).type:
                raise SourceError(
                    f"Parquet got files with different columns: {name!r} is {first.field(name).type} in {filled[0].path}, "
                    f"and {other} in {path}. Expected the same in all files. Leave the column or the file out, or write "
                    "the file again."
                )
    return {name: first.field(name).type for name in chosen}


def _read_schema(shard: ParquetShard) -> pa.Schema:
    import pyarrow as pa

    try:
        return pa.ipc.read_schema(pa.py_buffer(shard.schema))
    except (pa.ArrowException, OSError) as error:  # that of a file was checked; a manifest may list any bytes
        raise damaged_manifest(shard.manifest, f"it lists {shard.path} with no schema ({error})") from error


def _decode_group(
    file: _CheckedFile, group: int, columns: tuple[str, ...], cache: ShardCache | None
) -> tuple[_Group, int]:
    """Returns a decoded row group and its size in bytes."""
    import pyarrow as pa

    stop = int(file.group_ends[group])
    start = int(file.group_ends[group - 1]) if group else 0
    with _local_group(file, group, columns, cache) as path, ParquetFile(path, metadata=file.metadata) as opened:
        opened.path = file.shard.path  # in errors
        batches = [batch for _, batch in opened.batches(start, stop, columns, batch_rows=stop - start)]
    # Selected, since pyarrow takes "a.b" for a field of "a" too.
    table = pa.Table.from_batches(batches).select(columns).combine_chunks()
    return _Group(table, start), table.nbytes


@contextlib.contextmanager
def _local_group(file: _CheckedFile, group: int, columns: tuple[str, ...], cache: ShardCache | None) -> Iterator[str]:
    """Yields the path of a local file that has the columns of a row group at their offsets."""
    if not file.shard.is_direct(cache):
        with local_copy(file.shard, cache) as (path, _):
            yield path
        return
    # Not through fsspec's files, which Arrow can read: they do not compare the version, and wait for one range at a time.
    stored = file.metadata.row_group(group)
    chunks = [stored.column(number) for number in range(stored.num_columns)]
    wanted = [chunk for chunk in chunks if chunk.path_in_schema.startswith(tuple(f"{name}." for name in columns))
              or chunk.path_in_schema in columns]  # fmt: skip
    starts = np.array([chunk.dictionary_page_offset or chunk.data_page_offset for chunk in wanted])
    stops = starts + [chunk.total_compressed_size + _PADDING_BYTES for chunk in wanted]
    remote = file.shard.remote
    [copy] = sparse_files([remote], np.zeros(len(wanted), np.int64), starts, np.minimum(stops, remote.num_bytes))
    yield f"/proc/self/fd/{copy.number}"


def _named(record_ids: np.ndarray) -> Callable[[int], Where]:
    """Returns what errors of a read of these records call the i-th one."""
    return lambda i: {"record_id": int(record_ids[i])}


def _gather(pieces: Sequence[_Piece], name: str, ids: np.ndarray) -> PyTree:
    """Stacks a column of several row groups."""
    arrays = [piece.group.arrays[name] for piece in pieces]
    plain = [array for array in arrays if array is not None]
    if len(plain) < len(arrays) or len({array.shape[1:] for array in plain}) > 1:
        stacked: PyTree = {}
        for group, rows, slots in pieces:
            part = group.columns[name].read(rows, _named(ids[slots]))
            stacked = _place(stacked, {name: part}, slots, ids)
        return stacked[name]
    # By row group first, since numpy copies rows to adjacent places in half the time, and then in the order of the batch.
    by_group = np.empty((len(ids), *plain[0].shape[1:]), plain[0].dtype)
    start = 0
    for array, (_, rows, _) in zip(plain, pieces, strict=True):
        stop = start + len(rows)
        np.take(array, rows, axis=0, out=by_group[start:stop], mode="clip")  # without mode=, through another copy
        start = stop
    out = memory.empty(by_group.shape, by_group.dtype)
    out[np.concatenate([piece.slots for piece in pieces])] = by_group
    return out


def _place(
    stacked: Mapping[str, PyTree], part: Mapping[str, PyTree], places: np.ndarray, ids: np.ndarray
) -> dict[str, PyTree]:
    """Copies the rows of one group to their places in the batch."""
    found: dict[str, PyTree] = dict(stacked)
    for name, rows in part.items():
        if isinstance(rows, Mapping):
            found[name] = _place(found.get(name, {}), rows, places, ids)
            continue
        if name not in found:
            found[name] = memory.empty((len(ids), *rows.shape[1:]), rows.dtype)
        if found[name].shape[1:] != rows.shape[1:]:
            raise SourceError(
                f"ragged rows: column {name!r} has the shape {list(rows.shape[1:])} in record {int(ids[places[0]]):,}, and "
                f"{list(found[name].shape[1:])} in another record of the same batch. Expected equally long lists. Pad or "
                "cut them with meshfeed.sources.Map, or pack them.",
                record_id=int(ids[places[0]]),
            )
        found[name][places] = rows
    return found


def _plain(value: Any) -> Any:
    """Returns a value of Arrow as a numpy scalar or array if it is a number or a list of numbers without nulls."""
    import pyarrow as pa

    kind = value.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return None if not value.is_valid else np.dtype(kind.to_pandas_dtype()).type(value.as_py())
    if hasattr(kind, "value_type") and hasattr(value, "values") and value.is_valid:
        inner = kind.value_type
        if value.values.null_count:  # numpy would make floats and NaN of integers and nulls
            return value.as_py()
        if pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner):
            return value.values.to_numpy(zero_copy_only=False)
    return value.as_py()
