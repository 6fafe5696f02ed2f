"""Applies a function to the records of a source: by index to random access, in lanes to streams."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, SupportsIndex, cast

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames, shorten
from meshfeed._src.base.ownership import own_batch, own_record, returns_fresh
from meshfeed._src.base.rng import philox
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.types import (
    JsonValue,
    LaneIterator,
    PyTree,
    RandomAccessSource,
    Record,
    RecordIds,
    Rngs,
    public,
)
from meshfeed._src.order.permutation import derive_key
from meshfeed._src.reading.host_batch import num_rows, spec_of_batch
from meshfeed._src.reading.identity import content_digest, source_identity
from meshfeed._src.reading.records import SourceReader, describe_record, wants_rng
from meshfeed._src.reading.stacking import RecordStack
from meshfeed._src.sources.built import BuiltRecords, SameHooks
from meshfeed._src.sources.checks import stopped
from meshfeed._src.sources.documents import RowError, in_record, read_drawn, read_items
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.recognize import as_source
from meshfeed._src.sources.stream import drop

_FUNCTION_KEY = 105  # purpose of a derived key: the function's numbers differ from those of the source's decoder


@public("meshfeed.sources")
@hides_own_frames
def Map(source: object, function: Callable[..., Any], *, batched: bool = False) -> MappedRecords | MappedStream:
    """Applies a function to every record of a source.

    The function runs where records are read: in the feed's threads, or in its worker processes. It may change its record in
    place, and return the same arrays from every call and refill them. If it has the parameter ``rng``, it gets a numpy
    generator that depends only on the feed's seed, the epoch and the record, so random augmentation is part of the stream.

    Args:
      source: a source of records, or any object that the feed accepts as one.
      function: ``function(record)`` returns the new record, a pytree of arrays; lists of numbers in dicts become arrays.
        For streams it may return None, which drops the record, except of a mixture whose weights change at steps. With
        ``batched``, ``function(records)`` gets a list of n records and returns a pytree of
        arrays ``[n, ...]``, row i for record i; its result must not depend on which records come together, and
        ``rng`` is a list of n generators.
      batched: whether the function takes lists of records.

    Returns:
      A random-access source if ``source`` is one, otherwise a stream source.

    Raises:
      SettingsError: ``function`` or ``batched`` is invalid.
      SourceError: ``source`` is not a source of records. Reads raise it if a function of random-access records returns
        None, since their number is fixed.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Map, Memory
      >>> source = Map(Memory({"x": np.arange(4)}), lambda record: {"double": 2 * record["x"]})
      >>> source.read_batch([3, 1])["double"].tolist()
      [6, 2]
    """
    if not isinstance(batched, bool):
        raise SettingsError(f"batched={batched!r}; it takes True or False.", setting="batched")
    argument, what = ("records", "several stacked records") if batched else ("record", "one record")
    if callable(source) and not callable(function):
        raise SettingsError(
            "Map got its arguments in the other order. Expected Map(source, function).", setting="function"
        )
    hooks.check_function(function, argument, what, "Map", "function")
    records = hooks.unconverted(as_source(source))
    if isinstance(records, HostBatches):
        raise SourceError("Map got batches of this host. Expected a source of records. Map them in your own iterable.")
    if not hooks.is_stream(records):
        return MappedRecords(records, function, batched)
    return MappedStream(records, function, batched)


class _Mapped(SameHooks):
    """What both kinds of mapped source share. Hooks that a function does not change are those of the source."""

    kind = "map"
    _keeps_empty = False  # lists, which have no dtype

    def __init__(self, source: Any, function: Callable[..., Any], batched: bool) -> None:
        self._source, self._function, self._batched = source, function, batched
        self._passes_rng = hooks.accepts_keyword(function, "rng")
        # Others may change their record in place, or refill the arrays that they return.
        self._owns_arrays = returns_fresh(function, "__call__")

    def __repr__(self) -> str:
        return f"Map({self._source!r}, {getattr(self._function, '__qualname__', type(self._function).__name__)})"

    def unconverted(self) -> Self:
        """The same records for what is built over them: of an empty list, Packed and Padded need not know the dtype."""
        other = copy.copy(self)
        other._keeps_empty = True
        return other

    def _apply(self, records: Sequence[Record], rngs: Rngs | None, lane_index: int | None = None) -> PyTree:
        """The function's result for a list of records, stacked, in memory that only the caller can write."""
        extra = {"rng": list(rngs)} if rngs is not None else {}
        try:
            returned = self._function(list(records), **extra)
        except StopIteration as error:
            which = f"{len(records)} records" + ("" if lane_index is None else f" of lane {lane_index}")
            raise stopped(f"the function of Map, for a batch of {which},", lane_index=lane_index) from error
        if isinstance(returned, list) and (not returned or isinstance(returned[0], Mapping)):
            raise SourceError(
                f"the function of Map(batched=True) returned a list of {len(returned)} records. Expected one pytree of "
                "arrays [n, ...] for the n records: stack them, such as {name: np.stack([record[name] for record in "
                "records])}, or "
                "leave batched out and return one record."
            )
        batch = own_batch(_with_arrays(returned, len(records)), self._function, "__call__")
        spec_of_batch(batch, len(records), what="the function of Map")
        return batch


class MappedRecords(_Mapped, BuiltRecords):
    """A :func:`Map` over random-access records; made by that function."""

    fresh_arrays = True
    _same_hooks = (
        *("first_record_id", "make_order", "check_record_ids", "replacement_id", "row_lengths", "shape_index"),
        *("num_sequence_shards", "shard_costs"),
        *("cached_files", "ask_disk", "file_of", "file_names", "shard_lengths", "check_weights"),
    )

    def __init__(self, source: Any, function: Callable[..., Any], batched: bool) -> None:
        super().__init__(source, function, batched)
        self._source_rng = wants_rng(source)
        self.wants_rng = self._passes_rng or self._source_rng
        self._reader = SourceReader(source)

    def with_added(self, added: Sequence[tuple[int, dict[str, float]]]) -> MappedRecords:
        """See :class:`meshfeed._src.base.hooks.TakesWeights`; other sources lack the rest of that hook."""
        return MappedRecords(self._source.with_added(added), self._function, self._batched)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, record_id: SupportsIndex) -> Record:
        """The mapped record ``record_id``."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[Record]:
        """Several mapped records, which may differ in shape; without random numbers."""
        records = self._records(np.asarray(record_ids, np.int64), None)
        if not self._batched:
            pairs = zip(records, record_ids, strict=True)
            mapped = (self._one(record, int(record_id), None) for record, record_id in pairs)
            return [record if self._owns_arrays else own_record(record) for record in mapped]
        return _rows(self._apply_to(record_ids, records, None)) if records else []

    def read_batch(self, record_ids: RecordIds | Sequence[int], rngs: Rngs | None = None) -> PyTree:
        """Reads mapped records.

        Args:
          record_ids: int64[n], in any order, repeats allowed.
          rngs: one generator per record; for a function or decoder that takes ``rng=``.

        Returns:
          Pytree of arrays ``[n, ...]``.

        Raises:
          SourceError: the function returned None, or records that cannot be stacked.
          Any exception of the source or the function.
        """
        ids = np.asarray(record_ids, np.int64)
        records, own = self._drawn(ids, rngs)
        if self._batched:
            return self._apply_to(ids, records, own)
        stack = RecordStack(len(ids))
        for row, record in enumerate(records):
            stack.add(self._one(record, int(ids[row]), None if own is None else own[row]), int(ids[row]))
        return stack.take()[0]

    def read_drawn(self, record_ids: RecordIds, rngs: Rngs) -> list[Record]:
        """See :class:`meshfeed._src.base.hooks.DrawnItemsReader`."""
        records, own = self._drawn(record_ids, rngs)
        if self._batched:
            return _rows(self._apply_to(record_ids, records, own))
        of_each = zip(records, record_ids.tolist(), own or itertools.repeat(None), strict=False)
        return [own_record(self._one(*one)) for one in of_each]

    def _drawn(self, ids: RecordIds, rngs: Rngs | None) -> tuple[Sequence[Record], Rngs | None]:
        """The records of the source, and the generators for the function if it takes them."""
        records = self._records(ids, rngs)
        return records, [_own_rng(rng) for rng in rngs] if rngs is not None and self._passes_rng else None

    def _apply_to(self, record_ids: RecordIds | Sequence[int], records: Sequence[Record], rngs: Rngs | None) -> PyTree:
        try:
            return self._apply(records, rngs)
        except RowError as error:
            raise in_record(self._source, int(record_ids[error.row]), error.reason) from error.reason
        except SourceError:
            raise
        except Exception as error:
            what, number = describe_record(self._source, int(record_ids[0])), len(records)
            error.add_note(f"while mapping {what if number == 1 else f'{number} records (first: {what})'}")
            if isinstance(error, TypeError | AttributeError):
                error.add_note(
                    "batched=True passes a list of records; leave it out for a function that takes a single one"
                )
            raise

    def _one(self, record: Record, record_id: int, rng: np.random.Generator | None) -> Record:
        try:
            mapped = self._function(record) if rng is None else self._function(record, rng=rng)
        except StopIteration as error:
            raise stopped(f"the function of Map, for record {record_id},", record_id=record_id) from error
        except SourceError:
            raise
        except Exception as error:
            error.add_note(f"while mapping {describe_record(self._source, record_id)}")
            raise
        if mapped is None:
            raise SourceError(
                f"the function of Map returned None for {describe_record(self._source, record_id)}. Records can be dropped "
                "from streams only, since the number of random-access records is fixed. Return a record.",
                record_id=record_id,
            )
        return _with_arrays(mapped, keeps_empty=self._keeps_empty)

    def _records(self, ids: RecordIds, rngs: Rngs | None) -> Sequence[Record]:
        source = self._source
        if not len(ids):
            return []
        if rngs is not None and self._source_rng:
            return read_drawn(source, ids, rngs, self._reader)
        # Single records first: they may differ in shape, and read_batch would raise.
        if hooks.find(source, hooks.ItemsReader) is None and hooks.find(source, hooks.BatchReader) is not None:
            return _rows(own_batch(source.read_batch(ids), source, "read_batch"))
        records = read_items(source, ids)
        if self._owns_arrays or not returns_fresh(source, "__getitems__"):  # those of others have been copied
            return records
        return [own_record(record) for record in records]

    @property
    def as_list(self) -> Callable[[], MappedRecords]:
        """See :class:`meshfeed._src.base.hooks.ListsRecords`."""
        below = cast("hooks.ListsRecords", self._source).as_list
        return lambda: self.regrouped(below())

    @property
    def grouping(self) -> object:
        """See :class:`meshfeed._src.base.hooks.GroupsRecords`."""
        return cast("hooks.GroupsRecords", self._source).grouping, self._function, self._batched

    @property
    def ungrouped(self) -> Callable[[], RandomAccessSource]:
        """See :class:`meshfeed._src.base.hooks.GroupsRecords`."""
        return cast("hooks.GroupsRecords", self._source).ungrouped

    def regrouped(self, records: RandomAccessSource) -> MappedRecords:
        """Returns other records, grouped as those of the source if it groups them, and mapped."""
        groups = hooks.find(self._source, hooks.GroupsRecords)
        return MappedRecords(records if groups is None else groups.regrouped(records), self._function, self._batched)

    def fingerprint(self) -> JsonValue:
        """Identity: that of the source, and a digest of 4 mapped records unless the function takes ``rng=``."""
        return {"source": source_identity(self._source), "content": content_digest(self, Retry())}


class MappedStream(_Mapped):
    """A :func:`Map` over a stream; made by that function."""

    _converts = True
    _same_hooks = (
        *("check_lanes", "file_names", "mixture_config", "has_stages", "check_saved", "check_weights"),
        *("cut_version", "lane_lengths"),
    )

    def open(
        self, lane_index: int, num_lanes: int, epoch: int = 0, seed: int = 0, first_id: int = 0
    ) -> MappedLane | StackedMappedLane:
        """Lane ``lane_index`` of ``num_lanes`` of the source, mapped."""
        lane = hooks.open_lane(self._source, lane_index, num_lanes, epoch=epoch, seed=seed, first_id=first_id)
        decode = getattr(self._source, "decode", None)
        below = hooks.num_drawing(self._source)
        key = derive_key(seed, lane_index, _FUNCTION_KEY, *([below] if below else []))
        kind = StackedMappedLane if self._batched else MappedLane
        learn_dtypes_from = getattr(self._function, "learn_dtypes_from", None)  # that of Padded
        if learn_dtypes_from is not None:
            learn_dtypes_from(functools.partial(self._first_records, num_lanes, seed))
        return kind(self, lane, decode, (seed, lane_index, epoch), key, first_id)

    def _first_records(self, num_lanes: int, seed: int) -> Iterator[Record]:
        """The first records of the source, which are the same for every host and resume."""
        lane = self.open(0, num_lanes, seed=seed)
        with contextlib.closing(lane), contextlib.suppress(StopIteration):
            while True:
                yield lane._next()[0]

    @property
    def num_drawing(self) -> int:
        """See :class:`meshfeed._src.base.hooks.DrawsNumbers`."""
        return hooks.num_drawing(self._source) + self._passes_rng

    def bind(self, **settings: Any) -> MappedStream:
        """A copy with a feed's settings, over a mixture of streams; other streams lack the rest of ``StagedStream``."""
        return self._over(self._source.bind(**settings))

    def with_added(self, added: Sequence[tuple[int, dict[str, float]]]) -> MappedStream:
        """See :class:`meshfeed._src.base.hooks.TakesWeights`; other streams lack the rest of that hook."""
        return self._over(self._source.with_added(added))

    def with_cut(self, version: int) -> MappedStream:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`; other streams lack the rest of that hook."""
        return self._over(self._source.with_cut(version))

    def _over(self, source: Any) -> Self:
        other = copy.copy(self)
        other._source = source
        return other

    def fingerprint(self) -> JsonValue:
        """Identity: that of the source. A function that changes is not noticed."""
        return {"source": source_identity(self._source)}


class MappedLane:
    """One lane of a mapped stream.

    ``decode`` is the source's decoder, whose random numbers depend on ``place``: seed, lane index and epoch. Those of the
    function depend on ``key``. Both are those of the records from ``first_id`` on.
    """

    def __init__(
        self,
        mapped: MappedStream,
        lane: LaneIterator,
        decode: Callable[..., Record] | None,
        place: tuple[int, int, int],
        key: int,
        first_id: int,
    ) -> None:
        self._mapped, self._lane, self._decode, self._place, self._key = mapped, lane, decode, place, key
        self._first_id = first_id
        self._decode_rng = hooks.accepts_keyword(decode, "rng")
        self._read = 0  # records of the source, including dropped ones

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        while True:
            record, rng = self._next()
            function = self._mapped._function
            record = record if self._mapped._owns_arrays else own_record(record)
            try:
                mapped = function(record) if rng is None else function(record, rng=rng)
            except StopIteration as error:
                raise self._stopped("the function of Map", self._read - 1) from error
            if mapped is not None:
                keeps_empty = self._mapped._keeps_empty
                return _with_arrays(mapped, keeps_empty=keeps_empty) if self._mapped._converts else mapped
            staged = hooks.find(self._mapped._source, hooks.StagedStream)
            if staged is not None and staged.has_stages:
                raise SourceError(
                    f"the function of Map returned None for record {self._read - 1} of lane {self._place[1]}, which is of a "
                    "mixture whose weights change at steps, and these count its records. Drop records of its components "
                    "instead: Mixture({name: Map(stream, function)}, weights=…).",
                    lane_index=self._place[1],
                )

    def _next(self) -> tuple[Record, np.random.Generator | None]:
        """The next record of the source, and the generator for the function if it takes one."""
        record = next(self._lane)
        seed, lane_index, epoch = self._place
        record_id = self._first_id + self._read
        if self._decode is not None:
            extra = {"rng": philox(derive_key(seed, lane_index), epoch, record_id)} if self._decode_rng else {}
            try:
                record = self._decode(record, **extra)
            except StopIteration as error:
                raise self._stopped("decode", self._read) from error
        # By the number in the source, so a record that is dropped does not change the numbers of the next.
        rng = philox(self._key, epoch, record_id) if self._mapped._passes_rng else None
        self._read += 1
        return record, rng

    def _stopped(self, function: str, record: int) -> SourceError:
        lane_index = self._place[1]
        return stopped(f"{function}, for record {record} of lane {lane_index},", lane_index=lane_index)

    def coming_files(self, num_records: int) -> Iterator[Sequence[hooks.CachedFile]] | None:
        """The files that the source's lane will read; see :class:`meshfeed._src.base.hooks.PlansFiles`."""
        plans = hooks.find(self._lane, hooks.PlansFiles)
        return None if plans is None else plans.coming_files(num_records)

    @property
    def reads_again(self) -> bool:
        """See :class:`meshfeed._src.base.hooks.ReadsAgain`."""
        return hooks.reads_again(self._lane)

    def get_state(self) -> JsonValue:
        """Records read from the source, and its lane's state if it has one."""
        resumable = hooks.find(self._lane, hooks.Resumable)
        return {"read": self._read, "source": None if resumable is None else [resumable.get_state()]}

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken; reads and drops if the source's lane has no state."""
        resumable = hooks.find(self._lane, hooks.Resumable)
        if state["source"] is not None and resumable is not None:
            resumable.set_state(state["source"][0])
        else:
            # Of the source: the function need not run again.
            drop(self._lane, state["read"], f"mapped lane {self._place[1]}")
        self._read = state["read"]

    def close(self) -> None:
        """Closes the source's lane."""
        hooks.close(self._lane)


class StackedMappedLane(MappedLane):
    """One lane of a stream mapped in batches."""

    fresh_arrays = True

    def __next__(self) -> Record:
        return _rows(self.next_batch(1))[0]

    def next_batch(self, num_records: int) -> PyTree:
        """Up to ``num_records`` mapped records as arrays ``[n, ...]``, n at least 1.

        Raises:
          StopIteration: the source's lane has ended.
        """
        records: list[Record] = []
        rngs: list[np.random.Generator] = []
        while len(records) < num_records:
            try:
                record, rng = self._next()
            except StopIteration:
                if not records:
                    raise
                break
            # The lane or its decoder may reuse the memory of one record for the next.
            is_fresh = self._decode is None and returns_fresh(self._lane, "__next__")
            records.append(record if is_fresh else own_record(record))
            if rng is not None:
                rngs.append(rng)
        try:
            return self._mapped._apply(records, rngs if self._mapped._passes_rng else None, self._place[1])
        except RowError as error:
            _, lane_index, epoch = self._place
            which = f"record {self._read - len(records) + error.row} of lane {lane_index} in epoch {epoch}"
            raise SourceError(f"{which}: {error.reason}", lane_index=lane_index) from error.reason


def _with_arrays(returned: PyTree, num_rows: int | None = None, *, keeps_empty: bool = False) -> PyTree:
    """Returns the result of a function with arrays in place of lists of numbers, which JAX takes for nodes of a pytree.

    Args:
      returned: the result. Tuples, and lists of anything else, stay nodes.
      num_rows: for a batch, its records: a list of so many arrays is stacked too.
      keeps_empty: whether an empty list becomes an array of numpy's dtype.

    Raises:
      SourceError: a list of numbers is ragged, or empty without ``keeps_empty``.
    """
    if isinstance(returned, dict):
        return {
            name: _with_arrays(value, num_rows, keeps_empty=keeps_empty) if isinstance(value, dict | list) else value
            for name, value in returned.items()
        }
    if not isinstance(returned, list) or not _is_array(returned, num_rows):
        return returned
    try:
        array = np.array(returned)
    except (ValueError, OverflowError) as error:  # lists of different lengths; integers beyond 64 bits
        raise _not_rectangular(returned, str(error)) from error
    if not array.size and (array.ndim > 1 or not keeps_empty):
        raise _not_rectangular(returned, "it is empty, so its dtype is unknown")
    return array


def _is_array(value: list[Any], num_rows: int | None) -> bool:
    """Whether a list holds numbers at its innermost level, or is one array per record of a batch."""
    if num_rows == len(value) and all(isinstance(item, np.ndarray) for item in value):
        return True
    return all(isinstance(item, _NUMBERS) or (isinstance(item, list) and _is_array(item, None)) for item in value)


def _not_rectangular(value: list[Any], reason: str) -> SourceError:
    return SourceError(
        f"the function of Map returned a list that is no array: {shorten(repr(value), 80)} ({reason}). Expected arrays, or "
        "lists of numbers of one length. Pad the list and return numpy.array(values, dtype), or pack documents with "
        "meshfeed.sources.Packed."
    )


_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def _own_rng(rng: np.random.Generator) -> np.random.Generator:
    """The generator, past all numbers that the source's decoder and the functions of Maps below draw from it."""
    rng.bit_generator.advance(1 << 128)  # type: ignore[attr-defined] # Philox has it
    return rng


def _rows(batch: PyTree) -> list[Record]:
    return [trees.map_leaves(lambda leaf, row=row: leaf[row], batch) for row in range(num_rows(batch))]
