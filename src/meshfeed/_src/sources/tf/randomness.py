"""Detects randomness in a tf.data pipeline that would differ on a different host or after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def loose_randomness(step: Any) -> str | None:
    """Describes randomness of a step that the pipeline does not determine; None if there is none.

    That is a random op without a seed, including inside the function of a ``map`` or ``interleave``, and a
    ``tf.random`` op in a function that runs in parallel, where thread timing decides which record gets which number.

    Args:
      step: a ``tf.data.Dataset``; the steps before it are not examined.
    """
    seeds = [getattr(step, name, None) for name in ("_seed", "_seed2")]
    if all(seed is not None and int(seed) == 0 for seed in seeds):
        return f"{_words(type(step).__name__)} without a seed"
    parallel = getattr(step, "_num_parallel_calls", None) is not None
    for wrapper in getattr(step, "_functions", list)():
        graph = wrapper.function.graph.as_graph_def()
        for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
            for name, is_seeded, draws in _draws(nodes):
                if not is_seeded:
                    return f"{name} without a seed in the function of {_words(type(step).__name__)}"
                if draws and parallel:
                    return f"{name} in the function of {_words(type(step).__name__)} with num_parallel_calls"
    return None


def _draws(nodes: Any) -> Iterator[tuple[str, bool, bool]]:
    """The random nodes of a graph: description, whether it has a seed, and whether it is a ``tf.random`` op."""
    constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
    for node in nodes:
        if "seed" in node.attr and "seed2" in node.attr:
            yield f"tf.random ({node.op})", bool(node.attr["seed"].i or node.attr["seed2"].i), True
        elif node.op.startswith(("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")):
            first = 0 if node.op.startswith("RandomDataset") else 2
            inputs = [name.split(":")[0] for name in node.input[first : first + 2]]
            known = [_integer(constants[name]) for name in inputs if name in constants]
            yield _words(node.op), len(known) < 2 or any(known), False


def _integer(tensor: Any) -> int:
    if tensor.tensor_content:
        return int(np.frombuffer(tensor.tensor_content, np.int64)[0])
    return int(tensor.int64_val[0]) if tensor.int64_val else 0


def _words(kind: str) -> str:
    """``_ShuffleDataset``, ``ShuffleDatasetV3`` → ``shuffle()``."""
    name = kind.strip("_").split("Dataset")[0].removeprefix("Parallel").lower()
    return {"random": "sample_from_datasets() or Dataset.random()"}.get(name, f"{name}()")
