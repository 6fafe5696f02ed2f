"""Memory that user code can still write is copied before it is handed on.

JAX uses a numpy array on CPU as it is, and copies it to other devices later than the call returns. So an array that a
decoder or a source fills again for the next batch would change a batch that was delivered. Arrays are passed on without a
copy only if it is known that nobody writes to them: because meshfeed made them (:func:`own_batch`), or because their
memory is immutable (:func:`is_immutable`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.types import PyTree


def own_batch(batch: PyTree, maker: Any, method: str) -> PyTree:
    """What ``maker.method()`` returned, with every leaf in memory that only the caller can write.

    Methods of meshfeed that return fresh memory at each call are trusted: their class has ``fresh_arrays = True``. A
    subclass that overrides the method is not trusted unless it repeats the attribute.
    """
    return batch if returns_fresh(maker, method) else jax.tree.map(own, batch)


def returns_fresh(maker: Any, method: str) -> bool:
    """Whether arrays that ``maker.method()`` returns are never written again."""
    return declared_with(type(maker), method, "fresh_arrays") and method not in getattr(maker, "__dict__", ())


@functools.lru_cache(maxsize=256)
def declared_with(kind: type, method: str, name: str) -> bool:
    """Whether the class that ``method`` comes from has ``name`` too: overriding only the method changes what it means."""
    for base in kind.__mro__:
        if method in vars(base):
            return name in vars(base)
    return False


def own(leaf: Any) -> Any:
    """``leaf`` as an array in memory that only the caller can write: itself if it is immutable, else an aligned copy.

    What numpy cannot hold is returned as it is, to be refused by name where batches are checked.
    """
    try:
        array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    except Exception:  # a PRNG key, a tensor that needs its gradient
        return leaf
    if array.dtype.hasobject or array.dtype.kind in "SU":
        return leaf
    return array if is_immutable(array) else memory.copy(array)


def seal(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Makes an array of :mod:`~meshfeed._src.base.memory` read-only, with its memory, so that :func:`own` passes it."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base.flags.writeable = False
        base = base.base
    return array


def is_immutable(array: np.ndarray[Any, Any]) -> bool:
    """Whether nobody can write to the memory of an array: it lies in ``bytes``, or in memory that :func:`seal` closed.

    A read-only view says nothing by itself. What it is a view of may be written by whoever holds that: an array, a memory
    map (or the file below it), a bytearray, a tensor, shared memory.
    """
    owner: Any = array
    while True:
        if isinstance(owner, memoryview):
            owner = owner.obj
        elif not isinstance(owner, np.ndarray):
            return isinstance(owner, bytes)
        elif owner.flags.writeable:
            return False
        elif isinstance(owner, memory.AlignedMemory):
            return True
        else:
            owner = owner.base
