"""Streaming Hugging Face datasets as lanes."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import numpy as np
import pyarrow as pa
from datasets import Features, IterableDataset

from meshfeed._src.base.errors import SettingsError, SourceError, StateMismatchError
from meshfeed._src.base.ownership import own
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.huggingface import internals
from meshfeed._src.sources.huggingface.arrow import chosen, record_to_numpy, stored_values, table_rows
from meshfeed._src.sources.huggingface.cut import LaneCut, check_tree, cut_tree, find_leaves, walk
from meshfeed._src.sources.huggingface.files import Counts, file_sizes, open_files
from meshfeed._src.sources.huggingface.fingerprint import describe_node
from meshfeed._src.sources.huggingface.internals import Node, cast_table_to_features, require_decoding, tree_of
from meshfeed._src.sources.window_shuffle import WindowShuffle, shuffle_windows, window_of

_BLOCK_BYTES = 4 << 20


class _Lane:
    """Common parts of both kinds of lane: the error that ended the lane, and the checks of a state."""

    def __init__(self, lane_index: int, epoch: int, units: Sequence[str]) -> None:
        self._lane_index = lane_index
        self._about = {"epoch": epoch, "cut": list(units)}
        self._error: BaseException | None = None

    def __iter__(self) -> Self:
        return self

    def _check(self, state: JsonValue) -> None:
        for field, current in self._about.items():
            if state.get(field) != current:
                raise StateMismatchError(
                    f"lanes.{self._lane_index}.{field}",
                    state.get(field),
                    current,
                    "Open the lane of the epoch that the state was saved in, over the same files.",
                )

    def _fail(self, error: BaseException) -> BaseException:
        # After an error, the iterators of datasets would skip examples or end silently: keep the error.
        self._error = error
        return error


class TableLane(_Lane):
    """A lane whose dataset yields Arrow tables; no row becomes a Python object.

    Args:
      tree: the lane's part of the dataset's tree.
      columns: the columns of a record; None for all.
      features: the dataset's features; None if unknown.
      lane_index: index of the lane, for errors.
      epoch: the feed's epoch.
      units: how the files were split, for the state.
    """

    fresh_arrays = True  # views of tables read from files, copies of other tables

    def __init__(
        self,
        tree: Node,
        columns: Sequence[str] | None,
        features: Features | None,
        lane_index: int,
        epoch: int,
        units: Sequence[str],
    ) -> None:
        super().__init__(lane_index, epoch, units)
        self._tree = tree
        self._foreign = any(_makes_tables(node) for node in walk(tree))
        self._columns = columns
        self._features = features
        self._typed_as: tuple[Features, pa.Schema] | None = None
        internals.start(tree)
        self._tables: Iterator[tuple[object, pa.Table]] = _tables_of(tree)
        self._table: pa.Table | None = None
        self._before: Any = tree.state_dict()  # state of the tree before `_table`
        self._row = 0  # next row of `_table`
        self._block: Any = None  # arrays of rows [_block_start, _block_stop) of the table
        self._block_start = self._block_stop = 0

    def __next__(self) -> dict[str, PyTree]:
        row = self._ready() - self._block_start
        self._row += 1
        return {
            name: value[row] if isinstance(value, np.ndarray) else jax.tree.map(lambda leaf: leaf[row], value)
            for name, value in self._block.items()
        }

    def next_batch(self, num_records: int) -> dict[str, PyTree]:
        """Up to ``num_records`` records as arrays ``[n, ...]``, n at least 1.

        Raises:
          StopIteration: the lane has ended.
          SourceError: a null, text, or ragged lists.
        """
        parts, size = [], 0
        while size < num_records:
            try:
                start = self._ready() - self._block_start
            except (StopIteration, Exception):
                if parts:  # return the records before the error; the next call raises it again
                    break
                raise
            count = min(num_records - size, self._block_stop - self._row)
            part = _rows_of(self._block, start, start + count)
            if self._foreign:
                part = jax.tree.map(own, part)
            if parts and not _alike(parts[0], part):  # such as lists of a different length: end the batch here
                break
            parts.append(part)
            self._row += count
            size += count
        return parts[0] if len(parts) == 1 else _concatenate(parts)

    def next_stored(self) -> dict[str, Any]:
        """The next record as it is stored; not to be mixed with the other methods."""
        row = self._ready(_stored_rows) - self._block_start
        self._row += 1
        return self._block[row]

    def get_state(self) -> JsonValue:
        """State after the last record returned."""
        return {**self._about, "before": self._before, "row": self._row}

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken.

        Raises:
          StateMismatchError: the state is of a different epoch, or the files were split differently.
        """
        self._check(state)
        self.close()
        internals.start(self._tree)
        self._tree.load_state_dict(state["before"])
        self._tables = _tables_of(self._tree)
        self._before, self._row = state["before"], state["row"]
        self._error = None

    def close(self) -> None:
        """Closes the files."""
        close = getattr(self._tables, "close", None)
        if close is not None:
            close()
        self._tables = iter(())
        self._table = self._block = None
        self._block_start = self._block_stop = 0

    def _ready(self, decode: Callable[[pa.Table, int, int], Any] = table_rows) -> int:
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
            raise self._fail(error) from None
        return self._row

    def _next_table(self) -> None:
        fresh = self._table is None  # the first table, or the one in which the restored state was taken
        # Taken before next(), since a restore must read this table again.
        before = self._before if fresh else self._tree.state_dict()
        try:
            _, table = next(self._tables)
        except StopIteration:
            if not fresh:
                self._before, self._row, self._table = before, 0, None
                self._block_start = self._block_stop = 0
            raise
        if not fresh:
            self._row = 0
        self._before, self._table = before, self._typed(table)
        self._block_start = self._block_stop = 0

    def _typed(self, table: pa.Table) -> pa.Table:
        if self._columns is not None:
            missing = [name for name in self._columns if name not in table.column_names]
            if missing:
                raise SourceError(
                    f"a record of lane {self._lane_index} has no column {missing[0]!r}; it has {table.column_names}. "
                    f"Expected the columns {list(self._columns)}. Correct columns=, or the map() that makes records.",
                    lane_index=self._lane_index,
                )
            table = table.select(list(self._columns))
        if self._features is None:
            return table
        if self._typed_as is None or self._typed_as[1].names != table.column_names:
            features = Features({name: self._features[name] for name in table.column_names if name in self._features})
            self._typed_as = features, features.arrow_schema
        features, schema = self._typed_as
        if len(features) != table.num_columns or table.schema == schema:
            return table
        return cast_table_to_features(table, features)

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
    return iter(tree.iter_arrow())


class ExampleLane(_Lane):
    """A lane whose dataset runs Python functions on rows (``map``, ``filter``), or decodes images and audio.

    Args:
      dataset: the lane's part of the dataset; only this lane iterates it.
      columns: the columns of a record; None for all.
      lane_index: index of the lane, for errors.
      epoch: the feed's epoch.
      units: how the files were split, for the state.
    """

    def __init__(
        self, dataset: IterableDataset, columns: Sequence[str] | None, lane_index: int, epoch: int, units: Sequence[str]
    ) -> None:
        super().__init__(lane_index, epoch, units)
        self._dataset = dataset
        self._columns = columns
        self._dtypes = _dtypes_of(dataset.features)
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
            raise self._fail(error) from None

    def get_state(self) -> JsonValue:
        """State after the last record returned."""
        return {**self._about, "dataset": self._restored or self._dataset.state_dict()}

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken.

        Raises:
          StateMismatchError: the state is of a different epoch, or the files were split differently.
        """
        self._check(state)
        self.close()
        self._dataset.load_state_dict(state["dataset"])
        self._examples = iter(self._dataset)
        self._restored = state["dataset"]
        self._error = None

    def close(self) -> None:
        """Closes the files."""
        close = getattr(self._examples, "close", None)
        if close is not None:
            close()
        self._examples = iter(())


class StoredLane:
    """The records of a lane as they are stored, for functions that turn them into arrays."""

    def __init__(self, lane: TableLane | ExampleLane) -> None:
        self._lane = lane
        self.get_state, self.set_state, self.close = lane.get_state, lane.set_state, lane.close

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        return self._lane.next_stored()


class ReplayedLane:
    """A lane without a state, for nodes of datasets whose state is not exact; it resumes by reading again."""

    def __init__(self, lane: TableLane | ExampleLane | StoredLane) -> None:
        self._lane = lane

    def __iter__(self) -> ReplayedLane:
        return self

    def __next__(self) -> dict[str, PyTree]:
        return next(self._lane)

    def close(self) -> None:
        """Closes the files."""
        self._lane.close()


def _makes_tables(node: Node) -> bool:
    """Whether a node yields in-memory tables that the user may also hold: from a function or an in-memory dataset."""
    files = getattr(node, "files", None)
    return internals.function_of(node) is not None or (files is not None and files.paths is None)


def _rows_of(block: dict[str, PyTree], start: int, stop: int) -> dict[str, PyTree]:
    # Almost all columns are plain arrays, and jax.tree.map costs more than slicing one.
    return {
        name: value[start:stop] if isinstance(value, np.ndarray) else jax.tree.map(lambda leaf: leaf[start:stop], value)
        for name, value in block.items()
    }


def _concatenate(parts: Sequence[dict[str, PyTree]]) -> dict[str, PyTree]:
    return {
        name: np.concatenate([part[name] for part in parts])
        if isinstance(value, np.ndarray)
        else jax.tree.map(lambda *leaves: np.concatenate(leaves), *(part[name] for part in parts))
        for name, value in parts[0].items()
    }


def _alike(first: PyTree, second: PyTree) -> bool:
    a, b = jax.tree.leaves(first), jax.tree.leaves(second)
    return len(a) == len(b) and all(
        x.shape[1:] == y.shape[1:] and x.dtype == y.dtype for x, y in zip(a, b, strict=True)
    )


def _dtypes_of(features: Features | None) -> dict[str, np.dtype]:
    """Numpy dtypes of the columns that hold numbers or lists of numbers."""
    found = {}
    for name, feature in (features or {}).items():
        inner = feature
        while not isinstance(inner, dict | list) and getattr(inner, "feature", None) is not None:
            inner = inner.feature
        arrow_type = getattr(inner, "pa_type", None)
        if arrow_type is None or not isinstance(inner, object) or type(inner).__name__ not in ("Value", "ClassLabel"):
            continue
        if pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type) or pa.types.is_boolean(arrow_type):
            found[name] = np.dtype(arrow_type.to_pandas_dtype())
    return found


_log = logging.getLogger("meshfeed.sources.huggingface")
_MAX_LISTED = 4


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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counts": {}}  # keyed by id(), which is only valid in this process

    def unconverted(self) -> HuggingFaceStream:
        """Returns the stream with its records as they are stored, such as with text."""
        other = copy.copy(self)
        other._converts = False
        return other

    def open(
        self, lane_index: int, num_lanes: int, epoch: int = 0, seed: int = 0
    ) -> TableLane | ExampleLane | StoredLane | ReplayedLane | WindowShuffle:
        """The records of lane ``lane_index`` of ``num_lanes``, from the beginning.

        Args:
          lane_index: 0 … num_lanes - 1.
          num_lanes: number of lanes.
          epoch: the feed's epoch; with ``shuffle_buffer``, each epoch has a different order.
          seed: the feed's seed.

        Returns:
          An iterator of dicts of numpy values. It has ``get_state`` and ``set_state`` unless a node's state is not
          exact.
        """
        shuffles = self._shuffle_buffer > 0
        cut = LaneCut(lane_index, num_lanes, seed, epoch, shuffles, self._columns, counts=self._counts)
        tree = cut_tree(self._tree, cut)
        self._warn(cut)
        lane = self._lane(tree, cut)
        if not self._shuffle_buffer:
            return lane
        window = window_of(self._shuffle_buffer, num_lanes)
        if self._shuffle_buffer < 2 * num_lanes and lane_index == 0:
            _log.warning(
                "shuffle_buffer=%d over %d lanes is less than two records a lane: each shuffles windows of %d, and the "
                "order of its files; give at least %d, and better some thousands",
                self._shuffle_buffer,
                num_lanes,
                window,
                2 * num_lanes,
            )
        return shuffle_windows(lane, window, (seed, epoch, lane_index))

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
            rows += sum(len(shard) for shard in getattr(files, "shards", ()))
        identity: dict[str, Any] = {
            "kind": "huggingface stream",
            "columns": self._columns,
            "structure": [describe_node(node) for node in walk(self._tree)],
            "shuffle_buffer": self._shuffle_buffer,
        }
        if paths:
            identity["files"] = file_paths.identify_files(paths, sizes)
        if rows:
            identity["rows"] = rows
        return identity

    def _lane(self, tree: Node, cut: LaneCut) -> TableLane | ExampleLane | StoredLane | ReplayedLane:
        dataset, features = self._dataset, self._dataset.features
        chosen = {} if features is None else {name: features[name] for name in self._columns or features}
        lane: TableLane | ExampleLane | StoredLane
        if tree.iter_arrow is not None and not any(require_decoding(feature) for feature in chosen.values()):
            lane = TableLane(tree, self._columns, features, cut.lane_index, cut.epoch, cut.units)
        else:
            lane = ExampleLane(internals.dataset_of(tree, dataset), self._columns, cut.lane_index, cut.epoch, cut.units)
        lane = lane if self._converts else StoredLane(lane)
        return lane if all(map(internals.has_exact_state, walk(tree))) else ReplayedLane(lane)

    def _warn(self, cut: LaneCut) -> None:
        if not cut.costs or cut.num_lanes in self._warned:
            return
        self._warned.add(cut.num_lanes)  # warn once, not once per lane
        listed = "; ".join(cut.costs[:_MAX_LISTED])
        more = f"; and {len(cut.costs) - _MAX_LISTED} more" if len(cut.costs) > _MAX_LISTED else ""
        _log.warning(
            "read amplification with %d lanes: %s%s. A number of files, or of Parquet row groups, that num_lanes "
            "divides is read once.",
            cut.num_lanes,
            listed,
            more,
        )
