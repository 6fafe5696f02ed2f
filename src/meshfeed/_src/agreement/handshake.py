"""Compares settings and position between hosts before the first batch of each generation of a feed.

Each generation takes one round, a reduction (:mod:`meshfeed._src.base.reduction`) of all hosts' settings to their
differences. A host that cannot take part (making the feed, opening the data or restoring a state failed, or it has
closed the feed) publishes that failure instead, and the others raise an error naming it after a grace period of a few
seconds. Hosts that only follow learn of a failed round too. The grace period, and the tracking of refused states, are for
hosts that recover: if every host refuses the same state and starts from the beginning, none has failed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from meshfeed._src.agreement.followers import announce_failure
from meshfeed._src.agreement.messages import ASIDE_SECONDS, aside_key
from meshfeed._src.base import coordination
from meshfeed._src.base.coordination import KeyValueStore, call_briefly, format_differences
from meshfeed._src.base.errors import LEFT, AgreementError, Failure, PeerError
from meshfeed._src.base.reduction import Reduction, leave
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.types import JsonValue
from meshfeed._src.state.state import flatten
from meshfeed._src.streams.protocol import Cursor

_log = logging.getLogger("meshfeed.agree")
_GRACE_SECONDS = 3.0  # for a host that published a failure to recover
_NAMED_DIFFERENCES = 4
_SHOWN_CHARACTERS = 120  # of a setting in a message


def agreed_settings(
    settings: FeedSettings, fingerprint: Mapping[str, JsonValue], cursor: Cursor
) -> dict[str, JsonValue]:
    """Returns what must be equal on all hosts before the first batch: field → JSON value, flat."""
    return {
        **flatten(dict(fingerprint)),
        "position": cursor.position,
        "step": cursor.step,
        "num_skipped": None if settings.bad_records is None else cursor.num_skipped,
        **settings.agreed(),
    }


class Handshake:
    """One host's side of all handshakes of a feed.

    Args:
      scope: key prefix, unique to this feed.
      participants: participating process indices. No handshake takes place unless there are several and this process
        is one of them.

    Attributes:
      round: number of the next round; failed rounds count, and those of hosts that only follow.
      in_force: whether the last round succeeded and its generation of the feed has not ended.
    """

    def __init__(self, scope: str, participants: Sequence[int]) -> None:
        self._scope, self._feed = scope, f"meshfeed/{scope}"
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
            try:
                failure = Failure.of(error, coordination.process_index())
                reduction = self._reduction(store)
                reduction.publish({"failure": failure.to_json()})
                if reduction.is_reducer and not refused:  # nobody may be left to find this out and say so
                    self._tell_followers(_peer_error(failure))
            except Exception as unpublished:  # must not mask ``error``, which the caller raises
                _log.warning("cannot report this host's failure to the other hosts: %s", unpublished)
        self._refused = refused
        self.round += not refused

    def step_aside(self, notice: str) -> None:
        """Publishes that this host has left for another sharding: for the last generation, and for this round.

        It may still join this round, which retracts that.
        """
        store = self._store()
        if store is None:
            return
        failure = Failure.left(notice, coordination.process_index()).to_json()
        try:
            if self._generation is not None:
                store.set(aside_key(self._scope, self._generation), json.dumps(failure), overwrite=True)
            reduction = self._reduction(store)
            reduction.publish({"failure": failure})
            store.set(self._aside_in_round(), json.dumps(failure), overwrite=True)
        except Exception as error:  # the meeting that follows needs the store too, and raises
            _log.debug("cannot tell the other hosts that this one %s: %s", notice, error)
        self._refused = True

    def _aside_in_round(self) -> str:
        return f"{self._feed}/settings/{self.round}/aside"

    def withdraw(self) -> None:
        """Starts a new generation of the feed and retracts what a refused state, or a host that stepped aside, published."""
        self.in_force = False
        store = self._store() if self._refused else None
        if store is not None:
            self._reduction(store).retract()
            store.delete(self._aside_in_round())
        self._refused = False

    def leave(self, notice: str | None = None) -> None:
        """Marks this host as done with the feed; it no longer reads or writes the feed's keys.

        Args:
          notice: why, for hosts that wait for this one in the next round; None to leave silently.
        """
        store, self._left = self._store(), True
        if store is None:
            return
        if notice is not None and not self.in_force and not self._refused:  # which says more
            reduction = self._reduction(store)
            failure = Failure.left(notice, coordination.process_index())

            def publish() -> None:
                reduction.publish({"failure": failure.to_json()})
                if reduction.is_reducer:
                    self._tell_followers(_peer_error(failure))

            call_briefly(publish, name="meshfeed-leave-notice", at_exit=True)
        leave(store, self._feed, len(self.participants))

    def _store(self) -> KeyValueStore | None:
        """Returns the store for optional messages, or None if no other host would read them."""
        return coordination.key_value_store() if self.needed and not self._left else None

    def _tell_followers(self, error: BaseException) -> None:
        """Tells hosts that only follow that this round failed."""
        if coordination.process_count() > len(self.participants):
            announce_failure(coordination.require_store(), self._scope, self.round + 1, error)

    def _reduction(self, store: KeyValueStore) -> Reduction:
        prefix = f"{self._feed}/settings/{self.round}"
        return Reduction(store, prefix, self.participants, coordination.process_index())

    def agree(self, settings: Mapping[str, JsonValue], timeout_seconds: float) -> None:
        """Compares settings between hosts, once in each generation. An interrupted call can be repeated.

        Args:
          settings: field → JSON value, flat.
          timeout_seconds: how long to wait for the slowest host; longer while it drops records and makes progress.

        Raises:
          AgreementError: on every participant, naming the first fields that differ and the hosts.
          PeerError: a host could not make its feed, open its data, or take its state.
          StalledError: a host did not arrive.
          MeshfeedError: there is no key-value store.
        """
        if self.in_force:
            return
        try:
            if self.needed:
                while not self._succeeds(settings, timeout_seconds):
                    self.round += 1
        except Exception as error:
            if self.needed and coordination.process_index() == self._spokesman(error):
                with contextlib.suppress(Exception):  # must not mask ``error``
                    self._tell_followers(error)
            self.round += 1
            raise
        store = self._store()
        if store is not None and self._generation is not None and self._reduction(store).is_reducer:
            store.delete(f"{self._feed}/{self._generation}")  # all hosts have left it, so its windows are unused
        following = self.round + 1
        # One statement without calls: signals arrive only at calls, so an interrupt cannot split the update.
        self.round, self._generation, self._refused, self.in_force = following, following, False, True

    def _spokesman(self, error: Exception) -> int:
        """The host that tells followers of an error: the lowest that did not cause it."""
        return min(host for host in self.participants if not isinstance(error, PeerError) or host != error.host)

    # ------------------------------------------------------------------ one round

    def _succeeds(self, settings: Mapping[str, JsonValue], timeout_seconds: float) -> bool:
        """Takes part in a round; returns False if the other hosts gave up on this one."""
        reduction = self._reduction(coordination.require_store())
        outcome = self._outcome(reduction, settings, timeout_seconds)
        failure = None if outcome["failure"] is None else Failure.from_json(outcome["failure"])
        if failure is not None:
            if failure.host == coordination.process_index():
                return False
            raise _peer_error(failure)
        differences = outcome["differences"]
        if differences:
            raise AgreementError(
                f"hosts differ in {', and in '.join(differences[:_NAMED_DIFFERENCES])}. Start all hosts with the same "
                "source, settings and state."
            )
        return True

    def _outcome(self, reduction: Reduction, settings: Mapping[str, JsonValue], timeout_seconds: float) -> JsonValue:
        early = reduction.announced() if reduction.is_reducer else None  # by hosts that gave up on this one
        if early is not None:
            return reduction.unpack(early, self._doing)
        reduction.publish({"settings": dict(settings), "refused": self._refused})
        try:
            return reduction.result(
                lambda deadline: self._reduce(reduction, deadline),
                timeout_seconds=timeout_seconds,
                doing=self._doing,
                hint=" (without name=, feeds over the same hosts are matched by their order of creation)",
                tick=self._give_up_reducer(reduction),
            )
        except _GivenUp as given_up:
            return reduction.announce(given_up.outcome)["result"]

    def _reduce(self, reduction: Reduction, deadline: float) -> dict[str, JsonValue] | None:
        values = reduction.collect(deadline, self._complete())
        if len(values) < len(self.participants) and not any("failure" in value for value in values.values()):
            return None
        announcement = reduction.announce(compare(values))
        reduction.discard_values()
        store = self._store()
        if store is not None and self.round:  # every host has reached this round, so all have read the previous result
            store.delete(f"{self._feed}/settings/{self.round - 1}")
        return announcement

    def _complete(self) -> Callable[[Mapping[int, JsonValue]], bool]:
        """Returns whether all hosts have published settings, or a failure has lasted while another host was ready."""
        failed_since: float | None = None

        def complete(values: Mapping[int, JsonValue]) -> bool:
            nonlocal failed_since
            if not any("failure" in value for value in values.values()):
                failed_since = None
                return len(values) == len(self.participants)
            if any("settings" in value and not value["refused"] for value in values.values()):
                now = time.monotonic()
                failed_since = now if failed_since is None else failed_since
                return now - failed_since > _GRACE_SECONDS
            return False

        return complete

    def _give_up_reducer(self, reduction: Reduction) -> Callable[[float], None]:
        """Returns a tick that raises once the reducer's failure has lasted for the grace period."""
        failed_since: float | None = None

        def tick(waited: float) -> None:
            nonlocal failed_since
            value = None if self._refused else reduction.value_of_reducer()
            if (value is None or "failure" not in value) and waited >= ASIDE_SECONDS and not self._refused:
                # The reducer may be lost, and another host wait for this one on another sharding.
                text = coordination.require_store().try_get(self._aside_in_round())
                value = None if text is None else {"failure": json.loads(text)}
            if value is None or "failure" not in value:
                failed_since = None
                return
            failed_since = waited if failed_since is None else failed_since
            if waited - failed_since > _GRACE_SECONDS:
                raise _GivenUp({"failure": value["failure"], "differences": []})

        return tick


def _peer_error(failure: Failure) -> PeerError:
    text = str(failure).removesuffix(".")
    what = text if failure.kind == LEFT else f"failed before its first batch: {text}"
    return PeerError(
        f"host {failure.host} {what}. See the log of host {failure.host}.", host=failure.host, peer_message=str(failure)
    )


class _GivenUp(Exception):
    """The reducer failed and did not recover within the grace period; ``outcome`` as returned by :func:`compare`."""

    def __init__(self, outcome: JsonValue) -> None:
        super().__init__()
        self.outcome = outcome


def compare(values: Mapping[int, JsonValue]) -> dict[str, JsonValue]:
    """Reduces the values that hosts published.

    Args:
      values: host → ``{"settings": {field: value}, "refused": bool}`` or ``{"failure": …}``.

    Returns:
      ``failure``: the failure of the first host with one, or None; ``differences``: one text for each field that differs.
    """
    for _, value in sorted(values.items()):
        if "failure" in value:
            return {"failure": value["failure"], "differences": []}
    settings: dict[int, dict[str, JsonValue]] = {host: value["settings"] for host, value in sorted(values.items())}
    fields = dict.fromkeys(name for value in settings.values() for name in value)
    differences: list[str] = []
    for field in fields:
        texts = {host: json.dumps(value.get(field), sort_keys=True) for host, value in settings.items()}
        if (shown := format_differences(texts, _SHOWN_CHARACTERS)) is not None:
            differences.append(f"{field} ({shown})")
    return {"failure": None, "differences": differences}
