"""Derives from shardings what one host reads, and which block of it goes to which device.

Pure: does not access devices, so it can plan for thousands of fake hosts (see ``topology.py``). The device of each
block comes only from ``sharding.devices_indices_map``; ``sharding.addressable_devices`` is a set whose order changes
between runs.

The plan has two parts. :class:`HostPlan` covers rows only, so a feed can start reading before record shapes are known.
:class:`LeafPlan` adds the columns once they are.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshfeed._src.base.errors import PlanError, SettingsError, SourceError, shorten
from meshfeed._src.base.trees import flatten, flatten_with_paths
from meshfeed._src.base.types import ColumnSlices, MeshDevice, PyTree, RecordIds

RowRange = tuple[int, int]
"""First row, and one past the last row."""
_LISTED_DEVICES, _SHOWN_CHARACTERS = 8, 120  # in a message
_TAKES = "Pass a NamedSharding, a Mesh (rows over all its axes), or a pytree of NamedShardings"


@dataclass(frozen=True)
class Block:
    """The block of one leaf on one device.

    Attributes:
      device: the device.
      index: the block's slices of the global array, one per dimension.
      local: the block's slices of the host array, which holds the plan's rows and the leaf's columns.
    """

    device: MeshDevice
    index: tuple[slice, ...]
    local: tuple[slice, ...]


@dataclass(frozen=True)
class LeafPlan:
    """The part of one leaf that one host holds.

    The host array has shape ``[num_rows, *column_shape]``.

    Attributes:
      sharding: the leaf's sharding, with a spec no longer than the leaf's rank.
      global_shape: ``(global_batch_size, ...)``.
      columns: for each dimension after the first, the smallest slice that covers all blocks of this host; empty slices
        on a host that holds nothing.
      blocks: one per device of this host in the sharding, in the sharding's device order. Devices with the same data
        have equal slices.
    """

    sharding: NamedSharding
    global_shape: tuple[int, ...]
    columns: tuple[slice, ...]
    blocks: tuple[Block, ...]

    @property
    def column_shape(self) -> tuple[int, ...]:
        """Sizes of the host array's dimensions after the first."""
        return tuple(box.stop - box.start for box in self.columns)


@dataclass(frozen=True)
class HostPlan:
    """The rows of every global batch that one host holds.

    Attributes:
      process_index: the host.
      global_batch_size: rows of a global batch, over all hosts.
      row_ranges: ``(first row, one past the last row)``, sorted and separated by gaps; empty on a host without a device
        in the shardings. The host array holds these rows in this order.
    """

    process_index: int
    global_batch_size: int
    row_ranges: tuple[RowRange, ...]
    # Feeds plan the same few leaves for every batch.
    _leaves: dict[tuple[NamedSharding, tuple[int, ...]], LeafPlan] = field(
        default_factory=dict["tuple[NamedSharding, tuple[int, ...]]", LeafPlan], init=False, repr=False, compare=False
    )

    @functools.cached_property
    def num_rows(self) -> int:
        """Number of rows in the host array."""
        return sum(stop - start for start, stop in self.row_ranges)

    @functools.cached_property
    def rows(self) -> RecordIds:
        """Global rows held by this host, ascending, int64[num_rows]; read-only."""
        parts = [np.arange(start, stop, dtype=np.int64) for start, stop in self.row_ranges]
        rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
        rows.flags.writeable = False
        return rows

    def local_rows(self, start: int, stop: int) -> slice:
        """Returns the slice of the host array that holds the global rows ``start`` to ``stop``.

        Raises:
          PlanError: this host does not hold all of these rows.
        """
        number = bisect.bisect_right(self.row_ranges, start, key=lambda row_range: row_range[0]) - 1
        if number < 0 or stop > self.row_ranges[number][1]:
            raise PlanError(
                f"host {self.process_index} holds the rows {self.row_ranges}, not {start} to {stop}: the plan was made "
                f"from different shardings. Make it from the shardings of all leaves."
            )
        # By ranges rather than rows: a host may hold many rows, but they form few ranges.
        offset = sum(last - first for first, last in self.row_ranges[:number])
        offset += start - self.row_ranges[number][0]
        return slice(offset, offset + stop - start)

    def leaf(self, sharding: NamedSharding, global_shape: tuple[int, ...], path: str = "") -> LeafPlan:
        """Returns the plan of a leaf, cached per sharding and shape.

        Args:
          sharding: the leaf's sharding; a spec longer than the leaf's rank is truncated.
          global_shape: ``(global_batch_size, ...)``.
          path: the leaf's path, for messages.

        Raises:
          PlanError: the shape does not start with the batch size, or a dimension is not divisible by its mesh axes.
        """
        key = (sharding, global_shape)
        plan = self._leaves.get(key)
        if plan is None:
            plan = self._leaves[key] = self._plan_leaf(cut_spec(sharding, len(global_shape)), global_shape, path)
        return plan

    def _plan_leaf(self, sharding: NamedSharding, global_shape: tuple[int, ...], path: str) -> LeafPlan:
        if not global_shape or global_shape[0] != self.global_batch_size:
            raise PlanError(
                f"leaf {path or '(the only one)'} has the global shape {global_shape}; expected "
                f"({self.global_batch_size}, ...), rows first"
            )
        check_shape(global_shape, sharding, path)
        # The map may contain slice(None); later arithmetic needs explicit bounds.
        indices = [
            (device, tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, global_shape, strict=True)))
            for device, index in device_indices(sharding, global_shape).items()
            if device.process_index == self.process_index
        ]
        columns = tuple(_cover([index[dimension] for _, index in indices]) for dimension in range(1, len(global_shape)))
        blocks = tuple(Block(device, index, self._local(index, columns)) for device, index in indices)
        return LeafPlan(sharding, global_shape, columns, blocks)

    def _local(self, index: tuple[slice, ...], columns: tuple[slice, ...]) -> tuple[slice, ...]:
        rows = self.local_rows(index[0].start, index[0].stop)
        return rows, *(
            slice(part.start - box.start, part.stop - box.start) for part, box in zip(index[1:], columns, strict=True)
        )


def _cover(parts: Sequence[slice]) -> slice:
    """Returns the smallest slice that contains all parts; an empty one if there are none."""
    return slice(min((part.start for part in parts), default=0), max((part.stop for part in parts), default=0))


def merge_ranges(ranges: list[RowRange]) -> tuple[RowRange, ...]:
    """Returns the union of row ranges, sorted, with adjacent ranges joined."""
    merged: list[RowRange] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif stop > start:
            merged.append((start, stop))
    return tuple(merged)


def plan_host(prefix: PyTree, global_batch_size: int, process_index: int) -> HostPlan:
    """Plans the rows of a global batch that a host holds, over all shardings of ``prefix``.

    Args:
      prefix: normalized shardings (:func:`normalize_sharding`), or one NamedSharding.
      global_batch_size: rows of a global batch.
      process_index: the host. A host without a device in the shardings gets a plan without rows.

    Raises:
      PlanError: the batch size is not divisible by the mesh axes of a sharding.
    """
    # Truncated to the rows, many leaves share one sharding.
    shardings = list(dict.fromkeys(cut_spec(sharding, 1) for sharding in sharding_leaves(prefix)))
    over = [axes_of(sharding.spec[0]) if len(sharding.spec) else () for sharding in shardings]
    parts = [
        math.prod(sharding.mesh.shape[axis] for axis in axes) for sharding, axes in zip(shardings, over, strict=True)
    ]
    # The lcm lets the error suggest a size that fits all shardings, not only the first that fails.
    for sharding, axes in zip(shardings, over, strict=True):
        check_divisible("the global batch", global_batch_size, axes, sharding.mesh.shape, multiple=math.lcm(*parts))
    ranges: list[RowRange] = []
    for sharding in shardings:
        index_of = device_indices(sharding, (global_batch_size,))
        # A set, because replicated devices hold the same rows.
        held = {
            index[0].indices(global_batch_size)[:2] for d, index in index_of.items() if d.process_index == process_index
        }
        ranges.extend(held)
    return HostPlan(process_index, global_batch_size, merge_ranges(ranges))


@dataclass(frozen=True)
class HostRows:
    """The rows and columns that this host reads, for any batch size.

    Attributes:
      rows: global batch size → rows, int64, ascending.
      columns: global batch size → part of each leaf, or None for whole leaves.
    """

    rows: Callable[[int], RecordIds]
    columns: Callable[[int], ColumnSlices | None]


def normalize_sharding(sharding: PyTree) -> PyTree:
    """Returns the same pytree with a NamedSharding at each leaf.

    Args:
      sharding: a NamedSharding, a Mesh (rows are divided over all its axes), or a pytree of these that is a prefix of
        the batch.

    Raises:
      SettingsError: ``sharding`` is something else, or does not define a layout (an abstract mesh, an unconstrained or
        unreduced spec).
      PlanError: a mesh has no devices.
    """
    # A NamedSharding and a Mesh are leaves: JAX registers neither as a pytree.
    paths, treedef = flatten_with_paths(sharding)
    if not paths:
        raise SettingsError(f"sharding={sharding!r} holds no sharding. {_TAKES}.", setting="sharding")
    return treedef.unflatten([_normalize_leaf(leaf, path) for path, leaf in paths])


def _normalize_leaf(leaf: object, path: str) -> NamedSharding:
    where = f"sharding{path}"
    if isinstance(leaf, Mesh):
        leaf = NamedSharding(leaf, PartitionSpec(leaf.axis_names))
    if isinstance(leaf, PartitionSpec):
        raise SettingsError(
            f"{where} is a PartitionSpec, which names no devices: {leaf}. Pass NamedSharding(mesh, spec).",
            setting="sharding",
        )
    if not isinstance(leaf, NamedSharding):
        shown = shorten(repr(leaf), _SHOWN_CHARACTERS)
        raise SettingsError(f"{where} is of type {type(leaf).__name__}: {shown}. {_TAKES}.", setting="sharding")
    if isinstance(leaf.mesh, AbstractMesh):
        raise SettingsError(f"{where} is over an AbstractMesh, which has no devices. Pass a Mesh.", setting="sharding")
    if not leaf.mesh.size:
        raise PlanError(
            f"{where} is over a mesh without devices, of shape {dict(leaf.mesh.shape)}. Each axis must have a size of "
            "at least 1."
        )
    # Checked first, because a spec with either set cannot be iterated.
    reduction = getattr(leaf.spec, "unreduced", None) or getattr(leaf.spec, "reduced", None)
    if reduction or any(entry is PartitionSpec.UNCONSTRAINED for entry in leaf.spec):
        raise SettingsError(
            f"{where} does not define a layout: {leaf.spec}. Every entry must be None, an axis, or a tuple of axes.",
            setting="sharding",
        )
    return leaf


def sharding_leaves(prefix: PyTree) -> list[NamedSharding]:
    """The distinct shardings of a normalized prefix, in the order of its leaves."""
    return list(dict.fromkeys(jax.tree.leaves(prefix)))


def participants(prefix: PyTree) -> tuple[int, ...]:
    """The sorted process indices of all devices in the shardings."""
    # Leaves usually share one mesh, which may have thousands of devices.
    meshes = dict.fromkeys(sharding.mesh for sharding in sharding_leaves(prefix))
    return tuple(sorted({device.process_index for mesh in meshes for device in np.asarray(mesh.devices).flat}))


def describe_layout(prefix: PyTree) -> str:
    """Describes shardings: equal texts divide batches over the same devices in the same order."""
    over = functools.cache(_describe_mesh)  # leaves usually share one mesh, which may have thousands of devices
    found = (f"P({_describe_spec(sharding.spec)}) over {over(sharding.mesh)}" for sharding in sharding_leaves(prefix))
    return "; ".join(dict.fromkeys(found))


def _describe_spec(spec: PartitionSpec) -> str:
    entries = ["+".join(axes_of(entry)) or "None" for entry in spec]
    while entries and entries[-1] == "None":  # says nothing
        entries.pop()
    return ", ".join(entries)


def _describe_mesh(mesh: Mesh) -> str:
    ids = [str(device.id) for device in np.asarray(mesh.devices).flat]
    devices = ", ".join(ids)
    if len(ids) > _LISTED_DEVICES:
        digest = hashlib.sha256(devices.encode()).hexdigest()[:8]
        devices = f"{', '.join(ids[:_LISTED_DEVICES])}, … (of {len(ids):,}, digest {digest})"
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{axes} of devices {devices}"


def cut_spec(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """Returns the sharding for a leaf of rank ``ndim``: truncates the spec to the rank.

    One sharding can thus apply to both tokens ``[rows, positions]`` and lengths ``[rows]``. The leaf is replicated over
    the dropped axes.
    """
    if len(sharding.spec) <= ndim:
        return sharding
    # update() keeps the memory kind, which a new NamedSharding would not.
    cut: NamedSharding = cast("Any", sharding).update(spec=PartitionSpec(*tuple(sharding.spec)[:ndim]))
    return cut


def broadcast_shardings(prefix: PyTree, tree: PyTree) -> list[NamedSharding]:
    """Returns one sharding per leaf of ``tree``, in the order of ``jax.tree.leaves(tree)``.

    Args:
      prefix: normalized shardings; each leaf applies to the entire corresponding subtree.
      tree: a batch, or any pytree of its structure.

    Raises:
      SourceError: ``prefix`` is not a prefix of ``tree``; names the first difference.
    """
    leaves: list[NamedSharding] = []

    def apply(sharding: NamedSharding, part: PyTree) -> None:
        leaves.extend([sharding] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(apply, prefix, tree)
    except (ValueError, TypeError, KeyError) as error:
        where = _first_difference(prefix, tree, "") or str(error)
        raise SourceError(
            f"the pytree of shardings is not a prefix of the batch: {where}. Received a batch of structure "
            f"{flatten(tree)[1]}; shardings {flatten(prefix)[1]}. Pass one sharding for each of those "
            f"parts, or one NamedSharding for the whole batch."
        ) from error
    return leaves


def leaves_with_shardings(prefix: PyTree, tree: PyTree) -> list[tuple[str, Any, NamedSharding]]:
    """Returns ``(path, leaf, sharding)`` of each leaf of ``tree``; see :func:`broadcast_shardings`."""
    pairs = flatten_with_paths(tree)[0]
    return [(*pair, sharding) for pair, sharding in zip(pairs, broadcast_shardings(prefix, tree), strict=True)]


def _children(node: PyTree) -> dict[str, PyTree]:
    """Direct children by key path; empty for a leaf."""
    return {path: child for path, child in flatten_with_paths(node, lambda part: part is not node)[0] if path}


def _first_difference(prefix: PyTree, tree: PyTree, path: str) -> str:
    if isinstance(prefix, NamedSharding):
        return ""
    ours, theirs = _children(prefix), _children(tree)
    where = f"at batch{path}"
    for key in ours:
        if key not in theirs:
            return f"{where} there is a sharding for {key}, but the batch has no such part"
    for key in theirs:
        if key not in ours:
            return f"{where} the batch has {key}, but there is no sharding for it"
    for key, child in ours.items():
        if found := _first_difference(child, theirs[key], path + key):
            return found
    if type(prefix) is not type(tree):
        return f"{where} the shardings are a {type(prefix).__name__} and the batch is a {type(tree).__name__}"
    return ""


def axes_of(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a spec: None, an axis, or a tuple of axes."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def check_divisible(
    what: str, size: int, axes: Sequence[str], axis_sizes: Mapping[str, int], multiple: int | None = None
) -> None:
    """Checks that ``size`` is divisible by the product of mesh axes.

    Args:
      what: name of the dimension, for the message.
      size: number of rows or columns.
      axes: the axes over which the dimension is divided.
      axis_sizes: axis → size, for all axes of the mesh.
      multiple: another number that must divide the size, because of other leaves; only affects the suggested sizes.

    Raises:
      PlanError: ``size`` is not divisible; names the axes, their sizes, ``size``, and the nearest valid sizes.
    """
    parts = math.prod(axis_sizes[axis] for axis in axes)
    if size % parts == 0:
        return
    unit = math.lcm(parts, multiple or 1)
    below, above = size // unit * unit, -(-size // unit) * unit
    works = f"{below} and {above}" if below else str(above)
    if len(axes) == 1:
        over = f"mesh axis {axes[0]!r} of size {parts}"
    else:
        sizes = " x ".join(str(axis_sizes[axis]) for axis in axes)
        over = f"mesh axes {tuple(axes)!r} of size {sizes} = {parts}"
    raise PlanError(
        f"{what} of size {size} cannot be divided evenly over {over}. Nearest valid sizes: {works}. Change "
        f"the size, or divide it over fewer axes."
    )


def device_indices(sharding: NamedSharding, global_shape: tuple[int, ...]) -> Mapping[MeshDevice, tuple[slice, ...]]:
    """``sharding.devices_indices_map``: the index of each device's block, in the order of the sharding's devices."""
    indices: Mapping[MeshDevice, tuple[slice, ...]] = cast("Any", sharding).devices_indices_map(global_shape)
    return indices


def check_shape(global_shape: tuple[int, ...], sharding: NamedSharding, path: str) -> None:
    """Checks that the mesh axes of ``sharding`` divide the shape of a leaf.

    Raises:
      PlanError: a dimension is not divisible; names the leaf by its path.
    """
    for dimension, (size, entry) in enumerate(zip(global_shape, sharding.spec, strict=False)):
        what = f"dimension {dimension} of leaf {path or '(the only one)'}" if dimension else "the global batch"
        check_divisible(what, size, axes_of(entry), sharding.mesh.shape)
