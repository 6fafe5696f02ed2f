"""A guard against implicit transfers permits those of saving and restoring, which are intended.

JAX's guard sees copies of int4 arrays on CPU; other arrays share their memory with numpy there. On accelerators it sees
them all.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_trees import make_mesh
from jax.sharding import NamedSharding, PartitionSpec

from meshfeed._src.checkpoint import array_handler
from meshfeed.checkpoint import ArraysRestore, ArraysSave, Checkpointer

GUARDS = ["jax_transfer_guard", "jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_host"]


def leaf() -> jax.Array:
    values = np.arange(8 * 512).astype(jnp.int4).reshape(8, 512)
    return jax.device_put(values, NamedSharding(make_mesh(8, 1), PartitionSpec("data")))


@contextlib.contextmanager
def guarded(setting: str) -> Iterator[None]:
    before: dict[str, Any] = {name: getattr(jax.config, name) for name in GUARDS}
    jax.config.update(setting, "disallow")  # on all threads
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("pinned", [False, True], ids=["", "pinned"])
@pytest.mark.parametrize("setting", GUARDS)
def test_a_checkpointer(tmp_path: pathlib.Path, setting: str, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pinned:  # as Orbax asks for on GPUs
        plan_write = array_handler.plan_write
        monkeypatch.setattr(
            array_handler, "plan_write", lambda *args, **how: plan_write(*args, **how | {"pinned": True})
        )
    tree = {"w": leaf()}
    with guarded(setting):
        with Checkpointer(tmp_path / "c") as ckpt:
            ckpt.save(1, tree)
            ckpt.wait()
            _, restored = ckpt.restore(tree)
    np.testing.assert_array_equal(restored["w"], tree["w"])


def test_an_own_manager(tmp_path: pathlib.Path) -> None:
    tree = {"w": leaf()}
    with guarded("jax_transfer_guard"), ocp.CheckpointManager(tmp_path / "c") as manager:
        manager.save(1, args=ocp.args.Composite(state=ArraysSave(tree)))
        manager.wait_until_finished()
        restored = manager.restore(1, args=ocp.args.Composite(state=ArraysRestore(tree))).state
    np.testing.assert_array_equal(restored["w"], tree["w"])
