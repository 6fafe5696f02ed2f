"""Agreement between hosts on settings and position, before the first batch of each generation of a feed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshfeed import _process
from meshfeed._errors import AgreementError, PeerError
from meshfeed._feeder import Place
from meshfeed._settings import FeedSettings
from meshfeed._state import flatten

_FAILURE = "__failure__"
_MAX_MESSAGE = 2000


def agreed_settings(settings: FeedSettings, fingerprint: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """What must be the same on all hosts before the first batch: field → JSON value, flat."""
    bad = settings.bad_records
    return {
        **flatten(dict(fingerprint)),
        "position": place.position,
        "step": place.step,
        "load": settings.load,
        "mask_key": settings.mask_key,
        "bad_records": None if bad is None else bad.max_fraction,
        "check_replicas": settings.check_replicas,
        "global_batch_size": None if settings.schedule is None else settings.schedule.stages,
    }


def publish_failure(scope: str, round_number: int, error: BaseException) -> None:
    """Tells the hosts that will agree on settings in this round that this one cannot come."""
    store = _process.key_value_store()
    if store is None:
        return
    message = {_FAILURE: f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]}
    key = f"meshfeed/{scope}/settings/{round_number}/in/{_process.process_index()}"
    store.set(key, json.dumps(message), overwrite=True)


def agree_on_settings(
    scope: str,
    round_number: int,
    settings: Mapping[str, Any],
    *,
    participants: Sequence[int],
    timeout_seconds: float,
) -> None:
    """Compares settings between hosts.

    Args:
      scope: unique to this feed.
      round_number: generation of the feed.
      settings: field → JSON value, flat.
      participants: process indices that take part.
      timeout_seconds: how long to wait for the slowest host.

    Raises:
      AgreementError: on every participant, naming the first fields that differ and the hosts.
      PeerError: a host could not make its feed, or could not take its state.
      StalledError: some host did not come.
    """

    def compare(values: dict[int, Any]) -> dict[str, Any]:
        for host, value in values.items():
            if _FAILURE in value:
                return {"failed": host, "message": value[_FAILURE]}
        differences = []
        for field in dict.fromkeys(name for value in values.values() for name in value):
            groups: dict[str, list[int]] = {}
            for host, value in values.items():
                groups.setdefault(json.dumps(value.get(field), sort_keys=True), []).append(host)
            if len(groups) > 1:
                shown = "; ".join(
                    f"{_process.format_hosts(hosts)}: {text if len(text) <= 120 else text[:117] + '...'}"
                    for text, hosts in sorted(groups.items(), key=lambda item: item[1][0])
                )
                differences.append(f"{field} ({shown})")
        return {"differences": differences}

    result = _process.reduce_json(
        f"{scope}/settings",
        round_number,
        dict(settings),
        compare,
        participants=participants,
        timeout_seconds=timeout_seconds,
        doing="agreeing on the feed's settings",
    )
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
