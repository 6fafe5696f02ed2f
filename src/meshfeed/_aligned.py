"""Host buffers that a CPU device can use as they are.

XLA's CPU client takes over a numpy array without a copy where its address is a multiple of 64, whatever
``may_alias`` says. ``np.empty`` gives such an address only sometimes; :func:`empty` always does, so that no copy is
made, on purpose. The price is a rule: a buffer that has been handed to JAX is never written again, because a write
would show in the ``jax.Array``. So buffers are fresh each time and never refilled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes; XLA's minimum alignment for a buffer that it does not own."""


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """An uninitialised C-contiguous array of which the first byte lies on a multiple of 64.

    Args:
      shape: sizes of the dimensions.
      dtype: any dtype without Python objects, those of ``ml_dtypes`` included.
    """
    dtype = np.dtype(dtype)
    raw = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return np.ndarray(shape, dtype, raw, start)


def is_aligned(array: np.ndarray[Any, Any]) -> bool:
    """Whether the first byte lies on a multiple of 64."""
    return not array.__array_interface__["data"][0] % ALIGNMENT


def copy(array: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
    """A fresh aligned C-contiguous copy, converted to ``dtype`` without checks if it is given."""
    fresh = empty(array.shape, array.dtype if dtype is None else dtype)
    np.copyto(fresh, array, casting="unsafe")
    return fresh
