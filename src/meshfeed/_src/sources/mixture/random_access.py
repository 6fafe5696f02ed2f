"""A mixture of random-access components, which is random access itself."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import SupportsIndex, Unpack

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.settings import ShardShuffle
from meshfeed._src.base.types import JsonValue, Record, RecordIds
from meshfeed._src.order import permutation
from meshfeed._src.order.mixture import MixtureOrder, join_ids, split_ids
from meshfeed._src.sources.concat import ConcatenatedRecords
from meshfeed._src.sources.joined import SeveralSources
from meshfeed._src.sources.mixture.components import Components, MixedSource
from meshfeed._src.sources.selection import View


class RandomMixture(MixedSource, SeveralSources):
    """A :func:`Mixture` of random-access sources; made by that function."""

    def __init__(self, given: Components, block: int, on_end: str) -> None:
        MixedSource.__init__(self, given, block, on_end)
        SeveralSources.__init__(self, self.components.sources, "component", "mixture")
        self._lengths = np.array([self.components.length(name) for name in self._names], np.int64)

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

    def unconverted(self) -> RandomMixture:
        """The same records as they are stored, if the components convert them."""
        sources = {name: hooks.unconverted(source) for name, source in self._given.sources.items()}
        return RandomMixture(dataclasses.replace(self._given, sources=sources), self._block, self._on_end)

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

    def replacement_id(self, seed: int, epoch: int, record_id: int, attempt: int) -> int:
        """Id of the record that replaces a bad one: a different record of the same component."""
        number, own_id = split_ids(record_id)
        # Of the same component, which keeps the shares exact.
        replacement = permutation.replacement_id(seed, epoch, own_id, attempt, int(self._lengths[number]))
        return join_ids(number, replacement)

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
