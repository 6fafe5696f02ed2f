"""Shuffling a stream within windows, with an exact and small state.

A window of records is read, permuted and given out, then the next one. So the state is that of the stream where the
window began and the number of records given from it: a few hundred bytes whatever the window, and a restore reads the
window again. A buffer that is refilled record by record (the usual way) would have to save its records.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshfeed._src.base.errors import StateMismatchError
from meshfeed._src.base.ownership import own_batch
from meshfeed._src.base.types import JsonValue, PyTree, Record


def shuffle_windows(lane: Any, window_records: int, key: tuple[int, ...]) -> WindowShuffle:
    """The records of a lane, shuffled within windows; with ``next_batch`` where ``lane`` has it.

    Args:
      lane: the lane to shuffle, before its first record. One without ``get_state`` is resumed by reading and dropping.
      window_records: records of a window, at least 1.
      key: integers that the permutation depends on, such as (seed, epoch, lane_index); the window's number is added.
    """
    return (StackedWindowShuffle if hasattr(lane, "next_batch") else WindowShuffle)(lane, window_records, key)


class WindowShuffle:
    """A lane whose records are shuffled within windows; see :func:`shuffle_windows`."""

    _stacked = False

    def __init__(self, lane: Any, window_records: int, key: tuple[int, ...]) -> None:
        self._lane = lane
        self._window_records = window_records
        self._key = key
        self._stateful = hasattr(lane, "get_state")
        self._window = 0  # number of the window being given out
        self._done = 0  # records given from it
        self._start: JsonValue = lane.get_state() if self._stateful else None
        self._records: Any = None  # list of records, or pytree of arrays [n, ...]
        self._order: np.ndarray = np.empty(0, np.int64)
        self._error: BaseException | None = None

    def __iter__(self) -> WindowShuffle:
        return self

    def __next__(self) -> Record:
        row = self._take(1)[0]
        return self._records[row]

    def get_state(self) -> JsonValue:
        """State after the last record given."""
        return {"window": self._window, "records": self._window_records, "done": self._done, "start": self._start}

    def set_state(self, state: JsonValue) -> None:
        """Goes on after the record at which ``state`` was taken; the window is read again at the next record.

        Raises:
          StateMismatchError: the window had another size.
        """
        if state["records"] != self._window_records:
            raise StateMismatchError(
                "shuffle_buffer",
                f"{state['records']} records a lane",
                f"{self._window_records} records a lane",
                "Pass the shuffle_buffer that the state was saved with.",
            )
        if self._stateful:
            self._lane.set_state(state["start"])
        else:
            for _ in range(state["window"] * self._window_records):
                next(self._lane)
        self._start = state["start"]
        self._window, self._done = state["window"], state["done"]
        self._records, self._order = None, np.empty(0, np.int64)

    def close(self) -> None:
        """Closes the lane below."""
        close = getattr(self._lane, "close", None)
        if close is not None:
            close()

    def _take(self, count: int) -> np.ndarray:
        """Places in the window of the next ``count`` records, fewer at the window's end."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._records is None or self._done >= len(self._order):
            try:
                self._read_window()
            except StopIteration:
                raise
            except BaseException as error:
                self._error = error  # the lane below must not be called again
                raise
        rows = self._order[self._done : self._done + count]
        self._done += len(rows)
        return rows

    def _read_window(self) -> None:
        if self._records is not None:  # the next one
            if len(self._order) < self._window_records:
                raise StopIteration  # the last window was cut short by the end
            start = self._lane.get_state() if self._stateful else None
            records, size = self._read_records()
            if not size:
                raise StopIteration
            self._start, self._window, self._done = start, self._window + 1, 0
        else:  # the first, or the one that a state was taken in
            records, size = self._read_records()
        self._records = records
        self._order = permutation(size, (*self._key, self._window))
        if self._done >= size:
            self._read_window()

    def _read_records(self) -> tuple[Any, int]:
        parts, size = [], 0
        while size < self._window_records:
            try:
                part = self._read_part(self._window_records - size)
            except StopIteration:
                break
            parts.append(part)
            size += len(jax.tree.leaves(part)[0]) if self._stacked else 1
        if not self._stacked or not parts:
            return parts, size
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), size

    def _read_part(self, num_records: int) -> Any:
        """A record, or a stacked batch, that the lane below does not write to when it reads the next."""
        method = "next_batch" if self._stacked else "__next__"
        part = self._lane.next_batch(num_records) if self._stacked else next(self._lane)
        return own_batch(part, self._lane, method)


class StackedWindowShuffle(WindowShuffle):
    """The same for a lane that gives its records stacked."""

    _stacked = True
    fresh_arrays = True  # rows gathered from the window

    def __next__(self) -> Record:
        row = self._take(1)[0]
        return jax.tree.map(lambda leaf: leaf[row], self._records)

    def next_batch(self, num_records: int) -> PyTree:
        """Up to ``num_records`` records as arrays ``[n, ...]``, n at least 1.

        Raises:
          StopIteration: at the end.
        """
        rows = self._take(num_records)
        return jax.tree.map(lambda leaf: leaf[rows], self._records)


def permutation(size: int, key: tuple[int, ...]) -> np.ndarray:
    """A permutation of ``range(size)`` that depends on nothing but ``key``.

    It sorts raw numbers of Philox, which numpy keeps the same in all its versions; that of ``Generator.permutation`` it
    does not promise.

    Args:
      size: number of elements.
      key: integers.

    Returns:
      int64[size].
    """
    entropy = [part & (2**64 - 1) for part in key]
    raw = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(size)
    return np.argsort(raw, kind="stable")
