"""A loader of host-local batches, remembered up to the last one that was delivered.

The feed reads ahead, and MaxText's checkpoint code asks the loader itself for its state. So every batch is kept with
the loader's state after it until it is delivered: the state that is shown is that of the last delivered batch, and a
loader that can be read only once gives again what was read ahead and dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from meshfeed._src.base.errors import PlanError, SettingsError, StateMismatchError
from meshfeed._src.base.types import PyTree
from meshfeed._src.maxtext.open_loaders import OpenLoaders
from meshfeed._src.sources.host_batches import start

_log = logging.getLogger("meshfeed.maxtext")


class LocalBatches:
    """The batches of one host, for :class:`meshfeed.sources.HostBatches`.

    Args:
      dataloader: a tf.data.Dataset, an iterable, or (with a factor below 1) a list of them that take turns.
      factor: more than 1: that many batches of the loader are joined to one.
      local_devices: rows must be a multiple of it.

    Raises:
      SettingsError: (a ValueError) not a loader, or a factor that is no whole number or fraction 1/n.
    """

    rows_may_vary = True
    ends_may_differ = True  # MaxText's placeholder loaders, which never end, are made without padding

    def __init__(self, dataloader: Any, factor: float, local_devices: int) -> None:
        self._dataloader = dataloader
        self._joined, self._in_turns = _parts(dataloader, factor)
        self._local_devices = local_devices
        self._rows: int | None = None
        self.one_shot = all(_is_one_shot(loader) for loader in self._loaders())
        self.replay_buffer = self._open()

    def _loaders(self) -> list[Any]:
        return list(self._dataloader) if self._in_turns else [self._dataloader]

    def _open(self) -> ReplayBuffer:
        replay_buffer = ReplayBuffer(
            self._reopen(), self._local_devices, reopen=None if self.one_shot else self._reopen
        )
        replay_buffer.rows = self._rows
        return replay_buffer

    def _reopen(self) -> OpenLoaders:
        return OpenLoaders([start(loader) for loader in self._loaders()], self._joined)

    def expect_rows(self, rows: int) -> None:
        """Refuses batches of another number of host-local rows from now on."""
        self._rows = rows
        self.replay_buffer.expect_rows(rows)

    def reset(self) -> None:
        """From the beginning; a loader that can be read once goes on after the last delivered batch."""
        if self.one_shot:
            self.replay_buffer.last = None
        else:
            self.replay_buffer.close()
            self.replay_buffer = self._open()

    def rewind(self) -> None:
        """From the beginning, also where the loader can be read once but has states."""
        if self.one_shot:
            self.replay_buffer.restore(self.replay_buffer.beginning)
        else:
            self.reset()

    def sample(self) -> PyTree | None:
        """The first batch of the data, whatever was read or restored since; None if it cannot be read. Nothing moves."""
        try:
            if self.one_shot:
                return self.replay_buffer.sample()
            fresh = self._reopen()
            try:
                with fresh.turn():
                    return fresh.take()
            finally:
                fresh.close()
        except StopIteration:
            return None
        except Exception as error:
            _log.warning("cannot read a batch to see the shape of padding: %s: %s", type(error).__name__, error)
            return None

    def __iter__(self) -> LocalPass:
        return LocalPass(self.replay_buffer)


class LocalPass:
    """One reader of a replay_buffer, from the first batch that is not delivered yet."""

    def __init__(self, replay_buffer: ReplayBuffer) -> None:
        self._replay_buffer = replay_buffer
        self._version, self._number = replay_buffer.begin()
        self._state = replay_buffer.state

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        batch, self._state = self._replay_buffer.read(self._version, self._number)
        self._number += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """The loaders' state after the last batch read here."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Brings the loaders to a state; readers of the replay_buffer from before find it ended."""
        self._replay_buffer.restore(state)
        self._version, self._number = self._replay_buffer.begin()
        self._state = self._replay_buffer.state


class ReplayBuffer:
    """What was read of the loaders and not delivered, each batch with their state after it.

    Args:
      loaders: just opened.
      local_devices: rows must be a multiple of it.
      reopen: opens the loaders again from the beginning, or None if they can be read once.

    Attributes:
      state: of the loaders after the last delivered batch.
      beginning: their state before the first batch.
      last: the last delivered batch, host-local.
    """

    def __init__(self, loaders: OpenLoaders, local_devices: int, reopen: Callable[[], OpenLoaders] | None) -> None:
        self._loaders = loaders
        self._local_devices = local_devices
        self._reopen = reopen
        self._lock = threading.Lock()  # never held while a loader is called, which may hang
        self._items: list[tuple[PyTree, dict[str, Any]]] = []
        self._first = 0  # number of the batch at the head of items
        self._version = 0
        self._checked: list[tuple[int, ...]] = []  # shapes of the last batch that was found right
        self.rows: int | None = None  # that each batch must have
        self.last: PyTree | None = None
        self.state = loaders.state()
        self.beginning = self.state

    @property
    def iterators(self) -> list[Any]:
        """The loaders' own iterators."""
        return self._loaders.iterators

    def expect_rows(self, rows: int) -> None:
        """Refuses batches of another number of rows from now on."""
        self.rows, self._checked = rows, []

    def begin(self) -> tuple[int, int]:
        """For a new reader: version and number of the first batch that is not delivered."""
        return self._version, self._first

    def read(self, version: int, number: int) -> tuple[PyTree, dict[str, Any]]:
        """Batch ``number`` and the loaders' state after it.

        Raises:
          StopIteration: the end, or the replay_buffer was brought to another state since.
          PlanError: (a ValueError) rows that cannot be split over this host's devices; names the leaf.
        """
        with self._lock:
            item, loaders = self._find(version, number), self._loaders
        if item is None:
            with loaders.turn():
                item = self._read_on(loaders, version, number)
        return item

    def _find(self, version: int, number: int) -> tuple[PyTree, dict[str, Any]] | None:
        if version != self._version:
            raise StopIteration
        place = number - self._first
        return self._items[place] if place < len(self._items) else None

    def _read_on(self, loaders: OpenLoaders, version: int, number: int) -> tuple[PyTree, dict[str, Any]]:
        with self._lock:
            item = self._find(version, number)  # another thread may have read it meanwhile
        if item is not None:
            return item
        batch = loaders.take()
        self._check_rows(batch)
        item = batch, loaders.state()
        with self._lock:
            if loaders is self._loaders:  # then the batch is the next one, also for readers that have begun since
                self._items.append(item)
            self._find(version, number)
        return item

    def delivered_before(self, number: int) -> bool:
        """Counts the batches before ``number`` as delivered; False if there are fewer, so that this host gave padding.

        A call that was interrupted can be made again: each batch is counted by assignments alone, without a call between
        them at which Python would handle a signal.
        """
        with self._lock:
            while self._items and self._first < number:
                (last, state), *rest = self._items
                self._items, self._first, self.last, self.state = rest, self._first + 1, last, state
            return self._first >= number

    def peek(self) -> PyTree | None:
        """The batch that is next to be delivered, read now if it was not; None at the end."""
        try:
            return self.read(*self.begin())[0]
        except StopIteration:
            return None

    def _check_rows(self, batch: PyTree) -> None:
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
        if shapes == self._checked:
            return
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            shape = np.shape(leaf)
            if not shape or not shape[0] or shape[0] % self._local_devices:
                raise PlanError(
                    f"Unable to put to devices shape {shape} with local device count {self._local_devices} at "
                    f"{jax.tree_util.keystr(path)}: its rows must be a multiple of {self._local_devices}."
                )
            if self.rows is not None and shape[0] != self.rows:
                raise PlanError(
                    f"Unable to put to devices shape {shape} with local device count {self._local_devices} at "
                    f"{jax.tree_util.keystr(path)}: global_shape asks for {self.rows} rows of this host."
                )
        self._checked = shapes

    def restore(self, state: Any) -> None:
        """Brings the loaders to ``state`` and drops what was read ahead.

        Raises:
          StateMismatchError: the loaders have no such state. What a loader's own ``set_state`` raises.
        """
        here = {"batches": self._loaders.taken, "loaders": len(self.iterators)}
        if not isinstance(state, Mapping) or not isinstance(state.get("batches"), int):
            raise StateMismatchError("batches", state, here, "The state is damaged; use another.")
        saved = state.get("iterators")
        if (saved is not None) != self._loaders.stateful or (saved is not None and len(saved) != len(self.iterators)):
            remedy = "Pass the loaders, and the expansion_loading_factor_for_grain, that it was saved with."
            raise StateMismatchError("iterators", saved, here, remedy)
        if self._reopen is not None:
            fresh = self._reopen()
            with fresh.turn():
                self._go_on_with(fresh, saved, state["batches"])
        elif saved is not None:
            with self._loaders.turn():
                self._go_on_with(self._loaders, saved, state["batches"])
        else:
            self._go_on_here(state["batches"])

    def _go_on_with(self, loaders: OpenLoaders, saved: list[Any] | None, batches: int) -> None:
        if saved is None:
            loaders.skip(batches)
        else:
            loaders.set_states(saved, batches)
        state = loaders.state()
        with self._lock:
            self._loaders, self.state = loaders, state
            self._version += 1
            self._first, self._items = batches, []

    def _go_on_here(self, batches: int) -> None:
        with self._lock:
            if batches != self._first:
                remedy = "It can be read once: pass an iterable that starts again, or one with get_state and set_state."
                raise StateMismatchError("batches", batches, self._first, remedy)
            self._version += 1

    def sample(self) -> PyTree | None:
        """The first batch of loaders that can be read once but have states, which stay where they are; else None."""
        loaders = self._loaders
        if not loaders.stateful:
            return None
        with loaders.turn():
            here = loaders.state()
            try:
                loaders.set_states(self.beginning["iterators"], 0)
                return loaders.take()
            finally:
                loaders.set_states(here["iterators"], here["batches"])

    def close(self) -> None:
        """Closes iterators that can be closed."""
        self._loaders.close()


def _parts(dataloader: Any, factor: Any) -> tuple[int, bool]:
    """How many batches are joined, and whether ``dataloader`` is a list of loaders that take turns."""
    setting = "expansion_loading_factor_for_grain"
    what = "a whole number, 1/n with a list of n loaders, or -1 for neither"
    if isinstance(factor, bool) or not isinstance(factor, int | float | np.number):
        raise SettingsError(f"{setting}={factor!r}; it takes {what}.", setting=setting)
    if not isinstance(dataloader, Iterable) and not hasattr(dataloader, "as_numpy_iterator"):
        raise SettingsError(
            f"Type error: dataloader should be either tf.data.Dataset or Iterable, not {type(dataloader).__name__}.",
            setting="dataloader",
        )
    if 0 < factor < 1:
        turns = round(1 / factor)
        if isinstance(dataloader, list | tuple) and dataloader and all(_is_loader(item) for item in dataloader):
            if len(dataloader) != turns or abs(turns * factor - 1) > 1e-6:
                raise SettingsError(
                    f"{setting}={factor!r} with a list of {len(dataloader)} loaders; expected {turns} of them, one for "
                    "each host that the checkpoint was saved on in place of this one.",
                    setting=setting,
                )
            return 1, True
        return 1, False
    if factor > 1 and factor != int(factor):
        raise SettingsError(f"{setting}={factor!r}; it takes {what}.", setting=setting)
    return max(1, int(factor)), False


def _is_loader(item: Any) -> bool:
    if isinstance(item, Mapping | np.ndarray | jax.Array | str | bytes):
        return False
    return isinstance(item, Iterable) or hasattr(item, "as_numpy_iterator")


def _is_one_shot(loader: Any) -> bool:
    return hasattr(loader, "__next__") and not hasattr(loader, "as_numpy_iterator") and iter(loader) is loader
