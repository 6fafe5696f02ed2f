"""Host buffers that a CPU device can use as they are.

XLA's CPU client takes over a numpy array without a copy where its address is a multiple of 64, whatever
``may_alias`` says. ``np.empty`` gives such an address only sometimes; :func:`empty` always does, so that no copy is
made, on purpose. The price is a rule: a buffer that has been handed to JAX is not written while that ``jax.Array`` is
there, because a write would show in it. So buffers are fresh each time, and refilled only by who has dropped the array.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes; XLA's minimum alignment for a buffer that it does not own."""

_OWN_PAGES = 4 << 20  # bytes from which on numpy asks for huge pages too


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """An uninitialised C-contiguous array of which the first byte lies on a multiple of 64.

    Args:
      shape: sizes of the dimensions.
      dtype: any dtype without Python objects, those of ``ml_dtypes`` included.
    """
    dtype = np.dtype(dtype)
    return _placed(AlignedMemory(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8), shape, dtype)


def zeros(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """As :func:`empty`, of zeros. Large ones are pages of their own, which take no memory until they are written.

    They go back to the system when the array does. Those of ``np.zeros`` need not: glibc's malloc learns from each large
    array that is freed to keep such sizes for later, and what its many arenas keep adds up.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < _OWN_PAGES:
        return _placed(np.zeros(size + ALIGNMENT, np.uint8), shape, dtype)
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)  # as numpy does
    return np.frombuffer(pages, np.uint8).view(dtype).reshape(shape)


class AlignedMemory(np.ndarray):
    """What an array of :func:`empty` lies in: uint8[bytes of it + 64], its first byte anywhere."""


def _placed(raw: np.ndarray[Any, Any], shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.ndarray(shape, dtype, raw, -address(raw) % ALIGNMENT)


def address(array: np.ndarray[Any, Any]) -> int:
    """Where the first byte lies."""
    return array.ctypes.data


def is_aligned(array: np.ndarray[Any, Any]) -> bool:
    """Whether the first byte lies on a multiple of 64."""
    base: Any = array.base
    if type(base) is AlignedMemory and base.nbytes == array.nbytes + ALIGNMENT and array.flags.c_contiguous:
        return True  # the whole of what `empty` gave, known for a quarter of what asking for an address takes
    return not address(array) % ALIGNMENT


def copy(array: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
    """A fresh aligned C-contiguous copy, converted to ``dtype`` without checks if it is given."""
    fresh = empty(array.shape, array.dtype if dtype is None else dtype)
    np.copyto(fresh, array, casting="unsafe")
    return fresh
