"""Decodes the columns of MDS samples, one value at a time or a batch at once.

A sample is stored as the sizes in bytes (uint32) of its columns of variable size, followed by the values of all columns.
All numbers are little-endian.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import io
import json
import math
from collections.abc import Callable, Sequence

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import SourceError

_SCALARS = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    )
}
# The first byte of an array with a dtype of its own: the size of a value in bits, plus 1 if signed, 2 if a float.
_ARRAY_DTYPES = {dtype.itemsize * 8 + {"u": 0, "i": 1, "f": 2}[dtype.kind]: dtype for dtype in _SCALARS.values()}
_SHAPE_DTYPES = [np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")]
_WORD = np.dtype("<u4")
_HEADER_BYTES = 2 + 63 * 8  # dtype, rank, and the sizes of as many dimensions as there may be
_HOST_ONLY = {"bytes", "str", "str_decimal"}
"""Encodings whose values no device holds."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the samples.

    Attributes:
      name: its name.
      encoding: its encoding, as in ``index.json``.
      size: size of a value in bytes; None if it varies.
    """

    name: str
    encoding: str
    size: int | None


class Layout:
    """The columns of a data set's samples.

    Args:
      columns: all columns, in stored order.

    Attributes:
      columns: all columns, in stored order.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        sizes = [column.size or 0 for column in self.columns]
        self._varying = [number for number, column in enumerate(self.columns) if column.size is None]
        self._sizes = np.array(sizes, np.int64)

    def bounds(self, samples: Sequence[bytes]) -> tuple[np.ndarray, int | None]:
        """Returns where the values of each sample begin and end.

        Args:
          samples: n stored samples.

        Returns:
          int64[n, columns + 1], the first byte of each value and the end of the last one; and the index of a sample
          whose size is not the sum of its parts, or None.
        """
        num_bytes = np.fromiter(map(len, samples), np.int64, len(samples))
        head = _WORD.itemsize * len(self._varying)
        if len(samples) and int(num_bytes.min()) < head:
            return np.empty((0, 0), np.int64), int(num_bytes.argmin())
        sizes = np.empty((len(samples), len(self.columns) + 1), np.int64)
        sizes[:, 0] = head
        sizes[:, 1:] = self._sizes
        if self._varying:
            heads = b"".join([sample[:head] for sample in samples])
            sizes[:, 1 + np.array(self._varying)] = np.frombuffer(heads, _WORD).reshape(len(samples), -1)
        bounds = np.cumsum(sizes, axis=1)
        wrong = np.flatnonzero(bounds[:, -1] != num_bytes)
        return bounds, int(wrong[0]) if len(wrong) else None


def check_columns(columns: Sequence[Column], *, what: str) -> None:
    """Checks that every column can be decoded.

    Raises:
      SourceError: a column is pickled, or has an unknown encoding; names it.
    """
    for column in columns:
        others = [other.name for other in columns if other is not column]
        leave_out = f", or leave it out: columns={others!r}" if others else ""
        if column.encoding == "pkl":
            raise SourceError(
                f"{what}: column {column.name!r} is stored as a pickle, which can run any code when it is read, and "
                f"meshfeed never unpickles. Write the column with another encoding, such as json or ndarray{leave_out}."
            )
        try:
            decoder(column.encoding)
        except (KeyError, ValueError, TypeError) as error:
            raise SourceError(
                f"{what}: column {column.name!r} has the unknown encoding {column.encoding!r}. Expected one of Mosaic "
                f"Streaming's{leave_out}."
            ) from error


def check_stackable(columns: Sequence[Column], *, what: str) -> None:
    """Checks that no column is text or bytes.

    Raises:
      SourceError: a column is; names it.
    """
    for column in columns:
        if column.encoding in _HOST_ONLY:
            others = [other.name for other in columns if other.encoding not in _HOST_ONLY]
            leave_out = f", or leave it out: columns={others!r}" if others else ""
            raise SourceError(
                f"{what}: column {column.name!r} is stored as {column.encoding}, which no device holds. Expected "
                f"numbers or arrays. Convert it with meshfeed.sources.Map(source, function){leave_out}."
            )


@functools.lru_cache(maxsize=1024)
def decoder(encoding: str) -> Callable[[bytes], object]:
    """Returns the function that decodes one value.

    Images become uint8 arrays, and lists of images lists of arrays. All other values are what Mosaic Streaming returns.

    Raises:
      KeyError, TypeError, ValueError: the encoding is unknown.
    """
    kind, _, options = encoding.partition(":")
    if kind == "ndarray":
        dtype, shape = _array_options(options)
        return lambda content: _decode_array(content, dtype, shape)
    if options:
        raise ValueError(encoding)
    if kind in _SCALARS:
        return lambda content: np.frombuffer(content, _SCALARS[kind])[0]
    return _DECODERS[kind]


def stack(column: Column, rows: np.ndarray) -> np.ndarray | None:
    """Decodes the values of a column of numbers or arrays.

    Args:
      column: the column.
      rows: uint8[n, bytes per value], the stored values.

    Returns:
      A new array ``[n, ...]``; None if the column has no such form, or the values differ in shape or dtype.
    """
    kind, _, options = column.encoding.partition(":")
    if not rows.size or (kind != "ndarray" and kind != "int" and kind not in _SCALARS):
        return None
    dtype, shape = _array_options(options) if kind == "ndarray" else (_SCALARS.get(kind, _SCALARS["int64"]), ())
    first = 0
    if dtype is None or shape is None:
        dtype, shape, first = _array_header(rows[0, :_HEADER_BYTES].tobytes(), dtype, shape)
        if (rows[:, :first] != rows[0, :first]).any():
            return None
    if math.prod(shape) * dtype.itemsize != rows.shape[1] - first:
        return None
    out = memory.empty((len(rows), *shape), dtype.newbyteorder("="))
    np.copyto(out.reshape(len(rows), -1).view(np.uint8), rows[:, first:])
    return out


def _array_options(options: str) -> tuple[np.dtype | None, tuple[int, ...] | None]:
    dtype, _, shape = options.partition(":")
    sizes = tuple(int(size) for size in shape.split(",")) if shape else None
    return (_SCALARS[dtype] if dtype else None), sizes


def _array_header(
    content: bytes, dtype: np.dtype | None, shape: tuple[int, ...] | None
) -> tuple[np.dtype, tuple[int, ...], int]:
    """Returns the dtype, the shape, and the offset of the values of a stored array."""
    at = 0
    if dtype is None:
        dtype, at = _ARRAY_DTYPES[content[0]], 1
    if shape is None:
        rank, sizes = content[at] >> 2, _SHAPE_DTYPES[content[at] & 3]
        at += 1
        shape = tuple(np.frombuffer(content, sizes, rank, at).tolist())
        at += rank * sizes.itemsize
    return dtype, shape, at


def _decode_array(content: bytes, dtype: np.dtype | None, shape: tuple[int, ...] | None) -> np.ndarray:
    dtype, shape, at = _array_header(content, dtype, shape)
    return np.frombuffer(content, dtype, offset=at).reshape(shape)


def _decode_image_file(content: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content)))


def _decode_raw_image(content: bytes) -> np.ndarray:
    """Decodes width, height and length of the mode's name (uint32), the name, and the pixels."""
    from PIL import Image

    width, height, length = np.frombuffer(content, _WORD, 3).tolist()
    mode = content[12 : 12 + length].decode()
    return np.asarray(Image.frombytes(mode, (width, height), content[12 + length :]))


def _decode_list(content: bytes, first: int, decode: Callable[[bytes], object]) -> list[object]:
    """Decodes a list: at byte ``first``, the number of elements and their sizes (uint32), then the elements."""
    count = int(np.frombuffer(content, _WORD, 1, first)[0])
    sizes = np.frombuffer(content, _WORD, count, first + 4).tolist()
    at, found = first + 4 * (1 + count), []
    for size in sizes:
        found.append(decode(content[at : at + size]))
        at += size
    return found


_DECODERS: dict[str, Callable[[bytes], object]] = {
    "bytes": bytes,
    "int": lambda content: int(np.frombuffer(content, _SCALARS["int64"])[0]),
    "jpeg": _decode_image_file,
    "jpeg_array": lambda content: _decode_list(content, 0, _decode_image_file),
    "jpegarray": lambda content: _decode_list(content, 0, _decode_image_file),
    "json": json.loads,
    "list[jpeg]": lambda content: _decode_list(content, 4, _decode_image_file),
    "list[pil]": lambda content: _decode_list(content, 4, _decode_raw_image),
    "list[png]": lambda content: _decode_list(content, 4, _decode_image_file),
    "pil": _decode_raw_image,
    "png": _decode_image_file,
    "str": lambda content: content.decode(),
    "str_decimal": lambda content: decimal.Decimal(content.decode()),
    "str_float": lambda content: float(content),
    "str_int": lambda content: int(content),
}
