"""Real signals during ``next``, in a process of their own: each trial sets a timer, and its signal raises KeyboardInterrupt.

Run as a program with the number of trials a kind and moment; prints a JSON object of figures.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import meshfeed

KINDS = [
    "random, prefetch 0",
    "random, prefetch 0, threads",
    "random, prefetch 2",
    "stream, prefetch 0",
    "stream, prefetch 2, threads",
    "restartable batches, prefetch 0",
    "restartable batches, prefetch 2",
    "resumable one-shot batches, prefetch 0",
    "resumable one-shot batches, prefetch 2",
    "one-shot batches, prefetch 0",
    "one-shot batches, prefetch 2",
]


class Resumable:
    """One iterator over batches that can be brought back to a state."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches, self._taken = batches, 0

    def __iter__(self) -> Resumable:
        return self

    def __next__(self) -> Any:
        if self._taken == len(self._batches):
            raise StopIteration
        self._taken += 1
        return self._batches[self._taken - 1]

    def get_state(self) -> int:
        return self._taken

    def set_state(self, state: int) -> None:
        self._taken = state


def make_feed(kind: str, num_batches: int) -> meshfeed.MultiHostDataLoadIterator:
    """Batch k holds the ids 8k to 8k + 7."""
    rows = {"id": np.arange(8 * num_batches, dtype=np.int32)}
    options: dict[str, Any] = {"prefetch": int(kind.split("prefetch ")[1][0])}
    if "threads" in kind:
        options["num_threads"] = 2
    source: Any = meshfeed.sources.Memory(rows)
    if kind.startswith("stream"):
        options["num_lanes"] = 8
        source = meshfeed.sources.Stream(
            lambda lane_index, num_lanes: ({"id": np.int32(8 * n + lane_index)} for n in range(num_batches))
        )
    if "batches" in kind:
        batches: Any = [{"id": rows["id"][8 * n : 8 * n + 8]} for n in range(num_batches)]
        if "one-shot" in kind:
            batches = Resumable(batches) if "resumable" in kind else iter(batches)
        source = meshfeed.sources.HostBatches(batches)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=8, **options)
