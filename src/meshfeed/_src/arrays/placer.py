"""Places host batches on the mesh as global ``jax.Array``, following the host's plan.

With ``load="sharded"`` each host reads the rows that its devices hold (:class:`ShardedPlacer`), which needs no device
computation and no cross-host communication. With ``load="once"`` (``load_once.py``), one host reads each row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from jax.sharding import NamedSharding

from meshfeed._src.arrays.device_put import Assembler, DevicePut, local_indices
from meshfeed._src.arrays.dtypes import batch_spec, check_values
from meshfeed._src.arrays.load_once import LoadOncePlacer
from meshfeed._src.base import coordination
from meshfeed._src.base.errors import PlanError
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.trees import flatten_with_paths
from meshfeed._src.base.types import ColumnSlices, PyTree
from meshfeed._src.plan.plan import (
    HostPlan,
    HostRows,
    axes_of,
    cut_spec,
    describe_layout,
    leaves_with_shardings,
    normalize_sharding,
    participants,
    plan_host,
    sharding_leaves,
)
from meshfeed._src.reading.stacking import RecordSpec


class Placer(Protocol):
    """Host batch → global arrays, in two stages: ``put`` on any thread, ``finish`` on the caller's thread."""

    participants: tuple[int, ...]
    """Process indices with a device in the sharding."""
    layout: str
    """What hosts must have in common of the sharding; see :func:`meshfeed._src.plan.plan.describe_layout`."""
    finish_computes: bool
    """Whether ``finish`` is a device computation that all hosts must run exactly once per batch."""
    x64: bool
    """Whether 64-bit dtypes are kept (``jax_enable_x64``), without which hosts would hold blocks of other dtypes."""

    def host_rows(self, spec_of: Callable[[], RecordSpec] | None) -> HostRows:
        """Rows and columns that this host reads; ``spec_of`` is None if the source reads only whole records."""
        ...

    def global_batch_size_of(self, host_rows: int) -> int:
        """Returns the global batch size for which this host holds ``host_rows`` rows."""
        ...

    def smallest_batch_size(self) -> int:
        """Returns the smallest global batch size that the row shards divide; all others are multiples of it."""
        ...

    def check(self, tree: PyTree) -> None:
        """Raises SourceError if a value of a host batch cannot be put; before other hosts are told that it is read."""
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


class ShardedPlacer:
    """Each host reads the rows that its devices hold.

    ``plan`` maps a global batch size to this host's plan; cached. ``put`` maps a host batch and its size to global arrays.
    ``mask_key`` is the key of the mask, a leaf of ``prefix`` that records do not have.
    """

    finish_computes = False

    def __init__(
        self, prefix: PyTree, process_index: int, mask_key: str | None = None, *, device_put: DevicePut | None = None
    ) -> None:
        self.participants, self.layout = participants(prefix), describe_layout(prefix)
        self.plan: Callable[[int], HostPlan] = functools.cache(lambda size: plan_host(prefix, size, process_index))
        self.put = Assembler(prefix, self.plan, device_put=device_put)
        self.x64 = self.put.x64
        self._prefix = prefix
        self._mask_key = mask_key

    def host_rows(self, spec_of: Callable[[], RecordSpec] | None) -> HostRows:
        """See :class:`Placer`."""

        @functools.cache
        def columns(size: int) -> ColumnSlices | None:
            if spec_of is None:
                return None
            shapes = spec_of().shapes()
            self.put.record_shapes = {path: spec.shape for path, spec in flatten_with_paths(shapes)[0]}
            return columns_of(_without_mask(self._prefix, self._mask_key), shapes, self.plan(size))

        return HostRows(lambda size: self.plan(size).rows, columns)

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

    def check(self, tree: PyTree) -> None:
        """See :class:`Placer`."""
        check_values(tree, self.put.x64)

    def finish(self, arrays: PyTree, global_batch_size: int) -> PyTree:
        """Returns ``arrays``, which are already in the target sharding."""
        del global_batch_size
        return arrays

    def element_spec(self, spec: RecordSpec, global_batch_size: int) -> PyTree:
        """See :class:`Placer`."""
        return batch_spec(self._prefix, spec.shapes(), global_batch_size, self.put.x64)

    def blocks(self, tree: PyTree, global_batch_size: int) -> dict[str, np.ndarray]:
        """See :class:`Placer`."""
        plan = self.plan(global_batch_size)
        blocks: dict[str, np.ndarray] = {}  # replicas on this host have one label, so they are digested once
        shapes = self.put.record_shapes or {}
        for path, leaf, sharding in leaves_with_shardings(self._prefix, tree):
            name = path or "(the record)"
            width = shapes[path] if path in shapes else leaf.shape[1:]
            leaf_plan = plan.leaf(sharding, (global_batch_size, *width), name)
            for block, index in zip(leaf_plan.blocks, local_indices(leaf, leaf_plan, path), strict=True):
                where = ", ".join(f"{part.start or 0}:{part.stop}" for part in block.index)
                blocks[f"leaf {name}[{where}]"] = leaf[index]
        return blocks


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


def _masked_prefix(prefix: PyTree, mask_key: str | None) -> PyTree:
    """``prefix`` with a sharding for the mask, bool ``[global_batch_size]``, sharded like the rows."""
    if mask_key is None or not isinstance(prefix, Mapping) or mask_key in prefix:
        return prefix
    return {**prefix, mask_key: cut_spec(sharding_leaves(prefix)[0], 1)}


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
        # load="once" too ends in the shardings, so these must divide the sizes.
        check = ShardedPlacer(prefix, here) if not isinstance(placer, ShardedPlacer) else placer
        for size in settings.schedule.sizes:
            check.plan(size)  # raises if the mesh does not divide this size
    return placer
