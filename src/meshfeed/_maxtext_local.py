"""A loader of host-local batches, remembered up to the last one that was delivered.

The feed reads ahead, and MaxText's checkpoint code asks the loader itself for its state. So every batch is kept with
the loader's state after it until it is delivered: the state that is shown is that of the last delivered batch, and a
loader that can be read only once gives again what was read ahead and dropped.
"""

from __future__ import annotations

import collections
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from meshfeed import _aligned
from meshfeed._errors import MeshfeedError, PlanError, SettingsError, StateMismatchError
from meshfeed._retry import call_with_retry
from meshfeed._settings import Retry
from meshfeed._threads import close_within
from meshfeed._types import PyTree
from meshfeed.sources._host_batches import start

MAX_ATTEMPTS = 30
SLEEP_SECONDS = 10.0


class LoaderNotReadyError(MeshfeedError, TimeoutError):
    """TensorFlow's FailedPreconditionError came at every try."""


_RETRY = Retry(MAX_ATTEMPTS, SLEEP_SECONDS, SLEEP_SECONDS, on=(LoaderNotReadyError,))


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

    def __init__(self, dataloader: Any, factor: float, local_devices: int) -> None:
        self._dataloader = dataloader
        self._joined, self._in_turns = _parts(dataloader, factor)
        self._local_devices = local_devices
        self._rows: int | None = None
        self.one_shot = all(_is_one_shot(loader) for loader in self._loaders())
        self.tape = self._open()

    def _loaders(self) -> list[Any]:
        return list(self._dataloader) if self._in_turns else [self._dataloader]

    def _open(self) -> Tape:
        iterators = [start(loader) for loader in self._loaders()]
        tape = Tape(iterators, self._joined, self._local_devices, reopen=None if self.one_shot else self._reopen)
        tape.rows = self._rows
        return tape

    def _reopen(self) -> list[Any]:
        return [start(loader) for loader in self._loaders()]

    def expect_rows(self, rows: int) -> None:
        """Refuses batches of another number of host-local rows from now on."""
        self._rows = rows
        self.tape.expect_rows(rows)

    def reset(self) -> None:
        """From the beginning; a loader that can be read once goes on after the last delivered batch."""
        if not self.one_shot:
            self.tape.close()
            self.tape = self._open()

    def rewind(self) -> None:
        """From the beginning, also where the loader can be read once but has states."""
        if self.one_shot:
            self.tape.restore(self.tape.beginning)
        else:
            self.reset()

    def __iter__(self) -> LocalPass:
        return LocalPass(self.tape)


class LocalPass:
    """One reader of a tape, from the first batch that is not delivered yet."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._version, self._number = tape.begin()
        self._state = tape.state

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        batch, self._state = self._tape.read(self._version, self._number)
        self._number += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """The loaders' state after the last batch read here."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Brings the loaders to a state; readers of the tape from before find it ended."""
        self._tape.restore(state)
        self._version, self._number = self._tape.begin()
        self._state = self._tape.state


class Tape:
    """What was read of the loaders and not delivered, each batch with their state after it.

    Args:
      iterators: of the loaders; they take turns, a batch each.
      joined: batches of a loader that make one batch here.
      local_devices: rows must be a multiple of it.
      reopen: new iterators from the beginning, or None where they can be read once.

    Attributes:
      state: of the loaders after the last delivered batch.
      beginning: their state before the first batch.
      last: the last delivered batch, host-local.
    """

    def __init__(
        self, iterators: list[Any], joined: int, local_devices: int, reopen: Callable[[], list[Any]] | None
    ) -> None:
        self._iterators = iterators
        self._joined = joined
        self._local_devices = local_devices
        self._reopen = reopen
        self._lock = threading.Lock()
        self._items: collections.deque[tuple[PyTree, dict[str, Any]]] = collections.deque()
        self._first = 0  # number of the batch at the head of items
        self._version = 0
        self._taken = 0
        self._checked: list[tuple[int, ...]] = []  # shapes of the last batch that was found right
        self.rows: int | None = None  # that each batch must have
        self.last: PyTree | None = None
        self.state = self._state_now()
        self.beginning = self.state

    @property
    def iterators(self) -> list[Any]:
        """The loaders' own iterators."""
        return self._iterators

    def expect_rows(self, rows: int) -> None:
        """Refuses batches of another number of rows from now on."""
        self.rows, self._checked = rows, []

    def begin(self) -> tuple[int, int]:
        """For a new reader: version and number of the first batch that is not delivered."""
        return self._version, self._first

    def read(self, version: int, number: int) -> tuple[PyTree, dict[str, Any]]:
        """Batch ``number`` and the loaders' state after it.

        Raises:
          StopIteration: the end, or the tape was brought to another state since.
          PlanError: (a ValueError) rows that cannot be split over this host's devices; names the leaf.
        """
        with self._lock:
            if version != self._version:
                raise StopIteration
            if number - self._first == len(self._items):
                self._items.append((self._take(), self._state_now()))
            return self._items[number - self._first]

    def delivered(self) -> None:
        """The batch at the head has reached the caller."""
        with self._lock:
            self.last, self.state = self._items.popleft()
            self._first += 1

    def ahead(self) -> PyTree | None:
        """The first batch that was read and not delivered."""
        with self._lock:
            return self._items[0][0] if self._items else None

    def peek(self) -> PyTree | None:
        """The batch that is next to be delivered, read now if it was not; None at the end."""
        try:
            return self.read(*self.begin())[0]
        except StopIteration:
            return None

    def _take(self) -> PyTree:
        iterator = self._iterators[self._taken % len(self._iterators)]
        batches = [_next_of(iterator) for _ in range(self._joined)]
        self._taken += 1
        batch = batches.pop() if self._joined == 1 else jax.tree.map(_join, *batches)
        self._check_rows(batch)
        return batch

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

    def _state_now(self) -> dict[str, Any]:
        state: dict[str, Any] = {"batches": self._taken}
        if all(has_state(iterator) for iterator in self._iterators):
            state["iterators"] = [iterator.get_state() for iterator in self._iterators]
        return state

    def restore(self, state: Any) -> None:
        """Brings the loaders to ``state`` and drops what was read ahead.

        Raises:
          StateMismatchError: the loaders have no such state. What a loader's own ``set_state`` raises.
        """
        here = {"batches": self._taken, "loaders": len(self._iterators)}
        if not isinstance(state, Mapping) or not isinstance(state.get("batches"), int):
            raise StateMismatchError("batches", state, here, "The state is damaged; use another.")
        with self._lock:
            saved = state.get("iterators")
            stateful = all(has_state(iterator) for iterator in self._iterators)
            if (saved is not None) != stateful or (saved is not None and len(saved) != len(self._iterators)):
                remedy = "Pass the loaders, and the expansion_loading_factor_for_grain, that it was saved with."
                raise StateMismatchError("iterators", saved, here, remedy)
            if saved is not None:
                fresh = self._reopen() if self._reopen is not None else self._iterators
                for iterator, value in zip(fresh, saved, strict=True):
                    iterator.set_state(value)
            elif self._reopen is None:
                if state["batches"] == self._first:
                    self._version += 1
                    return
                remedy = "It can be read once: pass an iterable that starts again, or one with get_state and set_state."
                raise StateMismatchError("batches", state["batches"], self._first, remedy)
            else:
                fresh = self._reopen()
                for number in range(state["batches"]):
                    for _ in range(self._joined):
                        next(fresh[number % len(fresh)])
            self._iterators = fresh
            self._taken = state["batches"]
            self._version += 1
            self._first = self._taken
            self._items.clear()
            self.state = self._state_now()

    def close(self) -> None:
        """Closes iterators that can be closed."""
        for iterator in self._iterators:
            close_within(iterator)


def has_state(iterator: Any) -> bool:
    """Whether an iterator can be saved and restored."""
    return callable(getattr(iterator, "get_state", None)) and callable(getattr(iterator, "set_state", None))


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


def _next_of(iterator: Any) -> PyTree:
    """The next batch; TensorFlow's FailedPreconditionError is waited out, 30 times for up to 10 s."""

    def attempt() -> PyTree:
        try:
            return next(iterator)
        except StopIteration:
            raise
        except Exception as error:
            if not _not_ready(error) or (inspect.isgenerator(iterator) and iterator.gi_frame is None):
                raise  # a generator that raised has ended: asked again it would look like the end of the data
            raise LoaderNotReadyError(f"Failed to load data after {MAX_ATTEMPTS} retry attempts: {error}") from error

    return call_with_retry(attempt, _RETRY, doing="taking the next host batch")


def _not_ready(error: Exception) -> bool:
    errors = getattr(sys.modules.get("tensorflow"), "errors", None)
    kind = getattr(errors, "FailedPreconditionError", None)
    return isinstance(kind, type) and isinstance(error, kind)


def _join(*leaves: Any) -> np.ndarray[Any, Any]:
    arrays = [np.asarray(leaf) for leaf in leaves]
    whole = _aligned.empty((sum(len(array) for array in arrays), *arrays[0].shape[1:]), np.result_type(*arrays))
    np.concatenate(arrays, axis=0, out=whole)
    base: Any = whole
    while isinstance(base, np.ndarray):  # nobody writes to it again, so that it need not be copied
        base.flags.writeable = False
        base = base.base
    return whole
