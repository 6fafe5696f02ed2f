"""Every plan brings every bit to its requested device, whole or in blocks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_trees import make_mesh, special_floats
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshfeed._src.base import memory
from meshfeed._src.checkpoint.layout import box_shape, candidates, free_axes, replica_plan, slices
from meshfeed._src.checkpoint.place import BlockGather, cut_block, gather_group, host_bits_of

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
        buffer = memory.zeros(plan.piece_shape, values.dtype)
        if box is not None:
            buffer[tuple(slice(0, size) for size in box_shape(box))] = values[slices(box)]
        buffers[device] = host_bits_of(buffer)
    return buffers


def check(array, values, sharding):
    assert array.dtype == values.dtype
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_shape", "shape", "spec", "axis_type"),
    [(*case, AxisType.Auto) for case in CASES] + [((4, 2), (6, 4), ("model",), AxisType.Explicit)],
)
def test_every_plan_is_exact(mesh_shape, shape, spec, axis_type):
    mesh = make_mesh(*mesh_shape)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_type,) * len(mesh_shape))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    plans = [plan for plan in candidates(sharding, shape) if not plan.direct]
    plans += [replica_plan(sharding, shape, name, mesh.shape[name] - 1) for name in free_axes(sharding)]
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
