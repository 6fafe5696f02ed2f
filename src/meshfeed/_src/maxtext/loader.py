"""MaxText's MultiHostDataLoadIterator, made of a feed over host batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshfeed._src.arrays.dtypes import narrowed_dtype
from meshfeed._src.base import coordination
from meshfeed._src.base.errors import PlanError, SourceError, StateMismatchError
from meshfeed._src.base.fork import Owner
from meshfeed._src.base.names import public
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.stats import FeedStats
from meshfeed._src.base.tree_json import tree_from_json, tree_to_json
from meshfeed._src.base.types import PyTree
from meshfeed._src.feed.iterator import MultiHostDataLoadIterator as Feed
from meshfeed._src.maxtext.local import LocalBatches
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.state import files as state_files
from meshfeed._src.state import state as feed_state
from meshfeed._src.streams.local_batches.stream import LocalBatchStream
from meshfeed._src.streams.protocol import EMPTY_BATCHES

_PREFETCH = 2
_NO_DATA = "no host has a single batch, so the shape of padding is unknown. Check the dataset's path and split."
_TIMEOUT_SECONDS = 600.0  # a loader may wait 300 s for its tf.data pipeline, and the other hosts then for it


@public("meshfeed.maxtext")
class MultiHostDataLoadIterator:
    """Host-local batches as global arrays, with the names, signature and behaviour of MaxText's class.

    The rows of all hosts' batches make one global batch, dimension 0 over all axes of the mesh. ``iter()`` resets: the
    loader is started again, except one that can be read only once, which goes on after the last delivered batch.
    Without padding all hosts stop at the first step that some host cannot fill. With padding a host whose data has ended
    gives rows of zeros while others still have data, and all hosts give batches of zeros for ever once all have ended.

    Args:
      dataloader: a tf.data.Dataset or an iterable of pytrees of arrays ``[host_rows, ...]``; each host gives as many
        rows for each of its devices. With a factor 1/n it may be a list of n of them, which take turns.
      global_mesh: the mesh.
      generate_padding_batch: continue with zeros after the end.
      expansion_loading_factor_for_grain: more than 1: join that many of the loader's batches to one. It may be another
        on each host. Whole floats are taken too.

    Raises:
      SettingsError: (a ValueError) ``dataloader`` is no iterable, or the factor cannot be used.
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
        number = coordination.next_use("maxtext")
        here = coordination.process_index()
        self._local_devices = max(1, sum(device.process_index == here for device in global_mesh.devices.flat))
        self._local = LocalBatches(dataloader, expansion_loading_factor_for_grain, self._local_devices)
        self._feed = Feed(
            HostBatches(self._local),
            global_mesh,
            end="pad" if generate_padding_batch else "drop",
            prefetch=_PREFETCH,
            retry=Retry(attempts=1),  # the loader is retried below, as MaxText does
            timeout_seconds=_TIMEOUT_SECONDS,
            name=f"maxtext-{number}",
        )
        self._like: PyTree | None = None  # with padding: the last delivered batch, and what one of zeros looks like
        self._padding_rounds = 0
        self._held: PyTree | None = None  # what next() returns, from the feed's return to its own
        self._ended = False  # whether the data of all hosts has
        self._no_data = False  # whether no host could show the shape of padding
        self._first_number = 0  # number in the replay_buffer of the batch of step 0
        self._view = LocalIteratorView(self, self._local)

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> MultiHostDataLoadIterator:
        self.reset()
        return self

    def __next__(self) -> PyTree:
        """The next global batch, a pytree of global ``jax.Array`` ``[global rows, ...]``.

        Raises:
          StopIteration: the end, on all hosts at the same step; never with padding.
          PlanError: (a ValueError) rows that this host's devices cannot share equally; names the leaf's path.
          ValueError: with padding, no host has a batch that shows its shape.
          StalledError: the loader, or another host, has given nothing for 600 s.
          SourceError: zeros are needed before any batch was delivered, for batches of other nodes than dicts, lists,
            tuples and None.
          LoaderNotReadyError: (a TimeoutError) tf.data's FailedPreconditionError came 30 times.
        """
        self._settle()
        if self._held is None and not self._ended:
            self._hold_next()
        if self._ended:
            return self._padding()
        if self.generate_padding_batch:
            self._like = jax.tree.map(_spec_of, self._held)
        batch, self._held = self._held, None
        return batch

    def _hold_next(self) -> None:
        feed = self._feed
        try:
            self._held = feed.__next__()  # next() is a call into C: an interrupt after it would lose the batch
        except StopIteration:
            if not self.generate_padding_batch:
                raise
            self._ended = True
        except SourceError as error:
            if str(error) != EMPTY_BATCHES:
                raise
            if not self.generate_padding_batch:
                raise StopIteration from None
            self._ended = True

    def _settle(self) -> bool:
        """Counts the batches that :meth:`__next__` has returned; False if this host gave padding in the last of them."""
        returned = self._feed.step - (self._held is not None)
        return self._local.replay_buffer.delivered_before(self._first_number + returned)

    def reset(self) -> None:
        """From the beginning; a loader that can be read only once goes on after the last delivered batch."""
        self._settle()
        self._feed.reset()
        self._local.reset()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._held, self._ended, self._no_data = None, False, False
        self._first_number = self._local.replay_buffer.begin()[1] - self._feed.step

    @property
    def out_of_data(self) -> bool:
        """Whether this host gave padding in the last batch."""
        return self._ended or not self._settle()

    @property
    def local_iterator(self) -> LocalIteratorView:
        """The loader's own iterator, as of the last delivered batch."""
        return self._view

    @property
    def last_local_data(self) -> PyTree | None:
        """The host-local batch that was delivered last, or its padding; None before the first one."""
        if not self.out_of_data:
            return self._local.replay_buffer.last
        if self._like is None:  # nothing was delivered before the end
            return None
        return jax.tree.map(lambda leaf: np.zeros(self._local_shape_of(leaf.shape), leaf.dtype), self._like)

    def _local_shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] // self.global_mesh.size * self._local_devices, *shape[1:])

    # ------------------------------------------------------------------ padding

    def _padding(self) -> PyTree:
        if self._like is None:
            self._like = self._shape_of_padding()
        return jax.tree.map(_zeros, self._like)

    def _shape_of_padding(self) -> PyTree:
        """From a batch of some host, if none was delivered yet."""
        if self._no_data:
            raise ValueError(_NO_DATA)
        self._padding_rounds += 1
        hosts = sorted({device.process_index for device in self.global_mesh.devices.flat})
        result = coordination.reduce_json(
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
        batch = self._local.sample()
        return None if batch is None else tree_to_json(self._one_device(batch))

    def _one_device(self, batch: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (np.shape(leaf)[0] // self._local_devices, *np.shape(leaf)[1:]), np.asarray(leaf).dtype
            ),
            batch,
        )

    def expect_rows(self, global_rows: int) -> None:
        """Refuses batches of another number of rows from now on.

        Raises:
          PlanError: so many rows cannot be divided over the devices of the mesh.
        """
        rows, rest = divmod(global_rows, self.global_mesh.size)
        if rest or not rows:
            raise PlanError(
                f"global_shape asks for {global_rows} rows, and the mesh has {self.global_mesh.size} devices; it takes a "
                f"multiple of {self.global_mesh.size}."
            )
        self._local.expect_rows(rows * self._local_devices)

    def peek_spec(self) -> PyTree | None:
        """What the next batch looks like, from this host's batch; None where it has none. Nothing is lost by it."""
        self._settle()
        batch = self._local.replay_buffer.peek()
        return None if batch is None else self._global_spec(self._one_device(batch))

    # ------------------------------------------------------------------ what MaxText's class has not

    def get_state(self) -> dict[str, Any]:
        """State of the last delivered batch, JSON, for :class:`meshfeed.checkpoint.Checkpointer`."""
        return self._feed.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`get_state` gave, on as many hosts.

        Raises:
          StateMismatchError: the state is damaged, or of another kind.
        """
        self._settle()
        if _is_of_the_beginning(state):
            self._feed.reset()
            self._local.rewind()
            self._begin_anew()
        self._feed.set_state(state)
        self._begin_anew()

    async def save(self, directory: Any) -> Any:
        """Orbax v1's StatefulCheckpointable."""
        return await state_files.save(self, directory)

    async def load(self, directory: Any) -> Any:
        """Orbax v1's StatefulCheckpointable."""
        return await state_files.load(self, directory)

    @property
    def step(self) -> int:
        """Batches delivered since the beginning, the last reset, or a state set on ``local_iterator``."""
        return self._feed.step

    @property
    def position(self) -> int:
        """Rows in those batches, over all hosts."""
        return self._feed.position

    def stats(self) -> FeedStats:
        """What this host has done so far."""
        return self._feed.stats()

    def local_state(self) -> dict[str, Any]:
        """The loaders' state after the last delivered batch."""
        self._settle()
        return self._local.replay_buffer.state

    def restart_from(self, local_state: Any) -> None:
        """Drops the read-ahead and brings the loaders to a state of ``local_iterator``."""
        self._settle()
        self._feed.reset()
        self._local.replay_buffer.restore(local_state)
        self._begin_anew()

    def close(self) -> None:
        """Ends threads and closes the loader; does nothing in a forked child."""
        self._feed.close()
        if self._owner.is_here:
            self._local.replay_buffer.close()

    def __enter__(self) -> MultiHostDataLoadIterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LocalIteratorView:
    """The loader's iterator as checkpoint code sees it: at the last delivered batch, in spite of the read-ahead.

    Other attributes are those of the loader's iterator, and ``isinstance`` takes it for one, because checkpoint code
    asks for ``grain.DatasetIterator``.

    Args:
      owner: the iterator over global batches.
      local: its loader.
    """

    def __init__(self, owner: MultiHostDataLoadIterator, local: LocalBatches) -> None:
        self._owner = owner
        self._local = local

    def __iter__(self) -> LocalIteratorView:
        return self

    def __next__(self) -> PyTree:
        """The host-local batch of the next global one, which counts as delivered."""
        next(self._owner)
        return self._owner.last_local_data

    def get_state(self) -> Any:
        """The loader's own state after the last delivered batch; a list where several loaders take turns.

        A loader without states gives the number of batches, and is resumed by reading and dropping.
        """
        state = self._owner.local_state()
        if "iterators" not in state:
            return {"batches": state["batches"]}
        if len(state["iterators"]) == 1:
            return state["iterators"][0]
        return {"batches": state["batches"], "iterators": list(state["iterators"])}

    def set_state(self, state: Any) -> None:
        """Goes on from a state that :meth:`get_state`, or the loader itself, gave; discards the read-ahead.

        Raises:
          What the loader raises at a state that it cannot take.
        """
        saved = self._local.replay_buffer.state
        if "iterators" in saved and len(saved["iterators"]) == 1:
            state = {"batches": 0, "iterators": [state]}
        self._owner.restart_from(state)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        iterators = self._local.replay_buffer.iterators
        return type(iterators[0]) if len(iterators) == 1 else LocalIteratorView

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._local.replay_buffer.iterators[0], name)


def _is_of_the_beginning(state: Any) -> bool:
    """Whether it is a state before the first batch, which has none of the loaders."""
    try:
        parsed = feed_state.parse_state(state)
    except StateMismatchError:
        return False  # the feed refuses it
    return parsed.kind == LocalBatchStream.kind and not parsed.step and not parsed.hosts


def _spec_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _zeros(spec: jax.ShapeDtypeStruct) -> jax.Array:
    whole = np.broadcast_to(np.zeros((), spec.dtype), spec.shape)  # fresh at each call: a step may donate it
    assert spec.sharding is not None
    return jax.make_array_from_callback(spec.shape, spec.sharding, lambda index: np.ascontiguousarray(whole[index]))
