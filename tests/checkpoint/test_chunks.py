"""Chunks of a store are found by the names that zarr's metadata implies, and only those of the box are fetched."""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.store_path import StorePath
from meshfeed._src.checkpoint.chunks import ChunkReader
from meshfeed.checkpoint import Checkpointer, restore_once


@pytest.mark.parametrize("separator", [None, ".", "/"])
@pytest.mark.parametrize("shape", [(7, 5), ()])
def test_a_box_is_read_with_either_separator_of_chunk_names(
    separator: str | None, shape: tuple[int, ...], tmp_path: pathlib.Path, memory: Any
) -> None:
    metadata: dict[str, Any] = {"chunks": [3, 2][: len(shape)]}
    metadata |= {} if separator is None else {"dimension_separator": separator}
    values = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    kvstore = {"driver": "file", "path": f"{tmp_path}/step/a.b/"}
    written = ts.open(
        {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}, create=True, dtype=ts.int32, shape=shape
    ).result()
    written.write(values).result()
    memory.put(str(tmp_path / "step"), "/step", recursive=True)

    reader = ChunkReader(StorePath("memory://step"), 2, ts.Context())
    spec: dict[str, Any] = {"driver": "zarr"}
    store = reader.open(spec, "a.b").result()
    for chunk in ("0.0", "0/0"):  # which the second box does not need
        if memory.exists(f"/step/a.b/{chunk}") and shape:
            memory.rm(f"/step/a.b/{chunk}")
    box = ((3, 6), (1, 4))[: len(shape)]
    room = np.zeros([stop - start for start, stop in box], np.int32)
    found = reader.read(spec, store, "a.b", box, room)()
    assert found is room
    np.testing.assert_array_equal(room, values[tuple(slice(*bounds) for bounds in box)])


def test_a_database_in_a_store_that_tensorstore_does_not_read(tmp_path: pathlib.Path, memory: Any) -> None:
    with Checkpointer(tmp_path / "c") as ckpt:
        ckpt.save(1, {"w": jnp.arange(3)})
    memory.put(str(tmp_path / "c/1"), "/database/1", recursive=True)
    with pytest.raises(CheckpointError, match=r"memory://database/1/arrays: is an OCDBT database.*Copy the step"):
        restore_once("memory://database/1/arrays", None)
