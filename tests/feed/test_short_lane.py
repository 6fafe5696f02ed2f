"""A stream that ends before its first batch."""

from __future__ import annotations

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
