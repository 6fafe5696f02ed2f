"""Orbax handlers for a ``jax.Array`` and for a tree of leaves: digests are saved, each stored byte is read once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding
from orbax.checkpoint import future as orbax_future

from meshfeed._src.arrays.reshard import without_ambient_mesh
from meshfeed._src.base.coordination import process_count, process_index
from meshfeed._src.base.errors import CheckpointError, SettingsError
from meshfeed._src.base.threads import SingleCall
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.checkpoint import manifest
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.arguments import RestoreOptions, created, options_of
from meshfeed._src.checkpoint.dtypes import stored_as
from meshfeed._src.checkpoint.leaves import EncodedTree, Entry, describe_array, encode_tree, is_key
from meshfeed._src.checkpoint.manifest import digest
from meshfeed._src.checkpoint.orbax_internals import metadata_store
from meshfeed._src.checkpoint.restore import LeafRequest
from meshfeed._src.checkpoint.save_layout import MIN_SLICE_BYTES, ShardDigests, lay_out
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed._src.checkpoint.tree_restore import (
    Planned,
    TreePlan,
    abstract_tree_of,
    plan_array,
    restore_planned,
    restore_tree,
    type_handlers,
)
from meshfeed._src.state.files import readable_path


@public("meshfeed.checkpoint._array_handler")  # Orbax writes this name into checkpoints, so it must not change
class ArrayHandler(ocp.type_handlers.ArrayHandler):
    """Orbax's handler for ``jax.Array`` that saves exactly, with digests, and restores read-once and bit for bit.

    ::

        ocp.type_handlers.register_type_handler(jax.Array, ArrayHandler(restore="once"), override=True)

    Every process of the job must restore the same tree. Hosts confirm that all reads succeeded before anything is
    gathered. This does not cover errors in Orbax's own metadata files, outside the handler:
    ``ocp.Checkpointer.restore`` ends in Orbax's own barrier, so if one process fails there, the others wait until
    Orbax's timeout.

    Args:
      restore: see :class:`RestoreOptions`.
      replica_axis: see :class:`RestoreOptions`.
      primary_replica: see :class:`RestoreOptions`.
      memory_limit_bytes: see :class:`RestoreOptions`.
      verify: check digests if the checkpoint has any.
      **orbax: passed to ``ocp.type_handlers.ArrayHandler``. Also accepts the names that ``SingleReplicaArrayHandler``
        uses for the settings above: ``replica_axis_index``, ``primary_replica_id``, ``broadcast_memory_limit_bytes``
        (per process here), and ``broadcast_memory_scaling_factor``, the fraction of a device's free memory to use if
        no limit is given. With a ``dispatcher``, Orbax reads on the workers; ``restore``, the limit and ``verify`` do
        not apply to what they read.

    Raises:
      SettingsError: ``restore`` is unknown, a limit is not a positive int, or a setting is given under both names with
        different values.
    """

    def __init__(
        self,
        restore: str = "once",
        replica_axis: str | int | None = None,
        primary_replica: int = 0,
        memory_limit_bytes: int | None = None,
        *,
        verify: bool = True,
        **orbax: Any,
    ) -> None:
        self.restore_options = options_of(
            orbax,
            restore=restore,
            replica_axis=replica_axis,
            primary_replica=primary_replica,
            memory_limit_bytes=memory_limit_bytes,
            verify=verify,
            metadata_key=orbax.get("metadata_key"),
            dispatch=None if orbax.get("dispatcher") is None else self._dispatched,
        )
        orbax.setdefault("array_metadata_store", metadata_store())
        least = self._min_slice_bytes = orbax.get("min_slice_bytes_for_replica_parallel")
        # Without it, Orbax would slice again on the device, by default with no minimum size: eight chunks for 16 KiB.
        least = MIN_SLICE_BYTES if least is None else least
        super().__init__(**{**orbax, "min_slice_bytes_for_replica_parallel": least})
        self._replica = orbax.get("replica_id", 0)
        # Share writes among replicas unless an Orbax setting restricts which replicas write.
        unrestricted = self._replica is not None and orbax.get("max_replicas_for_replica_parallel") is None
        self._share = unrestricted and orbax.get("use_replica_parallel") is not False
        self._local_storage = orbax.get("primary_host", 0) is None  # each host writes to its own folder
        self._status = orbax.get("callback")

    async def serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> Sequence[orbax_future.Future]:
        """Captures the arrays and returns futures that write them and their digests."""
        args = args or [ocp.type_handlers.SaveArgs()] * len(values)
        if infos[0].is_ocdbt_checkpoint or infos[0].use_zarr3:
            check_metadata_key(self.restore_options.metadata_key)
        with without_ambient_mesh():  # not across an await: another coroutine on this thread may need the caller's mesh
            laid = [self._lay_out(*one) for one in zip(values, infos, args, strict=True)]
        names = [info.name for info in infos]
        pending = {name: one.digests for name, one in zip(names, laid, strict=True) if one.digests is not None}
        for digests in pending.values():  # before Orbax starts threads that compete for the GIL
            digests.capture()
        futures = list(await super().serialize([one.array for one in laid], infos, [one.args for one in laid]))
        process, folder = process_index(), infos[0]
        entries = {name: one.entry for name, one in zip(names, laid, strict=True) if one.entry is not None}
        if process != 0 and not self._local_storage:
            entries = {}

        async def write_digests() -> None:
            await folder.await_path_creation()
            found = {name: digests.compute() for name, digests in pending.items()}
            manifest.write_part(folder.parent_dir, f"{manifest.ARRAYS_PART}{process}", found, leaves=entries)

        futures.append(orbax_future.CommitFutureAwaitingContractedSignals(write_digests(), name="meshfeed_digests"))
        return futures

    def _lay_out(self, value: jax.Array, info: ocp.type_handlers.ParamInfo, args: ocp.type_handlers.SaveArgs) -> _Laid:
        """Returns the array that Orbax writes, and its manifest entry and digests."""
        if process_count() > 1 and value.is_fully_addressable:
            return _Laid(value, args)  # Orbax rejects it with a clear message
        assert info.name is not None
        _check_hosts(info.name, value)
        # Under Orbax's limit on host memory, copy early only what Orbax itself copies synchronously.
        limited = getattr(info.device_host_byte_limiter, "max_bytes", None) is not None
        # Values that Orbax copies to the host later are not copied here: the caller must keep them alive until then.
        early = not limited or self._status is None or self._status.key_priority(info.keypath).name == "SYNCHRONOUS"
        entry = describe_array(value)
        if self.restore_options.metadata_key is not None:
            entry["metadata_key"] = self.restore_options.metadata_key
        if value.size == 0:
            return _Laid(_placeholder(value), args, entry)
        if is_key(value):
            data = jax.random.key_data(value)
            cell = data.sharding.shard_shape(data.shape)
            entry |= {"cell": list(cell), "chunk": list(cell)}
            return _Laid(value, args, entry, ShardDigests(data, cell, replica_id=self._replica, early=early))
        laid = lay_out(value, dtype=args.dtype, share=self._share and early, min_slice_bytes=self._min_slice_bytes)
        dtype = np.dtype(args.dtype or value.dtype)  # lay_out has cast the values to it
        entry.pop("stored", None)
        entry |= {"dtype": dtype.name, **stored_as(dtype), "cell": list(laid.cell)}
        asked = args.chunk_byte_size or laid.chunk_byte_size
        args = dataclasses.replace(args, dtype=None, chunk_byte_size=asked)
        if self.has_dispatcher():
            return _Laid(laid.array, args, entry)
        if asked is None:  # a slice is a chunk (or a few, if Orbax slices too): known without opening it
            entry["chunk"] = entry["cell"]
        digests = ShardDigests(laid.array, laid.cell, replica_id=self._replica, early=early)
        return _Laid(laid.array, args, entry, digests)

    async def deserialize(
        self,
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.RestoreArgs] | None = None,
    ) -> Sequence[jax.Array]:
        """Restores the arrays. All processes of the job must call it with the same parameters.

        Raises:
          CheckpointError: on every host, if any host could not read; the message names that host and the parameter.
          DamagedCheckpointError: on every host, if any host read bytes that differ from those written.
          ValueError: ``args`` is None.
        """
        if args is None:
            raise ValueError("ArrayRestoreArgs are needed to restore a jax.Array; none were given.")
        await asyncio.gather(*(info.await_path_creation() for info in infos))
        saved: Sequence[object] = [None] * len(infos)
        if any(getattr(arg, "sharding", None) is None and getattr(arg, "mesh", None) is None for arg in args):
            saved = await self.metadata(infos)
        options, directory = self.restore_options, infos[0].parent_dir
        agreement = Agreement(f"restoring {directory}", options.timeout_seconds)

        def make_plan() -> TreePlan:
            stored = StoredArrays(directory, options.memory_limit_bytes, options.metadata_key)
            leaves = [_plan_parameter(stored, *one) for one in zip(infos, args, saved, strict=True)]
            return TreePlan(stored, leaves, list)

        return restore_planned(make_plan, options, agreement)

    def _dispatched(self, stored: StoredArrays, requests: Sequence[LeafRequest]) -> Sequence[jax.Array]:
        """Restores through Orbax, whose dispatcher makes the workers read."""
        infos = [stored.param_info(request.leaf.name) for request in requests]
        args = [
            ocp.ArrayRestoreArgs(sharding=one.sharding, global_shape=one.shape, dtype=one.dtype, strict=False)
            for one in requests
        ]
        # On a separate thread, because the caller may already be inside an event loop.
        deserialize = super().deserialize
        return SingleCall(lambda: asyncio.run(deserialize(infos, args)), "meshfeed-restore").result()


@dataclasses.dataclass
class _Laid:
    """A parameter as Orbax writes it.

    Attributes:
      array: the array that Orbax writes.
      args: how Orbax writes it.
      entry: its manifest entry, or None if Orbax will reject it.
      digests: its digests, or None if there are none.
    """

    array: jax.Array
    args: ocp.type_handlers.SaveArgs
    entry: Entry | None = None
    digests: ShardDigests | None = None


def _plan_parameter(
    stored: StoredArrays, info: ocp.type_handlers.ParamInfo, arg: ocp.type_handlers.RestoreArgs, saved: object
) -> Planned:
    """Plans a parameter from Orbax's restore arguments: ``ArrayRestoreArgs``, or plain ``RestoreArgs``."""
    assert info.name is not None
    shape = getattr(arg, "global_shape", None)
    return plan_array(
        stored,
        info.name,
        getattr(arg, "shape", None) if shape is None else shape,
        arg.dtype,
        _sharding(stored, info.name, arg, saved),
        strict=getattr(arg, "strict", True),
        any_cast=True,  # Orbax's restore arguments request a dtype explicitly, not through a template tree
    )


def _sharding(stored: StoredArrays, name: str, arg: ocp.type_handlers.RestoreArgs, saved: object) -> Sharding | None:
    mesh, axes = getattr(arg, "mesh", None), getattr(arg, "mesh_axes", None)
    if mesh is not None and axes is not None:
        return jax.sharding.NamedSharding(mesh, axes)
    sharding = getattr(arg, "sharding", None) or getattr(saved, "sharding", None)
    if sharding is not None and hasattr(sharding, "to_jax_sharding"):
        try:
            return sharding.to_jax_sharding()
        except Exception as error:  # devices of a different topology
            raise CheckpointError(
                f"parameter {name!r}: the saved sharding does not fit these devices ({error}). Pass a sharding."
            ) from error
    return stored.saved(name).saved_sharding() if sharding is None else sharding


def check_metadata_key(key: str | None) -> None:
    """Rejects ``metadata_key`` for formats in which Orbax would write its metadata files and then fail to find them."""
    if key is not None:
        raise SettingsError(
            f"metadata_key={key!r}: Orbax supports it only for zarr files without OCDBT. Set use_ocdbt=False (and not "
            "use_zarr3) on the handler of the tree, or omit metadata_key.",
            setting="metadata_key",
        )


def _check_hosts(name: str, value: jax.Array) -> None:
    hosts = {device.process_index for device in value.sharding.device_set}
    if 1 < len(hosts) < process_count():
        absent = sorted(set(range(process_count())) - hosts)
        raise CheckpointError(
            f"parameter {name!r} has no device on the hosts {absent}; Orbax can save only arrays with a device on every "
            "host. Save it in a job without those hosts, or replicate it over all hosts first."
        )


def _placeholder(value: jax.Array) -> jax.Array:
    # Orbax cannot store an array of size 0, so a single uint8 takes its place; restore ignores it.
    shape = (1,) * value.ndim
    sharding = value.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return jax.make_array_from_callback(shape, sharding, lambda _: np.zeros(shape, np.uint8))


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
