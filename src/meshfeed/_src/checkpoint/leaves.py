"""Maps the leaves of a tree to what Orbax stores, and records what is needed to restore exactly the same leaves.

Most arrays are stored unchanged, and plain Orbax reads them. TensorStore lacks some narrow dtypes; their values are
stored as equal numbers of a different dtype, so plain Orbax returns the right values if asked for the narrow dtype. The
manifest records the original dtype. Empty arrays are not stored at all.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.core import Tracer

from meshfeed._src.arrays.reshard import bit_width, without_ambient_mesh
from meshfeed._src.base.coordination import process_count
from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.exact_json import decode_value, encode_value

CARRIERS = {"bits": np.uint8, "int8": np.int8, "float16": np.float16}
"""The manifest's name for each way of storing a leaf in a different dtype, and that dtype."""

_PYTHON = {"bool": bool, "int": int, "float": float, "complex": complex, "str": str, "bytes": bytes}


def leaf_name(path: tuple[Any, ...]) -> str:
    """Returns Orbax's name of a leaf: the keys on its path, joined by dots."""
    return ".".join(str(_key(entry)) for entry in path)


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


@functools.lru_cache(maxsize=64)
def carrier_of(dtype: Any) -> np.dtype[Any]:
    """Returns the dtype in which values of ``dtype`` are stored: ``dtype`` itself unless TensorStore lacks it.

    In that case narrow integers are stored as uint8 or int8 and narrow floats as float16, which represent every value.
    """
    dtype = np.dtype(dtype)
    if not _is_extension(dtype):
        return dtype
    try:
        ts.dtype(dtype.name)
    except ValueError:
        if not jnp.issubdtype(dtype, jnp.integer):
            return np.dtype(np.float16)
        return np.dtype(np.int8 if int(jnp.iinfo(dtype).min) < 0 else np.uint8)
    return dtype


def _is_extension(dtype: np.dtype[Any]) -> bool:
    return dtype.type.__module__.split(".")[0] == "ml_dtypes"


def _dtype_text(dtype: np.dtype[Any]) -> Any:
    if dtype.names:
        return dtype.descr
    plain = _is_extension(dtype) or (dtype.kind in "biufc" and dtype.isnative and dtype.itemsize <= 16)
    return dtype.name if plain and dtype.name != "longdouble" else dtype.str


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is an array of typed PRNG keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def stored_as(dtype: Any) -> dict[str, str]:
    """Returns the manifest fields that describe the storage dtype; empty for most dtypes."""
    carrier = carrier_of(dtype)
    return {} if carrier == dtype else {"stored": next(name for name, held in CARRIERS.items() if held == carrier)}


@functools.lru_cache(maxsize=16)
def half_bits(dtype: Any) -> np.ndarray[Any, Any]:
    """Returns, for each bit pattern of a narrow float, the bits of the float16 that stores that value; uint16[n]."""
    codes = np.arange(1 << bit_width(dtype), dtype=np.uint8)
    values = codes.view(dtype)
    halves = values.astype(np.float16).view(np.uint16)
    # A cast would give all NaNs the same payload, so use the bit pattern itself as the payload.
    return np.where(np.isnan(values.astype(np.float32)), np.uint16(0x7E00) + codes, halves)


@functools.lru_cache(maxsize=16)
def _codes_by_half(dtype: Any) -> np.ndarray[Any, Any]:
    halves = half_bits(dtype)
    codes = np.zeros(1 << 16, np.uint8)
    codes[halves] = np.arange(halves.size, dtype=np.uint8)
    return codes


def numpy_to_stored(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Converts host values to the dtype in which they are stored."""
    carrier = carrier_of(array.dtype)
    if carrier == array.dtype:
        return array
    if carrier == np.float16:
        return half_bits(array.dtype)[array.view(np.uint8), ...].view(np.float16)  # `...`: a 0-d array stays one
    return array.astype(carrier)


def numpy_from_stored(values: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """Inverts :func:`numpy_to_stored`; also reads older versions, which stored narrow floats as their bits in uint8."""
    dtype, values = np.dtype(dtype), np.ascontiguousarray(values)
    if values.dtype == np.float16:
        return _codes_by_half(dtype)[values.view(np.uint16)].view(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return values.view(np.int8).astype(dtype)
    return values.view(dtype)


def describe_array(leaf: Any) -> dict[str, Any]:
    """Returns the manifest entry of a ``jax.Array``: dtype, logical shape, how it is stored, and its sharding."""
    entry: dict[str, Any] = {"kind": "jax", "shape": list(leaf.shape)}
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        entry |= {"dtype": data.dtype.name, "impl": str(jax.random.key_impl(leaf)), "data_shape": list(data.shape)}
    else:
        entry["dtype"] = np.dtype(leaf.dtype).name
        entry |= stored_as(leaf.dtype)
    if leaf.size == 0:
        entry["stored"] = "nothing"
    sharding = describe_sharding(leaf.sharding)
    return entry if sharding is None else {**entry, "sharding": sharding}


def describe_sharding(sharding: Any) -> dict[str, Any] | None:
    """Returns a NamedSharding as JSON, or None for any other sharding."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    spec = [list(part) if isinstance(part, tuple) else part for part in sharding.spec]
    return {
        "axis_names": list(sharding.mesh.axis_names),
        "axis_sizes": list(sharding.mesh.axis_sizes),
        "spec": spec,
        "memory_kind": sharding.memory_kind,
    }


def rebuild_sharding(entry: dict[str, Any] | None) -> jax.sharding.NamedSharding | None:
    """Returns a sharding like the saved one over this job's devices, or None if their number differs."""
    if entry is None or int(np.prod(entry["axis_sizes"])) != jax.device_count():
        return None
    auto = (jax.sharding.AxisType.Auto,) * len(entry["axis_names"])
    mesh = jax.make_mesh(tuple(entry["axis_sizes"]), tuple(entry["axis_names"]), axis_types=auto)
    spec = [tuple(part) if isinstance(part, list) else part for part in entry["spec"]]
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


@dataclasses.dataclass
class EncodedTree:
    """A tree in the form that is passed to Orbax.

    Attributes:
      tree: the same structure with leaves that Orbax stores exactly.
      leaves: manifest entries of the leaves that are not stored as a global ``jax.Array``.
      host_arrays: parameter name → the stored numpy array, for digests.
      skeleton: the structure as JSON.
    """

    tree: Any
    leaves: dict[str, dict[str, Any]]
    host_arrays: dict[str, np.ndarray[Any, Any]]
    skeleton: Any


def encode_tree(tree: Any) -> EncodedTree:
    """Prepares a tree for saving. Host values are copied, so the caller may change them afterwards.

    Raises:
      CheckpointError: a leaf cannot be stored or was donated, or two leaves have one name; the message names them.
    """
    leaves: dict[str, dict[str, Any]] = {}
    host_arrays: dict[str, np.ndarray[Any, Any]] = {}
    names: dict[str, str] = {}
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    encoded = []
    for path, leaf in flat:
        name, where = leaf_name(path), jax.tree_util.keystr(path) or "(the whole tree)"
        if name in names:
            raise CheckpointError(
                f"leaves {names[name]} and {where} have one name in storage, {name!r}. Rename a key that holds a dot, "
                "or that reads like another."
            )
        names[name] = where
        if isinstance(leaf, Tracer):
            raise CheckpointError(f"leaf {where}: a traced value cannot be saved. Call save outside jax.jit.")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise CheckpointError(
                f"leaf {where}: the array was deleted or donated. Save before the step that donates it, or what the "
                "step returns."
            )
        # Orbax cannot save an array that is local to one of several processes; those are encoded as host values.
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable and process_count() > 1):
            encoded.append(leaf)
            continue
        if isinstance(leaf, jax.Array):
            entry, stored = _encode_local(leaf)
        else:
            entry, stored = _encode_host(leaf, where)
        leaves[name] = entry
        if isinstance(stored, np.ndarray) and "value" not in entry:
            host_arrays[name] = stored
        encoded.append(stored)
    return EncodedTree(jax.tree_util.tree_unflatten(structure, encoded), leaves, host_arrays, skeleton_of(tree))


def _encode_local(leaf: jax.Array) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Encodes a process-local array of a multi-process job, such as an eager ``jnp.zeros``; process 0's is saved."""
    entry = describe_array(leaf)
    entry.pop("sharding", None)
    if leaf.size == 0:
        return entry, np.zeros((1,) * leaf.ndim, np.uint8)
    with without_ambient_mesh():  # an ambient mesh over all hosts has devices that this array lacks
        values = np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return entry, numpy_to_stored(values)


def _encode_host(leaf: Any, where: str) -> tuple[dict[str, Any], Any]:
    if isinstance(leaf, np.ndarray):
        return _encode_numpy(leaf, where)
    if isinstance(leaf, np.generic):
        entry, stored = _encode_numpy(np.asarray(leaf), where)
        return {**entry, "kind": "numpy_scalar"}, stored
    name = type(leaf).__name__
    if _PYTHON.get(name) is not type(leaf):
        raise CheckpointError(
            f"leaf {where}: a {type(leaf).__module__}.{name} cannot be saved, expected an array, a number, text or "
            "bytes. Take it out of the tree, or register the container as a pytree."
        )
    # repr is exact and covers NaN and infinity, which JSON lacks.
    if isinstance(leaf, complex):
        value: Any = [repr(leaf.real), repr(leaf.imag)]
    else:
        value = repr(leaf) if isinstance(leaf, float) else encode_value(leaf)
    # Orbax stores ints as int64. Larger ones, complex numbers and bytes are stored as text; the manifest has the value.
    stored = (
        leaf if isinstance(leaf, float | str) or (isinstance(leaf, int) and -(2**63) <= leaf < 2**63) else str(leaf)
    )
    return {"kind": name, "value": value}, stored


def _encode_numpy(array: np.ndarray[Any, Any], where: str) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    dtype = array.dtype
    if isinstance(array, np.ma.MaskedArray):
        raise CheckpointError(
            f"leaf {where}: a masked array cannot be saved. Save its data and its mask as two leaves."
        )
    if dtype.hasobject:
        raise CheckpointError(f"leaf {where}: an array of Python objects cannot be saved. Convert it to numbers.")
    entry: dict[str, Any] = {"kind": "numpy", "shape": list(array.shape), "dtype": _dtype_text(dtype)}
    if array.size == 0:
        return {**entry, "stored": "nothing"}, np.zeros((1,) * array.ndim, np.uint8)
    if _is_extension(dtype):
        array = np.array(array)
        return entry | stored_as(dtype), numpy_to_stored(array)
    if dtype.kind in "biufc" and dtype.name not in ("longdouble", "clongdouble", "float128", "complex256"):
        return entry, np.array(array, dtype=dtype.newbyteorder("="))
    # Orbax cannot store these dtypes (text, dates, structured, long double), so store their bytes.
    return {**entry, "stored": "bytes"}, np.array(array).reshape(-1).view(np.uint8)


def dtype_of(entry: dict[str, Any]) -> np.dtype[Any]:
    """Returns the dtype of a leaf's values as they were in the tree (of the key data for PRNG keys)."""
    dtype = entry["dtype"]
    # A list describes a structured dtype; JSON turned its tuples into lists.
    if isinstance(dtype, list):
        return np.dtype([tuple(tuple(p) if isinstance(p, list) else p for p in field) for field in dtype])
    return jnp.dtype(dtype)


def python_value(entry: dict[str, Any]) -> Any:
    """Returns the Python number or text of an entry that holds its value."""
    kind, value = entry["kind"], entry["value"]
    if kind == "float":
        return float(value)
    if kind == "complex":
        return complex(float(value[0]), float(value[1]))
    return decode_value(value)


def skeleton_of(tree: Any) -> Any:
    """Returns a tree's structure of dicts, lists and tuples as JSON; other nodes become dicts of their children."""
    if tree is None:
        return "none"
    if isinstance(tree, dict):
        return {"dict": [[encode_value(_plain_key(key)), skeleton_of(child)] for key, child in tree.items()]}
    if isinstance(tree, list) or (isinstance(tree, tuple) and not hasattr(tree, "_fields")):
        return {"list" if isinstance(tree, list) else "tuple": [skeleton_of(child) for child in tree]}
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if len(children) == 1 and not children[0][0]:
        return "leaf"
    return {"dict": [[str(_key(path[0])), skeleton_of(child)] for path, child in children]}


def _plain_key(key: Any) -> Any:
    """Returns a dict key as the built-in type that it equals: enum members, for example, are restored as str or int."""
    if isinstance(key, str):
        return str.__str__(key)
    return int(key) if isinstance(key, int) and type(key) is not bool else key


def tree_of(skeleton: Any, leaf: Any, path: tuple[str, ...] = ()) -> Any:
    """Builds the tree of a skeleton, with ``leaf(parameter name)`` at each leaf."""
    if skeleton == "none":
        return None
    if skeleton == "leaf":
        return leaf(".".join(path))
    ((kind, children),) = skeleton.items()
    if kind == "dict":
        return {(decoded := decode_value(key)): tree_of(child, leaf, (*path, str(decoded))) for key, child in children}
    nodes = [tree_of(child, leaf, (*path, str(index))) for index, child in enumerate(children)]
    return nodes if kind == "list" else tuple(nodes)
