"""Factories and checks that the tests of remote feeds share, and that other processes run."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np

RECORDS = 101


def data() -> dict[str, np.ndarray]:
    """Rows that name themselves; float bits include NaN payloads."""
    ids = np.arange(RECORDS)
    bits = np.uint32(0x7F800001) + ids.astype(np.uint32)[:, None] * np.uint32(7) + np.zeros(4, np.uint32)
    return {"x": (ids[:, None] * 10 + np.arange(6)).astype(np.int32), "weird": bits.view(np.float32)}


def make_memory() -> Any:
    """A random-access source."""
    import meshfeed

    return meshfeed.sources.Memory(data())


def open_lane(lane_index: int, num_lanes: int) -> Any:
    """Records of one lane; lanes have unlike lengths."""
    rows = data()
    for number in range(lane_index, RECORDS, num_lanes):
        yield {key: leaf[number] for key, leaf in rows.items()}


def make_stream() -> Any:
    """A sequential source."""
    import meshfeed

    return meshfeed.sources.Stream(open_lane)


def digest(batch: Any) -> str:
    """Of the bits of every shard in this process, and where it lies."""
    import jax

    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        found.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {leaf.sharding.spec}".encode())
        for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id):
            found.update(f"{shard.device.id} {shard.index}".encode() + np.asarray(shard.data).tobytes())
    return found.hexdigest()


def run_payload(folder: str) -> None:
    """In a fresh interpreter: makes the feed of ``payload``, sets ``state.json``, writes digests and the new state."""
    import pathlib

    import cloudpickle
    import jax
    from jax.sharding import AxisType

    path = pathlib.Path(folder)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    target = cloudpickle.loads((path / "payload").read_bytes())(mesh)
    if (path / "state.json").exists():
        target.calls["set_state"]((path / "state.json").read_text())
    digests = [digest(target.next()) for _ in range(2)]
    state = target.calls["get_state"]()
    target.calls["close"]()
    (path / "result.json").write_text(json.dumps({"digests": digests, "state": state}))


if __name__ == "__main__":
    run_payload(sys.argv[1])
