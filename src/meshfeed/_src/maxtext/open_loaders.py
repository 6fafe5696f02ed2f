"""The open iterators of a host's loaders, used by one thread at a time."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import MeshfeedError, StalledError, StateMismatchError
from meshfeed._src.base.ownership import own, seal
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.threads import close_within
from meshfeed._src.base.types import PyTree

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
