"""Host buffers that a CPU device can use without a copy.

XLA's CPU client aliases a numpy array if its address is a multiple of 64, regardless of ``may_alias``. ``np.empty``
returns such an address only sometimes; :func:`empty` always does, to avoid the copy. In exchange, a buffer passed to
JAX must not be written while its ``jax.Array`` is alive, because the write would be visible in the array. Buffers are
therefore newly allocated each time, and only code that has dropped the array may refill its buffer.

Pages of large buffers are used again when the last array over them is gone (JAX keeps one until its ``jax.Array`` or its
transfer has ended), because the system takes longer to supply and clear new pages than a copy takes to fill them. malloc
does the same up to its largest ``M_MMAP_THRESHOLD``, 32 MiB.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

ALIGNMENT = 64
"""In bytes; XLA's minimum alignment for a buffer that it does not own."""

_OWN_PAGES = 4 << 20  # bytes; the size from which numpy requests huge pages too


_REUSED_FROM = 32 << 20  # bytes; malloc itself uses smaller ones again
_MAX_FREE = 4  # mappings; a feed in a steady state frees one when it needs one


def empty(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray[Any, Any]:
    """Returns an uninitialized C-contiguous array whose address is a multiple of 64."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < _REUSED_FROM:
        return _placed(AlignedMemory(size + ALIGNMENT, np.uint8), shape, dtype)
    pages = _free_pages.take(size) or _new_pages(size)
    owner = AlignedMemory(size, np.uint8, pages)  # numpy would skip an owner that is a view of a plain array
    weakref.finalize(owner, _free_pages.put, pages).atexit = False
    return np.ndarray(shape, dtype, owner)


class _FreePages:
    """Mappings that no array uses. The system takes their memory if it needs it (``MADV_FREE``). Any thread."""

    def __init__(self) -> None:
        self._free: collections.deque[mmap.mmap] = collections.deque(maxlen=_MAX_FREE)  # the oldest ones are dropped

    def put(self, pages: mmap.mmap) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a system without it
            pages.madvise(mmap.MADV_FREE)
        self._free.append(pages)

    def take(self, size: int) -> mmap.mmap | None:
        for pages in reversed(self._free.copy()):
            if len(pages) == size:
                with contextlib.suppress(ValueError):  # another thread has taken it
                    self._free.remove(pages)
                    return pages
        return None


_free_pages = _FreePages()


def _new_pages(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)  # as numpy does
    return pages


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
    return np.frombuffer(_new_pages(size), np.uint8).view(dtype).reshape(shape)


class AlignedMemory(np.ndarray):
    """The allocation behind an array of :func:`empty`: its bytes, and 64 more unless it has its own pages."""


def _placed(raw: np.ndarray[Any, Any], shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    # Much faster than `address`, for writable memory only.
    start = ctypes.addressof(ctypes.c_char.from_buffer(raw.data))
    return np.ndarray(shape, dtype, raw, -start % ALIGNMENT)


def address(array: np.ndarray[Any, Any]) -> int:
    """Address of the first byte."""
    return array.ctypes.data


def is_aligned(array: np.ndarray[Any, Any]) -> bool:
    """Whether the address of the first byte is a multiple of 64."""
    base: Any = array.base
    if type(base) is AlignedMemory and array.nbytes + ALIGNMENT >= base.nbytes and array.flags.c_contiguous:
        return True  # an entire array of `empty`; this check takes a quarter of the time of reading the address
    return not address(array) % ALIGNMENT


def copy(array: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
    """Returns a new aligned C-contiguous copy, cast to ``dtype`` if given, without checks."""
    fresh = empty(array.shape, array.dtype if dtype is None else dtype)
    np.copyto(fresh, array, casting="unsafe")
    return fresh
