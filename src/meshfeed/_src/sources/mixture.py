"""Mixes several sources into one, with shares that are exact in every block.

Random-access components make a random-access mixture. With at least one stream among them, all are read as lanes: lane i
draws from lane i of each component, in blocks laid out as in a random-access mixture but with its own key. Its state is
its position and, for each component, the epoch and the cursor within it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, SupportsIndex, TypeVar, Unpack, cast

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import (
    SettingsError,
    SourceError,
    StateMismatchError,
    hides_own_frames,
    refuse_stop_iteration,
)
from meshfeed._src.base.identities import ALL_RECORDS, without_all_records
from meshfeed._src.base.ownership import own_batch
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.rng import philox
from meshfeed._src.base.settings import ShardShuffle
from meshfeed._src.base.types import ColumnSlices, JsonValue, PyTree, Record, RecordIds, Rngs, public
from meshfeed._src.order import permutation
from meshfeed._src.order.added_stages import check_stage_weights, merge_stages
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.mixture import (
    MixtureOrder,
    MixtureSettings,
    Stage,
    StagedBlocks,
    StagedWeights,
    block_counts,
    check_all_named,
    check_stages,
    group_by,
    join_ids,
    nest_stages,
    parse_weights,
    split_ids,
)
from meshfeed._src.order.permutation import derive_key
from meshfeed._src.reading.host_batch import num_rows
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.records import SourceReader, wants_rng
from meshfeed._src.reading.shared_probes import identify_each
from meshfeed._src.reading.stacking import RecordSpec, RecordStack
from meshfeed._src.sources.checks import checked_count, is_count
from meshfeed._src.sources.concat import ConcatenatedRecords
from meshfeed._src.sources.documents import read_items
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.joined import JoinedReader, Joiner, Part, caching
from meshfeed._src.sources.lists import listed, select_all
from meshfeed._src.sources.recognize import as_source
from meshfeed._src.sources.selection import Sample, Subset, View
from meshfeed._src.state.state import digest_of

T = TypeVar("T")
_LANE_LAYOUT, _COMPONENT_SEED = 103, 104  # purposes of derived keys; differ from those in order/mixture.py


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
    repeat: Mapping[str, int | float] | None = None,
) -> Any:
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
      block: number of records in which the shares are exact, 1 to 2**24; a weight below ``1 / block`` of the total is an
        error.
      on_end: what happens when a component has been read ``num_epochs`` times. ``"repeat"``: it repeats until every
        component of the last stage has been read ``num_epochs`` times in full, which ends the mixture. ``"stop"``: the
        mixture ends.
      shuffle: order of random-access components that are read as lanes, like the feed's ``shuffle`` (which streams do
        not support). Not for random-access mixtures, which use the feed's.
      take: name → the records of a component that are used, from its first: an int, or a float up to 1.0 for a fraction
        of a random-access component.
      repeat: name → how often a component is read per epoch of the mixture; 1 if not named. It determines when the
        mixture ends, and the weights how often records are drawn. A float such as 1.5, for random access, reads a
        :func:`Sample` of that size.

    The components may be :class:`Buckets` with equal settings: the mixture is then ``Buckets`` of the mixed records, and
    the shares are exact in an epoch. What is built over a mixture, such as ``Packed`` or a view, has the records of one epoch
    of the mixture in order.

    A component may be a mixture itself: its components become those of this mixture, named ``outer/inner``, and share
    the weight of the inner mixture by its own weights. ``block`` and ``on_end`` are those of the outer mixture.

    Returns:
      A random-access source if every component is one, otherwise a stream source.

    Raises:
      SettingsError: ``weights``, ``block``, ``on_end``, ``shuffle``, ``take`` or ``repeat`` is invalid.
      SourceError: no component, or a component that is not a source of records.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Memory, Mixture
      >>> code, prose = Memory({"x": np.zeros(50)}), Memory({"x": np.ones(50)})
      >>> source = Mixture({"code": code, "prose": prose}, weights={"code": 0.25, "prose": 0.75})
    """
    if not isinstance(components, Mapping) or not components:
        raise SourceError(
            f"Mixture got {type(components).__name__} {components!r:.80}. Expected a dict of at least one source, "
            'such as Mixture({"web": web, "code": code}, weights={"web": 3, "code": 1}).'
        )
    sources = {name: _component(name, component) for name, component in components.items()}
    if any(hooks.find(source, hooks.GroupsRecords) for source in sources.values()):
        settings: Any = {"block": block, "on_end": on_end, "shuffle": shuffle, "take": take, "repeat": repeat}
        return select_all(sources, "Mixture", lambda records: Mixture(records, weights, **settings).as_list())
    given = Components.of(sources, parse_weights(weights, list(sources)), take, repeat)
    mixed = given.flattened()
    block = checked_count(block, "block")
    for _, stage_weights in mixed.stages:
        block_counts(stage_weights, list(mixed.sources), block)  # raises if a weight is too small for the block
    check_all_named(weights, list(sources))
    if on_end not in ("repeat", "stop"):
        raise SettingsError(f"on_end={on_end!r}; it takes 'repeat' or 'stop'.", setting="on_end")
    if any(map(hooks.is_stream, mixed.sources.values())):
        return StreamMixture(given, block, on_end, shuffle)
    if shuffle is not False:
        raise SettingsError(
            f"shuffle={shuffle!r} of a Mixture is for mixtures with a stream among them. All components here are "
            "read at random: pass shuffle= to the feed.",
            setting="shuffle",
        )
    return RandomMixture(given, block, on_end)


def _component(name: object, component: object) -> Any:
    """The source for one component that the user gave."""
    if not isinstance(name, str) or not name:
        raise SourceError(f"Mixture got a component named {name!r}. Expected a string that is not empty.")
    source = as_source(component)
    if isinstance(source, HostBatches):
        raise SourceError(f"component {name!r} is host batches. Expected a source of records. Pass records.")
    grouped = hooks.find(source, hooks.GroupsRecords) is not None
    return source if grouped or isinstance(source, RandomMixture) else listed(source, "Mixture")


@dataclasses.dataclass(frozen=True)
class Components:
    """The components of a mixture with their weights, which part of each is used, and how often."""

    sources: dict[str, Any]
    stages: StagedWeights
    take: dict[str, int | float]  # component → number of records, or a fraction of them
    repeat: dict[str, int]  # component → times that it is read per epoch

    @classmethod
    def of(cls, sources: dict[str, Any], stages: StagedWeights, take: object, repeat: object) -> Components:
        """Checks that the user's ``take`` and ``repeat`` map components to numbers in range."""
        for setting, value in (("take", take), ("repeat", repeat)):
            if value is not None and not (isinstance(value, Mapping) and value.keys() <= sources.keys()):
                raise SettingsError(
                    f"{setting}={value!r}; it takes {{name: number}} with names among {list(sources)}.", setting=setting
                )
        takes, repeats = dict(cast("Mapping[str, Any]", take or {})), dict(cast("Mapping[str, Any]", repeat or {}))
        for name, part in takes.items():
            if wanted := _wrong_take(part, sources[name]):
                raise SettingsError(f"take[{name!r}]={part!r}; {wanted}", setting="take")
        for name, times in list(repeats.items()):
            if is_count(times):
                continue
            source = sources[name]
            if hooks.is_stream(source) or isinstance(source, _Mixture):
                raise SettingsError(f"repeat[{name!r}]={times!r}; it takes an int of at least 1.", setting="repeat")
            part = takes.pop(name, None)
            length = _used(part, len(source))
            if not isinstance(times, float) or not 0 < times < math.inf or round(times * length) < 1:
                raise SettingsError(
                    f"repeat[{name!r}]={times!r}; it takes an int of at least 1, or a float that gives at least one of the "
                    f"{length:,} records.",
                    setting="repeat",
                )
            used = source if part is None else Subset(source, slice(length))
            sources = {**sources, name: Sample(used, round(times * length))}
            del repeats[name]
        return cls(sources, stages, takes, repeats)

    def flattened(self) -> Components:
        """Replaces components that are mixtures by their own components."""
        found = self
        for name, source in self.sources.items():
            if isinstance(source, _Mixture):
                found = found._with_inner(name, source.components)
        return found

    def _with_inner(self, name: str, inner: Components) -> Components:
        if name in self.take or name in self.repeat:
            raise SettingsError(
                f"component {name!r} is a mixture, to which take= and repeat= do not apply. Give them to that mixture.",
                setting="take" if name in self.take else "repeat",
            )

        def within(named: Mapping[str, T]) -> dict[str, T]:
            return {f"{name}/{key}": value for key, value in named.items()}

        if clash := sorted(within(inner.sources).keys() & self.sources.keys()):
            raise SourceError(f"the component {clash[0]!r} is named twice: also as a part of {name!r}. Rename one.")
        sources: dict[str, Any] = {}  # the inner components take the place of their mixture
        for outer, source in self.sources.items():
            sources |= within(inner.sources) if outer == name else {outer: source}
        stages = nest_stages(self.stages, name, inner.stages)
        return Components(sources, stages, self.take | within(inner.take), self.repeat | within(inner.repeat))

    def length(self, name: str) -> int:
        """Number of records of a random-access component that are used."""
        return _used(self.take.get(name), len(self.sources[name]))

    def of_lane(self, name: str, lane_index: int, num_lanes: int) -> int | None:
        """Number of records per epoch of one lane of a stream; None for all."""
        part = self.take.get(name)
        return None if part is None else (int(part) + num_lanes - 1 - lane_index) // num_lanes

    def identities(self) -> dict[str, JsonValue]:
        """Name → identity of each component, with long values replaced by digests: a state holds all of them."""
        used = {"take": self.take, "repeat": self.repeat}
        found = identify_each(self.sources, source_identity)
        return {
            name: _shortened(identity) | {key: part[name] for key, part in used.items() if name in part}
            for name, identity in found.items()
        }


def _used(take: int | float | None, whole: int) -> int:
    """How many of ``whole`` records ``take`` uses."""
    return int(take * whole) if isinstance(take, float) else whole if take is None else take


def _shortened(identity: dict[str, JsonValue]) -> dict[str, JsonValue]:
    # States of before the digests of all records hold digests of the values without them.
    bare, found = without_all_records(identity)
    return {key: _short(value) for key, value in bare.items()} | ({ALL_RECORDS: _short(found)} if found else {})


def _short(value: JsonValue) -> JsonValue:
    small = isinstance(value, bool | int | float | None) or (isinstance(value, str) and len(value) <= 16)
    return value if small else digest_of(value)[:8]


def _wrong_take(part: object, source: Any) -> str:
    """What ``take`` of a component takes instead of ``part``; empty if ``part`` is right."""
    if hooks.is_stream(source):
        wanted = "the component is a stream, whose length is unknown, so it takes a number of records of at least 1."
        return "" if is_count(part) else wanted
    number = len(source)
    if (isinstance(part, float) and 0 < part <= 1 and int(part * number)) or (is_count(part) and part <= number):
        return ""
    return f"it takes a number of records from 1 to {number}, or a float above 0 and up to 1.0 that is at least one record."


class _Mixture:
    """What both kinds of mixture share."""

    kind = "mixture"

    def __init__(self, given: Components, block: int, on_end: str) -> None:
        self._given, self._block, self._on_end = given, block, on_end
        self.components = given.flattened()
        self._identified: dict[str, JsonValue] | None = None
        self._added: StagedWeights = ()

    def check_weights(self, weights: object) -> dict[str, float]:
        """See :class:`meshfeed._src.base.hooks.TakesWeights`; the names are those that the user gave."""
        checked = check_stage_weights(weights, list(self._given.sources))
        for _, flat in dataclasses.replace(self._given, stages=((0, checked),)).flattened().stages:
            block_counts(flat, list(self.components.sources), self._block)  # raises if too small for the block
        return checked

    def with_added(self, added: StagedWeights) -> Self:
        """See :class:`meshfeed._src.base.hooks.TakesWeights`."""
        clone = copy.copy(self)  # keeps the identities
        stages = dataclasses.replace(self._given, stages=merge_stages(self._given.stages, added)).flattened().stages
        clone.components, clone._added = dataclasses.replace(self.components, stages=stages), added
        return clone

    @property
    def _identities(self) -> dict[str, JsonValue]:  # computing them may read records; copies keep them
        # No cached_property, whose lock on Python 3.11 all mixtures share: this may wait for other hosts.
        if self._identified is None:
            self._identified = self.components.identities()
        return self._identified

    def _settings_at(
        self, positions: Sequence[int], identities: Mapping[str, JsonValue], seed: int, num_epochs: int | None
    ) -> MixtureSettings:
        """What determines the order of a stream whose stages begin at ``positions``."""
        stages = self.components.stages
        return MixtureSettings(
            stages=[Stage(first, weights, step) for first, (step, weights) in zip(positions, stages, strict=True)],
            added=self._added,
            block=self._block,
            on_end=self._on_end,
            repeat=self.components.repeat,
            identities=identities,
            seed=seed,
            num_epochs=num_epochs,
        )

    @property
    def read_threads(self) -> int:
        """See :class:`meshfeed._src.base.hooks.ReadsInThreads`: as the component that asks for most."""
        return hooks.read_threads(*self.components.sources.values())

    def close(self) -> None:
        """Closes the components that have a ``close``."""
        for source in self.components.sources.values():
            hooks.close(source)


class RandomMixture(_Mixture):
    """A :func:`Mixture` of random-access sources; made by that function."""

    fresh_arrays = True  # JoinedReader copies memory that a component may reuse

    def __init__(self, given: Components, block: int, on_end: str) -> None:
        super().__init__(given, block, on_end)
        components = self.components
        self._names, self._sources = tuple(components.sources), tuple(components.sources.values())
        self._reader = JoinedReader(components.sources, "component", "mixture")
        self.wants_rng, self.reads_columns = self._reader.wants_rng, self._reader.reads_columns
        self._lengths = np.array([components.length(name) for name in self._names], np.int64)

    def __repr__(self) -> str:
        lengths = zip(self._names, self._lengths.tolist(), strict=True)
        return f"Mixture({', '.join(f'{name}: {length:,} records' for name, length in lengths)})"

    def __len__(self) -> int:
        """Total number of records of all components."""
        return int(self._lengths.sum())

    def __getitem__(self, record_id: SupportsIndex) -> Record:
        """The record with the id ``component << 48 | id``, as views of a batch of one."""
        return trees.map_leaves(lambda leaf: leaf[0], self.read_batch([operator.index(record_id)]))

    @property
    def first_record_id(self) -> int:
        """Id of the record from which to infer the structure: the first of the first stage's first component."""
        return join_ids(self._names.index(next(iter(self.components.stages[0][1]))), 0)

    def make_order(self, **settings: Unpack[hooks.OrderSettings]) -> MixtureOrder:
        """The order of the mixture for a feed's settings."""
        positions = [settings["position_of_step"](step) for step, _ in self.components.stages]
        of_mixture = self._settings_at(positions, self._identities, settings["seed"], settings["num_epochs"])
        shuffle, num_lanes = settings["shuffle"], settings["num_lanes"]
        if isinstance(shuffle, ShardShuffle):
            assert num_lanes is not None
            return MixtureOrder(self._shard_lengths, of_mixture, shuffle, num_lanes, settings["segments"])
        return MixtureOrder(self._num_records, of_mixture, shuffle)

    @property
    def _num_records(self) -> dict[str, int]:
        return dict(zip(self._names, self._lengths.tolist(), strict=True))

    @functools.cached_property
    def _shard_lengths(self) -> dict[str, RecordIds]:
        """Component → records of each file that are used; every component has files."""
        found: dict[str, RecordIds] = {}
        for name, source, length in zip(self._names, self._sources, self._lengths.tolist(), strict=True):
            ends = np.clip(np.cumsum(source.shard_lengths()), 0, length)
            found[name] = np.diff(ends, prepend=0)
        return found

    @property
    def shard_lengths(self) -> Callable[[], RecordIds]:
        """Records of each file of all components; only if every component is made of files."""
        for name, source in self.components.sources.items():
            if hooks.find(source, hooks.Sharded) is None:
                raise AttributeError(f"component {name!r} is not made of files")
        return lambda: np.concatenate([*self._shard_lengths.values()])

    def as_list(self) -> View:
        """One epoch of the mixture, not shuffled, as a view of the components one after the other.

        Raises:
          SettingsError: the weights change at steps, which a list does not have.
        """
        stages, components = self.components.stages, self.components
        if len(stages) > 1:
            raise SettingsError(
                f"the weights of the mixture change at step {stages[1][0]}, so only a feed can order its records: steps "
                "count the records of the feed, not those below what is built over the mixture. Mix last, as in "
                "Mixture({name: Packed(…)}, weights=…).",
                setting="weights",
            )
        order = MixtureOrder(self._num_records, self._settings_at([0], {}, 0, 1), False)
        whole = ConcatenatedRecords(components.sources, "component", "mixture")
        lengths = self._lengths.tolist()
        weights = next(iter(stages))[1]
        identity: JsonValue = [self._block, self._on_end, dict(weights), lengths, dict(components.repeat)]
        return View(whole, MixedInOrder(order, whole.starts), "mixture", identity)

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
        return self._reader.element_shapes()

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
        return self._reader.read(numbers, ids, columns, rngs)

    def __getitems__(self, record_ids: Sequence[int]) -> list[Record]:
        """Several records, in the order of ``record_ids``; they may differ in shape."""
        return self._reader.read_items(*self._located(record_ids))

    def cached_files(self, record_ids: RecordIds) -> list[hooks.CachedFile] | None:
        """Returns the files that hold these records and are read through a cache; None if no component has one."""
        return self._reader.cached_files(*split_ids(record_ids))

    def ask_disk(self, record_ids: RecordIds) -> bool | None:
        """See :class:`meshfeed._src.base.hooks.ReadsDisk`."""
        return self._reader.ask_disk(*split_ids(record_ids))

    def replacement_id(self, seed: int, epoch: int, record_id: int, attempt: int) -> int:
        """Id of the record that replaces a bad one: a different record of the same component."""
        number, own_id = split_ids(record_id)
        # Of the same component, which keeps the shares exact.
        replacement = permutation.replacement_id(seed, epoch, own_id, attempt, int(self._lengths[number]))
        return join_ids(number, replacement)

    def row_lengths(self, record_ids: RecordIds) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of all segments of records, and the first segment of each; see :meth:`JoinedReader.row_lengths`."""
        return self._reader.row_lengths(*split_ids(record_ids))

    @property
    def num_sequence_shards(self) -> int | None:
        """Shards of the sequence axis, if all components have rows for the same number; see ``hooks.SequenceShards``."""
        return self._reader.num_sequence_shards

    def shard_costs(self, record_ids: RecordIds) -> np.ndarray:
        """The work of each shard of the sequence axis, int64[n, shards]."""
        return self._reader.shard_costs(*split_ids(record_ids))

    def file_of(self, record_id: int) -> str | None:
        """The component that holds a record, and the file if known."""
        return self._reader.file_of(*split_ids(record_id))

    def fingerprint(self) -> JsonValue:
        """Identity without the components, since a later stage may add some; the order's stages compare them."""
        return {"kind": "mixture", "records": "by component"}


class MixedInOrder:
    """The records of a mixture in order; a :class:`meshfeed._src.sources.selection.Selection`."""

    def __init__(self, order: MixtureOrder, starts: RecordIds) -> None:
        self._order, self._starts = order, starts

    def __len__(self) -> int:
        assert self._order.total is not None
        return self._order.total

    def ids(self, record_ids: RecordIds) -> RecordIds:
        """See :class:`meshfeed._src.sources.selection.Selection`."""
        numbers, ids = split_ids(self._order.ids_at(record_ids)[0])
        return self._starts[numbers] + ids

    def counts(self, ends: RecordIds) -> RecordIds:
        """Equal runs, as many as the components have shards on average: they advance together, so a run needs few of each."""
        num_shards = int(np.count_nonzero(np.diff(ends, prepend=0)))
        runs = max(1, num_shards // len(self._starts))
        return np.diff(np.arange(runs + 1) * len(self) // runs)


class StreamMixture(_Mixture):
    """A :func:`meshfeed.sources.Mixture` with at least one stream component; made by that function."""

    def __init__(self, given: Components, block: int, on_end: str, shuffle: bool | int) -> None:
        super().__init__(given, block, on_end)
        components = self.components
        self.shuffle = shuffle
        for source in components.sources.values():
            if not hooks.is_stream(source):
                EpochOrder(max(1, len(source)), shuffle=shuffle, seed=0, num_epochs=1)  # validates shuffle
        self._is_bound, self._delivered = False, 0  # to a feed, which gives its settings
        self._stacks = True
        self._ended_lanes: Mapping[int, int] = {}  # lane → length
        self._bound = self._settings_at([0] * len(components.stages), {}, 0, 1)

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self.components.sources)}, read as lanes)"

    def unconverted(self) -> StreamMixture:
        """Returns the mixture with its components' records as they are stored, for functions that make arrays of them."""
        clone = copy.copy(self)
        sources = {name: hooks.unconverted(source) for name, source in self.components.sources.items()}
        clone.components, clone._stacks = dataclasses.replace(self.components, sources=sources), False
        return clone

    def bind(
        self,
        *,
        seed: int,
        num_epochs: int | None,
        position_of_step: Callable[[int], int],
        delivered: int = 0,
        ended: Mapping[int, int] | None = None,
    ) -> StreamMixture:
        """A copy of this mixture with a feed's settings; see :class:`meshfeed._src.base.hooks.StagedStream`.

        Raises:
          SettingsError: ``on_end="stop"`` without ``num_epochs``.
        """
        clone = copy.copy(self)  # the user may pass the same mixture to several feeds
        positions = [position_of_step(step) for step, _ in self.components.stages]
        clone._is_bound, clone._bound = True, self._settings_at(positions, {}, seed, num_epochs)
        if self._on_end == "repeat":  # with "stop", later stages do not change where a lane ends
            clone._delivered, clone._ended_lanes = delivered, ended or {}
        return clone

    def check_lanes(self, num_lanes: int) -> None:
        """Raises SettingsError for a number of lanes that a component cannot serve."""
        for source in self.components.sources.values():
            limited = hooks.find(source, hooks.LimitsLanes)
            if limited is not None:
                limited.check_lanes(num_lanes)

    def cut_version(self, num_lanes: int) -> int:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`: the latest of the components."""
        found = (hooks.find(source, hooks.CutsLanes) for source in self.components.sources.values())
        return max((cuts.cut_version(num_lanes) for cuts in found if cuts is not None), default=1)

    def with_cut(self, version: int) -> StreamMixture:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`."""
        sources = dict(self.components.sources)
        for name, source in sources.items():
            cuts = hooks.find(source, hooks.CutsLanes)
            if cuts is not None:
                sources[name] = cuts.with_cut(version)
        clone = copy.copy(self)  # keeps the identities
        clone.components = dataclasses.replace(self.components, sources=sources)
        return clone

    def lane_lengths(self, num_lanes: int) -> list[int] | None:
        """See :class:`meshfeed._src.base.hooks.CountsLanes`: about, since components are drawn in blocks.

        Of all epochs alike: a lane of a mixture ends once, after its components have been read ``num_epochs`` times.
        """
        if len(self.components.stages) != 1:
            return None
        weights = self.components.stages[0][1]
        total = sum(weights.values())
        ends: list[list[float]] = []  # component → records of each lane when it has been read once
        for name, weight in weights.items():
            lengths = self._component_lengths(name, num_lanes) if weight else None
            if lengths is None and weight:
                return None
            repeat = self.components.repeat.get(name, 1)
            ends += [] if lengths is None else [[length * repeat * total / weight for length in lengths]]
        decides = min if self._on_end == "stop" else max
        return [int(decides(lane)) for lane in zip(*ends, strict=True)]

    def _component_lengths(self, name: str, num_lanes: int) -> Sequence[int] | None:
        source, components = self.components.sources[name], self.components
        if not hooks.is_stream(source):
            length = components.length(name)
            return [(length + num_lanes - 1 - lane) // num_lanes for lane in range(num_lanes)]
        counted = hooks.find(source, hooks.CountsLanes)
        lengths = None if counted is None else counted.lane_lengths(num_lanes)
        if lengths is None or name not in components.take:
            return lengths
        return [min(length, components.of_lane(name, lane, num_lanes) or 0) for lane, length in enumerate(lengths)]

    def open(self, lane_index: int, num_lanes: int) -> MixtureLane | StackedMixtureLane:
        """Lane ``lane_index`` of ``num_lanes``, mixed from that lane of every component.

        Raises:
          SettingsError: the mixture has stages but is not bound to a feed, which maps their steps to positions.
        """
        bound = self._bound
        if not self._is_bound and len(bound.stages) > 1:
            raise SettingsError(
                "a mixture with stages begins them at steps, so it can only be opened by a feed.", setting="weights"
            )
        names = list(self.components.sources)
        return (StackedMixtureLane if self._stacks else MixtureLane)(
            [ComponentLane(self, number, lane_index, num_lanes, bound.seed) for number in range(len(names))],
            StagedBlocks(
                names, bound.stages_of_lane(num_lanes), self._block, derive_key(bound.seed, _LANE_LAYOUT, lane_index)
            ),
            bound.stages[-1].weights,
            bound.num_epochs,
            self._on_end == "stop",
            self._ended_lanes.get(lane_index, self._delivered // num_lanes),
            ended=lane_index in self._ended_lanes,
        )

    def fingerprint(self) -> JsonValue:
        """Identity without the components, since a later stage may add some; ``check_saved`` compares them."""
        return {"kind": "mixture"}

    def mixture_config(self) -> JsonValue:
        """Stages and components, for ``check_saved``."""
        return {"shuffle": self.shuffle, **dataclasses.replace(self._bound, identities=self._identities).config()}

    def check_saved(self, saved_mixture: JsonValue, position: int, step: int | None = None) -> None:
        """See :func:`meshfeed._src.order.mixture.check_stages`."""
        check_stages(saved_mixture, self.mixture_config(), position, step=step)


class MixtureLane:
    """Records of one lane; a :class:`meshfeed._src.base.types.LaneIterator`.

    With ``on_end="stop"``, the lane ends before the first record that a component would have to repeat after
    ``num_epochs``. With ``"repeat"``, it ends when every component of the last stage has completed ``num_epochs`` and
    the last of them is drawn again.

    ``blocks`` gives the component of each record. The first ``delivered`` records are read as they were delivered: the lane
    has not ended before, even if the components that decide now, since the last stage has changed, were complete there; and
    with ``ended`` it ends after them, even if these components are not complete.
    """

    def __init__(
        self,
        components: Sequence[ComponentLane],
        blocks: StagedBlocks,
        last_stage: Mapping[str, float],
        num_epochs: int | None,
        stops: bool,
        delivered: int,
        *,
        ended: bool,
    ) -> None:
        self._delivered, self._ends_there = delivered, ended
        self._components, self._blocks, self._num_epochs, self._stops = components, blocks, num_epochs, stops
        # With "repeat", components outside of the last stage do not decide: they are never drawn again.
        self._deciding = [component for component in components if stops or component.name in last_stage]
        self._position, self._ended = 0, False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        """The next record, as its component gives it."""
        ((_, _, record),), _ = self._read(1)
        return record

    def _read(self, num_records: int) -> tuple[list[Part], int]:
        """Up to ``num_records`` records, in parts of one component each, and their number.

        Raises:
          StopIteration: the lane has ended.
          SourceError: a component has no records.
        """
        delivered_again = self._position < self._delivered  # to resume or to replay
        if delivered_again:
            num_records = min(num_records, self._delivered - self._position)
        may_end = self._num_epochs is not None and not delivered_again
        if self._ended or (may_end and (self._ends_there or (not self._stops and self._all_read()))):
            raise StopIteration
        numbers = self._blocks.components_from(self._position, num_records)
        parts: list[Part] = []
        ends: list[int] = []  # rows at which deciding components have completed their epochs
        for number, rows in group_by(numbers):
            component = self._components[number]
            end = self._take(component, rows, parts)
            if end is not None and component in self._deciding:
                ends.append(end)
        count = len(numbers)
        if ends and not delivered_again and (self._stops or self._all_read()):
            # Records past the row that ends the lane have been read, and are dropped.
            self._ended = True
            count = min(ends) if self._stops else max(ends)
            if not count:
                raise StopIteration
            parts = [_cut(part, count) for part in parts if part[1][0] < count]
        self._position += count
        return parts, count

    def coming_files(self, num_records: int) -> Iterator[Sequence[hooks.CachedFile]] | None:
        """The files of the next reads; see :class:`meshfeed._src.base.hooks.PlansFiles`."""
        found = {number: component.coming(self._num_epochs) for number, component in enumerate(self._components)}
        coming = {number: files for number, files in found.items() if files is not None}
        return self._plan_files(num_records, self._position, coming) if coming else None

    def _plan_files(
        self, num_records: int, position: int, coming: Mapping[int, ComingFiles]
    ) -> Iterator[Sequence[hooks.CachedFile]]:
        blocks = copy.copy(self._blocks)  # it keeps its last layout
        while not all(files.ended for files in coming.values()):
            files: list[hooks.CachedFile] = []
            stop = position + num_records
            while position < stop:
                numbers = blocks.components_from(position, stop - position)
                position += len(numbers)
                for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
                    if number in coming:
                        files += coming[int(number)].take(int(count))
            yield list(dict.fromkeys(files))

    def _take(self, component: ComponentLane, rows: RecordIds, parts: list[Part]) -> int | None:
        """Appends records for ``rows`` to ``parts``; returns the row at which ``num_epochs`` were completed, if any."""
        end, done = None, 0
        while True:
            for batch, count in component.read(len(rows) - done):
                parts.append((component.name, rows[done : done + count], batch))
                done += count
            if done == len(rows):
                return end
            if self._num_epochs is not None and component.epoch + 1 == self._num_epochs * component.repeat:
                end = int(rows[done])
                if self._stops:
                    return end
            component.next_epoch()

    def _all_read(self) -> bool:
        return all(component.epoch >= (self._num_epochs or 0) * component.repeat for component in self._deciding)

    @property
    def reads_again(self) -> bool:
        """See :class:`meshfeed._src.base.hooks.ReadsAgain`: whether a component that has been read would."""
        return any(component.reads_again for component in self._components)

    def get_state(self) -> JsonValue:
        """Position in the lane, and the state of each component that has been read."""
        return {
            "position": self._position,
            "ended": self._ended,
            "components": {
                component.name: state
                for component in self._components
                if (state := component.get_state())[:2] != [0, 0]
            },
        }

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken; opens nothing yet."""
        for component in self._components:
            component.set_state(state["components"].get(component.name, [0, 0, None, 0]))
        self._position, self._ended = state["position"], state["ended"]

    def close(self) -> None:
        """Closes all components."""
        for component in self._components:
            component.close()


class StackedMixtureLane(MixtureLane):
    """A lane of a mixture whose records are arrays of one shape, which are read many at a time."""

    fresh_arrays = True  # components read into their own memory

    @functools.cached_property
    def _joiner(self) -> Joiner:
        return Joiner("component", "mixture")

    def __next__(self) -> Record:
        """The next record."""
        return trees.map_leaves(lambda leaf: leaf[0], self.next_batch(1))

    def next_batch(self, num_records: int) -> PyTree:
        """Up to ``num_records`` records, stacked.

        Raises:
          StopIteration: the lane has ended.
          SourceError: a component has no records, or the components' records differ in structure, shape or dtype.
        """
        return self._joiner.join(*self._read(num_records))


def _cut(part: Part, count: int) -> Part:
    name, rows, batch = part
    kept = int(np.searchsorted(rows, count))
    return name, rows[:kept], trees.map_leaves(lambda leaf: leaf[:kept], batch)


class ComponentLane:
    """Reads component ``number`` for one mixture lane, over its own epochs. Opens the source on the first read."""

    def __init__(self, mixture: StreamMixture, number: int, lane_index: int, num_lanes: int, seed: int) -> None:
        self._components, self._shuffle, self._stacks = mixture.components, mixture.shuffle, mixture._stacks
        self.name, self._source = list(self._components.sources.items())[number]
        self._number, self._lane_index, self._num_lanes, self._seed = number, lane_index, num_lanes, seed
        self.repeat = self._components.repeat.get(self.name, 1)
        self._is_stream = hooks.is_stream(self._source)
        self._limit = self._components.of_lane(self.name, lane_index, num_lanes) if self._is_stream else None
        decodes = hooks.find(self._source, hooks.Decodes) if self._is_stream else None
        self._decode = None if decodes is None else decodes.decode
        self._decode_rng = hooks.accepts_keyword(self._decode, "rng")
        self.epoch = self._taken = self._skip = 0
        self._state: JsonValue = None
        self._iterator: Any = None
        self._spec: RecordSpec | None = None

    @functools.cached_property
    def _order(self) -> LaneOrder:
        # A seed of its own: components of equal length would otherwise have the same order.
        seed, length = derive_key(self._seed, _COMPONENT_SEED, self._number), self._components.length(self.name)
        order = EpochOrder(length, shuffle=self._shuffle, seed=seed, num_epochs=None)
        return LaneOrder(order, self._lane_index, self._num_lanes)

    def read(self, num_records: int) -> list[tuple[PyTree, int]]:
        """Reads ``num_records`` records, or fewer if the epoch ends first.

        Returns:
          ``[(batch, number of records in it), ...]``.

        Raises:
          SourceError: the component raised StopIteration while it was being opened or decoded.
          Any error that the component raises, with a note naming it. Do not use this object after an error.
        """
        try:
            if self._iterator is None:
                self._reopen()
            batches, missing = [], num_records
            if self._limit is not None:
                missing = min(missing, self._limit - self._taken)
            while missing:
                batch, count = self._next(missing)
                if not count:
                    break
                batches.append((batch, count))
                self._taken += count
                missing -= count
            return batches
        except StopIteration as error:
            raise self._error(f"raised StopIteration outside of its records, in lane {self._lane_index}.") from error
        except Exception as error:
            error.add_note(f"in component {self.name!r} of the mixture, lane {self._lane_index}, epoch {self.epoch}")
            raise

    def coming(self, num_epochs: int | None) -> ComingFiles | None:
        """The files to come, or None if the component reads none through a cache."""
        files = None if self._is_stream else caching(self._source)
        if files is None:
            return None
        last = None if num_epochs is None else num_epochs * self.repeat
        return ComingFiles(files, self._order, self.epoch, self._taken, last)

    def next_epoch(self) -> None:
        """Starts the component's next epoch.

        Raises:
          SourceError: the current epoch had no records, so repeating it would loop forever.
          SettingsError: ``take`` leaves no record for this lane.
        """
        if not self._taken and self._limit == 0:
            raise SettingsError(
                f"take[{self.name!r}]={self._components.take[self.name]} leaves no record for lane {self._lane_index} of "
                f"{self._num_lanes}, among which the records of a stream are divided. Take at least {self._num_lanes} "
                "records, or use fewer lanes (num_lanes=).",
                setting="take",
            )
        if not self._taken:
            raise self._error(
                f"of the mixture has no record in lane {self._lane_index} of {self._num_lanes} (epoch {self.epoch}), so "
                "repeating it would never end. Use fewer lanes (num_lanes=), or give each lane data."
            )
        self.set_state([self.epoch + 1, 0, None, 0])

    @property
    def reads_again(self) -> bool:
        """See :class:`meshfeed._src.base.hooks.ReadsAgain`; False if it is not open."""
        return self._iterator is not None and hooks.reads_again(self._iterator)

    def get_state(self) -> JsonValue:
        """``[epoch, records taken, [the source's state] or None, records to skip from it]``."""
        if self._iterator is None:  # not opened since set_state: return the restored state
            return [self.epoch, self._taken, self._state, self._skip]
        resumable = hooks.find(self._iterator, hooks.Resumable)
        if self._taken and resumable is not None:  # at 0, the epoch's beginning needs no state
            return [self.epoch, self._taken, [resumable.get_state()], 0]
        return [self.epoch, self._taken, None, self._taken]

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken; opens nothing yet."""
        self.close()
        self.epoch, self._taken, self._state, self._skip = state

    def close(self) -> None:
        """Closes the open iterator."""
        iterator, self._iterator = self._iterator, None
        lane = self._lane_index
        with refuse_stop_iteration(f"component {self.name!r}", f"in close, in lane {lane}", lane_index=lane):
            hooks.close(iterator)

    def _error(self, what: str) -> SourceError:
        return SourceError(f"component {self.name!r} {what}", lane_index=self._lane_index)

    def _reopen(self) -> None:
        if self._is_stream:
            iterator = hooks.open_lane(
                self._source, self._lane_index, self._num_lanes, epoch=self.epoch, seed=self._seed
            )
        else:
            make = RecordsLane if self._stacks else StoredRecordsLane
            iterator = make(self._source, self._order, self.epoch, self._seed)
        if self._state is not None:
            resumable = hooks.find(iterator, hooks.Resumable)
            if resumable is None:
                raise StateMismatchError(
                    f"lanes.{self._lane_index}.mixture.{self.name}",
                    "a state of the component",
                    f"{type(iterator).__name__} has no set_state",
                    "Pass the component that the state was saved with.",
                )
            resumable.set_state(self._state[0])
        self._iterator = iterator
        left = self._skip
        with Dropping(f"component {self.name!r} of lane {self._lane_index}", left) as dropping:
            while left:
                _, count = self._next(left, decode=False)
                if not count:
                    raise self._error(
                        f"ended {left} records before the record at which lane {self._lane_index} resumes; the data "
                        "has become shorter. Pass the data that the state was saved with."
                    )
                left -= count
                dropping.add(count)

    def _next(self, num_records: int, *, decode: bool = True) -> tuple[PyTree, int]:
        """A batch of up to ``num_records`` records and its size, which is 0 at the end of the epoch.

        Of records that are not stacked, it is the next one.
        """
        iterator = self._iterator
        if not self._stacks:
            try:
                record = next(iterator)
            except StopIteration:
                return None, 0
            return self._decoded(record, 0) if decode else record, 1
        stacked = hooks.find(iterator, hooks.StackedLane) if self._decode is None else None
        if stacked is not None:
            try:
                batch = own_batch(stacked.next_batch(num_records), iterator, "next_batch")
            except StopIteration:
                return None, 0
            return batch, num_rows(batch)
        stack, count = RecordStack(num_records, self._spec, lane_index=self._lane_index), 0
        while count < num_records:
            try:
                record = next(iterator)
            except StopIteration:
                break
            if decode:
                stack.add(self._decoded(record, count))
            count += 1
        if not count or not decode:  # skipped to resume: only their number counts
            return None, count
        batch, self._spec = stack.take()
        return batch, count

    def _decoded(self, record: object, ahead: int) -> Any:
        if self._decode is None:
            return record
        if not self._decode_rng:
            return self._decode(record)
        # Unique across components, like the record ids of a random-access mixture.
        record_id = join_ids(self._number, self._taken + ahead)
        return self._decode(record, rng=philox(derive_key(self._seed, self._lane_index), self.epoch, record_id))


class RecordsLane:
    """One epoch of a lane of a random-access source; its state is the number of records read."""

    fresh_arrays = True

    def __init__(self, source: Any, order: LaneOrder, epoch: int, seed: int) -> None:
        self._source, self._reader = source, SourceReader(source)
        self._order, self._epoch, self._seed = order, epoch, seed
        self._wants_rng = wants_rng(source)
        self._taken = 0

    def next_batch(self, num_records: int) -> PyTree:
        """Up to ``num_records`` records, stacked.

        Raises:
          StopIteration: the epoch has ended.
        """
        ids = self._order.ids(self._epoch, self._taken, self._taken + num_records)
        if not ids.size:
            raise StopIteration
        rngs = [philox(self._seed, self._epoch, record_id) for record_id in ids.tolist()] if self._wants_rng else None
        batch = self._reader.read(ids, rngs)
        self._taken += ids.size
        return batch

    def get_state(self) -> int:
        """Number of records read."""
        return self._taken

    def set_state(self, state: int) -> None:
        """Resumes after ``state`` records."""
        self._taken = state


class StoredRecordsLane(RecordsLane):
    """One epoch of a lane of a random-access source, record by record as they are stored."""

    def __next__(self) -> Record:
        if self._wants_rng:  # a decoder makes arrays, from stacked records
            return trees.map_leaves(lambda leaf: leaf[0], self.next_batch(1))
        ids = self._order.ids(self._epoch, self._taken, self._taken + 1)
        if not ids.size:
            raise StopIteration
        (record,) = read_items(self._source, ids)
        self._taken += 1
        return record


@dataclasses.dataclass(frozen=True)
class LaneOrder:
    """The record ids of one lane of a random-access component: every ``num_lanes``-th of the order of an epoch."""

    order: EpochOrder
    lane_index: int
    num_lanes: int

    def ids(self, epoch: int, first: int, stop: int) -> RecordIds:
        """The ids of records ``[first, stop)`` of the lane in an epoch, or fewer at its end."""
        size = self.order.num_records
        offsets = self.lane_index + self.num_lanes * np.arange(first, stop)
        return self.order.ids_at(epoch * size + offsets[offsets < size])[0]


@dataclasses.dataclass
class ComingFiles:
    """The files that a component of a mixture lane will read through a cache."""

    files: hooks.CachesFiles
    order: LaneOrder
    epoch: int  # of the next record
    taken: int  # records before it in the epoch
    num_epochs: int | None  # None if the component is repeated without end

    @property
    def ended(self) -> bool:
        """Whether the component has been read in all its epochs; a mixture may read it again."""
        return self.num_epochs is not None and self.epoch >= self.num_epochs

    def take(self, num_records: int) -> list[hooks.CachedFile]:
        """Returns the files of the next records."""
        found: list[hooks.CachedFile] = []
        while num_records and not self.ended:
            ids = self.order.ids(self.epoch, self.taken, self.taken + num_records)
            found += self.files.cached_files(ids) or ()
            self.taken += ids.size
            num_records -= ids.size
            if num_records:
                if not self.taken:  # the lane has no record of this component: the read raises
                    break
                self.epoch, self.taken = self.epoch + 1, 0
        return found
