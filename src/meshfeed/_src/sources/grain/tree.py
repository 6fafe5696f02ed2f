"""Trees of Grain datasets: listing their nodes, copying them with some replaced, and removing prefetching.

Prefetching changes no record but starts threads or processes for every lane. Lanes share one thread pool instead, and
the feed's workers read them. Prefetching is removed at every level, which makes the stream independent of the number of
workers: below ``mp_prefetch``, Grain would pack or batch the elements of each worker separately.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TypeVar, cast

import grain

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError
from meshfeed._src.sources.grain import internals
from meshfeed._src.sources.grain.internals import NODES, Node, Pipeline, is_named, private, shallow_copy

N = TypeVar("N", bound=Node)
Replace = Callable[[Node], "Node | None"]
_ENDLESS = 1 << 62
_logger = logging.getLogger("meshfeed.sources")


def walk(node: Node) -> list[Node]:
    """The node and all nodes below it, sources first, each once."""
    found: dict[int, Node] = {}

    def visit(current: Node) -> None:
        if id(current) not in found:
            inner = internals.source_of(current)
            for parent in (*internals.parents(current), *((inner,) if isinstance(inner, NODES) else ())):
                visit(parent)
            found[id(current)] = current

    visit(node)
    return list(found.values())


def copy_tree(node: N, replace: Replace, copies: dict[int, Node] | None = None) -> N:
    """A copy of the tree below ``node`` that shares its data, files and the user's functions.

    ``copy.deepcopy``, which Grain uses, would also copy in-memory data, once per lane.

    Args:
      node: the root of the tree, the last transform.
      replace: node → its replacement, or None to copy it.
      copies: id of a node → its copy, which keeps a node that is used twice a single node.
    """
    copies = {} if copies is None else copies
    if id(node) not in copies:
        new = replace(node)
        if new is None:
            new = shallow_copy(node)
            for name, value in list(vars(new).items()):
                copied = _swap(value, lambda child: copy_tree(child, replace, copies), internals.is_foreign(node))
                vars(new)[name] = copied
        copies[id(node)] = new
    return cast(N, copies[id(node)])


def _swap(value: object, copy_node: Callable[[Node], Node], foreign: bool) -> object:
    if isinstance(value, NODES):
        return copy_node(value)
    if isinstance(value, dict) and _holds_nodes(value):
        return {key: _swap(item, copy_node, foreign) for key, item in value.items()}
    if isinstance(value, list | tuple) and _holds_nodes(value):
        items = [_swap(item, copy_node, foreign) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    # A user's set_slice may change its own list in place.
    return copy.copy(value) if foreign and isinstance(value, list | dict | set) else value


def _holds_nodes(value: object) -> bool:
    items = list(value.values()) if isinstance(value, dict) else value
    return isinstance(items, NODES) or (isinstance(items, list | tuple) and any(map(_holds_nodes, items)))


def batched_sources(node: Node) -> Node | None:
    """The replacement for a source node, without Grain's record metrics and with batched reads if it supports them.

    None for other nodes; see :func:`copy_tree`.
    """
    source = internals.source_of(node)
    if source is None or isinstance(source, NODES) or internals.is_read_at_once(source):
        return None
    if hasattr(source, "__getitems__"):
        source = internals.BatchedSource(source, _array_record(source) or source)
    # Measuring the records' bytes for Grain's statistics costs more than reading them.
    return shallow_copy(node, source=source, record_metrics=False)


def _array_record(source: object) -> internals.ReadsMany | None:
    """A meshfeed reader for the same ArrayRecord files, or None for other sources.

    Unlike ArrayRecord's own reader, it starts no threads per call and names damaged files.

    Raises:
      CorruptDataError: a file is damaged; ArrayRecord's own reader would treat it as empty.
    """
    files = internals.array_record_files(source)
    if not files:
        return None
    from meshfeed._src.sources.array_record.source import ArrayRecord

    try:
        reader = ArrayRecord([path for path, _ in files])
    except CorruptDataError:
        raise
    except (SourceError, SettingsError):  # a path that only ArrayRecord's own reader can open
        return None
    # Only if both readers agree on the number of records of every file.
    return reader if [file.num_records for file in reader._shards.files] == [records for _, records in files] else None


def _last_batch(node: Node) -> Node | None:
    """The batch node at the end of a pipeline; None if it ends in a different node."""
    while is_named(node, internals.OPTIONS):
        node = internals.parent(node)
    return node if is_named(node, internals.BATCH) else None


def warn_batched(dataset: Node) -> None:
    """Warns if a pipeline ends in ``batch``: usually the feed is meant to do the batching."""
    node = _last_batch(dataset)
    if node is not None:
        _logger.warning(
            "the Grain pipeline ends in batch(%d), which makes each of its batches one record of the feed; leave batch() "
            "out, and give its size as global_batch_size",
            private(node, "batch_size"),
        )


def check_batched(dataset: Node, num_lanes: int = 1) -> None:
    """Rejects a pipeline that ends in ``batch`` and whose last batch is known to be short: records must have one shape.

    Raises:
      SourceError: the last batch is short in one of ``num_lanes`` lanes.
    """
    node = _last_batch(dataset)
    if (
        node is None
        or is_named(node, internals.REBATCH)
        or private(node, "drop_remainder")
        or internals.pads_batches(node)
    ):
        return
    length, size = _known_length(internals.parent(node)), private(node, "batch_size")
    if length is None or not any(part % size for part in (length // num_lanes, -(-length // num_lanes))):
        return
    lanes = "" if num_lanes == 1 else f" in each of {num_lanes} lanes"
    raise SourceError(
        f"the Grain pipeline ends in batch({size}), and its {length:,} elements do not fill the last batch{lanes}: each "
        "batch is one record of the feed, and records must have one shape. Leave batch() out and give the feed "
        "global_batch_size, or pass drop_remainder=True to batch()."
    )


def _known_length(node: Node) -> int | None:
    """Number of elements of a pipeline over all lanes; None if a node may drop or add some, or if it is infinite."""
    while is_named(node, internals.KEEP_LENGTH):
        node = internals.parent(node)
    if isinstance(node, grain.MapDataset) and sparse_node(node) is None and len(node) < _ENDLESS:
        return len(node)
    return None


def sparse_node(records: Node) -> Node | None:
    """The first node that may make elements of a MapDataset missing (filter, flat_map); None if there is none."""
    return next((node for node in walk(records) if is_named(node, internals.SPARSE)), None)


def without_prefetch(dataset: Node) -> Pipeline:
    """A copy of the pipeline, as an IterDataset, in which only ``to_iter_dataset`` reads ahead.

    Its data sources read many records at once if they support it; lanes share them.
    """
    if isinstance(dataset, grain.MapDataset):
        dataset = dataset.to_iter_dataset()
    copies: dict[int, Node] = {}
    elements: dict[int, Node] = {}

    def replace(node: Node) -> Node | None:
        if isinstance(node, grain.MapDataset):
            return copy_tree(node, batched_sources, elements)
        workers = _worker_shards(node)
        if workers:
            _logger.info(
                "mp_prefetch(num_workers=%d) is left out of the lanes; give the feed num_workers", len(workers)
            )
            node = workers[0]
            if internals.initializes_workers(node):
                _logger.warning(
                    "worker_init_fn of mp_prefetch is not called: lanes have no worker processes of their own"
                )
        elif not is_named(node, internals.PREFETCH):
            return _own_memory(node, copy)
        while is_named(node, internals.PREFETCH):
            node = internals.parent(node)
        return copy(node)

    def copy(node: N) -> N:
        return copy_tree(node, replace, copies)

    return copy(dataset)


def _worker_shards(node: Node) -> list[Node]:
    """The workers of an ``mp_prefetch``, which Grain represents as an interleave; empty for other nodes."""
    shards = private(node, "datasets") if is_named(node, internals.INTERLEAVE) else None
    return shards if isinstance(shards, list) and all(is_named(s, internals.PROCESSES) for s in shards) else []


def _own_memory(node: Node, copy: Callable[[Node], Node]) -> Node | None:
    """A batch node without the shared-memory output that ``mp_prefetch`` enables; None for other nodes."""
    is_batch = is_named(node, internals.BATCH) and not is_named(node, internals.REBATCH)
    make_batch = internals.without_shared_memory(private(node, "batch_fn")) if is_batch else None
    if make_batch is None:
        return None
    return shallow_copy(node, parents=tuple(map(copy, internals.parents(node))), batch_fn=make_batch)
