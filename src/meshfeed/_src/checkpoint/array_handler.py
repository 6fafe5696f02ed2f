"""An Orbax type handler for ``jax.Array``: Orbax writes what :mod:`write` plans, and nearly every byte is read once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, Sharding
from orbax.checkpoint import future as orbax_future

from meshfeed._src.arrays.reshard import without_callers_settings
from meshfeed._src.base.coordination import process_index
from meshfeed._src.base.errors import CheckpointError, SettingsError
from meshfeed._src.base.types import public
from meshfeed._src.checkpoint.layout import MIN_SLICE_BYTES
from meshfeed._src.checkpoint.match import match_array
from meshfeed._src.checkpoint.options import RestoreOptions, split_options
from meshfeed._src.checkpoint.orbax_internals import metadata_store, sharding_writer
from meshfeed._src.checkpoint.plan import LeafRead, PlannedLeaf, RestorePlan
from meshfeed._src.checkpoint.restore import Dispatch, open_item, restore, restore_agreement
from meshfeed._src.checkpoint.saves import StepSave, run_coroutine
from meshfeed._src.checkpoint.stored import ARRAYS_PART, StoredArrays, write_part
from meshfeed._src.checkpoint.write import WriteOptions, plan_write


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
      *options: a :class:`RestoreOptions`, or its fields in their order: ``restore``, ``replica_axis``, ….
      **keywords: fields of :class:`RestoreOptions`; the others are passed to ``ocp.type_handlers.ArrayHandler``. Also
        accepts the names that ``SingleReplicaArrayHandler`` uses for the options: ``replica_axis_index``,
        ``primary_replica_id``, ``broadcast_memory_limit_bytes`` (per process here), and
        ``broadcast_memory_scaling_factor``, the fraction of a device's free memory to use if no limit is given. With a
        ``dispatcher``, Orbax reads on the workers; ``restore``, the limit and ``verify`` do not apply to what they read.

    Raises:
      SettingsError: ``restore`` is unknown, a limit is not a positive int, or a setting is given under both names with
        different values.
    """

    def __init__(self, *options: Any, **keywords: Any) -> None:
        self.restore_options, orbax = split_options(options, keywords)
        key, self._host_that_writes = self.restore_options.metadata_key, orbax.get("primary_host", 0)
        self._local_storage = self._host_that_writes is None  # each host writes to its own folder
        if self._local_storage:  # no host has the others' files
            self.restore_options = dataclasses.replace(self.restore_options, restore="every_host")
        has_dispatcher = orbax.get("dispatcher") is not None
        self.dispatch: Dispatch | None = self._dispatched if has_dispatcher else None
        replica_id, least = orbax.get("replica_id", 0), orbax.get("min_slice_bytes_for_replica_parallel")
        # Share writes among replicas unless an Orbax setting restricts which replicas write.
        unrestricted = replica_id is not None and orbax.get("max_replicas_for_replica_parallel") is None
        share = unrestricted and orbax.get("use_replica_parallel") is not False
        self._write_options = WriteOptions(share, least, replica_id, key, has_dispatcher)
        self._write_shardings = sharding_writer() if orbax.get("enable_write_sharding_file", True) else None
        if self._write_shardings is not None:
            orbax["enable_write_sharding_file"] = False  # Orbax would write those of the slices
        # Without it, Orbax would slice again on the device, by default with no minimum size: eight chunks for 16 KiB.
        orbax["min_slice_bytes_for_replica_parallel"] = MIN_SLICE_BYTES if least is None else least
        self._status = None if orbax.get("callback") is None else _AskedOnce(orbax["callback"])
        super().__init__(
            **{"array_metadata_store": metadata_store(), **orbax, "callback": self._status, "metadata_key": key}
        )
        self.step_save: StepSave | None = None
        """The save of a ``Checkpointer`` during which ``serialize`` is called: its errors become futures."""

    async def serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> Sequence[orbax_future.Future]:
        """Captures the arrays and returns futures that write them and their digests."""
        try:
            return await self._serialize(values, infos, args or [ocp.type_handlers.SaveArgs()] * len(values))
        except BaseException as error:
            if self.step_save is None:
                raise
            return [self.step_save.failed(error)]

    async def _serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs],
    ) -> list[orbax_future.Future]:
        if infos[0].is_ocdbt_checkpoint or infos[0].use_zarr3:
            check_metadata_key(self.restore_options.metadata_key)
        names = [str(info.name) for info in infos]
        # Not across an await: another coroutine on this thread may need the caller's mesh.
        with without_callers_settings():
            writes = [
                plan_write(
                    name,
                    value,
                    arg,
                    self._write_options,
                    early=self._copies_early(info),
                    pinned=info.enable_pinned_host_transfer,
                )
                for name, value, info, arg in zip(names, values, infos, args, strict=True)
            ]
            pending = {name: one.digests for name, one in zip(names, writes, strict=True) if one.digests is not None}
            for digests in pending.values():  # before Orbax starts threads that compete for the GIL
                digests.capture()
        futures = list(await super().serialize([one.array for one in writes], infos, [one.args for one in writes]))
        if self._write_shardings is not None:
            shardings = [one.sharding for one in writes]
            writing = self._write_shardings(shardings=shardings, infos=infos, primary_host=self._host_that_writes)
            futures.append(orbax_future.CommitFutureAwaitingContractedSignals(writing, name="serialize_shardings"))
        process, folder = process_index(), infos[0]
        entries = {}
        if process == 0 or self._local_storage:
            entries = {name: one.entry for name, one in zip(names, writes, strict=True) if one.entry is not None}

        async def write_digests() -> None:
            await folder.await_path_creation()
            found = {name: digests.compute() for name, digests in pending.items()}
            write_part(folder.parent_dir, f"{ARRAYS_PART}{process}", found, leaves=entries)

        futures.append(orbax_future.CommitFutureAwaitingContractedSignals(write_digests(), name="meshfeed_digests"))
        return futures

    def _copies_early(self, info: ocp.type_handlers.ParamInfo) -> bool:
        """Returns whether a parameter is copied to the host at once; otherwise the caller must keep it alive.

        Under Orbax's limit on host memory, only what Orbax itself copies synchronously is copied at once.
        """
        limited = getattr(info.device_host_byte_limiter, "max_bytes", None) is not None
        return not limited or self._status is None or self._status.ask(info.keypath).name == "SYNCHRONOUS"

    async def deserialize(
        self, infos: Sequence[ocp.type_handlers.ParamInfo], args: Sequence[ocp.type_handlers.RestoreArgs] | None = None
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
        directory, options = infos[0].parent_dir, _within_limit(self.restore_options, infos)

        def plan() -> RestorePlan:
            stored = open_item(directory, options)
            leaves = [_plan_parameter(stored, *one) for one in zip(infos, args, saved, strict=True)]
            return RestorePlan(stored, leaves, jax.tree_util.tree_structure([0] * len(leaves)))

        with restore_agreement(directory, options) as agreement:
            return restore(plan, options, agreement, self.dispatch)

    def _dispatched(self, stored: StoredArrays, reads: Sequence[LeafRead]) -> Sequence[jax.Array]:
        """Restores through Orbax, whose dispatcher makes the workers read."""
        infos = [stored.param_info(read.leaf.name) for read in reads]
        args = [
            ocp.ArrayRestoreArgs(
                sharding=read.load.sharding, global_shape=read.load.shape, dtype=read.dtype, strict=False
            )
            for read in reads
        ]
        return run_coroutine(super().deserialize(infos, args), "meshfeed-restore")


class _AskedOnce:
    """A user's callback, asked once per save for the priority of a parameter, although both Orbax and we need it."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._answers: dict[Any, Any] = {}

    def ask(self, keypath: Any) -> Any:
        """Returns the priority of a parameter, and keeps it for Orbax."""
        self._answers[keypath] = answer = self._callback.key_priority(keypath)
        return answer

    def key_priority(self, keypath: Any) -> Any:
        """Returns the answer that was kept; asks if there is none."""
        answer = self._answers.pop(keypath, None)
        return self._callback.key_priority(keypath) if answer is None else answer

    def __getattr__(self, name: str) -> Any:
        if name == "_callback":  # looked up here by copy and pickle, before it is set
            raise AttributeError(name)
        return getattr(self._callback, name)


def _within_limit(options: RestoreOptions, infos: Sequence[ocp.type_handlers.ParamInfo]) -> RestoreOptions:
    """Applies Orbax's ``restore_concurrent_gb`` if there is no limit of ours."""
    limit = getattr(infos[0].byte_limiter, "max_bytes", None)
    if limit is None or options.memory_limit_bytes is not None or options.memory_fraction is not None:
        return options
    return dataclasses.replace(options, memory_limit_bytes=max(1, int(limit)))


def _plan_parameter(
    stored: StoredArrays, info: ocp.type_handlers.ParamInfo, arg: ocp.type_handlers.RestoreArgs, saved: object
) -> PlannedLeaf:
    """Plans a parameter from Orbax's restore arguments: ``ArrayRestoreArgs``, or plain ``RestoreArgs``."""
    name = str(info.name)
    shape = getattr(arg, "global_shape", None)
    shape = getattr(arg, "shape", None) if shape is None else shape
    sharding, strict = _sharding(stored, name, arg, saved), getattr(arg, "strict", True)
    dtype, leaf = arg.dtype, stored.saved(name)
    if leaf.impl is not None and dtype == leaf.dtype and (shape is None or tuple(shape) == leaf.data_shape):
        dtype, shape = None, None  # Orbax asks for keys by the dtype and the shape of their data
    # Orbax's restore arguments request a dtype explicitly, not through a template tree.
    return match_array(stored, name, shape, dtype, sharding, strict=strict, any_cast=True)


def _sharding(stored: StoredArrays, name: str, arg: ocp.type_handlers.RestoreArgs, saved: object) -> Sharding | None:
    mesh, axes = getattr(arg, "mesh", None), getattr(arg, "mesh_axes", None)
    if mesh is not None and axes is not None:
        return NamedSharding(mesh, axes)
    own = getattr(arg, "sharding", None)
    sharding = own or getattr(saved, "sharding", None)
    if sharding is not None and hasattr(sharding, "to_jax_sharding"):
        try:
            found = sharding.to_jax_sharding()
            return found if own is not None else stored.saved(name).of_slices(found)
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
