"""Sources through feeds on the hosts of a job: what tests with real hosts and with simulated hosts run on each host.

``make_feed(name, **options)`` makes the feed of one source.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from shared_workers import shared_workers

MakeFeed = Callable[..., Any]


def rows_of(batch: Any) -> dict[int, str]:
    """Row of the global batch → its bytes as text, of the rows that this host holds."""
    rows: dict[int, str] = {}
    for name in sorted(batch):
        for shard in batch[name].addressable_shards:
            first = shard.index[0].start or 0
            for i, value in enumerate(np.asarray(shard.data)):
                rows[first + i] = rows.get(first + i, "") + f"{name}={value.tolist()!r};"
    return rows


def run(make_feed: MakeFeed, names: Sequence[str], save_at: int) -> dict[str, Any]:
    """Each source from the beginning to its end: rows of every step here, and this host's state after ``save_at``."""
    found: dict[str, Any] = {}
    for name in names:
        with make_feed(name) as feed:
            steps, state = [], None
            for batch in feed:
                steps.append(rows_of(batch))
                if feed.step == save_at:
                    state = json.dumps(feed.get_state())
            found[name] = {"steps": steps, "state": state, "position": feed.position}
    return found


def go_on(make_feed: MakeFeed, states: Mapping[str, Sequence[str]]) -> dict[str, list[list[dict[int, str]]]]:
    """Each source continued from each of its states: rows of every further step here."""
    found: dict[str, Any] = {}
    for name, several in states.items():
        with make_feed(name) as feed:
            found[name] = []
            for state in several:
                feed.set_state(json.loads(state))
                found[name].append([rows_of(batch) for batch in feed])
    return found


def go_on_with_workers(
    make_feed: MakeFeed, states: Mapping[str, str], num_workers: Sequence[int], steps: Sequence[int | None]
) -> dict[str, list[dict[int, str]]]:
    """Each source continued with one number of workers for some steps, saved, and continued with the next number."""
    found: dict[str, Any] = {}
    with shared_workers(max(num_workers)) as used:
        for name, text in states.items():
            state, found[name] = json.loads(text), []
            for number, count in zip(num_workers, steps, strict=True):
                with make_feed(name, num_workers=number) as feed:
                    feed.set_state(state)
                    found[name] += [rows_of(batch) for batch in itertools.islice(feed, count)]
                    state = json.loads(json.dumps(feed.get_state()))
        assert len(used) == max(num_workers), "the rows came from the workers"
    return found


# ---------------------------------------------------------------------------------------------------- all hosts together


def join(parts: Sequence[Sequence[dict[int, str]]]) -> list[dict[int, str]]:
    """Steps of all hosts as steps of the global batch."""
    assert len({len(part) for part in parts}) == 1, "all hosts end at the same step"
    return [{row: text for part in step for row, text in part.items()} for step in zip(*parts, strict=True)]


def merged(states: Sequence[str]) -> str:
    """The states of all hosts as one, in a form that can be compared."""
    import meshfeed

    return json.dumps(meshfeed.merge_states([json.loads(state) for state in states]), sort_keys=True)
