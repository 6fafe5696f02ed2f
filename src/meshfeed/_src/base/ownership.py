"""Copies arrays that user code could still write.

JAX aliases numpy arrays on CPU, and copies them to other devices after the call has returned. A decoder or source that
refilled an array for the next batch would therefore change a batch already delivered. Arrays skip the copy only if they
can no longer be written: meshfeed made them (:func:`own_batch`), or their memory is immutable (:func:`is_immutable`).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.trees import flatten
from meshfeed._src.base.types import PyTree


def own_batch(batch: PyTree, maker: object, method: str) -> PyTree:
    """Returns ``batch``, the result of ``maker.method()``, with every leaf in memory that only the caller can write.

    Classes of meshfeed whose methods return new memory on each call set ``fresh_arrays = True``, which skips the copy.
    A subclass that overrides the method must repeat the attribute to skip it too.
    """
    return batch if returns_fresh(maker, method) else own_leaves(batch)


def own_leaves(batch: PyTree) -> PyTree:
    """Applies :func:`own` to each leaf."""
    leaves, treedef = flatten(batch)
    return treedef.unflatten([own(leaf) for leaf in leaves])


def own_record(record: PyTree) -> PyTree:
    """Returns a record with its arrays copied, and its containers too, in their order; other leaves are the same objects.

    Arrays are those of numpy, tensors of PyTorch, and bytearrays.
    """
    if isinstance(record, np.ndarray):
        return record.copy()
    # Faster than flattening, which also sorts the keys.
    if type(record) is dict and all(type(name) is str for name in record):
        return {name: own_record(value) for name, value in record.items()}
    if isinstance(record, str | bytes | np.generic):
        return record
    if type(record) in (list, tuple) and _has_dicts(record):
        return type(record)(map(own_record, record))
    leaves, treedef = flatten(record)
    return treedef.unflatten(map(_copied, leaves))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | bytearray):
        return leaf.copy()
    return leaf.clone() if hasattr(leaf, "clone") and hasattr(leaf, "__array__") else leaf


def _has_dicts(items: Any) -> bool:
    return any(isinstance(item, dict) or (isinstance(item, list | tuple) and _has_dicts(item)) for item in items)


def returns_fresh(maker: object, method: str) -> bool:
    """Whether arrays returned by ``maker.method()`` are never written again."""
    return declared_with(type(maker), method, "fresh_arrays") and method not in getattr(maker, "__dict__", ())


@functools.lru_cache(maxsize=256)
def declared_with(kind: type, method: str, name: str) -> bool:
    """Whether the class that defines ``method`` also defines ``name``; overriding only the method returns False."""
    for base in kind.__mro__:
        if method in vars(base):
            return name in vars(base)
    return False


def own(leaf: object) -> Any:
    """Returns ``leaf`` as an array that only the caller can write: itself if immutable, otherwise an aligned copy.

    Leaves that a plain array cannot represent are returned unchanged; the check of the batch rejects them by name.
    """
    try:
        array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    except Exception:  # a PRNG key, or a tensor that requires grad
        return leaf
    if array.dtype.hasobject or array.dtype.kind in "SU":
        return leaf
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        return leaf
    return array if is_immutable(array) else memory.copy(array)


def seal(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Makes an array of :mod:`~meshfeed._src.base.memory` and its memory read-only; :func:`own` then skips the copy."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base.flags.writeable = False
        base = base.base
    return array


def is_immutable(array: np.ndarray[Any, Any]) -> bool:
    """Whether the memory of an array can no longer be written: it is ``bytes``, or :func:`seal` made it read-only.

    A read-only view is not enough: its base may still be written through an array, a memory map (or its file), a
    bytearray, a tensor or shared memory.
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
