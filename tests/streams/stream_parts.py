"""Streams without a feed: settings, the rows of hosts, and a loop over the readers of all hosts of a job."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshfeed._src.base.settings import FeedSettings, Retry
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.state.state import FeedState, merge_states, parse_state


def settings_of(**changes: Any) -> FeedSettings:
    return FeedSettings(**{"global_batch_size": 8, "prefetch": 0, "retry": Retry(initial_seconds=0), **changes})


def rows_of_host(owners: Sequence[int], host: int) -> HostRows:
    """Rows of the equal parts of a batch that ``owners`` gives to ``host``."""

    def rows(size: int) -> np.ndarray:
        return np.flatnonzero(np.repeat(np.asarray(owners), size // len(owners)) == host)

    return HostRows(rows, lambda size: None)


class Numbers:
    """Lane i counts from 1000 * i + 1 and 100 * epoch, to its own length."""

    def __init__(self, lengths: list[int], form: str = "plain") -> None:
        self.lengths, self.form = lengths, form
        self.opened: list[tuple[int, int, int, int]] = []
        self.closed = False

    def fingerprint(self) -> str:
        return f"numbers {self.lengths}"

    def open(self, lane_index: int, num_lanes: int, *, epoch: int, seed: int) -> Any:
        self.opened.append((lane_index, num_lanes, epoch, seed))
        forms = {"plain": Plain, "state": WithState, "batches": Batches}
        return forms[self.form](1000 * lane_index + 100 * epoch, self.lengths[lane_index])

    def close(self) -> None:
        self.closed = True


class Plain:
    """An iterator without a state."""

    def __init__(self, base: int, length: int) -> None:
        self.base, self.length, self.at = base, length, 0

    def __iter__(self) -> Plain:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return {"x": np.int64(self.base + self.at)}


class WithState(Plain):
    def get_state(self) -> Any:
        return (self.at, b"as it is")

    def set_state(self, state: Any) -> None:
        self.at, mark = state
        assert (type(state), mark) == (tuple, b"as it is")


class Batches(WithState):
    """Gives up to 3 records at a time."""

    def __next__(self) -> Any:
        raise AssertionError("next_batch is there")

    def next_batch(self, num_records: int) -> Any:
        if self.at == self.length:
            raise StopIteration
        count = min(num_records, 3, self.length - self.at)
        self.at += count
        return {"x": np.arange(self.at - count, self.at, dtype=np.int64) + self.base + 1}


class Fetches:
    """Stands in for FetchAhead: a list gets each that is made."""

    def __init__(self, made: list[Fetches], plan: Any) -> None:
        self.plan, self.reached_batches, self.closed = plan, [], 0
        made.append(self)

    def reached(self, batch: int) -> None:
        self.reached_batches.append(batch)

    def close(self) -> None:
        self.closed += 1


def zeros_like(tree: Any, num_rows: int) -> Any:
    return jax.tree.map(lambda leaf: np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype), tree)


@dataclasses.dataclass
class Run:
    """What a job delivered: the rows of each step, in row order, and the state after the last."""

    batches: list[Any]
    state: FeedState
    cursors: list[Any]


def run(stream: Any, owners: Sequence[int], *, steps: int = 1000, state: FeedState | None = None) -> Run:
    """Delivers up to ``steps`` batches on the hosts of ``owners``, from the start or from a state."""
    cursor = stream.start() if state is None else stream.restore(state)
    hosts = sorted(set(owners))
    parts = [rows_of_host(owners, host) for host in hosts]
    readers = [stream.open_reader(cursor, part, hosts_agree=len(hosts) > 1) for part in parts]
    cursors, batches = [cursor] * len(hosts), []
    try:
        while len(batches) < steps:
            made = []
            for reader in readers:
                try:
                    made.append(reader.next())
                except StopIteration:
                    made.append(None)
            finals = [reader.final() for reader in readers]
            if None in made or (None not in finals and len(hosts) > 1):
                break  # one host has no batch, or all have only padding
            size = made[0].global_batch_size
            whole = None
            for part, batch in zip(parts, made, strict=True):
                if batch.tree is not None:
                    whole = whole or zeros_like(batch.tree, size)
                    for leaf, rows in zip(jax.tree.leaves(whole), jax.tree.leaves(batch.tree), strict=True):
                        leaf[part.rows(size)] = rows
            batches.append(whole)
            ended = {lane: length for batch in made for lane, length in batch.ended.items()}
            cursors = [
                reader.advance(cursor, batch, ended, 0)
                for reader, cursor, batch in zip(readers, cursors, made, strict=True)
            ]
    finally:
        for reader in readers:
            reader.close()
    merged = merge_states([stream.state(cursor).to_json() for cursor in cursors])
    return Run(batches, parse_state(json.dumps(merged)), cursors)
