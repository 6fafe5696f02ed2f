"""The feed whose state ``data/lane_state_version_1.json`` holds; run as a program, this file writes such a state."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import meshfeed

STEPS_BEFORE = 2


class Lane:
    """Counts, with a state that only an exact encoding restores."""

    def __init__(self, lane_index: int, num_lanes: int) -> None:
        self.next = lane_index
        self.step = num_lanes

    def __iter__(self) -> Lane:
        return self

    def __next__(self) -> Any:
        if self.next >= 48:
            raise StopIteration
        record = {"x": np.int32(self.next)}
        self.next += self.step
        return record

    def get_state(self) -> Any:
        return {"next": (self.next, b"\x01"), 7: np.array([self.next], ">i4")}

    def set_state(self, state: Any) -> None:
        self.next, mark = state["next"]
        assert type(state["next"]) is tuple
        assert mark == b"\x01"
        assert state[7].dtype == np.dtype(">i4")
        assert state[7].tolist() == [self.next]


def decode(record: Any) -> Any:
    if record["x"] in (5, 13, 30):
        raise ValueError("a bad record")
    return record


class Source:
    """Lanes whose records are decoded."""

    decode = staticmethod(decode)

    def open(self, lane_index: int, num_lanes: int) -> Lane:
        return Lane(lane_index, num_lanes)


def make_feed() -> meshfeed.MultiHostDataLoadIterator:
    """Batches of 4 from 2 lanes."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return meshfeed.MultiHostDataLoadIterator(
        Source(), mesh, global_batch_size=4, num_lanes=2, bad_records=meshfeed.SkipBad(0.5)
    )


if __name__ == "__main__":
    with make_feed() as feed:
        for _ in range(STEPS_BEFORE):
            next(feed)
        json.dump(feed.get_state(), sys.stdout, indent=1)
