"""Host batch and plan to a pytree of global ``jax.Array``.

Nothing here computes on devices or talks to other hosts, so that it may run on a background thread.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshfeed._src.arrays.device_put import DevicePut, LeafDevicePut, probe_fast_call
from meshfeed._src.arrays.dtypes import narrow, narrowed_dtype
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.types import PyTree
from meshfeed._src.plan.plan import HostPlan, LeafPlan, broadcast_shardings, cut_spec
from meshfeed._src.plan.shardings import check_divisible, sharded_dimensions

_MAX_CACHED_BATCH_KINDS = 64  # a batch schedule or ragged widths make several; more means something is wrong


class Assembler:
    """Makes global arrays of the batches of one feed.

    A host without a device in a leaf's sharding receives a ``jax.Array`` of the same global shape, dtype and sharding
    with no addressable shards: it has a shape and a type and can be passed to a jitted step, and holds no values.

    Args:
      prefix: normalised shardings, a prefix of the batch.
      device_put: which way arrays are put on devices, and whether 64-bit dtypes are left alone; default: JAX's private
        fast call where this JAX has it, and 64 bits as ``jax_enable_x64`` is now on this thread.
    """

    def __init__(self, prefix: PyTree, *, device_put: DevicePut | None = None) -> None:
        self._prefix = prefix
        self._device_put = device_put or DevicePut(probe_fast_call(), bool(jax.config.jax_enable_x64))  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it
        self._x64 = self._device_put.x64
        self._kinds: dict[Any, list[LeafDevicePut]] = {}
        self._last: tuple[Any, list[LeafDevicePut]] = (None, [])

    @property
    def x64(self) -> bool:
        """Whether 64-bit dtypes are left alone."""
        return self._x64

    def __call__(self, host_tree: PyTree, plan: HostPlan, record_shapes: PyTree = None) -> PyTree:
        """A global array for each leaf.

        Args:
          host_tree: arrays ``[plan.num_rows, ...]``, rows in the order of ``plan.rows``. The dimensions after the
            first are those of a record, or, where ``record_shapes`` is given, only the plan's columns of them. On CPU
            the result shares memory with arrays whose address is a multiple of 64: never write to them again.
          plan: which rows these are.
          record_shapes: pytree of the same structure with the ``.shape`` of one record's leaves; needed where leaves
            hold some columns only.

        Returns:
          the same pytree with global arrays ``[plan.global_batch_size, ...]``.

        Raises:
          SourceError: a leaf without rows, of another number of rows or columns than planned, or of a dtype that JAX
            does not take; names the leaf's path.
          PlanError: a leaf's columns cannot be divided over the axes of its sharding.
        """
        arrays, treedef = jax.tree_util.default_registry.flatten(host_tree)
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
        self._last = (kind, device_puts)  # comparing is cheaper than hashing, and batches are mostly alike
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
            narrow(leaf[:0], path, self._x64)  # refuses a dtype before anything is made of it
            leaf_plan = plan.leaf(sharding, (plan.global_batch_size, *width), path)
            local = _local_indices(leaf, leaf_plan, path)
            dtype = narrowed_dtype(leaf.dtype, self._x64)
            device_puts.append(LeafDevicePut(self._device_put, leaf_plan, leaf.shape, dtype, local, path))
        return device_puts

    def columns(self, record_shapes: PyTree, plan: HostPlan) -> dict[str, tuple[slice, ...]]:
        """Leaf path → the columns that this host holds: what a source need read, and this class accepts."""
        shardings = broadcast_shardings(self._prefix, record_shapes)
        specs = jax.tree.leaves(record_shapes)
        return {
            path: plan.leaf(sharding, (plan.global_batch_size, *spec.shape), path).columns
            for path, spec, sharding in zip(leaf_paths(record_shapes), specs, shardings, strict=True)
        }

    def element_spec(self, record_shapes: PyTree, global_batch_size: int) -> PyTree:
        """What a batch will be: ``jax.ShapeDtypeStruct`` with shardings.

        Args:
          record_shapes: pytree of ``.shape`` and ``.dtype`` of one record's leaves.
          global_batch_size: rows of a global batch.

        Raises:
          PlanError: a dimension cannot be divided over the axes of its sharding.
          SourceError: ``prefix`` does not fit the record.
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
    """Shape, dtype and sharding of one leaf of a batch.

    Args:
      global_shape: ``(global_batch_size, ...)``.
      dtype: of the host array.
      sharding: its spec is cut to the leaf's rank.
      path: the leaf's path, for messages.
      x64: whether 64-bit dtypes are left alone.

    Raises:
      PlanError: a dimension cannot be divided over the axes of its sharding.
    """
    sharding = cut_spec(sharding, len(global_shape))
    for dimension, axes in sharded_dimensions(sharding, len(global_shape)):
        what = f"dimension {dimension} of leaf {path or '(the only one)'}" if dimension else "the global batch"
        check_divisible(what, global_shape[dimension], axes, sharding.mesh.shape)
    return jax.ShapeDtypeStruct(global_shape, narrowed_dtype(dtype, x64), sharding=sharding)


def leaf_paths(tree: PyTree) -> list[str]:
    """Key path of each leaf, as ``jax.tree_util.keystr`` writes it."""
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
