"""Assembly and load modes in real processes: four of two devices each."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshfeed import testing
from meshfeed._src.arrays import load_once
from meshfeed._src.arrays.device_put import DevicePut
from meshfeed._src.arrays.load_once import RowAssignment
from meshfeed._src.arrays.placer import ShardedPlacer, columns_of
from meshfeed._src.base.jax_internals import probe_fast_call

pytestmark = pytest.mark.multihost

ROWS = 16
COLUMNS = 32
MESHES = ["model axis on one host", "model axis over hosts", "permuted", "explicit", "without host 3"]


def _whole_batch(num_rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (num_rows, COLUMNS * 4), np.uint8)
    return {
        "tokens": raw.view(np.int32),
        "floats": raw.view(np.float32),
        "narrow": np.ascontiguousarray(raw[:, : COLUMNS * 2]).view(ml_dtypes.bfloat16),
        "eighths": np.ascontiguousarray(raw[:, :COLUMNS]).view(ml_dtypes.float8_e5m2),
        "mask": raw[:, 0] % 2 == 0,
    }


def _check(array: jax.Array, whole: np.ndarray, sharding: NamedSharding, num_own: int) -> None:
    assert array.shape == whole.shape
    assert array.dtype == whole.dtype
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    assert len(array.addressable_shards) == num_own
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes()


def _meshes() -> dict[str, Mesh]:
    devices = jax.devices()
    permuted = [devices[i] for i in (5, 2, 7, 0, 1, 4, 6, 3)]
    auto = (AxisType.Auto,) * 2
    grids = [
        np.array(devices).reshape(4, 2),
        np.array(devices).reshape(2, 4),
        np.array(permuted).reshape(4, 2),
        np.array(devices).reshape(4, 2),
        np.array(devices[:6]).reshape(2, 3)[:, :2],
    ]
    types = [(AxisType.Explicit,) * 2 if name == "explicit" else auto for name in MESHES]
    return {
        name: Mesh(grid, ("data", "model"), axis_types=axis_types)
        for name, grid, axis_types in zip(MESHES, grids, types, strict=True)
    }


SPECS = [P(), P("data"), P(("data", "model")), P("model"), P("data", "model"), P(None, "model")]


def _sharded(fast: bool) -> int:
    """Each host reads what its devices hold, whole rows and then only its columns."""
    here = jax.process_index()
    whole = _whole_batch()
    checked = 0
    for mesh in _meshes().values():
        num_own = sum(device.process_index == here for device in mesh.devices.flat)
        for spec in SPECS:
            sharding = NamedSharding(mesh, spec)
            how = DevicePut(probe_fast_call() if fast else None, False)
            placer = ShardedPlacer(sharding, here, device_put=how)
            placer.put.record_shapes = {f"['{key}']": leaf.shape[1:] for key, leaf in whole.items()}
            plan = placer.plan(ROWS)
            records = {key: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for key, leaf in whole.items()}
            boxes = columns_of(sharding, records, plan)
            rows = {key: leaf[plan.rows] for key, leaf in whole.items()}
            boxed = {key: leaf[(slice(None), *boxes[f"['{key}']"])] for key, leaf in rows.items()}
            for batch in (rows, rows, boxed, boxed):
                out = placer.put(batch, ROWS)
                for key, leaf in whole.items():
                    _check(out[key], leaf, NamedSharding(mesh, P(*tuple(spec)[: leaf.ndim])), num_own)
                    checked += 1
    return checked


def _loaded(load: Any, num_rows: int, meshes: list[str]) -> list[int]:
    """Each row is read by one host; placeholders are poisoned so that they would be seen."""
    here = jax.process_index()

    def poison(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xAB, np.uint8).view(dtype).reshape(shape)

    load_once.placeholder = poison
    whole = _whole_batch(num_rows)
    for name in meshes:
        mesh = _meshes()[name]
        num_own = sum(device.process_index == here for device in mesh.devices.flat)
        for spec in (P(), P(None, "model"), P("data", "model")):
            if num_rows % 8 and spec and spec[0] is not None:
                continue
            sharding = NamedSharding(mesh, spec)
            plan = RowAssignment(sharding, load, num_rows, here)
            for _ in range(2):
                out = plan.reshard(plan.put({key: leaf[plan.host_rows] for key, leaf in whole.items()}))
                for key, leaf in whole.items():
                    _check(out[key], leaf, NamedSharding(mesh, P(*tuple(spec)[: leaf.ndim])), num_own)
    return plan.host_rows.tolist()


def test_global_arrays_and_load_modes_in_four_processes() -> None:
    with testing.HostPool(num_hosts=4, devices_per_host=2, timeout_seconds=200) as pool:
        for fast in (True, False):
            counts = [result.value for result in pool.run(_sharded, fast)]
            assert counts == [5 * 6 * 4 * 5] * 4
        # The last mesh is without host 3: rows are dealt to devices 0, 1, 3 and 4.
        assert [r.value for r in pool.run(_loaded, "once", 16, MESHES)] == [
            [*range(8)],
            [*range(8, 12)],
            [*range(12, 16)],
            [],
        ]
        some = ["permuted", "without host 3"]
        assert [r.value for r in pool.run(_loaded, [1], 16, some)] == [[], [*range(16)], [], []]
        assert [r.value for r in pool.run(_loaded, [0, 2], 5, some)] == [[0, 1, 2, 3], [], [4], []]
