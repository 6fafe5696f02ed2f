"""Arrow arrays from and to numpy and bytes, by their buffers.

``pyarrow.array``, ``pyarrow.scalar`` and ``numpy.asarray(array)`` import pandas, which takes a second in every worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


def null_mask(array: pa.Array) -> np.ndarray | None:
    """Returns bool[n], which values are null; None if there are none."""
    return flags(array.is_null()) if array.null_count else None


def flags(array: pa.BooleanArray) -> np.ndarray:
    """Returns booleans without nulls, bool[n]."""
    import pyarrow as pa

    return numbers(array.cast(pa.uint8()), np.dtype(np.uint8)).astype(bool)


def numbers(array: pa.Array, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns a read-only view of the values of ``dtype``; those of nulls are undefined."""
    values = array.buffers()[1]
    if values is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(values, dtype, len(array), array.offset * dtype.itemsize)


def integers(values: np.ndarray) -> pa.Array:
    """Returns int64[n] as an array."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values, np.int64))])


def binary(values: Sequence[bytes | None]) -> pa.Array:
    """Returns values of bytes as an array; None is null."""
    import pyarrow as pa

    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value or b"") for value in values], out=offsets[1:])
    present = np.packbits([value is not None for value in values], bitorder="little")
    validity = pa.py_buffer(present) if None in values else None
    return spans(offsets, b"".join(value or b"" for value in values), validity)


def spans(offsets: np.ndarray, content: bytes, validity: pa.Buffer | None = None) -> pa.Array:
    """Returns n values of bytes as an array; ``offsets`` int64[n + 1] are their edges in ``content``."""
    import pyarrow as pa

    buffers = [validity, pa.py_buffer(np.ascontiguousarray(offsets, np.int64)), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def to_bytes(array: pa.Array) -> list[bytes]:
    """Returns the values of a column of text or binary; of a null, no bytes."""
    import pyarrow as pa

    wide = array.cast(pa.large_binary()) if array.type != pa.large_string() else array.view(pa.large_binary())
    _, offsets, data = wide.buffers()
    if not len(wide) or offsets is None or data is None:
        return [b""] * len(wide)
    edges = np.frombuffer(offsets, np.int64, len(wide) + 1, wide.offset * 8).tolist()
    first = edges[0]
    content = data.slice(first, edges[-1] - first).to_pybytes()
    values = [content[start - first : stop - first] for start, stop in itertools.pairwise(edges)]
    nulls = null_mask(wide)
    if nulls is not None:
        for row in np.flatnonzero(nulls).tolist():
            values[row] = b""
    return values
