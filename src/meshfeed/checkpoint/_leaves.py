"""Which leaves a tree has, what Orbax stores for each, and what must be remembered to give back exactly the same.

Orbax stores most arrays as they are. It refuses numpy scalars and empty arrays and changes some 8-bit floats (NaN
payloads) and 4-bit integers; those are stored as the unsigned integers of their bits, or not at all, and the manifest
says what they were. Plain Orbax then reads the bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from meshfeed._errors import CheckpointError
from meshfeed._exact_json import decode_value, encode_value
from meshfeed._process import process_count
from meshfeed._reshard import bit_width, without_ambient_mesh

_AS_THEY_ARE = frozenset({"bfloat16", "float16", "int4"})
_PYTHON = {"bool": bool, "int": int, "float": float, "complex": complex, "str": str, "bytes": bytes}


def leaf_name(path: tuple[Any, ...]) -> str:
    """Orbax's name of a leaf: the keys on the way to it, joined by dots."""
    return ".".join(str(_key(entry)) for entry in path)


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def needs_bits(dtype: Any) -> bool:
    """Whether values of ``dtype`` are stored as unsigned integers because Orbax or XLA would change some."""
    dtype = np.dtype(dtype)
    return _is_extension(dtype) and dtype.name not in _AS_THEY_ARE and bit_width(dtype) <= 8


def _is_extension(dtype: np.dtype[Any]) -> bool:
    return dtype.type.__module__.split(".")[0] == "ml_dtypes"


def _dtype_text(dtype: np.dtype[Any]) -> Any:
    if dtype.names:
        return dtype.descr
    plain = _is_extension(dtype) or (dtype.kind in "biufc" and dtype.isnative and dtype.itemsize <= 16)
    return dtype.name if plain and dtype.name != "longdouble" else dtype.str


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def numpy_to_bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The stored form of host values whose dtype needs it: uint8, nibbles one to a byte."""
    dtype = array.dtype
    if bit_width(dtype) < 8 and jnp.issubdtype(dtype, jnp.integer):
        return array.astype(np.int8).view(np.uint8)  # by way of int8: uint8 has no cast from the signed ones
    return array.view(np.uint8)


def numpy_from_bits(bits: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """The inverse of :func:`numpy_to_bits`."""
    dtype = np.dtype(dtype)
    if bit_width(dtype) < 8 and jnp.issubdtype(dtype, jnp.integer):
        return np.ascontiguousarray(bits).view(np.int8).astype(dtype)
    return np.ascontiguousarray(bits).view(dtype)


def describe_array(leaf: Any) -> dict[str, Any]:
    """The manifest's entry of a ``jax.Array``: dtype, logical shape, how it is stored, and its sharding."""
    entry: dict[str, Any] = {"kind": "jax", "shape": list(leaf.shape)}
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        entry |= {"dtype": data.dtype.name, "impl": str(jax.random.key_impl(leaf)), "data_shape": list(data.shape)}
    else:
        entry["dtype"] = np.dtype(leaf.dtype).name
        if needs_bits(leaf.dtype):
            entry["stored"] = "bits"
    if leaf.size == 0:
        entry["stored"] = "nothing"
    sharding = describe_sharding(leaf.sharding)
    return entry if sharding is None else {**entry, "sharding": sharding}


def describe_sharding(sharding: Any) -> dict[str, Any] | None:
    """A NamedSharding as JSON; None for others."""
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
    """A sharding like the saved one over this job's devices; None where there are not as many."""
    if entry is None or int(np.prod(entry["axis_sizes"])) != jax.device_count():
        return None
    auto = (jax.sharding.AxisType.Auto,) * len(entry["axis_names"])
    mesh = jax.make_mesh(tuple(entry["axis_sizes"]), tuple(entry["axis_names"]), axis_types=auto)
    spec = [tuple(part) if isinstance(part, list) else part for part in entry["spec"]]
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


@dataclasses.dataclass
class EncodedTree:
    """A tree as it is handed to Orbax.

    Attributes:
      tree: the same structure with leaves that Orbax stores exactly.
      leaves: manifest entries of the leaves that are no ``jax.Array``.
      host_arrays: parameter name → the stored numpy array, for digests.
      skeleton: the structure as JSON.
    """

    tree: Any
    leaves: dict[str, dict[str, Any]]
    host_arrays: dict[str, np.ndarray[Any, Any]]
    skeleton: Any


def encode_tree(tree: Any) -> EncodedTree:
    """Prepares a tree for saving; host values are copied, so the caller may change them at once.

    Raises:
      CheckpointError: a leaf of a type that cannot be stored, one that was donated, or two of one name; it names them.
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
    """An array of this process alone, such as an eager ``jnp.zeros`` in a job of several: process 0's copy is saved."""
    entry = describe_array(leaf)
    entry.pop("sharding", None)
    if leaf.size == 0:
        return entry, np.zeros((1,) * leaf.ndim, np.uint8)
    with without_ambient_mesh():  # one over all hosts has devices that this array lacks
        values = np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return entry, numpy_to_bits(values) if entry.get("stored") == "bits" else values


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
    if isinstance(leaf, complex):
        value: Any = [repr(leaf.real), repr(leaf.imag)]
    else:
        value = repr(leaf) if isinstance(leaf, float) else encode_value(leaf)
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
        return ({**entry, "stored": "bits"}, numpy_to_bits(array)) if needs_bits(dtype) else (entry, array)
    if dtype.kind in "biufc" and dtype.name not in ("longdouble", "clongdouble", "float128", "complex256"):
        return entry, np.array(array, dtype=dtype.newbyteorder("="))
    return {**entry, "stored": "bytes"}, np.array(array).reshape(-1).view(np.uint8)


def dtype_of(entry: dict[str, Any]) -> np.dtype[Any]:
    """The dtype of the values of a leaf, as it was in the tree (key data for keys)."""
    dtype = entry["dtype"]
    if isinstance(dtype, list):
        return np.dtype([tuple(tuple(p) if isinstance(p, list) else p for p in field) for field in dtype])
    return jnp.dtype(dtype)


def python_value(entry: dict[str, Any]) -> Any:
    """The Python number or text of an entry that holds its value."""
    kind, value = entry["kind"], entry["value"]
    if kind == "float":
        return float(value)
    if kind == "complex":
        return complex(float(value[0]), float(value[1]))
    return decode_value(value)


def skeleton_of(tree: Any) -> Any:
    """The structure of a tree of dicts, lists and tuples as JSON; other nodes become dicts of their children."""
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
    """A dict key as the built-in type that it equals: members of enums, for example, are restored as text or int."""
    if isinstance(key, str):
        return str.__str__(key)
    return int(key) if isinstance(key, int) and type(key) is not bool else key


def tree_of(skeleton: Any, leaf: Any, path: tuple[str, ...] = ()) -> Any:
    """The tree of a skeleton, with ``leaf(parameter name)`` at each leaf."""
    if skeleton == "none":
        return None
    if skeleton == "leaf":
        return leaf(".".join(path))
    ((kind, children),) = skeleton.items()
    if kind == "dict":
        return {(decoded := decode_value(key)): tree_of(child, leaf, (*path, str(decoded))) for key, child in children}
    nodes = [tree_of(child, leaf, (*path, str(index))) for index, child in enumerate(children)]
    return nodes if kind == "list" else tuple(nodes)
