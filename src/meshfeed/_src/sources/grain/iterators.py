"""The iterators of lanes, in place of Grain's own: they keep little in memory, and all lanes of a process share one pool."""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, BinaryIO, TypeAlias

import grain
import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.base.threads import Call, Threads
from meshfeed._src.sources.checks import stopped
from meshfeed._src.sources.files.parquet import ParquetFile
from meshfeed._src.sources.grain import internals
from meshfeed._src.sources.grain.internals import GrainIterator, Pipeline, Records

_LENGTH = struct.Struct("<QI")  # TFRecord header: uint64 length, masked CRC of the length
_CRC_BYTES = 4
_MIN_WAIT_SECONDS = 1e-3  # per block; a shorter read is not worth a second thread
_NUM_THREADS = 16  # that one Grain iterator uses by default
_END = object()

_POOLS: weakref.WeakValueDictionary[int, Threads] = weakref.WeakValueDictionary()  # by process: forks have no threads
_POOLS_LOCK = threading.Lock()


class LaneLeaf(grain.IterDataset):
    """A dataset that makes one of the iterators below, with the given arguments."""

    def __init__(self, make: Callable[..., GrainIterator], *args: Any) -> None:
        super().__init__([arg for arg in args if isinstance(arg, grain.MapDataset)])
        self._make = make
        self._args = args

    def __iter__(self) -> GrainIterator:
        return self._make(*self._args)

    def __str__(self) -> str:
        return f"{self._make.__name__}{self._args}"


class ReadIterator(grain.DatasetIterator):
    """Reads a MapDataset from the beginning to the end, one block of elements at a time; skips missing elements.

    With ``read_ahead``, a thread reads the next block in the background if reading mostly waits: if it computes, the two
    threads would contend for the GIL, at some milliseconds per switch.
    """

    def __init__(self, records: Records, block_size: int, read_ahead: bool) -> None:
        super().__init__()
        self._ahead: tuple[int, Call[Sequence[Any]]] | None = None  # first: __del__ closes a partly constructed one too
        self._threads: Threads | None = None
        self._records, self._length = records, len(records)
        self._block_size, self._read_ahead = block_size, read_ahead
        self._waits = False
        self._block: Sequence[Any] = ()
        self._next_index = self._block_start = self._singly_until = 0
        internals.set_up(records)

    def __next__(self) -> Any:
        while self._next_index < self._length:
            offset = self._next_index - self._block_start
            if not 0 <= offset < len(self._block):
                self._load()
                offset = 0
            element = self._block[offset]
            self._next_index += 1
            if element is not None:
                return element
        raise StopIteration

    def _load(self) -> None:
        start = self._next_index
        stop = min(start + self._block_size, self._length)
        block: Sequence[Any] = ()
        if start >= self._singly_until:
            ahead, self._ahead = self._ahead, None
            try:
                block = ahead[1].result() if ahead is not None and ahead[0] == start else self._read(start, stop)
            except Exception:
                # Some element is unreadable. Read one by one: deliver those before it, then raise its own error.
                self._singly_until = stop
        if start < self._singly_until:
            try:
                block = [self._records[start]]
            except StopIteration as error:
                raise stopped(f"element {start} of the lane") from error
        self._block, self._block_start = block, start
        if start >= self._singly_until and self._read_ahead and self._waits and stop < self._length:
            self._threads = self._threads or _shared_threads()
            self._ahead = stop, self._threads.submit(self._read, stop, min(stop + self._block_size, self._length))

    def _read(self, start: int, stop: int) -> Sequence[Any]:
        began, worked = time.monotonic(), time.thread_time()
        block = internals.read_many(self._records, range(start, stop))
        seconds, working = time.monotonic() - began, time.thread_time() - worked
        # thread_time counts CPU time only: below half of the wall time, the read mostly waits.
        self._waits = seconds > _MIN_WAIT_SECONDS and working < seconds / 2
        return block

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next_index}

    def set_state(self, state: dict[str, Any]) -> None:
        if not 0 <= state["next_index"] <= self._length:
            raise IndexError(f"element {state['next_index']} of {self._length} elements")
        self._next_index = state["next_index"]
        self._block = ()  # a repeat() sets its own iterator back, whose functions may have written to the elements
        self._drop_ahead()

    def close(self) -> None:
        super().close()
        self._drop_ahead()

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._ahead = self._threads = None


def _shared_threads() -> Threads:
    """The threads of all lanes of this process, which end when no lane holds them any more."""
    with _POOLS_LOCK:
        return _POOLS.setdefault(os.getpid(), Threads(_NUM_THREADS, "meshfeed-grain"))


_Slot: TypeAlias = "tuple[int, GrainIterator]"
"""Index of a part, and its open iterator."""


class InterleaveIterator(grain.DatasetIterator):
    """Interleaves parts element by element, in the order of Grain's interleave but without its threads.

    ``make_part`` returns the IterDataset of a part, or None if it is missing; ``unit``, how the parts were split, is saved
    in the state.
    """

    def __init__(
        self, make_part: Callable[[int], Pipeline | None], num_parts: int, cycle_length: int, unit: str
    ) -> None:
        super().__init__()
        self._make_part, self._num_parts, self._unit = make_part, num_parts, unit
        self._slots: list[_Slot | None] = [None] * max(1, min(cycle_length, num_parts))
        self._next_slot = self._next_part = 0

    def __next__(self) -> Any:
        while self._next_part < self._num_parts or any(self._slots):
            slot = self._slots[self._next_slot]
            if slot is None and self._next_part < self._num_parts:
                slot = self._slots[self._next_slot] = self._open(self._next_part)
                self._next_part += 1
            element = _END if slot is None else next(slot[1], _END)
            if slot is not None and element is _END:
                slot[1].close()
                self._slots[self._next_slot] = None
            self._next_slot = (self._next_slot + 1) % len(self._slots)
            if element is not _END:
                return element
        raise StopIteration

    def _open(self, part_index: int) -> _Slot | None:
        try:
            part = self._make_part(part_index)
        except StopIteration as error:  # of the user's function that makes the datasets
            raise stopped(f"dataset {part_index} of the lane's interleave") from error
        if part is None:
            return None
        iterator = internals.skip_traceback_filter(part).__iter__()
        internals.inherit_options(self, iterator)
        return part_index, iterator

    def get_state(self) -> dict[str, Any]:
        return {
            "cut": self._unit,
            "next_slot": self._next_slot,
            "next_part": self._next_part,
            "slots": [None if slot is None else [slot[0], slot[1].get_state()] for slot in self._slots],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        if len(state["slots"]) != len(self._slots) or state["cut"] != self._unit:
            raise ValueError(f"parts cut by {state['cut']}, {len(state['slots'])} at a time")
        # New iterators: the lane stays as it is if one of them refuses its state.
        opened = [None if entry is None else self._open(entry[0]) for entry in state["slots"]]
        for entry, slot in zip(state["slots"], opened, strict=True):
            if slot is not None:
                slot[1].set_state(entry[1])
        self._close_slots()
        self._slots, self._next_slot, self._next_part = opened, state["next_slot"], state["next_part"]

    def close(self) -> None:
        super().close()
        self._close_slots()

    def _close_slots(self) -> None:
        for slot in filter(None, self._slots):
            slot[1].close()


class NotEmptyIterator(grain.DatasetIterator):
    """The elements of ``dataset`` below an endless repeat, which would start it over for ever if there are none."""

    def __init__(self, dataset: Pipeline) -> None:
        self._elements = dataset.__iter__()
        super().__init__(self._elements)
        self._is_repeated = False  # since the last element

    def __next__(self) -> Any:
        try:
            element = next(self._elements)
        except StopIteration:
            if self._is_repeated:
                raise SourceError(
                    "the lane has no element below repeat(), which would never end. Use fewer lanes (num_lanes=), or give "
                    "each lane data."
                ) from None
            self._is_repeated = True
            raise
        self._is_repeated = False
        return element

    def get_state(self) -> dict[str, Any]:
        return self._elements.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._elements.set_state(state)


class TFRecordIterator(grain.DatasetIterator):
    """Every ``num_lanes``-th record of a TFRecord file, starting at record ``lane_index``.

    A record's offset is known only from the record before it, so each lane reads all lengths and skips the data of
    other lanes' records.
    """

    def __init__(self, path: str, lane_index: int, num_lanes: int) -> None:
        super().__init__()
        self._path, self._lane_index, self._num_lanes = path, lane_index, num_lanes
        self._file: BinaryIO | None = None
        self._size = self._offset = self._record = 0

    def __next__(self) -> bytes:
        if self._file is None:
            self._file = open(self._path, "rb")  # noqa: SIM115  # stays open between records; close() closes it
            self._size = os.fstat(self._file.fileno()).st_size
            self._file.seek(self._offset)
        while True:
            header = self._file.read(_LENGTH.size)
            if not header:
                raise StopIteration
            length = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else -1
            end = self._offset + _LENGTH.size + length + _CRC_BYTES
            if length < 0 or end > self._size:
                raise CorruptDataError(
                    f"record {self._record} of {self._path} begins at byte {self._offset} and would end at byte {end}, "
                    f"but the file has {self._size} bytes. Expected TFRecords, uncompressed and whole. The file is cut "
                    "short or is something else.",
                    path=str(self._path),
                )
            mine = self._record % self._num_lanes == self._lane_index
            data = self._file.read(length) if mine else b""
            self._file.seek(end)
            self._offset, self._record = end, self._record + 1
            if mine:
                return data

    def get_state(self) -> dict[str, Any]:
        return {"offset": self._offset, "record": self._record}

    def set_state(self, state: dict[str, Any]) -> None:
        self._offset, self._record = state["offset"], state["record"]
        if self._file is not None:
            self._file.seek(self._offset)

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()
        self._file = None


_Block: TypeAlias = "tuple[int, int, dict[str, Any]]"
"""First row in the file, row after the last, columns."""


class ParquetIterator(grain.DatasetIterator):
    """Rows ``[start, stop)`` of one Parquet file, each as a dict of column values; its state is the next row.

    Decodes ``block_rows`` at a time; ``options`` are those of ``pyarrow.parquet.ParquetFile``.
    """

    def __init__(self, path: str, start: int, stop: int | None, block_rows: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._path, self._stop, self._block_rows, self._options = path, stop, block_rows, options
        self._blocks: Generator[_Block, None, None] | None = None
        self._columns: dict[str, Any] = {}
        self._row = self._block_start = self._block_stop = start

    def __next__(self) -> dict[str, Any]:
        while not self._block_start <= self._row < self._block_stop:
            self._blocks = self._blocks or self._read_from(self._row)
            try:
                self._block_start, self._block_stop, self._columns = next(self._blocks)
            except Exception as error:
                if not isinstance(error, StopIteration):
                    self._drop_block()  # a generator that has raised would end silently on the next call
                raise
        offset = self._row - self._block_start
        self._row += 1
        return {name: column[offset] for name, column in self._columns.items()}

    def _read_from(self, row: int) -> Generator[_Block, None, None]:
        """Blocks of rows, starting at ``row``."""
        with ParquetFile(self._path, **self._options) as file:
            first = 0
            for group, count in enumerate(file.group_rows):
                stop = first + count if self._stop is None else min(first + count, self._stop)
                if max(row, first) < stop:
                    yield from self._read_group(file, group, first, max(row, first), stop)
                first += count

    def _read_group(
        self, file: ParquetFile, group: int, first: int, row: int, stop: int
    ) -> Generator[_Block, None, None]:
        if not _may_hold_nulls(file, group):
            for start, batch in file.batches(row, stop, batch_rows=self._block_rows):
                yield start, start + batch.num_rows, _to_numpy(batch)
            return
        # Arrow converts integers with nulls to floats per block, so a row's dtype would depend on the block boundaries:
        # decode the whole row group instead.
        columns = _to_numpy(file.read_group(group))
        yield row, stop, {name: column[row - first : stop - first] for name, column in columns.items()}

    def get_state(self) -> dict[str, Any]:
        return {"row": self._row}

    def set_state(self, state: dict[str, Any]) -> None:
        self._row = state["row"]
        if not self._block_start <= self._row < self._block_stop:
            self._drop_block()

    def close(self) -> None:
        super().close()
        self._drop_block()

    def _drop_block(self) -> None:
        if self._blocks is not None:
            self._blocks.close()  # which closes the file
        self._blocks, self._columns, self._block_start, self._block_stop = None, {}, 0, 0


class _Lists:
    """Rows of a list column as views of its values; Arrow would make one Python object per row, which takes 1 ms."""

    def __init__(self, values: np.ndarray, bounds: np.ndarray) -> None:
        self._values = values
        self._bounds = bounds

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return _Lists(self._values, self._bounds[row.start : row.stop + 1])
        return self._values[self._bounds[row] : self._bounds[row + 1]]


def _to_numpy(rows: Any) -> dict[str, Any]:
    columns = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        array = column.combine_chunks() if hasattr(column, "chunks") else column
        columns[name] = _lists(array) or array.to_numpy(zero_copy_only=False)
    return columns


def _lists(column: Any) -> _Lists | None:
    """A list column of numbers without nulls; None for other columns."""
    from pyarrow import types

    kind = column.type
    if not hasattr(column, "flatten") or not getattr(kind, "num_fields", 0) or column.null_count:
        return None
    if types.is_fixed_size_list(kind):
        bounds = np.arange(len(column) + 1) * kind.list_size
    elif types.is_list(kind) or types.is_large_list(kind):
        bounds = column.offsets.to_numpy()
        bounds = bounds - bounds[0]
    else:
        return None
    values = column.flatten()
    if values.null_count or not (types.is_integer(values.type) or types.is_floating(values.type)):
        return None
    return _Lists(values.to_numpy(), bounds)


def _may_hold_nulls(file: ParquetFile, group: int) -> bool:
    columns = file.metadata.row_group(group)
    for index in range(columns.num_columns):
        if file.metadata.schema.column(index).max_definition_level == 0:  # a required column cannot hold nulls
            continue
        # Without statistics, assume that there are nulls.
        statistics = columns.column(index).statistics
        if statistics is None or not statistics.has_null_count or statistics.null_count:
            return True
    return False
