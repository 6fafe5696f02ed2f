"""Normalizes the ``sharding`` argument of a feed, and broadcasts it to the leaves of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshfeed._src.base.errors import PlanError, SettingsError, SourceError
from meshfeed._src.base.trees import flatten, flatten_with_paths
from meshfeed._src.base.types import MeshDevice, PyTree

_TAKES = "Pass a NamedSharding, a Mesh (rows over all its axes), or a pytree of NamedShardings"


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
        raise SettingsError(f"{where} is of type {type(leaf).__name__}: {leaf!r}. {_TAKES}.", setting="sharding")
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


def cut_spec(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """Returns the sharding for a leaf of rank ``ndim``: truncates the spec to the rank.

    One sharding can thus apply to both tokens ``[rows, positions]`` and lengths ``[rows]``. The leaf is replicated over
    the dropped axes.
    """
    if len(sharding.spec) <= ndim:
        return sharding
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


def sharded_dimensions(sharding: NamedSharding, ndim: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields ``(dimension, mesh axes)`` of each sharded dimension, in order."""
    for dimension, entry in enumerate(tuple(sharding.spec)[:ndim]):
        if axes := axes_of(entry):
            yield dimension, axes
