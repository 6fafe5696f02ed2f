"""Stacks records into host batches of numpy arrays, and checks that all have the same structure.

``host_batch.py`` has the operations on batches that are stacked already.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.types import PyTree


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """Path, shape and dtype of one leaf of one record; the shape excludes the row dimension."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def describe(self) -> str:
        """Formats the leaf for messages: ``['tokens'] int32[2048]``."""
        return f"{self.path or '(the record)'} {self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class RecordSpec:
    """The common structure of a source's records: treedef and leaves."""

    treedef: Any
    leaves: tuple[LeafSpec, ...]

    def fits(self, batch: PyTree, num_rows: int) -> bool:
        """Whether a batch has this structure with arrays ``[num_rows, ...]``; fast, and False if unsure."""
        leaves, treedef = jax.tree.flatten(batch)
        if treedef != self.treedef:
            return False
        for leaf, wanted in zip(leaves, self.leaves, strict=True):  # a loop: all() with a generator takes twice as long
            if type(leaf) is not np.ndarray or leaf.dtype != wanted.dtype or leaf.shape != (num_rows, *wanted.shape):
                return False
        return True

    def shapes(self) -> PyTree:
        """Returns the record as a pytree of ``jax.ShapeDtypeStruct``."""
        return self.treedef.unflatten([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves])

    def zeros(self, num_rows: int) -> PyTree:
        """Returns a batch of ``num_rows`` rows of zeros."""
        return self.treedef.unflatten([memory.zeros((num_rows, *leaf.shape), leaf.dtype) for leaf in self.leaves])

    def empty(self, num_rows: int) -> PyTree:
        """Returns an uninitialized batch of ``num_rows`` rows."""
        return self.treedef.unflatten([memory.empty((num_rows, *leaf.shape), leaf.dtype) for leaf in self.leaves])


RAGGED = "ragged rows: "
_PACK = " For documents of unequal length use meshfeed.sources.Packed."
ALIKE = "All records of a source must have the same structure, shapes and dtypes; pad or cast them in the source."
_NO_DTYPES = (np.void, np.longdouble, np.clongdouble)  # types, not kinds: ml_dtypes have the same kind as np.void


def _where(record_id: int | None, lane_index: int | None) -> str:
    if record_id is not None:
        return f"record {record_id}"
    return "a record" if lane_index is None else f"a record of lane {lane_index}"


def is_ragged(array: np.ndarray) -> bool:
    """Whether an object array contains only lists or arrays; numpy makes one only if their lengths differ."""
    return (
        array.dtype.hasobject and array.size > 0 and all(isinstance(x, list | tuple | np.ndarray) for x in array.flat)
    )


def as_leaf(leaf: Any, path: str, where: str, **location: Any) -> np.ndarray:
    try:
        array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    except Exception as error:  # a PRNG key, or a tensor that requires grad
        raise SourceError(
            f"leaf {path or '(the record itself)'} of {where} is {type(leaf).__name__} (dtype "
            f"{getattr(leaf, 'dtype', 'unknown')}) of shape {tuple(getattr(leaf, 'shape', ()))}, which numpy cannot hold: "
            f"{error}",
            **location,
        ) from error
    if is_ragged(array):
        raise SourceError(
            f"{RAGGED}leaf {path or '(the record itself)'} of {where} holds {array.size} lists of unequal lengths. Pad "
            "or cut them to one length before the feed.",
            **location,
        )
    if array.dtype.kind in "OSUMm" or array.dtype.type in _NO_DTYPES:
        undecoded = not path and isinstance(leaf, bytes | bytearray | memoryview)
        remedy = (
            "Pass the source decode= (one record) or decode_batch= (a list of them) to turn bytes into arrays, such as "
            "meshfeed.sources.DecodeExample() for what meshfeed convert wrote."
            if undecoded
            else "Turn it into numbers with decode= or meshfeed.sources.Map, or leave that column out."
        )
        raise SourceError(
            f"leaf {path or '(the record itself)'} of {where} is {type(leaf).__name__} (dtype {array.dtype}) of shape "
            f"{array.shape}; a leaf must be an array or number of a dtype that JAX supports. {remedy}",
            **location,
        )
    return array


def flatten_record(
    record: PyTree, *, record_id: int | None = None, lane_index: int | None = None
) -> tuple[list[np.ndarray], RecordSpec]:
    """Returns the leaves of one record as arrays, and its structure.

    Raises:
      SourceError: a leaf is not an array or number of a dtype that JAX supports, or there are no leaves.
    """
    where = _where(record_id, lane_index)
    location = {"record_id": record_id, "lane_index": lane_index}
    paths, treedef = jax.tree_util.tree_flatten_with_path(record)
    if not paths:
        raise SourceError(f"{where} has no leaves: {record!r}; a record must be a pytree of arrays.", **location)
    arrays, leaves = [], []
    for key_path, leaf in paths:
        path = jax.tree_util.keystr(key_path)
        array = as_leaf(leaf, path, where, **location)
        arrays.append(array)
        leaves.append(LeafSpec(path, array.shape, array.dtype))
    return arrays, RecordSpec(treedef, tuple(leaves))


class RecordStack:
    """Stacks records one by one. Copies each immediately, since its producer may reuse the memory for the next record.

    Args:
      capacity: maximum number of records.
      spec: required structure of the records; None to require the structure of the first record.
      lane_index: lane of the records, for errors.

    Attributes:
      count: number of records so far.
    """

    def __init__(self, capacity: int, spec: RecordSpec | None = None, *, lane_index: int | None = None) -> None:
        self.count = 0
        self._capacity = capacity
        self._spec = spec
        self._lane_index = lane_index
        self._outputs: list[np.ndarray] | None = None

    def add(self, record: PyTree, record_id: int | None = None) -> None:
        """Adds a record.

        Raises:
          SourceError: the record differs from the first in structure, shape or dtype, or contains no arrays. It is not
            added.
        """
        if self._spec is None:
            _, self._spec = flatten_record(record, record_id=record_id, lane_index=self._lane_index)
        leaves, treedef = jax.tree.flatten(record)
        if treedef != self._spec.treedef:
            raise_difference(self._spec, record, record_id, self._lane_index)
        for output, leaf, wanted in zip(self._arrays(self._spec), leaves, self._spec.leaves, strict=True):
            if not isinstance(leaf, np.ndarray):
                leaf = np.asarray(leaf)
            if leaf.dtype != wanted.dtype or leaf.shape != wanted.shape:
                raise_difference(self._spec, record, record_id, self._lane_index)
            output[self.count] = leaf
        self.count += 1

    def _arrays(self, spec: RecordSpec) -> list[np.ndarray]:
        if self._outputs is None:  # allocated late: the first record may define the shapes
            self._outputs = [memory.empty((self._capacity, *leaf.shape), leaf.dtype) for leaf in spec.leaves]
        return self._outputs

    def take(self) -> tuple[PyTree, RecordSpec]:
        """Empties the stack and returns the batch and the records' structure.

        The batch is a pytree of new 64-byte-aligned arrays ``[count, ...]``.
        """
        assert self._spec is not None, "neither a record nor a structure"
        arrays = self._arrays(self._spec)
        if self.count < self._capacity:
            arrays = [array[: self.count] for array in arrays]
        self.count, self._outputs = 0, None
        return self._spec.treedef.unflatten(arrays), self._spec


def raise_difference(spec: RecordSpec, record: PyTree, record_id: int | None, lane_index: int | None) -> None:
    """Raises a SourceError that describes how ``record`` differs from ``spec``, if it does."""
    _, other = flatten_record(record, record_id=record_id, lane_index=lane_index)
    where = _where(record_id, lane_index)
    location: dict[str, Any] = {"record_id": record_id, "lane_index": lane_index}
    remedy = ALIKE
    if other.treedef != spec.treedef:
        ragged = ragged_lists(spec.treedef, other.treedef)
        raise SourceError(
            f"{ragged}{where} has the leaves {', '.join(leaf.describe() for leaf in other.leaves)}, but the first record "
            f"had {', '.join(leaf.describe() for leaf in spec.leaves)}{structures(spec, other)}. {remedy}",
            **location,
        )
    for wanted, found in zip(spec.leaves, other.leaves, strict=True):
        if wanted != found:
            what = RAGGED if wanted.dtype == found.dtype else ""
            unequal = what and len(wanted.shape) == len(found.shape) == 1
            raise SourceError(
                f"{what}leaf {found.path or '(the record)'} of {where} is {found.dtype} of shape {found.shape}, "
                f"but in the first record it was {wanted.dtype} of shape {wanted.shape}. {remedy}"
                f"{_PACK if unequal else ''}",
                **location,
            )


def structures(spec: RecordSpec, other: RecordSpec) -> str:
    """Names both tree structures if records differ only in them, such as in a list instead of a tuple."""
    return f", in {other.treedef} and {spec.treedef}" if other.leaves == spec.leaves else ""


def differ_in_shape(spec: RecordSpec, other: RecordSpec) -> bool:
    """Whether records differ at most in the shapes of leaves."""
    return spec.treedef == other.treedef and all(
        (a.path, a.dtype) == (b.path, b.dtype) for a, b in zip(spec.leaves, other.leaves, strict=True)
    )


def ragged_lists(first: Any, other: Any) -> str:
    """Returns a prefix for the error if two structures differ only in the lengths of lists, else ``""``.

    A list is a pytree node with one child per item, so lists of unequal lengths appear as different structures.
    """

    def same_but_for_lengths(a: Any, b: Any) -> bool:
        if a == b:
            return True
        if a.node_data() is None or b.node_data() is None or a.node_data()[0] is not b.node_data()[0]:
            return False
        mine, theirs = a.children(), b.children()
        if a.node_data()[0] is list and all(jax.tree_util.treedef_is_leaf(child) for child in (*mine, *theirs)):
            return True
        return (
            a.node_data() == b.node_data() and len(mine) == len(theirs) and all(map(same_but_for_lengths, mine, theirs))
        )

    if first == other or not same_but_for_lengths(first, other):
        return ""
    return f"{RAGGED}lists of unequal lengths: "


def num_bytes(tree: PyTree) -> int:
    """Total bytes of all leaves."""
    return sum([leaf.nbytes for leaf in jax.tree.leaves(tree)])
