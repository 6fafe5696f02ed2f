"""Encoding of messages between the controller and its CPU hosts: bytes in arrays, and errors as values.

Colocated Python passes only ``jax.Array``, and exceptions do not propagate between hosts. A call is therefore JSON in a
uint8 array, its answer is bytes in a uint8 array, and an error is a kind of answer. Each device has its own row, because
every host fills the rows of its own devices.

Answers are JSON, or JSON followed by the bytes of arrays. Only the user's functions are pickled, and only from the
controller to the hosts (:func:`make_payload`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import cloudpickle
import jax
import numpy as np
from jax.sharding import Sharding

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.exact_json import decode_value, encode_value, tree_from_json, tree_to_json
from meshfeed._src.base.failure import Failure
from meshfeed._src.base.types import PyTree

OK, END, ERROR = 0, 1, 2
_FIELDS = 8
HEADER_BYTES = 8 * _FIELDS
_JSON, _ARRAYS, _FAILURE = b"J", b"A", b"E"
_LENGTH = struct.Struct("<Q")
_HOST = struct.Struct("<q")
_PAD = b" "


@dataclasses.dataclass(frozen=True)
class Header:
    """Outcome of a call on one host; part of every answer.

    Attributes:
      flag: OK, END (no further batch) or ERROR.
      length: size in bytes of the answer to fetch.
      step: number of batches delivered.
      position: number of records delivered across all hosts.
      size: rows of the next global batch; 0 if unknown.
      host: process index.
    """

    flag: int
    length: int = 0
    step: int = 0
    position: int = 0
    size: int = 0
    host: int = 0

    def to_row(self) -> np.ndarray[Any, Any]:
        """Returns uint8 ``[HEADER_BYTES]``; as bytes, 64-bit integers survive with ``jax_enable_x64`` off."""
        values = np.zeros(_FIELDS, "<i8")
        values[:6] = dataclasses.astuple(self)
        return values.view(np.uint8)

    @classmethod
    def from_row(cls, row: np.ndarray[Any, Any]) -> Header:
        """The inverse of :meth:`to_row`."""
        return cls(*(int(value) for value in np.ascontiguousarray(row[:HEADER_BYTES]).view("<i8")[:6]))


def to_rows(row: np.ndarray[Any, Any], sharding: Sharding, num_rows: int) -> jax.Array:
    """Returns uint8 ``[num_rows, len(row)]`` with the same row on each device of this process."""
    return jax.make_array_from_callback((num_rows, len(row)), sharding, lambda _: np.ascontiguousarray(row[None]))


def rows_of(array: jax.Array) -> list[np.ndarray[Any, Any]]:
    """Returns the rows on the devices addressable by this process."""
    return [np.asarray(shard.data).reshape(-1) for shard in array.addressable_shards]


def padded(data: bytes, length: int) -> np.ndarray[Any, Any]:
    """Returns ``data`` padded with spaces, which JSON ignores, as uint8 ``[length]``."""
    return np.frombuffer(data.ljust(length, _PAD), np.uint8)


def padded_length(length: int) -> int:
    """Rounds up to a power of two, because each distinct shape is compiled."""
    return max(256, 1 << (length - 1).bit_length())


def encode_call(name: str, args: Sequence[Any]) -> bytes:
    """Encodes a call with JSON arguments."""
    return json.dumps([name, list(args)]).encode()


def decode_call(row: np.ndarray[Any, Any]) -> tuple[str, list[Any]]:
    """The inverse of :func:`encode_call`."""
    name, args = json.loads(row.tobytes())
    return name, args


def encode_answer(value: PyTree) -> bytes:
    """Encodes a pytree of numpy arrays, or any value that :func:`meshfeed._src.base.exact_json.encode_value` takes."""
    leaves = jax.tree.leaves(value)
    if leaves and all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return _ARRAYS + _encode_arrays(value)
    return _JSON + json.dumps(encode_value(value)).encode()


def _encode_arrays(tree: PyTree) -> bytes:
    spec = json.dumps(tree_to_json(tree)).encode()
    data = [np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")).tobytes() for leaf in jax.tree.leaves(tree)]
    return b"".join((_LENGTH.pack(len(spec)), spec, *data))


def _decode_arrays(data: bytes) -> PyTree:
    """Decodes a pytree of arrays; raises SourceError if its structure could not be described."""
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    leaves, structure = jax.tree.flatten(tree_from_json(json.loads(data[_LENGTH.size : start])))
    arrays = []
    for leaf in leaves:  # copies, because frombuffer returns read-only views
        arrays.append(np.frombuffer(data, leaf.dtype, math.prod(leaf.shape), start).reshape(leaf.shape).copy())
        start += arrays[-1].nbytes
    return jax.tree.unflatten(structure, arrays)


def address(answer: bytes, process_index: int) -> bytes:
    """Prefixes an answer with the process index of its host."""
    return _HOST.pack(process_index) + answer


def addressed_length(length: int) -> int:
    """Size in bytes of an answer of ``length`` bytes with its prefix."""
    return _HOST.size + length


def take_address(row: np.ndarray[Any, Any]) -> tuple[int, bytes]:
    """Splits a row into the process index and the answer, which may be followed by padding."""
    data = row.tobytes()
    return _HOST.unpack_from(data)[0], data[_HOST.size :]


def encode_error(error: BaseException) -> bytes:
    """Encodes the type, arguments, attributes, text and notes of an exception."""
    return _FAILURE + json.dumps(Failure.exact(error).to_json()).encode()


def decode_answer(data: bytes) -> PyTree:
    """Returns the decoded value; an exception is returned, not raised."""
    kind, body = data[:1], data[1:]
    if kind == _FAILURE:
        return Failure.from_json(json.loads(body)).exception()
    return _decode_arrays(body) if kind == _ARRAYS else decode_value(json.loads(body))


def make_payload(value: object, *, setting: str, what: str) -> bytes:
    """Pickles ``value`` for a different interpreter.

    Raises:
      SettingsError: it cannot be pickled and unpickled.
    """
    try:
        # Unpickle as well: some objects pickle but do not unpickle.
        payload = cloudpickle.dumps(value)
        cloudpickle.loads(payload)
    except Exception as error:
        raise SettingsError(
            f"{setting} cannot be sent to the hosts beside the accelerators: {type(error).__name__}: {error}. Expected "
            f"{what}. Create files, locks, readers and devices inside it, not outside.",
            setting=setting,
        ) from error
    return payload
