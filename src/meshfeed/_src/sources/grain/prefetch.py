"""Removes prefetching from a Grain pipeline.

Prefetching changes no record but starts threads or processes for every lane. Lanes share one thread pool instead, and
the feed's workers read them. Prefetching is removed at every level, which makes the stream independent of the number of
workers: below ``mp_prefetch``, Grain would pack or batch the elements of each worker separately.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import grain

from meshfeed._src.sources.grain import tree as grain_tree
from meshfeed._src.sources.grain.tree import is_named, private

_logger = logging.getLogger("meshfeed.sources")

_WRAPPERS = (
    "ThreadPrefetchIterDataset",
    "ProcessPrefetchIterDataset",
    "_MpContextIterDataset",
    "_LazyWorkerSliceIterDataset",
)


def without_prefetch(dataset: Any) -> Any:
    """A copy of the pipeline, as an IterDataset, in which only ``to_iter_dataset`` reads ahead.

    Its data sources read many records at once if they support it; lanes share them.
    """
    if isinstance(dataset, grain.MapDataset):
        dataset = dataset.to_iter_dataset()
    copies: dict[int, Any] = {}
    elements: dict[int, Any] = {}

    def replace(node: Any) -> Any:
        if isinstance(node, grain.MapDataset):
            return grain_tree.copy_tree(node, grain_tree.batched_sources, elements)
        workers = _worker_shards(node)
        if workers:
            _report(workers)
            node = workers[0]
        elif not is_named(node, *_WRAPPERS):
            return _own_memory(node, copy)
        while is_named(node, *_WRAPPERS):
            node = private(node, "_parent")
        return copy(node)

    def copy(node: Any) -> Any:
        return grain_tree.copy_tree(node, replace, copies)

    return copy(dataset)


def _worker_shards(node: Any) -> list[Any]:
    """The workers of an ``mp_prefetch``, which Grain represents as an interleave; empty for other nodes."""
    if not is_named(node, "InterleaveIterDataset"):
        return []
    shards = private(node, "_datasets")
    if not isinstance(shards, list) or not all(is_named(shard, "ProcessPrefetchIterDataset") for shard in shards):
        return []
    return shards


def _report(workers: list[Any]) -> None:
    _logger.info("mp_prefetch(num_workers=%d) is left out of the lanes; give the feed num_workers", len(workers))
    initialize = private(workers[0], "_worker_init_fn")
    if isinstance(initialize, functools.partial) and len(initialize.args[0]) > 1:  # the first function is Grain's own
        _logger.warning("worker_init_fn of mp_prefetch is not called: lanes have no worker processes of their own")


def _own_memory(node: Any, copy: Any) -> Any:
    """A batch node without the shared-memory output that ``mp_prefetch`` enables; None for other nodes."""
    make_batch = getattr(node, "_batch_fn", None)
    if not isinstance(make_batch, functools.partial) or "output_to_shared_memory" not in make_batch.keywords:
        return None
    parents = tuple(copy(parent) for parent in grain_tree.parents(node))
    return grain_tree.shallow_copy(node, _parents=parents, _batch_fn=make_batch.func)
