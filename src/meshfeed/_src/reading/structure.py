"""The structure of records: all records of a source must have that of the first one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from meshfeed._src.base import memory, trees
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.types import PyTree

RAGGED = "ragged rows: "
_PACK = " For documents of unequal length use meshfeed.sources.Packed, or meshfeed.sources.Padded for streams."
_LISTS = " A list has one leaf per item; return np.array(…) for a leaf of several items."
_ALIKE = "All records of a source must have the same structure, shapes and dtypes; pad or cast them in the source."


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
    """The common structure of a source's records, of which batches are made."""

    treedef: Any
    leaves: tuple[LeafSpec, ...]

    def fits(self, batch: PyTree, num_rows: int) -> bool:
        """Whether a batch has this structure with arrays ``[num_rows, ...]``; fast, and False if unsure."""
        leaves, treedef = trees.flatten(batch)
        if treedef != self.treedef:
            return False
        for leaf, wanted in zip(leaves, self.leaves, strict=True):  # a loop: all() with a generator takes twice as long
            if type(leaf) is not np.ndarray or leaf.dtype != wanted.dtype or leaf.shape != (num_rows, *wanted.shape):
                return False
        return True

    def shapes(self) -> PyTree:
        """Returns the record as a pytree of ``jax.ShapeDtypeStruct``."""
        return self.treedef.unflatten([trees.spec(leaf.shape, leaf.dtype) for leaf in self.leaves])

    def zeros(self, num_rows: int) -> PyTree:
        """Returns a batch of ``num_rows`` rows of zeros."""
        return self.treedef.unflatten([memory.zeros((num_rows, *leaf.shape), leaf.dtype) for leaf in self.leaves])

    def empty(self, num_rows: int) -> PyTree:
        """Returns an uninitialized batch of ``num_rows`` rows."""
        return self.treedef.unflatten([memory.empty((num_rows, *leaf.shape), leaf.dtype) for leaf in self.leaves])


def check_spec(spec: RecordSpec, found: RecordSpec, *, what: str, lane_index: int | None = None) -> None:
    """Checks that a batch has the structure of the first record.

    Raises:
      SourceError: the structures differ.
    """
    if found != spec:
        raise _unlike(spec, found, f"{what}: records have", lane_index=lane_index)


def check_record(spec: RecordSpec, found: RecordSpec, where: str, **location: int | None) -> None:
    """Checks that a record, which ``where`` names, has the structure of the first one, ``spec``.

    Raises:
      SourceError: the structures differ.
    """
    if found.treedef != spec.treedef:
        raise _unlike(spec, found, f"{where} has", **location)
    for first, leaf in zip(spec.leaves, found.leaves, strict=True):
        if first != leaf:
            ragged = RAGGED if first.dtype == leaf.dtype else ""
            document = ragged and len(first.shape) == len(leaf.shape) == 1
            raise SourceError(
                f"{ragged}leaf {leaf.path or '(the record)'} of {where} is {leaf.dtype} of shape {leaf.shape}, but in "
                f"the first record it was {first.dtype} of shape {first.shape}. {_ALIKE}{_PACK if document else ''}",
                **location,
            )


def _unlike(spec: RecordSpec, found: RecordSpec, subject: str, **location: int | None) -> SourceError:
    # Structures are named only if nothing else differs, such as a list instead of a tuple.
    structures = f", in {found.treedef} and {spec.treedef}" if found.leaves == spec.leaves else ""
    ragged = _ragged(spec, found)
    lists = _LISTS if ragged and spec.treedef != found.treedef else ""
    return SourceError(
        f"{ragged}{subject} the leaves {', '.join(leaf.describe() for leaf in found.leaves)}, but the first record had "
        f"{', '.join(leaf.describe() for leaf in spec.leaves)}{structures}. {_ALIKE}{lists}",
        **location,
    )


def _ragged(spec: RecordSpec, found: RecordSpec) -> str:
    """Returns a prefix for the error if records differ only in the shapes of leaves or the lengths of lists, else ``""``.

    A list is a pytree node with one child per item, so lists of unequal lengths appear as different structures.
    """
    if found.treedef != spec.treedef:
        same = _same_but_for_lengths(spec.treedef, found.treedef)
        return f"{RAGGED}lists of unequal lengths: " if same else ""
    same = all((a.path, a.dtype) == (b.path, b.dtype) for a, b in zip(spec.leaves, found.leaves, strict=True))
    return RAGGED if same else ""


def _same_but_for_lengths(a: Any, b: Any) -> bool:
    if a == b:
        return True
    if a.node_data() is None or b.node_data() is None or a.node_data()[0] is not b.node_data()[0]:
        return False
    mine, theirs = a.children(), b.children()
    if a.node_data()[0] is list and all(child.num_nodes == 1 for child in (*mine, *theirs)):
        return True
    return a.node_data() == b.node_data() and len(mine) == len(theirs) and all(map(_same_but_for_lengths, mine, theirs))
