"""Reads the arrays of one Orbax checkpoint item, whether meshfeed or plain Orbax wrote it.

Leaves are read in whole units, each once; the requested parts are copied into this process's buffers.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.checkpoint.boxes import Box, Grid, Shape, box_shape, box_size, clip, intersect, joint_cell, slices
from meshfeed._src.checkpoint.dtypes import BYTES, CARRIERS, NOTHING, VALUE, check_fits, from_carrier
from meshfeed._src.checkpoint.leaves import Entry, SavedLeaf, dtype_of, keys_of, saved_leaf
from meshfeed._src.checkpoint.manifest import RESTORE_EARLIER, DamagedCheckpointError, digest, read_json, read_manifest

_TREE_METADATA = "_METADATA"
_TEXTS = "_strings.json"
_KEY_METADATA = "array_metadatas/process_0"  # every process writes the same
_PLAIN_KINDS = {"jax.Array": "jax", "np.ndarray": "numpy", "scalar": "scalar", "string": "str"}
_BYTES_KEPT_BY_A_THREAD = 64 << 20
_BYTES_IN_FLIGHT = 512 << 20


def _threads(most: int, memory_limit_bytes: int | None) -> int:
    # glibc keeps what a thread has freed for that thread's next allocation: a chunk's bytes and its decoded values,
    # 2 × 16 MiB, and up to 64 MiB in all.
    return most if memory_limit_bytes is None else min(most, max(1, memory_limit_bytes // _BYTES_KEPT_BY_A_THREAD))


PendingRead: TypeAlias = Callable[[], NDArray[np.generic]]
"""Waits for a read that has started, and returns the values."""


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLeaf:
    """One stored array.

    Attributes:
      name: Orbax's parameter name.
      shape: shape of the stored values (of the key data for PRNG keys).
      dtype: dtype of the values as they were in the tree (of the key data for PRNG keys).
      carried: whether they are stored in a different dtype.
      cell: shape of the boxes that have a digest, or None.
      chunk: shape of the stored chunks.
      digests: digest by cell number.
      impl: implementation of PRNG keys, or None.
    """

    name: str
    shape: Shape
    dtype: np.dtype[np.generic]
    carried: bool
    cell: Shape | None
    chunk: Shape
    digests: Mapping[int, str]
    impl: str | None = None

    @functools.cached_property
    def units(self) -> Grid:
        """Grid of the boxes that can be read and checked on their own, without reading a chunk twice."""
        return Grid(self.shape, joint_cell(self.shape, self.cell if self.digests else None, self.chunk))

    @property
    def itemsize(self) -> int:
        """Bytes per value on the host."""
        return self.dtype.itemsize


class StoredArrays:
    """Opens the arrays of an item and reads boxes of them.

    Args:
      directory: the item's folder, such as ``<checkpoint>/<step>/arrays``.
      memory_limit_bytes: the restore's memory limit; it reduces the number of threads that read and decode.
      metadata_key: see ``RestoreOptions``; not needed if our manifest records it.

    Raises:
      CheckpointError: the folder does not exist.
      DamagedCheckpointError: the manifest differs from what was written.
    """

    def __init__(
        self, directory: epath.PathLike, memory_limit_bytes: int | None = None, metadata_key: str | None = None
    ) -> None:
        self.directory = epath.Path(directory)
        if not self.directory.exists():
            raise CheckpointError(f"{directory}: no such folder, expected an item of arrays that Orbax wrote.")
        self.manifest = read_manifest(self.directory)
        # One shared context, so the nodes of the OCDBT tree are read only once for all arrays.
        self._context = ts.Context(
            {
                "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
                "file_io_concurrency": {"limit": _threads(64, memory_limit_bytes)},
                "data_copy_concurrency": {"limit": _threads(8, memory_limit_bytes)},
            }
        )
        self._ocdbt = (self.directory / "manifest.ocdbt").exists()
        keys = {entry["metadata_key"] for entry in self._entries.values() if "metadata_key" in entry}
        self.metadata_key: str | None = next(iter(keys), metadata_key)
        self._stores: dict[str, ts.TensorStore] = {}
        self._opening: dict[str, ts.Future[ts.TensorStore]] = {}
        self._leaves: dict[str, StoredLeaf] = {}
        self._texts: dict[str, str] = {}

    @property
    def _entries(self) -> Mapping[str, Entry]:
        return {} if self.manifest is None else self.manifest.leaves

    @functools.cached_property
    def metadata(self) -> dict[str, JsonValue]:
        """Orbax's own metadata of the tree."""
        path = self.directory / _TREE_METADATA
        if not path.exists():
            raise CheckpointError(f"{path}: no such file, so this is not an item of arrays that Orbax wrote.")
        return read_json(path)

    @functools.cached_property
    def _plain_types(self) -> dict[str, str]:
        """Parameter name → type of its value, as recorded by plain Orbax."""
        found: dict[str, str] = {}
        for text, entry in self.metadata["tree_metadata"].items():
            keys = [part["key"] for part in entry.get("key_metadata", ())] or ast.literal_eval(text)
            found[".".join(map(str, keys))] = entry["value_metadata"]["value_type"]
        return found

    @functools.cached_property
    def _plain_impls(self) -> dict[str, str]:
        """Parameter name → implementation of PRNG keys, as recorded by plain Orbax."""
        path = self.directory / _KEY_METADATA
        entries = [entry["array_metadata"] for entry in read_json(path)["array_metadatas"]] if path.exists() else []
        extras = {entry["param_name"]: entry.get("ext_metadata") or {} for entry in entries}
        return {name: extra["random_key_impl"] for name, extra in extras.items() if "random_key_impl" in extra}

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """Parameter name → kind of leaf, for all leaves that have content."""
        if self.manifest is not None and self.manifest.skeleton is not None:
            return {name: entry["kind"] for name, entry in self._entries.items()}
        return {name: _PLAIN_KINDS[kind] for name, kind in self._plain_types.items() if kind in _PLAIN_KINDS}

    def array_names(self) -> list[str]:
        """Returns the parameters whose values are stored as arrays."""
        without = {name for name, entry in self._entries.items() if "value" in entry or entry.get("stored") == NOTHING}
        return [name for name, kind in self.kinds.items() if kind != "str" and name not in without]

    def has_digests(self, name: str) -> bool:
        """Returns whether a parameter can be verified; parameters saved by plain Orbax cannot."""
        return self.manifest is not None and bool(self.manifest.digests.get(name))

    def names_without_chunk(self) -> list[str]:
        """Returns the parameters for which the manifest lacks the shape of the stored chunks."""
        return [
            name
            for name, entry in self._entries.items()
            if "dtype" in entry and "chunk" not in entry and entry.get("stored") != NOTHING
        ]

    def saved(self, name: str) -> SavedLeaf:
        """Describes the leaf of the tree that was saved under a parameter name."""
        if name in self._entries:
            return saved_leaf(name, self._entries[name])
        kind = self.kinds.get(name, "jax")
        if kind == "str":
            self._texts = self._texts or read_json(self.directory / _TEXTS)
            return SavedLeaf(name, kind, (), np.dtype(str), VALUE, value=self._texts[name])
        leaf = self.leaf(name)
        shape = leaf.shape if leaf.impl is None else keys_of(leaf.shape, leaf.impl)
        return SavedLeaf(name, kind, shape, leaf.dtype, impl=leaf.impl)

    def _spec(self, name: str) -> dict[str, JsonValue]:
        plain = self.metadata if self.manifest is None or (self.directory / _TREE_METADATA).exists() else {}
        base = os.fspath(self.directory)
        root: JsonValue = base + "/" if "://" in base else {"driver": "file", "path": base + "/"}
        if self._ocdbt:
            kvstore: JsonValue = {"driver": "ocdbt", "base": root, "path": f"{name}/", "cache_pool": "cache_pool#ocdbt"}
        elif "://" in base:
            kvstore = f"{root}{name}/"
        else:
            kvstore = {"driver": "file", "path": f"{base}/{name}/"}
        fill = not plain.get("store_array_data_equal_to_fill_value", False)
        of_arrays = self.metadata_key is not None and self._plain_types[name] == "jax.Array"
        # A committed checkpoint does not change, so caches need no revalidation. With our manifest, a missing chunk is
        # damage, never the fill value.
        return {
            "driver": "zarr3" if plain.get("use_zarr3") else "zarr",
            "kvstore": kvstore,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": fill and self.manifest is None,
            **({"metadata_key": self.metadata_key} if of_arrays else {}),
        }

    def param_info(self, name: str) -> ocp.type_handlers.ParamInfo:
        """Describes the parameter for Orbax's handlers."""
        return ocp.type_handlers.ParamInfo(
            name=name,
            parent_dir=self.directory,
            is_ocdbt_checkpoint=self._ocdbt,
            use_zarr3=bool(self.metadata.get("use_zarr3")),
            ts_context=self._context,
        )

    def open_soon(self, names: Iterable[str]) -> None:
        """Starts opening parameters concurrently, so :meth:`open` does not wait for them one at a time."""
        for name in names:
            if name not in self._stores and name not in self._opening:
                self._opening[name] = ts.open(self._spec(name), open=True, read=True, context=self._context)

    def open(self, name: str) -> ts.TensorStore:
        """Returns the TensorStore of a parameter, opening it if needed."""
        if name not in self._stores:
            self.open_soon([name])
            try:
                self._stores[name] = self._opening.pop(name).result()
            except Exception as error:
                raise self._failure(f"{self.directory}: parameter {name!r} cannot be opened", error) from error
        return self._stores[name]

    def _failure(self, what: str, error: BaseException) -> CheckpointError:
        # TensorStore raises ValueError alike for a truncated file, a failed checksum and a missing file. Errors of the
        # storage itself can be recognized by their text; they do not mean that the checkpoint is damaged.
        text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
        refused = isinstance(error, OSError) or any(
            word in text for word in ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "OS error")
        )
        if refused and "No such file" not in text:
            return CheckpointError(f"{what}: {text}")
        return DamagedCheckpointError(f"{what}: {text}. {RESTORE_EARLIER}", path=str(self.directory))

    def chunk_of(self, name: str) -> list[int]:
        """Returns the shape of a parameter's stored chunks."""
        store = self.open(name)
        return [size or 0 for size in store.chunk_layout.read_chunk.shape or ()] if store.rank else []

    def leaf(self, name: str) -> StoredLeaf:
        """Describes the array that is stored under a parameter name."""
        if name not in self._leaves:
            entry = self._entries.get(name)
            self._leaves[name] = self._found(name) if entry is None else self._recorded(name, entry)
        return self._leaves[name]

    def _found(self, name: str) -> StoredLeaf:
        store = self.open(name)
        dtype = jnp.dtype(store.dtype.numpy_dtype)
        impl = self._plain_impls.get(name) if dtype == np.uint32 else None
        return StoredLeaf(name, tuple(store.shape), dtype, False, None, tuple(self.chunk_of(name)), {}, impl)

    def _recorded(self, name: str, entry: Entry) -> StoredLeaf:
        dtype, encoding = dtype_of(entry), entry.get("stored")
        shape = tuple(entry.get("data_shape", entry["shape"]))
        if encoding == BYTES:
            shape, dtype = (int(np.prod(shape)) * dtype.itemsize,), np.dtype(np.uint8)
        assert self.manifest is not None
        return StoredLeaf(
            name,
            shape,
            dtype,
            carried=encoding in CARRIERS,
            cell=tuple(entry["cell"]) if "cell" in entry else None,
            chunk=tuple(entry.get("chunk") or (shape if encoding == NOTHING else self.chunk_of(name))),
            digests=self.manifest.digests.get(name, {}),
            impl=entry.get("impl"),
        )

    def start_read(self, leaf: StoredLeaf, box: Box) -> PendingRead:
        """Starts reading a box; pass the result to :meth:`finish_read`."""
        return self.open(leaf.name)[slices(box)].read(order="C").result

    def start_read_into(self, leaf: StoredLeaf, box: Box, room: NDArray[np.generic]) -> PendingRead | None:
        """Like :meth:`start_read`, but into the caller's memory; returns None if the stored dtype is different."""
        store = self.open(leaf.name)
        if leaf.carried or store.dtype.numpy_dtype != room.dtype:
            return None
        part = store[slices(box)][ts.d[:].translate_to[0]]
        written = ts.array(room, copy=False, write=True, context=self._context).write(part)
        return lambda: (written.result(), room)[1]

    def finish_read(self, leaf: StoredLeaf, box: Box, wait: PendingRead, verify: bool) -> NDArray[np.generic]:
        """Waits for a read of whole cells, checks it, and returns the values in the leaf's dtype."""
        where = f"{self.directory}: parameter {leaf.name!r}, values {[list(side) for side in box]}"
        try:
            values = np.asarray(wait()).reshape(box_shape(box))
        except Exception as error:
            raise self._failure(f"{where}: cannot be read", error) from error
        if verify and leaf.digests and leaf.cell is not None:
            grid = Grid(leaf.shape, leaf.cell)
            for number in grid.touching(box):
                found, wanted = digest(values[slices(grid.box(number), box)]), leaf.digests.get(number)
                if found != wanted:
                    raise DamagedCheckpointError(
                        f"{where}: digest is {found}, but {wanted} was saved: stored bytes have changed. {RESTORE_EARLIER}",
                        path=str(self.directory),
                    )
        return from_carrier(values, leaf.dtype) if leaf.carried else values


class Target(NamedTuple):
    """A buffer for one box of a leaf.

    Attributes:
      box: the box in the leaf's coordinates.
      buffer: host array whose first value is the box's first; it has the final dtype.
    """

    box: Box
    buffer: NDArray[np.generic]

    def fill(self, unit_box: Box, values: NDArray[np.generic]) -> None:
        """Copies the overlap of ``unit_box`` and the box, cast to the buffer's dtype."""
        common = intersect(self.box, unit_box)
        if box_size(common):
            self.buffer[slices(common, self.box)] = values[slices(common, unit_box)]


class Wanted(NamedTuple):
    """A unit to read.

    Attributes:
      leaf: the leaf that it belongs to.
      number: the unit's number.
      take: called with (box, values).
      room: memory of the unit's shape and dtype into which storage may write the values directly; if it does, ``take``
        is not called.
    """

    leaf: StoredLeaf
    number: int
    take: Callable[[Box, NDArray[np.generic]], None]
    room: NDArray[np.generic] | None = None


def wanted_units(leaf: StoredLeaf, targets: Iterable[Target]) -> list[Wanted]:
    """Returns the units that ``targets`` need, ascending by number."""
    found: dict[int, list[Target]] = collections.defaultdict(list)
    for target in targets:
        for number in leaf.units.touching(clip(target.box, leaf.shape)):
            found[number].append(target)
    return [_wanted_unit(leaf, number, found[number]) for number in sorted(found)]


def _wanted_unit(leaf: StoredLeaf, number: int, targets: Sequence[Target]) -> Wanted:
    def take(box: Box, values: NDArray[np.generic]) -> None:
        for target in targets:
            target.fill(box, values)

    # Storage may write directly into a sole target that holds all of the unit without a cast.
    box, first = leaf.units.box(number), targets[0]
    alone = len(targets) == 1 and box and first.buffer.dtype == leaf.dtype and intersect(first.box, box) == box
    return Wanted(leaf, number, take, first.buffer[slices(box, first.box)] if alone else None)


class _Reading(NamedTuple):
    unit: Wanted
    box: Box
    values: PendingRead
    placed: bool  # storage writes the values where they are wanted
    bytes: int


class UnitReader:
    """Reads units with a bounded number of bytes in flight, checks them, and counts the bytes.

    Args:
      stored: the item.
      verify: check digests.
      bytes_in_flight: limit on the bytes requested from storage at once; at least one unit is always allowed.
      on_bytes: called with the number of bytes of each unit that was read.
      must_fit: parameter name → integer dtype in which its values must fit.
    """

    def __init__(
        self,
        stored: StoredArrays,
        *,
        verify: bool,
        bytes_in_flight: int | None,
        on_bytes: Callable[[int], None] = lambda count: None,
        must_fit: Mapping[str, DTypeLike] | None = None,
    ) -> None:
        self._stored = stored
        self._verify = verify
        self._limit = _BYTES_IN_FLIGHT if bytes_in_flight is None else max(1, bytes_in_flight)
        self._on_bytes = on_bytes
        self._must_fit = must_fit or {}
        self.bytes_read = 0

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Reads units in order and calls each one's ``take`` in the same order."""
        wanted = list(wanted)
        self._stored.open_soon(dict.fromkeys(unit.leaf.name for unit in wanted))
        pending: collections.deque[_Reading] = collections.deque()
        in_flight = 0
        for unit in wanted:
            leaf, box = unit.leaf, unit.leaf.units.box(unit.number)
            size = box_size(box) * leaf.itemsize
            while pending and in_flight + size > self._limit:
                in_flight -= self._finish(pending.popleft())
            placed = None if unit.room is None else self._stored.start_read_into(leaf, box, unit.room)
            values = placed or self._stored.start_read(leaf, box)
            pending.append(_Reading(unit, box, values, placed is not None, size))
            in_flight += size
        while pending:
            self._finish(pending.popleft())

    def _finish(self, reading: _Reading) -> int:
        leaf = reading.unit.leaf
        values = self._stored.finish_read(leaf, reading.box, reading.values, self._verify)
        if leaf.name in self._must_fit:  # while hosts still agree on errors
            check_fits(f"leaf {leaf.name!r}", values, self._must_fit[leaf.name])
        self.bytes_read += reading.bytes
        self._on_bytes(reading.bytes)
        if not reading.placed:
            reading.unit.take(reading.box, values)
        return reading.bytes
