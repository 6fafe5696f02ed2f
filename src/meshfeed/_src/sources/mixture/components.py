"""The components of a mixture, and what both kinds of mixture share."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar, cast

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.identities import ALL_RECORDS, without_later
from meshfeed._src.base.types import JsonValue
from meshfeed._src.order.added_stages import check_stage_weights, merge_stages
from meshfeed._src.order.mixture import MixtureSettings
from meshfeed._src.order.weights import Stage, StagedWeights, block_counts, nest_stages
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.shared_probes import identify_each
from meshfeed._src.sources.built import BuiltRecords
from meshfeed._src.sources.checks import is_count
from meshfeed._src.sources.selection import Sample, Subset
from meshfeed._src.state.state import digest_of

T = TypeVar("T")


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
            if hooks.is_stream(source) or isinstance(source, MixedSource):
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
            if isinstance(source, MixedSource):
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
    # Older states hold digests of the values without the fields that they lack.
    bare, found = without_later(identity)
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


class MixedSource(BuiltRecords):
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

    def _below(self) -> Iterable[Any]:
        return self.components.sources.values()
