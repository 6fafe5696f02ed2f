"""Converts the dtypes of host batches to those of JAX: native byte order, and 32 bits if x64 is off."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import SourceError

_NARROWED = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.float64, np.float32),
        (np.complex128, np.complex64),
    )
}

_AS_THEY_ARE = frozenset(
    np.dtype(name) for name in ("int32", "float32", "uint8", "bool", "int8", "uint32")
)  # need no conversion in any mode, so they skip the checks


def narrowed_dtype(dtype: Any, x64: bool) -> np.dtype[Any]:
    """Returns the dtype that values of ``dtype`` have on device.

    Args:
      dtype: dtype of the host array.
      x64: whether 64-bit dtypes are kept (``jax_enable_x64``).
    """
    native = np.dtype(dtype).newbyteorder("=")
    return native if x64 else _NARROWED.get(native, native)


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    if dtype.names is None and dtype.type.__module__.split(".")[0] == "ml_dtypes":
        return True
    return dtype.kind in "biu" or (dtype.kind in "fc" and dtype.itemsize <= (8 if dtype.kind == "f" else 16))


def narrow(leaf: Any, path: str, x64: bool) -> np.ndarray[Any, Any]:
    """Returns the leaf as an array of a dtype that JAX supports.

    Args:
      leaf: array ``[rows, ...]``. Returned unchanged if its dtype needs no conversion, otherwise as a new aligned
        copy.
      path: the leaf's path, for messages.
      x64: whether 64-bit dtypes are kept. If not, int64 and uint64 become 32 bits wide if every value fits, and
        float64 and complex128 are rounded to 32 bits per component.

    Raises:
      SourceError: an integer does not fit in 32 bits, or the dtype is not numeric (strings, objects, times).
    """
    array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if array.dtype in _AS_THEY_ARE:
        return array
    if not _is_numeric(array.dtype):
        raise SourceError(
            f"leaf {path or '(the only one)'} has dtype {array.dtype} and shape {array.shape}, and a jax.Array holds "
            f"bool, integers, floats and complex numbers only. Turn it into numbers in `decode`, or drop it there."
        )
    dtype = narrowed_dtype(array.dtype, x64)
    if dtype == array.dtype and array.dtype.isnative:
        return array
    if dtype.kind in "iu" and dtype.itemsize < array.dtype.itemsize:
        _check_fits(array, dtype, path)
    with np.errstate(over="ignore"):  # an out-of-range float becomes inf, as in jax.device_put
        return memory.copy(array, dtype)


def _check_fits(array: np.ndarray[Any, Any], dtype: np.dtype[Any], path: str) -> None:
    if not array.size:
        return
    limits = np.iinfo(dtype)
    smallest, largest = array.min(), array.max()
    if smallest >= limits.min and largest <= limits.max:
        return
    bad = (array < limits.min) | (array > limits.max)
    place = tuple(int(i[0]) for i in np.nonzero(bad))
    raise SourceError(
        f"leaf {path or '(the only one)'} of dtype {array.dtype} holds {int(array[place])} at {place}, which does not "
        f"fit in {dtype} ({limits.min}..{limits.max}), and jax_enable_x64 is off. Map the values to a smaller range "
        f"in `decode`, or switch 64-bit types on with jax.config.update('jax_enable_x64', True)."
    )
