"""A training step donates its state right after ``save``, while the checkpoint is still being written."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("orbax.checkpoint")

from meshfeed.checkpoint import Checkpointer


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model"), P("data", "model")])
def test_leaves_of_every_layout_may_be_donated_at_once(tmp_path: pathlib.Path, spec: P) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    shapes = {"small": (16, 8), "large": (256, 512)}
    state = {name: jax.device_put(jnp.full(shape, 3.0), NamedSharding(mesh, spec)) for name, shape in shapes.items()}
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        for number in range(1, 4):
            ckpt.save(number, state)
            state = step(state)
        ckpt.wait()
        for number in range(1, 4):
            _, restored = ckpt.restore(state, step=number)
            for leaf in restored.values():
                np.testing.assert_array_equal(np.asarray(leaf), number + 2.0)
