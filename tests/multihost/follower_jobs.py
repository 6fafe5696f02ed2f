"""Streams over the devices of some hosts, whose batches the other hosts get too, without rows."""

from __future__ import annotations

import json
import time
from typing import Any

import jax
import numpy as np
import stream_jobs
from jax.sharding import AxisType, Mesh

import meshfeed


def mesh_of(hosts: list[int]) -> Mesh:
    """Rows over the devices of some hosts."""
    devices = [device for device in jax.devices() if device.process_index in hosts]
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def run(hosts: list[int], case: dict[str, Any]) -> dict[str, Any]:
    """Reads in turns, from a state, after a reset and to the end; (step, position) after each batch."""
    options = dict(case)
    lengths, size, end = options.pop("lengths"), options["global_batch_size"], options["end"]
    expected = stream_jobs.expected_batches(lengths, size, end, options.get("num_epochs", 1))
    real = np.cumsum([sum(row is not None for row in batch) for batch in expected])

    def feed_of() -> meshfeed.Feed:
        return meshfeed.Feed(
            stream_jobs.source(lengths),
            mesh_of(hosts),
            num_lanes=len(lengths),
            mask_key="mask" if end == "pad" else None,
            timeout_seconds=30,
            **options,
        )

    def take(feed: meshfeed.Feed, first: int, stop: int) -> None:
        for step in range(first, stop):
            stream_jobs.check(next(feed), expected[step], masked=end == "pad")
            assert (feed.step, feed.position) == (step + 1, int(real[step])), (feed.step, feed.position, step)

    with feed_of() as feed:
        take(feed, 0, 3)
        state = json.dumps(feed.get_state())
        feed.reset()
        take(feed, 0, len(expected))
        assert next(feed, None) is None
        assert next(feed, None) is None
        spec = str(feed.element_spec)
    return {"state": state, "spec": spec, "steps": feed.step}


def resume(hosts: list[int], case: dict[str, Any], states: list[str]) -> int:
    """Continues from the states of all hosts, on other hosts."""
    options = dict(case)
    lengths, size, end = options.pop("lengths"), options["global_batch_size"], options["end"]
    expected = stream_jobs.expected_batches(lengths, size, end, options.get("num_epochs", 1))
    masked = end == "pad"
    with meshfeed.Feed(
        stream_jobs.source(lengths), mesh_of(hosts), mask_key="mask" if masked else None, timeout_seconds=30, **options
    ) as feed:
        feed.set_state(meshfeed.merge_states([json.loads(text) for text in states]))
        for step, batch in enumerate(feed, 3):
            stream_jobs.check(batch, expected[step], masked=masked)
        assert feed.step == len(expected)
        return feed.position


def late(hosts: list[int]) -> int:
    """The host outside comes when the others have ended, closed their feed, and begun another generation."""
    lengths = [9, 9, 9, 9]
    outside = jax.process_index() not in hosts
    if outside:
        time.sleep(3)
    with meshfeed.Feed(stream_jobs.source(lengths), mesh_of(hosts), global_batch_size=8, num_lanes=4) as feed:
        steps = sum(1 for _ in feed)
        feed.reset()
        return 10 * steps + sum(1 for _ in feed)


def failing(hosts: list[int]) -> str:
    """One host's stream fails; all others, and the host outside, name it."""

    def open_lane(lane_index: int, num_lanes: int) -> Any:
        for number in range(20):
            if lane_index == 1 and number == 7:
                raise RuntimeError("no more")
            yield {"x": np.int32(number)}

    steps = 0
    try:
        with meshfeed.Feed(
            meshfeed.sources.Stream(open_lane), mesh_of(hosts), global_batch_size=8, num_lanes=4, timeout_seconds=30
        ) as feed:
            for _ in feed:
                steps += 1
    except Exception as error:
        return f"{steps} {type(error).__name__} {getattr(error, 'host', '')}"
    return f"{steps} no error"


def absent(hosts: list[int]) -> str:
    """The hosts of the sharding have no such feed."""
    if jax.process_index() in hosts:
        return ""
    with meshfeed.Feed(
        stream_jobs.source([9, 9]), mesh_of(hosts), global_batch_size=8, num_lanes=2, name="absent", timeout_seconds=2
    ) as feed:
        try:
            next(feed)
        except meshfeed.StalledError as error:
            return str(error)
    return "no error"


def refused(hosts: list[int], kind: str) -> str:
    """What a host outside cannot follow."""
    source = stream_jobs.source([9, 9]) if kind == "one host" else [{"x": np.zeros((2, 2), np.float32)}] * 3
    if kind == "host batches":
        source = meshfeed.sources.HostBatches(source)
    try:
        with meshfeed.Feed(source, mesh_of(hosts), global_batch_size=len(hosts) * 2, timeout_seconds=30) as feed:
            return str(sum(1 for _ in feed))
    except meshfeed.SettingsError as error:
        return str(error)


def checkpointed(hosts: list[int], folder: str) -> list[int]:
    """The README's loop on all hosts of the job, interrupted and continued."""
    from jax.sharding import NamedSharding, PartitionSpec

    everywhere = mesh_of(list(range(jax.process_count())))
    replicated = NamedSharding(everywhere, PartitionSpec())
    state = {"w": jax.make_array_from_callback((4,), replicated, lambda index: np.zeros(4, np.float32)[index])}
    steps = []
    for _ in range(2):
        with (
            meshfeed.Feed(
                stream_jobs.source([9, 9, 9, 9]), mesh_of(hosts), global_batch_size=8, num_lanes=4, timeout_seconds=30
            ) as feed,
            meshfeed.checkpoint.Checkpointer(folder, save_interval_steps=2, save_last=False) as checkpoints,
        ):
            step, state = checkpoints.restore(state, feed)
            steps.append(feed.step)
            for _ in range(3 if not step else 10):
                if next(feed, None) is None:
                    break
                step += 1
                checkpoints.save(step, state, feed)
            steps.append(feed.step)
    return steps
