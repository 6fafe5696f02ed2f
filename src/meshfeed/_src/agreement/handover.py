"""What a host publishes while it reads, for the hosts that continue without it.

A killed host cannot say where it was. With random access this is no loss: every host can read every record. The state of a
lane, however, is known only to the host that reads it, and so are the bad records that it replaced. Both are published with
the reports on windows, below keys of their own, which no host reads before :meth:`meshfeed.Feed.reshard`::

    <host>/first    its lanes at the start of a generation of the feed
    <host>/<slot>   its lanes at the start of a recent window; the oldest slot is overwritten
    <host>/bad      its ledger of bad records, including those read ahead

A host delivers a step only after all hosts have published the window of that step, and none reads further ahead than two
windows and ``prefetch``. The slots reach back further than that. So for each lane of a lost host there is a state at or
before the step at which the others continue, and not long before it. Lanes are published at most every half second, which
keeps the requests few, and not if they are larger than a megabyte; then the start of the generation has to do.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

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


class Handover:
    """What this host publishes in one generation of a feed. Called on the reader's thread.

    Args:
      store: the key-value store.
      scope: the feed's scope over its current hosts.
      host: this process.
      num_hosts: hosts of the feed.
      cursor: where the generation starts.
      state: the state there.
      to_json: :attr:`HostBatch.entries` → lanes as a state has them.
      prefetch: global batches that a host may have ready.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        scope: str,
        host: int,
        num_hosts: int,
        cursor: Cursor,
        state: FeedState,
        to_json: Callable[[Mapping[str, Any]], Mapping[str, JsonValue]],
        prefetch: int,
    ) -> None:
        self._store, self._key, self._host, self._num_hosts = store, f"{_prefix(scope)}/{host}", str(host), num_hosts
        self._cut = cut_of(state)
        self._step_schedule, self._step = cursor.step_schedule, cursor.step
        self._ledgers = cursor.skipped
        self._start: Mapping[str, JsonValue] | None = state.lanes or {}
        self._to_json = to_json
        self._entries: Mapping[str, Any] = {}
        self._num_slots = _SLOTS + prefetch
        self._published = 0
        self._next = 0.0

    def publish(self, window: Sequence[HostBatch]) -> None:
        """Publishes what others need if this host is lost after it has published the report on ``window``."""
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
        text = json.dumps([self._cut, self._step_schedule.delivered_json(self._step), lanes])
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
        if self._ledgers is not before:
            own = [self._ledgers.listed.get(self._host, ()), self._ledgers.num_unlisted.get(self._host, 0)]
            self._store.set(f"{self._key}/bad", json.dumps(own), overwrite=True)


@dataclasses.dataclass
class HandedOver:
    """What hosts have published.

    Attributes:
      lanes: (how the stream was cut, delivered segments, lane → entry as in a state) of each publication.
      ledgers: the ledgers of each host.
    """

    lanes: list[tuple[JsonValue, list[JsonValue], Mapping[str, JsonValue]]] = dataclasses.field(
        default_factory=list["tuple[JsonValue, list[JsonValue], Mapping[str, JsonValue]]"]
    )
    ledgers: list[Ledgers] = dataclasses.field(default_factory=list[Ledgers])

    @classmethod
    def read(cls, store: KeyValueStore, scopes: Iterable[str]) -> HandedOver:
        """Reads the publications of all hosts below some scopes of a feed."""
        found = cls()
        for scope in scopes:
            for key, text in store.directory(_prefix(scope)).items():
                host, _, slot = key.partition("/")
                value = json.loads(text)
                if slot == "bad":
                    found.ledgers.append(Ledgers({host: value[0]}, {host: value[1]} if value[1] else {}))
                else:
                    found.lanes.append(tuple(value))
        return found

    def add(self, state: FeedState) -> None:
        """Adds the lanes and ledgers of a state."""
        found = cut_of(state), cast("list[JsonValue]", state.segments), state.lanes or {}
        self.lanes.append(found)
        self.ledgers.append(Ledgers.of_state(state))

    def lanes_for(self, state: FeedState) -> list[Mapping[str, JsonValue]]:
        """Returns the lanes that belong to the stream of ``state``, at any step.

        A feed can be set to a state with another past: other batch sizes move the stages of a mixture, and with them what
        a lane has read.
        """
        cut, past = cut_of(state), state.segments
        return [lanes for of, segments, lanes in self.lanes if of == cut and segments == past[: len(segments)]]


def cut_of(state: FeedState) -> JsonValue:
    """Returns the number of lanes of a stream and the version of the rule that divides it into lanes."""
    return [state.num_lanes, state.fingerprint.get("cut", 1)]
