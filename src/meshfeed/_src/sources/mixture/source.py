"""Mixes several sources into one, with shares that are exact in every block."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

import jax
import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.types import ColumnSlices, JsonValue, PyTree, Record, RecordIds, Rngs, public
from meshfeed._src.order import permutation
from meshfeed._src.order.mixture import (
    MixtureOrder,
    Stage,
    StagedWeights,
    block_counts,
    check_all_named,
    group_by,
    join_ids,
    nest_stages,
    parse_weights,
    split_ids,
)
from meshfeed._src.reading.records import SourceReader, file_of, wants_rng
from meshfeed._src.sources.checks import is_count
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.mixture.lanes import StreamMixture
from meshfeed._src.sources.mixture.parts import NO_IDS, Joiner, Parts, caching
from meshfeed._src.sources.recognize import as_source

T = TypeVar("T")


@public("meshfeed.sources")
@hides_own_frames
def Mixture(
    components: Mapping[str, Any],
    weights: Any,
    block: int = 2048,
    *,
    on_end: str = "repeat",
    shuffle: bool | int = False,
    take: Mapping[str, int | float] | None = None,
    repeat: Mapping[str, int] | None = None,
) -> RandomMixture | StreamMixture:
    """Mixes several sources into one, by weight.

    Every block of ``block`` records holds the same number of records of each component (the weights' shares, rounded by
    largest remainder), in an order specific to the block. Each component keeps its own order and its own epochs: one
    that is drawn from twice as fast as another of the same length starts its second epoch when the other is halfway
    through its first. The records of step k depend only on k.

    Weights may change at given steps: ``[(0, {"web": 3, "code": 1}), (5000, {"web": 1})]``. A state can resume as long
    as the stages that have begun are unchanged. Later stages may change, and components may be added at the end of the
    dict.

    If every component is random access, so is the mixture: a record id is ``component << 48 | id``, with components
    numbered in the order of the dict. If any component is a stream, all are read as lanes and each lane is mixed
    independently.

    Args:
      components: name → source, or any object that the feed accepts as one. All records must have the same structure.
      weights: name → relative weight; or stages ``[(first_step, {name: weight}), ...]``. Every component must be named
        in at least one stage. A component with weight 0 in a stage, or not named in it, is not read in that stage.
      block: number of records in which the shares are exact; a weight below ``1 / block`` of the total is an error.
      on_end: what happens when a component has been read ``num_epochs`` times. ``"repeat"``: it repeats until every
        component of the last stage has been read ``num_epochs`` times in full, which ends the mixture. ``"stop"``: the
        mixture ends.
      shuffle: order of random-access components that are read as lanes, like the feed's ``shuffle`` (which streams do
        not support). Not for random-access mixtures, which use the feed's.
      take: name → the records of a component that are used, from its first: an int, or a float up to 1.0 for a fraction
        of a random-access component.
      repeat: name → how often a component is read in full per epoch of the mixture; 1 if not named. It determines when
        the mixture ends, and the weights how often records are drawn.

    A component may be a mixture itself: its components become those of this mixture, named ``outer/inner``, and share
    the weight of the inner mixture by its own weights. ``block`` and ``on_end`` are those of the outer mixture.

    Returns:
      A random-access source if every component is one, otherwise a stream source.

    Raises:
      SettingsError: ``weights``, ``block``, ``on_end``, ``shuffle``, ``take`` or ``repeat`` is invalid.
      SourceError: no component, or a component that is not a source of records.
    """
    if not isinstance(components, Mapping) or not components:
        raise SourceError(
            f"Mixture got {type(components).__name__} {components!r:.80}. Expected a dict of at least one source, "
            'such as Mixture({"web": web, "code": code}, weights={"web": 3, "code": 1}).'
        )
    sources: dict[str, Any] = {}
    for name, component in components.items():
        if not isinstance(name, str) or not name:
            raise SourceError(f"Mixture got a component named {name!r}. Expected a string that is not empty.")
        source = as_source(component)
        if isinstance(source, HostBatches):
            raise SourceError(
                f"component {name!r} is batches of this host. Expected a source of records. Pass records."
            )
        if hooks.find(source, hooks.NumbersRecords) is not None and not isinstance(source, RandomMixture):
            raise SourceError(
                f"component {name!r} is of kind {getattr(source, 'kind', type(source).__name__)!r}, which orders its records "
                "itself. Expected a source of plain records: pad them with Padded instead of Buckets, and map the "
                "components of a mixture instead of the mixture."
            )
        sources[name] = source
    given = list(sources)
    sources, stages, parts = _flatten(sources, parse_weights(weights, given), Parts.of(sources, take, repeat))
    names = list(sources)
    if not is_count(block):
        raise SettingsError(f"block={block!r}; it takes a number of records of at least 1.", setting="block")
    for _, stage_weights in stages:
        block_counts(stage_weights, names, int(block))  # raises if a weight is too small for the block
    check_all_named(weights, given)
    if on_end not in ("repeat", "stop"):
        raise SettingsError(f"on_end={on_end!r}; it takes 'repeat' or 'stop'.", setting="on_end")
    if any(hooks.is_stream(source) for source in sources.values()):
        return StreamMixture(sources, stages, int(block), on_end, shuffle, parts)
    if shuffle is not False:
        raise SettingsError(
            f"shuffle={shuffle!r} of a Mixture is for mixtures with a stream among them. All components here are "
            "read at random: pass shuffle= to the feed.",
            setting="shuffle",
        )
    return RandomMixture(sources, stages, int(block), on_end, parts)


def _flatten(
    sources: dict[str, Any], stages: StagedWeights, parts: Parts
) -> tuple[dict[str, Any], StagedWeights, Parts]:
    """Replaces components that are mixtures by their own components."""
    for name, source in list(sources.items()):
        if not isinstance(source, RandomMixture | StreamMixture):
            continue
        if name in parts.take or name in parts.repeat:
            raise SettingsError(
                f"component {name!r} is a mixture, to which take= and repeat= do not apply. Give them to that mixture.",
                setting="take" if name in parts.take else "repeat",
            )
        inner = _within(name, source.components)
        if clash := sorted(inner.keys() & sources.keys()):
            raise SourceError(f"the component {clash[0]!r} is named twice: also as a part of {name!r}. Rename one.")
        sources = {
            key: component
            for outer in sources
            for key, component in (inner if outer == name else {outer: sources[outer]}).items()
        }
        stages = nest_stages(stages, name, source.stages)
        own = source.parts
        parts = Parts(parts.take | _within(name, own.take), parts.repeat | _within(name, own.repeat))
    return sources, stages, parts


def _within(outer: str, named: Mapping[str, T]) -> dict[str, T]:
    return {f"{outer}/{name}": value for name, value in named.items()}


def _concatenate(sources: Sequence[Any]) -> tuple[tuple[Any, ...], RecordIds, RecordIds]:
    """Joins the sources that read and decode alike.

    Returns:
      The groups, and for each source: its group and the id of its first record there, int64[num_sources] each.
    """
    members: list[list[Any]] = []
    group_of, first_id = [], []
    for source in sources:
        joinable = hooks.find(source, hooks.Concatenates)
        alike = (n for n, group in enumerate(members) if joinable and joinable.concatenate([group[0]]) is not None)
        number = next(alike, len(members))
        if number == len(members):
            members.append([])
        group_of.append(number)
        first_id.append(sum(map(len, members[number])))
        members[number].append(source)
    groups = tuple(first.concatenate(rest) if rest else first for first, *rest in members)
    return groups, np.array(group_of, np.int64), np.array(first_id, np.int64)


def _no_rows(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: np.empty((0, *leaf.shape), leaf.dtype), shapes)


class RandomMixture:
    """A :func:`Mixture` of random-access sources; made by that function.

    A read groups the ids and reads each group once per batch, in the caller's thread. Components that read and decode
    alike, such as ArrayRecord files with one decoder, are one group: 35 of them cost about as much as one. Others are
    groups of their own.
    """

    kind = "mixture"
    fresh_arrays = True  # SourceReader copies memory that a component may reuse

    def __init__(
        self, components: Mapping[str, Any], stages: StagedWeights, block: int, on_end: str, parts: Parts
    ) -> None:
        self.components, self.stages, self.parts = dict(components), stages, parts
        self._names = tuple(components)
        self._sources = tuple(components.values())
        self._block, self._on_end = block, on_end
        self.wants_rng = any(map(wants_rng, self._sources))
        self.reads_columns = all(getattr(source, "reads_columns", False) for source in self._sources)
        if self.reads_columns:  # column slices come from the first component's shapes and would truncate a wider one
            Joiner().join([(name, NO_IDS, _no_rows(source.element_shapes())) for name, source in components.items()], 0)
        self._joiner = Joiner()
        self._lengths = np.array([parts.length(name, source) for name, source in components.items()], np.int64)
        groups, self._group_of, self._first_id = _concatenate(self._sources)
        self._readers, self._group_readers = tuple(map(SourceReader, self._sources)), tuple(map(SourceReader, groups))
        self._compared = np.zeros(len(self._sources), bool)  # whether a component's structure has been checked

    def __repr__(self) -> str:
        lengths = zip(self._names, self._lengths.tolist(), strict=True)
        return f"Mixture({', '.join(f'{name}: {length:,} records' for name, length in lengths)})"

    def __len__(self) -> int:
        """Total number of records of all components."""
        return int(self._lengths.sum())

    def __getitem__(self, record_id: Any) -> Record:
        """The record with the id ``component << 48 | id``, as views of a batch of one."""
        return jax.tree.map(lambda leaf: leaf[0], self.read_batch([record_id]))

    @property
    def first_record_id(self) -> int:
        """Id of the record from which to infer the structure: the first of the first stage's first component."""
        return join_ids(self._names.index(next(iter(self.stages[0][1]))), 0)

    @functools.cached_property
    def _identities(self) -> dict[str, JsonValue]:
        return self.parts.identities(self.components)

    def make_order(self, **settings: Unpack[hooks.OrderSettings]) -> MixtureOrder:
        """The order of the mixture for a feed's settings."""
        return MixtureOrder(
            dict(zip(self._names, self._lengths.tolist(), strict=True)),
            stages=[Stage(settings["position_of_step"](step), weights, step) for step, weights in self.stages],
            block=self._block,
            shuffle=settings["shuffle"],
            seed=settings["seed"],
            num_epochs=settings["num_epochs"],
            on_end=self._on_end,
            repeat=self.parts.repeat,
            identities=self._identities,
        )

    def check_record_ids(self, record_ids: RecordIds) -> None:
        """Checks that ids exist.

        Raises:
          SourceError: an id refers to a component that does not exist, or to a record past its end.
        """
        self._located(record_ids)

    def _located(self, record_ids: RecordIds | Sequence[int]) -> tuple[RecordIds, RecordIds]:
        """Numbers of the components, and ids within them; checks them."""
        numbers, ids = split_ids(np.asarray(record_ids, np.int64))
        known = (numbers >= 0) & (numbers < len(self._sources))
        if not known.all():
            wrong = int(np.argmin(known))
            raise SourceError(
                f"record id {record_ids[wrong]} names component {numbers[wrong]}; this mixture has the components 0 to "
                f"{len(self._sources) - 1}, and ids are component << 48 | id.",
                record_id=int(record_ids[wrong]),
            )
        past = ids >= self._lengths[numbers]
        if past.any():
            wrong = int(np.argmax(past))
            raise SourceError(
                f"record id {record_ids[wrong]} names record {ids[wrong]} of component {self._names[numbers[wrong]]!r}, "
                f"which has {self._lengths[numbers[wrong]]} records.",
                record_id=int(record_ids[wrong]),
            )
        return numbers, ids

    def element_shapes(self) -> PyTree:
        """Pytree of ``jax.ShapeDtypeStruct`` of one record, from the first component; only if ``reads_columns``."""
        return self._sources[0].element_shapes()

    def read_batch(
        self,
        record_ids: RecordIds | Sequence[int],
        columns: ColumnSlices | None = None,
        rngs: Rngs | None = None,
    ) -> PyTree:
        """Reads records, decoded and stacked.

        Args:
          record_ids: int64[n], ``component << 48 | id``, in any order, repeats allowed.
          columns: leaf path → slices of the dimensions after the first; only if every component reads columns.
          rngs: one generator per record, for decoders that take ``rng=``.

        Returns:
          Pytree of arrays ``[n, ...]``; row i is the record ``record_ids[i]``.

        Raises:
          SourceError: an id has no record, or records of two components differ; names the components and the leaf.
          Any error that a component raises, with a note naming it.
        """
        numbers, ids = self._located(record_ids)
        if self._compared[numbers].all():
            try:
                group_ids = ids + self._first_id[numbers]
                return self._read(self._group_readers, self._group_of[numbers], group_ids, columns, rngs)
            except Exception:  # read again by component, to name the one that fails
                if len(self._group_readers) == len(self._readers):
                    raise
        batch = self._read(self._readers, numbers, ids, columns, rngs)
        if columns is None:
            self._compared[numbers] = True
        return batch

    def _read(
        self,
        readers: Sequence[SourceReader],
        numbers: RecordIds,
        ids: RecordIds,
        columns: ColumnSlices | None,
        rngs: Rngs | None,
    ) -> PyTree:
        """Reads record ``ids[i]`` of ``readers[numbers[i]]`` as row i."""
        parts = []
        for number, rows in group_by(numbers):
            reader = readers[number]
            own_rngs = [rngs[row] for row in rows.tolist()] if rngs and wants_rng(reader.source) else None
            name = self._names[number if readers is self._readers else int(np.argmax(self._group_of == number))]
            try:
                tree = reader.read(ids[rows], own_rngs, columns=columns)
            except Exception as error:
                error.add_note(f"in component {name!r} of the mixture")
                raise
            parts.append((name, rows, tree))
        return self._joiner.join(parts, len(ids), whole=columns is None)

    def cached_files(self, record_ids: RecordIds) -> list[hooks.CachedFile] | None:
        """Returns the files that hold these records and are read through a cache; None if no component has one."""
        if not self._cached:
            return None
        numbers, ids = split_ids(record_ids)
        groups = [(self._cached[number], rows) for number, rows in group_by(numbers) if number in self._cached]
        return [file for source, rows in groups for file in source.cached_files(ids[rows]) or ()]

    @functools.cached_property
    def _cached(self) -> dict[int, hooks.CachesFiles]:
        """The components that read files through a cache."""
        found = {number: caching(source) for number, source in enumerate(self._sources)}
        return {number: source for number, source in found.items() if source is not None}

    def replacement_id(self, seed: int, epoch: int, record_id: int, attempt: int) -> int:
        """Id of the record that replaces a bad one: a different record of the same component."""
        number, own_id = split_ids(record_id)
        replacement = permutation.replacement_id(seed, epoch, own_id, attempt, int(self._lengths[number]))
        return join_ids(number, replacement)

    def row_lengths(self, record_ids: RecordIds) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of all segments of records, and the first segment of each record; reads nothing.

        Raises:
          SettingsError: a component does not know them.
        """
        numbers, ids = split_ids(record_ids)
        by_row: dict[int, np.ndarray] = {}
        for number, rows in group_by(numbers):
            known = hooks.find(self._sources[number], hooks.RowLengths)
            if known is None:
                raise SettingsError(
                    f"balance= needs the lengths of records, which component {self._names[number]!r} does not know. Use "
                    "Packed for all components.",
                    setting="balance",
                )
            lengths, splits = known.row_lengths(ids[rows])
            by_row |= zip(rows.tolist(), np.split(lengths, splits[1:-1]), strict=True)
        parts = [by_row[row] for row in range(len(ids))]
        return np.concatenate(parts), np.cumsum([0, *map(len, parts)])

    def file_of(self, record_id: int) -> str | None:
        """The component that holds a record, and the file if known."""
        number, own_id = split_ids(record_id)
        path = file_of(self._sources[number], own_id)
        return f"component {self._names[number]!r}" + (f", {path}" if path else "")

    def fingerprint(self) -> JsonValue:
        """Identity without the components, since a later stage may add some; the order's stages compare them."""
        return {"kind": "mixture", "records": "by component"}

    def close(self) -> None:
        """Closes the components that have a ``close``."""
        for source in self._sources:
            hooks.close(source)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_joiner": Joiner()}  # a copy takes the structure from its own first batch
