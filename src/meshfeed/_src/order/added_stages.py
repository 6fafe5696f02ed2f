"""Stages of weights that a feed adds to its mixture during a run (``Feed.set_weights``).

The stages given to the mixture and the added ones together are its stages, in order of their first steps; at one step, an
added stage takes the place of a given one. Everything that follows from stages, such as the order, the files to fetch and the
fingerprint, sees only the result. The state lists the added ones, so that a feed made with the given weights continues with
them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import cast

from meshfeed._src.base.errors import DAMAGED_STATE, SettingsError, StateMismatchError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.order.weights import StagedWeights, parse_weights


def merge_stages(given: StagedWeights, added: StagedWeights) -> StagedWeights:
    """Returns the stages of a mixture that was made with the stages ``given``."""
    return tuple(sorted({**dict(given), **dict(added)}.items()))


def add_stage(added: StagedWeights, step: int, from_step: object, weights: dict[str, float]) -> StagedWeights:
    """Adds a stage in place of added stages that have not begun.

    Args:
      added: stages added before.
      step: the next step to be delivered; stages that begin there or later have not begun.
      from_step: first step of the new stage; None for ``step``.
      weights: component → weight.

    Raises:
      SettingsError: ``from_step`` is not an int, or has been delivered.
    """
    first_step = _checked_first_step(from_step, step)
    return (*(stage for stage in added if stage[0] < step), (first_step, weights))


def _checked_first_step(from_step: object, step: int) -> int:
    if from_step is None:
        return step
    try:
        first_step = -1 if isinstance(from_step, bool) else operator.index(cast("int", from_step))
    except TypeError:
        first_step = -1
    if first_step < 0:
        raise SettingsError(f"from_step={from_step!r}; it takes an int of at least 0, or None.", setting="from_step")
    if first_step < step:
        raise SettingsError(
            f"from_step={first_step}, but the steps before {step} have been delivered, and their records cannot change. "
            f"Pass from_step={step} or later, or omit it to begin with the next step.",
            setting="from_step",
        )
    return first_step


def parse_added(mixture: JsonValue) -> StagedWeights:
    """Returns the added stages of ``mixture`` in a fingerprint; none if the stream is no mixture.

    Raises:
      StateMismatchError: they are damaged.
    """
    if not hasattr(mixture, "get"):  # what else is damaged, the mixture reports
        return ()
    found = mixture.get("added", [])
    try:
        stages = tuple((step, parse_weights(weights, list(weights))[0][1]) for step, weights in found)
        steps = [step for step, _ in stages]
        # JSON has true and 1.5, which Python takes for numbers too.
        if any(type(step) is not int or step < 0 for step in steps) or steps != sorted(set(steps)):
            raise ValueError("steps are ascending whole numbers")
    except (TypeError, ValueError, AttributeError, IndexError, KeyError):
        remedy = DAMAGED_STATE
        raise StateMismatchError("mixture.added", found, "a list of [first_step, {name: weight}]", remedy) from None
    return stages


def check_added(added: StagedWeights, check: Callable[[object], object]) -> None:
    """Checks the added stages of a state against the mixture of this feed; ``check`` is its ``check_weights``.

    Raises:
      StateMismatchError: the mixture has not all of their components, or its block is too small for their weights.
    """
    for step, weights in added:
        try:
            check(weights)
        except SettingsError as error:
            raise StateMismatchError(
                "mixture.added",
                [step, weights],
                str(error),
                "The stage was set by set_weights: keep its components among those of the mixture.",
            ) from None


def check_stage_weights(weights: object, names: list[str]) -> dict[str, float]:
    """Returns the weights of one stage without components of weight 0.

    Raises:
      SettingsError: they are not {name: weight}, a name is unknown, or a weight is not a finite number of at least 0, or
        all are 0.
    """
    if not isinstance(weights, Mapping):
        raise SettingsError(
            f"weights={weights!r}; set_weights takes {{name: weight}}, the weights of one stage.", setting="weights"
        )
    return parse_weights(cast("Mapping[str, float]", weights), names)[0][1]


def not_a_mixture(kind: str) -> SettingsError:
    """Returns the error for ``set_weights`` of a feed whose source is of another kind."""
    return SettingsError(
        f"set_weights(weights=…), but the feed's source is of kind {kind!r} and has no weights. It takes a feed over a "
        "Mixture. What is built over a mixture (Packed, Buckets, a view) has its records in a fixed order: build it "
        "over the components instead, as in Mixture({name: Packed(…)}, weights=…).",
        setting="weights",
    )
