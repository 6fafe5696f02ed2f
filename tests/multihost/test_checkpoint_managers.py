"""Orbax's emergency, replicator (multi-tier) and peer-to-peer managers carry a feed's state too."""

from __future__ import annotations

import pathlib
import sys

import pytest

from meshfeed.testing import HostPool

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "checkpoint"))
import checkpoint_feeds
import checkpoint_trees

pytest.importorskip("orbax.checkpoint.experimental.emergency.checkpoint_manager")


def prepare(directory: str):
    """Two replicas of two devices, one a host; a state, and a feed that has delivered a batch."""
    import absl.flags
    import jax
    import numpy as np
    from orbax.checkpoint._src.multihost import multihost

    if not absl.flags.FLAGS.is_parsed():  # the first of the managers in this process
        absl.flags.FLAGS.mark_as_parsed()
        multihost.initialize_runtime_to_distributed_ids()
        multihost.initialize_distributed_to_device_ids()
    mesh = checkpoint_trees.make_mesh(2, 2)
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    state = {"w": checkpoint_trees.place(values, mesh, None, "model")}
    feed = lane_feed()
    next(feed)
    local = pathlib.Path(directory, f"local-{jax.process_index()}")
    local.mkdir(parents=True)
    return mesh, state, feed, local, pathlib.Path(directory, "persistent")


def lane_feed():
    import jax

    here = jax.process_index()
    return checkpoint_feeds.LaneFeed([2 * here, 2 * here + 1], 4)


def check(state, restored, feed):
    checkpoint_trees.assert_same(state, restored)
    assert feed.position == 8
    assert feed.counters == {lane: 1 + lane for lane in feed.counters}


def emergency(directory: str):
    import orbax.checkpoint as ocp
    from orbax.checkpoint.experimental.emergency import checkpoint_manager

    from meshfeed.checkpoint import IteratorHandler, IteratorRestore, IteratorSave

    mesh, state, feed, local, persistent = prepare(directory)
    options = checkpoint_manager.CheckpointManagerOptions(
        local=checkpoint_manager.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
        persistent=checkpoint_manager.PersistentCheckpointOptions(save_interval_steps=1, max_to_keep=2),
    )
    manager = checkpoint_manager.CheckpointManager(
        local_directory=local,
        persistent_directory=persistent,
        global_mesh=mesh,
        abstract_state=checkpoint_trees.abstract(state),
        options=options,
        item_handlers=IteratorHandler(),
        persistent_non_replicated_directory=pathlib.Path(directory, "dataset"),
    )
    manager.save(1, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), dataset=IteratorSave(feed)))
    next(feed)
    manager.wait_until_finished()
    other = lane_feed()
    restored = manager.restore(1, args=ocp.args.Composite(dataset=IteratorRestore(other)))
    check(state, restored.state, other)
    manager.close()


def replicator(directory: str):
    import orbax.checkpoint as ocp
    from orbax.checkpoint.experimental.emergency import replicator_checkpoint_manager

    from meshfeed.checkpoint import IteratorHandler, IteratorRestore, IteratorSave

    mesh, state, feed, local, persistent = prepare(directory)
    registry, handler = ocp.handlers.DefaultCheckpointHandlerRegistry(), IteratorHandler()
    registry.add("dataset", IteratorSave, handler)
    registry.add("dataset", IteratorRestore, handler)
    manager = replicator_checkpoint_manager.ReplicatorCheckpointManager(
        local,
        options=replicator_checkpoint_manager.ReplicatorCheckpointManagerOptions(save_interval_steps=1),
        global_mesh=mesh,
        persistent_directory=persistent,
        handler_registry=registry,
    )
    manager.save(1, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), dataset=IteratorSave(feed)))
    next(feed)
    manager.wait_until_finished()
    other = lane_feed()
    wanted = checkpoint_trees.abstract(state)
    arrays = ocp.args.PyTreeRestore(item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted))
    restored = manager.restore(1, args=ocp.args.Composite(state=arrays, dataset=IteratorRestore(other)))
    check(state, restored.state, other)
    manager.close()


def peer_to_peer(directory: str):
    """This one takes Grain's arguments only (``_check_data_iter`` in p2p/args.py, Orbax 0.12), hence the face.

    Its persistent manager makes folders in the background and Grain's handler does not wait for them, so a save may find no
    folder to write to. That is between those two; here folders are made before.
    """
    import functools
    from unittest import mock

    import grain.python as grain
    import orbax.checkpoint as ocp
    from orbax.checkpoint.experimental.emergency import p2p  # noqa: F401
    from orbax.checkpoint.experimental.emergency.p2p import args as p2p_args
    from orbax.checkpoint.experimental.emergency.p2p import checkpoint_manager, options

    from meshfeed.checkpoint import as_grain_iterator

    mesh, state, feed, local, persistent = prepare(directory)
    persistent.mkdir(exist_ok=True)
    wanted = checkpoint_trees.abstract(state)
    settings = options.CheckpointManagerOptions(
        local=options.LocalCheckpointOptions(save_interval_steps=1),
        persistent=options.PersistentCheckpointOptions(save_interval_steps=1),
    )
    at_once = ocp.AsyncOptions(create_directories_asynchronously=False)
    with_folders = functools.partial(ocp.CheckpointManagerOptions, async_options=at_once)
    with mock.patch.object(ocp.checkpoint_manager, "CheckpointManagerOptions", with_folders):
        manager = checkpoint_manager.CheckpointManager(mesh, wanted, local, persistent, options=settings)
    assert not manager._persistent_manager._manager._options.async_options.create_directories_asynchronously
    data = grain.PyGrainCheckpointSave(as_grain_iterator(feed))
    manager.save(1, args=p2p_args.Composite(state=ocp.args.PyTreeSave(state), data_iter=data))
    next(feed)
    manager.wait_until_finished()
    other = lane_feed()
    data = grain.PyGrainCheckpointRestore(as_grain_iterator(other))
    restored = manager.restore(1, args=p2p_args.Composite(state=ocp.args.PyTreeRestore(item=wanted), data_iter=data))
    check(state, restored.state, other)
    manager.close()


@pytest.fixture(scope="module")
def pool():
    with HostPool(num_hosts=2, devices_per_host=2, timeout_seconds=120) as pool:
        yield pool


@pytest.mark.parametrize("manager", [emergency, replicator, peer_to_peer])
def test_the_position_travels(pool, tmp_path, manager):
    pool.run(manager, str(tmp_path))
