"""Shardings by leaf, and the mask that no record has."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed
from meshfeed._src.arrays.placer import ShardedPlacer
from meshfeed._src.reading.host_batch import spec_of_batch
from meshfeed.testing import fake_mesh

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


# ---------------------------------------------------------------------- one of several hosts

X = np.arange(16).reshape(4, 4)


def lists(blocks: dict[str, np.ndarray]) -> dict[str, list[Any]]:
    return {name: block.tolist() for name, block in blocks.items()}


@pytest.mark.parametrize("host", [0, 1])
def test_blocks_are_named_by_leaf_and_place_in_the_global_batch(host: int) -> None:
    mesh = fake_mesh({"replica": 2, "data": 2, "model": 2}, num_hosts=2, devices_per_host=4)
    replicated = ShardedPlacer(NamedSharding(mesh, P("data", "model")), host)
    assert lists(replicated.blocks({"x": X}, 4)) == {
        f"leaf ['x'][{row}:{row + 2}, {column}:{column + 2}]": X[row : row + 2, column : column + 2].tolist()
        for row in (0, 2)
        for column in (0, 2)
    }
    divided = ShardedPlacer(NamedSharding(mesh, P(("replica", "data"))), host)
    assert lists(divided.blocks(X[2 * host : 2 * host + 2], 4)) == {
        f"leaf (the record)[{row}:{row + 1}, 0:4]": [X[row].tolist()] for row in (2 * host, 2 * host + 1)
    }


@pytest.mark.parametrize("host", [0, 1])
def test_blocks_of_columns_are_named_by_their_place_in_the_record(host: int) -> None:
    mesh = fake_mesh({"model": 2, "data": 2}, num_hosts=2, devices_per_host=2)
    shardings = {"x": NamedSharding(mesh, P("data", "model")), "mask": NamedSharding(mesh, P("data"))}
    placer = ShardedPlacer(shardings, host, "mask")
    columns = slice(2 * host, 2 * host + 2)
    host_rows = placer.host_rows(lambda: spec_of_batch({"x": X}, 4, what="the source"))
    assert (host_rows.rows(4).tolist(), host_rows.columns(4)) == ([0, 1, 2, 3], {"['x']": (columns,)})
    assert lists(placer.blocks({"x": X[:, columns], "mask": np.array([True, True, False, False])}, 4)) == {
        "leaf ['mask'][0:2]": [True, True],
        "leaf ['mask'][2:4]": [False, False],
        f"leaf ['x'][0:2, {columns.start}:{columns.stop}]": X[0:2, columns].tolist(),
        f"leaf ['x'][2:4, {columns.start}:{columns.stop}]": X[2:4, columns].tolist(),
    }
    assert ShardedPlacer({"x": NamedSharding(mesh, P("data"))}, host).host_rows(None).columns(4) is None


def test_the_size_of_the_global_batch_follows_from_a_hosts_rows() -> None:
    mesh = fake_mesh({"replica": 2, "data": 4}, num_hosts=2, devices_per_host=4)
    placer = ShardedPlacer({"x": NamedSharding(mesh, P(("replica", "data"))), "y": NamedSharding(mesh, P("data"))}, 0)
    assert placer.smallest_batch_size() == 8
    placer = ShardedPlacer(NamedSharding(mesh, P(("replica", "data"))), 0)
    assert (placer.participants, placer.global_batch_size_of(4), placer.global_batch_size_of(12)) == ((0, 1), 8, 24)
    with pytest.raises(meshfeed.PlanError) as caught:
        placer.global_batch_size_of(6)
    assert str(caught.value) == (
        "a host batch of 6 rows cannot be split over this host's 4 of the 8 row shards of the mesh; use a multiple of 4 "
        "rows. If this is a single record, pass its source as a meshfeed.sources.Stream."
    )
    with pytest.raises(meshfeed.PlanError):
        ShardedPlacer(NamedSharding(mesh, P(("replica", "data"))), 2).global_batch_size_of(4)
    assert ShardedPlacer(NamedSharding(mesh, P()), 0).smallest_batch_size() == 1
