"""Checks that every stream source must pass: each record once over all lanes, and exact resume at every point."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshfeed._src.base.exact_json import decode_value, encode_value


def read_ids(lane: Any, key: str = "id") -> list[int]:
    """The ids of all records that are left."""
    return [i for record in lane for i in np.ravel(record[key]).tolist()]


def saved(lane: Any) -> str:
    """The lane's state as the text that a checkpoint holds."""
    return json.dumps(encode_value(lane.get_state()))


def restored(lane: Any, text: str) -> Any:
    lane.set_state(decode_value(json.loads(text)))
    return lane


def check_lanes(
    source: Any, num_lanes: int, expected: Sequence[int] | None = None, *, step: int = 1, **how: Any
) -> list[list[int]]:
    """Reads all lanes, and each again from the states of its records.

    Args:
      source: a stream source whose records have integers "id".
      num_lanes: number of lanes.
      expected: all ids, in any order; not compared if None.
      step: every so many records the lane is restored.
      how: keywords of ``open``.

    Returns:
      The ids of each lane.
    """
    lanes = []
    for lane_index in range(num_lanes):
        lane = source.open(lane_index, num_lanes, **how)
        states, ids = [saved(lane)], []
        for record in lane:
            ids.append(np.ravel(record["id"]).tolist())
            states.append(saved(lane))
        assert next(lane, None) is None, "a lane that ended must stay at its end"
        for point in range(0, len(states), step):
            again = restored(source.open(lane_index, num_lanes, **how), states[point])
            # saving at once after a restore must lose nothing
            once_more = restored(source.open(lane_index, num_lanes, **how), saved(again))
            rest = list(itertools.chain(*ids[point:]))
            assert read_ids(again) == rest, (lane_index, point)
            assert read_ids(once_more) == rest, (lane_index, point)
        lanes.append(list(itertools.chain(*ids)))
    if expected is not None:
        assert sorted(itertools.chain(*lanes)) == sorted(expected)
    return lanes


def read_batches(lane: Any, sizes: Sequence[int]) -> list[Any]:
    """What ``next_batch`` gives when asked for these sizes, over and over, to the end."""
    batches = []
    for size in itertools.cycle(sizes):
        try:
            batch = lane.next_batch(size)
        except StopIteration:
            return batches
        rows = {len(leaf) for leaf in jax.tree.leaves(batch)}
        assert len(rows) == 1
        assert 1 <= rows.pop() <= size
        batches.append(batch)
    raise AssertionError
