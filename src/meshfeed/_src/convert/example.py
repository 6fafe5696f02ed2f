"""``tf.train.Example`` messages: Arrow columns encoded as them, and TFRecord files, which hold them.

A feature is bytes, floats or integers, one or several per row:

============================================  =================================================================
text, binary                                  bytes
integers, booleans, dates, times, timestamps  integers; dates and times as the number that Arrow stores
floats                                        floats of 32 bits, which is all that an Example can hold
a list                                        several values
a list of lists, an array                     its values in row-major order, and ``<name>/shape``
a struct                                      ``<name>/<field>``
an empty list whose type is unknown           no values
============================================  =================================================================

Features are in order of name, so equal rows have equal bytes. ``sources/decode.py`` describes the message and decodes it.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SourceError, missing_package
from meshfeed._src.convert.inputs import (
    Input,
    Scan,
    binary,
    flags,
    integers,
    null_mask,
    numbers,
    refuse_compressed,
    to_bytes,
)
from meshfeed._src.sources.decode import BYTES, FLOAT, INT64

if TYPE_CHECKING:
    import pyarrow as pa


KIND_NAMES = {BYTES: "bytes", FLOAT: "float", INT64: "int64"}

_Column: TypeAlias = "tuple[str, pa.Array]"
_BATCH_BYTES = 1 << 20  # of TFRecords
_MARK_BYTES = 8 << 20
_HEAD = struct.Struct("<QI")  # size of a record, and the checksum of the size
_CHECK = struct.Struct("<I")
_CHOOSE = "Choose other columns with --columns, or convert this one before."


def flatten(batch: pa.RecordBatch, first_record: int = 0) -> list[_Column]:
    """Returns the features of a batch of rows as columns of values or lists of values.

    Raises:
      SourceError: a column has a type that an Example cannot hold, or an array is ragged; names the column and the record.
    """
    found = [
        column
        for name, array in zip(batch.schema.names, batch.columns, strict=True)
        for column in _flatten(name, array, first_record)
    ]
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(
            f"two columns become the feature {twice!r}. Rename one of them, or leave it out with --columns."
        )
    return found


def feature_kinds(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Returns name → kind of every feature that rows of ``schema`` have, and whether it is a list.

    Raises:
      SourceError: a column has a type that an Example cannot hold; names it.
    """
    import pyarrow as pa

    kinds: dict[str, dict[str, Any]] = {}
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in schema.types], schema=schema)
    for name, array in sorted(flatten(empty)):
        leaf = array.type.value_type if is_list(array.type) else array.type
        kinds[name] = {"kind": KIND_NAMES[kind_of(name, leaf)], "list": is_list(array.type)}
    return kinds


def pack_varints(values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Encodes int64[n] in 7 bits per byte.

    Returns:
      The bytes, and int64[n], the end of each value.
    """
    unsigned = values.view(np.uint64)
    sizes = np.ones(len(values), np.int64)
    top = int(unsigned.max(initial=0))
    places = range(1, max(1, -(-top.bit_length() // 7)))
    for place in places:
        sizes += unsigned >= np.uint64(1 << 7 * place)
    ends = np.cumsum(sizes)
    out = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    starts = ends - sizes
    out[starts] = (unsigned & np.uint64(127)).astype(np.uint8) | np.where(sizes > 1, 128, 0).astype(np.uint8)
    for place in places:
        long = sizes > place
        part = (unsigned[long] >> np.uint64(7 * place) & np.uint64(127)).astype(np.uint8)
        out[starts[long] + place] = part | np.where(sizes[long] > place + 1, 128, 0).astype(np.uint8)
    return out.tobytes(), ends


# ------------------------------------------------------------------------ types


def _flatten(name: str, array: pa.Array, first_record: int) -> Iterator[_Column]:
    import pyarrow as pa

    if isinstance(array, pa.FixedShapeTensorArray):
        array = _nested_tensors(name, array)
    elif isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_struct(array.type):
        yield from _flatten_struct(name, array, first_record)
    elif is_list(array.type) and is_list(_storage(array.type.value_type)):
        yield from _flatten_nested(name, array, first_record)
    elif pa.types.is_null(array.type):
        yield name, array.cast(pa.large_binary())  # no row has a value
    else:
        if is_list(array.type) and pa.types.is_null(array.type.value_type):
            array = array.cast(pa.large_list(pa.large_binary()))  # no list has a value
        kind_of(name, array.type.value_type if is_list(array.type) else array.type, array.type)
        yield name, array


def _nested_tensors(name: str, array: pa.FixedShapeTensorArray) -> pa.Array:
    """Returns lists of lists in place of tensors, which Arrow stores as flat lists."""
    import pyarrow as pa

    shape, order = array.type.shape, array.type.permutation
    if order is not None and list(order) != sorted(order):
        raise SourceError(
            f"column {name!r} stores its tensors with the dimensions in the order {list(order)}. Expected row-major order. "
            "Write them so, or leave the column out with --columns."
        )
    values = array.storage.flatten()  # without those of nulls
    for size in shape[:0:-1]:
        values = pa.FixedSizeListArray.from_arrays(values, size)
    ends = np.cumsum(np.where(flags(array.is_valid()), shape[0] if shape else 1, 0))
    return pa.LargeListArray.from_arrays(integers(np.concatenate([[0], ends])), values, mask=array.is_null())


def _storage(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _flatten_struct(name: str, array: pa.StructArray, first_record: int) -> Iterator[_Column]:
    for field, child in zip(array.type, array.flatten(), strict=True):
        yield from _flatten(f"{name}/{field.name}", child, first_record)


def _flatten_nested(name: str, array: pa.Array, first_record: int) -> Iterator[_Column]:
    """Yields the values of an array of two or more dimensions, and its shape."""
    import pyarrow as pa

    nulls = array.is_null()
    sizes = [list_lengths(array, null=0)]
    counts = sizes[0]
    values = array.flatten()
    while is_list(_storage(values.type)):
        values = values.storage if isinstance(values, pa.ExtensionArray) else values
        lengths = list_lengths(values, null=-1)
        is_fixed = pa.types.is_fixed_size_list(values.type)
        firsts = np.full(len(counts), values.type.list_size if is_fixed else 0, np.int64)
        filled = counts > 0
        firsts[filled] = lengths[(np.cumsum(counts) - counts)[filled]]
        ragged = (np.repeat(firsts, counts) != lengths) | (lengths < 0)
        text = "lists of lists of different lengths, or nulls; an Example can hold arrays only"
        _refuse(ragged, np.cumsum(counts), first_record, name, text)
        sizes.append(firsts)
        counts = counts * firsts
        values = values.flatten()
    if pa.types.is_null(values.type):
        values = values.cast(pa.large_binary())
    kind_of(name, values.type, array.type)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    yield name, pa.LargeListArray.from_arrays(integers(offsets), values, mask=nulls)
    ranks = np.arange(len(array) + 1) * len(sizes)
    shapes = np.stack(sizes, axis=1).reshape(-1)
    yield f"{name}/shape", pa.LargeListArray.from_arrays(integers(ranks), integers(shapes), mask=nulls)


def list_lengths(array: pa.Array, *, null: int) -> np.ndarray:
    """Returns the length of each list, int64[n], and ``null`` for a null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = pc.call_function("list_value_length", [array])
    dtype = np.dtype(np.int64 if pa.types.is_large_list(array.type) else np.int32)
    lengths, nulls = numbers(found, dtype).astype(np.int64), null_mask(found)
    if nulls is not None:
        lengths[nulls] = null
    return lengths


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is that of lists."""
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def kind_of(name: str, kind: pa.DataType, column: pa.DataType | None = None) -> int:
    """Returns the kind of the values of a feature.

    Args:
      name: the column.
      kind: the type of its values.
      column: its type, for the message, unless the column holds single values.

    Raises:
      SourceError: an Example cannot hold them; names the column.
    """
    import pyarrow.types as types

    if is_text_or_bytes(kind):
        return BYTES
    if types.is_floating(kind):
        return FLOAT
    if types.is_integer(kind) or types.is_boolean(kind) or (types.is_temporal(kind) and not types.is_interval(kind)):
        return INT64
    raise SourceError(
        f"column {name!r} has the type {column or kind}, which an Example cannot hold. Expected text, binary, numbers, "
        f"dates, lists of them, or structs of those. {_CHOOSE}"
    )


def is_text_or_bytes(kind: pa.DataType) -> bool:
    """Whether a type is text or binary."""
    import pyarrow.types as types

    tests = (types.is_string, types.is_large_string, types.is_string_view)
    more = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(test(kind) for test in (*tests, *more))


def _without_nulls(array: pa.Array, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns the values as numpy, and 0 for a null."""
    values, nulls = numbers(array, dtype), null_mask(array)
    return values if nulls is None else np.where(nulls, np.zeros((), dtype), values)


def integers_of(name: str, array: pa.Array) -> np.ndarray:
    """Returns the values that are stored for integers, dates and times, int64[n]."""
    return _integers(name, array, np.arange(1, len(array) + 1), 0)


def _integers(name: str, array: pa.Array, ends: np.ndarray, first_record: int) -> np.ndarray:
    import pyarrow as pa

    if pa.types.is_date32(array.type) or pa.types.is_time32(array.type):
        array = array.cast(pa.int32())
    if pa.types.is_uint64(array.type):
        values = _without_nulls(array, np.dtype(np.uint64))
        too_large = values > np.uint64(np.iinfo(np.int64).max)
        _refuse(too_large, ends, first_record, name, ", and the integers of an Example have 63 bits", values)
        return values.view(np.int64)
    return _without_nulls(array.cast(pa.int64()), np.dtype(np.int64))


def _floats(name: str, array: pa.Array, ends: np.ndarray, first_record: int) -> np.ndarray:
    values = _without_nulls(array, np.dtype(f"f{array.type.bit_width // 8}"))
    with np.errstate(over="ignore"):
        narrow = values.astype("<f4")
    if values.dtype.itemsize > 4:
        too_large = np.isinf(narrow) & np.isfinite(values)
        _refuse(too_large, ends, first_record, name, ", and the floats of an Example have 32 bits", values)
    return narrow


def _refuse(
    bad: np.ndarray, ends: np.ndarray, first_record: int, name: str, what: str, values: np.ndarray | None = None
) -> None:
    """Raises the error for the first value that an Example cannot hold, if there is one.

    Args:
      bad: bool[values].
      ends: int64[rows], values up to the end of each row.
      first_record: number of the first row.
      name: the column.
      what: what it holds; after the value, if there are ``values``.
      values: the values, to show the one.
    """
    if bad.any():
        value = int(bad.argmax())
        record = first_record + int(np.searchsorted(ends, value, side="right"))
        shown = "" if values is None else values[value]
        raise SourceError(f"record {record}: column {name!r} holds {shown}{what}. {_CHOOSE}")


_VALUES_TAG = b"\x0a"  # field 1, with a length
_CACHED_SIZES = 1 << 16


def encode_examples(columns: Sequence[tuple[str, pa.Array]], count: int, first_record: int) -> list[bytes]:
    """Encodes rows as Examples.

    Args:
      columns: name and values of each feature, as :func:`meshfeed._src.convert.example.flatten` returns them.
      count: number of rows, which may have no column.
      first_record: number of the first row, for messages.

    Returns:
      One message per row. A null value leaves its feature out.

    Raises:
      SourceError: a value cannot be stored; names the column and the record.
    """
    entries = [_entries(name, column, first_record) for name, column in sorted(columns)]
    rows = zip(*entries, strict=True) if entries else [()] * count
    return [_VALUES_TAG + varint(len(body)) + body for body in map(b"".join, rows)]


def _entries(name: str, array: pa.Array, first_record: int) -> list[bytes]:
    """Returns each row's entry of the map of features, for a column of :func:`flatten`; empty for a null."""
    nulls, lengths = null_mask(array), None
    if is_list(array.type):
        lengths = list_lengths(array, null=0)
        array = array.flatten()
        if array.null_count:
            bad = flags(array.is_null())
            _refuse(bad, np.cumsum(lengths), first_record, name, "a list with a null, which an Example cannot hold")
    kind = kind_of(name, array.type)
    if kind == BYTES and lengths is not None:
        entries = _byte_lists(name, _tag(kind), to_bytes(array), lengths)
    else:
        wrap = _wrapper(name, _tag(kind), one=True)
        payloads = to_bytes(array) if kind == BYTES else _packed_rows(kind, name, array, lengths, first_record)
        entries = [wrap(len(payload)) + payload for payload in payloads]
    if nulls is not None:
        for row in np.flatnonzero(nulls).tolist():
            entries[row] = b""
    return entries


def _packed_rows(kind: int, name: str, array: pa.Array, lengths: np.ndarray | None, first_record: int) -> list[bytes]:
    """Returns the packed numbers of each row; ``lengths`` is their count per row, None for one."""
    ends = np.cumsum(np.ones(len(array), np.int64) if lengths is None else lengths)
    if kind == FLOAT:
        packed, edges = _floats(name, array, ends, first_record).tobytes(), ends * 4
    else:
        packed, value_ends = pack_varints(_integers(name, array, ends, first_record))
        edges = np.concatenate([[0], value_ends])[ends]
    stops = edges.tolist()
    return [packed[low:high] for low, high in zip([0, *stops[:-1]], stops, strict=True)]


def _byte_lists(name: str, tag: bytes, payloads: Sequence[bytes], lengths: np.ndarray) -> list[bytes]:
    """Returns the entries of rows that hold several values each; ``lengths`` is the number of values of each row."""
    wrap = _wrapper(name, tag, one=False)
    parts = [_value_prefix(len(payload)) + payload for payload in payloads]
    ends = np.cumsum(lengths).tolist()
    bodies = [b"".join(parts[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return [wrap(len(body)) + body for body in bodies]


@functools.lru_cache(_CACHED_SIZES)
def _value_prefix(num_bytes: int) -> bytes:
    return _VALUES_TAG + varint(num_bytes)


@functools.lru_cache(1024)
def _wrapper(name: str, tag: bytes, *, one: bool) -> Callable[[int], bytes]:
    """Returns a function from the size of the values to the bytes before them.

    With ``one``, the values are one field of their list: one value of bytes, or packed numbers. An empty list of numbers
    has no field; a value of bytes may be empty.
    """
    key = name.encode()
    key = _VALUES_TAG + varint(len(key)) + key

    @functools.lru_cache(_CACHED_SIZES)
    def prefix(num_bytes: int) -> bytes:
        inner = _value_prefix(num_bytes) if one and (num_bytes or tag == _tag(BYTES)) else b""
        list_bytes = tag + varint(len(inner) + num_bytes) + inner
        feature = b"\x12" + varint(len(list_bytes) + num_bytes) + list_bytes
        return _VALUES_TAG + varint(len(key) + len(feature) + num_bytes) + key + feature

    return prefix


def _tag(kind: int) -> bytes:
    return bytes([kind << 3 | 2])


def varint(value: int) -> bytes:
    """Encodes a number that is not negative in 7 bits per byte."""
    if value < 128:
        return bytes((value,))
    encoded = bytearray()
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class TFRecords(Input):
    """Records of TFRecord files: sizes and bytes, each with a masked CRC-32C."""

    name = "tfrecord"
    examples = True

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        import pyarrow as pa

        marks, count, next_mark = [], 0, 0
        for offset, _, _ in _tf_records(path, 0, with_content=False):
            if offset >= next_mark:
                marks.append((count, offset))
                next_mark = offset + _MARK_BYTES
            count += 1
        return Scan(count, pa.schema([("record", pa.large_binary())]), marks)

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        import pyarrow as pa

        checksum = _crc32c(path)
        number, offset = max(mark for mark in scan.marks if mark[0] <= start)
        records: list[bytes] = []
        num_bytes = 0
        for _, content, check in _tf_records(path, offset):
            if number >= stop:
                break
            if number >= start:
                if _mask(checksum(content)) != check:
                    raise _damaged_tf_record(path, f"record {number} has a wrong checksum")
                records.append(content)
                num_bytes += len(content)
                if num_bytes > _BATCH_BYTES:
                    yield pa.record_batch([binary(records)], schema=schema)
                    records, num_bytes = [], 0
            number += 1
        yield pa.record_batch([binary(records)], schema=schema)


def _tf_records(path: str, offset: int, *, with_content: bool = True) -> Iterator[tuple[int, bytes, int]]:
    """Yields offset, bytes and stored checksum of each record; without content, neither of the last two.

    The file is read and not mapped into memory: a read of a file that is cut meanwhile is short, where a map kills the
    process.
    """
    checksum = _crc32c(path)
    with open(path, "rb", buffering=_BATCH_BYTES) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        while offset < size:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise _cut_tf_record(path, offset)
            length, check = _HEAD.unpack(head)
            if _mask(checksum(head[:8])) != check:
                if not offset:
                    refuse_compressed(path)
                raise _damaged_tf_record(path, f"no record begins at byte {offset:,}")
            end = offset + _HEAD.size + length + _CHECK.size
            if end > size:
                raise _cut_tf_record(path, offset)
            if with_content:
                content, stored = file.read(length), file.read(_CHECK.size)
                if len(stored) < _CHECK.size:
                    raise _cut_tf_record(path, offset)
                yield offset, content, _CHECK.unpack(stored)[0]
            else:
                file.seek(end)
                yield offset, b"", 0
            offset = end


def _cut_tf_record(path: str, offset: int) -> CorruptDataError:
    return _damaged_tf_record(path, f"it ends within the record at byte {offset:,}")


def _crc32c(path: str) -> Callable[[bytes | memoryview], int]:
    try:
        import google_crc32c
    except ImportError as error:
        raise missing_package(f"reading {path}", error, "convert") from error
    return google_crc32c.value


def _mask(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _damaged_tf_record(path: str, reason: str) -> CorruptDataError:
    return CorruptDataError(f"{path} is no intact TFRecord file: {reason}. Write or copy it again.", path=path)
