"""The leaves of a tree, and its structure: how each kind and dtype is recognized, named, stored and described.

Most values are stored unchanged, and plain Orbax reads them. TensorStore lacks some narrow dtypes; their values are
stored as equal numbers of a wider dtype, which plain Orbax returns; asked for the narrow one, it raises ValueError.
:data:`KINDS` is the table of kinds. The manifest holds the structure as JSON and an entry for each leaf, with its
original dtype and, under ``stored``, the encoding; :class:`SavedLeaf` is the parsed entry.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshfeed._src.arrays.reshard import bit_width, without_callers_settings
from meshfeed._src.base.coordination import process_count
from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.exact_json import decode_value, encode_value
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.checkpoint.layout import Grid, Shape, joint_cell

Entry: TypeAlias = dict[str, JsonValue]
"""A leaf in the manifest."""

Leaf: TypeAlias = object
"""A leaf of a tree: an array, a number, text, bytes, or a placeholder for one of them."""


CARRIERS = {"bits": np.uint8, "int8": np.int8, "float16": np.float16}
"""Encodings as numbers of a different dtype → that dtype."""

BYTES = "bytes"
"""Encoding as flat bytes: text, dates, structured dtypes and long doubles, which Orbax cannot store."""

NOTHING = "nothing"
"""Encoding of empty arrays, which are not stored. A single uint8 takes their place in Orbax's files."""

VALUE = "value"
"""Encoding in the manifest: Python numbers, text and bytes."""


def is_extension(dtype: np.dtype[np.generic]) -> bool:
    """Returns whether ``ml_dtypes`` defines the dtype."""
    return dtype.type.__module__.split(".")[0] == "ml_dtypes"


def is_key_dtype(dtype: DTypeLike | None) -> bool:
    """Returns whether a dtype is a dtype of typed PRNG keys."""
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def native(dtype: np.dtype[np.generic]) -> bool:
    """Returns whether Orbax can store a numpy dtype, in native byte order."""
    return dtype.kind in "biufc" and dtype.name not in ("longdouble", "clongdouble", "float128", "complex256")


@functools.lru_cache(maxsize=64)
def carrier_of(dtype: DTypeLike) -> np.dtype[np.generic]:
    """Returns the dtype in which values of ``dtype`` are stored: ``dtype`` itself unless TensorStore lacks it.

    In that case narrow integers are stored as uint8 or int8 and narrow floats as float16, which represent every value.
    """
    dtype = np.dtype(dtype)
    if not is_extension(dtype):
        return dtype
    try:
        ts.dtype(dtype.name)
    except ValueError:
        if not jnp.issubdtype(dtype, jnp.integer):
            return np.dtype(np.float16)
        return np.dtype(np.int8 if int(jnp.iinfo(dtype).min) < 0 else np.uint8)
    return dtype


def stored_as(dtype: DTypeLike) -> dict[str, str]:
    """Returns the manifest field for values of ``dtype``; empty for most dtypes."""
    carrier = carrier_of(dtype)
    return {} if carrier == dtype else {"stored": next(name for name, held in CARRIERS.items() if held == carrier)}


@functools.lru_cache(maxsize=16)
def half_bits(dtype: np.dtype[np.generic]) -> NDArray[np.uint16]:
    """Returns, for each bit pattern of a narrow float, the bits of the float16 that stores that value; uint16[n]."""
    codes = np.arange(1 << bit_width(dtype), dtype=np.uint8)
    values = codes.view(dtype)
    # A cast would give all NaNs the same payload, so use the bit pattern itself as the payload.
    return np.where(
        np.isnan(values.astype(np.float32)), np.uint16(0x7E00) + codes, values.astype(np.float16).view(np.uint16)
    )


@functools.lru_cache(maxsize=16)
def _codes_by_half(dtype: np.dtype[np.generic]) -> NDArray[np.uint8]:
    halves = half_bits(dtype)
    codes = np.zeros(1 << 16, np.uint8)
    codes[halves] = np.arange(halves.size, dtype=np.uint8)
    return codes


def to_carrier(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Converts host values to the dtype in which they are stored."""
    carrier = carrier_of(array.dtype)
    if carrier == array.dtype:
        return array
    if carrier == np.float16:
        return half_bits(array.dtype)[array.view(np.uint8), ...].view(np.float16)  # `...`: a 0-d array stays one
    return array.astype(carrier)


def from_carrier(values: NDArray[np.generic], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Inverts :func:`to_carrier`; also reads older versions, which stored narrow floats as their bits in uint8."""
    values = np.asarray(values, order="C")
    if values.dtype == np.float16:
        return _codes_by_half(dtype)[values.view(np.uint16)].view(dtype)
    return values.view(np.int8).astype(dtype) if jnp.issubdtype(dtype, jnp.integer) else values.view(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class SavedLeaf:
    """A leaf as it was in the saved tree, and how its values are stored."""

    name: str  # Orbax's parameter name
    kind: str  # a key of KINDS
    shape: Shape  # for PRNG keys, the shape of the keys
    dtype: np.dtype[np.generic]  # for PRNG keys, the dtype of the key data
    encoding: str | None = None  # a key of CARRIERS, BYTES, NOTHING or VALUE; None means that values are unchanged
    impl: str | None = None  # implementation of PRNG keys
    value: bool | int | float | complex | str | bytes | None = None  # of a Python number, text or bytes
    sharding: JsonValue = None  # the saved NamedSharding
    memory_kind: str | None = None  # None means the devices' default memory
    cell: Shape | None = None  # shape of the boxes that have a digest
    chunk: Shape = ()  # shape of the stored chunks; () if no values are stored
    # By cell number.
    digests: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def data_shape(self) -> Shape:
        """``shape``, or for PRNG keys the shape of the key data."""
        return key_shape(self.shape, self.impl)

    @property
    def stored_shape(self) -> Shape:
        """Shape of the stored values."""
        return (math.prod(self.shape) * self.dtype.itemsize,) if self.encoding == BYTES else self.data_shape

    @property
    def stored_dtype(self) -> np.dtype[np.generic]:
        """Dtype of the stored values once they are read, on the host."""
        return np.dtype(np.uint8) if self.encoding == BYTES else self.dtype

    @functools.cached_property
    def units(self) -> Grid:
        """Grid of the boxes that can be read and checked on their own, without reading a chunk twice."""
        shape = self.stored_shape
        return Grid(shape, joint_cell(shape, self.cell if self.digests else None, self.chunk))

    def placeholder(self) -> Leaf:
        """Returns the leaf's placeholder in an abstract tree."""
        return KINDS[self.kind].placeholder(self)

    def of_slices(self, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
        """Returns the saved sharding if ``sharding`` is that of the slices, which earlier versions gave to Orbax."""
        entry = self.sharding
        if entry is None or not isinstance(sharding, NamedSharding):
            return sharding
        if list(sharding.mesh.axis_names) != entry["axis_names"]:
            return sharding
        return NamedSharding(sharding.mesh, _spec_of(entry), memory_kind=sharding.memory_kind)

    def saved_sharding(self) -> jax.sharding.Sharding | None:
        """Returns the saved sharding on this job's devices; else device 0 in a single-process job, or None.

        It has the saved memory kind if these devices have such memory.
        """
        entry = self.sharding
        known = {memory.kind for memory in jax.local_devices()[0].addressable_memories()}
        kind = self.memory_kind if self.memory_kind in known else None
        if entry is not None and math.prod(entry["axis_sizes"]) == jax.device_count():
            kinds = entry.get("axis_types") or [AxisType.Auto.name] * len(entry["axis_names"])
            types = tuple(AxisType[name] for name in kinds)
            mesh = jax.make_mesh(tuple(entry["axis_sizes"]), tuple(entry["axis_names"]), axis_types=types)
            return NamedSharding(mesh, _spec_of(entry), memory_kind=kind)
        if process_count() > 1:
            return None
        return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def _spec_of(entry: JsonValue) -> PartitionSpec:
    return PartitionSpec(*(tuple(part) if isinstance(part, list) else part for part in entry["spec"]))


def saved_leaf(name: str, entry: Entry) -> SavedLeaf:
    """Returns the leaf that a manifest entry describes, without digests, and without its chunks if these are not known."""
    if "value" in entry:
        value = _python_value(entry)
        return SavedLeaf(name, entry["kind"], (), np.dtype(type(value)), VALUE, value=value)
    return SavedLeaf(
        name,
        entry["kind"],
        tuple(entry["shape"]),
        dtype_of(entry["dtype"]),
        entry.get("stored"),
        entry.get("impl"),
        sharding=entry.get("sharding"),
        memory_kind=entry.get("memory_kind"),
        cell=tuple(entry["cell"]) if "cell" in entry else None,
        chunk=tuple(entry.get("chunk", ())),
    )


def dtype_of(text: JsonValue) -> np.dtype[np.generic]:
    """Returns the dtype that an entry of the manifest names or describes; inverts :func:`_dtype_text`."""
    if not isinstance(text, dict):
        return jnp.dtype(text)
    if "base" in text:
        return np.dtype((dtype_of(text["base"]), tuple(text["shape"])))
    aligned = {name: value for name, value in text.items() if name != "aligned"}
    layout: Any = {**aligned, "formats": [dtype_of(one) for one in text["formats"]]}
    return np.dtype(layout, align=text["aligned"])


def _dtype_text(dtype: np.dtype[np.generic]) -> JsonValue:
    """Returns a dtype as JSON: its name, or the layout of its fields as a dict."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _dtype_text(base), "shape": list(shape)}
    if dtype.names is None:
        return dtype.name if is_extension(dtype) or (native(dtype) and dtype.isnative) else dtype.str
    by_name = cast("Mapping[str, tuple[Any, ...]]", dtype.fields)
    fields = [by_name[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_dtype_text(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def _python_value(entry: Entry) -> bool | int | float | complex | str | bytes:
    kind, value = entry["kind"], entry["value"]
    if kind == "float":
        return float(value)
    return complex(*map(float, value)) if kind == "complex" else decode_value(value)


@functools.cache
def key_dtype(impl: str) -> jax.typing.DTypeLike:
    """Returns the dtype of PRNG keys with the given implementation."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


@functools.cache
def _one_key_shape(impl: str) -> Shape:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape


def key_shape(shape: Shape, impl: str | None) -> Shape:
    """Returns the shape of the key data of PRNG keys of ``shape``; ``shape`` itself if ``impl`` is None."""
    return shape if impl is None else (*shape, *_one_key_shape(impl))


def keys_of(data_shape: Shape, impl: str | None) -> Shape:
    """Returns the shape of the PRNG keys whose key data has ``data_shape``; inverts :func:`key_shape`."""
    return data_shape if impl is None else data_shape[: len(data_shape) - len(_one_key_shape(impl))]


def is_key(leaf: Leaf) -> bool:
    """Returns whether a leaf is an array of typed PRNG keys."""
    return is_key_dtype(getattr(leaf, "dtype", None))


def describe_array(leaf: jax.Array) -> Entry:
    """Returns the manifest entry of a ``jax.Array``: dtype, logical shape, how it is stored, and its sharding."""
    entry: Entry = {"kind": "jax", "shape": list(leaf.shape)}
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        entry |= {"dtype": data.dtype.name, "impl": str(jax.random.key_impl(leaf)), "data_shape": list(data.shape)}
    else:
        entry |= {"dtype": np.dtype(leaf.dtype).name, **stored_as(leaf.dtype)}
    if leaf.size == 0:
        entry["stored"] = NOTHING
    sharding = leaf.sharding
    default = next(iter(sharding.device_set)).default_memory().kind
    if sharding.memory_kind not in (None, default):  # another platform's default memory has a different name
        entry["memory_kind"] = sharding.memory_kind
    if isinstance(sharding, NamedSharding):
        entry["sharding"] = {
            "axis_names": list(sharding.mesh.axis_names),
            "axis_sizes": list(sharding.mesh.axis_sizes),
            "spec": [list(part) if isinstance(part, tuple) else part for part in sharding.spec],
        }
        if any(kind != AxisType.Auto for kind in sharding.mesh.axis_types):
            entry["sharding"]["axis_types"] = [kind.name for kind in sharding.mesh.axis_types]
    return entry


def _placeholder_array(leaf: SavedLeaf) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if leaf.impl is None else key_dtype(leaf.impl)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.saved_sharding())


def _encode_local(leaf: jax.Array, where: str) -> tuple[Entry, NDArray[np.generic]]:
    """Encodes a process-local array of a multi-process job, such as an eager ``jnp.zeros``; process 0's is saved."""
    entry = describe_array(leaf)
    entry.pop("sharding", None)
    if leaf.size == 0:
        return entry, _nothing(leaf.ndim)
    with without_callers_settings():  # an ambient mesh over all hosts has devices that this array lacks
        values = np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return entry, to_carrier(values)


def _copy_fields(source: NDArray[np.generic] | np.generic, target: NDArray[np.generic]) -> None:
    """Copies values without the padding of structured dtypes, which holds uninitialized memory."""
    if source.dtype.names is None:
        target[...] = source
        return
    for name in source.dtype.names:
        of_source: Any = source
        of_target: Any = target
        _copy_fields(of_source[name], of_target[name])


def _encode_numpy(leaf: NDArray[np.generic] | np.generic, where: str) -> tuple[Entry, NDArray[np.generic]]:
    kind = "numpy" if isinstance(leaf, np.ndarray) else "numpy_scalar"
    array = np.zeros(leaf.shape, leaf.dtype)
    _copy_fields(leaf, array)
    dtype = array.dtype
    if isinstance(leaf, np.ma.MaskedArray):
        raise CheckpointError(
            f"leaf {where}: a masked array cannot be saved. Save its data and its mask as two leaves."
        )
    if dtype.hasobject:
        raise CheckpointError(f"leaf {where}: an array of Python objects cannot be saved. Convert it to numbers.")
    entry: Entry = {"kind": kind, "shape": list(array.shape), "dtype": _dtype_text(dtype)}
    if array.nbytes == 0:
        return {**entry, "stored": NOTHING}, _nothing(array.ndim)
    if is_extension(dtype):
        return entry | stored_as(dtype), to_carrier(array)
    if native(dtype):
        return entry, array.astype(dtype.newbyteorder("="), copy=False)
    return {**entry, "stored": BYTES}, array.reshape(-1).view(np.uint8)


def _nothing(rank: int) -> NDArray[np.generic]:
    return np.zeros((1,) * rank, np.uint8)


def _encode_value(leaf: Leaf, where: str) -> tuple[Entry, Leaf]:
    if isinstance(leaf, str):
        try:
            leaf.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(
                f"leaf {where}: character {error.start} of the text is half of a surrogate pair, which is not Unicode text. "
                "Remove it."
            ) from error
    if isinstance(leaf, float):
        return {"kind": "float", "value": repr(leaf)}, leaf  # exact, and covers NaN and infinity, which JSON lacks
    if isinstance(leaf, complex):
        return {"kind": "complex", "value": [repr(leaf.real), repr(leaf.imag)]}, str(leaf)
    # Orbax stores ints as int64. Larger ones, complex numbers and bytes are stored as text.
    plain = isinstance(leaf, str) or (isinstance(leaf, int) and -(2**63) <= leaf < 2**63)
    return {"kind": type(leaf).__name__, "value": encode_value(leaf)}, leaf if plain else str(leaf)


class Kind(NamedTuple):
    """A kind of leaf."""

    types: tuple[type, ...]
    # (leaf, path for errors) → its manifest entry, and the value that Orbax stores for it; host values are copied. None
    # for kinds that only plain Orbax stores.
    encode: Callable[..., tuple[Entry, Leaf]] | None
    placeholder: Callable[[SavedLeaf], Leaf]  # in an abstract tree
    from_host: Callable[[NDArray[np.generic]], Leaf]  # host values as a numpy array → the leaf


def _python(kind: type) -> Kind:
    return Kind((kind,), _encode_value, lambda leaf: leaf.value, lambda values: kind(values.item()))


PYTHON = (bool, int, float, complex, str, bytes)
KINDS: Mapping[str, Kind] = {
    "jax": Kind((jax.Array,), _encode_local, _placeholder_array, jnp.asarray),
    "numpy": Kind(
        (np.ndarray,),
        _encode_numpy,
        lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape),  # the shape without its memory
        lambda values: values,
    ),
    # Before the Python types, because np.float64 is a float.
    "numpy_scalar": Kind(
        (np.generic,), _encode_numpy, lambda leaf: np.zeros((), leaf.dtype)[()], lambda values: values[()]
    ),
    **{kind.__name__: _python(kind) for kind in PYTHON},
    # A number whose type plain Orbax did not record.
    "scalar": Kind((), None, lambda leaf: np.zeros((), leaf.dtype).item(), lambda values: values.item()),
}


def kind_of(leaf: Leaf) -> str | None:
    """Returns the kind of a leaf, or None if it is of no type in :data:`KINDS`."""
    return next((name for name, kind in KINDS.items() if isinstance(leaf, kind.types)), None)


def encode_host_leaf(leaf: Leaf, where: str) -> tuple[Entry, Leaf]:
    """Returns the manifest entry of a leaf that is not a global ``jax.Array``, and what Orbax stores for it."""
    kind = KINDS.get(kind_of(leaf) or "")
    # A subclass of a Python type, such as an enum, would be restored as the plain type.
    if kind is None or kind.encode is None or (kind.encode is _encode_value and type(leaf) not in kind.types):
        raise CheckpointError(
            f"leaf {where}: a {type(leaf).__module__}.{type(leaf).__name__} cannot be saved, expected an array, a "
            "number, text or bytes. Remove it from the tree, or register the container as a pytree."
        )
    return kind.encode(leaf, where)


def leaf_name(path: jax.tree_util.KeyPath) -> str:
    """Returns Orbax's name of a leaf: the keys on its path, joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


class EncodedTree(NamedTuple):
    """A tree as it is passed to Orbax."""

    tree: PyTree  # the same structure with leaves that Orbax stores exactly
    leaves: dict[str, Entry]  # manifest entries of the leaves that are not stored as a global jax.Array
    host_arrays: dict[str, NDArray[np.generic]]  # parameter name → the stored numpy array, for digests
    skeleton: JsonValue  # the structure


def encode_tree(tree: PyTree, *, in_store: bool) -> EncodedTree:
    """Prepares a tree for saving. Host values are copied, so the caller may change them afterwards.

    ``in_store`` says that each array is a folder of its name in a store; a local folder has them in one database.

    Raises:
      CheckpointError: a leaf cannot be stored or was donated, two leaves have one name, or an array could not be found again
        under its name; the message names them.
    """
    leaves: dict[str, Entry] = {}
    host_arrays: dict[str, NDArray[np.generic]] = {}
    names: dict[str, str] = {}  # parameter name → the leaf as errors name it
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    encoded: list[Leaf] = []
    for path, leaf in flat:
        name, where = leaf_name(path), jax.tree_util.keystr(path) or "(the whole tree)"
        if name in names:
            raise CheckpointError(
                f"leaves {names[name]} and {where} have the same name in storage, {name!r}. Rename a key that contains a "
                "dot, or one of two keys with the same text."
            )
        names[name] = where
        if _is_global(leaf, where):
            encoded.append(leaf)
            continue
        leaves[name], stored = encode_host_leaf(leaf, where)
        if isinstance(stored, np.ndarray):
            host_arrays[name] = stored
            shape = [max(1, size) for size in stored.shape]
            leaves[name] |= {"cell": shape, "chunk": shape}
        encoded.append(stored)
    _check_names(names, in_store)
    stored_tree = jax.tree_util.tree_unflatten(structure, encoded)
    return EncodedTree(stored_tree, leaves, host_arrays, skeleton_of(tree))


_NOT_IN_A_STORE = re.compile(r"^/|//|\\|::|(^|/)\.{1,2}(/|$)")
_NAME_BYTES = 255  # of an object's name, and of each folder in it


def _check_names(names: Mapping[str, str], in_store: bool) -> None:
    for name, where in names.items():
        problem = "ends with a slash" if name.endswith("/") else None
        if in_store and problem is None:
            if _NOT_IN_A_STORE.search(name):
                problem = "is not the name of a folder in a store"
            elif len(name.encode(errors="surrogatepass")) > _NAME_BYTES:
                problem = f"has more than {_NAME_BYTES} bytes"
            else:
                parts = name.split("/")
                above = ("/".join(parts[:number]) for number in range(1, len(parts)))
                inside = next((folder for folder in above if folder in names), None)
                problem = None if inside is None else f"is a folder inside that of leaf {names[inside]}"
        if problem is not None:
            raise CheckpointError(
                f"leaf {where} has the name {name[:60]!r} in storage, which {problem}. Rename a key of the tree."
            )


def _is_global(leaf: Leaf, where: str) -> bool:
    """Returns whether Orbax stores a leaf as a global array: it cannot save one that is local to one of several hosts."""
    if isinstance(leaf, Tracer):
        raise CheckpointError(f"leaf {where}: a traced value cannot be saved. Call save outside jax.jit.")
    if not isinstance(leaf, jax.Array):
        return False
    if leaf.is_deleted():
        raise CheckpointError(
            f"leaf {where}: the array was deleted or donated. Save before the step that donates it, or save the step's "
            "result."
        )
    if process_count() == 1:
        return True
    if leaf.is_fully_addressable:
        return False
    check_hosts(f"leaf {where}", leaf)
    return True


def check_hosts(where: str, array: jax.Array) -> None:
    """Rejects an array that spans hosts but not all of them, with a CheckpointError.

    The array of a single host looks like any local array on that host; the others reject it.
    """
    hosts = {device.process_index for device in array.sharding.device_set}
    if len(hosts) < process_count():
        absent = sorted(set(range(process_count())) - hosts)
        raise CheckpointError(
            f"{where} has no device on the hosts {absent}; Orbax can save only arrays with a device on every host. Save "
            "it in a job without those hosts, or replicate it over all hosts first."
        )


def describe_leaves(tree: PyTree) -> list[list[str]]:
    """Returns [path, description] of each leaf that must be the same on all hosts; JSON."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [[jax.tree_util.keystr(path) or "(the whole tree)", _description(leaf)] for path, leaf in flat]


def _description(leaf: Leaf) -> str:
    if not isinstance(leaf, jax.Array):
        return "a value of the host"  # that of host 0 is saved
    return f"{leaf.dtype}{list(leaf.shape)} on {leaf.sharding.num_devices} devices"


def skeleton_of(tree: PyTree) -> JsonValue:
    """Returns a tree's structure of dicts, lists and tuples as JSON; other nodes become dicts of their children."""
    if tree is None:
        return "none"
    if isinstance(tree, dict):
        return {"dict": [_child(key, child) for key, child in tree.items()]}
    if isinstance(tree, list) or (isinstance(tree, tuple) and not hasattr(tree, "_fields")):
        return {"list" if isinstance(tree, list) else "tuple": [skeleton_of(child) for child in tree]}
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if len(children) == 1 and not children[0][0]:
        return "leaf"
    return {"dict": [[leaf_name(path), skeleton_of(child)] for path, child in children]}


def _child(key: Hashable, child: PyTree) -> list[JsonValue]:
    """Returns [key, skeleton], or [key, skeleton, name in storage] if that differs: an enum member's text may differ."""
    plain: Hashable = key
    if isinstance(key, str):
        plain = str.__str__(key)
    elif isinstance(key, int) and type(key) is not bool:
        plain = int(key)
    entry = [encode_value(plain), skeleton_of(child)]
    return entry if str(key) == str(plain) else [*entry, str(key)]


def tree_of(skeleton: JsonValue, leaf: Callable[[str], Leaf], path: tuple[str, ...] = ()) -> PyTree:
    """Builds the tree of a skeleton, with ``leaf(parameter name)`` at each leaf."""
    if skeleton == "none":
        return None
    if skeleton == "leaf":
        return leaf(".".join(path))
    ((kind, children),) = skeleton.items()
    if kind == "dict":
        return {
            (decoded := decode_value(key)): tree_of(child, leaf, (*path, *(name or [str(decoded)])))
            for key, child, *name in children
        }
    nodes = [tree_of(child, leaf, (*path, str(index))) for index, child in enumerate(children)]
    return nodes if kind == "list" else tuple(nodes)
