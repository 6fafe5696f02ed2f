"""What a host without a device in the sharding learns of a stream: how far the participants have come, and where they stop.

Such a host reads nothing and no participant waits for it, so it takes no part in the agreement; it follows. The reducer
writes a summary of all its announcements to one key per generation of the feed, and the followers poll it. If the
participants cannot begin a generation, its key holds the error that they raise. The key of a generation outlives it, because
a follower may be late: it is deleted 16 generations later, and a follower that is later still raises an error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence

from meshfeed._src.agreement.messages import (
    ASIDE_SECONDS,
    AnnouncedContents,
    Announcement,
    Stop,
    WindowReport,
    find_aside,
)
from meshfeed._src.base.coordination import KeyValueStore
from meshfeed._src.base.errors import Failure, StalledError

_STEPS = 8  # batches without rows that a follower makes ahead
_KEPT_BAD_STEPS = 256  # steps with bad records whose counts a late follower still sees
_KEPT_GENERATIONS = 16  # a failed reshard alone makes two or three before a follower has seen the first
_PAUSE_SECONDS = 0.05
_PAUSE_SECONDS_PER_HOST = 2.5e-4  # thousands of followers must not flood the coordinator


def follow_key(scope: str, generation: int) -> str:
    """Returns the key of a generation of a feed; ``scope`` is the feed's, which all hosts of the job compute alike."""
    return f"meshfeed/follow/{scope}/{generation}"


def announce_failure(store: KeyValueStore, scope: str, generation: int, error: BaseException) -> None:
    """Tells followers that the participants cannot begin a generation, because of ``error``."""
    failed = Announcement(0, 0, Stop(0, (Failure.exact(error),)))
    store.set(follow_key(scope, generation), json.dumps(failed.to_json()), overwrite=True)
    _forget(store, scope, generation - _KEPT_GENERATIONS)


def _forget(store: KeyValueStore, scope: str, generation: int) -> None:
    """Deletes the keys of a generation and those before: a generation that announced nothing has deleted no other's."""
    for found in _generations(store, follow_key(scope, 0)):
        if found <= generation:
            store.delete(follow_key(scope, found))


def _generations(store: KeyValueStore, key: str) -> list[int]:
    """The generations that have a key beside ``key``."""
    return [int(name) for name in store.directory(key.rpartition("/")[0]) if name.isdecimal()]


class Summary:
    """The reducer's summary of its announcements."""

    def __init__(self, store: KeyValueStore, scope: str, generation: int) -> None:
        self._store, self._key = store, follow_key(scope, generation)
        self._scope, self._generation = scope, generation
        self._contents: AnnouncedContents = {}
        self._begun = False

    def add(self, announcement: Announcement) -> None:
        """Publishes the announcements so far and this one."""
        new, known = announcement.contents, self._contents
        if "element" in new and "element" not in known:
            known["element"] = new["element"]
        if "ended" in new:
            known["ended"] = {**known.get("ended", {}), **new["ended"]}
        if "bad" in new:
            bad = {**known.get("bad", {}), **new["bad"]}
            known["bad"] = dict(list(bad.items())[-_KEPT_BAD_STEPS:])
        summary = dataclasses.replace(announcement, contents=known)
        self._store.set(self._key, json.dumps(summary.to_json()), overwrite=True)
        if not self._begun:
            self._begun = True
            _forget(self._store, self._scope, self._generation - _KEPT_GENERATIONS)


class Follower:
    """The agreement as seen by a host that only follows; see :class:`meshfeed._src.agreement.windows.WindowAgreement`."""

    def __init__(
        self,
        store: KeyValueStore,
        *,
        scope: str,
        generation: int,
        participants: Sequence[int],  # hosts that read
        num_followers: int,  # hosts of the job that do not
        first_step: int,
        timeout_seconds: float,  # longest wait for a sign of progress
    ) -> None:
        self._store, self._key = store, follow_key(scope, generation)
        self._generation = f"meshfeed/{scope}/{generation}"
        self._participants, self._timeout_seconds = tuple(participants), timeout_seconds
        self._pause = max(_PAUSE_SECONDS, num_followers * _PAUSE_SECONDS_PER_HOST)
        self._upto = first_step
        self._contents: list[AnnouncedContents] = []
        self._text: str = ""
        self._closed = False
        self._stop: Stop | None = None
        self.window_end = first_step + _STEPS
        self.read_ahead = 2 * _STEPS + 1
        self.peer_wait_seconds = 0.0
        self.patient_until = 0.0
        self.read_step = first_step
        self.asked_at = -math.inf

    def publish(self, report: WindowReport) -> None:
        """Publishes nothing."""
        self.window_end = report.count + _STEPS

    def wait_for(self, step: int) -> Stop | None:
        """Waits until the participants can deliver ``step``; returns a Stop if they never will.

        Raises:
          StalledError: they made no progress within ``timeout_seconds``.
        """
        started = since = time.monotonic()
        while step >= self._upto and self._stop is None:
            if self._closed:
                raise StalledError("the feed was closed while it waited for other hosts")
            if self._look():
                since = time.monotonic()
                continue
            waited = time.monotonic() - since
            if waited >= self._timeout_seconds <= time.monotonic() - self.asked_at:
                raise self._stalled(step, waited)
            if waited >= ASIDE_SECONDS:
                if (aside := find_aside(self._store, self._generation)) is not None:
                    raise Stop(step, (aside,)).exception()
                self._check_kept(step, waited)
            time.sleep(self._pause)
        self.peer_wait_seconds += time.monotonic() - started
        return self._stop if self._stop is not None and step >= self._stop.step else None

    def _look(self) -> bool:
        """Whether there is a new summary; takes it in."""
        text: str | None = self._store.try_get(self._key)
        if text is None or text == self._text:
            return False
        summary = Announcement.from_json(json.loads(text))
        self._text, self._upto, self._stop = text, summary.upto, summary.stop
        self._contents.append(summary.contents)
        return True

    def _stalled(self, step: int, waited: float) -> StalledError:
        begun = "has announced" if self._text else "has not begun this stream: it has announced"
        reducer = min(self._participants)
        return StalledError(
            f"step {step}: host {reducer} {begun} no further step for {waited:.0f} s "
            f"(timeout_seconds={self._timeout_seconds:g}). This host has no device in the sharding and follows the hosts "
            "that have: build the feed on them too, with the same name, and take the same number of steps on all of them; "
            f"or see the log of host {reducer}.",
            hosts=(reducer,),
            waited_seconds=waited,
        )

    def _check_kept(self, step: int, waited: float) -> None:
        """Raises StalledError if the key of this generation has been deleted: nothing more will come."""
        own, newest = int(self._key.rpartition("/")[2]), max(_generations(self._store, self._key), default=0)
        if newest < own + _KEPT_GENERATIONS:
            return
        reducer = min(self._participants)
        raise StalledError(
            f"step {step}: host {reducer} has left this stream and begun {newest - own} others since, by reset, set_state, "
            f"set_weights or reshard; this host, which follows, may be {_KEPT_GENERATIONS - 1} behind. Take the same steps "
            "and make the same calls on all hosts.",
            hosts=(reducer,),
            waited_seconds=waited,
        )

    def contents(self) -> list[AnnouncedContents]:
        """Returns what :meth:`forget_contents` has not dropped."""
        return list(self._contents)

    def forget_contents(self, count: int) -> None:
        """Drops the first ``count`` of :meth:`contents`."""
        del self._contents[:count]

    def close(self, notice: str | None = None) -> None:
        """Ends a wait; nobody waits for a follower, so it leaves silently."""
        del notice
        self._closed = True
