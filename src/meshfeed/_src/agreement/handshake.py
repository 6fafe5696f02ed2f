"""Compares settings and position between hosts before the first batch of each generation of a feed.

Each generation that is begun takes one round, a reduction (:mod:`meshfeed._src.base.reduction`) of all hosts' settings to
their differences. A host that cannot take part (making the feed, opening the data or restoring a state failed, or it has
closed the feed) publishes that failure instead, and the others raise an error naming it after a grace period of a few
seconds. Hosts that only follow learn of a failed round too. The grace period, and the tracking of refused states, are for
hosts that recover: if every host refuses the same state and starts from the beginning, none has failed.

A round belongs to its generation from :meth:`Handshake.begin` on, before any request. Hosts that begin and abandon the same
generations are therefore in the same round, however far each had come. A host that is gone for good cannot know how many
generations the others begin and abandon before they wait for it, so it also leaves its notice at a key that belongs to no
round, which hosts check after waiting for two seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from meshfeed._src.agreement.followers import announce_failure
from meshfeed._src.agreement.messages import ASIDE_SECONDS, aside_key, find_aside
from meshfeed._src.base import coordination, jax_internals
from meshfeed._src.base.coordination import KeyValueStore, call_briefly, format_differences
from meshfeed._src.base.errors import DRAWS, LEFT, AgreementError, Failure, PeerError
from meshfeed._src.base.identities import ALL_RECORDS, FOUR_RECORDS
from meshfeed._src.base.reduction import Reduction, leave
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.types import JsonValue
from meshfeed._src.base.waits import Grace
from meshfeed._src.state.state import flatten
from meshfeed._src.streams.protocol import Cursor

_log = logging.getLogger("meshfeed.agree")
Check = Callable[[], object]
"""Raises once its caller no longer waits for the result."""
_GRACE_SECONDS = 3.0  # for a host that published a failure to recover
_NAMED_DIFFERENCES = 4
_DIGESTS = (".content", f".{ALL_RECORDS}", f".{FOUR_RECORDS}")  # of records, in the identity of a source
_SHOWN_CHARACTERS = 120  # of a setting in a message


def agreed_settings(
    settings: FeedSettings, fingerprint: Mapping[str, JsonValue], cursor: Cursor, layout: str
) -> dict[str, JsonValue]:
    """Returns what must be equal on all hosts before the first batch: field → JSON value, flat."""
    return {
        "sharding": layout,
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
      round: number of the next generation's round; failed rounds count, and those of hosts that only follow.
      in_force: whether the last round succeeded and its generation of the feed has not ended.
    """

    def __init__(self, scope: str, participants: Sequence[int]) -> None:
        self._scope, self._feed = scope, f"meshfeed/{scope}"
        # Includes the feed's name because hosts that create different feeds, or in a different order, wait on
        # different keys.
        self._name = scope.removeprefix("feed/")
        self._doing = f"agreeing on the settings of {self._name}"
        self.participants = tuple(sorted(participants))
        self.round = 0
        self.in_force = False
        self._begun: int | None = None  # round of this generation, from its begin to its result
        self._refused = self._refused_before = False  # a state, for the next round and for this one
        self._published = False  # a failure in the next round, which this host may take back
        self._left = False
        self._job = jax_internals.coordination_client()
        self._kept = 0  # rounds before it have been deleted, on the reducer

    @property
    def needed(self) -> bool:
        """Whether there are other hosts to agree with."""
        return len(self.participants) > 1 and coordination.process_index() in self.participants

    def begin(self) -> None:
        """Begins the round of this generation, once. Call it on the thread that also ends generations."""
        if self._begun is None and not self.in_force:
            # No call in between: signals arrive only at calls, so an interrupt cannot split the update.
            number = self.round
            self._begun, self.round, self._refused_before = number, number + 1, self._refused
            self._refused = self._published = False

    def fail(self, error: BaseException, *, refused: bool = False, for_good: bool = False) -> None:
        """Publishes that this host cannot take part in this generation's round.

        Args:
          error: the reason.
          refused: this host rejected the state of the next generation without changing anything, and may still join its
            round. Otherwise it can join the following round at the earliest.
          for_good: it cannot join any round.
        """
        store = self._store()
        if store is not None:
            try:
                failure = Failure.of(error, coordination.process_index())
                reduction = self._reduction(store, self.round if refused else None)
                reduction.publish({"failure": failure.to_json()})
                if for_good:
                    self._publish_gone(store, failure)
                if reduction.is_reducer and not refused:  # nobody may be left to find this out and say so
                    self._tell_followers(_peer_error(failure))
            except Exception as unpublished:  # must not mask ``error``, which the caller raises
                _log.warning("cannot report this host's failure to the other hosts: %s", unpublished)
        if refused:
            self._refused = self._published = True
        elif self._begun is not None:
            self._begun = None
        else:
            self.round += 1

    @property
    def others_may_have_agreed(self) -> bool:
        """Whether the round of this generation may have succeeded without this host's knowledge."""
        # A reducer that has not announced the result knows that there is none.
        waits = self._begun is not None and self._store() is not None
        return waits and coordination.process_index() != min(self.participants)

    def abandon(self, notice: str | None) -> None:
        """Leaves this generation's round if it has no result yet.

        Args:
          notice: why, for hosts that wait for this one in the round; None to leave silently.
        """
        if self._begun is not None and notice is not None:
            self._publish_notice(notice)
        self._begun = None

    def step_aside(self, notice: str) -> None:
        """Publishes that this host has left for another sharding, once it has ended its generation.

        Hosts may wait for it in the windows of that generation, in the round with which it began, or in the next round;
        followers may already wait in the generation that begins with the next round. This host may still join that round:
        :meth:`withdraw` retracts what concerns it.
        """
        store = self._store()
        if store is None:
            return
        failure = Failure.left(notice, coordination.process_index()).to_json()
        try:
            text = json.dumps(failure)
            began = [self._round(self.round - 1)] if self.round else []
            for prefix in (f"{self._feed}/{self.round}", *began, *self._next_prefixes):
                store.set(aside_key(prefix), text, overwrite=True)
            self._reduction(store).publish({"failure": failure})
        except Exception as error:  # the meeting that follows needs the store too, and raises
            _log.debug("cannot tell the other hosts that this one %s: %s", notice, error)
        self._published = True

    def _round(self, number: int) -> str:
        """The prefix of the keys of a round."""
        return f"{self._feed}/settings/{number}"

    @property
    def _next_prefixes(self) -> tuple[str, str]:
        """The prefixes of the keys of the next round, and of the generation that begins with it."""
        return self._round(self.round), f"{self._feed}/{self.round + 1}"

    def withdraw(self) -> None:
        """Starts a new generation of the feed and retracts what a refused state, or a host that stepped aside, published."""
        self.in_force = False
        store = self._store() if self._published else None
        if store is not None:
            self._reduction(store).retract()
            for prefix in self._next_prefixes:
                store.delete(aside_key(prefix))
        self._published = False

    def leave(self, notice: str | None = None, *, awaited: bool = False) -> None:
        """Marks this host as done with the feed; it no longer reads or writes the feed's keys.

        Args:
          notice: why, for hosts that wait for this one in the next round; None to leave silently.
          awaited: whether another host has left this generation, and may wait in the next round.
        """
        store = self._store()
        # A refused state says more.
        if notice is not None and not self._published:
            # In force, the windows tell hosts that are in this generation, but not those that have begun another.
            self._publish_notice(notice, in_round=awaited or not self.in_force, for_good=True)
        self._left = True
        if store is not None:
            leave(store, self._feed, len(self.participants))

    def _gone_key(self) -> str:
        """The directory of the notices of hosts that are gone for good, by host."""
        return f"{self._feed}/gone"

    def _publish_gone(self, store: KeyValueStore, failure: Failure) -> None:
        store.set(f"{self._gone_key()}/{failure.host}", json.dumps({"failure": failure.to_json()}), overwrite=True)

    def _publish_notice(self, notice: str, *, in_round: bool = True, for_good: bool = False) -> None:
        store = self._store()
        if store is None:
            return
        reduction = self._reduction(store)
        failure = Failure.left(notice, coordination.process_index())

        def publish() -> None:
            if in_round:
                reduction.publish({"failure": failure.to_json()})
            if for_good:
                self._publish_gone(store, failure)
            # In force, followers learn of it from the windows; an announcement would delete those of a late follower.
            if reduction.is_reducer and not self.in_force:
                self._tell_followers(_peer_error(failure))

        call_briefly(publish, name="meshfeed-leave-notice", at_exit=True)

    def _store(self) -> KeyValueStore | None:
        """Returns the store for optional messages, or None if no other host would read them, as in the next job."""
        # An in-process resize begins a job with feeds of the same keys. Before, JAX may not be asked for the process index.
        here = jax_internals.coordination_client() is self._job and self.needed and not self._left
        return coordination.key_value_store() if here else None

    def _tell_followers(self, error: BaseException) -> None:
        """Tells hosts that only follow that this round failed."""
        store = self._store()
        if store is not None and coordination.process_count() > len(self.participants):
            announce_failure(store, self._scope, self._number + 1, error)

    @property
    def _number(self) -> int:
        """The round of this generation; the next one if it has none, or has its result."""
        begun = self._begun
        return self.round if begun is None else begun

    def _reduction(self, store: KeyValueStore, number: int | None = None) -> Reduction:
        prefix = self._round(self._number if number is None else number)
        return Reduction(store, prefix, self.participants, coordination.process_index())

    def agree(
        self,
        settings: Mapping[str, JsonValue],
        timeout_seconds: float,
        check: Check = lambda: None,
        *,
        taken: int | None = None,
    ) -> None:
        """Compares settings between hosts, once in each generation. An interrupted call can be repeated.

        Args:
          settings: field → JSON value, flat.
          timeout_seconds: how long to wait for the slowest host; longer while it drops records and makes progress.
          check: called about twice per second while it waits; may raise, which leaves the round without a result.
          taken: batches that this host had taken when it reset the feed, if no error ended them. A difference is logged.

        Raises:
          AgreementError: on every participant, naming the first fields that differ and the hosts.
          PeerError: a host could not make its feed, open its data, or take its state.
          StalledError: a host did not arrive.
          MeshfeedError: there is no key-value store.
        """
        if self.in_force:
            return
        self.begin()
        try:
            if self.needed:
                while not self._succeeds(settings, taken, timeout_seconds, check):
                    self._begun, self.round = self.round, self.round + 1
        except _Abandoned as abandoned:
            raise abandoned.error from None
        except Exception as error:
            if self.needed and coordination.process_index() == self._spokesman(error):
                with contextlib.suppress(Exception):  # must not mask ``error``
                    self._tell_followers(error)
            self._begun = None
            raise
        # One statement without calls: signals arrive only at calls, so an interrupt cannot split the update.
        self._begun, self.in_force = None, True

    def _spokesman(self, error: Exception) -> int:
        """The host that tells followers of an error: the lowest that did not cause it."""
        return min(host for host in self.participants if not isinstance(error, PeerError) or host != error.host)

    # ------------------------------------------------------------------ one round

    def _succeeds(
        self, settings: Mapping[str, JsonValue], taken: int | None, timeout_seconds: float, check: Check
    ) -> bool:
        """Takes part in a round; returns False if the other hosts gave up on this one."""
        reduction = self._reduction(coordination.require_store())
        value: dict[str, JsonValue] = {"settings": dict(settings), "refused": self._refused_before}
        if taken is not None:
            value["taken"] = taken
        outcome = self._outcome(reduction, value, timeout_seconds, check)
        failure = None if outcome["failure"] is None else Failure.from_json(outcome["failure"])
        if failure is not None:
            if failure.host == coordination.process_index():
                return False
            raise _peer_error(failure)
        differences = outcome["differences"]
        if differences:
            named = differences[:_NAMED_DIFFERENCES]
            staged = any(text.startswith(("mixture.stages ", "mixture.added ")) for text in named)
            called = (
                ", and call set_weights on all of them after the same step, with the same weights" if staged else ""
            )
            of_source = any(text.startswith("source.") for text in named)
            digested = any(text.partition(" ")[0].endswith(_DIGESTS) for text in named)
            what = (
                f"A content is a digest of records: the files differ, or the functions that read them. {DRAWS} "
                if digested
                else ""
            )
            what += "Every host needs the whole data, and reads only its own rows of it. " if of_source else ""
            raise AgreementError(
                f"hosts differ in {', and in '.join(named)}. {what}Start all hosts with the same source, settings and state"
                f"{called}."
            )
        if "taken" in outcome:
            _log.warning(
                "%s was reset after different numbers of batches (%s). Unless a step failed, a host has called next more "
                "often than the others, so global arrays held rows of different steps. Call next equally often on every "
                "host.",
                self._name,
                outcome["taken"],
            )
        return True

    def _outcome(
        self, reduction: Reduction, value: Mapping[str, JsonValue], timeout_seconds: float, check: Check
    ) -> JsonValue:
        early = reduction.announced() if reduction.is_reducer else None  # by hosts that gave up on this one
        if early is not None:
            return reduction.unpack(early, self._doing)
        reduction.publish(value)
        try:
            return reduction.result(
                lambda deadline: self._reduce(reduction, deadline, check),
                timeout_seconds=timeout_seconds,
                doing=self._doing,
                hint=" (without name=, feeds over the same hosts are matched by their order of creation; of several "
                "feeds, call start() of each first, or request their first batches in the same order on all hosts)",
                tick=self._give_up_reducer(reduction, check),
            )
        except _GivenUp as given_up:
            return reduction.announce(given_up.outcome)["result"]

    def _reduce(self, reduction: Reduction, deadline: float, check: Check) -> dict[str, JsonValue] | None:
        with_gone = self._with_gone()
        values = with_gone(reduction.collect(deadline, self._complete(check, with_gone)))
        if len(values) < len(self.participants) and not any("failure" in value for value in values.values()):
            return None
        announcement = reduction.announce(compare(values))
        reduction.discard_values()
        store = self._store()
        # Without a failure, every host has reached this round, so all have read the results of those before, some of which
        # they abandoned, and have left their generations, so the windows of those are unused.
        passed = announcement["result"]["failure"] is None
        while store is not None and passed and self._kept < self._number:
            store.delete(self._round(self._kept))
            self._kept += 1
            store.delete(f"{self._feed}/{self._kept}")
        return announcement

    def _with_gone(self) -> Callable[[Mapping[int, JsonValue]], Mapping[int, JsonValue]]:
        """Returns what adds the notices of hosts that are gone to the values of a round, once it has lasted some time."""
        start = time.monotonic()

        def with_gone(values: Mapping[int, JsonValue]) -> Mapping[int, JsonValue]:
            if len(values) == len(self.participants) or time.monotonic() - start < ASIDE_SECONDS:
                return values
            found = coordination.require_store().directory(self._gone_key())
            return {int(host): json.loads(text) for host, text in found.items()} | dict(values)

        return with_gone

    def _complete(
        self, check: Check, with_gone: Callable[[Mapping[int, JsonValue]], Mapping[int, JsonValue]]
    ) -> Callable[[Mapping[int, JsonValue]], bool]:
        """Returns whether all hosts have published settings, or a failure has lasted while another host was ready."""
        grace = Grace(_GRACE_SECONDS)

        def complete(values: Mapping[int, JsonValue]) -> bool:
            _call(check)
            values = with_gone(values)
            failed = any("failure" in value for value in values.values())
            ready = any("settings" in value and not value["refused"] for value in values.values())
            return grace.is_over(failed and ready) or (not failed and len(values) == len(self.participants))

        return complete

    def _give_up_reducer(self, reduction: Reduction, check: Check = lambda: None) -> Callable[[float], None]:
        """Returns a tick that raises once the reducer's failure has lasted for the grace period."""
        grace = Grace(_GRACE_SECONDS)

        def tick(waited: float) -> None:
            _call(check)
            value = None if self._refused_before else reduction.value_of_reducer()
            if (value is None or "failure" not in value) and waited >= ASIDE_SECONDS and not self._refused_before:
                # The reducer may be lost, and another host wait for this one on another sharding.
                store = coordination.require_store()
                aside = find_aside(store, self._round(self._number))
                gone = store.try_get(f"{self._gone_key()}/{reduction.reducer}") if aside is None else None
                value = None if aside is None else {"failure": aside.to_json()}
                value = value if gone is None else json.loads(gone)
            failed = value is not None and "failure" in value
            if grace.is_over(failed) and value is not None:
                raise _GivenUp({"failure": value["failure"], "differences": []})

        return tick


def _call(check: Check) -> None:
    try:
        check()
    except Exception as error:
        raise _Abandoned(error) from None


class _Abandoned(Exception):
    """``check`` raised ``error``."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


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


def differing_fields(settings: Mapping[int, Mapping[str, JsonValue]]) -> list[str]:
    """Returns one text for each field that differs, given host → field → value.

    Digests of a source's content are left out if a field that people can read, such as the number of records, differs too.
    """
    if len({id(value) for value in settings.values()}) == 1:  # shared by Reduction; saves a second with 4,096 hosts
        return []
    fields = dict.fromkeys(name for value in settings.values() for name in value)
    differences: dict[str, str] = {}
    for field in fields:
        texts = {host: json.dumps(value.get(field), sort_keys=True) for host, value in settings.items()}
        if (shown := format_differences(texts, _SHOWN_CHARACTERS)) is not None:
            differences[field] = f"{field} ({shown})"
    readable = any(field.startswith("source.") and not field.endswith(_DIGESTS) for field in differences)
    return [
        text
        for field, text in differences.items()
        if not (readable and field.startswith("source.") and field.endswith(_DIGESTS))
    ]


def compare(values: Mapping[int, JsonValue]) -> dict[str, JsonValue]:
    """Reduces the values that hosts published.

    Args:
      values: host → ``{"settings": {field: value}, "refused": bool}``, also with ``"taken": int``, or ``{"failure": …}``.

    Returns:
      ``failure``: the failure of the first host with one, or None; ``differences``: one text for each field that differs;
      ``taken``: a text, only if hosts had taken different numbers of batches.
    """
    for _, value in sorted(values.items()):
        if "failure" in value:
            return {"failure": value["failure"], "differences": []}
    settings: dict[int, dict[str, JsonValue]] = {host: value["settings"] for host, value in sorted(values.items())}
    taken = {host: str(value["taken"]) for host, value in sorted(values.items()) if "taken" in value}
    different = format_differences(taken)
    return {"failure": None, "differences": differing_fields(settings)} | ({"taken": different} if different else {})
