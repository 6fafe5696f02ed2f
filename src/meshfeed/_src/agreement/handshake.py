"""Compares settings and position between hosts before the first batch of each generation of a feed.

Each generation takes one round. Every host publishes its settings, the lowest participant compares them, and all read
the result. A host that cannot take part (making the feed, opening the data or restoring a state failed) publishes that
failure instead, and the others raise an error naming it after a grace period of a few seconds. The grace period, and
the tracking of refused states, are for hosts that recover: if every host refuses the same state and starts from the
beginning, none has failed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from meshfeed._src.base import coordination
from meshfeed._src.base.errors import AgreementError, PeerError, StalledError
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.state.state import flatten
from meshfeed._src.streams.protocol import Cursor

_log = logging.getLogger("meshfeed.agree")
_MAX_MESSAGE = 2000
_GRACE_SECONDS = 3.0  # for a host that published a failure to recover


def agreed_settings(settings: FeedSettings, fingerprint: Mapping[str, Any], cursor: Cursor) -> dict[str, Any]:
    """Returns what must be equal on all hosts before the first batch: field → JSON value, flat."""
    bad = settings.bad_records
    return {
        **flatten(dict(fingerprint)),
        "position": cursor.position,
        "step": cursor.step,
        "load": settings.load,
        "mask_key": settings.mask_key,
        "bad_records": None if bad is None else bad.max_fraction,
        "num_skipped": None if bad is None else cursor.num_skipped,
        "check_replicas": settings.check_replicas,
        "global_batch_size": None if settings.schedule is None else settings.schedule.stages,
    }


class Handshake:
    """One host's side of all handshakes of a feed.

    Args:
      scope: key prefix, unique to this feed.
      participants: participating process indices. No handshake takes place unless there are several and this process
        is one of them.

    Attributes:
      round: number of the next round; failed rounds count.
      in_force: whether the last round succeeded and its generation of the feed has not ended.
    """

    def __init__(self, scope: str, participants: Sequence[int]) -> None:
        self._feed = f"meshfeed/{scope}"
        self._base = f"{self._feed}/settings"
        # Includes the feed's name because hosts that create different feeds, or in a different order, wait on
        # different keys.
        self._doing = f"agreeing on the settings of {scope.removeprefix('feed/')}"
        self.participants = tuple(sorted(participants))
        self.round = 0
        self.in_force = False
        self._refused = False
        self._left = False
        self._generation: int | None = None

    @property
    def needed(self) -> bool:
        """Whether there are other hosts to agree with."""
        return len(self.participants) > 1 and coordination.process_index() in self.participants

    def fail(self, error: BaseException, *, refused: bool = False) -> None:
        """Publishes that this host cannot take part in this round.

        Args:
          error: the reason.
          refused: this host rejected a state without changing anything and may still join this round. Otherwise it
            can join the next round at the earliest.
        """
        store = self._store()
        if store is not None:
            message = {"failed": f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]}
            try:
                store.set(self._key("in", coordination.process_index()), json.dumps(message), overwrite=True)
            except Exception as failure:  # must not mask ``error``, which the caller raises
                _log.warning("cannot tell other hosts that this one failed: %s", failure)
        self._refused = refused
        self.round += not refused

    def withdraw(self) -> None:
        """Starts a new generation of the feed and retracts the failure that a refused state published."""
        self.in_force = False
        store = self._store() if self._refused else None
        if store is not None:
            store.delete(self._key("in", coordination.process_index()))
        self._refused = False

    def leave(self) -> None:
        """Marks this host as done with the feed; it no longer reads or writes the feed's keys."""
        store, self._left = self._store(), True
        if store is not None:
            coordination.leave(store, self._feed, len(self.participants))

    def _store(self) -> coordination.KeyValueStore | None:
        """Returns the store for optional messages, or None if no other host would read them."""
        return coordination.key_value_store() if self.needed and not self._left else None

    def agree(self, settings: Mapping[str, Any], timeout_seconds: float) -> None:
        """Compares settings between hosts, once in each generation; an interrupted call can be made again.

        Args:
          settings: field → JSON value, flat.
          timeout_seconds: how long to wait for the slowest host; longer while it drops records and makes progress.

        Raises:
          AgreementError: on every participant, naming the first fields that differ and the hosts.
          PeerError: a host could not make its feed, open its data, or take its state.
          StalledError: some host did not come.
          MeshfeedError: there is no key-value store.
        """
        if self.in_force:
            return
        try:
            if self.needed:
                result = self._exchange(settings, timeout_seconds)
                while (
                    result.get("failed") == coordination.process_index()
                ):  # the others gave this host up in that round
                    self.round += 1
                    result = self._exchange(settings, timeout_seconds)
                _raise(result)
        except Exception:
            self.round += 1
            raise
        store = self._store()
        if store is not None and coordination.process_index() == self.participants[0] and self._generation is not None:
            store.delete(f"{self._feed}/{self._generation}")  # all hosts have left it, so its windows are unused
        following = self.round + 1
        # One statement without calls: signals arrive only at calls, so an interrupt cannot split the update.
        self.round, self._generation, self._refused, self.in_force = following, following, False, True

    # ------------------------------------------------------------------ one round

    def _key(self, *parts: Any) -> str:
        return "/".join(str(part) for part in (self._base, self.round, *parts))

    def _exchange(self, settings: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        store = coordination.require_store()
        message = {"settings": dict(settings), "refused": self._refused}
        here, reducer = coordination.process_index(), self.participants[0]
        start = time.monotonic()
        if here == reducer:
            early = store.try_get(self._key("out"))  # left by hosts that gave this one up
            if early is not None:
                return json.loads(early)
        store.set(self._key("in", here), json.dumps(message), overwrite=True)
        patience = coordination.Patience(store, timeout_seconds)
        missing: Sequence[int] = ()
        count, waiting = 0, True
        while waiting:
            if here == reducer:
                values = self._collect(store, patience.deadline)
                if len(values) == len(self.participants) or any("failed" in value for value in values.values()):
                    return self._announce(store, values)
                missing = [host for host in self.participants if host not in values]
                count = len(missing)
            else:
                text = self._wait(store, patience.deadline)
                if text is not None:
                    return json.loads(text)
                missing, count = coordination.missing_hosts(store, self._key("in"), self._key("late"), reducer)
                missing, count = (missing, count) if missing else ([reducer], 1)
            waiting = patience.renew(missing)
        waited = time.monotonic() - start
        raise StalledError(
            f"{self._doing}: {coordination.format_missing(missing, count)} did not arrive within {waited:.0f} s (host {here} "
            f"of {len(self.participants)} is waiting){patience.notes()}. Look at that host's log: it has stopped, is still "
            "starting, or runs other code than the rest (a feed without name= is known by its place in the order of "
            "creation).",
            hosts=tuple(missing),
            waited_seconds=waited,
        )

    def _announce(self, store: coordination.KeyValueStore, values: dict[int, Any]) -> dict[str, Any]:
        text = json.dumps(_compare(values))
        store.set(self._key("out"), text, overwrite=True)
        if self.round:  # everybody has come to this round, so everybody has read the last one's result
            store.delete(f"{self._base}/{self.round - 1}")
        return json.loads(text)

    def _collect(self, store: coordination.KeyValueStore, deadline: float) -> dict[int, Any]:
        """What all hosts published; with failures in it once these have lasted."""
        failed_since: float | None = None
        while True:
            texts = coordination.wait_for_hosts(
                store,
                self._key("in"),
                self.participants,
                deadline,
                lambda texts: any('"failed"' in text[:12] for text in texts.values()),
                note=self._key("late"),
            )
            values = {host: json.loads(text) for host, text in sorted(texts.items())}
            failed = any("failed" in value for value in values.values())
            now = time.monotonic()
            if not failed or now >= deadline:
                return values
            if any("settings" in value and not value["refused"] for value in values.values()):
                failed_since = failed_since or now
                if now - failed_since > _GRACE_SECONDS:
                    return values
            time.sleep(0.1)

    def _wait(self, store: coordination.KeyValueStore, deadline: float) -> str | None:
        """The result; one that names the host that is to compare, where that one failed."""
        reducer = self.participants[0]
        failed_since: float | None = None
        given_up: str | None = None

        def tick(waited: float) -> None:
            nonlocal failed_since, given_up
            text = None if self._refused else store.try_get(self._key("in", reducer))
            value = {} if text is None else json.loads(text)
            if "failed" not in value:
                failed_since = None
                return
            failed_since = waited if failed_since is None else failed_since
            if waited - failed_since > _GRACE_SECONDS:
                given_up = json.dumps({"failed": reducer, "message": value["failed"]})
                raise _GivenUp

        try:
            return coordination.wait_for_key(
                store, self._key("out"), deadline, tick, num_waiting=len(self.participants)
            )
        except _GivenUp:
            assert given_up is not None
            store.set(self._key("out"), given_up, overwrite=True)
            return given_up


class _GivenUp(Exception):
    """The comparing host failed and did not recover within the grace period."""


def _compare(values: dict[int, Any]) -> dict[str, Any]:
    for host, value in values.items():
        if "failed" in value:
            return {"failed": host, "message": value["failed"]}
    differences = []
    settings = {host: value["settings"] for host, value in values.items()}
    for field in dict.fromkeys(name for value in settings.values() for name in value):
        groups: dict[str, list[int]] = {}
        for host, value in settings.items():
            groups.setdefault(json.dumps(value.get(field), sort_keys=True), []).append(host)
        if len(groups) > 1:
            shown = "; ".join(
                f"{coordination.format_hosts(hosts)}: {text if len(text) <= 120 else text[:117] + '...'}"
                for text, hosts in sorted(groups.items(), key=lambda item: item[1][0])
            )
            differences.append(f"{field} ({shown})")
    return {"differences": differences}


def _raise(result: Mapping[str, Any]) -> None:
    if "failed" in result:
        host, message = result["failed"], result["message"]
        raise PeerError(
            f"host {host} failed before its first batch: {message} See the log of host {host}.",
            host=host,
            peer_message=message,
        )
    differences = result["differences"]
    if differences:
        raise AgreementError(
            "hosts differ in " + ", and in ".join(differences[:4]) + ". Start all hosts with the same source, settings "
            "and state."
        )
