"""One stored array: opened on the first read, its rows or windows read directly into a buffer."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.base.types import JsonValue, RecordIds
from meshfeed._src.sources.files.formats import reader_hint

_STRICT_DRIVERS = ("zarr", "zarr2", "zarr3", "n5")
# Status codes of storage that is unreachable, which a retry may fix; any other code means damaged data.
_UNREACHABLE = (
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNKNOWN",
)


class Array:
    """One stored array as records.

    Attributes:
      num_records: number of rows, or of whole windows.
      shape: shape of one record.
      dtype: dtype of the elements, in native byte order.
      stored_shape: shape of the stored array.
      where: URL or path.
    """

    def __init__(self, spec: JsonValue, store: Any, where: str, window: int | None, cache_bytes: int) -> None:
        self._spec = spec
        self._store: Any = store
        self._window = window
        self._cache_bytes = cache_bytes
        self.where = where
        self.stored_shape = tuple(store.shape)
        self.dtype = np.dtype(store.dtype.numpy_dtype)
        if window is None:
            self.num_records, self.shape = self.stored_shape[0], self.stored_shape[1:]
        else:
            self.num_records, self.shape = self.stored_shape[0] // window, (window, *self.stored_shape[1:])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}  # a copy opens the array itself

    def identity(self) -> JsonValue:
        """``[base name, shape]``, which does not change if the folder is moved."""
        return [self.where.rpartition("/")[2], list(self.stored_shape)]

    def close(self) -> None:
        """Releases the open array."""
        self._store = None

    def _open(self) -> Any:
        store = self._store
        if store is None:
            self._store = store = _open(self._spec, self._cache_bytes)
        return store

    def start(self, ids: RecordIds, part: tuple[slice, ...], output: np.ndarray[Any, Any]) -> Callable[[], None]:
        """Starts reading records into ``output``.

        Args:
          ids: int64[n], n at least 1.
          part: slices of the first dimensions of a record.
          output: C-contiguous ``[n, ...]``.

        Returns:
          A function that waits until ``output`` is filled.
        """
        import tensorstore as ts

        store = self._open()
        first, count = int(ids[0]), ids.size
        run = int(ids[-1]) - first == count - 1 and (count == 1 or bool((np.diff(ids) == 1).all()))
        if self._window is None:
            rows = slice(first, first + count) if run else ids
            source = store[(rows, *part)]
        elif run and not part:
            source = store[first * self._window : (first + count) * self._window]
            output = output.reshape(-1, *self.shape[1:])
        else:
            low, high, step = part[0].indices(self._window) if part else (0, self._window, 1)
            starts = (ids * self._window).tolist()
            rest = part[1:]
            # One virtual array of all windows: windows in the same chunk decode it only once.
            layers = [store[(slice(start + low, start + high, step), *rest)].translate_to[0] for start in starts]
            source = ts.stack(layers)
        target = ts.array(output)
        return target.write(source.translate_to[0]).result


def inspect_array(spec: Any, leaf: str, window: int | None, *, fill_missing: bool, cache_bytes: int) -> Array:
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
        resolved = {**_without_context(store.spec(minimal_spec=True).to_json())}
        strict = not fill_missing and resolved["driver"] in _STRICT_DRIVERS
        if isinstance(given, Mapping) and "fill_missing_data_reads" in given:
            resolved["fill_missing_data_reads"] = given["fill_missing_data_reads"]
        elif strict:
            resolved["fill_missing_data_reads"] = False
        if isinstance(given, Mapping) and "context" in given:
            resolved["context"] = given["context"]
        store = _open(resolved, cache_bytes)
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
            f"{where} ({leaf}) has dtype {store.dtype.name}, which no device holds. Expected numbers or booleans. Store "
            "token ids instead of text."
        )
    return Array(resolved, store, where, window, cache_bytes)


def read_error(error: Exception, array: Array, leaf: str, record_id: int | None) -> Exception:
    """Converts the error of a failed read to an OSError (can be retried) or a CorruptDataError."""
    record = "" if record_id is None else f"record {record_id} of "
    if not isinstance(error, ValueError):
        return error
    if _code(error) in _UNREACHABLE:
        return OSError(f"{record}{array.where} ({leaf}) cannot be read: {_message(error)}")
    if _code(error) == "NOT_FOUND":
        remedy = (
            "A chunk of fill values only is not stored unless asked for; if that is what it is, pass fill_missing=True. "
            "Otherwise a file was lost: restore it."
        )
    else:
        remedy = "The file was cut short or changed: restore it from where it came."
    return CorruptDataError(
        f"{record}{array.where} ({leaf}) is damaged: {_message(error)}. {remedy}",
        path=array.where,
        record_id=record_id,
    )


@functools.lru_cache
def _context(cache_bytes: int) -> Any:
    """A context shared by all arrays, since its limit bounds the memory of the process."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})


def _open(spec: Any, cache_bytes: int) -> Any:
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


def _without_context(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key != "context"}


def _where(spec: Any) -> str:
    kvstore = spec if isinstance(spec, str) else spec.get("kvstore", spec.get("base", spec))
    if isinstance(kvstore, Mapping):
        bucket = f"{kvstore.get('driver')}://{kvstore['bucket']}/" if "bucket" in kvstore else ""
        kvstore = bucket + str(kvstore.get("path", kvstore))
    return kvstore.rstrip("/")


def _code(error: BaseException) -> str:
    return str(error).partition(":")[0].strip()


def _message(error: BaseException) -> str:
    return str(error).partition(" [")[0].strip().rstrip(".")  # drops the spec and source lines that TensorStore appends
