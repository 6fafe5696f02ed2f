"""A loader of host-local batches with a replay buffer of the batches that were read but not delivered.

The feed reads ahead, but MaxText's checkpoint code takes the state from the loader itself. Every batch is therefore
buffered with the loader's subsequent state until it is delivered: the visible state is that of the last delivered batch,
and batches that a one-shot iterator read ahead can be read again after a reset.

The open iterators of a host's loaders, used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import MeshfeedError, PlanError, SettingsError, StalledError, StateMismatchError
from meshfeed._src.base.ownership import own, seal
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.stats import Dropping
from meshfeed._src.base.threads import close_within
from meshfeed._src.base.types import PyTree
from meshfeed._src.sources.host_batches import start

MAX_ATTEMPTS = 30
SLEEP_SECONDS = 10.0
_TURN_SECONDS = 300.0


class LoaderNotReadyError(MeshfeedError, TimeoutError):
    """Raised when every attempt failed with TensorFlow's FailedPreconditionError."""


_RETRY = Retry(MAX_ATTEMPTS, SLEEP_SECONDS, SLEEP_SECONDS, on=(LoaderNotReadyError,))


class OpenLoaders:
    """Iterators read round-robin, one batch at a time.

    A call into a loader may hang. Loaders are therefore called within :meth:`turn`, never under a lock that is needed to
    deliver a batch, read a state or close.

    Args:
      iterators: the loaders' iterators.
      joined: number of loader batches concatenated into one batch.

    Attributes:
      iterators: the loaders' iterators.
      taken: number of batches that :meth:`take` has returned.
    """

    def __init__(self, iterators: list[Any], joined: int) -> None:
        self.iterators = iterators
        self.taken = 0
        self._joined = joined
        self._turn = threading.Lock()
        self._failure: Exception | None = None
        self._closing = False
        self._closed = False

    @property
    def stateful(self) -> bool:
        """Whether all iterators have ``get_state`` and ``set_state``."""
        return all(_has_state(iterator) for iterator in self.iterators)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Gives the current thread exclusive use of the iterators.

        Raises:
          StalledError: if another thread has not returned from a loader for 300 s.
        """
        if not self._turn.acquire(timeout=_TURN_SECONDS):
            raise StalledError(
                f"another thread has been in next() of the loader for {_TURN_SECONDS:g} s. Look at what the loader waits "
                "for, or pass an iterable that starts again at each iter().",
                waited_seconds=_TURN_SECONDS,
            )
        try:
            yield
        finally:
            self._turn.release()
            if self._closing:  # close() was called during this turn
                self._close_if_idle()

    def take(self) -> PyTree:
        """Returns the next batch; call only within :meth:`turn`.

        Raises:
          StopIteration: at the end of the data.
          Exception: whatever the loader raised; on every later call too if the loader is a generator, which cannot
            resume after an exception.
        """
        if self._failure is not None:
            raise self._failure
        iterator = self.iterators[self.taken % len(self.iterators)]
        try:
            batches = [jax.tree.map(_keep, _next_of(iterator)) for _ in range(self._joined)]
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error if _is_spent(iterator) else None
            raise
        self.taken += 1
        return batches.pop() if self._joined == 1 else jax.tree.map(_join, *batches)

    def state(self) -> dict[str, Any]:
        """Returns the number of batches and, if all iterators are stateful, their states."""
        state: dict[str, Any] = {"batches": self.taken}
        if self.stateful:
            state["iterators"] = [iterator.get_state() for iterator in self.iterators]
        return state

    def set_states(self, states: Sequence[Any], taken: int) -> None:
        """Restores all loaders, or none if one of them fails; call only within :meth:`turn`.

        Raises:
          Exception: whatever a loader raises for a state that it does not accept.
        """
        before = [iterator.get_state() for iterator in self.iterators]
        try:
            for iterator, state in zip(self.iterators, states, strict=True):
                iterator.set_state(state)
        except BaseException:
            for iterator, state in zip(self.iterators, before, strict=True):
                iterator.set_state(state)
            raise
        self.taken = taken

    def skip(self, batches: int) -> None:
        """Reads and discards batches until ``batches`` have been taken.

        Raises:
          StateMismatchError: if the data ends before that.
        """
        with Dropping("the loader", batches - self.taken, "batches") as dropping:
            while self.taken < batches:
                try:
                    self.take()
                except StopIteration:
                    remedy = "The loader ends earlier; pass the data that the state was saved with."
                    raise StateMismatchError("batches", batches, self.taken, remedy) from None
                dropping.add()

    def close(self) -> None:
        """Closes iterators that have ``close``: now, or once the thread that is calling one of them returns."""
        self._closing = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self._turn.acquire(blocking=False):
            return
        try:
            iterators = [] if self._closed else self.iterators
            self._closed = True
            for iterator in iterators:
                close_within(iterator)
        finally:
            self._turn.release()


def _has_state(iterator: Any) -> bool:
    return callable(getattr(iterator, "get_state", None)) and callable(getattr(iterator, "set_state", None))


def _is_spent(iterator: Any) -> bool:
    """Whether this is a finished generator: after an exception, its next() would look like the end of the data."""
    return inspect.isgenerator(iterator) and iterator.gi_frame is None


def _next_of(iterator: Any) -> PyTree:
    """Returns the next batch; on TensorFlow's FailedPreconditionError, tries up to 30 times, up to 10 s apart."""

    def attempt() -> PyTree:
        try:
            return next(iterator)
        except StopIteration:
            raise
        except Exception as error:
            if not _not_ready(error) or _is_spent(iterator):
                raise
            raise LoaderNotReadyError(f"Failed to load data after {MAX_ATTEMPTS} retry attempts: {error}") from error

    return call_with_retry(attempt, _RETRY, doing="taking the next host batch")


def _not_ready(error: Exception) -> bool:
    errors = getattr(sys.modules.get("tensorflow"), "errors", None)
    kind = getattr(errors, "FailedPreconditionError", None)
    return isinstance(kind, type) and isinstance(error, kind)


def _join(*leaves: Any) -> np.ndarray[Any, Any]:
    arrays = [np.asarray(leaf) for leaf in leaves]
    whole = memory.empty((sum(len(array) for array in arrays), *arrays[0].shape[1:]), np.result_type(*arrays))
    np.concatenate(arrays, axis=0, out=whole)
    return seal(whole)


def _keep(leaf: Any) -> Any:
    """Returns an owned copy if needed: the loader may reuse its arrays before the batch is delivered."""
    owned = own(leaf)
    return owned if owned is leaf else seal(owned)


_log = logging.getLogger("meshfeed.maxtext")


class LocalBatches:
    """The batches of one host, for :class:`meshfeed.sources.HostBatches`.

    Args:
      dataloader: a tf.data.Dataset, an iterable, or (with a factor below 1) a list of them, read round-robin.
      factor: if greater than 1, concatenate that many loader batches into one.
      local_devices: number of local devices; the number of rows must be a multiple of it.

    Raises:
      SettingsError: (a ValueError) if ``dataloader`` is not a loader, or the factor is neither an integer nor 1/n.
    """

    rows_may_vary = True
    readers_share_a_position = True
    ends_may_differ = True  # MaxText creates its endless placeholder loaders without padding

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
        """Requires every later batch to have ``rows`` host-local rows."""
        self._rows = rows
        self.replay_buffer.expect_rows(rows)

    def reset(self) -> None:
        """Restarts from the beginning; a one-shot iterator resumes after the last delivered batch."""
        if self.one_shot:
            self.replay_buffer.last = None
        else:
            self.replay_buffer.close()
            self.replay_buffer = self._open()

    def rewind(self) -> None:
        """Restarts from the beginning, including a one-shot iterator that has a state."""
        if self.one_shot:
            self.replay_buffer.restore(self.replay_buffer.beginning)
        else:
            self.reset()

    def sample(self) -> PyTree | None:
        """Returns the first batch of the data, or None if it cannot be read; the current cursor does not move."""
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
    """A reader of a replay buffer, starting at the first undelivered batch."""

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
        """Returns the loaders' state after the last batch read by this reader."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Restores the loaders; earlier readers of the replay buffer then raise StopIteration."""
        self._replay_buffer.restore(state)
        self._version, self._number = self._replay_buffer.begin()
        self._state = self._replay_buffer.state


class ReplayBuffer:
    """Batches that were read but not delivered, each with the loaders' state after it.

    Args:
      loaders: newly opened loaders.
      local_devices: number of local devices; the number of rows must be a multiple of it.
      reopen: opens the loaders again from the beginning; None if they are one-shot.

    Attributes:
      state: the loaders' state after the last delivered batch.
      beginning: their state before the first batch.
      last: the last delivered host-local batch.
      rows: number of rows that each batch must have, or None.
    """

    def __init__(self, loaders: OpenLoaders, local_devices: int, reopen: Callable[[], OpenLoaders] | None) -> None:
        self._loaders = loaders
        self._local_devices = local_devices
        self._reopen = reopen
        self._lock = threading.Lock()  # never held during a loader call, which may hang
        self._items: list[tuple[PyTree, dict[str, Any]]] = []
        self._first = 0  # number of the first batch in _items
        self._version = 0  # incremented by restore(), which invalidates earlier readers
        self._checked: list[tuple[int, ...]] = []  # shapes of the last valid batch: most batches have the same
        self.rows: int | None = None
        self.last: PyTree | None = None
        self.state = loaders.state()
        self.beginning = self.state

    @property
    def iterators(self) -> list[Any]:
        """The iterators of the loaders."""
        return self._loaders.iterators

    def expect_rows(self, rows: int) -> None:
        """Requires every later batch to have ``rows`` rows."""
        self.rows, self._checked = rows, []

    def begin(self) -> tuple[int, int]:
        """Returns the version and the number of the first undelivered batch, for a new reader."""
        return self._version, self._first

    def read(self, version: int, number: int) -> tuple[PyTree, dict[str, Any]]:
        """Returns batch ``number`` and the loaders' state after it.

        Raises:
          StopIteration: at the end, or if the replay buffer has been restored since ``version``.
          PlanError: (a ValueError) if the rows cannot be divided evenly over this host's devices; names the leaf.
        """
        with self._lock:
            item, loaders = self._find(version, number), self._loaders
        if item is None:
            with loaders.turn():
                item = self._read_next(loaders, version, number)
        return item

    def _find(self, version: int, number: int) -> tuple[PyTree, dict[str, Any]] | None:
        if version != self._version:
            raise StopIteration
        offset = number - self._first
        return self._items[offset] if offset < len(self._items) else None

    def _read_next(self, loaders: OpenLoaders, version: int, number: int) -> tuple[PyTree, dict[str, Any]]:
        with self._lock:
            item = self._find(version, number)  # another thread may have read it while this one waited
        if item is not None:
            return item
        batch = loaders.take()
        self._check_rows(batch)
        item = batch, loaders.state()
        with self._lock:
            if loaders is self._loaders:  # not restored meanwhile: the batch is the next one for newer readers too
                self._items.append(item)
            self._find(version, number)  # raises StopIteration if restored meanwhile
        return item

    def delivered_before(self, number: int) -> bool:
        """Marks the batches before ``number`` as delivered; returns False if there are fewer, that is, after padding.

        Safe to repeat after an interrupt: each batch is marked by assignments alone, without a call between them at which
        Python would handle a signal.
        """
        with self._lock:
            while self._items and self._first < number:
                (last, state), *rest = self._items
                self._items, self._first, self.last, self.state = rest, self._first + 1, last, state
            return self._first >= number

    def peek(self) -> PyTree | None:
        """Returns the next batch without delivering it, reading it if needed; None at the end."""
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
        """Restores the loaders to ``state`` and discards the read-ahead.

        Raises:
          StateMismatchError: if the state does not fit the loaders.
          Exception: whatever ``set_state`` of a loader raises.
        """
        current = {"batches": self._loaders.taken, "loaders": len(self.iterators)}
        if not isinstance(state, Mapping) or not isinstance(state.get("batches"), int):
            raise StateMismatchError("batches", state, current, "The state is damaged; use another.")
        saved = state.get("iterators")
        if (saved is not None) != self._loaders.stateful or (saved is not None and len(saved) != len(self.iterators)):
            remedy = "Pass the loaders, and the expansion_loading_factor_for_grain, that it was saved with."
            raise StateMismatchError("iterators", saved, current, remedy)
        if self._reopen is not None:
            fresh = self._reopen()  # a thread may still be in next() of the old loaders
            with fresh.turn():
                self._resume_with(fresh, saved, state["batches"])
        elif saved is not None:
            with self._loaders.turn():
                self._resume_with(self._loaders, saved, state["batches"])
        else:
            self._resume_one_shot(state["batches"])

    def _resume_with(self, loaders: OpenLoaders, saved: list[Any] | None, batches: int) -> None:
        if saved is None:
            loaders.skip(batches)
        else:
            loaders.set_states(saved, batches)
        state = loaders.state()
        with self._lock:
            self._loaders, self.state = loaders, state
            self._version += 1
            self._first, self._items = batches, []

    def _resume_one_shot(self, batches: int) -> None:
        with self._lock:
            if batches != self._first:
                remedy = "It can be read once: pass an iterable that starts again, or one with get_state and set_state."
                raise StateMismatchError("batches", batches, self._first, remedy)
            self._version += 1

    def sample(self) -> PyTree | None:
        """Returns the first batch of one-shot but stateful loaders without moving them; None for other loaders."""
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
        """Closes iterators that have ``close``."""
        self._loaders.close()


def _parts(dataloader: Any, factor: Any) -> tuple[int, bool]:
    """Returns the number of batches to concatenate, and whether ``dataloader`` is a list read round-robin."""
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
