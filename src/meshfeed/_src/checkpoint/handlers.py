"""Orbax handlers for a ``jax.Array``, a tree of leaves, and the state of a feed.

Digests are saved with the arrays, and nearly every stored byte is read once. Replicas share the writing of an array: each
device cuts out its slice on the device and on unsigned bits (slicing a float8 quiets its NaNs on JAX 0.12).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from numpy.typing import NDArray
from orbax.checkpoint import future as orbax_future

from meshfeed._src.arrays.reshard import from_bits, to_bits, without_callers_settings
from meshfeed._src.base.coordination import process_count, process_index
from meshfeed._src.base.errors import CheckpointError, MeshfeedError, SettingsError
from meshfeed._src.base.hooks import Resumable
from meshfeed._src.base.threads import SingleCall
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.checkpoint.collectives import Agreement
from meshfeed._src.checkpoint.layout import (
    MIN_SLICE_BYTES,
    Box,
    Grid,
    ReplicaCut,
    Shape,
    box_of_index,
    choose_cut,
    chunk_shape,
    cut_sharding,
    slices,
    spec_axes,
    spec_of,
)
from meshfeed._src.checkpoint.leaves import (
    EncodedTree,
    Entry,
    carrier_of,
    check_hosts,
    describe_array,
    encode_tree,
    half_bits,
    is_key,
    stored_as,
)
from meshfeed._src.checkpoint.orbax_internals import JSON_HANDLER, metadata_store, sharding_writer
from meshfeed._src.checkpoint.restore import (
    Build,
    LeafRequest,
    Planned,
    RestoreOptions,
    abstract_tree_of,
    plan_array,
    restore_planned,
    restore_tree,
    short,
    type_handlers,
)
from meshfeed._src.checkpoint.stored import ARRAYS_PART, TREE_PART, StoredArrays, digest, join_parts, write_part
from meshfeed._src.state import files as state_files

_CREATION_SECONDS, _POLL_SECONDS = 60.0, 0.01  # after that, writing names the folder that is missing

PLAIN_FILE = "metadata"
"""A copy of the state under the name that Orbax's own JSON handlers read.

A handler registered with Orbax would read the state only in processes that import meshfeed.
"""

# Constructor arguments of Orbax's SingleReplicaArrayHandler, and our names for them.
_ORBAX_NAMES = {
    "replica_axis_index": "replica_axis",
    "primary_replica_id": "primary_replica",
    "broadcast_memory_limit_bytes": "memory_limit_bytes",
    "broadcast_memory_scaling_factor": "memory_fraction",
}


def _options_of(orbax: dict[str, object], **ours: Any) -> RestoreOptions:
    """Builds options from our keywords and from Orbax's names for them, which are removed from ``orbax``."""
    defaults = vars(RestoreOptions())
    for theirs, name in _ORBAX_NAMES.items():
        if (value := orbax.pop(theirs, None)) is None:
            continue
        given = ours.get(name, defaults[name])
        if given not in (defaults[name], value):
            text = f"{theirs}={value!r} and {name}={given!r} are two names of one setting. Pass only one of them."
            raise SettingsError(text, setting=theirs)
        ours[name] = value
    return RestoreOptions(**ours)


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
        self._host_that_writes = orbax.get("primary_host", 0)
        self._local_storage = self._host_that_writes is None  # each host writes to its own folder
        self.restore_options = _options_of(
            orbax,
            restore="every_host" if self._local_storage else restore,  # no host has the others' files
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
        self._status = None if orbax.get("callback") is None else _AskedOnce(orbax["callback"])
        self._write_shardings = sharding_writer() if orbax.get("enable_write_sharding_file", True) else None
        if self._write_shardings is not None:
            orbax["enable_write_sharding_file"] = False  # Orbax would write those of the slices
        changed = {"callback": self._status, "min_slice_bytes_for_replica_parallel": least}
        super().__init__(**{**orbax, **changed})
        self.failures: list[BaseException] | None = None
        """If not None, takes the errors of ``serialize``, whose future raises them. Raised by ``serialize``, they would
        leave the threads of other leaves running, which nobody could wait for."""
        self._replica = orbax.get("replica_id", 0)
        # Share writes among replicas unless an Orbax setting restricts which replicas write.
        unrestricted = self._replica is not None and orbax.get("max_replicas_for_replica_parallel") is None
        self._share = unrestricted and orbax.get("use_replica_parallel") is not False

    async def serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> Sequence[orbax_future.Future]:
        """Captures the arrays and returns futures that write them and their digests."""
        try:
            return await self._serialize(values, infos, args)
        except BaseException as error:
            if self.failures is None:
                raise
            self.failures.append(error)
            return [_Failed(error)]

    async def _serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> Sequence[orbax_future.Future]:
        args = args or [ocp.type_handlers.SaveArgs()] * len(values)
        if infos[0].is_ocdbt_checkpoint or infos[0].use_zarr3:
            _check_metadata_key(self.restore_options.metadata_key)
        with (
            without_callers_settings()
        ):  # not across an await: another coroutine on this thread may need the caller's mesh
            laid = {
                info.name: self._lay_out(value, info, arg) for value, info, arg in zip(values, infos, args, strict=True)
            }
            shardings = [_whole_sharding(one.array, value) for one, value in zip(laid.values(), values, strict=True)]
        pending = {name: one.digests for name, one in laid.items() if one.digests is not None}
        for digests in pending.values():  # before Orbax starts threads that compete for the GIL
            digests.capture()
        arrays, args = [one.array for one in laid.values()], [one.args for one in laid.values()]
        futures = list(await super().serialize(arrays, infos, args))
        if self._write_shardings is not None:
            futures.append(self._write_shardings(shardings, infos, self._host_that_writes))
        entries = {name: one.entry for name, one in laid.items() if one.entry is not None}
        process, folder = process_index(), infos[0]
        if process != 0 and not self._local_storage:
            entries = {}

        async def write_digests() -> None:
            await folder.await_path_creation()
            found = {name: digests.compute() for name, digests in pending.items()}
            write_part(folder.parent_dir, f"{ARRAYS_PART}{process}", found, leaves=entries)

        futures.append(orbax_future.CommitFutureAwaitingContractedSignals(write_digests(), name="meshfeed_digests"))
        return futures

    def _lay_out(self, value: jax.Array, info: ocp.type_handlers.ParamInfo, args: ocp.type_handlers.SaveArgs) -> _Laid:
        """Returns the array that Orbax writes, and its manifest entry and digests."""
        if process_count() > 1 and value.is_fully_addressable:
            return _Laid(value, args)  # Orbax rejects it with a clear message
        assert info.name is not None
        check_hosts(f"parameter {info.name!r}", value)
        early, entry = self._copies_early(info), describe_array(value)
        if self.restore_options.metadata_key is not None:
            entry["metadata_key"] = self.restore_options.metadata_key
        if value.size == 0:
            return _Laid(_placeholder(value), args, entry)
        if is_key(value):
            data = jax.random.key_data(value)
            cell = data.sharding.shard_shape(data.shape)
            entry |= {"cell": list(cell), "chunk": list(cell)}
            return _Laid(value, args, entry, ShardDigests(data, cell, replica_id=self._replica, early=early))
        array, cell, chunk_byte_size = lay_out(
            value, dtype=args.dtype, share=self._share and early, min_slice_bytes=self._min_slice_bytes
        )
        dtype = np.dtype(args.dtype or value.dtype)  # lay_out has cast the values to it
        # Narrow dtypes keep their own name: Orbax silently casts if the stored dtype differs from the requested one, so a
        # float8 stored as the uint8 of its bits would become 56 instead of 1.
        entry.pop("stored", None)
        entry |= {"dtype": dtype.name, **stored_as(dtype), "cell": list(cell)}
        asked = args.chunk_byte_size or chunk_byte_size
        args = dataclasses.replace(args, dtype=None, chunk_byte_size=asked)
        if self.has_dispatcher():
            return _Laid(array, args, entry)
        if asked is None:  # a slice is a chunk (or a few, if Orbax slices too): known without opening it
            entry["chunk"] = entry["cell"]
        return _Laid(array, args, entry, ShardDigests(array, cell, replica_id=self._replica, early=early))

    def _copies_early(self, info: ocp.type_handlers.ParamInfo) -> bool:
        """Returns whether a parameter is copied to the host at once; otherwise the caller must keep it alive.

        Under Orbax's limit on host memory, only what Orbax itself copies synchronously is copied at once.
        """
        limited = getattr(info.device_host_byte_limiter, "max_bytes", None) is not None
        return not limited or self._status is None or self._status.ask(info.keypath).name == "SYNCHRONOUS"

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

        def plan(stored: StoredArrays) -> tuple[list[Planned], Build]:
            return [_plan_parameter(stored, *one) for one in zip(infos, args, saved, strict=True)], list

        return restore_planned(infos[0].parent_dir, plan, _within_limit(self.restore_options, infos))

    def _dispatched(self, stored: StoredArrays, requests: Sequence[LeafRequest]) -> Sequence[jax.Array]:
        """Restores through Orbax, whose dispatcher makes the workers read."""
        infos = [stored.param_info(request.leaf.name) for request in requests]
        args = [
            ocp.ArrayRestoreArgs(sharding=one.plan.sharding, global_shape=one.plan.shape, dtype=one.dtype, strict=False)
            for one in requests
        ]
        # On a separate thread, because the caller may already be inside an event loop.
        deserialize = super().deserialize
        return SingleCall(lambda: asyncio.run(deserialize(infos, args)), "meshfeed-restore").result()


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


def _whole_sharding(stored: jax.Array, value: jax.Array) -> Sharding:
    """Returns the sharding from which Orbax restores ``value``, which is stored as ``stored``."""
    if value.size == 0:
        return stored.sharding
    return (jax.random.key_data(value) if is_key(value) else value).sharding


def _within_limit(options: RestoreOptions, infos: Sequence[ocp.type_handlers.ParamInfo]) -> RestoreOptions:
    """Applies Orbax's ``restore_concurrent_gb`` if there is no limit of ours."""
    limit = getattr(infos[0].byte_limiter, "max_bytes", None)
    if limit is None or options.memory_limit_bytes is not None or options.memory_fraction is not None:
        return options
    return dataclasses.replace(options, memory_limit_bytes=max(1, int(limit)))


class _Laid(NamedTuple):
    """A parameter as Orbax writes it, with its manifest entry (None if Orbax will reject it) and its digests, if any."""

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
    shape = getattr(arg, "shape", None) if shape is None else shape
    sharding, strict = _sharding(stored, info.name, arg, saved), getattr(arg, "strict", True)
    # Orbax's restore arguments request a dtype explicitly, not through a template tree.
    return plan_array(stored, info.name, shape, arg.dtype, sharding, strict=strict, any_cast=True)


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


def _check_metadata_key(key: str | None) -> None:
    """Rejects ``metadata_key`` for formats in which Orbax would write its metadata files and then fail to find them."""
    if key is not None:
        raise SettingsError(
            f"metadata_key={key!r}: Orbax supports it only for zarr files without OCDBT. Set use_ocdbt=False (and not "
            "use_zarr3) on the handler of the tree, or omit metadata_key.",
            setting="metadata_key",
        )


def _placeholder(value: jax.Array) -> jax.Array:
    # Orbax cannot store an array of size 0, so a single uint8 takes its place; restore ignores it.
    shape = (1,) * value.ndim
    sharding = value.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.make_array_from_callback(shape, sharding, lambda _: np.zeros(shape, np.uint8))


@public("meshfeed.checkpoint._arrays")  # Orbax writes this name into checkpoints, so it must not change
class ArraysHandler(ocp.handlers.AsyncCheckpointHandler):
    """Saves and restores a pytree of arrays, numpy values, numbers and text exactly.

    Plain Orbax (``PyTreeCheckpointHandler``) can read the result. If TensorStore lacks a dtype (float8_e4m3, uint4, uint2),
    plain Orbax returns equal numbers of a wider dtype, and raises "Unsupported data type" if asked for the original one;
    this handler returns the original dtype.

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
        self._arrays, self.restore_options = arrays, arrays.restore_options
        if orbax.get("use_ocdbt", True) or orbax.get("use_zarr3"):
            _check_metadata_key(self.restore_options.metadata_key)
        self.failure: BaseException | None = None
        """Why the last save of a ``Checkpointer`` could not begin; its futures raise the error."""
        self.started: list[orbax_future.Future] = []
        """This host's futures of the last save."""
        self._all_primary = (array_handler or {}).get("primary_host", 0) is None
        self._orbax = ocp.PyTreeCheckpointHandler(type_handler_registry=type_handlers(arrays), **orbax)

    async def async_save(self, directory: epath.Path, args: ArraysSave) -> list[orbax_future.Future]:
        """Captures the tree and returns futures that write it."""
        failures = self._arrays.failures = None if args.identity is None else []
        try:
            self.started = await self._async_save(directory, args)
        except BaseException as error:
            if failures is None:
                raise
            # Raised here, it would keep this host from Orbax's barriers, in which the other hosts wait, and Orbax would
            # still be making the folder while the next save begins.
            failures.append(error)
            self.started = [_Failed(error)]
        self.failure, self._arrays.failures = failures[0] if failures else None, None
        return _on_all_hosts(self.started, args.identity, "arrays", self.restore_options.timeout_seconds)

    async def _async_save(self, directory: epath.Path, args: ArraysSave) -> list[orbax_future.Future]:
        encoded, identity = args.encoded or encode_tree(args.tree), args.identity
        futures: list[orbax_future.Future] = []
        # Orbax rejects a tree without leaves; such a tree is stored in our manifest only.
        if jax.tree.leaves(encoded.tree):
            plain = ocp.args.PyTreeSave(encoded.tree, args.save_args)
            futures += await self._orbax.async_save(directory, args=plain) or []

        async def write() -> None:
            path = await created(directory)
            digests = {name: {0: digest(values)} for name, values in encoded.host_arrays.items()}
            content = {"leaves": encoded.leaves, "skeleton": encoded.skeleton, "identity": identity}
            write_part(path, TREE_PART, digests, **content)

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
        wanted = args or ArraysRestore()
        return restore_tree(
            directory, wanted.abstract_tree, self.restore_options, partial=wanted.partial_restore, strict=wanted.strict
        )

    def finalize(self, directory: epath.PathLike) -> None:
        """Merges the files of all hosts. Orbax calls it on the primary host once all hosts have written."""
        directory = epath.Path(directory)
        if (directory / "_METADATA").exists():
            self._orbax.finalize(directory)
        stored = StoredArrays(directory)
        # Record the chunk shapes that were not known while saving, so a restore need not open each array to plan.
        leaves = stored.manifest.leaves
        unknown = [name for name in stored.array_names() if name in leaves and "chunk" not in leaves[name]]
        stored.open_soon(unknown)
        join_parts(directory, {name: stored.chunk_of(name) for name in unknown})

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
    """Restores arrays from a checkpoint item of meshfeed or plain Orbax, reading nearly every stored byte once per job.

    At most a tenth of a leaf is read twice, if its stored chunks do not fit the division among the hosts. Every process of
    the job must call it. If plain Orbax saved the checkpoint without replica-parallel slices, or with
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
    return restore_tree(directory, abstract_tree, RestoreOptions(memory_limit_bytes=memory_limit_bytes, **options))


def _carry(bits: jax.Array, dtype: np.dtype[np.generic]) -> jax.Array:
    """Converts the bits of values of ``dtype`` to their storage dtype; for use under ``jit``."""
    carrier = carrier_of(dtype)
    if carrier == dtype:
        return from_bits(bits, dtype)
    return bits if carrier == bits.dtype else from_bits(jnp.asarray(half_bits(dtype))[bits], carrier)


@functools.lru_cache(maxsize=1024)
def _cutter(
    sharding: NamedSharding, shape: Shape, dtype: np.dtype[np.generic], cut: ReplicaCut
) -> Callable[[jax.Array], jax.Array]:
    rank = len(shape)
    after = cut_sharding(sharding, rank, cut)
    size = after.shard_shape(shape)[cut.dimension]

    def take(block: jax.Array) -> jax.Array:
        start = lax.axis_index(cut.axes) * size
        return _carry(lax.dynamic_slice_in_dim(to_bits(block), start, size, cut.dimension), dtype)

    before = spec_of(spec_axes(sharding, rank))
    return jax.jit(jax.shard_map(take, mesh=sharding.mesh, in_specs=before, out_specs=after.spec, check_vma=False))


@functools.lru_cache(maxsize=256)
def _carrier(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: _carry(to_bits(array), array.dtype), out_shardings=sharding)


def lay_out(
    array: jax.Array, *, dtype: DTypeLike | None = None, share: bool = True, min_slice_bytes: int | None = None
) -> tuple[jax.Array, Shape, int | None]:
    """Prepares one array for saving. All processes of its sharding must call it in the same order.

    Returns:
      The array cut among replicas, in its storage dtype; the shape of the boxes that get a digest, which are the stored
      chunks; and the size to request from Orbax to get these chunks (None: a slice is one chunk).
    """
    sharding = array.sharding
    if dtype is not None and np.dtype(dtype) != array.dtype:
        array = jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)(array)
    cut = choose_cut(array.shape, array.dtype.itemsize, sharding, min_slice_bytes) if share else None
    if cut is not None:
        assert isinstance(sharding, NamedSharding)
        array = _cutter(sharding, array.shape, array.dtype, cut)(array)
    elif carrier_of(array.dtype) != array.dtype:
        array = _carrier(sharding)(array)
    piece = array.sharding.shard_shape(array.shape)
    return array, *chunk_shape(array.shape, piece, array.dtype.itemsize)


@functools.lru_cache(maxsize=1024)
def _device_boxes(sharding: Sharding, shape: Shape) -> dict[object, Box]:
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: box_of_index(index or (), shape) for device, index in indices.items()}


class ShardDigests:
    """Host copies of the slices of one array that this process writes, and their digests.

    Orbax's own transfer fills the same per-shard cache, so each slice is copied from the device once, and on CPU not at
    all.

    Args:
      array: the array to save.
      cell: shape of the boxes that get a digest.
      replica_id: the replica that this process writes; None means the one it holds.
      early: copy to the host now; otherwise only when :meth:`compute` runs.
    """

    def __init__(self, array: jax.Array, cell: Shape, *, replica_id: int | None = 0, early: bool = True) -> None:
        self._grid, self._early = Grid(array.shape, cell), early
        held = array.addressable_shards
        if replica_id is None and held:
            replica_id = held[0].replica_id
        written = [shard for shard in held if shard.replica_id == replica_id]
        boxes = _device_boxes(array.sharding, array.shape)
        self._shards: list[tuple[Box, jax.Array | NDArray[np.generic]]] = [
            (boxes[shard.device], shard.data) for shard in written
        ]
        for shard in written if early else ():
            shard.data.copy_to_host_async()

    def capture(self) -> None:
        """Waits for the host copies, so the caller may donate the array: Orbax copies only the slices it writes."""
        if self._early:
            self._shards = [(box, np.asarray(data)) for box, data in self._shards]

    def compute(self) -> dict[int, str]:
        """Returns the digests by cell number and frees the host copies."""
        digests: dict[int, str] = {}
        while self._shards:
            box, data = self._shards.pop()
            values = np.asarray(data if self._early else data.copy())  # copy first: jax.Array caches its host value
            for number in self._grid.touching(box):
                digests[number] = digest(values[slices(self._grid.box(number), box)])
        return digests


@dataclasses.dataclass
class _OnAllHosts:
    """The futures of this host's part of an item, which succeed on all hosts or raise the same error on all.

    Otherwise, if one host failed, the others would wait for it in Orbax's barriers, and then raise the barriers' errors.
    """

    futures: Sequence[orbax_future.Future]
    doing: str
    name: str
    timeout_seconds: float

    def result(self, timeout: float | None = None) -> None:
        """Waits for this host's futures, then for the other hosts."""
        with Agreement(self.doing, min(timeout or math.inf, self.timeout_seconds), self.name) as agreement:
            agreement.attempt(lambda: [future.result(timeout) for future in self.futures])

    def cancel(self) -> None:
        """Cancels this host's futures."""
        for future in self.futures:
            future.cancel()


def _on_all_hosts(
    futures: list[orbax_future.Future], identity: Mapping[str, JsonValue] | None, item: str, timeout_seconds: float
) -> list[orbax_future.Future]:
    # Other managers may save on some of the hosts only.
    if identity is None or process_count() == 1:
        return futures
    doing, name = f"saving step {identity['step']}", f"save-{identity['id']}/{item}"
    return [_OnAllHosts(futures, doing, name, timeout_seconds)]


class _Failed:
    """The future of a part that could not be captured; holds the text only, since Orbax keeps what this raises."""

    def __init__(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, MeshfeedError) else f"{type(error).__name__}: {error}"
        self._text = text if isinstance(error, Exception) else f"the save was interrupted: {type(error).__name__}"

    def result(self, timeout: float | None = None) -> None:
        """Raises a CheckpointError; an interrupt too is an Exception on the thread that waits for this."""
        raise CheckpointError(self._text)

    def cancel(self) -> None:
        """Does nothing."""


async def created(folder: epath.PathLike) -> epath.Path:
    """Waits until the folder of a save exists: some versions of Orbax pass a handle instead of a path.

    Orbax's primary host makes the folder in the background. Another host that saves before the primary has announced that
    does not wait for it (``AwaitableSignalsContract``, Orbax 0.12), which happens with the managers that have no barrier at
    the start of a save. Object stores have no folders to wait for.
    """
    wait = getattr(folder, "await_creation", None)
    path = epath.Path(folder) if wait is None else await wait()
    deadline = time.monotonic() + _CREATION_SECONDS
    while "://" not in str(path) and not path.exists() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
    return path


class HasState(Protocol):
    """The part of a feed that saving needs."""

    def get_state(self) -> dict[str, JsonValue]:
        """Returns the state after the last delivered batch, as JSON."""
        ...


def check_feed(feed: object, methods: tuple[str, ...], order: str) -> None:
    """Rejects an object without the methods of a feed. None means no feed and is accepted."""
    lacks = [name for name in methods if feed is not None and not callable(getattr(feed, name, None))]
    if lacks:
        raise SettingsError(
            f"feed={short(feed)}: has no {lacks[0]}(), expected a meshfeed.Feed or another object "
            f"with get_state() and set_state(state). {order}",
            setting="feed",
        )


@public("meshfeed.checkpoint._iterator")  # Orbax writes this name into checkpoints, so it must not change
class IteratorHandler(ocp.handlers.AsyncCheckpointHandler):
    """Saves and restores the state of a feed as one item of an Orbax checkpoint.

    ::

        manager.save(step, args=ocp.args.Composite(data=IteratorSave(feed), …))
        manager.restore(step, args=ocp.args.Composite(data=IteratorRestore(feed), …))

    The state is captured before ``save`` returns, including with asynchronous managers. One file holds the state of all
    hosts; it is restored in place, on any number of hosts. Plain Orbax restores the item as JSON: the state itself.
    """

    timeout_seconds: float = RestoreOptions.timeout_seconds
    """How long hosts wait for each other at the end of a save; set by ``Checkpointer``."""
    started: Sequence[orbax_future.Future] = ()
    """This host's futures of the last save."""

    @classmethod
    def typestr(cls) -> str:
        """Returns the item kind that Orbax records in a step, to find a handler if no arguments are given."""
        return JSON_HANDLER

    async def async_save(self, directory: epath.Path, args: IteratorSave) -> list[orbax_future.Future]:
        """Captures the state and returns futures that write it."""
        check_feed(args.feed, ("get_state",), "Pass IteratorSave(feed).")
        state, process, identity = args.feed.get_state(), process_index(), args.identity

        async def write() -> None:
            state_files.write_state(await created(directory), state, identity=identity, process=process)

        futures: list[orbax_future.Future] = []
        if state_files.must_write(state, process):
            futures.append(orbax_future.CommitFutureAwaitingContractedSignals(write(), name="meshfeed_iterator"))
        self.started = futures
        return _on_all_hosts(futures, identity, "iterator", self.timeout_seconds)

    def save(self, directory: epath.PathLike, args: IteratorSave) -> None:
        """Writes the state before returning."""
        check_feed(args.feed, ("get_state",), "Pass IteratorSave(feed).")
        state_files.write_state(directory, args.feed.get_state(), identity=args.identity)

    def restore(
        self, directory: epath.PathLike, args: IteratorRestore | None = None
    ) -> Resumable | dict[str, JsonValue]:
        """Reads the state of all hosts, sets it on ``args.feed`` and returns the feed; without one, returns the state.

        Raises:
          CheckpointError: there is no complete state.
          StateMismatchError: the feed cannot resume from it; the feed is unchanged.
        """
        if args is not None:
            check_feed(args.feed, ("set_state",), "Pass IteratorRestore(feed).")
        state = state_files.read_state(directory)
        if args is None or args.feed is None:
            return state
        args.feed.set_state(state)
        return args.feed

    def finalize(self, directory: epath.PathLike) -> None:
        """Merges the files of all hosts into one. Orbax calls it on the primary host once all hosts have written."""
        state_files.merge_files(directory)
        if state_files.state_paths(directory):
            state_files.write_json(epath.Path(directory) / PLAIN_FILE, state_files.read_state(directory))

    def metadata(self, directory: epath.PathLike) -> dict[str, JsonValue]:
        """Returns the saved state, without a feed."""
        return state_files.read_state(epath.Path(directory))


@public("meshfeed.checkpoint")
@ocp.args.register_with_handler(IteratorHandler, for_save=True)
@dataclasses.dataclass
class IteratorSave(ocp.args.CheckpointArgs):
    """Saves the state of ``feed``.

    Attributes:
      feed: a :class:`meshfeed.Feed`, or any object with ``get_state() -> dict``.
      identity: links the file to the arrays saved with it; set by :class:`~meshfeed.checkpoint.Checkpointer`.
    """

    feed: HasState
    identity: Mapping[str, JsonValue] | None = None


@public("meshfeed.checkpoint")
@ocp.args.register_with_handler(IteratorHandler, for_restore=True)
@dataclasses.dataclass
class IteratorRestore(ocp.args.CheckpointArgs):
    """Restores into ``feed``, in place.

    Attributes:
      feed: any object with ``set_state(dict)``. None returns the state itself.
    """

    feed: Resumable | None = None


class FeedIterator(Resumable, Iterator[PyTree], Protocol):
    """A feed that delivers batches."""


class GrainIteratorFace:
    """The interface that Orbax's peer-to-peer manager and Grain's own handlers expect: a state as bytes."""

    def __init__(self, feed: FeedIterator) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        return next(self._feed)

    def get_state(self) -> bytes:
        """Returns the feed's state as JSON bytes."""
        return json.dumps(self._feed.get_state()).encode()

    def set_state(self, state: bytes) -> None:
        """Sets the feed's state in place, from JSON bytes."""
        self._feed.set_state(json.loads(state))


@public("meshfeed.checkpoint")
def as_grain_iterator(feed: FeedIterator) -> GrainIteratorFace:
    """Wraps ``feed`` as an iterator with Grain's interface, including its state.

    ::

        manager.save(step, args=p2p.args.Composite(
            state=…, data_iter=grain.checkpoint.CheckpointSave(as_grain_iterator(feed))))

    Such managers keep one state per process, so a stream can resume only on as many hosts as it was saved on. If a
    manager accepts any Orbax handler, use :class:`IteratorHandler`.

    Args:
      feed: a :class:`meshfeed.Feed`, or any iterator with ``get_state`` and ``set_state`` whose state is JSON.
    """
    return GrainIteratorFace(feed)
