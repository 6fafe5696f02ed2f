"""Which changes of type a tree that is wanted may ask for.

Another precision is often meant (float32 to bfloat16, a counter as float). A change that drops what the values are, such
as fractions, signs or imaginary parts, is nearly always a template of another model, and nothing would say so later.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from meshfeed._src.base.errors import CheckpointError

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
    """Refuses a cast from one dtype to another that loses more than precision.

    Args:
      where: names the leaf, for the message.
      stored: dtype.
      wanted: dtype; neither one is of PRNG keys.

    Raises:
      CheckpointError: floats as integers, numbers as bools, complex as real, or types that are no numbers.
    """
    stored, wanted = np.dtype(stored), np.dtype(wanted)
    if stored == wanted:
        return
    before, after = _kind(stored), _kind(wanted)
    if before is None and after is None and np.can_cast(stored, wanted, "safe"):  # text of another length
        return
    if before is None or after is None or after < before:
        names = [dtype.name if kind is None else _KINDS[kind] for dtype, kind in ((stored, before), (wanted, after))]
        raise CheckpointError(
            f"{where} is stored as {stored.name}, wanted is {wanted.name}: {names[0]} values are not cast to {names[1]} "
            f"ones. Ask for {stored.name}, and convert the result where that is meant."
        )


def may_overflow(stored: Any, wanted: Any) -> bool:
    """Whether integers of one dtype may lie outside another integer dtype."""
    stored, wanted = np.dtype(stored), np.dtype(wanted)
    if not (jnp.issubdtype(stored, jnp.integer) and jnp.issubdtype(wanted, jnp.integer)):
        return False
    before, after = jnp.iinfo(stored), jnp.iinfo(wanted)
    return int(before.min) < int(after.min) or int(before.max) > int(after.max)


def check_fits(where: str, values: np.ndarray[Any, Any], wanted: Any) -> None:
    """Refuses integers that would wrap around.

    Raises:
      CheckpointError: a value lies outside ``wanted``; names it and the range.
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
    """Refuses to give a stored Python value as one of another type, unless no value changes by that.

    Raises:
      CheckpointError: text as a number, a float as an int, and the like.
    """
    if stored is wanted:
        return
    # Subclasses of int and float (enums, say) count as what they are.
    before, after = (
        next((k for t, k in _PYTHON_KINDS.items() if issubclass(one, t)), None) for one in (stored, wanted)
    )
    if before is None or after is None or after < before:
        raise CheckpointError(
            f"{where} is stored as {stored.__name__}, wanted is {wanted.__name__}. Ask for {stored.__name__}, and "
            "convert the result where that is meant."
        )


def python_type_of(dtype: Any) -> type:
    """The Python type that a value of ``dtype`` becomes; ``object`` where there is none."""
    kind = _kind(np.dtype(dtype))
    return object if kind is None else list(_PYTHON_KINDS)[kind]
