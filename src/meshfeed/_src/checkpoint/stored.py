"""Reads the arrays of one Orbax checkpoint item, whether meshfeed or plain Orbax wrote it."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.checkpoint.leaves import CARRIERS, dtype_of, numpy_from_stored
from meshfeed._src.checkpoint.load_plan import Box, Grid, box_shape, joint_cell, slices
from meshfeed._src.checkpoint.manifest import DamagedCheckpointError, Manifest, read_manifest

_TREE_METADATA = "_METADATA"
_JAX_ARRAY = "jax.Array"
_KEY_METADATA = "array_metadatas/process_0"  # every process writes the same

_BYTES_KEPT_BY_A_THREAD = 64 << 20


def _threads(most: int, memory_limit_bytes: int | None) -> int:
    # glibc keeps what a thread has freed for that thread's next allocation: a chunk's bytes and its decoded values,
    # 2 × 16 MiB, and up to 64 MiB in all.
    return most if memory_limit_bytes is None else min(most, max(1, memory_limit_bytes // _BYTES_KEPT_BY_A_THREAD))


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
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    carried: bool
    cell: tuple[int, ...] | None
    chunk: tuple[int, ...]
    digests: Mapping[int, str]
    impl: str | None = None

    @property
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

    def __init__(self, directory: Any, memory_limit_bytes: int | None = None, metadata_key: str | None = None) -> None:
        self.directory = epath.Path(directory)
        if not self.directory.exists():
            raise CheckpointError(f"{directory}: no such folder, expected an item of arrays that Orbax wrote.")
        self.manifest: Manifest | None = read_manifest(self.directory)
        # One shared context, so the nodes of the OCDBT tree are read only once for all arrays.
        self._context = ts.Context(
            {
                "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
                "file_io_concurrency": {"limit": _threads(64, memory_limit_bytes)},
                "data_copy_concurrency": {"limit": _threads(8, memory_limit_bytes)},
            }
        )
        self._ocdbt = (self.directory / "manifest.ocdbt").exists()
        entries = {} if self.manifest is None else self.manifest.leaves
        keys = {entry["metadata_key"] for entry in entries.values() if "metadata_key" in entry}
        self.metadata_key = next(iter(keys), metadata_key)
        self._stores: dict[str, ts.TensorStore] = {}
        self._opening: dict[str, ts.Future] = {}
        self._leaves: dict[str, StoredLeaf] = {}
        self._metadata: dict[str, Any] | None = None
        self._impls: dict[str, str] | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """Orbax's own metadata of the tree."""
        if self._metadata is None:
            path = self.directory / _TREE_METADATA
            if not path.exists():
                raise CheckpointError(f"{path}: not there, so this is no item of arrays that Orbax wrote.")
            self._metadata = _read_json(path)
        return self._metadata

    def plain_leaves(self) -> dict[str, dict[str, Any]]:
        """Returns parameter name → {"keys", "value_type"} from Orbax's metadata."""
        found = {}
        for text, entry in self.metadata["tree_metadata"].items():
            keys = [str(part["key"]) for part in entry["key_metadata"]] if "key_metadata" in entry else None
            keys = keys or [str(key) for key in ast.literal_eval(text)]
            found[".".join(keys)] = {"keys": keys, "value_type": entry["value_metadata"]["value_type"]}
        return found

    def _plain_impls(self) -> dict[str, str]:
        """Returns parameter name → implementation of PRNG keys, as recorded by plain Orbax."""
        if self._impls is None:
            path = self.directory / _KEY_METADATA
            entries = _read_json(path)["array_metadatas"] if path.exists() else []
            found = {entry["array_metadata"]["param_name"]: entry["array_metadata"] for entry in entries}
            extras = {name: entry.get("ext_metadata") or {} for name, entry in found.items()}
            self._impls = {
                name: extra["random_key_impl"] for name, extra in extras.items() if "random_key_impl" in extra
            }
        return self._impls

    def _spec(self, name: str) -> dict[str, Any]:
        plain = self.metadata if self.manifest is None or (self.directory / _TREE_METADATA).exists() else {}
        base = os.fspath(self.directory)
        root: Any = base + "/" if "://" in base else {"driver": "file", "path": base + "/"}
        if self._ocdbt:
            kvstore: Any = {"driver": "ocdbt", "base": root, "path": f"{name}/", "cache_pool": "cache_pool#ocdbt"}
        elif "://" in base:
            kvstore = f"{root}{name}/"
        else:
            kvstore = {"driver": "file", "path": f"{base}/{name}/"}
        fill = not plain.get("store_array_data_equal_to_fill_value", False)
        of_arrays = self.metadata_key is not None and self.plain_leaves()[name]["value_type"] == _JAX_ARRAY
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
        return DamagedCheckpointError(f"{what}: {text}. Restore an earlier step.", path=str(self.directory))

    def chunk_of(self, name: str) -> list[int]:
        """Returns the shape of a parameter's stored chunks."""
        store: Any = self.open(name)
        return [int(size) for size in store.chunk_layout.read_chunk.shape] if store.rank else []

    def leaf(self, name: str) -> StoredLeaf:
        """Describes what is stored under a parameter name."""
        if name not in self._leaves:
            self._leaves[name] = self._describe(name)
        return self._leaves[name]

    def _describe(self, name: str) -> StoredLeaf:
        entry = None if self.manifest is None else self.manifest.leaves.get(name)
        if entry is None:
            store = self.open(name)
            shape, chunk = tuple(int(size) for size in store.shape), tuple(self.chunk_of(name))
            dtype = jnp.dtype(store.dtype.numpy_dtype)
            impl = self._plain_impls().get(name) if dtype == np.uint32 else None
            return StoredLeaf(name, shape, dtype, False, None, chunk, {}, impl)
        assert self.manifest is not None
        dtype, stored = dtype_of(entry), entry.get("stored")
        shape = tuple(entry.get("data_shape", entry["shape"]))
        if stored == "bytes":  # host values of unusual types are stored as flat bytes
            shape = (int(np.prod(shape)) * dtype.itemsize,)
            dtype = np.dtype(np.uint8)
        chunk = tuple(entry.get("chunk") or (self.chunk_of(name) if stored != "nothing" else shape))
        cell = tuple(entry["cell"]) if "cell" in entry else None
        digests = self.manifest.digests.get(name, {})
        return StoredLeaf(name, shape, dtype, stored in CARRIERS, cell, chunk, digests, entry.get("impl"))

    def start_read(self, leaf: StoredLeaf, box: Box) -> ts.Future:
        """Starts reading a box; pass the result to :meth:`finish_read`."""
        store = self.open(leaf.name)
        if leaf.shape == ():
            return store.read(order="C")
        return store[slices(box)].read(order="C")

    def start_read_into(self, leaf: StoredLeaf, box: Box, room: np.ndarray[Any, Any]) -> Any:
        """Like :meth:`start_read`, but into the caller's memory; returns None if the stored dtype is different."""
        store: Any = self.open(leaf.name)
        if leaf.carried or store.dtype.numpy_dtype != room.dtype:
            return None
        part = store[slices(box)][ts.d[:].translate_to[0]]
        return _ReadInto(room, ts.array(room, copy=False, write=True, context=self._context).write(part))

    def finish_read(self, leaf: StoredLeaf, box: Box, future: ts.Future, verify: bool) -> np.ndarray[Any, Any]:
        """Waits for a read of whole cells, checks it, and returns the values in the leaf's dtype.

        Raises:
          DamagedCheckpointError: the values differ from those written; the message names the parameter and the box.
          CheckpointError: storage cannot be read.
        """
        from meshfeed._src.checkpoint.digests import digest

        where = f"{self.directory}: parameter {leaf.name!r}, values {[list(side) for side in box]}"
        try:
            values = np.asarray(future.result()).reshape(box_shape(box))
        except Exception as error:
            raise self._failure(f"{where}: cannot be read", error) from error
        if verify and leaf.digests and leaf.cell is not None:
            grid = Grid(leaf.shape, leaf.cell)
            for number in grid.touching(box) if leaf.shape else (0,):
                found = digest(values[slices(grid.box(number), box)])
                wanted = leaf.digests.get(number)
                if found != wanted:
                    raise DamagedCheckpointError(
                        f"{where}: digest is {found}, saved was {wanted}: stored bytes have changed. Restore an "
                        "earlier step.",
                        path=str(self.directory),
                    )
        return numpy_from_stored(values, leaf.dtype) if leaf.carried else values


def _read_json(path: epath.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DamagedCheckpointError(f"{path}: not JSON ({error}). Restore an earlier step.") from None


@dataclasses.dataclass(frozen=True, eq=False)
class _ReadInto:
    """A read whose result is already in the caller's memory."""

    room: np.ndarray[Any, Any]
    written: Any

    def result(self) -> np.ndarray[Any, Any]:
        self.written.result()
        return self.room


def key_dtype(impl: str) -> Any:
    """Returns the dtype of PRNG keys with the given implementation."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def key_shape(shape: tuple[int, ...], impl: str) -> tuple[int, ...]:
    """Returns the shape of the key data of PRNG keys of ``shape``."""
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return (*shape, *data.shape)
