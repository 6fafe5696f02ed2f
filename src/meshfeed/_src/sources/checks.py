"""Checks that several sources share: of record ids, and numbers that users pass."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import SupportsIndex, TypeGuard

import numpy as np

from meshfeed._src.base.errors import SettingsError, SourceError


def check_ids(record_ids: np.ndarray | Sequence[int], num_records: int, whole: str = "source") -> None:
    """Raises IndexError if an id is not in ``[0, num_records)``."""
    if not len(record_ids):
        return
    # reduce() avoids the call overhead of np.min.
    low, high = int(np.minimum.reduce(record_ids)), int(np.maximum.reduce(record_ids))
    if not 0 <= low <= high < num_records:
        raise _out_of_range(low if low < 0 else high, num_records, whole)


def checked_id(record_id: SupportsIndex, num_records: int, whole: str = "source") -> int:
    """Returns an id as an int; see :func:`check_ids`, which takes longer for one id."""
    row = operator.index(record_id)
    if not 0 <= row < num_records:
        raise _out_of_range(row, num_records, whole)
    return row


def _out_of_range(record_id: int, num_records: int, whole: str) -> IndexError:
    return IndexError(f"record id {record_id} is out of range: the {whole} has {num_records:,} records")


def as_run(ids: np.ndarray) -> slice | None:
    """``ids``, int64[n], as a slice if they are consecutive and ascending, otherwise None."""
    n = len(ids)
    if n and int(ids[-1]) - int(ids[0]) == n - 1 and bool((ids[1:] - ids[:-1] == 1).all()):
        return slice(int(ids[0]), int(ids[0]) + n)
    return None


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether ``value`` is an int of at least ``least``, of Python or numpy and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)


def checked_count(value: object, setting: str, least: int = 1) -> int:
    """Returns a number given by the user.

    Raises:
      SettingsError: it is not an int of at least ``least``.
    """
    if not is_count(value, least):
        raise SettingsError(f"{setting}={value!r}; it takes an int of at least {least}.", setting=setting)
    return int(value)


def check_choice(value: object, setting: str, *taken: str) -> None:
    """Raises SettingsError if a value given by the user is not one of those that the setting takes."""
    if value not in taken:
        raise SettingsError(f"{setting}={value!r}; it takes {' or '.join(map(repr, taken))}.", setting=setting)


def chosen_columns(columns: Sequence[str] | None, stored: Sequence[str], source: str, path: str) -> list[str]:
    """Returns the names of the columns that the user chose, or of all that are ``stored`` at ``path`` if that is None.

    Raises:
      SourceError: a name is not among them, or there is none.
    """
    chosen = list(stored) if columns is None else [columns] if isinstance(columns, str) else list(columns)
    if not chosen or any(name not in stored for name in chosen):
        raise SourceError(
            f"{source} got columns={columns!r}; {path} has {list(stored)}. Expected names of its columns, at least one."
        )
    return chosen


def check_lengths(lengths: Mapping[str, int], whose: str, remedy: str = "") -> None:
    """Checks that all leaves have the same number of records.

    Raises:
      SourceError: they do not; lists the length of each.
    """
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path} has {length:,}" for path, length in lengths.items())
        raise SourceError(
            f"{whose} differ in length: {listed}. Expected the same number of records in every leaf, since record i is row "
            f"i of all of them.{remedy}"
        )


def stopped(what: str, *, record_id: int | None = None, lane_index: int | None = None) -> SourceError:
    """Returns the error for a user's function that raised StopIteration, which every iterator takes for its own end."""
    return SourceError(
        f"{what} raised StopIteration, which does not end the data. Raise ValueError for a bad record.",
        record_id=record_id,
        lane_index=lane_index,
    )
