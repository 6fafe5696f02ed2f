"""Places host batches on the mesh as global ``jax.Array``: what a feed needs from the two ways to do it.

With ``load="sharded"`` each host reads the rows that its devices hold (``sharded.py``), which needs no device computation and
no cross-host communication. With ``load="once"`` (``load_once.py``), one host reads each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from meshfeed._src.arrays.load_once import LoadOncePlacer
from meshfeed._src.arrays.sharded import ShardedPlacer
from meshfeed._src.base import coordination
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.types import PyTree
from meshfeed._src.plan.plan import HostRows, cut_spec, normalize_sharding, sharding_leaves
from meshfeed._src.reading.stacking import RecordSpec


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
