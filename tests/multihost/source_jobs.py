"""Every source and pipeline through the feed on real hosts, for tests/multihost/test_sources.py."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
from shared_workers import shared_workers
from source_pipelines import make_feed


def rows_of(batch: Any) -> dict[int, str]:
    """Row of the global batch → its bytes as text, of the rows that this host holds."""
    rows: dict[int, str] = {}
    for name in sorted(batch):
        for shard in batch[name].addressable_shards:
            first = shard.index[0].start or 0
            for i, value in enumerate(np.asarray(shard.data)):
                rows[first + i] = rows.get(first + i, "") + f"{name}={value.tolist()!r};"
    return rows


def run(names: list[str], folder: str, save_at: int) -> dict[str, Any]:
    """Each pipeline from the beginning to its end: rows of every step here, and this host's state after ``save_at``."""
    found: dict[str, Any] = {}
    for name in names:
        with make_feed(name, folder) as feed:
            steps, state = [], None
            for batch in feed:
                steps.append(rows_of(batch))
                if feed.step == save_at:
                    state = json.dumps(feed.get_state())
            found[name] = {"steps": steps, "state": state, "position": feed.position}
    return found


def go_on(names: list[str], folder: str, states: dict[str, dict[str, list[str]]]) -> dict[str, Any]:
    """Each pipeline continued from the states of each other topology: rows of every further step here."""
    import meshfeed

    found: dict[str, Any] = {}
    for name in names:
        with make_feed(name, folder) as feed:
            for origin, parts in states[name].items():
                feed.set_state(meshfeed.merge_states([json.loads(part) for part in parts]))
                found[f"{name} from {origin}"] = [rows_of(batch) for batch in feed]
    return found


def go_on_with_workers(
    names: list[str], folder: str, states: dict[str, list[str]], num_workers: list[int], steps: list[int | None]
) -> dict[str, Any]:
    """Each pipeline continued with one number of workers for some steps, saved, and continued with the next number."""
    import meshfeed

    found: dict[str, Any] = {}
    with shared_workers(max(num_workers)) as used:
        for name in names:
            state, rows = meshfeed.merge_states([json.loads(part) for part in states[name]]), []
            for number, count in zip(num_workers, steps, strict=True):
                with make_feed(name, folder, num_workers=number) as feed:
                    feed.set_state(state)
                    rows += [rows_of(batch) for batch in itertools.islice(feed, count)]
                    state = json.loads(json.dumps(feed.get_state()))
            found[name] = {"steps": rows, "state": json.dumps(state)}
        assert len(used) == max(num_workers), "the rows came from the workers"
    return found
