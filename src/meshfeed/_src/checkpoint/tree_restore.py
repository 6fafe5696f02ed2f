"""Restores whole trees: matches requested leaves with stored ones.

Converts a request for a leaf to what must be read, and the result of reading to the leaf.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from meshfeed._src.arrays.reshard import key_impl, without_ambient_mesh
from meshfeed._src.base.coordination import process_count
from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.arguments import RestoreOptions
from meshfeed._src.checkpoint.engine import LeafRequest, restore_leaves
from meshfeed._src.checkpoint.leaves import dtype_of, is_key, leaf_name, python_value, rebuild_sharding, tree_of
from meshfeed._src.checkpoint.read import check_cast, check_fits, check_python, python_type_of
from meshfeed._src.checkpoint.stored import StoredArrays, key_dtype, key_shape

Finish = Callable[[Any], Any]


def array_wanted(
    stored: StoredArrays,
    name: str,
    *,
    shape: Any,
    dtype: Any,
    sharding: Any,
    strict: bool = True,
    any_cast: bool = False,
) -> tuple[LeafRequest | None, Finish]:
    """Returns what to read for a ``jax.Array``, and a function that finishes it.

    Args:
      stored: the item.
      name: parameter name.
      shape: requested shape; None means the stored shape.
      dtype: requested dtype, which may be a PRNG key dtype; None means the stored dtype.
      sharding: a Sharding of any memory kind, or a Format.
      strict: reject a shape that differs from the stored one. If False, truncate the array or pad it with zeros.
      any_cast: cast as numpy does, even if more than precision is lost.

    Returns:
      the request (None if nothing is read, because the leaf is empty or its value is in the manifest), and a function
      that converts the request's result to the leaf.

    Raises:
      CheckpointError: the shapes or kinds of dtypes differ, or no sharding is given or known.
    """
    entry = None if stored.manifest is None else stored.manifest.leaves.get(name)
    if entry is not None and "value" in entry:
        value = _number(stored, name, python_value(entry), shape, dtype)
        return None, lambda _: _from_host(value, sharding)
    final = getattr(sharding, "sharding", sharding)  # the sharding of a Format
    if final is None:
        raise CheckpointError(
            f"{stored.directory}: parameter {name!r}: no sharding given, and none was saved that fits these "
            f"{jax.device_count()} devices. Give a ShapeDtypeStruct with a sharding."
        )
    if entry is not None and entry.get("stored") == "nothing":
        _check_shape(stored, name, tuple(entry["shape"]), shape, strict)
        _check_cast(name, dtype_of(entry), dtype, any_cast, entry.get("impl"))
        _check_sharding(name, tuple(entry["shape"]) if shape is None else tuple(shape), final)
        impl = entry.get("impl")
        if impl is not None and (dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key)):
            data = np.zeros(key_shape(tuple(entry["shape"]) if shape is None else tuple(shape), impl), dtype_of(entry))
            return None, lambda _: jax.device_put(jax.random.wrap_key_data(jnp.asarray(data), impl=impl), sharding)
        empty = np.zeros(tuple(entry["shape"]) if shape is None else tuple(shape), dtype or dtype_of(entry))
        return None, lambda _: _from_host(empty, sharding)
    if process_count() > 1 and final.is_fully_addressable:
        return _local_wanted(stored, name, shape, dtype, sharding, any_cast)
    leaf = stored.leaf(name)
    _check_cast(name, leaf.dtype, dtype, any_cast, leaf.impl)
    key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    impl = None
    if key or (dtype is None and leaf.impl is not None):
        impl = leaf.impl or _impl_of(dtype)
    if impl is not None:
        logical = leaf.shape[: len(leaf.shape) - len(key_shape((), impl))] if shape is None else tuple(shape)
        _check_shape(stored, name, leaf.shape, key_shape(logical, impl), strict)
        if final is sharding:
            sharding = final = cut_to_rank(final, len(logical))
        _check_sharding(name, logical, final)
        request = LeafRequest(leaf, key_shape(logical, impl), leaf.dtype, _readable(final))
        return request, lambda data: _placed(_wrap_keys(data, impl, _readable(final)), sharding)
    _check_shape(stored, name, leaf.shape, shape, strict)
    wanted, final_dtype = leaf.shape if shape is None else tuple(shape), np.dtype(dtype or leaf.dtype)
    _check_sharding(name, wanted, final)
    if not any_cast and jax.dtypes.canonicalize_dtype(final_dtype) != final_dtype:
        raise CheckpointError(
            f"leaf {name!r} is wanted as {final_dtype.name}, which JAX holds with jax_enable_x64 alone. Switch that on, "
            f"or ask for {jax.dtypes.canonicalize_dtype(final_dtype).name}, or for a numpy array."
        )
    request = LeafRequest(leaf, wanted, final_dtype, _readable(final), wrap=any_cast)
    return request, lambda array: _placed(array, sharding)


def cut_to_rank(sharding: Any, rank: int) -> Any:
    """Truncates a spec to ``rank``: Orbax records the sharding of a PRNG key's data, which has more dimensions."""
    if not isinstance(sharding, jax.sharding.NamedSharding) or any(sharding.spec[rank:]):
        return sharding
    spec = jax.sharding.PartitionSpec(*sharding.spec[:rank])
    return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _local_wanted(
    stored: StoredArrays, name: str, shape: Any, dtype: Any, sharding: Any, any_cast: bool
) -> tuple[LeafRequest | None, Finish]:
    # Each process wants the array on its own device, so their shardings differ, but all processes must make the same
    # plan. The values are therefore read like those of a host array.
    leaf = stored.leaf(name)
    _check_cast(name, leaf.dtype, dtype, any_cast, leaf.impl)
    key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    impl = (leaf.impl or _impl_of(dtype)) if key else leaf.impl if dtype is None else None
    wanted = None if shape is None else key_shape(tuple(shape), impl) if impl else tuple(shape)
    _check_shape(stored, name, leaf.shape, wanted, True)
    if impl is not None:
        request = LeafRequest(leaf, leaf.shape, leaf.dtype, None)
        return request, lambda data: jax.device_put(jax.random.wrap_key_data(jnp.asarray(data), impl=impl), sharding)
    request = LeafRequest(leaf, leaf.shape, np.dtype(dtype or leaf.dtype), None, wrap=any_cast)
    return request, lambda values: jax.device_put(values, sharding)


def host_wanted(
    stored: StoredArrays, name: str, *, shape: Any = None, dtype: Any = None
) -> tuple[LeafRequest | None, Finish]:
    """Returns what to read for a numpy array on every process, like :func:`array_wanted`."""
    entry = None if stored.manifest is None else stored.manifest.leaves.get(name)
    if entry is not None and "value" in entry:
        value = _number(stored, name, python_value(entry), shape, dtype)
        return None, lambda _: value
    if entry is not None and "dtype" in entry and entry["kind"] != "jax":
        saved, saved_shape = dtype_of(entry), tuple(entry["shape"])
        _check_shape(stored, name, saved_shape, shape, True)
        _check_cast(name, saved, dtype)
        if entry.get("stored") == "nothing":
            return None, lambda _: np.zeros(saved_shape, dtype or saved)
        leaf = stored.leaf(name)
        if entry.get("stored") == "bytes":
            request = LeafRequest(leaf, leaf.shape, leaf.dtype, None)
            return request, lambda raw: raw.view(saved).reshape(saved_shape).astype(dtype or saved, copy=False)
        return LeafRequest(leaf, leaf.shape, np.dtype(dtype or saved), None), lambda values: values
    if entry is not None and entry.get("stored") == "nothing":
        _check_shape(stored, name, tuple(entry["shape"]), shape, True)
        _check_cast(name, dtype_of(entry), dtype, impl=entry.get("impl"))
        return None, lambda _: np.zeros(tuple(entry["shape"]), dtype or dtype_of(entry))
    leaf = stored.leaf(name)
    _check_shape(stored, name, leaf.shape, shape, True)
    _check_cast(name, leaf.dtype, dtype, impl=leaf.impl)
    return LeafRequest(leaf, leaf.shape, np.dtype(dtype or leaf.dtype), None), lambda values: values


def _number(stored: StoredArrays, name: str, value: Any, shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Returns a stored Python number as a 0-d array."""
    if isinstance(value, str | bytes):
        raise CheckpointError(f"leaf {name!r} is stored as {type(value).__name__}, wanted is an array. Ask for text.")
    _check_shape(stored, name, (), shape, True)
    if dtype is None:
        return np.asarray(value)
    python = type(value)
    _check_cast(name, np.dtype(python), dtype)  # by type, not by value: numpy makes a huge int an object
    if python is int and jnp.issubdtype(dtype, jnp.integer):
        check_fits(f"leaf {name!r}", np.asarray(value), dtype)
    return np.asarray(value).astype(dtype)


def _check_cast(name: str, found: Any, wanted: Any, any_cast: bool = False, impl: str | None = None) -> None:
    """Rejects PRNG keys of a different implementation, and whatever ``check_cast`` rejects."""
    if wanted is None:
        return
    if jnp.issubdtype(wanted, jax.dtypes.prng_key):
        if (impl is None and found != np.uint32) or impl not in (None, _impl_of(wanted)):
            raise CheckpointError(
                f"leaf {name!r} is stored as {impl or np.dtype(found).name}, wanted are PRNG keys {_impl_of(wanted)}. "
                f"Ask for what was saved: {f'keys of jax.random.key(…, impl={impl!r})' if impl else 'that dtype'}."
            )
    elif impl is not None and np.dtype(wanted) != found:
        raise CheckpointError(
            f"leaf {name!r} is stored as PRNG keys {impl}, wanted is {np.dtype(wanted).name}. Ask for keys "
            f"(jax.random.key(…, impl={impl!r})), or for their {np.dtype(found).name} data."
        )
    elif not any_cast:
        check_cast(f"leaf {name!r}", found, wanted)


def saved_sharding(stored: StoredArrays, name: str) -> Any:
    """Returns a leaf's saved sharding on this job's devices; otherwise device 0 in a single-process job, or None."""
    entry = None if stored.manifest is None else stored.manifest.leaves.get(name)
    sharding = rebuild_sharding(entry.get("sharding")) if entry else None
    if sharding is None and process_count() == 1:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return sharding


def _check_sharding(name: str, shape: tuple[int, ...], sharding: Any) -> None:
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise CheckpointError(
            f"leaf {name!r} of shape {shape} cannot have the sharding that is wanted: {error} Replicate that dimension, "
            "or shard one that the axes divide."
        ) from error


def _check_shape(stored: StoredArrays, name: str, found: tuple[int, ...], wanted: Any, strict: bool) -> None:
    if wanted is None or tuple(wanted) == found:
        return
    if strict or len(tuple(wanted)) != len(found):
        raise CheckpointError(
            f"{stored.directory}: parameter {name!r} has the stored shape {found}, wanted is {tuple(wanted)}. Ask for "
            "the stored shape, or set strict=False (in ArraysRestore, or in Orbax's ArrayRestoreArgs) to cut it or "
            "fill it with zeros."
        )


def _impl_of(dtype: Any) -> str:
    return str(key_impl(dtype))  # as manifests hold it


def _default_kind(sharding: Any) -> str | None:
    return next(iter(sharding.device_set)).default_memory().kind


def _readable(sharding: Any) -> Any:
    """Returns the same sharding in the devices' default memory, where collectives can run."""
    if getattr(sharding, "memory_kind", None) in (None, _default_kind(sharding)):
        return sharding
    return sharding.with_memory_kind(_default_kind(sharding))


@functools.lru_cache(maxsize=64)
def _wrapper(impl: str, sharding: Any) -> Any:
    return jax.jit(functools.partial(jax.random.wrap_key_data, impl=impl), out_shardings=sharding)


def _wrap_keys(data: jax.Array, impl: str, sharding: Any) -> jax.Array:
    # A process without a device of this sharding cannot run the compiled call.
    if not data.addressable_shards:
        return data
    return _wrapper(impl, sharding)(data)


def _placed(array: jax.Array, sharding: Any) -> jax.Array:
    """Returns ``array`` with exactly the requested sharding, memory kind and layout."""
    final = getattr(sharding, "sharding", sharding)
    if final is not sharding or _readable(final) is not final:
        return jax.device_put(array, sharding)
    if array.sharding == final or is_key(array):
        return array
    # The compiler returns PartitionSpec('a') for a requested ('a', None): the same layout, but they compare unequal.
    shards = [shard.data for shard in array.addressable_shards]
    if not shards:
        return jax.make_array_from_single_device_arrays(array.shape, final, [], dtype=array.dtype)
    return jax.make_array_from_single_device_arrays(array.shape, final, shards)


def _from_host(value: np.ndarray[Any, Any], sharding: Any) -> Any:
    final = getattr(sharding, "sharding", sharding)
    if final is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, final, lambda index: value[index])


_PYTHON = (bool, int, float, complex, str, bytes)
_PLAIN_KINDS = {"jax.Array": "jax", "np.ndarray": "numpy", "scalar": "scalar", "string": "str"}


def stored_kinds(stored: StoredArrays) -> dict[str, str]:
    """Returns parameter name → kind of leaf, for all leaves that have content."""
    manifest = stored.manifest
    if manifest is not None and manifest.skeleton is not None:
        return {name: entry["kind"] for name, entry in manifest.leaves.items()}
    found = {}
    for name, entry in stored.plain_leaves().items():
        kind = _PLAIN_KINDS.get(entry["value_type"])
        if kind is not None:
            found[name] = kind
    return found


def restore_tree(
    stored: StoredArrays,
    abstract_tree: Any,
    options: RestoreOptions,
    agreement: Agreement,
    *,
    partial: bool = False,
    strict: bool = True,
) -> Any:
    """Restores ``abstract_tree`` from an item. Every process of the job must call it with the same tree.

    Args:
      stored: the item.
      abstract_tree: see :class:`~meshfeed.checkpoint.ArraysRestore`; None restores everything as it was saved.
      options: how to restore.
      agreement: the agreement of this restore.
      partial: ignore stored leaves that are not requested.
      strict: reject shapes that differ from the stored ones.

    Raises:
      CheckpointError: the trees differ (the message names the leaves), or a host could not read.
    """

    def plan() -> tuple[list[tuple[LeafRequest | None, Finish]], Any]:
        wanted = abstract_tree_of(stored) if abstract_tree is None else abstract_tree
        flat, structure = jax.tree_util.tree_flatten_with_path(wanted)
        kinds = stored_kinds(stored)
        names = [leaf_name(path) for path, _ in flat]
        _compare(stored, names, [leaf for _, leaf in flat], kinds, partial)
        if stored.manifest is None:  # plain Orbax records shapes only with the arrays
            stored.open_soon(name for name in names if kinds.get(name) not in (None, "str"))
        return [
            _want(stored, name, leaf, kinds, strict) for name, (_, leaf) in zip(names, flat, strict=True)
        ], structure

    with without_ambient_mesh():  # leaves may be on devices outside the caller's jax.set_mesh
        wanted, structure = agreement.attempt(plan)
        requests = [request for request, _ in wanted if request is not None]
        results = iter(restore_leaves(stored, requests, options, agreement))
        leaves = [finish(None if request is None else next(results)) for request, finish in wanted]
    return jax.tree_util.tree_unflatten(structure, leaves)


def _compare(stored: StoredArrays, names: list[str], leaves: list[Any], kinds: dict[str, str], partial: bool) -> None:
    missing = [name for name, leaf in zip(names, leaves, strict=True) if name not in kinds and leaf is not ...]
    extra = [] if partial else sorted(set(kinds) - set(names))
    if missing or extra:
        remedies = ["Take what is not stored out of the tree, and add it after restoring."] if missing else []
        if extra:
            remedies.append(
                "Put ... in the tree for what is not wanted, or use ArraysRestore(…, partial_restore=True)."
            )
        raise CheckpointError(
            f"{stored.directory}: the tree that is wanted and the stored one differ: wanted but not stored "
            f"{_some(missing)}; stored but not wanted {_some(extra)}. {' '.join(remedies)}"
        )


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    shown = ", ".join(repr(name) for name in names[:8])
    return shown if len(names) <= 8 else f"{shown}, … ({len(names)} in all)"


def _want(
    stored: StoredArrays, name: str, leaf: Any, kinds: dict[str, str], strict: bool
) -> tuple[LeafRequest | None, Finish]:
    if leaf is ...:
        return None, lambda _: ...
    kind = kinds[name]
    if isinstance(leaf, type) or not (hasattr(leaf, "shape") or isinstance(leaf, _PYTHON) or kind == "scalar"):
        raise CheckpointError(
            f"leaf {name!r}: a {type(leaf).__name__} does not say what is wanted. Give an array, a "
            "jax.ShapeDtypeStruct, or a number or text like the one saved."
        )
    if kind in ("str", "bytes"):
        text = _text(stored, name)
        check_python(f"leaf {name!r}", type(text), type(leaf))
        return None, lambda _: text
    if isinstance(leaf, np.generic):  # before the Python types, because np.float64 is a float
        request, finish = host_wanted(stored, name, shape=(), dtype=leaf.dtype)
        return request, lambda values: finish(values)[()]
    if isinstance(leaf, _PYTHON) or (kind == "scalar" and not hasattr(leaf, "shape")):
        return _python_wanted(stored, name, leaf)
    if isinstance(leaf, np.ndarray):
        return host_wanted(stored, name, shape=leaf.shape, dtype=leaf.dtype)
    sharding = _wanted_sharding(leaf)
    if sharding is None and kind not in ("jax",):  # a host value, given only as a shape: as it was saved
        request, finish = host_wanted(stored, name, shape=leaf.shape, dtype=leaf.dtype)
        return request, (lambda values: finish(values)[()]) if kind == "numpy_scalar" else finish
    if sharding is None:
        sharding = saved_sharding(stored, name)
    return array_wanted(stored, name, shape=leaf.shape, dtype=leaf.dtype, sharding=sharding, strict=strict)


def _wanted_sharding(leaf: Any) -> Any:
    format_ = getattr(leaf, "format", None)
    if isinstance(leaf, jax.ShapeDtypeStruct) and format_ is not None and getattr(format_, "layout", None) is not None:
        return format_
    return getattr(leaf, "sharding", None)


def _text(stored: StoredArrays, name: str) -> Any:
    entry = None if stored.manifest is None else stored.manifest.leaves.get(name)
    if entry is not None and "value" in entry:
        return python_value(entry)
    texts = json.loads((stored.directory / "_strings.json").read_text())
    return texts[name]


def _python_wanted(stored: StoredArrays, name: str, leaf: Any) -> tuple[LeafRequest | None, Finish]:
    entry = None if stored.manifest is None else stored.manifest.leaves.get(name)
    wanted = type(leaf) if isinstance(leaf, _PYTHON) else None
    if entry is not None and "value" in entry:
        value = python_value(entry)
        if wanted is None or type(value) is wanted:
            return None, lambda _: value
        check_python(f"leaf {name!r}", type(value), wanted)
        return None, lambda _: wanted(value)
    request, finish = host_wanted(stored, name)
    if entry is not None and "dtype" in entry:
        shape, dtype = tuple(entry.get("data_shape", entry["shape"])), dtype_of(entry)
    else:
        shape, dtype = stored.leaf(name).shape, stored.leaf(name).dtype
    if shape != ():
        raise CheckpointError(
            f"leaf {name!r} is stored as an array of shape {shape}, wanted is {type(leaf).__name__}. Give an array or "
            "a jax.ShapeDtypeStruct of that shape."
        )
    if wanted is None:
        return request, lambda values: finish(values).item()
    check_python(f"leaf {name!r}", python_type_of(dtype), wanted)
    return request, lambda values: wanted(finish(values).item())


def abstract_tree_of(stored: StoredArrays) -> Any:
    """Returns the saved tree with a description at each leaf; passing it to a restore restores everything as it was.

    Arrays become ``jax.ShapeDtypeStruct``, with the saved sharding if this job has as many devices. Numpy values become
    placeholders of the same shape and dtype. Numbers and text are themselves.
    """
    manifest = stored.manifest
    if manifest is not None and manifest.skeleton is not None:
        return tree_of(manifest.skeleton, lambda name: _abstract(stored, name, manifest.leaves[name]))
    kinds = stored_kinds(stored)
    # Use Orbax's own description of the tree, to return the same containers as Orbax.
    arrays = ocp.type_handlers.ArrayHandler(metadata_key=stored.metadata_key)
    orbax = ocp.PyTreeCheckpointHandler(type_handler_registry=type_handlers(arrays))
    plain = orbax.metadata(stored.directory).tree
    return jax.tree_util.tree_map_with_path(
        lambda path, described: _abstract_plain(stored, leaf_name(path), kinds[leaf_name(path)], described), plain
    )


def type_handlers(arrays: ocp.type_handlers.ArrayHandler) -> Any:
    """Returns an Orbax registry of type handlers that uses ``arrays`` for ``jax.Array``."""
    handlers = ocp.type_handlers
    return handlers.create_type_handler_registry(
        (int, handlers.ScalarHandler()),
        (float, handlers.ScalarHandler()),
        (np.ndarray, handlers.NumpyHandler()),
        (jax.Array, arrays),
        (str, handlers.StringHandler()),
    )


def _abstract(stored: StoredArrays, name: str, entry: dict[str, Any]) -> Any:
    kind = entry["kind"]
    if "value" in entry:
        return python_value(entry)
    shape, dtype = tuple(entry["shape"]), dtype_of(entry)
    if kind == "numpy":
        # broadcast_to gives the shape without allocating it.
        return np.broadcast_to(np.zeros((), dtype), shape)
    if kind == "numpy_scalar":
        return np.zeros((), dtype)[()]
    if "impl" in entry:
        dtype = key_dtype(entry["impl"])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=saved_sharding(stored, name))


def _abstract_plain(stored: StoredArrays, name: str, kind: str, described: Any) -> Any:
    if kind == "str":
        return ""
    leaf = stored.leaf(name)
    if kind == "numpy":
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    if kind == "scalar":
        return np.zeros((), leaf.dtype).item()
    shape, dtype = leaf.shape, leaf.dtype
    if leaf.impl is not None:
        dtype = key_dtype(leaf.impl)
        shape = shape[: len(shape) - len(key_shape((), leaf.impl))]
    sharding = _plain_sharding(described, len(shape)) or saved_sharding(stored, name)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _plain_sharding(described: Any, rank: int) -> Any:
    """Returns the sharding that plain Orbax recorded; None if this job's devices do not allow it on every process."""
    try:
        sharding = described.sharding.to_jax_sharding()
    except Exception:  # none was recorded, or it is for a different topology, for which Orbax raises various errors
        return None
    if len({device.process_index for device in sharding.device_set}) < process_count():
        return None
    return cut_to_rank(sharding, rank)
