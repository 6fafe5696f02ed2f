"""Weights of a mixture over time: parsing, records per block, and the check against a saved state.

Weights are given as ``{name: weight}`` or as stages ``[(first_step, {name: weight}), ...]``. A stage applies from its
first step until the next stage. Stages that had started when a state was saved determined the records already
delivered, so they must be unchanged on resume; later stages may change.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from meshfeed._src.base.errors import SettingsError, StateMismatchError
from meshfeed._src.base.types import JsonValue

_log = logging.getLogger("meshfeed.mixture")

Weights = Mapping[str, float]
StagedWeights = tuple[tuple[int, dict[str, float]], ...]
"""(first step, weights) pairs, the first at step 0."""

_TAKES = "{name: weight}, or stages [(first_step, {name: weight}), ...] with the first at step 0 and the steps rising"


@dataclasses.dataclass(frozen=True)
class Stage:
    """Weights that apply from a given position of the stream.

    Attributes:
      first_position: number of records in the stream before the stage.
      weights: component → weight, above 0.
      first_step: the step at ``first_position``, as given by the user.
    """

    first_position: int
    weights: Weights
    first_step: int = 0

    def to_json(self) -> JsonValue:
        """``[first_step, first_position, {name: weight}]``."""
        return [self.first_step, self.first_position, dict(self.weights)]


def parse_weights(weights: Any, names: Sequence[str]) -> StagedWeights:
    """Converts the user's weights to stages, without components of weight 0.

    Raises:
      SettingsError: the weights have neither form, a name is unknown, a weight is not a finite number of at least 0,
        or all weights of a stage are 0.
    """
    if isinstance(weights, Mapping):
        weights = [(0, weights)]
    if not isinstance(weights, Sequence) or isinstance(weights, str) or not weights:
        raise SettingsError(f"weights={weights!r}; it takes {_TAKES}.", setting="weights")
    stages: list[tuple[int, dict[str, float]]] = []
    for entry in weights:
        if not _is_stage(entry):
            raise SettingsError(f"weights has the stage {entry!r}; it takes {_TAKES}.", setting="weights")
        first_step = int(entry[0])
        if first_step != 0 if not stages else first_step <= stages[-1][0]:
            expected = "0" if not stages else f"more than {stages[-1][0]}"
            raise SettingsError(
                f"stage {len(stages)} of weights begins at step {first_step}, expected {expected}; it takes {_TAKES}.",
                setting="weights",
            )
        stages.append((first_step, _check_weights(entry[1], names)))
    return tuple(stages)


def check_all_named(weights: Any, names: Sequence[str]) -> None:
    """Reports components missing from the weights, which would never be read.

    With stages this is only a warning, because the component may be meant for a stage added later. To exclude a
    component explicitly, give it the weight 0.

    Raises:
      SettingsError: weights of the form ``{name: weight}`` omit a component.
    """
    plain = isinstance(weights, Mapping)
    named = set(weights) if plain else {name for _, stage in weights for name in stage}
    forgotten = ", ".join(repr(name) for name in names if name not in named)
    if not forgotten:
        return
    if not plain:
        _log.warning("no stage of weights names the component %s: it will not be read before one does.", forgotten)
        return
    complete = {name: weights.get(name, 1) for name in names}
    raise SettingsError(
        f"weights leaves out the component {forgotten}, which would never be read. Name every component, as in "
        f"weights={complete!r} (0: not read), or take it out of the components.",
        setting="weights",
    )


def _is_stage(entry: Any) -> bool:
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not isinstance(entry[1], Mapping):
        return False
    return isinstance(entry[0], int | np.integer) and not isinstance(entry[0], bool) and int(entry[0]) >= 0


def _check_weights(weights: Mapping[Any, Any], names: Sequence[str]) -> dict[str, float]:
    checked: dict[str, float] = {}
    for name, weight in weights.items():
        if name not in names:
            raise SettingsError(
                f"weights names {name!r}, which is no component; the components are {', '.join(map(repr, names))}.",
                setting="weights",
            )
        real = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not real or not 0 <= float(weight) < math.inf:
            raise SettingsError(
                f"weights has {weight!r} for {name!r}; a weight is a finite number of at least 0.", setting="weights"
            )
        if float(weight) > 0:
            checked[name] = int(weight) if isinstance(weight, numbers.Integral) else float(weight)
    if not checked:
        raise SettingsError(f"weights={dict(weights)!r} leaves no component with a weight above 0.", setting="weights")
    return checked


def block_counts(weights: Weights, names: Sequence[str], block: int) -> tuple[int, ...]:
    """Number of records of each component per block, by the largest remainder method; ties go to the earlier component.

    Raises:
      SettingsError: a component with a weight would get no records; the message states a sufficient block size.
    """
    # Exact fractions: float rounding must not decide ties, since the counts define the order of the stream.
    exact = {name: Fraction(weights[name]) for name in names if name in weights}
    whole = sum(exact.values())
    quotas = {name: block * weight / whole for name, weight in exact.items()}
    counts = {name: math.floor(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: counts[name] - quotas[name])  # stable: earlier components first
    for name in by_remainder[: block - sum(counts.values())]:
        counts[name] += 1
    for name, count in counts.items():
        if not count:
            enough = math.ceil(whole / exact[name])
            raise SettingsError(
                f"block={block} is too small for the weight of {name!r} ({float(exact[name] / whole):.3g} of all), "
                f"which would never get a record. Pass block={enough} or more, or leave the component out.",
                setting="block",
            )
    return tuple(counts.get(name, 0) for name in names)


def write_stages(stages: Sequence[tuple[Any, Weights]]) -> str:
    """Formats stages as the Python source of the keyword, for messages."""
    return "weights=[" + ", ".join(f"({step}, {dict(weights)!r})" for step, weights in stages) + "]"


def check_stages(saved: JsonValue, current: JsonValue, position: int, *, step: int | None = None) -> None:
    """Checks that a stream saved at ``position`` with the mixture ``saved`` can resume with ``current``.

    Args:
      saved: ``mixture`` of the state's fingerprint.
      current: ``mixture`` of this feed's fingerprint.
      position: number of records delivered.
      step: the step that begins at ``position``, for the remedy.

    Raises:
      StateMismatchError: a stage that had started, or a component that it draws from, differs. For a changed stage, the
        remedy prints the weights to pass.
    """
    try:
        saved_components = {entry[0]: (number, entry[1]) for number, entry in enumerate(saved["components"])}
        names = list(saved_components)  # reject weights of other components, whose identity would go unchecked
        saved_stages = [Stage(int(s[1]), _check_weights(s[2], names), int(s[0])) for s in saved["stages"]]
        fixed = [name for name in {**current, **saved} if name not in ("stages", "components")]
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        raise StateMismatchError(
            "mixture",
            saved,
            "version, block, on_end, components and stages",
            "The state was changed or damaged; use an earlier checkpoint.",
        ) from None
    if not position:  # nothing has been drawn yet
        return
    for name in fixed:
        value, here = saved.get(name), current.get(name)
        if value != here or type(value) is not type(here):  # True equals 1
            raise StateMismatchError(
                f"mixture.{name}", value, here, f"Pass {name}={value!r}, or start a new stream without the state."
            )
    begun = [stage for stage in saved_stages if stage.first_position < position]
    now = [Stage(s[1], s[2], s[0]) for s in current["stages"]]
    now_begun = [stage for stage in now if stage.first_position < position]
    for index in range(max(len(begun), len(now_begun))):
        old = begun[index] if index < len(begun) else None
        new = now_begun[index] if index < len(now_begun) else None
        if old is None or new is None or not _same_stage(old, new):
            _raise_changed(index, old, new, begun, now, position, step)
    used = [name for name in saved_components if any(name in stage.weights for stage in begun)]
    _check_components(used, saved_components, current["components"])


def _same_stage(old: Stage, new: Stage) -> bool:
    # Weights that differ by a common factor draw the same records.
    def shares(weights: Weights) -> dict[str, Fraction]:
        whole = sum(Fraction(weight) for weight in weights.values())
        return {name: Fraction(weight) / whole for name, weight in weights.items()}

    return old.first_position == new.first_position and shares(old.weights) == shares(new.weights)


def _raise_changed(
    index: int,
    old: Stage | None,
    new: Stage | None,
    begun: Sequence[Stage],
    now: Sequence[Stage],
    position: int,
    step: int | None,
) -> None:
    in_force = [stage for stage in now if stage.first_position <= position][-1]
    later = [stage for stage in now if stage.first_position > position]
    stages: list[tuple[Any, Weights]] = [(stage.first_step, stage.weights) for stage in begun]
    if not _same_stage(dataclasses.replace(in_force, first_position=begun[-1].first_position), begun[-1]):
        stages.append(("<the next step>" if step is None else step, in_force.weights))
    stages += [(stage.first_step, stage.weights) for stage in later]
    raise StateMismatchError(
        f"mixture.stages[{index}]",
        None if old is None else (old.first_step, dict(old.weights)),
        None if new is None else (new.first_step, dict(new.weights)),
        "A stage that has begun cannot change: what was delivered was drawn by it. To go on with the new weights from "
        f"here, write {write_stages(stages)}",
    )


def _check_components(used: Sequence[str], saved: Mapping[str, tuple[int, Any]], current: Sequence[Any]) -> None:
    here = {entry[0]: (number, entry[1]) for number, entry in enumerate(current)}
    order = list(saved)
    for name in used:
        field, (number, identity) = f"mixture.components.{name}", saved[name]
        if name not in here:
            raise StateMismatchError(
                field,
                identity,
                None,
                "The past was drawn from it and must stay replayable: keep it among the components (in the order "
                f"{order}, additions last) and leave it out of the stages to come.",
            )
        new_number, new_identity = here[name]
        if new_number != number:
            raise StateMismatchError(
                f"{field}.number", number, new_number, f"Name the components in the order {order}, additions last."
            )
        if new_identity != identity:
            if isinstance(identity, dict) and isinstance(new_identity, dict):
                part = next(k for k in {**identity, **new_identity} if identity.get(k) != new_identity.get(k))
                field, identity, new_identity = f"{field}.{part}", identity.get(part), new_identity.get(part)
            raise StateMismatchError(
                field,
                identity,
                new_identity,
                "Pass the component's data as it was, or add the new data under a new name.",
            )
