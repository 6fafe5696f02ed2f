"""MaxText's MultiHostDataLoadIterator, implemented as a feed over host batches.

MaxText's checkpoint code takes the state from the loader itself, and its ``iter()`` resumes a one-shot iterator after the
last delivered batch, although the feed reads ahead. :class:`HostLoaders` therefore gives every iterator a state: the
states of the loaders or, for loaders without one, the number of batches. Undelivered batches are kept, so that a one-shot
iterator without a state can go back to the last delivered one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np
from etils import epath  # pyright: ignore[reportMissingTypeStubs]
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshfeed._src.arrays.dtypes import narrowed_dtype
from meshfeed._src.base import coordination, memory
from meshfeed._src.base.errors import (
    MeshfeedError,
    PlanError,
    SettingsError,
    SourceError,
    StateMismatchError,
    hide_own_frames,
    hides_own_frames,
)
from meshfeed._src.base.exact_json import decode_value, encode_value, tree_from_json, tree_to_json
from meshfeed._src.base.fork import NotCopied, Owner
from meshfeed._src.base.hooks import Resumable, find
from meshfeed._src.base.ownership import own, seal
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.reduction import Rounds
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.stats import FeedStats
from meshfeed._src.base.threads import close_within
from meshfeed._src.base.turn import TURN, in_turn, in_use
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.feed.compiled import refuse_compiled, trace_state_clean
from meshfeed._src.feed.iterator import Feed
from meshfeed._src.plan.plan import normalize_sharding, participants
from meshfeed._src.remote.client import zeros
from meshfeed._src.sources.host_batches import HostBatches, copy_state, is_grain, is_one_shot, start
from meshfeed._src.state import grain_files
from meshfeed._src.state import state as feed_state
from meshfeed._src.state.files import Checkpointable, Directory, write_text
from meshfeed._src.streams.local_batches import LocalBatchCursor
from meshfeed._src.streams.protocol import EMPTY_BATCHES

_log = logging.getLogger("meshfeed.maxtext")
_PREFETCH = 2
_NO_DATA = "no host has a single batch, so the shape of padding is unknown. Check the dataset's path and split."
_TIMEOUT_SECONDS = 600.0  # a loader may wait 300 s for its tf.data pipeline while the other hosts wait for it


@public("meshfeed.maxtext")
class MultiHostDataLoadIterator(Checkpointable, NotCopied):
    """Assembles host-local batches into global arrays; a drop-in replacement for MaxText's class of the same name.

    ``meshfeed.MultiHostDataLoadIterator`` is a different class: a second name of :class:`meshfeed.Feed`, which reads records
    from a source and can resume on any number of hosts. Only the class here takes MaxText's arguments.

    Host batches are concatenated into one global batch, with dimension 0 sharded over all axes of the mesh.
    ``iter()`` restarts the loader; a one-shot iterator instead resumes after the last delivered batch. Without padding,
    all hosts stop at the first step that some host cannot fill. With padding, a host that has run out of data
    contributes rows of zeros while others still have data; once all have ended, every batch is zeros, indefinitely.

    Args:
      dataloader: a tf.data.Dataset, or an iterable of pytrees of arrays ``[host_rows, ...]`` with the same number of rows
        per device on every host. With a factor of 1/n, it may be a list of n loaders, which are read round-robin.
      global_mesh: the mesh.
      generate_padding_batch: whether to continue with zeros after the end.
      expansion_loading_factor_for_grain: if greater than 1, concatenate that many loader batches into one. May differ
        between hosts. Floats with an integer value are accepted.

    Raises:
      SettingsError: (a ValueError) ``dataloader`` is not iterable, ``global_mesh`` is not a Mesh, or the factor is invalid.
    """

    def __init__(
        self,
        dataloader: Any,
        global_mesh: Mesh,
        generate_padding_batch: bool = False,
        expansion_loading_factor_for_grain: float = -1,
    ) -> None:
        if not isinstance(global_mesh, Mesh):
            raise SettingsError(
                f"global_mesh={global_mesh!r}. Expected a Mesh of the devices that receive the batches.",
                setting="global_mesh",
            )
        self.global_mesh = global_mesh
        self.dataloader = dataloader
        self.generate_padding_batch = generate_padding_batch
        self.expansion_loading_factor_for_grain = expansion_loading_factor_for_grain
        self._owner = Owner()
        self._turn: dict[str, object] = {}
        hosts = participants(normalize_sharding(global_mesh))
        self.name = coordination.next_name("maxtext", hosts)  # the same on all hosts of the mesh
        here = coordination.process_index()
        self._local_devices = max(1, sum(device.process_index == here for device in global_mesh.devices.flat))
        self._local = HostLoaders(dataloader, expansion_loading_factor_for_grain, self._local_devices)
        self._feed = Feed(
            self._local.source,
            global_mesh,
            end="pad" if generate_padding_batch else "drop",
            prefetch=_PREFETCH,
            retry=Retry(attempts=1),  # HostLoaders retry the loader, as MaxText does
            timeout_seconds=_TIMEOUT_SECONDS,
            name=self.name,
        )
        self._like: PyTree | None = None  # with padding: the spec of the last delivered batch, and of a padding batch
        self._held: PyTree | None = None  # a batch taken from the feed that __next__ has not returned yet
        self._ended = False  # whether all hosts have run out of data
        self._no_data = False  # whether no host has a batch to take the padding shape from
        self._view = LocalIteratorView(self, self._local)

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> MultiHostDataLoadIterator:
        self.reset()
        return self

    def __next__(self) -> PyTree:
        """Returns the next global batch, a pytree of global ``jax.Array`` ``[global rows, ...]``.

        Raises:
          StopIteration: the end, on all hosts at the same step; never with padding.
          PlanError: (a ValueError) a leaf's rows cannot be divided evenly over this host's devices; names the leaf's path.
          ValueError: with padding, no host has a batch from which to take the shape.
          StalledError: the loader, or another host, has produced nothing for 600 s.
          SourceError: padding is needed before any batch was delivered, and batches contain nodes other than dicts, lists,
            tuples and None.
          LoaderNotReadyError: (a TimeoutError) tf.data raised FailedPreconditionError 30 times.
          MeshfeedError: another call of ``next`` or ``set_state`` is running on another thread, or JAX compiles the caller.
        """
        if not trace_state_clean():
            refuse_compiled(self.name)
        turn, mine = self._turn, object()
        held = {TURN: mine}
        try:
            if turn.setdefault(TURN, mine) is not mine:
                raise in_use(self.name)
            _, entry = self._delivered()
            if entry is not None:
                self._local.forget_before(entry["iterator"]["batches"])
            if self._held is None and not self._ended:
                self._hold_next()
            if self._ended:
                return self._padding()
            if self.generate_padding_batch:
                self._like = jax.tree.map(
                    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self._held
                )
            batch, self._held = self._held, None
            return batch
        except Exception as error:  # no decorator: an interrupt in its frame would lose the batch
            hide_own_frames(error)
            raise
        finally:
            if turn == held:
                del turn[TURN]

    def _hold_next(self) -> None:
        feed = self._feed
        try:
            self._held = feed.__next__()  # not next(feed): a KeyboardInterrupt after that C call would lose the batch
        except (StopIteration, SourceError) as error:
            if isinstance(error, SourceError) and str(error) != EMPTY_BATCHES:
                raise
            if not self.generate_padding_batch:
                end = StopIteration()
                end.add_note(
                    f"{self.name} ended at step {self.step}; iter() starts a loader again that can be read more than once, "
                    "and `for batch in loader` leaves the loop at its end"
                )
                raise end from None
            self._ended = True

    def _set_delivered(self, batch: PyTree, delivered: bool) -> None:
        """See :meth:`meshfeed.Feed._set_delivered`; padding at the end comes again anyway."""
        if not self._ended:
            self._feed._set_delivered(batch, delivered)

    def _delivered(self) -> tuple[LocalBatchCursor, Mapping[str, JsonValue] | None]:
        """Returns the cursor after the last returned batch, and this host's entry in it, if any."""
        cursor = self._feed._cursor if self._held is None else self._feed._previous
        assert isinstance(cursor, LocalBatchCursor)
        return cursor, cursor.entries.get(str(coordination.process_index()))

    @hides_own_frames
    def start(self) -> None:
        """Begins to read ahead in the background and returns at once; see :meth:`meshfeed.Feed.start`.

        ``iter()`` resets, so call it after that: ``batches = iter(loader); loader.start()``.
        """
        self._feed.start()

    def reset(self) -> None:
        """Restarts from the beginning; a one-shot iterator resumes after the last delivered batch."""
        if self._local.one_shot:
            self.restart_from(self.local_state())
        else:
            self._move(self._feed.reset)

    @in_turn
    def _move(self, move: Callable[[], None]) -> None:
        """Calls ``reset`` or ``set_state`` of the feed, and discards what belongs to its old cursor if it has moved."""
        before = self._feed._cursor
        try:
            move()
        finally:
            # No calls below: Python handles signals only at calls, so an interrupt cannot split the assignments.
            if self._feed._cursor is not before:
                self._held, self._ended, self._no_data = None, False, False

    @property
    def out_of_data(self) -> bool:
        """Whether this host contributed padding to the last batch."""
        cursor, entry = self._delivered()
        return self._ended or (entry is not None and entry.get("step", cursor.step) < cursor.step)

    @property
    def local_iterator(self) -> LocalIteratorView:
        """The loader's own iterator, with its state after the last delivered batch."""
        return self._view

    @property
    def last_local_data(self) -> PyTree | None:
        """The host-local part of the last delivered batch, zeros if it was padding; None before the first batch."""
        if not self.out_of_data:
            cursor, entry = self._delivered()
            return self._local.recent.get(entry["iterator"]["batches"]) if cursor.step and entry else None

        def local_zeros(leaf: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any]:
            rows = leaf.shape[0] // self.global_mesh.size * self._local_devices
            return np.zeros((rows, *leaf.shape[1:]), leaf.dtype)

        # Nothing was delivered before the end if there is no spec.
        return None if self._like is None else jax.tree.map(local_zeros, self._like)

    # ------------------------------------------------------------------ padding

    def _padding(self) -> PyTree:
        if self._like is None:
            self._like = self._shape_of_padding()
        return jax.tree.map(zeros, self._like)  # new arrays per call: a step may donate them

    def _shape_of_padding(self) -> PyTree:
        """Returns the global spec of a padding batch, taken from some host's first batch."""
        if self._no_data:
            raise ValueError(_NO_DATA)
        hosts = sorted({device.process_index for device in self.global_mesh.devices.flat})
        scope = coordination.next_scope(f"{self.name}/padding", hosts)
        doing = "finding the shape of a padding batch"
        with Rounds(scope, hosts, timeout_seconds=_TIMEOUT_SECONDS, doing=doing) as rounds:
            result = rounds.reduce(
                self._local_shape(), lambda shapes: next((one for one in shapes.values() if one is not None), None)
            )
        if result is None:
            self._no_data = True
            raise ValueError(_NO_DATA)
        sharding = NamedSharding(self.global_mesh, PartitionSpec(self.global_mesh.axis_names))
        x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it

        def global_spec(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (leaf.shape[0] * self.global_mesh.size, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, narrowed_dtype(leaf.dtype, x64), sharding=sharding)

        return jax.tree.map(global_spec, tree_from_json(result))

    def _local_shape(self) -> dict[str, Any] | None:
        """Returns the spec of the first batch per device, which is the same on all hosts; None if it cannot be read."""
        try:
            batch = self._local.source.first_batch()
        except (StopIteration, StateMismatchError):  # no data, or a one-shot loader past its first batch
            return None
        except Exception as error:
            _log.warning("cannot read a batch to get the shape of padding: %s: %s", type(error).__name__, error)
            return None

        def spec_per_device(leaf: object) -> jax.ShapeDtypeStruct:
            array = np.asarray(leaf)
            return jax.ShapeDtypeStruct((len(array) // self._local_devices, *array.shape[1:]), array.dtype)

        return tree_to_json(jax.tree.map(spec_per_device, batch))

    def expect_rows(self, global_rows: int) -> None:
        """Requires every later batch to have ``global_rows`` rows.

        Raises:
          PlanError: that many rows cannot be divided evenly over the devices of the mesh.
        """
        rows, rest = divmod(global_rows, self.global_mesh.size)
        if rest or not rows:
            raise PlanError(
                f"global_shape has {global_rows} rows, but the mesh has {self.global_mesh.size} devices; it takes a "
                f"multiple of {self.global_mesh.size}."
            )
        self._local.expect_rows(rows * self._local_devices)

    def peek_spec(self) -> PyTree:
        """Returns the spec of the next batch without delivering it.

        Raises:
          SourceError: this host has no further batch.
        """
        return self._feed.element_spec

    # ------------------------------------------------------------------ extensions of MaxText's interface

    def get_state(self) -> dict[str, Any]:
        """Returns the JSON state after the last delivered batch, for :class:`meshfeed.checkpoint.Checkpointer`."""
        return self._feed._stream.state(self._delivered()[0]).to_json()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state returned by :meth:`get_state` on the same number of hosts.

        Raises:
          StateMismatchError: the state is damaged or of a different kind.
        """
        self._move(lambda: self._feed.set_state(state))

    @property
    def cannot_resume(self) -> str | None:
        """Why no saved position can be restored in another process, and what to pass instead; None if positions can be."""
        return self._local.cannot_resume

    @property
    def step(self) -> int:
        """Batches delivered since the start, the last reset, or the last ``local_iterator.set_state``."""
        return self._delivered()[0].step

    @property
    def position(self) -> int:
        """Rows in those batches, across all hosts."""
        return self._delivered()[0].position

    @hides_own_frames
    def stats(self, *, since: FeedStats | None = None) -> FeedStats:
        """Returns this host's counters and times so far.

        Args:
          since: result of an earlier call; the result then covers only the time between the two calls.

        Raises:
          SettingsError: ``since`` belongs to a different iterator, or is not earlier.
        """
        return self._feed.stats(since=since)

    def local_state(self) -> dict[str, Any]:
        """Returns the loaders' state after the last delivered batch."""
        _, entry = self._delivered()
        return self._local.beginning if entry is None else decode_value(entry["iterator"]["state"])

    def restart_from(self, local_state: JsonValue) -> None:
        """Resumes the loaders from a state of :meth:`local_state`, at step 0 of the feed.

        Raises:
          Exception: any error that a loader raises for a state that it does not accept.
        """
        batches = local_state.get("batches") if isinstance(local_state, Mapping) else None
        entry = {"epoch": 0, "step": 0, "iterator": {"batches": batches, "state": encode_value(local_state)}}
        state = dataclasses.replace(
            feed_state.parse_state(self.get_state()),
            position=0,
            step=0,
            segments=[],
            hosts={str(coordination.process_index()): feed_state.seal(entry)},
        )
        try:
            self._move(lambda: self._feed.set_state(state.to_json()))
        except StateMismatchError as error:  # callers of the loader's set_state expect the loader's own exception
            raise error.__cause__ or error from None

    def close(self) -> None:
        """Stops threads and closes the loader; no-op in a forked child."""
        self._feed.close()
        if self._owner.is_here:
            self._local.close()

    def __enter__(self) -> MultiHostDataLoadIterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class MethodNotForwardedError(MeshfeedError, AttributeError):
    """The local iterator does not forward a method of the loader's iterator, which has read ahead."""


class LocalIteratorView(Checkpointable, NotCopied):
    """The loader's iterator as seen by checkpoint code: at the last delivered batch, regardless of the read-ahead.

    Orbax v1 saves and loads Grain's file of this process, as of Grain's own iterators. A save raises TypeError if part of the
    loader's state has no exact JSON form; a load raises MissingIteratorStateError (a CheckpointError and FileNotFoundError)
    if there is no file, and StateMismatchError if it is damaged.

    Other attributes are forwarded to the loader's iterator, except its methods, which could move it or save its
    read-ahead. ``__class__`` is the class of the loader's iterator, because checkpoint code tests
    ``isinstance(..., grain.DatasetIterator)``.
    """

    def __init__(self, owner: MultiHostDataLoadIterator, local: HostLoaders) -> None:
        self._owner = owner
        self._local = local

    def __iter__(self) -> LocalIteratorView:
        return self

    def __next__(self) -> PyTree:
        """Delivers the next global batch and returns its host-local part."""
        next(self._owner)
        return self._owner.last_local_data

    def get_state(self) -> JsonValue:
        """Returns the loader's own state after the last delivered batch.

        With several loaders read round-robin, returns a dict with the list of their states. If a loader has no state,
        returns the number of batches, and resuming reads and discards that many.
        """
        state = self._owner.local_state()
        iterators = state.get("iterators", ())
        return iterators[0] if len(iterators) == 1 else state

    def set_state(self, state: JsonValue) -> None:
        """Resumes from a state of :meth:`get_state` or of the loader itself; discards the read-ahead.

        Raises:
          Exception: any error that the loader raises for a state that it does not accept.
        """
        if len(self._local.beginning.get("iterators", ())) == 1:
            # Handlers of Grain and MaxText pass Grain's state as plain JSON.
            state = grain_files.with_tuples(state) if self._of_grain else state
            state = {"batches": 0, "iterators": [state]}
        self._owner.restart_from(state)

    def _captured(self) -> Callable[[Directory], None]:
        text = self.to_text()
        return lambda directory: write_text(epath.Path(directory) / grain_files.file_name(), text)

    def _read_from(self, directory: Directory) -> None:
        self.set_from(epath.Path(directory) / grain_files.file_name(), "Restore a different step.")

    def to_text(self) -> str:
        """Returns the text of Grain's file of the state."""
        return grain_files.to_text(self.get_state(), of_grain=self._of_grain)

    def set_from(self, path: epath.Path, remedy: str) -> None:
        """Sets the state in Grain's file at ``path``; an error about a missing file ends with ``remedy``."""
        text, beginning = grain_files.read_text(path, remedy), self._local.beginning.get("iterators", ())
        as_bytes = len(beginning) == 1 and isinstance(beginning[0], bytes)
        self.set_state(grain_files.from_text(text, path, of_grain=self._of_grain, as_bytes=as_bytes))

    @property
    def _of_grain(self) -> bool:
        return len(self._local.iterators) == 1 and is_grain(self._local.iterators[0])

    def start_prefetch(self) -> None:
        """Does nothing: the first ``next`` starts the read-ahead. Grain's handler calls it after ``set_state``."""

    def close(self) -> None:
        """Closes the :class:`MultiHostDataLoadIterator`, and with it the loader."""
        self._owner.close()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        iterators = self._local.iterators
        return type(iterators[0]) if len(iterators) == 1 else LocalIteratorView

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # _local is looked up here until __init__ sets it: copy and pickle would recurse
            raise AttributeError(name)
        iterator = self._local.iterators[0]
        value = getattr(iterator, name)
        if inspect.isroutine(value):
            raise MethodNotForwardedError(
                f"local_iterator does not have {type(iterator).__name__}.{name}(): the loader has read ahead, so its own "
                "methods would save or move it at another batch than the last delivered one. Use get_state, set_state, "
                f"save or load of local_iterator, or call {name} before you pass the loader."
            )
        return value


class LoaderNotReadyError(MeshfeedError, TimeoutError):
    """Every attempt to read from the loader failed with TensorFlow's FailedPreconditionError."""


# MaxText's attempts and longest pause; like MaxText, only this error is retried.
_RESUMABLE = "Pass an iterable that starts again at each iter(), or one with get_state and set_state."
_RETRY = Retry(attempts=30, initial_seconds=10.0, max_seconds=10.0, on=(LoaderNotReadyError,))


class HostLoaders:
    """The loaders of one host: an iterable whose iterators each read all of them.

    Args:
      dataloader: a tf.data.Dataset, an iterable, or (with a factor below 1) a list of them, read round-robin.
      factor: if greater than 1, concatenate that many loader batches into one.
      local_devices: number of local devices; the number of rows must be a multiple of it.

    Attributes:
      one_shot: whether the loaders can be read only once.
      joined: number of loader batches concatenated into one batch.
      iterators: the loaders' most recently opened iterators.
      recent: batches by their number, counted from 1: the last delivered one and those after it.
      beginning: state of the loaders before the first batch.

    Raises:
      SettingsError: (a ValueError) if ``dataloader`` is not a loader, or the factor is neither an integer nor 1/n.
    """

    rows_may_vary = True
    ends_may_differ = True  # MaxText creates its endless placeholder loaders without padding

    def __init__(self, dataloader: Any, factor: object, local_devices: int) -> None:
        self.joined, in_turns = _parts(dataloader, factor)
        self._loaders = list(dataloader) if in_turns else [dataloader]
        self._local_devices = local_devices
        self._rows: int | None = None
        self._checked: list[tuple[int, ...]] = []  # shapes of the last valid batch: most batches have the same
        self.one_shot = all(_is_one_shot(loader) for loader in self._loaders)
        self.recent: dict[int, PyTree] = {}
        self._unread: LoaderIterator | None = self._open()  # opened for its state; the first reader takes it
        self.beginning = copy_state(self._unread.get_state())
        self.source = HostBatches(self._unread if self.one_shot else self)

    @property
    def cannot_resume(self) -> str | None:
        """Why no saved position can be restored in another process; None if the loaders start again or have a state."""
        if not self.one_shot or "iterators" in self.beginning:
            return None
        kind = type(self._loaders[0]).__name__
        return f"the batches come from a {kind}, which can be read only once. {_RESUMABLE}"

    def _open(self) -> LoaderIterator:
        self.iterators = [start(loader) for loader in self._loaders]
        return LoaderIterator(self, self.iterators)

    def __iter__(self) -> LoaderIterator:
        unread, self._unread = self._unread, None
        return self._open() if unread is None else unread

    def expect_rows(self, rows: int) -> None:
        """Requires every later batch to have ``rows`` host-local rows."""
        self._rows, self._checked = rows, []

    def check_rows(self, batch: PyTree) -> None:
        """Raises a PlanError that names the leaf if a batch cannot be divided evenly over this host's devices."""
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
        if shapes == self._checked:
            return
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]
        for path, shape in zip(paths, shapes, strict=True):
            problem = None
            if not shape or not shape[0] or shape[0] % self._local_devices:
                problem = f"its rows must be a multiple of {self._local_devices}"
            elif self._rows not in (None, shape[0]):
                problem = f"global_shape requires {self._rows} rows of this host"
            if problem:
                where = jax.tree_util.keystr(path) or "the only leaf"
                raise PlanError(
                    f"Unable to put to devices shape {shape} with local device count {self._local_devices} at {where}: "
                    f"{problem}."
                )
        self._checked = shapes

    def forget_before(self, number: int) -> None:
        """Drops the batches before ``number``, the last delivered one."""
        for old in tuple(self.recent):  # a copy: the read-ahead adds batches meanwhile
            if old < number:
                self.recent.pop(old, None)

    def close(self) -> None:
        """Closes iterators that no reader closes: one that was never read, and one-shot loaders."""
        if self._unread is not None:
            self._unread.close()


class LoaderIterator:
    """One iterator over all loaders of a host, read by one thread at a time."""

    rows_may_vary = True
    ends_may_differ = True

    def __init__(self, loaders: HostLoaders, iterators: list[Any]) -> None:
        self._loaders = loaders
        self._iterators = iterators
        self._stateful = all(find(iterator, Resumable) is not None for iterator in iterators)
        self._taken = self._at = 0  # batches read from the loaders; batches returned, fewer after going back
        self._partial: list[PyTree] = []  # loader batches to be joined, kept if reading the rest of them fails
        self._failure: Exception | None = None
        self._busy = threading.Lock()
        self._closing = self._closed = False

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> PyTree:
        with self._use():
            if self._at == self._taken:
                batch = self._take()
                self._loaders.check_rows(batch)
                self._loaders.recent[self._taken + 1] = batch
                self._taken += 1
            self._at += 1
            return self._loaders.recent[self._at]

    def _take(self) -> PyTree:
        if self._failure is not None:
            raise self._failure  # a generator cannot resume after an exception: next() would look like the end
        iterator = self._iterators[self._taken % len(self._iterators)]
        batches = self._partial
        try:
            while len(batches) < self._loaders.joined:
                batches.append(jax.tree.map(_keep, _next_of(iterator)))
        except Exception as error:
            self._failure = error if _is_spent(iterator) else None
            raise
        self._partial = []
        return batches.pop() if self._loaders.joined == 1 else jax.tree.map(_join, *batches)

    def get_state(self) -> dict[str, Any]:
        """Returns the number of batches returned and, if all loaders are stateful, their states."""
        state: dict[str, Any] = {"batches": self._at}
        if self._stateful:
            state["iterators"] = [iterator.get_state() for iterator in self._iterators]
        return state

    def set_state(self, state: object) -> None:
        """Resumes after the batch at which ``state`` was taken.

        Raises:
          StateMismatchError: the state does not fit the loaders, or they end earlier.
          Exception: any error that a loader raises for a state that it does not accept. The state of the loaders is then
            undefined, and the caller must restore an earlier one.
        """
        current = {"batches": self._at, "loaders": len(self._iterators)}
        if not isinstance(state, Mapping) or not isinstance(state.get("batches"), int):
            raise StateMismatchError("batches", state, current, "The state is damaged; use another.")
        saved, batches = state.get("iterators"), state["batches"]
        if (saved is not None) != self._stateful or (saved is not None and len(saved) != len(self._iterators)):
            remedy = "Pass the loaders, and the expansion_loading_factor_for_grain, that it was saved with."
            raise StateMismatchError("iterators", saved, current, remedy)
        with self._use():
            if saved is None:
                self._go_to(batches)
                return
            for iterator, one in zip(self._iterators, saved, strict=True):
                iterator.set_state(one)
            self._taken, self._at, self._partial = batches, batches, []

    def _go_to(self, batches: int) -> None:
        """Goes to a batch that is kept, or to a later one by reading and discarding."""
        kept = all(number in self._loaders.recent for number in range(batches + 1, self._taken + 1))
        if not kept or (self._loaders.one_shot and batches > self._taken):
            raise StateMismatchError("batches", batches, self._at, f"It can be read only once. {_RESUMABLE}")
        if batches > self._taken:
            self._skip_to(batches)
        self._at = batches

    def _skip_to(self, batches: int) -> None:
        with Dropping("the loader", batches - self._taken, "batches") as dropping:
            while self._taken < batches:
                try:
                    self._take()
                except StopIteration:
                    remedy = "The loader ends earlier; pass the data that the state was saved with."
                    raise StateMismatchError("batches", batches, self._taken, remedy) from None
                self._taken += 1
                dropping.add()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        try:
            with self._busy:
                yield
        finally:
            if self._closing:  # close() was called during the block
                self.close()

    def close(self) -> None:
        """Closes the loaders' iterators: now, or once the thread that is calling one of them returns."""
        self._closing = True
        if self._busy.acquire(blocking=False):
            iterators, self._closed = [] if self._closed else self._iterators, True
            self._busy.release()
            for iterator in iterators:
                close_within(iterator)


def _is_spent(iterator: object) -> bool:
    """Whether this is a finished generator: after an exception, its next() would look like the end of the data."""
    return inspect.isgenerator(iterator) and iterator.gi_frame is None


def _next_of(iterator: Iterator[PyTree]) -> PyTree:
    """Returns the next batch; on TensorFlow's FailedPreconditionError, tries up to 30 times, up to 10 s apart."""

    def attempt() -> PyTree:
        try:
            return next(iterator)
        except Exception as error:
            if not _not_ready(error) or _is_spent(iterator):
                raise
            raise LoaderNotReadyError(f"Failed to load data after {_RETRY.attempts} retry attempts: {error}") from error

    return call_with_retry(attempt, _RETRY, doing="taking the next host batch")


def _not_ready(error: Exception) -> bool:
    errors = getattr(sys.modules.get("tensorflow"), "errors", None)
    return isinstance(error, getattr(errors, "FailedPreconditionError", ()))


def _join(*leaves: np.ndarray) -> np.ndarray[Any, Any]:
    arrays = [np.asarray(leaf) for leaf in leaves]
    whole = memory.empty((sum(len(array) for array in arrays), *arrays[0].shape[1:]), np.result_type(*arrays))
    np.concatenate(arrays, axis=0, out=whole)
    return seal(whole)


def _keep(leaf: object) -> object:
    """Returns an owned copy if needed: the loader may reuse its arrays before the batch is delivered."""
    owned = own(leaf)
    return owned if owned is leaf else seal(owned)


def _parts(dataloader: object, factor: object) -> tuple[int, bool]:
    """Returns the number of batches to concatenate, and whether ``dataloader`` is a list read round-robin."""
    setting = "expansion_loading_factor_for_grain"
    what = "a whole number, 1/n with a list of n loaders, or -1 for neither"
    if (
        isinstance(factor, bool)
        or not isinstance(factor, int | float | np.number)
        or not (factor <= 1 or float(factor) % 1 == 0)  # neither holds for NaN
    ):
        raise SettingsError(f"{setting}={factor!r}; it takes {what}.", setting=setting)
    if not isinstance(dataloader, Iterable) and not hasattr(dataloader, "as_numpy_iterator"):
        text = f"Type error: dataloader should be either tf.data.Dataset or Iterable, not {type(dataloader).__name__}."
        raise SettingsError(text, setting="dataloader")
    if not 0 < factor < 1 or not _is_list_of_loaders(dataloader):
        return max(1, int(factor)), False
    turns, given = round(1 / factor), len(dataloader)
    if given != turns or abs(turns * factor - 1) > 1e-6:
        raise SettingsError(
            f"{setting}={factor!r} with a list of {given} loaders; expected {turns} of them, one for each host that the "
            "checkpoint was saved on in place of this one.",
            setting=setting,
        )
    return 1, True


def _is_list_of_loaders(value: object) -> TypeGuard[Sequence[object]]:
    def is_loader(item: object) -> bool:
        is_batch = isinstance(item, Mapping | np.ndarray | jax.Array | str | bytes)
        return not is_batch and (isinstance(item, Iterable) or hasattr(item, "as_numpy_iterator"))

    return isinstance(value, list | tuple) and bool(value) and all(map(is_loader, value))


def _is_one_shot(loader: object) -> bool:
    return isinstance(loader, Iterator) and not hasattr(loader, "as_numpy_iterator") and is_one_shot(loader)
