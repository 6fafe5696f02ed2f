"""Records of unequal length in batches of few lengths."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import SupportsIndex, Unpack

import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.tracebacks import hides_own_frames
from meshfeed._src.base.types import JsonValue, PyTree, RecordIds, public
from meshfeed._src.order import epochs as epoch_order
from meshfeed._src.order.buckets import BucketOrder
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.records import file_of
from meshfeed._src.sources.checks import checked_count
from meshfeed._src.sources.documents import digest_of_lengths, documents_of, empty, lengths_of, read_items
from meshfeed._src.sources.padded import Pad

_RECORDS_PER_PASS = 1 << 20


@public("meshfeed.sources")
class Buckets:
    """Groups records by length: each global batch has records of one bucket, padded to its boundary.

    A record is a dict; it is padded as by :func:`Padded`, to the smallest of ``boundaries`` that holds it. Batches have
    one of ``len(boundaries)`` shapes, so a jitted step compiles once per shape, and all have the same number of rows.

    The bucket and the records of a batch are a function of the lengths, the feed's seed and batch size, and the step:
    the stream is exact on any number of hosts, and its state is one position. ``shuffle=True`` permutes the batches of
    an epoch, and the records within each bucket. Every record comes once per epoch. Records that do not fill a batch of
    their bucket wait for those of the next epoch; at the end of the stream, they share batches that are padded to the
    longest of their buckets.

    The global batch size cannot change during a stream, because it determines which records come together.

    Args:
      source: random-access records, or any object that the feed accepts as such. Sources with ``lengths()`` know the
        lengths; all others are read once when the source is created.
      boundaries: lengths to which records are padded, ascending, such as ``(128, 512, 2048)``.
      key: the leaf to pad, or several of one length per record; the lengths are those of the first.
      mask_key: name of the mask, bool ``[boundary]``, or None for no mask.
      pad_value: value of the entries that are added to the first leaf of ``key``; those of the others are 0.
      long: what becomes of records longer than the last boundary: ``"raise"`` raises an error, ``"truncate"`` keeps their
        first entries, ``"drop"`` leaves them out.

    Attributes:
      boundaries: the lengths to which records are padded.

    Raises:
      SettingsError: a setting is out of range, or ``source`` has lengths that depend on random numbers; names the keyword.
      SourceError: the source is not random access, or it has longer records than the last boundary and ``long`` is
        ``"raise"``, or no record is left.
    """

    kind = "buckets"
    fresh_arrays = True

    @hides_own_frames
    def __init__(
        self,
        source: object,
        boundaries: Sequence[int],
        *,
        key: str | Sequence[str] = "tokens",
        mask_key: str | None = "mask",
        pad_value: float = 0,
        long: str = "raise",
    ) -> None:
        self.boundaries = _checked_boundaries(boundaries)
        if long not in ("raise", "truncate", "drop"):
            raise SettingsError(f"long={long!r}; it takes 'raise', 'truncate' or 'drop'.", setting="long")
        self._pad = Pad(key, mask_key, pad_value, self.boundaries[-1], long == "truncate", "the last boundary")
        self._settings = [list(self._pad.keys), mask_key, pad_value, long]
        other = "Pad the records of {} with Padded."
        self._source = documents_of(source, "Buckets", other.format("streams"), other.format("mixtures"))
        self._lengths = lengths_of(self._source, self._pad.length_of, self._pad.keys[0])
        self._buckets = self._split(long)

    def _split(self, long: str) -> list[np.ndarray]:
        """The record ids of each bucket, ascending."""
        counts, longest = np.zeros(len(self.boundaries) + 1, np.int64), 0
        for _, bucket, part in self._parts():
            counts += np.bincount(bucket, minlength=len(counts))
            longest = max(longest, int(part.max()))
        if counts[-1] and long == "raise":
            raise SourceError(
                f"{counts[-1]:,} of {len(self._lengths):,} records are longer than the last boundary, "
                f"{self.boundaries[-1]:,}; the longest has {longest:,} entries. Add a boundary, or pass long='truncate' or "
                "long='drop'."
            )
        if long == "truncate":
            counts[-2] += counts[-1]
        if not counts[:-1].any():
            raise SourceError(f"Buckets: all {len(self._lengths):,} records are longer than {self.boundaries[-1]:,}.")
        ids_dtype = np.uint32 if len(self._lengths) < 1 << 32 else np.uint64
        buckets = [empty(int(count), ids_dtype) for count in counts[:-1]]
        filled = [0] * len(buckets)
        for first, bucket, _ in self._parts():
            if long == "truncate":
                bucket = np.minimum(bucket, len(buckets) - 1)
            for number, ids in enumerate(buckets):
                found = np.flatnonzero(bucket == number)
                ids[filled[number] : filled[number] + len(found)] = first + found
                filled[number] += len(found)
        return buckets

    def _parts(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The first record of each part of the source, and the bucket and length of each of its records."""
        for first in range(0, len(self._lengths), _RECORDS_PER_PASS):
            part = self._lengths[first : first + _RECORDS_PER_PASS]
            yield first, np.searchsorted(self.boundaries, part), part

    def __repr__(self) -> str:
        buckets = zip(self.boundaries, self._buckets, strict=True)
        return f"Buckets({self._source!r}, {', '.join(f'{len(ids):,} of {length:,}' for length, ids in buckets)})"

    def __len__(self) -> int:
        """Number of records of one epoch."""
        return sum(map(len, self._buckets))

    def __getitem__(self, record_id: SupportsIndex) -> dict[str, PyTree]:
        """The padded record ``record_id``."""
        return {name: leaf[0] for name, leaf in self.read_batch([operator.index(record_id)]).items()}

    def read_batch(self, record_ids: RecordIds | Sequence[int]) -> dict[str, PyTree]:
        """Reads records, padded to the boundary of the longest of them.

        Args:
          record_ids: int64[n], ids of the source, in any order, repeats allowed.

        Returns:
          Dict of arrays ``[n, ...]`` in new memory.

        Raises:
          SourceError: an id does not exist, or a record is not of the length it was.
        """
        ids = np.asarray(record_ids, np.int64)
        self.check_record_ids(ids)
        own = ids % len(self._lengths)
        records = read_items(self._source, own)
        for record_id, record in zip(own.tolist(), records, strict=True):
            found, known = self._pad.length_of(record), int(self._lengths[record_id])
            if found != known:
                raise SourceError(
                    f"record {record_id} has {found:,} entries, and had {known:,} when the source was created. Records "
                    "must not change.",
                    record_id=record_id,
                )
        return self._pad.to(records, self.boundaries[self.shape_index(ids)])

    def shape_index(self, record_ids: RecordIds) -> int:
        """Returns the bucket to whose boundary these records, int64[n], are padded together."""
        times, own = np.divmod(record_ids, len(self._lengths))
        bucket = np.minimum(np.searchsorted(self.boundaries, self._lengths[own]), len(self.boundaries) - 1)
        return int(np.maximum(bucket, times - 1).max())

    def row_lengths(self, record_ids: RecordIds) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lengths of records, and the first segment of each, which has one; reads nothing."""
        lengths = self._lengths[np.asarray(record_ids, np.int64) % len(self._lengths)].astype(np.int64)
        return np.minimum(lengths, self.boundaries[-1]), np.arange(len(lengths) + 1)

    @property
    def first_record_id(self) -> int:
        """Id of the record from which to infer the structure: one of the longest bucket."""
        return int(next(ids for ids in reversed(self._buckets) if len(ids))[0])

    def make_order(self, **settings: Unpack[hooks.OrderSettings]) -> BucketOrder:
        """Returns the order for a feed's settings.

        Raises:
          SettingsError: the batch size changes.
        """
        batch_sizes = settings["batch_sizes"]
        if len(batch_sizes) > 1:
            raise SettingsError(
                f"global_batch_size changes between {' and '.join(map(str, batch_sizes))}, but the batches of Buckets must "
                "have one size, which determines the records that come together. Pass one int.",
                setting="global_batch_size",
            )
        return BucketOrder(
            self._buckets,
            num_records=len(self._lengths),
            global_batch_size=batch_sizes[0],
            shuffle=settings["shuffle"],
            seed=settings["seed"],
            num_epochs=settings["num_epochs"],
        )

    def check_record_ids(self, record_ids: RecordIds) -> None:
        """Raises SourceError for an id that does not exist."""
        end = len(self._lengths) * (1 + len(self.boundaries))
        wrong = record_ids[(record_ids < 0) | (record_ids >= end)]
        if wrong.size:
            raise SourceError(
                f"record id {wrong[0]} is not in the source, which has the ids 0 to {len(self._lengths) - 1}.",
                record_id=int(wrong[0]),
            )

    def replacement_id(self, seed: int, epoch: int, record_id: int, attempt: int) -> int:
        """Returns the id of another record of the same bucket, to be padded to the same length."""
        times, own = divmod(record_id, len(self._lengths))
        ids = self._buckets[self.shape_index(np.array([own]))]
        place = int(np.searchsorted(ids, own))
        other = int(ids[epoch_order.replacement_id(seed, epoch, place, attempt, len(ids))])
        return other + times * len(self._lengths)

    def fingerprint(self) -> JsonValue:
        """Identity: the source, all lengths, and how records are padded."""
        return self._identity

    @functools.cached_property
    def _identity(self) -> JsonValue:
        padding = {"boundaries": list(self.boundaries), "settings": self._settings}
        lengths = digest_of_lengths(self._lengths)
        return {"source": source_identity(self._source), "lengths": lengths, "padding": padding}

    def file_of(self, record_id: int) -> str | None:
        """Returns the file of a record, or None if unknown."""
        return file_of(self._source, record_id % len(self._lengths))

    def close(self) -> None:
        """Closes the source."""
        hooks.close(self._source)


def _checked_boundaries(boundaries: object) -> tuple[int, ...]:
    if not isinstance(boundaries, Sequence | np.ndarray) or isinstance(boundaries, str) or not len(boundaries):
        raise SettingsError(
            f"boundaries={boundaries!r}; it takes lengths, such as (128, 512, 2048).", setting="boundaries"
        )
    found = tuple(checked_count(boundary, "boundaries") for boundary in boundaries)
    if list(found) != sorted(set(found)):
        raise SettingsError(f"boundaries={boundaries!r}; they must be ascending.", setting="boundaries")
    return found
