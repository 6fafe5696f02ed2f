"""Restores whole trees: plans what each requested leaf needs from storage, and converts the values read to that leaf."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, Sharding
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshfeed._src.arrays.reshard import key_impl, without_ambient_mesh
from meshfeed._src.base.coordination import process_count
from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.types import PyTree
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.arguments import RestoreOptions
from meshfeed._src.checkpoint.boxes import Shape
from meshfeed._src.checkpoint.dtypes import (
    BYTES,
    NOTHING,
    VALUE,
    check_cast,
    check_fits,
    check_python,
    is_key_dtype,
    python_type_of,
)
from meshfeed._src.checkpoint.leaves import (
    KINDS,
    PYTHON,
    Leaf,
    SavedLeaf,
    is_key,
    key_dtype,
    key_shape,
    keys_of,
    kind_of,
    leaf_name,
    tree_of,
)
from meshfeed._src.checkpoint.restore import LeafRequest, Restored, restore_leaves
from meshfeed._src.checkpoint.stored import StoredArrays

Placement: TypeAlias = "Sharding | Format"
"""The requested placement of an array: a sharding of any memory kind, or a Format, which also has a layout."""


@runtime_checkable
class Shaped(Protocol):
    """An array, a numpy scalar, or the placeholder of one in an abstract tree."""

    @property
    def shape(self) -> Shape:
        """Size of each dimension."""
        ...

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the values."""
        ...


class Planned(NamedTuple):
    """How a leaf is restored.

    Attributes:
      request: what to read; None if nothing is read, because the leaf is empty or its value is in the manifest.
      finish: converts the values read to the leaf; ignores its argument if ``request`` is None.
    """

    request: LeafRequest | None
    finish: Callable[[Restored], Leaf]

    def then(self, convert: Callable[..., Leaf]) -> Planned:
        """Returns a copy with a further conversion at the end."""
        return Planned(self.request, lambda read: convert(self.finish(read)))


def _known(value: Leaf) -> Planned:
    return Planned(None, lambda _: value)


class TreePlan(NamedTuple):
    """How a tree is restored: its leaves in order, and the function that builds the tree from them."""

    stored: StoredArrays
    leaves: Sequence[Planned]
    build: Callable[[list[Leaf]], PyTree]


def restore_planned(make_plan: Callable[[], TreePlan], options: RestoreOptions, agreement: Agreement) -> PyTree:
    """Restores a tree according to ``make_plan()``. Every process of the job must call it with the same leaves."""
    with without_ambient_mesh():  # leaves may be on devices outside the caller's jax.set_mesh
        plan = agreement.attempt(make_plan)
        requests = [leaf.request for leaf in plan.leaves if leaf.request is not None]
        results = iter(restore_leaves(plan.stored, requests, options, agreement))
        nothing = np.empty(0)
        return plan.build([leaf.finish(nothing if leaf.request is None else next(results)) for leaf in plan.leaves])


def restore_tree(
    stored: StoredArrays,
    abstract_tree: PyTree,
    options: RestoreOptions,
    agreement: Agreement,
    *,
    partial: bool = False,
    strict: bool = True,
) -> PyTree:
    """Restores ``abstract_tree`` from an item. Every process of the job must call it with the same tree.

    Raises:
      CheckpointError: the trees differ (the message names the leaves), or a host could not read.
    """

    def make_plan() -> TreePlan:
        wanted = abstract_tree_of(stored) if abstract_tree is None else abstract_tree
        flat, structure = jax.tree_util.tree_flatten_with_path(wanted)
        names = _names(stored)
        leaves = [(names.get(name := leaf_name(path), name), leaf) for path, leaf in flat]
        _compare(stored, leaves, partial)
        if stored.manifest is None:  # plain Orbax records shapes only with the arrays
            stored.open_soon(name for name, _ in leaves if stored.kinds.get(name) not in (None, "str"))
        planned = [plan_leaf(stored, name, leaf, strict) for name, leaf in leaves]
        return TreePlan(stored, planned, functools.partial(jax.tree_util.tree_unflatten, structure))

    return restore_planned(make_plan, options, agreement)


def _names(stored: StoredArrays) -> dict[str, str]:
    """Returns name of a leaf in the restored tree → its name in storage. They differ below enum members as keys."""
    if stored.manifest is None or stored.manifest.skeleton is None:
        return {}
    flat, _ = jax.tree_util.tree_flatten_with_path(tree_of(stored.manifest.skeleton, lambda name: name))
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


def plan_leaf(stored: StoredArrays, name: str, leaf: Leaf, strict: bool) -> Planned:
    """Plans the restore of one leaf of an abstract tree; ``...`` omits the leaf."""
    if leaf is ...:
        return _known(...)
    kind, saved_kind = kind_of(leaf), stored.kinds[name]
    if isinstance(leaf, type) or not (kind or isinstance(leaf, Shaped) or saved_kind == "scalar"):
        raise CheckpointError(
            f"leaf {name!r}: a {type(leaf).__name__} does not describe a leaf. Pass an array, a jax.ShapeDtypeStruct, or "
            "a number or text like the one saved."
        )
    if saved_kind in ("str", "bytes") or not isinstance(leaf, Shaped):
        return _plan_python(stored, stored.saved(name), leaf)
    shape, dtype, sharding = leaf.shape, leaf.dtype, _placement(leaf)
    if kind in ("numpy", "numpy_scalar"):
        return plan_numpy(stored, stored.saved(name), shape, dtype).then(KINDS[kind].from_host)
    if sharding is None and saved_kind != "jax":  # a host value, given only as a shape: as it was saved
        as_saved = KINDS["numpy_scalar" if saved_kind == "numpy_scalar" else "numpy"]
        return plan_numpy(stored, stored.saved(name), shape, dtype).then(as_saved.from_host)
    return plan_array(stored, name, shape, dtype, sharding or stored.saved(name).saved_sharding(), strict=strict)


def _placement(leaf: Leaf) -> Placement | None:
    form = getattr(leaf, "format", None)
    if isinstance(leaf, jax.ShapeDtypeStruct) and getattr(form, "layout", None) is not None:
        return form
    return getattr(leaf, "sharding", None)


def _plan_python(stored: StoredArrays, saved: SavedLeaf, leaf: Leaf) -> Planned:
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
        planned = _host_values(stored, saved, (), saved.dtype).then(KINDS["scalar"].from_host)
    return planned if wanted is None else planned.then(type(leaf))


def plan_numpy(stored: StoredArrays, saved: SavedLeaf, shape: Shape | None, dtype: DTypeLike | None) -> Planned:
    """Plans the restore of a numpy array on every process."""
    _check_shape(stored, saved, shape, strict=True)
    _check_dtype(saved, dtype)
    return _host_values(stored, saved, saved.data_shape, np.dtype(dtype or saved.dtype))


def _host_values(
    stored: StoredArrays, saved: SavedLeaf, shape: Shape, dtype: np.dtype[np.generic], wrap: bool = False
) -> Planned:
    """Plans the values of a leaf in this process's memory; key data for PRNG keys."""
    if saved.encoding == VALUE:
        value = np.asarray(saved.value)
        if type(saved.value) is int and jnp.issubdtype(dtype, jnp.integer):
            check_fits(f"leaf {saved.name!r}", value, dtype)
        return _known(value.astype(dtype))
    if saved.encoding == NOTHING:
        return _known(np.zeros(shape, dtype))
    leaf = stored.leaf(saved.name)
    if saved.encoding == BYTES:
        request = LeafRequest(leaf, leaf.shape, leaf.dtype, None)
        return Planned(request, lambda data: data.view(saved.dtype).reshape(saved.shape).astype(dtype, copy=False))
    return Planned(LeafRequest(leaf, leaf.shape, dtype, None, wrap), lambda values: values)


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

    Args:
      stored: the item.
      name: parameter name.
      shape: requested shape; None means the stored shape.
      dtype: requested dtype, which may be a PRNG key dtype; None means the stored dtype.
      placement: requested placement; None is accepted for numbers only.
      strict: reject a shape that differs from the stored one. If False, truncate the array or pad it with zeros.
      any_cast: cast as numpy does, even if more than precision is lost.

    Raises:
      CheckpointError: the shapes or kinds of dtypes differ, or no sharding is given or known.
    """
    saved = stored.saved(name)
    sharding = _sharding_of(placement)
    if sharding is None and saved.encoding != VALUE:
        raise CheckpointError(
            f"{stored.directory}: parameter {name!r}: no sharding given, and none was saved that fits these "
            f"{jax.device_count()} devices. Pass a ShapeDtypeStruct with a sharding."
        )
    _check_dtype(saved, dtype, any_cast)
    impl = _impl_of(dtype) if is_key_dtype(dtype) else saved.impl if dtype is None else None
    wanted = None if shape is None else tuple(shape)
    data_shape = saved.data_shape if wanted is None else key_shape(wanted, impl) if impl else wanted
    local = process_count() > 1 and sharding is not None and sharding.is_fully_addressable
    _check_shape(stored, saved, data_shape, strict or local)
    final_shape = data_shape if impl is None else keys_of(data_shape, impl)
    final_dtype = saved.dtype if impl is not None or dtype is None else np.dtype(dtype)
    if placement is None or sharding is None:
        return _host_values(stored, saved, data_shape, final_dtype, any_cast).then(jnp.asarray)
    if impl is not None and placement is sharding:
        placement = sharding = cut_to_rank(sharding, len(final_shape))
    _check_sharding(name, final_shape, sharding)
    _check_x64(name, final_dtype, any_cast)
    readable = _readable(sharding)
    # Local arrays are on a different device in each process, but all processes must make the same plan.
    if local or saved.encoding in (VALUE, NOTHING, BYTES):
        values = _host_values(stored, saved, data_shape, final_dtype, any_cast)
        planned = values.then(functools.partial(_from_host, sharding=readable))
    else:
        request = LeafRequest(stored.leaf(name), data_shape, final_dtype, readable, wrap=any_cast)
        planned = Planned(request, lambda array: array)
    if impl is not None:
        planned = planned.then(functools.partial(_wrap_keys, impl=impl, sharding=readable))
    return planned.then(functools.partial(_placed, placement=placement))


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
        raise CheckpointError(
            f"{stored.directory}: parameter {saved.name!r} has the stored shape {found}, but {tuple(wanted)} was requested. "
            "Request the stored shape, or set strict=False (in ArraysRestore, or in Orbax's ArrayRestoreArgs) to truncate "
            "the array or pad it with zeros."
        )


def _check_sharding(name: str, shape: Shape, sharding: Sharding) -> None:
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise CheckpointError(
            f"leaf {name!r} of shape {shape} cannot have the requested sharding: {error} Replicate that dimension, or "
            "shard one that the axes divide."
        ) from error


def _check_x64(name: str, dtype: np.dtype[np.generic], any_cast: bool) -> None:
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
    return jax.make_array_from_callback(values.shape, sharding, lambda index: np.array(values[index]))


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
    if stored.manifest is not None and stored.manifest.skeleton is not None:
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
