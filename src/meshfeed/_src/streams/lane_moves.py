"""Lanes that move to another host while the job runs: which known state of a lane to open, and how to reach a step from it.

The host that held a lane may be gone. Its last known state is then behind the step at which the others continue, and the
records in between are read again and dropped, so the lane continues exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.types import JsonValue, StreamSource
from meshfeed._src.order.steps import parse_segments, position_at
from meshfeed._src.state.state import FeedState
from meshfeed._src.streams.lane import LaneEntry, LaneSettings
from meshfeed._src.streams.lane_group import LaneGroup

_CHUNK_RECORDS = 1024  # records that are held at once


def furthest_entries(found: Iterable[Mapping[str, JsonValue]], state: FeedState) -> dict[str, JsonValue]:
    """Returns the entry of each lane that is furthest without being past the step of ``state``.

    Args:
      found: lane → entry as in a state, of any steps and hosts.
      state: a state of the stream, whose own lanes are ignored.
    """
    # Of a lane that has not ended.
    records = position_at(parse_segments(state.segments), state.step or 0) // (state.num_lanes or 1)

    def rank(entry: JsonValue) -> tuple[int, bool, int]:
        # A lane that has delivered as many records and has ended is known from a later step.
        return entry["records"], not entry["ended"], -entry["skip"]

    best: dict[str, JsonValue] = {}
    for lanes in found:
        for lane, entry in lanes.items():
            if entry["records"] <= records and (lane not in best or rank(entry) > rank(best[lane])):
                best[lane] = entry
    return best


def read_forward(
    source: StreamSource, settings: LaneSettings, entries: Mapping[int, LaneEntry], records: int, num_threads: int
) -> dict[int, LaneEntry]:
    """Returns the entries of the lanes after ``records`` records each, or at their end.

    Args:
      source: a stream source.
      settings: shared settings of the lanes.
      entries: lane → an entry at or before ``records``.
      records: records that each lane has delivered.
      num_threads: threads that read lanes in parallel.
    """
    behind: dict[int, dict[int, LaneEntry]] = {}  # missing records → lanes
    for lane, entry in entries.items():
        if not entry.ended and entry.records < records:
            behind.setdefault(records - entry.records, {})[lane] = entry
    forward = dict(entries)
    for missing, lanes in behind.items():
        group = LaneGroup(source, settings, min(num_threads, len(lanes)))
        try:
            group.go_to(lanes)
            with Dropping(f"lanes {sorted(lanes)} of other hosts", missing) as dropping:
                for start in range(0, missing, _CHUNK_RECORDS):
                    count = min(_CHUNK_RECORDS, missing - start)
                    forward.update((lane, rows.entry) for lane, rows in group.read(count).lanes.items())
                    dropping.add(count)
        finally:
            group.close()
    return forward
