"""Stacks records into host batches of numpy arrays.

``host_batch.py`` has the operations on batches that are stacked already.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshfeed._src.base import memory, trees
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.trees import flatten_with_paths
from meshfeed._src.base.types import PyTree
from meshfeed._src.reading.structure import RAGGED, LeafSpec, RecordSpec, check_record

# Types, not kinds: ml_dtypes have the same kind as np.void.
_NO_DTYPES: tuple[type, ...] = (np.void, np.longdouble, np.clongdouble)


def _where(record_id: int | None, lane_index: int | None) -> str:
    if record_id is not None:
        return f"record {record_id}"
    return "a record" if lane_index is None else f"a record of lane {lane_index}"


def is_ragged(array: np.ndarray) -> bool:
    """Whether an object array contains only lists or arrays; numpy makes one only if their lengths differ."""
    return (
        array.dtype.hasobject and array.size > 0 and all(isinstance(x, list | tuple | np.ndarray) for x in array.flat)
    )


def check_unmasked(leaf: Any, what: str, **location: Any) -> None:
    """Raises SourceError if values of ``leaf`` are masked: as a plain array it would hold what the mask hides."""
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise SourceError(
            f"{what} is a masked array with {np.ma.count_masked(leaf)} masked values, and a batch has no masks. Replace "
            "these values with numpy.ma.filled, or pass the data and the mask as two leaves.",
            **location,
        )


def as_leaf(leaf: Any, path: str, where: str, **location: Any) -> np.ndarray:
    if isinstance(leaf, np.ma.MaskedArray):
        check_unmasked(leaf, f"leaf {path or '(the record itself)'} of {where}", **location)
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
    if array.dtype.kind in "OSUMm" or issubclass(array.dtype.type, _NO_DTYPES):
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
    paths, treedef = _flattened(record, where, **location)
    if not paths:
        forgot = " Return the record from the function that makes it." if record is None else ""
        raise SourceError(
            f"{where} has no leaves: {record!r}; a record must be a pytree of arrays.{forgot}", **location
        )
    arrays, leaves = [], []
    for path, leaf in paths:
        array = as_leaf(leaf, path, where, **location)
        arrays.append(array)
        leaves.append(LeafSpec(path, array.shape, array.dtype))
    return arrays, RecordSpec(treedef, tuple(leaves))


def _flattened(record: PyTree, where: str, **location: int | None) -> tuple[list[tuple[str, Any]], Any]:
    try:
        return flatten_with_paths(record)
    except SourceError as error:
        raise SourceError(f"{where}: {error}", **location) from error


class RecordStack:
    """Stacks records one by one. Copies each immediately, since its producer may reuse the memory for the next record.

    All must have the structure ``spec``; without one, that of the first.

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
        spec, outputs, row = self._spec, self._outputs or self._arrays(self._spec), self.count
        try:
            leaves = spec.treedef.flatten_up_to(record)  # takes a third of the time of flattening and comparing
        except ValueError:
            try:
                self._check(spec, record, record_id)
            except SourceError as error:
                raise error from None  # JAX's says less
            raise
        for number, leaf in enumerate(leaves):  # zip with strict takes as long as copying 1 KB
            if type(leaf) is not np.ndarray:
                if isinstance(leaf, np.ma.MaskedArray) or not _is_leaf(leaf):
                    self._check(spec, record, record_id)
                leaf = np.asarray(leaf)
            wanted = spec.leaves[number]
            if leaf.dtype != wanted.dtype or leaf.shape != wanted.shape:
                self._check(spec, record, record_id)
            outputs[number][row] = leaf
        self.count = row + 1

    def _check(self, spec: RecordSpec, record: PyTree, record_id: int | None) -> None:
        location = {"record_id": record_id, "lane_index": self._lane_index}
        check_record(spec, flatten_record(record, **location)[1], _where(**location), **location)

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


def _is_leaf(leaf: object) -> bool:
    return trees.flatten(leaf)[1].num_nodes == 1
