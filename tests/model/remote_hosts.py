"""JAX's colocated Python on simulated hosts: each has a controller of its own, which sends rows in place of arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.experimental import colocated_python

from meshfeed._src.remote import client, served_store


@dataclasses.dataclass
class _Rows:
    """A uint8 array with the same row on each device of this host."""

    row: np.ndarray
    sharding: Any
    shape: tuple[int, int]


def _to_rows(row: np.ndarray, sharding: Any, num_rows: int) -> _Rows:
    return _Rows(row, sharding, (num_rows, len(row)))


def _rows_of(rows: _Rows) -> list[np.ndarray]:
    return [rows.row] * len(rows.sharding.addressable_devices)


def patches() -> list[tuple[Any, str, Any]]:
    """Owner, name and value of what is replaced: an endpoint runs on the thread that calls it, over the mesh itself."""
    return [
        (client, "to_rows", _to_rows),
        (client, "rows_of", _rows_of),
        (client, "first_row", lambda rows: rows.row),
        (client, "zeros", lambda spec, size: np.zeros((size or spec.shape[0], *spec.shape[1:]), spec.dtype)),
        (client, "colocated_mesh", lambda mesh: mesh),
        (colocated_python, "colocated_python_class", lambda endpoint: endpoint),
        (served_store, "CALLS", {"store": lambda: ""}),  # they have one
    ]
