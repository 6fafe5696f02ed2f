"""The loaders of one host as one iterator of batches with a state, for :class:`meshfeed.sources.HostBatches`.

MaxText's checkpoint code takes the state from the loader itself, and its ``iter()`` resumes a one-shot iterator after the
last delivered batch, although the feed reads ahead. Every iterator here therefore has a state: the states of the loaders
or, for loaders without one, the number of batches. Undelivered batches are kept, so that a one-shot iterator without a
state can go back to the last delivered one.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import MeshfeedError, PlanError, SettingsError, StateMismatchError
from meshfeed._src.base.hooks import Resumable, find
from meshfeed._src.base.ownership import own, seal
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.stats import Dropping
from meshfeed._src.base.threads import close_within
from meshfeed._src.base.types import PyTree
from meshfeed._src.sources.host_batches import HostBatches, start

MAX_ATTEMPTS = 30
SLEEP_SECONDS = 10.0


class LoaderNotReadyError(MeshfeedError, TimeoutError):
    """Every attempt to read from the loader failed with TensorFlow's FailedPreconditionError."""


_RETRY = Retry(MAX_ATTEMPTS, SLEEP_SECONDS, SLEEP_SECONDS, on=(LoaderNotReadyError,))


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
        self._unread: LoaderIterator | None = self._open()
        self.beginning = self._unread.get_state()
        self.source = HostBatches(self._unread if self.one_shot else self)

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
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            shape = np.shape(leaf)
            problem = None
            if not shape or not shape[0] or shape[0] % self._local_devices:
                problem = f"its rows must be a multiple of {self._local_devices}"
            elif self._rows not in (None, shape[0]):
                problem = f"global_shape requires {self._rows} rows of this host"
            if problem:
                raise PlanError(
                    f"Unable to put to devices shape {shape} with local device count {self._local_devices} at "
                    f"{jax.tree_util.keystr(path)}: {problem}."
                )
        self._checked = shapes

    def forget_before(self, number: int) -> None:
        """Drops the batches before ``number``, the last delivered one."""
        for old in [one for one in tuple(self.recent) if one < number]:
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
        try:
            batches = [jax.tree.map(_keep, _next_of(iterator)) for _ in range(self._loaders.joined)]
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error if _is_spent(iterator) else None
            raise
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
            self._taken = self._at = batches

    def _go_to(self, batches: int) -> None:
        """Goes to a batch that is kept, or to a later one by reading and discarding."""
        kept = all(number in self._loaders.recent for number in range(batches + 1, self._taken + 1))
        if not kept or (self._loaders.one_shot and batches > self._taken):
            remedy = "It can be read once: pass an iterable that starts again, or one with get_state and set_state."
            raise StateMismatchError("batches", batches, self._at, remedy)
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
        except StopIteration:
            raise
        except Exception as error:
            if not _not_ready(error) or _is_spent(iterator):
                raise
            raise LoaderNotReadyError(f"Failed to load data after {MAX_ATTEMPTS} retry attempts: {error}") from error

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
        or (factor > 1 and factor != int(factor))
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
    return isinstance(loader, Iterator) and not hasattr(loader, "as_numpy_iterator") and iter(loader) is loader
