"""Saving and restoring inside the caller's ``jax.set_mesh`` or ``with mesh:``, over the same devices or others."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_feeds import CountingFeed
from checkpoint_trees import abstract, assert_same, mixed_tree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshfeed.checkpoint import Checkpointer

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def make_mesh(shape, kind, names=("data", "model")):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(KINDS[kind],) * len(shape))


def ambient(how, mesh):
    if how == "with mesh":
        return mesh
    if how == "other devices":
        return jax.set_mesh(make_mesh((2, 2), "explicit"))
    if how == "other axes":
        return jax.set_mesh(make_mesh((2, 4), "explicit", ("x", "y")))
    return jax.set_mesh(mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("auto", "with mesh"),
        ("explicit", "with mesh"),
        ("explicit", "set_mesh"),
        ("auto", "other devices"),
        ("explicit", "other axes"),
    ],
)
def test_an_ambient_mesh_changes_nothing(tmp_path, kind, how):
    mesh = make_mesh((4, 2), kind)
    tree = {
        **mixed_tree(mesh, rows=16),
        "on one device": {
            "values": jnp.arange(5.0),
            "float8": jnp.arange(5.0).astype(jnp.float8_e5m2),
            "key": jax.random.key(5),
            "keys": jax.random.split(jax.random.key(5, impl="rbg"), 3),
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of ``with mesh:``, which programs still use
        context = ambient(how, mesh)
        with context, Checkpointer(tmp_path / "c", save_interval_steps=1, memory_limit_bytes=1 << 14) as ckpt:
            assert ckpt.save(1, tree, CountingFeed())
            ckpt.wait()
            restored = [ckpt.restore(abstract(tree), CountingFeed())[1]]
            saved_so = ckpt.restore(None)[1]
        with ambient(how, mesh), Checkpointer(tmp_path / "c", restore="single_replica") as ckpt:
            restored.append(ckpt.restore(abstract(tree))[1])
    for other in restored:
        assert_same(tree, other)
        for leaf, same in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
            assert not isinstance(leaf, jax.Array) or jax.typeof(leaf) == jax.typeof(same)
    assert_same(tree, saved_so, shardings=False)


def test_restoring_to_other_devices_than_the_ambient_mesh(tmp_path):
    mesh, part = make_mesh((4, 2), "explicit"), make_mesh((2,), "explicit", ("x",))
    tree = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec("data")))}
    wanted = {"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=NamedSharding(part, PartitionSpec(None, "x")))}
    with jax.set_mesh(mesh), Checkpointer(tmp_path / "c", save_interval_steps=1) as ckpt:
        ckpt.save(1, tree)
        ckpt.wait()
        restored = ckpt.restore(wanted)[1]["w"]
    assert restored.sharding == wanted["w"].sharding
    np.testing.assert_array_equal(np.asarray(restored), np.arange(64).reshape(8, 8))
