"""Several sources read as one: which of them read alike, one call for those, and records compared and joined to a batch."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.groups import group_by
from meshfeed._src.base.types import ColumnSlices, PyTree, Record, RecordIds, Rngs
from meshfeed._src.reading.host_batch import spec_of_batch
from meshfeed._src.reading.items import decode_each
from meshfeed._src.reading.records import SourceReader, checked_lengths, file_of, reads_columns, wants_rng
from meshfeed._src.reading.stacking import RecordSpec, check_unmasked
from meshfeed._src.sources.built import BuiltRecords
from meshfeed._src.sources.documents import read_drawn, read_items

Part = tuple[str, np.ndarray[Any, Any], PyTree]
"""Name of a source, its rows of the batch (int64[k], ascending), and its records, a pytree of arrays ``[k, ...]``."""

R = TypeVar("R")
NO_IDS = np.empty(0, np.int64)


class SeveralSources(BuiltRecords):
    """The records of several random-access sources; a subclass numbers them.

    A read groups the records and reads each group once, in the caller's thread. Sources that read and decode alike, such
    as ArrayRecord files with one decoder, are one group: 35 of them cost about as much as one. Groups that read alike but
    have decoders of their own are read with one call too, and then decoded one by one.

    Args:
      sources: name → source.
      noun: what one of them is, such as "component", for messages.
      whole: what they make, such as "mixture".

    Attributes:
      wants_rng: whether the decoder of one of them takes random numbers.
      reads_columns: whether all of them can read part of each leaf.
    """

    fresh_arrays = True  # reads copy memory that a source may reuse

    def __init__(self, sources: dict[str, Any], noun: str, whole: str) -> None:
        self._named, self._names, self._sources = sources, tuple(sources), tuple(sources.values())
        self._noun, self._whole = noun, whole
        self.wants_rng = any(map(wants_rng, self._sources))
        self.reads_columns = all(map(reads_columns, self._sources))
        if self.reads_columns:  # column slices come from the first source's shapes and would truncate a wider one
            Joiner(noun, whole).join([(name, NO_IDS, _no_rows(source)) for name, source in sources.items()], 0)
        self._joiner = Joiner(noun, whole)
        self._readers = tuple(map(SourceReader, self._sources))
        groups, self._group_of, first_in_group = _concatenate(self._sources, _decoded_alike)
        calls, self._call_of, first_in_call = _concatenate(groups, _read_alike)
        self._group_readers, self._call_readers = tuple(map(SourceReader, groups)), tuple(map(SourceReader, calls))
        self._first_id = first_in_group + first_in_call[self._group_of]
        self._joins_calls = len(calls) < len(self._sources)
        self._groups_of_call = np.bincount(self._call_of)
        readers = (*self._readers, *self._group_readers, *self._call_readers)
        self._rng_readers = {reader for reader in readers if wants_rng(reader.source)}
        self._compared = np.zeros(len(self._sources), bool)  # whether a source's structure has been checked
        self._whole_lengths: dict[int, np.ndarray] = {}  # source → the lengths of its records, for row_lengths

    def _below(self) -> Iterable[Any]:
        return self._sources

    @abc.abstractmethod
    def _located(self, record_ids: RecordIds | Sequence[int]) -> tuple[RecordIds, RecordIds]:
        """Numbers of the sources of records, and ids within them, int64[n] each; checks that they exist."""

    def element_shapes(self) -> PyTree:
        """Pytree of ``jax.ShapeDtypeStruct`` of one record, from the first source; only if ``reads_columns``."""
        return self._sources[0].element_shapes()

    def read_batch(
        self, record_ids: RecordIds | Sequence[int], columns: ColumnSlices | None = None, rngs: Rngs | None = None
    ) -> PyTree:
        """Reads records, decoded and stacked.

        Args:
          record_ids: int64[n], in any order, repeats allowed.
          columns: leaf path → slices of the dimensions after the first; only if ``reads_columns``.
          rngs: one generator per record, for decoders that take ``rng=``.

        Returns:
          Pytree of arrays ``[n, ...]`` in memory that only the caller can write.

        Raises:
          SourceError: records of two sources differ; names the sources and the leaf.
          Any error that a source raises, with a note naming it; and that of an id that does not exist.
        """
        numbers, ids = self._located(record_ids)
        # A source's first records are read by source, to compare their structure under its own name.
        spec = self._joiner.spec
        if self._joins_calls and columns is None and spec is not None and self._compared[numbers].all():
            states = [rng.bit_generator.state for rng in rngs or ()]
            try:
                return self._read_together(numbers, ids + self._first_id[numbers], rngs, spec)
            except Exception:  # read again by source, to name the one that fails
                for rng, state in zip(rngs or (), states, strict=True):
                    rng.bit_generator.state = state
        parts: list[Part] = []
        for number, rows in group_by(numbers):
            try:
                tree = self._readers[number].read(
                    ids[rows], self._own(rngs, self._readers[number], rows), columns=columns
                )
            except Exception as error:
                error.add_note(f"in {self._noun} {self._names[number]!r} of the {self._whole}")
                raise
            parts.append((self._names[number], rows, tree))
        batch = self._joiner.join(parts, len(ids), whole=columns is None)
        if columns is None:
            self._compared[numbers] = True
        return batch

    def _read_together(self, numbers: RecordIds, ids: RecordIds, rngs: Rngs | None, spec: RecordSpec) -> PyTree:
        """Reads with one call what reads alike; ``ids`` are those in the source of the call."""
        groups, batch = self._group_of[numbers], None
        for call, rows in group_by(self._call_of[groups]):
            reader, of_call, mine = self._call_readers[call], ids[rows], groups[rows]
            several = self._groups_of_call[call] > 1
            if several and self._group_readers[mine[0]].decodes_batches:
                batch = batch or Filling(spec, len(ids))
                self._decode_apart(reader, mine, of_call, rows, rngs, batch)
                continue
            own = self._own(rngs, reader, rows)
            tree = self._decode_each(reader, mine, of_call, rows, rngs) if several else reader.read(of_call, own)
            if len(rows) == len(ids) and spec.fits(tree, len(ids)):
                return tree  # one call fills the batch: no copy
            batch = batch or Filling(spec, len(ids))
            batch.add(rows, tree)
        assert batch is not None
        return batch.tree

    def _decode_each(
        self, reader: SourceReader, groups: RecordIds, ids: RecordIds, rows: RecordIds, rngs: Rngs | None
    ) -> PyTree:
        """Reads records with one call, and decodes each with the decoder of its group."""
        decoders = [self._group_readers[group] for group in groups.tolist()]
        own = None
        if rngs is not None:
            pairs = zip(rows.tolist(), decoders, strict=True)
            own = [rngs[row] if decoder in self._rng_readers else None for row, decoder in pairs]
        raw = cast("Sequence[bytes]", reader.read_undecoded(ids, as_rows=False))
        return decode_each([decoder.decode_one for decoder in decoders], raw, ids, own, reader.describe)

    def _decode_apart(
        self,
        reader: SourceReader,
        groups: RecordIds,
        ids: RecordIds,
        rows: RecordIds,
        rngs: Rngs | None,
        batch: Filling,
    ) -> None:
        """Reads records with one call, decodes those of each group together, and adds them as ``rows`` of a batch."""
        order = np.argsort(groups, kind="stable")
        groups, ids, rows = groups[order], ids[order], rows[order]
        cuts = [0, *(np.flatnonzero(groups[1:] != groups[:-1]) + 1).tolist(), len(rows)]
        decoders = [self._group_readers[group] for group in groups[cuts[:-1]].tolist()]
        as_rows = decoders[0].takes_rows and (rngs is None or self._rng_readers.isdisjoint(decoders))
        undecoded = reader.read_undecoded(ids, as_rows=as_rows)
        for decoder, (start, stop) in zip(decoders, itertools.pairwise(cuts), strict=True):
            part = slice(start, stop)
            own = self._own(rngs, decoder, rows[part])
            batch.add(rows[part], decoder.decode_borrowed(undecoded[part], ids[part], own))

    def _own(self, rngs: Rngs | None, reader: SourceReader, rows: RecordIds) -> Rngs | None:
        """The generators of ``rows``, if the decoder takes them."""
        return [rngs[row] for row in rows.tolist()] if rngs and reader in self._rng_readers else None

    def _in_order(self, numbers: RecordIds, read: Callable[[Any, RecordIds], Sequence[R]]) -> list[R]:
        """Returns what ``read(source, rows)`` returns for the rows of each source, by row.

        Raises:
          Any error that a source raises, with a note naming it.
        """
        by_row: dict[int, R] = {}
        for number, rows in group_by(numbers):
            try:
                found = read(self._sources[number], rows)
            except Exception as error:
                error.add_note(f"in {self._noun} {self._names[number]!r} of the {self._whole}")
                raise
            by_row |= zip(rows.tolist(), found, strict=True)
        return [by_row[row] for row in range(len(numbers))]

    def __getitems__(self, record_ids: Sequence[int]) -> list[Record]:
        """Several records, in the order of ``record_ids``; they may differ in shape."""
        numbers, ids = self._located(record_ids)
        return self._in_order(numbers, lambda source, rows: read_items(source, ids[rows]))

    def read_drawn(self, record_ids: RecordIds, rngs: Rngs) -> list[Record]:
        """See :class:`meshfeed._src.base.hooks.DrawnItemsReader`."""
        numbers, ids = self._located(record_ids)
        return self._in_order(
            numbers, lambda source, rows: read_drawn(source, ids[rows], [rngs[row] for row in rows.tolist()])
        )

    def cached_files(self, record_ids: RecordIds) -> list[hooks.CachedFile] | None:
        """The files that hold these records and are read through a cache; None if no source has one."""
        if not self._cached:
            return None
        numbers, ids = self._located(record_ids)
        groups = [(self._cached[number], rows) for number, rows in group_by(numbers) if number in self._cached]
        return [file for source, rows in groups for file in source.cached_files(ids[rows]) or ()]

    @functools.cached_property
    def _cached(self) -> dict[int, hooks.CachesFiles]:
        """The sources that read files through a cache."""
        found = enumerate(map(caching, self._sources))
        return {number: source for number, source in found if source is not None}

    def ask_disk(self, record_ids: RecordIds) -> bool | None:
        """See :class:`meshfeed._src.base.hooks.ReadsDisk`."""
        if not self._on_disk:
            return None
        numbers, ids = self._located(record_ids)
        ids, calls = ids + self._first_id[numbers], self._call_of[self._group_of[numbers]]
        missing = False
        for call, rows in group_by(calls):
            if call in self._on_disk:
                missing |= bool(self._on_disk[call].ask_disk(ids[rows]))
        return missing

    @functools.cached_property
    def _on_disk(self) -> dict[int, hooks.ReadsDisk]:
        """The sources of calls that read files of this machine."""
        found = enumerate(hooks.on_disk(reader.source) for reader in self._call_readers)
        return {call: source for call, source in found if source is not None}

    def row_lengths(self, record_ids: RecordIds) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lengths of all segments of records, and the first segment of each record; reads nothing.

        Raises:
          SettingsError: a source does not know them.
        """
        numbers, ids = self._located(record_ids)
        by_row: dict[int, np.ndarray] = {}
        for number, rows in group_by(numbers):
            known = hooks.find(self._sources[number], hooks.RowLengths)
            whole = hooks.find(self._sources[number], hooks.KnowsLengths) if known is None else None
            if whole is not None:
                if number not in self._whole_lengths:  # once: a view makes them from those of its source
                    self._whole_lengths[number] = checked_lengths(self._sources[number], whole.lengths())
                by_row |= zip(rows.tolist(), self._whole_lengths[number][ids[rows]][:, None], strict=True)
                continue
            if known is None:
                raise SettingsError(
                    f"balance= needs the lengths of records, which {self._noun} {self._names[number]!r} does not know. Use "
                    f"Packed for all {self._noun}s.",
                    setting="balance",
                )
            lengths, splits = known.row_lengths(ids[rows])
            by_row |= zip(rows.tolist(), np.split(lengths, splits[1:-1]), strict=True)
        parts = [by_row[row] for row in range(len(ids))]
        return np.concatenate(parts), np.cumsum([0, *map(len, parts)])

    @functools.cached_property
    def num_sequence_shards(self) -> int | None:
        """Shards of the sequence axis, if all sources have rows for the same number; see ``hooks.SequenceShards``."""
        found = [hooks.find(source, hooks.SequenceShards) for source in self._sources]
        numbers = {None if source is None else source.num_sequence_shards for source in found}
        return numbers.pop() if len(numbers) == 1 else None

    def shard_costs(self, record_ids: RecordIds) -> np.ndarray:
        """The work of each shard of the sequence axis, int64[n, shards]; all sources know it."""
        numbers, ids = self._located(record_ids)
        return np.stack(self._in_order(numbers, lambda source, rows: source.shard_costs(ids[rows])))

    def file_of(self, record_id: int) -> str:
        """The source that holds a record, and the file if known."""
        (number,), (own_id,) = self._located([record_id])
        path = file_of(self._sources[number], int(own_id))
        return f"{self._noun} {self._names[number]!r}" + (f", {path}" if path else "")

    def __getstate__(self) -> dict[str, Any]:
        # A copy takes the structure from its own first batch, and lengths only where rows are ordered.
        return {**self.__dict__, "_joiner": Joiner(self._noun, self._whole), "_whole_lengths": {}}


def _concatenate(
    sources: Sequence[Any], join: Callable[[Any, list[Any]], Any]
) -> tuple[tuple[Any, ...], RecordIds, RecordIds]:
    """Joins sources.

    Args:
      sources: the sources.
      join: returns one source of the records of its arguments, or None if they cannot be joined.

    Returns:
      The groups, and for each source: its group and the id of its first record there, int64[num_sources] each.
    """
    members: list[list[Any]] = []
    group_of, first_id = [], []
    for source in sources:
        alike = (n for n, group in enumerate(members) if join(source, [group[0]]) is not None)
        number = next(alike, len(members))
        if number == len(members):
            members.append([])
        group_of.append(number)
        first_id.append(sum(map(len, members[number])))
        members[number].append(source)
    groups = tuple(join(first, rest) if rest else first for first, *rest in members)
    return groups, np.array(group_of, np.int64), np.array(first_id, np.int64)


def _decoded_alike(first: Any, others: list[Any]) -> Any:
    joinable = hooks.find(first, hooks.Concatenates)
    return None if joinable is None else joinable.concatenate(others)


def _read_alike(first: Any, others: list[Any]) -> Any:
    joinable = hooks.find(first, hooks.ConcatenatesRaw)
    if joinable is None or not all(hooks.find(source, hooks.RawReader) for source in (first, *others)):
        return None
    readers = map(SourceReader, (first, *others))
    if len({(reader.takes_rows, reader.decodes_batches) for reader in readers}) > 1:
        return None  # each way of decoding is a call of its own
    return joinable.concatenate_raw(others)


def _no_rows(source: Any) -> PyTree:
    return trees.map_leaves(lambda leaf: np.empty((0, *leaf.shape), leaf.dtype), source.element_shapes())


def caching(source: object) -> hooks.CachesFiles | None:
    """The source if it reads files through a cache, otherwise None."""
    files = hooks.find(source, hooks.CachesFiles)
    return None if files is None or files.cached_files(NO_IDS) is None else files


class Joiner:
    """Joins the sources' parts into batches; all parts must match the structure of the first one seen.

    Args:
      noun: what one source is, such as "component", for messages.
      whole: what they make, such as "mixture".
    """

    def __init__(self, noun: str, whole: str) -> None:
        self._noun, self._whole = noun, whole
        self._first: tuple[RecordSpec, str] | None = None  # and the source that has this structure

    def join(self, parts: Sequence[Part], num_rows: int, *, whole: bool = True) -> PyTree:
        """Joins parts that together cover each row once into one batch ``[num_rows, ...]``.

        Args:
          parts: at least one part.
          num_rows: rows in the batch.
          whole: whether the leaves hold all columns. If not, the parts are compared only with each other.

        Raises:
          SourceError: records of two sources differ in structure, shape or dtype; names the sources and the leaf.
        """
        first = self._first if whole else None
        for part in parts:
            first = self._check_alike(part, first)
        if whole:
            self._first = first
        if len(parts) == 1 and len(parts[0][1]) == num_rows:  # one source fills the batch: no copy
            return parts[0][2]
        assert first is not None
        joined = first[0].empty(num_rows)
        outputs = trees.leaves(joined)
        for _, rows, tree in parts:
            for output, leaf in zip(outputs, trees.leaves(tree), strict=True):
                output[rows] = leaf
        return joined

    @property
    def spec(self) -> RecordSpec | None:
        """The structure of all parts; None before the first one."""
        return None if self._first is None else self._first[0]

    def _check_alike(self, part: Part, first: tuple[RecordSpec, str] | None) -> tuple[RecordSpec, str]:
        """``first``, or the part's structure and source if there is none yet."""
        name, rows, tree = part
        if first is not None and first[0].fits(tree, len(rows)):
            return first
        spec = spec_of_batch(tree, len(rows), what=f"{self._noun} {name!r}")
        if first is not None and spec != first[0]:
            raise SourceError(self._difference(name, spec, first[1], first[0]))
        return first or (spec, name)

    def _difference(self, name: str, spec: RecordSpec, other: str, other_spec: RecordSpec) -> str:
        noun = self._noun
        who = (
            f"records of {noun} {name!r} differ from its first"
            if name == other
            else f"{noun}s {name!r} and {other!r} have unlike records"
        )
        return (
            f"{who}: {_only_in(spec, other_spec)} in {name!r}, {_only_in(other_spec, spec)} in {other!r}. Records of a "
            f"{self._whole} must be alike: rename, pad or cast them in the {noun}'s decode (nothing is promoted silently)."
        )


class Filling:
    """A batch ``[num_rows, ...]`` of records of a known structure, which is filled part by part.

    Attributes:
      tree: the batch; rows that have not been added are undefined.
    """

    def __init__(self, spec: RecordSpec, num_rows: int) -> None:
        self.tree = spec.empty(num_rows)
        self._spec, self._outputs = spec, trees.leaves(self.tree)

    def add(self, rows: RecordIds, tree: PyTree) -> None:
        """Copies records to ``rows``.

        Raises:
          SourceError: the records have another structure, shape or dtype, or masked values.
        """
        leaves, treedef = trees.flatten(tree)
        if treedef != self._spec.treedef:
            raise SourceError(f"a batch of {treedef}; expected {self._spec.treedef}")
        for output, leaf, wanted in zip(self._outputs, leaves, self._spec.leaves, strict=True):
            if type(leaf) is not np.ndarray:
                check_unmasked(leaf, wanted.describe())
                leaf = np.asarray(leaf)
            if leaf.dtype != wanted.dtype or leaf.shape != (len(rows), *wanted.shape):
                raise SourceError(f"a leaf {leaf.dtype}{list(leaf.shape)}; expected {wanted.describe()}")
            output[rows] = leaf


def _only_in(spec: RecordSpec, other: RecordSpec) -> str:
    """The leaves of records that others do not have, or the structure of the records if only that differs."""
    if set(spec.leaves) == set(other.leaves):
        return str(spec.treedef)  # an OrderedDict, for example, does not sort its keys
    return ", ".join(leaf.describe() for leaf in spec.leaves if leaf not in other.leaves) or "no such leaf"
