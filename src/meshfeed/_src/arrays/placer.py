"""Places host batches on the mesh: each host its own rows (``load="sharded"``), or each row by one host, resharded.

Labels the blocks of a host batch by their index in the global batch, to compare replicas between hosts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshfeed._src.arrays.assemble import Assembler
from meshfeed._src.arrays.load_once import Loader, load_participants
from meshfeed._src.base import coordination
from meshfeed._src.base.errors import PlanError
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.types import ColumnSlices, PyTree, RecordIds
from meshfeed._src.plan.plan import (
    HostPlan,
    HostRows,
    broadcast_shardings,
    cut_spec,
    normalize_sharding,
    participants,
    plan_host,
)
from meshfeed._src.plan.shardings import axes_of, sharding_leaves
from meshfeed._src.reading.host_batch import RecordSpec


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
        """Returns the final global arrays. Caller's thread only."""
        ...

    def element_spec(self, spec: RecordSpec, global_batch_size: int) -> PyTree:
        """Returns the shapes, dtypes and shardings of a batch."""
        ...

    def blocks(self, tree: PyTree, global_batch_size: int) -> dict[str, np.ndarray]:
        """Returns the blocks of a host batch that replicas on other hosts also hold, by leaf and global index."""
        ...


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
        self._of_records = Assembler(_without_mask(prefix, mask_key))
        self.prefix = prefix
        self._process_index = process_index
        self._assembler = Assembler(prefix)
        self._plans: dict[int, HostPlan] = {}
        self._shapes: PyTree | None = None

    def plan(self, global_batch_size: int) -> HostPlan:
        """Returns this host's plan; cached per batch size."""
        plan = self._plans.get(global_batch_size)
        if plan is None:
            plan = self._plans[global_batch_size] = plan_host(self.prefix, global_batch_size, self._process_index)
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
                f"the mesh; give a multiple of {mine} rows. If this is a single record, wrap what makes the records in "
                "meshfeed.sources.Stream."
            )
        return host_rows // mine * shards

    def smallest_batch_size(self) -> int:
        """See :class:`Placer`."""
        return math.lcm(*(_row_shards(sharding) for sharding in sharding_leaves(self.prefix)))

    def _record_shapes(self, tree: PyTree) -> PyTree | None:
        if self._shapes is None or not isinstance(tree, Mapping) or not isinstance(self._shapes, Mapping):
            return self._shapes
        extra = {key: np.empty(()) for key in tree if key not in self._shapes}  # the mask is one scalar per row
        return {**self._shapes, **extra} if extra else self._shapes

    def _record_shape(self, path: tuple[object, ...], leaf: np.ndarray) -> tuple[int, ...]:
        """Full shape of a record's leaf; the host array ``leaf`` may hold only some of its columns."""
        for key_path, spec in jax.tree_util.tree_flatten_with_path(self._shapes)[0]:
            if key_path == path:
                return spec.shape
        return leaf.shape[1:]

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
        paths = jax.tree_util.tree_flatten_with_path(tree)[0]
        for (path, leaf), sharding in zip(paths, broadcast_shardings(self.prefix, tree), strict=True):
            name = jax.tree_util.keystr(path) or "(the record)"
            leaf_plan = plan.leaf(sharding, (global_batch_size, *self._record_shape(path, leaf)), name)
            whole = leaf.shape[1:] == leaf_plan.global_shape[1:]
            for block in leaf_plan.blocks:
                where = ", ".join(f"{part.start or 0}:{part.stop}" for part in block.index)
                index = (block.local[0], *block.index[1:]) if whole else block.local
                blocks[f"leaf {name}[{where}]"] = leaf[index]
        return blocks


def _row_shards(sharding: NamedSharding) -> int:
    entry = sharding.spec[0] if len(sharding.spec) else None
    return math.prod(sharding.mesh.shape[axis] for axis in axes_of(entry))


class LoadOncePlacer:
    """One host reads each row; rows are resharded on device as integer bits.

    Args:
      prefix: normalized shardings.
      load: ``"once"`` or process indices.
      process_index: this host.
    """

    finish_computes = True

    def __init__(self, prefix: PyTree, load: Any, process_index: int) -> None:
        self.participants = load_participants(prefix, load)
        self._prefix = prefix
        self._loader = Loader(prefix, load, process_index)
        self._specs = Assembler(prefix)

    def host_rows(self, spec_of: Callable[[], RecordSpec] | None) -> HostRows:
        """See :class:`Placer`; always whole records."""
        del spec_of

        def columns(size: int) -> None:
            del size

        return HostRows(lambda size: self._loader.plan(size).host_rows, columns)

    def put(self, tree: PyTree, global_batch_size: int) -> PyTree:
        """See :class:`Placer`."""
        return self._loader.plan(global_batch_size).put(tree)

    def finish(self, arrays: PyTree, global_batch_size: int) -> PyTree:
        """Reshards. A device computation, so on the caller's thread only."""
        return self._loader.plan(global_batch_size).reshard(arrays)

    def global_batch_size_of(self, host_rows: int) -> int:
        """Always raises: host batches require ``load="sharded"``."""
        raise PlanError(f"a host batch of {host_rows} rows needs load='sharded'.")

    def smallest_batch_size(self) -> int:
        """Always raises: host batches require ``load="sharded"``."""
        raise PlanError("host batches need load='sharded'.")

    def element_spec(self, spec: RecordSpec, global_batch_size: int) -> PyTree:
        """See :class:`Placer`."""
        return self._specs.element_spec(spec.shapes(), global_batch_size)

    def blocks(self, tree: PyTree, global_batch_size: int) -> dict[str, np.ndarray]:
        """Returns nothing: only one host reads each row."""
        del tree, global_batch_size
        return {}


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
    # Check all sizes now: otherwise a bad size fails at the step where the schedule switches to it.
    if settings.schedule is not None:
        check = ShardedPlacer(prefix, here) if not isinstance(placer, ShardedPlacer) else placer
        for size in settings.schedule.sizes:
            check.plan(size)  # raises if the mesh does not divide this size
    return placer
