"""Streams that end before their first batch, whose lanes are of unequal length, or whose lanes are all the same."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed.sources import Stream


def test_an_empty_lane_is_named_as_the_cause_of_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    source = Stream(lambda lane_index, num_lanes: ({"x": np.int32(n)} for n in range(0 if lane_index == 1 else 50)))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with meshfeed.Feed(source, mesh, global_batch_size=8, num_lanes=4) as feed:
        assert list(feed) == []
    assert "a stream ends with its shortest lane: give each lane data, or use end='pad'" in caplog.text
    with meshfeed.Feed(source, mesh, global_batch_size=8, num_lanes=4, end="pad", mask_key="valid") as feed:
        assert sum(int(batch["valid"].sum()) for batch in feed) == 150


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_lane_that_ends_first_is_named(caplog: pytest.LogCaptureFixture, num_workers: int) -> None:
    """The lengths are unknown before the end, as those of a filter are."""
    lengths = {0: 50, 1: 11, 2: 50, 3: 10}
    source = Stream(
        lambda lane_index, num_lanes: ({"x": np.int32(100 * lane_index + n)} for n in range(lengths[lane_index]))
    )
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with meshfeed.Feed(source, mesh, global_batch_size=8, num_lanes=4, num_workers=num_workers) as feed:
        assert len(list(feed)) == 5
    (text,) = [record.getMessage() for record in caplog.records if record.name == "meshfeed.lanes"]
    assert "the stream ends with lane 3 of 4, which has 10 records, while lanes 0, 2 still had data: at least 5" in text
    assert "(num_lanes=)" in text


@pytest.mark.parametrize(("lengths", "end"), [([12, 11, 11, 11], "drop"), ([10] * 4, "drop"), ([50, 1, 9, 3], "pad")])
def test_lanes_that_lose_less_than_a_batch_are_not(
    caplog: pytest.LogCaptureFixture, lengths: list[int], end: str
) -> None:
    source = Stream(
        lambda lane_index, num_lanes: ({"x": np.int32(100 * lane_index + n)} for n in range(lengths[lane_index]))
    )
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with meshfeed.Feed(source, mesh, global_batch_size=20, num_lanes=4, end=end) as feed:  # type: ignore[arg-type]
        for _ in feed:
            pass
    assert not [record for record in caplog.records if record.name == "meshfeed.lanes"]


def test_a_filter_that_empties_lanes_of_a_grain_dataset(caplog: pytest.LogCaptureFixture) -> None:
    grain = pytest.importorskip("grain")
    even = grain.MapDataset.range(480).filter(lambda n: n % 2 == 0).to_iter_dataset()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with meshfeed.Feed(even, mesh, global_batch_size=8, num_lanes=8) as feed:
        assert list(feed) == []
    assert "the stream ends with lane 1 of 8, which has 0 records, while lanes 0, 2, 4, 6 still had data" in caplog.text


@pytest.mark.parametrize(
    ("record", "warns"),
    [
        (lambda n, lane_index: n, True),
        (lambda n, lane_index: n + lane_index, False),
        (lambda n, lane_index: n if n else lane_index, False),
        (lambda n, lane_index: n if n < 2 else 7, True),
        (lambda n, lane_index: 7, False),  # constant data, as in benchmarks
    ],
)
@pytest.mark.parametrize("num_lanes", [2, 8])
def test_lanes_that_do_not_divide_the_data(
    record: Callable[[int, int], int], warns: bool, num_lanes: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = Stream(lambda lane_index, num_lanes: ({"x": np.int32(record(n, lane_index))} for n in range(40)))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with meshfeed.Feed(source, mesh, global_batch_size=num_lanes, num_lanes=num_lanes) as feed:
        for _ in range(4):
            next(feed)
    assert ("begin with the same records, so each record comes as often as there are lanes" in caplog.text) is warns
