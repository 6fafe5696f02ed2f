"""An Orbax TypeHandler for ``jax.Array`` that saves digests and reads each stored byte once on restore."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future as orbax_future

from meshfeed._src.arrays.reshard import without_ambient_mesh
from meshfeed._src.base.coordination import process_count, process_index
from meshfeed._src.base.errors import CheckpointError, SettingsError
from meshfeed._src.base.types import public
from meshfeed._src.checkpoint import manifest
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.arguments import RestoreOptions, options_of
from meshfeed._src.checkpoint.digests import ShardDigests
from meshfeed._src.checkpoint.engine import restore_leaves
from meshfeed._src.checkpoint.leaves import describe_array, is_key, stored_as
from meshfeed._src.checkpoint.orbax_internals import metadata_store
from meshfeed._src.checkpoint.save_layout import MIN_SLICE_BYTES, lay_out
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed._src.checkpoint.tree_restore import array_wanted, saved_sharding

if TYPE_CHECKING:
    from meshfeed._src.checkpoint.engine import LeafRequest
    from meshfeed._src.checkpoint.stored import StoredArrays


def restore_for_handler(
    infos: Sequence[Any], args: Sequence[Any], saved: Sequence[Any] | None, options: RestoreOptions
) -> list[Any]:
    """Restores the parameters of ``infos`` according to ``args``.

    Args:
      infos: Orbax's parameter infos, all from one folder.
      args: ``ArrayRestoreArgs``, or plain ``RestoreArgs`` to use the saved sharding.
      saved: Orbax's metadata of the same parameters; needed if any sharding is not given.
      options: how to restore them.
    """
    agreement = Agreement(f"restoring {infos[0].parent_dir}", options.timeout_seconds)

    def plan() -> tuple[StoredArrays, list[Any]]:
        stored = StoredArrays(infos[0].parent_dir, options.memory_limit_bytes, options.metadata_key)
        wanted = []
        for number, (info, arg) in enumerate(zip(infos, args, strict=True)):
            shape = getattr(arg, "global_shape", None)
            shape = getattr(arg, "shape", None) if shape is None else shape
            metadata = None if saved is None else saved[number]
            wanted.append(
                array_wanted(
                    stored,
                    info.name,
                    shape=shape,
                    dtype=arg.dtype,
                    sharding=_sharding(stored, info.name, arg, metadata),
                    strict=getattr(arg, "strict", True),
                    any_cast=True,  # Orbax's restore arguments request a dtype explicitly, not through a template tree
                )
            )
        return stored, wanted

    with without_ambient_mesh():  # parameters may be on devices outside the caller's jax.set_mesh
        stored, wanted = agreement.attempt(plan)
        requests = [request for request, _ in wanted if request is not None]
        results = iter(restore_leaves(stored, requests, options, agreement))
        return [finish(None if request is None else next(results)) for request, finish in wanted]


def _sharding(stored: StoredArrays, name: str, arg: Any, metadata: Any) -> Any:
    mesh, axes = getattr(arg, "mesh", None), getattr(arg, "mesh_axes", None)
    if mesh is not None and axes is not None:
        return jax.sharding.NamedSharding(mesh, axes)
    sharding = getattr(arg, "sharding", None)
    if sharding is None and metadata is not None:
        sharding = getattr(metadata, "sharding", None)
    if sharding is not None and hasattr(sharding, "to_jax_sharding"):
        try:
            sharding = sharding.to_jax_sharding()
        except Exception as error:  # devices of a different topology
            raise CheckpointError(
                f"parameter {name!r}: the saved sharding does not fit these devices ({error}). Give one."
            ) from error
    return saved_sharding(stored, name) if sharding is None else sharding


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
        # Otherwise Orbax slices again on the device, by default with no minimum size: eight chunks for 16 KiB.
        least = MIN_SLICE_BYTES if least is None else least
        super().__init__(**{**orbax, "min_slice_bytes_for_replica_parallel": least})
        # Share writes among replicas unless an Orbax setting restricts which replicas write.
        self._share = orbax.get("use_replica_parallel") is not False and orbax.get("replica_id", 0) is not None
        self._share = self._share and orbax.get("max_replicas_for_replica_parallel") is None
        self._replica = orbax.get("replica_id", 0)
        self._local_storage = orbax.get("primary_host", 0) is None  # each host writes to its own folder
        self._status = orbax.get("callback")

    async def serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> Sequence[orbax_future.Future]:
        """Captures the arrays and returns futures that write them and their digests."""
        args = list(args or [ocp.type_handlers.SaveArgs()] * len(values))
        if infos[0].is_ocdbt_checkpoint or infos[0].use_zarr3:
            check_metadata_key(self.restore_options.metadata_key)
        with without_ambient_mesh():  # not across an await: another coroutine on this thread may need the caller's mesh
            laid_values, entries, pending = self._lay_out(values, infos, args)
        for shards in pending.values():  # before Orbax starts threads that compete for the GIL
            shards.capture()
        futures = list(await super().serialize(laid_values, infos, args))
        process = process_index()
        info = infos[0]

        async def write_digests() -> None:
            await info.await_path_creation()

            digests = {name: shards.compute() for name, shards in pending.items()}
            keeps = process == 0 or self._local_storage
            manifest.write_arrays_part(epath.Path(info.parent_dir), process, entries if keeps else {}, digests)

        futures.append(orbax_future.CommitFutureAwaitingContractedSignals(write_digests(), name="meshfeed_digests"))
        return futures

    def _lay_out(
        self, values: Sequence[jax.Array], infos: Sequence[Any], args: list[Any]
    ) -> tuple[list[jax.Array], dict[str, Any], dict[str, ShardDigests]]:
        """Returns arrays for Orbax to write, and manifest entries and pending digests by name; updates ``args``."""
        entries: dict[str, Any] = {}
        pending: dict[str, ShardDigests] = {}
        limited = getattr(infos[0].device_host_byte_limiter, "max_bytes", None) is not None if infos else False
        laid_values: list[jax.Array] = []
        for number, (value, info) in enumerate(zip(values, infos, strict=True)):
            entry = describe_array(value)
            laid_values.append(value)
            if process_count() > 1 and value.is_fully_addressable:
                continue  # Orbax rejects it with a clear message
            _check_hosts(info.name, value)
            # Under Orbax's limit on host memory, copy early only what Orbax itself copies synchronously.
            early = not limited or self._is_synchronous(info)
            if value.size == 0:
                laid_values[number] = _placeholder(value)
            elif is_key(value):
                data = jax.random.key_data(value)
                entry["cell"] = list(data.sharding.shard_shape(data.shape))
                entry["chunk"] = entry["cell"]
                pending[info.name] = ShardDigests(data, tuple(entry["cell"]), replica_id=self._replica, early=early)
            else:
                laid = lay_out(
                    value,
                    dtype=args[number].dtype,
                    share=self._share and early,
                    min_slice_bytes=self._min_slice_bytes,
                )
                dtype = np.dtype(args[number].dtype or value.dtype)  # the values are cast to it before they are stored
                entry.pop("stored", None)
                entry |= {"dtype": dtype.name, **stored_as(dtype)}
                entry["cell"] = list(laid.cell)
                asked = args[number].chunk_byte_size or laid.chunk_byte_size
                # No dtype: lay_out has already cast.
                args[number] = dataclasses.replace(args[number], dtype=None, chunk_byte_size=asked)
                laid_values[number] = laid.array
                if not self.has_dispatcher():
                    if asked is None:  # a slice is a chunk (or a few, if Orbax slices too): known without opening it
                        entry["chunk"] = entry["cell"]
                    pending[info.name] = ShardDigests(laid.array, laid.cell, replica_id=self._replica, early=early)
            if self.restore_options.metadata_key is not None:
                entry["metadata_key"] = self.restore_options.metadata_key
            entries[info.name] = entry
        return laid_values, entries, pending

    def _is_synchronous(self, info: Any) -> bool:
        # Values that Orbax moves to the host later are not copied here: the caller must keep them alive until then.
        return self._status is None or self._status.key_priority(info.keypath).name == "SYNCHRONOUS"

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
        saved = None
        if any(getattr(arg, "sharding", None) is None and getattr(arg, "mesh", None) is None for arg in args):
            saved = await self.metadata(infos)
        return restore_for_handler(infos, args, saved, self.restore_options)

    def _dispatched(self, stored: StoredArrays, requests: Sequence[LeafRequest]) -> list[jax.Array]:
        """Restores through Orbax, whose dispatcher makes the workers read."""
        infos = [stored.param_info(request.leaf.name) for request in requests]
        args = [
            ocp.ArrayRestoreArgs(
                sharding=request.sharding, global_shape=request.shape, dtype=request.dtype, strict=False
            )
            for request in requests
        ]
        restored: list[Any] = []
        # On a separate thread, because the caller may already be inside an event loop.
        coroutine = super().deserialize(infos, args)
        worker = threading.Thread(target=lambda: restored.append(_outcome(coroutine)), daemon=True)
        worker.start()
        worker.join()
        if isinstance(restored[0], BaseException):
            raise restored[0]
        return list(restored[0])


def _outcome(coroutine: Any) -> Any:
    try:
        return asyncio.run(coroutine)
    except BaseException as error:
        return error


def check_metadata_key(key: str | None) -> None:
    """Rejects ``metadata_key`` for formats in which Orbax would write its metadata files and then fail to find them.

    Raises:
      SettingsError: a key is given.
    """
    if key is not None:
        raise SettingsError(
            f"metadata_key={key!r}: Orbax takes it for zarr files without OCDBT only. Set use_ocdbt=False (and not "
            "use_zarr3) on the handler of the tree, or leave metadata_key out.",
            setting="metadata_key",
        )


def _check_hosts(name: str, value: jax.Array) -> None:
    hosts = {device.process_index for device in value.sharding.device_set}
    if 1 < len(hosts) < process_count():
        absent = sorted(set(range(process_count())) - hosts)
        raise CheckpointError(
            f"parameter {name!r} has no device on the hosts {absent}; Orbax saves arrays that have one on every host. "
            "Save it by a job of its hosts, or replicate it over all hosts before."
        )


def _placeholder(value: jax.Array) -> jax.Array:
    # Orbax cannot store an array of size 0, so a single uint8 takes its place; restore ignores it.
    shape = (1,) * value.ndim
    sharding = value.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return jax.make_array_from_callback(shape, sharding, lambda _: np.zeros(shape, np.uint8))
