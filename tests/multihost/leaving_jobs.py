"""What the hosts of tests/multihost/test_leaving.py run: the coordination service after feeds, and forks."""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from feed_jobs import data, mesh_of
from jax.experimental import multihost_utils
from jax.extend.backend import clear_backends

import meshfeed
from meshfeed._src.base import coordination, jax_internals


def make_feed(**options: Any) -> Any:
    settings: dict[str, Any] = {"global_batch_size": 2 * jax.device_count(), "timeout_seconds": 60, **options}
    return meshfeed.MultiHostDataLoadIterator(meshfeed.sources.Memory(data()), mesh_of("rows"), **settings)


def _all_of_it() -> None:
    with make_feed() as feed:
        for _ in feed:
            pass


def _with_resets() -> None:
    with make_feed(num_epochs=None) as feed:
        for _ in range(3):
            state = next(feed) and feed.get_state()
            feed.reset()
            next(feed)
            feed.set_state(state)
        next(feed)


def _never_started() -> None:
    make_feed().close()


def _dropped() -> None:
    feed = make_feed()
    next(feed)
    del feed


def _dropped_after_a_reset() -> None:
    feed = make_feed()
    next(feed)
    feed.reset()
    del feed


def _one_leaves_early() -> None:
    feed = make_feed(num_epochs=None)
    with contextlib.suppress(meshfeed.PeerError):
        for _ in range(5 if jax.process_index() else 10_000):
            next(feed)
    feed.close()


def _one_leaves_before_its_first_batch() -> None:
    with contextlib.suppress(ValueError), make_feed() as feed:
        if jax.process_index():
            raise ValueError("no state to restore")
        try:
            next(feed)
        except meshfeed.PeerError as error:
            assert "host 1 closed its feed at step 0 after ValueError: no state to restore." in str(error)  # noqa: PT017
        else:
            raise AssertionError("host 1 took no batch")


def _one_cannot_make_it(options: dict[str, Any]) -> None:
    try:
        feed = make_feed(**(options if jax.process_index() else {}))
    except (meshfeed.PlanError, meshfeed.SettingsError):
        return
    with contextlib.suppress(meshfeed.PeerError):
        next(feed)
    feed.close()


def _differing() -> None:
    with make_feed(seed=jax.process_index()) as feed, contextlib.suppress(meshfeed.AgreementError):
        next(feed)


def _refused() -> None:
    with make_feed() as feed:
        with contextlib.suppress(meshfeed.StateMismatchError):
            feed.set_state({**feed.get_state(), "position": 3})
        next(feed)


def _maxtext() -> None:
    rows = [{"x": np.ones((jax.local_device_count(), 3), np.float32)}] * (2 * jax.process_index())
    loader = meshfeed.maxtext.MultiHostDataLoadIterator(rows, mesh_of("rows"), generate_padding_batch=True)
    for _ in range(4):
        assert next(loader)["x"].shape == (jax.device_count(), 3)
    loader.close()


def _remote() -> None:
    make = lambda: meshfeed.sources.Memory(data())  # noqa: E731 (travels by value)
    with meshfeed.remote.RemoteFeed(make, mesh_of("rows"), global_batch_size=2 * jax.device_count()) as feed:
        next(feed)


def _checkpoints(directory: str) -> None:
    with make_feed() as feed, meshfeed.checkpoint.Checkpointer(directory) as ckpt:
        next(feed)
        rows = jax.sharding.NamedSharding(mesh_of("rows"), jax.sharding.PartitionSpec("data"))
        x = jax.make_array_from_callback((64,), rows, lambda index: np.arange(64.0)[index])
        ckpt.save(1, {"x": x}, feed, force=True)
        for _ in range(3):
            assert ckpt.restore({"x": x}, feed)[0] == 1


def keys_after(directory: str) -> dict[str, list[str]]:
    """Keys that stay in the coordination service after each way to use and leave a feed on all hosts."""
    store = coordination.key_value_store()
    assert store is not None
    ways: dict[str, Callable[[], None]] = {
        "to the end": _all_of_it,
        "resets and states": _with_resets,
        "never started": _never_started,
        "dropped": _dropped,
        "dropped after a reset": _dropped_after_a_reset,
        "one leaves early": _one_leaves_early,
        "one leaves before its first batch": _one_leaves_before_its_first_batch,
        "one cannot lay it out": lambda: _one_cannot_make_it({"global_batch_size": 2 * jax.device_count() + 1}),
        "one has a wrong setting": lambda: _one_cannot_make_it({"prefetch": -1}),
        "differing seeds": _differing,
        "a refused state": _refused,
        "maxtext": _maxtext,
        "remote": _remote,
        "checkpoints": lambda: _checkpoints(directory),
    }
    left = {}
    for name, way in ways.items():
        way()
        coordination.finish_calls()
        multihost_utils.sync_global_devices(f"left: {name}")
        left[name] = sorted(store.directory("meshfeed"))
        multihost_utils.sync_global_devices(f"listed: {name}")
    return left


def _child(how: str, feed: Any) -> None:
    """A forked child: leaves by the interpreter's exit functions, perhaps after it has closed the feed."""
    try:
        if how == "close":
            feed.close()
        atexit._run_exitfuncs()
    finally:
        os._exit(0)


def forks(how: str, host: int) -> dict[str, Any]:
    """One host forks in the middle of a feed; what became of the child, and how far the hosts came."""
    feed = make_feed(num_epochs=None)
    next(feed)
    multihost_utils.sync_global_devices("under way")
    seen: dict[str, Any] = {"child": None}
    if jax.process_index() == host:
        child = os.fork()
        if child == 0:
            _child(how, feed)
        seen["child"] = "hangs"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and seen["child"] == "hangs":
            if os.waitpid(child, os.WNOHANG)[0]:
                seen["child"] = "ended"
            time.sleep(0.05)
        if seen["child"] == "hangs":
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    for _ in range(100):
        next(feed)
    feed.close()
    multihost_utils.sync_global_devices("done")
    seen["step"] = feed.step
    return seen


def without_a_store(directory: str) -> list[str]:
    """A feed and a checkpointer where the private client of JAX is gone."""
    real = jax_internals.coordination_client
    jax_internals.coordination_client = lambda: None
    said = []
    try:
        for make in (make_feed, lambda: meshfeed.checkpoint.Checkpointer(pathlib.Path(directory) / "none")):
            try:
                make().close()
                said.append("no error")
            except meshfeed.MeshfeedError as error:
                said.append(str(error))
    finally:
        jax_internals.coordination_client = real
    return said


def resized(port: int) -> list[list[int]]:
    """Ids that a feed delivers here in the next job of the same processes, in which a feed of the job before is dropped."""
    host, hosts = jax.process_index(), jax.process_count()
    dropped, closed = make_feed(), make_feed()
    next(dropped)
    next(closed)
    jax.distributed.shutdown()
    clear_backends()
    closed.close()  # which must not ask JAX for anything, or it begins no other job
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, hosts, host, coordinator_bind_address=None if host else address)
    jax.devices()
    if host:
        time.sleep(2)  # the other one waits for this one already
    with make_feed(timeout_seconds=10) as feed:
        del dropped
        batches = [next(feed)["id"] for _ in range(3)]
    return [np.concatenate([np.asarray(shard.data) for shard in ids.addressable_shards]).tolist() for ids in batches]
