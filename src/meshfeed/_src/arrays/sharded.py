"""``load="sharded"``: each host reads the rows that its devices hold, and puts them there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshfeed._src.arrays import device_put
from meshfeed._src.arrays.device_put import BlockDevicePut, DevicePut, check_leaf, contiguous, index_key
from meshfeed._src.arrays.dtypes import batch_spec, narrow, narrowed_dtype
from meshfeed._src.base import memory
from meshfeed._src.base.errors import PlanError, SourceError
from meshfeed._src.base.trees import TreeDef, flatten_with_paths
from meshfeed._src.base.types import ColumnSlices, PyTree, RecordIds
from meshfeed._src.plan.plan import (
    HostPlan,
    HostRows,
    LeafPlan,
    axes_of,
    leaves_with_shardings,
    participants,
    plan_host,
    sharding_leaves,
)
from meshfeed._src.reading.stacking import RecordSpec

_MAX_KINDS = 64  # batch schedules and ragged widths need several


class _BatchKind(NamedTuple):
    """What determines how a batch is put; equal for most batches."""

    global_batch_size: int
    treedef: TreeDef
    leaves: list[tuple[tuple[int, ...], np.dtype]]


class _Leaf(NamedTuple):
    """How one leaf of the batches of one kind is put.

    Attributes:
      path: for messages.
      dtype: dtype of the global array; host arrays of other dtypes are narrowed to it.
      put: puts the blocks.
      rows: the rows of each block, if blocks are whole rows of the host array; else None.
      parts: the distinct blocks; replicas on this host share one: a view, or a single copy if its columns are sliced.
      part_of_block: for each block, its index in ``parts``.
      align: whether an unaligned host array is copied first.
    """

    path: str
    dtype: np.dtype
    put: BlockDevicePut
    rows: list[slice] | None
    parts: list[tuple[slice, ...]]
    part_of_block: list[int]
    align: bool


class ShardedPlacer:
    """Each host reads the rows that its devices hold.

    A host with no device in a leaf's sharding gets a ``jax.Array`` of the same global shape, dtype and sharding but no
    addressable shards. It can be passed to a jitted step and holds no values.

    Args:
      prefix: normalized shardings, a pytree prefix of the batch.
      process_index: this host.
      mask_key: key of the mask, a leaf of ``prefix`` that records do not have.
      device_put: how arrays are put on devices and whether 64-bit dtypes are kept; see :meth:`DevicePut.default`.

    Attributes:
      plan: global batch size → this host's plan; cached.
      record_shapes: leaf path → shape of a record's leaf; set if hosts read only some of the columns.
    """

    finish_computes = False

    def __init__(
        self,
        prefix: PyTree,
        process_index: int,
        mask_key: str | None = None,
        *,
        device_put: DevicePut | None = None,
    ) -> None:
        self.participants = participants(prefix)
        self.plan: Callable[[int], HostPlan] = functools.cache(lambda size: plan_host(prefix, size, process_index))
        self.record_shapes: Mapping[str, tuple[int, ...]] | None = None
        self._prefix = prefix
        self._mask_key = mask_key
        self._device_put = device_put or DevicePut.default()
        self._kinds: list[tuple[_BatchKind, list[_Leaf]]] = []  # the last used first

    def put(self, tree: PyTree, global_batch_size: int) -> PyTree:
        """Starts the transfer of a host batch and returns a global array for each leaf. Any thread.

        Args:
          tree: arrays ``[host rows, ...]``, rows in the order of the plan. The remaining dimensions are those of a record
            or, with ``record_shapes``, only the plan's columns of it. On CPU the result shares memory with arrays whose
            address is a multiple of 64 bytes: do not write to them afterwards.
          global_batch_size: rows of the global batch.

        Returns:
          The same pytree with global arrays ``[global_batch_size, ...]``.

        Raises:
          SourceError: a leaf has no rows, a different number of rows or columns than planned, or a dtype that JAX does
            not support. The message names the leaf's path.
          PlanError: a leaf's columns are not divisible by the mesh axes of its sharding.
        """
        arrays, treedef = jax.tree.flatten(tree)
        hosts = [array if isinstance(array, np.ndarray) else np.asarray(array) for array in arrays]
        kind = _BatchKind(global_batch_size, treedef, [(host.shape, host.dtype) for host in hosts])
        known, leaves = self._kinds[0] if self._kinds else (None, [])
        if known != kind:  # comparing with the last is cheaper than hashing
            leaves = self._leaves_of(kind, tree, hosts)
        with self._device_put.transfer():
            x64 = self._device_put.x64
            return treedef.unflatten([_put_leaf(leaf, host, x64) for leaf, host in zip(leaves, hosts, strict=True)])

    def _leaves_of(self, kind: _BatchKind, tree: PyTree, hosts: list[np.ndarray]) -> list[_Leaf]:
        number = next((number for number, (known, _) in enumerate(self._kinds) if known == kind), None)
        found = (kind, self._plan_leaves(tree, hosts, kind)) if number is None else self._kinds.pop(number)
        self._kinds.insert(0, found)
        del self._kinds[_MAX_KINDS:]
        return found[1]

    def _plan_leaves(self, tree: PyTree, hosts: list[np.ndarray], kind: _BatchKind) -> list[_Leaf]:
        plan = self.plan(kind.global_batch_size)
        places = leaves_with_shardings(self._prefix, tree)
        shapes = self.record_shapes or {}
        if missing := shapes.keys() - {path for path, _, _ in places}:
            raise SourceError(
                f"the batch has the leaves {[path for path, _, _ in places]}, but a record has {sorted(missing)} too"
            )
        leaves: list[_Leaf] = []
        for (path, _, sharding), host in zip(places, hosts, strict=True):
            check_leaf(host, plan, path, self._device_put.x64)
            width = shapes.get(path, host.shape[1:])  # the mask is no leaf of a record
            leaf_plan = plan.leaf(sharding, (plan.global_batch_size, *width), path)
            leaves.append(_plan_leaf(self._device_put, leaf_plan, host, path))
        return leaves

    def host_rows(self, spec_of: Callable[[], RecordSpec] | None) -> HostRows:
        """See :class:`meshfeed._src.arrays.placer.Placer`."""

        @functools.cache
        def columns(size: int) -> ColumnSlices | None:
            if spec_of is None:
                return None
            shapes = spec_of().shapes()
            self.record_shapes = {path: spec.shape for path, spec in flatten_with_paths(shapes)[0]}
            return columns_of(_without_mask(self._prefix, self._mask_key), shapes, self.plan(size))

        def rows(size: int) -> RecordIds:
            return self.plan(size).rows

        return HostRows(rows, columns)

    def global_batch_size_of(self, host_rows: int) -> int:
        """See :class:`meshfeed._src.arrays.placer.Placer`.

        Raises:
          PlanError: this host's rows do not divide evenly over its devices.
        """
        shards = self.smallest_batch_size()
        mine = self.plan(shards).num_rows
        if not mine or host_rows % mine:
            raise PlanError(
                f"a host batch of {host_rows} rows cannot be split over this host's {mine} of the {shards} row shards of "
                f"the mesh; use a multiple of {mine} rows. If this is a single record, pass its source as a "
                "meshfeed.sources.Stream."
            )
        return host_rows // mine * shards

    def smallest_batch_size(self) -> int:
        """See :class:`meshfeed._src.arrays.placer.Placer`."""
        return math.lcm(*(_row_shards(sharding) for sharding in sharding_leaves(self._prefix)))

    def finish(self, arrays: PyTree, global_batch_size: int) -> PyTree:
        """Returns ``arrays``, which are already in the target sharding."""
        del global_batch_size
        return arrays

    def element_spec(self, spec: RecordSpec, global_batch_size: int) -> PyTree:
        """See :class:`meshfeed._src.arrays.placer.Placer`."""
        return batch_spec(self._prefix, spec.shapes(), global_batch_size, self._device_put.x64)

    def blocks(self, tree: PyTree, global_batch_size: int) -> dict[str, np.ndarray]:
        """See :class:`meshfeed._src.arrays.placer.Placer`."""
        plan = self.plan(global_batch_size)
        blocks: dict[str, np.ndarray] = {}  # replicas on this host have one label, so they are digested once
        shapes = self.record_shapes or {}
        for path, leaf, sharding in leaves_with_shardings(self._prefix, tree):
            name = path or "(the record)"
            width = shapes[path] if path in shapes else leaf.shape[1:]
            leaf_plan = plan.leaf(sharding, (global_batch_size, *width), name)
            for block, index in zip(leaf_plan.blocks, _local_indices(leaf, leaf_plan, path), strict=True):
                where = ", ".join(f"{part.start or 0}:{part.stop}" for part in block.index)
                blocks[f"leaf {name}[{where}]"] = leaf[index]
        return blocks


def _put_leaf(leaf: _Leaf, host: np.ndarray, x64: bool) -> jax.Array:
    """Returns the global array of a leaf, from this host's rows and columns of it."""
    if host.dtype != leaf.dtype:
        host = narrow(host, leaf.path, x64)
    if leaf.rows is not None and host.flags.c_contiguous:
        if leaf.align and not memory.is_aligned(host):
            # JAX would copy each unaligned block, which is up to twice as slow as one aligned copy that it can alias.
            host = memory.copy(host)
        return leaf.put([host[rows] for rows in leaf.rows])
    parts = [contiguous(host[index]) for index in leaf.parts]
    return leaf.put([parts[number] for number in leaf.part_of_block])


def _plan_leaf(how: DevicePut, plan: LeafPlan, host: np.ndarray, path: str) -> _Leaf:
    """Returns how host arrays like ``host`` are put on the devices of their plan."""
    dtype = narrowed_dtype(host.dtype, how.x64)
    local = _local_indices(host, plan, path)
    devices = [block.device for block in plan.blocks]
    parts = {index_key(index): index for index in local}
    columns = tuple((0, size) for size in host.shape[1:])
    whole = all(key[1:] == columns for key in parts)  # the usual case, without column indices
    row_bytes = math.prod(host.shape[1:]) * dtype.itemsize
    # On CPU, JAX shares aligned host memory instead of copying it. Aligning the host array is only useful if every block's
    # byte offset keeps the alignment.
    align = all(device.platform == "cpu" for device in devices) and all(
        index[0].start * row_bytes % memory.ALIGNMENT == 0 for index in local
    )
    return _Leaf(
        path,
        dtype,
        device_put.BlockDevicePut(
            how, plan.global_shape, plan.sharding, dtype, devices, [block.index for block in plan.blocks]
        ),
        [index[0] for index in local] if whole else None,
        list(parts.values()),
        [list(parts).index(index_key(index)) for index in local],
        align,
    )


def _local_indices(leaf: np.ndarray, plan: LeafPlan, path: str) -> list[tuple[slice, ...]]:
    """For each block of the plan, its index in the host array, which has all columns of a record or only the plan's."""
    if leaf.shape[1:] == plan.global_shape[1:]:
        return [(block.local[0], *block.index[1:]) for block in plan.blocks]
    if leaf.shape[1:] == plan.column_shape:
        return [block.local for block in plan.blocks]
    raise SourceError(
        f"leaf {path or '(the only one)'} has shape {leaf.shape} and dtype {leaf.dtype}; expected rows of shape "
        f"{plan.global_shape[1:]}, as in the first record, or {plan.column_shape}, this host's columns. All records "
        f"must have the same shape: pad or cut them in `decode`."
    )


def columns_of(prefix: PyTree, record_shapes: PyTree, plan: HostPlan) -> dict[str, tuple[slice, ...]]:
    """Leaf path → the columns that this host holds; a source need not read the others."""
    return {
        path: plan.leaf(sharding, (plan.global_batch_size, *spec.shape), path).columns
        for path, spec, sharding in leaves_with_shardings(prefix, record_shapes)
    }


def _row_shards(sharding: NamedSharding) -> int:
    entry = sharding.spec[0] if len(sharding.spec) else None
    return math.prod(sharding.mesh.shape[axis] for axis in axes_of(entry))


def _without_mask(prefix: PyTree, mask_key: str | None) -> PyTree:
    """``prefix`` for the source's records, which have no mask."""
    if mask_key is None or not isinstance(prefix, Mapping):
        return prefix
    return {key: sharding for key, sharding in prefix.items() if key != mask_key}
