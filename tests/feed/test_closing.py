"""Closing a feed while a worker process is busy: the read ends with the process, and nobody waits for it."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.reading import workers


def test_a_step_that_waits_is_told_how_to_go_on_when_another_thread_closes() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    feed = meshfeed.Feed(Hangs(after=16), mesh, global_batch_size=8, name="mine")
    next(feed)
    next(feed)
    threading.Timer(0.2, feed.close).start()
    for _ in range(2):
        with pytest.raises(meshfeed.MeshfeedError, match=r"^mine is closed\. To continue, pass its get_state\(\)"):
            next(feed)


class Hangs:
    """Records whose reads hang."""

    def __init__(self, after: int = 0) -> None:
        self._after = after

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> Any:
        if record_id >= self._after:
            threading.Event().wait()
        return {"x": np.int32(record_id)}

    def fingerprint(self) -> str:
        return "hangs"


class HangsWhenLoaded(Hangs):
    """Cannot be loaded in another process."""

    def __reduce__(self) -> Any:
        return hang, ()


def hang() -> None:
    threading.Event().wait()


def lane(lane_index: int, num_lanes: int) -> Iterator[Any]:
    yield {"x": np.float32(lane_index)}
    yield {"x": np.float32(lane_index + 1)}
    hang()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a read", "the setting-up", "a lane"])
def test_a_busy_worker_does_not_delay_it(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, no_thread_is_left: None
) -> None:
    waiting = threading.Event()
    result = workers.WorkerPool.result

    def noted(self: Any, *arguments: Any) -> Any:
        waiting.set()
        return result(self, *arguments)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    options: dict[str, Any] = {"global_batch_size": 8, "num_workers": 2}
    if kind == "a lane":
        feed = meshfeed.Feed(meshfeed.sources.Stream(lane), mesh, num_lanes=8, **options)
        next(feed)
    else:
        feed = meshfeed.Feed(HangsWhenLoaded() if kind == "the setting-up" else Hangs(), mesh, **options)
    monkeypatch.setattr(workers.WorkerPool, "result", noted)
    feed.start()
    assert kind == "a lane" or waiting.wait(60)
    time.sleep(1)  # for the worker to begin
    with caplog.at_level(logging.WARNING, "meshfeed"):
        feed.close()
    assert not caplog.messages


def test_an_error_without_a_text_does_not_keep_a_feed_open() -> None:
    class NoText(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class FailsWithoutText(Hangs):
        def __getitem__(self, record_id: int) -> Any:
            raise NoText

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    feed = meshfeed.Feed(
        FailsWithoutText(), mesh, global_batch_size=8, retry=meshfeed.Retry(attempts=2, initial_seconds=0)
    )
    with pytest.raises(NoText):
        next(feed)
    feed.close()


class Fails(Hangs):
    def __getitem__(self, record_id: int) -> Any:
        if record_id >= 16:
            raise ValueError("bad")
        return {"x": np.int32(record_id)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_feed_that_a_function_made_and_that_failed_is_dropped(num_workers: int) -> None:
    feeds: list[weakref.ref[meshfeed.Feed]] = []
    feed_name = f"dropped-{num_workers}"

    def train() -> None:  # a local variable of a frame of the error's traceback is the feed
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        feed = meshfeed.Feed(Fails(), mesh, global_batch_size=8, num_workers=num_workers, name=feed_name)
        feeds.append(weakref.ref(feed))
        for _ in feed:
            pass

    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            train()
    gc.collect()
    assert [feed() for feed in feeds] == [None, None]
    assert not [thread for thread in threading.enumerate() if feed_name in thread.name]
