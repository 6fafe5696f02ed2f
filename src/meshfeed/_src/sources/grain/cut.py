"""Splits a Grain IterDataset into lanes at its sources.

Grain splits a pipeline among its workers in the same way: each gets a copy whose sources are sliced. Here:

* a reader of a MapDataset (``to_iter_dataset``) takes elements i, i + L, i + 2L, …; in epoch e, those of Grain's own
  epoch e, whose shuffles differ;
* an interleave takes whole datasets and splits the remaining ones; Parquet files are split by files, then row groups,
  then row ranges; a TFRecord file by records;
* seeds of ``random_map``, ``WindowShuffle`` and packing become (seed, lane, epoch), since otherwise all lanes would
  draw the same numbers; lane 0 of epoch 0 keeps the seed.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grain
import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.sources.files import stream as file_stream
from meshfeed._src.sources.files.parquet import ParquetFile
from meshfeed._src.sources.grain import internals, leaves
from meshfeed._src.sources.grain.internals import Node, Pipeline, Records, is_named, parents, private
from meshfeed._src.sources.grain.tree import copy_tree, sparse_node, walk, without_prefetch

_logger = logging.getLogger("meshfeed.sources")

_BLOCK_ELEMENTS = 512  # over all lanes: about as many as Grain buffers for one iterator (500)
_MAX_BLOCK = 64
_BLOCK_ROWS = 8192  # decoded at a time, over all lanes
_BUFFER_BYTES = 1 << 23  # read buffers of column chunks, over all lanes
_PARQUET_CYCLE = 16  # files that Grain interleaves
_OPEN_PARTS = 64  # open files over all lanes, to keep memory independent of the number of lanes
_MANY = 1 << 16  # above this, parts are not listed: an infinite dataset of datasets has 2**63

Copy: TypeAlias = Callable[[Node], Node]
Datasets: TypeAlias = "Sequence[Node | None] | Records"


@dataclasses.dataclass(frozen=True)
class Place:
    """Which part of a pipeline's data to read.

    Attributes:
      lane_index: index of the part, 0 … num_lanes - 1.
      num_lanes: number of parts into which this node's data is split.
      epoch: the epoch.
      all_lanes: number of lanes of the whole pipeline, which share the memory limits.
      salt: integers that make the seeds of this part differ from those of other parts.
    """

    lane_index: int
    num_lanes: int
    epoch: int
    all_lanes: int
    salt: tuple[int, ...]

    @property
    def open_parts(self) -> int:
        """The most files or datasets that a lane has open at a time."""
        return max(1, _OPEN_PARTS // self.all_lanes)


def cut(dataset: Pipeline, place: Place) -> Pipeline:
    """One lane of a pipeline: an IterDataset over its part of the data.

    Raises:
      SourceError: a node cannot be split into lanes; names the node and shows how to write ``Stream(open)``.
    """
    check(dataset, place.num_lanes)
    copies: dict[int, Node] = {}

    def replace(node: Node) -> Node | None:
        if isinstance(node, grain.MapDataset):  # below a user's IterDataset
            return _elements(node, place)
        for names, cutter in _CUTTERS:
            if is_named(node, names):
                return cutter(node, place, lambda child: copy_tree(child, replace, copies))
        return _cut_foreign(node, place) if _is_sliceable(node) else None

    return internals.skip_traceback_filter(copy_tree(dataset, replace, copies))


def check(dataset: Pipeline, num_lanes: int) -> None:
    """Checks that a pipeline can be split into lanes; reads no data.

    Raises:
      SourceError: a node cannot be split into lanes; names the node.
    """
    if found := find_uncuttable(dataset, num_lanes):
        raise _refusal(*found, num_lanes)


def find_uncuttable(dataset: Pipeline, num_lanes: int) -> tuple[Node, str] | None:
    """The first node that cannot be split into ``num_lanes`` lanes, and the reason; None if all can. Reads no data.

    Raises:
      SourceError: a node that this version of meshfeed does not support.
    """
    for node in walk(dataset):
        internals.check_known(node)
        if is_named(node, internals.SHARDED):
            return node, "it batches and shards by itself; pass the dataset that it was made of"
        if num_lanes == 1 or isinstance(node, grain.MapDataset):
            continue
        if is_named(node, internals.ZIP):
            inner = _not_one_to_one(node)
            if inner is not None:
                return node, f"below it, {inner} drops, adds or moves elements, so that lanes would pair other ones"
        if is_named(node, internals.INTERLEAVE):
            datasets = private(node, "datasets")
            first = _first_left(datasets, num_lanes)
            found = find_uncuttable(first, num_lanes) if first is not None and len(datasets) < num_lanes else None
            if found is not None:
                return found[0], f"{found[1]}, and {len(datasets)} datasets are fewer than {num_lanes} lanes"
        elif not parents(node) and not _is_sliceable(node) and not is_named(node, _LEAVES):
            return node, "it is a source without set_slice(slice, sequential_slice), so every lane would read all of it"
    return None


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
    return leaves.LaneLeaf(leaves.ReadIterator, _elements(records, place), block, read_ahead)


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
        inner = dataclasses.replace(place, lane_index=lane_index, num_lanes=num_lanes, salt=salt)
        return cut(without_prefetch(part), inner)

    cycle = min(private(node, "cycle_length"), place.open_parts)
    unit = "records" if shares else "datasets"
    return leaves.LaneLeaf(leaves.InterleaveIterator, make_part, len(whole) + len(shares), cycle, unit)


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

    def rows_of(file_index: int) -> list[int]:
        with ParquetFile(paths[file_index], **options) as file:
            return file.group_rows

    files = [file_stream.Piece(index) for index in range(len(paths))]
    mine = file_stream.cut_files(files, place.lane_index, place.num_lanes, rows_of)
    if mine.times_read > 1:
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
        return leaves.LaneLeaf(leaves.ParquetIterator, path, piece.start, piece.stop, block_rows, options)

    return leaves.LaneLeaf(leaves.InterleaveIterator, make_part, len(mine.pieces), cycle, mine.unit)


@functools.lru_cache(maxsize=1024)
def _warn_shared(num_shared: int, num_files: int, num_lanes: int, times: float, first: str) -> None:
    """Logs read amplification once per dataset and number of lanes, not once per lane (hence the cache)."""
    _logger.warning(
        "%d of the %d Parquet files from %s on are shared by %d lanes and have too few row groups: their rows are decoded "
        "%.1f times. More files, smaller row groups or fewer lanes avoid that",
        *(num_shared, num_files, first, num_lanes, times),
    )


def _cut_tfrecord(node: Node, place: Place, _copy: Copy) -> Node:
    return leaves.LaneLeaf(leaves.TFRecordIterator, private(node, "path"), place.lane_index, place.num_lanes)


def _cut_limit(node: Node, place: Place, copy: Copy) -> Node:
    # The lanes' counts add up to the limit.
    count = len(range(place.lane_index, private(node, "count"), place.num_lanes))
    return _with_parents(node, copy, count=count) if count else leaves.LaneLeaf(leaves.NoRecordsIterator)


def _cut_index(node: Node, place: Place, copy: Copy) -> Node:
    function = private(node, "map_fn")
    first, step = (
        place.lane_index,
        place.num_lanes,
    )  # the function expects the index in the whole stream, not in the lane
    return _with_parents(node, copy, map_fn=lambda index, element: function(first + index * step, element))


def _cut_seeded(node: Node, place: Place, copy: Copy) -> Node:
    seed = int(private(node, "seed"))
    if any(place.salt):
        # 31 bits, since Grain adds counters to the seed, which must stay below 2**32.
        seed = int(np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, *place.salt]).generate_state(1)[0]) >> 1
    return _with_parents(node, copy, seed=seed)


def _with_parents(node: Node, copy: Copy, **changed: object) -> Node:
    return internals.shallow_copy(node, parents=tuple(map(copy, parents(node))), **changed)


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


def _not_one_to_one(node: Node) -> str | None:
    """The class name of a node below a zip that does not map elements one to one; None if all do."""
    for child in parents(node):
        if isinstance(child, grain.MapDataset):
            found = sparse_node(child)
        elif is_named(child, internals.ONE_TO_ONE):
            if name := _not_one_to_one(child):
                return name
            continue
        else:
            found = child
        if found is not None:
            return type(found).__name__
    return None


_CUTTERS: tuple[tuple[Sequence[str], Callable[[Node, Place, Copy], Node]], ...] = (
    (internals.READ, _cut_read),
    (internals.INTERLEAVE, _cut_interleave),
    (internals.PARQUET, _cut_parquet),
    (internals.TFRECORD, _cut_tfrecord),
    (internals.LIMIT, _cut_limit),
    (internals.INDEXED, _cut_index),
    (internals.SEEDED, _cut_seeded),
)
_LEAVES = (*internals.READ, *internals.INTERLEAVE, *internals.PARQUET, *internals.TFRECORD)
