"""Streaming Hugging Face datasets as lanes."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import SettingsError, SourceError, StateMismatchError
from meshfeed._src.base.machine import available_cpus
from meshfeed._src.base.ownership import own
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.sources.checks import stopped
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.stream import CUT_BY_FILES, CUT_EVENLY
from meshfeed._src.sources.huggingface import internals
from meshfeed._src.sources.huggingface.arrow import (
    check_columns,
    chosen,
    dtypes_of,
    record_to_numpy,
    stored_values,
    table_rows,
)
from meshfeed._src.sources.huggingface.cut import (
    Counts,
    FeatureCast,
    LaneCut,
    check_repeats,
    check_tree,
    cut_tree,
    file_sizes,
    find_leaves,
    given_seed,
    open_files,
    rows_of_lane,
    walk,
)
from meshfeed._src.sources.huggingface.internals import Leaf, Node, function_name, kind_of, require_decoding, tree_of
from meshfeed._src.sources.huggingface.table import content_digest
from meshfeed._src.sources.stream import StreamLane
from meshfeed._src.sources.window_shuffle import WindowShuffle, shuffle_windows, window_of

_log = logging.getLogger("meshfeed.sources.huggingface")
_BLOCK_BYTES = 4 << 20
_MAX_LISTED = 4
_READ_THREADS = 4  # at most: pyarrow decodes lanes at the same time, but their rows are placed under one lock
# Settings of nodes that change the stream.
_SETTINGS = (
    *("batch_size", "batched", "drop_last_batch", "remove_columns", "input_columns", "with_indices", "column_names"),
    *("n", "num_times", "stopping_strategy", "probabilities", "step", "offset"),
)


_REMEDIES = {
    "epoch": "Open the lane of the epoch that the state was saved in.",
    "cut": "Open the lane over the files that the state was saved with.",
    "parts": "Pass the dataset in as many parts as when the state was saved (num_shards=, the lists of gen_kwargs).",
    "rows": "Pass the dataset with the rows that it had when the state was saved: the same rows in memory, seed= of "
    "interleave_datasets, and options that select rows, such as filters=.",
}


class HuggingFaceStream:
    """A ``datasets.IterableDataset`` as lanes that resume exactly.

    Args:
      dataset: a streaming dataset of one split; it is not modified and may be used elsewhere.
      columns: the columns of a record; None for all.
      shuffle_buffer: size of the shuffle buffer in records, over all lanes; 0 for none.

    Raises:
      SourceError: the dataset is already split by node, or has its own shuffle buffer.
      SettingsError: ``columns`` has a name that the dataset does not have.
    """

    def __init__(self, dataset: IterableDataset, columns: Sequence[str] | None, shuffle_buffer: int) -> None:
        self._tree = tree_of(dataset)
        check_tree(self._tree)
        known = None if dataset.features is None else list(dataset.features)
        missing = [name for name in columns or () if known is not None and name not in known]
        if missing:
            raise SettingsError(f"unknown columns {missing}; the dataset has {known}.", setting="columns")
        self._dataset = dataset
        self._columns = list(columns) if columns is not None else known
        self._shuffle_buffer = shuffle_buffer
        self._warned: set[int] = set()
        self._counts: dict[int, Counts] = {}
        self._converts = True
        self._version = CUT_EVENLY

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counts": {}}  # keyed by id(), which is only valid in this process

    def unconverted(self) -> HuggingFaceStream:
        """Returns the stream with its records as they are stored, such as with text."""
        other = copy.copy(self)
        other._converts = False
        return other

    @functools.cached_property
    def _digests(self) -> dict[str, str]:
        """What lanes are made of, beside the fingerprint: the parts of the leaves, and what decides their rows.

        Seeds of choices among datasets, options of readers, and a few rows of what is in memory.
        """
        parts: list[object] = []
        rows: list[object] = [given_seed(node) for node in walk(self._tree) if kind_of(node) == internals.AT_RANDOM]
        for leaf in find_leaves(self._tree):
            files = open_files(leaf, None)
            shards: Sequence[Dataset] = () if files.paths else getattr(files, "shards", ())
            parts.append([getattr(leaf, "num_shards", None), [*map(len, shards)]])
            ends = [shard for shard in (*shards[:1], *shards[-1:]) if len(shard)]
            rows.append([Leaf(leaf).row_options, [content_digest(shard, shard.column_names) for shard in ends]])
        return {"parts": _digest(parts), "rows": _digest(rows)}

    def open(
        self, lane_index: int, num_lanes: int, epoch: int = 0, seed: int = 0
    ) -> TableLane | ExampleLane | StreamLane | WindowShuffle:
        """The records of lane ``lane_index`` of ``num_lanes``, from the beginning: dicts of numpy values.

        With ``shuffle_buffer``, ``seed`` and ``epoch`` determine their order. The lane has ``get_state`` and
        ``set_state`` unless a node's state is not exact.
        """
        shuffled = self._shuffle_buffer > 0
        cut = LaneCut(
            lane_index, num_lanes, seed, epoch, shuffled, self._version, counts=self._counts, digests=self._digests
        )
        tree = cut_tree(self._tree, cut, self._columns)
        self._warn(cut)
        lane = self._lane(tree, cut)
        if not self._shuffle_buffer:
            return lane
        window = window_of(self._shuffle_buffer, num_lanes)
        if self._shuffle_buffer < 2 * num_lanes and lane_index == 0:
            _log.warning(
                "shuffle_buffer=%d over %d lanes is less than two records per lane: each shuffles windows of %d, and the "
                "order of its files; use at least %d, preferably some thousands",
                *(self._shuffle_buffer, num_lanes, window, 2 * num_lanes),
            )
        return shuffle_windows(lane, window, (seed, epoch, lane_index))

    @property
    def read_threads(self) -> int | None:
        """Threads that read by default, if pyarrow decodes the files and no function in Python runs on the rows."""
        functions = any(map(internals.function_of, walk(self._tree)))
        if not self._converts or functions or not self._is_table(self._tree):
            return None
        cpus = available_cpus()
        return min(cpus, max(2, cpus // 2), _READ_THREADS)

    def check_lanes(self, num_lanes: int) -> None:
        """Checks that all lanes together give each record as often as the dataset does; see :func:`check_repeats`."""
        if num_lanes > 1:
            check_repeats(self._tree, num_lanes)

    def cut_version(self, num_lanes: int) -> int:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`."""
        cut = LaneCut(0, num_lanes, version=CUT_EVENLY, counts=self._counts)
        cut_tree(self._tree, cut, self._columns)
        return CUT_EVENLY if "even" in cut.units else CUT_BY_FILES

    def with_cut(self, version: int) -> HuggingFaceStream:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`."""
        other = copy.copy(self)
        other._version = version
        return other

    def lane_lengths(self, num_lanes: int) -> list[int] | None:
        """See :class:`meshfeed._src.base.hooks.CountsLanes`: rows of the lane's files, before any filter."""
        if len(find_leaves(self._tree)) != 1:
            return None
        cuts = [LaneCut(lane, num_lanes, version=self._version, counts=self._counts) for lane in range(num_lanes)]
        lengths = [rows_of_lane(cut_tree(self._tree, cut, self._columns)) for cut in cuts]
        known = [length for length in lengths if length is not None]
        return known if len(known) == num_lanes else None

    def __repr__(self) -> str:
        return f"HuggingFace({type(self._dataset).__name__})"

    def file_names(self) -> list[str]:
        """Paths and URLs of the dataset's files."""
        return [path for leaf in find_leaves(self._tree) for path in open_files(leaf, None).paths or ()]

    def fingerprint(self) -> JsonValue:
        """Identity: files by base name and size, columns, and the dataset's steps with their function names."""
        paths: list[str] = []
        sizes: list[int] = []
        rows = 0
        for leaf in find_leaves(self._tree):
            files = open_files(leaf, None)
            paths += files.paths or ()
            sizes += file_sizes(leaf, files.paths or ())
            rows += sum(map(len, getattr(files, "shards", ())))
        identity: dict[str, Any] = {
            "kind": "huggingface stream",
            "columns": self._columns,
            "structure": [_describe_node(node) for node in walk(self._tree)],
            "shuffle_buffer": self._shuffle_buffer,
        }
        if paths:
            identity["files"] = file_paths.identify_files(paths, sizes)
        if rows:
            identity["rows"] = rows
        return identity

    def _is_table(self, tree: Node) -> bool:
        """Whether rows are read as Arrow tables, without becoming Python objects."""
        features = self._dataset.features
        decoded = any(require_decoding(features[name]) for name in self._columns or features) if features else False
        return tree.iter_arrow is not None and not decoded

    def _lane(self, tree: Node, cut: LaneCut) -> TableLane | ExampleLane | StreamLane:
        if self._is_table(tree):
            lane = TableLane(tree, cut, self._columns, self._dataset.features)
        else:
            lane = ExampleLane(internals.dataset_of(tree, self._dataset), cut, self._columns)
        exact = all(map(internals.has_exact_state, walk(tree)))
        if exact and self._converts:
            return lane
        return StreamLane(lane, None if self._converts else lane.next_stored, stateful=exact)  # not stacked

    def _warn(self, cut: LaneCut) -> None:
        if not cut.costs or cut.num_lanes in self._warned:
            return
        self._warned.add(cut.num_lanes)  # warn once, not once per lane
        # Names of files need not be UTF-8, which a log file is.
        listed = "; ".join(cut.costs[:_MAX_LISTED]).encode(errors="backslashreplace").decode()
        more = f"; and {len(cut.costs) - _MAX_LISTED} more" if len(cut.costs) > _MAX_LISTED else ""
        _log.warning(
            "read amplification with %d lanes: %s%s. A number of files, or of Parquet row groups, that num_lanes= "
            "divides is read once, as are all files with one lane.",
            *(cut.num_lanes, listed, more),
        )


def _digest(value: JsonValue) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _describe_node(node: Node) -> JsonValue:
    """A description of a node of a streaming dataset: its class, its function's name and its settings."""
    settings = {}
    for name in _SETTINGS:
        value = getattr(node, name, None)
        if value is not None:
            settings[name] = value if isinstance(value, bool | int | float | str) else [str(item) for item in value]
    function = internals.function_of(node)
    if function is not None:
        settings["function"] = function_name(function)
    return [kind_of(node), settings]


class _Lane:
    """Common parts of both kinds of lane: the error that ended the lane, and the checks of a state."""

    def __init__(self, cut: LaneCut, columns: Sequence[str] | None) -> None:
        self._lane_index, self._columns = cut.lane_index, columns
        self._about = {"epoch": cut.epoch, "cut": cut.units, **cut.digests}
        self._digests = cut.digests
        self._error: BaseException | None = None

    def __iter__(self) -> Self:
        return self

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken.

        Raises:
          StateMismatchError: the state is of a different epoch or of other parts, or the files were split differently.
        """
        for field, current in self._about.items():
            # Earlier versions stored no digests.
            if state.get(field, current if field in self._digests else None) != current:
                raise StateMismatchError(
                    f"lanes.{self._lane_index}.{field}", state.get(field), current, _REMEDIES[field]
                )
        self.close()
        self._restore(state)
        self._error = None

    def _restore(self, state: JsonValue) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Closes the files."""
        raise NotImplementedError

    def _fail(self, error: BaseException) -> BaseException:
        # After an error, the iterators of datasets would skip examples or end silently: keep the error.
        self._error = error
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
            # What Python makes of a StopIteration that the user's function raises within a generator of datasets.
            lane_index = self._lane_index
            self._error = stopped(f"a function of the dataset, in lane {lane_index},", lane_index=lane_index)
        return self._error


class TableLane(_Lane):
    """A lane whose dataset yields Arrow tables, through ``tree``; no row becomes a Python object."""

    fresh_arrays = True  # views of tables read from files, copies of other tables

    def __init__(self, tree: Node, cut: LaneCut, columns: Sequence[str] | None, features: Features | None) -> None:
        super().__init__(cut, columns)
        self._tree = tree
        self._foreign = any(_makes_tables(node) for node in walk(tree))
        self._cast = FeatureCast(features)
        self._decode = functools.partial(table_rows, lane_index=cut.lane_index)
        internals.start(tree)
        self._tables: Iterator[tuple[object, pa.Table]] = _tables_of(tree)
        self._table: pa.Table | None = None
        self._before: Any = tree.state_dict()  # state of the tree before `_table`
        self._row = 0  # next row of `_table`
        self._block: Any = None  # arrays of rows [_block_start, _block_stop) of the table
        self._block_start = self._block_stop = 0

    def __next__(self) -> dict[str, PyTree]:
        row = self._ready(self._decode) - self._block_start
        self._row += 1
        return _rows_of(self._block, row)

    def next_batch(self, num_records: int) -> dict[str, PyTree]:
        """Up to ``num_records`` records as arrays ``[n, ...]``, n at least 1.

        Raises:
          StopIteration: the lane has ended.
          SourceError: a null, text, or ragged lists.
        """
        parts, size = [], 0
        while size < num_records:
            try:
                start = self._ready(self._decode) - self._block_start
            except Exception:
                if parts:  # return the records before the error; the next call raises it again
                    break
                raise
            count = min(num_records - size, self._block_stop - self._row)
            part = _rows_of(self._block, slice(start, start + count))
            if self._foreign:
                part = trees.map_leaves(own, part)
            if parts and not _alike(parts[0], part):  # such as lists of a different length: end the batch here
                break
            parts.append(part)
            self._row += count
            size += count
        return parts[0] if len(parts) == 1 else trees.map_leaves(lambda *leaves: np.concatenate(leaves), *parts)

    def next_stored(self) -> dict[str, Any]:
        """The next record as it is stored; not to be mixed with the other methods."""
        row = self._ready(_stored_rows) - self._block_start
        self._row += 1
        return self._block[row]

    def get_state(self) -> JsonValue:
        """State after the last record returned."""
        return {**self._about, "before": self._before, "row": self._row}

    def _restore(self, state: JsonValue) -> None:
        internals.start(self._tree)
        self._tree.load_state_dict(state["before"])
        self._tables = _tables_of(self._tree)
        self._before, self._row = state["before"], state["row"]

    def close(self) -> None:
        hooks.close(self._tables)
        self._tables = iter(())
        self._forget(None)

    def _ready(self, decode: Callable[[pa.Table, int, int], Any]) -> int:
        """Decodes the block of the next row if necessary, and returns the row's index in the table."""
        if self._block_start <= self._row < self._block_stop:
            return self._row
        if self._error is not None:
            raise self._error.with_traceback(None)
        try:
            while self._table is None or self._row >= len(self._table):
                self._next_table()
            self._decode_block(decode)
        except StopIteration:
            raise
        except SourceError as error:
            error.lane_index = self._lane_index
            raise self._fail(error) from None
        except Exception as error:
            raise self._fail(error)  # noqa: B904  # an error that it replaces stays its context
        return self._row

    def _next_table(self) -> None:
        fresh = self._table is None  # the first table, or the one in which the restored state was taken
        # Taken before next(), since a restore must read this table again.
        before = self._before if fresh else self._tree.state_dict()
        _, table = next(self._tables, (None, None))
        if not fresh:
            self._before, self._row = before, 0
        self._forget(None if table is None else self._typed(table))
        if table is None:
            raise StopIteration

    def _forget(self, table: pa.Table | None) -> None:
        """Continues with ``table``, without a decoded block."""
        self._table, self._block = table, None
        self._block_start = self._block_stop = 0

    def _typed(self, table: pa.Table) -> pa.Table:
        if self._columns is not None:
            check_columns(table.column_names, self._columns, lane_index=self._lane_index)
            table = table.select(list(self._columns))
        return self._cast(table)

    def _decode_block(self, decode: Callable[[pa.Table, int, int], Any]) -> None:
        assert self._table is not None
        rows = max(1, _BLOCK_BYTES * len(self._table) // max(self._table.nbytes, 1))
        stop = min(self._row + rows, len(self._table))
        try:
            block = decode(self._table, self._row, stop)
        except SourceError:
            # Some row is bad. Decode one row at a time, which delivers the good rows before it first.
            stop = self._row + 1
            block = decode(self._table, self._row, stop)
        self._block, self._block_start, self._block_stop = block, self._row, stop


def _stored_rows(table: pa.Table, start: int, stop: int) -> list[dict[str, Any]]:
    part = table.slice(start, stop - start)
    columns = [stored_values(column) for column in part.columns]
    return [dict(zip(part.column_names, values, strict=True)) for values in zip(*columns, strict=True)]


def _tables_of(tree: Node) -> Iterator[tuple[object, pa.Table]]:
    assert tree.iter_arrow is not None
    return tree.iter_arrow()


class ExampleLane(_Lane):
    """A lane whose ``dataset`` runs Python functions on rows (``map``, ``filter``), or decodes images and audio."""

    def __init__(self, dataset: IterableDataset, cut: LaneCut, columns: Sequence[str] | None) -> None:
        super().__init__(cut, columns)
        self._dataset = dataset  # only this lane iterates it
        self._dtypes = dtypes_of(dataset.features and dataset.features.arrow_schema)
        self._examples: Iterator[dict[str, Any]] = iter(dataset)
        self._restored: Any = dataset.state_dict()  # used until the first record; then the dataset's own state is right

    def __next__(self) -> dict[str, PyTree]:
        return self._next(functools.partial(record_to_numpy, dtypes=self._dtypes))

    def next_stored(self) -> dict[str, Any]:
        """The next record as the dataset makes it."""
        return self._next(chosen)

    def _next(self, convert: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        if self._error is not None:
            raise self._error.with_traceback(None)
        try:
            example = next(self._examples)
            self._restored = None
            return convert(example, self._columns, lane_index=self._lane_index)
        except StopIteration:
            raise
        except Exception as error:
            raise self._fail(error)  # noqa: B904  # an error that it replaces stays its context

    def get_state(self) -> JsonValue:
        """State after the last record returned."""
        return {**self._about, "dataset": self._restored or self._dataset.state_dict()}

    def _restore(self, state: JsonValue) -> None:
        self._dataset.load_state_dict(state["dataset"])
        self._examples = iter(self._dataset)
        self._restored = state["dataset"]

    def close(self) -> None:
        hooks.close(self._examples)
        self._examples = iter(())
        for node in walk(internals.private(self._dataset, "ex_iterable")):
            internals.end_tasks(node)


def _makes_tables(node: Node) -> bool:
    """Whether a node yields in-memory tables that the user may also hold: from a function or an in-memory dataset."""
    files = getattr(node, "files", None)
    return internals.function_of(node) is not None or (files is not None and files.paths is None)


def _rows_of(block: dict[str, PyTree], rows: int | slice) -> dict[str, PyTree]:
    # Almost all columns are plain arrays, and jax.tree.map costs more than slicing one.
    return {
        name: value[rows] if isinstance(value, np.ndarray) else trees.map_leaves(lambda leaf: leaf[rows], value)
        for name, value in block.items()
    }


def _alike(first: PyTree, second: PyTree) -> bool:
    shapes, others = ([(leaf.shape[1:], leaf.dtype) for leaf in trees.leaves(part)] for part in (first, second))
    return shapes == others
