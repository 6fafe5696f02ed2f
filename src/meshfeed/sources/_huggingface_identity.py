"""What makes two Hugging Face datasets the same, so that a saved state can be continued."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from meshfeed._errors import SourceError
from meshfeed._types import JsonValue

_PROBES = 4
_THREADS_FOR_SIZES = 16


def function_name(function: Any) -> str:
    """A name of a function that is the same in every process: its qualified name, that of what it wraps included."""
    if function is None:
        return "none"
    if isinstance(function, functools.partial):
        inner = [function.func, *(arg for arg in function.args if callable(arg))]
        return "partial(" + ", ".join(function_name(part) for part in inner) + ")"
    name = getattr(function, "__qualname__", None)
    return name if name is not None else type(function).__qualname__


def content_digest(dataset: Any, columns: Sequence[str]) -> str:
    """A digest of 4 records spread over a map-style dataset, as they are stored.

    Args:
      dataset: ``datasets.Dataset`` of at least one record.
      columns: names of stored columns.
    """
    records = len(dataset)
    rows = np.linspace(0, records - 1, min(_PROBES, records)).astype(np.int64).tolist()
    table = dataset.with_format("arrow")[rows].select(list(columns))
    return hashlib.sha256(repr(table.to_pylist()).encode()).hexdigest()[:16]


def files_identity(paths: Sequence[str], size_of: Callable[[str], int]) -> JsonValue:
    """Identity of files that does not depend on where they lie: count, bytes, and digest of base names and sizes.

    Args:
      paths: in the order of reading.
      size_of: bytes of a file.

    Raises:
      SourceError: a file is missing; it names the file.
    """
    with ThreadPoolExecutor(_THREADS_FOR_SIZES) as pool:  # remote sizes are a round trip each
        sizes = list(pool.map(size_of, paths))
    digest = hashlib.sha256()
    for path, size in zip(paths, sizes, strict=True):
        digest.update(f"{base_name(path)}\0{size}\0".encode())
    return {"count": len(paths), "bytes": sum(sizes), "digest": digest.hexdigest()[:16]}


def base_name(path: str) -> str:
    """Name of a file without its folder; of a chained URL, the innermost."""
    return path.split("::")[0].rstrip("/").rsplit("/", 1)[-1].rsplit(os.sep, 1)[-1]


def local_path(path: str) -> str | None:
    """The path on this machine, or None for a URL."""
    if path.startswith("file://"):
        return path[len("file://") :]
    return None if "://" in path else path


def file_size(path: str, storage_options: dict[str, Any] | None = None) -> int:
    """Bytes of a local or remote file.

    Raises:
      SourceError: it cannot be found, or its size is not known.
    """
    local = local_path(path)
    if local is not None:
        try:
            return os.path.getsize(local)
        except FileNotFoundError:
            raise SourceError(
                f"the file {local} of the dataset is missing. Expected every file that the dataset was made from. "
                "Restore it, or make the dataset again from the files that are there."
            ) from None
    import fsspec

    fs, name = fsspec.core.url_to_fs(path, **(storage_options or {}))
    size = fs.size(name)
    if size is None:
        raise SourceError(f"the size of {path} is not known: its server does not say. Download the files first.")
    return int(size)
