"""Checkpoints of arrays on whatever devices there are, see test_feeds_on_devices.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("orbax.checkpoint")

import meshfeed
from meshfeed.checkpoint import Checkpointer, restore_once

DTYPES = [
    "bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32",
    "float8_e4m3fn", "float8_e5m2", "complex64",
]  # fmt: skip
MODES = ["once", "single_replica", "every_host"]


ROWS = P("data")


def on_mesh(spec: P = ROWS, devices: Any = None, memory_kind: str | None = None) -> NamedSharding:
    devices = jax.devices() if devices is None else devices
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def filled(name: str, shape: tuple[int, ...]) -> np.ndarray:
    raw = np.random.default_rng(0).integers(0, 7, shape)
    return np.asarray(raw).astype(jnp.dtype(name))


def same(a: Any, b: Any) -> bool:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def state_of() -> dict[str, Any]:
    rows, whole = on_mesh(), on_mesh(P())
    state: dict[str, Any] = {name: jax.device_put(filled(name, (64, 24)), rows) for name in DTYPES}
    nans = np.array([np.nan, -np.nan, -0.0, 0.0, 1e-45, np.inf, -np.inf, 1.0], np.float32).view(np.uint32)
    state["nans"] = jax.device_put((nans | np.uint32(0)).view(np.float32), whole)
    state["key"] = jax.device_put(jax.random.key(7), whole)
    state["scalar"] = jax.device_put(jnp.float32(0.1), whole)
    state["empty"] = jax.device_put(np.zeros((0, 4), np.float32), whole)
    state["columns"] = jax.device_put(filled("float32", (24, 64)), on_mesh(P(None, "data")))
    state["count"] = 3
    return state


@pytest.mark.parametrize("mode", MODES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, mode: str) -> None:
    state = state_of()
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as checkpoints:
        checkpoints.save(1, state)
    with Checkpointer(tmp_path / "c", restore=mode) as checkpoints:
        step, restored = checkpoints.restore(state)
    assert step == 1
    for name, leaf in state.items():
        if name == "count":
            assert restored[name] == leaf
        else:
            assert restored[name].sharding == leaf.sharding, name
            assert same(restored[name], leaf), name


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_leaves_larger_than_the_limit(tmp_path: Path, mode: str) -> None:
    values = np.random.default_rng(0).normal(size=(4096, 1024)).astype(np.float32)  # 16 MiB
    state = {"rows": jax.device_put(values, on_mesh()), "whole": jax.device_put(values[::-1].copy(), on_mesh(P()))}
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as checkpoints:
        checkpoints.save(1, state)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    (step,) = [path for path in (tmp_path / "c").iterdir() if path.name.isdigit()]
    for limit in (None, 4 << 20, 1 << 20):
        restored = restore_once(step, abstract, memory_limit_bytes=limit, restore=mode)
        assert all(same(restored[name], state[name]) for name in state), limit


def test_state_may_be_donated_while_it_is_saved(tmp_path: Path) -> None:
    size = 2048
    state = {
        "w": jax.device_put(jnp.full((size, size), 1.0), on_mesh()),
        "n": jax.device_put(jnp.int32(0), on_mesh(P())),
    }

    @jax.jit
    def prepare(state: Any) -> Any:
        return jax.tree.map(lambda x: x + 0, state)

    step = jax.jit(lambda s: {"w": s["w"] * 2, "n": s["n"] + 1}, donate_argnums=0)
    state = prepare(state)
    with Checkpointer(tmp_path / "c", save_interval_steps=1, max_to_keep=10) as checkpoints:
        for number in range(6):
            checkpoints.save(number, state)
            state = step(state)
    with Checkpointer(tmp_path / "c") as checkpoints:
        for number in range(6):
            _, restored = checkpoints.restore(state, step=number)
            assert int(restored["n"]) == number
            np.testing.assert_array_equal(restored["w"], np.full((size, size), 2.0**number, np.float32))


def test_every_memory_kind(tmp_path: Path) -> None:
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    values = filled("float32", (64, 33))
    state = {kind: jax.device_put(values, on_mesh(memory_kind=kind)) for kind in kinds}
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as checkpoints:
        checkpoints.save(1, state)
        for wanted in (state, None):
            restored = checkpoints.restore(wanted)[1]
            for kind in kinds:
                assert restored[kind].sharding.memory_kind == kind
                assert same(restored[kind], state[kind])


@pytest.mark.parametrize("mode", MODES)
def test_between_cpu_devices_and_the_accelerator(tmp_path: Path, mode: str) -> None:
    try:
        cpu = jax.devices("cpu")[:1]
    except RuntimeError:
        pytest.skip("JAX has no CPU devices here; let JAX_PLATFORMS name cpu too")
    values = {name: filled(name, (64, 24)) for name in DTYPES}
    places = {"cpu": on_mesh(devices=cpu), "all": on_mesh()}
    for start, end in (("cpu", "all"), ("all", "cpu")):
        state = {name: jax.device_put(value, places[start]) for name, value in values.items()}
        wanted = {name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=places[end]) for name, v in values.items()}
        with Checkpointer(tmp_path / start, save_interval_steps=1, restore=mode) as checkpoints:
            checkpoints.save(1, state)
            restored = checkpoints.restore(wanted)[1]
        for name, value in values.items():
            assert restored[name].devices() == places[end].device_set, name
            assert same(restored[name], value), name


def test_a_training_loop_continues_bit_for_bit(tmp_path: Path) -> None:
    data = {"x": np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)}

    @jax.jit
    def train(state: Any, batch: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.tanh(batch["x"] @ w).mean())(state["w"])
        return {"w": state["w"] - 0.1 * gradient}

    def run(folder: Path, stop: int) -> Any:
        state = {"w": jax.device_put(np.full((16, 8), 0.3, np.float32), on_mesh(P()))}
        with (
            meshfeed.Feed(data, on_mesh(), global_batch_size=40, shuffle=True, num_epochs=None) as feed,
            Checkpointer(folder, save_interval_steps=5) as checkpoints,
        ):
            step, state = checkpoints.restore(state, feed)
            while step < stop:
                state = train(state, next(feed))
                step += 1
                checkpoints.save(step, state, feed)
        return state

    whole = run(tmp_path / "whole", 40)
    run(tmp_path / "parts", 15)
    assert same(run(tmp_path / "parts", 40)["w"], whole["w"])


def test_plain_orbax_reads_it(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    state = {
        "w": jax.device_put(filled("float32", (64, 24)), on_mesh()),
        "b": jax.device_put(filled("bfloat16", (8,)), on_mesh(P())),
    }
    with Checkpointer(tmp_path / "c", save_interval_steps=1) as checkpoints:
        checkpoints.save(1, state)
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        restored = manager.restore(1, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(abstract)))
    (found,) = restored.values()
    assert all(same(found[name], state[name]) for name in state)
