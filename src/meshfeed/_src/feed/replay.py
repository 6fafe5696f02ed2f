"""A step of a stream read again on one host, for looking at what made the loss jump."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.types import PyTree
from meshfeed._src.streams.protocol import HostRows, Place


def replay_step(course: Any, place: Place, step: int) -> PyTree:
    """All rows of one global batch as host-local numpy, read from ``place`` on.

    Random access reads that step alone. A stream reads on from the states of the lanes in ``place``, all of which must be
    there, so a place near the step is cheap.

    Args:
      course: of the feed.
      place: at or before the step.
      step: index of the batch.

    Returns:
      A pytree of arrays ``[global_batch_size, ...]``, padding and mask included.

    Raises:
      SettingsError: ``place`` is after the step. SourceError: host batches.
      IndexError: the data ends before the step.
      StateMismatchError: ``place`` lacks lanes.
    """
    if course.kind == "host_batches":
        raise SourceError("host batches cannot be read again by the feed; pass a source of records.")
    if place.step > step:
        raise SettingsError(
            f"replay of step {step} from a state taken at step {place.step}; it takes a state taken at or before the step.",
            setting="state",
        )
    if course.kind == "random_access":
        position, _ = place.timeline.at(step)
        place = dataclasses.replace(place, step=step, position=position)
    every_row = HostRows(lambda size: np.arange(size, dtype=np.int64), lambda size: None)
    feeder = course.feeder(place, every_row, hosts_agree=False)
    try:
        while True:
            try:
                batch = feeder.next()
            except StopIteration:
                raise IndexError(f"step {step} is not in this stream, which ends before it.") from None
            if batch.step == step:
                return batch.tree
    finally:
        feeder.close()
