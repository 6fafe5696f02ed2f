"""Damaged states of every kind of stream: each is refused with StateMismatchError, or continues the same stream.

Every value of a real state is deleted, replaced by values of other types and sizes, or, in lists, repeated. Entries with
a digest are damaged once with the old digest and once with that of the damaged entry. After a refusal the feed is where it
was; after an acceptance it delivers the records at the state's position.
"""

from __future__ import annotations

import copy
import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meshfeed
from meshfeed import sources
from meshfeed._src.state.state import seal

SIZE, RECORDS = 8, 96
WRONG: tuple[Any, ...] = (
    None, "", "\ud800", [], [[]], {}, {"0": 1}, 0, -1, 1.5, True, 2**62 - 1, 2**70, math.nan, math.inf,
)  # fmt: skip


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def numbers(count: int = RECORDS, first: int = 0) -> dict[str, np.ndarray]:
    return {"id": np.arange(first, first + count, dtype=np.int32)}


class Counting:
    """A lane or an iterator of host batches, with a state."""

    def __init__(self, step: int, at: int, rows: int = 0) -> None:
        self.step, self.at, self.rows = step, at, rows

    def __iter__(self) -> Counting:
        return Counting(self.step, self.at, self.rows)

    def __next__(self) -> dict[str, Any]:
        if self.at >= RECORDS:
            raise StopIteration
        self.at += self.step
        at = self.at - self.step
        return {"id": np.arange(at, at + self.rows, dtype=np.int32) if self.rows else np.int32(at)}

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}

    def set_state(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def bare_lane(lane_index: int, num_lanes: int) -> Iterator[dict[str, Any]]:
    for number in range(lane_index, RECORDS, num_lanes):
        yield {"id": np.int32(number)}


class Broken:
    """Records of which two are bad."""

    def __len__(self) -> int:
        return RECORDS

    def fingerprint(self) -> str:
        return "broken"

    def __getitem__(self, record_id: int) -> dict[str, Any]:
        if record_id in (3, 12):
            raise ValueError("bad")
        return {"id": np.int32(record_id)}


def documents() -> list[dict[str, np.ndarray]]:
    return [{"tokens": np.arange(1 + n % 7, dtype=np.int32) + n} for n in range(400)]


def parquet(folder: pathlib.Path) -> Any:
    paths = []
    for shard in range(4):
        paths.append(str(folder / f"{shard}.parquet"))
        if not (folder / f"{shard}.parquet").exists():
            pq.write_table(pa.table({"id": np.arange(24, dtype=np.int32) + 24 * shard}), paths[-1])
    return sources.Parquet(paths, ["id"])


def mixed() -> Any:
    parts = {
        "a": sources.Memory(numbers()),
        "b": sources.Memory(numbers(50, 1000)),
        "c": sources.Memory(numbers(9, 2000)),
    }
    return sources.Mixture(parts, [(0, {"a": 3, "b": 1}), (2, {"a": 1, "c": 1}), (50, {"b": 1})], block=4)


def mixed_lanes() -> Any:
    parts = {
        "a": sources.Stream(lambda lane_index, num_lanes: Counting(num_lanes, lane_index)),
        "b": sources.Memory(numbers()),
    }
    return sources.Mixture(parts, [(0, {"a": 3, "b": 1}), (2, {"a": 1, "b": 1})], block=4)


KINDS: dict[str, tuple[Callable[[pathlib.Path], Any], dict[str, Any]]] = {
    "random access": (lambda _: sources.Memory(numbers()), {"shuffle": True, "num_epochs": 2}),
    "ramp": (
        lambda _: sources.Memory(numbers()),
        {"shuffle": 16, "end": "pad", "global_batch_size": meshfeed.BatchSchedule([(0, 8), (2, 16)])},
    ),
    "endless": (lambda _: sources.Memory(numbers()), {"num_epochs": None, "shuffle": True}),
    "ledger": (lambda _: Broken(), {"bad_records": meshfeed.SkipBad(max_fraction=0.5)}),
    "shards": (parquet, {"shuffle": "shards", "num_lanes": 2}),
    "mixture": (lambda _: mixed(), {"shuffle": True, "num_epochs": None}),
    "buckets": (lambda _: sources.Buckets(documents(), [4, 8], key="tokens"), {"shuffle": True}),
    "packed": (lambda _: sources.Packed(documents(), 16), {"shuffle": True}),
    "lanes": (
        lambda _: sources.Stream(lambda lane_index, num_lanes: Counting(num_lanes, lane_index)),
        {"num_lanes": 2, "num_epochs": 2},
    ),
    "bare lanes": (lambda _: sources.Stream(bare_lane), {"num_lanes": 2, "end": "pad"}),
    "mixed lanes": (lambda _: mixed_lanes(), {"num_lanes": 2, "num_epochs": None}),
    "batches": (lambda _: sources.HostBatches(Counting(SIZE, 0, SIZE)), {"global_batch_size": None}),
    "plain batches": (
        lambda _: sources.HostBatches([numbers(SIZE, first) for first in range(0, RECORDS, SIZE)]),
        {"global_batch_size": None},
    ),
}


def make_feed(kind: str, folder: pathlib.Path) -> meshfeed.Feed:
    make_source, options = KINDS[kind]
    return meshfeed.Feed(make_source(folder), mesh(), **{"global_batch_size": SIZE, "prefetch": 0, **options})


def rows_of(batch: Any) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(batch))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a JSON value, at every depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def inside(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def damaged(state: Any) -> Iterator[tuple[str, Any]]:
    """What was done, and the damaged state."""
    for path in places(state):
        old = inside(state, path)
        changes = [("delete", None), *((f"= {wrong!r:.20}", wrong) for wrong in WRONG)]
        if type(old) is int:
            changes += [(f"= {near}", near) for near in (old - 1, old + 1, float(old), str(old))]
        if isinstance(old, list | dict):
            changes += [
                ("wrapped", [old]),
                *([("repeated", old * 2), ("reversed", old[::-1])] if isinstance(old, list) else []),
            ]
        for what, wrong in changes:
            if type(wrong) is type(old) and wrong == old:
                continue
            changed = copy.deepcopy(state)
            holder = inside(changed, path[:-1])
            if what == "delete":
                del holder[path[-1]]
            else:
                holder[path[-1]] = copy.deepcopy(wrong)
            yield f"{'.'.join(map(str, path))} {what}", changed
            # Only other types: a number with a digest of its own is no damage, but another state.
            names_entry = len(path) == 3 and path[0] in ("lanes", "hosts")
            if names_entry and path[2] not in ("digest", "state", "iterator") and type(wrong) is not type(old):
                entry = dict(changed[path[0]][path[1]])
                entry.pop("digest")
                changed[path[0]][path[1]] = seal(entry)
                yield f"{'.'.join(map(str, path))} {what}, sealed", changed


def check(feed: meshfeed.Feed, good: Any, state: Any, stream: dict[int, bytes], what: str) -> bool:
    """Sets a state; whether it was accepted."""
    try:
        feed.set_state(state)
    except meshfeed.StateMismatchError:
        assert feed.get_state() == good, f"{what}: refused, but the feed has moved"
        return False
    step, position = feed.step, feed.position
    assert json.loads(json.dumps(feed.get_state(), allow_nan=False)), what
    try:
        batch = rows_of(next(feed))
    except StopIteration:
        batch = b""
    except meshfeed.SourceError:  # so many bad records that the feed gives up
        assert what.startswith("num_"), what
        feed.set_state(good)
        return True
    if batch and (step, position) in stream:  # not a state of other batch sizes, at a position between these
        assert batch == stream[step, position], f"{what}: accepted, but the stream continues differently"
        assert feed.step == step + 1, what
    assert batch or position not in [place for _, place in stream], f"{what}: accepted, but the stream ends"
    feed.set_state(good)
    return True


def stream_of(kind: str, folder: pathlib.Path) -> dict[Any, bytes]:
    found = {}
    with make_feed(kind, folder) as feed:
        for _ in range(12):
            place = feed.step, feed.position
            try:
                found[place] = rows_of(next(feed))
            except StopIteration:
                break
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("shards")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_state_is_refused_or_continues_the_stream(kind: str, folder: pathlib.Path) -> None:
    stream, failures, accepted, total = stream_of(kind, folder), [], [], 0
    with make_feed(kind, folder) as feed:
        for _ in range(3):
            next(feed)
        good = feed.get_state()
        every = list(damaged(good))
        if len(every) > 700:  # of a mixture: names and identities of its components
            every = [one for number, one in enumerate(every) if number % 3 == 0 or "stages" in one[0]]
        for what, state in every:
            total += 1
            try:
                if check(feed, good, state, stream, what):
                    accepted.append(what)
            except Exception as error:
                failures.append(f"{what}: {type(error).__name__}: {error}"[:300])
                feed.set_state(good)
            for others in ([state], [good, state]):
                try:
                    meshfeed.merge_states(others)
                except meshfeed.StateMismatchError:
                    pass
                except Exception as error:
                    failures.append(f"merge {what}: {type(error).__name__}: {error}"[:300])
        assert feed.get_state() == good
        assert rows_of(next(feed)) == list(stream.values())[3]
    assert not failures, f"{len(failures)} of {total}:\n" + "\n".join(failures)
    assert total > 200
    assert len(accepted) < total / 10, accepted


@pytest.mark.parametrize("wrong", [*WRONG, 1, lambda: 1, {"kind": "lanes"}])
def test_what_is_no_state_and_no_step_is_named(wrong: Any) -> None:
    with pytest.raises(meshfeed.StateMismatchError, match="state"):
        meshfeed.merge_states(wrong)
    with meshfeed.Feed(numbers(), mesh(), global_batch_size=SIZE) as feed:
        with pytest.raises(meshfeed.StateMismatchError):
            feed.set_state(wrong)
        if type(wrong) is not int:
            for read_again in (feed.replay, feed.record_ids):
                with pytest.raises(meshfeed.SettingsError, match="takes an int of at least 0"):
                    read_again(wrong)
