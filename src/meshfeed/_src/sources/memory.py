"""Records that are rows of arrays in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import xxhash

from meshfeed._src.base import memory, trees
from meshfeed._src.base.errors import SourceError, hides_own_frames
from meshfeed._src.base.identities import ALL_RECORDS
from meshfeed._src.base.mapped import MappedArray, mapped
from meshfeed._src.base.trees import flatten, flatten_with_paths
from meshfeed._src.base.types import ColumnSlices, JsonValue, PyTree, public
from meshfeed._src.reading.identity import probe_ids
from meshfeed._src.reading.stacking import check_unmasked, is_ragged
from meshfeed._src.sources.checks import as_run, check_ids, check_lengths, checked_id
from meshfeed._src.sources.files.formats import reader_hint

_WHOLE_BYTES = 16 << 20


@public("meshfeed.sources")
class Memory:
    """Rows of equally long arrays as records: record i is row i of every leaf.

    Args:
      arrays: pytree of numpy arrays ``[records, ...]``; memory-mapped arrays are read row by row, also by worker
        processes, which map their files again. The arrays are not copied and must not change while a feed reads them.

    Raises:
      SourceError: no leaf, no record, leaves of unequal length, a scalar leaf, or a dtype that no device supports. The
        message names the leaf's path.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Memory
      >>> source = Memory({"x": np.arange(10), "y": np.zeros((10, 3))})
      >>> len(source), source[4]["x"].item(), source[4]["y"].shape
      (10, 4, (3,))
    """

    reads_columns = True  # read_batch takes columns=
    fresh_arrays = True  # read_batch returns new memory, so the feed need not copy it

    @hides_own_frames
    def __init__(self, arrays: PyTree) -> None:
        with_paths, self._treedef = flatten_with_paths(arrays)
        self._paths = [path for path, _ in with_paths]
        self._arrays = [_check_leaf(path, leaf) for path, (_, leaf) in zip(self._paths, with_paths, strict=True)]
        if not self._arrays:
            raise SourceError(
                "Memory got a pytree without arrays. Expected at least one numpy array [records, ...], "
                'such as {"tokens": array}.'
            )
        lengths = {path: len(array) for path, array in zip(self._paths, self._arrays, strict=True)}
        check_lengths(lengths, "Memory's arrays", " Cut or fill the arrays to one length.")
        self._length = len(self._arrays[0])
        if not self._length:
            where, shape = f"leaf {self._paths[0]}" if self._paths[0] else "the array", self._arrays[0].shape
            raise SourceError(f"Memory got 0 records: {where} has shape {shape}. Expected at least one row.")

    def __getstate__(self) -> dict[str, Any]:
        # JAX's structures load JAX, which a worker process does without.
        arrays = [array if array.nbytes <= _WHOLE_BYTES else mapped(array) or array for array in self._arrays]
        return {**self.__dict__, "_arrays": arrays, "_treedef": self._treedef.unflatten(range(len(self._arrays)))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = [array.open() if isinstance(array, MappedArray) else array for array in state["_arrays"]]
        self.__dict__.update(state, _arrays=arrays, _treedef=flatten(state["_treedef"])[1])

    def __repr__(self) -> str:
        return f"Memory({len(self):,} records)"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, record_id: SupportsIndex) -> PyTree:
        """Record ``record_id``: each leaf without its first dimension, as a view of the array.

        Raises:
          IndexError: ``record_id`` is not in [0, len).
        """
        row = checked_id(record_id, self._length)
        return self._treedef.unflatten([array[row] for array in self._arrays])

    def __getitems__(self, record_ids: Sequence[int]) -> list[PyTree]:
        """Several records, in the order of ``record_ids``."""
        check_ids(record_ids, self._length)
        return [self._treedef.unflatten([array[row] for array in self._arrays]) for row in record_ids]

    def element_shapes(self) -> PyTree:
        """Pytree of ``jax.ShapeDtypeStruct`` of one record."""
        return self._treedef.unflatten([trees.spec(array.shape[1:], _native(array.dtype)) for array in self._arrays])

    def read_batch(self, record_ids: np.ndarray | Sequence[int], columns: ColumnSlices | None = None) -> PyTree:
        """Reads records as stacked arrays.

        Args:
          record_ids: int64[n], in any order, repeats allowed.
          columns: leaf path → slices of the dimensions after the first; other leaves are read whole.

        Returns:
          Pytree of arrays ``[n, ...]`` in new 64-byte-aligned buffers.

        Raises:
          IndexError: an id is not in [0, len).
        """
        ids = np.ascontiguousarray(record_ids, np.int64)
        check_ids(ids, self._length)
        run = as_run(ids)
        leaves = []
        for path, array in zip(self._paths, self._arrays, strict=True):
            slices = columns.get(path) if columns else None
            leaves.append(_read_rows(array if not slices else array[(slice(None), *slices)], ids, run))
        return self._treedef.unflatten(leaves)

    def fingerprint(self) -> JsonValue:
        """Identity: number of records, leaves, a digest of 4 evenly spaced records, and one of all of up to 16 MiB."""
        digest = xxhash.xxh3_64()
        for row in probe_ids(self._length).tolist():
            for array in self._arrays:
                digest.update(np.ascontiguousarray(array[row : row + 1], _native(array.dtype)).tobytes())
        return {
            "kind": "memory",
            "records": self._length,
            "leaves": [
                [path, _native(array.dtype).name, list(array.shape[1:])]
                for path, array in zip(self._paths, self._arrays, strict=True)
            ],
            "content": digest.hexdigest(),
            **self._whole(),
        }

    def _whole(self) -> dict[str, JsonValue]:
        """Returns the digest of all records, leaf by leaf; nothing for more bytes than are read in some milliseconds."""
        if sum(array.nbytes for array in self._arrays) > _WHOLE_BYTES:
            return {}
        digest = xxhash.xxh3_64()
        for array in self._arrays:
            # As bytes: numpy has no buffer of bfloat16.
            digest.update(np.ascontiguousarray(array, _native(array.dtype)).reshape(-1).view(np.uint8).data)
        return {ALL_RECORDS: digest.hexdigest()}


def _check_leaf(path: str, leaf: object) -> np.ndarray:
    """``leaf`` as a plain ndarray view, if its rows can become rows of a device array."""
    where = f"Memory's leaf {path}" if path else "Memory's array"
    if not isinstance(leaf, np.ndarray) and not hasattr(leaf, "__array__"):
        raise SourceError(
            f"{where} is a {type(leaf).__name__}. Expected a numpy array [records, ...]."
            f"{reader_hint(leaf) or ' Convert it with numpy.asarray.'}"
        )
    check_unmasked(leaf, where)
    try:
        array = np.asarray(leaf)  # a memmap becomes a plain view, which indexes faster
    except Exception as error:  # an array over the devices of several hosts, a deleted one, a tensor that requires grad
        raise SourceError(
            f"{where} is a {type(leaf).__name__} which numpy cannot hold: {str(error).rstrip('.')}. Pass numpy arrays with "
            "all records, the same on every host."
        ) from error
    if array.ndim == 0:
        raise SourceError(f"{where} has shape () and so no rows. Expected an array [records, ...].")
    dtype = array.dtype
    if is_ragged(array):
        raise SourceError(f"ragged rows: {where} holds lists of unequal lengths. Pad or cut them to one length first.")
    if dtype.kind in "OUSMm" or dtype.names is not None or dtype.type in (np.void, np.longdouble, np.clongdouble):
        raise SourceError(
            f"{where} has dtype {dtype} and shape {array.shape}, which JAX has no dtype for. Expected numbers or booleans. "
            "Turn text into token ids, ragged rows into padded ones, and objects and dates into numbers (astype), first."
        )
    return array


def _native(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _read_rows(array: np.ndarray, ids: np.ndarray, run: slice | None) -> np.ndarray:
    out = memory.empty((len(ids), *array.shape[1:]), _native(array.dtype))
    if run is not None:
        np.copyto(out, array[run])
    elif array.flags.c_contiguous and array.dtype.isnative:
        # mode="raise" goes through a second buffer; "clip" writes to `out` directly. read_batch has checked the ids.
        np.take(array, ids, axis=0, out=out, mode="clip")
    else:  # np.take would first copy the whole array
        np.copyto(out, array[ids])
    return out
