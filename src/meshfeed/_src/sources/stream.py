"""Streams opened by a user's function: one iterator of records per lane."""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.hooks import find
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.types import JsonValue, LaneIterator, Record, public
from meshfeed._src.sources.files.formats import reader_hint


@public("meshfeed.sources")
class Stream:
    """Sequential records, split into lanes by the user's own function.

    ::

        def open(lane_index, num_lanes):
            for path in paths[lane_index::num_lanes]:
                yield from read(path)

        source = meshfeed.sources.Stream(open)

    Args:
      open: ``open(lane_index, num_lanes)`` returns an iterator or iterable over the records of one lane, from the
        beginning. It must return the same records on every host, and the lanes together must hold each record once.
        It is called again for each epoch, with ``epoch=`` if it has that parameter. Iterators with ``get_state()`` and
        ``set_state(state)`` resume by these, others by reading and dropping the records already delivered.
      fingerprint: JSON value that identifies the data, such as the file names. A state can resume only if it is equal.

    Raises:
      SourceError: ``open`` is not callable, or not as ``open(lane_index, num_lanes)``.
      SettingsError: ``fingerprint`` is not JSON.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Stream
      >>> def lines(lane_index, num_lanes):
      ...     for n in range(lane_index, 100, num_lanes):
      ...         yield {"x": np.int32(n)}
      >>> source = Stream(lines)
    """

    @hides_own_frames
    def __init__(self, open: Callable[..., Any], *, fingerprint: JsonValue = None) -> None:
        if not callable(open):
            raise SourceError(
                f"Stream got a {type(open).__name__}. Expected a function open(lane_index, num_lanes) that returns an "
                "iterator of records. For one iterable of records: Stream(lambda lane_index, num_lanes: "
                "itertools.islice(make_records(), lane_index, None, num_lanes)); for batches: HostBatches(iterable)."
                f"{reader_hint(open)}"
            )
        self._open, self._fingerprint = open, fingerprint
        self._takes_epoch = hooks.accepts_keyword(open, "epoch", in_kwargs=True)
        check_lane_function(open, ["epoch"] if self._takes_epoch else [], fingerprint, "Stream")
        self._given: weakref.WeakSet[Any] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"Stream({getattr(self._open, '__qualname__', type(self._open).__name__)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_given": weakref.WeakSet()}  # iterators that are open belong to this process

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0) -> StreamLane:
        """The records of lane ``lane_index`` of ``num_lanes``, from the beginning.

        Raises:
          SourceError: the user's function returned an object that is not iterable, or an iterator that it had already
            returned.
        """
        records = self._open(lane_index, num_lanes, **({"epoch": epoch} if self._takes_epoch else {}))
        try:
            iterator = iter(records)
        except TypeError:
            raise SourceError(
                f"open({lane_index}, {num_lanes}) returned a {type(records).__name__}. Expected an iterator or an "
                "iterable of records. Return or yield them.",
                lane_index=lane_index,
            ) from None
        if iterator is records:  # any other iterable makes a new iterator on each call
            self._refuse_shared(iterator, lane_index, num_lanes)
        return StreamLane(iterator)

    def fingerprint(self) -> JsonValue:
        """Identity: the kind, and the user's ``fingerprint`` if given."""
        return {"kind": "stream"} if self._fingerprint is None else {"kind": "stream", "given": self._fingerprint}

    def _refuse_shared(self, iterator: Iterator[Any], lane_index: int, num_lanes: int) -> None:
        # Lanes that share an iterator would take each other's records, depending on which host reads which lane.
        try:
            shared = iterator in self._given
            self._given.add(iterator)
        except TypeError:  # not hashable or weakly referenceable, so it cannot be tracked
            return
        if shared:
            raise SourceError(
                f"open({lane_index}, {num_lanes}) returned an iterator that it had returned before. Expected a new one "
                "at each call, since every lane is read on its own. Create the iterator inside open.",
                lane_index=lane_index,
            )


class StreamLane:
    """The records of an iterator, and its state if it has one; hides everything else that the iterator may offer.

    Args:
      iterator: the iterator.
      read: returns the next record; None for the iterator's own method.
      stateful: whether to offer its state.
    """

    def __init__(
        self, iterator: Iterator[Record], read: Callable[[], Record] | None = None, *, stateful: bool = True
    ) -> None:
        self._iterator, self._read = iterator, read or iterator.__next__
        resumable = find(iterator, hooks.Resumable) if stateful else None
        if resumable is not None:
            self.get_state, self.set_state = resumable.get_state, resumable.set_state

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        return self._read()

    def close(self) -> None:
        """Closes the iterator, if it has a ``close``."""
        hooks.close(self._iterator)


def check_lane_function(
    open_lane: Callable[..., object], passed: Sequence[str], fingerprint: object, whose: str
) -> None:
    """Checks a function that opens lanes, to which the keywords ``passed`` are passed, and the user's ``fingerprint``.

    Raises:
      SourceError: the function cannot be called as ``open(lane_index, num_lanes)``.
      SettingsError: ``fingerprint`` is not JSON.
    """
    try:
        inspect.signature(open_lane).bind(0, 1, **dict.fromkeys(passed, 0))
    except ValueError:  # some C callables have no signature
        pass
    except TypeError as error:
        raise SourceError(
            f"{whose} got {getattr(open_lane, '__qualname__', open_lane)}{inspect.signature(open_lane)}, which cannot be "
            f"called as open(lane_index, num_lanes): {error}. Give it these two parameters, and epoch= if it wants the "
            "epoch."
        ) from None
    try:
        json.dumps(fingerprint)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"fingerprint of {whose} is a {type(fingerprint).__name__} that is not JSON ({error}). Expected None, numbers, "
            "strings, and lists and string-keyed dicts of them.",
            setting="fingerprint",
        ) from None


def drop(lane: LaneIterator, count: int, what: str) -> None:
    """Reads and drops ``count`` records of ``what``, a lane without a state, to resume it.

    Raises:
      SourceError: the lane has fewer records.
    """
    with Dropping(what, count) as dropping:
        for done in range(count):
            try:
                next(lane)
            except StopIteration:
                raise ended_early(what, count - done) from None
            dropping.add()


def ended_early(what: str, missing: int) -> SourceError:
    """Returns the error for a lane that ended ``missing`` records before the record to resume at."""
    return SourceError(
        f"{what} ended {missing} records before the record to resume at; the data has become shorter. Pass the data that "
        "the state was saved with."
    )
