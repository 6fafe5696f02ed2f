"""An Orbax handler for a tree of arrays: saved with digests, restored with each stored byte read once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future as orbax_future

from meshfeed._src.base.coordination import process_index
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.checkpoint import manifest
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.arguments import RestoreOptions, created
from meshfeed._src.checkpoint.array_handler import ArrayHandler, check_metadata_key
from meshfeed._src.checkpoint.leaves import EncodedTree, encode_tree
from meshfeed._src.checkpoint.manifest import digest
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed._src.checkpoint.tree_restore import abstract_tree_of, restore_tree, type_handlers
from meshfeed._src.state.files import readable_path


@public("meshfeed.checkpoint._arrays")  # Orbax writes this name into checkpoints, so it must not change
class ArraysHandler(ocp.handlers.AsyncCheckpointHandler):
    """Saves and restores a pytree of arrays, numpy values, numbers and text exactly.

    Plain Orbax (``PyTreeCheckpointHandler``) can read the result. If TensorStore lacks a dtype, plain Orbax returns
    equal numbers of a different dtype; this handler returns the original dtype.

    Args:
      restore: see :class:`ArrayHandler`.
      replica_axis: see :class:`ArrayHandler`.
      primary_replica: see :class:`ArrayHandler`.
      memory_limit_bytes: see :class:`ArrayHandler`.
      verify: check digests while restoring.
      array_handler: keywords for Orbax's array handler, such as ``min_slice_bytes_for_replica_parallel``,
        ``primary_host`` or ``dispatcher``.
      **orbax: keywords for ``ocp.PyTreeCheckpointHandler``, such as ``save_device_host_concurrent_gb``.

    Raises:
      SettingsError: a setting has an invalid value.
    """

    def __init__(
        self,
        restore: str = "once",
        replica_axis: str | int | None = None,
        primary_replica: int = 0,
        memory_limit_bytes: int | None = None,
        *,
        verify: bool = True,
        array_handler: Mapping[str, object] | None = None,
        **orbax: Any,
    ) -> None:
        arrays = ArrayHandler(
            restore, replica_axis, primary_replica, memory_limit_bytes, verify=verify, **(array_handler or {})
        )
        self.restore_options = arrays.restore_options
        if orbax.get("use_ocdbt", True) or orbax.get("use_zarr3"):
            check_metadata_key(self.restore_options.metadata_key)
        self._all_primary = (array_handler or {}).get("primary_host", 0) is None
        self._orbax = ocp.PyTreeCheckpointHandler(type_handler_registry=type_handlers(arrays), **orbax)

    async def async_save(self, directory: epath.Path, args: ArraysSave) -> list[orbax_future.Future]:
        """Captures the tree and returns futures that write it."""
        encoded, identity = args.encoded or encode_tree(args.tree), args.identity
        futures: list[orbax_future.Future] = []
        # Orbax rejects a tree without leaves; such a tree is stored in our manifest only.
        if jax.tree.leaves(encoded.tree):
            plain = ocp.args.PyTreeSave(encoded.tree, args.save_args)
            futures += await self._orbax.async_save(directory, args=plain) or []

        async def write() -> None:
            path = await created(directory)
            digests = {name: {0: digest(values)} for name, values in encoded.host_arrays.items()}
            for name, values in encoded.host_arrays.items():
                shape = [max(1, size) for size in values.shape]
                encoded.leaves[name] |= {"cell": shape, "chunk": shape}
            content = {"leaves": encoded.leaves, "skeleton": encoded.skeleton, "identity": identity}
            manifest.write_part(path, manifest.TREE_PART, digests, **content)

        if process_index() == 0 or self._all_primary:
            futures.append(orbax_future.CommitFutureAwaitingContractedSignals(write(), name="meshfeed_tree"))
        return futures

    def save(self, directory: epath.PathLike, args: ArraysSave) -> None:
        """Writes the tree before returning."""

        async def run() -> None:
            for future in await self.async_save(epath.Path(directory), args):
                future.result()

        asyncio.run(run())

    def restore(self, directory: epath.PathLike, args: ArraysRestore | None = None) -> PyTree:
        """Reads the tree. Every process of the job must call it.

        Args:
          directory: the item's folder.
          args: the tree to restore; None restores everything as it was saved.

        Raises:
          CheckpointError: the same on every host; it names the host that could not read and the parameter.
          DamagedCheckpointError: likewise, if stored bytes differ from those written.
        """
        args, options = args or ArraysRestore(), self.restore_options
        agreement = Agreement(f"restoring {directory}", options.timeout_seconds)
        stored = agreement.attempt(lambda: StoredArrays(directory, options.memory_limit_bytes, options.metadata_key))
        return restore_tree(
            stored, args.abstract_tree, options, agreement, partial=args.partial_restore, strict=args.strict
        )

    def finalize(self, directory: epath.PathLike) -> None:
        """Merges the files of all hosts. Orbax calls it on the primary host once all hosts have written."""
        directory = epath.Path(directory)
        if (directory / "_METADATA").exists():
            self._orbax.finalize(directory)
        stored = StoredArrays(directory)
        # Record the chunk shapes that were not known while saving, so a restore need not open each array to plan.
        unknown = stored.names_without_chunk()
        stored.open_soon(unknown)
        manifest.join_parts(directory, {name: stored.chunk_of(name) for name in unknown})

    def metadata(self, directory: epath.PathLike) -> PyTree:
        """Returns the saved tree as ``jax.ShapeDtypeStruct`` with shardings, numpy dtypes and values."""
        return abstract_tree_of(StoredArrays(directory))


@public("meshfeed.checkpoint")
@ocp.args.register_with_handler(ArraysHandler, for_save=True)
@dataclasses.dataclass
class ArraysSave(ocp.args.CheckpointArgs):
    """Saves ``tree``.

    Attributes:
      tree: pytree of arrays, numpy values, numbers and text. Once ``save`` has returned, arrays may be donated and host
        values changed.
      save_args: tree of ``ocp.SaveArgs``, to cast or to choose chunk sizes.
      identity: links the arrays to the data position saved with them; set by ``Checkpointer``.
      encoded: the result of ``encode_tree(tree)``. Encoding first means that a leaf that cannot be saved raises before
        Orbax creates any folder.
    """

    tree: PyTree
    save_args: PyTree = None
    identity: Mapping[str, JsonValue] | None = None
    encoded: EncodedTree | None = None


@public("meshfeed.checkpoint")
@ocp.args.register_with_handler(ArraysHandler, for_restore=True)
@dataclasses.dataclass
class ArraysRestore(ocp.args.CheckpointArgs):
    """Restores a tree.

    Attributes:
      abstract_tree: pytree of ``jax.ShapeDtypeStruct`` with shardings, of arrays, or of numpy and Python values. It
        gives the structure, shapes, dtypes (cast if they differ from the stored ones) and shardings of the result;
        ``...`` omits a leaf. None restores everything as it was saved, as far as the available devices allow.
      partial_restore: ignore stored leaves that ``abstract_tree`` lacks.
      strict: reject shapes that differ from the stored ones. If False, truncate arrays or pad them with zeros.
    """

    abstract_tree: PyTree = None
    partial_restore: bool = False
    strict: bool = True


@public("meshfeed.checkpoint")
def restore_once(
    directory: epath.PathLike, abstract_tree: PyTree, memory_limit_bytes: int | None = None, **options: Any
) -> PyTree:
    """Restores arrays from a checkpoint item of meshfeed or plain Orbax, reading each stored byte once per job.

    Every process of the job must call it. If plain Orbax saved the checkpoint without replica-parallel slices, or with
    chunks larger than a host's share, each chunk is read whole by one host and sent to the others.

    Args:
      directory: the item's folder (``<step>/arrays``, ``<step>/default``), or a step's folder with only one such item.
      abstract_tree: see :class:`ArraysRestore`. For a plain Orbax checkpoint, None gives the tree that Orbax would
        return.
      memory_limit_bytes: limit on a process's extra memory in bytes, beyond the result and one shard.
      **options: further fields of ``RestoreOptions``: ``restore``, ``verify``, ``replica_axis``, ….

    Returns:
      A pytree of the structure of ``abstract_tree``, with its shapes, dtypes and shardings.

    Raises:
      CheckpointError: the same on every host; it names the host that could not read and the parameter.
      DamagedCheckpointError: likewise, if stored bytes differ from those written.
    """
    chosen = RestoreOptions(memory_limit_bytes=memory_limit_bytes, **options)
    agreement = Agreement(f"restoring {directory}", chosen.timeout_seconds)
    stored = agreement.attempt(
        lambda: StoredArrays(find_item(directory), chosen.memory_limit_bytes, chosen.metadata_key)
    )
    return restore_tree(stored, abstract_tree, chosen, agreement)


def find_item(directory: epath.PathLike) -> epath.Path:
    """Returns the folder of the arrays: ``directory`` itself, or the only item inside it."""
    directory = readable_path(directory)
    if (directory / "_METADATA").exists() or (directory / manifest.FOLDER).exists() or not directory.exists():
        return directory
    found = [path for path in directory.iterdir() if path.is_dir() and (path / "_METADATA").exists()]
    return found[0] if len(found) == 1 else directory
