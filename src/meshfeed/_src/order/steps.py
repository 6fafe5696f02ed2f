"""Which rows of the stream a step holds: steps → (position, global batch size), past and future.

The past is what was delivered, as segments of equal batch size; the future is the batch schedule. Both are needed
because the batch size may change on resume while ``record_ids`` of past steps must stay right.
"""

from __future__ import annotations

import bisect
import dataclasses

from meshfeed._src.base.errors import StateMismatchError
from meshfeed._src.base.settings import BatchSchedule


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps of one size: step ``first_step + i`` begins at ``first_position + i * size``."""

    first_step: int
    first_position: int
    size: int


class StepSchedule:
    """Steps laid out over the stream.

    Args:
      schedule: sizes of the steps to come.
      past: segments delivered before ``step``.
      step: the first step that follows the schedule.
      position: where that step begins, in records.
    """

    def __init__(
        self, schedule: BatchSchedule, *, past: tuple[Segment, ...] = (), step: int = 0, position: int = 0
    ) -> None:
        segments = list(past)
        boundaries = [step, *(first for first, _ in schedule.stages if first > step)]
        for i, first in enumerate(boundaries):
            if i:
                position += (first - boundaries[i - 1]) * schedule.size_at(boundaries[i - 1])
            size = schedule.size_at(first)
            last = segments[-1] if segments else None
            if (
                last is not None
                and last.size == size
                and last.first_position + (first - last.first_step) * size == position
            ):
                continue
            segments.append(Segment(first, position, size))
        self.segments: tuple[Segment, ...] = tuple(segments)
        self._firsts = [segment.first_step for segment in segments]

    def segment_at(self, step: int) -> Segment:
        """The segment that holds ``step``."""
        return self.segments[bisect.bisect_right(self._firsts, step) - 1]

    def at(self, step: int) -> tuple[int, int]:
        """Position of the first row of ``step`` and its global batch size."""
        segment = self.segment_at(step)
        return segment.first_position + (step - segment.first_step) * segment.size, segment.size

    def num_steps(self, total: int, *, pad: bool) -> int:
        """Steps until ``total`` records are delivered; the last partial one counts with ``pad``."""
        for i, segment in enumerate(self.segments):
            left = total - segment.first_position
            if left <= 0:
                return segment.first_step
            steps = -(-left // segment.size) if pad else left // segment.size
            later = self.segments[i + 1].first_step if i + 1 < len(self.segments) else None
            if later is None or segment.first_step + steps <= later:
                reached = segment.first_step + steps
                if later is not None and reached == later and not pad:
                    continue  # a smaller batch may still fit
                return reached
        raise AssertionError("the last segment is unbounded")

    def position_of_step(self, step: int) -> int:
        """Position at which ``step`` begins, the end of the stream left out of account."""
        return self.at(step)[0]

    def delivered(self, step: int) -> tuple[Segment, ...]:
        """Segments of the steps before ``step``."""
        return tuple(segment for segment in self.segments if segment.first_step < step)

    def delivered_json(self, step: int) -> list[list[int]]:
        """:meth:`delivered` as a state holds it; :func:`parse_segments` reads it."""
        return [[s.first_step, s.first_position, s.size] for s in self.delivered(step)]


def parse_segments(raw: object) -> tuple[Segment, ...]:
    """Segments of a state, checked.

    Raises:
      StateMismatchError: not a list of [first_step, first_position, size] that join without a gap.
    """
    remedy = "The state was changed or damaged; use an earlier checkpoint."
    expected = "a list of [first_step, first_position, global_batch_size]"
    if not isinstance(raw, list):
        raise StateMismatchError("segments", raw, expected, remedy)
    segments: list[Segment] = []
    for entry in raw:
        good = (
            isinstance(entry, list)
            and len(entry) == 3
            and all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in entry)
            and entry[2] >= 1
        )
        if not good:
            raise StateMismatchError("segments", entry, expected, remedy)
        segment = Segment(*entry)
        if segments:
            last = segments[-1]
            steps = segment.first_step - last.first_step
            joined = steps > 0 and segment.first_position == last.first_position + steps * last.size
        else:
            joined = segment.first_step == 0 and segment.first_position == 0
        if not joined:
            raise StateMismatchError("segments", raw, "segments that begin at 0 and join without a gap", remedy)
        segments.append(segment)
    return tuple(segments)


def derive_step(segments: tuple[Segment, ...], position: int, total: int | None, *, pad: bool) -> int:
    """The next step of a stream of which ``position`` records are delivered in ``segments``.

    Raises:
      StateMismatchError: a position that is not at the end of a batch.
    """
    remedy = "The state was changed or damaged; use an earlier checkpoint."
    if not segments:
        if position:
            raise StateMismatchError("position", position, 0, f"No batch was delivered. {remedy}")
        return 0
    last = segments[-1]
    steps, rest = divmod(position - last.first_position, last.size)
    if rest and pad and position == total:
        return last.first_step + steps + 1
    if rest or steps < 1:
        raise StateMismatchError(
            "position", position, f"a multiple of {last.size} rows after {last.first_position}", remedy
        )
    return last.first_step + steps
