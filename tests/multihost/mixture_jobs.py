"""What the hosts of tests/multihost/test_mixture.py run."""

from __future__ import annotations

import json
import time
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


def make_source(kind: str, weights: Any = WEIGHTS) -> Any:
    """A mixture that is read at random, or one with streams."""

    def memory(number: int, size: int) -> Memory:
        return Memory({"component": np.full(size, number, np.int32), "value": np.arange(size, dtype=np.int32)})

    def stream(number: int, size: int) -> Stream:
        return Stream(lambda lane, lanes: Counter(number, range(lane, size, lanes)), fingerprint={"size": size})

    makers = {"random": (memory, memory, memory), "lanes": (stream, memory, stream)}[kind]
    sources = {name: make(i, size) for i, (make, (name, size)) in enumerate(zip(makers, SIZES.items(), strict=True))}
    return Mixture(sources, weights, block=27)


def make_feed(kind: str, weights: Any = WEIGHTS, **kwargs: Any) -> Any:
    """A feed over all devices of the job."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    extra: dict[str, Any] = {"shuffle": True} if kind == "random" else {"num_lanes": 12}
    settings = {"global_batch_size": BATCH, "seed": 3, "num_epochs": None, "timeout_seconds": 60, **extra, **kwargs}
    return meshfeed.MultiHostDataLoadIterator(make_source(kind, weights), mesh, **settings)


def run_some(kind: str, state: str | None, expected: list[Any]) -> str:
    """Restores, compares batches with ``expected`` shard by shard, and gives the state."""
    with make_feed(kind) as feed:
        if state is not None:
            feed.set_state(json.loads(state))
        for wanted in expected:
            check_rows(next(feed), wanted)
        return json.dumps(feed.get_state())


def check_rows(batch: Any, wanted: list[Any]) -> None:
    """Compares what this host holds of a batch."""
    for name, rows in zip(("component", "value"), np.array(wanted).T, strict=True):
        for shard in batch[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), rows[shard.index[0]])


def set_weights_in_run(kind: str, expected: list[Any], late_host: int) -> str:
    """Makes the stages of ``WEIGHTS`` by calls, one host later than the others; the state with one to come."""
    with make_feed(kind, WEIGHTS[0][1]) as feed:
        feed.start()
        for wanted in expected:
            if feed.step == 2:
                feed.set_weights({"books": 1}, from_step=8)
            if feed.step == 4:
                if jax.process_index() == late_host:
                    time.sleep(0.5)
                feed.set_weights(WEIGHTS[1][1])
            if feed.step == 6:
                feed.set_weights(WEIGHTS[2][1], from_step=11)
            check_rows(next(feed), wanted)
        return json.dumps(feed.get_state())


def resume_with_first_weights(kind: str, state: str, expected: list[Any]) -> int:
    """Continues a state of :func:`set_weights_in_run` in a feed that has only the first stage."""
    with make_feed(kind, WEIGHTS[0][1]) as feed:
        feed.set_state(json.loads(state))
        feed.start()
        for wanted in expected:
            check_rows(next(feed), wanted)
        return feed.step


def set_weights_unlike(how: str) -> dict[str, Any]:
    """Hosts that set different weights, or some of which set none; what each raised, and how long it took."""
    host = jax.process_index()
    with make_feed("random", WEIGHTS[0][1], timeout_seconds=30) as feed:
        for _ in range(3):
            next(feed)
        begin = time.monotonic()
        try:
            if how == "weights":
                feed.set_weights({"web": 1 + host, "code": 1})
            elif how == "steps":
                feed.set_weights({"web": 1}, from_step=5 + host)
            elif how == "wrong" and host == 1:
                feed.set_weights({"wiki": 1})
            elif how != "one" or host == 1:
                feed.set_weights({"web": 1})
            for _ in range(200):
                next(feed)
            raise AssertionError("no error")
        except meshfeed.MeshfeedError as error:
            return {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}


def start_in_every_way(kind: str, expected: list[Any]) -> list[int]:
    """Starts before and after what begins a new generation; the batches seen in each way."""
    seen = []
    for way in ("start", "start on one host", "start, reset", "start, state", "start, state, start", "start, close"):
        with make_feed(kind) as feed:
            if way != "start on one host" or jax.process_index() == 1:
                feed.start()
            state = feed.get_state()
            if jax.process_index() == 0:
                time.sleep(0.05)  # hosts are at different points of the startup
            if "reset" in way:
                feed.reset()
            if "state" in way:
                feed.set_state(state)
            if way.endswith("state, start"):
                feed.start()
            if "close" not in way:
                for wanted in expected:
                    check_rows(next(feed), wanted)
            seen.append(feed.step)
    return seen


def start_unlike(how: str) -> str:
    """One host starts, and then leaves or differs; what the other raised."""
    host = jax.process_index()
    feed = make_feed("random", seed=host if how == "differ" else 3, timeout_seconds=30)
    feed.start()
    try:
        if how == "close" and host == 1:
            feed.close()
            return "closed"
        if how == "reset" and host == 1:
            feed.reset()
            time.sleep(5)  # the other host has raised, and leaves
        next(feed)
        return "no error"
    except meshfeed.MeshfeedError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        feed.close()


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
