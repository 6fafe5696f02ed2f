"""Batches that each host makes for itself, as MaxText's iterators do."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from meshfeed._src.base import exact_json
from meshfeed._src.base.errors import (
    SourceError,
    StalledError,
    StateMismatchError,
    hides_own_frames,
    refuse_stop_iteration,
)
from meshfeed._src.base.hooks import Resumable, find
from meshfeed._src.base.ownership import own_leaves
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.threads import close_within
from meshfeed._src.base.trees import leaves
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.sources.files.formats import reader_hint

_logger = logging.getLogger("meshfeed.sources")
_FIELD = "hosts"
_DIGESTED = 1 << 14  # values of a row
_reading: weakref.WeakValueDictionary[int, HostBatches] = (
    weakref.WeakValueDictionary()
)  # id of an iterator → its reader
_TURN_SECONDS = 300.0  # a next() that takes longer counts as stalled


@contextlib.contextmanager
def _closing_on_error(iterator: object) -> Iterator[None]:
    """Closes a new iterator if the block fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the block's error is the cause
            close_within(iterator)
        raise


@public("meshfeed.sources")
class HostBatches:
    """An iterable of host-local batches; the global batch concatenates the batches of all hosts.

    Not elastic: a state can only resume on the same number of hosts. How it resumes depends on the iterable:

    * with ``get_state`` and ``set_state`` (a Grain DataLoader or DatasetIterator): exactly;
    * if it can be restarted (a list, a torch DataLoader, a tf.data.Dataset): by reading and dropping batches, which is
      exact if each pass yields the same batches; a warning says if the last batch dropped is not the one that had been
      delivered;
    * a generator, which can be read only once: not at all.

    The arrays of a batch are copied as soon as it is read: JAX may alias their memory, and a later write would show up
    in a delivered batch. The producer may therefore reuse its arrays for the next batch. Only immutable memory is not
    copied: ``numpy.frombuffer`` over ``bytes``. Any other read-only view is copied, since its base may still be
    written.

    Args:
      iterable: an iterable or iterator of pytrees with arrays ``[host_rows, ...]`` as leaves.

    Attributes:
      iterable: the iterable passed in.
      elastic: False.

    Raises:
      SourceError: ``iterable`` is not iterable.
    """

    elastic = False

    @hides_own_frames
    def __init__(self, iterable: Iterable[PyTree] | Iterator[PyTree]) -> None:
        can_iterate = hasattr(iterable, "__iter__") or hasattr(iterable, "__next__")
        if not can_iterate or isinstance(iterable, str | bytes):
            raise SourceError(
                f"HostBatches got a {type(iterable).__name__}. Expected an iterable of batches: pytrees of arrays "
                f"[host_rows, ...].{reader_hint(iterable) or ' If it is a function that makes one, call it first.'}"
            )
        self.iterable: Any = iterable
        if is_grain(iterable):
            _parse_flags()
        self._one_shot = is_one_shot(iterable)
        # Restoring the state before the first batch rewinds a resumable iterator.
        self._first_state = (
            copy_state(self.iterable.get_state()) if self._one_shot and find(iterable, Resumable) is not None else None
        )
        self._taken = False
        # Every iterator() call on a one-shot shares the same underlying iterator: only the latest reader may use it.
        # Re-entrant, because next_pass() holds it while it calls iterator().
        self._turn = threading.RLock()
        self._owner: HostBatchIterator | None = None

    def __repr__(self) -> str:
        return f"HostBatches({type(self.iterable).__name__})"

    @property
    def restartable(self) -> bool:
        """Whether each pass gets a new iterator."""
        return not self._one_shot

    @property
    def resumable(self) -> bool:
        """Whether the batches can resume from a saved state."""
        return not self._one_shot or find(self.iterable, Resumable) is not None

    def iterator(self, state: JsonValue = None) -> HostBatchIterator:
        """An iterator from the first batch, or after the batch at which ``state`` was taken.

        If the iterable is a one-shot iterator, this invalidates the reader that an earlier call returned, unless this
        call fails.

        Raises:
          SourceError: a generator that has already been read.
          StateMismatchError: see :meth:`HostBatchIterator.set_state`.
        """
        if not self._one_shot:
            fresh = HostBatchIterator(self)
            if state is not None:
                with _closing_on_error(fresh):
                    fresh.set_state(state)
            return fresh
        with self._turn_of(None):
            owner, resumes = self._owner, self._first_state is not None
            before = copy_state(self.iterable.get_state()) if resumes and owner is not None else None
            try:
                opened = self._open_again(rewind=state is None)
                if state is not None:
                    opened.set_state(state)
            except BaseException:
                # The earlier reader stays valid: restore the iterator to where it was.
                self._owner = owner
                if before is not None:
                    self.iterable.set_state(before)
                raise
            return opened

    def first_batch(self) -> PyTree:
        """Reads the first batch, without effect on a reader.

        Raises:
          StopIteration: there is none.
          Exception: whatever the iterable raises, also for the state before the first batch.
        """
        if not self._one_shot:
            fresh = self.iterator()
            try:
                return next(fresh)
            finally:
                fresh.close()
        with self._turn_of(None):
            before = copy_state(self.iterable.get_state())
            try:
                self.iterable.set_state(copy_state(self._first_state))
                return next(self.iterable)
            finally:
                self.iterable.set_state(before)

    def _open_again(self, *, rewind: bool) -> HostBatchIterator:
        if self._taken:
            if self._first_state is None:
                raise SourceError(
                    f"the batches come from a {type(self.iterable).__name__}, which can be read only once and has been read. "
                    "Expected an iterable that starts again at each iter(). Pass an object whose __iter__ makes a new "
                    "generator."
                )
            if rewind:
                self.iterable.set_state(copy_state(self._first_state))
        other = _reading.get(id(self.iterable), self)
        if other is not self:
            _logger.warning(
                "two feeds that are open read the same %s of host batches, so each batch goes to one of them only. Close the "
                "other feed first, or pass each feed an iterator of its own.",
                type(self.iterable).__name__,
            )
        _reading[id(self.iterable)] = self
        self._taken = True
        self._owner = HostBatchIterator(self)
        return self._owner

    @contextlib.contextmanager
    def _turn_of(self, user: HostBatchIterator | None) -> Iterator[None]:
        """Holds the lock on a one-shot's underlying iterator; others need none.

        Raises:
          SourceError: ``user`` is not None and a later reader has replaced it.
          StalledError: another thread has held the lock for 300 s.
        """
        if not self._one_shot:
            yield
            return
        if not self._turn.acquire(timeout=_TURN_SECONDS):
            raise StalledError(
                f"another thread has been in next() of the {type(self.iterable).__name__} of host batches for "
                f"{_TURN_SECONDS:.0f} s; check what it waits for.",
                waited_seconds=_TURN_SECONDS,
            )
        try:
            if user is not None and self._owner is not None and user is not self._owner:
                raise SourceError(
                    "these host batches were opened again elsewhere, so this reader can no longer be used."
                )
            yield
        finally:
            self._turn.release()

    def close(self) -> None:
        """Closes the iterable if it is a one-shot iterator that has been read."""
        if self._one_shot and self._taken:
            close_within(self.iterable)
            if _reading.get(id(self.iterable)) is self:
                del _reading[id(self.iterable)]

    def fingerprint(self) -> JsonValue:
        """Identity: only the kind, since the content of the batches is up to the user."""
        return {"kind": "host_batches"}


class HostBatchIterator:
    """One pass over :class:`HostBatches`.

    After the end it keeps raising StopIteration. After an error it does not simply call the underlying iterator again,
    since most iterators then skip a batch or end silently. A resumable iterator is restored to the last delivered
    batch, so the call can be retried; any other raises the same error again.
    """

    def __init__(self, batches: HostBatches) -> None:
        self._batches, self._restartable = batches, batches.restartable
        self._iterator: Any = start(batches.iterable)
        self._delivered = 0
        self._last: str | None = None  # digest of the last batch delivered, if only reading again can resume
        self._saved = self._take_state()
        self._failure: BaseException | None = None
        self._failed_at: TracebackType | None = None
        self._ended = False
        self._asked = False  # for a batch: before, the iterator is still at its beginning

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
        self._asked = True
        if self._failure is not None:
            called = f"in __iter__ or set_state, called to retry after {self._failure!r}"
            with refuse_stop_iteration("the iterable of host batches", called):
                self._recover(self._failure)
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._ended = True
            self._warn_if_short()
            raise
        except Exception as error:
            self._failure, self._failed_at = error, error.__traceback__
            raise
        except BaseException:
            # Ctrl-C finishes a generator; the next call would then look like the end of the data.
            if inspect.isgenerator(self._iterator) and self._iterator.gi_frame is None:
                self._failure = SourceError(
                    f"the generator of host batches was interrupted after {self._delivered} batches and cannot continue. "
                    "Create the feed again with a new one."
                )
            raise
        self._delivered += 1
        batch = own_leaves(batch)
        if self._restartable and not self._resumable:
            self._last = _digest_ends(batch)
        return batch

    def _warn_if_short(self) -> None:
        """Warns if a loader ended before its ``len()``.

        A StopIteration that a torch dataset or collate function raises passes through the DataLoader, where only the
        length can tell it from the end.
        """
        try:
            expected = len(self._batches.iterable) if self._restartable else 0
        except Exception:  # such as of a torch dataset without a length: the end stays an end
            return
        if self._delivered < expected:
            _logger.warning(
                "the %s of host batches ended after %d batches, and its len() is %d; if that counts batches, not records, "
                "a StopIteration raised by its dataset or functions ended it early",
                *(type(self._batches.iterable).__name__, self._delivered, expected),
            )

    def next_pass(self) -> HostBatchIterator:
        """A new pass from the first batch, for a reader that has reached the end of this one.

        Calling :meth:`HostBatches.iterator` instead would invalidate a reader that has opened a one-shot since.

        Raises:
          SourceError: a generator, or a one-shot that has been opened again elsewhere.
        """
        with self._batches._turn_of(self):
            return self._batches.iterator()

    def get_state(self) -> JsonValue:
        """State after the last batch returned."""
        with self._batches._turn_of(self):
            if self._failure is None or not self._resumable:
                self._saved = self._take_state()
            elif self._saved["batches"] != self._delivered:  # a failed iterator's own state is unreliable
                self._recover(self._failure)
                self._saved = self._take_state()
            return self._saved

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the batch at which ``state`` was taken.

        Raises:
          StateMismatchError: a generator, which can be read only once; the state is of a different kind of iterator; or
            the iterable now has fewer batches than had been delivered.
        """
        if not isinstance(state, dict) or not isinstance(state.get("batches"), int) or state["batches"] < 0:
            raise StateMismatchError(_FIELD, state, {"batches": self._delivered}, "The state is damaged; use another.")
        kind, resumable = type(self._iterator).__name__, self._resumable
        if ("state" in state) is not resumable:
            raise StateMismatchError(
                f"{_FIELD}.state",
                "a number of batches" if resumable else "the state of an iterator",
                f"the state of a {kind}" if resumable else f"a {kind} without set_state",
                "Pass the kind of iterable that the state was saved with.",
            )
        if resumable:
            self._restore(state)
        else:
            self._skip_to(state["batches"], state.get("last"))
        self._failure, self._ended, self._saved = None, False, state

    @property
    def _resumable(self) -> bool:
        return find(self._iterator, Resumable) is not None

    def _take_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"batches": self._delivered}
        if self._resumable:
            of_iterator = self._iterator.get_state()
            try:
                state["state"] = exact_json.encode_value(of_iterator)
            except TypeError as error:
                raise SourceError(
                    f"the state of the host batches cannot be saved exactly: {error}. {exact_json.ALLOWED}"
                ) from error
        elif self._last is not None:
            state["last"] = self._last
        return state

    def _recover(self, failure: BaseException) -> None:
        """Restores the iterator to just after the last batch returned, or raises ``failure`` if it cannot."""
        wanted, saved, last = self._delivered, self._saved, self._last
        if not (self._restartable or self._resumable):
            raise failure.with_traceback(self._failed_at)  # otherwise each call would lengthen the traceback
        self.set_state(saved)
        self._drop(self._iterator, saved["batches"], wanted, last)
        self._delivered, self._last = wanted, last

    def close(self) -> None:
        """Closes the underlying iterator, if it has a ``close`` and cannot be read again.

        A reset, a restore or the next epoch reopens a resumable one-shot, which must stay open until then:
        :meth:`HostBatches.close` closes it.
        """
        # Only the latest reader of a one-shot may close it: the others share its iterator.
        if self._restartable or (self._batches._owner is self and not self._batches.resumable):
            close_within(self._iterator)

    def _restore(self, state: dict[str, Any]) -> None:
        # On a new iterator if possible: the current one stays usable if the state is rejected.
        iterator: Any = start(self._batches.iterable) if self._restartable and self._delivered else self._iterator
        saved = state["state"]
        with contextlib.nullcontext() if iterator is self._iterator else _closing_on_error(iterator):
            try:
                saved = exact_json.decode_value(saved)
                iterator.set_state(saved)
            except StateMismatchError:
                raise
            except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                raise StateMismatchError(
                    f"{_FIELD}.state",
                    saved,
                    f"a {type(self._iterator).__name__} that refuses it: {error}",
                    "Host batches are not elastic: continue with the same number of hosts and workers, and the same data.",
                ) from error
        if iterator is not self._iterator:
            self.close()
        self._iterator, self._delivered = iterator, state["batches"]

    def _skip_to(self, wanted: int, last: str | None) -> None:
        if not self._restartable and (wanted != self._delivered or self._failure is not None):
            raise StateMismatchError(
                f"{_FIELD}.batches",
                wanted,
                self._delivered,
                f"A {type(self._iterator).__name__} can be read once and cannot be brought to a saved state. Pass an "
                "iterable that starts again at each iter(), or an iterator with get_state and set_state.",
            )
        if self._restartable:
            # Not a second pass: that of tf.data with a seeded shuffle, or of torch with a generator, has another order.
            fresh = not self._asked
            iterator = self._iterator if fresh else start(self._batches.iterable)
            if wanted:
                _logger.info("host batches have no state: reading and dropping %d batches to resume", wanted)
            self._asked = self._asked or bool(wanted)
            self._drop(iterator, 0, wanted, last)
            if not fresh:
                self.close()
            self._iterator, self._delivered, self._last = iterator, wanted, last

    def _drop(self, iterator: Iterator[PyTree], start: int, stop: int, last: str | None) -> None:
        """Reads and drops batches; warns if the last of them has another digest than ``last``."""
        batch: PyTree = None
        with Dropping("the host batches", stop - start, "batches") as dropping:
            for position in range(start, stop):
                try:
                    batch = next(iterator)
                except StopIteration:
                    raise StateMismatchError(
                        f"{_FIELD}.batches",
                        stop,
                        position,
                        "The iterable ends earlier; pass the data it was saved with.",
                    ) from None
                dropping.add()
        if stop > start and last is not None and (digest := _digest_ends(batch)) is not None and digest != last:
            _logger.warning(
                "host batches: batch %d of a pass, read again to continue after it, is not the one that was delivered. Two "
                "passes through this %s differ (it shuffles without a fixed seed, or draws random numbers), so records may "
                "be left out or repeated. Give it an order that is the same in each pass, or pass an iterable with "
                "get_state and set_state.",
                *(stop - 1, type(self._batches.iterable).__name__),
            )


def _digest_ends(batch: PyTree) -> str | None:
    """Returns the xxh3-64 of the first and the last row of each leaf, which takes microseconds; None if one is no array."""
    hasher = xxhash.xxh3_64()
    for leaf in leaves(batch):
        try:
            array = np.asarray(leaf)
        except Exception:  # a PRNG key, which the check of the batch rejects
            return None
        if array.dtype.hasobject:
            return None
        hasher.update(f"{array.dtype}{array.shape}".encode())
        for row in (array[:1], array[-1:]) if array.ndim else (array,):
            hasher.update(row.reshape(-1)[:_DIGESTED].tobytes())
    return hasher.hexdigest()


def copy_state(state: Any) -> Any:
    """Returns a copy of an iterator's state, which the iterator may go on to change; what cannot be copied as it is."""
    try:
        return copy.deepcopy(state)
    except Exception:
        return state


def is_one_shot(iterable: Any) -> bool:
    """Whether ``iterable`` is an iterator: each ``iter()`` gives the same one, such as of Grain's ElasticIterator."""
    if not hasattr(iterable, "__next__"):
        return False
    return not hasattr(iterable, "__iter__") or iter(iterable) is iter(iterable)


def is_grain(thing: object) -> bool:
    """Whether the class of ``thing`` is Grain's, or derived from one."""
    return any(base.__module__.partition(".")[0] == "grain" for base in type(thing).__mro__)


def _parse_flags() -> None:
    """Marks absl flags as parsed: Grain's workers read them, and only an absl app has parsed them."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def start(iterable: Iterable[PyTree] | Iterator[PyTree]) -> Iterator[PyTree]:
    """An iterator over ``iterable`` that yields NumPy arrays for tf.data and uses daemon threads for Grain."""
    as_numpy = getattr(iterable, "as_numpy_iterator", None)
    restarted: Any = as_numpy() if callable(as_numpy) else iterable
    iterator = iter(restarted) if hasattr(restarted, "__iter__") else restarted
    if is_grain(iterator):
        from meshfeed._src.sources.grain.internals import use_daemon_threads

        use_daemon_threads(iterator)
    return iterator
