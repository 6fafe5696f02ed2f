"""Identity of Hugging Face datasets: a state can resume only if it is equal."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from datasets import Dataset

from meshfeed._src.base.types import JsonValue
from meshfeed._src.reading.identity import probe_digest
from meshfeed._src.sources.huggingface.internals import Node, function_of, kind_of

# Settings of nodes that change the stream.
_SETTINGS = (
    *("batch_size", "batched", "drop_last_batch", "remove_columns", "input_columns", "with_indices", "column_names"),
    *("n", "num_times", "stopping_strategy", "probabilities", "step", "offset"),
)


def function_name(function: Callable[..., object] | None) -> str:
    """A function's qualified name, which is the same in every process, including those of functions that it wraps."""
    if function is None:
        return "none"
    if isinstance(function, functools.partial):
        inner = [function.func, *(arg for arg in function.args if callable(arg))]
        return "partial(" + ", ".join(function_name(part) for part in inner) + ")"
    name = getattr(function, "__qualname__", None)
    return name if name is not None else type(function).__qualname__


def content_digest(dataset: Dataset, columns: Sequence[str]) -> str:
    """A digest of 4 evenly spaced records of a map-style dataset, as stored.

    Args:
      dataset: a ``datasets.Dataset`` of at least one record.
      columns: names of stored columns.
    """

    def digest(ids: np.ndarray) -> str:
        table = dataset.with_format("arrow")[ids.tolist()].select(list(columns))
        return hashlib.sha256(repr(table.to_pylist()).encode()).hexdigest()[:16]

    return probe_digest(len(dataset), digest)


def describe_node(node: Node) -> JsonValue:
    """A description of a node of a streaming dataset: its class, its function's name and its settings."""
    settings = {}
    for name in _SETTINGS:
        value = getattr(node, name, None)
        if value is not None:
            settings[name] = value if isinstance(value, bool | int | float | str) else [str(item) for item in value]
    function = function_of(node)
    if function is not None:
        settings["function"] = function_name(function)
    return [kind_of(node), settings]
