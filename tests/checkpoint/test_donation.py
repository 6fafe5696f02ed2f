"""A training step donates its state right after ``save``, while the checkpoint is still being written."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshfeed._src.checkpoint import array_handler
from meshfeed._src.checkpoint.write import WriteOptions, plan_write
from meshfeed.checkpoint import Checkpointer


@pytest.mark.parametrize("pinned", [False, True], ids=["", "pinned"])
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model"), P("data", "model")])
def test_leaves_of_every_layout_may_be_donated_at_once(
    tmp_path: pathlib.Path, spec: P, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pinned:  # as Orbax asks for on GPUs
        monkeypatch.setattr(
            array_handler, "plan_write", lambda *args, **how: plan_write(*args, **how | {"pinned": True})
        )
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


def test_what_is_copied_to_pinned_memory() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    options = WriteOptions(True, None, 0, None, False)

    def kind(spec: P, shape: tuple[int, ...], memory_kind: str | None = None, early: bool = True) -> str | None:
        value = jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec, memory_kind=memory_kind))
        write = plan_write("x", value, ocp.type_handlers.SaveArgs(), options, early=early, pinned=True)
        assert write.sharding == value.sharding  # with which Orbax restores it
        assert write.digests is not None
        assert list(write.digests.compute()) == list(plan_write(
            "x", value, ocp.type_handlers.SaveArgs(), options, early=early, pinned=False
        ).digests.compute())  # fmt: skip
        return write.array.sharding.memory_kind

    assert kind(P("data", "model"), (64, 64)) == "pinned_host"
    assert kind(P(), (512, 512)) == "pinned_host"  # each replica's slice
    assert kind(P(), (3,)) == "device"  # one of eight replicas is written
    assert kind(P("data", "model"), (64, 64), early=False) == "device"
    assert kind(P("data", "model"), (64, 64), "unpinned_host") == "unpinned_host"
