"""States that a feed must refuse: what a damaged file, another job or a careless edit makes of a state."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import xxhash

State = dict[str, Any]
Wrong = tuple[str, State]
"""The field that the error names, or how its name begins, and the state."""


def sealed(entry: State) -> State:
    """An entry of a lane or host with the digest that belongs to it."""
    bare = {name: value for name, value in entry.items() if name != "digest"}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    return {**bare, "digest": xxhash.xxh3_64_hexdigest(text.encode())}


def wrong_states(state: State, host: int, lanes: set[int], total: int | None) -> Iterator[Wrong]:
    """Yields states that the host must refuse.

    Args:
      state: one that it must take.
      host: process index.
      lanes: that it reads.
      total: records of the stream, if known.
    """

    def changed(field: str, change: Callable[[State], None]) -> Wrong:
        other = copy.deepcopy(state)
        change(other)
        return field, other

    def put(*path: Any) -> Callable[[State], None]:
        *parents, name, value = path

        def change(other: Any) -> None:
            for parent in parents:
                other = other[parent]
            other[name] = value

        return change

    fingerprint = state["fingerprint"]
    for name in ("seed", "num_epochs"):
        if name in fingerprint:
            yield changed(name, put("fingerprint", name, (fingerprint[name] or 0) + 1))
    if state["position"] and "mixture" in fingerprint and not fingerprint["mixture"].get("added"):  # at step 0, perhaps
        begun = fingerprint["mixture"]["stages"][0][2]
        for name in begun:
            yield changed("mixture", put("fingerprint", "mixture", "stages", 0, 2, {**begun, name: begun[name] + 1}))
    yield changed("end", put("fingerprint", "end", {"pad": "drop", "drop": "pad"}[fingerprint["end"]]))
    yield changed("source", put("fingerprint", "source", {"kind": "another"}))
    yield changed("kind", put("kind", {"lanes": "host_batches"}.get(state["kind"], "lanes")))
    yield changed("meshfeed", put("meshfeed", 99))
    yield changed("position", lambda other: other.pop("position"))
    if total is not None:
        yield changed("position", put("position", total + 1))
    if state["kind"] == "lanes":
        yield from _of_lanes(state, lanes, changed, put)
    if state["kind"] == "host_batches":
        yield from _of_hosts(state, str(host), changed, put)


def _of_lanes(
    state: State, needed: set[int], changed: Callable[..., Wrong], put: Callable[..., Any]
) -> Iterator[Wrong]:
    count = state["num_lanes"]
    yield changed("position", put("position", state["position"] + 1))
    if not all(entry["ended"] for entry in state["lanes"].values()):
        yield changed("", put("step", state["step"] + 1))
    yield changed("num_lanes", put("num_lanes", count + 1))
    yield changed("lanes", lambda other: other.pop("lanes"))
    yield changed(f"lanes.{count}", put("lanes", str(count), sealed(state["lanes"]["0"])))
    key = str(count - 1)
    field, entry = f"lanes.{key}", state["lanes"][key]
    yield changed(f"{field}.digest", put("lanes", key, "taken", entry["taken"] + 1))
    yield changed(field, put("lanes", key, {name: value for name, value in entry.items() if name != "digest"}))
    more = "" if entry["ended"] else f"{field}.records"  # else it is the sum that is wrong
    yield changed(more, put("lanes", key, sealed({**entry, "records": entry["records"] + 1})))
    yield changed(f"{field}.ended", put("lanes", key, sealed({**entry, "ended": 0})))
    yield changed(field, put("lanes", key, sealed({**entry, "more": 0})))
    for name in ("records", "epoch", "taken", "skip"):
        yield changed(f"{field}.{name}", put("lanes", key, sealed({**entry, name: -1})))
    if entry["records"]:
        before = {**entry, "records": entry["records"] - 1, "ended": False}
        yield changed(f"{field}.records", put("lanes", key, sealed(before)))
        yield changed("position", put("lanes", key, sealed({**before, "ended": True})))
    if needed:
        first = str(min(needed))
        yield changed("lanes", lambda other: other["lanes"].pop(first))


def _of_hosts(state: State, host: str, changed: Callable[..., Wrong], put: Callable[..., Any]) -> Iterator[Wrong]:
    yield changed("hosts", lambda other: other.pop("hosts"))
    yield changed("processes", put("fingerprint", "processes", state["fingerprint"]["processes"] + 1))
    if host not in state["hosts"]:
        return
    entry = state["hosts"][host]
    yield changed("hosts", lambda other: other["hosts"].pop(host))
    yield changed(f"hosts.{host}.digest", put("hosts", host, "step", entry["step"] + 1))
    yield changed("", put("hosts", host, sealed({**entry, "step": state["step"] + 1})))
    yield changed(f"hosts.{host}.epoch", put("hosts", host, sealed({**entry, "epoch": -1})))
    bare = {name: value for name, value in entry.items() if name != "iterator"}
    yield changed(f"hosts.{host}.iterator", put("hosts", host, sealed(bare)))
