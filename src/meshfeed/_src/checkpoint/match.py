"""Matches the leaves that are requested with those that are stored: what to read of each, and what to convert it to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from meshfeed._src.arrays.reshard import key_impl
from meshfeed._src.base.coordination import process_count
from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.types import PyTree
from meshfeed._src.checkpoint.casts import check_cast, check_fits, check_python, may_overflow, python_type_of
from meshfeed._src.checkpoint.layout import LoadPlan, Shape
from meshfeed._src.checkpoint.leaves import (
    BYTES,
    KINDS,
    NOTHING,
    PYTHON,
    VALUE,
    Leaf,
    SavedLeaf,
    is_key_dtype,
    key_shape,
    keys_of,
    kind_of,
    leaf_name,
    native,
    tree_of,
)
from meshfeed._src.checkpoint.options import short
from meshfeed._src.checkpoint.place import (
    Placement,
    from_bytes,
    from_host,
    in_default_memory,
    sharding_of,
    uncommitted,
    with_placement,
    wrap_keys,
)
from meshfeed._src.checkpoint.plan import LeafRead, PlannedLeaf, RestorePlan
from meshfeed._src.checkpoint.stored import StoredArrays, StoredShapeError, abstract_tree_of, cut_to_rank


@runtime_checkable
class Shaped(Protocol):
    """An array, a numpy scalar, or the placeholder of one in an abstract tree."""

    shape: Shape
    dtype: np.dtype[np.generic]


def match_tree(stored: StoredArrays, abstract_tree: PyTree, *, partial: bool, strict: bool) -> RestorePlan:
    """Plans the restore of an abstract tree, or of everything as it was saved if that is None; see ``ArraysRestore``.

    Raises:
      CheckpointError: the trees differ; the message names the leaves.
    """
    wanted = abstract_tree_of(stored) if abstract_tree is None else abstract_tree
    flat, structure = jax.tree_util.tree_flatten_with_path(wanted)
    names = _names(stored)
    leaves = [(names.get(name := leaf_name(path), name), leaf) for path, leaf in flat]
    _compare(stored, leaves, partial)
    if stored.is_plain:  # plain Orbax records shapes only with the arrays
        stored.open_soon(name for name, _ in leaves if stored.kinds.get(name) not in (None, "str"))
    return RestorePlan(stored, [_match_leaf(stored, name, leaf, strict) for name, leaf in leaves], structure)


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


def _match_leaf(stored: StoredArrays, name: str, leaf: Leaf, strict: bool) -> PlannedLeaf:
    """Plans one leaf of an abstract tree; ``...`` omits the leaf."""
    if leaf is ...:
        return PlannedLeaf(value=...)
    kind, saved_kind = kind_of(leaf), stored.kinds[name]
    # For a number whose type plain Orbax did not record, any object will do.
    describes = kind is not None or isinstance(leaf, Shaped) or saved_kind == "scalar"
    if isinstance(leaf, type) or not describes:
        raise CheckpointError(
            f"leaf {name!r}: a {type(leaf).__name__} does not describe a leaf. Pass an array, a jax.ShapeDtypeStruct, or "
            "a number or text like the one saved."
        )
    saved = stored.saved(name)
    if saved_kind in ("str", "bytes") or not isinstance(leaf, Shaped):
        return _match_python(saved, leaf)
    placement = _placement(leaf)
    if placement is None and saved_kind != "jax" and kind not in _HOST_KINDS:
        kind = saved_kind if saved_kind in _HOST_KINDS else "numpy"  # given only as a shape: as it was saved
    if kind in _HOST_KINDS:
        _check_shape(stored, saved, leaf.shape, strict=True)
        _check_dtype(saved, leaf.dtype)
        values = _host_values(saved, saved.data_shape, np.dtype(leaf.dtype))
        return values.followed_by(KINDS[kind].from_host)
    plan = match_array(stored, name, leaf.shape, leaf.dtype, placement or saved.saved_sharding(), strict=strict)
    # With one device, it makes no difference.
    return plan.followed_by(uncommitted) if jax.device_count() > 1 and not getattr(leaf, "committed", True) else plan


def _placement(leaf: Leaf) -> Placement | None:
    form = getattr(leaf, "format", None)
    if isinstance(leaf, jax.ShapeDtypeStruct) and getattr(form, "layout", None) is not None:
        return form
    return getattr(leaf, "sharding", None)


def _match_python(saved: SavedLeaf, leaf: Leaf) -> PlannedLeaf:
    """Plans a Python number, text or bytes; for any other object, the stored number is restored as it is."""
    if saved.data_shape != ():
        raise CheckpointError(
            f"leaf {saved.name!r} is stored as an array of shape {saved.data_shape}, but {type(leaf).__name__} was "
            "requested. Pass an array or a jax.ShapeDtypeStruct of that shape."
        )
    is_value, is_python = saved.encoding == VALUE, isinstance(leaf, PYTHON)
    found = type(saved.value) if is_value else python_type_of(saved.dtype)
    if is_python or found in (str, bytes):
        check_python(f"leaf {saved.name!r}", found, type(leaf))
    plan = PlannedLeaf(value=saved.value)
    if not is_value:
        plan = _host_values(saved, (), saved.dtype).followed_by(KINDS["scalar"].from_host)
    return plan.followed_by(functools.partial(_as_python, name=saved.name, kind=type(leaf))) if is_python else plan


def _as_python(value: Leaf, name: str, kind: Callable[[Leaf], Leaf]) -> Leaf:
    """Returns a Python value as another type of number or text."""
    try:
        return kind(value)
    except Exception as error:  # of a subclass of a Python type, such as an enum
        raise CheckpointError(
            f"leaf {name!r} is {short(value)}, which is not of the requested type: {error}. Request "
            f"{type(value).__name__}."
        ) from error


def _host_values(saved: SavedLeaf, shape: Shape, dtype: np.dtype[np.generic], any_cast: bool = False) -> PlannedLeaf:
    """Plans the values of a leaf in this process's memory; key data for PRNG keys."""
    if saved.encoding == VALUE:
        value = np.asarray(saved.value)
        if value.dtype == object or may_overflow(value.dtype, dtype):  # an int of more than 64 bits is an object
            check_fits(f"leaf {saved.name!r}", value, dtype)
        return PlannedLeaf(value=value.astype(dtype))
    if saved.encoding == NOTHING:
        return PlannedLeaf(value=np.zeros(shape, dtype))
    if saved.encoding == BYTES:
        read = LeafRead(saved, saved.stored_dtype, LoadPlan(None, saved.stored_shape))
        return PlannedLeaf(read).followed_by(functools.partial(from_bytes, saved=saved, dtype=dtype))
    return PlannedLeaf(LeafRead(saved, dtype, LoadPlan(None, shape), any_cast))


def match_array(
    stored: StoredArrays,
    name: str,
    shape: Shape | None,
    dtype: DTypeLike | None,
    placement: Placement | None,
    *,
    strict: bool = True,
    any_cast: bool = False,
) -> PlannedLeaf:
    """Plans a ``jax.Array``.

    None as shape or dtype means the stored one; None as placement is accepted for numbers only. Unless ``strict``, an array
    of another shape is truncated or padded with zeros. ``any_cast`` casts as numpy does, even if more than precision is lost.

    Raises:
      CheckpointError: the shapes or kinds of dtypes differ, or no sharding is given or known.
    """
    saved, sharding = stored.saved(name), sharding_of(placement)
    _check_dtype(saved, dtype, any_cast)
    read_shape, read_dtype, impl = _stored_form(saved, shape, dtype)
    # Local arrays are on a different device in each process, but all processes must make the same plan. A process cannot
    # distinguish them from one array on the devices of a single process, for which the others pass the same sharding.
    local = process_count() > 1 and sharding is not None and _is_of_one_process(sharding)
    _check_shape(stored, saved, read_shape, strict or saved.encoding == BYTES)
    if placement is None or sharding is None:
        if saved.encoding != VALUE:
            raise CheckpointError(
                f"{stored.directory}: parameter {name!r}: no sharding given, and none was saved that fits these "
                f"{jax.device_count()} devices. Pass a ShapeDtypeStruct with a sharding."
            )
        return _host_values(saved, read_shape, read_dtype, any_cast).followed_by(jnp.asarray)
    if impl is not None and placement is sharding:
        placement = sharding = cut_to_rank(sharding, len(keys_of(read_shape, impl)))
    _check_sharding(name, keys_of(read_shape, impl), sharding)
    _check_x64(name, read_dtype, any_cast)
    readable = in_default_memory(sharding)
    if local or saved.encoding in (VALUE, NOTHING, BYTES):
        values = _host_values(saved, read_shape, read_dtype, any_cast)
        plan = values.followed_by(functools.partial(from_host, sharding=readable))
    else:
        plan = PlannedLeaf(LeafRead(saved, read_dtype, LoadPlan(readable, read_shape), any_cast))
    if impl is not None:
        plan = plan.followed_by(functools.partial(wrap_keys, impl=impl, sharding=readable))
    return plan.followed_by(functools.partial(with_placement, placement=placement))


def _is_of_one_process(sharding: Sharding) -> bool:
    return len({device.process_index for device in sharding.device_set}) == 1


def _stored_form(
    saved: SavedLeaf, shape: Shape | None, dtype: DTypeLike | None
) -> tuple[Shape, np.dtype[np.generic], str | None]:
    """Returns the shape and dtype to read, and the implementation if the values read are the data of PRNG keys."""
    impl = _impl_of(dtype) if is_key_dtype(dtype) else saved.impl if dtype is None else None
    read_dtype = saved.dtype if impl is not None or dtype is None else np.dtype(dtype)
    return saved.data_shape if shape is None else key_shape(tuple(shape), impl), read_dtype, impl


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
