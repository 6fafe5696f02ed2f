"""Reads a step of a stream again on one host, for example to inspect the batch behind a loss spike."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.types import PyTree
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.streams.protocol import Cursor


def replay_step(stream: Any, cursor: Cursor, step: int) -> PyTree:
    """Returns all rows of one global batch as host-local numpy.

    Random access reads only that step. A stream reads from the lane states in ``cursor``, which must include all
    lanes, up to the step; a cursor close to the step is cheap.

    Args:
      stream: the feed's stream.
      cursor: a cursor at or before the step.
      step: index of the batch.

    Returns:
      A pytree of arrays ``[global_batch_size, ...]``, including padding and mask.

    Raises:
      SettingsError: ``cursor`` is after the step.
      SourceError: host batches cannot be replayed.
      IndexError: the data ends before the step.
      StateMismatchError: ``cursor`` lacks lanes.
    """
    if stream.kind == "host_batches":
        raise SourceError("host batches cannot be read again by the feed; pass a source of records.")
    if cursor.step > step:
        raise SettingsError(
            f"replay of step {step} from a state taken at step {cursor.step}; it takes a state taken at or before the step.",
            setting="state",
        )
    if stream.kind == "random_access":
        position, _ = cursor.step_schedule.at(step)
        cursor = dataclasses.replace(cursor, step=step, position=position)
    every_row = HostRows(lambda size: np.arange(size, dtype=np.int64), lambda size: None)
    reader = stream.open_reader(cursor, every_row, hosts_agree=False)
    try:
        while True:
            try:
                batch = reader.next()
            except StopIteration:
                raise IndexError(f"step {step} is not in this stream, which ends before it.") from None
            if batch.step == step:
                return batch.tree
    finally:
        reader.close()
