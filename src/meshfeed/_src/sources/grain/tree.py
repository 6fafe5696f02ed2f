"""Trees of Grain datasets: inspecting them, and copying them with some nodes replaced."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grain

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError

Node: TypeAlias = "grain.MapDataset[Any] | grain.IterDataset[Any]"
_logger = logging.getLogger("meshfeed.sources")

NODES = (grain.MapDataset, grain.IterDataset)
_ENDLESS = 1 << 62
_KEEP_LENGTH = (
    "PrefetchIterDataset", "MapIterDataset", "MapWithIndexIterDataset", "RandomMapIterDataset", "WindowShuffleIterDataset",
    "WithOptionsIterDataset",
)  # fmt: skip

HOW_TO_OPEN = """\
Write the cut yourself instead, with one pipeline a lane:

    def open(lane_index, num_lanes):
        return iter(make_dataset(files[lane_index::num_lanes]))

    source = meshfeed.sources.Stream(open)"""


def is_named(node: Any, *names: str) -> bool:
    """Whether the node is an instance of a class with one of these names, or of a subclass.

    Compares names because most of Grain's classes are in private modules.
    """
    return any(base.__name__ in names for base in type(node).__mro__)


def is_foreign(node: Any, *known: str) -> bool:
    """Whether the node's class is the user's: defined in neither Grain, meshfeed nor the packages ``known``."""
    return type(node).__module__.partition(".")[0] not in ("grain", "meshfeed", *known)


def private(node: Any, name: str) -> Any:
    """A private attribute of a Grain node.

    Raises:
      SourceError: this version of Grain has no such attribute.
    """
    try:
        return getattr(node, name)
    except AttributeError:
        raise SourceError(
            f"{type(node).__name__} of Grain {grain.__version__} has no {name}, which is needed to cut it into lanes. "
            f"This version of meshfeed does not know this version of Grain. {HOW_TO_OPEN}"
        ) from None


def parents(node: Any) -> Sequence[Any]:
    """The datasets that a node reads; empty if a user's class never set them."""
    return getattr(node, "_parents", ())


def walk(node: Any) -> list[Any]:
    """The node and all nodes below it, sources first, each once."""
    found: dict[int, Any] = {}

    def visit(current: Any) -> None:
        if id(current) not in found:
            inner = getattr(current, "_source", None)
            for parent in (*parents(current), *((inner,) if isinstance(inner, NODES) else ())):
                visit(parent)
            found[id(current)] = current

    visit(node)
    return list(found.values())


def read_many(records: Any, indices: Sequence[int]) -> Sequence[Any]:
    """Several elements of a MapDataset, read at once if this version of Grain supports it."""
    batched = getattr(records, "_getitems", None)
    return [records[index] for index in indices] if batched is None else batched(indices)


class BatchedSource:
    """A data source from which Grain reads many records at once, through the private method ``_getitems``.

    Args:
      source: the user's data source.
      reader: reads the same records in its place.
    """

    def __init__(self, source: Any, reader: Any) -> None:
        self.source = source
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: Any) -> Any:
        return self._reader[index]

    def _getitems(self, indices: Sequence[int]) -> Sequence[Any]:
        return self._reader.__getitems__(indices)


class EpochMapDataset(grain.MapDataset):
    """A later epoch of a MapDataset, in Grain's own numbering, in which each epoch is reshuffled."""

    _MUTATES_ELEMENT_SPEC = False

    def __init__(self, parent: Any, epoch: int) -> None:
        super().__init__(parent)
        self._epoch = epoch
        self._offset = epoch * len(parent)

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._parent[index + self._offset]

    def _getitems(self, indices: Sequence[int]) -> Sequence[Any]:
        return read_many(self._parent, [index + self._offset for index in indices])

    def __str__(self) -> str:
        return f"EpochMapDataset(epoch={self._epoch})"


def copy_tree(node: Any, replace: Callable[[Any], Any], copies: dict[int, Any] | None = None) -> Any:
    """A copy of the tree below ``node`` that shares its data, files and the user's functions.

    ``copy.deepcopy``, which Grain uses, would also copy in-memory data, once per lane.

    Args:
      node: the root of the tree, the last transform.
      replace: node → its replacement, or None to copy it.
      copies: id of a node → its copy, which keeps a node that is used twice a single node.
    """
    copies = {} if copies is None else copies
    if id(node) in copies:
        return copies[id(node)]
    new = replace(node)
    if new is None:
        new = shallow_copy(node)
        for name, value in list(vars(new).items()):
            vars(new)[name] = _swap(value, lambda child: copy_tree(child, replace, copies), is_foreign(node))
    copies[id(node)] = new
    return new


def shallow_copy(node: Any, **changed: Any) -> Any:
    """A copy of one node with changed attributes and without cached properties."""
    new = copy.copy(node)
    for name in list(vars(new)):
        if isinstance(getattr(type(new), name, None), functools.cached_property):
            del vars(new)[name]
    vars(new).update(changed)
    return new


def _swap(value: Any, copy_node: Callable[[Any], Any], foreign: bool) -> Any:
    if isinstance(value, NODES):
        return copy_node(value)
    if isinstance(value, dict) and _holds_nodes(value.values()):
        return {key: _swap(item, copy_node, foreign) for key, item in value.items()}
    if isinstance(value, list | tuple) and _holds_nodes(value):
        items = [_swap(item, copy_node, foreign) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    # A user's set_slice may change its own list in place.
    return copy.copy(value) if foreign and isinstance(value, list | dict | set) else value


def _holds_nodes(items: Any) -> bool:
    return any(
        isinstance(item, NODES)
        or (isinstance(item, dict) and _holds_nodes(item.values()))
        or (isinstance(item, list | tuple) and _holds_nodes(item))
        for item in items
    )


def batched_sources(node: Any) -> Any:
    """The replacement for a source node, without Grain's record metrics and with batched reads if it supports them.

    None for other nodes; see :func:`copy_tree`.
    """
    if not is_named(node, "SourceMapDataset"):
        return None
    source = private(node, "_source")
    if isinstance(source, NODES) or hasattr(source, "_getitems"):
        return None
    # Measuring the records' bytes for Grain's statistics costs more than reading them.
    changed: dict[str, Any] = {"_record_metrics": False}
    if hasattr(source, "__getitems__"):
        changed["_source"] = BatchedSource(source, _array_record(source) or source)
    return shallow_copy(node, **changed)


def _array_record(source: Any) -> Any:
    """A meshfeed reader for the same ArrayRecord files, or None for other sources.

    Unlike ArrayRecord's own reader, it starts no threads per call and names damaged files.

    Raises:
      CorruptDataError: a file is damaged; ArrayRecord's own reader would treat it as empty.
    """
    instructions = getattr(source, "_read_instructions", None)
    if not instructions or not is_named(source, "ArrayRecordDataSource") or is_foreign(source, "array_record"):
        return None
    # Reader options and row ranges are not supported by the replacement.
    if getattr(source, "_reader_options_string", "") or any(instruction.start for instruction in instructions):
        return None
    from meshfeed._src.sources.array_record.source import ArrayRecord

    try:
        reader = ArrayRecord([instruction.filename for instruction in instructions])
    except CorruptDataError:
        raise
    except (SourceError, SettingsError):  # a path that only ArrayRecord's own reader can open
        return None
    # Only if both readers agree on the number of records of every file.
    return (
        reader
        if [file.num_records for file in reader._files] == [instruction.num_records for instruction in instructions]
        else None
    )


def _last_batch(dataset: Any) -> Any:
    """The batch node at the end of a pipeline; None if it ends in a different node."""
    while is_named(dataset, "WithOptionsIterDataset"):
        dataset = private(dataset, "_parent")
    return dataset if is_named(dataset, "BatchMapDataset", "BatchIterDataset", "RebatchIterDataset") else None


def warn_batched(dataset: Any) -> None:
    """Warns if a pipeline ends in ``batch``: usually the feed is meant to do the batching."""
    node = _last_batch(dataset)
    if node is not None:
        _logger.warning(
            "the Grain pipeline ends in batch(%d), which makes each of its batches one record of the feed; leave batch() "
            "out, and give its size as global_batch_size",
            private(node, "_batch_size"),
        )


def check_batched(dataset: Any, num_lanes: int = 1) -> None:
    """Rejects a pipeline that ends in ``batch`` and whose last batch is known to be short: records must have one shape.

    Raises:
      SourceError: the last batch is short in one of ``num_lanes`` lanes.
    """
    node = _last_batch(dataset)
    if node is None or is_named(node, "RebatchIterDataset") or getattr(node, "_drop_remainder", True):
        return
    if getattr(getattr(node, "_batch_fn", None), "__name__", "") != "make_batch":  # a user's batch function may pad
        return
    length, size = _known_length(private(node, "_parent")), private(node, "_batch_size")
    if length is None or not any(part % size for part in (length // num_lanes, -(-length // num_lanes))):
        return
    lanes = "" if num_lanes == 1 else f" in each of {num_lanes} lanes"
    raise SourceError(
        f"the Grain pipeline ends in batch({size}), and its {length:,} elements do not fill the last batch{lanes}: each "
        "batch is one record of the feed, and records must have one shape. Leave batch() out and give the feed "
        "global_batch_size, or pass drop_remainder=True to batch()."
    )


def _known_length(node: Any) -> int | None:
    """Number of elements of a pipeline over all lanes; None if a node may drop or add some, or if it is infinite."""
    while is_named(node, *_KEEP_LENGTH):
        node = private(node, "_parent")
    if isinstance(node, grain.MapDataset) and sparse_node(node) is None and len(node) < _ENDLESS:
        return len(node)
    return None


def sparse_node(records: Any) -> Any:
    """The first node that may make elements of a MapDataset missing (filter, flat_map); None if there is none."""
    return next((node for node in walk(records) if is_named(node, "FilterMapDataset", "FlatMapMapDataset")), None)
