"""Computes xxh3-64 digests of stored chunks from the host copies that saving makes anyway."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import xxhash

from meshfeed._src.checkpoint.load_plan import Box, Grid, box_of_index, slices


def digest(values: np.ndarray[Any, Any]) -> str:
    """Returns the xxh3-64 digest of ``values``' bytes in row-major order, as 16 hex digits."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return f"{xxhash.xxh3_64_intdigest(flat.data):016x}"


def cell_digests(values: np.ndarray[Any, Any], box: Box, grid: Grid) -> dict[int, str]:
    """Returns the digest of each cell of ``grid`` inside ``box``, which holds ``values``, keyed by cell number."""
    number = grid.only(box)
    if number is not None:
        return {number: digest(values)}
    return {number: digest(values[slices(grid.box(number), box)]) for number in grid.touching(box)}


@functools.lru_cache(maxsize=1024)
def _device_boxes(sharding: Any, shape: tuple[int, ...]) -> dict[Any, Box]:
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: box_of_index(index, shape) for device, index in indices.items()}


class ShardDigests:
    """Host copies of the slices of one array that this process writes, and their digests.

    Orbax's own transfer fills the same per-shard cache, so each slice is copied from the device once, and on CPU not at
    all.

    Args:
      array: the array to save.
      cell: shape of the boxes that get a digest.
      replica_id: the replica that this process writes; None means the one it holds.
      early: copy to the host now; otherwise only when :meth:`compute` runs.
    """

    def __init__(
        self, array: jax.Array, cell: tuple[int, ...], *, replica_id: int | None = 0, early: bool = True
    ) -> None:
        self._grid = Grid(tuple(array.shape), cell)
        shards = array.addressable_shards
        if replica_id is None and shards:
            replica_id = shards[0].replica_id
        boxes = _device_boxes(array.sharding, tuple(array.shape))
        self._shards: list[tuple[Box, Any]] = [
            (boxes[shard.device], shard.data) for shard in shards if shard.replica_id == replica_id
        ]
        self._early = early
        for _, data in self._shards if early else ():
            data.copy_to_host_async()

    def capture(self) -> None:
        """Waits for the host copies, so the caller may donate the array: Orbax copies only the slices it writes."""
        if self._early:
            self._shards = [(box, np.asarray(data)) for box, data in self._shards]

    def compute(self) -> dict[int, str]:
        """Returns the digests by cell number and frees the host copies."""
        digests: dict[int, str] = {}
        while self._shards:
            box, data = self._shards.pop()
            values = np.asarray(data if self._early else data.copy())  # copy first: jax.Array caches its host value
            digests.update(cell_digests(values, box, self._grid))
        return digests
