"""Places host batches on the mesh as global ``jax.Array``, following the host's plan.

With ``load="sharded"`` each host reads the rows that its devices hold (:class:`ShardedPlacer`), which needs no device
computation and no cross-host communication. With ``load="once"`` (``load_once.py``), one host reads each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshfeed._src.arrays.device_put import DevicePut, LeafDevicePut, batch_spec, narrow, narrowed_dtype
from meshfeed._src.arrays.load_once import LoadOncePlacer
from meshfeed._src.base import coordination
from meshfeed._src.base.errors import PlanError, SourceError
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.trees import TreeDef, flatten_with_paths
from meshfeed._src.base.types import ColumnSlices, PyTree, RecordIds
from meshfeed._src.plan.plan import (
    HostPlan,
    HostRows,
    LeafPlan,
    axes_of,
    broadcast_shardings,
    cut_spec,
    normalize_sharding,
    participants,
    plan_host,
    sharding_leaves,
)
from meshfeed._src.reading.stacking import RecordSpec

_MAX_CACHED_BATCH_KINDS = 64  # batch schedules and ragged widths need several; beyond that, the cache is cleared
_Shapes = tuple[tuple[int, ...], ...]


class Placer(Protocol):
    """Host batch → global arrays, in two stages: ``put`` on any thread, ``finish`` on the caller's thread."""

    participants: tuple[int, ...]
    """Process indices with a device in the sharding."""
    finish_computes: bool
    """Whether ``finish`` is a device computation that all hosts must run exactly once per batch."""

    def host_rows(self, spec_of: Callable[[], RecordSpec] | None) -> HostRows:
        """Rows and columns that this host reads; ``spec_of`` is None if the source reads only whole records."""
        ...

    def global_batch_size_of(self, host_rows: int) -> int:
        """Returns the global batch size for which this host holds ``host_rows`` rows."""
        ...

    def smallest_batch_size(self) -> int:
        """Returns the smallest global batch size that the row shards divide; all others are multiples of it."""
        ...

    def put(self, tree: PyTree, global_batch_size: int) -> PyTree:
        """Starts the transfer. Any thread."""
        ...

    def finish(self, arrays: PyTree, global_batch_size: int) -> PyTree:
        """Returns the final global arrays. Caller's thread only, and only if ``finish_computes``."""
        ...

    def element_spec(self, spec: RecordSpec, global_batch_size: int) -> PyTree:
        """Returns the shapes, dtypes and shardings of a batch."""
        ...

    def blocks(self, tree: PyTree, global_batch_size: int) -> dict[str, np.ndarray]:
        """Returns the blocks of a host batch that replicas on other hosts also hold, by leaf and global index."""
        ...


class _BatchKind(NamedTuple):
    """The properties that determine how a batch is assembled; equal for most batches."""

    plan: HostPlan
    treedef: TreeDef
    record_shapes: _Shapes | None
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]


class Assembler:
    """Assembles the host batches of one feed into global arrays.

    A host with no device in a leaf's sharding gets a ``jax.Array`` of the same global shape, dtype and sharding but
    no addressable shards. It can be passed to a jitted step and holds no values.

    Args:
      prefix: normalized shardings, a pytree prefix of the batch.
      device_put: how arrays are put on devices and whether 64-bit dtypes are kept; see :meth:`DevicePut.default`.
    """

    def __init__(self, prefix: PyTree, *, device_put: DevicePut | None = None) -> None:
        self._prefix = prefix
        self._device_put = device_put or DevicePut.default()
        self._x64 = self._device_put.x64
        self._kinds: dict[_BatchKind, list[LeafDevicePut]] = {}
        self._last: tuple[_BatchKind | None, list[LeafDevicePut]] = (None, [])
        self._last_shapes: tuple[PyTree, _Shapes] = (None, ())

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
        shapes = None if record_shapes is None else self._flat_shapes(record_shapes)
        kind = _BatchKind(plan, treedef, shapes, tuple([(leaf.shape, leaf.dtype) for leaf in leaves]))
        device_puts = self._last[1] if kind == self._last[0] else self._device_puts_of(kind, host_tree, leaves)
        with self._device_put.transfer():
            return treedef.unflatten([put(leaf) for put, leaf in zip(device_puts, leaves, strict=True)])

    def _flat_shapes(self, record_shapes: PyTree) -> _Shapes:
        if record_shapes is not self._last_shapes[0]:
            shapes = tuple(tuple(spec.shape) for spec in jax.tree.leaves(record_shapes))
            self._last_shapes = record_shapes, shapes
        return self._last_shapes[1]

    def _device_puts_of(self, kind: _BatchKind, host_tree: PyTree, leaves: list[np.ndarray]) -> list[LeafDevicePut]:
        device_puts = self._kinds.get(kind)
        if device_puts is None:
            device_puts = self._device_puts(host_tree, leaves, kind.plan, kind.record_shapes)
            if len(self._kinds) >= _MAX_CACHED_BATCH_KINDS:
                self._kinds.clear()
            self._kinds[kind] = device_puts
        self._last = (kind, device_puts)  # most batches match the last one, and comparing is cheaper than hashing
        return device_puts

    def _device_puts(
        self, host_tree: PyTree, leaves: list[np.ndarray], plan: HostPlan, record_shapes: _Shapes | None
    ) -> list[LeafDevicePut]:
        shardings = broadcast_shardings(self._prefix, host_tree)
        paths = _paths(host_tree)
        widths: Sequence[tuple[int, ...]] = (
            [leaf.shape[1:] for leaf in leaves] if record_shapes is None else record_shapes
        )
        if len(widths) != len(leaves):
            raise SourceError(f"the batch has {len(leaves)} leaves {paths}, but a record has {len(widths)}")
        device_puts: list[LeafDevicePut] = []
        for path, leaf, width, sharding in zip(paths, leaves, widths, shardings, strict=True):
            if leaf.ndim == 0 or leaf.shape[0] != plan.num_rows:
                raise SourceError(
                    f"leaf {path or '(the only one)'} has shape {leaf.shape} and dtype {leaf.dtype}; expected "
                    f"{plan.num_rows} rows first, the rows that host {plan.process_index} holds of a global batch of "
                    f"{plan.global_batch_size}"
                )
            narrow(leaf[:0], path, self._x64)  # rejects an unsupported dtype before any work
            leaf_plan = plan.leaf(sharding, (plan.global_batch_size, *width), path)
            local = _local_indices(leaf, leaf_plan, path)
            dtype = narrowed_dtype(leaf.dtype, self._x64)
            device_puts.append(LeafDevicePut(self._device_put, leaf_plan, leaf.shape, dtype, local, path))
        return device_puts

    def columns(self, record_shapes: PyTree, plan: HostPlan) -> dict[str, tuple[slice, ...]]:
        """Leaf path → the columns that this host holds; a source need not read the others."""
        shardings = broadcast_shardings(self._prefix, record_shapes)
        specs = jax.tree.leaves(record_shapes)
        return {
            path: plan.leaf(sharding, (plan.global_batch_size, *spec.shape), path).columns
            for path, spec, sharding in zip(_paths(record_shapes), specs, shardings, strict=True)
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
        return batch_spec(self._prefix, record_shapes, global_batch_size, self._x64)


def _paths(tree: PyTree) -> list[str]:
    return [path for path, _ in flatten_with_paths(tree)[0]]


def _local_indices(leaf: np.ndarray, plan: LeafPlan, path: str) -> list[tuple[slice, ...]]:
    if leaf.shape[1:] == plan.global_shape[1:]:
        return [(block.local[0], *block.index[1:]) for block in plan.blocks]
    if leaf.shape[1:] == plan.column_shape:
        return [block.local for block in plan.blocks]
    raise SourceError(
        f"leaf {path or '(the only one)'} has shape {leaf.shape} and dtype {leaf.dtype}; expected rows of shape "
        f"{plan.global_shape[1:]}, as in the first record, or {plan.column_shape}, this host's columns. All records "
        f"must have the same shape: pad or cut them in `decode`."
    )


class ShardedPlacer:
    """Each host reads the rows that its devices hold.

    Args:
      prefix: normalized shardings.
      process_index: this host.
      mask_key: key of the mask, a leaf of ``prefix`` that records do not have.
    """

    finish_computes = False

    def __init__(self, prefix: PyTree, process_index: int, mask_key: str | None = None) -> None:
        self.participants = participants(prefix)
        self._prefix = prefix
        self._process_index = process_index
        self._assembler = Assembler(prefix)
        self._of_records = Assembler(_without_mask(prefix, mask_key))
        self._plans: dict[int, HostPlan] = {}
        self._shapes: PyTree | None = None

    def plan(self, global_batch_size: int) -> HostPlan:
        """Returns this host's plan; cached per batch size."""
        plan = self._plans.get(global_batch_size)
        if plan is None:
            plan = self._plans[global_batch_size] = plan_host(self._prefix, global_batch_size, self._process_index)
        return plan

    def host_rows(self, spec_of: Callable[[], RecordSpec] | None) -> HostRows:
        """See :class:`Placer`."""
        cached: dict[int, ColumnSlices] = {}

        def columns(size: int) -> ColumnSlices | None:
            if spec_of is None:
                return None
            if size not in cached:
                self._shapes = spec_of().shapes()
                cached[size] = self._of_records.columns(self._shapes, self.plan(size))
            return cached[size]

        def rows(size: int) -> RecordIds:
            return self.plan(size).rows

        return HostRows(rows, columns)

    def put(self, tree: PyTree, global_batch_size: int) -> PyTree:
        """See :class:`Placer`."""
        return self._assembler(tree, self.plan(global_batch_size), self._record_shapes(tree))

    def global_batch_size_of(self, host_rows: int) -> int:
        """See :class:`Placer`.

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
        """See :class:`Placer`."""
        return math.lcm(*(_row_shards(sharding) for sharding in sharding_leaves(self._prefix)))

    def _record_shapes(self, tree: PyTree) -> PyTree | None:
        if self._shapes is None or (type(tree) is dict is type(self._shapes) and tree.keys() == self._shapes.keys()):
            return self._shapes  # the usual case
        if not isinstance(tree, Mapping) or not isinstance(self._shapes, Mapping):
            return self._shapes
        extra = {key: np.empty(()) for key in tree if key not in self._shapes}  # the mask is one scalar per row
        return {**self._shapes, **extra} if extra else self._shapes

    def finish(self, arrays: PyTree, global_batch_size: int) -> PyTree:
        """Returns ``arrays``, which are already in the target sharding."""
        del global_batch_size
        return arrays

    def element_spec(self, spec: RecordSpec, global_batch_size: int) -> PyTree:
        """See :class:`Placer`."""
        return self._assembler.element_spec(spec.shapes(), global_batch_size)

    def blocks(self, tree: PyTree, global_batch_size: int) -> dict[str, np.ndarray]:
        """See :class:`Placer`."""
        plan = self.plan(global_batch_size)
        blocks: dict[str, np.ndarray] = {}
        paths = flatten_with_paths(tree)[0]
        full = {path: spec.shape for path, spec in flatten_with_paths(self._shapes)[0]}  # of leaves read in columns
        for (path, leaf), sharding in zip(paths, broadcast_shardings(self._prefix, tree), strict=True):
            name = path or "(the record)"
            leaf_plan = plan.leaf(sharding, (global_batch_size, *full.get(path, leaf.shape[1:])), name)
            whole = leaf.shape[1:] == leaf_plan.global_shape[1:]
            for block in leaf_plan.blocks:
                where = ", ".join(f"{part.start or 0}:{part.stop}" for part in block.index)
                index = (block.local[0], *block.index[1:]) if whole else block.local
                blocks[f"leaf {name}[{where}]"] = leaf[index]
        return blocks


def _row_shards(sharding: NamedSharding) -> int:
    entry = sharding.spec[0] if len(sharding.spec) else None
    return math.prod(sharding.mesh.shape[axis] for axis in axes_of(entry))


def _masked_prefix(prefix: PyTree, mask_key: str | None) -> PyTree:
    """``prefix`` with a sharding for the mask, bool ``[global_batch_size]``, sharded like the rows."""
    if mask_key is None or not isinstance(prefix, Mapping) or mask_key in prefix:
        return prefix
    return {**prefix, mask_key: cut_spec(sharding_leaves(prefix)[0], 1)}


def _without_mask(prefix: PyTree, mask_key: str | None) -> PyTree:
    """``prefix`` for the source's records, which have no mask."""
    if mask_key is None or not isinstance(prefix, Mapping):
        return prefix
    return {key: sharding for key, sharding in prefix.items() if key != mask_key}


def make_placer(sharding: PyTree, settings: FeedSettings) -> Placer:
    """Returns the placer for the feed's ``load=`` setting.

    Raises:
      SettingsError: ``sharding`` or ``load`` is invalid.
      PlanError: a batch size is not divisible over the mesh.
    """
    prefix = _masked_prefix(normalize_sharding(sharding), settings.mask_key)
    here = coordination.process_index()
    if settings.load == "sharded":
        placer: Placer = ShardedPlacer(prefix, here, settings.mask_key)
    else:
        placer = LoadOncePlacer(prefix, settings.load, here)
    # Check all sizes now: a bad size would otherwise fail only at the step where the schedule switches to it.
    if settings.schedule is not None:
        check = ShardedPlacer(prefix, here) if not isinstance(placer, ShardedPlacer) else placer
        for size in settings.schedule.sizes:
            check.plan(size)  # raises if the mesh does not divide this size
    return placer
