"""One item of arrays in storage, whether meshfeed or plain Orbax wrote it: its manifest, its tree, and reads of values.

The manifest holds what Orbax's own files lack: exact dtypes, chunk digests, the save's identity. It is stored in the
folder ``meshfeed`` inside the item, so it is copied with the arrays, and plain Orbax ignores it. While saving, every host
writes a part with its digests (``arrays-<process>.json``), and process 0 writes the tree (``tree.json``). Once all have
written, the primary host merges the parts into ``manifest.json`` and removes them. Parts that were never merged, because a
manager other than Orbax's does not finalize, are merged on reading.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
import xxhash
from etils import epath
from jax.sharding import NamedSharding, Sharding
from numpy.typing import NDArray

from meshfeed._src.base.coordination import process_count, process_index
from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.store_path import StorePath, absolute_path, children, make_path
from meshfeed._src.base.stores import RefusedError
from meshfeed._src.base.threads import in_threads
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.checkpoint.chunks import ChunkReader, database_of, metadata_key_of, write_into
from meshfeed._src.checkpoint.layout import Box, Grid, box_shape, slices
from meshfeed._src.checkpoint.leaves import (
    CARRIERS,
    NOTHING,
    VALUE,
    Entry,
    Leaf,
    SavedLeaf,
    from_carrier,
    keys_of,
    leaf_name,
    saved_leaf,
    tree_of,
)
from meshfeed._src.checkpoint.orbax_internals import SHARDINGS
from meshfeed._src.state.files import DamagedStateError, read_sealed, readable_path, sealed, write_json


def digest(values: NDArray[np.generic]) -> str:
    """Returns the xxh3-64 of ``values``' bytes in row-major order, as 16 hex digits.

    Digests are of decoded values, not of files: a flipped bit in a compressed chunk may decode without an error.
    """
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def digests_of(values: NDArray[np.generic], box: Box, grid: Grid) -> dict[int, str]:
    """Returns the digest of each cell of a grid that the values of a box cover, by its number."""
    return {number: digest(values[slices(grid.box(number), box)]) for number in grid.touching(box)}


@public("meshfeed.checkpoint")
class DamagedCheckpointError(DamagedStateError):
    """The stored bytes of a checkpoint differ from those written.

    It is both a :class:`~meshfeed.CheckpointError` and a :class:`~meshfeed.CorruptDataError`.
    """


class MissingArrayError(DamagedCheckpointError, FileNotFoundError):
    """A parameter that the checkpoint lists is not stored; also the FileNotFoundError that Orbax raises."""


class StoredShapeError(CheckpointError, ValueError):
    """A shape was requested that is not compatible with the stored one; also the ValueError that Orbax raises."""


FOLDER = "meshfeed"
TREE_PART = "tree"
ARRAYS_PART = "arrays-"  # and the process
RESTORE_EARLIER = "Restore an earlier step."

_MANIFEST = "manifest"
_FORMAT, _VERSION = "meshfeed_arrays", 1
_SMALL_FILE_BYTES = 1 << 20
_WRITTEN_LATER = "_CHECKPOINT_METADATA"  # Orbax's Checkpointer rewrites it after all handlers have finished


@dataclasses.dataclass
class Manifest:
    """The merged manifest of one item of arrays."""

    identity: dict[str, JsonValue] | None = None  # of the save that wrote it
    leaves: dict[str, Entry] = dataclasses.field(default_factory=dict)  # by parameter name
    digests: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)  # parameter name → by cell number
    # Path in the item → [size in bytes, digest of the content for small files or None]; {} before merging.
    files: dict[str, list[JsonValue]] = dataclasses.field(default_factory=dict)
    skeleton: JsonValue = None  # the tree's structure, or None if only a type handler wrote the item


def write_part(item: epath.PathLike, part: str, digests: Mapping[str, Mapping[int, str]], **content: JsonValue) -> None:
    """Writes one file of a manifest: fields of :class:`Manifest`.

    ``part`` is ``ARRAYS_PART`` and the process, or ``TREE_PART``, which only process 0 writes. ``leaves`` of arrays are
    the same on all hosts, and only one host per folder writes them.
    """
    folder = make_path(item) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{part}.json", sealed({_FORMAT: _VERSION, "digests": digests, **content}))


def read_json(path: epath.Path) -> JsonValue:
    """Returns the content of a JSON file; raises DamagedCheckpointError if it is not JSON."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DamagedCheckpointError(f"{path}: not JSON ({error}). {RESTORE_EARLIER}", path=str(path)) from None


def read_manifest(item: epath.PathLike) -> Manifest | None:
    """Reads the manifest of an item of arrays; returns None for an item that plain Orbax wrote.

    Raises:
      DamagedCheckpointError: a part differs from what was written.
      CheckpointError: a newer version of meshfeed wrote it.
    """
    paths = [path for path in children(make_path(item) / FOLDER) if path.name.endswith(".json")]
    joined = [path for path in paths if path.stem == _MANIFEST]
    manifest = Manifest()
    read = functools.partial(
        read_sealed, form=_FORMAT, version=_VERSION, what="manifest of arrays", error=DamagedCheckpointError
    )
    for content in in_threads(read, joined or sorted(paths, key=lambda path: path.name)):
        manifest.identity = content.get("identity") or manifest.identity
        manifest.skeleton = content.get("skeleton") or manifest.skeleton
        manifest.leaves.update(content.get("leaves", {}))
        manifest.files.update(content.get("files", {}))
        for name, cells in content.get("digests", {}).items():
            manifest.digests.setdefault(name, {}).update({int(cell): digest for cell, digest in cells.items()})
    manifest.files.pop(_WRITTEN_LATER, None)
    return manifest if paths else None


def join_parts(item: epath.Path, manifest: Manifest) -> None:
    """Writes the merged parts of all hosts as one file, and removes the parts. One process calls it."""
    manifest.digests = {name: dict(sorted(cells.items())) for name, cells in manifest.digests.items()}
    manifest.files = manifest.files or _describe_files(item)
    parts = [path for path in (item / FOLDER).iterdir() if path.stem == TREE_PART or path.name.startswith(ARRAYS_PART)]
    # Write before removing the parts: readers prefer the merged file, so a crash in between loses nothing.
    write_part(item, _MANIFEST, **vars(manifest))
    in_threads(lambda path: path.unlink(), parts)


def _describe_files(item: epath.Path) -> dict[str, list[JsonValue]]:
    """Returns the sizes of an item's files (without the manifest's), and digests of small files without array data."""
    found: dict[str, list[JsonValue]] = {}
    folders = [item]
    while folders:
        for path in folders.pop().iterdir():
            relative = path.relative_to(item).as_posix()
            if not path.is_dir():
                size = _size_of(path)
                # OCDBT keeps array data in folders "d"; the digests of chunks cover it.
                small = size <= _SMALL_FILE_BYTES and "d" not in relative.split("/")[:-1]
                found[relative] = [size, xxhash.xxh3_64_hexdigest(path.read_bytes()) if small else None]
            elif relative != FOLDER:
                folders.append(path)
    return found


def _size_of(file: epath.Path) -> int:
    # epath also looks up the names of the owner and the group, which may have none, as in many containers.
    return file.stat().length if "://" in str(file) else os.stat(file).st_size


def write_files_part(item: epath.Path) -> None:
    """Writes the part of a manifest with this process's files, all of which are in a local folder, to be stored elsewhere."""
    write_part(item, f"{ARRAYS_PART}files-{process_index()}", {}, files=_describe_files(item))


def file_problems(item: epath.Path, manifest: Manifest, *, content: bool) -> Iterator[tuple[epath.Path, str]]:
    """Yields (path, difference) for each file of an item that differs from what was written."""
    sizes = item.sizes() if isinstance(item, StorePath) else None  # in few requests
    for name, (size, digest) in manifest.files.items():
        path = item / name
        if sizes is not None:
            found = sizes.get(name)
        else:
            found = _size_of(path) if path.exists() else None
        if found is None:
            yield path, "is missing"
        elif found != size:
            yield path, f"has {found} bytes, but {size} bytes were saved"
        elif content and digest is not None and xxhash.xxh3_64_hexdigest(path.read_bytes()) != digest:
            yield path, "has a different digest from the saved file"


_TREE_METADATA = "_METADATA"
_DATABASE = "manifest.ocdbt"
_TEXTS = "_strings.json"
_KEY_METADATA = "array_metadatas/process_0"  # every process writes the same
_PLAIN_KINDS = {"jax.Array": "jax", "np.ndarray": "numpy", "scalar": "scalar", "string": "str"}
_BYTES_KEPT_BY_A_THREAD = 64 << 20


def _threads(most: int, memory_limit_bytes: int | None) -> int:
    # glibc keeps what a thread has freed for that thread's next allocation: a chunk's bytes and its decoded values,
    # 2 × 16 MiB, and up to 64 MiB in all.
    return most if memory_limit_bytes is None else min(most, max(1, memory_limit_bytes // _BYTES_KEPT_BY_A_THREAD))


def _kvstore(folder: str) -> JsonValue:
    return f"{folder}/" if "://" in folder else {"driver": "file", "path": f"{folder}/"}


def find_item(directory: epath.PathLike) -> epath.Path:
    """Returns the folder of the arrays: ``directory`` itself, or the only item inside it."""
    directory = readable_path(directory)
    if (directory / _TREE_METADATA).exists() or (directory / FOLDER).exists() or not directory.exists():
        return directory
    found = [path for path in directory.iterdir() if path.is_dir() and (path / _TREE_METADATA).exists()]
    return found[0] if len(found) == 1 else directory


PendingRead: TypeAlias = Callable[[], NDArray[np.generic]]
"""Waits for a read that has started, and returns the values."""


class StoredArrays:
    """Opens the arrays of an item, such as ``<checkpoint>/<step>/arrays``, and reads boxes of them.

    A memory limit reduces the number of threads that read and decode. ``metadata_key`` is that of ``RestoreOptions``; not
    needed if our manifest records it.

    Raises:
      CheckpointError: the folder does not exist.
      DamagedCheckpointError: the manifest differs from what was written.
    """

    def __init__(
        self, directory: epath.PathLike, memory_limit_bytes: int | None = None, metadata_key: str | None = None
    ) -> None:
        self.directory = absolute_path(make_path(directory))
        manifest = read_manifest(self.directory)
        if manifest is None and not self.directory.exists():
            raise CheckpointError(f"{directory}: no such folder, expected an item of arrays that Orbax wrote.")
        self.is_plain = manifest is None  # plain Orbax wrote it
        self.manifest = manifest or Manifest()
        # One shared context, so the nodes of the OCDBT tree are read only once for all arrays.
        self._context = ts.Context(
            {
                "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
                "file_io_concurrency": {"limit": _threads(64, memory_limit_bytes)},
                "data_copy_concurrency": {"limit": _threads(8, memory_limit_bytes)},
                "s3_request_retries": {"max_retries": 8, "initial_delay": "200ms", "max_delay": "5s"},
            }
        )
        described = self.manifest.files  # without a request
        self._ocdbt = _DATABASE in described if described else (self.directory / _DATABASE).exists()
        self._chunks: ChunkReader | None = None
        if isinstance(self.directory, StorePath) and not self._ocdbt:
            self._chunks = ChunkReader(self.directory, _threads(32, memory_limit_bytes), self._context)
        keys = {entry["metadata_key"] for entry in self.manifest.leaves.values() if "metadata_key" in entry}
        self.metadata_key: str | None = next(iter(keys), metadata_key)
        self._opened: dict[str, ts.Future[ts.TensorStore]] = {}
        self._leaves: dict[str, SavedLeaf] = {}

    @functools.cached_property
    def metadata(self) -> dict[str, JsonValue]:
        """Orbax's own metadata of the tree."""
        path = self.directory / _TREE_METADATA
        try:
            return read_json(path)
        except FileNotFoundError:
            text = f"{path}: no such file, so this is not an item of arrays that Orbax wrote."
            raise CheckpointError(text) from None

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
        if self.manifest.skeleton is not None:
            return {name: entry["kind"] for name, entry in self.manifest.leaves.items()}
        return {name: _PLAIN_KINDS[kind] for name, kind in self._plain_types.items() if kind in _PLAIN_KINDS}

    def array_names(self) -> list[str]:
        """Returns the parameters whose values are stored as arrays."""
        without = {
            name for name, entry in self.manifest.leaves.items() if "value" in entry or entry.get("stored") == NOTHING
        }
        return [name for name, kind in self.kinds.items() if kind != "str" and name not in without]

    def saved(self, name: str) -> SavedLeaf:
        """Describes the leaf that was saved under a parameter name; opens it if the manifest does not describe it."""
        if name not in self._leaves:
            self._leaves[name] = self._recorded(name) if name in self.manifest.leaves else self._found(name)
        return self._leaves[name]

    def _recorded(self, name: str) -> SavedLeaf:
        leaf = saved_leaf(name, self.manifest.leaves[name])
        if leaf.encoding in (VALUE, NOTHING):
            return leaf
        chunk = leaf.chunk if "chunk" in self.manifest.leaves[name] else tuple(self.chunk_of(name))
        return dataclasses.replace(leaf, chunk=chunk, digests=self.manifest.digests.get(name, {}))

    def _found(self, name: str) -> SavedLeaf:
        kind = self.kinds.get(name, "jax")
        if kind == "str":
            return SavedLeaf(name, kind, (), np.dtype(str), VALUE, value=self._texts[name])
        store = self.open(name)
        dtype = jnp.dtype(store.dtype.numpy_dtype)
        impl = self._plain_impls.get(name) if dtype == np.uint32 else None
        shape, chunk = keys_of(tuple(store.shape), impl), tuple(self.chunk_of(name))
        return SavedLeaf(name, kind, shape, dtype, impl=impl, chunk=chunk)

    @functools.cached_property
    def _texts(self) -> dict[str, str]:
        return read_json(self.directory / _TEXTS)

    @functools.cached_property
    def _format(self) -> dict[str, JsonValue]:
        """The part of Orbax's metadata on how arrays are stored; empty for an item without any arrays."""
        if self.is_plain:
            return self.metadata
        try:
            return read_json(self.directory / _TREE_METADATA)
        except FileNotFoundError:
            return {}

    def _spec(self, name: str) -> dict[str, JsonValue]:
        plain, base = self._format, os.fspath(self.directory)
        if self._ocdbt:
            root = database_of(self.directory) if isinstance(self.directory, StorePath) else _kvstore(base)
            kvstore: JsonValue = {"driver": "ocdbt", "base": root, "path": f"{name}/", "cache_pool": "cache_pool#ocdbt"}
        else:
            kvstore = _kvstore(f"{base}/{name}" if name else base)  # the root, which is the only leaf
        fill = not plain.get("store_array_data_equal_to_fill_value", False)
        of_arrays = self.metadata_key is not None and self._plain_types[name] == "jax.Array"
        # A committed checkpoint does not change, so caches need no revalidation. With our manifest, a missing chunk is
        # damage, never the fill value.
        return {
            "driver": "zarr3" if plain.get("use_zarr3") else "zarr",
            "kvstore": kvstore,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": fill and self.is_plain,
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
            if name not in self._opened and self._chunks is not None:
                self._opened[name] = self._chunks.open(self._spec(name), name)
            elif name not in self._opened:
                self._opened[name] = ts.open(self._spec(name), open=True, read=True, context=self._context)

    def open(self, name: str) -> ts.TensorStore:
        """Returns the TensorStore of a parameter, opening it if needed."""
        self.open_soon([name])
        try:
            return self._opened[name].result()
        except Exception as error:
            raise self._failure(f"{self.directory}: parameter {name!r} cannot be opened", error) from error

    def _failure(self, what: str, error: BaseException) -> CheckpointError:
        # TensorStore raises ValueError alike for a truncated file, a failed checksum and a missing file. Errors of the
        # storage itself can be recognized by their text; they do not mean that the checkpoint is damaged.
        text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
        missing = isinstance(error, FileNotFoundError) or text.startswith("NOT_FOUND")
        refused = isinstance(error, OSError | RefusedError) or any(
            word in text for word in ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "OS error")
        )
        if refused and not missing and "No such file" not in text:
            return CheckpointError(f"{what}: {text}")
        kind = MissingArrayError if missing else DamagedCheckpointError
        return kind(f"{what}: {text}. {RESTORE_EARLIER}", path=str(self.directory))

    def chunk_of(self, name: str) -> list[int]:
        """Returns the shape of a parameter's stored chunks."""
        store = self.open(name)
        return [size or 0 for size in store.chunk_layout.read_chunk.shape or ()] if store.rank else []

    def copy_metadata(self, folder: epath.Path) -> None:
        """Writes what Orbax needs to describe the tree into a local folder: the item without its values."""
        # The metadata of arrays become files, also of those in a database.
        (folder / _TREE_METADATA).write_text(json.dumps({**self.metadata, "use_ocdbt": False}))
        for name in (SHARDINGS, _TEXTS, _KEY_METADATA):
            path = self.directory / name
            if path.exists():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(path.read_bytes())
        names = self.array_names()
        self.open_soon(names)
        for name in names:
            path = epath.Path(f"{folder}/{name}")
            if not f"{os.path.realpath(path)}/".startswith(f"{os.path.realpath(folder)}/"):
                raise CheckpointError(f"{self.directory}: parameter {name!r} has a name that leads out of this folder.")
            key = metadata_key_of(self._spec(name))
            store: Any = self.open(name).kvstore  # every array in storage has one
            found: bytes = store.read(key).result().value
            path.mkdir(parents=True, exist_ok=True)
            (path / key).write_bytes(found)

    def start_read(self, leaf: SavedLeaf, box: Box, room: NDArray[np.generic] | None = None) -> PendingRead:
        """Starts reading a box, into ``room`` if that takes values as they are stored; pass the result to finish_read."""
        store = self.open(leaf.name)
        stored_dtype = store.dtype.numpy_dtype
        if room is None or leaf.encoding in CARRIERS or stored_dtype != room.dtype:
            room = np.empty(box_shape(box), stored_dtype)
        if self._chunks is not None:
            return self._chunks.read(self._spec(leaf.name), store, leaf.name, box, room)
        written = write_into(room, store[slices(box)], self._context)
        return lambda: (written.result(), room)[1]

    def finish_read(self, leaf: SavedLeaf, box: Box, wait: PendingRead, verify: bool) -> NDArray[np.generic]:
        """Waits for a read of whole cells, checks it, and returns the values in the leaf's dtype."""
        where = f"{self.directory}: parameter {leaf.name!r}, values {[list(side) for side in box]}"
        try:
            values = np.asarray(wait()).reshape(box_shape(box))
        except Exception as error:
            raise self._failure(f"{where}: cannot be read", error) from error
        if verify and leaf.digests and leaf.cell is not None:
            for number, found in digests_of(values, box, Grid(leaf.stored_shape, leaf.cell)).items():
                if found != (wanted := leaf.digests.get(number)):
                    raise DamagedCheckpointError(
                        f"{where}: digest is {found}, but {wanted} was saved: stored bytes have changed. {RESTORE_EARLIER}",
                        path=str(self.directory),
                    )
        return from_carrier(values, leaf.dtype) if leaf.encoding in CARRIERS else values


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
    with contextlib.ExitStack() as stack:
        directory = stored.directory
        if isinstance(directory, StorePath):  # which Orbax does not read
            directory = epath.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshfeed-")))
            stored.copy_metadata(directory)
        described = orbax.metadata(directory).tree
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _placeholder(stored.saved(leaf_name(path)), leaf), described
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


def cut_to_rank(sharding: Sharding, rank: int) -> Sharding:
    """Truncates a spec to ``rank``: Orbax records the sharding of a PRNG key's data, which has more dimensions."""
    if not isinstance(sharding, NamedSharding) or any(sharding.spec[rank:]):
        return sharding
    spec = jax.sharding.PartitionSpec(*sharding.spec[:rank])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


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
