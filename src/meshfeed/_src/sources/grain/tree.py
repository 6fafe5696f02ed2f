"""Trees of Grain datasets: inspecting them, and copying them with some nodes replaced.

Removes prefetching from a Grain pipeline.

Prefetching changes no record but starts threads or processes for every lane. Lanes share one thread pool instead, and
the feed's workers read them. Prefetching is removed at every level, which makes the stream independent of the number of
workers: below ``mp_prefetch``, Grain would pack or batch the elements of each worker separately.

The fingerprint of a Grain pipeline: its transforms, their settings and its data.

It is the same in every process: it contains no object address, ``hash()`` or folder name. A function is identified by
its name, since its code cannot be compared. Settings that change no record, such as read options, are left out.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grain
import jax
import numpy as np
import xxhash

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.state.state import digest_of

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
        if [file.num_records for file in reader._shards.files]
        == [instruction.num_records for instruction in instructions]
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
            return copy_tree(node, batched_sources, elements)
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
        return copy_tree(node, replace, copies)

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
    copies = tuple(copy(parent) for parent in parents(node))
    return shallow_copy(node, _parents=copies, _batch_fn=make_batch.func)


_PROBES = 4
_MAX_ITEMS = 64  # longer containers are left out
_MAX_CHOICES = 256  # elements of a mixture whose choice of component enters the digest
_MAX_DATASETS = 1024  # an interleave of more datasets is sampled
_MAX_CHARACTERS = 200  # a longer setting is replaced by its digest
_LEFT_OUT = {
    *("_parents", "_selection_map"),
    *("has_child", "_read_options", "_record_metrics"),  # change no record
    *("_num_make_iter_threads", "_make_iter_buffer_size", "_iter_buffer_size"),
    *("_map_fn", "original_start", "original_len"),  # redundant with other attributes
    *("_paths", "_path"),  # described by base names and sizes instead
}
_NOT_PLAIN = object()


def describe(dataset: Any) -> dict[str, JsonValue]:
    """``{"pipeline": {"0 SourceMapDataset": {…}, "1 MapMapDataset": {…}, …}}``, sources first."""
    nodes = [node for node in walk(dataset) if not is_named(node, "WithOptionsIterDataset")]
    return {"pipeline": {f"{index} {type(node).__name__}": _settings(node) for index, node in enumerate(nodes)}}


def _settings(node: Any) -> dict[str, JsonValue]:
    settings: dict[str, JsonValue] = {}
    for name, value in sorted(vars(node).items()):
        cached = isinstance(getattr(type(node), name, None), functools.cached_property)  # present only after first use
        plain = _NOT_PLAIN if cached or name in _LEFT_OUT else _plain(value)
        if plain is not _NOT_PLAIN and plain not in (None, [], {}):
            settings[name.lstrip("_")] = plain if len(json.dumps(plain)) <= _MAX_CHARACTERS else digest_of(plain)
    if is_named(node, "SourceMapDataset"):
        source = private(node, "_source")
        settings["source"] = "the node before" if isinstance(source, grain.MapDataset) else identify(source)
    elif is_named(node, "ParquetIterDataset"):
        settings["paths"] = identify_paths(private(node, "_paths"))
    elif is_named(node, "TFRecordIterDataset"):
        settings["path"] = identify_paths([private(node, "_path")])
    elif is_named(node, "MixedMapDataset"):
        choice = private(node, "_selection_map")
        settings["selection"] = digest_of([list(choice[index]) for index in range(min(_MAX_CHOICES, len(choice)))])
    elif is_named(node, "InterleaveIterDataset"):
        settings.update(_describe_datasets(private(node, "_datasets")))
    return settings


def _describe_datasets(datasets: Any) -> dict[str, JsonValue]:
    """Datasets of an interleave: their number, the pipeline that makes them, and a digest of their descriptions."""
    count = len(datasets)
    described: dict[str, JsonValue] = {"datasets": count}
    if isinstance(datasets, grain.MapDataset):
        described["made_by"] = describe(datasets)["pipeline"]
        some = range(min(count, 1))
    else:
        some = range(count) if count <= _MAX_DATASETS else _spread(count)
    each = [None if datasets[index] is None else describe(without_prefetch(datasets[index])) for index in some]
    return {**described, "content": digest_of(each)}


def file_names(dataset: Any) -> list[str]:
    """Paths of the files that a pipeline reads, as far as its nodes and data sources expose them."""
    names: list[Any] = []
    for node in walk(dataset):
        source = getattr(node, "_source", None)
        source = source.source if isinstance(source, BatchedSource) else source
        for paths in (getattr(node, "_paths", ()), getattr(node, "_path", ()), getattr(source, "paths", ())):
            names += [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return [os.fspath(name) for name in names if isinstance(name, str | os.PathLike)]


def identify(source: Any) -> JsonValue:
    """Identity of a data source: its own fingerprint if it has one, otherwise its files and a digest of 4 records.

    A list of file names is identified by the files alone.
    """
    source = source.source if isinstance(source, BatchedSource) else source
    if callable(getattr(source, "fingerprint", None)) and not isinstance(source, str):
        return source.fingerprint()
    identity: dict[str, JsonValue] = {"type": type(source).__name__}
    count = _length(source)
    if count is not None:
        identity["records"] = count
    paths = getattr(source, "paths", None)
    if paths is None and isinstance(source, list | tuple) and _are_files(source):
        return {**identity, "files": identify_paths(source)}
    if paths is not None and (isinstance(paths, str | os.PathLike) or _are_paths(paths)):
        identity["files"] = identify_paths([paths] if isinstance(paths, str | os.PathLike) else paths)
    if count:
        identity["content"] = _digest_records(source, _spread(count))
    return identity


def identify_paths(paths: Sequence[Any]) -> JsonValue:
    """Identity of files by base name and size, which does not change if the folder is moved."""
    names = [os.fspath(path) for path in paths]
    names = [name.decode() if isinstance(name, bytes) else name for name in names]
    try:
        return file_paths.identify_files(names, file_paths.file_sizes(names, source="Grain"))
    except SourceError:  # a URL whose size needs fsspec, which is missing; Grain reads it by other means
        return file_paths.identify_files(names, [0] * len(names))


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None


def _are_paths(items: Any) -> bool:
    return isinstance(items, Sequence) and bool(items) and all(isinstance(item, str | os.PathLike) for item in items)


def _are_files(items: Sequence[Any]) -> bool:
    return _are_paths(items) and all(file_paths.is_url(os.fspath(item)) or os.path.isfile(item) for item in items)


def _spread(count: int) -> list[int]:
    return [count * probe // _PROBES for probe in range(_PROBES)] if count > _PROBES else list(range(count))


def _digest_records(source: Any, indices: Sequence[int]) -> str:
    digest = xxhash.xxh3_64()
    for index in indices:
        try:
            record = source[index]
        except Exception:  # the feed reports or replaces an unreadable record when it reads it
            digest.update(b"unreadable")
            continue
        leaves, structure = jax.tree_util.tree_flatten(record)
        digest.update(str(structure).encode())
        for leaf in leaves:
            digest.update(_bytes_of(leaf))
    return digest.hexdigest()


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, bytes | bytearray):
        return bytes(leaf)
    if isinstance(leaf, bool | int | float | str):
        return f"{type(leaf).__name__}:{leaf!r}".encode()
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        return f"{leaf.dtype.str}{leaf.shape}".encode() + leaf.tobytes()
    return type(leaf).__name__.encode()  # its repr may hold an address


def _plain(value: Any) -> Any:
    """``value`` as JSON that is the same in every process; ``_NOT_PLAIN`` if it has no such form."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, type) or hasattr(value, "__code__") or hasattr(value, "__func__"):
        return getattr(value, "__name__", _NOT_PLAIN)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **_without_holes(fields)}
    if isinstance(value, grain.transforms.Map | grain.transforms.RandomMap | grain.transforms.Filter):
        return type(value).__name__
    if isinstance(value, Mapping) and len(value) <= _MAX_ITEMS and all(isinstance(key, str) for key in value):
        return _without_holes({key: _plain(item) for key, item in value.items()})
    if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
        return [item for item in map(_plain, value) if item is not _NOT_PLAIN]
    return type(value).__name__ if callable(value) else _NOT_PLAIN


def _without_holes(items: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in items.items() if item is not _NOT_PLAIN}
