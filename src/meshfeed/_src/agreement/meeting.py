"""Hosts of a feed meet to continue on another sharding: the first agreement of other participants than before.

Hosts come to a meeting from different pasts: one has failed, one was restored from a state, one only followed. What they
have in common is the feed's first scope, the new participants, and the number of meetings of these participants. A meeting
is a reduction (:mod:`meshfeed._src.base.reduction`) named by these three, and the name is also the scope of the
generations that follow. A meeting that fails is concluded too, and the next attempt is the next meeting, so hosts may call
again without agreeing on the number of calls. A host that skipped meetings learns their number at the next one that it
attends.

No participant waits for a host that is left out, so such a host may arrive after the participants have left the scope
and its keys have been deleted. Like what followers read (:mod:`meshfeed._src.agreement.followers`), the result of
a meeting is therefore kept elsewhere, until the second meeting after it. A failure is kept until all participants have come
to a later meeting. A host that is left out begins at the first meeting that is kept: one that failed has changed nothing. The
offers are deleted once there is a result or a failure. A host that leaves a meeting before that leaves a note there for hosts
that come later, and deletes it when it comes to another meeting.

Hosts with different new participants would wait for each other in different scopes. Each host therefore also publishes for
which participants it has come, and a host that waits compares.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from meshfeed._src.base import coordination
from meshfeed._src.base.coordination import KeyValueStore, call_briefly, format_hosts, label_of
from meshfeed._src.base.errors import AgreementError, Failure, MeshfeedError, PeerError, StalledError
from meshfeed._src.base.reduction import Reduction
from meshfeed._src.base.types import JsonValue
from meshfeed._src.base.waits import Grace

_KEPT_RESULTS = 2
_GRACE_SECONDS = 3.0  # for a host that calls again with other participants
_log = logging.getLogger("meshfeed.agree")
Conclude = Callable[[dict[int, JsonValue]], JsonValue]
"""Host → offer, of all participants → the result. An error that it raises is raised on all of them."""


class Outcome(NamedTuple):
    """What a meeting came to.

    Attributes:
      scope: key prefix of the generations that follow, unique in the job.
      result: JSON, the same on all hosts.
    """

    scope: str
    result: JsonValue


class _Deleted(Exception):
    """The meeting has ended and its result is deleted, which only a host that does not participate can miss."""


class _Past(NamedTuple):
    """A finished meeting."""

    label: str
    number: int
    succeeded: bool


def _prefix(scope: str) -> str:
    """Returns the key prefix of the meeting that started ``scope``."""
    return f"meshfeed/follow/{scope}/meet"


def result_of(store: KeyValueStore, scope: str) -> JsonValue | None:
    """Returns the result of the meeting that started ``scope``; None for a feed's first scope."""
    text = store.try_get(f"{_prefix(scope)}/out")
    return None if text is None else json.loads(text)["result"]["result"]


class Meetings:
    """The meetings of one feed on this host.

    Args:
      scope: the feed's first scope, the same on all hosts of the job that have the feed.
    """

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self._next: dict[str, int] = {}  # participants → number of the next meeting
        self._failed: dict[str, int] = {}  # participants → number of the last meeting in which this host failed
        self._past: list[_Past] = []  # in this order; those whose keys this host may have to delete
        self._note: Reduction | None = None  # a meeting without a result in which this host has left a note
        self._calls: _Calls | None = None  # of a meeting without a result

    def meet(
        self, participants: Sequence[int], offer: JsonValue, conclude: Conclude, *, timeout_seconds: float
    ) -> Outcome:
        """Waits for all participants and returns the result. A host that does not participate only waits for the result.

        An interrupted or failed call changes nothing and can be repeated. ``conclude`` runs on the lowest participant.

        Raises:
          PeerError: a participant cannot continue.
          StalledError: a participant did not arrive.
          AgreementError: hosts came for different participants.
          MeshfeedError: any error of ``conclude``; there is no key-value store.
        """
        here, label = coordination.process_index(), label_of(participants) or "all"
        if coordination.process_count() == 1:
            value = json.loads(json.dumps(offer))
            return Outcome(self._name(label, 0), json.loads(json.dumps(conclude({here: value}))))
        store = coordination.require_store()
        self._calls = calls = _Calls(store, self._scope, participants, here)
        reduction = self._open(store, label, participants)

        def tick(_: float) -> None:
            calls.check()
            if here not in participants and self._first_kept(store, label) is not None:
                raise _Deleted

        try:
            if here in participants:
                calls.publish()
                _forget_absent(reduction)
                reduction.publish({"offer": offer, "next": self._next})
            outcome = reduction.result(
                lambda deadline: _attempt(
                    reduction, participants, conclude, calls, deadline, lambda: self._forget(store, label)
                ),
                timeout_seconds=timeout_seconds,
                doing=f"continuing {self._scope.removeprefix('feed/')} on {format_hosts(participants)}",
                hint=", or has not called reshard",
                tick=tick,
            )
        except _Deleted:
            return self.meet(participants, offer, conclude, timeout_seconds=timeout_seconds)
        except BaseException as error:
            if here in participants:
                with contextlib.suppress(Exception):  # must not mask the error
                    # After a timeout, the reducer must not name this host among those that did not come.
                    self._leave_note(reduction, {"gone": True} if isinstance(error, StalledError) else None)
                    calls.publish(gone=True)
            raise
        if here in participants:
            calls.retract()
        self._calls = None
        number = self._next[label]
        self._end(label, "failure" not in outcome)
        if "failure" in outcome:
            if here in participants:
                reduction.retract()  # the failure may have been announced before this host came
            raise _exception(Failure.from_json(outcome["failure"]))
        self._next = _latest([self._next, outcome["next"]])
        self._forget(store if reduction.is_reducer else None, label)
        return Outcome(self._name(label, number), outcome["result"])

    def leave(self) -> None:
        """Retracts for which participants this host has come, as it will not come again."""
        calls, self._calls = self._calls, None
        if calls is not None:
            call_briefly(calls.retract, name="meshfeed-leave-meeting", at_exit=False)

    def _end(self, label: str, succeeded: bool) -> None:
        """Goes on from a meeting that has ended to the next one of its participants."""
        self._past.append(_Past(label, self._next[label], succeeded))
        self._next[label] += 1

    def _leave_note(self, reduction: Reduction, note: JsonValue | None) -> None:
        """Leaves a note in place of this host's offer, or only retracts the offer."""
        if note is None:
            reduction.retract()
            return
        reduction.publish(note)
        if reduction.announced() is not None:  # so nobody waits any more, and no reducer will discard it
            reduction.retract()
        else:
            self._note = reduction

    def _forget(self, store: KeyValueStore | None, label: str) -> None:
        """Once all participants of ``label`` have come to a meeting, on its reducer: deletes results that no host needs.

        A result is kept until the second meeting after it, and a failure until the same participants have come again: a
        participant that has not read it yet would wait in a finished meeting.
        """
        results = [one for one in self._past if one.succeeded][-_KEPT_RESULTS:]
        kept = [one for one in self._past if one in results or not (one.succeeded or one.label == label)]
        if store is not None:
            for one in self._past:
                if one not in kept:
                    store.delete(_prefix(self._name(one.label, one.number)))
        self._past = kept

    def fail(self, participants: Sequence[int], error: BaseException) -> None:
        """Publishes that this host cannot continue with these participants."""
        here, label = coordination.process_index(), label_of(participants) or "all"
        if coordination.process_count() == 1 or here not in participants:
            return
        try:
            store = coordination.require_store()
            reduction = self._open(store, label, participants)
            self._failed[label] = self._next[label]
            failure = Failure.of(error, here).to_json()
            if reduction.is_reducer:
                came = {here, *reduction.collect(0.0)}  # before they learn of the failure and retract their offers
                reduction.announce({"failure": failure})
                if came >= set(participants):
                    self._forget(store, label)
                reduction.discard_values()
            else:
                self._leave_note(reduction, {"failure": failure})
        except Exception as unpublished:  # must not mask ``error``, which the caller raises
            _log.warning("cannot report this host's failure to the other hosts: %s", unpublished)

    def _name(self, label: str, number: int) -> str:
        return f"{self._scope}-on-{label}-{number}"

    def _open(self, store: KeyValueStore, label: str, participants: Sequence[int]) -> Reduction:
        """Returns the first meeting of these participants that this host has not seen the end of."""
        here = coordination.process_index()
        while True:
            number = self._next.setdefault(label, 0)
            reduction = Reduction(store, _prefix(self._name(label, number)), participants, here)
            announced = reduction.announced()
            if announced is None or not self._is_over(announced, label):
                kept = None if announced is not None or here in participants else self._first_kept(store, label)
                if kept is not None:
                    self._next[label] = kept
                    continue
                self._retract_note(reduction)
                return reduction
            self._end(label, False)

    def _is_over(self, announced: Mapping[str, JsonValue], label: str) -> bool:
        """Whether this host need not be told how a meeting ended: the others gave up on it, or it raised its own error."""
        if "result" not in announced:
            return True
        failure, here = announced["result"].get("failure"), coordination.process_index()
        # Hosts that all failed would otherwise be told of the reducer's failure at their next call, where it waits.
        return failure is not None and (failure.get("host") == here or self._failed.get(label) == self._next[label])

    def _first_kept(self, store: KeyValueStore, label: str) -> int | None:
        """Returns the number of the first meeting from the next on that has ended and is kept, or None."""
        folder, _, name = self._scope.rpartition("/")
        pattern = re.compile(rf"{re.escape(name)}-on-{label}-(\d+)/meet/out")
        found = map(pattern.fullmatch, store.directory(f"meshfeed/follow/{folder}"))
        return min((n for match in found if match and (n := int(match[1])) >= self._next[label]), default=None)

    def _retract_note(self, opened: Reduction) -> None:
        """Deletes this host's note, unless it is in the meeting ``opened``, where the host is about to replace it."""
        note, self._note = self._note, None
        if note is not None and note.prefix != opened.prefix:
            note.retract()


def _forget_absent(reduction: Reduction) -> None:
    """On the reducer, before it waits: forgets hosts that came and gave up, which have to come again."""
    if reduction.is_reducer:
        for host, value in reduction.collect(0.0).items():
            if "gone" in value:
                reduction.retract(host)


def _attempt(
    reduction: Reduction,
    participants: Sequence[int],
    conclude: Conclude,
    calls: _Calls,
    deadline: float,
    forget: Callable[[], None],
) -> dict[str, JsonValue] | None:
    early = reduction.announced()  # by a reducer that failed before
    if early is not None:
        return early

    def done(values: Mapping[int, JsonValue]) -> bool:
        calls.check()
        return is_complete(values) or any("failure" in value for value in values.values())

    def is_complete(values: Mapping[int, JsonValue]) -> bool:
        return sum("offer" in value for value in values.values()) == len(participants)

    values = reduction.collect(deadline, done)
    if len(values) == len(participants):
        forget()  # so all have seen how the meetings before ended
    failure = next((value["failure"] for value in values.values() if "failure" in value), None)
    if failure is not None:
        announcement = reduction.announce({"failure": failure})
        reduction.discard_values()
        return announcement
    if not is_complete(values):
        return None
    try:
        result = conclude({host: value["offer"] for host, value in values.items()})
        outcome: JsonValue = {"result": result, "next": _latest([value["next"] for value in values.values()])}
    except MeshfeedError as error:
        outcome = {"failure": Failure.exact(error).to_json()}
    announcement = reduction.announce(outcome)
    reduction.discard_values()
    return announcement


def _latest(numbers: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Merges the hosts' numbers of the next meeting: participants → the highest."""
    merged: dict[str, int] = {}
    for one in numbers:
        for label, number in one.items():
            merged[label] = max(number, merged.get(label, 0))
    return merged


def _exception(failure: Failure) -> Exception:
    if failure.host is None:
        return failure.exception()
    return PeerError(
        f"host {failure.host} cannot continue on this sharding: {str(failure).removesuffix('.')}. See the log of host "
        f"{failure.host}.",
        host=failure.host,
        peer_message=str(failure),
    )


class _Calls:
    """For which participants each host has come.

    A host that has gone without a result leaves its own, for hosts that wait for others. For one that comes later it means
    nothing, as the host may come again.
    """

    def __init__(self, store: KeyValueStore, scope: str, participants: Sequence[int], host: int) -> None:
        self._store, self._key, self._host = store, f"meshfeed/{scope}-calls", host
        self._participants = sorted(participants)
        self._grace = Grace(_GRACE_SECONDS)
        self._gone = {host: text for host, text in self._found().items() if json.loads(text)["gone"]}

    def _found(self) -> dict[int, str]:
        return {int(host): text for host, text in self._store.directory(self._key).items()}

    def publish(self, *, gone: bool = False) -> None:
        text = json.dumps({"hosts": self._participants, "gone": gone})
        self._store.set(f"{self._key}/{self._host}", text, overwrite=True)

    def retract(self) -> None:
        self._store.delete(f"{self._key}/{self._host}")

    def check(self) -> None:
        """Raises AgreementError once a participant has come for others than this host for some time."""
        texts = self._found()
        self._gone = {host: text for host, text in self._gone.items() if texts.get(host) == text}
        found = {host: json.loads(text)["hosts"] for host, text in texts.items() if host not in self._gone}
        other = next((host for host in found if host in self._participants and found[host] != self._participants), None)
        if self._grace.is_over(other is not None) and other is not None:
            raise AgreementError(
                f"hosts called reshard with shardings over different hosts (host {self._host}: "
                f"{format_hosts(self._participants)}; host {other}: {format_hosts(found[other])}). Find out on one of them "
                "which hosts are left, and call reshard again with the same sharding on all of these."
            )
