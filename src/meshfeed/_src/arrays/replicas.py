"""Labels the blocks of a host batch by their index in the global batch, to compare replicas between hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from meshfeed._src.arrays.placer import ShardedPlacer
from meshfeed._src.base.types import PyTree
from meshfeed._src.plan.plan import broadcast_shardings


def blocks_of(placer: Any) -> Callable[[PyTree, int], dict[str, np.ndarray]] | None:
    """Returns a function from a host batch to its labelled blocks, or None if each row is read by only one host."""
    if not isinstance(placer, ShardedPlacer):
        return None

    def cut(tree: PyTree, global_batch_size: int) -> dict[str, np.ndarray]:
        plan = placer.plan(global_batch_size)
        blocks: dict[str, np.ndarray] = {}
        paths = jax.tree_util.tree_flatten_with_path(tree)[0]
        for (path, leaf), sharding in zip(paths, broadcast_shardings(placer.prefix, tree), strict=True):
            name = jax.tree_util.keystr(path) or "(the record)"
            leaf_plan = plan.leaf(sharding, (global_batch_size, *placer.record_shape(path, leaf)), name)
            whole = leaf.shape[1:] == leaf_plan.global_shape[1:]
            for block in leaf_plan.blocks:
                where = ", ".join(f"{part.start or 0}:{part.stop}" for part in block.index)
                index = (block.local[0], *block.index[1:]) if whole else block.local
                blocks[f"leaf {name}[{where}]"] = leaf[index]
        return blocks

    return cut
