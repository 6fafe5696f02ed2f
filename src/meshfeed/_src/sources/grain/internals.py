"""The private parts of Grain that are used here, and what happens in a version of Grain without them.

Grain has no public way to examine a pipeline, or to split one among more than its own workers. A node whose class or
attributes are not those listed here is refused by :func:`check_known`, or described by its elements
(``datasets.py``); other parts only save time, and are done without.
"""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

import grain

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.threads import Threads
from meshfeed._src.base.types import RandomAccessSource
from meshfeed._src.sources.checks import stopped

P = ParamSpec("P")
T = TypeVar("T")
Records: TypeAlias = grain.MapDataset[Any]
Pipeline: TypeAlias = grain.IterDataset[Any]
Node: TypeAlias = "Records | Pipeline"
GrainIterator: TypeAlias = grain.DatasetIterator[Any]
NODES = (grain.MapDataset, grain.IterDataset)

_logger = logging.getLogger("meshfeed.sources")

# Names of Grain's classes, by what a lane does with them. Compared by name, since most are in private modules.
READ = ("PrefetchIterDataset",)
INTERLEAVE = ("InterleaveIterDataset",)
PARQUET = ("ParquetIterDataset",)
TFRECORD = ("TFRecordIterDataset",)
LIMIT = ("LimitIterDataset",)
INDEXED = ("MapWithIndexIterDataset",)
REPEAT = ("RepeatIterDataset",)
SEEDED = ("RandomMapIterDataset", "WindowShuffleIterDataset", "PackIterDataset")
FLAT_MAP = ("FlatMapIterDataset",)
ZIP = ("ZipIterDataset",)
REBATCH = ("RebatchIterDataset",)
BATCH = ("BatchMapDataset", "BatchIterDataset", *REBATCH)
OPTIONS = ("WithOptionsIterDataset",)
PROCESSES = ("ProcessPrefetchIterDataset",)
PREFETCH = ("ThreadPrefetchIterDataset", *PROCESSES, "_MpContextIterDataset", "_LazyWorkerSliceIterDataset")
SHARDED = ("ElasticIterator", "_DataLoaderPipelineMarkerIterDataset")
SOURCE = ("SourceMapDataset",)
MIX = ("MixedMapDataset",)
SPARSE = ("FilterMapDataset", "FlatMapMapDataset")
_PASS = ("MapIterDataset", "_WithSeedIterDataset")
ONE_TO_ONE = (*READ, *INDEXED, "RandomMapIterDataset", "BatchIterDataset", *OPTIONS, *ZIP, *_PASS)
KEEP_LENGTH = (*READ, *INDEXED, "RandomMapIterDataset", "WindowShuffleIterDataset", "MapIterDataset", *OPTIONS)

_PIPELINES = {
    *(*READ, *INTERLEAVE, *PARQUET, *TFRECORD, *LIMIT, *INDEXED, *SEEDED, *ZIP, *BATCH, *OPTIONS, *PREFETCH, *SHARDED),
    *(*_PASS, *FLAT_MAP, "CacheIterDataset", "ConcatThenSplitIterDataset", "FilterIterDataset"),
    *("MixedIterDataset", *REPEAT, "_DataLoaderStateIterDataset", "_OperationIterDataset"),
}
_RECORDS = {
    *(*SOURCE, *MIX, *SPARSE, "BatchMapDataset", "MapMapDataset", "MapWithIndexMapDataset", "RandomMapMapDataset"),
    *("RangeMapDataset", "RepeatMapDataset", "ShuffleMapDataset", "SliceMapDataset", "WindowShuffleMapDataset"),
    *("ZipMapDataset", "_WithSeedMapDataset", "_SamplerMapDataset", "_ShardMapDataset"),
}
# Class → attributes without which its nodes cannot be split or described.
_ATTRIBUTES = {
    **dict.fromkeys(READ, ("read_options", "parents")),
    **dict.fromkeys(INTERLEAVE, ("datasets", "cycle_length")),
    **dict.fromkeys(PARQUET, ("paths", "read_kwargs")),
    **dict.fromkeys(TFRECORD, ("path",)),
    **dict.fromkeys(LIMIT, ("count", "parents")),
    **dict.fromkeys(INDEXED, ("map_fn", "parents")),
    **dict.fromkeys(REPEAT, ("num_epochs", "parents")),
    **dict.fromkeys(SEEDED, ("seed", "parents")),
    **dict.fromkeys(("BatchMapDataset", "BatchIterDataset"), ("batch_size", "batch_fn", "drop_remainder", "parents")),
    **dict.fromkeys(FLAT_MAP, ("transform", "parents")),
    **dict.fromkeys(PREFETCH, ("parents",)),
    **dict.fromkeys(PROCESSES, ("worker_init_fn", "parents")),
    **dict.fromkeys(SOURCE, ("source",)),
    **dict.fromkeys(MIX, ("selection_map",)),
}
CHANGE_NO_RECORD = {
    *("_parents", "has_child", "_read_options", "_record_metrics"),
    *("_num_make_iter_threads", "_make_iter_buffer_size", "_iter_buffer_size"),
}
"""Attributes that a fingerprint leaves out."""
REDUNDANT = {"_selection_map", "_map_fn", "original_start", "original_len", "_paths", "_path"}
"""Attributes that a fingerprint leaves out because others, or ``datasets.py``, describe them."""

OLDEST = "0.2.18"  # of pyproject.toml, with which the tests are run too
HOW_TO_OPEN = """\
To split it yourself, open one pipeline per lane:

    def open(lane_index, num_lanes):
        return iter(make_dataset(files[lane_index::num_lanes]))

    source = meshfeed.sources.Stream(open)"""


def _unsupported(what: str) -> SourceError:
    return SourceError(
        f"Grain {grain.__version__} {what}, so this version of meshfeed cannot split the pipeline into lanes. Upgrade "
        f"meshfeed, or install the oldest version of Grain that it supports: pip install 'grain=={OLDEST}'. {HOW_TO_OPEN}"
    )


class ReadsMany(RandomAccessSource, Protocol):
    """A data source, as ``grain.MapDataset.source`` takes, that also reads several records at once."""

    def __getitems__(self, indices: Sequence[int], /) -> Sequence[Any]: ...


def is_named(node: object, names: Sequence[str]) -> bool:
    """Whether the node is an instance of a class with one of these names, or of a subclass."""
    return any(base.__name__ in names for base in type(node).__mro__)


def is_foreign(node: object, *known: str) -> bool:
    """Whether the node's class is the user's: defined in neither Grain, meshfeed nor the packages ``known``."""
    return type(node).__module__.partition(".")[0] not in ("grain", "meshfeed", *known)


def is_unknown(node: Node) -> bool:
    """Whether the node's class is one of Grain's that is not listed here."""
    kind = type(node)
    known = _PIPELINES if isinstance(node, grain.IterDataset) else _RECORDS
    return kind.__module__.partition(".")[0] == "grain" and not any(base.__name__ in known for base in kind.__mro__)


def check_known(node: Node) -> None:
    """Raises SourceError if a node's class is one of Grain's that is not listed here, or lacks a private attribute."""
    if isinstance(node, grain.IterDataset) and is_unknown(node):
        raise _unsupported(f"has a {type(node).__name__}, which is not known")
    for kind in type(node).__mro__:
        for name in _ATTRIBUTES.get(kind.__name__, ()):
            private(node, name)


def private(node: Node, name: str) -> Any:
    """A private attribute of a Grain node; ``name`` without the underscore. Raises SourceError if there is none."""
    try:
        return getattr(node, f"_{name}")
    except AttributeError:
        raise _unsupported(f"has no {type(node).__name__}._{name}") from None


def parents(node: Node) -> Sequence[Node]:
    """The datasets that a node reads; empty if a user's class never set them."""
    return getattr(node, "_parents", ())


def parent(node: Node) -> Node:
    """The only dataset that a node reads."""
    (only,) = private(node, "parents")
    return only


def source_of(node: Node) -> Any:
    """The data source, or the MapDataset, of a source node; None for other nodes."""
    return private(node, "source") if is_named(node, SOURCE) else None


def shallow_copy(node: object, **changed: object) -> Any:
    """A copy of one node without cached properties; ``changed`` has private attributes without the underscore."""
    new = copy.copy(node)
    for name in list(vars(new)):
        if isinstance(getattr(type(new), name, None), functools.cached_property):
            del vars(new)[name]
    vars(new).update({f"_{name}": value for name, value in changed.items()})
    return new


def skip_traceback_filter(dataset: Pipeline) -> Pipeline:
    """Marks a lane as the child of another dataset.

    Otherwise Grain wraps its iterators' class in one more traceback filter on every call. Without the attribute, calls
    are slower.
    """
    dataset.has_child = True  # pyright: ignore[reportAttributeAccessIssue]
    return dataset


def refuse_stops(dataset: Pipeline) -> None:
    """Makes a StopIteration of the user's functions a SourceError; Grain takes it for the end of the data."""
    for name in ("_map_fn", "_filter_fn", "_batch_fn"):
        function = vars(dataset).get(name)
        if callable(function):
            vars(dataset)[name] = _without_stops(function)
    if is_named(dataset, FLAT_MAP):
        vars(dataset)["_transform"] = _FlatMap(private(dataset, "transform"))


def _without_stops(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            name = getattr(function, "__qualname__", type(function).__name__)
            raise stopped(f"{name}, a function of the Grain pipeline,") from error

    return call


class _FlatMap(grain.experimental.FlatMapTransform):
    """A user's transform whose StopIteration is a SourceError; Grain takes the method from it at each ``iter``."""

    def __init__(self, transform: grain.experimental.FlatMapTransform) -> None:
        self.max_fan_out = transform.max_fan_out
        self._spread = _without_stops(transform.flat_map)

    def flat_map(self, element: Any) -> Sequence[Any]:
        return self._spread(element)


def inherit_options(outer: GrainIterator, inner: GrainIterator) -> None:
    """Applies the dataset options of an iterator to one that it opens."""
    try:
        context = inner._ctx
        context.dataset_options = outer._ctx.dataset_options.merge(context.dataset_options)
    except AttributeError as error:
        raise _unsupported(f"keeps the options of an iterator elsewhere ({error})") from None


def set_up(records: Records) -> None:
    """Makes a dataset safe to read from several threads: Grain sets up its statistics on first use."""
    _ = getattr(records, "_stats", None)


def read_many(records: Records, indices: Sequence[int]) -> Sequence[Any]:
    """Several elements of a MapDataset, read at once if this version of Grain supports it, else one by one."""
    batched = getattr(records, "_getitems", None)
    return [records[index] for index in indices] if batched is None else batched(indices)


class BatchedSource:
    """A user's data source from which Grain reads many records at once, through its private method ``_getitems``."""

    def __init__(self, source: RandomAccessSource, reader: ReadsMany) -> None:
        self.source = source
        self._records = reader

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def _getitems(self, indices: Sequence[int]) -> Sequence[Any]:
        return self._records.__getitems__(indices)

    def close(self) -> None:
        """Closes a reader that is not the user's; it reopens its files when it is used again."""
        if self._records is not self.source:
            hooks.close(self._records)


def is_read_at_once(source: object) -> bool:
    """Whether Grain itself reads several records of a data source at once."""
    return hasattr(source, "_getitems")


class EpochMapDataset(grain.MapDataset):
    """A later epoch of a MapDataset, in Grain's own numbering, in which each epoch is reshuffled."""

    def __init__(self, records: Records, epoch: int) -> None:
        super().__init__(records)
        self._records = records
        self._epoch = epoch
        self._offset = epoch * len(records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._records[index + self._offset]

    def _getitems(self, indices: Sequence[int]) -> Sequence[Any]:
        return read_many(self._records, [index + self._offset for index in indices])

    def __str__(self) -> str:
        return f"EpochMapDataset(epoch={self._epoch})"


def array_record_files(source: object) -> list[tuple[str, int]] | None:
    """Paths and numbers of records of the files of an ``ArrayRecordDataSource``.

    None for other data sources, for one with reader options or row ranges, which meshfeed's reader does not support, and
    if this version of array_record keeps them elsewhere: then Grain reads the files itself, which takes longer.
    """
    if not is_named(source, ("ArrayRecordDataSource",)) or is_foreign(source, "array_record"):
        return None
    try:
        instructions, options = source._read_instructions, source._reader_options_string  # pyright: ignore[reportAttributeAccessIssue]
        files = [(part.filename, part.num_records) for part in instructions]
        return None if options or any(part.start for part in instructions) else files
    except AttributeError:
        return None


def initializes_workers(node: Node) -> bool:
    """Whether a node of ``mp_prefetch`` has a ``worker_init_fn`` of the user."""
    initialize = private(node, "worker_init_fn")
    # Grain passes a list of functions to its own, and is the first of them.
    only_grains = (
        isinstance(initialize, functools.partial) and len(initialize.args) > 0 and len(initialize.args[0]) == 1
    )
    return initialize is not None and not only_grains


def without_shared_memory(make_batch: Callable[..., Any]) -> Callable[..., Any] | None:
    """A batch function without the shared-memory output that ``mp_prefetch`` enables; None if it has none."""
    if isinstance(make_batch, functools.partial) and "output_to_shared_memory" in make_batch.keywords:
        return make_batch.func
    return None


def pads_batches(node: Node) -> bool:
    """Whether a batch node has a batch function of the user, which may pad the last batch."""
    return getattr(private(node, "batch_fn"), "__name__", "") != "make_batch"


def use_daemon_threads(iterator: object) -> None:
    """Makes the reader threads of a Grain iterator, and of the iterators below it, daemons.

    ``to_iter_dataset`` reads in a ``ThreadPoolExecutor``, whose threads Python joins at exit: if a read hangs, the
    process never ends. The number of threads and the order of elements do not change. If Grain keeps the threads
    elsewhere, the iterator is left unchanged, with a warning.
    """
    if not _keeps_executors():
        return
    for node in _iterators_below(iterator):
        executor = getattr(node, "_executor", None)
        if isinstance(executor, concurrent.futures.ThreadPoolExecutor):
            node._executor = Threads(node._target_num_threads, "meshfeed-grain-prefetch")
            executor.shutdown(wait=False)  # still completes reads that a running iterator has submitted


def _iterators_below(iterator: object) -> Iterator[Any]:
    waiting, seen = [iterator], set()
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += [*getattr(node, "_parents", ()), *filter(None, [getattr(node, "_iterator", None)])]


@functools.cache
def _keeps_executors() -> bool:
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)  # a range has no threads by default
    iterator = grain.MapDataset.range(1).to_iter_dataset(options).map(str).__iter__()
    below = list(_iterators_below(iterator))
    if any(hasattr(node, "_executor") and hasattr(node, "_target_num_threads") for node in below):
        return True
    _logger.warning(
        "Grain %s keeps its reader threads elsewhere; if one hangs in a read, the process will wait for it at exit",
        grain.__version__,
    )
    return False
