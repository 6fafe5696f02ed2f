"""The plan of a restore, the same on every process: what is read of each leaf, how, and what the values become.

:mod:`match` finds what each leaf of the requested tree is in storage. :func:`choose_ways` then decides how each is read,
from shapes, shardings and stored chunks alone.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from meshfeed._src.base.coordination import process_count
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.checkpoint.casts import may_overflow
from meshfeed._src.checkpoint.layout import (
    GOOD_READS,
    AnyMesh,
    LoadPlan,
    ReadCost,
    best_plan,
    devices_of_a_process,
    free_axes,
    read_cost,
    replica_plan,
)
from meshfeed._src.checkpoint.leaves import CARRIERS, Leaf, SavedLeaf
from meshfeed._src.checkpoint.options import RestoreOptions
from meshfeed._src.checkpoint.stored import StoredArrays

Restored: TypeAlias = jax.Array | NDArray[np.generic]
"""The values of a leaf: a ``jax.Array`` if a sharding was requested, else a numpy array."""

Way: TypeAlias = Literal["pieces", "packed", "remote"]
"""How a leaf is read: in the pieces of its load plan, each unit by one host that sends it to all, or by Orbax's workers."""

_SMALL_BYTES = 256 << 10  # a leaf up to this size is sent packed: its own collective costs more than it saves
# Measured on 4 hosts: 64 MiB takes 18 % longer, 8 MiB 8 %. Whole shards need zeros on every device and are slower still.
_BROADCAST_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class LeafRead:
    """What is read of one leaf, and how."""

    leaf: SavedLeaf
    dtype: np.dtype[np.generic]  # of the result
    # Sharding and shape of the result in stored form (key data for PRNG keys), and the pieces in which it is read. If the
    # shape differs from the stored one, the array is truncated or padded with zeros. Without a sharding, the result is a
    # numpy array on every process.
    load: LoadPlan
    any_cast: bool = False  # let values outside the range of dtype change instead of raising an error
    way: Way = "pieces"  # chosen by choose_ways

    @property
    def must_fit(self) -> bool:
        """Whether the values must be checked before they are cast."""
        return not self.any_cast and may_overflow(self.leaf.stored_dtype, self.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the stored leaf in bytes."""
        return math.prod(self.leaf.stored_shape) * self.leaf.stored_dtype.itemsize

    @property
    def as_orbax(self) -> bool:
        """Whether Orbax stores and casts the leaf as we do, so remote workers can restore it; most others are small."""
        ours = self.leaf.impl is not None or self.leaf.encoding in CARRIERS or self.must_fit
        return self.load.sharding is not None and not ours

    def cost(self, load: LoadPlan) -> ReadCost:
        """Returns the bytes that each process reads under a load plan."""
        return read_cost(load, self.leaf.units, self.leaf.stored_dtype.itemsize)

    def block_bytes(self, limit: int | None) -> int | None:
        """Returns the bytes in flight while it is gathered in blocks, or None if it is gathered whole.

        It is gathered in blocks because of the limit, or because broadcasting it whole thrashes memory.
        """
        most = _BROADCAST_BYTES if self.load.broadcast else sys.maxsize
        most = most if limit is None else min(most, limit // 2)
        whole = self.load.direct or not self.load.shape or self.extra_bytes() <= most
        return None if whole else most

    def extra_bytes(self) -> int:
        """Returns this process's memory beyond the result while it is gathered; the same bound on every process."""
        sharding, itemsize = self.load.sharding, self.dtype.itemsize
        local = devices_of_a_process(sharding)
        if sharding is None or self.load.direct:
            return self.nbytes * local // (1 if sharding is None else len(sharding.device_set))
        return local * itemsize * (math.prod(self.load.piece_shape) + math.prod(self.load.shard_shape))


Convert: TypeAlias = Callable[[Any], Leaf]
"""One conversion on the way from the values read to the leaf."""


class PlannedLeaf(NamedTuple):
    """How a leaf of the result is made: from the values that ``read`` brings, or else from ``value``, by conversions."""

    read: LeafRead | None = None
    value: Leaf = None
    conversions: tuple[Convert, ...] = ()  # in the order in which they are applied

    def followed_by(self, *conversions: Convert) -> PlannedLeaf:
        """Returns the plan with further conversions after the others."""
        return self._replace(conversions=(*self.conversions, *conversions))

    def leaf(self, restored: Mapping[LeafRead, Restored]) -> Leaf:
        """Returns the leaf, given the values of all reads."""
        leaf = self.value if self.read is None else restored[self.read]
        for convert in self.conversions:
            leaf = convert(leaf)
        return leaf


class RestorePlan(NamedTuple):
    """A restore of one item of arrays: its leaves in the order in which ``structure`` takes them."""

    stored: StoredArrays
    leaves: Sequence[PlannedLeaf]
    structure: Any  # a PyTreeDef

    @property
    def reads(self) -> list[LeafRead]:
        """What is read, in the order of the leaves."""
        return [leaf.read for leaf in self.leaves if leaf.read is not None]

    def with_ways(self, options: RestoreOptions, *, remote: bool = False) -> RestorePlan:
        """Returns the plan with the way of each read chosen; see :func:`choose_ways`."""
        chosen = iter(choose_ways(self.reads, options, remote=remote))
        return self._replace(
            leaves=[leaf if leaf.read is None else leaf._replace(read=next(chosen)) for leaf in self.leaves]
        )


def choose_ways(reads: Sequence[LeafRead], options: RestoreOptions, *, remote: bool = False) -> list[LeafRead]:
    """Returns reads that are still direct, in their order, with the way of each and the pieces in which it is read.

    With ``remote``, Orbax's workers restore what they can.
    """
    several = process_count() > 1 and options.restore != "every_host"
    here = [read for read in reads if not (remote and read.as_orbax)]
    axes = _replica_axes(here, options) if options.restore == "single_replica" else {}

    def chosen(read: LeafRead) -> LeafRead:
        sharding, shape = read.load.sharding, read.load.shape
        if remote and read.as_orbax:
            return dataclasses.replace(read, way="remote")
        if several and (sharding is None or read.nbytes <= _SMALL_BYTES):
            return dataclasses.replace(read, way="packed")
        if sharding is not None and options.restore == "single_replica":
            axis = axes.get(sharding.mesh) if isinstance(sharding, NamedSharding) else None
            return dataclasses.replace(read, load=replica_plan(sharding, shape, axis, options.primary_replica))
        if sharding is None or not several:
            return read
        load, cost = best_plan(sharding, shape, read.leaf.units, read.leaf.stored_dtype.itemsize)
        if cost.ratio > GOOD_READS:  # the chunks fit no cut of this sharding
            return dataclasses.replace(read, way="packed")
        return dataclasses.replace(read, load=load)

    return [chosen(read) for read in reads]


def _replica_axes(reads: Sequence[LeafRead], options: RestoreOptions) -> dict[AnyMesh, str | None]:
    """Returns the axis of replicas of each mesh: the one named, or the one with the fewest bytes to read."""
    by_mesh: dict[AnyMesh, list[LeafRead]] = collections.defaultdict(list)
    for read in reads:
        if isinstance(read.load.sharding, NamedSharding):
            by_mesh[read.load.sharding.mesh].append(read)
    axes = {mesh: _replica_axis(mesh, group, options) for mesh, group in by_mesh.items()}
    wanted, replica = options.replica_axis, options.primary_replica
    sizes = [(mesh.shape[axis], axis) for mesh, axis in axes.items() if axis is not None]
    if wanted is not None and axes and not sizes:
        names = sorted({name for mesh in axes for name in mesh.axis_names})
        raise SettingsError(
            f"replica_axis={wanted!r}: the meshes have the axes {names}. Pass one of them.", setting="replica_axis"
        )
    smallest, axis = min(sizes, default=(replica + 1, None))
    if replica >= smallest:
        text = f"primary_replica={replica}: mesh axis {axis!r} has size {smallest}"
        raise SettingsError(text, setting="primary_replica")
    return axes


def _replica_axis(mesh: AnyMesh, reads: Sequence[LeafRead], options: RestoreOptions) -> str | None:
    wanted, names, replica = options.replica_axis, mesh.axis_names, options.primary_replica
    if isinstance(wanted, int):
        return names[wanted] if -len(names) <= wanted < len(names) else None
    if wanted is not None:
        return wanted if wanted in names else None
    free = {name for read in reads for name in free_axes(read.load.sharding)}

    def cost(name: str) -> float:
        if replica >= mesh.shape[name]:
            return math.inf
        loads = (replica_plan(read.load.sharding, read.load.shape, name, replica) for read in reads)
        return sum(read.cost(load).total for read, load in zip(reads, loads, strict=True))

    return min(sorted(free), key=cost, default=None)
