"""Taking a batch in a function that JAX compiles is refused: the compiled function would keep that batch."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import core

import meshfeed
from meshfeed._src.base import jax_internals

REFUSED = (
    r"next was called in a function that JAX compiles .* Call next\(feed\) outside, and pass the batch as an argument\."
)


def make_loaders(mesh: jax.sharding.Mesh) -> list[Any]:
    batches = [{"x": np.full(8, step, np.float32)} for step in range(9)]
    data = {"x": np.arange(72, dtype=np.float32)}
    return [
        meshfeed.Feed(data, mesh, global_batch_size=8),
        meshfeed.maxtext.MultiHostDataLoadIterator(batches, mesh),
        meshfeed.remote.RemoteFeed(lambda: data, mesh, global_batch_size=8),
    ]


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize(
    "compiled",
    [
        jax.jit,
        lambda step: jax.jit(jax.grad(step)),
        lambda step: lambda w: jax.lax.scan(lambda carry, _: (step(carry), None), w, length=3),
        lambda step: lambda w: jax.eval_shape(step, w),
    ],
    ids=["jit", "jit of grad", "scan", "eval_shape"],
)
def test_a_batch_is_not_compiled_into_a_step(compiled: Callable[..., Any], mesh: jax.sharding.Mesh) -> None:
    for loader in make_loaders(mesh):
        with loader:
            with pytest.raises(meshfeed.MeshfeedError, match=REFUSED):
                compiled(lambda w, loader=loader: (w * next(loader)["x"]).sum())(jnp.ones(()))
            assert np.asarray(next(loader)["x"])[0] == 0, "the refused call has taken no batch"


def test_functions_that_run_at_each_call_may_take_batches(mesh: jax.sharding.Mesh) -> None:
    with meshfeed.Feed({"x": np.arange(72, dtype=np.float32)}, mesh, global_batch_size=8) as feed:

        def loss(w: jax.Array) -> jax.Array:
            return (w * next(feed)["x"]).sum()

        sums = [sum(range(step * 8, step * 8 + 8)) for step in range(4)]
        assert [float(jax.grad(loss)(jnp.ones(()))) for _ in range(2)] == sums[:2]
        assert jax.vmap(loss)(jnp.ones(2)).tolist() == [sums[2]] * 2
        with jax.disable_jit():
            assert float(jax.jit(loss)(jnp.ones(()))) == sums[3]
        assert feed.step == 4


def test_without_the_private_function_of_jax_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax_internals.find_trace_state_clean() is core.trace_state_clean
    monkeypatch.setitem(sys.modules, "jax._src.core", types.ModuleType("jax._src.core"))
    assert jax_internals.find_trace_state_clean()() is True
