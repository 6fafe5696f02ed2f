"""Decodes fixed-size records into one array that a CPU device can use without a further copy."""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.tracebacks import hides_own_frames
from meshfeed._src.base.types import public

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
    """Rejects a :class:`DecodeRaw` passed as ``decode=`` instead of ``decode_batch=``.

    Raises:
      SettingsError: ``decode`` is a :class:`DecodeRaw`.
    """
    if isinstance(decode, DecodeRaw):
        raise SettingsError(f"{source} got decode={decode!r}, which {_NOT_FOR_ONE}", setting="decode")


@functools.lru_cache(maxsize=16)
def _packer(num_bytes: int, count: int) -> struct.Struct:
    """A struct of ``count`` fields of ``num_bytes`` bytes each, which copies all records in one call."""
    return struct.Struct(f"{num_bytes}s" * count)
