"""Reductions of JSON values over hosts: all publish a value, one host reduces them, and all receive the result.

The handshake of a feed, its windows, and the rounds of a checkpoint are all reductions. The lowest participant is the
reducer. A reduction has these keys in the key-value store, below a prefix of its own::

    in/<host>   the value of a host
    out         the result, announced by the reducer
    late        while the reducer waits: the stragglers, for the messages of the hosts that wait for the result

In a reduction without stragglers, each host makes two requests, and the reducer a few more. A host whose timeout
expires, or that waits for one whose program has ended, raises an error that names the stragglers. Keys are deleted once
no host can read them again: by the reducer as soon as every host has reached a later reduction, or by the last of all
hosts to :func:`leave`. A killed host does neither. The values of a reduction that it left unfinished are then deleted
when the failure is announced. The announcement itself stays: survivors cannot distinguish a killed host from a slow one,
which must still be able to read why the others did not wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Self

from meshfeed._src.base import coordination
from meshfeed._src.base.coordination import NAMED_HOSTS, KeyValueStore, call_briefly, call_in_background, format_hosts
from meshfeed._src.base.ended import find_ended
from meshfeed._src.base.errors import StalledError
from meshfeed._src.base.progress import PROGRESS
from meshfeed._src.base.types import JsonValue
from meshfeed._src.base.waits import Reminder

_log = logging.getLogger("meshfeed.agreement")
_LATE_SECONDS = 30.0  # after which hosts that are late are in the log, and again after twice as long
# A blocking get is split into slices to notice Ctrl-C, close and deadlines. The slices grow with the wait and the
# number of hosts: thousands of hosts in a long wait must not flood the coordinator.
_MIN_SLICE_SECONDS = 0.05  # a request cannot be called off, so closing a feed waits for the end of one
_MAX_COLLECTING_SLICE_SECONDS = 0.5
_MAX_SLICE_SECONDS = 2.0
_SLICE_SECONDS_PER_HOST = 5e-4
_PAUSE_SECONDS_PER_HOST = 2.5e-5
_MAX_PAUSE_SECONDS = 0.1
_FIRST_NOTE_SECONDS = 0.2
_NOTE_SECONDS = 1.0
_REPORT_SECONDS = 5.0
_FIRST_LOOK_SECONDS = 1.0  # for hosts that have ended
_LOOK_SECONDS = 2.0
_ANNOUNCING_SECONDS = 2.0  # longer than a reducer with all values takes to announce, and than the age of a note


class Stragglers(NamedTuple):
    """Hosts that have not published their value.

    Attributes:
      hosts: up to 8 of them, ascending.
      total: number of all of them.
    """

    hosts: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, hosts: Collection[int]) -> Stragglers:
        """Keeps the first 8 of ``hosts``."""
        return cls(tuple(sorted(hosts)[:NAMED_HOSTS]), len(hosts))

    def __str__(self) -> str:
        more = self.total - len(self.hosts)
        return format_hosts(self.hosts) + (f" and {more:,} more" if more else "")


_NO_STRAGGLERS = Stragglers((), 0)


def _slice_seconds(waited: float, num_hosts: int) -> float:
    """Returns how long the next request may block. In jobs of thousands of hosts, each asks less often."""
    return max(_MIN_SLICE_SECONDS, num_hosts * _SLICE_SECONDS_PER_HOST) + waited / 2


class Reduction:
    """One host's side of one reduction.

    Announcements are JSON objects: ``{"result": …}``, or ``{"stalled": …}`` from a reducer whose timeout expired.

    Attributes:
      prefix: of its keys.
      reducer: the host that reduces.
    """

    def __init__(self, store: KeyValueStore, prefix: str, participants: Sequence[int], host: int) -> None:
        self._store = store
        self.prefix = prefix
        self._participants = frozenset(participants)
        self._host = host
        self._collected: dict[int, tuple[str, JsonValue]] = {}  # on the reducer: host → value as text and as JSON
        self._noted: frozenset[int] = frozenset()  # on the reducer: the stragglers that others can read
        self.reducer = min(participants)

    @property
    def is_reducer(self) -> bool:
        """Whether this host reduces."""
        return self._host == self.reducer

    def _value_key(self, host: int) -> str:
        return f"{self.prefix}/in/{host}"

    # ------------------------------------------------------------------ every host

    def publish(self, value: JsonValue) -> None:
        """Publishes this host's value, in place of an earlier one."""
        self._store.set(self._value_key(self._host), json.dumps(value), overwrite=True)

    def retract(self, host: int | None = None) -> None:
        """Deletes the value of this host, or on the reducer that of another."""
        self._store.delete(self._value_key(self._host if host is None else host))

    def _stored(self, key: str) -> JsonValue | None:
        text = self._store.try_get(key)
        return None if text is None else json.loads(text)

    def value_of_reducer(self) -> JsonValue | None:
        """Returns the reducer's value, or None if it has published none."""
        return self._stored(self._value_key(self.reducer))

    def announced(self) -> dict[str, JsonValue] | None:
        """Returns the announcement, or None if there is none yet."""
        return self._stored(f"{self.prefix}/out")

    def wait(self, deadline: float, tick: Callable[[float], None] | None = None) -> dict[str, JsonValue] | None:
        """Waits for the announcement, in slices; returns None if it does not come in time, or the reducer has ended.

        Args:
          deadline: in seconds of ``time.monotonic()``.
          tick: called between slices with the seconds waited so far; may raise.
        """
        start = time.monotonic()
        next_look = start + _FIRST_LOOK_SECONDS
        while True:
            now = time.monotonic()
            slice_seconds = min(_MAX_SLICE_SECONDS, _slice_seconds(now - start, len(self._participants)))
            # At least one request, even after the deadline.
            text = self._store.get(f"{self.prefix}/out", min(slice_seconds, max(deadline - now, 0.001)))
            if text is not None:
                return json.loads(text)
            now = time.monotonic()
            if now >= deadline:
                return None
            if now >= next_look:
                if find_ended(self._store, [self.reducer]):
                    return None
                next_look = now + _LOOK_SECONDS
            if tick is not None:
                tick(now - start)

    def wait_or_find_stragglers(
        self, deadline: float, tick: Callable[[float], None] | None = None
    ) -> tuple[dict[str, JsonValue] | None, Stragglers]:
        """Waits for the announcement; if it does not come in time, finds out why, in a few requests.

        Returns:
          The announcement, or None and the stragglers. If there are no stragglers either, the reducer is late.
        """
        announcement = self.wait(deadline, tick)
        if announcement is not None:
            return announcement, _NO_STRAGGLERS
        stragglers = self.stragglers()
        if stragglers.hosts:
            return self.wait(time.monotonic()), stragglers  # the announcement may have come since
        # Either the announcement is on its way, or the noted stragglers have arrived and others have not.
        announcement = self.wait(time.monotonic() + _ANNOUNCING_SECONDS)
        return announcement, self.stragglers() if announcement is None else _NO_STRAGGLERS

    def stragglers(self) -> Stragglers:
        """Finds the hosts that the reducer waits for.

        The reducer lists the values anyway and publishes which are missing; the other hosts look up only those. If
        thousands of hosts listed the values themselves, the coordinator would send all values to each of them.
        """
        if self._collected:
            return Stragglers.of(self._participants - self._collected.keys())
        hosts, count = self._stored(f"{self.prefix}/late") or ([self.reducer], 1)
        late = tuple(host for host in hosts if self._store.try_get(self._value_key(host)) is None)
        return Stragglers(late, count - len(hosts) + len(late))

    # ------------------------------------------------------------------ the reducer

    def collect(
        self,
        deadline: float,
        done: Callable[[Mapping[int, JsonValue]], bool] | None = None,
        tick: Callable[[float], None] | None = None,
    ) -> dict[int, JsonValue]:
        """Collects the values of all participants.

        Lists the values, blocks on one that is missing (a blocked get costs the coordinator nothing), pauses while
        others arrive, and lists again. This takes few requests with thousands of hosts and adds no delay with few.

        Args:
          deadline: in seconds of ``time.monotonic()``. If it is finite, a missing host whose program has ended ends the wait.
          done: whether to stop collecting, given the values so far; default: stop when all have arrived.
          tick: see :meth:`wait`.

        Returns:
          Host → value, ascending, of the hosts that arrived.
        """
        start = time.monotonic()
        next_note, next_look = start + _FIRST_NOTE_SECONDS, start + _FIRST_LOOK_SECONDS
        pause = min(_MAX_PAUSE_SECONDS, len(self._participants) * _PAUSE_SECONDS_PER_HOST)
        while True:
            values = self._list()
            late = self._participants - values.keys()
            now = time.monotonic()
            # Rate-limited: the note only serves log and error messages.
            if late != self._noted and (not late or now >= next_note or now >= deadline):
                self._note(late)
                self._noted, next_note = late, now + _NOTE_SECONDS
            if (done(values) if done is not None else not late) or now >= deadline:
                return values
            if late and now >= next_look and deadline < math.inf:
                if find_ended(self._store, sorted(late)[:NAMED_HOSTS]):
                    return values
                next_look = now + _LOOK_SECONDS
            if tick is not None:
                tick(now - start)
            slice_seconds = _slice_seconds(now - start, len(self._participants))
            slice_seconds = min(_MAX_COLLECTING_SLICE_SECONDS, slice_seconds, deadline - now)
            if not late:
                time.sleep(min(_MAX_PAUSE_SECONDS, slice_seconds / 4))
            elif self._store.get(self._value_key(max(late)), slice_seconds) is not None:
                time.sleep(pause)

    def _list(self) -> dict[int, JsonValue]:
        found = {int(host): text for host, text in self._store.directory(f"{self.prefix}/in").items()}
        # Thousands of hosts mostly publish the same text, so each is decoded once, and the value is shared.
        known = dict(self._collected.values())
        for text in found.values():
            if text not in known:
                known[text] = json.loads(text)
        self._collected = {
            host: (text, known[text]) for host, text in sorted(found.items()) if host in self._participants
        }
        return {host: value for host, (_, value) in self._collected.items()}

    def _note(self, late: frozenset[int]) -> None:
        if late:
            self._store.set(f"{self.prefix}/late", json.dumps(Stragglers.of(late)), overwrite=True)
        else:
            self._store.delete(f"{self.prefix}/late")

    def announce(self, result: JsonValue) -> dict[str, JsonValue]:
        """Publishes the result; returns the announcement as the other hosts decode it."""
        return self._announce({"result": result})

    def _announce(self, announcement: dict[str, JsonValue]) -> dict[str, JsonValue]:
        text = json.dumps(announcement)
        self._store.set(f"{self.prefix}/out", text, overwrite=True)
        return json.loads(text)

    def discard_values(self) -> None:
        """Deletes all hosts' values and the note on stragglers, which are not read after the announcement."""
        self._store.delete(f"{self.prefix}/in")
        if self._noted:
            self._noted = frozenset()
            self._note(self._noted)

    # ------------------------------------------------------------------ the whole reduction

    def result(
        self,
        attempt: Callable[[float], dict[str, JsonValue] | None],
        *,
        timeout_seconds: float,
        doing: str,
        hint: str = "",
        tick: Callable[[float], None] | None = None,
    ) -> JsonValue:
        """Returns the result of a reduction for which this host has published its value.

        Args:
          attempt: called on the reducer only: collects the values until a deadline on the clock of
            ``time.monotonic()`` and returns its announcement, or None if values are missing.
          timeout_seconds: longest wait for stragglers that make no progress.
          doing: the operation, for the error message.
          hint: a clause in brackets for the error message.
          tick: see :meth:`wait`.

        Raises:
          StalledError: some participants did not arrive; the message names them. The reducer's error is raised on all
            hosts that wait for it, and on the stragglers when they arrive.
        """
        start = time.monotonic()
        patience = Patience(self._store, timeout_seconds)
        while True:
            if self.is_reducer:
                announcement = attempt(patience.deadline)
                stragglers = self.stragglers()
            else:
                announcement, stragglers = self.wait_or_find_stragglers(patience.deadline, tick)
            late = stragglers.hosts or (() if self.is_reducer else (self.reducer,))
            if announcement is None and not patience.renew(late):
                announcement = {"stalled": [stragglers, time.monotonic() - start, *patience.notes()]}
                if self.is_reducer:
                    self._announce(announcement)
                    self.discard_values()
            if announcement is not None:
                return self.unpack(announcement, doing, hint)

    def unpack(self, announcement: Mapping[str, JsonValue], doing: str, hint: str = "") -> JsonValue:
        """Returns the result of an announcement, or raises its StalledError."""
        if "result" in announcement:
            return announcement["result"]
        (hosts, count), waited, notes, stacks = announcement["stalled"]
        if count:
            what = f"{Stragglers(tuple(hosts), count)} did not arrive within {waited:.0f} s"
        else:
            hosts, what = [self.reducer], f"host {self.reducer} did not announce the result within {waited:.0f} s"
        cause = f"Check the log of that host: it has stopped, is still starting, or runs different code{hint}."
        if self._host in hosts and count:
            cause = (
                "This host came too late. Start all hosts together, or set a larger timeout_seconds= on all of them."
            )
        error = StalledError(
            f"{doing}: {what} (this is host {self._host} of {len(self._participants)}){notes}. {cause}",
            hosts=tuple(hosts),
            waited_seconds=waited,
        )
        if stacks:
            error.add_note(stacks)
        raise error


class Rounds:
    """Successive reductions of one JSON value per participant, to a JSON result that all participants receive.

    Takes few requests per host. Every participant must call :meth:`reduce` equally often, in the same order, and close
    the rounds at the end, which deletes their last keys. The scope is unique in the job, and ``doing`` names the operation in
    messages. A slow host has longer than the timeout while it drops records and makes progress.
    """

    hint = ""
    """A clause in brackets for the error message."""

    partial = False
    """Whether a round ends at the deadline with the values that have come, for hosts that come later, too."""

    def __init__(self, scope: str, participants: Sequence[int], *, timeout_seconds: float, doing: str) -> None:
        self.participants = participants
        self.doing = doing
        self._prefix = f"meshfeed/{scope}"
        self._timeout_seconds = timeout_seconds
        self._round = 0

    def reduce(self, value: JsonValue, reduce: Callable[[dict[int, JsonValue]], JsonValue]) -> JsonValue:
        """Runs one round.

        Args:
          value: this host's value, JSON.
          reduce: maps host → value of all participants to the result; runs on the lowest participant only. If it raises,
            the other participants time out, so return errors as values.

        Returns:
          The result, as decoded JSON on every participant, including the one that reduced.

        Raises:
          StalledError: some participants did not arrive; the message names them.
          MeshfeedError: there is no key-value store.
        """
        here = coordination.process_index()
        if list(self.participants) == [here]:  # the JSON round trip gives the same types as with several hosts
            return json.loads(json.dumps(reduce({here: json.loads(json.dumps(value))})))
        number, self._round = self._round, self._round + 1
        store = coordination.require_store()
        reduction = Reduction(store, f"{self._prefix}/{number}", self.participants, here)

        reminder = Reminder(_LATE_SECONDS)

        def tick(waited: float) -> None:
            if reminder.due(waited):
                late, count = reduction.stragglers(), len(self.participants)
                who = late if late.total else f"host {reduction.reducer}"  # which has all values, and is slow
                _log.warning("%s: waited %.0f s for %s (this is host %d of %d)", self.doing, waited, who, here, count)

        def attempt(deadline: float) -> dict[str, JsonValue] | None:
            values = reduction.collect(deadline, tick=tick)
            if len(values) < len(self.participants) and not self.partial:
                return None
            announcement = reduction.announce(reduce(values))
            if number:  # every host has arrived in this round, so it has the result of the last one
                store.delete(f"{self._prefix}/{number - 1}")
            return announcement

        reduction.publish(value)
        return reduction.result(
            attempt, timeout_seconds=self._timeout_seconds, doing=self.doing, hint=self.hint, tick=tick
        )

    def close(self) -> None:
        """Deletes the remaining keys, once every participant has closed its rounds."""
        if self._round:
            # A restore of half a second would take 3 % longer.
            leave(coordination.require_store(), self._prefix, len(self.participants), wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def leave(store: KeyValueStore, prefix: str, num_hosts: int, *, wait: bool = True) -> None:
    """Marks this host as done with the keys below ``prefix``; the last of ``num_hosts`` hosts deletes them.

    Errors are only logged, and at interpreter exit this does nothing: leftover keys are harmless and end with the job. With
    ``wait``, waits up to two seconds for the requests, which take 10 to 30 ms if all cores are busy.
    """

    def count() -> None:
        if store.increment(f"{prefix}/left") == num_hosts:
            store.delete(prefix)

    if wait:
        call_briefly(count, name="meshfeed-leave", at_exit=False)
    else:
        call_in_background(count, name="meshfeed-leave")


class Patience:
    """The deadline of a wait for stragglers, extended while one of them makes progress dropping records to resume.

    Makes no request before the timeout, ``seconds`` without progress.

    Attributes:
      deadline: on the clock of ``time.monotonic()``.
      resuming: host → its progress at the last check, for hosts that drop records.
    """

    def __init__(self, store: KeyValueStore, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self.deadline = time.monotonic() + seconds
        self.resuming: dict[int, str] = {}
        self._ended: dict[int, str] = {}
        self._late: tuple[int, ...] = ()

    def renew(self, late: Sequence[int]) -> bool:
        """Extends the deadline if there was progress since the last call; returns whether there was."""
        before, self._late = self.resuming, tuple(late[:NAMED_HOSTS])
        self._ended = find_ended(self._store, self._late)
        if self._ended:
            return False
        found = {host: self._store.try_get(_resuming_key(host)) for host in late[:NAMED_HOSTS]}
        self.resuming = {host: text for host, text in found.items() if text is not None}
        moved = any(before.get(host) != text for host, text in self.resuming.items()) or not (
            before.keys() <= self.resuming.keys()  # a host that no longer drops records has finished, or arrived
        )
        if moved:
            self.deadline = time.monotonic() + self._seconds
        return moved

    def last_until(self, deadline: float) -> bool:
        """Moves a deadline that is over to a later one, unless a straggler's program has ended; returns whether it did."""
        now = time.monotonic()
        lasts = not self._ended and self.deadline <= now < deadline
        if lasts:
            self.deadline = min(deadline, now + self._seconds)
        return lasts

    def notes(self) -> tuple[str, str]:
        """Returns what the stragglers were doing, in brackets, for messages, and their stacks; empty if unknown."""
        opening = {host: self._store.try_get(_opening_key(host)) or "" for host in self._late}
        doing = {host: text.partition("\n")[0] for host, text in opening.items() if text}
        doing |= self.resuming | self._ended
        what = "; ".join(f"host {host} is {text}" for host, text in doing.items())
        shown = {host: text.partition("\n")[2] for host, text in opening.items()}
        return f" ({what})" if what else "", "\n".join(f"host {host}:\n{text}" for host, text in shown.items() if text)


class ProgressReport:
    """Publishes this host's progress in dropping records on resume, for the :class:`Patience` of other hosts.

    Publishes nothing if no records are dropped.
    """

    def __init__(self, store: KeyValueStore | None, timeout_seconds: float) -> None:
        self._store = store
        self._pause = min(_REPORT_SECONDS, timeout_seconds / 4)
        self._host = coordination.process_index()  # not later: the wait may have ended with the job
        self._published, self._next = "", 0.0
        self._told = False

    def update(self, what: str = "") -> None:
        """Publishes the progress if it has changed, at most every few seconds; ``what`` if no records are dropped."""
        text, now = str(PROGRESS) or what, time.monotonic()
        if self._store is not None and text not in ("", self._published) and now >= self._next:
            self._published, self._next = text, now + self._pause
            self._store.set(_resuming_key(self._host), text, overwrite=True)

    def tell(self, what: str) -> None:
        """Publishes what this host does and its stacks, which is no progress."""
        if self._store is not None:
            self._told = True
            self._store.set(_opening_key(self._host), what, overwrite=True)

    def end(self) -> None:
        """Deletes what was published."""
        published, told = self._published, self._told
        self._published, self._told = "", False
        with contextlib.suppress(Exception):  # the coordinator is gone; the error that ended the wait is reported
            if self._store is not None and published:
                self._store.delete(_resuming_key(self._host))
            if self._store is not None and told:
                self._store.delete(_opening_key(self._host))


def _resuming_key(host: int) -> str:
    """One key per host, for all its feeds: a host that waits for it cannot distinguish which feed keeps it busy."""
    return f"meshfeed/resuming/{host}"


def _opening_key(host: int) -> str:
    """What a host does that takes long to open its data, and its stacks."""
    return f"meshfeed/opening/{host}"
