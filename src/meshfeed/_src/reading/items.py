"""Reads or decodes records one at a time, into a stacked batch; an error names its record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.hooks import find
from meshfeed._src.base.types import Decode, PyTree, RandomAccessSource, Record, RecordIds
from meshfeed._src.reading.stacking import RecordStack

_WHILE_READING = "while reading "
NameRecord = Callable[[int], str]
"""Record id → what an error calls the record."""


def ended(doing: str, record_id: int | None) -> SourceError:
    """Returns the error for StopIteration from a source or decoder, which would otherwise end the feed's loop."""
    return SourceError(
        f"the source raised StopIteration while {doing}; a random-access source ends at len(source), so this is a bug in "
        "the source or its decoder.",
        record_id=record_id,
    )


def read_items(source: RandomAccessSource, ids: list[int], name: NameRecord) -> PyTree:
    """Reads records with ``__getitems__`` or ``__getitem__``; stacks each as it arrives, since its memory may be reused."""
    several = find(source, hooks.ItemsReader)
    records = (
        (get_item(source, record_id, name) for record_id in ids) if several is None else get_items(several, ids, name)
    )
    stack = RecordStack(len(ids))
    for record_id, record in zip(ids, records, strict=True):
        stack.add(record, record_id)
    return stack.take()[0]


def get_items(source: hooks.ItemsReader, ids: list[int], name: NameRecord) -> Sequence[Record]:
    """Returns records from ``__getitems__``, one per id; an error names the first of them."""
    if not ids:
        return []
    number = len(ids)
    try:
        records = source.__getitems__(ids)
    except SourceError:
        raise
    except Exception as error:
        first = name(ids[0])
        what = first if number == 1 else f"{number} records (first: {first})"
        if isinstance(error, StopIteration):
            raise ended(f"reading {what}", ids[0] if number == 1 else None) from error
        _note(error, what)
        raise
    if not hasattr(records, "__len__"):
        raise SourceError(f"__getitems__ returned a {type(records).__name__}; expected a list of one record per id.")
    if len(records) != number:
        raise SourceError(f"__getitems__ returned {len(records)} records for {number} ids; expected one per id.")
    return records


def get_item(source: RandomAccessSource, record_id: int, name: NameRecord) -> Record:
    """Returns a record from ``__getitem__``; an error names it."""
    try:
        return source[record_id]
    except SourceError:
        raise
    except StopIteration as error:
        raise ended(f"reading {name(record_id)}", record_id) from error
    except Exception as error:
        _note(error, name(record_id))
        raise


def _note(error: Exception, what: str) -> None:
    """Adds what was read, unless a source below has: its records are those that are stored."""
    if not any(note.startswith(_WHILE_READING) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_WHILE_READING}{what}")


def decode_each(
    decoders: Iterable[Decode],
    raw: Sequence[bytes],
    record_ids: RecordIds,
    rngs: Sequence[np.random.Generator | None] | None,
    name: NameRecord,
) -> PyTree:
    """Decodes records one by one, each with its decoder; ``rngs`` are passed as ``rng=`` to those that take one."""
    stack = RecordStack(len(raw))
    of_each = zip(raw, record_ids.tolist(), decoders, rngs or itertools.repeat(None), strict=False)  # some are endless
    for record, record_id, decode, rng in of_each:
        try:
            decoded = decode(record) if rng is None else decode(record, rng=rng)
        except SourceError:
            raise
        except StopIteration as error:
            raise ended(f"decoding {name(record_id)}", record_id) from error
        except Exception as error:
            error.add_note(f"while decoding {name(record_id)}")
            if isinstance(error, TypeError):
                error.add_note(
                    "decode= gets a single record; pass a function that takes a list of them as decode_batch="
                )
            raise
        stack.add(decoded, record_id)
    return stack.take()[0]
