"""Records of unequal length: which sources have them, their lengths, reading them, and errors that name one of them."""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import xxhash

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.ownership import own_record, returns_fresh
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.types import RandomAccessSource, Record, Rngs
from meshfeed._src.reading.items import get_item, get_items
from meshfeed._src.reading.records import SourceReader, checked_lengths, describe_record, wants_rng
from meshfeed._src.reading.stacking import check_unmasked
from meshfeed._src.reading.structure import RAGGED
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.lists import listed
from meshfeed._src.sources.recognize import as_source

_log = logging.getLogger("meshfeed.sources.documents")
T = TypeVar("T")
_MAPPED_BYTES = 64 << 20  # larger arrays are in a temporary file, which the system may drop from memory
_RECORDS_PER_READ = 4096
_MOST_RECORDS = 1 << 40
_RECORDS_PER_DIGEST = 1 << 20


def documents_of(source: object, name: str, of_stream: str) -> RandomAccessSource:
    """Returns a random-access source whose records have fixed lengths, from what the user passed to the source ``name``.

    Raises:
      SourceError: the source is a stream (do ``of_stream`` instead), has no records, or groups them itself.
      SettingsError: the records depend on random numbers, or it is a mixture whose weights change at steps.
    """
    documents = hooks.unconverted(as_source(source))
    if isinstance(documents, HostBatches) or not hasattr(documents, "__getitem__"):
        raise SourceError(
            f"{name} got a {type(documents).__name__}, which is read in order. Expected random-access records. {of_stream}"
        )
    documents = hooks.unconverted(listed(documents, name))
    if wants_rng(documents):
        raise SettingsError(
            f"{name} got records whose function takes rng=, so their lengths may differ between epochs. Expected fixed "
            f"records. Apply the function afterwards: Map({name}(…), function).",
            setting="source",
        )
    if not len(documents):
        raise SourceError(f"{name} got a {type(documents).__name__} with 0 records.")
    if len(documents) > _MOST_RECORDS:  # as of an endless repeat()
        raise SourceError(
            f"{name} got a {type(documents).__name__} with {len(documents):,} records, and measures each of them. Pass those "
            "of one epoch, and num_epochs= to the feed."
        )
    return cast("RandomAccessSource", documents)


def lengths_of(source: RandomAccessSource, measure: Callable[[Record], int], key: str | None = None) -> np.ndarray:
    """Returns the length of every record, which is that of the leaf ``key``; see :func:`lengths_of_leaves`."""
    return lengths_of_leaves(source, lambda record: (measure(record),), key)[0]


def lengths_of_leaves(
    source: RandomAccessSource,
    measure: Callable[[Record], Sequence[int]],
    key: str | None = None,
    others: Sequence[str] = (),
) -> list[np.ndarray]:
    """Returns the lengths of several leaves of every record; reads the records once if some are not known.

    Args:
      source: a random-access source.
      measure: returns the lengths of the leaves ``key`` and ``others`` of a record.
      key: the leaf whose length is that of the record.
      others: other leaves.

    Returns:
      For each leaf, unsigned or signed integers [records]; memory-mapped if there are many.

    Raises:
      SourceError: ``measure`` raised it or a ValueError; names the record.
    """
    stored = hooks.find(source, hooks.StoredLengths)
    found = [hooks.known_lengths(source, key), *(stored.stored_lengths(name) if stored else None for name in others)]
    all_lengths = [None if values is None else checked_lengths(source, values) for values in found]
    missing = [leaf for leaf, lengths in enumerate(all_lengths) if lengths is None]
    number = len(source)
    measured = {leaf: empty(number, np.uint32) for leaf in missing}
    if missing:
        _log.info("reading %d records once for their lengths", number)
        doing = "a source of records of unequal length: read for their lengths"
        for record_id, lengths in enumerate(of_each(source, measure, doing, _RECORDS_PER_READ)):
            for leaf, values in measured.items():
                values[record_id] = lengths[leaf]
    return [measured[leaf] if lengths is None else lengths for leaf, lengths in enumerate(all_lengths)]


def empty(number: int, dtype: np.dtype[Any] | type[np.unsignedinteger[Any]]) -> np.ndarray:
    """Returns an uninitialized array [number]; a large one in a temporary file."""
    if number * np.dtype(dtype).itemsize <= _MAPPED_BYTES:
        return np.empty(number, dtype)
    return np.memmap(tempfile.TemporaryFile(), dtype, "w+", shape=(number,))  # the map holds the file


def digest_of_lengths(lengths: np.ndarray) -> str:
    """Returns the xxh3-64 of lengths; the same for every dtype."""
    digest = xxhash.xxh3_64()
    for first in range(0, len(lengths), _RECORDS_PER_DIGEST):
        digest.update(lengths[first : first + _RECORDS_PER_DIGEST].astype("<i8").tobytes())
    return digest.hexdigest()


def read_items(source: RandomAccessSource, ids: np.ndarray) -> Sequence[Record]:
    """Reads records, which may differ in shape, into memory that the source does not reuse; an error names the record."""
    reader, name = hooks.find(source, hooks.ItemsReader), functools.partial(describe_record, source)
    if reader is None:
        return [own_record(get_item(source, record_id, name)) for record_id in ids.tolist()]
    records = get_items(reader, ids.tolist(), name)
    return records if returns_fresh(source, "__getitems__") else [own_record(record) for record in records]


def read_drawn(
    source: RandomAccessSource, ids: np.ndarray, rngs: Rngs, reader: SourceReader | None = None
) -> Sequence[Record]:
    """As :func:`read_items`, but with random numbers, and in memory that only the caller can write.

    ``reader`` is that of the source, if there is one. What a source itself stacks has one shape.
    """
    if not wants_rng(source):
        return [own_record(record) for record in read_items(source, ids)]
    if (drawn := hooks.find(source, hooks.DrawnItemsReader)) is not None:
        return drawn.read_drawn(ids, rngs)
    reader = reader or SourceReader(source)
    if hooks.find(source, hooks.RawReader) is None or reader.decodes_batches:
        batch = reader.read(ids, rngs)
        return [trees.map_leaves(lambda leaf, row=row: leaf[row], batch) for row in range(len(ids))]
    raw, ones = reader.read_undecoded(ids, as_rows=False), [slice(row, row + 1) for row in range(len(ids))]
    decoded = (reader.decode(raw[one], ids[one], rngs[one]) for one in ones)
    return [trees.map_leaves(lambda leaf: leaf[0], record) for record in decoded]


def leaves_by_name(record: object, key: str) -> Mapping[str, object]:
    """Returns the leaves of a record; a bare array or list of numbers is the leaf ``key``.

    Raises:
      SourceError: the record is a tuple of arrays, which are several leaves, without names.
    """
    if isinstance(record, Mapping):
        return record
    if isinstance(record, tuple) and any(getattr(leaf, "ndim", 0) or isinstance(leaf, list) for leaf in record):
        raise SourceError(
            f"it is a {type(record).__name__} of {len(record)} leaves. Expected a dict, or the leaf {key!r} alone. Make a "
            "dict of it with Map."
        )
    return {key: record}


def as_array(leaf: object, what: str) -> np.ndarray:
    """Returns a leaf as an array.

    Raises:
      SourceError: it holds lists of unequal lengths, or masked values; ``what`` names it.
    """
    check_unmasked(leaf, what)
    try:
        return np.asarray(leaf)
    except ValueError as error:
        raise SourceError(f"{RAGGED}{what} cannot be an array: {error}") from error


class RowError(Exception):
    """The record ``row`` of those that a function got at once is wrong."""

    def __init__(self, row: int, reason: Exception) -> None:
        super().__init__(row, reason)
        self.row, self.reason = row, reason


def of_each(
    source: RandomAccessSource, function: Callable[[Record], T], doing: str, records_per_read: int
) -> Iterator[T]:
    """Yields ``function(record)`` of every record, in order, read once; shows the progress, and retries failed reads.

    Args:
      source: a random-access source.
      function: may raise a SourceError or a ValueError, to which the record is added.
      doing: for the progress.
      records_per_read: how many are read at once.

    Raises:
      SourceError: ``function`` raised it or a ValueError; names the record.
    """
    number = len(source)
    with Dropping(doing, number, "records") as progress:
        for first in range(0, number, records_per_read):
            ids = np.arange(first, min(first + records_per_read, number))
            # There is no feed yet whose retry= would apply, and the pass may take hours.
            records = call_with_retry(
                functools.partial(read_items, source, ids), Retry(), doing=f"reading {len(ids):,} records, {doing}"
            )
            for record_id, record in zip(ids.tolist(), records, strict=True):
                try:
                    found = function(record)
                except (SourceError, ValueError) as error:
                    raise in_record(source, record_id, error) from error
                yield found
            progress.add(len(ids))


def in_record(source: object, record_id: int, reason: Exception) -> SourceError:
    """Returns an error that names a record, and its file if that is known."""
    return SourceError(f"{describe_record(source, record_id)}: {reason}", record_id=record_id)
