"""Assembles a host batch into a pytree of global ``jax.Array``, following the host's plan.

No device computation and no cross-host communication, so it can run on a background thread.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshfeed._src.arrays.device_put import DevicePut, LeafDevicePut, narrow, narrowed_dtype
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.jax_internals import probe_fast_call
from meshfeed._src.base.types import PyTree
from meshfeed._src.plan.plan import HostPlan, LeafPlan, broadcast_shardings, cut_spec
from meshfeed._src.plan.shardings import check_divisible, sharded_dimensions

_MAX_CACHED_BATCH_KINDS = 64  # batch schedules and ragged widths need several; more are unexpected, so start over


class Assembler:
    """Assembles the host batches of one feed into global arrays.

    A host with no device in a leaf's sharding gets a ``jax.Array`` of the same global shape, dtype and sharding but
    no addressable shards. It can be passed to a jitted step and holds no values.

    Args:
      prefix: normalized shardings, a pytree prefix of the batch.
      device_put: how arrays are put on devices and whether 64-bit dtypes are kept. Default: JAX's private fast call
        if available, and the current value of ``jax_enable_x64`` on this thread.
    """

    def __init__(self, prefix: PyTree, *, device_put: DevicePut | None = None) -> None:
        self._prefix = prefix
        self._device_put = device_put or DevicePut(probe_fast_call(), bool(jax.config.jax_enable_x64))  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it
        self._x64 = self._device_put.x64
        self._kinds: dict[Any, list[LeafDevicePut]] = {}
        self._last: tuple[Any, list[LeafDevicePut]] = (None, [])

    @property
    def x64(self) -> bool:
        """Whether 64-bit dtypes are kept."""
        return self._x64

    def __call__(self, host_tree: PyTree, plan: HostPlan, record_shapes: PyTree = None) -> PyTree:
        """Returns a global array for each leaf.

        Args:
          host_tree: arrays ``[plan.num_rows, ...]``, rows in the order of ``plan.rows``. The remaining dimensions are
            those of a record or, if ``record_shapes`` is given, only the plan's columns of it. On CPU the result
            shares memory with arrays whose address is a multiple of 64 bytes: do not write to them afterwards.
          plan: the rows that this host holds.
          record_shapes: pytree of the same structure with the ``.shape`` of each leaf of one record. Required if
            leaves hold only some of the columns.

        Returns:
          The same pytree with global arrays ``[plan.global_batch_size, ...]``.

        Raises:
          SourceError: a leaf has no rows, a different number of rows or columns than planned, or a dtype that JAX
            does not support. The message names the leaf's path.
          PlanError: a leaf's columns are not divisible by the mesh axes of its sharding.
        """
        arrays, treedef = jax.tree.flatten(host_tree)
        leaves = [leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf) for leaf in arrays]
        shapes = None if record_shapes is None else tuple(tuple(spec.shape) for spec in jax.tree.leaves(record_shapes))
        kind = (plan, treedef, shapes, tuple([(leaf.shape, leaf.dtype) for leaf in leaves]))
        device_puts = self._last[1] if kind == self._last[0] else self._device_puts_of(kind, host_tree, leaves)
        with self._device_put.transfer():
            return treedef.unflatten([put(leaf) for put, leaf in zip(device_puts, leaves, strict=True)])

    def _device_puts_of(self, kind: Any, host_tree: PyTree, leaves: list[np.ndarray[Any, Any]]) -> list[LeafDevicePut]:
        device_puts = self._kinds.get(kind)
        if device_puts is None:
            device_puts = self._device_puts(host_tree, leaves, kind[0], kind[2])
            if len(self._kinds) >= _MAX_CACHED_BATCH_KINDS:
                self._kinds.clear()
            self._kinds[kind] = device_puts
        self._last = (kind, device_puts)  # most batches match the last one, and comparing is cheaper than hashing
        return device_puts

    def _device_puts(
        self, host_tree: PyTree, leaves: list[np.ndarray[Any, Any]], plan: HostPlan, widths: Any
    ) -> list[LeafDevicePut]:
        shardings = broadcast_shardings(self._prefix, host_tree)
        paths = leaf_paths(host_tree)
        widths = [leaf.shape[1:] for leaf in leaves] if widths is None else widths
        if len(widths) != len(leaves):
            raise SourceError(f"the batch has {len(leaves)} leaves {paths}, and a record has {len(widths)}")
        device_puts = []
        for path, leaf, width, sharding in zip(paths, leaves, widths, shardings, strict=True):
            if leaf.ndim == 0 or leaf.shape[0] != plan.num_rows:
                raise SourceError(
                    f"leaf {path or '(the only one)'} has shape {leaf.shape} and dtype {leaf.dtype}; expected "
                    f"{plan.num_rows} rows first, which is what host {plan.process_index} holds of a global batch of "
                    f"{plan.global_batch_size}"
                )
            narrow(leaf[:0], path, self._x64)  # rejects an unsupported dtype before any work
            leaf_plan = plan.leaf(sharding, (plan.global_batch_size, *width), path)
            local = _local_indices(leaf, leaf_plan, path)
            dtype = narrowed_dtype(leaf.dtype, self._x64)
            device_puts.append(LeafDevicePut(self._device_put, leaf_plan, leaf.shape, dtype, local, path))
        return device_puts

    def columns(self, record_shapes: PyTree, plan: HostPlan) -> dict[str, tuple[slice, ...]]:
        """Leaf path → the columns that this host holds, which is all that a source needs to read."""
        shardings = broadcast_shardings(self._prefix, record_shapes)
        specs = jax.tree.leaves(record_shapes)
        return {
            path: plan.leaf(sharding, (plan.global_batch_size, *spec.shape), path).columns
            for path, spec, sharding in zip(leaf_paths(record_shapes), specs, shardings, strict=True)
        }

    def element_spec(self, record_shapes: PyTree, global_batch_size: int) -> PyTree:
        """Returns the spec of a batch: a pytree of ``jax.ShapeDtypeStruct`` with shardings.

        Args:
          record_shapes: pytree with the ``.shape`` and ``.dtype`` of each leaf of one record.
          global_batch_size: rows of a global batch.

        Raises:
          PlanError: a dimension is not divisible by the mesh axes of its sharding.
          SourceError: ``prefix`` does not match the structure of the record.
        """
        specs, treedef = jax.tree.flatten(record_shapes)
        shardings = broadcast_shardings(self._prefix, record_shapes)
        return jax.tree.unflatten(
            treedef,
            [
                leaf_spec((global_batch_size, *spec.shape), spec.dtype, sharding, path, self._x64)
                for path, spec, sharding in zip(leaf_paths(record_shapes), specs, shardings, strict=True)
            ],
        )


def leaf_spec(
    global_shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, path: str, x64: bool
) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of one leaf of a batch.

    Args:
      global_shape: ``(global_batch_size, ...)``.
      dtype: dtype of the host array.
      sharding: its spec is truncated to the leaf's rank.
      path: the leaf's path, for messages.
      x64: whether 64-bit dtypes are kept.

    Raises:
      PlanError: a dimension is not divisible by the mesh axes of its sharding.
    """
    sharding = cut_spec(sharding, len(global_shape))
    for dimension, axes in sharded_dimensions(sharding, len(global_shape)):
        what = f"dimension {dimension} of leaf {path or '(the only one)'}" if dimension else "the global batch"
        check_divisible(what, global_shape[dimension], axes, sharding.mesh.shape)
    return jax.ShapeDtypeStruct(global_shape, narrowed_dtype(dtype, x64), sharding=sharding)


def leaf_paths(tree: PyTree) -> list[str]:
    """Key path of each leaf, as formatted by ``jax.tree_util.keystr``."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _local_indices(leaf: np.ndarray[Any, Any], plan: LeafPlan, path: str) -> list[tuple[slice, ...]]:
    if leaf.shape[1:] == plan.global_shape[1:]:
        return [(block.local[0], *block.index[1:]) for block in plan.blocks]
    if leaf.shape[1:] == plan.column_shape:
        return [block.local for block in plan.blocks]
    raise SourceError(
        f"leaf {path or '(the only one)'} has shape {leaf.shape} and dtype {leaf.dtype}; expected rows of shape "
        f"{plan.global_shape[1:]} as the first record has, or of this host's columns {plan.column_shape}. All "
        f"records must have the same shape: pad or cut them in `decode`."
    )
