"""An Orbax TypeHandler for ``jax.Array`` that saves digests and reads each stored byte once on restore."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding
from orbax.checkpoint import future as orbax_future

from meshfeed._src.arrays.reshard import without_ambient_mesh
from meshfeed._src.base.coordination import process_count, process_index
from meshfeed._src.base.errors import CheckpointError, SettingsError
from meshfeed._src.base.threads import SingleCall
from meshfeed._src.base.types import public
from meshfeed._src.checkpoint import manifest
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.arguments import options_of
from meshfeed._src.checkpoint.dtypes import stored_as
from meshfeed._src.checkpoint.leaves import Entry, describe_array, is_key
from meshfeed._src.checkpoint.orbax_internals import metadata_store
from meshfeed._src.checkpoint.restore import LeafRequest
from meshfeed._src.checkpoint.save_layout import MIN_SLICE_BYTES, ShardDigests, lay_out
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed._src.checkpoint.tree_restore import Planned, TreePlan, plan_array, restore_planned


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
        early = not limited or self._is_synchronous(info)
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
        share, least = self._share and early, self._min_slice_bytes
        laid = lay_out(value, dtype=args.dtype, share=share, min_slice_bytes=least)
        dtype = np.dtype(args.dtype or value.dtype)  # lay_out has cast the values to it
        entry.pop("stored", None)
        entry |= {"dtype": dtype.name, **stored_as(dtype), "cell": list(laid.cell)}
        asked = args.chunk_byte_size or laid.chunk_byte_size
        args = dataclasses.replace(args, dtype=None, chunk_byte_size=asked)
        if self.has_dispatcher():
            return _Laid(laid.array, args, entry)
        if asked is None:  # a slice is a chunk (or a few, if Orbax slices too): known without opening it
            entry["chunk"] = entry["cell"]
        return _Laid(
            laid.array, args, entry, ShardDigests(laid.array, laid.cell, replica_id=self._replica, early=early)
        )

    def _is_synchronous(self, info: ocp.type_handlers.ParamInfo) -> bool:
        # Values that Orbax copies to the host later are not copied here: the caller must keep them alive until then.
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
            ocp.ArrayRestoreArgs(
                sharding=request.sharding, global_shape=request.shape, dtype=request.dtype, strict=False
            )
            for request in requests
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
    """Rejects ``metadata_key`` for formats in which Orbax would write its metadata files and then fail to find them.

    Raises:
      SettingsError: a key is given.
    """
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
