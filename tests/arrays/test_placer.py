"""Shardings by leaf, and the mask that no record has."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ARRAYS = {"x": np.arange(80, dtype=np.int32).reshape(10, 8), "y": {"z": np.arange(10, dtype=np.float32)}}
WIDE, ROWS, ALL = NamedSharding(MESH, P("data", "model")), NamedSharding(MESH, P("data")), NamedSharding(MESH, P())


class Rows:
    """The same records one at a time, without columns."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, record_id: int) -> Any:
        return jax.tree.map(lambda array: array[record_id], ARRAYS)


@pytest.mark.parametrize("load", ["sharded", "once"])
@pytest.mark.parametrize("source", [ARRAYS, Rows()], ids=["columns", "records"])
@pytest.mark.parametrize("mask", [None, ALL], ids=["mask like the rows", "mask as given"])
def test_a_mask_beside_shardings_by_leaf(source: Any, load: Any, mask: NamedSharding | None) -> None:
    sharding = {"x": WIDE, "y": ROWS} | ({} if mask is None else {"mask": mask})
    with meshfeed.MultiHostDataLoadIterator(
        source, sharding, global_batch_size=8, end="pad", mask_key="mask", load=load
    ) as feed:
        spec = feed.element_spec
        first, last = feed
    assert jax.tree.map(lambda leaf: leaf.sharding, first) == jax.tree.map(lambda leaf: leaf.sharding, spec)
    assert first["x"].sharding == WIDE
    assert first["mask"].sharding == (mask or ROWS)
    assert np.asarray(last["mask"]).tolist() == [True] * 2 + [False] * 6
    np.testing.assert_array_equal(np.concatenate([first["x"], last["x"]])[:10], ARRAYS["x"])
