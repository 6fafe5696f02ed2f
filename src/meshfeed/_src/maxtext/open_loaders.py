"""The open iterators of a host's loaders, which only one thread at a time may use."""

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
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.threads import close_within
from meshfeed._src.base.types import PyTree

MAX_ATTEMPTS = 30
SLEEP_SECONDS = 10.0
_TURN_SECONDS = 300.0


class LoaderNotReadyError(MeshfeedError, TimeoutError):
    """TensorFlow's FailedPreconditionError came at every try."""


_RETRY = Retry(MAX_ATTEMPTS, SLEEP_SECONDS, SLEEP_SECONDS, on=(LoaderNotReadyError,))


class OpenLoaders:
    """Iterators that take turns, a batch each.

    A call into a loader may hang. It is made within :meth:`turn`, never under a lock that delivering a batch, reading a
    state or closing needs.

    Args:
      iterators: of the loaders.
      joined: batches of a loader that make one batch here.

    Attributes:
      iterators: of the loaders.
      taken: batches that :meth:`take` has returned.
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
        """Whether all of them can be saved and restored."""
        return all(_has_state(iterator) for iterator in self.iterators)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The iterators for one thread alone.

        Raises:
          StalledError: another thread has not returned from a loader for 300 s.
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
            if self._closing:
                self._close_if_idle()

    def take(self) -> PyTree:
        """The next batch; only within :meth:`turn`.

        Raises:
          StopIteration: the end.
          What the loader raised; again at each further call, if it is a generator, which cannot go on.
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
        """The number of batches and, if there are any, the loaders' states."""
        state: dict[str, Any] = {"batches": self.taken}
        if self.stateful:
            state["iterators"] = [iterator.get_state() for iterator in self.iterators]
        return state

    def set_states(self, states: Sequence[Any], taken: int) -> None:
        """Brings each loader to its state; only within :meth:`turn`, and all or none.

        Raises:
          What a loader raises at a state that it cannot take.
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
        """Reads and drops that many batches.

        Raises:
          StateMismatchError: there are fewer.
        """
        while self.taken < batches:
            try:
                self.take()
            except StopIteration:
                remedy = "The loader ends earlier; pass the data that the state was saved with."
                raise StateMismatchError("batches", batches, self.taken, remedy) from None

    def close(self) -> None:
        """Closes iterators that can be closed: now, or when the thread that is in one of them has returned."""
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
    """Whether it is a generator that has raised or ended: asked again it would look like the end of the data."""
    return inspect.isgenerator(iterator) and iterator.gi_frame is None


def _next_of(iterator: Any) -> PyTree:
    """The next batch; TensorFlow's FailedPreconditionError is waited out, 30 times for up to 10 s."""

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
    """``leaf`` as it is now: it is kept until it is delivered, while the loader may write to its arrays again."""
    owned = own(leaf)
    return owned if owned is leaf else seal(owned)
