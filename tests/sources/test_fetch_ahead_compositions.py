"""Fetching ahead through mixtures, packing, buckets and views: every file is sent once, before a read needs it."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from http_store import Store
from jax.sharding import AxisType
from token_files import write_megatron

import meshfeed
from meshfeed import ShardCache
from meshfeed.sources import Buckets, Concat, Map, Mixture, Packed, Padded, Sample, Subset, Tokens, Zip

FILES, PER_FILE, LANES, BATCH = 8, 6, 2, 4  # files of each part

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A server with the parts "a" and "b", token files with an index."""
    store, folder, rng = Store(), tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for part in "ab":
        for number in range(FILES):
            stem = folder / f"{part}{number:02}"
            lengths = rng.integers(1, 13, PER_FILE).tolist()
            write_megatron(stem, [[rng.integers(1, 1000, length).astype(np.uint16)] for length in lengths])
            for path in (stem.with_suffix(".bin"), stem.with_suffix(".idx")):
                store.put(path.name, path.read_bytes())
    yield store
    store.shutdown()


class Parts:
    """Documents of a part, through one cache."""

    def __init__(self, store: Store, cache: ShardCache) -> None:
        self._store, self._cache = store, cache

    def __call__(self, part: str) -> Any:
        return Tokens.documents([self._store.url(f"{part}{n:02}.bin") for n in range(FILES)], cache=self._cache)

    def mixed(self, over: Callable[[Any], Any] = lambda documents: documents) -> Any:
        nested = Concat([Subset(self("b"), slice(0, 20)), Subset(self("b"), slice(20, None, 2))])
        return Mixture({"a": over(self("a")), "b": over(nested)}, {"a": 2, "b": 1}, 12)


SOURCES: dict[str, Callable[[Parts], Any]] = {
    "mixture of views": lambda parts: Padded(parts.mixed(), 12),
    "packed mixture": lambda parts: Packed(parts.mixed(), 16),
    "packed views": lambda parts: Packed(Concat([Subset(parts("a"), slice(0, None, 3)), parts("b")]), 16, method="fit"),
    "mixture of packed": lambda parts: parts.mixed(lambda documents: Packed(Sample(documents, 90), 16, block=20)),
    "map of a view of packed": lambda parts: Map(Subset(Packed(parts("a"), 16, block=9), slice(2, None)), dict),
    "buckets of a mixture": lambda parts: Buckets(parts.mixed(), (4, 12)),
    "zip": lambda parts: Zip({"a": Padded(parts("a"), 12), "b": Padded(Subset(parts("b"), slice(None, None, -1)), 12)}),
}
ORDERS: dict[str, Any] = {
    "shards": "shards",
    "affinity": meshfeed.ShardShuffle(affinity=True),
    "uniform": True,
    "in order": False,
}


def feed_of(source: Any, shuffle: Any) -> Any:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    lanes = LANES if shuffle not in (True, False) else None
    settings = {"global_batch_size": BATCH, "num_epochs": 2, "end": "pad", "seed": 3, "prefetch": 0}
    return meshfeed.Feed(source, mesh, shuffle=shuffle, num_lanes=lanes, **settings)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def files_of(feed: Any, step: int) -> list[Any]:
    """The files of a step."""
    return feed._stream.source.cached_files(feed.record_ids(step))


@pytest.mark.parametrize(
    ("name", "order"),
    [*((name, "shards") for name in SOURCES), *(("packed mixture", order) for order in ORDERS if order != "shards")],
)
def test_each_file_is_sent_once_before_the_read_that_needs_it(
    served: Store, name: str, order: str, tmp_path: pathlib.Path
) -> None:
    with feed_of(SOURCES[name](Parts(served, ShardCache(tmp_path / "first"))), ORDERS[order]) as feed:
        half = len(feed) // 2
        for _ in range(half):
            next(feed)
        state = json.loads(json.dumps(feed.get_state()))
    for first in (0, half):  # from the beginning, and after a resume, with an empty cache each
        cache = ShardCache(tmp_path / str(first))
        with feed_of(SOURCES[name](Parts(served, cache)), ORDERS[order]) as feed:
            if first:
                feed.set_state(state)
            needed = [files_of(feed, step) for step in range(first, len(feed))]
            del served.requests[:]
            # The records that identify a Map have brought a few files.
            missing = {file for file in set().union(*needed) if not file.is_here()}
            before = cache.stats().misses
            for _ in range(2):  # fetching ahead begins with the second batch
                next(feed)
            waited = cache.stats().misses
            for step in range(first + 2, len(feed)):
                files = needed[step - first]
                until(lambda files=files: all(file.is_here() for file in files), f"the files of step {step}")
                next(feed)
            assert cache.stats().misses == waited <= before + len({*needed[0], *needed[1]}), "a read waited for a file"
        sent = [(path, num_bytes) for path, _, num_bytes in served.requests if path.endswith(".bin")]
        assert sorted(sent) == sorted((f.url.rsplit("/", 1)[1], f.num_bytes) for f in missing)
