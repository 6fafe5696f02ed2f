"""Which stored values may be restored as another dtype.

A change of precision is often intended (float32 to bfloat16, a counter as float). A change that drops fractions, signs or
imaginary parts nearly always means that the template belongs to a different model, and would go unnoticed, so it is
rejected.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshfeed._src.base.errors import CheckpointError

# In order of generality: a cast to a later kind loses at most precision.
_NUMBERS: dict[type, tuple[str, type]] = {
    bool: ("bool", np.bool_),
    int: ("integer", jnp.integer),
    float: ("floating point", jnp.floating),
    complex: ("complex", jnp.complexfloating),
}


def python_type_of(dtype: DTypeLike) -> type:
    """Returns the Python type that a value of ``dtype`` becomes, or ``object`` if there is none."""
    return next((python for python, (_, kind) in _NUMBERS.items() if jnp.issubdtype(dtype, kind)), object)


def _loses(stored: type, wanted: type) -> bool:
    """Returns whether a cast from one Python type to another loses more than precision."""
    # Subclasses of int and float (such as enums) count as their base type. bool is an int, and comes first.
    before, after = ([issubclass(one, kind) for kind in _NUMBERS] for one in (stored, wanted))
    return not any(before) or not any(after) or after.index(True) < before.index(True)


def check_cast(where: str, stored: DTypeLike, wanted: DTypeLike) -> None:
    """Rejects floats as integers, numbers as bools, complex as real, and non-numeric types, with a CheckpointError."""
    stored, wanted = np.dtype(stored), np.dtype(wanted)
    if stored.names and wanted.names and stored.names != wanted.names:  # numpy would match them by place
        raise CheckpointError(
            f"{where} is stored with the fields {list(stored.names)}, but {list(wanted.names)} were requested. Request the "
            "stored ones."
        )
    before, after = python_type_of(stored), python_type_of(wanted)
    longer_text = before is after is object and np.can_cast(stored, wanted, "safe")
    if stored != wanted and not longer_text and _loses(before, after):
        names = [_NUMBERS.get(python_type_of(dtype), (dtype.name,))[0] for dtype in (stored, wanted)]
        raise CheckpointError(
            f"{where} is stored as {stored.name}, but {wanted.name} was requested: {names[0]} values are not cast to "
            f"{names[1]}. Request {stored.name}, and convert the result if that is intended."
        )
    if not np.can_cast(stored, wanted, "unsafe"):  # as between some narrow dtypes
        raise CheckpointError(
            f"{where} is stored as {stored.name}, but {wanted.name} was requested: numpy has no cast between them. Request "
            f"{stored.name}, and convert the result."
        )


def check_python(where: str, stored: type, wanted: type) -> None:
    """Rejects text as a number, a float as an int, and the like, with a CheckpointError."""
    if stored is not wanted and _loses(stored, wanted):
        raise CheckpointError(
            f"{where} is stored as {stored.__name__}, but {wanted.__name__} was requested. Request {stored.__name__}, and "
            "convert the result if that is intended."
        )


def may_overflow(stored: DTypeLike, wanted: DTypeLike) -> bool:
    """Returns whether values of one dtype may be outside the range of another: numbers, and times of a finer unit."""
    stored, wanted = np.dtype(stored), np.dtype(wanted)
    if stored.kind in "Mm":
        return stored != wanted and np.can_cast(stored, wanted, "safe")
    before, after = _range_of(stored), _range_of(wanted)
    return before is not None and after is not None and not after[0] <= before[0] <= before[1] <= after[1]


def _range_of(dtype: np.dtype[Any]) -> tuple[Any, Any] | None:
    """The least and the greatest finite value of a dtype of numbers; of complex numbers, of each part."""
    if jnp.issubdtype(dtype, jnp.integer):
        limits: Any = jnp.iinfo(dtype)
        return int(limits.min), int(limits.max)
    if jnp.issubdtype(dtype, jnp.inexact):
        limits = jnp.finfo(dtype)
        return float(limits.min), float(limits.max)
    return None


def check_fits(where: str, values: NDArray[np.generic], wanted: DTypeLike) -> None:
    """Rejects values outside the range of a dtype, with a CheckpointError that gives one and the range.

    Integers would wrap around, finite numbers become infinite or NaN, and times other times.
    """
    wanted, values = np.dtype(wanted), values.reshape(-1)
    if not values.size:
        return
    limits = _range_of(wanted)
    if limits is None:
        outside = _lost_times(values, wanted)
    elif jnp.issubdtype(wanted, jnp.integer) or not jnp.issubdtype(values.dtype, jnp.inexact):
        ends = [int(values.min()), int(values.max())]
        outside = [value for value in ends if not limits[0] <= value <= limits[1]]
    else:
        outside = _lost(values, wanted, limits)
    if len(outside):
        shown = "dates and times nearer to 1970" if limits is None else f"{limits[0]} to {limits[1]}"
        stored = "int" if values.dtype == object else values.dtype.name
        raise CheckpointError(
            f"{where} holds {outside[0]}, stored as {stored}, but {wanted.name} holds only {shown}. Request {stored}."
        )


def _lost_times(values: NDArray[Any], wanted: np.dtype[Any]) -> NDArray[Any]:
    """The dates and times that a cast to a finer unit changes."""
    known = values[~np.isnat(values)]
    try:
        return known[known.astype(wanted).astype(known.dtype) != known]
    except OverflowError:  # since numpy 2.5
        farthest = int(np.abs(known.astype(np.int64)).argmax())
        return known[farthest : farthest + 1]


def _lost(values: NDArray[Any], wanted: np.dtype[Any], limits: tuple[float, float]) -> NDArray[Any]:
    """The finite numbers that a cast to a dtype of floating-point or complex numbers makes infinite or NaN."""
    is_real = jnp.issubdtype(values.dtype, jnp.floating)
    if is_real and limits[0] <= float(values.min()) <= float(values.max()) <= limits[1]:  # false if one is NaN
        return values[:0]
    with np.errstate(all="ignore"):
        return values[np.isfinite(values) & ~np.isfinite(values.astype(wanted))]
