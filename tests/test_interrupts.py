"""Ctrl-C at every line of ``next``: no batch is lost, none comes twice, none has other rows."""

from __future__ import annotations

import linecache
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed


def make_feed(kind: str, **options: Any) -> meshfeed.MultiHostDataLoadIterator:
    rows = {"id": np.arange(4096, dtype=np.int32)}
    source: Any = meshfeed.sources.Memory(rows)
    if kind == "stream":
        source = meshfeed.sources.Stream(
            lambda lane_index, num_lanes: ({"id": np.int32(8 * n + lane_index)} for n in range(512))
        )
        options["num_lanes"] = 8
    if kind == "batches":
        source = meshfeed.sources.HostBatches({"id": rows["id"][8 * n : 8 * n + 8]} for n in range(512))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=8, **options)


def interrupted_next(feed: Any, line: int) -> bool:
    """Calls ``next`` and interrupts it at a line of meshfeed's own code; False if it has not so many."""
    left = line

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        if "meshfeed" not in frame.f_code.co_filename or "test" in frame.f_code.co_filename:
            return None
        # not where a lock is let go: there no real signal is noticed, and the tracer's exception would leave it locked
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith(
            "with "
        ):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        next(feed)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("random", {"prefetch": 0}),
        ("random", {"prefetch": 0, "num_threads": 2}),
        ("random", {"prefetch": 2}),
        ("stream", {"prefetch": 0}),
        ("batches", {"prefetch": 0}),
        ("batches", {"prefetch": 2}),
    ],
)
def test_an_interrupt_anywhere_in_next_loses_no_batch(kind: str, options: dict[str, Any]) -> None:
    with make_feed(kind, **options) as feed:
        assert np.asarray(next(feed)["id"]).tolist() == list(range(8))
        counted = line = 0
        while True:
            step = feed.step
            if not interrupted_next(feed, line):
                break
            counted += feed.step - step  # only at the very end, with nothing left to do but to return the batch
            step = feed.step
            assert np.asarray(next(feed)["id"]).tolist() == list(range(8 * step, 8 * step + 8)), line
            assert feed.step == step + 1
            line += 1
        assert line > 20
        assert counted <= 30, "of all lines, those that take off a batch that is already counted"
