"""What a host publishes while it reads, for the hosts that continue without it.

A killed host cannot say where it was. With random access this is no loss: every host can read every record. The state of a
lane, however, is known only to the host that reads it, and so are the bad records that it replaced. Both are published with
the reports on windows, below keys of their own, which no host reads before :meth:`meshfeed.Feed.reshard`::

    <host>/first    its lanes at the start of a generation of the feed
    <host>/<slot>   its lanes at the start of a recent window; the oldest slot is overwritten
    <host>/bad      its ledger of bad records, including those read ahead, and the step at which its feed was last set

A host delivers a step only after all hosts have published the window of that step, and none reads further ahead than two
windows and ``prefetch``. The slots reach back further than that. So for each lane of a lost host there is a state at or
before the step at which the others continue, and not long before it. Lanes are published at most every half second, which
keeps the requests few, and not if they are larger than a megabyte; then the start of the generation has to do. What was
published in the generation before is deleted.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from meshfeed._src.base.coordination import KeyValueStore
from meshfeed._src.base.types import JsonValue
from meshfeed._src.state.state import FeedState, Ledgers
from meshfeed._src.streams.protocol import Cursor, HostBatch

_PAUSE_SECONDS = 0.5
_HOSTS_PER_SECOND = 1_000  # publications that one coordinator takes beside the windows
_BYTES_PER_SECOND = 20e6  # of all hosts together
_MAX_BYTES = 1 << 20
_SLOTS = 6  # windows; and one more for each batch of ``prefetch``


def _prefix(scope: str) -> str:
    return f"meshfeed/{scope}/handover"


@dataclasses.dataclass(frozen=True)
class Past:
    """What hosts of a feed need to know of a stream, beside its settings, to tell whether two positions are in one past.

    A feed can be set to an earlier state and then get other batch sizes or weights.

    Attributes:
      step: the next step.
      segments: batch sizes of the steps before it.
      cut: number of lanes, and the version of the rule that divides the stream into lanes.
      stages: stages of a mixture, those that have begun first.
    """

    step: int
    segments: JsonValue
    cut: JsonValue
    stages: JsonValue

    @classmethod
    def of(cls, state: FeedState, step: int) -> Past:
        """Returns the past of a state, whose next step is ``step``."""
        mixture: JsonValue = state.fingerprint.get("mixture", {"stages": []})
        return cls(step, state.segments, [state.num_lanes, state.fingerprint.get("cut", 1)], mixture["stages"])

    def agrees_with(self, other: Past) -> bool:
        """Whether both are the same up to the earlier of their steps."""
        step = min(self.step, other.step)
        return self.cut == other.cut and all(
            [one for one in mine if one[0] < step] == [one for one in theirs if one[0] < step]
            for mine, theirs in ((self.segments, other.segments), (self.stages, other.stages))
        )


class Handover:
    """What this host publishes in one generation of a feed. Called on the reader's thread."""

    def __init__(
        self,
        store: KeyValueStore,
        *,
        scope: str,  # of the feed, over its current hosts
        host: int,
        num_hosts: int,
        cursor: Cursor,  # where the generation starts
        state: FeedState,  # the state there
        # HostBatch.entries → lanes as a state has them
        to_json: Callable[[Mapping[str, Any]], Mapping[str, JsonValue]],
        prefetch: int,  # global batches that a host may have ready
        origin: int,  # step of the state that the feed was last set to; a ledger only grows from there on
    ) -> None:
        self._store, self._key, self._host, self._num_hosts = store, f"{_prefix(scope)}/{host}", str(host), num_hosts
        self._start_past = Past.of(state, cursor.step)
        self._step_schedule, self._step = cursor.step_schedule, cursor.step
        self._ledgers, self._origin = cursor.skipped, origin
        self._start: Mapping[str, JsonValue] | None = state.lanes or {}
        self._to_json = to_json
        self._entries: Mapping[str, Any] = {}
        self._num_slots = _SLOTS + prefetch
        self._published = 0
        self._next = 0.0

    def publish(self, window: Sequence[HostBatch]) -> None:
        """Publishes what others need if this host is lost after it has published the report on ``window``."""
        if self._start is not None:  # all hosts are here; under weights set since, lanes read ahead may have other ends
            self._store.delete(self._key)
        self._publish_bad(window)
        if self._start is not None:
            start, self._start = self._start, None
            own = window[0].entries if window else start  # a state may have the lanes of all hosts
            self._publish_lanes("first", {lane: entry for lane, entry in start.items() if lane in own})
        elif self._entries and time.monotonic() >= self._next:
            self._publish_lanes(str(self._published % self._num_slots), self._to_json(self._entries))
            self._published += 1
        if window:
            self._entries, self._step = window[-1].entries, window[-1].step + 1

    def _publish_lanes(self, slot: str, lanes: Mapping[str, JsonValue]) -> None:
        if not lanes:
            return
        text = json.dumps([self._past_at(self._step), lanes])
        if slot == "first" or len(text) <= _MAX_BYTES:
            self._store.set(f"{self._key}/{slot}", text, overwrite=True)
        pause = max(
            _PAUSE_SECONDS, self._num_hosts / _HOSTS_PER_SECOND, len(text) * self._num_hosts / _BYTES_PER_SECOND
        )
        self._next = time.monotonic() + pause

    def _publish_bad(self, window: Sequence[HostBatch]) -> None:
        before = self._ledgers
        for batch in window:
            self._ledgers = self._ledgers.after(batch.bad, batch.step)
        own = [self._ledgers.listed.get(self._host, ()), self._ledgers.num_unlisted.get(self._host, 0)]
        # At the start of a generation also without a new one: what is published may be of another past.
        if self._ledgers is not before or (self._start is not None and any(own)):
            text = json.dumps([self._past_at(window[-1].step + 1 if window else self._step), [*own, self._origin]])
            self._store.set(f"{self._key}/bad", text, overwrite=True)

    def _past_at(self, step: int) -> JsonValue:
        segments = self._step_schedule.delivered_json(step)
        return dataclasses.astuple(dataclasses.replace(self._start_past, step=step, segments=segments))


class HandedOver:
    """What hosts have published, and states that they have brought."""

    def __init__(self) -> None:
        self._lanes: list[tuple[Past, Mapping[str, JsonValue]]] = []  # lane → entry as in a state
        self._ledgers: list[tuple[Past, Ledgers]] = []

    @classmethod
    def read(cls, store: KeyValueStore, scopes: Mapping[str, Container[int]]) -> HandedOver:
        """Reads the publications of all hosts below some scopes of a feed, with the origins of the ledgers that count.

        A ledger from before a ``set_state`` has records that other hosts may have in the new state.
        """
        found = cls()
        for scope, origins in scopes.items():
            for key, text in store.directory(_prefix(scope)).items():
                host, _, slot = key.partition("/")
                past, value = json.loads(text)
                if slot == "bad":
                    listed, num_unlisted, origin = value
                    if origin in origins:
                        ledgers = Ledgers({host: listed}, {host: num_unlisted} if num_unlisted else {})
                        found._ledgers.append((Past(*past), ledgers))
                else:
                    found._lanes.append((Past(*past), value))
        return found

    def add(self, state: FeedState, step: int, *, ledgers: bool = True) -> None:
        """Adds the lanes of a state, whose next step is ``step``, and its ledgers if they count."""
        past = Past.of(state, step)
        self._lanes.append((past, state.lanes or {}))
        if ledgers:
            self._ledgers.append((past, Ledgers.of_state(state)))

    def lanes_before(self, past: Past) -> list[Mapping[str, JsonValue]]:
        """Returns the lanes that were known at or before the step of ``past``, in that past."""
        return [lanes for of, lanes in self._lanes if of.step <= past.step and of.agrees_with(past)]

    def ledgers_of(self, past: Past) -> list[Ledgers]:
        """Returns the ledgers of ``past``; they may also have records of later steps."""
        return [ledgers for of, ledgers in self._ledgers if of.agrees_with(past)]
