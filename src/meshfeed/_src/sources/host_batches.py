"""Batches that every host makes for itself, as MaxText's iterators do."""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from meshfeed._src.base import exact_json
from meshfeed._src.base.errors import SourceError, StalledError, StateMismatchError
from meshfeed._src.base.names import public
from meshfeed._src.base.ownership import own
from meshfeed._src.base.threads import close_within
from meshfeed._src.base.tracebacks import hides_own_frames
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.sources.files.formats import reader_hint

_logger = logging.getLogger("meshfeed.sources")
_FIELD = "hosts"
_TURN_SECONDS = 300.0


@public("meshfeed.sources")
class HostBatches:
    """An iterable of host-local batches; the global batch is the batches of all hosts, one after the other.

    Not elastic: a state belongs to this number of hosts. It is resumed exactly where the iterator has ``get_state`` and
    ``set_state`` (a Grain DataLoader or DatasetIterator), by reading and dropping where the iterable can be started
    again (a list, a torch DataLoader, a tf.data.Dataset: exact if it gives the same batches again), and not at all
    where it is a generator, which can be read once.

    The arrays of a batch are copied as soon as it is there, since JAX may use their memory as its own, and what is written
    to it later would show in a batch that was delivered. So the producer may fill the same arrays again for the next batch.
    Only arrays in memory that cannot change are not copied: those of ``numpy.frombuffer`` over ``bytes``. A read-only view
    of anything else is copied, since what it is a view of may still be written.

    Args:
      iterable: an iterable, or an iterator, of pytrees with arrays ``[host_rows, ...]`` as leaves.

    Attributes:
      iterable: what was given.
      elastic: False.

    Raises:
      SourceError: it cannot be iterated over.
    """

    elastic = False

    @hides_own_frames
    def __init__(self, iterable: Any) -> None:
        can_iterate = hasattr(iterable, "__iter__") or hasattr(iterable, "__next__")
        if not can_iterate or isinstance(iterable, str | bytes):
            raise SourceError(
                f"HostBatches got a {type(iterable).__name__}. Expected an iterable of batches: pytrees of arrays "
                f"[host_rows, ...].{reader_hint(iterable) or ' If it is a function that makes one, call it first.'}"
            )
        self.iterable = iterable
        if _is_grain(iterable):
            _parse_flags()
        self._one_shot = hasattr(iterable, "__next__") and (
            not hasattr(iterable, "__iter__") or iter(iterable) is iterable
        )
        # The state before the first batch is what brings a resumable iterator back to its beginning.
        self._first_state = iterable.get_state() if self._one_shot and _has_state(iterable) else None
        self._taken = False
        # A one-shot iterator is one object however often it is opened: the last to open it is the only one to use it.
        self._turn = threading.RLock()
        self._owner: HostBatchIterator | None = None

    def __repr__(self) -> str:
        return f"HostBatches({type(self.iterable).__name__})"

    @property
    def restartable(self) -> bool:
        """Whether each pass has an iterator of its own."""
        return not self._one_shot

    @property
    def resumable(self) -> bool:
        """Whether a saved state can be continued."""
        return not self._one_shot or _has_state(self.iterable)

    def iterator(self, state: JsonValue = None) -> HostBatchIterator:
        """The batches from the beginning, or after the batch at which ``state`` was taken.

        What an earlier call gave is of no use afterwards where both would read one underlying iterator; if this call
        fails, it still is.

        Raises:
          SourceError: a generator that was read before.
          StateMismatchError: see :meth:`HostBatchIterator.set_state`.
        """
        if not self._one_shot:
            fresh = HostBatchIterator(self, start(self.iterable), restartable=True)
            if state is not None:
                fresh.set_state(state)
            return fresh
        with self._turn_of(None):
            owner, resumes = self._owner, self._first_state is not None
            before = self.iterable.get_state() if resumes and owner is not None else None
            try:
                opened = self._open_again()
                if state is not None:
                    opened.set_state(state)
            except BaseException:
                self._owner = owner
                if before is not None:
                    self.iterable.set_state(before)
                raise
            return opened

    def _open_again(self) -> HostBatchIterator:
        if self._taken:
            if self._first_state is None:
                raise SourceError(
                    f"the batches come from a {type(self.iterable).__name__}, which can be read once and was. Expected "
                    "an iterable that starts again at each iter(). Pass an object whose __iter__ makes a new generator."
                )
            self.iterable.set_state(self._first_state)
        self._taken = True
        self._owner = HostBatchIterator(self, start(self.iterable), restartable=False)
        return self._owner

    @contextlib.contextmanager
    def _turn_of(self, user: HostBatchIterator | None) -> Iterator[None]:
        """The underlying iterator of a one-shot for one thread alone, if ``user`` is still the one to use it."""
        if not self._turn.acquire(timeout=_TURN_SECONDS):
            raise StalledError(
                f"another thread has been in next() of the {type(self.iterable).__name__} of host batches for "
                f"{_TURN_SECONDS:.0f} s; look at what it waits for.",
                waited_seconds=_TURN_SECONDS,
            )
        try:
            if user is not None and self._owner is not None and user is not self._owner:
                raise SourceError("these host batches were opened again, at another place; this reader is out of date.")
            yield
        finally:
            self._turn.release()

    def close(self) -> None:
        """Closes an iterator that was given as one and has been read."""
        if self._one_shot and self._taken:
            close_within(self.iterable)

    def fingerprint(self) -> JsonValue:
        """Only the kind: the batches are the user's own affair."""
        return {"kind": "host_batches"}


class HostBatchIterator:
    """One pass over :class:`HostBatches`.

    After the end it keeps raising StopIteration. An iterator that failed is never asked again, since most of them then
    skip or end without a word: what can be resumed is brought back to the last batch and goes on, so that the call may
    be tried again; what cannot raises the same error again.
    """

    def __init__(self, batches: HostBatches, iterator: Any, *, restartable: bool) -> None:
        self._batches = batches
        self._iterator = iterator
        self._restartable = restartable
        self._delivered = 0
        self._saved = self._take_state()
        self._failure: BaseException | None = None
        self._failed_at: TracebackType | None = None
        self._ended = False

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        if self._restartable:
            return self._next()
        with self._batches._turn_of(self):
            return self._next()

    def _next(self) -> PyTree:
        if self._ended:
            raise StopIteration
        if self._failure is not None:
            self._recover(self._failure)
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        except Exception as error:
            self._failure, self._failed_at = error, error.__traceback__
            raise
        except BaseException:
            # Ctrl-C ends a generator, which would then look like the end of the data.
            if inspect.isgenerator(self._iterator) and self._iterator.gi_frame is None:
                self._failure = SourceError(
                    f"the generator of host batches was interrupted after {self._delivered} batches and cannot go on. "
                    "Create the feed again with a new one."
                )
            raise
        self._delivered += 1
        return jax.tree_util.tree_map(own, batch)

    def next_pass(self) -> HostBatchIterator:
        """The batches from the beginning once more, for whoever has read this one to its end.

        Asking :class:`HostBatches` itself would take a one-shot away from a reader who has opened it since.

        Raises:
          SourceError: a generator, or one that was opened again elsewhere.
        """
        if self._restartable:
            return self._batches.iterator()
        with self._batches._turn_of(self):
            return self._batches.iterator()

    def get_state(self) -> JsonValue:
        """State after the last batch that was returned."""
        if self._restartable:
            return self._get_state()
        with self._batches._turn_of(self):
            return self._get_state()

    def _get_state(self) -> JsonValue:
        if self._failure is None or not _has_state(self._iterator):
            self._saved = self._take_state()
        elif self._saved["batches"] != self._delivered:  # what failed may say anything of where it is
            self._recover(self._failure)
            self._saved = self._take_state()
        return self._saved

    def set_state(self, state: JsonValue) -> None:
        """Goes on after the batch at which ``state`` was taken.

        Raises:
          StateMismatchError: a generator that can be read once; a state of another kind of iterator; or fewer batches
            than were delivered then.
        """
        if not isinstance(state, dict) or not isinstance(state.get("batches"), int) or state["batches"] < 0:
            raise StateMismatchError(_FIELD, state, {"batches": self._delivered}, "The state is damaged; use another.")
        if _has_state(self._iterator):
            self._restore(state)
        else:
            self._skip_to(state)
        self._failure, self._ended, self._saved = None, False, state

    def _take_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"batches": self._delivered}
        if _has_state(self._iterator):
            of_iterator = self._iterator.get_state()
            try:
                state["state"] = exact_json.encode_value(of_iterator)
            except TypeError as error:
                raise SourceError(
                    f"the state of the host batches cannot be saved exactly: {error}. {exact_json.ALLOWED}"
                ) from error
        return state

    def _recover(self, failure: BaseException) -> None:
        """Back to where the last batch was returned; raises ``failure`` where that cannot be."""
        wanted, saved = self._delivered, self._saved
        if not (self._restartable or _has_state(self._iterator)):
            raise failure.with_traceback(self._failed_at)  # or each call would add to it
        self.set_state(saved)
        self._drop(self._iterator, saved["batches"], wanted)
        self._delivered = wanted

    def close(self) -> None:
        """Closes the underlying iterator, if it can be closed and nobody can come to read it later.

        A one-shot iterator that goes back to a state is opened again by a reset, a restore or the next epoch, and what
        is closed does not go on: it is closed with :class:`HostBatches`.
        """
        if self._restartable or (self._batches._owner is self and not self._batches.resumable):
            close_within(self._iterator)

    def _restore(self, state: dict[str, Any]) -> None:
        if "state" not in state:
            raise StateMismatchError(
                f"{_FIELD}.state",
                "a number of batches",
                f"the state of a {type(self._iterator).__name__}",
                "Pass the kind of iterable that the state was saved with.",
            )
        iterator = start(self._batches.iterable) if self._restartable and self._delivered else self._iterator
        try:
            iterator.set_state(exact_json.decode_value(state["state"]))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise StateMismatchError(
                f"{_FIELD}.state",
                state["state"],
                f"a {type(self._iterator).__name__} that refuses it: {error}",
                "Host batches are not elastic: continue with the same number of hosts and workers, and the same data.",
            ) from error
        if iterator is not self._iterator:
            self.close()
        self._iterator, self._delivered = iterator, state["batches"]

    def _skip_to(self, state: dict[str, Any]) -> None:
        wanted = state["batches"]
        if "state" in state:
            raise StateMismatchError(
                f"{_FIELD}.state",
                "the state of an iterator",
                f"a {type(self._iterator).__name__} without set_state",
                "Pass the kind of iterable that the state was saved with.",
            )
        if not self._restartable and (wanted != self._delivered or self._failure is not None):
            raise StateMismatchError(
                f"{_FIELD}.batches",
                wanted,
                self._delivered,
                f"A {type(self._iterator).__name__} can be read once and cannot be brought to a saved state. Pass an "
                "iterable that starts again at each iter(), or an iterator with get_state and set_state.",
            )
        if self._restartable:
            iterator = start(self._batches.iterable)
            if wanted:
                _logger.info("host batches have no state: reading and dropping %d batches to resume", wanted)
            self._drop(iterator, 0, wanted)
            self.close()
            self._iterator, self._delivered = iterator, wanted

    def _drop(self, iterator: Any, start: int, stop: int) -> None:
        for position in range(start, stop):
            try:
                next(iterator)
            except StopIteration:
                raise StateMismatchError(
                    f"{_FIELD}.batches", stop, position, "The iterable ends earlier; pass the data it was saved with."
                ) from None


def _has_state(iterator: Any) -> bool:
    return callable(getattr(iterator, "get_state", None)) and callable(getattr(iterator, "set_state", None))


def _is_grain(thing: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "grain" for base in type(thing).__mro__)


def _parse_flags() -> None:
    """Grain's workers read absl flags, which only a script that is an absl app has parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def start(iterable: Any) -> Any:
    """An iterator of ``iterable``: NumPy arrays instead of tensors for tf.data, and no threads that block exit for Grain."""
    as_numpy = getattr(iterable, "as_numpy_iterator", None)
    restarted: Any = as_numpy() if callable(as_numpy) else iterable
    iterator = iter(restarted) if hasattr(restarted, "__iter__") else restarted
    if _is_grain(iterator):
        from meshfeed._src.sources.grain.threads import use_daemon_threads

        use_daemon_threads(iterator)
    return iterator
