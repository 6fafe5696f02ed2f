"""Lanes of a Grain pipeline: copies of its tree of datasets, each of which reads its part of the data.

Grain splits a pipeline among its workers in the same way: each gets a copy whose sources are sliced. Here:

* a reader of a MapDataset (``to_iter_dataset``) takes elements i, i + L, i + 2L, …; in epoch e, those of Grain's own
  epoch e, whose shuffles differ;
* an interleave takes whole datasets and splits the remaining ones; Parquet files are split by files, then row groups,
  then row ranges; a TFRecord file by records;
* seeds of ``random_map``, ``WindowShuffle`` and packing become (seed, lane, epoch), since otherwise all lanes would
  draw the same numbers; lane 0 of epoch 0 keeps the seed.

Prefetching changes no record but starts threads or processes for every lane. It is removed at every level, which makes
the stream independent of the number of workers: below ``mp_prefetch``, Grain would pack or batch the elements of each
worker separately. Grain's own leaves are replaced too: they keep a whole row group of each Parquet file in memory, and
start 16 threads per ``to_iter_dataset`` and one per file of an interleave, a thousand or more with 64 lanes. Here all
lanes of a process share one pool.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import grain
import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError
from meshfeed._src.sources.array_record.source import ArrayRecord
from meshfeed._src.sources.files import stream as file_stream
from meshfeed._src.sources.files.parquet import ParquetFile
from meshfeed._src.sources.files.paths import in_threads
from meshfeed._src.sources.grain import internals
from meshfeed._src.sources.grain.internals import (
    NODES,
    Node,
    Pipeline,
    Records,
    is_named,
    parents,
    private,
    shallow_copy,
)
from meshfeed._src.sources.grain.iterators import (
    InterleaveIterator,
    LaneLeaf,
    NotEmptyIterator,
    ParquetIterator,
    ReadIterator,
    TFRecordIterator,
)

N = TypeVar("N", bound=Node)
Copy: TypeAlias = Callable[[Node], Node]
Replace: TypeAlias = Callable[[Node], "Node | None"]
Datasets: TypeAlias = "Sequence[Node | None] | Records"

_logger = logging.getLogger("meshfeed.sources")

ENDLESS = 1 << 62  # the most records that a feed can number; repeat() without a count has twice as many
_BLOCK_ELEMENTS = 512  # over all lanes: about as many as Grain buffers for one iterator (500)
_MAX_BLOCK = 64
_BLOCK_ROWS = 8192  # decoded at a time, over all lanes
_BUFFER_BYTES = 1 << 23  # read buffers of column chunks, over all lanes
_PARQUET_CYCLE = 16  # files that Grain interleaves
_OPEN_PARTS = 64  # open files over all lanes, to keep memory independent of the number of lanes
_MANY = 1 << 16  # above this, parts are not listed: an infinite dataset of datasets has 2**63


@dataclasses.dataclass(frozen=True)
class Place:
    """Which part of a pipeline's data to read: part ``lane_index`` of ``num_lanes``."""

    lane_index: int
    num_lanes: int
    epoch: int
    all_lanes: int  # of the whole pipeline, which share the memory limits
    salt: tuple[int, ...]  # makes the seeds of this part differ from those of other parts
    counts: dict[str, list[int] | None]  # path of a Parquet file → rows of its row groups; shared by all lanes
    version: int = file_stream.CUT_BY_FILES  # of the rule that cuts Parquet files

    @property
    def open_parts(self) -> int:
        """The most files or datasets that a lane has open at a time."""
        return max(1, _OPEN_PARTS // self.all_lanes)


def cut(dataset: Pipeline, place: Place) -> Pipeline:
    """One lane of a pipeline that passes :func:`check`: an IterDataset over its part of the data."""
    check(dataset, place.num_lanes)
    copies: dict[int, Node] = {}

    def replace(node: Node) -> Node | None:
        if isinstance(node, grain.MapDataset):  # below a user's IterDataset
            return _elements(node, place)
        for names, cutter in _CUTTERS:
            if is_named(node, names):
                return cutter(node, place, lambda child: copy_tree(child, replace, copies))
        return _cut_foreign(node, place) if _is_sliceable(node) else None

    lane = copy_tree(dataset, replace, copies)
    for node in copies.values():
        if isinstance(node, grain.IterDataset):
            internals.refuse_stops(node)
    return internals.skip_traceback_filter(lane)


def check(dataset: Pipeline, num_lanes: int) -> None:
    """Raises a SourceError that names the first node which cannot be split, and the way out; reads no data."""
    if found := find_uncuttable(dataset, num_lanes):
        raise _refusal(*found, num_lanes)


def find_uncuttable(dataset: Pipeline, num_lanes: int) -> tuple[Node, str] | None:
    """The first node that cannot be split into ``num_lanes`` lanes, and the reason; None if all can. Reads no data."""
    for node in walk(dataset):
        internals.check_known(node)
        if is_named(node, internals.SHARDED):
            return node, "it batches and shards by itself; pass the dataset that it was made of"
        if num_lanes == 1 or isinstance(node, grain.MapDataset):
            continue
        if is_named(node, internals.ZIP) and (inner := _not_one_to_one(node)):
            return (
                node,
                f"below it, {type(inner).__name__} drops, adds or moves elements, so lanes would pair other ones",
            )
        if is_named(node, internals.ZIP) and len(set(map(_batched_by, parents(node)))) > 1:
            return node, "its datasets are batched by different sizes, so lanes would pair other elements"
        if is_named(node, internals.INTERLEAVE):
            if found := _find_uncuttable_share(private(node, "datasets"), num_lanes):
                return found
        elif not (parents(node) or _is_sliceable(node) or is_named(node, _LEAVES)):
            return node, "it is a source without set_slice(slice, sequential_slice), so every lane would read all of it"
    return None


def _find_uncuttable_share(datasets: Datasets, num_lanes: int) -> tuple[Node, str] | None:
    """As :func:`find_uncuttable`, for an interleave of fewer datasets than lanes, which share the first ones."""
    first = _first_left(datasets, num_lanes) if len(datasets) < num_lanes else None
    found = None if first is None else find_uncuttable(first, num_lanes)
    return found and (found[0], f"{found[1]}, and {len(datasets)} datasets are fewer than {num_lanes} lanes")


def _refusal(node: Node, reason: str, num_lanes: int) -> SourceError:
    name = type(node).__name__
    lanes = f"{num_lanes} lanes" if num_lanes > 1 else "lanes"
    return SourceError(f"cannot cut {name} into {lanes}: {reason}. {internals.HOW_TO_OPEN}")


def _elements(records: Records, place: Place) -> Records:
    """The part's elements of a MapDataset."""
    if place.epoch:
        records = internals.EpochMapDataset(records, place.epoch)
    return records if place.num_lanes == 1 else records.slice(slice(place.lane_index, None, place.num_lanes))


def _cut_read(node: Node, place: Place, _copy: Copy) -> Node:
    options = private(node, "read_options")
    block = max(1, min(_MAX_BLOCK, _BLOCK_ELEMENTS // place.all_lanes))
    if options.prefetch_buffer_size > 0:  # never more elements at once than the user allowed
        block = min(block, options.prefetch_buffer_size)
    read_ahead = options.num_threads > 0 and options.prefetch_buffer_size > 0
    records = internals.parent(node)
    assert isinstance(records, grain.MapDataset)
    return LaneLeaf(ReadIterator, _elements(records, place), block, read_ahead)


def _cut_interleave(node: Node, place: Place, _copy: Copy) -> Node:
    datasets = private(node, "datasets")
    whole, shares = _assign_datasets(datasets, place)
    # A MapDataset of datasets continues with its later epochs past its length.
    later = place.epoch * len(datasets) if isinstance(datasets, grain.MapDataset) else 0

    def make_part(part_index: int) -> Pipeline | None:
        past = part_index - len(whole)
        index, lane_index, num_lanes = (whole[part_index], 0, 1) if past < 0 else shares[past]
        part = datasets[index + later]
        if part is None:
            return None
        salt = (*place.salt, index, lane_index)
        inner = dataclasses.replace(
            place, lane_index=lane_index, num_lanes=num_lanes, salt=salt, version=file_stream.CUT_BY_FILES
        )
        return cut(without_prefetch(part), inner)

    cycle = min(private(node, "cycle_length"), place.open_parts)
    unit = "records" if shares else "datasets"
    return LaneLeaf(InterleaveIterator, make_part, len(whole) + len(shares), cycle, unit)


def _assign_datasets(datasets: Datasets, place: Place) -> tuple[range, list[tuple[int, int, int]]]:
    """Assigns whole datasets round-robin, and splits those that remain, which keeps the lanes even.

    Returns:
      The indices of the lane's whole datasets, and its shares of others: index, lane index within it, number of lanes.
    """
    count, num_lanes = len(datasets), place.num_lanes
    left = _first_left(datasets, num_lanes)
    if left is None or find_uncuttable(left, num_lanes) is not None:
        return range(place.lane_index, count, num_lanes), []
    # Each remaining dataset is split into num_lanes shares, and each lane takes num_left of all these shares.
    num_left = count % num_lanes
    mine = range(place.lane_index * num_left, (place.lane_index + 1) * num_left)
    shares = [(count - num_left + share // num_lanes, share % num_lanes, num_lanes) for share in mine]
    return range(place.lane_index, count - num_left, num_lanes), shares


def _first_left(datasets: Datasets, num_lanes: int) -> Pipeline | None:
    """The first dataset that remains after whole rounds of ``num_lanes``; None if there is none."""
    count = len(datasets)
    if not count % num_lanes or count // num_lanes >= _MANY:
        return None
    first = datasets[count - count % num_lanes]
    return None if first is None else without_prefetch(first)


def _cut_parquet(node: Node, place: Place, _copy: Copy) -> Node:
    paths, options = private(node, "paths"), private(node, "read_kwargs")
    mine = _cut_paths(node, place)
    if round(mine.times_read, 1) > 1:
        _warn_shared(len(mine.left), len(paths), place.num_lanes, round(mine.times_read, 1), str(paths[0]))
    if not {"buffer_size", "pre_buffer", "filesystem"} & set(options):
        # By default Arrow buffers a whole row group of each file.
        options = {**options, "pre_buffer": False, "buffer_size": max(1 << 16, _BUFFER_BYTES // place.all_lanes)}
    cycle = min(_PARQUET_CYCLE, place.open_parts)
    # The memory of all open files of all lanes together stays constant.
    block_rows = max(64, _BLOCK_ROWS // place.all_lanes // cycle)

    def make_part(index: int) -> Pipeline:
        piece = mine.pieces[index]
        path = paths[piece.file_index]
        return LaneLeaf(ParquetIterator, path, piece.start, piece.stop, block_rows, options)

    return LaneLeaf(InterleaveIterator, make_part, len(mine.pieces), cycle, mine.unit)


def _cut_paths(node: Node, place: Place) -> file_stream.FileCut:
    """The part of each Parquet file that a lane reads."""
    paths, options, counts = private(node, "paths"), private(node, "read_kwargs"), place.counts

    def count(path: str) -> list[int] | None:
        try:
            with ParquetFile(path, **options) as file:
                return file.group_rows
        except CorruptDataError:
            if place.version == file_stream.CUT_BY_FILES:
                raise
            return None  # the lane that reads the file raises

    def rows_of(file_index: int) -> list[int] | None:
        path = paths[file_index]
        if counts.get(path) is None:
            counts[path] = count(path)
        return counts[path]

    if place.version >= file_stream.CUT_EVENLY and place.num_lanes > 1 and len(paths) <= file_stream.MAX_COUNTED:
        new = [path for path in paths if path not in counts]
        counts.update(zip(new, in_threads(count, new), strict=True))
    files = [file_stream.Piece(index) for index in range(len(paths))]
    return file_stream.cut_files(files, place.lane_index, place.num_lanes, rows_of, place.version)


def cut_version(dataset: Pipeline, place: Place) -> int:
    """The version of the rule by which a new stream's Parquet files are cut: the second where it makes a difference."""
    nodes = [node for node in walk(dataset) if is_named(node, internals.PARQUET)]
    is_even = any(_cut_paths(node, place).unit == "even" for node in nodes)
    return file_stream.CUT_EVENLY if is_even else file_stream.CUT_BY_FILES


def lane_length(dataset: Pipeline, place: Place) -> int | None:
    """Records that a lane reads from its sources, where they are Parquet files or at random; None if not counted."""
    total = 0
    for node in walk(dataset):
        if is_named(node, internals.PARQUET):
            for piece in _cut_paths(node, place).pieces:
                groups = place.counts.get(private(node, "paths")[piece.file_index])
                if piece.stop is None and groups is None:
                    return None
                total += (sum(groups or ()) if piece.stop is None else piece.stop) - piece.start
        elif is_named(node, internals.READ):
            records = internals.parent(node)
            assert isinstance(records, grain.MapDataset)
            total += len(range(place.lane_index, len(records), place.num_lanes))
        elif not (parents(node) or isinstance(node, grain.MapDataset)) or is_named(node, internals.LIMIT):
            return None
    return total


@functools.lru_cache(maxsize=1024)
def _warn_shared(num_shared: int, num_files: int, num_lanes: int, times: float, first: str) -> None:
    """Logs read amplification once per dataset and number of lanes, not once per lane (hence the cache)."""
    _logger.warning(
        "%d of the %d Parquet files from %s on are shared by %d lanes and have too few row groups: their rows are decoded "
        "%.1f times. More files, smaller row groups or fewer lanes avoid that",
        *(num_shared, num_files, first, num_lanes, times),
    )


def _cut_tfrecord(node: Node, place: Place, _copy: Copy) -> Node:
    return LaneLeaf(TFRecordIterator, private(node, "path"), place.lane_index, place.num_lanes)


def _cut_limit(node: Node, place: Place, copy: Copy) -> Node:
    # The lanes' counts add up to the limit.
    count = len(range(place.lane_index, private(node, "count"), place.num_lanes))
    return _with_parents(node, copy, count=count)


def _cut_index(node: Node, place: Place, copy: Copy) -> Node:
    function, first, step = private(node, "map_fn"), place.lane_index, place.num_lanes

    @functools.wraps(function)
    def map_fn(index: int, element: object) -> object:
        # The function expects the index in the whole stream, not in the lane.
        return function(first + index * step, element)

    return _with_parents(node, copy, map_fn=map_fn)


def _cut_seeded(node: Node, place: Place, copy: Copy) -> Node:
    seed = int(private(node, "seed"))
    if any(place.salt):
        # 31 bits, since Grain adds counters to the seed, which must stay below 2**32.
        seed = int(np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, *place.salt]).generate_state(1)[0]) >> 1
    return _with_parents(node, copy, seed=seed)


def _cut_repeat(node: Node, _place: Place, copy: Copy) -> Node:
    if private(node, "num_epochs") is not None:
        return _with_parents(node, copy)
    return _with_parents(node, lambda parent: LaneLeaf(NotEmptyIterator, copy(parent)))


def _with_parents(node: Node, copy: Copy, **changed: object) -> Node:
    return shallow_copy(node, parents=tuple(map(copy, parents(node))), **changed)


def _is_sliceable(node: Node) -> bool:
    return isinstance(node, grain.IterDataset) and callable(getattr(node, "set_slice", None))


def _cut_foreign(node: Node, place: Place) -> Node:
    """A user's source, split by its own ``set_slice`` as Grain does for its workers."""
    new: Any = copy_tree(node, lambda child: child if isinstance(child, grain.MapDataset) else None)
    if place.num_lanes == 1:
        return new
    before = _contents(new)
    # sequential_slice=False: strided elements, not a contiguous range.
    new.set_slice(slice(place.lane_index, None, place.num_lanes), False)
    if _contents(new) == before:
        raise _refusal(node, "its set_slice changed no attribute, so every lane would read all of it", place.num_lanes)
    return new


def _contents(node: Node) -> dict[str, object]:
    """Ids of the objects that a node's attributes hold, including items of lists, dicts and sets."""
    return {
        name: [id(value), *map(id, value)] if isinstance(value, list | dict | set) else id(value)
        for name, value in vars(node).items()
    }


def _not_one_to_one(node: Node) -> Node | None:
    """A node below a zip that does not map elements one to one; None if all do."""
    for child in parents(node):
        if isinstance(child, grain.MapDataset):
            found = sparse_node(child)
        else:
            found = _not_one_to_one(child) if is_named(child, internals.ONE_TO_ONE) else child
        if found is not None:
            return found
    return None


def _batched_by(node: Node) -> int:
    """How many elements of the MapDataset below make one of a part of a zip."""
    size = 1
    while isinstance(node, grain.IterDataset):
        if is_named(node, internals.BATCH):
            size *= private(node, "batch_size")
        node = parents(node)[0]
    return size


_CUTTERS: tuple[tuple[Sequence[str], Callable[[Node, Place, Copy], Node]], ...] = (
    (internals.READ, _cut_read),
    (internals.INTERLEAVE, _cut_interleave),
    (internals.PARQUET, _cut_parquet),
    (internals.TFRECORD, _cut_tfrecord),
    (internals.LIMIT, _cut_limit),
    (internals.INDEXED, _cut_index),
    (internals.SEEDED, _cut_seeded),
    (internals.REPEAT, _cut_repeat),
)
_LEAVES = (*internals.READ, *internals.INTERLEAVE, *internals.PARQUET, *internals.TFRECORD)


def walk(node: Node) -> list[Node]:
    """The node and all nodes below it, sources first, each once."""
    found: dict[int, Node] = {}

    def visit(current: Node) -> None:
        if id(current) not in found:
            inner = internals.source_of(current)
            for parent in (*parents(current), *((inner,) if isinstance(inner, NODES) else ())):
                visit(parent)
            found[id(current)] = current

    visit(node)
    return list(found.values())


def copy_tree(node: N, replace: Replace, copies: dict[int, Node] | None = None) -> N:
    """A copy of the tree below ``node`` that shares its data, files and the user's functions.

    ``replace`` returns a node's replacement, or None to copy it. ``copies``, by id of a node, keeps a node that is used
    twice a single one. ``copy.deepcopy``, which Grain uses, would also copy in-memory data, once per lane.
    """
    copies = {} if copies is None else copies
    if id(node) not in copies:
        new = replace(node)
        if new is None:
            new, foreign = shallow_copy(node), internals.is_foreign(node)
            for name, value in list(vars(new).items()):
                vars(new)[name] = _swap(value, lambda child: copy_tree(child, replace, copies), foreign)
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


def close_sources(dataset: Node) -> None:
    """Closes the files that :func:`batched_sources` opened for a pipeline."""
    for node in walk(dataset):
        source = internals.source_of(node)
        if isinstance(source, internals.BatchedSource):
            source.close()
        datasets = private(node, "datasets") if is_named(node, internals.INTERLEAVE) else ()
        if not isinstance(datasets, grain.MapDataset):  # whose datasets are made on each access
            for inner in filter(None, datasets):
                close_sources(inner)


def _array_record(source: object) -> internals.ReadsMany | None:
    """A meshfeed reader for the same ArrayRecord files, or None for other sources.

    Unlike ArrayRecord's own reader, it starts no threads per call and names damaged files, which that treats as empty.
    """
    files = internals.array_record_files(source)
    if not files:
        return None
    try:
        reader = ArrayRecord([path for path, _ in files])
    except CorruptDataError:
        raise
    except (SourceError, SettingsError):  # a path that only ArrayRecord's own reader can open
        return None
    # Only if both readers agree on the number of records of every file.
    return reader if [file.num_records for file in reader._shards.files] == [records for _, records in files] else None


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
                "mp_prefetch(num_workers=%d) is left out of the lanes; pass num_workers= to the feed", len(workers)
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
    return _with_parents(node, copy, batch_fn=make_batch)


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
            "the Grain pipeline ends in batch(%d), which makes each of its batches one record of the feed; remove "
            "batch(), and pass its size as global_batch_size",
            private(node, "batch_size"),
        )


def check_batched(dataset: Node, num_lanes: int = 1) -> None:
    """Raises SourceError if a pipeline ends in ``batch`` and its last batch is known to be short: records have one shape."""
    node = _last_batch(dataset)
    if node is None or is_named(node, internals.REBATCH):
        return
    if private(node, "drop_remainder") or internals.pads_batches(node):
        return
    length, size = _known_length(internals.parent(node)), private(node, "batch_size")
    if length is None or not any(part % size for part in (length // num_lanes, -(-length // num_lanes))):
        return
    lanes = "" if num_lanes == 1 else f" in each of {num_lanes} lanes"
    raise SourceError(
        f"the Grain pipeline ends in batch({size}), and its {length:,} elements do not fill the last batch{lanes}: each "
        "batch is one record of the feed, and records must have one shape. Remove batch() and pass its size "
        "as global_batch_size, or pass drop_remainder=True to batch()."
    )


def _known_length(node: Node) -> int | None:
    """Number of elements of a pipeline over all lanes; None if a node may drop or add some, or if it is infinite."""
    while is_named(node, internals.KEEP_LENGTH):
        node = internals.parent(node)
    if isinstance(node, grain.MapDataset) and sparse_node(node) is None and len(node) < ENDLESS:
        return len(node)
    return None
