"""Records of one size as one array, without a copy that the devices would make again."""

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
from meshfeed._src.base.names import public
from meshfeed._src.base.tracebacks import hides_own_frames

_NOT_FOR_ONE = "decodes a list of records and was given one. Pass it as decode_batch=, not as decode=."


@public("meshfeed.sources")
class DecodeRaw:
    """``decode_batch`` for records that are the bytes of one array each, all of one shape.

    What ``tf.io.decode_raw`` does, into memory that a CPU device uses as it is: ``b"".join`` and ``np.frombuffer`` give an
    address that it cannot use, so that each batch is copied once more. Pickles, so it may be sent to workers::

        ArrayRecord(paths, decode_batch=DecodeRaw(np.int32, (2048,), key="tokens"))

    Args:
      dtype: of the stored numbers, in this machine's byte order.
      shape: of one record; an int for one dimension, ``()`` for a scalar.
      key: records become ``{key: array}`` if it is given.

    Raises:
      SettingsError: records of no bytes, a dtype of Python objects, or no dtype or shape at all.
    """

    fresh_arrays = True

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
        if self.dtype.subdtype is not None:  # numbers of several parts: dimensions of their own
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
        """The records as one array.

        Args:
          records: bytes of n records.

        Returns:
          A fresh array ``[n, *shape]`` of ``dtype``, or a dict with it.

        Raises:
          ValueError: a record of a different size, which ``bad_records=SkipBad(…)`` treats as a bad record.
          TypeError: one record instead of a sequence.
        """
        if isinstance(records, bytes | bytearray | memoryview):
            raise TypeError(f"{self!r} {_NOT_FOR_ONE}")
        if set(map(len, records)) - {self.num_bytes}:
            row = next(row for row, record in enumerate(records) if len(record) != self.num_bytes)
            raise self._wrong_size(row, len(records), len(records[row]))
        rows = memory.empty((len(records), *self.shape), self.dtype)
        if len(records):
            # One call copies all of them: twice as fast as as many assignments.
            packer(self.num_bytes, len(records)).pack_into(rows.reshape(-1).view(np.uint8).data, 0, *records)
        return rows if self.key is None else {self.key: rows}

    def from_rows(self, rows: np.ndarray) -> Any:
        """As a call, for records that a source has read into one array: no copy is made.

        Args:
          rows: uint8 ``[n, bytes of a record]``, C-contiguous, fresh.
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


def refuse_as_decode(decode: Any, source: str) -> None:
    """Raises if ``decode=`` of a source is a :class:`DecodeRaw`, which is for ``decode_batch=``.

    Raises:
      SettingsError: it is one.
    """
    if isinstance(decode, DecodeRaw):
        raise SettingsError(f"{source} got decode={decode!r}, which {_NOT_FOR_ONE}", setting="decode")


@functools.lru_cache(maxsize=16)
def packer(num_bytes: int, count: int) -> struct.Struct:
    """``count`` fields of ``num_bytes`` bytes each, so that one call copies all of them."""
    return struct.Struct(f"{num_bytes}s" * count)
