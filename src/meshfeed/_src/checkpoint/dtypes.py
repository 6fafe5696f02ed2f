"""How values of each dtype are stored, and which changes of dtype a restore may request.

Most values are stored unchanged, and plain Orbax reads them. TensorStore lacks some narrow dtypes; their values are
stored as equal numbers of a different dtype, so plain Orbax returns the right values if asked for the narrow dtype. The
manifest records the original dtype and, under ``stored``, the encoding.

On restore, a change of precision is often intended (float32 to bfloat16, a counter as float). A change that drops
fractions, signs or imaginary parts nearly always means that the template belongs to a different model, and would go
unnoticed, so it is rejected.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshfeed._src.arrays.reshard import bit_width
from meshfeed._src.base.errors import CheckpointError

CARRIERS = {"bits": np.uint8, "int8": np.int8, "float16": np.float16}
"""Encodings as numbers of a different dtype → that dtype."""

BYTES = "bytes"
"""Encoding as flat bytes: text, dates, structured dtypes and long doubles, which Orbax cannot store."""

NOTHING = "nothing"
"""Encoding of empty arrays, which are not stored. A single uint8 takes their place in Orbax's files."""

VALUE = "value"
"""Encoding in the manifest: Python numbers, text and bytes."""


def is_extension(dtype: np.dtype[np.generic]) -> bool:
    """Returns whether ``ml_dtypes`` defines the dtype."""
    return dtype.type.__module__.split(".")[0] == "ml_dtypes"


def is_key_dtype(dtype: DTypeLike | None) -> bool:
    """Returns whether a dtype is a dtype of typed PRNG keys."""
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def native(dtype: np.dtype[np.generic]) -> bool:
    """Returns whether Orbax can store a numpy dtype, in native byte order."""
    return dtype.kind in "biufc" and dtype.name not in ("longdouble", "clongdouble", "float128", "complex256")


@functools.lru_cache(maxsize=64)
def carrier_of(dtype: DTypeLike) -> np.dtype[np.generic]:
    """Returns the dtype in which values of ``dtype`` are stored: ``dtype`` itself unless TensorStore lacks it.

    In that case narrow integers are stored as uint8 or int8 and narrow floats as float16, which represent every value.
    """
    dtype = np.dtype(dtype)
    if not is_extension(dtype):
        return dtype
    try:
        ts.dtype(dtype.name)
    except ValueError:
        if not jnp.issubdtype(dtype, jnp.integer):
            return np.dtype(np.float16)
        return np.dtype(np.int8 if int(jnp.iinfo(dtype).min) < 0 else np.uint8)
    return dtype


def stored_as(dtype: DTypeLike) -> dict[str, str]:
    """Returns the manifest field for values of ``dtype``; empty for most dtypes."""
    carrier = carrier_of(dtype)
    return {} if carrier == dtype else {"stored": next(name for name, held in CARRIERS.items() if held == carrier)}


@functools.lru_cache(maxsize=16)
def half_bits(dtype: np.dtype[np.generic]) -> NDArray[np.uint16]:
    """Returns, for each bit pattern of a narrow float, the bits of the float16 that stores that value; uint16[n]."""
    codes = np.arange(1 << bit_width(dtype), dtype=np.uint8)
    values = codes.view(dtype)
    # A cast would give all NaNs the same payload, so use the bit pattern itself as the payload.
    return np.where(
        np.isnan(values.astype(np.float32)), np.uint16(0x7E00) + codes, values.astype(np.float16).view(np.uint16)
    )


@functools.lru_cache(maxsize=16)
def _codes_by_half(dtype: np.dtype[np.generic]) -> NDArray[np.uint8]:
    halves = half_bits(dtype)
    codes = np.zeros(1 << 16, np.uint8)
    codes[halves] = np.arange(halves.size, dtype=np.uint8)
    return codes


def to_carrier(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Converts host values to the dtype in which they are stored."""
    carrier = carrier_of(array.dtype)
    if carrier == array.dtype:
        return array
    if carrier == np.float16:
        return half_bits(array.dtype)[array.view(np.uint8), ...].view(np.float16)  # `...`: a 0-d array stays one
    return array.astype(carrier)


def from_carrier(values: NDArray[np.generic], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Inverts :func:`to_carrier`; also reads older versions, which stored narrow floats as their bits in uint8."""
    values = np.asarray(values, order="C")
    if values.dtype == np.float16:
        return _codes_by_half(dtype)[values.view(np.uint16)].view(dtype)
    return values.view(np.int8).astype(dtype) if jnp.issubdtype(dtype, jnp.integer) else values.view(dtype)


# In order of generality: a cast to a later kind loses at most precision.
_KINDS: dict[type, tuple[str, type]] = {
    bool: ("bool", np.bool_),
    int: ("integer", jnp.integer),
    float: ("floating point", jnp.floating),
    complex: ("complex", jnp.complexfloating),
}
_PYTHON = tuple(_KINDS)


def python_type_of(dtype: DTypeLike) -> type:
    """Returns the Python type that a value of ``dtype`` becomes, or ``object`` if there is none."""
    return next((python for python, (_, kind) in _KINDS.items() if jnp.issubdtype(dtype, kind)), object)


def _loses(stored: type, wanted: type) -> bool:
    """Returns whether a cast from one Python type to another loses more than precision."""
    # Subclasses of int and float (such as enums) count as their base type. bool is an int, and comes first.
    before, after = (
        next((n for n, kind in enumerate(_PYTHON) if issubclass(one, kind)), None) for one in (stored, wanted)
    )
    return before is None or after is None or after < before


def check_cast(where: str, stored: DTypeLike, wanted: DTypeLike) -> None:
    """Rejects floats as integers, numbers as bools, complex as real, and non-numeric types, with a CheckpointError."""
    stored, wanted = np.dtype(stored), np.dtype(wanted)
    before, after = python_type_of(stored), python_type_of(wanted)
    longer_text = before is after is object and np.can_cast(stored, wanted, "safe")
    if stored != wanted and not longer_text and _loses(before, after):
        names = [
            _KINDS[kind][0] if kind in _KINDS else dtype.name for kind, dtype in ((before, stored), (after, wanted))
        ]
        raise CheckpointError(
            f"{where} is stored as {stored.name}, but {wanted.name} was requested: {names[0]} values are not cast to "
            f"{names[1]}. Request {stored.name}, and convert the result if that is intended."
        )


def check_python(where: str, stored: type, wanted: type) -> None:
    """Rejects text as a number, a float as an int, and the like, with a CheckpointError."""
    if stored is not wanted and _loses(stored, wanted):
        raise CheckpointError(
            f"{where} is stored as {stored.__name__}, but {wanted.__name__} was requested. Request {stored.__name__}, and "
            "convert the result if that is intended."
        )


def may_overflow(stored: DTypeLike, wanted: DTypeLike) -> bool:
    """Returns whether values of one integer dtype may not fit in another; False unless both are integer dtypes."""
    if not (jnp.issubdtype(stored, jnp.integer) and jnp.issubdtype(wanted, jnp.integer)):
        return False
    before, after = jnp.iinfo(stored), jnp.iinfo(wanted)
    return int(before.min) < int(after.min) or int(before.max) > int(after.max)


def check_fits(where: str, values: NDArray[np.generic], wanted: DTypeLike) -> None:
    """Rejects integers that would wrap around, with a CheckpointError that gives the value and the range."""
    if not values.size:
        return
    limits = jnp.iinfo(wanted)
    for value in (int(values.min()), int(values.max())):
        if not int(limits.min) <= value <= int(limits.max):
            raise CheckpointError(
                f"{where} holds {value}, stored as {values.dtype.name}, but {np.dtype(wanted).name} holds only "
                f"{limits.min} to {limits.max}. Request {values.dtype.name}."
            )
