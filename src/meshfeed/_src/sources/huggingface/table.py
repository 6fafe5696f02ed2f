"""Map-style Hugging Face datasets as random-access sources."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, Unpack, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from datasets.table import MemoryMappedTable

from meshfeed._src.base import memory, trees
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.ownership import own_record
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.reading.identity import probe_digest
from meshfeed._src.sources.checks import check_ids
from meshfeed._src.sources.huggingface.arrow import (
    ColumnRows,
    Dtypes,
    Where,
    chosen,
    dtypes_of,
    record_to_numpy,
    stored_values,
    usable_columns,
    value_to_numpy,
)
from meshfeed._src.sources.huggingface.internals import function_name, require_decoding, row_indices

_ROWS_PER_READ = 4096
_PLAIN = ("builtins", "datetime", "decimal")  # modules of the classes of values that stay Python objects


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


class _Records:
    """What both kinds of map-style dataset share."""

    _dataset: Dataset

    def __repr__(self) -> str:
        return f"HuggingFace({len(self):,} records)"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, record_id: SupportsIndex) -> dict[str, Any]:
        """Record ``record_id``; see ``__getitems__``."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[dict[str, Any]]:
        raise NotImplementedError

    def read_stored(self, record_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Reads records as they are stored; see :class:`StoredRows`."""
        raise NotImplementedError

    def fingerprint(self) -> JsonValue:
        """Identity of the data."""
        raise NotImplementedError

    def unconverted(self) -> StoredRows:
        """Returns the records as they are stored, or as a transform makes them: text as str, and lists of any length."""
        return StoredRows(self)


class StoredRows(_Records):
    """Records of a ``datasets.Dataset`` as they are stored, for functions that turn them into arrays.

    Numbers are numpy scalars and lists of numbers are arrays; text, nulls and all else are Python objects. The identity
    is that of ``source``, which converts the same records.
    """

    fresh_arrays = True

    def __init__(self, source: _Records) -> None:
        self._dataset, self.read_stored, self.fingerprint = source._dataset, source.read_stored, source.fingerprint

    def __getitems__(self, record_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Several records, in the order of ``record_ids``."""
        check_ids(record_ids, len(self), "dataset")
        return self.read_stored(record_ids) if len(record_ids) else []

    def stored_keys(self, key: str) -> Iterator[object] | None:
        """Returns a column of text, bytes or ints; reads no other column. See ``hooks.StoredKeys``."""
        columns = self._column(key)
        return None if columns is None else (value for column in columns for value in column.to_pylist())

    def stored_lengths(self, key: str) -> np.ndarray | None:
        """Returns the length of each list of a column; reads no other column. See ``hooks.StoredLengths``."""
        columns = self._column(key)
        lists = None if columns is None else [column for column in columns if _is_list(column.type)]
        lengths = [pc.list_value_length(column) for column in lists or ()]  # type: ignore[attr-defined]
        if not lengths or any(part.null_count for part in lengths):
            return None  # reading names the record
        return np.concatenate([part.to_numpy() for part in lengths])

    def _column(self, name: str) -> Iterator[pa.ChunkedArray] | None:
        """Yields a column in order; None if there is no such column, or a transform makes the records."""
        if name not in self._dataset.column_names or self._dataset.format["type"] == "custom":
            return None
        parts = self._dataset.select_columns([name]).with_format("arrow").iter(_ROWS_PER_READ)
        return (cast("pa.Table", part).column(name) for part in parts)


class HuggingFaceTable(_Records):
    """Records of a ``datasets.Dataset``, read from its Arrow table in batches.

    Integers, floats and booleans keep the column's dtype, even with ``with_format``, unless it was given a ``dtype``.
    datasets decodes image and audio columns, row by row.
    """

    fresh_arrays = True  # or views of mapped files, which datasets does not rewrite

    def __init__(self, dataset: Dataset, columns: Sequence[str]) -> None:
        self._dataset, self._columns = dataset, list(columns)
        form = dataset.format
        self._dtype = form["format_kwargs"].get("dtype") if form["type"] == "numpy" else None
        self._decoded = [name for name in self._columns if require_decoding(dataset.features[name])]
        self._mapped = _is_mapped(dataset.data)
        self._readers: dict[str, ColumnRows] | None = None  # made late: functions may turn text into arrays
        chunks, self._direct = row_indices(dataset)
        # Record id → row of the table, after ``shuffle``, ``sort`` or ``select``.
        self._rows = None if chunks is None else ColumnRows("indices", chunks, chunks[0].type, ())
        self._decoder = dataset.with_format(None, columns=self._decoded) if self._decoded else None

    def check_records(self) -> None:
        """Raises SourceError if a column has no array form, such as text; names it."""
        if self._readers is None:
            self._readers = self._readers_of(self._dataset.data.table)

    def _readers_of(self, table: pa.Table) -> dict[str, ColumnRows]:
        usable = [*usable_columns(table.schema), *self._decoded]
        advised = [name for name in self._columns if name in usable]
        return {
            name: ColumnRows(name, table.column(name).chunks, table.schema.field(name).type, advised)
            for name in self._columns
            if name not in self._decoded
        }

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self._dataset, self._columns)  # views of buffers are not pickled but rebuilt

    def __getitems__(self, record_ids: Sequence[int]) -> list[dict[str, PyTree]]:
        """Several records, in the order of ``record_ids``: dicts of numpy scalars and arrays."""
        batch = self.read_batch(np.asarray(record_ids, np.int64))
        return [trees.map_leaves(lambda leaf, i=i: leaf[i], batch) for i in range(len(record_ids))]

    def read_stored(self, record_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Reads records as they are stored; see :class:`StoredRows`."""
        stored = [name for name in self._columns if name not in self._decoded]
        table = cast("pa.Table", self._dataset.with_format("arrow", columns=stored)[list(record_ids)])
        columns = {name: stored_values(table.column(name), self._dtype) for name in stored}
        columns |= self._decode(record_ids, _stored_decoded)
        return [{name: columns[name][row] for name in self._columns} for row in range(len(record_ids))]

    def read_batch(self, record_ids: np.ndarray | Sequence[int]) -> dict[str, PyTree]:
        """Reads records as stacked arrays.

        Args:
          record_ids: int64[n], in any order, repeats allowed.

        Returns:
          Column name → array ``[n, ...]``; a dict of arrays for struct columns. Consecutive rows of a mapped file are
          returned as views of it.

        Raises:
          IndexError: an id is not in [0, len).
          SourceError: a null, ragged lists, or images of unequal shapes; names the column and the record.
        """
        ids = np.ascontiguousarray(record_ids, np.int64)
        check_ids(ids, len(self), "dataset")
        if not ids.size:
            one = self.read_batch(np.zeros(1, np.int64))
            return {name: trees.map_leaves(lambda leaf: leaf[:0], part) for name, part in one.items()}
        self.check_records()
        assert self._readers is not None

        def where(row: int) -> Where:
            return {"record_id": int(ids[row])}

        if not self._direct:  # datasets finds the rows, which takes longer
            table = self._dataset.with_format("arrow")[ids.tolist()]
            readers = self._readers_of(table)
            rows = np.arange(len(ids))
        else:
            readers = self._readers
            rows = ids if self._rows is None else self._rows.read(ids, where).astype(np.int64)
        batch: dict[str, PyTree] = dict.fromkeys(self._columns)  # keeps the order of the columns
        for name, reader in readers.items():
            part = reader.read(rows, where)
            batch[name] = part if self._dtype is None else trees.map_leaves(lambda leaf: leaf.astype(self._dtype), part)
        for name, values in self._decode(ids.tolist()).items():
            batch[name] = _stack(name, values, ids)
        # Only views are read-only. Arrow marks memory as immutable that pandas or a bytearray may still write.
        return batch if self._mapped else trees.map_leaves(_copied_if_read_only, batch)

    def _decode(
        self, record_ids: Sequence[int], convert: Callable[..., Any] = value_to_numpy
    ) -> dict[str, list[PyTree]]:
        """The values of the columns that datasets decodes, converted."""
        if self._decoder is None:
            return {}
        records, dtypes = self._decoder.__getitems__(list(record_ids)), dtypes_of(self._decoder.features.arrow_schema)
        return {
            name: [
                convert(record[name], name, self._columns, dtypes[name], record_id=int(record_id))
                for record, record_id in zip(records, record_ids, strict=True)
            ]
            for name in self._decoded
        }

    def fingerprint(self) -> JsonValue:
        """Identity: number of records, columns and their types, and a digest of 4 evenly spaced records."""
        return {
            "kind": "huggingface",
            "records": len(self),
            "columns": {name: repr(self._dataset.features[name]) for name in self._columns},
            "content": content_digest(self._dataset, self._columns),
        }


def _stored_decoded(
    value: Any, name: str, columns: Sequence[str], dtype: np.dtype | Dtypes | None, **where: Unpack[Where]
) -> Any:
    """A value that datasets has decoded, for a function: images of several sizes, and JSON, may stay what they are."""
    if isinstance(value, Mapping):
        inner = dtype if isinstance(dtype, Mapping) else {}
        return {
            key: _stored_decoded(item, f"{name}.{key}", columns, inner.get(key), **where) for key, item in value.items()
        }
    if isinstance(value, list):
        items = [_stored_decoded(item, name, columns, dtype, **where) for item in value]
        shapes = {item.shape if isinstance(item, np.ndarray) else None for item in items}
        return np.stack(items) if len(shapes) == 1 and None not in shapes else items
    is_plain = isinstance(value, str | bytes | None) or (dtype is None and type(value).__module__ in _PLAIN)
    return value if is_plain else value_to_numpy(value, name, columns, dtype, **where)


def _is_mapped(table: object) -> bool:
    blocks = getattr(table, "blocks", [[table]])  # of a concatenated table, which may have some in memory
    return all(isinstance(block, MemoryMappedTable) for row in blocks for block in row)


def _copied_if_read_only(leaf: np.ndarray) -> np.ndarray:
    return leaf if leaf.flags.writeable else memory.copy(leaf)


class HuggingFaceRows(_Records):
    """Records of a ``datasets.Dataset`` with a transform (``with_transform``), read through the transform.

    ``columns`` are the keys of the transform's output that form a record; None for all.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[str] | None) -> None:
        self._dataset, self._columns = dataset, columns

    def read_stored(self, record_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Reads records as the transform makes them."""
        return [own_record(chosen(record, self._columns)) for record in self._dataset.__getitems__(list(record_ids))]

    def __getitems__(self, record_ids: Sequence[int]) -> list[dict[str, PyTree]]:
        """Several records, in the order of ``record_ids``: dicts of numpy values.

        Raises:
          IndexError: an id is not in [0, len).
          SourceError: a column is missing, or has text, a null or ragged lists.
        """
        ids = [int(record_id) for record_id in record_ids]
        check_ids(ids, len(self), "dataset")
        return [
            record_to_numpy(record, self._columns, {}, record_id=record_id)
            for record, record_id in zip(self._dataset.__getitems__(ids), ids, strict=True)
        ]

    def fingerprint(self) -> JsonValue:
        """Identity: as for a dataset without a transform, plus the transform's name."""
        stored = list(self._dataset.column_names)
        return {
            "kind": "huggingface",
            "records": len(self),
            "columns": None if self._columns is None else list(self._columns),
            "features": {name: repr(self._dataset.features[name]) for name in stored},
            "transform": function_name(self._dataset.format["format_kwargs"].get("transform")),
            "content": content_digest(self._dataset, stored),
        }


def _stack(name: str, values: list[Any], ids: np.ndarray) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _stack(f"{name}.{key}", [value[key] for value in values], ids) for key in first}
    for value, record_id in zip(values, ids, strict=True):
        if value.shape != first.shape or value.dtype != first.dtype:
            raise SourceError(
                f"ragged rows: column {name!r} decodes to {value.dtype} of shape {value.shape} in record "
                f"{int(record_id):,}, and to {first.dtype} of shape {first.shape} in record {int(ids[0]):,}. "
                "Expected one shape. Resize or cut them with with_transform() or map().",
                record_id=int(record_id),
            )
    return np.stack(values)


def content_digest(dataset: Dataset, columns: Sequence[str]) -> str:
    """A digest of 4 evenly spaced records of a map-style dataset, as stored."""

    def digest(ids: np.ndarray) -> str:
        table = dataset.with_format("arrow")[ids.tolist()].select(list(columns))
        return hashlib.sha256(repr(table.to_pylist()).encode()).hexdigest()[:16]

    return probe_digest(len(dataset), digest)
