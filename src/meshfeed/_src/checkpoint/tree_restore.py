"""Restores whole trees: matches requested leaves with stored ones."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from meshfeed._src.arrays.reshard import without_ambient_mesh
from meshfeed._src.base.coordination import process_count
from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.casts import check_python, python_type_of
from meshfeed._src.checkpoint.engine import LeafRequest, restore_leaves
from meshfeed._src.checkpoint.leaves import dtype_of, leaf_name, python_value, tree_of
from meshfeed._src.checkpoint.options import RestoreOptions
from meshfeed._src.checkpoint.stored import StoredArrays, key_dtype, key_shape
from meshfeed._src.checkpoint.want import Finish, array_wanted, cut_to_rank, host_wanted, saved_sharding

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
