"""Rows of lanes laid out in a host's batch, against laying out each row by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshfeed
from meshfeed._src.streams.lane import Taken
from meshfeed._src.streams.lane_reader import lane_runs, needed_lanes, place_rows


def taken(lane: int, count: int) -> Taken:
    rows = np.arange(count) + 1000 * (lane + 1)
    return Taken({"id": rows, "x": np.stack([rows, -rows], 1).astype(np.float32)} if count else None, count)


@given(data=st.data())
def test_every_row_is_where_it_belongs(data: st.DataObject) -> None:
    rows_per_lane = data.draw(st.integers(1, 6))
    num_lanes = data.draw(st.integers(1, 5))
    everything = range(rows_per_lane * num_lanes)
    rows = np.array(sorted(data.draw(st.sets(st.sampled_from(everything)))), np.int64)
    counts = [data.draw(st.integers(0, rows_per_lane)) for _ in range(num_lanes)]
    lanes = {lane: taken(lane, counts[lane]) for lane in needed_lanes(rows, rows_per_lane)}
    runs = lane_runs(rows, rows_per_lane)
    assert sum(run.count for run in runs) == len(rows)
    tree, real, spec = place_rows(lanes, runs, len(rows), None)
    wanted = [
        (lane + 1) * 1000 + offset if offset < counts[lane] else 0
        for lane, offset in (divmod(int(row), rows_per_lane) for row in rows)
    ]
    assert real.tolist() == [value != 0 for value in wanted]
    if not any(counts[lane] for lane in lanes):
        assert tree is None
        assert spec is None
        return
    assert tree is not None
    assert tree["id"].tolist() == wanted
    assert tree["x"].tolist() == [[value, -value] for value in wanted]


def test_lanes_whose_records_differ_are_refused() -> None:
    lanes = {0: taken(0, 2), 1: Taken({"id": np.arange(2)}, 2)}
    with pytest.raises(
        meshfeed.SourceError, match=r"lane 1: records have the leaves \['id'\] int64\[\], but the first record had"
    ) as info:
        place_rows(lanes, lane_runs(np.arange(4), 2), 4, None)
    assert info.value.lane_index == 1
