"""Host buffers that a CPU device can use without a copy.

XLA's CPU client aliases a numpy array if its address is a multiple of 64, regardless of ``may_alias``. ``np.empty``
returns such an address only sometimes; :func:`empty` always does, to avoid the copy. In exchange, a buffer passed to
JAX must not be written while its ``jax.Array`` is alive, because the write would be visible in the array. Buffers are
therefore newly allocated each time, and only code that has dropped the array may refill its buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

ALIGNMENT = 64
"""In bytes; XLA's minimum alignment for a buffer that it does not own."""

_OWN_PAGES = 4 << 20  # bytes; the size from which numpy requests huge pages too


def empty(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray[Any, Any]:
    """Returns an uninitialized C-contiguous array whose address is a multiple of 64."""
    dtype = np.dtype(dtype)
    return _placed(AlignedMemory(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8), shape, dtype)


def zeros(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray[Any, Any]:
    """Returns an array of zeros, aligned like :func:`empty`; pages of a large array use no memory until written.

    A large array (4 MiB or more) has its own memory mapping, which returns to the system when the array is freed.
    Memory of ``np.zeros`` may not: glibc's malloc raises its mmap threshold when a large block is freed, then keeps
    blocks of that size for reuse, in each of its arenas.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < _OWN_PAGES:
        return _placed(np.zeros(size + ALIGNMENT, np.uint8), shape, dtype)
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)  # as numpy does
    return np.frombuffer(pages, np.uint8).view(dtype).reshape(shape)


class AlignedMemory(np.ndarray):
    """The unaligned allocation behind an array of :func:`empty`: uint8 ``[array.nbytes + 64]``."""


def _placed(raw: np.ndarray[Any, Any], shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    start = ctypes.addressof(
        ctypes.c_char.from_buffer(raw.data)
    )  # much faster than `address`, for writable memory only
    return np.ndarray(shape, dtype, raw, -start % ALIGNMENT)


def address(array: np.ndarray[Any, Any]) -> int:
    """Address of the first byte."""
    return array.ctypes.data


def is_aligned(array: np.ndarray[Any, Any]) -> bool:
    """Whether the address of the first byte is a multiple of 64."""
    base: Any = array.base
    if type(base) is AlignedMemory and base.nbytes == array.nbytes + ALIGNMENT and array.flags.c_contiguous:
        return True  # an entire array of `empty`; this check takes a quarter of the time of reading the address
    return not address(array) % ALIGNMENT


def copy(array: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
    """Returns a new aligned C-contiguous copy, cast to ``dtype`` if given, without checks."""
    fresh = empty(array.shape, array.dtype if dtype is None else dtype)
    np.copyto(fresh, array, casting="unsafe")
    return fresh
