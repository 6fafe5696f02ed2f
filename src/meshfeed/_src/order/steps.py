"""Maps past and future steps to positions and global batch sizes.

Delivered steps are stored as segments of equal batch size; future steps follow the batch schedule. Both are needed
because the batch size may change on resume, while ``record_ids`` of past steps must remain correct.
"""

from __future__ import annotations

import bisect

from meshfeed._src.base.settings import BatchSchedule
from meshfeed._src.order.segments import Segment


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
                continue  # extends the last segment; states stay small if the size does not change
            segments.append(Segment(first, position, size))
        self.segments: tuple[Segment, ...] = tuple(segments)
        self._firsts = [segment.first_step for segment in segments]

    def at(self, step: int) -> tuple[int, int]:
        """Returns the position of the first row of ``step`` and its global batch size."""
        segment = self.segments[bisect.bisect_right(self._firsts, step) - 1]
        return segment.first_position + (step - segment.first_step) * segment.size, segment.size

    def num_steps(self, total: int, *, pad: bool) -> int:
        """Number of steps in a stream of ``total`` records; ``pad`` includes the last partial batch."""
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
        """Position at which ``step`` begins, ignoring the end of the stream."""
        return self.at(step)[0]

    def delivered_json(self, step: int) -> list[list[int]]:
        """Segments of all steps before ``step``, in the format of a state, which :func:`parse_segments` reads."""
        return [[s.first_step, s.first_position, s.size] for s in self.segments if s.first_step < step]
