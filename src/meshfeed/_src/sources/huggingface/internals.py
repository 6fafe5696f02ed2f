"""The private parts of datasets that are used here, and what happens in a version of datasets without them.

A streaming dataset is a tree of nodes without a public interface, whose own split into shards cannot be resumed on a
different number of hosts. :func:`check_known` refuses trees with other nodes than those listed here; this module cannot
be imported if a function is missing. Only map-style datasets have a public way to fall back to (``table.py``).
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

import datasets
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset

from meshfeed._src.base.errors import SourceError

OLDEST = "5.0"  # of pyproject.toml, with which the tests are run too


def _unsupported(what: str) -> SourceError:
    return SourceError(
        f"datasets {datasets.__version__} {what}, so this version of meshfeed cannot read the dataset. Upgrade meshfeed, or "
        f"install the oldest version of datasets that it supports: pip install 'datasets~={OLDEST}.0'. Or open each lane "
        "yourself: meshfeed.sources.Stream(lambda lane_index, num_lanes: "
        "iter(datasets.distributed.split_dataset_by_node(dataset, lane_index, num_lanes)))."
    )


try:
    from datasets.features.features import require_decoding as require_decoding
    from datasets.formatting import PythonFormatter as PythonFormatter
    from datasets.iterable_dataset import StepExamplesIterable, _BaseExamplesIterable
    from datasets.packaged_modules.arrow.arrow import Arrow
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.table import table_cast as table_cast
    from datasets.utils.file_utils import xgetsize as xgetsize
    from datasets.utils.file_utils import xopen as xopen

    _FROM_SHARDS = Dataset._generate_tables_from_shards
    _FROM_CACHE_FILE = Dataset._generate_tables_from_cache_file
    _CAST_TABLE = Arrow._cast_table
except (ImportError, AttributeError) as error:
    raise _unsupported(f"lacks a function ({error})") from error

State: TypeAlias = "dict[str, Any]"
Example: TypeAlias = "dict[str, Any]"


class Node(Protocol):
    """A node of the tree of a streaming dataset."""

    @property
    def features(self) -> Features | None: ...

    @property
    def iter_arrow(self) -> Callable[[], Iterator[tuple[object, pa.Table]]] | None: ...

    def __iter__(self) -> Iterator[tuple[Any, Example]]: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state_dict: State) -> State: ...


# Names of the library's nodes, by what a lane does with them. Compared by name, to tell a renamed one from a missing one.
LEAVES = ("ExamplesIterable", "ArrowExamplesIterable")
ARROW_LEAF = "ArrowExamplesIterable"
SHUFFLED = "BufferShuffledExamplesIterable"
SELECTED = "SelectColumnsIterable"
REBATCHED = "RebatchedArrowExamplesIterable"
FORMATTED = "FormattedExamplesIterable"
MAPPED = "MappedExamplesIterable"
FILTERED = "FilteredExamplesIterable"
SKIPPED = "SkipExamplesIterable"
TAKEN = "TakeExamplesIterable"
IN_TURN = "CyclingMultiSourcesExamplesIterable"
AT_RANDOM = "RandomlyCyclingMultiSourcesExamplesIterable"
ROW_BY_ROW = (SELECTED, REBATCHED, FORMATTED)
BY_PART = ("RepeatExamplesIterable", IN_TURN, AT_RANDOM, "VerticallyConcatenatedMultiSourcesExamplesIterable")

_ONE, _SEVERAL = ("ex_iterable",), ("ex_iterables",)
_FUNCTION = (*_ONE, "function", "with_indices", "batched", "formatting", "is_batch_accumulate_arrow_table_function")
# Class → attributes without which its nodes cannot be split.
_NODES = {
    "ExamplesIterable": ("generate_examples_fn", "kwargs"),
    ARROW_LEAF: ("generate_tables_fn", "kwargs"),
    SHUFFLED: (*_ONE, "buffer_size"),
    SELECTED: (*_ONE, "column_names"),
    REBATCHED: _ONE,
    FORMATTED: (*_ONE, "formatting"),
    MAPPED: _FUNCTION,
    FILTERED: (*_FUNCTION, "mask_function"),
    SKIPPED: (*_ONE, "n"),
    TAKEN: (*_ONE, "n"),
    "StepExamplesIterable": (*_ONE, "step", "offset"),
    "RepeatExamplesIterable": (*_ONE, "num_times"),
    "InterleavedShardsExamplesIterable": _ONE,
    IN_TURN: (*_SEVERAL, "stopping_strategy"),
    AT_RANDOM: (*_SEVERAL, "stopping_strategy", "probabilities", "generator"),
    "VerticallyConcatenatedMultiSourcesExamplesIterable": _SEVERAL,
    "HorizontallyConcatenatedMultiSourcesExamplesIterable": _SEVERAL,
}
_METHODS = ("features", "iter_arrow", "state_dict", "load_state_dict", "_init_state_dict", "_state_dict")


class ExamplesNode(_BaseExamplesIterable):
    """A node of our own in the tree of a streaming dataset: one shard, whose state holds what was read."""

    _sleep_on_threads_shutdown = False  # otherwise datasets sleeps after each pass, to let threads end

    def first_state(self) -> State:
        """The state before the first example."""
        raise NotImplementedError

    @property
    def state(self) -> State:
        """The current state, to be changed in place; a tree is started before it is read."""
        return cast("State", self._state_dict)

    def _init_state_dict(self) -> State:
        self._state_dict = {**self.first_state(), "type": type(self).__name__}
        return self._state_dict

    @property
    def is_typed(self) -> bool:
        return self.features is not None


def tree_of(dataset: IterableDataset) -> Node:
    """The last node of a streaming dataset, which must not have been split by node."""
    if private(dataset, "distributed") is not None:
        raise SourceError(
            "the dataset was split by node already (split_dataset_by_node). Pass the whole dataset: the feed splits it "
            "into lanes, which a different number of hosts can resume."
        )
    return private(dataset, "ex_iterable")


def dataset_of(tree: Node, dataset: IterableDataset) -> IterableDataset:
    """A streaming dataset over ``tree``, with the features and access tokens of ``dataset``."""
    tokens = private(dataset, "token_per_repo_id")
    try:
        return IterableDataset(tree, info=dataset.info.copy(), token_per_repo_id=tokens)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise _unsupported(f"creates datasets differently ({error})") from error


def private(dataset: Dataset | IterableDataset, name: str) -> Any:
    """A private attribute of a dataset; ``name`` without the underscore. Raises SourceError if there is none."""
    try:
        return getattr(dataset, f"_{name}")
    except AttributeError:
        raise _unsupported(f"has no {type(dataset).__name__}._{name}") from None


def row_indices(dataset: Dataset) -> tuple[list[pa.Array] | None, bool]:
    """The rows of the table that a map-style dataset selects, and whether they are known.

    ``shuffle`` and ``select`` leave the table unchanged and keep row numbers in a second table. None for all rows in
    order.
    """
    try:
        indices = dataset._indices
        return None if indices is None else indices.table.column(0).chunks, True
    except AttributeError:
        return None, False


def kind_of(node: Node) -> str:
    """The name of a node's class."""
    return type(node).__name__


def short_name(node: Node) -> str:
    """The name of a node's class for messages, such as "Skip"."""
    return kind_of(node).removesuffix("ExamplesIterable").removesuffix("Iterable")


def check_known(node: Node) -> None:
    """Raises SourceError if a node's class is not listed here, so that it cannot be split, or lacks an attribute."""
    if kind_of(node) not in _NODES:
        raise _unsupported(f"has a {kind_of(node)}, which is not known")
    for name in (*_NODES[kind_of(node)], *_METHODS):
        if not hasattr(node, name):
            raise _unsupported(f"has no {kind_of(node)}.{name}")


def children_of(node: Any) -> list[Node]:
    """The nodes that a node reads."""
    return [node.ex_iterable] if hasattr(node, "ex_iterable") else list(getattr(node, "ex_iterables", ()))


def with_children(node: Node, read: Callable[[Node], Node]) -> Any:
    """A copy of a node that reads ``read(child)`` for each child and shares no iteration state."""
    mine: Any = copy.copy(node)
    mine._state_dict = None
    if hasattr(mine, "_owned_loops_and_tasks"):  # tasks of async functions; a copy owns its own
        mine._owned_loops_and_tasks = []
    if hasattr(mine, "ex_iterable"):
        mine.ex_iterable = read(mine.ex_iterable)
    else:
        mine.ex_iterables = [read(child) for child in mine.ex_iterables]
    return mine


def start(node: Any) -> None:
    """Sets a node to before its first example."""
    node._init_state_dict()


def end_tasks(node: Any) -> None:
    """Ends the async functions that a node has begun, and the event loops in which it runs them: each holds 3 descriptors.

    Otherwise that is left to the garbage collector, which training loops often disable.
    """
    started: list[tuple[asyncio.AbstractEventLoop, list[asyncio.Task[object]]]]
    started = getattr(node, "_owned_loops_and_tasks", [])
    while started:
        loop, tasks = started.pop()
        if loop.is_running():  # that of a notebook, or of a read that hangs
            continue
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.close()


def every_nth(node: Node, step: int, offset: int) -> Node:
    """A node that yields the examples ``offset``, ``offset + step``, … of ``node``."""
    return StepExamplesIterable(node, step=step, offset=offset)  # pyright: ignore[reportArgumentType]


def has_exact_state(node: Node) -> bool:
    """Whether a node's state holds all of its position; ``batch(by_column=)`` also buffers the rows of a group."""
    return not getattr(node, "is_batch_accumulate_arrow_table_function", False)


def function_of(node: Node) -> Callable[..., object] | None:
    """The user's function of a ``map`` or ``filter``; None for other nodes."""
    return getattr(node, "mask_function", None) or getattr(node, "function", None)


def function_name(function: Callable[..., object] | None) -> str:
    """A function's qualified name, which is the same in every process, including those of functions that it wraps."""
    if function is None:
        return "none"
    if isinstance(function, functools.partial):
        inner = [function.func, *(arg for arg in function.args if callable(arg))]
        return "partial(" + ", ".join(function_name(part) for part in inner) + ")"
    name = getattr(function, "__qualname__", None)
    return name if name is not None else type(function).__qualname__


# Options of datasets' own readers that decide which rows there are.
_ROW_OPTIONS = (
    *("filters", "on_bad_files", "on_bad_lines", "header", "skiprows", "nrows", "skipfooter", "comment"),
    *("skip_blank_lines", "field", "sample_by"),
)
_NO_FILES = ("generator", "spark", "sql")  # of datasets' own readers, those of the user's code or of a database


class Leaf:
    """What a leaf reads: a generator of tables or examples, and its arguments, in which lists hold one item per file."""

    def __init__(self, node: Any) -> None:
        self.is_table = kind_of(node) == ARROW_LEAF
        self.generate: Callable[..., Iterator[tuple[Any, Any]]] = (
            node.generate_tables_fn if self.is_table else node.generate_examples_fn
        )
        self.kwargs: Mapping[str, Any] = node.kwargs
        self.builder: Any = getattr(self.generate, "__self__", None)

    @property
    def shards(self) -> tuple[Sequence[Dataset], int] | None:
        """The shards of a map-style dataset and the rows per table; None for other leaves."""
        return (self.kwargs["shards"], self.kwargs["batch_size"]) if self.generate is _FROM_SHARDS else None

    @property
    def arrow_files(self) -> tuple[list[str], Callable[[pa.Table], pa.Table] | None] | None:
        """Paths of Arrow files, and the function that casts their tables; None for other leaves."""
        if self.generate is _FROM_CACHE_FILE:
            return [self.kwargs["filename"]], None
        if self.is_table and isinstance(self.builder, Arrow):
            return [str(path) for path in self.kwargs["files"]], self.builder._cast_table
        return None

    @property
    def is_plain_parquet(self) -> bool:
        """Whether it reads all rows of Parquet files; filters and other ``on_bad_files`` settings change the rows."""
        if not self.is_table or not isinstance(self.builder, Parquet):
            return False
        config: Any = self.builder.config
        return config.filters is None and config.on_bad_files == "error"

    @property
    def packaged_format(self) -> str | None:
        """The name of datasets' own reader of files, such as ``"json"``; None for other leaves."""
        package, _, name = type(self.builder).__module__.rpartition(".")
        return name if package.startswith("datasets.packaged_modules.") and name not in _NO_FILES else None

    @property
    def is_of_user(self) -> bool:
        """Whether it is a generator of the user, to which a list of names need not be one of files."""
        return self.packaged_format is None

    @property
    def row_options(self) -> dict[str, str]:
        """The options of datasets' own reader that decide which rows there are; empty for other leaves."""
        config = getattr(self.builder, "config", None) if self.packaged_format else None
        return {name: str(getattr(config, name)) for name in _ROW_OPTIONS if hasattr(config, name)}

    def parts(self) -> list[Mapping[str, Any]]:
        """The arguments of each file."""
        lists = {name: value for name, value in self.kwargs.items() if isinstance(value, list)}
        lengths = {len(value) for value in lists.values()}
        if len(lengths) > 1:
            raise SourceError(
                f"the lists {sorted(lists)} among the dataset's gen_kwargs have different lengths, so it cannot be split "
                "into files. Pass one list of files, and tuples for other arguments."
            )
        if lengths <= {0, 1}:
            return [self.kwargs]
        return [
            {name: [value[index]] if name in lists else value for name, value in self.kwargs.items()}
            for index in range(lengths.pop())
        ]
