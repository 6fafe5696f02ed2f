"""Host batches as numpy arrays ``[rows, ...]``: their structure, joining, padding and the mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshfeed._src.base import memory, trees
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.trees import flatten_with_paths
from meshfeed._src.base.types import PyTree
from meshfeed._src.reading.stacking import RecordSpec, as_leaf
from meshfeed._src.reading.structure import LeafSpec, check_spec


def spec_of_batch(batch: PyTree, num_rows: int, *, what: str) -> RecordSpec:
    """Returns the structure of the records in a batch ``[num_rows, ...]`` that ``what``, named in errors, has stacked.

    Raises:
      SourceError: a leaf has no row dimension, a different number of rows, or a dtype that JAX does not support; or
        there are no leaves.
    """
    paths, treedef = flatten_with_paths(batch)
    if not paths:
        raise SourceError(f"{what} returned no leaves: {batch!r}; a batch must be a pytree of arrays.")
    leaves = []
    for path, leaf in paths:
        array = as_leaf(leaf, path, "the batch")
        if not array.ndim or array.shape[0] != num_rows:
            is_records = isinstance(batch, list) and len(batch) == num_rows
            raise SourceError(
                f"leaf {path or '(the batch)'} of {what} is {array.dtype} of shape {array.shape}; "
                f"its first dimension must be the {num_rows} rows of the batch."
                + (" A list is a pytree with a leaf for each item: return numpy.stack(records)." if is_records else "")
            )
        leaves.append(LeafSpec(path, array.shape[1:], array.dtype))
    return RecordSpec(treedef, tuple(leaves))


def check_alike(
    specs: dict[int, RecordSpec], shape: int, batch: PyTree, num_rows: int, *, where: Callable[[], str]
) -> None:
    """Checks that a batch ``[num_rows, ...]`` has the structure of the first one of its shape.

    ``specs`` are by number of the shape; that of a first batch is added. Threads may call this with the same ones. ``where``
    returns what names the batch, for errors.

    Raises:
      SourceError: the structures differ, or see :func:`spec_of_batch`.
    """
    known = specs.get(shape)
    if known is None or not known.fits(batch, num_rows):  # most batches fit, and this tells it soonest
        found = spec_of_batch(batch, num_rows, what="the source")
        # Of threads that read the first records, one is the first.
        check_spec(specs.setdefault(shape, found), found, what=where())


def num_rows(batch: PyTree) -> int:
    """Number of rows of a batch, from its first leaf."""
    return int(trees.leaves(batch)[0].shape[0])


def join_batches(batches: Sequence[PyTree], *, what: Callable[[int], str], lane_index: int | None = None) -> PyTree:
    """Concatenates batches, at least one, into new 64-byte-aligned arrays; returns a single batch unchanged.

    ``what`` describes the batch with a given index, for errors.

    Raises:
      SourceError: a batch differs in structure from the first; numpy would silently promote dtypes.
    """
    if len(batches) == 1:
        return batches[0]
    specs = [spec_of_batch(batch, num_rows(batch), what=what(number)) for number, batch in enumerate(batches)]
    for number, spec in enumerate(specs):
        check_spec(specs[0], spec, what=what(number), lane_index=lane_index)
    joined = specs[0].empty(sum(map(num_rows, batches)))
    return trees.map_leaves(lambda output, *parts: np.concatenate(parts, out=output), joined, *batches)


def pad_rows(batch: PyTree, num_rows: int) -> PyTree:
    """Appends rows of zeros to arrays ``[n, ...]``; returns arrays ``[num_rows, ...]``."""

    def pad(leaf: np.ndarray) -> np.ndarray:
        padded = memory.zeros((num_rows, *leaf.shape[1:]), leaf.dtype)
        padded[: leaf.shape[0]] = leaf
        return padded

    return trees.map_leaves(pad, batch)


def add_mask(batch: PyTree, mask_key: str, mask: np.ndarray) -> PyTree:
    """Adds the leaf ``mask_key``, bool ``[rows]``, False on padded rows.

    Raises:
      SourceError: records are not dicts, or already have that key.
    """
    if not isinstance(batch, dict):
        raise SourceError(
            f"mask_key={mask_key!r} adds a leaf to a dict, but records are {type(batch).__name__}; use dict records."
        )
    if mask_key in batch:
        raise SourceError(
            f"mask_key={mask_key!r} is already the name of a leaf of the records; choose a different name."
        )
    return {**batch, mask_key: mask}


def spec_with_mask(spec: RecordSpec, mask_key: str | None) -> RecordSpec:
    """Returns the structure of a batch's rows, including the mask."""
    if mask_key is None:
        return spec
    return spec_of_batch(add_mask(spec.zeros(0), mask_key, np.zeros(0, bool)), 0, what="the source")
