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
