"""Which dtype changes a restore may request.

A change of precision is often intended (float32 to bfloat16, a counter as float). A change that drops fractions, signs
or imaginary parts nearly always means that the template belongs to a different model, and would go unnoticed.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from meshfeed._src.base.errors import CheckpointError

# In order of generality: a cast to a later kind loses at most precision.
_KINDS = ("bool", "integer", "floating point", "complex")
_PYTHON_KINDS: dict[type, int] = {bool: 0, int: 1, float: 2, complex: 3}


def _kind(dtype: np.dtype[Any]) -> int | None:
    if dtype == np.bool_:
        return 0
    for number, kind in ((1, jnp.integer), (2, jnp.floating), (3, jnp.complexfloating)):
        if jnp.issubdtype(dtype, kind):
            return number
    return None


def check_cast(where: str, stored: Any, wanted: Any) -> None:
    """Rejects a cast that loses more than precision.

    Args:
      where: the leaf, for the error message.
      stored: stored dtype, not of PRNG keys.
      wanted: requested dtype, not of PRNG keys.

    Raises:
      CheckpointError: floats as integers, numbers as bools, complex as real, or non-numeric types.
    """
    stored, wanted = np.dtype(stored), np.dtype(wanted)
    if stored == wanted:
        return
    before, after = _kind(stored), _kind(wanted)
    if before is None and after is None and np.can_cast(stored, wanted, "safe"):  # text of a different length
        return
    if before is None or after is None or after < before:
        names = [dtype.name if kind is None else _KINDS[kind] for dtype, kind in ((stored, before), (wanted, after))]
        raise CheckpointError(
            f"{where} is stored as {stored.name}, wanted is {wanted.name}: {names[0]} values are not cast to {names[1]} "
            f"ones. Ask for {stored.name}, and convert the result where that is meant."
        )


def may_overflow(stored: Any, wanted: Any) -> bool:
    """Returns whether values of one integer dtype may not fit in another; False unless both are integer dtypes."""
    stored, wanted = np.dtype(stored), np.dtype(wanted)
    if not (jnp.issubdtype(stored, jnp.integer) and jnp.issubdtype(wanted, jnp.integer)):
        return False
    before, after = jnp.iinfo(stored), jnp.iinfo(wanted)
    return int(before.min) < int(after.min) or int(before.max) > int(after.max)


def check_fits(where: str, values: np.ndarray[Any, Any], wanted: Any) -> None:
    """Rejects integers that would wrap around.

    Raises:
      CheckpointError: a value does not fit in ``wanted``; the message gives the value and the range.
    """
    if not values.size:
        return
    limits = jnp.iinfo(np.dtype(wanted))
    least, most = int(values.min()), int(values.max())
    if least < int(limits.min) or most > int(limits.max):
        raise CheckpointError(
            f"{where} holds {least if least < int(limits.min) else most}, stored as {values.dtype.name}, and "
            f"{np.dtype(wanted).name} holds {int(limits.min)} to {int(limits.max)}. Ask for {values.dtype.name}."
        )


def check_python(where: str, stored: type, wanted: type) -> None:
    """Rejects restoring a stored Python value as a different type if that could change the value.

    Raises:
      CheckpointError: text as a number, a float as an int, and the like.
    """
    if stored is wanted:
        return
    # Treat subclasses of int and float (such as enums) as their base type.
    before, after = (
        next((k for t, k in _PYTHON_KINDS.items() if issubclass(one, t)), None) for one in (stored, wanted)
    )
    if before is None or after is None or after < before:
        raise CheckpointError(
            f"{where} is stored as {stored.__name__}, wanted is {wanted.__name__}. Ask for {stored.__name__}, and "
            "convert the result where that is meant."
        )


def python_type_of(dtype: Any) -> type:
    """Returns the Python type that a value of ``dtype`` becomes, or ``object`` if there is none."""
    kind = _kind(np.dtype(dtype))
    return object if kind is None else list(_PYTHON_KINDS)[kind]
