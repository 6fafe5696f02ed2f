"""Decoders of records: ``tf.train.Example`` messages, without TensorFlow, and the raw bytes of one array.

The message is ``Example{1: Features{1: map<name, Feature>}}``, and a ``Feature`` is one of ``{1: BytesList, 2: FloatList,
3: Int64List}``, each with its values in field 1. Source: tensorflow/core/example/feature.proto and protobuf's description
of its encoding.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import SettingsError, hides_own_frames
from meshfeed._src.base.types import public

BYTES, FLOAT, INT64 = 1, 2, 3
"""Fields of ``Feature``: the kinds of list."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FEW_VALUES = 16  # below, a loop is faster than numpy
_MASK = (1 << 64) - 1

_Feature: TypeAlias = "np.ndarray | list[bytes]"
_Features: TypeAlias = dict[str, _Feature]
_Convert: TypeAlias = Callable[[_Feature], object]


@public("meshfeed.sources")
class DecodeExample:
    """``decode`` for records that are ``tf.train.Example`` messages, as ``meshfeed convert``, TFDS and tf.data write them.

    A record becomes a dict of its features. Does what ``tf.io.parse_single_example`` does, without TensorFlow. Can be
    pickled and sent to workers::

        ArrayRecord(paths, decode=DecodeExample({"tokens": (np.int32, 2048), "label": np.int32}))
        ArrayRecord(paths, decode=DecodeExample({"image": decode_jpeg, "label": np.int32}))

    Args:
      features: name → what it becomes; other features are skipped.

        * ``(dtype, shape)``: an array of that shape, an int for one dimension. One entry of ``shape`` may be -1. A
          feature of bytes must hold one value, the raw bytes of the array in this machine's byte order.
        * ``dtype``: the same as ``(dtype, ())``.
        * ``bytes``: the value of a feature that holds one.
        * a function of the values: of the value for a feature that holds one value of bytes, else of a list of bytes or
          an array. It may return any pytree of arrays.

        None for all features: integers as int64 ``[n]``, floats as float32 ``[n]``, bytes as ``bytes`` if there is one
        value and as a list otherwise. A feed cannot batch bytes: name the features.

    Raises:
      SettingsError: ``features`` is invalid; names the feature.

    Examples:
      >>> from meshfeed.sources import DecodeExample
      >>> record = bytes.fromhex("0a0e0a0c0a016e12071a050a03010203")  # of tf.train.Example
      >>> DecodeExample({"n": ("int32", 3)})(record)["n"].tolist()
      [1, 2, 3]
    """

    @hides_own_frames
    def __init__(self, features: Mapping[str, Any] | None = None) -> None:
        if features is not None and (not isinstance(features, Mapping) or not features):
            raise SettingsError(
                f"DecodeExample got features={features!r}. Expected a dict of name → (dtype, shape), dtype, bytes or a "
                "function, such as {'tokens': (numpy.int32, 2048)}.",
                setting="decode",
            )
        self._converts = None if features is None else {name: _convert(name, value) for name, value in features.items()}

    @hides_own_frames
    def __call__(self, record: bytes) -> dict[str, Any]:
        """Decodes one record.

        Raises:
          ValueError: the record is not an Example, lacks a feature, or a feature does not fit; names it.
          TypeError: got a list of records.
        """
        if isinstance(record, list | tuple):
            raise TypeError(f"DecodeExample {_NOT_FOR_MANY}")
        found = parse_example(record, None if self._converts is None else self._converts.keys())
        if self._converts is None:
            return {name: _one(values) for name, values in found.items()}
        missing = [name for name in self._converts if name not in found]
        if missing:
            raise ValueError(
                f"the record has no feature {missing[0]!r}. It has {sorted(parse_example(record))}; name one of these in "
                "DecodeExample, or write the feature to every record."
            )
        return {name: convert(found[name]) for name, convert in self._converts.items()}


def _one(values: _Feature) -> _Feature | bytes:
    return values[0] if isinstance(values, list) and len(values) == 1 else values


def _convert(name: str, value: Any) -> _Convert:
    if value is bytes:
        return functools.partial(_as_bytes, name)
    if callable(value) and not isinstance(value, type):
        return functools.partial(_call, value)
    dtype, shape = value if isinstance(value, tuple) and len(value) == 2 else (value, ())
    try:
        sizes = tuple(map(operator.index, shape if isinstance(shape, tuple | list) else (shape,)))
        number = np.dtype(dtype)
    except TypeError as error:
        raise SettingsError(
            f"DecodeExample got {value!r} for the feature {name!r}: {error}. Expected (dtype, shape), a dtype, bytes, or a "
            "function.",
            setting="decode",
        ) from error
    if number.hasobject or min(sizes, default=0) < -1 or sizes.count(-1) > 1:
        raise SettingsError(
            f"DecodeExample got {value!r} for the feature {name!r}. Expected a dtype of numbers, and sizes of which at most "
            "one is -1.",
            setting="decode",
        )
    return functools.partial(_as_array, name, number, sizes)


# The converters are partials of these functions, which can be pickled.


def _call(function: Callable[..., object], values: _Feature) -> object:
    return function(_one(values))


def _as_bytes(name: str, values: _Feature) -> bytes:
    if not isinstance(values, list) or len(values) != 1:
        raise ValueError(f"the feature {name!r} holds {_describe(values)}; expected one value of bytes.")
    return values[0]


def _as_array(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], values: _Feature) -> np.ndarray:
    holds, described, or_else = f"the feature {name!r} holds", _describe(values), ""
    if isinstance(values, list):
        if len(values) != 1 or not dtype.itemsize or len(values[0]) % dtype.itemsize:
            raise ValueError(f"{holds} {described}; expected the bytes of {dtype}{list(shape)}.")
        values = np.frombuffer(values[0], dtype)
        or_else = ", or a function of the bytes, such as meshfeed.sources.DecodeImage(224) for an image"
    count = math.prod(size for size in shape if size >= 0)
    if len(values) != count and (-1 not in shape or not count or len(values) % count):
        raise ValueError(
            f"{holds} {described}; expected {dtype}{list(shape)}. Give DecodeExample the shape that was written{or_else}."
        )
    return _cast(values, dtype, holds).reshape(shape)


def _cast(values: np.ndarray, dtype: np.dtype[Any], holds: str) -> np.ndarray:
    """Converts numbers to a dtype that can represent each of them, up to the precision of floats."""
    if values.dtype.kind == "f" and dtype.kind in "iub":
        raise ValueError(f"{holds} floats; expected {dtype}. Give a float dtype.")
    cast = values.astype(dtype, copy=False)
    if values.dtype != dtype and dtype.kind in "iub" and (cast != values).any():
        wrong = values[np.flatnonzero(cast != values)[0]]
        raise ValueError(f"{holds} {wrong}, which does not fit into {dtype}.")
    return cast


def _describe(values: _Feature) -> str:
    if isinstance(values, list):
        return f"one value of {len(values[0]):,} bytes" if len(values) == 1 else f"{len(values):,} values of bytes"
    return f"{len(values):,} {'floats' if values.dtype.kind == 'f' else 'integers'}"


def parse_example(record: bytes, names: Container[str] | None = None) -> _Features:
    """Parses the features of an Example; only those in ``names`` if given.

    Returns:
      Feature name → int64 ``[n]``, float32 ``[n]``, or a list of bytes. A feature without a kind is left out, as TensorFlow
      does.

    Raises:
      ValueError: the bytes are not an Example.
    """
    found: _Features = {}
    try:
        for field, features in _fields(record, 0, len(record)):
            if field == 1:
                for entry in _messages(record, *features):
                    _parse_entry(record, entry, names, found)
    except (IndexError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the record of {len(record):,} bytes is not a tf.train.Example ({error}). Use the decoder of what was written, "
            "such as DecodeRaw for the bytes of one array."
        ) from error
    return found


def _parse_entry(record: bytes, span: tuple[int, int], names: Container[str] | None, found: _Features) -> None:
    name, feature = "", None
    for field, value in _fields(record, *span):
        if field == 1:
            name = record[value[0] : value[1]].decode()
        elif field == 2:
            feature = value
    if feature is None or (names is not None and name not in names):
        return
    for kind, values in _fields(record, *feature):
        if kind in _PARSERS:
            found[name] = _PARSERS[kind](record, *values)


def _fields(record: bytes, start: int, stop: int) -> Iterator[tuple[int, Any]]:
    """Yields number and value of each field: first byte and end of a value with a length, the value of a number."""
    while start < stop:
        tag, start = _varint(record, start)
        wire = tag & 7
        if tag < 8:
            raise IndexError(f"field number 0 at byte {start - 1}")
        if wire == _LENGTH:
            size, start = _varint(record, start)
            value, end = (start, start + size), start + size
        elif wire == _VARINT:
            value, end = _varint(record, start)
        elif wire in (_FIXED32, _FIXED64):
            end = start + (4 if wire == _FIXED32 else 8)
            value = record[start:end]
        else:
            raise IndexError(f"wire type {wire} at byte {start}")
        if end > stop:
            raise IndexError(f"field {tag >> 3} ends after the message")
        yield tag >> 3, value
        start = end


def _messages(record: bytes, start: int, stop: int) -> Iterator[tuple[int, int]]:
    return (value for field, value in _fields(record, start, stop) if field == 1)


def _varint(record: bytes, start: int) -> tuple[int, int]:
    """Returns a number and the index after it."""
    value = record[start]
    if value < 128:
        return value, start + 1
    value &= 127
    for place in range(1, 10):
        byte = record[start + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:  # the ten bytes of a negative number have 70 bits, of which 64 count
            return value & _MASK, start + place + 1
    raise IndexError(f"a number of more than 10 bytes at byte {start}")


def _parse_bytes(record: bytes, start: int, stop: int) -> list[bytes]:
    return [record[low:high] for low, high in _messages(record, start, stop)]


def _parse_floats(record: bytes, start: int, stop: int) -> np.ndarray:
    parts = [
        record[value[0] : value[1]] if isinstance(value, tuple) else value
        for field, value in _fields(record, start, stop)
        if field == 1
    ]
    packed = b"".join(parts)
    if len(packed) % 4:
        raise IndexError(f"a list of floats of {len(packed)} bytes")
    return np.frombuffer(packed, "<f4").astype(np.float32, copy=False)


def _parse_integers(record: bytes, start: int, stop: int) -> np.ndarray:
    parts = []
    for field, value in _fields(record, start, stop):
        if field == 1:
            packed = isinstance(value, tuple)  # a parser must accept both forms, even mixed
            parts.append(unpack_varints(record[value[0] : value[1]]) if packed else np.array([value], np.uint64))
    return np.concatenate(parts).view(np.int64) if parts else np.empty(0, np.int64)


_PARSERS: dict[int, Callable[[bytes, int, int], _Feature]] = {
    BYTES: _parse_bytes,
    FLOAT: _parse_floats,
    INT64: _parse_integers,
}


def unpack_varints(packed: bytes) -> np.ndarray:
    """Decodes numbers of 7 bits per byte, uint64[n]."""
    if len(packed) < _FEW_VALUES:
        values, start = [], 0
        while start < len(packed):
            value, start = _varint(packed, start)
            values.append(value)
        return np.array(values, np.uint64)
    stored = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(stored < 128) + 1
    if not len(ends) or ends[-1] != len(stored):
        raise IndexError("a number is cut short")
    starts = np.concatenate([[0], ends[:-1]])
    longest = int((ends - starts).max())
    if longest > 10:
        raise IndexError("a number of more than 10 bytes")
    values = (stored[starts] & 127).astype(np.uint64)
    for place in range(1, longest):
        more = starts + place < ends
        values[more] |= (stored[starts[more] + place] & np.uint8(127)).astype(np.uint64) << np.uint64(7 * place)
    return values


_NOT_FOR_MANY = (
    "decodes one record and was given a list. Pass it as decode=, not as decode_batch=; in Map, without batched=."
)
_NOT_FOR_ONE = "decodes a list of records and was given one. Pass it as decode_batch=, not as decode=."


@public("meshfeed.sources")
class DecodeRaw:
    """``decode_batch`` for records that each hold the raw bytes of one array, all of the same shape.

    Does what ``tf.io.decode_raw`` does, but into memory whose alignment lets a CPU device use it without a copy.
    ``b"".join`` with ``np.frombuffer`` lacks this alignment, which costs one more copy per batch. Can be pickled and
    sent to workers::

        ArrayRecord(paths, decode_batch=DecodeRaw(np.int32, (2048,), key="tokens"))

    Args:
      dtype: dtype of the stored numbers, in this machine's byte order.
      shape: shape of one record; an int for one dimension, ``()`` for a scalar.
      key: if given, records are ``{key: array}``.

    Raises:
      SettingsError: ``dtype`` or ``shape`` is invalid, a record has 0 bytes, or the dtype holds Python objects.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import DecodeRaw
      >>> DecodeRaw("int16", 2)([np.array([1, 2], np.int16).tobytes()]).tolist()
      [[1, 2]]
    """

    fresh_arrays = True  # each call returns new memory, so the feed need not copy it

    @hides_own_frames
    def __init__(self, dtype: Any, shape: int | Sequence[int] = (), *, key: str | None = None) -> None:
        try:
            self.dtype = np.dtype(dtype)
            self.shape = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
        except TypeError as error:
            raise SettingsError(
                f"DecodeRaw({dtype!r}, {shape!r}): {error}. It takes a dtype, and a shape as an int or a tuple of ints.",
                setting="decode_batch",
            ) from error
        if self.dtype.subdtype is not None:  # a subarray dtype adds its own dimensions
            self.dtype, parts = self.dtype.subdtype
            self.shape += parts
        self.key = key
        self.num_bytes = math.prod(self.shape) * self.dtype.itemsize
        if self.num_bytes <= 0 or self.dtype.hasobject:
            raise SettingsError(
                f"DecodeRaw({self.dtype}, {self.shape}): a record must be at least one number of a fixed size; give "
                "the dtype and shape that were written.",
                setting="decode_batch",
            )

    def __call__(self, records: Sequence[bytes]) -> Any:
        """Decodes records into one array.

        Args:
          records: bytes of n records.

        Returns:
          A new array ``[n, *shape]`` of ``dtype``, or ``{key: array}``.

        Raises:
          ValueError: a record has a different size; ``bad_records=SkipBad(…)`` treats it as a bad record.
          TypeError: got one record instead of a sequence.
        """
        if isinstance(records, bytes | bytearray | memoryview):
            raise TypeError(f"{self!r} {_NOT_FOR_ONE}")
        if set(map(len, records)) - {self.num_bytes}:
            row = next(row for row, record in enumerate(records) if len(record) != self.num_bytes)
            raise self._wrong_size(row, len(records), len(records[row]))
        rows = memory.empty((len(records), *self.shape), self.dtype)
        if len(records):
            # One pack_into call is twice as fast as one assignment per record.
            _packer(self.num_bytes, len(records)).pack_into(rows.reshape(-1).view(np.uint8).data, 0, *records)
        return rows if self.key is None else {self.key: rows}

    def from_rows(self, rows: np.ndarray) -> Any:
        """Decodes records that a source has already read into one array, without copying.

        Args:
          rows: uint8 ``[n, bytes per record]``, C-contiguous, newly allocated.

        Returns:
          A view of ``rows`` as ``[n, *shape]`` of ``dtype``, or ``{key: array}``.

        Raises:
          ValueError: records have a different size.
        """
        if rows.shape[1] != self.num_bytes:
            raise self._wrong_size(0, len(rows), rows.shape[1])
        array = rows.view(self.dtype).reshape(len(rows), *self.shape)
        return array if self.key is None else {self.key: array}

    def _wrong_size(self, row: int, num_records: int, num_bytes: int) -> ValueError:
        return ValueError(
            f"record {row} of {num_records} has {num_bytes} bytes; {self.dtype}{list(self.shape)} takes "
            f"{self.num_bytes}. Give DecodeRaw the dtype and shape that were written."
        )

    def __repr__(self) -> str:
        key = "" if self.key is None else f", key={self.key!r}"
        return f"DecodeRaw({self.dtype.name!r}, {self.shape}{key})"


def refuse_as_decode(decode: object, source: str) -> None:
    """Raises SettingsError if a :class:`DecodeRaw` is passed as ``decode=`` instead of ``decode_batch=``."""
    if isinstance(decode, DecodeRaw):
        raise SettingsError(f"{source} got decode={decode!r}, which {_NOT_FOR_ONE}", setting="decode")


@functools.lru_cache(maxsize=16)
def _packer(num_bytes: int, count: int) -> struct.Struct:
    """A struct of ``count`` fields of ``num_bytes`` bytes each, which copies all records in one call."""
    return struct.Struct(f"{num_bytes}s" * count)
