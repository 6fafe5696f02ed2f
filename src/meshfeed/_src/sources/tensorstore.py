"""Rows of zarr, zarr3 and N5 arrays, or windows of one long array, by id; reads only the requested rows and columns."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np

from meshfeed._src.base import memory, trees
from meshfeed._src.base.errors import CorruptDataError, MeshfeedError, SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.groups import group_by
from meshfeed._src.base.types import ColumnSlices, JsonValue, PyTree, Record, RecordIds, public
from meshfeed._src.reading.identity import digest_tree, probe_digest
from meshfeed._src.sources.checks import as_run, check_ids, check_lengths, is_count
from meshfeed._src.sources.files.formats import reader_hint
from meshfeed._src.sources.files.paths import without_signature

_STRICT_DRIVERS = ("zarr", "zarr2", "zarr3", "n5", "neuroglancer_precomputed")
# Status codes of storage that is unreachable, which a retry may fix; any other code means damaged data.
_UNREACHABLE = {
    *("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"),
    *("UNAUTHENTICATED", "UNAVAILABLE", "UNKNOWN"),
}


class Array:
    """One stored array as records, opened on the first read; its rows or windows are read directly into a buffer.

    ``shape`` and ``dtype``, in native byte order, are those of one record; ``where`` is a URL or path.
    """

    def __init__(self, spec: JsonValue, store: Any, where: str, window: int | None, cache_bytes: int) -> None:
        self._spec, self._window, self._cache_bytes = spec, window, cache_bytes
        self._store: Any = store
        self.where = where
        self.stored_shape = tuple(store.shape)
        self.dtype = np.dtype(store.dtype.numpy_dtype)
        if window is None:
            self.num_records, self.shape = self.stored_shape[0], self.stored_shape[1:]
        else:
            self.num_records, self.shape = self.stored_shape[0] // window, (window, *self.stored_shape[1:])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}  # a copy opens the array itself

    def close(self) -> None:
        """Releases the open array."""
        self._store = None

    def start(self, ids: RecordIds, part: tuple[slice, ...], output: np.ndarray[Any, Any]) -> Callable[[], None]:
        """Starts reading the ``part`` of records into ``output``, C-contiguous ``[n, ...]``; the result waits for the end."""
        import tensorstore as ts

        store = self._store
        if store is None:
            self._store = store = _open(self._spec, self._cache_bytes)
        run = as_run(ids)
        if self._window is None:
            source = store[(ids if run is None else run, *part)]
        elif run is not None and not part:
            source = store[run.start * self._window : run.stop * self._window]
            output = output.reshape(-1, *self.shape[1:])
        else:
            low, high, step = part[0].indices(self._window) if part else (0, self._window, 1)
            starts = (ids * self._window).tolist()
            # One virtual array of all windows: windows in the same chunk decode it only once.
            layers = [store[(slice(start + low, start + high, step), *part[1:])].translate_to[0] for start in starts]
            source = ts.stack(layers)
        return ts.array(output).write(source.translate_to[0]).result


def inspect_array(spec: object, leaf: str, window: int | None, *, fill_missing: bool, cache_bytes: int) -> Array:
    """Opens an array and checks that its rows can be records.

    Raises:
      SourceError: there is no array, or its dtype or shape is not supported; names the array and the leaf.
      OSError: storage is unreachable.
    """
    given = _as_spec(spec, leaf)
    where = _where(given)
    try:
        store = _open(given, cache_bytes)
        # Open again with the detected driver, and with missing chunks as errors unless the user asked otherwise.
        resolved = _without_context(store.spec(minimal_spec=True).to_json())
        if not fill_missing:
            resolved = _strict(resolved, given)
        if isinstance(given, Mapping) and "context" in given:
            resolved["context"] = given["context"]
        store = _open(resolved, cache_bytes)
    except ImportError:  # a broken installation of tensorstore is not a wrong path
        raise
    except Exception as error:
        if _code(error) in _UNREACHABLE:
            raise OSError(f"{where} ({leaf}) cannot be opened: {_message(error)}") from error
        raise SourceError(
            f"TensorStore cannot open {where} ({leaf}): {_message(error)}. Expected a zarr, zarr3 or N5 array; a group's "
            "arrays are opened one by one."
            f"{reader_hint(where, unless='TensorStore') or ' Check the path, or pass a TensorStore spec with its driver.'}"
        ) from error
    dtype = np.dtype(store.dtype.numpy_dtype)
    if not store.rank:
        raise SourceError(f"{where} ({leaf}) has shape () and so no rows. Expected an array [records, ...].")
    if dtype.kind in "OUSMm" or dtype.type is np.void:
        raise SourceError(
            f"{where} ({leaf}) has dtype {store.dtype.name}, which JAX has no dtype for. Expected numbers or booleans. Store "
            "token ids instead of text."
        )
    return Array(resolved, store, where, window, cache_bytes)


def read_error(error: Exception, array: Array, leaf: str, record_id: int | None) -> Exception:
    """Converts the error of a failed read to an OSError (can be retried) or a CorruptDataError."""
    what = f"{'' if record_id is None else f'record {record_id} of '}{array.where} ({leaf})"
    if not isinstance(error, ValueError):
        return error
    if _code(error) in _UNREACHABLE:
        return OSError(f"{what} cannot be read: {_message(error)}")
    remedy = "The file was truncated or changed: restore it."
    if _code(error) == "NOT_FOUND":
        remedy = (
            "By default, chunks that hold only the fill value are not stored; if this is one, pass fill_missing=True. "
            "Otherwise a file was lost: restore it."
        )
    text = f"{what} is damaged: {_message(error)}. {remedy}"
    return CorruptDataError(text, path=array.where, record_id=record_id)


@functools.lru_cache
def _context(cache_bytes: int) -> Any:
    """A context shared by all arrays, since its limit bounds the memory of the process."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})


def _open(spec: object, cache_bytes: int) -> Any:
    import tensorstore as ts

    own = isinstance(spec, Mapping) and "context" in spec
    # The data must not change while it is read, so cached chunks need no revalidation against storage.
    extra = {} if own else {"context": _context(cache_bytes)}
    store = ts.open(spec, open=True, read=True, recheck_cached_data="open", **extra).result()
    # Record ids start at 0 even if the stored domain does not.
    return store if not any(store.domain.origin) else store[ts.d[:].translate_to[0]]


def _as_spec(spec: Any, leaf: str) -> Any:
    if isinstance(spec, Mapping):
        return dict(spec)
    if isinstance(spec, str | os.PathLike):
        path = os.fspath(spec)
        if isinstance(path, str) and "://" in path:
            return path
        full = os.path.abspath(os.path.expanduser(os.fsdecode(path)))
        return {"driver": "auto", "kvstore": {"driver": "file", "path": full + "/"}}
    if type(spec).__module__.partition(".")[0].lstrip("_") == "tensorstore" and hasattr(spec, "spec"):
        return _without_context(spec.spec().to_json())
    raise SourceError(
        f"TensorStore got a {type(spec).__name__} for {leaf}: {spec!r:.80}. Expected a path, a URL, or a TensorStore spec "
        'such as {"driver": "zarr3", "kvstore": {"driver": "file", "path": "…"}}.'
    )


def _strict(resolved: Mapping[str, Any], given: object) -> dict[str, Any]:
    """Returns a spec in which the missing chunks of each stored array are errors, unless ``given`` says otherwise there."""
    own = given if isinstance(given, Mapping) else {}
    spec = dict(resolved)
    if spec["driver"] in _STRICT_DRIVERS:
        spec["fill_missing_data_reads"] = own.get("fill_missing_data_reads", False)
    if "base" in spec:  # of arrays that are cast or downsampled
        spec["base"] = _strict(spec["base"], own.get("base"))
    if "layers" in spec:  # of concatenated, stacked and overlaid ones
        layers = own.get("layers", [None] * len(spec["layers"]))
        spec["layers"] = [_strict(*pair) for pair in zip(spec["layers"], layers, strict=True)]
    return spec


def _without_context(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key != "context"}


def _where(spec: Any) -> str:
    kvstore = spec if isinstance(spec, str) else spec.get("kvstore", spec.get("base", spec))
    if isinstance(kvstore, Mapping):
        bucket = f"{kvstore.get('driver')}://{kvstore['bucket']}/" if "bucket" in kvstore else ""
        kvstore = bucket + str(kvstore.get("path", kvstore))
    return without_signature(kvstore).rstrip("/")


def _code(error: BaseException) -> str:
    return str(error).partition(":")[0].strip()


def _message(error: BaseException) -> str:
    return str(error).partition(" [")[0].strip().rstrip(".")  # drops the spec and source lines that TensorStore appends


_CACHE_BYTES = 1 << 28


@public("meshfeed.sources")
class TensorStore:
    """Rows of stored arrays as records: record i is row i of every leaf.

    A read fetches only the stored chunks that hold the requested rows and columns, all concurrently. If the sequence is
    sharded over hosts and the chunk boundaries divide it, no host reads whole examples. With a shuffled feed, store few
    rows per chunk or pass ``shuffle=<rows per chunk>``; otherwise each row costs a whole chunk.

    The source can be pickled; the copy opens its own arrays. Safe to read from several threads. The arrays must not
    change while they are read.

    Args:
      spec_or_specs: an array: a path (the format is detected), a URL that TensorStore supports (``gs://…``, ``s3://…``)
        or a TensorStore spec. A list of arrays: the rows of the first, then of the second, and so on. A dict of any of
        these: a record is a dict with one leaf per name.
      window: if given, record i is elements ``[i * window, (i + 1) * window)`` of the first dimension instead of row i,
        such as 2048 tokens of one long array. A remainder shorter than a window is dropped (in each array of a list).
      fill_missing: whether missing chunks are read as the fill value. TensorStore and zarr do not store chunks that
        hold only the fill value, but a lost file looks the same, so a missing chunk is an error by default.
      cache_bytes: bytes of decoded chunks kept in memory, shared by all TensorStore sources of this process with the
        same setting.

    Raises:
      SourceError: there is no array, it cannot be read as records, or leaves differ in length; names the path and the
        leaf.
      OSError: storage is unreachable.
      SettingsError: ``window`` or ``cache_bytes`` is out of range.
    """

    kind = "tensorstore"
    reads_columns = True
    fresh_arrays = True

    @hides_own_frames
    def __init__(
        self,
        spec_or_specs: Any,
        window: int | None = None,
        *,
        fill_missing: bool = False,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        _check_settings(window, cache_bytes)
        self._window = None if window is None else int(window)
        named = isinstance(spec_or_specs, Mapping) and not _is_spec(spec_or_specs)
        leaves: dict[str, Any] = dict(spec_or_specs) if named else {"": spec_or_specs}
        if not leaves:
            raise SourceError("TensorStore got an empty dict. Expected a path or spec, a list, or a dict of them.")
        names = sorted(leaves)  # the order of a dict's leaves in a pytree
        self._names = names if named else None
        self._paths = [f"[{name!r}]" if named else "" for name in names]
        self._leaves = [
            _Leaf(path, leaves[name], self._window, fill_missing, int(cache_bytes))
            for path, name in zip(self._paths, names, strict=True)
        ]
        check_lengths({leaf.path: len(leaf) for leaf in self._leaves}, "TensorStore's leaves")

    def _tree(self, leaves: list[Any]) -> PyTree:
        return leaves[0] if self._names is None else dict(zip(self._names, leaves, strict=True))

    def __repr__(self) -> str:
        return f"TensorStore({len(self):,} records, {', '.join(leaf.describe() for leaf in self._leaves)})"

    def __len__(self) -> int:
        return len(self._leaves[0])

    def __getitem__(self, record_id: SupportsIndex) -> Record:
        """Record ``record_id``: each leaf without its first dimension.

        Raises:
          IndexError, CorruptDataError, OSError: see :meth:`read_batch`.
        """
        return trees.map_leaves(lambda leaf: leaf[0], self.read_batch([operator.index(record_id)]))

    def element_shapes(self) -> PyTree:
        """Pytree of ``jax.ShapeDtypeStruct`` of one record."""
        return self._tree([trees.spec(leaf.shape, leaf.dtype) for leaf in self._leaves])

    def read_batch(self, record_ids: RecordIds | Sequence[int], columns: ColumnSlices | None = None) -> PyTree:
        """Reads records as stacked arrays, all leaves concurrently.

        Args:
          record_ids: int64[n], in any order, repeats allowed.
          columns: leaf path → slices of the dimensions after the first; other leaves are read whole.

        Returns:
          Pytree of arrays ``[n, ...]`` in new 64-byte-aligned buffers.

        Raises:
          IndexError: an id is not in [0, len).
          CorruptDataError: a stored chunk is damaged or missing; names the array and the first affected record.
          OSError: storage is unreachable.
        """
        ids = np.ascontiguousarray(record_ids, np.int64)
        check_ids(ids, len(self))
        slices = [(columns or {}).get(path, ()) for path in self._paths]
        # Start every read before waiting for the first, so that they overlap.
        started = [leaf.start(ids, part) for leaf, part in zip(self._leaves, slices, strict=True)]
        outputs = []
        for leaf, part, (output, reads) in zip(self._leaves, slices, started, strict=True):
            try:
                for read in reads:
                    read()
            except MeshfeedError:
                raise
            except Exception as error:
                raise leaf.explain(error, ids, part) from error
            outputs.append(output)
        return self._tree(outputs)

    def file_of(self, record_id: int) -> str:
        """URL or path of the first leaf's array that holds a record."""
        return self._leaves[0].array_of(int(record_id)).where

    def fingerprint(self) -> JsonValue:
        """Identity: number of records, leaves, base names and shapes of the arrays, and a digest of 4 records."""
        arrays = [array for leaf in self._leaves for array in leaf.arrays]
        return {
            "kind": "tensorstore",
            "records": len(self),
            "window": self._window,
            "leaves": [[leaf.path, leaf.dtype.name, list(leaf.shape)] for leaf in self._leaves],
            "arrays": [[array.where.rpartition("/")[2], list(array.stored_shape)] for array in arrays],
            "content": probe_digest(len(self), lambda ids: digest_tree(self.read_batch(ids))),
        }

    def close(self) -> None:
        """Closes the arrays. A later read reopens them."""
        for leaf in self._leaves:
            for array in leaf.arrays:
                array.close()


class _Leaf:
    """One leaf: one array, or several concatenated along the first dimension."""

    def __init__(self, path: str, specs: Any, window: int | None, fill_missing: bool, cache_bytes: int) -> None:
        self.path = path or "the record"
        listed = isinstance(specs, Sequence) and not isinstance(specs, str | bytes)
        if listed and not specs:
            raise SourceError(f"TensorStore got an empty list for {self.path}. Expected at least one array.")
        self.arrays: list[Array] = [
            inspect_array(spec, self.path, window, fill_missing=fill_missing, cache_bytes=cache_bytes)
            for spec in (specs if listed else [specs])
        ]
        self._check_alike()
        first = self.arrays[0]
        self._ends = np.cumsum([array.num_records for array in self.arrays], dtype=np.int64)
        if not self._ends[-1]:
            what = "rows" if window is None else f"windows of {window:,}"
            raise SourceError(f"{first.where} has 0 {what} (shape {tuple(first.stored_shape)}). Expected at least one.")
        self.shape, self.dtype = first.shape, first.dtype

    def _check_alike(self) -> None:
        first = self.arrays[0]
        for array in self.arrays[1:]:
            if array.shape != first.shape or array.dtype != first.dtype:
                raise SourceError(
                    f"arrays of {self.path} differ: {first.where} has records {first.dtype}{list(first.shape)}, "
                    f"{array.where} has {array.dtype}{list(array.shape)}. Expected one dtype and shape in a list of arrays."
                )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def describe(self) -> str:
        """``['tokens'] int32[2048]``."""
        return f"{self.path} {self.dtype}{list(self.shape)}"

    def array_of(self, record_id: int) -> Array:
        """The array that holds a record."""
        return self.arrays[int(np.searchsorted(self._ends, record_id, side="right"))]

    def start(self, ids: RecordIds, part: tuple[slice, ...]) -> tuple[np.ndarray[Any, Any], list[Any]]:
        """Starts reading records; calling every returned function waits until the output is filled."""
        inner = tuple(range(*s.indices(size)) for s, size in zip(part, self.shape, strict=False))
        shape = tuple(len(r) for r in inner) + self.shape[len(inner) :]
        output = memory.empty((ids.size, *shape), self.dtype)
        if not output.size:
            return output, []
        reads = []
        for index, rows in group_by(np.searchsorted(self._ends, ids, side="right")):
            array, run = self.arrays[index], as_run(rows)
            own = ids[rows] - (self._ends[index] - array.num_records)
            if run is not None:  # adjacent in the batch: no scatter needed
                reads.append(array.start(own, part, output[run]))
            else:
                reads.append(_scattered(array, own, part, output, rows))
        return output, reads

    def explain(self, error: Exception, ids: RecordIds, part: tuple[slice, ...]) -> Exception:
        """The error to raise for a failed batch: that of the first record that fails when read alone, if any does."""
        # While storage is unreachable, reading the records one by one would only repeat the failure.
        unreachable = isinstance(read_error(error, self.arrays[0], self.path, None), OSError)
        for record_id in () if unreachable else dict.fromkeys(ids.tolist()):
            _, reads = self.start(np.array([record_id], np.int64), part)
            try:
                for read in reads:
                    read()
            except Exception as found:
                return read_error(found, self.array_of(record_id), self.path, record_id)
        return read_error(error, self.arrays[0], self.path, None)


def _scattered(
    array: Array, own: RecordIds, part: tuple[slice, ...], output: np.ndarray[Any, Any], rows: RecordIds
) -> Any:
    piece = memory.empty((rows.size, *output.shape[1:]), output.dtype)
    read = array.start(own, part, piece)

    def finish() -> None:
        read()
        output[rows] = piece

    return finish


def _check_settings(window: object, cache_bytes: object) -> None:
    if window is not None and not is_count(window):
        raise SettingsError(
            f"window={window!r}; it takes a number of elements of at least 1, or None for rows.", setting="window"
        )
    if not is_count(cache_bytes, 0):
        raise SettingsError(f"cache_bytes={cache_bytes!r}; it takes a number of at least 0.", setting="cache_bytes")


def _is_spec(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("driver"), str) or "kvstore" in value
