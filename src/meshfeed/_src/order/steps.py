"""Maps past and future steps to positions and global batch sizes.

Delivered steps are stored as segments of equal batch size; future steps follow the batch schedule. Both are needed
because the batch size may change on resume, while ``record_ids`` of past steps must remain correct.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import cast

from meshfeed._src.base.errors import DAMAGED_STATE, StateMismatchError
from meshfeed._src.base.settings import BatchSchedule
from meshfeed._src.base.types import JsonValue


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps of one batch size: step ``first_step + i`` begins at ``first_position + i * size``."""

    first_step: int
    first_position: int
    size: int

    def position_of(self, step: int) -> int:
        """Position at which ``step`` begins if the segment continues to it."""
        return self.first_position + (step - self.first_step) * self.size


class StepSchedule:
    """Positions and batch sizes of all steps.

    Args:
      schedule: batch sizes of future steps.
      past: segments delivered before ``step``.
      step: the first step to which ``schedule`` applies.
      position: position at which ``step`` begins, in records.
    """

    def __init__(
        self, schedule: BatchSchedule, *, past: tuple[Segment, ...] = (), step: int = 0, position: int = 0
    ) -> None:
        segments = list(past)
        for first in (step, *(first for first, _ in schedule.stages if first > step)):
            if first > step:
                position = segments[-1].position_of(first)
            size = schedule.size_at(first)
            # A segment that continues is extended: states stay small if the size does not change.
            if not segments or segments[-1].size != size or segments[-1].position_of(first) != position:
                segments.append(Segment(first, position, size))
        self.segments: tuple[Segment, ...] = tuple(segments)
        self._firsts = [segment.first_step for segment in segments]

    def at(self, step: int) -> tuple[int, int]:
        """Returns the position of the first row of ``step`` and its global batch size."""
        segment = self.segments[bisect.bisect_right(self._firsts, step) - 1]
        return segment.position_of(step), segment.size

    def sizes_from(self, step: int) -> tuple[int, ...]:
        """Returns the different global batch sizes of ``step`` and all later steps."""
        first = bisect.bisect_right(self._firsts, step) - 1
        return tuple(dict.fromkeys(segment.size for segment in self.segments[first:]))

    def num_steps(self, total: int, *, pad: bool) -> int:
        """Number of steps in a stream of ``total`` records; ``pad`` includes the last partial batch."""
        for segment, later in zip(self.segments, [*self._firsts[1:], None], strict=True):
            left = max(0, total - segment.first_position)
            reached = segment.first_step + (-(-left // segment.size) if pad else left // segment.size)
            # Without padding, a smaller batch of the next segment may still fit.
            if later is None or reached < later or (pad and reached == later):
                return reached
        raise AssertionError("the last segment is unbounded")

    def position_of_step(self, step: int) -> int:
        """Position at which ``step`` begins, ignoring the end of the stream."""
        return self.at(step)[0]

    def delivered_json(self, step: int) -> list[list[int]]:
        """Segments of all steps before ``step``, in the format of a state, which :func:`parse_segments` reads."""
        return [[s.first_step, s.first_position, s.size] for s in self.segments if s.first_step < step]


def parse_segments(raw: JsonValue) -> tuple[Segment, ...]:
    """Parses and validates the segments of a state.

    Raises:
      StateMismatchError: ``raw`` is not a list of [first_step, first_position, size], or the segments do not start at 0
        and join without gaps.
    """
    expected = "a list of [first_step, first_position, global_batch_size]"
    if not isinstance(raw, list):
        raise StateMismatchError("segments", raw, expected, DAMAGED_STATE)
    segments: list[Segment] = []
    for entry in cast("list[JsonValue]", raw):
        if not _is_segment(entry):
            raise StateMismatchError("segments", entry, expected, DAMAGED_STATE)
        segment = Segment(*entry)
        if segments:
            last, position = segments[-1], segments[-1].position_of(segment.first_step)
            joined = segment.first_step > last.first_step and segment.first_position == position
        else:
            joined = segment.first_step == segment.first_position == 0
        if not joined:
            raise StateMismatchError("segments", raw, "segments that begin at 0 and join without a gap", DAMAGED_STATE)
        segments.append(segment)
    return tuple(segments)


def _is_segment(entry: JsonValue) -> bool:
    numbers = cast("list[JsonValue]", entry) if isinstance(entry, list) else []
    return len(numbers) == 3 and all(type(number) is int and number >= 0 for number in numbers) and numbers[2] >= 1


def position_at(segments: tuple[Segment, ...], step: int) -> int:
    """Returns the position at which ``step`` begins if the last delivered segment continues to it."""
    return segments[-1].position_of(step) if segments else 0


def derive_step(segments: tuple[Segment, ...], position: int, total: int | None, *, pad: bool) -> int:
    """Returns the next step of a stream whose ``segments`` delivered ``position`` records.

    Raises:
      StateMismatchError: ``position`` is not the end of a batch.
    """
    if not segments:
        if position:
            raise StateMismatchError("position", position, 0, f"No batch was delivered. {DAMAGED_STATE}")
        return 0
    last = segments[-1]
    steps, rest = divmod(position - last.first_position, last.size)
    if rest and pad and position == total:  # the last batch is padded
        return last.first_step + steps + 1
    if rest or steps < 1:
        expected = f"a multiple of {last.size} rows after {last.first_position}"
        raise StateMismatchError("position", position, expected, DAMAGED_STATE)
    return last.first_step + steps
