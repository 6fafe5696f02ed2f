"""MaxText's MultiHostDataLoadIterator, implemented as a feed over host batches."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshfeed._src.arrays.device_put import narrowed_dtype
from meshfeed._src.base import coordination
from meshfeed._src.base.coordination import Owner
from meshfeed._src.base.errors import PlanError, SourceError, StateMismatchError, hide_own_frames, hides_own_frames
from meshfeed._src.base.reduction import reduce_json
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.stats import FeedStats
from meshfeed._src.base.trees import decode_value, encode_value, tree_from_json, tree_to_json
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.feed.iterator import MultiHostDataLoadIterator as Feed
from meshfeed._src.maxtext.local import HostLoaders
from meshfeed._src.remote.client import zeros
from meshfeed._src.state import files as state_files
from meshfeed._src.state import state as feed_state
from meshfeed._src.streams.local_batches import LocalBatchCursor
from meshfeed._src.streams.protocol import EMPTY_BATCHES

_log = logging.getLogger("meshfeed.maxtext")
_PREFETCH = 2
_NO_DATA = "no host has a single batch, so the shape of padding is unknown. Check the dataset's path and split."
_TIMEOUT_SECONDS = 600.0  # a loader may wait 300 s for its tf.data pipeline while the other hosts wait for it


@public("meshfeed.maxtext")
class MultiHostDataLoadIterator:
    """Assembles host-local batches into global arrays; a drop-in replacement for MaxText's class of the same name.

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
      SettingsError: (a ValueError) ``dataloader`` is not iterable or the factor is invalid.
    """

    def __init__(
        self,
        dataloader: Any,
        global_mesh: Mesh,
        generate_padding_batch: bool = False,
        expansion_loading_factor_for_grain: float = -1,
    ) -> None:
        self.global_mesh = global_mesh
        self.dataloader = dataloader
        self.generate_padding_batch = generate_padding_batch
        self.expansion_loading_factor_for_grain = expansion_loading_factor_for_grain
        self._owner = Owner()
        number = coordination.next_use("maxtext")  # equal on all hosts if they create loaders in the same order
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
            name=f"maxtext-{number}",
        )
        self._like: PyTree | None = None  # with padding: the spec of the last delivered batch, and of a padding batch
        self._padding_rounds = 0
        self._held: PyTree | None = None  # a batch taken from the feed that __next__ has not returned yet
        self._before_held = self._feed._cursor  # the feed's cursor before that batch
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
        """
        try:
            _, entry = self._delivered()
            if entry is not None:
                self._local.forget_before(entry["iterator"]["batches"])
            if self._held is None and not self._ended:
                self._hold_next()
            if self._ended:
                return self._padding()
        except Exception as error:  # no decorator: an interrupt in its frame would lose the batch
            hide_own_frames(error)
            raise
        if self.generate_padding_batch:
            self._like = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self._held
            )
        batch, self._held = self._held, None
        return batch

    def _hold_next(self) -> None:
        feed = self._feed
        try:
            self._before_held = feed._cursor
            self._held = feed.__next__()  # not next(feed): a KeyboardInterrupt after that C call would lose the batch
        except (StopIteration, SourceError) as error:
            if isinstance(error, SourceError) and str(error) != EMPTY_BATCHES:
                raise
            if not self.generate_padding_batch:
                raise StopIteration from None
            self._ended = True

    def _delivered(self) -> tuple[LocalBatchCursor, Mapping[str, JsonValue] | None]:
        """Returns the cursor after the last returned batch, and this host's entry in it, if any."""
        cursor = self._feed._cursor if self._held is None else self._before_held
        assert isinstance(cursor, LocalBatchCursor)
        return cursor, cursor.entries.get(str(coordination.process_index()))

    def reset(self) -> None:
        """Restarts from the beginning; a one-shot iterator resumes after the last delivered batch."""
        if self._local.one_shot:
            self.restart_from(self.local_state())
        else:
            self._move(self._feed.reset)

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
        self._padding_rounds += 1  # each reduction needs its own number
        hosts = sorted({device.process_index for device in self.global_mesh.devices.flat})
        result = reduce_json(
            f"{self._feed.name}/padding",
            self._padding_rounds - 1,
            self._local_shape(),
            lambda values: next((value for value in values.values() if value is not None), None),
            participants=hosts,
            timeout_seconds=_TIMEOUT_SECONDS,
            doing="finding the shape of a padding batch",
        )
        if result is None:
            self._no_data = True
            raise ValueError(_NO_DATA)
        return self._global_spec(tree_from_json(result))

    def _global_spec(self, one_device: PyTree) -> PyTree:
        sharding = NamedSharding(self.global_mesh, PartitionSpec(self.global_mesh.axis_names))
        x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (leaf.shape[0] * self.global_mesh.size, *leaf.shape[1:]),
                narrowed_dtype(leaf.dtype, x64),
                sharding=sharding,
            ),
            one_device,
        )

    def _local_shape(self) -> dict[str, Any] | None:
        """Returns the spec of the first batch per device, which is the same on all hosts; None if it cannot be read."""
        try:
            batch = self._local.source.first_batch()
        except (StopIteration, StateMismatchError):  # no data, or a one-shot loader past its first batch
            return None
        except Exception as error:
            _log.warning("cannot read a batch to get the shape of padding: %s: %s", type(error).__name__, error)
            return None
        return tree_to_json(
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    (np.shape(leaf)[0] // self._local_devices, *np.shape(leaf)[1:]), np.asarray(leaf).dtype
                ),
                batch,
            )
        )

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

    async def save(self, directory: state_files.Directory | state_files.PathAwaitingCreation) -> Awaitable[None]:
        """Implements Orbax v1's ``StatefulCheckpointable``."""
        return await state_files.save(self, directory)

    async def load(self, directory: state_files.Directory) -> Awaitable[None]:
        """Implements Orbax v1's ``StatefulCheckpointable``."""
        return await state_files.load(self, directory)

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
        except StateMismatchError as error:
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


class LocalIteratorView:
    """The loader's iterator as seen by checkpoint code: at the last delivered batch, regardless of the read-ahead.

    Other attributes are forwarded to the loader's iterator. ``__class__`` is the class of the loader's iterator, because
    checkpoint code tests ``isinstance(..., grain.DatasetIterator)``.
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
            state = {"batches": 0, "iterators": [state]}
        self._owner.restart_from(state)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        iterators = self._local.iterators
        return type(iterators[0]) if len(iterators) == 1 else LocalIteratorView

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # _local is looked up here until __init__ sets it: copy and pickle would recurse
            raise AttributeError(name)
        return getattr(self._local.iterators[0], name)
