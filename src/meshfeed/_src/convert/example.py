"""Encodes Arrow columns as serialized ``tf.train.Example`` messages.

Features are in order of name, so equal rows have equal bytes. ``sources/decode.py``
describes the message and decodes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshfeed._src.convert.columns import Values, values_of
from meshfeed._src.sources.decode import BYTES, FLOAT, INT64

if TYPE_CHECKING:
    import pyarrow as pa

_VALUES_TAG = b"\x0a"  # field 1, with a length
_CACHED_SIZES = 1 << 16


def encode_examples(columns: Sequence[tuple[str, pa.Array]], first_record: int) -> list[bytes]:
    """Encodes rows as Examples.

    Args:
      columns: name and values of each feature, as :func:`meshfeed._src.convert.columns.flatten` returns them.
      first_record: number of the first row, for messages.

    Returns:
      One message per row. A null value leaves its feature out.

    Raises:
      SourceError: a value cannot be stored; names the column and the record.
    """
    entries = [_entries(name, values_of(name, column, first_record)) for name, column in sorted(columns)]
    rows = zip(*entries, strict=True)
    return [_VALUES_TAG + varint(len(body)) + body for body in map(b"".join, rows)]


def _entries(name: str, values: Values) -> list[bytes]:
    """Returns each row's entry of the map of features; empty for a null."""
    payloads, tag = values.payloads, _tag(values.kind)
    wrap = _wrapper(name, tag, one=True)
    if values.kind == BYTES:
        if values.lengths is None:
            entries = [wrap(len(payload)) + payload for payload in payloads]
        else:
            entries = _byte_lists(name, tag, payloads, values.lengths)
    else:
        entries = [wrap(len(payload)) + payload for payload in payloads]
    if values.nulls is not None:
        for row in np.flatnonzero(values.nulls).tolist():
            entries[row] = b""
    return entries


def _byte_lists(name: str, tag: bytes, payloads: Sequence[bytes | memoryview], lengths: np.ndarray) -> list[bytes]:
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


__all__ = ["BYTES", "FLOAT", "INT64", "encode_examples", "varint"]
