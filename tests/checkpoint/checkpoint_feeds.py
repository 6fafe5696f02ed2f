"""A small feed with the state of a real one, for tests that are not about feeds."""

from __future__ import annotations

import json
from typing import Any

from meshfeed._src.base.errors import StateMismatchError
from meshfeed._src.state.state import parse_state, seal


class CountingFeed:
    """Random access over ``records`` numbers: step k delivers ids ``[k*b, (k+1)*b)``."""

    def __init__(self, batch: int = 4, records: int = 1000) -> None:
        self.batch, self.records, self.position = batch, records, 0

    @property
    def step(self) -> int:
        return self.position // self.batch

    def __next__(self) -> list[int]:
        ids = list(range(self.position, self.position + self.batch))
        self.position += self.batch
        return ids

    def get_state(self) -> dict[str, Any]:
        return {
            "meshfeed": 1,
            "kind": "random_access",
            "position": self.position,
            "segments": [[0, 0, self.batch]],
            "fingerprint": {"source": {"records": self.records}},
        }

    def set_state(self, state: Any) -> None:
        parsed = parse_state(state)
        if parsed.fingerprint != self.get_state()["fingerprint"]:
            raise StateMismatchError("source.records", parsed.fingerprint, self.records, "Pass the saved source.")
        self.position = parsed.position


class OtherIterator:
    """An iterator that is not a feed, whose ``get_state`` returns its own state."""

    def __init__(self, state: object) -> None:
        self.state = state

    def get_state(self) -> object:
        return self.state

    def set_state(self, state: object) -> None:
        self.state = state


class LaneFeed:
    """Lanes of counters; this host holds ``lanes``, and their state holds a tuple."""

    def __init__(self, lanes: list[int], num_lanes: int, batch: int = 8) -> None:
        self.num_lanes, self.batch, self.position = num_lanes, batch, 0
        self.counters = dict.fromkeys(lanes, 0)

    @property
    def step(self) -> int:
        return self.position // self.batch

    def __next__(self) -> dict[int, int]:
        for lane in self.counters:
            self.counters[lane] += 1 + lane
        self.position += self.batch
        return dict(self.counters)

    def get_state(self) -> dict[str, Any]:
        return {
            "meshfeed": 1,
            "kind": "lanes",
            "position": self.position,
            "segments": [[0, 0, self.batch]],
            "fingerprint": {"num_lanes": self.num_lanes},
            "step": self.step,
            "num_lanes": self.num_lanes,
            "lanes": {str(lane): seal({"count": count}) for lane, count in self.counters.items()},
        }

    def set_state(self, state: Any) -> None:
        parsed = parse_state(json.loads(json.dumps(state)))
        missing = [lane for lane in self.counters if str(lane) not in (parsed.lanes or {})]
        if missing:
            raise StateMismatchError("lanes", sorted(parsed.lanes or {}), missing, "Merge the states of all hosts.")
        assert parsed.lanes is not None
        self.counters = {lane: parsed.lanes[str(lane)]["count"] for lane in self.counters}
        self.position = parsed.position
