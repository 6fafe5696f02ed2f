"""A lossless conversion of the values of pytrees, such as the states of lanes, to JSON.

JSON has no tuples, bytes or arrays, and only string keys. Such values become a dict with one reserved key:
``__tuple__``, ``__bytes__``, ``__array__``, ``__pairs__`` (a dict as a list of pairs), or ``__meshfeed__`` with a kind
and its arguments. A dict that itself contains a reserved key is written as pairs, so user data is never mistaken for
an encoding.

The structure, shapes and dtypes of a pytree also have a JSON form, for exchange between hosts without pickle.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from meshfeed._src.base import trees
from meshfeed._src.base.errors import SourceError, shorten
from meshfeed._src.base.types import JsonValue, PyTree

_TUPLE = "__tuple__"
_BYTES = "__bytes__"
_PAIRS = "__pairs__"
_ARRAY = "__array__"
OTHER = "__meshfeed__"
_RESERVED = frozenset((_TUPLE, _BYTES, _PAIRS, _ARRAY, OTHER))
_DECIMAL_BITS = 4096  # Python refuses to convert integers of more than 4,300 digits
_SHOWN_CHARACTERS = 80
ALLOWED = (
    "get_state() must return None, numbers, strings, bytes, numpy arrays and scalars, and lists, tuples and dicts of "
    "them, not subclasses such as named tuples."
)


def encode_value(value: object) -> JsonValue:
    """Converts ``value`` to JSON from which :func:`decode_value` restores it with the same types.

    Supports None, bool, int, float, complex, str, bytes, bytearray, numpy scalars and arrays (except structured, object
    and long double dtypes), and lists, tuples and dicts of these. Subclasses (named tuples, ordered dicts, enums) are
    rejected because they would be restored as the plain type.

    Raises:
      TypeError: part of the value has no exact JSON form.
    """
    if (encode := _ENCODERS.get(type(value))) is not None:
        return encode(value)
    if isinstance(value, np.generic):
        return _encode_scalar(value)
    raise _refused(value)


def decode_value(value: object) -> Any:
    """The inverse of :func:`encode_value`.

    Raises:
      ValueError: ``value`` contains a kind that only a newer version of meshfeed can read.
    """
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key in _RESERVED:
            return _DECODERS[key](inner)
    return {key: decode_value(item) for key, item in value.items()}


def _refused(value: object) -> TypeError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__name__}".removeprefix("builtins.")
    return TypeError(f"a {name} has no exact JSON form: {shorten(repr(value), _SHOWN_CHARACTERS)}")


def _other(kind: str, *arguments: object) -> dict[str, Any]:
    return {OTHER: [kind, *arguments]}


def _encode_float(value: float) -> JsonValue:  # JSON has no NaN and no infinity; the bytes keep the payload of a NaN
    return value if math.isfinite(value) else _other("float", struct.pack(">d", value).hex())


def _encode_dict(value: dict[Any, Any]) -> JsonValue:
    if all(type(key) is str for key in value) and _RESERVED.isdisjoint(value):
        return {key: encode_value(item) for key, item in value.items()}
    return {_PAIRS: [[encode_value(key), encode_value(item)] for key, item in value.items()]}


def _dtype_name(dtype: np.dtype[Any]) -> str | None:
    """A name from which ``np.dtype`` recreates the dtype, including byte order; None if there is none."""
    if dtype.kind in "biufcMmSU":
        is_long_double = dtype.char in "gG"  # padded, and its format depends on the platform
        return None if is_long_double or not dtype.itemsize else dtype.str
    if dtype.kind != "V" or dtype.type is np.void:  # objects and structured arrays
        return None
    try:
        return dtype.name if np.dtype(dtype.name) == dtype else None  # bfloat16, float8_e4m3fn, int4, ...
    except TypeError:
        return None


def _encode_array(value: np.ndarray[Any, Any]) -> JsonValue:
    name = _dtype_name(value.dtype)
    if name is None:
        raise _refused(value)
    return {_ARRAY: [name, list(value.shape), value.tobytes().hex()]}


def _encode_scalar(value: np.generic) -> JsonValue:
    if type(value) is np.str_:  # an array would drop trailing NULs
        return _other("str_", str.__str__(value))
    if type(value) is np.bytes_:
        return _other("bytes_", bytes(value).hex())
    name = _dtype_name(value.dtype)
    if name is None or value.dtype.type is not type(value):
        raise _refused(value)
    return _other("scalar", name, value.tobytes().hex())


def _decode_array(inner: Any) -> np.ndarray[Any, Any]:
    name, shape, data = inner
    return np.ndarray(shape, np.dtype(name), bytes.fromhex(data)).copy()  # writable, unlike a view of bytes


def _decode_other(inner: Any) -> Any:
    kind, *arguments = inner
    if kind not in _OTHERS:
        raise ValueError(f"this version of meshfeed cannot read values of the kind {kind!r}. Upgrade meshfeed.")
    return _OTHERS[kind](*arguments)


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((type(None), bool, str), lambda value: value),
    int: lambda value: value if value.bit_length() <= _DECIMAL_BITS else _other("int", hex(value)),
    float: _encode_float,
    complex: lambda value: _other("complex", _encode_float(value.real), _encode_float(value.imag)),
    bytes: lambda value: {_BYTES: value.hex()},
    bytearray: lambda value: _other("bytearray", value.hex()),
    list: lambda value: [encode_value(item) for item in value],
    tuple: lambda value: {_TUPLE: [encode_value(item) for item in value]},
    dict: _encode_dict,
    np.ndarray: _encode_array,
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    _TUPLE: lambda inner: tuple(decode_value(item) for item in inner),
    _BYTES: bytes.fromhex,
    _PAIRS: lambda inner: {decode_value(key): decode_value(item) for key, item in inner},
    _ARRAY: _decode_array,
    OTHER: _decode_other,
}
_OTHERS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "complex": lambda real, imag: complex(decode_value(real), decode_value(imag)),
    "bytearray": bytearray.fromhex,
    "str_": np.str_,
    "bytes_": lambda text: np.bytes_(bytes.fromhex(text)),
    "scalar": lambda name, data: _decode_array((name, (), data))[()],
}


def tree_to_json(tree: PyTree) -> dict[str, Any]:
    """Describes a pytree whose leaves have a shape and a dtype.

    Supports dicts, lists, tuples and None. Most hosts never need the description, so any other node (a namedtuple, a
    registered class) is not an error here: the result holds a message, which :func:`tree_from_json` raises.
    """
    leaves, structure = trees.flatten(tree)
    numbered = structure.unflatten(range(len(leaves)))
    try:
        containers = encode_value(numbered)
    except TypeError:
        containers = None
    if trees.flatten(decode_value(containers))[1] != structure:  # a namedtuple would become a tuple
        return {
            "unsupported": f"records of the structure {structure} cannot be described to other hosts: only dicts, lists, "
            "tuples and None can. Convert them to dicts, in decode= or in the source."
        }
    return {"tree": containers, "leaves": [[list(leaf.shape), np.dtype(leaf.dtype).name] for leaf in leaves]}


def tree_from_json(value: Any) -> PyTree:
    """Inverts :func:`tree_to_json`: returns ``jax.ShapeDtypeStruct`` leaves; SourceError if it describes none."""
    if "unsupported" in value:
        raise SourceError(value["unsupported"])
    specs = [trees.spec(shape, np.dtype(name)) for shape, name in value["leaves"]]
    return trees.map_leaves(lambda number: specs[number], decode_value(value["tree"]))
