"""Weights of a mixture, as users give them: checked, in stages, and as counts of a block.

Weights are given as ``{name: weight}`` or as stages ``[(first_step, {name: weight}), ...]``. A stage applies from its
first step until the next stage.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import cast

import numpy as np

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.types import JsonValue

_log = logging.getLogger("meshfeed.mixture")

MAX_BLOCK = 1 << 24
"""Records of a block at most. Layouts of several blocks are held in memory, 16 bytes per record."""

Weights = Mapping[str, float]
GivenWeights = Weights | Sequence[tuple[int, Weights]]
"""Weights as users pass them; :func:`parse_weights` rejects everything else."""
StagedWeights = tuple[tuple[int, dict[str, float]], ...]
"""(first step, weights) pairs, the first at step 0."""

_TAKES = "{name: weight}, or stages [(first_step, {name: weight}), ...] with steps increasing from 0"


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


def parse_weights(weights: GivenWeights, names: Sequence[str]) -> StagedWeights:
    """Converts the user's weights to stages, without components of weight 0.

    Raises:
      SettingsError: the weights have neither form, a name is unknown, a weight is not a finite number of at least 0,
        or all weights of a stage are 0.
    """
    given = cast("object", [(0, weights)] if isinstance(weights, Mapping) else weights)  # not validated yet
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise SettingsError(f"weights={weights!r}; it takes {_TAKES}.", setting="weights")
    stages: list[tuple[int, dict[str, float]]] = []
    for entry in cast("Sequence[tuple[int, Weights]]", given):
        if not _is_stage(entry):
            raise SettingsError(f"weights has the stage {entry!r}; it takes {_TAKES}.", setting="weights")
        first_step = int(entry[0])
        if first_step != 0 if not stages else first_step <= stages[-1][0]:
            expected = "0" if not stages else f"more than {stages[-1][0]}"
            raise SettingsError(
                f"stage {len(stages)} of weights begins at step {first_step}, expected {expected}; it takes {_TAKES}.",
                setting="weights",
            )
        stages.append((first_step, check_weights(entry[1], names)))
    return tuple(stages)


def nest_stages(stages: StagedWeights, name: str, inner: StagedWeights) -> StagedWeights:
    """Replaces the component ``name`` by the components of a mixture, named ``name/component``, which share its weight."""
    found: list[tuple[int, dict[str, float]]] = []
    for step in sorted({step for step, _ in (*stages, *inner)}):
        outer_weights, inner_weights = (
            next(weights for first, weights in reversed(group) if first <= step) for group in (stages, inner)
        )
        total = math.fsum(inner_weights.values())
        weights: dict[str, float] = {}
        for key, weight in outer_weights.items():
            if key == name:
                weights |= {f"{name}/{part}": weight * share / total for part, share in inner_weights.items()}
            else:
                weights[key] = weight
        if not found or found[-1][1] != weights:
            found.append((step, weights))
    return tuple(found)


def check_all_named(weights: GivenWeights, names: Sequence[str]) -> None:
    """Reports components missing from the weights, which would never be read.

    With stages this is only a warning, because the component may be meant for a stage added later. To exclude a
    component explicitly, give it the weight 0.

    Raises:
      SettingsError: weights of the form ``{name: weight}`` omit a component.
    """
    stages = [(0, weights)] if isinstance(weights, Mapping) else weights
    named = {name for _, stage in stages for name in stage}
    missing = [repr(name) for name in names if name not in named]
    if not missing:
        return
    forgotten = f"component{'s' * (len(missing) > 1)} {', '.join(missing)}"
    if not isinstance(weights, Mapping):
        _log.warning("no stage of weights names the %s: not read until a stage does.", forgotten)
        return
    complete = {name: weights.get(name, 1) for name in names}
    raise SettingsError(
        f"weights leaves out the {forgotten}, which would never be read. Name every component, as in "
        f"weights={complete!r} (0: not read), or remove it from the components.",
        setting="weights",
    )


def _is_stage(entry: object) -> bool:
    match entry:
        case [bool(), object()]:
            return False
        case [int() | np.integer() as step, Mapping()]:
            return int(step) >= 0
        case _:
            return False


def check_weights(weights: Mapping[str, object], names: Sequence[str]) -> dict[str, float]:
    checked: dict[str, float] = {}
    for name, weight in weights.items():
        if name not in names:
            raise SettingsError(
                f"weights has the unknown component {name!r}; the components are {', '.join(map(repr, names))}.",
                setting="weights",
            )
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not 0 <= float(weight) < math.inf:
            remedy = "" if isinstance(weight, numbers.Real) else " Pass an int or a float, such as float(array)."
            raise SettingsError(
                f"weights has {weight!r} for {name!r}; a weight is a finite number of at least 0.{remedy}",
                setting="weights",
            )
        if float(weight) > 0:
            checked[name] = int(weight) if isinstance(weight, numbers.Integral) else float(weight)
    if not checked:
        raise SettingsError(f"weights={dict(weights)!r} leaves no component with a weight above 0.", setting="weights")
    return checked


def block_counts(weights: Weights, names: Sequence[str], block: int) -> tuple[int, ...]:
    """Number of records of each component per block, by the largest remainder method; ties go to the earlier component.

    Raises:
      SettingsError: ``block`` is above :data:`MAX_BLOCK`; or a component with a weight would get no records, and the message
        states a sufficient block size, if there is one.
    """
    if block > MAX_BLOCK:
        raise SettingsError(
            f"block={block:,}; it takes at most {MAX_BLOCK:,}, because the layout of a block is held in memory.",
            setting="block",
        )
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
            larger = f"Pass block={enough} or more, or leave" if enough <= MAX_BLOCK else "Raise the weight, or leave"
            raise SettingsError(
                f"block={block} is too small for the weight of {name!r} ({float(exact[name] / whole):.3g} of all), "
                f"which would never get a record. {larger} the component out.",
                setting="block",
            )
    return tuple(counts.get(name, 0) for name in names)


def write_stages(stages: Sequence[tuple[object, Weights]]) -> str:
    """Formats stages as the Python source of the keyword, for messages."""
    return "weights=[" + ", ".join(f"({step}, {dict(weights)!r})" for step, weights in stages) + "]"
