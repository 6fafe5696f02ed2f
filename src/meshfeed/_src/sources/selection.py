"""Views of one random-access source: some of its records, in another order, or several times.

A view is only a function from its own record ids to those of the source. Every hook of the source that takes record ids
is a hook of the view too, so a view is read by the same calls, with the same decoder and the same columns.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias, cast

import numpy as np
import xxhash

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.ownership import declared_with, own_batch
from meshfeed._src.base.types import MAX_POSITION, JsonValue, Record, RecordIds, public
from meshfeed._src.order.permutation import derive_key, permute, sorted_permutation
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.records import wants_rng
from meshfeed._src.sources.built import SameHooks
from meshfeed._src.sources.checks import check_choice, check_ids, checked_count, checked_id, is_count
from meshfeed._src.sources.documents import empty, read_items
from meshfeed._src.sources.lists import plain_records, select
from meshfeed._src.sources.recognize import as_source, describe_source

_SPLIT, _SPLIT_SHARDS, _SAMPLE = 131, 132, 133  # purposes of derived keys
_IDS_PER_PASS = 1 << 20

Ids: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


# ---------------------------------------------------------------------- ids of a view → ids of its source


class Selection(Protocol):
    """Which records of a source a view has."""

    def __len__(self) -> int: ...

    def ids(self, record_ids: Ids) -> RecordIds:
        """Returns the ids in the source of records of the view, int64 ``[n]``; these are within its length."""
        ...

    def counts(self, ends: RecordIds) -> RecordIds | None:
        """Returns how many records of the view lie in each shard of the source, int64 ``[shards]``, in the view's order.

        A shard that is repeated after others counts again. A mixture returns runs of records that lie in few shards. None if
        the view leaves the order of the source, so its shards do not follow one another.

        Args:
          ends: the record id after each shard's last record, int64 ``[shards]``, ascending.
        """
        ...


class Strided:
    """Every ``step``-th record from ``start`` on."""

    def __init__(self, start: int, step: int, length: int) -> None:
        self.start, self.step, self._length = start, step if length > 1 else 1, length

    def __len__(self) -> int:
        return self._length

    def ids(self, record_ids: Ids) -> RecordIds:
        """See :class:`Selection`."""
        return self.start + self.step * np.asarray(record_ids, np.int64)

    def counts(self, ends: RecordIds) -> RecordIds | None:
        """See :class:`Selection`."""
        if self.step < 0:
            return None
        before = -((self.start - ends) // self.step)  # records below each end, rounded up
        return np.diff(np.clip(before, 0, self._length), prepend=0)


class Ranges:
    """Ranges of records, one after the other; ``starts`` and ``stops`` are int64 ``[n]`` and ascend together."""

    def __init__(self, starts: RecordIds, stops: RecordIds) -> None:
        self._starts = starts
        # The id in the view of each range's first record, and the length.
        self._firsts = np.cumsum(np.append(0, stops - starts), dtype=np.int64)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def ids(self, record_ids: Ids) -> RecordIds:
        """See :class:`Selection`."""
        own = np.asarray(record_ids, np.int64)
        shifts = self._starts - self._firsts[:-1]
        return own + shifts[np.searchsorted(self._firsts, own, side="right") - 1]

    def counts(self, ends: RecordIds) -> RecordIds | None:
        """See :class:`Selection`."""
        last = np.searchsorted(self._starts, ends) - 1  # the last range that begins below each end
        below = np.minimum(self._firsts[last] + ends - self._starts[last], self._firsts[last + 1])
        below[last < 0] = 0
        return np.diff(below, prepend=0)


class Listed:
    """Records by a list of their ids, in any order, with repeats."""

    def __init__(self, listed: Ids) -> None:
        self.listed = listed

    def __len__(self) -> int:
        return len(self.listed)

    def ids(self, record_ids: Ids) -> RecordIds:
        """See :class:`Selection`."""
        return self.listed[record_ids].astype(np.int64)

    def counts(self, ends: RecordIds) -> RecordIds | None:
        """See :class:`Selection`."""
        for first in range(0, len(self.listed), _IDS_PER_PASS):
            part = self.listed[first : first + _IDS_PER_PASS + 1]
            if bool((part[1:] < part[:-1]).any()):
                return None
        return np.diff(np.searchsorted(self.listed, ends.astype(self.listed.dtype)), prepend=0)


class Repeated:
    """All ``num_records`` records ``times`` times, and then some of them once more."""

    def __init__(self, num_records: int, times: int, rest: Ids) -> None:
        self.num_records, self.times, self.rest = num_records, times, rest

    def __len__(self) -> int:
        return self.num_records * self.times + len(self.rest)

    def ids(self, record_ids: Ids) -> RecordIds:
        """See :class:`Selection`."""
        times, own = np.divmod(np.asarray(record_ids, np.int64), self.num_records)
        last = times == self.times
        own[last] = self.rest[own[last]]
        return own

    def counts(self, ends: RecordIds) -> RecordIds | None:
        """See :class:`Selection`."""
        whole = Strided(0, 1, self.num_records).counts(ends)  # the source's files in turn, once per repetition
        rest = Listed(self.rest).counts(ends) if len(self.rest) else None
        parts = [part for part in (*[whole] * self.times, rest) if part is not None]
        return np.concatenate(parts)


class Joined:
    """The selections of several sources that are read as one, one after the other."""

    def __init__(self, selections: Sequence[Selection], firsts: Sequence[int]) -> None:
        self._selections, self._firsts = list(selections), list(firsts)  # and the first id of each source in the whole
        self._ends = np.cumsum([len(selection) for selection in selections])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def ids(self, record_ids: Ids) -> RecordIds:
        """See :class:`Selection`."""
        own = np.asarray(record_ids, np.int64).copy()
        which = np.searchsorted(self._ends, own, side="right")
        for number in np.unique(which).tolist():
            rows = np.flatnonzero(which == number)
            selection = self._selections[number]
            within = own[rows] - (int(self._ends[number]) - len(selection))
            own[rows] = selection.ids(within) + self._firsts[number]
        return own

    def counts(self, ends: RecordIds) -> RecordIds | None:
        """See :class:`Selection`."""
        of_source = np.searchsorted(self._firsts[1:], ends)  # the source of each shard
        found = [
            selection.counts(ends[of_source == number] - first)
            for number, (selection, first) in enumerate(zip(self._selections, self._firsts, strict=True))
        ]
        return None if any(part is None for part in found) else np.concatenate([p for p in found if p is not None])


# ---------------------------------------------------------------------- hooks of the source as hooks of the view


class _ByIds:
    """A method of the source whose first argument is record ids, as a method of the view.

    The view does not have it if the source does not.
    """

    def __init__(self, *, owned: bool = False) -> None:
        self._owned = owned

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, view: View | None, owner: type) -> Any:
        if view is None:
            return self
        source, selection = view._source, view._selection
        method = getattr(source, self._name)

        @functools.wraps(method)  # with its signature, which says which keywords it takes
        def of_view(record_ids: Ids, *arguments: Any, **keywords: Any) -> Any:
            ids = np.asarray(record_ids, np.int64)
            check_ids(ids, len(view), "view")
            found = method(selection.ids(ids), *arguments, **keywords)
            return own_batch(found, source, self._name) if self._owned else found

        return of_view


class View(SameHooks):
    """A source whose records are selected from another one; made by :func:`Subset`, :func:`Sample` and ``random_split``."""

    fresh_arrays = True  # each read owns what the source returns
    read_batch = _ByIds(owned=True)
    read_raw, cached_files, ask_disk, row_lengths, shard_costs = (_ByIds() for _ in range(5))
    shape_index, read_slices, read_drawn = (_ByIds() for _ in range(3))
    _same_hooks = (
        *("decode", "decode_batch", "reads_columns", "read_threads", "file_names", "check_records", "element_shapes"),
        "num_sequence_shards",
    )

    def __init__(self, source: Any, selection: Selection, kind: str, identity: JsonValue) -> None:
        self._source, self._selection, self.kind, self._own_identity = source, selection, kind, identity
        self.wants_rng = wants_rng(source)

    def __repr__(self) -> str:
        return f"{self.kind.capitalize()}({describe_source(self._source)}, {len(self):,} records)"

    def __len__(self) -> int:
        return len(self._selection)

    def __getitem__(self, record_id: SupportsIndex) -> Record:
        """Record ``record_id`` of the view."""
        return self._source[self._id(checked_id(record_id, len(self), "view"))]

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], Sequence[Record]]:
        """Several records, in the order of ``record_ids``; only if the source reads several: others may reuse memory."""
        _ = cast("hooks.ItemsReader", self._source).__getitems__  # AttributeError if it does not

        def of_view(record_ids: Sequence[int]) -> Sequence[Record]:
            check_ids(record_ids, len(self), "view")
            return read_items(self._source, self._selection.ids(np.asarray(record_ids, np.int64)))

        return of_view

    def _id(self, record_id: int) -> int:
        return int(self._selection.ids(np.array([record_id], np.int64))[0])

    def read_rows(self, record_ids: RecordIds) -> np.ndarray | None:
        """Records of one size as one array, or None; see :class:`meshfeed._src.base.hooks.RowsReader`."""
        rows = hooks.find(self._source, hooks.RowsReader)
        if rows is None or not declared_with(type(self._source), "read_raw", "read_rows"):
            return None  # a subclass that overrides read_raw alone may read something else
        check_ids(record_ids, len(self), "view")
        found = rows.read_rows(self._selection.ids(record_ids))
        return None if found is None else own_batch(found, self._source, "read_rows")

    def file_of(self, record_id: int) -> str | None:
        """The file that holds a record, or None if unknown."""
        located = hooks.find(self._source, hooks.LocatesRecords)
        return None if located is None else located.file_of(self._id(record_id))

    @property
    def lengths(self) -> Callable[[], np.ndarray]:
        """The lengths of all records; only if the source knows its own."""
        known = cast("hooks.KnowsLengths", self._source).lengths
        return lambda: self._of_all(known())

    @property
    def stored_lengths(self) -> Callable[[str], np.ndarray | None]:
        """The lengths of a leaf of all records, if a manifest has them; only if the source can have a manifest."""
        stored = cast("hooks.StoredLengths", self._source).stored_lengths
        return lambda key: self._of_all_known(stored(key))

    @property
    def joined_lengths(self) -> Callable[[str], np.ndarray | None]:
        """The lengths of all records; only if the source joins sources."""
        joined = cast("hooks.JoinsLengths", self._source).joined_lengths
        return lambda key: self._of_all_known(joined(key))

    def _of_all_known(self, values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else self._of_all(values)

    def _of_all(self, values: Any) -> np.ndarray:
        """A value of each record of the view, from one of each record of the source."""
        values = np.asarray(values)
        if isinstance(self._selection, Strided):
            start, step, length = self._selection.start, self._selection.step, len(self)
            return values[start::step][:length]
        out = empty(len(self), values.dtype)
        for first in range(0, len(self), _IDS_PER_PASS):
            stop = min(first + _IDS_PER_PASS, len(self))
            out[first:stop] = values[self._selection.ids(np.arange(first, stop))]
        return out

    @property
    def shard_lengths(self) -> Callable[[], RecordIds]:
        """Number of records in each file; only if the source has files, and the view keeps their order."""
        counts = self._counts
        if counts is None:
            raise AttributeError("the view leaves the order of its source, or that has no files")
        return lambda: counts

    @functools.cached_property
    def _counts(self) -> RecordIds | None:
        sharded = hooks.find(self._source, hooks.Sharded)
        return None if sharded is None else self._selection.counts(np.cumsum(sharded.shard_lengths()))

    def concatenate(self, others: Sequence[Any]) -> View | None:
        """Returns one view of this view's records followed by those of ``others``; None if they are not read alike."""
        joinable = hooks.find(self._source, hooks.Concatenates)
        return None if joinable is None else self._joined(others, joinable.concatenate)

    def concatenate_raw(self, others: Sequence[Any]) -> View | None:
        """As :meth:`concatenate`, of undecoded records, and for sources with any decoders."""
        joinable = hooks.find(self._source, hooks.ConcatenatesRaw)
        return None if joinable is None else self._joined(others, joinable.concatenate_raw)

    def _joined(self, others: Sequence[Any], join: Callable[[list[Any]], Any]) -> View | None:
        if not all(type(other) is View for other in others):
            return None
        views: list[View] = [self, *others]
        source = join([view._source for view in views[1:]])
        if source is None:
            return None
        ends = np.cumsum([len(view._source) for view in views])
        joined = Joined([view._selection for view in views], [0, *ends[:-1].tolist()])
        return View(source, joined, "concat", [[v.kind, len(v._source), v._own_identity] for v in views])

    def unconverted(self) -> View:
        """The same records as they are stored, if the source converts them."""
        return View(hooks.unconverted(self._source), self._selection, self.kind, self._own_identity)

    def fingerprint(self) -> JsonValue:
        """Identity: that of the source, and which of its records are selected."""
        return {"source": source_identity(self._source), "selected": self._own_identity}


# ---------------------------------------------------------------------- what users call


@public("meshfeed.sources")
@hides_own_frames
def Subset(source: object, indices: slice | Sequence[int] | np.ndarray) -> Any:
    """Selects records of a source, by a slice or by their ids.

    Record i of the subset is record ``indices[i]`` of the source, read by the same calls and with the same decoder.
    A slice needs no memory, whatever its length; of ids, those that were passed are kept.

    Args:
      source: random-access records, or any object that the feed accepts as such.
      indices: a slice, with the meaning that it has for a list, or ids as integers ``[n]`` in any order, with repeats;
        a negative id counts from the end.

    Returns:
      A random-access source of ``len(range(len(source))[indices])``, or n, records.

    Raises:
      SettingsError: ``indices`` is neither, or an id is not in the source; names the id.
      SourceError: the source is a stream, or no record is selected.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Memory, Subset
      >>> source = Subset(Memory({"x": np.arange(10)}), [7, 1, 1])
      >>> [int(record["x"]) for record in source.__getitems__([0, 1, 2])]
      [7, 1, 1]
    """
    return select(source, "Subset", lambda records: _subset(records, indices))


def _subset(records: Any, indices: slice | Sequence[int] | np.ndarray) -> View:
    length = len(records)
    if isinstance(indices, slice):
        try:
            selected = range(length)[indices]
        except (TypeError, ValueError) as error:
            raise SettingsError(f"indices={indices!r}: {error}. Pass a slice of ints.", setting="indices") from None
        selection: Selection = Strided(selected.start, selected.step, len(selected))
        identity: JsonValue = [selected.start, selected.step, len(selected)]
    else:
        ids = _checked_ids(indices, length)
        selection, identity = Listed(ids), _digest_of_ids(ids)
    if not len(selection):
        raise SourceError(f"Subset selects none of the {length:,} records with indices={indices!r:.80}.")
    return View(records, selection, "subset", identity)


def _checked_ids(indices: object, length: int) -> Ids:
    taken = "it takes a slice, or ids as integers [n]"
    try:
        ids = np.asarray(indices)
    except ValueError:
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        more = ". Pass np.flatnonzero(…) of a mask" if ids.dtype == np.bool_ else ""
        raise SettingsError(f"indices is {ids.dtype} of shape {ids.shape}; {taken}{more}.", setting="indices")
    wrong = ids[ids >= length] if ids.dtype.kind == "u" else ids[(ids < -length) | (ids >= length)]
    if wrong.size:
        raise SettingsError(
            f"indices has {wrong[0]}, which is not in the source; its {length:,} records have the ids 0 to {length - 1}.",
            setting="indices",
        )
    ids = ids.astype(np.int64)
    return np.where(ids < 0, ids + length, ids).astype(_id_dtype(length))


def _id_dtype(num_records: int) -> type[np.unsignedinteger[Any]]:
    return np.uint32 if num_records < 1 << 32 else np.uint64


def _digest_of_ids(ids: Ids) -> JsonValue:
    digest = xxhash.xxh3_64()
    for first in range(0, len(ids), _IDS_PER_PASS):
        digest.update(ids[first : first + _IDS_PER_PASS].astype("<i8").tobytes())
    return [len(ids), digest.hexdigest()]


def _chosen(num_records: int, first: int, stop: int, key: int) -> Ids:
    """The records at places ``[first, stop)`` of a keyed permutation of all, in ascending order."""
    ids = empty(stop - first, _id_dtype(num_records))
    for start in range(first, stop, _IDS_PER_PASS):
        end = min(start + _IDS_PER_PASS, stop)
        ids[start - first : end - first] = permute(np.arange(start, end), num_records, key)
    ids.sort()
    return ids


@public("meshfeed.sources")
@hides_own_frames
def Sample(source: object, num_records: int, *, seed: int = 0) -> Any:
    """Repeats the records of a source evenly, up or down to a given number of them.

    Of n records, each comes ``num_records // n`` times, and a random ``num_records % n`` of them once more. The first n
    ids are the source in order, the next n are the source again, and so on; the rest is in the order of the source.

    Args:
      source: random-access records, or any object that the feed accepts as such.
      num_records: number of records of the sample, at least 1.
      seed: 0 to 2**64 - 1; determines which records come once more.

    Returns:
      A random-access source of ``num_records`` records. It keeps 4 bytes for each record that comes once more, in a
      temporary file if there are many.

    Raises:
      SettingsError: ``num_records`` or ``seed`` is out of range.
      SourceError: the source is a stream, or has no records.
    """
    count, seed = checked_count(num_records, "num_records"), _checked_seed(seed)
    if count > MAX_POSITION:
        raise SettingsError(f"num_records={num_records!r}; it takes at most 2**62.", setting="num_records")
    return select(source, "Sample", lambda records: _sample(records, count, seed))


def _sample(records: Any, count: int, seed: int) -> View:
    length = len(records)
    if not length:
        raise SourceError(f"Sample got a {type(records).__name__} with 0 records.")
    times, more = divmod(count, length)
    rest = _chosen(length, 0, more, derive_key(seed, _SAMPLE, length))
    return View(records, Repeated(length, times, rest), "sample", [count, seed if more else None])


@public("meshfeed.sources")
@hides_own_frames
def random_split(
    source: object, fractions: Mapping[str, float], *, seed: int = 0, by: str = "record"
) -> dict[str, Any]:
    """Splits a source at random into parts that have no record in common.

    The parts depend only on the number of records (with ``by="shard"``, on those of each shard), the fractions in their
    order, and the seed: they are the same on every host, and a part stays the same if others are renamed.

    Args:
      source: random-access records, or any object that the feed accepts as such.
      fractions: name → fraction of the records, above 0, together at most 1: ``{"train": 0.9, "test": 0.1}``. A part has
        ``round(fraction * n)`` of n records; the last one takes the rest if the fractions sum to 1.
      seed: 0 to 2**64 - 1.
      by: ``"record"``, or ``"shard"``, which gives every file to one part, so a part needs few files; the numbers of
        records are then as near to the fractions as whole files allow.

    Returns:
      Name → a random-access source of the part's records, in the order of the source. It keeps 4 bytes per record, in a
      temporary file if there are many.

    Raises:
      SettingsError: ``fractions``, ``seed`` or ``by`` is invalid, or a part would have no record; names the part.
      SourceError: the source is a stream, or has no files to split by.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Memory, random_split
      >>> parts = random_split(Memory({"x": np.arange(10)}), {"train": 0.8, "test": 0.2})
      >>> len(parts["train"]), len(parts["test"])
      (8, 2)
    """
    check_choice(by, "by", "record", "shard")
    records = as_source(source)
    groups = hooks.find(records, hooks.GroupsRecords)
    if groups is not None:
        parts = random_split(groups.ungrouped(), fractions, seed=seed, by=by)
        return {name: groups.regrouped(part) for name, part in parts.items()}
    records = plain_records(records, "random_split")
    sizes = _sizes(fractions, len(records))
    seed = _checked_seed(seed)
    ends = np.cumsum([0, *sizes.values()]).tolist()
    if by == "shard":
        selected = _split_shards(records, ends, seed)
    else:
        key = derive_key(seed, _SPLIT, len(records))
        selected = [_chosen(len(records), first, stop, key) for first, stop in itertools.pairwise(ends)]
    for name, ids in zip(sizes, selected, strict=True):
        if not len(ids):
            what = "shards" if by == "shard" else "records"
            raise SettingsError(
                f"fractions={dict(fractions)!r} leaves no {what[:-1]} for {name!r}: the source has {len(records):,} "
                f"records{'' if by == 'record' else f' in {len(records.shard_lengths())} shards'}. Pass a larger fraction.",
                setting="fractions",
            )
    return {
        name: View(records, Listed(ids), "subset", _digest_of_ids(ids))
        for name, ids in zip(sizes, selected, strict=True)
    }


def _sizes(fractions: object, num_records: int) -> dict[str, int]:
    taken = "it takes {name: fraction}, each above 0, together at most 1"
    if not isinstance(fractions, Mapping) or not fractions:
        raise SettingsError(f"fractions={fractions!r}; {taken}.", setting="fractions")
    for name, fraction in fractions.items():
        number = isinstance(fraction, numbers.Real) and not isinstance(fraction, bool)
        if not isinstance(name, str) or not number or not 0 < float(fraction) <= 1:
            raise SettingsError(f"fractions has {name!r}: {fraction!r}; {taken}.", setting="fractions")
    total = math.fsum(fractions.values())
    if total > 1 and not math.isclose(total, 1):
        raise SettingsError(f"fractions={dict(fractions)!r} sum to {total:g}; {taken}.", setting="fractions")
    sizes: dict[str, int] = {}
    for name, fraction in fractions.items():
        # Parts that are all rounded up may exceed the source.
        sizes[name] = min(round(float(fraction) * num_records), num_records - sum(sizes.values()))
    if math.isclose(total, 1):
        last = next(reversed(sizes))
        sizes[last] += num_records - sum(sizes.values())
    return sizes


def _split_shards(records: Any, ends: list[int], seed: int) -> list[Ids]:
    """The records of each part, in whole shards: each shard goes to the part in which its middle lies."""
    sharded = hooks.find(records, hooks.Sharded)
    if isinstance(records, View) and records.kind == "sample":
        raise SourceError(
            "random_split(by='shard') got a Sample, which has records of a file several times, so parts would share files. "
            "Split its source, and sample the parts."
        )
    if sharded is None:
        raise SourceError(
            f"random_split(by='shard') got a {type(records).__name__}, whose records are not in files. Expected a source "
            "over files, such as ArrayRecord. Pass by='record'."
        )
    lengths = np.asarray(sharded.shard_lengths(), np.int64)
    starts = np.cumsum(lengths) - lengths
    order = sorted_permutation(derive_key(seed, _SPLIT_SHARDS, len(records), len(lengths)), len(lengths))
    before = np.cumsum(lengths[order]) - lengths[order]
    part_of = np.empty(len(lengths), np.int64)
    part_of[order] = [bisect.bisect_right(ends, middle) - 1 for middle in (before + lengths[order] // 2).tolist()]
    part_of[lengths == 0] = -1
    dtype = _id_dtype(len(records))
    return [
        np.concatenate(
            [np.arange(starts[shard], starts[shard] + lengths[shard], dtype=dtype) for shard in shards.tolist()]
            or [np.empty(0, dtype)]
        )
        for shards in (np.flatnonzero(part_of == part) for part in range(len(ends) - 1))
    ]


def _checked_seed(seed: object) -> int:
    if not is_count(seed, 0) or seed >= 1 << 64:
        raise SettingsError(f"seed={seed!r}; it takes an int from 0 to 2**64 - 1.", setting="seed")
    return operator.index(seed)
