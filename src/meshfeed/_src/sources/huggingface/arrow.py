"""Columns and values of Hugging Face records → numpy: Arrow columns without Python objects, and Python values.

A fixed-size list, or a list that has the same length throughout the batch, becomes a row of an array; a struct becomes
a dict. Text, nulls and ragged lists raise errors that name the column.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack

import numpy as np
import pyarrow as pa

from meshfeed._src.base import memory, trees
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.groups import group_by
from meshfeed._src.base.types import PyTree
from meshfeed._src.sources.checks import as_run
from meshfeed._src.sources.huggingface.gather import ChunkGather

MAP = "meshfeed.sources.Map or map() of the dataset"


Dtypes: TypeAlias = "Mapping[str, np.dtype | Dtypes | None]"
"""The dtype of each column, or field of a struct, that holds numbers or lists of numbers."""


class Where(TypedDict, total=False):
    """Where a record is, for errors: its id, or its lane if it has none."""

    record_id: int
    lane_index: int


def _record(where: Where) -> str:
    if "record_id" in where:
        return f"record {where['record_id']:,}"
    return f"a record of lane {where['lane_index']}" if "lane_index" in where else "a record"


def _leave_out(name: str, all_columns: Sequence[str] | Mapping[str, Any]) -> str:
    """The end of an error's fix: how to read ``all_columns``, or a record without text and nulls, without one column."""
    others = [column for column in all_columns if column != name]
    if isinstance(all_columns, Mapping):
        others = [column for column in others if not isinstance(all_columns[column], str | bytes | None)]
    return f", or leave it out: columns={others!r}" if others else ""


def record_to_numpy(
    record: Mapping[str, Any],
    columns: Sequence[str] | None,
    dtypes: Dtypes,
    **where: Unpack[Where],
) -> dict[str, PyTree]:
    """Converts the chosen columns of a record to numpy; see :func:`value_to_numpy`."""
    advised = record if columns is None else columns
    return {
        name: value_to_numpy(value, name, advised, dtype=dtypes.get(name), **where)
        for name, value in chosen(record, columns, **where).items()
    }


def chosen(record: Mapping[str, Any], columns: Sequence[str] | None, **where: Unpack[Where]) -> dict[str, Any]:
    """Returns the chosen columns of a record as they are; checks that they are there."""
    check_columns(record, columns or (), **where)
    return dict(record) if columns is None else {name: record[name] for name in columns}


def check_columns(found: Collection[str], columns: Sequence[str], **where: Unpack[Where]) -> None:
    """Raises a SourceError if a record lacks one of the chosen columns."""
    for name in columns:
        if name not in found:
            raise SourceError(
                f"{_record(where)} has no column {name!r}; it has {sorted(found)}. Expected the columns {list(columns)} in "
                "every record. Correct columns=, or the map() that makes the records.",
                **where,
            )


def value_to_numpy(
    value: object,
    name: str,
    all_columns: Sequence[str] | Mapping[str, Any],
    dtype: np.dtype | Dtypes | None = None,
    **where: Unpack[Where],
) -> PyTree:
    """Converts a column's value to an array or a dict of arrays.

    An image becomes a uint8 array as converted by Pillow; audio becomes ``{"array": [samples] or [channels, samples],
    "sampling_rate": int64}``.

    ``name``, ``all_columns`` (see :func:`_leave_out`) and ``where`` are for errors.

    Raises:
      SourceError: text, a null, ragged lists, or an object without an array form.
    """
    if isinstance(value, Mapping):
        inner = dtype if isinstance(dtype, Mapping) else {}
        return {
            key: value_to_numpy(item, f"{name}.{key}", all_columns, inner.get(key), **where)
            for key, item in value.items()
        }
    if isinstance(dtype, Mapping):  # of how an image or audio is stored
        dtype = None
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return value if dtype is None else value.astype(dtype)
    if hasattr(value, "get_all_samples"):
        return _samples(value)
    try:
        array = None if isinstance(value, str | bytes | bytearray | None) else np.asarray(value)
        if dtype is not None and array is not None and not array.dtype.hasobject:  # as a float, a null would be NaN
            array = array.astype(dtype) if array.dtype.kind == dtype.kind else np.asarray(value, dtype)
    except ValueError as error:
        raise SourceError(
            f"ragged rows: column {name!r} has lists of unequal lengths within {_record(where)} ({error}). Expected "
            f"rectangular lists. Pad or cut them with {MAP}.",
            **where,
        ) from None
    if array is not None and _is_numeric(array.dtype):
        return array[()]  # a numpy scalar if it has no dimensions
    without = _leave_out(name, all_columns)
    if value is None:
        raise _null(name, where, f"filter such records out{without}")
    dtype_of, remedy = ("", "Turn it into token ids") if array is None else (f" of dtype {array.dtype}", "Convert it")
    raise _unusable(name, f"{type(value).__name__}{dtype_of} in {_record(where)}", remedy, without, **where)


def dtypes_of(schema: pa.Schema | None) -> dict[str, np.dtype | Dtypes | None]:
    """The dtypes of what datasets gives as Python objects."""
    return {} if schema is None else {field.name: _dtype_of(field.type) for field in schema}


def _dtype_of(arrow_type: pa.DataType) -> np.dtype | Dtypes | None:
    if isinstance(arrow_type, pa.ExtensionType):
        return _dtype_of(arrow_type.storage_type)
    if pa.types.is_struct(arrow_type):
        return {field.name: _dtype_of(field.type) for field in arrow_type}
    if is_list(arrow_type):
        return _dtype_of(arrow_type.value_type)
    return np.dtype(arrow_type.to_pandas_dtype()) if is_number(arrow_type) else None


def _samples(audio: Any) -> dict[str, PyTree]:
    """All samples of an AudioDecoder of datasets."""
    samples = audio.get_all_samples()
    array = np.asarray(samples.data)
    return {
        "array": array[0] if array.ndim == 2 and array.shape[0] == 1 else array,
        "sampling_rate": np.int64(samples.sample_rate),
    }


def _is_numeric(dtype: np.dtype) -> bool:
    return dtype.kind in "biuf" or dtype.name == "bfloat16"  # of ml_dtypes, whose kind is "V"


_MAX_CACHED_CHUNKS = 8192  # bounds the memory of readers for tables with very many chunks


def is_text(arrow_type: pa.DataType) -> bool:
    """Whether a column of this type contains text or bytes at any depth."""
    return any(_is_text(inner) for _, inner in _innermost(arrow_type, ""))


def _innermost(t: pa.DataType, name: str) -> Iterator[tuple[str, pa.DataType]]:
    """The types inside of lists and structs, each with its name."""
    if isinstance(t, pa.ExtensionType):
        yield from _innermost(t.storage_type, name)
    elif is_list(t):
        yield from _innermost(t.value_type, name)
    elif pa.types.is_struct(t):
        for i in range(t.num_fields):
            yield from _innermost(t.field(i).type, f"{name}.{t.field(i).name}")
    else:
        yield name, t


def _is_text(t: pa.DataType) -> bool:
    if pa.types.is_dictionary(t):
        return is_text(t.value_type)
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return str(t) in names or pa.types.is_fixed_size_binary(t)


def _unusable(column: str, what: object, remedy: str, without: str, **where: Unpack[Where]) -> SourceError:
    return SourceError(
        f"column {column!r} holds {what}, which JAX has no dtype for. Expected numbers, booleans, or lists of them. {remedy} "
        f"with {MAP}{without}.",
        **where,
    )


def _null(column: str, where: Where, or_else: str) -> SourceError:
    return SourceError(
        f"column {column!r} is null in {_record(where)}. Expected a value in every record. Fill it with {MAP}, {or_else}.",
        **where,
    )


def stored_values(column: pa.ChunkedArray, dtype: np.dtype[Any] | None = None) -> list[Any]:
    """Returns the values of a column: numpy scalars, arrays for lists of numbers, and Python objects for all else."""
    values: list[Any] = []
    for chunk in column.chunks:
        if isinstance(chunk, pa.ExtensionArray):
            chunk = chunk.storage
        values += _stored_in(chunk, dtype)
    return values


def _stored_in(chunk: pa.Array, dtype: np.dtype[Any] | None) -> list[Any]:
    """The values of a chunk; what becomes of one does not depend on the others, which a restore reads without it."""
    t = chunk.type
    if not is_number(t.value_type if is_list(t) else t):
        return chunk.to_pylist()
    if chunk.null_count:
        others = iter(_stored_in(chunk.drop_null(), dtype))
        return [next(others) if valid else None for valid in chunk.is_valid().to_pylist()]
    if is_number(t):
        return list(_numbers(chunk, dtype))
    inner = chunk.flatten()
    if inner.null_count:
        each = [chunk.slice(row, 1) for row in range(len(chunk))]
        return [row.to_pylist()[0] if row.flatten().null_count else _stored_in(row, dtype)[0] for row in each]
    if pa.types.is_fixed_size_list(t):
        return list(_numbers(inner, dtype).reshape(len(chunk), t.list_size))
    offsets = chunk.offsets.to_numpy()
    return np.split(_numbers(inner, dtype), offsets[1:-1] - offsets[0]) if len(chunk) else []


def is_list(t: pa.DataType) -> bool:
    """Whether a column of this type contains lists, of one length or of any."""
    return pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t)


def is_number(t: pa.DataType) -> bool:
    """Whether a column of this type contains numbers or booleans."""
    return pa.types.is_boolean(t) or pa.types.is_integer(t) or pa.types.is_floating(t)


def _numbers(array: pa.Array, dtype: np.dtype[Any] | None) -> np.ndarray:
    values = array.to_numpy(zero_copy_only=False)
    return np.array(values, dtype)  # a copy: the function may write to it, or keep it


class ColumnRows:
    """Rows of one column, by id.

    Arrow's own ``take`` of 64 rows of lists from 200 chunks takes 57 ms, since it joins the chunks first, and 3 ms chunk by
    chunk; this takes less than 0.1 ms.

    Errors suggest keeping columns of ``all_columns``.

    Raises:
      SourceError: the type has no array form.
    """

    def __init__(self, name: str, chunks: list[pa.Array], arrow_type: pa.DataType, all_columns: Sequence[str]) -> None:
        self._name, self._chunks = name, chunks
        _check_column(name, arrow_type, tuple(all_columns))
        self._starts = np.array([0, *itertools.accumulate(map(len, chunks))])
        self._readers: dict[int, _ChunkRows] = {}
        self._gather = ChunkGather(len(chunks))

    def read(self, row_ids: np.ndarray, where: Callable[[int], Where]) -> PyTree:
        """Reads the rows ``row_ids``.

        Args:
          row_ids: int64[n], n at least 1, in any order.
          where: ``where(i)`` is the record of ``row_ids[i]``, for errors.

        Returns:
          An array ``[n, ...]``, or a dict of arrays for a struct. It may be a view of a mapped file, but never of
          memory that may still be written.

        Raises:
          SourceError: a null, or lists of unequal lengths; names the column and the record.
        """
        if len(self._chunks) == 1:
            return self._reader(0).read(row_ids, where)
        which = np.searchsorted(self._starts, row_ids, side="right") - 1
        if (gather := self._gather).is_full:
            gather = self._gather = ChunkGather(len(self._chunks))  # another thread may still use the old one
        for chunk in gather.unknown(which):
            reader = self._reader(chunk)
            gather.add(chunk, reader.whole, reader.buffer)
        if (found := gather.take(which, row_ids - self._starts[which])) is not None:
            return found
        parts = [
            (rows, self._reader(chunk).read(row_ids[rows] - self._starts[chunk], lambda i, rows=rows: where(rows[i])))
            for chunk, rows in group_by(which)
        ]
        return parts[0][1] if len(parts) == 1 else _merge(parts, len(row_ids), self._name, where)

    def read_range(self, start: int, stop: int, where: Callable[[int], Where]) -> PyTree:
        """Rows ``[start, stop)``; see :meth:`read`."""
        if len(self._chunks) == 1:
            rows = self._reader(0).view(start, stop)
            if rows is not None:
                return rows
        return self.read(np.arange(start, stop, dtype=np.int64), where)

    def whole(self) -> np.ndarray | None:
        """All rows as a view of the column's memory, or None if :meth:`read` must check or convert each row."""
        if len(self._chunks) != 1:
            return None
        return self._reader(0).whole

    def _reader(self, chunk_index: int) -> _ChunkRows:
        reader = self._readers.get(chunk_index)
        if reader is None:
            if len(self._readers) >= _MAX_CACHED_CHUNKS:
                self._readers.clear()
            reader = self._readers[chunk_index] = _ChunkRows(self._chunks[chunk_index], self._name)
        return reader


def table_rows(table: pa.Table, start: int, stop: int, **where: Unpack[Where]) -> dict[str, PyTree]:
    """Rows ``[start, stop)`` of a table: column name → array ``[stop - start, ...]``, or a dict of arrays for a struct.

    ``where`` is the place of all of them, for errors.

    Raises:
      SourceError: see :class:`ColumnRows`.
    """
    usable = usable_columns(table.schema)
    return {
        name: ColumnRows(name, column.chunks, column.type, usable).read_range(start, stop, lambda _: where)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _merge(parts: list[tuple[np.ndarray, PyTree]], num_rows: int, name: str, where: Callable[[int], Where]) -> PyTree:
    flat = [(out_rows, *trees.flatten(part)) for out_rows, part in parts]
    _, first_leaves, treedef = flat[0]
    outputs = [np.empty((num_rows, *leaf.shape[1:]), leaf.dtype) for leaf in first_leaves]
    for out_rows, leaves, _ in flat:
        for output, leaf in zip(outputs, leaves, strict=True):
            if leaf.shape[1:] != output.shape[1:]:
                raise _ragged(name, where(out_rows[0]), list(leaf.shape[1:]), list(output.shape[1:]))
            output[out_rows] = leaf
    return treedef.unflatten(outputs)


def _ragged(name: str, where: Where, found: list[int], expected: list[int]) -> SourceError:
    return SourceError(
        f"ragged rows: column {name!r} has lists of lengths {found} in {_record(where)}, and of {expected} in "
        "another record of the same batch. Expected equally long lists. Pad or cut them with "
        f"{MAP}, or pack token ids with meshfeed.sources.Packed.",
        **where,
    )


@functools.lru_cache(maxsize=1024)  # a stream checks the same columns thousands of times
def _check_column(name: str, arrow_type: pa.DataType, all_columns: tuple[str, ...]) -> None:
    if is_text(arrow_type):
        raise _unusable(name, arrow_type, "Turn it into token ids", _leave_out(name, all_columns))
    for path, inner in _innermost(arrow_type, name):
        if not is_number(inner):
            raise SourceError(
                f"column {path!r} is of type {inner}, which has no array form. Expected numbers, booleans, or lists of "
                f"them. Convert it with {MAP}, or leave it out with columns=."
            )


@functools.lru_cache(maxsize=64)  # a stream checks the same schema thousands of times
def usable_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Names of the columns that have an array form."""
    fields = [(field.name, [inner for _, inner in _innermost(field.type, "")]) for field in schema]
    return tuple(name for name, inner in fields if all(map(is_number, inner)))


def check_types(types: Mapping[str, pa.DataType]) -> None:
    """Raises SourceError if a column has no array form, such as text; names it and the columns that remain."""
    usable = usable_columns(pa.schema(list(types.items())))
    for name, arrow_type in types.items():
        _check_column(name, arrow_type, usable)


class _ChunkRows:
    """Rows of one chunk, with its buffers viewed once as numpy."""

    def __init__(self, array: pa.Array, name: str) -> None:
        self._name = name  # of what follows, one is set
        self._fields: dict[str, _ChunkRows] | None = None
        self._child: _ChunkRows | None = None
        self._offsets: np.ndarray | None = None
        self._width: int | None = None
        self._values: np.ndarray | None = None
        self._buffer: pa.Buffer | None = None
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        self._valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
        t = array.type
        if pa.types.is_struct(t):
            # field() ignores the slice of a sliced array; flatten() applies it, and the struct's nulls too.
            parts = array.flatten()
            self._fields = {
                t.field(i).name: _ChunkRows(part, f"{name}.{t.field(i).name}") for i, part in enumerate(parts)
            }
        elif pa.types.is_fixed_size_list(t):
            self._width = t.list_size
            inner = array.values.slice(array.offset * t.list_size, len(array) * t.list_size)
            self._child = _ChunkRows(inner, name)
        elif pa.types.is_list(t) or pa.types.is_large_list(t):
            offsets = np.asarray(array.offsets.to_numpy(zero_copy_only=True), np.int64)
            steps = offsets[1:] - offsets[:-1]
            inner = array.values
            if len(steps) and (steps == steps[0]).all() and self._valid is None:
                self._width = int(steps[0])
                inner = inner.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
            else:
                self._offsets = offsets
            self._child = _ChunkRows(inner, name)
        else:
            self._values, self._buffer = _buffer_values(array), array.buffers()[1]

    def read(self, rows: np.ndarray, where: Callable[[int], Where]) -> PyTree:
        """Reads the rows ``rows`` of the chunk; ``where(i)`` is the record of ``rows[i]``, for errors."""
        self._check_valid(rows, where)
        if self._fields is not None:
            return {key: field.read(rows, where) for key, field in self._fields.items()}
        if self._values is not None:
            return _take(self._values, rows)
        assert self._child is not None
        width, starts = self._lists_at(rows, where)
        if not width:
            part = self._child._empty()
        elif self._width is not None and (values := self._child._flat_values()) is not None:
            return _take(values.reshape(-1, width), rows)
        else:
            inner = (starts[:, None] + np.arange(width)).ravel()
            part = self._child.read(inner, lambda i: where(i // width))
        return trees.map_leaves(lambda leaf: leaf.reshape(len(rows), width, *leaf.shape[1:]), part)

    def _check_valid(self, rows: np.ndarray, where: Callable[[int], Where]) -> None:
        if self._valid is not None and not self._valid[rows].all():
            found = where(int(np.argmin(self._valid[rows])))
            raise _null(self._name, found, "or filter such records out when the data is written")

    def _lists_at(self, rows: np.ndarray, where: Callable[[int], Where]) -> tuple[int, np.ndarray]:
        """The length of the lists in these rows, which must be equal, and where each begins among the values."""
        if self._width is not None:
            return self._width, rows * self._width
        assert self._offsets is not None
        starts = self._offsets[rows]
        lengths = self._offsets[rows + 1] - starts
        width = int(lengths[0])
        if (lengths != width).any():
            other = int(np.argmax(lengths != width))
            raise _ragged(self._name, where(other), [int(lengths[other])], [width])
        return width, starts

    @functools.cached_property
    def whole(self) -> np.ndarray | None:
        """All rows as a view, or None; see :meth:`view`."""
        return self.view(0, None)

    def view(self, start: int, stop: int | None) -> np.ndarray | None:
        """Rows ``[start, stop)`` without a copy, or None if :meth:`read` must check each row."""
        if self._valid is not None or self._fields is not None:
            return None
        if self._values is not None:
            return self._values[start:stop]
        if not self._width or self._child is None:
            return None
        values = self._child._flat_values()
        return None if values is None else values.reshape(-1, self._width)[start:stop]

    @property
    def buffer(self) -> pa.Buffer | None:
        """Arrow's buffer of the innermost values; None for a struct."""
        return self._buffer if self._child is None else self._child.buffer

    def _flat_values(self) -> np.ndarray | None:
        return self._values if self._valid is None else None

    def _empty(self) -> PyTree:
        if self._fields is not None:
            return {key: field._empty() for key, field in self._fields.items()}
        return np.empty(0, self._values.dtype) if self._values is not None else np.empty((0, 0), np.int64)


def _buffer_values(array: pa.Array) -> np.ndarray:
    """The numbers or booleans of an array, as a view if possible; any number in place of a null."""
    if pa.types.is_boolean(array.type):
        return array.fill_null(False).to_numpy(zero_copy_only=False)
    # Read the buffer, since to_numpy converts integers with nulls to floats.
    width, data = array.type.bit_width // 8, array.buffers()[1]
    raw = np.frombuffer(data, np.uint8, len(array) * width, array.offset * width) if data else np.empty(0, np.uint8)
    return raw.view(np.dtype(array.type.to_pandas_dtype()))


def _take(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of an array: a read-only view if they are consecutive and Arrow marks the memory as immutable, else a copy.

    Arrow takes that mark from numpy, whose read-only views of writable arrays have it too, as columns of pandas do.
    """
    run = as_run(rows)
    if run is None:
        return np.take(values, rows, axis=0)
    return memory.copy(values[run]) if values.flags.writeable else values[run]
