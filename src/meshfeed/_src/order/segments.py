"""Delivered steps in a state: segments of one batch size, from which a restored stream derives its next step."""

from __future__ import annotations

import dataclasses
from typing import cast

from meshfeed._src.base.errors import StateMismatchError
from meshfeed._src.base.types import JsonValue

_REMEDY = "The state was changed or damaged; use an earlier checkpoint."


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps of one batch size: step ``first_step + i`` begins at ``first_position + i * size``."""

    first_step: int
    first_position: int
    size: int


def parse_segments(raw: JsonValue) -> tuple[Segment, ...]:
    """Parses and validates the segments of a state.

    Raises:
      StateMismatchError: ``raw`` is not a list of [first_step, first_position, size], or the segments do not start at 0
        and join without gaps.
    """
    expected = "a list of [first_step, first_position, global_batch_size]"
    if not isinstance(raw, list):
        raise StateMismatchError("segments", raw, expected, _REMEDY)
    segments: list[Segment] = []
    for entry in cast("list[JsonValue]", raw):
        if not _is_segment(entry):
            raise StateMismatchError("segments", entry, expected, _REMEDY)
        segment = Segment(*entry)
        if segments:
            last = segments[-1]
            steps = segment.first_step - last.first_step
            joined = steps > 0 and segment.first_position == last.first_position + steps * last.size
        else:
            joined = segment.first_step == 0 and segment.first_position == 0
        if not joined:
            raise StateMismatchError("segments", raw, "segments that begin at 0 and join without a gap", _REMEDY)
        segments.append(segment)
    return tuple(segments)


def _is_segment(entry: JsonValue) -> bool:
    numbers = cast("list[JsonValue]", entry) if isinstance(entry, list) else []
    return len(numbers) == 3 and all(type(number) is int and number >= 0 for number in numbers) and numbers[2] >= 1


def position_at(segments: tuple[Segment, ...], step: int) -> int:
    """Returns the position at which ``step`` begins if the last delivered segment continues to it."""
    if not segments:
        return 0
    last = segments[-1]
    return last.first_position + (step - last.first_step) * last.size


def derive_step(segments: tuple[Segment, ...], position: int, total: int | None, *, pad: bool) -> int:
    """Returns the next step of a stream whose ``segments`` delivered ``position`` records.

    Raises:
      StateMismatchError: ``position`` is not the end of a batch.
    """
    if not segments:
        if position:
            raise StateMismatchError("position", position, 0, f"No batch was delivered. {_REMEDY}")
        return 0
    last = segments[-1]
    steps, rest = divmod(position - last.first_position, last.size)
    if rest and pad and position == total:  # the last batch is padded
        return last.first_step + steps + 1
    if rest or steps < 1:
        raise StateMismatchError(
            "position", position, f"a multiple of {last.size} rows after {last.first_position}", _REMEDY
        )
    return last.first_step + steps
