"""A feed has one caller at a time: a call during another one raises, and neither loses nor repeats a batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import meshfeed


class Gate:
    """Two batches; the second one waits until the gate is open."""

    def __init__(self) -> None:
        self.waits, self.opened = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 16

    def fingerprint(self) -> str:  # instead of records, which the feed would read when it is made
        return "gate"

    def __getitem__(self, record_id: int) -> dict[str, Any]:
        if record_id >= 8:
            self.waits.set()
            assert self.opened.wait(60)
        return {"id": np.int32(record_id)}


class Batches:
    """The same records as host batches, with a state."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.at = gate, 0

    def __iter__(self) -> Any:
        return Batches(self.gate)

    def __next__(self) -> dict[str, Any]:
        if self.at == 16:
            raise StopIteration
        self.at += 8
        return {"id": np.array([self.gate[number]["id"] for number in range(self.at - 8, self.at)])}

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        self.at = state


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def make_feed(gate: Gate, **options: Any) -> Any:
    return meshfeed.Feed(gate, mesh(), global_batch_size=8, **options)


def make_maxtext(gate: Gate) -> Any:
    return meshfeed.maxtext.MultiHostDataLoadIterator(Batches(gate), mesh())


FEEDS: dict[str, Callable[[Gate], Any]] = {
    "read ahead": make_feed,
    "no read ahead": lambda gate: make_feed(gate, prefetch=0),
    "maxtext": make_maxtext,
}


@pytest.fixture(params=FEEDS)
def waiting(request: pytest.FixtureRequest) -> Any:
    """A feed, the gate of its second batch, a thread that waits for that batch, and what the thread gets."""
    gate, got = Gate(), []
    feed = FEEDS[request.param](gate)
    assert np.asarray(next(feed)["id"]).tolist() == list(range(8))

    def take() -> None:
        try:
            got.append(next(feed))
        except meshfeed.MeshfeedError as error:
            got.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    assert gate.waits.wait(60)
    while not feed_of(feed)._turn and thread.is_alive():  # a read-ahead waits at the gate before the thread does
        time.sleep(0.01)
    yield feed, gate, thread, got
    gate.opened.set()
    thread.join()
    feed.close()


def feed_of(feed: Any) -> Any:
    return getattr(feed, "_feed", feed)


@pytest.mark.parametrize("call", ["next", "set_state", "reset"])
def test_a_call_during_next_raises_and_changes_nothing(waiting: Any, call: str) -> None:
    feed, gate, thread, got = waiting
    state = feed.get_state()  # legal at any moment
    assert state["position"] == 8
    calls: dict[str, Callable[[], Any]] = {
        "next": lambda: next(feed),
        "set_state": lambda: feed.set_state(state),
        "reset": feed.reset,
    }
    with pytest.raises(meshfeed.MeshfeedError, match="while another such call was running"):
        calls[call]()
    gate.opened.set()
    thread.join()
    assert np.asarray(got[0]["id"]).tolist() == list(range(8, 16))
    assert feed.position == 16
    feed.set_state(state)
    assert np.asarray(next(feed)["id"]).tolist() == list(range(8, 16))


def test_close_during_next_is_legal(waiting: Any) -> None:
    feed, gate, thread, got = waiting
    closing = threading.Thread(target=feed.close)  # with prefetch=0 it waits for the read
    closing.start()
    gate.opened.set()
    closing.join(60)
    thread.join(60)
    assert not closing.is_alive()
    assert not thread.is_alive()
    assert len(got) == 1  # the batch, or that the feed is closed
    with pytest.raises(meshfeed.MeshfeedError, match="closed"):
        next(feed)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"load": "once"}])
def test_two_threads_lose_and_repeat_no_batch(options: dict[str, Any]) -> None:
    feed = meshfeed.Feed({"id": np.arange(8 * 300)}, mesh(), global_batch_size=8, **options)
    seen: list[int] = []

    def take() -> None:
        while True:
            try:
                batch = next(feed)
            except StopIteration:
                return
            except meshfeed.MeshfeedError:  # another thread is in next
                continue
            seen.append(int(np.asarray(batch["id"])[0]))

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(0, 8 * 300, 8))


def test_next_below_an_interrupted_next_raises_instead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with meshfeed.Feed({"id": np.arange(16)}, mesh(), global_batch_size=8) as feed:
        next(feed)
        pop, errors = feed._pipeline.pop, []

        def handler(ready: Any) -> None:  # what a signal handler may do at any call
            try:
                next(feed)
            except meshfeed.MeshfeedError as error:
                errors.append(str(error))
            pop(ready)

        monkeypatch.setattr(feed._pipeline, "pop", handler)
        assert np.asarray(next(feed)["id"]).tolist() == list(range(8, 16))
        assert len(errors) == 1
        assert "signal handler" in errors[0]
        with pytest.raises(StopIteration):
            next(feed)
