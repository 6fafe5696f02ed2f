"""What ``Feed.reshard`` decides: whether a feed can continue on a sharding, and at which step its hosts do.

Hosts may have delivered different steps when one of them was lost: one has received a batch, another has failed before it.
No step after the lowest of these has been taken by all of them, so all continue there. The hosts' states, and what lost
hosts have published (:mod:`meshfeed._src.agreement.handover`), are merged to one state at that step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence

from meshfeed._src.agreement.handover import HandedOver, Past
from meshfeed._src.agreement.handshake import differing_fields
from meshfeed._src.agreement.meeting import result_of
from meshfeed._src.agreement.windows import full_window
from meshfeed._src.arrays.dtypes import x64_types
from meshfeed._src.arrays.placer import Placer, make_placer
from meshfeed._src.base import coordination
from meshfeed._src.base.coordination import format_differences, format_hosts
from meshfeed._src.base.errors import AgreementError, SettingsError
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.feed.parts import FeedPlace, take_place
from meshfeed._src.plan.plan import normalize_sharding, participants
from meshfeed._src.state.state import Ledgers, flatten, join_before_reset, parse_state
from meshfeed._src.streams.lane_moves import furthest_entries
from meshfeed._src.streams.protocol import AnyStream, Cursor

_log = logging.getLogger("meshfeed.feed")
_SHOWN_CHARACTERS = 120  # of a setting in a message
_NAMED_DIFFERENCES = 4


def make_place(sharding: PyTree, settings: FeedSettings, stream: AnyStream, before: FeedPlace) -> FeedPlace:
    """Returns the place of a feed on another sharding, as passed by the user; ``before`` is its current place.

    Raises:
      SettingsError: the sharding is invalid, or this kind of stream cannot continue on it.
      PlanError: a batch size is not divisible over the mesh.
    """
    with x64_types(before.placer.x64):  # the feed may have been made in jax.enable_x64(), which this call is outside of
        placer = make_placer(sharding, dataclasses.replace(settings, load=hosts_left(settings.load, sharding)))
    if stream.hosts_make_batches:
        _check_same_rows(stream, before, placer)
    return take_place(placer, stream)


def hosts_left(load: str | Sequence[int], sharding: PyTree) -> str | Sequence[int]:
    """Leaves the hosts out of ``load=[…]`` that are not in the sharding; SettingsError if none is."""
    if isinstance(load, str):
        return load
    everyone = participants(normalize_sharding(sharding))
    left = [host for host in load if host in everyone]
    if not left:
        raise SettingsError(
            f"load={list(load)!r}: none of these hosts has a device in the sharding passed to reshard, so no host "
            'would read. Use load="once" to read on any hosts.',
            setting="load",
        )
    return left


def _check_same_rows(stream: AnyStream, before: FeedPlace, placer: Placer) -> None:
    if stream.cannot_resume is not None:
        raise SettingsError(f"reshard drops what was read ahead, and {stream.cannot_resume}", setting="sharding")
    shards = before.placer.smallest_batch_size()
    same = before.placer.participants == placer.participants and shards == placer.smallest_batch_size()
    if not same or before.host_rows.rows(shards).tolist() != placer.host_rows(None).rows(shards).tolist():
        raise SettingsError(
            "the sharding passed to reshard gives hosts other rows, but the source is host batches, which are not elastic: "
            "each host makes its own rows, and no other can make them. Restart the job on as many hosts as before, or "
            "pass a source of records.",
            setting="sharding",
        )


# ------------------------------------------------------------------ the meeting


def make_offer(
    settings: FeedSettings, stream: AnyStream, cursor: Cursor, scope: str, origin: int, layout: str, prefetch: int
) -> dict[str, JsonValue]:
    """Returns what this host brings to the meeting: its state, its settings, and the scope of its generations so far.

    ``origin`` is the step of the state that the feed was last set to, ``layout`` that of the sharding passed to ``reshard``.
    ``prefetch`` is the number of global batches that this host may have ready.
    """
    return {
        "step": cursor.step,
        "state": stream.state(cursor).to_json(),
        "settings": {"sharding": layout, **flatten(dict(stream.fingerprint(cursor))), **settings.agreed()},
        "scope": [scope, origin],
        "prefetch": prefetch,
    }


def conclude(offers: Mapping[int, JsonValue]) -> dict[str, JsonValue]:
    """Returns the state at which all hosts continue, and the steps that they have delivered, from their offers.

    Returns:
      ``state``: JSON, with lanes that may be behind its step, or missing; ``steps``: host → step.

    Raises:
      AgreementError: hosts differ in settings or data, or are further apart than hosts of one feed can be.
    """
    steps = {host: int(offer["step"]) for host, offer in sorted(offers.items())}
    states = {host: parse_state(offer["state"]) for host, offer in sorted(offers.items())}
    step = min(steps.values())
    there = [host for host in steps if steps[host] == step]
    _check_alike({host: offer["settings"] for host, offer in sorted(offers.items())})
    base = states[there[0]]
    _check_alike({host: {"position": states[host].position} for host in there})
    begun = len(base.segments)
    _check_alike({host: {"the batch sizes so far": state.segments[:begun]} for host, state in states.items()})
    _check_apart(steps, max(offer["prefetch"] for offer in offers.values()), base.kind)
    handed_over = _handed_over([offer["scope"] for offer in offers.values()])
    for host, one in states.items():
        handed_over.add(one, steps[host])
    past = Past.of(base, step)
    lanes = None if base.lanes is None else furthest_entries(handed_over.lanes_before(past), base)
    skipped = max((states[host].num_skipped or 0 for host in there), default=0)
    ledgers = _merge_ledgers(handed_over.ledgers_of(past), step)
    before_reset = join_before_reset(states.values())
    state = dataclasses.replace(
        base, lanes=lanes, num_skipped=skipped or None, before_reset=before_reset, **ledgers.state_fields()
    )
    return {"state": state.to_json(), "steps": steps}


def warn_of_going_back(name: str, steps: Mapping[str, int], step: int, host: int) -> None:
    """Warns if this host continues, at ``step``, before one that it has delivered; ``steps`` are those of all, by host."""
    mine = steps.get(str(host), step)
    if mine > step:
        behind = [int(other) for other, at in steps.items() if at == step]
        _log.warning(
            "%s: this host had received the batches up to step %d, but %s only those before step %d, where all hosts "
            "continue: the batches from step %d on are delivered again. Continue with the training state that belongs to "
            "feed.step = %d.",
            name, mine - 1, format_hosts(behind), step, step, step,
        )  # fmt: skip


def _check_alike(values: Mapping[int, Mapping[str, JsonValue]]) -> None:
    if differences := differing_fields(values):
        raise AgreementError(
            f"hosts that call reshard differ in {', and in '.join(differences[:_NAMED_DIFFERENCES])}. They must be hosts of "
            "one feed: call set_state with the same state on all of them first, or restart the job from its last checkpoint."
        )


def _check_apart(steps: Mapping[int, int], prefetch: int, kind: str) -> None:
    # As far as the fastest host of a generation can be ahead of the slowest, which has all of that ready.
    most = 2 * full_window(coordination.process_count(), 0, 1 << 62) + prefetch + 2
    if max(steps.values()) - min(steps.values()) <= (0 if kind == "host_batches" else most):
        return
    shown = format_differences({host: f"step {step}" for host, step in steps.items()})
    raise AgreementError(
        f"hosts that call reshard have delivered different steps ({shown}), "
        + (
            "and host batches cannot be delivered again. "
            if kind == "host_batches"
            else f"more than {most} apart, which hosts of one feed cannot be. "
        )
        + "Call set_state with the same state on all of them first, or restart the job from its last checkpoint."
    )


def _handed_over(offered: Iterable[tuple[str, int]]) -> HandedOver:
    """Returns what hosts have published below the scopes of offers, and what earlier meetings gathered there.

    What a meeting gathered may not have been read by any host.
    """
    if coordination.process_count() == 1:
        return HandedOver()
    scopes: dict[str, set[int]] = {}
    for scope, origin in offered:
        scopes.setdefault(scope, set()).add(origin)
    store = coordination.require_store()
    found = HandedOver.read(store, scopes)
    for scope, origins in scopes.items():
        if (result := result_of(store, scope)) is not None:
            step = min(result["steps"].values())
            found.add(parse_state(result["state"]), step, ledgers=step in origins)
    return found


def _merge_ledgers(ledgers: Iterable[Ledgers], step: int) -> Ledgers:
    """Merges ledgers of any steps to those at ``step``. A host only appends to its own, so the longest is complete."""
    listed: dict[str, Sequence[JsonValue]] = {}
    unlisted: dict[str, int] = {}
    for one in ledgers:
        for host, entries in one.listed.items():
            delivered = [entry for entry in entries if entry[3] < step]
            if len(delivered) > len(listed.get(host, ())):
                listed[host] = delivered
        for host, count in one.num_unlisted.items():
            unlisted[host] = max(count, unlisted.get(host, 0))
    return Ledgers(listed, unlisted)
