"""Packing and buckets by shards: few files at a time, and each file for about one lane."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed.sources import Buckets, Map, Mixture, Packed, Subset, Zip
from meshfeed.testing import check_resumable

FILES, PER_FILE, LANES, BATCH = 64, 50, 4, 8


class Documents:
    """Documents of 1 to 32 tokens in files; a file is its number."""

    def __init__(self, files: int = FILES, first_file: int = 0) -> None:
        self._files, self._first = files, first_file
        self._lengths = np.random.default_rng(first_file).integers(1, 33, files * PER_FILE)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, record_id: int) -> dict[str, np.ndarray]:
        first = 100 * (self._first * PER_FILE + record_id) + 1
        return {"tokens": np.arange(first, first + self._lengths[record_id], dtype=np.int32)}

    def lengths(self) -> np.ndarray:
        return self._lengths

    def shard_lengths(self) -> np.ndarray:
        return np.full(self._files, PER_FILE)

    def cached_files(self, record_ids: np.ndarray) -> list[int]:
        return [self._first + number for number in np.unique(np.asarray(record_ids) // PER_FILE).tolist()]

    def fingerprint(self) -> Any:
        return {"documents": [self._first, self._files]}


def packed(method: str) -> Any:
    return Packed(Documents(), 64, method=method)


def packed_mixture() -> Any:
    return Packed(Mixture({"a": Documents(), "b": Documents(16, FILES)}, {"a": 4, "b": 1}, 50), 64)


def mixture_of_packed() -> Any:
    sources = {"a": Packed(Documents(), 64, block=100), "b": Packed(Documents(16, FILES), 64, block=100)}
    return Mixture(sources, {"a": 4, "b": 1}, 50)


SOURCES: dict[str, tuple[Callable[[], Any], int]] = {  # and the number of files
    "split": (lambda: packed("split"), FILES),
    "fit": (lambda: packed("fit"), FILES),
    "view": (lambda: Packed(Map(Subset(Documents(), slice(0, None, 2)), dict), 64), FILES),
    "mixture": (packed_mixture, FILES + 16),
    "mixture of packed": (mixture_of_packed, FILES + 16),
    "buckets": (lambda: Buckets(Documents(), (8, 16, 32)), FILES),
}


def feed_of(source: Any, **settings: Any) -> Any:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    settings = {
        "global_batch_size": BATCH,
        "num_lanes": LANES,
        "shuffle": "shards",
        "seed": 3,
        "end": "pad",
        **settings,
    }
    return meshfeed.Feed(source, mesh, prefetch=0, **settings)


def files_of_lanes(source: Any, num_epochs: int = 1, **settings: Any) -> list[list[list[int]]]:
    """The files that each step of each lane needs."""
    with feed_of(source, num_epochs=num_epochs, end="drop", **settings) as feed:
        stream = feed._stream
        found: list[list[list[int]]] = [[] for _ in range(LANES)]
        for step in range(len(feed)):
            ids = feed.record_ids(step)
            for lane, rows in enumerate(np.array_split(ids, LANES)):
                found[lane].append(stream.source.cached_files(rows))
    return found


def downloads(steps: list[list[int]], capacity: int) -> int:
    """How many files a cache fetches that evicts the one whose next use is farthest."""
    uses: dict[int, list[int]] = {}
    for step, files in enumerate(steps):
        for file in files:
            uses.setdefault(file, []).append(step)
    held: set[int] = set()
    count = 0
    for step, files in enumerate(steps):
        for file in files:
            if file in held:
                continue
            count += 1
            if len(held) >= capacity:
                held.remove(max(held, key=lambda f: next((use for use in uses[f] if use >= step), math.inf)))
            held.add(file)
    return count


AT_BORDERS = (LANES - 1) * 2  # files of the windows at the borders of lanes, which two lanes need


@pytest.mark.parametrize(
    ("name", "capacity", "most"),  # files of a small cache per lane, and downloads of all lanes
    [
        ("split", 4, FILES + AT_BORDERS),
        ("fit", 4, FILES + AT_BORDERS),
        ("view", 4, FILES + AT_BORDERS),
        ("mixture", 8, 1.5 * (FILES + 16)),  # a window begins and ends within files of each component
        ("mixture of packed", 8, 1.25 * (FILES + 16)),
        ("buckets", 6, 1.3 * FILES),
    ],
)
def test_a_small_cache_downloads_each_file_about_once(name: str, capacity: int, most: float) -> None:
    make, files = SOURCES[name]
    lanes = files_of_lanes(make())
    assert {file for lane in lanes for step in lane for file in step} == set(range(files))
    assert sum(downloads(lane, capacity) for lane in lanes) <= most
    shuffled = files_of_lanes(make(), shuffle=True, num_lanes=None)
    assert sum(downloads(lane, capacity) for lane in shuffled) > 3 * files  # what it is for


@pytest.mark.parametrize("name", ["split", "fit", "mixture", "buckets"])
def test_with_affinity_a_lane_reads_its_files_again(name: str) -> None:
    make, files = SOURCES[name]
    lanes = files_of_lanes(make(), 2, shuffle=meshfeed.ShardShuffle(affinity=True))
    half = len(lanes[0]) // 2
    for lane in lanes:
        first, second = ({file for step in part for file in step} for part in (lane[: half - 2], lane[half + 2 :]))
        assert len(second - first) <= 2  # a cut may move by a record between epochs
        assert lane[:20] != lane[half : half + 20]  # in another order
    assert sum(len({file for step in lane for file in step}) for lane in lanes) <= 1.5 * files


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_resumes_exactly_by_shards(name: str) -> None:
    make, _ = SOURCES[name]
    source = make()
    check_resumable(lambda: feed_of(source, num_epochs=1, global_batch_size=128), max_steps=8)


def test_windows_of_documents_are_permuted_differently_per_epoch() -> None:
    with feed_of(packed("fit"), num_epochs=2, global_batch_size=64) as feed:
        epochs = np.array_split(np.concatenate([np.asarray(batch["tokens"]) for batch in feed]), 2)
    first, second = ({tuple(row) for row in part.tolist()} for part in epochs)
    assert len(first & second) < len(first) / 4


class Numbers:
    """``size`` numbers in files of ``per_file``."""

    def __init__(self, first: int, per_file: int, size: int = 32) -> None:
        self._first, self._per_file, self._size = first, per_file, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, record_id: int) -> np.ndarray:
        return np.array(self._first + record_id, np.int32)

    def shard_lengths(self) -> np.ndarray:
        return np.full(self._size // self._per_file, self._per_file)

    def fingerprint(self) -> Any:
        return self._first  # of the records, not of the files


@pytest.mark.parametrize("source", ["zip", "files"])
def test_a_mixture_notices_shards_of_other_lengths(source: str) -> None:
    def mixed(other: bool, take: int = 32) -> Any:
        parts = {"a": Numbers(0, 4), "b": Numbers(100, 8)}
        if source == "zip":
            component: Any = Zip(dict(reversed(parts.items()))) if other else Zip(parts)  # the order decides the shards
        else:
            component = Numbers(0, 8 if other else 4)
        return Mixture({"one": component}, {"one": 1}, 8, take={"one": take})

    settings = {"num_lanes": 1, "num_epochs": 1, "global_batch_size": 8}
    with feed_of(mixed(False), **settings) as feed:
        next(feed)
        state = feed.get_state()
        rest = feed.record_ids(1).tolist()
    with feed_of(mixed(True), **settings) as feed:
        with pytest.raises(meshfeed.StateMismatchError, match=r"mixture\.components\.one\.shards.*Zip"):
            feed.set_state(state)
        component = state["fingerprint"]["mixture"]["components"][0]
        assert len(component) == 3
    del component[2]  # as earlier versions saved it
    with feed_of(mixed(False), **settings) as feed:
        feed.set_state(state)
        assert feed.record_ids(1).tolist() == rest
        feed.reset()
        feed.get_state()
        assert len(feed.get_state()["fingerprint"]["mixture"]["components"][0]) == 3
