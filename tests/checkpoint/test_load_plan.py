"""Every way to cut a leaf brings every bit to where it is wanted; the one chosen reads each chunk once."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_trees import make_mesh, special_floats
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshfeed._src.base import memory
from meshfeed._src.checkpoint import load_plan
from meshfeed._src.checkpoint.engine import assign_units
from meshfeed._src.checkpoint.gather import (
    BlockGather,
    cut_block,
    gather_group,
    host_bits_of,
    piece_shape,
    rows_in_flight,
)
from meshfeed._src.checkpoint.load_plan import Grid, box_shape, joint_cell, slices
from meshfeed._src.checkpoint.save_layout import ReplicaCut, choose_cut, chunk_shape
from meshfeed._src.checkpoint.stored import StoredLeaf
from meshfeed._src.plan.topology import fake_mesh

CASES = [
    ((4, 2), (16, 24), ()),
    ((4, 2), (16, 24), ("model",)),
    ((4, 2), (16, 24), ("model", "data")),
    ((4, 2), (16, 24), (("data", "model"),)),
    ((4, 2), (7, 6), (None, "model")),  # pieces are padded
    ((4, 2), (3,), ()),  # fewer rows than devices
    ((4, 2), (), ()),
    ((2, 2, 2), (8, 12), ("data", ("model", "expert"))),
    ((2, 2, 2), (5, 6), (None, "data")),
]


def pieces_of(plan, values):
    buffers = {}
    for device, box in plan.boxes().items():
        buffer = memory.zeros(piece_shape(plan), values.dtype)
        if box is not None:
            buffer[tuple(slice(0, size) for size in box_shape(box))] = values[slices(box)]
        buffers[device] = host_bits_of(buffer)
    return buffers


def check(array, values, sharding):
    assert array.dtype == values.dtype
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "spec", "axis_type"),
    [(*case, AxisType.Auto) for case in CASES] + [((4, 2), (6, 4), ("model",), AxisType.Explicit)],
)
def test_every_plan_is_exact(mesh_shape, shape, spec, axis_type):
    mesh = make_mesh(*mesh_shape)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_type,) * len(mesh_shape))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    plans = [plan for plan in load_plan._candidates(sharding, shape) if not plan.direct]
    plans += [
        load_plan.replica_plan(sharding, shape, name, mesh.shape[name] - 1)
        for name in mesh.axis_names
        if name in load_plan.free_axes(sharding)
    ]
    for plan in plans:
        values, buffers = np.zeros(shape), {}
        for dtype in (np.float32, jnp.bfloat16) if not spec else (jnp.bfloat16,):
            values = special_floats(dtype, int(np.prod(shape))).reshape(shape)
            buffers = pieces_of(plan, values)
            (array,) = gather_group([plan], [values.dtype], [buffers])
            check(array, values, sharding)
        if plan.shape:
            rows = max(1, plan.piece // 2)
            gather = BlockGather(plan, values.dtype, rows)
            own = {device: buffers[device] for device, box in plan.boxes().items() if box is not None}
            for first in range(0, plan.piece, rows):
                first = min(first, plan.piece - rows)
                gather.add(first, cut_block(own, plan.dimension, first, rows))
            check(gather.finish(), values, sharding)


@pytest.mark.parametrize(
    ("saved", "spec", "shape"),
    [
        ((512, 1024), (None, "model"), (4096, 1024)),  # chunks of rows, wanted in columns and replicated
        ((512, 1024), (None, ("data", "model")), (4096, 1024)),  # wanted in columns only: an all-to-all
        ((512, 128), ("data",), (4096, 1024)),
        ((64, 1024), (), (4096, 1024)),
    ],
)
def test_the_chosen_plan_reads_each_chunk_on_one_host(saved, spec, shape):
    mesh = fake_mesh({"data": 4, "model": 2}, 4, 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    plan, cost = load_plan.best_plan(sharding, shape, Grid(shape, saved), 4)
    assert cost.ratio <= 1.1
    assert max(count for _, count in cost.by_process) * 4 <= 1.5 * cost.total
    assert len(set(plan.boxes().values())) > 1


@pytest.mark.parametrize(
    ("axes", "hosts", "rows", "least", "cut"),
    [
        ({"data": 8}, 1, 64, None, None),  # 16 KiB: eight slices by one host only cost
        ({"data": 8}, 1, 4096, None, ReplicaCut(0, ("data",))),
        ({"data": 8}, 1, 64, 0, ReplicaCut(0, ("data",))),  # asked for
        ({"data": 8}, 8, 64, None, None),
        ({"data": 64}, 64, 2048, None, ReplicaCut(0, ("data",))),  # 512 KiB in 8 KiB: a slice for each host
        ({"data": 64}, 8, 2048, None, None),  # eight for each
        ({"data": 64}, 8, 8192, None, ReplicaCut(0, ("data",))),
        ({"data": 8, "model": 4}, 8, 2048, None, ReplicaCut(0, ("data",))),  # hosts along data, one host along model
    ],
)
def test_replicas_share_a_leaf_where_that_is_worth_it(axes, hosts, rows, least, cut):
    devices = int(np.prod(list(axes.values())))
    sharding = NamedSharding(fake_mesh(axes, hosts, devices // hosts), PartitionSpec())
    assert choose_cut((rows, 64), 4, sharding, least) == cut


def test_boxes_that_are_single_cells():
    grid = Grid((10, 6), (4, 3))
    for number in range(len(grid)):
        assert grid.only(grid.box(number)) == number
    for box in (((0, 10), (0, 3)), ((1, 4), (0, 3)), ((0, 4), (0, 2)), ((8, 9), (3, 6))):
        assert grid.only(box) is None
    assert Grid((), ()).only(()) == 0


def test_units_are_levelled_over_hosts():
    leaf = StoredLeaf("w", (100, 10), np.dtype(np.float32), False, (10, 10), (10, 10), {0: ""})
    owned = assign_units([leaf, leaf], range(4), {0: 4000})
    counts = {host: len(units) for host, units in owned.items()}
    assert sum(counts.values()) == 20
    assert counts[0] < min(counts[host] for host in (1, 2, 3))
    assert sorted(unit for units in owned.values() for unit in units) == [(i, n) for i in range(2) for n in range(10)]


def test_units_hold_whole_chunks_and_cells():
    assert joint_cell((100, 64), (10, 64), (20, 32)) == (20, 64)
    assert joint_cell((7,), (4,), None) == (4,)
    assert joint_cell((7,), (4,), (3,)) == (7,)


@pytest.mark.parametrize(
    ("shape", "piece"),
    [((4096, 8192), (4096, 8192)), ((8192, 100003), (8, 100003)), ((3, 1 << 24), (3, 1 << 24)), ((9, 9), (9, 9))],
)
def test_chunks_are_what_orbax_makes_of_the_request(shape, piece):
    subchunking = pytest.importorskip("orbax.checkpoint._src.arrays.subchunking")
    chunk, asked = chunk_shape(shape, piece, 4)
    assert chunk == tuple(subchunking.choose_chunk_shape(shape, piece, np.dtype(np.float32), asked))


def test_rows_in_flight_are_whole_units_or_all():
    mesh = make_mesh(4, 2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    plan = load_plan.LoadPlan(sharding, (1024, 64), 0, ("data",), (), None, 256)
    read, sent = rows_in_flight(plan, Grid((1024, 64), (32, 64)), 4, 2, 1 << 16)
    assert read % 32 == 0
    assert 256 % read == 0
    assert 1 <= sent <= read
    assert rows_in_flight(plan, Grid((1024, 64), (48, 64)), 4, 2, 1 << 16)[0] == 256
