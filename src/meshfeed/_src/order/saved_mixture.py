"""Whether a mixture can resume from a saved one.

Stages that had started when a state was saved determined the records already delivered, so they must be unchanged, as must
the components that they draw from; later stages may change.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import cast

from meshfeed._src.base.errors import DAMAGED_STATE, StateMismatchError
from meshfeed._src.base.identities import as_saved
from meshfeed._src.base.types import JsonValue
from meshfeed._src.order.weights import Stage, Weights, check_weights, write_stages


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
    saved_components, saved_stages = _parse_mixture(saved)
    if not position:  # nothing has been drawn yet
        return
    _check_settings(saved, current)
    now = [Stage(s[1], s[2], s[0]) for s in current["stages"]]
    begun = _begun(saved_stages, position)
    for index, (old, new) in enumerate(itertools.zip_longest(begun, _begun(now, position))):
        if old is None or new is None or not _same_stage(old, new):
            _raise_changed(index, old, new, begun, now, position, step)
    used = [name for name in saved_components if any(name in stage.weights for stage in begun)]
    _check_components(used, saved_components, current["components"])


def same_components(saved: JsonValue, current: JsonValue) -> bool:
    """Whether a saved mixture, which may be damaged, has the components of the current one, read or not."""
    try:
        then, now = ({entry[0]: entry[1] for entry in mixture["components"]} for mixture in (saved, current))
    except (TypeError, KeyError, IndexError):
        return True  # check_stages refuses it
    return as_saved(now, then) == then


_Numbered = Mapping[str, tuple[int, JsonValue, JsonValue]]  # component → number, identity, digest of shards or None


def _number(components: JsonValue) -> _Numbered:
    return {entry[0]: (number, entry[1], [*entry, None][2]) for number, entry in enumerate(components)}


def _parse_mixture(saved: JsonValue) -> tuple[_Numbered, list[Stage]]:
    """Returns the components and the stages of a saved mixture."""
    try:
        components = _number(saved["components"])
        names = list(components)  # reject weights of other components, whose identity would go unchecked
        stages = [Stage(first, check_weights(weights, names), step) for step, first, weights in saved["stages"]]
        firsts = [number for stage in stages for number in (stage.first_step, stage.first_position)]
        # Values of other types: JSON has true and 1.5, which Python takes for numbers too.
        if firsts[:2] != [0, 0] or any(type(number) is not int for number in firsts):
            raise ValueError("stages begin at 0, at whole steps and positions")
        return components, stages
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        raise StateMismatchError(
            "mixture", saved, "version, block, on_end, components and stages", DAMAGED_STATE
        ) from None


def _check_settings(saved: JsonValue, current: JsonValue) -> None:
    for name in {**current, **saved}:
        value, here = saved.get(name), current.get(name)
        # Compared elsewhere; of the others, True equals 1.
        if name not in ("stages", "components", "added") and (value != here or type(value) is not type(here)):
            raise StateMismatchError(
                f"mixture.{name}", value, here, f"Pass {name}={value!r}, or start a new stream without the state."
            )


def _begun(stages: Sequence[Stage], position: int) -> list[Stage]:
    # Not <=: nothing has been drawn yet from a stage that starts at the position.
    return [stage for stage in stages if stage.first_position < position]


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
    stages: list[tuple[object, Weights]] = [(stage.first_step, stage.weights) for stage in begun]
    if not _same_stage(dataclasses.replace(in_force, first_position=begun[-1].first_position), begun[-1]):
        stages.append(("<the next step>" if step is None else step, in_force.weights))
    stages += [(stage.first_step, stage.weights) for stage in later]
    raise StateMismatchError(
        f"mixture.stages[{index}]",
        None if old is None else (old.first_step, dict(old.weights)),
        None if new is None else (new.first_step, dict(new.weights)),
        "A stage that has begun cannot change, because delivered records were drawn with it. To use the new weights "
        f"from here on, pass {write_stages(stages)}",
    )


def _check_components(used: Sequence[str], saved: _Numbered, current: JsonValue) -> None:
    here, order = _number(current), list(saved)
    for name in used:
        field, (number, identity, shards) = f"mixture.components.{name}", saved[name]
        if name not in here:
            raise StateMismatchError(
                field,
                identity,
                None,
                "Delivered records came from it and must remain replayable: keep it among the components (in the order "
                f"{order}, additions last) and leave it out of later stages.",
            )
        new_number, new_identity = here[name][0], as_saved(here[name][1], identity)
        if new_number != number:
            raise StateMismatchError(
                f"{field}.number", number, new_number, f"Pass the components in the order {order}, additions last."
            )
        if new_identity != identity:
            if isinstance(identity, dict) and isinstance(new_identity, dict):
                old, new = cast("dict[str, JsonValue]", identity), cast("dict[str, JsonValue]", new_identity)
                part = next(name for name in {**old, **new} if old.get(name, "missing") != new.get(name, "missing"))
                field, identity, new_identity = f"{field}.{part}", old.get(part, "missing"), new.get(part, "missing")
            raise StateMismatchError(
                field,
                identity,
                new_identity,
                "Pass the component's original data, or add the new data under a new name.",
            )
        if shards is not None and shards != here[name][2]:
            raise StateMismatchError(
                f"{field}.shards",
                shards,
                here[name][2],
                "The same records in shards of other lengths, in which they have another order. Pass the component as it was "
                "(a Zip has the shards of its first source that has any), or add it under a new name.",
            )
