"""Restores trees: matches leaves with what is stored, plans, reads, agrees, gathers, and converts to the leaves wanted.

Each requested leaf becomes a :class:`Planned`: a :class:`LeafRequest` for the values to read, if any, and the conversion of
those values to the leaf. The request then carries its plan, this process's buffers and finally the result.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import logging
import math
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self, TypeAlias, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshfeed._src.arrays.reshard import key_impl, without_callers_settings
from meshfeed._src.base import memory
from meshfeed._src.base.coordination import process_count, process_index
from meshfeed._src.base.errors import CheckpointError, SettingsError
from meshfeed._src.base.types import PyTree
from meshfeed._src.checkpoint.collectives import (
    Agreement,
    BlockGather,
    cut_block,
    exchange,
    gather_group,
    host_bits_of,
    place,
)
from meshfeed._src.checkpoint.layout import (
    GOOD_READS,
    AnyMesh,
    Box,
    Device,
    LoadPlan,
    ReadCost,
    Shape,
    best_plan,
    box_shape,
    devices_of_a_process,
    free_axes,
    read_cost,
    replica_plan,
    rows_in_flight,
    take_rows,
    with_rows,
)
from meshfeed._src.checkpoint.leaves import (
    BYTES,
    CARRIERS,
    KINDS,
    NOTHING,
    PYTHON,
    VALUE,
    Leaf,
    SavedLeaf,
    check_cast,
    check_fits,
    check_python,
    is_key,
    is_key_dtype,
    key_dtype,
    key_shape,
    keys_of,
    kind_of,
    leaf_name,
    may_overflow,
    native,
    python_type_of,
    tree_of,
)
from meshfeed._src.checkpoint.stored import FOLDER, StoredArrays, StoredShapeError, Target, UnitReader, wanted_units
from meshfeed._src.state.files import readable_path

Dispatch: TypeAlias = Callable[[StoredArrays, "Sequence[LeafRequest]"], Sequence[jax.Array]]
"""(stored arrays, requests) → arrays, restored on remote workers instead of in this process."""


def is_number(value: object, kind: type | types.UnionType = int) -> TypeGuard[float]:
    """Returns whether ``value`` is of a numeric type; a bool is not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def require(proper: bool, setting: str, value: object, takes: str) -> None:
    """Rejects the value of a setting that is not ``proper``."""
    if not proper:
        raise SettingsError(f"{setting}={short(value)}; it takes {takes}.", setting=setting)


def short(value: object) -> str:
    """Formats numbers and short text as they are, and any other value as its type, because a tree of arrays is long."""
    plain = value is None or isinstance(value, bool | int | float | str | bytes)
    text = repr(value) if plain else ""
    return text if text and len(text) <= 40 else f"<{type(value).__module__}.{type(value).__qualname__}>"


MODES = ("once", "single_replica", "every_host")
_FRACTION = "a number above 0 and up to 1, or None (Orbax calls it broadcast_memory_scaling_factor)"


@dataclasses.dataclass(frozen=True)
class RestoreOptions:
    """How arrays are restored.

    Attributes:
      restore: ``once``: stored bytes are read by one host of the job (of a leaf whose chunks do not fit the division, up to a
        tenth by two), then sent to the devices that need it;
        ``single_replica``: the hosts of one replica read, then send; ``every_host``: each host reads what its devices
        hold.
      replica_axis: name of the mesh axis along which ``single_replica`` selects one replica, or its index in each mesh.
        None chooses, for each mesh, the axis that requires the fewest bytes to be read.
      primary_replica: index of that replica.
      memory_limit_bytes: limit on a process's memory in bytes while restoring, beyond the arrays themselves and one
        shard. One stored chunk per reading device is always allowed, and the device's whole piece of a leaf if pieces
        begin inside chunks or the requested shape differs from the stored one. None means no limit.
      verify: check digests.
      timeout_seconds: how long hosts wait for each other's reads.
      memory_fraction: without ``memory_limit_bytes``: limit memory to this fraction of the memory that a device has left
        beside the restored arrays.
      metadata_key: name of TensorStore's metadata files of arrays, if they were saved under a non-default name.
      dispatch: restores arrays on remote workers.

    Raises:
      SettingsError: a value is invalid.
    """

    restore: str = "once"
    replica_axis: str | int | None = None
    primary_replica: int = 0
    memory_limit_bytes: int | None = None
    verify: bool = True
    timeout_seconds: float = 1800
    memory_fraction: float | None = None
    metadata_key: str | None = None
    dispatch: Dispatch | None = None

    def __post_init__(self) -> None:
        axis, replica, limit = self.replica_axis, self.primary_replica, self.memory_limit_bytes
        fraction = self.memory_fraction
        is_axis = isinstance(axis, str | None) or is_number(axis)
        is_limit = limit is None or (is_number(limit) and limit >= 1)
        is_fraction = fraction is None or (is_number(fraction, int | float) and 0 < fraction <= 1)
        require(self.restore in MODES, "restore", self.restore, f"one of {', '.join(map(repr, MODES))}")
        require(is_axis, "replica_axis", axis, "the name or number of a mesh axis, or None")
        require(is_limit, "memory_limit_bytes", limit, "a positive int (bytes) or None")
        require(is_number(replica) and replica >= 0, "primary_replica", replica, "an index along replica_axis")
        require(is_fraction, "memory_fraction", fraction, _FRACTION)


Restored: TypeAlias = jax.Array | NDArray[np.generic]
"""A ``jax.Array`` for a request with a sharding, else a numpy array."""

Placement: TypeAlias = "Sharding | Format"
"""The requested placement of an array: a sharding of any memory kind, or a Format, which also has a layout."""


@runtime_checkable
class Shaped(Protocol):
    """An array, a numpy scalar, or the placeholder of one in an abstract tree."""

    shape: Shape
    dtype: np.dtype[np.generic]


class Planned(NamedTuple):
    """How a leaf is restored: what is read, if anything, and the conversion of the values read to the leaf."""

    request: LeafRequest | None
    finish: Callable[[Restored], Leaf]

    def then(self, convert: Callable[..., Leaf]) -> Planned:
        """Returns a copy with a further conversion at the end."""
        return Planned(self.request, lambda read: convert(self.finish(read)))

    def leaf(self) -> Leaf:
        """Returns the restored leaf, once its request has a result."""
        return self.finish(np.empty(0) if self.request is None else self.request.result)


Build: TypeAlias = Callable[[list[Leaf]], PyTree]
"""Builds a tree from its restored leaves."""


def _known(value: Leaf) -> Planned:
    return Planned(None, lambda _: value)


def restore_tree(
    directory: epath.PathLike,
    abstract_tree: PyTree,
    options: RestoreOptions,
    agreement: Agreement | None = None,
    *,
    partial: bool = False,
    strict: bool = True,
) -> PyTree:
    """Restores ``abstract_tree`` from an item. Every process of the job must call it with the same tree.

    Raises:
      CheckpointError: the trees differ (the message names the leaves), or a host could not read.
    """

    def plan(stored: StoredArrays) -> tuple[list[Planned], Build]:
        wanted = abstract_tree_of(stored) if abstract_tree is None else abstract_tree
        flat, structure = jax.tree_util.tree_flatten_with_path(wanted)
        names = _names(stored)
        leaves = [(names.get(name := leaf_name(path), name), leaf) for path, leaf in flat]
        _compare(stored, leaves, partial)
        if stored.is_plain:  # plain Orbax records shapes only with the arrays
            stored.open_soon(name for name, _ in leaves if stored.kinds.get(name) not in (None, "str"))
        planned = [plan_leaf(stored, name, leaf, strict) for name, leaf in leaves]
        return planned, functools.partial(jax.tree_util.tree_unflatten, structure)

    return restore_planned(directory, plan, options, agreement)


def restore_planned(
    directory: epath.PathLike,
    plan: Callable[[StoredArrays], tuple[list[Planned], Build]],
    options: RestoreOptions,
    agreement: Agreement | None = None,
) -> PyTree:
    """Restores the leaves of ``plan(stored)``, and builds the result from them.

    Every process of the job must call it with the same leaves.
    """
    if agreement is None:
        with Agreement(f"restoring {directory}", options.timeout_seconds) as agreement:
            return restore_planned(directory, plan, options, agreement)

    def prepare() -> tuple[StoredArrays, list[Planned], Build, list[LeafRequest], list[LeafRequest]]:
        stored = StoredArrays(find_item(directory), options.memory_limit_bytes, options.metadata_key)
        planned, build = plan(stored)
        requests = [leaf.request for leaf in planned if leaf.request is not None]
        delegates = options.dispatch is not None
        remote = [one for one in requests if delegates and one.as_orbax]
        here = [one for one in requests if not (delegates and one.as_orbax)]
        plan_all(here, options)
        return stored, planned, build, remote, here

    with without_callers_settings():  # leaves may be on devices outside the caller's jax.set_mesh
        stored, planned, build, remote, here = agreement.attempt(prepare)
        if options.dispatch is not None and remote:
            dispatch = options.dispatch
            arrays = agreement.attempt(lambda: dispatch(stored, remote))
            for request, array in zip(remote, arrays, strict=True):
                request.result = array
        restore_leaves(stored, here, options, agreement)
        return build([leaf.leaf() for leaf in planned])


def find_item(directory: epath.PathLike) -> epath.Path:
    """Returns the folder of the arrays: ``directory`` itself, or the only item inside it."""
    directory = readable_path(directory)
    if (directory / "_METADATA").exists() or (directory / FOLDER).exists() or not directory.exists():
        return directory
    found = [path for path in directory.iterdir() if path.is_dir() and (path / "_METADATA").exists()]
    return found[0] if len(found) == 1 else directory


def _names(stored: StoredArrays) -> dict[str, str]:
    """Returns name of a leaf in the restored tree → its name in storage. They differ below enum members as keys."""
    skeleton = stored.manifest.skeleton
    flat, _ = jax.tree_util.tree_flatten_with_path(None if skeleton is None else tree_of(skeleton, lambda name: name))
    return {leaf_name(path): name for path, name in flat}


def _compare(stored: StoredArrays, leaves: Sequence[tuple[str, Leaf]], partial: bool) -> None:
    missing = [name for name, leaf in leaves if name not in stored.kinds and leaf is not ...]
    extra = [] if partial else sorted(set(stored.kinds) - {name for name, _ in leaves})
    if missing or extra:
        remedies = ["Remove leaves that are not stored from the tree, and add them after restoring."] if missing else []
        if extra:
            remedies.append("Put ... in the tree for leaves to omit, or use ArraysRestore(…, partial_restore=True).")
        found = [f"lacks {_leaves(missing)}"] if missing else []
        found += [f"has {'an ' if len(extra) == 1 else ''}extra {_leaves(extra)}"] if extra else []
        raise CheckpointError(
            f"{stored.directory}: the requested tree differs from the stored one: the checkpoint "
            f"{' and '.join(found)}. {' '.join(remedies)}"
        )


def _leaves(names: Sequence[str]) -> str:
    shown = f"{'leaf' if len(names) == 1 else 'leaves'} {', '.join(repr(name) for name in names[:8])}"
    return shown if len(names) <= 8 else f"{shown}, … ({len(names)} in all)"


_HOST_KINDS = ("numpy", "numpy_scalar")


def plan_leaf(stored: StoredArrays, name: str, leaf: Leaf, strict: bool) -> Planned:
    """Plans the restore of one leaf of an abstract tree; ``...`` omits the leaf."""
    if leaf is ...:
        return _known(...)
    kind, saved_kind = kind_of(leaf), stored.kinds[name]
    if not _describes(leaf, saved_kind):
        raise CheckpointError(
            f"leaf {name!r}: a {type(leaf).__name__} does not describe a leaf. Pass an array, a jax.ShapeDtypeStruct, or "
            "a number or text like the one saved."
        )
    if saved_kind in ("str", "bytes") or not isinstance(leaf, Shaped):
        return _plan_python(stored.saved(name), leaf)
    saved, sharding = stored.saved(name), _placement(leaf)
    if sharding is None and saved_kind != "jax" and kind not in _HOST_KINDS:
        kind = saved_kind if saved_kind in _HOST_KINDS else "numpy"  # given only as a shape: as it was saved
    if kind in _HOST_KINDS:
        return plan_numpy(stored, saved, leaf.shape, leaf.dtype).then(KINDS[kind].from_host)
    return plan_array(stored, name, leaf.shape, leaf.dtype, sharding or saved.saved_sharding(), strict=strict)


def _describes(leaf: Leaf, saved_kind: str) -> bool:
    """Returns whether ``leaf`` stands for a leaf; for a number whose type plain Orbax did not record, any object does."""
    if isinstance(leaf, type):
        return False
    return kind_of(leaf) is not None or isinstance(leaf, Shaped) or saved_kind == "scalar"


def _placement(leaf: Leaf) -> Placement | None:
    form = getattr(leaf, "format", None)
    if isinstance(leaf, jax.ShapeDtypeStruct) and getattr(form, "layout", None) is not None:
        return form
    return getattr(leaf, "sharding", None)


def _plan_python(saved: SavedLeaf, leaf: Leaf) -> Planned:
    """Plans a Python number, text or bytes; for any other object, the stored number is restored as it is."""
    wanted = next((kind for kind in PYTHON if isinstance(leaf, kind)), None)
    if saved.data_shape != ():
        raise CheckpointError(
            f"leaf {saved.name!r} is stored as an array of shape {saved.data_shape}, but {type(leaf).__name__} was "
            "requested. Pass an array or a jax.ShapeDtypeStruct of that shape."
        )
    found = type(saved.value) if saved.encoding == VALUE else python_type_of(saved.dtype)
    if wanted is not None or found in (str, bytes):
        check_python(f"leaf {saved.name!r}", found, type(leaf))
    if saved.encoding == VALUE:
        planned = _known(saved.value)
    else:
        planned = _host_values(saved, (), saved.dtype).then(KINDS["scalar"].from_host)
    return planned if wanted is None else planned.then(functools.partial(_as_python, type(leaf), saved.name))


def _as_python(kind: Callable[[Leaf], Leaf], name: str, value: Leaf) -> Leaf:
    try:
        return kind(value)
    except Exception as error:  # of a subclass of a Python type, such as an enum
        raise CheckpointError(
            f"leaf {name!r} is {short(value)}, which is not of the requested type: {error}. Request "
            f"{type(value).__name__}."
        ) from error


def plan_numpy(stored: StoredArrays, saved: SavedLeaf, shape: Shape | None, dtype: DTypeLike | None) -> Planned:
    """Plans the restore of a numpy array on every process."""
    _check_shape(stored, saved, shape, strict=True)
    _check_dtype(saved, dtype)
    return _host_values(saved, saved.data_shape, np.dtype(dtype or saved.dtype))


def _host_values(saved: SavedLeaf, shape: Shape, dtype: np.dtype[np.generic], any_cast: bool = False) -> Planned:
    """Plans the values of a leaf in this process's memory; key data for PRNG keys."""
    if saved.encoding == VALUE:
        value = np.asarray(saved.value)
        if type(saved.value) is int and jnp.issubdtype(dtype, jnp.integer):
            check_fits(f"leaf {saved.name!r}", value, dtype)
        return _known(value.astype(dtype))
    if saved.encoding == NOTHING:
        return _known(np.zeros(shape, dtype))
    if saved.encoding == BYTES:
        request = LeafRequest(saved, saved.stored_shape, saved.stored_dtype, None)
        return Planned(request, lambda data: data.view(saved.dtype).reshape(saved.shape).astype(dtype, copy=False))
    return Planned(LeafRequest(saved, saved.data_shape, dtype, None, any_cast), lambda values: values)


def plan_array(
    stored: StoredArrays,
    name: str,
    shape: Shape | None,
    dtype: DTypeLike | None,
    placement: Placement | None,
    *,
    strict: bool = True,
    any_cast: bool = False,
) -> Planned:
    """Plans the restore of a ``jax.Array``.

    None as shape or dtype means the stored one; None as placement is accepted for numbers only. Unless ``strict``, an array
    of another shape is truncated or padded with zeros. ``any_cast`` casts as numpy does, even if more than precision is lost.

    Raises:
      CheckpointError: the shapes or kinds of dtypes differ, or no sharding is given or known.
    """
    saved, sharding = stored.saved(name), _sharding_of(placement)
    _check_dtype(saved, dtype, any_cast)
    read_shape, read_dtype, impl = _stored_form(saved, shape, dtype)
    # Local arrays are on a different device in each process, but all processes must make the same plan.
    local = process_count() > 1 and sharding is not None and sharding.is_fully_addressable
    _check_shape(stored, saved, read_shape, strict or local)
    if placement is None or sharding is None:
        if saved.encoding != VALUE:
            raise CheckpointError(
                f"{stored.directory}: parameter {name!r}: no sharding given, and none was saved that fits these "
                f"{jax.device_count()} devices. Pass a ShapeDtypeStruct with a sharding."
            )
        return _host_values(saved, read_shape, read_dtype, any_cast).then(jnp.asarray)
    if impl is not None and placement is sharding:
        placement = sharding = cut_to_rank(sharding, len(keys_of(read_shape, impl)))
    _check_sharding(name, keys_of(read_shape, impl), sharding)
    _check_x64(name, read_dtype, any_cast)
    readable = _readable(sharding)
    if local or saved.encoding in (VALUE, NOTHING, BYTES):
        values = _host_values(saved, read_shape, read_dtype, any_cast)
        planned = values.then(functools.partial(_from_host, sharding=readable))
    else:
        planned = Planned(LeafRequest(saved, read_shape, read_dtype, readable, any_cast), lambda array: array)
    if impl is not None:
        planned = planned.then(functools.partial(_wrap_keys, impl=impl, sharding=readable))
    return planned.then(functools.partial(_placed, placement=placement))


def _stored_form(
    saved: SavedLeaf, shape: Shape | None, dtype: DTypeLike | None
) -> tuple[Shape, np.dtype[np.generic], str | None]:
    """Returns the shape and dtype to read, and the implementation if the values read are the data of PRNG keys."""
    impl = _impl_of(dtype) if is_key_dtype(dtype) else saved.impl if dtype is None else None
    read_dtype = saved.dtype if impl is not None or dtype is None else np.dtype(dtype)
    return saved.data_shape if shape is None else key_shape(tuple(shape), impl), read_dtype, impl


def cut_to_rank(sharding: Sharding, rank: int) -> Sharding:
    """Truncates a spec to ``rank``: Orbax records the sharding of a PRNG key's data, which has more dimensions."""
    if not isinstance(sharding, NamedSharding) or any(sharding.spec[rank:]):
        return sharding
    spec = jax.sharding.PartitionSpec(*sharding.spec[:rank])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _check_dtype(saved: SavedLeaf, wanted: DTypeLike | None, any_cast: bool = False) -> None:
    """Rejects text, PRNG keys of a different implementation, and the casts that ``check_cast`` rejects."""
    where, impl = f"leaf {saved.name!r}", saved.impl
    if isinstance(saved.value, str | bytes):
        raise CheckpointError(
            f"{where} is stored as {type(saved.value).__name__}, but an array was requested. Request text."
        )
    if wanted is None:
        return
    if is_key_dtype(wanted):
        if (impl is None and saved.dtype != np.uint32) or impl not in (None, _impl_of(wanted)):
            raise CheckpointError(
                f"{where} is stored as {impl or saved.dtype.name}, but PRNG keys {_impl_of(wanted)} were requested. Request "
                f"{f'keys of jax.random.key(…, impl={impl!r})' if impl else 'that dtype'}."
            )
    elif impl is not None and np.dtype(wanted) != saved.dtype:
        raise CheckpointError(
            f"{where} is stored as PRNG keys {impl}, but {np.dtype(wanted).name} was requested. Request keys "
            f"(jax.random.key(…, impl={impl!r})), or their {saved.dtype.name} data."
        )
    elif not any_cast:
        check_cast(where, saved.dtype, wanted)


def _check_shape(stored: StoredArrays, saved: SavedLeaf, wanted: Shape | None, strict: bool) -> None:
    found = saved.data_shape
    if wanted is None or tuple(wanted) == found:
        return
    if strict or len(tuple(wanted)) != len(found):
        raise StoredShapeError(
            f"{stored.directory}: parameter {saved.name!r} has the stored shape {found}, but {tuple(wanted)} was requested. "
            "Request the stored shape (another is not compatible with it), or set strict=False (in ArraysRestore, or in "
            "Orbax's ArrayRestoreArgs) to truncate the array or pad it with zeros."
        )


def _check_sharding(name: str, shape: Shape, sharding: Sharding) -> None:
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise CheckpointError(
            f"leaf {name!r} of shape {shape} cannot have the requested sharding: {error} Replicate that dimension, or "
            "shard one that the axes divide."
        ) from error


@functools.lru_cache(maxsize=64)
def _jax_holds(dtype: np.dtype[np.generic]) -> bool:
    """Returns whether a ``jax.Array`` can have the dtype, possibly only with x64."""
    if native(dtype):
        return True
    try:  # JAX names some narrow dtypes that no backend holds yet
        jax.device_put(np.zeros((), dtype), jax.local_devices()[0]).block_until_ready()
    except Exception:
        return False
    return True


def _check_x64(name: str, dtype: np.dtype[np.generic], any_cast: bool) -> None:
    if not _jax_holds(dtype):
        raise CheckpointError(
            f"leaf {name!r} was requested as a jax.Array of {dtype.name}, which this version of JAX does not support. "
            "Request a numpy array, or a dtype of JAX."
        )
    held = jax.dtypes.canonicalize_dtype(dtype)
    if not any_cast and held != dtype:
        raise CheckpointError(
            f"leaf {name!r} was requested as {dtype.name}, which JAX supports only with jax_enable_x64. Enable it, or "
            f"request {held.name} or a numpy array."
        )


def _impl_of(dtype: object) -> str:
    return str(key_impl(dtype))  # as manifests have it


def _sharding_of(placement: Placement | None) -> Sharding | None:
    return placement if isinstance(placement, Sharding) else getattr(placement, "sharding", None)


def _readable(sharding: Sharding) -> Sharding:
    """Returns the same sharding in the devices' default memory, where collectives can run."""
    default = next(iter(sharding.device_set)).default_memory().kind
    return sharding if sharding.memory_kind in (None, default) else sharding.with_memory_kind(default)


def _from_host(values: NDArray[np.generic], sharding: Sharding) -> jax.Array:
    # A copy for each device: if two aliased one buffer, donating one shard would overwrite the other.
    # The dtype is for hosts without a device in the sharding.
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: np.array(values[index]), dtype=values.dtype
    )


@functools.lru_cache(maxsize=64)
def _key_wrapper(impl: str, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(functools.partial(jax.random.wrap_key_data, impl=impl), out_shardings=sharding)


def _wrap_keys(data: jax.Array, impl: str, sharding: Sharding) -> jax.Array:
    if data.addressable_shards:
        return _key_wrapper(impl, sharding)(data)
    # A process without a device of this sharding cannot run the compiled call.
    shape = keys_of(data.shape, impl)
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=key_dtype(impl))


def _placed(array: jax.Array, placement: Placement) -> jax.Array:
    """Returns ``array`` with exactly the requested sharding, memory kind and layout."""
    sharding = _sharding_of(placement)
    assert sharding is not None
    if sharding is not placement or _readable(sharding) is not sharding:
        return jax.device_put(array, placement)
    if array.sharding == sharding or is_key(array):
        return array
    # The compiler returns PartitionSpec('a') for a requested ('a', None): the same layout, but they compare unequal.
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, shards, dtype=None if shards else array.dtype
    )


def abstract_tree_of(stored: StoredArrays) -> PyTree:
    """Returns the saved tree with a description at each leaf; passing it to a restore restores everything as it was.

    Arrays become ``jax.ShapeDtypeStruct``, with the saved sharding if this job has as many devices. Numpy values become
    placeholders of the same shape and dtype. Numbers and text are themselves.
    """
    if stored.manifest.skeleton is not None:
        return tree_of(stored.manifest.skeleton, lambda name: stored.saved(name).placeholder())
    # Use Orbax's own description of the tree, to return the same containers as Orbax.
    arrays = ocp.type_handlers.ArrayHandler(metadata_key=stored.metadata_key)
    orbax = ocp.PyTreeCheckpointHandler(type_handler_registry=type_handlers(arrays))
    return jax.tree_util.tree_map_with_path(
        lambda path, described: _placeholder(stored.saved(leaf_name(path)), described),
        orbax.metadata(stored.directory).tree,
    )


def _placeholder(saved: SavedLeaf, described: object) -> Leaf:
    """Returns the placeholder of a leaf of plain Orbax, with the recorded sharding."""
    placeholder = saved.placeholder()
    recorded = _recorded_sharding(described, len(saved.shape))
    if recorded is not None and isinstance(placeholder, jax.ShapeDtypeStruct):
        return placeholder.update(sharding=recorded)
    return placeholder


def _recorded_sharding(described: object, rank: int) -> Sharding | None:
    """Returns the sharding that plain Orbax recorded; None if this job's devices do not allow it on every process."""
    convert = getattr(getattr(described, "sharding", None), "to_jax_sharding", None)
    if convert is None:
        return None
    try:
        sharding: Sharding = convert()
    except Exception:  # it is for a different topology, for which Orbax raises various errors
        return None
    if len({device.process_index for device in sharding.device_set}) < process_count():
        return None
    return cut_to_rank(sharding, rank)


def type_handlers(arrays: ocp.type_handlers.ArrayHandler) -> ocp.type_handlers.TypeHandlerRegistry:
    """Returns an Orbax registry of type handlers that uses ``arrays`` for ``jax.Array``."""
    handlers = ocp.type_handlers
    return handlers.create_type_handler_registry(
        (int, handlers.ScalarHandler()),
        (float, handlers.ScalarHandler()),
        (np.ndarray, handlers.NumpyHandler()),
        (jax.Array, arrays),
        (str, handlers.StringHandler()),
    )


_SMALL_BYTES = 256 << 10  # a leaf up to this size is sent packed: its own collective costs more than it saves
_GROUP_BYTES = 4 << 30  # memory of the leaves that are read and gathered together, without a limit
# Measured on 4 hosts: 64 MiB takes 18 % longer, 8 MiB 8 %. Whole shards need zeros on every device and are slower still.
_BROADCAST_BYTES = 16 << 20


class LeafRequest:
    """A leaf whose values are restored: what is requested, how it is read, this process's buffers, and the result.

    Args:
      leaf: the saved leaf.
      shape: requested shape in stored form (key data for PRNG keys). If it differs from the stored one, the array is
        truncated or padded with zeros.
      dtype: requested dtype.
      sharding: requested sharding; None for a numpy array on every process.
      any_cast: let integers that do not fit in ``dtype`` wrap around instead of raising an error.
    """

    def __init__(
        self,
        leaf: SavedLeaf,
        shape: Shape,
        dtype: np.dtype[np.generic],
        sharding: Sharding | None,
        any_cast: bool = False,
    ) -> None:
        self.leaf = leaf
        self.dtype = dtype
        self.plan = LoadPlan(sharding, shape)  # direct until plan_all finds a better one
        self.packed = False  # whether each unit is read by one host and sent to all
        self.rows: tuple[int, int] | None = None  # first row and number of rows of each piece to read now; None: all
        self.buffers: dict[Device, NDArray[np.generic]] = {}  # that devices read into
        self.result: Restored = np.empty(0)
        # The values must be checked before they are cast.
        self.must_fit = not any_cast and may_overflow(leaf.stored_dtype, dtype)

    @property
    def nbytes(self) -> int:
        """Size of the stored leaf in bytes."""
        return math.prod(self.leaf.stored_shape) * self.leaf.stored_dtype.itemsize

    @property
    def as_orbax(self) -> bool:
        """Whether Orbax stores and casts the leaf as we do, so remote workers can restore it; most others are small."""
        ours = self.leaf.impl is not None or self.leaf.encoding in CARRIERS or self.must_fit
        return self.plan.sharding is not None and not ours

    def cost(self, plan: LoadPlan) -> ReadCost:
        """Returns the bytes that each process reads under a plan."""
        return read_cost(plan, self.leaf.units, self.leaf.stored_dtype.itemsize)

    def targets(self) -> list[Target]:
        """Returns this process's buffers, one per distinct box; devices share them until they are placed.

        A later call for other rows returns the same buffers, because fresh pages cost more than overwriting old ones.
        This is safe: arrays that aliased the buffers no longer exist, and every value is overwritten, except in rows
        that are not sent or are padding, because pieces are read in parts only if the leaf has the stored shape
        (``rows_in_flight``).
        """
        plan, shared = self.plan, dict[Box, NDArray[np.generic]]()
        for device, box in plan.boxes(process_index()).items():
            shape = box_shape(box or ()) if plan.direct else plan.piece_shape
            if self.rows is not None:
                if box is None:
                    continue  # it only receives: BlockGather supplies its block
                shape = with_rows(shape, plan.dimension, self.rows[1])
                box = take_rows(box, plan.dimension, *self.rows)
            known = self.buffers.get(device) if box is None else shared.get(box, self.buffers.get(device))
            self.buffers[device] = memory.zeros(shape, self.dtype) if known is None else known
            if box is not None:
                shared[box] = self.buffers[device]
        return [Target(box, buffer) for box, buffer in shared.items()]

    def take_buffers(self) -> dict[Device, NDArray[np.generic]]:
        """Hands over the buffers, with a separate copy for each CPU device, which would alias a shared buffer."""
        own, self.buffers = self.buffers, {}
        seen: set[int] = set()
        for device, buffer in own.items():
            if id(buffer) in seen and device.platform == "cpu":
                own[device] = memory.copy(buffer)
            seen.add(id(buffer))
        return own

    def block_bytes(self, limit: int | None) -> int | None:
        """Returns the bytes in flight while it is gathered in blocks, or None if it is gathered whole.

        It is gathered in blocks because of the limit, or because broadcasting it whole thrashes memory.
        """
        most = _BROADCAST_BYTES if self.plan.broadcast else sys.maxsize
        most = most if limit is None else min(most, limit // 2)
        whole = self.plan.direct or not self.plan.shape or self.extra_bytes() <= most
        return None if whole else most

    def extra_bytes(self) -> int:
        """Returns this process's memory beyond the result while it is gathered; the same bound on every process."""
        sharding, itemsize = self.plan.sharding, self.dtype.itemsize
        local = devices_of_a_process(sharding)
        if sharding is None or self.plan.direct:
            return self.nbytes * local // (1 if sharding is None else len(sharding.device_set))
        return local * itemsize * (math.prod(self.plan.piece_shape) + math.prod(self.plan.shard_shape))


class Restore(NamedTuple):
    """The stages of one restore after planning; ``limit`` is the memory limit in bytes, or None."""

    reader: UnitReader
    agreement: Agreement
    limit: int | None

    def _read(self, group: Sequence[LeafRequest]) -> None:
        """Reads the parts of several leaves that this process's devices need into their buffers."""
        self.reader.read([unit for request in group for unit in wanted_units(request.leaf, request.targets())])

    def together(self, group: Sequence[LeafRequest]) -> None:
        """Reads leaves together and gathers those over one mesh together."""
        self.agreement.attempt(lambda: self._read(group))
        _gather(group)

    def in_blocks(self, request: LeafRequest, limit: int) -> None:
        """Reads and gathers one large leaf with at most ``limit`` bytes in flight, or one unit per device."""
        plan, sharding = request.plan, request.plan.sharding
        assert sharding is not None
        read_rows, sent_rows = rows_in_flight(plan, request.leaf.units, request.dtype.itemsize, limit)
        takes_part = any(device.process_index == process_index() for device in sharding.device_set)
        gather = BlockGather(plan, request.dtype, sent_rows) if takes_part else None
        for first in range(0, plan.piece, read_rows):
            request.rows = (first, read_rows)
            self.agreement.attempt(lambda: self._read([request]))
            rows = min(read_rows, plan.piece - first)
            for at in range(0, rows, sent_rows):
                at = min(at, rows - sent_rows)  # the last block may overlap, so one program serves all
                if gather is not None:
                    blocks = cut_block(request.buffers, plan.dimension, at, sent_rows)
                    gather.add(first + at, {device: host_bits_of(block) for device, block in blocks.items()})
        request.buffers = {}
        request.result = place({}, plan.shape, sharding, request.dtype) if gather is None else gather.finish()

    def packed(self, group: Sequence[LeafRequest], others: Sequence[LeafRequest]) -> None:
        """Reads each unit of leaves on one host, which has little to read of the others, and sends it to all hosts."""
        targets = [request.targets() for request in group]
        leaves = [request.leaf for request in group]
        loads: collections.Counter[int] = collections.Counter()
        for request in others:
            loads.update(dict(request.cost(request.plan).by_process))
        exchange(leaves, targets, loads, self.reader, self.agreement, self.limit)
        _gather(group)


def _gather(group: Sequence[LeafRequest]) -> None:
    """Sets the results of a group, and frees its buffers."""
    together: dict[Mesh, list[LeafRequest]] = collections.defaultdict(list)
    for request in group:
        plan = request.plan
        if plan.sharding is None:
            (request.result,) = request.take_buffers().values()
        elif plan.direct or not request.buffers:
            request.result = place(request.take_buffers(), plan.shape, plan.sharding, request.dtype)
        else:
            together[plan.mesh].append(request)
    # A compiled call can gather only leaves over the same mesh.
    for requests in together.values():
        buffers = [{d: host_bits_of(buffer) for d, buffer in one.take_buffers().items()} for one in requests]
        arrays = gather_group([one.plan for one in requests], [one.dtype for one in requests], buffers)
        for request, array in zip(requests, arrays, strict=True):
            # Wait, so the buffers of this group are free before the next group is read.
            request.result = array.block_until_ready()


def choose_replica_axes(requests: Sequence[LeafRequest], options: RestoreOptions) -> dict[AnyMesh, str | None]:
    """Returns the axis of replicas of each mesh: the one named, or the one with the fewest bytes to read."""
    by_mesh: dict[AnyMesh, list[LeafRequest]] = collections.defaultdict(list)
    for request in requests:
        if isinstance(request.plan.sharding, NamedSharding):
            by_mesh[request.plan.sharding.mesh].append(request)
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


def _replica_axis(mesh: AnyMesh, group: Sequence[LeafRequest], options: RestoreOptions) -> str | None:
    wanted, names, replica = options.replica_axis, mesh.axis_names, options.primary_replica
    if isinstance(wanted, int):
        return names[wanted] if -len(names) <= wanted < len(names) else None
    if wanted is not None:
        return wanted if wanted in names else None
    free = {name for request in group for name in free_axes(request.plan.sharding)}

    def cost(name: str) -> float:
        if replica >= mesh.shape[name]:
            return math.inf
        plans = (replica_plan(one.plan.sharding, one.plan.shape, name, replica) for one in group)
        return sum(request.cost(plan).total for request, plan in zip(group, plans, strict=True))

    return min(sorted(free), key=cost, default=None)


def plan_all(requests: Sequence[LeafRequest], options: RestoreOptions) -> None:
    """Chooses how each leaf is read; the same on every process."""
    several = process_count() > 1 and options.restore != "every_host"
    axes = choose_replica_axes(requests, options) if options.restore == "single_replica" else {}
    for request in requests:
        leaf, sharding, shape = request.leaf, request.plan.sharding, request.plan.shape
        request.packed = several and (sharding is None or request.nbytes <= _SMALL_BYTES)
        if sharding is None or request.packed:
            continue
        if options.restore == "single_replica":
            axis = axes.get(sharding.mesh) if isinstance(sharding, NamedSharding) else None
            request.plan = replica_plan(sharding, shape, axis, options.primary_replica)
        elif several:
            plan, cost = best_plan(sharding, shape, leaf.units, leaf.stored_dtype.itemsize)
            if cost.ratio > GOOD_READS:  # the chunks fit no cut of this sharding
                request.packed = True
            else:
                request.plan = plan


def restore_leaves(
    stored: StoredArrays, requests: Sequence[LeafRequest], options: RestoreOptions, agreement: Agreement
) -> None:
    """Sets the results of planned requests. Every process of the job must call it with the same requests.

    Raises:
      CheckpointError: on all hosts, if any host could not read.
      DamagedCheckpointError: on all hosts, if any host read bytes that differ from those written.
    """
    own, packed = ([one for one in requests if one.packed is sent] for sent in (False, True))
    limit = _limit_bytes(requests, options, agreement)
    with RestoreProgress(stored.directory, sum(request.nbytes for request in requests)) as progress:
        reader = UnitReader(
            stored,
            verify=options.verify,
            bytes_in_flight=None if limit is None else limit // 2,
            on_bytes=progress.add,
            must_fit={request.leaf.name: request.dtype for request in requests if request.must_fit},
        )
        restore = Restore(reader, agreement, limit)
        for group in _groups(own, limit):
            if (block_bytes := group[0].block_bytes(limit)) is not None:
                restore.in_blocks(group[0], block_bytes)
            else:
                restore.together(group)
            gc.collect(0)  # JAX frees host memory that it used without a copy only at a collection
        if packed:
            restore.packed(packed, own)
        progress.finish(sum(_held_bytes(request.result) for request in requests))


def _limit_bytes(requests: Sequence[LeafRequest], options: RestoreOptions, agreement: Agreement) -> int | None:
    """Returns the memory limit in bytes. It must be the same on every host because plans depend on it."""
    if options.memory_limit_bytes is not None or options.memory_fraction is None:
        return options.memory_limit_bytes
    shards = [(one.plan.shard_shape, one.dtype.itemsize) for one in requests if one.plan.sharding is not None]
    free = _device_bytes() - sum(math.prod(shape) * itemsize for shape, itemsize in shards)
    return min(agreement.collect(max(1, int(free * options.memory_fraction))).values())


def _device_bytes() -> int:
    # CPU devices report no statistics; the limit is then the host's memory.
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _held_bytes(result: Restored) -> int:
    if isinstance(result, np.ndarray):
        return result.nbytes
    return sum(shard.data.nbytes for shard in result.addressable_shards)


def _groups(requests: Sequence[LeafRequest], limit: int | None) -> list[list[LeafRequest]]:
    """Splits leaves into groups that are read and gathered together; a leaf gathered in blocks is its own group."""
    groups: list[list[LeafRequest]] = []
    room = -1
    for request in requests:
        in_blocks, extra = request.block_bytes(limit) is not None, request.extra_bytes()
        if in_blocks or extra > room:
            groups.append([])
            room = _GROUP_BYTES if limit is None else min(limit, _GROUP_BYTES)
        groups[-1].append(request)
        room = -1 if in_blocks else room - extra
    return groups


_log = logging.getLogger("meshfeed.checkpoint")
_BAR_AFTER_SECONDS = 3.0
_BAR_WIDTH = 32
_GIB = 1 << 30


class RestoreProgress:
    """Counts the bytes of one restore on this host."""

    def __init__(self, directory: epath.Path, total_bytes: int) -> None:
        self._directory = directory
        self._total_bytes = total_bytes
        self._bytes = 0
        self._started = time.perf_counter()
        self._drawn = 0.0
        self._bar = process_index() == 0 and sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            sys.stderr.write("\n")

    def add(self, count: int) -> None:
        """Counts bytes read from storage."""
        self._bytes += count
        now = time.perf_counter()
        if self._bar and now - self._started > _BAR_AFTER_SECONDS and now - self._drawn > 0.2:
            self._drawn = now
            self._draw(now - self._started)

    def _draw(self, seconds: float) -> None:
        # Reads are spread evenly over the processes.
        share = min(1.0, self._bytes / max(1, self._total_bytes // process_count()))
        bar = "█" * int(share * _BAR_WIDTH)
        gib = self._bytes / _GIB
        sys.stderr.write(f"\rrestoring {bar:<{_BAR_WIDTH}} {share:4.0%} {gib:.2f} GiB {gib / seconds:.2f} GiB/s")
        sys.stderr.flush()

    def finish(self, held_bytes: int) -> None:
        """Logs and records the totals."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        read, held = self._bytes / _GIB, held_bytes / _GIB
        text = "restored %s: host %d read %.3f of %.3f GiB in %.2f s (%.3f GiB/s), holds %.3f GiB"
        total, speed = self._total_bytes / _GIB, read / seconds
        _log.info(text, self._directory, process_index(), read, total, seconds, speed, held)
        scheme, is_url, _ = os.fspath(self._directory).partition("://")
        storage = {"gs": "gcs", "s3": "s3"}.get(scheme, "local") if is_url else "local"
        labels = {"storage_type": storage, "custom_prefix": ""}
        worker = "/jax/orbax/read/worker"
        jax.monitoring.record_event_duration_secs(f"{worker}/total_duration_secs", seconds, **labels)
        jax.monitoring.record_scalar(f"{worker}/io/requested/gbytes", read, **labels)
        jax.monitoring.record_scalar(f"{worker}/io/requested/throughput/gbytes_per_sec", speed, **labels)
        jax.monitoring.record_event_duration_secs("/jax/checkpoint/read/durations_sec", seconds)
        if process_index() == 0:
            jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes", held)
            jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes_per_sec", held / seconds)
