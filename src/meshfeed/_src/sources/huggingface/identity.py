"""What makes two Hugging Face datasets the same, so that a saved state can be continued."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshfeed._src.reading.identity import probe_digest


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

    def digest(ids: np.ndarray) -> str:
        table = dataset.with_format("arrow")[ids.tolist()].select(list(columns))
        return hashlib.sha256(repr(table.to_pylist()).encode()).hexdigest()[:16]

    return probe_digest(len(dataset), digest)


def local_path(path: str) -> str | None:
    """The path on this machine, or None for a URL."""
    if path.startswith("file://"):
        return path[len("file://") :]
    return None if "://" in path else path
