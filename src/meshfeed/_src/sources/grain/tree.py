"""Trees of Grain datasets: looking into them, and copying them with some nodes replaced."""

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
    """Whether the node is of a class of one of these names, or of a subclass.

    By name, because Grain keeps most of its classes in private modules.
    """
    return any(base.__name__ in names for base in type(node).__mro__)


def is_foreign(node: Any, *known: str) -> bool:
    """Whether a user wrote the node's class: it is of neither Grain nor the packages ``known``."""
    return type(node).__module__.partition(".")[0] not in ("grain", "meshfeed", *known)


def private(node: Any, name: str) -> Any:
    """An attribute that Grain does not promise.

    Raises:
      SourceError: this version of Grain keeps it elsewhere.
    """
    try:
        return getattr(node, name)
    except AttributeError:
        raise SourceError(
            f"{type(node).__name__} of Grain {grain.__version__} has no {name}, which is needed to cut it into lanes. "
            f"This version of meshfeed does not know this version of Grain. {HOW_TO_OPEN}"
        ) from None


def parents(node: Any) -> Sequence[Any]:
    """The datasets that a node reads; none where a user's class never set them."""
    return getattr(node, "_parents", ())


def walk(node: Any) -> list[Any]:
    """The node and everything below it, sources first, each once."""
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
    """Several elements of a MapDataset at once, where this version of Grain can."""
    batched = getattr(records, "_getitems", None)
    return [records[index] for index in indices] if batched is None else batched(indices)


class BatchedSource:
    """A data source that Grain reads many records of at once: it looks for the private name ``_getitems``.

    Args:
      source: the user's data source.
      reader: what reads instead of it, record for record the same.
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
    """A later epoch of a MapDataset: Grain's own numbering, in which it shuffles each epoch anew."""

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
    """A copy of the tree below ``node`` that shares the data, the files and the user's functions with it.

    ``copy.deepcopy``, which Grain uses, would copy the data in memory too: once a lane.

    Args:
      node: the last node.
      replace: node → what stands in its place, or None to copy it.
      copies: node's id → its copy, so that a node used twice stays one.
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
    """A copy of one node with other attributes, without what it had cached."""
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
    """What replaces a source that can read several records at once; None for other nodes."""
    if not is_named(node, "SourceMapDataset"):
        return None
    source = private(node, "_source")
    if isinstance(source, NODES) or hasattr(source, "_getitems"):
        return None
    # The bytes that Grain would measure for its statistics cost more than reading them.
    changed: dict[str, Any] = {"_record_metrics": False}
    if hasattr(source, "__getitems__"):
        changed["_source"] = BatchedSource(source, _array_record(source) or source)
    return shallow_copy(node, **changed)


def _array_record(source: Any) -> Any:
    """Our reader of the same ArrayRecord files, which starts no threads a call and names damaged files; None for others.

    Raises:
      CorruptDataError: a file is damaged; ArrayRecord's own reader takes it for an empty one.
    """
    instructions = getattr(source, "_read_instructions", None)
    if not instructions or not is_named(source, "ArrayRecordDataSource") or is_foreign(source, "array_record"):
        return None
    if getattr(source, "_reader_options_string", "") or any(instruction.start for instruction in instructions):
        return None
    from meshfeed._src.sources.array_record.source import ArrayRecord

    try:
        reader = ArrayRecord([instruction.filename for instruction in instructions])
    except CorruptDataError:
        raise
    except (SourceError, SettingsError):  # a path that only ArrayRecord's own reader can open
        return None
    return (
        reader
        if [file.num_records for file in reader._files] == [instruction.num_records for instruction in instructions]
        else None
    )


def _last_batch(dataset: Any) -> Any:
    """The batch node in which a pipeline ends; None if it ends in another."""
    while is_named(dataset, "WithOptionsIterDataset"):
        dataset = private(dataset, "_parent")
    return dataset if is_named(dataset, "BatchMapDataset", "BatchIterDataset", "RebatchIterDataset") else None


def warn_batched(dataset: Any) -> None:
    """Logs that a pipeline ends in ``batch``, which most people mean for the feed to do."""
    node = _last_batch(dataset)
    if node is not None:
        _logger.warning(
            "the Grain pipeline ends in batch(%d), which makes each of its batches one record of the feed; leave batch() "
            "out, and give its size as global_batch_size",
            private(node, "_batch_size"),
        )


def check_batched(dataset: Any, num_lanes: int = 1) -> None:
    """Refuses a pipeline that ends in ``batch`` if its last batch is known to be short: records must be alike.

    Raises:
      SourceError: it is short, in one of ``num_lanes`` lanes.
    """
    node = _last_batch(dataset)
    if node is None or is_named(node, "RebatchIterDataset") or getattr(node, "_drop_remainder", True):
        return
    if getattr(getattr(node, "_batch_fn", None), "__name__", "") != "make_batch":  # one of the user's may pad
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
    """Elements of a pipeline over all lanes; None if it may drop or add some, or has no end."""
    while is_named(node, *_KEEP_LENGTH):
        node = private(node, "_parent")
    if isinstance(node, grain.MapDataset) and sparse_node(node) is None and len(node) < _ENDLESS:
        return len(node)
    return None


def sparse_node(records: Any) -> Any:
    """The node because of which elements of a MapDataset may be missing; None if there is none."""
    return next((node for node in walk(records) if is_named(node, "FilterMapDataset", "FlatMapMapDataset")), None)
