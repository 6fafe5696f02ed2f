"""Orbax handlers for the items of a step: a tree of arrays and other leaves, and the state of a feed."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future as orbax_future

from meshfeed._src.base.coordination import process_index
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.hooks import Resumable
from meshfeed._src.base.store_path import StorePath, make_path
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.array_handler import ArrayHandler, check_metadata_key
from meshfeed._src.checkpoint.leaves import EncodedTree, encode_tree
from meshfeed._src.checkpoint.options import RestoreOptions, short, split_options
from meshfeed._src.checkpoint.orbax_internals import JSON_HANDLER
from meshfeed._src.checkpoint.restore import restore_agreement, restore_tree
from meshfeed._src.checkpoint.saves import CapturedState, HasState, StepSave, created, given_state, run_coroutine
from meshfeed._src.checkpoint.stored import (
    TREE_PART,
    StoredArrays,
    abstract_tree_of,
    digest,
    join_parts,
    type_handlers,
    write_part,
)
from meshfeed._src.state import files as state_files

PLAIN_FILE = "metadata"
"""A copy of the state under the name that Orbax's own JSON handlers read.

A handler registered with Orbax would read the state only in processes that import meshfeed.
"""


def _save_now(handler: ArraysHandler | IteratorHandler, directory: epath.PathLike, args: Any) -> None:
    async def run() -> None:
        for future in await handler.async_save(make_path(directory), args):
            future.result()

    run_coroutine(run(), "meshfeed-save")


@public("meshfeed.checkpoint._arrays")  # Orbax writes this name into checkpoints, so it must not change
class ArraysHandler(ocp.handlers.AsyncCheckpointHandler):
    """Saves and restores a pytree of arrays, numpy values, numbers and text exactly.

    Plain Orbax (``PyTreeCheckpointHandler``) can read the result. If TensorStore lacks a dtype (float8_e4m3, uint4, uint2),
    plain Orbax returns equal numbers of a wider dtype, and raises "Unsupported data type" if asked for the original one;
    this handler returns the original dtype.

    Args:
      *options: a :class:`RestoreOptions`, or its fields in their order: ``restore``, ``replica_axis``, ….
      array_handler: keywords for Orbax's array handler, such as ``min_slice_bytes_for_replica_parallel``,
        ``primary_host`` or ``dispatcher``.
      **keywords: fields of :class:`RestoreOptions`; the others are passed to ``ocp.PyTreeCheckpointHandler``, such as
        ``save_device_host_concurrent_gb``.

    Raises:
      SettingsError: a setting has an invalid value.
    """

    def __init__(self, *options: Any, array_handler: Mapping[str, object] | None = None, **keywords: Any) -> None:
        given, orbax = split_options(options, keywords)
        self._arrays = ArrayHandler(given, **(array_handler or {}))
        if orbax.get("use_ocdbt", True) or orbax.get("use_zarr3"):
            check_metadata_key(self.restore_options.metadata_key)
        self._all_primary = (array_handler or {}).get("primary_host", 0) is None
        self._orbax = ocp.PyTreeCheckpointHandler(type_handler_registry=type_handlers(self._arrays), **orbax)

    @property
    def restore_options(self) -> RestoreOptions:
        """How arrays are restored."""
        return self._arrays.restore_options

    async def async_save(self, directory: epath.Path, args: ArraysSave) -> list[orbax_future.Future]:
        """Captures the tree and returns futures that write it."""
        save = self._arrays.step_save = args.step_save
        try:
            futures = await self._async_save(directory, args)
        except BaseException as error:
            if save is None:
                raise
            futures = [save.failed(error)]
        finally:
            self._arrays.step_save = None
        return futures if save is None else save.begin("arrays", futures)

    async def _async_save(self, directory: epath.Path, args: ArraysSave) -> list[orbax_future.Future]:
        encoded, save_args = args.encoded, args.save_args
        if encoded is None:
            tree, save_args = _cast_on_host(args.tree, args.save_args)
            encoded = encode_tree(tree, in_store=isinstance(directory, StorePath))
        identity = None if args.step_save is None else args.step_save.identity
        futures: list[orbax_future.Future] = []
        # Orbax rejects a tree without leaves; such a tree is stored in our manifest only.
        if jax.tree.leaves(encoded.tree):
            plain = ocp.args.PyTreeSave(encoded.tree, save_args)
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
        _save_now(self, directory, args)

    def restore(self, directory: epath.PathLike, args: ArraysRestore | None = None) -> PyTree:
        """Reads the tree. Every process of the job must call it.

        Args:
          directory: the item's folder.
          args: the tree to restore; None restores everything as it was saved.

        Raises:
          CheckpointError: the same on every host; it names the host that could not read and the parameter.
          DamagedCheckpointError: likewise, if stored bytes differ from those written.
        """
        with restore_agreement(directory, self.restore_options) as agreement:
            return self.restore_with(agreement, directory, args or ArraysRestore())

    def restore_with(self, agreement: Agreement, item: epath.PathLike | StoredArrays, args: ArraysRestore) -> PyTree:
        """Like :meth:`restore`, as part of an operation on which hosts agree."""
        return restore_tree(
            item,
            args.abstract_tree,
            self.restore_options,
            agreement,
            self._arrays.dispatch,
            partial=args.partial_restore,
            strict=args.strict,
        )

    def finalize(self, directory: epath.PathLike) -> None:
        """Merges the files of all hosts. Orbax calls it on the primary host once all hosts have written."""
        directory = make_path(directory)
        # Without OCDBT there is nothing to merge, and Orbax cannot open arrays in most stores.
        if not isinstance(directory, StorePath) and (directory / "_METADATA").exists():
            with _without_brackets(directory) as path:
                self._orbax.finalize(path)
        stored = StoredArrays(directory)
        # Record the chunk shapes that were not known while saving, so a restore need not open each array to plan.
        leaves = stored.manifest.leaves
        unknown = [name for name in stored.array_names() if name in leaves and "chunk" not in leaves[name]]
        stored.open_soon(unknown)
        for name in unknown:
            leaves[name]["chunk"] = stored.chunk_of(name)
        if not stored.is_plain:
            join_parts(directory, stored.manifest)

    def metadata(self, directory: epath.PathLike) -> PyTree:
        """Returns the saved tree as ``jax.ShapeDtypeStruct`` with shardings, numpy dtypes and values."""
        return abstract_tree_of(StoredArrays(directory))


def _cast_on_host(tree: PyTree, save_args: PyTree) -> tuple[PyTree, PyTree]:
    """Casts numpy leaves as their ``SaveArgs`` say; digests and manifest are then of what is stored."""
    if save_args is None:
        return tree, None
    leaves, structure = jax.tree.flatten(tree)
    wanted = structure.flatten_up_to(save_args)
    for number, (leaf, args) in enumerate(zip(leaves, wanted, strict=True)):
        if isinstance(leaf, np.ndarray | np.generic) and getattr(args, "dtype", None) is not None:
            leaves[number] = leaf.astype(args.dtype)
            wanted[number] = dataclasses.replace(args, dtype=None)
    return structure.unflatten(leaves), structure.unflatten(wanted)


@contextlib.contextmanager
def _without_brackets(directory: epath.Path) -> Iterator[epath.Path]:
    """Yields another path of a local folder if a glob would take brackets in its own for a pattern, as Orbax's merge does."""
    if glob.escape(str(directory)) == str(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="meshfeed-") as folder:
        link = epath.Path(folder) / directory.name
        os.symlink(directory, link)
        yield link


@public("meshfeed.checkpoint")
@ocp.args.register_with_handler(ArraysHandler, for_save=True)
@dataclasses.dataclass
class ArraysSave(ocp.args.CheckpointArgs):
    """Saves ``tree``.

    Attributes:
      tree: pytree of arrays, numpy values, numbers and text. Once ``save`` has returned, arrays may be donated and host
        values changed.
      save_args: tree of ``ocp.SaveArgs``, to cast or to choose chunk sizes.
      step_save: the save of a ``Checkpointer`` of which this is a part; links the arrays to the data position saved with
        them.
      encoded: the result of ``encode_tree(tree)``. Encoding first means that a leaf that cannot be saved raises before
        Orbax creates any folder.
    """

    tree: PyTree
    save_args: PyTree = None
    step_save: StepSave | None = None
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
      directory: the item's folder or URL (``<step>/arrays``, ``<step>/default``), or a step's with only one such item.
      abstract_tree: see :class:`ArraysRestore`. For a plain Orbax checkpoint, None gives the tree that Orbax would
        return.
      memory_limit_bytes: limit on a process's extra memory in bytes, beyond the result and one shard.
      **options: further fields of :class:`RestoreOptions`: ``restore``, ``verify``, ``replica_axis``, ….

    Returns:
      A pytree of the structure of ``abstract_tree``, with its shapes, dtypes and shardings.

    Raises:
      CheckpointError: the same on every host; it names the host that could not read and the parameter.
      DamagedCheckpointError: likewise, if stored bytes differ from those written.
    """
    checked = RestoreOptions(memory_limit_bytes=memory_limit_bytes, **options)
    with restore_agreement(directory, checked) as agreement:
        return restore_tree(directory, abstract_tree, checked, agreement)


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

    @classmethod
    def typestr(cls) -> str:
        """Returns the item kind that Orbax records in a step, to find a handler if no arguments are given."""
        return JSON_HANDLER

    async def async_save(self, directory: epath.Path, args: IteratorSave) -> list[orbax_future.Future]:
        """Captures the state and returns futures that write it."""
        check_feed(args.feed, ("get_state",), "Pass IteratorSave(feed).")
        captured = args.feed if isinstance(args.feed, CapturedState) else CapturedState.of(args.feed)
        state, process, save = captured.state, process_index(), args.step_save

        async def write() -> None:
            identity = None if save is None else save.identity
            state_files.write_state(await created(directory), state, identity=identity, process=process)

        futures: list[orbax_future.Future] = []
        if state_files.must_write(state, process):
            futures.append(orbax_future.CommitFutureAwaitingContractedSignals(write(), name="meshfeed_iterator"))
        return futures if save is None else save.begin("iterator", futures)

    def save(self, directory: epath.PathLike, args: IteratorSave) -> None:
        """Writes the state before returning."""
        _save_now(self, directory, args)

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
        state = given_state(state_files.read_state(directory))
        if args is None or args.feed is None:
            return state
        args.feed.set_state(state)
        return args.feed

    def finalize(self, directory: epath.PathLike) -> None:
        """Merges the files of all hosts into one. Orbax calls it on the primary host once all hosts have written."""
        state_files.merge_files(directory)
        if state_files.state_paths(directory):
            state_files.write_json(make_path(directory) / PLAIN_FILE, state_files.read_state(directory))

    def metadata(self, directory: epath.PathLike) -> dict[str, JsonValue]:
        """Returns the saved state, without a feed."""
        return state_files.read_state(directory)


@public("meshfeed.checkpoint")
@ocp.args.register_with_handler(IteratorHandler, for_save=True)
@dataclasses.dataclass
class IteratorSave(ocp.args.CheckpointArgs):
    """Saves the state of ``feed``.

    Attributes:
      feed: a :class:`meshfeed.Feed`, or any object with ``get_state() -> dict``.
      step_save: the save of a :class:`~meshfeed.checkpoint.Checkpointer` of which this is a part; links the file to the
        arrays saved with it.
    """

    feed: HasState
    step_save: StepSave | None = None


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


class GrainIteratorAdapter:
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
def as_grain_iterator(feed: FeedIterator) -> GrainIteratorAdapter:
    """Wraps ``feed`` as an iterator with Grain's interface, including its state.

    ::

        manager.save(step, args=p2p.args.Composite(
            state=…, data_iter=grain.checkpoint.CheckpointSave(as_grain_iterator(feed))))

    Such managers keep one state per process, so a stream can resume only on as many hosts as it was saved on. If a
    manager accepts any Orbax handler, use :class:`IteratorHandler`.

    Args:
      feed: a :class:`meshfeed.Feed`, or any iterator with ``get_state`` and ``set_state`` whose state is JSON.
    """
    return GrainIteratorAdapter(feed)
