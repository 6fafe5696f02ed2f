"""Identity of Hugging Face datasets: a state can resume only if it is equal."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshfeed._src.reading.identity import probe_digest


def function_name(function: Any) -> str:
    """A function's qualified name, which is the same in every process, including those of functions that it wraps."""
    if function is None:
        return "none"
    if isinstance(function, functools.partial):
        inner = [function.func, *(arg for arg in function.args if callable(arg))]
        return "partial(" + ", ".join(function_name(part) for part in inner) + ")"
    name = getattr(function, "__qualname__", None)
    return name if name is not None else type(function).__qualname__


def content_digest(dataset: Any, columns: Sequence[str]) -> str:
    """A digest of 4 evenly spaced records of a map-style dataset, as stored.

    Args:
      dataset: a ``datasets.Dataset`` of at least one record.
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
