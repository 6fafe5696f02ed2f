"""What hosts run in the tests of checkpoints: save and restore a mixed tree, and compare to the bit."""

from __future__ import annotations

import pathlib

import checkpoint_feeds
import checkpoint_trees

NUM_LANES = 8


def lanes():
    import jax

    each = NUM_LANES // jax.process_count()
    return list(range(jax.process_index() * each, (jax.process_index() + 1) * each))


def bytes_read() -> float:
    import tensorstore

    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(entry.get("value", 0) for metric in metrics for entry in metric["values"])


def stored_bytes(directory: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def save_and_restore(directory: str, shape: tuple[int, int], modes: list[tuple[str, int | None]], name: str = ""):
    """Saves on this mesh, restores in each mode, compares; gives bytes read by mode."""
    from meshfeed.checkpoint import Checkpointer

    mesh = checkpoint_trees.make_mesh(*shape)
    tree = checkpoint_trees.mixed_tree(mesh)
    feed = checkpoint_feeds.LaneFeed(lanes(), NUM_LANES)
    next(feed)
    name = name or f"{shape[0]}x{shape[1]}"
    with Checkpointer(f"{directory}/{name}", save_interval_steps=1) as ckpt:
        assert ckpt.save(3, tree, feed)
        next(feed)
    return {f"{mode} {limit}": restore_elsewhere(directory, name, shape, mode, limit) for mode, limit in modes}


def restore_elsewhere(
    directory: str, saved: str, shape: tuple[int, int], mode: str = "once", limit: int | None = None
) -> float:
    """Restores what this or another job saved on this job's mesh, and compares; gives bytes read by this host."""
    from meshfeed.checkpoint import Checkpointer

    tree = checkpoint_trees.mixed_tree(checkpoint_trees.make_mesh(*shape))
    feed = checkpoint_feeds.LaneFeed(lanes(), NUM_LANES)
    with Checkpointer(f"{directory}/{saved}", restore=mode, memory_limit_bytes=limit) as ckpt:
        before = bytes_read()
        step, restored = ckpt.restore(checkpoint_trees.abstract(tree), feed)
        read = bytes_read() - before
    assert (step, feed.position) == (3, 8)
    assert feed.counters == {lane: 1 + lane for lane in lanes()}
    checkpoint_trees.assert_same(tree, restored)
    return read


class Unflattenable:
    """A container of the user that cannot be flattened."""


def fail_before_a_save(directory: str):
    """Host 1 alone cannot begin a save: the same error on every host, within the deadline; the next save succeeds."""
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from meshfeed._src.checkpoint import array_handler
    from meshfeed.checkpoint import Checkpointer

    here = jax.process_index() == 1
    mesh = checkpoint_trees.make_mesh(4, 2)
    feed = checkpoint_feeds.CountingFeed()
    good = {"w": checkpoint_trees.place(np.arange(64, dtype=np.float32), mesh, "data")}
    own = Mesh(np.array(jax.devices()[2:4]), ("x",), axis_types=(jax.sharding.AxisType.Auto,))  # of host 1
    on_one_host = jax.make_array_from_single_device_arrays(
        (4,),
        NamedSharding(own, PartitionSpec("x")),
        [jax.device_put(np.arange(2.0, dtype=np.float32), device) for device in jax.devices()[2:4]] if here else [],
        dtype=np.float32,
    )
    deleted = jnp.ones(3)
    if here:
        deleted.delete()
        jax.tree_util.register_pytree_node(Unflattenable, lambda _: 1 / 0, lambda *_: Unflattenable())

    class Broken(checkpoint_feeds.CountingFeed):
        def get_state(self):
            raise RuntimeError("no state")

    class Interrupted(checkpoint_feeds.CountingFeed):
        def get_state(self):
            raise KeyboardInterrupt

    ahead = checkpoint_feeds.CountingFeed()
    for _ in range(3 if here else 2):
        next(ahead)

    cases = {
        "one host": (2, {**good, "leaf": on_one_host}, feed),
        "deleted": (2, {**good, "leaf": deleted}, feed),
        "flatten": (2, {**good, "leaf": Unflattenable() if here else 1}, feed),
        "opaque": (2, {**good, "leaf": open if here else 1}, feed),
        "state": (2, good, Broken() if here else feed),
        "tree": (2, {**good, "x": 1} if here else good, feed),
        "dtype": (2, {"w": good["w"].astype(jnp.bfloat16)} if here else good, feed),
        "step": (3 if here else 2, good, feed),
        "place": (2, good, ahead),
        "cut": (2, good, feed),
        "interrupt": (2, good, Interrupted() if here else feed),
    }
    found = {}
    plan_write = array_handler.plan_write
    with (
        Checkpointer(f"{directory}/before", max_to_keep=1, save_interval_steps=1, timeout_seconds=60) as ckpt,
        Checkpointer(f"{directory}/brief", save_interval_steps=1, timeout_seconds=5) as brief,
    ):
        for one in (ckpt, brief):
            one.save(1, good, feed)
            one.wait()
        for name, (step, state, given) in cases.items():
            saver = brief if name == "interrupt" else ckpt
            if name == "cut" and here:
                array_handler.plan_write = lambda *args, **settings: 1 / 0
            started = time.monotonic()
            try:
                saver.save(step, state, given)
                saver.wait()
                found[name] = "no error"
            except BaseException as error:
                found[name] = f"{type(error).__name__}: {error}"
            finally:
                array_handler.plan_write = plan_write
            assert time.monotonic() - started < 50, name
            if name in ("cut", "interrupt"):
                multihost_utils.sync_global_devices(name)  # the others have waited for host 1
                assert saver.save(5, good, feed), name
                saver.wait()
        assert ckpt.save(6, good, feed)
        ckpt.wait()
        step, restored = ckpt.restore(good)
        checkpoint_trees.assert_same(good, restored)
        assert step == 6
        steps = ckpt.steps(), brief.steps()
    return found, steps


def fail_after_all_have_written(directory: str):
    """Host 0 alone cannot merge a step, then cannot remove an older one: no host waits for its timeout, half an hour."""
    import logging
    import shutil
    import time

    import jax
    import numpy as np

    from meshfeed._src.checkpoint import handlers
    from meshfeed._src.state import files
    from meshfeed.checkpoint import Checkpointer

    mesh, feed, lines = checkpoint_trees.make_mesh(4, 2), checkpoint_feeds.LaneFeed(lanes(), NUM_LANES), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("meshfeed.checkpoint").addHandler(handler)
    state = {"w": checkpoint_trees.place(np.ones((64, 8), np.float32), mesh, "data")}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    def busy(path, *args, **kwargs):
        raise OSError(39, "Directory not empty")

    faults = {2: (handlers, "join_parts", full), 3: (files, "merge_files", full), 5: (shutil, "rmtree", busy)}
    messages = []
    with Checkpointer(f"{directory}/commit", max_to_keep=1, save_interval_steps=1) as ckpt:
        for step in range(1, 7):
            next(feed)
            module, name, fault = faults.get(step, (handlers, "join_parts", handlers.join_parts))
            whole, started = getattr(module, name), time.monotonic()
            try:
                ckpt.save(step, state, feed)
                if jax.process_index() == 0:  # after what the save before has left was removed
                    setattr(module, name, fault)
                ckpt.wait()
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
            finally:
                setattr(module, name, whole)
            assert time.monotonic() - started < 20, step
            if step == 5:
                assert ckpt.restore(state, feed)[0] == 5
        assert ckpt.restore(state, feed)[0] == 6
    logging.getLogger("meshfeed.checkpoint").removeHandler(handler)
    # Host 0 may still have the note that it saves there.
    left = sorted({path.name for path in pathlib.Path(directory, "commit").iterdir()} - {".writer.json"})
    return messages, lines, left


def save_and_restore_twice(directory: str, first: int) -> list[int]:
    """Saves two steps, the second while the first is written, and restores the newest; gives the steps."""
    import jax

    from meshfeed.checkpoint import Checkpointer

    mesh = checkpoint_trees.make_mesh(jax.device_count(), 1)
    tree, feed = checkpoint_trees.mixed_tree(mesh), checkpoint_feeds.LaneFeed(lanes(), NUM_LANES)
    with Checkpointer(directory, save_interval_steps=1, timeout_seconds=60) as ckpt:
        for step in (first, first + 1):
            next(feed)
            ckpt.save(step, tree, feed)
    with Checkpointer(directory, timeout_seconds=60) as ckpt:
        step, restored = ckpt.restore(checkpoint_trees.abstract(tree), feed)
    assert step == first + 1
    checkpoint_trees.assert_same(tree, restored)
    return ckpt.steps()


def save_after_host_0_has_saved_alone(directory: str) -> list[int]:
    """Orbax has counted more operations on host 0, which is slow to make the folder of a step."""
    import asyncio

    import jax
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.path import atomicity

    make = atomicity._create_tmp_directory

    async def make_later(*args, **keywords):
        await asyncio.sleep(1)
        return await make(*args, **keywords)

    if jax.process_index() == 0:
        alone = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes={0}, barrier_sync_key_prefix="alone"
        )
        handler = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as exporter:
            exporter.save(f"{directory}/export", args=ocp.args.JsonSave({"a": 1}))
        atomicity._create_tmp_directory = make_later
    try:
        return save_and_restore_twice(f"{directory}/run", 1)
    finally:
        atomicity._create_tmp_directory = make


def save_in_the_next_job(directory: str, port: int) -> list[int]:
    """Orbax keeps the client of the first job of a process."""
    import jax
    from jax.extend.backend import clear_backends

    save_and_restore_twice(directory, 1)
    host, hosts, address = jax.process_index(), jax.process_count(), f"127.0.0.1:{port}"
    jax.distributed.shutdown()
    clear_backends()
    jax.distributed.initialize(address, hosts, host, coordinator_bind_address=None if host else address)
    return save_and_restore_twice(directory, 3)
