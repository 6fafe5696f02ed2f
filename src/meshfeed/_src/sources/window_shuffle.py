"""Shuffling a stream within windows, with an exact and small state.

A window of records is read, permuted and delivered, then the next one. The state is the stream's state at the start of
the window and the number of records delivered from it: a few hundred bytes for any window size. A restore reads the
window again. The usual buffer, refilled record by record, would have to save its records.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import SourceError, StateMismatchError, refuse_stop_iteration
from meshfeed._src.base.hooks import find
from meshfeed._src.base.ownership import own_batch, own_record, returns_fresh
from meshfeed._src.base.types import JsonValue, PyTree, Record
from meshfeed._src.reading.host_batch import join_batches, num_rows
from meshfeed._src.sources.host_batches import copy_state
from meshfeed._src.sources.stream import drop, ended_early


def shuffle_windows(lane: object, window_records: int, key: tuple[int, ...]) -> WindowShuffle:
    """Returns the records of a lane, shuffled within windows; has ``next_batch`` if ``lane`` has it.

    Args:
      lane: the lane to shuffle, before its first record. A lane without ``get_state`` resumes by reading and dropping.
      window_records: records per window, at least 1.
      key: integers that determine the permutation, such as (seed, epoch, lane_index); the window's number is appended.
    """
    kind = WindowShuffle if find(lane, hooks.StackedLane) is None else StackedWindowShuffle
    return kind(lane, window_records, key)


def window_of(size: int, num_lanes: int) -> int:
    """Returns the records per window and lane of a buffer of ``size`` records; a window of 1 would not shuffle."""
    return max(min(2, size), size // num_lanes)


class WindowShuffle:
    """A lane whose records are shuffled within windows; see :func:`shuffle_windows`."""

    _stacked = False

    def __init__(self, lane: Any, window_records: int, key: tuple[int, ...]) -> None:
        self._lane, self._window_records, self._key = lane, window_records, key
        self._stateful = find(lane, hooks.Resumable) is not None
        self._window = self._done = 0  # number of the window being delivered, and records delivered from it
        self._start: JsonValue = self._lane_state()
        self._records: Any = None  # list of records, or pytree of arrays [n, ...]
        self._order: np.ndarray = np.empty(0, np.int64)
        self._error: BaseException | None = None

    def __iter__(self) -> WindowShuffle:
        return self

    def __next__(self) -> Record:
        row = self._take(1)[0]  # which may replace the records
        return self._records[row]

    @property
    def reads_again(self) -> bool:
        """See :class:`meshfeed._src.base.hooks.ReadsAgain`."""
        return hooks.reads_again(self._lane)

    def get_state(self) -> JsonValue:
        """State after the last record returned."""
        return {"window": self._window, "records": self._window_records, "done": self._done, "start": self._start}

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken; the next record reads the window again.

        Raises:
          StateMismatchError: the state was saved with a different window size.
          SourceError: the lane has no ``get_state`` and has been read.
        """
        if state["records"] != self._window_records:
            raise StateMismatchError(
                "shuffle_buffer",
                f"{state['records']} records per lane",
                f"{self._window_records} records per lane",
                "Pass the shuffle_buffer that the state was saved with.",
            )
        if self._stateful:
            self._lane.set_state(copy_state(state["start"]))  # which the lane may keep, and change
        elif self._records is not None or self._error is not None:
            raise SourceError(
                f"a shuffled {type(self._lane).__name__} has no state, so it cannot return to a record after it was "
                "read. Restore the state before the first record."
            )
        else:
            drop(self._lane, state["window"] * self._window_records, "a shuffled lane")
        self._start, self._window, self._done = state["start"], state["window"], state["done"]
        self._records, self._order, self._error = None, np.empty(0, np.int64), None

    def close(self) -> None:
        """Closes the underlying lane."""
        hooks.close(self._lane)

    def _take(self, count: int) -> np.ndarray:
        """Rows in the window of the next ``count`` records; fewer at the end of the window."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._records is None or self._done >= len(self._order):
            try:
                self._read_window()
            except StopIteration:
                raise
            except BaseException as error:
                self._error = error  # a lane that has failed must not be called again
                raise
        rows = self._order[self._done : self._done + count]
        self._done += len(rows)
        return rows

    def _read_window(self) -> None:
        if self._records is not None:  # the next window
            if len(self._order) < self._window_records:
                raise StopIteration  # a short window was the last one
            # Taken before reading, since a restore reads this window again.
            start = self._lane_state()
            records, size = self._read_records()
            if not size:
                raise StopIteration
            self._start, self._window, self._done = start, self._window + 1, 0
        else:  # the first window, or the one in which the restored state was taken
            records, size = self._read_records()
            if self._done > size:
                raise ended_early("a shuffled lane", self._done - size)
        self._records = records
        self._order = permutation(size, (*self._key, self._window))
        if self._done >= size:
            self._read_window()

    def _lane_state(self) -> JsonValue:
        with refuse_stop_iteration(f"get_state of a {type(self._lane).__name__}, which is shuffled,"):
            return copy_state(self._lane.get_state()) if self._stateful else None

    def _read_records(self) -> tuple[Any, int]:
        parts: list[Any] = []
        size = 0
        while size < self._window_records:
            try:
                parts.append(self._read_part(self._window_records - size))
            except StopIteration:
                break
            size += num_rows(parts[-1]) if self._stacked else 1
        if not self._stacked or not parts:
            return parts, size
        return join_batches(parts, what=lambda _: "a shuffled lane"), size

    def _read_part(self, num_records: int) -> Any:
        """A record or a stacked batch, in memory that the underlying lane does not reuse for the next one."""
        if self._stacked:
            return own_batch(self._lane.next_batch(num_records), self._lane, "next_batch")
        record = next(self._lane)
        return record if returns_fresh(self._lane, "__next__") else own_record(record)


class StackedWindowShuffle(WindowShuffle):
    """A :class:`WindowShuffle` over a lane that returns stacked batches."""

    _stacked = True
    fresh_arrays = True  # indexing by an array of rows copies them from the window

    def __next__(self) -> Record:
        row = self._take(1)[0]
        return trees.map_leaves(lambda leaf: leaf[row], self._records)

    def next_batch(self, num_records: int) -> PyTree:
        """Up to ``num_records`` records as arrays ``[n, ...]``, n at least 1.

        Raises:
          StopIteration: the lane has ended.
        """
        rows = self._take(num_records)
        return trees.map_leaves(lambda leaf: leaf[rows], self._records)


def permutation(size: int, key: tuple[int, ...]) -> np.ndarray:
    """Returns a permutation of ``range(size)``, int64[size], that depends only on the integers ``key``.

    Sorts raw Philox numbers, a stream that NumPy keeps stable across versions; ``Generator.permutation`` has no such
    guarantee.
    """
    # SeedSequence rejects negative integers.
    entropy = [part & (2**64 - 1) for part in key]
    raw = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(size)
    return np.argsort(raw, kind="stable")  # the order of equal numbers must not depend on the algorithm
