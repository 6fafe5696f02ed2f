"""What the hosts of tests/multihost/test_mixture.py run."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed
from meshfeed.sources import Memory, Mixture, Stream, TensorStore

SIZES = {"web": 157, "code": 64, "books": 29}
WEIGHTS = [(0, {"web": 5, "code": 3, "books": 1}), (4, {"code": 2, "books": 1}), (11, {"web": 1, "books": 1})]
BATCH = 24


class Counter:
    """Records of one lane, with a state that is a tuple."""

    def __init__(self, number: int, values: range) -> None:
        self.number, self.values, self.next = number, values, 0

    def __next__(self) -> dict[str, Any]:
        if self.next >= len(self.values):
            raise StopIteration
        self.next += 1
        return {"component": np.int32(self.number), "value": np.int32(self.values[self.next - 1])}

    def __iter__(self) -> Counter:
        return self

    def get_state(self) -> tuple[int]:
        return (self.next,)

    def set_state(self, state: tuple[int]) -> None:
        (self.next,) = state


def make_source(kind: str) -> Any:
    """A mixture that is read at random, or one with streams."""

    def memory(number: int, size: int) -> Memory:
        return Memory({"component": np.full(size, number, np.int32), "value": np.arange(size, dtype=np.int32)})

    def stream(number: int, size: int) -> Stream:
        return Stream(lambda lane, lanes: Counter(number, range(lane, size, lanes)), fingerprint={"size": size})

    makers = {"random": (memory, memory, memory), "lanes": (stream, memory, stream)}[kind]
    sources = {name: make(i, size) for i, (make, (name, size)) in enumerate(zip(makers, SIZES.items(), strict=True))}
    return Mixture(sources, WEIGHTS, block=27)


def make_feed(kind: str, **kwargs: Any) -> Any:
    """A feed over all devices of the job."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    extra: dict[str, Any] = {"shuffle": True} if kind == "random" else {"num_lanes": 12}
    settings = {"global_batch_size": BATCH, "seed": 3, "num_epochs": None, "timeout_seconds": 60, **extra, **kwargs}
    return meshfeed.MultiHostDataLoadIterator(make_source(kind), mesh, **settings)


def run_some(kind: str, state: str | None, expected: list[Any]) -> str:
    """Restores, compares batches with ``expected`` shard by shard, and gives the state."""
    with make_feed(kind) as feed:
        if state is not None:
            feed.set_state(json.loads(state))
        for wanted in expected:
            batch = next(feed)
            for name, rows in zip(("component", "value"), np.array(wanted).T, strict=True):
                for shard in batch[name].addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), rows[shard.index[0]])
        return json.dumps(feed.get_state())


def bytes_of_columns(path: str, axes: tuple[str | None, str | None]) -> int:
    """Bytes that this host read from storage for one epoch; every batch is checked against the whole array."""
    import tensorstore as ts

    def counted() -> int:
        metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(value["value"] for metric in metrics for value in metric["values"])

    mesh = jax.make_mesh((1, jax.device_count()), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    source = TensorStore({"x": path}, cache_bytes=0)
    whole = source.read_batch(np.arange(len(source)))["x"]
    before = counted()
    with meshfeed.MultiHostDataLoadIterator(
        source, NamedSharding(mesh, P(*axes)), global_batch_size=16, timeout_seconds=60
    ) as feed:
        for step, batch in enumerate(feed):
            rows = whole[feed.record_ids(step)]
            for shard in batch["x"].addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), rows[shard.index])
        assert feed.position == len(source)
    return counted() - before
