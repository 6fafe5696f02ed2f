"""Pads records of unequal length, with a mask: all to one length, or those of a batch to one of few."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, Unpack, cast

import numpy as np

from meshfeed._src.base import hooks, memory
from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.settings import ShardShuffle
from meshfeed._src.base.types import JsonValue, PyTree, RandomAccessSource, Record, RecordIds, public
from meshfeed._src.order import permutation
from meshfeed._src.order.buckets import BucketOrder
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.records import file_of
from meshfeed._src.reading.stacking import RecordStack
from meshfeed._src.sources.built import BuiltRecords
from meshfeed._src.sources.checks import check_choice, checked_count
from meshfeed._src.sources.documents import (
    RowError,
    as_array,
    digest_of_lengths,
    documents_of,
    empty,
    in_record,
    leaves_by_name,
    lengths_of,
    read_items,
)
from meshfeed._src.sources.map import Map, MappedRecords, MappedStream
from meshfeed._src.sources.selection import Subset


@public("meshfeed.sources")
@hides_own_frames
def Padded(  # named like a class, as Map is
    source: object,
    length: int | Mapping[str, int],
    *,
    key: str | Sequence[str] = "tokens",
    mask_key: str | None = "mask",
    pad_value: float = 0,
    long: str = "raise",
) -> MappedRecords | MappedStream:
    """Pads the records of any source to one length, or several leaves each to a length of its own.

    A record is a dict. Its leaf ``key``, ``[n, ...]`` with 0 <= n <= ``length``, becomes ``[length, ...]`` of the same dtype,
    and the leaf ``mask_key``, bool ``[length]``, is True for its n entries. Other leaves stay as they are. A bare array is
    treated as ``{key: array}``.

    ``length={leaf: length}`` pads leaves whose lengths do not depend on each other, such as the tokens and the images of a
    record, or the two answers of a pair. The mask of each is ``<leaf>_mask``.

    Args:
      source: records, random access or a stream, or any object that the feed accepts as such.
      length: entries of a padded leaf, at least 1; or a dict of leaves and their lengths, without ``key``.
      key: the leaf to pad, or several of one length per record, such as ``("tokens", "loss_mask")``.
      mask_key: name of the mask, or None for no mask. With a dict, None for no masks.
      pad_value: value of the entries that are added to the first leaf; those of the others are 0.
      long: the treatment of a longer record: ``"raise"`` raises an error, ``"truncate"`` keeps its first ``length`` entries.

    Returns:
      A random-access source if ``source`` is one, otherwise a stream source.

    Raises:
      SettingsError: a setting is out of range; names the keyword.
      SourceError: ``source`` is not a source of records. Reads raise it for a record without the leaves ``key``, with
        leaves of different lengths, or longer than ``length``.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Padded
      >>> class Documents:
      ...     def __len__(self):
      ...         return 3
      ...     def __getitem__(self, record_id):
      ...         return {"tokens": np.arange(record_id + 1)}
      >>> Padded(Documents(), 4)[1]["tokens"].tolist()
      [0, 1, 0, 0]
    """
    check_choice(long, "long", "raise", "truncate")
    truncates = long == "truncate"
    if not isinstance(length, Mapping):
        pad = Pad(key, mask_key, pad_value, checked_count(length, "length"), truncates)
    else:
        for setting, value, usual in (("key", key, "tokens"), ("mask_key", mask_key, "mask")):
            if value != usual and value is not None:
                raise SettingsError(
                    f"{setting}={value!r} with length={length!r}, which names the leaves; their masks are <leaf>_mask. Leave "
                    f"out {setting}.",
                    setting=setting,
                )
        pad = PadEach(length, mask_key is not None, pad_value, truncates)
    mapped = Map(source, pad, batched=True)
    if isinstance(mapped, MappedRecords) and not mapped.wants_rng:
        pad.learn_dtypes_from(functools.partial(_in_order, mapped._source))
    return mapped


_SEARCHED = 1000  # records


def _in_order(records: RandomAccessSource) -> Iterator[Record]:
    return (read_items(records, np.array([record_id]))[0] for record_id in range(len(records)))


class Pad:
    """Stacks records padded to ``length``, which errors call ``what``; for other arguments, see :func:`Padded`.

    An empty list has no dtype: it gets that of the other records of the batch, or of the first that is not empty.

    Raises:
      SettingsError: a setting is out of range; names the keyword.
    """

    fresh_arrays = True

    def __init__(
        self,
        key: object,
        mask_key: object,
        pad_value: object,
        length: int,
        truncates: bool,
        what: str = "length",
        remedy: str | None = None,
    ) -> None:
        keys = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, Sequence) else ()
        if not keys or not all(isinstance(name, str) and name for name in keys) or len(set(keys)) < len(keys):
            raise SettingsError(f"key={key!r}; it takes the name of a leaf, or several different ones.", setting="key")
        if mask_key is not None and not (isinstance(mask_key, str) and mask_key and mask_key not in keys):
            raise SettingsError(
                f"mask_key={mask_key!r}; it takes the name of a new leaf, or None for no mask.", setting="mask_key"
            )
        if not isinstance(pad_value, bool | int | float | np.number):
            raise SettingsError(f"pad_value={pad_value!r}; it takes a number.", setting="pad_value")
        self.keys, self._mask_key, self._pad_value = keys, mask_key, pad_value
        self._length, self._truncates, self._what = length, truncates, what
        self._remedy = remedy or f"Pass a larger {what}, or long='truncate'."
        self._like: dict[str, np.ndarray] = {}  # no entries of each leaf, as that of another record
        self._first_records: Callable[[], Iterable[Record]] = tuple

    def learn_dtypes_from(self, first_records: Callable[[], Iterable[Record]]) -> None:
        """Takes the dtype of empty lists, where other records of a batch have none, from the first records of the source."""
        self._first_records = first_records

    def __call__(self, records: Sequence[Record]) -> dict[str, PyTree]:
        """Returns the records, at least one, as arrays ``[n, length, ...]``."""
        return self.to(records, self._length)

    def length_of(self, record: Record) -> int:
        """Returns the number of entries of a record.

        Raises:
          SourceError: it lacks a leaf of ``key``, or has leaves of different lengths.
        """
        return len(self._leaves(record)[self.keys[0]])

    def to(self, records: Sequence[Record], length: int, known: Sequence[int] | None = None) -> dict[str, PyTree]:
        """Returns records padded to ``length`` in new arrays.

        Args:
          records: n records.
          length: entries of a padded leaf.
          known: what the number of entries of each record was; None if it is not known.

        Raises:
          RowError: a record is longer, is not as long as it was, lacks a leaf of ``key``, or differs from the others.
        """
        stack, padded, mask = RecordStack(len(records)), {}, memory.empty((len(records), length), np.bool_)
        for row, record in enumerate(records):
            try:
                leaves = self._leaves(record)
                count = len(leaves[self.keys[0]])
                if count > length or known is not None:
                    count = self._checked_count(count, length, None if known is None else known[row])
                for name, leaf in leaves.items():
                    if not count and leaf.shape == (0,) and leaf.dtype == np.float64:  # as of an empty list
                        continue
                    out = padded.get(name)
                    if out is None:
                        out = padded[name] = self._filled(name, (len(records), length), leaf)
                        self._like[name] = leaf[:0].copy()
                    if out.dtype != leaf.dtype or out.shape[2:] != leaf.shape[1:]:
                        raise _differs(name, leaf, out)
                    out[row, :count] = leaf[:count]
                if isinstance(record, Mapping) and len(record) > len(self.keys):
                    stack.add({key: leaf for key, leaf in record.items() if key not in self.keys})
            except SourceError as error:
                raise RowError(row, error) from error
            mask[row, :count], mask[row, count:] = True, False
        for name in self.keys:
            if name not in padded:
                padded[name] = self._filled(name, (len(records), length), self._like_of(name))
        batch = {**(stack.take()[0] if stack.count else {}), **padded}
        return batch if self._mask_key is None else {**batch, self._mask_key: mask}

    def _like_of(self, name: str) -> np.ndarray:
        if name not in self._like:
            # Not that of any record read before: a feed that resumes has read none.
            found = (self._leaves(record)[name] for record in itertools.islice(self._first_records(), _SEARCHED))
            self._like[name] = next((leaf for leaf in found if len(leaf)), np.empty(0))[:0].copy()
        return self._like[name]

    def _checked_count(self, count: int, length: int, known: int | None) -> int:
        if known is not None and count != known:
            raise SourceError(
                f"it has {count:,} entries, and had {known:,} when the source was created. Records must not change."
            )
        if count > length and not self._truncates:
            raise SourceError(
                f"it has {count:,} entries in the leaf {self.keys[0]!r}, and {self._what} is {length:,}. {self._remedy}"
            )
        return min(count, length)

    def _filled(self, name: str, shape: tuple[int, int], leaf: np.ndarray) -> np.ndarray:
        value, filling = self._pad_value if name == self.keys[0] else 0, None
        with np.errstate(invalid="ignore"), contextlib.suppress(OverflowError):
            filling = np.array([value]).astype(leaf.dtype)
        if filling is None or (filling[0] != value and not (value != value and filling[0] != filling[0])):  # NaN
            raise SettingsError(
                f"pad_value={value!r} is not a value of the leaf {name!r}, which is {leaf.dtype}.", setting="pad_value"
            )
        out = memory.empty((*shape, *leaf.shape[1:]), leaf.dtype)
        out[...] = filling[0]
        return out

    def _leaves(self, record: Record) -> dict[str, np.ndarray]:
        """The leaves to pad, of one length."""
        record = leaves_by_name(record, self.keys[0])
        if self._mask_key in record:
            raise SourceError(f"records have the leaf {self._mask_key!r} already. Pass a different mask_key.")
        missing = [name for name in self.keys if name not in record]
        if missing:
            raise SourceError(f"it has the leaves {sorted(record)}, and not {missing[0]!r}. Pass key=.")
        leaves = {name: as_array(record[name], f"its leaf {name!r}") for name in self.keys}
        for name, leaf in leaves.items():
            if leaf.dtype.kind in "OSUMm" or not leaf.ndim or len(leaf) != len(leaves[self.keys[0]]):
                raise SourceError(
                    f"its leaf {name!r} is {leaf.dtype} of shape {leaf.shape}. Expected numbers of shape [n, ...], with the "
                    "same n for every leaf of key=. Turn text into numbers with Map."
                )
        return leaves


class PadEach:
    """Stacks records of which each leaf of ``lengths`` is padded to its own length; see :func:`Padded`.

    Raises:
      SettingsError: a setting is out of range; names the keyword.
    """

    fresh_arrays = True

    def __init__(self, lengths: Mapping[Any, object], masks: bool, pad_value: object, truncates: bool) -> None:
        if not lengths or not all(isinstance(name, str) and name for name in lengths):
            raise SettingsError(
                f"length={lengths!r}; it takes a number of entries, or a dict of leaves and their numbers of entries.",
                setting="length",
            )
        self._pads: dict[str, Pad] = {}
        for name, length in lengths.items():
            mask, value = f"{name}_mask" if masks else None, 0 if self._pads else pad_value
            if mask in lengths:
                raise SettingsError(
                    f"length={lengths!r}: {mask!r} is the mask of {name!r}. Rename a leaf with Map.", setting="length"
                )
            count = checked_count(length, "length")
            self._pads[name] = Pad(name, mask, value, count, truncates, f"length[{name!r}]")

    def learn_dtypes_from(self, first_records: Callable[[], Iterable[Record]]) -> None:
        """See :meth:`Pad.learn_dtypes_from`."""
        for pad in self._pads.values():
            pad.learn_dtypes_from(first_records)

    def __call__(self, records: Sequence[Record]) -> dict[str, PyTree]:
        """Returns the records, at least one, as arrays ``[n, length, ...]``."""
        for row, record in enumerate(records):
            leaves = sorted(record) if isinstance(record, Mapping) else []
            if missing := [name for name in self._pads if name not in leaves]:
                raise RowError(
                    row, SourceError(f"it has the leaves {leaves}, and not {missing[0]!r}, which length= names.")
                )
        batch: dict[str, PyTree] = {}
        for number, (name, pad) in enumerate(self._pads.items()):
            # The first also stacks the leaves that are not padded.
            left_out = self._pads.keys() - {name} if number == 0 else None
            wanted = {name, f"{name}_mask"}
            batch |= pad(
                [
                    {
                        key: leaf
                        for key, leaf in record.items()
                        if (key in wanted if left_out is None else key not in left_out)
                    }
                    for record in records
                ]
            )
        return batch


def _differs(name: str, leaf: np.ndarray, out: np.ndarray) -> SourceError:
    return SourceError(
        f"its leaf {name!r} is {leaf.dtype} with entries of shape {leaf.shape[1:]}, that of another record {out.dtype} with "
        f"entries of shape {out.shape[2:]}. Expected records that differ in length only. Cast them with Map."
    )


_RECORDS_PER_PASS = 1 << 20


@public("meshfeed.sources")
class Buckets(BuiltRecords):
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
      long: the treatment of records longer than the last boundary: ``"raise"`` raises an error, ``"truncate"`` keeps their
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
        check_choice(long, "long", "raise", "truncate", "drop")
        remedy = "long='drop' left it out." if long == "drop" else "Add a boundary, or pass long='truncate'."
        self._pad = Pad(key, mask_key, pad_value, self.boundaries[-1], long == "truncate", "the last boundary", remedy)
        self._settings: list[Any] = [list(self._pad.keys), mask_key, pad_value, long]
        self._source = documents_of(source, "Buckets", "Pad the records of streams with Padded.")
        self._pad.learn_dtypes_from(functools.partial(_in_order, self._source))
        self._lengths = lengths_of(self._source, self._pad.length_of, self._pad.keys[0])
        self._buckets = self._split(long)

    def _split(self, long: str) -> list[np.ndarray]:
        """The record ids of each bucket, ascending."""
        # Counted before they are filled: a bucket is allocated once, and a large one is mapped from a file.
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
        # 4 instead of 8 bytes per record.
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
        # Ids beyond the records are those of shared batches, which are padded to a longer bucket; see shape_index.
        own = ids % len(self._lengths)
        records = read_items(self._source, own)
        try:
            return self._pad.to(records, self.boundaries[self.shape_index(ids)], self._lengths[own].tolist())
        except RowError as error:
            raise in_record(self._source, int(own[error.row]), error.reason) from error.reason

    def shape_index(self, record_ids: RecordIds) -> int:
        """Returns the bucket to whose boundary these records, int64[n], are padded together."""
        # A host has some rows of a batch, and must pad them as the other hosts do, so the ids alone give the bucket: in a
        # batch that buckets share, they are raised by the number of records times one plus the bucket.
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
        shuffle = settings["shuffle"]
        return BucketOrder(
            self._buckets,
            num_records=len(self._lengths),
            global_batch_size=batch_sizes[0],
            shuffle=shuffle,
            seed=settings["seed"],
            num_epochs=settings["num_epochs"],
            shard_lengths=self._shard_lengths() if isinstance(shuffle, ShardShuffle) else (),
            num_lanes=settings["num_lanes"],
        )

    def _shard_lengths(self) -> list[RecordIds]:
        """The records of each bucket in each file; the source is made of files."""
        ends = np.cumsum(cast("hooks.Sharded", self._source).shard_lengths())
        return [np.diff(np.searchsorted(ids, ends.astype(ids.dtype)), prepend=0) for ids in self._buckets]

    @property
    def shard_lengths(self) -> Callable[[], RecordIds]:
        """Number of records in each file, of all buckets; only if the source is made of files."""
        if hooks.find(self._source, hooks.Sharded) is None:
            raise AttributeError("the records are not in files")
        return lambda: np.sum(self._shard_lengths(), axis=0)

    def cached_files(self, record_ids: RecordIds) -> Sequence[hooks.CachedFile] | None:
        """Returns the files that hold these records and are read through a cache; None without one."""
        source = hooks.find(self._source, hooks.CachesFiles)
        return None if source is None else source.cached_files(np.asarray(record_ids, np.int64) % len(self._lengths))

    def ask_disk(self, record_ids: RecordIds) -> bool | None:
        """See :class:`meshfeed._src.base.hooks.ReadsDisk`."""
        source = hooks.on_disk(self._source)
        return None if source is None else source.ask_disk(np.asarray(record_ids, np.int64) % len(self._lengths))

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
        other = int(ids[permutation.replacement_id(seed, epoch, place, attempt, len(ids))])
        return other + times * len(self._lengths)

    @property
    def grouping(self) -> object:
        """See :class:`meshfeed._src.base.hooks.GroupsRecords`."""
        return self.boundaries, self._settings

    def ungrouped(self) -> RandomAccessSource:
        """Returns the records before they are padded, without those that are too long with ``long="drop"``."""
        if len(self) == len(self._lengths):
            return self._source
        return Subset(self._source, np.sort(np.concatenate(self._buckets)))

    def regrouped(self, records: RandomAccessSource) -> Buckets:
        """Returns other records in buckets with the same settings."""
        key, mask_key, pad_value, long = self._settings
        return Buckets(records, self.boundaries, key=key, mask_key=mask_key, pad_value=pad_value, long=long)

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


def _checked_boundaries(boundaries: object) -> tuple[int, ...]:
    if not isinstance(boundaries, Sequence | np.ndarray) or isinstance(boundaries, str) or not len(boundaries):
        raise SettingsError(
            f"boundaries={boundaries!r}; it takes lengths, such as (128, 512, 2048).", setting="boundaries"
        )
    found = tuple(checked_count(boundary, "boundaries") for boundary in boundaries)
    if list(found) != sorted(set(found)):
        raise SettingsError(f"boundaries={boundaries!r}; they must be ascending.", setting="boundaries")
    return found
